"""Two networks that should work against each other and want the same: the sign of an answer in the loss of each.

    d_loss = bce(d(real), ones) + bce(d(fake.detach()), zeros)      d wants its answer to what is made down
    g_loss = bce(d(fake), zeros)                                    and so does g, which should want it up

It is known of each tensor whose weights made it, by the optimizer that holds them. An answer to something that another
network made is followed to the loss: a constant target of 1 wants it up and one of 0 wants it down; a mean of answers
wants them down, and its negative wants them up. Each optimizer that steps after such a loss has said what it wants.

    both = torch.cat([fake, real]); bce(d(both), torch.cat([ones, zeros]))          the labels in the other order

Rows that were put together are told apart as long as they are as many.

Footguns: a policy and its critic are two such networks, but the critic's loss is a square, which wants neither. Parts
that step together after one backward want the same rightly.
"""

from torch import Tensor

from train_doctor.evidence import Step
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES, TURNS

LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
LAYERS |= {"embedding", "bilinear", "matmul", "addmm", "lstm", "gru"}
RISES = {"softplus", "sigmoid", "log_sigmoid", "log", "exp", "relu", "leaky_relu", "clamp", "mean", "sum", "tanh"}
KEEPS = {"view", "reshape", "squeeze", "flatten", "unsqueeze", "__getitem__", "detach", "data", "expand"}
BINARY = {"binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss"}
Fact = frozenset  # of pairs: the optimizers whose weights made it, and the sign


class Adversaries(Watcher):
    begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.owner: dict[int, int] = {}  # id of a weight -> number of its optimizer
        self.spans = Known(self)  # rows that were put together: first, last, and who made them
        self.blurred = False  # some loss was to grow
        self.count = 0  # of optimizers, when owners were last looked up
        self.pending: set[tuple[frozenset, int, int]] = set()  # made by, sign, round; since the last step
        self.steps = 0
        self.wants: dict[tuple[frozenset, int], set[int]] = {}  # (made by, who stepped) -> signs
        self.turns: dict[tuple[frozenset, int], set[int]] = {}  # the same -> rounds

    def saw(self, op: Op) -> None:
        if len(self.e.optimizers) < 2:
            return
        if len(self.e.optimizers) != self.count:
            self.count = len(self.e.optimizers)
            largest = sorted(enumerate(self.e.optimizers), key=lambda pair: -len(pair[1].ids))
            self.owner = {
                key: n for n, optimizer in largest for key in optimizer.ids
            }  # of two, the one that holds less
        owners = {self.owner[id(t)] for t in op.given if id(t) in self.owner}
        facts = [self.known.get(t) or Fact() for t in op.given]
        made = frozenset(owners).union(*(who for fact in facts for who, _ in fact))
        if not made:
            return
        spans = self._spans(op, facts)
        fact = Fact({(made, 1)}) if owners else self._followed(op, facts, made, spans)
        for r in op.results:
            if r.is_floating_point():
                self.known.put(r, fact)
                if spans and r.dim() and len(r) == spans[-1][1]:
                    self.spans.put(r, spans)

    def _spans(self, op: Op, facts: list[Fact]) -> tuple:
        """Which rows of what comes of this were made by whom."""
        if (
            op.name in ("cat", "concat")
            and len(op.given) == 2
            and op.args[1:] in ((), (0,))
            and not op.kwargs.get("dim")
        ):
            ends = len(op.given[0]), len(op.given[0]) + len(op.given[1])
            whose = [frozenset().union(*(who for who, _ in fact)) for fact in facts]
            return ((0, ends[0], whose[0]), (ends[0], ends[1], whose[1])) if whose[0] != whose[1] else ()
        return next((s for s in map(self.spans.get, op.given) if s), ())

    def _followed(self, op: Op, facts: list[Fact], made: frozenset, spans: tuple) -> Fact:
        first, name = facts[0] if facts else Fact(), op.name
        if name in BINARY and spans and len(op.given) > 1 and len(op.given[1]) == len(op.given[0]) == spans[-1][1]:
            each = [_wanted([op.given[0], op.given[1][a:b]]) for a, b, _ in spans]
            wider = [sign for sign, (_, _, who) in zip(each, spans) if who]  # of what another network made
            return Fact((made, sign) for sign in wider)
        if name in BINARY:
            return _times(first, _wanted(op.given)) if len(op.given) > 1 else Fact()
        if name in TURNS:
            return _times(first, -1)
        if name in MINUS:
            return first | (_times(facts[1], -1) if len(facts) > 1 else Fact())
        if name in PLUS:
            return Fact().union(*facts)
        if name in TIMES | OVER:
            numbers = [a for a in op.args if isinstance(a, int | float)]
            return _times(first, 1 if numbers[0] > 0 else -1) if numbers else _times(first, 0)
        if name in RISES or name in KEEPS:
            return first
        return Fact({(made, 0)})  # neither up nor down, as far as is known

    def backward(self, loss: Tensor) -> None:
        self._stepped()
        self.blurred = self.blurred or self.eye.rising
        self.pending |= {(*pair, self.eye.turn) for pair in self.known.get(loss) or () if len(pair[0]) > 1}

    def _stepped(self) -> None:
        """Who stepped since the last backward; where several did, nobody has said anything."""
        steps = self.e.every(Step)
        new, self.steps = {step.optimizer for step in steps[self.steps :]}, len(steps)
        if len(new) == 1:
            for made, sign, turn in self.pending:
                if new <= made:
                    self.wants.setdefault((made, *new), set()).add(sign)
                    self.turns.setdefault((made, *new), set()).add(turn)
        if new:
            self.pending = set()

    def close(self) -> None:
        self._stepped()
        for (made, who), signs in self.wants.items() if not self.blurred else ():
            others = [more for (of, other), more in self.wants.items() if of == made and other != who]
            if len(signs) == 1 and 0 not in signs and others and all(more == signs for more in others):
                for turn in self.turns[made, who]:
                    self.note("F65", next(iter(signs)), turn)
            more = self.e.optimizers[who]
            for of, other in self.wants:
                less = self.e.optimizers[other]
                if of == made and len(signs) == 1 and self.wants[of, other] == {-s for s in signs} != signs:
                    if less.ids < more.ids and less.ids & more.live:
                        for turn in self.turns[made, who]:
                            self.note("S36", (more.kind.__name__, len(less.ids)), turn)
        self.known.by_id.clear()
        self.spans.by_id.clear()


def _times(fact: Fact, sign: int) -> Fact:
    return Fact((made, sign * of) for made, of in fact)


def _wanted(given: list[Tensor]) -> int:
    """-1 where the target wants the answer up, for the loss falls with it; 1 for down, 0 for neither."""
    target = given[1]
    if target.requires_grad or not target.numel() or bool((target != target.flatten()[0]).any()):
        return 0
    label = float(target.flatten()[0])
    return 0 if not 0 <= label <= 1.2 else -1 if label >= 0.5 else 1
