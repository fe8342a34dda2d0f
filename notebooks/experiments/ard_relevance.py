"""Which measure of relevance finds the ranks that can go? Each beside leaving every rank out, and
what each costs.

    cd notebooks && ../.venv/bin/python -m experiments.ard_relevance

The truth about one rank is the loss without it: *leave one out*, a pass over the rows for every
rank. What pruning goes by should order the ranks as that does, and cost less to find out:

    signal      mean of |s mu_k B_k|^2, what the rank adds to the output (ard/ranks.py); passes
                without a gradient
    weighted    the same with the noise counted in
    Fisher      mean over rows of (d loss / d g_k)^2, g_k = 1 a factor of what the rank adds; a
                backward pass a row. The derivative needs no gate: it is the gradient of B[:, k]
                times B[:, k], summed
    variance    v_k, as the method was first written

Each says how far its order agrees with leaving one out (Spearman's rank correlation), and what it
costs to keep half or a quarter of the ranks, over all layers together or as many in each layer.
`rescaled` is the same function written with other numbers: z_k times c_k, B[:, k] over c_k. A
measure that another spelling changes does not measure the function.

Footgun: leave one out tests every rank beside all others. Two ranks that do the same work are both
worth nothing there.
"""

import copy
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.record import Store, command, read_published
from nblib import losses, runtime, train
from nblib.methods import ard
from nblib.methods.ard import ranks
from nbworkbook.setup import Setup, load_setup

RECORD = "ard-relevance"
SEEDS, SHARES, KINDS = (0, 1, 2), (0.5, 0.25), ("q_proj", "v_proj", "o_proj")
RANK, BETA, STEPS, ROWS, LENGTH, RATE, LOOKED, JUDGED = 8, 1.25e-3, 32, 8, 64, 1e-2, 8, 32
RESCALED = (0.25, 4.0)  # the least and the largest c_k
Scores = ranks.Scores


@torch.no_grad()
def leave_one_out(model: nn.Module, loss: Callable[[], float]) -> Scores:
    """How much the loss rises without each rank."""
    whole, scores = loss(), {}
    for name, a in ard.adapters(model).items():
        scores[name] = torch.zeros(a.rank)
        for k in range(a.rank):
            column = a.lora_up[:, k].clone()
            a.lora_up[:, k] = 0
            scores[name][k] = loss() - whole
            a.lora_up[:, k] = column
    return scores


def fisher(model: nn.Module, rows: Tensor, *, machine: runtime.Machine | None = None) -> Scores:
    """Mean over the rows (R, T) of the squared derivative of a row's loss in the strength of each
    rank.
    """
    layers, machine = ard.adapters(model), machine or runtime.pick("cpu", "fp32")
    scores = {name: torch.zeros(a.rank) for name, a in layers.items()}
    was = model.training
    model.eval()  # what is pruned is the mean adapter
    for row in rows.to(machine.device):
        with machine.autocast():
            term = losses.causal_lm(model, {"input_ids": row[None], "labels": row[None]})["ce"]
        gradients = torch.autograd.grad(term / (len(row) - 1), [a.lora_up for a in layers.values()])
        for (name, a), gradient in zip(layers.items(), gradients):
            scores[name] += (gradient * a.lora_up.detach()).sum(0).square().cpu() / len(rows)
    model.train(was)
    return scores


@torch.no_grad()
def rescale(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Return a copy that computes the same: z_k times c_k, B[:, k] over c_k, and the statistics as
    they would be fitted.
    """
    model, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    low, high = (torch.tensor(x).log() for x in RESCALED)
    for a in ard.adapters(model).values():
        c = (low + (high - low) * torch.rand(a.rank, generator=draw)).exp().to(a.lora_mean.device)
        a.lora_mean.mul_(c[:, None])
        a.lora_up.div_(c)
        a.prior.mul_(c.square())  # both scale with z squared
        a.power.mul_(c.square())
    return model


def spearman(a: Scores, b: Scores) -> float:
    """Correlation of the ranks of all scores together; equal scores share their mean rank."""
    return float(
        torch.corrcoef(torch.stack([_places(torch.cat(list(s.values()))) for s in (a, b)]))[0, 1]
    )


def _places(values: Tensor) -> Tensor:
    _, inverse, count = values.double().unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2)[inverse]


def per_layer(scores: Scores) -> Scores:
    """Scores that keep as many ranks in every layer: each layer's own places, ties between layers
    by their order.
    """
    return {name: s.argsort().argsort().double() for name, s in scores.items()}


def cost(
    model: nn.Module, scores: Scores, share: float, loss: Callable[[nn.Module], float]
) -> float:
    """How much the loss rises if this share of the ranks is kept by these scores."""
    pruned = copy.deepcopy(model)
    ranks.prune(pruned, scores, keep=round(share * sum(map(len, scores.values()))))
    return loss(pruned) - loss(model)


def judged(opened: Setup, seed: int) -> list[dict]:
    """Return a line per measure at a seed: agreement with leaving one out, and the cost of pruning
    by it.
    """
    runtime.seed_all(seed)
    model = copy.deepcopy(opened.model)
    ard.attach(model, rank=RANK, alpha=float(RANK), targets=ard.projections(model, KINDS))
    options = dict(
        total=STEPS, schedule=train.cosine(STEPS, warmup=3), clip=0, machine=opened.machine
    )
    adamw, batches = (
        train.adamw(model, lr=RATE, weight_decay=0.0),
        opened.batches(rows=ROWS, seed=seed),
    )
    train.fit(model, batches, adamw, loss=ard.loss(model, beta=BETA), **options)
    # all measures look at the same rows; the result is of others
    looked = opened.validation[:LOOKED]
    # one rank changes the loss by less than bf16 resolves
    exact = opened.machine._replace(precision="fp32")

    def on(rows: Tensor) -> Callable[[nn.Module], float]:
        return lambda net: train.evaluate(net, rows, machine=exact)["loss"]

    ranks.estimate_priors(model, [{"input_ids": looked, "labels": looked}], machine=exact)
    other, held_out, whole = rescale(model), opened.held_out[:JUDGED], on(looked)
    measures = {"leave one out": leave_one_out(model, lambda: whole(model))}
    passes = {"leave one out": sum(a.rank for a in ard.adapters(model).values()) + 1, "Fisher": 3}
    measures |= {by: ranks.relevance(model, by=by) for by in ranks.MEASURES}
    measures["Fisher"] = fisher(model, looked, machine=exact)
    measures |= {f"{by}, rescaled": ranks.relevance(other, by=by) for by in ("signal", "variance")}
    draw, lines, truth = torch.Generator().manual_seed(seed), [], measures["leave one out"]
    measures["at random"] = {name: torch.rand(len(s), generator=draw) for name, s in truth.items()}
    for name, scores in measures.items():
        scores = {layer: s.detach().cpu().double() for layer, s in scores.items()}
        line = {"seed": seed, "measure": name, "agrees": spearman(scores, truth)}
        line |= {"passes": passes.get(name, 0 if name == "at random" else 1)}
        for share in SHARES:
            line[f"{share:.0%}"] = cost(model, scores, share, on(held_out))
            line[f"{share:.0%} of each layer"] = cost(model, per_layer(scores), share, on(held_out))
        lines.append(line)
    return lines


def measure(path: Path, opened: Setup, *, seeds: tuple[int, ...] = SEEDS) -> dict:
    """Return the record with every seed; one that the file holds is not repeated."""
    settings = dict(
        rank=RANK, beta=BETA, steps=STEPS, rows=ROWS, length=LENGTH, rate=RATE, kinds=KINDS
    )
    settings |= dict(looked=LOOKED, judged=JUDGED)
    store = Store(path, settings)
    return store.measure(
        ({"seed": seed} for seed in seeds), lambda unit: judged(opened, unit["seed"])
    )


def everything(path: Path, machine: runtime.Machine) -> dict:
    """Return the record of all seeds."""
    return measure(path, load_setup(corpus="code", length=LENGTH, rows=JUDGED, machine=machine))


# -------------------------------------------------------------------------------- what is on record
published = partial(read_published, RECORD)


def agreement(record: dict) -> dict[str, float]:
    """Mean over the seeds of each measure's agreement with leaving one out."""
    names = dict.fromkeys(line["measure"] for line in record["lines"])
    return {
        n: statistics.mean(x["agrees"] for x in record["lines"] if x["measure"] == n) for n in names
    }


def table(record: dict) -> list[dict]:
    """Return a row per measure, the one that agrees most first: means over the seeds, with their
    range.
    """
    rows, agrees = [], agreement(record)
    for name in sorted(agrees, key=lambda name: -agrees[name]):
        lines = [line for line in record["lines"] if line["measure"] == name]
        row = {"pruned by": name, "passes": lines[0]["passes"]}
        for column in [key for key in lines[0] if key not in ("seed", "measure", "passes")]:
            numbers = [line[column] for line in lines]
            label = "agrees with leave one out" if column == "agrees" else f"keep {column}"
            row[label] = (
                f"{statistics.mean(numbers):.3f} ({min(numbers):.3f} to {max(numbers):.3f})"
            )
        rows.append(row)
    return rows


if __name__ == "__main__":
    command(RECORD, __doc__, everything)
