"""The sign with which a log-probability enters the loss: `(log_prob * advantage).mean()` without a minus.

    loss = -(log_prob * advantage).mean()                       what was better than expected becomes likelier
    loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    loss = -Normal(mean, spread).log_prob(y).mean()             what was seen becomes likelier

An optimizer makes a loss smaller, so what should grow needs a minus. Log-probabilities (of a distribution that learns,
of a log_softmax or a logsigmoid) are followed with their sign: through the exponential of a ratio, products with
weights that do not learn, the smaller of two, sums and means. Weights that were negated before have turned it. The
cosine of an answer and its target is followed in the same way, as long as it is the only term.

Footguns: where the weights are costs the sign is right, which is why this is a warning. Weights that are made of
log-probabilities themselves belong to a variational bound, and are left alone; so is an action with a gradient (SAC),
and the logsigmoid of something negated, which a generator may push down.
"""

from typing import Any, NamedTuple

from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import LOSSES
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES, TURNS

KEEPS = {"exp", "min", "minimum", "max", "maximum", "clamp", "clip", "stack", "cat", "sum", "mean", "view", "squeeze"}
KEEPS |= {"reshape", "flatten", "unsqueeze", "__getitem__", "to", "float", "gather"} | PLUS
KEEPS |= {"diag", "diagonal", "masked_select", "index_select", "select", "logsumexp"}
LOGS = {"log_softmax", "log_sigmoid"}
FROM = {"rsub", "__rsub__"}  # a number minus it: its sign is not known
TURNED = "turned"  # what was negated
DETACHED = "detached"  # what was computed with a graph, and has none any more
WEIGHTS = TIMES | OVER | MINUS | PLUS | {"view", "reshape", "squeeze", "unsqueeze", "detach"}
WEIGHTS |= {"__getitem__", "flatten", "float", "to", "expand", "clone"}
SCORE = "score"  # what is made of scores without a graph, or of a loss or a distance: its sign is not known
COSTS = {*LOSSES, "norm", "cdist", "pairwise_distance", "vector_norm", "linalg_norm"}
LOG, COSINE = "log", "cosine"


class Signed(NamedTuple):
    """What should grow, on its way to the loss."""

    sign: int
    weighted: bool = False  # by other numbers than shares and flags
    of: str = LOG


class Likelihoods(Watcher):
    """What is known of a tensor: Signed, TURNED or SCORE."""

    begins = LOGS | TIMES | OVER | MINUS | TURNS | COSTS | {"cosine_similarity", "detach", "data"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
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
        if name in ("detach", "data") and op.given[0].requires_grad and not signed:
            return SCORE if SCORE in facts else DETACHED
        if name in MINUS and not signed and [t.requires_grad for t in op.given] == [True, False]:
            return SCORE  # an answer minus what came, which is a regret
        if name in LOGS and learns:
            return Signed(1) if facts[0] != TURNED else None
        if name == "cosine_similarity" and learns:
            return Signed(1, of=COSINE)
        if not signed or not learns:
            if signed or SCORE in facts or name in COSTS:
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
        if op.name in MINUS and len(op.given) == 2 and self.known.get(op.given[0]) == DETACHED:
            return SCORE  # an answer of a critic minus what came: a regret
        if op.name in TURNS or op.name in TIMES | OVER and bool(numbers) and numbers[0] < 0:
            return None if TURNED in facts else TURNED
        return TURNED if TURNED in facts and op.name in WEIGHTS else None

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
        free = weights.numel() > 1 and not bool(((weights >= 0) & (weights <= 1)).all())
        return one._replace(weighted=one.weighted or free)

    def backward(self, loss: Tensor) -> None:
        fact = self.known.get(loss)
        if isinstance(fact, Signed) and fact.sign > 0 and not self.eye.rising:
            self.note("F63" if fact.weighted else "F71", fact.of)

    def close(self) -> None:
        self.known.by_id.clear()
