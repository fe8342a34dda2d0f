"""`loopdoctor --overfit FILE.py`: the script trains on one batch, again and again, until it knows
it by heart.

A network that can learn at all can learn one batch by heart. To give a script one batch, every
DataLoader gives its first batch again, and after each step torch's, Python's and numpy's generators
are put back to where they were after the first, so that batches that are drawn are drawn alike (and
dropout drops the same units). What the model is given is compared from step to step: where it
differs the script has its batches from elsewhere, and nothing is said.

By heart: the loss has fallen below a tenth of what it was.

Footgun: it changes the run, unlike everything else here. It writes no file of its own, but the
script may, so its checkpoints and logs are those of a run on one batch.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader

from loopdoctor.attach import Attachments
from loopdoctor.draws import generators, restore
from loopdoctor.evidence import Evidence

HEART = 0.1  # of the first loss
PROVES = (
    "It proves that gradients reach enough weights, that the optimizer moves them the right "
    "way, and that the loss "
    "asks for something that this model can give."
)
CANNOT = (
    "It cannot prove that the data or the labels are right, that the model generalises, that "
    "it does not see its own "
    "targets (a leak learns by heart faster), that the rate suits a whole run, or that the "
    "evaluation is right."
)
CAUSES = (
    "Possible causes: the rate is too small for so few steps (try --steps), part of the model "
    "is frozen or in no "
    "optimizer, the inputs are lost on the way (a wrong reshape, all zeros), or this loss has "
    "a floor above 0 (soft "
    "targets, a penalty, a GAN, a VAE, rewards). `loopdoctor FILE.py` tells most of these apart."
)


class Enough(BaseException):
    """Ends the script; not an Exception, so that its own handlers let it through."""


class Held(NamedTuple):
    """How it went."""

    losses: list[float]
    same: bool  # the model was given the same in every step
    steps: int

    @property
    def code(self) -> int:
        """0 by heart, 1 not, 2 nothing can be said."""
        return 2 if len(self.losses) < 2 or not self.same else int(not self.by_heart)

    @property
    def by_heart(self) -> bool:
        return self.losses[-1] < HEART * self.losses[0]  # False for NaN

    def __str__(self) -> str:
        if len(self.losses) < 2:
            return (
                f"overfit: {self.steps} steps of an optimizer were seen, too few to say anything."
            )
        if not self.same:
            return (
                "overfit: the model was not given the same batch in every step, so nothing can "
                "be said. The script "
                "takes its batches neither from a DataLoader nor from random numbers; give it "
                "one batch by hand."
            )
        fell = (
            f"the loss went from {self.losses[0]:.4g} to {self.losses[-1]:.4g} in "
            f"{self.steps} steps on one batch"
        )
        if self.by_heart:
            return f"overfit: by heart, {fell}.\n{PROVES}\n{CANNOT}"
        return (
            f"overfit: NOT by heart, {fell}; below {HEART * self.losses[0]:.4g} was "
            f"expected.\n{CAUSES}"
        )


class _Learning:
    """Holds the batch, counts steps, notes losses."""

    def __init__(self, steps: int):
        self.steps, self.count = steps, 0
        self.losses: list[float] = []
        # first batch of each loader
        self.batches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.state: tuple | None = None  # of all generators after the first step
        self.given: list[Tensor] = []  # to the model, in this step
        self.first: list[Tensor] | None = None  # in the second step, from which on all is held
        self.same, self.inside = True, 0

    def attach(self, at: Attachments) -> None:
        at.around(DataLoader, "__iter__", self.again)
        at.around(torch.autograd, "backward", self.loss)
        module = nn.modules.module
        at.undo.append(module.register_module_forward_pre_hook(self.enter).remove)
        at.undo.append(module.register_module_forward_hook(self.leave, always_call=True).remove)
        at.undo.append(torch_optimizer.register_optimizer_step_post_hook(self.stepped).remove)

    def again(self, original: Callable, loader: DataLoader):
        for batch in original(loader):
            kept = self.batches.setdefault(loader, copy.deepcopy(batch))
            yield copy.deepcopy(kept)

    def loss(self, original: Callable, tensors: Any, *args, **kwargs) -> None:
        one = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        if isinstance(one, Tensor) and one.numel() == 1 and self.count >= len(self.losses):
            self.losses.append(float(one.detach()))
        return original(tensors, *args, **kwargs)

    def enter(self, module: nn.Module, args: tuple) -> None:
        self.inside += 1
        if self.inside == 1 and torch.is_grad_enabled() and module.training:
            self.given += [
                x.detach().clone() for x in args if isinstance(x, Tensor) and not x.requires_grad
            ]

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.inside = max(0, self.inside - 1)

    def stepped(self, optimizer, args, kwargs) -> None:
        self.count += 1
        if self.count == 1:
            self.state = generators()
        else:
            restore(self.state)
            self.first = self.given if self.first is None else self.first
            alike = len(self.given) == len(self.first) and all(
                map(torch.equal, self.given, self.first)
            )
            self.same &= alike
        self.given = []
        if self.count >= self.steps:
            raise Enough


def learn(run: Callable[[], None], steps: int) -> Held:
    """Run the script on one batch; what it raises itself passes through."""
    learning, at = _Learning(steps), Attachments(Evidence())
    learning.attach(at)
    try:
        run()
    except (Enough, SystemExit):
        pass
    finally:
        at.off()
    return Held(learning.losses, learning.same, learning.count)
