"""Each guard answers a question about numbers with a sentence or None, alone and inside the
loop.
"""

import math
import time

import pytest
import torch
from conftest import FP32

from nblib import guards, train


def test_a_spike_is_judged_by_the_median_and_only_after_some_steps():
    assert guards.spiked(9.0, [1.0] * 7) is None  # too few to know what is usual
    assert guards.spiked(1.9, [1.0] * 8) is None
    assert guards.spiked(9.0, [1.0] * 8) == "loss 9.000 is 9.0 times the median of the last 8 steps"
    assert guards.spiked(9.0, [1.0] * 7 + [100.0])  # one earlier spike does not raise the bar
    assert guards.spiked(math.nan, [1.0] * 8) is None  # the footgun: a comparison with nan is False
    assert (
        not guards.is_finite(1.0, math.nan)
        and not guards.is_finite(math.inf)
        and guards.is_finite(1.0, 0.0)
    )


def test_a_tenth_of_clipped_steps_and_a_fifth_of_waiting_are_allowed():
    assert guards.clipped_too_often([True] * 49) is None  # too few
    assert guards.clipped_too_often([True] * 5 + [False] * 45) is None
    assert guards.clipped_too_often([True] * 6 + [False] * 44).startswith(
        "6 of the last 50 steps were clipped"
    )
    assert guards.starved(2.0, 4.0) is None  # too early
    assert guards.starved(2.0, 10.0) is None
    assert guards.starved(3.0, 10.0).startswith("30% of the time goes into waiting")


def test_when_every_module_and_gradient_is_finite_the_loss_function_is_left(tiny):
    rows = torch.zeros(1, 4, dtype=torch.long)
    hooks = [len(m._forward_hooks) for m in tiny.modules()]
    assert "the loss function itself" in guards.source_of_nonfinite(
        tiny, lambda: tiny(rows).logits.sum().backward()
    )
    assert hooks == [len(m._forward_hooks) for m in tiny.modules()]  # nothing stays on the model


def test_nan_in_the_forward_pass_names_the_first_module(tiny, batches):
    def poison(module, inputs, output):
        return output * float("nan")

    tiny.model.layers[1].mlp.up_proj.register_forward_hook(poison)
    with pytest.raises(
        guards.NonFinite,
        match=r"step 0.*forward pass of model.layers.1.mlp.up_proj \(Linear\), from finite",
    ):
        train.fit(tiny, batches, train.adamw(tiny, lr=1e-3), total=3, machine=FP32)


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * float("inf")


def test_nan_in_the_backward_pass_names_the_gradient(tiny, batches):
    tiny.model.layers[1].mlp.register_forward_hook(lambda m, i, o: InfiniteGradient.apply(o))
    with pytest.raises(
        guards.NonFinite,
        match="gradient of model.layers.1.mlp.down_proj.weight, the first in the backward",
    ):
        train.fit(tiny, batches, train.adamw(tiny, lr=1e-3), total=3, machine=FP32)


def test_a_broken_parameter_is_named(tiny, batches):
    with torch.no_grad():
        tiny.model.layers[0].self_attn.q_proj.weight[3, 3] = float("nan")
    with pytest.raises(
        guards.NonFinite,
        match="parameter model.layers.0.self_attn.q_proj.weight is already non-finite",
    ):
        train.fit(tiny, batches, train.adamw(tiny, lr=1e-3), total=3, machine=FP32)


def test_clipping_and_starvation_are_said_once(tiny, batches, capsys, monkeypatch):
    train.fit(tiny, batches, train.adamw(tiny, lr=1e-3), total=60, machine=FP32, clip=1e-3)
    said = capsys.readouterr().out
    assert said.count("were clipped") == 1

    class Slow:
        def __init__(self, inner):
            self.inner = inner

        def __next__(self):
            time.sleep(0.05)
            return next(self.inner)

    monkeypatch.setattr(guards.starved, "__kwdefaults__", {"share": 0.2, "at_least": 0.5})
    train.fit(tiny, Slow(batches), train.adamw(tiny, lr=1e-3), total=20, machine=FP32)
    assert capsys.readouterr().out.count("waiting for data") == 1
    train.fit(tiny, batches, train.adamw(tiny, lr=1e-3), total=60, machine=FP32, clip=100.0)
    assert capsys.readouterr().out == ""  # a healthy run says nothing


def test_a_corpus_that_is_read_again_and_again_is_named():
    assert guards.repeated(0, 500_000) is guards.repeated(1, 500_000) is None
    assert guards.repeated(2, 512_345).startswith("epoch 3 of a corpus of 0.5 M tokens")
    assert "corpus of 4,200 tokens" in guards.repeated(2, 4_200)
