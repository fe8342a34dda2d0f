"""Drawings of notebook 04: the two means of accumulation, what a checkpoint holds, and a rollback
after a spike.
"""

from matplotlib.figure import Figure

from lessons.drawings import LOSS, STORED, TRAINED, Box, Sketch
from nbworkbook import show

COUNTS = (48, 8, 8, 8)  # supervised tokens of the micro-batches, as in the notebook
COLORS = ("#9ec1e6", "#f4b183", "#a9d18e", "#c5a5cf")


def two_means() -> show.Picture:
    """Return the share of each micro-batch in the loss of the step, beside its share of the
    tokens.
    """
    figure = Figure(figsize=(7, 1.7), layout="constrained")
    axes = figure.add_subplot()
    tokens = sum(COUNTS)
    bars = {
        "tokens": [count / tokens for count in COUNTS],
        "mean of means": [1 / len(COUNTS)] * len(COUNTS),
        "token-weighted mean": [count / tokens for count in COUNTS],
    }
    for row, shares in enumerate(bars.values()):
        left = 0.0
        for count, share, color in zip(COUNTS, shares, COLORS):
            axes.barh(-row, share, left=left, height=0.62, color=color, edgecolor="white")
            said = f"{count} tokens" if count == max(COUNTS) else str(count)
            axes.text(
                left + share / 2,
                -row,
                f"{share:.0%}" if row else said,
                ha="center",
                va="center",
                fontsize=9,
            )
            left += share
    axes.set(xlim=(0, 1), xticks=(), yticks=range(0, -len(bars), -1), yticklabels=list(bars))
    axes.tick_params(left=False, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)
    return show.Picture(
        figure,
        "One colour per micro-batch. Top: its supervised tokens. Below: its share in the loss "
        "of the step. The mean "
        "of means gives each micro-batch a quarter, so a token of a short answer weighs six "
        "times as much as one of "
        "the long answer. The token-weighted mean gives every token the same weight.",
        title="Gradient accumulation: two means of the same four micro-batches",
    )


def checkpoint_contents() -> show.Picture:
    """Return the six pieces of a checkpoint and the part of the next step that each decides."""
    sketch = Sketch(7.2, 3.1)
    pieces = ("order", "position", "generators", "weights", "optimizer", "scheduler")
    stored = {
        name: sketch.box(0.9, 2.85 - 0.5 * n, name, width=1.2, height=0.38, fill=STORED)
        for n, name in enumerate(pieces)
    }
    batch = sketch.box(3.4, 2.6, "batch", width=1.2)
    forward = sketch.box(3.4, 1.6, "forward, dropout", width=1.5)
    step = sketch.box(3.4, 0.6, "optimizer.step()", width=1.5, fill=TRAINED)
    loss = sketch.box(5.6, 1.6, "loss", width=0.8, fill=LOSS)
    for piece, part in zip(pieces, (batch, batch, forward, forward, step, step)):
        sketch.arrow(stored[piece], part)
    sketch.arrow(batch, forward)
    sketch.arrow(forward, loss)
    sketch.arrow(loss, step, bend=-0.2)
    sketch.text(5.15, 0.85, "backward()", size=8, color="#444")
    return sketch.picture(
        "Yellow: what a checkpoint must hold. Each piece decides one part of the next step: "
        "order and position the "
        "batch, generators and weights the forward pass, optimizer and scheduler the update "
        "(blue). Leave one out, "
        "and the loss (red) of a resumed run differs.",
        title="A checkpoint's contents",
    )


def rollback_states() -> show.Picture:
    """Return the states of a run on a time line: a snapshot, a spike, the way back and the way
    on.
    """
    sketch = Sketch(7.2, 2.3)
    names = {"step 20": STORED, "step 21": TRAINED, "step 22": TRAINED, "spike": LOSS}
    states = [
        sketch.box(1.0 + 1.5 * n, 1.3, name, width=0.9, fill=fill)
        for n, (name, fill) in enumerate(names.items())
    ]
    for a, b in zip(states, states[1:]):
        sketch.arrow(a, b)
    snapshot = sketch.box(1.0, 0.3, "snapshot", width=1.2, fill=STORED)
    on = sketch.box(6.6, 0.3, "step 21", width=0.9, fill=TRAINED)
    sketch.arrow(states[0], snapshot)
    sketch.text(0.42, 0.8, "clone", size=8, color="#444")
    back = Box(states[3].x, states[3].y + 0.22, 0.3, 0.0)
    sketch.arrow(back, Box(states[0].x, states[0].y + 0.22, 0.3, 0.0), dashed=True, bend=0.22)
    sketch.text(
        3.25, 2.12, "weights, optimizer, scheduler, generators go back", size=8, color="#444"
    )
    sketch.arrow(snapshot, on, "new data, rate x 1/2")
    return sketch.picture(
        "Time runs to the right. Yellow: a state that is kept, and its snapshot, a clone. "
        "Blue: training steps. "
        "Red: the step whose loss jumps; it is not taken. Dashed: everything goes back to the "
        "snapshot except the "
        "data, which go on behind the bad batch.",
        title="A rollback after a spike",
    )
