"""Batches on their way to the device: decided on the host, copied without a wait, fetched ahead while a card works.

A card works through a queue that the host fills. It is fast as long as the host never asks it anything, because every
answer waits until the queue is empty. How many tokens a step supervises, and which rows, are questions about labels.
Asked of the labels on the card they are two waits per micro-batch; asked of the same labels before they travel they
are free. So `Feed` counts here, and leaves the rows with the labels as `labels.rows` (losses.rows_of reads it).

A copy from ordinary memory waits too. From pinned memory it is one more entry in the queue. `input_ids` and `labels`
that are one tensor travel once.

Footgun: the batches of the next step are fetched before this step's checkpoint is written, so their own position is one
step ahead. `Feed.state_dict()` is the position that belongs to the checkpoint. Batches without a `state_dict` may draw
from the global generators, which are in the checkpoint: those are not fetched ahead.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nblib import losses
from nblib.losses import Batch


class Feed:
    """The micro-batches of one step after the other: `micro, tokens = next(feed)`, on the device and counted. `deal`
    takes this process's rows out of a batch, unless the batches are told their `rank` and `world` and do it alone."""

    def __init__(self, batches: Iterator[Batch], *, accumulate: int, device: torch.device, deal: Callable = dict):
        self.batches, self.accumulate, self.device = batches, accumulate, device
        self.deal = deal if getattr(batches, "world", 1) == 1 else dict  # as it is
        self.ahead: list[Batch] = []  # of the next step, still on the host
        self.position = None  # of the batches, before those were fetched
        self.early = device.type == "cuda" and hasattr(batches, "state_dict")
        if hasattr(batches, "state_dict"):
            self.state_dict, self.load_state_dict = self._position, self._go_to

    def __next__(self) -> tuple[list[Batch], int]:
        micro = self.ahead or self._fetch()
        self.ahead, self.position = [], None
        tokens = sum(int(losses.supervised(batch["labels"])) for batch in micro)
        return [to_device(batch, self.device) for batch in micro], tokens

    def fetch_ahead(self) -> None:
        """Call it when the card has all its work for this step, before the host waits for the numbers."""
        if self.early:
            self.position = self.batches.state_dict()
            self.ahead = self._fetch()

    def _fetch(self) -> list[Batch]:
        return [self.deal(next(self.batches)) for _ in range(self.accumulate)]

    def _position(self) -> dict:
        return self.batches.state_dict() if self.position is None else self.position

    def _go_to(self, position: dict) -> None:
        self.batches.load_state_dict(position)
        self.ahead, self.position = [], None


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, with what its loss would otherwise have to ask: which rows the labels supervise, and
    whether the mask leaves anything out."""
    copies: dict[int, Tensor] = {}  # by the tensor that is copied

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
            copies[id(tensor)] = pinned.to(device, non_blocking=True)
        return copies[id(tensor)].view_as(tensor)  # an object of its own: input_ids may be the same tensor as labels

    moved, rows = {name: copied(tensor) for name, tensor in batch.items()}, losses.rows_to_learn(batch["labels"])
    moved["labels"].rows = rows if isinstance(rows, slice) else copied(rows)
    if "attention_mask" in batch:
        moved["attention_mask"].whole = bool(batch["attention_mask"].all())
    return moved
