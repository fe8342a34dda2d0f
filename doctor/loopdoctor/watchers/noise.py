"""Noise that is drawn in a step: what it is mixed into, and which of it a loss asks for.

    noise = torch.randn_like(x0)
    xt = a * x0 + s * torch.randn_like(x0)          another draw
    loss = F.mse_loss(model(xt, t), noise)          nothing in xt tells of it: the best answer is 0

Each normal draw has a number, and what is computed from it carries that number, through the model up to the loss. A
target that is a draw, scaled perhaps, must be a draw that the answer carries. It is wrong where the answer carries
another draw of its size that was added to something else.

Noise from rand_like lies between 0 and 1, with a mean of 0.5, and is no noise that a sampler begins with.

A denoiser is asked for what is under the noise. Where its target is the very tensor that noise was added to, by name or
in place, it learns to give back its input.

Footgun: random targets are what tests of speed use, and random data with random noise is what a toy uses. So a target
that is more than a draw is left alone, and so is an answer to data that are nothing but a draw.
"""

from typing import NamedTuple

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher

NORMAL = {"randn", "randn_like", "normal"}
UNIFORM = {"rand", "rand_like", "uniform"}  # of which it is asked only whether it is mixed in and asked for
SUMS = {"add", "sub", "subtract", "lerp", "addcmul", "addcdiv", "rsub", "__rsub__"}
SAME = {  # scaled, or in another shape
    *("mul", "multiply", "div", "divide", "true_divide", "neg", "negative", "to", "type", "float", "double", "half"),
    *("view", "reshape", "flatten", "squeeze", "unsqueeze", "detach", "clone", "contiguous", "data", "type_as", "cpu"),
    *("permute", "transpose", "bfloat16", "requires_grad", "cuda"),
}
LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
POWERS = {"pow", "square", "abs", "norm", "linalg_norm", "vector_norm", "__pow__"}
NONE: frozenset[int] = frozenset()


class Draws(NamedTuple):
    of: frozenset[int]  # all that it was computed from
    pure: int = -1  # the one that it is, scaled perhaps
    mixed: frozenset[int] = NONE  # those that were added to something else
    right: bool | None = None  # for a difference of an answer and a draw: whether the answer carries it


class Noise(Watcher):
    begins = NORMAL | UNIFORM

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.sizes: dict[int, int] = {}  # of each draw
        self.uniform: set[int] = set()

    def close(self) -> None:
        self.known.by_id.clear()
        self.sizes.clear()
        self.uniform.clear()

    def saw(self, op: Op) -> None:
        result = op.result if isinstance(op.result, Tensor) else None
        drawn = op.name in NORMAL | UNIFORM and result is not None and not result.requires_grad
        if drawn and result.is_floating_point():
            number = len(self.sizes)
            self.sizes[number] = result.numel()
            if op.name in UNIFORM:
                self.uniform.add(number)
            return self.known.put(result, Draws(frozenset({number}), number))
        facts = [self.known.get(t) for t in op.given]
        if not any(facts):
            return
        if op.name in LOSSES:
            self._judge(*op.given[:2]) if len(op.given) > 1 else None
            return
        self._confirm(op, facts)
        if not op.results and result is None:
            return
        of = frozenset().union(*(f.of for f in facts if f is not None))
        mixed = frozenset().union(*(f.mixed for f in facts if f is not None))
        if op.name in SUMS and result is not None and not result.requires_grad:
            for t, fact in zip(op.given, facts):
                if fact is not None and fact.pure >= 0 and fact.pure not in mixed and t.numel() == result.numel():
                    others = [o for o in op.given if o is not t and o.numel() == t.numel()]
                    if any(fact.pure not in self._of(o) for o in others):
                        mixed |= {fact.pure}
        pure = -1
        if op.name in SAME and result is not None and facts[0] is not None or len(op.given) == 2 and op.name in SAME:
            large = [f for t, f in zip(op.given, facts) if result is not None and t.numel() == result.numel()]
            pure = large[0].pure if len(large) == 1 and large[0] is not None else -1
        right = None
        if op.name in ("sub", "subtract", "add") and len(op.given) == 2 and result is not None and result.requires_grad:
            right = self._right(*op.given)
        for r in op.results or ([result] if result is not None else []):
            self.known.put(r, Draws(of, pure if not r.requires_grad else -1, mixed, right))

    def _of(self, t: Tensor) -> frozenset[int]:
        fact = self.known.get(t)
        return NONE if fact is None else fact.of

    def _right(self, one: Tensor, two: Tensor) -> bool | None:
        """Whether an answer carries the draw that it is compared with; None where this is no such pair."""
        for answer, target in ((one, two), (two, one)):
            wanted = self.known.get(target)
            if not answer.requires_grad or target.requires_grad or wanted is None or wanted.pure < 0:
                continue
            has = self.known.get(answer) or Draws(NONE)
            if wanted.pure in self.uniform:
                continue
            if wanted.pure in has.of:
                return True
            size = self.sizes[wanted.pure]
            if any(self.sizes[d] == size and d not in wanted.of for d in has.mixed - self.uniform):
                return False
        return None

    def _judge(self, answer: Tensor, target: Tensor) -> None:
        self._note(self._right(answer, target))
        for t in (answer, target):  # one side may be a difference, the other zeros
            fact = self.known.get(t)
            self._note(None if fact is None else fact.right)

    def _confirm(self, op: Op, facts: list) -> None:
        squared = (
            op.name in POWERS or op.name in ("mul", "multiply") and len(op.given) == 2 and op.given[0] is op.given[1]
        )
        if squared and facts[0] is not None:
            self._note(facts[0].right)

    def _note(self, right: bool | None) -> None:
        if right is not None:
            self.e.noise.setdefault(right, set()).add(self.eye.turn)
