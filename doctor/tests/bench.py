"""What the doctor's test programs share: tiny models, batches of text-like ids, and how a diagnosis is judged.

A program is a function that builds a model, trains it for a few steps under `doctor.watch` the way people write loops,
and returns the report. Programs differ from each other in shape on purpose; only their raw material is shared here.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from nblib import models
from train_doctor import ERROR, NOTE, Report

VOCABULARY = 256
ELSEWHERE = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}  # for processes that import from tests


def lm(family: str = "qwen3", *, vocab: int = VOCABULARY, hidden: int = 64, layers: int = 2, **config):
    """A tiny causal language model of transformers, in train mode."""
    return models.tiny(vocab, family=family, hidden=hidden, layers=layers, length=256, **config)


def batches(
    count: int, rows: int = 4, length: int = 32, *, vocab: int = VOCABULARY, seed: int = 0
) -> list[torch.Tensor]:
    """Token ids (rows, length) that can be learnt: each token mostly follows from the one before."""
    make = torch.Generator().manual_seed(seed)
    table = torch.randint(3, vocab, (vocab,), generator=make)
    made = []
    for _ in range(count):
        ids = torch.randint(3, vocab, (rows, length), generator=make)
        for t in range(1, length):
            follow = torch.rand(rows, generator=make) < 0.7
            ids[:, t] = torch.where(follow, table[ids[:, t - 1]], ids[:, t])
        made.append(ids)
    return made


def quiet(program: Callable[[], Report]) -> Report:
    """Run a program without its warnings; one that ends in an exception must have caught it itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return program()


def assert_root(report: Report, *checks: str) -> None:
    """The first cause named is one of these, and watching itself had no fault."""
    assert report.done and not report.faults, report.faults
    assert report.root is not None and report.root.check in checks, f"expected {checks}\n{report}"


def assert_healthy(report: Report, *, warnings_allowed: tuple[str, ...] = ()) -> None:
    """No error at all, no warning but those allowed, and something was really looked at."""
    assert report.done and not report.faults, report.faults
    wrong = [f for f in report.findings if f.severity == ERROR]
    wrong += [f for f in report.findings if f.severity not in (ERROR, NOTE) and f.check not in warnings_allowed]
    assert not wrong, f"\n{report}"
    assert sum(v.state == "OK" for v in report.verdicts.values()) >= 3
