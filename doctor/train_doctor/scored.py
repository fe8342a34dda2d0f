"""Actions that are scored and were never taken: `dist.log_prob(dist.sample())` beside `env.step(dist.sample())`.

REINFORCE raises the log-probability of what was done by what it earned. Where the action is drawn a second time for its
log-probability, the reward is that of another one, and the mean of its gradient is zero. So each sample of a
distribution that learns is followed: was it scored, and was it an argument of anything else? In a step at fault one was
only scored, and another of its size was used and never scored.

Footgun: a sample that is only scored is an estimate of the entropy, and one that is only used is an evaluation. Both
together, in one step and of one size, are what is looked for.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op

KEPT = 4096


@dataclass
class Sample:
    round: int
    kind: str
    shape: torch.Size
    used: bool = False
    scored: bool = False


class Scored:
    def __init__(self, eye: Eye):
        self.eye, self.e, self.known = eye, eye.e, Known()
        self.samples: list[Sample] = []
        self.inside = 0  # a method of a distribution
        mine = weakref.proxy(self)
        for kind in vars(distributions).values():
            if isinstance(kind, type) and issubclass(kind, distributions.Distribution):
                if "sample" in vars(kind):
                    eye.at.around(kind, "sample", lambda *a, **k: mine.draw(*a, **k))
                if "log_prob" in vars(kind):
                    eye.at.around(kind, "log_prob", lambda *a, **k: mine.score(*a, **k))

    def draw(self, original: Callable, of: distributions.Distribution, *args, **kwargs) -> Tensor:
        if not self.eye.on:
            return original(of, *args, **kwargs)
        self.inside += 1
        try:
            sample = original(of, *args, **kwargs)
        finally:
            self.inside -= 1
        if not self.inside and not self.eye.at.blind and len(self.samples) < KEPT and _learns(of):
            self.samples.append(Sample(self.eye.turn, type(of).__name__, sample.shape))
            self.known.put(sample, self.samples[-1])
        return sample

    def score(self, original: Callable, of: distributions.Distribution, value: Any, *args, **kwargs) -> Tensor:
        if not self.eye.on:
            return original(of, value, *args, **kwargs)
        sample = self.known.get(value)
        if sample is not None and not self.inside:
            sample.scored = True
        self.inside += 1
        try:
            return original(of, value, *args, **kwargs)
        finally:
            self.inside -= 1

    def saw(self, op: Op) -> None:
        if not self.inside:
            for t in op.given:
                sample = self.known.get(t)
                if sample is not None:
                    sample.used = True

    def backward(self, loss: Tensor) -> None:
        pass

    def close(self) -> None:
        for one in self.samples:
            if one.scored and not one.used:
                like = [s for s in self.samples if (s.round, s.kind, s.shape) == (one.round, one.kind, one.shape)]
                if any(s.used and not s.scored for s in like):
                    self.e.misscored.setdefault(one.round, one.kind)
        self.samples.clear()


def _learns(of: distributions.Distribution) -> bool:
    parts = [v for v in vars(of).values() if isinstance(v, distributions.Distribution)]
    return any(isinstance(v, Tensor) and v.requires_grad for v in vars(of).values()) or any(map(_learns, parts))
