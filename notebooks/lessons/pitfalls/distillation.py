"""Distillation that only seems to work: temperatures that do not learn, a renormalised cache, a lost state.

None of these faults raises. A temperature stays at a bound, a loss falls, a student predicts text, and each is taken
for success. All of them are shown on the byte-level model as the teacher and a fresh one as the student.

Footgun: a small student differs from a small teacher in few tokens. Compare the three runs with each other; how well
any of them ends says little.
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
from lessons.pitfalls.bench import CPU, LENGTH, batches, byte_model, held_out_loss, learn, quiet, stream, trained
from nblib import losses, models, text, train
from nblib.methods import alignment, goose, objective, teacher_cache
from nblib.methods.temperature import Adversarial, Learned

ROWS = 4


def pair() -> tuple[nn.Module, nn.Module]:
    """A student that knows nothing, and its teacher."""
    return byte_model(seed=1), models.as_teacher(trained())


def held_out(rows: int = 64) -> Tensor:
    return text.fixed_rows(stream("prose", "held_out"), length=LENGTH, limit=rows)


def softened(student: Tensor, teacher: Tensor, T: float, *, reduction: str = "batchmean") -> Tensor:
    """T^2 KL as it is usually written, of logits (n, V)."""
    return T**2 * F.kl_div((student / T).log_softmax(-1), (teacher / T).softmax(-1), reduction=reduction)


# P66, P67: a temperature with a gradient of zero


class Clamped(nn.Module):
    """The write-up's: T = exp(raw), cut off at 1 and 10."""

    def __init__(self, start: float):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(math.log(start)))

    def forward(self) -> Tensor:
        return self.raw.exp().clamp(1, 10)

    def optimizer(self, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=lr)


def _hump(student: nn.Module, teacher: nn.Module) -> float:
    """The temperature at which T^2 KL is largest, on one batch."""
    ids = next(batches())["input_ids"]
    with torch.no_grad():
        s, t = (m(ids).logits.flatten(0, 1) for m in (student, teacher))
    grid = [0.5 * 1.1**i for i in range(40)]
    return max(grid, key=lambda T: float(softened(s, t, T)))


def climbed(temperature: nn.Module, steps: int = 40) -> dict:
    """Minimise T^2 KL in the student and in T together."""
    student, teacher = pair()
    start, hump, gradients = float(temperature().detach()), _hump(student, teacher), []
    temperature.raw.register_hook(lambda gradient: gradients.append(float(gradient)))
    optimizers = [train.adamw(student, lr=5e-3), temperature.optimizer(lr=0.05)]
    student.temperature = temperature
    loss = objective.from_teacher(teacher, temperature)
    learn(student, steps=steps, optimizers=optimizers, data=batches(rows=ROWS), loss=loss, clip=0)
    T = temperature()
    (pull,) = torch.autograd.grad((T.log() - math.log(2)).square(), temperature.raw)
    return {
        "temperature": type(temperature).__name__,
        "T at the start": start,
        "the loss is largest at T": hump,
        "T at the end": float(T.detach()),
        "steps": steps,
        "steps in which T had no gradient": gradients.count(0.0),
        "pull of a regulariser that reads T": abs(float(pull)),
        "raised": None,
    }


def _under_inference() -> dict:
    """A temperature without a clamp, and a teacher under inference mode."""
    facts = {"temperature": "exp(raw)", "steps": 0, "steps in which T had no gradient": 0}
    return facts | {"raised": teacher_use("t / T, T learnable")["raised"]}


def rested(make: Callable[[nn.Module, Adversarial], list], steps: int = 30) -> dict:
    """A reversed temperature during its rest, in which the reversal's strength is 0."""
    student, teacher = pair()
    student.temperature = T = Adversarial(2.0, total=4 * steps, rest=0.25)
    gradients = []
    T.raw.register_hook(lambda gradient: gradients.append(abs(float(gradient))))
    optimizers, loss = make(student, T), objective.from_teacher(teacher, T)
    owner, group = next((o, g) for o in optimizers for g in o.param_groups if any(p is T.raw for p in g["params"]))
    learn(student, steps=steps, optimizers=optimizers, data=batches(rows=ROWS), loss=loss)
    return {
        "optimizer of T": type(owner).__name__,
        "weight decay on T": group["weight_decay"],
        "T at the start": 2.0,
        "T at the end": float(T().detach()),
        "moved by": abs(float(T().detach()) - 2.0),
        "largest gradient of T": max(gradients),
    }


def _with_everything(weight_decay: float) -> Callable[[nn.Module, Adversarial], list]:
    """One AdamW over all that the student holds, its temperature included."""
    return lambda student, T: [torch.optim.AdamW(student.parameters(), lr=5e-3, weight_decay=weight_decay)]


def _on_its_own(student: nn.Module, T: Adversarial) -> list:
    others = [p for p in student.parameters() if p is not T.raw]
    return [torch.optim.AdamW(others, lr=5e-3, weight_decay=0.01), T.optimizer()]


# P68: the mean over the vocabulary


def few_labels(reduction: str, alpha: float = 0.5, steps: int = 40) -> dict:
    """alpha KD + (1 - alpha) CE on the same few rows again and again, which the labels alone teach by heart."""
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
    optimizer = train.adamw(student, lr=5e-3)
    with torch.no_grad():
        t, _ = losses.shifted_rows(teacher(batch["input_ids"]).logits, batch["labels"])
    for _ in range(steps):
        s, targets = losses.shifted_rows(student(batch["input_ids"]).logits, batch["labels"])
        terms = [alpha * softened(s, t, 2.0, reduction=reduction), (1 - alpha) * F.cross_entropy(s, targets)]
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


def from_a_cache(k: int, tail: str, steps: int = 40) -> dict:
    """Train from a cache: its first loss against the true one, and the held-out loss against the live teacher's."""
    (student, teacher), rows = pair(), batches(rows=ROWS)
    options = dict(steps=steps, source={"teacher": "the byte-level model"}, k=k, machine=CPU)
    batch, first = next(batches(rows=ROWS)), byte_model(seed=1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        stored = teacher_cache.make(Path(folder) / "cache", teacher, rows, **options)
        loss = objective.from_teacher(stored, 1.0, tail=tail)
        reported = loss(first, batch | stored(batch["input_ids"]))["distillation"]
        true = objective.from_teacher(teacher, 1.0)(first, batch)["distillation"]
        mass = teacher(batch["input_ids"]).logits.softmax(-1).topk(k or 1).values.sum(-1)
        with torch.enable_grad():
            learn(student, steps=steps, data=teacher_cache.Cached(rows, stored), loss=loss)
    taught, live = held_out_loss(student), _from_the_live_teacher(steps)
    return {
        "kept of 256": k or "all",
        "the others": tail if k else "",
        "teacher's mass in the others": float(1 - mass.mean()) if k else 0.0,
        "first loss / true first loss": float(reported / true),
        "held-out loss": taught,
        "from the live teacher": live,
        "lost": taught - live,
    }


# P70: a recurrence divided by its decays


def divided(x: Tensor, d: Tensor) -> Tensor:
    """S_t = d S_(t-1) + x_t as the write-up computes all t at once: divide by d^t, add up, multiply back. (B, T, D)."""
    powers = d ** torch.arange(x.shape[1])[:, None]  # (T, D)
    return (x / (powers + 1e-8)).cumsum(1) * powers


def wrong_from(scan: Callable[[Tensor, Tensor], Tensor], d: float, *, length: int = 256) -> int | None:
    """The first position at which the state is off by a tenth."""
    x, decay = torch.randn(1, length, 64), torch.full((64,), d)
    true = goose.sequential(x.double(), decay.double())
    error = (scan(x, decay).double() - true).norm(dim=-1) / true.norm(dim=-1)  # (1, T)
    return next((t for t, off in enumerate(error[0].tolist()) if not off < 0.1), None)


def remembers(scan: Callable[[Tensor, Tensor], Tensor], hidden: int = 64, steps: int = 40) -> dict:
    """Train the recurrent student on prose, then switch its state off: how far its predictions change, early in a row
    and late."""
    model = goose.tiny(256, hidden=hidden, layers=2, length=LENGTH)
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
    changed = F.kl_div(without, remembering, reduction="none", log_target=True).sum(-1).mean(0)  # (T - 1,)
    lost = (remembering - without).gather(-1, rows[:, 1:, None]).mean((0, 2))
    return {
        "state by": scan.__name__,
        "channels": hidden,
        "median d": float(torch.cat([layer.w for layer in layers]).detach().sigmoid().median()),
        **{f"wrong from position, d = {d:g}": wrong_from(scan, d) for d in (0.38, 0.5, 0.73, 0.88, 0.97)},
        "change without the state, first 16 positions": float(changed[:16].mean()),
        "change without the state, from position 32": float(changed[32:].mean()),
        "loss won by the state, from position 32": float(lost[32:].mean()),
    }


# P71: a similarity that is there without anything alike


def _updates(model: nn.Module, ids: Tensor) -> Tensor:
    """What the first block adds at every position, (n, D)."""
    states = objective.states_of(model, {"input_ids": ids}, layers=True).layers
    return (states[1] - states[0]).flatten(0, 1)


def dynamics(*, debiased: bool, noise: bool, steps: int = 40) -> dict:
    """Train a recurrent student's first block on 1 - CKA alone, with a teacher, or with noise as wide as GPT-2."""
    student, teacher = goose.tiny(256, hidden=64, layers=2, length=LENGTH, seed=1), models.as_teacher(trained())

    def alike(ids: Tensor, *, debiased: bool) -> Tensor:
        with torch.no_grad():
            target = torch.randn(ids.numel(), 768) if noise else _updates(teacher, ids)
        return alignment.cka(_updates(student, ids), target, debiased=debiased)

    def loss(_: nn.Module, batch: dict) -> dict:
        return {"fdd": losses.supervised(batch["labels"]) * (1 - alike(batch["input_ids"], debiased=debiased))}

    records = learn(student, steps=steps, data=batches(rows=ROWS), loss=loss, clip=0)
    curve = [record["fdd"] for record in records]
    first, last = (sum(part) / 5 for part in (curve[:5], curve[-5:]))
    with torch.no_grad():
        held_out_similarity = float(alike(held_out(), debiased=True))
    return {
        "CKA": "debiased" if debiased else "biased",
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
        symptom="The learnable temperature reads 10.0 and stays there, with a regulariser or without.",
        claim="the teacher ran under inference mode, which breaks learnable temperatures (write-up)",
        verdict="Inference mode raises an error in the first step, so nothing can climb under it. T^2 KL has a hump in "
        "T: who minimises it from above the hump climbs without end, from below falls. Beyond a clamp the gradient is "
        f"exactly zero, for a regulariser that reads the clamped T as well. Seen on {VERSIONS}.",
        fix="A prior in log space on the raw parameter and no clamp (temperature.Learned), or a number.",
        broken=lambda: climbed(Clamped(5.0)),
        fixed=lambda: climbed(Learned(5.0, anchor=2.0)),
        seen=lambda facts: facts["steps in which T had no gradient"] > 0.2 * facts["steps"],
        claimed=_under_inference,
    ),
    Pitfall(
        id="P67",
        title="Weight decay mistaken for learning",
        symptom="While the gradient reversal still has strength 0, the temperature already moves, a little each step.",
        claim="the temperature learns freely until the reversal sets in (write-up)",
        verdict="At strength 0 its gradient is multiplied by zero, and without decay T stands still to the bit. AdamW "
        f"pulled the raw parameter towards zero, which is a T in the middle of its range. Seen on {VERSIONS}.",
        fix="An optimizer, or a group, of its own without weight decay: temperature.optimizer().",
        broken=lambda: rested(_with_everything(0.01)),
        fixed=lambda: rested(_on_its_own),
        seen=lambda facts: facts["moved by"] > 1e-5 and facts["largest gradient of T"] == 0,
        claimed=lambda: rested(_with_everything(0.0)),
    ),
    Pitfall(
        id="P68",
        title="A divergence averaged over the vocabulary",
        symptom="Adding the teacher changes nothing: the student ends where the labels alone take it.",
        claim="the weight of the distillation is too small (folklore)",
        verdict="Less than half of the weight still teaches. `kl_div` with reduction='mean' divides by tokens and by "
        "classes, so the term counts one part in V of what its weight says. torch warns of it, once. "
        f"Seen on {VERSIONS}.",
        fix="Flatten to (tokens, classes) and reduction='batchmean', or sum over the classes.",
        broken=lambda: few_labels("mean"),
        fixed=lambda: few_labels("batchmean"),
        seen=lambda facts: facts["won by the teacher"] < 0.25,
        claimed=lambda: few_labels("batchmean", alpha=0.2),
        check="F3",
    ),
    Pitfall(
        id="P69",
        title="A top-k cache that was renormalised",
        symptom="The student learns its targets and is far worse on text than one taught by the live teacher.",
        claim="the others have no mass, so it must be the cache's half precision (folklore)",
        verdict="All of the distribution in half precision teaches like the live teacher. Renormalised, the k claim "
        "the mass of all others, and the student is taught that these are impossible: the loss is wrong from the "
        f"first batch on, and so is what it learns. Seen on {VERSIONS}.",
        fix="Keep the mass of the others and read it: tail='drawn' or 'spread' of the same cache.",
        broken=lambda: from_a_cache(8, "none"),
        fixed=lambda: from_a_cache(8, "spread"),
        seen=lambda facts: facts["lost"] > 0.4,
        claimed=lambda: from_a_cache(0, "drawn"),
    ),
    Pitfall(
        id="P70",
        title="A recurrence divided by its decays",
        symptom="Beyond the start of a row the recurrent student predicts the same if its state is switched off.",
        claim="capacity is the bottleneck: a wider student will use it (write-up)",
        verdict="Half the width with the right state uses it to the end. The parallel form divides by d^t + 1e-8 and "
        "multiplies back: once d^t is below 1e-8 the state fades to zero, what has just been read included. How soon "
        f"depends on the decay, so that short tests and slow decays pass. Seen on {VERSIONS}.",
        fix="A scan without negative powers (goose.scan), and a test against the sequential form at full length.",
        broken=lambda: remembers(divided),
        fixed=lambda: remembers(goose.scan),
        seen=lambda facts: facts["change without the state, from position 32"] < 1e-3,
        claimed=lambda: remembers(goose.scan, hidden=32),
    ),
    Pitfall(
        id="P71",
        title="A similarity of independent states",
        symptom="The feature loss starts well below 1 and falls; on many tokens the layers have nothing in common.",
        claim="a feature loss that falls means layers that align (write-up)",
        verdict="It falls with noise in the teacher's place. The plug-in CKA of independent states is far above zero "
        "where tokens are few, and the more directions they fill the higher, so the student spreads its states. The "
        f"debiased one falls only where there is something to align with. Seen on {VERSIONS}.",
        fix="The debiased estimator (alignment.cka), and alignment.floor beside every similarity.",
        broken=lambda: dynamics(debiased=False, noise=True),
        fixed=lambda: dynamics(debiased=True, noise=True),
        seen=lambda facts: facts["fell by"] > 0.04 and facts["similarity on many held-out tokens"] < 0.05,
        claimed=lambda: dynamics(debiased=True, noise=False),
    ),
]
