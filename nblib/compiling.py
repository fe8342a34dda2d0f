"""Trade time for memory, or start-up for speed: activation checkpointing and regional compile.

Activation checkpointing keeps only the input of each decoder block and computes the rest again in backward. It costs
about one more forward pass, and memory no longer grows with what happens inside a block. Here it is always the
non-reentrant kind. The old reentrant one needs an input that requires grad. With a frozen embedding its gradients are
gone, and nothing says so if anything after the blocks still trains (notebook 01).

Compile works block by block. A model is one block repeated. To compile the block once and reuse it starts in a fraction
of the time, and a graph break stays inside its block.

Footgun: `torch.compile(model)` returns a wrapper whose state dict has `_orig_mod.` before every name;
`module.compile()` works in place and leaves the names alone.
"""

import logging
import os
import struct
from pathlib import Path

import torch
from torch import nn


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a transformer: the longest ModuleList in it."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers to work on block by block")
    return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters())))


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """Recompute every block's activations in backward, non-reentrant, without the cache that would corrupt it."""
    model.config.use_cache = False
    # transformers 5.23 renamed the switch and warns on the old name; earlier releases know only the old one.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def compile_blocks(model: nn.Module, *, backend: str = "inductor", **options) -> nn.Module:
    """Compile each block in place. The first call of a shape is slow; later blocks reuse the first one's code."""
    for block in blocks(model):
        block.compile(backend=backend, **options)
    return model


def breaks(function, *args, **kwargs) -> dict:
    """Where tracing falls out of the graph: number of graphs, of breaks, and the reason with its line for each."""
    torch._dynamo.reset()
    logger = logging.getLogger("torch._dynamo")
    level, _ = logger.level, logger.setLevel(logging.ERROR)  # it would also print each break, with its stack
    try:
        explained = torch._dynamo.explain(function)(*args, **kwargs)
    finally:
        logger.setLevel(level)
    where = []
    for reason in explained.break_reasons:
        frame = reason.user_stack[-1] if reason.user_stack else None
        line = f"{frame.filename}:{frame.lineno}" if frame else "unknown"
        where.append({"reason": reason.reason.splitlines()[0], "line": line})
    torch._dynamo.reset()
    return {"graphs": explained.graph_count, "breaks": explained.graph_break_count, "where": where}


def cache_folder() -> Path:
    """Where inductor keeps what it compiled, for all runs of this user."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir())


def damaged(folder: Path | None = None) -> list[Path]:
    """Compiled libraries in a cache that are shorter than their own header says.

    Inductor renames its Python files and pickles into place. But the linker writes the library under its final name,
    and later runs only ask whether it exists. A library whose linker was killed stays, and every later run fails on it.
    """
    return [path for path in sorted((folder or cache_folder()).rglob("*.so")) if not _whole(path)]


def repair(folder: Path | None = None) -> list[Path]:
    """Delete the damaged libraries, and nothing else: the next run builds just those again.

    Not while another run compiles: a library that is being linked looks the same.
    """
    libraries = damaged(folder)
    for path in libraries:
        path.unlink(missing_ok=True)
    return libraries


def _whole(path: Path) -> bool:
    """The table of sections stands at the end of an ELF file, so a file without its end lacks part of it."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64:
        return False
    if header[:6] != b"\x7fELF\x02\x01":  # another system's format: no verdict
        return True
    (table,) = struct.unpack_from("<Q", header, 0x28)
    size, count = struct.unpack_from("<HH", header, 0x3A)
    return path.stat().st_size >= table + size * count
