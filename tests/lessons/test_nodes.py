"""Two launchers on this machine, as if on two: they meet, train as one process would, end together, or refuse."""

import contextlib
import socket
import threading
import time

import kill_worlds
import pytest
import small_notebooks
from kill_worlds import ENDS, OPENS, PARAMETERS, TRAINS, Command, losses, members, run_folder
from small_notebooks import write

from lessons import nodes
from nblib import cli
from nblib.run.parameters import ParameterError


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return kill_worlds.open_workbook(tmp_path, monkeypatch)


def free() -> str:
    with socket.socket() as any_one:
        any_one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{any_one.getsockname()[1]}"


def launch(place: str, *more: str) -> list[Command]:
    ask = ["train", "00", "-p", "steps=12", *more, "--nodes", "2", "--rendezvous", place, "--wait", "240"]
    return [Command(*ask, "--node", str(node)) for node in (0, 1)]


@pytest.mark.slow
@pytest.mark.kernel
def test_two_nodes_train_as_one_process_and_a_node_that_dies_ends_both(workbook, tmp_path, monkeypatch):
    place = free()
    first, second = launch(place, "-p", "pause=0.3")
    assert first.until("world 2", 240) and first.until("step 3 pid", 240)
    assert second.until("node 1 of 2: ranks 1 in ")
    began = time.monotonic()
    second.process.kill()
    assert first.end(240) == 1
    took = time.monotonic() - began
    while members("NBLIB_OUTPUTS", str(workbook / "outputs")):
        assert time.monotonic() - began < 30, "a process is left"
        time.sleep(0.1)
    print(f"a node that dies: the other one ended after {took:.1f} s: {first.errors}")
    (sentence,) = first.errors
    assert "00_world failed on rank 1 of 2: " in sentence and "node 1 of 2 is gone" in sentence
    assert f"--processes 1 --nodes 2 --node 0 --rendezvous {place}" in sentence
    second.end()

    first, second = launch(place, "-p", "pause=0.3")
    assert first.until("resumed at step", 240)
    assert (first.end(240), second.end(240)) == (0, 0), (first.errors, second.errors)
    assert second.lines[-1] == "[00_world] done" and not list(run_folder(workbook).glob("rank-1/result.json"))
    together = losses(workbook)
    assert [command.end(240) for command in launch(free(), "-p", "pause=0.3")] == [0, 0]  # done already

    (tmp_path / "other").mkdir()
    other = small_notebooks.move_workbook(tmp_path / "other", monkeypatch)
    write("00_world", OPENS, TRAINS, ENDS, parameters=PARAMETERS)
    alone = Command("run", "00", "-p", "steps=12")
    assert alone.end(240) == 0, alone.errors
    apart = max(abs(a - b) for a, b in zip(together, losses(other), strict=True))
    print(f"two nodes, killed in between, against one process: largest difference {apart:.1e}")
    assert len(together) == 12 and apart < 2e-5


@pytest.mark.slow
@pytest.mark.kernel
def test_asked_to_stop_on_the_second_node_both_do(workbook):
    first, second = launch(free(), "-p", "pause=0.3")
    assert first.until("step 3 pid", 240) and second.until("ranks 1 in ")
    began = time.monotonic()
    second.process.terminate()
    assert (first.end(240), second.end(240)) == (130, 130), (first.errors, second.errors)
    took = time.monotonic() - began
    print(f"SIGTERM to the second launcher: both ended after {took:.1f} s")
    assert took < 20 and "was stopped" in first.errors[-1] and "--node 0" in first.errors[-1]


# ------------------------------------------------------------------ the meeting


def caller(node: int, **other) -> dict:
    return {"node": node, "processes": 1, "nodes": 2, "mesh": "auto", "key": "k", "inputs": {"torch": "2.13"}} | other


def meet(theirs: dict, wait: float = 5) -> tuple[str, str]:
    """What node 0 and the other one are told."""
    place, told = nodes.address(free()), ["met", "met"]

    def other() -> None:
        try:
            line = nodes.visit(place, wait=wait, mine=theirs)
            told[1] = nodes.first(line)["over"]
        except ParameterError as error:
            told[1] = str(error)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        for line in nodes.host(place, 2, wait=wait, mine=caller(0)).values():
            line.send(over="met")
            line.close()
    except ParameterError as error:
        told[0] = str(error)
    thread.join()
    return told[0], told[1]


def test_nodes_that_would_make_the_same_run_meet():
    assert meet(caller(1)) == ("met", "met")


@pytest.mark.parametrize(
    "theirs, why",
    [
        (caller(1, key="j", inputs={"torch": "2.12"}), "node 1 would make another run than node 0: torch 2.13 to 2.12"),
        (caller(1, processes=3), "processes is 1 on node 0 and 3 on node 1"),
        (caller(1, mesh="fsdp"), "mesh is auto on node 0 and fsdp on node 1"),
        (caller(0), "node 0 came twice or is none of 0 .. 1"),
        (caller(2), "node 2 came twice or is none of 0 .. 1"),
    ],
)
def test_nodes_that_differ_are_told_so_on_both(theirs, why):
    first, second = meet(theirs)
    assert first == second == f"The nodes do not train together: {why}."


def test_a_node_that_never_comes_ends_in_one_sentence_within_the_time(workbook, capsys):
    place = free()
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # it takes the call, and is no launcher
        silent = f"127.0.0.1:{deaf.getsockname()[1]}"
        for given, why in {
            (place, "0"): f"node 1 did not come to {place} within 1 s",
            (place, "1"): f"node 0 did not answer at {place} within 1 s",
        }.items():
            began = time.monotonic()
            ask = ["train", "00", "--nodes", "2", "--rendezvous", given[0], "--node", given[1], "--wait", "1"]
            assert cli.main(ask) == 2
            took = time.monotonic() - began
            assert capsys.readouterr().err == f"nblib: The nodes do not train together: {why}.\n" and took < 10
        assert cli.main(["train", "00", "--nodes", "2", "--node", "0", "--rendezvous", silent, "--wait", "1"]) == 2
        assert f"this machine cannot listen at {silent}: " in capsys.readouterr().err
    assert not (workbook / "outputs").exists() or not list((workbook / "outputs").rglob("run.json"))


def test_a_stranger_who_calls_is_no_node():
    place, met = nodes.address(free()), []
    host = threading.Thread(target=lambda: met.append(nodes.host(place, 2, wait=20, mine=caller(0))))
    host.start()
    for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"hello": 1}\n', b"[1]\n", b""):
        with contextlib.suppress(OSError), until_answers(place) as stranger:
            stranger.sendall(words)
    nodes.visit(place, wait=10, mine=caller(1))
    host.join()
    assert list(met[0]) == [1]


def until_answers(place) -> socket.socket:
    for _ in range(100):
        with contextlib.suppress(OSError):
            return socket.create_connection(place)
        time.sleep(0.05)
    raise TimeoutError


@pytest.mark.parametrize(
    "text, why",
    [("here", "'here' is not host:port"), (":1", "':1' is not host:port"), ("a:0", "'a:0'"), ("a:70000", "'a:70000'")],
)
def test_a_wrong_place_is_named(text, why):
    with pytest.raises(ParameterError, match=why):
        nodes.address(text)


def test_the_number_is_given_or_that_of_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    assert nodes.number(1, 2) == 1
    for given, why in ((None, "--node is missing, allowed: 0 .. 1"), (2, "--node is 2, allowed: 0 .. 1")):
        with pytest.raises(ParameterError, match=why):
            nodes.number(given, 2)
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert nodes.number(None, 2) == 1
