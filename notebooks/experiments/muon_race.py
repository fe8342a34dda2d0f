"""Small mixtures trained side by side: Muon against AdamW, and the four suspects of a training that
stood still.

A run is a `Setting` and a seed: new model, new optimizers, the same rows in the same order, a
schedule that ends where the run ends. So a race in fewer steps is a run of its own. A longer run
that is read early is not the same: its rate has not come down yet.

Both racers have one `Setting` but for the optimizer and its rates; `over_seeds` refuses others.
What a step costs is counted, not assumed: tokens, parameters and FLOPs stand beside the loss. A
winner is named by the rule of `lessons.seeds`, so never at one seed.

The suspects come from a write-up that changed four things together: bf16 weights, a small rate, a
missing balance loss and a fault in the layers that skip tokens. `trial` runs each alone, all
together, and all but one. A fault that stops training on its own is sufficient; a fault whose
removal restarts training is necessary.

Footgun: with a fixed number of steps the rate decides most. Tune both rates of each side before you
name a winner. AdamW with one rate for all is a weak opponent: embeddings need a higher rate than
matrices do.
"""

import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lessons import seeds
from lessons.progress import Counting, each
from nblib import compiling, losses, models, runtime, text, train, wiring
from nblib import mfu as flops
from nblib.methods import moe, muon
from nblib.methods.moe import depths, jamba, router_health
from nblib.methods.muon import groups as param_groups
from nblib.methods.muon import variants

FAMILIES = ("qwen3_moe", "mixtral", "jamba")
# or adamw
KINDS = {"muon": muon.Muon, "polar_express": variants.PolarExpress, "normuon": variants.NorMuon}
SHAPE = dict(family="qwen3_moe", hidden=128, layers=2, heads=4, width=128, experts=8, top_k=2)


class Data(NamedTuple):
    """A corpus as tokens, rows that nobody trains on, and the size of the vocabulary."""

    stream: Tensor
    held_out: Tensor  # (R, T)
    vocabulary: int


class Setting(NamedTuple):
    """What a run is made of.

    `weights` is what the parameters can hold, not autocast. With "bf16" they are rounded after
    every step and the products stay as they are: a CPU without bf16 would emulate those.

    The defaults, and ADAMW, are the best of those tried on prose with SHAPE; tune anew for another
    shape or length.
    """

    optimizer: str = "muon"
    lr: float = 0.02
    adamw_lr: float = 2e-2
    adjust: str = "original"
    halves: bool = False
    balance_weight: float = 0.1
    z_weight: float = 0.001
    weights: str = "fp32"
    capacity: float = 1.0  # below 1, layers skip tokens
    every: int = 2  # every second layer, or every layer (1)
    skipped: str = "identity"
    accumulate: int = 1  # micro-batches per step
    checkpointing: bool = False
    compiled: bool = False


OWN = ("optimizer", "lr", "adamw_lr", "adjust", "halves")  # what two racers may differ in
MUON, ADAMW = Setting(), Setting(optimizer="adamw", lr=1e-3)
SKIPPING = Setting(capacity=0.75, every=1)


class Outcome(NamedTuple):
    loss: float  # language loss on held-out rows
    curve: list[float]  # language loss per step, in training
    health: list[router_health.Health]
    seconds: float
    tokens: int  # trained on, by all steps
    parameters: int
    flops: int  # of all steps by count, the optimizers' products included; recomputing is not


def backbone(
    vocabulary: int,
    *,
    family: str,
    hidden: int,
    layers: int,
    heads: int,
    width: int,
    experts: int,
    top_k: int,
    length: int = 1024,
    seed: int = 0,
) -> nn.Module:
    """Return a new mixture of one of three families by one set of names; `width` is the inner width
    of one expert.
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k = {top_k}: must be at least 1 and at most experts = {experts}")
    named = {
        "qwen3_moe": dict(
            moe_intermediate_size=width, num_experts=experts, num_experts_per_tok=top_k
        ),
        "mixtral": dict(
            intermediate_size=width, num_local_experts=experts, num_experts_per_tok=top_k
        ),
        "jamba": dict(
            intermediate_size=width,
            experts=experts,
            top_k=top_k,
            attention_every=max(2, min(4, layers)),
        ),
    }
    if family not in named:
        raise ValueError(f"family = {family!r}: allowed are {', '.join(FAMILIES)}")
    shape = (
        dict(hidden=hidden, layers=layers, heads=heads, length=length, seed=seed) | named[family]
    )
    return (
        jamba.jamba(vocabulary, **shape)
        if family == "jamba"
        else models.tiny(vocabulary, family=family, **shape)
    )


def build(setting: Setting, vocabulary: int, *, seed: int = 0, **shape) -> nn.Module:
    if setting.weights not in ("fp32", "bf16"):
        raise ValueError(f"weights = {setting.weights!r}: allowed are fp32, bf16")
    model = backbone(vocabulary, seed=seed, **(SHAPE | shape))
    if setting.capacity < 1:
        with runtime.seeded(seed):
            layers = list(range(setting.every - 1, model.config.num_hidden_layers, setting.every))
            depths.attach(model, capacity=setting.capacity, layers=layers, skipped=setting.skipped)
    if setting.weights == "bf16":
        _round(model.parameters())
    return model


@torch.no_grad()
def _round(params: Iterable[Tensor]) -> None:
    for p in params:
        p.copy_(p.bfloat16())


def optimizers(setting: Setting, model: nn.Module) -> list[Optimizer]:
    """Both sides have two rates: `lr` for the maps between spaces, `adamw_lr` for embeddings, norms
    and routers.
    """
    optimizers = _optimizers(setting, model)
    if setting.weights == "bf16":
        for o in optimizers:
            o.register_step_post_hook(
                lambda o, *_: _round(p for g in o.param_groups for p in g["params"])
            )
    return optimizers


def _optimizers(setting: Setting, model: nn.Module) -> list[Optimizer]:
    if setting.optimizer not in (*KINDS, "adamw"):
        raise ValueError(
            f"optimizer = {setting.optimizer!r}: allowed are {', '.join(KINDS)}, adamw"
        )
    if setting.optimizer != "adamw":
        options = dict(
            lr=setting.lr, adamw_lr=setting.adamw_lr, adjust=setting.adjust, halves=setting.halves
        )
        plain, *rest = param_groups.optimizers(model, **options)
        return [
            plain if setting.optimizer == "muon" else KINDS[setting.optimizer](plain.param_groups),
            *rest,
        ]
    assigned, named = param_groups.assign(model), wiring.trainable(model)
    rates = {"Muon": setting.lr, "AdamW": setting.adamw_lr}
    groups = [
        {"params": [p for name, p in named.items() if assigned[name].optimizer == kind], "lr": rate}
        for kind, rate in rates.items()
    ]
    return [AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


def run(
    setting: Setting,
    data: Data,
    *,
    steps: int,
    machine: runtime.Machine,
    seed: int = 0,
    rows: int = 16,
    length: int = 256,
    warmup: int = 10,
    on_step: Callable[[dict], None] | None = None,
    checkpoints: Path | None = None,
    **shape,
) -> Outcome:
    started = time.perf_counter()
    model = build(setting, data.vocabulary, seed=seed, **shape).to(machine.device)
    if setting.checkpointing:
        compiling.checkpoint_blocks(model)
    if setting.compiled:
        compiling.compile_blocks(model)
    language = depths.loss() if setting.capacity < 1 else losses.causal_lm
    both = optimizers(setting, model)
    records = train.fit(
        model,
        text.Batches(data.stream, rows=rows, length=length, seed=seed),
        both,
        total=steps,
        schedule=train.cosine(steps, warmup=min(warmup, steps // 4)),
        loss=moe.loss(
            balance_weight=setting.balance_weight, z_weight=setting.z_weight, language=language
        ),
        accumulate=setting.accumulate,
        clip=0,
        machine=machine,
        on_step=on_step,
        checkpoints=train.Checkpoints(checkpoints, every=max(1, steps // 2)),
    )
    seconds = time.perf_counter() - started
    held_out_loss = train.evaluate(model, data.held_out, machine=machine)["loss"]
    health = router_health.diagnose(model, data.held_out)
    size, curve = models.count(model)["all"], [r["ce"] for r in records]
    work = steps * step_flops(setting, data.vocabulary, rows=rows, length=length, **shape)
    return Outcome(held_out_loss, curve, health, seconds, records[-1]["tokens"], size, work)


@cache
def step_flops(setting: Setting, vocabulary: int, *, rows: int, length: int, **shape) -> int:
    """FLOPs of a step, counted once on a new model: forward and backward, and what the optimizers
    multiply.
    """
    with runtime.seeded(0):
        model = build(setting, vocabulary, **shape)
        ids = torch.randint(vocabulary, (rows, length))
        with flops.Count() as forth_and_back:
            sum(losses.causal_lm(model, {"input_ids": ids, "labels": ids}).values()).backward()
        with flops.Count() as update:
            for optimizer in optimizers(setting, model):
                optimizer.step()
    return setting.accumulate * forth_and_back.new + update.new


class Race(NamedTuple):
    """One race over several seeds: what each racer reached and paid, seed by seed."""

    ours: list[Outcome]
    theirs: list[Outcome]

    @property
    def gains(self) -> list[float]:
        return seeds.gains([o.loss for o in self.theirs], [o.loss for o in self.ours])

    @property
    def verdict(self) -> str:
        return verdict(self.gains)


def over_seeds(
    data: Data,
    *,
    steps: int,
    share: float,
    ours: Setting = MUON,
    theirs: Setting = ADAMW,
    count: int = 3,
    **options,
) -> Race:
    """`ours` with `share` of the `steps` of `theirs`, at each seed."""
    fair(ours, theirs)
    race = Race([], [])
    with Counting("short trainings", of=2 * count) as line:
        for seed in range(count):
            line.says(f"ours, seed {seed}")
            race.ours.append(run(ours, data, steps=round(share * steps), seed=seed, **options))
            line.says(f"theirs, seed {seed}")
            race.theirs.append(run(theirs, data, steps=steps, seed=seed, **options))
    for a, b in zip(race.ours, race.theirs):  # what the table says is equal
        assert a.parameters == b.parameters and a.tokens * len(b.curve) == b.tokens * len(a.curve)
    return race


def fair(ours: Setting, theirs: Setting) -> None:
    """Refuse racers that differ in more than the optimizer and its rates."""
    if unequal := [
        n for n in Setting._fields if n not in OWN and getattr(ours, n) != getattr(theirs, n)
    ]:
        both = ", ".join(f"{n} = {getattr(ours, n)} against {getattr(theirs, n)}" for n in unequal)
        raise ValueError(f"{both}: both racers need the same")


def verdict(gains: list[float]) -> str:
    """Who is ahead, by the rule of `lessons.seeds`, from AdamW's losses less Muon's."""
    if not seeds.distinct(gains):
        return "not distinguishable"
    return "Muon" if gains[0] > 0 else "AdamW"


def steps_to(curve: list[float], loss: float, *, over: int = 4) -> int | None:
    """Return the first step at which the training loss, in the mean of the last `over` steps, is no
    higher.
    """
    means = [sum(curve[max(0, i + 1 - over) : i + 1]) / min(over, i + 1) for i in range(len(curve))]
    return next((i + 1 for i, mean in enumerate(means) if mean <= loss), None)


def row(name: str, outcome: Outcome, *, goal: float) -> dict:
    """Return a line of the race's table; `goal` is a training loss."""
    return {
        "optimizer": name,
        "steps": len(outcome.curve),
        "tokens": outcome.tokens,
        "parameters": outcome.parameters,
        "GFLOP": outcome.flops / 1e9,
        "seconds": outcome.seconds,
        "held-out loss": outcome.loss,
        f"steps to {goal:.2f}": steps_to(outcome.curve, goal),
    }


def table(race: Race) -> list[dict]:
    """Both at the first seed; the goal is the loss at which AdamW's training ends."""
    last = race.theirs[0].curve[-4:]
    goal = sum(last) / len(last)
    return [
        row(name, side[0], goal=goal)
        for name, side in (("Muon", race.ours), ("AdamW", race.theirs))
    ]


def by_seed(race: Race) -> list[dict]:
    return [
        {"seed": n, "Muon": a.loss, "AdamW": b.loss, "AdamW's less Muon's": gain}
        for n, (a, b, gain) in enumerate(zip(race.ours, race.theirs, race.gains))
    ]


SUSPECTS = {
    "bf16 weights": dict(weights="bf16"),
    "small rates": dict(lr=3e-4, adamw_lr=9e-5),
    "no balance loss": dict(balance_weight=0.0, z_weight=0.0),
    "skipped doubled": dict(skipped="doubled"),
}


def combinations(suspects: dict[str, dict] = SUSPECTS) -> list[tuple[str, ...]]:
    """None, one alone, all but one, all."""
    names = list(suspects)
    return [
        (),
        *((n,) for n in names),
        *(tuple(m for m in names if m != n) for n in names),
        tuple(names),
    ]


def trial(
    data: Data,
    *,
    machine: runtime.Machine,
    healthy: Setting = SKIPPING,
    which: list[tuple[str, ...]] | None = None,
    steps: int = 60,
    checkpoints: Path | None = None,
    **options,
) -> list[dict]:
    """Return the suspects alone and together, each as the share of the healthy run's gain that is
    left.
    """
    which = combinations() if which is None else [(), *(w for w in which if w)]
    table, first = [], None
    for names in each(which, "trainings", name=lambda names: " + ".join(names) or "no fault"):
        changes = {key: value for name in names for key, value in SUSPECTS[name].items()}
        folder = checkpoints and checkpoints / ("+".join(names).replace(" ", "_") or "healthy")
        options |= dict(steps=steps, machine=machine, checkpoints=folder)
        outcome = run(healthy._replace(**changes), data, **options)
        first = first or outcome
        # the loss of a model that knows nothing
        untrained = torch.tensor(float(data.vocabulary)).log().item()
        table.append(
            {
                "faults": " + ".join(names) or "none",
                "loss": outcome.loss,
                "share of the gain": (untrained - outcome.loss) / (untrained - first.loss),
                "starved experts": sum(h.starved for h in outcome.health),
                "collapsed": any(h.collapsed for h in outcome.health),
                "seconds": outcome.seconds,
            }
        )
    return table
