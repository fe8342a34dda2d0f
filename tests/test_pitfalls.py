"""Every pitfall both ways: broken shows the symptom, fixed does not, and the claim holds or fails as said."""

import re

import pytest
import torch

from nblib import pitfalls


@pytest.fixture(autouse=True)
def one_thread():
    """The models are so small that two threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


CATALOGUE = list(pitfalls.catalogue())


def _marked(p):
    return pytest.param(p, id=p.id, marks=[pytest.mark.slow] if p.slow else [])


@pytest.mark.parametrize("pitfall", [_marked(p) for p in CATALOGUE])
def test_broken_breaks_fixed_holds_and_the_claim_is_as_said(pitfall):
    broken, fixed = pitfall.broken(), pitfall.fixed()
    assert pitfall.seen(broken), f"{pitfall.id} no longer shows its symptom: {broken}"
    assert not pitfall.seen(fixed), f"{pitfall.id} still shows its symptom with the fix: {fixed}"
    if pitfall.claimed is not None:
        claimed = pitfall.claimed()
        assert pitfall.seen(claimed) == pitfall.claim_holds, f"{pitfall.id}: the claimed cause alone gave {claimed}"


def test_the_catalogue_is_complete_in_itself():
    ids = [p.id for p in CATALOGUE]
    assert ids == sorted(set(ids))
    for p in CATALOGUE:
        assert re.fullmatch(r"P\d\d", p.id) and re.fullmatch(r"([A-Z]\d{1,2})?", p.check)
        assert p.title and p.symptom and p.verdict and p.fix
        assert (p.claimed is None) or p.claim


def test_an_unknown_pitfall_lists_the_known():
    with pytest.raises(ValueError, match="pitfall = 'P99': allowed are"):
        pitfalls.pitfall("P99")
