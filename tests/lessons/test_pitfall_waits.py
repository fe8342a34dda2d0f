"""P73: what counts as a wait, and that the step which asks at the end makes the same update."""

import pytest
import torch

from lessons.pitfalls import bench, pitfall, waits


def asked(question) -> dict[str, int]:
    x = torch.arange(4.0)
    with waits.Waits() as counted:
        question(x)
    return dict(counted.kinds)


@pytest.mark.parametrize(
    "question", [float, int, lambda x: x.item(), lambda x: "yes" if x > 0 else "no"]
)
def test_a_number_is_one_wait(question):
    assert asked(lambda x: question(x[1])) == {"a number": 1}


def test_a_mask_is_counted_out_and_so_is_its_gradient():
    assert asked(lambda x: x[x > 1]) == {"a mask as an index": 1}
    assert asked(lambda x: x.requires_grad_()[x > 1].sum().backward()) == {"a mask as an index": 2}


def test_what_has_a_known_size_is_free():
    assert (
        asked(
            lambda x: (
                x[1:],
                x[torch.tensor([0, 2])],
                torch.where(x > 1, x, 0),
                x.sum(),
                x.masked_fill(x > 1, 0),
            )
        )
        == {}
    )
    assert asked(lambda x: x.nonzero()) == {"a size": 1}


def test_both_steps_are_the_same_step():
    gradients = {}
    for step in (waits.asked_on_the_way, waits.asked_at_the_end):
        model = bench.byte_model(heads=4)
        step(model, waits._batches())
        gradients[step] = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(*gradients.values(), rtol=1e-4, atol=1e-7)


def test_workers_change_no_count():
    facts = pitfall("P73").broken()
    assert (
        facts["waits of one step, fed by two workers"]
        == facts["waits of one step"]
        == 7 * facts["micro-batches"]
    )
    assert pitfall("P73").fixed()["waits of one step"] == 1
