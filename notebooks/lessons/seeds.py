"""Two trainings at several seeds: is the difference between them larger than what the seed does?

    gains = seeds.gains(without=[6.9, 6.8, 6.9], with_it=[6.6, 6.7, 6.6])
    one number per seed, above 0 where it helps
    seeds.distinct(gains)                                                     True or False
    seeds.sentence("the teacher", gains)                                      the verdict with its
                                                                              numbers

Both trainings of a pair share the seed, so what the seed does to both cancels. A difference counts
here when it has the same sign at every seed and its mean is more than twice its standard deviation.
One seed never counts.

Footgun: three seeds are few. With pure noise the signs agree in one case of four; it is the second
condition that makes a wrong verdict rare (about one in fourteen).
"""

from collections.abc import Sequence
from statistics import mean, stdev


def gains(without: Sequence[float], with_it: Sequence[float]) -> list[float]:
    """How much lower the loss is with it, seed by seed."""
    return [a - b for a, b in zip(without, with_it, strict=True)]


def distinct(gains: Sequence[float]) -> bool:
    """Whether the seeds agree, and by more than they differ."""
    if len(gains) < 2 or not (min(gains) > 0 or max(gains) < 0):
        return False
    return abs(mean(gains)) > 2 * stdev(gains)


def sentence(what: str, gains: Sequence[float]) -> str:
    """Return the verdict as one sentence."""
    if len(gains) < 2:
        return f"{what}: not distinguishable at one seed"
    way, sign = ("lower", 1) if mean(gains) >= 0 else ("higher", -1)
    least, _, most = sorted((sign * min(gains), sign * mean(gains), sign * max(gains)))
    seen = (
        f"loss {way} by {sign * mean(gains):.3f} in the mean of {len(gains)} seeds, from "
        f"{least:.3f} to {most:.3f}"
    )
    if not distinct(gains):
        return f"{what}: not distinguishable at {len(gains)} seeds ({seen})"
    return f"{what} {'helps' if gains[0] > 0 else 'does harm'}: {seen}"
