"""Trade time for memory, or start-up for speed: activation checkpointing and regional compile.

Activation checkpointing keeps only the input of each decoder block and computes the rest again in
backward. It costs about one more forward pass, and memory no longer grows with what happens inside
a block. Here it is always the non-reentrant kind. The old reentrant one needs an input that
requires grad. With a frozen embedding its gradients are gone, and nothing says so if anything after
the blocks still trains (notebook 01).

Compile works block by block. A model is one block repeated. To compile the block once and reuse it
starts in a fraction of the time, and a graph break stays inside its block.

Footgun: `torch.compile(model)` returns a wrapper whose state dict has `_orig_mod.` before every
name; `module.compile()` works in place and leaves the names alone.
"""

import torch
from torch import nn

OPTIONS = "compiled_with"  # attribute of a compiled block, for a copy of it (parallel.py)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a transformer: the longest ModuleList in it."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers to work on block by block")
    return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters())))


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """Recompute every block's activations in backward, non-reentrant, without the cache that would
    corrupt it.
    """
    model.config.use_cache = False
    # transformers 5.23 renamed the switch and warns on the old name; earlier releases know only the
    # old one.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def compile_blocks(model: nn.Module, *, backend: str = "inductor", **options) -> nn.Module:
    """Compile each block in place.

    The first call of a shape is slow; later blocks reuse the first one's code.
    """
    # dynamo stops compiling a function for good after eight versions. All models of a process share
    # their blocks' code.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for block in blocks(model):
        block.compile(backend=backend, **options)
        setattr(block, OPTIONS, {"backend": backend, **options})
    return model
