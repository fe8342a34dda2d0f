"""The loss scaler: fp16 needs it because its smallest numbers are not small enough; and four ways to lose it.

    scaled = scale(loss), backward, unscale the gradients, clip, step unless one overflowed, adjust the scale

The order decides what is clipped (P27). The scaler belongs to a device and switches itself off for one that is not
there (P28). It works on fp32 parameters and refuses fp16 ones (P29). All of it runs on a CPU: `GradScaler("cpu")`.

Footgun: a disabled scaler has every method of an enabled one, and an empty state that a checkpoint stores without a
word.
"""

import warnings

import torch
from torch import nn

from lessons.pitfalls import VERSIONS, Pitfall, bench

# ---------------------------------------------------------------- P27


def clipped_steps(order: str, *, clip: float = 1.0, steps: int = 20) -> dict:
    """fp16 autocast, a scaler, SGD with momentum; `order` is 'clip, unscale' or 'unscale, clip'."""
    model, data = bench.trained(), bench.batches("code")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    before = bench.held_out_loss(model, "code")
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16):
            loss = bench.mean_loss(model, next(data))
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
    after = bench.held_out_loss(model, "code")
    facts = {"order": order, "clip": clip, "norm reported": float(norm), "norm the optimizer got": left}
    return facts | {"scale": scaler.get_scale(), "loss before": before, "loss after": after}


# ---------------------------------------------------------------- P28


def _small_gradients(scaler: torch.amp.GradScaler, dtype: torch.dtype = torch.float16) -> dict:
    """The gradient of a model with a wider vocabulary, through fp16 products, against the one in fp32."""
    model = bench.byte_model()
    ids = bench.stream("code")[: 16 * 64].view(16, 64)
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
    """A scaler for CUDA on a machine without it, and torch's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Where there is a card this cannot happen; the constructor argument then leaves the same object behind.
        scaler = torch.amp.GradScaler("cuda", enabled=not torch.cuda.is_available())
    return scaler, [str(w.message) for w in caught]


def _p28_broken() -> dict:
    scaler, warned = absent_card()
    return _small_gradients(scaler) | {"warning": warned[0] if warned else None}


def resumed_scaler(*, saved: bool) -> dict:
    """Steps that a resumed run skips when its scaler starts over, far above what the gradients allow."""
    model, data = bench.trained(), bench.batches("code")
    optimizer, start = torch.optim.SGD(model.parameters(), lr=0.0), 2.0**24
    skipped = []
    scaler = torch.amp.GradScaler("cpu", init_scale=start)
    for half in range(2):
        count = 0
        for _ in range(12):
            with torch.autocast("cpu", torch.float16):
                loss = bench.mean_loss(model, next(data))
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
    model, data = bench.trained().to(parameters), bench.batches("code")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    facts = {"parameters": str(parameters), "autocast": autocast, "through the scaler": unscale, "raised": None}
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        loss = bench.mean_loss(model, next(data))
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


PITFALLS = [
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
        slow=True,
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
        check="B5",
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
        seen=lambda facts: facts["raised"] is not None or facts["tensors no longer finite"] > 0,
        check="S7",
    ),
]
