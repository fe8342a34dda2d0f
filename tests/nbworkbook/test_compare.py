"""Runs side by side: the results that count come first, then what all have and is not the same."""

import pytest
import small_notebooks
from small_notebooks import run_one, write

from nblib import files
from nbworkbook import compare, jobs, runner, runs


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.steady_workbook(tmp_path, monkeypatch)


@pytest.fixture
def pair(workbook):
    """Two runs as records: one ended, one was stopped at step 44 of 600."""
    pair = [
        files.make_folder(workbook / "outputs" / "10_lrc" / name) for name in ("1-aaa", "2-bbb")
    ]
    for place, last, loss, commit in ((pair[0], 600, 1.5, "abc"), (pair[1], 44, 2.25, "def")):
        ended = {"status": "done"} if last == 600 else {"status": "stopped"}
        runs.note(place, ended | {"seconds": last / 2, "headline": ["by"]})
        files.write(place / "parameters.yaml", f'steps: 600\nlr: {last / 1000}\nstart: "svd"\n')
        packages = {"torch": "2.13", "peft": "0.2"} if last == 600 else {"torch": "2.12"}
        files.merge(
            place / "environment.json", {"python": "3.11", "commit": commit, "packages": packages}
        )
        results = {
            "loss": loss,
            "same": 7,
            "by": {"kaiming": loss * 2, "svd": float("nan")},
            "how": commit,
        }
        files.merge(place / "result.json", results)
        run = runs.Run(place, {})
        for step in (1, last):
            run.log(
                {
                    "run": "corrected",
                    "step": step,
                    "of": 600,
                    "loss": loss,
                    "eta_s": 9.0,
                    "ce": float("nan"),
                }
            )
        run.log({"run": "corrected", "epoch": 1, "loss": 9})
        run.log({"run": "float", "step": 3, "of": 3, "loss": 1.0})
    files.write(
        pair[0] / "metrics.jsonl",
        (pair[0] / "metrics.jsonl").read_text() + '{"step": 5, "eval_loss": 3}\n',
    )
    return pair


def _rows(text):
    return {line.split("  ")[0]: line.split() for line in text.splitlines()}


def test_the_results_that_count_come_first_then_what_differs_and_what_is_left_out_is_counted(pair):
    text = compare.text(pair)
    rows = _rows(text)
    assert rows["A"][1:] == ["10_lrc/1-aaa", "done", "300.0", "s"] and "stopped" in text
    head, count, *_ = text.split("\n\n")
    assert count.splitlines()[0] == "The results that count"
    assert [line.split()[0] for line in count.splitlines()[2:]] == ["by.kaiming", "by.svd"]
    assert rows["by.kaiming"][1:] == ["3", "4.5", "+1.5"] and rows["by.svd"][1:3] == ["nan", "nan"]

    assert "Parameters: 1 different, 2 equal (--all shows them)" in text
    assert "hardware and commit: 2 different, 1 equal, 1 not in all of them (--all" in text
    assert "Other results: 2 different, 1 equal" in text and "Metrics, the last" in text
    assert rows["lr"] == ["lr", "0.6", "0.044"] and rows["commit"] == ["commit", "abc", "def"]
    assert rows["packages.torch"] == ["packages.torch", "2.13", "2.12"]
    assert rows["loss"] == ["loss", "1.5", "2.25", "+0.75"]
    assert rows["how"] == ["how", "abc", "def"], "words have no difference"
    assert rows["corrected step"] == "corrected step 600 of 600 44 of 600".split()
    assert rows["corrected loss"][2:] == ["1.5", "2.25", "+0.75"], "a record without a step counted"
    for left_out in (
        "same",
        "float loss",
        "start",
        "corrected eta_s",
        "packages.peft",
        "eval_loss",
    ):
        assert left_out not in rows


def test_all_adds_what_is_equal_and_what_only_some_have_at_the_end(pair):
    short, text = compare.text(pair), compare.text(pair, everything=True)
    rows = _rows(text)
    assert text.startswith(short.replace(" (--all shows them)", ""))
    assert rows["same"] == ["same", "7", "7", "+0"] and rows["start"] == ["start", "svd", "svd"]
    assert rows["float loss"][2:] == ["1", "1", "+0"]
    assert rows["packages.peft"][1:] == ["0.2"]
    assert rows["eval_loss"] == ["eval_loss", "3"] and rows["step"] == ["step", "5", "of", "?"]
    assert "--all" not in text


def test_of_two_notebooks_the_results_that_count_of_both_are_shown(pair, workbook):
    other = files.make_folder(workbook / "outputs" / "11_ard" / "3-ccc")
    runs.note(other, {"status": "done", "seconds": 1.0})
    files.write(other / "parameters.yaml", "steps: 9\nrank: 4\n")
    files.write(other / "result.json", '{"used": 3, "words": "many", "loss": 2.0}')
    rows = _rows(compare.text([pair[0], other]))
    assert rows["used"] == ["used", "3"] and rows["by.kaiming"] == ["by.kaiming", "3"]
    assert rows["loss"] == ["loss", "1.5", "2", "+0.5"] and rows["steps"] == ["steps", "600", "9"]
    assert "rank" not in rows and "words" not in rows, "only one of them has it"


def test_of_three_each_is_compared_with_the_first(pair):
    rows = _rows(compare.text([*pair, pair[0]]))
    assert rows["loss"] == ["loss", "1.5", "2.25", "1.5", "+0.75", "+0"]


def test_a_resumed_step_counts_once_and_the_later_line(pair):
    runs.Run(pair[0], {}).log({"run": "corrected", "step": 600, "of": 600, "loss": 0.5})
    assert _rows(compare.text(pair))["corrected loss"][2:4] == ["0.5", "2.25"]


def test_a_file_that_cannot_be_read_is_a_sentence_at_the_end(pair):
    deep = b'{"a": ' * 990 + b"1" + b"}" * 990
    for name, content in {
        "result.json": b"{",
        "metrics.jsonl": b"[1]\n",
        "parameters.yaml": b"[",
        "run.json": b"",
    }.items():
        (pair[1] / name).write_bytes(content)
    (pair[0] / "result.json").write_bytes(deep)
    text = compare.text(pair)
    assert "unreadable" in text and "Versions, hardware and commit: 2 different" in text
    *_, sections = text.partition("Metrics, the last value of each")
    for name in ("result.json", "metrics.jsonl", "parameters.yaml"):
        assert name in sections


@pytest.mark.parametrize("value", [10**400, "nan", [1] * 500, {"x": {}}, "\x1b[2J", True, None])
def test_odd_values_end_no_comparison(pair, value):
    files.merge(pair[1] / "result.json", {"loss": value})
    text = compare.text(pair)
    assert "\x1b" not in text and max(map(len, text.splitlines())) < 300


@pytest.mark.kernel
def test_two_real_runs_of_a_notebook(workbook):
    set_up = "from nbworkbook import runs\nrun = runs.begin('00_a', globals())"
    write(
        "00_a",
        set_up,
        "run.log({'run': 'main', 'step': steps, 'of': steps, 'loss': 6.0 / steps})",
        "run.finish()",
    )
    first, (second,) = run_one("00_a"), runner.run(jobs.plan(["00"], overrides=["steps=2"]))
    text = compare.text([first.folder, second.folder])
    rows = _rows(text)
    assert rows["steps"] == ["steps", "3", "2"] and rows["main loss"][2:] == ["2", "3", "+1"]
    assert "commit: 0 different" in text
