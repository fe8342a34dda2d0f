"""The files of a corpus: where a parameter points, which files count as text, and a hash of their
names and contents.

A corpus is a file, a folder or a data set of the hub, with options as in a URL:
`texts?column=body&tokens=10M`. What `files_of` lists is what corpora.py reads, and what a run's key
hashes: the two cannot differ.

Files count by name and content, so a copy, a touch or another time changes nothing. Above WHOLE
bytes a file counts by its size, its time and its first and last MiB, or each plan would read whole
models.

Footgun: a relative path is looked up beside the notebooks, where they run, and not in the current
folder.
"""

import functools
import hashlib
import os
import re
import time
from pathlib import Path
from urllib.parse import parse_qsl

from nblib import files, paths

TEXTS = (".txt", ".md", ".py", ".jsonl", ".parquet")  # what of a folder is text
# options of a corpus
LOCAL, HUB = ("column", "tokens"), ("column", "tokens", "name", "split", "revision")
EMBEDDED = ("prose", "code")  # the corpora that every Python has
WHOLE, MIB = 256 * 2**20, 2**20


def resolve(text: str, within: Path | None = None) -> Path:
    """Return the place that a parameter names; the notebooks run in their folder, a script of one's
    own wherever it does.
    """
    return (within or paths.notebooks()) / os.path.expanduser(text)


def corpus_options(value: str, within: Path | None = None) -> tuple[str, dict[str, str | int]]:
    """`place?option=value&...` as the place and its options; ValueError for what is no option of
    such a place.
    """
    place, _, query = value.partition("?")
    if "?" not in value or (not value.startswith("hf:") and os.path.exists(resolve(value, within))):
        return value, {}  # a question mark may stand in the name of a file
    options, allowed = (
        dict(parse_qsl(query, keep_blank_values=True)),
        HUB if place.startswith("hf:") else LOCAL,
    )
    if unknown := [name for name in options if name not in allowed]:
        raise ValueError(
            f"corpus {value!r} has no option {unknown[0]!r}: allowed are {', '.join(allowed)}"
        )
    if (tokens := options.get("tokens")) is not None:
        if not (
            parts := re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([kMB]?)", tokens)
        ) or not float(parts[1]):
            raise ValueError(
                f"tokens = {tokens!r}: must be a number above 0 like 500000, 200k, 1.5M or 10B"
            )
        options["tokens"] = round(float(parts[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}[parts[2]])
    return place, options


def files_of(path: Path, suffixes: tuple[str, ...] = TEXTS) -> list[Path]:
    """Return a file, or all files of these kinds under a folder (of all kinds for none), in the
    order of their names. Links are followed, into each folder once: a loop of links ends.
    """
    if path.is_file():
        return [path]
    inside, waiting, seen = [], [path], set()
    # what links lead to comes last, so a folder has its own name rather than a link's
    for start in waiting:
        for folder, folders, names in os.walk(start):
            if (real := os.path.realpath(folder)) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders.sort()
            inside += [Path(folder, name) for name in names]
            waiting += [
                Path(folder, name) for name in folders if os.path.islink(os.path.join(folder, name))
            ]
    # a link that leads nowhere is kept: whoever reads must find out
    readable = (
        file for file in inside if file.is_file() or (file.is_symlink() and not file.exists())
    )
    return sorted(file for file in readable if not suffixes or file.suffix in suffixes)


def fingerprint(path: Path, suffixes: tuple[str, ...] = TEXTS) -> str:
    """Return a short hash of names and contents; where the folder lies does not count."""
    listed = [(str(file.relative_to(path)), _content(file)) for file in files_of(path, suffixes)]
    return hashlib.sha256(repr(listed).encode("utf-8", "surrogatepass")).hexdigest()[:16]


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
