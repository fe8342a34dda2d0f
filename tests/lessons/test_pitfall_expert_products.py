"""P72: the lines shown as broken are the library's, and autocast reaches all other products."""

import pytest
import torch
from transformers.integrations import moe as experts

from lessons.pitfalls import expert_products, pitfall


def test_the_library_computes_as_the_broken_lines_do():
    installed = expert_products.computed(None)
    assert installed == pitfall("P72").broken()
    assert (
        installed["experts' products in bf16"] == 0
        and installed["share of the multiply-adds in fp32"] < 1
    )


def test_the_mended_product_is_that_of_each_expert_in_bf16():
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(16, 8, generator=draw), torch.randn(3, 8, 24, generator=draw)
    offs = torch.tensor([6, 6, 16], dtype=torch.int32)  # the second expert has no token
    with torch.autocast("cpu", torch.bfloat16):
        mended = expert_products.down_to_autocast(x, w, offs)
        wanted = torch.cat([x[:6] @ w[0], x[6:] @ w[2]])
    assert mended.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(mended, wanted)


def test_multiply_adds_are_counted_forward_and_backward():
    a, b = torch.randn(5, 7, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    with expert_products.Products() as counted:
        (a @ b).sum().backward()
    assert counted.work == {torch.float32: 3 * 5 * 7 * 3} and not counted.grouped.total()


@pytest.mark.parametrize("run", ["broken", "claimed", "fixed"])
def test_a_run_puts_the_product_back(run):
    before = experts._grouped_mm
    getattr(pitfall("P72"), run)()
    assert experts._grouped_mm is before
