"""GradScaler, clipping and schedulers: what a loss was multiplied by, whether a step was skipped, when rates change.

Footgun: SequentialLR steps other schedulers inside its own step, and every scheduler steps once when it is made. Only
the outermost step of a scheduler that is under way is one that the loop made.
"""

import functools
from collections.abc import Callable

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from train_doctor.evidence import Clip, ScalerStep, Schedule, Step, Unscale
from train_doctor.state import State, quietly


class Scaling(State):
    """Sees scalers, the clipping that must come after `unscale_`, and schedulers."""

    @quietly
    def _clip(self, parameters, max_norm, total_norm=None, *args, **kwargs) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        total = float(total_norm) if isinstance(total_norm, Tensor) and gradients else None
        scaled = self.scaling and not self.unscaled
        ids = frozenset(id(p) for p in parameters)
        self.e.events.append(Clip(self.round, float(max_norm), total, not gradients, scaled, ids))

    @quietly
    def _scaled(self, scaler, *args, **kwargs) -> None:
        if scaler.is_enabled():
            self.scale, self.scaling, self.unscaled = float(scaler.get_scale()), True, False

    @quietly
    def _unscale(self, scaler, *args, **kwargs) -> None:
        if scaler.is_enabled():
            self.unscaled = True
            self.e.events.append(Unscale(self.round))

    def _watched_scaler_step(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def seen(scaler, optimizer, *args, **kwargs):
            before = len(self.e.of(Step)) if self.on else 0
            result = original(scaler, optimizer, *args, **kwargs)
            if self.on and not self.busy:
                self.stepped = True
                stepped = len(self.e.of(Step)) > before
                scale = float(scaler.get_scale())
                self.e.events.append(ScalerStep(self.round, scaler.is_enabled(), stepped, scale))
            return result

        return seen

    def _watched_schedule(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def seen(scheduler, *args, **kwargs):
            initial = getattr(scheduler, "_is_initial", False) or getattr(scheduler, "last_epoch", 0) == -1
            inner, self.scheduling = self.scheduling, True  # SequentialLR steps others
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self.scheduling = inner
                if not inner and not initial:
                    self._scheduled(scheduler)

        return seen

    @quietly
    def _scheduled(self, scheduler) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        index = self.seen.get(id(optimizer), -1)
        self.e.events.append(Schedule(self.round, index, isinstance(scheduler, ReduceLROnPlateau), id(scheduler)))
