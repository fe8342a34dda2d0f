"""Where low precision loses a training run, and where it is blamed for what something else did.

Three different things are called "bf16 training". Parameters in bf16 lose small updates (P24, P25). Products in bf16
under autocast, with fp32 parameters, lose nothing that a fine-tune notices. fp16 overflows (P26) and underflows, hence
the loss scaler, which has an order (P27), a device (P28) and a dtype (P29) of its own. What autocast lifts to fp32
differs by device (P32). And inference mode is not a faster `no_grad` (P33).

Footgun: a run that loses nine tenths of its updates still lowers its loss a little, and nothing raises. Only the
comparison with fp32, over the same batches, shows what is missing.
"""

import copy
import logging
import statistics
import tempfile
import time
import warnings
from functools import cache

import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

from nblib.pitfalls import Pitfall, byte_model
from nblib.pitfalls.rounding import BF16AdamW

# bitsandbytes looks for a kernel of its own when peft imports it and says on stderr that there is none.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

STEPS, RATE = 40, 1e-5
MODES = ("fp32", "bf16", "fp32 + autocast", "bf16, stochastic", "bf16, kahan", "bf16, nearest", "fp32, norms frozen")


# ---------------------------------------------------------------- P24


def fine_tune(mode: str, lr: float = RATE) -> dict:
    """The prose model on code for a few small steps; what differs is only how weights are kept."""
    torch.manual_seed(0)  # for the stochastic rounding
    model = byte_model.trained().to(torch.bfloat16 if mode.startswith("bf16") else torch.float32)
    if mode == "fp32, norms frozen":
        for p in model.parameters():
            p.requires_grad_(p.ndim > 1)
    trains = [p for p in model.parameters() if p.requires_grad]
    if "," in mode and mode.startswith("bf16"):
        optimizer = BF16AdamW(trains, lr=lr, way=mode.removeprefix("bf16, "))
    else:
        optimizer = torch.optim.AdamW(trains, lr=lr, weight_decay=0.0)
    start, data = copy.deepcopy(model), byte_model.batches("code")
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in mode):
            byte_model.mean_loss(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [(p != q).float().mean().item() for p, q in zip(model.parameters(), start.parameters())]
    norms = [share > 0 for share, p in zip(moved, model.parameters()) if p.ndim == 1]
    return {
        "parameters": mode,
        "loss before": byte_model.held_out_loss(start, "code"),
        "loss after": byte_model.held_out_loss(model, "code"),
        "entries moved": sum(m * p.numel() for m, p in zip(moved, model.parameters())) / _size(model),
        "norms that moved": f"{sum(norms)} of {len(norms)}",
    }


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@cache
def _fp32_gain(lr: float) -> float:
    facts = fine_tune("fp32", lr)
    return facts["loss before"] - facts["loss after"]


def against_fp32(mode: str, lr: float = RATE) -> dict:
    """`fine_tune`, with the loss it won as a share of what fp32 wins at the same rate."""
    facts = fine_tune(mode, lr)
    return facts | {"share of fp32's gain": (facts["loss before"] - facts["loss after"]) / _fp32_gain(lr)}


def _p24_fixed() -> dict:
    """Three remedies; the worst of them has to answer."""
    return min(map(against_fp32, ("fp32 + autocast", "bf16, stochastic", "bf16, kahan")), key=_share)


def _share(facts: dict) -> float:
    return facts["share of fp32's gain"]


# ---------------------------------------------------------------- P25


def trainer_logs(model: nn.Module, *, supervised: bool = True, steps: int = 4, **arguments) -> list[dict]:
    """Loss, gradient norm and rate as the HF Trainer logs them, step by step, on rows of code."""
    rows = byte_model.stream("code")[: 4 * steps * 64].view(-1, 64)
    data = [{"input_ids": row, "labels": row if supervised else torch.full_like(row, -100)} for row in rows]
    quiet = dict(use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = quiet | dict(max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-3) | arguments
        trainer = tf.Trainer(model, tf.TrainingArguments(output_dir=folder, **options), train_dataset=data)
        trainer.remove_callback(tf.PrinterCallback)
        trainer.train()
    kept = ("loss", "grad_norm", "learning_rate")
    return [{k: line[k] for k in kept} for line in trainer.state.log_history if "loss" in line]


def _load_and_train(*, bf16: bool, **load) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        byte_model.untrained().to(torch.bfloat16).save_pretrained(folder)
        model = tf.AutoModelForCausalLM.from_pretrained(folder, **load)
    loaded = str(model.dtype)
    trainer_logs(model, bf16=bf16)
    norms = [p for p in model.parameters() if p.ndim == 1]
    return {
        "bf16=True": bf16,
        "dtype in the file": "torch.bfloat16",
        "dtype after loading": loaded,
        "dtype after training": str(model.dtype),
        "norms": len(norms),
        "norms that moved": sum(bool((p.detach() != 1).any()) for p in norms),
    }


# ---------------------------------------------------------------- P26


def _large_activations(dtype: torch.dtype) -> nn.Module:
    """A model whose inner activations pass 65504, as those of real ones do; bf16 and fp32 do not mind."""
    model = byte_model.untrained()
    with torch.no_grad():
        for block in model.model.layers:
            for linear, factor in ((block.mlp.up_proj, 300), (block.mlp.gate_proj, 300), (block.mlp.down_proj, 30)):
                linear.weight.mul_(factor)
    return model.to(dtype)


def first_log(dtype: torch.dtype, **arguments) -> dict:
    """The Trainer's first line, for parameters of a dtype, with the loss the model really has."""
    row = byte_model.stream("code")[:64].view(1, -1)
    with torch.no_grad():
        real = float(_large_activations(dtype)(row, labels=row).loss)
    return {"parameters": str(dtype)} | trainer_logs(_large_activations(dtype), **arguments)[0] | {"real loss": real}


def _p26_claimed() -> dict:
    """Adapters under reentrant checkpointing, with numbers that are all in range."""
    from peft import LoraConfig, get_peft_model

    how = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(byte_model.untrained(), LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    try:
        return {"parameters": "fp32, adapters, checkpointing"} | trainer_logs(model, warmup_steps=2, **how)[0]
    except RuntimeError as error:
        return {"parameters": "fp32, adapters, checkpointing", "raised": str(error).split("\n")[0], "loss": None}


def _p26_seen(facts: dict) -> bool:
    return facts["loss"] == 0.0 and facts["grad_norm"] != facts["grad_norm"] and facts["learning_rate"] == 0.0


# ---------------------------------------------------------------- P27


def clipped_steps(order: str, *, clip: float = 1.0, steps: int = 20) -> dict:
    """fp16 autocast, a scaler, SGD with momentum; `order` is 'clip, unscale' or 'unscale, clip'."""
    model, data = byte_model.trained(), byte_model.batches("code")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    before = byte_model.held_out_loss(model, "code")
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16):
            loss = byte_model.mean_loss(model, next(data))
        scaler.scale(loss).backward()
        if order == "unscale, clip":
            scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        if order == "clip, unscale":
            scaler.unscale_(optimizer)
        left = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    after = byte_model.held_out_loss(model, "code")
    facts = {"order": order, "clip": clip, "norm reported": float(norm), "norm the optimizer got": left}
    return facts | {"scale": scaler.get_scale(), "loss before": before, "loss after": after}


# ---------------------------------------------------------------- P28


def _small_gradients(scaler: torch.amp.GradScaler, dtype: torch.dtype = torch.float16) -> dict:
    """The gradient of a model with a wider vocabulary, through fp16 products, against the one in fp32."""
    model = byte_model.untrained()
    ids = byte_model.stream("code")[: 16 * 64].view(16, 64)
    got = {}
    for precision in ("exact", "low"):
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=precision == "low"):
            loss = model(ids, labels=ids).loss * 1e-3  # one term of a sum, with a small weight
        loss.backward() if precision == "exact" else scaler.scale(loss).backward()
        scale = scaler.get_scale() if precision == "low" else 1.0
        got[precision] = torch.cat([p.grad.flatten() / scale for p in model.parameters()])
    lost = (got["low"] == 0) & (got["exact"] != 0)
    return {
        "scaler for": scaler._device,
        "enabled": scaler.is_enabled(),
        "scale": scaler.get_scale(),
        "state to save": sorted(scaler.state_dict()) or "empty",
        "gradients flushed to zero": float(lost.float().mean()),
        "relative error": float((got["low"] - got["exact"]).norm() / got["exact"].norm()),
    }


def absent_card() -> tuple[torch.amp.GradScaler, list[str]]:
    """A scaler for CUDA on a machine without it, and what torch says."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        # Where there is a card this cannot happen; the constructor argument then leaves the same object behind.
        scaler = torch.amp.GradScaler("cuda", enabled=not torch.cuda.is_available())
    return scaler, [str(w.message) for w in heard]


def _p28_broken() -> dict:
    scaler, heard = absent_card()
    return _small_gradients(scaler) | {"warning": heard[0] if heard else None}


def resumed_scaler(*, saved: bool) -> dict:
    """Steps that a resumed run skips when its scaler starts over, far above what the gradients allow."""
    model, data = byte_model.trained(), byte_model.batches("code")
    optimizer, start = torch.optim.SGD(model.parameters(), lr=0.0), 2.0**24
    skipped = []
    scaler = torch.amp.GradScaler("cpu", init_scale=start)
    for half in range(2):
        count = 0
        for _ in range(12):
            with torch.autocast("cpu", torch.float16):
                loss = byte_model.mean_loss(model, next(data))
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            count += scaler.get_scale() < scale
        skipped.append(count)
        if half == 0:
            state, scaler = scaler.state_dict(), torch.amp.GradScaler("cpu", init_scale=start)
            if saved:
                scaler.load_state_dict(state)
    return {"scaler in the checkpoint": saved, "steps skipped before": skipped[0], "steps skipped after": skipped[1]}


# ---------------------------------------------------------------- P29


def scaled_step(parameters: torch.dtype, *, autocast: bool, unscale: bool = True) -> dict:
    """One step under a scaler, the gradients clipped in the right order; what was raised, or what moved."""
    model, data = byte_model.trained().to(parameters), byte_model.batches("code")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    facts = {"parameters": str(parameters), "autocast": autocast, "through the scaler": unscale, "raised": None}
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        loss = byte_model.mean_loss(model, next(data))
    try:
        if unscale:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        else:
            loss.backward()
            optimizer.step()
    except ValueError as error:
        facts["raised"] = f"ValueError: {error}"
    broken = sum(not bool(torch.isfinite(p).all()) for p in model.parameters())
    return facts | {"tensors no longer finite": broken}


# ---------------------------------------------------------------- P32


def own_loss(end: str) -> dict:
    """Cross-entropy of each row after a bf16 product under CPU autocast, against float64.

    `end`: 'by hand' trusts autocast, 'by hand, lifted' calls .float() first, 'library' is F.cross_entropy.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(512, 64, generator=generator), torch.randn(4096, 64, generator=generator) / 8
    target = torch.randint(4096, (512,), generator=generator)
    exact = F.cross_entropy((hidden.double() @ weight.double().T), target, reduction="none")  # (512,)
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(hidden, weight)  # (512, 4096), bf16
        if end == "library":
            rows = F.cross_entropy(logits, target, reduction="none")
        else:
            logits = logits.float() if end == "by hand, lifted" else logits
            rows = logits.logsumexp(dim=1) - logits.gather(1, target[:, None]).squeeze(1)
    return {
        "end": end,
        "product": "bf16",
        "dtype of the loss": str(rows.dtype),
        "different losses in 512 rows": len(rows.unique()),
        "mean loss": float(rows.double().mean()),
        "exact": float(exact.mean()),
        "largest error of a row": float((rows.double() - exact).abs().max()),
    }


def lifted(device: str = "cpu") -> list[dict]:
    """Which operations autocast lifts to fp32 when their input is bf16."""
    x = torch.randn(8, 8, device=device, dtype=torch.bfloat16)
    classes = torch.zeros(8, dtype=torch.long, device=device)
    calls = {
        "softmax": lambda: F.softmax(x, dim=1),
        "log_softmax": lambda: F.log_softmax(x, dim=1),
        "sum": lambda: x.sum(),
        "mean": lambda: x.mean(),
        "exp": lambda: x.exp(),
        "layer_norm": lambda: F.layer_norm(x, (8,)),
        "matmul": lambda: x @ x,
        "cross_entropy": lambda: F.cross_entropy(x, classes),
        "mse_loss": lambda: F.mse_loss(x, x),
        "kl_div": lambda: F.kl_div(x, x.exp(), reduction="sum"),
        "bf16 + fp32": lambda: x + x.float(),
    }
    with torch.autocast(device, torch.bfloat16):
        return [{"operation": name, device: str(call().dtype).removeprefix("torch.")} for name, call in calls.items()]


# ---------------------------------------------------------------- P33

DOWNSTREAM = {  # what a distillation does with the teacher's logits t, the student's s, a temperature
    "mse(s, t)": lambda s, t, T: F.mse_loss(s, t),
    "kl(s, softmax(t / 2))": lambda s, t, T: F.kl_div(F.log_softmax(s, -1), F.softmax(t / 2, -1), reduction="sum"),
    "t / T, T learnable": lambda s, t, T: (t / T).sum(),
    "t * T, T learnable": lambda s, t, T: (t * T).sum(),
    "t.detach() / T": lambda s, t, T: (t.detach() / T).sum(),
    "t.float() / T": lambda s, t, T: (t.float() / T).sum(),
    "t[:, :-1] / T": lambda s, t, T: (t[:, :-1] / T).sum(),
    "t + T": lambda s, t, T: (t + T).sum(),
    "t.clone() / T": lambda s, t, T: (t.clone() / T).sum(),
    "t.bfloat16() / T": lambda s, t, T: (t.bfloat16() / T).sum(),
    "soft labels, ce(s, t)": lambda s, t, T: F.cross_entropy(s.flatten(0, 1), t.flatten(0, 1)),
}


def teacher_use(use: str, *, mode=torch.inference_mode, clone: bool = False) -> dict:
    """The teacher's logits made under `mode` and used downstream, forward and backward."""
    model, ids = byte_model.untrained(), byte_model.stream("prose")[:64].view(2, 32)
    with mode():
        teacher = model.eval()(ids).logits
    teacher = teacher.clone() if clone else teacher
    student = torch.zeros_like(teacher).requires_grad_()
    temperature = torch.ones((), requires_grad=True)
    facts = {"use": use, "under": mode.__name__, "raised": None, "in": None}
    try:
        loss = DOWNSTREAM[use](student, teacher, temperature)
    except RuntimeError as error:
        return facts | {"raised": str(error).split(". ")[0], "in": "forward"}
    try:
        loss.backward()
    except RuntimeError as error:
        return facts | {"raised": str(error).split(". ")[0], "in": "backward"}
    return facts


def teacher_speed(*, hidden: int, rows: int, length: int, rounds: int = 15) -> dict:
    """Median seconds of a forward pass without gradients, the two modes in turn so that both meet the same machine."""
    model = byte_model.untrained(hidden=hidden).eval()
    ids = byte_model.stream("prose")[: rows * length].view(rows, length)
    spent: dict[str, list[float]] = {"no_grad": [], "inference_mode": []}
    for _ in range(rounds):
        for mode in (torch.no_grad, torch.inference_mode):
            started = time.perf_counter()
            with mode():
                model(ids)
            spent[mode.__name__].append(time.perf_counter() - started)
    medians = {name: statistics.median(times[2:]) for name, times in spent.items()}
    facts = {"hidden": hidden, "tokens": rows * length, "no_grad in ms": 1000 * medians["no_grad"]}
    return facts | {"no_grad / inference_mode": medians["no_grad"] / medians["inference_mode"]}


def _raised(facts: dict) -> bool:
    return facts["raised"] is not None


VERSIONS = "torch 2.13, transformers 5.23"
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
        f"same in a healthy run. Adapters under checkpointing show none of it. {VERSIONS}",
        fix="bf16 or fp32; logging_nan_inf_filter=False; stop at the first loss that is not finite",
        broken=lambda: first_log(torch.float16, warmup_steps=2),
        claimed=_p26_claimed,
        fixed=lambda: first_log(torch.bfloat16, warmup_steps=2),
        seen=_p26_seen,
        check="N17",
    ),
    Pitfall(
        id="P27",
        title="Clipping before unscaling",
        symptom="with fp16 the gradient norm reads tens of thousands and the loss stands still",
        claim="the clip is set too low",
        verdict="The norm is that of scaled gradients. Clipped to 1 and divided by the scale afterwards, next to "
        f"nothing is left. A clip ten times smaller in the right order still trains. {VERSIONS}",
        fix="scaler.unscale_(optimizer), then clip, then scaler.step(optimizer)",
        broken=lambda: clipped_steps("clip, unscale"),
        claimed=lambda: clipped_steps("unscale, clip", clip=0.1),
        fixed=lambda: clipped_steps("unscale, clip"),
        seen=lambda facts: facts["norm the optimizer got"] < facts["clip"] / 1000,
        check="N7",
    ),
    Pitfall(
        id="P28",
        title="A scaler for a device that is not there switches itself off",
        symptom="fp16 gradients are zero or wrong although a GradScaler is in the loop; its state to save is empty",
        claim="a run without an active scaler cannot be trained in half precision",
        verdict="GradScaler() means CUDA. Without a card it says so in a warning and does nothing, and small fp16 "
        f"gradients become zero. bf16 has the exponents of fp32 and loses none without any scaler. {VERSIONS}",
        fix="GradScaler(device.type, enabled=precision is fp16), and its state in every checkpoint",
        broken=_p28_broken,
        claimed=lambda: _small_gradients(absent_card()[0], torch.bfloat16),
        fixed=lambda: _small_gradients(torch.amp.GradScaler("cpu")),
        seen=lambda facts: facts["relative error"] > 0.1,
    ),
    Pitfall(
        id="P29",
        title="fp16 parameters under a scaler",
        symptom="ValueError: Attempting to unscale FP16 gradients.",
        claim="a scaler refuses parameters in half precision",
        verdict="It refuses fp16 parameters, with or without autocast, and takes bf16 ones without a word. Leaving the "
        f"scaler out removes the message and leaves weights that are not finite after one AdamW step. {VERSIONS}",
        fix="keep the parameters in fp32 and let autocast lower the products",
        broken=lambda: scaled_step(torch.float16, autocast=True),
        claimed=lambda: scaled_step(torch.bfloat16, autocast=False),
        fixed=lambda: scaled_step(torch.float32, autocast=True),
        seen=lambda facts: _raised(facts) or facts["tensors no longer finite"] > 0,
    ),
    Pitfall(
        id="P32",
        title="What autocast lifts to fp32 depends on the device",
        symptom="a loss written by hand takes few distinct values under bf16 autocast; curves show steps",
        claim="the bf16 products cost the digits; sums and softmax are lifted to fp32 anyway (write-up)",
        verdict="The products alone cost little. On a CPU autocast lifts losses, not sums, exponentials or softmax, so "
        f"a loss written from those stays in bf16 to the end. {VERSIONS}",
        fix="logits.float() before a loss of your own; dtypes asserted, not assumed",
        broken=lambda: own_loss("by hand"),
        claimed=lambda: own_loss("library"),
        fixed=lambda: own_loss("by hand, lifted"),
        seen=lambda facts: facts["largest error of a row"] > 0.02,
    ),
    Pitfall(
        id="P33",
        title="A teacher under inference mode",
        symptom="RuntimeError: Inference tensors cannot be saved for backward",
        claim="it fails only where something learnable stands downstream of the teacher, as a temperature (write-up)",
        verdict="It fails wherever autograd has to save the teacher's tensor, learnable temperature or not, and "
        f"already in the forward pass. Under no_grad the learnable temperature is harmless. {VERSIONS}",
        fix="torch.no_grad(), or .clone() of exactly the tensors that leave",
        broken=lambda: teacher_use("mse(s, t)"),
        claimed=lambda: teacher_use("t / T, T learnable", mode=torch.no_grad),
        fixed=lambda: teacher_use("mse(s, t)", clone=True),
        seen=_raised,
    ),
]
