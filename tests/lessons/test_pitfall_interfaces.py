"""The guard of P08: who is in no optimizer goes by identity, not by name or shape."""

import torch

from lessons.pitfalls import bench
from nblib import wiring


def test_missed_goes_by_identity():
    model = bench.wired()
    params = list(wiring.trainable(model).values())
    assert (
        wiring.missed(
            model, [torch.optim.SGD(params[:40], lr=1), torch.optim.SGD(params[40:], lr=1)]
        )
        == []
    )
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    assert len(wiring.missed(model, [torch.optim.SGD(twins, lr=1)])) == len(params)
