"""How far apart two next-token distributions are: losses row by row, with every gradient in closed
form.

    forward   KL(p || q)                covers all that the teacher thinks possible
    reverse   KL(q || p)                stays where the teacher is sure
    js        mean of the KLs of p and q to (p + q) / 2
    soft_ce   - sum p log q             = forward + entropy of p: the same gradient, but never 0

with p = softmax(t / T) the teacher's, q = softmax(s / T) the student's. `mixed_rows` adds
cross-entropy with the labels from the same logits. Its gradient with respect to T costs no second
pass: with a = s / T and b = t / T,

    L = T^2 D(b, a),        dL / dT = T (2 D - <dD/da, a> - <dD/db, b>).

Against a cache of the k largest there are four ways to read the tail, all that is not in them:

    drawn     the tail goes to a few tokens that were drawn from it: in equal parts at the
              temperature of the draws, by importance weights p_T / p_drawn at another. The
              cross-entropy with them less the stored entropy, and all its gradients, are those of
              the whole distribution in the mean, for forward and soft_ce (compare sparse logit
              sampling, arXiv:2503.16870)
    spread    the tail goes to the other tokens in proportion to its mean probabilities: D over all
              of them
    bucket    the others are one class, for the student too, whose gradient is dealt out by its own
              shares. What the teacher thinks inside the bucket is not taught, so a student from
              scratch does not learn it
    none      the k are renormalised

Footgun: `none` looks harmless. It claims that the teacher thinks all others impossible, and the
student, who has the whole vocabulary, is taught so. And draws far from their temperature have
weights that differ by orders of magnitude: right in the mean, but few of them count.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nblib import losses
from nblib.methods.distill import teacher_cache

NEVER = -1e4  # a score whose probability is exactly 0, and 0 times it as well
Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Callable[[], Tensor]]]
# log p, log q (n, C) -> D (n,), its gradient with respect to the scores of q (n, C), and on request
# to those of p
Scores = Callable[..., tuple[Tensor, Tensor, Callable[[], Tensor]]]
# s / T (n, V), what the teacher said, a Divergence -> D (n,), its gradient with respect to s / T
# (n, V), and on request its derivative by log(1 / T) (n,) through p alone


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


DIVERGENCES = {
    "forward": forward_kl,
    "reverse": reverse_kl,
    "js": jensen_shannon,
    "soft_ce": soft_cross_entropy,
}
TAILS = ("drawn", "spread", "bucket", "none")


def check(divergence: str, tail: str, teacher: object = None) -> None:
    """Refuse what does not exist, and a tail that this divergence or the teacher's cache cannot
    give.
    """
    for name, value, allowed in (("divergence", divergence, DIVERGENCES), ("tail", tail, TAILS)):
        if value not in allowed:
            raise ValueError(f"{name} = {value!r}: allowed are {', '.join(allowed)}")
    if not isinstance(teacher, teacher_cache.Cache) or not teacher.k:
        return
    if tail in ("drawn", "none") and divergence not in ("forward", "soft_ce"):
        raise ValueError(
            f"tail = {tail!r}: it excludes tokens, which divergence = {divergence!r} cannot "
            "measure; use 'spread' or "
            "'bucket'"
        )
    if tail == "drawn" and not teacher.draws:
        raise ValueError("tail = 'drawn': the cache was made with draws = 0")


@torch.no_grad()
def check_learned(temperature: nn.Module, divergence: str, tail: str, teacher: object) -> None:
    """Refuse a learned temperature that this divergence drives off, or that a cache does not know
    all along its way.
    """
    if divergence == "soft_ce":
        raise ValueError(
            "divergence = 'soft_ce': it holds the teacher's entropy, whose T^2 would drive a "
            "learned temperature; use "
            "'forward', which teaches the student the same"
        )
    if not isinstance(teacher, teacher_cache.Cache) or not teacher.k:
        return
    if tail != "drawn":
        raise ValueError(
            f"tail = {tail!r}: its shape is not the teacher's, which misleads a learned "
            "temperature; use 'drawn' or "
            "a cache with k = 0"
        )
    known, way = teacher.temperatures, {"start": float(temperature())}
    way |= {
        name: getattr(temperature, name)
        for name in ("anchor", "low", "high")
        if hasattr(temperature, name)
    }
    bad = {
        n: T for n, T in way.items() if not min(known) * (1 - 1e-6) <= T <= max(known) * (1 + 1e-6)
    }
    if bad or not min(known) < way["start"] < max(known):
        name = next(iter(bad), "start")
        raise ValueError(
            f"temperature: {name} = {way[name]:.4g} of a learned one is not between those that "
            "the cache was made at, "
            f"{known}: make it with temperatures=(start, lowest, highest)"
        )


def _between(
    divergence: Divergence,
    ours: Tensor,
    theirs: Tensor,
    slopes: Callable,
    dealt: Callable = lambda d: d,
):
    """Return what a `Scores` gives, from scores of q and p (n, C); `slopes()` is d theirs / d log(1
    / T), and `dealt` makes a gradient with respect to s / T of one with respect to `ours`.
    """
    value, d_ours, d_theirs = divergence(theirs.log_softmax(1), ours.log_softmax(1))
    return value, dealt(d_ours), lambda: (d_theirs() * slopes()).sum(1)


def live(temperature: Tensor, weight: Tensor) -> Scores:
    """Scores over the vocabulary, the teacher's made from its hidden states (n, D) and its head (V,
    D).
    """

    def scores(a: Tensor, h: Tensor, divergence: Divergence):
        b = ((h @ weight.T).to(a.dtype) / temperature).clamp_min_(NEVER)
        return _between(divergence, a, b, lambda: b)

    return scores


def stored(
    temperature: Tensor, cache: teacher_cache.Cache, *, tail: str = "drawn", at: float | None = None
) -> Scores:
    """Scores made from what a cache holds: all tokens, or k of them and their tail, read in one of
    four ways. `at` is the temperature again where the host knows it; a learned one is left on its
    device, whose answer would be a wait.
    """
    check("forward", tail)
    if cache.k and tail != "none":
        known = temperature if at is None and temperature.is_cuda else at or float(temperature)
        of_knot = _vector(cache.tail_weights(known), temperature)

    def everything(a: Tensor, values: Tensor, divergence: Divergence):
        b = (values.to(a.dtype) / temperature).clamp_min_(NEVER)
        return _between(divergence, a, b, lambda: b)

    def last(a: Tensor, tails: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
        """Return the score of the tail (n, 1), and its derivative by log(1 / T): the mean of the
        scores in the tail.
        """
        if tail == "none":
            return a.new_full((len(a), 1), NEVER), a.new_zeros((len(a), 1))
        # both, at infinite temperature
        flat = a.new_full((len(a), 1), math.log(cache.vocabulary - cache.k))
        whole, entropy = (
            torch.cat([flat, x.to(a.dtype)], 1) @ of_knot.to(a.dtype)[:, None]
            for x in (tails, entropies)
        )
        return whole, whole - entropy

    def drawn(
        a: Tensor, values, indices, tails, tokens, entropies, tokens_values, divergence: Divergence
    ):
        top, own = (
            (x.to(a.dtype) / temperature).clamp_min_(NEVER) for x in (values, tokens_values)
        )
        whole, slope = last(a, tails, entropies)
        # of the teacher, not of what was drawn
        total = torch.cat([top, whole], 1).logsumexp(1, keepdim=True)
        inside = (top - total).exp()
        # of the teacher's scores
        mean = (inside * top).sum(1, keepdim=True) + (whole - total).exp() * slope
        then = tokens_values.to(a.dtype) / cache.temperatures[0]  # when they were drawn
        # (n, draws), how often each was drawn
        times = (tokens[:, :, None] == tokens[:, None, :]).sum(2)
        part = (
            (own - then + tails[:, :1].to(a.dtype) - total).exp() * times.to(a.dtype) / cache.draws
        )
        # adds up to 1 in the mean
        p = torch.zeros_like(a).scatter_(1, tokens, part).scatter_(1, indices, inside)
        of_p = float(divergence is forward_kl)  # whether p's entropy, which is total - mean, counts
        value = a.logsumexp(1) - (p * a).sum(1) - of_p * (total - mean)[:, 0]

        def through_p() -> Tensor:
            b = torch.zeros_like(a).scatter_(1, tokens, own).scatter_(1, indices, top)
            # whose mean is `value`: centred twice, it is the least noisy
            gap = of_p * (b - total) - a.log_softmax(1)
            return (p * (b - mean) * (gap - value[:, None])).sum(1)

        return value, a.softmax(1).sub_(p), through_p

    def spread(a: Tensor, values, indices, tails, _, entropies, *rest, divergence: Divergence):
        top, (whole, slope) = values.to(a.dtype) / temperature, last(a, tails, entropies)
        prior = (cache.prior.to(a) / temperature).clamp_min_(NEVER)  # (V,)
        shares = prior.expand_as(a).scatter(1, indices, NEVER)  # (n, V)
        together = shares.logsumexp(1, keepdim=True)

        def slopes() -> Tensor:
            mean = ((shares - together).exp_() * prior).sum(1, keepdim=True)
            return (prior + (slope - mean)).scatter_(1, indices, top)

        return _between(
            divergence, a, (shares + (whole - together)).scatter_(1, indices, top), slopes
        )

    def bucket(a: Tensor, values, indices, tails, _, entropies, *rest, divergence: Divergence):
        others = a.scatter(1, indices, NEVER)  # (n, V)
        together = others.logsumexp(1, keepdim=True)  # (n, 1)
        share = others.sub_(together).exp_()  # of each in the bucket; 0 for the k
        top, (whole, slope) = values.to(a.dtype) / temperature, last(a, tails, entropies)

        def dealt(d_a: Tensor) -> Tensor:  # (n, k + 1) -> (n, V)
            return share.mul_(d_a[:, -1:]).scatter_(1, indices, d_a[:, :-1])

        ours = torch.cat([a.gather(1, indices), together], 1)
        return _between(
            divergence, ours, torch.cat([top, whole], 1), lambda: torch.cat([top, slope], 1), dealt
        )

    return everything if not cache.k else {"drawn": drawn, "spread": spread}.get(tail, bucket)


def _vector(numbers: list[float] | list[Tensor], like: Tensor) -> Tensor:
    """On the device of `like`, filled there, because a copy from the host waits; (n,), fp64."""
    return torch.stack([torch.full_like(like, 1.0, dtype=torch.float64) * x for x in numbers])


def mixed_rows(
    divergence: Divergence,
    temperature: Tensor,
    scores: Scores,
    *,
    kd: float = 1.0,
    ce: float = 0.0,
    tally: dict,
) -> losses.RowLoss:
    """Return the row loss kd T^2 D + ce (cross-entropy), of logits, labels (n,), weights (n,) and
    what `scores` asks for.

    `tally` receives sums over the rows: `logits` (T^2 D) and `ce`, each without its factor, and
    `slope`, d loss / d T.
    """

    def add(name: str, value: Tensor) -> None:
        tally[name] = tally.get(name, 0.0) + value

    def rows(
        logits: Tensor, labels: Tensor, weights: Tensor, *answers: Tensor
    ) -> tuple[Tensor, Tensor]:
        T = temperature.detach().to(logits.dtype)
        a = logits / T
        value, grad, through_p = scores(a, *answers, divergence=divergence)
        if temperature.requires_grad:
            per_row = 2 * value - (grad * a).sum(1) - through_p()
            add("slope", kd * T * (weights * per_row).sum())
        add("logits", T**2 * (weights * value).sum())
        loss, grad = kd * T**2 * value, grad.mul_(kd * T)
        if ce:
            # last: it overwrites the logits
            hard, d_hard = losses.cross_entropy_rows(logits, labels)
            add("ce", (weights * hard).sum())
            loss, grad = loss + ce * hard, grad.add_(d_hard, alpha=ce)
        return weights * loss, grad.mul_(weights[:, None])

    return rows
