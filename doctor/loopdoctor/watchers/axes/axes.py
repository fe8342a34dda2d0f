"""Axes that were regrouped where they were meant to change places: `x.reshape(B, F, T)` of an x of
shape (B, T, F).

    x.transpose(1, 2)[b, f, t] is x[b, t, f]
    x.reshape(B, F, T)[b, f, t] is the number that stands at place f * T + t of the row, of another
    time and feature

Both give the same shape, so nothing is raised. The numbers of a row stay in the row, so a network
still learns something.

The output of a detector's last convolution is known too, where its channels go last by a view
alone, that of a segmenter, `logits.view(-1, C)` of (B, C, H, W), and the states of a recurrent
network, `h_n.view(B, -1)` of an h_n of shape (2, B, H). And so are the patches of a picture,
`x.reshape(B, (H // p) * (W // p), C * p * p)`, where pieces of lines come out, the pixels of a
larger one, `x.view(B, C, H * r, W * r)` of (B, C * r * r, H, W), the channels of series,
`x.reshape(B * C, T)` of (B, T, C), and the heads of attention, `y.reshape(B, T, H * D)` of (B, H,
T, D), or `q.view(B, H, T, D)` of (B, T, H * D), where both queries and keys are split so.

Footgun: sizes of 1 and equal sizes move nothing that could be seen, and a reshape to other sizes is
meant as one. Lines of a picture may be the rows of a sequence. And rows that are laid flat or cut
back again were groups in their order (in_order.py). What attention was given just as a linear layer
gave it (no transpose, and features that were not cut) were windows and no heads.
"""

import torch
from torch import Tensor, nn

from loopdoctor.eye import Eye, Op, Watcher, place
from loopdoctor.fed import VIEWS, kind, shape_of
from loopdoctor.watchers.axes.in_order import InOrder

NAMES = {"reshape", "view", "view_as", "reshape_as"}
SERIES, LOOKED = 8, 2**21  # places; numbers


class Axes(Watcher):
    begins = NAMES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.groups = InOrder(self)
        # since the last backward: heads that come before the places by a view alone
        self.split: list[tuple] = []

    def backward(self, loss: Tensor) -> None:
        self.groups.tell()
        split, self.split = self.split, []
        if fact := next((fact for fact in split if split.count(fact) > 1), None):
            self.note("F30", fact)

    def close(self) -> None:
        self.groups.known.by_id.clear()

    def saw(self, op: Op) -> None:
        self.groups.saw(op)
        if op.name not in NAMES or not isinstance(op.result, Tensor) or not op.given:
            return
        x = op.given[0]
        if isinstance(x, nn.Parameter) or x.shape == op.result.shape:
            return
        if _split(x, op.result) and place() is not None:
            self.split.append((op.name, tuple(x.shape), tuple(op.result.shape), False))
        before, after = ([size for size in t.shape if size > 1] for t in (x, op.result))
        apart = (
            before != after
            and sorted(before) == sorted(after)
            or _cells(x, op.result)
            or _states(x, op.result)
        )
        apart = (
            apart
            or _pixels(x, op.result)
            or _larger(x, op.result)
            or _folded(x, op.result)
            or _heads(x, op.result)
        )
        patches = not apart and _patches(x, op.result)
        if (apart or patches) and place() is not None:
            fact = op.name, tuple(x.shape), tuple(op.result.shape), patches
            if x.dim() == op.result.dim() == 3 and x.shape[2] == op.result.shape[2]:
                if not self.groups.returns(x, op.result):
                    self.groups.begin(op.result, "F30", fact, before=x)
            else:
                self.note("F30", fact)


def _states(x: Tensor, result: Tensor) -> bool:
    """Return the last states of a recurrent network, (K, B, H), made into (B, K * H) without a
    change of places.
    """
    if (
        x.dim() != 3
        or result.dim() != 2
        or min(x.shape) < 2
        or not x.is_contiguous()
        or not x.requires_grad
    ):
        return False
    recurrent = any(name in type(x.grad_fn).__name__ for name in ("Rnn", "Lstm", "Gru", "Stack"))
    return (
        recurrent
        and x.shape[0] != x.shape[1] == len(result)
        and result.shape[1] == x.shape[0] * x.shape[2]
    )


def _heads(x: Tensor, result: Tensor) -> bool:
    """Return what the heads of attention answer, (B, H, T, D), made into (B, T, H * D) though the
    heads come before T.
    """
    if x.dim() != 4 or result.dim() != 3 or not x.requires_grad or x.shape[1] == x.shape[2]:
        return False
    node = x.grad_fn
    while kind(node) in VIEWS:  # an einsum
        node = node.next_functions[0][0]
    attended = kind(node).startswith(("Bmm", "Scaled"))
    batch, heads, places, each = x.shape
    fits = attended and min(heads, places) > 1 and result.shape == (batch, places, heads * each)
    return fits and not _windows(node)


def _split(x: Tensor, result: Tensor) -> bool:
    """Heads (B, H, T, D) made out of (B, T, H * D), though they come after T there."""
    if x.dim() != 3 or result.dim() != 4 or not x.requires_grad:
        return False
    batch, heads, places, each = result.shape
    return (
        min(heads, places, each) > 1
        and heads != places
        and x.shape == (batch, places, heads * each)
    )


def _windows(node) -> bool:
    """Between a linear layer and attention nothing changed places, and no features were cut into
    heads.
    """
    while node is not None and kind(node) not in ("Addmm", "Mm", "Transpose", "Permute"):
        before = node.next_functions[0][0] if node.next_functions else None
        if "View" in kind(node) and shape_of(node)[-1:] != shape_of(before)[-1:]:
            return False
        node = before
    return kind(node) in ("Addmm", "Mm")


def _folded(x: Tensor, result: Tensor) -> bool:
    """Series (B, T, C) made into rows of T numbers for each channel, without the channels going
    first. In a row of one channel neighbours are alike.
    """
    if x.dim() != 3 or result.dim() not in (2, 3) or not x.is_floating_point():
        return False
    rows, places, channels = x.shape
    fits = (
        len(result) == rows * channels
        and result.numel() == x.numel()
        and places in result.shape[1:]
    )
    if (
        not fits
        or min(rows, channels) < 2
        or places == channels
        or places < SERIES
        or x.numel() > LOOKED
    ):
        return False
    right, row = (
        x.detach().transpose(1, 2).double(),
        result.detach().reshape(len(result), places).double(),
    )
    near, far = ((t[..., 1:] - t[..., :-1]).square().mean() for t in (right, row))
    return bool(torch.isfinite(far)) and 2 * float(near) < float(far)


def _larger(x: Tensor, result: Tensor) -> bool:
    """Return the channels of a convolution laid one below the other, as the pixels of a larger
    picture.
    """
    if (
        x.dim() != 4
        or result.dim() != 4
        or not x.requires_grad
        or not x.is_contiguous()
        or x.shape[2:].numel() < 2
    ):
        return False
    times = result.shape[2] // x.shape[2]
    sizes = (
        len(x) == len(result)
        and result.shape[1] * times**2 == x.shape[1]
        and result.shape[3] == x.shape[3] * times
    )
    convolved = type(x.grad_fn).__name__.startswith(("Convolution", "Slow", "Mkldnn"))
    return convolved and times > 1 and sizes and result.shape[2] == x.shape[2] * times


def _patches(x: Tensor, result: Tensor) -> bool:
    """Return a picture (B, C, H, W) cut into as many pieces as it has squares of p by p pixels,
    along its lines.
    """
    if (
        x.dim() != 4
        or result.dim() != 3
        or x.requires_grad
        or len(x) != len(result)
        or not x.is_floating_point()
    ):
        return False
    channels, height, width = x.shape[1:]
    pieces, numbers = result.shape[1:]
    side = round((numbers / channels) ** 0.5)
    squares = (height // side) * (width // side) if side > 1 else 0
    whole = numbers == channels * side**2 and height % side == 0 == width % side
    return whole and 1 < pieces == squares and numbers != width and numbers % (height * width) > 0


def _pixels(x: Tensor, result: Tensor) -> bool:
    """Return the classes of a map, (B, C, H, W), made into rows of C numbers without a change of
    places.
    """
    if x.dim() != 4 or result.dim() != 2 or not x.requires_grad or not x.is_contiguous():
        return False
    convolved = type(x.grad_fn).__name__.startswith(("Convolution", "Upsample", "Slow", "Mkldnn"))
    return (
        convolved
        and 1 < x.shape[1] == result.shape[1] != x.shape[3]
        and x.shape[2] * x.shape[3] > 1
    )


def _cells(x: Tensor, result: Tensor) -> bool:
    """Return the channels of a convolution taken for the numbers of a cell: (B, K, H, W) to (B, H *
    W, K), or with several boxes in a cell (B, A * K, H, W) to (B, A * H * W, K).
    """
    if x.dim() != 4 or result.dim() != 3 or len(x) != len(result) or not x.is_contiguous():
        return False
    channels, cells, each = x.shape[1], x.shape[2] * x.shape[3], result.shape[2]
    convolved = type(x.grad_fn).__name__.startswith("ConvolutionBackward")
    # channels that stay in one piece, or rows of a map
    whole = each % cells == 0 or each == x.shape[3]
    return convolved and channels % each == 0 and 1 < each and cells > 1 and not whole
