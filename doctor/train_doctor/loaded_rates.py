"""Which rates an optimizer had before its state was loaded and after, from the import of train_doctor on.

    optimizer = AdamW(model.parameters(), lr=1e-3)
    optimizer.load_state_dict(saved["optimizer"])       the rate is that at which the saved run had ended

The state of an optimizer holds the groups with their rates, and a second stage that takes the moments of the first one
takes its last rate as well. The load is over before a watch begins, so it is listened to, as loads.py does for modules.

Footgun: whoever goes on with the same run wants that rate, and has a scheduler, or a line, that goes on from it. So a
check has to ask whether anything moves the rate.
"""

import contextlib
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

MARK = "_train_doctor_loaded_rates"  # of the function that listens: what it has kept


class Loaded(NamedTuple):
    """Rates of each group."""

    built: tuple[float, ...]
    first: tuple[float, ...]  # with which the saved run had begun, where a scheduler has noted it; or else those loaded
    loaded: tuple[float, ...]


def of(optimizer: Optimizer) -> Loaded | None:
    """Its last load, if there was one."""
    return KEPT.get(optimizer)


def _rates(optimizer: Optimizer, name: str = "lr") -> tuple[float, ...]:
    return tuple(float(group.get(name, group["lr"])) for group in optimizer.param_groups)


def _listening(original: Callable, kept: WeakIdKeyDictionary) -> Callable:
    """The same function; nothing that fails in here may end a load. Optimizers are known by id: one need not have a
    hash."""

    @wraps(original)
    def load_state_dict(self, *args, **kwargs):
        built = None
        with contextlib.suppress(Exception):
            kept.pop(self, None)
            built = _rates(self)
        result = original(self, *args, **kwargs)
        with contextlib.suppress(Exception):
            if built is not None and not torch.compiler.is_compiling():
                kept[self] = Loaded(built, _rates(self, "initial_lr"), _rates(self))
        return result

    setattr(load_state_dict, MARK, kept)
    return load_state_dict


def _listen() -> WeakIdKeyDictionary:
    """Once for each process, as in loads.py."""
    there = getattr(Optimizer.load_state_dict, MARK, None)
    if there is None:
        there = WeakIdKeyDictionary()
        Optimizer.load_state_dict = _listening(Optimizer.load_state_dict, there)
    return there


KEPT = _listen()
