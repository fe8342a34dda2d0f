"""Last-layer Laplace: a Gaussian around the head's weights, made after training, without a
gradient.

Logits are linear in the head, f_c = w_token(c) . h, so the Hessian of the loss in the head is
exact:

    H = tau I + sum over questions of J^T (diag p - p p^T) J,
    logits of a new question ~ N(f, J* H^-1 J*^T)

H would be (V D) x (V D). But only J J^T is ever needed: the questions see the head through their N
C logits, and two of them share a weight only where the choices are the same token, so with S S^T =
diag p - p p^T

    (J J^T)[(i, c), (j, d)] = h_i . h_j [token_ic = token_jd]
    J* H^-1 J*^T = 1/tau ( J* J*^T - (J* J^T S) (tau I + S^T J J^T S)^-1 (J* J^T S)^T )

by Woodbury's identity, exact for any vocabulary. Choices may differ from question to question. The
prediction is the mean of softmax over draws of the logits (arXiv:2106.14806; for adapters
arXiv:2308.13111, which uses all factors).

tau, the precision of the prior, decides everything here; `choose` takes the one of lowest NLL on
validation questions.

Footgun: the mean of the Gaussian are the trained weights, so with a large tau this is the plain
model again.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from nblib import runtime

PRECISIONS = tuple(10.0**power for power in torch.arange(-1, 4.1, 0.5).tolist())


class Posterior(NamedTuple):
    """What of the training questions is needed: J S, as its parts, and the eigenvectors of S^T J
    J^T S.
    """

    hidden: Tensor  # (N, D)
    tokens: Tensor  # (N, C)
    root: Tensor  # S, (N, C, C)
    values: Tensor  # (N C,)
    vectors: Tensor  # (N C, N C)


def fit(hidden: Tensor, tokens: Tensor, logits: Tensor) -> Posterior:
    """From the training questions: hidden states (N, D), tokens of the choices (N, C), -1 for none,
    logits (N, C).
    """
    hidden, p = hidden.double(), logits.double().softmax(-1)
    # S S^T = diag p - p p^T
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    n, c = tokens.shape
    seen = torch.einsum("icjd,jde->icje", _products(hidden, tokens, hidden, tokens), root)
    gram = torch.einsum("icf,icje->ifje", root, seen).reshape(n * c, n * c)
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    return Posterior(hidden, tokens, root, values.clamp_min(0), vectors)


def covariance(posterior: Posterior, hidden: Tensor, tokens: Tensor, *, precision: float) -> Tensor:
    """Of the logits of other questions, (M, C, C)."""
    if not precision > 0:
        raise ValueError(f"precision = {precision}: must be positive")
    hidden, (m, c) = hidden.double(), tokens.shape
    own = hidden.square().sum(-1)[:, None, None] * _same(tokens[:, :, None], tokens[:, None, :])
    cross = _products(hidden, tokens, posterior.hidden, posterior.tokens)  # (M, C, N, C)
    known = (
        torch.einsum("icjd,jde->icje", cross, posterior.root).reshape(m * c, -1) @ posterior.vectors
    )
    known = known.view(m, c, -1)
    return (
        own - torch.einsum("ick,idk->icd", known / (precision + posterior.values), known)
    ) / precision


def predict(logits: Tensor, covariance: Tensor, *, samples: int = 256, seed: int = 0) -> Tensor:
    """Mean of the probabilities over draws of the logits, (M, C)."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt()[:, None, :]
    with runtime.seeded(seed):
        draws = torch.randn(samples, *logits.shape, dtype=torch.float64)
    noise = torch.einsum("icd,sid->sic", root, draws)
    return (logits.double() + noise).softmax(-1).mean(0)


def choose(
    posterior: Posterior,
    hidden: Tensor,
    tokens: Tensor,
    logits: Tensor,
    answer: Tensor,
    *,
    precisions: Iterable[float] = PRECISIONS,
) -> float:
    """Return the precision of the lowest NLL on these questions, which should be neither of
    training nor of the result.
    """
    nats = {}
    for tau in precisions:
        p = predict(logits, covariance(posterior, hidden, tokens, precision=tau))
        nats[tau] = float(-p.gather(1, answer[:, None]).clamp_min(1e-30).log().mean())
    return min(nats, key=nats.get)


def _products(h: Tensor, tokens: Tensor, other: Tensor, others: Tensor) -> Tensor:
    """J J'^T, (M, C, N, C)."""
    return (h @ other.T)[:, None, :, None] * _same(tokens[:, :, None, None], others[None, None])


def _same(a: Tensor, b: Tensor) -> Tensor:
    return ((a == b) & (a >= 0)).double()
