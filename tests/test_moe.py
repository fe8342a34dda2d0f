"""Mixtures: auxiliary losses, routing diagnosis, skipped tokens, heads for later tokens, routed Mamba, the Trainer."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from nblib import compiling, losses, models, text, train
from nblib.methods import depths, heads, hybrid, moe, moe_trainer, movement, placement, stacked_muon
from nblib.pitfalls import trainer_bench

E, K = 8, 2


@pytest.fixture
def mixture():
    return models.tiny(256, family="qwen3_moe", hidden=32, layers=4, heads=2, num_experts=E, num_experts_per_tok=K)


@pytest.fixture
def rows():
    return torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(3))


def batch_of(rows):
    return {"input_ids": rows, "labels": rows}


def routed(logits, k=K):
    return moe.Routed("a", logits, logits.topk(k, dim=1).indices)


def towards(experts, tokens=400, strength=60.0):
    """Logits that send every token to these experts, with certainty."""
    logits = torch.zeros(tokens, E)
    logits[:, experts] = strength
    return logits


# ------------------------------------------------------------------------------------------------- the two losses


def test_balance_is_one_at_uniform_and_known_at_collapse():
    even = torch.arange(400 * K).view(400, K) % E
    assert float(moe.balance(torch.randn(400, E), even)) == pytest.approx(1)  # f uniform, whatever P
    assert float(moe.balance(torch.zeros(400, E), torch.zeros(400, K, dtype=torch.long))) == pytest.approx(1)  # P is
    for k in (1, 2, 4, E):
        alone = routed(towards(list(range(k))), k)
        assert float(moe.balance(alone.logits, alone.chosen)) == pytest.approx(E / k)


def test_balance_equals_its_definition_and_only_P_has_a_gradient():
    logits = torch.randn(60, E, dtype=torch.float64, requires_grad=True)
    chosen = logits.detach().topk(K, dim=1).indices
    P = logits.softmax(dim=1).mean(dim=0)
    f = torch.tensor([sum(e in row for row in chosen.tolist()) / (60 * K) for e in range(E)], dtype=torch.float64)
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
    assert float(moe.z(logits)) == pytest.approx(float(logits.exp().sum(1).log().pow(2).mean()), rel=1e-5)


def test_padding_does_not_count():
    logits, mask = torch.randn(40, E), torch.ones(4, 10)
    mask[:, 7:] = 0
    with_padding = moe.auxiliary([routed(logits)], tokens=1, balance_weight=1.0, z_weight=1.0, mask=mask)
    without = moe.auxiliary([routed(logits[mask.flatten().bool()])], tokens=1, balance_weight=1.0, z_weight=1.0)
    assert with_padding == without
    with pytest.raises(ValueError, match="attention_mask has 40"):
        moe.auxiliary([routed(logits[:20])], tokens=1, balance_weight=1.0, z_weight=1.0, mask=mask)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "jamba"])
def test_the_language_term_stays_itself_and_evaluation_has_no_other(family, rows, machine):
    small = dict(hidden=32, layers=2, heads=2)
    model = hybrid.jamba(256, **small) if family == "jamba" else models.tiny(256, family=family, **small)
    terms = moe.loss(balance_weight=0.5, z_weight=0.1)(model, batch_of(rows))
    plain = losses.causal_lm(model, batch_of(rows))
    assert torch.equal(terms["ce"], plain["ce"]) and set(terms) == {"ce", "balance", "z"}
    tokens = int(losses.supervised(rows))
    assert 0.5 * tokens * 0.9 < float(terms["balance"]) < 0.5 * tokens * 2
    logits = model(input_ids=rows).logits[:, :-1].flatten(0, 1)
    assert train.evaluate(model, rows, machine=machine)["loss"] == pytest.approx(
        float(F.cross_entropy(logits, rows[:, 1:].flatten())), rel=1e-5
    )
    assert set(moe.loss(balance_weight=0.0, z_weight=0.0)(model, batch_of(rows))) == {"ce"}


def test_checkpointing_changes_neither_terms_nor_gradients_and_counts_each_router_once(mixture, rows):
    found = {}
    for kind in ("plain", "checkpointed"):
        model = copy.deepcopy(mixture)
        if kind == "checkpointed":
            compiling.checkpoint_blocks(model)
        with moe.routing(model) as seen:
            terms = moe.loss(balance_weight=1.0, z_weight=1.0)(model, batch_of(rows))
            sum(terms.values()).backward()
            runs = len(seen)
        found[kind] = ({n: float(t) for n, t in terms.items()}, {n: p.grad for n, p in model.named_parameters()})
        assert runs == (4 if kind == "plain" else 8)  # backward does run them again
    assert found["plain"][0] == found["checkpointed"][0]
    for name, grad in found["plain"][1].items():
        torch.testing.assert_close(grad, found["checkpointed"][1][name], rtol=1e-5, atol=1e-6)


def test_accumulation_does_not_multiply_it(mixture, machine):
    """The same rows in every micro-batch: the step, and every term of the record, are those of one micro-batch."""
    (one,) = torch.randint(256, (1, 2, 24))
    found = {}
    for accumulate in (1, 4):
        model = copy.deepcopy(mixture)
        (record,) = train.fit(
            model, iter([batch_of(one)] * accumulate), placement.optimizers(model), total=1, accumulate=accumulate,
            loss=moe.loss(balance_weight=0.5, z_weight=0.1), machine=machine,
        )  # fmt: skip
        found[accumulate] = {name: record[name] for name in ("ce", "balance", "z", "loss", "grad_norm")}
    assert found[1] == pytest.approx(found[4], rel=1e-5)


def test_the_losses_work(mixture, stream, machine):
    """From a router that starts collapsed, the weight decides whether it stays so."""
    after = {}
    for weight in (0.0, 0.3):
        model = copy.deepcopy(mixture)
        with torch.no_grad():
            for router in moe.routers(model).values():
                router.weight[:K] *= 40
        options = dict(total=30, loss=moe.loss(balance_weight=weight, z_weight=0.0), machine=machine, clip=0)
        train.fit(model, text.Batches(stream, rows=4, length=32), train.adamw(model, lr=1e-2), **options)
        after[weight] = moe.diagnose(model, text.fixed_rows(stream, length=32, limit=16))
    mean = {weight: sum(h.balance for h in layers) / len(layers) for weight, layers in after.items()}
    assert mean[0.3] < mean[0.0] and mean[0.3] < 1.3


@pytest.mark.parametrize("wrong", ["balance_weight", "z_weight"])
def test_a_negative_weight_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{wrong} = -1"):
        moe.loss(**{wrong: -1.0})


def test_a_dense_model_is_no_mixture(tiny, rows):
    with pytest.raises(ValueError, match="no router"):
        moe.loss()(tiny, batch_of(rows))


# --------------------------------------------------------------------------------------------------- the mixture


def test_with_all_experts_it_is_the_dense_mixture():
    model = models.tiny(256, family="qwen3_moe", hidden=32, layers=1, heads=2, num_experts=4, num_experts_per_tok=4)
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
    for r in moe.observe(mixture, rows):
        assert r.chosen.shape == (rows.numel(), K)
        assert all(len(set(row)) == K for row in r.chosen.tolist())
        assert float(moe.load(r.chosen, E).sum()) == pytest.approx(1)


def test_health_tells_spread_from_collapse():
    spread = moe.health(moe.Routed("a", torch.zeros(400, E), torch.arange(400 * K).view(400, K) % E))
    assert spread.entropy == pytest.approx(1) and spread.effective == pytest.approx(E, rel=1e-4)
    assert spread.gini == pytest.approx(0, abs=1e-6)
    assert (spread.dead, spread.starved, spread.collapsed) == (0, 0, False)
    fallen = moe.health(routed(towards([2, 5])))
    assert fallen.effective == pytest.approx(K) and fallen.entropy == pytest.approx(math.log(K) / math.log(E))
    assert (fallen.dead, fallen.starved, fallen.collapsed) == (E - K, E - K, True)
    assert fallen.largest == pytest.approx(E / K) and fallen.smallest == 0
    assert fallen.gini == pytest.approx(1 - K / E)
    assert not moe.health(routed(torch.randn(400, E), E)).collapsed  # k = E cannot


def test_gini_is_that_of_the_lorenz_curve():
    share = torch.rand(12).softmax(0).sort().values.double()
    rank = torch.arange(1, 13)
    lorenz = float((2 * (rank * share).sum() / (12 * share.sum())) - 13 / 12)
    assert moe.gini(share) == pytest.approx(lorenz)


def test_starved_is_under_a_tenth_of_the_fair_share():
    counts = [1, 20, 100, 100, 100, 100, 100, 100]  # fair is 77.6
    chosen = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)] + [torch.tensor([2])])[:, None]
    found = moe.health(moe.Routed("a", torch.zeros(len(chosen), E), chosen))
    assert (found.dead, found.starved) == (0, 1)


def test_the_map_by_kind():
    kind_of = torch.tensor([0] * 100 + [3] * 156)
    tokens = torch.randint(256, (10, 50))
    logits = F.one_hot((tokens.flatten() >= 100).long() * 3, E).float() * 10
    table = moe.routing_map(routed(logits, 1), tokens, kind_of)
    assert table[0, 0] == table[3, 3] == 1 and table[1].isnan().all()
    counts = torch.bincount(kind_of[tokens.flatten()], minlength=len(moe.KINDS)).float()
    assert moe.told_by_kind(table, counts) == pytest.approx(1)
    same = torch.full((len(moe.KINDS), E), 1 / E)
    assert moe.told_by_kind(same, counts) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="given are 10"):
        moe.routing_map(routed(logits, 1), tokens[0, :10], kind_of)


def test_kinds_of_a_real_tokenizer():
    tokenizer = text.train_tokenizer(text.documents("prose", "validation"), vocab_size=600)
    kind_of = moe.kinds(tokenizer)
    assert len(kind_of) == len(tokenizer)

    def kind(piece):
        (token,) = tokenizer.encode(piece, add_special_tokens=False)
        return moe.KINDS[int(kind_of[token])]

    assert [kind(p) for p in (" the", "ing", "7", ".", "\n")] == [
        "word",
        "inside a word",
        "number",
        "punctuation",
        "space",
    ]
    assert moe.KINDS[int(kind_of[tokenizer.eos_token_id])] == "special"


# ---------------------------------------------------------------------------------------------- mixture of depths


def deep(family="qwen3", **options):
    model = models.tiny(256, family=family, hidden=32, layers=4, heads=2)
    options = dict(capacity=0.5) | options
    depths.attach(model, **options)
    with torch.no_grad():  # decisions that differ from token to token
        for m in depths.wrapped(model).values():
            m.router.weight.normal_(std=1.0)
            m.predictor[2].weight.normal_(std=8.0), m.predictor[2].bias.zero_()
    return model


def through(model, rows):
    """Input, output and choice of the first layer that skips."""
    layer, kept = next(iter(depths.wrapped(model).values())), {}
    handle = layer.register_forward_hook(
        lambda m, args, kwargs, output: kept.update(x=(args or (kwargs["hidden_states"],))[0], y=output),
        with_kwargs=True,
    )
    with depths.choices(model) as made:
        model.base_model(input_ids=rows, use_cache=False)
    handle.remove()
    return kept["x"].detach(), kept["y"].detach(), next(iter(made.values()))[0]


@pytest.mark.parametrize("training", [True, False])
def test_skipped_tokens_are_the_identity_to_the_bit(rows, training):
    x, y, choice = through(deep().train(training), rows)
    assert 0 < choice.chosen.sum() < choice.chosen.numel()
    assert torch.equal(y[~choice.chosen], x[~choice.chosen])
    assert not (y[choice.chosen] == x[choice.chosen]).all(dim=-1).any()


def test_capacity_is_kept_in_training(rows):
    for capacity, count in ((0.5, 12), (0.75, 18), (0.01, 1), (1.0, 24)):
        _, _, choice = through(deep(capacity=capacity), rows)
        assert choice.chosen.sum(dim=1).tolist() == [count] * 4


@pytest.mark.parametrize("training", [True, False])
def test_the_chosen_attend_to_the_chosen_at_their_own_positions(rows, training):
    """Against the bare layer on the whole row with a mask that hides the skipped; also with ragged choices."""
    model = deep().train(training)
    x, y, choice = through(model, rows)
    layer = next(iter(depths.wrapped(model).values()))
    T = rows.shape[1]
    sees = torch.ones(T, T, dtype=torch.bool).tril() & choice.chosen[:, None, None, :]
    sees = sees | torch.eye(T, dtype=torch.bool)  # a row of the mask must not be empty
    positions = torch.arange(T)[None]
    turned = model.model.rotary_emb(x, positions)
    full = layer.block(x, attention_mask=sees, position_ids=positions, position_embeddings=turned)
    expected = x + choice.scores.sigmoid()[..., None] * (full - x)
    torch.testing.assert_close(y[choice.chosen], expected[choice.chosen], rtol=1e-5, atol=1e-6)
    if not training:
        assert len(set(choice.chosen.sum(dim=1).tolist())) > 1


def test_a_mask_is_cut_to_the_chosen(rows):
    """Padding on the left: the padded model sees what the bare rows see."""
    model = deep().eval()
    bare = model(input_ids=rows).logits
    padded = torch.cat([torch.zeros(4, 3, dtype=torch.long), rows], dim=1)
    mask = (torch.arange(27) >= 3).long().expand(4, -1)
    positions = (torch.arange(27) - 3).clamp_min(0).expand(4, -1)
    seen = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
    torch.testing.assert_close(seen, bare, rtol=1e-4, atol=1e-5)


def test_no_later_token_changes_an_earlier_output(rows):
    other = rows.clone()
    other[:, 12:] = (other[:, 12:] + 7) % 256
    for model, causal in ((deep().eval(), True), (deep(causal=True).train(), True), (deep().train(), False)):
        early, again = model(input_ids=rows).logits[:, :12], model(input_ids=other).logits[:, :12]
        assert torch.allclose(early, again, atol=1e-5) == causal


def test_causal_training_is_evaluation_to_the_bit(rows):
    model = deep(causal=True)
    assert torch.equal(model.train()(input_ids=rows).logits, model.eval()(input_ids=rows).logits)


def test_with_the_same_choice_training_and_evaluation_are_one_function(rows):
    model = deep(layers=[1]).train()
    _, y, choice = through(model, rows)
    layer = next(iter(depths.wrapped(model).values()))
    layer.predictor = Told(choice.highest)
    _, again, evaluated = through(model.eval(), rows)
    assert torch.equal(evaluated.chosen, choice.chosen) and torch.equal(again, y)


class Told(nn.Module):
    """A network that has learnt its task perfectly."""

    def __init__(self, highest):
        super().__init__()
        self.highest = highest

    def forward(self, x):
        return self.highest.float()[..., None] - 0.5


def test_the_router_learns_and_the_second_network_leaves_the_trunk_alone(rows):
    model = deep()
    sum(depths.loss()(model, batch_of(rows)).values()).backward()
    for m in depths.wrapped(model).values():
        assert m.router.weight.grad.norm() > 0 and m.predictor[0].weight.grad.norm() > 0
    trunk = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    losses.causal_lm(model, batch_of(rows))["ce"].backward()
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, trunk, rtol=1e-5, atol=1e-6)


def test_training_teaches_the_decision(stream, machine):
    model = models.tiny(256, hidden=32, layers=2, heads=2)
    depths.attach(model, capacity=0.5)
    held = text.fixed_rows(stream, length=32, limit=32)
    before = depths.agreement(model, held)[0]["agree"]
    options = dict(total=100, loss=depths.loss(weight=1.0), machine=machine)
    train.fit(model, text.Batches(stream, rows=8, length=32), train.adamw(model, lr=1e-2), **options)
    (after,) = depths.agreement(model, held)
    assert after["agree"] > max(0.7, before + 0.1) and 0.3 < after["worked on"] < 0.7


def test_generation_with_a_cache_is_generation_without(rows):
    model = deep().eval()
    greedy = dict(max_new_tokens=12, do_sample=False)
    assert torch.equal(
        model.generate(rows[:1, :6], use_cache=True, **greedy), model.generate(rows[:1, :6], use_cache=False, **greedy)
    )
    with pytest.raises(ValueError, match="one row only"):
        model.generate(rows[:, :6], use_cache=True, **greedy)
    with pytest.raises(ValueError, match="first layer"):
        deep(layers=[0]).eval().generate(rows[:1, :6], use_cache=True, **greedy)


def test_checkpointed_gradients_are_the_same_with_skipping(rows):
    grads, start = {}, deep("qwen3_moe")
    for checkpointed in (False, True):
        model = copy.deepcopy(start)
        if checkpointed:
            compiling.checkpoint_blocks(model)
        terms = moe.loss(language=depths.loss())(model, batch_of(rows))
        sum(terms.values()).backward()
        grads[checkpointed] = {n: p.grad for n, p in model.named_parameters()}
    for name, grad in grads[False].items():
        torch.testing.assert_close(grad, grads[True][name], rtol=1e-5, atol=1e-6)


def test_the_fault_doubles_what_is_skipped(rows):
    x, y, choice = through(deep(skipped="doubled"), rows)
    assert torch.equal(y[~choice.chosen], 2 * x[~choice.chosen])
    x, y, choice = through(deep(skipped="doubled").eval(), rows)
    assert torch.equal(y[~choice.chosen], 2 * x[~choice.chosen])


@pytest.mark.parametrize("wrong", [dict(capacity=0.0), dict(capacity=1.5), dict(layers=[9]), dict(skipped="zero")])
def test_attach_refuses_by_name(wrong, tiny):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        depths.attach(tiny, **wrong)
    depths.attach(tiny)
    with pytest.raises(ValueError, match="wrapped already"):
        depths.attach(tiny)


# ------------------------------------------------------------------------------------------- several tokens ahead


def test_heads_are_the_plain_cross_entropies(tiny, rows):
    heads.attach(tiny)
    labels = rows.clone()
    labels[0, 5:9] = losses.IGNORED
    terms = heads.loss()(tiny, {"input_ids": rows, "labels": labels})
    hidden = tiny.model(input_ids=rows).last_hidden_state.double()
    weights = [w / 2 for w in (1, 0.5, 0.3, 0.2)]
    for i, (w, head) in enumerate(zip(weights, [tiny.lm_head, *tiny.ahead]), 1):
        logits = hidden[:, :-i] @ head.weight.double().T
        expected = F.cross_entropy(logits.flatten(0, 1), labels[:, i:].flatten(), reduction="sum")
        assert float(terms[f"ahead{i}"]) == pytest.approx(w * float(expected), rel=1e-5)
    values = {name: float(t) for name, t in terms.items()}
    assert heads.unweighted(values)["ahead1"] == pytest.approx(2 * values["ahead1"])


def test_heads_train_and_go(tiny, stream, machine, rows):
    plain = tiny(input_ids=rows).logits
    heads.attach(tiny)
    assert torch.equal(tiny(input_ids=rows).logits, plain)
    where = placement.places(tiny)
    assert all(where[n].optimizer == "AdamW" for n in where if n.startswith("ahead"))
    batches = text.Batches(stream, rows=8, length=32)
    train.fit(tiny, batches, train.adamw(tiny, lr=1e-2), total=60, loss=heads.loss(), machine=machine)
    held = text.fixed_rows(stream, length=32, limit=16)
    known = heads.evaluate(tiny, held)
    assert known[0] < known[1] < known[2] < known[3]  # noisy counting: the farther, the less is known
    assert known[0] == pytest.approx(train.evaluate(tiny, held, machine=machine)["loss"], rel=1e-5)
    names = set(heads.detach(tiny).state_dict())
    assert not any("ahead" in name for name in names)


def test_heads_accumulate_exactly(tiny, rows, machine):
    found = {}
    heads.attach(tiny)
    for micro in (4, 1):
        model = copy.deepcopy(tiny)
        batches = iter([batch_of(part) for part in rows.split(micro)])
        (record,) = train.fit(
            model,
            batches,
            train.adamw(model, lr=1e-3),
            total=1,
            accumulate=4 // micro,
            loss=heads.loss(),
            machine=machine,
        )
        found[micro] = {name: record[name] for name in ("ahead1", "ahead4", "grad_norm")}
    assert found[4] == pytest.approx(found[1], rel=1e-5)


def test_heads_refuse_by_name(tiny):
    with pytest.raises(ValueError, match="heads = 1"):
        heads.attach(tiny, heads=1)
    heads.attach(tiny, heads=2)
    with pytest.raises(ValueError, match="2 heads already"):
        heads.attach(tiny)
    with pytest.raises(ValueError, match="weights"):
        heads.normalised(2, (1.0,))


# --------------------------------------------------------------------------------------------------- Jamba, Mamba


def test_jamba_trains_with_all_of_it(stream, machine):
    model = hybrid.jamba(256, hidden=32, layers=4, heads=2)
    kinds = [type(layer).__name__ for layer in model.model.layers]
    assert kinds.count("JambaAttentionDecoderLayer") == 1 and len(moe.routers(model)) == 2
    made = placement.optimizers(model)
    where = placement.places(model)
    for kind, belongs in (
        ("A_log", "AdamW"),
        ("conv1d.weight", "AdamW"),
        ("mamba.in_proj", "Muon"),
        ("gate_up", "Muon"),
    ):
        assert {where[n].optimizer for n in where if kind in n} == {belongs}
    options = dict(total=8, loss=moe.loss(), machine=machine)
    records = train.fit(model, text.Batches(stream, rows=4, length=16), made, **options)
    assert records[-1]["ce"] < records[0]["ce"] - 0.1


def test_routed_mamba_with_all_experts_is_the_dense_mixture_and_keeps_order():
    model = hybrid.jamba(256, hidden=32, layers=2, heads=2).double()
    names = hybrid.route_mamba(model, experts=3, top_k=3)
    layer = model.get_submodule(names[0])
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    shares = F.linear(x, layer.router.weight).softmax(-1)
    expected = sum(shares[..., e, None] * layer.mixers[e](hidden_states=x) for e in range(3))
    torch.testing.assert_close(layer(hidden_states=x), expected, rtol=1e-5, atol=1e-8)
    assert not torch.equal(layer.mixers[0].in_proj.weight, layer.mixers[1].in_proj.weight)
    later = x.clone()
    later[:, 5:] += 1
    torch.testing.assert_close(layer(hidden_states=later)[:, :5], expected[:, :5], rtol=1e-5, atol=1e-8)


def test_routed_mamba_gives_each_token_to_its_experts(rows):
    model = hybrid.jamba(256, hidden=32, layers=2, heads=2)
    names = hybrid.route_mamba(model, experts=3, top_k=1)
    layer = model.get_submodule(names[0])
    with torch.no_grad():
        layer.router.weight.normal_()
    x = torch.randn(2, 9, 32)
    _, _, chosen = layer.router(x)
    outputs = torch.stack([m(hidden_states=x) for m in layer.mixers], dim=2)  # (B, T, E, D)
    expected = outputs.flatten(0, 1)[torch.arange(18), chosen[:, 0]].view(2, 9, 32)
    torch.testing.assert_close(layer(hidden_states=x), expected)
    assert any("mamba" in r.layer for r in moe.observe(model, rows))  # balanced and diagnosed like any router


def test_hybrids_refuse_by_name(tiny):
    with pytest.raises(ValueError, match="top_k = 5"):
        hybrid.jamba(256, experts=4, top_k=5)
    with pytest.raises(ValueError, match="no Mamba"):
        hybrid.route_mamba(tiny)


# -------------------------------------------------------------------------------------------------------- movement


def moved(model, made, machine, stream, total=5, **options):
    start = movement.snapshot(model)
    options |= dict(total=total, machine=machine, clip=0)
    records = train.fit(model, text.Batches(stream, rows=2, length=16), made, **options)
    return {m.parameter: m for m in movement.audit(model, start, made, records)}, records


def test_bf16_norms_round_away_and_fp32_norms_move(tiny, stream, machine):
    low = copy.deepcopy(tiny).bfloat16()
    norm = "model.norm.weight"
    table, _ = moved(low, [train.adamw(low, lr=1e-3)], machine, stream)
    assert table[norm].verdict == "stuck: every step rounds away" and table[norm].changed == 0
    table, _ = moved(tiny, [train.adamw(tiny, lr=1e-3)], machine, stream)
    assert table[norm].changed == 1 and table[norm].rounded == 0
    assert all(m.verdict.startswith("moved") for m in table.values())


def test_the_reach_is_how_far_steady_gradients_go():
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.ones(8))
    model.c, model.d, model.e = (nn.Parameter(torch.ones(3)) for _ in range(3))
    made = [
        stacked_muon.StackedMuon([model.a], lr=0.02),
        torch.optim.AdamW([model.b, model.c], lr=1e-3, weight_decay=0.0),
    ]
    made.append(torch.optim.AdamW([model.d], lr=0.0))
    start, steady = movement.snapshot(model), torch.randn(24, 16)
    for _ in range(20):
        model.a.grad, model.b.grad, model.d.grad = steady.clone(), torch.ones(8), torch.ones(3)
        for optimizer in made:
            optimizer.step()
    table = {m.parameter: m for m in movement.audit(model, start, made, [{"lr": 0.02}] * 20)}
    for name in "ab":
        assert table[name].moved == pytest.approx(table[name].reach, rel=0.1)
    assert table["c"].verdict == "stuck: no gradient"
    assert table["d"].verdict == "stuck: its rate is 0"
    assert table["e"].verdict == "stuck: in no optimizer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_the_spacing_is_where_an_update_begins_to_count(dtype):
    p = torch.tensor([1.0, 1.5, 0.02, -3.0, 1e-3], dtype=dtype)
    half = movement.half_spacing(p)
    towards_zero = -p.double().sign() * half
    kept = (p.double() + 1.01 * towards_zero).to(dtype)
    lost = (p.double() + 0.99 * towards_zero).to(dtype)
    assert (kept != p).all() and torch.equal(lost, p)


def test_precision_names_what_a_norm_feels(tiny):
    tiny.model.layers[0].bfloat16()
    found = {row["dtype"]: row for row in movement.precision(tiny)}
    assert found["bfloat16"]["norms feel"] == 2**-9 and found["float32"]["norms feel"] < 1e-7
    assert sum(row["entries"] for row in found.values()) == sum(p.numel() for p in tiny.parameters())


def test_gradient_range():
    found = movement.gradient_range([{"grad_norm": n} for n in (0.01, 1.0, 2.0, math.nan)] + [{"event": "rollback"}])
    assert found["outside"] == 0.5
    with pytest.raises(ValueError, match="grad_norm"):
        movement.gradient_range([{"loss": 1.0}])


# ---------------------------------------------------------------------------------------------------- the Trainer


class Rows(torch.utils.data.Dataset):
    ids = torch.randint(256, (16, 24), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[: (i % 3) * 6] = losses.IGNORED  # micro-batches of different weight
        return {"input_ids": self.ids[i], "labels": labels}


def by_trainer(model, folder, *, resume=None, steps=4, balance_weight=0.1, **options):
    with trainer_bench.bench.seeded(), trainer_bench.quiet():
        args = trainer_bench.arguments(str(folder), max_steps=steps, gradient_accumulation_steps=2, **options)
        muon = dict(lr=0.02, adamw_lr=3e-3)
        kinds = dict(balance_weight=balance_weight, z_weight=0.01, muon=muon)
        trainer = moe_trainer.Trainer(model=model, args=args, train_dataset=Rows(), eval_dataset=Rows(), **kinds)
        trainer.train(resume_from_checkpoint=resume)
        judged = trainer.evaluate()["eval_loss"]
    return trainer, [line for line in trainer.state.log_history if "grad_norm" in line], judged


def test_the_trainer_has_the_terms_and_evaluation_has_not(mixture, tmp_path):
    trainer, log, judged = by_trainer(mixture, tmp_path)
    for line in log:
        parts = line["language_loss"] + line["balance_loss"] + line["z_loss"]
        assert line["loss"] == pytest.approx(parts, rel=1e-3)
        assert 0.09 < line["balance_loss"] < 0.2  # 0.1 x about 1, whatever the micro-batches
    sums, tokens = 0.0, 0
    for i in range(16):
        item = {name: t[None] for name, t in Rows()[i].items()}
        sums += float(losses.causal_lm(trainer.model.eval(), item)["ce"])
        tokens += int(losses.supervised(item["labels"]))
    # transformers averages evaluation batches of 8 rows by rows, so equal up to the batches' different weights
    assert judged == pytest.approx(sums / tokens, rel=2e-2)


def test_the_trainers_resume_brings_the_experts_back(mixture, tmp_path):
    other = copy.deepcopy(mixture)
    straight, log, _ = by_trainer(mixture, tmp_path / "a", save_strategy="steps", save_steps=2)
    with torch.no_grad():
        for p in other.parameters():
            p.normal_()
    resumed, rest, _ = by_trainer(other, tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-2"))
    for (name, p), q in zip(straight.model.named_parameters(), resumed.model.parameters()):
        assert torch.equal(p, q), name
    assert [line["loss"] for line in rest][-2:] == [line["loss"] for line in log][-2:]


def test_the_trainer_refuses_what_would_count_twice(mixture, tmp_path):
    mixture.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits"):
        by_trainer(mixture, tmp_path)
