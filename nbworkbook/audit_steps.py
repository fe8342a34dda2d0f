"""The first hundred steps of a training, judged by what its run has stored: does it learn, and is
it sound?

    loss      its last third against its first; nan; one record far above those before it
    gradient  zero, not finite, or growing
    rate      zero, still in the warm-up, and the sum so far, which is as far as a norm can have
              moved
    load      of a router: the smallest share of an expert, and the balance loss over its weight,
              which is 1 where the load is even
    time      tokens per second, and where they fell

Each rule compares a training with itself. The sizes of gradients are printed and not judged: Adam
and Muon divide them away (weight_movement.py), so no range of them is healthy. A loss is not judged
against a number either: that of a model which has learned nothing is the logarithm of its
vocabulary, and that of a good one depends on the text.

Footgun: metrics.jsonl holds every tenth step where the notebook logs so. What happens between two
records is not there.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from nblib import guards
from nblib.methods.moe.router_health import STARVED
from nbworkbook import runs

STEPS = 100  # that are looked at
FEWEST = 3  # records; from fewer nothing can be said
# Shares of the pairs of an early and a late record, one of the first third and one of the last, in
# which the later loss is lower: above FALLS it falls, below STANDS it does not.
FALLS = 0.9
STANDS = 0.6
GROWS = 10.0  # gradients, from the first third to the last
TINY = 1e-7  # a gradient norm
SLOW = 0.5  # of the usual tokens per second

Record = Mapping[str, Any]


class Judged(NamedTuple):
    """What a part of the audit says of the steps."""

    facts: list[str]  # lines that describe
    findings: list[str]  # a sentence for everything that looks wrong


def judge(records: list[Record], parameters: Mapping[str, Any] | None = None) -> Judged:
    """Return what the records of a training's first steps say, and what looks wrong in them."""
    rows = []
    for record in records:
        if "step" in record:
            row = runs.scalars(record) | {"step": record["step"], "of": record.get("of", 0)}
            if row["step"] <= STEPS and "loss" in row:
                rows.append(row)
    rows.sort(key=lambda row: row["step"])

    facts: list[str] = []
    findings: list[str] = []
    events = sum("event" in record for record in records)
    if events:
        findings.append(f"{events} rollbacks: look at the steps and the data before them")
    if len(rows) < FEWEST:
        return Judged([f"{len(rows)} records of steps, too few to judge by"], findings)

    for part in (_loss, _gradients, _rate, _router, _time):
        judged = part(rows, parameters or {})
        facts += judged.facts
        findings += judged.findings
    return Judged(facts, findings)


def _thirds(values: list[float]) -> tuple[list[float], list[float]]:
    """Return the first and the last third."""
    count = max(1, len(values) // 3)
    return values[:count], values[-count:]


def _loss(rows: list[Record], parameters: Mapping[str, Any]) -> Judged:
    """Judge whether the loss falls, and whether one record jumps."""
    bad = [row["step"] for row in rows if not math.isfinite(row["loss"])]
    if bad:
        why = "go back before it; the doctor names the first module"
        return Judged([], [f"the loss is not finite at step {bad[0]}: {why}"])

    # The language loss alone, where every record has it: without the terms of routers or of a
    # prior.
    name = "ce" if all("ce" in row for row in rows) else "loss"
    losses = [row[name] for row in rows]
    first, last = _thirds(losses)
    pairs = [late < early for early in first for late in last]
    lower = sum(pairs) / len(pairs)

    facts = [
        f"{name} {losses[0]:.3f} at step {rows[0]['step']}, {losses[-1]:.3f} at step "
        f"{rows[-1]['step']}"
    ]
    findings = []
    if lower <= 1 - STANDS and median(last) > median(first):
        findings.append(
            f"{name} rises from {median(first):.3f} to {median(last):.3f} (medians of the "
            "first and the last third): "
            "lower the rate or warm up longer, and look at the gradient norms"
        )
    elif lower < STANDS:
        findings.append(
            f"{name} does not fall: {median(first):.3f} in the first third, {median(last):.3f} "
            "in the last. Try to "
            "fit one batch alone, then look at the rates and at what trains (nblib doctor)"
        )
    elif lower < FALLS:
        facts.append(
            f"it falls in {lower:.0%} of the pairs of an early and a late record: more noise "
            "than trend so far"
        )

    # The first record that is far above those before it.
    before: list[float] = []
    for row in rows:
        note = guards.spiked(row["loss"], before, at_least=FEWEST)
        if note:
            where = f"at step {row['step']} the {note}"
            findings.append(
                f"{where}: look at that batch, and roll back on spikes: train.Recovery(spike=2.0)"
            )
            break
        before.append(row["loss"])
    return Judged(facts, findings)


def _gradients(rows: list[Record], parameters: Mapping[str, Any]) -> Judged:
    """Judge whether gradients are there, finite, and of one size."""
    norms = [(row["step"], row["grad_norm"]) for row in rows if "grad_norm" in row]
    if len(norms) < FEWEST:
        return Judged([], [])
    bad = [step for step, norm in norms if not math.isfinite(norm)]
    if bad:
        why = "the doctor names the first module"
        return Judged([], [f"the gradient norm is not finite at step {bad[0]}: {why}"])

    values = [norm for _, norm in norms]
    first, last = (median(third) for third in _thirds(values))
    facts = [
        f"gradient norm {min(values):.3g} to {max(values):.3g}, in the middle {median(values):.3g}"
    ]
    findings = []
    if max(values) < TINY:
        findings.append(
            "the gradients are zero: nothing that trains reaches the loss (nblib doctor says "
            "where it parts)"
        )
    elif last > GROWS * first > 0:
        findings.append(
            f"gradient norms grow from {first:.3g} to {last:.3g}: lower the rate, or clip, "
            "before it diverges"
        )
    return Judged(facts, findings)


def _rate(rows: list[Record], parameters: Mapping[str, Any]) -> Judged:
    """Judge whether there is a rate, and say how far a norm can have moved by it."""
    rates = [(row["step"], row["lr"]) for row in rows if "lr" in row]
    if len(rates) < FEWEST:
        return Judged([], [])
    highest = max(rate for _, rate in rates)
    if not highest:
        return Judged([], ["the rate is 0 in every record: nothing trains"])

    # The sum of the rates over the steps, by trapezoids between the records.
    first_step, first_rate = rates[0]
    last_step, last_rate = rates[-1]
    total = first_step * first_rate
    for (step, rate), (next_step, next_rate) in pairwise(rates):
        total += (next_step - step) * (rate + next_rate) / 2

    # Norms are trained by AdamW, whose rate follows the same schedule.
    factor = 1.0
    if parameters.get("lr") and "adamw_lr" in parameters:
        factor = parameters["adamw_lr"] / parameters["lr"]
    facts = [
        f"rate {first_rate:.3g} at step {first_step}, {highest:.3g} at most, {last_rate:.3g} "
        f"at step {last_step}",
        f"by then a norm can have moved by {total * factor:.2g} at most",
    ]

    rises = all(next_rate > rate for (_, rate), (_, next_rate) in pairwise(rates))
    findings = []
    if rises and last_step < rows[-1]["of"]:
        findings.append(
            f"at step {last_step} the rate still rises: this is the warm-up, so judge no "
            "weight and no loss by it"
        )
    return Judged(facts, findings)


def _router(rows: list[Record], parameters: Mapping[str, Any]) -> Judged:
    """Judge whether the experts of a mixture are used alike."""
    facts = []
    findings = []

    # The smallest share of an expert, where evaluations measured it.
    loads = [(row["step"], row["eval_smallest"]) for row in rows if "eval_smallest" in row]
    if loads:
        first_step, first_load = loads[0]
        last_step, last_load = loads[-1]
        facts.append(
            f"smallest load {first_load:.2f} fair shares at step {first_step}, {last_load:.2f} "
            "at the last"
        )
        if last_load < STARVED:
            findings.append(
                f"an expert gets {last_load:.2f} of its fair share at step {last_step}: raise "
                "balance_weight, "
                "or give each expert a selection bias (nblib.methods.moe.selection_bias)"
            )

    # The balance loss without its weight: 1 where even, experts / top_k where always the same are
    # taken.
    weight = parameters.get("balance_weight", 0)
    experts = parameters.get("experts", 0)
    top_k = parameters.get("top_k", 0)
    balances = [row["balance"] / weight for row in rows if weight and "balance" in row]
    if balances:
        facts.append(f"balance {balances[0]:.3f} to {balances[-1]:.3f}, where 1 is even")
        if 0 < top_k < experts and balances[-1] > (1 + experts / top_k) / 2:
            findings.append(
                f"balance is {balances[-1]:.2f}, nearer to {experts / top_k:.3g} (always the "
                f"same {top_k} experts) "
                "than to 1 (even): the routers collapse; raise balance_weight or lower the "
                "rate of the routers "
                "(adamw_lr)"
            )
    return Judged(facts, findings)


def _time(rows: list[Record], parameters: Mapping[str, Any]) -> Judged:
    """Judge whether the speed holds."""
    timed = [row for row in rows if {"seconds", "tokens"} <= row.keys()]
    steps = []
    speeds = []
    for before, row in pairwise(timed):
        seconds = row["seconds"] - before["seconds"]
        if seconds > 0:
            steps.append(row["step"])
            speeds.append((row["tokens"] - before["tokens"]) / seconds)
    if len(speeds) < FEWEST:
        return Judged([], [])

    usual = median(speeds)
    slow = sum(speed < SLOW * usual for speed in speeds)
    first, last = (median(third) for third in _thirds(speeds))
    facts = [f"{usual:,.0f} tokens per second, {slow} of {len(speeds)} records slow"]
    findings = []
    if last < SLOW * first:
        findings.append(
            f"from {first:,.0f} tokens per second it falls to {last:,.0f} by step {steps[-1]}: "
            "look for another "
            "job on the machine, memory that grows, or data that comes late"
        )
    return Judged(facts, findings)
