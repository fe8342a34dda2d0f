"""Each table and picture carries its sentence as text, and after a stop the sentence says so."""

import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from nbworkbook import pictures, runs, show


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
    table = show.Table(
        [{"name": "a<b", "loss": 1.0}, {"name": "longer", "note": None}], caption="Two & more"
    )
    assert str(table).splitlines() == [
        "Two & more",
        "name    loss  note",
        "------------------",
        "a<b     1",
        "longer        none",
    ]
    page = mime(table)["text/html"]
    assert mime(table)["text/plain"] == str(table) and "a&lt;b" in page and "Two &amp; more" in page
    # words left, numbers right
    assert "<td>1</td>" in page and "<td style='text-align:left'>longer</td>" in page
    assert str(show.Table([])) == "\n"


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
    short, long = (
        show.bars({"a": 1.0}, x="MiB", summary=words) for words in ("falls", "it falls " * 40)
    )
    assert long.figure.get_supxlabel().count("\n") >= 3
    assert long.figure.get_size_inches()[1] > short.figure.get_size_inches()[1] + 0.4


def test_after_a_stop_every_caption_says_so(tmp_path, monkeypatch):
    def captions() -> list[str]:
        picture = show.bars({"a": 1.0}, x="MiB", summary="falls")
        assert picture.figure.get_supxlabel().replace("\n", " ") == picture.summary
        return [
            show.Table([{"a": 1}], caption="Losses").caption,
            show.Table([]).caption,
            picture.summary,
        ]

    run = runs.Run(tmp_path, {})
    monkeypatch.setattr(runs, "_HERE", [run])  # as runs.begin does
    assert captions() == ["Losses", "", "falls"]
    run.stopped("corrected", 44, 600, "Stop")
    notice = "(corrected was stopped at step 44 of 600)"
    assert captions() == [f"Losses {notice}", notice, f"falls {notice}"]
    run.resumed("corrected")
    assert captions() == ["Losses", "", "falls"]


def test_words_of_a_picture_are_no_formula():
    """matplotlib would set what stands between dollars as one, and fail on half of one."""
    assert mime(show.bars({"a": 1.0}, x="MiB", summary="costs $\\frac{ and $5", title="$\\frac{$"))[
        "image/png"
    ]


CURVES = {"a<b>": [(step, 1.0) for step in range(0, 1001)], "dots": [(100, 3.0), (900, 2.0)]}
LOOKS = {"a<b>": {"color": "red"}, "dots": {"color": "blue", "marker": "o"}}


def test_a_live_curve_has_axes_with_ticks_and_stays_small():
    drawn = pictures.live_curves(CURVES, x="step", y="loss (nats)", looks=LOOKS)
    texts = [text.text for text in ElementTree.fromstring(drawn).iter("text")]
    assert {"step", "loss (nats)", "a<b>", "dots", "0", "1000"} <= set(texts)
    assert [text for text in texts if re.fullmatch(r"[123](\.\d)?", text)] == [
        "1",
        "1.5",
        "2",
        "2.5",
        "3",
    ]
    # a thousand points, drawn four times a second
    assert len(drawn) < 10_000 and "<b>" not in drawn


def test_a_live_curve_is_drawn_where_its_points_are():
    drawn = ElementTree.fromstring(pictures.live_curves(CURVES, x="step", y="loss", looks=LOOKS))
    paths = {path.get("stroke"): path.get("d") for path in drawn.iter("path")}
    line, dots = (
        [tuple(map(float, at)) for at in re.findall(r"([\d.]+),([\d.]+)", paths[c])]
        for c in ("red", "blue")
    )
    assert (
        line[0] == (56, 168) and line[-1] == (508, 168) and {y for _, y in line} == {168}
    )  # the lowest, at the bottom
    # the highest, at the top
    assert dots[0] == (pytest.approx(56 + 45.2), 20) and dots[1][1] == pytest.approx(94)


@pytest.mark.parametrize("points", [[], [(1, 2.0)], [(1, 2.0), (1, 2.0)]])
def test_too_few_points_for_a_curve(points):
    assert (
        pictures.live_curves({"a": points}, x="step", y="loss", looks={"a": {"color": "red"}}) == ""
    )


def test_a_curve_that_stays_level_is_drawn():
    drawn = pictures.live_curves(
        {"a": [(1, 2.0), (2, 2.0)]}, x="step", y="loss", looks={"a": {"color": "red"}}
    )
    assert "<path" in drawn and "nan" not in drawn and "inf" not in drawn
