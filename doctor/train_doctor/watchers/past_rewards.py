"""Returns that are summed forward in time: an action is credited with what came before it.

    for r in reversed(rewards): running = r + gamma * running; returns.insert(0, running)
    for r in rewards:           running = r + gamma * running; returns.append(running)      the past of each step

Each sum `r + gamma * running` knows how many such sums are in it, and each log-probability when it was asked for. Where
they meet in a product, later actions must have fewer sums, not more. Actions of an episode that are scored together are
known by when they were drawn.

Sums of plain numbers of Python are not seen before they are a tensor. Rewards come in few kinds, so what is left of
each sum without gamma times the one before it (or after it) is one of a few numbers, for one of the usual gammas.

Footguns: a moving average scales both of its parts. Who reverses both lists is right, so a list of log-probabilities
that is not in the order of time says nothing. Rewards that are all different tell nothing as plain numbers, and nor do
powers of gamma, which have no rewards after the first. A mean of past rewards that is taken away is a baseline.
"""

from typing import Any

import torch
from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

STACKS = {"stack", "cat", "concat"}
KEEPS = {"view", "reshape", "squeeze", "unsqueeze", "float", "to", "detach", "flatten", "neg", "clone", "long", "int"}
KEEPS |= MINUS | OVER | TIMES
SCALED, SUMS, TIMES_OF = "scaled", "sums", "times"
DRAWS, PICKS, MAKES = {"multinomial", "bernoulli"}, {"gather", "__getitem__", "take_along_dim"}, {"tensor", "as_tensor"}
LEAST = 4  # steps of an episode
GAMMAS, LONG, FEW = (0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0), 8, 4  # steps of plain numbers; kinds of rewards


class PastRewards(Watcher):
    """What is known of a tensor: (SCALED, sums in it), (SUMS, [sums of each row]) or (TIMES_OF, [number of each])."""

    begins = TIMES | DRAWS | MAKES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.count = 0  # of log-probabilities
        self.pairs: list[tuple[int, int]] = []  # (when, how many sums), since the last backward
        self.drawn = 0  # samples
        self.of_distributions("log_prob", "score", after=True)
        self.of_distributions("sample", "draw", after=True)
        self.after(torch, "from_numpy", "made")

    def draw(self, result: Any, *of: Any, **how: Any) -> None:
        if isinstance(result, Tensor):
            self.drawn += 1
            self.known.put(result, (TIMES_OF, [self.drawn]))

    def made(self, result: Any, *given: Any, **how: Any) -> None:
        if not isinstance(result, Tensor) or result.dim() != 1 or not LONG <= len(result) <= 10_000:
            return
        if summed_forward(result):
            self.known.put(result, (SUMS, list(range(len(result)))))
        elif result.dtype is torch.int64:  # actions, in the order in which a list has them
            self.known.put(result, (TIMES_OF, list(range(len(result)))))

    def score(self, result: Any, of: distributions.Distribution, value: Any) -> None:
        if isinstance(result, Tensor) and result.requires_grad:
            self.count += 1
            taken = self.known.get(value) if isinstance(value, Tensor) else None
            together = taken is not None and len(taken[1]) >= LEAST  # of actions of an episode, put together
            self.known.put(result, taken if together else (TIMES_OF, [self.count]))

    def saw(self, op: Op) -> None:
        if op.name in DRAWS | MAKES:
            (self.draw if op.name in DRAWS else self.made)(op.result)
            return
        facts = [f for f in map(self.known.get, op.given) if f]
        made = None
        if op.name in PICKS:  # log-probabilities, by actions
            whole = len(op.given) == 2 or op.results and op.results[0].numel() == op.given[0].numel()
            made = facts[0] if whole and [f[0] for f in facts] == [TIMES_OF] else None
        elif op.name == "unbind" and facts and facts[0][0] != SCALED and len(facts[0][1]) == len(op.results):
            for n, r in zip(facts[0][1], op.results):
                self.known.put(r, (facts[0][0], [n]))
        elif op.name in TIMES and not any(t.requires_grad for t in op.given):
            made = self._scaled(op, facts)
        elif op.name in PLUS and [f[0] for f in facts] == [SCALED] and not op.given[0].requires_grad:
            made = SUMS, [facts[0][1] + 1]
        elif op.name in STACKS and len(op.given) >= LEAST and {f[0] for f in facts} in ({SUMS}, {TIMES_OF}):
            made = self._stacked(op, facts)
        elif op.name in TIMES and sorted(f[0] for f in facts) == [SUMS, TIMES_OF]:
            times, sums = (next(f[1] for f in facts if f[0] == kind) for kind in (TIMES_OF, SUMS))
            self.pairs += zip(times, sums) if len(times) == len(sums) and len(self.pairs) < 10_000 else ()
        elif op.name in MINUS and len(op.given) == 2 and _is_sums(self.known.get(op.given[1])):
            made = None  # a baseline
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


def _is_sums(fact: tuple | None) -> bool:
    return fact is not None and fact[0] == SUMS


def summed_forward(sums: Tensor) -> bool:
    """Whether each is a reward and gamma times the one before it, and not the one after it."""
    if not sums.is_floating_point() or sums.requires_grad:
        return False
    x = sums.detach().double().cpu()
    left = [(_kinds(x[1:] - gamma * x[:-1], x[0]), _kinds(x[:-1] - gamma * x[1:], x[-1])) for gamma in GAMMAS]
    forward, backward = min(f for f, _ in left), min(b for _, b in left)
    powers = bool(torch.isclose(x[1:] * x[0], x[1] * x[:-1], rtol=1e-4).all())
    return not powers and forward <= FEW < backward and 2 * forward < len(sums) and len(x.unique()) > FEW


def _kinds(rewards: Tensor, first: Tensor) -> int:
    """How many different rewards there are, the one that the sums begin with among them."""
    return len(torch.cat([rewards, first[None]]).mul(1e4).round().unique())
