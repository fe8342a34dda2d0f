"""How much memory a corpus on disk takes and how fast it is read: `python tests/corpus_bench.py
FOLDER TOKENS`.

Each stage is a process of its own: write a parquet set of about TOKENS tokens into FOLDER (few
documents, repeated with changes), import the same modules and do nothing else, tokenise, read two
epochs in random order, train. This process looks every 10 ms at the resident memory of the stage
and of all its children, added up: nothing is subtracted, pages of mapped files count. The kernel's
own high-water mark of the stage (VmHWM) is asked for at its end, and the larger of the two is the
peak. `quarters` are the peaks of the four quarters of the time. Prints one line of JSON.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

FOLDER, TOKENS = Path(sys.argv[1]), int(sys.argv[2])
os.environ["NBLIB_OUTPUTS"] = str(FOLDER / "outputs")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
VOCABULARY, ROWS, LENGTH = 4096, 16, 256  # of the base model


def write() -> dict:
    """Each document is one of a hundred of the embedded prose under another number, so that none
    stands there twice.
    """
    import pyarrow
    from pyarrow import parquet

    from nblib import text

    tokenizer = text.train_tokenizer(text.documents("prose"), vocab_size=VOCABULARY)
    tokenizer.save_pretrained(FOLDER / "tokenizer")
    texts = [each[:4000] for each in text.documents("prose")[:100]]
    size = (
        sum(map(len, tokenizer([f"{n:09} {each}" for n, each in enumerate(texts)])["input_ids"]))
        / len(texts)
        + 1
    )
    draw, count = random.Random(0), round(TOKENS / size)
    schema = pyarrow.schema({"id": pyarrow.int64(), "text": pyarrow.string()})
    (FOLDER / "corpus").mkdir(parents=True)
    with parquet.ParquetWriter(FOLDER / "corpus" / "corpus.parquet", schema) as file:
        for start in range(0, count, 1000):
            numbers = range(start, min(count, start + 1000))
            documents = [f"{n:09} {draw.choice(texts)}" for n in numbers]
            file.write(pyarrow.table({"id": numbers, "text": documents}, schema))
    return {}


def imports() -> dict:
    import pyarrow.parquet  # noqa: F401  corpora.py imports it when it meets the first such file

    from nblib import corpora, models  # noqa: F401

    models.load_tokenizer(str(FOLDER / "tokenizer"))
    return {}


def tokenise() -> dict:
    from nblib import corpora, models

    tokenizer, began = models.load_tokenizer(str(FOLDER / "tokenizer")), time.perf_counter()
    streams = corpora.open(str(FOLDER / "corpus"), tokenizer)
    tokens = sum(map(len, streams.values()))
    return {"tokens": tokens, "per s": tokens / (time.perf_counter() - began)}


def read() -> dict:
    from nblib import corpora, models, text

    tokenizer, began = models.load_tokenizer(str(FOLDER / "tokenizer")), time.perf_counter()
    stream = corpora.open(str(FOLDER / "corpus"), tokenizer)["train"]
    opened = time.perf_counter() - began
    batches, began = text.Batches(stream, rows=ROWS, length=LENGTH), time.perf_counter()
    for _ in range(2 * batches.per_epoch):
        next(batches)
    per_s = 2 * batches.per_epoch * ROWS * LENGTH / (time.perf_counter() - began)
    return {"tokens": len(stream), "opened in s": opened, "per s": per_s}


def training() -> dict:
    import torch

    from nblib import corpora, models, runtime, text, train

    tokenizer = models.load_tokenizer(str(FOLDER / "tokenizer"))
    stream = corpora.open(str(FOLDER / "corpus"), tokenizer)["train"]
    model = models.tiny(len(tokenizer), hidden=256, layers=4, length=4 * LENGTH)
    options = dict(total=4, machine=runtime.Machine(torch.device("cpu"), "fp32", ""))
    records = train.fit(
        model,
        text.Batches(stream, rows=ROWS, length=LENGTH),
        train.adamw(model, lr=1e-3),
        **options,
    )
    return {"per s": records[-1]["tokens_per_s"]}


def status(pid: int | str, name: str) -> float:
    """A line of /proc/PID/status, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def family(pid: int) -> float:
    """The resident memory of a process, its children and theirs, in MiB; pages that they share
    count in each.
    """
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [
            child for thread in threads for child in (thread / "children").read_text().split()
        ]
        return status(pid, "VmRSS") + sum(family(int(child)) for child in children)
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it has just ended


def measured(stage: str) -> dict:
    process = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:3], stage], stdout=subprocess.PIPE, text=True
    )
    seen = []
    while process.poll() is None:
        seen.append(family(process.pid))
        time.sleep(0.01)
    facts = json.loads(process.stdout.read().splitlines()[-1])
    step = -(-len(seen) // 4)
    quarters = [max(seen[start : start + step]) for start in range(0, len(seen), step)]
    return facts | {"peak MiB": max(*seen, facts["VmHWM"]), "quarters": quarters}


STAGES = {each.__name__: each for each in (write, imports, tokenise, read, training)}

if __name__ == "__main__":
    if len(sys.argv) > 3:
        facts = STAGES[sys.argv[3]]()
        print(
            json.dumps(
                facts | {name: status("self", name) for name in ("VmHWM", "RssAnon", "RssFile")}
            )
        )
    else:
        print(json.dumps({stage: measured(stage) for stage in STAGES}))
