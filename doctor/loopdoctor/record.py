"""What a watch leaves as numbers: a few curves and tensors, for the pictures of a report and to
compare two runs.

    loopdoctor train.py --json > healthy.json
    loopdoctor train.py --baseline healthy.json       # what changed first

What is compared comes in the order in which one thing makes the other: how the run was set up, then
step by step the loss, the gradient of each tensor, the rate, and how far each followed tensor was
moved.

Footgun: two machines add in another order, so equal runs differ in the last digits. So two are
named: the first difference at all, and the first that is more than rounding can be.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from loopdoctor import histograms
from loopdoctor.evidence import Backward, Evidence, Gradients, Step
from loopdoctor.measures import spread

TENSORS = 64  # whose gradients are kept, evenly over the depth
ROUNDS = 256  # of which numbers are kept
SLIGHT, LARGE = 1e-6, 0.1  # relative differences
NOUNS = {"loss": "the loss", "gradient norm": "the gradient norm", "rate": "the learning rate"}


def of(e: Evidence) -> dict:
    """Everything a report keeps of a watch as numbers. A few kilobytes, whatever was watched."""
    rounds = range(min(e.rounds, ROUNDS))
    losses, steps = e.by_round(Backward), e.by_round(Step)
    gradients = {g.round: g.norms for g in e.of(Gradients)}
    names = spread(list(e.trainable()), TENSORS)
    moves: dict[str, dict[int, float]] = {}
    for step in e.of(Step):
        for update in step.updates:
            moves.setdefault(update.name, {})[step.round] = update.relative
    curves = {
        "loss": [
            _mean([b.value for b in losses.get(r, ()) if b.value is not None]) for r in rounds
        ],
        "gradient norm": [_length(gradients.get(r, {}).values()) for r in rounds],
        "rate": [
            max((x for s in steps.get(r, ()) for x in s.rates), default=math.nan) for r in rounds
        ],
    }
    return {
        "setup": _setup(e),
        "curves": {
            name: values for name, values in curves.items() if not all(map(math.isnan, values))
        },
        "tensors": {n: [_or_nan(gradients.get(r, {}).get(n)) for r in rounds] for n in names},
        "moves": {n: [at.get(r, math.nan) for r in rounds] for n, at in moves.items()},
        "histograms": histograms.plain(e),
    }


def _setup(e: Evidence) -> dict[str, str]:
    ps = e.parameters()
    trainable = [p for p in ps.values() if p.requires_grad]
    made = {
        "torch": torch.__version__,
        "device": ", ".join(sorted({p.device.type for p in ps.values()})),
        "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in ps.values()})),
        "parameters": f"{len(ps)} tensors, {sum(p.numel() for p in ps.values())} numbers",
        "trainable": f"{len(trainable)} tensors, {sum(p.numel() for p in trainable)} numbers",
        "models": ", ".join(type(m).__name__ for m in e.models),
    }
    for number, o in enumerate(e.optimizers):
        made[f"optimizer {number + 1}"] = f"{o.kind.__name__} of {len(o.ids)} tensors"
    return made


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _length(norms) -> float:
    there = [n for n in norms if n is not None]
    return math.sqrt(sum(n * n for n in there)) if there else math.nan


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


# --------------------------------------------------------------------------------- to and from JSON
def plain(value):
    """Return the same with numbers that JSON has: the others become texts such as "nan", which
    float() reads.
    """
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Unreadable(ValueError):
    """The file is no report to compare with; the text is one sentence."""


def load(path: Path) -> list[tuple[int, dict]]:
    """Return the records in a report that `report.json()` or `loopdoctor --json` wrote, each with
    its first step.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        windows = [(w["first"], _numbers(w["record"])) for w in read["windows"]]
        return windows or [(0, _numbers(read["record"]))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise Unreadable(
            f"{path} is no report to compare with: {why}; write one with --json."
        ) from error


def _numbers(record: dict) -> dict:
    parts = {
        part: {name: [float(x) for x in values] for name, values in record[part].items()}
        for part in ("curves", "tensors", "moves")
    }
    return {"setup": dict(record["setup"])} | parts


# ---------------------------------------------------------------------------------------- comparing
def compare(report, baseline: list[tuple[int, dict]]) -> list[str]:
    """Return what changed against a healthy run, window by window; the later ones only until one
    has changed.
    """
    windows = {w.first: w.record for w in report.windows} or {0: report.record}
    both = [(first, windows[first], before) for first, before in baseline if first in windows]
    if not both:
        return ["no window of the two runs begins at the same step"]
    for first, now, before in both:
        said = _compare(now, before, first)
        if not said[-1].startswith("no "):
            break
    return said


def _compare(now: dict, before: dict, begun: int) -> list[str]:
    """In sentences: the set-up, the first difference, the first large one."""
    setup = dict(now.get("setup", {})), dict(before.get("setup", {}))
    said = [
        f"set-up: {name} is {setup[0].get(name, 'missing')}, and was "
        f"{setup[1].get(name, 'missing')}"
        for name in dict.fromkeys([*setup[1], *setup[0]])
        if setup[0].get(name) != setup[1].get(name)
    ]
    differences = list(_differences(now, before, begun))
    large = [text for size, text in differences if size > LARGE]
    if not differences:
        rounds = min(len(next(iter(r.get("curves", {}).values()), [])) for r in (now, before))
        return [
            *said,
            f"no difference in {rounds} steps beyond {SLIGHT:g} of a number"
            if rounds
            else "no step in both",
        ]
    said.append(f"first difference: {differences[0][1]}")
    if large and large[0] != differences[0][1]:
        said.append(f"first above {LARGE:.0%}: {large[0]}")
    elif not large:
        said.append(f"none above {LARGE:.0%} in the steps that both have")
    return said


def _differences(now: dict, before: dict, begun: int) -> Iterator[tuple[float, str]]:
    """In the order of a step: loss, each gradient, rate, each move."""
    rows = [(NOUNS["loss"], "curves", "loss")]
    rows += [
        (f"the gradient norm of {n}", "tensors", n)
        for n in before["tensors"]
        if n in now["tensors"]
    ]
    rows += [(NOUNS["rate"], "curves", "rate")]
    rows += [
        (f"the relative change of {n}", "moves", n) for n in before["moves"] if n in now["moves"]
    ]
    series = [
        (noun, now[part].get(name, []), before[part].get(name, [])) for noun, part, name in rows
    ]
    for step in range(max((min(len(a), len(b)) for _, a, b in series), default=0)):
        for noun, a, b in series:
            if step < min(len(a), len(b)) and (size := _apart(a[step], b[step])) > SLIGHT:
                yield (
                    size,
                    f"step {begun + step + 1}: {noun} is {a[step]:.6g}, and was {b[step]:.6g}",
                )


def _apart(a: float, b: float) -> float:
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / max(abs(a), abs(b), 1e-30)
    return 0.0 if str(a) == str(b) else math.inf
