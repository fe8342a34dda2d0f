"""Mixture of Depths: a layer works on a part of the tokens, the others pass by untouched (Raposo et
al., 2024).

    x_t + sigmoid(r(x_t)) (layer(x)_t - x_t)
    for the tokens chosen,
    x_t
    for the others, to the bit

In training the `capacity` share of each row with the highest scores r is taken, so a step costs the
same whatever the router thinks. The score is a factor of the output, so that r has a gradient. It
is a sigmoid, because a softmax over the chosen has mean 1 / k: it shrinks the layer k-fold in
training and not in use.

Which tokens are highest in a row cannot be known before the row ends. So a second small network
learns to say whether a token will be among them. It reads the same input with its gradient stopped,
and its cross-entropy is the term 'depth' of `loss`. In evaluation a token is worked on if it says
so: from its past alone, so no later token changes an earlier output. With `causal=True` training
decides the same way as inference. The two are then one function, and capacity holds only as well as
the network has learnt it.

The chosen tokens keep their positions and attend to each other: skipped tokens leave no key and no
value here.

Footgun: add the residual to a base that already is the residual, and skipped tokens double at every
layer. A write-up's first version did that, and its loss did not fall; `skipped="doubled"` shows it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nblib import compiling, losses
from nblib.train import Batch, Terms

SKIPPED = ("identity", "doubled")


class DepthLayer(nn.Module):
    """A decoder layer that is run on some of its tokens."""

    def __init__(
        self,
        block: nn.Module,
        hidden: int,
        *,
        capacity: float,
        causal: bool,
        skipped: str,
        first: bool,
    ):
        super().__init__()
        like = next(block.parameters())
        like = dict(device=like.device, dtype=like.dtype)
        self.block, self.capacity, self.causal, self.skipped, self.first = (
            block,
            capacity,
            causal,
            skipped,
            first,
        )
        self.router = nn.Linear(hidden, 1, **like)
        middle = nn.Linear(hidden, hidden // 4, **like)
        self.predictor = nn.Sequential(middle, nn.SiLU(), nn.Linear(hidden // 4, 1, **like))
        for linear in (self.router, self.predictor[0], self.predictor[2]):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        # In causal training everything is worked on at first: of tokens that are never chosen
        # nothing is learnt.
        nn.init.constant_(self.predictor[2].bias, 1.0 if causal else 0.0)
        self.seen: list[Choice] | None = None  # a list while somebody watches

    # what a model asks its layers for, such as their kind of attention
    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(
        self, hidden_states: Tensor, attention_mask=None, position_ids=None, **options
    ) -> Tensor:
        x = hidden_states  # (B, T, D)
        # (B, T)
        scores, guesses = self.router(x).squeeze(-1), self.predictor(x.detach()).squeeze(-1)
        highest = top(scores.detach(), self.capacity)  # (B, T) of booleans
        chosen = highest if self.training and not self.causal else guesses > 0
        if self.seen is not None:
            self.seen.append(Choice(scores, guesses, highest, chosen))
        base = x if self.skipped == "identity" else 2 * x
        # in training the number is known; in evaluation a card is asked for it
        most = (
            most_of(x.shape[1], self.capacity)
            if chosen is highest
            else int(chosen.sum(dim=1).max())
        )
        if most == 0:
            return base
        order = earliest_first(chosen, most)  # (B, n)
        before = _rows(x, order)
        change = self._work(before, order, attention_mask, position_ids, options) - before
        new = before + scores.gather(1, order).sigmoid()[..., None] * change
        new = torch.where(chosen.gather(1, order)[..., None], new.to(x.dtype), _rows(base, order))
        return base.scatter(1, order[..., None].expand_as(new), new)

    def _work(
        self, some: Tensor, order: Tensor, mask: Tensor | None, positions, options: dict
    ) -> Tensor:
        one_more = False
        if (cache := options.get("past_key_values")) is not None:
            one_more = self._one_more(order, positions, cache)
        if positions is not None:
            positions = positions.expand(len(order), -1).gather(1, order)
        if (turned := options.get("position_embeddings")) is not None:
            turned = tuple(_rows(part.expand(len(order), -1, -1), order) for part in turned)
            options = options | {"position_embeddings": turned}
        # a single token sees all that this layer has kept
        mask = None if one_more else _between(mask, order)
        return self.block(some, attention_mask=mask, position_ids=positions, **options)

    def _one_more(self, order: Tensor, positions: Tensor, cache) -> bool:
        """Whether this is a step of generation.

        A cache can be kept for one row, from its beginning.
        """
        if self.first:
            raise ValueError(
                "use_cache: a model counts cached tokens in its first layer, and that one "
                "skips some here"
            )
        if len(order) > 1:
            raise ValueError(
                f"use_cache with {len(order)} rows: what a layer keeps differs by row, so one "
                "row only"
            )
        if positions.shape[-1] > 1 and int(positions[..., 0].max()) > 0:
            raise ValueError(
                "use_cache with several tokens after others: start from the beginning, or one "
                "at a time"
            )
        return positions.shape[-1] == 1


class Choice(NamedTuple):
    """What a layer decided about each token in one forward pass, all (B, T)."""

    scores: Tensor
    guesses: Tensor  # of the network that decides in evaluation
    highest: Tensor
    chosen: Tensor


@contextmanager
def choices(model: nn.Module) -> Iterator[dict[str, list[Choice]]]:
    """Collect what the layers choose in the forward passes inside."""
    layers = wrapped(model)
    for m in layers.values():
        m.seen = []
    try:
        yield {name: m.seen for name, m in layers.items()}
    finally:
        for m in layers.values():
            m.seen = None


def top(scores: Tensor, capacity: float) -> Tensor:
    """Return the `capacity` share of each row with the highest scores, at least one, as booleans
    (B, T).
    """
    picked = scores.topk(most_of(scores.shape[1], capacity), dim=1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, picked, True)


def most_of(length: int, capacity: float) -> int:
    return max(1, math.ceil(capacity * length))


def earliest_first(chosen: Tensor, most: int) -> Tensor:
    """Positions of the chosen tokens in their order, (B, n), where no row has more than `most` of
    them.

    Rows with fewer than the most are filled up with tokens that were not chosen. They come after
    all that were, so under a causal mask nobody chosen sees them, and their outputs are thrown
    away.
    """
    return torch.sort(~chosen, dim=1, stable=True).indices[:, :most]


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """x (B, T, D) at positions (B, n)."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def _between(mask: Tensor | None, order: Tensor) -> Tensor | None:
    """Return the mask (B, 1, T, T) among the tokens at work.

    No mask means causal, and stays so for tokens in order.
    """
    if mask is None:
        return None
    if mask.ndim == 2:  # (B, T), a layer without attention: which positions are padding
        return mask.gather(1, order)
    if mask.ndim != 4 or mask.shape[2] != mask.shape[3]:
        raise ValueError(
            f"attention mask of shape {tuple(mask.shape)}: only (B, T) and (B, 1, T, T) can be cut"
        )
    n, mask = order.shape[1], mask.expand(len(order), -1, -1, -1)
    mask = mask.gather(2, order[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))
    mask = mask.gather(3, order[:, None, None, :].expand(-1, mask.shape[1], n, -1))
    later = torch.ones(n, n, dtype=torch.bool, device=mask.device).triu(1)
    return mask.masked_fill(
        later, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    )


def attach(
    model: nn.Module,
    *,
    capacity: float = 0.75,
    layers: list[int] | None = None,
    causal: bool = False,
    skipped: str = "identity",
) -> list[int]:
    """Let decoder layers skip tokens; every second one by default. Returns their numbers."""
    if not 0 < capacity <= 1:
        raise ValueError(f"capacity = {capacity}: must be above 0 and at most 1")
    if skipped not in SKIPPED:
        raise ValueError(f"skipped = {skipped!r}: allowed are {', '.join(SKIPPED)}")
    trunk = model.base_model
    stack = next(
        m
        for m in trunk.modules()
        if isinstance(m, nn.ModuleList) and list(m) == compiling.blocks(trunk)
    )
    layers = list(range(1, len(stack), 2)) if layers is None else layers
    if wrong := [i for i in layers if not 0 <= i < len(stack) or isinstance(stack[i], DepthLayer)]:
        raise ValueError(
            f"layers = {layers}: {wrong[0]} is not one of 0 to {len(stack) - 1}, or is wrapped "
            "already"
        )
    for i in layers:
        options = dict(capacity=capacity, causal=causal, skipped=skipped, first=i == 0)
        stack[i] = DepthLayer(stack[i], model.config.hidden_size, **options)
        stack[i].train(model.training)
    return layers


def wrapped(model: nn.Module) -> dict[str, DepthLayer]:
    return {name: m for name, m in model.named_modules() if isinstance(m, DepthLayer)}


def loss(
    language: Callable[[nn.Module, Batch], Terms] = losses.causal_lm, *, weight: float = 0.01
) -> Callable[[nn.Module, Batch], Terms]:
    """Return a loss for the loop: the terms of `language`, and 'depth', the predictors'
    cross-entropy.
    """
    if weight <= 0:
        raise ValueError(
            f"weight = {weight}: must be above 0, or the predictors of evaluation learn nothing"
        )

    def terms(model: nn.Module, batch: Batch) -> Terms:
        with choices(model) as chosen:
            values = language(model, batch)
        nats = [
            F.binary_cross_entropy_with_logits(c.guesses.float(), c.highest.float())
            for (c,) in chosen.values()
        ]
        tokens = losses.supervised(batch["labels"])
        return values | ({"depth": weight * torch.stack(nats).mean() * tokens} if nats else {})

    return terms
