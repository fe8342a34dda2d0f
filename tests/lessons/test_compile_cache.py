"""Libraries without their end are found and deleted, and only they."""

import shutil
from pathlib import Path

import pytest
import torch

from lessons import compile_cache


@pytest.mark.parametrize("share", [0, 0.25, 0.9])
def test_a_library_without_its_end_is_found_and_only_it(tmp_path, share):
    real = next((Path(torch.__file__).parent / "lib").glob("libshm.so"))
    for name in ("whole.so", "cut.so"):
        shutil.copy(real, tmp_path / name)
    (tmp_path / "other.so").write_bytes(b"!<arch>" + bytes(100))  # not ours to judge
    cut = tmp_path / "cut.so"
    with open(cut, "rb+") as file:
        file.truncate(int(cut.stat().st_size * share))
    assert compile_cache.repair(tmp_path) == [cut] and not cut.exists()
    assert (tmp_path / "whole.so").exists() and compile_cache.damaged(tmp_path) == []
