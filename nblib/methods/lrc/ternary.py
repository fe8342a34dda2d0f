"""Ternary weights and int8 activations, the rounding of BitNet b1.58 (Ma et al., 2024), and two
bits each on disk.

    s = max(mean |W|, 1e-5)      Q(W) = s * clip(round(W / s), -1, 1)          one s per matrix
    g = max(max |x|, 1e-5)       Q(x) = g / 127 * round(127 x / g)             one g per token

The codes C = clip(round(W / s), -1, 1) need not be multiplied by the s that made them. The number a
with the smallest ||W - a C|| is <W, C> / <C, C>: one for the matrix (`least_squares`) or one for
each row (`rows`). For weights that were trained in full precision it is about a third larger than
s. With s (`mean`) the outputs of every such layer are too small. s is right for weights that are
trained under the rounding, because they adapt to it.

Rounding is flat almost everywhere, so the true gradient of Q(W) is zero. That of Q(x) is not zero
in one entry per token, the largest, because g changes with it. The straight-through estimator takes
the identity as the gradient instead. Use it on x even when W is frozen: everything below the layer
learns only through x.

Footgun: `x + (Q(x) - x).detach()`, the usual way to write it, is not Q(x) to the last bit. This
file has an autograd function with its own backward.
"""

import weakref

import torch
from torch import Tensor
from torch.nn import functional as F

SCALES = ("mean", "least_squares", "rows")
SMALLEST = 1e-5
LEVELS = 127  # g >= |x|, so 127 x / g never leaves [-127, 127] and needs no clip
GROUP = 32  # entries of a factor that share a scale in its quantised form


class _Straight(torch.autograd.Function):
    """rounding(z) forward, the identity backward."""

    @staticmethod
    def forward(ctx, z, rounding, *options):
        return rounding(z.detach(), *options)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *[None] * (len(ctx.needs_input_grad) - 1)


def codes_and_scale(weight: Tensor, scale: str = "mean") -> tuple[Tensor, Tensor]:
    """-1, 0, 1 in the weight's dtype, and the fp32 number that they are multiples of, or (out, 1)
    of them.
    """
    if scale not in SCALES:
        raise ValueError(f"scale = {scale!r}: allowed are {', '.join(SCALES)}")
    weight = weight.detach()
    mean = weight.abs().mean(dtype=torch.float32).clamp_min(SMALLEST)
    codes = (weight / mean).round_().clamp_(-1, 1)
    if scale == "mean":
        return codes.to(weight.dtype), mean
    over = dict(dim=1, keepdim=True) if scale == "rows" else {}
    # a row of zeros: 0
    fitted = (weight.float() * codes).sum(**over) / codes.float().abs().sum(**over).clamp_min(1)
    return codes.to(weight.dtype), fitted


def _ternary(weight: Tensor, scale: str) -> Tensor:
    codes, factor = codes_and_scale(weight, scale)
    return (codes * factor).to(weight.dtype)


def _int8(x: Tensor) -> Tensor:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    # (..., 1); vector_norm takes ten times as long
    g = wide.abs().amax(-1, keepdim=True).clamp_min_(SMALLEST)
    return (wide * (LEVELS / g)).round_().mul_(g / LEVELS).to(x.dtype)


def _grouped(factor: Tensor, bits: int) -> Tensor:
    codes, scales = group_codes(factor, bits)
    return from_groups(codes, scales, factor.shape).to(factor.dtype)


def ternary(weight: Tensor, scale: str = "mean") -> Tensor:
    """Return the weight as its matrix of -s, 0, s, straight-through."""
    return _Straight.apply(weight, _ternary, scale)


def int8(x: Tensor) -> Tensor:
    """Activations (..., D) as an int8 product would see them, straight-through."""
    return _Straight.apply(x, _int8)


def grouped(factor: Tensor, bits: int) -> Tensor:
    """Symmetric rounding to `bits` with a scale per 32 entries, straight-through."""
    return _Straight.apply(factor, _grouped, bits)


def group_codes(factor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Whole numbers (groups, 32) as int8, the last group filled up with zeros, and their fp32
    scales (groups, 1).
    """
    if bits not in (4, 8):
        raise ValueError(f"bits = {bits!r}: allowed are 4 and 8")
    flat = factor.detach().flatten().float()
    flat = F.pad(flat, (0, -len(flat) % GROUP)).view(-1, GROUP)
    most = 2 ** (bits - 1) - 1
    scales = (
        flat.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * most)
        / most
    )
    return (flat / scales).round_().clamp_(-most, most).to(torch.int8), scales


def from_groups(codes: Tensor, scales: Tensor, shape: torch.Size) -> Tensor:
    return (codes * scales).flatten()[: shape.numel()].view(shape)


class Once:
    """Rounds the tensor it is given, or takes the last result if it is given the same one again.

    Queries, keys and values read one tensor, gate and up projection another; in eager mode each is
    rounded once. A compiler merges equal work by itself, so there this only rounds. Between two
    calls it holds one activation, and no graph: every call makes its own straight-through node.
    """

    def __init__(self):
        # a weak reference to the tensor
        self.source, self.version, self.result = lambda: None, None, None

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or x.is_inference():  # inference tensors count no versions
            return int8(x)
        # it changes with a change in place
        if self.source() is not x or self.version != x._version:
            self.source, self.version, self.result = weakref.ref(x), x._version, _int8(x.detach())
        return _Straight.apply(x, lambda _: self.result.detach())

    def __reduce__(self):  # a copied or pickled model starts without the original's activation
        return Once, ()


def pack(codes: Tensor) -> Tensor:
    """-1, 0, 1 of any shape as two bits each, four to a byte, (ceil(n / 4),)."""
    flat = (codes.flatten() + 1).to(torch.uint8)
    flat = F.pad(flat, (0, -len(flat) % 4)).view(-1, 4)
    return flat[:, 0] | flat[:, 1] << 2 | flat[:, 2] << 4 | flat[:, 3] << 6


def unpack(packed: Tensor, shape: torch.Size) -> Tensor:
    """Return the int8 codes that `pack` was given."""
    pairs = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)  # (ceil(n / 4), 4)
    return pairs.flatten()[: shape.numel()].view(shape).to(torch.int8) - 1
