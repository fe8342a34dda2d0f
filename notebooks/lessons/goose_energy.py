"""What a token costs at inference in multiplications and additions, and what spikes save of it.

A product with a spike of -a, 0 or a needs no multiplication: the other number is added, subtracted
or passed over. So a matrix of (out, in) weights that reads spikes at a rate f needs f out in
additions in place of out in multiply-adds. That is where spiking networks save energy. What counts
is therefore which matrices *read* spikes:

    matrices of a goose layer, 12 D^2    key, value, receptance, out, up, down    read dense numbers
    the state, D numbers
    S = d S + k v
    k v are spikes: adds where both fire

With energies of one operation, on numbers of 32 bits in a process of 45 nm (Horowitz, ISSCC 2014,
doi 10.1109/ISSCC.2014.6757323): a multiplication 3.7 pJ, an addition 0.9 pJ.

Assumptions: one row, one token after the other, every matrix is computed densely unless its input
is spikes. Norms, activation functions and thresholds are left out: they are a few operations per
channel, where a matrix needs D or more.

Footgun: reading a weight from memory takes a hundred times the energy of multiplying with it (1.3
to 2.6 nJ for 64 bits in the same source). No figure here contains it, and for a single row it
decides.
"""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from nblib import wiring
from nblib.methods.goose import Recurrent
from nbworkbook import show

MULTIPLY, ADD = 3.7, 0.9  # pJ, fp32 at 45 nm


@torch.no_grad()
def together(model: nn.Module, rows: Tensor) -> float:
    """Return the share of a goose's channels, over rows (B, T), where key and value fire at once:
    only there the state gets something.
    """
    shares: list[float] = []

    def note(layer: Recurrent, inputs: tuple, _) -> None:
        y = layer.norm(inputs[0])  # (B, T, D)
        before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        k, v = (torch.lerp(before, y, layer.mix[name]) for name in "kv")
        both = (layer.spike_k(layer.key(k)) != 0) & (layer.spike_v(layer.value(v)) != 0)
        shares.append(float(both.float().mean()))

    layers = [module for module in model.modules() if isinstance(module, Recurrent)]
    if not layers:
        raise ValueError(f"{type(model).__name__}: no goose, it has no recurrent layer")
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        with wiring.evaluating(model):
            model(rows)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(shares) / len(shares)


def operations(model: nn.Module, *, context: int, fires: float = 1.0) -> dict[str, float]:
    """Operations of one more token after `context` others: multiply-adds of the matrices and of
    attention over the context, and what the state takes. `fires` is the share of channels where key
    and value fire.
    """
    if context < 0 or not 0 <= fires <= 1:
        raise ValueError(
            f"context = {context}, fires = {fires}: must be at least 0, and from 0 to 1"
        )
    config, recurrent = model.config, [m for m in model.modules() if isinstance(m, Recurrent)]
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    channels = sum(len(layer.w) for layer in recurrent)
    per_token = (
        0
        if recurrent
        else 2 * config.num_hidden_layers * config.num_attention_heads * _head(config)
    )
    return {
        "matrices": matrices,  # multiply-adds
        "attention": per_token * (context + 1),  # q k and p v, with the token itself
        "state multiplications": 2 * channels,  # d S, r out
        "state additions": fires * channels,  # k v, where both fire
    }


def _head(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def energy(counted: dict[str, float]) -> float:
    """Microjoules of these operations."""
    dense = counted["matrices"] + counted["attention"]
    picojoules = dense * (MULTIPLY + ADD)
    return (
        picojoules + counted["state multiplications"] * MULTIPLY + counted["state additions"] * ADD
    ) / 1e6


def rows(
    goose: nn.Module, transformer: nn.Module, *, context: int, rate: float, fires: float
) -> list[dict]:
    """Return a line per model. The goose without spikes multiplies k and v; the last line is no
    model that exists here: every matrix of its blocks would read spikes at the rate that was
    measured.
    """
    spiking = operations(goose, context=context, fires=fires)
    dense = operations(goose, context=context) | {
        "state multiplications": 1.5 * spiking["state multiplications"]
    }
    blocks = sum(m.weight.numel() for m in goose.model.layers.modules() if isinstance(m, nn.Linear))
    head = spiking | {"matrices": spiking["matrices"] - blocks}
    lines = {
        "goose": (spiking, energy(spiking)),
        "goose, keys and values dense": (dense, energy(dense)),
        f"transformer, {context} tokens read": (
            counts := operations(transformer, context=context),
            energy(counts),
        ),
        "if all its matrices read spikes": (head, energy(head) + rate * blocks * ADD / 1e6),
    }
    return [
        {
            "one token": name,
            "thousand multiply-adds": (c["matrices"] + c["attention"]) / 1e3,
            "microjoules": joules,
        }
        for name, (c, joules) in lines.items()
    ]


def curve(
    goose: nn.Module, transformer: nn.Module, *, contexts: Sequence[int], fires: float
) -> show.Picture:
    """Energy of a token against how much was read before it."""
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes, first = figure.subplots(), {}
    for name, model in (("goose", goose), ("transformer", transformer)):
        first[name] = [
            energy(operations(model, context=context, fires=fires)) for context in contexts
        ]
        axes.plot(contexts, first[name], marker=".", label=name)
    axes.set(xlabel="tokens read before", ylabel="microjoules per token", ylim=(0, None))
    figure.legend(frameon=False, loc="outside right center", fontsize=9)
    times = first["transformer"][-1] / first["goose"][-1]
    summary = (
        f"Computed from counted operations. After {contexts[-1]:,} tokens the "
        f"transformer needs {times:.1f} times"
    )
    return show.Picture(
        figure,
        f"{summary} as much; goose needs the same everywhere.",
        title="What one more token costs",
    )
