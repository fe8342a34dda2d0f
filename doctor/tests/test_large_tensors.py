"""Tensors of which only a part is kept: what is compared later must be the same part, or each of them has 'moved'."""

import pytest
import torch

import train_doctor as doctor
from tests.bench import assert_healthy, assert_root, batches, lm, quiet
from tests.programs_a import adamw, lora, loss_of, train
from train_doctor import measures

LARGE = 2 * measures.ELEMENTS // 64 + 64  # rows of 64 that make an embedding of more than twice what is kept


def frozen_below():
    """Adapters over a large frozen embedding."""
    model = lora(lm(vocab=LARGE))
    return train(model, adamw(model))


def all_train():
    model = lm(vocab=LARGE)
    return train(model, adamw(model))


def never_in_the_optimizer():
    model = lm(vocab=LARGE)
    held = [p for p in model.parameters() if p is not model.get_input_embeddings().weight]
    return train(model, adamw(held))


def written_to_though_frozen():
    model = lora(lm(vocab=LARGE))
    weight = model.get_input_embeddings().weight

    def drift(step):
        with torch.no_grad():
            weight.add_(0.01)

    return train(model, adamw(model), between=drift)


def put_back():
    model = lm(vocab=LARGE)
    kept = {n: p.detach().clone() for n, p in model.named_parameters()}

    def restore(step):
        model.load_state_dict(kept, strict=False)

    return train(model, adamw(model), between=restore)


@pytest.mark.parametrize("program", [frozen_below, all_train])
def test_healthy(program):
    assert_healthy(quiet(program))


@pytest.mark.parametrize(
    "program, check", [(never_in_the_optimizer, "S3"), (written_to_though_frozen, "N12"), (put_back, "N3")]
)
def test_faulty(program, check):
    assert_root(quiet(program), check)


def test_the_frozen_embedding_was_followed():
    """The healthy runs above say nothing unless a large tensor is among those that are compared."""
    model = lora(lm(vocab=LARGE))
    optimizer = adamw(model)
    with doctor.watch(model, optimizer=optimizer, steps=1, say=False) as report:
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
    assert report.verdicts["N12"].state == "OK"
    assert model.get_input_embeddings().weight.numel() > 2 * measures.ELEMENTS
