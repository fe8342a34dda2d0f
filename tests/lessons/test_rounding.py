"""Rounding: the picture says what `survives` says, and the bytes are those of the tensors that each
way keeps.
"""

import pytest
import torch

from lessons import rounding
from nblib.methods.muon.bf16_adamw import survives


@pytest.mark.parametrize("weight, update", [(1.0, 3e-3), (1.0, 4e-3), (0.02, 1e-4), (100.0, 0.1)])
def test_the_picture_says_whether_the_update_survives(weight, update):
    said = rounding.survival(weight, update).summary
    assert ("survives" in said) == survives(weight, update) and ("rounded" in said) != survives(
        weight, update
    )


def test_the_table_has_the_update_that_is_kept_downwards_only():
    (row,) = rounding.survival_table([3e-3]).rows
    assert row["1 + u moves"] == "False" and row["1 - u moves"] == "True"


def test_half_a_step_is_the_border_of_the_formula():
    for weight in (0.3, 1.0, 1.5, 7.0):
        weight = float(torch.tensor(weight).bfloat16())
        half = 2.0 ** (torch.tensor(weight).log2().floor().item() - 8)
        assert survives(weight, 1.01 * half) and not survives(weight, 0.99 * half)


def test_bytes_of_a_weight():
    measured = {row["way"]: row["bytes in all"] for row in rounding.bytes_per_weight()}
    assert measured["fp32 weights, AdamW"] == 4 + 4 + 4 + 4
    assert measured["fp32 weights, Muon"] == 4 + 4 + 4
    assert measured["bf16 weights, AdamW"] == 2 * 4
    kahan, stochastic = (
        measured["bf16 weights, Kahan summation"],
        measured["bf16 weights, stochastic rounding"],
    )
    assert stochastic == 2 + 2 + 4 + 4 and kahan == stochastic + 2
