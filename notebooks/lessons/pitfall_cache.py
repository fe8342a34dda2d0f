"""What the runs of pitfalls measured, kept for the length of one run of the test suite, so that
each is made once.

tests/lessons/test_pitfalls.py makes every run and proves it. `make test-all` has the facts written
down there (`--facts FOLDER`). The notebooks that it validates afterwards read them
(NBLIB_FACTS=FOLDER) instead of running everything again. Nothing else sets NBLIB_FACTS: Run All,
`nblib run`, `make refresh` and `make test-notebooks` make every run.

A store has the hash of all that decides a fact in its name: the sources of lessons, nblib and the
doctor, and the versions. After a change of any of them nothing is found in it.

Footgun: a fact that torch does not load safely, an object of a class of its own say, is not stored.
Such a run is made again, silently.
"""

import hashlib
import os
import pickle
import platform
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

PACKAGES = ("lessons", "nblib", "loopdoctor")
VERSIONS = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")


def write(folder: Path, number: str, run: str, facts: dict) -> bool:
    """Keep the facts of one run; False where they cannot be stored."""
    file = _file(folder, number, run)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.save(facts, file)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):
        file.unlink(missing_ok=True)
        return False
    return True


def read(number: str, run: str) -> dict | None:
    """Return the facts of this run, if NBLIB_FACTS names a folder that has them from these sources
    and versions.
    """
    folder = os.environ.get("NBLIB_FACTS")
    if not folder or not (file := _file(Path(folder), number, run)).exists():
        return None
    return torch.load(file, weights_only=True)


def _file(folder: Path, number: str, run: str) -> Path:
    return folder / _what_decides() / f"{number}.{run}.pt"


@cache
def _what_decides() -> str:
    digest = hashlib.sha256(repr([platform.python_version(), *map(version, VERSIONS)]).encode())
    for package in PACKAGES:
        (place,) = find_spec(package).submodule_search_locations
        for file in sorted(Path(place).rglob("*.py")):
            digest.update(str(file.relative_to(place)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
