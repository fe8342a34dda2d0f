"""Which rates an optimizer had before its state was loaded and after, from the import of train_doctor on.

    optimizer = AdamW(model.parameters(), lr=1e-3)
    optimizer.load_state_dict(saved["optimizer"])       the rate is that at which the saved run had ended

The state of an optimizer holds the groups with their rates, and a second stage that takes the moments of the first one
takes its last rate as well. The load is over before a watch begins, so it is listened to, as loads.py does for modules.

Footgun: whoever goes on with the same run wants that rate, and has a scheduler, or a line, that goes on from it. So a
check has to ask whether anything moves the rate.
"""

import contextlib
import weakref
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

import torch
from torch.optim import Optimizer

MARK = "_train_doctor_ends"  # of the function that listens: what it has kept


class Loaded(NamedTuple):
    """Rates of each group."""

    built: tuple[float, ...]
    first: tuple[float, ...]  # with which the saved run had begun, where a scheduler has noted it; or else those loaded
    loaded: tuple[float, ...]


Kept = dict[int, tuple[weakref.ref, Loaded]]  # by id of an optimizer


def of(optimizer: Optimizer) -> Loaded | None:
    """Its last load, if there was one."""
    there = KEPT.get(id(optimizer))
    return there[1] if there is not None and there[0]() is optimizer else None


def _rates(optimizer: Optimizer, name: str = "lr") -> tuple[float, ...]:
    return tuple(float(group.get(name, group["lr"])) for group in optimizer.param_groups)


def _listening(original: Callable, kept: Kept) -> Callable:
    """The same function; nothing that fails in here may end a load. An optimizer need not be hashable."""

    @wraps(original)
    def load_state_dict(self, *args, **kwargs):
        try:
            built = _rates(self)
        except Exception:
            built = None
        result = original(self, *args, **kwargs)
        key = id(self)
        kept.pop(key, None)
        with contextlib.suppress(Exception):
            if built is not None and not torch.compiler.is_compiling():
                load = Loaded(built, _rates(self, "initial_lr"), _rates(self))
                kept[key] = weakref.ref(self, lambda ref: _forget(kept, key, ref)), load
        return result

    setattr(load_state_dict, MARK, kept)
    return load_state_dict


def _forget(kept: Kept, key: int, ref: weakref.ref) -> None:
    if kept.get(key, (None,))[0] is ref:
        del kept[key]


def _listen() -> Kept:
    """Once for each process, as in loads.py."""
    there = getattr(Optimizer.load_state_dict, MARK, None)
    if there is None:
        there = {}
        Optimizer.load_state_dict = _listening(Optimizer.load_state_dict, there)
    return there


KEPT = _listen()
