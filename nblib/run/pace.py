"""How far a batch of runs is, and how long it will still take if each takes what it took before.

`4 of 12 notebooks, 4:10, about 6:30 left`: the slots are simulated, each taking the next one that waits, as the runner
does. Where no run of a notebook ever finished, the time left is unknown until one does.

Footgun: the time of a run is that of its last attempt. One that was continued took longer than it says.
"""

import math
import time
from collections.abc import Sequence

from nblib.run.runs import clock


class Pace:
    def __init__(self, names: Sequence[str], expected: Sequence[float], waiting: list[int], slots: int):
        """Notebook and expected seconds of each job, inf where nobody knows; `waiting` is what is still to start."""
        self.names, self.expected, self.waiting, self.slots = names, list(expected), waiting, slots
        self.began, self.running, self.ended = time.monotonic(), dict[int, float](), 0

    def starts(self, number: int) -> None:
        self.running[number] = time.monotonic()

    def ends(self, number: int, seconds: float | None) -> None:
        """What a run that was done took is the guess for the others of its notebook, where nothing else is known."""
        self.running.pop(number)
        self.ended += 1
        if seconds is not None:
            pairs = zip(self.names, self.expected)
            self.expected = [seconds if s == math.inf and name == self.names[number] else s for name, s in pairs]

    def left(self) -> float:
        """Seconds until the last one ends; inf where nobody knows, or where one that runs takes longer than before."""
        now = time.monotonic()
        busy = [self.expected[number] - (now - since) for number, since in list(self.running.items())]
        if any(seconds < 0 for seconds in busy):
            return math.inf
        busy += [0.0] * (self.slots - len(busy))
        for number in list(self.waiting):
            busy[busy.index(min(busy))] += self.expected[number]
        return max(busy)

    def __str__(self) -> str:
        """For the end of a line; empty where there is only one job."""
        what = "notebooks" if len(set(self.names)) == len(self.names) else "runs"
        left = self.left()
        rest = f", about {clock(left)} left" if left < math.inf else ", time left unknown"
        so_far = f"{self.ended} of {len(self.names)} {what}, {clock(time.monotonic() - self.began)}"
        return f"; {so_far}{rest if self.ended < len(self.names) else ''}" if len(self.names) > 1 else ""
