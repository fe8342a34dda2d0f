"""A test of the first tier may take five seconds: whoever needs more carries a mark, and `make test` leaves it out.

What counts is the processor time of a test and of the programs that it waited for, or the time by the clock where
that is less, so a busy machine makes no test slow. The fixtures of a test and the test itself are counted apart: a
module's fixture is paid by whichever of its tests runs first, so all of them carry the mark.

A slower processor gets more seconds. How much slower it is, is measured only when a test is over the limit: a fixed
piece of work against its time on the machine that the limit was set on. NBLIB_TEST_SECONDS sets the limit instead.
The same test needs up to twice its time where others share the caches and the memory, which that piece of work, done
a moment later, need not meet. So a test that is over the limit is told at the end, and fails from twice the limit on.

The long tests also come first, so that none of them is begun when another worker has nothing left to do.

Footgun: a test that sleeps uses no processor, and is not seen here.
"""

import os
import time
from collections.abc import Iterator

import pytest

SECONDS = 5.0  # on one core of an EPYC with AVX-512 BF16, where the work below takes the seconds of REFERENCE
REFERENCE = {"float32": 0.1, "bfloat16": 0.07}
MARKS = ("slow", "base", "kernel", "browser", "gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two halves with their long tests first: of two workers each does one, and the quicker one takes from the end of
    the other's. Tests of a file stay together, for their fixtures."""
    long = {item for item in items if any(map(item.get_closest_marker, MARKS))}
    files = list(dict.fromkeys(item.path for item in items if item in long))
    first, second = ([i for i in items if i in long and files.index(i.path) % 2 == half] for half in (0, 1))
    short = [item for item in items if item not in long]
    cut = max(0, len(items) // 2 - len(first))
    items[:] = [*first, *short[:cut], *second, *short[cut:]]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    began = _now()
    yield
    _refuse_slow(item, began, "its fixtures took")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    began = _now()
    yield
    _refuse_slow(item, began, "took")


def _refuse_slow(item: pytest.Item, began: tuple[float, float], what: str) -> None:
    seconds = min(end - start for start, end in zip(began, _now()))
    asked = float(os.environ.get("NBLIB_TEST_SECONDS", 0))
    if seconds <= (asked or SECONDS) or any(map(item.get_closest_marker, MARKS)):
        return
    allowed = asked or SECONDS * slowness()
    said = f"{what} {seconds:.1f} s without @pytest.mark.slow (allowed here: {allowed:.1f} s)"
    if seconds > 2 * allowed:
        pytest.fail(said, pytrace=False)
    if seconds > allowed:
        item.warn(pytest.PytestWarning(said))


def slowness() -> float:
    """How many times longer this machine needs now, at least 1; the kind of number it is worst at decides."""
    import torch

    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return max(1.0, *(_work(getattr(torch, dtype)) / seconds for dtype, seconds in REFERENCE.items()))
    finally:
        torch.set_rng_state(before)
        torch.set_num_threads(threads)


def _work(dtype) -> float:
    """Processor seconds of forty forwards and backwards through four layers."""
    import torch

    weights = [torch.randn(256, 256, dtype=dtype) for _ in range(4)]
    began = time.process_time()
    for _ in range(40):
        x = torch.randn(128, 256, dtype=dtype, requires_grad=True)
        for weight in weights:
            x = torch.nn.functional.silu(x @ weight) / 16
        x.square().mean().backward()
    return time.process_time() - began


def _now() -> tuple[float, float]:
    """Processor time of this process and of its children that have ended; time by the clock."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system, time.monotonic()
