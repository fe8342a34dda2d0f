"""Inference mode: which uses of a teacher's logits fail under it."""

import torch

from lessons.pitfalls import autocast


def test_inference_mode_fails_where_autograd_saves_and_nowhere_else():
    use, every = autocast.teacher_use, autocast.DOWNSTREAM
    fine = [name for name in every if use(name)["raised"] is None]
    assert fine == ["kl(s, softmax(t / 2))", "t + T", "t.clone() / T", "t.bfloat16() / T"]
    assert all(use(name, mode=torch.no_grad)["raised"] is None for name in every)
