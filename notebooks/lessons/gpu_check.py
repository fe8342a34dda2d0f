"""Does this machine's card do what the workbook asks of one? `nblib gpu-check` answers in about a minute.

First driver against torch: nvidia-smi may see a card that torch cannot use, and one sentence says why. Then on the card

    methods    a few steps of the loop for each, with `torch.cuda.set_sync_debug_mode("error")`: an operation that makes
               the host wait raises. The one wait of a step, where the loop reads its numbers (parallel.read), is let
               through. MFU, and the peak of memory beside what `memory.estimate` predicts
    muon       100 matrices through our Muon and torch's, both in bf16, and our singular values in float64
    4 bit      a bitsandbytes layer forward and backward against the weights that it stands for
    compile    a compiled block against the same block uncompiled

The results and the environment stand in outputs/gpu-check.json: no path and no name of a user or machine is in it, so
it can be published.

Footgun: torch's debug mode sees the waits of torch's own operations alone. And the models are small: their MFU says
whether the card is fed, not what a large model reaches.
"""

import copy
import json
import os
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from lessons.method_steps import METHODS, Size, batches, model
from nblib import compiling, files, flops, memory, parallel, paths, runtime, train
from nblib.methods import lrc, muon
from nblib.run.parameters import ParameterError

DRIVERS = {"11": 450, "12": 525, "13": 580}  # the oldest driver for each CUDA
INDEX = "https://download.pytorch.org/whl"
SIZE = Size("cuda", vocabulary=16384, hidden=1024, layers=4, heads=8, rows=8, length=512)
STEPS, WARM = 8, 3  # the first ones make the optimizer's state, load kernels, and may wait
ESTIMATES: dict[str, dict] = {
    "dense": {},
    "dense, checkpointed": {"checkpointing": True},
    "LoRA": {"rank": 8},
    "LRC": {"attach": lambda net: lrc.attach(net, percent=15, init="kaiming")},
}
DIFFERENCE = 0.05  # in bf16, of the norm
Row = dict[str, float | int | str | bool]


def problem() -> str:
    """Why torch sees no card here and what helps, in one sentence; empty where it sees one."""
    if torch.cuda.is_available():
        return ""
    built, version = torch.version.cuda, torch.__version__
    if not shutil.which("nvidia-smi"):
        return f"torch {version} sees no CUDA device, and nvidia-smi is not here: no NVIDIA driver is installed."
    cards = driver()
    if not cards:
        return f"torch {version} sees no CUDA device, and nvidia-smi names none: the NVIDIA driver is not running."
    sees = f"nvidia-smi sees {cards['name']} with driver {cards['driver']}"
    release = version.partition("+")[0]
    if built is None:
        return (
            f"{sees}, but torch {version} is built for the CPU: pip install torch=={release} --index-url {INDEX}/cu130"
        )
    needed = DRIVERS.get(built.partition(".")[0], 0)
    if int(cards["driver"].partition(".")[0]) < needed:
        help = f"update the driver, or pip install torch=={release} --index-url {INDEX}/cu126"
        return f"{sees}, but torch {version} is built for CUDA {built}, which needs driver {needed} or newer: {help}"
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"{sees}, but CUDA_VISIBLE_DEVICES = {visible!r} hides it from torch: unset it."
    return f"{sees}, and torch {version} for CUDA {built} cannot use it: restart the machine, then look at dmesg."


def driver() -> dict[str, str]:
    """Name and driver of the first card, as nvidia-smi says; empty where it says nothing."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
        name, number = ended.stdout.splitlines()[0].rsplit(", ", 1)
        int(number.partition(".")[0])
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return {}
    return {"name": name, "driver": number.strip()} if ended.returncode == 0 else {}


def environment(machine: runtime.Machine) -> dict:
    """`runtime.environment` and what belongs to the card."""
    if machine.device.type != "cuda":
        return runtime.environment(machine)
    card = torch.cuda.get_device_properties(machine.device)
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return runtime.environment(machine) | {
        "driver": driver().get("driver"),
        "compute_capability": f"{card.major}.{card.minor}",
        "card_memory_gib": round(card.total_memory / 2**30, 1),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)) or None,
    }


@contextmanager
def no_waits() -> Iterator[None]:
    """An operation that waits for the card raises, but for the one where the loop reads its numbers."""
    read = parallel.read

    def let_through(values: list[Tensor]) -> list[float]:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(values)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    parallel.read = let_through
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        parallel.read = read


def method(name: str, machine: runtime.Machine, size: Size = SIZE) -> Row:
    """A few steps of the loop: speed without waits, and the peak of memory beside its estimate."""
    flops.peak(machine.device, machine.dtype)  # measured before: its matrices are no memory of the method
    with memory.peak(machine.device) as peak:
        net, optimizers, loss, more = METHODS[name](size)
        steps = train.steps(net, batches(size, more), optimizers, total=STEPS, machine=machine, loss=loss)
        for _ in range(WARM):
            next(steps)
        strict = machine.device.type == "cuda" and machine.precision != "fp16"  # where the scaler asks for its scale
        with no_waits() if strict else nullcontext():
            *_, last = steps
        del net, optimizers, loss, more, steps
    row = {"tokens_per_s": last["tokens_per_s"], "mfu": last["mfu"], "peak_gib": peak.gib}
    if name in ESTIMATES and machine.precision in memory.PRECISIONS:
        shape = dict(rows=size.rows, length=size.length, precision=machine.precision)
        row["estimate_gib"] = memory.estimate(model(size).config, **shape, **ESTIMATES[name])["peak"] / 2**30
    return row


def orthogonal(machine: runtime.Machine, *, matrices: int = 100, shape: tuple[int, int] = (256, 512)) -> Row:
    """One step of 100 matrices at rate 1, which is what Newton-Schulz makes of their gradients."""
    draw = torch.Generator().manual_seed(0)
    gradients = torch.randn(matrices, *shape, generator=draw).to(machine.device)
    ours, theirs = ([nn.Parameter(torch.zeros_like(g)) for g in gradients] for _ in range(2))
    for p, g in zip(ours + theirs, [*gradients, *gradients]):
        p.grad = g.clone()
    muon.Muon(ours, lr=1.0, momentum=0.0, nesterov=False, compute="bf16").step()
    torch.optim.Muon(theirs, lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    a, b = (torch.stack([p.detach() for p in params]).double() for params in (ours, theirs))
    values = torch.linalg.svdvals(a.cpu())
    low, high = (bound * (1 + way * DIFFERENCE) for bound, way in zip(muon.BAND, (-1, 1)))
    difference = float((a - b).norm() / b.norm())
    row = {"difference": difference, "smallest": float(values.min()), "largest": float(values.max())}
    return row | {"ok": difference < DIFFERENCE and row["smallest"] > low and row["largest"] < high}


def four_bit(machine: runtime.Machine, *, side: int = 512) -> Row:
    """Output and gradient of an NF4 layer against those of its weights as they are unpacked."""
    import bitsandbytes as bnb

    draw = torch.Generator().manual_seed(0)
    low = torch.bfloat16 if machine.precision == "fp32" else machine.dtype
    layer = bnb.nn.Linear4bit(side, side, bias=False, compute_dtype=low, quant_type="nf4").to(machine.device)
    x = torch.randn(64, side, generator=draw).to(machine.device, low).requires_grad_()
    y = layer(x)
    y.sum().backward()
    y = y.detach()
    weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    pairs = ((y, x.detach().float() @ weight.T), (x.grad, weight.sum(0).expand_as(x)))
    worst = max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)
    return {"difference": worst, "ok": worst < DIFFERENCE}


def compiled(machine: runtime.Machine, size: Size = SIZE, *, backend: str = "inductor") -> Row:
    """Loss and gradients of a model of one layer, compiled and not."""
    plain = model(size._replace(layers=1))
    nets, ends = (plain, compiling.compile_blocks(copy.deepcopy(plain), backend=backend)), []
    batch = {"input_ids": torch.arange(size.length, device=size.device).expand(2, -1) % size.vocabulary}
    began = time.perf_counter()
    for net in nets:
        with machine.autocast():
            loss = net(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        ends.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    difference = float((ends[0] - ends[1]).norm() / ends[0].norm())
    return {"difference": difference, "seconds": time.perf_counter() - began, "ok": difference < DIFFERENCE}


def attempt(check: Callable[[], Row]) -> Row:
    """What it measured, or the sentence it ended in."""
    try:
        return {"ok": True} | check()
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        first = str(error).partition("\n")[0]
        return {"ok": False, "error": f"{type(error).__name__}: {first} [{where}]"}


def line(name: str, row: Row) -> str:
    """A row of the table that is printed."""
    words = [f"{name:22s}", f"{'ok' if row['ok'] else 'FAILED':6s}"]
    units = {"tokens_per_s": "{:,.0f} tokens/s", "mfu": "MFU {:.1%}", "peak_gib": "peak {:.2f} GiB"}
    units |= {"estimate_gib": "estimated {:.2f} GiB", "difference": "difference {:.1e}", "seconds": "{:.0f} s"}
    units |= {"smallest": "singular values {:.2f}", "largest": "to {:.2f}", "error": "{}"}
    return "  ".join(words + [form.format(row[key]) for key, form in units.items() if key in row])


def main(machine: runtime.Machine | None = None, size: Size = SIZE, *, backend: str = "inductor") -> int:
    """Run everything, print a line for each, write the file; 0 if all is well, else 1."""
    if machine is None:
        if words := problem():
            raise ParameterError(words)
        machine = runtime.pick("cuda")
    facts = {"environment": environment(machine)}
    facts["peak_tflop_per_s"] = float(f"{flops.peak(machine.device, machine.dtype) / 1e12:.3g}")
    print(f"{machine.reason}; measured peak {facts['peak_tflop_per_s']:,} TFLOP/s", flush=True)
    checks: dict[str, Callable[[], Row]] = {name: lambda name=name: method(name, machine, size) for name in METHODS}
    checks |= {"muon, 100 matrices": lambda: orthogonal(machine), "4 bit": lambda: four_bit(machine)}
    checks |= {"compile": lambda: compiled(machine, size, backend=backend)}
    rows = facts["checks"] = {}
    for name, check in checks.items():
        rows[name] = attempt(check)
        print(line(name, rows[name]), flush=True)
    file = paths.outputs() / "gpu-check.json"
    files.make_folder(file.parent)
    files.write(file, json.dumps(facts, indent=1) + "\n")
    print(f"written to {paths.short(file)}")
    return 0 if all(row["ok"] for row in rows.values()) else 1
