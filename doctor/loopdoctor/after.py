"""After the watched steps: one hook that counts steps until the block is left, and what only shows
there.

    for epoch in range(10):
        for x, y in train: ...              steps 1 to 40 of each epoch; ten are watched
        model.eval(); accuracy(model)       and nobody calls model.train() again

Four things are looked at, for less than one part in a hundred of a tiny step: whether the parts
that were in train mode (dropouts, normalisations with statistics) still are when an optimizer
steps; whether a learning rate has become 0, or a millionth of what it was; whether that of a cosine
has come down and goes up again; and, at the 1st, 2nd, 4th, 8th, 16th ... of these steps, whether a
tensor that gets a gradient is in no optimizer. What was seen becomes a finding of the check that
looks for the same within the window (N16, N11, N9, S3), and says at which steps.

Footguns: late in a run statistics may be frozen on purpose, so all parts must be in eval mode,
dropouts and all. A schedule ends near 0, so the rate must be there for the last tenth of the steps
that were counted, and three at least.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import optimizer as torch_optimizer

from loopdoctor.check import Fired, fires
from loopdoctor.checks.rates import AGAIN, LOW
from loopdoctor.evidence import Evidence, Step
from loopdoctor.finding import WARN

LEAST, SHARE = 3, 0.1  # steps, in number and of all
PARTS = 64  # whose mode is looked at
TINY = 1e-6  # of the largest rate in the window
STATEFUL = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)


class After:
    """Attached when the window closes; `findings` takes it off again and tells what was seen."""

    def __init__(self, e: Evidence):
        self.first = e.rounds
        self.parts = list(e.awake or ())
        self.models = [weakref.ref(m) for m in e.models]
        self.known = {
            id(o.object): [weakref.ref(o.object), 0] for o in e.optimizers if o.object is not None
        }
        stepping = {s.optimizer for s in e.of(Step)}
        self.known = {
            key: entry for n, (key, entry) in enumerate(self.known.items()) if n in stepping
        }
        self.holding = [weakref.ref(o.object) for o in e.optimizers if o.object is not None]
        self.rates = {
            id(o.object): _largest(e, n) for n, o in enumerate(e.optimizers) if o.object is not None
        }
        self.outside = {id(p) for p in e.trainable().values()} - e.optimized()  # told already
        self.names = {id(p): name for name, p in e.parameters().items()}
        self.going_on: dict[int, bool] = {}  # by id of an optimizer
        # steps made while all parts were in eval mode; the same for the rates
        self.asleep: list[int] = []
        self.zero: list[int] = []
        self.tiny: list[int] = []
        self.cosines = list(e.cosines_of.values())
        # a rate and its step: the lowest, and one that rose from there
        self.low, self.again = (math.inf, 0), (0.0, 0)
        # tensors with a gradient that no optimizer holds -> steps
        self.missing: dict[int, list[int]] = {}
        self.steps, self.lowest, self.look = 0, 0.0, 1
        self.remove: Callable[[], None] = dict
        if self.known:
            self.remove = torch_optimizer.register_optimizer_step_post_hook(self._stepped).remove

    def _stepped(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        entry = self.known.get(id(optimizer))
        if entry is None or entry[0]() is not optimizer:
            entry = self.known[id(optimizer)] = [weakref.ref(optimizer), 0]
        entry[1] += 1
        if entry[1] <= self.steps:
            return  # of several optimizers the one that steps most often counts
        self.steps = entry[1]
        one = self.parts[0]() if self.parts and self._goes_on(optimizer) else None
        if (
            one is not None
            and not one.training
            and not any(m.training for ref in self.parts if (m := ref()))
        ):
            self.asleep.append(self.steps)
        rate, usual = optimizer.param_groups[0].get("lr"), self.rates.get(id(optimizer))
        if usual and rate is not None and rate < TINY * usual:
            rate = max(float(group.get("lr") or 0.0) for group in optimizer.param_groups)
            if rate < TINY * usual:
                (self.tiny if rate else self.zero).append(self.steps)
                self.lowest = max(self.lowest, rate)
        if self.cosines and usual and rate is not None and not self.again[1]:
            if rate < self.low[0]:
                self.low = float(rate), self.steps
            elif self.low[0] < LOW * usual < rate and rate > AGAIN * self.low[0]:
                past = [
                    s
                    for ref in self.cosines
                    if (s := ref()) is not None and s.optimizer is optimizer
                ]
                if any(s.last_epoch > getattr(s, "T_max", math.inf) for s in past):
                    self.again = float(rate), self.steps
        if self.steps == self.look:
            self.look *= 2
            self._look_at_gradients()

    def _goes_on(self, optimizer: Any) -> bool:
        """Whether it trains the model whose parts were awake. A new optimizer is another phase of
        training, in which a part may rest on purpose.
        """
        if id(optimizer) not in self.going_on:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            parts = {id(m) for ref in self.parts if (m := ref())}
            awake = [
                m
                for ref in self.models
                if (m := ref()) and any(id(part) in parts for part in m.modules())
            ]
            mine = any(id(p) in held for m in awake for p in m.parameters())
            self.going_on[id(optimizer)] = id(optimizer) in self.rates and mine
        return self.going_on[id(optimizer)]

    def _look_at_gradients(self) -> None:
        refs = (*self.holding, *(entry[0] for entry in self.known.values()))
        optimizers = [o for ref in refs if (o := ref()) is not None]
        held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for model in (m for ref in self.models if (m := ref()) is not None):
            if not any(id(p) in held for p in model.parameters()):
                continue  # a copy that learned a task, whose optimizer is gone
            for name, p in model.named_parameters():
                if (
                    p.requires_grad
                    and p.grad is not None
                    and id(p) not in held
                    and id(p) not in self.outside
                ):
                    self.names[id(p)] = name
                    self.missing.setdefault(id(p), []).append(self.steps)

    # ---------------------------------------------------------------- in the end
    def findings(self) -> list[tuple[str, Fired]]:
        """Return what was seen, each with the id of its check."""
        self.remove()
        told = []
        if self._lasting(self.asleep):
            told.append(
                (
                    "N16",
                    fires(self._at(self.asleep, "made in eval mode"), "train mode", WARN, after=""),
                )
            )
        usual = f"a rate nearer to the {max(self.rates.values(), default=0.0):.3g} of before"
        if self._lasting(self.zero):
            why = "the schedule has run out: it was built for fewer steps than are made"
            told.append(
                ("N11", fires(self._at(self.zero, "made with a rate of 0"), usual, WARN, why=why))
            )
        elif self._lasting(self.tiny):
            what = f"made with a rate of {self.lowest:.3g} or less"
            told.append(
                ("N11", fires(self._at(self.tiny, what), usual, WARN, "learning-rate-zero/tiny"))
            )
        if self.again[1]:
            what = [
                f"{rate:.2g} in step {self.first + step}" for rate, step in (self.low, self.again)
            ]
            wanted = "a rate that falls to the end of the run"
            told.append(
                (
                    "N9",
                    fires(
                        f"the rate was {' and '.join(what)}", wanted, WARN, "schedule-comes-back"
                    ),
                )
            )
        lost = [
            self.names[key]
            for key, steps in self.missing.items()
            if len(steps) > 1 and steps[-1] * 2 == self.look
        ]
        if lost:
            what = (
                f"{len(lost)} tensors got a gradient after the watched steps and were in no "
                "optimizer: "
            )
            told.append(
                (
                    "S3",
                    fires(
                        what + ", ".join(lost[:4]), "0 missing over all optimizers together", WARN
                    ),
                )
            )
        return told

    def _lasting(self, steps: list[int]) -> bool:
        """Whether the last of the steps are all among them."""
        last = max(LEAST, math.ceil(SHARE * self.steps))
        return (
            len(steps) >= last and steps[-1] == self.steps and steps[-last] == self.steps - last + 1
        )

    def _at(self, steps: list[int], what: str) -> str:
        many = f"{len(steps)} of the {self.steps} steps after the watched ones"
        return f"{many} were {what}, from step {self.first + steps[0]} on"


def awake(e: Evidence) -> list[weakref.ref]:
    """Parts in train mode to which that makes a difference; asked once, after the first step."""
    parts = {
        id(m): m for _, m in e.modules() if isinstance(m, STATEFUL) and m.training and _counts(m)
    }
    return [weakref.ref(m) for m in list(parts.values())[:PARTS]]


def _counts(m: nn.Module) -> bool:
    return m.p > 0 if isinstance(m, nn.modules.dropout._DropoutNd) else m.track_running_stats


def _largest(e: Evidence, optimizer: int) -> float:
    return max(
        (float(r) for s in e.of(Step, optimizer=optimizer) for r in s.rates if r == r), default=0.0
    )
