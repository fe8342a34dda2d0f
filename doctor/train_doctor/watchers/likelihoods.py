"""The sign with which a log-probability enters the loss: `(log_prob * advantage).mean()` without a minus.

    loss = -(log_prob * advantage).mean()                       what was better than expected becomes likelier
    loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    loss = -Normal(mean, spread).log_prob(y).mean()             what was seen becomes likelier

An optimizer makes a loss smaller, so what should grow needs a minus. Log-probabilities (of a distribution that learns,
of a log_softmax or a logsigmoid) are followed with their sign: through the exponential of a ratio, products with
weights that do not learn, the smaller of two, sums and means. Weights that were negated before have turned it. A value
minus what came (`values - returns`) is a regret, with which a loss should grow, where a critic learns by a regression.
The cosine of an answer and its target is followed in the same way, as long as it is the only term.

Footguns: where the weights are costs the sign is right, which is why this is a warning. Weights that are made of
log-probabilities themselves belong to a variational bound, and are left alone; so is an action with a gradient (SAC),
and the logsigmoid of something negated, which a generator may push down.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import LOSSES
from train_doctor.watchers.operators import MINUS, OVER, PLUS, POWERS, TIMES, TURNS

KEEPS = {"exp", "min", "minimum", "max", "maximum", "clamp", "clip", "stack", "cat", "sum", "mean", "view", "squeeze"}
KEEPS |= {"reshape", "flatten", "unsqueeze", "__getitem__", "to", "float", "gather"} | PLUS
KEEPS |= {"diag", "diagonal", "masked_select", "index_select", "select", "logsumexp"}
LOGS = {"log_softmax", "log_sigmoid"}
FROM = {"rsub", "__rsub__"}  # a number minus it: its sign is not known
TURNED = "turned"  # what was negated
DETACHED = "detached"  # what was computed with a graph, and has none any more; also what a layer answered without one
MIXED = "mixed"  # what was computed of such
WEIGHTS = TIMES | OVER | MINUS | PLUS | {"view", "reshape", "squeeze", "unsqueeze", "detach"}
WEIGHTS |= {"__getitem__", "flatten", "float", "to", "expand", "clone"}
LOOKED = 4096  # numbers
POWER, RUNNING, RISKS = "power", "running", "risks"  # exponentials, their running sums, and logarithms of these
REGRET = "regret"  # what was answered minus what came
LAID = {"view", "reshape", "squeeze", "unsqueeze", "detach", "__getitem__", "flatten", "float", "to", "cat", "stack"}
NORMALISED = LAID | TIMES | OVER | MINUS | PLUS | {"expand", "clone", "data"}
SCORE = "score"  # what is made of scores without a graph, or of a loss or a distance: its sign is not known
REGRESSIONS = {"mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss"}
COSTS = {*LOSSES, "norm", "cdist", "pairwise_distance", "vector_norm", "linalg_norm"}
LOG, COSINE = "log", "cosine"


class Signed(NamedTuple):
    """What should grow, on its way to the loss."""

    sign: int
    weighted: bool = False  # by other numbers than shares and flags
    of: str = LOG
    regret: bool = False  # weighted by one


class Likelihoods(Watcher):
    """What is known of a tensor: Signed, TURNED or SCORE."""

    begins = LOGS | TIMES | OVER | MINUS | TURNS | COSTS | {"linear", "logcumsumexp"}
    begins |= {"cosine_similarity", "detach", "data", "exp"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.critic = False  # whether a regression on what came was seen
        self.asked: list[Tensor] = []  # of answers by a regression, in this step
        self.came: list[Tensor] = []  # what answers were subtracted from, in this step
        self.of_distributions("log_prob", "score", after=True)

    def score(self, result: Any, of: distributions.Distribution, value: Any) -> None:
        if isinstance(result, Tensor):
            learns = result.requires_grad and not (isinstance(value, Tensor) and value.requires_grad)
            self.known.put(result, Signed(1) if learns else SCORE)

    def saw(self, op: Op) -> None:
        made = self._made(op, [self.known.get(t) for t in op.given])
        for r in op.results if made else ():
            self.known.put(r, made)

    def _made(self, op: Op, facts: list) -> Any:
        name, signed = op.name, [f for f in facts if isinstance(f, Signed)]
        learns = any(r.requires_grad for r in op.results)
        if facts[:1] == [REGRET] and not signed:
            return self._of_regret(op)
        if name in ("detach", "data") and op.given[0].requires_grad and not signed:
            return SCORE if SCORE in facts else DETACHED
        if name in MINUS and not signed and [t.requires_grad for t in op.given] == [True, False]:
            return SCORE if facts[1] in (DETACHED, MIXED) else self._regret(op)
        if name in REGRESSIONS and learns and len(op.given) > 1:
            self.critic |= any(_among(op.given[1], came) for came in self.came)
            self.asked.append(op.given[1])
        if learns and not signed and (made := _risks(op, facts)):
            return made
        if name in LOGS and learns:
            return Signed(1) if facts[0] != TURNED else None
        if name == "cosine_similarity" and learns:
            return Signed(1, of=COSINE)
        if not signed or not learns:
            if signed or SCORE in facts or REGRET in facts or name in COSTS:
                return SCORE
            return None if learns and name not in TURNS else self._of_weights(op, facts)
        one, alone = signed[0], len([t for t in op.given if t.requires_grad]) == 1
        if one.of == COSINE and not alone:
            return None
        if name in TURNS or name == "nll_loss":
            return one._replace(sign=-one.sign)
        if name in MINUS:
            first = isinstance(facts[0], Signed)
            return None if len(signed) > 1 else one if first else one._replace(sign=-one.sign)
        if name in TIMES:
            return self._weighed(op, facts, one)
        if name in OVER:
            return one if isinstance(facts[0], Signed) and len(signed) == 1 else None
        return one if name in KEEPS and len(set(signed)) == 1 else None

    def _of_weights(self, op: Op, facts: list) -> str | None:
        """Whether weights were negated on their way."""
        numbers = [a for a in op.args if isinstance(a, int | float)]
        if op.name in FROM:
            return SCORE
        if op.name == "linear":
            return DETACHED if op.result.shape[-1] == 1 else None  # a value
        if facts[:1] == [DETACHED] and op.name in LAID:
            return DETACHED
        if DETACHED in facts or MIXED in facts:
            return self._of_answers(op, facts)
        if op.name in TURNS or op.name in TIMES | OVER and bool(numbers) and numbers[0] < 0:
            return None if TURNED in facts else TURNED
        return TURNED if TURNED in facts and op.name in WEIGHTS else None

    def _of_answers(self, op: Op, facts: list) -> str | None:
        """What came may hold the value of what follows: reward + gamma * value."""
        if op.name in MINUS and len(op.given) == 2 and (facts[0], facts[1]) == (DETACHED, None):
            one, other = op.given
            per_row = one.shape == other.shape and max(one.shape, default=0) == one.numel() > 1
            return self._regret(op) if per_row else SCORE
        return None if op.name in PLUS and None in facts else MIXED

    def _regret(self, op: Op) -> str:
        self.came = [*self.came[-7:], op.given[1]]
        self.critic |= any(_among(asked, op.given[1]) for asked in self.asked)
        return REGRET

    def _of_regret(self, op: Op) -> str:
        """A regret that is shifted, scaled or laid out anew is one still; of all else the sign is not known."""
        self.critic |= op.name in POWERS and op.given[0].requires_grad
        signs = [a for a in op.args if isinstance(a, int | float) and a < 0]
        return REGRET if op.name in NORMALISED and not signs else SCORE

    def _weighed(self, op: Op, facts: list, one: Signed) -> Signed | None:
        numbers = [a for a in op.args if isinstance(a, int | float)]
        if numbers and not numbers[0]:
            return None  # a weight that warms up
        if numbers:
            return one._replace(sign=one.sign if numbers[0] > 0 else -one.sign)
        if len(op.given) != 2:
            return None
        at = 1 if isinstance(facts[0], Signed) else 0
        weights, of = op.given[at], facts[at]
        if weights.requires_grad or of in (SCORE, TURNED) or isinstance(of, Signed):
            return None  # what was negated may be a gain, or costs that became one
        if of == REGRET:
            return one._replace(regret=True)
        free = weights.numel() > 1 and not bool(((weights >= 0) & (weights <= 1)).all())
        return one._replace(weighted=one.weighted or free)

    def backward(self, loss: Tensor) -> None:
        fact = self.known.get(loss)
        self.came, self.asked = [], []
        if not isinstance(fact, Signed) or self.eye.rising:
            return
        if fact.regret and fact.sign < 0 and self.critic:
            self.note("F63", REGRET)
        elif fact.sign > 0 and not fact.regret:
            self.note("F63" if fact.weighted else "F71", fact.of)

    def close(self) -> None:
        self.known.by_id.clear()
        self.came, self.asked = [], []


def _risks(op: Op, facts: list) -> Any:
    """Cox's partial likelihood: a number minus the logarithm of a running sum of exponentials, its own among them."""
    name, fact, of = op.name, facts[0] if facts else None, id(op.given[0]) if op.given else 0
    if name in MINUS and len(facts) == 2:
        ends = [(1, facts[1], of), (-1, fact, id(op.given[1]))]
        return next((Signed(sign) for sign, f, own in ends if f == (RISKS, own)), None)
    if name in ("logcumsumexp", "exp"):
        return (RISKS if name == "logcumsumexp" else POWER, of)
    if name in ("cumsum", "log") and isinstance(fact, tuple) and not isinstance(fact, Signed):
        after = {("cumsum", POWER): RUNNING, ("log", RUNNING): RISKS}.get((name, fact[0]))
        return (after, fact[1]) if after else None
    return None


def _among(some: Tensor, of: Tensor) -> bool:
    """Whether all numbers of one are among those of the other, as those of a part of the rows are."""
    if some is of:
        return True
    alike = some.dtype == of.dtype and some.device == of.device and 1 < some.numel() <= of.numel() <= LOOKED
    return alike and not some.requires_grad and bool(torch.isin(some.detach(), of.detach()).all())
