"""The weights of a checkpoint, judged from its files: every tensor by norm, size, zeros and nan,
and every expert alone.

    size = ||W|| / sqrt(entries)        root mean square, which compares tensors of different shapes

Tensors of one kind have the same name up to the numbers of layers and experts. They are judged
against the median of their kind, experts and the rows of a router against those of their layer. No
fixed range decides, because sizes depend on width, optimizer and age. With an earlier checkpoint of
the same training a second question can be answered: what did not change between the two? An expert
that no token chose does not move under our Muon.

Files are read lazily, a few rows at a time, by safetensors. Nothing is unpickled, so a file from
anywhere can be read. Of a checkpoint of ours the weights are read, and the states of the optimizers
are left out.

Footgun: one file cannot tell a weight that is stuck from one that had no time. A norm whose entries
are all exactly 1 is as it was made. A norm at 1.004 after a hundred steps of a small rate moved as
far as it could (weight_movement.py).
"""

import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

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
PICKLES = ("bin", "pt", "pth", "ckpt")
# begins the names of what is no weight in a checkpoint of ours (nblib/checkpoint.py)
TRAINING = "training/"


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
    # root mean square of each index of the first dimension, of routers and stacks
    rows: tuple[float, ...]
    # whether it is equal in the earlier file: one answer, or one per index of a stack
    still: tuple[bool, ...]

    @property
    def kind(self) -> str:
        """Return the name without the numbers of layers and experts."""
        return NUMBER.sub("*", self.name)

    @property
    def is_map(self) -> bool:
        """Return whether it is a matrix or a stack of them; what has one row or one column is a
        vector.
        """
        return len(self.shape) > 1 and min(self.shape[-2:]) > 1

    @property
    def is_stack(self) -> bool:
        """Return whether its first dimension counts experts."""
        return len(self.shape) == 3


# ------------------------------------------------------------------ the files


def files_of(place: Path) -> list[Path]:
    """Return the safetensors files of a folder, or the one that is named; ValueError where there
    are none.
    """
    if place.is_file() and place.suffix == ".safetensors":
        return [place]
    if not place.is_dir():
        raise ValueError(f"{place} is neither a folder nor a .safetensors file")
    found = sorted(place.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(path.name for end in PICKLES for path in place.glob(f"*.{end}"))
    if pickles:
        raise ValueError(
            f"{place} holds {pickles[0]}, a pickle, which runs code when it is read: save as "
            "safetensors"
        )
    raise ValueError(f"{place} holds no .safetensors file")


def integrity(place: Path) -> list[str]:
    """Return what is missing or changed in a folder, by its manifest and by the list of its
    shards.
    """
    findings = []
    if (place / files.MANIFEST).is_file():
        try:
            files.verify(place)
        except files.Unreadable as error:
            findings.append(f"{error}: take an earlier one")
    if not (place / LIST).is_file():
        return findings

    # Each tensor of the list must be in the file that the list names.
    try:
        listed = json.loads((place / LIST).read_text())["weight_map"]
        holder = {name: path.name for path in files_of(place) for name in _names_in(path)}
        missing = [name for name, file in listed.items() if holder.get(name) != file]
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        findings.append(f"{LIST} is not a list of tensors: write the checkpoint again")
        return findings
    if missing:
        count = len(missing)
        findings.append(
            f"{LIST} names {count} tensors that are not there, {missing[0]} first: copy all shards"
        )
    return findings


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError:  # `measure` says it
        return []


def _open_all(place: Path) -> dict[str, Any]:
    """Return lazy slices of every tensor by name; the files stay mapped as long as these live."""
    found = {}
    for path in files_of(place):
        try:
            opened = ExitStack().enter_context(safe_open(path, framework="pt"))
            for name in opened.keys():
                found[name] = opened.get_slice(name)
        except SafetensorError:  # it has nothing to compare with
            continue
    return found


# ------------------------------------------------------------------ measuring


def measure(place: Path, earlier: Path | None = None) -> Iterator[Measured | str]:
    """Yield every tensor in order, and a sentence for each file that cannot be read."""
    before = _open_all(earlier) if earlier else {}
    for path in files_of(place):
        try:
            with safe_open(path, framework="pt") as opened:
                names = [name for name in opened.keys() if not name.startswith(TRAINING)]
                for name in sorted(names):
                    yield _measure(name, opened.get_slice(name), before.get(name))
        except (SafetensorError, OSError) as error:
            why = str(error).partition(":")[2].strip() or error
            yield f"{path.name} cannot be read ({why}): take an earlier one"


def _measure(name: str, lazy: Any, earlier: Any) -> Measured:
    """Return the figures of one tensor, read a few rows at a time."""
    shape = tuple(lazy.get_shape())
    if earlier is not None and tuple(earlier.get_shape()) != shape:
        earlier = None

    squares: list[float] = []  # sum of squares of each index of the first dimension
    # of each index of the first dimension, whether it is that of the earlier file
    equal: list[bool] = []
    zeros = 0
    bad = 0
    ones = True
    for piece in _pieces(shape):
        values = lazy[piece]
        if earlier is not None:
            equal += _equal_rows(values, earlier[piece])
        if values.dtype.itemsize < 8:
            values = values.double()
        finite = values.isfinite()
        zeros += int((values == 0).sum())
        bad += int((~finite).sum())
        ones = ones and bool((values == 1).all())
        squares += _as_rows(values.where(finite, 0).square()).sum(1).tolist()

    entries = math.prod(shape)
    total = sum(squares)
    is_stacked = len(shape) == 3 or ROUTER.match(name) is not None
    rows = []
    if is_stacked and entries:
        rows = [math.sqrt(square * shape[0] / entries) for square in squares]
    still = equal
    if equal and not is_stacked:
        still = [all(equal)]
    return Measured(
        name=name,
        shape=shape,
        dtype=lazy.get_dtype(),
        norm=math.sqrt(total),
        size=math.sqrt(total / entries) if entries else math.nan,
        zeros=zeros / max(1, entries),
        bad=bad,
        ones=ones and entries > 0,
        rows=tuple(rows),
        still=tuple(still),
    )


def _pieces(shape: tuple[int, ...]) -> Iterator[Any]:
    """Yield slices of the first dimension, each of about AT_ONCE entries."""
    if not shape:
        yield ...
        return
    rows = max(1, AT_ONCE // max(1, math.prod(shape[1:])))
    for begin in range(0, shape[0], rows):
        yield slice(begin, min(begin + rows, shape[0]))


def _as_rows(values: Tensor) -> Tensor:
    """Return a matrix with a row for each index of the first dimension; of a scalar, one row."""
    count = len(values) if values.ndim else 1
    return values.reshape(count, values.numel() // max(1, count))


def _equal_rows(values: Tensor, before: Tensor) -> list[bool]:
    """Return of each index of the first dimension whether it is equal, of the same dtype too."""
    if values.dtype != before.dtype:
        return [False] * (len(values) if values.ndim else 1)
    return _as_rows(values == before).all(1).tolist()


# ------------------------------------------------------------------ the table


def table(tensors: list[Measured]) -> list[list[str]]:
    """Return rows of text, one per kind: how many, of what shape, and the range of their sizes."""
    kinds: dict[str, list[Measured]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.kind, []).append(tensor)

    rows = [["tensors", "kind", "shape", "dtype", "norm", "rms", "zeros", "nan, inf"]]
    for kind, members in kinds.items():
        shapes = {"x".join(map(str, tensor.shape)) or "one" for tensor in members}
        rows.append(
            [
                str(len(members)),
                kind,
                shapes.pop() if len(shapes) == 1 else "several",
                members[0].dtype,
                _range([tensor.norm for tensor in members]),
                _range([tensor.size for tensor in members]),
                f"{max(tensor.zeros for tensor in members):.2g}",
                str(sum(tensor.bad for tensor in members)),
            ]
        )
    return rows


def _range(values: list[float]) -> str:
    low = f"{min(values):.3g}"
    high = f"{max(values):.3g}"
    return low if low == high else f"{low} .. {high}"


# ------------------------------------------------------------------ the findings


def findings(tensors: list[Measured]) -> list[str]:
    """Return a sentence for everything that looks wrong, with what to do."""
    broken = [tensor for tensor in tensors if tensor.bad]
    sound = [tensor for tensor in tensors if not tensor.bad and not math.isnan(tensor.size)]
    told = [_not_finite(tensor) for tensor in broken]
    told += _zeros(sound)
    told += _as_made(sound)
    told += _outliers(sound)
    told += _experts(sound)
    told += _unchanged(tensors)
    return told


def _not_finite(tensor: Measured) -> str:
    entries = math.prod(tensor.shape)
    return (
        f"{tensor.name}: {tensor.bad:,} of {entries:,} entries are nan or infinite. Go back to "
        "a checkpoint "
        "before it, and look at the gradient norms of the steps between"
    )


def _zeros(tensors: list[Measured]) -> list[str]:
    """Find matrices that are zero, and then those that mostly are."""
    maps = [tensor for tensor in tensors if tensor.is_map]
    told = []
    for tensor in maps:
        if tensor.norm == 0:
            told.append(
                f"{tensor.name} is all zeros, so nothing passes through it: was it made and "
                "never trained? "
                "(B of an adapter is so before its first step)"
            )
    for tensor in maps:
        if tensor.norm and tensor.zeros > MOSTLY_ZERO:
            told.append(
                f"{tensor.name}: {tensor.zeros:.0%} of the entries are zero. Unless it was "
                "pruned, look for steps "
                "that round away"
            )
    return told


def _as_made(tensors: list[Measured]) -> list[str]:
    """Find norms that never moved: they are made as ones."""
    norms = [
        tensor for tensor in tensors if len(tensor.shape) == 1 and tensor.name.endswith("weight")
    ]
    ones = [tensor for tensor in norms if tensor.ones]
    if not ones:
        return []
    first = ones[0]
    why = "they were not trained, or had no gradient"
    if any(tensor.dtype in ("BF16", "F16") for tensor in ones):
        why = (
            f"in {first.dtype} a step smaller than half the distance to the next number is "
            "lost: keep weights in fp32"
        )
    return [
        f"{len(ones)} of {len(norms)} norms are exactly 1, as they were made, {first.name} "
        f"first: {why}"
    ]


def _outliers(tensors: list[Measured]) -> list[str]:
    """Find matrices whose size is far from that of others of their kind and shape."""
    kinds: dict[tuple, list[Measured]] = {}
    for tensor in tensors:
        if tensor.is_map and tensor.norm:
            kinds.setdefault((tensor.kind, tensor.shape), []).append(tensor)

    told = []
    for members in kinds.values():
        for index, times in _far([tensor.size for tensor in members]):
            told.append(
                f"{members[index].name} is {times} the size of the median of its kind "
                f"({len(members)} tensors): look "
                "at its layer's gradients, and whether its optimizer and rate are those of the "
                "others"
            )
    return told


def _experts(tensors: list[Measured]) -> list[str]:
    """Compare the experts of each layer with each other, and so the rows of each router."""
    layers = set()
    for tensor in tensors:
        match = ROUTER.match(tensor.name)
        if match is not None:
            layers.add(match["layer"])

    told = []
    for tensor in tensors:
        if not tensor.rows or not tensor.norm:
            continue
        router = ROUTER.match(tensor.name)
        if router is not None:
            if _has_experts(router["layer"], tensor.shape[0], tensors):
                told += _uneven(tensor, "row", "scores 0 for every token")
            continue
        # A stack that no router chooses from may be the taps of a convolution.
        if "expert" in tensor.name or any(tensor.name.startswith(f"{layer}.") for layer in layers):
            told += _uneven(tensor, "expert", "adds nothing")
            told += _copies(tensor)
    return told


def _uneven(tensor: Measured, what: str, effect: str) -> list[str]:
    """Find rows or experts that are zero; where none is, those far from the median of the layer."""
    dead = [str(index) for index, size in enumerate(tensor.rows) if size == 0]
    if dead:
        return [
            f"{tensor.name}: {what} {', '.join(dead[:5])} is all zeros and {effect} "
            f"({len(dead)} of "
            f"{len(tensor.rows)}). Go back to a checkpoint before that, and raise the balance loss"
        ]
    return [
        f"{tensor.name}: {what} {index} is {times} the size of the layer's median. Look at "
        "this router's load "
        "(nblib.methods.moe.router_health)"
        for index, times in _far(list(tensor.rows))
    ]


def _copies(tensor: Measured) -> list[str]:
    """Find two experts of one norm."""
    for later, size in enumerate(tensor.rows):
        for earlier in range(later):
            if tensor.rows[earlier] == size > 0:
                both = f"experts {later} and {earlier}"
                return [
                    f"{tensor.name}: {both} have one norm to the last bit: they are copies, "
                    "which never part"
                ]
    return []


def _has_experts(layer: str, experts: int, tensors: list[Measured]) -> bool:
    """Return whether a layer holds so many experts, or any in tensors of their own."""
    for tensor in tensors:
        if not tensor.name.startswith(f"{layer}."):
            continue
        if ".experts." in tensor.name or (tensor.is_stack and tensor.shape[0] == experts):
            return True
    return False


def _far(sizes: list[float]) -> list[tuple[int, str]]:
    """Return index and words of those that are FAR from the median of all."""
    if len(sizes) < FEW:
        return []
    middle = median(sizes)
    if not middle:
        return []
    far = []
    for index, size in enumerate(sizes):
        ratio = size / middle
        if ratio > FAR or 0 < ratio < 1 / FAR:
            far.append((index, f"{ratio:.2g} times"))
    return far


def _unchanged(tensors: list[Measured]) -> list[str]:
    """Find what is equal in the earlier checkpoint: whole tensors, then experts."""
    # Vectors of other names are buffers more often than not (priors, a router's selection bias),
    # and so is what no layer holds, whose name has no dot.
    compared = []
    for tensor in tensors:
        is_parameter = "." in tensor.name and (tensor.is_map or tensor.name.endswith("weight"))
        if is_parameter and tensor.still:
            compared.append(tensor)

    told = []
    whole = [tensor.name for tensor in compared if all(tensor.still)]
    if whole:
        told.append(
            f"{len(whole)} of {len(compared)} tensors did not change since the checkpoint "
            f"before, {whole[0]} first: "
            "look for a rate of 0, a missing gradient, or steps that round away"
        )
    for tensor in compared:
        still = [str(expert) for expert, is_still in enumerate(tensor.still) if is_still]
        if tensor.is_stack and 0 < len(still) < len(tensor.still):
            told.append(
                f"{tensor.name}: expert {', '.join(still[:5])} did not change since the "
                "checkpoint before "
                f"({len(still)} of {len(tensor.still)}): no token chose it. Raise the balance "
                "loss, or give each step "
                "more tokens"
            )
    return told
