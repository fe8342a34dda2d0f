"""Returns that are summed forward in time: an action is credited with what came before it.

    for r in reversed(rewards): running = r + gamma * running; returns.insert(0, running)
    for r in rewards:           running = r + gamma * running; returns.append(running)      the past of each step

Each sum `r + gamma * running` knows how many such sums are in it, and each log-probability when it was asked for. Where
they meet in a product, later actions must have fewer sums, not more. Actions of an episode that are scored together are
known by when they were drawn.

Footguns: a moving average scales both of its parts. Who reverses both lists is right, so a list of log-probabilities
that is not in the order of time says nothing. Rewards that are plain numbers of Python are not seen.
"""

from typing import Any

from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

STACKS = {"stack", "cat", "concat"}
KEEPS = {"view", "reshape", "squeeze", "unsqueeze", "float", "to", "detach", "flatten", "neg", "clone"}
KEEPS |= MINUS | OVER | TIMES
SCALED, SUMS, TIMES_OF = "scaled", "sums", "times"
LEAST = 4  # steps of an episode


class PastRewards(Watcher):
    """What is known of a tensor: (SCALED, sums in it), (SUMS, [sums of each row]) or (TIMES_OF, [number of each])."""

    begins = TIMES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.count = 0  # of log-probabilities
        self.pairs: list[tuple[int, int]] = []  # (when, how many sums), since the last backward
        self.drawn = 0  # samples
        self.of_distributions("log_prob", "score", after=True)
        self.of_distributions("sample", "draw", after=True)

    def draw(self, result: Any, *of: Any, **how: Any) -> None:
        if isinstance(result, Tensor):
            self.drawn += 1
            self.known.put(result, (TIMES_OF, [self.drawn]))

    def score(self, result: Any, of: distributions.Distribution, value: Any) -> None:
        if isinstance(result, Tensor) and result.requires_grad:
            self.count += 1
            taken = self.known.get(value) if isinstance(value, Tensor) else None
            together = taken is not None and len(taken[1]) >= LEAST  # of actions of an episode, put together
            self.known.put(result, taken if together else (TIMES_OF, [self.count]))

    def saw(self, op: Op) -> None:
        facts = [f for f in map(self.known.get, op.given) if f]
        made = None
        if op.name in TIMES and not any(t.requires_grad for t in op.given):
            made = self._scaled(op, facts)
        elif op.name in PLUS and [f[0] for f in facts] == [SCALED] and not op.given[0].requires_grad:
            made = SUMS, [facts[0][1] + 1]
        elif op.name in STACKS and len(op.given) >= LEAST and {f[0] for f in facts} in ({SUMS}, {TIMES_OF}):
            made = self._stacked(op, facts)
        elif op.name in TIMES and sorted(f[0] for f in facts) == [SUMS, TIMES_OF]:
            times, sums = (next(f[1] for f in facts if f[0] == kind) for kind in (TIMES_OF, SUMS))
            self.pairs += zip(times, sums) if len(times) == len(sums) and len(self.pairs) < 10_000 else ()
        elif op.name in KEEPS and facts and len({f[0] for f in facts}) == 1 and facts[0][0] != SCALED:
            made = facts[0]
        for r in op.results if made else ():
            self.known.put(r, made)

    def _stacked(self, op: Op, facts: list) -> tuple | None:
        """The first sum is none where `running` begins as a number of Python: r + 0.9 * 0.0."""
        kind, each = facts[0][0], [self.known.get(t) for t in op.given]
        if kind == SUMS and None in (each[0], each[-1]) and each.count(None) == 1:
            each[each.index(None)] = SUMS, [0]
        return (kind, [n for f in each for n in f[1]]) if None not in each else None

    def _scaled(self, op: Op, facts: list) -> tuple | None:
        """gamma times a sum so far, which may be nothing yet."""
        numbers = [a for a in op.args if isinstance(a, int | float)]
        if len(op.given) == 1 and numbers and 0 < numbers[0] <= 1:
            sums = facts[0][1] if facts and facts[0][0] == SUMS and len(facts[0][1]) == 1 else [0]
            return SCALED, sums[0]
        return facts[0] if facts and facts[0][0] == SUMS else None

    def backward(self, loss: Tensor) -> None:
        pairs, self.pairs = self.pairs, []
        rising = [later[1] - before[1] for before, later in zip(pairs, pairs[1:]) if later[0] > before[0]]
        if len(rising) >= LEAST - 1 and all(d == 1 for d in rising):
            self.note("F96", len(pairs))

    def close(self) -> None:
        self.known.by_id.clear()
        self.pairs = []
