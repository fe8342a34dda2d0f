"""What an update of Muon does to a matrix: the tables and the picture of notebook 12.

For G = U S V^T the update is U response(S / |G|) V^T. Its size depends on the shape of G and not on
the size of G. `spectra` compares the five products that compute it with the decomposition; `rates`
says how far a rate moves a matrix.

Footgun: an expert that got no token has a gradient of zero. Its singular values are zeros, and no
norm divides them.
"""

import math

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from nblib.methods import muon
from nblib.methods.muon import audit, groups
from nbworkbook import show

CUBIC = (1.5, -0.5, 0.0)  # the older iteration, which converges to 1 and needs many more rounds
FALLS = 0.005  # a smaller singular value may end below the band


def by_reason(rows: list[audit.Row]) -> list[dict]:
    """One line per optimizer and reason: tensors, entries, and where a split by `ndim == 2` puts
    them.
    """
    sums: dict[tuple[str, str], dict] = {}
    for row in rows:
        entry = sums.setdefault(
            (row.is_in, row.reason), {"tensors": 0, "entries": 0, "by ndim == 2": _by_ndim(row)}
        )
        entry["tensors"] += 1
        entry["entries"] += math.prod(row.shape)
    return [{"in": kind, "reason": reason, **entry} for (kind, reason), entry in sums.items()]


def misplaced(rows: list[audit.Row]) -> int:
    """How many tensors a split by `ndim == 2` puts into the wrong optimizer."""
    return sum(_by_ndim(row) != row.belongs_in for row in rows)


def _by_ndim(row: audit.Row) -> str:
    return "Muon" if len(row.shape) == 2 else "AdamW"


def last_layer(model: nn.Module, layers: int) -> dict[str, Tensor]:
    """Gradients in float64 of the parameters of the last layer that belong in Muon."""
    assigned = groups.assign(model)
    return {
        name.removeprefix("model."): p.grad.double()
        for name, p in model.named_parameters()
        if assigned[name].optimizer == "Muon" and f".{layers - 1}." in name and p.grad is not None
    }


def spectra(measured: dict[str, tuple[Tensor, Tensor, Tensor]]) -> list[dict]:
    """One line per parameter: singular values over the norm, those above FALLS after, and the error
    of the update.
    """
    return [
        {
            "parameter": name,
            "shape": str(tuple(update.shape)),
            "least": float(s.min()),
            "largest": float(s.max()),
            f"above {FALLS}, after": "{:.2f} to {:.2f}".format(*_ends(muon.response(s[s > FALLS]))),
            "error of ours": float((update - exact).abs().max()),
        }
        for name, (s, update, exact) in measured.items()
    ]


def _ends(values: Tensor) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def in_band(values: list[Tensor]) -> bool:
    """Whether every singular value above FALLS ends within muon.BAND."""
    low, high = muon.BAND
    return all(low < f < high for s in values for f in muon.response(s[s > FALLS]).tolist())


def left_behind(values: list[Tensor], coefficients: tuple[float, float, float]) -> float:
    """Share of singular values that five rounds leave below a half."""
    return float(
        (muon.response(torch.cat(values), coefficients=coefficients) < 0.5).double().mean()
    )


def response(values: list[Tensor]) -> show.Picture:
    """Both iterations as curves over the singular values of real gradients."""
    s = torch.logspace(-4, 0, 400, dtype=torch.float64)
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    axes = figure.add_subplot()
    axes.axhspan(*muon.BAND, color="0.9", label="band around 1")
    for label, coefficients in {"quintic, 5 times": muon.QUINTIC, "cubic, 5 times": CUBIC}.items():
        axes.plot(s, muon.response(s, coefficients=coefficients), label=label)
    drawn = torch.cat(values).clamp_min(1e-4).cpu()
    weights = torch.full_like(drawn, 3 / len(drawn))
    axes.hist(drawn, bins=s[::10], weights=weights, alpha=0.3, color="green", label="gradients")
    axes.set(
        xscale="log",
        xlabel="singular value over the norm of the matrix",
        ylabel="after five rounds",
    )
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    words = (
        f"Five rounds leave {left_behind(values, CUBIC):.0%} of the singular values below a "
        "half by the cubic, and "
        f"{left_behind(values, muon.QUINTIC):.0%} by the quintic. Lines: what becomes of a "
        "singular value. Green: how "
        "many singular values of the gradients lie there."
    )
    return show.Picture(figure, words, title="What five rounds make of a singular value")


def rates(name: str, options: dict, steps: list[dict], doubts: list[str]) -> dict:
    """One line: both rates, and how far one step moves the matrices over their own size."""
    ratio = sorted(row["ratio"] for row in steps)
    moved = f"{ratio[0]:.2%} to {ratio[-1]:.2%}"
    named = {"rates": name, "Muon": options["lr"], "AdamW": options["adamw_lr"]}
    return named | {"one step, of the weights": moved, "doubtful": len(doubts)}
