"""When a step must not be taken, and what to do then: name the source, or go back and skip the
data.

Without `Recovery` a loss or gradient that is not finite ends the run. The step is repeated under
hooks, with the same batches and dropout masks, and the first module that gave nan or inf is named.

With `Recovery(spike=2.0)` the loop keeps a snapshot in memory. When the loss is more than twice the
median of the recent ones, or is not finite, the training goes back to the snapshot, halves the
learning rate for good, and goes on behind the data that did it. PaLM (arXiv:2204.02311, section
5.1) went back about a hundred steps and skipped the data; the same data at another state of the
model did no harm, so neither the data nor the state alone is the cause.

Footgun: a snapshot is a second copy of weights and moments. On a card that is full it does not fit.
"""

import math
from dataclasses import dataclass

from nblib import checkpoint, guards, hf_forward, runtime
from nblib.batch import Batch
from nblib.progress import say
from nblib.training_state import Training


@dataclass(frozen=True)
class Recovery:
    """Go back instead of ending the run.

    spike           factor over the median of the recent losses from which a loss is a spike
    snapshot_every  steps between snapshots
    rollbacks       how often the training may go back before it ends
    """

    spike: float = 2.0
    snapshot_every: int = 20
    rollbacks: int = 3

    def __post_init__(self):
        if not 1 < self.spike < math.inf:
            raise ValueError(f"spike = {self.spike}: must be above 1")
        for name in ("snapshot_every", "rollbacks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")


def find_fault(
    training: Training, loss: float, norm: float, recovery: Recovery | None
) -> str | None:
    """Return why this step must not be taken, or None.

    With a loss scaler an overflowing gradient is ordinary: the scaler skips the step, until the
    scale has come down to 1 and it still overflows.
    """
    if recovery and guards.is_finite(loss):
        spiked = guards.spiked(loss, training.progress.recent, factor=recovery.spike)
        if spiked:
            return spiked

    scaler = training.scaler
    scaler_skips = scaler.is_enabled() and scaler.get_scale() >= 1
    if guards.is_finite(loss) and (guards.is_finite(norm) or scaler_skips):
        return None
    return f"loss {loss}, gradient norm {norm}"


def name_source(training: Training, micro: list[Batch], generators: dict) -> str:
    """Repeat a step under hooks, with the same dropout masks; return what its source is."""
    for optimizer in training.optimizers:
        optimizer.zero_grad(set_to_none=True)
    runtime.set_generators(generators)

    def repeat() -> None:
        for batch in micro:
            with hf_forward.experts_in_autocast():
                with training.machine.autocast():
                    terms = training.spread(batch, last=False)
                sum(terms.values()).backward()

    return guards.source_of_nonfinite(training.model, repeat)


def roll_back(
    training: Training, snapshot: checkpoint.State, recovery: Recovery, fault: str
) -> None:
    """Go back to the snapshot, halve the rate, and go on behind the data that did it."""
    progress = training.progress
    failed_step = progress.step
    rollbacks = progress.rollbacks + 1
    if rollbacks > recovery.rollbacks:
        raise guards.NonFinite(
            f"step {failed_step}: {fault}, after {recovery.rollbacks} rollbacks: "
            "lower the learning rate or look at the data"
        )

    # all of the snapshot but the position in the data
    batches = training.batches
    position = batches.state_dict() if hasattr(batches, "state_dict") else None
    training.restore(snapshot)
    if position is not None:
        batches.load_state_dict(position)

    # the schedule is multiplied by this, so it cannot undo it
    progress.rollbacks = rollbacks
    progress.lr_factor = 0.5**rollbacks
    say(
        f"step {failed_step + 1}: {fault}. Rolled back to step {progress.step}, "
        f"rate multiplied by {progress.lr_factor:g}, data skipped"
    )
