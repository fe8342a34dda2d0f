"""Judges of the exercises: an answer is right, or gets a hint for the first property it lacks,
never the solution.

`check("00.schedule", my_function)` tries the properties that a right answer must have.
tests/lessons/test_exercises.py has a solution and at least two plausible wrong answers for each of
them.
"""

import copy
import math
from collections.abc import Callable, Sequence
from math import isclose

import torch
from torch import nn

from nblib.methods.muon import BAND


def check(exercise: str, answer: Callable) -> bool:
    """Try an answer; prints the verdict and returns it."""
    if exercise not in EXERCISES:
        raise ValueError(f"exercise = {exercise!r}: allowed are {', '.join(EXERCISES)}")
    for hint, holds in EXERCISES[exercise]:
        try:
            fine = bool(holds(answer))
        except Exception as error:  # an exception in the reader's code is a verdict too
            print(f"{exercise}: not yet. Your code raised {type(error).__name__}: {error}")
            return False
        if not fine:
            print(f"{exercise}: not yet. {hint}")
            return False
    print(f"{exercise}: right.")
    return True


def _terms(*names: str):
    w, elsewhere = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    shared = (w * w).sum()
    terms = {
        "live": shared,
        "twin": 2 * shared,
        "detached": w.detach().sum(),
        "other": elsewhere.sum(),
    }
    terms["anchor"] = 0 * w.sum()
    return {name: terms[name] for name in names}, [w]


def _leaves_grad_alone(answer: Callable) -> bool:
    terms, params = _terms("other", "live")
    answer(terms, params)
    return params[0].grad is None


def _missed(answer: Callable, case: str) -> set[str]:
    model = nn.Sequential(
        nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    )
    model[2].requires_grad_(False)
    first, second, twin = model[0].weight, model[1].weight, copy.deepcopy(model[0]).weight
    groups = {
        "all": [[first, second]],
        "copy": [[twin, second]],
        "two": [[first], [second]],
        "none": [],
    }[case]
    return set(answer(model, *(torch.optim.SGD(params, lr=0.1) for params in groups)))


def _shifted(ahead: int, ignored: int = 0):
    """Ids, and targets that lie so far ahead in them; -100 where there are none, and at some places
    besides.
    """
    ids = torch.randint(50, (4, 24), generator=torch.Generator().manual_seed(ahead))
    targets = torch.full_like(ids, -100)
    targets[:, : 24 - ahead] = ids[:, ahead:]
    targets[:, :ignored] = -100
    return ids, targets


def _share(answer: Callable, arrived: float, noise: bool = False) -> float:
    """Return the answer when this share of the fp32 way arrives, with `noise` also some noise
    across that way.
    """
    way, off = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    start, off = torch.ones(64), (off - (off @ way) / (way @ way) * way) * noise
    return float(answer(start, start + arrived * way + off, start + way))


def _rounded(answer: Callable, times: float = 1.0):
    """Return the answer for a matrix whose mean absolute value is `times`."""
    return answer(times * torch.tensor([[0.1, -0.2, 2.0], [-2.0, 0.6, 1.1]]))


def _factors(answer: Callable, rank: int, wide: bool = False) -> tuple:
    """Return the norm that the answer leaves of a residual, the least that any product of this rank
    leaves, and its ranks.
    """
    residual = torch.randn(12, 20, generator=torch.Generator().manual_seed(3))
    residual = residual if wide else residual.T
    U, V = answer(residual.clone(), rank)
    least = torch.linalg.svdvals(residual)[rank:].square().sum().sqrt()
    return float((residual - U @ V.T).norm()), float(least), (U.shape[1], V.shape[1])


def _price(answer: Callable, mean, logvar, variance) -> list[float]:
    """Return the answer for latents and a prior variance, given as lists."""
    return answer(torch.tensor(mean), torch.tensor(logvar), torch.tensor(variance)).tolist()


def _variances(answer: Callable, pads: int = 0, loud: float = 1.0) -> list[float]:
    """Return the answer for two rows of two ranks, whose squared means average 1 and 4, followed by
    padding.
    """
    mean = torch.tensor([[[1.0, 2.0], [-1.0, 2.0]], [[1.0, -2.0], [1.0, 2.0]]])
    mean = torch.cat([mean, torch.full((2, pads, 2), 9.0)], dim=1)
    mask = (torch.arange(2 + pads) < 2).long().expand(2, -1)
    return answer(mean, torch.full_like(mean, math.log(loud)), mask).tolist()


def _balance(answer: Callable, probabilities: list, chosen: list) -> float:
    """Return the answer for tokens whose router gives these probabilities, (N, E), and chose these
    experts, (N, k).
    """
    return float(answer(torch.tensor(probabilities).log(), torch.tensor(chosen)))


def _pushes_down(answer: Callable) -> bool:
    """Whether a step against the gradient takes probability from the expert that has all tokens."""
    logits = torch.zeros(4, 3, requires_grad=True)
    loss = answer(logits, torch.zeros(4, 1, dtype=torch.long))
    if not loss.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(loss, logits)
    return bool((gradient[:, 0] > 0).all() and (gradient[:, 1:] < 0).all())


def _seen_from(answer: Callable, shape: tuple[int, int], times: float = 1.0):
    """U^T O V of the answer O for U S V^T, diagonal where the singular vectors are kept, and its
    singular values.

    nan where O is no finite matrix of that shape.
    """
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    U, _, Vh = torch.linalg.svd(drawn, full_matrices=False)
    G = U * torch.logspace(0, -1.5, 16) @ Vh
    result = answer((times * G).float()).double()
    if result.shape != G.shape or not result.isfinite().all():
        return torch.full((16, 16), math.nan), torch.full((16,), math.nan)
    inside = U.T @ result @ Vh.T
    return inside, torch.linalg.svdvals(inside)


def _in_band(values) -> bool:
    # bf16 is fine, too
    return BAND[0] - 0.06 < float(values.min()) and float(values.max()) < BAND[1] + 0.06


def _crossed(inside) -> float:
    """Return the largest entry off the diagonal."""
    return float((inside - inside.diagonal().diag()).abs().max())


def _softened(answer: Callable, student, teacher, T: float = 1.0) -> list[float]:
    """Return the answer for logits given as lists, if it is one number per token."""
    return _per_token(answer(torch.tensor(student), torch.tensor(teacher), T), len(student))


def _per_token(result, tokens: int) -> list[float]:
    return result.tolist() if result.shape == (tokens,) else []


def _with_a_tail(answer: Callable, student, teacher) -> list[float]:
    """Return the answer for probabilities given as lists, of which it is shown the teacher's two
    largest.
    """
    top = torch.tensor(teacher).topk(2, dim=1)
    return _per_token(
        answer(torch.tensor(student).log() + 3, top.values.log(), top.indices), len(student)
    )


def _skipped(answer: Callable, capacity: float):
    """Return what leaves the layer, what came in, and the block's output: two rows of five tokens
    with their scores.
    """
    x, change = (
        torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)
    )
    scores = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0], [3.0, 2.0, -1.0, -2.0, -3.0]])
    return answer(x.clone(), x + change, scores, capacity), x, x + change


def _worked_on(answer: Callable, capacity: float) -> list[list[bool]]:
    """Which tokens leave changed."""
    y, x, _ = _skipped(answer, capacity)
    return (y != x).any(dim=-1).tolist() if y.shape == x.shape else []


def _weighed(answer: Callable) -> bool:
    y, x, worked = _skipped(answer, 0.4)
    return torch.allclose(y[0, 4], x[0, 4] + torch.tensor(2.0).sigmoid() * (worked - x)[0, 4])


def _teaches_the_router(answer: Callable) -> bool:
    scores = torch.tensor([[0.0, 1.0]], requires_grad=True)
    loss = answer(torch.zeros(1, 2, 3), torch.ones(1, 2, 3), scores, 0.5).sum()
    return loss.requires_grad and bool(torch.autograd.grad(loss, scores)[0][0, 1] > 0)


def _heads(
    answer: Callable, *distances: int, weights: tuple[float, ...] = (1.0, 0.5, 0.3), wrong: int = 0
) -> float:
    """Return the answer for heads that are sure of the token so far ahead, and of others at the
    last `wrong` positions.
    """
    ids = torch.randint(9, (3, 12), generator=torch.Generator().manual_seed(7))
    logits = [
        20.0 * nn.functional.one_hot(ids.roll(-distance, dims=1), 9) for distance in distances
    ]
    for each in logits:
        each[:, 12 - wrong :] = each[:, 12 - wrong :].roll(1, dims=-1)
    return float(answer(logits, ids, weights))


def _ignorant(answer: Callable, heads: int) -> float:
    """Return the answer for heads that know nothing of nine tokens; there are weights for three."""
    ids = torch.randint(9, (3, 12), generator=torch.Generator().manual_seed(8))
    return float(answer([torch.zeros(3, 12, 9)] * heads, ids, (1.0, 0.5, 0.3)))


def _states(answer: Callable, inputs: list[list[float]], decay: list[float]) -> list[list[float]]:
    """Return the answer for inputs and decays given as lists."""
    return answer(torch.tensor(inputs), torch.tensor(decay)).tolist()


def _passes_on(answer: Callable) -> bool:
    """Whether every input receives the gradient of its output, for gradients of different sizes."""
    x, sizes = (
        torch.tensor([[4.0, 0.1, -4.0, 1.0]], requires_grad=True),
        torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
    )
    result = (answer(x, 1.0) * sizes).sum()
    return result.requires_grad and torch.allclose(torch.autograd.grad(result, x)[0], sizes)


def _near(answers: float | Sequence[float], *expected: float) -> bool:
    answers = [answers] if isinstance(answers, float) else answers
    return len(answers) == len(expected) and all(
        isclose(a, b, rel_tol=1e-5, abs_tol=1e-5) for a, b in zip(answers, expected)
    )


def _kept(answer: Callable, *points: tuple) -> list[tuple]:
    """Return what is left of these points, as a list of tuples."""
    return [tuple(point) for point in answer(list(points))]


EXERCISES = {
    "00.schedule": [  # (step, total, warmup) -> factor
        (
            "The first step should already move the weights: what is the factor at step 0?",
            lambda f: f(0, 100, 10) > 0,
        ),
        ("Warm-up should reach 1 exactly at its last step.", lambda f: isclose(f(9, 100, 10), 1.0)),
        (
            "Warm-up should grow by the same amount each step.",
            lambda f: isclose(f(4, 100, 10), 0.5),
        ),
        (
            "After warm-up it should never grow.",
            lambda f: all(f(s, 100, 10) >= f(s + 1, 100, 10) - 1e-12 for s in range(9, 99)),
        ),
        (
            "Half way down a cosine stands at one half.",
            lambda f: isclose(f(55, 100, 10), 0.5, abs_tol=0.02),
        ),
        ("What happens after the end? Try step 150 of 100.", lambda f: abs(f(150, 100, 10)) < 1e-9),
    ],
    "00.bits_per_byte": [  # (nats per token, tokens, bytes) -> bits per byte
        (
            "A loss of ln 2 nats on one token per byte is one bit per byte.",
            lambda f: isclose(f(math.log(2), 10, 10), 1),
        ),
        (
            "Fewer bytes per token must cost more bits per byte.",
            lambda f: f(2.0, 100, 300) > f(2.0, 100, 400),
        ),
        (
            "Guessing among 256 bytes costs eight bits each.",
            lambda f: isclose(f(math.log(256), 7, 7), 8),
        ),
        (
            "Twice the tokens over the same bytes is twice the bits.",
            lambda f: isclose(f(1.5, 20, 50), 2 * f(1.5, 10, 50)),
        ),
    ],
    # (terms by name, parameters) -> names of the terms that give none of them a gradient
    "01.dead_terms": [
        ("A live term is not dead.", lambda f: list(f(*_terms("live"))) == []),
        (
            "A detached term has no graph to ask.",
            lambda f: set(f(*_terms("live", "detached"))) == {"detached"},
        ),
        (
            "A term may have a graph and still miss these parameters.",
            lambda f: "other" in f(*_terms("live", "other")),
        ),
        (
            "A gradient of exact zeros trains nothing.",
            lambda f: set(f(*_terms("anchor", "live"))) == {"anchor"},
        ),
        (
            "Terms share a graph: ask all of them.",
            lambda f: set(f(*_terms("live", "twin", "other"))) == {"other"},
        ),
        ("Asking should leave `.grad` alone.", lambda f: _leaves_grad_alone(f)),
    ],
    "01.missed": [  # (model, *optimizers) -> names of trainable tensors that no optimizer holds
        ("An optimizer over everything misses nothing.", lambda f: _missed(f, "all") == set()),
        (
            "An optimizer over a copy holds other tensors of the same shape.",
            lambda f: _missed(f, "copy") == {"0.weight"},
        ),
        ("Two optimizers may share the work.", lambda f: _missed(f, "two") == set()),
        (
            "Frozen tensors need no optimizer.",
            lambda f: _missed(f, "none") == {"0.weight", "1.weight"},
        ),
    ],
    "02.chunk": [  # (vocabulary, bytes) -> rows of fp32 logits that fit
        (
            "An fp32 number takes four bytes: how many rows of 1,000 fit 40,000 bytes?",
            lambda f: f(1000, 40_000) == 10,
        ),
        (
            "A part of a row is no row: 40,001 bytes still hold ten.",
            lambda f: f(1000, 43_999) == 10,
        ),
        ("At least one row must be scored, whatever the budget.", lambda f: f(150_000, 1000) == 1),
        ("Whole rows come as an int.", lambda f: isinstance(f(1000, 40_000), int)),
    ],
    "02.segment": [  # (layers, inside) -> blocks per checkpointed segment
        (
            "With 16 blocks that each hold 20 inputs inside, try the peak of every size.",
            lambda f: f(16, 20) == 1,
        ),
        ("With one input inside, it is the square root of the depth.", lambda f: f(64, 1) == 8),
        (
            "How does the best size change when a block holds four times as much?",
            lambda f: f(64, 4) == 4,
        ),
        (
            "No size may have a lower peak.",
            lambda f: all(
                layers / (n := f(layers, inside)) + n * inside
                <= min(layers / m + m * inside for m in range(1, layers + 1)) + 1e-9
                for layers in (8, 30, 100)
                for inside in (1, 2, 9)
            ),
        ),
    ],
    # (weight, update) -> does the sum differ from the weight once both are kept in bf16
    "03.survives": [
        ("A weight of 1 feels an update of a hundredth.", lambda f: f(1.0, 0.01)),
        (
            "bf16 has 8 significant bits: between 1 and 2 it knows 128 numbers.",
            lambda f: not f(1.0, 0.003),
        ),
        (
            "Small weights feel small updates: the distance grows with the weight.",
            lambda f: f(0.01, 1e-4),
        ),
        ("And large ones do not: try 1000 and 1.", lambda f: not f(1000.0, 1.0)),
        (
            "Just below a power of two the numbers stand closer: try 1 and -0.003.",
            lambda f: f(1.0, -0.003),
        ),
    ],
    # (AdamW-like rate, rows, columns) -> the rate in the "original" convention for the same step
    "03.muon_rate": [
        (
            "It is proportional to the rate.",
            lambda f: isclose(f(2e-3, 64, 64), 2 * f(1e-3, 64, 64)),
        ),
        (
            "Square matrices: 'match_rms_adamw' multiplies by 0.2 sqrt(max(rows, columns)), "
            "'original' by 1.",
            lambda f: isclose(f(1e-3, 100, 100), 2e-3),
        ),
        (
            "Taller than wide: 'original' multiplies by sqrt(rows / columns), so its rate must "
            "be smaller.",
            lambda f: isclose(f(1e-3, 400, 100), 2e-3),
        ),
        (
            "Wider than tall: 'original' multiplies by 1, never by less.",
            lambda f: isclose(f(1e-3, 100, 400), 4e-3),
        ),
    ],
    # (summed losses, supervised tokens) of each micro-batch -> loss of the optimizer step
    "04.step_loss": [
        (
            "Two equal micro-batches have the mean of either.",
            lambda f: isclose(f([20.0, 20.0], [10, 10]), 2.0),
        ),
        (
            "A token counts the same wherever it stands: try 90 tokens in one micro-batch and "
            "10 in the other.",
            lambda f: isclose(f([90.0, 50.0], [90, 10]), 1.4),
        ),
        (
            "Cutting a micro-batch in two must change nothing.",
            lambda f: isclose(f([6.0, 2.0, 4.0], [3, 1, 4]), f([8.0, 4.0], [4, 4])),
        ),
        (
            "A micro-batch without a supervised token adds nothing, and no nan.",
            lambda f: isclose(f([12.0, 0.0], [6, 0]), 2.0),
        ),
    ],
    "04.trouble": [  # (loss, recent losses) -> whether to roll back, at three times the usual loss
        ("An ordinary loss is no trouble.", lambda f: not f(2.1, [2.0] * 10)),
        ("Three and a half times the usual loss is.", lambda f: f(7.0, [2.0] * 10)),
        ("What does `nan > 3 * 2.0` say in Python?", lambda f: f(math.nan, [2.0] * 10)),
        (
            "Infinity is trouble even when there is nothing to compare with.",
            lambda f: f(math.inf, []),
        ),
        (
            "One earlier spike must not raise the bar for the next.",
            lambda f: f(7.0, [2.0] * 9 + [200.0]),
        ),
        ("The first step has no recent losses and is no trouble.", lambda f: not f(9.0, [])),
    ],
    "05.ahead": [  # (ids, targets) -> how far ahead in the ids the targets lie
        (
            "The target of a language model is the next token: one ahead.",
            lambda f: f(*_shifted(1)) == 1,
        ),
        ("A target that is the token itself lies nought ahead.", lambda f: f(*_shifted(0)) == 0),
        (
            "Labels shifted by hand and again by the model lie two ahead.",
            lambda f: f(*_shifted(2)) == 2,
        ),
        (
            "Where the target is -100 nothing is asked: leave it out.",
            lambda f: f(*_shifted(2, ignored=12)) == 2,
        ),
    ],
    # (start, where the weights are, where fp32 copies are) -> share of the way that arrived
    "05.share": [
        (
            "Weights that went all the way have a share of one.",
            lambda f: isclose(_share(f, 1), 1, abs_tol=1e-4),
        ),
        ("Weights that never moved have a share of nought.", lambda f: abs(_share(f, 0)) < 1e-6),
        (
            "A quarter of the way is a quarter.",
            lambda f: isclose(_share(f, 0.25), 0.25, abs_tol=1e-4),
        ),
        (
            "The wrong way is negative: lengths alone do not tell.",
            lambda f: isclose(_share(f, -1), -1, abs_tol=1e-4),
        ),
        (
            "Stochastic rounding adds noise that is right on average: only the part along the "
            "way counts.",
            lambda f: isclose(_share(f, 1, noise=True), 1, abs_tol=1e-3),
        ),
    ],
    "10.ternary": [  # weight -> the matrix of -s, 0, s
        ("There are three values, one of them zero.", lambda f: len(_rounded(f).unique()) == 3),
        (
            "The values are -s, 0 and s.",
            lambda f: float(_rounded(f).min() + _rounded(f).max()) == 0,
        ),
        (
            "s is the mean of the absolute values, here 1.",
            lambda f: isclose(_rounded(f).max(), 1, abs_tol=1e-6),
        ),
        ("Rounding decides at half of s: 0.6 goes up.", lambda f: float(_rounded(f)[1, 1]) > 0.9),
        (
            "Twice the weight has twice the values.",
            lambda f: isclose(_rounded(f, times=2).max(), 2, rel_tol=1e-6),
        ),
    ],
    "10.closest": [  # (residual, rank) -> U (out, rank), V (in, rank)
        ("U and V have `rank` columns each.", lambda f: _factors(f, 3)[2] == (3, 3)),
        (
            "Eckart and Young: what is left has the norm of the other singular values.",
            lambda f: isclose(*_factors(f, 3)[:2], rel_tol=1e-4),
        ),
        (
            "It must hold for wide matrices too.",
            lambda f: isclose(*_factors(f, 5, wide=True)[:2], rel_tol=1e-4),
        ),
        ("At full rank nothing is left.", lambda f: _factors(f, 12)[0] < 1e-4),
    ],
    "11.divergence": [  # (mean, logvar, variance) -> nats per token, the ranks on the last axis
        (
            "A latent that is its prior tells nothing and costs nothing.",
            lambda f: _near(_price(f, [[0.0]], [[math.log(3)]], [3.0]), 0),
        ),
        (
            "With unit variances the price is half the squared mean.",
            lambda f: _near(_price(f, [[2.0]], [[0.0]], [1.0]), 2),
        ),
        (
            "The mean is measured in units of the prior's variance.",
            lambda f: _near(_price(f, [[2.0]], [[math.log(4)]], [4.0]), 0.5),
        ),
        (
            "Noise narrower than the prior costs half the logarithm of the ratio, less what it "
            "saves.",
            lambda f: _near(_price(f, [[0.0]], [[-2.0]], [1.0]), 0.5 * (1 + math.exp(-2))),
        ),
        (
            "Ranks add up; they are not averaged. Tokens stay apart.",
            lambda f: _near(
                _price(f, [[2.0, 2.0], [2.0, 0.0]], [[0.0, 0.0]] * 2, [1.0, 1.0]), 4, 2
            ),
        ),
    ],
    "11.variances": [  # (mean, logvar, mask) -> one variance per rank
        ("There is one variance per rank.", lambda f: len(_variances(f)) == 2),
        (
            "The mean square of the latent holds its noise, too: twice the noise is more.",
            lambda f: _variances(f, loud=2.0)[0] > _variances(f)[0] + 0.5,
        ),
        (
            "It is the mean square itself, and not half of it: with squares 1 and 4 and noise "
            "1 they are 2 and 5.",
            lambda f: _near(_variances(f), 2, 5),
        ),
        (
            "Padding changes nothing: neither the sum nor the count.",
            lambda f: _near(_variances(f, pads=3), *_variances(f)),
        ),
    ],
    "12.balance": [  # (logits (N, E), chosen (N, k)) -> E sum f P
        (
            "Uniform routing is balanced: 1, whatever the number of experts.",
            lambda f: _near(_balance(f, [[0.25] * 4] * 4, [[0], [1], [2], [3]]), 1),
        ),
        (
            "f is a share of all assignments and sums to 1, also where a token has two experts.",
            lambda f: _near(_balance(f, [[0.25] * 4] * 2, [[0, 1], [2, 3]]), 1),
        ),
        (
            "One expert that has all tokens, and is sure of it, costs E.",
            lambda f: _near(_balance(f, [[1.0, 1e-30, 1e-30]] * 5, [[0]] * 5), 3),
        ),
        (
            "f counts who was chosen, and P is what the router thought: they may disagree.",
            lambda f: _near(_balance(f, [[0.25, 0.75]] * 4, [[0]] * 4), 0.5),
        ),
        (
            "f and P are each averaged over the tokens, and multiplied then: sure tokens that "
            "differ are in balance.",
            lambda f: _near(_balance(f, [[1.0, 1e-30], [1e-30, 1.0]], [[0], [1]]), 1),
        ),
        (
            "A probability does not change when all logits of a token are larger.",
            lambda f: _near(_balance(f, [[2.0, 6.0]] * 4, [[0]] * 4), 0.5),
        ),
        ("The gradient must flow through P, and push the busy expert down.", _pushes_down),
    ],
    "12.orthogonal": [  # G (out, in) -> the orthogonal matrix near it, by five quintic iterations
        (
            "The result has the shape of G, and neither inf nor nan.",
            lambda f: bool(_seen_from(f, (16, 24))[1].isfinite().all()),
        ),
        (
            "Five quintic iterations bring all singular values into the band around 1, none "
            "far below or above.",
            lambda f: _in_band(_seen_from(f, (16, 24))[1]),
        ),
        (
            "The singular vectors must stay: only odd powers of G, such as G G^T G, leave them "
            "alone.",
            lambda f: _crossed(_seen_from(f, (16, 24))[0]) < 0.1,
        ),
        (
            "It must hold for tall matrices too.",
            lambda f: (
                _in_band(_seen_from(f, (24, 16))[1]) and _crossed(_seen_from(f, (24, 16))[0]) < 0.1
            ),
        ),
        (
            "The size of a gradient plays no part, as it is divided away first: try a thousand "
            "times as much.",
            lambda f: (
                all(_in_band(_seen_from(f, (16, 24), times)[1]) for times in (1e3, 1e-3))
                and float(
                    (_seen_from(f, (16, 24), 1e3)[0] - _seen_from(f, (16, 24), 1e-3)[0]).abs().max()
                )
                < 0.1
            ),
        ),
        (
            "G points one way and its negative the other: V and U come with their signs.",
            lambda f: float(_seen_from(f, (16, 24))[0].diagonal().min()) > 0,
        ),
    ],
    # (student's logits, teacher's logits, T) -> T^2 KL(teacher || student) of each token
    "13.divergence": [
        (
            "One number per token, and 0 where both agree.",
            lambda f: _near(_softened(f, [[1.0, 2.0]] * 3, [[1.0, 2.0]] * 3), 0, 0, 0),
        ),
        (
            "The teacher weighs the logarithms, added up over the vocabulary: try 1 / 4 and 3 "
            "/ 4 against two halves.",
            lambda f: _near(
                _softened(f, [[0.0, 0.0]], [[0.0, math.log(3)]]),
                0.25 * math.log(0.5) + 0.75 * math.log(1.5),
            ),
        ),
        (
            "Both are softened: at T = 2, logits twice as large must give T^2 times the same "
            "divergence.",
            lambda f: _near(
                _softened(f, [[0.0, 2.0]], [[6.0, 0.0]], 2.0),
                *(4 * x for x in _softened(f, [[0.0, 1.0]], [[3.0, 0.0]])),
            ),
        ),
        (
            "A probability may underflow where its logarithm does not: try logits of a thousand.",
            lambda f: _near(_softened(f, [[0.0, 1000.0]], [[1000.0, 0.0]]), 1000),
        ),
    ],
    # (student's logits, the teacher's k largest log-probabilities, their ids) -> KL of each token
    "13.tail": [
        (
            "One number per token, and 0 for a student who says what the teacher says, to all "
            "tokens.",
            lambda f: _near(
                _with_a_tail(f, [[0.4, 0.1, 0.3, 0.2]] * 2, [[0.4, 0.1, 0.3, 0.2]] * 2), 0, 0
            ),
        ),
        (
            "The others are one class, and who has what among them is not asked.",
            lambda f: _near(_with_a_tail(f, [[0.4, 0.25, 0.3, 0.05]], [[0.4, 0.1, 0.3, 0.2]]), 0),
        ),
        (
            "That class counts like any token: try a student who gives it too much.",
            lambda f: _near(
                _with_a_tail(f, [[0.2, 0.3, 0.15, 0.35]], [[0.4, 0.1, 0.3, 0.2]]),
                0.7 * math.log(2) + 0.3 * math.log(0.3 / 0.65),
            ),
        ),
        (
            "Where the k are all there is, nothing is left for the others: that adds 0, and no "
            "nan.",
            lambda f: _near(_with_a_tail(f, [[0.25, 0.75]], [[0.5, 0.5]]), 0.5 * math.log(4 / 3)),
        ),
    ],
    "14.skip": [  # (x, worked (B, T, D), scores (B, T), capacity) -> what leaves the layer
        (
            "With capacity 0.4 two of five tokens change, the same number in each row.",
            lambda f: [sum(row) for row in _worked_on(f, 0.4)] == [2, 2],
        ),
        (
            "The tokens with the highest scores of their own row are worked on.",
            lambda f: (
                _worked_on(f, 0.4)
                == [[False, False, False, True, True], [True, True, False, False, False]]
            ),
        ),
        ("A chosen token becomes x + sigmoid(score) (worked - x).", _weighed),
        (
            "Round the number of tokens up: a share of 0.3 of five tokens is two, and of 0.01 "
            "it is one.",
            lambda f: [sum(row) for c in (0.3, 0.01) for row in _worked_on(f, c)] == [2, 2, 1, 1],
        ),
        (
            "With capacity 1 every token is worked on.",
            lambda f: _worked_on(f, 1.0) == [[True] * 5] * 2,
        ),
        ("The router learns through the sigmoid: its scores need a gradient.", _teaches_the_router),
    ],
    "14.ahead": [  # (logits (B, T, V) of each head, ids (B, T), weights) -> loss over all heads
        (
            "One head that knows nothing of nine tokens costs ln 9 per token.",
            lambda f: _near(_ignorant(f, 1), math.log(9)),
        ),
        (
            "Weights are shares among the heads that are there, and a head's loss is a mean "
            "over its own targets.",
            lambda f: all(_near(_ignorant(f, heads), math.log(9)) for heads in (1, 2, 3)),
        ),
        (
            "Head i predicts the token i ahead: the second one the token after the next.",
            lambda f: _heads(f, 1, 2, 3) < 1e-3,
        ),
        (
            "The last token of a row has no next one: what a head says there must not count.",
            lambda f: _heads(f, 1, 2, wrong=1) < 1e-3,
        ),
        (
            "A mistake of the first head costs its share: three times as much if its weight is "
            "three times as large.",
            lambda f: _heads(f, 2, 2, weights=(3.0, 1.0)) > 2 * _heads(f, 1, 1, weights=(3.0, 1.0)),
        ),
    ],
    "15.recurrence": [  # (inputs (T, D), decay per channel (D,)) -> states (T, D)
        (
            "One state per token, and nothing was read before the first: that state is the "
            "first input.",
            lambda f: _states(f, [[2.0], [1.0]], [0.5])[0] == [2.0],
        ),
        (
            "What was read shrinks by d at each later token: an input of 8 is 2 two tokens "
            "later, at d = 1 / 2.",
            lambda f: _near(_states(f, [[8.0], [0.0], [0.0], [0.0]], [0.5])[2], 2),
        ),
        (
            "A token's own input arrives whole, and adds to what is left: try the inputs 8 and 1.",
            lambda f: _near(_states(f, [[8.0], [1.0]], [0.5])[1], 5),
        ),
        (
            "Every channel has a decay of its own.",
            lambda f: _near(_states(f, [[8.0, 8.0], [0.0, 0.0]], [0.5, 0.25])[1], 4, 2),
        ),
        (
            "An input of 1 at every token leads to 1 / (1 - d), also far into a row: try 200 "
            "tokens at d = 0.38.",
            lambda f: _near(_states(f, [[1.0]] * 200, [0.38])[-1], 1 / 0.62),
        ),
    ],
    "15.spike": [  # (inputs (T, D), alpha) -> -1, 0 or 1 for each, with a straight-through gradient
        (
            "Large inputs become 1, large negative ones -1, and those between 0: try 4, 0.1 "
            "and -4.",
            lambda f: f(torch.tensor([[4.0, 0.1, -4.0]]), 1.0).tolist() == [[1.0, 0.0, -1.0]],
        ),
        (
            "The threshold is alpha times the mean of the absolute values: at alpha = 1.5, "
            "only 6 of 1, -1, 4, 6.",
            lambda f: (
                f(torch.tensor([[1.0, -1.0, 4.0, 6.0]]), 1.5).tolist() == [[0.0, 0.0, 0.0, 1.0]]
            ),
        ),
        (
            "Each token has a threshold of its own: a quiet token spikes like a loud one.",
            lambda f: (
                f(torch.tensor([[0.5, 0.1], [500.0, 100.0]]), 1.0).tolist() == [[1.0, 0.0]] * 2
            ),
        ),
        (
            "Backward it acts as its input: every input has a gradient of one.",
            lambda f: _passes_on(f),
        ),
    ],
    # points, as tuples of two or more numbers, smaller is better -> those that nobody beats
    "20.front": [
        (
            "Of points that are better in one number and worse in the other, all stay: try (1, "
            "3), (2, 2) and (3, 1).",
            lambda f: _kept(f, (1, 3), (2, 2), (3, 1)) == [(1, 3), (2, 2), (3, 1)],
        ),
        (
            "Whoever is worse in both is beaten: try (1, 1) and (2, 2).",
            lambda f: _kept(f, (1, 1), (2, 2)) == [(1, 1)],
        ),
        (
            "Equal in one number and better in the other is enough: try (1, 2) and (1, 3), "
            "then (2, 1) and (3, 1).",
            lambda f: _kept(f, (1, 3), (1, 2)) == [(1, 2)] and _kept(f, (3, 1), (2, 1)) == [(2, 1)],
        ),
        (
            "Two equal points do not beat each other: both stay.",
            lambda f: _kept(f, (1, 1), (1, 1)) == [(1, 1), (1, 1)],
        ),
        (
            "Any count of numbers: (2, 2, 1) is beaten in two of them by (1, 1, 2), and still "
            "stays.",
            lambda f: _kept(f, (1, 1, 2), (2, 2, 1), (2, 2, 2)) == [(1, 1, 2), (2, 2, 1)],
        ),
        (
            "Keep the order in which the points were given.",
            lambda f: _kept(f, (3, 1), (1, 3), (2, 2)) == [(3, 1), (1, 3), (2, 2)],
        ),
    ],
    # ({name: [(cost, loss), ...]}, budget) -> the name with the lowest loss there, or None
    "20.leader": [
        (
            "At a budget where both were judged, the lower loss leads.",
            lambda f: f({"a": [(0, 9.0), (1, 5.0)], "b": [(0, 9.0), (1, 4.0)]}, 1) == "b",
        ),
        (
            "Between two points take the straight line: at 1, halfway from 9 to 1 is 5.",
            lambda f: (
                f({"a": [(0, 9.0), (2, 1.0)], "b": [(0, 9.0), (1, 4.0)]}, 1) == "b"
                and f({"a": [(0, 9.0), (2, 1.0)], "b": [(0, 9.0), (1, 6.0)]}, 1) == "a"
            ),
        ),
        (
            "What comes later does not count: at the budget 1 a loss that is reached at 2 is "
            "not there yet.",
            lambda f: f({"a": [(0, 5.0), (1, 4.0)], "b": [(0, 9.0), (1, 8.0), (2, 0.5)]}, 1) == "a",
        ),
        (
            "A curve that ends before the budget takes no part, however low it is.",
            lambda f: f({"a": [(0, 5.0), (1, 0.5)], "b": [(0, 9.0), (2, 8.0)]}, 1.5) == "b",
        ),
        (
            "Nor does one that begins after it: what was spent before the first step is spent.",
            lambda f: f({"a": [(2, 1.0), (3, 0.5)], "b": [(0, 9.0), (4, 8.0)]}, 1) == "b",
        ),
        (
            "Where nobody gets to the budget the answer is None.",
            lambda f: f({"a": [(0, 5.0), (1, 4.0)]}, 9) is None,
        ),
    ],
    "21.loss": [  # (sums, counts), a number of each rank -> the loss of the step
        ("One rank: its sum over its tokens.", lambda f: isclose(f([20.0], [10]), 2.0)),
        (
            "A token counts as much on every rank: 8 tokens at a loss of 1 and 2 tokens at 6 "
            "have the mean 2.",
            lambda f: isclose(f([8.0, 12.0], [8, 2]), 2.0),
        ),
        (
            "A rank without supervised tokens changes nothing, and nothing is divided by its zero.",
            lambda f: isclose(f([20.0, 0.0], [10, 0]), 2.0),
        ),
        (
            "More ranks with equal means have the same mean.",
            lambda f: isclose(f([4.0, 4.0, 4.0], [2, 2, 2]), 2.0),
        ),
    ],
    "21.ring": [  # (size in bytes, ranks) -> bytes that each rank sends in an all-reduce
        ("One rank has nobody to send to.", lambda f: f(100, 1) == 0),
        (
            "Two ranks: each sends a half to be added up, and a half as the sum: the size once.",
            lambda f: isclose(f(100, 2), 100),
        ),
        ("Four ranks: three quarters, twice.", lambda f: isclose(f(100, 4), 150)),
        (
            "With many ranks it nears twice the size, and never grows beyond.",
            lambda f: 1998 < f(1000, 1024) < 2000,
        ),
        ("Twice the size, twice the bytes.", lambda f: isclose(f(200, 8), 2 * f(100, 8))),
    ],
}
