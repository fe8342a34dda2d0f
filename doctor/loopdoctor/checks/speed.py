"""What makes a step slow: a model that is compiled again and again (N18), a host that waits for its
card (N19).

Footgun: torch._dynamo is only looked at when somebody has imported it already. Importing it takes
seconds.
"""

import sys
from collections import Counter

from loopdoctor.check import Fired, check, fires
from loopdoctor.evidence import Backward, Evidence
from loopdoctor.finding import NOTE, OK, WARN, Verdict, not_applicable, unknown
from loopdoctor.waits import HOST

MANY = 8  # versions of one function; torch gives up after as many
SHOWN = 3  # lines that are named


@check("N18")
def recompiles(e: Evidence) -> Fired | Verdict:
    """Return the first steps of a compiled model are slow, and so are all after them.

    Counts how often torch.compile translated the same function during the watch, from torch's own
    records. Once is the start, a second and third time happen (gradients off, a last short batch,
    sizes marked dynamic). Eight times is torch's limit, after which the function runs without being
    compiled.

    WARN recompiles: torch.compile recompiles the same function again and again (a recompile for
    each new shape or number), and at its limit gives up and runs it uncompiled. Fix: Pad batches to
    a few lengths, or compile with dynamic=True; TORCH_LOGS=recompiles names what changes.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return not_applicable("nothing was compiled")
    try:
        made = [m for m in dynamo.get_compilation_metrics() if (m.start_time or 0) >= e.started]
    except AttributeError:  # another version of torch
        return unknown("this torch keeps no records of compilations")
    frames: dict[str, list] = {}
    for metrics in made:
        frames.setdefault(str(metrics.compile_id).partition("/")[0], []).append(metrics)
    if not frames:
        return not_applicable("nothing was compiled during the watch")
    worst = max(frames.values(), key=len)
    if len(worst) < MANY:
        return OK
    name = next((m.co_name for m in worst if m.co_name), "a function")
    reason = next((m.recompile_reason for m in reversed(worst) if m.recompile_reason), "")
    reason = (
        f"; the last because {reason.partition(': ')[2].splitlines()[0][:120]}"
        if ": " in reason
        else ""
    )
    return fires(f"{name} was compiled {len(worst)} times{reason}", "once or twice")


@check("N19")
def host_waits(e: Evidence) -> Fired | Verdict:
    """Return the card is idle for part of each step, a smaller model or batch is hardly faster, and
    one core is fully busy.

    Counts how often the program's own lines ask an accelerator for a number between the forward
    pass and the optimizer's step: item, float, int, bool, tolist, nonzero, a mask as an index, a
    copy to the CPU. One read per step is what a guard or a log needs. More are worth knowing. It
    warns from more than two per micro-batch, because two may stand side by side, and then the
    second costs nothing. Reads inside installed libraries are left out, and on a CPU there is
    nothing to wait for.

    WARN or NOTE host-waits: The program asks the card ({device}) for numbers in the middle of the
    step (loss.item(), an if on a tensor, a mask as an index). At each the host waits until the card
    has done all its work, and launches nothing meanwhile. Fix: Ask the labels and masks while they
    are on the CPU, add up losses as tensors and read them once before the step; take ignore_index
    or torch.where in place of a mask. set_sync_debug_mode("warn") of torch.cuda names every wait.
    """
    if not e.accelerator:
        away = any(p.device.type not in HOST for p in e.parameters().values())
        return (
            unknown(e.opaque or "no call was seen")
            if away
            else not_applicable("no model is on an accelerator")
        )
    if len(e.waits) < 2:
        return unknown("fewer than two steps were seen")
    usual = _lower_median([sum(counts.values()) for counts in e.waits.values()])
    if usual < 2:
        return unknown(e.opaque) if e.opaque else OK
    micro = max(1, _lower_median([len(e.of(Backward, round=r)) for r in e.waits]))
    every = sum(e.waits.values(), Counter())
    told = ", ".join(
        f"{times / len(e.waits):.3g} x {place}" for place, times in every.most_common(SHOWN)
    )
    more = f", and {len(every) - SHOWN} lines more" if len(every) > SHOWN else ""
    return fires(
        f"{usual} reads from {e.accelerator} per step of {micro} "
        f"micro-batch{'es' * (micro > 1)}: {told}{more}",
        "one per step",
        WARN if usual > 2 * micro else NOTE,
        device=e.accelerator,
    )


def _lower_median(values: list[int]) -> int:
    return sorted(values)[(len(values) - 1) // 2]
