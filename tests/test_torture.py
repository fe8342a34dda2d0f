"""The campaign of kills: a short one that must end without a fault, and that it sees every kind of
fault there is.
"""

import builtins
import contextlib
import json
import re
import signal
import subprocess
import symtable
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torture
from magics import plain

from nblib import files
from nbworkbook import parameters

SCRIPT = Path(torture.__file__)
# Counts to 40 in a second, keeps where it is, and goes on from there. What is in capitals is
# replaced below.
COUNTING = """
import json, os, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[2]); folder.mkdir(parents=True, exist_ok=True)
state, steps = folder / "state", 0
first = int(state.read_text()) if state.exists() else 0
print("cell 1/1", flush=True)
AT FIRST
for step in range(first, 40):
    time.sleep(0.025)
    (folder / "next").write_text(str(step + 1)); os.replace(folder / "next", state)
    steps += 1
(folder / "result.json").write_text(json.dumps({"steps": RESULT, "seconds": time.time()}))
"""
RIGHT = {"AT FIRST": "", "RESULT": "first + steps"}
KILLS = [torture.Kill("cell", 0.6, 0.3, 1, "runner", 0.0, True)] * 2  # a third of the way, twice


def campaign(tmp_path: Path, monkeypatch, **changes: str) -> torture.Result:
    """A chain of kills over the counting."""
    source = COUNTING
    for text, replacement in (
        RIGHT | {name.replace("_", " "): change for name, change in changes.items()}
    ).items():
        source = source.replace(text, replacement)
    (tmp_path / "job.py").write_text(source)
    monkeypatch.setattr(torture, "JOBS", tmp_path / "job.py")
    monkeypatch.setattr(torture, "plan", lambda seed, number: ("job", list(KILLS)))
    monkeypatch.setattr(torture, "PATIENCE", 0.5)
    return torture.Campaign(tmp_path / "worlds", 0).chain(0)


def alive(folder: Path) -> list[Path]:
    """Processes of a world in the folder."""
    mark, living = f"{torture.MARK}={folder}/".encode(), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            living += [environment] if mark in environment.read_bytes() else []
    return living


def test_a_job_that_goes_on_where_it_was_is_equal(tmp_path, monkeypatch):
    result = campaign(tmp_path, monkeypatch)
    assert (result.kills, result.faults) == (2, []) and "runner in cell 1/1 +0." in result.story[0]


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("not equal", dict(RESULT="steps")),
        (
            "not equal",
            dict(
                AT_FIRST="(folder / 'fresh').touch() if not first else (folder / 'fresh').unlink(missing_ok=True)"
            ),
        ),
        ("cannot go on", dict(AT_FIRST="assert not first, 'lost'")),
        (
            "orphan",
            dict(AT_FIRST="first or subprocess.Popen(['sleep', '30'], start_new_session=True)"),
        ),
        pytest.param(
            "left behind",
            dict(AT_FIRST="not first or (folder / '.a.1.partial').touch()"),
            marks=pytest.mark.kernel,
        ),
    ],
)
def test_every_kind_of_fault_is_seen(kind, changes, tmp_path, monkeypatch):
    ((seen, sentence),) = campaign(tmp_path, monkeypatch, **changes).faults
    assert seen == kind, sentence
    assert not alive(tmp_path)


def test_shards_are_compared_by_what_is_in_them(tmp_path):
    """safetensors writes the words about a file in an order of its own, so its hash in the manifest
    says nothing.
    """
    weights, words = {"w": torch.ones(3)}, {"a": "1", "b": "2", "c": "3"}
    facts = []
    for number, value in enumerate((1.0, 1.0, 2.0)):
        folder = tmp_path / str(number) / "step-00000001"
        folder.mkdir(parents=True)
        name = "training-00001-of-00001.safetensors"
        raw = safetensors.torch.save({"w": weights["w"] * value}, words)
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        order = sorted(words, reverse=bool(number))
        header["__metadata__"] = {key: words[key] for key in order}
        text = json.dumps(header).encode()
        (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
        files.seal(folder)
        facts.append([torture._fact(folder / "manifest.json"), torture._fact(folder / name)])
    assert facts[0] == facts[1] and facts[1] != facts[2]


def test_the_seed_decides_every_kill():
    plans = [
        torture.plan(seed, number) for seed in (0, 1) for number in range(len(torture.cycle()))
    ]
    assert plans == [
        torture.plan(seed, number) for seed in (0, 1) for number in range(len(torture.cycle()))
    ]
    assert len({str(kills) for _, kills in plans}) == len(plans)
    drawn = [kill for _, kills in plans for kill in kills]
    assert {kill.victim for kill in drawn} == set(torture.VICTIMS) and {
        kill.aim for kill in drawn
    } == set(torture.AIMS)
    assert sum(kills for _, kills in torture.cycle()) >= 200
    assert {path.stem for path in torture.NOTEBOOKS.glob("[0-9]*.ipynb")} <= {
        target for target, _ in torture.cycle()
    }


@pytest.mark.parametrize("name", torture.SHORT)
def test_the_short_notebooks_are_of_the_notebooks_as_they_are(name, tmp_path):
    """A cut that no cell answers to is one that a change of the notebook has made useless."""
    words, cut = torture.SHORT[name]
    torture.write_short(torture.NOTEBOOKS / f"{name}.ipynb", tmp_path)
    whole, short = (
        parameters.cells(torture.NOTEBOOKS / f"{name}.ipynb"),
        parameters.cells(tmp_path / f"{name}.ipynb"),
    )
    assert [text for text in cut if not any(text in cell["source"] for cell in whole)] == []
    assert "run.result(" in short[-1]["source"] or "run.finish(" in short[-1]["source"]
    known = parameters.declared(tmp_path / f"{name}.ipynb")
    for word in words.split():
        parameters.parse_assignment(word, known)


@pytest.mark.parametrize("name", torture.SHORT)
def test_no_cell_of_a_short_notebook_needs_a_name_that_was_cut(name, tmp_path):
    torture.write_short(torture.NOTEBOOKS / f"{name}.ipynb", tmp_path)
    known, missing = {*dir(builtins), "display"}, []
    for cell in parameters.cells(tmp_path / f"{name}.ipynb"):
        table = symtable.symtable(_without_await(plain(cell["source"])), name, "exec")
        here = {
            s.get_name()
            for s in table.get_symbols()
            if s.is_assigned() or s.is_imported() or s.is_namespace()
        }
        known |= here
        missing += [
            s.get_name()
            for s in table.get_symbols()
            if s.is_referenced() and s.get_name() not in known
        ]
    assert missing == []


def _without_await(source: str) -> str:
    """For symtable, which knows no await outside of functions."""
    return re.sub(r"\bawait |\basync (?=for|with)", "", source)


@pytest.mark.slow
@pytest.mark.kernel
def test_ctrl_c_leaves_nothing():
    command = [sys.executable, "-u", SCRIPT, "--kills", "9", "--only", "adamw"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    place = Path(re.search(r"in (/\S+)", process.stdout.readline())[1])
    while not list(place.glob("*/store")):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "0 of 0 kills equal" in said
    assert not place.exists()
    assert not alive(place)


@pytest.mark.slow
@pytest.mark.kernel
def test_thirty_kills(tmp_path):
    """The first thirty of `make torture`: a notebook and one of everything else that is killed."""
    command = [sys.executable, SCRIPT, "--kills", "30", "--json", tmp_path / "facts.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    print(done.stdout)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert done.returncode == 0, done.stdout[-3000:]
    head, *_, total = facts["table"]
    total = dict(zip(head, total))
    assert int(total["kills"]) >= 30 and total["kills"] == total["equal"]
    assert {"14_sparse_depth", "adamw", "cache", "records", "base", "sweep"} <= {
        row[0] for row in facts["table"]
    }
