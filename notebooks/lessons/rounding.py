"""What a bf16 weight keeps of an update, as a table and as a picture, and what each way of keeping
all of it costs.

    step(w) = 2^(floor(log2 |w|) - 7)        w + u differs from w in bf16 if |u| > step(w) / 2

`survival` draws that border for all weights; notebook 03 moves its point with two sliders.

Footgun: below a power of two the numbers lie twice as close, so a weight of exactly 1 keeps a
smaller update downwards than upwards. The picture shows the border upwards.
"""

from collections.abc import Iterable

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import AdamW

from nblib.methods.muon import Muon
from nblib.methods.muon.bf16_adamw import BF16AdamW, survives
from nbworkbook import show

WEIGHTS = {"norms": 1.0, "matrices": 0.02}  # how large the weights of a language model usually are
RATES = (1e-5, 1e-4, 1e-3)


def survival_table(updates: Iterable[float]) -> show.Table:
    """Which updates move a bf16 weight of 1 upwards and downwards, and one of a matrix."""
    cases = {"1 + u moves": (1.0, 1), "1 - u moves": (1.0, -1), "0.02 + u moves": (0.02, 1)}
    rows = [
        {"update u": u} | {name: survives(w, sign * u) for name, (w, sign) in cases.items()}
        for u in updates
    ]
    return show.Table(rows, caption="one update of a bf16 weight")


def survival(weight: float, update: float) -> show.Picture:
    """One update as a point over the border of all weights."""
    weights = torch.logspace(-4, 3, 1400, dtype=torch.float64).bfloat16()
    above = torch.nextafter(weights, torch.full_like(weights, torch.inf))
    weights, border = weights.double(), (above.double() - weights.double()) / 2
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.loglog(weights, border, linewidth=1, color="black")
    axes.fill_between(weights, 1e-8, border, alpha=0.15, color="tab:red")
    for name, at in WEIGHTS.items():
        axes.axvline(at, color="tab:gray", linestyle=":")
        axes.text(at, 25, f" {name}", color="tab:gray")
    for rate in RATES:
        axes.axhline(rate, color="tab:blue", linestyle="--", linewidth=0.8)
    moves = survives(weight, update)
    axes.plot(weight, update, "o", color="tab:green" if moves else "tab:red")
    axes.set(xlabel="weight", ylabel="update", ylim=(1e-8, 100))
    verdict = "survives (green point)" if moves else "is rounded away (red point)"
    return show.Picture(
        figure,
        f"An update of {update:.2g} on a bf16 weight of {weight:.2g} {verdict}. Updates in the "
        "red area vanish; the "
        "black line above it is half a bf16 step. Blue dashes: what AdamW adds at rates of "
        "1e-5, 1e-4 and 1e-3.",
        title="Which updates a bf16 weight keeps",
    )


def bytes_per_weight() -> list[dict]:
    """Bytes of a weight, its gradient and its optimizer's state, counted in the tensors after one
    step.
    """
    ways = {
        "fp32 weights, AdamW": (torch.float32, lambda p: AdamW(p, lr=1e-3)),
        "fp32 weights, Muon": (torch.float32, lambda p: Muon(p, compute="fp32")),
        "bf16 weights, AdamW": (torch.bfloat16, lambda p: AdamW(p, lr=1e-3)),
        "bf16 weights, stochastic rounding": (
            torch.bfloat16,
            lambda p: BF16AdamW(p, lr=1e-3, way="stochastic"),
        ),
        "bf16 weights, Kahan summation": (
            torch.bfloat16,
            lambda p: BF16AdamW(p, lr=1e-3, way="kahan"),
        ),
    }
    return [{"way": name} | _bytes(dtype, make) for name, (dtype, make) in ways.items()]


def _bytes(dtype: torch.dtype, make) -> dict[str, int]:
    weight = nn.Parameter(torch.ones(8, 8, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    optimizer = make([weight])
    optimizer.step()
    tensors = [
        t
        for t in optimizer.state[weight].values()
        if isinstance(t, Tensor) and t.shape == weight.shape
    ]
    parts = {"weight": weight.element_size(), "gradient": weight.grad.element_size()}
    parts["optimizer"] = sum(t.element_size() for t in tensors)
    return parts | {"bytes in all": sum(parts.values())}
