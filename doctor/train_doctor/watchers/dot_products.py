"""Dot products of rows of tables that begin with random numbers of size 1: 16 of them have a spread of 4.

    score = (users(u) * items(i)).sum(1)        nn.Embedding draws from N(0, 1)
    loss = F.mse_loss(score, stars)             the first scores are noise, four times as large as the stars differ

Such factors are drawn with a spread of 0.01 to 0.1. Two rows of tables that learn are followed through their product
and sum to the loss, and the spread of the answers is laid beside that of the targets.

Footgun: after some training a large spread may be right. It is looked at in the first steps alone.
"""

from torch import Tensor, nn

from train_doctor.eye import Eye, Known, Op, Watcher

TIMES, PLUS = {"mul", "multiply", "__mul__"}, {"add", "__add__", "__radd__", "squeeze", "flatten", "view"}
LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"}
MINUS = {"sub", "subtract", "__sub__"}
LEAST = 16  # rows


class DotProducts(Watcher):
    names = TIMES | PLUS | LOSSES | MINUS | {"embedding", "sum"}
    begins = {"embedding"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # "row", "product" or "dot"

    def saw(self, op: Op) -> None:
        result = op.result
        if not isinstance(result, Tensor) or not op.given or not result.requires_grad:
            return
        facts = [self.known.get(t) for t in op.given]
        made = None
        if op.name == "embedding":
            made = "row" if any(isinstance(t, nn.Parameter) for t in op.given) else None
        elif op.name in TIMES and facts == ["row", "row"] and op.given[0].shape == op.given[1].shape:
            made = "product"
        elif op.name == "sum" and facts[0] == "product" and result.dim() == op.given[0].dim() - 1:
            made = "dot"
        elif op.name in PLUS and "dot" in facts:
            made = "dot"
        elif op.name in LOSSES | MINUS and facts[0] == "dot" and len(op.given) == 2:
            self._compare(op.given[0], op.given[1], op.name)
        if made is not None:
            self.known.put(result, made)

    def _compare(self, answer: Tensor, target: Tensor, name: str) -> None:
        if answer.shape == target.shape and not target.requires_grad and answer.numel() >= LEAST:
            spreads = float(answer.detach().float().std()), float(target.float().std())
            wide = max(spreads[1], 1.0) if name.startswith("binary") else spreads[1]
            self.e.dots.setdefault(self.eye.turn, (*spreads, wide))

    def close(self) -> None:
        self.known.by_id.clear()
