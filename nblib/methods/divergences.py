"""How far apart two next-token distributions are: losses row by row, with every gradient in closed form.

    forward   KL(p || q)                covers all that the teacher thinks possible
    reverse   KL(q || p)                stays where the teacher is sure
    js        mean of the KLs of p and q to (p + q) / 2
    soft_ce   - sum p log q             = forward + entropy of p: the same gradient, but never 0

with p = softmax(t / T) the teacher's, q = softmax(s / T) the student's. `mixed_rows` adds cross-entropy with the labels
from the same logits. Its gradient with respect to T costs no second pass: with a = s / T and b = t / T,

    L = T^2 D(b, a),        dL / dT = T (2 D - <dD/da, a> - <dD/db, b>).

Against a cache of the k largest there are four ways to read the tail, all that is not in them:

    drawn     the tail goes in equal parts to a few tokens that were drawn from it: the gradient of forward and soft_ce
              is that of the whole distribution in the mean (compare sparse logit sampling, arXiv:2503.16870)
    spread    the tail goes to the other tokens in proportion to its mean probabilities: D over all of them
    bucket    the others are one class, for the student too, whose gradient is dealt out by its own shares. What the
              teacher thinks inside the bucket is not taught, so a student from scratch does not learn it
    none      the k are renormalised

Footgun: `none` looks harmless. It claims that the teacher thinks all others impossible, and the student, who has the
whole vocabulary, is taught so.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nblib import losses
from nblib.methods import teacher_cache

NEVER = -1e4  # a score whose probability is exactly 0, and 0 times it as well
Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Callable[[], Tensor]]]
# log p, log q (n, C) -> D (n,), its gradient with respect to the scores of q (n, C), and on request to those of p
Scores = Callable[..., tuple[Tensor, Tensor, Callable[[], Tensor], Callable[[Tensor], Tensor]]]
# s / T (n, V), what the teacher said -> scores of q and of p (n, C); on request d (scores of p) / d log(1 / T); and how
# a gradient of q's scores becomes one of s / T


def forward_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    p, gap = log_p.exp(), log_p - log_q
    value = (p * gap).sum(1)
    return value, log_q.exp().sub_(p), lambda: p * (gap - value[:, None])


def reverse_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    value, d_p, d_q = forward_kl(log_q, log_p)
    return value, d_q(), lambda: d_p


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    middle = torch.logaddexp(log_p, log_q).sub_(math.log(2))
    value_p, _, d_p = forward_kl(log_p, middle)  # the middle's own gradients add up to nothing
    value_q, _, d_q = forward_kl(log_q, middle)
    return (value_p + value_q) / 2, d_q() / 2, lambda: d_p() / 2


def soft_cross_entropy(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    p = log_p.exp()
    value = -(p * log_q).sum(1)
    return value, log_q.exp().sub_(p), lambda: -p * (log_q + value[:, None])


DIVERGENCES = {"forward": forward_kl, "reverse": reverse_kl, "js": jensen_shannon, "soft_ce": soft_cross_entropy}
TAILS = ("drawn", "spread", "bucket", "none")


def check(divergence: str, tail: str, teacher: object = None) -> None:
    """Refuse what does not exist, and a tail that this divergence or the teacher's cache cannot give."""
    for name, value, allowed in (("divergence", divergence, DIVERGENCES), ("tail", tail, TAILS)):
        if value not in allowed:
            raise ValueError(f"{name} = {value!r}: allowed are {', '.join(allowed)}")
    if not isinstance(teacher, teacher_cache.Cache) or not teacher.k:
        return
    if tail in ("drawn", "none") and divergence not in ("forward", "soft_ce"):
        raise ValueError(
            f"tail = {tail!r}: it excludes tokens, which divergence = {divergence!r} cannot measure; use 'spread' or "
            "'bucket'"
        )
    if tail == "drawn" and not teacher.draws:
        raise ValueError("tail = 'drawn': the cache was made with draws = 0")


def live(temperature: Tensor, weight: Tensor) -> Scores:
    """Scores over the vocabulary, the teacher's made from its hidden states (n, D) and its head (V, D)."""

    def scores(a: Tensor, h: Tensor):
        b = ((h @ weight.T).to(a.dtype) / temperature).clamp_min_(NEVER)
        return a, b, lambda: b, lambda d_a: d_a

    return scores


def stored(temperature: Tensor, cache: teacher_cache.Cache, *, tail: str = "drawn", at: float | None = None) -> Scores:
    """Scores made from what a cache holds: all tokens, or k of them and their tail, read in one of four ways. `at` is
    the temperature again where the host knows it; a learned one is left on its device, whose answer would be a wait."""
    check("forward", tail)
    if cache.k and tail != "none":
        known = temperature if at is None and temperature.is_cuda else at or float(temperature)
        of_knot = [_vector(w, temperature) for w in cache.tail_weights(known)]

    def everything(a: Tensor, values: Tensor):
        b = (values.to(a.dtype) / temperature).clamp_min_(NEVER)
        return a, b, lambda: b, lambda d_a: d_a

    def last(a: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
        """The score of the tail (n, 1), and its derivative by log(1 / T)."""
        if tail == "none":
            return a.new_full((len(a), 1), NEVER), a.new_zeros((len(a), 1))
        flat = a.new_full((len(a), 1), math.log(cache.vocabulary - cache.k))  # at infinite temperature
        knots = torch.cat([flat, tails.to(a.dtype)], 1)
        return tuple(knots @ w.to(a.dtype)[:, None] for w in of_knot)

    def drawn(a: Tensor, values: Tensor, indices: Tensor, tails: Tensor, tokens: Tensor):
        top, (whole, slope) = values.to(a.dtype) / temperature, last(a, tails)
        times = (tokens[:, :, None] == tokens[:, None, :]).sum(2)  # (n, draws), how often each was drawn
        part = whole + (times.to(a.dtype) / cache.draws).log()
        b = torch.full_like(a, NEVER).scatter_(1, tokens, part).scatter_(1, indices, top)

        def slopes() -> Tensor:
            return torch.zeros_like(a).scatter_(1, tokens, slope.expand_as(part)).scatter_(1, indices, top)

        return a, b, slopes, lambda d_a: d_a

    def spread(a: Tensor, values: Tensor, indices: Tensor, tails: Tensor, _: Tensor):
        top, (whole, slope) = values.to(a.dtype) / temperature, last(a, tails)
        prior = (cache.prior.to(a) / temperature).clamp_min_(NEVER)  # (V,)
        shares = prior.expand_as(a).scatter(1, indices, NEVER)  # (n, V)
        together = shares.logsumexp(1, keepdim=True)

        def slopes() -> Tensor:
            mean = ((shares - together).exp_() * prior).sum(1, keepdim=True)
            return (prior + (slope - mean)).scatter_(1, indices, top)

        return a, (shares + (whole - together)).scatter_(1, indices, top), slopes, lambda d_a: d_a

    def bucket(a: Tensor, values: Tensor, indices: Tensor, tails: Tensor, _: Tensor):
        others = a.scatter(1, indices, NEVER)  # (n, V)
        together = others.logsumexp(1, keepdim=True)  # (n, 1)
        share = others.sub_(together).exp_()  # of each in the bucket; 0 for the k
        top, (whole, slope) = values.to(a.dtype) / temperature, last(a, tails)

        def dealt(d_a: Tensor) -> Tensor:  # (n, k + 1) -> (n, V)
            return share.mul_(d_a[:, -1:]).scatter_(1, indices, d_a[:, :-1])

        ours = torch.cat([a.gather(1, indices), together], 1)
        return ours, torch.cat([top, whole], 1), lambda: torch.cat([top, slope], 1), dealt

    return everything if not cache.k else {"drawn": drawn, "spread": spread}.get(tail, bucket)


def _vector(numbers: list[float] | list[Tensor], like: Tensor) -> Tensor:
    """On the device of `like`, filled there, because a copy from the host waits; (n,), fp64."""
    return torch.stack([torch.full_like(like, 1.0, dtype=torch.float64) * x for x in numbers])


def mixed_rows(
    divergence: Divergence, temperature: Tensor, scores: Scores, *, kd: float = 1.0, ce: float = 0.0, tally: dict
) -> losses.RowLoss:
    """The row loss kd T^2 D + ce (cross-entropy), of logits, labels (n,), weights (n,) and what `scores` asks for.

    `tally` receives sums over the rows: `logits` (T^2 D) and `ce`, each without its factor, and `slope`, d loss / d T.
    """

    def add(name: str, value: Tensor) -> None:
        tally[name] = tally.get(name, 0.0) + value

    def rows(logits: Tensor, labels: Tensor, weights: Tensor, *answers: Tensor) -> tuple[Tensor, Tensor]:
        T = temperature.detach().to(logits.dtype)
        a = logits / T
        ours, theirs, slope, dealt = scores(a, *answers)
        value, d_ours, d_theirs = divergence(theirs.log_softmax(1), ours.log_softmax(1))
        grad = dealt(d_ours)  # of D, with respect to a
        if temperature.requires_grad:
            per_row = 2 * value - (grad * a).sum(1) - (d_theirs() * slope()).sum(1)
            add("slope", kd * T * (weights * per_row).sum())
        add("logits", T**2 * (weights * value).sum())
        loss, grad = kd * T**2 * value, grad.mul_(kd * T)
        if ce:
            hard, d_hard = losses.cross_entropy_rows(logits, labels)  # last: it overwrites the logits
            add("ce", (weights * hard).sum())
            loss, grad = loss + ce * hard, grad.add_(d_hard, alpha=ce)
        return weights * loss, grad.mul_(weights[:, None])

    return rows
