"""Every exercise accepts a solution and refuses plausible wrong answers."""

import math

import pytest
import torch

import nblib
from nblib import train
from nblib.pitfalls import rounding
from nblib.workbook.check import EXERCISES

RIGHT = {
    "00.schedule": lambda step, total, warmup: train.cosine(total, warmup=warmup)(step),
    "00.bits_per_byte": lambda loss, tokens, size: loss * tokens / math.log(2) / size,
    "03.survives": rounding.survives,
    "03.muon_rate": lambda lr, rows, columns: lr * 0.2 * max(rows, columns) ** 0.5 / max(1, rows / columns) ** 0.5,
}
WRONG = {
    "00.schedule": [
        lambda step, total, warmup: min(step / warmup, 1.0),  # wastes the first step
        lambda step, total, warmup: min((step + 1) / warmup, 1.0),  # never comes down
        lambda s, t, w: (s + 1) / w if s < w else 0.5 * (1 + math.cos(math.pi * (s - w) / (t - w))),  # climbs back
        lambda step, total, warmup: None,
    ],
    "00.bits_per_byte": [
        lambda loss, tokens, size: loss * tokens / size,  # nats
        lambda loss, tokens, size: loss / math.log(2) * size / tokens,
        lambda loss, tokens, size: loss / math.log(2),
    ],
    "03.survives": [
        lambda weight, update: abs(update) > 2**-8,  # an absolute threshold
        lambda weight, update: abs(update) > abs(weight) * 2**-8,  # blind to the closer numbers below a power of two
        lambda weight, update: bool(torch.tensor(weight) + update != weight),  # fp32
    ],
    "03.muon_rate": [
        lambda lr, rows, columns: lr,
        lambda lr, rows, columns: lr * 0.2 * max(rows, columns) ** 0.5,  # forgets the factor of 'original'
        lambda lr, rows, columns: lr * 0.2 * (max(rows, columns) * columns / rows) ** 0.5,  # without its floor of 1
        lambda lr, rows, columns: lr * 20,
    ],
}


@pytest.mark.parametrize("exercise", EXERCISES)
def test_right_passes_and_wrong_gets_a_hint(exercise, capsys):
    assert nblib.check(exercise, RIGHT[exercise]) and "right." in capsys.readouterr().out
    for answer in WRONG[exercise]:
        assert not nblib.check(exercise, answer)
        assert "not yet." in capsys.readouterr().out


def test_an_unknown_exercise_lists_the_known():
    with pytest.raises(ValueError, match="allowed are 00.schedule"):
        nblib.check("99.none", None)
