"""Notebook 11: which ranks a KL cost silences, and the noisy latent of an ARD-LoRA adapter.

Footgun: `silent_ranks` is the smallest case that has the effect, one latent per line and Gaussian
inputs. Its threshold is exact there, and only a picture of what happens in a model.
"""

import torch
from matplotlib.figure import Figure

from lessons.drawings import FROZEN, LOSS, STORED, TRAINED, Sketch
from nblib.methods import ard
from nbworkbook import show


def _share_kept(strength: torch.Tensor, beta: torch.Tensor, steps: int = 160) -> torch.Tensor:
    """Train a latent per pair to tell y = a x, x ~ N(0, 1), at a cost of beta a nat; the share of
    y's variance.
    """
    mean, logvar, up = (
        torch.full_like(strength * beta, start).requires_grad_() for start in (1.0, -2.0, 0.5)
    )
    adam = torch.optim.Adam([mean, logvar, up], lr=0.08)
    for _ in range(steps):  # expectations over x and the noise are exact here, so nothing is drawn
        noise, prior = logvar.exp(), mean.square() + logvar.exp()
        misfit = 0.5 * ((strength - up * mean).square() + up.square() * noise)
        kl = ard.divergence(torch.zeros_like(mean), logvar, prior) + 0.5 * mean.square() / prior
        adam.zero_grad()
        (misfit + beta * kl).sum().backward()
        adam.step()
    left = (strength - up * mean).square() + up.square() * logvar.exp()
    return (1 - left / strength.square()).detach()


def silent_ranks() -> show.Picture:
    """Share of its signal that a latent carries, over the strength of the signal, by the cost of a
    nat.
    """
    strength, betas = torch.linspace(0.1, 2.0, 39), (0.0, 0.1, 0.5)
    figure = Figure(figsize=(6.8, 2.6), layout="constrained")
    axes = figure.add_subplot()
    shares = _share_kept(strength, torch.tensor(betas)[:, None])  # (betas, strengths)
    for beta, share, colour in zip(betas, shares, ("0.6", "tab:blue", "tab:orange")):
        label = f"beta = {beta:g}" if beta else "beta = 0,\nplain LoRA"
        axes.plot(strength, 100 * share, marker=".", color=colour, label=label)
        if beta:
            axes.axvline(beta**0.5, color=colour, linestyle=":")
    axes.set(
        xlabel="strength a of the signal", ylabel="share carried (%)", xlim=(0, 2), ylim=(-4, 104)
    )
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside right upper", fontsize=8.5)
    words = (
        "Each dot is a noisy latent, trained to pass on a signal of strength a. Without a KL "
        "cost (grey) it carries "
        "all of its signal. With one (blue, orange) a latent whose signal is too weak carries "
        "nothing at all. Dotted: "
        "a * a = beta, where theory puts the border."
    )
    return show.Picture(figure, words, title="A KL cost switches weak ranks off")


def latent() -> show.Picture:
    """Return the forward pass of `ARDLinear`, and what reaches the loss."""
    sketch = Sketch(7.4, 2.6)
    x = sketch.box(0.45, 1.5, "x", width=0.55)
    base = sketch.box(1.7, 2.3, "base", fill=FROZEN)
    to_mean = sketch.box(1.7, 1.6, "lora_mean", fill=TRAINED)
    to_logvar = sketch.box(1.7, 1.0, "lora_logvar", fill=TRAINED)
    mean, logvar = (
        sketch.box(3.05, 1.6, "mean", width=0.8),
        sketch.box(3.05, 1.0, "logvar", width=0.8),
    )
    z = sketch.box(4.6, 1.3, "z ~ N(mean, e^logvar)", width=1.6)
    up = sketch.box(6.15, 1.3, "lora_up", width=0.9, fill=TRAINED)
    add, y = sketch.box(6.15, 2.3, "+", width=0.4), sketch.box(7.1, 2.3, "y", width=0.5)
    prior = sketch.box(3.05, 0.3, "prior", width=0.8, fill=STORED)
    kl = sketch.box(4.6, 0.3, "kl", width=0.8, fill=LOSS)
    loss = sketch.box(6.35, 0.3, "loss = ce + beta * kl", width=1.75, fill=LOSS)
    arrows = [
        (x, base),
        (x, to_mean),
        (x, to_logvar),
        (to_mean, mean),
        (to_logvar, logvar),
        (mean, z),
        (logvar, z),
    ]
    arrows += [(z, up), (up, add), (base, add), (add, y), (z, kl), (prior, kl), (kl, loss)]
    for start, end in arrows:
        sketch.arrow(start, end)
    words = (
        "Grey is frozen, blue is trained. A rank is one latent z: drawn around its mean in "
        "training, its mean at "
        "inference. Red: what z tells about x costs kl nats, measured against the prior "
        "(yellow), one variance per "
        "rank, which is fitted to held-out text."
    )
    return sketch.picture(words, title="ARDLinear: a LoRA adapter whose ranks are noisy latents")
