"""A student narrower than its teacher: what does not matter goes first, and leaves no trace."""

import pytest
import torch

from nblib import models
from nblib.methods.distill import pruned_width


@pytest.fixture(params=["qwen3", "llama"])
def teacher(request):
    shape = dict(hidden=32, layers=2, heads=4, seed=3)
    return models.as_teacher(models.tiny(64, family=request.param, **shape))


@pytest.fixture
def batch():
    return {"input_ids": torch.randint(64, (3, 12), generator=torch.Generator().manual_seed(0))}


def score(net, batch):
    with torch.no_grad():
        return net.eval()(**batch).logits


def test_all_of_it_is_the_teacher(teacher, batch):
    found = pruned_width.importance(teacher, [batch])
    student = pruned_width.narrowed(teacher, found)
    assert torch.equal(score(student, batch), score(teacher, batch))
    assert student.config.num_key_value_heads == 2 and all(
        p.requires_grad for p in student.parameters()
    )
    assert not {p.data_ptr() for p in student.parameters()} & {
        p.data_ptr() for p in teacher.parameters()
    }


def test_heads_and_inner_channels_that_give_nothing_go_first_and_leave_no_trace(teacher, batch):
    with torch.no_grad():
        for at, block in enumerate(teacher.model.layers):
            block.mlp.up_proj.weight[at::2] = 0  # other channels in each layer
            block.self_attn.v_proj.weight.view(2, -1, 32)[at] = 0  # another key head in each
    before = score(teacher, batch)
    inner = teacher.config.intermediate_size // 2
    student = pruned_width.narrowed(
        teacher, pruned_width.importance(teacher, [batch]), key_heads=1, inner=inner
    )
    torch.testing.assert_close(score(student, batch), before, rtol=1e-4, atol=1e-5)
    sizes = student.config
    assert (sizes.num_attention_heads, sizes.num_key_value_heads, sizes.intermediate_size) == (
        2,
        1,
        inner,
    )
    assert (
        sizes.num_hidden_layers == 2
        and student.model.layers[0].self_attn.q_proj.weight.shape[0] == 16
    )


def test_hidden_channels_that_are_always_zero_go_first(teacher, batch):
    """They add nothing to a mean square, so only its divisor is another: by that factor the states
    are smaller.
    """
    with torch.no_grad():
        gone = torch.arange(32) % 4 == 0
        for name, p in teacher.named_parameters():
            if "embed_tokens" in name:
                p[:, gone] = 0
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                p[gone] = 0
    found = pruned_width.importance(teacher, [batch])
    assert (found["hidden"][gone] == 0).all() and (found["hidden"][~gone] > 0).all()
    before = score(teacher, batch)
    with torch.no_grad():  # the mean is over 24 and not over 32 channels
        for name, p in teacher.named_parameters():
            if name.endswith("layernorm.weight") or name == "model.norm.weight":
                p.mul_((32 / 24) ** 0.5)
    student = pruned_width.narrowed(teacher, found, hidden=24)
    torch.testing.assert_close(score(student, batch), before, rtol=1e-3, atol=1e-3)
    assert student.get_input_embeddings().weight.shape == (64, 24)


def test_the_most_important_stay_in_their_order(teacher, batch):
    found = pruned_width.importance(teacher, [batch, batch])
    assert (
        found["heads"].shape == (2, 2)
        and found["inner"].shape == (2, 96)
        and found["hidden"].shape == (32,)
    )
    student = pruned_width.narrowed(teacher, found, inner=40)
    kept = found["inner"][1].topk(40).indices.sort().values
    expected = teacher.model.layers[1].mlp.up_proj.weight[kept]
    assert torch.equal(student.model.layers[1].mlp.up_proj.weight, expected)
    least = float(found["inner"][1][kept].min())
    assert sum(float(value) > least for value in found["inner"][1]) == 39


def test_refused(teacher, batch):
    found = pruned_width.importance(teacher, [batch])
    for wrong in (dict(key_heads=3), dict(inner=0), dict(hidden=33)):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} = .*those of the teacher"):
            pruned_width.narrowed(teacher, found, **wrong)
    with pytest.raises(ValueError, match="batches: none"):
        pruned_width.importance(teacher, [])
    with pytest.raises(ValueError, match="GPT2LMHeadModel: its blocks have no self_attn.q_proj"):
        pruned_width.importance(
            models.tiny(64, family="gpt2", hidden=32, layers=1, heads=2), [batch]
        )
