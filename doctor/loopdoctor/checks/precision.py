"""Numbers of 16 bits: updates that are rounded away, gradients that vanish, scalers that refuse.
N4, N15, N25, S7, B5.

Footgun: most elements of a bf16 tensor not changing in a step proves nothing; see shadow.py.
"""

import math
from inspect import signature
from statistics import median

import torch

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.seen import spoilt
from loopdoctor.evidence import Backward, Evidence, Optimizer, ScalerStep, Step
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown

MOST = 0.75  # of the numbers, that a settled step can't change
FEW = 3  # steps from which on zeros are no start
LARGE = 0.01  # an epsilon of Adam that may be a slip
USUAL, RAISED = 0.02, 0.05  # rates of Adam; one that was raised with the epsilon, as a share of it


@check("N4")
def rounded_away(e: Evidence) -> Fired | Verdict:
    """Training in bf16 is slow or stands still, and a higher learning rate helps more than it
    should.

    Fires by the fp32 shadow: the share of the way that the same gradients lead fp32 copies is below
    a half (error) or below 0.8 (warning). Stochastic rounding has a share near one; compensated
    sums and master weights are recognised.

    Adam's first steps have the size of the rate and arrive; later ones are about a fifth of it. So
    a warning also says that three of four numbers will not be changed by such.

    ERROR or WARN updates-rounded-away: The weights are kept in {kinds} (pure {short}, no fp32
    master copy), whose steps are coarser than the updates: most are rounded away. Fix: Keep the
    weights in fp32 and compute under autocast, or use stochastic rounding or compensated sums.
    WARN updates-rounded-away/soon: The weights are kept in 16 bits with no fp32 master copy: the
    first steps of Adam still change them, and most of its later, smaller ones will be rounded away.
    Fix: Keep the weights in fp32 and compute under autocast, or use stochastic rounding or
    compensated sums.
    WARN updates-rounded-away/average: An average of the weights is kept in 16 bits and goes
    {rate:.2g} of the way to them at each step, which is less than such numbers can tell apart: it
    stays near where it began. Fix: Keep the average in fp32, whatever the weights are in.
    """
    if e.habits["N4 average"]:
        rate, kind = next(iter(e.habits["N4 average"].values()))
        return fires(
            f"a tensor of {kind} that no optimizer holds is drawn to a weight by {rate:.2g} of "
            "the way",
            "an average in fp32",
            WARN,
            "updates-rounded-away/average",
            rate=rate,
        )
    if not any(o.low for o in e.optimizers):
        return not_applicable("no trained parameter is below 32 bits")
    share = e.shadow.get("all")
    if e.unshadowed and share is None:
        return unknown(e.unshadowed)
    if share is None or not math.isfinite(share) or len(e.of(Step)) < 3:
        return unknown("too little was seen of tensors below 32 bits")
    rates = [max(s.rates) for s in e.of(Step) if s.rates]
    # a warm-up: the later, larger steps may arrive
    rising = len(rates) > 1 and rates[-1] > 1.2 * rates[0]
    if share >= 0.8 and (rising or e.coarse < MOST):
        return OK
    if share >= 0.8:
        return fires(
            f"{share:.0%} of the first updates arrive, which have the size of the rate "
            f"({max(rates):.2g}); a fifth of "
            f"it, as Adam's later ones are, would not change {e.coarse:.0%} of the numbers",
            "steps that the numbers are fine enough for",
            WARN,
            "updates-rounded-away/soon",
        )
    low = [u for s in e.of(Step) for u in s.updates if u.dtype.itemsize < 4 and u.gradient and u.lr]
    ones = {u.name for u in low if len(u.shape) < 2}
    stuck = ones - {u.name for u in low if u.changed}
    norms = f"; {len(stuck)} of {len(ones)} vectors looked at never changed" if ones else ""
    kinds = sorted({str(u.dtype).removeprefix("torch.") for u in low}) or ["16-bit"]
    return fires(
        f"{share:.0%} of each update arrives in the {'/'.join(kinds)} weights (lr "
        f"{max(rates):.2g}){norms}",
        "nearly 100 %, as in fp32",
        ERROR if share < 0.5 and not rising else WARN,
        kinds="/".join(kinds),
        short=_short(kinds),
    )


def _short(kinds: list[str]) -> str:
    return "/".join(kind.replace("bfloat", "bf").replace("float", "fp") for kind in kinds)


@check("S7")
def scaler_over_half(e: Evidence) -> Fired | Verdict:
    """Return  "Attempting to unscale FP16 gradients.": the trained parameters themselves are fp16.

    Fires when that was raised, or fp16 parameters are trained under an enabled scaler. A frozen
    fp16 base is fine.

    ERROR fp16-parameters-under-a-scaler: The model was cast to fp16 as a whole; a GradScaler needs
    fp32 parameters to unscale into. Fix: Load or cast the trainable parameters to float32 and keep
    autocast, or use bfloat16 without a scaler.
    """
    half = [n for n, p in e.trainable().items() if p.dtype == torch.float16]
    scaled = any(b.scale for b in e.of(Backward)) or any(s.enabled for s in e.of(ScalerStep))
    if not half:
        return OK if e.trainable() else not_applicable("nothing is trainable")
    if not scaled and "unscale FP16 gradients" not in e.complaint:
        return not_applicable("no enabled scaler was seen")
    return fires(
        f"{len(half)} trainable tensors are float16 ({half[0]} ...), under an enabled GradScaler",
        "trainable parameters in fp32; autocast makes the fp16 copies",
    )


@check("B5")
def underflow(e: Evidence) -> Fired | Verdict:
    """Training in fp16 learns less than it should: small gradients have become exactly zero.

    Looked at when fp16 autocast or fp16 parameters are differentiated without an effective scaler.
    More than half of the gradients' elements at zero is an error; otherwise it is a warning. A
    scaler made for another device switches itself off and only warns.

    ERROR or WARN fp16-without-a-scaler: fp16 gradients without loss scaling: what is below 6e-8
    becomes zero. Fix: Use torch.amp.GradScaler(device) of the device in use around backward and
    step, or bfloat16.
    ERROR fp16-without-a-scaler/switched-off: The GradScaler is switched off (made for another
    device, or enabled=False): small fp16 gradients become zero. Fix: Use
    torch.amp.GradScaler(device) of the device in use around backward and step, or bfloat16.
    """
    half = any(c.autocast == torch.float16 for c in e.forwards)
    half = half or any(p.dtype == torch.float16 for p in e.trainable().values())
    if not half:
        return not_applicable("no fp16 in the training forward pass")
    if not e.of(Backward):
        return unknown("no backward was seen")
    if any(b.scale for b in e.of(Backward)):
        return OK
    tables = {n for n, p in e.parameters().items() if p is e.embedding() or p is e.head()}
    shares = [
        u.silent
        for s in e.of(Step)
        for u in s.updates
        if u.silent is not None and len(u.shape) >= 2 and u.name not in tables
    ]
    zero = median(shares) if shares else 0.0
    off = any(not s.enabled for s in e.of(ScalerStep))
    return fires(
        f"fp16, {'a GradScaler that is disabled' if off else 'no scaled loss'}; "
        f"{zero:.0%} of the gradients' elements are exactly 0",
        "a loss scaled by an enabled GradScaler, and few zeros",
        ERROR if zero > 0.5 or off else WARN,
        "fp16-without-a-scaler/switched-off" if off else "fp16-without-a-scaler",
    )


@check("N15")
def never_accepts(e: Evidence) -> Fired | Verdict:
    """With a GradScaler nothing moves: it finds infinities and skips step after step.

    The first skips look for the right scale. Fires when more than half of at least eight steps were
    skipped, and still some after the fifth.

    ERROR or WARN scaler-skips-steps: The GradScaler finds NaN or inf in the gradients again and
    again, so the optimizer does not step. Fix: Look for what is not finite in the forward pass; it
    is not the scale.
    """
    steps = [s for s in e.of(ScalerStep) if s.enabled]
    if not steps:
        return not_applicable("no enabled scaler was seen")
    skipped = sum(not s.stepped for s in steps)
    if len(steps) < 8:
        return unknown(f"{skipped} of {len(steps)} steps were skipped, too few to say")
    if skipped <= len(steps) / 2 or all(s.stepped for s in steps[-3:]):
        return OK
    return fires(
        f"{skipped} of {len(steps)} steps were skipped; the scale is now {steps[-1].scale:g}",
        "a few skips at the beginning",
        ERROR if skipped == len(steps) else WARN,
    )


@check("N25")
def epsilon_vanishes(e: Evidence) -> Fired | Verdict:
    """Weights in 16 bits turn to NaN at the first step, or those with a gradient of 0 do.

    Fires when an optimizer of torch adds an epsilon to a root in the dtype of the weights, and in
    that dtype the epsilon is 0: 1e-8 is less than half of what fp16 can hold (6e-8). It is an error
    when weights are NaN by now. Also when the epsilon of Adam or AdamW is a hundredth or more, and
    most gradients are ten times smaller (half of them four times, where the decay is the default
    and the betas are not: they were given by their places); but not where the rate was raised with
    it, to a twentieth of it or more: that is a descent with momentum.

    ERROR or WARN epsilon-vanishes: The optimizer's eps = {eps} is 0 in {dtype}, so where a gradient
    is 0 it divides 0 by 0. Fix: Keep the weights in fp32 and use autocast, or give eps=1e-4.
    WARN epsilon-vanishes/decides: {kind} divides gradients by their own size plus eps = {eps},
    which is far larger than they are: updates are {times} times too small, and it hardly learns.
    The fourth argument of {kind} is eps, and not weight_decay. Fix: {kind}(parameters, lr, betas,
    weight_decay={eps}), with names; eps=1e-8.
    """
    if not e.stepped:
        return unknown("no optimizer step was seen")
    if (large := _decides(e)) is not None:
        return large
    low = False
    for o in e.optimizers:
        if o.object is None or not o.kind.__module__.startswith("torch.optim"):
            continue
        for group in o.object.param_groups:
            eps = group.get("eps")
            if group.get("fused") or not isinstance(eps, float):
                continue
            for dtype in {
                p.dtype for p in group["params"] if p.is_floating_point() and p.dtype.itemsize < 4
            }:
                low = True
                if eps > 0 and not float(torch.tensor(eps, dtype=dtype)):
                    name, info = str(dtype).removeprefix("torch."), torch.finfo(dtype)
                    return fires(
                        f"{o.kind.__name__} has eps = {eps:g} for weights in {name}, where the "
                        "smallest number is "
                        f"{info.smallest_normal * info.eps:.1g}",
                        "an epsilon that is not 0 in the dtype of the weights",
                        ERROR if spoilt(e) else WARN,
                        eps=f"{eps:g}",
                        dtype=name,
                    )
    return (
        OK
        if low
        else not_applicable("no optimizer of torch with an epsilon holds weights below 32 bits")
    )


def _decides(e: Evidence) -> Fired | None:
    """Return an epsilon next to which the gradients of Adam are nothing."""
    for number, o in enumerate(e.optimizers):
        if o.object is None or not issubclass(o.kind, torch.optim.Adam | torch.optim.AdamW):
            continue
        eps, rate = (
            max(float(group[of]) for group in o.object.param_groups) for of in ("eps", "lr")
        )
        updates = [u for step in e.of(Step, optimizer=number) for u in step.updates if u.gradient]
        sizes = sorted(u.gradient / math.prod(u.shape) ** 0.5 for u in updates)
        raised = rate > USUAL and rate >= RAISED * eps
        if eps < LARGE or raised or len(sizes) < FEW:
            continue
        middle, kind = sizes[len(sizes) // 2], o.kind.__name__
        if sizes[len(sizes) * 3 // 4] < eps / 10 or _by_place(o) and middle < eps / 4:
            what = f"{kind} has eps = {eps:g}, and the middle gradient is {middle:.2g}"
            fault, times = "epsilon-vanishes/decides", f"{1 + eps / middle:.0f}"
            return fires(
                what,
                "an epsilon next to nothing",
                WARN,
                fault,
                kind=kind,
                eps=f"{eps:g}",
                times=times,
            )
    return None


def _by_place(o: Optimizer) -> bool:
    """Whether Adam looks as if its betas and its decay were given by their places: the decay, which
    came out as the epsilon, is the default itself.
    """
    usual = signature(o.kind).parameters
    betas, decay = (
        {group[of] for group in o.object.param_groups} for of in ("betas", "weight_decay")
    )
    return decay == {usual["weight_decay"].default} and betas.isdisjoint({usual["betas"].default})
