"""Notebook 21: what a token weighs when ranks average their means, and which rank holds what.

Both are drawn from the numbers given: counts of tokens, and names of meshes. Nothing is measured
here.

Footgun: a shard in the drawing is a whole box's share by area; in memory every tensor is cut along
its first axis.
"""

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lessons.drawings import STORED, TRAINED
from nbworkbook import show

GRADIENT = "#f9d5d3"
KINDS = {"weights": TRAINED, "gradients": GRADIENT, "moments": STORED}
WIDTHS = {"weights": 1, "gradients": 1, "moments": 2}
RANKS = 4


def two_ranks(counts: tuple[int, int] = (8, 62)) -> show.Picture:
    """Return the share of the loss that one token has, on each of two ranks."""
    figure = Figure(figsize=(6.6, 2.3), layout="constrained")
    axes = figure.add_subplot()
    ways = {
        "mean of means": [1 / (2 * n) for n in counts],
        "mean over all tokens": [1 / sum(counts)] * 2,
    }
    for place, (name, shares) in enumerate(ways.items()):
        colour = ("tab:red", "tab:blue")[place]
        spots = [x + 0.36 * place for x in (0, 1)]
        axes.bar(spots, [100 * share for share in shares], width=0.34, color=colour, label=name)
    labels = [f"rank {rank}: {n} tokens" for rank, n in enumerate(counts)]
    axes.set_xticks([0.18, 1.18], labels)
    axes.set(ylabel="% of the loss per token")
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    return show.Picture(
        figure,
        f"Two ranks with {counts[0]} and {counts[1]} supervised tokens. Red: each rank divides "
        "by its own tokens, and "
        f"the ranks are averaged; a token of rank 0 then weighs {counts[1] / counts[0]:.0f} "
        "times as much as one of "
        "rank 1. Blue: one division by the tokens of both.",
        title="What one token weighs in the loss of a step",
    )


def who_holds_what() -> show.Picture:
    """Four ranks under each mesh: the parts of the states that a rank holds are filled."""
    figure = Figure(figsize=(8.8, 2.6), layout="constrained")
    for axes, mesh in zip(figure.subplots(1, 3), ("ddp", "fsdp", "hsdp")):
        cut = {"ddp": 1, "fsdp": RANKS, "hsdp": RANKS // 2}[mesh]
        for rank in range(RANKS):
            left, y = 0.0, RANKS - rank
            for kind, colour in KINDS.items():
                part = WIDTHS[kind] / cut
                axes.add_patch(
                    Rectangle(
                        (left, y), WIDTHS[kind], 0.7, fill=False, edgecolor="#bbb", linewidth=0.8
                    )
                )
                start = left + part * (rank % cut)
                axes.add_patch(Rectangle((start, y), part, 0.7, facecolor=colour, edgecolor="#444"))
                left += WIDTHS[kind] + 0.15
            axes.text(-0.1, y + 0.35, f"rank {rank}", ha="right", va="center", fontsize=8)
        axes.set(xlim=(-1.1, 4.4), ylim=(0.8, RANKS + 1.2), title=mesh)
        axes.axis("off")
    return show.Picture(
        figure,
        "Four ranks. Blue: weights, red: gradients, yellow: the two moments of AdamW; grey "
        "outlines are what the rank "
        "does not hold. ddp: all hold all. fsdp: each holds a quarter. hsdp: two groups, each "
        "of which holds all, and "
        "within which each rank holds a half.",
        title="Who holds what between two steps",
    )
