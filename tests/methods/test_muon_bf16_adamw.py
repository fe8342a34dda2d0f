"""Writing into bf16: what survives, that stochastic rounding is unbiased, that Kahan loses nothing,
and the moments.
"""

import pytest
import torch
from torch import nn

from nblib.methods.muon import bf16_adamw


@pytest.mark.parametrize("value", [1.0, 1.5, -0.02, 300.0])
def test_what_survives_is_what_the_format_says(value):
    up = torch.nextafter(
        torch.tensor(abs(value)).bfloat16(), torch.tensor(torch.inf, dtype=torch.bfloat16)
    )
    gap = float(up) - float(torch.tensor(abs(value)).bfloat16())
    assert bf16_adamw.survives(value, 0.51 * gap) and not bf16_adamw.survives(value, 0.24 * gap)
    assert bf16_adamw.survives(value, 1e-4 * value, torch.float32)


def test_below_a_power_of_two_the_numbers_stand_twice_as_close():
    assert bf16_adamw.survives(1.0, -0.003) and not bf16_adamw.survives(1.0, 0.003)


def test_stochastic_rounding_is_exact_on_average_and_keeps_what_is_exact():
    exact = torch.full((200_000,), 1.0 + 2**-10)  # an eighth of the way to the next bf16 number
    got = bf16_adamw.stochastically(exact)
    assert got.dtype == torch.bfloat16 and set(got.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert (
        abs(float(got.double().mean()) - float(exact[0]))
        < 4 * 2**-7 * (0.125 * 0.875 / len(exact)) ** 0.5
    )
    whole = torch.randn(1000).bfloat16()
    assert torch.equal(bf16_adamw.stochastically(whole.float()), whole)
    assert torch.equal(bf16_adamw.stochastically(-exact).sign(), -torch.ones(len(exact)))


@pytest.mark.parametrize(
    ("way", "arrives"), [("nearest", False), ("kahan", True), ("stochastic", True)]
)
def test_a_thousand_small_steps_arrive_or_do_not(way, arrives):
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = bf16_adamw.BF16AdamW([p], lr=1e-4, way=way)
    for _ in range(1000):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert abs(float(p.detach().float().mean()) - (0.9 if arrives else 1.0)) < 0.006


def test_the_update_is_that_of_torch():
    torch.manual_seed(0)
    mine, reference = (nn.Parameter(torch.zeros(7, 5)) for _ in range(2))
    optimizer = bf16_adamw.BF16AdamW([mine], lr=1e-2, way="nearest")
    torchs = torch.optim.AdamW([reference], lr=1e-2, weight_decay=0.0)
    for _ in range(5):
        mine.grad = reference.grad = torch.randn(7, 5)
        optimizer.step()
        torchs.step()
    torch.testing.assert_close(mine, reference)


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="way = 'up': allowed are nearest, stochastic, kahan"):
        bf16_adamw.BF16AdamW([nn.Parameter(torch.ones(1))], lr=1.0, way="up")
