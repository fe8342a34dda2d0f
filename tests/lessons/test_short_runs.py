"""The runs that notebook 20 makes: whole folders, made once per key, the same again at the same
seed.
"""

import shutil
from pathlib import Path

import pytest
import torch

from lessons import comparing, short_runs
from nblib import files, models, paths, text, train
from nbworkbook import parameters, runs
from nbworkbook.setup import Setup

SHARED = dict(steps=4, rows=2, lr_scale=0.3, model="tiny", recipe="default", corpus="counting")


@pytest.fixture
def setup(stream, machine, tmp_path, monkeypatch) -> Setup:
    monkeypatch.setenv("NBLIB_OUTPUTS", str(tmp_path))
    model = models.tiny(256, hidden=32, layers=2, heads=2)
    rows = {
        split: text.fixed_rows(part, length=32, limit=32)
        for split, part in zip("vh", stream.view(2, -1))
    }
    return Setup(model, None, stream, rows["v"], rows["h"], machine)


def quiet(_: str) -> None:
    pass


def make(setup, **options) -> list:
    options = dict(methods=["lora"], seeds=[0], tell=quiet, values=SHARED) | options
    return short_runs.make(setup, options.pop("values"), **options)


@pytest.mark.slow
def test_every_method_leaves_a_whole_run_that_can_be_compared(setup):
    folders = make(setup, methods=short_runs.METHODS)
    for folder in folders:
        assert runs.status(folder) == "done" and runs.problem(folder) is None
        assert {"result.json", "parameters.yaml", "metrics.jsonl", "base.json"} <= runs.record(
            folder
        )["sealed"].keys()
        assert not (folder / "checkpoints").exists() and not (folder / "stored").exists()
    trained, left_out = comparing.load(folders)
    assert not left_out and {t.method for t in trained} == set(short_runs.METHODS)
    assert {t.method for t in trained if t.new} == set(short_runs.FROM_SCRATCH)
    read = {t.method: t.curves["tokens"][-1][0] for t in trained}
    assert read.pop("lrc") == short_runs.CALIBRATION * 2 * 32 + 4 * 2 * 31 and set(
        read.values()
    ) == {4 * 2 * 31}
    assert all(
        t.costs.keys() == comparing.COSTS.keys() and min(t.costs.values()) > 0 for t in trained
    )
    bytes_of = {t.method: t.costs for t in trained}
    whole = sum(p.nbytes for p in setup.model.parameters())
    assert bytes_of["full"]["trainable_bytes"] == whole > bytes_of["lora"]["trainable_bytes"]
    assert bytes_of["lora"]["loaded_bytes"] == bytes_of["lora"]["disk_bytes"] + whole
    # it has log-variances, too
    assert bytes_of["ard"]["trainable_bytes"] > bytes_of["lora"]["trainable_bytes"]
    assert whole <= bytes_of["full"]["disk_bytes"] < 1.1 * whole
    for of in bytes_of.values():  # AdamW keeps two averages of what it trains, Muon one
        assert of["trainable_bytes"] <= of["optimizer_bytes"] < 2.1 * of["trainable_bytes"]


@pytest.mark.slow
def test_a_run_is_made_once_and_again_when_something_else_is_asked(setup):
    said = []
    (first,) = make(setup, tell=said.append)
    assert make(setup) == [first] and "1 runs made, 0 found" in said[-1]
    assert {make(setup, seeds=[1])[0], make(setup, values=SHARED | {"steps": 5})[0]} & {
        first
    } == set()
    setup.stream[0] += 1  # another text under the same name
    assert make(setup) != [first]


def test_the_same_seed_gives_the_same_run_and_the_base_stays_as_it_was(setup):
    before = [p.clone() for p in setup.model.parameters()]
    (folder,) = make(setup)
    loss = files.read_json(folder / "result.json")["held_out_loss"]
    shutil.rmtree(folder)
    (again,) = make(setup)
    (other,) = make(setup, seeds=[1])
    assert files.read_json(again / "result.json")["held_out_loss"] == loss
    assert files.read_json(other / "result.json")["held_out_loss"] != loss
    assert all(torch.equal(a, b) for a, b in zip(before, setup.model.parameters()))


def test_all_methods_read_the_same_rows(setup, monkeypatch):
    read, fit = [], train.fit

    def noting(model, batches, optimizers, **options):
        if options["total"] == SHARED["steps"]:  # not the warm-up
            read.append([next(batches)["input_ids"] for _ in range(2)])
        return fit(model, batches, optimizers, **options)

    monkeypatch.setattr(train, "fit", noting)
    make(setup, methods=["full", "distillation"])
    assert len(read) == 2 and all(torch.equal(a, b) for a, b in zip(*read))


def test_a_damaged_run_is_named_and_made_again(setup, capsys):
    (folder,) = make(setup)
    (folder / "result.json").write_text("{}")
    (again,) = make(setup)
    assert again != folder and "result.json changed since the run ended" in capsys.readouterr().out
    assert "result.json changed" in comparing.load([folder, again])[1][0]["left out because"]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_from_its_checkpoint_or_is_made_again(setup, monkeypatch):
    def kill_at(step: int, values: dict):
        def dies(tell, name, record):
            if record["step"] == step:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(short_runs, "_step", dies)
            make(setup, values=values)
        (path,) = (p for p in (paths.outputs() / short_runs.GROUP).glob("*/run.json"))
        assert runs.status(path.parent) == "killed"
        return path.parent

    killed = kill_at(2, SHARED)
    (folder,) = make(setup)
    assert folder != killed and not killed.exists()
    shutil.rmtree(folder)

    long = SHARED | {"steps": short_runs.CHECKPOINT_EVERY + 4}
    (straight,) = make(setup, values=long)
    loss = files.read_json(straight / "result.json")["held_out_loss"]
    shutil.rmtree(straight)
    killed = kill_at(short_runs.CHECKPOINT_EVERY + 2, long)
    assert make(setup, values=long) == [killed] and runs.status(killed) == "done"
    assert files.read_json(killed / "result.json")["held_out_loss"] == loss
    steps = [r["step"] for r in runs.Run(killed, {}).history()]
    assert sorted(set(steps)) == sorted(steps) and max(steps) == long["steps"]


def test_a_run_of_ones_own_is_running_while_it_runs_and_done_afterwards(setup):
    with short_runs.opened({"method": "mine", "seed": 0}, {"content": "tiny"}, group="mine") as run:
        assert runs.status(run.dir) == "running"
        run.log({"step": 1})
    assert runs.status(run.dir) == "done" and runs.record(run.dir)["sealed"].keys() >= {
        "metrics.jsonl"
    }
    assert parameters.load_yaml(run.dir / "parameters.yaml") == {"method": "mine", "seed": 0}


def test_a_run_with_a_key_stands_once_however_often_it_is_made(setup):
    def make() -> Path:
        with short_runs.opened(
            {"method": "mine"}, {"content": "tiny"}, group="mine", key="a"
        ) as run:
            run.result(held_out_loss=1.0)
        return run.dir

    folders = [make(), make()]
    with pytest.raises(KeyboardInterrupt), short_runs.opened({}, {}, group="mine", key="a"):
        raise KeyboardInterrupt
    folders.append(make())
    assert [folder.exists() for folder in folders] == [False, False, True]
    assert len(list(folders[0].parent.glob("*/run.json"))) == 1


def test_an_unknown_method_is_refused(setup):
    with pytest.raises(ValueError, match="method = 'lara': allowed are full, lora"):
        make(setup, methods=["lara"])
