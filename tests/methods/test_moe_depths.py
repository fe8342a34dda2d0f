"""Layers that skip tokens: identity, capacity, positions, causality, training against evaluation,
caches.
"""

import copy

import pytest
import torch
from torch import nn

from lessons import skipping
from nblib import compiling, losses, models, text, train
from nblib.methods import moe
from nblib.methods.moe import depths


@pytest.fixture
def rows():
    return torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(3))


def batch_of(rows):
    return {"input_ids": rows, "labels": rows}


def deep(family="qwen3", **options):
    model = models.tiny(256, family=family, hidden=32, layers=4, heads=2)
    options = dict(capacity=0.5) | options
    depths.attach(model, **options)
    with torch.no_grad():  # decisions that differ from token to token
        for m in depths.wrapped(model).values():
            m.router.weight.normal_(std=1.0)
            m.predictor[2].weight.normal_(std=8.0), m.predictor[2].bias.zero_()
    return model


def through(model, rows):
    """Input, output and choice of the first layer that skips."""
    layer, kept = next(iter(depths.wrapped(model).values())), {}
    handle = layer.register_forward_hook(
        lambda m, args, kwargs, output: kept.update(
            x=(args or (kwargs["hidden_states"],))[0], y=output
        ),
        with_kwargs=True,
    )
    with depths.choices(model) as made:
        model.base_model(input_ids=rows, use_cache=False)
    handle.remove()
    return kept["x"].detach(), kept["y"].detach(), next(iter(made.values()))[0]


@pytest.mark.parametrize("training", [True, False])
def test_skipped_tokens_are_the_identity_to_the_bit(rows, training):
    x, y, choice = through(deep().train(training), rows)
    assert 0 < choice.chosen.sum() < choice.chosen.numel()
    assert torch.equal(y[~choice.chosen], x[~choice.chosen])
    assert not (y[choice.chosen] == x[choice.chosen]).all(dim=-1).any()


def test_capacity_is_kept_in_training(rows):
    for capacity, count in ((0.5, 12), (0.75, 18), (0.3, 8), (0.01, 1), (1.0, 24)):
        _, _, choice = through(deep(capacity=capacity), rows)
        assert choice.chosen.sum(dim=1).tolist() == [count] * 4


@pytest.mark.parametrize("training", [True, False])
def test_the_chosen_attend_to_the_chosen_at_their_own_positions(rows, training):
    """Against the bare layer on the whole row with a mask that hides the skipped; also with ragged
    choices.
    """
    model = deep().train(training)
    x, y, choice = through(model, rows)
    layer = next(iter(depths.wrapped(model).values()))
    T = rows.shape[1]
    sees = torch.ones(T, T, dtype=torch.bool).tril() & choice.chosen[:, None, None, :]
    sees = sees | torch.eye(T, dtype=torch.bool)  # a row of the mask must not be empty
    positions = torch.arange(T)[None]
    turned = model.model.rotary_emb(x, positions)
    full = layer.block(x, attention_mask=sees, position_ids=positions, position_embeddings=turned)
    expected = x + choice.scores.sigmoid()[..., None] * (full - x)
    torch.testing.assert_close(y[choice.chosen], expected[choice.chosen], rtol=1e-5, atol=1e-6)
    if not training:
        assert len(set(choice.chosen.sum(dim=1).tolist())) > 1


def test_the_block_is_told_the_positions_of_its_tokens(rows):
    model, told = deep(layers=[1]), []
    layer = model.model.layers[1]
    layer.block.register_forward_pre_hook(
        lambda m, args, kwargs: told.append(kwargs["position_ids"]), with_kwargs=True
    )
    _, _, choice = through(model, rows)
    assert told[0].tolist() == [row.nonzero().flatten().tolist() for row in choice.chosen]


def test_a_mask_is_cut_to_the_chosen(rows):
    """Padding on the left: the padded model sees what the bare rows see."""
    model = deep().eval()
    bare = model(input_ids=rows).logits
    padded = torch.cat([torch.zeros(4, 3, dtype=torch.long), rows], dim=1)
    mask = (torch.arange(27) >= 3).long().expand(4, -1)
    positions = (torch.arange(27) - 3).clamp_min(0).expand(4, -1)
    seen = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
    torch.testing.assert_close(seen, bare, rtol=1e-4, atol=1e-5)


def test_no_later_token_changes_an_earlier_output(rows):
    other = rows.clone()
    other[:, 12:] = (other[:, 12:] + 7) % 256
    for model, causal in (
        (deep().eval(), True),
        (deep(causal=True).train(), True),
        (deep().train(), False),
    ):
        early, again = model(input_ids=rows).logits[:, :12], model(input_ids=other).logits[:, :12]
        assert torch.allclose(early, again, atol=1e-5) == causal


def test_causal_training_is_evaluation_to_the_bit(rows):
    model = deep(causal=True)
    assert torch.equal(model.train()(input_ids=rows).logits, model.eval()(input_ids=rows).logits)


def test_with_the_same_choice_training_and_evaluation_are_one_function(rows):
    model = deep(layers=[1]).train()
    _, y, choice = through(model, rows)
    layer = next(iter(depths.wrapped(model).values()))
    layer.predictor = Told(choice.highest)
    _, again, evaluated = through(model.eval(), rows)
    assert torch.equal(evaluated.chosen, choice.chosen) and torch.equal(again, y)


class Told(nn.Module):
    """A network that has learnt its task perfectly."""

    def __init__(self, highest):
        super().__init__()
        self.highest = highest

    def forward(self, x):
        return self.highest.float()[..., None] - 0.5


def test_the_router_learns_and_the_second_network_leaves_the_trunk_alone(rows):
    model = deep()
    sum(depths.loss()(model, batch_of(rows)).values()).backward()
    for m in depths.wrapped(model).values():
        assert m.router.weight.grad.norm() > 0 and m.predictor[0].weight.grad.norm() > 0
    trunk = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    losses.causal_lm(model, batch_of(rows))["ce"].backward()
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, trunk, rtol=1e-5, atol=1e-6)


def test_training_teaches_the_decision(stream, machine):
    model = models.tiny(256, hidden=32, layers=2, heads=2)
    depths.attach(model, capacity=0.5)
    held = text.fixed_rows(stream, length=32, limit=32)
    before = skipping.agreement(model, held)[0]["agree"]
    options = dict(total=100, loss=depths.loss(weight=1.0), machine=machine)
    train.fit(
        model, text.Batches(stream, rows=8, length=32), train.adamw(model, lr=1e-2), **options
    )
    (after,) = skipping.agreement(model, held)
    assert after["agree"] > max(0.7, before + 0.1) and 0.3 < after["worked on"] < 0.7


def test_generation_with_a_cache_is_generation_without(rows):
    model = deep().eval()
    greedy = dict(max_new_tokens=12, do_sample=False)
    assert torch.equal(
        model.generate(rows[:1, :6], use_cache=True, **greedy),
        model.generate(rows[:1, :6], use_cache=False, **greedy),
    )
    with pytest.raises(ValueError, match="one row only"):
        model.generate(rows[:, :6], use_cache=True, **greedy)
    with pytest.raises(ValueError, match="first layer"):
        deep(layers=[0]).eval().generate(rows[:1, :6], use_cache=True, **greedy)


def test_checkpointed_gradients_are_the_same_with_skipping(rows):
    grads, start = {}, deep("qwen3_moe")
    for checkpointed in (False, True):
        model = copy.deepcopy(start)
        if checkpointed:
            compiling.checkpoint_blocks(model)
        terms = moe.loss(language=depths.loss())(model, batch_of(rows))
        sum(terms.values()).backward()
        grads[checkpointed] = {n: p.grad for n, p in model.named_parameters()}
    for name, grad in grads[False].items():
        torch.testing.assert_close(grad, grads[True][name], rtol=1e-5, atol=1e-6)


def test_the_fault_doubles_what_is_skipped(rows):
    x, y, choice = through(deep(skipped="doubled"), rows)
    assert torch.equal(y[~choice.chosen], 2 * x[~choice.chosen])
    x, y, choice = through(deep(skipped="doubled").eval(), rows)
    assert torch.equal(y[~choice.chosen], 2 * x[~choice.chosen])


@pytest.mark.parametrize(
    "wrong", [dict(capacity=0.0), dict(capacity=1.5), dict(layers=[9]), dict(skipped="zero")]
)
def test_attach_refuses_by_name(wrong, tiny):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        depths.attach(tiny, **wrong)
    depths.attach(tiny)
    with pytest.raises(ValueError, match="wrapped already"):
        depths.attach(tiny)
