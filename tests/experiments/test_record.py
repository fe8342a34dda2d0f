"""A killed experiment goes on and repeats nothing, other settings are refused, and a whole record
is published.
"""

import json
import sys

import pytest

from experiments import record
from experiments.record import Store

SETTINGS = {"steps": 3, "shape": (1, 2)}


def units():
    return ({"seed": seed, "rate": rate} for seed in range(2) for rate in (0.1, 0.2))


class Work:
    """A measurement that counts its units and can be killed in one of them."""

    def __init__(self, *, killed_at: int | None = None):
        self.seen: list[dict] = []
        self.killed_at = killed_at

    def __call__(self, unit: dict) -> dict:
        if len(self.seen) == self.killed_at:
            raise KeyboardInterrupt
        self.seen.append(unit)
        return {"loss": unit["seed"] + unit["rate"]}


def test_a_killed_record_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "made" / "record.json"
    with pytest.raises(KeyboardInterrupt):
        Store(path, SETTINGS).measure(units(), Work(killed_at=3))
    assert len(json.loads(path.read_text())["lines"]) == 3

    rest = Work()
    whole = Store(path, SETTINGS).measure(units(), rest)
    assert rest.seen == list(units())[3:]
    assert [line["loss"] for line in whole["lines"]] == [0.1, 0.2, 1.1, 1.2]
    assert json.loads(path.read_text()) == whole and {"date", "environment"} <= whole.keys()


def test_a_unit_with_several_results_is_stored_as_one(tmp_path):
    path = tmp_path / "record.json"
    store = Store(path, {})
    store.measure([{"seed": 0}], lambda unit: [{"layer": n} for n in range(3)])
    assert json.loads(path.read_text())["lines"] == [{"seed": 0, "layer": n} for n in range(3)]
    assert store.holds({"seed": 0}) and not store.holds({"seed": 0, "layer": 3})


def test_units_may_depend_on_the_results_so_far(tmp_path):
    store = Store(tmp_path / "record.json", {})

    def halving():
        yield {"rate": 1.0}
        while store.content["lines"][-1]["rate"] > 0.25:
            yield {"rate": store.content["lines"][-1]["rate"] / 2}

    store.measure(halving(), lambda unit: {})
    assert [line["rate"] for line in store.content["lines"]] == [1.0, 0.5, 0.25]


def test_other_settings_are_refused_and_the_file_stays(tmp_path):
    path = tmp_path / "record.json"
    Store(path, SETTINGS).measure(units(), Work())
    before = path.read_bytes()
    with pytest.raises(record.OtherSettings, match="steps = 3 and not 4; name another file"):
        Store(path, SETTINGS | {"steps": 4})
    assert path.read_bytes() == before


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(record.paths, "root", lambda: tmp_path)
    (tmp_path / "outputs/published").mkdir(parents=True)
    return tmp_path / "outputs/published"


def _command(monkeypatch, *words: str, work=None, **options) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/experiments/made_up.py", *words])

    def measure(path, machine, **more):
        return Store(path, SETTINGS | more).measure(units(), work or Work())

    record.command("made-up", "What it measures.\n\nThe rest.", measure, **options)


def test_a_record_is_published_when_it_is_whole_and_not_before(project, monkeypatch, capsys):
    with pytest.raises(FileNotFoundError, match="made-up"):
        record.newest("made-up")
    with pytest.raises(KeyboardInterrupt):
        _command(monkeypatch, "--device", "cpu", work=Work(killed_at=1))
    assert [path.name for path in project.iterdir()] == ["unfinished"]

    work = Work()
    _command(
        monkeypatch,
        "--device",
        "cpu",
        work=work,
        words=lambda record: f"{len(record['lines'])} lines",
    )
    assert len(work.seen) == 3
    date = record.read_published("made-up")["date"]
    assert record.newest("made-up") == project / f"{date}-made-up-cpu.json"
    assert capsys.readouterr().out.splitlines()[-2:] == ["4 lines", str(record.newest("made-up"))]
    assert not list((project / "unfinished").iterdir())

    (project / "1999-01-01-made-up-cpu.json").write_text("{}")
    assert record.read_published("made-up")["date"] == date


def test_a_named_file_is_the_record(project, monkeypatch, tmp_path):
    path = tmp_path / "mine.json"
    _command(monkeypatch, "--json", str(path), "--size", "3", options={"--size": dict(type=int)})
    assert json.loads(path.read_text())["size"] == 3 and not list(project.iterdir())


WRONG = [
    (["--json", "FILE"], "name another file"),
    (["--device", "tpu"], "invalid choice: 'tpu'"),
    (["--json", "."], "it is no file"),
]


@pytest.mark.parametrize("words, said", WRONG)
def test_bad_input_ends_in_a_sentence_and_two(words, said, project, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text(json.dumps({"steps": 5, "lines": []}))
    with pytest.raises(SystemExit) as ended:
        _command(monkeypatch, *words)
    assert ended.value.code == 2 and said in capsys.readouterr().err
