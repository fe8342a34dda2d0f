"""Does a teacher with another tokenizer help? Students on labels alone and with ULD, at three seeds
and equal steps.

    cd notebooks && ../.venv/bin/python -m experiments.uld_runs

The teacher is the stored base model. The student has a byte-level tokenizer of its own with a
quarter of the words, trained on the same text. Four ways of training see the same rows in the same
order, from the same first weights: labels alone, labels and ULD at the positions that have read the
same bytes, labels and ULD by the number of the position, as the paper pairs them, and the first of
these two at a tenth of its weight. Each student is judged on the same held-out rows, in nats per
token of its own and in bits per byte, which compares it with the teacher.

Footgun: equal steps are not equal cost. With a teacher each step also pays for the teacher's
forward pass.
"""

from functools import partial
from pathlib import Path

import torch

from experiments.record import Store, command, read_published
from lessons import seeds
from nblib import models, runtime, text, train
from nblib.methods.distill import uld
from nbworkbook.setup import Setup, load_setup

RECORD = "uld"
SHAPE = dict(hidden=128, layers=2, heads=2)
WAYS = {  # which positions are paired, and the weight over the given one
    "labels alone": None,
    "ULD, same bytes read": (uld.aligned, 1.0),
    "ULD, same number": (uld.by_index, 1.0),
    "ULD, same bytes read, a tenth of the weight": (uld.aligned, 0.1),
}
ALONE = next(iter(WAYS))


def measure(
    path: Path,
    opened: Setup,
    documents: dict[str, list[str]],
    *,
    steps: int,
    rows: int,
    length: int,
    words: int,
    repeats: int = 3,
    weight: float = 1.5,
    lr: float = 4e-3,
    eval_rows: int = 64,
    **shape: int,
) -> dict:
    """Return the record with each way at each seed; none that the file holds is trained again."""
    machine, tokenizer = opened.machine, text.train_tokenizer(documents["train"], vocab_size=words)
    stream = text.encode(documents["train"], tokenizer)
    held_out = text.fixed_rows(
        text.encode(documents["held_out"], tokenizer), length=length, limit=eval_rows
    )
    teacher, sizes = models.as_teacher(opened.model), text.token_bytes(tokenizer)

    def trained(unit: dict) -> dict:
        how, seed = WAYS[unit["way"]], unit["seed"]
        runtime.seed_all(seed)
        student = models.tiny(len(tokenizer), length=length, seed=seed, **shape).to(machine.device)
        batches = text.Batches(stream, rows=rows, length=length, seed=seed)
        options = dict(
            total=steps, schedule=train.cosine(steps, warmup=max(1, steps // 8)), machine=machine
        )
        if how:
            batches = uld.Paired(batches, tokenizer, opened.tokenizer, pair=how[0])
            options["loss"] = uld.from_teacher(teacher, weight=weight * how[1])
        records = train.fit(student, batches, train.adamw(student, lr=lr), **options)
        facts = train.evaluate(student, held_out, machine=machine, token_bytes=sizes)
        ends = [r.get("uld") for r in (records[0], records[-1])]
        return {"loss": facts["loss"], "bits_per_byte": facts["bits_per_byte"], "uld": ends}

    settings = dict(steps=steps, rows=rows, length=length, words=words, weight=weight, **shape)
    store = Store(path, settings)
    record = store.measure(
        ({"way": way, "seed": seed} for seed in range(repeats) for way in WAYS), trained
    )

    record["teacher_bits_per_byte"] = teachers_bits(
        opened, documents["held_out"], length=length, rows=eval_rows
    )
    record["positions_shared"] = shared(opened, documents["train"], words=words, length=length)
    record["verdicts"] = verdicts(record["lines"])
    store.write()
    return record


def shared(
    opened: Setup, documents: list[str], *, words: int, length: int, rows: int = 64
) -> float:
    """Return the share of the student's positions that have a partner which has read the same
    bytes.
    """
    tokenizer = text.train_tokenizer(documents, vocab_size=words)
    ids = text.fixed_rows(text.encode(documents, tokenizer), length=length, limit=rows)
    return float((uld.aligned(ids, tokenizer, opened.tokenizer)[1] != uld.NONE).float().mean())


def verdicts(lines: list[dict]) -> dict[str, str]:
    """Each way with a teacher against labels alone, by the rule of `lessons.seeds`."""
    ends = {way: [line["loss"] for line in lines if line["way"] == way] for way in WAYS}
    ends = {way: losses for way, losses in ends.items() if losses}
    return {
        way: seeds.sentence(way, seeds.gains(ends[ALONE], losses))
        for way, losses in ends.items()
        if way != ALONE
    }


@torch.no_grad()
def teachers_bits(opened: Setup, documents: list[str], *, length: int, rows: int) -> float:
    """Return the teacher on the same documents, in its own tokens."""
    fixed = text.fixed_rows(text.encode(documents, opened.tokenizer), length=length, limit=rows)
    sizes = text.token_bytes(opened.tokenizer)
    return train.evaluate(opened.model, fixed, machine=opened.machine, token_bytes=sizes)[
        "bits_per_byte"
    ]


def everything(path: Path, machine: runtime.Machine) -> dict:
    """Return the record of all ways on the embedded prose."""
    opened = load_setup(length=128, rows=8, machine=machine)
    documents = {split: text.documents("prose", split) for split in ("train", "held_out")}
    return measure(path, opened, documents, steps=120, rows=4, length=128, words=1024, **SHAPE)


published = partial(read_published, RECORD)


def means(record: dict) -> list[dict]:
    """Return a row per way: means over the seeds, for a table."""
    rows = []
    for way in WAYS:
        if not (mine := [line for line in record["lines"] if line["way"] == way]):
            continue
        loss, bits = (
            sum(line[name] for line in mine) / len(mine) for name in ("loss", "bits_per_byte")
        )
        rows.append({"trained on": way, "held-out loss": loss, "bits per byte": bits})
    return [
        *rows,
        {"trained on": "the teacher itself", "bits per byte": record["teacher_bits_per_byte"]},
    ]


if __name__ == "__main__":
    command(
        RECORD, __doc__, everything, words=lambda record: "\n".join(record["verdicts"].values())
    )
