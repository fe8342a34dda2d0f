"""Prior variances, relevance, the pool of held-out rows, and pruning."""

import copy

import pytest
import torch
from ard_bench import KINDS, adapted, random_batch
from conftest import FP32
from torch import nn

from lessons.pitfalls import ard_lora
from nblib import losses, text, train, wiring
from nblib.methods import ard
from nblib.methods.ard import ranks


def test_priors_are_the_mean_square_of_the_latent():
    """Planted means and variances per rank come back, in order; a Monte-Carlo estimate over draws
    agrees.
    """
    model = adapted(kinds=("q_proj",)).eval()
    name, a = next(iter(ard.adapters(model).items()))
    with torch.no_grad():
        a.lora_mean.copy_(
            torch.linalg.qr(torch.randn(64, 64))[0][:4]
            * torch.tensor([2.0, 0.1, 1.0, 0.5])[:, None]
        )
        a.lora_logvar.zero_()
        a.lora_middle.copy_(torch.tensor([0.2, 0.002, 0.05, 0.01]).log())
    seen = {}
    a.base.register_forward_pre_hook(lambda _, args: seen.update(x=args[0].double()))
    batch = random_batch(rows=16, length=32)
    ranks.estimate_priors(model, [batch])
    mean, logvar = copy.deepcopy(a).double().latent(seen["x"].flatten(0, 1))
    assert torch.allclose(a.prior.double(), mean.square().mean(0) + logvar.exp()[0], rtol=1e-5)
    assert torch.allclose(a.power.double(), mean.square().mean(0), rtol=1e-5)
    assert a.prior.argsort(descending=True).tolist() == [0, 2, 3, 1]
    draws = mean + torch.randn(200, *mean.shape).double() * (logvar / 2).exp()
    assert torch.allclose(a.prior.double(), draws.square().mean((0, 1)), rtol=0.05)


def _of_training(model: nn.Module, batch: dict) -> dict[str, torch.Tensor]:
    """E z^2 per rank over the tokens of a pass in training mode."""
    with torch.no_grad(), ard.collect(model.train()) as seen:
        losses.causal_lm(model, batch)
    squares = {name: calls[0].mean.square() + calls[0].logvar.exp() for name, calls in seen.items()}
    return {name: square.flatten(0, -2).mean(0) for name, square in squares.items()}


def test_priors_with_noise_are_those_at_which_the_kl_of_the_training_is_smallest():
    """Without it the inputs of upper layers are quieter than in training, and the priors too
    small.
    """
    model, batch = adapted(start=1.0), random_batch(rows=32, length=32)
    for a in ard.adapters(model).values():
        nn.init.normal_(a.lora_up, std=0.5)
    torch.manual_seed(1)
    wanted, off = _of_training(model, batch), {}
    for noisy in (False, True):
        before = torch.get_rng_state()
        ranks.estimate_priors(model, [batch], noisy=noisy)
        assert torch.equal(torch.get_rng_state(), before) and model.training
        ratios = torch.cat([wanted[n] / a.prior for n, a in ard.adapters(model).items()])
        off[noisy] = abs(float(ratios.mean()) - 1)
    print(f"E z^2 of the training over the prior: {off}")
    assert off[True] < 0.05 and off[False] > 4 * off[True]


def _planted(deterministic: bool) -> dict[str, list[float]]:
    """Relevance per measure, sorted, of six ranks that learned a map of rank three."""
    torch.manual_seed(0)
    model = ard_lora.planted(deterministic=deterministic, steps=1200, every=100)
    scores = {by: ranks.relevance(model, by=by)["proj"] for by in ranks.MEASURES}
    return {by: s.sort(descending=True)[0].tolist() for by, s in scores.items()}


@pytest.mark.slow
def test_ranks_nobody_needs_switch_themselves_off():
    """A map of rank three is planted under six ranks: three stay, with the squared singular values
    as their signal. Without noise and price all six share the work. The prior variance alone does
    not tell the idle ranks.
    """
    found, plain = _planted(deterministic=False), _planted(deterministic=True)
    print(
        {by: [round(x, 4) for x in s] for by, s in found.items()},
        [round(x, 4) for x in plain["signal"]],
    )
    assert found["signal"][:3] == pytest.approx([4.0, 1.0, 0.25], rel=0.15)
    assert (
        found["signal"][3] < 1e-3 * found["signal"][2]
        and plain["signal"][3] > 0.1 * plain["signal"][2]
    )
    assert found["variance"][3] > 0.1 * found["variance"][2]


def test_relevance_does_not_depend_on_how_a_rank_is_scaled():
    model = adapted().eval()
    ranks.estimate_priors(model, [random_batch()])
    before = {by: ranks.relevance(model, by=by) for by in ranks.MEASURES}
    logits = model(random_batch()["input_ids"]).logits
    for a in ard.adapters(model).values():
        with torch.no_grad():
            a.lora_mean[1] *= 3.0  # the same map, written differently
            a.lora_up[:, 1] /= 3.0
    ranks.estimate_priors(model, [random_batch()])
    after = {by: ranks.relevance(model, by=by) for by in ranks.MEASURES}
    assert torch.allclose(model(random_batch()["input_ids"]).logits, logits, atol=1e-5)
    for name in before["signal"]:
        assert torch.allclose(after["signal"][name], before["signal"][name], rtol=1e-4)
        assert after["variance"][name][1] > 3 * before["variance"][name][1]


def test_grades():
    assert [ranks.grade(v) for v in (0.5, 0.1, 0.05, 0.01, 0.001)] == [
        "High",
        "Medium",
        "Medium",
        "Low",
        "Low",
    ]
    assert ranks.grade(0.5, (1.0, 2.0)) == "Low"


def test_the_pool_is_a_function_of_seed_and_epoch():
    rows = torch.arange(40)[:, None].expand(40, 8)
    pool = ranks.HeldOut(rows, count=12, batch=5, seed=1)

    def drawn(epoch: int) -> list[int]:
        return [int(r[0]) for b in pool.set_epoch(epoch) for r in b["input_ids"]]

    first = drawn(0)
    # nothing to save, nothing to rewind
    assert len(set(first)) == 12 and drawn(1) != first and drawn(0) == first
    for bad in (0, 41):
        with pytest.raises(ValueError, match=f"count = {bad}: allowed are 1 to 40"):
            ranks.HeldOut(rows, count=bad)


# ------------------------------------------------------------------ pruning


def test_pruned_ranks_are_gone_and_what_is_left_acts_as_before():
    model = adapted().eval()
    ids, dead = random_batch()["input_ids"], {}
    for i, (name, a) in enumerate(ard.adapters(model).items()):
        dead[name] = torch.ones(4)
        dead[name][: i % 5] = 0  # from no rank to all of them
        with torch.no_grad():
            a.lora_up[:, dead[name] == 0] = 0
    logits, before = model(ids).logits, sum(p.numel() for p in wiring.trainable(model).values())
    left = ranks.prune(model, dead, keep=int(sum(d.sum() for d in dead.values())))
    assert list(left.values()) == [4, 3, 2, 1, 0, 4] and len(ard.adapters(model)) == 5
    assert torch.allclose(model(ids).logits, logits, atol=1e-6)
    assert sum(p.numel() for p in wiring.trainable(model).values()) < 0.7 * before
    for name, a in ard.adapters(model).items():
        assert (
            a.lora_mean.shape == a.lora_logvar.shape == (left[name], a.base.in_features)
            and a.rank == left[name]
        )
        assert (
            a.lora_up.shape == (a.base.out_features, left[name])
            and len(a.prior) == len(a.lora_middle) == left[name]
        )
    assert type(model.model.layers[1].self_attn.v_proj) is nn.Linear
    loss = ard.loss(model, beta=0.1)
    records = train.fit(
        model,
        iter([random_batch()] * 3),
        train.adamw(model, lr=1e-2),
        total=3,
        loss=loss,
        machine=FP32,
    )
    assert records[-1]["loss"] < records[0]["loss"]


def test_prune_says_what_is_wrong():
    model = adapted()
    scores = {name: torch.rand(4) for name in ard.adapters(model)}
    with pytest.raises(ValueError, match="keep = 25: allowed are 0 to 24"):
        ranks.prune(model, scores, keep=25)
    with pytest.raises(ValueError, match="one number per rank of each of the 6 adapters"):
        ranks.prune(model, {}, keep=1)


@pytest.mark.base
@pytest.mark.slow
def test_pruning_by_relevance_costs_less_than_at_random():
    """The stored base model adapted to code; then half the ranks go."""
    from nbworkbook import base_model

    stored = base_model.load()
    stream = text.encode(text.documents("code"), stored.tokenizer)
    pool, held_out = (
        text.fixed_rows(
            text.encode(text.documents("code", split), stored.tokenizer), length=64, limit=32
        )
        for split in ("validation", "held_out")
    )
    model = copy.deepcopy(stored.model)
    torch.manual_seed(0)
    ard.attach(model, rank=8, alpha=8, targets=ard.projections(model, KINDS))
    optimizer, batches = (
        train.adamw(model, lr=1e-2),
        text.Batches(stream, rows=8, length=64, seed=0),
    )
    options = dict(total=20, machine=FP32, clip=0, schedule=train.cosine(20, warmup=3))
    untrained = train.evaluate(model, held_out, machine=FP32)["loss"]
    train.fit(model, batches, optimizer, loss=ard.loss(model, beta=0.01), **options)
    ranks.estimate_priors(model, ranks.HeldOut(pool, count=32))
    whole = train.evaluate(model, held_out, machine=FP32)["loss"]
    draw = torch.Generator().manual_seed(0)
    scores = {by: ranks.relevance(model, by=by) for by in ranks.MEASURES}
    scores["random"] = {
        name: torch.rand(a.rank, generator=draw) for name, a in ard.adapters(model).items()
    }
    cost = {}
    for by, score in scores.items():
        pruned = copy.deepcopy(model)
        ranks.prune(pruned, score, keep=48)
        cost[by] = train.evaluate(pruned, held_out, machine=FP32)["loss"] - whole
    print(
        f"{untrained:.3f} -> {whole:.3f}; half the ranks cost",
        {k: round(v, 4) for k, v in cost.items()},
    )
    assert whole < untrained and cost["signal"] < 0.7 * cost["random"]
