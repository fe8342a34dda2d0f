"""Train a small language model on text of your own, and save it as transformers reads it.

    python train_own_model.py --text notes.txt --steps 500 --out my-model

Stopped or killed, the same command goes on from its last checkpoint.
"""

import argparse
import math
from pathlib import Path

from nblib import corpora, models, runtime, text, train
from nblib.methods import muon

LENGTH = 128  # tokens in a row

parser = argparse.ArgumentParser(description="Train a small language model on your own text.")
parser.add_argument("--text", default="prose", help="a file or folder: txt, md, jsonl ...")
parser.add_argument("--steps", type=int, default=120, help="optimizer steps")
parser.add_argument("--out", type=Path, default=Path("own-model"), help="folder of the model")
arguments = parser.parse_args()

# A tokenizer, the text as tokens, and rows that are never trained on.
machine = runtime.pick()
tokenizer = text.train_tokenizer(text.documents("prose", "validation"), vocab_size=1024)
streams = corpora.open(arguments.text, tokenizer)
batches = text.Batches(streams["train"], rows=8, length=LENGTH)
held_out = text.fixed_rows(streams["held_out"], length=LENGTH, limit=32)

# Any causal model of transformers trains in the same way; see models.load.
runtime.seed_all(0)
model = models.tiny(len(tokenizer), family="llama", hidden=128, layers=2, length=LENGTH)
model.to(machine.device)
before = train.evaluate(model, held_out, machine=machine)["loss"]

records = train.fit(
    model,
    batches,
    muon.optimizers(model),  # train.adamw(model, lr=2e-3) learns more slowly here
    total=arguments.steps,
    schedule=train.cosine(arguments.steps, warmup=10),
    machine=machine,
    checkpoints=train.Checkpoints(arguments.out / "checkpoints", every=40),
)

model.save_pretrained(arguments.out)
tokenizer.save_pretrained(arguments.out)
after = train.evaluate(model, held_out, machine=machine)["loss"]
print(f"{records[-1]['tokens']:,} tokens in {arguments.steps} steps on {machine.reason}")
print(f"held-out loss {before:.3f} before, {after:.3f} after: perplexity {math.exp(after):.1f}")
print(f"AutoModelForCausalLM.from_pretrained({str(arguments.out)!r}) opens it")
