"""AdamW, Muon, Polar Express and NorMuon on the same mixture: rates tuned alike, three seeds, costs
counted.

    cd notebooks && ../.venv/bin/python -m experiments.muon_rival_runs

Each racer is tuned by the same search: five factors on the rate of its matrices around the rate
that is usual for it, then two on the rate of embeddings, norms and routers. These runs have a seed
of their own and are judged on validation rows. The race has three other seeds and is judged on
held-out rows.

One `muon_race.Setting` but for the optimizer and its rates, the same first weights and rows at each
seed. `fair` asserts that all took the same tokens with the same parameters, and that the three
Muons took equal FLOPs. A step of AdamW multiplies no matrices in its update, so AdamW runs once
more for as many steps as the FLOPs of Muon would pay; then FLOPs are equal and tokens are not.
Seconds cannot be made equal; they stand in the table.

Footgun: the tokens per step decide who looks cheap. Muon's products depend on the weights alone, so
their share of a step falls as the batch grows.
"""

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from experiments import muon_race
from experiments.record import Store, command, read_published
from lessons import seeds
from nblib import runtime
from nbworkbook.setup import Setup, load_setup

RECORD = "muon-rivals"
USUAL = {
    "adamw": dict(lr=1e-3),
    "muon": dict(lr=0.02),
    "polar_express": dict(lr=0.02),
    "normuon": dict(lr=0.02),
}
NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "polar_express": "Muon, Polar Express",
    "normuon": "NorMuon",
}
LONGER = "adamw, FLOPs of Muon"
FACTORS, REST, TUNING_SEED = (0.25, 0.5, 1.0, 2.0, 4.0), (0.5, 2.0), 100
OPTIONS = dict(steps=60, rows=8, length=128)


def setting(racer: str, lr: float, adamw_lr: float) -> muon_race.Setting:
    return muon_race.Setting(optimizer=racer, lr=lr, adamw_lr=adamw_lr)


def result(outcome: muon_race.Outcome, steps: int) -> dict:
    """Return what is stored of a run beside its name and its rates."""
    facts = dict(
        tokens=outcome.tokens,
        parameters=outcome.parameters,
        flops=outcome.flops,
        seconds=outcome.seconds,
    )
    balance = min(h.smallest for h in outcome.health)
    return {
        "steps": steps,
        **facts,
        "loss": outcome.loss,
        "smallest_load": balance,
        "curve": outcome.curve,
    }


def wanted(lines: list[dict], *, count: int) -> Iterator[dict]:
    """Yield what is to be run, in turn; a rate that was found by the lines so far decides what
    comes next.
    """
    for racer, usual in USUAL.items():
        tuning = {"kind": "tuning", "racer": racer, "seed": TUNING_SEED}
        rest = muon_race.Setting().adamw_lr
        for factor in FACTORS:
            yield tuning | dict(lr=factor * usual["lr"], adamw_lr=rest)
        lr = best(lines, racer)["lr"]
        for factor in REST:
            yield tuning | dict(lr=lr, adamw_lr=factor * rest)
    for seed in range(count):
        for racer in USUAL:
            yield {"kind": "race", "racer": racer, "seed": seed} | best(lines, racer)
        yield {"kind": "race", "racer": LONGER, "seed": seed} | best(lines, "adamw")


def best(lines: list[dict], racer: str) -> dict:
    """Return the rates of the tuning run with the lowest loss on validation rows."""
    tried = [each for each in lines if each["kind"] == "tuning" and each["racer"] == racer]
    return {name: min(tried, key=lambda each: each["loss"])[name] for name in ("lr", "adamw_lr")}


def paid(vocabulary: int, *, steps: int, **options) -> int:
    """Return the steps of AdamW with as many FLOPs as Muon's, within half a step."""
    muon, adamw = (
        muon_race.step_flops(muon_race.Setting(optimizer=racer), vocabulary, **options)
        for racer in ("muon", "adamw")
    )
    return round(steps * muon / adamw)


def measure(path: Path, opened: Setup, *, count: int = 3, steps: int, **options) -> dict:
    """Return the record with all runs. What the file holds already is not repeated."""
    settings = dict(steps=steps, **options, shape=muon_race.SHAPE, factors=FACTORS, rest=REST)
    store, vocabulary = Store(path, settings), len(opened.tokenizer)
    sets = {"tuning": opened.validation, "race": opened.held_out}
    longer = paid(vocabulary, steps=steps, **options)

    def run(unit: dict) -> dict:
        data = muon_race.Data(opened.stream, sets[unit["kind"]], vocabulary)
        racer = "adamw" if unit["racer"] == LONGER else unit["racer"]
        length = longer if unit["racer"] == LONGER else steps
        one = setting(racer, unit["lr"], unit["adamw_lr"])
        outcome = muon_race.run(
            one, data, steps=length, seed=unit["seed"], machine=opened.machine, **options
        )
        return result(outcome, length)

    record = store.measure(wanted(store.content["lines"], count=count), run)
    fair(record)
    return record


def fair(record: dict) -> None:
    """Assert what the table says is equal."""
    race = [each for each in record["lines"] if each["kind"] == "race"]
    same = [each for each in race if each["racer"] != LONGER]
    for seed in {each["seed"] for each in race}:
        mine = {each["racer"]: each for each in race if each["seed"] == seed}
        assert set(mine) == {*USUAL, LONGER}
        assert len({each["parameters"] for each in mine.values()}) == 1
        assert len({(each["tokens"], each["steps"]) for each in same if each["seed"] == seed}) == 1
        assert len({mine[racer]["flops"] for racer in USUAL if racer != "adamw"}) == 1
        step = mine["adamw"]["flops"] / mine["adamw"]["steps"]
        assert abs(mine[LONGER]["flops"] - mine["muon"]["flops"]) <= step


def everything(path: Path, machine: runtime.Machine) -> dict:
    """Return the record of all tunings and races."""
    return measure(path, load_setup(length=OPTIONS["length"], rows=64, machine=machine), **OPTIONS)


# -------------------------------------------------------------------------------- what is on record
published = partial(read_published, RECORD)


def losses_of(record: dict, racer: str) -> list[float]:
    """Held-out losses of the race, seed by seed."""
    mine = [each for each in record["lines"] if (each["kind"], each["racer"]) == ("race", racer)]
    return [each["loss"] for each in sorted(mine, key=lambda each: each["seed"])]


def verdicts(record: dict) -> dict[str, str]:
    """Each against Muon, by the rule of `lessons.seeds`."""
    muon = losses_of(record, "muon")
    others = [racer for racer in (*USUAL, LONGER) if racer != "muon"]
    return {
        r: seeds.sentence(f"{title(r)} instead of Muon", seeds.gains(muon, losses_of(record, r)))
        for r in others
    }


def title(racer: str) -> str:
    return NAMES.get(racer, "AdamW, as many FLOPs as Muon")


def table(record: dict) -> list[dict]:
    """Return a row per racer: its tuned rates, what a run costs, and the held-out loss with its
    spread over the seeds.
    """
    rows = []
    goal = statistics.mean(
        curve_end(each) for each in record["lines"] if each["racer"] == "adamw" and is_race(each)
    )
    for racer in (*USUAL, LONGER):
        mine = [each for each in record["lines"] if is_race(each) and each["racer"] == racer]
        losses, one = losses_of(record, racer), mine[0]
        reached = [muon_race.steps_to(each["curve"], goal) for each in mine]
        rows.append(
            {
                "optimizer": title(racer),
                "rate": one["lr"],
                "of the rest": one["adamw_lr"],
                "steps": one["steps"],
                "tokens": one["tokens"],
                "GFLOP": one["flops"] / 1e9,
                "seconds": statistics.median(each["seconds"] for each in mine),
                "held-out loss": statistics.mean(losses),
                "spread": max(losses) - min(losses),
                f"steps to {goal:.2f}": ", ".join(
                    "never" if steps is None else str(steps) for steps in reached
                ),
            }
        )
    return rows


def is_race(each: dict) -> bool:
    return each["kind"] == "race"


def curve_end(each: dict) -> float:
    return statistics.mean(each["curve"][-4:])


if __name__ == "__main__":
    command(RECORD, __doc__, everything, words=lambda record: "\n".join(verdicts(record).values()))
