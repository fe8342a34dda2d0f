"""Facts of this run of the suite are read, and nothing else: not other sources, not what cannot be
loaded safely.
"""

import math

import pytest
import torch

from lessons import pitfall_cache, trials
from lessons.pitfalls import Pitfall

PLAIN = {
    "loss": math.nan,
    "shape": (3, 4),
    "names": ["a"],
    "none": None,
    "by layer": {1: 0.5},
    "bits": torch.ones(2),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NBLIB_FACTS", str(tmp_path / "facts"))
    return tmp_path / "facts"


def test_what_is_written_is_read_with_its_types(folder):
    assert pitfall_cache.write(folder, "P01", "broken", PLAIN)
    again = pitfall_cache.read("P01", "broken")
    assert (
        list(again) == list(PLAIN)
        and math.isnan(again["loss"])
        and torch.equal(again["bits"], PLAIN["bits"])
    )
    assert [again[name] for name in ("shape", "names", "none", "by layer")] == [
        (3, 4),
        ["a"],
        None,
        {1: 0.5},
    ]
    assert (
        pitfall_cache.read("P01", "fixed") is None and pitfall_cache.read("P02", "broken") is None
    )


def test_without_the_variable_every_run_is_made(folder, monkeypatch):
    pitfall_cache.write(folder, "P01", "broken", PLAIN)
    for none in ("", None):
        monkeypatch.setenv("NBLIB_FACTS", none) if none is not None else monkeypatch.delenv(
            "NBLIB_FACTS"
        )
        assert pitfall_cache.read("P01", "broken") is None


@pytest.mark.parametrize("changed", ["a source", "a version"])
def test_other_sources_or_versions_find_nothing(folder, monkeypatch, tmp_path, changed):
    monkeypatch.setattr(pitfall_cache, "_what_decides", pitfall_cache._what_decides.__wrapped__)
    pitfall_cache.write(folder, "P01", "broken", PLAIN)
    assert pitfall_cache.read("P01", "broken") is not None
    if changed == "a version":
        monkeypatch.setattr(pitfall_cache, "version", lambda package: "0.0")
    else:
        (tmp_path / "more").mkdir()
        (tmp_path / "more" / "more.py").write_text("")
        spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "more")]})
        monkeypatch.setattr(pitfall_cache, "find_spec", lambda package: spec)
    assert pitfall_cache.read("P01", "broken") is None


@pytest.mark.parametrize("unsafe", [math.sqrt, object(), Pitfall, lambda: 1])
def test_what_does_not_load_safely_is_not_kept(folder, unsafe):
    assert not pitfall_cache.write(folder, "P01", "broken", {"loss": 1.0, "unsafe": unsafe})
    assert pitfall_cache.read("P01", "broken") is None


def test_trials_show_stored_facts_and_make_what_is_not_stored(folder, monkeypatch):
    made = []

    def run(name):
        return lambda: made.append(name) or {"bad": name == "broken"}

    words = dict(
        title="t", symptom="s", claim="c", verdict="v", fix="f", seen=lambda found: found["bad"]
    )
    words |= dict(wrong=pitfall_cache.write, right=pitfall_cache.read)
    pitfall = Pitfall(id="P01", broken=run("broken"), fixed=run("fixed"), **words)
    monkeypatch.setattr(trials, "pitfall", lambda number: pitfall)
    pitfall_cache.write(folder, "P01", "broken", {"bad": True, "from": "the store"})
    trial = trials.Trials()
    trial("P01")
    assert made == ["fixed"] and trial.facts["P01", "broken"]["from"] == "the store"
    assert trial.shows == {("P01", "broken"): True, ("P01", "fixed"): False}
