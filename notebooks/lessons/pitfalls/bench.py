"""What every demonstration owes the next one: the same draws each time, no noise on stderr, nothing left behind.

A pitfall that seeds the process for its own sake changes whatever is drawn after it, and one that compiles leaves
guards for the next model. So seeds, warnings and dynamo's memory are set inside a block here and put back after it,
whether it ends well or with an error.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nblib.runtime import seeded as seeded


def quiet(call: Callable, *args, **kwargs):
    """The result, and the warnings as text instead of lines on stderr."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # one that was given before counts too
        result = call(*args, **kwargs)
    return result, [str(w.message).splitlines()[0] for w in said]


@contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before, nothing left behind, and no word about what is being provoked."""
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._dynamo.reset()
