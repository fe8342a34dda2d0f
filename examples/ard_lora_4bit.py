"""Fine-tune a model in four bits with ARD-LoRA, drop ranks that it does not need, export to PEFT.

python ard_lora_4bit.py --model Qwen/Qwen3-0.6B --text notes.txt --out adapter
"""

import argparse
import tempfile
from pathlib import Path

from nblib import corpora, models, runtime, text, train
from nblib.methods import ard, muon

parser = argparse.ArgumentParser(description="ARD-LoRA on a model in four bits.")
parser.add_argument("--model", help="a folder or hub name; default: a small one")
parser.add_argument("--text", default="code", help="a file or folder: txt, md, jsonl ...")
parser.add_argument("--rank", type=int, default=8, help="of each adapter, before pruning")
parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
parser.add_argument("--out", type=Path, default=Path("adapter"), help="folder of the PEFT adapter")
arguments = parser.parse_args()
steps = arguments.steps
machine = runtime.pick()
runtime.seed_all(0)

name = arguments.model
if name is None:  # a model of prose, which is to learn the text of --text
    name = tempfile.mkdtemp()
    tokenizer = text.train_tokenizer(text.documents("prose", "validation"), vocab_size=1024)
    small = models.tiny(len(tokenizer), hidden=128, layers=2).to(machine.device)
    prose = text.Batches(text.encode(text.documents("prose"), tokenizer), rows=8, length=64)
    train.fit(small, prose, muon.optimizers(small), total=80, machine=machine)
    small.save_pretrained(name)
    tokenizer.save_pretrained(name)

tokenizer = models.load_tokenizer(name)
model = models.load(name, four_bit=True, device=machine.device)
streams = corpora.open(arguments.text, tokenizer)
batches = text.Batches(streams["train"], rows=8, length=64)
held_out = text.fixed_rows(streams["held_out"], length=64, limit=32)
rows = streams["validation"][:2048].view(4, 8, 64)
validation = [{"input_ids": few, "labels": few} for few in rows]


def held_out_loss() -> float:
    return train.evaluate(model, held_out, machine=machine)["loss"]


before = held_out_loss()
targets = ard.projections(model, ("q_proj", "v_proj"))
ard.attach(model, rank=arguments.rank, alpha=16.0, targets=targets)
adamw = train.adamw(model, lr=1e-2, weight_decay=0.0)
loss = ard.loss(model, beta=1e-4, warmup=10, optimizer=adamw)
schedule = train.cosine(steps)
train.fit(model, batches, adamw, total=steps, schedule=schedule, loss=loss, machine=machine)
trained = held_out_loss()

# The priors say which ranks carry something; half of them stay.
ard.estimate_priors(model, validation, machine=machine)
scores = ard.relevance(model)
left = ard.prune(model, scores, keep=sum(map(len, scores.values())) // 2)
ard.export_peft(model, arguments.out)
print(f"held-out loss {before:.3f} before, {trained:.3f} trained, {held_out_loss():.3f} pruned")
print("ranks left:", ", ".join(f"{layer} {ranks}" for layer, ranks in left.items()))
