"""Notebook 20: one race read on three axes, and what it means to beat a point.

Both drawings are computed from made-up numbers. The first takes two runs whose loss falls as a + b
exp(-step / c), one fast per step and slow per second, and reads the same two curves over steps,
over seconds, and against bytes.

Footgun: the numbers are chosen so that the order changes. Whether it does for real runs is measured
in the notebook.
"""

import numpy
from matplotlib.figure import Figure

from lessons.comparing import front
from nbworkbook import show

# name: colour, loss at the end, steps to fall by e, seconds of a step, MB that train
RUNS = {"A": ("tab:blue", 3.0, 22, 1.0, 400), "B": ("tab:orange", 3.12, 30, 0.45, 20)}
STEPS, START = 100, 5.0


def three_axes() -> show.Picture:
    """Return the same two runs; who is ahead hangs on the axis."""
    figure = Figure(figsize=(8.6, 2.5), layout="constrained")
    by_step, by_second, by_bytes = figure.subplots(1, 3, sharey=True)
    steps = numpy.arange(STEPS + 1)
    for name, (colour, low, fall, seconds, size) in RUNS.items():
        loss = low + (START - low) * numpy.exp(-steps / fall)
        by_step.plot(steps, loss, color=colour, label=name)
        by_second.plot(steps * seconds, loss, color=colour)
        by_bytes.plot([size], loss[-1:], "o", color=colour)
    by_second.axvline(STEPS * RUNS["B"][3], color="black", linestyle="--", linewidth=0.8)
    by_step.set(xlabel="steps", ylabel="held-out loss")
    by_second.set(xlabel="seconds")
    by_bytes.set(xlabel="MB that train", xscale="log", xlim=(5, 2000))
    for axes in (by_step, by_second, by_bytes):
        axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    return show.Picture(
        figure,
        "Two made-up runs, A in blue and B in orange. Over steps A is below B. Over seconds B "
        "is below A for as "
        "long as B runs (dashed: its end). In bytes A is a little better and costs twenty "
        "times as much.",
        title="Which one is better? Each axis has its own answer",
    )


def beaten() -> show.Picture:
    """Return a front: the points that no other point beats, and what one of them beats."""
    draw = numpy.random.default_rng(2)
    x = draw.uniform(0.5, 9.5, 16)
    y = 3 + 2.2 * numpy.exp(-x / 2.5) + draw.exponential(0.45, 16)
    points = dict(enumerate(zip(x.tolist(), y.tolist())))
    on = front(points)
    edge = sorted(points[n] for n in on)
    corner = edge[len(edge) // 2]
    figure = Figure(figsize=(6.4, 2.7), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(
        [corner[0], 10], corner[1], y.max() + 0.2, color="tab:red", alpha=0.12, linewidth=0
    )
    axes.plot(
        [p[0] for n, p in points.items() if n not in on],
        [p[1] for n, p in points.items() if n not in on],
        "o",
        color="0.6",
    )
    axes.step(*zip(*edge), where="post", color="tab:blue", linewidth=1)
    axes.plot(*zip(*edge), "o", color="tab:blue")
    axes.plot(*corner, "o", color="tab:red", markersize=10)
    axes.set(
        xlabel="cost", ylabel="held-out loss", xlim=(0, 10), ylim=(y.min() - 0.2, y.max() + 0.2)
    )
    axes.grid(alpha=0.3)
    return show.Picture(
        figure,
        "Made-up runs, a point each. Blue: the front. Grey: beaten by at least one other run, "
        "which is as cheap and as "
        "good, and better in one of the two. The red run beats all runs in the red area.",
        title="A Pareto front: only the choice among the blue points is yours",
    )
