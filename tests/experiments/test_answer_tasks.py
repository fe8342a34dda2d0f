"""Questions have one right answer, which stands in the text; named sets are mapped; logits are
those of the model.
"""

import json

import pyarrow
import pytest
import torch
from conftest import FP32
from pyarrow import parquet

from experiments import answer_tasks
from lessons import token_kinds
from nblib import models, text, train

ROWS = {
    "arc": {
        "question": "Why?",
        "choices": {"text": ["sun", "ice", "mud"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    },
    "arc_easy": {
        "question": "Who?",
        "choices": {"text": ["a", "b"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    "obqa": {
        "question_stem": "A cat is",
        "choices": {"text": ["x", "y"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    "boolq": {"passage": "Ice is cold.", "question": "is ice cold", "answer": True},
    "winogrande": {
        "sentence": "Ann saw Bea and _ waved.",
        "option1": "Ann",
        "option2": "Bea",
        "answer": "1",
    },
}
ANSWERS = {
    "arc": (" C", 3),
    "arc_easy": (" A", 2),
    "obqa": (" B", 2),
    "boolq": (" True", 2),
    "winogrande": (" A", 2),
}


@pytest.fixture(scope="module")
def tokenizer():
    letters = "\n".join(f"Answer: {word}" for word in ["True", "False", *answer_tasks.LETTERS])
    return text.train_tokenizer(
        [*text.documents("code", "validation")[:25], letters * 20], vocab_size=900
    )


@pytest.fixture(scope="module")
def stream(tokenizer):
    return text.encode(text.documents("code", "validation")[:25], tokenizer)


def _places(stream, prompt) -> list[int]:
    windows = stream.unfold(0, len(prompt), 1)[:-1]
    return (windows == prompt).all(1).nonzero().flatten().tolist()


def test_the_true_continuation_is_the_next_token_and_the_others_are_of_its_kind(tokenizer, stream):
    made = answer_tasks.continuation(stream, tokenizer, count=40, length=12, seed=3)
    kinds = token_kinds.kinds(tokenizer)
    for n, (prompt, choices, answer) in enumerate(
        zip(made["input_ids"], made["choices"], made["answer"])
    ):
        true = choices[answer]
        assert int(true) in [int(stream[at + 12]) for at in _places(stream, prompt)]
        assert tokenizer.eos_token_id not in prompt.tolist() and len(set(choices.tolist())) == 4
        assert len(set(kinds[choices].tolist())) == 1
        assert answer_tasks.shown(made, tokenizer, n).choices[answer] == tokenizer.decode(
            [int(true)]
        )
    assert len(set(made["answer"].tolist())) == 4
    again = answer_tasks.continuation(stream, tokenizer, count=40, length=12, seed=3)
    assert all(torch.equal(made[name], again[name]) for name in made)
    other = answer_tasks.continuation(stream, tokenizer, count=40, length=12, seed=4)
    assert not torch.equal(made["input_ids"], other["input_ids"])


def test_the_true_bracket_is_what_the_text_closes_and_each_kind_is_as_often(tokenizer, stream):
    made = answer_tasks.brackets(stream, tokenizer, count=15, length=16, seed=0)
    assert torch.bincount(made["answer"]).tolist() == [5, 5, 5]
    for prompt, choices, answer in zip(made["input_ids"], made["choices"], made["answer"]):
        bracket = tokenizer.decode([int(choices[answer])])
        follows = [tokenizer.decode([int(stream[at + 16])]) for at in _places(stream, prompt)]
        assert any(word.startswith(bracket) for word in follows)
        assert answer_tasks.PAIRS[bracket] in tokenizer.decode(prompt)
    with pytest.raises(ValueError, match="count = 100000: the text has only .* such questions"):
        answer_tasks.brackets(stream[:2000], tokenizer, count=100_000, length=16)


OPEN = [("f(a[0], {", "}"), ("f(a[0]", ")"), ("a[(1)", "]"), ("'(]' [", ""), ("x", "")]


@pytest.mark.parametrize("prompt, closes", OPEN)
def test_the_last_open_bracket_closes_next(prompt, closes):
    assert answer_tasks._open(prompt) == closes


@pytest.mark.parametrize("name", answer_tasks.NAMED)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_row_of_each_named_set_is_mapped(name, suffix, tokenizer, tmp_path):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist([ROWS[name]] * 3), path)
    else:
        path.write_text("\n".join(json.dumps(ROWS[name]) for _ in range(3)))
    questions = answer_tasks.read(name, path, limit=2)
    choice, ways = ANSWERS[name]
    assert len(questions) == 2 and questions[0].choices[questions[0].answer] == choice
    assert len(questions[0].choices) == ways and questions[0].prompt.endswith("Answer:")
    batch = answer_tasks.encode(questions, tokenizer)
    row = int(batch["choices"][0, batch["answer"][0]])
    assert tokenizer.decode([row]).strip() == choice.strip()


def test_a_set_out_of_reach_and_a_row_that_is_none_end_in_a_sentence(tmp_path):
    words = "obqa cannot be fetched from hf:allenai/openbookqa.*or give a local parquet"
    with pytest.raises(ConnectionError, match=words):
        answer_tasks.read("obqa")
    with pytest.raises(
        ValueError, match="name = 'mmlu': allowed are arc, arc_easy, obqa, boolq, winogrande"
    ):
        answer_tasks.read("mmlu")
    # its test split is blind
    with pytest.raises(ValueError, match="a row of winogrande does not have what it should"):
        answer_tasks.question("winogrande", ROWS["winogrande"] | {"answer": ""})
    (tmp_path / "rows.csv").write_text("")
    with pytest.raises(ValueError, match="allowed are .parquet and .jsonl"):
        answer_tasks.read("arc", tmp_path / "rows.csv")
    with pytest.raises(FileNotFoundError, match="no such file"):
        answer_tasks.read("arc", tmp_path / "rows.jsonl")


def test_choices_that_begin_alike_or_are_no_token_are_refused(tokenizer):
    ask = answer_tasks.Question("What is it? Answer:", (" A", " A"), 0)
    with pytest.raises(ValueError, match="two of them begin with the same token"):
        answer_tasks.encode([ask], tokenizer)
    with pytest.raises(ValueError, match="exactly one is needed"):
        answer_tasks.encode([ask._replace(choices=(" zyxwvu", " A"))], tokenizer)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_logits_are_those_after_the_prompt_whatever_stands_beside_it(family, tokenizer):
    """Also of a head with a soft cap, and with fewer choices in one row than in another."""
    if family == "qwen3":
        model = models.tiny(len(tokenizer), hidden=32, layers=2, heads=2)
    else:
        import transformers as tf

        shape = dict(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        )
        config = tf.Gemma2Config(vocab_size=len(tokenizer), intermediate_size=32, **shape)
        model = tf.Gemma2ForCausalLM(config)
    questions = [answer_tasks.question(name, row) for name, row in ROWS.items()]
    batch = answer_tasks.encode(questions, tokenizer)
    together = answer_tasks.predict(model, batch, rows=2)[0]
    model.eval()
    for n, asked in enumerate(questions):
        ids = torch.tensor([tokenizer(asked.prompt, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            last = model(input_ids=ids, use_cache=False).logits[0, -1]
        count = len(asked.choices)
        assert torch.allclose(together[n, :count], last[batch["choices"][n, :count]], atol=1e-4)
        assert torch.isinf(together[n, count:]).all()
    terms = answer_tasks.loss(model, batch)
    expected = -together.log_softmax(-1).gather(1, batch["answer"][:, None]).sum()
    assert float(terms["ce"].detach()) == pytest.approx(float(expected), rel=1e-4)


def test_training_learns_the_answers_and_goes_on_where_it_stopped(tokenizer, stream):
    data = answer_tasks.continuation(stream, tokenizer, count=16, length=8)
    model = models.tiny(len(tokenizer), hidden=32, layers=1, heads=2)
    batches = answer_tasks.Batches(data, rows=8, seed=1)
    before = float(answer_tasks.loss(model, data)["ce"].detach())
    train.fit(
        model, batches, train.adamw(model, lr=1e-2), total=20, loss=answer_tasks.loss, machine=FP32
    )
    assert float(answer_tasks.loss(model, data)["ce"].detach()) < 0.3 * before
    state, following = batches.state_dict(), [next(batches) for _ in range(3)]
    other = answer_tasks.Batches(data, rows=8)
    other.load_state_dict(state)
    for expected in following:
        assert all(torch.equal(tensor, expected[name]) for name, tensor in next(other).items())
    with pytest.raises(ValueError, match="rows = 17: allowed are 1 to 16"):
        answer_tasks.Batches(data, rows=17)
