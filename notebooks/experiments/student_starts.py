"""Where a student starts: the teacher's layers, the teacher cut in width, or nothing; on text and
on chats.

    cd notebooks && ../.venv/bin/python -m experiments.student_starts

The teacher of the text is the stored base model. That of the chats is the same model after a
training on questions with one right answer (`nblib.methods.distill.chat`). A student is half of its
blocks: every other layer, or all layers with half of the heads and inner channels
(`nblib.methods.distill.pruned_width`), or new weights in the shape of the first. Each is taught by
the teacher or by labels alone, for equal steps on the same rows, at three seeds. A seed sets the
rows, and the weights of what starts new. On text the loss of held-out rows is judged, on chats the
share of right answers to new questions.

Footgun: a student made of trained layers needs a lower rate than a new one. Here it gets an eighth,
as in notebook 13; neither rate was searched for.
"""

import copy
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import nn

from experiments.record import Store, command, read_published
from lessons import seeds
from nblib import corpora, losses, models, runtime, train
from nblib.methods.distill import chat, objective, own_layers, pruned_width
from nbworkbook.setup import Setup, load_setup

RECORD = "student-starts"
STARTS = ("every other layer", "half the width", "new weights")
TAUGHT, DATA = ("teacher", "labels"), ("text", "chat")
RATE, SHARE = 4e-3, 1 / 8  # of a new student; of it, for trained weights
OPTIONS = dict(steps=24, rows=4, length=128, questions=400, count=3)


class Lesson(NamedTuple):
    """A teacher, what its students read, and how they are judged."""

    teacher: nn.Module
    batches: Callable[[int], object]  # of a seed
    judge: Callable[[nn.Module], dict]
    machine: runtime.Machine


def born(teacher: nn.Module, batches, *, how: str, seed: int) -> nn.Module:
    """Return a student by one of STARTS."""
    if how == "half the width":
        found = pruned_width.importance(teacher, [next(batches) for _ in range(2)])
        halves = {
            "key_heads": teacher.config.num_key_value_heads // 2,
            "inner": teacher.config.intermediate_size // 2,
        }
        return pruned_width.narrowed(teacher, found, **halves)
    kept = own_layers.from_layers(teacher, keep=own_layers.every_other(teacher))
    return own_layers.with_new_weights(kept, seed=seed) if how == "new weights" else kept


def learned(lesson: Lesson, *, how: str, taught: str, seed: int, steps: int) -> dict:
    """Return what one student reaches, before and after."""
    runtime.seed_all(seed)
    student = born(lesson.teacher, lesson.batches(seed), how=how, seed=seed).to(
        lesson.machine.device
    )
    first = lesson.judge(student)
    loss = objective.from_teacher(lesson.teacher, 1.0) if taught == "teacher" else losses.causal_lm
    rate = RATE if how == "new weights" else SHARE * RATE
    options = dict(
        total=steps, schedule=train.cosine(steps, warmup=2), loss=loss, machine=lesson.machine
    )
    train.fit(student, lesson.batches(seed), train.adamw(student, lr=rate), **options)
    return {
        "parameters": models.count(student)["all"],
        "before": first,
        "after": lesson.judge(student),
    }


def of_text(opened: Setup, *, rows: int) -> Lesson:
    def judge(model: nn.Module) -> dict:
        return {"loss": opened.loss(model)}

    teacher = models.as_teacher(copy.deepcopy(opened.model), opened.machine.frozen_dtype)
    return Lesson(teacher, lambda seed: opened.batches(rows=rows, seed=seed), judge, opened.machine)


def of_chats(opened: Setup, streams: dict, *, rows: int, questions: int, steps: int) -> Lesson:
    """Return the base model first learns to answer; new questions come from documents that nobody
    trained on.
    """
    tokenizer, pad = copy.deepcopy(opened.tokenizer), opened.tokenizer.pad_token_id
    tokenizer.chat_template = chat.TEMPLATE
    sets = {}
    for split in ("train", "held_out"):
        of = {name: parts[split] for name, parts in streams.items()}
        few = questions if split == "train" else min(questions, 200)
        sets[split] = [
            chat.labelled(tokenizer, said)
            for said in chat.questions(of, tokenizer, count=few, seed=7)
        ]

    def batches(seed: int) -> chat.Batches:
        return chat.Batches(sets["train"], size=4 * rows, pad=pad, seed=seed)

    teacher = copy.deepcopy(opened.model).train()
    options = dict(
        total=2 * steps, schedule=train.cosine(2 * steps, warmup=2), machine=opened.machine
    )
    train.fit(teacher, batches(99), train.adamw(teacher, lr=SHARE * RATE), **options)

    def judge(model: nn.Module) -> dict:
        return {"right": chat.accuracy(model, sets["held_out"], pad=pad)}

    return Lesson(
        models.as_teacher(teacher, opened.machine.frozen_dtype), batches, judge, opened.machine
    )


def wanted(count: int) -> Iterator[dict]:
    """Yield the most important first, so that it can be stopped: the teacher on text, then labels,
    then the chats.
    """
    for data in DATA:
        for taught in TAUGHT:
            yield from (
                dict(data=data, how=how, taught=taught, seed=seed)
                for seed in range(count)
                for how in STARTS
            )


def measure(
    path: Path, lessons: dict[str, Callable[[], Lesson]], *, count: int, steps: int, **options
) -> dict:
    """Return the record with every run. What the file holds already is not repeated."""
    store = Store(path, dict(steps=steps, count=count, **options, rate=RATE, share=SHARE))
    made: dict[str, Lesson] = {}

    def run(unit: dict) -> dict:
        data, rest = unit["data"], {name: value for name, value in unit.items() if name != "data"}
        if data not in made:  # the chats' teacher is trained first, so only where a run needs it
            made[data] = lessons[data]()
            store.content.setdefault("teacher", {})[data] = made[data].judge(made[data].teacher)
        return learned(made[data], steps=steps, **rest)

    return store.measure(wanted(count), run)


def everything(path: Path, machine: runtime.Machine) -> dict:
    """Return the record of all starts and teachers at all seeds."""
    rows = OPTIONS["rows"]
    opened = load_setup(length=OPTIONS["length"], rows=24, machine=machine)
    streams = {name: corpora.open(name, opened.tokenizer) for name in ("prose", "code")}
    most = dict(rows=rows, questions=OPTIONS["questions"], steps=OPTIONS["steps"])
    lessons = {
        "text": lambda: of_text(opened, rows=rows),
        "chat": lambda: of_chats(opened, streams, **most),
    }
    return measure(path, lessons, **OPTIONS)


# -------------------------------------------------------------------------------- what is on record
published = partial(read_published, RECORD)


def ends(record: dict, **which) -> list[float]:
    """Return what the runs with these values reached, seed by seed: a loss on text, a share on
    chats.
    """
    lines = [line for line in record["lines"] if which.items() <= line.items()]
    return [
        next(iter(line["after"].values())) for line in sorted(lines, key=lambda line: line["seed"])
    ]


def verdicts(record: dict) -> list[str]:
    """Trained starts against new weights, and the teacher against labels alone, on text, by
    `lessons.seeds`.
    """

    def said(what: str, without: dict, with_it: dict) -> list[str]:
        both = [ends(record, data="text", **which) for which in (without, with_it)]
        return (
            [seeds.sentence(what, seeds.gains(*both))]
            if all(both) and len(both[0]) == len(both[1])
            else []
        )

    by_teacher = [dict(how=how, taught="teacher") for how in STARTS]
    found = [line for one in by_teacher[:-1] for line in said(one["how"], by_teacher[-1], one)]
    found += said("layers instead of width", by_teacher[1], by_teacher[0])
    for one in by_teacher:
        found += said(
            f"{one['how']}: a teacher instead of labels", one | dict(taught="labels"), one
        )
    return found


def table(record: dict) -> list[dict]:
    """Return a row for each start and teacher: means over the seeds with their range."""
    rows = []
    for how in STARTS:
        for taught in TAUGHT:
            mine = [
                line for line in record["lines"] if (line["how"], line["taught"]) == (how, taught)
            ]
            if not mine:
                continue
            before = [line["before"]["loss"] for line in mine if line["data"] == "text"]
            row = {"start": how, "taught by": taught, "parameters": mine[0]["parameters"]}
            row["loss before"] = statistics.mean(before)
            for data, name in zip(DATA, ("held-out loss", "right answers")):
                if got := ends(record, data=data, how=how, taught=taught):
                    row[name] = f"{statistics.mean(got):.3f} ({min(got):.3f} to {max(got):.3f})"
            rows.append(row)
    teacher = {
        "start": "the teacher itself",
        "held-out loss": f"{record['teacher']['text']['loss']:.3f}",
    }
    if "chat" in record["teacher"]:
        teacher["right answers"] = f"{record['teacher']['chat']['right']:.3f}"
    return [*rows, teacher]


if __name__ == "__main__":
    command(RECORD, __doc__, everything, words=lambda record: "\n".join(verdicts(record)))
