"""Among several processes, what is done inside of `alone` is what one process does."""

import json
import os
import sys

import pytest
import small_notebooks
import torch
from kill_worlds import Command
from torch import distributed as dist

from lessons.scale_out import World
from lessons.single_process import alone
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
    return apart | {
        "after": float(parallel.added(torch.ones(()) * (rank + 1))),
        "plan after": parallel.plan(CPU).kind,
    }


@pytest.mark.slow
def test_each_process_is_one_inside_and_both_are_two_after(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    with World(2, patience=90) as two:
        results = two(both)
    for result in results:
        assert (result["world"], result["rank"], result["plan"], result["sum"]) == (
            1,
            0,
            "off",
            1.0,
        )
        assert result["losses"] == trained(), "it is the run of one process, bit by bit"
        assert (result["after"], result["plan after"]) == (3.0, "ddp")


def test_what_was_hidden_comes_back_after_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = dist.is_initialized
    with pytest.raises(ZeroDivisionError), alone():
        assert "WORLD_SIZE" not in os.environ and not dist.is_initialized()
        raise ZeroDivisionError
    assert os.environ["WORLD_SIZE"] == "2" and dist.is_initialized is before


# What the pages do beside THE loop: a pitfall whose optimizer cannot be cut, a Trainer that reads
# what it saved, a resume that is compared, and losses under vmap.
SHOWS = """import torch
from lessons import loss_weight_phases, resume, trials
from lessons.pitfalls import bench
from nblib import hf, losses, models, runtime, text, train
from nblib.methods import moe
from nbworkbook import runs
run = runs.begin('00_shows', globals())
machine = runtime.pick('cpu', 'fp32')
stream = torch.arange(4_000) % 64
def fresh():
    model = models.tiny(64, hidden=16, layers=1, heads=2, family='qwen3_moe')
    return model, text.Batches(stream, rows=2, length=16), train.adamw(model, lr=1e-2)
runtime.seed_all(0)
model, batches, optimizer = fresh()
options = dict(loss=moe.loss(balance_weight=0.1), machine=machine)
shared = [record['loss'] for record in train.fit(model, batches, optimizer, total=2, **options)]"""
DOES = [
    "trials.Trials()('P62', 'broken')",
    """some = [{'input_ids': row, 'labels': row} for row in stream[:512].view(32, 16)]
def by_trainer(steps, resume=None):
    runtime.seed_all(0)
    net = fresh()[0]
    with bench.seeded(), bench.silent():
        arguments = bench.arguments(str(run.dir / 'trainer'), max_steps=steps, save_strategy='steps', save_steps=1)
        trainer = hf.Trainer(model=net, args=arguments, train_dataset=some, loss=moe.loss(language=hf.causal_lm))
        trainer.train(resume_from_checkpoint=resume)
by_trainer(1)
by_trainer(2, resume=str(run.dir / 'trainer' / 'checkpoint-1'))""",
    "equal = resume.bit_equal(fresh, run.checkpoints / 'resume', total=4, **options)",
    "phases = loss_weight_phases.phase_diagram([1.5, 3.0], [0.2], steps=3, normalise='none', learns='total')",
    "run.result(losses=shared, loss=shared[-1], equal=equal, world=runtime.world(), phases=phases.tolist())",
]


@pytest.mark.slow
@pytest.mark.kernel
@pytest.mark.parametrize("mesh", ["ddp", "fsdp"])
def test_what_pages_show_beside_the_loop_runs_to_the_end_in_two_processes(
    mesh, tmp_path, monkeypatch
):
    workbook = small_notebooks.move_workbook(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    small_notebooks.write("00_shows", SHOWS, *DOES)
    two = Command("train", "00", "--processes", "2", "-p", f"mesh={mesh}")
    assert two.end(500) == 0, two.errors
    (file,) = (workbook / "outputs" / "00_shows").glob("2*/result.json")
    result = json.loads(file.read_text())
    assert (
        result["world"] == 2
        and result["equal"] is True
        and result["losses"] == pytest.approx(trained(), abs=2e-5)
    )
    assert torch.tensor(result["phases"]).shape == (2, 1)
