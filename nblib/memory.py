"""Measure bytes: the peak of a block of code, over what was there before it.

CUDA counts every allocation, so its peak is exact. A CPU process has only its resident set: the kernel keeps the
high-water mark, and writing 5 to /proc/self/clear_refs sets it back. Large tensors are mapped and unmapped one by
one, so the mark is good to a few percent, provided that they are: glibc moves tensors of up to 32 MB into a pool as
soon as it has seen one freed, and the pool's gaps then count (up to three times too much has been seen). So while a
peak is measured on Linux everything from 64 KB on is mapped by itself, which costs a little time.

`Account` counts the tensors themselves and knows no allocator; on fake tensors it counts what a step would need.

Footgun: `ru_maxrss`, the usual answer, never goes down. Measured after a large step it reports the large step for
ever; here the mark is reset, and where it cannot be (macOS) a thread samples instead.
"""

import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak:
    """Filled when the block ends: bytes over the start, and where the figure comes from."""

    bytes: int = 0
    source: str = ""

    @property
    def gib(self) -> float:
        return self.bytes / 2**30


@contextmanager
def peak(device: torch.device | str = "cpu") -> Iterator[Peak]:
    """`with memory.peak() as p: ...` then `p.gib`: the most memory the block held beyond what was there before."""
    result = Peak()
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        yield result
        torch.cuda.synchronize(device)
        result.bytes, result.source = torch.cuda.max_memory_allocated(device) - start, "CUDA allocator"
        return
    _give_back_free_pages()
    _map_from(2**16)
    start = resident()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        yield result
        result.bytes, result.source = _status("VmHWM") - start, "kernel high-water mark"
    except (FileNotFoundError, PermissionError):
        with _sampled() as read:
            yield result
        result.bytes, result.source = read() - start, "sampled every millisecond"
    finally:
        _map_from(2**25)  # where glibc's own rule ends up after large tensors


class Account(TorchDispatchMode):
    """Counts the bytes of every storage made in the block for as long as it lives: exact, and without the allocator.

    Works on real tensors and on fake ones, where nothing is computed and nothing allocated.
    """

    def __init__(self, ignore: Iterable[Tensor] = ()):
        super().__init__()
        self.live = self.most = 0
        self.known = weakref.WeakSet(t.untyped_storage() for t in ignore)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.live += size
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.live -= size


def resident() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS") if os.path.exists("/proc/self/status") else 0


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _map_from(size: int) -> None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, size)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2 * size)  # M_TRIM_THRESHOLD, in glibc's own proportion
    except (OSError, AttributeError):
        pass


def _give_back_free_pages() -> None:
    try:  # glibc keeps freed memory; without this, a block could reuse it unseen
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except OSError:
        pass


@contextmanager
def _sampled() -> Iterator[Callable[[], int]]:
    import psutil

    process, most, done = psutil.Process(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: most
    finally:
        done.set()
        thread.join()
