"""Mixtures of experts and of depths, and Muon: the causes that a write-up blamed, and the causes that hold.

The training of a mixture stood still. bf16 weights and Muon's rate were blamed and both were changed; layers that
skipped tokens were switched off in the same commit, so nobody knows which change helped. Here each is tried alone, on
byte-level models: what skipping does to the residual stream and in use (P60, P61), what Muon must store (P62), what a
reported perplexity includes (P63), how far a norm can move (P64), and which routing sees the future (P65).

Footgun: a few dozen steps on a small model hide nearly every fault. So the mechanism is judged, such as a stream that
grows, and the loss stands beside it as a fact.
"""

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lessons import weight_movement
from lessons.pitfalls import VERSIONS, Pitfall
from lessons.pitfalls.bench import CPU, LENGTH, batches, byte_model, held_out_loss, learn, mean_loss, stream
from nblib import losses, train
from nblib.methods import mixture_of_depths, moe, muon, param_groups


def _by_muon(model: nn.Module, steps: int, *, optimizers: list[Optimizer] | None = None, **options) -> list[dict]:
    optimizers = optimizers or param_groups.optimizers(model, lr=0.02, adamw_lr=0.02)
    return learn(model, steps=steps, optimizers=optimizers, schedule=train.cosine(steps, warmup=5), clip=0, **options)


def _held_out(rows: int) -> Tensor:
    """(rows, LENGTH)"""
    return stream("prose", "held_out")[: rows * LENGTH].view(rows, LENGTH)


# P60: skipped tokens that double


def _stream(model: nn.Module) -> list[float]:
    """Root mean square of the residual stream behind every layer, in training mode."""
    sizes = []
    hooks = [
        layer.register_forward_hook(lambda _, args, out: sizes.append(float(out.float().square().mean().sqrt())))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(_held_out(4))
    for hook in hooks:
        hook.remove()
    return sizes


def _skipping(layers: int, skipped: str) -> nn.Module:
    model = byte_model(layers=layers, hidden=32)
    mixture_of_depths.attach(model, layers=list(range(layers)), skipped=skipped)
    return model


def _grown(skipped: str, dtype: torch.dtype = torch.float32, layers: int = 8, steps: int = 25) -> dict:
    """Train with every layer skipping a quarter of the tokens; the stream before and after."""
    model = _skipping(layers, skipped).to(dtype)
    before, deep = _stream(model), _stream(_skipping(48, skipped))
    records = _by_muon(model, steps, loss=mixture_of_depths.loss())
    after = _stream(model)
    return {
        "a skipped token": skipped,
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


CHANGE = "change by the first layer in training / in use"


class Share(nn.Module):
    """A layer weighed by the softmax of its scores over the chosen tokens in training, and whole in use."""

    def __init__(self, layer: mixture_of_depths.DepthLayer):
        super().__init__()
        self.block, self.router = layer.block, layer.router

    def forward(self, x: Tensor, **options) -> Tensor:
        scores = self.router(x)  # (B, n, 1): only the chosen tokens come here
        weight = scores.softmax(dim=1) if self.training else 1.0
        return x + weight / scores.sigmoid() * (self.block(x, **options) - x)  # the layer around it has a sigmoid


def _used(weight: str, capacity: float = 0.75, steps: int = 40) -> dict:
    """Train, then the same rows in training mode and in evaluation mode, where the predictors choose."""
    model, rows, changed, judged = byte_model(), _held_out(64), {}, {}
    mixture_of_depths.attach(model, capacity=capacity, layers=[0, 1])
    for layer in mixture_of_depths.wrapped(model).values():
        layer.block = Share(layer) if weight == "softmax over the chosen" else layer.block
    _by_muon(model, steps, loss=mixture_of_depths.loss(weight=0.1))

    def change(_, args: tuple, out: Tensor) -> None:
        way = (out - args[0]).norm(dim=-1)
        changed[model.training] = float(way[way > 0].square().mean().sqrt())  # of the tokens that were worked on

    hook = model.model.layers[0].register_forward_hook(change)  # the first: its input is the same in both
    for training in (True, False):
        with torch.no_grad():
            judged[training] = float(mean_loss(model.train(training), {"input_ids": rows, "labels": rows}))
    hook.remove()
    return {
        "weight": weight,
        "capacity": capacity,
        CHANGE: changed[True] / changed[False],
        "loss in training mode": judged[True],
        "loss in use": judged[False],
        "lost on the way": judged[False] - judged[True],
    }


# P62: a momentum that is overwritten


class Overwritten(Optimizer):
    """Muon, but the orthogonalised matrix is stored as the momentum."""

    def __init__(self, params: list[nn.Parameter], lr: float):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].get("momentum_buffer", 0)
                update = self.state[p]["momentum_buffer"] = muon.orthogonalise(0.95 * momentum + p.grad)
                p.sub_(update, alpha=group["lr"] * muon.scale(*p.shape, "original"))


def _to_eight_bits(optimizer: Optimizer, *_) -> None:
    """Round every momentum to 255 levels, with a scale for each 64 entries."""
    for state in optimizer.state.values():
        blocks = state["momentum_buffer"].view(-1, 64)
        step = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
        blocks.copy_((blocks / step).round() * step)


def _followed(momentum: str, steps: int = 20) -> dict:
    """Prose, then as many steps of code: whether the last updates go where the gradients now point."""
    model = byte_model()
    optimizers = param_groups.optimizers(model, lr=0.02, adamw_lr=0.02)
    matrices = [p for group in optimizers[0].param_groups for p in group["params"]]
    if momentum == "overwritten":
        optimizers[0] = Overwritten(matrices, lr=0.02)
    if momentum == "in eight bits":
        optimizers[0].register_step_post_hook(_to_eight_bits)
    trend, wanted, before, updates = [torch.zeros_like(p) for p in matrices], [], [], []

    def look(*_) -> None:
        for p, m in zip(matrices, trend, strict=True):
            m.lerp_(p.grad, 0.05)
        wanted[:] = [muon.orthogonalise(p.grad.lerp(m, 0.95)) for p, m in zip(matrices, trend, strict=True)]
        before[:] = [p.detach().clone() for p in matrices]

    def compare(*_) -> None:
        updates.append([was - p.detach() for was, p in zip(before, matrices, strict=True)])

    optimizers[0].register_step_pre_hook(look)
    optimizers[0].register_step_post_hook(compare)
    for source in ("prose", "code"):
        _by_muon(model, steps, data=batches(source), optimizers=optimizers)
    return {
        "momentum": momentum,
        "steps of prose, then of code": steps,
        "cosine of the last update and the trend": _cosine(updates[-1], wanted),
        "cosine of the last update and the first": _cosine(updates[-1], updates[0]),
        "held-out loss on code": held_out_loss(model, "code"),
    }


def _cosine(some: list[Tensor], others: list[Tensor]) -> float:
    """The mean over matrices."""
    pairs = zip(some, others, strict=True)
    return float(torch.stack([F.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in pairs]).mean())


# P63: a perplexity with the balance in it


WEAK, STRONG = 0.001, 0.5  # transformers' default, and one that is seen


def _mixture(**config) -> nn.Module:
    return byte_model(family="qwen3_moe", moe_intermediate_size=32, **config)


@cache  # three runs ask for two trainings; callers must not write into the answer
def _balanced(coefficient: float) -> dict[str, Tensor]:
    """Weights after a few steps. transformers' term is k = 2 where ours is 1, hence the factor."""
    model = _mixture()
    _by_muon(model, 30, loss=moe.loss(balance_weight=2 * coefficient, z_weight=0.0))
    return model.state_dict()


def _reported(judge: str, *, trained_with: tuple[float, float] = (WEAK, WEAK)) -> dict:
    """Perplexity at a weak and at a strong coefficient."""
    perplexities, rows = [], _held_out(32)
    for coefficient, balance in zip((WEAK, STRONG), trained_with, strict=True):
        model = _mixture(output_router_logits=True, router_aux_loss_coef=coefficient).eval()
        model.load_state_dict(_balanced(balance))
        if judge == "the model's loss":
            with torch.no_grad():
                perplexities.append(math.exp(float(model(input_ids=rows, labels=rows).loss)))
        else:
            perplexities.append(math.exp(train.evaluate(model, rows, machine=CPU)["loss"]))
    return {
        "judged by": judge,
        "trained with coefficients": trained_with,
        "perplexity where the config says 0.001": perplexities[0],
        "perplexity where it says 0.5": perplexities[1],
        "risen by": perplexities[1] / perplexities[0],
        "a default model's loss holds a balance": _mixture()(input_ids=rows[:4], labels=rows[:4]).aux_loss is not None,
        "a coefficient written into the config later is heard": _heard_later(rows[:4]),
    }


def _heard_later(rows: Tensor) -> bool:
    model, reported = _mixture(output_router_logits=True, router_aux_loss_coef=WEAK).eval(), []
    for coefficient in (WEAK, STRONG):
        model.config.router_aux_loss_coef = coefficient
        with torch.no_grad():
            reported.append(float(model(input_ids=rows, labels=rows).loss))
    return reported[0] != reported[1]


# P64: norms that stand at one


def _norms(dtype: torch.dtype, *, rate: float, warmup: int, steps: int = 102, schedule_ends: int = 10_000) -> dict:
    """The write-up's number of steps and rate of Muon, with AdamW at `rate` for the norms."""
    model = byte_model(hidden=32).to(dtype)
    optimizers, start = param_groups.optimizers(model, lr=3e-4, adamw_lr=rate), weight_movement.snapshot(model)
    schedule = train.cosine(schedule_ends, warmup=warmup)
    records = learn(model, steps=steps, optimizers=optimizers, data=batches(rows=2), schedule=schedule, clip=0)
    norms = [m for m in weight_movement.audit(model, start, optimizers, records) if "norm" in m.parameter]
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


class Rationed(nn.Module):
    """A mixture's layer with room for so many tokens of a row in each expert."""

    def __init__(self, layer: nn.Module, who: str):
        super().__init__()
        self.gate, self.experts, self.who = layer.gate, layer.experts, who

    def forward(self, x: Tensor) -> Tensor:
        (B, T, _), flat = x.shape, x.flatten(0, 1)
        logits, _, picked = self.gate(flat)
        p = logits.float().softmax(dim=-1).view(B, T, -1)
        E, k = p.shape[-1], picked.shape[-1]
        served = torch.zeros_like(p, dtype=torch.bool)  # (B, T, E)
        if self.who == "experts":  # each its best tokens of the row (Zhou et al., 2022)
            served.scatter_(1, p.topk(math.ceil(k * T / E), dim=1).indices, True)
        else:  # each token its best experts, while they have room
            served.scatter_(2, picked.view(B, T, k), True)
            served &= served.cumsum(dim=1) <= math.ceil(k * LENGTH / E)
        every = torch.arange(E).expand(B * T, E)  # a weight of 0 is as good as not chosen
        return self.experts(flat, every, (p * served).to(x.dtype).flatten(0, 1)).view_as(x)


def choosing(who: str) -> nn.Module:
    model = _mixture()
    if who != "tokens":
        for layer in model.model.layers:
            layer.mlp = Rationed(layer.mlp, who)
    return model


def _chosen_by(who: str, steps: int = 30) -> dict:
    model = choosing(who)
    _by_muon(model, steps, loss=moe.loss(balance_weight=0.05) if who == "tokens" else losses.causal_lm)
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
        symptom="Hidden states grow from layer to layer by orders of magnitude; the loss stands still (write-up).",
        claim="bf16 weights (write-up)",
        verdict="With bf16 weights the stream keeps its size and the loss falls as in fp32. A residual added to a "
        "base that was the residual already doubles what is skipped, and depth multiplies the doublings. A "
        "model this small, trained this briefly, learns in spite of it, because every norm divides the size "
        "away: the fault is certain, that it alone stopped the write-up's training is not. Seen on "
        f"{VERSIONS}.",
        fix="A skipped token leaves the layer as it came, to the bit; test that, and look at the stream by layer.",
        broken=lambda: _grown("doubled"),
        fixed=lambda: _grown("identity"),
        seen=lambda facts: facts["grown by"] > 4 and facts["grown by, of 48 layers"] > 1000,
        claimed=lambda: _grown("identity", torch.bfloat16),
        slow=True,
    ),
    Pitfall(
        id="P61",
        title="A layer that is a share in training and whole in use",
        symptom="The loss in training is fine; the same rows in evaluation mode are worse.",
        claim="the capacity leaves out too many tokens (folklore)",
        verdict="With half the tokens and a sigmoid, training and use agree. A softmax over the k chosen tokens has "
        "mean 1 / k: in training the layer shrank about so many times and learnt to shout, and in use it was "
        f"whole. Seen on {VERSIONS}.",
        fix="A weight for each token by itself, a sigmoid, the same in both; and a test that training and use agree.",
        broken=lambda: _used("softmax over the chosen"),
        fixed=lambda: _used("sigmoid"),
        seen=lambda facts: facts[CHANGE] < 0.5 and facts["lost on the way"] > 0,
        claimed=lambda: _used("sigmoid", capacity=0.5),
        slow=True,
    ),
    Pitfall(
        id="P62",
        title="A momentum that is overwritten",
        symptom="Muon's loss falls more slowly than it should, and hardly follows when the text changes.",
        claim="eight bits are too few for a momentum (folklore; the write-up's own Muon was named for them)",
        verdict="Rounded to eight bits, the momentum follows the gradients as in fp32. Orthogonalised and written "
        "back it has size one in every direction, against gradients of hundredths: it forgets how much it has "
        f"seen, and goes on as it began. Seen on {VERSIONS}.",
        fix="Keep the average of gradients; orthogonalise a copy for the step.",
        broken=lambda: _followed("overwritten"),
        fixed=lambda: _followed("kept"),
        seen=lambda facts: facts["cosine of the last update and the trend"] < 0.5,
        claimed=lambda: _followed("in eight bits"),
        slow=True,
    ),
    Pitfall(
        id="P63",
        title="A perplexity with the balance in it",
        symptom="The perplexity is the worse the larger the coefficient of the balance loss.",
        claim="a balanced router costs language (folklore)",
        verdict="Trained with either coefficient the cross-entropy is about the same. With output_router_logits = "
        "True the model's loss is cross-entropy plus coefficient times balance, in evaluation too, and its "
        "exponential is no perplexity. With the default, False, there is no balance in training either, "
        "though the write-up says that the loss 'already includes' it. And the coefficient is read when the "
        f"model is built, not from its config later. Seen on {VERSIONS}.",
        fix="Judge by the cross-entropy of the logits (train.evaluate); let the loop add the balance (moe.loss).",
        broken=lambda: _reported("the model's loss"),
        fixed=lambda: _reported("cross-entropy"),
        seen=lambda facts: facts["risen by"] > 1.5,
        claimed=lambda: _reported("cross-entropy", trained_with=(WEAK, STRONG)),
    ),
    Pitfall(
        id="P64",
        title="Norms that stand at one: stuck, or young",
        symptom="After a hundred steps no norm is further from 1 than a few thousandths, yet they are not exactly 1.",
        claim="bf16 weights hold them, then Muon's rate is too small (write-up)",
        verdict="bf16 weights at this rate leave exact ones: not an entry changes. Norms are in AdamW, whatever "
        "Muon's rate, where an entry moves by at most about the rate in a step; at the end of a long warm-up "
        "the rates sum to what was seen, so the norms had come about as far as they could. Beside the same "
        f"Muon, with another AdamW rate and a short warm-up, they move. Seen on {VERSIONS}.",
        fix="Compare the way with the sum of the rates (weight_movement.audit) before anything is called stuck.",
        broken=lambda: _norms(torch.float32, rate=9e-5, warmup=100),
        fixed=lambda: _norms(torch.float32, rate=3e-3, warmup=10),
        seen=lambda facts: 0 < facts["furthest entry from 1"] < 0.01,
        claimed=lambda: _norms(torch.bfloat16, rate=9e-5, warmup=100),
        slow=True,
    ),
    Pitfall(
        id="P65",
        title="Experts that choose see the future",
        symptom="The logits of a token depend on what comes after it; one token at a time gives others.",
        claim="any limit on the tokens of an expert does that (folklore)",
        verdict="With the same room, first come first served, no later token reaches an earlier logit. Where experts "
        "take the best tokens of a row, whether a token is served depends on those after it: what is "
        "evaluated is a model that cannot generate. Its loss gains next to nothing by the view on a model "
        f"this small, trained this briefly; nothing bounds what it gains elsewhere. Seen on {VERSIONS}.",
        fix="Tokens choose, and a balance loss spreads the load; or a ration that is given out from left to right.",
        broken=lambda: _chosen_by("experts"),
        fixed=lambda: _chosen_by("tokens"),
        seen=lambda facts: facts[FUTURE] > 0.01,
        claimed=lambda: _chosen_by("tokens, while there is room"),
        check="F11",
        slow=True,
    ),
]
