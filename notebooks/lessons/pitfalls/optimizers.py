"""Optimizers and schedules: a learning rate depends on the optimizer's convention, on its partner,
and on its clock.

The convention: torch's Muon offers two, and the same rate moves a matrix by very different amounts
in them (P30). The partner: Muon takes hidden matrices only, and an AdamW beside it trains the rest
at a rate of its own. The module that owns a parameter decides where it belongs, not its `ndim`
(P31). The clock: a schedule counts optimizer steps, starts above zero and stays at zero after the
end (P34). And a weight can move without a gradient (P35).

Footgun: every one of these lowers the loss. A run with a wrong rate looks slow, not broken, and a
slow run looks like a hard problem until the same steps are made with the right rate.
"""

import warnings
from collections.abc import Callable
from functools import cache

import torch
import transformers as tf
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lessons.pitfalls import VERSIONS, Pitfall, bench
from nblib import train
from nblib.methods.muon import groups

STEPS = 40

# ---------------------------------------------------------------- P30


def from_scratch(
    make: Callable[[nn.Module], list[Optimizer]], *, family: str = "qwen3", steps: int = STEPS
) -> float:
    """Held-out loss of a new model after a few steps with these optimizers."""
    model = bench.byte_model(family=family)
    bench.learn(
        model, steps=steps, optimizers=make(model), schedule=train.cosine(steps, warmup=5), clip=0
    )
    return bench.held_out_loss(model)


@cache
def adamw_loss(lr: float = 3e-3) -> float:
    return from_scratch(lambda model: [train.adamw(model, lr=lr, weight_decay=0.0)])


@cache
def start_loss() -> float:
    return bench.held_out_loss(bench.byte_model())


def both_rates_cut(model: nn.Module) -> list[Optimizer]:
    return groups.optimizers(
        model,
        lr=3e-4,  # of Muon, for the hidden matrices
        adamw_lr=9e-5,  # at fault: embeddings, head and norms hardly learn
        adjust="original",
    )


def each_its_own_rate(model: nn.Module) -> list[Optimizer]:
    return groups.optimizers(
        model,
        lr=0.02,  # usual for Muon in this convention
        adamw_lr=3e-3,  # usual for AdamW alone
        adjust="original",
    )


def muon_run(lr: float, aux: float, *, adjust: str = "original") -> dict:
    """Muon on the hidden matrices at `lr`, AdamW on embeddings, head and norms at `aux`."""
    return _with_rates(lambda model: groups.optimizers(model, lr=lr, adamw_lr=aux, adjust=adjust))


def _with_rates(make: Callable[[nn.Module], list[Optimizer]]) -> dict:
    matrices, rest = (optimizer.defaults for optimizer in make(bench.byte_model()))
    loss = from_scratch(make)
    return {
        "convention": matrices["adjust"],
        "Muon rate": matrices["lr"],
        "AdamW rate": rest["lr"],
        "loss after": loss,
        "share of AdamW's gain": _share(loss),
    }


def _share(loss: float) -> float:
    """Return what a run gained, as a share of what AdamW alone gains."""
    return (start_loss() - loss) / (start_loss() - adamw_loss())


def step_size(rows: int, columns: int, *, adjust: str, lr: float = 1.0) -> float:
    """Root mean square of one Muon update of a matrix with a random gradient."""
    p = nn.Parameter(torch.zeros(rows, columns))
    p.grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    Muon([p], lr=lr, weight_decay=0.0, adjust_lr_fn=adjust).step()
    return float(p.detach().square().mean().sqrt())


# ---------------------------------------------------------------- P31


def by_shape(model: nn.Module, lr: float, aux: float, adjust: str) -> list[Optimizer]:
    """Return the split of torch's own example."""
    params = list(model.parameters())
    hidden = [p for p in params if p.ndim == 2]  # at fault: also the embedding
    rest = [p for p in params if p.ndim != 2]
    return [
        Muon(hidden, lr=lr, weight_decay=0.0, adjust_lr_fn=adjust),
        AdamW(rest, lr=aux, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def by_module(model: nn.Module, lr: float, aux: float, adjust: str) -> list[Optimizer]:
    """Return the split by the module that owns each parameter."""
    where = groups.assign(model)  # looks at the module that owns it
    named = dict(model.named_parameters())
    hidden = [p for name, p in named.items() if where[name].optimizer == "Muon"]
    rest = [p for name, p in named.items() if where[name].optimizer == "AdamW"]
    return [
        Muon(hidden, lr=lr, weight_decay=0.0, adjust_lr_fn=adjust),
        AdamW(rest, lr=aux, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def wrongly_taken(family: str, *, tied: bool = True) -> list[str]:
    """Return what `ndim == 2` gives to Muon although it belongs in AdamW."""
    model = bench.byte_model(family=family, tie_word_embeddings=tied)
    where = groups.assign(model)
    return [
        name
        for name, p in model.named_parameters()
        if p.ndim == 2 and where[name].optimizer != "Muon"
    ]


def stacked_experts() -> str:
    """Return what torch's Muon says to the stacked experts of a mixture model."""
    experts = [p for p in bench.byte_model(family="qwen3_moe").parameters() if p.ndim == 3]
    try:
        Muon(experts)
    except ValueError as error:
        return f"ValueError: {error}"
    return "accepted"


def split_run(split: str, lr: float = 3e-3, *, adjust: str = "match_rms_adamw") -> dict:
    """Return a new dense model with its parameters divided between Muon and AdamW by 'ndim == 2' or
    'by module'.
    """
    deal = {"ndim == 2": by_shape, "by module": by_module}[split]
    loss = from_scratch(lambda model: deal(model, lr, 3e-3, adjust))
    return {
        "split": split,
        "wrongly in Muon": wrongly_taken("qwen3") if split == "ndim == 2" else [],
        "Muon rate": lr,
        "loss after": loss,
        "share of AdamW's gain": _share(loss),
    }


def _little_gained(facts: dict) -> bool:
    return facts["share of AdamW's gain"] < 0.5


# ---------------------------------------------------------------- P34


plain_cosine = tf.get_cosine_schedule_with_warmup  # starts at zero, and rises again after the plan


def clamped_cosine(optimizer: Optimizer, warmup: int, plan: int) -> LambdaLR:
    """Return the cosine of nblib: it starts above zero, and stays at zero after the plan."""
    return LambdaLR(optimizer, train.cosine(plan, warmup=warmup))


def clock_per_micro_batch(optimizer, backward, accumulate, plan, schedule=plain_cosine):
    clock = schedule(optimizer, 4, plan)  # transformers': rises again at the end
    for _ in range(plan + plan // 2):  # half as long again as planned
        for _ in range(accumulate):
            backward()
            clock.step()  # at fault: the plan counts optimizer steps
        optimizer.step()
        optimizer.zero_grad()


def clock_per_step(optimizer, backward, accumulate, plan, schedule=clamped_cosine):
    clock = schedule(optimizer, 4, plan)  # nblib's: stays at zero at the end
    for _ in range(plan + plan // 2):  # half as long again as planned
        for _ in range(accumulate):
            backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step()  # once per optimizer step


def scheduled(
    schedule: str, *, per_micro_batch: bool = False, steps: int = 24, accumulate: int = 4
) -> dict:
    """Return steps of four micro-batches; `schedule` is the cosine of 'transformers' or of
    'nblib'.
    """
    model, data = bench.trained(), bench.batches("code", rows=2)
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    first, rates, facts = model.model.norm.weight.detach().clone(), [], {}

    def before(optimizer: Optimizer, *_) -> None:
        rates.append(optimizer.param_groups[0]["lr"])

    def after(*_) -> None:
        if len(rates) == 1:
            facts["moved"] = not torch.equal(first, model.model.norm.weight)
        if len(rates) == steps:
            facts["loss"] = bench.held_out_loss(model, "code")

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    cosine = {"transformers": plain_cosine, "nblib": clamped_cosine}[schedule]
    run = clock_per_micro_batch if per_micro_batch else clock_per_step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(
            optimizer,
            lambda: (bench.mean_loss(model, next(data)) / accumulate).backward(),
            accumulate,
            steps,
            cosine,
        )
    top = rates.index(max(rates[:steps]))
    return {
        "schedule": schedule,
        "stepped per": "micro-batch" if per_micro_batch else "optimizer step",
        "first step moves": facts["moved"],
        "steps until the rate is zero": next(
            (i for i, r in enumerate(rates) if i > top and r < 1e-9), None
        ),
        "steps planned": steps,
        "rate climbs again": any(b > a + 1e-12 for a, b in zip(rates[top:], rates[top + 1 :])),
        "loss after": facts["loss"],
        "warned": any("lr_scheduler.step()" in str(w.message) for w in caught),
        "rates": [round(r, 9) for r in rates],
    }


def _p34_seen(facts: dict) -> bool:
    zero = facts["steps until the rate is zero"]
    early = zero is not None and zero < facts["steps planned"]
    return not facts["first step moves"] or facts["rate climbs again"] or early


# ---------------------------------------------------------------- P35


def gradients_set_to_zero(optimizer: Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)  # at fault: momentum goes on
    loss.backward()
    optimizer.step()


def gradients_removed(optimizer: Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()  # no gradient: an unused weight is skipped
    loss.backward()
    optimizer.step()


def unused_weight(*, set_to_none: bool, decay: float = 0.0) -> dict:
    """Return a weight that takes part in the first two steps and in none of the next five."""
    take_step = gradients_removed if set_to_none else gradients_set_to_zero
    with bench.seeded():
        model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
        x = torch.randn(4, 8)
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=decay)
    for step in range(7):
        loss = model[0](x).square().mean()
        if step < 2:
            loss = loss + model[1](x).square().mean()
        if step == 2:
            before = model[1].weight.detach().clone()
        take_step(optimizer, loss)
    drift = float((model[1].weight.detach() - before).abs().max())
    return {"set_to_none": set_to_none, "weight decay": decay, "moved while unused": drift}


def optimizer_times(device: torch.device | str = "cpu", rounds: int = 15) -> list[dict]:
    """Time of one AdamW step in its three implementations, also relative to the plain loop over
    tensors.
    """
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
        {"AdamW": name, "ms per step": 1000 * t, "times plain": t / medians["plain"]}
        for name, t in medians.items()
    ]


PITFALLS = [
    Pitfall(
        id="P30",
        title="Muon's rate is a convention, and the AdamW beside it needs a rate of its own",
        symptom="with Muon the loss hardly falls, though its gradients are fine and nothing is "
        "clipped",
        claim="Muon's rate of 3e-4 is too small to train anything (write-up)",
        verdict="Muon's rate is not what stops the run: at 3e-4, with a usual AdamW rate "
        "beside it, most of the gain "
        "is there. What stops it is the AdamW rate, which was cut along with Muon's: "
        "embeddings, head and norms "
        "hardly learn. To gain from Muon itself, its rate has to fit its convention, about "
        "0.02 with 'original'. Seen "
        f"with {VERSIONS}.",
        fix="choose both rates: 0.02 with 'original', or AdamW's with 'match_rms_adamw'; "
        "AdamW's own for the rest",
        broken=lambda: _with_rates(both_rates_cut),
        claimed=lambda: muon_run(3e-4, 3e-3),
        fixed=lambda: _with_rates(each_its_own_rate),
        seen=_little_gained,
        check="N5b",
        slow=True,
        wrong=both_rates_cut,
        right=each_its_own_rate,
    ),
    Pitfall(
        id="P31",
        title="Not every matrix is a hidden matrix",
        symptom="Muon is slower than AdamW with the split of torch's own example",
        claim="the rate is too small for Muon",
        verdict="The rate is not too small: with the split by module, one ten times smaller "
        "does well. The split by "
        "ndim == 2 is at fault: it also gives Muon the embedding, an untied head and routers. "
        "It leaves out experts "
        "stacked in three dimensions, which torch's Muon refuses. At a much larger rate (0.02 "
        "'original') the wrong "
        f"split trains too, but less well, so the fault is easy to miss. Seen with {VERSIONS}.",
        fix="nblib.methods.muon.groups.assign: it asks the module that owns each parameter",
        broken=lambda: split_run("ndim == 2"),
        claimed=lambda: split_run("by module", lr=3e-4),
        fixed=lambda: split_run("by module"),
        seen=_little_gained,
        check="S13",
        slow=True,
        wrong=by_shape,
        right=by_module,
    ),
    Pitfall(
        id="P34",
        title="A schedule that counts micro-batches, and rises again after the end",
        symptom="the rate is zero long before the end of training, and rises again afterwards",
        claim="accumulation makes the batch larger, so the rate is too small for it",
        verdict="Accumulation is not the cause: with a schedule that counts optimizer steps, "
        "twice as much of it is "
        "fine. The broken schedule counted micro-batches, so it ended too early. A plain "
        "cosine is periodic, so it "
        "came back after its end. The loss hardly shows the fault, and the only warning, about "
        "the order of calls, "
        f"points elsewhere. Seen with {VERSIONS}.",
        fix="one schedule step per optimizer step; (step + 1) / warmup; clamp the progress at "
        "1 (train.cosine)",
        broken=lambda: scheduled("transformers", per_micro_batch=True),
        claimed=lambda: scheduled("nblib", accumulate=8),
        fixed=lambda: scheduled("nblib"),
        seen=_p34_seen,
        check="N9",
        slow=True,
        wrong=clock_per_micro_batch,
        right=clock_per_step,
    ),
    Pitfall(
        id="P35",
        title="A gradient of zero is not the same as no gradient",
        symptom="the weights of an unused branch or expert keep moving",
        claim="it is the weight decay",
        verdict="Weight decay is not the cause: without a gradient, AdamW skips the weight, "
        "decay included. With "
        "set_to_none=False the weight has a gradient of zero, and AdamW goes on moving it by "
        "its momentum. Seen with "
        f"{VERSIONS}.",
        fix="leave zero_grad() at its default",
        broken=lambda: unused_weight(set_to_none=False),
        claimed=lambda: unused_weight(set_to_none=True, decay=0.1),
        fixed=lambda: unused_weight(set_to_none=True),
        seen=lambda facts: facts["moved while unused"] > 0,
        wrong=gradients_set_to_zero,
        right=gradients_removed,
    ),
]
