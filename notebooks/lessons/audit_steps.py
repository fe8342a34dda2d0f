"""The first hundred steps of a training, judged by what its run has stored: does it learn, and is it sound?

    loss      its last third against its first; nan; one record far above those before it
    gradient  zero, not finite, or growing
    rate      zero, still in the warm-up, and the sum so far, which is as far as a norm can have moved
    load      of a router: the smallest share of an expert, and the balance loss over its weight, 1 where it is even
    time      tokens per second, and where they fell

Each rule compares a training with itself. The sizes of gradients are told and not judged: Adam and Muon divide them
away (weight_movement.py), so no range of them is healthy. A loss is not judged against a number either: what a model
that knows nothing has is the logarithm of its vocabulary, and what a good one has depends on the text.

Footgun: metrics.jsonl holds every tenth step where the notebook logs so. What happens between two records is not there.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from lessons.router_health import STARVED
from nblib import guards
from nblib.run import runs

STEPS = 100  # that are looked at
FEWEST = 3  # records; from fewer nothing can be said
FALLS, STANDS = 0.9, 0.6  # shares of pairs, one of the first third and one of the last, in which the later is lower
GROWS = 10.0  # gradients, from the first third to the last
TINY = 1e-7  # a gradient norm
SLOW = 0.5  # of the usual tokens per second

Record = Mapping[str, Any]


def judge(records: list[Record], parameters: Mapping[str, Any] | None = None) -> tuple[list[str], list[str]]:
    """(facts, findings): lines that describe the steps, and a sentence for everything that looks wrong."""
    rows = [runs.scalars(r) | {"step": r["step"], "of": r.get("of", 0)} for r in records if "step" in r]
    events = [r for r in records if "event" in r]
    rows = sorted((r for r in rows if r["step"] <= STEPS and "loss" in r), key=lambda r: r["step"])
    facts, told = [], [f"{len(events)} rollbacks: look at the steps and the data before them"] if events else []
    if len(rows) < FEWEST:
        return [f"{len(rows)} records of steps, too few to judge by"], told
    for part in (_loss, _gradients, _rate, _router, _time):
        more_facts, more = part(rows, parameters or {})
        facts, told = facts + more_facts, told + more
    return facts, told


def _thirds(values: list[float]) -> tuple[list[float], list[float]]:
    n = max(1, len(values) // 3)
    return values[:n], values[-n:]


def _loss(rows: list[Record], parameters: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    name = "ce" if all("ce" in r for r in rows) else "loss"  # without the terms of routers or of a prior
    bad = [r["step"] for r in rows if not math.isfinite(r["loss"])]
    if bad:
        return [], [f"the loss is not finite at step {bad[0]}: go back before it; the doctor names the first module"]
    losses = [r[name] for r in rows]
    first, last = _thirds(losses)
    lower = sum(b < a for a in first for b in last) / (len(first) * len(last))
    facts = [f"{name} {losses[0]:.3f} at step {rows[0]['step']}, {losses[-1]:.3f} at step {rows[-1]['step']}"]
    told = []
    if lower <= 1 - STANDS and median(last) > median(first):
        told.append(
            f"{name} rises from {median(first):.3f} to {median(last):.3f} (medians of the first and the last third): "
            "lower the rate or warm up longer, and look at the gradient norms"
        )
    elif lower < STANDS:
        told.append(
            f"{name} does not fall: {median(first):.3f} in the first third, {median(last):.3f} in the last. Try to "
            "fit one batch alone, then look at the rates and at what trains (nblib doctor)"
        )
    elif lower < FALLS:
        facts.append(
            f"it falls in {lower:.0%} of the pairs of an early and a late record: more noise than trend so far"
        )
    for n, r in enumerate(rows):
        if note := guards.spiked(r["loss"], [x["loss"] for x in rows[:n]], at_least=FEWEST):
            return facts, [
                *told,
                f"at step {r['step']} the {note}: look at that batch, and roll back on spikes (spike=)",
            ]
    return facts, told


def _gradients(rows: list[Record], parameters: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    norms = [(r["step"], r["grad_norm"]) for r in rows if "grad_norm" in r]
    if len(norms) < FEWEST:
        return [], []
    if bad := [step for step, norm in norms if not math.isfinite(norm)]:
        return [], [f"the gradient norm is not finite at step {bad[0]}: the doctor names the first module"]
    values = [norm for _, norm in norms]
    first, last = (median(part) for part in _thirds(values))
    facts = [f"gradient norm {min(values):.3g} to {max(values):.3g}, in the middle {median(values):.3g}"]
    told = []
    if max(values) < TINY:
        told.append("the gradients are zero: nothing that trains reaches the loss (nblib doctor says where it parts)")
    elif last > GROWS * first > 0:
        told.append(f"gradient norms grow from {first:.3g} to {last:.3g}: lower the rate, or clip, before it diverges")
    return facts, told


def _rate(rows: list[Record], parameters: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    rates = [(r["step"], r["lr"]) for r in rows if "lr" in r]
    if len(rates) < FEWEST:
        return [], []
    highest, until = max(rate for _, rate in rates), rates[-1][0]
    if not highest:
        return [], ["the rate is 0 in every record: nothing trains"]
    total = rates[0][0] * rates[0][1] + sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(rates))
    factor = parameters["adamw_lr"] / parameters["lr"] if parameters.get("lr") and "adamw_lr" in parameters else 1.0
    reach = total * factor
    facts = [
        f"rate {rates[0][1]:.3g} at step {rates[0][0]}, {highest:.3g} at most, {rates[-1][1]:.3g} at step {until}",
        f"by then a norm can have moved by {reach:.2g} at most",
    ]
    rises = all(b[1] > a[1] for a, b in pairwise(rates))
    if rises and until < rows[-1]["of"]:
        return facts, [
            f"at step {until} the rate still rises: this is the warm-up, so judge no weight and no loss by it"
        ]
    return facts, []


def _router(rows: list[Record], parameters: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    facts, told = [], []
    loads = [(r["step"], r["eval_smallest"]) for r in rows if "eval_smallest" in r]
    if loads:
        facts.append(
            f"smallest load {loads[0][1]:.2f} fair shares at step {loads[0][0]}, {loads[-1][1]:.2f} at the last"
        )
        if loads[-1][1] < STARVED:
            told.append(
                f"an expert gets {loads[-1][1]:.2f} of its fair share at step {loads[-1][0]}: raise balance_weight, "
                "or give each expert a selection bias (lessons.selection_bias)"
            )
    weight, experts, k = (parameters.get(name, 0) for name in ("balance_weight", "experts", "top_k"))
    values = [r["balance"] / weight for r in rows if weight and "balance" in r]
    if values:
        facts.append(f"balance {values[0]:.3f} to {values[-1]:.3f}, where 1 is even")
        if k and experts > k and values[-1] > (1 + experts / k) / 2:
            told.append(
                f"balance is {values[-1]:.2f}, nearer to {experts / k:.3g} (always the same {k} experts) than to 1 "
                "(even): the routers collapse; raise balance_weight or lower the rate of the routers (adamw_lr)"
            )
    return facts, told


def _time(rows: list[Record], parameters: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    timed = [r for r in rows if {"seconds", "tokens"} <= r.keys()]
    speeds = [
        (b["step"], (b["tokens"] - a["tokens"]) / (b["seconds"] - a["seconds"]))
        for a, b in pairwise(timed)
        if b["seconds"] > a["seconds"]
    ]
    if len(speeds) < FEWEST:
        return [], []
    values = [speed for _, speed in speeds]
    usual, (first, last) = median(values), map(median, _thirds(values))
    facts = [f"{usual:,.0f} tokens per second, {sum(v < SLOW * usual for v in values)} of {len(values)} records slow"]
    if last < SLOW * first:
        return facts, [
            f"from {first:,.0f} tokens per second it falls to {last:,.0f} by step {speeds[-1][0]}: look for another "
            "job on the machine, memory that grows, or data that comes late"
        ]
    return facts, []
