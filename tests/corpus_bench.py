"""How much memory a corpus on disk takes and how fast it is read: `python tests/corpus_bench.py FOLDER TOKENS`.

Writes a parquet set of about TOKENS tokens into FOLDER (few documents, repeated with changes), tokenises it, and reads
two epochs in random order. Beside it the tiny training, on the same batches. Prints one line of JSON.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

os.environ["NBLIB_OUTPUTS"] = str(Path(sys.argv[1]) / "outputs")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pyarrow
import torch
from pyarrow import parquet

from nblib import memory, models, runtime, shards, text, train

VOCABULARY, ROWS, LENGTH = 4096, 16, 256  # of the base model


def write(folder: Path, tokenizer, tokens: int) -> None:
    """Each document is one of a hundred of the embedded prose under another number, so that none stands there twice."""
    texts = [each[:4000] for each in text.documents("prose")[:100]]
    size = sum(map(len, tokenizer([f"{n:09} {each}" for n, each in enumerate(texts)])["input_ids"])) / len(texts) + 1
    draw, count = random.Random(0), round(tokens / size)
    folder.mkdir(parents=True)
    schema = pyarrow.schema({"id": pyarrow.int64(), "text": pyarrow.string()})
    with parquet.ParquetWriter(folder / "corpus.parquet", schema) as file:
        for start in range(0, count, 1000):
            numbers = range(start, min(count, start + 1000))
            file.write(
                pyarrow.table({"id": numbers, "text": [f"{n:09} {draw.choice(texts)}" for n in numbers]}, schema)
            )


def main() -> None:
    folder, tokens = Path(sys.argv[1]), int(sys.argv[2])
    tokenizer = text.train_tokenizer(text.documents("prose"), vocab_size=VOCABULARY)
    write(folder / "corpus", tokenizer, tokens)
    facts = {}
    with memory.peak() as peak:
        began = time.perf_counter()
        stream = shards.open(str(folder / "corpus"), tokenizer)["train"]
        facts["tokenised per s"] = len(stream) / (time.perf_counter() - began)
        batches, began = text.Batches(stream, rows=ROWS, length=LENGTH), time.perf_counter()
        for _ in range(2 * batches.per_epoch):
            next(batches)
        facts["read per s"] = 2 * batches.per_epoch * ROWS * LENGTH / (time.perf_counter() - began)
    facts |= {"tokens": len(stream), "peak MiB": peak.bytes / 2**20, "by": peak.source}
    model = models.tiny(len(tokenizer), hidden=256, layers=4, length=4 * LENGTH)
    options = dict(total=4, machine=runtime.Machine(torch.device("cpu"), "fp32", ""))
    records = train.fit(model, text.Batches(stream, rows=ROWS, length=LENGTH), train.adamw(model, lr=1e-3), **options)
    facts["trained per s"] = records[-1]["tokens_per_s"]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
