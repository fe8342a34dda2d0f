"""Small files that are never half written: text under a temporary name then renamed, and JSON that stays JSON.

Footgun: Python's json writes `NaN`, which is not JSON and which other readers refuse. Non-finite numbers become the
strings "nan", "inf" and "-inf" here; `float()` turns them back.
"""

import contextlib
import json
import math
import os
from collections.abc import Mapping
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


def write_atomic(path: Path, content: str | bytes) -> None:
    """The old file or the new one, never half of one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise Unwritable(f"Cannot write {path}: {error.strerror}.") from None


def merge(path: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to a JSON object on disk."""
    write_atomic(path, to_json(read_json(path) | facts, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when there is none yet."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
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
