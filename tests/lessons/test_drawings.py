"""Every drawing can be made, says what it shows, and has no word outside its figure."""

import inspect
from importlib import import_module
from pkgutil import iter_modules

import pytest

from lessons import drawings
from nblib.run import show

MODULES = [import_module(f"lessons.drawings.{m.name}") for m in iter_modules(drawings.__path__)]
DRAWINGS = [
    pytest.param(f, id=f"{module.__name__.rpartition('.')[2]}.{name}")
    for module in MODULES
    for name, f in vars(module).items()
    if inspect.isfunction(f) and f.__module__ == module.__name__ and not name.startswith("_")
]


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_a_drawing_says_what_it_shows_and_keeps_its_words_inside(drawing):
    made = drawing()
    assert isinstance(made, show.Picture) and len(made.summary.split()) >= 5
    made.figure.canvas.draw()
    page = made.figure.bbox
    for text in (text for axes in made.figure.axes for text in axes.texts):
        box = text.get_window_extent()
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, text.get_text()


def test_an_arrow_goes_from_edge_to_edge():
    left, right = drawings.Box(1, 1, 1, 0.5), drawings.Box(4, 1, 1, 0.5)
    assert drawings._edge(left, right) == (1.5, 1) and drawings._edge(right, left) == (3.5, 1)
    above = drawings.Box(1, 3, 1, 0.5)
    assert drawings._edge(left, above) == (1, 1.25)
