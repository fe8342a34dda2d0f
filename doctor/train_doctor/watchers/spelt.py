"""A spread where a variance is taken, or the other way round, told by how the program names it.

    nn.GaussianNLLLoss()(mean, y, sigma)            its third argument is a variance
    Normal(mean, var)                               its second argument is a spread

Both are numbers above 0, and a softplus may be meant for either. Only the name tells what the author took it for. So
the line that calls is read, as it stands.

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
LOGARITHM = re.compile(r"log|ln", re.IGNORECASE)


class Spelt(Watcher):
    names = begins = {"gaussian_nll_loss"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.around(distributions.Normal, "__init__", "normal")

    def saw(self, op: Op) -> None:
        if len(op.given) > 2 and op.given[2].requires_grad and (name := _argument(2, "var")) and SPREAD.search(name):
            self.note("F91", ("GaussianNLLLoss", name))

    def normal(self, original: Callable, of: distributions.Normal, *args, **kwargs) -> None:
        original(of, *args, **kwargs)
        learns = isinstance(of.scale, Tensor) and of.scale.requires_grad
        if self.eye.on and not self.eye.at.blind and learns and (name := _argument(1, "scale")):
            if VARIANCE.search(name) and not LOGARITHM.search(name):
                self.note("F91", ("Normal", name))


def _argument(place: int, keyword: str) -> str:
    """The name that stands at this place of the program's call; "" where something is computed there."""
    frame = caller()
    call = written(frame) if frame is not None else None
    if call is None:
        return ""
    named = next((k.value for k in call.keywords if k.arg == keyword), None)
    given = named or (call.args[place] if len(call.args) > place else None)
    return given.id if isinstance(given, ast.Name) else given.attr if isinstance(given, ast.Attribute) else ""
