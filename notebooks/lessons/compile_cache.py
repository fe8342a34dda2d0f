"""A compile cache that a killed run has damaged: find the libraries without their end, and delete
them.

    compile_cache.repair()    the next run builds those again

Inductor renames its Python files and pickles into place. But the linker writes the library under
its final name, and later runs only ask whether it exists. A library whose linker was killed stays,
and every later run fails on it (P23).

Footgun: not while another run compiles: a library that is being linked looks the same.
"""

import os
import struct
from pathlib import Path


def cache_folder() -> Path:
    """Where inductor keeps what it compiled, for all runs of this user."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir())


def damaged(folder: Path | None = None) -> list[Path]:
    """Compiled libraries in a cache that are shorter than their own header says."""
    return [path for path in sorted((folder or cache_folder()).rglob("*.so")) if not _whole(path)]


def repair(folder: Path | None = None) -> list[Path]:
    """Delete the damaged libraries, and nothing else: the next run builds just those again."""
    libraries = damaged(folder)
    for path in libraries:
        path.unlink(missing_ok=True)
    return libraries


def _whole(path: Path) -> bool:
    """Return the table of sections stands at the end of an ELF file, so a file without its end
    lacks part of it.
    """
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64:
        return False
    if header[:6] != b"\x7fELF\x02\x01":  # another system's format: no verdict
        return True
    (table,) = struct.unpack_from("<Q", header, 0x28)
    size, count = struct.unpack_from("<HH", header, 0x3A)
    return path.stat().st_size >= table + size * count
