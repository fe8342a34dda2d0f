"""Menus over a figure: choose a value, and the figure is drawn again.

`choose(draw, kind=("a", "b"), size=(1, 2))` calls `draw(kind=..., size=...)` and shows what it returns. Where a person
sits at the kernel there is one menu per keyword below it. Headless there is no menu: the first choices are drawn, once.
So the stored figure is the one that a person sees first.

Footgun: a menu's callback runs in the kernel between cells. Whatever `draw` prints or warns does not reach the page;
return everything in the object it makes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from nblib import runtime


def choose(draw: Callable[..., Any], **choices: Sequence) -> Any:
    """Draw the first choice of each; menus for the others only in an interactive session."""
    for name, options in choices.items():
        if not options:
            raise ValueError(f"{name} = {options!r}: allowed is a sequence with at least one choice")
    first = draw(**{name: options[0] for name, options in choices.items()})
    if not runtime.interactive():
        return first
    from IPython.display import display
    from ipywidgets import Box, Dropdown

    wide = dict(style={"description_width": "8em"}, layout={"width": "24em"})  # the default cuts long choices off
    menus = {name: Dropdown(options=list(o), description=name, **wide) for name, o in choices.items()}
    shown = display(first, display_id=True)  # above the menus, where a change is seen
    display(Box(list(menus.values()), layout={"flex_flow": "row wrap"}))

    def changed(_) -> None:
        shown.update(draw(**{name: menu.value for name, menu in menus.items()}))

    for menu in menus.values():
        menu.observe(changed, "value")
