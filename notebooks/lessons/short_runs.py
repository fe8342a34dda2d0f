"""Six methods, each trained for a few steps on the same rows: the runs that notebook 20 makes when
it is given none.

    full          all weights of the base model, by AdamW
    lora          a low-rank adapter of peft beside every linear layer
    lrc           ternary weights, and a trained correction of low rank
    ard           ARD-LoRA: the adapter with noise and a KL term per rank
    moe           a new mixture of experts, by Muon
    distillation  a new small student, taught by the base model and by the text

The first four adapt the base model. The other two begin with new weights and have read no text
before, so they are a group of their own (`FROM_SCRATCH`). `make` trains every method at every seed:
same rows in the same order, same tokens per step, same number of steps. What differs is the method
and its rate, which is the best of the few that were tried.

A run is a folder like any other (`runs.Run`): parameters, environment, metrics, result, all sealed
at the end. It is made once per key: its parameters, the base model, the text, the versions and the
code of this file. A second `make` finds it. Methods take turns, seed by seed, so that a minute in
which the machine is busy hits all of them.

Footgun: seconds are those of training. What a method needs before its first step (singular values,
two passes over the text for LRC) is counted apart, as `prepare_seconds` and `prepare_tokens`; a
fair comparison adds it.
"""

import copy
import hashlib
import itertools
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim import Optimizer

from nblib import files, losses, memory, models, paths, runtime, train
from nblib.losses import Loss
from nblib.methods import ard, lrc, moe
from nblib.methods.ard import adapter_files, ranks
from nblib.methods.distill import objective
from nblib.methods.muon import groups
from nbworkbook import base_model, code_hash, input_hash, parameters, runs
from nbworkbook.setup import Setup

METHODS = ("full", "lora", "lrc", "ard", "moe", "distillation")
FROM_SCRATCH = ("moe", "distillation")
GROUP = "20_compare-runs"  # the folder under outputs/ that holds them
RATES = {"full": 1e-3, "lora": 1e-2, "lrc": 1.8e-3, "ard": 6e-3, "moe": 3e-2, "distillation": 6e-3}
# of LoRA and ARD; of LRC; of ARD; batches that LRC looks at
RANK, PERCENT, BETA, CALIBRATION = 8, 15.0, 1.25e-3, 2
JUDGED = 16  # rows that are looked at while training; ARD fits its priors to as many others
# steps; a shorter run has no checkpoint and is made again after a kill
LOOK_EVERY, CHECKPOINT_EVERY = 25, 50


class Contender(NamedTuple):
    """A model ready to train, with what the loop needs and how its result is stored."""

    model: nn.Module
    optimizers: list[Optimizer]
    loss: Loss
    save: Callable[[Path], Any]  # what has to be kept of it, into a folder
    needs_base: bool = False  # what is stored is of use only beside the base model
    teacher: nn.Module | None = None
    before_look: Callable[[], Any] | None = None
    clip: float = 1.0
    tokens: int = 0  # read before the first step


def full(setup: Setup, *, lr: float, seed: int, rows: int) -> Contender:
    model = copy.deepcopy(setup.model)
    return Contender(model, [train.adamw(model, lr=lr)], losses.causal_lm, model.save_pretrained)


def lora(setup: Setup, *, lr: float, seed: int, rows: int) -> Contender:
    shape = dict(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers by a name that is on its way out
        model = get_peft_model(copy.deepcopy(setup.model), LoraConfig(**shape))
    models.hold(model, setup.machine.frozen_dtype)
    optimizer = train.adamw(model, lr=lr, weight_decay=0.0)
    return Contender(model, [optimizer], losses.causal_lm, model.save_pretrained, needs_base=True)


def corrected(setup: Setup, *, lr: float, seed: int, rows: int) -> Contender:
    model, batches = copy.deepcopy(setup.model), setup.batches(rows=rows, seed=seed)
    moments = lrc.input_moments(model, itertools.islice(batches, CALIBRATION))
    lrc.attach(model, percent=PERCENT, init="svd_activation", moments=moments)
    models.hold(model, setup.machine.frozen_dtype)
    read = CALIBRATION * rows * setup.validation.shape[1]
    optimizer = train.adamw(model, lr=lr, weight_decay=0.0)
    return Contender(
        model,
        [optimizer],
        losses.causal_lm,
        lambda folder: lrc.save(model, folder / "lrc"),
        tokens=read,
    )


def noisy(setup: Setup, *, lr: float, seed: int, rows: int) -> Contender:
    model = ard.attach(copy.deepcopy(setup.model), rank=RANK, alpha=2 * RANK)
    models.hold(model, setup.machine.frozen_dtype)
    optimizer = train.adamw(model, lr=lr, weight_decay=0.0)
    loss = ard.loss(model, beta=BETA, warmup=5, optimizer=optimizer)
    pool = dict.fromkeys(("input_ids", "labels"), setup.validation[JUDGED : 2 * JUDGED])

    def fit_priors() -> None:
        ranks.estimate_priors(model, [pool], machine=setup.machine)

    more = dict(
        needs_base=True, before_look=fit_priors, clip=0.0
    )  # the first KL is large; a clip would act on it alone
    return Contender(
        model, [optimizer], loss, lambda folder: adapter_files.export_peft(model, folder), **more
    )


def mixture(setup: Setup, *, lr: float, seed: int, rows: int) -> Contender:
    vocabulary, length = len(setup.model.get_output_embeddings().weight), setup.validation.shape[1]
    shape = dict(hidden=128, layers=2, heads=4, length=length, seed=seed, moe_intermediate_size=128)
    model = models.tiny(vocabulary, family="qwen3_moe", **shape).to(setup.machine.device)
    # Muon for the matrices, AdamW for the rest
    optimizers = groups.optimizers(model, lr=lr, adamw_lr=lr)
    loss = moe.loss(balance_weight=0.1, z_weight=0.001)
    return Contender(model, optimizers, loss, model.save_pretrained, clip=0.0)


def student(setup: Setup, *, lr: float, seed: int, rows: int) -> Contender:
    vocabulary, length = len(setup.model.get_output_embeddings().weight), setup.validation.shape[1]
    shape = dict(hidden=128, layers=2, heads=2, length=length, seed=seed)
    model = models.tiny(vocabulary, **shape).to(setup.machine.device)
    teacher = models.as_teacher(copy.deepcopy(setup.model), setup.machine.frozen_dtype)
    loss = objective.from_teacher(
        teacher, 1.0, kd=0.5, ce=0.5
    )  # the teacher knows the old text, the labels the new one
    return Contender(
        model, [train.adamw(model, lr=lr)], loss, model.save_pretrained, teacher=teacher
    )


BUILD = {
    "full": full,
    "lora": lora,
    "lrc": corrected,
    "ard": noisy,
    "moe": mixture,
    "distillation": student,
}


# ------------------------------------------------------------------ the runs


def make(
    setup: Setup,
    values: dict[str, Any],
    *,
    methods: Sequence[str] = METHODS,
    seeds: Sequence[int] = (0, 1, 2),
    tell: Callable[[str], None] = print,
) -> list[Path]:
    """Return the folders of the runs, those that are there already and those that are trained now.
    `values` are the shared parameters: steps, rows, lr_scale, and what says which model and text
    `setup` is (model, recipe, corpus).
    """
    if "distillation" in methods and losses.backbone_and_head(setup.model) is None:
        others = [name for name in methods if name != "distillation"]
        raise ValueError(
            f"methods: distillation cannot learn from a {type(setup.model).__name__}, whose "
            "head is more than one "
            f"matrix product; allowed are {', '.join(others)}"
        )
    wanted = [plan(setup, values, method, seed) for seed in seeds for method in methods]
    group = files.make_folder(paths.outputs() / GROUP)
    with files.locked(group / ".lock", waiting="another process makes these runs; waiting for it"):
        stored = _stored(group)
        todo = [job for job in wanted if job["key"] not in stored]
        if todo:
            _warm_up(setup, rows=values["rows"])
        for n, job in enumerate(todo, start=1):
            given = job["parameters"]
            name = f"run {n} of {len(todo)}: {given['method']}, seed {given['seed']}"
            tell(name)
            step = partial(_step, tell, name)
            stored[job["key"]] = train_one(setup, job, on_step=step)
    tell(f"{len(todo)} runs made, {len(wanted) - len(todo)} found in outputs/{GROUP}")
    return [stored[job["key"]] for job in wanted]


def _step(tell: Callable[[str], None], name: str, record: dict) -> None:
    tell(f"{name}, step {record['step']} of {record['of']}, training loss {record['loss']:.3f}")


def plan(setup: Setup, values: dict[str, Any], method: str, seed: int) -> dict[str, Any]:
    """Return the parameters of a run, the base model it begins from, and the key of all that
    decides its result.
    """
    if method not in METHODS:
        raise ValueError(f"method = {method!r}: allowed are {', '.join(METHODS)}")
    shape = {"length": setup.validation.shape[1], "eval_rows": len(setup.held_out)}
    device = {"device": setup.machine.device.type, "precision": setup.machine.precision}
    rate = RATES[method] * values["lr_scale"]
    given = {"method": method, "seed": seed, **values, "lr": rate, **shape, **device}
    begins = origin(values, setup.machine)
    code = code_hash.digest(["import lessons.short_runs"])
    read = hashlib.sha256(setup.stream.numpy().tobytes()).hexdigest()[:16]
    versions = input_hash.versions(["torch", "transformers", "tokenizers", "peft", "numpy"])
    parts = [given, begins, read, versions, torch.get_num_threads(), code]
    return {
        "parameters": given,
        "base": begins,
        "key": hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
    }


def origin(values: dict[str, Any], machine: runtime.Machine) -> dict[str, str]:
    """Which model a run begins from, as base.json says it; a model that is named is known by its
    name.
    """
    if values["model"]:
        return {"base": values["model"], "content": values["model"]}
    folder = paths.store() / base_model.key(values["recipe"], machine)
    return {"base": folder.name, "content": files.read_json(folder / "base.json")["content"]}


def _stored(group: Path) -> dict[str, Path]:
    """Return the finished runs by key.

    Damaged ones are passed over with a sentence; their runs are made again.
    """
    done = {}
    for folder in sorted(path.parent for path in group.glob("*/run.json")):
        if why := runs.problem(folder):
            print(f"{paths.short(folder)} does not count: {why}")
        elif runs.status(folder) == "done":
            done[runs.record(folder).get("key", "")] = folder
    return done


@contextmanager
def opened(
    given: dict[str, Any], begins: dict[str, str], *, group: str = GROUP, key: str = ""
) -> Iterator[runs.Run]:
    """Open a run's folder: its request and hardware are written at the start, the seals at the end.

    While the block lasts the folder is locked, so a run whose process died counts as killed.
    """
    folder = (key and _unfinished(group, key)) or runs.new_folder(group)
    lock = files.claim(folder)
    try:
        files.write(folder / "parameters.yaml", parameters.dump_yaml(given))
        files.write(folder / "environment.json", files.to_json(runtime.environment(), indent=1))
        files.merge(folder / "base.json", begins)
        begun = time.time()
        runs.note(folder, {"notebook": group, "status": "running", "started": begun, "key": key})
        run = runs.Run(folder, given)
        yield run
        if run.events is not None:
            run.events.close()
        sealed = runs.seal(folder)
        ended = time.time()
        runs.note(
            folder,
            {"status": "done", "finished": ended, "seconds": ended - begun, "sealed": sealed},
        )
    finally:
        os.close(lock)


def _unfinished(group: str, key: str) -> Path | None:
    """Return the folder of a run with this key that was killed and has a checkpoint: it goes on
    there. One without goes away, as does one that is done, since it is made again.
    """
    for folder in sorted(path.parent for path in (paths.outputs() / group).glob("*/run.json")):
        if (
            runs.problem(folder)
            or runs.record(folder).get("key") != key
            or runs.status(folder) == "running"
        ):
            continue
        if runs.status(folder) != "done" and any((folder / "checkpoints").glob("step-*")):
            return folder
        shutil.rmtree(folder)
    return None


def train_one(
    setup: Setup, job: dict[str, Any], *, on_step: Callable[[dict], None] | None = None
) -> Path:
    """Train a run to its end and store what it left; its folder."""
    given = job["parameters"]
    seed, steps, rows, method = (given[name] for name in ("seed", "steps", "rows", "method"))
    with opened(given, job["base"], key=job["key"]) as run, runtime.seeded(seed):
        began = time.perf_counter()
        contender = BUILD[method](setup, lr=given["lr"], seed=seed, rows=rows)
        prepared = {
            "prepare_seconds": time.perf_counter() - began,
            "prepare_tokens": contender.tokens,
        }

        def look() -> dict[str, float]:
            if contender.before_look:
                contender.before_look()
            return train.evaluate(contender.model, setup.validation[:JUDGED], machine=setup.machine)

        first = {f"eval_{name}": value for name, value in look().items()}
        run.log({"step": 0, "of": steps, "tokens": 0, "seconds": 0.0, **first})
        long = (
            dict(checkpoints=train.Checkpoints(run.checkpoints, every=CHECKPOINT_EVERY))
            if steps > CHECKPOINT_EVERY
            else {}
        )
        records = train.fit(
            contender.model,
            setup.batches(rows=rows, seed=seed),
            contender.optimizers,
            total=steps,
            schedule=train.cosine(steps, warmup=max(1, steps // 8)),
            loss=contender.loss,
            clip=contender.clip,
            machine=setup.machine,
            watch=train.Watch(
                evaluate=look,
                eval_every=max(1, min(steps // 4, LOOK_EVERY)),
                log=run.log,
                log_every=max(1, steps // 12),
            ),
            on_step=on_step,
            **long,
        )
        end = {
            "held_out_loss": setup.loss(contender.model),
            "start_loss": first["eval_loss"],
            **prepared,
        }
        end |= {name: records[-1][name] for name in ("tokens", "seconds")} | measured(
            contender, setup, rows=rows
        )
        end |= on_disk(contender, setup.model, run.dir / "stored") | {
            "from_scratch": method in FROM_SCRATCH
        }
        run.result(method=method, seed=seed, **end)
        shutil.rmtree(run.checkpoints, ignore_errors=True)
    return run.dir


def measured(contender: Contender, setup: Setup, *, rows: int) -> dict[str, int]:
    """Bytes while training.

    One more step is taken to see what it holds at most beyond weights and optimizer state.
    """
    model, optimizers = contender.model, contender.optimizers
    batch = {
        k: v.to(setup.machine.device) for k, v in next(setup.batches(rows=rows, seed=1)).items()
    }
    model.train()
    with memory.peak(setup.machine.device) as peak:
        with setup.machine.autocast():
            terms = contender.loss(model, batch)
        (sum(terms.values()) / losses.supervised(batch["labels"])).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    del terms
    others = contender.teacher.parameters() if contender.teacher else ()
    held = {id(t): t for t in (*model.parameters(), *model.buffers(), *others)}
    weights = sum(t.nbytes for t in held.values())
    state = sum(
        t.nbytes
        for o in optimizers
        for s in o.state.values()
        for t in s.values()
        if isinstance(t, torch.Tensor)
    )
    trains = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    facts = {
        "trainable_bytes": trains,
        "optimizer_bytes": state,
        "weights_bytes": weights,
        "step_bytes": peak.bytes,
    }
    return facts | {"peak_bytes": weights + state + peak.bytes}


def on_disk(contender: Contender, model: nn.Module, folder: Path) -> dict[str, int]:
    """Bytes of what has to be kept, which is written, counted and removed; and of all that has to
    be loaded to use it, with the base model beside an adapter.
    """
    contender.save(files.make_folder(folder))
    # a card and a config are not weights
    kept = [path for path in folder.rglob("*") if path.suffix == ".safetensors"]
    size = sum(path.stat().st_size for path in kept)
    shutil.rmtree(folder)
    beside = sum(p.nbytes for p in model.parameters()) if contender.needs_base else 0
    return {"disk_bytes": size, "loaded_bytes": size + beside}


def _warm_up(setup: Setup, *, rows: int) -> None:
    """Two steps that nobody counts: libraries prepare themselves at their first products."""
    with runtime.seeded(0):
        contender = full(setup, lr=1e-4, seed=0, rows=rows)
        batches = setup.batches(rows=rows, seed=0)
        train.fit(contender.model, batches, contender.optimizers, total=2, machine=setup.machine)
