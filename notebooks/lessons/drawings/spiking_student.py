"""Notebook 15: one layer of goose as boxes, and the state of one channel by three ways to compute
it.

The second drawing is computed. The inputs are random spikes, the decay is the one a student starts
with.

Footgun: at a slow decay the divided form looks right in a row this short. That is how it passed its
tests.
"""

import torch
from matplotlib.figure import Figure

from lessons.drawings import STORED, TRAINED, Sketch
from lessons.pitfalls.distillation import divided
from nblib.methods import goose
from nbworkbook import show

LENGTH, DECAY = 96, 0.38


def recurrence() -> show.Picture:
    """One token's way through a recurrent layer."""
    sketch = Sketch(8.0, 2.9)
    x = sketch.box(0.35, 1.2, "x", width=0.45)
    mixed = sketch.box(1.45, 1.2, "lerp(before, y)", width=1.2)
    k = sketch.box(3.1, 2.1, "k = spike(key)", width=1.3, fill=TRAINED)
    v = sketch.box(3.1, 1.2, "v = spike(value)", width=1.3, fill=TRAINED)
    r = sketch.box(3.1, 0.3, "r = sigmoid(receptance)", width=1.75, fill=TRAINED)
    kv = sketch.box(4.45, 1.65, "k v", width=0.55)
    before = sketch.box(5.5, 2.55, "S of the token before", width=1.65, fill=STORED)
    S = sketch.box(5.5, 1.65, "S = d S + k v", width=1.15, fill=STORED)
    out = sketch.box(6.75, 1.65, "out(S)", width=0.75, fill=TRAINED)
    added = sketch.box(7.25, 0.3, "x + r out(S)", width=1.15)
    for start, end in (
        (x, mixed),
        (mixed, k),
        (mixed, v),
        (mixed, r),
        (k, kv),
        (v, kv),
        (kv, S),
        (S, out),
    ):
        sketch.arrow(start, end)
    sketch.arrow(before, S)
    sketch.text(5.85, 2.12, "times d", size=8)
    sketch.arrow(out, added)
    sketch.arrow(r, added)
    return sketch.picture(
        "One layer, one token. y is x after a layer norm, before is y of the token before. "
        "Blue has weights that "
        "train. Yellow is the state, one number per channel; S and y are all that is carried "
        "to the next token. Keys "
        "and values are spikes: -a, 0 or a.",
        title="goose: a state that decays takes the place of attention",
    )


def forgotten() -> show.Picture:
    """Return the state of one channel, and the largest error, by each way to compute it."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-1, 2, (1, LENGTH, 1), generator=draw).float()
    d = torch.full((1,), DECAY)
    ways = {"one after the other": goose.sequential, "divided": divided, "scan": goose.scan}
    states = {name: way(x, d).flatten() for name, way in ways.items()}
    figure = Figure(figsize=(7.2, 2.4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(states["one after the other"], "k", linewidth=3, label="one after the other")
    axes.plot(states["scan"], "tab:blue", linewidth=1.2, label="scan")
    axes.plot(states["divided"], "tab:red", linewidth=1.2, label="divided")
    axes.set(xlabel="position", ylabel="S of one channel")
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    return show.Picture(
        figure,
        f"The state S of one channel, decay d = {DECAY}, its inputs random spikes. Black: the "
        "recurrence, one token "
        "after the other. Blue: our parallel form, which lies on it. Red: the parallel form of "
        "the write-up, which "
        "divides by powers of d. It becomes zero and stays there, whatever is read.",
        title="A parallel form that forgets what it reads",
    )
