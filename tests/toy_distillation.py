"""A distillation in numbers, hidden states and heads without a model; and small models to teach and
to be taught.
"""

import torch
from torch import nn

from nblib import losses, models
from nblib.methods.distill import divergences, objective

B, T, D, V = 4, 12, 16, 53


def problem(seed: int = 0) -> dict:
    """Hidden states and heads of a student (h, w) and a teacher (th, tw), in float64, and ragged
    labels.
    """
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (B, T), generator=draw)
    for row in range(B):
        labels[row, : 3 * row] = losses.IGNORED
    shapes = {"h": (B, T, D), "w": (V, D), "th": (B, T, 9), "tw": (V, 9)}
    tensors = {
        name: torch.randn(*shape, dtype=torch.float64, generator=draw)
        for name, shape in shapes.items()
    }
    return tensors | {"labels": labels}


def distilled(p: dict, temperature: torch.Tensor, **options) -> torch.Tensor:
    scores = divergences.live(temperature.detach(), p["tw"])
    answers = (p["th"],)
    return objective.distillation(
        p["h"], p["w"], p["labels"], answers, scores, temperature=temperature, **options
    )[0]


def other_teacher(**options) -> nn.Module:
    """Another width and depth than the students'."""
    return models.as_teacher(
        models.tiny(256, **(dict(hidden=48, layers=3, heads=2, seed=9) | options))
    )


def confident_teacher() -> nn.Module:
    teacher = other_teacher()
    with torch.no_grad():
        # logits with a spread, so that T^2 KL has its hump inside (0.3, 10)
        teacher.model.embed_tokens.weight.mul_(20)
    return teacher


def ragged(rows: int, length: int = 32) -> dict:
    """A batch of which every row supervises another share of its tokens."""
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(250, (rows, length), generator=draw)
    labels = ids.clone()
    for i in range(rows):
        labels[i, : (i * 5) % (length - 2)] = losses.IGNORED
    return {"input_ids": ids, "labels": labels}
