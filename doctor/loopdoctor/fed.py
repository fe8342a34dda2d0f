"""What a loss is fed: numbers and shapes at each call, and where the numbers come from.

A cross-entropy that is given probabilities trains, slowly, and says nothing. Two things give it
away. The numbers: rows that are positive and sum to 1. And the graph: the last function before the
loss, views aside, is a softmax. Calls of torch's losses are recorded as they are made, by function
or by module. A name that was imported before the watch goes past that, so the graph of the loss is
walked as well; it keeps the node of each loss.

Footgun: a loss may be computed for the log alone. Only one that the differentiated loss hangs on is
judged (`used`).
"""

import contextlib
import math

import torch
from torch import Tensor

from loopdoctor.evidence import Entropy, Fed
from loopdoctor.reading import readable
from loopdoctor.targets import INSIDE

CALLS = 8  # losses of one backward that are looked at, in the rounds that are measured
# rows of a sample; elements that are taken as they are; nodes of a walk
ROWS, WHOLE, NODES = 64, 2**20, 500
CLASSES = ("cross_entropy", "nll_loss")  # classes lie in dimension 1
BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
# any shape, and shapes that differ are broadcast
PLAIN = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
SIGNED = {  # their targets are -1 and 1; the names of their arguments
    "margin_ranking_loss": ("input1", "input2", "target"),
    "cosine_embedding_loss": ("input1", "input2", "target"),
    "hinge_embedding_loss": ("input", "target"),
    "soft_margin_loss": ("input", "target"),
}
LOGGED = ("kl_div", "ctc_loss")  # log-probabilities, classes last
COUNTS = "poisson_nll_loss"  # the logarithm of a rate, or a rate
LOSSES = (*CLASSES, *BINARY, *PLAIN, *SIGNED, *LOGGED, COUNTS)
VIEWS = (
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Transpose",
    "T",
    "Permute",
    "Squeeze",
    "Unsqueeze",
    "Slice",
    "Select",
)
# views after which the classes are still the last dimension
KEEPING = ("Index", "Slice", "ToCopy", "Clone", "Alias")
RESHAPES = ("View", "UnsafeView", "ReshapeAlias")
VIEWS += ("Index", "ToCopy", "Clone", "Alias", "Split", "Unbind", "Expand")
# of arithmetic
STEPS = ("Mul", "Div", "Add", "Sub", "Neg", "Cat", "Stack", "Where", "MaskedFill", "Clamp", "Rsub")
LOGARITHMS = (
    "LogSoftmax",
    "Log",
    "Log1P",
    "LogSigmoid",
    "LogSigmoidForward",
    "Logsumexp",
    "Logaddexp",
)
NODES_OF = {"NllLoss": "nll_loss", "NllLoss2D": "nll_loss", "NllLossND": "nll_loss"}
NODES_OF |= {"BinaryCrossEntropy": BINARY[0], "BinaryCrossEntropyWithLogits": BINARY[1]}


def kind(node) -> str:
    """NllLoss of NllLossBackward0."""
    return type(node).__name__.partition("Backward")[0] if node is not None else ""


def chain(node, length: int = 3) -> list[str]:
    """Return the functions that made a tensor, the last one first, views left out."""
    found: list[str] = []
    while node is not None and len(found) < length:
        if (here := kind(node)) not in VIEWS:
            found.append(here)
        node = next((edge for edge, _ in node.next_functions if edge is not None), None)
    return found


def logged(node) -> bool:
    """Whether a logarithm is in the arithmetic that made a tensor."""
    queue, seen = [node], 0
    while queue and seen < 32:
        node, seen = queue.pop(0), seen + 1
        if kind(node) in LOGARITHMS:
            return True
        if kind(node) in VIEWS or kind(node) in STEPS:
            queue += [edge for edge, _ in node.next_functions if edge is not None]
    return False


def softmax_over(node) -> int | None:
    """Return the dimension of the softmax that made a matrix, where only rows of it were chosen
    since.
    """
    while kind(node) in KEEPING:
        node = node.next_functions[0][0]
    if kind(node) not in ("LogSoftmax", "Softmax") or len(shape_of(node)) != 2:
        return None
    return 0 if node._saved_dim == 0 else 1  # a negative one reads as a huge number


def mixed(node, classes: int) -> tuple[int, ...] | None:
    """Return the shape (N, C, ...) that was reshaped to (rows, C), which cuts rows out of one
    class's numbers.
    """
    while kind(node) in ("Clone", "ToCopy", "Alias"):
        node = node.next_functions[0][0]
    if kind(node) not in RESHAPES:
        return None
    before = shape_of(node.next_functions[0][0])
    some = len(before) > 2 and math.prod(before[2:]) > 1  # (N, C, 1, 1) mixes nothing
    return before if some and before[1] == classes != before[-1] else None


def look(name: str, given: Tensor, target: Tensor | None) -> Fed:
    """Return the facts of one call."""
    fed = Fed(chain(given.grad_fn), logged(given.grad_fn), shape=tuple(given.shape))
    if isinstance(target, Tensor):
        fed.target_shape = tuple(target.shape)
    if given.is_meta or given.is_nested or not given.is_floating_point() or not given.numel():
        return fed
    x = given.detach()
    rows = _rows(x, 1 if name in CLASSES and x.dim() > 1 else x.dim() - 1).float()
    facts = [*_ends(rows)]
    if name in CLASSES or name in LOGGED:
        fed.classes = rows.shape[-1]
        # a column may be shared out among its rows
        if x.dim() == 2 and x.shape[1] > 1 and given.grad_fn is not None:
            fed.softmax_over, fed.mixed = (
                softmax_over(given.grad_fn),
                mixed(given.grad_fn, x.shape[1]),
            )
        facts += [(rows.sum(-1) - 1).abs().max(), rows.logsumexp(-1).abs().max()]
        along = x.dim() == 2 and 1 < min(x.shape) and x.numel() <= WHOLE
        facts.append(
            x.float().logsumexp(0).abs().max() if along else torch.full_like(facts[0], float("nan"))
        )
    elif x.dim() == 2 and min(x.shape) > 1 and given.grad_fn is not None:
        fed.softmax_over = softmax_over(given.grad_fn)
    if (
        name == "cross_entropy"
        and x.dim() == 2
        and 3 < x.shape[0] == x.shape[1] <= 4096
        and readable(target)
    ):
        fed.own, fed.doubled = _own(x, target), _doubled(x.float(), target)
    if fed.makers[:1] == ["Clamp"]:
        ends = torch.aminmax(x)
        fed.cut = float(((x == ends.min) | (x == ends.max)).float().mean())
    fed.rows = rows.numel() // max(1, rows.shape[-1])
    fed.tolerance = 1e-4 if given.dtype in (torch.float32, torch.float64) else 1e-2
    fed.low, fed.high, fed.sums, fed.over_classes, fed.over_rows = (
        *torch.stack(facts).tolist(),
        *3 * [None],
    )[:5]
    if (
        name in CLASSES
        and readable(target)
        and target.dim() == 1
        and target.numel()
        and not target.is_floating_point()
    ):
        low, high = torch.stack(torch.aminmax(target.detach())).tolist()
        fed.only = low if low == high else None
        if x.dim() == 2 and len(x) == len(target):
            fed.right = float((x.argmax(1) == target).float().mean())
        if (
            fed.only is not None
            and x.dim() == 2
            and 2 < x.shape[1] <= 4096
            and 0 <= low < x.shape[1]
        ):
            fed.again = _again(x.float(), int(low))
    if name == "kl_div" and isinstance(target, Tensor):
        fed.exchanged = target.requires_grad and not given.requires_grad
    # -1 and 1, or 0 and 1
    whole = name in SIGNED and isinstance(target, Tensor) and not target.is_complex()
    if (
        isinstance(target, Tensor)
        and (target.is_floating_point() or whole)
        and target.numel()
        and not target.is_meta
    ):
        wanted = _rows(
            target.detach(), 1 if name in CLASSES and target.dim() > 1 else target.dim() - 1
        ).float()
        facts = [
            *_ends(wanted),
            *_ends(wanted.sum(-1)),
            ((wanted != 0) & (wanted != 1)).any().float(),
        ]
        fed.target_low, fed.target_high, *fed.target_sums, between = torch.stack(facts).tolist()
        fed.target_hard = not between
    return fed


def _own(x: Tensor, target: Tensor) -> bool:
    """Whether each row of similarities has its own row in it, which is no target and more alike
    than any other.
    """
    if target.is_floating_point() or target.shape != x.shape[:1]:
        return False
    own, mine = x.diagonal(), torch.arange(len(x), device=x.device)
    alike = (own.max() - own.min()) <= 1e-3 * own.abs().max() and own.min() > 0
    return bool(alike and (x.amax(1) <= own + 1e-3 * own.abs()).all() and (target != mine).all())


def _doubled(x: Tensor, target: Tensor) -> float:
    """Of the other columns of a batch's table, the share that hold what each row has at its own,
    where that is its target.
    """
    if target.is_floating_point() or target.shape != x.shape[:1]:
        return 0.0
    if not bool((target == torch.arange(len(x), device=x.device)).all()) or bool(
        x.amax() == x.amin()
    ):
        return 0.0
    return float(_alike(x, x.diagonal()[:, None]).mean()) / (len(x) - 1)


def _again(x: Tensor, column: int) -> bool:
    """Whether what each row has in its target's column stands in one other column too."""
    alike = _alike(x, x[:, column : column + 1])
    return len(x) > 3 and bool((alike > 0).float().mean() >= 0.9 and alike.mean() < 1.5)


def _alike(x: Tensor, own: Tensor) -> Tensor:
    """How many other columns of each row hold the number of its own.

    What was filled in with -1e9 holds none.
    """
    near = (x - own).abs() <= 2e-5 * own.nan_to_num(0, 0, 0).abs().max()
    return near.sum(1).float() - 1


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.aminmax(x))


def _rows(x: Tensor, dim: int) -> Tensor:
    """Return some rows of (..., classes), evenly spread, without a copy of a large tensor."""
    if x.dim() < 2:
        return x.reshape(1, -1)[:, :WHOLE]
    if x.dim() > 2 and dim == 1:  # (N, C, ...)
        x = x[:: max(1, x.shape[0] // 8)][:8].flatten(2)
        x = x[..., :: max(1, x.shape[-1] // 8)][..., :8].movedim(1, -1)
    x = x[:: max(1, x.shape[0] // ROWS)][:ROWS]
    x = x.reshape(-1, x.shape[-1])
    return x[:: max(1, x.shape[0] // ROWS)][:ROWS]


def mark(loss: Tensor, entropies: list[Entropy], round: int) -> list[Entropy]:
    """Say of each recorded loss whether the differentiated one hangs on it; return those that were
    not recorded.
    """
    nodes = {
        n.value.grad_fn: n for n in entropies if n.value is not None and n.value.grad_fn is not None
    }
    found: list[Entropy] = []
    queue, seen = [loss.grad_fn], set()
    while queue and len(seen) < NODES:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in nodes:
            n = nodes[node]
            n.used = True
            if n.number is None and n.value.numel() == 1:
                n.number = float(n.value.detach())
            continue
        here = kind(node)
        if here in NODES_OF or here == "LogSoftmax":
            # freed, or another version's name
            with contextlib.suppress(AttributeError, RuntimeError):
                found += [_unrecorded(node, here, round)]
            continue
        if not type(node).__name__.startswith(INSIDE):
            queue += [edge for edge, _ in node.next_functions]
    return [n for n in found if n is not None]


def _unrecorded(node, here: str, round: int) -> Entropy | None:
    """Return a loss that was called by a name of the user's own, from what its node keeps."""
    name = NODES_OF.get(here, "nll_loss")
    before = node if here == "LogSoftmax" else node.next_functions[0][0]
    makers = chain(before)
    if here == "LogSoftmax" or makers[:1] == ["LogSoftmax"]:
        shape = shape_of(before)
        fed = Fed(makers, True, shape=shape, classes=shape[1] if len(shape) > 1 else None)
    else:
        fed = look(name, node._saved_self.detach(), node._saved_target)
        fed.makers, fed.logged = makers, logged(before)
    reduction = "mean" if here in NODES_OF and node._saved_reduction == 1 else ""
    event = Entropy(round, name, None, None, None, reduction, None, grad=True, connected=True)
    event.fed, event.used = fed, True
    return event


def square(loss: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return a difference of (N, 1) or (N) with something that has no gradient, which became (N, N)
    on its way to the loss; of pictures (N, 1, H, W) or (N, H, W) likewise.
    """
    node = loss.grad_fn
    for _ in range(8):
        if node is None:
            return None
        edges = [edge for edge, _ in node.next_functions]
        live = [edge for edge in edges if edge is not None]
        after = shape_of(node)
        if (
            kind(node) in ("Sub", "Rsub")
            and len(after) in (2, 4)
            and after[0] == after[1] > 1
            and len(live) == 1 < len(edges)
        ):
            before, rest = shape_of(live[0]), after[2:]
            made = len(after) == 4 and kind(live[0]) in VIEWS  # all pairs, on purpose
            return (
                (before, after)
                if before in ((after[0], 1, *rest), (after[0], *rest)) and not made
                else None
            )
        node = live[0] if len(live) == 1 else None
    return None


def shape_of(node) -> tuple[int, ...]:
    held = getattr(node, "_input_metadata", None)
    return tuple(held[0].shape) if held else ()
