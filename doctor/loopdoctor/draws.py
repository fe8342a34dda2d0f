"""The numbers that a program draws next: kept, and put back behind all that the watch calls on its
own.

Dropout draws from torch, a layer that is dropped at times from Python's random or numpy's: whoever
calls a model between two steps moves all of them on. Generators of the program's own are looked
after in reached.py.
"""

import random
import sys

import torch


def generators() -> tuple:
    """State of the generators of torch (the CPU's and every CUDA device's, if CUDA is in use),
    Python and numpy.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy = getattr(sys.modules.get("numpy"), "random", None)  # where the program uses it
    return (
        torch.get_rng_state(),
        cuda,
        random.getstate(),
        numpy.get_state() if numpy is not None else None,
    )


def restore(state: tuple) -> None:
    cpu, cuda, python, numpy = state
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)
