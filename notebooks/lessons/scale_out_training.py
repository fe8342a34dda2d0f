"""The same training in one process, under DDP and under FSDP2: losses, bytes held by each rank,
time of a step.

`measured` and `part` run inside of a `scale_out.World`, by nblib's own loop with `machine.mesh`.
What is counted:

    held    bytes of the tensors that a rank holds when the optimizer has just updated: parameters,
            gradients, moments
    peak    the most that it holds within a later step: activations, the weights that are together
            for one block, and the buffers of gradients as well

Both count tensors, so they are exact and the same each time. On a card the allocator counts the
peak.

Footgun: when a training under FSDP ends, nblib puts all weights together again on every rank. A
peak that is taken after the loop is the peak of that, so it is taken in a step before the last.
Counting slows a step down, so that step is not among those whose time is taken.
"""

import shutil
import statistics
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from nblib import checkpoint, compiling, memory, models, runtime, text, train
from nbworkbook import show

VOCABULARY = 256
KINDS = {"parameters": "tab:blue", "gradients": "tab:red", "moments": "#e5c100"}
SETTLED = 2  # steps before time and peak are taken: the moments exist by then


def stream(tokens: int = 20_000) -> Tensor:
    """Return a walk through the vocabulary in small strides: something that can be learned."""
    return (
        torch.randint(1, 4, (tokens,), generator=torch.Generator().manual_seed(1)).cumsum(0)
        % VOCABULARY
    )


def held(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that this rank holds of what the optimizer works on."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [
        v
        for state in optimizer.state.values()
        for v in state.values()
        if isinstance(v, Tensor) and v.ndim
    ]
    kinds = {
        "parameters": params,
        "gradients": [p.grad for p in params if p.grad is not None],
        "moments": moments,
    }
    return {kind: sum(_bytes(t) for t in tensors) for kind, tensors in kinds.items()}


def _bytes(tensor: Tensor) -> int:
    # the part of a sharded tensor that is here
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def measured(
    mesh: str,
    *,
    steps: int,
    rows: int,
    hidden: int,
    layers: int,
    length: int,
    accumulate: int = 1,
    threads: int = 1,
    device: str = "cpu",
    precision: str = "fp32",
    checkpointed: bool = False,
) -> dict:
    """One training and what it took."""
    torch.set_num_threads(threads)
    machine = runtime.pick(device, precision, mesh)
    runtime.seed_all(0)
    kinds, seconds, records = [], [], []
    options = dict(total=steps, accumulate=accumulate, machine=machine)
    with memory.peak(machine.device) as peak:
        model = _model(hidden, layers).to(machine.device)
        if checkpointed:
            compiling.checkpoint_blocks(model)
        optimizer = train.adamw(model, lr=1e-3)
        watching = optimizer.register_step_post_hook(lambda *_: kinds.append(held(optimizer)))
        batches = text.Batches(stream(), rows=rows // accumulate, length=length)
        loop = train.steps(model, batches, optimizer, watch=train.Watch(records=records), **options)
        for _ in range(SETTLED):
            next(loop)
        peak.forget()
        next(loop)
    for _ in range(steps - SETTLED - 2):
        began = time.perf_counter()
        next(loop)
        seconds.append(time.perf_counter() - began)
    for _ in loop:  # the last step, after which all is whole again
        pass
    watching.remove()
    return {
        "losses": [r["loss"] for r in records],
        **kinds[-1],
        "held": sum(kinds[-1].values()),
        "peak": peak.bytes,
        "seconds of a step": statistics.median(seconds),
    }


def _model(hidden: int, layers: int) -> nn.Module:
    return models.tiny(VOCABULARY, hidden=hidden, layers=layers, heads=4)


def part(
    mesh: str, folder: str, *, first: int, last: int, total: int, rows: int = 4, device: str = "cpu"
) -> dict:
    """Return steps of a small training from a folder of checkpoints; with `first` 0 the folder is
    not read but written.
    """
    machine = runtime.pick(device, "fp32", mesh)
    runtime.seed_all(0)
    model = _model(32, 2).to(machine.device)
    records = train.fit(
        model,
        text.Batches(stream(), rows=rows, length=32),
        train.adamw(model, lr=1e-2),
        total=last,
        schedule=train.cosine(total, warmup=2),
        machine=machine,
        checkpoints=train.Checkpoints(Path(folder) if folder else None),
    )
    return {"losses": [r["loss"] for r in records], "steps": [r["step"] for r in records[first:]]}


def waits(
    mesh: str, folder: str, *, hidden: int, layers: int, device: str = "cpu", saves: int = 5
) -> dict:
    """How long a step waits for its checkpoint, written at once and in the background, and what
    each rank wrote.
    """
    machine, steps = runtime.pick(device, "fp32", mesh), []
    for way in ("at once", "in the background"):
        runtime.seed_all(0)
        model = _model(hidden, layers).to(machine.device)
        batches, optimizer = text.Batches(stream(), rows=4, length=16), train.adamw(model, lr=1e-3)
        place, took = Path(folder) / way, []
        if runtime.rank() == 0:
            shutil.rmtree(place, ignore_errors=True)  # of a run that was killed
        background = way == "in the background"
        checkpoints = train.Checkpoints(place, every=2, keep=1, background=background)
        options = dict(total=2 * saves + 3, machine=machine, checkpoints=checkpoints)
        began = time.perf_counter()
        for _ in train.steps(model, batches, optimizer, **options):
            took.append(time.perf_counter() - began)
            began = time.perf_counter()
        # the first save prepares what the later ones use
        saving, others = took[3:-1:2], took[2:-1:2]
        ms = {"step that saves": min(saving), "step after it": min(others)}
        steps.append(
            {"written": way}
            | {f"{step}, ms": round(1e3 * seconds, 1) for step, seconds in ms.items()}
        )
    files = sorted(checkpoint.folders(place)[0].iterdir())
    return {
        "steps": steps,
        "files": [{"file": file.name, "bytes": file.stat().st_size} for file in files],
    }


def apart(ours: list[float], theirs: list[float]) -> float:
    """Return the largest difference of two lists of losses."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def overview(took: dict[str, list[dict]], differences: dict[str, float]) -> list[dict]:
    """Return a row per training: what its hungriest rank held, in MB, and how far its losses are
    from one process's.
    """
    lines = []
    for name, by_rank in took.items():
        most = {kind: max(facts[kind] for facts in by_rank) / 1e6 for kind in (*KINDS, "peak")}
        lines.append(
            {"training": name, "ranks": len(by_rank)} | {k: round(mb, 1) for k, mb in most.items()}
        )
        lines[-1] |= {"ms per step": round(1e3 * max(r["seconds of a step"] for r in by_rank))}
        lines[-1] |= {"largest difference of losses": differences[name]}
    return lines


def picture(took: dict[str, list[dict]]) -> show.Picture:
    """Return what each rank holds, stacked, with its peak as a line."""
    figure = Figure(figsize=(6.8, 2.8), layout="constrained")
    axes = figure.add_subplot()
    bars = [
        (f"{name}\nrank {n}", facts)
        for name, by_rank in took.items()
        for n, facts in enumerate(by_rank)
    ]
    below = [0.0] * len(bars)
    for kind, colour in KINDS.items():
        heights = [facts[kind] / 1e6 for _, facts in bars]
        axes.bar(range(len(bars)), heights, bottom=below, color=colour, label=kind)
        below = [a + b for a, b in zip(below, heights)]
    axes.hlines(
        [facts["peak"] / 1e6 for _, facts in bars],
        [n - 0.4 for n in range(len(bars))],
        [n + 0.4 for n in range(len(bars))],
        color="black",
        label="peak",
    )
    axes.set_xticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
    axes.set(ylabel="MB of a rank")
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    words = (
        "A bar per rank. Blue: parameters, red: gradients, yellow: moments of AdamW, all "
        "counted by their sizes. The "
    )
    words += "black line is the peak of a step. Under fsdp each rank holds its part of all three."
    return show.Picture(figure, words, title="What each rank holds")
