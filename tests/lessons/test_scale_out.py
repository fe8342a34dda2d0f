"""Worlds beside a notebook: real processes that answer together, end together, and are gone with
whoever made them.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lessons import scale_out, scale_out_faults
from lessons.scale_out import World


def failing(rank: int) -> str:
    """For the processes: one rank raises, the others wait in a sum."""
    from torch import distributed as dist

    if dist.get_rank() == rank:
        raise ValueError("mine. And more words")
    return scale_out_faults.hello()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_all_ranks_answer_in_order_and_a_world_serves_again():
    with World(2) as world:
        answers = world(scale_out_faults.hello)
        assert answers == [f"rank {r} of 2 over gloo: the sum is 3" for r in (0, 1)]
        assert world(scale_out_faults.hello) == answers
        pids = [process.pid for process in world.processes]
    assert not any(map(_alive, pids)) and not Path(world.folder.name).exists()


@pytest.mark.slow
def test_who_raises_is_told_and_whoever_waits_for_it_is_ended():
    module = sys.modules[failing.__module__]
    path = os.path.dirname(module.__file__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([path, *filter(None, sys.path)]))
        world = World(2, patience=1)
    began = time.monotonic()
    assert world(scale_out_faults.hello)
    told = world.ask(failing, rank=1)
    print(f"after {time.monotonic() - began:.1f} s: {told}")
    assert told[1] == {"error": "ValueError: mine"} and "waited for the others" in told[0]["error"]
    assert not any(process.poll() is None for process in world.processes)
    with pytest.raises(RuntimeError, match="failing: this world has ended; make another one"):
        world(failing, rank=1)


@pytest.mark.slow
def test_a_killed_rank_is_told_with_its_signal():
    world = World(2, patience=5)
    told = world.ask(scale_out_faults.dying)
    assert told[1]["gone"] == "killed by SIGKILL" and told[0]["error"].startswith("RuntimeError: ")
    assert (
        "Connection closed by peer" in told[0]["error"]
        or "Connection reset by peer" in told[0]["error"]
    )
    assert not re.search(r"\]:\d", told[0]["error"]), "a port, which is another in each run"


@pytest.mark.slow
def test_the_processes_end_when_whoever_made_them_is_killed():
    program = "import time\nfrom lessons.scale_out import World\nworld = World(2)\n"
    program += "print(*[p.pid for p in world.processes], flush=True)\ntime.sleep(60)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2 and all(map(_alive, pids))
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    until = time.monotonic() + 30  # a process that is still loading torch hears it afterwards
    while any(map(_alive, pids)):
        assert time.monotonic() < until, "a process was left behind"
        time.sleep(0.1)


def test_an_error_is_told_in_one_sentence_without_a_port():
    error = RuntimeError(
        "[/w/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:2937. It may be that\nmore"
    )
    assert scale_out.sentence(error) == "RuntimeError: Connection closed by peer [127.0.0.1]"
