"""P37, P47 and P48: gradients sent between processes, and what remains of output and checkpoints after a kill.

These need real processes: two that add their gradients over gloo, one that is killed while it prints, one that is
killed while it writes. Each child is a few lines of text, shown as they are, started with this Python.

Footgun: a child inherits the environment. PYTHONUNBUFFERED set by whoever started this kernel would hide P47, and
the torchrun variables would confuse P37; both are taken out.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from lessons.pitfalls import Pitfall
from lessons.pitfalls.bench import byte_model
from nblib import checkpoint

CHILD_HIDES = ("PYTHONUNBUFFERED", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def _start(code: str, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
    plain = {name: value for name, value in os.environ.items() if name not in CHILD_HIDES}
    command = [sys.executable, *options, "-c", code, *arguments]
    return subprocess.Popen(command, env=plain | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# ------------------------------------------------------------------------------------------------------ P37 no_sync
NO_SYNC = """
import os, sys, time, contextlib, torch
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
x = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(rank))
def count(sent, bucket):
    sent.append(1)
    reduced = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
    return reduced.then(lambda f: f.value()[0])
for where in sys.argv[3:]:
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    sent = []
    model.register_comm_hook(sent, count)
    for i in range(4):
        quiet = model.no_sync() if i < 3 else contextlib.nullcontext()
        if where == "around_both":
            with quiet:
                model(x[i]).square().mean().backward()
        else:
            loss = model(x[i]).square().mean()
            with quiet:
                loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    if rank == 0:
        print(where, len(sent), float(norm), flush=True)
Path(f"{store}.{rank}").touch()
while not Path(f"{store}.{1 - rank}").exists():  # who leaves first cuts the other's connection
    time.sleep(0.01)
os._exit(0)  # taking gloo's threads down has ended with "terminate called" on a busy machine
"""


def _until_the_end(children: list[subprocess.Popen], *, seconds: float = 300) -> list[tuple[str, str]]:
    """Output and errors of each. One that ends with an error leaves the other waiting, so then all are ended."""
    until = time.monotonic() + seconds
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children) or time.monotonic() > until:
            break
        time.sleep(0.02)
    ended = [child.poll() for child in children]
    for child in children:
        child.kill()
    written = [child.communicate() for child in children]  # a few lines, so the pipes cannot have been full
    if any(code != 0 for code in ended):
        errors = "".join(error for _, error in written)
        raise RuntimeError(f"the processes ended with {ended} (None: not in {seconds:.0f} s): {errors}")
    return written


def reductions(*where: str) -> list[dict]:
    """All-reduces of a step of four micro-batches in two real processes, for each place to put no_sync."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_start(NO_SYNC, str(rank), f"{folder}/store", *where) for rank in (0, 1)]
        written = _until_the_end(children)
    lines = [line.split() for line in written[0][0].splitlines()]
    return [
        {"no_sync": place, "micro_batches": 4, "all_reduces": int(count), "gradient_norm": float(norm)}
        for place, count, norm in lines
    ]


# ------------------------------------------------------------------------------------- P47 output only at the end
PRINTING = """
import sys, time
from pathlib import Path
for step in range(4):
    print("step", step)
Path(sys.argv[1]).touch()
time.sleep(60)
"""


def lines_left(*options: str) -> dict:
    """Lines that have come through a pipe from a process that printed four and was then killed."""
    with tempfile.TemporaryDirectory() as folder:
        done = Path(folder) / "printed"
        child = _start(PRINTING, str(done), options=options)
        while not done.exists() and child.poll() is None:
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
        output, error = child.communicate()
        if not done.exists():
            raise RuntimeError(f"the process ended before it had printed: {error}")
    return {"python": " ".join(("python", *options)), "printed": 4, "arrived": len(output.splitlines())}


# ----------------------------------------------------------------------------------- P48 checkpoints that are torn
WRITING = """
import os, signal, sys
content, target, how = open(sys.argv[1], "rb").read(), sys.argv[2], sys.argv[3]
path = target if how == "in_place" else target + ".partial"
with open(path, "wb") as file:
    file.write(content[: len(content) // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)  # the queue's time limit, the out-of-memory killer, a power cut
    file.write(content[len(content) // 2 :])
os.replace(path, target)
"""


def killed_while_saving(how: str) -> dict:
    """Save a second checkpoint over the first, killed halfway; what can be loaded afterwards?"""
    model = byte_model(hidden=32)
    with tempfile.TemporaryDirectory() as folder:
        target, new = Path(folder) / "last.pt", Path(folder) / "new"
        torch.save({"step": 1, "weights": model.state_dict()}, target)
        torch.save({"step": 2, "weights": model.state_dict()}, new)
        child = _start(WRITING, str(new), str(target), how)
        child.communicate()
        try:
            step, loading = torch.load(target, weights_only=True)["step"], "loads"
        except RuntimeError as error:
            step, loading = None, str(error).split(". ")[0].replace(folder, "")
    return {"written": how, "killed": child.returncode == -signal.SIGKILL, "step_left": step, "loading": loading}


def damaged_folder() -> dict:
    """The library's folders: the newest is cut short by hand, and reading falls back to the one before."""
    model = byte_model(hidden=32)
    optimizer = torch.optim.AdamW(model.parameters())
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        for step in (1, 2):
            checkpoint.save(Path(folder), checkpoint.capture(model, [optimizer], progress={"step": step}))
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
        symptom="accumulation over several processes sends as many all-reduces as there are micro-batches",
        claim="",
        verdict="DistributedDataParallel decides in the forward pass whether the backward will send. With the "
        "forward outside, no_sync saves nothing, and as the gradients are the same nobody notices (torch 2.13, gloo).",
        fix="forward and backward inside no_sync, or add up gradients once per step as nblib.train does",
        broken=lambda: reductions("around_backward")[0],
        fixed=lambda: reductions("around_both")[0],
        seen=lambda facts: facts["all_reduces"] > 1,
        slow=True,
    ),
    Pitfall(
        id="P47",
        title="Output that arrives only at the end",
        symptom="a run in a pipe or a log file shows nothing for minutes, and nothing at all after a kill",
        claim="",
        verdict="Python buffers what it prints into a pipe by blocks; a kill takes the buffer along (Python 3.11).",
        fix="python -u, PYTHONUNBUFFERED=1, or flush=True where it matters",
        broken=lines_left,
        fixed=lambda: lines_left("-u"),
        seen=lambda facts: facts["arrived"] < facts["printed"],
    ),
    Pitfall(
        id="P48",
        title="A checkpoint written over the last one",
        symptom="after a crash the newest checkpoint cannot be read, and it was the only one",
        claim="",
        verdict="opening a file for writing empties it at once, so a kill while saving leaves neither the new state "
        "nor the old (torch 2.13).",
        fix="write under another name in the same folder, flush to the device, rename: nblib.checkpoint.save",
        broken=lambda: killed_while_saving("in_place"),
        fixed=lambda: killed_while_saving("renamed"),
        seen=lambda facts: facts["killed"] and facts["step_left"] is None,
    ),
]
