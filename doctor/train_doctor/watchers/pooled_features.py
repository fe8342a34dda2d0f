"""The largest, or the mean, of each place's features where that of each feature over the places was meant.

    features = local(points)                        # (B, N, C)
    code = features.max(dim=2).values               # (B, N); dim=1 gives (B, C)
    self.classify(code)                             nothing is raised where N and C are equal

Footgun: only equal sizes let it pass, so only these are looked at. Scores of places, one number for each, come from a
layer with one output and not from a reduction.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

BENDS = {"relu", "gelu", "silu", "leaky_relu", "tanh", "elu", "dropout", "layer_norm", "batch_norm"}
POOLS = {"max", "amax", "mean", "sum", "logsumexp"}
FEATURES, POOLED = 1, 2


class PooledFeatures(Watcher):
    """Known is what a layer gave for each place, and what was made of it over the features."""

    begins = {"linear"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        result = op.results[0] if op.results and isinstance(op.results[0], Tensor) else None
        if not op.given or result is None or not result.requires_grad:
            return
        x, fact = op.given[0], self.known.get(op.given[0])
        if op.name == "linear":
            if fact == POOLED and x.dim() == 2:
                self.note("S39", tuple(x.shape))
            elif x.dim() == result.dim() == 3:
                self.known.put(result, FEATURES)
        elif op.name in BENDS and fact:
            self.known.put(result, fact)
        elif op.name in POOLS and fact == FEATURES and x.dim() == 3 and x.shape[1] == x.shape[2] > 1:
            dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
            if dim in (2, -1) and result.shape == x.shape[:2]:
                self.known.put(result, POOLED)

    def close(self) -> None:
        self.known.by_id.clear()
