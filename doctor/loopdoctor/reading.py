"""What went into a call of a model and what came out of it, told by name and by shape.

Models are called in every way: with input_ids or idx, with labels or targets, by name or by place,
in one dict. They return logits, a pair with the loss, a dict or an object of transformers.
Everything later builds on what is told here: which tensor holds the token ids, which the labels,
which the logits.

Footgun: two-dimensional integers of the same shape are ids and labels only by their order. So names
are asked first.
"""

import inspect
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from loopdoctor.evidence import Call


def read_call(call: Call, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
    """Find token ids, masks, labels, logits and loss among what went in and came out, by name and
    by shape.
    """
    given = {k: v for k, v in kwargs.items() if readable(v)}
    rows = [x for x in args if readable(x) and x.dim() == 2 and not x.is_floating_point()]
    if len(args) == 1 and isinstance(args[0], Mapping):
        given = {k: v for k, v in args[0].items() if readable(v)} | given
    ids = next((given[k] for k in ("input_ids", "ids", "idx", "tokens", "x") if k in given), None)
    if ids is None and rows:
        ids = rows.pop(0)
    labels = next((given[k] for k in ("labels", "targets", "target", "y") if k in given), None)
    if labels is None and ids is not None:
        labels = next((x for x in rows if x.shape == ids.shape and x.dtype == torch.int64), None)
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is None and len(args) > 1 and hasattr(module, "config"):
        mask = _by_place(module, args, "attention_mask")
    call.ids = (
        on_cpu(ids) if ids is not None and ids.dim() == 2 and not ids.is_floating_point() else None
    )
    call.labels = on_cpu(labels) if labels is not None and labels.dim() == 2 else None
    decoder = given.get("decoder_input_ids")
    call.decoder = on_cpu(decoder) if decoder is not None and decoder.dim() == 2 else None
    call.mask = on_cpu(mask) if mask is not None and mask.dim() == 2 else None
    call.positions = on_cpu(positions) if positions is not None and positions.dim() == 2 else None
    found = list(_tensors(output))
    floats = [x for x in found if x.is_floating_point()]
    call.requires_grad = any(x.requires_grad for x in floats)
    named = output if hasattr(output, "get") else {}
    logits = named.get("logits") if hasattr(named, "get") else None
    if logits is None:
        shape = call.ids.shape if call.ids is not None else None
        fits = [x for x in floats if x.dim() == 3 and (shape is None or x.shape[:2] == shape)]
        logits = next(
            (
                x
                for x in fits
                if call.ids is None or not call.ids.numel() or x.shape[-1] > int(call.ids.max())
            ),
            None,
        )
    if readable(logits) and logits.dim() == 3:
        call.logits, call.vocabulary = logits, logits.shape[-1]
        call.finite = finite(logits)
    loss = named.get("loss") if hasattr(named, "get") else None
    call.loss = (
        loss
        if loss is not None
        else next((x for x in floats if x.dim() == 0 and x.requires_grad), None)
    )
    cache = getattr(output, "past_key_values", None)
    call.cached = cache is not None
    # what transformers makes by itself; others count otherwise
    if type(cache).__name__ == "DynamicCache":
        call.cache, call.kept = weakref.ref(cache), int(cache.get_seq_length())


def _by_place(module: nn.Module, args: tuple, name: str) -> Tensor | None:
    """Return what a model of transformers is given for this argument without its name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) and readable(args[place]) else None


def readable(x: Any) -> bool:
    """Whether it is a tensor with numbers in rows of one length."""
    return isinstance(x, Tensor) and not x.is_meta and not x.is_nested


def autocast_of(device: str) -> torch.dtype | None:
    """Return the dtype of autocast where it is on."""
    known = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if known else None


def finite(logits: Tensor) -> bool:
    """In one pass, without a copy: the extremes are NaN where any value is."""
    return (
        bool(torch.isfinite(torch.stack(torch.aminmax(logits.detach()))).all())
        if logits.numel()
        else True
    )


def unwrap(module: nn.Module, wrappers: list[nn.Module]) -> nn.Module:
    """Return the model inside DDP and torch.compile; the wrappers are collected."""
    while not isinstance(module, torch.jit.ScriptModule):
        inner = (
            module._modules.get("module")
            if _is_parallel(module)
            else module._modules.get("_orig_mod")
        )
        if inner is None:
            return module
        if not any(w is module for w in wrappers):
            wrappers.append(module)
        module = inner
    return module


def is_compiled(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )


def _is_parallel(module: nn.Module) -> bool:
    return type(module).__name__ in ("DistributedDataParallel", "DataParallel")


def _tensors(output: Any, depth: int = 0) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        if readable(output):
            yield output
    elif depth < 3 and hasattr(output, "values") and callable(output.values):
        for value in output.values():
            yield from _tensors(value, depth + 1)
    elif depth < 3 and isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value, depth + 1)


def on_cpu(x: Tensor) -> Tensor:
    return x.detach().cpu().clone()
