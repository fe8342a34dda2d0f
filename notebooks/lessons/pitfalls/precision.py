"""Where low precision ruins a training run, and where it is blamed for another fault.

Three different things are called "bf16 training". Parameters in bf16 lose small updates (P24, P25).
Products in bf16 under autocast, with parameters in fp32, cost a fine-tune nothing that it notices.
fp16 overflows (P26) and underflows, which is why it needs a loss scaler (loss_scaling.py).

Footgun: a run that loses nine tenths of its updates still lowers its loss a little, and nothing
raises. Compare it with fp32 on the same batches to see what is missing.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import torch
import transformers as tf
from safetensors.torch import load_file
from torch import nn

from lessons.pitfalls import VERSIONS, Pitfall, bench
from lessons.pitfalls.hf_trainer import checkpointed_then_adapted
from nblib.methods.muon.bf16_adamw import BF16AdamW

STEPS, RATE = 40, 1e-5
MODES = (
    "fp32",
    "bf16",
    "fp32 + autocast",
    "bf16, stochastic",
    "bf16, kahan",
    "bf16, nearest",
    "fp32, norms frozen",
)


# ---------------------------------------------------------------- P24


def bf16_weights(model: nn.Module, batches: Iterator, lr: float) -> None:
    model.to(torch.bfloat16)  # at fault: each step rounds the new weight to 8 bits
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(STEPS):
        loss = bench.mean_loss(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fp32_weights(model: nn.Module, batches: Iterator, lr: float) -> None:
    model.to(torch.float32)  # the weights keep 24 bits
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):  # only the products are bf16
            loss = bench.mean_loss(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _another_way(mode: str, model: nn.Module, batches: Iterator, lr: float) -> None:
    """Try the other modes: fp32 without autocast, or bf16 weights written by an optimizer that
    knows about rounding.
    """
    if mode == "fp32, norms frozen":
        for p in model.parameters():
            p.requires_grad_(p.ndim > 1)
    trains = [p for p in model.parameters() if p.requires_grad]
    if mode.startswith("bf16, "):
        optimizer = BF16AdamW(trains, lr=lr, way=mode.removeprefix("bf16, "))
    else:
        optimizer = torch.optim.AdamW(trains, lr=lr, weight_decay=0.0)
    bench.plain_loop(model, optimizer, lambda: bench.mean_loss(model, next(batches)), steps=STEPS)


@cache  # deterministic, and several cells want the same run; callers must not write into the facts
def fine_tune(mode: str, lr: float = RATE) -> dict:
    """Return the prose model on code for a few small steps.

    Only how weights are stored and written differs between modes.
    """
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r}: allowed are {'; '.join(MODES)}")
    shown = {"bf16": bf16_weights, "fp32 + autocast": fp32_weights}
    model = bench.trained().to(torch.bfloat16 if mode.startswith("bf16") else torch.float32)
    start = copy.deepcopy(model)
    with bench.seeded():  # for the stochastic rounding
        shown.get(mode, partial(_another_way, mode))(model, bench.batches("code"), lr)
    moved = [(p != q).float().mean().item() for p, q in zip(model.parameters(), start.parameters())]
    norms = [share > 0 for share, p in zip(moved, model.parameters()) if p.ndim == 1]
    before, after = (bench.held_out_loss(m, "code") for m in (start, model))
    return {
        "parameters": mode,
        "loss before": before,
        "loss after": after,
        "nats won": before - after,
        "entries moved": sum(m * p.numel() for m, p in zip(moved, model.parameters()))
        / _size(model),
        "norms that moved": f"{sum(norms)} of {len(norms)}",
    }


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def against_fp32(mode: str, lr: float = RATE) -> dict:
    """`fine_tune`, with its gain in loss as a share of the gain in fp32 at the same rate."""
    facts = fine_tune(mode, lr)
    return facts | {"share of fp32's gain": facts["nats won"] / fine_tune("fp32", lr)["nats won"]}


def _p24_fixed() -> dict:
    """Three fixes; the facts are those of the worst."""
    return min(
        map(against_fp32, ("fp32 + autocast", "bf16, stochastic", "bf16, kahan")), key=_share
    )


def _share(facts: dict) -> float:
    return facts["share of fp32's gain"]


# ---------------------------------------------------------------- P25


def trainer_logs(
    model: nn.Module, *, supervised: bool = True, steps: int = 4, **arguments
) -> list[dict]:
    """Loss, gradient norm and rate of each step, as the HF Trainer logs them, on rows of code."""
    rows = bench.stream("code")[: 4 * steps * 64].view(-1, 64)
    data = [
        {"input_ids": row, "labels": row if supervised else torch.full_like(row, -100)}
        for row in rows
    ]
    usual = dict(
        max_steps=steps, per_device_train_batch_size=4, lr_scheduler_type="linear", seed=42
    )
    _, log = bench.run_trainer(tf.Trainer, model, data, **(usual | arguments))
    return [{k: line[k] for k in ("loss", "grad_norm", "learning_rate")} for line in log]


def load_as_stored(folder: str) -> tuple[nn.Module, tf.TrainingArguments]:
    model = tf.AutoModelForCausalLM.from_pretrained(folder)  # at fault: bf16, as stored
    arguments = tf.TrainingArguments(folder, use_cpu=True, bf16=True)  # only autocast
    return model, arguments


def load_in_fp32(folder: str) -> tuple[nn.Module, tf.TrainingArguments]:
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    arguments = tf.TrainingArguments(folder, use_cpu=True, bf16=True)  # only autocast
    return model, arguments


def _fp32_without_autocast(folder: str) -> tuple[nn.Module, tf.TrainingArguments]:
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, tf.TrainingArguments(folder, use_cpu=True)


def _load_and_train(load: Callable[[str], tuple[nn.Module, tf.TrainingArguments]]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        bench.byte_model().to(torch.bfloat16).save_pretrained(folder)
        in_file = {str(t.dtype) for t in load_file(Path(folder) / "model.safetensors").values()}
        model, arguments = load(folder)
    loaded = str(model.dtype)
    trainer_logs(model, bf16=arguments.bf16)
    norms = [p for p in model.parameters() if p.ndim == 1]
    return {
        "bf16=True": arguments.bf16,
        "dtype in the file": ", ".join(sorted(in_file)),
        "dtype after loading": loaded,
        "dtype after training": str(model.dtype),
        "norms": len(norms),
        "norms that moved": sum(bool((p.detach() != 1).any()) for p in norms),
    }


# ---------------------------------------------------------------- P26


def large_activations(dtype: torch.dtype) -> nn.Module:
    """Return a model whose activations pass 65504, as those of large models do. bf16 and fp32 can
    hold them, fp16 cannot.
    """
    model = bench.byte_model()
    with torch.no_grad():
        for block in model.model.layers:
            for linear, factor in (
                (block.mlp.up_proj, 300),
                (block.mlp.gate_proj, 300),
                (block.mlp.down_proj, 30),
            ):
                linear.weight.mul_(factor)
    return model.to(dtype)


def log_in_fp16(model: nn.Module, **arguments) -> dict:
    model = model.to(torch.float16)  # at fault: fp16 ends at 65504, activations do not
    return trainer_logs(model, **arguments)[0]  # the Trainer's first line


def log_in_bf16(model: nn.Module, **arguments) -> dict:
    model = model.to(torch.bfloat16)  # the range of fp32: numbers end at 3e38
    return trainer_logs(model, **arguments)[0]  # the Trainer's first line


def first_log(dtype: torch.dtype, **arguments) -> dict:
    """Return the Trainer's first line, for parameters of a dtype, beside the loss of one row
    computed by the model itself.
    """
    row, log = (
        bench.stream("code")[:64].view(1, -1),
        {torch.float16: log_in_fp16, torch.bfloat16: log_in_bf16}[dtype],
    )
    with torch.no_grad():
        real = float(large_activations(dtype)(row, labels=row).loss)
    line = log(large_activations(torch.float32), **arguments)
    return {"parameters": str(dtype)} | line | {"loss of one row": real}


def _p26_claimed() -> dict:
    """Reentrant checkpointing enabled before the adapters, in fp32, where nothing overflows."""
    model = checkpointed_then_adapted(bench.byte_model(), rank=4, kind={"use_reentrant": True})
    return {"parameters": "fp32, adapters, checkpointing"} | trainer_logs(model, warmup_steps=2)[0]


def _p26_seen(facts: dict) -> bool:
    return (
        facts["loss"] == 0.0
        and facts["grad_norm"] != facts["grad_norm"]
        and facts["learning_rate"] == 0.0
    )


PITFALLS = [
    Pitfall(
        id="P24",
        title="bf16 parameters lose small updates",
        symptom="a fine-tune in bf16 hardly lowers its loss, and the norm weights keep their "
        "first value exactly",
        claim="the norm weights are frozen at 1, and a model whose norms cannot move cannot "
        "learn (write-up)",
        verdict="bf16 parameters win a small part of what fp32 wins at this rate. The norms "
        "are frozen, but that is "
        "not the cause: fp32 with frozen norms wins nearly all of it. The cause is rounding: "
        "in every weight, an "
        "update below half the distance to the next bf16 number is lost. At larger rates less "
        "is lost. Seen with "
        f"{VERSIONS}.",
        fix="fp32 parameters under autocast; where memory does not allow it, stochastic "
        "rounding or Kahan summation",
        broken=lambda: against_fp32("bf16"),
        claimed=lambda: against_fp32("fp32, norms frozen"),
        fixed=_p24_fixed,
        seen=lambda facts: facts["share of fp32's gain"] < 0.5,
        check="N4",
        slow=True,
        wrong=bf16_weights,
        right=fp32_weights,
    ),
    Pitfall(
        id="P25",
        title="A bf16 file is loaded as bf16 parameters, and bf16=True does not change that",
        symptom="the Trainer runs with bf16=True, the norms never move, and small rates change "
        "nothing",
        claim="bf16=True was missing: with it, the Trainer keeps fp32 parameters (write-up)",
        verdict="bf16=True does not help: the norms stay where they were. Since transformers "
        "5, from_pretrained takes "
        "the dtype of the file, and bf16=True only switches autocast on, which changes no "
        "parameter. Parameters "
        f"loaded in fp32 train with it and without it. Seen with {VERSIONS}.",
        fix="from_pretrained(..., dtype=torch.float32)",
        broken=lambda: _load_and_train(load_as_stored),
        claimed=lambda: _load_and_train(_fp32_without_autocast),
        fixed=lambda: _load_and_train(load_in_fp32),
        seen=lambda facts: facts["norms that moved"] == 0,
        check="N4",
        wrong=load_as_stored,
        right=load_in_fp32,
    ),
    Pitfall(
        id="P26",
        title="loss 0.0, grad_norm nan, learning_rate 0.0",
        symptom="the first line of the Trainer's log reads loss 0.0, grad_norm nan, "
        "learning_rate 0.0",
        claim="gradient checkpointing was enabled on the wrong side of the adapters (write-up)",
        verdict="The rate of 0.0 is no fault; the other two numbers have one cause, "
        "activations that left the range of "
        "fp16. The norm is nan, the loss is nan too, and the Trainer logs it as 0.0 "
        "(logging_nan_inf_filter). A "
        "warm-up starts at a rate of 0.0 in healthy runs too. Adapters attached after "
        "checkpointing show nothing but "
        f"that rate. Seen with {VERSIONS}.",
        fix="bf16 or fp32; logging_nan_inf_filter=False; stop at the first loss that is not finite",
        broken=lambda: first_log(torch.float16, warmup_steps=2),
        claimed=_p26_claimed,
        fixed=lambda: first_log(torch.bfloat16, warmup_steps=2),
        seen=_p26_seen,
        check="F5",
        wrong=log_in_fp16,
        right=log_in_bf16,
    ),
]
