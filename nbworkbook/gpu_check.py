"""The check of this machine's card: does it do what the workbook needs? `nblib gpu-check` answers
in about a minute.

First the driver against torch: nvidia-smi may see a card that torch cannot use, and one sentence
says why. Then on the card

    methods    a few steps of the loop for each, with `torch.cuda.set_sync_debug_mode("error")`: an
               operation that makes the host wait raises. The one wait of a step, where the loop
               reads its numbers (parallel.read), is let through. MFU, and the peak of memory beside
               the one that `memory.estimate` predicts
    muon       100 matrices through our Muon and torch's, both in bf16, and our singular values in
               float64
    4 bit      a bitsandbytes layer forward and backward against its unpacked weights
    compile    a compiled block against the same block uncompiled

The results and the environment stand in outputs/gpu-check.json: no path and no name of a user or
machine is in it, so it can be published.

Footgun: torch's debug mode sees the waits of torch's own operations alone. And the models are
small: their MFU shows whether the card is fed, not what a large model reaches.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nblib import compiling, files, memory, mfu, parallel, paths, runtime, train
from nblib.methods import lrc, muon
from nbworkbook.method_steps import METHODS, Size, batches, model
from nbworkbook.parameters import ParameterError

DRIVERS = {"11": 450, "12": 525, "13": 580}  # the oldest driver for each CUDA
INDEX = "https://download.pytorch.org/whl"
SIZE = Size("cuda", vocabulary=16384, hidden=1024, layers=4, heads=8, rows=8, length=512)
STEPS = 8
WARM = 3  # steps that make the optimizer's state, load kernels, and may wait
DIFFERENCE = 0.05  # in bf16, of the norm
# What `memory.estimate` must know of a method beside the size.
ESTIMATES: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, checkpointed": {"checkpointing": True},
    "LoRA": {"rank": 8},
    "LRC": {"attach": lambda net: lrc.attach(net, percent=15, init="kaiming")},
}
# How each figure of a row is printed, in this order.
UNITS = {
    "tokens_per_s": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "peak_gib": "peak {:.2f} GiB",
    "estimate_gib": "estimated {:.2f} GiB",
    "difference": "difference {:.1e}",
    "seconds": "{:.0f} s",
    "smallest": "singular values {:.2f}",
    "largest": "to {:.2f}",
    "error": "{}",
}
Row = dict[str, float | int | str | bool]


# ------------------------------------------------------------------ the driver


def problem() -> str:
    """Return why torch sees no card here and what helps, in one sentence; empty where it sees
    one.
    """
    if torch.cuda.is_available():
        return ""
    version = torch.__version__
    built = torch.version.cuda

    # No driver, or none that runs.
    unseen = f"torch {version} sees no CUDA device, and nvidia-smi"
    if not shutil.which("nvidia-smi"):
        return f"{unseen} is not here: no NVIDIA driver is installed."
    card = driver()
    if not card:
        return f"{unseen} names none: the NVIDIA driver is not running."

    # A torch that cannot use this driver.
    seen = f"nvidia-smi sees {card['name']} with driver {card['driver']}"
    install = f"pip install torch=={version.partition('+')[0]} --index-url {INDEX}"
    if built is None:
        return f"{seen}, but torch {version} is built for the CPU: {install}/cu130"
    needed = DRIVERS.get(_major(built), 0)
    if int(_major(card["driver"])) < needed:
        return (
            f"{seen}, but torch {version} is built for CUDA {built}, which needs driver "
            f"{needed} or newer: "
            f"update the driver, or {install}/cu126"
        )

    # A card that is hidden, or in a bad state.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"{seen}, but CUDA_VISIBLE_DEVICES = {visible!r} hides it from torch: unset it."
    return (
        f"{seen}, and torch {version} for CUDA {built} cannot use it: restart the machine, "
        "then look at dmesg."
    )


def _major(version: str) -> str:
    return version.partition(".")[0]


def driver() -> dict[str, str]:
    """Return name and driver of the first card, as nvidia-smi says; empty where it says nothing."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
        name, number = ended.stdout.splitlines()[0].rsplit(", ", 1)
        int(_major(number))
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return {}
    if ended.returncode != 0:
        return {}
    return {"name": name, "driver": number.strip()}


def environment(machine: runtime.Machine) -> dict[str, Any]:
    """Return `runtime.environment` and what belongs to the card."""
    facts = runtime.environment(machine)
    if machine.device.type != "cuda":
        return facts
    card = torch.cuda.get_device_properties(machine.device)
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    of_card = {
        "driver": driver().get("driver"),
        "compute_capability": f"{card.major}.{card.minor}",
        "card_memory_gib": round(card.total_memory / 2**30, 1),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)) or None,
    }
    return facts | of_card


# ------------------------------------------------------------------ the checks


@contextmanager
def no_waits() -> Iterator[None]:
    """Let an operation that waits for the card raise, but for the one where the loop reads its
    numbers.
    """
    read = parallel.read

    def read_and_wait(values: list[Tensor]) -> list[float]:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(values)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    parallel.read = read_and_wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        parallel.read = read


def method(name: str, machine: runtime.Machine, size: Size = SIZE) -> Row:
    """Run a few steps of the loop without waits; return speed, MFU, and the peak beside its
    estimate.
    """
    # Measured before: its matrices are no memory of the method.
    mfu.peak(machine.device, machine.dtype)

    # With fp16 the scaler reads its scale, which waits.
    is_strict = machine.device.type == "cuda" and machine.precision != "fp16"
    with memory.peak(machine.device) as peak:
        net, optimizers, loss, more = METHODS[name](size)
        steps = train.steps(
            net, batches(size, more), optimizers, total=STEPS, machine=machine, loss=loss
        )
        for _ in range(WARM):
            next(steps)
        with no_waits() if is_strict else nullcontext():
            *_, last = steps
        del net, optimizers, loss, more, steps

    row: Row = {"tokens_per_s": last["tokens_per_s"], "mfu": last["mfu"], "peak_gib": peak.gib}
    if name in ESTIMATES and machine.precision in memory.PRECISIONS:
        config = model(size).config
        bytes_by_kind = memory.estimate(
            config,
            rows=size.rows,
            length=size.length,
            precision=machine.precision,
            **ESTIMATES[name],
        )
        row["estimate_gib"] = bytes_by_kind["peak"] / 2**30
    return row


def orthogonal(
    machine: runtime.Machine, *, matrices: int = 100, shape: tuple[int, int] = (256, 512)
) -> Row:
    """Compare one step of our Muon with torch's, at rate 1: what Newton-Schulz makes of the
    gradients.
    """
    draw = torch.Generator().manual_seed(0)
    gradients = torch.randn(matrices, *shape, generator=draw).to(machine.device)  # (100, 256, 512)
    ours = _zeros_with(gradients)
    theirs = _zeros_with(gradients)
    muon.Muon(ours, lr=1.0, momentum=0.0, nesterov=False, compute="bf16").step()
    torch.optim.Muon(theirs, lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()

    ours_stacked = torch.stack([p.detach() for p in ours]).double()
    theirs_stacked = torch.stack([p.detach() for p in theirs]).double()
    difference = float((ours_stacked - theirs_stacked).norm() / theirs_stacked.norm())

    # Newton-Schulz leaves the singular values in a band around 1.
    values = torch.linalg.svdvals(ours_stacked.cpu())  # (100, 256)
    smallest = float(values.min())
    largest = float(values.max())
    low, high = muon.BAND
    is_in_band = smallest > low * (1 - DIFFERENCE) and largest < high * (1 + DIFFERENCE)
    return {
        "difference": difference,
        "smallest": smallest,
        "largest": largest,
        "ok": difference < DIFFERENCE and is_in_band,
    }


def _zeros_with(gradients: Tensor) -> list[nn.Parameter]:
    """Return a parameter of zeros for each gradient, which it has."""
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        parameters.append(parameter)
    return parameters


def four_bit(machine: runtime.Machine, *, side: int = 512) -> Row:
    """Compare output and gradient of an NF4 layer with those of its weights as they are
    unpacked.
    """
    import bitsandbytes as bnb

    draw = torch.Generator().manual_seed(0)
    low = torch.bfloat16 if machine.precision == "fp32" else machine.dtype
    layer = bnb.nn.Linear4bit(side, side, bias=False, compute_dtype=low, quant_type="nf4").to(
        machine.device
    )
    x = torch.randn(64, side, generator=draw).to(machine.device, low).requires_grad_()  # (64, 512)
    y = layer(x)
    y.sum().backward()

    # (512, 512)
    weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    output = _relative(y.detach(), x.detach().float() @ weight.T)
    gradient = _relative(x.grad, weight.sum(0).expand_as(x))
    worst = max(output, gradient)
    return {"difference": worst, "ok": worst < DIFFERENCE}


def _relative(value: Tensor, reference: Tensor) -> float:
    return float((value.float() - reference.float()).norm() / reference.float().norm())


def compiled(machine: runtime.Machine, size: Size = SIZE, *, backend: str = "inductor") -> Row:
    """Compare the gradients of a model of one layer, compiled and not."""
    plain = model(size._replace(layers=1))
    in_blocks = compiling.compile_blocks(copy.deepcopy(plain), backend=backend)
    row = torch.arange(size.length, device=size.device)
    ids = row.expand(2, -1) % size.vocabulary  # (2, 512)

    began = time.perf_counter()
    gradients = []
    for net in (plain, in_blocks):
        with machine.autocast():
            loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    reference, result = gradients
    difference = float((reference - result).norm() / reference.norm())
    seconds = time.perf_counter() - began
    return {"difference": difference, "seconds": seconds, "ok": difference < DIFFERENCE}


# ------------------------------------------------------------------ the command


def attempt(check: Callable[[], Row]) -> Row:
    """Return what a check measured, or the error it ended in, with the line of ours that met it."""
    try:
        return {"ok": True} | check()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "site-packages" not in frame.filename]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        first = str(error).partition("\n")[0]
        return {"ok": False, "error": f"{type(error).__name__}: {first} [{where}]"}


def line(name: str, row: Row) -> str:
    """Return a row of the table that is printed."""
    verdict = "ok" if row["ok"] else "FAILED"
    words = [f"{name:22s}", f"{verdict:6s}"]
    words += [form.format(row[key]) for key, form in UNITS.items() if key in row]
    return "  ".join(words)


def main(
    machine: runtime.Machine | None = None, size: Size = SIZE, *, backend: str = "inductor"
) -> int:
    """Run everything, print a line for each, write the file; return 0 if all is well, else 1."""
    if machine is None:
        why_not = problem()
        if why_not:
            raise ParameterError(why_not)
        machine = runtime.pick("cuda")

    # The machine.
    peak = float(f"{mfu.peak(machine.device, machine.dtype) / 1e12:.3g}")
    facts = {"environment": environment(machine), "peak_tflop_per_s": peak}
    print(f"{machine.reason}; measured peak {peak:,} TFLOP/s", flush=True)

    # The checks. One that fails is a row like the others.
    checks: dict[str, Callable[[], Row]] = {}
    for name in METHODS:
        checks[name] = partial(method, name, machine, size)
    checks["muon, 100 matrices"] = partial(orthogonal, machine)
    checks["4 bit"] = partial(four_bit, machine)
    checks["compile"] = partial(compiled, machine, size, backend=backend)
    rows = {}
    for name, check in checks.items():
        rows[name] = attempt(check)
        print(line(name, rows[name]), flush=True)

    # The file.
    facts["checks"] = rows
    file = paths.outputs() / "gpu-check.json"
    files.make_folder(file.parent)
    files.write(file, json.dumps(facts, indent=1) + "\n")
    print(f"written to {paths.short(file)}")
    return 0 if all(row["ok"] for row in rows.values()) else 1
