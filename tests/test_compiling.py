"""Recomputed and compiled blocks give the same gradients."""

import pytest
import torch

from nblib import compiling, losses, models


@pytest.mark.parametrize("family", models.FAMILIES)
def test_checkpointed_blocks_give_the_same_bits(family):
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.randint(64, (2, 16))
    found = {}
    for name, prepare in {"plain": lambda m: m, "checkpointed": compiling.checkpoint_blocks}.items():
        model = prepare(models.tiny(64, family=family, hidden=32, layers=2, heads=2)).train()
        torch.manual_seed(0)
        with FlopCounterMode(display=False) as flops:
            losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"].backward()
        found[name] = flops.get_total_flops(), [p.grad for p in model.parameters()]
    assert found["checkpointed"][0] > found["plain"][0]  # it does recompute
    assert all(torch.equal(a, b) for a, b in zip(found["plain"][1], found["checkpointed"][1]))


@pytest.mark.slow
def test_compiled_blocks_keep_names_and_gradients():
    ids = torch.randint(64, (2, 16))
    plain, compiled = (models.tiny(64, hidden=32, layers=2, heads=2) for _ in range(2))
    compiling.compile_blocks(compiled, backend="aot_eager")
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    for model in (plain, compiled):
        losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"].backward()
    for a, b in zip(plain.parameters(), compiled.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_blocks_are_the_longest_list_of_layers_and_a_model_without_one_is_refused(tiny):
    assert compiling.blocks(tiny) == list(tiny.model.layers)
    with pytest.raises(ValueError, match="Linear has no list of layers"):
        compiling.blocks(torch.nn.Linear(2, 2))
