"""Meta-learning whose adapted weights are made of the weights' numbers: the straight way to the weights is cut.

    grads = torch.autograd.grad(inner_loss, params, create_graph=True)
    fast = p.data - rate * g                            p - rate * g was meant; p.detach() is the same
    loss = criterion(functional_call(net, fast, (x_query,)), y_query)

Adapted weights hang on the first weights in two ways: as they are, and through the derivative. Of the loss it is asked
whether the second alone is left. The function that makes them of a copy without a graph and of a derivative with
respect to that same weight gets a mark in the graph, which lives as long as the graph.

Footguns: whoever learns something else by such a step (a share of each row, a network of weights, an architecture, an
unrolled adversary) has no need of the straight way. Then the loss reaches other leaves, which another optimizer holds
or none. A loss that also reaches the weights directly adds the step as a term of its own, and so does another loss of
the same step, or the step itself where it is written into the .grad of the weights. And first-order methods take
derivatives without a graph.
"""

import contextlib

from torch import Tensor, nn

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES, TURNS

COPIES = {"data", "detach", "clone"}
SCALES = TIMES | OVER | TURNS | {"clamp", "clip"}
SUMS = PLUS | MINUS
KEY = "train_doctor_cut"
NODES = 20_000  # of a graph; a larger one is left alone
COPY, SLOPE, ALONE = "copy", "slope", "slope without a graph"


class CutAdaptations(Watcher):
    """What is known of a tensor: that it is a copy of a weight, or a derivative with respect to one; and its id."""

    names = COPIES | SCALES | SUMS | {"grad", "grad="}
    begins = COPIES | {"grad"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.weights: set[int] = set()  # ids of those whose copies were adapted

    def saw(self, op: Op) -> None:
        if op.name == "grad":
            self._derived(op)
        elif op.name == "grad=":
            weight, slope = (*op.given, None, None)[:2]
            if slope is not None and self.known.get(slope) in ((SLOPE, id(weight)), (ALONE, id(weight))):
                self.note("N51 straight", True)
        elif op.name in COPIES:
            self._copied(op)
        elif op.name in SCALES:
            slope = next((f for f in map(self.known.get, op.given) if f and f[0] == SLOPE), None)
            for r in op.results if slope else ():
                self.known.put(r, slope)
        else:
            self._adapted(op)

    def _derived(self, op: Op) -> None:
        if not isinstance(op.result, tuple) or len(op.args) < 2:
            return
        inputs = op.args[1] if isinstance(op.args[1], list | tuple) else (op.args[1],)
        for t, gradient in zip(inputs, op.result):
            if isinstance(t, nn.Parameter) and isinstance(gradient, Tensor):
                self.known.put(gradient, (SLOPE, id(t)))

    def _copied(self, op: Op) -> None:
        for t, r in zip(op.given[:1], op.results):
            if not r.requires_grad and isinstance(t, nn.Parameter):
                self.known.put(r, (COPY, id(t)))
            elif not r.requires_grad and (fact := self.known.get(t)):
                self.known.put(r, fact if fact[0] == COPY else (ALONE, fact[1]))

    def _adapted(self, op: Op) -> None:
        facts = {f for f in map(self.known.get, op.given) if f and f[0] != ALONE}
        node = op.result.grad_fn if isinstance(op.result, Tensor) else None
        if len(facts) == 2 and len({weight for _, weight in facts}) == 1 and node is not None:
            with contextlib.suppress(AttributeError, TypeError):
                node.metadata[KEY] = next(iter(facts))[1]
                self.weights.add(node.metadata[KEY])

    def backward(self, loss: Tensor) -> None:
        if not self.weights or loss.grad_fn is None:
            return
        straight, cut = _straight(loss)
        if straight & self.weights:
            self.note("N51 straight", True)
        found = list(graphs.walk(loss, NODES))
        leaves = {id(n.variable) for n in found if kind(n) == "AccumulateGrad"}
        holders = [o for o in self.e.optimizers if leaves <= o.ids]
        if cut and len(found) < NODES and holders:
            self.note("N51", len(cut))

    def close(self) -> None:
        self.known.by_id.clear()


def _straight(loss: Tensor) -> tuple[set[int], set[int]]:
    """Ids of the weights that a loss reaches without passing an adapted one, and of those whose copy was adapted."""
    queue, seen, leaves, cut = [loss.grad_fn], set(), set(), set()
    while queue and len(seen) < NODES:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (weight := node.metadata.get(KEY)) is not None:
            cut.add(weight)
            continue
        if kind(node) == "AccumulateGrad":
            leaves.add(id(node.variable))
        queue += [edge for edge, _ in node.next_functions]
    return leaves, cut
