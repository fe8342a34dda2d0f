"""Distillation that only seems to work: temperatures that do not learn, a renormalised cache, a
lost state.

None of these faults raises an error. A temperature stays at a bound, a loss falls, a student
predicts text, and each is taken for success. All of them are shown with the trained byte-level
model as the teacher and a new one as the student. The claims are those of the write-up on spiking
distillation.

Footgun: a small student differs from a small teacher in few tokens. Compare the three runs with
each other; how good any of them is says little.
"""

import math
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lessons.pitfalls import VERSIONS, Pitfall
from lessons.pitfalls.autocast import teacher_use
from lessons.pitfalls.bench import (
    CPU,
    LENGTH,
    batches,
    byte_model,
    held_out_loss,
    learn,
    quiet,
    stream,
    trained,
)
from nblib import losses, models, text, train
from nblib.methods import goose
from nblib.methods.distill import feature_dynamics, objective, teacher_cache
from nblib.methods.distill.temperature import Adversarial

ROWS = 4


def pair() -> tuple[nn.Module, nn.Module]:
    """Return a student with random weights, and its teacher."""
    return byte_model(seed=1), models.as_teacher(trained())


def held_out(rows: int = 64) -> Tensor:
    return text.fixed_rows(stream("prose", "held_out"), length=LENGTH, limit=rows)


def averaged_over_classes(student: Tensor, teacher: Tensor, T: float) -> Tensor:
    log_q = (student / T).log_softmax(-1)  # (tokens, classes)
    p = (teacher / T).softmax(-1)
    return T**2 * F.kl_div(log_q, p, reduction="mean")  # divides by tokens x classes


def summed_over_classes(student: Tensor, teacher: Tensor, T: float) -> Tensor:
    log_q = (student / T).log_softmax(-1)
    p = (teacher / T).softmax(-1)
    return T**2 * F.kl_div(log_q, p, reduction="batchmean")  # divides by tokens


# P66, P67: a temperature whose gradient is zero


def clamped(raw: Tensor) -> tuple[Tensor, Tensor]:
    T = raw.exp().clamp(1, 10)  # beyond a bound the gradient is exactly 0
    penalty = torch.zeros(())
    return T, penalty


def held_by_a_prior(raw: Tensor) -> tuple[Tensor, Tensor]:
    T = raw.exp()
    penalty = 5 * (raw - math.log(2)).square()  # on raw, so it pulls from wherever T is
    return T, penalty


class Temperature(nn.Module):
    """A learnable temperature: `rule` makes T and a penalty per token of the raw parameter."""

    def __init__(self, start: float, rule: Callable[[Tensor], tuple[Tensor, Tensor]]):
        super().__init__()
        self.raw, self.rule = nn.Parameter(torch.tensor(math.log(start))), rule

    def forward(self) -> Tensor:
        return self.rule(self.raw)[0]

    def penalty(self) -> Tensor:
        return self.rule(self.raw)[1]


def _hump(student: nn.Module, teacher: nn.Module) -> float:
    """Return the temperature at which T^2 KL is largest, on one batch."""
    ids = next(batches())["input_ids"]
    with torch.no_grad():
        s, t = (m(ids).logits.flatten(0, 1) for m in (student, teacher))
    grid = [0.5 * 1.1**i for i in range(40)]
    return max(grid, key=lambda T: float(summed_over_classes(s, t, T)))


def climbed(
    rule: Callable[[Tensor], tuple[Tensor, Tensor]], start: float = 5.0, steps: int = 40
) -> dict:
    """Minimise T^2 KL in the student and in T together."""
    student, teacher = pair()
    temperature, hump, gradients = Temperature(start, rule), _hump(student, teacher), []
    temperature.raw.register_hook(lambda gradient: gradients.append(float(gradient)))
    optimizers = [
        train.adamw(student, lr=5e-3),
        torch.optim.Adam(temperature.parameters(), lr=0.05),
    ]
    student.temperature = temperature
    loss = objective.from_teacher(teacher, temperature)
    learn(student, steps=steps, optimizers=optimizers, data=batches(rows=ROWS), loss=loss, clip=0)
    T = temperature()
    (pull,) = torch.autograd.grad((T.log() - math.log(2)).square(), temperature.raw)
    return {
        "temperature": rule.__name__.replace("_", " "),
        "T at the start": start,
        "the loss is largest at T": hump,
        "T at the end": float(T.detach()),
        "steps": steps,
        "steps in which T had no gradient": gradients.count(0.0),
        "pull of a regulariser that reads T": abs(float(pull)),
        "raised": None,
    }


def _under_inference() -> dict:
    """Return a temperature without a clamp, and a teacher under inference mode."""
    facts = {"temperature": "exp(raw)", "steps": 0, "steps in which T had no gradient": 0}
    return facts | {"raised": teacher_use("t / T, T learnable")["raised"]}


def rested(make: Callable[[nn.Module, Adversarial], list], steps: int = 30) -> dict:
    """Return an adversarial temperature during its rest, while the strength of the gradient
    reversal is 0.
    """
    student, teacher = pair()
    student.temperature = T = Adversarial(2.0, total=4 * steps, rest=0.25)
    gradients = []
    T.raw.register_hook(lambda gradient: gradients.append(abs(float(gradient))))
    optimizers, loss = make(student, T), objective.from_teacher(teacher, T)
    owner, group = next(
        (o, g) for o in optimizers for g in o.param_groups if any(p is T.raw for p in g["params"])
    )
    learn(student, steps=steps, optimizers=optimizers, data=batches(rows=ROWS), loss=loss)
    return {
        "optimizer of T": type(owner).__name__,
        "weight decay on T": group["weight_decay"],
        "T at the start": 2.0,
        "T at the end": float(T().detach()),
        "moved by": abs(float(T().detach()) - 2.0),
        "largest gradient of T": max(gradients),
    }


def one_optimizer(student: nn.Module, T: Adversarial) -> list[torch.optim.Optimizer]:
    everything = student.parameters()  # T.raw is among them, and decays
    return [torch.optim.AdamW(everything, lr=5e-3, weight_decay=0.01)]


def one_of_its_own(student: nn.Module, T: Adversarial) -> list[torch.optim.Optimizer]:
    others = [p for p in student.parameters() if p is not T.raw]
    adamw = torch.optim.AdamW(others, lr=5e-3, weight_decay=0.01)
    return [adamw, torch.optim.Adam([T.raw], lr=1e-2, weight_decay=0)]


def without_decay(student: nn.Module, T: Adversarial) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(student.parameters(), lr=5e-3, weight_decay=0.0)]


# P68: the mean over the vocabulary


def few_labels(reduction: str, alpha: float = 0.5, steps: int = 40) -> dict:
    """alpha KD + (1 - alpha) CE, always on the same few rows.

    Labels alone teach the student to know them by heart.
    """
    (taught, share), warned = quiet(by_heart, reduction, alpha, steps)
    alone = _from_the_labels(steps)
    return {
        "reduction": reduction,
        "torch warns": bool(warned),
        "alpha": alpha,
        "vocabulary": 256,
        "share of the teacher in the first gradient": share,
        "held-out loss": taught,
        "from the labels alone": alone,
        "won by the teacher": alone - taught,
    }


@cache
def _from_the_labels(steps: int) -> float:
    return by_heart("batchmean", 0.0, steps)[0]


def by_heart(reduction: str, alpha: float = 0.5, steps: int = 40) -> tuple[float, float]:
    """Held-out loss, and the share of the divergence in the first gradient."""
    (student, teacher), batch, shares = pair(), next(batches(rows=ROWS)), []
    divergence = {"mean": averaged_over_classes, "batchmean": summed_over_classes}[reduction]
    optimizer = train.adamw(student, lr=5e-3)
    with torch.no_grad():
        t, _ = losses.shifted_rows(teacher(batch["input_ids"]).logits, batch["labels"])
    for _ in range(steps):
        s, targets = losses.shifted_rows(student(batch["input_ids"]).logits, batch["labels"])
        terms = [alpha * divergence(s, t, 2.0), (1 - alpha) * F.cross_entropy(s, targets)]
        if not shares:
            kd, ce = (torch.autograd.grad(term, s, retain_graph=True)[0].norm() for term in terms)
            shares.append(float(kd / (kd + ce)))
        optimizer.zero_grad()
        sum(terms).backward()
        optimizer.step()
    return held_out_loss(student), shares[0]


# P69: a cache that was renormalised


@cache
def _from_the_live_teacher(steps: int) -> float:
    student, teacher = pair()
    loss = objective.from_teacher(teacher, 1.0)
    learn(student, steps=steps, data=batches(rows=ROWS), loss=loss)
    return held_out_loss(student)


def renormalise(values: Tensor, indices: Tensor, tail: Tensor, prior: Tensor) -> Tensor:
    log_p = torch.full((len(values), len(prior)), -1e4)  # others: impossible
    log_p = log_p.scatter(1, indices, values)
    return log_p.log_softmax(-1)  # the k kept share their mass


def spread(values: Tensor, indices: Tensor, tail: Tensor, prior: Tensor) -> Tensor:
    others = prior.expand(len(values), -1).scatter(1, indices, -1e4).log_softmax(-1)
    log_p = others + tail  # all others share the log of the mass that is left
    log_p = log_p.scatter(1, indices, values)
    return log_p.log_softmax(-1)


def _reading(stored: teacher_cache.Cache, read: Callable) -> Callable:
    """Return the loss KL(p || q) at T = 1, with the p that `read` makes of the stored answers."""

    def loss(model: nn.Module, batch: dict) -> dict:
        values, indices, tails = (
            teacher_cache.widened(batch[n]).flatten(0, 1) for n in teacher_cache.KEYS[:3]
        )
        logits, _ = losses.shifted_rows(model(batch["input_ids"]).logits, batch["labels"])
        log_p = read(values.float(), indices, tails.float(), stored.prior)
        kl = F.kl_div(logits.log_softmax(-1), log_p, reduction="sum", log_target=True)
        return {"distillation": kl}

    return loss


def from_a_cache(k: int, read: Callable | None = None, steps: int = 40) -> dict:
    """Train from a cache, of all tokens or of k that are read in this way: its first loss against
    the true one, and the held-out loss against the live teacher's.
    """
    (student, teacher), rows = pair(), batches(rows=ROWS)
    options = dict(steps=steps, source={"teacher": "the byte-level model"}, k=k, machine=CPU)
    batch, first = next(batches(rows=ROWS)), byte_model(seed=1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        stored = teacher_cache.make(Path(folder) / "cache", teacher, rows, **options)
        loss = _reading(stored, read) if k else objective.from_teacher(stored, 1.0)
        reported = loss(first, batch | stored(batch["input_ids"]))["distillation"]
        true = objective.from_teacher(teacher, 1.0)(first, batch)["distillation"]
        mass = teacher(batch["input_ids"]).logits.softmax(-1).topk(k or 1).values.sum(-1)
        with torch.enable_grad():
            learn(student, steps=steps, data=teacher_cache.Cached(rows, stored), loss=loss)
    taught, live = held_out_loss(student), _from_the_live_teacher(steps)
    return {
        "kept of 256": k or "all",
        "the others": {renormalise: "impossible", spread: "share the rest"}.get(read, ""),
        "teacher's mass in the others": float(1 - mass.mean()) if k else 0.0,
        "first loss / true first loss": float(reported / true),
        "held-out loss": taught,
        "from the live teacher": live,
        "lost": taught - live,
    }


# P70: a recurrence divided by its decays


def divided(x: Tensor, d: Tensor) -> Tensor:
    """S_t = d S_(t-1) + x_t for all t at once, as the write-up has it, and again in `doubled`. (B,
    T, D).
    """
    powers = d ** torch.arange(x.shape[1])[:, None]  # (T, D): d^t soon falls below 1e-8
    return (x / (powers + 1e-8)).cumsum(1) * powers


def doubled(x: Tensor, d: Tensor) -> Tensor:
    S, reach = x, 1
    while reach < x.shape[1]:  # S_t is the sum of the last `reach` inputs, decayed
        earlier = F.pad(S[:, :-reach], (0, 0, reach, 0))
        S = S + d * earlier
        d, reach = d * d, 2 * reach
    return S


def wrong_from(
    scan: Callable[[Tensor, Tensor], Tensor], d: float, *, length: int = 256
) -> int | None:
    """Return the first position at which the state is off by a tenth."""
    x, decay = torch.randn(1, length, 64), torch.full((64,), d)
    true = goose.sequential(x.double(), decay.double())
    error = (scan(x, decay).double() - true).norm(dim=-1) / true.norm(dim=-1)  # (1, T)
    return next((t for t, off in enumerate(error[0].tolist()) if not off < 0.1), None)


def remembers(scan: Callable[[Tensor, Tensor], Tensor], hidden: int = 64, steps: int = 40) -> dict:
    """Train the recurrent student on prose, then switch its state off. How far do its predictions
    change, early and late in a row?
    """
    # the write-up's start
    model = goose.tiny(256, hidden=hidden, layers=2, length=LENGTH, decays=(0.38, 0.38))
    layers, rows = [m for m in model.modules() if isinstance(m, goose.Recurrent)], held_out()

    def use(state: Callable[[Tensor, Tensor], Tensor]) -> None:
        for layer in layers:
            layer.scan = state

    def predictions() -> Tensor:
        with torch.no_grad():
            return model(rows).logits[:, :-1].log_softmax(-1)  # (R, T - 1, V)

    use(scan)
    learn(model, steps=steps)
    remembering = predictions()
    use(lambda x, d: torch.zeros_like(x))
    without = predictions()
    # (T - 1,)
    changed = F.kl_div(without, remembering, reduction="none", log_target=True).sum(-1).mean(0)
    lost = (remembering - without).gather(-1, rows[:, 1:, None]).mean((0, 2))
    return {
        "state by": scan.__name__,
        "channels": hidden,
        "median d": float(torch.cat([layer.w for layer in layers]).detach().sigmoid().median()),
        **{
            f"wrong from position, d = {d:g}": wrong_from(scan, d)
            for d in (0.38, 0.5, 0.73, 0.88, 0.97)
        },
        "change without the state, first 16 positions": float(changed[:16].mean()),
        "change without the state, from position 32": float(changed[32:].mean()),
        "loss won by the state, from position 32": float(lost[32:].mean()),
    }


# P71: a similarity of states that have nothing in common


def with_the_diagonal(X: Tensor, Y: Tensor) -> Tensor:
    K, L = X @ X.T, Y @ Y.T  # (n, n): each token with each, and with itself
    return (K * L).sum()


def without_the_diagonal(X: Tensor, Y: Tensor) -> Tensor:
    n, others = len(X), 1 - torch.eye(len(X))
    K, L = X @ X.T * others, Y @ Y.T * others
    means = K.sum() * L.sum() / ((n - 1) * (n - 2))
    rows = K.sum(0) @ L.sum(0) / (n - 2)
    return ((K * L).sum() + means - 2 * rows) / (n * (n - 3))


def cka(X: Tensor, Y: Tensor, hsic: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """CKA of the states of n tokens, (n, D) and (n, E)."""
    X, Y = X - X.mean(0), Y - Y.mean(0)
    return hsic(X, Y) / (hsic(X, X) * hsic(Y, Y)).sqrt()


def _updates(model: nn.Module, ids: Tensor) -> Tensor:
    """Return what the first block adds at every position, (n, D)."""
    states = objective.states_of(model, {"input_ids": ids}, layers=True).layers
    return (states[1] - states[0]).flatten(0, 1)


def dynamics(hsic: Callable[[Tensor, Tensor], Tensor], *, noise: bool, steps: int = 40) -> dict:
    """Train a recurrent student's first block on 1 - CKA alone, with a teacher, or with noise as
    wide as GPT-2.
    """
    student, teacher = (
        goose.tiny(256, hidden=64, layers=2, length=LENGTH, seed=1),
        models.as_teacher(trained()),
    )

    def pair_of(ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = torch.randn(ids.numel(), 768) if noise else _updates(teacher, ids)
        return _updates(student, ids), target

    def loss(_: nn.Module, batch: dict) -> dict:
        return {
            "fdd": losses.supervised(batch["labels"])
            * (1 - cka(*pair_of(batch["input_ids"]), hsic))
        }

    records = learn(student, steps=steps, data=batches(rows=ROWS), loss=loss, clip=0)
    curve = [record["fdd"] for record in records]
    first, last = (sum(part) / 5 for part in (curve[:5], curve[-5:]))
    with torch.no_grad():
        held_out_similarity = float(feature_dynamics.cka(*pair_of(held_out())))
    return {
        "CKA": "biased" if hsic is with_the_diagonal else "debiased",
        "in the teacher's place": "noise" if noise else "the teacher",
        "tokens": ROWS * LENGTH,
        "feature loss at first": first,
        "feature loss at last": last,
        "fell by": first - last,
        "similarity on many held-out tokens": held_out_similarity,
    }


PITFALLS = [
    Pitfall(
        id="P66",
        title="A temperature that climbs to its clamp and stays",
        symptom="The learnable temperature reads 10.0 and stays there, with a regulariser or "
        "without.",
        claim="inference mode of the teacher breaks learnable temperatures (the write-up on "
        "spiking distillation)",
        verdict="Inference mode raises an error in the first step, so nothing can climb under "
        "it. T^2 KL first rises "
        "and then falls in T. Minimised from above its maximum, T climbs without end; from "
        "below, T falls. Beyond a "
        "clamp the gradient is exactly zero, and so is that of a regulariser that reads the "
        "clamped T. "
        f"Seen on {VERSIONS}.",
        fix="A prior in log space on the raw parameter and no clamp (temperature.Learned), or "
        "a fixed number.",
        broken=lambda: climbed(clamped),
        fixed=lambda: climbed(held_by_a_prior),
        seen=lambda facts: facts["steps in which T had no gradient"] > 0.2 * facts["steps"],
        claimed=_under_inference,
        wrong=clamped,
        right=held_by_a_prior,
    ),
    Pitfall(
        id="P67",
        title="Weight decay mistaken for learning",
        symptom="While the gradient reversal still has strength 0, the temperature already "
        "moves, a little each step.",
        claim="the temperature learns freely until the reversal begins (the write-up on "
        "spiking distillation)",
        verdict="Weight decay moved it: without decay T does not change by one bit. At "
        "strength 0 the gradient of T is "
        "multiplied by zero. But AdamW pulled the raw parameter towards zero, which moves T "
        "towards the middle of its "
        f"range. Seen on {VERSIONS}.",
        fix="Give T an optimizer or a group of its own, without weight decay: "
        "temperature.optimizer().",
        broken=lambda: rested(one_optimizer),
        fixed=lambda: rested(one_of_its_own),
        seen=lambda facts: facts["moved by"] > 1e-5 and facts["largest gradient of T"] == 0,
        claimed=lambda: rested(without_decay),
        wrong=one_optimizer,
        right=one_of_its_own,
    ),
    Pitfall(
        id="P68",
        title="A KL divergence averaged over the vocabulary",
        symptom="Adding the teacher changes little: the student ends near where the labels "
        "alone take it.",
        claim="the weight of the distillation is too small (folklore)",
        verdict="Less than half of the weight still teaches. `kl_div` with reduction='mean' "
        "divides by tokens and by "
        "classes. So the term counts only 1 / V of what its weight says, with V the "
        "vocabulary. torch warns of it "
        f"once. Seen on {VERSIONS}.",
        fix="Flatten to (tokens, classes) and use reduction='batchmean', or sum over the classes.",
        broken=lambda: few_labels("mean"),
        fixed=lambda: few_labels("batchmean"),
        seen=lambda facts: facts["won by the teacher"] < 0.25,
        claimed=lambda: few_labels("batchmean", alpha=0.2),
        check="F3",
        wrong=averaged_over_classes,
        right=summed_over_classes,
    ),
    Pitfall(
        id="P69",
        title="A top-k cache that was renormalised",
        symptom="The student learns its targets, but is far worse on text than one taught by "
        "the live teacher.",
        claim="the other tokens have no mass, so it must be the cache's half precision (folklore)",
        verdict="The whole distribution in half precision teaches like the live teacher. "
        "Renormalised, the k stored "
        "tokens take the mass of all others, so the student learns that the others are "
        "impossible. The loss is wrong "
        f"from the first batch on, and so is what the student learns. Seen on {VERSIONS}.",
        fix="Keep the mass of the others and use it: tail='drawn' or 'spread' of the same cache.",
        broken=lambda: from_a_cache(8, renormalise),
        fixed=lambda: from_a_cache(8, spread),
        seen=lambda facts: facts["lost"] > 0.4,
        claimed=lambda: from_a_cache(0),
        wrong=renormalise,
        right=spread,
    ),
    Pitfall(
        id="P70",
        title="A recurrence divided by its decays",
        symptom="Beyond the start of a row the recurrent student predicts the same when its "
        "state is switched off.",
        claim="capacity is the bottleneck, a wider student will use it (the write-up on "
        "spiking distillation)",
        verdict="A student of half the width, with the right state, uses it to the end of the "
        "row. The parallel form "
        "divides by d^t + 1e-8 and multiplies by d^t. Once d^t is below 1e-8 the state fades "
        "to zero, with what was "
        "read just before. The smaller the decay d, the sooner, so short tests and decays near "
        "1 pass. "
        f"Seen on {VERSIONS}.",
        fix="A scan without division (goose.scan), and a test against the sequential form at "
        "full length.",
        broken=lambda: remembers(divided),
        fixed=lambda: remembers(doubled),
        seen=lambda facts: facts["change without the state, from position 32"] < 1e-3,
        claimed=lambda: remembers(doubled, hidden=32),
        wrong=divided,
        right=doubled,
    ),
    Pitfall(
        id="P71",
        title="A similarity of independent states",
        symptom="The feature loss starts well below 1 and falls; on many tokens the layers "
        "have nothing in common.",
        claim="a feature loss that falls means layers that align (the write-up on spiking "
        "distillation)",
        verdict="The loss falls with noise in the teacher's place. The usual CKA of "
        "independent states is far above "
        "zero when there are few tokens, because each token is compared with itself too. It "
        "rises with the number of "
        "directions that the states fill, so the student spreads its states. The debiased CKA "
        "falls only where there "
        f"is something to align with. Seen on {VERSIONS}.",
        fix="The debiased estimator (feature_dynamics.cka), and feature_dynamics.floor beside "
        "every similarity.",
        broken=lambda: dynamics(with_the_diagonal, noise=True),
        fixed=lambda: dynamics(without_the_diagonal, noise=True),
        seen=lambda facts: (
            facts["fell by"] > 0.04 and facts["similarity on many held-out tokens"] < 0.05
        ),
        claimed=lambda: dynamics(without_the_diagonal, noise=False),
        wrong=with_the_diagonal,
        right=without_the_diagonal,
    ),
]
