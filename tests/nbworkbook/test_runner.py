"""Notebooks really executed: every ending has its sentence, nothing done is repeated, nothing begun
is lost.
"""

import contextlib
import fcntl
import functools
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import small_notebooks
from small_notebooks import nblib, run_one, sentence_of, write

from nblib import files
from nbworkbook import capacity, cli, jobs, run_history, runner, runs, status_lines

# counts to 60 in a second or so, keeps where it is like a training cell does, and continues from
# there
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
        "from nbworkbook import runs\nrun = runs.begin('00_good', globals())\nprint('live', steps)",
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
    expected = (
        "environment.json figures metrics.jsonl notebook.ipynb parameters.yaml result.json run.json"
    )
    assert (
        sorted(path.name for path in folder.iterdir() if path.name != "events") == expected.split()
    )
    assert (folder / "events").exists() == bool(find_spec("tensorboard"))
    assert "live 5" in capsys.readouterr().out
    metrics = [
        json.loads(line, parse_constant=pytest.fail) for line in (folder / "metrics.jsonl").open()
    ]
    assert metrics == [{"step": 1, "loss": "nan", "norm": 2.0}, {"step": 2}]
    assert files.read_json(folder / "result.json") == {
        "loss": 1.25,
        "note": "<script>",
        "tokens": 7,
    }
    assert files.read_json(folder / "environment.json")["packages"]["torch"]
    again = jobs.plan(["00_good.ipynb"], files=[str(folder / "parameters.yaml")])
    assert again[0].parameters == planned[0].parameters and again[0].parameters["lr"] == 1e-5

    before = small_notebooks.files(folder)
    (skipped,) = runner.run(again)  # asked for in another way, yet the same run
    assert (skipped.status, skipped.folder) == (
        "skipped",
        folder,
    ) and "--force" in capsys.readouterr().out
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
    assert any(
        output["output_type"] == "error" for cell in cells for output in cell.get("outputs", [])
    )
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
    assert (
        "checkpoint written" in out
        and "after" not in out
        and "00_train was stopped in cell 2 (`import os" in err
    )
    (folder,) = (workbook / "outputs" / "00_train").iterdir()
    assert (
        runs.status(folder) == "stopped" and int((folder / "checkpoints/step.txt").read_text()) >= 4
    )
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
    threading.Timer(
        2.5, os.kill, [kernel, signal.SIGCONT]
    ).start()  # now, so that a failure below leaves none behind
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
    stubborn = (
        "import time\nwhile True:\n    try:\n        print('on', flush=True); time.sleep(0.5)\n"
    )
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
    outcomes = runner.run(jobs.plan(["00", "01"]), jobs_at_once=2, detail="all")
    assert [outcome.status for outcome in outcomes] == ["done", "done"]
    spans = re.findall(r"^\[(\w+)\] (\d+) (\S+) (\S+)$", capsys.readouterr().out, flags=re.M)
    assert sorted(span[0] for span in spans) == ["00_a", "01_b"]
    assert {span[1] for span in spans} == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    assert max(float(span[2]) for span in spans) < min(float(span[3]) for span in spans)


TABLE = "from nbworkbook import show\nshow.Table([{'n': f'row {n}'} for n in range(30)])"


@pytest.mark.slow
@pytest.mark.kernel
def test_a_batch_says_when_one_starts_and_ends_and_nothing_of_its_cells(
    workbook, monkeypatch, capsys
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("00_a", "01_b", "02_c"):
        result = f"run = runs.begin('{name}', globals())\nrun.result(loss=1.25, kind='a')"
        lines = "for i in range(100):\n    print('line', i)"
        write(name, TABLE, lines, f"from nbworkbook import runs\n{result}")
    runner.run(jobs.plan(["00"]))
    out = capsys.readouterr().out
    assert "row 29" in out and "line 99" in out and "of 1" not in out
    assert "[00_a] runs in" in out and re.search(r"^\[00_a\] done, 0:\d\d$", out, re.M)

    outcomes = runner.run(jobs.plan(["00", "01", "02"]), jobs_at_once=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5, "one that was done already, two that start and end"
    said = "\n".join(lines)
    assert "\x1b" not in said and "\r" not in said, "control characters where no terminal is"
    at = r"; \d of 3 notebooks, 0:\d\d, (about 0:\d\d left|time left unknown)$"
    assert re.search(r"^\[00_a\] done already in \S+; --force runs it again" + at, said, re.M)
    assert re.search(r"^\[01_b\] runs in \S+" + at, said, re.M)
    results = "loss 1.25, kind a; 3 of 3 notebooks"
    assert re.search(r"^\[\d\d_.\] done, 0:\d\d, " + results + r", \d:\d\d$", said, re.M)
    assert runner.summary(outcomes) == "3 notebooks: 1 skipped, 2 done"


@pytest.mark.slow
@pytest.mark.kernel
def test_with_all_the_details_a_batch_prints_its_cells_and_keeps_a_table_together(
    workbook, monkeypatch, capsys
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("01_b", "02_c"):
        write(name, TABLE, "1")
    runner.run(jobs.plan(["01", "02"]), jobs_at_once=2, detail="all")
    lines = capsys.readouterr().out.splitlines()
    for name in ("01_b", "02_c"):
        first = lines.index(f"[{name}]     row 0")
        assert lines[first : first + 30] == [f"[{name}]     row {n}" for n in range(30)]


def on_a_terminal(*arguments: str, columns: int = 120, **variables: str) -> tuple[int, bytes]:
    """The exit code of `nblib`, and all that a terminal of this width was sent."""
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "nbworkbook.cli", *arguments]
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment = kept | {"TERM": "xterm"} | variables
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while part := os.read(master, 2**16):
            shown += part
    os.close(master)
    return process.wait(), shown


@pytest.mark.kernel
def test_on_a_terminal_the_cell_is_shown_in_place(workbook):
    write("00_a", "print('x' * 3)", "1")
    code, shown = on_a_terminal("run", "00")
    lines = re.findall(rb"\[00_a\] +0:0\d, cell 3/3", shown)
    assert code == 0 and lines and b"cell 3/3\r\n" not in shown
    assert b"\x1b[Jxxx\r\n" in shown, "the line in place goes before anything is printed"


@pytest.mark.slow
@pytest.mark.kernel
def test_on_a_terminal_each_slot_has_a_line_with_the_time_left(workbook, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("00_a", "01_b"):
        path = write(name, "import time\ntime.sleep(2)\nprint('never here')")
        notebook = json.loads(path.read_text())
        notebook["metadata"]["nblib"] = {"seconds": 30}
        path.write_text(json.dumps(notebook))
    code, shown = on_a_terminal("run", "--all", "--jobs", "2", columns=44)
    text = shown.decode()
    assert code == 0 and "never here" not in text and "unknown" not in text
    drawn = re.findall(r"\x1b\[\?7l(.*?)\x1b\[\?7h", text, re.DOTALL)
    assert all(len(line) < 44 for each in drawn for line in each.split("\r\n"))
    both = [each.split("\r\n") for each in drawn if "[00_a]" in each and "[01_b]" in each]
    slots = sorted(both[-1][:2])
    assert re.match(r"\[00_a\] 0:0\d, about 0:[23]\d left, cell", slots[0]), slots
    assert slots[1].startswith("[01_b] 0:0") and both[-1][2].startswith("0 of 2 notebooks, 0:0")
    stays = re.sub(r"\x1b\[\?7l.*?\x1b\[\?7h|\x1b\[\w+|\r", "", text, flags=re.DOTALL)
    ended = sorted(line[:12] for line in stays.splitlines()[:2])
    assert ended == ["[00_a] done,", "[01_b] done,"], "only what has ended stays"


@pytest.mark.kernel
def test_a_terminal_that_moves_no_cursor_gets_plain_lines(workbook):
    write("00_a", "print('x' * 3)")
    code, shown = on_a_terminal("run", "00", TERM="dumb")
    assert code == 0 and b"xxx\r\n" in shown and b"\x1b" not in shown


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
def test_as_many_at_once_as_the_machine_can(
    monkeypatch, cores, gib, quota, limit_gib, cards, expected
):
    def numbers(*files):
        if "/proc/meminfo" in files:
            return [0, 0, gib * 2**20]
        return quota if "cpu" in files[0] else [limit_gib * 2**30] if limit_gib else []

    monkeypatch.setattr(capacity, "_numbers", numbers)
    monkeypatch.setattr(capacity.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(capacity, "gpus", lambda: [(str(n), "NVIDIA") for n in range(cards)])
    assert capacity.capacity() == expected


def test_numbers_of_the_kernels_files(tmp_path):
    (tmp_path / "max").write_text("max 100000\n")
    (tmp_path / "quota").write_text("-1\n")
    (tmp_path / "meminfo").write_text("MemTotal:       24684092 kB\nMemFree:        20423328 kB\n")
    assert capacity._numbers(str(tmp_path / "max"), str(tmp_path / "absent")) == [100000]
    assert capacity._numbers(str(tmp_path / "quota")) == []
    assert capacity._numbers(str(tmp_path / "meminfo")) == [24684092, 20423328]
    assert capacity.capacity() >= 1  # on the real ones


REACHED = runner.code_hash.reached  # `workbook` puts another in its place, which reaches nothing
BASED = """seed: int = 0  # random seed
recipe: str = "default"  # which base model [default, full]
model: str = ""  # another model instead"""


def a_batch(planned, slots=2):
    options = runner.Options(force=False, keep_going=False, timeout=None, detail="some")
    return runner.Batch(planned, slots, options, None)


@pytest.mark.slow
def test_the_base_models_that_are_asked_for_are_made_first(workbook, monkeypatch, capfd):
    write("00_a", "from nbworkbook import base_model", parameters=BASED)
    write("01_b", "from nblib import start", parameters=BASED)
    write(
        "02_c", "from nblib import paths", parameters=BASED
    )  # says recipe, and reaches no base model
    write(
        "03_d",
        "from nbworkbook import base_model",
        parameters=BASED.replace('"default"  #', '"full"  #'),
    )
    write(
        "04_e",
        "from nbworkbook import base_model",
        parameters=BASED.replace('""', '"Qwen/Qwen3-0.6B"'),
    )
    write("05_f", "from nbworkbook import base_model", parameters="seed: int = 0  # random seed")
    started, popen = [], subprocess.Popen

    def recorded(command, **options):
        if "nbworkbook.base_model" in command:
            started.append(command[command.index("nbworkbook.base_model") + 1 :])
            command = [sys.executable, "-c", "print('base model: step 1 of 1')"]
        elif "nbworkbook.execute" in command:
            started.append("a notebook")
        return popen(command, **options)

    monkeypatch.setattr(runner.subprocess, "Popen", recorded)
    monkeypatch.setattr(capacity, "gpus", lambda: [])
    planned = jobs.plan(jobs.names())
    monkeypatch.setattr(runner.code_hash, "reached", REACHED)
    runner.make_bases(a_batch(planned))
    assert started == [["default", "auto", "auto"], ["full", "auto", "auto"]]
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == lines[2] == "base model: step 1 of 1, about 0:00 left"
    assert lines[1].startswith("base model: made in 0:0") and len(lines) == 4

    started.clear()
    pair = [job._replace(path=planned[2].path) for job in planned[:2]]  # to execute something light
    monkeypatch.setattr(runner.code_hash, "reached", lambda cells: {"nbworkbook.base_model": None})
    assert {outcome.status for outcome in runner.run(pair, jobs_at_once=2)} == {"done"}
    assert started == [["default", "auto", "auto"], "a notebook", "a notebook"]
    started.clear()
    assert {outcome.status for outcome in runner.run(pair, jobs_at_once=2)} == {
        "skipped"
    } and started == []
    runner.run(pair[:1], force=True)  # of one job: the notebook makes it, with its own progress
    assert started == ["a notebook"]


def test_on_a_new_machine_the_longest_begin_first(workbook, monkeypatch):
    for name, seconds in (("00_a", 1), ("01_b", 60), ("02_c", 30)):  # what a refresh has stored
        path = write(name, "pass")
        notebook = json.loads(path.read_text())
        path.write_text(
            json.dumps(
                notebook | {"metadata": notebook["metadata"] | {"nblib": {"seconds": seconds}}}
            )
        )
    write("03_d", "pass")  # nobody knows: it may be the longest
    for nonsense in (
        [],
        {"metadata": []},
        {"metadata": {"nblib": 3}},
        {"metadata": {"nblib": {"seconds": "soon"}}},
    ):
        (workbook / "odd.ipynb").write_text(json.dumps(nonsense))
        odd = jobs.plan(["00"])[0]._replace(path=workbook / "odd.ipynb")
        assert run_history.published_seconds(odd) is None
    began = []
    monkeypatch.setattr(runner, "make_bases", lambda batch: None)
    monkeypatch.setattr(runner, "share_of", lambda slot, slots: {})

    def execute(batch, number, *_):
        name = batch.jobs[number].notebook
        began.append(name)
        return runner.Outcome(name, "failed", 1.0, None)

    monkeypatch.setattr(runner, "_execute", execute)
    monkeypatch.setattr(runner.threading, "Thread", Alone)
    runner.run(jobs.plan(jobs.names()), jobs_at_once=2, keep_going=True)
    assert began == ["03_d", "01_b", "02_c", "00_a"]


class Alone:
    """A thread that does all its work when it is started."""

    def __init__(self, target, args):
        self.start, self.join = functools.partial(target, *args), lambda: None


def test_ctrl_c_while_the_base_model_is_made_starts_no_notebook(workbook, monkeypatch, capfd):
    write("00_a", "from nbworkbook import base_model", parameters=BASED)
    write("01_b", "from nbworkbook import base_model", parameters=BASED)
    popen = subprocess.Popen
    program = "import time\nprint('base model: step 1 of 2', flush=True)\ntime.sleep(60)"
    monkeypatch.setattr(
        runner.subprocess, "Popen", lambda _, **o: popen([sys.executable, "-c", program], **o)
    )
    monkeypatch.setattr(capacity, "gpus", lambda: [])  # it would ask by Popen too
    planned = jobs.plan(jobs.names())
    monkeypatch.setattr(runner.code_hash, "reached", REACHED)
    threading.Timer(3, os.kill, [os.getpid(), signal.SIGINT]).start()
    outcomes = runner.run(planned, jobs_at_once=2)
    assert [outcome.status for outcome in outcomes] == ["stopped", "stopped"] and runner.exit_code(
        outcomes
    ) == 130
    printed = capfd.readouterr()
    assert "step 1 of 2" in printed.out and "Traceback" not in printed.out + printed.err
    assert not any((workbook / "outputs").glob("*/*/run.json"))


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--all"], None),
        (["00_a"], 1),
        (["00_a", "--jobs", "auto"], None),
        (["--all", "--jobs", "3"], 3),
    ],
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
    assert [capacity.share_of(slot, 3)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == [
        "0",
        "1",
        "0",
    ]
    assert capacity.share_of(0, 1) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert jobs.gpus() == [("1", "NVIDIA B")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert jobs.gpus() == []


WAITS = """import pathlib, time
print('here', flush=True)
while not pathlib.Path('../go').exists():
    time.sleep(0.05)"""


@pytest.mark.slow
@pytest.mark.kernel
def test_a_second_one_waits_for_the_first(tmp_path, monkeypatch):
    workbook = small_notebooks.move_workbook(tmp_path, monkeypatch)
    write("00_a", WAITS)
    first = small_notebooks.start("run", "00_a")
    _wait_for(first, "here")
    (folder,) = (workbook / "outputs" / "00_a").iterdir()
    said = f"running already (pid {first.pid}, in {folder}); waiting for it"
    second, third = (
        small_notebooks.start("run", "00_a"),
        small_notebooks.start("run", "00_a", "--force"),
    )
    _wait_for(second, said), _wait_for(third, said)
    third.send_signal(signal.SIGINT)
    out, err = third.communicate(timeout=15)
    assert third.returncode == 130 and "Traceback" not in out + err
    (workbook / "go").touch()
    first.communicate(timeout=30)
    out, err = second.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (0, 0) and "done already" in out, err
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.slow
@pytest.mark.kernel
def test_a_second_one_continues_the_first_that_was_killed(tmp_path, monkeypatch):
    workbook = small_notebooks.move_workbook(tmp_path, monkeypatch)
    write("00_a", WAITS)
    first = small_notebooks.start("run", "00_a")
    _wait_for(first, "here")
    second = small_notebooks.start("run", "00_a")
    _wait_for(second, "running already")
    (worker,) = _children(first.pid)
    (workbook / "go").touch()
    for pid in (first.pid, worker, *_children(worker)):
        os.kill(pid, signal.SIGKILL)
    first.communicate(timeout=15)
    out, err = second.communicate(timeout=60)
    (folder,) = (workbook / "outputs" / "00_a").iterdir()
    assert second.returncode == 0 and "resumes in" in out and runs.is_done(folder), err


@pytest.mark.kernel
def test_of_two_that_start_together_one_works(workbook):
    write("00_a", "import time\ntime.sleep(1)")
    outcomes = runner.run(jobs.plan(["00"]) * 2, jobs_at_once=2)
    assert sorted(outcome.status for outcome in outcomes) == ["done", "skipped"]
    assert len(list((workbook / "outputs" / "00_a").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.kernel
def test_the_printed_command_continues_a_forced_run(tmp_path, monkeypatch):
    workbook = small_notebooks.move_workbook(tmp_path, monkeypatch)
    write("00_a", WAITS)
    (workbook / "go").touch()
    assert nblib("run", "00_a", "-p", "steps=4")[0] == 0
    (finished,) = (workbook / "outputs" / "00_a").iterdir()
    for way in ("as printed", "with --force again"):
        (workbook / "go").unlink()
        forced = small_notebooks.start("run", "00_a", "-p", "steps=4", "--force")
        _wait_for(forced, "here")
        forced.send_signal(signal.SIGINT)
        _, err = forced.communicate(timeout=30)
        command = err.strip().rpartition("continue with: ")[2]
        assert command == "nblib run 00_a -p steps=4"
        newest = max((workbook / "outputs" / "00_a").iterdir())
        assert (
            newest != finished
            and runs.status(newest) == "stopped"
            and runs.record(newest)["forced"]
        )
        (workbook / "go").touch()
        code, out, _ = nblib(*command.split()[1:], *(["--force"] if way != "as printed" else []))
        assert code == 0 and f"resumes in {newest}" in out and runs.is_done(newest), way
        assert f"done already in {newest}" in nblib(*command.split()[1:])[1]
        finished = newest
    assert len(list((workbook / "outputs" / "00_a").iterdir())) == 3


def _made(workbook, job, name, **facts):
    """A run folder as a run of the job leaves it."""
    folder = files.make_folder(workbook / "outputs" / job.notebook / name)
    document = json.loads(job.path.read_text())
    for cell in document["cells"]:
        cell.update({"execution_count": 1} if cell["cell_type"] == "code" else {})
    files.write(folder / "notebook.ipynb", json.dumps(document))
    files.write(folder / "result.json", '{"loss": 1.25}')
    runs.note(
        folder,
        {"key": job.key, "status": "done", "seconds": 1.0, "sealed": runs.seal(folder)} | facts,
    )
    return folder


def test_the_newest_run_counts_and_a_damaged_one_does_not(workbook):
    write("00_a", "1")
    (job,) = jobs.plan(["00"])
    old, new = _made(workbook, job, "20260101-000000-a"), _made(workbook, job, "20260102-000000-b")
    assert runner.done(job) == new
    runs.note(new, {"status": "stopped"})
    assert runner.done(job) is None, "an older run hides one that can be continued"
    runs.note(new, {"status": "done"})
    (new / "result.json").write_text('{"loss": 1.24}')
    assert runner.done(job) == old
    (old / "run.json").write_bytes(b"\xff")
    (old.parent / "20260103-000000-c" / "run.json").mkdir(parents=True)
    assert runner.done(job) is None
    said = []
    folder, lock, attempts, why = runner.claim(job, False, threading.Event(), said.append)
    os.close(lock)
    said = "\n".join(said)
    assert (
        attempts == 1
        and folder not in (old, new)
        and runs.status(folder) == "running"
        or runs.status(folder) == "killed"
    )
    assert "20260102-000000-b does not count: result.json changed since the run ended" in said
    assert said.count("does not count: cannot read") == 2


def test_a_run_on_another_base_model_does_not_count(workbook, monkeypatch, tmp_path):
    monkeypatch.setenv("NBLIB_BASE", str(tmp_path / "store"))
    write("00_a", "1")
    (job,) = jobs.plan(["00"])
    folder = _made(workbook, job, "20260101-000000-a")
    files.merge(folder / "base.json", {"base": "abc", "content": "1"})
    stored = tmp_path / "store" / "abc" / "base.json"
    assert runner.done(job) == folder, "a base model that is not in the store is not another one"
    for content, counts in (({"content": "1"}, True), ({"content": "2"}, False), ({}, True)):
        files.write(stored, json.dumps(content))
        assert (runner.done(job) == folder) is counts, content
    files.write(stored, '{"content": "2"}')
    said = []
    assert (
        runner.newest(job, said.append) is None and "the base model abc is another one" in said[0]
    )
    runs.note(folder, {"status": "stopped"})
    assert runner.newest(job) is None, (
        "a run would go on with another base model than it began with"
    )
    (folder / "base.json").write_bytes(b'{"base"')
    assert runner.newest(job, said.append) is None and "cannot read" in said[1]


def test_a_run_that_is_made_again_says_why(workbook, monkeypatch):
    class Planned(tuple):
        inputs = {"parameter steps": "3", "torch": "2.13"}
        notebook, key = "00_a", "new"

    write("00_a", "1")
    (job,) = jobs.plan(["00"])
    monkeypatch.setattr(
        jobs, "why", lambda before, now: f"{before['torch']} to {now['torch']}", raising=False
    )
    assert run_history.why_again(Planned()) == ""
    _made(workbook, job, "1", inputs={"parameter steps": "3", "torch": "2.11"})
    _made(workbook, job, "2", inputs={"parameter steps": "3", "torch": "2.12"})
    _made(
        workbook, job, "3", inputs={"parameter steps": "4", "torch": "2.10"}
    )  # other values are another run
    _made(workbook, job, "4", inputs={"parameter steps": "3", "torch": "2.9"}, status="failed")
    assert run_history.why_again(Planned()) == "2.12 to 2.13"


def test_how_long_each_will_take(workbook):
    planned = [jobs.plan([write(f"0{n}_x", "1").stem])[0] for n in range(4)]
    assert run_history.measured_seconds(planned, False) == [None] * 4
    for job, name, facts in [
        (planned[0], "1", {"seconds": 5.0}),
        (planned[1], "1", {"seconds": 900.0}),
        (planned[1], "2", {"seconds": 70.0}),  # newer
        (planned[1], "3", {"seconds": 800.0, "status": "failed"}),
        (planned[3], "1", {"seconds": 6.0, "key": "of other parameters"}),
    ]:
        _made(workbook, job, name, **facts)
    assert run_history.measured_seconds(planned, True) == [
        5.0,
        70.0,
        None,
        6.0,
    ]  # how long 2 takes nobody knows
    assert run_history.measured_seconds(planned, False) == [0.0, 70.0, None, 6.0], (
        "what is done takes no time"
    )
    _made(
        workbook, planned[1], "0", seconds=33.0, inputs=planned[1].inputs
    )  # older, with the very parameters
    assert run_history.measured_seconds(planned, True)[1] == 33.0


@pytest.mark.kernel
def test_nothing_that_one_run_does_ends_the_others(workbook, monkeypatch, capsys):
    for name in ("00_a", "01_b", "02_c"):
        write(name, "1")
    relay, note = runner.relay, runs.note

    def broken(stdout, words, listener):
        relay(stdout, words, listener)
        if listener.notebook == "00_a":
            listener.outcome["no such thing"]

    def full(folder, facts):
        return (
            note(folder, facts)
            if "01_b" not in str(folder)
            else files.write(Path("/proc/nblib/x"), "")
        )

    monkeypatch.setattr(runner, "relay", broken)
    monkeypatch.setattr(runs, "note", full)
    outcomes = runner.run(jobs.plan(["00", "01", "02"]), jobs_at_once=2, keep_going=True)
    assert [outcome.status for outcome in outcomes] == ["failed", "unwritten", "done"]
    assert "internal error KeyError" in outcomes[0].sentence and "Cannot" in outcomes[1].sentence
    assert "Traceback" in (workbook / "outputs" / "00_a" / "internal-error.txt").read_text()
    assert "Traceback" not in "".join(capsys.readouterr())
    assert list((workbook / "outputs" / "01_b").iterdir()) == [], (
        "a folder of a run that never began"
    )


def test_a_process_that_dies_before_it_has_read_its_order(workbook, monkeypatch, tmp_path):
    write("00_a", "1")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n'nbworkbook.execute' in sys.orig_argv and os._exit(7)"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    for size in (1, 200_000):  # in the pipe, and more than a pipe holds
        (outcome,) = runner.run([jobs.plan(["00"])[0]._replace(values={"x": "y" * size})])
        assert "its process ended with code 7" in sentence_of(outcome)


@pytest.mark.parametrize(
    "states, code",
    [
        (["done", "skipped"], 0),
        (["done", "failed"], 1),
        (["failed", "not run"], 1),
        (["done", "unwritten", "failed"], 74),
        (["unwritten", "stopped"], 130),
    ],
)
def test_exit_codes(states, code):
    assert runner.exit_code([runner.Outcome("00_a", state, 0.0, None) for state in states]) == code


def test_what_dead_processes_left_is_swept(workbook):
    outputs, dead = (
        workbook / "outputs",
        subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True),
    )
    left = [
        f"00_a/1/.run.json.{dead.stdout.strip()}.partial",
        f"00_a/1/figures/.x.png.{dead.stdout.strip()}.partial",
    ]
    kept = [
        f"00_a/1/.x.json.{os.getpid()}.partial",
        "00_a/1/run.json",
        "01_b/1/x",
        "refresh-live/x",
        "refresh-new/x",
    ]
    for name in (*left, *kept, "refresh-dead/00_a/1/x"):
        files.write(outputs / name, "x")
    for name in ("refresh-live", "refresh-dead"):
        os.utime(outputs / name, (0, 0))
    lock = files.claim(outputs / "refresh-live")
    runner._remove_leftovers(["00_a"])
    os.close(lock)
    assert sorted(str(p.relative_to(outputs)) for p in outputs.rglob("*") if p.is_file()) == sorted(
        kept
    )


def test_the_folder_of_a_runner_killed_before_it_wrote_anything_is_swept(workbook):
    home = workbook / "outputs" / "00_a"
    dead = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True).stdout.strip()
    files.write(home / "first" / f".run.json.{dead}.partial", "half of a rec")
    files.write(home / "second" / "run.json", "{}")
    (home / "third").mkdir()
    alone = files.claim(home)  # somebody is making a folder at this moment
    runner._remove_leftovers(["00_a"])
    assert sorted(path.name for path in home.iterdir()) == ["first", "second", "third"]
    os.close(alone)
    runner._remove_leftovers(["00_a"])
    assert [path.name for path in home.iterdir()] == ["second"]


def test_a_closed_pipe_and_an_odd_encoding_stop_no_work(monkeypatch):
    class Gone:
        encoding = "ascii"
        lines = []

        def isatty(self):
            return False

        def write(self, text):
            self.lines.append(text)

        def flush(self):
            raise BrokenPipeError

    status_lines.StatusLines(list, Gone()).print("caf\u00e9 \ud800")
    assert Gone.lines == ["caf\\xe9 \\ud800\n"]


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
        print(
            f"\nrunner: {min(as_notebook):.2f} s, script: {min(as_script):.2f} s, overhead {overhead:.2f} s",
            end=" ",
        )
    assert overhead < 6, "aim: 2 s on a quiet machine"


def _wait_for(process, text):
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"ended without printing {text!r}: {process.stderr.read()}")


def _children(pid):
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout
    return list(map(int, found.split()))


def _second_run_continues(workbook, folder: Path):
    seen = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    code, out, err = nblib("run", "00_train")
    assert code == 0, err
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], (
        "a new folder instead of the old one"
    )
    assert "resumes in" in out and "after" in out and runs.is_done(folder)
    steps = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[: len(seen)] == seen, "metrics of the first attempt were lost"
    assert sorted(set(steps)) == list(range(60)) and steps.count(0) == 1, (
        "started from the beginning"
    )
    assert nblib("run", "00_train")[1].count("done already") == 1
