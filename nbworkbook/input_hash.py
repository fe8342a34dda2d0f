"""Hash everything besides code and numeric parameters that determines a run's result: files,
models, packages, threads.

A parameter may name a file or a folder (relative to the notebooks, with `~`, through links) or a
model of the hub. corpus_files.py hashes what lies on this disk. A name on the hub stands for the
commit that the local cache has, and for nothing more while it has none: `UNKNOWN` is equal to any
commit (jobs.same), since the run itself fetches the first one. If the hub has a newer commit than
the cache, the run may fetch that one, and the next plan sees it.

Of packages those count that the code can reach: what the cells and our modules import, inside
functions too, and what these packages require by their own metadata, without extras. So another
torch repeats a run, and another ruff or pytest does not. Where the workbook has a
requirements.lock, a package that only the library reaches counts if it is listed there: one that is
optional, and that somebody installs later, repeats nothing. What a cell imports itself always
counts.

Footgun: the threads are those that were asked for (OMP_NUM_THREADS, MKL_NUM_THREADS, else "auto"),
never those of this machine. Like `device=auto`, "auto" is one key on two cores and on sixty, where
the last digits differ.
"""

import functools
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from nblib import paths
from nblib.corpus_files import EMBEDDED, corpus_options, fingerprint, resolve

UNKNOWN = "unknown"
FIRST = (
    "python",
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "numpy",
)  # a reader looks for them
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # torch reads both
# what a package imports by itself wherever it is installed, though its metadata does not require it
OPTIONAL = {"transformers": ("accelerate", "bitsandbytes", "peft")}
# modules that nearly every notebook reaches and that are called otherwise than their package: to
# find such a name out takes a fifth of a second
CALLED = {"PIL": "pillow", "yaml": "pyyaml"}


def named(value: str, mark: object) -> str | None:
    """Return what the value of a parameter points at: a hash, the commit of a hub name, or None for
    a plain word. `mark` is the parameter's `a corpus` or `a model`."""
    path = resolve(value)
    if mark == "a corpus":
        if value in EMBEDDED:
            return None
        place, options = corpus_options(value)
        if place.startswith("hf:"):
            return _commit("datasets", place[3:], options.get("revision"))
        return f"sha256:{fingerprint(resolve(place))}"

    if mark == "a model" and value and not os.path.isdir(path):
        return _commit("models", value)

    # "." and "/" are no inputs
    points = any(map(str.isalnum, value)) and os.path.exists(path)
    return f"sha256:{fingerprint(path, ())}" if points else None


def versions(own: Iterable[str], library: Iterable[str] = ()) -> dict[str, str]:
    """Return the version of Python and of each package reached by dotted names of imports: `own`
    are those of a notebook and of the modules beside it, `library` those of our packages.
    """
    named_by_user = {name for top in _tops(own) for name in distributions_of(top)}
    named_by_us = {name for top in _tops(library) for name in distributions_of(top)}
    found = _with_requirements(named_by_user | named_by_us)

    listed = _listed(paths.root() / "requirements.lock")
    if listed is not None:
        found = {n: version for n, version in found.items() if n in listed | named_by_user}

    found["python"] = platform.python_version()
    return dict(sorted(found.items(), key=lambda pair: (pair[0] not in FIRST, pair[0])))


def version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    facts = _installed(name)
    return facts[0] if facts else None


def distributions_of(top: str) -> list[str]:
    """Return the installed packages, by their names on an index, that a module's name stands
    for.
    """
    if top in sys.stdlib_module_names:
        return []
    name = CALLED.get(top, _normal(top))
    if _installed(name) is not None:
        return [name]
    try:
        if find_spec(top) is None:
            return []
    except (ImportError, ValueError):  # no module name; a module that was made by hand
        return []
    return sorted({_normal(name) for name in _by_module().get(top, ())})


def threads() -> dict[str, str]:
    """Return how many threads the user asked for."""
    return {name: os.environ.get(name, "").strip() or "auto" for name in THREADS}


def forget() -> None:
    """Read anew what is installed. For tests: while a command runs, nothing is installed."""
    for cached in (_installed, _by_module):
        cached.cache_clear()


def _tops(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names if name}


def _with_requirements(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of these packages and of all that they need, by name."""
    waiting, found = sorted(names), {}
    while waiting:
        name = waiting.pop()
        facts = _installed(name)
        if facts is None or name in found:
            continue
        found[name], required = facts
        waiting += [*required, *OPTIONAL.get(name, ())]
    return found


@functools.cache
def _installed(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the version of a package and the names of the packages it requires here, or None."""
    try:
        facts = importlib.metadata.distribution(name)
        installed = str(facts.version)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    return installed, tuple(_required(facts.requires or ()))


def _required(lines: Iterable[str]) -> list[str]:
    """Return the packages that lines of Requires-Dist name for this machine, without extras."""
    from packaging.requirements import InvalidRequirement, Requirement  # 30 ms

    names = []
    for line in lines:
        try:
            asked = Requirement(line)
            if asked.marker is None or asked.marker.evaluate({"extra": ""}):
                names.append(_normal(asked.name))
        except (InvalidRequirement, ValueError):  # metadata of old
            continue
    return names


@functools.cache
def _by_module() -> Mapping[str, list[str]]:
    """Return the packages by the modules that they bring."""
    return importlib.metadata.packages_distributions()


def _listed(lock: Path) -> set[str] | None:
    """Return the packages of a lock, or None where there is none."""
    if not lock.is_file():
        return None
    return {_normal(name) for name in re.findall(r"^([\w.-]+)==", lock.read_text("utf-8"), re.M)}


def _normal(name: str) -> str:
    """Return the name as an index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _commit(kind: str, name: str, revision: str | None = None) -> str:
    """Return the commit that a revision names, as far as the local cache has it."""
    from huggingface_hub import constants

    if re.fullmatch("[0-9a-f]{40}", revision or ""):
        return revision[:12]
    folder = Path(constants.HF_HUB_CACHE, f"{kind}--{name.replace('/', '--')}", "refs")
    cached = folder / (revision or "main")
    return cached.read_text("utf-8", "replace").strip()[:12] if cached.is_file() else UNKNOWN
