"""Drawings of notebook 01: where gradients flow in a frozen model, and what a reentrant checkpoint
hides.

LoRA adds two small factors to a frozen matrix, A (r x in) and B (out x r):

    y = W x + (alpha / r) B A x
    https://arxiv.org/abs/2106.09685

Footgun: `silent_fault` trains two tiny models for twenty steps; the others only draw.
"""

from functools import partial

from matplotlib.figure import Figure

from lessons.drawings import COMPUTED, FROZEN, LOSS, STORED, TRAINED, Box, Sketch
from nbworkbook import show


def silent_fault() -> show.Picture:
    """Two runs whose losses fall alike; in one of them only a single tensor moves."""
    import torch

    from lessons.pitfalls import bench
    from nblib import wiring

    figure = Figure(figsize=(7.0, 2.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    moved, of = {}, 0
    for name, mode in {"run 1": "non-reentrant", "run 2": "reentrant"}.items():
        model = bench.wired(mode, "removed", above="head")
        trains = wiring.trainable(model)
        before = {n: p.detach().clone() for n, p in trains.items()}
        optimizer = torch.optim.AdamW(trains.values(), lr=1e-2)
        left.plot(
            bench.quiet(
                bench.plain_loop, model, optimizer, partial(bench.loss_of, model), steps=20
            )[0]
        )
        moved[name] = sum(not torch.equal(p, before[n]) for n, p in trains.items())
        of = len(trains)
    left.set(xlabel="optimizer step", ylabel="training loss")
    right.barh(list(moved)[::-1], list(moved.values())[::-1], color=["C1", "C0"])
    right.set(xlabel=f"tensors that moved, of {of}", xlim=(0, of))
    return show.Picture(
        figure,
        f"Blue: run 1, orange: run 2. Left: both losses fall. Right: {moved['run 1']} of {of} "
        "trainable tensors moved "
        f"in run 1, {moved['run 2']} in run 2. Nothing was raised in either.",
        title="Two fine loss curves, one dead adapter",
    )


def lora() -> show.Picture:
    """One linear layer with its adapter."""
    s = Sketch(7.4, 1.7)
    x = s.box(0.6, 0.85, "x", width=0.6)
    w = s.box(3.2, 1.35, "W", width=1.1, fill=FROZEN)
    a = s.box(2.2, 0.35, "A  (r x in)", width=1.1, fill=TRAINED)
    b = s.box(3.9, 0.35, "B  (out x r)", width=1.2, fill=TRAINED)
    scale = s.box(5.4, 0.35, "alpha / r", width=0.95)
    plus = s.box(5.9, 1.35, "+", width=0.45)
    y = s.box(6.9, 1.35, "y", width=0.6)
    for start, end in ((x, w), (x, a), (a, b), (b, scale), (scale, plus), (w, plus), (plus, y)):
        s.arrow(start, end)
    return s.picture(
        "A linear layer with LoRA. Grey is frozen, blue trains. A and B have few rows or "
        "columns (the rank r), so they "
        "hold a small part of the numbers of W. B starts at zero, so training starts from the "
        "base model.",
        title="LoRA: two small factors beside a frozen matrix",
    )


def through_frozen_layers() -> show.Picture:
    """Gradients pass frozen layers on their way down; they end below the last thing that trains."""
    s = Sketch(7.4, 2.35)
    names = ["input_ids", "embed_tokens", "layers[0]", "layers[1]", "lm_head", "loss"]
    fills = [STORED, FROZEN, FROZEN, FROZEN, FROZEN, LOSS]
    at = [0.55, 1.85, 3.2, 4.5, 5.75, 6.85]
    widths = [0.9, 1.15, 0.95, 0.95, 0.9, 0.75]
    row = [
        s.box(x, 1.45, name, width=w, fill=fill)
        for x, name, w, fill in zip(at, names, widths, fills)
    ]
    for start, end in zip(row, row[1:]):
        s.arrow(start, end)
    blue = "#1f5fa8"
    for end, start in list(zip(row, row[1:]))[2:]:  # no gradient goes below layers[0]
        s.arrow(
            _shifted(start, 0, 0.12), _shifted(end, 0, 0.12), dashed=True, color=blue, bend=0.55
        )
    for block in row[2:4]:
        factors = s.box(block.x, 0.4, "A, B", width=0.95, fill=TRAINED)
        s.arrow(_shifted(factors, -0.2, 0), _shifted(block, -0.2, 0))
        s.arrow(_shifted(block, 0.2, 0), _shifted(factors, 0.2, 0), dashed=True, color=blue)
    s.text(1.95, 1.95, "nothing below trains:\nthe gradient ends here", size=8, color=blue)
    return s.picture(
        "Solid arrows: forward. Dashed blue arrows: gradients. Frozen layers (grey) take no "
        "gradient for their own "
        "weights, but pass it on to what lies below. So every A and B (blue) gets one, also in "
        "the lowest block. The "
        "frozen embedding needs none.",
        title="Gradients flow through frozen layers",
    )


def reentrant() -> show.Picture:
    """Return a reentrant checkpoint decides by its inputs whether it belongs to the graph."""
    s = Sketch(7.4, 3.1)
    for y, asks, end in ((2.3, False, "loss has\nno graph"), (0.75, True, "gradients\nreach A, B")):
        name = "embed_tokens\n+ hook" if asks else "embed_tokens"
        start = s.box(0.75, y, name, width=1.25, height=0.5, fill=FROZEN)
        x = s.box(2.2, y, f"x\nrequires_grad\n{asks}", width=1.05, height=0.75)
        inside = s.box(3.95, y, "", width=1.8, height=1.15, fill="#f6f6f6")
        s.text(3.95, y + 0.4, "reentrant checkpoint", size=8)
        s.box(3.5, y - 0.15, "W", width=0.7, fill=FROZEN)
        s.box(4.4, y - 0.15, "A, B", width=0.7, fill=TRAINED)
        out = s.box(5.6, y, f"y\nrequires_grad\n{asks}", width=1.05, height=0.75)
        loss = s.box(6.87, y, end, width=0.9, height=0.5, fill=COMPUTED if asks else LOSS)
        for a, b in ((start, x), (x, inside), (inside, out), (out, loss)):
            s.arrow(a, b)
    return s.picture(
        "For autograd a reentrant checkpoint is a closed box. Only its inputs decide whether "
        "its output needs a "
        "gradient; weights inside do not count. Above: x comes from a frozen embedding, so A "
        "and B get none. Below: "
        "with a hook that makes x require a gradient, they do. The non-reentrant kind is no "
        "such box.",
        title="What a reentrant checkpoint sees",
    )


def _shifted(box: Box, dx: float, dy: float) -> Box:
    """Return the same box moved a little, so that two arrows between the same boxes lie side by
    side.
    """
    return box._replace(x=box.x + dx, y=box.y + dy)
