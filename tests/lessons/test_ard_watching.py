"""What is watched is what the run does, and watching changes nothing."""

import pytest
import torch
from ard_bench import adapted, collected, gradients_of, ragged, random_batch

from lessons import ard_watching
from nblib import compiling, losses, wiring
from nblib.methods import ard
from nblib.methods.ard import ranks


def test_gradient_norms_per_term_leave_no_trace():
    model, batch = compiling.checkpoint_blocks(adapted()).train(), ragged()[0]
    loss = ard.loss(model, beta=0.1)
    kept = {p: torch.randn_like(p) for p in wiring.trainable(model).values()}
    for p, g in kept.items():
        p.grad = g.clone()  # what accumulation has gathered so far
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rows = ard_watching.gradient_norms(model, batch, loss)
    assert torch.equal(torch.get_rng_state(), before) and all(
        torch.equal(p.grad, g) for p, g in kept.items()
    )
    tokens, n = int(losses.supervised(batch["labels"])), 0
    for term in ("ce", "kl", "total"):
        _, found = gradients_of(model, batch, lambda m, b, term=term: _only(loss(m, b), term))
        for row in rows:
            own = [g.flatten() for name, g in found.items() if name.startswith(row["layer"] + ".")]
            assert row[term] == pytest.approx(float(torch.cat(own).norm()) / tokens, rel=1e-4)
            n += 1
    assert n == 18


def _only(terms: dict, term: str) -> dict:
    return terms if term == "total" else {term: terms[term]}


def test_statistics_are_those_of_the_real_tokens():
    model, (padded, rows) = adapted(), ragged()
    found, singly = ard_watching.statistics(model, [padded]), ard_watching.statistics(model, rows)
    assert [r["layer"] for r in found] == list(ard.adapters(model)) and model.training
    for a, b in zip(found, singly):
        assert a["logvar min"] < a["logvar mean"] < a["logvar max"]
        assert all(a[k] == pytest.approx(b[k], rel=1e-4) for k in a if k != "layer")
    total = float(collected(model.eval(), padded)[1].detach())
    assert sum(r["kl"] for r in found) * 42 == pytest.approx(total, rel=1e-4)


def test_statistics_without_noise_have_no_log_variance_and_cost_nothing():
    model, (padded, _) = adapted(deterministic=True), ragged()
    rows = ard_watching.statistics(model, [padded])
    assert len(rows) == 6 and float(collected(model.eval(), padded)[1]) == 0
    for row in rows:
        assert row["kl"] == 0 and row["mean rms"] > 0
        assert all(row[f"logvar {of}"] is None for of in ("min", "mean", "max", "std"))


def test_the_table_of_relevance():
    model = adapted()
    with pytest.raises(ValueError, match="never estimated"):
        ard_watching.table(model)
    ranks.estimate_priors(model, [random_batch()])
    rows = ard_watching.table(model)
    assert len(rows) == 6 and all(
        row["High"] + row["Medium"] + row["Low"] == row["ranks"] == 4 for row in rows
    )
    assert all(
        sum(row[f"share of {by}"] for row in rows) == pytest.approx(1) for by in ranks.MEASURES
    )
