"""What a result hangs on beside its code and its numbers: files, models, versions, threads. For the key of a run.

A parameter may name a file or a folder (relative to the notebooks, with `~`, through links) or a model of the hub.
Files count by name and content, so a copy, a touch or another time changes nothing. `files_of` is what shards.py reads
of a corpus, and what is hashed here: the two cannot differ. Above WHOLE bytes a file counts by its size, its time and
its first and last MiB, or each plan would read whole models.

A name on the hub stands for the commit that the local cache has, and for nothing more while it has none: `UNKNOWN` is
equal to any commit (jobs.same), since the run itself fetches the first one. If the hub has a newer commit than the
cache, the run may fetch that one, and the next plan sees it.

Footgun: the threads are those that were asked for (OMP_NUM_THREADS, MKL_NUM_THREADS, else "auto"), never those of this
machine. Like `device=auto`, "auto" is one key on two cores and on sixty, where the last digits differ.
"""

import functools
import hashlib
import os
import platform
import re
import time
from pathlib import Path
from urllib.parse import parse_qsl

from nblib import files, paths

TEXTS = (".txt", ".md", ".py", ".jsonl", ".parquet")  # what of a folder is text
LOCAL, HUB = ("column", "tokens"), ("column", "tokens", "name", "split", "revision")  # options of a corpus
EMBEDDED = ("prose", "code")  # the corpora that every Python has
WHOLE, MIB = 256 * 2**20, 2**20
UNKNOWN = "unknown"
FIRST = ("python", "torch", "transformers", "tokenizers", "peft", "numpy")  # a reader looks for them
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # torch asks both


def resolve(text: str, within: Path | None = None) -> Path:
    """The place that a parameter names; the notebooks run in their folder, a script of one's own wherever it does."""
    return (within or paths.notebooks()) / os.path.expanduser(text)


def corpus_options(value: str, within: Path | None = None) -> tuple[str, dict[str, str | int]]:
    """`place?option=value&...` as the place and its options; ValueError for what is no option of such a place."""
    place, _, query = value.partition("?")
    if "?" not in value or (not value.startswith("hf:") and os.path.exists(resolve(value, within))):
        return value, {}  # a question mark may stand in the name of a file
    options, allowed = dict(parse_qsl(query, keep_blank_values=True)), HUB if place.startswith("hf:") else LOCAL
    if unknown := [name for name in options if name not in allowed]:
        raise ValueError(f"corpus {value!r} has no option {unknown[0]!r}: allowed are {', '.join(allowed)}")
    if (tokens := options.get("tokens")) is not None:
        if not (parts := re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([kMB]?)", tokens)) or not float(parts[1]):
            raise ValueError(f"tokens = {tokens!r}: must be a number above 0 like 500000, 200k, 1.5M or 10B")
        options["tokens"] = round(float(parts[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}[parts[2]])
    return place, options


def files_of(path: Path, suffixes: tuple[str, ...] = TEXTS) -> list[Path]:
    """A file, or all files of these kinds under a folder (of all kinds for none), in the order of their names. Links
    are followed, into each folder once: a loop of links ends."""
    if path.is_file():
        return [path]
    inside, waiting, seen = [], [path], set()
    for start in waiting:  # what links lead to comes last, so a folder has its own name rather than a link's
        for folder, folders, names in os.walk(start):
            if (real := os.path.realpath(folder)) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders.sort()
            inside += [Path(folder, name) for name in names]
            waiting += [Path(folder, name) for name in folders if os.path.islink(os.path.join(folder, name))]
    # a link that leads nowhere is kept: whoever reads must find out
    readable = (file for file in inside if file.is_file() or (file.is_symlink() and not file.exists()))
    return sorted(file for file in readable if not suffixes or file.suffix in suffixes)


def fingerprint(path: Path, suffixes: tuple[str, ...] = TEXTS) -> str:
    """A short hash of names and contents; where the folder lies does not count."""
    listed = [(str(file.relative_to(path)), _content(file)) for file in files_of(path, suffixes)]
    return hashlib.sha256(repr(listed).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def named(value: str, mark: object) -> str | None:
    """What the value of a parameter points at: a hash, the commit of a hub name, or None for a plain word. `mark` is
    the parameter's `a corpus` or `a model`."""
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
    points = any(map(str.isalnum, value)) and os.path.exists(path)  # "." and "/" are no inputs
    return f"sha256:{fingerprint(path, ())}" if points else None


@functools.cache
def versions() -> dict[str, str]:
    """Python, and what is installed of the packages in requirements.lock; of all packages where there is no lock."""
    import importlib.metadata  # 50 ms, which every --help would pay

    lock = paths.root() / "requirements.lock"
    listed = re.findall(r"^([\w.-]+)==", lock.read_text("utf-8"), flags=re.M) if lock.is_file() else None
    found = {"python": platform.python_version()}
    for name in listed or [each.name for each in importlib.metadata.distributions() if each.name]:
        try:
            found[name] = str(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return dict(sorted(found.items(), key=lambda pair: (pair[0] not in FIRST, pair[0])))


def threads() -> dict[str, str]:
    """How many threads the user asked for."""
    return {name: os.environ.get(name, "").strip() or "auto" for name in THREADS}


def _commit(kind: str, name: str, revision: str | None = None) -> str:
    """The commit that a revision names, as far as the local cache knows."""
    from huggingface_hub import constants

    if re.fullmatch("[0-9a-f]{40}", revision or ""):
        return revision[:12]
    cached = Path(constants.HF_HUB_CACHE, f"{kind}--{name.replace('/', '--')}", "refs", revision or "main")
    return cached.read_text("utf-8", "replace").strip()[:12] if cached.is_file() else UNKNOWN


def _content(path: Path) -> str:
    try:
        at = os.stat(path)
        stamp = (at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
        # a file written just now may be written again without another time: read it each time
        fresh = abs(time.time_ns() - at.st_ctime_ns) < 2e9
        return (_hash.__wrapped__ if fresh else _hash)(path, *stamp)
    except OSError as error:
        return str(error.strerror)


@functools.cache
def _hash(path: Path, device: int, inode: int, size: int, mtime: int, ctime: int) -> str:
    if size <= WHOLE:
        return files.sha256(path)
    with open(path, "rb") as file:
        ends = file.read(MIB)
        file.seek(max(0, size - MIB))
        return hashlib.sha256(repr((size, mtime)).encode() + ends + file.read(MIB)).hexdigest()
