"""Drawings of notebook 03: the numbers that bf16 holds, what Muon does to a matrix, the way through
a loss scaler.

The first two are measured when they are drawn: rounding by torch, singular values by torch and
`muon.orthogonalise`.
"""

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from lessons.drawings import LOSS, STORED, TRAINED, Sketch
from nblib.methods import muon
from nbworkbook import show

LOST, KEPT, RANGE = "tab:red", "tab:green", (0.9885, 1.0185)


def bf16_numbers() -> show.Picture:
    """Return the numbers around 1, and two updates of the same size of which one is lost."""
    figure = Figure(figsize=(7, 1.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=RANGE, ylim=(-0.8, 0.85))
    axes.axis("off")
    axes.axhline(0, color="#444", linewidth=1)
    rounded = torch.linspace(*RANGE, 1000).bfloat16().unique().tolist()
    numbers = [number for number in rounded if RANGE[0] < number < RANGE[1]]
    at = numbers.index(1.0)
    below, above = (numbers[at - 1] + 1) / 2, (numbers[at + 1] + 1) / 2
    axes.axvspan(below, above, 0.36, 0.6, color=STORED)
    axes.vlines(numbers, -0.12, 0.12, color="black", linewidth=1.5)
    names = {
        at - 2: "$1-2^{-7}$",
        at - 1: "$1-2^{-8}$",
        at: "1",
        at + 1: "$1+2^{-7}$",
        at + 2: "$1+2^{-6}$",
    }
    for n, name in names.items():
        axes.text(numbers[n], -0.34, name, ha="center", va="center", fontsize=10)
    axes.text(
        1.0,
        -0.66,
        "all of this is written as 1",
        ha="center",
        va="center",
        fontsize=8,
        color="#8a6d00",
    )
    for update in (0.003, -0.003):
        exact = 1.0 + update
        written = float(torch.tensor(exact).bfloat16())
        color = KEPT if written != 1 else LOST
        axes.plot([exact], [0], "o", color=color, markersize=6, zorder=3)
        look = dict(arrowstyle="-|>", mutation_scale=11, color=color, shrinkA=2, shrinkB=3)
        bend = -0.75 if update > 0 else 0.75
        axes.add_patch(
            FancyArrowPatch((1.0, 0.13), (exact, 0.02), connectionstyle=f"arc3,rad={bend}", **look)
        )
        said = f"1 {'+' if update > 0 else '-'} 0.003: {'kept' if written != 1 else 'lost'}"
        axes.text(exact + update, 0.62, said, ha="center", va="center", fontsize=9, color=color)
    return show.Picture(
        figure,
        "Black strokes are the numbers that bf16 holds around 1. A result inside the yellow "
        "span is written as 1. "
        "The update of +0.003 (red) ends inside it and is lost. The update of -0.003 (green) "
        "leaves it, because the "
        "numbers below 1 lie twice as close.",
        title="bf16 around a weight of 1",
    )


def singular_values() -> show.Picture:
    """Return the singular values of a momentum before and after, as bars."""
    drawn = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    U, V = torch.linalg.qr(drawn).Q
    S = torch.logspace(0, -2, 16)
    M = U * S @ V.T
    after = torch.linalg.svdvals(muon.orthogonalise(M))
    figure = Figure(figsize=(7, 2.3), layout="constrained")
    for n, (values, said) in enumerate(
        ((S, r"$M = U\,S\,V^T$"), (after, r"orthogonalise(M) $\approx U\,V^T$"))
    ):
        axes = figure.add_subplot(1, 2, n + 1)
        axes.bar(
            range(1, 17),
            values.tolist(),
            color="#9ec1e6" if n else "#bdbdbd",
            edgecolor="#444",
            linewidth=0.5,
        )
        axes.axhline(1, color="tab:red", linewidth=1, linestyle="--")
        axes.set(xlabel="number of the singular value", ylim=(0, 1.3), xticks=(1, 4, 8, 12, 16))
        axes.set_title(said, fontsize=11)
    return show.Picture(
        figure,
        "Singular values of a momentum M (grey, falling from 1 to a hundredth) and of the "
        "update that Muon makes of "
        "it (blue). The directions U and V stay. The sizes S come near 1 (dashed), so weak "
        "directions move as far "
        "as strong ones.",
        title="Muon: same directions, one size",
    )


def scaler_cycle() -> show.Picture:
    """Return the calls of one fp16 step, in order."""
    sketch = Sketch(7.4, 2.0)
    scaled = sketch.box(0.85, 1.6, "scaler.scale(loss)", width=1.5, fill=LOSS)
    backward = sketch.box(2.6, 1.6, "backward()", width=1.1)
    unscale = sketch.box(4.45, 1.6, "scaler.unscale_\n(optimizer)", width=1.4, height=0.55)
    clip = sketch.box(6.45, 1.6, "clip_grad_norm_", width=1.4)
    step = sketch.box(6.45, 0.4, "scaler.step\n(optimizer)", width=1.4, height=0.55, fill=TRAINED)
    update = sketch.box(3.65, 0.4, "scaler.update()", width=1.4, fill=STORED)
    scale = sketch.box(0.85, 0.4, "scale", width=1.0, fill=STORED)
    sketch.arrow(scaled, backward)
    sketch.arrow(backward, unscale, "x scale")
    sketch.arrow(unscale, clip, "/ scale")
    sketch.arrow(clip, step)
    sketch.arrow(step, update, "inf or nan?")
    sketch.arrow(update, scale, "halved or doubled")
    sketch.arrow(scale, scaled, dashed=True)
    return sketch.picture(
        "One fp16 step, clockwise. Red: the loss. Blue: where weights move. Yellow: what the "
        "scaler stores for the "
        "next step (dashed). Gradients are too large by the scale until unscale_, so the clip "
        "stands after it. If a "
        "gradient is inf or nan, step does nothing and update halves the scale; after many "
        "good steps it doubles "
        "it.",
        title="The loss scaler's cycle",
    )
