"""Does a model know what it knows? Accuracy, likelihood and calibration per token, from one forward
pass or many.

A calibrated model that says 0.7 is right seven times in ten. Tokens are sorted by the probability
of their top candidate into equal-width bins (lo, hi], and the expected calibration error is the
mean gap,

    ECE = sum over bins of n_b / N * | accuracy_b - confidence_b |
    (Guo et al., arXiv:1706.04599)

A model with noise inside can be asked more than once. The honest prediction is the mean of the
*probabilities*, p = 1/S sum of softmax(logits_s). Only this average can show doubt; a single pass
with the noise switched off cannot. Nothing here knows where the noise comes from: `sampling(model)`
is the context in which the model draws.

Logits exist for a chunk of tokens at a time; between passes only the last hidden states are kept,
(S, n, D).

`judge` takes probabilities of a few choices, as of notebooks/experiments/answer_tasks.py, and adds
what needs right answers:

    Brier    mean of the squared distance of p from the true answer's corner           risk
             share of wrong answers
    AUROC    how often a right answer is given with more confidence than a wrong one    coverage
             share of the questions
    AURC     mean risk over all coverages, when the least sure answers are held back
             (arXiv:1805.08206)

AUROC and AURC look at the order of the confidences alone, ECE at their size; a temperature changes
only the latter.

Footgun: ECE is a property of the top candidate only and says nothing about accuracy. A model that
always answers with the base rate is perfectly calibrated. Read it next to the likelihood, which
cannot be fooled.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from nblib import losses, runtime, wiring
from nblib.train import Batch

TINY = 1e-30  # below it a probability is not believed


@torch.no_grad()
def measure(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    samples: int = 0,
    sampling: Callable[[nn.Module], AbstractContextManager] | None = None,
    bins: int = 15,
    chunk: int = 1024,
    seed: int = 0,
    machine: runtime.Machine | None = None,
) -> dict:
    """Accuracy, NLL and ECE over the supervised tokens; `samples` 0 is the point estimate.

    The noise is drawn from `seed`, and the generators are left as they were: measuring does not
    change a run.
    """
    if samples < 0 or bins < 1 or chunk < 1:
        raise ValueError(
            f"samples = {samples}, bins = {bins}, chunk = {chunk}: at least 0, 1 and 1"
        )
    if samples and sampling is None:
        raise ValueError(
            f"samples = {samples}: give sampling, the context in which the model draws"
        )
    parts = []
    with (
        runtime.seeded(seed),
        wiring.evaluating(model),
        sampling(model) if samples else nullcontext(),
    ):
        for batch in batches:
            batch = {
                name: tensor.to(next(model.parameters()).device) for name, tensor in batch.items()
            }
            with machine.autocast() if machine else nullcontext():
                parts += _predicted(model, batch, max(1, samples), chunk)
    if not parts:
        raise ValueError("batches: no supervised token to measure on")
    confidence, right, nats = (torch.cat(column).cpu() for column in zip(*parts))  # (N,) each
    rows = reliability(confidence, right, bins=bins)
    facts = {
        "accuracy": float(right.double().mean()),
        "nll": float(nats.double().mean()),
        "ece": ece(rows),
    }
    return facts | {"tokens": len(nats), "samples": samples, "reliability": rows}


def reliability(confidence: Tensor, right: Tensor, *, bins: int = 15) -> list[dict]:
    """One row per bin (lo, hi] of equal width: tokens, mean confidence, accuracy.

    An empty bin has None for both.
    """
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    place = torch.bucketize(confidence.double(), edges[1:-1])  # right edge included
    count = torch.bincount(place, minlength=bins)
    sums = [
        torch.zeros(bins, dtype=torch.float64).index_add_(0, place, x.double())
        for x in (confidence, right)
    ]
    rows = []
    for low, high, n, *totals in zip(
        *(column.tolist() for column in (edges[:-1], edges[1:], count, *sums))
    ):
        means = [total / n if n else None for total in totals]
        rows.append(
            {"from": low, "to": high, "tokens": n, "confidence": means[0], "accuracy": means[1]}
        )
    return rows


def ece(rows: list[dict]) -> float:
    """Return expected calibration error of a reliability table."""
    total = sum(row["tokens"] for row in rows)
    return sum(
        row["tokens"] / total * abs(row["accuracy"] - row["confidence"])
        for row in rows
        if row["tokens"]
    )


def judge(p: Tensor, answer: Tensor, *, bins: int = 15) -> dict:
    """Of probabilities (N, C) and the numbers of the true choices (N,); the confidence is that of
    the first choice.
    """
    p = p.double()
    (confidence, guess), true = p.max(-1), p.gather(1, answer[:, None]).squeeze(1)
    right, rows = guess == answer, reliability(confidence, guess == answer, bins=bins)
    corner = nn.functional.one_hot(answer, p.shape[1])
    facts = {
        "accuracy": float(right.double().mean()),
        "nll": float(-true.clamp_min(TINY).log().mean()),
    }
    facts |= {"ece": ece(rows), "brier": float((p - corner).square().sum(-1).mean())}
    facts |= {"auroc": auroc(confidence, right), "aurc": float(risks(confidence, right).mean())}
    return facts | {"questions": len(p), "reliability": rows}


def auroc(confidence: Tensor, right: Tensor) -> float | None:
    """How often a right answer has more confidence than a wrong one; a tie counts half.

    None without one of both.
    """
    good, bad = confidence[right.bool()].double(), confidence[~right.bool()].double()
    if not len(good) or not len(bad):
        return None
    order = bad.sort().values
    below, up_to = torch.searchsorted(order, good), torch.searchsorted(order, good, right=True)
    return float((below + up_to).double().mean() / 2 / len(bad))


def risks(confidence: Tensor, right: Tensor) -> Tensor:
    """Share of wrong answers among the k surest, for k = 1 to N, (N,).

    Equally sure ones count as in any order.
    """
    values, place = confidence.double().unique(return_inverse=True)
    count = torch.bincount(place, minlength=len(values)).double()
    wrong = torch.zeros(len(values), dtype=torch.float64).index_add_(
        0, place, (~right.bool()).double()
    )
    ordered = (wrong / count)[place[confidence.argsort(descending=True)]]
    return ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)


def temperature(logits: Tensor, answer: Tensor) -> float:
    """Return the T of softmax(logits / T) with the lowest NLL.

    It is convex in 1 / T, so its slope is bisected.
    """
    z = logits.double().masked_fill(logits.isinf(), -1e6)
    true, low, high = z.gather(1, answer[:, None]).squeeze(1).mean(), math.log(1e-3), math.log(1e3)
    for _ in range(60):
        middle = (low + high) / 2
        slope = ((z * math.exp(middle)).softmax(-1) * z).sum(-1).mean() - true
        low, high = (low, middle) if slope > 0 else (middle, high)
    return math.exp(-middle)


def _predicted(
    model: nn.Module, batch: Batch, samples: int, chunk: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(confidence, right, nats) of every supervised token of a batch, chunk by chunk."""
    draws, targets, weight = [], None, None
    for _ in range(samples):
        states = losses.hidden_states(model, batch)
        # the head is more than a matrix product, so the logits take the place of hidden states
        if states is None:
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            states = model(**inputs, use_cache=False).logits, None
        hidden, weight = states
        hidden, targets = losses.shifted_rows(hidden, batch["labels"])  # (n, D), (n,)
        draws.append(hidden)
    parts = []
    for at in range(0, len(targets), chunk):
        true, p = targets[at : at + chunk], 0
        for hidden in draws:
            h = hidden[at : at + chunk]
            logits = h if weight is None else h @ weight.to(h.dtype).T  # (c, V)
            p = p + logits.float().softmax(-1) / samples
        confidence, guess = p.max(-1)
        nats = -p.gather(1, true[:, None]).squeeze(1).clamp_min(TINY).log()
        parts.append((confidence, guess == true, nats))
    return parts
