"""Where low precision ruins a training run, and where it is blamed for another fault.

Three different things are called "bf16 training". Parameters in bf16 lose small updates (P24, P25). Products in bf16
under autocast, with fp32 parameters, lose nothing that a fine-tune notices. fp16 overflows (P26) and
underflows, hence the loss scaler (loss_scaling.py).

Footgun: a run that loses nine tenths of its updates still lowers its loss a little, and nothing raises. Only the
comparison with fp32, over the same batches, shows what is missing.
"""

import copy
import tempfile
from functools import cache
from pathlib import Path

import torch
import transformers as tf
from safetensors.torch import load_file
from torch import nn

from lessons.bf16_adamw import BF16AdamW
from lessons.pitfalls import VERSIONS, Pitfall, bench
from lessons.pitfalls.hf_trainer import checkpointed_then_adapted

STEPS, RATE = 40, 1e-5
MODES = ("fp32", "bf16", "fp32 + autocast", "bf16, stochastic", "bf16, kahan", "bf16, nearest", "fp32, norms frozen")


# ---------------------------------------------------------------- P24


@cache  # deterministic, and several cells want the same run; callers must not write into the facts
def fine_tune(mode: str, lr: float = RATE) -> dict:
    """The prose model on code for a few small steps; only the way weights are stored and written differs."""
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r}: allowed are {'; '.join(MODES)}")
    model = bench.trained().to(torch.bfloat16 if mode.startswith("bf16") else torch.float32)
    if mode == "fp32, norms frozen":
        for p in model.parameters():
            p.requires_grad_(p.ndim > 1)
    trains = [p for p in model.parameters() if p.requires_grad]
    if "," in mode and mode.startswith("bf16"):
        optimizer = BF16AdamW(trains, lr=lr, way=mode.removeprefix("bf16, "))
    else:
        optimizer = torch.optim.AdamW(trains, lr=lr, weight_decay=0.0)
    start, data = copy.deepcopy(model), bench.batches("code")
    with bench.seeded():  # for the stochastic rounding
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in mode):
                bench.mean_loss(model, next(data)).backward()
            optimizer.step()
            optimizer.zero_grad()
    moved = [(p != q).float().mean().item() for p, q in zip(model.parameters(), start.parameters())]
    norms = [share > 0 for share, p in zip(moved, model.parameters()) if p.ndim == 1]
    before, after = (bench.held_out_loss(m, "code") for m in (start, model))
    return {
        "parameters": mode,
        "loss before": before,
        "loss after": after,
        "nats won": before - after,
        "entries moved": sum(m * p.numel() for m, p in zip(moved, model.parameters())) / _size(model),
        "norms that moved": f"{sum(norms)} of {len(norms)}",
    }


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def against_fp32(mode: str, lr: float = RATE) -> dict:
    """`fine_tune`, with the loss it won as a share of what fp32 wins at the same rate."""
    facts = fine_tune(mode, lr)
    return facts | {"share of fp32's gain": facts["nats won"] / fine_tune("fp32", lr)["nats won"]}


def _p24_fixed() -> dict:
    """Three remedies; the worst of them has to answer."""
    return min(map(against_fp32, ("fp32 + autocast", "bf16, stochastic", "bf16, kahan")), key=_share)


def _share(facts: dict) -> float:
    return facts["share of fp32's gain"]


# ---------------------------------------------------------------- P25


def trainer_logs(model: nn.Module, *, supervised: bool = True, steps: int = 4, **arguments) -> list[dict]:
    """Loss, gradient norm and rate as the HF Trainer logs them, step by step, on rows of code."""
    rows = bench.stream("code")[: 4 * steps * 64].view(-1, 64)
    data = [{"input_ids": row, "labels": row if supervised else torch.full_like(row, -100)} for row in rows]
    usual = dict(max_steps=steps, per_device_train_batch_size=4, lr_scheduler_type="linear", seed=42)
    _, log = bench.run_trainer(tf.Trainer, model, data, **(usual | arguments))
    return [{k: line[k] for k in ("loss", "grad_norm", "learning_rate")} for line in log]


def _load_and_train(*, bf16: bool, **load) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        bench.byte_model().to(torch.bfloat16).save_pretrained(folder)
        in_file = {str(t.dtype) for t in load_file(Path(folder) / "model.safetensors").values()}
        model = tf.AutoModelForCausalLM.from_pretrained(folder, **load)
    loaded = str(model.dtype)
    trainer_logs(model, bf16=bf16)
    norms = [p for p in model.parameters() if p.ndim == 1]
    return {
        "bf16=True": bf16,
        "dtype in the file": ", ".join(sorted(in_file)),
        "dtype after loading": loaded,
        "dtype after training": str(model.dtype),
        "norms": len(norms),
        "norms that moved": sum(bool((p.detach() != 1).any()) for p in norms),
    }


# ---------------------------------------------------------------- P26


def large_activations(dtype: torch.dtype) -> nn.Module:
    """A model whose inner activations pass 65504, as those of real ones do; bf16 and fp32 do not mind."""
    model = bench.byte_model()
    with torch.no_grad():
        for block in model.model.layers:
            for linear, factor in ((block.mlp.up_proj, 300), (block.mlp.gate_proj, 300), (block.mlp.down_proj, 30)):
                linear.weight.mul_(factor)
    return model.to(dtype)


def first_log(dtype: torch.dtype, **arguments) -> dict:
    """The Trainer's first line, for parameters of a dtype, beside the loss of one row asked of the model itself."""
    row = bench.stream("code")[:64].view(1, -1)
    with torch.no_grad():
        real = float(large_activations(dtype)(row, labels=row).loss)
    return (
        {"parameters": str(dtype)} | trainer_logs(large_activations(dtype), **arguments)[0] | {"loss of one row": real}
    )


def _p26_claimed() -> dict:
    """Reentrant checkpointing enabled before the adapters, with numbers that are all in range."""
    model = checkpointed_then_adapted(bench.byte_model(), rank=4, kind={"use_reentrant": True})
    return {"parameters": "fp32, adapters, checkpointing"} | trainer_logs(model, warmup_steps=2)[0]


def _p26_seen(facts: dict) -> bool:
    return facts["loss"] == 0.0 and facts["grad_norm"] != facts["grad_norm"] and facts["learning_rate"] == 0.0


PITFALLS = [
    Pitfall(
        id="P24",
        title="bf16 parameters swallow small updates",
        symptom="a fine-tune in bf16 hardly improves; the norms stand at their first value to the last digit",
        claim="the norm weights are frozen at 1, and a model whose norms cannot move cannot learn (write-up)",
        verdict="The norms are indeed frozen, and it hardly matters: fp32 with frozen norms wins what fp32 wins. What "
        f"is lost are the updates of all the other weights below half the distance to their neighbour. {VERSIONS}",
        fix="fp32 parameters under autocast; where memory forbids it, stochastic rounding or Kahan's compensation",
        broken=lambda: against_fp32("bf16"),
        claimed=lambda: against_fp32("fp32, norms frozen"),
        fixed=_p24_fixed,
        seen=lambda facts: facts["share of fp32's gain"] < 0.5,
        check="N4",
        slow=True,
    ),
    Pitfall(
        id="P25",
        title="A bf16 file becomes bf16 parameters, and bf16=True does not change that",
        symptom="the Trainer runs with bf16=True, the norms never move, small rates do nothing",
        claim="mixed precision was not asked for: with bf16=True the Trainer keeps fp32 parameters (write-up)",
        verdict="from_pretrained takes the dtype of the file since transformers 5. bf16=True is autocast: it lowers "
        f"products and lifts no parameter, and leaving it off does no harm to fp32 parameters. {VERSIONS}",
        fix="from_pretrained(..., dtype=torch.float32)",
        broken=lambda: _load_and_train(bf16=True),
        claimed=lambda: _load_and_train(bf16=False, dtype=torch.float32),
        fixed=lambda: _load_and_train(bf16=True, dtype=torch.float32),
        seen=lambda facts: facts["norms that moved"] == 0,
        check="N4",
    ),
    Pitfall(
        id="P26",
        title="loss 0.0, grad_norm nan, lr 0.0",
        symptom="the first line of the Trainer reads loss 0.0, grad_norm nan, learning_rate 0.0",
        claim="gradient checkpointing was enabled on the wrong side of the adapters (write-up)",
        verdict="Three numbers, three stories. The gradient is not finite: activations left the range of fp16. The "
        "0.0 is the Trainer's filter, which replaces a loss of nan. The rate is the first step of a warm-up, and the "
        f"same in a healthy run. Adapters attached after checkpointing show none of it but the rate. {VERSIONS}",
        fix="bf16 or fp32; logging_nan_inf_filter=False; stop at the first loss that is not finite",
        broken=lambda: first_log(torch.float16, warmup_steps=2),
        claimed=_p26_claimed,
        fixed=lambda: first_log(torch.bfloat16, warmup_steps=2),
        seen=_p26_seen,
        check="F5",
    ),
]
