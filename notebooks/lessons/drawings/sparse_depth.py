"""Notebook 14: a layer that tokens may skip, heads that look further ahead, a Jamba's layers, and
doubled tokens.
"""

import torch
from matplotlib.figure import Figure

from lessons.drawings import COMPUTED, FROZEN, LOSS, TRAINED, Sketch
from nblib import models, runtime
from nblib.methods.moe import depths
from nbworkbook import show

LAYERS = 12


def doubling() -> show.Picture:
    """Return the stream by layer of a fresh model whose layers skip tokens, with the fault and
    without.
    """
    figure = Figure(figsize=(6.8, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for skipped, color in zip(depths.SKIPPED, ("#2b6cb0", "#c53030")):
        axes.plot(
            range(LAYERS + 1),
            _stream(skipped),
            marker="o",
            markersize=3,
            label=skipped,
            color=color,
        )
    axes.set(yscale="log", xlabel="layers passed", ylabel="size of the hidden states")
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside right upper", fontsize=9, title="a skipped token")
    words = (
        f"Root mean square of the hidden states of a fresh model with {LAYERS} layers, each of "
        "which a quarter of the "
        "tokens skips. Blue: a skipped token leaves as it came. Red: the same layer adds the "
        "token to itself."
    )
    return show.Picture(figure, words, title="A skip path that adds its input twice")


@torch.no_grad()
def _stream(skipped: str) -> list[float]:
    """Root mean square of the hidden states before the first layer and after each."""
    with runtime.seeded(0):
        model, ids = models.tiny(64, hidden=64, layers=LAYERS), torch.randint(64, (8, 32))
        depths.attach(model, capacity=0.75, layers=list(range(LAYERS)), skipped=skipped)
    sizes: list[float] = []
    layers = list(depths.wrapped(model).values())
    layers[0].register_forward_pre_hook(
        lambda _, args: sizes.append(float(args[0].square().mean().sqrt()))
    )
    for layer in layers:
        layer.register_forward_hook(
            lambda _, args, out: sizes.append(float(out.square().mean().sqrt()))
        )
    model.base_model(input_ids=ids)
    return sizes


def skip_path() -> show.Picture:
    """Return the two ways of a token through a layer, and who decides in training and at
    inference.
    """
    sketch = Sketch(7.4, 2.9)
    x, y = sketch.box(0.5, 1.75, "x", width=0.6), sketch.box(6.9, 1.75, "y", width=0.6)
    skip = sketch.box(5.3, 2.6, "skipped: x itself", width=1.5, height=0.4)
    block = sketch.box(3.3, 1.75, "block", fill=TRAINED)
    times = sketch.box(5.3, 1.75, "sigmoid(r) *\n(block(x) - x)", width=1.4, height=0.55)
    router = sketch.box(2.6, 0.95, "router r(x)", width=1.15, height=0.4, fill=TRAINED)
    predictor = sketch.box(1.3, 0.3, "predictor", width=1.15, height=0.4, fill=TRAINED)
    depth = sketch.box(5.3, 0.3, "loss 'depth'", height=0.4, fill=LOSS)
    sketch.arrow(x, skip, dashed=True, color="#c53030")
    sketch.arrow(skip, y, dashed=True, color="#c53030")
    sketch.arrow(x, block, "chosen")
    sketch.arrow(block, times)
    sketch.arrow(times, y, "+ x")
    sketch.arrow(x, router)
    sketch.arrow(router, times, "r")
    sketch.arrow(x, predictor)
    sketch.arrow(predictor, depth, "learns which r are the highest")
    words = (
        "One token x in a layer that may be skipped. In training the tokens with the highest r "
        "are worked on. At "
        "inference the predictor decides, because nobody knows the highest of a row before it "
        "ends. Blue: trained. "
        "Red and dashed: the path of a skipped token, which must change nothing."
    )
    return sketch.picture(words, title="Mixture of depths: a token takes the block or skips it")


def heads_ahead() -> show.Picture:
    """One trunk and four heads; three of them are for training alone."""
    sketch = Sketch(7.4, 2.5)
    ids, trunk = (
        sketch.box(0.9, 1.25, "tokens to t", width=1.2),
        sketch.box(2.6, 1.25, "layers", fill=TRAINED),
    )
    state = sketch.box(3.95, 1.25, "h_t", width=0.6)
    sketch.arrow(ids, trunk)
    sketch.arrow(trunk, state)
    for n, name in enumerate(("lm_head", 'ahead["2"]', 'ahead["3"]', 'ahead["4"]')):
        head = sketch.box(5.35, 2.2 - 0.62 * n, name, width=1.05, height=0.4, fill=TRAINED)
        target = sketch.box(
            6.85, 2.2 - 0.62 * n, f"t + {n + 1}", width=0.7, height=0.4, fill=COMPUTED
        )
        sketch.arrow(state, head, dashed=n > 0)
        sketch.arrow(head, target, dashed=n > 0)
    words = (
        "All heads read the same last hidden state h_t. Blue: trained. The first head is the "
        "model's own and the only "
        "one that is used afterwards; the dashed ones help to train the layers and are then "
        "deleted."
    )
    return sketch.picture(words, title="Multi-token prediction: one head for each distance")


def jamba_layers() -> show.Picture:
    """Which layers hold a state space, which attention, which experts; and the routed mixer."""
    sketch = Sketch(7.4, 2.9)
    previous = sketch.box(0.55, 2.3, "x", width=0.5)
    for n, (mixer, after) in enumerate(
        [("Mamba", "MLP"), ("Mamba", "experts"), ("attention", "MLP"), ("Mamba", "experts")]
    ):
        middle = 1.65 + 1.55 * n
        fill = FROZEN if mixer == "attention" else TRAINED
        first = sketch.box(middle, 2.52, mixer, width=1.1, height=0.4, fill=fill)
        sketch.box(
            middle,
            2.08,
            after,
            width=1.1,
            height=0.4,
            fill="#fdf1c6" if after == "experts" else COMPUTED,
        )
        both = first._replace(y=2.3, height=0.84)
        sketch.arrow(previous, both)
        previous = both
    router = sketch.box(2.2, 0.7, "MambaRouter", width=1.25, fill=COMPUTED)
    mixers = [
        sketch.box(4.1, 0.95 - 0.5 * n, f"Mamba {n}", width=1.0, height=0.38, fill=TRAINED)
        for n in range(2)
    ]
    total = sketch.box(6.1, 0.7, "weighted sum", width=1.25)
    for mixer in mixers:
        sketch.arrow(router, mixer)
        sketch.arrow(mixer, total)
    sketch.text(0.8, 0.7, "routed Mamba:", size=8)
    words = (
        "Above: four layers of a Jamba. Blue: a Mamba mixer, which is a state space. Grey: "
        "attention, once in four "
        "layers. Yellow: a mixture of experts, in every second layer. Below: routed Mamba puts "
        "several mixers and a "
        "router in the place of each blue box."
    )
    return sketch.picture(words, title="Jamba: state spaces, some attention, some experts")
