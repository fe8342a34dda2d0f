"""A training step on a card of shapes: fake tensors on `cuda`, and what the step does, counted by
line of source.

Shapes, dtypes, devices, autograd and autocast are those of a real card; no number is computed. What
asks for a number gets one (1, or True), so that a step runs to its end. Counted are

    waits     the host waits for the card: item(), bool(), tolist(), a mask as an index, a copy that
              blocks
    copies    from the host to the card, in all and from memory that is not pinned
    products  matrix products whose inputs are fp32, forward and backward
    casts     copies on the card into another floating dtype: what autocast does to a weight, and
              what undoes it
    launches  operations that start a kernel

A wait hides nothing: it is counted below Python, where the library's own item() arrives too. The
rules are those of `torch.cuda.set_sync_debug_mode` and of the CUDA sources: a grouped product that
is not in bf16 fetches its offsets and multiplies expert by expert.

Footgun: what depends on numbers takes one path here. A mask is all true, a loss is 1.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import absent_card

absent_card.appear()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

aten = torch.ops.aten
PRODUCTS = {
    aten.mm,
    aten.bmm,
    aten.addmm,
    aten.baddbmm,
    aten.addbmm,
    aten.convolution,
    aten._grouped_mm,
}
COUNTED_OUT = {
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.bincount,
    aten.equal,
    aten.unique_consecutive,
}


@dataclass
class Count:
    """What happened, by line of source."""

    waits: Counter = field(default_factory=Counter)
    copies: Counter = field(default_factory=Counter)
    unpinned: Counter = field(default_factory=Counter)
    products: Counter = field(default_factory=Counter)
    casts: Counter = field(default_factory=Counter)
    launches: Counter = field(default_factory=Counter)


class Watch(TorchDispatchMode):
    """Stands above the fake tensors: sees every operation first, and answers those that ask for a
    number.
    """

    def __init__(self):
        super().__init__()
        self.count: Count | None = None

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = op.overloadpacket
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_card = any(_on_card(t) for t in tensors)
        if packet is aten._local_scalar_dense:
            self._wait(on_card)
            return _one(args[0])
        if packet in COUNTED_OUT:
            self._wait(on_card)
            return _all_of(packet, args)
        if packet in (
            aten.index,
            aten.index_put,
            aten.index_put_,
            aten._index_put_impl_,
            aten._unsafe_index,
        ):
            args = self._indices(args, on_card)
        if packet is aten._to_copy and isinstance(args[0], FakeTensor):
            # a number known to fake tensors, which they would send to a real card
            args[0].constant = None
        if packet is aten._grouped_mm and on_card:
            out = self._grouped(*args, **kwargs)
        else:
            out = op(*args, **kwargs)
        if self.count is not None:
            self._note(op, packet, args, kwargs, tensors, out)
        return out

    def _wait(self, on_card: bool, what: str = "") -> None:
        if on_card and self.count is not None:
            self.count.waits[absent_card.line() + what] += 1

    def _indices(self, args: tuple, on_card: bool) -> tuple:
        """A mask as an index is counted out, which waits; an index of the host is copied first,
        which waits too.
        """
        indices = []
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                self._wait(_on_card(index))
                every = torch.zeros(index.numel(), dtype=torch.long, device=index.device)
                indices += [every] * index.ndim
            else:
                self._wait(
                    on_card and index is not None and _on_card(args[0]) and not _on_card(index)
                )
                indices.append(index)
        return (args[0], indices, *args[2:])

    def _grouped(self, a, b, offs=None, bias=None, out_dtype=None):
        """Shapes of torch._grouped_mm, which knows no fake fp32."""
        if a.dtype != torch.bfloat16:
            self._wait(True, " (grouped product not in bf16)")
        if a.ndim == 2 and b.ndim == 2:
            shape = (offs.shape[0], a.shape[0], b.shape[1])
        elif a.ndim == 3 and b.ndim == 3:
            shape = (a.shape[0], a.shape[1], b.shape[2])
        else:
            shape = (a.shape[-2], b.shape[-1])
        return a.new_empty(shape, dtype=out_dtype or a.dtype)

    def _note(self, op, packet, args, kwargs, tensors, out) -> None:
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not any(map(_on_card, [*tensors, *outs])):
            return
        if packet in (aten._to_copy, aten.copy_):
            source, target = (args[1], args[0]) if packet is aten.copy_ else (args[0], out)
            blocks = not (
                kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2])
            )
            if _on_card(target) and not _on_card(source):
                self.count.copies[absent_card.line()] += 1
                self.count.unpinned[absent_card.line()] += not source.is_pinned()
            if _on_card(target) != _on_card(source):
                self._wait(blocks)
        if (
            packet is aten._to_copy
            and _on_card(args[0])
            and args[0].is_floating_point()
            and args[0].dtype != out.dtype
        ):
            self.count.casts[absent_card.line()] += 1
        floating = [t.dtype for t in tensors if t.is_floating_point()]
        if packet in PRODUCTS and floating and all(dtype == torch.float32 for dtype in floating):
            self.count.products[absent_card.line()] += 1
        if not _is_view(op):
            self.count.launches[absent_card.line()] += 1


def _on_card(t) -> bool:
    return isinstance(t, Tensor) and t.device.type == "cuda"


def _one(t: Tensor) -> bool | int | float:
    return True if t.dtype == torch.bool else 1.0 if t.is_floating_point() else 1


def _all_of(packet, args):
    """The answer if everything were counted in."""
    if packet is aten.equal:
        return True
    t = args[0]
    if packet is aten.nonzero:
        return torch.zeros(t.numel(), t.ndim, dtype=torch.long, device=t.device)
    if packet is aten.bincount:
        return torch.zeros(
            max(1, args[2] if len(args) > 2 else 1), dtype=torch.long, device=t.device
        )
    flat = t.reshape(-1).clone()
    return (
        flat
        if packet is aten.masked_select
        else (flat, *[torch.zeros_like(flat, dtype=torch.long)] * 2)
    )


def _is_view(op) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


@contextmanager
def world() -> Iterator[Watch]:
    """Every tensor made inside is fake; those on `cuda` are on the card."""
    import transformers.masking_utils as masking

    # transformers leaves out a wait when it sees a fake tensor
    masking.is_tracing = lambda *_: False
    places = [(Tensor, "tolist", _tolist), (FakeTensor, "tolist", _tolist)]
    places += [(F, "scaled_dot_product_attention", _attention), (nn.Module, "_apply", _apply)]
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    watch = Watch()
    try:
        for place, name, ours in places:
            setattr(place, name, ours)
        with FakeTensorMode(), watch:
            yield watch
    finally:
        for place, name, theirs in before:
            setattr(place, name, theirs)


def _tolist(t: Tensor):
    """One transfer and one wait, however many numbers."""
    answer = _one(t.cpu() if _on_card(t) else t)
    for size in reversed(t.shape):
        answer = [answer] * size
    return answer


def _attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """The kernel that a card takes.

    A CPU build has none to choose from, and would multiply by hand in fp32.
    """
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    if attn_mask is None and q.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[
            0
        ]
    mask = attn_mask
    if mask is not None:
        mask = mask.to(q.dtype).expand(*q.shape[:-1], k.shape[-2])
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, True, dropout_p, is_causal, scale=scale
    )[0]


def _apply(module: nn.Module, change, recurse: bool = True) -> nn.Module:
    """`module.to(...)` for fake parameters, which torch does not swap. Tied ones stay tied."""
    changed = {}
    for part in module.modules() if recurse else (module,):
        for name, p in part._parameters.items():
            if p is not None:
                changed.setdefault(
                    id(p), nn.Parameter(change(p.detach()), requires_grad=p.requires_grad)
                )
                part._parameters[name] = changed[id(p)]
        for name, b in part._buffers.items():
            part._buffers[name] = None if b is None else change(b)
    return module
