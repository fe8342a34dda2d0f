"""A notebook that is killed in the middle of each of its trainings, and continued by the same
command every time, ends on the results, the figures and the tables of the one that went straight
through.

A kill in the middle of a training is also one after all trainings before it: those are found
finished. After the first one there is a kill of its own, so that what follows it also begins in a
process that has not trained. The last kill is at the very end, so the process that ends the run has
trained nothing.
"""

import json
import os
from pathlib import Path

import kill_stages
import nbformat
import pytest
from conftest import FP32
from small_notebooks import files, steady_workbook

from experiments import muon_race
from nblib import models, text, train
from nbworkbook import jobs, runner

pytestmark = [pytest.mark.slow, pytest.mark.base, pytest.mark.kernel]

SHORT = {
    "10_lrc": dict(
        steps=10, rows=2, length=32, short_steps=4, eval_rows=8, quick_rows=4, percent=25.0
    ),
    "11_ard_lora": dict(
        steps=12,
        rows=2,
        length=32,
        small_steps=8,
        small_tokens=600,
        samples=1,
        eval_rows=8,
        kept="[0.5]",
    ),
    "12_moe_muon": dict(
        steps=12,
        suspect_steps=8,
        race_steps=4,
        balance_steps=4,
        rival="true",
        rows=2,
        length=32,
        eval_rows=8,
        hidden=32,
        width=16,
    ),
    "13_distillation": dict(steps=12, eval_every=4, rows=2, length=32, hidden=32, eval_rows=8),
    "14_sparse_depth": dict(
        steps=12, short_steps=4, rows=2, length=32, eval_rows=8, hidden=32, width=16
    ),
    "15_spiking_student": dict(steps=12, eval_every=4, rows=2, length=32, hidden=32, eval_rows=8),
}
NO_MODEL = {"12_moe_muon", "14_sparse_depth"}  # they begin with new weights
# trained by the same lines as one that is killed: left alone
# as short_masked, which also draws what it masks
ALIKE = {"short_ce", "short_logits", "short_hidden"}
# as adalora, which also shares out its ranks, and as small_lora
ALIKE |= {"lora_48", "lora_24", "small_ard"}
ALIKE |= {"labels_alone", "live_teacher"}  # as all_logits_from_disk
ALIKE |= {"rival_16"}  # as suspects/bf16_weights
ALIKE |= {
    f"seeds/{seed}/{name}"
    for seed in (1, 2)
    for name in ("labels_alone", "live_teacher", "with_a_teacher")
}
ALIKE |= {"32_largest_tail_drawn", "starts/random"}
ALIKE |= {
    f"own_words/{seed}/{way}"
    for seed in (0, 1, 2)
    for way in ("labels", "text", "words")
    if seed or way != "words"
}
SUSPECTS = [("healthy",), *muon_race.combinations()[2:]]
ALIKE |= {"suspects/" + "+".join(names).replace(" ", "_") for names in SUSPECTS}
# a table that holds one of these is about time, which no run repeats; progress is of the steps that
# one kernel made
TIMES = ("tokens per second", "seconds", "share of the time", "eval_tokens_per_s", ": step ")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A model in place of the base model, where a notebook takes one: it has learned a little in
    seconds.
    """
    folder, documents = tmp_path_factory.mktemp("model"), text.documents("prose")
    tokenizer = text.train_tokenizer(documents)
    model = models.tiny(len(tokenizer), hidden=64, layers=2, heads=2)
    batches = text.Batches(text.encode(documents[:40], tokenizer), rows=8, length=64)
    train.fit(model, batches, train.adamw(model, lr=1e-2), total=60, machine=FP32)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


def through(name: str, model: Path, outputs: Path, monkeypatch, kills: list[str] = ()) -> Path:
    """The folder of a run of the notebook that is killed at each of the places and then gets to its
    end.
    """
    monkeypatch.setenv("NBLIB_OUTPUTS", str(outputs))
    monkeypatch.setenv(kill_stages.KILLS, str(outputs / "kills"))
    kill_stages.plan(list(kills))
    values = SHORT[name] | ({} if name in NO_MODEL else {"model": model})
    job = jobs.plan([name], overrides=[f"{key}={value}" for key, value in values.items()])
    for n, place in enumerate(kills):
        (outcome,) = runner.run(job)
        assert outcome.status == "failed" and "SIGKILL" in outcome.sentence, (
            f"at '{place}': {outcome.sentence}"
        )
        assert kill_stages.left() == list(kills[n + 1 :])
    (outcome,) = runner.run(job)
    assert outcome.status == "done", outcome.sentence
    (folder,) = (path.parent for path in (outputs / name).glob("*/run.json"))
    assert json.loads((folder / "run.json").read_text())["attempts"] == len(kills) + 1
    return folder


def shown(folder: Path) -> list[str]:
    """What the cells show as text, times and progress apart, and the facts that must not change."""
    cells = [c for c in nbformat.read(folder / "notebook.ipynb", 4).cells if c.cell_type == "code"]
    texts = [o.data["text/plain"] for c in cells for o in c.outputs if "data" in o]
    texts += [
        o.text
        for c in cells
        for o in c.outputs
        if "nbval-check-output" in c.metadata.get("tags", [])
    ]
    return [text for text in texts if not any(word in text for word in TIMES)]


def same(folder: Path, straight: Path) -> None:
    results = [json.loads((run / "result.json").read_text()) for run in (folder, straight)]
    assert results[0] == results[1] and results[0]["resume_bit_equal"]
    assert shown(folder) == shown(straight)
    assert files(folder / "figures") == files(straight / "figures")


@pytest.mark.parametrize("name", SHORT)
def test_killed_anywhere_and_continued_it_is_the_straight_run(name, small, tmp_path, monkeypatch):
    steady_workbook(tmp_path, monkeypatch)
    kill_stages.write(name, tmp_path / "notebooks")
    # the module alone: the folder it is in also holds one named lessons
    alone = tmp_path / "importable"
    alone.mkdir()
    (alone / "kill_stages.py").symlink_to(kill_stages.__file__)
    beside = Path(__file__).resolve().parents[1] / "notebooks"  # where lessons and experiments are
    folders = [str(alone), str(beside), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))

    straight = through(name, small, tmp_path / "straight", monkeypatch)
    saved = kill_stages.stages()
    trained = {stage: steps for stage, steps in saved.items() if not stage.startswith("resume/")}
    assert all(len(steps) > 1 for steps in trained.values()), (
        f"no checkpoint in the middle of a stage: {saved}"
    )
    kills = [f"before {stage} {steps[1]}" for stage, steps in trained.items() if stage not in ALIKE]
    first = next(iter(trained))
    kills.insert(int(first not in ALIKE), f"after {first} {trained[first][-1]}")
    kills.append(f"before resume/stopped {saved['resume/stopped'][-1]}")
    same(through(name, small, tmp_path / "chain", monkeypatch, kills), straight)
