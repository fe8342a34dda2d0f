"""How far a training is, where its time goes, and the habits that a person should know of.

`Progress` is what a training remembers of its past steps. It is in every checkpoint: without the
window of recent losses a resumed run would roll back at another step than the straight one.

`Clock` measures training alone. Evaluations, checkpoints and the measuring of the machine are
paused, so tokens per second are those of the steps.

Footgun: the time left is the mean of the steps so far. The first step of a compiled model takes
minutes, so an estimate after one step is of no use.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from nblib import guards, runtime

RECENT = 32  # losses whose median a spike is compared with
CLIPPED = 100  # steps among which the clipped ones are counted


def _window(size: int):
    return field(default_factory=lambda: deque(maxlen=size))


@dataclass
class Progress:
    """What a training remembers of its past steps."""

    step: int = 0
    tokens: int = 0  # supervised ones, of all processes
    seconds: float = 0.0  # of training, also in the processes before this one
    lr_factor: float = 1.0  # on the schedule's rate; each rollback halves it
    rollbacks: int = 0
    recent: deque[float] = _window(RECENT)  # losses
    clipped: deque[bool] = _window(CLIPPED)

    def state_dict(self) -> dict:
        """Return plain types, as a checkpoint stores them."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        return state | {"recent": list(self.recent), "clipped": list(self.clipped)}

    def load_state_dict(self, state: dict) -> None:
        """Take over what a checkpoint stored."""
        for name, value in state.items():
            if name in ("recent", "clipped"):
                window = getattr(self, name)
                window.clear()
                window.extend(value)
            else:
                setattr(self, name, value)


class Clock:
    """Measure where the time goes, without what is no training."""

    def __init__(self, seconds_before: float):
        self.before = seconds_before  # in the processes before this one
        self.last = time.perf_counter()
        self.waited = 0.0  # for data
        self.spent = 0.0
        self.tokens = 0.0
        self.steps = 0

    def data_ready(self) -> None:
        """Count the time since the last step as waiting for data."""
        self.waited += time.perf_counter() - self.last

    def step(self, tokens: float, steps_left: int) -> dict:
        """Count a step; return its figures for the record."""
        now = time.perf_counter()
        self.spent += now - self.last
        self.last = now
        self.tokens += tokens
        self.steps += 1
        return {
            "tokens_per_s": self.tokens / self.spent,
            "eta_s": steps_left * self.spent / self.steps,
            "seconds": self.before + self.spent,
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of a block out."""
        yield
        self.last = time.perf_counter()


def warn_of_habits(
    progress: Progress, clock: Clock, epoch: int, tokens_of_epoch: int, already: set[str]
) -> None:
    """Print what the last steps have in common that costs quality or time; each kind once a run."""
    warnings = {
        "clip": guards.clipped_too_often(progress.clipped),
        "data": guards.starved(clock.waited, clock.spent),
        "epoch": guards.repeated(epoch, tokens_of_epoch),
    }
    for kind, warning in warnings.items():
        if warning and kind not in already:
            already.add(kind)
            say(f"step {progress.step}: {warning}")


def say(sentence: str) -> None:
    """Print a sentence, in one process of all."""
    if runtime.rank() == 0:
        print(sentence, flush=True)
