"""CKA against its printed estimators in float64, and the loss that is made of it."""

import pytest
import torch

from nblib import models
from nblib.methods.distill import feature_dynamics
from nblib.methods.distill.feature_dynamics import Dynamics


@pytest.fixture
def teacher():
    return models.as_teacher(models.tiny(256, hidden=48, layers=4, heads=2, seed=9))


def _gram_hsic(x, y):
    """Song's estimator as it is printed, with n x n kernels."""
    n = len(x)
    K, L = x @ x.T, y @ y.T
    K.fill_diagonal_(0), L.fill_diagonal_(0)
    one = torch.ones(n, dtype=x.dtype)
    inner = (
        (K @ L).trace()
        + (one @ K @ one) * (one @ L @ one) / ((n - 1) * (n - 2))
        - 2 * (one @ K @ L @ one) / (n - 2)
    )
    return inner / (n * (n - 3))


def test_cka_equals_the_printed_estimators_and_its_gradient_autograds():
    x, y = torch.randn(40, 7, dtype=torch.float64) + 3, torch.randn(40, 11, dtype=torch.float64)
    x.requires_grad_()
    printed = _gram_hsic(x, y) / (_gram_hsic(x, x) * _gram_hsic(y, y)).sqrt()
    ours = feature_dynamics.cka(x, y)
    torch.testing.assert_close(ours, printed)
    torch.testing.assert_close(*(torch.autograd.grad(z, x)[0] for z in (ours, printed)))
    centre = torch.eye(40, dtype=torch.float64) - 1 / 40
    K, L = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre
    plain = (K * L).sum() / ((K * K).sum() * (L * L).sum()).sqrt()
    torch.testing.assert_close(feature_dynamics.cka(x, y, debiased=False), plain)


@pytest.mark.parametrize("debiased", [True, False])
def test_cka_is_1_for_rotated_scaled_and_moved_states(debiased):
    x = torch.randn(60, 8, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    assert feature_dynamics.cka(x, 3 * x @ rotation + 5, debiased=debiased) == pytest.approx(1.0)


def test_independent_states_look_alike_to_the_plug_in_estimator_only():
    """The write-up's 0.77 to 0.62 of `1 - CKA` was close to this floor."""
    x, y = torch.randn(512, 768), torch.randn(512, 768)
    plug_in, fair = (
        float(feature_dynamics.cka(x, y, debiased=False)),
        float(feature_dynamics.cka(x, y)),
    )
    assert plug_in == pytest.approx(0.60, abs=0.03) and abs(fair) < 0.02
    shuffled = feature_dynamics.floor(x, x @ torch.randn(768, 768), debiased=False, draws=3)
    assert shuffled.shape == (3,) and float(shuffled.mean()) > 0.4
    assert feature_dynamics.floor(x, x, draws=4).abs().max() < 0.02 and float(
        feature_dynamics.cka(x, x)
    ) == pytest.approx(1.0)


def test_dynamics_is_one_minus_cka_of_updates_times_tokens(tiny, teacher):
    ids = torch.randint(256, (3, 12))
    states, wanted = (m(ids, output_hidden_states=True).hidden_states for m in (tiny, teacher))
    ours = Dynamics([(0, 1)], tiny, teacher)(states, wanted, ids)
    updates = (
        (states[1] - states[0])[:, :-1].flatten(0, 1),
        (wanted[2] - wanted[1])[:, :-1].flatten(0, 1),
    )
    torch.testing.assert_close(ours, 33 * (1 - feature_dynamics.cka(*updates)))
    same = Dynamics([(1, 1)], teacher, teacher)(wanted, wanted, ids)
    assert abs(float(same)) < 1e-3
