"""The corpora, their splits, the tokenizer and the position of a batch."""

import re

import pytest
import torch
from bit_flips import flips

from nblib import text


@pytest.mark.parametrize("source", ["prose", "code"])
def test_splits_share_no_document_and_cover_everything(source):
    splits = {name: text.documents(source, name) for name in text.SPLITS}
    sets = {name: set(found) for name, found in splits.items()}
    assert all(len(sets[n]) == len(splits[n]) > 5 for n in splits)
    assert not (
        sets["train"] & sets["validation"]
        or sets["train"] & sets["held_out"]
        or sets["validation"] & sets["held_out"]
    )
    assert set().union(*sets.values()) == set(text._embedded(source))


def test_code_has_no_docstrings_and_no_comments():
    import ast
    import io
    import tokenize

    for document in text.documents("code")[:40]:
        assert not list(text._documented(ast.parse(document)))
        assert not [
            t
            for t in tokenize.generate_tokens(io.StringIO(document).readline)
            if t.type == tokenize.COMMENT
        ]


def test_tokenizer_is_lossless_deterministic_and_counts_bytes():
    prose = text.documents("prose")[:80]
    one, two = (text.train_tokenizer(prose, vocab_size=1000) for _ in range(2))
    assert one.get_vocab() == two.get_vocab() and len(one) == 1000
    sample = "naïve café, 漢字 and \x00\x7f bytes"
    assert one.decode(one(sample)["input_ids"]) == sample
    ids = text.encode(prose, one)
    assert int(text.token_bytes(one)[ids].sum()) == sum(len(d.encode()) for d in prose)
    assert int((ids == one.eos_token_id).sum()) == len(prose)
    assert len({one.pad_token_id, one.eos_token_id, one.mask_token_id}) == 3


def test_batches_see_every_row_once_per_epoch():
    stream = torch.arange(1000)
    batches = text.Batches(stream, rows=3, length=10, seed=5)
    seen = torch.cat([next(batches)["input_ids"] for _ in range(batches.per_epoch)])
    assert batches.epoch == 0 and len(set(seen[:, 0].tolist())) == len(seen) == 99
    assert torch.equal(seen, seen[:, :1] + torch.arange(10))  # contiguous cuts
    again = torch.cat([next(batches)["input_ids"] for _ in range(batches.per_epoch)])
    assert batches.epoch == 1 and not torch.equal(seen, again)


def test_position_resumes_across_epochs_and_world_sizes(stream):
    one = text.Batches(stream, rows=4, length=64, seed=3)
    for _ in range(one.per_epoch + 5):
        next(one)
    state = one.state_dict()
    expected = [next(one)["input_ids"] for _ in range(6)]
    two = text.Batches(stream, rows=4, length=64)
    two.load_state_dict(state)
    assert all(torch.equal(next(two)["input_ids"], e) for e in expected)

    whole = next(text.Batches(stream, rows=4, length=64, seed=3))["input_ids"]
    parts = [
        next(text.Batches(stream, rows=2, length=64, seed=3, rank=r, world=2))["input_ids"]
        for r in (0, 1)
    ]
    assert torch.equal(whole, torch.cat(parts))  # two processes see what one would


@pytest.mark.parametrize(
    "source", ["/nowhere/at/all", "hf:some/set", "a.txt?tokens=1k", "prose?tokens=1k", ""]
)
def test_what_is_no_embedded_corpus_is_one_clear_sentence(source):
    with pytest.raises(
        ValueError,
        match=f"{re.escape(repr(source))} is neither prose nor code: shards.open reads all",
    ):
        text.documents(source)


def test_too_little_text_names_the_numbers():
    with pytest.raises(ValueError, match="100 tokens are too few for 8 rows of 64"):
        text.Batches(torch.arange(100), rows=8, length=64)


def test_a_stored_corpus_that_changed_is_read_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NBLIB_BASE", str(tmp_path))
    pieces = [f"document {n}" for n in range(50)]
    monkeypatch.setattr(text, "_python_prose", lambda: pieces)
    assert text._embedded("prose") == text._embedded("prose") == pieces
    stored = next((tmp_path / "text").iterdir())
    for _ in flips(stored):
        assert text._embedded("prose") == pieces
    stored.write_text('["an older form"]')
    assert text._embedded("prose") == pieces and "is set aside as" in capsys.readouterr().out


def test_fixed_rows_take_no_more_into_memory_than_they_need():
    stream, asked = torch.arange(1000), []

    class Watched:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, at: slice) -> torch.Tensor:
            asked.append(at)
            return stream[at]

    assert torch.equal(text.fixed_rows(Watched(), length=30, limit=2), stream[:60].view(2, 30))
    assert torch.equal(text.fixed_rows(Watched(), length=30), stream[:990].view(33, 30))
    assert [at.stop for at in asked] == [60, 990]
    assert text.fixed_rows(stream, length=30, limit=0).shape == (0, 30)
