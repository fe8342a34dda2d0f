"""Train with two processes, started by plain torchrun: the step is that of one process on all rows.

    torchrun --standalone --nproc-per-node 2 two_processes.py
    torchrun --standalone --nproc-per-node 2 two_processes.py --mesh fsdp

Without torchrun the same script trains in one process, and ends with the same loss.
"""

import argparse

from torch import distributed

from nblib import corpora, models, runtime, text, train

LENGTH = 128  # tokens in a row

parser = argparse.ArgumentParser(description="Train with several processes.")
parser.add_argument("--text", default="prose", help="a file or folder: txt, md, jsonl ...")
parser.add_argument("--mesh", default="auto", choices=("auto", "ddp", "fsdp", "hsdp"))
parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
arguments = parser.parse_args()

# Every process makes the same model and the same batches; the loop gives each its rows.
machine = runtime.pick(precision="fp32", mesh=arguments.mesh)
runtime.seed_all(0)
tokenizer = text.train_tokenizer(text.documents("prose", "validation"), vocab_size=1024)
streams = corpora.open(arguments.text, tokenizer)
batches = text.Batches(streams["train"], rows=8, length=LENGTH)
held_out = text.fixed_rows(streams["held_out"], length=LENGTH, limit=32)
model = models.tiny(len(tokenizer), hidden=128, layers=2, length=LENGTH).to(machine.device)

records = train.fit(
    model,
    batches,
    train.adamw(model, lr=4e-3),
    total=arguments.steps,
    schedule=train.cosine(arguments.steps, warmup=5),
    machine=machine,
)

# After the loop each process holds the whole model again.
loss = train.evaluate(model, held_out, machine=machine)["loss"]
if runtime.rank() == 0:
    each = f"{runtime.world()} processes, {8 // runtime.world()} rows each"
    print(f"{each}: {records[-1]['tokens']:,} tokens in {arguments.steps} steps")
    print(f"held-out loss {loss:.6f}")
if distributed.is_initialized():
    distributed.destroy_process_group()
