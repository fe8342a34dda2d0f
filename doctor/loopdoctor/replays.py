"""Two replays that need no other input: does a teacher answer twice the same, and does the adapter
change the answer?

A teacher is called again, twice, as the loop called it; live dropout shows as a difference. The
trained model is called again with other numbers in its adapter's factors and the same random
numbers. An adapter that takes part shows as a difference. The numbers are put in by a functional
call, so that no tensor of the user is written to.

Footgun: the two answers that show an adapter must draw the same random numbers, so the generators
are put back between them. The two answers of a teacher must not: with the same numbers its live
dropout would not show.
"""

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from loopdoctor import reached, unheard
from loopdoctor.draws import generators, restore
from loopdoctor.evidence import Call, Evidence, is_adapter
from loopdoctor.reached import PLAIN
from loopdoctor.reading import is_compiled, unwrap

ELEMENTS = 2**28  # logits of a replay
LARGE = 2**32  # bytes of weights that are not held twice


def run(e: Evidence) -> None:
    """Fill e.probes["teachers"] and e.probes["adapter"]; what cannot be replayed stays absent."""
    for teacher in e.teachers:
        call = next(
            (c for c in e.of(Call, role="teacher") if _module(c) is teacher and _repeatable(c)),
            None,
        )
        if call is not None:
            with contextlib.suppress(
                RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError
            ):
                e.probes.setdefault("teachers", {})[id(teacher)] = _noise(teacher, call)
    calls = [c for c in e.forwards if _repeatable(c)]
    call = next((c for c in calls if not c.adapters_off), calls[0] if calls else None)
    e.probes["adapters"] = _begun(e)
    factors = {n for n, p in e.trainable().items() if is_adapter(n) and p.is_floating_point()}
    if call is not None and factors:
        with contextlib.suppress(
            RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError
        ):
            e.probes["adapter"] = _effect(call)


def _begun(e: Evidence) -> dict[str, bool]:
    """Which adapters (peft) were trained before the loop: B is zero in a new one. Unknown when the
    loop went on before the watch did, as the state of an optimizer shows: then the loop itself
    trained them.
    """
    begun: dict[str, bool] = {}
    if any(o.object is not None and o.object.state for o in e.optimizers):
        return begun
    for parts in (getattr(m, "lora_B", None) for _, m in e.modules()):
        for name, part in parts.items() if isinstance(parts, nn.ModuleDict) else ():
            begun[name] = begun.get(name, False) or any(
                bool(p.detach().any()) for p in part.parameters()
            )
    return begun


def sample(module: nn.Module) -> list[Tensor]:
    """Return a few numbers of a model, to tell later whether it changed."""
    ps = [p for p in module.parameters() if p.is_floating_point()]
    return [p.detach().reshape(-1)[:4096].clone() for p in ps[:: max(1, len(ps) // 8)]]


def _module(call: Call) -> nn.Module | None:
    return call.module()


def _repeatable(call: Call) -> bool:
    """Return a cache that was filled would be filled again."""
    if not (call.args or call.kwargs) or _module(call) is None or call.raised:
        return False
    big = (
        call.ids is not None
        and call.vocabulary is not None
        and call.ids.numel() * call.vocabulary > ELEMENTS
    )
    return call.kwargs.get("past_key_values") is None and not big


def _noise(teacher: nn.Module, call: Call) -> tuple[float, float, list[Tensor]]:
    """Largest difference between two answers, their standard deviation, and a sample of the
    weights.
    """
    one, two = _answer(teacher, call), _answer(teacher, call)
    return float((one - two).abs().max()), float(one.std()), sample(teacher)


def _effect(call: Call) -> float:
    """Largest change of the answer under other numbers in the adapter's factors."""
    module = _module(call)
    state = generators()
    before = _answer(module, call)
    restore(state)
    others = {
        n: _other(p) for n, p in module.named_parameters() if is_adapter(n) and p.requires_grad
    }
    after = _answer(module, call, others)
    return float((before - after).abs().max())


def _other(p: Tensor) -> Tensor:
    wave = torch.sin(torch.arange(p.numel(), device=p.device, dtype=torch.float32) + 1.0).view(
        p.shape
    )
    return (p.detach().float() + 0.1 * wave).to(p.dtype)


def _answer(module: nn.Module, call: Call, others: dict[str, Tensor] | None = None) -> Tensor:
    """Return the logits, or whatever floating-point tensor comes first, of the call made once
    more.
    """
    device = next((p.device.type for p in module.parameters()), "cpu")
    cast = (
        torch.autocast(device, dtype=call.autocast)
        if call.autocast is not None
        else contextlib.nullcontext()
    )
    off = _switched_off(module) if call.adapters_off else contextlib.nullcontext()
    with torch.no_grad(), cast, off:
        out = again(module, call.args, call.kwargs, others)
    logits = out.get("logits") if hasattr(out, "get") else None
    found = (
        [logits]
        if isinstance(logits, Tensor)
        else [x for x in floats(out) if x.dim() >= 2] or list(floats(out))
    )
    return found[0].detach().float()


def again(module: nn.Module, args: tuple, kwargs: dict, others: dict[str, Tensor] | None = None):
    """Call a module on copies of its parameters, buffers, other state and arguments, with `others`
    in their place.

    Of a large model, a second copy might end the run. There the weights stay, but for tables that a
    forward writes to.
    """
    module = unwrap(module, [])
    if is_compiled(module):
        raise RuntimeError("a compiled module would be compiled anew for other tensors")
    instead = {id(p): (others or {}).get(name) for name, p in module.named_parameters()}
    large = sum(p.numel() * p.element_size() for p in module.parameters()) > LARGE
    swaps = {}
    # each once: under two names functional_call would put back its own copy
    for prefix, m in module.named_modules():
        for name, t in (*m._parameters.items(), *m._buffers.items()):
            if type(t) not in PLAIN or t.is_meta:
                continue
            if instead.get(id(t)) is None:
                if large and name in m._parameters and getattr(m, "max_norm", None) is None:
                    continue
                instead[id(t)] = t.detach().clone()
            swaps[f"{prefix}.{name}".removeprefix(".")] = instead[id(t)]
    args, kwargs = map(reached.Copier(), (args, kwargs))
    with reached.copies(module), unheard.silence():
        return torch.func.functional_call(module, swaps, args, kwargs, tie_weights=False)


@contextlib.contextmanager
def without_gradients(module: nn.Module, cast: torch.dtype | None):
    """No gradients, and the autocast of the call that is made again."""
    device = next((p.device.type for p in module.parameters()), "cpu")
    with torch.no_grad(), torch.autocast(device, dtype=cast, enabled=cast is not None):
        yield


def packed(module: nn.Module) -> bool:
    """Whether it holds weights that can't be copied. Those of bitsandbytes may be packed anew by a
    forward in eval mode, into a form that has no gradients, so no such module is called in another
    mode than the program's own.
    """
    return any(type(p) not in PLAIN for p in module.parameters())


@contextlib.contextmanager
def resting(modules: Iterable[nn.Module]):
    """All of these in eval mode, and back."""
    modes = [(m, m.training) for m in modules]
    try:
        for m, _ in modes:
            m.training = False
        yield
    finally:
        for m, mode in modes:
            m.training = mode


def _switched_off(module: nn.Module):
    """Return the call was made inside `with model.disable_adapter()`, which is over by now."""
    method = getattr(module, "disable_adapter", None)
    return method() if callable(method) else contextlib.nullcontext()


def floats(output):
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif hasattr(output, "values") and callable(output.values):
        for value in output.values():
            yield from floats(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from floats(value)
