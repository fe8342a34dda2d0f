"""What a log alone shows: `train-doctor --log trainer_state.json`.

A log has a few numbers per step and neither tensors nor code. Some faults show in them all the same, and each finding
says what the log cannot tell. Read are the Trainer's `trainer_state.json`, a list of entries, and lines of JSON.

Footgun: a log is thinned out (`logging_steps`), and its losses are means over the steps between two entries. A step
that is not in it is not judged.
"""

import json
import math
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

from train_doctor.finding import ERROR, OK, WARN, Finding, Verdict, unknown
from train_doctor.report import Report

FEW = 8  # entries below which nothing is said of a trend
EXPLODED = 100.0  # times the first quarter's median of the gradient norm
NAMES = {
    "loss": ("loss", "train_loss", "train/loss", "training_loss"),
    "norm": ("grad_norm", "gradient_norm", "train/grad_norm"),
    "rate": ("learning_rate", "lr", "train/learning_rate"),
}


class Fault(NamedTuple):
    id: str
    name: str
    severity: str
    cause: str
    fix: str
    unseen: str  # what a log cannot tell


FAULTS = (
    Fault(
        "L1",
        "zero-loss-nan-norm",
        ERROR,
        "The loss is NaN and is printed as 0.0 (the Trainer's logging_nan_inf_filter), the gradients are NaN, and no "
        "step is made, or the weights are NaN by now.",
        "Set logging_nan_inf_filter=False to see the loss itself; in fp16 use bf16 instead; look for a batch whose "
        "labels are all -100.",
        "where the first NaN was made: an overflow in fp16, a batch without targets and weights that were NaN from the "
        "start leave the same lines. Run the script under train-doctor, which names the module (F5, F14, N17).",
    ),
    Fault(
        "L2",
        "not-finite-from",
        ERROR,
        "From one step on the loss or the gradients are NaN or infinite; the weights are lost from there on.",
        "Go back to a checkpoint before that step, and watch the steps around it: doctor.watch(at=[step]).",
        "which batch or module made it, and whether the step itself or one that was not logged did.",
    ),
    Fault(
        "L3",
        "rate-zero",
        ERROR,
        "The learning rate is 0 in every entry, so nothing was learnt.",
        "Look at the schedule: warm-up longer than the run, a number of steps of 0, or steps that are all skipped.",
        "whether the rate that was logged is that of every group, and whether steps were skipped by a scaler.",
    ),
    Fault(
        "L4",
        "norm-exploding",
        WARN,
        "The gradient norm keeps growing, to a hundred times and more of what it was.",
        "Lower the rate or clip the gradients, and look for gradients that are not cleared (N1).",
        "which tensors grow, and whether the norm was taken before or after clipping.",
    ),
    Fault(
        "L5",
        "loss-never-falls",
        WARN,
        "The loss of the last quarter is not below that of the first by more than it wavers.",
        "Run the script under train-doctor, and with --overfit: one batch must be learnt by heart.",
        "whether the model was trained before and has nothing left to learn, whether the rate was meant to be small, "
        "and which weights moved at all. Some losses need not fall (GANs, policy gradients).",
    ),
)


class Unreadable(ValueError):
    """The file is no log; the text is one sentence."""


def read(path: Path) -> list[dict[str, float]]:
    """Entries with a loss or a gradient norm, each with its step."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path} cannot be read: {error}.") from error
    try:
        whole = json.loads(text)
        lines = whole["log_history"] if isinstance(whole, dict) and "log_history" in whole else whole
    except json.JSONDecodeError:
        lines = [_line(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    lines = [lines] if isinstance(lines, dict) else lines
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        raise Unreadable(f"{path} is no log: expected trainer_state.json, a list of entries, or lines of JSON.")
    entries = [_entry(line, number) for number, line in enumerate(lines, 1)]
    entries = [entry for entry in entries if "loss" in entry or "norm" in entry]
    if not entries:
        wanted = ", ".join(name for names in NAMES.values() for name in names)
        raise Unreadable(f"{path} has no entry that it could be judged by; looked for {wanted}.")
    return entries


def _line(path: Path, number: int, line: str) -> dict:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise Unreadable(f"{path}, line {number}, is no JSON: {error}.") from error


def _entry(line: dict, number: int) -> dict[str, float]:
    entry = {"step": _number(line.get("step", line.get("global_step"))) or float(number)}
    for name, others in NAMES.items():
        value = next((v for key in others if (v := _number(line.get(key))) is not None), None)
        if value is not None:
            entry[name] = value
    return entry


def _number(value: object) -> float | None:
    """Also of a text such as "nan", which some loggers write."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def diagnose(entries: list[dict[str, float]], control: Any) -> Report:
    """A report with the findings of a log alone; `control` is what the user decides about them."""
    report = Report()
    report.rounds, report.done, report.source = len(entries), True, "log"
    found = []
    for fault, look in zip(FAULTS, (_zero_and_nan, _not_finite, _rate_zero, _exploding, _flat)):
        seen = look(entries)
        if isinstance(seen, Verdict):
            report.verdicts[fault.id] = seen
            continue
        cause = f"{fault.cause} The log cannot tell {fault.unseen}"
        found.append(Finding(fault.id, fault.name, fault.severity, *seen, cause, fault.fix))
    report.findings, report.ignored = control.sort(found)
    curves = {
        name: [entry.get(key, math.nan) for entry in entries]
        for name, key in (("loss", "loss"), ("gradient norm", "norm"), ("rate", "rate"))
        if any(key in entry for entry in entries)
    }
    report.record = {"curves": curves}
    return report


Seen = tuple[str, str] | Verdict  # observed and expected, or what else


def _of(entries: list[dict[str, float]], *names: str) -> list[dict[str, float]]:
    return [entry for entry in entries if all(name in entry for name in names)]


def _zero_and_nan(entries: list) -> Seen:
    both = _of(entries, "loss", "norm")
    if not both:
        return unknown("no entry has both a loss and a gradient norm")
    hit = [e for e in both if e["loss"] == 0 and not math.isfinite(e["norm"])]
    if not hit:
        return OK
    rates = [e["rate"] for e in hit if "rate" in e]
    rate = f", rate {'0 in all of them' if not any(rates) else f'{rates[0]:g} at the first'}" if rates else ""
    first = f"first at step {hit[0]['step']:g}"
    return f"loss 0 with a gradient norm of nan in {len(hit)} of {len(both)} entries, {first}{rate}", "numbers"


def _not_finite(entries: list) -> Seen:
    wrong = [e for e in entries if not all(math.isfinite(e[k]) for k in ("loss", "norm") if k in e)]
    if not wrong or wrong[-1] is not entries[-1]:  # a scaler skips such steps, and goes on
        return OK
    name = next(k for k in ("loss", "norm") if not math.isfinite(wrong[0].get(k, 0.0)))
    after = [e for e in entries if e["step"] >= wrong[0]["step"]]
    every = "and in every entry from there on" if len(after) == len(wrong) else f"and in {len(wrong)} of {len(after)}"
    what = "loss" if name == "loss" else "gradient norm"
    return f"{what} {wrong[0][name]} at step {wrong[0]['step']:g}, {every}", "numbers that are finite"


def _rate_zero(entries: list) -> Seen:
    rates = [e["rate"] for e in _of(entries, "rate")]
    if len(rates) < 2:
        return unknown("fewer than two entries have a rate")
    return OK if any(rates) else (f"the rate is 0 in all {len(rates)} entries", "a rate above 0")


def _exploding(entries: list) -> Seen:
    norms = [e["norm"] for e in _of(entries, "norm") if math.isfinite(e["norm"])]
    if len(norms) < FEW:
        return unknown(f"fewer than {FEW} entries have a gradient norm that is a number")
    quarter = len(norms) // 4
    first, last = median(norms[:quarter]), median(norms[-quarter:])
    if not first > 0 or last < EXPLODED * first:
        return OK
    return f"gradient norm {first:.3g} in the first quarter, {last:.3g} in the last", "the same order of size"


def _flat(entries: list) -> Seen:
    losses = [e["loss"] for e in _of(entries, "loss") if math.isfinite(e["loss"])]
    if len(losses) < FEW:
        return unknown(f"fewer than {FEW} entries have a loss that is a number")
    quarter = max(2, len(losses) // 4)
    first, last = losses[:quarter], losses[-quarter:]
    noise = (stdev(first) ** 2 / quarter + stdev(last) ** 2 / quarter) ** 0.5
    fallen = mean(first) - mean(last)
    if fallen > 2 * noise and fallen > 1e-3 * abs(mean(first)):
        return OK
    return f"loss {mean(first):.4g} in the first quarter, {mean(last):.4g} in the last", "a loss that falls"
