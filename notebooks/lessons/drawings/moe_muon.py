"""Notebook 12: a router that picks experts, what Muon makes of a momentum, and how far a rate moves
a matrix.
"""

import torch
from matplotlib.figure import Figure

from lessons.drawings import COMPUTED, LOSS, TRAINED, Sketch
from nblib.methods import muon
from nbworkbook import show

SIZE = 0.02  # of a fresh weight, root mean square
RATES = {"write-up, before": 3e-4, "write-up, after": 1e-3, "this notebook": 0.02}


def steps_at_rates() -> show.Picture:
    """One step of Muon over the size of a fresh matrix (128, 128), by rate and convention."""
    rates = torch.logspace(-4, -1, 50).tolist()
    figure = Figure(figsize=(6.8, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for adjust in muon.ADJUST:
        axes.plot(rates, [_moved(rate, adjust) for rate in rates], label=adjust, linewidth=1.5)
    for (name, rate), marker in zip(RATES.items(), "osD"):
        axes.plot(rate, _moved(rate, "original"), marker, color="black", label=name)
    axes.set(
        xscale="log", yscale="log", xlabel="learning rate", ylabel="one step, % of the weights"
    )
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    words = (
        "How far one step of Muon moves a fresh matrix. The gradient is not on any axis, "
        "because its size plays no "
        "part. The lines are the two conventions for a rate; the black marks are rates used "
        "with the first of them."
    )
    return show.Picture(figure, words, title="The rate alone decides how far Muon moves a matrix")


def _moved(rate: float, adjust: str) -> float:
    return 100 * muon.step_rms((128, 128), rate, adjust) / SIZE


def router() -> show.Picture:
    """From a token over its experts to their weighted sum, and the two losses beside the language
    loss.
    """
    sketch = Sketch(7.4, 3.0)
    x, logits = (
        sketch.box(0.55, 1.8, "x", width=0.6),
        sketch.box(1.75, 1.8, "router R", width=1.0, fill=TRAINED),
    )
    p = sketch.box(3.5, 1.8, "p = softmax\n(logits)", width=1.05, height=0.55)
    names = ("expert 0", "expert 1", "expert 2", "...", "expert E-1")
    experts = [
        sketch.box(
            5.2,
            2.75 - 0.47 * n,
            name,
            width=0.95,
            height=0.34,
            fill=TRAINED if n in (1, 4) else "#eef4fb",
        )
        for n, name in enumerate(names)
    ]
    y = sketch.box(6.85, 1.8, "y", width=0.6)
    balance = sketch.box(3.5, 0.3, "balance", width=0.9, fill=LOSS)
    z = sketch.box(1.75, 0.3, "z", width=0.6, fill=LOSS)
    sketch.arrow(x, logits)
    sketch.arrow(logits, p, "logits")
    for n, expert in enumerate(experts):
        chosen = n in (1, 4)
        sketch.arrow(p, expert, dashed=not chosen, color="#444" if chosen else "#bbb")
        if chosen:
            sketch.arrow(expert, y)
    sketch.text(4.15, 2.72, "top-k, k = 2", size=8)
    sketch.text(6.25, 2.55, "times p", size=8)
    sketch.arrow(p, balance, dashed=True)
    sketch.text(3.9, 1.0, "f and P", size=8)
    sketch.arrow(logits, z, dashed=True)
    sketch.text(2.12, 1.0, "logits", size=8)
    words = (
        "One token x in one layer. Blue: trained. The two experts in full blue are chosen; the "
        "pale ones do not run "
        "for this token. y is the sum of the chosen experts' outputs, each times its p. Red: "
        "the two losses of "
        "the router, which are added to the language loss."
    )
    return sketch.picture(
        words, title="A mixture layer: a router picks k of E experts for each token"
    )


def muon_update() -> show.Picture:
    """Return the momentum's three factors, and what is left of them in the update."""
    sketch = Sketch(7.4, 2.1)
    g, m = sketch.box(0.6, 1.2, "gradient g", width=0.95), sketch.box(2.0, 1.2, "M", width=0.6)
    factors = _factors(sketch, 3.75, ("U", "S", "Vᵀ"), COMPUTED, falling=True)
    update = _factors(sketch, 6.35, ("U", "~1", "Vᵀ"), COMPUTED, falling=False)
    sketch.arrow(g, m, "average")
    sketch.arrow(m, factors, "=")
    sketch.arrow(factors, update, "NS5")
    sketch.text(6.35, 0.25, "W - lr * scale * update", size=9)
    sketch.text(3.75, 0.25, "bars: singular values", size=8, color="#666")
    words = (
        "M is the average of the gradients. Five Newton-Schulz steps (NS5) keep its directions "
        "U and V. They bring "
        "its singular values, the blue bars, close to 1, with nothing but products of matrices."
    )
    return sketch.picture(words, title="Muon: M = U S Vᵀ becomes about U Vᵀ")


def _factors(sketch: Sketch, x: float, names: tuple[str, str, str], fill: str, *, falling: bool):
    """Three factors in a frame; in the middle one the singular values as bars."""
    frame = sketch.box(x, 1.2, "", width=1.75, height=1.15, fill=fill)
    for n, name in enumerate(names):
        sketch.text(x + 0.56 * (n - 1), 1.58, name)
    for n in range(6):
        height = 0.6 * (0.55**n if falling else (0.95, 1.0, 0.85, 0.97, 0.8, 0.9)[n])
        left = x - 0.21 + 0.075 * n
        sketch.axes.bar(left, height, width=0.055, bottom=0.72, color="#4878cf", align="edge")
    for side in (-0.56, 0.56):
        sketch.box(x + side, 1.05, "", width=0.42, height=0.62, fill="#f6f6f6")
    return frame
