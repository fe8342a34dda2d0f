"""P73: a step that waits. It asks the card for numbers while there is still work to launch.

A card works through a queue that the host fills. `loss.item()`, `if tensor:`, `int(mask.sum())` and
a mask as an index need an answer, so the host waits until the queue is empty, and launches nothing
meanwhile. On a CPU every operation is done when it returns, so a wait costs nothing there and no
clock shows it. Here the waits are counted: `Waits` stands below autograd, where each question
arrives as one of a few operations. The rules are those of the CUDA sources.

What cannot be measured here are the seconds that it costs on a card. They depend on how much work a
launch brings: most in small models, little behind large products.

Footgun: questions that the host asks of its own tensors are free. They belong in front of the step,
where nothing is counted: each batch below brings the number of its supervised tokens with it.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lessons.pitfalls import VERSIONS, Pitfall
from lessons.pitfalls.bench import byte_model
from lessons.pitfalls.data import Slow
from lessons.pitfalls.loop import RAGGED, micro_batches
from nblib import hf_forward, losses

aten = torch.ops.aten
NUMBERS = {aten._local_scalar_dense, aten.equal}
SIZES = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.bincount}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Waits(TorchDispatchMode):
    """Inside, counts what would make the host wait if all tensors were on a card: by kind, and by
    line.
    """

    def __init__(self):
        super().__init__()
        self.kinds: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        packet = op.overloadpacket
        if packet in NUMBERS:
            self._note("a number")
        elif packet in SIZES:
            self._note("a size")
        elif packet in INDEXED:
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    self._note("a mask as an index")
        return op(*args, **(kwargs or {}))

    def _note(self, kind: str) -> None:
        self.kinds[kind] += 1
        frame = sys._getframe(2)
        while "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        self.lines[f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name}"] += 1


def asked_on_the_way(model: nn.Module, batches: list[dict]) -> float:
    total, tokens = 0.0, sum(batch["tokens"] for batch in batches)
    for batch in batches:
        learn = batch["targets"] != losses.IGNORED
        logits = model(batch["input_ids"]).logits[learn]  # at fault: a mask is counted
        loss = F.cross_entropy(logits, batch["targets"][learn])  # and another one
        if not loss.isfinite():  # at fault: a number
            continue
        loss = loss * (int(learn.sum()) / tokens)  # at fault: a number
        loss.backward()
        total += loss.item()  # at fault: a number
    return total


def asked_at_the_end(model: nn.Module, batches: list[dict]) -> float:
    total, tokens = 0.0, sum(batch["tokens"] for batch in batches)
    for batch in batches:
        with hf_forward.assume_unpacked_rows():  # or transformers asks the positions
            logits = model(batch["input_ids"]).logits.flatten(0, 1)
        targets = batch["targets"].flatten()
        loss = F.cross_entropy(logits, targets, reduction="sum") / tokens
        loss.backward()
        total += loss.detach()
    return total.item()  # the one number, before the update


def _batches(*, workers: int = 0, seconds_per_item: float = 0.0) -> list[dict]:
    """Micro-batches of one row, as a loader gives them; their tokens were counted on the host."""
    rows = [
        batch | {"targets": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)}
        for batch in micro_batches(RAGGED)
    ]
    rows = [row | {"tokens": int(losses.supervised(row["labels"]))} for row in rows]
    return list(DataLoader(Slow(rows, seconds_per_item), batch_size=None, num_workers=workers))


def counted(step, **loader) -> dict:
    """One step on four micro-batches: what it asks, and what it does."""
    model, batches = byte_model(heads=4), _batches(**loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with Waits() as waits:
        loss = step(model, batches)
        optimizer.step()
    return {
        "waits of one step": waits.kinds.total(),
        "micro-batches": len(batches),
        "for": dict(waits.kinds),
        "of these in transformers": sum(
            n for line, n in waits.lines.items() if line.startswith("masking_utils")
        ),
        "loss": loss,
    }


def waiting() -> dict:
    """Return the lines at fault; and the same ones fed by two workers."""
    fed = counted(asked_on_the_way, workers=2)
    return counted(asked_on_the_way) | {
        "waits of one step, fed by two workers": fed["waits of one step"]
    }


PITFALLS = [
    Pitfall(
        id="P73",
        title="The step that waits",
        symptom="The card is idle for part of each step: a smaller batch is hardly faster, and "
        "one core is fully busy.",
        claim="the loader is too slow; it needs more workers (folklore)",
        verdict="With workers the step asks as often as without. A slow loader, alone, makes "
        "it wait for data and not "
        "for the card. The questions on the way do: each is answered when the card has done "
        "all that was "
        "launched, and nothing is launched meanwhile. transformers asks one, too, in every "
        "forward pass without a "
        "mask. The loss is the same when all are asked at the end. A CPU shows the count and "
        "no time; what it costs "
        f"on a card was not measured here. Seen on {VERSIONS}.",
        fix="Ask labels and masks on the host before the batch travels. Add up losses as "
        "tensors and read them once "
        'per step. On a card, `torch.cuda.set_sync_debug_mode("warn")` names every wait, and '
        "N19 of the doctor counts "
        "those of your own lines.",
        broken=waiting,
        claimed=lambda: counted(asked_at_the_end, seconds_per_item=5e-3),
        fixed=lambda: counted(asked_at_the_end),
        seen=lambda facts: facts["waits of one step"] > 1,
        slow=True,
        wrong=asked_on_the_way,
        right=asked_at_the_end,
    ),
]
