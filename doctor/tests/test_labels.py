"""Programs whose labels ask for the wrong thing, and healthy ones that look alike."""

import pytest
import torch
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import assert_healthy, assert_root, batches, lm, quiet
from tests.test_loss import Small, ce, picked

EOS, PAD, BOS = 2, 0, 1


class Words:
    """As much of a tokenizer as the doctor asks for."""

    def __init__(self, eos=EOS, pad=PAD, bos=None):
        self.eos_token_id, self.pad_token_id, self.bos_token_id = eos, pad, bos


def padded(pad=PAD, end=True, left=False, lengths=(9, 20, 13, 27), count=4, begin=()):
    """Batches (ids, mask) of texts of different lengths that end with EOS."""
    made = []
    for ids in batches(count, 4, 32):
        mask = torch.zeros_like(ids)
        for row, n in enumerate(lengths):
            text = ids[row, :n].clone()
            text[: len(begin)] = torch.tensor(begin, dtype=text.dtype)
            if end:
                text[-1] = EOS
            ids[row] = pad
            place = slice(32 - n, 32) if left else slice(0, n)
            ids[row, place], mask[row, place] = text, 1
        made.append((ids, mask))
    return made


def train(loss_of, data, model=None, tokenizer=None):
    model = lm() if model is None else model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with doctor.watch(model, optimizer=optimizer, tokenizer=tokenizer, say=False) as report:
        for ids, mask in data:
            optimizer.zero_grad()
            loss_of(model, ids, mask).backward()
            optimizer.step()
    return report


def hf(label):
    """The model's own loss on labels made by `label(ids, mask)`."""
    return lambda m, i, a: m(input_ids=i, attention_mask=a, labels=label(i, a)).loss


def by_mask(ids, mask):
    return torch.where(mask != 0, ids, -100)


def by_id(pad):
    return lambda ids, mask: torch.where(ids != pad, ids, -100)


def answers(ids, mask, start=5):
    """Only the answer, which begins at a place, is asked for."""
    return torch.where((torch.arange(ids.shape[1]) >= start) & (mask != 0), ids, -100)


def first_row_only(ids, mask):
    return torch.where((torch.arange(len(ids)) < 2)[:, None], by_mask(ids, mask), -100)


def one_pad_on_purpose(ids, mask):
    ends = torch.arange(ids.shape[1]) <= mask.sum(1, keepdim=True)
    return torch.where(ends, ids, -100)


def marked(asked_about):
    """Prompts that end with a mark; behind it the answer begins, or stands a word of the prompt that is asked about."""
    made = []
    for ids, mask in padded(lengths=(32,) * 4, end=False, count=4):
        ids = torch.where(ids > 10, ids, ids + 20)
        ids[:, 7] = 4
        ids[:, 8] = ids[:, 2] if asked_about else ids[:, 8]
        made.append((ids, mask))
    return made


def per_token(masked):
    def loss(model, ids, mask):
        each = picked(model(ids)[:, :-1], ids[:, 1:])
        here = mask[:, 1:].float()
        return (each * here).sum() / here.sum() if masked else each.mean()

    return loss


def per_token_none(masked):
    def loss(model, ids, mask):
        logits = model(input_ids=ids, attention_mask=mask).logits
        each = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        here = mask[:, 1:].float()
        return (each * here).sum() / here.sum() if masked else each.mean()

    return loss


FAULTS = {
    "F14 all": ("F14", lambda: train(hf(lambda i, a: torch.full_like(i, -100)), padded())),
    "F14 half": ("F14", lambda: train(hf(first_row_only), padded())),
    "F14 own": ("F14", lambda: train(lambda m, i, a: m(i, torch.full_like(i, -100))[1], padded(), Small)),
    "F15 hf": ("F15", lambda: train(hf(lambda i, a: i), padded())),
    "F15 left": ("F15", lambda: train(hf(lambda i, a: i), padded(left=True))),
    "F15 none": ("F15", lambda: train(per_token_none(False), padded())),
    "F15 own, tokenizer": (
        "F15",
        lambda: train(lambda m, i, a: m(i[:, :-1], i[:, 1:])[1], padded(), Small, Words()),
    ),
    "F15 own, unnamed": ("F15", lambda: train(lambda m, i, a: m(i[:, :-1], i[:, 1:])[1], padded(), Small)),
    "F15 own, gather": ("F15", lambda: train(per_token(False), padded(), Small, Words())),
    "F16 hf": ("F16", lambda: train(hf(by_id(EOS)), padded(pad=EOS), tokenizer=Words(pad=EOS))),
    "F16 config": (
        "F16",
        lambda: train(hf(by_id(EOS)), padded(pad=EOS), lambda: lm(eos_token_id=EOS, pad_token_id=EOS)),
    ),
    "F16 ignore_index": (
        "F16",
        lambda: train(
            lambda m, i, a: ce(m(i)[:, :-1], i[:, 1:], ignore_index=EOS), padded(pad=EOS), Small, Words(pad=EOS)
        ),
    ),
    "F127": ("F127", lambda: train(hf(lambda i, a: answers(i, a, 9)), marked(False))),
    "F18": ("F18", lambda: train(hf(by_mask), padded(begin=(BOS, BOS)), tokenizer=Words(bos=BOS))),
}

HEALTHY = {
    "mask": lambda: train(hf(by_mask), padded()),
    "a word that is asked about": lambda: train(hf(lambda i, a: answers(i, a, 9)), marked(True)),
    "left": lambda: train(hf(by_mask), padded(left=True)),
    "answers": lambda: train(hf(answers), padded(), tokenizer=Words()),
    "pad is eos, by mask": lambda: train(hf(by_mask), padded(pad=EOS), tokenizer=Words(pad=EOS)),
    "pad is eos, one learnt": lambda: train(
        hf(one_pad_on_purpose), padded(pad=EOS, end=False), tokenizer=Words(pad=EOS)
    ),
    "no end in the text": lambda: train(hf(by_id(EOS)), padded(pad=EOS, end=False), tokenizer=Words(pad=EOS)),
    "per token, masked": lambda: train(per_token_none(True), padded()),
    "own, ignore_index": lambda: train(
        lambda m, i, a: ce(m(i)[:, :-1], i[:, 1:], ignore_index=PAD), padded(), Small, Words()
    ),
    "own, gather": lambda: train(per_token(True), padded(), Small),
    "one BOS": lambda: train(hf(by_mask), padded(begin=(BOS, 7)), tokenizer=Words(bos=BOS)),
    "bos is eos is pad": lambda: train(
        hf(by_mask), padded(pad=EOS, left=True, begin=(EOS, 7)), tokenizer=Words(pad=EOS, bos=EOS)
    ),
    "overfit": lambda: train(hf(by_mask), padded(count=1) * 5),
    "one row cut": lambda: train(hf(lambda i, a: answers(i, a, 12)), padded()[:1]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_named(name):
    check, program = FAULTS[name]
    assert_root(quiet(program), check)


# the model reads its padding: only its loss is looked at here
@pytest.mark.parametrize("name", HEALTHY)
def test_the_healthy_program_is_left_alone(name):
    assert_healthy(quiet(HEALTHY[name]))


def test_one_batch_again_and_again_is_only_noted():
    report = quiet(HEALTHY["overfit"])
    assert [f.severity for f in report.findings if f.check == "D8"] == ["NOTE"]
