"""How far a batch of runs is, and how long it will still take if each takes what it took before.

`4 of 12 notebooks, 4:10, about 6:30 left`: the slots are simulated, each taking the next one that waits, as the runner
does. Where no run of a notebook ever finished, the time left is unknown until one does.

Footgun: the time of a run is that of its last attempt. One that was continued took longer than it says.
"""

import math
import time
from collections.abc import Sequence


class Pace:
    def __init__(self, names: Sequence[str], expected: Sequence[float], order: Sequence[int], slots: int):
        """Notebook and expected seconds of each job, inf where nobody knows, and the order in which they start."""
        self.names, self.expected, self.waiting, self.slots = names, list(expected), list(order), slots
        self.running: dict[int, float] = {}
        self.began, self.ended = time.monotonic(), 0
        self.what = "notebooks" if len(set(names)) == len(names) else "runs"

    def starts(self, number: int) -> None:
        self.waiting.remove(number)
        self.running[number] = time.monotonic()

    def ends(self, number: int, seconds: float | None) -> None:
        """What a finished run took is what the next ones of its notebook will take, where nothing else is known."""
        self.running.pop(number)
        self.ended += 1
        if seconds is not None:
            pairs = zip(self.names, self.expected)
            self.expected = [seconds if name == self.names[number] and s == math.inf else s for name, s in pairs]

    def left(self) -> float:
        """Seconds until the last one ends; inf where nobody knows, or where one that runs takes longer than before."""
        now = time.monotonic()
        busy = [self.expected[number] - (now - since) for number, since in list(self.running.items())]
        if any(seconds < 0 for seconds in busy):
            return math.inf
        busy += [0.0] * (self.slots - len(busy))
        for number in list(self.waiting):
            first = busy.index(min(busy))
            busy[first] += self.expected[number]
        return max(busy)

    def __str__(self) -> str:
        left = self.left()
        rest = f"about {clock(left)} left" if left < math.inf else "time left unknown"
        ends = [] if self.ended == len(self.names) else [rest]
        return ", ".join(
            [f"{self.ended} of {len(self.names)} {self.what}", clock(time.monotonic() - self.began), *ends]
        )


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"
