"""Menus: the first choices headless, every choice with a person at the kernel."""

import IPython.display
import ipywidgets
import pytest

from lessons.menus import choose
from nblib import runtime


def test_headless_draws_the_first_choices_once():
    drawn = []
    assert choose(lambda **chosen: drawn.append(chosen) or "figure", a=(1, 2), b=("x", "y")) == "figure"
    assert drawn == [{"a": 1, "b": "x"}]


def test_a_menu_draws_again(monkeypatch):
    shown, updates = [], []

    class Handle:
        update = staticmethod(updates.append)

    monkeypatch.setattr(runtime, "interactive", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda thing, **_: shown.append(thing) or Handle())
    assert choose(lambda a, b: (a, b), a=(1, 2), b=("x", "y")) is None
    assert shown[0] == (1, "x")  # the figure stands above its menus
    menus = shown[1].children
    assert all(isinstance(menu, ipywidgets.Dropdown) for menu in menus)
    menus[0].value = 2
    menus[1].value = "y"
    assert updates == [(2, "x"), (2, "y")]


def test_no_choice_is_refused():
    with pytest.raises(ValueError, match="a = ()"):
        choose(lambda a: a, a=())
