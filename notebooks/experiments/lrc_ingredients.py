"""Ingredients of other recipes for ternary models, each a line beside LRC's training; and what each
of them changes.

    sub_norm    RMSNorm before the projections that have none: of attention's and the feed-forward's
                outputs (SubLN, as in BitNet distillation, arXiv:2510.13998). It starts as large as
                its inputs are on average
    warm_up     rounding that fades in: (1 - lambda) W x + lambda (LRC's y), lambda from 0 to 1
                (Hugging Face's fine-tuning to 1.58 bits)
    relations   for A = queries, keys and values of one layer: KL between the teacher's and the
                student's softmax(A A^T / sqrt(d)) over the past tokens (MiniLM v2,
                arXiv:2012.15828; BitNet distillation)
    muon        Muon in the place of AdamW on U and V

    cd notebooks && ../.venv/bin/python -m experiments.lrc_ingredients

Footgun: these were made for models that learn ternary weights over many steps. LRC's weights are
frozen and its start is close to the float model, so an ingredient that changes the function has to
win back first what it cost.
"""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from experiments import lrc_spreads
from experiments.record import command, read_published
from lessons import seeds
from nblib import compiling, runtime, train, wiring
from nblib.losses import Batch, Loss, Terms
from nblib.methods import lrc
from nblib.methods.muon import Muon

RECORD = "lrc-ingredients"
OPTIONS = ("plain", "sub_norm", "warm_up", "relations", "muon")
WITHOUT_A_NORM = ("o_proj", "down_proj")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
STEPS, PERCENT = 30, 15.0


class SubNorm(nn.Module):
    """x / rms(x), times a weight per channel."""

    def __init__(self, width: int, size: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(
            x.dtype
        )


def sub_norm(
    student: nn.Module, moments: dict[str, Tensor], kinds: tuple[str, ...] = WITHOUT_A_NORM
) -> list[str]:
    """Put a norm before each LRC layer of these kinds, as large as its inputs are; returns their
    names.
    """
    chosen = {name: layer for name, layer in lrc.layers(student).items() if name.endswith(kinds)}
    for name, layer in chosen.items():
        size = float(moments[name].diagonal().mean().sqrt())
        layer.sub_norm = SubNorm(layer.in_features, size).to(layer.weight.device)
        layer.register_forward_pre_hook(lambda layer, args: (layer.sub_norm(args[0]),))
    return list(chosen)


class WarmUp:
    """lambda, which every step of the optimizer raises.

    The student needs W as well: `attach(keep_original=True)`.
    """

    def __init__(self, student: nn.Module, optimizer: Optimizer, *, steps: int):
        self.done, self.steps = 0, steps
        for layer in lrc.layers(student).values():
            layer.register_forward_hook(self._mixed)
        optimizer.register_step_post_hook(lambda *_: setattr(self, "done", self.done + 1))

    @property
    def now(self) -> float:
        return min(1.0, self.done / self.steps)

    def _mixed(self, layer: nn.Module, args: tuple, out: Tensor) -> Tensor:
        if self.now == 1.0:
            return out
        return torch.lerp(
            F.linear(args[0], layer.original, layer.bias).to(out.dtype), out, self.now
        )


def relation(states: Tensor, heads: int) -> Tensor:
    """log softmax(A A^T / sqrt(d)) over the past of every token: (B, T, H d) -> (B, H, T, T)."""
    A = states.unflatten(-1, (heads, -1)).transpose(1, 2).float()
    scores = A @ A.mT / A.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -1e9).log_softmax(-1)


def relations(
    loss: Loss, student: nn.Module, teacher: nn.Module, *, heads: int, weight: float = 0.1
) -> Loss:
    """`loss`, and the KL of the last block's relations, per token a mean over heads and
    projections.
    """
    seen: dict[tuple[bool, str], Tensor] = {}
    for ours, model in ((True, student), (False, teacher)):
        for name, module in compiling.blocks(model)[-1].named_modules():
            if (kind := name.rpartition(".")[2]) in PROJECTIONS:
                module.register_forward_hook(
                    lambda _, args, out, at=(ours, kind): seen.update({at: out})
                )

    def with_relations(model: nn.Module, batch: Batch) -> Terms:
        terms, apart = loss(model, batch), 0.0
        for kind in PROJECTIONS:
            ours, its = (relation(seen.pop((mine, kind)), heads) for mine in (True, False))
            apart = apart + F.kl_div(ours, its, log_target=True, reduction="sum")
        return terms | {"relations": weight * apart / (len(PROJECTIONS) * heads)}

    return with_relations


def muon(student: nn.Module, *, lr: float = 0.02) -> Muon:
    """For U and V, at the rate whose steps are about as large as those of AdamW at
    lrc_spreads.RATE.
    """
    return Muon(list(wiring.trainable(student).values()), lr=lr)


# -------------------------------------------------------------------------------- their measurement
class Cell(NamedTuple):
    base: str
    seed: int
    option: str
    steps: int


def cells(base: str = "narrow") -> Iterator[Cell]:
    yield from (Cell(base, seed, option, STEPS) for option in OPTIONS for seed in lrc_spreads.SEEDS)


def measured(bench: lrc_spreads.Bench, cell: Cell) -> dict:
    """Return the cell with its loss and its share of the gap.

    All options have the same start and the same training rows.
    """
    opened, student = bench.opened, copy.deepcopy(bench.opened.model)
    runtime.seed_all(cell.seed)
    moments = lrc_spreads.moments(opened, cell.seed)
    options = dict(
        init="svd_activation",
        rounds=lrc_spreads.STARTS["alternating"][1],
        moments=moments,
        randomised=True,
    )
    lrc.attach(student, percent=PERCENT, keep_original=cell.option == "warm_up", **options)
    if cell.option == "sub_norm":
        sub_norm(student, moments)
    loss = lrc_spreads.loss_of(opened)
    if cell.option == "relations":
        heads = opened.model.config.num_key_value_heads
        loss = relations(loss, student, loss.teacher, heads=heads)
    optimizer = (
        muon(student)
        if cell.option == "muon"
        else train.adamw(student, lr=lrc_spreads.RATE, weight_decay=0.0)
    )
    if cell.option == "warm_up":
        WarmUp(student, optimizer, steps=max(1, cell.steps // 3))
    lrc_spreads.fit(
        opened, student, seed=cell.seed, steps=cell.steps, loss=loss, optimizers=optimizer
    )
    result = opened.loss(student)
    return cell._asdict() | {"loss": result, "share": bench.share(result)}


def everything(path: Path, machine: runtime.Machine) -> dict:
    """Return the record of all options at all seeds."""
    benches = {"narrow": lrc_spreads.bench(lrc_spreads.opened("narrow", machine))}
    return lrc_spreads.measure(path, benches, cells(), measured)


published = partial(read_published, RECORD)


def table(record: dict) -> list[dict]:
    """Return a row per option: its shares, and by the rule of `seeds` whether it helps."""
    found: dict[str, list[dict]] = {}
    for line in sorted(record["lines"], key=lambda line: line["seed"]):
        found.setdefault(line["option"], []).append(line)
    plain, rows = [line["loss"] for line in found["plain"]], []
    for option, lines in found.items():
        gains = seeds.gains(plain, [line["loss"] for line in lines])
        verdict = "" if option == "plain" else seeds.sentence(option, gains)
        rows.append(
            {
                "option": option,
                "share of the gap": lrc_spreads.spread([line["share"] for line in lines]),
            }
        )
        rows[-1]["verdict"] = verdict
    return rows


if __name__ == "__main__":
    command(RECORD, __doc__, everything)
