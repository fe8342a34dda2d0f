"""Batches on their way to the device: what is decided before they travel, and the position that a
checkpoint gets.
"""

import itertools

import pytest
import torch

from nblib import device_batches, losses, runtime, text, train
from nblib.batch import Batch

CPU = torch.device("cpu")


def batches(seed: int = 1) -> text.Batches:
    return text.Batches(torch.arange(4000) % 97, rows=3, length=16, seed=seed)


def masked(labels: torch.Tensor) -> torch.Tensor:
    labels = labels.clone()
    labels[0, :9] = losses.IGNORED
    return labels


def test_it_counts_the_supervised_tokens_of_all_micro_batches():
    rows = [
        {"input_ids": b["input_ids"], "labels": masked(b["labels"])}
        for b in itertools.islice(batches(), 4)
    ]
    expected = sum(int(losses.supervised(batch["labels"])) for batch in rows)
    micro, tokens = next(device_batches.DeviceBatches(iter(rows), accumulate=4, device=CPU))
    assert tokens == expected < 4 * 3 * 15 and len(micro) == 4


@pytest.mark.parametrize(
    "change", [lambda labels: labels, masked, lambda labels: torch.full_like(labels, -100)]
)
def test_rows_decided_before_are_those_that_the_labels_would_say(change):
    """And a loss that gets another tensor than the one that travelled asks for itself."""
    batch = next(batches())
    batch = {"input_ids": batch["input_ids"], "labels": change(batch["labels"])}
    moved = device_batches.to_device(batch, CPU)
    hidden = torch.randn(3, 16, 5)
    for labels in (moved, moved.labels):
        states, targets = losses.shifted_rows(hidden, labels)
        keep = batch["labels"][:, 1:] != losses.IGNORED
        assert torch.equal(targets, batch["labels"][:, 1:][keep]) and torch.equal(
            states, hidden[:, :-1][keep]
        )
    assert moved.tokens == int(losses.supervised(batch["labels"]))


def test_rows_that_were_counted_are_not_counted_again():
    """Else the test above would pass with a loss that counts every time."""
    labels = torch.arange(12).view(2, 6)
    batch = Batch(labels, labels, supervised=torch.tensor([4]))
    assert losses.shifted_rows(torch.randn(2, 6, 3), batch)[1].tolist() == [5]


def test_one_tensor_under_two_names_travels_once_and_becomes_two():
    copies = []

    class Counted(torch.Tensor):
        def to(self, *args, **options):
            copies.append(self)
            return torch.Tensor.to(self, *args, **options)

    ids = torch.arange(32).view(2, 16).as_subclass(Counted)
    moved = device_batches.to_device({"input_ids": ids, "labels": ids}, CPU)
    assert len(copies) == 1 and moved.ids.data_ptr() != moved.labels.data_ptr()
    assert torch.equal(moved.ids, moved.labels)


def test_a_mask_that_leaves_nothing_out_is_no_mask():
    batch = next(batches())
    whole, cut = torch.ones(3, 16), torch.ones(3, 16)
    cut[1, 12:] = 0
    masks = [
        device_batches.to_device(batch | {"attention_mask": mask}, CPU).mask
        for mask in (whole, cut)
    ]
    assert masks[0] is None and torch.equal(masks[1], cut)


def test_the_position_in_a_checkpoint_is_that_of_the_steps_that_were_taken():
    """Also when the next batches are there already: who resumes gets them again."""
    straight = [b["input_ids"] for b in itertools.islice(batches(), 8)]
    early = device_batches.DeviceBatches(batches(), accumulate=2, device=CPU)
    early.early = True  # as on a card
    seen = []
    for _ in range(3):
        micro, _ = next(early)
        seen += [b["input_ids"] for b in micro]
        early.fetch_ahead()
        position = early.state_dict()
    assert (
        position == {"seed": 1, "epoch": 0, "position": 6}
        and early.batches.state_dict()["position"] == 8
    )
    resumed = device_batches.DeviceBatches(batches(seed=5), accumulate=2, device=CPU)
    resumed.load_state_dict(position)
    seen += [b["input_ids"] for b in next(resumed)[0]]
    assert all(map(torch.equal, seen, straight))


def test_going_back_forgets_what_was_fetched_ahead():
    early = device_batches.DeviceBatches(batches(), accumulate=1, device=CPU)
    early.early, start = True, early.state_dict()
    first = next(early)[0][0]["input_ids"]
    early.fetch_ahead()
    early.load_state_dict(start)
    assert torch.equal(next(early)[0][0]["input_ids"], first)


def test_batches_without_a_position_are_never_fetched_ahead():
    """They may draw from the global generators, whose state the checkpoint takes."""
    drawn = device_batches.DeviceBatches(iter([]), accumulate=1, device=torch.device("cuda"))
    assert not drawn.early and not hasattr(drawn, "state_dict")
    assert device_batches.DeviceBatches(batches(), accumulate=1, device=torch.device("cuda")).early


def test_nothing_is_fetched_after_the_last_step(tiny, monkeypatch):
    """A cache of a teacher's answers holds exactly the rows of the steps, and a finite corpus has
    no more.
    """

    class Three:
        left = 3

        def __iter__(self):
            return self

        def __next__(self):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("a fourth batch")
            ids = torch.arange(32).view(2, 16) % 97
            return {"input_ids": ids, "labels": ids}

        def state_dict(self) -> dict:
            return {"left": self.left}

        def load_state_dict(self, state: dict) -> None:
            self.left = state["left"]

    class Early(device_batches.DeviceBatches):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.early = True  # as on a card

    monkeypatch.setattr(train, "DeviceBatches", Early)
    machine = runtime.Machine(CPU, "fp32", "compares")
    assert len(train.fit(tiny, Three(), train.adamw(tiny, lr=1e-3), total=3, machine=machine)) == 3
    with pytest.raises(RuntimeError, match="a fourth batch"):
        train.fit(tiny, Three(), train.adamw(tiny, lr=1e-3), total=4, machine=machine)
