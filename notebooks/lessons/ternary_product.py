"""LRC at inference: codes that stay at two bits in memory, whole-number products, and a correction of eight bits.

    y = (g / 127) a (X codes^T) + U8 (V8^T x)      X = round(127 x / g), g = max |x| of the row, a the layer's scale

    ternary_product.pack(model)            every LRC layer becomes a `PackedLRC`, in place
    python -m lessons.ternary_product --json FILE     latency and bytes beside float32, bf16 and torch's dynamic int8

X codes^T is a sum of whole numbers, so it is exact. A byte holds four codes plus one, those of column j, j + K/4,
j + K/2 and j + 3K/4, so that a shift and a mask give a quarter of the matrix in order.

- A few rows on a CPU: C++ loops, which the compiler makes the CPU's eight-bit instructions of. They never open the
  matrix. They are compiled when they are first needed, in a fraction of a second.
- Many rows on a CPU: the same file opens a block of codes that fits into the cache, for `torch._int_mm` (AMX).
- A card, or no compiler: quarter by quarter as int8 into `torch._int_mm`, which uses tensor cores there.

What else there is opens the codes first: torchao (BitNetPacked2bitLinearWeight) to int8 for every product, transformers
(AutoBitLinear) to full numbers when it loads. Torch has products for int8 and for int4 in groups, none for two bits.

Differences from LRC's own layer: its sums of products are rounded in fp32, these are not. With `factors="int8"` each
row of U and of V^T is rounded to 255 levels as well; with "same" they are the layer's own numbers. With
`inputs="float"` x is not rounded, and the product is F.linear with the opened weight.

Footgun: the C++ uses one core, and torch all that it is given. And a correction of floats costs more time and bytes
than the whole ternary product: measure with it.
"""

import argparse
import copy
import ctypes
import datetime
import json
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nblib import files, models, paths, runtime, wiring
from nblib.methods import lrc, ternary

FACTORS, INPUTS = ("int8", "same"), ("int8", "float")
FEW = 8  # rows up to which the C++ multiplies by itself
OPENED = 2**20  # bytes of codes that are open at a time, so that they stay in the cache
COLUMNS, ROWS, CARD_ROWS = 32, 8, 32  # _int_mm on a card wants multiples of 8, and more than 16 rows of inputs

SOURCE = r"""
#include <cstdint>
typedef int64_t N;
typedef const uint8_t* __restrict Packed;

extern "C" void ternary(Packed packed, const int8_t* x, int32_t* y, N rows, N out, N quarter) {
  for (N m = 0; m < rows; ++m) {
    const int8_t *x0 = x + 4 * m * quarter, *x1 = x0 + quarter, *x2 = x1 + quarter, *x3 = x2 + quarter;
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
    """The lines above, compiled for this CPU; None where no compiler can."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if not compiler:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "ternary.cpp", Path(folder) / "ternary.so"
        source.write_text(SOURCE)
        command = [compiler, "-O3", "-march=native", "-fPIC", "-shared", *SUMS_IN_ANY_ORDER]
        done = subprocess.run([*command, str(source), "-o", str(library)], capture_output=True)
        return ctypes.CDLL(str(library)) if done.returncode == 0 else None


def compiled(x: Tensor) -> ctypes.CDLL | None:
    """The kernel, if it can compute with this tensor."""
    plain = type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
    return kernel() if plain else None


def call(function: Callable, *arguments: Tensor | int) -> None:
    convert = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int64(a) for a in arguments]
    function(*convert)


def pack_codes(codes: Tensor) -> Tensor:
    """-1, 0, 1 (N, K) as bytes (N', K' / 4): N' and K' are the next multiples of 8 and 32, filled up with zeros."""
    N, K = codes.shape
    codes = F.pad(codes, (0, -K % COLUMNS, 0, -N % ROWS))
    return ternary.pack(codes.unflatten(1, (4, -1)).transpose(1, 2)).view(len(codes), -1)


def open_codes(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """The int8 codes that `pack_codes` was given."""
    codes = ternary.unpack(packed.flatten(), torch.Size((*packed.shape, 4)))  # (N', K' / 4, 4)
    return codes.transpose(1, 2).flatten(1)[: shape[0], : shape[1]]


def int8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The whole numbers of `ternary.int8` (m, K), and what a row of them is multiplied by (m, 1)."""
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
    """The same on every device: a quarter of the codes at a time."""
    rows, y = F.pad(x, (0, 0, 0, max(0, CARD_ROWS - len(x)))), 0
    for place, part in enumerate(rows.chunk(4, dim=1)):
        quarter = (packed >> 2 * place & 3).view(torch.int8)  # (N', K' / 4)
        y = y + torch._int_mm(part.contiguous(), quarter.t())
    return y[: len(x)] - x.sum(1, keepdim=True, dtype=torch.int32)  # each code is stored plus one


def by_rows(factor: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as int8, and the fp32 scale of each row."""
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
    """An LRC layer for inference. `inputs` is "int8", or "float" for a product with the opened weight."""

    def __init__(self, layer: lrc.LRCLinear, *, factors: str = "int8", inputs: str = "int8"):
        super().__init__()
        if factors not in FACTORS or inputs not in INPUTS:
            given = f"factors = {factors!r}, inputs = {inputs!r}"
            raise ValueError(f"{given}: allowed are {', '.join(FACTORS)}, and {', '.join(INPUTS)}")
        weight = (ternary.ternary(layer.weight, layer.scale) if layer.joint else layer.weight).detach()
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
            raise RuntimeError("a packed layer has no gradients: call the model under torch.no_grad()")
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
        return scaled(scaled(x, self.Vt, self.Vt_scales).to(x.dtype), self.U, self.U_scales).to(x.dtype)

    def extra_repr(self) -> str:
        return f"in={self.shape[1]}, out={self.shape[0]}, rank={self.U.shape[1]}, inputs={self.inputs}"


def pack(model: nn.Module, *, factors: str = "int8", inputs: str = "int8") -> list[str]:
    """Make every LRC layer of a model packed, in place; returns their names. It cannot be trained any more."""
    if not (layers := lrc.layers(model)):
        raise ValueError(f"{type(model).__name__} has no LRC layers: attach first")
    return wiring.swap(model, lambda _, layer: PackedLRC(layer, factors=factors, inputs=inputs), layers)


def memory(model: nn.Module) -> dict[str, float]:
    """Bytes of the packed layers, and their share of what the same layers take in fp16."""
    packed = [m for m in model.modules() if isinstance(m, PackedLRC)]
    size = sum(b.nbytes for m in packed for b in m.buffers())
    half = sum(2 * m.shape[0] * m.shape[1] + (0 if m.bias is None else 2 * len(m.bias)) for m in packed)
    return {"bytes": size, "fp16 bytes": half, "share of fp16": size / half}


# ---------------------------------------------------------------------------------------------------- its measurement
WIDTHS, BATCHES, PERCENTS = (512, 1024, 2048, 4096), (1, 64), (15.0, 5.0)


def layer_of(width: int, percent: float) -> lrc.LRCLinear:
    """A square layer of random weights with a correction of random factors."""
    W = torch.randn(width, width) / width**0.5
    rank = lrc.rank_of(width, width, percent)
    layer = lrc.LRCLinear(ternary.ternary(W, "least_squares"), None, rank, scale="least_squares")
    for factor in (layer.U, layer.V):
        nn.init.normal_(factor, std=0.1 / rank**0.5)
    return layer.requires_grad_(False)


def dynamic_int8(linear: nn.Linear) -> nn.Module:
    """Torch's own: int8 weights, inputs rounded per call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(linear), {nn.Linear}, dtype=torch.qint8)


def ways(width: int, device: torch.device) -> dict[str, tuple[nn.Module, torch.dtype, int]]:
    """Every way to compute a layer of this width: the module, the dtype of its inputs, and its bytes."""
    linear = nn.Linear(width, width, bias=False, device=device).requires_grad_(False)
    half = nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
    found = {"float32": (linear, torch.float32, 4 * width**2), "bf16": (half, torch.bfloat16, 2 * width**2)}
    if device.type == "cpu":
        found["int8, dynamic"] = (dynamic_int8(linear), torch.float32, width**2)
    for percent in PERCENTS:
        layer = layer_of(width, percent).to(device)
        for factors in FACTORS:
            packed = PackedLRC(layer, factors=factors)
            name = f"packed, {percent:g} %, factors {'int8' if factors == 'int8' else 'fp32'}"
            found[name] = (packed, torch.float32, sum(b.nbytes for b in packed.buffers()))
            if factors == "int8":  # another copy, or it would find the first one's bytes in the cache
                found[f"{name}, x bf16"] = (copy.deepcopy(packed), torch.bfloat16, found[name][2])
    alone = PackedLRC(layer_of(width, 100 / width).to(device))
    found["packed, rank 1"] = (alone, torch.float32, sum(b.nbytes for b in alone.buffers()))
    return found


@torch.no_grad()
def latencies(ways: dict, width: int, rows: int, device: torch.device, *, rounds: int = 25) -> dict[str, float]:
    """Seconds of the fastest call of each way. They take turns, so that a busy machine disturbs all of them alike."""
    inputs = {name: torch.randn(rows, width, device=device, dtype=dtype) for name, (_, dtype, _) in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for turn in range(rounds + 2):
        for name, (module, *_) in ways.items():
            wait()
            began = time.perf_counter()
            module(inputs[name])
            wait()
            if turn >= 2:
                times[name].append(time.perf_counter() - began)
    return {name: min(each) for name, each in times.items()}


def measure(path: Path, device: torch.device, widths: tuple[int, ...] = WIDTHS) -> dict:
    record = {"date": datetime.date.today().isoformat(), "environment": runtime.environment(), "lines": []}
    record |= {"compiled": device.type == "cpu" and kernel() is not None, "threads": torch.get_num_threads()}
    record |= files.read_json(path)  # what the file holds already is not repeated
    for width in widths:
        known = {line["rows"] for line in record["lines"] if line["width"] == width}
        found = ways(width, device) if known < set(BATCHES) else {}
        for rows in [rows for rows in BATCHES if rows not in known]:
            for name, seconds in latencies(found, width, rows, device).items():
                line = {"width": width, "rows": rows, "way": name, "seconds": seconds, "bytes": found[name][2]}
                record["lines"].append(line)
            files.write(path, files.to_json(record, indent=1))
            print(width, rows, {line["way"]: f"{line['seconds']:.2e}" for line in record["lines"][-len(found) :]})
    return record


def main() -> None:
    today = datetime.date.today().isoformat()
    parser = argparse.ArgumentParser(prog="python -m lessons.ternary_product", description="time the packed product")
    parser.add_argument("--device", default="auto", help="cpu or cuda")
    parser.add_argument("--json", type=Path, help="where to write the record")
    arguments = parser.parse_args()
    device = runtime.pick(arguments.device).device
    default = paths.root() / f"outputs/published/{today}-ternary-product-{device.type}.json"
    measure(arguments.json or default, device)


def published() -> dict:
    """The newest record."""
    return json.loads(max(paths.root().glob("outputs/published/*-ternary-product-*.json")).read_text())


def table(record: dict) -> list[dict]:
    """A row per way and number of rows: bytes as a share of fp16, and per width how much quicker than float32 it is."""
    rows = []
    for batch in dict.fromkeys(line["rows"] for line in record["lines"]):
        lines = [line for line in record["lines"] if line["rows"] == batch]
        slow = {line["width"]: line["seconds"] for line in lines if line["way"] == "float32"}
        for way in dict.fromkeys(line["way"] for line in lines):
            ours = {line["width"]: line for line in lines if line["way"] == way}
            widest = ours[max(ours)]
            row = {"rows": batch, "way": way, "of fp16": f"{widest['bytes'] / (2 * widest['width'] ** 2):.2f}"}
            rows.append(row | {f"{width} wide": f"{slow[width] / ours[width]['seconds']:.1f} x" for width in ours})
    return rows


if __name__ == "__main__":
    main()
