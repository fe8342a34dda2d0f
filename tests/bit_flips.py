"""A file with one flipped bit, again and again: what reads it must notice, or read the same."""

import random
from collections.abc import Iterator
from pathlib import Path


def flips(path: Path, *, count: int = 100, seed: int = 0) -> Iterator[bytes]:
    """Yield the content with one random bit flipped, `count` times, while the file holds it; then
    it is whole again.
    """
    whole, draw = path.read_bytes(), random.Random(seed)
    for _ in range(count):
        hurt, at = bytearray(whole), draw.randrange(8 * len(whole))
        hurt[at // 8] ^= 1 << at % 8
        path.write_bytes(hurt)
        yield bytes(hurt)
    path.write_bytes(whole)
