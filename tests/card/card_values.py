"""Tensors that say they are on `cuda:0`, compute on the CPU, and refuse every mixture of devices as
a card does.

`begin()` makes `device="cuda"` work in this process. A tensor there holds a CPU tensor (`.on_cpu`)
and passes every operation on to it. So all numbers are real, and the code takes the path that it
takes on a card. Refused, with CUDA's own sentence and the line that asked, is what a card refuses:

    an operation on tensors of both devices; a CPU tensor of no dimension may join one of the card,
    but not receive it an index on the card for a tensor of the CPU; the other way round is copied,
    so it is allowed numpy: `.numpy()`, `numpy.asarray`, matplotlib a generator of the CPU for a
    draw on the card

Footgun: it proves where tensors are, not that kernels exist or are right. What bitsandbytes and
inductor build has no CPU tensor to pass to.
"""

import absent_card

absent_card.appear()

import threading  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from functools import partial  # noqa: E402

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils import _pytree as tree  # noqa: E402
from torch.utils._device import _device_constructors  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
COPIES = {aten.copy_, aten._to_copy, aten._foreach_copy_}
INDEXES = {aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# besides pointwise ones: take a number of the CPU
JOINS = {aten.masked_fill, aten.masked_fill_, aten.fill, aten.fill_}


class CardTensor(Tensor):
    """A CPU tensor that says it is on the card."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, on_cpu: Tensor):
        shape = dict(
            strides=on_cpu.stride(), storage_offset=on_cpu.storage_offset(), layout=on_cpu.layout
        )
        t = torch.Tensor._make_wrapper_subclass(
            cls, on_cpu.size(), **shape, dtype=on_cpu.dtype, device=CARD
        )
        t.on_cpu = on_cpu
        return t

    def __init__(self, on_cpu: Tensor):
        pass

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return passed_on(op, args, kwargs or {})

    def __repr__(self) -> str:
        return repr(self.on_cpu)[:-1] + ", device='cuda:0')"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def __deepcopy__(self, memo: dict) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol"
            )
        twin = CardTensor(self.on_cpu.detach().clone())
        is_parameter = isinstance(self, torch.nn.Parameter)
        memo[id(self)] = twin = torch.nn.Parameter(twin) if is_parameter else twin
        twin.grad = None if self.grad is None else self.grad.__deepcopy__(memo)
        return twin.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: int):
        # what is loaded again is on the CPU until it is moved
        return host(self).__reduce_ex__(protocol)


def refuse(sentence: str) -> None:
    raise RuntimeError(f"{sentence} [{absent_card.line()}]")


def check(op, args: tuple, kwargs: dict, tensors: list[Tensor]) -> None:
    """Raise what a card would raise for these devices."""
    packet = op.overloadpacket
    here = [t for t in tensors if not isinstance(t, CardTensor)]
    if len(here) == len(tensors) or not here or packet in COPIES:
        return
    if packet in INDEXES:
        if not isinstance(args[0], CardTensor):
            refuse(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        values = args[2] if len(args) > 2 else None
        if isinstance(values, Tensor) and not isinstance(values, CardTensor) and values.dim():
            refuse("expected self and value to be in same device")
        return
    joins = (
        torch.Tag.pointwise in op.tags or packet in JOINS or op.name().startswith("aten::_foreach")
    )
    if stranger := [t for t in here if t.dim() or not joins]:
        shape = tuple(stranger[0].shape)
        refuse(
            f"Expected all tensors to be on the same device, but found cuda:0 and cpu, a tensor of {shape} in {op}"
        )
    written = [
        a
        for a, s in zip(args, op._schema.arguments)
        if s.alias_info is not None and s.alias_info.is_write
    ]
    if any(isinstance(t, Tensor) and not isinstance(t, CardTensor) for t in written):
        refuse(
            f"Expected all tensors to be on the same device: {op} would write a result of cuda:0 to the cpu"
        )


def passed_on(op, args: tuple, kwargs: dict):
    """Check the devices, compute on the CPU, and say again where the result is."""
    tensors = [x for x in _leaves(args, kwargs) if isinstance(x, Tensor)]
    on_card = any(isinstance(t, CardTensor) for t in tensors)
    device = kwargs.get("device")
    device = None if device is None else torch.device(device)
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    if op.overloadpacket is aten._pin_memory:
        return args[0].clone()
    if not on_card and (device is None or device.type != "cuda"):
        return op(*args, **kwargs)
    check(op, args, kwargs, tensors)
    generator = kwargs.get("generator")
    if (
        generator is not None
        and generator.device.type == "cpu"
        and (on_card or device.type == "cuda")
    ):
        refuse("Expected a 'cuda' device type for generator but found 'cpu'")
    outer = {id(x.on_cpu): x for x in tensors if isinstance(x, CardTensor)}
    out = op(
        *[_each(_inside, x) for x in args],
        **{name: _each(_inside, x) for name, x in kwargs.items()},
    )
    if op.overloadpacket is aten.copy_:
        return args[0]
    stays = on_card if device is None else device.type == "cuda"
    plain = {id(x) for x in tensors}

    def outside(x):
        if not isinstance(x, Tensor) or id(x) in plain:
            return x
        # written in place: the tensor itself, with the shape that it may have got
        if id(x) in outer:
            return outer[id(x)]
        return CardTensor(x) if stays else x

    return _each(outside, out)


def _leaves(args: tuple, kwargs: dict) -> Iterator:
    """Operations take lists, and no list holds another: a look at them is quicker than torch's own
    walk of a tree.
    """
    for x in (*args, *kwargs.values()):
        yield from x if isinstance(x, list | tuple) else (x,)


def _each(change: Callable, x):
    return type(x)(map(change, x)) if isinstance(x, list | tuple) else change(x)


def _inside(x):
    if isinstance(x, CardTensor):
        return x.on_cpu
    return CPU if isinstance(x, torch.device) and x.type == "cuda" else x


class _Card(TorchDispatchMode):
    """Catches what has no tensor of the card among its inputs: `torch.zeros(3, device="cuda")`,
    `t.to("cuda")`.
    """

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return passed_on(op, args, kwargs or {})


def host(t: Tensor) -> Tensor:
    """The numbers, for what reads memory: safetensors copies from a card by itself."""
    return t.on_cpu.detach() if isinstance(t, CardTensor) else t


def _reading(make, values, *args, **options):
    """`torch.tensor([loss, 1.0])` reads a number off the card for each of its tensors."""
    if isinstance(values, list | tuple):
        values = tree.tree_map(
            lambda x: x.item() if isinstance(x, CardTensor) and not x.dim() else x, values
        )
    return make(values, *args, **options)


def begin() -> None:
    """From here on this process has a card of values."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    save, numpy, tolist, address = (
        safetensors.torch.save_file,
        Tensor.numpy,
        Tensor.tolist,
        Tensor.data_ptr,
    )
    storage, untyped = Tensor.storage, Tensor.untyped_storage
    pointer, histogram = Tensor.__array__, torch.histc

    def to_numpy(t: Tensor, *args, **options):
        if isinstance(t, CardTensor):
            where = f"[{absent_card.line()}]"
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory "
                f"first. {where}"
            )
        return numpy(t, *args, **options)

    def to_array(t: Tensor, *args, **options):
        return to_numpy(t) if isinstance(t, CardTensor) else pointer(t, *args, **options)

    Tensor.numpy, Tensor.__array__ = to_numpy, to_array
    Tensor.tolist = lambda t: tolist(host(t))
    Tensor.data_ptr = lambda t: address(host(t))
    Tensor.storage = lambda t: storage(host(t))
    Tensor.untyped_storage = lambda t: untyped(host(t))
    # whole numbers: on a card alone
    torch.histc = lambda x, *args, **options: histogram(x.float(), *args, **options)

    # `with torch.device("meta")` knows the functions by torch's own names, which are not these any
    # more
    _device_constructors().update(
        getattr(torch._C._VariableFunctions, name) for name in ("tensor", "as_tensor")
    )
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, partial(_reading, getattr(torch, name)))

    def save_file(tensors: dict, *args, **options):
        return save({name: host(t) for name, t in tensors.items()}, *args, **options)

    safetensors.torch.save_file = save_file
    run = threading.Thread.run

    def run_on_card(thread: threading.Thread) -> None:
        with _Card():  # torch looks at operations per thread
            run(thread)

    threading.Thread.run = run_on_card
    _Card().__enter__()
