"""Adapters that are there and do nothing: S16, N20; and frozen weights that move: N12.

Whether an adapter has an effect is not read from flags but tried (probes.py): its factors are replaced by other
numbers for one forward pass, and the logits must change.

Footgun: at the start B is zero, so an adapter that works has no effect either. Hence other numbers, not on and off.
"""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from train_doctor import measures
from train_doctor.check import Fired, check, fires
from train_doctor.checks.static import moved
from train_doctor.evidence import Evidence, Gradients, Step, is_adapter
from train_doctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown

IGNORED = ("missing adapter keys", "unexpected adapter keys")  # peft, when the keys of a file do not fit
SMALL = 64  # numbers of a tensor
TWINS, STRAIGHT = 8, 0.8  # trained tensors whose names fit best; cosine of an average's way and the way to its twin
SCALES = ("scaling", "scale", "alpha", "lora_alpha", "multiplier", "lora_scale")


@check("S16")
def adapter_inactive(e: Evidence) -> Fired | Verdict:
    """The adapter trains and the model answers as before; or an adapter was loaded and seems untrained.

    Fires when the adapter has no part in the forward pass and a reason is found (switched off, merged, not the active
    one, its scale is zero), or when loading it left out keys: peft warns of missing adapter keys, and
    load_state_dict(strict=False) returns them to nobody. Loading base weights into a model with adapters misses their
    keys too, and is right.

    ERROR adapter-inactive: The adapter (LoRA) has no part in the forward pass: {reason}. Fix: model.set_adapter(name),
    model.enable_adapter_layers(), unmerge_adapter() or a scale above zero, before the loop.
    WARN adapter-inactive/waiting: The adapter {new} was added and not made active, so training goes on with {active}
    and overwrites what that one knew. Fix: model.set_adapter("{new}") before the optimizer is built.
    ERROR or WARN adapter-keys-lost: The adapter's (LoRA) weights were not loaded: their keys do not fit the model's
    names, and the mismatch was ignored, so training starts from a fresh one. Fix: Load with PeftModel.from_pretrained,
    or rename the keys; and look at what load_state_dict(strict=False) returns.
    """
    if e.model is None:
        return unknown("no model was seen")
    wrong = _wrongly_loaded(e)
    if wrong is not None:
        return wrong
    if not any(is_adapter(n) for n in e.parameters()):
        return not_applicable("no adapter")
    if names := _another_is_active(e):
        held, active = names
        reason = f"the optimizer holds the adapter {held}, the active one is {active}"
        return fires(f"the tensors of {held} are in the optimizer and in no forward", f"{held} active", reason=reason)
    if fresh := _left_waiting(e):
        new, active = fresh
        what = f"{active} was trained before, is active and in the optimizer; {new} is new and is neither"
        return fires(what, f"{new} active", WARN, "adapter-inactive/waiting", new=new, active=active)
    reason = _reason(e)
    effect = e.probes.get("adapter")
    off = bool(e.forwards) and all(c.adapters_off for c in e.forwards)
    if reason and (off or (effect is not None and effect == 0.0)):
        return fires(
            f"{reason}; other numbers in its factors change the logits by "
            + (f"{effect:.2g}" if effect is not None else "nothing that could be tried"),
            "an adapter that takes part in the forward pass",
            reason=reason,
        )
    return OK if effect is not None else unknown("the adapter's effect could not be tried")


def _wrongly_loaded(e: Evidence) -> Fired | None:
    said = [w for w in e.warned if any(text in w.lower() for text in IGNORED)]
    lost = [(m, k, u) for _, m, k in e.loaded if (u := [n for n in k if is_adapter(n)])]
    adapters = any(is_adapter(n) for n in e.parameters())
    if lost:
        missing, _, unexpected = lost[-1]
        absent = sum(is_adapter(n) for n in missing)
        seen = f"load_state_dict left out {len(unexpected)} adapter keys ({unexpected[0]}), {absent} were not given"
    elif said and adapters:
        absent, seen = 1, " ".join(said[-1].split())[:160]
    else:
        return None
    return fires(
        seen,
        "every adapter key of the file found in the model",
        ERROR if lost and absent else WARN,
        fault="adapter-keys-lost",
    )


def _reason(e: Evidence) -> str:
    """Why an adapter would have no effect, from what its layers say; "" when they say nothing."""
    if e.forwards and all(c.adapters_off for c in e.forwards):
        return "it is switched off (disable_adapter) during the training forwards"
    layers = [m for _, m in e.modules() if any(is_adapter(n) for n, _ in m.named_parameters(recurse=False))]
    layers += [m for _, m in e.modules() if isinstance(getattr(m, "lora_A", None), nn.Module) and m not in layers]
    if not layers:
        return ""
    if all(getattr(m, "merged", False) is True for m in layers):
        return "it is merged into the base weights (merge_adapter)"
    if all(getattr(m, "disable_adapters", False) is True for m in layers):
        return "it is switched off (disable_adapter_layers)"
    named = _named(layers)
    training = {k for m in named for k, part in m.lora_A.items() if any(p.requires_grad for p in part.parameters())}
    active = {k for m in named for k in getattr(m, "active_adapters", [])}
    if training and not training & active:
        return f"the adapter that trains is {sorted(training)}, the active one is {sorted(active)}"
    drops = [m.p for name, m in e.modules() if "lora_dropout" in name and isinstance(m, nn.Dropout) and m.training]
    if drops and min(drops) >= 1:
        return "its dropout is 1, which drops all that it is given (lora_dropout is the share dropped, not kept)"
    if all(any(_zero(getattr(m, name, None)) for name in SCALES) for m in layers):
        return "its scale is zero (alpha = 0)"
    return ""


def _named(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Layers with adapters by name (peft)."""
    return [m for m in modules if isinstance(getattr(m, "lora_A", None), nn.ModuleDict) and m.lora_A]


def _held_and_active(e: Evidence) -> tuple[list[nn.Module], set[str], set[str]]:
    """Layers with adapters; the adapters whose tensors the optimizer holds, and the active ones (peft)."""
    named, ids = _named(m for _, m in e.modules()), e.optimized()
    held = {k for m in named for k, part in m.lora_A.items() if any(id(p) in ids for p in part.parameters())}
    return named, held, {k for m in named for k in getattr(m, "active_adapters", [])}


def _another_is_active(e: Evidence) -> tuple[str, str] | None:
    """The adapters whose tensors the optimizer holds, and the active ones, where they have none in common (peft)."""
    named, held, active = _held_and_active(e)
    seen = any(e.called.get(id(part)) for m in named for k, part in m.lora_A.items() if k in held)
    apart = held and active and not held & active and not seen
    return (", ".join(sorted(held)), ", ".join(sorted(active))) if apart else None


def _left_waiting(e: Evidence) -> tuple[str, str] | None:
    """A new adapter that is not active, beside one that is, which was no new one when the watch began (peft)."""
    begun = e.probes.get("adapters") or {}
    named, held, active = _held_and_active(e)
    called = {k for m in named for k, part in m.lora_A.items() if e.called.get(id(part))}
    new = sorted(k for k, old in begun.items() if not old and k not in active | held | called)
    old = sorted(k for k in active & held if begun.get(k))
    return (new[0], ", ".join(old)) if new and old and held == set(old) else None


def _zero(value) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(_zero(v) for v in value.values())
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.requires_grad and float(value) == 0.0
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0


@check("N20")
def adapter_without_effect(e: Evidence) -> Fired | Verdict:
    """The adapter's weights change and the model's answers do not.

    Fires when the logits stay the same, bit for bit, whatever numbers stand in the adapter's factors: the layer that
    holds them is not the one that is called, or its output is dropped.

    ERROR adapter-without-effect: The adapter (LoRA) has no effect on the output: what it computes is not used by the
    layers that are called. Fix: Look at the adapted layer's forward: it must return base(x) + scale * B(A(x)), and be
    the one that is called.
    """
    effect = e.probes.get("adapter")
    if not any(is_adapter(n) for n in e.trainable()):
        return not_applicable("no trainable adapter")
    if effect is None:
        return unknown("the adapter's effect could not be tried")
    if effect > 0 or _reason(e):
        return OK
    count = sum(is_adapter(n) for n in e.trainable())
    return fires(
        f"other numbers in {count} adapter tensors change the logits by 0", "logits that depend on the adapter"
    )


@check("N12")
def frozen_moved(e: Evidence) -> Fired | Verdict:
    """Weights that should stay as they are drift.

    Fires when a frozen parameter changed between the first backward and the end. In an optimizer that means it was
    frozen after it had a gradient, and is stepped with what is left of it (an error); outside of one it may be a
    codebook that the loop keeps on purpose. An average is left alone: what goes straight towards a tensor that trains,
    of the same shape, whose name ends alike. The statistics of a batch normalisation whose weights are
    frozen are looked at as well.

    ERROR frozen-moved/stepped: Frozen weights (requires_grad=False) change: they were frozen after a backward and the
    optimizer still has their gradient or momentum. Fix: Freeze before the optimizer is built, and set the gradients of
    what is frozen to None.
    WARN frozen-moved/statistics: The layers are frozen, and their batch normalisation is in train mode: it goes on
    averaging its running mean and variance, so the frozen part changes. Fix: Put the frozen part in eval mode, and
    again after each model.train(). If its statistics should follow the new data, this is right.
    WARN frozen-moved/written: Frozen weights (requires_grad=False) change: something other than the optimizer writes to
    them. Fix: If it is no average that is meant to move, look for what writes to them (copy_, load_state_dict).
    """
    if not e.stepped or not e.first:
        return unknown("no optimizer step was seen")
    every, mine = e.parameters(), e.optimized()
    shared = {measures.values_of(p).data_ptr() for p in e.trainable().values()}
    thawed = {n for g in e.of(Gradients) for n in g.norms}  # layers may take turns
    frozen = {n: p for n, p in every.items() if n in e.frozen_at_start - thawed and not p.requires_grad}
    frozen = {n: p for n, p in frozen.items() if p.data_ptr() not in shared and id(p) == e.first[n][0]}
    drifted = [n for n, p in frozen.items() if p.is_floating_point() and moved(e, n)]
    drifted = [n for n in drifted if id(every[n]) in mine or _more_than_rounding(e, n)]
    drifted = _without_averages(e, drifted, mine)
    if not drifted and (moving := _statistics(e, thawed)):
        return fires(
            f"{len(moving)} normalisations whose weights are frozen have counted more batches ({moving[0]} ...)",
            "statistics that stay as they are where the weights do",
            fault="frozen-moved/statistics",
        )
    if not drifted:
        return OK if frozen else not_applicable("nothing is frozen")
    live = set().union(*(o.live for o in e.optimizers))  # an average may be in the optimizer and get no gradient
    held = [n for n in drifted if id(every[n]) in mine & live]
    return fires(
        f"{len(drifted)} of {len(frozen)} frozen tensors that were followed changed in {len(e.of(Step))} steps "
        f"({(held or drifted)[0]})",
        "0",
        fault="frozen-moved/stepped" if held else "frozen-moved/written",
    )


def _statistics(e: Evidence, thawed: set[str]) -> list[str]:
    """Batch normalisations with frozen weights, in a model that trains others, whose statistics are updated all the
    same. A copy that is averaged (a momentum encoder) is called without gradients and is left alone."""
    now = measures.tracked(e)
    frozen = {id(p) for n, p in e.parameters().items() if n not in thawed and not p.requires_grad}
    layers = [(n, m) for n, m in e.modules() if id(m) in now and id(m) in e.tracked and m.affine]
    layers = [(n, m) for n, m in layers if all(id(p) in frozen for p in m.parameters(recurse=False))]
    others = frozen - {id(p) for _, m in layers for p in m.parameters(recurse=False)}
    moving = [n for n, m in layers if now[id(m)] > e.tracked[id(m)] + 1 and e.called_with_grad.get(id(m))]
    return moving if others and e.trainable() else []


def _without_averages(e: Evidence, drifted: list[str], mine: set[int]) -> list[str]:
    """What follows a tensor that trains is left out. A small one has too few numbers to tell, and goes with others."""
    every = e.parameters()
    follow = {n for n in drifted if id(every[n]) not in mine and _follows(e, n)}
    rest = [n for n in drifted if n not in follow]
    large = [n for n in rest if id(every[n]) in mine or every[n].numel() >= SMALL]
    return rest if large or all(every[n].numel() < SMALL for n in follow) else []


def _follows(e: Evidence, name: str) -> bool:
    """Whether a frozen tensor has gone towards one that trains, and has not become its copy: an average of it."""
    p = e.parameters()[name]
    first = e.first[name][1].float().to(p.device)
    common = {n: _common(n, name) for n, t in e.trainable().items() if t.shape == p.shape}
    most = max(common.values(), default=0)
    twins = [e.trainable()[n] for n, many in common.items() if many == most > 0][:TWINS]
    gone = measures.strided(p).float() - first
    return any(_along(gone, measures.strided(t).float().to(p.device) - first) for t in twins)


def _common(one: str, other: str) -> int:
    """How many parts the ends of two names share."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")))
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _along(gone: Tensor, way: Tensor) -> bool:
    length = float(gone.norm()) * float(way.norm())
    return length > 0 and float(gone @ way) > STRAIGHT * length and not torch.equal(gone, way)


def _more_than_rounding(e: Evidence, name: str) -> bool:
    """An adapter that was merged and taken out again leaves rounding behind."""
    now, (_, first) = measures.strided(e.parameters()[name]), e.first[name]
    gap, size = float((now.float() - first.to(now.device).float()).norm()), float(first.float().norm())
    return gap > (1e-4 if now.dtype.itemsize >= 4 else 2e-2) * size


@check("S55")
def base_unfrozen(e: Evidence) -> Fired | Verdict:
    """Fine-tuning with LoRA needs as much memory as without, and the model without its adapter is not what it was.

    Fires when an optimizer holds the matrices that the adapters were put beside, with a gradient, in half of the
    adapted layers or more. Embeddings, norms, biases and modules that are trained whole are left alone.

    WARN base-unfrozen: The optimizer trains the base weights of {layers} adapted layers together with their adapter
    ({name} ...): LoRA's base is frozen, so that the adapter can be taken off or exchanged. Fix: Freeze it before the
    adapters are made (requires_grad_(False)), or after: p.requires_grad = "lora_" in name.
    """
    trainable, held = e.trainable(), e.optimized()
    factors = {n.rpartition(".lora_")[0] for n in trainable if ".lora_" in n and trainable[n].dim() == 2}
    if not factors:
        return not_applicable("no LoRA beside a layer")
    norms = [event.norms for event in e.of(Gradients)]
    found = {}
    for layer in factors:
        mine = [n for n in trainable if n.startswith(f"{layer}.") and n.count(".") - layer.count(".") <= 2]
        base = [n for n in mine if not is_adapter(n.removeprefix(f"{layer}.")) and trainable[n].dim() == 2]
        base = [n for n in base if id(trainable[n]) in held and any(each.get(n) for each in norms)]
        if base:
            found[layer] = base[0]
    several = any(
        n.startswith(f"{layer}.lora_A") and n.count(".") > layer.count(".") + 2 for layer in factors for n in trainable
    )
    if several and not hasattr(e.model, "peft_config"):
        return OK  # a layer of several parts
    if 2 * len(found) < len(factors) or len(found) < 2:
        return OK
    name = next(iter(found.values()))
    what = f"the optimizer holds the base weight of {len(found)} of {len(factors)} layers with LoRA"
    return fires(what, "none of them", layers=len(found), name=name)
