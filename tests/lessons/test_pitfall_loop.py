"""Resuming: every piece of the state is needed."""

import pytest

from lessons.pitfalls import loop


@pytest.mark.parametrize("piece", loop.PIECES)
def test_every_piece_of_the_state_is_needed(piece):
    assert loop.resumed_without(piece)["largest_gap"] > 1e-3
