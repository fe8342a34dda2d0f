"""A start holds a model with its tokenizer and three splits that share no document."""

import json

import pytest
import torch

from nblib import text, train
from nbworkbook.setup import Setup, load_setup


@pytest.fixture
def folder(tiny, tmp_path):
    """A model and a tokenizer as transformers saves them, and a corpus in a file."""
    documents = [f"{n} apples and {n * n} pears are in basket {n}.\n" * 40 for n in range(200)]
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": d}) + "\n" for d in documents)
    )
    tokenizer = text.train_tokenizer(documents, vocab_size=280)
    tiny.resize_token_embeddings(len(tokenizer))
    tiny.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def opened(folder, machine, **options) -> Setup:
    corpus = str(folder / "corpus.jsonl")
    return load_setup(str(folder / "model"), corpus=corpus, length=32, machine=machine, **options)


def test_a_model_by_name_with_its_tokenizer_on_a_corpus_of_ones_own(folder, tiny, machine):
    begun = opened(folder, machine, rows=5)
    assert begun.validation.shape == begun.held_out.shape == (5, 32) and begun.stream.ndim == 1
    assert begun.model.training and all(p.dtype == torch.float32 for p in begun.model.parameters())
    assert len(begun.tokenizer) == tiny.get_input_embeddings().num_embeddings
    assert (
        begun.loss(begun.model)
        == train.evaluate(begun.model, begun.held_out, machine=machine)["loss"]
    )
    assert (
        begun.loss(begun.model, 2)
        == train.evaluate(begun.model, begun.held_out[:2], machine=machine)["loss"]
    )


def test_the_fixed_rows_are_the_same_every_time_and_no_split_holds_text_of_another(folder, machine):
    first, second = (opened(folder, machine) for _ in range(2))
    assert torch.equal(first.validation, second.validation) and torch.equal(
        first.held_out, second.held_out
    )
    rows = {
        name: set(map(tuple, getattr(first, name).tolist())) for name in ("validation", "held_out")
    }
    trained = set(map(tuple, first.stream.unfold(0, 32, 1).tolist()))
    assert not rows["validation"] & rows["held_out"] and not trained & (
        rows["validation"] | rows["held_out"]
    )


def test_batches_depend_on_their_seed(folder, machine):
    begun = opened(folder, machine)
    one, again, other = (next(begun.batches(rows=3, seed=seed))["input_ids"] for seed in (1, 1, 2))
    assert one.shape == (3, 32) and torch.equal(one, again) and not torch.equal(one, other)


def test_a_name_that_cannot_be_reached_is_one_sentence(machine):
    with pytest.raises(FileNotFoundError, match="model './none': no such folder"):
        load_setup("./none", machine=machine)
