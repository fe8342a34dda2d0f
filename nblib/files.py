"""Files that are never half written, locks, and the two formats by which damage is noticed.

    write(path, text)                       the old file or the new one, never half of one
    with replacing(path) as partial: ...    the same for a file or folder that a library writes
    with locked(path, waiting="..."): ...   one process at a time; claim(path) does not wait

What is written gets a temporary name, is flushed to the device, and is then renamed. A rename is
atomic, so a reader never sees half a file. It is durable only after the file and the folder that
holds its name were flushed. A folder cannot take the place of another one in one step: the old one
is renamed first. A process that is killed between the two leaves it under a hidden name, and
`remove_partials` renames it back, which the next writer and `verify` call.

Locks are the kernel's (flock): they end with the process that holds them, however it ends. No write
follows a link that somebody planted under the name it is about to use.

Integrity has two formats. Neither is read without being checked:

    seal(folder), verify(folder)            manifest.json: the SHA-256 of each file of the folder
    write_checked_json, read_checked_json   a JSON object that holds the SHA-256 of itself

What is damaged is renamed to `damaged-...`, with a sentence, and can be looked at.

Footgun: Python's json writes `NaN`, which is not JSON and which other readers refuse. Non-finite
numbers become the strings "nan", "inf" and "-inf" here; `float()` turns them back.
"""

import contextlib
import fcntl
import glob
import hashlib
import itertools
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
HOST = os.uname().nodename.partition(".")[0]
DAY = 86_400  # seconds


class Unwritable(OSError):
    """Report in one sentence that a place cannot be written to."""


class Unreadable(ValueError):
    """Report in one sentence that a file or folder is not what was written there."""


# ------------------------------------------------------------------ writing


def make_folder(path: Path) -> Path:
    """Make a folder and those above it, and return it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unwritable(f"Cannot create the folder {path}: {error.strerror}.") from None
    return path


def write(path: Path, content: str | bytes) -> None:
    """Write a file as a whole."""
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    try:
        with replacing(path) as partial:
            with open(partial, "xb", opener=_open_no_link) as file:
                file.write(content)
    except OSError as error:
        raise Unwritable(f"Cannot write {path}: {error.strerror or error}.") from None


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write a file or folder under.

    When the block ends well, what was written takes the place of `path`; otherwise it is deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_partials(path.parent, glob.escape(path.name))

    # a container that starts again gives the same number to a process that was killed here
    partial = path.with_name(f".{path.name}.{os.getpid()}@{HOST}.partial")
    _remove(partial)
    _put_back(partial.with_suffix(".replaced"), path)

    try:
        yield partial
        put(partial, path)
    except BaseException:
        _remove(partial)
        raise


def put(partial: Path, path: Path) -> None:
    """Give a whole file or folder the name `path`, durably: its content first, then its name."""
    for part in [*partial.rglob("*"), partial]:
        flush(part)

    if not path.is_dir():
        os.replace(partial, path)
        flush(path.parent)
        return

    # for an instant there is no folder of this name, and never half of one
    old = partial.with_suffix(".replaced")
    os.utime(path)  # by its age another host judges whether anybody is at work here
    os.replace(path, old)
    try:
        os.replace(partial, path)
    except BaseException:
        os.replace(old, path)
        raise
    flush(path.parent)
    _remove(old)


def remove_partials(folder: Path, name: str = "*") -> None:
    """Delete what killed processes left in a folder while they wrote files of this name.

    A folder that was about to be replaced gets its name back if the new one did not get it.
    """
    for old in folder.glob(f".{name}.*.replaced"):
        path = old.with_name(old.name[1:].rsplit(".", 2)[0])
        if _is_left(old):
            _put_back(old, path)

    for partial in folder.glob(f".{name}.*.partial"):
        if _is_left(partial):
            _remove(partial)


def _put_back(old: Path, path: Path) -> None:
    """Give a folder its name back, or delete it where the new one has the name."""
    if os.path.lexists(path):
        _remove(old)
    elif os.path.lexists(old):
        with contextlib.suppress(OSError):  # another process did it
            os.replace(old, path)


def _is_left(partial: Path) -> bool:
    """Return whether nobody is writing this any more.

    For files of another host we cannot check the process, so they are kept for a day. Neither does
    anything of this host take that long: a process that lives then has the number of a dead one.
    """
    pid, _, host = partial.name.split(".")[-2].partition("@")
    try:
        is_old = partial.lstat().st_mtime < time.time() - DAY
    except FileNotFoundError:  # just put in its place
        return False
    return is_old or (host in ("", HOST) and not _is_alive(pid))


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True


def _remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def flush(path: Path) -> None:
    """Wait until a file or the names in a folder are on the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path, why: str) -> None:
    """Rename what is damaged to `damaged-...`, where nobody reads it, and print why."""
    for number in itertools.count():
        suffix = f"-{number}" if number else ""
        aside = path.with_name(f"damaged-{path.name}{suffix}")
        if not os.path.lexists(aside):
            break
    with contextlib.suppress(OSError):  # where nothing can be renamed it is skipped each time
        os.replace(path, aside)
        path = aside
    print(f"{why}; it is set aside as {path}", flush=True)


# ------------------------------------------------------------------ locks


def claim(path: Path) -> int | None:
    """Lock a file or folder that exists; return the descriptor to keep open.

    None while another process holds it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def locked(path: Path, *, waiting: str) -> Iterator[None]:
    """Hold the lock file `path`, made if need be; print `waiting` while another process has it."""
    make_folder(path.parent)
    try:
        file = open(path, "a", opener=_open_no_link)
    except OSError as error:
        raise Unwritable(f"Cannot lock {path}: {error.strerror}.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(waiting, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ------------------------------------------------------------------ a folder with its manifest


def seal(folder: Path, known: Mapping[str, str] = {}) -> dict[str, str]:
    """Write the manifest of a folder's files and return it: name -> SHA-256.

    `known` are hashes that need not be computed.
    """
    names = {*known, *(file.name for file in folder.iterdir())} - {MANIFEST}
    hashes = {name: known.get(name) or sha256(folder / name) for name in sorted(names)}
    write(folder / MANIFEST, json.dumps({"sha256": hashes}, indent=1))
    return hashes


def verify(folder: Path, names: Collection[str] = ()) -> set[str]:
    """Return the files that the manifest names, each unchanged.

    Unreadable if one is not, or if they are not exactly `names`, where these are given.
    """
    remove_partials(
        folder.parent, glob.escape(folder.name)
    )  # it may have another name since a kill
    try:
        hashes = read_json(folder / MANIFEST).get("sha256")
    except Unreadable as error:
        raise Unreadable(f"{folder} is damaged: {error}") from None

    # the names
    if not isinstance(hashes, dict) or not hashes or (names and set(hashes) != set(names)):
        expected = ", ".join(names) or "its files"
        raise Unreadable(f"{folder} is damaged: its {MANIFEST} does not name {expected}")
    outside = [name for name in hashes if Path(name).name != name]
    if outside:
        raise Unreadable(
            f"{folder} is damaged: its {MANIFEST} names {outside[0]!r}, which is not in it"
        )

    # their content
    try:
        changed = [name for name, known in hashes.items() if sha256(folder / name) != known]
    except OSError as error:
        name = Path(error.filename or "").name
        raise Unreadable(f"{folder} is damaged: {name}: {error.strerror}") from None
    if changed:
        raise Unreadable(f"{folder} is damaged: {', '.join(changed)} changed since it was written")
    return set(hashes)


def sha256(path: Path) -> str:
    """Return the hash of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------ JSON


def write_checked_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a JSON object together with its own hash."""
    plain = json.loads(to_json(facts))  # what a reader will get, and so what is hashed
    write(path, to_json(plain | {"sha256": digest(plain)}, indent=1) + "\n")


def read_checked_json(path: Path, *, needed: bool = True) -> dict[str, Any]:
    """Return an object after its hash was checked; empty where there is no file.

    Without `needed`, an object that never had a hash counts too.
    """
    facts = read_json(path)
    if "sha256" in facts or (needed and facts):
        if facts.pop("sha256", None) != digest(facts):
            raise Unreadable(f"cannot read {path}: it changed since it was written")
    return facts


def digest(value: Any) -> str:
    """Return the hash of a JSON value, whatever the order of its names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def merge(path: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to a JSON object on disk. A damaged one is set aside, and a new one begun."""
    try:
        known = read_json(path)
    except Unreadable as error:
        set_aside(path, str(error))
        known = {}
    write(path, to_json(known | facts, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty when there is none yet."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would never end
            raise Unreadable(f"cannot read {path}: it is no file")
        content = json.loads(path.read_bytes().decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise Unreadable(f"cannot read {path}: {error.strerror}") from None
    except Unreadable:
        raise
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a huge number, too deep
        raise Unreadable(f"cannot read {path}: {str(error) or type(error).__name__}") from None
    if not isinstance(content, dict):
        raise Unreadable(f"cannot read {path}: it holds no JSON object")
    return content


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON for a value; see the footgun for numbers that are not finite."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return the value in JSON types only."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (str, int)):
        return value
    if hasattr(value, "tolist"):  # a tensor or an array
        return _plain(value.tolist())
    return str(value)  # a path
