"""Every exercise accepts a solution and refuses plausible wrong answers."""

import math
from statistics import median

import pytest
import torch

from lessons import check, comparing
from lessons.exercises import EXERCISES
from lessons.pitfalls import distillation, gradient_flow
from nblib import train, wiring
from nblib.methods import ard, goose, moe, muon
from nblib.methods.distill import divergences
from nblib.methods.muon import bf16_adamw


def _backward(term, params):
    for p in params:
        p.grad = None
    if term.requires_grad:
        term.backward(retain_graph=True)
    return not any(p.grad is not None and p.grad.any() for p in params)


def _not_held(model, optimizers, frozen=False):
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    return [
        n for n, p in model.named_parameters() if id(p) not in held and (frozen or p.requires_grad)
    ]


def _ahead(ids, targets):
    """The shift at which most of the targets that are asked for agree with the ids."""
    length = ids.shape[1]

    def agree(k):
        asked = targets[:, : length - k] != -100
        return (ids[:, k:] == targets[:, : length - k])[asked].float().mean()

    return max(range(4), key=agree)


def _closest(residual, rank):
    P, values, Z = torch.linalg.svd(residual, full_matrices=False)
    return P[:, :rank] * values[:rank], Z[:rank].T


def _along(start, end, fp32):
    way = fp32 - start
    return ((end - start) * way).sum() / (way * way).sum()


def _variances(mean, logvar, mask):
    keep = mask.bool()
    return (mean.square() + logvar.exp())[keep].mean(0)


def _times(f, P):
    return P.shape[1] * (f * P).sum(-1)


def _share(logits, chosen):
    return moe.load(chosen, logits.shape[1])


def _iterated(G, coefficients=muon.QUINTIC, steps=muon.ITERATIONS):
    """Newton and Schulz on a matrix as it is."""
    a, b, c = coefficients
    for _ in range(steps):
        A = G @ G.T
        G = a * G + b * A @ G + c * A @ A @ G
    return G


def _softened(student, teacher, T):
    return (
        T**2 * divergences.forward_kl((teacher / T).log_softmax(1), (student / T).log_softmax(1))[0]
    )


def _tail(student, top, at, safe=True):
    """The k classes and one more; `xlogy` knows that 0 log 0 is 0."""
    q = student.softmax(1).gather(1, at)
    rest_p, rest_q = ((1 - x.sum(1)).clamp_min(0) for x in (top.exp(), q))
    inside = (top.exp() * (top - q.log())).sum(1)
    if not safe:
        return inside + rest_p * (rest_p.log() - rest_q.log())
    return inside + torch.xlogy(rest_p, rest_p) - torch.xlogy(rest_p, rest_q)


def _spread(student, top, at):
    rest = (1 - top.exp().sum(1, keepdim=True)).clamp_min(1e-9) / max(
        1, student.shape[1] - at.shape[1]
    )
    p = rest.expand_as(student).scatter(1, at, top.exp())
    return divergences.forward_kl(p.log(), student.log_softmax(1))[0]


def _skip(x, worked, scores, capacity, most=None):
    most = math.ceil(capacity * scores.shape[1]) if most is None else most
    highest = torch.zeros_like(scores, dtype=torch.bool).scatter(
        1, scores.topk(most, dim=1).indices, True
    )
    return torch.where(highest[..., None], x + scores.sigmoid()[..., None] * (worked - x), x)


def _each_head(logits, ids, first=1):
    return [
        torch.nn.functional.cross_entropy(
            each[:, : ids.shape[1] - i].flatten(0, 1).float(), ids[:, i:].flatten()
        )
        for i, each in enumerate(logits, first)
    ]


def _all_heads(logits, ids, weights, total=None):
    weights = weights[: len(logits)]
    return sum(w * x for w, x in zip(weights, _each_head(logits, ids))) / (total or sum(weights))


def _spiked(x, alpha, theta=None):
    theta = alpha * x.detach().abs().mean(-1, keepdim=True) if theta is None else theta
    return (x > theta).float() - (x < -theta).float() + (x - x.detach())


def _unbeaten(points):
    def beats(q, p):
        return q != p and all(a <= b for a, b in zip(q, p))

    return [p for p in points if not any(beats(q, p) for q in points)]


def _lowest(losses):
    known = {name: loss for name, loss in losses.items() if loss is not None}
    return min(known, key=known.get, default=None)


RIGHT = {
    "00.schedule": lambda step, total, warmup: train.cosine(total, warmup=warmup)(step),
    "00.bits_per_byte": lambda loss, tokens, size: loss * tokens / math.log(2) / size,
    "01.dead_terms": lambda terms, params: [
        n for n, g in gradient_flow.term_gradients(terms, params).items() if g == 0
    ],
    "01.missed": lambda model, *optimizers: wiring.missed(model, optimizers),
    "02.chunk": lambda vocabulary, size: max(1, size // (4 * vocabulary)),
    "02.segment": lambda layers, inside: min(
        range(1, layers + 1), key=lambda n: layers / n + n * inside
    ),
    "03.survives": bf16_adamw.survives,
    "03.muon_rate": lambda lr, rows, columns: (
        lr * 0.2 * max(rows, columns) ** 0.5 / max(1, rows / columns) ** 0.5
    ),
    "04.step_loss": lambda sums, counts: sum(sums) / sum(counts),
    "04.trouble": lambda loss, recent: (
        not math.isfinite(loss) or (bool(recent) and loss > 3 * median(recent))
    ),
    "05.ahead": _ahead,
    "05.share": _along,
    "10.ternary": lambda weight: (
        weight.abs().mean() * (weight / weight.abs().mean()).round().clamp(-1, 1)
    ),
    "10.closest": _closest,
    "11.divergence": lambda mean, logvar, variance: ard.divergence(mean, logvar, variance).sum(-1),
    "11.variances": _variances,
    "12.balance": moe.balance,
    "12.orthogonal": lambda G: _iterated(G / G.norm()),
    "13.divergence": _softened,
    "13.tail": _tail,
    "14.skip": _skip,
    "14.ahead": _all_heads,
    "15.recurrence": lambda x, d: goose.scan(x[None], d)[0],
    "15.spike": _spiked,
    "20.front": _unbeaten,
    "20.leader": lambda curves, budget: _lowest(
        {n: comparing.at(points, budget) for n, points in curves.items()}
    ),
    "21.loss": lambda sums, counts: sum(sums) / sum(counts),
    "21.ring": lambda size, ranks: 2 * size * (ranks - 1) / ranks,
}
WRONG = {
    "00.schedule": [
        lambda step, total, warmup: min(step / warmup, 1.0),  # wastes the first step
        lambda step, total, warmup: min((step + 1) / warmup, 1.0),  # never comes down
        # climbs back
        lambda s, t, w: (s + 1) / w if s < w else 0.5 * (1 + math.cos(math.pi * (s - w) / (t - w))),
        lambda step, total, warmup: None,
    ],
    "00.bits_per_byte": [
        lambda loss, tokens, size: loss * tokens / size,  # nats
        lambda loss, tokens, size: loss / math.log(2) * size / tokens,
        lambda loss, tokens, size: loss / math.log(2),
    ],
    "01.dead_terms": [
        lambda terms, params: [],
        # a graph to elsewhere passes
        lambda terms, params: [n for n, t in terms.items() if not t.requires_grad],
        lambda terms, params: [
            n for n, t in terms.items() if torch.autograd.grad(t, params)[0] is None
        ],
        # leaves .grad behind
        lambda terms, params: [n for n, t in terms.items() if _backward(t, params)],
    ],
    "01.missed": [
        lambda model, *optimizers: [n for n, p in model.named_parameters() if p.requires_grad],
        lambda model, *optimizers: _not_held(model, optimizers[:1]),  # the first optimizer only
        lambda model, *optimizers: _not_held(model, optimizers, frozen=True),
        lambda model, *optimizers: [],
    ],
    "02.chunk": [
        lambda vocabulary, size: size // vocabulary,  # counts numbers, not bytes
        lambda vocabulary, size: size // (4 * vocabulary),  # no row at all for a large vocabulary
        lambda vocabulary, size: max(1, math.ceil(size / (4 * vocabulary))),  # one too many
        lambda vocabulary, size: max(1.0, size / (4 * vocabulary)),
    ],
    "02.segment": [
        lambda layers, inside: round(layers**0.5),  # forgets what is inside
        lambda layers, inside: 1,
        lambda layers, inside: layers,
    ],
    "03.survives": [
        lambda weight, update: abs(update) > 2**-8,  # an absolute threshold
        # blind to the closer numbers below a power of two
        lambda weight, update: abs(update) > abs(weight) * 2**-8,
        lambda weight, update: bool(torch.tensor(weight) + update != weight),  # fp32
    ],
    "03.muon_rate": [
        lambda lr, rows, columns: lr,
        # forgets the factor of 'original'
        lambda lr, rows, columns: lr * 0.2 * max(rows, columns) ** 0.5,
        # without its floor of 1
        lambda lr, rows, columns: lr * 0.2 * (max(rows, columns) * columns / rows) ** 0.5,
        lambda lr, rows, columns: lr * 20,
    ],
    "04.step_loss": [
        lambda sums, counts: sum(s / c for s, c in zip(sums, counts)) / len(sums),  # mean of means
        lambda sums, counts: sum(s / c for s, c in zip(sums, counts)),  # undivided
        lambda sums, counts: sum(s / max(c, 1) for s, c in zip(sums, counts)) / len(sums),
        lambda sums, counts: sum(sums) / len(sums),
    ],
    "04.trouble": [
        # nan is not greater than anything
        lambda loss, recent: loss > 3 * median(recent or [math.inf]),
        # mean
        lambda loss, recent: (
            not math.isfinite(loss) or loss > 3 * sum(recent) / max(1, len(recent))
        ),
        lambda loss, recent: not math.isfinite(loss),
        lambda loss, recent: True,
    ],
    "05.ahead": [
        lambda ids, targets: 1,
        # counts what is left over at the end
        lambda ids, targets: int((targets == -100).sum(1).min()),
        lambda ids, targets: next(
            k for k in range(4) if (ids[:, k:] == targets[:, : ids.shape[1] - k]).all()
        ),
        # the first place alone
        lambda ids, targets: next((k for k in range(4) if ids[0, k] == targets[0, 0]), 0),
    ],
    "05.share": [
        lambda start, end, fp32: (end != start).float().mean(),  # counts what moved, not how far
        lambda start, end, fp32: (end - start).norm() / (fp32 - start).norm(),
        lambda start, end, fp32: ((end - start) / (fp32 - start)).mean(),
        lambda start, end, fp32: torch.cosine_similarity(end - start, fp32 - start, dim=0),
    ],
    "10.ternary": [
        lambda weight: weight.sign() * weight.abs().mean(),  # two values
        lambda weight: (weight / weight.abs().mean()).round().clamp(-1, 1),  # the codes
        lambda weight: weight.abs().max() * (weight / weight.abs().max()).round(),
        # more than three values
        lambda weight: weight.abs().mean() * (weight / weight.abs().mean()).round(),
        lambda weight: weight.abs().mean() * (weight / weight.abs().mean()).trunc().clamp(-1, 1),
    ],
    "10.closest": [
        lambda residual, rank: (
            torch.linalg.svd(residual)[0][:, :rank],
            torch.linalg.svd(residual)[2][:rank].T,
        ),
        lambda residual, rank: _closest(residual, rank + 1),
        # its first columns
        lambda residual, rank: (residual[:, :rank], torch.eye(residual.shape[1])[:, :rank]),
        # the smallest
        lambda residual, rank: [f[:, -rank:] for f in _closest(residual, min(residual.shape))],
    ],
    "11.divergence": [
        # a mean over ranks
        lambda mean, logvar, variance: ard.divergence(mean, logvar, variance).mean(-1),
        # over tokens as well
        lambda mean, logvar, variance: ard.divergence(mean, logvar, variance).sum(),
        # a logarithm of deviations
        lambda mean, logvar, variance: ard.divergence(mean, 2 * logvar, variance).sum(-1),
        lambda mean, logvar, variance: ard.divergence(mean, logvar, variance.square()).sum(-1),
        lambda mean, logvar, variance: (0.5 * mean.square() / variance).sum(-1),
    ],
    "11.variances": [
        lambda mean, logvar, mask: (mean.square() + logvar.exp()).mean((0, 1)),  # padding in both
        # in the count
        lambda mean, logvar, mask: ((mean.square() + logvar.exp()) * mask[..., None]).mean((0, 1)),
        # without the noise
        lambda mean, logvar, mask: _variances(mean, torch.full_like(logvar, -99), mask),
        lambda mean, logvar, mask: 0.5 * _variances(mean, logvar, mask),
        lambda mean, logvar, mask: _variances(mean, logvar, mask).sum(),
    ],
    "12.balance": [
        lambda logits, chosen: moe.balance(logits, chosen) / logits.shape[1],  # without E
        # transformers' f, which sums to k
        lambda logits, chosen: moe.balance(logits, chosen) * chosen.shape[1],
        # P for f
        lambda logits, chosen: _times(logits.softmax(1).mean(0), logits.softmax(1).mean(0)[None])[
            0
        ],
        # f for P
        lambda logits, chosen: _times(_share(logits, chosen), _share(logits, chosen)[None])[0],
        # whom it would choose
        lambda logits, chosen: moe.balance(logits, logits.topk(chosen.shape[1]).indices),
        lambda logits, chosen: (
            _times(logits.softmax(1).gather(1, chosen).mean(), torch.ones(1, 1))[0]
            * logits.shape[1]
        ),
        # not normalised
        lambda logits, chosen: _times(_share(logits, chosen), logits.exp().mean(0)[None])[0],
        lambda logits, chosen: moe.balance(logits.detach(), chosen),
    ],
    "12.orthogonal": [
        lambda G: G / G.norm(),
        lambda G: _iterated(G),  # grows without bound
        # the cubic, for which five times are too few
        lambda G: _iterated(G / G.norm(), (1.5, -0.5, 0.0)),
        lambda G: _iterated(G / G.norm(), (3.4445, -4.7750, 2.3015)),  # mistyped
        lambda G: _iterated(G / G.norm(), steps=2),
        lambda G: -_iterated(G / G.norm()),
        lambda G: _iterated(G / G.norm()).T,
        # others' vectors
        lambda G: torch.linalg.qr(G.T)[0].T if G.shape[0] < G.shape[1] else torch.linalg.qr(G)[0],
        lambda G: _iterated(G / 20),  # right for gradients of one size
        lambda G: G.sign() / max(G.shape) ** 0.5,
    ],
    "13.divergence": [
        lambda s, t, T: _softened(t, s, T),  # the other way round
        lambda s, t, T: _softened(s, t, T) / T**2,
        lambda s, t, T: T**2 * _softened(s, t / T, 1.0),  # softens the teacher alone
        lambda s, t, T: _softened(s, t, T).mean(),
        lambda s, t, T: _softened(s, t, T) / s.shape[1],  # a mean over the vocabulary
        # the teacher's entropy is left
        lambda s, t, T: -(T**2) * ((t / T).softmax(1) * (s / T).log_softmax(1)).sum(1),
        lambda s, t, T: (
            T**2 * ((t / T).softmax(1) * ((t / T).softmax(1) / (s / T).softmax(1)).log()).sum(1)
        ),
    ],
    "13.tail": [
        # leaves the others out
        lambda s, top, at: divergences.forward_kl(top, s.log_softmax(1).gather(1, at))[0],
        # the trap
        lambda s, top, at: divergences.forward_kl(
            top.log_softmax(1), s.log_softmax(1).gather(1, at)
        )[0],
        # both
        lambda s, top, at: divergences.forward_kl(
            top.log_softmax(1), s.gather(1, at).log_softmax(1)
        )[0],
        lambda s, top, at: _tail(s, top, at).sum(),
        lambda s, top, at: _tail(s, top, at, safe=False),  # 0 log 0
        _spread,  # asks for equal shares among the others
    ],
    "14.skip": [
        lambda x, worked, scores, capacity: worked,  # skips nobody
        lambda x, worked, scores, capacity: _skip(x, worked, -scores, capacity),  # the lowest
        # doubles what is skipped
        lambda x, worked, scores, capacity: _skip(2 * x, worked, scores, capacity),
        # a share
        lambda x, worked, scores, capacity: _skip(
            x, worked, scores.softmax(dim=1).logit(), capacity
        ),
        lambda x, worked, scores, capacity: _skip(
            x, worked, scores, capacity, most=int(capacity * scores.shape[1])
        ),
        lambda x, worked, scores, capacity: _skip(x, worked, scores.detach(), capacity),
        # a threshold
        lambda x, worked, scores, capacity: torch.where(scores[..., None] > 0, worked, x),
        lambda x, worked, scores, capacity: torch.where(
            (_skip(x, worked, scores, capacity) != x), worked, x
        ),  # no weight
    ],
    "14.ahead": [
        # weights that do not sum to 1
        lambda logits, ids, weights: _all_heads(logits, ids, weights, total=1.0),
        lambda logits, ids, weights: _all_heads(
            logits, ids, weights, total=sum(weights)
        ),  # of heads that are not there
        lambda logits, ids, weights: sum(_each_head(logits, ids)) / len(logits),  # all the same
        lambda logits, ids, weights: _all_heads(
            [each for each in logits], ids.roll(-1, dims=1), weights
        ),  # shifted twice
        # all one ahead
        lambda logits, ids, weights: (
            sum(_each_head([each], ids)[0] for each in logits) / len(logits)
        ),
        lambda logits, ids, weights: torch.nn.functional.cross_entropy(
            logits[0].flatten(0, 1).float(), ids.roll(-1, dims=1).flatten()
        ),  # the last position guesses the first token
        lambda logits, ids, weights: _all_heads(logits, ids, weights[::-1]),
    ],
    "15.recurrence": [
        # the write-up's, gone after twenty tokens
        lambda x, d: distillation.divided(x[None], d)[0],
        lambda x, d: x.cumsum(0),  # forgets nothing
        lambda x, d: goose.scan(x[None], d.mean().expand(len(d)))[0],  # one decay for all
        lambda x, d: goose.scan((x * (1 - d))[None], d)[0],  # a moving average
        lambda x, d: d * goose.scan(x[None], d)[0],  # shrinks what it has just read
        lambda x, d: torch.cat([x[:1], x[1:] + d * x[:-1]]),  # one token back
    ],
    "15.spike": [
        lambda x, alpha: x.sign() + (x - x.detach()),  # no threshold
        lambda x, alpha: _spiked(x, alpha).detach(),  # no gradient
        lambda x, alpha: _spiked(x, alpha, theta=alpha),  # an absolute threshold
        # one for all tokens
        lambda x, alpha: _spiked(x, alpha, theta=alpha * x.detach().abs().mean()),
        lambda x, alpha: _spiked(x, alpha).clamp_min(0),  # never negative
        lambda x, alpha: _spiked(x, 1.0),
        # the gradient of those that spike alone
        lambda x, alpha: x * _spiked(x, alpha).detach().abs(),
    ],
    "20.front": [
        lambda points: points,
        lambda points: [min(points, key=sum)],  # one winner
        lambda points: sorted(_unbeaten(points)),  # in another order
        # looks at two numbers alone
        lambda points: [points[n] for n in comparing.front(dict(enumerate(points)))],
        lambda points: list(dict.fromkeys(_unbeaten(points))),  # equal ones once
        # in all
        lambda points: [
            p for p in points if not any(all(a < b for a, b in zip(q, p)) for q in points)
        ],
        # in any
        lambda points: [
            p for p in points if not any(any(a < b for a, b in zip(q, p)) for q in points)
        ],
        # by itself
        lambda points: [
            p for p in points if not any(all(a <= b for a, b in zip(q, p)) for q in points)
        ],
    ],
    "20.leader": [
        lambda curves, budget: min(curves, key=lambda n: curves[n][-1][1]),  # at the end
        lambda curves, budget: min(curves, key=lambda n: min(loss for _, loss in curves[n])),
        lambda curves, budget: _lowest(
            {n: comparing.at([(-9, c[0][1]), *c], budget) for n, c in curves.items()}
        ),  # early
        lambda curves, budget: _lowest(
            {n: comparing.at([*c, (99, c[-1][1])], budget) for n, c in curves.items()}
        ),
        # no line between points
        lambda curves, budget: _lowest({n: dict(c).get(budget) for n, c in curves.items()}),
        # never None
        lambda curves, budget: min(curves, key=lambda n: comparing.at(curves[n], budget) or 99),
        lambda curves, budget: _lowest(
            {n: -(comparing.at(c, budget) or -99) for n, c in curves.items()}
        ),
    ],
    "21.loss": [
        lambda sums, counts: sum(s / n for s, n in zip(sums, counts)) / len(sums),  # mean of means
        lambda sums, counts: sum(s / max(n, 1) for s, n in zip(sums, counts)) / len(sums),
        lambda sums, counts: (
            sum(s / n for s, n in zip(sums, counts) if n) / sum(n > 0 for n in counts)
        ),
        lambda sums, counts: sum(sums) / len(sums),
        lambda sums, counts: sum(sums),
        lambda sums, counts: sums[0] / counts[0],  # rank 0's
    ],
    "21.ring": [
        lambda size, ranks: size * (ranks - 1) / ranks,  # the sums do not come back
        lambda size, ranks: 2 * size * (ranks - 1),  # to everybody
        lambda size, ranks: 2 * size,
        lambda size, ranks: size if ranks > 1 else 0,
        lambda size, ranks: 2 * size / ranks,
    ],
}


@pytest.mark.parametrize("exercise", EXERCISES)
def test_right_passes_and_wrong_gets_a_hint(exercise, capsys):
    assert check(exercise, RIGHT[exercise]) and "right." in capsys.readouterr().out
    for answer in WRONG[exercise]:
        assert not check(exercise, answer)
        assert "not yet." in capsys.readouterr().out


def test_an_unknown_exercise_lists_the_known():
    with pytest.raises(ValueError, match="allowed are 00.schedule"):
        check("99.none", None)
