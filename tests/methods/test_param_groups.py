"""Who belongs in which optimizer, misplaced parameters, rates read in their convention, several that pass for one."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from nblib import models, train
from nblib.methods import muon, param_groups


@pytest.fixture
def mixture():
    return models.tiny(256, family="qwen3_moe", hidden=32, layers=2, heads=2)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_split_is_that_of_the_dense_rule_plus_the_experts(family):
    model = models.tiny(256, family=family, hidden=32, layers=2, heads=2, tie_word_embeddings=False)
    in_muon = {name for name, a in param_groups.assign(model).items() if a.optimizer == "Muon"}
    experts = {name for name, p in model.named_parameters() if p.ndim == 3}
    ends = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "wpe.weight", "mlp.gate.weight")  # and the router
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2 and not name.endswith(ends)}
    assert in_muon == matrices | experts
    reasons = {name: a.reason for name, a in param_groups.assign(model).items()}
    assert all("router" in reasons[name] for name in reasons if name.endswith("mlp.gate.weight"))
    optimizers = param_groups.optimizers(model)
    taken = [id(p) for o in optimizers for g in o.param_groups for p in g["params"]]
    assert sorted(taken) == sorted(id(p) for p in model.parameters())  # each once
    assert not param_groups.lint_rates(model, optimizers)


def test_a_hidden_matrix_as_wide_as_the_vocabulary_is_no_head():
    model = models.tiny(96, hidden=32, layers=1, heads=2)  # the inner width is 96, too
    assert param_groups.assign(model)["model.layers.0.mlp.up_proj.weight"].optimizer == "Muon"


def test_frozen_parameters_are_nobodys(mixture):
    mixture.model.layers[0].requires_grad_(False)
    assert not any(".0." in name for name in param_groups.assign(mixture))
    assert len(param_groups.audit(mixture, param_groups.optimizers(mixture))) == len(param_groups.assign(mixture))


def test_the_audit_finds_what_is_misplaced_missing_or_twice(mixture):
    named = dict(mixture.named_parameters())
    lost = "model.layers.1.mlp.experts.down_proj"
    flat = [p for n, p in named.items() if p.ndim == 2]
    rest = [p for n, p in named.items() if p.ndim != 2 and n != lost]
    optimizers = [torch.optim.Muon(flat), AdamW(rest, lr=3e-3), AdamW([named["model.norm.weight"]], lr=3e-3)]
    wrong = {row.parameter: row.is_in for row in param_groups.audit(mixture, optimizers) if not row.right}
    assert wrong["model.embed_tokens.weight"] == wrong["model.layers.0.mlp.gate.weight"] == "Muon"
    assert wrong["model.layers.0.mlp.experts.down_proj"] == "AdamW"
    assert wrong[lost] == "nowhere" and wrong["model.norm.weight"] == "twice"
    assert not any("q_proj" in name for name in wrong)
    assert sum("belongs in" in sentence for sentence in param_groups.lint_rates(mixture, optimizers)) == len(wrong)


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
    doubts = param_groups.lint_rates(mixture, param_groups.optimizers(mixture, **rates))
    assert any(words in sentence for sentence in doubts) if words else not doubts, doubts


def test_muons_rate_in_an_adamw_that_holds_matrices(mixture):
    doubts = param_groups.lint_rates(mixture, [train.adamw(mixture, lr=0.02)])
    assert any("Muon's kind of number" in sentence for sentence in doubts)


def test_step_sizes_are_those_of_the_next_step(mixture):
    optimizers = param_groups.optimizers(mixture)
    table = {row["parameter"]: row for row in param_groups.step_sizes(mixture, optimizers)}
    before = {name: p.detach().clone() for name, p in mixture.named_parameters()}
    for p in mixture.parameters():
        p.grad = torch.randn_like(p)
    optimizers[0].step()
    for name, row in table.items():
        moved = (dict(mixture.named_parameters())[name].detach() - before[name]).square().mean().sqrt()
        assert row["rms of a step"] == pytest.approx(float(moved), rel=0.15)
        assert row["ratio"] == pytest.approx(row["rms of a step"] / row["rms of the weights"])


def test_the_lint_knows_torchs_own_muon_and_decayed_norms(mixture):
    assigned = param_groups.assign(mixture)
    matrices = [p for n, p in mixture.named_parameters() if assigned[n].optimizer == "Muon" and p.ndim == 2]
    doubts = param_groups.lint_rates(
        mixture, [torch.optim.Muon(matrices, lr=3e-4), AdamW([mixture.model.norm.weight], lr=3e-3, weight_decay=0.1)]
    )
    assert any("AdamW's kind of number" in s for s in doubts) and any("towards zero" in s for s in doubts)


@pytest.mark.parametrize("adjust", muon.ADJUST)
@pytest.mark.parametrize("shape", [(64, 64), (128, 32), (32, 128)])
def test_the_size_of_a_step_is_foretold(shape, adjust):
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.randn(shape)
    muon.Muon([p], lr=0.01, adjust=adjust).step()
    assert float(p.detach().square().mean().sqrt()) == pytest.approx(muon.step_rms(shape, 0.01, adjust), rel=0.1)


def test_several_pass_for_one(mixture):
    one = param_groups.Together(param_groups.optimizers(mixture, lr=0.02, adamw_lr=3e-3))
    clock = torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.5)
    assert {g["lr"] for g in one.param_groups} == {0.01, 1.5e-3}
    for p in mixture.parameters():
        p.grad = torch.randn_like(p)
    one.step(), clock.step()
    again = param_groups.Together(param_groups.optimizers(mixture))
    again.load_state_dict(one.state_dict())
    assert {g["lr"] for g in again.param_groups} == {0.01, 1.5e-3}
    assert len(again.state) == len(list(mixture.parameters()))
    one.zero_grad()
    assert all(p.grad is None for p in mixture.parameters())
