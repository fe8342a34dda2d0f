"""What tests/torture.py kills beside the notebooks: a training, a teacher cache, records, a base
model; small programs.

    python tests/torture_jobs.py NAME FOLDER

Each prints `cell 1/1` once its imports are done, so that most kills fall into the work, goes on
where an earlier one was killed, and leaves what it made in FOLDER. `store` makes the base model
that the notebooks under torture start from: a small one, under the name of the default recipe, so
that no notebook spends its time on it.
"""

import hashlib
import os
import sys
from pathlib import Path

from nblib import files
from nbworkbook import runs

# they need none of it, and start two seconds sooner after every kill
if sys.argv[1:] and sys.argv[1] != "records":
    import torch

    from nblib import models, runtime, text, train
    from nblib.methods.distill import teacher_cache
    from nblib.methods.muon import groups
    from nbworkbook import base_model

    FP32 = runtime.pick("cpu", "fp32")
    torch.set_num_threads(1)
    runtime.seed_all(0)

SMALL = dict(
    steps=20, rows=8, length=64, vocab=1024, hidden=64, layers=2, muon_lr=0.02, adamw_lr=3e-3
)
TINY = SMALL | dict(steps=4, vocab=300, hidden=32)


def _stream(vocabulary: int) -> "torch.Tensor":
    steps = torch.randint(1, 4, (20_000,), generator=torch.Generator().manual_seed(1))
    return steps.cumsum(0) % vocabulary


def adamw(folder: Path) -> None:
    """Dropout draws from the generator at every step, and a checkpoint is written at every step."""
    model = models.tiny(512, family="gpt2", hidden=64, layers=2, heads=2)
    _train(folder, model, train.adamw(model, lr=1e-2), every=1, keep=2)


def muon(folder: Path) -> None:
    model = models.tiny(512, hidden=64, layers=2, heads=2)
    _train(folder, model, groups.optimizers(model, adamw_lr=1e-2), every=3, keep=1)


def _train(folder: Path, model, optimizers, **options) -> None:
    where = folder / "checkpoints"
    batches, schedule = text.Batches(_stream(512), rows=4, length=64), train.cosine(90, warmup=5)
    records = train.fit(
        model,
        batches,
        optimizers,
        total=90,
        machine=FP32,
        schedule=schedule,
        checkpoints=train.Checkpoints(where, **options),
    )
    optimizers, digest = (
        optimizers if isinstance(optimizers, list) else [optimizers],
        hashlib.sha256(),
    )
    states = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
    ]
    for tensor in [
        *model.state_dict().values(),
        *filter(torch.is_tensor, states),
        torch.get_rng_state(),
    ]:
        digest.update(tensor.detach().numpy().tobytes())
    history = [(record["step"], record["loss"]) for record in records]
    files.merge(folder / "result.json", {"digest": digest.hexdigest(), "history": history})


def cache(folder: Path) -> None:
    teacher = models.as_teacher(models.tiny(512, hidden=64, layers=2, heads=2))
    batches = text.Batches(_stream(512), rows=8, length=64)
    options = dict(steps=60, k=8, shard_rows=16, source={"teacher": "torture"}, machine=FP32)
    made = teacher_cache.make(folder / "cache", teacher, batches, **options)
    files.merge(folder / "result.json", {"tokens": made.tokens, "bytes": made.bytes})


def records(folder: Path) -> None:
    """As a notebook would write them, in one folder whatever happens."""
    os.environ["NBLIB_RUN_DIR"] = str(folder.parent / "tiny" / "20200101-000000-aaaaaa")
    run = runs.begin("tiny", {"lr": 0.5})
    first = files.read_json(run.dir / "result.json").get("last", 0)
    for number in range(first + 1, 201):
        run.log({"step": number, "loss": 1 / number})
        run.result(**{f"of_{number % 7}": number}, last=number)
        files.merge(
            run.dir / "run.json",
            {"status": "done" if number == 200 else "running", "number": number},
        )
    run.finish()


def make_base(folder: Path) -> None:
    base_model.RECIPES["default"] = TINY
    base_model.load("default", machine=FP32)


def store(folder: Path) -> None:
    name = base_model.key("default", FP32)
    base_model.RECIPES["default"], base_model.key = SMALL, lambda *_: name
    base_model.load("default", machine=FP32)
    text.documents("code")


if __name__ == "__main__":
    jobs = {
        "adamw": adamw,
        "muon": muon,
        "cache": cache,
        "records": records,
        "base": make_base,
        "store": store,
    }
    print("cell 1/1", flush=True)
    jobs[sys.argv[1]](files.make_folder(Path(sys.argv[2])))
