"""The training loop: `step` takes one optimizer step, and `steps` repeats it.

    loss  = sum of the losses of all micro-batches and processes / sum of their supervised tokens
    step  = autocast forward, scaled backward, add gradients over processes, unscale, clip, update

Parameters stay fp32 and autocast lowers the products. Dividing by the sum of all supervised tokens
makes 1 x 8, 2 x 4 and 8 x 1 rows the same step; a mean per micro-batch does not. Several processes
share the rows of a batch, and `machine.mesh` says how they share the rest (parallel.py).

`steps()` is a generator that yields a record per step. `fit()` returns the list. `live()` iterates
in a notebook cell whose buttons work meanwhile. What a caller may add stands in files of its own:

    checkpoints=Checkpoints(folder, every=100)   save, and resume by itself      checkpoint.py
    recovery=Recovery(spike=2.0)                 go back behind a loss spike     recovery.py
    watch=Watch(evaluate=..., log=...)           look at it while it runs        watch.py

Stop, Ctrl-C and SIGTERM end after the step in hand, with a checkpoint; a second Ctrl-C ends at
once.

Footgun: the numbers of each step are read before its update, so the host waits for a card once per
step. This keeps an update by nan out of the weights; a guard that looks at every hundredth step
lets ninety-nine of them through. Questions about labels are answered before the batch travels.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from nblib import guards, hf_forward, losses, mfu, parallel, runtime, stopping, wiring
from nblib.batch import Batch
from nblib.checkpoint import Checkpoints, Saver
from nblib.device_batches import DeviceBatches
from nblib.losses import Loss, Terms
from nblib.progress import Clock, Progress, say, warn_of_habits
from nblib.recovery import Recovery, find_fault, name_source, roll_back
from nblib.training_state import Training
from nblib.watch import Watch

TURNS = 8  # of the event loop per step: ipykernel takes four to hand a press to its button


class Numbers(NamedTuple):
    """What a step read back from the device: means over the supervised tokens of all processes."""

    loss: float
    terms: dict[str, float]
    grad_norm: float
    tokens: int
    fault: str | None = None  # why the weights were not updated


def step(
    training: Training, micro: list[Batch], count: int, *, recovery: Recovery | None = None
) -> Numbers:
    """Take one optimizer step on micro-batches with `count` supervised tokens."""
    machine, scaler = training.machine, training.scaler
    generators = runtime.generators()
    tokens = parallel.added(torch.full((), count, device=machine.device))  # over all processes
    supervised = torch.zeros((), device=machine.device)  # by the loss

    # each micro-batch adds its part of the gradient of: sum of losses / tokens of the whole step
    sums: Terms = {}
    with training.speed.counting(micro), hf_forward.experts_in_autocast():
        for batch in micro:
            with machine.autocast(), losses.counting_supervised(batch) as counts:
                terms = training.spread(batch, last=batch is micro[-1])
            scaler.scale(sum(terms.values()) / tokens).backward()
            supervised += torch.stack(counts).amin()
            for name, term in terms.items():
                sums[name] = sums.get(name, 0) + term.detach()

    # clip the gradient of the loss, not that of the scaled loss
    for optimizer in training.optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(training.parameters, training.clip or math.inf)

    # the host prepares the next batches while a card works; then it waits for the numbers
    if training.progress.step + 1 < training.total:
        training.batches.fetch_ahead()
    numbers = _read(training.progress.step, sums, supervised, parallel.gathered(norm), tokens)

    # update, unless the numbers say that it would do harm
    fault = find_fault(training, numbers.loss, numbers.grad_norm, recovery)
    if fault and not recovery:
        source = name_source(training, micro, generators)
        raise guards.NonFinite(f"step {training.progress.step}: {fault}. Source: {source}")
    if not fault:
        for optimizer in training.optimizers:
            scaler.step(optimizer)  # the scaler skips it when a gradient overflowed
        scaler.update()
    for optimizer in training.optimizers:
        optimizer.zero_grad(set_to_none=True)
    return numbers._replace(fault=fault)


def steps(
    model: nn.Module,
    batches: Iterator[Mapping[str, Tensor]],
    optimizers: Optimizer | list[Optimizer],
    *,
    total: int,
    schedule: Callable[[int], float] = lambda step: 1.0,
    loss: Loss = losses.causal_lm,
    accumulate: int = 1,
    clip: float = 1.0,
    machine: runtime.Machine | None = None,
    checkpoints: Checkpoints | None = None,
    recovery: Recovery | None = None,
    watch: Watch | None = None,
) -> Iterator[dict]:
    """Train for `total` optimizer steps and yield a record of each.

    schedule    step -> factor on the base rate of each parameter group
    loss        (model, batch) -> {name: loss summed over the supervised tokens}
    accumulate  micro-batches per optimizer step
    clip        largest gradient norm; 0 for none
    machine     device, autocast precision, and how processes share the model
    """
    watch = watch or Watch()
    training = _begin(model, batches, optimizers, total, loss, accumulate, clip, machine)
    progress = training.progress
    records = watch.records
    device = training.machine.device
    reason = None
    warned: set[str] = set()
    saver = Saver(checkpoints)

    with stopping.signals() as received, training.spread, saver:
        training.model = training.spread.model  # under fsdp a copy; the weights return at the end
        snapshot = training.resume(saver.folder, records)
        clock = Clock(progress.seconds)
        training.model.train()

        while progress.step < total and not reason:
            # what recovery goes back to, and the rate of this step
            if recovery and (snapshot is None or progress.step % recovery.snapshot_every == 0):
                snapshot = training.capture(clone=True)
            rate = schedule(progress.step) * progress.lr_factor * watch.lr_scale
            for group in training.groups:
                group["lr"] = group["base_lr"] * rate

            # the step
            micro, count = next(training.batches)
            epoch = getattr(batches, "epoch", None)  # of these, before the next are fetched
            clock.data_ready()
            numbers = step(training, micro, count, recovery=recovery)
            record = _record(training, numbers)
            if numbers.fault:
                roll_back(training, snapshot, recovery, numbers.fault)
                record |= {"event": "rollback", "back_to": progress.step}
                records.append(record)
                yield record
                continue

            # what is known after it
            _advance(progress, numbers, training.clip)
            record |= clock.step(numbers.tokens, total - progress.step)
            progress.seconds = record["seconds"]
            with clock.paused():  # the first time it measures the machine
                record |= _figures(training, micro, clock, epoch)

            # stop, evaluate, log
            reason = stopping.agree(received, watch.pressed_stop, saver.failed(), device)
            if reason == stopping.SAVE_FAILED:
                saver.wait()  # raises the reason, in every process
            last = progress.step == total or reason is not None
            with clock.paused():
                record |= watch.evaluate_if_due(training)
            watch.log_if_due(record | ({"stopped": reason} if reason else {}), last=last)
            warn_of_habits(progress, clock, epoch or 0, getattr(batches, "tokens", 0), warned)

            # save
            records.append(record)
            if saver.is_due(progress.step, last=last):
                with clock.paused():
                    saver.save(training.capture(history=records, snapshot=snapshot), last=last)
            if reason:
                record["stopped"] = reason
                end = ", checkpoint saved" if saver.folder else ""
                say(f"stopped by {reason} after step {progress.step} of {total}{end}")
            yield record

    stopping.end_process(reason, shows_stop=watch.shows_stop)


def fit(*args, on_step: Callable[[dict], None] | None = None, **options) -> list[dict]:
    """Train as `steps` does; return a record per step, after those of before a resume."""
    watch = options.pop("watch", None) or Watch()
    for record in steps(*args, watch=watch, **options):
        if on_step:
            on_step(record)
    return watch.records


async def live(records: Iterator[dict]) -> AsyncIterator[dict]:
    """Yield the records in a notebook cell; the kernel serves its widgets after each."""
    for record in records:
        yield record
        for _ in range(TURNS):
            await asyncio.sleep(0)


def cosine(total: int, *, warmup: int = 0, floor: float = 0.0) -> Callable[[int], float]:
    """Return a schedule: linear warm-up, then a cosine to `floor`, which stays afterwards.

    The first step of the warm-up already moves the weights.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def adamw(model: nn.Module, *, lr: float, weight_decay: float = 0.1, betas=(0.9, 0.95)) -> AdamW:
    """Return fused AdamW over what trains; matrices decay, norms and biases do not."""
    trainable = list(wiring.trainable(model).values())
    if not trainable:
        raise ValueError("nothing to train: no parameter of the model requires a gradient")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    rows: Tensor,
    *,
    machine: runtime.Machine,
    token_bytes: Tensor | None = None,
    batch: int = 16,
) -> dict:
    """Return cross-entropy on fixed rows (R, T), and the number of tokens it was measured on.

    With the size in bytes of each token, bits per byte as well.
    """
    nats = 0.0
    with wiring.evaluating(model):
        for part in rows.split(batch):
            part = part.to(machine.device)
            with machine.autocast(), hf_forward.experts_in_autocast():
                nats += float(losses.causal_lm(model, {"input_ids": part, "labels": part})["ce"])
    predicted = rows[:, 1:]
    facts = {"loss": nats / predicted.numel(), "tokens": predicted.numel()}
    if token_bytes is not None:
        facts["bytes"] = int(token_bytes[predicted].sum())
        facts["bits_per_byte"] = nats / math.log(2) / facts["bytes"]
    return facts


def _begin(
    model: nn.Module,
    batches: Iterator[Mapping[str, Tensor]],
    optimizers: Optimizer | list[Optimizer],
    total: int,
    loss: Loss,
    accumulate: int,
    clip: float,
    machine: runtime.Machine | None,
) -> Training:
    """Return a training before its first step; ValueError where it cannot be."""
    machine = machine or runtime.pick()
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)

    # refuse what would fail or train nothing
    for name, value in {"total": total, "accumulate": accumulate}.items():
        if value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group["params"]]
    if parameters and parameters[0].device.type != machine.device.type:
        raise ValueError(
            f"the model is on {parameters[0].device}, the run on {machine.device}; "
            "move the model first"
        )
    wiring.refuse_missed(model, optimizers)
    strangers = set(map(id, parameters)) - set(map(id, wiring.trainable(model).values()))
    if strangers:
        raise ValueError(
            f"{len(strangers)} parameters in the optimizer are frozen or not of this model"
        )

    # the schedule multiplies these
    for group in groups:
        group.setdefault("base_lr", group["lr"])

    plan = parallel.plan(machine)
    return Training(
        model=model,
        optimizers=optimizers,
        batches=DeviceBatches(
            batches, accumulate=accumulate, device=machine.device, shard_rows=plan.mine
        ),
        total=total,
        clip=clip,
        machine=machine,
        spread=parallel.Spread(plan, model, loss, optimizers),
        scaler=torch.amp.GradScaler(machine.device.type, enabled=machine.precision == "fp16"),
        speed=mfu.Speed(machine),
    )


def _read(step: int, sums: Terms, supervised: Tensor, norm: Tensor, tokens: Tensor) -> Numbers:
    """Read the numbers of a step: here the host waits for the device, once."""
    *terms, supervised_tokens, grad_norm, count = parallel.read(
        [*sums.values(), supervised, norm, tokens]
    )
    if count == 0:
        raise ValueError(
            f"step {step}: no label is supervised (all are {losses.IGNORED}), so there is no loss"
        )
    if supervised_tokens != count:
        raise ValueError(
            f"step {step}: the loss supervised {supervised_tokens:.0f} tokens and is divided by "
            f"the {count:.0f} that the batch had before it: mask labels where batches are made, "
            "not inside the loss"
        )
    means = {name: value / count for name, value in zip(sums, terms)}
    return Numbers(sum(means.values()), means, grad_norm, int(count))


def _record(training: Training, numbers: Numbers) -> dict:
    """Return the record of a step with what it read back."""
    return {
        "step": training.progress.step + 1,
        "of": training.total,
        "loss": numbers.loss,
        **numbers.terms,
        "lr": training.groups[0]["lr"],
        "grad_norm": numbers.grad_norm,
    }


def _advance(progress: Progress, numbers: Numbers, clip: float) -> None:
    """Count a step that was taken."""
    progress.step += 1
    progress.tokens += numbers.tokens
    progress.recent.append(numbers.loss)
    progress.clipped.append(bool(clip) and numbers.grad_norm > clip)


def _figures(training: Training, micro: list[Batch], clock: Clock, epoch: int | None) -> dict:
    """Return figures of speed, memory, epoch and loss scale for a record."""
    figures = {"tokens": training.progress.tokens}
    if epoch is not None:
        figures["epoch"] = epoch + 1
    figures |= training.speed.step(micro, clock.spent)
    if training.scaler.is_enabled():
        figures["loss_scale"] = training.scaler.get_scale()
    device = training.machine.device
    if device.type == "cuda":
        figures["memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return figures
