"""Conversations: only the assistant's words have labels, no loss sees the prompt, and accuracy is
that of writing.
"""

import copy

import pytest
import torch

from nblib import losses, models, runtime, text, train
from nblib.methods.distill import chat, objective

SAID = [
    {"role": "user", "content": "what comes after three"},
    {"role": "assistant", "content": "four of course"},
    {"role": "user", "content": "and before it"},
    {"role": "assistant", "content": "two"},
]


@pytest.fixture(scope="module")
def tokenizer():
    made = text.train_tokenizer([f"{m['role']}: {m['content']}" for m in SAID] * 20, vocab_size=300)
    made.chat_template = chat.TEMPLATE
    return made


@pytest.fixture
def batch(tokenizer):
    rows = [chat.labelled(tokenizer, SAID), chat.labelled(tokenizer, SAID[:2])]
    return chat.together(rows, pad=tokenizer.pad_token_id)


def model(tokenizer, seed=0, **shape):
    return models.tiny(
        len(tokenizer), seed=seed, **(dict(hidden=32, layers=2, heads=2, length=64) | shape)
    )


def test_what_is_learned_is_what_the_assistant_says_and_that_it_ends(tokenizer):
    row = chat.labelled(tokenizer, SAID)
    learned = row["labels"] != losses.IGNORED
    assert torch.equal(row["labels"][learned], row["input_ids"][learned])
    end = tokenizer.eos_token
    assert tokenizer.decode(row["labels"][learned]).replace(" ", "") == f"fourofcourse{end}two{end}"
    assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(SAID, tokenize=False)


@pytest.mark.parametrize("taught", ["labels", "teacher"])
def test_no_loss_sees_the_prompt(tokenizer, batch, taught):
    """Only rows of the assistant's tokens reach the head: other targets in the prompt change
    nothing, not even a bit, and the logits at the prompt get no gradient. With the prompt as labels
    the loss is another one.
    """
    student, teacher = model(tokenizer), models.as_teacher(model(tokenizer, 1))
    loss = losses.causal_lm if taught == "labels" else objective.from_teacher(teacher, 1.0)
    value = sum(loss(student, batch).values()).detach()
    with torch.no_grad():
        s, t = (
            m(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            for m in (student, teacher)
        )
    keep, labels = batch["labels"][:, 1:] != losses.IGNORED, batch["labels"][:, 1:]
    log_q, log_p = s[keep].log_softmax(-1), t[keep].log_softmax(-1)
    by_hand = {
        "labels": -log_q.gather(1, labels[keep][:, None]).sum(),
        "teacher": (log_p.exp() * (log_p - log_q)).sum(),
    }
    torch.testing.assert_close(value, by_hand[taught], rtol=1e-4, atol=1e-5)
    assert (
        int(losses.supervised(batch["labels"]))
        == int(keep.sum())
        < int(batch["attention_mask"].sum())
    )
    seen = batch | {"labels": batch["input_ids"]}
    assert float(sum(loss(student, seen).values()).detach()) > 1.5 * float(value)


def test_a_training_learns_the_answers_and_not_the_prompts(tokenizer):
    """Prompts of random words: what is learned about them stays nothing, and the answers are known
    at the end.
    """
    draw = torch.Generator().manual_seed(0)
    words = ["one", "two", "three", "four"]
    said = [
        [
            {
                "role": "user",
                "content": " ".join(words[i] for i in torch.randint(4, (5,), generator=draw)),
            },
            {"role": "assistant", "content": "of course"},
        ]
        for _ in range(12)
    ]
    rows, pad = [chat.labelled(tokenizer, each) for each in said], tokenizer.pad_token_id
    student = model(tokenizer)
    assert chat.accuracy(student, rows, pad=pad) == 0
    options = dict(total=25, machine=runtime.pick("cpu", "fp32"))
    train.fit(
        student, chat.Batches(rows, size=4, pad=pad), train.adamw(student, lr=1e-2), **options
    )
    assert chat.accuracy(student, rows, pad=pad) == 1
    ids = rows[0]["input_ids"]
    begin = int((rows[0]["labels"] != losses.IGNORED).nonzero()[0])
    told = student.eval().generate(
        ids[None, :begin], max_new_tokens=8, do_sample=False, pad_token_id=pad, eos_token_id=1
    )
    assert torch.equal(told[0], ids)  # asked, it writes just this


def test_batches_go_on_where_they_stopped_and_take_each_row_once(tokenizer):
    rows = [chat.labelled(tokenizer, SAID[:2]) | {"labels": torch.tensor([n, n])} for n in range(7)]
    for row in rows:
        row["input_ids"] = row["labels"]
    batches = chat.Batches(rows, size=3, pad=0, seed=4)
    first = [next(batches)["input_ids"][:, 0].tolist() for _ in range(2)]
    assert len({n for few in first for n in few}) == 6
    again = chat.Batches(rows, size=3, pad=0)
    again.load_state_dict(copy.deepcopy(batches.state_dict()))
    assert all(torch.equal(next(batches)["labels"], next(again)["labels"]) for _ in range(5))


def test_questions_have_as_many_of_each_answer(tokenizer):
    streams = {"low": torch.arange(10, 60), "high": torch.arange(200, 260)}
    made = chat.questions(streams, tokenizer, count=8, size=4)
    assert [m[1]["content"] for m in made] == ["high", "low"] * 4
    assert made == chat.questions(streams, tokenizer, count=8, size=4)
    assert made != chat.questions(streams, tokenizer, count=8, size=4, seed=1)


def test_refused(tokenizer):
    with pytest.raises(ValueError, match="the assistant says nothing"):
        chat.labelled(tokenizer, SAID[:1])
    other = copy.deepcopy(tokenizer)
    other.chat_template = None
    with pytest.raises(ValueError, match="no chat_template"):
        chat.labelled(other, SAID)
    # writes its beginning anew each turn
    other.chat_template = "{{ messages | length }}" + chat.TEMPLATE
    with pytest.raises(
        ValueError, match="with turn 1 this chat template writes what stands before it anew"
    ):
        chat.labelled(other, SAID)
    with pytest.raises(ValueError, match="size = 3: must be from 1 to the 2"):
        chat.Batches([{}, {}], size=3, pad=0)
