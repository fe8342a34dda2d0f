"""Fixtures: nothing a test writes lands in the repository, except the base model, which is made
once for all.
"""

import gc
import os
import sys
import tempfile

if "PYTEST_XDIST_WORKER" in os.environ:
    # read when torch is imported: workers share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach out
os.environ.setdefault(
    "NBLIB_BASE", os.path.join(os.path.dirname(os.path.dirname(__file__)), "outputs", "base")
)
STORE = os.environ["NBLIB_BASE"]
os.environ["NBLIB_OUTPUTS"] = tempfile.mkdtemp(prefix="nblib-tests-")
os.environ["NBLIB_HEADLESS"] = "1"
os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = os.path.join(os.environ["NBLIB_OUTPUTS"], "hypothesis")

import pytest  # noqa: E402
import torch  # noqa: E402
import warm  # noqa: E402

from nblib import models, runtime, text  # noqa: E402
from nbworkbook import base_model  # noqa: E402

pytest_plugins = ["browser"]  # the fixture `lab`
MARKS = ("slow", "base", "kernel", "browser", "gpu")  # what `make test` leaves out
# For bf16 products of more than a toy: emulated they take fifty times as long as in fp32.
native_bf16 = pytest.mark.skipif(
    runtime.native_precision("cpu")[0] != "bf16", reason="this CPU emulates bf16"
)
FP32 = runtime.Machine(torch.device("cpu"), "fp32", "tests compare to the last digit")


def pytest_addoption(parser):
    parser.addoption(
        "--facts",
        help="a folder for what the runs of pitfalls measure: notebooks/lessons/pitfall_cache.py",
    )


def pytest_sessionstart():
    """The corpora are made once and stored, before any test or worker: a test that happens to be
    first is not slow.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for source in ("prose", "code"):
            text.documents(source)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported stays: no search for garbage need walk through it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    """Put long tests first, in two halves: of two workers each begins one, and none is left for the
    end.

    Tests of a file stay together, because they share fixtures.
    """
    long = [item for item in items if any(map(item.get_closest_marker, MARKS))]
    files = list(dict.fromkeys(item.path for item in long))
    first = [item for item in long if files.index(item.path) % 2 == 0]
    second = [item for item in long if files.index(item.path) % 2 == 1]
    short = [item for item in items if item not in set(long)]
    cut = max(0, len(items) // 2 - len(first))
    items[:] = [*first, *short[:cut], *second, *short[cut:]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item, load=base_model.load):
    """`make test` makes no base model, so a test that loads the stored one must say so."""

    def refused(recipe="default", **options):
        if os.environ["NBLIB_BASE"] == STORE and recipe in base_model.RECIPES:
            pytest.fail("base.load in a test without @pytest.mark.base", pytrace=False)
        return load(recipe, **options)

    base_model.load = load if item.get_closest_marker("base") else refused


@pytest.fixture(autouse=True)
def seeded():
    runtime.seed_all(0)
    yield
    torch.set_default_dtype(torch.float32)
    if "nbworkbook.runs" in sys.modules:
        # the run of a test is not that of the next one
        sys.modules["nbworkbook.runs"]._HERE.clear()


@pytest.fixture(scope="session")
def forked() -> warm.Warm:
    return warm.Warm()


@pytest.fixture
def machine() -> runtime.Machine:
    return FP32


@pytest.fixture
def tiny():
    """A two-layer Qwen3 with 256 tokens: milliseconds per step."""
    return models.tiny(256, hidden=32, layers=2, heads=2)


@pytest.fixture
def stream() -> torch.Tensor:
    """A learnable token stream: noisy counting."""
    steps = torch.randint(1, 4, (20_000,), generator=torch.Generator().manual_seed(1))
    return steps.cumsum(0) % 256


@pytest.fixture
def batches(stream) -> text.Batches:
    return text.Batches(stream, rows=4, length=32)
