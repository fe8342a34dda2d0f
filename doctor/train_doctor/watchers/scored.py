"""Actions that are scored and were never taken: `dist.log_prob(dist.sample())` beside `env.step(dist.sample())`.

REINFORCE raises the log-probability of what was done by what it earned. Where the action is drawn a second time for its
log-probability, the reward is that of another one, and the mean of its gradient is zero. So each sample of a
distribution that learns is followed: was it scored, and was it an argument of anything else? In a step at fault one was
only scored, and another of its size was used and never scored; or the score of one that was used for nothing else is
multiplied by what was earned.

The score of a sample is followed further, to the product with what it earned. That must have no gradient: the product
`log_prob * f` has the gradient of f times log_prob in it, which is no part of any derivative that is wanted.

Footguns: a sample that is only scored is an estimate of the entropy, as long as nothing weighs it, and one that is only
used is an evaluation. Both together, in one step and of one size, are what is looked for. A factor that is made of a
score itself (an entropy) has a gradient rightly, and so may a single number (a temperature that learns).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher

KEPT = 4096


@dataclass
class Sample:
    round: int
    kind: str
    shape: torch.Size
    of: int  # number of the distribution that drew it
    used: bool = False
    scored: bool = False
    weighted: bool = False  # its score was multiplied by what was earned


FOLLOWED = {
    *("stack", "cat", "concat", "sum", "mean", "view", "reshape", "squeeze", "unsqueeze", "flatten", "neg", "exp"),
    *("sub", "subtract", "add", "__getitem__", "clamp", "clip", "transpose", "permute", "t", "T", "minimum", "min"),
    *("mul", "multiply", "div", "unbind", "split", "chunk"),
}


class Scored(Watcher):
    begins = frozenset()

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.samples: list[Sample] = []
        self.scores = Known(self)  # log-probabilities, and what is made of them
        self.inside = 0  # a method of a distribution
        self.of_distributions("sample", "draw")
        self.of_distributions("log_prob", "score")

    def draw(self, original: Callable, of: distributions.Distribution, *args, **kwargs) -> Tensor:
        if not self.eye.on:
            return original(of, *args, **kwargs)
        self.inside += 1
        try:
            sample = original(of, *args, **kwargs)
        finally:
            self.inside -= 1
        if not self.inside and not self.eye.at.blind and len(self.samples) < KEPT and _learns(of):
            self.samples.append(Sample(self.eye.turn, type(of).__name__, sample.shape, id(of)))
            self.known.put(sample, self.samples[-1])
        return sample

    def score(self, original: Callable, of: distributions.Distribution, value: Any, *args, **kwargs) -> Tensor:
        if not self.eye.on:
            return original(of, value, *args, **kwargs)
        sample = self.known.get(value)
        if sample is not None and not self.inside:
            sample.scored = True
            sample.used |= sample.of != id(of) and not _learns(of)  # judged by a prior, or a teacher
        self.inside += 1
        try:
            result = original(of, value, *args, **kwargs)
        finally:
            self.inside -= 1
        drawn = sample is not None and not value.requires_grad
        if drawn and not self.inside and isinstance(result, Tensor) and result.requires_grad:
            self.scores.put(result, sample)
        return result

    def saw(self, op: Op) -> None:
        if self.inside:
            return
        for t in op.given:
            sample = self.known.get(t)
            if sample is not None:
                sample.used = True
        if op.name in FOLLOWED and any(self.scores.get(t) for t in op.given):
            self._follow(op)

    def _follow(self, op: Op) -> None:
        others = [t for t in op.given if not self.scores.get(t)]
        if op.name in ("mul", "multiply") and len(others) == 1 and len(op.given) == 2:
            (other,) = others
            score = next(t for t in op.given if t is not other)
            if other.numel() > 1 and other.numel() == score.numel():
                self.e.factors.setdefault(other.requires_grad, set()).add(self.eye.turn)
                flags = bool(((other == 0) | (other == 1)).all())
                self.scores.get(score).weighted |= not other.requires_grad and not flags
        mine = next(filter(None, map(self.scores.get, op.given)))
        for r in op.results or op.given[:1]:
            if r.requires_grad:
                self.scores.put(r, mine)

    def close(self) -> None:
        for one in self.samples:
            if one.scored and not one.used:
                like = [s for s in self.samples if (s.round, s.kind, s.shape) == (one.round, one.kind, one.shape)]
                if one.weighted or any(s.used and not s.scored for s in like):
                    self.e.misscored.setdefault(one.round, one.kind)
        self.samples.clear()


def _learns(of: distributions.Distribution) -> bool:
    parts = [v for v in vars(of).values() if isinstance(v, distributions.Distribution)]
    return any(isinstance(v, Tensor) and v.requires_grad for v in vars(of).values()) or any(map(_learns, parts))
