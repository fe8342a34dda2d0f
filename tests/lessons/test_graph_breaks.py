"""Graph breaks have a reason and a line."""

import torch

from lessons import graph_breaks


def test_breaks_are_found_with_their_line():
    def broken(x):
        if x.sum().item() > 0:
            return x + 1
        return x - 1

    report = graph_breaks.breaks(broken, torch.ones(3))
    assert report["breaks"] >= 1 and any(f"{__file__}:" in w["line"] for w in report["where"])
    assert graph_breaks.breaks(lambda x: x * 2, torch.ones(3)) == {
        "graphs": 1,
        "breaks": 0,
        "where": [],
    }
