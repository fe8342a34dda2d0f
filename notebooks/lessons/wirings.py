"""The wirings of an adapted model side by side: gradients by layer and projection, tables, and the
reader's own model.

A *wiring* is a kind of checkpointing and a state of the hook on the embeddings. `survey(model)`
tries all twelve on one model, bench's or the reader's, and counts the adapter tensors that get the
reference's gradient. `heat` draws the gradient norm by layer and projection: q, k, v, o, gate, up
and down in a Llama or Qwen, whatever names others have.

    adapted("Qwen/Qwen3-0.6B")     LoRA on every linear layer of its blocks; "" is the bench's tiny
                                   model

Footgun: a survey sets switches of one model and puts none of them back. Give it a model that nobody
else uses.
"""

import re
from collections.abc import Iterable
from functools import cache, lru_cache

import torch
from matplotlib.figure import Figure
from torch import nn

from lessons.pitfalls import bench
from nblib import models
from nbworkbook import show

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALIKE = 1e-4  # gradients that differ by less, relative to the largest, are the same up to rounding


# -------------------------------------------------------------------------------------- whose model
@cache
def adapted(name: str = "", device: str = "cpu") -> nn.Module:
    """Return a frozen model with random LoRA factors on every linear layer of its blocks.

    Made once per name.
    """
    model = (
        models.load(name, device=device).requires_grad_(False) if name else bench.base().to(device)
    )
    return bench.wake(bench.lora(model, r=4)).train()


def rewire(model: nn.Module, checkpointing: str, hook: str) -> nn.Module:
    """Return the same model in another wiring."""
    inner = bench.inside(model)
    inner.activation_checkpointing_disable()
    # the library forgets a hook when it sets a second one
    inner.get_input_embeddings()._forward_hooks.clear()
    bench.hooked(bench.checkpointed(model, checkpointing), hook)
    return model.train()


def loss_of(model: nn.Module) -> torch.Tensor:
    """Return the loss on the bench's random tokens, on the model's own device."""
    return bench.loss_of(model, bench.rows().to(next(model.parameters()).device))


def flowed(model: nn.Module) -> dict:
    return bench.flow(model, lambda: loss_of(model))


def survey(model: nn.Module) -> list[dict]:
    """Return a row per kind of checkpointing, a column per state of the hook: how many tensors get
    the right gradient.
    """
    right = flowed(rewire(model, "none", "removed"))["gradients"]
    rows = []
    for mode in bench.CHECKPOINTING:
        row = {"checkpointing": mode}
        for hook in bench.HOOK:
            row[f"hook {hook}"] = _outcome(flowed(rewire(model, mode, hook)), right)
        rows.append(row)
    rewire(model, "none", "removed")
    return rows


def _outcome(got: dict, right: dict) -> str:
    if got["raised"]:
        return "raises"
    same = sum(g is not None and _alike(g, right[name]) for name, g in got["gradients"].items())
    return f"{same} of {len(right)}"


def _alike(got: torch.Tensor, right: torch.Tensor) -> bool:
    return float((got - right).abs().max()) <= ALIKE * float(right.abs().max())


# ------------------------------------------------------------------------------------- the pictures
def menus(name: str = "") -> dict[str, tuple[str, ...]]:
    """Return the choices of a wiring, the silent fault of P02 first; a model of the reader's has
    fewer.
    """
    wiring = dict(checkpointing=("reentrant", "non-reentrant", "default", "none"))
    wiring |= dict(hook=("removed", "left to the library", "asked for"))
    fresh = dict(order=bench.ORDER, adapter=bench.ADAPTER, above=("head", "norm", "nothing"))
    return wiring if name else wiring | fresh


def draw(name: str = "", device: str = "cpu", **wiring: str) -> show.Picture:
    """Return the heat map of one wiring beside the same model without checkpointing."""
    if name:
        model, reference = _loaded(name, device)
        return heat(reference, flowed(rewire(model, **wiring)))
    plain = {k: v for k, v in wiring.items() if k in ("adapter", "above")}
    return heat(_plain(**plain), bench.flow(bench.wired(**wiring)))


@lru_cache(maxsize=1)
def _loaded(name: str, device: str) -> tuple[nn.Module, dict]:
    model = adapted(name, device)
    return model, flowed(rewire(model, "none", "removed"))


@cache
def _plain(**plain: str) -> dict:
    return bench.flow(bench.wired(**plain))


def heat(reference: dict, chosen: dict) -> show.Picture:
    """Gradient norms by layer and projection of two backward passes, on one colour scale."""
    kinds, norms = layer_norms(reference["gradients"])
    figure = Figure(figsize=(7.5, 2.0 + 0.06 * len(norms)), layout="constrained")
    scale = dict(vmin=0, vmax=max(max(row) for row in norms), cmap="viridis", aspect="auto")
    both = {
        "reference: no checkpointing": norms,
        "the chosen wiring": layer_norms(chosen["gradients"], kinds)[1],
    }
    for axes, (title, values) in zip(figure.subplots(1, 2), both.items()):
        axes.set_facecolor("0.8")
        image = axes.imshow(values, **scale)
        axes.set(ylabel="layer", yticks=range(0, len(values), max(1, len(values) // 6)))
        axes.set_xticks(
            range(len(kinds)), [kind.removesuffix("_proj") for kind in kinds], fontsize=8
        )
        axes.set_title(title, fontsize=9)
    figure.colorbar(image, ax=figure.axes, label="gradient norm")
    dead = sum(g is None for g in chosen["gradients"].values())
    raised = f"it raised: {chosen['raised']}" if chosen["raised"] else "nothing was raised"
    summary = (
        "Norm of the adapter's gradient by layer and projection; grey means that no gradient "
        "arrived. In the chosen "
        f"wiring {dead} of {len(chosen['gradients'])} tensors have none, and {raised}."
    )
    return show.Picture(figure, summary, title="Which adapters get a gradient?")


def layer_norms(gradients: dict, kinds: Iterable[str] = ()) -> tuple[list[str], list[list[float]]]:
    """Return the kinds of adapted layers, and the gradient norm by layer and kind, NaN where none
    arrived.
    """
    squares: dict[tuple[int, str], list[float]] = {}
    for name, gradient in gradients.items():
        if found := re.search(r"\.(\d+)\.(?:.*\.)?(\w+)\.(?:lora_[AB]\.|down$|up$)", name):
            parts = squares.setdefault((int(found[1]), found[2]), [])
            parts.extend([] if gradient is None else [float(gradient.square().sum())])
    named = list(kinds) or sorted({kind for _, kind in squares}, key=_place)
    layers = sorted({layer for layer, _ in squares})
    return named, [[_norm(squares.get((layer, kind))) for kind in named] for layer in layers]


def _norm(parts: list[float] | None) -> float:
    return sum(parts) ** 0.5 if parts else float("nan")


def _place(kind: str) -> tuple[int, str]:
    return PROJECTIONS.index(kind) if kind in PROJECTIONS else len(PROJECTIONS), kind


# --------------------------------------------------------------------------------------- the tables
def by_wiring(cells: list[dict]) -> list[dict]:
    """Return the cells of `gradient_flow.matrix` as a table: checkpointing by hook, over adapters
    and model families.
    """

    def summary(mode: str, hook: str) -> str:
        of_both = [c for c in cells if (c["checkpointing"], c["hook"]) == (mode, hook)]
        if all(c["raised"] for c in of_both):
            return f"raises in all {len(of_both)}"
        worst = max(c["largest difference"] for c in of_both if not c["raised"])
        whole = sum(c["tensors with a gradient"] == c["of"] for c in of_both)
        return f"{whole} of {len(of_both)} whole, off by {worst:.1g}"

    return [
        {"checkpointing": mode} | {f"hook {hook}": summary(mode, hook) for hook in bench.HOOK}
        for mode in bench.CHECKPOINTING
    ]
