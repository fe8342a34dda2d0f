"""A function that is compiled again at every step, and ones that are compiled as often as they must be."""

import pytest
import torch
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import assert_healthy, assert_root, batches, quiet
from tests.test_severity import Stream


def compiled(lengths, **options):
    def program():
        torch._dynamo.reset()
        model = Stream()
        called = torch.compile(model, backend="eager", **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with doctor.watch(model, steps=12, say=False) as report:
            for ids, length in zip(batches(12), lengths):
                ids = ids[:, :length]
                loss = F.cross_entropy(called(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return report

    return program


@pytest.mark.slow
def test_a_new_length_in_each_step():
    assert_root(quiet(compiled(range(12, 24), dynamic=False)), "N18")
    assert_healthy(quiet(compiled(range(12, 24))))
    assert_healthy(quiet(compiled([16] * 12, dynamic=False)))
    assert_healthy(quiet(compiled([16, 24, 32] * 4, dynamic=False)))
