"""Arguments that took each other's place, told by how the program names them.

    nn.GaussianNLLLoss()(mean, y, sigma)            its third argument is a variance
    Normal(mean, var)                               its second argument is a spread
    nn.TripletMarginLoss()(e_a, e_n, e_p)           its second argument is the positive

Both spreads are numbers above 0, and a softplus may be meant for either; which row is like the anchor stands nowhere.
Only the name tells what the author took it for. So the line that calls is read, as it stands.

Footgun: what is computed in the call (sigma**2, var.sqrt()) is no name, and nothing is said of it.
"""

import ast
import re
from collections.abc import Callable

from torch import Tensor, distributions

from train_doctor.callers import caller, written
from train_doctor.eye import Eye, Op, Watcher

SPREAD = re.compile(r"(^|_)(sigmas?|stds?|stdevs?|stddevs?|std_?devs?|sds?)$", re.IGNORECASE)
VARIANCE = re.compile(r"(^|_)(vars?|variances?|sigmas?_?(sq|squared|2)|stds?_?(sq|squared|2))$", re.IGNORECASE)
POSITIVE = re.compile(r"(^|_)(p|pos|positives?)($|_)", re.IGNORECASE)
NEGATIVE = re.compile(r"(^|_)(n|neg|negatives?)($|_)", re.IGNORECASE)
TRIPLETS = {"triplet_margin_loss", "triplet_margin_with_distance_loss"}
LOGARITHM = re.compile(r"log|ln", re.IGNORECASE)


class Spelt(Watcher):
    names = begins = {"gaussian_nll_loss"} | TRIPLETS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.around(distributions.Normal, "__init__", "normal")

    def saw(self, op: Op) -> None:
        if op.name in TRIPLETS:
            names = _argument(1, "positive", op.given[1]), _argument(2, "negative", op.given[2])
            anchor = _argument(0, "anchor", op.given[0])
            if NEGATIVE.search(anchor) or POSITIVE.search(anchor):
                return
            if NEGATIVE.search(names[0]) and POSITIVE.search(names[1]) and not POSITIVE.search(names[0]):
                self.note("F74 named", names)
            return
        if (
            len(op.given) > 2
            and op.given[2].requires_grad
            and (name := _argument(2, "var", op.given[2]))
            and SPREAD.search(name)
            and not name[0].isupper()  # Sigma is a covariance
        ):
            self.note("F91", ("GaussianNLLLoss", name))

    def normal(self, original: Callable, of: distributions.Normal, *args, **kwargs) -> None:
        original(of, *args, **kwargs)
        learns = isinstance(of.scale, Tensor) and of.scale.requires_grad
        if self.eye.on and not self.eye.at.blind and learns and (name := _argument(1, "scale", of.scale)):
            if VARIANCE.search(name) and not LOGARITHM.search(name):
                self.note("F91", ("Normal", name))


def _argument(place: int, keyword: str, given: Tensor) -> str:
    """The name that stands at this place of the program's call, or the program's name for what a choice there (a if b
    else c) came to; "" where something is computed there."""
    frame = caller()
    call = written(frame) if frame is not None else None
    if call is None:
        return ""
    named = next((k.value for k in call.keywords if k.arg == keyword), None)
    written_there = named or (call.args[place] if len(call.args) > place else None)
    if isinstance(written_there, ast.Name | ast.Attribute):
        return written_there.id if isinstance(written_there, ast.Name) else written_there.attr
    if not isinstance(written_there, ast.IfExp):
        return ""
    return next((name for name, value in frame.f_locals.items() if value is given), "")
