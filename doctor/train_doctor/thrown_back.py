"""An average of the weights that was put into the model for a validation, and was left there.

    ema.store(model); ema.copy_to(model)
    validate(model)                                         ema.restore(model) is missing
    for batch in loader: ...                                goes on from the average, which is far behind

A few numbers of the weights are kept before and after each step. Where they changed in between, they are compared with
all that they had been: an average is a mean of these, with the same shares for every number, and many of them have one.

Footguns: Lookahead and Reptile also go back some of the way, and the best weights so far are loaded again. These are
made of one earlier state and the last, or of one alone. Weights that are changed after every step are projected, or
are an average on purpose. A mean of the latest weights keeps most of what was learned, and after a loss that rose, or
without a validation, to go back is meant. What is put in after the last step may be the average that is to be used.
An average that is put in when the validation is over is where the method goes on from (Switch EMA). And clients that
take turns in one model begin at one earlier state, again and again, and later at a mean.
"""

import torch
from torch import Tensor

from train_doctor.evidence import Backward, Call, Evidence

STEPS, TENSORS, NUMBERS = 32, 4, 64  # that are kept
SURE, SHARE, KEPT = 1e-2, 1e-4, 0.5  # left over; a share of an earlier state; of the way that the steps had gone


class Track:
    """Numbers of the weights of the only optimizer, before and after each of its steps, and at the first call between
    them."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self.at_call: dict[int, Tensor] = {}  # without gradients, by the steps before it

    def look(self, e: Evidence, *, stepped: bool) -> None:
        into = self.after if stepped else self.before
        due = len(self.before) - len(self.after) == stepped and (stepped or e.rounds == len(into))
        if len(e.optimizers) == 1 and len(into) <= STEPS and due and (now := _now(e)) is not None:
            into.append(now)

    def asked(self, e: Evidence) -> None:
        """The model is called without gradients."""
        steps, captures = len(self.after), torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        first = 0 < steps <= STEPS and steps == len(self.before) and steps not in self.at_call
        if not captures and first and len(e.optimizers) == 1:
            if (now := _now(e)) is not None:
                self.at_call[steps] = now

    def judge(self, e: Evidence) -> None:
        """At the end: note in which round the model was thrown back, and how much of its way was left."""
        self.look(e, stepped=False)
        before = [t.double().cpu() for t in self.before]
        after = [t.double().cpu() for t in self.after]
        if len({t.shape for t in before + after}) != 1:
            return
        changed = [t for t in range(1, len(before)) if not torch.equal(before[t], after[t - 1])]
        again = any(torch.equal(before[t], state) for t in changed for state in before[:t])
        for t in changed if 3 * len(changed) < len(before) and not again else ():
            asked = self.at_call.get(t)
            if asked is not None and not torch.equal(asked, self.before[t]):
                continue
            if _validated(e, t) and (left := _left(before[t], [before[0], *after[:t]])) is not None:
                e.habits["N36 back"][t] = left


def _now(e: Evidence) -> Tensor | None:
    held = e.optimizers[0].ids
    ps = [p.detach() for p in e.followed.values() if id(p) in held and p.dim() > 1 and p.is_floating_point()]
    return torch.cat([_few(p) for p in ps[:TENSORS] if p.device == ps[0].device]) if ps else None


def _few(p: Tensor) -> Tensor:
    flat = p.reshape(-1)
    return flat[:: max(1, flat.numel() // NUMBERS)][:NUMBERS].float().clone()


def _left(now: Tensor, states: list[Tensor]) -> float | None:
    """How much of the way from the first to the last state is left in a mean of all of them; None if it is no such
    mean, or is left for the most part."""
    first, last, back = states[0], states[-1], now - states[-1]
    ways = torch.stack([state - last for state in states[:-1]], 1)
    if not bool(torch.isfinite(ways).all() & torch.isfinite(back).all()) or len(back) < 4 * len(states):
        return None
    shares = torch.linalg.lstsq(ways, back[:, None], driver="gelsd").solution[:, 0]
    if float((ways @ shares - back).norm()) > SURE * float(back.norm()):
        return None
    mean = bool((shares > -SHARE).all()) and int((shares[1:] > SHARE).sum()) > 1
    left = float((now - first) @ (last - first) / (last - first).square().sum())
    return left if mean and left < KEPT else None


def _validated(e: Evidence, number: int) -> bool:
    """Whether the model was called without gradients before this step, after a loss that was lower than the first."""
    losses = [[b.value for b in e.of(Backward, round=at) if b.value is not None] for at in (0, number - 1)]
    asked = any(c.role == "model" and not c.grad for c in e.of(Call, round=number))
    return asked and all(losses) and min(losses[1]) < max(losses[0])
