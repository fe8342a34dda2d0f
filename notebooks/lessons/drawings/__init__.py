"""Drawings of mechanisms: boxes and arrows, made by code, with the names that the code uses.

A drawing is a function that returns a `show.Picture`; each notebook's drawings stand in one module
here.

    sketch = Sketch(7, 2)                                   # inches, the origin at the lower left
    x, w = sketch.box(0.6, 1, "x"), sketch.box(2.6, 1, "W", fill=FROZEN)
    sketch.arrow(x, w)
    sketch.picture("What the drawing shows, as a sentence.", title="LRC layer")

One meaning for each colour: FROZEN is grey, TRAINED blue, COMPUTED white, LOSS red, STORED yellow.
A dashed arrow is a gradient or a path that is not always taken; say which in the sentence.

Footgun: text does not make its box wider. Look at the picture after every change of a word.
"""

from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from nbworkbook import show

FROZEN, TRAINED, COMPUTED, LOSS, STORED = "#e0e0e0", "#cfe2f7", "#ffffff", "#f9d5d3", "#fdf1c6"


class Box(NamedTuple):
    x: float  # the middle
    y: float
    width: float
    height: float


class Sketch:
    """A figure without axes, in inches."""

    def __init__(self, width: float = 7.0, height: float = 2.0):
        self.figure = Figure(figsize=(width, height), layout="constrained")
        self.axes = self.figure.add_subplot()
        self.axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
        self.axes.axis("off")

    def box(
        self,
        x: float,
        y: float,
        text: str,
        *,
        width: float = 1.1,
        height: float = 0.45,
        fill: str = COMPUTED,
    ) -> Box:
        """Return a box around its middle."""
        corner = (x - width / 2, y - height / 2)
        style = "round,pad=0,rounding_size=0.06"
        self.axes.add_patch(
            FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=fill, edgecolor="#444")
        )
        self.text(x, y, text)
        return Box(x, y, width, height)

    def text(self, x: float, y: float, text: str, *, size: float = 9, color: str = "black") -> None:
        self.axes.text(x, y, text, ha="center", va="center", fontsize=size, color=color)

    def arrow(
        self,
        start: Box,
        end: Box,
        text: str = "",
        *,
        dashed: bool = False,
        color: str = "#444",
        bend: float = 0.0,
    ) -> None:
        """From the edge of one box to the edge of another, with a word beside its middle; `bend`
        curves it.
        """
        a, b = _edge(start, end), _edge(end, start)
        look = dict(arrowstyle="-|>", mutation_scale=10, shrinkA=1, shrinkB=1, color=color)
        look |= dict(linestyle="--" if dashed else "-", connectionstyle=f"arc3,rad={bend}")
        self.axes.add_patch(FancyArrowPatch(a, b, **look))
        if text:
            dx, dy = b[0] - a[0], b[1] - a[1]
            # the middle of an arc lies beside the middle of its chord
            across = (-0.5 * bend * -dy, -0.5 * bend * dx)
            above = 0.12 if abs(dx) >= abs(dy) else 0.0
            self.text(
                (a[0] + b[0]) / 2 + across[0],
                (a[1] + b[1]) / 2 + across[1] + above,
                text,
                size=8,
                color=color,
            )

    def picture(self, summary: str, *, title: str = "") -> show.Picture:
        return show.Picture(self.figure, summary, title=title)


def _edge(box: Box, towards: Box) -> tuple[float, float]:
    """Where the line from the middle of a box to that of another one leaves the box."""
    dx, dy = towards.x - box.x, towards.y - box.y
    share = min(box.width / 2 / abs(dx) if dx else 9e9, box.height / 2 / abs(dy) if dy else 9e9)
    return box.x + share * dx, box.y + share * dy
