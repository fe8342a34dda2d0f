"""Does the answer to a row hang on its place in the batch?

    x = x + self.pe[: x.size(0)]            positions of (time, batch, features), added to (batch, time, features)

Every row then carries the number of its place. One call is made again before the first step, in eval mode: as it was,
with the rows turned round, and with all rows but the first and the last moved on by one. Where the two that stayed
answer the same, rows do not see each other; where the turned ones do not answer the same, their place is seen. Once
more it is made with the first half of the rows alone, which must answer as they did among all.

Footguns: nodes of a graph and times of a series see each other, so the answers of the two that stayed move, and nothing
is said of places. State that is kept for each row (streams) belongs to its place: such modules are left alone. A scale
that is taken of the whole batch is a normalisation, of which others speak: where a forward asks for one, or for a
number of everything, half of the rows tell nothing. Nor do they where rows are put behind a dimension of size 1, or
pooled by a maximum or a sum: points of a scene, documents of a query, agents that talk.
"""

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from train_doctor import replays
from train_doctor.evidence import Backward, Call, Evidence
from train_doctor.reading import readable

LEAST, WORK = 6, 1e9  # rows; products of a row and a parameter
SEEN, STILL = 1e-2, 1e-4  # of the spread of the answers
SPREADS = {"std", "var", "std_mean", "var_mean", "cov", "corrcoef", "cholesky", "linalg_cholesky"}
SPREADS |= {"eigh", "linalg_eigh", "svd", "linalg_svd", "qr", "linalg_qr"}
POOLS = {"max", "amax", "sum", "logsumexp"}
ONE = {"mean", "max", "min", "amax", "amin", "aminmax", "norm", "linalg_vector_norm", "sum", "median"}


class Moved(NamedTuple):
    """How far answers moved, in spreads: of rows that changed places, and of rows that stayed."""

    turned: float
    stayed: float
    alone: float | None  # of the first half without the other one; None where that tells nothing
    given: tuple[tuple[int, ...], ...]  # shapes of what was given


def match(e: Evidence, event: Backward) -> None:
    """At the first backward: e.probes["rows"], a call whose arguments have one row each."""
    for call in event.calls:
        given = [*call.args, *call.kwargs.values()]
        tensors = [x for x in given if isinstance(x, Tensor)]
        plain = all(x is None or isinstance(x, (Tensor, int, float, str)) for x in given)
        if call.role != "model" or not call.grad or not tensors or not plain or not all(map(readable, tensors)):
            continue
        rows = {len(x) if x.dim() else 0 for x in tensors}
        if len(rows) == 1 and LEAST <= min(rows):
            e.probes.setdefault("rows", call)


def run(e: Evidence) -> None:
    """Before the first step: e.probes["moved"]."""
    call: Call | None = e.probes.pop("rows", None)
    module = call.module() if call is not None else None
    if module is None or e.opaque or e.accelerator or replays.packed(module):
        return
    rows = len(next(x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)))
    if rows * sum(p.numel() for p in module.parameters()) > WORK or _has_state(module, rows):
        return
    unfit = contextlib.suppress(RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError)
    with unfit, replays.resting(module.modules()):
        if (moved := _moved(module, call, rows)) is not None:
            e.probes["moved"] = moved


def _has_state(module: nn.Module, rows: int) -> bool:
    own = [m for m in module.modules() if not isinstance(m, nn.modules.batchnorm._NormBase)]
    kept = [x for m in own for x in (*vars(m).values(), *m._buffers.values()) if isinstance(x, Tensor)]
    return any(rows in x.shape[:2] for x in kept)  # a table of positions may have as many columns


def _moved(module: nn.Module, call: Call, rows: int) -> Moved | None:
    turned = torch.arange(rows - 1, -1, -1)
    middle = torch.tensor([0, rows - 2, *range(1, rows - 2), rows - 1])
    first, again, other, stayed = (_answer(module, call, order) for order in (None, None, turned, middle))
    if any(x is None or x.dim() == 0 or len(x) != rows for x in (first, again, other, stayed)):
        return None
    spread = float(first.std())
    if not torch.equal(first, again) or not spread > 0:
        return None
    ends = float((first[[0, -1]] - stayed[[0, -1]]).abs().max())
    given = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    shapes = tuple(tuple(x.shape) for x in given)
    apart = float((first - other[turned]).abs().max())
    return Moved(apart / spread, ends / spread, _alone(module, call, first), shapes)


def _alone(module: nn.Module, call: Call, first: Tensor) -> float | None:
    """How far the answers of the first half move when the other half is gone, in spreads."""
    half = len(first) // 2
    rough = call.autocast is not None or any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters())
    if rough or any(getattr(m, "running_mean", 0) is None or isinstance(m, nn.RNNBase) for m in module.modules()):
        return None  # the sizes of sums show in 16 bits; a recurrent module may be given one series
    with (
        contextlib.suppress(RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError),
        Scales() as scales,
    ):
        alone = _answer(module, call, torch.arange(half))
        if alone is not None and alone.shape == first[:half].shape and not scales.asked:
            return float((first[:half] - alone).abs().max() / first.std())
    return None


def _of_a_set(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether rows are made one set on purpose: by a dimension in front of them, or a pool that is no mean."""
    if name == "unsqueeze":
        return 0 in (*args[1:2], kwargs.get("dim"))
    if name == "__getitem__" and len(args) > 1:
        return args[1] is None or isinstance(args[1], tuple) and args[1][:1] == (None,)
    if name == "multi_head_attention_forward":
        return isinstance(args[0], Tensor) and args[0].dim() == 2  # one series, whose times are the rows
    return name in POOLS and 0 in (*args[1:2], kwargs.get("dim"))


class Scales(TorchFunctionMode):
    """Whether a forward asks for a spread, or for one number of everything."""

    asked = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        one = isinstance(result, Tensor) and not result.dim() and name in ONE
        self.asked = self.asked or name in SPREADS or one or _of_a_set(name, args, kwargs or {})
        return result


def _answer(module: nn.Module, call: Call, order: Tensor | None) -> Tensor | None:
    def put(x):
        return x[order.to(x.device)] if order is not None and isinstance(x, Tensor) else x

    with replays.without_gradients(module, call.autocast):
        out = replays.again(module, tuple(map(put, call.args)), {k: put(v) for k, v in call.kwargs.items()})
    return next((x.float() for x in replays.floats(out) if x.dim()), None)
