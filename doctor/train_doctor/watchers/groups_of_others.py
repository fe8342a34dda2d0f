"""Answers to several prompts whose rewards are compared as if they were answers to one.

    ids = prompts.repeat(G, 1)                              p0 p1 p2 ... p0 p1 p2 ...
    ids = prompts.repeat_interleave(G, 0)                   p0 p0 ... p1 p1 ...             was meant
    r = rewards.view(-1, G)
    advantages = r - r.mean(1, keepdim=True)                of a group: the baseline of GRPO and of RLOO

    ids = prompts.repeat_interleave(G, 0)                   or the other way round
    r = rewards.view(G, -1); r.mean(0, keepdim=True)        rewards.view(-1, G) was meant
    r = rewards[k::P]; r - r.mean()                         the same, a group at a time; rewards[k * G : (k + 1) * G]

Rewards that are cut into groups, and from which a mean or a sum of their group is taken, are remembered. What layers
are given in the step has as many rows: its first columns tell which rows are answers to the same prompt. They must be
found at the distance of the groups' number, one in each of G parts, and not side by side.

Footguns: rewards of tiled prompts may be cut into (G, -1), and the mean taken over 0. A share of a batch may be made
even by itself, so the parts must be as many as a group is large. All prompts may begin alike, and three at least must
be told apart by what their copies have in common. Of all pairs (users and items, states and actions) one side comes
again and again while the other stands still for a group, which is then of that one. And where each group holds all
prompts once, it is a round, and its mean that of a batch; but if there are as many prompts as rounds, and the group's
spread is taken as well, it is a group of GRPO, unless the rounds are times (rewards are turned round and summed).
Neighbours that are alike in blocks longer than a group are a panel (days of a stock), from whose days a mean is taken,
and those of a group may share what stands behind: the instance that is solved from several starts.
"""

import itertools

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER

LAYERS, CUTS = {"embedding", "linear", "conv1d", "conv2d"}, {"view", "reshape", "unflatten"}
SUMS, SPREADS = {"mean", "sum", "median", "amax", "max"}, {"std", "var"}
KEEPS = {"unsqueeze", "__getitem__", "repeat_interleave", "expand", "expand_as", "flatten", "to"} | OVER | CUTS
ROWS, GROUPED, SUMMED, SLICED = "rows", "grouped", "summed", "sliced"
PROMPTS, KEPT, LOOKED = 3, 16, 2**20  # told apart, at least; things given in a step; numbers of each


class GroupsOfOthers(Watcher):
    """Known are rewards -> (ROWS, a number, how many and in which sizes they are cut), (GROUPED, ...) once they are
    cut, and (SUMMED, ..., over which dimension). One group alone is (SLICED, its place, sizes, over which dimension
    the sizes have it), and (SUMMED, ...) of that its mean."""

    begins = LAYERS | CUTS | {"__getitem__"}
    names = LAYERS | CUTS | SUMS | SPREADS | KEEPS | MINUS | {"flip"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.numbers = itertools.count()
        self.given: list[Tensor] = []
        self.compared: set[tuple[int, int, int]] = set()  # groups, of rows, over which dimension
        self.alone: dict[tuple[int, int, int], set[int]] = {}  # the same, of groups one by one: their places
        self.spread: set[tuple[int, int]] = set()  # those whose spread was taken
        self.turned: set[tuple[int, int]] = set()  # rewards whose groups are times, for they were turned round

    def saw(self, op: Op) -> None:
        x, result = (*op.given, None)[0], op.result
        if x is None or not isinstance(result, Tensor):
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name in LAYERS:
            if not x.requires_grad and x.dim() > 1 and x.numel() <= LOOKED and len(self.given) < KEPT:
                self.given.append(x)
        elif op.name in MINUS:
            kinds = {f[0] for f in facts if f}
            if len(facts) == 2 and SUMMED in kinds and len(kinds) == 2 and facts[0][1:3] == facts[1][1:3]:
                over = next(f[3] for f in facts if f[0] == SUMMED)
                if SLICED in kinds:
                    self.alone.setdefault((*facts[0][2], over), set()).add(facts[0][1])
                else:
                    self.compared.add((*facts[0][2], over))
        elif op.name == "__getitem__" and (group := _group(x, op.args[1])):
            self.known.put(result, (SLICED, *group))
        elif fact := facts[0]:
            over = op.kwargs.get("dim", (*op.args, None, None)[1])
            if op.name in SUMS and fact[0] == GROUPED and over in (0, 1, -1, -2) and isinstance(over, int):
                self.known.put(result, (SUMMED, *fact[1:], over % 2))
            elif op.name in SUMS and fact[0] == SLICED and over is None:
                self.known.put(result, (SUMMED, *fact[1:]))
            elif op.name == "flip" and fact[0] == GROUPED and over in (0, (0,), [0]):
                self.turned.add(fact[2])
            elif op.name in SPREADS and fact[0] in (GROUPED, SLICED):
                self.spread.add(fact[2])
            elif op.name in KEEPS and fact[0] == SUMMED:
                self.known.put(result, fact)
        elif (
            op.name in CUTS
            and x.dim() == 1
            and result.dim() == 2
            and x.is_floating_point()
            and not x.requires_grad
            and len(x)
        ):
            sizes = tuple(result.shape)
            before = self.known.get(x)
            fact = before[1:] if before and before[2] == sizes else (next(self.numbers), sizes)
            self.known.put(x, (ROWS, *fact))
            self.known.put(result, (GROUPED, *fact))

    def backward(self, loss: Tensor) -> None:
        whole = {key for key, places in self.alone.items() if len(places) == key[key[2] == 0]}  # none is left out
        for count, size, over in self.compared | whole:
            if over == 1 and (count, size) in self.turned:
                continue
            given = [x.detach().flatten(1) for x in self.given if len(x) == count * size]
            if over == 0:  # a group has one row of each of `count` parts
                prompts = [_of_neighbours(x, count, size) for x in given]
                given = [x.unflatten(0, (count, size)).transpose(0, 1).flatten(0, 1) for x in given]
                size = count
            else:
                prompts = [_apart(x, size, (count, size) in self.spread) for x in given]
            if max(prompts, default=0) >= PROMPTS and not any(_in_blocks(x, size) for x in given):
                self.note("S61", (max(prompts), size, over))
        self.given, self.compared, self.spread, self.turned, self.alone = [], set(), set(), set(), {}

    def close(self) -> None:
        self.known.by_id.clear()
        self.given = []


def _group(x: Tensor, index) -> tuple[int, tuple[int, int], int] | None:
    """Which of equal groups these rewards are: its place, the sizes (count, size) into which all would be cut, and the
    dimension of those along which it lies."""
    if not isinstance(index, slice) or x.dim() != 1 or x.requires_grad or not x.is_floating_point():
        return None
    start, stop, step = index.indices(len(x))
    size = len(range(start, stop, step))
    if size < 2 or size == len(x) or len(x) % size:
        return None
    if step > 1:  # rewards[k::step]
        return (start, (size, step), 0) if start < step and step * size == len(x) else None
    return (start // size, (len(x) // size, size), 1) if step == 1 and not start % size else None


def _of_neighbours(rows: Tensor, size: int, count: int) -> int:
    """How many prompts are told apart by what `size` neighbours begin with; 0 where most groups, which have one row of
    each of `size` parts, are of one prompt."""
    blocks = rows.unflatten(0, (count, size))
    alike = int((blocks == blocks[:, :1]).flatten(0, 1).all(0).cumprod(0).sum())
    firsts = blocks[:, 0, :alike]
    longer = 2 * int((firsts[1:] == firsts[:-1]).all(1).sum()) >= count - 1  # blocks than a group is large
    if not alike or longer or _share(rows.unflatten(0, (size, count)).transpose(0, 1)):
        return 0
    prompts, which = rows[:, :alike].unique(dim=0, return_inverse=True)
    groups = which.view(size, count)
    mixed = int((groups != groups[:1]).any(0).sum())
    return len(prompts) if 2 * mixed > count else 0


def _share(groups: Tensor) -> bool:
    """Whether something is the same in each group, and not in all groups."""
    same = (groups == groups[:, :1]).flatten(0, 1).all(0)
    return bool((same & (groups[:, 0] != groups[0, 0]).any(0)).any())


def _apart(rows: Tensor, size: int, spread: bool) -> int:
    """How many prompts are told apart by what rows at equal places of `size` parts begin with; 0 where most groups of
    neighbours are of one prompt."""
    count = len(rows) // size
    parts = rows.reshape(size, count, -1)
    alike = int((parts == parts[:1]).flatten(0, 1).all(0).cumprod(0).sum())
    if not alike:
        return 0
    if torch.equal(rows[size:, :alike], rows[:-size, :alike]) and not (spread and count == size):
        return 0  # rounds of all prompts
    prompts, which = rows[:, :alike].unique(dim=0, return_inverse=True)
    groups = which.view(count, size)
    mixed = int((groups != groups[:, :1]).any(1).sum())
    return len(prompts) if 2 * mixed > count else 0


def _in_blocks(x: Tensor, size: int) -> bool:
    """Each group of neighbours was given one row, and others another one."""
    blocks = x.unflatten(0, (-1, size))
    first = blocks[:, :1]
    return bool((blocks == first).all()) and bool((first != first[:1]).any())
