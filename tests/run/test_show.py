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
    progress({"step": 3, "of": 9, "loss": float("nan")})  # nan has no place on the line
    assert str(progress).endswith("loss nan") and len(progress.losses) == 2


def test_what_stays_of_a_training_is_a_picture_that_an_untrusted_notebook_shows(capsys):
    progress = show.Progress("title")
    for step, loss in enumerate((2.0, 5.0, 3.0), start=1):
        progress({"step": step, "of": 4, "loss": loss})
    live = mime(progress)
    assert "<svg" in live["text/html"] and "loss 2.00 to 3.00, steps 1 to 3" in live["text/html"]  # first and last
    progress({"step": 4, "of": 4, "loss": 1.0})
    stored = mime(progress)
    assert set(stored) == {"text/plain", "image/png"} and stored["text/plain"] == str(progress)
    progress({"step": 3, "of": 9, "loss": 2.0, "stopped": "Stop"})
    assert "image/png" in mime(progress) and str(progress).endswith("stopped by Stop")


def test_a_picture_has_its_summary_as_text_as_alternative_and_under_the_axes():
    points = [(1, 2.0), (2, 1.0)]
    for picture in (
        show.curves({"a": points, "b": points}, x="step", y="loss", summary="falls", log=True),
        show.bars({"a": 1.0, "b": 2.0}, x="MiB", summary="falls"),
        show.Picture(Figure(), "falls"),
    ):
        data, metadata = picture._repr_mimebundle_()
        assert data["text/plain"] == "falls" and data["image/png"].startswith(b"\x89PNG")
        width, height = (int.from_bytes(data["image/png"][at : at + 4]) for at in (16, 20))
        shown = metadata["image/png"]
        assert shown["alt"] == "falls" == picture.figure.get_supxlabel()
        assert width == pytest.approx(shown["width"] * show.DPI / 96, abs=2)
        assert height == pytest.approx(shown["height"] * show.DPI / 96, abs=2)


def test_a_long_sentence_is_wrapped_and_gets_room_below_the_axes():
    short, long = (show.bars({"a": 1.0}, x="MiB", summary=words) for words in ("falls", "it falls " * 40))
    assert long.figure.get_supxlabel().count("\n") >= 3
    assert long.figure.get_size_inches()[1] > short.figure.get_size_inches()[1] + 0.4


def test_a_prediction_says_what_was_chosen_and_headless_what_it_is():
    guess = show.predict("How many of 42 get a gradient?", [0, 21, 42])
    assert str(guess.answer(0)) == "it is 0"
    guess.chosen = 21
    assert repr(guess.answer(0)) == "you said 21: it is 0"
    with pytest.raises(ValueError, match="choices = .*two or more"):
        show.predict("?", [1])


def test_source_is_what_the_file_says():
    shown = mime(show.source(show.cell))
    assert shown["text/plain"].startswith("def cell(value) -> str:") and "<span" in shown["text/html"]


def test_headless_controls_have_their_defaults_and_no_widget():
    controls = show.Controls()
    assert (controls.stop, controls.lr_scale, controls.handle) == (False, 1.0, None)
    controls.close()
