"""The corpora, their splits, the tokenizer and the position of a batch."""

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
        sets["train"] & sets["validation"] or sets["train"] & sets["held_out"] or sets["validation"] & sets["held_out"]
    )
    assert set().union(*sets.values()) == set(text._all_documents(source))


def test_code_has_no_docstrings_and_no_comments():
    import ast
    import io
    import tokenize

    for document in text.documents("code")[:40]:
        assert not list(text._documented(ast.parse(document)))
        assert not [t for t in tokenize.generate_tokens(io.StringIO(document).readline) if t.type == tokenize.COMMENT]


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
    parts = [next(text.Batches(stream, rows=2, length=64, seed=3, rank=r, world=2))["input_ids"] for r in (0, 1)]
    assert torch.equal(whole, torch.cat(parts))  # two processes see what one would


def test_own_files(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph {i} " + "words " * 40 for i in range(3000)))
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert len(text._all_documents(str(tmp_path))) > 50
    assert text.documents(str(tmp_path), "held_out")


def test_files_are_read_in_the_order_of_their_names_through_folders_and_links(tmp_path):
    for name in ("corpus/b/c.md", "corpus/a.txt", "corpus/b.txt", "corpus/no.bin", "other/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "corpus" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "loop").symlink_to(tmp_path / "corpus")
    expected = ["corpus/a.txt", "corpus/b/c.md", "corpus/b.txt", "other/d.py"]
    assert text._all_documents(str(tmp_path / "corpus")) == expected


def test_a_path_is_seen_from_the_working_directory_and_from_home(tmp_path, monkeypatch):
    (tmp_path / "own.txt").write_text("own")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert text._all_documents("own.txt") == text._all_documents("~/own.txt") == ["own"]


@pytest.mark.parametrize("line", ['{"txt": 1}', '{"text": 1}', '["text"]', "no", '{"text": "\\ud800"}', "[" * 9999])
def test_a_line_without_a_text_is_named(line, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match="bad.jsonl line 2: expected a JSON object with a 'text' field"):
        text.documents(str(tmp_path))


@pytest.mark.parametrize(
    "source, says",
    [
        ("/nowhere/at/all", "does not exist"),
        ("hf:some/set", "use shards.open"),
        ("short.txt?tokens=1k", "use shards.open"),
        ("a.parquet", "use shards.open"),
        ("bad.jsonl", "line 1"),
        ("short.txt", "split"),
    ],
)
def test_bad_corpora_are_one_clear_sentence(source, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"txt": 1}\n')
    (tmp_path / "short.txt").write_text("one short text")
    with pytest.raises((OSError, ValueError, ImportError), match=says):
        [text.documents(source, split) for split in text.SPLITS]


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


def test_a_line_separator_inside_a_document_does_not_end_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one\u2028two\x85three"}\r\n{"text": "four"}\n')
    assert text._all_documents(str(tmp_path / "a.jsonl")) == ["one\u2028two\x85three", "four"]
