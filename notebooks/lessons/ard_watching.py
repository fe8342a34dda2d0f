"""What notebook 11 watches in a run of ARD-LoRA: latents, gradients of each term, relevance in
words, next tokens.

    statistics      log-variances and KL per layer, over the real tokens
    latents         mean and log-variance of every adapter, for a scatter of two ranks
    gradient_norms  of every loss term, by `autograd.grad`, which leaves `.grad` alone
    predictions     what the model would say next after the same prompts
    table           how relevant each layer is, by each measure

Footgun: a probe that zeroes gradients in the loop also deletes those of the micro-batches before
it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nblib import losses, runtime, wiring
from nblib.losses import Batch, Loss
from nblib.methods.ard import adapters, divergence, passes, ranks


def statistics(
    model: nn.Module, batches: Iterable[Batch], *, machine: runtime.Machine | None = None
) -> list[dict]:
    """Return a row per layer over the real tokens: log-variance (min, mean, max, std), rms of the
    mean, KL in nats a token.

    A deterministic adapter has no log-variance (None), and the loss asks no KL of it (0).
    """
    rows = []
    for name, (mean, logvar) in latents(model, batches, machine=machine).items():
        row, noisy = {"layer": name}, adapters(model)[name].lora_logvar is not None
        for of in ("min", "mean", "max", "std"):
            row[f"logvar {of}"] = float(getattr(logvar, of)()) if noisy else None
        kl = divergence(mean, logvar, adapters(model)[name].prior).sum(-1).mean() if noisy else 0.0
        rows.append(row | {"mean rms": float(mean.square().mean().sqrt()), "kl": float(kl)})
    return rows


def latents(
    model: nn.Module, batches: Iterable[Batch], *, machine: runtime.Machine | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and log-variance (tokens, r) of every adapter over the real tokens, for a scatter of two
    ranks.
    """
    parts: dict[str, list] = {name: [] for name in adapters(model)}
    for seen, mask in passes(model, batches, machine=machine):
        for name, calls in seen.items():
            parts[name] += [
                [x.reshape(mask.numel(), -1)[mask.flatten()] for x in call[:2]] for call in calls
            ]
    return {
        name: tuple(torch.cat(column) for column in zip(*calls)) for name, calls in parts.items()
    }


def gradient_norms(
    model: nn.Module, batch: Batch, loss: Loss, *, machine: runtime.Machine | None = None
) -> list[dict]:
    """Return a row per adapter: gradient norm of each loss term and of their sum, per supervised
    token.

    `.grad` and the random generators stay as they are, so it may be called between any two steps.
    """
    params, before = wiring.trainable(model), runtime.generators()
    tokens = losses.supervised(batch["labels"])
    try:
        # a compiled block gives its graph away in the first backward pass, and each term needs it
        with (
            machine.autocast() if machine else torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            terms = {
                name: term / tokens
                for name, term in loss(model, batch).items()
                if term.requires_grad
            }
        gradients = {}
        for name, term in terms.items():
            grads = torch.autograd.grad(
                term, list(params.values()), retain_graph=True, allow_unused=True
            )
            gradients[name] = {
                n: torch.zeros_like(p) if g is None else g
                for (n, p), g in zip(params.items(), grads)
            }
    finally:
        runtime.set_generators(before)
    rows = []
    for layer, adapter in adapters(model).items():
        own = [f"{layer}.{p}" for p, _ in adapter.named_parameters(recurse=False)]
        norms = {name: _norm(grads[p] for p in own) for name, grads in gradients.items()}
        rows.append(
            {
                "layer": layer,
                **norms,
                "total": _norm(sum(g[p] for g in gradients.values()) for p in own),
            }
        )
    return rows


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.cat([t.flatten() for t in tensors]).norm())


@torch.no_grad()
def predictions(model: nn.Module, tokenizer, prompts: list[str], *, top: int = 3) -> list[dict]:
    """Return what the model would say next, with its probability: the same prompts at every epoch
    show what changes.
    """
    rows, device = [], next(model.parameters()).device
    with wiring.evaluating(model):
        for prompt in prompts:
            ids = torch.tensor(
                [tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=device
            )
            if not ids.numel():
                raise ValueError(
                    f"prompts: {prompt!r} has no token, so there is nothing to go on from"
                )
            best = model(input_ids=ids, use_cache=False).logits[0, -1].float().softmax(-1).topk(top)
            row = {"prompt": prompt}
            for n, (p, token) in enumerate(zip(best.values.tolist(), best.indices.tolist()), 1):
                row |= {f"{n}": tokenizer.decode([token]), f"p{n}": p}
            rows.append(row)
    return rows


def table(model: nn.Module, *, thresholds: tuple[float, float] = (0.01, 0.1)) -> list[dict]:
    """Return a row per layer: mean prior variance and its word, ranks per word, and the share of
    each measure it holds.
    """
    scores = {by: ranks.relevance(model, by=by) for by in ranks.MEASURES}
    totals = {by: float(sum(s.sum() for s in scores[by].values())) or 1.0 for by in ranks.MEASURES}
    rows = []
    for name, v in scores["variance"].items():
        words = [ranks.grade(x, thresholds) for x in v.tolist()]
        row = {"layer": name, "ranks": len(v), "mean variance": float(v.mean())}
        row |= {"relevance": ranks.grade(float(v.mean()), thresholds)}
        row |= {word: words.count(word) for word in ("High", "Medium", "Low")}
        rows.append(
            row
            | {
                f"share of {by}": float(scores[by][name].sum()) / totals[by]
                for by in ranks.MEASURES
            }
        )
    return rows
