"""Targets that a live dropout has gone through: the teacher stands inside the model that is
trained.

    class Distiller(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                soft = self.teacher(x).softmax(1)           # distiller.train() has woken the
                                                            teacher as well
            return F.kl_div(self.student(x).log_softmax(1), soft)

`train()` goes down into all parts, so an `eval()` at the start lasts until the loop's first
`train()`. A teacher that stands alone is asked twice (F6); the parts of a model cannot be called by
themselves. So what dropouts gave without gradients is followed into the targets of losses.

Footgun: an average of the student may be noisy on purpose. It moves at every step, so only weights
that stay count.
"""

import weakref

from torch import Tensor, nn

from loopdoctor.eye import Eye, Known, Op, Watcher

DROPOUTS = {
    "dropout",
    "feature_dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "dropout2d",
    "dropout1d",
}
LOSSES = {
    "kl_div",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "cross_entropy",
    "binary_cross_entropy",
}
LOSSES |= {"binary_cross_entropy_with_logits"}
DRAWS = {"stack", "cat", "concat"}
WEIGHTED = {"linear", "conv1d", "conv2d", "conv3d"}


class NoisyTargets(Watcher):
    """Known is what came from a dropout without gradients: the weights it met since, with their
    versions.
    """

    begins = DROPOUTS | LOSSES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        # what came from the dropout is an input of what learns as well: data are simulated
        self.given = False

    def saw(self, op: Op) -> None:
        if op.name in LOSSES and len(op.given) > 1:
            met = self.known.get(op.given[1])
            if met and op.given[0].requires_grad and not self.given:
                self.note(
                    "S12", [(weakref.ref(weight), version) for weight, version in met.values()]
                )
            return
        if self.eye.grad or any(r.requires_grad for r in op.results):
            self.given |= op.name in WEIGHTED and any(
                self.known.get(t) is not None for t in op.given
            )
            return
        if op.name in DROPOUTS and op.given and op.results:
            # asleep it gives what it is given
            if op.kwargs.get("p", op.args[1] if len(op.args) > 1 else 0.5) > 0:
                self.known.put(op.result, {})
            return
        if op.name in DRAWS:
            return  # a mean of several draws
        facts = [fact for fact in map(self.known.get, op.given) if fact is not None]
        if facts and op.results:
            met = {key: weight for fact in facts for key, weight in fact.items()}
            weighs = (
                op.name in WEIGHTED and len(op.args) > 1 and isinstance(op.args[1], nn.Parameter)
            )
            if weighs and not op.args[1].is_inference():
                met[id(op.args[1])] = op.args[1], op.args[1]._version
            for result in op.results:
                self.known.put(result, met)

    def backward(self, loss: Tensor) -> None:
        self.given = False
        self.known.by_id.clear()

    def close(self) -> None:
        self.known.by_id.clear()
