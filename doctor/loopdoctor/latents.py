"""Samples of a distribution whose parameters learn: drawn without a gradient, and what became of
them.

`sample()` gives a number without a gradient, `rsample()` one with. Both are right somewhere: an
action that is scored with `log_prob` afterwards needs none. So a sample is followed by weak
reference: was it given to a module that learns, was it ever scored?

Footgun: a subclass may have its own `sample`. Those with a gradient to lose inherit it from
Distribution, but Normal.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributions

from loopdoctor.attach import Part, quietly

KEPT = 64


@dataclass
class Latent:
    kind: str  # of the distribution
    round: int
    sample: Any  # weak reference
    of: Any  # the same, to the distribution
    entered: bool = False  # it was given to a module, with gradients on
    scored: bool = False  # its log_prob was asked for


class Latents(Part):
    def start(self) -> None:
        # distributions whose log_prob was asked for
        self.asked: weakref.WeakSet = weakref.WeakSet()
        for kind in (distributions.Distribution, distributions.Normal):
            self.at.around(kind, "sample", self._sample)
        for kind in vars(distributions).values():
            if isinstance(kind, type) and "log_prob" in vars(kind):
                self.at.around(kind, "log_prob", self._log_prob)

    def _sample(
        self, original: Callable, of: distributions.Distribution, *args, **kwargs
    ) -> Tensor:
        sample = original(of, *args, **kwargs)
        if not self.at.blind and torch.is_grad_enabled():
            self._note(of, sample)
        return sample

    @quietly
    def _note(self, of: distributions.Distribution, sample: Tensor) -> None:
        learns = any(isinstance(v, Tensor) and v.requires_grad for v in vars(of).values())
        if learns and of.has_rsample and not sample.requires_grad and len(self.e.latents) < KEPT:
            latent = Latent(type(of).__name__, self.e.rounds, weakref.ref(sample), weakref.ref(of))
            latent.scored = type(of).__hash__ is not None and of in self.asked
            self.e.latents.append(latent)

    def _log_prob(
        self, original: Callable, of: distributions.Distribution, value: Any, *args, **kwargs
    ) -> Tensor:
        self._score(of, value)
        return original(of, value, *args, **kwargs)

    @quietly
    def _score(self, of: distributions.Distribution, value: Any) -> None:
        """Score what was seen in place of the sample, which teaches the parameters as well."""
        if type(of).__hash__ is not None:  # one with an == of its own has none
            self.asked.add(of)
        for latent in self.e.latents:
            latent.scored |= latent.of() is of or latent.sample() is value and value is not None

    def given(self, args: tuple) -> None:
        """To a module, with gradients on."""
        for latent in self.e.latents if args else ():
            latent.entered |= latent.sample() is args[0] and args[0] is not None
