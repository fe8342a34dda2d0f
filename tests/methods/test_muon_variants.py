"""Polar Express and NorMuon against their papers' formulas, and against plain Muon where they are
switched off.
"""

import copy

import pytest
import torch
from torch import nn

from experiments import muon_race
from nblib.methods import muon
from nblib.methods.muon import Muon, groups, variants

QUINTIC = [muon.QUINTIC] * muon.ITERATIONS


def matrix(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_spectrum(low, *, out=24, into=40, seed=0):
    """A matrix whose singular values over its norm are spread evenly in the logarithm from about
    `low` on.
    """
    U, _, Vh = torch.linalg.svd(matrix(out, into, seed=seed), full_matrices=False)
    drawn = torch.rand(out, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return U @ torch.diag(low**drawn) @ Vh


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("low", [1e-2, 1e-1])
def test_five_rounds_come_closer_to_one_than_the_quintic(seed, low):
    G = with_spectrum(low, seed=seed)
    ends = [
        torch.linalg.svdvals(variants.orthogonalise(G[None], which, dtype=torch.float64))
        for which in (variants.polar_express(), QUINTIC)
    ]
    ours, quintic = (float((s - 1).abs().max()) for s in ends)
    assert ours < 0.2 < quintic


def test_parity_with_algorithm_1_of_the_paper():
    """Line by line: divide by 1.01 times the norm, then a X + (b A + c A^2) X with coefficients of
    each round.
    """
    G = matrix(3, 20, 12)
    for steps in (1, 3, 5, 10):
        listed = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in variants.POLAR[:-1]] + [
            variants.POLAR[-1]
        ]
        X = G.mT / (G.norm(dim=(-2, -1), keepdim=True) * 1.01)
        for a, b, c in (listed + 9 * listed[-1:])[:steps]:
            A = X @ X.mT
            X = a * X + (b * A + c * A @ A) @ X
        rounds = variants.polar_express(steps)
        assert len(rounds) == steps
        ours = variants.orthogonalise(G, rounds, dtype=torch.float64)
        torch.testing.assert_close(ours, X.mT, rtol=1e-10, atol=1e-12)
        s = torch.linalg.svdvals(G) / G.norm(dim=(-2, -1))[:, None]
        torch.testing.assert_close(
            torch.linalg.svdvals(ours), variants.response(s, rounds).sort(descending=True).values
        )
    with pytest.raises(ValueError, match="steps = 0"):
        variants.polar_express(0)


def test_the_same_triple_in_each_round_is_plain_muon():
    for G in (matrix(2, 8, 16), matrix(1, 16, 8)):
        assert torch.equal(variants.orthogonalise(G, QUINTIC), muon.orthogonalise(G))
        s = G.abs() / 5
        assert torch.equal(variants.response(s, QUINTIC), muon.response(s))


def test_equal_rows_are_the_papers_formula_over_several_steps():
    """v <- b v + (1 - b) mean O^2, O / (sqrt(v) + eps), then 0.2 sqrt(mn) over the norm, in
    float64.
    """
    beta2, m, n = 0.95, 24, 10
    v, own = torch.zeros(m, dtype=torch.float64), torch.zeros(1, m, 1, dtype=torch.float64)
    for step in range(5):
        O = matrix(m, n, seed=step)
        v = beta2 * v + (1 - beta2) * O.pow(2).sum(1) / n
        U = O / (v.sqrt()[:, None] + 1e-8)
        paper = 0.2 * (m * n) ** 0.5 * U / U.norm()
        ours = variants.equal_rows(O[None], own, beta2=beta2)[0] * muon.scale(
            m, n, "match_rms_adamw"
        )
        torch.testing.assert_close(ours, paper, rtol=1e-12, atol=0)


def stepped(kind, start, grads, **options):
    p = nn.Parameter(start.clone())
    optimizer = kind([p], lr=0.1, compute="fp32", **options)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    return p.detach(), optimizer


def test_rows_move_alike_at_the_first_step_and_those_of_muon_do_not():
    """The same gradient all the time: so does the mean of the rows' squares.

    A tall matrix, whose rows could differ.
    """
    start, g = matrix(48, 12, dtype=torch.float32), matrix(48, 12, seed=1, dtype=torch.float32)
    moved = {}
    for kind in (Muon, variants.NorMuon):
        end, _ = stepped(kind, start, [g])
        rows = (end - start).square().mean(dim=1).sqrt()
        moved[kind] = float(rows.max() / rows.min())
    assert moved[variants.NorMuon] == pytest.approx(1, rel=1e-3) and moved[Muon] > 1.5


def test_switched_off_both_are_plain_muon_to_the_bit(monkeypatch):
    start, grads = (
        matrix(4, 12, 6, dtype=torch.float32),
        [matrix(4, 12, 6, seed=s, dtype=torch.float32) for s in (1, 2)],
    )
    plain, _ = stepped(Muon, start, grads, halves=True, weight_decay=0.1)
    monkeypatch.setattr(variants.NorMuon, "beta2", None)
    monkeypatch.setattr(variants.PolarExpress, "rounds", QUINTIC)
    for kind in (variants.NorMuon, variants.PolarExpress):
        other, optimizer = stepped(kind, start, grads, halves=True, weight_decay=0.1)
        assert torch.equal(plain, other) and set(optimizer.state_dict()["state"][0]) == {
            "momentum_buffer"
        }


def test_each_map_of_a_stack_is_treated_alone_and_an_expert_without_a_token_rests():
    """A stack of experts in halves is as many matrices by themselves; what rests keeps weights and
    row sizes.
    """
    start, grads = (
        matrix(3, 8, 6, dtype=torch.float32),
        [matrix(3, 8, 6, seed=s, dtype=torch.float32) for s in (1, 2)],
    )
    grads[1][2] = 0
    end, optimizer = stepped(variants.NorMuon, start, grads, halves=True)
    for e, half in ((0, 0), (1, 1), (2, 0)):
        rows = slice(4 * half, 4 * half + 4)
        alone, single = stepped(
            variants.NorMuon, start[e, rows], [g[e, rows] for g in grads if g[e].any()]
        )
        torch.testing.assert_close(end[e, rows], alone, rtol=0, atol=2e-6)
        # (6, 4, 1): gate and up of each expert
        sizes = optimizer.state_dict()["state"][0]["row_squares"]
        torch.testing.assert_close(
            sizes[2 * e + half], single.state_dict()["state"][0]["row_squares"][0]
        )


@pytest.mark.parametrize("kind", [variants.PolarExpress, variants.NorMuon])
def test_a_run_that_goes_on_is_the_straight_run(kind):
    start, grads = (
        matrix(10, 6, dtype=torch.float32),
        [matrix(10, 6, seed=s, dtype=torch.float32) for s in range(4)],
    )
    straight, _ = stepped(kind, start, grads)
    half, first = stepped(kind, start, grads[:2])
    p = nn.Parameter(half.clone())
    second = kind([p], lr=0.1, compute="fp32")
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for g in grads[2:]:
        p.grad = g.clone()
        second.step()
    assert torch.equal(straight, p.detach())


@pytest.mark.parametrize("name", ["polar_express", "normuon"])
def test_a_racer_trains_a_mixture_with_its_own_optimizer(name):
    model = muon_race.backbone(
        64, family="qwen3_moe", hidden=16, layers=1, heads=2, width=16, experts=4, top_k=2
    )
    matrices, rest = muon_race.optimizers(muon_race.Setting(optimizer=name), model)
    assert type(matrices) is muon_race.KINDS[name] and isinstance(rest, torch.optim.AdamW)
    assert type(groups.optimizers(model)[0]) is Muon
    before = [p.detach().clone() for p in model.parameters()]
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    for optimizer in (matrices, rest):
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert sum(not torch.equal(p, q) for p, q in zip(before, model.parameters())) > 8
