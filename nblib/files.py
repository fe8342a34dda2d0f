"""Files that are never half written: a temporary name, flushed to the device, then renamed. And locks, hashes, JSON.

    write(path, text)                       the old file or the new one
    with replacing(path) as partial: ...    the same for a file or folder that another library writes
    with locked(path): ...                  one process at a time; claim(path) asks without waiting

A rename is atomic, so a reader never sees half a file; it is durable only after the file, and the folder that holds its
name, were flushed. Locks are the kernel's (flock): they go with the process that holds them, however it ends.

Footgun: Python's json writes `NaN`, which is not JSON and which other readers refuse. Non-finite numbers become the
strings "nan", "inf" and "-inf" here; `float()` turns them back.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Unwritable(OSError):
    """A place we cannot write to, said in one sentence."""


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
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
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
    if path.is_dir():
        shutil.rmtree(path)
    os.replace(partial, path)
    flush(path.parent)


def remove_partials(folder: Path, name: str = "*") -> None:
    """Delete what processes that were killed while writing left in the folder."""
    for partial in folder.glob(f".{name}.*.partial"):
        if not Path(f"/proc/{partial.name.split('.')[-2]}").exists():
            _remove(partial)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def write(path: Path, content: str | bytes) -> None:
    """The old file or the new one, never half of one."""
    try:
        with replacing(path) as partial:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise Unwritable(f"Cannot write {path}: {error.strerror}.") from None


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
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(waiting, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def merge(path: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to a JSON object on disk."""
    write(path, to_json(read_json(path) | facts, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when there is none yet."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}


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
