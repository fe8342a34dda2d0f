"""Menus beside a figure: choose a value, and the figure is drawn again.

`choose(draw, kind=("a", "b"), size=(1, 2))` calls `draw(kind=..., size=...)` and shows what it
returns. Where a person sits at the kernel there is one menu per keyword, in two columns beside the
figure. Headless there is no menu: the first choices are drawn, once. So the stored figure is the
one that a person sees first.

What was drawn once is kept, so going back to it takes no time.

Footgun: a menu's callback runs in the kernel between cells. Whatever `draw` prints or warns does
not reach the page; return everything in the object it makes.
"""

import base64
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from nblib import runtime


def choose(draw: Callable[..., Any], **choices: Sequence) -> Any:
    """Draw the first choice of each; menus for the others only in an interactive session."""
    for name, options in choices.items():
        if not options:
            raise ValueError(
                f"{name} = {options!r}: allowed is a sequence with at least one choice"
            )
    first = draw(**{name: options[0] for name, options in choices.items()})
    if not runtime.interactive():
        return first
    from IPython.display import display
    from ipywidgets import Box, Dropdown, GridBox, Output

    # the name over its menu; without a height the menu would be as high as it is wide
    layout = dict(flex_flow="column", height="56px", width="auto", align_items="stretch")
    options = dict(layout=layout, style={"description_width": "auto"})
    menus = {
        name: Dropdown(options=list(o), description=name, **options) for name, o in choices.items()
    }
    columns = GridBox(
        list(menus.values()), layout={"grid_template_columns": "9em 9em", "grid_gap": "2px 8px"}
    )
    columns.layout.align_content = "flex-start"  # as high as the menus are
    figure = Output(layout={"flex": "1 1 20em"})
    figure.outputs = [_output(first)]

    @cache
    def drawn(*values: Any) -> dict[str, Any]:
        return _output(draw(**dict(zip(menus, values))))

    def changed(_: Any) -> None:
        figure.outputs = [drawn(*(menu.value for menu in menus.values()))]

    for menu in menus.values():
        menu.observe(changed, "value")
    display(Box([figure, columns], layout={"flex_flow": "row wrap"}))


def _output(thing: Any) -> dict[str, Any]:
    """Return what a cell would show of it."""
    from IPython import get_ipython

    data, metadata = get_ipython().display_formatter.format(thing)
    data = {
        kind: base64.b64encode(body).decode() if isinstance(body, bytes) else body
        for kind, body in data.items()
    }
    return {"output_type": "display_data", "data": data, "metadata": metadata}
