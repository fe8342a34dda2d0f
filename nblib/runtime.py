"""The machine of a run: seeds, device and precision with the reason, environment snapshot.

A run is only worth keeping if it can be placed. So every choice made for you comes with the
sentence that explains it. `environment()` records what a reader needs to reproduce a number or to
doubt it.

Precision here means the dtype of *autocast*; parameters stay fp32 (the master weights). bf16 is
chosen where the chip multiplies it natively, fp16 on older CUDA cards (it needs a loss scaler),
fp32 otherwise. On a CPU without the instructions bf16 is emulated and several times slower than
fp32.

Footgun: a seed fixes the random numbers, not the order of additions. Bit-equality holds on one
machine with one thread count; across machines expect the last digits to differ.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

from nblib import paths

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "tokenizers",
    "ipykernel",
    "papermill",
)


class Machine(NamedTuple):
    """The device and autocast precision of a run, why, and how several processes share a model."""

    device: torch.device
    precision: str
    reason: str
    mesh: str = "auto"  # see parallel.py

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    @property
    def frozen_dtype(self) -> torch.dtype:
        """Return the dtype of frozen weights (`models.hold`). On a CPU they stay fp32."""
        return self.dtype if self.device.type == "cuda" else torch.float32

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.precision != "fp32")


def pick(device: str = "auto", precision: str = "auto", mesh: str = "auto") -> Machine:
    """Choose what was left to 'auto'; refuse what this machine cannot do."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        why_device = "CUDA is available" if device == "cuda" else "no CUDA device"
    else:
        why_device = "device asked for"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device = {device!r}: allowed are auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device = 'cuda': torch sees no CUDA device here (`nblib gpu-check` names the reason); "
            "use auto or cpu"
        )
    if precision == "auto":
        precision, why_precision = native_precision(device)
    elif precision in PRECISIONS:
        why_precision = "precision asked for"
    else:
        raise ValueError(f"precision = {precision!r}: allowed are auto, {', '.join(PRECISIONS)}")
    if device == "cuda":  # one process drives one card: torchrun's rank, or the first one visible
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
        # Products that autocast leaves in fp32, such as ARD's, run as TF32: ten bits of mantissa
        # (bf16: seven), sums in fp32. Who asks for fp32 wants all bits. The switch is the
        # process's: the last choice counts. It is torch's old one, because after the new one
        # inductor's question for the precision raises (torch 2.13).
        torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
        why_precision += "" if precision == "fp32" else ", TF32 for products that stay fp32"
    reason = f"{device}: {why_device}; {precision}: {why_precision}"
    return Machine(torch.device(device), precision, reason, mesh)


@cache
def native_precision(device: str) -> tuple[str, str]:
    """Return the lowest precision that the chip multiplies natively, and the evidence."""
    if device == "cuda":
        if torch.cuda.get_device_capability() >= (8, 0):
            return "bf16", "this card multiplies bf16 natively"
        return "fp16", "this card has no native bf16; fp16 with a loss scaler"

    # private functions of torch, hence the fallback to fp32
    probe = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    avx = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    if probe() or avx():
        return "bf16", "this CPU multiplies bf16 natively (" + (
            "AMX" if probe() else "AVX-512 BF16"
        ) + ")"
    return "fp32", "this CPU has no bf16 instructions, emulation would be slower than fp32"


def seed_all(seed: int) -> None:
    """Seed every generator a training run draws from."""
    random.seed(seed)
    torch.manual_seed(seed)  # all devices
    numpy.random.seed(seed % 2**32)


def generators() -> dict:
    """Return the state of every random generator, in types that load without running code."""
    version, internal, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    kind, keys, *rest = numpy.random.get_state()
    numpys = [kind, keys.tolist(), *rest]
    return {
        "python": [version, list(internal), gauss],
        "numpy": numpys,
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_generators(state: dict) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def branch(rank: int) -> None:
    """Seed the generators of another process from their state and its rank."""
    seed = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + str(rank).encode()).digest()
    seed_all(int.from_bytes(seed[:7]))


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Start every generator from `seed` inside, and go on afterwards where each was."""
    before = generators()
    seed_all(seed)
    try:
        yield
    finally:
        set_generators(before)


def interactive() -> bool:
    """Return whether a person sits at this kernel, in JupyterLab, VS Code or Colab."""
    if os.environ.get("NBLIB_HEADLESS") or "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    lab = "JPY_SESSION_NAME" in os.environ and hasattr(shell, "kernel")
    return (
        lab
        or "google.colab" in sys.modules
        or "__vsc_ipynb_file__" in getattr(shell, "user_ns", {})
    )


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def environment(machine: Machine | None = None) -> dict:
    """Return what a reader needs to place a number: code, versions, hardware, choices.

    Plain JSON types only.
    """
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda_runtime": torch.version.cuda,
        "commit": commit(),
        "packages": {name: version(name) for name in PACKAGES},
    }
    if machine is not None:
        facts |= {
            "device": str(machine.device),
            "precision": machine.precision,
            "reason": machine.reason,
        }
    return json.loads(json.dumps(facts))


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the git commit, marked '+' when the tree has changes; None outside a checkout."""
    try:
        git = ["git", "-C", str(paths.root())]
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10
        )
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
        if head.returncode == 0
        else None
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
