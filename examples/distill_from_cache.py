"""Distil a teacher into a student: from answers on disk, at a learned temperature; then
on-policy.
"""

# python distill_from_cache.py --teacher big --student small --text notes.txt --out student

import argparse

from nblib import corpora, models, runtime, text, train
from nblib.methods import muon
from nblib.methods.distill import objective, on_policy, teacher_cache, temperature

# Teacher and student must have the same tokenizer; their widths and depths may differ.
parser = argparse.ArgumentParser(description="Distil a teacher into a student.")
parser.add_argument("--teacher", help="a folder or hub name; default: a small one")
parser.add_argument("--student", help="the same; default: half as wide")
parser.add_argument("--text", default="prose", help="a file or folder: txt, md, jsonl ...")
parser.add_argument("--out", default="student", help="folder of the student and of the cache")
arguments = parser.parse_args()
machine = runtime.pick()
runtime.seed_all(0)

if arguments.teacher:
    tokenizer = models.load_tokenizer(arguments.teacher)
    teacher = models.load(arguments.teacher, device=machine.device)
else:
    tokenizer = text.train_tokenizer(text.documents("prose", "validation"), vocab_size=1024)
    teacher = models.tiny(len(tokenizer), hidden=128, layers=2).to(machine.device)
streams = corpora.open(arguments.text, tokenizer)
batches = text.Batches(streams["train"], rows=8, length=64)
held_out = text.fixed_rows(streams["held_out"], length=64, limit=32)
if not arguments.teacher:
    train.fit(teacher, batches, muon.optimizers(teacher), total=100, machine=machine)
teacher = models.as_teacher(teacher)
student = models.tiny(len(tokenizer), hidden=64, layers=2)
if arguments.student:
    student = models.load(arguments.student)
student.to(machine.device)

# The teacher answers once; a killed run goes on after the last shard. The temperature starts at
# the first of three numbers; the cache is exact between the other two.
about = teacher_cache.source(teacher, tokenizer, streams["train"])
made = dict(steps=60, source=about, temperatures=(1.0, 0.5, 4.0), machine=machine)
cache = teacher_cache.make(f"{arguments.out}/cache", teacher, batches, **made)
heat = temperature.Learned(1.0).to(machine.device)
parts = [*muon.optimizers(student, lr=0.01), heat.optimizer()]
student.temperature = heat  # a part of the student, so that checkpoints hold it
loss = objective.from_teacher(cache, heat, kd=0.7, ce=0.3)
cached = teacher_cache.Cached(batches, cache)
train.fit(student, cached, parts, total=60, loss=loss, machine=machine)
print(f"from the cache: {train.evaluate(student, held_out, machine=machine)['loss']:.3f}")

# The student continues prompts in its own words, and the teacher judges them, in half of the steps.
loss = on_policy.on_policy(objective.from_teacher(teacher, heat), share=0.5, prompt=16)
train.fit(student, batches, parts, total=12, loss=loss, machine=machine)
del student.temperature  # no part of the model that others load
student.save_pretrained(arguments.out)
for name, each in {"teacher": teacher, "student, then on-policy": student}.items():
    print(f"{name}: {train.evaluate(each, held_out, machine=machine)['loss']:.3f}")
print(f"held-out losses in nats per token; the temperature ended at {float(heat()):.2f}")
