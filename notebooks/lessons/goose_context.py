"""Does a longer context help a recurrent student as it helps a transformer? Losses along rows of 2,048 tokens.

    python -m lessons.goose_context            train, judge, and store the record in outputs/published

A model that uses what it read predicts late tokens of a row better than early ones. Three models of the same width and
depth learn the embedded prose, on the same rows of 2,048 tokens, from labels alone, at three seeds: goose with its
decays spread over the channels, goose with all decays at 0.38 as the write-up starts them (nothing is left of a token
after ten others), and a transformer. Each is then judged on held-out rows, by the position in the row.

Footgun: positions differ in what stands there. A document starts where the one before it ends, also in the middle of a
row, so compare the models at one position, not one model at two.
"""

import datetime
import json
import statistics
from collections.abc import Callable, Iterator

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from lessons import goose
from nblib import files, models, paths, runtime, start, train, wiring
from nblib.run import show

UP_TO = (16, 64, 256, 512, 1024, 2048)  # positions of a row, in groups that end here
MADE = dict(hidden=128, layers=2)
KINDS: dict[str, Callable[..., nn.Module]] = {
    "goose": goose.tiny,
    "goose, all decays 0.38": lambda vocabulary, **shape: goose.tiny(vocabulary, decays=(0.38, 0.38), **shape),
    "transformer": lambda vocabulary, **shape: models.tiny(vocabulary, heads=2, **shape),
}


@torch.no_grad()
def by_position(model: nn.Module, rows: Tensor, machine: runtime.Machine, up_to: tuple = UP_TO) -> list[float]:
    """The mean loss over rows (R, T) of the tokens at positions below each of `up_to`, from the one before on."""
    sums = torch.zeros(rows.shape[1] - 1, dtype=torch.float64)
    with wiring.evaluating(model):
        for row in rows:  # one at a time: all logits of a row are (T, V)
            with machine.autocast():
                scores = model(input_ids=row[None].to(machine.device)).logits[0, :-1]
            targets = row[1:].to(machine.device)
            sums += torch.nn.functional.cross_entropy(scores.float(), targets, reduction="none").double().cpu()
    edges = [0, *(min(each, len(sums)) for each in up_to)]
    return [float(sums[a:b].mean() / len(rows)) for a, b in zip(edges, edges[1:]) if b > a]


def trained(
    opened: start.Start, *, steps: int, rows: int, seeds: int, lr: float = 4e-3, **shape: int
) -> Iterator[dict]:
    """A line for each kind at each seed: the losses by position, of held-out rows."""
    vocabulary, length = opened.model.config.vocab_size, opened.held_out.shape[1]
    for seed in range(seeds):
        for kind, build in KINDS.items():
            runtime.seed_all(seed)
            model = build(vocabulary, length=length, seed=seed, **shape).to(opened.machine.device)
            options = dict(total=steps, schedule=train.cosine(steps, warmup=steps // 8), machine=opened.machine)
            train.fit(model, opened.batches(rows=rows, seed=seed), train.adamw(model, lr=lr), **options)
            yield {"model": kind, "seed": seed, "losses": by_position(model, opened.held_out, opened.machine)}


def main(*, steps: int = 60, rows: int = 4, seeds: int = 3, length: int = 2048) -> None:
    machine = runtime.pick("auto", "auto")
    opened, lines = start.open(length=length, rows=12, machine=machine), []
    for line in trained(opened, steps=steps, rows=rows, seeds=seeds, **MADE):
        print(line["model"], line["seed"], " ".join(f"{loss:.3f}" for loss in line["losses"]), flush=True)
        lines.append(line)
    today = datetime.date.today().isoformat()
    record = {"date": today, "environment": runtime.environment(), "steps": steps, "rows": rows, "length": length}
    record |= {**MADE, "held_out_rows": len(opened.held_out), "up_to": UP_TO, "lines": lines}
    path = paths.root() / f"outputs/published/{today}-goose-context-cpu.json"
    files.write(path, files.to_json(record, indent=1))
    print(path)


# --------------------------------------------------------------------------------------------------- what is on record
def published() -> dict:
    """The newest record."""
    return json.loads(max(paths.root().glob("outputs/published/*-goose-context-*.json")).read_text())


def picture(record: dict) -> show.Picture:
    """Mean losses of the seeds by position, with their range."""
    figure = Figure(figsize=(6.8, 3), layout="constrained")
    axes, last = figure.subplots(), {}
    for kind in dict.fromkeys(line["model"] for line in record["lines"]):
        runs = [line["losses"] for line in record["lines"] if line["model"] == kind]
        x, means = record["up_to"][: len(runs[0])], [statistics.mean(losses) for losses in zip(*runs)]
        (line,) = axes.plot(x, means, marker=".", label=kind)
        axes.fill_between(x, *([pick(losses) for losses in zip(*runs)] for pick in (min, max)), alpha=0.2, lw=0)
        last[kind] = means[-1]
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the row, up to", ylabel="held-out loss (nats per token)")
    figure.legend(frameon=False, loc="outside right center", fontsize=9)
    ends = ", ".join(f"{kind} {loss:.3f}" for kind, loss in last.items())
    summary = f"{record['steps']} steps of {record['rows']} rows. At the last positions: {ends} (mean of the seeds)."
    return show.Picture(figure, summary, title=f"Loss along rows of {record['length']:,} tokens")


if __name__ == "__main__":
    main()
