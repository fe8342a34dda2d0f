"""Every divergence against torch.distributions and autograd in float64, the gradient of the
temperature included.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F
from toy_distillation import B, T, V, distilled, problem

from nblib import losses, memory
from nblib.methods.distill import divergences, objective


def _definition(divergence: str, t: torch.Tensor, s: torch.Tensor, T) -> torch.Tensor:
    """One position, by torch.distributions where it has the divergence."""
    p, q = Categorical(logits=t / T), Categorical(logits=s / T)
    if divergence == "forward":
        return T**2 * kl_divergence(p, q)
    if divergence == "reverse":
        return T**2 * kl_divergence(q, p)
    if divergence == "js":
        middle = Categorical(probs=(p.probs + q.probs) / 2)
        return T**2 * (kl_divergence(p, middle) + kl_divergence(q, middle)) / 2
    return -(T**2) * (p.probs * q.logits).sum()


def _plain(p: dict, temperature, *, divergence="forward", kd=1.0, ce=0.0, token_weights=None):
    total = 0.0
    for b in range(B):
        for t in range(T - 1):
            y = p["labels"][b, t + 1]
            if y == losses.IGNORED:
                continue
            s, said = p["w"] @ p["h"][b, t], p["tw"] @ p["th"][b, t]
            loss = kd * _definition(divergence, said, s, temperature) + ce * F.cross_entropy(s, y)
            total = total + loss * (1.0 if token_weights is None else token_weights[b, t + 1])
    return total


# every pair of two values once: chunks make a Latin square over divergences and temperatures
CASES = [
    (divergence, temperature, (1, 5, None)[(i + j) % 3])
    for i, divergence in enumerate(divergences.DIVERGENCES)
    for j, temperature in enumerate((0.7, 1.0, 4.0))
]


@pytest.mark.parametrize("divergence, temperature, chunk", CASES)
def test_every_loss_and_all_its_gradients_equal_the_definition(divergence, temperature, chunk):
    """With masked labels, token weights and the hard labels in the same pass; the gradient of T
    included.
    """
    p = problem()
    leaves = [p["h"].requires_grad_(), p["w"].requires_grad_()]
    temp = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    options = dict(
        divergence=divergence, kd=0.7, ce=0.3, token_weights=torch.rand(B, T, dtype=torch.float64)
    )
    ours, plain = distilled(p, temp, chunk=chunk, **options), _plain(p, temp, **options)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(0.37 * x, [*leaves, temp]) for x in (ours, plain))):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
        assert b.abs().max() > 1e-3


@pytest.mark.parametrize("divergence", divergences.DIVERGENCES)
def test_nothing_is_lost_or_pulls_where_student_and_teacher_agree(divergence):
    p = problem()
    p["th"], p["tw"] = p["h"].clone(), p["w"].clone()
    p["h"].requires_grad_()
    temp = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    value = distilled(p, temp, divergence=divergence)
    by_h, by_T = torch.autograd.grad(value, [p["h"], temp])
    assert by_h.abs().max() < 1e-12
    if divergence == "soft_ce":  # what is left is the teacher's own entropy
        rows = losses.shifted_rows(p["h"].detach(), p["labels"])[0] @ p["w"].T / 2
        torch.testing.assert_close(value, 4 * Categorical(logits=rows).entropy().sum())
    else:
        assert abs(float(value.detach())) < 1e-12 and abs(float(by_T)) < 1e-12


def test_the_teachers_impossible_tokens_are_no_nan():
    """Logits of -inf, as padded vocabularies have them."""
    p = problem()
    said = (p["th"] @ p["tw"].T).index_fill(2, torch.arange(50, V), -torch.inf)

    scores = divergences.stored(torch.tensor(2.0), SimpleNamespace(k=0))  # a cache of everything
    temp = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    p["h"].requires_grad_()
    for divergence in ("forward", "js", "soft_ce"):
        value, _ = objective.distillation(
            p["h"], p["w"], p["labels"], (said,), scores, temperature=temp, divergence=divergence
        )
        assert all(g.isfinite().all() for g in torch.autograd.grad(value, [p["h"], temp]))
        assert value.isfinite()


def test_t_squared_keeps_the_size_of_the_gradient():
    """Without it the gradient falls as 1 / T^2; with it there is a limit, that of fitting the
    centred logits.
    """
    p = problem()
    p["h"].requires_grad_()
    norms = {}
    for temperature in (8.0, 16.0, 32.0, 1e4):
        gradient = torch.autograd.grad(
            distilled(p, torch.tensor(temperature, dtype=torch.float64)), p["h"]
        )[0]
        norms[temperature] = float(gradient.norm())
    logits, wanted = (
        losses.shifted_rows(p[h], p["labels"])[0] @ p[w].T for h, w in (("h", "w"), ("th", "tw"))
    )
    apart = (logits - logits.mean(1, keepdim=True)) - (wanted - wanted.mean(1, keepdim=True))
    limit = float(torch.autograd.grad(apart.square().sum() / (2 * V), p["h"])[0].norm())
    assert norms[1e4] == pytest.approx(limit, rel=1e-2)
    plain = {temperature: norm / temperature**2 for temperature, norm in norms.items()}
    assert norms[8.0] / norms[32.0] == pytest.approx(1.0, abs=0.3) and plain[8.0] / plain[32.0] > 10


def test_the_logits_of_neither_model_are_held_whole():
    n, vocab = 1024, 32_768  # 128 MiB of logits for each
    h = torch.randn(1, n + 1, 32, requires_grad=True)
    w, th, tw = (
        torch.randn(vocab, 32, requires_grad=True),
        torch.randn(1, n + 1, 32),
        torch.randn(vocab, 32),
    )
    labels = torch.randint(vocab, (1, n + 1))
    one = torch.tensor(2.0)
    with memory.Account() as account:
        value, _ = objective.distillation(
            h, w, labels, (th,), divergences.live(one, tw), temperature=one, ce=0.5, chunk=16
        )
        value.backward()
    assert account.most < 0.3 * n * vocab * 4


def test_what_cannot_be_measured_is_refused():
    for options, message in (
        (("kl", "drawn"), "divergence = 'kl': allowed are forward, reverse, js, soft_ce"),
        (("forward", "all"), "tail = 'all': allowed are drawn, spread, bucket, none"),
    ):
        with pytest.raises(ValueError, match=message):
            divergences.check(*options)
    with pytest.raises(ValueError, match="tail = 'all'"):
        divergences.stored(torch.tensor(1.0), SimpleNamespace(k=0), tail="all")
