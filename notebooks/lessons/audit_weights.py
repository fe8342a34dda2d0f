"""What a file of weights says about its training: every tensor by norm, size, zeros and nan, and every expert alone.

    size = ||W|| / sqrt(entries)        root mean square, which compares tensors of different shapes

Tensors of one kind have the same name up to the numbers of layers and experts. They are judged against the median of
their kind, experts and the rows of a router against those of their layer. No fixed range decides, because sizes depend
on width, optimizer and age. With an earlier checkpoint of the same training a second question can be asked: what did
not change between the two? An expert that nobody chose does not move under our Muon (it rests there).

Files are read lazily, a few rows at a time, by safetensors. Nothing is unpickled, so a file from anywhere can be read.
Of shards that several processes wrote, the weights are read and the states of the optimizers left out.

Footgun: one file cannot tell a weight that is stuck from one that had no time. A norm whose entries are all exactly 1
is as it was made. A norm at 1.004 after a hundred steps of a small rate moved as far as it could (weight_movement.py).
"""

import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nblib import files

AT_ONCE = 2**24  # entries that are in memory at a time
FAR = 4.0  # times the median of its kind, or less than one part in so many
FEW = 4  # of a kind there must be at least so many before one of them can be an outlier
MOSTLY_ZERO = 0.5
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert
ROUTER = re.compile(r"^(?P<layer>.*)\.(gate|router)(\.\w+)?\.weight$")
LIST = "model.safetensors.index.json"


class Measured(NamedTuple):
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    size: float  # root mean square
    zeros: float  # share of entries
    bad: int  # entries that are nan or infinite
    ones: bool  # every entry is exactly 1
    rows: tuple[float, ...]  # root mean square of each index of the first dimension, of routers and stacks
    still: tuple[bool, ...]  # whether it is equal in the earlier file: one answer, or one per index of a stack

    @property
    def kind(self) -> str:
        return NUMBER.sub("*", self.name)

    @property
    def is_map(self) -> bool:
        """A matrix or a stack of them; what has one row or one column is a vector."""
        return len(self.shape) > 1 and min(self.shape[-2:]) > 1


def files_of(place: Path) -> list[Path]:
    """The safetensors files of a folder, or the one that is named; ValueError where there are none to read."""
    if place.is_file() and place.suffix == ".safetensors":
        return [place]
    if not place.is_dir():
        raise ValueError(f"{place} is neither a folder nor a .safetensors file")
    if listed := sorted(place.glob("*.safetensors")):
        return listed
    pickles = sorted(p.name for end in ("bin", "pt", "pth", "ckpt") for p in place.glob(f"*.{end}"))
    if pickles:
        raise ValueError(f"{place} holds {pickles[0]}, a pickle, which runs code when it is read: save as safetensors")
    raise ValueError(f"{place} holds no .safetensors file")


def measure(place: Path, earlier: Path | None = None) -> Iterator[Measured | str]:
    """Every tensor in order, and a sentence for each file that cannot be read."""
    before = _opened(earlier) if earlier else {}
    for path in files_of(place):
        try:
            with safe_open(path, framework="pt") as opened:
                for name in sorted(n for n in opened.keys() if not n.startswith("/training/")):
                    yield _measure(name.removeprefix("/weights/"), opened.get_slice(name), before.get(name))
        except (SafetensorError, OSError) as error:
            yield f"{path.name} cannot be read ({str(error).partition(':')[2].strip() or error}): take an earlier one"


def findings(tensors: list[Measured]) -> list[str]:
    """A sentence for everything that looks wrong, with what to do; an empty list when nothing does."""
    told = [_not_finite(t) for t in tensors if t.bad]
    sound = [t for t in tensors if not t.bad and t.size == t.size]
    told += [
        f"{t.name} is all zeros, so nothing passes through it: was it made and never trained? (B of an adapter is so "
        "before its first step)"
        for t in sound
        if t.norm == 0 and t.is_map
    ]
    told += [
        f"{t.name}: {t.zeros:.0%} of the entries are zero. Unless it was pruned, look for steps that round away"
        for t in sound
        if t.norm and t.is_map and t.zeros > MOSTLY_ZERO
    ]
    return told + _as_made(sound) + _outliers(sound) + _experts(sound) + _still(tensors)


def integrity(place: Path) -> list[str]:
    """Whether the folder is what was written: by its manifest, if it has one, and by the list of its shards."""
    told = []
    if (place / files.MANIFEST).is_file():
        try:
            files.verify(place)
        except files.Unreadable as error:
            told.append(f"{error}: take an earlier one")
    if (place / LIST).is_file():
        try:
            listed = json.loads((place / LIST).read_text())["weight_map"]
            have = {name: path.name for path in files_of(place) for name in _names(path)}
            missing = [name for name, file in listed.items() if have.get(name) != file]
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            return [*told, f"{LIST} is not a list of tensors: write the checkpoint again"]
        if missing:
            told.append(f"{LIST} names {len(missing)} tensors that are not there, {missing[0]} first: copy all shards")
    return told


def table(tensors: list[Measured]) -> list[list[str]]:
    """Rows of text, one per kind: how many, of what shape, and the range of their sizes."""
    kinds: dict[str, list[Measured]] = {}
    for t in tensors:
        kinds.setdefault(t.kind, []).append(t)
    rows = [["tensors", "kind", "shape", "dtype", "norm", "rms", "zeros", "nan, inf"]]
    for kind, ts in kinds.items():
        shapes = {"x".join(map(str, t.shape)) or "one" for t in ts}
        shape = shapes.pop() if len(shapes) == 1 else "several"
        zeros, bad = max(t.zeros for t in ts), sum(t.bad for t in ts)
        ranges = [_range([t.norm for t in ts]), _range([t.size for t in ts])]
        rows.append([str(len(ts)), kind, shape, ts[0].dtype, *ranges, f"{zeros:.2g}", str(bad)])
    return rows


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} .. {high}"


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError:  # `measure` says it
        return []


def _opened(place: Path) -> dict:
    """Slices of every tensor of an earlier checkpoint; the files stay mapped as long as these live."""
    found = {}
    for path in files_of(place):
        try:
            opened = ExitStack().enter_context(safe_open(path, framework="pt"))
            found |= {name: opened.get_slice(name) for name in opened.keys()}
        except SafetensorError:  # it has nothing to compare with
            continue
    return found


def _measure(name: str, lazy, earlier) -> Measured:
    shape, router = tuple(lazy.get_shape()), ROUTER.match(name)
    comparable = earlier is not None and tuple(earlier.get_shape()) == shape
    squares, equal, zeros, bad, ones = [], [], 0, 0, True
    for at in _pieces(shape):
        values = lazy[at]
        if comparable:
            before = earlier[at]
            equal += _by_row(values.dtype == before.dtype and (values == before), values)
        values = values.double() if values.dtype.itemsize < 8 else values
        finite = values.isfinite()
        zeros, bad = zeros + int((values == 0).sum()), bad + int((~finite).sum())
        ones = ones and bool((values == 1).all())
        squares += values.where(finite, 0).square().reshape(len(values) if shape else 1, -1).sum(1).tolist()
    entries, total = math.prod(shape), sum(squares)
    stacked = len(shape) == 3 or router is not None
    rows = tuple(math.sqrt(s * shape[0] / entries) for s in squares) if stacked and entries else ()
    still = tuple(equal) if stacked or not equal else (all(equal),)
    size = math.sqrt(total / entries) if entries else math.nan
    share, dtype = zeros / max(1, entries), lazy.get_dtype()
    return Measured(name, shape, dtype, math.sqrt(total), size, share, bad, ones and entries > 0, rows, still)


def _pieces(shape: tuple[int, ...]) -> Iterator:
    """Slices of the first dimension, each of about AT_ONCE entries."""
    if not shape:
        yield ...
        return
    rows = max(1, AT_ONCE // max(1, math.prod(shape[1:])))
    for begin in range(0, shape[0], rows):
        yield slice(begin, min(begin + rows, shape[0]))


def _by_row(equal: Tensor | bool, values: Tensor) -> list[bool]:
    if isinstance(equal, bool):  # another dtype
        return [equal] * (len(values) if values.ndim else 1)
    return equal.reshape(len(values) if values.ndim else 1, -1).all(1).tolist()


def _not_finite(t: Measured) -> str:
    return (
        f"{t.name}: {t.bad:,} of {math.prod(t.shape):,} entries are nan or infinite. Go back to a checkpoint "
        "before it, and look at the gradient norms of the steps between"
    )


def _as_made(tensors: list[Measured]) -> list[str]:
    """Norms are made as ones: these never moved."""
    flat = [t for t in tensors if len(t.shape) == 1 and t.name.endswith("weight")]
    ones = [t for t in flat if t.ones]
    if not ones:
        return []
    why = "they were not trained, or had no gradient"
    if any(t.dtype in ("BF16", "F16") for t in ones):
        why = (
            f"in {ones[0].dtype} a step smaller than half the distance to the next number is lost: keep weights in fp32"
        )
    return [f"{len(ones)} of {len(flat)} norms are exactly 1, as they were made, {ones[0].name} first: {why}"]


def _outliers(tensors: list[Measured]) -> list[str]:
    kinds: dict[tuple, list[Measured]] = {}
    for t in tensors:
        if t.is_map and t.norm:
            kinds.setdefault((t.kind, t.shape), []).append(t)
    told = []
    for ts in kinds.values():
        for place, times in _far([t.size for t in ts]):
            told.append(
                f"{ts[place].name} is {times} the size of the median of its kind ({len(ts)} tensors): look at its "
                "layer's gradients, and whether its optimizer and rate are those of the others"
            )
    return told


def _experts(tensors: list[Measured]) -> list[str]:
    """Experts against each other and a router's rows against each other, layer by layer."""
    told, layers = [], {m["layer"] for t in tensors if (m := ROUTER.match(t.name))}
    for t in tensors:
        if not t.rows or not t.norm:
            continue
        router = ROUTER.match(t.name)
        what = "row" if router else "expert"
        if router and not _has_experts(router["layer"], t.shape[0], tensors):
            continue
        if not router and not ("expert" in t.name or any(t.name.startswith(f"{layer}.") for layer in layers)):
            continue  # taps of a convolution, say
        dead = [str(e) for e, size in enumerate(t.rows) if size == 0]
        if dead:
            so = "scores 0 for every token" if router else "adds nothing"
            told.append(
                f"{t.name}: {what} {', '.join(dead[:5])} is all zeros and {so} ({len(dead)} of {len(t.rows)}). Go "
                "back to a checkpoint before that, and raise the balance loss"
            )
        for e, times in _far(list(t.rows)) if not dead else ():
            told.append(
                f"{t.name}: {what} {e} is {times} the size of the layer's median. Look at this router's load "
                "(lessons.router_health)"
            )
        twins = [f"{a} and {b}" for a in range(len(t.rows)) for b in range(a) if t.rows[a] == t.rows[b] > 0]
        if twins and not router:
            told.append(
                f"{t.name}: experts {twins[0]} have one norm to the last bit: they are copies, which never part"
            )
    return told


def _has_experts(layer: str, experts: int, tensors: list[Measured]) -> bool:
    inside = [t for t in tensors if t.name.startswith(f"{layer}.")]
    return any(".experts." in t.name or (len(t.shape) == 3 and t.shape[0] == experts) for t in inside)


def _far(sizes: list[float]) -> list[tuple[int, str]]:
    """Places and words of those that are FAR from the median of all."""
    if len(sizes) < FEW or not (middle := median(sizes)):
        return []
    ratios = [(place, size / middle) for place, size in enumerate(sizes)]
    return [(place, f"{ratio:.2g} times") for place, ratio in ratios if ratio > FAR or 0 < ratio < 1 / FAR]


def _still(tensors: list[Measured]) -> list[str]:
    # vectors of other names are buffers more often than not (priors, a router's selection bias), and so is what no
    # layer holds, whose name has no dot
    parameters = [t for t in tensors if "." in t.name and (t.is_map or t.name.endswith("weight"))]
    told, compared = [], [t for t in parameters if t.still]
    whole = [t.name for t in compared if all(t.still)]
    if whole:
        told.append(
            f"{len(whole)} of {len(compared)} tensors did not change since the checkpoint before, {whole[0]} first: "
            "look for a rate of 0, a missing gradient, or steps that round away"
        )
    for t in compared:
        if len(t.shape) == 3 and any(t.still) and not all(t.still):
            which = [str(e) for e, still in enumerate(t.still) if still]
            told.append(
                f"{t.name}: expert {', '.join(which[:5])} did not change since the checkpoint before ({len(which)} of "
                f"{len(t.still)}): no token chose it. Raise the balance loss, or give each step more tokens"
            )
    return told
