"""Among several processes, what is done inside of `alone` is what one process does."""

import os

import pytest
import torch
from torch import distributed as dist

from lessons.alone import alone
from lessons.scale_out import World
from nblib import models, parallel, runtime, text, train
from nblib.methods import moe

CPU = runtime.Machine(torch.device("cpu"), "fp32", "a test")


def trained() -> list[float]:
    """The losses of a mixture, whose own loss adds over the processes."""
    runtime.seed_all(0)
    model = models.tiny(64, hidden=16, layers=1, heads=2, family="qwen3_moe")
    stream = torch.arange(4_000) % 64
    rows = text.Batches(stream, rows=2, length=16)
    options = dict(total=2, machine=CPU, loss=moe.loss(balance_weight=0.1))
    records = train.fit(model, rows, train.adamw(model, lr=1e-2), **options)
    return [record["loss"] for record in records]


def both() -> dict:
    with alone():
        apart = {"world": runtime.world(), "rank": runtime.rank(), "plan": parallel.plan(CPU).kind}
        apart |= {"sum": float(parallel.added(torch.ones(()))), "losses": trained()}
    rank = dist.get_rank()
    return apart | {"after": float(parallel.added(torch.ones(()) * (rank + 1))), "plan after": parallel.plan(CPU).kind}


@pytest.mark.slow
def test_each_process_is_one_inside_and_both_are_two_after():
    with World(2) as two:
        results = two(both)
    for result in results:
        assert (result["world"], result["rank"], result["plan"], result["sum"]) == (1, 0, "off", 1.0)
        assert result["losses"] == trained(), "it is the run of one process, bit by bit"
        assert (result["after"], result["plan after"]) == (3.0, "ddp")


def test_what_was_hidden_comes_back_after_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = dist.is_initialized
    with pytest.raises(ZeroDivisionError), alone():
        assert "WORLD_SIZE" not in os.environ and not dist.is_initialized()
        raise ZeroDivisionError
    assert os.environ["WORLD_SIZE"] == "2" and dist.is_initialized is before
