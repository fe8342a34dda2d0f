"""The pieces of a mixture's training on each family that transformers has: routers, placement,
balance, Muon, resume.

Each family names and stores its experts in its own way: stacked or transposed, with biases, with
shared experts, groups of experts, sigmoid scores, state spaces between them. What cannot be read is
refused in one sentence.
"""

import pytest
import test_hf
import torch
import transformers as tf
from conftest import FP32
from mixtures import FAMILIES, SIZES, mixture

from nblib import runtime, text, train
from nblib.methods import moe
from nblib.methods.muon import audit, groups
from nbworkbook import audit_weights

pytestmark = [pytest.mark.slow]
EXTRA = {"phimoe": dict(num_local_experts=8, num_experts_per_tok=2)}
EVERY = [*FAMILIES, *EXTRA]
LAYERS, EXPERTS, K = 2, 8, 2


def build(family: str, *, seed: int = 0):
    if family in FAMILIES:
        return mixture(family, seed=seed)
    with runtime.seeded(seed):
        return tf.AutoModelForCausalLM.from_config(
            tf.AutoConfig.for_model(family, **SIZES, **EXTRA[family])
        ).train()


@pytest.fixture(params=EVERY)
def family(request):
    return request.param


@pytest.fixture
def ids():
    return torch.randint(128, (4, 24), generator=torch.Generator().manual_seed(3))


def test_there_are_eleven_families_and_more():
    assert len(EVERY) >= 11


def test_every_router_is_found_and_says_what_it_chose(family, ids):
    model = build(family)
    assert len(moe.routers(model)) == LAYERS
    with moe.routing(model) as seen:
        model(input_ids=ids)
    assert [r.layer for r in seen] == list(moe.routers(model))
    for r in seen:
        assert r.logits.shape == (ids.numel(), EXPERTS) and r.chosen.shape == (ids.numel(), K)
        assert int(r.chosen.min()) >= 0 and int(r.chosen.max()) < EXPERTS
        assert (r.chosen.sort(dim=1).values.diff(dim=1) > 0).all()  # different experts
        assert float(moe.load(r.chosen, EXPERTS).sum()) == pytest.approx(1)
    counted = moe.sizes(model)
    assert 0 < counted["of the experts"] < counted["parameters"]
    assert (
        counted["parameters"] - counted["active"]
        == counted["of the experts"] * (EXPERTS - K) // EXPERTS
    )


def test_every_parameter_is_in_the_optimizer_that_it_belongs_in(family):
    """Experts are stacks and go to Muon; routers, embeddings, norms and biases do not."""
    model = build(family)
    assigned, named = groups.assign(model), dict(model.named_parameters())
    assert all(row.right for row in audit.audit(model, groups.optimizers(model)))
    stacks = [n for n, a in assigned.items() if a.reason.startswith("stacked experts")]
    assert len(stacks) == 2 * LAYERS and all(
        named[n].ndim == 3 and assigned[n].optimizer == "Muon" for n in stacks
    )
    routers = {id(p) for router in moe.routers(model).values() for p in router.parameters()}
    for name, a in assigned.items():
        tabled = (
            id(named[name]) in routers
            or "embed" in name
            or "lm_head" in name
            or named[name].ndim < 2
        )
        assert not (tabled or name.endswith("bias")) or a.optimizer == "AdamW", (name, a)
        assert a.optimizer == "AdamW" or named[name].ndim in (2, 3)


def test_the_balance_loss_is_one_where_routing_is_even_and_reaches_every_router(family, ids):
    model, batch = build(family), {"input_ids": ids, "labels": ids}
    tokens = 4 * 23
    routers = list(moe.routers(model).values())
    terms = moe.loss(balance_weight=1.0, z_weight=0.0)(model, batch)
    assert {"ce", "balance"} <= terms.keys() and float(terms["balance"].detach()) / tokens < EXPERTS
    (terms["balance"]).backward()
    assert all(float(router.weight.grad.abs().max()) > 0 for router in routers)
    with torch.no_grad():
        for router in routers:
            for p in router.parameters():
                p.zero_()
    even = moe.loss(balance_weight=1.0, z_weight=0.0)(model, batch)["balance"]
    assert float(even.detach()) / tokens == pytest.approx(1, rel=1e-5)


def batches():
    stream = torch.randint(128, (5000,), generator=torch.Generator().manual_seed(0))
    return text.Batches(stream, rows=4, length=32, seed=0)


def trained(family, folder=None, *, total=4, stop=None, seed=0):
    runtime.seed_all(seed)  # PhiMoE draws noise
    model = build(family, seed=seed)
    options = dict(
        total=total, loss=moe.loss(), machine=FP32, checkpoints=train.Checkpoints(folder, every=1)
    )
    records = []
    for record in train.steps(
        model, batches(), groups.optimizers(model, lr=0.02, adamw_lr=3e-3), **options
    ):
        records.append(record)
        if record["step"] == stop:
            break
    return model, records


def test_a_step_of_muon_moves_every_expert_that_has_tokens_and_leaves_the_rest(family):
    """And the size of the step is what its rate says, whatever the gradient's."""
    model = build(family)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizers = groups.optimizers(model, lr=0.02, adamw_lr=3e-3)
    (record,) = train.fit(model, batches(), optimizers, total=1, loss=moe.loss(), machine=FP32)
    assert record["loss"] > 0 and record["grad_norm"] > 0
    assigned = groups.assign(model)
    for name, p in model.named_parameters():
        if p.ndim == 3 and assigned[name].optimizer == "Muon":
            far = (p.detach() - before[name]).flatten(1).norm(dim=1)
            moved = far > 0
            assert moved.any() and float(far[moved].max() / far[moved].min()) < 3, name


def test_saved_and_resumed_it_ends_on_the_same_bits(family, tmp_path):
    straight, records = trained(family, tmp_path / "straight")
    trained(family, tmp_path / "cut", stop=2)
    resumed, again = trained(family, tmp_path / "cut", seed=1)  # what was there before is replaced
    assert [r["step"] for r in again] == [3, 4]
    assert [r["loss"] for r in again] == [r["loss"] for r in records[2:]]
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters()):
        assert torch.equal(a, b), name
    now, before = sorted((tmp_path / "straight").glob("step-*"), reverse=True)
    said = audit_weights.findings(list(audit_weights.measure(now, before)))
    # nblib audit finds nothing on any family
    assert [s for s in said if "no token chose it" not in s] == []


def test_resumed_under_the_trainer_it_ends_on_the_same_bits(family, tmp_path, monkeypatch):
    """Where the stock Trainer brings back a quarter of some mixtures (notebook 04)."""
    monkeypatch.setattr(test_hf.Rows, "ids", test_hf.Rows.ids % 128)
    options = dict(loss=test_hf.routed_loss(), save_strategy="steps", save_steps=2)
    straight, *_ = test_hf.by_trainer(build(family), tmp_path / "a", **options)
    checkpoint = str(tmp_path / "a" / "checkpoint-2")
    resumed, *_ = test_hf.by_trainer(
        build(family, seed=1), tmp_path / "b", resume=checkpoint, **options
    )
    for (name, p), q in zip(straight.model.named_parameters(), resumed.model.parameters()):
        assert torch.equal(p, q), name


def test_a_family_whose_router_says_something_else_is_refused_in_one_sentence(ids):
    """Llama 4 gives its scores and logits, and no indices."""
    sizes = SIZES | dict(
        num_local_experts=8, num_experts_per_tok=1, head_dim=8, intermediate_size_mlp=48
    )
    config = tf.Llama4TextConfig(**(sizes | dict(pad_token_id=0, attention_chunk_size=32)))
    model = tf.Llama4ForCausalLM(config)
    with pytest.raises(
        ValueError, match=r"router: Llama4Router does not give \(logits, weights, indices\)"
    ):
        with moe.routing(model):
            model(input_ids=ids)
