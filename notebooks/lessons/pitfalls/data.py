"""P42 to P45: data that is not what the model takes it for.

Labels shifted once too often or not at all, an end of text that the model is never taught, packed documents that read
each other, a first loss compared with the wrong number, workers that cost more time than they save. None of them
raises, and none keeps the training loss from falling.

Footgun: with `labels=` a transformers model shifts by itself. Whoever prepares shifted labels has shifted twice.
"""

import math
import time
import warnings

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling

from lessons.pitfalls import Pitfall
from lessons.pitfalls.bench import VOCABULARY, byte_model, byte_rows, plain_loop
from nblib import guards, models, text


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


# -------------------------------------------------------------------------------------- P42 labels, shifted and masked
def shifted(times: int, *, steps: int = 120) -> dict:
    """Learn four rows by heart with labels shifted `times` in all; then the loss of really predicting the next byte."""
    ids, model = byte_rows(4, 48), byte_model(heads=4)
    ahead = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)  # what a careful collator prepares

    def loss() -> Tensor:
        if times == 0:  # a loss of one's own on what the model returns
            return F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())
        return model(ids, labels=ids if times == 1 else ahead).loss  # the model shifts, once more

    first = float(loss().detach())
    reported = plain_loop(model, _adamw(model), loss, steps=steps)[-1]
    with torch.no_grad():
        true = float(model(ids, labels=ids).loss)
    return {"first_loss": first, "reported": reported, "true": true}


def collator(*, pad_is_eos: bool):
    """A tokenizer and the stock collator, which ignores every label that equals the padding token."""
    tokenizer = text.train_tokenizer(["a b c d e f g h"], vocab_size=300)
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, DataCollatorForLanguageModeling(tokenizer, mlm=False)


def ends(*, pad_is_eos: bool, steps: int = 100) -> dict:
    """Teach a model to continue the alphabet from any letter up to h and stop; then count how often it stops."""
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
    return {"rows_with_eos_taught": taught, "rows": 16, "stopped": stopped, "prompts": 8, "said": after_b}


def wrong_labels() -> dict:
    return {"twice": shifted(2), "never": shifted(0), "pad_is_eos": ends(pad_is_eos=True)}


def right_labels() -> dict:
    return {"once": shifted(1), "own_pad": ends(pad_is_eos=False)}


def label_faults(facts: dict) -> list[str]:
    """Cases where the reported loss is not the true one, or the model cannot stop."""
    apart = [name for name, f in facts.items() if "true" in f and f["true"] > 4 * f["reported"] + 0.5]
    return apart + [n for n, f in facts.items() if "stopped" in f and f["stopped"] < f["prompts"] // 2]


# ------------------------------------------------------------------------------------ P43 documents that see each other
def packed(**inputs) -> dict:
    """Two documents in one row. Exchange the first; how far do the logits of the second move?"""
    model = byte_model(heads=4).eval()
    half = 16
    row = byte_rows(1, 2 * half)
    other = torch.cat([row[:, :half].flip(1), row[:, half:]], dim=1)
    with torch.no_grad():
        one, two = (model(ids, **inputs).logits[:, half:] for ids in (row, other))
    return {"moved": float((one - two).abs().max()), "spread": float(one.std())}


RESTART = torch.arange(16).repeat(2)[None]  # position ids that begin again with the second document


def positions_run_on() -> dict:
    """Only the claimed cause: positions count on through the row, while attention is cut at the border."""
    documents = torch.block_diag(torch.ones(16, 16), torch.ones(16, 16)).bool().tril()[None, None]
    return packed(position_ids=torch.arange(32)[None], attention_mask=documents)


# --------------------------------------------------------------------------------------------- P44 the first KD loss
def first_kd_loss(*, flatten: bool = True) -> dict:
    """Distil a short-trained teacher into a fresh student: the loss before any step, and what it should be."""
    ids = byte_rows(8, 48)
    teacher, student = byte_model(heads=4), byte_model(heads=4, seed=1)
    plain_loop(teacher, _adamw(teacher), lambda: teacher(ids, labels=ids).loss, steps=40)
    models.as_teacher(teacher)
    with torch.no_grad():
        p = teacher(ids).logits.softmax(-1)  # (B, T, V)
        log_q = student(ids).logits.log_softmax(-1)
    entropy = float(-(p * p.log()).sum(-1).mean())
    if flatten:
        p, log_q = p.flatten(0, 1), log_q.flatten(0, 1)  # (B*T, V): batchmean divides by the first size only
    measured = F.kl_div(log_q, p, reduction="batchmean")
    return {
        "measured": float(measured),
        "ln_V_minus_entropy": math.log(VOCABULARY) - entropy,
        "ln_V": math.log(VOCABULARY),
        "teacher_entropy": entropy,
    }


def _unexpected(facts: dict) -> bool:
    return abs(facts["measured"] / facts["ln_V_minus_entropy"] - 1) > 0.15


# ------------------------------------------------------------------------------------------------ P45 loading the data
class _Slow(torch.utils.data.Dataset):
    """Items that wait for something outside the process, as a disk or a decoder would make them."""

    def __init__(self, rows: Tensor, seconds: float):
        self.rows, self.seconds = rows, seconds

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return self.rows[i]


def load_epoch(*, workers: int, seconds_per_item: float = 0.0) -> float:
    """Seconds for one epoch of 256 rows in batches of 16."""
    data = _Slow(byte_rows(256, 64), seconds_per_item)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about worker counts and forks, both chosen here
        started = time.perf_counter()
        for _ in DataLoader(data, batch_size=16, num_workers=workers):
            pass
    return time.perf_counter() - started


def waiting(*, seconds_per_item: float, seconds_per_step: float = 5e-3) -> dict:
    """A loop whose step takes five milliseconds: how much of its time goes into waiting for the next batch?"""
    waited, started = 0.0, time.perf_counter()
    batches = iter(DataLoader(_Slow(byte_rows(256, 64), seconds_per_item), batch_size=16))
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        time.sleep(seconds_per_step)  # a device that is busy with the step
    total = time.perf_counter() - started
    warning = guards.starved(waited, total, at_least=0.0)
    return {"ms_per_item": 1e3 * seconds_per_item, "share_waiting": waited / total, "guard": warning or "quiet"}


def slow_items() -> dict:
    """Only the claimed cause: items that are slow to make, where workers do what they are for."""
    item = dict(seconds_per_item=2e-3)
    return {"workers": 2, "over_none": load_epoch(workers=2, **item) / load_epoch(workers=0, **item)}


def sliced_tensors() -> dict:
    rows, started = byte_rows(256, 64), time.perf_counter()
    for part in torch.randperm(len(rows)).split(16):
        rows[part]
    return {"workers": 0, "over_none": (time.perf_counter() - started) / load_epoch(workers=0)}


PITFALLS = [
    Pitfall(
        id="P42",
        title="Labels shifted twice or not at all, and an end of text that is padding",
        symptom="the training loss is excellent and the model talks nonsense, or never stops",
        claim="",
        verdict="the model shifts by itself: shifted before, it learns two ahead; with a loss of one's own and no "
        "shift, it learns to copy. With pad equal to eos the stock collator ignores every end of text, so nothing "
        "teaches the model to stop. The overfit test passes each time (transformers 5.23).",
        fix="labels = input_ids and one shift; a padding token of its own; look at a loss computed from the ids alone",
        broken=wrong_labels,
        fixed=right_labels,
        seen=lambda facts: bool(label_faults(facts)),
        check="F17",
        slow=True,
    ),
    Pitfall(
        id="P43",
        title="Packed documents that see each other",
        symptom="exchanging one document of a packed row changes the predictions in the next",
        claim="the position ids count on through the row instead of beginning again",
        verdict="what leaks is attention. Positions that restart make transformers cut it at the border, unless a mask "
        "of ones (or a KV cache) is passed too: then the restart is ignored. With attention cut, positions that run on "
        "leak nothing (transformers 5.23, SDPA).",
        fix="position_ids that restart, no attention_mask, use_cache=False",
        broken=lambda: packed(position_ids=RESTART, attention_mask=torch.ones(1, 32, dtype=torch.long)),
        fixed=lambda: packed(position_ids=RESTART, use_cache=False),
        claimed=positions_run_on,
        seen=lambda facts: facts["moved"] > 1e-3 * facts["spread"],
        check="F12",
    ),
    Pitfall(
        id="P44",
        title="The first loss is compared with the wrong number",
        symptom="the distillation loss starts tens of times too high, or simply not at ln V",
        claim="",
        verdict="cross-entropy starts at ln V, distillation at ln V minus the entropy of the teacher. `batchmean` on "
        "(B, T, V) divides by B only, so the loss is T times too large (torch 2.13).",
        fix="flatten to (B*T, V) before `batchmean`, and expect ln V - H(teacher)",
        broken=lambda: first_kd_loss(flatten=False),
        fixed=first_kd_loss,
        seen=_unexpected,
        check="F3",
    ),
    Pitfall(
        id="P45",
        title="Workers that cost more than they fetch",
        symptom="an epoch over a small dataset takes seconds, and more workers make it slower",
        claim="items are slow to make, so there are too few workers",
        verdict="workers pay for starting and for passing every item between processes. For rows already in memory "
        "that is nearly all the time; where each item waits for a disk or a decoder they do help (torch 2.13).",
        fix="index tensors that fit in memory; use workers, kept alive, where items really are slow",
        broken=lambda: {"workers": 2, "over_none": load_epoch(workers=2) / load_epoch(workers=0)},
        fixed=sliced_tensors,
        claimed=slow_items,
        seen=lambda facts: facts["over_none"] > 2,
    ),
]
