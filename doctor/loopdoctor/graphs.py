"""Graphs of autograd: whether those of earlier steps are still alive, and what in one made its loss
NaN.

The graph of each of the first steps is given a mark that lives as long as one of its nodes does,
and that is held by a weak reference only. A mark that is alive several steps later says that
something still holds the graph: a sum of losses, a hidden state that is passed on.

Footgun: a node that lives for ever (a part of the graph that is computed once) must not make each
step's mark live. So a node that has a mark keeps it, and gets no other.
"""

import contextlib
import gc
import weakref
from collections import deque
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from loopdoctor.evidence import Evidence
from loopdoctor.eye import tensors
from loopdoctor.fed import VIEWS, kind

# nodes of a step; nodes looked at for a cause; first steps that are marked
MARKED, WALKED, ROUNDS = 24, 300, 5
KEY, ANSWER = "loopdoctor", "loopdoctor_answer"
ROOTS = 8  # of a loss
SUMS = {"Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Stack", "Cat", *VIEWS}
ANSWERS = 4  # of a step that are marked
HELD = 2**20  # numbers of a root that are kept until the step


class Mark:
    """Dies with the last node that holds it."""


def mark(e: Evidence, loss: Tensor) -> None:
    """Before a backward: its graph belongs to this round."""
    if e.rounds in e.graphs or e.rounds >= ROUNDS or loss.grad_fn is None:
        return
    made = Mark()
    for node in walk(loss, MARKED):
        if kind(node) != "AccumulateGrad":  # lives as long as its parameter
            with contextlib.suppress(AttributeError, TypeError):
                node.metadata.setdefault(KEY, made)
    e.graphs[e.rounds] = weakref.ref(made)


def mark_answer(e: Evidence, output: Any) -> None:
    """After a call of the model with gradients on, for which there may never be a backward."""
    answer = next((t for t in tensors((output,)) if t.grad_fn is not None), None)
    many = sum(round == e.rounds for round, _ in e.answered)
    if (
        answer is None
        or e.rounds >= ROUNDS
        or many >= ANSWERS
        or kind(answer.grad_fn) == "AccumulateGrad"
    ):
        return
    with contextlib.suppress(AttributeError, TypeError):
        if ANSWER not in answer.grad_fn.metadata:
            made = answer.grad_fn.metadata[ANSWER] = Mark()
            e.answered[e.rounds, many] = weakref.ref(made)


def alive(e: Evidence) -> list[int]:
    """Return rounds, at least two back from the last one, whose graph is still held."""
    return _alive(e, lambda: [round for round in past(e) if e.graphs[round]() is not None])


def answers_alive(e: Evidence) -> list[int]:
    """Return the same of answers of the model."""
    return _alive(
        e, lambda: sorted({r for (r, _), made in e.answered.items() if r < e.rounds - 2 and made()})
    )


def _alive(e: Evidence, now: Callable[[], list[int]]) -> list[int]:

    if len(now()) > 2:
        gc.collect()  # what only a circle of references holds is nobody's
    return now()


def past(e: Evidence) -> list[int]:
    """Return the marked rounds but for those of the last two."""
    return [round for round in e.graphs if round < e.rounds - 2]


def source(loss: Tensor) -> str:
    """Return the deepest function in the graph of a loss that is not finite which was given what it
    cannot take; or "".
    """
    found = ""
    for node in walk(loss, WALKED):
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            found = _refused(node) or found
    return found


def roots(e: Evidence, loss: Tensor) -> list[tuple[str, Tensor]]:
    """Square roots in the graph of a loss, and what they were given or gave: at 0 their slope is
    infinite.

    Where tensors are packed (a checkpoint, which would compute them again) they are left alone.
    """
    found = []
    for node in walk(loss, WALKED) if not e.packed else ():
        if not type(node).__name__.startswith(("Sqrt", "Pow")):
            continue
        # an exponent for each number
        with contextlib.suppress(AttributeError, RuntimeError, TypeError, ValueError):
            if kind(node) == "Sqrt":
                found.append(("a square root", node._saved_result))
            elif 0 < float(node._saved_exponent) < 1:
                found.append((f"a power of {float(node._saved_exponent):g}", node._saved_self))
    return [(name, given) for name, given in found if given.numel() <= HELD][:ROOTS]


def at_zero(held: list[tuple[str, Tensor]]) -> str:
    """Which of them was taken of zeros."""
    for name, given in held:
        many = int((given == 0).sum())
        if many:
            return (
                f"{name} was given {many} zeros (in a tensor of {tuple(given.shape)}), "
                "where its slope is infinite"
            )
    return ""


def on_copies(e: Evidence, loss: Tensor) -> bool:
    """Whether a loss hangs on no weight, and on tensors with the shapes of most of them."""
    ps = e.trainable()
    mine, shapes = {id(p) for p in ps.values()}, {p.shape for p in ps.values()}
    leaves = [node.variable for node in walk(loss, WALKED) if kind(node) == "AccumulateGrad"]
    if not ps or any(id(t) in mine for t in leaves):
        return False
    return 2 * len({t.shape for t in leaves} & shapes) > len(shapes)


def on_inputs(given: tuple) -> bool:
    """Whether a tensor that was given gets a gradient, and hands it on to no weight."""
    learning = [t for t in tensors(given) if t.requires_grad]
    for t in learning:
        found = (
            [n.variable for n in walk(t, WALKED) if kind(n) == "AccumulateGrad"]
            if t.grad_fn is not None
            else [t]
        )
        if not found or any(isinstance(leaf, torch.nn.Parameter) for leaf in found):
            return False
    return bool(learning)


def _refused(node) -> str:
    what = kind(node)
    if what in ("Log", "Log2", "Log10"):
        return _told("a logarithm", node._saved_self, node._saved_self <= 0, "0 or less")
    if what == "Log1P":
        return _told("log1p", node._saved_self, node._saved_self <= -1, "-1 or less")
    if what == "Div" and isinstance(node._saved_other, Tensor):
        return _told("a division", node._saved_other, node._saved_other == 0, "0")
    return ""


def _told(function: str, given: Tensor, wrong: Tensor, what: str) -> str:
    many = int(wrong.sum())
    return (
        f"{function} was given {many} numbers that are {what} (of {given.numel()})" if many else ""
    )


def leaves(node, limit: int, without: Container = ()) -> set[int]:
    """Ids of the tensors that a node is computed from and that get its gradient, on ways that do
    not lead through some nodes.
    """
    return {id(n.variable) for n in below(node, limit, without) if kind(n) == "AccumulateGrad"}


def asks_inputs(loss: Tensor, held: set[int], limit: int) -> bool:
    """Whether a loss has a gradient for an input, which no optimizer holds: an attack, or a
    derivative.
    """
    found = [n.variable for n in walk(loss, limit) if hasattr(n, "variable")]
    return any(not isinstance(leaf, torch.nn.Parameter) and id(leaf) not in held for leaf in found)


def near(node) -> list:
    """Return the nodes in front of one, and those in front of these: a weight may be transposed
    first.
    """
    first = [n for n, _ in node.next_functions if n is not None]
    return [
        *first,
        *(m for n in first if kind(n) in ("T", "Transpose") for m, _ in n.next_functions),
    ]


def walk(loss: Tensor, limit: int):
    """Nodes of its graph, the nearest first."""
    return below(loss.grad_fn, limit)


def below(node, limit: int, without: Container = ()):
    queue, seen = deque([node]), set()
    while queue and len(seen) < limit:
        node = queue.popleft()
        if node is None or node in without or node in seen:
            continue
        seen.add(node)
        yield node
        queue += [edge for edge, _ in node.next_functions]


def summed(node, limit: int) -> set:
    """Return the nodes that one is a sum or mean of, but for signs and factors that do not learn,
    and itself.
    """
    queue, seen = [node], set()
    while queue and len(seen) < limit:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        edges = [edge for edge, _ in node.next_functions]
        times = (
            len(edges) == 2
            and None in edges
            and (kind(node) == "Mul" or kind(node) == "Div" and edges[0])
        )
        queue += edges if kind(node) in SUMS or times else []
    return seen


def tell(t: Tensor, key: str, what: Any) -> None:
    """Write something onto the node of a tensor, which lives as long as the graph does, and not
    longer.
    """
    with contextlib.suppress(AttributeError, TypeError):  # it has no graph
        t.grad_fn.metadata[key] = what


def told(node, key: str) -> Any:
    """Return what was written there, or None."""
    return (getattr(node, "metadata", None) or {}).get(key)


def sequences(model: torch.nn.Module) -> dict[int, str]:
    """Attention and recurrent modules that take (time, batch, features), by id."""
    kinds = (torch.nn.MultiheadAttention, torch.nn.RNNBase)
    return {
        id(m): name
        for name, m in model.named_modules()
        if isinstance(m, kinds) and getattr(m, "batch_first", True) is False
    }
