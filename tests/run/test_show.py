"""What a cell shows carries its summary as text, and the controls wait for nobody when nobody is there."""

import pytest
from matplotlib.figure import Figure

from nblib.run import show


def mime(thing) -> dict:
    bundle = thing._repr_mimebundle_()
    return bundle[0] if isinstance(bundle, tuple) else bundle


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "none"), ([], "none"), (True, "True"), ("word", "word"), (3, "3"), (65536, "65,536"),
        (65536.4, "65,536"), (0.123456, "0.1235"), (1e-7, "1e-07"), (1e12, "1e+12"),
    ],
)  # fmt: skip
def test_four_digits_that_count(value, text):
    assert show.cell(value) == text


def test_a_table_as_text_and_as_page():
    table = show.Table([{"name": "a<b", "loss": 1.0}, {"name": "longer", "note": None}], caption="Two & more")
    assert str(table).splitlines() == [
        "Two & more",
        "name    loss  note",
        "------------------",
        "a<b     1",
        "longer        none",
    ]
    page = mime(table)["text/html"]
    assert mime(table)["text/plain"] == str(table) and "a&lt;b" in page and "Two &amp; more" in page
    assert "<td>1</td>" in page and "<td style='text-align:left'>longer</td>" in page  # words left, numbers right
    assert str(show.Table([])) == "\n"


def test_progress_says_what_the_record_holds(capsys):
    progress = show.Progress("title")
    assert str(progress) == "title: not started"
    progress({"step": 1, "of": 3, "loss": 2.5})
    progress({"step": 3, "of": 3, "loss": 2.0, "lr": 1e-3, "tokens_per_s": 1234.5, "eta_s": 3661, "memory_gib": 1.25})
    whole = "title: step 3 of 3, loss 2.0000, rate 1.0e-03, 1,234 tokens/s, 1:01:01 left, 1.2 GiB"
    assert str(progress) == whole and capsys.readouterr().out.splitlines()[-1] == whole
    assert "<svg" in mime(progress)["text/html"] and mime(progress)["text/plain"] == whole
    progress({"step": 3, "of": 9, "loss": float("nan"), "stopped": "Stop"})  # nan has no place on the line
    assert str(progress).endswith("loss nan, stopped by Stop") and len(progress.losses) == 2


def test_a_picture_has_its_summary_as_text_and_as_alternative():
    points = [(1, 2.0), (2, 1.0)]
    for picture in (
        show.curves({"a": points, "b": points}, x="step", y="loss", summary="falls", log=True),
        show.bars({"a": 1.0, "b": 2.0}, x="MiB", summary="falls"),
        show.Picture(Figure(), "falls"),
    ):
        data, metadata = picture._repr_mimebundle_()
        assert data["text/plain"] == "falls" and data["image/png"].startswith(b"\x89PNG")
        assert metadata == {"image/png": {"alt": "falls"}}


def test_source_is_what_the_file_says():
    shown = mime(show.source(show.cell))
    assert shown["text/plain"].startswith("def cell(value) -> str:") and "<span" in shown["text/html"]


def test_headless_controls_have_their_defaults_and_no_widget():
    controls = show.Controls()
    assert (controls.stop, controls.lr_scale, controls.handle) == (False, 1.0, None)
    controls.close()
