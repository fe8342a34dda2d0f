"""Muon: every step moves a matrix by the orthogonal one nearest to its momentum. For stacks,
batches and shards, too.

    m <- beta m + (1 - beta) g
    u = NS5(beta m + (1 - beta) g)
    W <- (1 - lr wd) W - lr scale u

is the update of `torch.optim.Muon`, in bf16 bit for bit (its form of m <- beta m + g; NS5 forgets
the factor). Here NS5 runs in the precision that the chip multiplies natively. Torch's always runs
in bf16, which a CPU without the instructions emulates, many times slower than fp32.

An expert layer stores E matrices as one (E, out, in) parameter. Torch's Muon refuses it, and a
flattened (E out, in) gets it wrong: each expert is a map of its own. Here NS5 runs over the last
two dimensions. All matrices of one shape, experts or not, go through it in one batch, so a hundred
small matrices cost a few kernels instead of thousands.

NS5 is five times s <- 3.4445 s - 4.7750 s^3 + 2.0315 s^5 on every singular value of u / ||u||;
`response` is that curve. It does not converge to 1 and need not: it stays within BAND for all s
above 0.005 (Jordan et al., 2024). Scales: "original" sqrt(max(1, out / in)), rate about 0.02;
"match_rms_adamw" 0.2 sqrt(max(out, in)), AdamW's rates (Liu et al., 2025).

Footgun: the update has one size whatever the gradient's. An expert that gets no token in a step has
a gradient of zero. NS5 then makes a full step of its stale momentum, for hundreds of steps. Here
such an expert rests, as a parameter does whose `grad` is None.
"""

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from nblib import runtime

QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7
BAND = (0.68, 1.16)  # of `response` for s from 0.005 to 1
ADJUST = ("original", "match_rms_adamw")
# Entries orthogonalised in one call. A CPU is fastest while they stay in its cache; on a card a
# call should be large, but the copies that a large model's batch is made of need not all exist
# together.
BATCH_ENTRIES = {"cpu": 2**18, "cuda": 2**27}


def orthogonalise(
    G: Tensor, *, dtype: torch.dtype = torch.float32, steps: int = ITERATIONS, coefficients=QUINTIC
) -> Tensor:
    """U f(S) V^T of every matrix U S V^T in G (..., out, in), with f = `response`: singular values
    near 1.
    """
    if G.ndim < 2:
        raise ValueError(
            f"G has shape {tuple(G.shape)}: only matrices (..., out, in) can be orthogonalised"
        )
    if not G.numel():  # a process that was left without an expert
        return G.to(dtype)
    a, b, c = coefficients
    X = G.to(dtype).flatten(0, -3) if G.ndim > 2 else G.to(dtype)[None]  # (N, out, in)
    tall = X.shape[-2] > X.shape[-1]
    X = X.mT if tall else X
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp_(min=EPS)  # spectral norm at most 1
    parts = X.split(max(1, _most(X.device) // X[0].numel()))
    X = (
        torch.cat([_iterate(part, steps, a, b, c) for part in parts])
        if len(parts) > 1
        else _iterate(X, steps, a, b, c)
    )
    return (X.mT if tall else X).reshape(G.shape)


def _most(device: torch.device) -> int:
    return BATCH_ENTRIES.get(device.type, BATCH_ENTRIES["cuda"])


def _iterate(X: Tensor, steps: int, a: float, b: float, c: float) -> Tensor:
    multiply_add = torch.baddbmm
    if len(X) == 1:  # the plain product is faster for one matrix
        X, multiply_add = X[0], torch.addmm
    for _ in range(steps):
        A = X @ X.mT
        X = multiply_add(X, multiply_add(A, A, A, beta=b, alpha=c), X, beta=a)
    return X if X.ndim == 3 else X[None]


def response(s: Tensor, *, steps: int = ITERATIONS, coefficients=QUINTIC) -> Tensor:
    """Return what the iteration makes of a singular value in [0, 1]."""
    a, b, c = coefficients
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


def scale(out: int, into: int, adjust: str) -> float:
    """Return the factor between `lr` and an update of spectral norm near 1."""
    if adjust not in ADJUST:
        raise ValueError(f"adjust = {adjust!r}: allowed are {', '.join(ADJUST)}")
    return (
        math.sqrt(max(1.0, out / into)) if adjust == "original" else 0.2 * math.sqrt(max(out, into))
    )


def map_shape(shape: torch.Size, group: dict) -> tuple[int, int]:
    """(out, in) of one map of a parameter, as its group says it is stored."""
    out, into = shape[-2:]
    out = out // 2 if group.get("halves") else out
    return (into, out) if group.get("transposed") else (out, into)


def step_rms(shape: tuple[int, int], lr: float, adjust: str) -> float:
    """About how far one step moves an entry of a map (out, in): root mean square, without decay."""
    out, into = shape
    # 0.9: the mean of `response`, squared
    return lr * scale(out, into, adjust) * 0.9 / math.sqrt(max(out, into))


class Muon(Optimizer):
    """Muon over matrices (out, in) and stacks of them (E, out, in).

    halves      each matrix is two maps one above the other (gate over up): orthogonalise each alone
    transposed  stored as (in, out), as GPT-2 does; decides the scale only
    compute     precision of the iteration: bf16 as in torch, fp32, or auto, bf16 where the chip has
                it
    """

    def __init__(
        self,
        params,
        *,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust: str = "original",
        compute: str = "auto",
        halves: bool = False,
        transposed: bool = False,
    ):
        for name, value in dict(lr=lr, weight_decay=weight_decay).items():
            if not value >= 0:
                raise ValueError(f"{name} = {value}: must be at least 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum = {momentum}: must be at least 0 and below 1")
        if compute not in ("auto", "bf16", "fp32"):
            raise ValueError(f"compute = {compute!r}: allowed are auto, bf16, fp32")
        scale(1, 1, adjust)  # refuses an unknown one
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
        super().__init__(
            params,
            defaults | dict(adjust=adjust, compute=compute, halves=halves, transposed=transposed),
        )
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim not in (2, 3):
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)}: Muon takes (out, in) and (E, out, in)"
                )

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for batch in _batches(group):
                self._update(group, batch)
        return loss

    def _update(self, group: dict, params: list[Tensor]) -> None:
        """One step of parameters whose matrices have one shape."""
        beta, updates, busy = group["momentum"], [], []
        for p in params:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            g, m = _local(p.grad), _local(state["momentum_buffer"])
            active = _active(g)
            m.lerp_(g, 1 - beta if active is None else (1 - beta) * active)
            update = g.lerp(m, beta) if group["nesterov"] else m
            updates.append(_matrices(_whole(update, p), group))
            busy.append(active)
        together = torch.cat(updates) if len(updates) > 1 else updates[0]
        together = orthogonalise(together, dtype=_precision(group["compute"], together.device))
        rate = group["lr"] * scale(*map_shape(params[0].shape, group), group["adjust"])
        decay = group["lr"] * group["weight_decay"]
        for p, active, u in zip(params, busy, together.split([len(u) for u in updates])):
            u, w = _own(u.reshape(p.shape if p.ndim == 2 else _local(p).shape), p), _local(p)
            w.mul_(1 - decay if active is None else 1 - decay * active)
            w.add_(u if active is None else u * active, alpha=-rate)


def _precision(compute: str, device: torch.device) -> torch.dtype:
    if compute == "auto":  # fp16 has too few exponents for the iteration
        compute = "bf16" if runtime.native_precision(device.type)[0] == "bf16" else "fp32"
    return runtime.PRECISIONS[compute]


def _batches(group: dict) -> Iterator[list[Tensor]]:
    """Parameters with a gradient whose matrices can share a call, in bundles of bounded size."""
    alike = defaultdict(list)
    for p in group["params"]:
        if p.grad is not None:
            if p.grad.is_sparse:
                raise ValueError("Muon takes no sparse gradients: an embedding belongs in AdamW")
            alike[(p.shape[-2:], p.dtype, p.device)].append(p)
    for params in alike.values():
        bundle, size = [], 0
        for p in params:
            if bundle and size + p.numel() > _most(p.device):
                yield bundle
                bundle, size = [], 0
            bundle, size = [*bundle, p], size + p.numel()
        yield bundle


def _active(grad: Tensor) -> Tensor | None:
    """1 for every expert that saw a token, (E, 1, 1); None for a plain matrix."""
    return (
        None
        if grad.ndim == 2
        else (grad != 0).any(dim=-1).any(dim=-1)[:, None, None].to(grad.dtype)
    )


def _matrices(update: Tensor, group: dict) -> Tensor:
    """(N, out, in)"""
    if not group["halves"]:
        return update if update.ndim == 3 else update[None]
    *_, out, into = update.shape
    if out % 2:
        raise ValueError(f"halves = True, but a matrix has {out} rows: an odd number has no halves")
    return update.reshape(-1, out // 2, into)  # rows of gate, rows of up


# Under fully_shard a parameter is a DTensor cut along its first dimension. A stack is cut between
# experts, so every process holds whole maps; of a matrix it holds some rows, and the update needs
# them all.


def _is_sharded(t: Tensor) -> bool:
    return hasattr(t, "full_tensor")  # without importing torch.distributed where it is not built


def _local(t: Tensor) -> Tensor:
    return t.to_local() if _is_sharded(t) else t


def _whole(update: Tensor, p: Tensor) -> Tensor:
    """All matrices that this process updates, complete."""
    if not _is_sharded(p):
        return update
    if p.ndim == 3:
        if not all(place.is_replicate() or place.is_shard(0) for place in p.placements):
            raise ValueError(
                f"stacked experts are sharded as {p.placements}: only between experts, Shard(0)"
            )
        return update
    from torch.distributed.tensor import DTensor

    cut = DTensor.from_local(
        update, p.device_mesh, p.placements, shape=p.shape, stride=p.stride(), run_check=False
    )
    return cut.full_tensor()


def _own(u: Tensor, p: Tensor) -> Tensor:
    """Return the rows of a whole update that belong to this process's shard."""
    if not _is_sharded(p) or p.ndim == 3:
        return u
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = DTensor.from_local(
        u, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False
    )
    return everywhere.redistribute(placements=p.placements).to_local()  # a slice, no communication
