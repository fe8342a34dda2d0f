"""The README of each method: it has formula, paper and footgun, and its lines of use do what they
say.
"""

import copy
import re

import pytest
import torch

from nblib import models, paths, text

METHODS = ("ard", "distill", "goose", "lrc", "moe", "muon")
FOLDER = paths.code() / "nblib" / "methods"


def readme(method: str) -> str:
    return (FOLDER / method / "README.md").read_text(encoding="utf-8")


def lines_of_use(method: str) -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```", readme(method), re.M | re.S)
    return block


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(text.documents("code", "validation")[:10], vocab_size=300)


@pytest.fixture
def names(tokenizer):
    """What a README says is there before its lines begin."""
    stream = text.encode(text.documents("code", "validation")[:10], tokenizer)
    rows = text.fixed_rows(stream, length=16, limit=8)
    shape = dict(hidden=32, layers=1, heads=2, length=16)
    return {
        "model": models.tiny(len(tokenizer), **shape),
        "teacher": models.tiny(len(tokenizer), **(shape | dict(hidden=64, seed=1))),
        "tokenizer": tokenizer,
        "vocabulary": len(tokenizer),
        "stream": stream,
        "batches": text.Batches(stream, rows=2, length=16),
        "held_out": rows,
        "validation": [{"input_ids": part, "labels": part} for part in rows.split(4)],
    }


def test_every_method_has_a_readme():
    assert sorted(path.parent.name for path in FOLDER.glob("*/__init__.py")) == list(METHODS)
    for method in METHODS:
        page = readme(method)
        assert "$$" in page and "**Footgun.**" in page
        assert re.search(r"https://arxiv\.org/abs/\d{4}\.\d{5}", page)
        assert 4 <= len([line for line in lines_of_use(method).splitlines() if line.strip()]) <= 13


@pytest.mark.parametrize("method", METHODS)
def test_the_lines_of_use_run_and_train(method, names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    if method == "moe":
        names["model"] = models.tiny(names["vocabulary"], family="qwen3_moe", hidden=32, layers=1)
    before = copy.deepcopy(names["model"].state_dict())
    exec(compile(lines_of_use(method), f"{method}/README.md", "exec"), names)

    if method == "goose":
        assert (
            capsys.readouterr().out.startswith("tensor")
            and names["student"].config.hidden_size == 64
        )
        return
    after = names["model"].state_dict()
    assert any(
        name not in before or not torch.equal(tensor, before[name])
        for name, tensor in after.items()
    )
    if method == "lrc":
        assert (tmp_path / "ternary" / "adapter" / "adapter_model.safetensors").is_file()
    if method == "ard":
        assert (tmp_path / "adapter" / "adapter_config.json").is_file()
        assert 0 < sum(names["left"].values()) < sum(map(len, names["scores"].values()))
    if method == "distill":
        assert list((tmp_path / "answers").glob("*.safetensors"))
    if method in ("moe", "muon"):
        assert len(capsys.readouterr().out.splitlines()) >= 1
