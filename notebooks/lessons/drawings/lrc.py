"""Notebook 10: what a low-rank product can hold of a rounding error, the LRC layer, and the
straight-through estimator.

Footgun: `rounding_error` uses a random matrix and made-up inputs. It shows why the inputs matter;
how much they matter in a model is measured in the notebook.
"""

import torch
from matplotlib.figure import Figure

from lessons.drawings import FROZEN, LOSS, TRAINED, Sketch
from nblib.methods.lrc import ternary
from nbworkbook import show

SIZE = 192


def rounding_error() -> show.Picture:
    """Share of a rounded layer's output error that is left, over the rank of its correction."""
    draw = torch.Generator().manual_seed(0)
    W, basis = torch.randn(SIZE, SIZE, generator=draw), torch.randn(SIZE, SIZE, generator=draw)
    R = W - ternary.ternary(W)
    # standard deviation of the inputs, by direction
    spread = torch.arange(1, SIZE + 1).float() ** -0.5
    favour = torch.linalg.qr(basis).Q * spread  # inputs are `favour` times standard normal numbers
    _, s, Zh = torch.linalg.svd(R)
    errors = {
        "svd_residual,\nany input": (s.square(), "0.6"),
        "svd_residual": (s.square() * (Zh @ favour).square().sum(1), "tab:orange"),
        "svd_activation": (torch.linalg.svdvals(R @ favour).square(), "tab:blue"),
    }
    figure = Figure(figsize=(6.0, 2.3), layout="constrained")
    axes = figure.add_subplot()
    rank = 100 * torch.arange(SIZE + 1) / SIZE
    for name, (error, colour) in errors.items():
        axes.plot(
            rank,
            100 * (1 - torch.cat([torch.zeros(1), error.cumsum(0)]) / error.sum()),
            color=colour,
            label=name,
        )
    axes.set(
        xlabel="rank of the correction (% of full rank)",
        ylabel="error left (%)",
        xlim=(0, 60),
        ylim=(0, 100),
    )
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside right upper", fontsize=8.5)
    words = (
        "A random matrix is rounded to three values and corrected. The rounding error is "
        "almost noise, so a small rank "
        "leaves most of it (grey). Coloured: the error of the layer's output where inputs "
        "favour few directions. A "
        "correction that is fitted to the inputs (blue) leaves far less of it than one that is "
        "not (orange)."
    )
    return show.Picture(
        figure, words, title="The rounding error has almost full rank, its effect has not"
    )


def layer() -> show.Picture:
    """Return the forward pass of `LRCLinear`."""
    sketch = Sketch(7.0, 1.9)
    x, y = sketch.box(0.5, 0.95, "x", width=0.6), sketch.box(6.55, 0.95, "y", width=0.6)
    rounded = sketch.box(2.0, 1.5, "once(x)")
    weight = sketch.box(3.9, 1.5, "weight = scale * codes", width=1.9, fill=FROZEN)
    V, U = sketch.box(2.0, 0.4, "V", fill=TRAINED), sketch.box(3.9, 0.4, "U", fill=TRAINED)
    add = sketch.box(5.6, 0.95, "+", width=0.4)
    for start, end in (
        (x, rounded),
        (rounded, weight),
        (weight, add),
        (x, V),
        (V, U),
        (U, add),
        (add, y),
    ):
        sketch.arrow(start, end)
    words = (
        "Grey is frozen: every entry of weight is -scale, 0 or scale, and once rounds x to "
        "eight bits. Blue is "
        "trained: V takes x, unrounded, to r numbers and U takes these to the size of y. The "
        "outputs are added."
    )
    return sketch.picture(words, title="LRCLinear: a ternary weight and a low-rank correction")


def straight_through() -> show.Picture:
    """Forward through the rounding, backward past it."""
    sketch = Sketch(7.0, 1.45)
    below = sketch.box(0.8, 0.6, "layers below", width=1.2, fill=TRAINED)
    x, Q = sketch.box(2.4, 0.6, "x", width=0.6), sketch.box(4.0, 0.6, "Q(x)")
    weight, loss = (
        sketch.box(5.4, 0.6, "weight", width=0.9, fill=FROZEN),
        sketch.box(6.6, 0.6, "loss", width=0.7, fill=LOSS),
    )
    for start, end in ((below, x), (x, Q), (Q, weight), (weight, loss)):
        sketch.arrow(start, end)
    sketch.arrow(loss, weight, dashed=True, color="#b03030", bend=0.5)
    sketch.arrow(weight, x, dashed=True, color="#b03030", bend=0.35)
    sketch.arrow(x, below, dashed=True, color="#b03030", bend=0.5)
    sketch.text(
        3.8,
        1.25,
        "straight-through: the gradient of Q(x) is handed to x unchanged",
        size=8,
        color="#b03030",
    )
    sketch.text(4.0, 0.2, "true slope of Q: zero almost everywhere", size=8, color="#555")
    words = (
        "Black arrows are the forward pass, dashed red ones the gradient. The frozen weight "
        "needs no gradient, but the "
        "layers below get theirs through x. With the true slope of the rounding almost nothing "
        "would arrive there."
    )
    return sketch.picture(words, title="Straight-through estimator")
