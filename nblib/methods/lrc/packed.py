"""LRC at inference: codes that stay at two bits in memory, whole-number products, and a correction
of eight bits.

    y = (g / 127) a (X codes^T) + U8 (V8^T x)
    X = round(127 x / g), g = max |x| of the row, a the layer's scale

    packed.pack(model)      every LRC layer becomes a `PackedLRC`, in place

X codes^T is a sum of whole numbers, so it is exact. A byte holds four codes plus one, those of
column j, j + K/4, j + K/2 and j + 3K/4, so that a shift and a mask give a quarter of the matrix in
order.

- A few rows on a CPU: C++ loops, which the compiler makes the CPU's eight-bit instructions of. They
  never open the matrix. They are compiled when they are first needed, in a fraction of a second.
- Many rows on a CPU: the same file opens a block of codes that fits into the cache, for
  `torch._int_mm` (AMX).
- A card, or no compiler: quarter by quarter as int8 into `torch._int_mm`, which uses tensor cores
  there.

What else there is opens the codes first: torchao (BitNetPacked2bitLinearWeight) to int8 for every
product, transformers (AutoBitLinear) to full numbers when it loads. Torch has products for int8 and
for int4 in groups, none for two bits.

Differences from LRC's own layer: its sums of products are rounded in fp32, these are not. With
`factors="int8"` each row of U and of V^T is rounded to 255 levels as well; with "same" they are the
layer's own numbers. With `inputs="float"` x is not rounded, and the product is F.linear with the
opened weight.

Footgun: the C++ uses one core, and torch all that it is given. And a correction of floats costs
more time and bytes than the whole ternary product: measure with it.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nblib import models, wiring
from nblib.methods.lrc import layer as lrc
from nblib.methods.lrc import ternary

FACTORS, INPUTS = ("int8", "same"), ("int8", "float")
FEW = 8  # rows up to which the C++ multiplies by itself
OPENED = 2**20  # bytes of codes that are open at a time, so that they stay in the cache
# _int_mm on a card wants multiples of 8, and more than 16 rows of inputs
COLUMNS, ROWS, CARD_ROWS = 32, 8, 32

SOURCE = r"""
#include <cstdint>
typedef int64_t N;
typedef const uint8_t* __restrict Packed;

extern "C" void ternary(Packed packed, const int8_t* x, int32_t* y, N rows, N out, N quarter) {
  for (N m = 0; m < rows; ++m) {
    const int8_t *x0 = x + 4 * m * quarter, *x1 = x0 + quarter;
    const int8_t *x2 = x1 + quarter, *x3 = x2 + quarter;
    int32_t ones = 0;  // each code is stored plus one
    for (N j = 0; j < 4 * quarter; ++j) ones += x0[j];
    for (N n = 0; n < out; ++n) {
      Packed b = packed + n * quarter;
      int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
      for (N j = 0; j < quarter; ++j) {
        uint8_t c0 = b[j] & 3, c1 = (b[j] >> 2) & 3, c2 = (b[j] >> 4) & 3, c3 = b[j] >> 6;
        s0 += c0 * x0[j], s1 += c1 * x1[j], s2 += c2 * x2[j], s3 += c3 * x3[j];
      }
      y[m * out + n] = s0 + s1 + s2 + s3 - ones;
    }
  }
}

extern "C" void opened(Packed packed, int8_t* __restrict codes, N out, N quarter) {
  for (N n = 0; n < out; ++n) {
    Packed b = packed + n * quarter;
    int8_t *__restrict c0 = codes + 4 * n * quarter, *__restrict c1 = c0 + quarter;
    int8_t *__restrict c2 = c1 + quarter, *__restrict c3 = c2 + quarter;
    for (N j = 0; j < quarter; ++j) {
      uint8_t a0 = b[j] & 3, a1 = (b[j] >> 2) & 3, a2 = (b[j] >> 4) & 3, a3 = b[j] >> 6;
      c0[j] = a0 - 1, c1[j] = a1 - 1, c2[j] = a2 - 1, c3[j] = a3 - 1;
    }
  }
}

extern "C" void scaled(const int8_t* W, const float* x, float* y, N rows, N out, N K) {
  for (N n = 0; n < out; ++n)
    for (N m = 0; m < rows; ++m) {
      float s = 0;
      for (N k = 0; k < K; ++k) s += W[n * K + k] * x[m * K + k];
      y[m * out + n] = s;
    }
}
"""

# Not -ffast-math: gcc would switch off the smallest floats for the whole process.
SUMS_IN_ANY_ORDER = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math")


@cache
def kernel() -> ctypes.CDLL | None:
    """Return the lines above, compiled for this CPU; None where no compiler can."""
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None
    )
    if not compiler:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "ternary.cpp", Path(folder) / "ternary.so"
        source.write_text(SOURCE)
        command = [compiler, "-O3", "-march=native", "-fPIC", "-shared", *SUMS_IN_ANY_ORDER]
        done = subprocess.run([*command, str(source), "-o", str(library)], capture_output=True)
        return ctypes.CDLL(str(library)) if done.returncode == 0 else None


def compiled(x: Tensor) -> ctypes.CDLL | None:
    """Return the kernel, if it can compute with this tensor."""
    plain = type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
    return kernel() if plain else None


def call(function: Callable, *arguments: Tensor | int) -> None:
    convert = [
        ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int64(a)
        for a in arguments
    ]
    function(*convert)


def pack_codes(codes: Tensor) -> Tensor:
    """-1, 0, 1 (N, K) as bytes (N', K' / 4): N' and K' are the next multiples of 8 and 32, filled
    up with zeros.
    """
    N, K = codes.shape
    codes = F.pad(codes, (0, -K % COLUMNS, 0, -N % ROWS))
    return ternary.pack(codes.unflatten(1, (4, -1)).transpose(1, 2)).view(len(codes), -1)


def open_codes(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the int8 codes that `pack_codes` was given."""
    codes = ternary.unpack(packed.flatten(), torch.Size((*packed.shape, 4)))  # (N', K' / 4, 4)
    return codes.transpose(1, 2).flatten(1)[: shape[0], : shape[1]]


def int8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whole numbers of `ternary.int8` (m, K), and what a row of them is multiplied by
    (m, 1).
    """
    wide = x.float()
    g = wide.abs().amax(-1, keepdim=True).clamp_min_(ternary.SMALLEST)
    return (wide * (ternary.LEVELS / g)).round_().to(torch.int8), g / ternary.LEVELS


def integers(x: Tensor, packed: Tensor) -> Tensor:
    """int8 rows (m, K') times packed codes (N', K' / 4): exactly, int32 (m, N')."""
    if not (library := compiled(x)):
        return by_quarters(x, packed)
    (out, quarter), y = packed.shape, x.new_empty(len(x), len(packed), dtype=torch.int32)
    if len(x) <= FEW:
        call(library.ternary, packed, x.contiguous(), y, len(x), out, quarter)
        return y
    block = max(1, OPENED // (4 * quarter))  # rows of the matrix
    codes = packed.new_empty(min(block, out), 4 * quarter, dtype=torch.int8)
    for begin in range(0, out, block):
        part = packed[begin : begin + block]
        call(library.opened, part, codes, len(part), quarter)
        y[:, begin : begin + block] = torch._int_mm(x, codes[: len(part)].t())
    return y


def by_quarters(x: Tensor, packed: Tensor) -> Tensor:
    """Return the same on every device: a quarter of the codes at a time."""
    rows, y = F.pad(x, (0, 0, 0, max(0, CARD_ROWS - len(x)))), 0
    for place, part in enumerate(rows.chunk(4, dim=1)):
        quarter = (packed >> 2 * place & 3).view(torch.int8)  # (N', K' / 4)
        y = y + torch._int_mm(part.contiguous(), quarter.t())
    return y[: len(x)] - x.sum(1, keepdim=True, dtype=torch.int32)  # each code is stored plus one


def by_rows(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix as int8, and the fp32 scale of each row."""
    scales = factor.float().abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny * 127) / 127
    return (factor.float() / scales[:, None]).round().to(torch.int8), scales


def scaled(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Floats (m, K) times int8 rows with a scale each (N, K), in fp32: (m, N)."""
    if len(x) <= FEW and (library := compiled(x)):
        y = x.new_empty(len(x), len(codes), dtype=torch.float32)
        call(library.scaled, codes, x.float().contiguous(), y, len(x), *codes.shape)
        return y.mul_(scales)
    return F.linear(x, codes.to(x.dtype)).float() * scales


class PackedLRC(nn.Module):
    """An LRC layer for inference.

    `inputs` is "int8", or "float" for a product with the opened weight.
    """

    def __init__(self, layer: lrc.LRCLinear, *, factors: str = "int8", inputs: str = "int8"):
        super().__init__()
        if factors not in FACTORS or inputs not in INPUTS:
            given = f"factors = {factors!r}, inputs = {inputs!r}"
            raise ValueError(f"{given}: allowed are {', '.join(FACTORS)}, and {', '.join(INPUTS)}")
        weight = (
            ternary.ternary(layer.weight, layer.scale) if layer.joint else layer.weight
        ).detach()
        scale = weight.abs().amax(1) if layer.scale == "rows" else weight.abs().max().view(1)
        self.shape, self.inputs, self.dtype = tuple(weight.shape), inputs, weight.dtype
        self.register_buffer("packed", pack_codes(weight.sign().to(torch.int8)))
        self.register_buffer("scale", scale.float())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())
        U, V = (f.detach() for f in layer.factors())
        for name, factor in {"U": U, "Vt": V.T.contiguous()}.items():
            codes, scales = by_rows(factor) if factors == "int8" else (factor, None)
            self.register_buffer(name, codes)
            self.register_buffer(f"{name}_scales", scales)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError(
                "a packed layer has no gradients: call the model under torch.no_grad()"
            )
        rows = x.reshape(-1, self.shape[1])
        y = self.opened(rows) if self.inputs == "float" else self.rounded(rows)
        return (y + self.correction(rows)).view(*x.shape[:-1], -1)

    def opened(self, x: Tensor) -> Tensor:
        weight = open_codes(self.packed, self.shape) * self.scale.to(self.dtype).view(-1, 1)
        return models.product(x, weight, self.bias)

    def rounded(self, x: Tensor) -> Tensor:
        codes, g = int8_codes(x)
        if more := 4 * self.packed.shape[1] - self.shape[1]:
            codes = F.pad(codes, (0, more))
        y = integers(codes, self.packed)[:, : self.shape[0]]
        y = y.float() * g * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def correction(self, x: Tensor) -> Tensor:
        if self.U_scales is None:
            return F.linear(x @ self.Vt.T.to(x.dtype), self.U.to(x.dtype))
        return scaled(scaled(x, self.Vt, self.Vt_scales).to(x.dtype), self.U, self.U_scales).to(
            x.dtype
        )

    def extra_repr(self) -> str:
        return (
            f"in={self.shape[1]}, out={self.shape[0]}, rank={self.U.shape[1]}, inputs={self.inputs}"
        )


def pack(model: nn.Module, *, factors: str = "int8", inputs: str = "int8") -> list[str]:
    """Make every LRC layer of a model packed, in place; returns their names.

    It cannot be trained any more.
    """
    if not (layers := lrc.layers(model)):
        raise ValueError(f"{type(model).__name__} has no LRC layers: attach first")
    return wiring.swap(
        model, lambda _, layer: PackedLRC(layer, factors=factors, inputs=inputs), layers
    )


def memory(model: nn.Module) -> dict[str, float]:
    """Bytes of the packed layers, and their share of what the same layers take in fp16."""
    packed = [m for m in model.modules() if isinstance(m, PackedLRC)]
    size = sum(b.nbytes for m in packed for b in m.buffers())
    half = sum(
        2 * m.shape[0] * m.shape[1] + (0 if m.bias is None else 2 * len(m.bias)) for m in packed
    )
    return {"bytes": size, "fp16 bytes": half, "share of fp16": size / half}
