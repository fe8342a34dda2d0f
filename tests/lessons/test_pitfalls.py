"""Every pitfall both ways: broken shows the symptom, fixed does not, and the claim holds or fails
as said.

Each run is made here once for the whole suite: where the doctor can see it, it watches
(diagnosis.py), and with `--facts FOLDER` what the run measured is kept for the notebooks, which
show it (notebooks/lessons/pitfall_cache.py).
"""

import os
import random
import re
import sys
import threading
import types
import warnings
from pathlib import Path

import pytest
import torch
import transformers as tf
from diagnosis import facts_of

from lessons import pitfall_cache, pitfalls, trials
from lessons.pitfalls import bench
from nblib import paths, runtime


@pytest.fixture(scope="module", autouse=True)
def cached_model():
    """Trained before anybody watches: a watch would see the run that fills the cache."""
    bench.trained()


@pytest.fixture(autouse=True)
def one_thread():
    """The models are so small that two threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


CATALOGUE = list(pitfalls.catalogue())


def _marked(p):
    return pytest.param(p, id=p.id, marks=[pytest.mark.slow] if p.slow else [])


def _process() -> dict:
    """What a run could leave behind for the next one."""
    return {
        "torch's generator": torch.get_rng_state().tolist(),
        "python's generator": random.getstate(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "warning filters": list(warnings.filters),
        "verbosity": tf.utils.logging.get_verbosity(),
        "environment": {
            name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
        },
    }


@pytest.fixture
def as_it_was():
    before = _process()
    yield
    changed = [name for name, value in _process().items() if value != before[name]]
    assert not changed, f"left behind: {', '.join(changed)}"


@pytest.fixture
def made(request):
    """Makes a run, and writes its facts down for the notebooks if they are asked for."""
    folder = request.config.getoption("--facts")

    def make(p: pitfalls.Pitfall, run: str) -> tuple[dict, set]:
        executed = set()

        def trace(frame, *_) -> None:  # None: lines are not traced
            executed.add(frame.f_code)

        before, in_threads = sys.gettrace(), threading.gettrace()
        sys.settrace(trace)
        threading.settrace(trace)
        try:
            measured = facts_of(p, run)
        finally:
            sys.settrace(before)
            threading.settrace(in_threads)
        if folder:
            pitfall_cache.write(Path(folder), p.id, run, measured)
        return measured, executed

    return make


@pytest.mark.parametrize("pitfall", [_marked(p) for p in CATALOGUE])
def test_broken_breaks_fixed_holds_and_the_claim_is_as_said(pitfall, as_it_was, made):
    try:
        (broken, then), (fixed, now) = made(pitfall, "broken"), made(pitfall, "fixed")
    except pitfalls.Unavailable as reason:
        pytest.skip(str(reason))
    assert pitfall.seen(broken), f"{pitfall.id} no longer shows its symptom: {broken}"
    assert not pitfall.seen(fixed), f"{pitfall.id} still shows its symptom with the fix: {fixed}"
    if pitfall.claimed is not None:
        claimed, _ = made(pitfall, "claimed")
        assert pitfall.seen(claimed) == pitfall.claim_holds, (
            f"{pitfall.id}: the claimed cause alone gave {claimed}"
        )

    wrong, right = codes(pitfall.wrong), codes(pitfall.right)
    assert wrong & then and not wrong & now, (
        f"{pitfall.id}: the broken run alone must execute what is shown for it"
    )
    assert right & now, f"{pitfall.id}: the fixed run must execute what is shown for it"


def codes(thing) -> set:
    """The code objects of a function, or of all methods of a class."""
    if isinstance(thing, type):
        return {f.__code__ for f in vars(thing).values() if isinstance(f, types.FunctionType)}
    return {thing.__code__}


@pytest.mark.parametrize("pitfall", CATALOGUE, ids=lambda p: p.id)
def test_what_is_shown_is_a_dozen_lines_and_differs(pitfall):
    shown = [trials.lines_of(pitfall.wrong), trials.lines_of(pitfall.right)]
    assert all(2 <= len(lines) <= 12 for lines in shown), [len(lines) for lines in shown]
    assert all(len(line) <= 88 for lines in shown for line in lines)  # two columns fit a page
    assert shown[0][1:] != shown[1][1:]


def test_the_catalogue_is_complete_in_itself():
    ids = [p.id for p in CATALOGUE]
    assert ids == sorted(set(ids))
    for p in CATALOGUE:
        assert re.fullmatch(r"P\d\d", p.id) and re.fullmatch(r"([A-Z]\d{1,2}b?)?", p.check)
        assert p.title and p.symptom and p.verdict and p.fix
        assert (p.claimed is None) or p.claim


def test_a_verdict_names_the_versions_it_was_seen_on_and_they_are_those_of_the_lock():
    locked = dict(
        re.findall(r"^([a-z]+)==(\d+\.\d+)", (paths.root() / "requirements.lock").read_text(), re.M)
    )
    for p in CATALOGUE:
        named = re.findall(r"(torch|transformers|peft|bitsandbytes|Python) (\d+\.\d+)", p.verdict)
        assert named, p.id
        assert all(locked.get(package, version) == version for package, version in named), p.id


def test_an_unknown_pitfall_lists_the_known():
    with pytest.raises(ValueError, match="pitfall = 'P99': allowed are"):
        pitfalls.pitfall("P99")


def test_what_a_run_draws_is_put_back_after_an_error_too():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), runtime.seeded(3):
        torch.rand(1)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)
