"""Make a model ternary, correct it by matrices of low rank, and export it for stock tools.

python lrc_and_export.py --model path/to/llama --text notes.txt --out ternary
"""

import argparse
import copy
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from nblib import corpora, models, runtime, text, train
from nblib.methods import distill, lrc, muon
from nblib.methods.lrc import gguf

parser = argparse.ArgumentParser(description="Make a model ternary, correct it, export it.")
parser.add_argument("--model", help="a folder or hub name; default: a small one")
parser.add_argument("--text", default="prose", help="a file or folder: txt, md, jsonl ...")
parser.add_argument("--out", type=Path, default=Path("ternary"), help="folder of the export")
arguments = parser.parse_args()
machine = runtime.pick()

if arguments.model:
    tokenizer = models.load_tokenizer(arguments.model)
    model = models.load(arguments.model, device=machine.device)
else:
    tokenizer = text.train_tokenizer(text.documents("prose", "validation"), vocab_size=1024)
    model = models.tiny(len(tokenizer), hidden=256, layers=2).to(machine.device)
streams = corpora.open(arguments.text, tokenizer)
batches = text.Batches(streams["train"], rows=8, length=64)
held_out = text.fixed_rows(streams["held_out"], length=64, limit=32)
if not arguments.model:  # random weights have nothing to lose by rounding
    train.fit(model, batches, muon.optimizers(model), total=80, machine=machine)

# The float model is what the ternary one imitates.
teacher = models.as_teacher(copy.deepcopy(model))
rounded = copy.deepcopy(model)
lrc.ternarise(rounded)

# The correction starts at the best one for these inputs, and then trains; all else is frozen.
moments = lrc.input_moments(model, [next(batches) for _ in range(8)])
lrc.attach(model, percent=15.0, init="svd_activation", rounds=8, moments=moments)
loss = distill.objective.from_teacher(teacher, 1.0)
train.fit(model, batches, train.adamw(model, lr=1e-3), total=40, loss=loss, machine=machine)

# A BitNet checkpoint with the correction as a PEFT adapter beside it, read by stock transformers.
lrc.export.save(model, arguments.out, tokenizer=tokenizer)
# To compile its unpacking takes longer than to unpack, hence force_eager.
with torch.compiler.set_stance("force_eager"):
    stock = AutoModelForCausalLM.from_pretrained(arguments.out)
    stock = PeftModel.from_pretrained(stock, arguments.out / "adapter").to(machine.device)
    for name, each in {"float": teacher, "rounded": rounded, "LRC": model, "peft": stock}.items():
        loss = train.evaluate(each, held_out, machine=machine)["loss"]
        print(f"{name}: held-out loss {loss:.3f}")

# Two files for llama.cpp.
try:
    print("GGUF:", gguf.save(model, arguments.out / "gguf", tokenizer=tokenizer))
except ValueError as reason:  # not for every family, and the package gguf may not be installed
    print("no GGUF:", reason)
