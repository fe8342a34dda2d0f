"""The tables and figures of notebook 11, so that its cells hold the lines of the method alone.

    kl_row       the KL of one adapter on its own input, and on the stream that enters its block
    planted      what each rank adds to the output, and how many add anything
    priors       smallest, median and largest of all prior variances
    training     cross-entropy, KL term and the latents of one adapter
    pruning      held-out loss over the ranks that are left, beside adapters that were small from
                 the start
    budgets      the same as a table, the best first
    uncertainty  accuracy, NLL and ECE of each model on each text, and who has the lowest
    reliability  how often the first choice is right, over the probability it is given

Footgun: all of them take what was measured on one seed. Small differences between two lines are
noise.
"""

from collections.abc import Iterable

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from nblib.methods import ard
from nbworkbook import show

Judged = dict[tuple[str, str], dict]  # (model, text) -> what `uncertainty.measure` returns
USED = 0.01  # a rank below this share of the strongest one adds nothing
SEEN = 20  # tokens that a bin needs to be drawn


def kl_row(name: str, kl: Tensor, exact: Tensor, stream: Tensor) -> dict:
    """Means in nats per token, and how many times too large the KL on the stream is."""
    own, other = float(exact.mean()), float(stream.mean())
    row = {"adapter": name, "in its own forward": float(kl.mean()), "torch": own}
    return row | {"on hidden states": other, "that is, times": other / own}


def planted(signals: dict[str, Tensor]) -> tuple[show.Picture, dict[str, int]]:
    """Bars of each adapter's ranks, the strongest first; and how many of them are used."""
    figure = Figure(figsize=(6.8, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for (name, signal), shift in zip(signals.items(), (-0.2, 0.2)):
        axes.bar(
            torch.arange(1, len(signal) + 1) + shift, signal.clamp_min(1e-8), width=0.4, label=name
        )
    axes.set(xlabel="rank, the strongest first", ylabel="mean square of its output", yscale="log")
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    on = {name: int((signal > USED * signal.max()).sum()) for name, signal in signals.items()}
    words = (
        "What each rank adds to the output, on a logarithmic scale. Ranks that add at "
        "least 1 % of the strongest: "
    )
    words += ", ".join(f"{count} of {name}" for name, count in on.items()) + "."
    return show.Picture(figure, words, title="A map of rank three, learned by six ranks"), on


def priors(model: nn.Module) -> dict[str, float]:
    v = torch.cat([a.prior for a in ard.adapters(model).values()])
    return {"smallest": float(v.min()), "median": float(v.median()), "largest": float(v.max())}


def training(
    history: list[dict], mean: Tensor, signal: Tensor, name: str, label: str
) -> show.Picture:
    """Return the KL term of the loss, and for each held-out token the means (tokens, r) of two
    ranks of one adapter.
    """
    first, last = signal.argsort(descending=True)[[0, -1]].tolist()
    figure = Figure(figsize=(6.6, 2.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([r["step"] for r in history], [r["kl"] for r in history], color="tab:red")
    left.set(xlabel="optimizer step", ylabel="nats per token", title="beta * kl")
    right.scatter(mean[::4, first], mean[::4, last], s=4)
    right.set(
        xlabel="mean of the strongest rank",
        ylabel="of the weakest",
        title=name.partition(".")[2],
        aspect="equal",
    )
    right.set_adjustable("datalim")
    for axes in (left, right):
        axes.title.set_fontsize(9)
    words = (
        "Left: the KL term, which is added to the cross-entropy. Right: a dot for every fourth "
        "held-out token in the "
        "adapter with the strongest signal; a rank that tells nothing about the token has all "
        "its means in one place."
    )
    return show.Picture(figure, words, title=f"Training {label}")


def pruning(
    curve: dict[str, list[tuple[float, float]]],
    rival: dict[tuple[str, int], float],
    total: int,
    words: str,
) -> show.Picture:
    """Lines for the orders in which ranks are removed, markers for what was trained at its number
    of ranks.
    """
    figure = Figure(figsize=(6.8, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for way, points in curve.items():
        at_random = way.startswith("at random")
        x, y = [share * total for share, _ in points], [loss for _, loss in points]
        label = (
            None
            if at_random and not way.endswith("1")
            else "pruned at random"
            if at_random
            else f"pruned by {way}"
        )
        axes.plot(x, y, marker=".", label=label, color="0.7" if at_random else None)
    for name, marker in zip(dict.fromkeys(name for name, _ in rival), "sP^D"):
        points = [(left, loss) for (n, left), loss in rival.items() if n == name]
        axes.plot(*zip(*points), marker, label=name)
    axes.set(xlabel="ranks left, over all layers", ylabel="held-out loss (nats per token)")
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside right upper", fontsize=8.5)
    return show.Picture(figure, words, title="What pruning costs, and what small adapters reach")


def budgets(
    rival: dict[tuple[str, int], float],
    pruned: dict[int, float],
    total: int,
    whole: float,
    name: str,
) -> list[dict]:
    """Return a row per adapter and number of ranks; `pruned` and `whole` are the losses of
    ARD-LoRA, which `name` names.
    """
    rows = [(rival_name, left, loss) for (rival_name, left), loss in rival.items()]
    rows += [(f"{name}, whole", total, whole)] + [
        (f"{name}, pruned", left, loss) for left, loss in pruned.items()
    ]
    return [
        dict(zip(("adapter", "ranks", "held-out loss"), row))
        for row in sorted(rows, key=lambda row: row[2])
    ]


def uncertainty(judged: Judged) -> tuple[list[dict], dict[tuple[str, str], str]]:
    """Return a row per model; and for NLL and ECE on each text the lowest of all models but the
    first, which is untrained.
    """
    models, texts = (list(dict.fromkeys(key[n] for key in judged)) for n in (0, 1))
    rows = []
    for name in models:
        row = {"model": name}
        for text in texts:
            row |= {f"{k}, {text}": judged[name, text][k] for k in ("accuracy", "nll", "ece")}
        rows.append(row)
    winner = {
        (k, text): min(models[1:], key=lambda name: judged[name, text][k])
        for k in ("nll", "ece")
        for text in texts
    }
    return rows, winner


def reliability(judged: Judged, shown: Iterable[str], lowest: str) -> show.Picture:
    """Return a panel per text; on the diagonal a model is right as often as it says."""
    texts = list(dict.fromkeys(text for _, text in judged))
    figure = Figure(figsize=(7.0, 2.6), layout="constrained")
    for axes, text in zip(figure.subplots(1, len(texts), sharey=True), texts):
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
        for name in shown:
            bins = [r for r in judged[name, text]["reliability"] if r["tokens"] >= SEEN]
            axes.plot(
                [r["confidence"] for r in bins],
                [r["accuracy"] for r in bins],
                marker=".",
                label=name,
            )
        axes.set(xlabel="probability of the first choice", title=text, xlim=(0, 1), ylim=(0, 1))
    figure.axes[0].set_ylabel("share of them that is right")
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside right upper", fontsize=8.5)
    words = (
        "Grey diagonal: as often right as the model says. Below it the model is too sure of "
        "itself, above it not sure "
        f"enough. Lowest calibration error on {texts[-1]}: {lowest}."
    )
    return show.Picture(figure, words, title="Calibration")
