"""The toy bench: its measures tell right from wrong, and a misspelt wiring is refused."""

import pytest
import torch

from lessons.pitfalls import bench
from nblib import wiring


def test_the_comparison_sees_a_wrong_gradient():
    model = bench.wired()
    reference = bench.flow(model)
    next(iter(wiring.trainable(model).values())).data.mul_(2)
    assert bench.compare(model, reference)["largest difference"] > 1e-4


def test_fit_counts_what_moved():
    model = bench.wired()
    few = list(wiring.trainable(model).values())[:2]
    assert (
        bench.fit(model, steps=2, optimizer=torch.optim.SGD(few, lr=0.1))["tensors that moved"] == 2
    )


def test_what_trains_above_the_blocks_makes_the_fault_silent():
    for above, counts in (("norm", 1), ("head", 1)):
        facts = bench.flow(bench.wired("reentrant", "removed", above=above))
        alive = [name for name, g in facts["gradients"].items() if g is not None]
        assert facts["raised"] is None and len(alive) == counts and "lora" not in alive[0]


@pytest.mark.parametrize(
    "choice", [dict(checkpointing="re-entrant"), dict(hook="off"), dict(above="all")]
)
def test_a_misspelt_wiring_is_refused(choice):
    ((name, value),) = choice.items()
    with pytest.raises(ValueError, match=f"{name} = '{value}': allowed are "):
        bench.wired(**choice)
