"""The loss scaler: fp16 needs one because small gradients become zero in it. Four ways to use it
wrongly.

    scale the loss, backward, unscale the gradients, clip, step unless one overflowed, adjust the
    scale

The order decides what is clipped (P27). A scaler belongs to a device, and switches itself off where
that device is missing (P28). It works on fp32 parameters and refuses fp16 ones (P29). All of it
runs on a CPU: `GradScaler("cpu")`.

Footgun: a disabled scaler has every method of an enabled one, and an empty state. A checkpoint
stores that state and nothing warns.
"""

import warnings
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from lessons.pitfalls import VERSIONS, Pitfall, bench

# ---------------------------------------------------------------- P27


def clip_then_unscale(scaler: GradScaler, optimizer, model: nn.Module, clip: float):
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)  # at fault: still scaled
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return norm


def unscale_then_clip(scaler: GradScaler, optimizer, model: nn.Module, clip: float):
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)  # the real gradients
    scaler.step(optimizer)
    return norm


def clipped_steps(order: str, *, clip: float = 1.0, steps: int = 20) -> dict:
    """fp16 autocast, a scaler, SGD with momentum; `order` is 'clip, unscale' or 'unscale, clip'."""
    step = {"clip, unscale": clip_then_unscale, "unscale, clip": unscale_then_clip}[order]
    model, data = bench.trained(), bench.batches("code")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**16)
    before = bench.held_out_loss(model, "code")
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16):
            loss = bench.mean_loss(model, next(data))
        scaler.scale(loss).backward()
        norm = step(scaler, optimizer, model, clip)
        left = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        scaler.update()
        optimizer.zero_grad()
    after = bench.held_out_loss(model, "code")
    facts = {
        "order": order,
        "clip": clip,
        "norm reported": float(norm),
        "norm the optimizer got": left,
    }
    return facts | {"scale": scaler.get_scale(), "loss before": before, "loss after": after}


# ---------------------------------------------------------------- P28


def scaler_for_cuda(loss: Tensor) -> GradScaler:
    scaler = GradScaler()  # at fault: for "cuda", and without a card it is off
    scaler.scale(loss).backward()  # times 1: small gradients become 0 in fp16
    return scaler


def scaler_for_this_device(loss: Tensor) -> GradScaler:
    scaler = GradScaler(loss.device.type)  # "cpu" here
    scaler.scale(loss).backward()  # times 65536
    return scaler


def _idle_scaler(loss: Tensor) -> GradScaler:
    loss.backward()
    return absent_card()[0]


def _small_gradients(
    backward: Callable[[Tensor], GradScaler], dtype: torch.dtype = torch.float16
) -> dict:
    """Return the gradient of a model through products in low precision, against the one in fp32."""
    model = bench.byte_model()
    ids = bench.stream("code")[: 16 * 64].view(16, 64)
    got = {}
    for precision in ("exact", "low"):
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=precision == "low"):
            loss = model(ids, labels=ids).loss * 1e-3  # one term of a sum, with a small weight
        scaler = backward(loss) if precision == "low" else loss.backward()
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


def _without_card(call: Callable, *args) -> tuple:
    """Return the result as on a machine without CUDA, and torch's warnings."""
    with (
        mock.patch("torch.cuda.is_available", return_value=False),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        result = call(*args)
    return result, [str(w.message) for w in caught]


def absent_card() -> tuple[GradScaler, list[str]]:
    """Return a scaler for CUDA on a machine without it, and torch's warnings."""
    return _without_card(GradScaler)


def _p28_broken() -> dict:
    facts, warned = _without_card(_small_gradients, scaler_for_cuda)
    return facts | {"warning": next((w for w in warned if "GradScaler" in w), None)}


def resumed_scaler(*, saved: bool) -> dict:
    """Return steps that a resumed run skips when its scaler starts again at a scale that is far too
    high.
    """
    model, data = bench.trained(), bench.batches("code")
    optimizer, start = torch.optim.SGD(model.parameters(), lr=0.0), 2.0**24
    skipped = []
    scaler = GradScaler("cpu", init_scale=start)
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
            state, scaler = scaler.state_dict(), GradScaler("cpu", init_scale=start)
            if saved:
                scaler.load_state_dict(state)
    return {
        "scaler in the checkpoint": saved,
        "steps skipped before": skipped[0],
        "steps skipped after": skipped[1],
    }


# ---------------------------------------------------------------- P29


def fp16_weights(model: nn.Module, batch: dict, scaler: GradScaler) -> None:
    model.to(torch.float16)  # at fault: fp16 weights get fp16 gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.autocast("cpu", torch.float16):
        loss = bench.mean_loss(model, batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # ValueError: Attempting to unscale FP16 gradients.
    scaler.step(optimizer)


def fp32_weights(model: nn.Module, batch: dict, scaler: GradScaler) -> None:
    model.to(torch.float32)  # autocast makes the products fp16
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.autocast("cpu", torch.float16):
        loss = bench.mean_loss(model, batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def _other_step(
    parameters: torch.dtype,
    autocast: bool,
    unscale: bool,
    model: nn.Module,
    batch: dict,
    scaler: GradScaler,
) -> None:
    model.to(parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        loss = bench.mean_loss(model, batch)
    (scaler.scale(loss) if unscale else loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer) if unscale else optimizer.step()


def scaled_step(parameters: torch.dtype, *, autocast: bool, unscale: bool = True) -> dict:
    """One step under a scaler; what was raised, or what is no longer finite.

    `unscale=False`: without the scaler.
    """
    shown = (
        {torch.float16: fp16_weights, torch.float32: fp32_weights} if autocast and unscale else {}
    )
    step = shown.get(parameters, partial(_other_step, parameters, autocast, unscale))
    model, batch, scaler = (
        bench.trained(),
        next(bench.batches("code")),
        GradScaler("cpu", init_scale=1024.0),
    )
    facts = {
        "parameters": str(parameters),
        "autocast": autocast,
        "through the scaler": unscale,
        "raised": None,
    }
    try:
        step(model, batch, scaler)
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
        verdict="The clip is not too low: one ten times smaller trains when it comes after "
        "unscaling. In the broken "
        "order it clips the scaled gradients to a norm of 1. Divided by the scale afterwards, "
        "almost nothing is left. "
        f"Seen with {VERSIONS}.",
        fix="scaler.unscale_(optimizer), then clip, then scaler.step(optimizer)",
        broken=lambda: clipped_steps("clip, unscale"),
        claimed=lambda: clipped_steps("unscale, clip", clip=0.1),
        fixed=lambda: clipped_steps("unscale, clip"),
        seen=lambda facts: facts["norm the optimizer got"] < facts["clip"] / 1000,
        check="N7",
        slow=True,
        wrong=clip_then_unscale,
        right=unscale_then_clip,
    ),
    Pitfall(
        id="P28",
        title="A scaler for a device that is missing switches itself off",
        symptom="fp16 gradients are zero or wrong although a GradScaler is in the loop; its "
        "state to save is empty",
        claim="a run without an active scaler cannot be trained in half precision",
        verdict="Without an active scaler, bf16 loses no gradient, and fp16 turns small ones "
        "to zero. bf16 has the "
        "range of fp32, fp16 has not. GradScaler() without an argument means CUDA: without a "
        "card it gives one "
        f"warning and does nothing. Seen with {VERSIONS}.",
        fix="GradScaler(device.type, enabled=...) with fp16, and its state in every checkpoint",
        broken=_p28_broken,
        claimed=lambda: _small_gradients(_idle_scaler, torch.bfloat16),
        fixed=lambda: _small_gradients(scaler_for_this_device),
        seen=lambda facts: facts["relative error"] > 0.1,
        check="B5",
        wrong=scaler_for_cuda,
        right=scaler_for_this_device,
    ),
    Pitfall(
        id="P29",
        title="fp16 parameters under a scaler",
        symptom="ValueError: Attempting to unscale FP16 gradients.",
        claim="a scaler refuses parameters in half precision",
        verdict="It refuses fp16 parameters, and accepts bf16 ones, which are half precision "
        "too. Leaving the scaler "
        "out removes the message, but after one step of AdamW some weights are no longer "
        "finite. Seen with "
        f"{VERSIONS}.",
        fix="keep the parameters in fp32 and let autocast compute the products in fp16",
        broken=lambda: scaled_step(torch.float16, autocast=True),
        claimed=lambda: scaled_step(torch.bfloat16, autocast=False),
        fixed=lambda: scaled_step(torch.float32, autocast=True),
        seen=lambda facts: facts["raised"] is not None or facts["tensors no longer finite"] > 0,
        check="S7",
        wrong=fp16_weights,
        right=fp32_weights,
    ),
]
