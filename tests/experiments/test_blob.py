"""BLoB's noise and KL are those of its formulas, and nothing but its factors trains."""

import pytest
import torch
from conftest import FP32
from torch import nn
from torch.distributions import Normal, kl_divergence

from experiments import blob
from nblib import losses, models, train, wiring


def test_the_kl_equals_torch_distributions():
    layer = blob.BlobLinear(nn.Linear(6, 5), 3, 2.0)
    own = Normal(layer.lora_mean, layer.lora_root.square())
    prior = Normal(torch.zeros_like(layer.lora_mean), torch.full_like(layer.lora_mean, 0.2))
    assert float(layer.kl().detach()) == pytest.approx(
        float(kl_divergence(own, prior).sum().detach()), rel=1e-5
    )


def test_flipout_has_the_stated_variance_and_two_tokens_of_one_draw_are_uncorrelated():
    layer = blob.BlobLinear(nn.Linear(6, 3, bias=False), 3, 1.0).train()
    with torch.no_grad():
        layer.base.weight.zero_()
        layer.lora_up.copy_(torch.eye(3))
        layer.lora_root.uniform_(0.2, 0.9)
        x = torch.randn(2, 6)
        draws = torch.stack([layer(x) for _ in range(5000)])  # (n, tokens, r)
        variance = x.square() @ layer.lora_root.double().pow(4).float().T
    assert torch.allclose(draws.mean(0), x @ layer.lora_mean.T, atol=0.06)
    assert torch.allclose(draws.var(0), variance, rtol=0.12)
    both = torch.stack([draws[:, 0, 0], draws[:, 1, 0]])
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.06


def test_evaluation_draws_only_where_it_is_asked_to():
    model = blob.attach(models.tiny(64, hidden=32, layers=1, heads=2), rank=2, alpha=4.0).eval()
    for a in blob.adapters(model):
        nn.init.normal_(a.lora_up)
    ids = torch.randint(64, (2, 8))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        with blob.sampling(model):
            assert not torch.equal(model(ids).logits, model(ids).logits)
        assert torch.equal(model(ids).logits, model(ids).logits)


def test_only_the_factors_train_and_an_epoch_pays_the_kl_once(stream):
    model = models.tiny(256, hidden=32, layers=1, heads=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    blob.attach(model, rank=2, alpha=4.0)
    assert {name.rpartition(".")[2] for name in wiring.trainable(model)} == {
        "lora_mean",
        "lora_root",
        "lora_up",
    }
    rows = stream[: 12 * 16].view(12, 16)
    tokens = 12 * 15
    loss = blob.loss(model, questions=tokens, weight=0.5)
    paid = sum(
        float(loss(model, {"input_ids": r, "labels": r})["kl"].detach()) for r in rows.split(4)
    )
    assert paid == pytest.approx(
        0.5 * sum(float(a.kl().detach()) for a in blob.adapters(model)), rel=1e-4
    )
    cut = iter([{"input_ids": r, "labels": r} for r in rows.split(4)])
    train.fit(
        model, cut, train.adamw(model, lr=1e-2, weight_decay=0.0), total=3, loss=loss, machine=FP32
    )
    now = {name.replace(".base.", "."): p for name, p in model.named_parameters()}
    assert all(torch.equal(now[name], p) for name, p in before.items())
    assert all(float(a.lora_up.detach().abs().max()) > 0 for a in blob.adapters(model))
    with pytest.raises(ValueError, match="no adapters"):
        blob.loss(models.tiny(64, hidden=32, layers=1, heads=2), questions=3)
    with pytest.raises(ValueError, match="rank = 0"):
        blob.attach(models.tiny(64, hidden=32, layers=1, heads=2), rank=0, alpha=1.0)
    assert losses.supervised(rows) == tokens
