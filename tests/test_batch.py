"""A batch is counted once, reads like a mapping, and a loss that changes its labels is noticed
before the update.
"""

import dataclasses

import pytest
import torch
from conftest import FP32

from nblib import losses, train
from nblib.batch import IGNORED, Batch


def rows(first: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.arange(first, first + 24).view(3, 8) % 13
    labels = ids.clone()
    labels[0, :5] = IGNORED
    return {"input_ids": ids, "labels": labels}


def test_it_reads_like_the_mapping_it_was_made_of():
    tensors = rows() | {
        "attention_mask": torch.tensor([[1] * 7 + [0]] * 3),
        "position_ids": torch.arange(8),
    }
    batch = Batch.of(tensors)
    assert dict(batch) == tensors and len(batch) == 4 and Batch.of(batch) is batch
    assert batch.get("token_type_ids") is None and batch.tokens == 3 * 7 - 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.labels = batch.ids


def test_other_labels_are_counted_and_other_ids_are_not():
    batch = Batch.of(rows())
    assert (batch | {"input_ids": batch.ids + 1}).supervised is batch.supervised
    assert (
        batch.with_labels(batch.ids).tokens == 21 and (batch | {"labels": batch.ids}).tokens == 21
    )


def test_a_batch_without_labels_is_refused():
    with pytest.raises(ValueError, match="a batch needs labels.*it has input_ids"):
        Batch.of({"input_ids": torch.zeros(2, 4)})


def masked_in_place(model, batch):
    batch["labels"][:, :16] = IGNORED
    return losses.causal_lm(model, batch)


def masked_on_a_copy(model, batch):
    labels = batch.labels.clone()
    labels[:, :16] = IGNORED
    return losses.causal_lm(model, batch.with_labels(labels))


def masked_by_hand(model, batch):
    batch.labels[:, :16] = IGNORED
    logits = model(input_ids=batch.ids).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, batch.labels[:, 1:].flatten(), reduction="sum")
    return {"ce": loss}


@pytest.mark.parametrize("loss", [masked_in_place, masked_on_a_copy, masked_by_hand])
def test_a_loss_that_supervises_other_tokens_than_it_is_divided_by_is_refused_before_the_update(
    tiny, batches, loss
):
    """Four rows of 32 tokens: 124 are supervised, and 64 after the mask."""
    before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    with pytest.raises(ValueError, match="supervised 64 tokens and is divided by the 124"):
        train.fit(tiny, batches, train.adamw(tiny, lr=1e-3), total=1, loss=loss, machine=FP32)
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny.state_dict().items())
