"""Look at a training while it runs: evaluate, log, and let a person stop it or change its rate.

    train.fit(..., watch=Watch(evaluate=loss_on_held_out_rows, eval_every=50, log=print))

An evaluation runs between two steps, with all weights in the caller's model, and its seconds do not
count as training. Its facts stand in the record of that step as `eval_...`.

Footgun: an evaluation that draws random numbers changes the steps after it. Draw inside of
`runtime.seeded()`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from nblib import runtime
from nblib.training_state import Training


class Controls(Protocol):
    """What a person may change between two steps."""

    stop: bool  # end after the step in hand
    lr_scale: float  # factor on the schedule's rate


@dataclass(frozen=True)
class Watch:
    """Look at a training while it runs.

    evaluate    () -> facts, every `eval_every` steps and after the last one
    log         called with a record every `log_every` steps and after an evaluation
    controls    read once per step
    records     of steps: a list that is filled with one per step, after those of before a resume
    """

    evaluate: Callable[[], dict] | None = None
    eval_every: int = 0
    log: Callable[[dict], None] | None = None
    log_every: int = 10
    controls: Controls | None = None
    records: list[dict] = field(default_factory=list)

    def __post_init__(self):
        if self.log_every < 1:
            raise ValueError(f"log_every = {self.log_every}: must be at least 1")
        if self.eval_every < 0:
            raise ValueError(f"eval_every = {self.eval_every}: must be at least 0; 0 is never")
        if self.eval_every and self.evaluate is None:
            raise ValueError(f"eval_every = {self.eval_every}: give `evaluate`, a function too")

    @property
    def lr_scale(self) -> float:
        """Return the factor on the rate that a person has chosen."""
        return self.controls.lr_scale if self.controls else 1.0

    @property
    def pressed_stop(self) -> bool:
        """Return whether a person wants the training to end."""
        return bool(self.controls and self.controls.stop)

    @property
    def shows_stop(self) -> bool:
        """Return whether a person sees in the page that the training was stopped."""
        return bool(self.controls and runtime.interactive())

    def evaluate_if_due(self, training: Training) -> dict:
        """Evaluate the caller's model when it is due; return the facts under their names in a
        record.
        """
        step = training.progress.step
        if self.evaluate is None or not self.eval_every:
            return {}
        if step % self.eval_every and step != training.total:
            return {}
        with training.spread.whole():
            facts = self.evaluate()
        training.model.train()
        return {f"eval_{name}": fact for name, fact in facts.items()}

    def log_if_due(self, record: dict, *, last: bool) -> None:
        """Hand a record to `log` when it is due, in one process of all."""
        if self.log is None or runtime.rank() != 0:
            return
        if last or record["step"] % self.log_every == 0 or "eval_loss" in record:
            self.log(record)
