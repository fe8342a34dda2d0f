"""Throughput and memory of the loop against the HF Trainer and a bare torch loop, and of the
chunked loss.

    make bench            every section          python tests/benchmarks.py loop vocabulary loss
                          data drawing

The same model, batches, AdamW, clip and precision for all three; each measurement is a process of
its own, and the contenders take turns, so that a machine whose speed drifts treats them alike. Time
and memory are measured apart: on a CPU the kernel's high-water mark only tells the truth while
every large tensor is mapped anew, which slows a step. What counts is the ratio within a round; its
median and its range over the rounds are printed and written to outputs/benchmarks.json.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

import torch

from nblib import losses, memory, models, paths, runtime, text, train

TINY = dict(vocab=4096, hidden=256, layers=4, rows=8, length=256, steps=24, accumulate=1)
REAL = dict(vocab=151_936, hidden=256, layers=4, rows=8, length=256, steps=6, accumulate=1)
LOOPS = ("ours", "bare", "trainer")


def batches(shape: dict) -> list[dict]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(shape["steps"] * shape["accumulate"]):
        ids = torch.randint(shape["vocab"], (shape["rows"], shape["length"]), generator=draw)
        made.append({"input_ids": ids, "labels": ids})
    return made


def ours(model, data, shape, machine, mark) -> None:
    optimizer = train.adamw(model, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.999))
    options = dict(total=shape["steps"], accumulate=shape["accumulate"], machine=machine)
    train.fit(model, iter(data), optimizer, on_step=lambda record: mark(), **options)


def bare(model, data, shape, machine, mark) -> None:
    """What one writes without a library: the model's own loss, fused AdamW, clip."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    k = shape["accumulate"]
    for step in range(shape["steps"]):
        for batch in data[step * k : step * k + k]:
            with machine.autocast():
                loss = model(**batch, use_cache=False).loss / k
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        mark()


def trainer(model, data, shape, machine, mark) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Mark(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            mark()

    class InOrder(Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    rows = [{k: v[i] for k, v in batch.items()} for batch in data for i in range(shape["rows"])]
    options = TrainingArguments(
        output_dir="/tmp/benchmark-trainer",
        per_device_train_batch_size=shape["rows"],
        gradient_accumulation_steps=shape["accumulate"],
        max_steps=shape["steps"],
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        bf16=machine.precision == "bf16",
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=machine.device.type == "cpu",
        optim="adamw_torch_fused",
        dataloader_num_workers=0,
    )
    InOrder(model, options, train_dataset=rows, callbacks=[Mark()]).train()


def measure(loop: str, shape: dict, what: str) -> float:
    """One contender in this process: tokens per second after two warm-up steps, or peak GiB over
    the model.
    """
    runtime.seed_all(0)
    machine = runtime.pick()
    model = models.tiny(shape["vocab"], hidden=shape["hidden"], layers=shape["layers"]).to(
        machine.device
    )
    data = [{k: v.to(machine.device) for k, v in batch.items()} for batch in batches(shape)]
    marks: list[float] = []
    with memory.peak(machine.device) if what == "peak_gib" else contextlib.nullcontext() as peak:
        globals()[loop](model, data, shape, machine, lambda: marks.append(time.perf_counter()))
    tokens = shape["rows"] * shape["length"] * shape["accumulate"] * (shape["steps"] - 2)
    return peak.gib if peak else tokens / (marks[-1] - marks[1])  # the first two steps warm up


def in_own_process(loop: str, shape: dict, what: str) -> float:
    command = [sys.executable, __file__, "--one", loop, json.dumps(shape), what]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(out.stdout.strip().splitlines()[-1])


def rounds(shape: dict, count: int) -> dict:
    """Alternate the contenders; ratios of ours to the others, per round."""
    report = {}
    for what in ("tokens_per_s", "peak_gib"):
        found: dict[str, list[float]] = {loop: [] for loop in LOOPS}
        for number in range(count):
            for loop in LOOPS if number % 2 == 0 else LOOPS[::-1]:
                found[loop].append(in_own_process(loop, shape, what))
        report |= {f"{loop} {what}": spread(values) for loop, values in found.items()}
        for other in LOOPS[1:]:
            ratios = [a / b for a, b in zip(found["ours"], found[other])]
            report[f"ours / {other}: {what}"] = spread(ratios)
    return report


def spread(values: list[float]) -> dict:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "runs": len(values),
    }


def losses_compared(count: int = 3) -> dict:
    """Plain, ours and torch's own linear cross-entropy at 151,936 entries, 4,096 tokens, hidden
    256, fp32.
    """
    from torch.nn import functional as F

    hidden = torch.randn(4096, 256, requires_grad=True)
    weight = (0.02 * torch.randn(151_936, 256)).requires_grad_()
    targets = torch.randint(151_936, (4096,))
    contenders = {
        "plain": lambda: F.cross_entropy(hidden @ weight.T, targets, reduction="sum"),
        "ours": lambda: losses.chunked_loss(hidden, weight, targets),
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        chunked = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256)
        own = F.linear_cross_entropy
        contenders["torch, default options"] = lambda: own(hidden, weight, targets, reduction="sum")
        contenders["torch, batch_chunk_size=256"] = lambda: own(
            hidden, weight, targets, reduction="sum", options=chunked
        )
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gib: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(count + 1):
        for name, loss in contenders.items():
            hidden.grad = weight.grad = None
            started = time.perf_counter()
            loss().backward()
            seconds[name].append(time.perf_counter() - started)
    for name, loss in contenders.items():
        hidden.grad = weight.grad = None
        with memory.peak() as peak:
            loss().backward()
        gib[name].append(peak.gib)
    report = {}
    for name in contenders:
        after = seconds[name][1:]  # the first round warms up
        report[f"{name}: seconds"] = spread(after)
        report[f"{name}: peak GiB"] = spread(gib[name])
        report[f"{name}: seconds / plain"] = spread(
            [s / p for s, p in zip(after, seconds["plain"][1:])]
        )
    return report


def data_pipeline() -> dict:
    """Seconds per batch of the packed data, to see that it cannot starve the loop."""
    stream = torch.randint(4096, (600_000,))
    data = text.Batches(stream, rows=16, length=256)
    started = time.perf_counter()
    for _ in range(500):
        next(data)
    return {"seconds per batch of 16 x 256": spread([(time.perf_counter() - started) / 500])}


# In a kernel where a person sits: the same steps with and without a live curve, in turns, seconds
# of each.
DRAWING = """
import json
from nblib import models, runtime, text, train
from nbworkbook import show

runtime.seed_all(0)
machine, times = runtime.pick("cpu", "fp32"), {"drawn": [], "silent": []}
model = models.tiny(4096, hidden=64, layers=2, heads=2)
stream = __import__("torch").randint(4096, (100_000,))
for number in range(2 * ROUNDS + 2):
    name = ("drawn", "silent", "silent", "drawn")[number % 4]
    data, optimizer = text.Batches(stream, rows=4, length=64), train.adamw(model, lr=1e-3)
    options = dict(total=STEPS, machine=machine)
    if name == "drawn":
        training = show.Training("tiny")
        options |= dict(watch=train.Watch(controls=training, records=training.records))
        await training.follow(train.steps(model, data, optimizer, **options))
        assert training._page is not None, "no widgets: this kernel takes itself for headless"
        record, first = training.record, training.records[4]
    else:
        records = [record async for record in train.live(train.steps(model, data, optimizer, **options))]
        record, first = records[-1], records[4]
    times[name] += [record["seconds"] - first["seconds"]] if number > 1 else []  # the first two warm up
print(json.dumps(times))
"""


def drawing(count: int = 20, steps: int = 400) -> dict:
    """What a live curve costs a tiny training, as the ratio of neighbours in time: at most 1.02."""
    from jupyter_client.manager import start_new_kernel

    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NBLIB_HEADLESS", "NBLIB_RUN_DIR")
    }
    manager, client = start_new_kernel(env=env | {"JPY_SESSION_NAME": "a person"})
    outputs: list[str] = []
    try:
        code = DRAWING.replace("ROUNDS", str(count)).replace("STEPS", str(steps))
        reply = client.execute_interactive(
            code, output_hook=lambda m: outputs.append(m["content"].get("text", ""))
        )
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{reply['content']['ename']}: {reply['content']['evalue']}")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    # what comes before are remarks of libraries
    times = json.loads("".join(outputs).strip().splitlines()[-1])
    ratios = [drawn / silent for drawn, silent in zip(times["drawn"], times["silent"])]
    return {"drawn / silent: seconds": spread(ratios), "silent seconds": spread(times["silent"])}


SECTIONS = {
    "loop": lambda: rounds(TINY, 5),
    "vocabulary": lambda: rounds(REAL, 3),
    "loss": losses_compared,
    "data": data_pipeline,
    "drawing": drawing,
}


def main(chosen: list[str]) -> None:
    if strangers := [name for name in chosen if name not in SECTIONS]:
        sys.exit(f"section {strangers[0]!r}: allowed are {', '.join(SECTIONS)}")
    report = {"environment": runtime.environment(runtime.pick())}
    for name in chosen or SECTIONS:
        print(f"\n{name}: {SECTIONS[name].__doc__ or ''}", flush=True)
        report[name] = SECTIONS[name]()
        for what, s in report[name].items():
            print(
                f"  {what:42} {s['median']:>12.4g}   [{s['min']:.4g}, {s['max']:.4g}]  n={s['runs']}",
                flush=True,
            )
    path = paths.outputs() / "benchmarks.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1))
    print(f"\n{path}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], json.loads(sys.argv[3]), sys.argv[4])))
    else:
        main(sys.argv[1:])
