"""A CUDA card that is not there: `torch.device("cuda")` on a CPU build of torch, for one process.

    import absent_card; absent_card.appear()  # before torch
    import torch

After that torch says that it sees one card. Tensors on it must be fake (card_shapes.py) or compute
on the CPU (card_values.py), because no kernel and no memory is behind it. Autograd and autocast ask
the C++ side about the device, so forty lines of C++ (guard.cpp) are compiled once, into the folder
of Python's own compiled files.

Footgun: it is for a process of its own. torch cannot be told afterwards that there is no card.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def missing() -> str:
    """Why no card can appear here, in one sentence; empty where it can."""
    import torch

    if not sys.platform.startswith("linux"):
        return "the card that is not there is built for Linux alone"
    if torch.version.cuda:
        return "torch is built for CUDA here: nblib gpu-check and the notebooks themselves say more"
    return (
        ""
        if compiler()
        else "no C++ compiler is here (c++, g++, clang++): it builds tests/card/guard.cpp"
    )


def compiler() -> str | None:
    return next(
        filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++", "clang++"))),
        None,
    )


def build() -> Path:
    """The compiled guard for this torch, made if it is not there.

    Several processes may do it at once.
    """
    torch = Path(importlib.util.find_spec("torch").origin).parent
    stamp = hashlib.sha256(
        (HERE / "guard.cpp").read_bytes() + (torch / "version.py").read_bytes()
    ).hexdigest()[:12]
    library = HERE / "__pycache__" / f"guard-{stamp}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        command = [
            compiler(),
            "-shared",
            "-fPIC",
            "-std=c++20",
            "-w",
            f"-I{torch / 'include'}",
            str(HERE / "guard.cpp"),
        ]
        command += [
            "-o",
            str(partial),
            f"-L{torch / 'lib'}",
            "-ltorch_cpu",
            "-lc10",
            f"-Wl,-rpath,{torch / 'lib'}",
        ]
        subprocess.run(command, check=True)
        partial.replace(library)
    return library


@cache
def appear() -> None:
    """From here on torch sees one card."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: the card must appear before it")
    ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    import torch

    always = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": "a card that is not there",
        "get_rng_state_all": [],
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (80 * 2**30, 80 * 2**30),
        "memory_stats": {},
        "is_current_stream_capturing": False,
    }
    always |= dict.fromkeys(
        ("_lazy_init", "init", "set_device", "synchronize", "empty_cache", "set_rng_state_all")
    )
    always |= dict.fromkeys(
        (
            "set_sync_debug_mode",
            "reset_peak_memory_stats",
            "manual_seed",
            "manual_seed_all",
            "set_rng_state",
        )
    )
    for name, answer in always.items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, lambda *_, answer=answer, **__: answer)
    # The CPU's generator draws for the card, so its state is the card's too.
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
        name="a card that is not there",
        major=9,
        minor=0,
        total_memory=80 * 2**30,
        multi_processor_count=132,
    )
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: _Stream()
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch._C._cuda_getCurrentRawStream = lambda *_: 0
    # memory is pinned in name alone, so that a copy from it can be told from others
    pinned = "_pinned"
    torch.Tensor.pin_memory = lambda t, *_: setattr(copy := t.clone(), pinned, True) or copy
    torch.Tensor.is_pinned = lambda t, *_: getattr(t, pinned, False)
    torch.Tensor.record_stream = lambda *_: None
    _send_python_numbers(torch)


def _send_python_numbers(torch) -> None:
    """`torch.tensor(numbers, device="cuda")` as two steps, because torch takes both below where
    Python can look.
    """

    def two_steps(make, values, *args, device=None, **options):
        there = device is not None and torch.device(device).type == "cuda"
        return (
            make(values, *args, **options).to(device)
            if there
            else make(values, *args, device=device, **options)
        )

    for name in ("tensor", "as_tensor"):
        setattr(torch, name, partial(two_steps, getattr(torch, name)))
    make, new = torch.tensor, torch.Tensor.new_tensor

    def new_tensor(t, values, *, dtype=None, device=None, **options):
        place = t.device if device is None else torch.device(device)
        if place.type != "cuda":
            return new(t, values, dtype=dtype, device=place, **options)
        return make(values, dtype=dtype or t.dtype, device=place, **options)

    torch.Tensor.new_tensor = new_tensor


class _Stream:
    """Work is done when it is asked for, so there is nothing to wait for."""

    device = "cuda:0"

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, *_) -> None:
        pass

    wait_event = synchronize = wait_stream

    def query(self) -> bool:
        return True

    def record_event(self, event=None) -> "_Event":
        return event or _Event()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_) -> None:
        pass


class _Event(_Stream):
    def record(self, *_) -> None:
        pass

    def wait(self, *_) -> None:
        pass

    def elapsed_time(self, *_) -> float:
        return 0.0


@cache
def _named(file: str) -> str:
    """A file as it is named in a count, or nothing if it is of no interest."""
    path = Path(file)
    if not path.is_absolute() and not file.startswith("<cell"):
        return ""
    if file.startswith("<cell"):
        return file
    if path == ROOT / "nblib" / "mfu.py":  # looks on at the first step
        return ""
    if "site-packages" not in path.parts and ROOT in path.parents and HERE != path.parent:
        return str(path.relative_to(ROOT))
    if path.parent == HERE:
        return (
            "" if path.name in ("absent_card.py", "card_shapes.py", "card_values.py") else path.name
        )
    for name in ("transformers", "peft", "accelerate"):
        if name in path.parts:
            return str(Path(*path.parts[path.parts.index(name) :]))
    return ""


def line() -> str:
    """The nearest line of the project or of its models above the caller; 'backward' where none
    is.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if name := _named(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "backward"
