"""The command on a run that was trained, on its damaged twin, and on what is no run at all."""

import json

import pytest
import small_notebooks
import torch
import yaml
from safetensors.torch import load_file, save_file

from experiments import muon_race
from nblib import checkpoint, files, paths, runtime, train
from nblib.methods import moe
from nblib.methods.muon import groups
from nbworkbook import audit, cli
from nbworkbook.runs import Run

SHAPE = dict(hidden=32, layers=2, heads=2, width=16, experts=4, top_k=2)
VOCABULARY, STEPS = 64, 24
PARAMETERS = """update: str = "original"  # scaling [adamw, original, match_rms_adamw]
lr: float = 0.02  # rate [0 .. 1]
adamw_lr: float = 0.02  # the other rate [0 .. 1]
balance_weight: float = 0.1  # weight [0 .. 10]
steps: int = 24  # steps [1 .. 1000]
hidden: int = 32  # width [1 .. 999]
width: int = 16  # inner width [1 .. 999]
experts: int = 4  # experts [1 .. 99]
top_k: int = 2  # of them [1 .. 99]
rows: int = 16  # rows [0 .. 99]
length: int = 32  # tokens [1 .. 999]
accumulate: int = 1  # micro-batches [1 .. 99]"""


def trained(folder, *, lr=0.02, steps=STEPS):
    """The run folder of a mixture that learned to repeat a few words, with two checkpoints and
    every step logged.
    """
    run = Run(files.make_folder(folder), {})
    files.write_checked_json(folder / "run.json", {"notebook": "12_moe_muon", "status": "done"})
    (folder / "parameters.yaml").write_text(f"lr: {lr}\nsteps: {steps}\n")
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(VOCABULARY, (4, 32), generator=generator)
    batches = ({"input_ids": r, "labels": r} for r in (words.repeat(4, 1) for _ in range(steps)))
    model = muon_race.backbone(VOCABULARY, family="qwen3_moe", seed=0, **SHAPE)
    options = dict(
        total=steps, loss=moe.loss(balance_weight=0.1), machine=runtime.pick("cpu", "fp32")
    )
    options |= dict(
        checkpoints=train.Checkpoints(run.checkpoints / "mixture", every=steps // 2), clip=0
    )
    train.fit(
        model,
        batches,
        groups.optimizers(model, lr=lr, adamw_lr=0.02),
        watch=train.Watch(log=lambda r: run.log(r | {"seconds": 0.1 * r["step"]}), log_every=1),
        **options,
    )
    return folder  # this machine's seconds are noise


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    folder = small_notebooks.steady_workbook(tmp_path, monkeypatch)
    small_notebooks.write("12_moe_muon", "1", parameters=PARAMETERS)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(workbook):
    return trained(paths.outputs() / "12_moe_muon" / "20260101-000000-abcdef")


def test_a_run_that_learned_is_passed_in_three_parts(run, capsys):
    assert cli.main(["audit", "12"]) == 0
    said = capsys.readouterr().out
    parts = [
        "parameters  ",
        "steps  the training",
        "weights  ",
        "compared with step-00000012",
        "nothing looks wrong",
    ]
    assert [said.index(part) for part in parts] == sorted(said.index(part) for part in parts)
    assert "model.layers.*.mlp.experts.down_proj" in said and "smallest load" not in said
    loss = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    assert (
        f"step 24, loss {loss:.4f}, Qwen3MoeForCausalLM" in said
        and f"torch {torch.__version__}" in said
    )


def test_the_values_that_a_checkpoint_was_trained_with_are_told(tmp_path, capsys):
    state = checkpoint.capture(
        torch.nn.Linear(2, 2), [], progress={"step": 3, "recent": [2.0, 1.5]}
    )
    place = checkpoint.save(tmp_path, state, parameters={"lr": 0.02, "update": "original"})
    assert audit.provenance(place)[-1] == "lr = 0.02, update = original"
    assert audit.main(str(place)) == 0 and "step 3, loss 1.5000, Linear" in capsys.readouterr().out
    assert audit.provenance(tmp_path) == []


def test_a_damaged_checkpoint_of_it_is_found(run, capsys):
    file = run / "checkpoints" / "mixture" / "step-00000024" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.experts.down_proj"][2] = torch.nan
    save_file(weights, file)
    assert cli.main(["audit", str(run)]) == 1
    said = capsys.readouterr().out
    assert (
        "model.safetensors changed since it was written" in said
        and "entries are nan or infinite" in said
    )
    assert said.endswith("\n2 findings\n")


def test_an_expert_that_rested_between_two_checkpoints_is_found(run, capsys):
    before, now = sorted((run / "checkpoints" / "mixture").glob("step-*"))
    weights, name = load_file(now / "model.safetensors"), "model.layers.0.mlp.experts.gate_up_proj"
    weights[name][1] = load_file(before / "model.safetensors")[name][1]
    save_file(weights, now / "model.safetensors")
    files.seal(now)
    assert cli.main(["audit", "12"]) == 1
    assert f"{name}: expert 1 did not change since the checkpoint before" in capsys.readouterr().out
    assert cli.main(["audit", str(now)]) == 0  # alone it looks like the others
    assert cli.main(["audit", str(now.parent)]) == 1
    capsys.readouterr()
    deeper = run / "checkpoints" / "suspects" / "one"
    deeper.parent.mkdir()
    now.parent.rename(deeper)
    assert cli.main(["audit", "12"]) == 0
    assert "1 trainings of comparisons are left out" in capsys.readouterr().out


def test_a_run_that_diverged_is_found_by_its_steps(run, capsys):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    worse = [r | {"ce": r["ce"] + r["step"], "grad_norm": 2.0 ** r["step"]} for r in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in worse))
    assert cli.main(["audit", "12"]) == 1
    said = capsys.readouterr().out
    assert "ce rises from" in said and "gradient norms grow" in said


def test_a_file_of_parameters_before_a_run(workbook, capsys):
    good, bad = workbook / "12_moe_muon.good.yaml", workbook / "12_moe_muon.bad.yaml"
    good.write_text("lr: 0.02\n")
    bad.write_text(yaml.safe_dump({"lr": 3e-4, "adamw_lr": 9e-5, "top_k": 4}))
    assert cli.main(["audit", str(good)]) == 0
    assert "nothing looks wrong" in capsys.readouterr().out
    assert cli.main(["audit", str(bad)]) == 1
    said = capsys.readouterr().out
    assert said.count("! ") == 4 and "4 findings" in said
    assert list((workbook / "outputs").glob("*")) == []  # it writes nothing


@pytest.mark.parametrize(
    "target, words",
    [
        ("nobody", "Unknown run 'nobody'"),
        ("no/such/folder", "'no/such/folder': there is no such file."),
        ("no.yaml", "Cannot read the parameter file no.yaml"),
        ("empty", "'empty': no run, and no folder with .safetensors files."),
        ("pickled", "a pickle, which runs code when it is read"),
        ("broken.yaml", "broken.yaml, line 2"),
        ("other.yaml", "Unknown notebook 'other'"),
        ("12_moe_muon.nested.yaml", "the mapping must be flat"),
        ("notes.txt", "is neither a folder nor a .safetensors file"),
        ("\x00", "is"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(target, words, workbook, capsys):
    (workbook / "empty").mkdir()
    (workbook / "pickled").mkdir()
    (workbook / "pickled" / "pytorch_model.bin").write_bytes(b"\x80")
    (workbook / "broken.yaml").write_text("lr: [\n")
    (workbook / "other.yaml").write_text("lr: 0.1\n")
    (workbook / "12_moe_muon.nested.yaml").write_text("optimizer:\n  type: muon\n")
    (workbook / "notes.txt").write_text("no weights")
    assert cli.main(["audit", target]) == 2
    said = capsys.readouterr()
    assert (
        said.out == ""
        and words in said.err
        and len(said.err.splitlines()) == 1
        and said.err.startswith("nblib: ")
    )


def test_a_run_without_anything_to_audit_is_refused(workbook, capsys):
    folder = files.make_folder(paths.outputs() / "12_moe_muon" / "20260101-000000-abcdef")
    files.write_checked_json(folder / "run.json", {"notebook": "12_moe_muon"})
    assert cli.main(["audit", "12"]) == 2
    assert "has neither parameters nor metrics" in capsys.readouterr().err
