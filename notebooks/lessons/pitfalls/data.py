"""P42 to P45: data that is not what the model takes it for.

Labels that are shifted twice or never, and an end of text that the model is never taught (P42).
Packed documents that see each other (P43), and a first loss compared with the wrong number (P44).
Workers that cost more time than they save (P45). None of them raises, and none keeps the training
loss from falling.

Footgun: with `labels=` a transformers model shifts by itself. Labels that are shifted already are
shifted twice.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorForLanguageModeling

from lessons.pitfalls import VERSIONS, Pitfall
from lessons.pitfalls.bench import VOCABULARY, byte_model, byte_rows, plain_loop
from nblib import guards, models, text


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


# ------------------------------------------------------------------- P42 labels, shifted and masked
class WrongLabels:
    def shifted_twice(model, ids):
        ahead = F.pad(ids[:, 1:], (0, 1), value=-100)  # the next token, at its place
        return model(ids, labels=ahead).loss  # at fault: the model shifts again

    def never_shifted(model, ids):
        logits = model(ids).logits.flatten(0, 1)
        return F.cross_entropy(logits, ids.flatten())  # at fault: the token it sees

    def padding(tokenizer):
        tokenizer.pad_token = tokenizer.eos_token  # at fault: neither is ever a label


class RightLabels:
    def shifted_once(model, ids):
        return model(ids, labels=ids).loss  # the model shifts

    def padding(tokenizer):
        tokenizer.pad_token = "<|pad|>"  # a token of its own


# by times
SHIFTED = (WrongLabels.never_shifted, RightLabels.shifted_once, WrongLabels.shifted_twice)


def shifted(times: int, *, steps: int = 120) -> dict:
    """Learn four rows by heart with labels shifted `times` in all; then the loss of really
    predicting the next byte.
    """
    ids, model = byte_rows(4, 48), byte_model(heads=4)
    loss = partial(SHIFTED[times], model, ids)
    first = float(loss().detach())
    reported = plain_loop(model, _adamw(model), loss, steps=steps)[-1]
    with torch.no_grad():
        true = float(model(ids, labels=ids).loss)
    return {"first_loss": first, "reported": reported, "true": true}


def collator(*, pad_is_eos: bool):
    """Return a tokenizer and the stock collator, which ignores every label that equals the padding
    token.
    """
    tokenizer = text.train_tokenizer(["a b c d e f g h"], vocab_size=300)
    (WrongLabels if pad_is_eos else RightLabels).padding(tokenizer)
    return tokenizer, DataCollatorForLanguageModeling(tokenizer, mlm=False)


def ends(*, pad_is_eos: bool, steps: int = 100) -> dict:
    """Teach a model to continue the alphabet from any letter up to h and stop; then count how often
    it stops.
    """
    tokenizer, collate = collator(pad_is_eos=pad_is_eos)
    draw = torch.Generator().manual_seed(0)
    letters = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "abcdefgh"]

    def batch() -> dict:
        starts = torch.randint(8, (16,), generator=draw).tolist()
        return collate([{"input_ids": letters[i:] + [tokenizer.eos_token_id]} for i in starts])

    model = models.tiny(len(tokenizer), hidden=64, layers=2)
    example = batch()
    taught = int((example["labels"] == tokenizer.eos_token_id).any(dim=1).sum())
    plain_loop(model, _adamw(model), lambda: model(**batch()).loss, steps=steps)
    prompts = torch.tensor(letters)[:, None]
    continued = model.eval().generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    stopped = int((continued[:, 1:] == tokenizer.eos_token_id).any(dim=1).sum())
    after_b = tokenizer.decode(continued[1], skip_special_tokens=True)
    return {
        "rows_with_eos_taught": taught,
        "rows": 16,
        "stopped": stopped,
        "prompts": 8,
        "said": after_b,
    }


def wrong_labels() -> dict:
    return {"twice": shifted(2), "never": shifted(0), "pad_is_eos": ends(pad_is_eos=True)}


def right_labels() -> dict:
    return {"once": shifted(1), "own_pad": ends(pad_is_eos=False)}


def label_faults(facts: dict) -> list[str]:
    """Cases where the reported loss is not the true one, or where the model does not stop."""
    apart = [
        name for name, f in facts.items() if "true" in f and f["true"] > 4 * f["reported"] + 0.5
    ]
    return apart + [
        n for n, f in facts.items() if "stopped" in f and f["stopped"] < f["prompts"] // 2
    ]


# ---------------------------------------------------------------- P43 documents that see each other
RESTART = torch.arange(16).repeat(2)[None]  # position ids that begin again with the second document


def restart_beside_a_mask(model: nn.Module, row: Tensor) -> Tensor:
    positions = torch.arange(16).repeat(2)[None]  # start again with the second document
    ones = torch.ones_like(row)  # at fault: beside a mask, the restart is ignored
    return model(row, position_ids=positions, attention_mask=ones).logits


def restart_alone(model: nn.Module, row: Tensor) -> Tensor:
    positions = torch.arange(16).repeat(2)[None]  # start again with the second document
    return model(row, position_ids=positions, use_cache=False).logits  # no mask


def _positions_run_on(model: nn.Module, row: Tensor) -> Tensor:
    """Only the claimed cause: positions count on through the row, while attention is cut at the
    border.
    """
    documents = torch.block_diag(torch.ones(16, 16), torch.ones(16, 16)).bool().tril()[None, None]
    return model(row, position_ids=torch.arange(32)[None], attention_mask=documents).logits


def packed(predict: Callable[[nn.Module, Tensor], Tensor]) -> dict:
    """Two documents in one row. Exchange the first: how far do the logits of the second move?"""
    model = byte_model(heads=4).eval()
    half = 16
    row = byte_rows(1, 2 * half)
    other = torch.cat([row[:, :half].flip(1), row[:, half:]], dim=1)
    with torch.no_grad():
        one, two = (predict(model, ids)[:, half:] for ids in (row, other))
    return {"moved": float((one - two).abs().max()), "spread": float(one.std())}


# ---------------------------------------------------------------------------- P44 the first KD loss
def kl_by_rows(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    p = teacher_logits.softmax(-1)  # (rows, tokens, V)
    log_q = student_logits.log_softmax(-1)
    return F.kl_div(log_q, p, reduction="batchmean")  # at fault: divides by rows alone


def kl_by_tokens(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    p = teacher_logits.softmax(-1).flatten(0, 1)  # (rows * tokens, V)
    log_q = student_logits.log_softmax(-1).flatten(0, 1)
    return F.kl_div(log_q, p, reduction="batchmean")  # divides by all tokens


def first_kd_loss(*, flatten: bool = True) -> dict:
    """Distil a short-trained teacher into a fresh student: the loss before any step, and what it
    should be.
    """
    ids = byte_rows(8, 48)
    teacher, student = byte_model(heads=4), byte_model(heads=4, seed=1)
    plain_loop(teacher, _adamw(teacher), lambda: teacher(ids, labels=ids).loss, steps=40)
    models.as_teacher(teacher)
    with torch.no_grad():
        theirs, mine = teacher(ids).logits, student(ids).logits
    p = theirs.softmax(-1)  # (B, T, V)
    entropy = float(-(p * p.log()).sum(-1).mean())
    measured = (kl_by_tokens if flatten else kl_by_rows)(theirs, mine)
    return {
        "measured": float(measured),
        "ln_V_minus_entropy": math.log(VOCABULARY) - entropy,
        "ln_V": math.log(VOCABULARY),
        "teacher_entropy": entropy,
    }


def _unexpected(facts: dict) -> bool:
    return abs(facts["measured"] / facts["ln_V_minus_entropy"] - 1) > 0.15


# ----------------------------------------------------------------------------- P45 loading the data
class Slow(Dataset):
    """Items that wait for something outside the process, as a disk or a decoder would make them."""

    def __init__(self, rows: Sequence, seconds: float):
        self.rows, self.seconds = rows, seconds

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int):
        if self.seconds:
            time.sleep(self.seconds)
        return self.rows[i]


def epoch_with_workers(dataset: Dataset) -> None:
    loader = DataLoader(dataset, batch_size=16, num_workers=2)  # at fault: slower
    for _ in loader:  # two processes start, and every batch is copied out of them
        pass


def epoch_of_slices(rows: Tensor) -> None:
    for part in torch.randperm(len(rows)).split(16):
        rows[part]  # a batch, made in this process


def _seconds(epoch: Callable[[], None]) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about worker counts and forks, both chosen here
        started = time.perf_counter()
        epoch()
    return time.perf_counter() - started


def load_epoch(*, workers: int, seconds_per_item: float = 0.0) -> float:
    """Seconds for one epoch of 256 rows in batches of 16."""
    data = Slow(byte_rows(256, 64), seconds_per_item)
    return _seconds(lambda: [None for _ in DataLoader(data, batch_size=16, num_workers=workers)])


def waiting(*, seconds_per_item: float, seconds_per_step: float = 5e-3) -> dict:
    """Return a loop whose step takes five milliseconds: how much of its time goes into waiting for
    the next batch?
    """
    waited, started = 0.0, time.perf_counter()
    batches = iter(DataLoader(Slow(byte_rows(256, 64), seconds_per_item), batch_size=16))
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        time.sleep(seconds_per_step)  # a device that is busy with the step
    total = time.perf_counter() - started
    warning = guards.starved(waited, total, at_least=0.0)
    return {
        "ms_per_item": 1e3 * seconds_per_item,
        "share_waiting": waited / total,
        "guard": warning or "quiet",
    }


def too_many_workers() -> dict:
    data = Slow(byte_rows(256, 64), 0.0)
    return {
        "workers": 2,
        "over_none": _seconds(lambda: epoch_with_workers(data)) / load_epoch(workers=0),
    }


def slow_items() -> dict:
    """Only the claimed cause: items that are slow to make. Here workers help."""
    item = dict(seconds_per_item=2e-3)
    return {
        "workers": 2,
        "over_none": load_epoch(workers=2, **item) / load_epoch(workers=0, **item),
    }


def sliced_tensors() -> dict:
    rows = byte_rows(256, 64)
    return {
        "workers": 0,
        "over_none": _seconds(lambda: epoch_of_slices(rows)) / load_epoch(workers=0),
    }


PITFALLS = [
    Pitfall(
        id="P42",
        title="Labels shifted twice or never, and padding that equals the end of text",
        symptom="the training loss is excellent and the model talks nonsense, or never stops",
        claim="",
        verdict="Each fault passes the overfit test. A transformers model shifts labels by "
        "itself, so labels shifted "
        "before teach it the token after the next. With a loss of your own and no shift, it "
        "learns to copy. With "
        "padding equal to the end of text, the stock collator ignores every end of text, so "
        "nothing teaches the model "
        f"to stop. Seen with {VERSIONS}.",
        fix="labels = input_ids and one shift; a padding token of its own; look at a loss "
        "computed from the ids alone",
        broken=wrong_labels,
        fixed=right_labels,
        seen=lambda facts: bool(label_faults(facts)),
        check="F17",
        slow=True,
        wrong=WrongLabels,
        right=RightLabels,
    ),
    Pitfall(
        id="P43",
        title="Packed documents that see each other",
        symptom="exchanging one document of a packed row changes the predictions in the next",
        claim="the position ids count on through the row instead of beginning again",
        verdict="Positions that count on leak nothing when attention is cut between the "
        "documents: attention is what "
        "leaks. Transformers cuts it where the positions start again, but not when an "
        "attention mask (even of ones) "
        f"or a KV cache is passed too. Seen with {VERSIONS} and SDPA.",
        fix="position_ids that start again, no attention_mask, use_cache=False",
        broken=lambda: packed(restart_beside_a_mask),
        fixed=lambda: packed(restart_alone),
        claimed=lambda: packed(_positions_run_on),
        seen=lambda facts: facts["moved"] > 1e-3 * facts["spread"],
        check="F12",
        wrong=restart_beside_a_mask,
        right=restart_alone,
    ),
    Pitfall(
        id="P44",
        title="The first loss is compared with the wrong number",
        symptom="the distillation loss starts tens of times too high, or simply not at ln V",
        claim="",
        verdict="The loss is T times too large for rows of T tokens: on (rows, tokens, V), "
        "`batchmean` divides by the "
        "rows alone. Divided by all tokens it starts near ln V minus the teacher's entropy. "
        "Only cross-entropy starts "
        f"at ln V. Seen with {VERSIONS}.",
        fix="flatten to (rows * tokens, V) before `batchmean`, and expect ln V - H(teacher)",
        broken=lambda: first_kd_loss(flatten=False),
        fixed=first_kd_loss,
        seen=_unexpected,
        check="F3",
        wrong=kl_by_rows,
        right=kl_by_tokens,
    ),
    Pitfall(
        id="P45",
        title="Workers that cost more than they fetch",
        symptom="an epoch over a small dataset takes seconds, and more workers make it slower",
        claim="items are slow to make, so there are too few workers",
        verdict="Workers make this epoch many times slower, because its rows are in memory: "
        "nearly all the time goes "
        "into starting processes and passing batches between them. Where each item waits for a "
        "disk or a decoder, "
        f"workers do help. Seen with {VERSIONS}.",
        fix="index tensors that fit in memory; use workers, kept alive, where items really are "
        "slow",
        broken=too_many_workers,
        fixed=sliced_tensors,
        claimed=slow_items,
        seen=lambda facts: facts["over_none"] > 2,
        wrong=epoch_with_workers,
        right=epoch_of_slices,
    ),
]
