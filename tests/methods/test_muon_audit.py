"""Misplaced parameters, rates read in their convention, steps foretold."""

import pytest
import torch
from torch.optim import AdamW

from nblib import models, train
from nblib.methods.muon import audit, groups


@pytest.fixture
def mixture():
    return models.tiny(256, family="qwen3_moe", hidden=32, layers=2, heads=2)


def test_the_audit_finds_what_is_misplaced_missing_or_twice(mixture):
    named = dict(mixture.named_parameters())
    lost = "model.layers.1.mlp.experts.down_proj"
    flat = [p for n, p in named.items() if p.ndim == 2]
    rest = [p for n, p in named.items() if p.ndim != 2 and n != lost]
    optimizers = [
        torch.optim.Muon(flat),
        AdamW(rest, lr=3e-3),
        AdamW([named["model.norm.weight"]], lr=3e-3),
    ]
    wrong = {row.parameter: row.is_in for row in audit.audit(mixture, optimizers) if not row.right}
    assert wrong["model.embed_tokens.weight"] == wrong["model.layers.0.mlp.gate.weight"] == "Muon"
    assert wrong["model.layers.0.mlp.experts.down_proj"] == "AdamW"
    assert wrong[lost] == "nowhere" and wrong["model.norm.weight"] == "twice"
    assert not any("q_proj" in name for name in wrong)
    assert sum(
        "belongs in" in sentence for sentence in audit.lint_rates(mixture, optimizers)
    ) == len(wrong)


@pytest.mark.parametrize(
    "rates, words",
    [
        (dict(lr=3e-4), "AdamW's kind of number"),
        (dict(lr=0.02, adjust="match_rms_adamw"), "number for 'original'"),
        (dict(adamw_lr=0.02), None),  # no matrix is in it
        (dict(adamw_lr=0.2), "every entry"),
        (dict(adamw_lr=9e-5), "beside Muon"),
        (dict(lr=0.5), "of their own size"),
        (dict(), None),
        (dict(lr=3e-3, adjust="match_rms_adamw"), None),
    ],
)
def test_the_lint_reads_a_rate_in_its_convention(mixture, rates, words):
    doubts = audit.lint_rates(mixture, groups.optimizers(mixture, **rates))
    assert any(words in sentence for sentence in doubts) if words else not doubts, doubts


def test_muons_rate_in_an_adamw_that_holds_matrices(mixture):
    doubts = audit.lint_rates(mixture, [train.adamw(mixture, lr=0.02)])
    assert any("Muon's kind of number" in sentence for sentence in doubts)


def test_step_sizes_are_those_of_the_next_step(mixture):
    optimizers = groups.optimizers(mixture)
    table = {row["parameter"]: row for row in audit.step_sizes(mixture, optimizers)}
    before = {name: p.detach().clone() for name, p in mixture.named_parameters()}
    for p in mixture.parameters():
        p.grad = torch.randn_like(p)
    optimizers[0].step()
    for name, row in table.items():
        moved = (
            (dict(mixture.named_parameters())[name].detach() - before[name]).square().mean().sqrt()
        )
        assert row["rms of a step"] == pytest.approx(float(moved), rel=0.15)
        assert row["ratio"] == pytest.approx(row["rms of a step"] / row["rms of the weights"])


def test_the_lint_knows_torchs_own_muon_and_decayed_norms(mixture):
    assigned = groups.assign(mixture)
    matrices = [
        p for n, p in mixture.named_parameters() if assigned[n].optimizer == "Muon" and p.ndim == 2
    ]
    doubts = audit.lint_rates(
        mixture,
        [
            torch.optim.Muon(matrices, lr=3e-4),
            AdamW([mixture.model.norm.weight], lr=3e-3, weight_decay=0.1),
        ],
    )
    assert any("AdamW's kind of number" in s for s in doubts) and any(
        "towards zero" in s for s in doubts
    )
