"""Batches on their way to the device: counted on the host, copied without a wait, fetched ahead
while a card works.

A card works through a queue that the host fills. It is fast as long as the host waits for no
answer, because every answer comes only when the queue is empty. Which tokens a step supervises is a
question about labels; batch.py answers it before they travel.

A copy from ordinary memory waits too. From pinned memory it is one more entry in the queue.
`input_ids` and `labels` that are one tensor travel once, and are two on the device, so that a loss
that changes one does not change the other.

Footgun: the batches of the next step are fetched before this step's checkpoint is written, so their
own position is one step ahead. `DeviceBatches.state_dict()` is the position that belongs to the
checkpoint. Batches without a `state_dict` may draw from the global generators, which are in the
checkpoint: those are not fetched ahead.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from nblib.batch import Batch


class DeviceBatches:
    """The micro-batches of one step after the other: `micro, tokens = next(batches)`, on the device
    and counted.

    `shard_rows` takes this process's rows out of a batch, unless the batches have a `world` and do
    it themselves.
    """

    def __init__(
        self,
        batches: Iterator[Mapping[str, Tensor]],
        *,
        accumulate: int,
        device: torch.device,
        shard_rows: Callable = dict,
    ):
        self.batches = batches
        self.accumulate = accumulate
        self.device = device
        self.shard_rows = shard_rows if getattr(batches, "world", 1) == 1 else dict
        self.ahead: list[Batch] = []  # of the next step, still on the host
        self.position = None  # of the batches, before those were fetched
        self.early = device.type == "cuda" and hasattr(batches, "state_dict")
        if hasattr(batches, "state_dict"):
            self.state_dict = self._position
            self.load_state_dict = self._go_to

    def __next__(self) -> tuple[list[Batch], int]:
        micro = self.ahead or self._fetch()
        self.ahead = []
        self.position = None
        tokens = sum(batch.tokens for batch in micro)
        return [to_device(batch, self.device) for batch in micro], tokens

    def fetch_ahead(self) -> None:
        """Fetch the next step's batches.

        Call it when the card has all its work, before the host waits for numbers.
        """
        if self.early:
            self.position = self.batches.state_dict()
            self.ahead = self._fetch()

    def _fetch(self) -> list[Batch]:
        return [Batch.of(self.shard_rows(next(self.batches))) for _ in range(self.accumulate)]

    def _position(self) -> dict:
        return self.batches.state_dict() if self.position is None else self.position

    def _go_to(self, position: dict) -> None:
        self.batches.load_state_dict(position)
        self.ahead = []
        self.position = None


def to_device(batch: Batch | Mapping[str, Tensor], device: torch.device) -> Batch:
    """Return the batch on the device.

    What is one tensor travels once, and becomes a tensor for each name.
    """
    batch = Batch.of(batch)
    copies: dict[int, Tensor] = {}  # by the tensor that is copied

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) in copies:
            return copies[id(tensor)].clone()
        source = tensor
        if device.type == "cuda" and tensor.device.type == "cpu":
            source = tensor.pin_memory()
        moved = source.to(device, non_blocking=True)
        copies[id(tensor)] = moved
        return moved.view_as(moved)  # an object of its own, also where nothing had to be copied

    return batch.moved(copied)
