"""torch.compile: N18.

Footgun: torch._dynamo is only looked at when somebody has imported it already. Importing it takes seconds.
"""

import sys

from loopdoctor.check import Fired, check, fires
from loopdoctor.evidence import Evidence
from loopdoctor.finding import OK, Verdict, not_applicable, unknown

MANY = 8  # versions of one function; torch gives up after as many


@check("N18")
def recompiles(e: Evidence) -> Fired | Verdict:
    """The first steps of a compiled model are slow, and so are all after them.

    Counts how often torch.compile translated the same function during the watch, from torch's own records. Once is the
    start, a second and third time happen (gradients off, a last short batch, sizes marked dynamic). Eight times is
    torch's limit, after which the function runs without being compiled.

    WARN recompiles: torch.compile recompiles the same function again and again (a recompile for each new shape or
    number), and at its limit gives up and runs it uncompiled. Fix: Pad batches to a few lengths, or compile with
    dynamic=True; TORCH_LOGS=recompiles names what changes.
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
    reason = f"; the last because {reason.partition(': ')[2].splitlines()[0][:120]}" if ": " in reason else ""
    return fires(f"{name} was compiled {len(worst)} times{reason}", "once or twice")
