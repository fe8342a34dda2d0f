"""What a checkpoint has left where it was: S51. Which loads there were is in loads.py.

Names carry prefixes of who saved them ("module." of DistributedDataParallel, "_orig_mod." of
torch.compile, "model." of a trainer), and load_state_dict(strict=False) leaves out what it does not
know.

Footgun: to leave out much is common and right: a new head, a decoder, the base under an adapter. So
what was left out must have a place in the model, of its shape, under a name that differs by a
prefix.
"""

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loopdoctor import measures
from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.trainables import LAYERS, LEAST, within_bound
from loopdoctor.evidence import Evidence, is_adapter, weight_of
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown
from loopdoctor.loads import Load, Shapes

# names of their only part
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
ASKED, TRIED, ALIKE = 64, 64, 4  # names, prefixes, names of one ending


@check("S51")
def checkpoint_not_loaded(e: Evidence) -> Fired | Verdict:
    """Return a run from a checkpoint begins at the loss of a random model, or a pretrained backbone
    is of no use.

    Looks at the last load_state_dict of each module that is trained or is a teacher, or is part of
    one, since loopdoctor was imported. Fires when at least half of its tensors were not given, and
    what was given in their place has the same shapes under the same names but for a prefix, or
    stands one level deeper. A new head or decoder, the base under an adapter and what a later load
    has brought are left alone, and so is what holds other numbers at the first backward than after
    the load: it was copied by hand. Where nothing was given, or nothing but the model's own tensors
    (a filter by names lets through what fits, which is nothing), it fires if layers still are as
    torch drew them.

    ERROR or WARN checkpoint-not-loaded: The checkpoint was loaded and {much} of it taken, because
    its names differ by a prefix ({prefix}), and strict=False passes over names that do not fit: the
    {kind} keeps the weights it had. Fix: {mend}; then load with strict=True, or read the
    missing_keys and unexpected_keys that load_state_dict returns.
    ERROR or WARN checkpoint-not-loaded/deeper: The checkpoint was loaded and {much} of it taken,
    because the weights are one level deeper in it, under {prefix}, and strict=False passes over
    names that do not fit: the {kind} keeps the weights it had. Fix: {mend}; then load with
    strict=True, or read the missing_keys and unexpected_keys that load_state_dict returns.
    WARN checkpoint-not-loaded/filtered: Nothing of the checkpoint was loaded: load_state_dict was
    given {what}, so the {kind} keeps its random weights. A filter by names has let nothing through,
    as it does when the names of a checkpoint carry a prefix ("module.", "_orig_mod.", "model.").
    Fix: Print the names of the checkpoint beside those of the model, take the prefix off before the
    filter, and count what passes it.
    """
    if not e.models:
        return unknown("no model was seen")
    parts, roots = _concerned(e)
    of = [
        (load, m)
        for load in e.loads
        if (m := load.module()) is not None and _concerns(m, parts, roots)
    ]
    if not of:
        return not_applicable(
            "no state dict was loaded into a model, since loopdoctor was imported"
        )
    every = (
        _empty(e, load, m) if load.empty else _prefixed(e, load, m) for load, m in reversed(of)
    )
    return next(filter(None, every), OK)


def _concerned(e: Evidence) -> tuple[set[int], set[int]]:
    """All modules of what trains and of the teachers, and these themselves."""
    whole = [*e.models, *e.teachers, *e.wrappers]
    return {id(m) for one in whole for m in one.modules()}, {
        id(m) for m in (*e.models, *e.teachers)
    }


def _concerns(module: nn.Module, parts: set[int], roots: set[int]) -> bool:
    return id(module) in parts or any(id(m) in roots for m in module.modules())


# ---------------------------------------------------------------------------------------- by prefix
class Fit(NamedTuple):
    """What would make the names fit: how many there are, what to take off and what to put on."""

    many: int
    drop: str
    add: str
    inside: bool = False  # `drop` stands in the middle of names
    names: frozenset[str] = frozenset()  # of the missing ones, that get a place


def _prefixed(e: Evidence, load: Load, module: nn.Module) -> Fired | None:
    missing, unexpected = (
        {n: shape for n, shape in names.items() if not is_adapter(n)}
        for names in (load.missing, load.unexpected)
    )
    taken = load.given - load.extra
    if not missing or not unexpected or 2 * load.lacking < load.keys:
        return None
    fit = fitting(missing, unexpected, moved=taken <= 0)
    many = len(fit.names - e.brought.get(load.number, set()))
    if many < 2 or 2 * many < min(load.keys, load.given):
        return None
    random, deeper = (
        _as_drawn(e, module),
        next((n for n in load.deeper if fit.drop.startswith(f"{n}.")), None),
    )
    more = f"; {random} of its layers began as torch draws them" if random else ""
    return fires(
        f"load_state_dict of {load.kind}{_at(load)} was given {load.given} names and took "
        f"{max(taken, 0)}; of the "
        f"others, such as {next(iter(unexpected))}, {many} fit tensors that were missing{more}",
        "the tensors of a checkpoint in the model",
        ERROR if taken <= 0 and random else WARN,
        fault="checkpoint-not-loaded" if deeper is None else "checkpoint-not-loaded/deeper",
        much="little" if taken > 0 else "nothing",
        prefix=_prefix(fit) if deeper is None else f'"{deeper}"',
        kind=load.kind,
        mend=_mend(fit) if deeper is None else f'Load checkpoint["{deeper}"]',
    )


def fitting(missing: Shapes, unexpected: Shapes, moved: bool = True) -> Fit:
    """Return the prefix that gives most of the unexpected names a place among the missing ones, of
    the same shape. `moved`: one prefix may stand in the place of another.
    """
    endings: dict[str, list[str]] = {}
    for name in missing:
        for ending in _endings(name):
            endings.setdefault(ending, []).append(name)
    pairs: Counter[tuple[str, str]] = Counter()
    for name in measures.spread(list(unexpected), ASKED):
        for ending in _endings(name):
            pairs.update(
                {(name[: -len(ending)], m[: -len(ending)]) for m in endings.get(ending, ())[:ALIKE]}
            )
    found = [Fit(0, "", "")]
    for (drop, add), _ in pairs.most_common(TRIED):
        if moved or not drop or not add:
            new = {n: add + n[len(drop) :] for n in unexpected if n.startswith(drop)}
            there = _fits(new, missing, unexpected)
            found.append(Fit(len(there), drop, add, names=there))
    for wrapper in WRAPPERS:
        found += _inside(wrapper, missing, unexpected)
    return max(found, key=lambda fit: (fit.many, -len(fit.drop + fit.add)))


def _endings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _fits(new: dict[str, str], missing: Shapes, unexpected: Shapes) -> frozenset[str]:
    fits = (
        name
        for old, name in new.items()
        if name in missing and _alike(unexpected[old], missing[name])
    )
    return frozenset(fits)


def _alike(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> bool:
    return a is None or b is None or a == b


def _inside(wrapper: str, missing: Shapes, unexpected: Shapes) -> list[Fit]:
    """Return a part of the model was wrapped, so its name stands in the middle."""
    bare = {_without(n, wrapper): n for n in missing}
    new = {n: bare.get(_without(n, wrapper), "") for n in unexpected}
    there, off = _fits(new, missing, unexpected), any(wrapper in n.split(".") for n in unexpected)
    return (
        [Fit(len(there), f"{wrapper}." if off else "", "" if off else f"{wrapper}.", True, there)]
        if there
        else []
    )


def _without(name: str, part: str) -> str:
    return ".".join(p for p in name.split(".") if p != part)


def _prefix(fit: Fit) -> str:
    if fit.drop and fit.add:
        return f'"{fit.drop}" for "{fit.add}"'
    where = " inside of them" if fit.inside else ""
    return f'"{fit.drop or fit.add}"{where}' + (
        "" if fit.drop else ", which the model's names have"
    )


def _mend(fit: Fit) -> str:
    if fit.inside:
        what = f'{{k.replace("{fit.drop}", ""): v for k, v in state.items()}}'
        return (
            f"Rename the tensors first: {what}"
            if fit.drop
            else f'Load into what is inside of "{fit.add}"'
        )
    name = f'k.removeprefix("{fit.drop}")' if fit.drop else "k"
    name = f'"{fit.add}" + {name}' if fit.add else name
    return f"Rename the tensors first: {{{name}: v for k, v in state.items()}}"


# -------------------------------------------------------------------------------- without any names
def _empty(e: Evidence, load: Load, module: nn.Module) -> Fired | None:
    """Only before the first step: later that is done to states that were kept, see
    watchers/best_states.py.
    """
    random = _as_drawn(e, module) if load.number < e.loads_before else 0
    if not random:
        return None
    what = "an empty state dict" if not load.given else "none but the model's own tensors"
    return fires(
        f"load_state_dict of {load.kind}{_at(load)} was given {load.given} names"
        + (", all of them its own" if load.own else "")
        + f"; {random} of its layers began as torch draws them",
        "the tensors of a checkpoint in the model",
        WARN,
        fault="checkpoint-not-loaded/filtered",
        what=what,
        kind=load.kind,
    )


def _at(load: Load) -> str:
    return f" ({load.place})" if load.place else ""


def _as_drawn(e: Evidence, module: nn.Module) -> int:
    """How many layers began the watch with the numbers that torch draws; 0 where one did not."""
    began, many = {number: numbers for number, numbers in e.first.values()}, 0
    for layer in module.modules():
        weight = weight_of(layer) if isinstance(layer, LAYERS) else None
        if weight is None or weight.numel() < LEAST or not _readable(weight):
            continue
        values = began.get(id(weight), None if weight.requires_grad else measures.strided(weight))
        if values is not None:
            if not within_bound(values.float(), weight[0].numel()):
                return 0
            many += 1
    return many


def _readable(p: Tensor) -> bool:
    return p.is_floating_point() and p.layout == torch.strided and not p.is_meta
