"""Train under SIGKILL: fork a real training process again and again and kill it until one gets
through.

Run as `python kill_runs.py FOLDER KILLS SEED`; prints one JSON line. The parent only imports, so a
fork starts at once.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed.checkpoint  # noqa: F401  (as transformers below)
from conftest import FP32
from transformers import GPT2LMHeadModel  # noqa: F401  (imported before the forks, or every child would spend its life on it)

from nblib import checkpoint, files, models, runtime, text, train

STEPS = 40


def straight_or_resumed(folder: Path | None) -> str:
    """The run; returns a hash over weights, optimizer state and generators at its end."""
    torch.set_num_threads(1)
    runtime.seed_all(0)
    # dropout draws from the generator
    model = models.tiny(512, family="gpt2", hidden=64, layers=2, heads=2)
    stream = (
        torch.randint(1, 4, (20_000,), generator=torch.Generator().manual_seed(1)).cumsum(0) % 512
    )
    batches = text.Batches(stream, rows=4, length=64)
    optimizer = train.adamw(model, lr=1e-2)
    options = dict(total=STEPS, machine=FP32, schedule=train.cosine(STEPS, warmup=5))
    train.fit(model, batches, optimizer, checkpoints=train.Checkpoints(folder, every=1), **options)
    digest = hashlib.sha256()
    for tensor in [
        *model.state_dict().values(),
        *(v for s in optimizer.state.values() for v in s.values()),
    ]:
        digest.update(tensor.detach().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


def child(folder: Path, result: Path, die_in: tuple[ModuleType, str] | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if die_in:  # exactly there, the eleventh time it is reached
            count, real = iter(range(10**6)), getattr(*die_in)

            def die(*args, **kwargs):
                if next(count) == 10:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            setattr(*die_in, die)
        result.write_text(straight_or_resumed(folder))
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)


def main(folder: Path, kills: int, seed: int) -> dict:
    folder.mkdir(parents=True)
    draw, writing, done, steps = random.Random(seed), 0, 0, []
    started = time.perf_counter()
    os.waitpid(child(folder / "straight", folder / "straight.txt", None), 0)
    whole = time.perf_counter() - started
    run = 0
    places = [
        (checkpoint, "save_file"),
        (files, "sha256"),
        (files, "flush"),
        (files, "remove_partials"),
    ]
    while done < kills:  # every run is killed two or three times and then left to finish
        run += 1
        at, result = folder / f"run{run}", folder / f"run{run}.txt"
        for hit in range(3):
            place = places[(run + hit) % 4] if hit == 0 else None
            pid = child(at, result, place)
            if not place:
                time.sleep(draw.uniform(0.1, 0.7) * whole)
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if os.WIFSIGNALED(status):
                done += 1
                writing += any(at.glob(".step-*.partial"))
                steps.append(
                    len(checkpoint.folders(at)) and int(checkpoint.folders(at)[0].name[5:])
                )
        _, status = os.waitpid(child(at, result, None), 0)
        if status:
            return {"error": f"run {run} did not finish: status {status}"}
    ends = {p.read_text() for p in folder.glob("run*.txt")}
    straight = (folder / "straight.txt").read_text()
    return {
        "kills": done,
        "while_writing": writing,
        "runs": run,
        "equal": ends == {straight},
        "killed_after_step": steps,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
