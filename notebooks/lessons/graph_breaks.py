"""Where a function falls out of the graph that torch.compile traces, and why:
`graph_breaks.breaks(function, *inputs)`.

Each break splits the graph in two and costs a return to Python. `torch._dynamo.explain` knows the
reason of each and the stack of the user's code, of which the last line is what to change.

Footgun: it forgets all that was compiled, before and after, so the next call of a compiled function
compiles again.
"""

import logging

import torch


def breaks(function, *args, **kwargs) -> dict:
    """Where tracing falls out of the graph: number of graphs, of breaks, and the reason with its
    line for each.
    """
    torch._dynamo.reset()
    logger = logging.getLogger("torch._dynamo")
    # it would also print each break, with its stack
    level, _ = logger.level, logger.setLevel(logging.ERROR)
    try:
        explained = torch._dynamo.explain(function)(*args, **kwargs)
    finally:
        logger.setLevel(level)
    where = []
    for reason in explained.break_reasons:
        frame = reason.user_stack[-1] if reason.user_stack else None
        line = f"{frame.filename}:{frame.lineno}" if frame else "unknown"
        where.append({"reason": reason.reason.splitlines()[0], "line": line})
    torch._dynamo.reset()
    return {"graphs": explained.graph_count, "breaks": explained.graph_break_count, "where": where}
