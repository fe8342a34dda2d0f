"""Does a longer context help a recurrent student as it helps a transformer? Losses along rows of
2,048 tokens.

    cd notebooks && ../.venv/bin/python -m experiments.goose_context

A model that uses what it read predicts late tokens of a row better than early ones. Three models of
the same width and depth learn the embedded prose, on the same rows of 2,048 tokens, from labels
alone, at three seeds: goose with its decays spread over the channels, goose with all decays at 0.38
as the write-up starts them (nothing is left of a token after ten others), and a transformer. Each
is then judged on held-out rows, by the position in the row.

Footgun: positions differ in what stands there. A document starts where the one before it ends, also
in the middle of a row, so compare the models at one position, not one model at two.
"""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from experiments.record import Store, command, read_published
from nblib import models, runtime, train, wiring
from nblib.methods import goose
from nbworkbook import show
from nbworkbook.setup import Setup, load_setup

RECORD = "goose-context"
UP_TO = (16, 64, 256, 512, 1024, 2048)  # positions of a row, in groups that end here
MADE = dict(hidden=128, layers=2)
KINDS: dict[str, Callable[..., nn.Module]] = {
    "goose": goose.tiny,
    "goose, all decays 0.38": lambda vocabulary, **shape: goose.tiny(
        vocabulary, decays=(0.38, 0.38), **shape
    ),
    "transformer": lambda vocabulary, **shape: models.tiny(vocabulary, heads=2, **shape),
}


@torch.no_grad()
def by_position(
    model: nn.Module, rows: Tensor, machine: runtime.Machine, up_to: tuple = UP_TO
) -> list[float]:
    """Return the mean loss over rows (R, T) of the tokens at positions below each of `up_to`, from
    the one before on.
    """
    sums = torch.zeros(rows.shape[1] - 1, dtype=torch.float64)
    with wiring.evaluating(model):
        for row in rows:  # one at a time: all logits of a row are (T, V)
            with machine.autocast():
                scores = model(input_ids=row[None].to(machine.device)).logits[0, :-1]
            targets = row[1:].to(machine.device)
            sums += (
                torch.nn.functional.cross_entropy(scores.float(), targets, reduction="none")
                .double()
                .cpu()
            )
    edges = [0, *(min(each, len(sums)) for each in up_to)]
    return [float(sums[a:b].mean() / len(rows)) for a, b in zip(edges, edges[1:]) if b > a]


def trained(
    opened: Setup, kind: str, *, seed: int, steps: int, rows: int, lr: float = 4e-3, **shape: int
) -> list[float]:
    """Return the losses by position, on held-out rows, of a model of this kind that was trained
    with this seed.
    """
    runtime.seed_all(seed)
    vocabulary, length = opened.model.config.vocab_size, opened.held_out.shape[1]
    model = KINDS[kind](vocabulary, length=length, seed=seed, **shape).to(opened.machine.device)
    options = dict(
        total=steps, schedule=train.cosine(steps, warmup=steps // 8), machine=opened.machine
    )
    train.fit(model, opened.batches(rows=rows, seed=seed), train.adamw(model, lr=lr), **options)
    return by_position(model, opened.held_out, opened.machine)


def measure(path: Path, opened: Setup, *, steps: int, rows: int, seeds: int, **shape: int) -> dict:
    """Return the record with every kind at each seed; none that the file holds is repeated."""
    settings = {"steps": steps, "rows": rows, "length": opened.held_out.shape[1], **shape}
    store = Store(path, settings | {"held_out_rows": len(opened.held_out), "up_to": UP_TO})
    units = ({"model": kind, "seed": seed} for seed in range(seeds) for kind in KINDS)

    def losses(unit: dict) -> dict:
        return {
            "losses": trained(
                opened, unit["model"], seed=unit["seed"], steps=steps, rows=rows, **shape
            )
        }

    return store.measure(units, losses)


def everything(path: Path, machine: runtime.Machine) -> dict:
    """Return the record of three seeds on rows of 2,048 tokens."""
    opened = load_setup(length=2048, rows=12, machine=machine)
    return measure(path, opened, steps=60, rows=4, seeds=3, **MADE)


# -------------------------------------------------------------------------------- what is on record
published = partial(read_published, RECORD)


def picture(record: dict) -> show.Picture:
    """Mean losses of the seeds by position, with their range."""
    figure = Figure(figsize=(6.8, 3), layout="constrained")
    axes, last = figure.subplots(), {}
    for kind in dict.fromkeys(line["model"] for line in record["lines"]):
        runs = [line["losses"] for line in record["lines"] if line["model"] == kind]
        x, means = (
            record["up_to"][: len(runs[0])],
            [statistics.mean(losses) for losses in zip(*runs)],
        )
        (line,) = axes.plot(x, means, marker=".", label=kind)
        axes.fill_between(
            x, *([pick(losses) for losses in zip(*runs)] for pick in (min, max)), alpha=0.2, lw=0
        )
        last[kind] = means[-1]
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the row, up to", ylabel="held-out loss (nats per token)")
    figure.legend(frameon=False, loc="outside right center", fontsize=9)
    ends = ", ".join(f"{kind} {loss:.3f}" for kind, loss in last.items())
    summary = (
        f"{record['steps']} steps of {record['rows']} rows. At the last positions: "
        f"{ends} (mean of the seeds)."
    )
    return show.Picture(figure, summary, title=f"Loss along rows of {record['length']:,} tokens")


if __name__ == "__main__":
    command(RECORD, __doc__, everything)
