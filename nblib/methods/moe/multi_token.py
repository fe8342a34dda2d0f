"""Predict several tokens ahead with one linear head each, on the same last hidden state (Gloeckle
et al., 2024).

    loss = sum_i w_i CE(head_i(h_t), token_{t+i}),     w = (1, 0.5, 0.3, 0.2) / 2

The first head is the model's own: it alone is used afterwards, and perplexity is about it alone.
The others train the trunk to keep what later tokens will need; `del model.ahead` removes them. Each
head's loss is chunked, so four heads hold one chunk of logits at a time, not four times tokens x
vocabulary. A record holds the weighted terms, 'ahead1' to 'ahead4'; divide them by `normalised(4)`
to get cross-entropies.

Every head's sum over its own targets is divided by the loop's count, the targets of the first head.
A row has i - 1 targets fewer for head i, so its weight is smaller by that share, a hundredth at
length 256, and accumulation is exact.

Footgun: the first term is half of the language loss. Compare runs by `train.evaluate`, which knows
only the first head.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nblib import losses, wiring
from nblib.train import Batch, Terms

WEIGHTS = (1.0, 0.5, 0.3, 0.2)
NAME = "ahead"


def attach(model: nn.Module, *, heads: int = len(WEIGHTS)) -> nn.ModuleDict:
    """Give the model heads for the 2nd to the `heads`-th next token, stored in `model.ahead`."""
    if heads < 2:
        raise ValueError(f"heads = {heads}: must be at least 2, the model has the first")
    if hasattr(model, NAME):
        raise ValueError(
            f"the model has {1 + len(model.ahead)} heads already: `del model.ahead` first"
        )
    if losses.backbone_and_head(model) is None:
        raise ValueError(f"{type(model).__name__}: its head is more than one matrix product")
    own = model.get_output_embeddings().weight
    vocabulary, hidden = own.shape
    # No ModuleList: the longest one is taken for the decoder layers where a model is compiled block
    # by block.
    model.ahead = nn.ModuleDict(
        {
            str(i): nn.Linear(hidden, vocabulary, bias=False, device=own.device, dtype=own.dtype)
            for i in range(2, heads + 1)
        }
    )
    for head in model.ahead.values():
        nn.init.normal_(head.weight, std=model.config.initializer_range)
    return model.ahead


def normalised(heads: int, weights: tuple[float, ...] = WEIGHTS) -> list[float]:
    if len(weights) < heads or min(weights) < 0 or weights[0] <= 0:
        raise ValueError(
            f"weights = {weights}: one per head ({heads}), none negative, the first above 0"
        )
    return [w / sum(weights[:heads]) for w in weights[:heads]]


def loss(*, weights: tuple[float, ...] = WEIGHTS) -> Callable[[nn.Module, Batch], Terms]:
    """Return a loss for the loop: one weighted term per head."""

    def terms(model: nn.Module, batch: Batch) -> Terms:
        batch = Batch.of(batch)
        hidden, own = losses.hidden_states(model, batch)
        heads = [own, *(head.weight for head in model.ahead.values())]
        parts = zip(normalised(len(heads), weights), heads)
        return {
            f"{NAME}{i}": w * ahead(hidden, weight, batch, i)
            for i, (w, weight) in enumerate(parts, 1)
        }

    return terms


def ahead(hidden: Tensor, weight: Tensor, labels: Tensor | Batch, i: int) -> Tensor:
    """Return the summed cross-entropy of predicting token t + i at t.

    hidden (B, T, D), weight (V, D), labels (B, T)
    """
    all_supervised = isinstance(labels, Batch) and isinstance(labels.supervised, slice)
    if isinstance(labels, Batch):
        labels = labels.labels
    if not 1 <= i < labels.shape[1]:
        raise ValueError(f"i = {i}: must be at least 1 and below the length, {labels.shape[1]}")
    later = labels[:, i - 1 :]  # (B, T - i + 1)
    hidden = hidden[:, : later.shape[1]]
    if all_supervised:  # so all of these are, and nothing has to wait for a card
        rows, targets = hidden[:, :-1].flatten(0, 1), later[:, 1:].flatten()
    else:
        rows, targets = losses.shifted_rows(hidden, later)
    return losses.chunked_loss(rows, weight, targets)


@torch.no_grad()
def evaluate(model: nn.Module, rows: Tensor, *, batch: int = 16) -> list[float]:
    """Cross-entropy per target of every head on rows (R, T): how well each further token is
    known.
    """
    sums, device = [0.0] * (1 + len(model.ahead)), next(model.parameters()).device
    with wiring.evaluating(model):
        for few in rows.split(batch):
            few = few.to(device)
            hidden, own = losses.hidden_states(model, {"input_ids": few})
            for i, weight in enumerate([own, *(head.weight for head in model.ahead.values())]):
                sums[i] += float(ahead(hidden, weight, few, i + 1))
    return [total / (len(rows) * (rows.shape[1] - i)) for i, total in enumerate(sums, 1)]
