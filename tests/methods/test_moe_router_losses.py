"""The two auxiliary losses against their definitions and transformers' own; the mixture itself; its
diagnosis.
"""

import copy

import pytest
import torch
from routings import E, K, routed, towards
from torch.nn import functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from nblib import compiling, losses, models, text, train
from nblib.methods import moe
from nblib.methods.moe import jamba, router_health
from nblib.methods.muon import groups


@pytest.fixture
def mixture():
    return models.tiny(
        256, family="qwen3_moe", hidden=32, layers=4, heads=2, num_experts=E, num_experts_per_tok=K
    )


@pytest.fixture
def rows():
    return torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(3))


def batch_of(rows):
    return {"input_ids": rows, "labels": rows}


def test_balance_is_one_at_uniform_and_known_at_collapse():
    even = torch.arange(400 * K).view(400, K) % E
    # f uniform, whatever P
    assert float(moe.balance(torch.randn(400, E), even)) == pytest.approx(1)
    # P is
    assert float(
        moe.balance(torch.zeros(400, E), torch.zeros(400, K, dtype=torch.long))
    ) == pytest.approx(1)
    for k in (1, 2, 4, E):
        alone = routed(towards(list(range(k))), k)
        assert float(moe.balance(alone.logits, alone.chosen)) == pytest.approx(E / k)


def test_balance_equals_its_definition_and_only_P_has_a_gradient():
    logits = torch.randn(60, E, dtype=torch.float64, requires_grad=True)
    chosen = logits.detach().topk(K, dim=1).indices
    P = logits.softmax(dim=1).mean(dim=0)
    f = torch.tensor(
        [sum(e in row for row in chosen.tolist()) / (60 * K) for e in range(E)], dtype=torch.float64
    )
    expected = E * (f * P).sum()
    ours = moe.balance(logits, chosen)
    assert float(ours.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    ours.backward()
    expected_grad = torch.autograd.grad(expected, logits)[0]
    torch.testing.assert_close(logits.grad, expected_grad, rtol=1e-4, atol=1e-7)


def test_transformers_own_is_k_times_as_large_on_one_layer():
    one = routed(torch.randn(200, E) * 2)
    theirs = load_balancing_loss_func((one.logits,), E, K)
    assert float(theirs) == pytest.approx(K * float(moe.balance(one.logits, one.chosen)), rel=1e-5)


def test_over_layers_transformers_lets_opposite_collapses_cancel():
    first, second = routed(towards([0, 1, 2, 3]), 4), routed(towards([4, 5, 6, 7]), 4)
    theirs = load_balancing_loss_func((first.logits, second.logits), E, 4)
    assert float(theirs) / 4 == pytest.approx(1)  # all is well
    ours = moe.auxiliary([first, second], tokens=1, balance_weight=1.0, z_weight=0.0)
    assert float(ours["balance"]) == pytest.approx(E / 4)


def test_z_is_the_mean_square_of_the_log_sum():
    logits = torch.randn(50, E, dtype=torch.float64) * 3
    assert float(moe.z(logits)) == pytest.approx(
        float(logits.exp().sum(1).log().pow(2).mean()), rel=1e-5
    )


def test_padding_does_not_count():
    logits, mask = torch.randn(40, E), torch.ones(4, 10)
    mask[:, 7:] = 0
    with_padding = moe.auxiliary(
        [routed(logits)], tokens=1, balance_weight=1.0, z_weight=1.0, mask=mask
    )
    without = moe.auxiliary(
        [routed(logits[mask.flatten().bool()])], tokens=1, balance_weight=1.0, z_weight=1.0
    )
    assert with_padding == without
    with pytest.raises(ValueError, match="attention_mask has 40"):
        moe.auxiliary([routed(logits[:20])], tokens=1, balance_weight=1.0, z_weight=1.0, mask=mask)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "jamba"])
def test_the_language_term_stays_itself_and_evaluation_has_no_other(family, rows, machine):
    small = dict(hidden=32, layers=2, heads=2)
    model = (
        jamba.jamba(256, **small) if family == "jamba" else models.tiny(256, family=family, **small)
    )
    terms = moe.loss(balance_weight=0.5, z_weight=0.1)(model, batch_of(rows))
    plain = losses.causal_lm(model, batch_of(rows))
    assert torch.equal(terms["ce"], plain["ce"]) and set(terms) == {"ce", "balance", "z"}
    tokens = int(losses.supervised(rows))
    with moe.routing(model) as seen:
        losses.causal_lm(model, batch_of(rows))
    losses.causal_lm(model, batch_of(rows))  # nobody listens
    assert len(seen) == len(moe.routers(model))
    mean = {
        "balance": sum(float(moe.balance(r.logits, r.chosen).detach()) for r in seen) / len(seen)
    }
    mean["z"] = sum(float(moe.z(r.logits).detach()) for r in seen) / len(seen)
    assert float(terms["balance"]) == pytest.approx(0.5 * tokens * mean["balance"], rel=1e-5)
    assert float(terms["z"]) == pytest.approx(0.1 * tokens * mean["z"], rel=1e-5)
    logits = model(input_ids=rows).logits[:, :-1].flatten(0, 1)
    assert train.evaluate(model, rows, machine=machine)["loss"] == pytest.approx(
        float(F.cross_entropy(logits, rows[:, 1:].flatten())), rel=1e-5
    )
    assert set(moe.loss(balance_weight=0.0, z_weight=0.0)(model, batch_of(rows))) == {"ce"}


def test_checkpointing_changes_neither_terms_nor_gradients_and_counts_each_router_once(
    mixture, rows
):
    results = {}
    for kind in ("plain", "checkpointed"):
        model = copy.deepcopy(mixture)
        if kind == "checkpointed":
            compiling.checkpoint_blocks(model)
        ran = []
        for router in moe.routers(model).values():
            router.register_forward_hook(lambda *_, ran=ran: ran.append(1))
        terms = moe.loss(balance_weight=1.0, z_weight=1.0)(model, batch_of(rows))
        sum(terms.values()).backward()
        results[kind] = (
            {n: float(t.detach()) for n, t in terms.items()},
            {n: p.grad for n, p in model.named_parameters()},
        )
        assert len(ran) == (4 if kind == "plain" else 8)  # backward does run them again
    assert results["plain"][0] == results["checkpointed"][0]
    for name, grad in results["plain"][1].items():
        torch.testing.assert_close(grad, results["checkpointed"][1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_blocks_compiled_before_anybody_listened_report_too(mixture, rows):
    plain = moe.loss()(mixture, batch_of(rows))
    compiled = models.tiny(256, family="qwen3_moe", hidden=32, layers=4, heads=2)
    compiled.load_state_dict(mixture.state_dict())
    compiling.compile_blocks(compiled, backend="eager")
    losses.causal_lm(compiled, batch_of(rows))
    for _ in range(2):
        terms = moe.loss()(compiled, batch_of(rows))
        assert {n: float(t.detach()) for n, t in terms.items()} == pytest.approx(
            {n: float(t.detach()) for n, t in plain.items()}, rel=1e-5
        )
    assert len(router_health.observe(compiled, rows)) == 4
    torch._dynamo.reset()


def test_accumulation_does_not_multiply_it(mixture, machine):
    """The same rows in every micro-batch: the step, and every term of the record, are those of one
    micro-batch.
    """
    (one,) = torch.randint(256, (1, 2, 24))
    found = {}
    for accumulate in (1, 4):
        model = copy.deepcopy(mixture)
        (record,) = train.fit(
            model, iter([batch_of(one)] * accumulate), groups.optimizers(model), total=1, accumulate=accumulate,
            loss=moe.loss(balance_weight=0.5, z_weight=0.1), machine=machine,
        )  # fmt: skip
        found[accumulate] = {
            name: record[name] for name in ("ce", "balance", "z", "loss", "grad_norm")
        }
    assert found[1] == pytest.approx(found[4], rel=1e-5)


def test_the_losses_work(mixture, stream, machine):
    """From a router that starts collapsed, the weight decides whether it stays so."""
    after = {}
    for weight in (0.0, 0.3):
        model = copy.deepcopy(mixture)
        with torch.no_grad():
            for router in moe.routers(model).values():
                router.weight[:K] *= 40
        options = dict(
            total=30, loss=moe.loss(balance_weight=weight, z_weight=0.0), machine=machine, clip=0
        )
        train.fit(
            model, text.Batches(stream, rows=4, length=32), train.adamw(model, lr=1e-2), **options
        )
        after[weight] = router_health.diagnose(model, text.fixed_rows(stream, length=32, limit=16))
    mean = {
        weight: sum(h.balance for h in layers) / len(layers) for weight, layers in after.items()
    }
    assert mean[0.3] < mean[0.0] and mean[0.3] < 1.3


@pytest.mark.parametrize("wrong", ["balance_weight", "z_weight"])
def test_a_negative_weight_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{wrong} = -1"):
        moe.loss(**{wrong: -1.0})


def test_a_dense_model_is_no_mixture(tiny, rows):
    with pytest.raises(ValueError, match="no router"):
        moe.loss()(tiny, batch_of(rows))


def test_with_all_experts_it_is_the_dense_mixture():
    model = models.tiny(
        256, family="qwen3_moe", hidden=32, layers=1, heads=2, num_experts=4, num_experts_per_tok=4
    )
    block, x = model.model.layers[0].mlp, torch.randn(2, 6, 32)
    found = block(x)
    block, x = block.double(), x.double()
    weights = F.linear(x, block.gate.weight).softmax(-1)
    expected = torch.zeros_like(x)
    for e in range(4):
        gate, up = (x @ block.experts.gate_up_proj[e].T).chunk(2, dim=-1)
        expected += weights[..., e, None] * ((F.silu(gate) * up) @ block.experts.down_proj[e].T)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_no_token_is_lost_or_served_twice(mixture, rows):
    for r in router_health.observe(mixture, rows):
        assert r.chosen.shape == (rows.numel(), K)
        assert all(len(set(row)) == K for row in r.chosen.tolist())
        assert float(moe.load(r.chosen, E).sum()) == pytest.approx(1)
