"""The entropy of a policy that is added to the loss where it should be taken away.

    loss = pg_loss + 0.5 * value_loss + 0.01 * entropy.mean()       makes the policy sure of itself at once
    loss = pg_loss + 0.5 * value_loss - 0.01 * entropy.mean()       keeps it trying

What `Distribution.entropy()` gives is followed, with its sign, up to the loss.

    usage = probs.mean(0)                                           of a router over all tokens
    loss = ce + 0.1 * -(usage * usage.log()).sum()                  sends everything to one expert

So is the entropy of a mean over rows of shares that also choose (max, topk), or by which the answers of all experts are
mixed: what came of one and the same input by weights with an axis of experts, einsum("btd,kdh->bkth", x, w).

Footgun: sure answers are wanted elsewhere (test-time adaptation, labels that are guessed). So a log-probability of an
action must have been asked for in the same step, or experts have been chosen or mixed by the shares. Shares of inputs
(which variables a network looks at), of places and of rows of a table may well be meant to become few.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers import signs
from train_doctor.watchers.operators import OVER, PLUS, TIMES

CHOOSES, MEANS = {"max", "topk", "argmax", "sort"}, {"stack", "cat", "clamp_min", "clamp", "__getitem__", "view"}
GATE = "gate"  # the shares of what was chosen, by which its answers are multiplied
SHARES, USAGE, LOGGED, TERM = "shares", "usage", "log of usage", "usage * log"
LAID = "shares, laid across"
BENT = {"relu", "gelu", "silu", "tanh", "leaky_relu", "elu", "dropout", "layer_norm"} | PLUS  # place by place


class Answers(NamedTuple):
    """Of weights with an axis of their own to one input: the axes of the result that only the weights had."""

    axes: frozenset[int]


class Entropies(Watcher):
    """What is known of a tensor: signs, or which part of the entropy of a mean it is."""

    names = signs.FOLLOWED | CHOOSES | MEANS | BENT
    names |= {"softmax", "log", "unsqueeze", "reshape", "index_select", "einsum"}
    begins = {"softmax", "einsum"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # signs of entropies
        self.scored = False  # since the last backward
        self.chosen = False  # by shares whose mean was taken
        self.of_distributions("entropy", "asked")
        self.of_distributions("log_prob", "score")

    def asked(self, original: Callable, of: distributions.Distribution, *args, **kwargs) -> Tensor:
        entropy = original(of, *args, **kwargs)
        if self.eye.on and isinstance(entropy, Tensor) and entropy.requires_grad:
            self.known.put(entropy, frozenset({1}))
        return entropy

    def score(self, original: Callable, *args, **kwargs) -> Tensor:
        self.scored = True
        return original(*args, **kwargs)

    def saw(self, op: Op) -> None:
        facts = [self.known.get(t) for t in op.given]
        answers = next((f for f in facts if isinstance(f, Answers)), None)
        if op.name == "einsum" or answers is not None:
            self._experts(op, facts, answers)
            return
        if op.name == "unsqueeze" and SHARES in facts:
            self.known.put(op.result, LAID)
            return
        if op.name in CHOOSES and SHARES in facts and op.results:
            self.known.put(op.results[0], GATE)
            return
        if GATE in facts:
            others = [t for t, f in zip(op.given, facts) if f != GATE]
            self.chosen = self.chosen or op.name in TIMES and any(t.requires_grad and t.dim() > 1 for t in others)
            if op.name in MEANS | OVER | {"unsqueeze", "reshape", "index_select"} and isinstance(op.result, Tensor):
                self.known.put(op.result, GATE)
            return
        if (op.name == "softmax" or any(facts)) and isinstance(op.result, Tensor) and op.result.requires_grad:
            made = _usage(op, facts) or signs.followed(op, self.known)
            if made is not None:
                self.known.put(op.result, made)

    def _experts(self, op: Op, facts: list, answers: Answers | None) -> None:
        """Experts answer one input, or the shares mix what they answer."""
        shares = {SHARES, LAID} & {f for f in facts if isinstance(f, str)}
        if op.name == "einsum":
            self._einsum(op, facts)
        elif op.name in TIMES and shares:
            self.chosen = True
        elif op.name in BENT and isinstance(op.result, Tensor) and op.result.shape == op.given[0].shape:
            self.known.put(op.result, answers)

    def _einsum(self, op: Op, facts: list) -> None:
        equation = op.args[0] if op.args and isinstance(op.args[0], str) else ""
        left, arrow, out = equation.replace(" ", "").partition("->")
        terms = left.split(",")
        if not arrow or "." in equation or len(terms) != len(op.given) or not isinstance(op.result, Tensor):
            return
        weights = [t.is_leaf and t.requires_grad for t in op.given]
        theirs = [letters for letters, weight in zip(terms, weights) if weight]
        answered = {letters[a] for letters, f in zip(terms, facts) if isinstance(f, Answers) for a in f.axes}
        if SHARES in facts:
            expert = terms[facts.index(SHARES)][-1]
            self.chosen = self.chosen or expert in answered and expert not in out
            return
        given = "".join(letters for letters, weight in zip(terms, weights) if not weight)
        own = {a for a in "".join(theirs) if a in out and (a in answered or a not in given)}
        if own and given:
            self.known.put(op.result, Answers(frozenset(map(out.index, own))))

    def backward(self, loss: Tensor) -> None:
        if self.scored and not self.eye.rising and self.known.get(loss) == frozenset({1}):
            self.e.punished.add(self.eye.turn)
        if self.chosen and not self.eye.rising and self.known.get(loss) == frozenset({1}) and not self.scored:
            self.note("F62 routing", True)
        self.scored = self.chosen = False

    def close(self) -> None:
        self.known.by_id.clear()


def _usage(op: Op, facts: list) -> str | frozenset | None:
    """What a result is on the way from shares to the entropy of their mean, which begins as minus a sum."""
    fact = next((f for f in facts if isinstance(f, str)), None)
    if op.name == "softmax":
        return SHARES if op.given[0].dim() > 1 else None
    if fact in (SHARES, USAGE) and (op.name == "mean" or fact == SHARES):
        if op.name == "mean":
            dims = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
            dims = dims if isinstance(dims, tuple | list) else (dims,)
            kept = None not in dims and not {-1, op.given[0].dim() - 1} & set(dims)
            return USAGE if kept else None
        return SHARES if op.name in MEANS else None
    if fact == USAGE and op.name in TIMES and len(op.given) == 2 and LOGGED not in facts:
        other = op.given[1 - facts.index(USAGE)]  # the share of tokens that each expert was given
        return TERM if other.shape == op.given[facts.index(USAGE)].shape and not other.requires_grad else None
    if fact == USAGE and op.name in MEANS | PLUS | OVER:
        return USAGE
    if fact == USAGE and op.name == "log":
        return LOGGED
    if (
        op.name in TIMES
        and sorted(f for f in facts if isinstance(f, str)) == [USAGE, LOGGED][:: 1 if USAGE < LOGGED else -1]
    ):
        return TERM
    return frozenset({-1}) if fact == TERM and op.name == "sum" else None
