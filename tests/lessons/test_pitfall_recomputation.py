"""Recomputation: its price, torch's fused loss, and the library's switch that turns the cache
off.
"""

import torch

from lessons.pitfalls import bench, recomputation
from lessons.pitfalls.recomputation import kept_and_flops, step_memory, torch_linear


def test_frozen_weights_make_checkpointing_dearer():
    def price(frozen):
        with_it, without = (
            kept_and_flops(4, how, frozen=frozen)["work over forward"]
            for how in ("blocks", "nothing")
        )
        return with_it / without - 1

    assert 0.2 < price(False) < 1 / 3 < price(True) < 0.5


def test_torchs_fused_loss_saves_nothing_unless_told():
    assert step_memory(torch_linear)["copies"] > 2
    assert step_memory(lambda model, ids: torch_linear(model, ids, chunk=128))["copies"] < 1


def test_the_librarys_own_switch_turns_the_cache_off():
    ids, model, reference = recomputation.tokens(), recomputation.lora(), recomputation.lora()
    reference.enable_input_require_grads()
    right = bench.flow(reference, lambda: recomputation.whole_logits(reference, ids))["gradients"]
    model.activation_checkpointing_enable({"use_reentrant": True})
    got = bench.flow(model, lambda: model(input_ids=ids, labels=ids, use_cache=True).loss)[
        "gradients"
    ]
    assert all(torch.equal(got[name], gradient) for name, gradient in right.items())
