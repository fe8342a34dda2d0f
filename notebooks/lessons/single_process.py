"""A demonstration among several processes: each makes it by itself, as one process would.

`nblib train` executes every cell in each process, and what goes through THE loop is shared. A
pitfall, a Trainer that is shown beside the loop, or a training of two numbers is not: some would
save on one process and read on all, some cannot be cut, and some add over the processes where a
rule of vmap is missing. Inside `with alone()` nblib and the Hugging Face Trainer see one process.
As all processes have the same generators outside of the loop, all get the same result.

Footgun: the first Trainer of a process decides for all later ones whether it is alone (accelerate
keeps that), so every Trainer of a notebook is made inside of this.
"""

import contextlib
import os
from collections.abc import Iterator

from torch import distributed as dist

from nblib import parallel

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    parallel.MESH,
)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    joined, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        yield
    finally:
        dist.is_initialized = joined
        os.environ.update(hidden)
