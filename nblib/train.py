"""THE loop: one optimizer step, flat, the same for every method.

    loss  = sum over micro-batches and processes of the summed losses / sum of the supervised tokens
    step  = autocast forward, scaled backward, add up gradients over processes, unscale, clip, guard, update

Parameters stay fp32 and autocast lowers the products. Dividing by the *total* of supervised tokens makes 1 x 8, 2 x 4
and 8 x 1 rows the same step; a mean per micro-batch does not. Several processes share the rows of a batch, and `mesh`
says how they share the rest (parallel.py).

`steps()` is a generator that yields a record per step. Iterate to watch. In a notebook cell with controls `live()`
hands control to the kernel once per step. For the list alone call `fit()`. A folder of checkpoints makes it resume by
itself. Stop, Ctrl-C and SIGTERM end after the step in hand, with a checkpoint; a second Ctrl-C ends at once.

Footgun: the numbers of every step are read back before its update, so the host waits for a card once per step. That is
what keeps a poisoned update out: a guard that looks only every hundredth step lets ninety-nine of them through. What a
loss would ask of the card is answered before the batch travels (feed.py).
"""

import asyncio
import copy
import math
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from nblib import checkpoint, flops, guards, losses, parallel, runtime, wiring
from nblib.feed import Feed
from nblib.losses import Batch, Loss, Terms

MAX_ROLLBACKS = 3
SIGNALS = ("SIGINT", "SIGTERM")
REASONS = (None, "Stop", *SIGNALS, "a checkpoint that was not written")
TURNS = 8  # of the event loop per step: ipykernel takes four to hand a press to its button


def steps(
    model: nn.Module,
    batches: Iterator[Batch],
    optimizers: Optimizer | list[Optimizer],
    *,
    total: int,
    schedule: Callable[[int], float] = lambda step: 1.0,
    loss: Loss = losses.causal_lm,
    accumulate: int = 1,
    machine: runtime.Machine | None = None,
    clip: float = 1.0,
    evaluate: Callable[[], dict] | None = None,
    eval_every: int = 0,
    log: Callable[[dict], None] | None = None,
    log_every: int = 10,
    checkpoints: Path | None = None,
    checkpoint_every: int = 0,
    checkpoint_async: bool = False,
    keep: int = 2,
    spike: float = 0.0,
    snapshot_every: int = 20,
    controls=None,
    records: list[dict] | None = None,
    mesh: str = "auto",
) -> Iterator[dict]:
    """Train for `total` optimizer steps, yielding what happened in each. See `fit` for the options."""
    machine = machine or runtime.pick()
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    params = [p for group in _groups(optimizers) for p in group["params"]]
    _check(model, optimizers, params, machine, total=total, accumulate=accumulate, log_every=log_every)
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.precision == "fp16")
    for group in _groups(optimizers):
        group.setdefault("base_lr", group["lr"])
    plan = parallel.plan(machine, mesh)
    feed = Feed(batches, accumulate=accumulate, device=machine.device, deal=plan.mine)
    everything = dict(model=model, optimizers=optimizers, batches=feed, scaler=scaler)
    progress = {"step": 0, "tokens": 0, "seconds": 0.0, "cut": 1.0, "rollbacks": 0, "recent": [], "clipped": []}
    records = [] if records is None else records
    snapshot, reason, warned, clock, speed = None, None, set(), _Clock(), flops.Speed(machine)
    checkpoints = parallel.every(checkpoints)[0]

    saver = checkpoint.Saver(checkpoints, keep=keep, background=checkpoint_async)
    with _stop_signals() as stop, parallel.Spread(plan, model, loss, optimizers) as spread, saver:
        params = [p for group in _groups(optimizers) for p in group["params"]]  # under a mesh they are shards
        if checkpoints and (state := checkpoint.resume(checkpoints, progress=progress, **everything)):
            progress, snapshot = state["training"]["progress"], state["training"].get("snapshot")
            records[:] = state["training"].get("history", [])
            _say(f"resumed at step {progress['step']} of {total}")
        recent, clipped = _windows(progress)
        before = progress.get("seconds", 0.0)  # of training, in the processes before this one
        model.train()

        def capture(clone: bool = False, **more) -> dict:
            now = progress | {"recent": list(recent), "clipped": list(clipped)}
            return checkpoint.capture(progress=now, clone=clone, **everything, **more)

        while progress["step"] < total and not reason:
            step = progress["step"]
            if spike and (snapshot is None or step % snapshot_every == 0):
                snapshot = capture(clone=True)
            rate = schedule(step) * progress["cut"] * (controls.lr_scale if controls else 1.0)
            for group in _groups(optimizers):
                group["lr"] = group["base_lr"] * rate

            # ------------------------------------------------------------------ the step
            micro, count = next(feed)
            epoch = getattr(batches, "epoch", None)  # of these, before the next are fetched
            clock.data_ready()
            generators = runtime.generators()
            tokens = parallel.added(torch.full((), count, device=machine.device))  # over all processes
            sums: Terms = {}
            with speed.counting(micro):
                for batch in micro:
                    with machine.autocast():
                        terms = spread(batch, last=batch is micro[-1])  # the loss; then gradients are added up
                    scaler.scale(sum(terms.values()) / tokens).backward()
                    sums = {name: sums.get(name, 0) + term.detach() for name, term in terms.items()}
            for optimizer in optimizers:
                scaler.unscale_(optimizer)  # before the clip, or the clip acts on the scale
            norm = parallel.gathered(nn.utils.clip_grad_norm_(params, clip if clip else math.inf))
            if step + 1 < total:  # while a card works
                feed.fetch_ahead()
            *terms, norm, count = parallel.read([*sums.values(), norm, tokens])  # here the host waits for the device
            if count == 0:
                raise ValueError(f"step {step}: no label is supervised (all are {losses.IGNORED}), so there is no loss")
            terms = {name: value / count for name, value in zip(sums, terms)}
            value = sum(terms.values())
            fault = _fault(value, norm, recent, spike, scaler)
            if fault and not spike:
                where = _explain(model, optimizers, generators, micro, spread, machine)
                raise guards.NonFinite(f"step {step}: {fault}. Source: {where}")
            if not fault:
                for optimizer in optimizers:
                    scaler.step(optimizer)  # skipped by the scaler itself when a gradient overflowed
                scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            # ------------------------------------------------------------------

            record = {"step": step + 1, "of": total, "loss": value, **terms, "lr": _groups(optimizers)[0]["lr"]}
            if fault:
                _roll_back(snapshot, model, optimizers, feed, scaler, progress, fault)
                recent, clipped = _windows(progress)
                records.append(record | {"event": "rollback", "back_to": progress["step"]})
                yield records[-1]
                continue
            progress["step"], progress["tokens"] = step + 1, progress["tokens"] + int(count)
            recent.append(value)
            clipped.append(bool(clip) and norm > clip)
            record |= {"grad_norm": norm, "tokens": progress["tokens"], **clock.step(count, total - step - 1)}
            progress["seconds"] = record["seconds"] = before + clock.spent
            if epoch is not None:
                record["epoch"] = epoch + 1
            with clock.paused():  # the first time it measures the machine
                record |= speed.step(micro, clock.spent)
            if scaler.is_enabled():
                record["loss_scale"] = scaler.get_scale()
            if machine.device.type == "cuda":
                record["memory_gib"] = torch.cuda.max_memory_allocated(machine.device) / 2**30
            wish = REASONS[-1] if saver.failed() else stop.name or ("Stop" if controls and controls.stop else None)
            reason = REASONS[parallel.highest(REASONS.index(wish), machine.device)]
            if reason == REASONS[-1]:
                saver.wait()  # raises why, in every process
            last = step + 1 == total or reason is not None
            if evaluate and eval_every and ((step + 1) % eval_every == 0 or step + 1 == total):
                with clock.paused(), spread.whole():
                    record |= {f"eval_{k}": v for k, v in evaluate().items()}
                    model.train()
            if log and (last or (step + 1) % log_every == 0 or "eval_loss" in record) and runtime.rank() == 0:
                log(record | ({"stopped": reason} if reason else {}))
            _warn_of_habits(step, clipped, clock, (epoch or 0, getattr(batches, "tokens", 0)), warned)
            records.append(record)
            if checkpoints and (last or (checkpoint_every and (step + 1) % checkpoint_every == 0)):
                with clock.paused():
                    saver.save(capture(history=records, snapshot=snapshot), last=last)
            if reason:
                record["stopped"] = reason
                saved = ", checkpoint saved" if checkpoints else ""
                _say(f"stopped by {reason} after step {step + 1} of {total}{saved}")
            yield record
    if reason in SIGNALS and not (controls and runtime.interactive()):  # who shows no Stop would go on as if trained
        raise KeyboardInterrupt if reason == "SIGINT" else SystemExit(128 + signal.SIGTERM)


def fit(*args, on_step: Callable[[dict], None] | None = None, **options) -> list[dict]:
    """Train and return one record per step, with those of before a resume.

    total        optimizer steps                    schedule      step -> factor on every group's base rate
    loss         (model, batch) -> summed terms     accumulate    micro-batches per optimizer step
    machine      device and autocast precision      clip          largest gradient norm, 0 for none
    evaluate     () -> facts, every eval_every      log           called with a record every log_every
    checkpoints  folder; resumes from it            keep          checkpoints kept
    checkpoint_async  the steps go on while a checkpoint is written, from a copy of the states (checkpoint.py)
    spike        factor over the median loss that triggers a rollback to the last snapshot, 0 for never; with it
                 non-finite losses roll back too instead of ending the run
    controls     an object with .stop and .lr_scale, read once per step
    records      of steps: a list that it fills with what this returns, for cells that iterate
    mesh         of several processes: ddp, fsdp or hsdp (parallel.py); auto is ddp, and nothing where there is one
    """
    records = []
    for record in steps(*args, records=records, **options):
        if on_step:
            on_step(record)
    return records


async def live(records: Iterator[dict]) -> AsyncIterator[dict]:
    """The same steps for a notebook cell: hand control to the kernel after each, so that widgets are heard."""
    for record in records:
        yield record
        for _ in range(TURNS):
            await asyncio.sleep(0)


def cosine(total: int, *, warmup: int = 0, floor: float = 0.0) -> Callable[[int], float]:
    """Linear warm-up whose first step already moves, then a cosine to `floor` that stays there afterwards."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def adamw(model: nn.Module, *, lr: float, weight_decay: float = 0.1, betas=(0.9, 0.95)) -> AdamW:
    """Fused AdamW over what trains; matrices decay, norms and biases do not."""
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
    model: nn.Module, rows: Tensor, *, machine: runtime.Machine, token_bytes: Tensor | None = None, batch: int = 16
) -> dict:
    """Cross-entropy on fixed rows (R, T), with the tokens it was measured on and, given their sizes, bits per byte."""
    nats = 0.0
    with wiring.evaluating(model):
        for part in rows.split(batch):
            part = part.to(machine.device)
            with machine.autocast():
                nats += float(losses.causal_lm(model, {"input_ids": part, "labels": part})["ce"])
    predicted = rows[:, 1:]
    facts = {"loss": nats / predicted.numel(), "tokens": predicted.numel()}
    if token_bytes is not None:
        facts["bytes"] = int(token_bytes[predicted].sum())
        facts["bits_per_byte"] = nats / math.log(2) / facts["bytes"]
    return facts


def _check(model: nn.Module, optimizers: list[Optimizer], params: list[Tensor], machine, **positive: int) -> None:
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")
    if params and params[0].device.type != machine.device.type:
        raise ValueError(f"the model is on {params[0].device}, the run on {machine.device}; move the model first")
    wiring.refuse_missed(model, optimizers)
    if strangers := set(map(id, params)) - set(map(id, wiring.trainable(model).values())):
        raise ValueError(f"{len(strangers)} parameters in the optimizer are frozen or not of this model")


def _groups(optimizers: list[Optimizer]) -> list[dict]:
    """Asked anew each time: a restored optimizer has other groups."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _windows(progress: dict) -> tuple[deque, deque]:
    """The recent losses, and which of the recent steps were clipped."""
    return deque(progress["recent"], maxlen=32), deque(progress["clipped"], maxlen=100)


def _fault(value: float, norm: float, recent: deque, spike: float, scaler) -> str | None:
    """Why this step must not be taken. With a scaler an overflowing gradient is ordinary: the scaler skips the step,
    until the scale has come down and it still overflows."""
    if spike and guards.is_finite(value) and (note := guards.spiked(value, recent, factor=spike)):
        return note
    skips = scaler.is_enabled() and scaler.get_scale() >= 1
    if guards.is_finite(value) and (guards.is_finite(norm) or skips):
        return None
    return f"loss {value}, gradient norm {norm}"


def _warn_of_habits(step: int, clipped: deque, clock: "_Clock", epoch: tuple[int, int], warned: set[str]) -> None:
    habits = {"clip": guards.clipped_too_often(clipped), "data": guards.starved(clock.waited, clock.spent)}
    habits["epoch"] = guards.repeated(*epoch)
    for kind, warning in habits.items():
        if warning and kind not in warned:  # once per run
            warned.add(kind)
            _say(f"step {step + 1}: {warning}")


def _explain(model, optimizers, generators: dict, micro: list[Batch], spread, machine) -> str:
    """Run the step again under hooks: same batches, same dropout masks."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    runtime.set_generators(generators)

    def again() -> None:
        for batch in micro:
            with machine.autocast():
                terms = spread(batch, last=False)
            sum(terms.values()).backward()

    return guards.source_of_nonfinite(model, again)


def _roll_back(snapshot, model, optimizers, batches, scaler, progress: dict, why: str) -> None:
    """Everything back to the snapshot; then half the rate, for good, and on past the data that did it."""
    count, at = progress["rollbacks"] + 1, progress["step"]
    if count > MAX_ROLLBACKS:
        raise guards.NonFinite(
            f"step {at}: {why}, after {MAX_ROLLBACKS} rollbacks: lower the learning rate or look at the data"
        )
    past = batches.state_dict() if hasattr(batches, "state_dict") else None
    progress |= copy.deepcopy(checkpoint.restore(snapshot, model, optimizers, batches=batches, scaler=scaler))
    progress |= {"rollbacks": count, "cut": 0.5**count}  # the schedule multiplies by this, so it cannot undo it
    if past is not None:
        batches.load_state_dict(past)
    _say(f"step {at + 1}: {why}. Rolled back to step {progress['step']}, rate cut to {progress['cut']:g}, data skipped")


def _say(sentence: str) -> None:
    if runtime.rank() == 0:
        print(sentence, flush=True)


class _Clock:
    """Where the time goes, without what is not training."""

    def __init__(self):
        self.last = time.perf_counter()
        self.waited = self.spent = self.tokens = 0.0
        self.steps = 0

    def data_ready(self) -> None:
        self.waited += time.perf_counter() - self.last

    def step(self, tokens: float, left: int) -> dict:
        now = time.perf_counter()
        self.spent, self.last = self.spent + now - self.last, now
        self.tokens, self.steps = self.tokens + tokens, self.steps + 1
        return {"tokens_per_s": self.tokens / self.spent, "eta_s": left * self.spent / self.steps}

    @contextmanager
    def paused(self):
        yield
        self.last = time.perf_counter()


@contextmanager
def _stop_signals() -> Iterator[SimpleNamespace]:
    """Turn the first Ctrl-C or SIGTERM into a wish; the loop grants it when its state is whole."""
    stop = SimpleNamespace(name=None)
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals reach the main thread only
        return

    def wish(number, frame):
        if stop.name == signal.Signals(number).name:  # a scheduler's SIGTERM comes as SIGINT as well: one wish
            raise KeyboardInterrupt
        stop.name = stop.name or signal.Signals(number).name

    before = {number: signal.signal(number, wish) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
