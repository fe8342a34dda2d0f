"""Students by their start: runs go on where they stopped, and each start is what its name says."""

import json

import pytest
import torch

from experiments import student_starts
from lessons import seeds
from nblib import models, runtime, text
from nbworkbook.setup import Setup

CPU = runtime.pick("cpu", "fp32")


@pytest.fixture(scope="module")
def opened():
    documents = [
        f"The quick brown fox number {i} jumps over {i * i} lazy dogs. " * 6 for i in range(30)
    ]
    tokenizer = text.train_tokenizer(documents, vocab_size=300)
    stream = text.encode(documents, tokenizer)
    rows = text.fixed_rows(stream, length=16, limit=4)
    model = models.tiny(len(tokenizer), hidden=16, layers=2, heads=4, length=64, seed=3)
    return Setup(model, tokenizer, stream, rows, rows, CPU)


def lessons(opened):
    halves = opened.stream.chunk(2)
    streams = {n: {"train": part, "held_out": part} for n, part in zip(("code", "prose"), halves)}
    chats = dict(rows=1, questions=8, steps=1)
    return {
        "text": lambda: student_starts.of_text(opened, rows=1),
        "chat": lambda: student_starts.of_chats(opened, streams, **chats),
    }


def test_all_runs_once_and_again_where_it_stopped(opened, tmp_path):
    path, options = tmp_path / "starts.json", dict(count=1, steps=2, rows=1, length=16)
    record = student_starts.measure(path, lessons(opened), **options)
    assert len(record["lines"]) == 2 * 2 * 3
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"lines": stored["lines"][:4]}))
    again = student_starts.measure(path, lessons(opened), **options)
    assert again["lines"] == record["lines"]
    assert len(student_starts.table(record)) == 7 and len(student_starts.verdicts(record)) == 6
    with pytest.raises(ValueError, match="other settings, steps = 2 and not 3"):
        student_starts.measure(path, lessons(opened), **(options | dict(steps=3)))


def test_each_start_is_half_of_the_teacher(opened):
    teacher = lessons(opened)["text"]().teacher
    made = {
        how: student_starts.born(teacher, opened.batches(rows=1), how=how, seed=0)
        for how in student_starts.STARTS
    }
    layers, width, new = (made[how] for how in student_starts.STARTS)
    assert (layers.config.num_hidden_layers, width.config.num_hidden_layers) == (1, 2)
    assert width.config.intermediate_size * 2 == teacher.config.intermediate_size
    assert models.count(layers)["all"] == models.count(new)["all"]
    blocks = [sum(p.numel() for p in m.model.layers.parameters()) for m in (teacher, layers, width)]
    assert blocks[0] == 2 * blocks[1] and abs(blocks[2] / blocks[1] - 1) < 0.05
    assert torch.equal(layers.model.norm.weight, teacher.model.norm.weight)
    assert torch.equal(layers.get_input_embeddings().weight, width.get_input_embeddings().weight)
    assert not torch.equal(layers.get_input_embeddings().weight, new.get_input_embeddings().weight)


def test_the_record_has_three_seeds_on_equal_steps_and_trained_starts_are_ahead():
    record = student_starts.published()
    for taught in student_starts.TAUGHT:
        at = {
            how: student_starts.ends(record, data="text", how=how, taught=taught)
            for how in student_starts.STARTS
        }
        assert {len(losses) for losses in at.values()} == {3}
        new = at.pop("new weights")
        for losses in at.values():
            gains = seeds.gains(new, losses)
            assert seeds.distinct(gains) and min(gains) > 0
    assert all(len(row) >= 3 for row in student_starts.table(record))
    assert len(student_starts.verdicts(record)) == 6
