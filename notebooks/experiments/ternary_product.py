"""What LRC's packed product takes beside float32, bf16 and torch's dynamic int8: latency and bytes.

    cd notebooks && ../.venv/bin/python -m experiments.ternary_product

Footgun: the fastest call of each way is compared, and the ways take turns: on a busy machine a mean
says nothing.
"""

import copy
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn

from experiments.record import Store, command, read_published
from nblib import runtime
from nblib.methods import lrc
from nblib.methods.lrc import packed

RECORD = "ternary-product"
WIDTHS, BATCHES, PERCENTS = (512, 1024, 2048, 4096), (1, 64), (15.0, 5.0)


def layer_of(width: int, percent: float) -> lrc.LRCLinear:
    """Return a square layer of random weights with a correction of random factors."""
    W = torch.randn(width, width) / width**0.5
    rank = lrc.rank_of(width, width, percent)
    layer = lrc.LRCLinear(
        lrc.ternary.ternary(W, "least_squares"), None, rank, scale="least_squares"
    )
    for factor in (layer.U, layer.V):
        nn.init.normal_(factor, std=0.1 / rank**0.5)
    return layer.requires_grad_(False)


def dynamic_int8(linear: nn.Linear) -> nn.Module:
    """Torch's own: int8 weights, inputs rounded per call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(
            nn.Sequential(linear), {nn.Linear}, dtype=torch.qint8
        )


def ways(width: int, device: torch.device) -> dict[str, tuple[nn.Module, torch.dtype, int]]:
    """Every way to compute a layer of this width: the module, the dtype of its inputs, and its
    bytes.
    """
    linear = nn.Linear(width, width, bias=False, device=device).requires_grad_(False)
    half = nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(
        False
    )
    found = {
        "float32": (linear, torch.float32, 4 * width**2),
        "bf16": (half, torch.bfloat16, 2 * width**2),
    }
    if device.type == "cpu":
        found["int8, dynamic"] = (dynamic_int8(linear), torch.float32, width**2)
    for percent in PERCENTS:
        layer = layer_of(width, percent).to(device)
        for factors in packed.FACTORS:
            module = packed.PackedLRC(layer, factors=factors)
            name = f"packed, {percent:g} %, factors {'int8' if factors == 'int8' else 'fp32'}"
            found[name] = (module, torch.float32, sum(b.nbytes for b in module.buffers()))
            # another copy, or it would find the first one's bytes in the cache
            if factors == "int8":
                found[f"{name}, x bf16"] = (copy.deepcopy(module), torch.bfloat16, found[name][2])
    alone = packed.PackedLRC(layer_of(width, 100 / width).to(device))
    found["packed, rank 1"] = (alone, torch.float32, sum(b.nbytes for b in alone.buffers()))
    return found


@torch.no_grad()
def latencies(
    ways: dict, width: int, rows: int, device: torch.device, *, rounds: int = 25
) -> dict[str, float]:
    """Seconds of the fastest call of each way.

    They take turns, so that a busy machine disturbs all of them alike.
    """
    inputs = {
        name: torch.randn(rows, width, device=device, dtype=dtype)
        for name, (_, dtype, _) in ways.items()
    }
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
    """Return the record with every way at all widths and numbers of rows; none that it holds is
    repeated.
    """
    compiled = device.type == "cpu" and packed.kernel() is not None
    store = Store(path, {"compiled": compiled, "threads": torch.get_num_threads()})
    made: dict[int, dict] = {}  # the ways of one width

    def lines_of(unit: dict) -> list[dict]:
        width = unit["width"]
        if width not in made:
            made.clear()
            made[width] = ways(width, device)
        seconds = latencies(made[width], width, unit["rows"], device)
        return [
            {"way": way, "seconds": seconds[way], "bytes": made[width][way][2]}
            for way in made[width]
        ]

    return store.measure(
        ({"width": width, "rows": rows} for width in widths for rows in BATCHES), lines_of
    )


def everything(path: Path, machine: runtime.Machine) -> dict:
    """Return the record of all widths."""
    return measure(path, machine.device)


published = partial(read_published, RECORD)


def table(record: dict) -> list[dict]:
    """Return a row per way and number of rows: bytes as a share of fp16, and per width how much
    quicker than float32 it is.
    """
    rows = []
    for batch in dict.fromkeys(line["rows"] for line in record["lines"]):
        lines = [line for line in record["lines"] if line["rows"] == batch]
        slow = {line["width"]: line["seconds"] for line in lines if line["way"] == "float32"}
        for way in dict.fromkeys(line["way"] for line in lines):
            ours = {line["width"]: line for line in lines if line["way"] == way}
            widest = ours[max(ours)]
            row = {
                "rows": batch,
                "way": way,
                "of fp16": f"{widest['bytes'] / (2 * widest['width'] ** 2):.2f}",
            }
            rows.append(
                row
                | {
                    f"{width} wide": f"{slow[width] / ours[width]['seconds']:.1f} x"
                    for width in ours
                }
            )
    return rows


if __name__ == "__main__":
    command(RECORD, __doc__, everything)
