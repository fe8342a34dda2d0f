"""The same mixture balanced in three ways: the bias spreads what nothing would."""

import torch
from conftest import FP32

from lessons import balance_or_bias


def test_the_bias_spreads_what_nothing_would_spread():
    stream = torch.randint(64, (4000,), generator=torch.Generator().manual_seed(1)).cumsum(0) % 64
    shape = dict(vocabulary=64, hidden=32, layers=1, heads=2, width=16, experts=8, top_k=2)
    options = dict(machine=FP32, steps=40, rate=0.01, weight=0.1, rows=4, length=32, seeds=1)
    table = balance_or_bias.compared(stream, stream[:320].view(10, 32), **options, **shape)
    assert [line["balanced by"] for line in table] == list(balance_or_bias.WAYS)
    nothing, _, bias = balance_or_bias.means(table)
    assert (
        bias["largest load"] < nothing["largest load"]
        and bias["smallest load"] > nothing["smallest load"]
    )
