"""A difference is one only where all seeds agree and the spread is smaller."""

import random

import pytest

from lessons import seeds


@pytest.mark.parametrize(
    "gains, expected",
    [
        ([0.2, 0.21, 0.25], True),
        ([-0.2, -0.21, -0.25], True),
        ([0.2, -0.01, 0.2], False),  # the signs differ
        ([0.5, 0.01, 0.1], False),  # the spread is larger
        ([0.3], False),  # one seed
        ([], False),
        ([0.0, 0.0, 0.0], False),
    ],
)
def test_a_difference_counts_only_beyond_the_spread(gains, expected):
    assert seeds.distinct(gains) is expected


def test_noise_is_seldom_taken_for_a_difference():
    draw = random.Random(0)
    taken = sum(seeds.distinct([draw.gauss(0, 1) for _ in range(3)]) for _ in range(4000))
    assert 0.04 < taken / 4000 < 0.11


def test_the_sentence_says_what_was_seen():
    gains = seeds.gains(without=[2.0, 2.1, 2.2], with_it=[1.8, 1.89, 2.01])
    assert gains == pytest.approx([0.2, 0.21, 0.19])
    assert (
        seeds.sentence("it", gains)
        == "it helps: loss lower by 0.200 in the mean of 3 seeds, from 0.190 to 0.210"
    )
    assert seeds.sentence("it", [-g for g in gains]) == (
        "it does harm: loss higher by 0.200 in the mean of 3 seeds, from 0.190 to 0.210"
    )
    assert seeds.sentence("it", [0.1, -0.1]).startswith("it: not distinguishable at 2 seeds (")
    assert seeds.sentence("it", gains[:1]) == "it: not distinguishable at one seed"
    with pytest.raises(ValueError):
        seeds.gains(without=[1.0], with_it=[])
