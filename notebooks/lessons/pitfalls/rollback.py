"""P39 and P40: a rollback that restores nothing, and hooks that look for a nan in the wrong place.

A rollback that does nothing looks like a hard problem: the loss stays high, so the rate is cut
again. A nan that no hook reports looks like a nan without a cause. Both are checked against what is
known exactly: the weights before the spike, and the parameter whose gradient is nan.

Footgun: a module's backward hook sees the gradients of its *inputs and outputs*, never those of its
parameters.
"""

import copy
import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from lessons.pitfalls import VERSIONS, Pitfall
from lessons.pitfalls.bench import byte_model, byte_rows, fresh_dynamo, quiet


# ------------------------------------------------------------------------------------- P39 rollback
class AsWritten:
    def keep(self, model, optimizer):
        self.weights = model.state_dict()  # at fault: no copy, these tensors train on

    def is_bad(self, loss, average):
        return loss > 3 * average  # at fault: False for a loss of nan

    def go_back(self, model, optimizer, scheduler):
        model.load_state_dict(self.weights)  # at fault: Adam keeps the spike's moments
        optimizer.param_groups[0]["lr"] *= 0.5  # at fault: the scheduler sets it again


class Mended:
    def keep(self, model, optimizer):
        self.state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def is_bad(self, loss, average):
        return not math.isfinite(loss) or loss > 3 * average

    def go_back(self, model, optimizer, scheduler):
        weights, moments = self.state
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        scheduler.base_lrs = [0.5 * rate for rate in scheduler.base_lrs]


class _Partly(Mended):
    """Mended but for what is left out."""

    def __init__(self, clone: bool, moments: bool, rate: str):
        self.clone, self.moments, self.rate = clone, moments, rate

    def keep(self, model, optimizer):
        super().keep(model, optimizer)
        self.state = (self.state[0] if self.clone else model.state_dict(), self.state[1])

    def go_back(self, model, optimizer, scheduler):
        rates = scheduler.base_lrs
        if not self.moments:
            self.state = (self.state[0], optimizer.state_dict())
        super().go_back(model, optimizer, scheduler)
        if self.rate == "group":
            scheduler.base_lrs = rates
            optimizer.param_groups[0]["lr"] *= 0.5


def spike_and_return(*, clone: bool, moments: bool, rate: str) -> dict:
    """Return a rollback with some of its parts.

    `clone`: the snapshot is a copy. `moments`: the optimizer goes back too. `rate`: which number is
    halved, that of the optimizer's group, which the scheduler overwrites, or the scheduler's base.
    """
    return _spiked(_Partly(clone, moments, rate))


def _spiked(rollback: AsWritten | Mended) -> dict:
    """Train, meet a batch with a gradient ten thousand times too large, go back, and train on."""
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
    rollback.keep(model, optimizer)
    curve += [step(scale=1e4), step()]
    rollback.go_back(model, optimizer, scheduler)
    drift = max(float((p - good[name]).abs().max()) for name, p in model.state_dict().items())
    curve += [step() for _ in range(15)]
    return {
        "weights_off_by": drift,
        "loss_before_spike": before,
        "loss_15_steps_later": curve[-1],
        "rate_wanted": 1.5e-3,
        "rate_in_use": optimizer.param_groups[0]["lr"],
        "curve": curve,
        "nan_noticed": rollback.is_bad(math.nan, average=2.0),
    }


def rollback_as_written() -> dict:
    return _spiked(AsWritten())


def rollback_of_weights() -> dict:
    """Only the usual suspect is mended: the snapshot is a copy of the weights, the rest is as it
    was.
    """
    return spike_and_return(clone=True, moments=False, rate="group") | {
        "nan_noticed": AsWritten().is_bad(math.nan, average=2.0)
    }


def rollback_of_everything() -> dict:
    return _spiked(Mended())


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


# ------------------------------------------------------------------------------------ P40 nan hooks
def nan_gradient(*, zero_row: bool = True):
    """Return a model, and a step that makes one gradient nan: the square root has no slope at 0, a
    row of the embedding.
    """
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
    # torch warns that the embedding's input has no gradient, which is why the hook on modules
    # cannot see it
    reported = watch(model, lambda: quiet(step))
    bad = [
        name
        for name, p in model.named_parameters()
        if p.grad is not None and not torch.isfinite(p.grad).all()
    ]
    return {"found": reported, "nan_in": bad}


def hooks_on_modules(model: nn.Module, step) -> list[str]:
    found = []
    for name, module in model.named_modules():

        def look(module, grad_input, grad_output, name=name):
            # at fault: a parameter's gradient is not among these
            if any(g is not None and g.isnan().any() for g in grad_input):
                found.append(name)

        module.register_full_backward_hook(look)
    step()
    return found


def hooks_on_parameters(model: nn.Module, step) -> list[str]:
    found = []
    for name, parameter in model.named_parameters():

        def look(gradient, name=name):
            if gradient.isnan().any():
                found.append(name)

        parameter.register_hook(look)
    step()
    return found


def _overlooked(facts: dict) -> bool:
    return bool(facts["nan_in"]) and not any(
        facts["nan_in"][0] in report for report in facts["found"]
    )


def hook_calls(module: str, *, compiled: bool = False) -> dict:
    """How often a backward hook on a module of the first block is called, and how many gradients it
    is shown.
    """
    model, ids, shown = byte_model(heads=4), byte_rows(2, 32), []

    def hook(module, grad_input, grad_output) -> None:
        shown.append(sum(g is not None for g in grad_input))

    with fresh_dynamo() if compiled else nullcontext():
        call = torch.compile(model, backend="eager") if compiled else model
        if compiled:
            call(ids, labels=ids).loss.backward()
        model.model.layers[0].get_submodule(module).register_full_backward_hook(hook)
        quiet(lambda: call(ids, labels=ids).loss.backward())
    return {
        "module": module,
        "compiled_before": compiled,
        "called": len(shown),
        "gradients_shown": sum(shown),
    }


def blind_spots() -> list[dict]:
    """Return inputs passed by position, inputs passed by name, and a hook that is registered after
    compilation.
    """
    return [
        hook_calls("self_attn.q_proj"),
        hook_calls("self_attn"),
        hook_calls("self_attn.q_proj", compiled=True),
    ]


PITFALLS = [
    Pitfall(
        id="P39",
        title="A rollback that restores nothing",
        symptom="after each rollback the loss is as bad as before it",
        claim="",
        verdict="Four faults at once: the snapshot is not a copy, because state_dict() returns "
        "the tensors that train. "
        "Adam keeps the moments of the spike. The scheduler overwrites the halved rate. And "
        "`nan > 3 * average` is "
        f"False, so a nan passes as a normal loss. Seen with {VERSIONS}.",
        fix="clone the weights and the optimizer, cut the base rate, test finiteness first: "
        "nblib.train does it",
        broken=rollback_as_written,
        fixed=rollback_of_everything,
        seen=lambda facts: bool(rollback_faults(facts)),
        wrong=AsWritten,
        right=Mended,
    ),
    Pitfall(
        id="P40",
        title="Hooks that look for nan and miss it",
        symptom="a parameter turns nan, and the nan hook on every module reported nothing",
        claim="",
        verdict="The hook saw no nan, although the gradient of a parameter was nan. A module's "
        "hook is shown the "
        "gradients of its inputs and outputs, not those of its parameters. The first layer's "
        "input is integer ids and "
        f"has no gradient at all. Seen with {VERSIONS}.",
        fix="hooks on parameters (guards.source_of_nonfinite), or "
        "clip_grad_norm_(error_if_nonfinite=True)",
        broken=lambda: watched(hooks_on_modules),
        fixed=lambda: watched(hooks_on_parameters),
        seen=_overlooked,
        check="B4",
        wrong=hooks_on_modules,
        right=hooks_on_parameters,
    ),
]
