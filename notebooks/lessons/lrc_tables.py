"""The tables and figures of notebook 10, so that its cells hold the lines of the method alone.

    three_values   the weights of a matrix, and the three values that are left of them
    left_as_floats  the weights of a model's blocks that a ternary model keeps as they are
    energy         how much of each layer's rounding error a correction of some rank can hold
    gain, gains    how large a layer's outputs are, beside the float ones, along the directions of
                   its inputs
    differences    gradients of the same model computed in several ways
    phase_diagram  the weight that a router leaves to the first of two losses
    gap            every model's loss as a share of what rounding cost; control_name says what one
                   of them may claim
    training       validation losses between the levels of the float and the ternary model
    on_disk        what a saved model is made of
    in_stock       an exported model, opened by transformers and PEFT alone

Footgun: a share of the gap is only as good as the gap. All losses in one table must come from the
same rows.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers as tf
from matplotlib.figure import Figure
from torch import Tensor, nn

from nblib import compiling, models
from nblib.methods import lrc
from nblib.methods.lrc import export
from nbworkbook import show


def left_as_floats(model: nn.Module) -> str:
    """Return a sentence on the blocks' matrices that `lrc.attach` leaves alone, such as stacked
    experts; empty for none.
    """
    linear = {id(p) for m in lrc.linear_layers(model).values() for p in m.parameters()}
    matrices = [
        (n, p) for b in compiling.blocks(model) for n, p in b.named_parameters() if p.ndim > 1
    ]
    left = {n: p.numel() for n, p in matrices if id(p) not in linear}
    share = sum(p.numel() for _, p in matrices if id(p) not in linear) / sum(
        p.numel() for _, p in matrices
    )
    names = ", ".join(sorted({".".join(n.split(".")[-2:]) for n in left}))
    return (
        f"{share:.0%} of the blocks' weights are in no linear layer and stay floats: {names}"
        if left
        else ""
    )


def three_values(weight: Tensor, codes: Tensor, scale: Tensor, name: str) -> show.Picture:
    """Return a histogram of a float matrix, with what each weight is rounded to."""
    figure = Figure(figsize=(5.6, 1.8), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(weight.flatten().numpy(), bins=200, color="tab:blue", alpha=0.6)
    for value in (-1, 0, 1):
        axes.axvline(value * float(scale), color="black")
    for border in (-0.5, 0.5):
        axes.axvline(border * float(scale), color="tab:red", linestyle="--", linewidth=0.8)
    axes.set(xlabel=f"weight of {name}", ylabel="how many")
    zeros = float((codes == 0).float().mean())
    words = (
        "Blue: the float weights. Black: the three values that are left, -scale, 0 and scale. "
        "Red, dashed: the borders "
        f"between them. {zeros:.0%} of the weights become zero."
    )
    return show.Picture(figure, words, title="Rounding to three values")


def energy(
    held: dict[str, Tensor], noise: Tensor, percent: float
) -> tuple[show.Picture, dict[str, float]]:
    """Energy of the residual over the rank, a line per layer; and each layer's share at
    `percent`.
    """
    figure = Figure(figsize=(5.4, 2.0), layout="constrained")
    axes = figure.add_subplot()
    for n, (name, share) in enumerate([*held.items(), ("a random matrix", noise)]):
        x = 100 * torch.arange(1, len(share) + 1) / len(share)
        layer = name in held
        label = name if not layer else "layers" if n == 0 else None
        # sharp edges: many thin lines take few bytes
        colour, width = ("tab:blue", 0.7) if layer else ("black", 1.5)
        axes.plot(x, 100 * share, color=colour, linewidth=width, label=label, antialiased=not layer)
    axes.axvline(percent, color="tab:red", linestyle="--", label=f"{percent:g} %")
    axes.set(xlabel="rank (% of the smaller side)", ylabel="error held (%)")
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    at = {name: float(s[lrc.rank_of(len(s), len(s), percent) - 1]) for name, s in held.items()}
    least, most = min(at, key=at.get), max(at, key=at.get)
    words = (
        f"At {percent:g} % of full rank the best product holds from {at[least]:.0%} ({least}) "
        f"to {at[most]:.0%} "
        f"({most}) of a layer's rounding error."
    )
    return show.Picture(figure, words, title="The rounding error that a small rank holds"), at


def gain(weight: Tensor, other: Tensor, directions: Tensor) -> Tensor:
    """Return the part of `weight @ v` that `other @ v` has, for every column v of the directions: 1
    where nothing is lost.
    """
    exact = weight @ directions  # (out, n)
    return (exact * (other @ directions)).sum(0) / exact.square().sum(0)


def gains(found: dict[tuple[str, str], Tensor], name: str) -> show.Picture:
    """Gains by (scale, correction), over the directions."""
    figure, most = Figure(figsize=(5.4, 1.9), layout="constrained"), 32
    axes = figure.add_subplot()
    colours = dict(zip(dict.fromkeys(scale for scale, _ in found), ("tab:red", "tab:blue")))
    for (scale, what), gain in found.items():
        line = dict(
            color=colours[scale], linestyle=":" if what == "no correction" else "-", linewidth=1.2
        )
        axes.plot(range(1, len(gain[:most]) + 1), gain[:most], label=f"{scale}, {what}", **line)
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set(xlabel="direction of the inputs, the strongest first", ylabel="gain of the output")
    figure.legend(frameon=False, loc="outside right upper", fontsize=8.5)
    words = f"How much of {name}'s float output arrives."
    return show.Picture(figure, words, title="A low rank mends few directions")


def differences(ways: dict[str, tuple[float, dict[str, Tensor]]]) -> list[dict]:
    """Return a row per way: its loss, and its largest difference from the first way, relative to
    the largest entry there.
    """
    (_, first), rows = next(iter(ways.values())), []
    for name, (loss, g) in ways.items():
        worst = max(
            float((g[n] - e).abs().max() / e.abs().max().clamp_min(1e-30)) for n, e in first.items()
        )
        zero = sum(not g[n].any() for n in g)
        rows.append(
            {
                "way": name,
                "loss": loss,
                "tensors": len(g),
                "all zero": zero,
                "worst difference": worst,
            }
        )
    return rows


def phase_diagram(
    panels: dict[str, Tensor], ratios: Sequence[float], penalties: Sequence[float]
) -> show.Picture:
    """Return the weight of the first loss at the end, over the ratio of the losses and the penalty,
    a panel per router.
    """
    figure = Figure(figsize=(5.8, 1.9), layout="constrained")
    line = torch.linspace(0.05, 0.55, 50)
    for axes, (title, w1) in zip(figure.subplots(1, len(panels), sharey=True), panels.items()):
        mesh = axes.pcolormesh(
            penalties, ratios, w1, vmin=0, vmax=1, cmap="viridis", shading="nearest"
        )
        axes.plot(line, (1 + line) / (1 - line), color="tab:red")
        axes.set(ylim=(1.0, 4.2), xlim=(0.025, 0.55))
        axes.set_title(title, fontsize=8)
    figure.axes[0].set_ylabel("first loss / second")
    figure.axes[len(panels) // 2].set_xlabel("penalty on the spread, in all panels")
    figure.colorbar(mesh, ax=figure.axes, label="weight of the first")
    predicted = torch.tensor([[r > (1 + p) / (1 - p) for p in penalties] for r in ratios])
    agree = float((predicted == (next(iter(panels.values())) < 0.05)).float().mean())
    least = {name: float(torch.minimum(w1, 1 - w1).min()) for name, w1 in panels.items()}
    words = (
        "Dark: the first, larger loss has no weight at the end. Red: ratio = (1 + penalty) / "
        "(1 - penalty). The "
        "published router should give it up above that line, and does as predicted in "
        f"{agree:.0%} of the cells. Least "
        "weight of either loss: "
    )
    words += ", ".join(f"{name} {w:.2f}" for name, w in least.items()) + "."
    return show.Picture(
        figure, words, title="When a learned weighting gives up on one of two losses"
    )


def control_name(training: show.Training, control: show.Training) -> str:
    """Return what the control is called: "same steps" only if it took as many as the training."""
    ours, its = (each.record.get("step", 0) for each in (training, control))
    return "float, same steps" if ours == its else f"float, {its} steps and not {ours}"


def gap(
    losses: dict[str, float], history: dict[str, list[dict]], *, rounded: float, full: float
) -> list[dict]:
    """Return a row per model: its loss, its share of the gap, and the steps that it was trained
    for, if it was.
    """
    rows = []
    for name, loss in losses.items():
        steps = len(history.get(name, ()))
        share = lrc.recovered(loss, rounded=rounded, full=full)
        rows.append(
            {"model": name, "held-out loss": loss, "share of the gap": share, "steps": steps}
        )
    return rows


def training(
    first: dict[str, float],
    history: dict[str, list[dict]],
    levels: dict[str, float],
    labels: dict[str, str],
) -> show.Picture:
    """Return validation losses over the steps, and as dotted lines the losses between which they
    run, on the same rows.
    """
    figure = Figure(figsize=(5.4, 1.9), layout="constrained")
    axes = figure.add_subplot()
    for name, records in history.items():
        points = [(0, first[name])] + [
            (r["step"], r["eval_loss"]) for r in records if "eval_loss" in r
        ]
        axes.plot(*zip(*points), marker="o", label=labels[name])
    for (name, level), colour in zip(levels.items(), ("black", "tab:red")):
        axes.axhline(level, color=colour, linestyle=":", label=name)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    (full, low), (rounded, high) = levels.items()
    shares = [
        lrc.recovered(loss, rounded=high, full=low)
        for loss in (first["corrected"], _last(history, first))
    ]
    words = (
        f"Dotted: {full} (black) and {rounded} (red); between them lies the gap, here on the "
        "validation rows. The "
        f"corrected model closes {shares[0]:.0%} of it before training and {shares[1]:.0%} after "
        f"{labels['corrected'].partition(', ')[2] or 'it'}."
    )
    return show.Picture(figure, words, title="Training the correction, beside its control")


def _last(history: dict[str, list[dict]], first: dict[str, float]) -> float:
    return [
        first["corrected"],
        *(r["eval_loss"] for r in history["corrected"] if "eval_loss" in r),
    ][-1]


def on_disk(model: nn.Module, bits: int) -> list[dict]:
    """Return a row per part of a saved model: its numbers, and the bytes they take."""
    layers = lrc.layers(model).values()
    weights = sum(layer.weight.numel() for layer in layers)
    factors = sum(layer.U.numel() + layer.V.numel() for layer in layers)
    rest = models.count(model)["all"] - weights - factors
    parts = {
        "ternary weights": (weights, weights / 4),
        "U and V": (factors, factors * (bits / 8 if bits else 4)),
        "the rest": (rest, 4 * rest),
    }
    return [
        {"part": name, "numbers": int(count), "bytes": int(b)} for name, (count, b) in parts.items()
    ]


def in_stock(folder: Path) -> nn.Module:
    """Return what `lrc_export.save` wrote. transformers says on every CPU that a card would be
    faster, and would compile its rounding, which takes longer than all else here; so call the model
    with torch's stance `force_eager`.
    """
    import peft  # here: it takes a second, and the other tables need none

    level = tf.utils.logging.get_verbosity()
    tf.utils.logging.set_verbosity_error()
    try:
        model = tf.AutoModelForCausalLM.from_pretrained(folder)
    finally:
        tf.utils.logging.set_verbosity(level)
    with warnings.catch_warnings():
        # PEFT asks transformers in a way that it will forget
        warnings.simplefilter("ignore", FutureWarning)
        return peft.PeftModel.from_pretrained(model, folder / export.ADAPTER).eval()
