"""Is compiled code faster here? Seconds of a training step by mode, beside eager mode on the same
machine.

    gain of a mode = seconds of a step in eager mode / seconds of a step in that mode

`graphs alone` captures the graphs and generates no code (backend aot_eager): what is left is the
cost of capturing. The others are torch's own names for what inductor may do. The steps of all modes
are made in turn, so that all meet the same machine, and the median of each counts.

Footgun: the first call of a mode compiles. That takes from seconds to minutes and is no part of the
gain; it is reported beside it, because a short run never earns it back.
"""

import time

import torch

from lessons.pitfalls import bench
from lessons.progress import each
from nblib import compiling, losses, models

MODES = {
    "eager": None,
    "graphs alone": dict(backend="aot_eager"),
    "default": {},
    "reduce-overhead": dict(mode="reduce-overhead"),
    "max-autotune": dict(mode="max-autotune"),
}


def by_mode(
    names: list[str],
    *,
    rows: int = 2,
    length: int = 256,
    device: torch.device | str = "cpu",
    rounds: int = 5,
) -> list[dict]:
    """Seconds per step and gain over eager mode of each named mode, with the seconds that its first
    two calls took.
    """
    if strangers := [name for name in names if name not in MODES]:
        raise ValueError(f"mode = {strangers[0]!r}: allowed are {', '.join(MODES)}")
    ids = torch.randint(4096, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)
    steps = {name: _step(name, ids) for name in dict.fromkeys(["eager", *names])}
    with bench.fresh_dynamo():
        first = {
            name: _seconds(steps[name]) + _seconds(steps[name])
            for name in each(steps, "ways to compile")
        }
        median = bench.medians(steps, rounds)
    return [
        {
            "mode": name,
            "first calls s": first[name],
            "step s": median[name],
            "gain": median["eager"] / median[name],
        }
        for name in steps
    ]


def _step(mode: str, ids: torch.Tensor):
    """Return a forward and a backward pass of a model of its own, which waits until the device is
    done.
    """
    model = models.tiny(4096).to(ids.device)
    if MODES[mode] is not None:
        compiling.compile_blocks(model, **MODES[mode])

    def step() -> None:
        losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"].backward()
        if ids.device.type == "cuda":
            torch.cuda.synchronize()

    return step


def _seconds(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
