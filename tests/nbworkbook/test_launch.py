"""`nblib train`: real processes, each with its kernel, that train as one, end together and go
on.
"""

import json
import os
import re
import signal
import socket
import time

import kill_worlds
import pytest
import small_notebooks
from kill_worlds import (
    ENDS,
    OPENS,
    PARAMETERS,
    TRAINS,
    Command,
    kernels,
    losses,
    members,
    run_folder,
)
from small_notebooks import nblib, write

from nbworkbook import cli, jobs, launch, rank
from nbworkbook.parameters import ParameterError

SECONDS = 240  # for a line of a command; two cores may have other work
TRAINING = ["train", "00", "-p", "steps=12", "-p", "pause=0.3"]


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return kill_worlds.open_workbook(tmp_path, monkeypatch)


def free_place() -> str:
    with socket.socket() as any_one:
        any_one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{any_one.getsockname()[1]}"


def two_nodes(place: str) -> list[Command]:
    """Return the same training on node 0 and on node 1, which are both this machine."""
    shared = [*TRAINING, "--nodes", "2", "--rendezvous", place, "--wait", str(SECONDS)]
    return [Command(*shared, "--node", str(node)) for node in (0, 1)]


def seconds_until_gone(workbook) -> float:
    """Return how long processes of the workbook were left."""
    began = time.monotonic()
    while members("NBLIB_OUTPUTS", str(workbook / "outputs")):
        assert time.monotonic() - began < 60, "a process is left"
        time.sleep(0.1)
    return time.monotonic() - began


def straight_losses(tmp_path, monkeypatch) -> list[float]:
    """Return the losses of the same training in one process."""
    (tmp_path / "straight").mkdir()
    other = small_notebooks.move_workbook(tmp_path / "straight", monkeypatch)
    write("00_world", OPENS, TRAINS, ENDS, parameters=PARAMETERS)
    alone = Command("run", "00", "-p", "steps=12")
    assert alone.end(SECONDS) == 0, alone.errors
    return losses(other)


def largest_difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.kernel
def test_killed_interrupted_and_continued_with_fewer_it_is_the_run_of_one_process(
    workbook, tmp_path, monkeypatch
):
    command = [*TRAINING, "-p", "mesh=fsdp", "--processes", "2"]

    # A killed kernel ends both, and the sentence names its rank.
    two = Command(*command)
    assert two.until("world 2", SECONDS) and two.until("step 3 pid", SECONDS)
    os.kill(kernels(run_folder(workbook) / "rank-1")[0], signal.SIGKILL)
    assert two.end(SECONDS) == 1
    (sentence,) = two.errors
    assert re.search(
        r"00_world failed on rank 1 of 2: the kernel died in cell \d .*killed by SIGKILL", sentence
    )
    assert (
        "nblib train 00_world" in sentence
        and "--processes 2" in sentence
        and "mesh=fsdp" in sentence
    )
    seconds_until_gone(workbook)

    # Ctrl-C saves, and the same command goes on.
    again = Command(*command)
    assert again.until("resumed at step", SECONDS) and again.until("step 6 pid", SECONDS)
    again.process.send_signal(signal.SIGINT)
    assert again.end(SECONDS) == 130
    assert "was stopped" in again.errors[-1] and "--processes 2" in again.errors[-1]
    seconds_until_gone(workbook)

    # Another number of processes continues the same run.
    one = Command(*TRAINING)
    assert one.until("resumed at step", SECONDS)
    assert one.end(SECONDS) == 0 and one.errors == []
    together = losses(workbook)
    apart = largest_difference(together, straight_losses(tmp_path, monkeypatch))
    print(f"two, two, one process against one: largest difference {apart:.1e}")
    assert len(together) == 12 and apart < 2e-5


@pytest.mark.slow
@pytest.mark.kernel
@pytest.mark.parametrize("whom", ["launcher", "all"])
def test_a_scheduler_that_sends_sigterm_ends_all_and_the_same_command_goes_on(workbook, whom):
    """A scheduler sends SIGTERM to the launcher, or to every process of the job."""
    command = [*TRAINING, "--processes", "2"]
    two = Command(*command)
    assert two.until("step 3 pid", SECONDS)
    pids = [two.process.pid]
    if whom == "all":
        pids += members("NBLIB_OUTPUTS", str(workbook / "outputs"))
    for pid in dict.fromkeys(pids):
        os.kill(pid, signal.SIGTERM)
    assert two.end(SECONDS) == 130, two.errors
    seconds_until_gone(workbook)

    again = Command(*command)
    resumed = again.until("resumed at step", SECONDS)
    assert int(re.search(r"at step (\d+)", resumed)[1]) >= 2
    assert again.end(SECONDS) == 0, again.errors
    assert len(losses(workbook)) == 12


@pytest.mark.slow
@pytest.mark.kernel
def test_a_rank_that_raises_alone_is_named(workbook):
    raises = "if runtime.rank() == 1: raise ZeroDivisionError('mine')"
    write("00_world", OPENS, raises, TRAINS, parameters=PARAMETERS)
    code, _, err = nblib("train", "00", "--processes", "2")
    assert code == 1 and "00_world failed on rank 1 of 2: cell 3 (`if runtime.rank()" in err, err
    assert "raised ZeroDivisionError: mine" in err


@pytest.mark.slow
@pytest.mark.kernel
def test_two_nodes_train_as_one_process_and_a_node_that_dies_ends_both(
    workbook, tmp_path, monkeypatch
):
    first, second = two_nodes(free_place())
    assert first.until("world 2", SECONDS) and first.until("step 3 pid", SECONDS)
    assert any("ranks of node 1 of 2 train in" in line for line in second.lines)
    second.process.kill()
    assert first.end(SECONDS) != 0
    assert "--processes 1 --nodes 2 --node 0 --rendezvous 127.0.0.1:" in first.errors[-1]
    print(
        f"a node that dies: {first.errors}, the rest gone after {seconds_until_gone(workbook):.1f} s"
    )
    second.end()

    first, second = two_nodes(free_place())
    assert first.until("resumed at step", SECONDS)
    assert (first.end(SECONDS), second.end(SECONDS)) == (0, 0), (first.errors, second.errors)
    assert second.lines[-1] == "[00_world] done"
    together = losses(workbook)
    assert [command.end(SECONDS) for command in two_nodes(free_place())] == [0, 0]  # done already

    apart = largest_difference(together, straight_losses(tmp_path, monkeypatch))
    print(f"two nodes, killed in between, against one process: largest difference {apart:.1e}")
    assert len(together) == 12 and apart < 2e-5


@pytest.mark.slow
@pytest.mark.kernel
def test_a_stop_on_the_second_node_stops_both(workbook):
    first, second = two_nodes(free_place())
    assert first.until("step 3 pid", SECONDS)
    second.process.terminate()
    assert (first.end(SECONDS), second.end(SECONDS)) == (130, 130), (first.errors, second.errors)
    assert "was stopped" in first.errors[-1] and "--node 0" in first.errors[-1]


@pytest.mark.slow
@pytest.mark.kernel
def test_nodes_that_would_make_other_runs_are_refused_on_both(workbook):
    """The second node has another value of a parameter."""
    shared = ["--nodes", "2", "--rendezvous", free_place(), "--wait", str(SECONDS)]
    first = Command(*TRAINING, *shared, "--node", "0")
    second = Command("train", "00", "-p", "steps=13", "-p", "pause=0.3", *shared, "--node", "1")
    assert (first.end(SECONDS), second.end(SECONDS)) == (2, 2), (first.errors, second.errors)
    said = "node 1 would make another run than node 0: parameter steps 12 to 13."
    for command in (first, second):
        assert command.errors == [f"nblib: The nodes do not train together: {said}"]
    assert not list((workbook / "outputs").rglob("run.json"))


def test_a_node_that_never_comes_ends_in_one_sentence_within_the_time(workbook, capsys):
    place = free_place()
    for node in ("0", "1"):
        began = time.monotonic()
        asked = [
            "train",
            "00",
            "--nodes",
            "2",
            "--rendezvous",
            place,
            "--node",
            node,
            "--wait",
            "1",
        ]
        assert cli.main(asked) == 2
        said = capsys.readouterr().err
        assert said.startswith(
            f"nblib: The nodes do not train together: node {node} of 2 waited 1 s at {place}"
        )
        assert len(said.splitlines()) == 1 and time.monotonic() - began < 10
    assert not list((workbook / "outputs").rglob("run.json"))


def job(**other) -> dict:
    facts = {
        "node": 1,
        "key": "k",
        "inputs": {"torch": "2.13"},
        "processes": 1,
        "nodes": 2,
        "mesh": "auto",
    }
    return facts | other


@pytest.mark.parametrize(
    "theirs, why",
    [
        (job(), ""),
        (
            job(key="j", inputs={"torch": "2.12"}),
            "node 1 would make another run than node 0: torch 2.13 to 2.12",
        ),
        (job(processes=3), "processes is 1 on node 0 and 3 on node 1"),
        (job(mesh="fsdp"), "mesh is auto on node 0 and fsdp on node 1"),
    ],
)
def test_what_differs_between_nodes_is_named(theirs, why):
    assert rank.difference(job(node=0), theirs) == why


@pytest.mark.parametrize(
    "text, why",
    [
        ("here", "'here' is not host:port"),
        (":1", "':1' is not host:port"),
        ("a:0", "'a:0'"),
        ("a:70000", "'a:70000'"),
    ],
)
def test_a_wrong_place_is_named(text, why):
    with pytest.raises(ParameterError, match=why):
        launch.address(text)


def test_the_number_of_a_node_is_given_or_that_of_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    assert launch.node_number(1, 2) == 1
    for given, why in (
        (None, "--node is missing, allowed: 0 .. 1"),
        (2, "--node is 2, allowed: 0 .. 1"),
    ):
        with pytest.raises(ParameterError, match=why):
            launch.node_number(given, 2)
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert launch.node_number(None, 2) == 1


def test_a_task_is_read_as_it_was_written(workbook):
    planned, mesh = launch.plan("00", 2, overrides=["steps=3"])
    how = {"force": False, "timeout": None, "detail": "some"}
    task = rank.Task(planned, mesh, processes=2, nodes=1, wait=5, launcher=7, how=how)
    assert rank.Task.from_json(task.to_json()) == task
    assert json.loads(task.to_json())["job"]["path"] == str(planned.path)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ("--processes 5", "rows = 4: fewer than the 5 processes that share them"),
        (
            "--processes 3 -p mesh=hsdp",
            "mesh = 'hsdp': 3 processes do not divide into 2 equal groups of two or more",
        ),
        (
            "-p mesh=fsdp",
            "mesh = 'fsdp': this is one process; `nblib train NOTEBOOK --processes 2` starts several",
        ),
        ("--processes 2 -p mesh=tp", "mesh = 'tp': allowed are auto, ddp, fsdp, hsdp"),
        ("--processes 0", "argument --processes: '0' is not a whole number from 1 to 999,999,999"),
        ("--processes 2 -p row=3", "unknown parameter 'row'; did you mean 'rows'?"),
    ],
)
def test_what_does_not_fit_is_one_sentence_and_starts_nothing(
    given, sentence, workbook, monkeypatch, capsys
):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("NBLIB_MESH", raising=False)
    try:
        code = cli.main(["train", "00", *given.split()])
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr().err
    assert code == 2 and sentence in said and len(said.splitlines()) == 1
    assert not list((workbook / "outputs").rglob("run.json"))


def test_more_processes_than_cards_are_refused(workbook, monkeypatch):
    monkeypatch.setattr(jobs, "gpus", lambda: [("0", "card")])
    with pytest.raises(ParameterError, match="processes = 2: one drives one card, and 1 are here"):
        launch.plan("00", 2, overrides=[])
