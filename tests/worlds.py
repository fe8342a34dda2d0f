"""What tests/test_parallel.py runs in worlds of several processes.

`torchrun worlds.py <results.json> <folder> <training>:<mesh>[:<from>-<to>[:async]] ...` trains one
after the other. With from-to it writes checkpoints, into a folder named by the training; `async` in
the background, into `<name>-async`.
"""

import json
import sys
from pathlib import Path

import torch
from conftest import FP32
from torch import nn

from nblib import checkpoint, compiling, guards, losses, models, runtime, text, train, wiring
from nblib.methods import ard, lrc, moe
from nblib.methods.distill import objective
from nblib.methods.muon import groups

STEPS, LENGTH = 12, 32
DRAWS: list[float] = []  # what `drawing` drew


class Ragged(text.Batches):
    """The first rows of a batch supervise fewer tokens: a mean of means would be another number."""

    def __next__(self):
        batch = super().__next__()
        labels = batch["labels"].clone()
        labels[: len(labels) // 2, :20] = losses.IGNORED
        return batch | {"labels": labels}


def tiny(**options) -> nn.Module:
    return models.tiny(256, hidden=32, layers=2, heads=2, **options)


def dense():
    model = tiny()
    return model, train.adamw(model, lr=1e-2), losses.causal_lm


def checkpointed():
    model = compiling.checkpoint_blocks(tiny())
    return model, train.adamw(model, lr=1e-2), losses.causal_lm


def compiled():
    model = compiling.compile_blocks(tiny(), backend="eager")
    return model, train.adamw(model, lr=1e-2), losses.causal_lm


def corrected():
    model = tiny()
    lrc.attach(model, percent=15.0)
    return model, train.adamw(model, lr=1e-2), losses.causal_lm


def joint():
    model = tiny()
    lrc.attach(model, percent=15.0, joint=True)
    return model, train.adamw(model, lr=1e-2), losses.causal_lm


def latents():
    """Each row draws the noise that its first tokens decide, so it is the same noise whoever has
    the row.
    """
    model = ard.attach(tiny(), rank=4, alpha=4.0)
    optimizer = train.adamw(model, lr=1e-2)
    inner = ard.loss(model, beta=1e-3, warmup=3, optimizer=optimizer)

    def loss(running, batch):
        calls, before = iter(range(1000)), torch.randn_like

        def by_row(like):
            call = next(calls)
            seeds = [hash((call, *row[:8].tolist())) % 2**31 for row in batch["input_ids"]]
            draws = [
                torch.randn(like.shape[1:], generator=torch.Generator().manual_seed(seed))
                for seed in seeds
            ]
            return torch.stack(draws)

        torch.randn_like = by_row
        try:
            return inner(running, batch)
        finally:
            torch.randn_like = before

    return model, optimizer, loss


def experts():
    model = tiny(family="qwen3_moe")
    return (
        model,
        groups.optimizers(model, lr=0.02, adamw_lr=3e-3, compute="fp32"),
        moe.loss(balance_weight=0.1),
    )


def taught():
    teacher = models.as_teacher(models.tiny(256, hidden=48, layers=2, heads=2, seed=7))
    model = tiny()
    return model, train.adamw(model, lr=1e-2), objective.from_teacher(teacher, ce=0.5)


def part_of_it():
    """A head that the loss needs in every second step only: in the others it has no gradient."""
    model = tiny()
    model.extra, seen = nn.Linear(32, 256, bias=False), []
    with torch.no_grad():
        model.extra.weight.copy_(model.lm_head.weight)
    optimizer = train.adamw(model, lr=1e-2)

    def loss(running, batch):
        seen.append(1)
        hidden, weight = losses.hidden_states(running, batch)
        rows, targets = losses.shifted_rows(hidden, batch["labels"])
        chosen = running.extra.weight if len(seen) % 4 < 2 else weight
        return {"ce": losses.chunked_loss(rows, chosen, targets)}

    return model, optimizer, loss


def drawing():
    """Noise of its own in every process, as dropout is."""
    model = tiny()

    def loss(running, batch):
        hidden, weight = losses.hidden_states(running, batch)
        mask = nn.functional.dropout(torch.ones_like(hidden), 0.2)
        DRAWS.append(float((mask[0] * torch.arange(32)).sum()))
        rows, targets = losses.shifted_rows(hidden * mask, batch["labels"])
        return {"ce": losses.chunked_loss(rows, weight, targets)}

    return model, train.adamw(model, lr=1e-2), loss


def spiky():
    """One loss is no number, and the loop goes back to its snapshot."""
    model, seen = tiny(), []

    def loss(running, batch):
        seen.append(1)
        (value,) = losses.causal_lm(running, batch).values()
        return {"ce": value * float("nan") if len(seen) == 11 else value}

    return model, train.adamw(model, lr=1e-2), loss


def poisoned():
    """The same, where nothing allows to go back. The number is broken in the second block."""
    model, seen = tiny(), []

    def poison(block, args, output):
        seen.append(1)
        return torch.full_like(output, float("nan")) if len(seen) >= 6 else output

    model.model.layers[1].mlp.register_forward_hook(poison)
    return model, train.adamw(model, lr=1e-2), losses.causal_lm


EVERY = (
    dense,
    checkpointed,
    compiled,
    corrected,
    joint,
    latents,
    experts,
    taught,
    part_of_it,
    drawing,
)
EVERY += (spiky, poisoned)
TRAININGS = {training.__name__: training for training in EVERY}


def run(
    name: str, mesh: str = "auto", steps: str = "", folder: Path | None = None, how: str = ""
) -> dict:
    first, _, last = steps.partition("-")
    runtime.seed_all(0)
    model, optimizers, loss = TRAININGS[name]()
    before = {id(p) for p in model.parameters()}
    attributes = {m: set(vars(m)) for m in model.modules()}
    rows = (
        torch.randint(1, 4, (20_000,), generator=torch.Generator().manual_seed(1)).cumsum(0) % 256
    )
    evaluate = Ragged(rows, rows=2, length=LENGTH, seed=5)
    held_out = torch.stack([next(evaluate)["input_ids"][0] for _ in range(2)])
    DRAWS.clear()
    options = {}
    if steps:
        place = folder / "-".join(filter(None, (name, how)))
        every = 2 if how else 4
        options["checkpoints"] = train.Checkpoints(place, every=every, background=how == "async")
    if name == "spiky":
        options["recovery"] = train.Recovery(spike=100.0)
    records = train.fit(
        model,
        Ragged(rows, rows=4, length=LENGTH),
        optimizers,
        total=int(last or STEPS),
        accumulate=2,
        loss=loss,
        machine=FP32._replace(mesh=mesh),
        schedule=train.cosine(STEPS, warmup=2),
        watch=train.Watch(
            evaluate=lambda: train.evaluate(model, held_out, machine=FP32), eval_every=4
        ),
        **options,
    )
    assert {id(p) for p in model.parameters()} == before and not any(
        "FSDP" in str(type(m)) for m in model.modules()
    )
    added = {name for m, names in attributes.items() for name in set(vars(m)) - names}
    # nothing of the engine is left
    assert not [name for name in added if "fsdp" in name or "compos" in name]
    assert all(
        type(p) is nn.Parameter and not hasattr(p, "full_tensor") for p in model.parameters()
    )
    with wiring.in_mode(model, training=False):
        after = train.evaluate(model, held_out, machine=FP32)["loss"]
    return {
        "losses": [r["loss"] for r in records if "event" not in r],
        "norms": [r["grad_norm"] for r in records if "event" not in r],
        "evaluated": [r["eval_loss"] for r in records if "eval_loss" in r] + [after],
        "weights": [float(p.detach().double().abs().sum()) for p in model.parameters()],
        "tokens": [r["tokens"] for r in records if "event" not in r],
        "draws": list(DRAWS),
        "next": float(torch.rand(())),
    }


def main() -> None:
    torch.set_num_threads(1)
    results = {}
    for job in sys.argv[3:]:
        name, mesh, steps, how = f"{job}::".split(":")[:4]
        try:
            results[job] = run(name, mesh, steps, Path(sys.argv[2]), how)
        except (ValueError, guards.NonFinite, checkpoint.CheckpointError) as error:
            results[job] = str(error)
    every = [None] * runtime.world()
    torch.distributed.all_gather_object(every, results)
    if runtime.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(every))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
