"""Several runs in one cell: the page says which one is being made.

    for name in each(names, "trainings"):               3 of 6: bf16 weights, 12 s
    rows = [measure(kind) for kind in each(kinds)]       ... and at the end: 6 runs in 41 s

`Counting` is the line by itself, for runs without a loop: `with Counting("runs", of=2) as line:
line.says("resumed")`. The seconds count only where a person sits at the kernel. Headless nothing
that was measured stands in the line, so stored outputs repeat.

Footgun: what the body of the loop shows comes below the line, and one more line per run is soon a
page. Collect the results, and show one table after the loop.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from nblib import runtime
from nbworkbook import show


def each(
    things: Iterable[Any], what: str = "runs", *, name: Callable[[Any], str] | None = None
) -> Iterator[Any]:
    """Yield the things in turn, each called by its `name`; `what` names them all in the last
    line.
    """
    things = list(things)
    with Counting(what, of=len(things)) as line:
        for thing in things:
            line.says((name or label)(thing))
            yield thing


def label(thing: Any) -> str:
    """Return a thing in a few words: names and numbers as they are, several joined, a function by
    its name.
    """
    if isinstance(thing, (tuple, list)):
        return ", ".join(map(label, thing)) or "none"
    if isinstance(thing, dict):
        return ", ".join(f"{name} {label(value)}" for name, value in thing.items())
    return getattr(thing, "__name__", None) or show.cell(thing)


class Counting:
    """One line of the running cell, changed in place: the run, its number if `of` is known, its
    seconds.
    """

    def __init__(self, what: str = "", *, of: int | None = None) -> None:
        self.what, self.of, self.number, self.text, self.handle = what, of, 0, "", None
        self.began = self.since = time.monotonic()
        self.lock, self.over = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        if runtime.interactive():
            threading.Thread(target=self._count, daemon=True, name="counting").start()
        return self

    def says(self, text: str) -> None:
        """Show that the next run has begun."""
        with self.lock:
            self.number, self.since = self.number + 1, time.monotonic()
            self.text = f"{self.number} of {self.of}: {text}" if self.of else text
            self.handle = show.displayed(self.text, self.handle)

    def __exit__(self, failed: type[BaseException] | None, *_: Any) -> None:
        """After an error the line goes on saying in which run."""
        with self.lock:
            self.over.set()
            if self.what and not failed:
                seconds = (
                    f" in {time.monotonic() - self.began:.0f} s" if runtime.interactive() else ""
                )
                self.handle = show.displayed(f"{self.number} {self.what}{seconds}", self.handle)

    def _count(self) -> None:
        while not self.over.wait(1):
            with self.lock:
                if self.text and not self.over.is_set():
                    show.displayed(
                        f"{self.text}, {time.monotonic() - self.since:.0f} s", self.handle
                    )
