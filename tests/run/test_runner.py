"""Notebooks really executed: every ending has its sentence, nothing done is repeated, nothing begun is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import small_notebooks
from small_notebooks import nblib, run_one, sentence_of, write

from nblib import cli, files
from nblib.run import jobs, runner, runs

# counts to 60 in a second or so, keeps where it is like a training cell does, and continues from there
TRAINING = """import os, time, pathlib
here = pathlib.Path(os.environ["NBLIB_RUN_DIR"])
state = here / "checkpoints" / "step.txt"
state.parent.mkdir(exist_ok=True)
def save(step):  # as real checkpoints do: a kill can fall between the truncation and the write
    state.with_suffix(".new").write_text(str(step))
    os.replace(state.with_suffix(".new"), state)
first = int(state.read_text()) if state.exists() else 0
lines = (here / "metrics.jsonl").open("a")
try:
    for step in range(first, 60):
        if first == 0 or step > first:
            time.sleep(0.3 if first == 0 else 0)
        lines.write('{"step": %d}\\n' % step); lines.flush()
        save(step + 1) if step % 2 else None
        print("step", step, flush=True)
except KeyboardInterrupt:
    print("saving", flush=True)
    time.sleep(0.7)
    save(step)
    (here / "checkpoints" / "asked").touch()
    print("checkpoint written")"""


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.steady_workbook(tmp_path, monkeypatch)


@pytest.mark.kernel
def test_a_good_run_its_folder_and_the_skip(workbook, capsys):
    write(
        "00_good",
        "from nblib.run import runs\nrun = runs.begin('00_good', globals())\nprint('live', steps)",
        "import torch\nrun.log({'step': 1, 'loss': float('nan'), 'norm': torch.tensor(2.0)})\nrun.log({'step': 2})",
        "run.result(loss=1.25, note='<script>')\nrun.result(tokens=7)",
        "from matplotlib.figure import Figure\nfig = Figure((2, 1))\nfig.subplots().plot([1, 2])\n"
        "run.figure('curve', fig)",
        "run.finish()",
    )
    planned = jobs.plan(["00"], overrides=["steps=5", "lr=1e-5", "sizes=3,4"])
    (outcome,) = runner.run(planned)
    folder = outcome.folder
    assert outcome.status == "done" and runs.is_done(folder) and runner.exit_code([outcome]) == 0
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", folder.name)
    expected = "environment.json figures metrics.jsonl notebook.ipynb parameters.yaml result.json run.json"
    assert sorted(path.name for path in folder.iterdir() if path.name != "events") == expected.split()
    assert (folder / "events").exists() == bool(find_spec("tensorboard"))
    assert "live 5" in capsys.readouterr().out
    metrics = [json.loads(line, parse_constant=pytest.fail) for line in (folder / "metrics.jsonl").open()]
    assert metrics == [{"step": 1, "loss": "nan", "norm": 2.0}, {"step": 2}]
    assert files.read_json(folder / "result.json") == {"loss": 1.25, "note": "<script>", "tokens": 7}
    assert files.read_json(folder / "environment.json")["packages"]["torch"]
    again = jobs.plan(["00_good.ipynb"], files=[str(folder / "parameters.yaml")])
    assert again[0].parameters == planned[0].parameters and again[0].parameters["lr"] == 1e-5

    before = small_notebooks.files(folder)
    (skipped,) = runner.run(again)  # asked for in another way, yet the same run
    assert (skipped.status, skipped.folder) == ("skipped", folder) and "--force" in capsys.readouterr().out
    assert small_notebooks.files(folder) == before
    assert jobs.plan(["00_good"])[0].key != planned[0].key
    assert "loss 1.25" in runner.summary([skipped])


@pytest.mark.kernel
def test_force_makes_a_fresh_folder(workbook):
    write("00_a", "1 + 1")
    first = run_one("00_a")
    second = run_one("00_a", force=True)
    assert second.status == "done" and second.folder != first.folder
    assert run_one("00_a").status == "skipped"
    # a record alone is not believed: neither papermill's, nor ours without the cells
    document = json.loads((second.folder / "notebook.ipynb").read_text())
    document["cells"][-1]["execution_count"] = None
    (second.folder / "notebook.ipynb").write_text(json.dumps(document))
    assert not runs.is_done(second.folder)


@pytest.mark.kernel
def test_a_failing_cell_is_named_and_stops_the_rest(workbook, capsys):
    write("00_bad", "a = 1", "\n# then\nraise ValueError('no good\\nat all')", "print('never')")
    write("01_next", "1")
    planned = jobs.plan(["00", "01"], overrides=["steps=2"])
    failed, left = runner.run(planned)
    said = sentence_of(failed)
    assert "cell 4 (`# then`) raised ValueError: no good at all" in said and "-p steps=2" in said
    assert left.status == "not run" and runner.exit_code([failed, left]) == 1
    cells = json.loads((failed.folder / "notebook.ipynb").read_text())["cells"]
    assert any(output["output_type"] == "error" for cell in cells for output in cell.get("outputs", []))
    assert said in capsys.readouterr().err
    again, other = runner.run(planned, keep_going=True)
    assert (again.folder, again.status, other.status) == (failed.folder, "failed", "done")
    assert files.read_json(again.folder / "run.json")["attempts"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.kernel
def test_asked_to_stop_the_cell_saves_and_a_second_run_continues(workbook, number):
    write("00_train", TRAINING, "print('after')")
    process = small_notebooks.start("run", "00_train")
    _wait_for(process, "step 4")
    # as a terminal does it: Ctrl-C goes to the whole process group
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err
    assert "checkpoint written" in out and "after" not in out and "00_train was stopped in cell 2 (`import os" in err
    (folder,) = (workbook / "outputs" / "00_train").iterdir()
    assert runs.status(folder) == "stopped" and int((folder / "checkpoints/step.txt").read_text()) >= 4
    _second_run_continues(workbook, folder)


@pytest.mark.kernel
def test_killed_at_any_moment_a_second_run_continues(workbook):
    write("00_train", TRAINING, "print('after')")
    process = small_notebooks.start("run", "00_train")
    _wait_for(process, "step 4")
    (folder,) = (workbook / "outputs" / "00_train").iterdir()
    assert runs.status(folder) == "running"
    (worker,) = _children(process.pid)
    (kernel,) = _children(worker)
    os.kill(kernel, signal.SIGSTOP)  # it would notice within a second that it is an orphan
    threading.Timer(2.5, os.kill, [kernel, signal.SIGCONT]).start()  # now, so that a failure below leaves none behind
    for pid in (process.pid, worker):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    assert runs.status(folder) == "running", "the kernel is alive and could still write"
    process.wait()
    _second_run_continues(workbook, folder)


@pytest.mark.kernel
def test_the_runner_alone_killed_its_process_stops_with_a_checkpoint(workbook):
    write("00_train", TRAINING, "print('after')")
    process = small_notebooks.start("run", "00_train")
    _wait_for(process, "step 4")
    process.kill()
    process.wait()
    (folder,) = (workbook / "outputs" / "00_train").iterdir()
    deadline = time.monotonic() + 15
    while runs.status(folder) == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert runs.status(folder) == "stopped" and (folder / "checkpoints" / "asked").exists()
    cells = json.loads((folder / "notebook.ipynb").read_text())["cells"]
    assert "checkpoint written" in str(cells[2]["outputs"])
    _second_run_continues(workbook, folder)


@pytest.mark.kernel
def test_a_cell_that_will_not_end_is_killed_on_the_second_request(workbook):
    stubborn = "import time\nwhile True:\n    try:\n        print('on', flush=True); time.sleep(0.5)\n"
    write("00_a", stubborn + "    except KeyboardInterrupt:\n        print('no', flush=True)")
    process = small_notebooks.start("run", "00_a")
    _wait_for(process, "on")
    process.send_signal(signal.SIGINT)
    _wait_for(process, "no")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=15)
    assert process.returncode == 130 and "was stopped in cell 2" in err and "Traceback" not in err


@pytest.mark.kernel
def test_two_at_once_run_side_by_side_on_their_share(workbook, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    body = "import os, time\nt = time.time()\ntime.sleep(1.5)\nprint(os.environ['OMP_NUM_THREADS'], t, time.time())"
    write("00_a", body)
    write("01_b", body)
    outcomes = runner.run(jobs.plan(["00", "01"]), jobs_at_once=2)
    assert [outcome.status for outcome in outcomes] == ["done", "done"]
    spans = re.findall(r"^\[(\w+)\] (\d+) (\S+) (\S+)$", capsys.readouterr().out, flags=re.M)
    assert sorted(span[0] for span in spans) == ["00_a", "01_b"]
    assert {span[1] for span in spans} == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    assert max(float(span[2]) for span in spans) < min(float(span[3]) for span in spans)


@pytest.mark.parametrize(
    "cores, gib, quota, limit_gib, cards, expected",
    [
        (8, 64, [], None, 0, 8),  # as many as there are cores
        (64, 13, [], None, 0, 4),  # as many as fit into memory
        (1, 1, [], None, 0, 1),  # one at least
        (64, 256, [200000, 100000], None, 0, 2),  # a container's part of the cores
        (64, 256, [100000], 7, 0, 2),  # of the memory; "max 100000" is no limit of the cores
        (8, 64, [], None, 3, 3),  # one per card
    ],
)
def test_as_many_at_once_as_the_machine_can(monkeypatch, cores, gib, quota, limit_gib, cards, expected):
    def numbers(*files):
        if "/proc/meminfo" in files:
            return [0, 0, gib * 2**20]
        return quota if "cpu" in files[0] else [limit_gib * 2**30] if limit_gib else []

    monkeypatch.setattr(runner, "_numbers", numbers)
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(runner, "gpus", lambda: [(str(n), "NVIDIA") for n in range(cards)])
    assert runner.capacity() == expected


def test_numbers_of_the_kernels_files(tmp_path):
    (tmp_path / "max").write_text("max 100000\n")
    (tmp_path / "quota").write_text("-1\n")
    (tmp_path / "meminfo").write_text("MemTotal:       24684092 kB\nMemFree:        20423328 kB\n")
    assert runner._numbers(str(tmp_path / "max"), str(tmp_path / "absent")) == [100000]
    assert runner._numbers(str(tmp_path / "quota")) == []
    assert runner._numbers(str(tmp_path / "meminfo")) == [24684092, 20423328]
    assert runner.capacity() >= 1  # on the real ones


BASED = """seed: int = 0  # random seed
recipe: str = "default"  # which base model [default, full]
model: str = ""  # another model instead"""


@pytest.mark.kernel
def test_while_the_base_models_are_made_what_needs_none_runs(workbook, monkeypatch, capfd):
    write("00_a", "from nblib import base", parameters=BASED)
    write("01_b", "from nblib import start", parameters=BASED)
    write("02_c", "from nblib import paths", parameters=BASED)  # says recipe, and reaches no base model
    write("03_d", "from nblib import base", parameters=BASED.replace('"default"  #', '"full"  #'))
    write("04_e", "from nblib import base", parameters=BASED.replace('""', '"Qwen/Qwen3-0.6B"'))
    write("05_f", "from nblib import base", parameters="seed: int = 0  # random seed")
    planned = jobs.plan(jobs.names())
    default, full = ("default", "auto", "auto"), ("full", "auto", "auto")
    assert [runner._base_of(job) for job in planned] == [default, default, None, full, None, default]

    write("00_a", "from nblib import base; import time; print('AT', time.time())", parameters=BASED)
    write("02_c", "import time; print('AT', time.time())", parameters=BASED)
    popen, started, options = subprocess.Popen, [], {}

    def recorded(command, **given):
        if command[1:3] == ["-m", "nblib.base"]:
            options.update(given["env"])
            program = "import time; time.sleep(4); print('base model: step 1 of 1 AT', time.time())"
            command = [sys.executable, "-c", program]
        started.append("base" if "-c" in command else "notebook")
        return popen(command, **given)

    monkeypatch.setattr(runner.subprocess, "Popen", recorded)
    pair = jobs.plan(["00", "02"])
    monkeypatch.setattr(runner, "_base_of", lambda job: default if job.notebook == "00_a" else None)
    assert [outcome.status for outcome in runner.run(pair, jobs_at_once=2)] == ["done", "done"]
    at = dict(re.findall(r"^(\[\w+\]|base model).* ?AT (\S+)$", capfd.readouterr().out, flags=re.M))
    assert float(at["[02_c]"]) < float(at["base model"]) < float(at["[00_a]"])
    assert sorted(started) == ["base", "notebook", "notebook"]
    assert options["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    started.clear()
    assert {outcome.status for outcome in runner.run(pair, jobs_at_once=2)} == {"skipped"} and started == []
    runner.run(pair[:1], force=True)  # one at a time: the notebook makes it, with its own progress
    assert started == ["notebook"]


def test_ctrl_c_while_the_base_model_is_made_starts_no_notebook(workbook, monkeypatch, capfd):
    write("00_a", "from nblib import base", parameters=BASED)
    write("01_b", "from nblib import base", parameters=BASED)
    popen = subprocess.Popen
    program = "import time\nprint('base model: step 1 of 2', flush=True)\ntime.sleep(60)"
    monkeypatch.setattr(runner.subprocess, "Popen", lambda _, **o: popen([sys.executable, "-c", program], **o))
    threading.Timer(1.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    outcomes = runner.run(jobs.plan(jobs.names()), jobs_at_once=2)
    assert [outcome.status for outcome in outcomes] == ["stopped", "stopped"] and runner.exit_code(outcomes) == 130
    printed = capfd.readouterr()
    assert "step 1 of 2" in printed.out and "Traceback" not in printed.out + printed.err
    assert not any((workbook / "outputs").glob("*/*/run.json"))


@pytest.mark.parametrize(
    "arguments, expected",
    [(["--all"], None), (["00_a"], 1), (["00_a", "--jobs", "auto"], None), (["--all", "--jobs", "3"], 3)],
)
def test_how_many_at_once_by_default(workbook, monkeypatch, arguments, expected):
    write("00_a", "1")
    given = {}
    monkeypatch.setattr(runner, "run", lambda planned, **options: given.update(options) or [])
    cli.main(["run", *arguments])
    assert given["jobs_at_once"] == expected


def test_each_slot_gets_a_card_of_its_own(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA A'\necho '1, NVIDIA B'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [runner._share(slot, 3)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["0", "1", "0"]
    assert runner._share(0, 1) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert jobs.gpus() == [("1", "NVIDIA B")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert jobs.gpus() == []


@pytest.mark.kernel
def test_overhead_over_a_script(workbook, capsys):
    body = "import json\ntotal = sum(i * i for i in range(3_000_000))"
    write("00_a", body)
    script = workbook / "same.py"
    script.write_text(f"{small_notebooks.PARAMETERS}\n{body}\n")
    as_script, as_notebook = [], []
    for _ in range(2):
        began = time.monotonic()
        subprocess.run([sys.executable, script], check=True)
        as_script.append(time.monotonic() - began)
        began = time.monotonic()
        assert run_one("00_a", force=True).status == "done"
        as_notebook.append(time.monotonic() - began)
    overhead = min(as_notebook) - min(as_script)
    with capsys.disabled():
        print(f"\nrunner: {min(as_notebook):.2f} s, script: {min(as_script):.2f} s, overhead {overhead:.2f} s", end=" ")
    assert overhead < 6, "aim: 2 s on a quiet machine"


def _wait_for(process, text):
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"ended without printing {text!r}: {process.stderr.read()}")


def _children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return list(map(int, found.split()))


def _second_run_continues(workbook, folder: Path):
    seen = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    code, out, err = nblib("run", "00_train")
    assert code == 0, err
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "a new folder instead of the old one"
    assert "resumes in" in out and "after" in out and runs.is_done(folder)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps[: len(seen)] == seen, "metrics of the first attempt were lost"
    assert sorted(set(steps)) == list(range(60)) and steps.count(0) == 1, "started from the beginning"
    assert nblib("run", "00_train")[1].count("done already") == 1
