"""Menus: the first choices headless, every choice with a person at the kernel."""

import base64

import IPython.display
import ipywidgets
import pytest
from IPython.core.interactiveshell import InteractiveShell

from lessons.menus import choose
from nblib import runtime


def test_headless_draws_the_first_choices_once():
    drawn = []
    assert choose(lambda **chosen: drawn.append(chosen) or "figure", a=(1, 2), b=("x", "y")) == "figure"
    assert drawn == [{"a": 1, "b": "x"}]


class Figure:
    def __init__(self, text: str):
        self.text = text

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": self.text, "image/png": self.text.encode()}


def test_a_menu_draws_again_and_what_was_drawn_is_kept(monkeypatch):
    """The page gets the figure as text: bytes would not travel."""
    shown, drawn = [], []
    shell = InteractiveShell.instance()
    monkeypatch.setattr(runtime, "interactive", lambda: True)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setattr(IPython.display, "display", shown.append)

    def draw(a, b):
        drawn.append((a, b))
        return Figure(f"{a}{b}")

    assert choose(draw, a=(1, 2), b=("x", "y")) is None
    figure, columns = shown[0].children  # beside each other

    def text() -> str:
        (output,) = figure.outputs
        return base64.b64decode(output["data"]["image/png"]).decode()

    assert text() == "1x"
    first, second = columns.children
    assert all(isinstance(menu, ipywidgets.Dropdown) for menu in (first, second))
    for menu, value, seen in ((first, 2, "2x"), (second, "y", "2y"), (second, "x", "2x"), (second, "y", "2y")):
        menu.value = value
        assert text() == seen
    assert drawn == [(1, "x"), (2, "x"), (2, "y")]


def test_no_choice_is_refused():
    with pytest.raises(ValueError, match="a = ()"):
        choose(lambda a: a, a=())
