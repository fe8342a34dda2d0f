"""Conversations as training rows: only the assistant's words are learned, and a small task with a
right answer.

    row = labelled(tokenizer, [{"role": "user", "content": "..."}, {"role": "assistant", "content":
    "..."}]) row["input_ids"]    the whole conversation by the tokenizer's own chat template
    row["labels"]       the same where the assistant speaks, -100 elsewhere

Every loss of nblib drops rows of -100 before the head, so neither labels nor a teacher say anything
about the prompt. Where the assistant's words begin and end is read off the template itself: a
conversation up to the assistant's turn, with the prompt of the generation, must be the beginning of
the conversation with it.

The task asks whether a few tokens come from prose or from code, and the assistant answers in one
word. `accuracy` is the share of questions whose answer is found word for word by taking the
likeliest token each time.

Footgun: a template may write earlier turns anew once later ones are there (Qwen3 drops old
thoughts). Then no such beginning exists; that is an error here, and a mask by position would have
taught the wrong tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nblib import losses, wiring

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
Message = dict[str, str]


def labelled(tokenizer, messages: Sequence[Message]) -> dict[str, Tensor]:
    """`input_ids` and `labels` of one conversation, (T,) each."""
    if not any(m["role"] == "assistant" for m in messages):
        raise ValueError("messages: the assistant says nothing, so there is nothing to learn")
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat_template: set one, chat.TEMPLATE for a new model"
        )
    whole = _ids(tokenizer, messages)
    labels = torch.full_like(whole, losses.IGNORED)
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = (
                _ids(tokenizer, messages[:n], answer=True),
                _ids(tokenizer, messages[: n + 1]),
            )
            for part in (before, after):
                if not torch.equal(part, whole[: len(part)]):
                    raise ValueError(
                        f"messages: with turn {n} this chat template writes what stands before "
                        "it anew"
                    )
            labels[len(before) : len(after)] = whole[len(before) : len(after)]
    return {"input_ids": whole, "labels": labels}


def _ids(tokenizer, messages: Sequence[Message], *, answer: bool = False) -> Tensor:
    if not messages:
        return torch.zeros(0, dtype=torch.long)
    written = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=answer
    )
    return torch.tensor(tokenizer(written, add_special_tokens=False)["input_ids"])


def together(rows: Sequence[dict[str, Tensor]], *, pad: int) -> dict[str, Tensor]:
    """Rows of several lengths as a batch, padded at the right."""
    T = max(len(row["input_ids"]) for row in rows)
    batch = {
        "input_ids": torch.full((len(rows), T), pad),
        "labels": torch.full((len(rows), T), losses.IGNORED),
    }
    batch["attention_mask"] = torch.zeros(len(rows), T, dtype=torch.long)
    for n, row in enumerate(rows):
        size = len(row["input_ids"])
        batch["input_ids"][n, :size], batch["labels"][n, :size] = row["input_ids"], row["labels"]
        batch["attention_mask"][n, :size] = 1
    return batch


class Batches:
    """Endless shuffled batches of conversations; two integers say where it stands."""

    def __init__(self, rows: Sequence[dict[str, Tensor]], *, size: int, pad: int, seed: int = 0):
        if not 1 <= size <= len(rows):
            raise ValueError(f"size = {size}: must be from 1 to the {len(rows)} conversations")
        self.rows, self.size, self.pad, self.seed, self.position = rows, size, pad, seed, 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, Tensor]:
        epoch, at = divmod(self.position, len(self.rows) // self.size)
        order = torch.randperm(
            len(self.rows), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        )
        self.position += 1
        return together(
            [self.rows[i] for i in order[at * self.size : (at + 1) * self.size]], pad=self.pad
        )

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.position = state["seed"], state["position"]


def questions(
    streams: dict[str, Tensor], tokenizer, *, count: int, size: int = 12, seed: int = 0
) -> list[list[Message]]:
    """Conversations about `size` tokens from one of the streams; the right answer is the stream's
    name.
    """
    draw, names = torch.Generator().manual_seed(seed), sorted(streams)
    made = []
    for n in range(count):
        name = names[n % len(names)]  # as many of each
        stream = streams[name]
        begin = int(torch.randint(len(stream) - size, (1,), generator=draw))
        words = tokenizer.decode(stream[begin : begin + size], skip_special_tokens=True)
        made.append([{"role": "user", "content": words}, {"role": "assistant", "content": name}])
    return made


@torch.no_grad()
def accuracy(
    model: nn.Module, rows: Sequence[dict[str, Tensor]], *, pad: int, batch: int = 32
) -> float:
    """Return the share of rows whose learned tokens are all the likeliest: so the model, asked,
    would write just these.
    """
    right, device = 0, next(model.parameters()).device
    with wiring.evaluating(model):
        for begin in range(0, len(rows), batch):
            few = {
                name: t.to(device)
                for name, t in together(rows[begin : begin + batch], pad=pad).items()
            }
            logits = model(input_ids=few["input_ids"], attention_mask=few["attention_mask"]).logits[
                :, :-1
            ]
            labels = few["labels"][:, 1:]
            right += int(
                ((logits.argmax(-1) == labels) | (labels == losses.IGNORED)).all(dim=1).sum()
            )
    return right / len(rows)
