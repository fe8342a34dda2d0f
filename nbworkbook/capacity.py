"""How many notebooks run at once here, and what each of them may use.

One per card; without a card one per core, as far as memory goes. A container may be given less
than the machine has, and the kernel says so in one of two ways (cgroups of version 1 and 2).

Footgun: `NEEDS_GIB` is a cautious share for a notebook of this workbook, no measured peak. A
notebook that loads a large model needs `--jobs 1`.
"""

import math
import os
import re
from pathlib import Path

from nbworkbook.jobs import gpus

NEEDS_GIB = 3  # of memory, set aside for each notebook
GROUP = "/sys/fs/cgroup/"


def capacity() -> int:
    """Return how many notebooks run at once."""
    if cards := gpus():
        return len(cards)

    cores = len(os.sched_getaffinity(0))
    quota = _numbers(
        f"{GROUP}cpu.max", f"{GROUP}cpu/cpu.cfs_quota_us", f"{GROUP}cpu/cpu.cfs_period_us"
    )
    if len(quota) == 2:  # without a limit only the period is a number
        cores = min(cores, math.ceil(quota[0] / quota[1]))

    available = _numbers("/proc/meminfo")[2] * 1024
    limits = _numbers(f"{GROUP}memory.max", f"{GROUP}memory/memory.limit_in_bytes")
    return max(1, min(cores, min([available, *limits]) // (NEEDS_GIB * 2**30)))


def share_of(slot: int, slots: int) -> dict[str, str]:
    """Return the variables that give one of several processes a card, or its part of the cores."""
    if slots == 1:
        return {}
    if cards := gpus():
        return {"CUDA_VISIBLE_DEVICES": cards[slot % len(cards)][0]}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // slots))}


def _numbers(*files: str) -> list[int]:
    """Return the numbers above 0 in those of the files that exist."""
    text = " ".join(Path(file).read_text() for file in files if Path(file).is_file())
    return [int(number) for number in re.findall(r"(?<!\S)[1-9]\d*\b", text)]
