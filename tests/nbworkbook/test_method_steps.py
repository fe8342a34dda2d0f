"""The trainings of methods that gpu-check and the tests' card share: each takes a step of the loop
on a CPU, too.
"""

import math

import pytest
from conftest import FP32

from nblib import train
from nbworkbook.method_steps import METHODS, Size, batches

SIZE = Size("cpu", vocabulary=128, hidden=32, layers=2, heads=2, rows=2, length=16)


@pytest.mark.parametrize("name", METHODS)
def test_a_maker_gives_what_the_loop_takes(name):
    net, optimizers, loss, more = METHODS[name](SIZE)
    first, second = train.fit(
        net, batches(SIZE, more), optimizers, total=2, machine=FP32, loss=loss
    )
    assert math.isfinite(second["loss"]) and second["loss"] != first["loss"] and second["mfu"] > 0
