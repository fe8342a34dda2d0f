"""Labels: each of the faults that P42 mixes, alone."""

import pytest

from lessons.pitfalls import data


@pytest.mark.slow
def test_each_label_fault_shows_and_none_with_the_fix():
    assert data.label_faults(data.wrong_labels()) == ["twice", "never", "pad_is_eos"]
    assert data.label_faults(data.right_labels()) == []
