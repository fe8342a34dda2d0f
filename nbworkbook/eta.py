"""How far a batch of runs is, and how long it will still take.

`4 of 12 notebooks, 4:10, about 6:30 left`: the slots are simulated, each takes the next job that
waits, as the runner does. How long a job takes is guessed from the first of these that there is:

    what runs of its notebook took in this batch
    what its last finished run took on this machine         (`measured`)
    the seconds that are stored in its notebook * ratio     (`published`)
    the mean of all other guesses

`ratio` is measured / published over what ended in this batch, and 1 before anything did. A job
that takes longer than its guess raises the ratio while it runs, and a tenth of what it took so far
is added to what is left of it.

Footgun: published seconds are those of the default parameters, on the machine that made the
outputs. With `--profile full` the time left is wrong until the first notebook has ended.
"""

import threading
import time
from collections.abc import Iterable, Sequence

from nbworkbook.runs import clock


class Pace:
    """The jobs of a batch, which of them wait and run, and the seconds that each takes."""

    def __init__(
        self,
        names: Sequence[str],
        measured: Sequence[float | None],
        published: Sequence[float | None],
        slots: int,
    ) -> None:
        """Take the notebook of each job and its seconds, 0 where it is done, None if unknown."""
        self.names = list(names)
        self.measured = list(measured)
        self.published = list(published)
        self.slots = slots

        self.began = time.monotonic()
        self.first = 0.0  # seconds left of what is made before the first job
        self.running: dict[int, float] = {}  # the time at which each began, by its position
        self.took: dict[
            int, float
        ] = {}  # the seconds of those that were done without an interruption
        self.ended = 0
        self.lock = threading.RLock()

        self.waiting = list(range(len(self.names)))
        if slots > 1:
            self.waiting.sort(key=self._how_long, reverse=True)

    def _how_long(self, number: int) -> float:
        """Return the seconds to sort by; a job without any may be the longest."""
        for seconds in (self.measured[number], self.published[number]):
            if seconds is not None:
                return seconds
        return float("inf")

    def start_next(self) -> int | None:
        """Return the position of the job that starts now; None where no job waits."""
        with self.lock:
            if not self.waiting:
                return None
            number = self.waiting.pop(0)
            self.running[number] = time.monotonic()
            return number

    def end(self, number: int, seconds: float | None) -> None:
        """Note that a job ended, with its seconds if it ran from its beginning to its end."""
        with self.lock:
            del self.running[number]
            self.ended += 1
            if seconds is not None:
                self.took[number] = seconds

    def left(self) -> float | None:
        """Return the seconds until the last job ends; None where no job has a guess."""
        now = time.monotonic()
        with self.lock:
            guesses = self._guesses(now)
            if any(guesses[number] is None for number in (*self.running, *self.waiting)):
                return None

            # each slot is busy with its job, and then takes the next one that waits
            busy = [_rest(guesses[number], now - since) for number, since in self.running.items()]
            busy += [0.0] * (self.slots - len(busy))
            for number in self.waiting:
                soonest = busy.index(min(busy))
                busy[soonest] += guesses[number]
            return self.first + max(busy)

    def of(self, number: int) -> str:
        """Return how long this job has run, and how long it still will."""
        now = time.monotonic()
        with self.lock:
            guess = self._guesses(now)[number]
            elapsed = now - self.running.get(number, now)
        if guess is None:
            return clock(elapsed)
        return f"{clock(elapsed)}, about {clock(_rest(guess, elapsed))} left"

    def _guesses(self, now: float) -> list[float | None]:
        """Return the seconds that each job takes from its beginning to its end."""
        ratio = self._ratio(now)
        took: dict[str, list[float]] = {}
        for number, seconds in self.took.items():
            took.setdefault(self.names[number], []).append(seconds)

        guesses: list[float | None] = []
        for name, measured, published in zip(self.names, self.measured, self.published):
            if measured == 0:
                guesses.append(0.0)
            elif name in took:
                guesses.append(_mean(took[name]))
            elif measured is not None:
                guesses.append(measured)
            elif published is not None:
                guesses.append(published * ratio)
            else:
                guesses.append(None)

        usual = _mean(guess for guess in guesses if guess)
        return [usual if guess is None else guess for guess in guesses]

    def _ratio(self, now: float) -> float:
        """Return measured / published seconds."""
        pairs = [(seconds, self.published[number]) for number, seconds in self.took.items()]
        ratio = _quotient(pairs)

        for number, since in self.running.items():
            published = self.published[number]
            if self.measured[number] is None and published and now - since > ratio * published:
                pairs.append((now - since, published))
        return _quotient(pairs)

    def __str__(self) -> str:
        """Return the end of a line; of a single job only the time left, where that is known."""
        left = self.left()
        if len(self.names) == 1:
            return "" if left is None or self.ended else f"; about {clock(left)} left"
        return f"; {self.so_far(left)}"

    def so_far(self, left: float | None) -> str:
        """Return how many have ended, since when, and the time left."""
        what = "notebooks" if len(set(self.names)) == len(self.names) else "runs"
        text = f"{self.ended} of {len(self.names)} {what}, {clock(time.monotonic() - self.began)}"
        if self.ended == len(self.names):
            return text
        return f"{text}, time left unknown" if left is None else f"{text}, about {clock(left)} left"


def _rest(guess: float, elapsed: float) -> float:
    """Return the seconds left of a job; never none of one that still runs."""
    return max(guess - elapsed, elapsed / 10)


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def _quotient(pairs: Iterable[tuple[float, float | None]]) -> float:
    """Return sum of seconds / sum of published, over the pairs that have both; 1 without any."""
    pairs = [(seconds, published) for seconds, published in pairs if published]
    if not pairs:
        return 1.0
    return sum(seconds for seconds, _ in pairs) / sum(published for _, published in pairs)
