"""Who gets a gradient, and how to be sure: freeze, select layers, swap modules, list what trains,
and the canary.

`requires_grad` says what *may* train. Whether it does depends on the graph, the optimizer and the
numbers. Most ways of getting that wrong raise nothing: the loss falls because something else
learns. So the check is an experiment, not an inspection. The canary takes two small real steps and
asks of every trainable tensor: did you get a gradient, was it finite, did you move? Then it puts
everything back, bit for bit.

Two steps, because one is too few to judge: LoRA starts with B = 0, so the first gradient of A is
exactly zero in a healthy adapter, and alive at the second step. With both factors zero it stays
zero for ever.

Footgun: the canary sees gradients that are missing or zero. A gradient that is wrong but not zero
(a KV cache under hand-written checkpointing, rounding without a straight-through estimator) passes;
compare with a reference once.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nblib import runtime


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is GPT-2's linear layer, whose weight is (in, out). Told by name: its class
    would import transformers.
    """
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer: nn.Linear, a layer derived from it, or GPT-2's Conv1D."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def freeze(model: nn.Module, *, train: Iterable[nn.Module | nn.Parameter] = ()) -> nn.Module:
    """Nothing trains but what is named, by identity and not by pattern."""
    model.requires_grad_(False)
    for part in train:
        for p in [part] if isinstance(part, nn.Parameter) else part.parameters():
            if not p.is_floating_point():
                raise ValueError(
                    f"a parameter of dtype {p.dtype} cannot train: it is the packed base, not "
                    "the adapter"
                )
            p.requires_grad_(True)
    return model


def select(
    model: nn.Module,
    kind: type | tuple[type, ...] | None = None,
    *,
    inside: nn.Module | None = None,
) -> dict[str, nn.Module]:
    """Select modules of a type, linear layers by default, by name; the output head is left out."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    allowed = None if inside is None else set(map(id, inside.modules()))

    def is_wanted(m: nn.Module) -> bool:
        if m is head or (allowed is not None and id(m) not in allowed):
            return False
        return is_linear(m) if kind is None else isinstance(m, kind)

    return {name: m for name, m in model.named_modules() if is_wanted(m)}


def matrix(linear: nn.Module) -> Tensor:
    """Return the weight of a linear layer as (out, in)."""
    return linear.weight.detach().T.contiguous() if is_conv1d(linear) else linear.weight.detach()


def shape(linear: nn.Module) -> tuple[int, int]:
    """(out, in), also where the weight is packed."""
    return (
        (linear.nf, linear.nx) if is_conv1d(linear) else (linear.out_features, linear.in_features)
    )


def swap(
    model: nn.Module,
    replace: Callable[[str, nn.Module], nn.Module | None],
    modules: dict[str, nn.Module],
) -> list[str]:
    """Put `replace(name, module)` in the place of each module; None leaves it.

    Returns the names that changed.
    """
    changed = []
    for name, module in modules.items():
        new = replace(name, module)
        if new is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new)
            changed.append(name)
    return changed


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def missed(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """Return the trainable parameters that no optimizer holds, by name: they would never move, and
    nothing would be raised.
    """
    in_optimizers = {
        id(p)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    return [name for name, p in trainable(model).items() if id(p) not in in_optimizers]


def refuse_missed(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    if names := missed(model, optimizers):
        raise ValueError(
            f"{len(names)} trainable parameters are in no optimizer, the first is {names[0]}"
        )


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """One mode inside; afterwards every module is in the mode it was in, after an error or Ctrl-C
    too.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        model.train(training)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Return evaluation mode inside."""
    return in_mode(model, training=False)


class Verdict(NamedTuple):
    """What the canary saw of one trainable tensor."""

    name: str
    gradient: str  # flows, none, zero, not finite
    moved: bool
    norm: float


class Canary(NamedTuple):
    alive: bool
    sentence: str
    tensors: list[Verdict]

    def dead(self) -> list[str]:
        return [t.name for t in self.tensors if t.gradient != "flows" or not t.moved]


def canary(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    step: float = 1e-2,
    expect: set[str] | None = None,
) -> Canary:
    """Two gradient steps of length `step` per tensor, judged after the second, everything restored
    exactly.

    `loss()` runs the forward pass as training would. `expect` are the names that should train, if
    you know them.
    """
    params = trainable(model)
    if expect is not None and (differ := sorted(expect ^ set(params))):
        first = (
            f"{differ[0]} "
            f"{'should train but does not' if differ[0] in expect else 'trains but should not'}"
        )
        return Canary(False, f"{first} ({len(differ)} tensors differ from `expect`)", [])
    if not params:
        return Canary(False, "nothing trains: no parameter requires a gradient", [])
    with in_mode(model, training=True), _put_back(model, params) as before:
        for _ in range(2):
            for p in params.values():
                p.grad = None
            value = loss()
            if not value.requires_grad:
                return Canary(
                    False, "the loss has no graph: it does not depend on anything that trains", []
                )
            try:
                value.backward()
            except RuntimeError as error:
                return Canary(False, f"backward raised: {str(error).splitlines()[0]}", [])
            verdicts = [_judge(name, p) for name, p in params.items()]
            with torch.no_grad():
                for p in params.values():
                    if (
                        p.grad is not None
                        and torch.isfinite(p.grad).all()
                        and (norm := p.grad.norm()) > 0
                    ):
                        p.sub_(p.grad * (step * max(1.0, float(p.norm())) / norm).to(p.dtype))
        tensors = [
            v._replace(moved=not torch.equal(params[v.name], before[v.name])) for v in verdicts
        ]
    if dead := [t for t in tensors if t.gradient != "flows" or not t.moved]:
        sentence = (
            f"{len(dead)} of {len(tensors)} trainable tensors are dead: {dead[0].name} "
            f"({dead[0].gradient})"
        )
        return Canary(False, sentence, tensors)
    return Canary(True, f"all {len(tensors)} trainable tensors get a gradient and move", tensors)


@contextmanager
def _put_back(model: nn.Module, params: dict[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Afterwards weights, gradients, buffers and random generators are what they were; yields the
    weights.
    """
    weights = {name: p.detach().clone() for name, p in params.items()}
    gradients = {name: p.grad for name, p in params.items()}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    generators = runtime.generators()
    try:
        yield weights
    finally:
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(weights[name])
                p.grad = gradients[name]
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
        runtime.set_generators(generators)


def _judge(name: str, p: nn.Parameter) -> Verdict:
    if p.grad is None:
        return Verdict(name, "none", False, 0.0)
    if not torch.isfinite(p.grad).all():
        return Verdict(name, "not finite", False, float("nan"))
    norm = float(p.grad.norm())
    return Verdict(name, "flows" if norm > 0 else "zero", False, norm)
