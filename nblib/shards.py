"""A folder of tensors too large for one file: shards written one by one, verified on opening, mapped and not read.

`manifest.json` says what the folder is about and names every shard with its SHA-256. A shard is written under a
temporary name, flushed, renamed, and only then entered in the manifest, which is replaced as a whole. So at any instant
the folder is a true prefix of the work, and a maker that was killed goes on after the last shard of the manifest.

Footgun: the tensors of an opened shard are the file. They cost no memory until their rows are read, but the file must
stay as it is; to change a folder, write another.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nblib.files import flush, sha256

MANIFEST = "manifest.json"


class ShardError(RuntimeError):
    """The folder does not belong to this run, or is not what was written; the message says which."""


class Shards:
    """`about` is what the folder must be about (of an existing one: what it is), in JSON types. `shards` lists what
    is there; `done` is the maker's own note of how far the work got, 0 at first."""

    def __init__(self, folder: Path, about: dict | None = None):
        self.folder = Path(folder)
        try:
            manifest = json.loads((self.folder / MANIFEST).read_text())
            self.about, self.shards, self.done = manifest["about"], manifest["shards"], manifest["done"]
        except FileNotFoundError:
            if about is None:
                raise ShardError(f"{self.folder} holds no {MANIFEST}: nothing was made there") from None
            self.about, self.shards, self.done = about, [], 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ShardError(f"{self.folder / MANIFEST} is damaged: {type(error).__name__}: {error}") from error

    def expect(self, about: dict) -> None:
        """Refuse a folder that is about something else, with the first difference."""
        wrong = {name: value for name, value in about.items() if self.about.get(name) != value}
        for name, value in wrong.items():
            raise ShardError(
                f"{self.folder}: {name} is {self.about.get(name)!r} there and {value!r} in this run"
                f"{f', and {len(wrong) - 1} more differ' if len(wrong) > 1 else ''}; use another folder or make it anew"
            )

    def add(self, tensors: dict[str, Tensor], **facts) -> None:
        """One more shard; `facts` stand beside its name in the manifest."""
        name = f"shard-{len(self.shards):05d}.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{name}.partial"
        try:
            save_file(tensors, partial)
            flush(partial)
            entry = {"name": name, "sha256": sha256(partial), **facts}
            os.replace(partial, self.folder / name)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise ShardError(f"{name} not written: {error}. Intact: {len(self.shards)} shards, make goes on") from error
        self.shards.append(entry)
        self.note(self.done)

    def note(self, done: int) -> None:
        """Write the manifest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.done, partial = done, self.folder / f".{MANIFEST}.partial"
        partial.write_text(json.dumps({"about": self.about, "shards": self.shards, "done": done}, indent=1))
        flush(partial)
        os.replace(partial, self.folder / MANIFEST)
        flush(self.folder)

    def opened(self) -> Iterator[dict[str, Tensor]]:
        """The tensors of every shard, memory-mapped, after its hash was checked."""
        for shard in self.shards:
            path = self.folder / shard["name"]
            try:
                if sha256(path) != shard["sha256"]:
                    raise ShardError(f"{path} is damaged: it changed since it was written; make it anew")
                with safe_open(path, "pt") as file:
                    yield {name: file.get_tensor(name) for name in file.keys()}
            except (OSError, SafetensorError) as error:
                raise ShardError(f"{path} cannot be read: {error}") from error

    def bytes(self) -> int:
        return sum((self.folder / shard["name"]).stat().st_size for shard in self.shards)

    @contextmanager
    def maker(self) -> Iterator[None]:
        """One maker at a time; the lock goes with the process that holds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ShardError(f"{self.folder}: another process is making it; wait for it, then ask again") from None
            yield
