"""What a notebook shows: live progress, curves, tables, source, and controls that vanish when nobody is there.

Everything is an object with `_repr_mimebundle_`, displayed once and updated in place. It has a picture for the page and
a plain text with the summary, because that text is what a forge, a diff and a log show. Figures are made with
matplotlib's object API; pyplot keeps hidden state that leaks between cells.

A picture carries its sentence inside the PNG, under the axes: no front end shows a figure's plain text, and a forge
shows nothing else. What stays of a training is a picture too, because untrusted notebooks lose their SVG.

Footgun: a widget in a committed notebook is an empty box for whoever reads it later. So controls are made of
ipywidgets only where a person sits at the kernel; headless they are plain attributes with their defaults.
"""

import html
import inspect
import io
import math
import os
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from nblib import runtime
from nblib.run.runs import PROGRESS, RUN_DIR, columns

DPI = 160  # of a PNG, shown at 96


class Progress:
    """Step, loss, tokens per second, time left and, on CUDA, memory: call it with each record of the loop."""

    def __init__(self, title: str = "training"):
        self.title, self.record, self.handle, self.losses = title, {}, None, []
        self.drawn = self.reported = 0.0

    def __call__(self, record: dict) -> None:
        self.record = record
        if math.isfinite(record["loss"]):
            self.losses.append((record["step"], record["loss"]))
        if self.handle is None or self.ended or time.monotonic() - self.drawn > 0.25:
            self.drawn = time.monotonic()
            self.handle = displayed(self, self.handle)
        if RUN_DIR in os.environ and (
            self.ended or time.monotonic() - self.reported > 5
        ):  # the runner passes these lines on
            self.reported = time.monotonic()
            with (Path(os.environ[RUN_DIR]) / PROGRESS).open("a", encoding="utf-8") as lines:
                lines.write(f"{self}\n")

    @property
    def ended(self) -> bool:
        return bool(self.record) and (self.record["step"] == self.record["of"] or "stopped" in self.record)

    def __str__(self) -> str:
        r = self.record
        if not r:
            return f"{self.title}: not started"
        parts = [f"{self.title}: step {r['step']} of {r['of']}", f"loss {r['loss']:.4f}"]
        if "lr" in r:
            parts.append(f"rate {r['lr']:.1e}")
        if "tokens_per_s" in r:
            parts += [f"{r['tokens_per_s']:,.0f} tokens/s", f"{_clock(r['eta_s'])} left"]
        if "memory_gib" in r:
            parts.append(f"{r['memory_gib']:.1f} GiB")
        return ", ".join(parts + ([f"stopped by {r['stopped']}"] if "stopped" in r else []))

    def _repr_mimebundle_(self, include=None, exclude=None):
        if self.ended and len(self.losses) > 1:
            stored = curves({"loss": self.losses}, x="step", y="loss", summary=str(self), title=_fall(self.losses))
            return stored._repr_mimebundle_()
        share = self.record["step"] / self.record["of"] if self.record else 0
        line = f'<progress value="{share:.4f}" max="1" style="width:16em"></progress> {html.escape(str(self))}'
        return {"text/plain": str(self), "text/html": f"<div>{line}<br>{_spark(self.losses)}</div>"}


def _spark(points: list[tuple[float, float]], width: int = 420, height: int = 60) -> str:
    """The loss so far as a small line, drawn by hand: a figure four times a second would cost more than the step."""
    if len(points) < 2:
        return ""
    points = points[:: max(1, len(points) // 200)]
    lo, hi = min(y for _, y in points), max(y for _, y in points)
    first, last = points[0][0], points[-1][0]
    xy = " ".join(
        f"{width * (x - first) / max(1, last - first):.1f},{height * (hi - y) / max(1e-9, hi - lo):.1f}"
        for x, y in points
    )
    label = _fall(points)
    return (
        f'<svg width="{width}" height="{height + 4}" role="img" aria-label="{label}">'
        f'<polyline points="{xy}" fill="none" stroke="#4878cf" stroke-width="1.5"/></svg> '
        f"<small>{label}</small>"
    )


def _fall(points: list[tuple[float, float]]) -> str:
    """From the first loss to the last one: the largest and the smallest would read as a fall where there was none."""
    (first, before), (last, after) = points[0], points[-1]
    return f"loss {before:.2f} to {after:.2f}, steps {first} to {last}"


class Table:
    """Rows of dictionaries as a table: HTML on the page, aligned text everywhere else."""

    def __init__(self, rows: list[dict], *, caption: str = ""):
        self.rows, self.caption = [{k: cell(v) for k, v in row.items()} for row in rows], caption
        self.columns = list(dict.fromkeys(name for row in rows for name in row))
        self.numeric = {c for c in self.columns if all(isinstance(row.get(c, 0), (int, float)) for row in rows)}

    def __str__(self) -> str:
        rows = [[row.get(c, "") for c in self.columns] for row in self.rows]
        head, *lines = columns([self.columns, *rows]).split("\n")
        return "\n".join(([self.caption] if self.caption else []) + [head, "-" * len(head), *lines])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        def row(tag: str, cells: dict) -> str:  # JupyterLab aligns everything right unless told
            left = {c: "" if c in self.numeric else " style='text-align:left'" for c in self.columns}
            return "".join(f"<{tag}{left[c]}>{html.escape(cells.get(c, ''))}</{tag}>" for c in self.columns)

        head = row("th", {c: c for c in self.columns})
        body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in self.rows)
        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        return {"text/plain": str(self), "text/html": f"<table>{caption}<tr>{head}</tr>{body}</table>"}


class Picture:
    """A matplotlib figure as PNG, with a title and, under the axes, the sentence that says what it shows."""

    def __init__(self, figure: Figure, summary: str, *, title: str = ""):
        self.figure, self.summary = figure, summary
        width, height = figure.get_size_inches()
        lines = textwrap.wrap(summary, int(14.5 * width))
        figure.set_size_inches(width, height + 0.17 * len(lines) + (0.25 if title else 0))
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=9)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")

    def save(self, file) -> None:
        """As PNG of 48 colours, less than a third of the bytes: a notebook holds ten of them."""
        from PIL import Image, PngImagePlugin

        page, about = io.BytesIO(), PngImagePlugin.PngInfo()
        about.add_itxt("Description", self.summary)  # for the report, which has the file alone
        self.figure.savefig(page, format="png", dpi=DPI)
        few = Image.open(page).convert("RGB").quantize(48, dither=Image.Dither.NONE)
        few.save(file, format="png", optimize=True, pnginfo=about)

    def _repr_mimebundle_(self, include=None, exclude=None):
        page = io.BytesIO()
        self.save(page)
        width, height = (round(96 * inches) for inches in self.figure.get_size_inches())
        shown = {"alt": self.summary, "width": width, "height": height}
        return {"text/plain": self.summary, "image/png": page.getvalue()}, {"image/png": shown}


def curves(
    series: dict[str, list[tuple[float, float]]], *, x: str, y: str, summary: str, title: str = "", log: bool = False
) -> Picture:
    """Lines of (x, y) points by name, with labelled axes; the names stand beside the axes, off the lines."""
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for name, points in series.items():
        axes.plot(*zip(*points), label=name, marker="o" if len(points) < 12 else None, linewidth=1.5)
    axes.set(xlabel=x, ylabel=y, yscale="log" if log else "linear")
    axes.grid(alpha=0.3)
    if len(series) > 1:
        figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    return Picture(figure, summary, title=title)


def bars(values: dict[str, float], *, x: str, summary: str, title: str = "") -> Picture:
    """One horizontal bar per name."""
    figure = Figure(figsize=(6.4, 0.6 + 0.32 * len(values)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(list(values)[::-1], list(values.values())[::-1])
    axes.set(xlabel=x)
    return Picture(figure, summary, title=title)


class predict:
    """A question with choices. A person gets a row of buttons, anybody else nothing. `answer`, in the cell that
    measures it, says what was chosen and what it is."""

    def __init__(self, question: str, choices: Sequence[Any]):
        if len(choices) < 2:
            raise ValueError(f"choices = {choices!r}: allowed are two or more")
        self.question, self.choices, self.chosen = question, list(choices), None
        if runtime.interactive():
            from ipywidgets import HTML, ToggleButtons, VBox

            options = [(cell(choice), choice) for choice in self.choices]
            buttons = ToggleButtons(options=options, value=None, style={"button_width": "auto"})
            buttons.observe(lambda change: setattr(self, "chosen", change["new"]), "value")
            displayed(VBox([HTML(f"<b>Predict:</b> {html.escape(question)}"), buttons]))

    def answer(self, value: Any) -> "_Plain":
        before = "" if self.chosen is None else f"you said {cell(self.chosen)}: "
        return _Plain(f"{before}it is {cell(value)}")


# A long line scrolls, where JupyterLab would break it anywhere.
NO_WRAP = "white-space: pre; overflow-x: auto; font-family: monospace"


class source:
    """The source of a function or module, as the library has it: shown, never pasted."""

    def __init__(self, thing):
        self.text = inspect.getsource(thing).rstrip()

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        formatter = HtmlFormatter(noclasses=True, nobackground=True, prestyles=NO_WRAP)
        page = highlight(self.text, PythonLexer(), formatter)
        return {"text/plain": self.text, "text/html": page}


class Controls:
    """A Stop button and a learning-rate slider beside a running loop, read by it once per step.

    Headless, `stop` is False and `lr_scale` is 1 until code sets them.
    """

    def __init__(self):
        self.stop, self.lr_scale, self.handle = False, 1.0, None
        if runtime.interactive():
            self.handle = displayed(self._widgets())

    def _widgets(self):
        from ipywidgets import Button, FloatLogSlider, HBox

        button = Button(description="Stop", button_style="warning", tooltip="end after this step, with a checkpoint")
        slider = FloatLogSlider(1.0, base=10, min=-2, max=1, step=0.1, description="rate x", readout_format=".2f")

        def pressed(_) -> None:
            self.stop, button.disabled = True, True

        def moved(change) -> None:
            self.lr_scale = change["new"]

        button.on_click(pressed)
        slider.observe(moved, "value")
        _answer(slider)
        return HBox([slider, button])

    def close(self) -> None:
        """Put a sentence in the place of the widgets: saved, they would be an empty box."""
        if self.handle is not None:
            ended = "stopped by hand" if self.stop else "ran to its end"
            self.handle.update(_Plain(f"controls: {ended}, rate x {self.lr_scale:.2f}"))


class Page:
    """A bundle of representations that somebody has put together."""

    def __init__(self, bundle: dict[str, str]):
        self.bundle = bundle

    def __str__(self) -> str:
        return self.bundle["text/plain"]

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return self.bundle


class _Plain(str):
    """A string that a cell shows without quotes."""

    __repr__ = str.__str__


def _answer(widget) -> None:
    """Tell the page that each message of a widget was handled. While a cell runs ipykernel 7.4 does not, and the page
    holds back every change of a slider after the first until it hears so."""
    from IPython import get_ipython

    kernel = get_ipython().kernel

    def heard(message) -> None:
        widget._handle_msg(message)
        kernel.session.send(kernel.iopub_socket, "status", {"execution_state": "idle"}, parent=message)

    widget.comm.on_msg(heard)


def displayed(thing, handle=None):
    """Display once, then update in place; outside IPython print the text. Returns the `handle` of the next time."""
    from IPython import get_ipython
    from IPython.display import display

    if type(thing) is str:
        thing = _Plain(thing)

    if get_ipython() is None:
        print(thing, flush=True)
        return True
    if handle is not None:
        handle.update(thing)
        return handle
    return display(thing, display_id=True)


def cell(value) -> str:
    """A value as a table spells it: four digits that count, thousands apart, none instead of nothing."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    whole = isinstance(value, int) or 1e4 <= abs(value) < 1e9  # 65,536 and not 6.554e+04
    return f"{value:,.0f}" if whole else f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"
