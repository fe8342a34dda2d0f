"""The catalogue of pitfalls: each one is run, broken and fixed, and tests assert that the symptom
shows and is gone.

A pitfall has a symptom as a person meets it, a cause that is claimed for it somewhere, and the
cause that holds. Three runs tell them apart, each a function without arguments that trains or
inspects a small real model for seconds and returns the facts it measured:

    broken()    the real cause is present: the symptom shows
    claimed()   only the claimed cause is present: whether the symptom shows decides about the claim
    fixed()     as broken, with the fix: the symptom is gone

`seen(facts)` answers for any of the three whether the symptom shows. tests/lessons/test_pitfalls.py
asserts True, `claim_holds` and False; the notebooks display the same facts; `check` names the
doctor's check that must find the broken run.

`wrong` and `right` are the few lines that differ: two small functions, of which the broken run
calls the first and the fixed run the second. The notebooks show them side by side above the facts,
and the same test watches that they run.

One module per subject, each ending in its list PITFALLS; `bench` holds the small models they share.

Footgun: facts are measured on the versions installed. When a library repairs itself, `broken()` no
longer breaks, and the test that fails then tells you so.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

# what the verdicts were seen on; a test holds them to requirements.lock
VERSIONS = "torch 2.13, transformers 5.23"
WITH_PEFT = f"{VERSIONS}, peft 0.21"
WITH_BNB = f"{WITH_PEFT}, bitsandbytes 0.50"


class Unavailable(RuntimeError):
    """This machine lacks something that a run needs; the message names it.

    Nothing was shown, either way.
    """


class Pitfall(NamedTuple):
    id: str  # P01
    title: str
    symptom: str  # what a person sees, in their words
    claim: str  # the cause that is claimed, and where
    verdict: str  # what the three runs show, with the versions they were seen on
    fix: str
    broken: Callable[[], dict]
    fixed: Callable[[], dict]
    seen: Callable[[dict], bool]
    wrong: Callable  # a dozen lines at most, which the broken run executes and the page shows
    right: Callable  # the same lines as the fixed run executes them
    # None where nobody claims a cause, or it is the real one
    claimed: Callable[[], dict] | None = None
    claim_holds: bool = False
    # id of the doctor's check that must name the broken run, "" where no check can see it
    check: str = ""
    slow: bool = False  # its runs take more than five seconds together


def catalogue() -> Iterator[Pitfall]:
    """Every pitfall, in order.

    Each run draws from seed 0 and leaves the caller's generators as they were.
    """
    from nblib.runtime import seeded  # imports torch

    subjects = [
        import_module(f"{__name__}.{module.name}")
        for module in iter_modules(__path__)
        if module.name[0] != "_"
    ]
    for p in sorted(
        (p for subject in subjects for p in getattr(subject, "PITFALLS", ())), key=lambda p: p.id
    ):
        runs = {name: getattr(p, name) for name in ("broken", "claimed", "fixed")}
        yield p._replace(**{name: seeded()(run) for name, run in runs.items() if run})


def pitfall(number: str) -> Pitfall:
    """One pitfall by its id."""
    by_id = {p.id: p for p in catalogue()}
    if number not in by_id:
        raise ValueError(f"pitfall = {number!r}: allowed are {', '.join(by_id)}")
    return by_id[number]
