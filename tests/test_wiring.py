"""Freezing by identity, and the canary: it finds what is dead, spares what is healthy, and leaves
no trace.
"""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from nblib import losses, models, wiring


def _loss(model, vocab=256):
    ids = torch.randint(vocab, (2, 12), generator=torch.Generator().manual_seed(3))
    return lambda: losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"] / 22


def _lora(model, **options):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options))


def test_freeze_trains_exactly_what_is_named(tiny):
    wiring.freeze(tiny, train=[tiny.model.layers[1].mlp, tiny.model.norm.weight])
    expected = {f"model.layers.1.mlp.{n}_proj.weight" for n in ("gate", "up", "down")} | {
        "model.norm.weight"
    }
    assert set(wiring.trainable(tiny)) == expected
    assert models.count(tiny)["trainable"] == sum(
        p.numel() for p in wiring.trainable(tiny).values()
    )


def test_freeze_refuses_packed_parameters():
    packed = torch.nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    model = torch.nn.Module()
    model.w = packed
    with pytest.raises(ValueError, match="dtype torch.uint8 cannot train"):
        wiring.freeze(model, train=[packed])


def test_select_leaves_out_the_head_and_swap_replaces_by_name(tiny):
    found = wiring.select(tiny, inside=tiny.model.layers[0])
    assert len(found) == 7 and "lm_head" not in wiring.select(tiny)
    changed = wiring.swap(
        tiny, lambda n, m: torch.nn.Identity() if n.endswith("q_proj") else None, found
    )
    assert changed == ["model.layers.0.self_attn.q_proj"]
    assert isinstance(tiny.model.layers[0].self_attn.q_proj, torch.nn.Identity)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_matrix_and_shape_are_those_of_what_the_layer_computes(family):
    for layer in wiring.select(
        models.tiny(64, family=family, hidden=32, layers=1, heads=2)
    ).values():
        out, width = wiring.shape(layer)
        x, bias = torch.randn(3, width), 0.0 if layer.bias is None else layer.bias
        torch.testing.assert_close(layer(x), x @ wiring.matrix(layer).T + bias)
        assert wiring.matrix(layer).shape == (out, width)


@pytest.mark.parametrize(
    "make", [lambda m: m, _lora, lambda m: _lora(m, init_lora_weights="pissa")]
)
def test_healthy_models_pass(tiny, make):
    model = make(tiny)
    seen = wiring.canary(model, _loss(model))
    assert seen.alive, seen.sentence
    assert len(seen.tensors) == len(wiring.trainable(model)) and not seen.dead()


def _both_zero(model):
    model = _lora(model)
    for name, p in model.named_parameters():
        if "lora_A" in name:
            torch.nn.init.zeros_(p)
    return model


def _reentrant_without_input_gradient(model):
    model = _lora(model, modules_to_save=["norm"])
    inner = model.get_base_model()
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    inner.disable_input_require_grads()
    return model


def _nan(model):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    return model


@pytest.mark.parametrize(
    "make, says",
    [
        (_both_zero, "trainable tensors are dead: .*zero"),
        (_nan, "dead: .*not finite"),
        (lambda m: m.requires_grad_(False), "nothing trains"),
        (_reentrant_without_input_gradient, "dead: .*none"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_dead_models_are_found(tiny, make, says):
    model = make(tiny)
    import re

    seen = wiring.canary(model, _loss(model))
    assert not seen.alive and re.search(says, seen.sentence), seen.sentence


def test_a_loss_without_a_graph_is_named(tiny):
    assert "no graph" in wiring.canary(tiny, lambda: torch.zeros(())).sentence


def test_names_that_should_train_and_do_not(tiny):
    wiring.freeze(tiny, train=[tiny.model.norm])
    seen = wiring.canary(tiny, _loss(tiny), expect={"model.norm.weight", "lm_head.weight"})
    assert not seen.alive
    assert (
        seen.sentence == "lm_head.weight should train but does not (1 tensors differ from `expect`)"
    )
    seen = wiring.canary(tiny, _loss(tiny), expect=set())
    assert (
        seen.sentence == "model.norm.weight trains but should not (1 tensors differ from `expect`)"
    )


def test_it_leaves_no_trace():
    # dropout draws from the generator
    model = models.tiny(256, family="gpt2", hidden=32, layers=2, heads=2).eval()
    loss = _loss(model)
    loss().backward()
    before = copy.deepcopy(
        [model.state_dict(), [p.grad for p in model.parameters()], torch.get_rng_state()]
    )
    assert wiring.canary(model, loss).alive
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values()))
    assert all(torch.equal(a, p.grad) for a, p in zip(before[1], model.parameters()))
    assert torch.equal(before[2], torch.get_rng_state()) and not model.training


def test_evaluating_puts_every_module_back_into_its_own_mode(tiny):
    tiny.train()
    tiny.model.layers[0].eval()  # a frozen part, deliberately in evaluation mode
    modes = [m.training for m in tiny.modules()]
    assert len(set(modes)) == 2
    with wiring.evaluating(tiny):
        assert not any(m.training for m in tiny.modules())
    assert [m.training for m in tiny.modules()] == modes
    with pytest.raises(KeyboardInterrupt), wiring.evaluating(tiny):
        raise KeyboardInterrupt  # the Stop button during an evaluation
    assert [m.training for m in tiny.modules()] == modes
    with wiring.in_mode(tiny, training=True):
        assert all(m.training for m in tiny.modules())
    assert [m.training for m in tiny.modules()] == modes


def test_the_canary_keeps_mixed_modes_too(tiny):
    tiny.train()
    tiny.model.norm.eval()
    assert wiring.canary(tiny, _loss(tiny)).alive
    assert tiny.training and not tiny.model.norm.training


def test_who_is_in_no_optimizer_is_named(tiny):
    names = list(wiring.trainable(tiny))
    first, rest = tiny.get_parameter(names[0]), [tiny.get_parameter(name) for name in names[1:]]
    assert wiring.missed(tiny, []) == names
    two = [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(rest[2:], lr=0.1)]
    assert wiring.missed(tiny, two) == names[1:3]
    with pytest.raises(
        ValueError, match=f"2 trainable parameters are in no optimizer, the first is {names[1]}"
    ):
        wiring.refuse_missed(tiny, two)
    for p in rest[:2]:
        p.requires_grad_(False)  # frozen: nobody need hold it
    assert wiring.missed(tiny, two) == []
    wiring.refuse_missed(tiny, two)
