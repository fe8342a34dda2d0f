"""Routers on the page: known routings with the balance they must have, a training, and who serves
which token.

`known` holds four routings whose balance loss E sum_e f_e P_e is known without computing it: even
routing costs 1, one expert that takes all costs E, and always the same k of E cost E / k.

Footgun: a layer that skips tokens does not report all of them. It has no place on the map of
`by_kind`.
"""

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from lessons import token_kinds
from nblib.methods import moe
from nblib.methods.moe import router_health
from nbworkbook import show

Routing = list[tuple[Tensor, Tensor]]  # logits (N, E) and chosen (N, k) of each layer


def known(experts: int, top_k: int, tokens: int = 512) -> dict[str, tuple[Routing, float]]:
    """Routings by name, with the balance that each should have."""
    even = torch.arange(tokens * top_k).view(tokens, top_k) % experts
    first = torch.zeros(tokens, dtype=torch.long)
    same = F.pad(torch.full((tokens, top_k), 50.0), (0, experts - top_k))
    always = torch.arange(top_k).expand(tokens, top_k)
    return {
        "even": ([(torch.zeros(tokens, experts), even)], 1.0),
        "one expert takes all, k = 1": (
            [(F.one_hot(first, experts) * 50.0, always[:, :1])],
            float(experts),
        ),
        "always the same k": ([(same, always)], experts / top_k),
        "two layers, each the same k of its own": (
            [(same, always), (same.roll(top_k, dims=1), always + top_k)],
            experts / top_k,
        ),
    }


def training(history: list[dict], named: dict[str, str], title: str) -> show.Picture:
    """Return the language losses on the left, the routers' health on the right; `named` has the
    curves' labels.
    """
    figure = Figure(figsize=(8.2, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, label in named.items():
        left.plot([r["step"] for r in history], [r[name] for r in history], label=label)
    left.set(xlabel="optimizer step", ylabel="nats per token", title="language loss")
    seen = [r for r in history if "eval_loss" in r]
    labels = {"eval_smallest": "smallest load", "eval_entropy": "entropy of the load"}
    for (name, label), color in zip(labels.items(), ("#2f855a", "#805ad5")):
        right.plot(
            [r["step"] for r in seen], [r[name] for r in seen], marker=".", label=label, color=color
        )
    right.axhline(router_health.STARVED, color="0.7", linewidth=0.8, label="starved below")
    right.set(xlabel="optimizer step", ylim=(0, 1.05), title="worst layer, 1 is even")
    figure.legend(frameon=False, loc="outside right upper", fontsize=8)
    terms = [
        f"{name} {history[-1][name]:.4f}"
        for name in ("balance", "z", "depth")
        if name in history[-1]
    ]
    words = (
        "At the end, beside the language loss: " + ", ".join(terms) + "."
        if terms
        else "Trained without other terms."
    )
    words += (
        " Right: green is the load of the emptiest expert over the fair share, violet how "
        "even the load is."
    )
    return show.Picture(
        figure, words, title=f"{title}: the language loss and the load of the experts"
    )


def by_kind(observed: list[moe.Routed], rows: Tensor, kind_of: Tensor) -> show.Picture:
    """Which experts of the first and the last router serve each kind of token."""
    whole = [routed for routed in observed if len(routed.chosen) == rows.numel()]
    counts = torch.bincount(kind_of[rows.flatten()], minlength=len(token_kinds.KINDS)).float()
    figure, told = Figure(figsize=(7.6, 2.6), layout="constrained"), {}
    for axes, routed in zip(figure.subplots(1, 2, sharey=True), (whole[0], whole[-1])):
        table = token_kinds.routing_map(routed, rows, kind_of)
        told[routed.layer] = token_kinds.told_by_kind(table, counts)
        drawn = axes.imshow(table, aspect="auto", cmap="Blues", vmin=0)
        axes.set(
            title=routed.layer.removeprefix("model."),
            xlabel="expert",
            yticks=range(len(token_kinds.KINDS)),
        )
        axes.set(
            yticklabels=token_kinds.KINDS, xticks=range(0, table.shape[1], 1 + table.shape[1] // 17)
        )
    figure.colorbar(drawn, ax=figure.axes, label="share of the kind")
    words = (
        "Darker: more tokens of this kind go to this expert. How much the kind of a token "
        "tells of its expert: "
    )
    words += ", ".join(f"{share:.0%} in {layer}" for layer, share in told.items()) + "."
    return show.Picture(figure, words, title="Which expert serves which kind of token")
