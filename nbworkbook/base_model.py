"""The base model every notebook starts from: trained once on prose, stored under the hash of all
that made it.

The name of the folder is a hash of what the training depends on. That is the recipe, the text and
the precision; the versions of torch, transformers, tokenizers and numpy; and the code that trains,
which is this file and what it imports (code_hash.py). If any of these changes the name changes, and
the model is made again; nothing is ever overwritten. A lock lets two notebooks that start together
train it once, and `python -m nbworkbook.base_model` makes it ahead of them. All results rest on it,
so its files are checked against their SHA-256 each time it is loaded. A damaged one is set aside
and made again.

Stored as an ordinary transformers folder plus `base.json` with the measured result and the hash of
its content: `AutoModelForCausalLM.from_pretrained(folder)` works without nblib. A run under the
runner notes both in its folder.

Footgun: the corpus is the documentation of the running Python, so its hash, and with it the base,
changes with the Python patch version. Comparisons between runs are only fair on the same base;
every run records its hash.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import nn

from nblib import files, models, paths, runtime, text, train
from nblib.methods.muon import groups
from nbworkbook import code_hash, input_hash

# Muon on the hidden matrices learns this model in half the steps AdamW needs (docs/log.md)
RECIPES = {
    "default": dict(
        steps=240,
        rows=16,
        length=256,
        vocab=4096,
        hidden=256,
        layers=4,
        muon_lr=0.02,
        adamw_lr=3e-3,
    ),
    "full": dict(
        steps=720,
        rows=16,
        length=256,
        vocab=4096,
        hidden=256,
        layers=4,
        muon_lr=0.02,
        adamw_lr=3e-3,
    ),
}


class Base(NamedTuple):
    """The stored base model, ready to train, with its tokenizer, its folder and what was measured
    when it was made.
    """

    model: nn.Module
    tokenizer: object
    folder: Path
    facts: dict


def load(
    recipe: str = "default",
    *,
    machine: runtime.Machine | None = None,
    on_step: Callable[[dict], None] | None = None,
) -> Base:
    """Return the base model of a recipe, trained now if it is not in the store."""
    if recipe not in RECIPES:
        raise ValueError(f"recipe = {recipe!r}: allowed are {', '.join(RECIPES)}")
    machine = machine or runtime.pick()
    folder = paths.store() / key(recipe, machine)
    lock = folder.with_name(f".{folder.name}.lock")
    with files.locked(lock, waiting="another process is making the base model; waiting for it"):
        files.remove_partials(folder.parent)
        if not _is_whole(folder):
            # so that nothing the notebook did before changes the base, nor the reverse
            with runtime.seeded(0):
                _make(recipe, folder, machine, on_step)
    facts = files.read_json(folder / "base.json")
    # what this run rests on; the runner compares it before it skips the run
    if "NBLIB_RUN_DIR" in os.environ:
        note = {"base": folder.name, "content": facts["content"]}
        files.merge(Path(os.environ["NBLIB_RUN_DIR"]) / "base.json", note)
    model = models.load(str(folder)).to(machine.device).train()
    return Base(model, models.load_tokenizer(str(folder)), folder, facts)


def _is_whole(folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        files.verify(folder)
        return True
    except files.Unreadable as error:
        files.set_aside(folder, f"base model {error}")
        return False


def key(recipe: str, machine: runtime.Machine) -> str:
    """Return the hash of everything that decides the weights."""
    code = code_hash.digest(["import nbworkbook.base_model"])
    versions = [
        input_hash.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")
    ]
    parts = [
        RECIPES[recipe],
        text.fingerprint(text.documents("prose")),
        machine.precision,
        versions,
        code,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _make(recipe: str, folder: Path, machine: runtime.Machine, on_step) -> None:
    r = RECIPES[recipe]
    documents = text.documents("prose")
    tokenizer = text.train_tokenizer(documents, vocab_size=r["vocab"])
    model = models.tiny(
        len(tokenizer), hidden=r["hidden"], layers=r["layers"], length=4 * r["length"]
    )
    model.config.eos_token_id, model.config.pad_token_id = (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    model.to(machine.device)
    batches = text.Batches(text.encode(documents, tokenizer), rows=r["rows"], length=r["length"])
    started, cpu = time.perf_counter(), time.process_time()
    records = train.fit(
        model,
        batches,
        groups.optimizers(model, lr=r["muon_lr"], adamw_lr=r["adamw_lr"], weight_decay=0.0),
        total=r["steps"],
        schedule=train.cosine(r["steps"], warmup=10),
        clip=0,  # Muon's step does not depend on the size of the gradient, AdamW's barely
        machine=machine,
        on_step=on_step,
    )
    took = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
    held_out = text.fixed_rows(
        text.encode(text.documents("prose", "held_out"), tokenizer), length=r["length"]
    )
    result = train.evaluate(
        model, held_out, machine=machine, token_bytes=text.token_bytes(tokenizer)
    )
    facts = {"recipe": recipe, **r, "hash": folder.name, **took, "train_loss": records[-1]["loss"]}
    facts |= {f"held_out_{k}": v for k, v in result.items()} | {
        "environment": runtime.environment(machine)
    }
    with files.replacing(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        content = hashlib.sha256(json.dumps(files.seal(partial)).encode()).hexdigest()[:16]
        files.write(partial / "base.json", files.to_json({**facts, "content": content}, indent=1))
        files.seal(partial)  # now with base.json


def main() -> int:
    """`python -m nbworkbook.base_model [recipe] [device] [precision]`: make the model, unless it is
    there.
    """
    parser = argparse.ArgumentParser(
        prog="python -m nbworkbook.base_model",
        description="make the base model, unless it is there",
    )
    parser.add_argument("recipe", nargs="?", default="default", choices=RECIPES)
    parser.add_argument("device", nargs="?", default="auto")
    parser.add_argument("precision", nargs="?", default="auto")
    options = parser.parse_args()

    def tell(record: dict) -> None:
        if record["step"] % 20 == 0 or record["step"] == record["of"]:
            print(
                f"base model: step {record['step']} of {record['of']}, loss {record['loss']:.2f}",
                flush=True,
            )

    try:
        load(options.recipe, machine=runtime.pick(options.device, options.precision), on_step=tell)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
