"""What a model of notebook 14 does inside: which tokens a layer chose, which mixers ran, who sees
later tokens.

`watched` gives the input and the output of each layer that skips, beside its choice, so that a cell
can compare them to the bit. `calls` counts how many of some modules run.

Footgun: a hook sees what a layer returns at that moment. A layer that changes its input in place
looks unchanged.
"""

from collections.abc import Callable, Iterable
from math import isclose

import torch
from torch import Tensor, nn

from nblib import wiring
from nblib.methods.moe import depths


@torch.no_grad()
def watched(model: nn.Module, ids: Tensor) -> list[tuple[depths.Choice, Tensor, Tensor]]:
    """Return the choice, the input and the output of every layer that skips, in one forward pass
    over ids (B, T).
    """
    seen: list[tuple[Tensor, Tensor]] = []
    layers = depths.wrapped(model).values()
    hooks = [
        m.register_forward_hook(lambda _, args, out: seen.append((args[0], out))) for m in layers
    ]
    try:
        with depths.choices(model) as choices:
            model.base_model(input_ids=ids)
    finally:
        for hook in hooks:
            hook.remove()
    return [(choice, x, y) for (choice,), (x, y) in zip(choices.values(), seen, strict=True)]


def modes(reach: dict[str, float], least: float = 1e-4) -> str:
    """In which mode something changed by more than `least`, in words."""
    reached = [mode for mode, change in reach.items() if change > least]
    return {0: "in neither mode", len(reach): "in both"}.get(
        len(reached), f"{', '.join(reached)} only"
    )


def calls(modules: Iterable[nn.Module], run: Callable[[], object]) -> int:
    """How many of the modules are called while `run` runs."""
    called: set[int] = set()
    hooks = [m.register_forward_pre_hook(lambda m, _: called.add(id(m))) for m in modules]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return len(called)


def close(a: float, b: float) -> bool:
    return isclose(a, b, rel_tol=1e-4)


@torch.no_grad()
def agreement(model: nn.Module, rows: Tensor, *, batch: int = 16) -> list[dict]:
    """Per layer: share of tokens worked on in evaluation, and how often that is the choice training
    would make.
    """
    device, parts = next(model.parameters()).device, {}
    with wiring.evaluating(model):
        for few in rows.split(batch):
            with depths.choices(model) as chosen:
                model.base_model(input_ids=few.to(device), use_cache=False)
            for name, (c,) in chosen.items():
                # (2, N)
                parts.setdefault(name, []).append(
                    torch.stack([c.chosen, c.highest]).flatten(1).float()
                )
    return [
        {
            "layer": name,
            "worked on": float(used.mean()),
            "agree": float((used == wanted).float().mean()),
        }
        for name, (used, wanted) in (
            (name, torch.cat(pairs, dim=1)) for name, pairs in parts.items()
        )
    ]
