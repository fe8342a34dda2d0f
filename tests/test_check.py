"""Every exercise accepts a solution and refuses plausible wrong answers."""

import math

import pytest

import nblib
from nblib import train
from nblib.workbook.check import EXERCISES

RIGHT = {
    "00.schedule": lambda step, total, warmup: train.cosine(total, warmup=warmup)(step),
    "00.bits_per_byte": lambda loss, tokens, size: loss * tokens / math.log(2) / size,
    "02.chunk": lambda vocabulary, size: max(1, size // (4 * vocabulary)),
    "02.segment": lambda layers, inside: min(range(1, layers + 1), key=lambda n: layers / n + n * inside),
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
    "02.chunk": [
        lambda vocabulary, size: size // vocabulary,  # counts numbers, not bytes
        lambda vocabulary, size: size // (4 * vocabulary),  # no row at all for a large vocabulary
        lambda vocabulary, size: max(1, math.ceil(size / (4 * vocabulary))),  # one too many
        lambda vocabulary, size: max(1.0, size / (4 * vocabulary)),
    ],
    "02.segment": [
        lambda layers, inside: round(layers**0.5),  # forgets what is inside
        lambda layers, inside: 1,
        lambda layers, inside: layers,
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
