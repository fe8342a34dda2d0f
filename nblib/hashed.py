"""JSON that proves itself: an object on disk with its own SHA-256, so that a byte that changed since does not pass.

    write(path, facts)    the object and its hash; a reader sees the old file or the new one
    read(path)            the object, or Unreadable when it is not as it was written; empty when there is no file
    digest(value)         the hash of anything that JSON can hold, whatever the order of its names

Footgun: the hash notices damage and edits by hand, and no attack: who changes the object can change its hash as well.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nblib import files


def write(path: Path, facts: Mapping[str, Any]) -> None:
    plain = json.loads(files.to_json(facts))  # what a reader will get, and so what is hashed
    files.write(path, files.to_json(plain | {"sha256": digest(plain)}, indent=1) + "\n")


def read(path: Path, *, needed: bool = True) -> dict[str, Any]:
    """Without `needed` an object that never had a hash counts too."""
    facts = files.read_json(path)
    if "sha256" in facts or (needed and facts):
        if facts.pop("sha256", None) != digest(facts):
            raise files.Unreadable(f"cannot read {path}: it changed since it was written")
    return facts


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
