"""The bit comparison says yes to what is saved and no to what is not."""

import torch
from torch import nn

from lessons import resume
from nblib import losses, models, text, train


def build(stream, model=None):
    model = model or models.tiny(256, hidden=32, layers=1, heads=2)
    return model, text.Batches(stream, rows=2, length=16), train.adamw(model, lr=1e-2)


def test_a_run_whose_state_is_all_in_the_checkpoint_resumes(tmp_path, stream, machine):
    assert resume.bit_equal(lambda: build(stream), tmp_path, total=4, machine=machine)


def test_state_kept_outside_the_model_is_found_out(tmp_path, stream, machine):
    calls = []

    def build_again():
        calls.clear()
        return build(stream)

    def loss(model, batch):  # grows with every call, and starts again with every run
        calls.append(1)
        return {"ce": losses.causal_lm(model, batch)["ce"] * len(calls)}

    assert not resume.bit_equal(build_again, tmp_path, total=4, machine=machine, loss=loss)


def test_buffers_count(tmp_path, stream, machine):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            # so no checkpoint has it
            self.register_buffer("calls", torch.zeros(()), persistent=False)

    def with_counter():
        model = models.tiny(256, hidden=32, layers=1, heads=2)
        model.counter = Counting()
        return build(stream, model)

    def loss(model, batch):
        model.counter.calls.add_(1)
        return losses.causal_lm(model, batch)

    assert not resume.bit_equal(with_counter, tmp_path, total=4, machine=machine, loss=loss)
