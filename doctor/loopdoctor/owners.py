"""Which objects are meant when nobody says: the model behind modules that were called one by one,
and who is taught.

`watch()` without a model takes every module that no other module called for a model. Two mistakes
follow. A loop may call `model.forward(x)`, or the parts of a model one by one; then the parts look
like models, and the real one is the object that holds them. And a teacher without `no_grad` looks
like a second student, until an optimizer steps without it.

Footgun: a container may hold actor and critic, or student and teacher. Only the smallest owner is
taken, and only of modules that train.
"""

import gc

from torch import nn

from loopdoctor.evidence import Backward, Call, Evidence, Step


def merge(e: Evidence) -> nn.Module | None:
    """Put the smallest module that holds several of the models found in their place, and return
    it.
    """
    if e.declared["model"] is not None or len(e.models) < 2:
        return None
    parts = {id(m) for m in e.models}
    owners = []
    kinds = _kinds(nn.Module)
    for thing in [x for x in gc.get_objects() if type(x) in kinds]:  # of some hundred thousand
        if "_modules" in thing.__dict__ and id(thing) not in parts:
            inside = {id(m) for m in thing.modules()}
            if parts <= inside:
                owners.append((len(inside), thing))
    if not owners:
        return None
    whole = min(owners, key=lambda pair: pair[0])[1]
    e.models[:] = [whole]
    # it was asked without gradients first, to be evaluated
    e.teachers[:] = [m for m in e.teachers if m is not whole]
    for call in e.of(Call):
        if call.module() is whole:
            call.role = "model"
    e.forget(lambda event: isinstance(event, Call) and _is(event, parts))
    return whole


def _kinds(base: type) -> set[type]:
    """Return a class and all that inherit from it."""
    kinds, new = {base}, [base]
    while new:
        more = [kind for kind in type.__subclasses__(new.pop()) if kind not in kinds]
        kinds.update(more)
        new += more
    return kinds


def promote(e: Evidence, given: list[nn.Module]) -> None:
    """No model was found, because all that was called is frozen: what was called with gradients was
    meant to learn.
    """
    if e.models:
        return
    called = [c.module() for c in e.of(Call) if c.grad]
    called = [m for m in called if m is not None and not _among(m, given)]
    chosen = [m for m in called if m.training] or called
    if chosen:
        e.models.append(chosen[-1])
        e.teachers[:] = [m for m in e.teachers if m is not chosen[-1]]
        for call in e.of(Call):
            if call.module() is chosen[-1]:
                call.role = "model"


def settle(e: Evidence) -> None:
    """Call a model a teacher that was found by itself, that no optimizer holds, beside one that
    some optimizer does.
    """
    if e.declared["model"] is not None:
        return
    held = e.optimized()
    trained = [m for m in e.models if any(id(p) in held for p in m.parameters())]
    if not trained:
        return
    rest = [m for m in e.models if m not in trained and any(True for _ in m.parameters())]
    names = {id(m): "teacher" for m in rest}
    e.models[:] = [m for m in e.models if id(m) not in names]
    e.teachers += [m for m in rest if m not in e.teachers]
    stepped = [m for m in e.teachers if any(id(p) in held for p in m.parameters())]
    late = [m for m in stepped if m not in e.models and not _among(m, e.named_teachers)]
    e.models += late  # first called without gradients
    e.teachers[:] = [m for m in e.teachers if m not in late]
    names |= {id(m): "model" for m in late}
    for call in e.of(Call):
        if id(call.module()) in names:
            call.role = names[id(call.module())]


def forgotten(e: Evidence) -> nn.Module | None:
    """Return a network with gradients that no optimizer holds, where two optimizers that step hold
    just the same tensors.
    """
    steps = {step.optimizer for step in e.of(Step)}
    held = [(o.kind, frozenset(o.ids)) for n, o in enumerate(e.optimizers) if n in steps and o.ids]
    if len(set(held)) == len(held):
        return None
    mine = e.optimized()
    for module in (*e.teachers, *e.models):
        ps = [p for p in module.parameters() if p.requires_grad]
        if any(p.grad is not None for p in ps) and not any(id(p) in mine for p in ps):
            return module
    return None


def resting(e: Evidence) -> bool:
    """Whether all models are in eval mode and in no optimizer, which holds something else that gets
    gradients: a picture, a latent or a prompt is sought through them.
    """
    mine, models = e.optimized(), (*e.models, *e.teachers)
    live = set().union(*(o.live for o in e.optimizers))
    still = bool(e.models) and not any(m.training for m in e.models)
    return (
        still
        and bool(mine & live)
        and not any(id(p) in mine for m in models for p in m.parameters())
    )


def teaching(e: Evidence) -> list[nn.Module]:
    """Return the teachers that are asked where the student learns: before the same backward, in at
    least half of its rounds.

    A model of an earlier demonstration, called once and never again, is none. One that the user
    named always is.
    """
    learning = [b for b in e.of(Backward) if any(c.role == "model" and c.grad for c in b.calls)]
    rounds = {b.round for b in learning}
    asked: dict[int, set[int]] = {}
    for b in learning:
        for call in b.calls:
            asked.setdefault(id(call.module()), set()).add(b.round)
    often = {number for number, when in asked.items() if 2 * len(when) >= len(rounds)}
    return [t for t in e.teachers if id(t) in often or _among(t, e.named_teachers)]


def _among(module: nn.Module, modules: list[nn.Module]) -> bool:
    return any(m is module for m in modules)


def _is(call: Call, ids: set[int]) -> bool:
    return id(call.module()) in ids
