"""`python -m tests.cost [PAIRS [NAME]]`: what watching costs, for programs at the sizes of their authors, for the forty
toys, and for networks of several sizes.

Each program is run plain and watched in turns, in one process, so that whatever else the machine does hits both. The
time of a step is that between two steps of its first optimizer. Told are the watched over the plain time of the middle
step, of all ten, and of the whole program with its report.

Footgun: on a machine that does other things one pair of runs tells nothing. The middle of the pairs' ratios is told.
"""

import random
import statistics
import sys
import time
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as torch_optimizer

import train_doctor as doctor

from . import forty, published

STEPS = 10


def mlp(width: int, deep: int = 2, rows: int = 64):
    def run() -> None:
        layers = [part for _ in range(deep) for part in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(width, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(STEPS + 2):
            x, y = torch.randn(rows, width), torch.randint(0, 10, (rows,))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return run


SIZES = {
    "mlp, 3 layers of 32": mlp(32),
    "mlp, 3 layers of 256": mlp(256),
    "mlp, 3 layers of 1024": mlp(1024),
    "mlp, 12 layers of 64": mlp(64, 11),
}


def timed(program, watched: bool) -> tuple[list[float], float]:
    """Seconds between steps of the optimizer that stepped first, and of all."""
    at: list[float] = []
    first: list[int] = []

    def stepped(optimizer, args, kwargs) -> None:
        first[:] = first or [id(optimizer)]
        if id(optimizer) == first[0]:
            at.append(time.process_time())

    forty.KEPT.clear()
    torch.manual_seed(0)
    random.seed(0)
    hook = torch_optimizer.register_optimizer_step_post_hook(stepped)
    try:
        begun = time.process_time()
        if watched:
            with doctor.watch(say=False, steps=STEPS):
                program()
        else:
            program()
        whole = time.process_time() - begun
    finally:
        hook.remove()
        forty.KEPT.clear()
    return [b - a for a, b in zip([begun, *at], at)][:STEPS], whole


def ratios(program, pairs: int) -> tuple[float, float, float, float] | None:
    """Watched over plain, of the middle step, of all steps, of the whole; and the plain middle step in milliseconds."""
    middle, steps, wholes, usual = [], [], [], []
    for turn in range(pairs + 1):
        runs = {watched: timed(program, watched) for watched in ((False, True) if turn % 2 else (True, False))}
        if turn and runs[False][0]:  # the first pair imports and warms up
            plain, watched = runs[False], runs[True]
            later = statistics.median(plain[0][1:] or plain[0]), statistics.median(watched[0][1:] or watched[0])
            middle.append(later[1] / later[0])
            usual.append(later[0])
            steps.append(sum(watched[0]) / sum(plain[0]))
            wholes.append(watched[1] / plain[1])
    return (*map(statistics.median, (middle, steps, wholes)), 1e3 * min(usual)) if middle else None


def main(pairs: int = 5, only: str = "") -> None:
    told = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, program in (published.PROGRAMS | SIZES | forty.PROGRAMS).items():
            if only in name:
                told[name] = ratios(program, pairs)
                if told[name]:
                    print("{1:5.2f} {2:5.2f} {3:5.2f} {4:8.2f} ms  {0}".format(name, *told[name]), flush=True)
                else:
                    print(f"no optimizer of torch: {name}")
    for kind in (published, forty):
        every = [r for name, r in told.items() if r and name in kind.PROGRAMS]
        if every:
            print(
                f"{len(every)} of {kind.__name__}, median: middle step {statistics.median(r[0] for r in every):.2f}, ",
                end="",
            )
            print(f"all steps {statistics.median(r[1] for r in every):.2f}, ", end="")
            print(f"whole program {statistics.median(r[2] for r in every):.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 5, *sys.argv[2:3])
