"""Does a teacher with another tokenizer help? Students on labels alone and with ULD, at three seeds and equal steps.

    python -m lessons.uld_runs            train, judge, and store the record in outputs/published

The teacher is the stored base model. The student has a byte-level tokenizer of its own with a quarter of the words,
trained on the same text. Four ways of training see the same rows in the same order, from the same first weights: labels
alone, labels and ULD at the positions that have read the same bytes, labels and ULD by the number of the position, as
the paper pairs them, and the first of these two at a tenth of its weight. The same command goes on with what a record
of the same day lacks. Each student is judged on the same held-out rows, in nats per token of its own and in bits per
byte, which compares it with the teacher.

Footgun: equal steps are not equal cost. With a teacher each step also pays for the teacher's forward pass.
"""

import datetime
import json
from collections.abc import Iterator, Sequence

import torch

from lessons import seeds, uld
from nblib import files, models, paths, runtime, start, text, train

SHAPE = dict(hidden=128, layers=2, heads=2)
WAYS = {  # which positions are paired, and the weight over the given one
    "labels alone": None,
    "ULD, same bytes read": (uld.aligned, 1.0),
    "ULD, same number": (uld.by_index, 1.0),
    "ULD, same bytes read, a tenth of the weight": (uld.aligned, 0.1),
}
ALONE = next(iter(WAYS))


def trained(
    opened: start.Start,
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
    known: Sequence[dict] = (),
    **shape: int,
) -> Iterator[dict]:
    """A line for each way at each seed that is not among the `known` ones."""
    machine, tokenizer = opened.machine, text.train_tokenizer(documents["train"], vocab_size=words)
    stream = text.encode(documents["train"], tokenizer)
    held_out = text.fixed_rows(text.encode(documents["held_out"], tokenizer), length=length, limit=eval_rows)
    teacher, sizes = models.as_teacher(opened.model), text.token_bytes(tokenizer)
    for seed in range(repeats):
        for way, how in WAYS.items():
            if any((line["way"], line["seed"]) == (way, seed) for line in known):
                continue
            runtime.seed_all(seed)
            student = models.tiny(len(tokenizer), length=length, seed=seed, **shape).to(machine.device)
            batches = text.Batches(stream, rows=rows, length=length, seed=seed)
            options = dict(total=steps, schedule=train.cosine(steps, warmup=max(1, steps // 8)), machine=machine)
            if how:
                batches = uld.Paired(batches, tokenizer, opened.tokenizer, pair=how[0])
                options["loss"] = uld.from_teacher(teacher, weight=weight * how[1])
            records = train.fit(student, batches, train.adamw(student, lr=lr), **options)
            facts = train.evaluate(student, held_out, machine=machine, token_bytes=sizes)
            line = {"way": way, "seed": seed, "loss": facts["loss"], "bits_per_byte": facts["bits_per_byte"]}
            yield line | {"uld": [r.get("uld") for r in (records[0], records[-1])]}


def shared(opened: start.Start, documents: list[str], *, words: int, length: int, rows: int = 64) -> float:
    """The share of the student's positions that have a partner which has read the same bytes."""
    tokenizer = text.train_tokenizer(documents, vocab_size=words)
    ids = text.fixed_rows(text.encode(documents, tokenizer), length=length, limit=rows)
    return float((uld.aligned(ids, tokenizer, opened.tokenizer)[1] != uld.NONE).float().mean())


def verdicts(lines: list[dict]) -> dict[str, str]:
    """Each way with a teacher against labels alone, by the rule of `lessons.seeds`."""
    ends = {way: [line["loss"] for line in lines if line["way"] == way] for way in WAYS}
    ends = {way: losses for way, losses in ends.items() if losses}
    return {way: seeds.sentence(way, seeds.gains(ends[ALONE], losses)) for way, losses in ends.items() if way != ALONE}


@torch.no_grad()
def teachers_bits(opened: start.Start, documents: list[str], *, length: int, rows: int) -> float:
    """The teacher on the same documents, in its own tokens."""
    fixed = text.fixed_rows(text.encode(documents, opened.tokenizer), length=length, limit=rows)
    sizes = text.token_bytes(opened.tokenizer)
    return train.evaluate(opened.model, fixed, machine=opened.machine, token_bytes=sizes)["bits_per_byte"]


def main(*, steps: int = 120, rows: int = 4, length: int = 128, words: int = 1024, weight: float = 1.5) -> None:
    machine = runtime.pick("auto", "auto")
    opened = start.open(length=length, rows=8, machine=machine)
    documents = {split: text.documents("prose", split) for split in ("train", "held_out")}
    options = dict(steps=steps, rows=rows, length=length, words=words, weight=weight, **SHAPE)
    today = datetime.date.today().isoformat()
    path = paths.root() / f"outputs/published/{today}-uld-cpu.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    lines = before["lines"] if {name: before.get(name) for name in options} == options else []
    for line in trained(opened, documents, known=tuple(lines), **options):
        print(line, flush=True)
        lines.append(line)
    facts = {"teacher_bits_per_byte": teachers_bits(opened, documents["held_out"], length=length, rows=64)}
    facts |= {"positions_shared": shared(opened, documents["train"], words=words, length=length)}
    record = {"date": today, "environment": runtime.environment(), **options, **facts, "lines": lines}
    files.write(path, files.to_json(record | {"verdicts": verdicts(lines)}, indent=1))
    print("\n".join(verdicts(lines).values()), path, sep="\n")


def published() -> dict:
    """The newest record."""
    return json.loads(max(paths.root().glob("outputs/published/*-uld-*.json")).read_text())


def means(record: dict) -> list[dict]:
    """A row per way: means over the seeds, for a table."""
    rows = []
    for way in WAYS:
        if not (mine := [line for line in record["lines"] if line["way"] == way]):
            continue
        loss, bits = (sum(line[name] for line in mine) / len(mine) for name in ("loss", "bits_per_byte"))
        rows.append({"trained on": way, "held-out loss": loss, "bits per byte": bits})
    return [*rows, {"trained on": "the teacher itself", "bits per byte": record["teacher_bits_per_byte"]}]


if __name__ == "__main__":
    main()
