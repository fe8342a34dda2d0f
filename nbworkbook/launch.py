"""`nblib train`: one notebook in several processes, which torch's engines make into one training
(nblib/parallel.py).

torch's own launcher, the one behind torchrun, starts the processes on each node. Each of them is a
rank: it starts a kernel of its own and holds it (rank.py). Rank 0 makes the run as anybody knows
it: its folder, its progress, its page. The others have a folder each inside of that one, `rank-1`
and so on, with the page that they executed. A run has the same key whatever the number of
processes, so another number goes on where one stopped.

With `--nodes` the same command is given on each of several machines, with its `--node`. Node 0
listens at the rendezvous, and the others wait until it does. All nodes must see one file system, as
checkpoints and pages lie in one folder. Nothing is ever restarted: if a process, a launcher or a
node dies, all end, and the same command goes on from the last checkpoint.

Footgun: `rows` are those of all processes together, and each takes its part. More processes make no
larger batch.
"""

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Read when torch is imported: its C++ writes traces about what our sentences say, and DDP warns of
# what is on purpose.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402
from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: E402

from nblib import parallel, paths  # noqa: E402
from nbworkbook import jobs, rank, runner  # noqa: E402
from nbworkbook.parameters import ParameterError, clip, declared  # noqa: E402

LOOPBACK = "127.0.0.1"
LOOK = 0.1  # seconds between two looks at the processes


def main(options: Namespace, **how: Any) -> int:
    """Run `nblib train` on this node and return the exit code."""
    processes = options.processes
    nodes = options.nodes
    job, mesh = plan(
        options.notebook,
        processes,
        nodes=nodes,
        overrides=options.parameters,
        profile=options.profile,
        files=options.files,
    )

    # One process needs no launcher.
    if processes * nodes == 1:
        outcomes = runner.run([job], **how)
        options.ran = True
        return rank.finish(outcomes)

    # One node meets nobody: any free port will do.
    node = 0
    host, port = LOOPBACK, _free_port()
    if nodes > 1:
        host, port = address(options.rendezvous)
        node = node_number(options.node, nodes)
        place = f"--nodes {nodes} --node {node} --rendezvous {options.rendezvous}"
        job = job._replace(resume=f"{job.resume} {place}")

    task = rank.Task(
        job=job,
        mesh=mesh,
        processes=processes,
        nodes=nodes,
        wait=options.wait,
        launcher=os.getpid(),
        how=how,
    )
    return _launch(task, node, host, port)


def plan(
    notebook: str, processes: int, *, overrides: Sequence[str], nodes: int = 1, **options: Any
) -> tuple[jobs.Job, str]:
    """Return the job and its mesh; ParameterError where they do not fit together.

    A notebook that declares `mesh` gets it as a parameter. For any other one `-p mesh=` is the
    launcher's own word.
    """
    name = jobs.resolve(notebook)
    is_declared = "mesh" in declared(paths.notebooks() / f"{name}.ipynb")
    asked = [text.removeprefix("mesh=") for text in overrides if text.startswith("mesh=")]
    if not is_declared:
        overrides = [text for text in overrides if not text.startswith("mesh=")]
    (job,) = jobs.plan([name], overrides=overrides, **options)

    # The mesh must be one that so many processes can form.
    mesh = "auto"
    if is_declared:
        mesh = str(job.parameters["mesh"])
    elif asked:
        mesh = asked[-1]
    world = processes * nodes
    try:
        # hsdp's groups are the nodes
        with _environment_variable("LOCAL_WORLD_SIZE", str(processes)):
            parallel.check(mesh, world)
    except ValueError as error:
        raise ParameterError(str(error)) from None

    # Each process needs a row, and a card where cards are used.
    rows = job.parameters.get("rows")
    if isinstance(rows, int) and rows < world:
        raise ParameterError(f"rows = {rows}: fewer than the {world} processes that share them")
    cards = jobs.gpus()
    if cards and processes > len(cards) and job.parameters.get("device") != "cpu":
        raise ParameterError(
            f"processes = {processes}: one drives one card, and {len(cards)} are here; -p "
            "device=cpu"
        )

    # The command that continues the job is this one.
    command = job.resume.replace("nblib run", "nblib train", 1) + f" --processes {processes}"
    if asked and not is_declared:
        command += f" -p mesh={mesh}"
    return job._replace(resume=command), mesh


def address(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`; ParameterError where it is none."""
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch(r"[1-9]\d{0,4}", port) or int(port) > 65535:
        raise ParameterError(
            f"--rendezvous: {clip(text)!r} is not host:port, such as 127.0.0.1:29400."
        )
    return host.strip("[]"), int(port)


def node_number(given: int | None, nodes: int) -> int:
    """Return which node this is, as `--node` or Slurm says; ParameterError where neither does."""
    node = int(os.environ.get("SLURM_NODEID", -1)) if given is None else given
    if 0 <= node < nodes:
        return node
    what = "is missing" if given is None else f"is {node}"
    raise ParameterError(
        f"--node {what}, allowed: 0 .. {nodes - 1}; Slurm's SLURM_NODEID counts as well."
    )


def _launch(task: rank.Task, node: int, host: str, port: int) -> int:
    """Let torch's launcher start the ranks of this node, wait for their ends, and return the exit
    code.
    """
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # our ranks say how they end
    with tempfile.TemporaryDirectory(prefix="nblib-train-") as folder:
        file = Path(folder) / "task.json"
        file.write_text(task.to_json())
        config = LaunchConfig(
            min_nodes=task.nodes,
            max_nodes=task.nodes,
            nproc_per_node=task.processes,
            run_id="nblib",
            # a TCPStore on node 0, which waits for all: ranks follow the numbers of nodes
            rdzv_backend="static",
            rdzv_endpoint=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            rdzv_configs={"rank": node, "timeout": task.wait},
            local_addr=LOOPBACK if task.nodes == 1 else None,
            max_restarts=0,
            monitor_interval=LOOK,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            shutdown_timeout=rank.LEAVE,
        )
        start_ranks = elastic_launch(config, sys.executable)
        try:
            # While it waits for the other nodes, the launcher is in C++ and hears no Ctrl-C of
            # Python's.
            with _signals_end_us():
                start_ranks("-m", "nbworkbook.rank", str(file))
        except SignalException:
            return 130
        except ChildFailedError as failed:
            return _code_of(failed, task)
        except (RuntimeError, ValueError, OSError) as error:
            # of torch.distributed, before a rank was started
            why = clip(str(error).partition("\n")[0], 200).rstrip(".")
            raise ParameterError(
                f"The nodes do not train together: node {node} of {task.nodes} waited "
                f"{task.wait:g} s at "
                f"{host}:{port}: {why}."
            ) from None
    return 0


def _code_of(failed: ChildFailedError, task: rank.Task) -> int:
    """Return the exit code after ranks failed. Of rank 0, which was killed, say so in its place."""
    number, first = failed.get_first_failure()
    if first.exitcode >= 0:
        return first.exitcode

    if number == 0:
        job = task.job
        how = f"its process was killed by {signal.Signals(-first.exitcode).name}"
        world = task.processes * task.nodes
        sentence = f"{job.notebook} failed on rank 0 of {world}: {how}; resume with: {job.resume}"
        print(f"nblib: {sentence}", file=sys.stderr, flush=True)
    return 1


def _free_port() -> int:
    with socket.socket() as any_one:
        any_one.bind((LOOPBACK, 0))
        return any_one.getsockname()[1]


@contextlib.contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def _signals_end_us() -> Iterator[None]:
    """Let Ctrl-C end this process at once, until torch's launcher sets its own handlers; then put
    back ours.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
