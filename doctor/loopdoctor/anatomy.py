"""The anatomy of a loss: follow its graph through sums and products to find terms that were added
without a gradient.

A distillation term made from the teacher alone is a plain number. It changes the printed loss but
has no gradient, so it trains nothing. In the graph it is an AddBackward with one empty edge. Its
value is what remains of the loss when the recorded terms are subtracted.

Footgun: `total = 0; total = total + ce` has an empty edge too. So the value decides, not the edge.
"""

import torch
from torch import Tensor

from loopdoctor.evidence import Backward

NODES, SUMS = 64, {"AddBackward0", "SubBackward0", "NegBackward0"}


def constant_added(loss: Tensor, event: Backward, scale: float | None) -> float | None:
    """Return the constant that was added to the loss outside its graph; None when there is none or
    it cannot be told.
    """
    known = {e.value.grad_fn: float(e.value.detach()) for e in event.entropies if _scalar(e.value)}
    known |= {c.loss.grad_fn: float(c.loss.detach()) for c in event.calls if _scalar(c.loss)}
    if loss.grad_fn is None or not known:
        return None
    found = _constant(loss.grad_fn, float(loss.detach()), known)
    rounding = 1e-4 if loss.dtype in (torch.float32, torch.float64) else 2e-2
    return (
        None
        if found is None or abs(found) <= rounding * abs(float(loss.detach()))
        else found / (scale or 1.0)
    )


def unconnected(event: Backward) -> dict[str, float]:
    """Values of recorded losses that carry no gradient, or lost it on their way (item), by name and
    turn.
    """
    found = [e for e in event.entropies if isinstance(e.value, Tensor) and e.value.numel() == 1]
    found = [e for e in found if not e.connected or e.name in ("kl_div", "mse_loss")]
    dead = {id(e): "dead" if e.grad and not e.connected else "other" for e in found}
    return {
        f"{e.name} {dead[id(e)]} {turn}": float(e.value.detach()) for turn, e in enumerate(found)
    }


def factors(loss: Tensor, term: Tensor) -> tuple[float, ...]:
    """Return the plain numbers that a term is multiplied by on its way into the loss, in which it
    is a summand.
    """
    queue = [(loss.grad_fn, ())]
    for _ in range(NODES):
        node, numbers = queue.pop(0) if queue else (None, ())
        if node is term.grad_fn:
            return numbers
        kind = type(node).__name__
        live = (
            [edge for edge, _ in node.next_functions if edge is not None]
            if node is not None
            else []
        )
        if kind in SUMS:
            queue += [(edge, numbers) for edge in live]
        elif len(live) == 1 and (number := _factor(node, kind)):
            queue.append((live[0], (*numbers, number)))
    return ()


def _scalar(value) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None


def _constant(node, total: float, known: dict) -> float | None:
    """Downwards from the root, whose value is known, to the first sum with an empty edge."""
    if node in known:
        return None
    kind = type(node).__name__
    edges = [edge for edge, _ in node.next_functions]
    live = [edge for edge in edges if edge is not None]
    if kind == "AddBackward0" and len(edges) == 2:
        if len(live) == 1:
            rest = _value(live[0], known)
            return None if rest is None else total - rest
        for edge, other in (edges, edges[::-1]):
            rest = _value(other, known)
            if rest is not None:
                return _constant(edge, total - rest, known)
    factor = _factor(node, kind)
    if factor and len(live) == 1:
        return _constant(live[0], total / factor, known)
    return None


def _value(node, known: dict) -> float | None:
    """Upwards from the recorded terms."""
    if node in known:
        return known[node]
    kind = type(node).__name__
    live = [edge for edge, _ in node.next_functions if edge is not None]
    if kind == "AddBackward0" and len(live) == 2:
        values = [_value(edge, known) for edge in live]
        return None if None in values else sum(values)
    factor = _factor(node, kind)
    if factor is not None and len(live) == 1:
        below = _value(live[0], known)
        return None if below is None else below * factor
    return None


def _factor(node, kind: str) -> float | None:
    """By what a node multiplies its one live input, when that is a number."""
    if kind not in ("MulBackward0", "DivBackward0"):
        return None
    other = node._saved_other
    if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad:
        return None
    # inside a mode of the program's, torch cannot read a number of its own graph
    with torch._C._DisableTorchDispatch():
        number = float(other)
    if kind == "MulBackward0":
        return number
    return 1.0 / number if number else None
