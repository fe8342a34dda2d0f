"""End a training when its state is whole: a Stop button, Ctrl-C, SIGTERM, a checkpoint that failed.

A signal may arrive in the middle of a step, when half of the parameters are updated. So the first
one is only noted. The loop looks once per step, ends after the step in hand, and saves. A second
one of the same kind raises at once.

Several processes must end after the same step, or the others wait for ever in their next
all-reduce. So each step takes the largest of all reasons.

Footgun: signals reach Python's main thread alone. A loop in another thread cannot be stopped by
Ctrl-C, and leaves the handlers as they are.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nblib import parallel

SIGNALS = ("SIGINT", "SIGTERM")
BUTTON = "Stop"
SAVE_FAILED = "a checkpoint that was not written"
REASONS = (None, BUTTON, *SIGNALS, SAVE_FAILED)  # later ones count more


@dataclass
class Received:
    """Hold the name of the first signal that arrived."""

    signal: str | None = None


@contextmanager
def signals() -> Iterator[Received]:
    """Note the first Ctrl-C or SIGTERM of a block; raise at the second of the same kind."""
    received = Received()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number, frame):
        # a scheduler's SIGTERM comes as SIGINT as well: these two are one
        name = signal.Signals(number).name
        if received.signal == name:
            raise KeyboardInterrupt
        if received.signal is None:
            received.signal = name

    handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def agree(received: Received, pressed: bool, save_failed: bool, device: torch.device) -> str | None:
    """Return why all processes end after this step, or None. All must call."""
    own = received.signal
    if save_failed:
        own = SAVE_FAILED
    elif own is None and pressed:
        own = BUTTON
    return REASONS[parallel.highest(REASONS.index(own), device)]


def end_process(reason: str | None, *, shows_stop: bool) -> None:
    """Raise what a signal means for the program, unless a person sees in the page that it stopped.

    A program that only left its loop would go on as if the model were trained.
    """
    if shows_stop or reason not in SIGNALS:
        return
    if reason == "SIGINT":
        raise KeyboardInterrupt
    raise SystemExit(128 + signal.SIGTERM)
