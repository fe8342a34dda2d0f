"""Ternary and int8 rounding against float64, the straight-through gradients, sharing, and two bits
per weight.
"""

import copy
import pickle

import pytest
import torch

from nblib.methods.lrc import ternary


@pytest.fixture
def wide():
    """float64 without ties: no entry lies near a rounding boundary of either rule."""
    return torch.randn(48, 40, dtype=torch.float64)


def reference_ternary(W):
    s = max(float(W.abs().mean()), 1e-5)
    return torch.tensor(
        [[s * min(1, max(-1, round(float(w) / s))) for w in row] for row in W], dtype=torch.float64
    )


def reference_int8(x):
    rows = []
    for row in x:
        g = max(float(row.abs().max()), 1e-5)
        rows.append([g / 127 * min(127, max(-128, round(127 * float(v) / g))) for v in row])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("scale, dims", [("least_squares", (0, 1)), ("rows", (1,))])
def test_no_multiple_of_the_codes_is_nearer_than_least_squares(wide, scale, dims):
    W = wide.float()
    codes, factor = ternary.codes_and_scale(W, scale)
    assert torch.equal(codes, ternary.codes_and_scale(W)[0])  # the same codes
    left = (W - codes * factor).double()
    assert (left * codes).sum(dims).abs().max() < 1e-4  # what is left is orthogonal to them
    for away in (0.98, 1.02):
        assert (
            (W - away * factor * codes).double().square().sum(dims) > left.square().sum(dims)
        ).all()
    wider = (
        ternary.codes_and_scale(torch.randn(512, 512), scale)[1]
        / ternary.codes_and_scale(torch.randn(512, 512))[1]
    )
    assert 1.3 < float(wider.mean()) < 1.38  # of normally distributed weights


def test_a_row_of_small_weights_and_another_scale():
    W = torch.ones(4, 4)
    W[0] = 1e-3
    codes, factor = ternary.codes_and_scale(W, "rows")
    assert (
        codes[0].abs().sum() == 0
        and factor[0] == 0
        and torch.isfinite(ternary.ternary(W, "rows")).all()
    )
    with pytest.raises(ValueError, match="scale = 'max': allowed are mean, least_squares, rows"):
        ternary.codes_and_scale(W, "max")


def test_both_roundings_equal_a_reference_in_float64(wide):
    torch.testing.assert_close(
        ternary.ternary(wide.float()).double(), reference_ternary(wide), rtol=1e-6, atol=1e-7
    )
    torch.testing.assert_close(
        ternary.int8(wide.float()).double(), reference_int8(wide), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_entry_survives_and_nothing_leaves_its_range(dtype):
    x = torch.randn(64, 96).to(dtype) * 3
    q = ternary.int8(x)
    assert q.dtype == dtype and (q.abs().amax(-1) <= x.abs().amax(-1) * 1.01).all()
    half_a_level = x.float().abs().amax(-1, keepdim=True) / 254
    slack = 1.0 + 2 * torch.finfo(dtype).eps * 254  # the result itself is rounded to its dtype
    assert ((q.float() - x.float()).abs() <= half_a_level * slack).all()
    assert set(ternary.codes_and_scale(x)[0].unique().tolist()) == {-1.0, 0.0, 1.0}


def test_zeros_stay_zeros_and_finite():
    zeros = torch.zeros(3, 8, requires_grad=True)
    for rounding in (ternary.ternary, ternary.int8, lambda z: ternary.grouped(z, 4)):
        assert torch.equal(rounding(zeros), torch.zeros(3, 8))


@pytest.mark.parametrize(
    "rounding", [ternary.ternary, ternary.int8, lambda z: ternary.grouped(z, 8)]
)
def test_the_gradient_passes_straight_through(rounding):
    z = torch.randn(6, 40, requires_grad=True)
    weights = torch.randn(6, 40)
    (rounding(z) * weights).sum().backward()
    assert torch.equal(z.grad, weights)


def test_without_it_hardly_any_gradient_of_the_activations_is_left():
    x = torch.randn(16, 64, requires_grad=True)
    g = x.abs().amax(-1, keepdim=True)
    (torch.round(127 * x / g) * g / 127).mul(torch.randn(16, 64)).sum().backward()
    assert int((x.grad != 0).sum()) == 16  # the largest entry of each token


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(32, 8), (5, 7)])  # the second leaves a group half empty
def test_groups_share_a_scale(bits, shape):
    factor = torch.randn(shape, dtype=torch.float64)
    most, flat = 2 ** (bits - 1) - 1, factor.flatten()
    expected = torch.empty_like(flat)
    for start in range(0, len(flat), 32):
        group = flat[start : start + 32]
        scale = group.abs().max() / most
        expected[start : start + 32] = (group / scale).round() * scale
    torch.testing.assert_close(
        ternary.grouped(factor.float(), bits).double().flatten(), expected, rtol=1e-6, atol=1e-7
    )


def test_other_widths_are_refused_by_name():
    with pytest.raises(ValueError, match="bits = 3: allowed are 4 and 8"):
        ternary.group_codes(torch.randn(4), 3)


@pytest.mark.parametrize("shape", [(7, 5), (64, 64), (1, 1)])
def test_packing_takes_two_bits_and_returns_every_code(shape):
    codes = torch.randint(-1, 2, shape)
    packed = ternary.pack(codes)
    assert packed.dtype == torch.uint8 and len(packed) == -(-codes.numel() // 4)
    assert torch.equal(ternary.unpack(packed, codes.shape).long(), codes)


def test_the_same_tensor_is_rounded_once_and_another_again():
    once, x = ternary.Once(), torch.randn(3, 8)
    first = once(x)
    assert once(x).data_ptr() == first.data_ptr() and torch.equal(first, ternary.int8(x))
    assert once(x.clone()).data_ptr() != first.data_ptr()


def test_no_graph_is_kept_between_two_calls():
    """A loss that is dropped without a backward pass would keep all its activations."""
    once, x = ternary.Once(), torch.randn(3, 8, requires_grad=True)
    first, second = once(x), once(x)
    assert first.grad_fn is not second.grad_fn and once.result.grad_fn is None
    (first.sum() + 2 * second.sum()).backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_a_tensor_changed_in_place_is_rounded_again():
    once, x = ternary.Once(), torch.randn(3, 8)
    once(x)
    x.mul_(2).add_(1)
    assert torch.equal(once(x), ternary.int8(x))


def test_a_result_made_without_a_graph_is_not_handed_to_training():
    once, x = ternary.Once(), torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        once(x)
    assert once(x).requires_grad


def test_inference_tensors_are_rounded_too():
    with torch.inference_mode():
        x = torch.randn(3, 8)
        assert torch.equal(ternary.Once()(x), ternary.int8(x))


def test_copies_start_without_the_last_activation():
    once = ternary.Once()
    once(torch.randn(3, 8, requires_grad=True))
    for other in (copy.deepcopy(once), pickle.loads(pickle.dumps(once))):
        assert other.result is None
