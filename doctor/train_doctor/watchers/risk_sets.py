"""Risk sets of a survival model that run the wrong way: a running sum over rows from the shortest time to the longest.

    order = durations.argsort()                          descending=True is missing
    log_risk = torch.logcumsumexp(log_h[order], 0)       of those who left before, not of those who were still there

Cox's likelihood sets each event against all who were still at risk, those with a longer time. A running sum has these
behind it where times fall.

Footgun: times that were negated, and rows that were turned round before the sum, run the right way.
"""

from train_doctor.eye import Eye, Known, Op, Watcher

KEEPS = {"exp", "view", "squeeze", "unsqueeze", "reshape", "flatten", "sub", "add", "clamp", "__getitem__", "float"}
NEGATED, RISING, ROWS, SUMMED = range(1, 5)


class RiskSets(Watcher):
    begins = {"argsort", "sort", "neg", "negative"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        first, name = op.given[0], op.name
        if name in ("neg", "negative") and not first.requires_grad and op.results:
            return self.known.put(op.results[0], NEGATED)
        if name in ("argsort", "sort"):
            falls = op.kwargs.get("descending") or any(a is True for a in op.args[1:])
            if first.dim() == 1 and not first.requires_grad and not falls and self.known.get(first) != NEGATED:
                self.known.put(op.results[-1], RISING)
            return
        facts = [self.known.get(t) for t in op.given]
        if name in ("__getitem__", "index_select", "gather") and RISING in facts[1:] and first.requires_grad:
            self.known.put(op.results[0], ROWS)
        elif name == "logcumsumexp" and facts[0] == ROWS or name == "log" and facts[0] == SUMMED:
            self.note("F69", len(first))
        elif name == "cumsum" and facts[0] == ROWS:
            self.known.put(op.results[0], SUMMED)
        elif name in KEEPS and facts[0] in (ROWS, SUMMED) and op.results:
            self.known.put(op.results[0], facts[0])

    def close(self) -> None:
        self.known.by_id.clear()
