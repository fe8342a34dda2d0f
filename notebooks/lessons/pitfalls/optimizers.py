"""Rates and updates: a learning rate means nothing without the optimizer's convention, its partner and its clock.

The convention: torch's Muon offers two, and the same number moves a matrix by very different amounts in them (P30).
The partner: Muon takes hidden matrices only, so half of the training happens in an AdamW beside it, at a rate of its
own, and who belongs where is decided by modules, not by `ndim` (P31). The clock: a schedule counts optimizer steps,
starts above zero and stays down at the end (P34). And an update needs no gradient to move a weight (P35).

Footgun: every one of these lowers the loss. A run with a wrong rate is not broken, it is slow, and slow looks like a
hard problem until the same steps are run with the right one.
"""

import warnings
from collections.abc import Callable
from functools import cache

import torch
import transformers as tf
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from lessons.pitfalls import VERSIONS, Pitfall, bench
from nblib import train
from nblib.methods import param_groups

STEPS = 60

# ---------------------------------------------------------------- P30


def from_scratch(make: Callable[[nn.Module], list[Optimizer]], *, family: str = "qwen3", steps: int = STEPS) -> float:
    """Held-out loss of a new model after a few steps with these optimizers."""
    model = bench.byte_model(family=family)
    bench.learn(model, steps=steps, optimizers=make(model), schedule=train.cosine(steps, warmup=5), clip=0)
    return bench.held_out_loss(model)


@cache
def adamw_loss(lr: float = 3e-3) -> float:
    return from_scratch(lambda model: [train.adamw(model, lr=lr, weight_decay=0.0)])


@cache
def start_loss() -> float:
    return bench.held_out_loss(bench.byte_model())


def muon_run(lr: float, aux: float, *, adjust: str = "original") -> dict:
    """Muon on the hidden matrices at `lr`, AdamW on embeddings, head and norms at `aux`."""
    loss = from_scratch(lambda m: param_groups.optimizers(m, lr=lr, adamw_lr=aux, weight_decay=0.0, adjust=adjust))
    gain = (start_loss() - loss) / (start_loss() - adamw_loss())
    return {"convention": adjust, "Muon rate": lr, "AdamW rate": aux, "loss after": loss, "share of AdamW's gain": gain}


def step_size(rows: int, columns: int, *, adjust: str, lr: float = 1.0) -> float:
    """Root mean square of one Muon update of a matrix with a random gradient."""
    p = nn.Parameter(torch.zeros(rows, columns))
    p.grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    Muon([p], lr=lr, weight_decay=0.0, adjust_lr_fn=adjust).step()
    return float(p.detach().square().mean().sqrt())


# ---------------------------------------------------------------- P31


def by_shape(model: nn.Module, lr: float, aux: float, adjust: str) -> list[Optimizer]:
    """The split of torch's own example: whatever has two dimensions goes to Muon."""
    flat = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [
        Muon(flat, lr=lr, weight_decay=0.0, adjust_lr_fn=adjust),
        AdamW(rest, lr=aux, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def wrongly_taken(family: str, *, tied: bool = True) -> list[str]:
    """What `ndim == 2` hands to Muon and should not."""
    model = bench.byte_model(family=family, tie_word_embeddings=tied)
    where = param_groups.assign(model)
    return [name for name, p in model.named_parameters() if p.ndim == 2 and where[name].optimizer != "Muon"]


def stacked_experts() -> str:
    """Muon's answer to the stacked experts of a mixture model."""
    experts = [p for p in bench.byte_model(family="qwen3_moe").parameters() if p.ndim == 3]
    try:
        Muon(experts)
    except ValueError as error:
        return f"ValueError: {error}"
    return "accepted"


def split_run(split: str, lr: float = 3e-3, *, adjust: str = "match_rms_adamw") -> dict:
    """A new dense model with its parameters dealt out to Muon and AdamW 'ndim == 2' or 'by module'."""
    make = {
        "ndim == 2": lambda m: by_shape(m, lr, 3e-3, adjust),
        "by module": lambda m: param_groups.optimizers(m, lr=lr, adamw_lr=3e-3, weight_decay=0.0, adjust=adjust),
    }[split]
    loss = from_scratch(make)
    gain = (start_loss() - loss) / (start_loss() - adamw_loss())
    wrong = wrongly_taken("qwen3") if split == "ndim == 2" else []
    return {
        "split": split,
        "wrongly in Muon": wrong,
        "Muon rate": lr,
        "loss after": loss,
        "share of AdamW's gain": gain,
    }


def _little_gained(facts: dict) -> bool:
    return facts["share of AdamW's gain"] < 0.5


# ---------------------------------------------------------------- P34


def scheduled(schedule: str, *, per_micro_batch: bool = False, steps: int = 24, accumulate: int = 4) -> dict:
    """Steps of four micro-batches; `schedule` is the cosine of 'transformers' or of 'nblib'."""
    model, data = bench.trained(), bench.batches("code", rows=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    if schedule == "transformers":
        clock = tf.get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=steps)
    else:
        clock = torch.optim.lr_scheduler.LambdaLR(optimizer, train.cosine(steps, warmup=4))
    rates, first = [], model.model.norm.weight.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps + steps // 2):  # half as long again as was planned
            for _ in range(accumulate):
                (bench.mean_loss(model, next(data)) / accumulate).backward()
                if per_micro_batch:
                    clock.step()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                moved = not torch.equal(first, model.model.norm.weight)
            if not per_micro_batch:
                clock.step()
            if step + 1 == steps:
                loss = bench.held_out_loss(model, "code")
    top = rates.index(max(rates[:steps]))
    return {
        "schedule": schedule,
        "stepped per": "micro-batch" if per_micro_batch else "optimizer step",
        "first step moves": moved,
        "steps until the rate is zero": next((i for i, r in enumerate(rates) if i > top and r < 1e-9), None),
        "steps planned": steps,
        "rate climbs again": any(b > a + 1e-12 for a, b in zip(rates[top:], rates[top + 1 :])),
        "loss after": loss,
        "warned": any("lr_scheduler.step()" in str(w.message) for w in caught),
        "rates": [round(r, 9) for r in rates],
    }


def _p34_seen(facts: dict) -> bool:
    zero = facts["steps until the rate is zero"]
    early = zero is not None and zero < facts["steps planned"]
    return not facts["first step moves"] or facts["rate climbs again"] or early


# ---------------------------------------------------------------- P35


def unused_weight(*, set_to_none: bool, decay: float = 0.0) -> dict:
    """A weight that takes part in the first two steps and in none of the next five."""
    with bench.seeded():
        model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
        x = torch.randn(4, 8)
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=decay)
    for step in range(7):
        value = model[0](x).square().mean()
        if step < 2:
            value = value + model[1](x).square().mean()
        optimizer.zero_grad(set_to_none=set_to_none)
        value.backward()
        if step == 2:
            before = model[1].weight.detach().clone()
        optimizer.step()
    drift = float((model[1].weight.detach() - before).abs().max())
    return {"set_to_none": set_to_none, "weight decay": decay, "moved while unused": drift}


def optimizer_times(device: torch.device | str = "cpu", rounds: int = 15) -> list[dict]:
    """One AdamW step in its three implementations, as a ratio to the plain loop over tensors."""
    kinds = {"plain": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}

    def step_of(kind: dict) -> Callable[[], None]:
        model = bench.byte_model(hidden=256, layers=4).to(device)
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        optimizer = AdamW(model.parameters(), lr=1e-3, **kind)

        def step() -> None:
            optimizer.step()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize()

        return step

    medians = bench.medians({name: step_of(kind) for name, kind in kinds.items()}, rounds)
    return [
        {"AdamW": name, "ms per step": 1000 * t, "times plain": t / medians["plain"]} for name, t in medians.items()
    ]


PITFALLS = [
    Pitfall(
        id="P30",
        title="Muon's rate is a convention, and half of the training happens in the AdamW beside it",
        symptom="with Muon the loss hardly falls, though its gradients are fine and nothing is clipped",
        claim="Muon's rate of 3e-4 is too small to train anything (write-up)",
        verdict="Alone that rate does little harm here: with a proper AdamW rate for embeddings, head and norms most "
        "of the gain is there, as it is with the matrices frozen. The stall was the AdamW rate, cut along with "
        f"Muon's. For a gain from Muon itself its convention matters: about 0.02 'original'. {VERSIONS}",
        fix="choose both rates: 0.02 with 'original', or AdamW's with 'match_rms_adamw'; AdamW's own for the rest",
        broken=lambda: muon_run(3e-4, 9e-5),
        claimed=lambda: muon_run(3e-4, 3e-3),
        fixed=lambda: muon_run(0.02, 3e-3),
        seen=_little_gained,
        check="N5b",
        slow=True,
    ),
    Pitfall(
        id="P31",
        title="Two dimensions do not make a hidden matrix",
        symptom="Muon is slower than AdamW with the split of torch's own example",
        claim="the rate is too small for Muon",
        verdict="ndim == 2 also picks embeddings, an untied head and routers, and leaves out experts stacked in three "
        "dimensions, which Muon refuses. Split by module, a rate ten times smaller does well; split by shape, "
        "the rate of AdamW does not. At a much larger one (0.02 'original') the wrong split trains too, if less well, "
        f"which is why it passes unnoticed. {VERSIONS}",
        fix="nblib.methods.param_groups.assign: by the module that owns it, inside the blocks, no router",
        broken=lambda: split_run("ndim == 2"),
        claimed=lambda: split_run("by module", lr=3e-4),
        fixed=lambda: split_run("by module"),
        seen=_little_gained,
        check="S13",
        slow=True,
    ),
    Pitfall(
        id="P34",
        title="A schedule that starts at zero, runs on micro-batches, and climbs after the end",
        symptom="the first step changes nothing, the rate is zero long before the end, then it rises again",
        claim="accumulation makes the batch larger, so the rate is too small for it",
        verdict="The schedule counted micro-batches, and a plain cosine is periodic: past its end it comes back. "
        "Accumulation with a schedule that counts optimizer steps is fine. The only warning, about the order of the "
        f"calls, points elsewhere. {VERSIONS}",
        fix="one schedule step per optimizer step; (step + 1) / warmup; clamp the progress at 1 (train.cosine)",
        broken=lambda: scheduled("transformers", per_micro_batch=True),
        claimed=lambda: scheduled("nblib", accumulate=8),
        fixed=lambda: scheduled("nblib"),
        seen=_p34_seen,
        check="N9",
        slow=True,
    ),
    Pitfall(
        id="P35",
        title="A zero gradient is not the same as none",
        symptom="weights of an unused branch or expert go on moving",
        claim="it is the weight decay",
        verdict="With set_to_none=False the optimizer sees a gradient of zero and goes on with its momentum. With "
        f"None it skips the weight, decay included. {VERSIONS}",
        fix="leave zero_grad() at its default",
        broken=lambda: unused_weight(set_to_none=False),
        claimed=lambda: unused_weight(set_to_none=True, decay=0.1),
        fixed=lambda: unused_weight(set_to_none=True),
        seen=lambda facts: facts["moved while unused"] > 0,
    ),
]
