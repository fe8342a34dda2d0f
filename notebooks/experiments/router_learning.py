"""What experts learn: their load over a training, when routers settle, who works together, and who
serves which domain.

    cd notebooks && ../.venv/bin/python -m experiments.router_learning

Four measures of OLMoE (Muennighoff et al., 2024, arXiv:2409.02060), on rows that nobody trains on:

    saturation(t)   the share of a token's k experts at step t that it still has at the end; k / E
                    by chance
    together[i, j]  the share of the tokens of expert i that expert j serves, too
    domain[d, e]    the share of the assignments of domain d that go to expert e
    apart           half the sum over e of |domain[prose, e] - domain[code, e]|: 0 for equal loads,
                    1 for experts apart

`apart` is above 0 by chance. Its floor is the same number between two halves of the prose.

Footgun: a router that settles early has not learned early. A collapsed one is saturated from the
first steps on.
"""

import statistics
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import muon_race
from experiments.record import Store, command, read_published
from nblib import corpora, runtime, text, train
from nblib.methods import moe
from nblib.methods.moe import router_health
from nbworkbook import show
from nbworkbook.setup import Setup, load_setup

RECORD = "router-learning"
DOMAINS = ("prose", "code")
PROBES = (0, 5, 10, 20, 40, 60, 80, 100)  # steps; the last is the end


def saturation(before: Tensor, after: Tensor) -> float:
    """Return the mean share of the k experts (N, k) before that are among those after."""
    if before.shape != after.shape:
        raise ValueError(
            f"choices of shape {tuple(before.shape)} and {tuple(after.shape)}: they must be of "
            "one router"
        )
    return float((before[:, :, None] == after[:, None, :]).any(dim=2).float().mean())


def together(chosen: Tensor, experts: int) -> Tensor:
    """(E, E): of the tokens that expert i serves, the share that j serves as well; 0 on the
    diagonal.
    """
    served = torch.zeros(len(chosen), experts).scatter_(1, chosen, 1.0)  # (N, E)
    both = served.T @ served
    return (both / both.diagonal()[:, None].clamp(min=1)).fill_diagonal_(0)


def apart(one: Tensor, other: Tensor, experts: int) -> float:
    """How different the loads of two sets of choices are: the distance of total variation, 0 to
    1.
    """
    return float((moe.load(one, experts) - moe.load(other, experts)).abs().sum() / 2)


def learned(probes: dict[int, dict[str, list[moe.Routed]]]) -> list[dict]:
    """Return a line per router, of what it did at each step on the rows of each domain."""
    ends, lines = probes[max(probes)], []
    for place, last in enumerate(ends[DOMAINS[0]]):
        E = last.logits.shape[1]
        at = {
            step: torch.cat([seen[d][place].chosen for d in DOMAINS])
            for step, seen in probes.items()
        }
        mine = {d: ends[d][place].chosen for d in DOMAINS}
        prose = mine[DOMAINS[0]]
        lines.append(
            {
                "layer": last.layer,
                "load": {
                    str(step): (E * moe.load(chosen, E)).tolist() for step, chosen in at.items()
                },
                "saturation": {
                    str(step): saturation(chosen, at[max(at)]) for step, chosen in at.items()
                },
                "chance": prose.shape[1] / E,
                "together": together(at[max(at)], E).tolist(),
                "domain": {d: moe.load(chosen, E).tolist() for d, chosen in mine.items()},
                "apart": apart(*mine.values(), E),
                "floor": apart(*prose.chunk(2), E),
            }
        )
    return lines


def trained(
    streams: dict[str, dict[str, Tensor]],
    vocabulary: int,
    *,
    seed: int,
    rows: int,
    length: int,
    eval_rows: int,
    machine,
) -> list[dict]:
    """Train a mixture on both domains in equal parts; what its routers learned."""
    most = min(len(s["train"]) for s in streams.values())
    stream = torch.cat([s["train"][:most] for s in streams.values()])
    fixed = {
        d: text.fixed_rows(s["held_out"], length=length, limit=eval_rows)
        for d, s in streams.items()
    }
    model = muon_race.build(muon_race.MUON, vocabulary, seed=seed).to(machine.device)

    def look() -> dict[str, list[moe.Routed]]:
        return {d: router_health.observe(model, rows) for d, rows in fixed.items()}

    probes, total = {0: look()}, max(PROBES)
    options = dict(total=total, schedule=train.cosine(total, warmup=10), machine=machine, clip=0)
    options["loss"] = moe.loss(
        balance_weight=muon_race.MUON.balance_weight, z_weight=muon_race.MUON.z_weight
    )
    batches = text.Batches(stream, rows=rows, length=length, seed=seed)
    for record in train.steps(
        model, batches, muon_race.optimizers(muon_race.MUON, model), **options
    ):
        if record["step"] in PROBES:
            probes[record["step"]] = look()
    return [{"seed": seed, **line} for line in learned(probes)]


def measure(
    path: Path, opened: Setup, *, seeds: int, rows: int, length: int, eval_rows: int
) -> dict:
    """Return the record with a line per router at each seed; no seed that the file holds is
    repeated.
    """
    streams = {d: corpora.open(d, opened.tokenizer) for d in DOMAINS}
    options = dict(rows=rows, length=length, eval_rows=eval_rows)
    store = Store(path, options | {"shape": muon_race.SHAPE})

    def lines_of(unit: dict) -> list[dict]:
        return trained(
            streams, len(opened.tokenizer), seed=unit["seed"], machine=opened.machine, **options
        )

    return store.measure(({"seed": seed} for seed in range(seeds)), lines_of)


def everything(path: Path, machine: runtime.Machine) -> dict:
    """Return the record of three seeds."""
    opened = load_setup(length=128, rows=8, machine=machine)
    return measure(path, opened, seeds=3, rows=8, length=128, eval_rows=24)


# -------------------------------------------------------------------------------- what is on record
published = partial(read_published, RECORD)


def words(record: dict) -> str:
    """When routers settled, and how far the domains are apart, over the seeds."""
    said = []
    for layer in dict.fromkeys(line["layer"] for line in record["lines"]):
        mine = [line for line in record["lines"] if line["layer"] == layer]
        half = str(_steps(mine[0])[len(_steps(mine[0])) // 2])
        kept = statistics.mean(line["saturation"][half] for line in mine)
        parts, floor = [line["apart"] for line in mine], max(line["floor"] for line in mine)
        said.append(
            f"{layer.removeprefix('model.')}: at step {half} a token has {kept:.0%} of its "
            "last experts, "
            f"{mine[0]['chance']:.0%} by chance; prose and code are {min(parts):.2f} to "
            f"{max(parts):.2f} apart, "
            f"two halves of the prose at most {floor:.2f}"
        )
    return ". ".join(said) + "."


def _steps(line: dict) -> list[int]:
    return sorted(map(int, line["load"]))


def picture(record: dict, *, seed: int = 0) -> show.Picture:
    """Four panels of the last layer at one seed; saturation of all layers."""
    mine = [line for line in record["lines"] if line["seed"] == seed]
    last, steps = mine[-1], _steps(mine[-1])
    figure = Figure(figsize=(8.2, 5.2), layout="constrained")
    (load, settled), (pairs, domains) = figure.subplots(2, 2)
    load.plot(steps, [last["load"][str(step)] for step in steps], linewidth=1)
    load.set(
        xlabel="optimizer step", ylabel="fair shares", title="load of each expert", ylim=(0, None)
    )
    for line in mine:
        name = line["layer"].removeprefix("model.")
        settled.plot(
            steps, [line["saturation"][str(step)] for step in steps], marker=".", label=name
        )
    settled.axhline(last["chance"], color="0.7", linewidth=0.8, label="by chance")
    settled.set(
        xlabel="optimizer step", ylim=(0, 1.05), title="experts that a token keeps to the end"
    )
    settled.legend(frameon=False, fontsize=8)
    shown = pairs.imshow(last["together"], cmap="Blues", vmin=0)
    pairs.set(xlabel="also served by", ylabel="expert", title="tokens in common")
    figure.colorbar(shown, ax=pairs, label="share")
    experts = torch.arange(len(last["together"]))
    for n, name in enumerate(DOMAINS):
        domains.bar(experts + 0.4 * n - 0.2, last["domain"][name], width=0.4, label=name)
    domains.axhline(1 / len(experts), color="0.7", linewidth=0.8)
    domains.set(
        xlabel="expert", ylabel="share of the domain", title="prose and code", xticks=experts
    )
    domains.legend(frameon=False, fontsize=8)
    title = (
        f"What the experts of {last['layer'].removeprefix('model.')} learned in "
        f"{steps[-1]} steps on prose and code"
    )
    return show.Picture(figure, words(record), title=title)


if __name__ == "__main__":
    command(RECORD, __doc__, everything, words=words)
