"""A recurrent layer, or attention, without batch_first whose input has rows first, of words that
are named one by one.

    ids = torch.stack(rows)  (or data[index])           (B, T)
    nn.LSTM(...)(table(ids))                            takes (T, B, E): it runs along the batch
    for ids, tags in loader: encoder(table(ids) + pos)  the same of nn.TransformerEncoderLayer

S21 is told by the shape of the loss; where a label for each word is flattened, (B * T) rows tell
nothing. But ids that were stacked from rows of words (by a loader, too), or picked by an index,
have a row in each place of their first dimension.

Footgun: steps of time are stacked too, but those are rows of features, or are transposed
afterwards. And a table may have attention between its columns and between its rows, on purpose: one
takes (a, b, E), another (b, a, E).
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher

NETWORKS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
ATTENTION = "multi_head_attention_forward"
KEPT = {"embedding", "dropout", "to", "long", "add", "mul", "layer_norm"}
LEAST = 4  # rows


class RowsFirst(Watcher):
    """Known are ids (B, T), and what a table gave for them."""

    begins = {"stack", "__getitem__", ATTENTION}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.found: tuple[str, tuple] | None = None  # in this step
        self.sizes: set[tuple] = set()  # that attention was given

    def saw(self, op: Op) -> None:
        result = op.result
        if op.name == ATTENTION:
            self.sizes.add(tuple(op.given[0].shape[:2]))
            if op.given[0].dim() == 3 and self.known.get(op.given[0]):
                self.found = self.found or ("nn.MultiheadAttention", tuple(op.given[0].shape))
        elif op.name in NETWORKS:
            if op.args[-1] is False and self.known.get(op.given[0]):
                self.found = self.found or (f"nn.{op.name.upper()}", tuple(op.given[0].shape))
        elif not isinstance(result, Tensor) or result.dim() < 2 or len(result) < LEAST:
            return
        elif op.name == "stack" and not result.is_floating_point() and _row(op.given[0]):
            self.known.put(result, True)
        elif (
            op.name == "__getitem__" and len(op.given) == 2 and not op.given[0].is_floating_point()
        ):
            index = op.given[1]
            fits = (
                op.args[1] is index
                and index.dim() == 1
                and not index.is_floating_point()
                and op.given[0].dim() == 2
            )
            if fits and not bool((index.diff() == 1).all()):  # or it is a window of time
                self.known.put(result, True)
        elif op.name in KEPT and any(
            self.known.get(t) and t.shape[:2] == result.shape[:2] for t in op.given
        ):
            self.known.put(result, True)
        elif (
            op.name == "__getitem__"
            and self.known.get(op.given[0])
            and result.dim() == op.given[0].dim()
        ):
            if len(op.given) == 1 and len(result) == len(op.given[0]):
                self.known.put(result, True)  # windows[:, :-1]

    def backward(self, loss: Tensor) -> None:
        if any(a != b and (b, a) in self.sizes for a, b in self.sizes):
            self.note("both axes", True)
        if self.found is not None:
            self.note("S21", self.found)
        self.found, self.sizes = None, set()

    def close(self) -> None:
        self.known.by_id.clear()


def _row(t: Tensor) -> bool:
    """Return a piece of something longer, and not what a step of time has made."""
    return t.dim() == 1 and (t._base is None or t._base.numel() > t.numel())
