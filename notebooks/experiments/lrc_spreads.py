"""How far the figures of LRC depend on seed and base model: shares of the gap on two bases, at
three seeds each.

    cd notebooks && ../.venv/bin/python -m experiments.lrc_spreads

A cell of the table is a base model, a seed, a rank, a scale, a start, and the steps that the
correction was trained for. Its share is (ternary - loss) / (ternary - float) on all held-out rows;
"ternary" is rounded with the mean of |W|, whatever the cell's scale. The bases are the stored one
and a narrower one of the same recipe. A seed draws the rows that the start is fitted to and the
order of the training rows; a base stays the same.

    none          V random and U zero, as in LoRA: before training no correction at all
    activation    the SVD of the rounding error, weighted with the inputs' second moments
    alternating   the same, with eight rounds of rounding and correction in turns: the default of
                  notebook 10

Footgun: the seeds of one base differ by its calibration and training rows alone, so their spread is
far smaller than the distance between two bases. An interval over seeds says nothing about another
model.
"""

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from experiments.record import Store, command, read_published
from nblib import losses, models, runtime, train
from nblib.methods import lrc
from nblib.methods.distill import objective
from nblib.methods.lrc import ternary
from nbworkbook import base_model as base
from nbworkbook.setup import Setup, load_setup

RECORD = "lrc-tables"
BASES = {"stored": {}, "narrow": dict(hidden=192)}  # what differs from the default recipe
SEEDS, RANKS, STEPS = (0, 1, 2), (2.5, 5.0, 15.0), 90
STARTS = {
    "none": ("kaiming", 0),
    "activation": ("svd_activation", 0),
    "alternating": ("svd_activation", 8),
}
ROWS, RATE, WEIGHTS = 8, 3e-3, {"ce": 0.3, "logits": 0.7}  # of the training
CALIBRATION = dict(batches=8, rows=4)  # as in notebook 10
ENOUGH = 0.8  # of the gap, for `smallest`


class Cell(NamedTuple):
    base: str
    seed: int
    percent: float
    scale: str
    start: str
    steps: int


class Bench(NamedTuple):
    """A base model with the two losses that its gap lies between."""

    opened: Setup
    full: float
    rounded: float

    def share(self, loss: float) -> float:
        return lrc.recovered(loss, rounded=self.rounded, full=self.full)


def cells() -> Iterator[Cell]:
    """Yield what is measured, the most important first, so that it can be stopped."""
    kinds = [
        ("mean", "activation"),
        ("least_squares", "activation"),
        ("least_squares", "alternating"),
    ]
    others = [("mean", "alternating"), ("rows", "activation"), ("rows", "alternating")]
    default, untrained = (
        kinds[-1],
        [(percent, *kind, 0) for percent in reversed(RANKS) for kind in kinds],
    )
    order = [(15.0, *default, STEPS), *untrained, (2.5, *default, STEPS), (5.0, *default, STEPS)]
    order += [*((15.0, *kind, 0) for kind in others), (15.0, "mean", "activation", STEPS)]
    order += [(15.0, "least_squares", "none", STEPS)]
    yield from (Cell(name, 0, 15.0, scale, "none", 0) for name in BASES for scale in ternary.SCALES)
    yield from (Cell(name, seed, *kind) for kind in order for name in BASES for seed in SEEDS)


def bench(opened: Setup) -> Bench:
    bare = copy.deepcopy(opened.model)
    lrc.ternarise(bare)
    return Bench(opened, opened.loss(opened.model), opened.loss(bare))


def moments(opened: Setup, seed: int) -> dict[str, Tensor]:
    """Second moments of the inputs over rows that are not the first of the training with this
    seed.
    """
    batches = opened.batches(rows=CALIBRATION["rows"], seed=seed + 1)
    return lrc.input_moments(opened.model, [next(batches) for _ in range(CALIBRATION["batches"])])


def corrected(opened: Setup, cell: Cell) -> nn.Module:
    """Return the rounded model with the correction that the cell's training starts from."""
    model, (init, rounds) = copy.deepcopy(opened.model), STARTS[cell.start]
    runtime.seed_all(cell.seed)
    options = dict(percent=cell.percent, scale=cell.scale, rounds=rounds, randomised=True)
    lrc.attach(
        model,
        init=init,
        moments=moments(opened, cell.seed) if init == "svd_activation" else None,
        **options,
    )
    return model


def loss_of(opened: Setup) -> objective.Objective:
    """Labels and the float model's logits."""
    teacher = models.as_teacher(copy.deepcopy(opened.model), opened.machine.frozen_dtype)
    return objective.Objective(WEIGHTS, teacher=teacher)


def fit(
    opened: Setup, model: nn.Module, *, seed: int, steps: int, loss: losses.Loss, optimizers=None
) -> None:
    """Train what is not frozen; by default with AdamW, as notebook 10 does."""
    optimizers = optimizers or train.adamw(model, lr=RATE, weight_decay=0.0)
    options = dict(schedule=train.cosine(steps, warmup=max(1, steps // 20)), machine=opened.machine)
    train.fit(
        model, opened.batches(rows=ROWS, seed=seed), optimizers, total=steps, loss=loss, **options
    )


def measured(bench: Bench, cell: Cell) -> dict:
    """Return the cell with its loss and its share of the gap."""
    model = corrected(bench.opened, cell)
    if cell.steps:
        fit(bench.opened, model, seed=cell.seed, steps=cell.steps, loss=loss_of(bench.opened))
    loss = bench.opened.loss(model)
    return cell._asdict() | {"loss": loss, "share": bench.share(loss)}


def measure(
    path: Path,
    benches: dict[str, Bench],
    wanted: Iterable[NamedTuple],
    of: Callable[[Bench, NamedTuple], dict] | None = None,
) -> dict:
    """Return the record with every wanted cell, measured by `of(bench, cell)`; none that it holds
    is repeated.
    """
    store = Store(path, dict(rows=ROWS, rate=RATE, weights=WEIGHTS, calibration=CALIBRATION))
    store.content["bases"] = {
        name: {"float": b.full, "ternary": b.rounded, "held_out_rows": len(b.opened.held_out)}
        | {
            "hidden": b.opened.model.config.hidden_size,
            "layers": b.opened.model.config.num_hidden_layers,
        }
        for name, b in benches.items()
    }
    of = of or measured
    by_unit = {tuple(cell): cell for cell in wanted}
    units = (cell._asdict() for cell in by_unit.values())
    return store.measure(
        units, lambda unit: of(benches[unit["base"]], by_unit[tuple(unit.values())])
    )


def opened(name: str, machine: runtime.Machine) -> Setup:
    """One of BASES with all rows of the fixed splits; made now if it is not in the store."""
    recipe = "default" if name == "stored" else name
    base.RECIPES.setdefault(recipe, base.RECIPES["default"] | BASES[name])
    return load_setup(recipe=recipe, rows=137, machine=machine)


def everything(path: Path, machine: runtime.Machine) -> dict:
    """Return the record of all cells on all bases."""
    return measure(path, {name: bench(opened(name, machine)) for name in BASES}, cells())


# -------------------------------------------------------------------------------- what is on record
published = partial(read_published, RECORD)


def shares(record: dict, **wanted) -> list[float]:
    """Shares of the cells with these values, seed by seed."""
    lines = [
        line
        for line in record["lines"]
        if all(line[name] == value for name, value in wanted.items())
    ]
    return [line["share"] for line in sorted(lines, key=lambda line: line["seed"])]


def smallest(record: dict, base: str, steps: int, *, enough: float = ENOUGH) -> float | None:
    """Return the smallest rank of those tried that recovers `enough` at every seed, with the
    default scale and start.
    """
    default = dict(base=base, steps=steps, scale="least_squares", start="alternating")
    tried = sorted({line["percent"] for line in record["lines"]})
    found = {percent: shares(record, percent=percent, **default) for percent in tried}
    return next((percent for percent, got in found.items() if got and min(got) >= enough), None)


def table(record: dict) -> list[dict]:
    """Return a row per rank, scale, start and number of steps; a column per base: mean of the
    seeds, and their range.
    """
    kinds = dict.fromkeys(
        tuple(line[n] for n in ("steps", "percent", "scale", "start")) for line in record["lines"]
    )
    rows = []
    for steps, percent, scale, how in sorted(kinds):
        row = {
            "steps": steps,
            "rank %": percent if how != "none" or steps else 0.0,
            "scale": scale,
            "start": how,
        }
        for name in record["bases"]:
            got = shares(record, base=name, steps=steps, percent=percent, scale=scale, start=how)
            row[name] = spread(got)
        rows.append(row)
    return sorted(rows, key=lambda row: (row["steps"], row["rank %"]))


def spread(values: list[float]) -> str:
    """Mean and range."""
    if not values:
        return ""
    middle = f"{statistics.mean(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3f} to {max(values):.3f})"


def _tried(record: dict, steps: int) -> set[float]:
    """One rank alone is not the smallest of anything."""
    default = dict(steps=steps, scale="least_squares", start="alternating")
    return {line["percent"] for line in record["lines"] if default.items() <= line.items()}


def words(record: dict) -> str:
    """For each base: the default trained at 15 %, and the smallest ranks that recover enough."""
    lines, default = [], dict(scale="least_squares", start="alternating")
    for name, facts in record["bases"].items():
        trained = shares(record, base=name, percent=15.0, steps=STEPS, **default)
        ranks = {
            steps: smallest(record, name, steps)
            for steps in (0, STEPS)
            if len(_tried(record, steps)) > 1
        }
        parts = [f"trained at 15 % {spread(trained)}"] if trained else []
        parts += [f"{ranks[0]:g} % recovers {ENOUGH:.0%} untrained"] if ranks.get(0) else []
        parts += [f"{ranks[STEPS]:g} % does so trained"] if ranks.get(STEPS) else []
        lines.append(f"{name}, {facts['hidden']} wide: {', '.join(parts)}")
    return "\n".join(lines)


if __name__ == "__main__":
    command(RECORD, __doc__, everything, words=words)
