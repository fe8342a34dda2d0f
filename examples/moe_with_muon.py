"""Train a small mixture of experts with Muon, and look at what its routers do.

python moe_with_muon.py --text notes.txt --experts 8 --steps 200
"""

import argparse

from nblib import corpora, models, runtime, text, train
from nblib.methods import moe, muon

LENGTH = 128  # tokens in a row

parser = argparse.ArgumentParser(description="Train a mixture of experts with Muon.")
parser.add_argument("--text", default="prose", help="a file or folder: txt, md, jsonl ...")
parser.add_argument("--experts", type=int, default=8, help="in each layer; two of them see a token")
parser.add_argument("--steps", type=int, default=80, help="optimizer steps")
arguments = parser.parse_args()
steps = arguments.steps
machine = runtime.pick()
runtime.seed_all(0)

tokenizer = text.train_tokenizer(text.documents("prose", "validation"), vocab_size=1024)
streams = corpora.open(arguments.text, tokenizer)
batches = text.Batches(streams["train"], rows=8, length=LENGTH)
held_out = text.fixed_rows(streams["held_out"], length=LENGTH, limit=32)
shape = dict(family="qwen3_moe", hidden=128, layers=2, num_experts=arguments.experts)
model = models.tiny(len(tokenizer), **shape).to(machine.device)
before = train.evaluate(model, held_out, machine=machine)["loss"]

# Muon takes the matrices and the stacked experts; AdamW embeddings, norms and routers.
for name, (optimizer, reason, *_) in muon.assign(model).items():
    if "layers.0" in name or "layers" not in name:
        print(f"{optimizer:6} {name}: {reason}")
both = muon.optimizers(model, lr=0.02, adamw_lr=0.01)
loss = moe.loss(balance_weight=0.1, z_weight=0.001)
schedule = train.cosine(steps, warmup=8)
train.fit(model, batches, both, total=steps, schedule=schedule, loss=loss, machine=machine)

after = train.evaluate(model, held_out, machine=machine)["loss"]
sizes = moe.sizes(model)
print(f"{sizes['parameters']:,} parameters, of which {sizes['active']:,} work on a token")
print(f"held-out loss {before:.3f} before, {after:.3f} after {steps} steps")
for health in moe.router_health.diagnose(model, held_out):
    print(
        f"{health.layer}: busiest expert {health.largest:.2f} fair shares, idlest "
        f"{health.smallest:.2f}, {health.dead} without a token"
    )
