"""`nblib gpu-check` on a card of values, as far as it goes: no kernel of bitsandbytes and no
compiler is behind it.

    python tests/card/run_gpu_check.py [--json FILE]

Small sizes. The debug mode of waits is noted down instead of set, at each reading of the loop and
at the end.
"""

import card_values  # isort: skip  # before torch
import argparse
import json
import sys
from pathlib import Path

import torch

from nblib import parallel, runtime
from nbworkbook import gpu_check
from nbworkbook.method_steps import Size

SIZE = Size("cuda", vocabulary=256, hidden=32, layers=2, heads=2, rows=2, length=32)
METHODS = ("dense", "LRC", "MoE with Muon")  # the others take too long here


def main() -> int:
    parser = argparse.ArgumentParser(description="nblib gpu-check on a card of values")
    parser.add_argument("--json", type=Path, help="a file for the rows, by check")
    options = parser.parse_args()
    card_values.begin()
    modes, at_reading, read = [], [], parallel.read
    torch.cuda.set_sync_debug_mode = modes.append
    parallel.read = lambda values: at_reading.append(modes[-1] if modes else None) or read(values)
    machine = runtime.pick("cuda", "bf16")
    answer = {"problem": gpu_check.problem(), "environment": gpu_check.environment(machine)}
    answer["rows"] = {
        name: gpu_check.attempt(lambda name=name: gpu_check.method(name, machine, SIZE))
        for name in METHODS
    }
    answer["at reading"], answer["modes"] = at_reading, modes
    answer["muon"] = gpu_check.attempt(
        lambda: gpu_check.orthogonal(machine, matrices=4, shape=(16, 32))
    )
    for name, row in answer["rows"].items():
        print(gpu_check.line(name, row))
    if options.json:
        options.json.write_text(json.dumps(answer))
    return int(not all(row["ok"] for row in answer["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
