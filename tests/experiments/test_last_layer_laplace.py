"""The dual form equals the Gaussian that the definition gives, over all weights of a small head."""

import pytest
import torch

from experiments import last_layer_laplace as laplace

TAU, VOCABULARY = 2.5, 6


@pytest.fixture
def head():
    """A head of six tokens, ten questions of three choices (two in one of them) and two new
    questions.
    """
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, 4, generator=draw).double()
    hidden = torch.randn(12, 4, generator=draw).double()
    tokens = torch.stack([torch.randperm(VOCABULARY, generator=draw)[:3] for _ in range(12)])
    tokens[3, 2] = -1
    return weight, hidden, tokens


def _logits(weight, hidden, tokens):
    scores = torch.einsum("id,icd->ic", hidden, weight[tokens.clamp_min(0)])
    return scores.masked_fill(tokens < 0, -torch.inf)


def _jacobian(hidden, tokens):
    """(N, C, V D): the derivative of each logit in each weight."""
    rows = torch.nn.functional.one_hot(tokens.clamp_min(0), VOCABULARY) * (tokens >= 0)[..., None]
    return torch.einsum("icv,id->icvd", rows.double(), hidden).flatten(2)


def test_the_covariance_is_that_of_the_exact_hessian(head):
    weight, hidden, tokens = head
    answer = torch.zeros(10, dtype=torch.long)

    def loss(w):
        z = _logits(w.view_as(weight), hidden[:10], tokens[:10])
        return torch.nn.functional.cross_entropy(z, answer, reduction="sum")

    hessian = torch.autograd.functional.hessian(loss, weight.flatten())
    inverse = torch.linalg.inv(hessian + TAU * torch.eye(len(hessian)))
    new = _jacobian(hidden[10:], tokens[10:])
    expected = new @ inverse @ new.transpose(1, 2)
    posterior = laplace.fit(hidden[:10], tokens[:10], _logits(weight, hidden[:10], tokens[:10]))
    found = laplace.covariance(posterior, hidden[10:], tokens[10:], precision=TAU)
    assert torch.allclose(found, expected, atol=1e-10)


def test_two_choices_and_one_question_have_a_closed_form():
    """The two logits see 2 weights with inputs h; in the direction of their difference H is tau + 2
    p (1 - p) h^2.
    """
    h, gap, tau = 1.7, 0.6, 0.9
    hidden, tokens = torch.tensor([[h]]), torch.tensor([[0, 1]])
    posterior = laplace.fit(hidden, tokens, torch.tensor([[gap, 0.0]]))
    found = laplace.covariance(posterior, hidden, tokens, precision=tau)[0]
    p = 1 / (1 + torch.tensor(-gap).double().exp())
    of_difference = found[0, 0] + found[1, 1] - 2 * found[0, 1]
    assert float(of_difference) == pytest.approx(
        2 * h**2 / (tau + 2 * float(p * (1 - p)) * h**2), rel=1e-6
    )


def test_a_strong_prior_is_the_plain_model_and_a_weak_one_doubts(head):
    weight, hidden, tokens = head
    z = _logits(weight, hidden, tokens)
    posterior = laplace.fit(hidden[:10], tokens[:10], z[:10])
    found = {}
    for tau in (1e9, 10.0, 0.1):
        spread = laplace.covariance(posterior, hidden, tokens, precision=tau)
        found[tau] = laplace.predict(z, spread, samples=4000)
    assert torch.allclose(found[1e9], z.softmax(-1), atol=1e-3)
    confidence = [float(found[tau].amax(1).mean()) for tau in (1e9, 10.0, 0.1)]
    assert confidence[0] > confidence[1] > confidence[2]
    assert float(found[0.1][3, 2]) == 0  # a choice that is not there
    with pytest.raises(ValueError, match="precision = 0: must be positive"):
        laplace.covariance(posterior, hidden, tokens, precision=0)


def test_the_precision_is_the_one_of_lowest_loss(head):
    weight, hidden, tokens = head
    z = 10 * _logits(weight, hidden, tokens)  # far too sure
    z[3, 2] = -torch.inf
    posterior = laplace.fit(hidden[:10], tokens[:10], z[:10])
    wrong = z.argmin(1)
    wrong[3] = int(z[3, :2].argmin())
    choose = dict(precisions=(1e-3, 1.0, 1e6))
    assert laplace.choose(posterior, hidden, tokens, z, wrong, **choose) == 1e-3
    assert laplace.choose(posterior, hidden, tokens, z, z.argmax(1), **choose) == 1e6
