"""What defines the distance of sorted probabilities, which positions read the same bytes, and that
a training holds.
"""

import pytest
import torch

from nblib import models, runtime, text, train
from nblib.methods.distill import uld

CPU = runtime.pick("cpu", "fp32")
WORDS = [
    "The quick brown fox jumps over the lazy dog. ",
    "Ein Käse für Üben, naïve café – 100 %. ",
    "x = [1, 2, 3]\n",
]
DOCUMENTS = [WORDS[i % 3] * (3 + i % 5) + f"number {i * 37}" for i in range(40)]


@pytest.fixture(scope="module")
def tokenizers():
    return [text.train_tokenizer(DOCUMENTS, vocab_size=size) for size in (280, 360)]


def logits(*shape, seed=0):
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_it_is_zero_for_equal_distributions_in_any_order_of_both_vocabularies():
    s, t = logits(5, 40), logits(5, 40, seed=1)
    draw = torch.Generator().manual_seed(2)
    mixed = s[:, torch.randperm(40, generator=draw)]
    assert float(uld.distance(s, s).max()) == 0 and float(uld.distance(mixed, s).max()) < 1e-6
    assert float(uld.distance(s, t).min()) > 0.01
    torch.testing.assert_close(
        uld.distance(mixed, t[:, torch.randperm(40, generator=draw)]), uld.distance(s, t)
    )


def test_the_shorter_vocabulary_is_filled_up_with_zeros():
    """Tokens that have no probability change nothing, on either side."""
    s, t = logits(5, 24), logits(5, 40, seed=1)
    never = torch.full((5, 16), -1e9)
    wide = torch.cat([s, never], 1)
    torch.testing.assert_close(uld.distance(s, t), uld.distance(wide, t))
    torch.testing.assert_close(uld.distance(t, s), uld.distance(t, wide))
    torch.testing.assert_close(uld.distance(s, t), uld.distance(t, s))


def test_its_value_is_known_where_both_are_simple():
    """One token surely, against k tokens alike: |1 - 1/k| + (k - 1)/k."""
    sure = torch.tensor([[1e9, 0.0, 0.0]])
    for k in (2, 5, 50):
        assert float(uld.distance(torch.zeros(1, k), sure)) == pytest.approx(
            2 * (1 - 1 / k), rel=1e-6
        )
    assert 0 <= float(uld.distance(logits(9, 30), logits(9, 20)).max()) <= 2


def test_a_step_against_its_gradient_lowers_it():
    t = logits(6, 40, seed=1)
    s = logits(6, 24).requires_grad_()
    for _ in range(20):
        before = uld.distance(s, t).mean()
        (gradient,) = torch.autograd.grad(before, s)
        with torch.no_grad():
            s -= 2.0 * gradient
            assert float(uld.distance(s, t).mean()) < float(before)


def test_it_cannot_tell_which_token_is_meant():
    """The footgun: sure of the wrong one is as good as sure of the right one."""
    teacher, right, wrong = (torch.full((1, 10), -9.0) for _ in range(3))
    teacher[0, 3] = right[0, 3] = wrong[0, 7] = 9.0
    assert float(uld.distance(right, teacher)) == 0 and float(uld.distance(wrong, teacher)) < 1e-6


def test_partners_have_read_the_same_bytes(tokenizers):
    mine, theirs = tokenizers
    ids = text.fixed_rows(text.encode(DOCUMENTS, mine), length=48)
    rows, places = uld.aligned(ids, mine, theirs)
    assert float((places != uld.NONE).float().mean()) > 0.25
    compared = 0
    for row, own, at in zip(rows.tolist(), ids.tolist(), places.tolist()):
        for i, j in enumerate(at):
            if j != uld.NONE:
                read = mine.convert_ids_to_tokens(own[: i + 1])
                assert "".join(read) == "".join(theirs.convert_ids_to_tokens(row[: j + 1]))
                compared += 1
    assert compared > 200
    assert (places[places != uld.NONE].diff() != 0).any()


def test_with_one_tokenizer_every_position_is_its_own_partner(tokenizers):
    """The words of a document that start a row may be cut otherwise, so rows begin with documents
    here.
    """
    mine = tokenizers[0]
    ids = torch.tensor([mine(WORDS[0] * 6, add_special_tokens=False)["input_ids"][:40]])
    rows, places = uld.aligned(ids, mine, mine)
    assert torch.equal(rows, ids) and places[0].tolist() == list(range(40))


def test_by_number_the_first_has_the_first(tokenizers):
    ids = text.fixed_rows(text.encode(DOCUMENTS, tokenizers[0]), length=48, limit=4)
    rows, places = uld.by_index(ids, *tokenizers)
    assert torch.equal(rows, uld.aligned(ids, *tokenizers)[0])
    for row, at in zip(rows, places.tolist()):
        n = min(48, int((row != tokenizers[1].pad_token_id).sum()))
        assert at == [*range(n), *[uld.NONE] * (48 - n)]


@pytest.fixture
def teacher(tokenizers):
    return models.as_teacher(
        models.tiny(len(tokenizers[1]), hidden=32, layers=1, heads=2, length=96, seed=5)
    )


def test_a_row_that_is_cut_inside_of_a_character_has_no_partners(tokenizers):
    mine, theirs = tokenizers
    ids = mine("für Üben", add_special_tokens=False)["input_ids"]
    pieces = [n for n, token in enumerate(mine.convert_ids_to_tokens(ids)) if token == "Ã"]
    assert pieces, "the small vocabulary spells a character in bytes"
    _, places = uld.aligned(torch.tensor([ids[: pieces[-1] + 1]]), mine, theirs)
    assert (places == uld.NONE).all()


def test_the_loss_is_the_labels_and_the_mean_over_partners(tokenizers, teacher):
    mine, theirs = tokenizers
    student = models.tiny(len(mine), hidden=32, layers=1, heads=2, length=96, seed=6)
    ids = text.fixed_rows(text.encode(DOCUMENTS, mine), length=48, limit=3)
    rows, places = uld.aligned(ids, mine, theirs)
    batch = {"input_ids": ids, "labels": ids, "teacher_ids": rows, "teacher_at": places}
    terms = uld.from_teacher(teacher, weight=2.0)(student, batch)
    with torch.no_grad():
        s, t = student(ids).logits, teacher(rows).logits
        pairs = [
            (b, i, int(j))
            for b, row in enumerate(places)
            for i, j in enumerate(row[:-1])
            if j != uld.NONE
        ]
        each = torch.stack([uld.distance(s[b, i][None], t[b, j][None])[0] for b, i, j in pairs])
    torch.testing.assert_close(terms["uld"], 2.0 * each.mean() * (3 * 47))
    assert torch.allclose(terms["ce"], student(ids, labels=ids).loss * (3 * 47), rtol=1e-5)
    terms["uld"].backward()
    assert student.get_output_embeddings().weight.grad.abs().max() > 0
    alone = uld.from_teacher(teacher)(
        student, batch | {"teacher_at": torch.full_like(places, uld.NONE)}
    )
    assert list(alone) == ["ce"]


def test_a_training_learns_and_resumes_to_the_bit(tokenizers, teacher, tmp_path):
    mine, theirs = tokenizers
    stream = text.encode(DOCUMENTS, mine)

    def run(total, folder=None):
        student = models.tiny(len(mine), hidden=32, layers=1, heads=2, length=48, seed=7)
        batches = uld.Paired(text.Batches(stream, rows=4, length=48), mine, theirs)
        options = dict(
            total=total,
            machine=CPU,
            loss=uld.from_teacher(teacher),
            checkpoints=train.Checkpoints(folder),
        )
        return student, train.fit(student, batches, train.adamw(student, lr=1e-2), **options)

    straight, records = run(12)
    assert records[-1]["ce"] < records[0]["ce"] and records[-1]["uld"] != records[0]["uld"]
    run(7, tmp_path)
    resumed, again = run(12, tmp_path)
    assert [r["loss"] for r in again] == [r["loss"] for r in records]
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters()))


def test_what_cannot_be_is_refused(teacher):
    with pytest.raises(ValueError, match="weight = 0"):
        uld.from_teacher(teacher, weight=0)
    with pytest.raises(ValueError, match="must be frozen"):
        uld.from_teacher(models.tiny(64, hidden=16, layers=1, heads=2))
