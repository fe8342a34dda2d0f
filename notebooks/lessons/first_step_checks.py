"""What notebook 05 asks of small programs besides the doctor's report: alarms of a first step, a
loss read from its value, and the share of each update that arrives.

    share = sum (w - s)(c - s) / sum (c - s)^2
    w: the weights, s: where they started, c: fp32 copies

`arriving` is the fp32 shadow written out: every step goes to the model and to fp32 copies of its
weights with the same gradients. The share is measured along the way of the copies, so noise across
that way does not count.

Footgun: the copies follow the model's gradients, not their own. That is right for a few steps; over
many steps the two would part for other reasons than rounding.
"""

import re

import torch
from matplotlib.figure import Figure

from lessons import programs
from lessons.programs import Program
from loopdoctor.checks import ALL
from nblib import doctor, models
from nblib.methods.muon.bf16_adamw import BF16AdamW
from nbworkbook import show

SYMPTOMS = {  # what is seen: words of the checks' own symptoms
    "the loss does not fall": (
        "stays where it is",
        "flat",
        "never falls",
        "nothing moves",
        "nothing changes",
    ),
    "the loss is high": ("stuck high", "worse than it should", "learns less", "hardly falls"),
    "the loss falls too fast": (
        "falls fast",
        "looks too good",
        "far below",
        "nearly zero at once",
        "falls at once",
    ),
    "NaN or infinity": ("nan", "infinit", "not finite"),
    "part of the model does not learn": (
        "part of the model",
        "some layers",
        "never learn",
        "do not learn",
    ),
    "jumps, or grows": ("jumps", "explodes", "oscillates", "less stable"),
    "what should rest moves": ("drift", "frozen go on", "changes with the policy"),
    "memory or time": ("memory", "slow", "idle"),
    "16 bits, a GradScaler": ("16 bits", "bf16", "fp16", "gradscaler"),
}
KINDS = {  # how weights are kept: their dtype, and how AdamW writes them
    "fp32": (torch.float32, ""),
    "bf16, stochastic rounding": (torch.bfloat16, "stochastic"),
    "bf16": (torch.bfloat16, "nearest"),
}


def first_step(program: Program) -> dict[str, int]:
    """Return what alarms: tensors (or experts) without a gradient, and tensors that stay where they
    are.
    """
    weights = {n: w for n, w in program.model.named_parameters() if w.requires_grad}
    before = {n: w.detach().clone() for n, w in weights.items()}
    programs.train(program, 1)
    pieces = [g for w in weights.values() for g in (w.grad.unbind() if w.dim() == 3 else [w.grad])]
    return {
        "without gradient": sum(g is None or not g.any() for g in pieces),
        "of": len(pieces),
        "unmoved": sum(torch.equal(w, before[n]) for n, w in weights.items()),
        "of tensors": len(weights),
    }


def with_gradient(program: Program) -> int:
    """Trainable tensors that hold a gradient after the last step."""
    return sum(
        w.grad is not None and bool(w.grad.any())
        for w in program.model.parameters()
        if w.requires_grad
    )


def root_of(report) -> str:
    return f"{report.root.check} {report.root.name}" if report.root else "nothing found"


def folded(report) -> dict:
    """How many findings a report has, how many of them are roots, and what the graph of causes
    folds.
    """
    found = [f for f in report.findings if f.severity != doctor.NOTE]
    follow = ", ".join(f.check for f in found if f.because)
    counts = {"findings": len(found), "roots": sum(not f.because for f in found)}
    return counts | {"root": root_of(report), "folded": follow or "-"}


def states(report) -> dict[str, int]:
    """How many checks that found nothing say so for which reason."""
    said = [verdict.state for verdict in report.verdicts.values()]
    return {state: said.count(state) for state in ("OK", "NOT-APPLICABLE", "UNKNOWN")}


def asking(*words: str) -> list[dict[str, str]]:
    """Return the checks in whose symptom one of these words stands."""
    chosen = [
        c
        for c in ALL
        if any(re.search(rf"\b{re.escape(w)}", c.symptom, re.IGNORECASE) for w in words)
    ]
    return [{"check": c.id, "name": c.name, "symptom": c.symptom} for c in chosen]


def symptoms() -> list[dict[str, str]]:
    """Return what people see first, and the checks that ask about it."""
    return [
        {
            "you see": seen,
            "checks that ask": ", ".join(f"{row['check']} {row['name']}" for row in asking(*words)),
        }
        for seen, words in SYMPTOMS.items()
    ]


def fingerprint(ways: dict[str, float], observed: float) -> show.Picture:
    """Return the loss of a loop as a line among the values that it would have if it were computed
    in other ways.
    """
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(list(ways.values())[::-1], list(ways)[::-1], "o")
    axes.axvline(observed, color="tab:red", linewidth=1)
    axes.set(xlabel="cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    nearest = min(ways, key=lambda way: abs(ways[way] - observed))
    return show.Picture(
        figure,
        "Blue points: the loss of the same logits, computed in eight ways. Red line: the loss "
        "that the loop reported. "
        f"The line lies on {nearest!r}, so that is how the loop computes it.",
        title="A loss is recognised by its value",
    )


def arriving(kind: str, lr: float, steps: int) -> float:
    """Share of the way of fp32 copies that the weights went, over all tensors."""
    dtype, way = KINDS[kind]
    model = models.tiny(programs.VOCABULARY, hidden=64, layers=2).to(dtype)
    copies = [w.detach().float().clone().requires_grad_() for w in model.parameters()]
    starts = [w.detach().clone() for w in copies]
    exact = torch.optim.AdamW(copies, lr=lr, weight_decay=0.0)
    own = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    if way:
        own = BF16AdamW(model.parameters(), lr=lr, way=way)
    for ids in programs.batches(steps):
        own.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        for copy, w in zip(copies, model.parameters()):
            copy.grad = w.grad.float()
        own.step()
        exact.step()
    pairs = list(zip(model.parameters(), copies, starts))
    moved = sum(float(((w.detach().float() - s) * (c.detach() - s)).sum()) for w, c, s in pairs)
    return moved / sum(float((c.detach() - s).square().sum()) for _, c, s in pairs)
