"""A batch of rows: token ids, labels, and which tokens the labels supervise, decided once on the
host.

    batch = Batch.of({"input_ids": ids, "labels": labels})   ids and labels (B, T)
    batch.supervised                                         the rows of labels[:, 1:] that count
    model(**batch), batch["labels"], batch.get(...)          a batch reads like the mapping that it
    was made of

How many tokens a step supervises, and which, are questions about labels. Asked of labels on a card
they are two waits for each micro-batch; asked before the labels travel they are free. So they are
answered here, and the batch is frozen: other labels are another batch (`with_labels`). A mask that
leaves nothing out is no mask, so `mask` is None.

Footgun: frozen are the names and not the numbers. `batch.labels[:, :16] = -100` changes labels that
were counted. The loop compares the counts before it updates the weights, and raises with both.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

IGNORED = -100  # a label that no loss looks at
NAMES = {"input_ids": "ids", "labels": "labels", "attention_mask": "mask"}

Rows = slice | Tensor  # of the B * (T - 1) shifted rows: all of them, or their numbers


def supervised_rows(labels: Tensor) -> Rows:
    """Return which of the B * (T - 1) shifted rows are supervised.

    Waits for a card if the labels are there.
    """
    keep = (labels[:, 1:] != IGNORED).flatten()
    if bool(keep.all()):
        return slice(None)
    return keep.nonzero().squeeze(1)


@dataclass(frozen=True, eq=False)
class Batch(Mapping[str, Tensor]):
    """Rows of token ids with their labels.

    ids         (B, T), or None where the model takes something else, which is in `more`
    labels      (B, T); position t predicts label t + 1, and IGNORED is not supervised
    mask        (B, T), or None where nothing is left out
    supervised  which of the B * (T - 1) shifted rows the labels supervise
    more        what else the model or the loss takes: position_ids, a teacher's answers
    """

    ids: Tensor | None
    labels: Tensor
    mask: Tensor | None = None
    supervised: Rows = field(default_factory=lambda: slice(None))
    more: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Batch":
        """Make a batch of a mapping with `labels`; return a batch as it is."""
        if isinstance(tensors, Batch):
            return tensors
        if "labels" not in tensors:
            held = ", ".join(map(str, tensors)) or "nothing"
            raise ValueError(
                "a batch needs labels, as input_ids and labels of shape (rows, length); "
                f"it has {held}"
            )
        labels = tensors["labels"]
        mask = tensors.get("attention_mask")
        if mask is not None and bool(mask.all()):
            mask = None
        more = {name: tensor for name, tensor in tensors.items() if name not in NAMES}
        return cls(tensors.get("input_ids"), labels, mask, supervised_rows(labels), more)

    @property
    def tokens(self) -> int:
        """How many tokens the labels supervise; no card is asked."""
        if isinstance(self.supervised, slice):
            return self.labels.shape[0] * (self.labels.shape[1] - 1)
        return len(self.supervised)

    def with_labels(self, labels: Tensor) -> "Batch":
        """Return the batch with other labels, counted again."""
        return replace(self, labels=labels, supervised=supervised_rows(labels))

    def moved(self, copy: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with every tensor copied by a function; what was counted stays."""
        return Batch(
            ids=None if self.ids is None else copy(self.ids),
            labels=copy(self.labels),
            mask=None if self.mask is None else copy(self.mask),
            supervised=self.supervised
            if isinstance(self.supervised, slice)
            else copy(self.supervised),
            more={name: copy(tensor) for name, tensor in self.more.items()},
        )

    def __getitem__(self, name: str) -> Tensor:
        if name not in NAMES:
            return self.more[name]
        tensor = getattr(self, NAMES[name])
        if tensor is None:
            raise KeyError(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        for name, attribute in NAMES.items():
            if getattr(self, attribute) is not None:
                yield name
        yield from self.more

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __or__(self, others: Mapping[str, Tensor]) -> "Batch":
        """Return the batch with some tensors replaced or added; the labels are counted again only
        if they are new.
        """
        if "labels" in others or "attention_mask" in others:
            return Batch.of({**self, **others})
        more = {name: tensor for name, tensor in others.items() if name != "input_ids"}
        return replace(self, ids=others.get("input_ids", self.ids), more={**self.more, **more})
