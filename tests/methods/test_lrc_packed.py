"""The packed product is LRC's own: exactly in whole numbers and with float inputs, and it stays at
two bits.
"""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from experiments import ternary_product
from nblib import models
from nblib.methods import lrc
from nblib.methods.lrc import packed as product
from nblib.methods.lrc import ternary

COMPILED = pytest.param(
    True, marks=pytest.mark.skipif(product.kernel() is None, reason="no C++ compiler is here")
)


@pytest.fixture(params=[COMPILED, False], ids=["compiled", "torch"])
def way(request, monkeypatch):
    """With the C++, and as where no compiler is."""
    if not request.param:
        monkeypatch.setattr(product, "kernel", lambda: None)


def layer(
    out=70, width=90, rank=9, bias=True, scale="least_squares", dtype=torch.float32, **options
) -> lrc.LRCLinear:
    W = torch.randn(out, width)
    Q = W if options.get("joint") else ternary.ternary(W, scale)
    made = lrc.LRCLinear(
        Q.to(dtype), torch.randn(out).to(dtype) if bias else None, rank, scale=scale, **options
    )
    for factor in (made.U, made.V):
        torch.nn.init.normal_(factor, std=0.2)
    return made.requires_grad_(False)


@pytest.mark.parametrize("shape", [(8, 32), (70, 90), (3, 5), (64, 257)], ids=str)
def test_codes_come_back_and_take_two_bits(shape):
    codes = torch.randint(-1, 2, shape, dtype=torch.int8)
    packed = product.pack_codes(codes)
    assert torch.equal(product.open_codes(packed, shape), codes)
    assert packed.numel() == (shape[0] + -shape[0] % 8) * (shape[1] + -shape[1] % 32) // 4


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 40])
def test_whole_numbers_are_exact_at_their_largest(rows, way, monkeypatch):
    monkeypatch.setattr(product, "OPENED", 10 * 4096)  # blocks that do not divide the matrix
    codes = torch.randint(-1, 2, (24, 4096), dtype=torch.int8)
    x = torch.randint(-127, 128, (rows, 4096), dtype=torch.int8)
    x[0], codes[0] = 127, 1
    assert torch.equal(product.integers(x, product.pack_codes(codes)), x.int() @ codes.int().T)


def test_the_inputs_are_rounded_as_the_layer_rounds_them():
    x = torch.cat([torch.randn(5, 33), torch.zeros(1, 33)])
    codes, g = product.int8_codes(x)
    assert torch.equal(codes * g, ternary.int8(x)) and codes.dtype == torch.int8


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(scale="rows"),
        dict(bits=8),
        dict(bits=4),
        dict(joint=True, scale="mean"),
        {"bias": 0},
    ],
    ids=str,
)
def test_it_is_the_layers_product_to_the_rounding_of_its_sums(options, rows, way):
    own, x = layer(**options), torch.randn(rows, 90)
    packed = product.PackedLRC(own, factors="same")
    assert torch.allclose(packed(x), own(x), atol=3e-5)
    # the factors at 255 levels as well: that is about a hundredth
    rounded = product.PackedLRC(own)(x) - own(x)
    assert 0 < rounded.norm() < 0.02 * F.linear(x @ own.V, own.U).norm()


@torch.no_grad()
def test_it_is_the_layer_bit_for_bit_with_float_inputs():
    """With numbers whose sums are exact: where they are rounded, the order is that of the CPU's own
    kernels.
    """
    own = layer(scale="rows")
    own.weight.copy_(torch.randint(-1, 2, own.weight.shape) * 0.5**2)
    for numbers in (own.U, own.V, own.bias):
        numbers.copy_(torch.randint(-3, 4, numbers.shape))
    own.once = lambda x: x  # its inputs stay floats
    x = torch.randint(-99, 100, (2, 7, 90)).float()
    assert torch.equal(product.PackedLRC(own, factors="same", inputs="float")(x), own(x))


@pytest.mark.parametrize("rows", [1, 20])
def test_half_precision_comes_back_in_its_dtype(rows, way):
    own, x = layer(dtype=torch.bfloat16), torch.randn(rows, 90, dtype=torch.bfloat16)
    y = product.PackedLRC(own)(x)
    assert y.dtype == torch.bfloat16 and (y - own(x)).float().norm() < 0.02 * own(x).float().norm()


def corrected(**options):
    model = models.tiny(300, hidden=128, layers=2, heads=2)
    lrc.attach(model, **options)
    return model.eval()


@torch.no_grad()
def test_a_packed_model_says_the_same_in_a_third_of_the_bytes():
    model, ids = corrected(), torch.randint(300, (4, 24))
    packed = copy.deepcopy(model)
    assert product.pack(packed) == list(lrc.layers(model))
    logits, ours = model(ids).logits, packed(ids).logits
    assert (ours - logits).norm() < 0.02 * logits.norm()
    size = product.memory(packed)
    layers = [m for m in packed.modules() if isinstance(m, product.PackedLRC)]
    assert size["bytes"] == sum(b.nbytes for m in layers for b in m.buffers())
    assert size["share of fp16"] <= 0.35
    assert not any(list(m.parameters()) for m in layers)
    product.pack(model, factors="same")
    # 15 % in fp32 is more than the bar: the codes are not all
    assert product.memory(model)["share of fp16"] > 0.35


def test_a_square_layer_at_the_default_rank_stays_below_the_bar():
    """The worst shape: a rank is a share of the smaller side."""
    W = ternary_product.layer_of(512, 15.0)
    size = sum(b.nbytes for b in product.PackedLRC(W).buffers())
    assert 0.25 < size / (2 * 512**2) <= 0.35


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten._int_mm.default:
            self.shapes.append((args[0].shape, args[1].shape))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 17, 40])
def test_torchs_product_gets_shapes_that_a_card_takes(rows, monkeypatch):
    """More than 16 rows, both sides of the matrix multiples of 8: what the CUDA side of _int_mm
    asks for.
    """
    monkeypatch.setattr(product, "kernel", lambda: None)
    with Products() as seen:
        product.PackedLRC(layer())(torch.randn(rows, 90))
    assert len(seen.shapes) == 4
    for (m, k), (k_again, n) in seen.shapes:
        assert m > 16 and k % 8 == 0 and n % 8 == 0 and k == k_again


def test_it_is_traced_without_its_kernel(monkeypatch):
    own, x = layer(), torch.randn(2, 90)
    whole = torch.compile(product.PackedLRC(own, factors="same"), backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(whole(x), own(x), atol=3e-5)


def test_what_it_cannot_do_ends_in_a_sentence():
    with pytest.raises(RuntimeError, match="no gradients: call the model under torch.no_grad"):
        product.PackedLRC(layer())(torch.randn(2, 90, requires_grad=True))
    with pytest.raises(
        ValueError, match="factors = 'int4', inputs = 'int8': allowed are int8, same"
    ):
        product.PackedLRC(layer(), factors="int4")
    with pytest.raises(ValueError, match="no LRC layers: attach first"):
        product.pack(models.tiny(64, hidden=32, layers=1))
