"""What runs left is read, what cannot be compared is named with its reason, and budgets and fronts
are as defined.
"""

import itertools
import json
import random
from pathlib import Path

import pytest

from lessons import comparing
from nblib import files, paths
from nbworkbook import parameters, runs, show
from nbworkbook.parameters import ParameterError

LOOKS = ((0, 5.0), (10, 4.0), (20, 3.5))  # step, held-out loss
VALUES = {"corpus": "code", "length": 64, "model": "", "seed": 0}


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NBLIB_OUTPUTS", str(tmp_path))
    return tmp_path


def record(step: int, loss: float, *, of: int = 20, pace: float = 0.1, **more) -> dict:
    facts = {"step": step, "of": of, "loss": loss, "tokens": 100 * step, "seconds": pace * step}
    return {
        k: v
        for k, v in (facts | {"eval_loss": loss, "eval_tokens": 1000} | more).items()
        if v is not None
    }


def write(
    group="10_lrc",
    *,
    looks=LOOKS,
    names=("",),
    result=None,
    base="abc",
    status="done",
    more=None,
    **values,
) -> Path:
    """A run's folder, whole and sealed."""
    run = runs.Run(runs.new_folder(group), {})
    files.write(run.dir / "parameters.yaml", parameters.dump_yaml(VALUES | values))
    for name in names:
        for step, loss in looks:
            run.log(({"run": name} if name else {}) | record(step, loss, **(more or {})))
    run.result(**(result or {}))
    if base:
        files.merge(run.dir / "base.json", {"content": base})
    runs.note(run.dir, {"status": status, "sealed": runs.seal(run.dir)})
    return run.dir


def method(name: str, losses: list[float], **more) -> list[Path]:
    """A run per seed that ends on this loss."""
    result = more.pop("result", {})
    return [
        write(
            "20_compare-runs",
            method=name,
            seed=n,
            looks=[(0, 5.0), (20, x)],
            result={"held_out_loss": x} | result,
            **more,
        )
        for n, x in enumerate(losses)
    ]


# ------------------------------------------------------------------ finding


def test_names_of_every_kind_are_found(outputs):
    old, new = write(), write()
    old, new = sorted((old, new))
    other = write("13_distillation")
    assert comparing.find(["10_lrc"]) == [new]
    assert (
        comparing.find([f"10_lrc/{old.name}"])
        == comparing.find([f"outputs/10_lrc/{old.name}/"])
        == [old]
    )
    assert comparing.find([other.name]) == [other]
    assert comparing.find(["10_lrc/*", "13_distillation", "10_lrc"]) == [old, new, other]
    assert comparing.find([]) == []


def test_a_sweep_is_found_by_its_file(outputs):
    folders = [write(), write()]
    rows = [{"run": folder.name, "status": "done"} for folder in folders] + [
        {"run": "", "status": "not run"}
    ]
    (outputs / "10_lrc" / "sweep-1.json").write_text(json.dumps({"rows": rows}))
    for name in (
        "outputs/10_lrc/sweep-1.json",
        "10_lrc/sweep-1.json",
        str(outputs / "10_lrc" / "sweep-1.json"),
    ):
        assert comparing.find([name]) == folders


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("10_lrx", "runs = '10_lrx': unknown run '10_lrx'; did you mean '10_lrc'?"),
        ("10_lrc/sweep-2.json", "runs = '10_lrc/sweep-2.json': there is no such sweep file"),
        ("10_lrc/sweep-bad.json", "this is no file of a sweep"),
        ("10_lrc/sweep-outside.json", "none of its combinations has run"),
    ],
)
def test_a_wrong_name_is_one_sentence(name, sentence, outputs):
    write()
    (outputs / "10_lrc" / "sweep-bad.json").write_text("[1]")
    (outputs / "10_lrc" / "sweep-outside.json").write_text(
        json.dumps({"rows": [{"run": "../elsewhere"}, {"run": ""}]})
    )
    with pytest.raises(ParameterError) as error:
        comparing.find(["10_lrc", name])
    assert sentence in str(error.value) and "\n" not in str(error.value)


# ------------------------------------------------------------------ what is left out


def _changed(folder: Path) -> None:
    (folder / "result.json").write_text('{"loss": 1}')


def _torn(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3\n')
    runs.note(folder, {"sealed": {}})


def _no_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    runs.note(folder, {"sealed": {}})


def _no_parameters(folder: Path) -> None:
    (folder / "parameters.yaml").write_text("a: [")
    runs.note(folder, {"sealed": {}})


@pytest.mark.parametrize(
    "damage, options, reason",
    [
        (_changed, {}, "result.json changed since the run ended"),
        (_torn, {}, "damaged: cannot read"),
        (_no_metrics, {}, "it logged nothing"),
        (_no_parameters, {}, "damaged: "),
        (None, {"more": {"eval_loss": None}}, "fewer than two held-out losses"),
        (None, {"looks": LOOKS[:1]}, "fewer than two held-out losses"),
        (None, {"looks": [(0, 5.0), (20, float("nan"))]}, "fewer than two held-out losses"),
        (None, {"more": {"seconds": None, "tokens_per_s": 9.0}}, "no seconds in its records"),
        (None, {"more": {"tokens": None}}, "no tokens in its records"),
        (None, {"corpus": "prose"}, "another text: corpus prose, not code"),
        (None, {"length": 32}, "another text: length 32, not 64"),
        (None, {"more": {"eval_tokens": 7}}, "another text: tokens judged 7, not 1000"),
        (None, {"base": "xyz"}, "another base model: xyz, not abc"),
        (None, {"base": "", "model": "hub/name"}, "another base model: hub/name, not abc"),
        (None, {"base": ""}, "its folder does not say which base model it began from"),
    ],
)
def test_what_cannot_be_compared_is_left_out_with_the_reason(damage, options, reason):
    good, bad = [write(seed=n) for n in range(2)], write(**options)
    if damage:
        damage(bad)
    trained, left_out = comparing.load([bad, *good])
    assert [t.folder for t in trained] == good and len(left_out) == 1
    assert left_out[0]["run"] == f"10_lrc/{bad.name}" and reason in left_out[0]["left out because"]


def test_what_most_runs_share_is_what_counts():
    prose = [write(corpus="prose", seed=n) for n in range(2)]
    trained, left_out = comparing.load([write(), *prose])
    assert [t.folder for t in trained] == prose and "corpus code, not prose" in left_out[0][
        "left out because"
    ]


def test_where_nothing_is_left_the_reason_is_the_error():
    with pytest.raises(
        ParameterError, match="none of these runs can be compared.*fewer than two held-out losses"
    ):
        comparing.load([write(looks=LOOKS[:1])])


# ------------------------------------------------------------------ what a training is called


@pytest.mark.parametrize(
    "status, more, label",
    [
        ("done", {"of": 600, "stopped": "Stop"}, "corrected, 20 of 600 steps, stopped"),
        ("stopped", {"of": 600}, "corrected, 20 of 600 steps, stopped"),
        ("running", {"of": 600}, "corrected, 20 of 600 steps, killed"),  # nobody holds its lock
        ("failed", {"of": 600}, "corrected, 20 of 600 steps, failed"),
        ("done", {}, "corrected"),
    ],
)
def test_a_training_that_ended_early_says_so_and_sets_no_budget(status, more, label):
    whole = write(names=["whole"], looks=[(0, 5.0), (50, 3.0)], more={"of": 50})
    trained, _ = comparing.load([write(names=["corrected"], status=status, more=more), whole])
    early = next(t for t in trained if t.method != "whole" or t.folder != whole)
    assert early.label == label
    assert comparing.budget(trained, "step") == (50 if more else 20)
    assert comparing.at(early.curves["step"], 50) is None
    assert comparing.curves(trained).figure.axes


def test_the_trainings_of_one_run_and_the_values_of_a_sweep_are_told_apart():
    both = write(names=["corrected", "control"])
    assert [t.method for t in comparing.load([both])[0]] == ["control", "corrected"]
    grid = [write(names=["corrected"], percent=p, seed=s) for p in (5.0, 15.0) for s in (0, 1)]
    trained, _ = comparing.load(grid)
    assert [(t.method, t.seed) for t in trained] == [
        ("corrected, percent 15", 0),
        ("corrected, percent 15", 1),
        ("corrected, percent 5", 0),
        ("corrected, percent 5", 1),
    ]
    two = comparing.load([both, write("13_distillation", names=["student"])])[0]
    assert {t.method for t in two} == {
        "10_lrc corrected",
        "10_lrc control",
        "13_distillation student",
    }


def test_a_step_that_was_logged_twice_counts_once_and_in_its_place():
    folder = write(looks=[(0, 5.0), (20, 3.0), (10, 4.5), (10, 4.0)])
    (one,) = comparing.load([folder])[0]
    assert one.curves["step"] == [(0, 5.0), (10, 4.0), (20, 3.0)]


def test_what_was_needed_before_the_first_step_is_paid():
    result = {"prepare_seconds": 3.0, "prepare_tokens": 500}
    (one,) = comparing.load([write(result=result)])[0]
    assert one.curves["seconds"][0] == (3.0, 5.0) and one.curves["tokens"][-1] == (2500, 3.5)
    assert one.curves["step"][0] == (0, 5.0) and one.costs["seconds"] == 5.0


# ------------------------------------------------------------------ the comparison


def test_at_is_the_straight_line_between_looks_and_nothing_outside():
    curve = [(2.0, 9.0), (4.0, 5.0), (8.0, 1.0)]
    assert [comparing.at(curve, x) for x in (2, 3, 4, 5, 8)] == [9, 7, 5, 4, 1]
    assert comparing.at(curve, 1.9) is None and comparing.at(curve, 8.1) is None
    assert comparing.at([(1.0, 5.0), (1.0, 4.0)], 1.0) == 4.0


def test_the_front_is_what_nobody_beats():
    draw = random.Random(0)
    for _ in range(50):
        points = {n: (draw.randint(0, 6), draw.randint(0, 6)) for n in range(12)}
        on = comparing.front(points)

        def beats(a, b, points=points):
            return all(x <= y for x, y in zip(points[a], points[b])) and points[a] != points[b]

        assert not any(beats(a, b) for a, b in itertools.product(points, on))
        assert all(any(beats(a, b) for a in on) for b in points.keys() - set(on))


A, B, C = {0: 1.0, 1: 1.1, 2: 1.2}, {0: 2.0, 1: 2.1, 2: 2.2}, {0: 1.1, 1: 1.0, 2: 1.2}


def test_a_ranking_says_what_the_seeds_cannot_tell_apart():
    rows = comparing.ranking({"b": B, "a": A, "c": C})
    assert [(row["place"], row["method"]) for row in rows][0][0] == 1 and rows[-1]["method"] == "b"
    assert [row[comparing.BESIDE] for row in rows] == ["", "not distinguishable", "higher"]
    assert (rows[-1]["lowest"], rows[-1]["highest"], rows[-1]["seeds"]) == (2.0, 2.2, 3)
    assert comparing.leader(rows) == "not distinguishable"
    assert comparing.leader(comparing.ranking({"a": A, "b": B})) == "a"
    # one seed
    assert (
        comparing.leader(comparing.ranking({"a": {0: 1.0}, "b": {0: 9.0}})) == "not distinguishable"
    )
    assert (
        comparing.leader(comparing.ranking({"a": {0: 1.0}})) == "a"
        and comparing.leader([]) == "none of them"
    )


def test_an_order_changes_only_where_both_axes_are_sure():
    assert comparing.flips({"a": A, "b": B}, {"a": B, "b": A}) == [("a", "b")]
    assert (
        comparing.flips({"a": A, "b": B}, {"a": A, "b": B})
        == comparing.flips({"a": A, "b": B}, {"b": A})
        == []
    )
    # the first cannot tell them apart
    assert comparing.flips({"a": A, "c": C}, {"a": B, "c": A}) == []
    tables = {"tokens": {"a": A, "b": B}, "seconds": {"a": B, "b": A}, "bytes": {"b": B}}
    assert comparing.moves(tables) == [
        "a and b change places between tokens and seconds",
        "a leads at tokens and is out at bytes",
    ]
    assert comparing.moves({"tokens": {"a": A, "c": C}, "bytes": {"c": C}}) == []
    orders = {axis: comparing.ranking(table) for axis, table in tables.items()}
    assert comparing.places(orders) == [
        {"method": "a", "tokens": "1", "seconds": "2", "bytes": "out"},
        {"method": "b", "tokens": "2", "seconds": "1", "bytes": "1"},
    ]


def test_held_out_losses_count_only_where_all_noted_one():
    folders = [*method("a", [3.0, 3.1]), *method("b", [2.0, 2.1])]
    assert {t.loss for t in comparing.load(folders)[0]} == {3.0, 3.1, 2.0, 2.1}
    (one,) = method("c", [1.0], result={"held_out_loss": None})
    assert {t.loss for t in comparing.load([*folders, one])[0]} == {3.0, 3.1, 2.0, 2.1, 1.0}
    seen = {
        t.method: t.loss
        for t in comparing.load([*method("d", [1.0], result={"held_out_loss": 7.0}), one])[0]
    }
    assert seen == {"c": 1.0, "d": 1.0}  # both by their last look


# ------------------------------------------------------------------ tables and figures


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("noted", [True, False])
def test_tables_and_figures_are_drawn_with_and_without_bytes_and_groups(groups, noted, tmp_path):
    bytes_of = [dict.fromkeys(comparing.COSTS, 1e6 * n) if noted else {} for n in (1, 2, 3)]
    folders = [
        *method("a", [3.0, 3.1], result=bytes_of[0]),
        *method("b", [2.0, 2.1], result=bytes_of[1]),
    ]
    if groups == 2:
        folders += method("c", [6.0, 6.1], result=bytes_of[2] | {"from_scratch": True})
    trained, _ = comparing.load(folders)
    rows = comparing.overview(trained)
    assert [row["method"] for row in rows] == ["a", "b", "c"][: groups + 1] and rows[0][
        "seeds"
    ] == 2
    assert rows[1]["MB to store"] == (2.0 if noted else "not noted")
    sides = [side for side in ("loaded_bytes", "seconds") if any(side in t.costs for t in trained)]
    for picture in (
        comparing.curves(trained),
        comparing.costs(trained),
        comparing.fronts(trained, sides),
    ):
        assert isinstance(picture, show.Picture)
        picture.save(tmp_path / "figure.png")
    comparing.spread(trained).save(tmp_path / "figure.png")
    assert len(set(comparing.looks(trained).values())) == groups + 1
    if noted:
        assert "by seconds of training: b" in comparing.fronts(trained, sides).summary


def test_a_line_of_progress_is_passed_to_the_runner(outputs, monkeypatch, capsys):
    monkeypatch.setenv(runs.RUN_DIR, str(paths.outputs()))
    line = comparing.OneLine()
    for sentence in ("run 1 of 2", "2 runs made, 0 found in outputs/20_compare-runs"):
        line(sentence)
    assert (outputs / runs.PROGRESS).read_text().splitlines()[-1].startswith("2 runs made")
    assert "2 runs made" in capsys.readouterr().out
