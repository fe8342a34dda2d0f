"""ARD-LoRA beside its rivals on equal terms: who is right, who knows when, on questions like the
trained and on others.

    cd notebooks && ../.venv/bin/python -m experiments.ard_rivals

All train on the same questions of one domain, with as many steps, the same batches and the same
ranks on every linear layer of the stored base model; the result is measured on held-out questions
of that domain and of the other one.

    LoRA             and from the same weights: a temperature; the last layer's Laplace; three LoRAs
                     as an ensemble
    MC dropout       LoRA with dropout on its input, drawn in evaluation too (arXiv:1506.02142)
    BLoB             the first factor is a distribution over weights (notebooks/experiments/blob.py)
    AdaLoRA          starts with half as many ranks again and ends with as many as the others (peft)
    PVeRA            noisy latents between frozen random factors, as peft has it, without a KL term
                     (arXiv:2512.07703)
    MonteCLoRA       as peft has it; its draws are kept in evaluation
    ARD-LoRA         priors fitted to the validation questions while it trains, as in notebook 11

Each has two settings or three, of the learning rate or of the strength of its noise. The one of
lowest validation NLL at a seed that is not of the table is used in all rows. Temperature and
Laplace are fitted to validation questions, seed by seed. A seed draws the training questions, the
factors and the noise. The questions of the result stay the same.

Footgun: the ensemble costs three trainings and the noisy ones many forward passes. The table does
not charge for that; `trained` and `passes` of each row say it.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from experiments import answer_tasks, blob, last_layer_laplace
from experiments.record import Store, command, read_published
from lessons import peft_adapters, seeds
from nblib import runtime, text, train, wiring
from nblib.losses import Batch, Loss
from nblib.methods import ard
from nblib.methods.ard import ranks, uncertainty
from nbworkbook import base_model as base

RECORD = "ard-rivals"
SEEDS, TUNING = (0, 1, 2), 7
# task, domain to learn, shifted domain
PLACES = (("continuation", "prose", "code"), ("brackets", "code", "prose"))
RANK, ALPHA, STEPS, ROWS, LENGTH, SAMPLES, MEMBERS, UPDATES = 8, 16.0, 32, 16, 16, 6, 3, 4
COUNTS = dict(train=256, validation=128, held_out=192)
FEW = 60  # shifted questions where brackets are rare
# A third stands where the second was much better than the first.
SETTINGS: dict[str, list[dict]] = {
    "ARD": [dict(lr=3e-3, beta=beta) for beta in (1e-4, 1e-3)],
    "LoRA": [dict(lr=lr) for lr in (1.5e-3, 4e-3)],
    "BLoB": [dict(lr=3e-3, weight=w) for w in (0.01, 0.1, 1.0)],
    "MC dropout": [dict(lr=lr, dropout=p) for lr, p in ((1e-3, 0.1), (3e-3, 0.3))],
    "MonteCLoRA": [dict(lr=lr, sample_scaler=s) for lr, s in ((1e-3, 1e-4), (3e-3, 1e-2))],
    "PVeRA": [dict(lr=lr) for lr in (1e-2, 4e-2, 0.15)],
    "AdaLoRA": [dict(lr=lr) for lr in (5e-3, 1.5e-2, 4e-2)],
}
MEASURES = ("accuracy", "nll", "ece", "brier", "auroc", "aurc")
HIGHER = ("accuracy", "auroc")  # is better
OURS = "ARD"


class Judge(NamedTuple):
    """A trained model and how it is asked."""

    model: nn.Module
    sampling: Callable | None = None


class Bench(NamedTuple):
    """The stored base, and the questions of one place: train by seed, validation, held out,
    shifted.
    """

    base: base.Base
    train: Callable[[int], Batch]
    validation: Batch
    held_out: Batch
    shifted: Batch
    machine: runtime.Machine


def bench(
    task: str, domain: str, other: str, machine: runtime.Machine, counts: dict[str, int] = COUNTS
) -> Bench:
    opened = base.load(machine=machine)
    tokenizer, options = opened.tokenizer, dict(length=LENGTH)
    stream = text.encode(text.documents(domain, "train"), tokenizer)

    def learned(seed: int) -> Batch:
        return answer_tasks.TASKS[task](
            stream, tokenizer, count=counts["train"], seed=seed, **options
        )

    rest = {name: count for name, count in counts.items() if name != "train"}
    fixed = answer_tasks.splits(task, domain, tokenizer, counts=rest, **options)
    # prose closes few brackets, so those questions come from all of its documents: no adapter has
    # trained on them
    split, count = ("train", FEW) if task == "brackets" else ("held_out", counts["held_out"])
    away = answer_tasks.splits(task, other, tokenizer, counts={split: count}, **options)[split]
    return Bench(opened, learned, **fixed, shifted=away, machine=machine)


# ------------------------------------------------------------------ the rivals


def adapted(
    kind: str, model: nn.Module, setting: dict, *, questions: int, steps: int = STEPS
) -> tuple[nn.Module, Loss]:
    """Return a copy of the base with the adapters of a kind, and its loss."""
    net, kinds = (
        copy.deepcopy(model),
        sorted({name.rpartition(".")[2] for name in wiring.select(model)}),
    )
    shape, ask = dict(rank=RANK, alpha=ALPHA), answer_tasks.loss
    if kind == "LoRA":
        return ard.attach(net, **shape, deterministic=True), ask
    if kind == "ARD":
        ard.attach(net, **shape)
        return net, ard.loss(net, beta=setting["beta"], language=ask)
    if kind == "BLoB":
        blob.attach(net, **shape)
        return net, blob.loss(net, questions=questions, weight=setting["weight"], language=ask)
    if kind == "MC dropout":
        return dropout_lora(net, kinds=kinds, dropout=setting["dropout"], **shape), ask
    if kind == "PVeRA":
        return pvera(net, kinds=kinds), ask
    if kind == "MonteCLoRA":
        options = dict(sample_scaler=setting["sample_scaler"], buffer_size=8)
        net = peft_adapters.monteclora(net, kinds=kinds, **shape, **options)
        return (
            net,
            lambda m, b: ask(m, b) | {"kl": m.base_model._get_monteclora_loss() * len(b["answer"])},
        )
    if kind == "AdaLoRA":
        net = peft_adapters.adalora(
            net, rank=RANK * 3 // 2, keep=RANK, alpha=ALPHA, kinds=kinds, steps=steps
        )
        weight = 0.5  # as peft
        return (
            net,
            lambda m, b: (
                ask(m, b) | {"far": weight * len(b["answer"]) * peft_adapters.orthogonality(m)}
            ),
        )
    raise ValueError(f"kind = {kind!r}: allowed are {', '.join(SETTINGS)}")


def dropout_lora(
    model: nn.Module, *, rank: int, alpha: float, kinds: list[str], dropout: float
) -> nn.Module:
    """peft's LoRA with dropout, its first factor drawn as wide as ours."""
    from peft import LoraConfig

    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=kinds)
    model = peft_adapters._adapted(model, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_A." in name:
                p.mul_(math.sqrt(6))  # peft: uniform up to sqrt(1 / in), ours up to sqrt(6 / in)
    return model


def pvera(model: nn.Module, *, kinds: list[str], rank: int = 256) -> nn.Module:
    """peft's PVeRA with its own rank, which is of frozen factors that all layers share."""
    try:
        from peft import PveraConfig
    except ImportError:
        raise ImportError("PVeRA needs peft 0.19 or later: pip install -U peft") from None
    return peft_adapters._adapted(model, PveraConfig(r=rank, target_modules=kinds))


@contextmanager
def dropping(model: nn.Module) -> Iterator[None]:
    """Dropout stays on in evaluation; nothing else is in training mode."""
    with wiring.in_mode(model, training=False):
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.train()
        yield


@contextmanager
def pvera_drawing(model: nn.Module) -> Iterator[None]:
    """PVeRA draws its latents in evaluation too."""
    layers = [
        m for m in model.modules() if isinstance(getattr(m, "sample_at_inference", None), dict)
    ]
    before = [dict(m.sample_at_inference) for m in layers]
    try:
        for m in layers:
            m.sample_at_inference.update(dict.fromkeys(m.sample_at_inference, True))
        yield
    finally:
        for m, kept in zip(layers, before):
            m.sample_at_inference.update(kept)


SAMPLING: dict[str, Callable] = {
    "ARD": ard.sampling,
    "BLoB": blob.sampling,
    "MC dropout": dropping,
    "PVeRA": pvera_drawing,
    "MonteCLoRA": peft_adapters.drawing,
}


def trained(
    bench: Bench, kind: str, setting: dict, *, seed: int, member: int = 0, steps: int = STEPS
) -> nn.Module:
    """Return the adapters of a kind after their training.

    `member` draws other factors and batches for the same questions.
    """
    data = bench.train(seed)
    runtime.seed_all(1000 * member + seed)
    net, loss = adapted(kind, bench.base.model, setting, questions=len(data["answer"]), steps=steps)
    optimizer = train.adamw(net, lr=setting["lr"], weight_decay=0.0)
    if kind == "AdaLoRA":
        optimizer = peft_adapters.allocate(net, optimizer)
    batches = answer_tasks.Batches(data, rows=ROWS, seed=1000 * member + seed)
    options = dict(
        total=steps, schedule=train.cosine(steps, warmup=max(1, steps // 10)), loss=loss, clip=0
    )
    every = max(1, steps // UPDATES)
    pool = ranks.HeldOut(
        answer_tasks.prompts(bench.validation), count=len(bench.validation["answer"]), batch=50
    )
    for record in train.steps(net, batches, optimizer, machine=bench.machine, **options):
        if kind == "ARD" and record["step"] % every == 0:
            ranks.estimate_priors(net, pool, machine=bench.machine)
    return net


def probabilities(
    bench: Bench, judge: Judge, data: Batch, *, seed: int, samples: int = SAMPLES
) -> Tensor:
    """Mean over the draws, or the one pass of a judge that draws nothing, (N, C)."""
    draws = dict(samples=samples, sampling=judge.sampling) if judge.sampling else {}
    return (
        answer_tasks.predict(judge.model, data, seed=seed, machine=bench.machine, **draws)
        .softmax(-1)
        .mean(0)
    )


# ------------------------------------------------------------------ one row after the other


def tuned(bench: Bench, kind: str, setting: dict, *, steps: int = STEPS) -> dict:
    """Return validation NLL of a setting at the seed that is in no table, as the rival is asked in
    the table.
    """
    net = trained(bench, kind, setting, seed=TUNING, steps=steps)
    p = probabilities(bench, Judge(net, SAMPLING.get(kind)), bench.validation, seed=TUNING)
    nll = uncertainty.judge(p, bench.validation["answer"])["nll"]
    return {"kind": kind, "setting": setting, "nll": nll}


def predicted(
    bench: Bench, kind: str, setting: dict, *, seed: int, steps: int = STEPS
) -> Iterator[tuple[dict, dict]]:
    """For every row that a training of this kind gives: its name and cost, and the probabilities on
    each text.
    """
    places = {"held out": bench.held_out, "shifted": bench.shifted}
    if kind == "base model":
        judge, facts = Judge(bench.base.model), {"rival": kind, "trained": 0, "passes": 1}
        yield (
            facts,
            {name: probabilities(bench, judge, data, seed=seed) for name, data in places.items()},
        )
        return
    net = trained(bench, kind, setting, seed=seed, steps=steps)
    count = sum(p.numel() for p in wiring.trainable(net).values())
    facts = {"rival": kind, "parameters": count, "trained": 1, "passes": 1}
    plain = {
        name: probabilities(bench, Judge(net), data, seed=seed) for name, data in places.items()
    }
    if kind in SAMPLING:
        yield facts | {"rival": f"{kind}, no draws"}, plain
        judge = Judge(net, SAMPLING[kind])
        drawn = {
            name: probabilities(bench, judge, data, seed=seed) for name, data in places.items()
        }
        yield facts | {"passes": SAMPLES}, drawn
        return
    yield facts, plain
    if kind == "LoRA":
        yield from _from_one_lora(bench, net, facts, plain, setting, seed=seed, steps=steps)


def _from_one_lora(
    bench: Bench, net, facts: dict, plain: dict, setting: dict, *, seed: int, steps: int
) -> Iterator:
    """Yield what is made of a trained LoRA: by a temperature, by a Laplace approximation, and by
    more of them.
    """
    splits = {"train": bench.train(seed), "validation": bench.validation}
    splits |= {"held out": bench.held_out, "shifted": bench.shifted}
    ask = dict(machine=bench.machine)
    logits = {name: answer_tasks.predict(net, data, **ask)[0] for name, data in splits.items()}
    heat = uncertainty.temperature(logits["validation"], bench.validation["answer"])
    warm = {name: (logits[name].double() / heat).softmax(-1) for name in plain}
    yield facts | {"rival": "LoRA, temperature", "temperature": heat}, warm

    def last(model: nn.Module, batch: Batch) -> Tensor:
        return answer_tasks.features(model, batch)[0]

    hidden = {
        name: answer_tasks.predict(net, data, of=last, **ask)[0] for name, data in splits.items()
    }
    seen = {name: (hidden[name], data["choices"]) for name, data in splits.items()}
    posterior = last_layer_laplace.fit(*seen["train"], logits["train"])
    tau = last_layer_laplace.choose(
        posterior, *seen["validation"], logits["validation"], bench.validation["answer"]
    )
    spread = {
        name: last_layer_laplace.covariance(posterior, *seen[name], precision=tau) for name in plain
    }
    smooth = {
        name: last_layer_laplace.predict(logits[name], spread[name], seed=seed) for name in plain
    }
    yield facts | {"rival": "LoRA, last-layer Laplace", "precision": tau}, smooth

    total = dict(plain)
    for member in range(1, MEMBERS):
        other = Judge(trained(bench, "LoRA", setting, seed=seed, member=member, steps=steps))
        total = {
            n: total[n] + probabilities(bench, other, d, seed=seed)
            for n, d in splits.items()
            if n in total
        }
    mean = {name: p / MEMBERS for name, p in total.items()}
    yield facts | {"rival": "LoRA, ensemble", "trained": MEMBERS, "passes": MEMBERS}, mean


def rows(
    bench: Bench, place: tuple, kind: str, setting: dict, *, seed: int, steps: int = STEPS
) -> Iterator[dict]:
    """Yield the rows of a kind at a seed, one per rival and text, with risks at twenty
    coverages.
    """
    began = time.perf_counter()
    for facts, found in predicted(bench, kind, setting, seed=seed, steps=steps):
        for on, data in (("held out", bench.held_out), ("shifted", bench.shifted)):
            facts_of = uncertainty.judge(found[on], data["answer"])
            del facts_of["reliability"]
            (confidence, guess) = found[on].max(-1)
            curve = uncertainty.risks(confidence, guess == data["answer"])
            at = [max(1, round(len(curve) * n / 20)) - 1 for n in range(1, 21)]
            spent = {"seconds": round(time.perf_counter() - began, 1)}
            where = {
                "task": place[0],
                "learned": place[1],
                "seed": seed,
                "kind": kind,
                "setting": setting,
                "on": on,
            }
            yield where | facts | facts_of | {"risks": curve[at].tolist()} | spent


def measure(
    path: Path,
    benches: Callable[[tuple], Bench],
    *,
    places=PLACES,
    seeds_=SEEDS,
    steps: int = STEPS,
) -> dict:
    """Return the record with all that is wanted; what the file holds already is not repeated."""
    settings = dict(
        rank=RANK,
        alpha=ALPHA,
        steps=steps,
        rows=ROWS,
        length=LENGTH,
        samples=SAMPLES,
        counts=COUNTS,
    )
    store = Store(path, settings | {"members": MEMBERS}, lists=("tuned", "lines"))

    # The settings are chosen on the first task, for all.
    first = benches(places[0])
    units = (
        {"kind": kind, "setting": setting}
        for kind, several in SETTINGS.items()
        for setting in several
    )
    store.measure(units, lambda unit: tuned(first, **unit, steps=steps), to="tuned")

    for number, place in enumerate(places):
        bench = benches(place) if number else first
        for seed in seeds_:
            for kind in ("base model", *SETTINGS):
                _complete(store, bench, place, kind, seed=seed, steps=steps)
    return store.content


def _complete(
    store: Store, bench: Bench, place: tuple, kind: str, *, seed: int, steps: int
) -> None:
    """Measure the rows of a kind at a seed that the record lacks.

    A training gives several; each is stored at once.
    """
    setting = chosen(store.content).get(kind, {})
    where = {"task": place[0], "learned": place[1], "seed": seed, "kind": kind}

    # Rows of a setting that was the best one when they were measured count no more.
    lines = store.content["lines"]
    lines[:] = [
        line for line in lines if not where.items() <= line.items() or line["setting"] == setting
    ]

    have = {(line["rival"], line["on"]) for line in lines if where.items() <= line.items()}
    if len(have) == expected(kind):
        return
    for row in rows(bench, place, kind, setting, seed=seed, steps=steps):
        if (row["rival"], row["on"]) not in have:
            store.add(row)


def expected(kind: str) -> int:
    """Rows of a kind at a seed."""
    return 2 * (4 if kind == "LoRA" else 2 if kind in SAMPLING else 1)


def chosen(record: dict) -> dict[str, dict]:
    """Return the setting of lowest validation NLL of each kind."""
    best: dict[str, dict] = {}
    for line in record["tuned"]:
        if line["kind"] not in best or line["nll"] < best[line["kind"]]["nll"]:
            best[line["kind"]] = line
    return {kind: line["setting"] for kind, line in best.items()}


def everything(path: Path, machine: runtime.Machine) -> dict:
    """Return the record of all tasks, rivals and seeds."""
    return measure(path, lambda place: bench(*place, machine))


# -------------------------------------------------------------------------------- what is on record
published = partial(read_published, RECORD)


def tasks(record: dict) -> list[str]:
    return list(dict.fromkeys(line["task"] for line in record["lines"]))


def values(record: dict, task: str, on: str, measure: str) -> dict[str, list[float]]:
    """Return a measure of every rival, seed by seed; only rivals that have all seeds of the
    task.
    """
    lines = [line for line in record["lines"] if (line["task"], line["on"]) == (task, on)]
    every, found = sorted({line["seed"] for line in lines}), {}
    for name in dict.fromkeys(line["rival"] for line in lines):
        by_seed = {line["seed"]: line[measure] for line in lines if line["rival"] == name}
        if sorted(by_seed) == every and None not in by_seed.values():
            found[name] = [by_seed[seed] for seed in every]
    return found


def error(numbers: list[float]) -> float:
    """Return standard error of the mean."""
    return statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.nan


def table(record: dict, task: str, on: str) -> list[dict]:
    """Return a row per rival, the lowest NLL first: mean and standard error of every measure over
    the seeds.
    """
    columns = {measure: values(record, task, on, measure) for measure in MEASURES}
    about = {
        line["rival"]: line for line in record["lines"] if (line["task"], line["on"]) == (task, on)
    }
    made = []
    for name in sorted(columns["nll"], key=lambda name: statistics.mean(columns["nll"][name])):
        row = {"rival": name, "trained": about[name].get("parameters", 0) * about[name]["trained"]}
        row |= {"passes": about[name]["passes"]}
        for measure, column in columns.items():
            row[measure] = _spread(column[name]) if name in column else ""
        made.append(row)
    return made


def _spread(numbers: list[float]) -> str:
    interval = f" ± {error(numbers):.3f}" if len(numbers) > 1 else ""  # one seed has none
    return f"{statistics.mean(numbers):.3f}{interval}"


def standing(record: dict, task: str, on: str, measure: str, name: str) -> dict[str, list[str]]:
    """Return the rivals that `name` is better than, worse than, and not distinguishable from, by
    the seeds they share.
    """
    columns, sign = values(record, task, on, measure), -1 if measure in HIGHER else 1
    verdict: dict[str, list[str]] = {"better": [], "worse": [], "undecided": []}
    for other, column in columns.items():
        if other != name:
            gains = seeds.gains([sign * x for x in column], [sign * x for x in columns[name]])
            kind = ("better" if gains[0] > 0 else "worse") if seeds.distinct(gains) else "undecided"
            verdict[kind].append(other)
    return verdict


def winner(record: dict, task: str, on: str, measure: str) -> tuple[str, list[str]]:
    """Return the best mean, and who cannot be told from it.

    The base model, which learned nothing, does not count.
    """
    columns = {n: v for n, v in values(record, task, on, measure).items() if n != "base model"}
    best = (max if measure in HIGHER else min)(
        columns, key=lambda name: statistics.mean(columns[name])
    )
    return best, [n for n in standing(record, task, on, measure, best)["undecided"] if n in columns]


def words(record: dict) -> str:
    """Who wins what, and where ARD-LoRA stands: a sentence per task and text."""
    sentences = []
    for task in tasks(record):
        count = len({line["seed"] for line in record["lines"] if line["task"] == task})
        for on in ("held out", "shifted"):
            parts = []
            for measure in MEASURES:
                best, near = winner(record, task, on, measure)
                parts.append(
                    f"{measure} {best}" + (f" ({len(near)} not distinguishable)" if near else "")
                )
            verdict = standing(record, task, on, "nll", OURS)
            parts.append(
                f"the NLL of {OURS} is better than that of {_names(verdict['better'])}, worse "
                "than that of "
                f"{_names(verdict['worse'])}, and not distinguishable from the other "
                f"{len(verdict['undecided'])}"
            )
            sentences.append(f"{task}, {on}, seeds: {count}: best in {'; '.join(parts)}.")
    return "\n".join(sentences)


def _names(names: list[str]) -> str:
    if len(names) < 2:
        return names[0] if names else "none"
    return f"{', '.join(names[:-1])} and {names[-1]}"


if __name__ == "__main__":
    command(RECORD, __doc__, everything, words=words)
