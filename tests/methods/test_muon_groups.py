"""Who belongs in which optimizer, the size of a step of Muon, several optimizers that pass for
one.
"""

import pytest
import torch
from torch import nn

from nblib import models
from nblib.methods import muon
from nblib.methods.muon import audit, groups


@pytest.fixture
def mixture():
    return models.tiny(256, family="qwen3_moe", hidden=32, layers=2, heads=2)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_split_is_that_of_the_dense_rule_plus_the_experts(family):
    model = models.tiny(256, family=family, hidden=32, layers=2, heads=2, tie_word_embeddings=False)
    in_muon = {name for name, a in groups.assign(model).items() if a.optimizer == "Muon"}
    experts = {name for name, p in model.named_parameters() if p.ndim == 3}
    # and the router
    ends = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "wpe.weight", "mlp.gate.weight")
    matrices = {
        name for name, p in model.named_parameters() if p.ndim == 2 and not name.endswith(ends)
    }
    assert in_muon == matrices | experts
    reasons = {name: a.reason for name, a in groups.assign(model).items()}
    assert all("router" in reasons[name] for name in reasons if name.endswith("mlp.gate.weight"))
    optimizers = groups.optimizers(model)
    taken = [id(p) for o in optimizers for g in o.param_groups for p in g["params"]]
    assert sorted(taken) == sorted(id(p) for p in model.parameters())  # each once
    assert not audit.lint_rates(model, optimizers)


def test_a_hidden_matrix_as_wide_as_the_vocabulary_is_no_head():
    model = models.tiny(96, hidden=32, layers=1, heads=2)  # the inner width is 96, too
    assert groups.assign(model)["model.layers.0.mlp.up_proj.weight"].optimizer == "Muon"


def test_frozen_parameters_are_nobodys(mixture):
    mixture.model.layers[0].requires_grad_(False)
    assert not any(".0." in name for name in groups.assign(mixture))
    in_groups = [p for o in groups.optimizers(mixture) for g in o.param_groups for p in g["params"]]
    assert len(in_groups) == len(groups.assign(mixture))


@pytest.mark.parametrize("adjust", muon.ADJUST)
@pytest.mark.parametrize("shape", [(64, 64), (128, 32), (32, 128)])
def test_the_size_of_a_step_is_foretold(shape, adjust):
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.randn(shape)
    muon.Muon([p], lr=0.01, adjust=adjust).step()
    assert float(p.detach().square().mean().sqrt()) == pytest.approx(
        muon.step_rms(shape, 0.01, adjust), rel=0.1
    )


def test_several_pass_for_one(mixture):
    one = groups.Together(groups.optimizers(mixture, lr=0.02, adamw_lr=3e-3))
    clock = torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.5)
    assert {g["lr"] for g in one.param_groups} == {0.01, 1.5e-3}
    for p in mixture.parameters():
        p.grad = torch.randn_like(p)
    one.step(), clock.step()
    again = groups.Together(groups.optimizers(mixture))
    again.load_state_dict(one.state_dict())
    assert {g["lr"] for g in again.param_groups} == {0.01, 1.5e-3}
    assert len(again.state) == len(list(mixture.parameters()))
    one.zero_grad()
    assert all(p.grad is None for p in mixture.parameters())
