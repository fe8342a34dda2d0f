"""A small Jamba, and routed Mamba against its dense mixture."""

import pytest
import torch
from torch.nn import functional as F

from nblib import text, train
from nblib.methods import moe
from nblib.methods.moe import jamba, router_health
from nblib.methods.muon import groups


@pytest.fixture
def rows():
    return torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(3))


def test_jamba_trains_with_all_of_it(stream, machine):
    model = jamba.jamba(256, hidden=32, layers=4, heads=2)
    kinds = [type(layer).__name__ for layer in model.model.layers]
    assert kinds.count("JambaAttentionDecoderLayer") == 1 and len(moe.routers(model)) == 2
    optimizers = groups.optimizers(model)
    assigned = groups.assign(model)
    for kind, belongs in (
        ("A_log", "AdamW"),
        ("conv1d.weight", "AdamW"),
        ("mamba.in_proj", "Muon"),
        ("gate_up", "Muon"),
    ):
        assert {assigned[n].optimizer for n in assigned if kind in n} == {belongs}
    options = dict(total=8, loss=moe.loss(), machine=machine)
    records = train.fit(model, text.Batches(stream, rows=4, length=16), optimizers, **options)
    assert records[-1]["ce"] < records[0]["ce"] - 0.1


def test_routed_mamba_with_all_experts_is_the_dense_mixture_and_keeps_order():
    model = jamba.jamba(256, hidden=32, layers=2, heads=2).double()
    names = jamba.route_mamba(model, experts=3, top_k=3)
    layer = model.get_submodule(names[0])
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    shares = F.linear(x, layer.router.weight).softmax(-1)
    expected = sum(shares[..., e, None] * layer.mixers[e](hidden_states=x) for e in range(3))
    torch.testing.assert_close(layer(hidden_states=x), expected, rtol=1e-5, atol=1e-8)
    assert not torch.equal(layer.mixers[0].in_proj.weight, layer.mixers[1].in_proj.weight)
    later = x.clone()
    later[:, 5:] += 1
    torch.testing.assert_close(
        layer(hidden_states=later)[:, :5], expected[:, :5], rtol=1e-5, atol=1e-8
    )


def test_routed_mamba_gives_each_token_to_its_experts(rows):
    model = jamba.jamba(256, hidden=32, layers=2, heads=2)
    names = jamba.route_mamba(model, experts=3, top_k=1)
    layer = model.get_submodule(names[0])
    with torch.no_grad():
        layer.router.weight.normal_()
    x = torch.randn(2, 9, 32)
    _, _, chosen = layer.router(x)
    outputs = torch.stack([m(hidden_states=x) for m in layer.mixers], dim=2)  # (B, T, E, D)
    expected = outputs.flatten(0, 1)[torch.arange(18), chosen[:, 0]].view(2, 9, 32)
    torch.testing.assert_close(layer(hidden_states=x), expected)
    # balanced and diagnosed like any router
    assert any("mamba" in r.layer for r in router_health.observe(model, rows))


def test_hybrids_refuse_by_name(tiny):
    with pytest.raises(ValueError, match="top_k = 5"):
        jamba.jamba(256, experts=4, top_k=5)
    with pytest.raises(ValueError, match="no Mamba"):
        jamba.route_mamba(tiny)


def test_a_seed_decides_and_the_callers_draws_go_on():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, other = (jamba.jamba(256, hidden=32, layers=2, heads=2, seed=seed) for seed in (1, 2))
    for model in (first, other):
        jamba.route_mamba(model, experts=2, seed=3)
    assert torch.equal(torch.rand(3), expected)
    again = jamba.jamba(256, hidden=32, layers=2, heads=2, seed=1)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
