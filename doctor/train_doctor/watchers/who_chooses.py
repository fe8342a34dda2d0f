"""Double Q-learning with its two networks in each other's place.

    best = online(next).argmax(1, keepdim=True)         the network that learns chooses
    value = target(next).gather(1, best)                and the other one says what the choice is worth

Then what one overrates by chance the other one does not. With the places changed, the values that are learned from are
those of the network that learns, which runs after itself as it does without any target network.

Footgun: both may learn (two critics that choose for each other), or neither. So the one that says the value must be in
an optimizer, and the one that chooses must not.
"""

from train_doctor.eye import Eye, Known, Op, Watcher

LAYERS, CHOICES, PICKS = {"linear", "addmm"}, {"argmax", "max"}, {"gather", "take_along_dim"}
VIEWS = {"unsqueeze", "view", "reshape", "long", "squeeze"}


class WhoChooses(Watcher):
    """Known are answers without a graph -> (the last weight, None), and choices -> (it, "choice")."""

    begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name in LAYERS:
            if len(op.given) > 1 and op.results and op.results[0].dim() == 2 and not op.results[0].requires_grad:
                self.known.put(op.results[0], (id(op.given[1]), op.given[1].shape, False))
            return
        fact = (*map(self.known.get, op.given), None)[0]
        if op.name in PICKS and len(op.given) == 2:
            self._pick(fact, self.known.get(op.given[1]))
        elif fact and (op.name in CHOICES and op.given[0].is_floating_point() or op.name in VIEWS and fact[2]):
            for r in op.results:
                if not r.is_floating_point():
                    self.known.put(r, (*fact[:2], True))

    def _pick(self, value: tuple | None, choice: tuple | None) -> None:
        if value and choice and choice[2] and not value[2] and value[1] == choice[1]:
            learning = self.e.optimized()
            if value[0] in learning and choice[0] not in learning:
                self.note("F108", True)

    def close(self) -> None:
        self.known.by_id.clear()
