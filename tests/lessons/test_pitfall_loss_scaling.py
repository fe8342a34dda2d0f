"""A scaler belongs in the checkpoint."""

import pytest

from lessons.pitfalls import loss_scaling


@pytest.mark.slow
def test_a_scaler_left_out_of_the_checkpoint_skips_its_first_steps_again():
    assert (
        loss_scaling.resumed_scaler(saved=False)["steps skipped after"]
        > loss_scaling.resumed_scaler(saved=True)["steps skipped after"]
    )
