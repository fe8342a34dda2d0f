"""An action that was drawn without a gradient, and a loss that is its value: SAC with sample() in
place of rsample().

    u = Normal(mean, spread).sample()
    loss = (alpha * log_prob - critic(state, tanh(u))).mean()

The value of the action is to be raised, and no gradient of it reaches the mean. A draw is followed
through arithmetic into layers, and what these answer up to the loss. Only sums, means and the
smaller of two may lie there.

Footguns: the critic may be frozen while the policy learns, and then its answer has no graph at all.
A critic that learns is asked for the value of the same action, and a policy for its probability.
Both end in a square, after which nothing is followed, or are detached.
"""

from torch import Tensor, nn

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import OVER, TIMES

LAYERS = {"linear", "conv1d", "conv2d", "bilinear", "addmm", "matmul", "__matmul__"}
ENDS = {
    "pow",
    "square",
    "abs",
    "__pow__",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "log_softmax",
}
ENDS |= {
    "cross_entropy",
    "binary_cross_entropy_with_logits",
    "binary_cross_entropy",
    "detach",
    "log_sigmoid",
    "grad",
}
DRAWN, VALUED = 1, 2


class SampledActions(Watcher):
    begins = {"normal"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name == "normal" and any(t.requires_grad for t in op.given):
            if (
                isinstance(op.result, Tensor)
                and not op.result.requires_grad
                and op.result.dim() > 1
            ):
                self.known.put(op.result, DRAWN)
            return
        if not self.known.by_id or op.name in ENDS:
            return
        facts = [self.known.get(t) or 0 for t in op.given]
        fact = max(facts, default=0)
        if not fact:
            return
        if op.name == "broadcast_tensors":  # a mean and a spread, each of which is what it was
            for r, own in zip(op.result, facts):
                if own:
                    self.known.put(r, own)
            return
        if op.name in TIMES and any(
            t.requires_grad and self.known.get(t) != VALUED for t in op.given
        ):
            return  # the score of an action times its value, which is the other way to a gradient
        if op.name in OVER and self.known.get(op.given[0]) != VALUED:
            return  # by a spread of values
        for r in op.results:
            if r.is_floating_point():
                frozen = any(isinstance(t, nn.Parameter) and not t.requires_grad for t in op.given)
                enters = op.name in LAYERS and (r.requires_grad or frozen)
                value = VALUED if enters or fact == VALUED else 0 if r.requires_grad else DRAWN
                if value:
                    self.known.put(r, value)

    def backward(self, loss: Tensor) -> None:
        if self.known.get(loss) == VALUED:
            self.e.valued.add(self.eye.turn)

    def close(self) -> None:
        self.known.by_id.clear()
