"""What a notebook shows while it runs: progress, a training with its controls, a question, the
source of a function.

    training = show.Training("corrected", run)
    watch = train.Watch(controls=training, records=training.records)
    await training.follow(train.steps(..., watch=watch))

A `Training` is one object and one output of the cell that trains. In JupyterLab it holds the bar,
the curve, buttons that halve and double the rate, and a Stop button; at the end a picture takes
their place, so no dead button stays. Headless it is a `Progress`: a line and a bar. A training that
was stopped says so here, in its label, in run.json, and in the caption of every table and picture
after it (`nbworkbook.pictures`).

Footgun: a widget in a committed notebook is an empty box for whoever reads it later. So controls
are made of ipywidgets only where a person sits at the kernel; headless they are plain attributes
with their defaults.
"""

import base64
import html
import inspect
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nblib import runtime, train
from nbworkbook import pictures
from nbworkbook.pictures import (
    DPI,
    Page,
    Picture,
    Plain,
    Points,
    Table,
    bars,
    cell,
    curves,
    displayed,
    live_curves,
)
from nbworkbook.runs import PROGRESS, RUN_DIR, Run, clock

__all__ = [
    "DPI",
    "NO_WRAP",
    "Page",
    "Picture",
    "Progress",
    "Table",
    "Training",
    "bars",
    "cell",
    "curves",
    "displayed",
]
__all__ += ["predict", "source"]

LOOKS = {"each step": {"color": "#b9cbee", "linewidth": 0.8}, "training": {"color": "#4878cf"}}
LOOKS["validation"] = {"color": "#d9622b", "marker": "o", "markersize": 4, "linestyle": ""}
SMALLEST, LARGEST = 1 / 128, 8.0  # factors of the rate that the buttons reach
AMBER = "background-color:#ffc34d; color:#222; padding:6px 12px; margin:4px 0"


class Progress:
    """Step, loss, tokens per second, time left and, on CUDA, memory and MFU: call it with each
    record of the loop.
    """

    relative = False  # each curve over its first value, where they are losses of different kinds

    def __init__(self, title: str = "training"):
        self.title, self.record, self.handle = title, {}, None
        self.losses: Points = []
        self.smooth: Points = []  # the same, each a third of the way from the one before
        self.looks: Points = []  # the validation losses
        self.rival: dict[str, Points] = {}
        self.drawn = self.reported = 0.0

    def __call__(self, record: dict) -> None:
        self._take(record)
        if self.handle is None or self.ended or time.monotonic() - self.drawn > 0.25:
            self.drawn = time.monotonic()
            self._draw()
        # for the runner to print
        if RUN_DIR in os.environ and (self.ended or time.monotonic() - self.reported > 5):
            self.reported = time.monotonic()
            with (Path(os.environ[RUN_DIR]) / PROGRESS).open("a", encoding="utf-8") as lines:
                lines.write(f"{self}\n")

    def _take(self, record: dict) -> None:
        self.record, step = record, record["step"]
        if math.isfinite(record["loss"]):
            before = self.smooth[-1][1] if self.smooth else record["loss"]
            self.losses.append((step, record["loss"]))
            self.smooth.append((step, before + (record["loss"] - before) / 3))
        if math.isfinite(record.get("eval_loss", math.nan)):
            self.looks.append((step, record["eval_loss"]))

    def _draw(self) -> None:
        self.handle = displayed(self, self.handle)

    @property
    def ended(self) -> bool:
        return bool(self.record) and (
            self.record["step"] == self.record["of"] or "stopped" in self.record
        )

    def __str__(self) -> str:
        r = self.record
        if not r:
            return f"{self.title}: not started"
        parts = [f"{self.title}: step {r['step']} of {r['of']}", f"loss {r['loss']:.4f}"]
        if "lr" in r:
            parts.append(f"rate {r['lr']:.1e}")
        if "grad_norm" in r:
            parts.append(f"gradient norm {r['grad_norm']:.2g}")
        if "tokens_per_s" in r:
            parts += [f"{r['tokens_per_s']:,.0f} tokens/s", f"{clock(r['eta_s'])} left"]
        if "memory_gib" in r:
            parts += [f"{r['memory_gib']:.1f} GiB"]
            parts += (
                [f"{r['flop_per_s'] / 1e12:,.1f} TFLOP/s, MFU {r['mfu']:.0%}"] if "mfu" in r else []
            )
            parts += (
                [f"card {r['card_busy']:.0%} busy, {r['card_watts']:.0f} W"]
                if "card_busy" in r
                else []
            )
        return ", ".join(parts + ([f"stopped by {r['stopped']}"] if "stopped" in r else []))

    def _repr_mimebundle_(self, include=None, exclude=None):
        if self.ended and len(self.losses) > 1:
            return self.picture()._repr_mimebundle_()
        return {"text/plain": str(self), "text/html": self._live()}

    def _live(self) -> str:
        share = self.record["step"] / self.record["of"] if self.record else 0
        bar = (
            f'<progress value="{share:.4f}" max="1" style="width:16em"></progress> '
            f"{html.escape(str(self))}"
        )
        return f"<div>{bar}<br>{live_curves(**self._curves())}</div>"

    def picture(self, name: str = "") -> Picture:
        """Return what stays: the curve, with its name in the title."""
        return curves(
            **self._curves(), summary=str(self), title=f"{name or self.title}: {_fall(self.losses)}"
        )

    def _curves(self) -> dict[str, Any]:
        lines = {
            **self.rival,
            "each step": self.losses,
            "training": self.smooth,
            "validation": self.looks,
        }
        series = {name: points for name, points in lines.items() if points}
        looks = {name: {"marker": None} | LOOKS.get(name, {"color": "#999999"}) for name in series}
        y = "loss (nats per token)"
        if self.relative:
            first = {
                name: abs(series["each step" if name == "training" else name][0][1]) or 1.0
                for name in series
            }
            series = {
                name: [(step, loss / first[name]) for step, loss in points]
                for name, points in series.items()
            }
            y = "loss / its first value"
        return {"series": series, "x": "step", "y": y, "looks": looks}


class Training(Progress):
    """A training in one output: bar, curve, buttons for the rate and Stop.

    The loop reads it as its `controls`, and `follow` hands it every record. `rival` is drawn in
    grey: (step, loss) points or records, by name. `relative` divides each curve by its first value:
    for training on a loss that is not the one of validation. Headless, `stop` is False and
    `lr_scale` is 1 until code sets them.
    """

    def __init__(
        self,
        title: str,
        run: Run | None = None,
        *,
        rival: dict | list | None = None,
        relative: bool = False,
    ):
        super().__init__(title)
        self.relative = relative
        by_name = rival if isinstance(rival, dict) else {"rival": rival or []}
        self.run, self.rival = run, {name: _points(line) for name, line in by_name.items()}
        self.records: list[dict] = []  # for the loop to fill, with those of before a resume
        self.stop, self.closed, self._lr_scale, self._page = False, False, 1.0, None

    async def follow(self, steps: Iterator[dict]) -> None:
        """Take every step and draw it. However that ends, the output is closed."""
        try:
            self._open()
            async for record in train.live(steps):
                self(record)
        finally:
            steps.close()
            self.close()

    def __call__(self, record: dict) -> None:
        self._refuse_another()
        self._open()
        self._take_earlier(record)
        if not (self.records and self.records[-1] is record):
            self.records.append(record)
        super().__call__(record)

    @property
    def lr_scale(self) -> float:
        self._refuse_another()
        return self._lr_scale

    @lr_scale.setter
    def lr_scale(self, factor: float) -> None:
        self._lr_scale = factor

    @property
    def stopped(self) -> bool:
        return "stopped" in self.record and self.record["step"] < self.record["of"]

    @property
    def label(self) -> str:
        return self.named(self.title)

    def named(self, name: str) -> str:
        """Return a name for it, and how far it came where it did not reach its end."""
        r = self.record
        return f"{name}, {r['step']} of {r['of']} steps" if r and r["step"] < r["of"] else name

    def close(self) -> None:
        """Put a picture in the place of bar and widgets, and note in the run whether the training
        was stopped.
        """
        if self.closed:
            return
        self._take_earlier({})
        self.closed = True
        if self.run and self.stopped:
            self.run.stopped(
                self.title, self.record["step"], self.record["of"], self.record["stopped"]
            )
        elif self.run and self.record and self.label == self.title:
            self.run.resumed(self.title)
        super()._draw()

    def _open(self) -> None:
        # not before: what fails above the training leaves no button
        if self.handle is None and runtime.interactive():
            self.handle = displayed(self._widgets())

    def _draw(self) -> None:
        if self.ended:
            self.close()
        elif self._page is None:
            super()._draw()
        else:
            self._page.value = self._live()

    def _take_earlier(self, record: dict) -> None:
        """Take in the records of before a resume, which the loop restores before its first step."""
        for earlier in self.records if not self.record else ():
            if earlier is not record:
                self._take(earlier)

    def _refuse_another(self) -> None:
        if self.closed:
            of = f" at step {self.record['step']} of {self.record['of']}" if self.record else ""
            raise RuntimeError(
                f"show.Training({self.title!r}) has ended{of}: make a new one for each training."
            )

    def _repr_mimebundle_(self, include=None, exclude=None):
        if not self.closed or len(self.losses) < 2:
            data, metadata = super()._repr_mimebundle_(), {}
            shown = data.get("text/html")
        else:
            data, metadata = self.picture(self.label)._repr_mimebundle_()
            size = 'width="{width}" height="{height}"'.format(**metadata["image/png"])
            encoded = base64.b64encode(data["image/png"]).decode()
            shown = f'<img src="data:image/png;base64,{encoded}" alt="" {size}>'
        if self.stopped:
            words = (
                f"Stopped at step {self.record['step']} of {self.record['of']}. The "
                "numbers below come from a "
            )
            words += (
                f"half-trained model. Run this cell again to go on from step {self.record['step']}."
            )
            data["text/plain"] = f"{words}\n{data['text/plain']}"
            data["text/html"] = f'<div style="{AMBER}">{words}</div>{shown}'
        return data, metadata

    def _widgets(self):
        """Return what a person sees of the training while it runs."""
        from ipywidgets import HTML, Button, HBox, Label, VBox

        # Buttons alone: each press is a message of its own, and ipykernel handles it between two
        # steps. Of a slider JupyterLab sends the first change and holds the others back until the
        # cell has ended.
        less = Button(description="rate / 2")
        more = Button(description="rate x 2")
        factor = Label("rate x 1")
        stop = Button(
            description="Stop",
            button_style="warning",
            tooltip="end after this step, with a checkpoint",
        )

        def scale(by: float) -> None:
            self.lr_scale = min(max(self._lr_scale * by, SMALLEST), LARGEST)
            factor.value = f"rate x {self._lr_scale:g}"

        def pressed(_) -> None:
            self.stop = True
            stop.disabled = True

        less.on_click(lambda _: scale(1 / 2))
        more.on_click(lambda _: scale(2))
        stop.on_click(pressed)
        self._page = HTML(self._live())
        return VBox([self._page, HBox([less, more, factor, stop])])


def _points(line: list) -> Points:
    """Of records the validation losses, where there are some: they come from the same rows in every
    training.
    """
    if line and isinstance(line[0], dict):
        looks = [(r["step"], r["eval_loss"]) for r in line if "eval_loss" in r]
        line = looks or [(r["step"], r["loss"]) for r in line]
    return [(step, loss) for step, loss in line if math.isfinite(loss)]


def _fall(points: list[tuple[float, float]]) -> str:
    """From the first loss to the last one: the largest and the smallest would read as a fall where
    there was none.
    """
    (first, before), (last, after) = points[0], points[-1]
    return f"loss {before:.2f} to {after:.2f}, steps {first} to {last}"


class predict:
    """A question with choices. A person gets a row of buttons, anybody else nothing. `answer`, in
    the cell that measures it, says what was chosen and what it is.
    """

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

    def answer(self, value: Any) -> "Plain":
        before = "" if self.chosen is None else f"you said {cell(self.chosen)}: "
        return Plain(pictures.after_a_stop(f"{before}it is {cell(value)}"))


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
