"""How much noise there is, and whether the network is told.

    t = torch.randint(steps, (rows,))
    x_t = a[t] * x0 + s[t] * noise
    model(x_t)                                      model(x_t, t) was meant; or its forward never uses t

A network that is asked for the noise at every strength, and not told which, gives an answer between all of them. What
was drawn for each row is followed, through tables, sines and layers, into the noisy input on one side and into
anything that learns on the other.

Footguns: a blind denoiser adds noise of some strength, often to data that stay as they are, and mixup puts data and
data together. So both parts must be scaled by what was drawn, one must be noise, and there must be much of it. Whatever
learns may be told in any way: by a table, by a column, by a factor; each of them counts. A receiver's gain and noise
are two draws, so both shares must come of one. A class may be the same at any noise, a critic is one function of all
data, and a field of slopes that vanishes at the data needs no time: so a regression must be asked for the noise, the
data, or what lies between them, as they are. What a network made of noise is none.
"""

from typing import NamedTuple

from torch import Tensor, nn

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

DRAWS, NORMAL = {"randint", "rand"}, {"randn", "randn_like", "normal"}
LAYERS = {"linear", "conv1d", "conv2d", "conv3d"}
LOOKS_UP = {"__getitem__", "gather", "index_select", "take", "embedding"}
TIME, PICKED, NOISE, GAP, PART, NOISY = "time", "picked", "noise", "gap", "part", "noisy"
LEAST, STRONG = 8, 0.75  # rows; the share of noise that is reached by what a sampler begins with
NONE: frozenset = frozenset()


class Fact(NamedTuple):
    kind: str = ""
    of: str = ""  # what a PART is part of
    draws: frozenset = NONE  # numbers of the draws that it hangs on
    rows: int = 0


class NoiseTimes(Watcher):
    """What is known of a tensor: TIME, rows of a table that were PICKED by one, NOISE as it was drawn, GAP of it and
    data, PART of a mixture with what was scaled, or that it is NOISY. And which data were mixed."""

    begins = DRAWS | NORMAL

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known, self.clean = Known(self), Known(self)
        self.drawn = 0
        self.asked: tuple[int, frozenset] | None = None  # rows that were given to a layer, noisy, and of which draws
        self.told: set[int] = set()  # draws of which something that learns was told
        self.most = 0.0  # of the shares of noise
        self.wanted = False  # the noise or the data, by a regression

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None:
            return
        if op.name in self.begins:
            if r.dim() and r.numel() == len(r) >= LEAST and op.name in DRAWS:
                self.drawn += 1
                self.known.put(r, Fact(TIME, "", frozenset({self.drawn}), len(r)))
            elif op.name in NORMAL and r.dim() > 1:
                self.known.put(r, Fact(NOISE))
            return
        facts = [self.known.get(t) or Fact() for t in op.given]
        if r.requires_grad:
            self._learns(op, facts)
        elif any(isinstance(t, nn.Parameter) for t in op.given):
            return  # what a network made is no noise
        elif fact := self._next(op, self._data_as_such(facts), r):
            self.known.put(r, fact)
        elif len(op.given) == 1 and r.numel() == op.given[0].numel() and self.clean.get(op.given[0]):
            self.clean.put(r, True)

    def _learns(self, op: Op, facts: list[Fact]) -> None:
        for fact in facts:
            if fact.kind in (TIME, PICKED):
                self.told |= fact.draws
        noisy = next((n for n, f in enumerate(facts) if f.kind == NOISY), None)
        if noisy is not None and op.name in LAYERS:
            self.asked = len(op.given[noisy]), facts[noisy].draws
        if (op.name in PLAIN or op.name in MINUS) and len(op.given) == 2:
            for t, fact in zip(op.given, facts):
                answers = fact.kind in (NOISE, GAP, NOISY) or fact[:2] == (PART, NOISE)
                self.wanted = self.wanted or not t.requires_grad and (answers or bool(self.clean.get(t)))

    def _data_as_such(self, facts: list[Fact]) -> list[Fact]:
        """Rows that another draw picked from the data are data; those of a table that this draw picked tell of it."""
        others = [f for f in facts if f.kind not in ("", PICKED)]
        draws = NONE.union(*(f.draws for f in others))
        if not others:
            return facts
        return [f if f.kind != PICKED else f._replace(kind=TIME) if f.draws & draws else Fact() for f in facts]

    def _next(self, op: Op, facts: list[Fact], r: Tensor) -> Fact | None:
        kinds = [f.kind for f in facts]
        if TIME in kinds:
            return self._timed(op, facts, r)
        if op.name in PLUS | MINUS and len(kinds) == 2:
            parts, alike = {f.of for f in facts if f.kind == PART}, op.given[0].shape == op.given[1].shape
            draws = facts[0].draws & facts[1].draws
            if kinds.count(PART) == 2 and NOISE in parts:
                return Fact(NOISY, "", draws) if draws else None
            if GAP in parts and alike:
                return Fact(NOISY, "", facts[kinds.index(PART)].draws)
            if op.name in MINUS and NOISE in kinds and alike:
                self._mixed(op, facts)
                return Fact(GAP)
        alone = [k for k in kinds if k]
        if op.name in TIMES | OVER | PLUS | MINUS:
            return facts[kinds.index(NOISY)] if alone == [NOISY] else None
        fits = len(set(alone)) == 1 and r.numel() >= op.given[0].numel()
        return facts[kinds.index(alone[0])] if fits else None

    def _mixed(self, op: Op, facts: list[Fact]) -> None:
        for t, fact in zip(op.given, facts):
            if not fact.kind and t.dim() > 1:
                self.clean.put(t, True)

    def _timed(self, op: Op, facts: list[Fact], r: Tensor) -> Fact | None:
        """Of a time and something else: a later form of the time, a part of a mixture, or an input that tells it."""
        times = [f for f in facts if f.kind == TIME]
        rows, draws = times[0].rows, NONE.union(*(f.draws for f in times))
        time = Fact(TIME, "", draws, rows)
        if op.name in LOOKS_UP:
            table = op.given[0].dim() > 1 and facts[0].kind != TIME
            kept = r.dim() and len(r) == rows
            return (time._replace(kind=PICKED) if table and op.name != "gather" else time) if kept else None
        other = next(
            (n for n, t in enumerate(op.given) if facts[n] not in times and t.dim() > 1 and len(t) == rows), None
        )
        if op.name == "lerp" and other is not None:
            self.most = 1.0
            self._mixed(op, facts)
            return Fact(NOISY, "", draws) if NOISE in [f.kind for f in facts] else None
        if other is None:
            return time if r.dim() and len(r) == rows else None
        if op.name in TIMES | OVER:
            of = facts[other].kind
            if of in (NOISE, GAP):
                share = op.given[1 - other].detach() if len(op.given) == 2 else None
                self.most = max(self.most, float(share.float().abs().max()) if share is not None else 0.0)
            self._mixed(op, facts)
            return Fact(NOISY, "", draws | facts[other].draws) if of == NOISY else Fact(PART, of, draws, rows)
        return time  # put beside it: an input that tells the time

    def backward(self, loss: Tensor) -> None:
        if self.asked and not self.told & self.asked[1] and self.most > STRONG and self.wanted:
            self.note("F106", self.asked[0])
        self.asked, self.told, self.most, self.wanted = None, set(), 0.0, False

    def close(self) -> None:
        self.known.by_id.clear()
        self.clean.by_id.clear()
