"""Rows of new words that stay as they were drawn (S14), a mask of answers that is one place late (F130), a prompt in
front of a text that the loss overlooks (F131), and what looks like them."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.bench import lm, quiet
from tests.programs_a import adamw, hand_lora, lora, train
from train_doctor.checks.tables import _drawn_at_the_end

from .test_meetings import named
from .test_turned import said

# ------------------------------------------------------------------------------------------------ S14
OLD, NEW, SPREAD = 256, 12, 0.02
RESIZED = {  # what is done -> whether the new rows stay as they were drawn and are asked for
    "drawn": True,
    "drawn, tied, an adapter by hand": True,
    "saved": False,
    "an adapter on the output layer": False,
    "given and not asked for": False,
    "padding alone": False,
    "never used": False,
    "all as they were drawn": False,
    "rare words at the end": False,
    "one row of few numbers": False,
}


@pytest.mark.parametrize("how", RESIZED)
def test_rows_of_new_words(how):
    new, tied = (1 if how == "one row of few numbers" else NEW), "tied" in how
    model = lm("llama", vocab=OLD, tie_word_embeddings=tied)
    with torch.no_grad():
        for p in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            p.normal_(0, SPREAD if how == "all as they were drawn" else 3 * SPREAD)
            if how == "rare words at the end":
                p[OLD // 2 :] *= torch.linspace(1, 1 / 3, OLD // 2)[:, None]
    torch.manual_seed(1)
    model.config.pad_token_id = OLD if how == "padding alone" else None
    model.resize_token_embeddings(OLD + new, mean_resizing=False)
    targets = ["q_proj", "v_proj"] + ["lm_head"] * (how == "an adapter on the output layer")
    saved = ["embed_tokens", "lm_head"] if how == "saved" else None
    model = hand_lora(model) if tied else lora(model, target_modules=targets, modules_to_save=saved)

    def loss(m, ids):
        ids = ids.clone()
        if how != "never used":
            ids[:, -6:-1] = torch.randint(OLD, OLD + (1 if how == "padding alone" else new), ids[:, -6:-1].shape)
        labels = ids.clone()
        if how == "given and not asked for":
            labels[:, -6:-1] = -100
        return m(input_ids=ids, labels=labels).loss

    report = quiet(lambda: train(model, adamw(model), loss=loss))
    assert not report.faults and ("S14" in said(report)) is RESIZED[how], f"\n{report}"
    if RESIZED[how]:
        assert report.root.check == "S14" and "were drawn" in report.root.diagnosis


TABLES = {  # numbers of a row, what is done to the rows that learned and to the last twelve -> how many are as drawn
    "learned and drawn": (64, lambda old, new: (3 * old, new), NEW),
    "learned little, in long rows": (1024, lambda old, new: (1.2 * old, new), 0),
    "here and there as drawn": (64, lambda old, new: (old * torch.tensor([3, 3, 1, 3] * 64)[:, None], new), 0),
    "nearly as drawn": (64, lambda old, new: (3 * old, 1.25 * new), 0),
    "around another number": (64, lambda old, new: (3 * old, new + SPREAD), 0),
}


@pytest.mark.parametrize("how", TABLES)
def test_rows_as_they_were_drawn(how):
    columns, done, count = TABLES[how]
    table = torch.randn(OLD + NEW, columns, generator=torch.Generator().manual_seed(0)) * SPREAD
    assert _drawn_at_the_end(torch.cat(done(table[:OLD], table[OLD:])), SPREAD) == count


# ------------------------------------------------------------------------------------------------ F130
WORDS, LENGTH, PROMPT, MARK, PAD = 64, 14, 6, 3, 0


class Sums(nn.Module):
    """Each place is given the mean of the words up to it, behind a prompt of vectors where there is one."""

    def __init__(self, prompt: int = 0, words: int = WORDS):
        super().__init__()
        self.table, self.head = nn.Embedding(words, 24), nn.Linear(24, words)
        self.prompt = nn.Parameter(torch.randn(1, prompt, 24)) if prompt else None

    def forward(self, ids, last=False):
        x = self.table(ids)
        if self.prompt is not None:
            prompt = self.prompt.expand(len(x), -1, -1)
            x = torch.cat([x, prompt] if last else [prompt, x], 1)
        return self.head(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])


def dialogue(rows: int = 24):
    """Prompts that end in a mark, and answers."""
    ids = torch.randint(8, WORDS, (rows, LENGTH))
    ids[:, PROMPT - 1] = MARK
    mask = torch.zeros_like(ids)
    mask[:, PROMPT:] = 1
    return ids, mask


def each_of(model, ids):
    logits = model(ids)[:, :-1]
    each = F.cross_entropy(logits.reshape(-1, WORDS), ids[:, 1:].reshape(-1), reduction="none")
    return each.view(len(ids), -1)


def late(model, ids, mask):
    weights = mask[:, :-1].float()
    return (each_of(model, ids) * weights).sum() / weights.sum()


def picked(model, ids, mask):
    each = -model(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return each[mask[:, :-1].bool()].mean()


def by_labels(model, ids, mask):
    labels = ids.masked_fill(mask == 0, -100)
    asked = labels.narrow(1, 0, LENGTH - 1) != -100
    return (each_of(model, ids) * asked).sum() / asked.sum()


def in_time(model, ids, mask):
    return (each_of(model, ids) * mask[:, 1:]).sum() / mask[:, 1:].sum()


def both_ends(model, ids, mask):
    """Answers from their second token on, which are asked for behind their own tokens alone."""
    return (each_of(model, ids) * mask[:, :-1] * mask[:, 1:]).mean()


def as_it_is(ids, mask):
    return ids, mask


def from_the_mark(ids, mask):
    mask[:, PROMPT - 1] = 1
    return ids, mask


def given_a_start(ids, mask):
    """The places that answer, behind a first word that is given."""
    mask[:, -1] = 0
    return ids, mask


def filled_in_front(ids, mask):
    ids[:, :PROMPT] = PAD
    return ids, mask


def one_template(ids, mask):
    ids[:, :PROMPT] = torch.arange(PROMPT)
    return ids, mask


def no_mark(ids, mask):
    ids[:, PROMPT - 1] = torch.randint(8, WORDS, (len(ids),))
    return ids, mask


def three_answers(ids, mask):
    ids[:, PROMPT] = 8 + torch.randint(3, (len(ids),))
    return ids, mask


def parts_of_one(ids, mask):
    return ids, mask * torch.linspace(0.5, 1, LENGTH)


def few_rows(ids, mask):
    return ids[:7], mask[:7]


def one_row_for_all(ids, mask):
    return ids, mask[:1]


def all_of_it(ids, mask):
    return ids, torch.ones_like(mask)


MARKS = itertools.count(1)


def marks_by_batch(ids, mask):
    ids[:, PROMPT - 1] = next(MARKS) % 7
    return ids, mask


@pytest.mark.parametrize("loss", [late, picked, by_labels])
def test_a_mask_that_is_late(loss):
    assert named("F130", Sums(), lambda model: loss(model, *dialogue()), "token 3")


@pytest.mark.parametrize("loss", [in_time, both_ends])
def test_a_mask_that_is_in_time(loss):
    assert not named("F130", Sums(), lambda model: loss(model, *dialogue()))


SEEN_OTHERWISE = [
    *(from_the_mark, given_a_start, filled_in_front, one_template, no_mark, three_answers, parts_of_one),
    *(few_rows, one_row_for_all, all_of_it, marks_by_batch),
]


@pytest.mark.parametrize("how", SEEN_OTHERWISE)
def test_masks_of_other_kinds(how):
    assert not named("F130", Sums(), lambda model: late(model, *how(*dialogue())))


# ------------------------------------------------------------------------------------------------ F131
BEFORE = 3


def cut_twice(model, ids):
    logits = model(ids)[:, :LENGTH]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gathered(model, ids):
    likely = model(ids).narrow(1, 0, LENGTH - 1).log_softmax(-1)
    return -likely.gather(2, ids[:, 1:, None]).mean()


def answers_alone(model, ids):
    labels = ids.clone()
    labels[:, :5] = -100
    return F.cross_entropy(model(ids)[:, : LENGTH - 1].transpose(1, 2), labels[:, 1:])


def the_last(model, ids):
    return F.cross_entropy(model(ids)[:, BEFORE:-1].flatten(0, 1), ids[:, 1:].flatten())


def vectors_behind(model, ids):
    logits = model(ids, last=True)[:, :LENGTH]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def a_tag_for_each(model, ids):
    return F.cross_entropy(model(ids)[:, :LENGTH].flatten(0, 1), (ids * 7 % WORDS).flatten())


def ids_themselves(model, ids):
    return F.cross_entropy(model(ids)[:, :LENGTH].flatten(0, 1), ids.flatten())


def few_targets(model, ids):
    labels = ids.clone()
    labels[:, :-1] = -100
    labels[15:] = -100
    return F.cross_entropy(model(ids)[:, : LENGTH - 1].flatten(0, 1), labels[:, 1:].flatten())


def other_words(model, ids):
    return F.cross_entropy(model(ids)[:, : LENGTH - 1].flatten(0, 1), torch.randint_like(ids[:, 1:], WORDS).flatten())


@pytest.mark.parametrize("loss", [cut_twice, gathered, answers_alone])
def test_a_prompt_that_is_overlooked(loss):
    assert named("F131", Sums(BEFORE), lambda model: loss(model, dialogue()[0]), "3 vectors")


@pytest.mark.parametrize("loss", [the_last, vectors_behind, a_tag_for_each, ids_themselves, few_targets, other_words])
def test_a_prompt_that_is_not(loss):
    assert not named("F131", Sums(BEFORE), lambda model: loss(model, dialogue()[0]))


@pytest.mark.parametrize("before", [0, 1, LENGTH - 1])
def test_no_prompt_a_first_vector_and_one_for_each_word(before):
    assert not named("F131", Sums(before), lambda model: cut_twice(model, dialogue()[0]))


@pytest.mark.parametrize("few", [False, True])
def test_words_that_come_again(few):
    """In a text that begins anew after as many words as stand in front, the places agree; and one of few words tells
    nothing."""

    def loss(model):
        ids = (torch.arange(LENGTH) % BEFORE).add(torch.randint(40, (24, 1)))
        return cut_twice(model, torch.randint(3, (24, LENGTH)) if few else ids)

    assert not named("F131", Sums(BEFORE), loss)
