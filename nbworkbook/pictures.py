"""Tables and pictures: what a cell shows, each with a sentence that says what it is.

Each has a picture for the page and a plain text with its sentence, which is what a forge, a diff
and a log show. A picture carries the sentence inside the PNG too, because no front end shows a
figure's plain text. Figures are made with matplotlib's object API; pyplot keeps hidden state that
leaks between cells.

Footgun: after a training was stopped, captions say so. One that was made before the stop does not
know of it.
"""

import html
import io
import textwrap

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nbworkbook import runs

DPI = 160  # of a PNG, shown at 96
Points = list[tuple[float, float]]


class Table:
    """Rows of dictionaries as a table: HTML on the page, aligned text everywhere else."""

    def __init__(self, rows: list[dict], *, caption: str = ""):
        self.rows, self.caption = (
            [{k: cell(v) for k, v in row.items()} for row in rows],
            after_a_stop(caption),
        )
        self.columns = list(dict.fromkeys(name for row in rows for name in row))
        self.numeric = {
            c for c in self.columns if all(isinstance(row.get(c, 0), (int, float)) for row in rows)
        }

    def __str__(self) -> str:
        rows = [[row.get(c, "") for c in self.columns] for row in self.rows]
        head, *lines = runs.columns([self.columns, *rows]).split("\n")
        return "\n".join(([self.caption] if self.caption else []) + [head, "-" * len(head), *lines])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        def row(tag: str, cells: dict) -> str:  # JupyterLab aligns everything right unless told
            left = {
                c: "" if c in self.numeric else " style='text-align:left'" for c in self.columns
            }
            return "".join(
                f"<{tag}{left[c]}>{html.escape(cells.get(c, ''))}</{tag}>" for c in self.columns
            )

        head = row("th", {c: c for c in self.columns})
        body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in self.rows)
        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        return {
            "text/plain": str(self),
            "text/html": f"<table>{caption}<tr>{head}</tr>{body}</table>",
        }


class Picture:
    """A matplotlib figure as PNG, with a title and, under the axes, the sentence that says what it
    shows.
    """

    def __init__(self, figure: Figure, summary: str, *, title: str = ""):
        summary = after_a_stop(summary)
        self.figure, self.summary = figure, summary
        width, height = figure.get_size_inches()
        lines = textwrap.wrap(summary, int(14.5 * width))
        figure.set_size_inches(width, height + 0.17 * len(lines) + (0.25 if title else 0))
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=9, parse_math=False)
        if title:
            figure.suptitle(
                title, x=0.01, ha="left", fontsize=10, fontweight="bold", parse_math=False
            )

    def save(self, file) -> None:
        """As PNG of 48 colours, less than a third of the bytes: a notebook holds ten of them."""
        from PIL import Image, PngImagePlugin

        page, about = io.BytesIO(), PngImagePlugin.PngInfo()
        about.add_itxt("Description", self.summary)  # for the report, which has the file alone
        self.figure.savefig(page, format="png", dpi=DPI)
        few = (
            Image.open(page)
            .convert("RGB")
            .quantize(48, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        )
        few.save(file, format="png", optimize=True, pnginfo=about)

    def _repr_mimebundle_(self, include=None, exclude=None):
        page = io.BytesIO()
        self.save(page)
        width, height = (round(96 * inches) for inches in self.figure.get_size_inches())
        shown = {"alt": self.summary, "width": width, "height": height}
        return {"text/plain": self.summary, "image/png": page.getvalue()}, {"image/png": shown}


def curves(
    series: dict[str, Points],
    *,
    x: str,
    y: str,
    summary: str,
    title="",
    log=False,
    looks: dict[str, dict] | None = None,
) -> Picture:
    """Lines of (x, y) points by name, with labelled axes; the names stand beside them.

    `looks` are matplotlib's.
    """
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for name, points in series.items():
        look = {"marker": "o" if len(points) < 12 else None, "linewidth": 1.5} | (looks or {}).get(
            name, {}
        )
        axes.plot(*zip(*points), label=name, **look)
    axes.set(xlabel=x, ylabel=y, yscale="log" if log else "linear")
    axes.grid(alpha=0.3)
    if len(series) > 1:
        figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    return Picture(figure, summary, title=title)


def live_curves(series: dict[str, Points], *, x: str, y: str, looks: dict[str, dict]) -> str:
    """Return the same as SVG, by hand: a figure four times a second would cost more than a
    training.
    """
    series = {
        name: points[:: 1 + len(points) // 200] + points[-1:] for name, points in series.items()
    }
    everything = [point for points in series.values() for point in points]
    if len({place for place, _ in everything}) < 2:
        return ""
    (x0, x1), (y0, y1) = ((min(values), max(values)) for values in zip(*everything))

    def at(a: float, b: float) -> str:
        return f"{56 + 452 * (a - x0) / (x1 - x0):.1f},{168 - 148 * (b - y0) / (y1 - y0 or 1):.1f}"

    def text(place: str, words: str, look: str, fill: str = "currentColor") -> str:
        look = f'transform="translate({place})" font-size="11" fill="{fill}" {look}'
        return f"<text {look}>{html.escape(words)}</text>"

    def ticks(low: float, high: float, most: int) -> list[float]:
        return [
            tick
            for tick in MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high)
            if low <= tick <= high
        ]

    parts, axes = [text("4,11", y, ""), text("508,200", x, 'text-anchor="end"')], "M56,20V168H508"
    for tick in ticks(x0, x1, 6):
        axes += f"M{at(tick, y0)}v4"
        parts.append(text(at(tick, y0), f"{tick:g}", 'text-anchor="middle" y="16"'))
    for tick in ticks(y0, y1, 5):
        axes += f"M{at(x0, tick)}h-4"
        parts.append(text(at(x0, tick), f"{tick:.5g}", 'text-anchor="end" x="-7" y="4"'))
    parts.append(f'<path d="{axes}" fill="none" stroke="currentColor"/>')
    for number, (name, points) in enumerate(series.items()):
        dots, colour = looks[name].get("marker"), looks[name]["color"]
        path = ("h0M" if dots else "L").join(at(*point) for point in points) + "h0"
        width = 7 if dots else 1.5
        parts.append(
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
            'stroke-linecap="round"/>'
        )
        parts.append(text(f"520,{30 + 16 * number}", name, "", colour))
    return f'<svg width="640" height="206" role="img">{"".join(parts)}</svg>'


def bars(values: dict[str, float], *, x: str, summary: str, title: str = "") -> Picture:
    """One horizontal bar per name."""
    figure = Figure(figsize=(6.4, 0.6 + 0.32 * len(values)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(list(values)[::-1], list(values.values())[::-1])
    axes.set(xlabel=x)
    return Picture(figure, summary, title=title)


class Page:
    """A bundle of representations that somebody has put together."""

    def __init__(self, bundle: dict[str, str]):
        self.bundle = bundle

    def __str__(self) -> str:
        return self.bundle["text/plain"]

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return self.bundle


class Plain(str):
    """A string that a cell shows without quotes."""

    __repr__ = str.__str__


def displayed(thing, handle=None):
    """Display once, then update in place; outside IPython print the text.

    Returns the `handle` of the next time.
    """
    from IPython import get_ipython
    from IPython.display import display

    if type(thing) is str:
        thing = Plain(thing)

    if get_ipython() is None:
        print(thing, flush=True)
        return True
    if handle is not None:
        handle.update(thing)
        return handle
    return display(thing, display_id=True)


def cell(value) -> str:
    """Return a value as a table spells it: four digits that count, thousands apart, none instead of
    nothing.
    """
    if value is None or value == []:
        return "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    whole = isinstance(value, int) or 1e4 <= abs(value) < 1e9  # 65,536 and not 6.554e+04
    return f"{value:,.0f}" if whole else f"{value:.4g}"


def after_a_stop(caption: str) -> str:
    """Return the caption, with what was stopped half-way if something was."""
    notice = runs.notice()
    return f"{caption} ({notice})".strip() if notice else caption
