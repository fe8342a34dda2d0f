"""Mixtures of experts and of depths, and Muon: the causes that a write-up blamed, and the causes
that hold.

The write-up on MoE and Muon trained a mixture whose loss stood still. It blamed bf16 weights and
Muon's learning rate and changed both. The same commit also switched off the layers that skip
tokens, so nobody knows which change helped. Here each cause is tried alone, on byte-level models:

    P60, P61   what skipping tokens does to the residual stream, and at inference
    P62        what Muon must store
    P63        what a reported perplexity includes
    P64        how far a norm can move
    P65        which routing sees the future

Footgun: a few dozen steps on a small model hide nearly every fault. So the mechanism is judged, for
example a stream that grows, and the loss stands beside it as a fact.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lessons import weight_movement
from lessons.pitfalls import VERSIONS, Pitfall
from lessons.pitfalls.bench import (
    LENGTH,
    batches,
    byte_model,
    held_out_loss,
    learn,
    mean_loss,
    stream,
)
from nblib import losses, train
from nblib.methods import moe, muon
from nblib.methods.moe import depths
from nblib.methods.muon import groups


def _by_muon(
    model: nn.Module, steps: int, *, optimizers: list[Optimizer] | None = None, **options
) -> list[dict]:
    optimizers = optimizers or groups.optimizers(model, lr=0.02, adamw_lr=0.02)
    return learn(
        model,
        steps=steps,
        optimizers=optimizers,
        schedule=train.cosine(steps, warmup=5),
        clip=0,
        **options,
    )


def _held_out(rows: int) -> Tensor:
    """(rows, LENGTH)"""
    return stream("prose", "held_out")[: rows * LENGTH].view(rows, LENGTH)


# P60: skipped tokens that double


def _stream(model: nn.Module) -> list[float]:
    """Root mean square of the residual stream behind every layer, in training mode."""
    sizes = []
    hooks = [
        layer.register_forward_hook(
            lambda _, args, out: sizes.append(float(out.float().square().mean().sqrt()))
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(_held_out(4))
    for hook in hooks:
        hook.remove()
    return sizes


def skipped_twice(x: Tensor, where: Tensor, update: Tensor) -> Tensor:
    out = x.clone()  # a skipped token is x already
    out = out.scatter(1, where, update)
    return x + out  # and becomes x + x


def skipped_once(x: Tensor, where: Tensor, update: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out = out.scatter(1, where, update)
    return x + out


def share_of_the_chosen(layer: nn.Module, scores: Tensor) -> Tensor:
    if layer.training:
        return scores.softmax(dim=1)  # over the k chosen tokens: 1 / k on average
    return torch.ones_like(scores)


def sigmoid_of_each(layer: nn.Module, scores: Tensor) -> Tensor:
    return scores.sigmoid()  # of one token, the same in training and at inference


class Skipping(depths.DepthLayer):
    """The layer with two rules to exchange: how it adds its updates to the stream, and how it
    weighs them.
    """

    add: Callable[[Tensor, Tensor, Tensor], Tensor]
    weigh: Callable[[nn.Module, Tensor], Tensor]

    def forward(
        self, hidden_states: Tensor, attention_mask=None, position_ids=None, **options
    ) -> Tensor:
        x = hidden_states  # (B, T, D)
        # (B, T)
        scores, guesses = self.router(x).squeeze(-1), self.predictor(x.detach()).squeeze(-1)
        highest = depths.top(scores.detach(), self.capacity)
        chosen = highest if self.training else guesses > 0
        if self.seen is not None:
            self.seen.append(depths.Choice(scores, guesses, highest, chosen))
        if not (most := int(chosen.sum(dim=1).max())):
            return x
        order = depths.earliest_first(chosen, most)  # (B, n)
        where = order[..., None].expand(-1, -1, x.shape[-1])
        before = x.gather(1, where)
        change = self._work(before, order, attention_mask, position_ids, options) - before
        update = self.weigh(self, scores.gather(1, order))[..., None] * change
        return self.add(
            x, where, torch.where(chosen.gather(1, order)[..., None], update.to(x.dtype), 0)
        )


def _attach(
    model: nn.Module, *, add: Callable = skipped_once, weigh: Callable = sigmoid_of_each, **options
) -> None:
    depths.attach(model, **options)
    for layer in depths.wrapped(model).values():
        layer.__class__, layer.add, layer.weigh = Skipping, add, weigh


def _skipping(layers: int, add: Callable) -> nn.Module:
    model = byte_model(layers=layers, hidden=32)
    _attach(model, add=add, layers=list(range(layers)))
    return model


def _grown(
    add: Callable, dtype: torch.dtype = torch.float32, layers: int = 8, steps: int = 25
) -> dict:
    """Train with every layer skipping a quarter of the tokens; the stream before and after."""
    model = _skipping(layers, add).to(dtype)
    before, deep = _stream(model), _stream(_skipping(48, add))
    records = _by_muon(model, steps, loss=depths.loss())
    after = _stream(model)
    return {
        "a skipped token": "doubled" if add is skipped_twice else "identity",
        "weights": str(dtype).removeprefix("torch."),
        "stream by layer, untrained": [round(x, 3) for x in before],
        "grown by": before[-1] / before[0],
        "grown by, of 48 layers": deep[-1] / deep[0],
        "stream by layer, trained": [round(x, 3) for x in after],
        "grown by, trained": after[-1] / after[0],
        "loss at first": records[0]["ce"],
        "loss at last": sum(r["ce"] for r in records[-5:]) / 5,
    }


# P61: a weight that is a share


CHANGE = "change by the first layer, training / inference"


def _used(weigh: Callable, capacity: float = 0.75, steps: int = 40) -> dict:
    """Train, then the same rows in training mode and in evaluation mode, where the predictors
    choose.
    """
    model, rows, changed, judged = byte_model(), _held_out(64), {}, {}
    _attach(model, weigh=weigh, capacity=capacity, layers=[0, 1])
    _by_muon(model, steps, loss=depths.loss(weight=0.1))

    def change(_, args: tuple, out: Tensor) -> None:
        way = (out - args[0]).norm(dim=-1)
        # of the tokens that were worked on
        changed[model.training] = float(way[way > 0].square().mean().sqrt())

    # the first: its input is the same in both
    hook = model.model.layers[0].register_forward_hook(change)
    for training in (True, False):
        with torch.no_grad():
            judged[training] = float(
                mean_loss(model.train(training), {"input_ids": rows, "labels": rows})
            )
    hook.remove()
    return {
        "weight": "softmax over the chosen" if weigh is share_of_the_chosen else "sigmoid",
        "capacity": capacity,
        CHANGE: changed[True] / changed[False],
        "loss in training mode": judged[True],
        "loss at inference": judged[False],
        "lost on the way": judged[False] - judged[True],
    }


# P62: a momentum that is overwritten


def overwritten(momentum: Tensor, gradient: Tensor) -> Tensor:
    momentum.mul_(0.95).add_(gradient)
    momentum.copy_(muon.orthogonalise(momentum))  # the average of the gradients is lost
    return momentum


def kept(momentum: Tensor, gradient: Tensor) -> Tensor:
    momentum.mul_(0.95).add_(gradient)
    update = muon.orthogonalise(momentum)  # a new tensor
    return update


class ByRule(Optimizer):
    """Muon with plain momentum, each update made by the rule."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, rule: Callable[[Tensor, Tensor], Tensor]
    ):
        super().__init__(params, dict(lr=lr))
        self.rule = rule

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                p.sub_(
                    self.rule(momentum, p.grad),
                    alpha=group["lr"] * muon.scale(*p.shape, "original"),
                )


def _to_eight_bits(optimizer: Optimizer, *_) -> None:
    """Round every momentum to 255 levels, with a scale for each 64 entries."""
    for state in optimizer.state.values():
        blocks = state["momentum_buffer"].view(-1, 64)
        step = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
        blocks.copy_((blocks / step).round() * step)


def _followed(rule: Callable, *, eight_bits: bool = False, steps: int = 20) -> dict:
    """Prose, then as many steps of code: whether the last updates go where the gradients now
    point.
    """
    model = byte_model()
    optimizers = groups.optimizers(model, lr=0.02, adamw_lr=0.02)
    matrices = [p for group in optimizers[0].param_groups for p in group["params"]]
    optimizers[0] = ByRule(matrices, lr=0.02, rule=rule)
    if eight_bits:
        optimizers[0].register_step_post_hook(_to_eight_bits)
    trend, wanted, before, updates = [torch.zeros_like(p) for p in matrices], [], [], []

    def look(*_) -> None:
        for p, m in zip(matrices, trend, strict=True):
            m.lerp_(p.grad, 0.05)
        before[:] = [p.detach().clone() for p in matrices]
        if len(updates) == 2 * steps - 1:  # the last trend is the one asked for
            wanted[:] = [
                muon.orthogonalise(p.grad.lerp(m, 0.95))
                for p, m in zip(matrices, trend, strict=True)
            ]

    def compare(*_) -> None:
        updates.append([was - p.detach() for was, p in zip(before, matrices, strict=True)])

    optimizers[0].register_step_pre_hook(look)
    optimizers[0].register_step_post_hook(compare)
    for source in ("prose", "code"):
        _by_muon(model, steps, data=batches(source), optimizers=optimizers)
    return {
        "momentum": "in eight bits" if eight_bits else rule.__name__,
        "steps of prose, then of code": steps,
        "cosine of the last update and the trend": _cosine(updates[-1], wanted),
        "cosine of the last update and the first": _cosine(updates[-1], updates[0]),
        "held-out loss on code": held_out_loss(model, "code"),
    }


def _cosine(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the mean over matrices."""
    pairs = zip(some, others, strict=True)
    return float(
        torch.stack([F.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in pairs]).mean()
    )


# P63: a perplexity with the balance loss in it


WEAK, STRONG = 0.001, 0.5  # transformers' default, and one that is seen


def _mixture(**config) -> nn.Module:
    return byte_model(family="qwen3_moe", moe_intermediate_size=32, **config)


@cache  # three runs ask for two trainings; callers must not write into the answer
def _balanced(coefficient: float) -> dict[str, Tensor]:
    """Weights after a few steps. transformers' balance loss is k = 2 where ours is 1, hence the
    factor.
    """
    model = _mixture()
    _by_muon(model, 30, loss=moe.loss(balance_weight=2 * coefficient, z_weight=0.0))
    return model.state_dict()


def of_the_loss(model: nn.Module, rows: Tensor) -> float:
    loss = model(input_ids=rows, labels=rows).loss  # with coefficient * balance loss
    return math.exp(loss)


def of_the_logits(model: nn.Module, rows: Tensor) -> float:
    logits = model(input_ids=rows).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    return math.exp(loss)


def _reported(perplexity: Callable, *, trained_with: tuple[float, float] = (WEAK, WEAK)) -> dict:
    """Perplexity at a weak and at a strong coefficient."""
    perplexities, rows = [], _held_out(32)
    for coefficient, balance in zip((WEAK, STRONG), trained_with, strict=True):
        model = _mixture(output_router_logits=True, router_aux_loss_coef=coefficient).eval()
        model.load_state_dict(_balanced(balance))
        with torch.no_grad():
            perplexities.append(perplexity(model, rows))
    return {
        "judged by": "the model's loss" if perplexity is of_the_loss else "cross-entropy",
        "trained with coefficients": trained_with,
        "perplexity where the config says 0.001": perplexities[0],
        "perplexity where it says 0.5": perplexities[1],
        "risen by": perplexities[1] / perplexities[0],
        "a default model's loss holds a balance": _mixture()(
            input_ids=rows[:4], labels=rows[:4]
        ).aux_loss
        is not None,
        "a coefficient written into the config later is read": _read_later(rows[:4]),
    }


def _read_later(rows: Tensor) -> bool:
    model, reported = _mixture(output_router_logits=True, router_aux_loss_coef=WEAK).eval(), []
    for coefficient in (WEAK, STRONG):
        model.config.router_aux_loss_coef = coefficient
        with torch.no_grad():
            reported.append(float(model(input_ids=rows, labels=rows).loss))
    return reported[0] != reported[1]


# P64: norms that stay at one


def slow_norms(model: nn.Module) -> tuple[list[Optimizer], Callable]:
    optimizers = groups.optimizers(model, lr=3e-4, adamw_lr=9e-5)  # norms: AdamW
    schedule = train.cosine(10_000, warmup=100)  # of the 102 steps, 100 are warm-up
    return optimizers, schedule


def moving_norms(model: nn.Module) -> tuple[list[Optimizer], Callable]:
    optimizers = groups.optimizers(model, lr=3e-4, adamw_lr=3e-3)
    schedule = train.cosine(10_000, warmup=10)
    return optimizers, schedule


def _norms(rates_of: Callable, dtype: torch.dtype = torch.float32, *, steps: int = 102) -> dict:
    """Train for the write-up's number of steps, at its rate for Muon: how far the norms come."""
    model = byte_model(hidden=32).to(dtype)
    optimizers, schedule = rates_of(model)
    start, rate = weight_movement.snapshot(model), optimizers[1].param_groups[0]["lr"]
    warmup = next(step for step in range(steps) if schedule(step) == 1) + 1
    records = learn(
        model, steps=steps, optimizers=optimizers, data=batches(rows=2), schedule=schedule, clip=0
    )
    norms = [
        m for m in weight_movement.audit(model, start, optimizers, records) if "norm" in m.parameter
    ]
    named = dict(model.named_parameters())
    far = max(float((named[m.parameter].detach().float() - 1).abs().max()) for m in norms)
    rates = rate * sum(schedule(step) for step in range(steps))
    return {
        "weights": str(dtype).removeprefix("torch."),
        "rate of the norms": rate,
        "optimizer steps, of which warm-up": (steps, warmup),
        "furthest entry from 1": far,
        "sum of the rates": rates,
        "that / the sum": far / rates,
        "entries that changed": sum(m.changed for m in norms) / len(norms),
        "way / reach, on average": sum(m.moved / m.reach for m in norms) / len(norms),
        "stuck": f"{sum(m.verdict.startswith('stuck') for m in norms)} of {len(norms)}",
        "verdict of the first": norms[0].verdict,
        "loss at first": records[0]["ce"],
        "loss at last": records[-1]["ce"],
    }


# P65: experts that choose


FUTURE = "largest change of earlier logits, in their deviations"


def experts_choose(p: Tensor, k: int) -> Tensor:
    B, T, E = p.shape
    best = p.topk(math.ceil(k * T / E), dim=1).indices  # later tokens too
    return torch.zeros_like(p, dtype=torch.bool).scatter(1, best, True)


def tokens_choose(p: Tensor, k: int) -> Tensor:
    best = p.topk(k, dim=2).indices  # of this token's experts
    return torch.zeros_like(p, dtype=torch.bool).scatter(2, best, True)


def tokens_choose_while_there_is_room(p: Tensor, k: int) -> Tensor:
    wanted = torch.zeros_like(p, dtype=torch.bool).scatter(2, p.topk(k, dim=2).indices, True)
    return wanted & (wanted.cumsum(dim=1) <= math.ceil(k * LENGTH / p.shape[2]))


CHOOSE = {
    "experts": experts_choose,  # Zhou et al., 2022
    "tokens": tokens_choose,
    "tokens, while there is room": tokens_choose_while_there_is_room,
}


class Chosen(nn.Module):
    """A mixture's layer in which `choose` says which expert works on which token."""

    def __init__(self, layer: nn.Module, choose: Callable[[Tensor, int], Tensor]):
        super().__init__()
        self.gate, self.experts, self.choose = layer.gate, layer.experts, choose

    def forward(self, x: Tensor) -> Tensor:
        (B, T, _), flat = x.shape, x.flatten(0, 1)
        logits, _, picked = self.gate(flat)
        p = logits.float().softmax(dim=-1).view(B, T, -1)  # (B, T, E)
        served = self.choose(p, picked.shape[-1])  # (B, T, E) of booleans
        # a weight of 0 is as good as not chosen
        every = torch.arange(p.shape[-1]).expand(B * T, -1)
        return self.experts(flat, every, (p * served).to(x.dtype).flatten(0, 1)).view_as(x)


def choosing(who: str) -> nn.Module:
    model = _mixture()
    for layer in model.model.layers:
        layer.mlp = Chosen(layer.mlp, CHOOSE[who])
    return model


def _chosen_by(who: str, steps: int = 30) -> dict:
    model = choosing(who)
    _by_muon(
        model, steps, loss=moe.loss(balance_weight=0.05) if who == "tokens" else losses.causal_lm
    )
    return {"chosen by": who} | _with_another_end(model.eval())


@torch.no_grad()
def _with_another_end(model: nn.Module, last: int = 32) -> dict:
    """Put another text at the end of each row, and measure how the logits before it change."""
    rows = _held_out(16)
    other = torch.cat([rows[:, :-last], rows.roll(1, 0)[:, -last:]], dim=1)
    logits, after = (model(r).logits for r in (rows, other))  # (16, LENGTH, V)
    alone = torch.stack([model(rows[:, : t + 1]).logits[:, -1] for t in range(LENGTH - 1)], dim=1)
    targets = rows[:, 1:].flatten()
    return {
        FUTURE: float((logits - after)[:, :-last].abs().max() / logits.std()),
        "loss of whole rows": float(F.cross_entropy(logits[:, :-1].flatten(0, 1), targets)),
        "loss one token after another": float(F.cross_entropy(alone.flatten(0, 1), targets)),
    }


PITFALLS = [
    Pitfall(
        id="P60",
        title="Skipped tokens that double",
        symptom="Hidden states grow by orders of magnitude from layer to layer, and the loss "
        "stands still.",
        claim="bf16 weights (the write-up on MoE and Muon)",
        verdict="With bf16 weights the stream keeps its size and the loss falls as in fp32. "
        "The skip path adds x to an "
        "output that already is x, so every layer doubles the tokens that it skips. This small "
        "model learns in spite "
        "of it, because every norm divides the size out again. So the fault is certain, but "
        "not that it alone stopped "
        f"the write-up's training. Seen on {VERSIONS}.",
        fix="A skipped token leaves the layer unchanged, to the bit. Test that, and look at "
        "the stream by layer.",
        broken=lambda: _grown(skipped_twice),
        fixed=lambda: _grown(skipped_once),
        seen=lambda facts: facts["grown by"] > 4 and facts["grown by, of 48 layers"] > 1000,
        claimed=lambda: _grown(skipped_once, torch.bfloat16),
        slow=True,
        wrong=skipped_twice,
        right=skipped_once,
    ),
    Pitfall(
        id="P61",
        title="A layer that counts for a share in training and in full at inference",
        symptom="The loss in training is fine; the same rows in evaluation mode are worse.",
        claim="the capacity leaves out too many tokens (folklore)",
        verdict="With half the tokens and a sigmoid, training and inference agree. A softmax "
        "over the k chosen tokens "
        "is 1 / k on average. In training it shrank the layer about k times, so the layer "
        "learned large outputs; at "
        f"inference they counted in full. Seen on {VERSIONS}.",
        fix="Weigh each token by itself, with a sigmoid, in both modes; and test that training "
        "and inference agree.",
        broken=lambda: _used(share_of_the_chosen),
        fixed=lambda: _used(sigmoid_of_each),
        seen=lambda facts: facts[CHANGE] < 0.5 and facts["lost on the way"] > 0,
        claimed=lambda: _used(sigmoid_of_each, capacity=0.5),
        slow=True,
        wrong=share_of_the_chosen,
        right=sigmoid_of_each,
    ),
    Pitfall(
        id="P62",
        title="A momentum that is overwritten",
        symptom="Muon's loss falls more slowly than it should, and hardly follows when the "
        "text changes.",
        claim="eight bits are too few for a momentum (folklore; the write-up on MoE and Muon "
        "names its own Muon so)",
        verdict="Rounded to eight bits, the momentum follows the gradients nearly as in fp32. "
        "Orthogonalised and "
        "written back, it has size one in every direction, and the gradients are hundredths of "
        "that. So new gradients "
        f"hardly turn it, and it keeps its first direction. Seen on {VERSIONS}.",
        fix="Keep the average of the gradients; orthogonalise a copy for the step.",
        broken=lambda: _followed(overwritten),
        fixed=lambda: _followed(kept),
        seen=lambda facts: facts["cosine of the last update and the trend"] < 0.5,
        claimed=lambda: _followed(kept, eight_bits=True),
        slow=True,
        wrong=overwritten,
        right=kept,
    ),
    Pitfall(
        id="P63",
        title="A perplexity with the balance loss in it",
        symptom="The larger the coefficient of the balance loss, the worse the perplexity.",
        claim="a balanced router costs language (folklore)",
        verdict="Trained with either coefficient, the cross-entropy is about the same. With "
        "output_router_logits=True "
        "the model's loss is cross-entropy plus coefficient times balance loss, in evaluation "
        "too, and exp of that is "
        "no perplexity. With the default, False, the balance loss is missing in training too. "
        "The write-up on MoE "
        "and Muon says that the loss 'already includes' it. And the coefficient is read when "
        "the model is "
        f"built; a later change of the config does nothing. Seen on {VERSIONS}.",
        fix="Judge by the cross-entropy of the logits (train.evaluate); let the loop add the "
        "balance loss (moe.loss).",
        broken=lambda: _reported(of_the_loss),
        fixed=lambda: _reported(of_the_logits),
        seen=lambda facts: facts["risen by"] > 1.5,
        claimed=lambda: _reported(of_the_logits, trained_with=(WEAK, STRONG)),
        wrong=of_the_loss,
        right=of_the_logits,
    ),
    Pitfall(
        id="P64",
        title="Norms that stay near one: stuck, or early",
        symptom="After a hundred steps no norm is further from 1 than a few thousandths, yet "
        "they are not exactly 1.",
        claim="bf16 weights hold them, then Muon's rate is too small (the write-up on MoE and "
        "Muon)",
        verdict="With bf16 weights at this rate the norms are exactly 1: no entry changes. "
        "Muon does not train norms, "
        "AdamW does, and it moves an entry by about the learning rate per step at most. Here "
        "most steps are warm-up, "
        "and the sum of all rates is about how far the norms came. So they moved nearly as far "
        "as they could. With "
        "the same Muon, a higher rate of AdamW and a short warm-up, they move further. "
        f"Seen on {VERSIONS}.",
        fix="Compare the distance with the sum of the rates (weight_movement.audit) before you "
        "call anything stuck.",
        broken=lambda: _norms(slow_norms),
        fixed=lambda: _norms(moving_norms),
        seen=lambda facts: 0 < facts["furthest entry from 1"] < 0.01,
        claimed=lambda: _norms(slow_norms, torch.bfloat16),
        slow=True,
        wrong=slow_norms,
        right=moving_norms,
    ),
    Pitfall(
        id="P65",
        title="Experts that choose see the future",
        symptom="The logits of a token depend on the tokens after it; token by token the model "
        "gives other logits.",
        claim="any limit on the tokens of an expert does that (folklore)",
        verdict="With the same limit, first come first served, no later token changes an "
        "earlier logit. Where each "
        "expert takes the best tokens of a row, later tokens decide whether an earlier one is "
        "served. Such a model "
        "cannot generate what it is evaluated on. On a model this small, trained this briefly, "
        "its loss gains next to "
        f"nothing by it; elsewhere the gain may be large. Seen on {VERSIONS}.",
        fix="Let tokens choose, and spread the load by a balance loss; or fill a limit from "
        "left to right.",
        broken=lambda: _chosen_by("experts"),
        fixed=lambda: _chosen_by("tokens"),
        seen=lambda facts: facts[FUTURE] > 0.01,
        claimed=lambda: _chosen_by("tokens, while there is room"),
        check="F11",
        slow=True,
        wrong=experts_choose,
        right=tokens_choose,
    ),
]
