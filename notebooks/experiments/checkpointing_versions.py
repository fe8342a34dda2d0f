"""Does it matter whether checkpointing or the LoRA adapter comes first? The same small program
under four transformers.

    cd notebooks && ../.venv/bin/python -m experiments.checkpointing_versions

makes a virtual environment for each of VERSIONS in a temporary folder, runs `tried` in it and
stores what it reported. Notebook 01 shows the newest record (`table`). It needs a package index and
takes minutes, most of them downloads.

`tried` makes a tiny Llama from a config, switches checkpointing on, attaches peft's LoRA and trains
one step:

    order    checkpointing first, the adapter first, or the switch of TrainingArguments, which
             always comes last
    kind     reentrant, non-reentrant, or what the version takes by default
    loop     a raw loop, or the Trainer
    trains   the adapters alone, or the head above the blocks as well

An attempt raises, is silent (some trainable tensors do not move and nothing is raised), or works.

Footgun: all environments share the torch of this one, and with it torch.utils.checkpoint. Only
transformers, peft and accelerate are as old as their label. In there this file runs alone, so it
imports nothing of ours at its top.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from importlib.metadata import version
from itertools import product
from pathlib import Path

import peft
import torch
import transformers as tf

RECORD = "checkpointing-order"
PACKAGES = ("transformers", "peft", "accelerate", "torch")
# each with the peft and the accelerate of its month; the last one is what this environment has
VERSIONS = (
    ("transformers==4.46.3", "peft==0.13.2", "accelerate==1.1.1"),
    ("transformers==4.49.0", "peft==0.14.0", "accelerate==1.4.0"),
    ("transformers==4.57.3", "peft==0.18.0", "accelerate==1.12.0"),
    (),
)
CHECKPOINTING_FIRST, ADAPTER_FIRST = "checkpointing, then adapter", "adapter, then checkpointing"
TRAINER_SWITCH = "adapter, then TrainingArguments"
KINDS = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "default": None,
}
RAW, TRAINER = "raw loop", "Trainer"
ADAPTERS, AND_HEAD = "adapters", "adapters and head"


# ------------------------------------------------------------------ inside each of the environments
def built(order: str, kind: str, trains: str) -> torch.nn.Module:
    """Return the adapted model, put together in the given order."""
    torch.manual_seed(0)
    shape = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(**shape, use_cache=False, tie_word_embeddings=False)
    ).train()
    head = ["lm_head"] if trains == AND_HEAD else None
    adapter = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], init_lora_weights=False, modules_to_save=head
    )
    if order == CHECKPOINTING_FIRST:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=KINDS[kind])
    model = peft.get_peft_model(model, adapter)
    if order == ADAPTER_FIRST:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=KINDS[kind])
    return model


def raw_step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0
    )
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def trainer_step(model: torch.nn.Module, ids: torch.Tensor, **options) -> None:
    """One step of the Trainer; its log lines go to stderr, as stdout is for the report."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = dict(
            report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no", use_cpu=True
        )
        step = dict(
            max_steps=1,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            per_device_train_batch_size=len(ids),
        )
        args = tf.TrainingArguments(output_dir=folder, **quiet, **step, **options)
        tf.Trainer(
            model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in ids]
        ).train()


def attempt(order: str, kind: str, loop: str, trains: str) -> dict:
    """One step, and how it ended: the message, and how many of the trainable tensors moved."""
    model, ids = built(order, kind, trains), torch.arange(32).view(2, 16)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    switch = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=KINDS[kind])
    try:
        if loop == RAW:
            raw_step(model, ids)
        else:
            trainer_step(model, ids, **(switch if order == TRAINER_SWITCH else {}))
        moved = sum(
            not torch.equal(p, before[name])
            for name, p in model.named_parameters()
            if name in before
        )
        outcome, message = "works" if moved == len(before) else "silent", ""
    except RuntimeError as error:
        outcome, message, moved = "raises", str(error).splitlines()[0], 0
    facts = {"order": order, "kind": kind, "loop": loop, "trains": trains}
    return facts | {"outcome": outcome, "message": message, "moved": moved, "of": len(before)}


def tried() -> list[dict]:
    """Every combination; the switch of TrainingArguments exists for the Trainer only."""
    orders = [
        *product((CHECKPOINTING_FIRST, ADAPTER_FIRST), (RAW, TRAINER)),
        (TRAINER_SWITCH, TRAINER),
    ]
    cases = product((ADAPTERS, AND_HEAD), KINDS, orders)
    return [attempt(order, kind, loop, trains) for trains, kind, (order, loop) in cases]


# -------------------------------------------------------------------------- around the environments
def environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """Return a virtual environment with these packages over those of this one; the path of its
    Python.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    # searched after its own: torch need not be fetched
    (own / "present.pth").write_text(sysconfig.get_path("purelib"))
    if packages:
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *packages],
            check=True,
            env=_plain(),
        )
    return python


def report(python: Path) -> dict:
    """Return what `tried` says under this Python, with the versions it really had."""
    # -P: the modules beside this file must not stand for others
    command = [python, "-P", __file__, "--report"]
    done = subprocess.run(command, capture_output=True, text=True, env=_plain())
    if done.returncode:
        raise RuntimeError(f"{python} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _plain() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def measure(path: Path, machine: object) -> dict:
    """Return the record with every stack of VERSIONS; none that the file holds is installed
    again.
    """
    from experiments.record import Store

    def stack(unit: dict) -> dict:
        with tempfile.TemporaryDirectory(prefix="checkpointing-versions-") as folder:
            return report(environment(Path(folder), tuple(unit["packages"])))

    store = Store(path, {}, lists=("stacks",))
    return store.measure(
        ({"packages": list(packages)} for packages in VERSIONS), stack, to="stacks"
    )


# -------------------------------------------------------------------------------- what is on record
def published() -> tuple[str, dict]:
    """Return name and content of the newest record."""
    from experiments.record import newest, read_published

    return newest(RECORD).name, read_published(RECORD)


def table() -> list[dict[str, str]]:
    """Return the newest record as rows for show.Table: a row for each stack and kind, a column for
    each order.
    """
    orders = (CHECKPOINTING_FIRST, ADAPTER_FIRST, TRAINER_SWITCH)
    return [
        {name: stack["versions"][name] for name in ("transformers", "peft")}
        | {"kind": kind}
        | {
            order: _outcome(
                [a for a in stack["attempts"] if (a["order"], a["kind"]) == (order, kind)]
            )
            for order in orders
        }
        for stack in published()[1]["stacks"]
        for kind in KINDS
    ]


def _outcome(attempts: list[dict]) -> str:
    """Return the outcome with adapters alone, and with a head beside them where that differs; loops
    that differ both stand.
    """
    alone, with_head = (
        " or ".join(dict.fromkeys(a["outcome"] for a in attempts if a["trains"] == trains))
        for trains in (ADAPTERS, AND_HEAD)
    )
    return alone if alone == with_head else f"{alone}; {with_head} if the head trains"


if __name__ == "__main__":
    if sys.argv[1:] == ["--report"]:
        warnings.simplefilter("ignore")
        print(
            json.dumps(
                {"versions": {name: version(name) for name in PACKAGES}, "attempts": tried()}
            )
        )
    else:
        from experiments.record import command

        command(RECORD, __doc__, measure)
