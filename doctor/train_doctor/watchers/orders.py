"""The order of rows: which selections and permutations each tensor of a batch went through, and who meets whom.

    order = torch.argsort(times, descending=True)
    times, events = times[order], events[order]         and the covariates stay in the order that they had

Two tensors that were rows of one batch belong together as long as both go through the same indices. Each index along
the first dimension is known by its numbers, and a tensor by the list of those that it went through. What is computed
from rows of one order keeps the order, also through a model.

Three more ways to go apart are looked for. A table of all pairs has rows and columns in two orders, and its diagonal
is asked for. One of two batches is repeated row by row, the other as a whole. And the one is taken by a piece of a
permutation, the other by the same piece of the rows.

Footguns: what is computed from two orders (mixup, shuffled negatives) has none, and so has what was written into,
sorted back, or turned. Numbers that were made in the step (zeros, a range, noise) have every order. Rows may also be
ordered by numpy, unseen: so the index that makes the difference must be one that torch made in that step, and whose
numbers did not leave it. An answer that also meets rows of its own order in that step is left alone.
"""

import torch
from torch import Tensor, nn

from train_doctor.eye import Eye, Known, Op, Watcher

LEAST, MOST = 8, 2**16  # rows; numbers of an index
LOSSES = {
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss"),
    *("smooth_l1_loss", "huber_loss", "gaussian_nll_loss", "poisson_nll_loss", "kl_div"),
}
MEETING = LOSSES | {"mul", "multiply", "sub", "subtract"}
MADE = {
    *("zeros", "ones", "full", "arange", "empty", "eye", "linspace", "zeros_like", "ones_like", "full_like", "tensor"),
    *("empty_like", "rand", "randn", "rand_like", "randn_like", "randint", "normal", "bernoulli", "multinomial", "new"),
    *("new_zeros", "new_ones", "new_full", "randperm", "randint_like", "scalar_tensor", "one_hot"),
}
TURNED = {
    *("transpose", "permute", "T", "t", "mT", "gather", "scatter", "index_put", "index_add", "index_copy", "where"),
    *("scatter_add", "masked_select", "unique", "nonzero", "matmul", "__matmul__", "mm", "bmm", "einsum", "argsort"),
    *("cat", "concat", "stack", "cdist", "sort", "topk", "repeat_interleave", "masked_scatter"),
}
TAKES = {"gather", "take", "take_along_dim"}
WRITTEN = {"__setitem__", "flip", "roll", "flipud", "index_copy", "index_add", "scatter", "masked_scatter", "set"}
SORTS, SORTED = {"argsort", "sort", "topk"}, "sorted"
INDICES = {"randperm", "argsort", "sort", "multinomial", "randint", "topk"}  # give indices
PASSED = {"__getitem__", "split", "chunk", "to", "long", "flip", "cuda", "cpu", "view", "flatten", "squeeze", "narrow"}
TAKEN = {"__getitem__", "index_select", "split", "chunk", "unbind", "tensor_split"}
PACKS, RECURRENT = {"_pack_padded_sequence"}, {"lstm", "gru", "rnn_tanh", "rnn_relu"}
LEAVING = {"numpy", "tolist", "__array__", "item", "__iter__", "unbind", "__index__", "__int__"}
OUT = {"numpy", "tolist", "__array__", ""}  # the last: a function of tensors of another kind
Order = tuple  # of indices; None stands for no order
EVERY = ("every",)
JOINS, EACH, LAID = {"cat", "concat"}, {"repeat_interleave"}, {"repeat", "tile"}
PRODUCTS = {"matmul", "__matmul__", "mm"}
COMPARED = MEETING | {"eq", "__eq__", "ne"}
SCALED = {"mul", "div", "truediv", "exp", "clamp", "T", "t", "transpose"}  # of a table of pairs


class Orders(Watcher):
    begins = MADE | INDICES | TAKEN | WRITTEN | MEETING | PACKS | RECURRENT | EACH | LAID

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # tensors -> Order, EVERY or None
        self.indices = Known(self)  # indices that torch made
        self.items = Known(self)  # single rows, of which a loader makes a batch
        self.last = Known(self)  # last states of a recurrent layer, (layers, rows, features) -> Order of the rows
        self.packed: Order | None = None  # of the rows that were packed last
        self.roots, self.count = Known(self), 0  # what was repeated -> its number
        self.columns = Known(self)  # rows that were turned to columns -> their order
        self.tables = Known(self)  # of all pairs -> order of its rows, of its columns
        self.surely: dict[int, tuple[str, str]] = {}  # round -> what went apart whoever else was met
        self.perhaps: dict[int, tuple[str, str]] = {}  # the same, by an index whose making was not seen
        self.permuted = False  # one such index was seen being made
        self.left: set[int] = set()  # rounds in which the numbers of such an index were taken out of torch
        self.met: dict[int, dict] = {}  # round -> order of an answer -> whether it met its own, and one that was not

    def close(self) -> None:
        for turn, answers in self.met.items():
            wrong = [met for order, met in answers.items() if False in met and True not in met]
            if wrong and turn not in self.left:
                self.e.apart[turn] = wrong[0][False]
        for turn, met in (self.surely | (self.perhaps if self.permuted else {})).items():
            if turn not in self.left:
                self.e.apart.setdefault(turn, met)
        self.met.clear()
        self.surely.clear()
        for known in (self.known, self.columns, self.tables, self.roots):
            known.by_id.clear()

    def saw(self, op: Op) -> None:
        self._index_made(op)
        if op.name in OUT and any(self._order(t) not in ((), None, EVERY) for t in op.given):
            self.left.add(self.eye.turn)  # rows of an order go where nothing is seen, and come back without it
        if op.name in PACKS | RECURRENT or op.given and self.last.get(op.given[0]) is not None:
            return self._recurrent(op)
        if op.name in MADE or not op.given:
            for r in op.results:
                self.known.put(r, EVERY)
            return
        if op.name == "__getitem__" and len(op.args) == 2 and op.results:
            return self._index(op.args[0], op.args[1], op.results[0])
        if op.name == "index_select" and len(op.given) == 2 and op.results:
            dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
            return self._index(op.given[0], op.given[1], op.results[0]) if dim == 0 else None
        if op.name in ("split", "chunk", "unbind", "tensor_split") and op.results and op.given:
            return self._pieces(op)
        if op.name == "stack" and op.given and all(map(self.items.get, op.given)):
            return None  # a batch, in an order of its own
        if op.name in WRITTEN and op.given:
            return self.known.put(op.results[0] if op.results else op.given[0], None)
        if op.name == "sort" and len(op.results) == 2 and op.given[0].dim() == 1 and not op.given[0].requires_grad:
            index = self._signature(op.results[1], op.given[0])
            base = self._order(op.given[0])
            self.known.put(op.results[0], None if base is None or base == EVERY or index is None else (*base, index))
            return
        if op.name in COMPARED and len(op.given) == 2:
            self._meet_surely(op.name, *op.given)
        if op.name in MEETING and len(op.given) == 2:
            self._meet(op.name, *op.given)
        self._pairs(op)
        if not (op.name in EACH | LAID and self._repeated(op)):
            self._follow(op)

    def _recurrent(self, op: Op) -> None:
        """Packed rows keep their order in the last states. What torch sorted by itself it sorts back, along dim 1."""
        order = self.last.get(op.given[0]) if op.given else None
        if op.name in PACKS:
            self.packed = self._order(op.given[0])
        elif op.name in RECURRENT:
            packed, self.packed = self.packed, None
            for r in op.results[1:] if packed not in (None, EVERY) and op.given[0].dim() == 2 else ():
                self.last.put(r, packed)
        elif op.name == "index_select" and order:
            self.last.put(op.results[0], order[:-1])
        elif op.name in ("__getitem__", "select") and op.results and op.results[0].dim() == 2:
            self.known.put(op.results[0], order)

    def _index_made(self, op: Op) -> None:
        mine = bool(op.given) and bool(self.indices.get(op.given[0]))
        if mine and op.name in LEAVING:
            self.left.add(self.eye.turn)
        elif op.name in INDICES or mine and op.name in PASSED:
            for r in op.results:
                if not r.is_floating_point():
                    cut = op.args[1] if op.name == "__getitem__" and isinstance(op.args[1], slice) else None
                    sorts = op.name in SORTS or mine and self.indices.get(op.given[0]) == SORTED
                    self.indices.put(r, cut.indices(len(op.given[0])) if cut is not None else SORTED if sorts else True)

    def _signature(self, index: Tensor, source: Tensor) -> tuple | None:
        """A permutation or selection of rows, none twice, by its numbers; None for any other index."""
        if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32) or not LEAST <= len(index) <= MOST:
            return None
        numbers = index.tolist()
        if len(set(numbers)) != len(numbers):
            return None
        made = self.indices.get(index)
        every = "all" if len(numbers) == len(source) else "some"
        piece = self._order(index)  # of what may have been made before the first call that was seen
        piece = piece[0][1:] if piece and len(piece) == 1 and piece[0][0] == "rows" else None
        return every, hash(tuple(numbers)), bool(made), made if made == SORTED or isinstance(made, tuple) else piece

    def _order(self, t: Tensor) -> Order | None:
        entry = self.known.by_id.get(id(t))
        return entry[1] if entry is not None and entry[0]() is t else ()

    def _index(self, source: Tensor, index: object, result: Tensor) -> None:
        base = self._order(source)
        if isinstance(index, tuple) and any(isinstance(i, Tensor) and i.dim() for i in index[1:]):
            return self.known.put(result, None)  # of another axis, which may be that of the rows as well
        index = index[0] if isinstance(index, tuple) and index else index
        if base is None or base == EVERY or index is None or index is Ellipsis or isinstance(index, list):
            return self.known.put(result, base if base == EVERY else None)
        if isinstance(index, slice):
            step = index.indices(len(source))
            if step != (0, len(source), 1):
                base = (*base, ("rows", *step))
        elif isinstance(index, Tensor):
            name = self._signature(index, source)
            base = None if name is None else (*base, name)
        else:
            base = None
            if isinstance(index, int):
                self.items.put(result, True)
        if base != ():
            self.known.put(result, base)

    def _pieces(self, op: Op) -> None:
        base = self._order(op.given[0])
        if op.name == "unbind" or base is None or op.kwargs.get("dim", 0) != 0 or len(op.args) > 2:
            base = None
        sizes = tuple(len(r) if r.dim() else 1 for r in op.results)
        for n, r in enumerate(op.results):
            if base == EVERY or base is None:
                self.known.put(r, base)
            else:
                self.known.put(r, (*base, ("piece", n, sizes)))

    def _repeated(self, op: Op) -> bool:
        """Rows that were repeated, each by itself or all as a whole."""
        x, result = op.given[0], op.result
        base = self._order(x)
        if base is None or not x.dim() or len(op.given) > 1 or not LEAST <= len(result) <= MOST:
            return False
        if base == EVERY:  # made in the step: its rows are in their own order, where they are not all the same
            if bool((x == x[:1]).all()):
                return False
            base = ()
        often = len(result) // max(1, len(x))
        whole = result.shape[1:] == x.shape[1:] and often > 1 and often * len(x) == len(result)
        axis = op.kwargs.get("dim", op.args[2] if len(op.args) > 2 else None)
        if not whole or op.name in EACH and axis != 0 and x.dim() > 1:
            return False
        root = self.roots.get(x) or self._root(x)
        self.known.put(result, (*base, ("each" if op.name in EACH else "laid", often, len(x), root)))
        return True

    def _root(self, x: Tensor) -> int:
        self.count += 1
        self.roots.put(x, self.count)
        return self.count

    def _pairs(self, op: Op) -> None:
        """Tables of all pairs: two batches of rows, of which one was turned."""
        one, *others = op.given
        if op.name in ("t", "T", "mT", "transpose") and one.dim() == 2 and op.results and (order := self._order(one)):
            self.columns.put(op.results[0], order)
        elif op.name in PRODUCTS and len(op.given) == 2 and one.dim() == others[0].dim() == 2 and op.results:
            columns = self.columns.get(others[0]) or ()
            both = self._order(one), columns
            if None not in both and EVERY not in both and any(both) and len(one) == others[0].shape[1] >= LEAST:
                self.tables.put(op.results[0], both)
        elif op.name in SCALED and op.results and (both := next(filter(None, map(self.tables.get, op.given)), None)):
            self.tables.put(op.results[0], both)
        elif op.name == "cross_entropy" and others and (both := self.tables.get(one)) and len(others[0]) == len(one):
            diagonal = not others[0].is_floating_point() and bool((others[0].diff() == 1).all())
            if diagonal and both[0] != both[1] and (why := _apart(*both, True)) is not None:
                self.surely.setdefault(self.eye.turn, (op.name, why))

    def _meet_surely(self, name: str, one: Tensor, two: Tensor) -> None:
        if not one.dim() or not two.dim() or len(one) != len(two) or len(one) < LEAST:
            return
        mine, its = self._order(one), self._order(two)
        if mine is None or its is None or EVERY in (mine, its) or mine == its:
            return
        long, short = (mine, its) if len(mine) > len(its) else (its, mine)
        why = None
        if short and long[:-1] == short[:-1] and {long[-1][0], short[-1][0]} == {"each", "laid"}:
            pairs = long[-1][3] == short[-1][3]  # of a batch with itself
            if long[-1][1:3] == short[-1][1:3] and long[-1][1] != long[-1][2] and not pairs:
                why = "each row of the one was repeated by itself, and the other as a whole"
        elif name in ("sub", "subtract") and one.requires_grad != two.requires_grad and len(long) == len(short) == 1:
            index, rows = (long[0], short[0]) if short[0][0] == "rows" else (short[0], long[0])
            if rows[0] == "rows" and index[0] == "some" and index[3] == rows[1:]:
                why = "one was taken by a piece of a permutation and the other by the same piece of the rows"
                self.permuted |= index[2]
                if not index[2]:
                    self.perhaps[self.eye.turn] = name, why
                    return
        if why:
            self.surely.setdefault(self.eye.turn, (name, why))

    def _follow(self, op: Op) -> None:
        results = op.results
        if not results and op.given and op.result is op.given[0]:  # written in place
            results = op.given[:1]
        orders = [(t, self._order(t)) for t in op.given]
        by_index = op.name in TAKES and any(self.indices.get(t) for t in op.given)
        if by_index or op.name == "sort" and results and results[0].requires_grad:
            for r in results:
                self.known.put(r, None)
            return
        if all(order == () for _, order in orders):
            return
        orders = [(t, order) for t, order in orders if not isinstance(t, nn.Parameter)]
        for r in results:
            if not r.dim():
                continue
            rows = [order for t, order in orders if t.dim() and len(t) == len(r)]
            if op.name in TURNED and (op.name not in JOINS or _along(op) == 0) or not rows:
                self.known.put(r, None if any(order != EVERY for _, order in orders) else EVERY)
                continue
            if op.name in JOINS and rows[0] == EVERY:  # what stands beside them may say anything of them
                self.known.put(r, EVERY if set(rows) == {EVERY} else None)
                continue
            kinds = {order for order in rows if order != EVERY}
            self.known.put(r, kinds.pop() if len(kinds) == 1 else EVERY if not kinds else None)

    def _meet(self, name: str, one: Tensor, two: Tensor) -> None:
        if two.requires_grad and not one.requires_grad:
            one, two = two, one
        if not one.requires_grad or two.requires_grad or isinstance(one, nn.Parameter):
            return
        if not one.dim() or not two.dim() or len(one) != len(two) or len(one) < LEAST:
            return
        mine, its = self._order(one), self._order(two)
        if mine is None or its is None or EVERY in (mine, its):
            return
        met = self.met.setdefault(self.eye.turn, {}).setdefault(mine, {})
        if mine == its:
            met.setdefault(True, ())
        elif (why := _apart(mine, its, name in LOSSES)) is not None:
            met.setdefault(False, (name, why))


def _along(op: Op) -> int:
    return op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)


def _apart(mine: Order, its: Order, in_a_loss: bool) -> str | None:
    """How two orders differ, where rows that belonged together went apart."""
    long, short = (mine, its) if len(mine) > len(its) else (its, mine)
    if len(long) == len(short) + 1 and (short or in_a_loss):
        for n, index in enumerate(long):
            if index[0] == "all" and index[2] and long[:n] + long[n + 1 :] == short:
                return "one was permuted or sorted and the other was not"
    if (
        len(long) == len(short) == 1
        and in_a_loss
        and long[0][0] == short[0][0]
        and long[0][0] in ("all", "some")
        and (long[0][2] and short[0][2])
        and not long[0][3] == short[0][3] == SORTED  # each by itself, to be matched by rank
    ):
        return "they were indexed by two different permutations"
    return None
