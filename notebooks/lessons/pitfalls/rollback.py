"""P39 and P40: a rollback that restores nothing, and hooks that look for a nan in the wrong place.

A rollback that does nothing looks like a hard problem: the loss stays bad, so the rate is cut again. A nan that no hook
reports looks like one without a cause. Both are checked against what is known exactly: the weights before the spike,
and the parameter whose gradient is nan.

Footgun: a module's backward hook sees the gradients of its *inputs and outputs*, never those of its parameters.
"""

import copy
import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from lessons.pitfalls import Pitfall
from lessons.pitfalls.bench import byte_model, byte_rows, fresh_dynamo, quiet
from nblib import guards


# --------------------------------------------------------------------------------------------------- P39 rollback
def spike_and_return(*, clone: bool, moments: bool, rate: str) -> dict:
    """Train, meet a batch with a gradient ten thousand times too large, go back, and train on.

    `clone`: the snapshot is a copy. `moments`: the optimizer goes back too. `rate`: which number is halved.
    """
    ids = byte_rows(8, 48)
    model = byte_model(heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def step(scale: float = 1.0) -> float:
        loss = model(ids, labels=ids).loss
        (loss * scale).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return float(loss.detach())

    curve = [step() for _ in range(15)]
    before = curve[-1]
    good = copy.deepcopy(model.state_dict())
    snapshot = good if clone else model.state_dict()
    moments_before = copy.deepcopy(optimizer.state_dict())
    curve += [step(scale=1e4), step()]
    model.load_state_dict(snapshot)
    if moments:
        optimizer.load_state_dict(moments_before)
    if rate == "group":
        optimizer.param_groups[0]["lr"] *= 0.5
    else:
        scheduler.base_lrs = [0.5 * r for r in scheduler.base_lrs]
    drift = max(float((p - good[name]).abs().max()) for name, p in model.state_dict().items())
    curve += [step() for _ in range(15)]
    return {
        "weights_off_by": drift,
        "loss_before_spike": before,
        "loss_15_steps_later": curve[-1],
        "rate_wanted": 1.5e-3,
        "rate_in_use": optimizer.param_groups[0]["lr"],
        "curve": curve,
    }


def rollback_as_written() -> dict:
    return spike_and_return(clone=False, moments=False, rate="group") | {"nan_noticed": math.nan > 3 * 2.0}


def rollback_of_weights() -> dict:
    """Only what is usually suspected: the snapshot aliased the weights. Cloned, with the rest as it was."""
    return spike_and_return(clone=True, moments=False, rate="group") | {"nan_noticed": math.nan > 3 * 2.0}


def rollback_of_everything() -> dict:
    return spike_and_return(clone=True, moments=True, rate="base") | {"nan_noticed": not guards.is_finite(math.nan)}


def rollback_faults(facts: dict) -> list[str]:
    return [
        name
        for name, shows in {
            "weights not restored": facts["weights_off_by"] > 0,
            "moments still poisoned": facts["loss_15_steps_later"] > facts["loss_before_spike"],
            "rate cut undone": facts["rate_in_use"] > facts["rate_wanted"] * 1.01,
            "nan passes the threshold": not facts["nan_noticed"],
        }.items()
        if shows
    ]


# -------------------------------------------------------------------------------------------------- P40 nan hooks
def nan_gradient(*, zero_row: bool = True):
    """A model, and a step that makes one nan gradient: the root of a zero row of the embedding has no slope."""
    model = byte_model(heads=4, tie_word_embeddings=False)
    ids = byte_rows(2, 32)
    if zero_row:
        with torch.no_grad():
            model.model.embed_tokens.weight[ids[0, 0]] = 0.0

    def step() -> Tensor:
        rows = model.model.embed_tokens(ids)
        penalty = rows.pow(2).sum(-1).sqrt().mean()  # 0 forward, 0 * inf backward
        loss = model(inputs_embeds=rows, labels=ids).loss + 1e-3 * penalty
        loss.backward()
        return loss.detach()

    return model, step


def watched(watch) -> dict:
    model, step = nan_gradient()
    reported = watch(model, step)
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
    return {"found": reported, "nan_in": bad}


def grad_input_hooks(model: nn.Module, step) -> list[str]:
    """The hook that circulates: look at the gradient that leaves each module."""
    reported = []

    def hook(name):
        def look(module, grad_input, grad_output):
            if any(g is not None and not torch.isfinite(g).all() for g in grad_input):
                reported.append(name)

        return look

    handles = [m.register_full_backward_hook(hook(n)) for n, m in model.named_modules() if not list(m.children())]
    try:
        quiet(step)  # the embedding's input has no gradient, and that is warned: the hole itself
    finally:
        for handle in handles:
            handle.remove()
    return reported


def parameter_hooks(model: nn.Module, step) -> list[str]:
    return [guards.source_of_nonfinite(model, step)]


def _overlooked(facts: dict) -> bool:
    return bool(facts["nan_in"]) and not any(facts["nan_in"][0] in report for report in facts["found"])


def hook_calls(module: str, *, compiled: bool = False) -> dict:
    """How often a backward hook on a module of the first block is called, and how many gradients it is shown."""
    model, ids, shown = byte_model(heads=4), byte_rows(2, 32), []

    def hook(module, grad_input, grad_output) -> None:
        shown.append(sum(g is not None for g in grad_input))

    with fresh_dynamo() if compiled else nullcontext():
        call = torch.compile(model, backend="eager") if compiled else model
        if compiled:
            call(ids, labels=ids).loss.backward()
        model.model.layers[0].get_submodule(module).register_full_backward_hook(hook)
        quiet(lambda: call(ids, labels=ids).loss.backward())
    return {"module": module, "compiled_before": compiled, "called": len(shown), "gradients_shown": sum(shown)}


def blind_spots() -> list[dict]:
    """Inputs passed by position, inputs passed by name, and a hook that comes after compilation."""
    return [hook_calls("self_attn.q_proj"), hook_calls("self_attn"), hook_calls("self_attn.q_proj", compiled=True)]


PITFALLS = [
    Pitfall(
        id="P39",
        title="A rollback that restores nothing",
        symptom="after each rollback the loss is as bad as before it",
        claim="",
        verdict="four faults at once: state_dict() is the live weights, Adam keeps the moments of the spike, the "
        "scheduler overwrites the halved rate, and `nan > 3 * average` is False (torch 2.13).",
        fix="clone the weights and the optimizer, cut the base rate, test finiteness first: nblib.train does it",
        broken=rollback_as_written,
        fixed=rollback_of_everything,
        seen=lambda facts: bool(rollback_faults(facts)),
    ),
    Pitfall(
        id="P40",
        title="Hooks that look for nan and overlook it",
        symptom="a parameter turns nan, and the nan hook on every module reported nothing",
        claim="",
        verdict="a module hook that checks grad_input cannot see the first layer, whose input has no gradient, nor a "
        "parameter that nothing lies below (torch 2.13).",
        fix="hooks on parameters (guards.source_of_nonfinite), or clip_grad_norm_(error_if_nonfinite=True)",
        broken=lambda: watched(grad_input_hooks),
        fixed=lambda: watched(parameter_hooks),
        seen=_overlooked,
        check="B4",
    ),
]
