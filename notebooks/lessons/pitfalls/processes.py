"""P37, P47 and P48: gradients sent between processes, and what remains of output and checkpoints
after a kill.

These need real processes: two that add up their gradients over gloo, one that is killed while it
prints, one that is killed while it writes. Each child is a short program, started with this Python.
The functions that a child runs stand in its program with their source, and this process calls them
too: they are run where they can be watched.

Footgun: a child inherits the environment. PYTHONUNBUFFERED would hide P47, and the variables of
torchrun would confuse P37, so both are taken out.
"""

import contextlib
import inspect
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from lessons.pitfalls import Pitfall
from lessons.pitfalls.bench import byte_model
from nblib import checkpoint

CHILD_HIDES = ("PYTHONUNBUFFERED", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def _start(*command: str) -> subprocess.Popen:
    plain = {name: value for name, value in os.environ.items() if name not in CHILD_HIDES}
    return subprocess.Popen(
        command, env=plain, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# -------------------------------------------------------------------------------------- P37 no_sync
def around_backward(model: DDP, x: Tensor) -> None:
    for i in range(4):
        # this forward pass decides that the backward sends, as it is outside no_sync
        loss = model(x[i]).square().mean()
        with model.no_sync() if i < 3 else nullcontext():
            loss.backward()


def around_both(model: DDP, x: Tensor) -> None:
    for i in range(4):
        with model.no_sync() if i < 3 else nullcontext():
            loss = model(x[i]).square().mean()
            loss.backward()


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def _rows(rank: int) -> Tensor:
    return torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(rank))


def _norm(model: nn.Module) -> float:
    return float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())


NO_SYNC = f"""
import os, sys, time, torch
from contextlib import nullcontext
from pathlib import Path
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

{"".join(map(inspect.getsource, (around_backward, around_both, _layers, _rows, _norm)))}
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
def count(sent, bucket):
    sent.append(1)
    reduced = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
    return reduced.then(lambda f: f.value()[0])
for where in sys.argv[3:]:
    model, sent = DDP(_layers()), []
    model.register_comm_hook(sent, count)
    globals()[where](model, _rows(rank))
    norm = _norm(model)
    if rank == 0:
        print(where, len(sent), norm, flush=True)
Path(store + "." + str(rank)).touch()
# who leaves first cuts the other's connection
while not Path(store + "." + str(1 - rank)).exists():
    time.sleep(0.01)
os._exit(0)  # taking gloo's threads down has ended with "terminate called" on a busy machine
"""


class _Alone(nn.Sequential):
    """The same model in one process, which has nobody to send to."""

    no_sync = nullcontext


def _norm_in_one_process(step: Callable[[nn.Module, Tensor], None]) -> float:
    """Return the gradient of both processes' rows, as one process computes it: the mean over the
    processes.
    """
    model = _Alone(*_layers())
    for rank in (0, 1):
        step(model, _rows(rank))
    return _norm(model) / 2


def _until_the_end(
    children: list[subprocess.Popen], *, seconds: float = 300
) -> list[tuple[str, str]]:
    """Output and errors of each.

    If one ends with an error the other waits for it, so then all are ended.
    """
    until = time.monotonic() + seconds
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children) or time.monotonic() > until:
            break
        time.sleep(0.02)
    ended = [child.poll() for child in children]
    for child in children:
        child.kill()
    # a few lines, so the pipes cannot have been full
    written = [child.communicate() for child in children]
    if any(code != 0 for code in ended):
        errors = "".join(error for _, error in written)
        raise RuntimeError(
            f"the processes ended with {ended} (None: not in {seconds:.0f} s): {errors}"
        )
    return written


def reductions(step: Callable[[nn.Module, Tensor], None]) -> dict:
    """All-reduces of a step of four micro-batches in two real processes."""
    with tempfile.TemporaryDirectory() as folder:
        program = (sys.executable, "-c", NO_SYNC)
        children = [
            _start(*program, str(rank), f"{folder}/store", step.__name__) for rank in (0, 1)
        ]
        written = _until_the_end(children)
    place, count, norm = written[0][0].split()
    return {
        "no_sync": place,
        "micro_batches": 4,
        "all_reduces": int(count),
        "gradient_norm": float(norm),
        "gradient_norm in one process": _norm_in_one_process(step),
    }


# ----------------------------------------------------------------------- P47 output only at the end
PRINTING = """
import sys, time
from pathlib import Path
for step in range(4):
    print("step", step)
Path(sys.argv[1]).touch()
time.sleep(60)
"""


def buffered(program: str, *arguments: str) -> subprocess.Popen:
    # stdout is a pipe, so Python keeps lines back until it has a block of them
    return _start(sys.executable, "-c", program, *arguments)


def unbuffered(program: str, *arguments: str) -> subprocess.Popen:
    # -u, or PYTHONUNBUFFERED=1: every line goes out at once
    return _start(sys.executable, "-u", "-c", program, *arguments)


def lines_left(start: Callable[..., subprocess.Popen]) -> dict:
    """Lines that have come through a pipe from a process that printed four and was then killed."""
    with tempfile.TemporaryDirectory() as folder:
        done = Path(folder) / "printed"
        child = start(PRINTING, str(done))
        while not done.exists() and child.poll() is None:
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
        output, error = child.communicate()
        if not done.exists():
            raise RuntimeError(f"the process ended before it had printed: {error}")
    options = child.args[1 : child.args.index("-c")]
    return {
        "python": " ".join(("python", *options)),
        "printed": 4,
        "arrived": len(output.splitlines()),
    }


# -------------------------------------------------------------------- P48 checkpoints that are torn
def in_place(content: bytes, path: str) -> None:
    with open(path, "wb") as file:  # this line empties the last checkpoint
        file.write(content)


def renamed(content: bytes, path: str) -> None:
    with open(path + ".partial", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".partial", path)  # happens as a whole or not at all


WRITING = f"""
import os, resource, signal, sys

{inspect.getsource(in_place)}

{inspect.getsource(renamed)}

content, target, how = open(sys.argv[1], "rb").read(), sys.argv[2], sys.argv[3]
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it otherwise
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2,) * 2)  # whoever writes more is killed
globals()[how](content, target)
"""


def killed_while_saving(save: Callable[[bytes, str], None]) -> dict:
    """Save a checkpoint, then another one over it that is killed halfway; what can be loaded
    afterwards?
    """
    model = byte_model(hidden=32)
    with tempfile.TemporaryDirectory() as folder:
        target, new = Path(folder) / "last.pt", Path(folder) / "new"
        first = io.BytesIO()
        torch.save({"step": 1, "weights": model.state_dict()}, first)
        save(first.getvalue(), str(target))
        torch.save({"step": 2, "weights": model.state_dict()}, new)
        child = _start(sys.executable, "-c", WRITING, str(new), str(target), save.__name__)
        child.communicate()
        try:
            step, loading = torch.load(target, weights_only=True)["step"], "loads"
        except RuntimeError as error:
            step, loading = None, str(error).split(". ")[0].replace(folder, "")
    killed = child.returncode == -signal.SIGXFSZ
    return {"written": save.__name__, "killed": killed, "step_left": step, "loading": loading}


def damaged_folder() -> dict:
    """Return the library's folders: the newest one is cut short by hand, and reading falls back to
    the one before it.
    """
    model = byte_model(hidden=32)
    optimizer = torch.optim.AdamW(model.parameters())
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        for step in (1, 2):
            checkpoint.save(
                Path(folder), checkpoint.capture(model, [optimizer], progress={"step": step})
            )
        newest = checkpoint.folders(Path(folder))[0] / "model.safetensors"
        newest.write_bytes(newest.read_bytes()[:1000])
        with contextlib.redirect_stdout(printed):
            state = checkpoint.newest(Path(folder))
    said = printed.getvalue().strip().replace(f"{folder}/", "")
    return {"step_left": state["training"]["progress"]["step"], "said": said}


PITFALLS = [
    Pitfall(
        id="P37",
        title="no_sync around backward only",
        symptom="accumulation over several processes sends as many all-reduces as there are "
        "micro-batches",
        claim="",
        verdict="With the forward pass outside, no_sync saves nothing. DistributedDataParallel "
        "decides in the forward "
        "pass whether the backward will send. The gradients are the same, so only the count of "
        "all-reduces shows it. "
        "Seen on torch 2.13, with gloo.",
        fix="Put forward and backward inside no_sync, or add up gradients once per step as "
        "`nblib.train` does",
        broken=lambda: reductions(around_backward),
        fixed=lambda: reductions(around_both),
        seen=lambda facts: facts["all_reduces"] > 1,
        slow=True,
        wrong=around_backward,
        right=around_both,
    ),
    Pitfall(
        id="P47",
        title="Output that arrives only at the end",
        symptom="a run in a pipe or a log file shows nothing for minutes, and nothing at all "
        "after a kill",
        claim="",
        verdict="None of the printed lines arrives. Python collects what it prints into a pipe "
        "in blocks, and a kill "
        "loses the last block. Seen on Python 3.11.",
        fix="`python -u`, `PYTHONUNBUFFERED=1`, or `flush=True` where it matters",
        broken=lambda: lines_left(buffered),
        fixed=lambda: lines_left(unbuffered),
        seen=lambda facts: facts["arrived"] < facts["printed"],
        wrong=buffered,
        right=unbuffered,
    ),
    Pitfall(
        id="P48",
        title="A checkpoint written over the last one",
        symptom="after a crash the newest checkpoint cannot be read, and it was the only one",
        claim="",
        verdict="A kill while saving leaves neither the new state nor the old one. Opening a "
        "file for writing empties "
        "it at once. Seen on torch 2.13.",
        fix="Write under another name in the same folder, flush to the device, then rename: "
        "`nblib.checkpoint.save`",
        broken=lambda: killed_while_saving(in_place),
        fixed=lambda: killed_while_saving(renamed),
        seen=lambda facts: facts["killed"] and facts["step_left"] is None,
        wrong=in_place,
        right=renamed,
    ),
]
