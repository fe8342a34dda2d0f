"""Questions with a right answer: a prompt, a few choices of one token each, and the number of the
true one.

Next-token loss has no right and wrong. To ask whether a model knows what it knows needs a task that
has. Two are made from embedded text, so they exist offline and in two domains, of which one can be
the shifted one:

    continuation   which of four tokens follows; the other three are of the same kind and as common
                   as their text is
    brackets       which bracket closes next, ) ] or }: the last one open in the prompt, as often
                   each

and four come by name from the hub or from a local file: ARC, OBQA, BoolQ and WinoGrande, with
lettered choices, as in the comparisons of Bayesian adapters (arXiv:2308.13111, arXiv:2406.11675).

The logits of the choices are those of the position after the prompt, p = softmax over the choices
alone, and the loss is -log p of the true one. A batch holds `labels` only so that a loop counts one
answer per question.

Footgun: a choice must be one token that no other choice begins with as well. `encode` refuses
others: with two letters that share their first token the task has no right answer, and accuracy
stays at chance for a reason no log shows.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lessons import token_kinds
from nblib import losses, runtime, text, wiring
from nblib.losses import Batch, Terms

LETTERS = "ABCDEFGH"
PAIRS = {")": "(", "]": "[", "}": "{"}
NAMED = {
    "arc": ("allenai/ai2_arc", "ARC-Challenge"),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy"),
    "obqa": ("allenai/openbookqa", "main"),
    "boolq": ("google/boolq", None),
    "winogrande": ("allenai/winogrande", "winogrande_s"),
}


class Question(NamedTuple):
    prompt: str
    choices: tuple[str, ...]
    answer: int


# ------------------------------------------------------------------ from text


def continuation(
    stream: Tensor, tokenizer, *, count: int, length: int = 24, ways: int = 4, seed: int = 0
) -> Batch:
    """`count` prompts of `length` tokens from a stream of documents.

    The wrong choices are drawn from the stream.
    """
    kind_of, draw = token_kinds.kinds(tokenizer), torch.Generator().manual_seed(seed)
    allowed = torch.tensor(
        [kind in ("word", "inside a word", "punctuation") for kind in token_kinds.KINDS]
    )
    by_kind = {
        kind: stream[kind_of[stream] == kind] for kind in allowed.nonzero().flatten().tolist()
    }
    prompts, choices, answers = [], [], []
    for at in _places(stream, tokenizer, length, draw):
        true = int(stream[at + length])
        if not allowed[kind := int(kind_of[true])]:
            continue
        others: list[int] = []
        for _ in range(50 * ways):  # a small stream may not have so many tokens of a kind
            other = int(by_kind[kind][torch.randint(len(by_kind[kind]), (), generator=draw)])
            others += [other] if other != true and other not in others else []
            if len(others) == ways - 1:
                answer = int(torch.randint(ways, (), generator=draw))
                prompts.append(stream[at : at + length])
                choices.append([*others[:answer], true, *others[answer:]])
                answers.append(answer)
                break
        if len(prompts) == count:
            return _batch(torch.stack(prompts), torch.tensor(choices), torch.tensor(answers))
    raise ValueError(f"count = {count}: the text has only {len(prompts)} such questions")


def brackets(stream: Tensor, tokenizer, *, count: int, length: int = 24, seed: int = 0) -> Batch:
    """`count` prompts of `length` tokens before a closing bracket that the prompt opened, each kind
    as often.
    """
    pieces, closers = [tokenizer.decode([i]) for i in range(len(tokenizer))], list(PAIRS)
    # of each token
    first = torch.tensor([closers.index(p[0]) if p[:1] in PAIRS else -1 for p in pieces])
    ids = torch.tensor([_single(tokenizer, bracket) for bracket in closers])
    draw, left = (
        torch.Generator().manual_seed(seed),
        [count // 3 + (n < count % 3) for n in range(3)],
    )
    prompts, answers = [], []
    for at in _places(stream, tokenizer, length, draw):
        answer = int(first[stream[at + length]])
        if answer < 0 or not left[answer]:
            continue
        prompt = stream[at : at + length]
        if _open("".join(pieces[i] for i in prompt.tolist())) == closers[answer]:
            left[answer] -= 1
            prompts.append(prompt)
            answers.append(answer)
        if not any(left):
            return _batch(torch.stack(prompts), ids.expand(count, 3), torch.tensor(answers))
    raise ValueError(
        f"count = {count}: the text has only {len(prompts)} such questions, equally many of "
        "each bracket"
    )


def _open(prompt: str) -> str:
    """Return the bracket that closes the last one open, or nothing."""
    waiting = []
    for character in prompt:
        if character in PAIRS.values():
            waiting.append(
                next(closing for closing, opening in PAIRS.items() if opening == character)
            )
        elif character in PAIRS and waiting and waiting.pop() != character:
            return ""  # a bracket inside of a string: nothing is sure
    return waiting[-1] if waiting else ""


def _places(stream: Tensor, tokenizer, length: int, draw: torch.Generator) -> Iterator[int]:
    """Yield starts of prompts that lie in one document with the token after them, at random."""
    if len(stream) <= length:
        raise ValueError(f"length = {length}: the text has {len(stream)} tokens")
    ends = F.pad((stream == tokenizer.eos_token_id).long().cumsum(0), (1, 0))
    for at in torch.randperm(len(stream) - length, generator=draw).tolist():
        if ends[at] == ends[at + length + 1]:
            yield at


TASKS = {"continuation": continuation, "brackets": brackets}


# ------------------------------------------------------------------ by name


def read(
    name: str, place: str | Path = "", *, split: str = "train", limit: int | None = None
) -> list[Question]:
    """Return the questions of a named set, from the hub, or from a local parquet or jsonl file with
    the rows of the hub.
    """
    if name not in NAMED:
        raise ValueError(f"name = {name!r}: allowed are {', '.join(NAMED)}")
    rows, questions = _local(Path(place)) if place else _hub(name, split), []
    for row in rows:
        questions.append(question(name, row))
        if len(questions) == limit:
            break
    return questions


def question(name: str, row: dict[str, Any]) -> Question:
    """Return a row of a named set as prompt, choices and answer.

    The choices are letters, or True and False.
    """
    try:
        if name == "boolq":
            prompt = f"{row['passage']}\nQuestion: {row['question']}?\nTrue or False?\nAnswer:"
            return Question(prompt, (" False", " True"), [False, True].index(row["answer"]))
        if name == "winogrande":
            asked = f"{row['sentence']}\nWhat stands for the underscore?"
            options, key, keys = [row["option1"], row["option2"]], row["answer"], ["1", "2"]
        else:
            asked = row["question_stem" if name == "obqa" else "question"]
            options, key, keys = (
                row["choices"]["text"],
                row["answerKey"],
                list(row["choices"]["label"]),
            )
        lines = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options))
        choices = tuple(f" {letter}" for letter in LETTERS[: len(options)])
        return Question(f"{asked}\n{lines}\nAnswer:", choices, keys.index(key))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"a row of {name} does not have what it should ({error!r}): {str(row)[:120]}"
        ) from None


def encode(questions: Iterable[Question], tokenizer, *, length: int = 256) -> Batch:
    """Questions as a batch, padded on the right.

    Of a longer prompt the last `length` tokens are kept.
    """
    questions = list(questions)
    prompts = [
        torch.tensor(tokenizer(q.prompt, add_special_tokens=False)["input_ids"][-length:])
        for q in questions
    ]
    if not prompts or min(map(len, prompts)) < 2:
        raise ValueError("questions: there is none, or one has a prompt of less than two tokens")
    lengths, ways = torch.tensor([len(p) for p in prompts]), max(len(q.choices) for q in questions)
    choices = torch.full((len(questions), ways), -1)
    for row, asked in zip(choices, questions):
        ids = [_single(tokenizer, choice) for choice in asked.choices]
        if len(set(ids)) < len(ids):
            raise ValueError(f"choices = {asked.choices}: two of them begin with the same token")
        row[: len(ids)] = torch.tensor(ids)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=pad)
    return _batch(ids, choices, torch.tensor([q.answer for q in questions]), lengths)


def _single(tokenizer, choice: str) -> int:
    """Return the token of a choice.

    Some tokenizers write a space as a token of its own in front.
    """
    ids = [
        i
        for i in tokenizer(choice, add_special_tokens=False)["input_ids"]
        if tokenizer.decode([i]).strip()
    ]
    if len(ids) != 1:
        raise ValueError(
            f"choice {choice!r} has {len(ids)} tokens in this tokenizer: exactly one is needed"
        )
    return ids[0]


def _hub(name: str, split: str) -> Iterator[dict]:
    dataset, part = NAMED[name]
    try:
        from datasets import load_dataset

        yield from load_dataset(dataset, part, split=split, streaming=True)
    except Exception as error:  # of whatever library on the way
        raise ConnectionError(
            f"{name} cannot be fetched from hf:{dataset} ({type(error).__name__}): start again "
            "with a network and "
            "`pip install datasets`, or give a local parquet or jsonl file of its rows: "
            f"read({name!r}, '/path/to/it')"
        ) from None


def _local(path: Path) -> Iterable[dict]:
    if not path.exists():
        raise FileNotFoundError(f"place = {str(path)!r}: no such file")
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    raise ValueError(f"place = {str(path)!r}: allowed are .parquet and .jsonl")


# ------------------------------------------------------------------ batches, loss, prediction


def _batch(ids: Tensor, choices: Tensor, answers: Tensor, lengths: Tensor | None = None) -> Batch:
    """ids (N, T), choices (N, C) with -1 for none, answers (N,).

    `labels` marks the last token of each prompt.
    """
    last = torch.full((len(ids),), ids.shape[1]) if lengths is None else lengths
    at = torch.arange(ids.shape[1])
    labels = torch.where(at == last[:, None] - 1, ids, losses.IGNORED)
    mask = {} if lengths is None else {"attention_mask": (at < last[:, None]).long()}
    return {"input_ids": ids, "labels": labels, "choices": choices, "answer": answers, **mask}


def part(data: Batch, at: Tensor | slice) -> Batch:
    """Return some of the questions."""
    return {name: tensor[at] for name, tensor in data.items()}


def prompts(data: Batch) -> Batch:
    """Return what a causal model takes, without the choices."""
    return {
        name: tensor
        for name, tensor in data.items()
        if name in ("input_ids", "labels", "attention_mask")
    }


class Batches:
    """Endless shuffled batches of questions; seed, epoch and position say where it stands."""

    def __init__(self, data: Batch, *, rows: int, seed: int = 0):
        self.data, self.rows, self.seed, self.epoch, self.position = data, rows, seed, 0, 0
        # of an epoch
        self.per_epoch, self.tokens = len(data["answer"]) // rows, data["input_ids"].numel()
        if self.per_epoch < 1:
            raise ValueError(
                f"rows = {rows}: allowed are 1 to {len(data['answer'])}, the number of questions"
            )

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        if self.position >= self.per_epoch:
            self.epoch, self.position = self.epoch + 1, 0
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.data["answer"]), generator=draw)
        at = order[self.position * self.rows :][: self.rows]
        self.position += 1
        return part(self.data, at)

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]


def features(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden state after the prompt, (B, D), and the head's row of each choice, (B, C, D).

    Both in fp32.
    """
    hidden, weight = losses.hidden_states(model, _inputs(batch)) or (None, None)
    if hidden is None:
        losses.backbone_and_head(model, needed=True)  # says why
    return _after_prompt(hidden, batch).float(), weight[batch["choices"].clamp_min(0)].float()


def logits(model: nn.Module, batch: Batch) -> Tensor:
    """Of the choices, (B, C); -inf for a choice that a question does not have."""
    if losses.backbone_and_head(model) is not None:
        hidden, rows = features(model, batch)
        # eight bits are too few for a probability
        with torch.autocast(hidden.device.type, enabled=False):
            scores = torch.einsum("bd,bcd->bc", hidden, rows)
    else:
        whole = losses.forward(model, _inputs(batch)).logits
        scores = _after_prompt(whole, batch).float().gather(1, batch["choices"].clamp_min(0))
    return scores.masked_fill(batch["choices"] < 0, -torch.inf)


def loss(model: nn.Module, batch: Batch) -> Terms:
    """-log p of the true choice, summed over the questions."""
    return {"ce": F.cross_entropy(logits(model, batch), batch["answer"], reduction="sum")}


def _inputs(batch: Batch) -> Batch:
    return {
        name: tensor for name, tensor in batch.items() if name in ("input_ids", "attention_mask")
    }


def _after_prompt(states: Tensor, batch: Batch) -> Tensor:
    """(B, T, D) -> (B, D) at the position that `labels` marks."""
    last = (batch["labels"] != losses.IGNORED).int().argmax(1)
    return states[torch.arange(len(last), device=states.device), last]


@torch.no_grad()
def predict(
    model: nn.Module,
    data: Batch,
    *,
    of: Callable[[nn.Module, Batch], Any] = logits,
    samples: int = 0,
    sampling: Callable[[nn.Module], AbstractContextManager] | None = None,
    rows: int = 64,
    seed: int = 0,
    machine: runtime.Machine | None = None,
) -> Tensor:
    """Logits of all questions in evaluation mode, (S, N, C); S is 1 without samples.

    The generators are put back.
    """
    if samples and sampling is None:
        raise ValueError(
            f"samples = {samples}: give sampling, the context in which the model draws"
        )
    device, draws = next(model.parameters()).device, []
    with (
        runtime.seeded(seed),
        wiring.evaluating(model),
        sampling(model) if samples else nullcontext(),
    ):
        for _ in range(max(1, samples)):
            cut = [part(data, slice(at, at + rows)) for at in range(0, len(data["answer"]), rows)]
            cut = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in cut]
            with machine.autocast() if machine else nullcontext():
                draws.append(torch.cat([of(model, batch).cpu() for batch in cut]))
    return torch.stack(draws)


def shown(data: Batch, tokenizer, at: int) -> Question:
    """Return a question in words."""
    keep = data["attention_mask"][at].bool() if "attention_mask" in data else slice(None)
    choices = tuple(tokenizer.decode([i]) for i in data["choices"][at].tolist() if i >= 0)
    return Question(tokenizer.decode(data["input_ids"][at][keep]), choices, int(data["answer"][at]))


def splits(
    task: str, domain: str, tokenizer, *, counts: dict[str, int], length: int = 24, seed: int = 0
) -> dict:
    """Questions from the train, validation and held-out documents of an embedded domain, `counts`
    of each split.
    """
    if task not in TASKS:
        raise ValueError(f"task = {task!r}: allowed are {', '.join(TASKS)}")
    made = {}
    for split, count in counts.items():
        stream = text.encode(text.documents(domain, split), tokenizer)
        made[split] = TASKS[task](stream, tokenizer, count=count, length=length, seed=seed)
    return made
