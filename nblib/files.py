"""Files that are never half written: a temporary name, flushed to the device, then renamed. And locks, hashes, JSON.

    write(path, text)                       the old file or the new one
    with replacing(path) as partial: ...    the same for a file or folder that another library writes
    with locked(path): ...                  one process at a time; claim(path) asks without waiting

A rename is atomic, so a reader never sees half a file. It is durable only after the file and the folder that holds its
name were flushed. Locks are the kernel's (flock): they go with the process that holds them, however it ends. No write
follows a link that somebody planted under the name it is about to use. What cannot be read is set aside under another
name, `damaged-...`, with a sentence: it counts for nothing and is there to be looked at.

    seal(folder)            write manifest.json: the name and the SHA-256 of each of its files
    verify(folder, names)   Unreadable unless exactly these files are there, as they were written

Footgun: Python's json writes `NaN`, which is not JSON and which other readers refuse. Non-finite numbers become the
strings "nan", "inf" and "-inf" here; `float()` turns them back.
"""

import contextlib
import ctypes
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
HOST, DAY = os.uname().nodename.partition(".")[0], 86_400


class Unwritable(OSError):
    """A place we cannot write to, said in one sentence."""


class Unreadable(ValueError):
    """There is a file or a folder, and it is not what was written there; said in one sentence."""


def make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unwritable(f"Cannot create the folder {path}: {error.strerror}.") from None
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write a file or a folder under; when the block ends well it takes the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_partials(path.parent, glob.escape(path.name))
    partial = path.with_name(f".{path.name}.{os.getpid()}@{HOST}.partial")
    _remove(partial)  # a container that starts again gives the same number to a process that was killed here
    try:
        yield partial
        put(partial, path)
    except BaseException:
        _remove(partial)
        raise


def put(partial: Path, path: Path) -> None:
    """Give a whole file or folder the name `path`, and let a power cut lose neither its content nor its name."""
    for part in [*partial.rglob("*"), partial]:
        flush(part)
    if not path.is_dir():
        os.replace(partial, path)
    elif not _exchange(partial, path):  # a folder cannot take the place of another one: for an instant there is none
        old = partial.with_name(f".{path.name}-old.{os.getpid()}.partial")
        os.replace(path, old)
        os.replace(partial, path)
        partial = old
    flush(path.parent)
    _remove(partial)


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places in one step; False where the system cannot (it is Linux that can)."""
    with contextlib.suppress(AttributeError, OSError):
        here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        names = os.fsencode(one.absolute()), os.fsencode(other.absolute())
        return ctypes.CDLL(None).renameat2(here, names[0], here, names[1], both) == 0
    return False


def remove_partials(folder: Path, name: str = "*") -> None:
    """Delete what processes that were killed while writing left in the folder. One that began after a file was written
    did not write it: it has only been given the same number. Of another machine nobody knows who lives there, so what
    it writes stays for a day."""
    for partial in folder.glob(f".{name}.*.partial"):
        pid, _, host = partial.name.split(".")[-2].partition("@")
        with contextlib.suppress(FileNotFoundError):  # just put in its place
            began = _began(pid) if host in ("", HOST) else time.time() - DAY
            if began > partial.lstat().st_mtime + 60:  # clocks differ a little
                _remove(partial)


def _began(pid: str) -> float:
    """When a process began, in seconds as `time.time()` counts them; infinity when there is no such process."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return math.inf
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(ticks) / os.sysconf("SC_CLK_TCK")


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink()


def write(path: Path, content: str | bytes) -> None:
    """The old file or the new one, never half of one."""
    content = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        with replacing(path) as partial, open(partial, "xb", opener=_no_link) as file:
            file.write(content)
    except OSError as error:
        raise Unwritable(f"Cannot write {path}: {error.strerror or error}.") from None


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def set_aside(path: Path, why: str) -> None:
    """Rename what is damaged to `damaged-...`, where it counts for nothing, and say so."""
    names = (f"damaged-{path.name}{f'-{n}' if n else ''}" for n in itertools.count())
    aside = next(other for name in names if not os.path.lexists(other := path.with_name(name)))
    with contextlib.suppress(OSError):  # in a place that is read only it stays, and is passed over each time
        os.replace(path, aside)
        path = aside
    print(f"{why}; it is set aside as {path}", flush=True)


def seal(folder: Path, known: Mapping[str, str] = {}) -> dict[str, str]:
    """Write the manifest of a folder's files; name -> SHA-256, where it is not known already."""
    names = {*known, *(file.name for file in folder.iterdir())} - {MANIFEST}
    hashes = {name: known.get(name) or sha256(folder / name) for name in sorted(names)}
    write(folder / MANIFEST, json.dumps({"sha256": hashes}, indent=1))
    return hashes


def verify(folder: Path, names: Collection[str] = ()) -> set[str]:
    """The files that the manifest names; Unreadable unless these are exactly `names` (where none are given, any) and
    each is unchanged."""
    try:
        hashes = read_json(folder / MANIFEST).get("sha256")
    except Unreadable as error:
        raise Unreadable(f"{folder} is damaged: {error}") from None
    try:
        if not isinstance(hashes, dict) or not hashes or (names and set(hashes) != set(names)):
            raise Unreadable(f"{folder} is damaged: its {MANIFEST} does not name {', '.join(names) or 'its files'}")
        if paths := [name for name in hashes if Path(name).name != name]:
            raise Unreadable(f"{folder} is damaged: its {MANIFEST} names {paths[0]!r}, which is not in it")
        if changed := [name for name, expected in hashes.items() if sha256(folder / name) != expected]:
            raise Unreadable(f"{folder} is damaged: {', '.join(changed)} changed since it was written")
    except OSError as error:
        raise Unreadable(f"{folder} is damaged: {Path(error.filename or '').name}: {error.strerror}") from None
    return set(hashes)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def claim(path: Path) -> int | None:
    """Lock a file or folder that exists; the descriptor to keep open, or None while another process holds it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def locked(path: Path, *, waiting: str) -> Iterator[None]:
    """Hold the lock file `path`, made if need be; prints `waiting` when another process has it."""
    make_folder(path.parent)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "a", opener=_no_link))
        except OSError as error:
            raise Unwritable(f"Cannot lock {path}: {error.strerror}.") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(waiting, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def merge(path: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to a JSON object on disk. A damaged one is set aside, and a new one begun."""
    try:
        known = read_json(path)
    except Unreadable as error:
        set_aside(path, str(error))
        known = {}
    write(path, to_json(known | facts, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when there is none yet."""
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
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of 5,000 digits, too deep
        raise Unreadable(f"cannot read {path}: {str(error) or type(error).__name__}") from None
    if not isinstance(content, dict):
        raise Unreadable(f"cannot read {path}: it holds no JSON object")
    return content


def to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """JSON types only; nan and inf as strings, since JSON has no words for them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (str, int)):
        return value
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)  # a tensor or an array; a path
