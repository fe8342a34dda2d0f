"""Count bytes: those that a training step will need, and the peak of a block of code.

`Account` counts the bytes of every tensor that is made while it is active, for as long as the
tensor lives: alive now, and at most. It works on real tensors, and on fake ones, which have a shape
and a storage size and no memory.

    estimate    runs a training step on fake tensors under an account: forward, loss, backward and
                update, with the library's own loss and torch's own optimizer. So it follows the
                code, checkpointing, autocast's copies and chunks of logits included, and there is
                no formula that ages. `fit` asks it how many rows a card has room for.
    peak        the most that a block held beyond what was there before. On a card the allocator
                counts it, on a CPU an account, to the byte and the same each time.

Both say what tensors need. A CUDA context, an allocator's gaps and the workspaces of matrix
libraries come on top, so leave a tenth of a card free. The resident memory of a process is another
number: allocators keep what was freed.

Footgun: an account sees operations, not what is inside of one. Memory that a single operation takes
and gives back before it returns is not counted, and neither are tensors of other threads, of code
that `torch.compile` made, or tensors that come from no operation (a mapped file). Tensors that were
there before and are freed in the block do not count either.
"""

import bisect
import gc
import importlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from nblib import compiling, hf_forward, losses, models, runtime, wiring
from nblib.batch import Batch

# One tensor at a time holds what fused does; fused SGD knows no fake tensors, and would run on real
# ones as large.
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARE = 0.9  # of a card's free memory; the rest is for what no tensor holds
GROUPED = (torch.ops.aten._grouped_mm.default,) if hasattr(torch.ops.aten, "_grouped_mm") else ()

# Beyond any machine. The operations of larger ones would be counted for hours, though nothing is
# computed.
MOST_TOKENS = 2**22
MOST = {"hidden_size": 2**20, "num_hidden_layers": 1000, "vocab_size": 2**24}


# ------------------------------------------------------------------ what a block holds


class Peak:
    """Result of `peak()`: bytes above the start, and who counted them. Set when the block ends."""

    bytes: int = 0
    source: str = ""

    def __init__(self, forget: Callable[[], None]):
        self.forget = forget  # the most so far; what the block holds now still counts

    @property
    def gib(self) -> float:
        return self.bytes / 2**30


@contextmanager
def peak(device: torch.device | str = "cpu") -> Iterator[Peak]:
    """Measure the most memory that the block holds beyond what was there before.

    `with memory.peak() as p: ...`, and then `p.gib`. With `p.forget()` in the block, it is the most
    from there on, still beyond what was there before the block.
    """
    gc.collect()

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        result = Peak(lambda: torch.cuda.reset_peak_memory_stats(device))
        yield result
        torch.cuda.synchronize(device)
        result.bytes = torch.cuda.max_memory_allocated(device) - start
        result.source = "CUDA allocator"
        return

    with Account() as account:
        result = Peak(account.forget)
        yield result
    result.bytes = account.most
    result.source = "counted tensors"


class _Size:
    """Bytes of a storage, which can change."""

    def __init__(self, size: int):
        self.bytes = size


class Account(TorchDispatchMode):
    """Count the bytes of every storage made in the block for as long as it lives.

    `live` is the number now, `most` the largest so far. The tensors of `ignore`, and those that an
    operation is given before one has made them, were there before and do not count. A storage that
    is resized counts by what it grows: FSDP puts weights together in storages that it keeps.
    """

    def __init__(self, ignore: Iterable[Tensor] = ()):
        super().__init__()
        self.live = 0
        self.most = 0
        self.known = weakref.WeakSet(tensor.untyped_storage() for tensor in ignore)
        self.sizes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of what is counted

    def __enter__(self) -> "Account":
        self._resize = torch.UntypedStorage.resize_  # is no operation, so nobody dispatches it

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            before = storage.nbytes()
            self._resize(storage, size)
            self._change(storage, before)
            return storage

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most of all calls are this one

        for storage in _storages((args, kwargs)):
            self.known.add(storage)
        if function in GROUPED and isinstance(args[0], FakeTensor):
            out = _fake_grouped_product(function, args, kwargs)
        else:
            out = function(*args, **kwargs)
        for storage in _storages(out):
            if storage not in self.known:
                self.known.add(storage)
                self._change(storage, 0)
        return out

    def forget(self) -> None:
        """Forget the most so far; what is alive still counts."""
        self.most = self.live

    def _change(self, storage: torch.UntypedStorage, before: int) -> None:
        """Count a storage that had so many bytes before."""
        size = self.sizes.get(storage)
        if size is None:
            self.known.add(storage)
            size = _Size(before)
            self.sizes[storage] = size
            weakref.finalize(storage, self._drop, size)

        self.live += storage.nbytes() - size.bytes
        self.most = max(self.most, self.live)
        size.bytes = storage.nbytes()

    def _drop(self, size: _Size) -> None:
        self.live -= size.bytes


def _storages(nest: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of every tensor, and of the tensors inside of those that wrap others."""
    for leaf in tree_leaves(nest):
        if not isinstance(leaf, Tensor):
            continue
        if is_traceable_wrapper_subclass(leaf):  # a DTensor: its part that is here
            names, _ = leaf.__tensor_flatten__()
            yield from _storages([getattr(leaf, name) for name in names])
        else:
            yield leaf.untyped_storage()


def _fake_grouped_product(function, args: tuple, kwargs: dict):
    """Return a grouped product of fake tensors; torch's own shapes of it are for bf16 only."""
    if args[0].dtype == torch.bfloat16:
        return function(*args, **kwargs)
    a, b, offs = (*args, *kwargs.values())[:3]  # rows (S, K) by a stack (E, K, N), or two of rows
    groups = [len(offs)] if b.ndim == 2 else []
    return a.new_empty((*groups, a.shape[0], b.shape[-1]))


# ------------------------------------------------------------------ what a step will need


def estimate(
    config,
    *,
    rows: int,
    length: int,
    rank: int = 0,
    attach: Callable[[nn.Module], object] | None = None,
    precision: str = "fp32",
    optimizer: str | Callable[[nn.Module], Optimizer | list[Optimizer]] = "adamw",
    checkpointing: bool = False,
    logits: str = "chunked",
    loss: Callable[[nn.Module], losses.Loss] | None = None,
    accumulate: int = 1,
    four_bit: bool = False,
    device: str = "cpu",
) -> dict[str, int]:
    """Return bytes by kind of one training step of a transformers model.

    The model is given as its config or as itself. Weights are fp32, and `precision` is autocast's.

    rank       0 trains all weights; above, LoRA of this rank on every linear layer of the blocks
    attach     adapts the model in another way: `lambda model: lrc.attach(model, init="kaiming")`
    four_bit   packs the blocks first
    logits     "full" is the plain loss of transformers, "chunked" is `losses.causal_lm`
    loss       makes another loss from the model; a teacher from `build(config)` in it is `beside`
    optimizer  a name, or a function that makes its own, as `groups.optimizers` does
    device     decides between the paths for CPU and card

    Compiled blocks are counted uncompiled: we assume that they hold no more. Each kind is counted
    where it is largest, and not all are alive at once: gradients grow while activations shrink.
    With checkpointing the peak also holds the inside of the block that is recomputed, which is no
    kind of its own. So `peak`, the number to compare with a card, is counted and not added up.
    """
    config = getattr(config, "config", config)
    _check_choices(optimizer=optimizer, precision=precision, logits=logits)
    _check_sizes(config, rows=rows, length=length, rank=rank, accumulate=accumulate)

    with (
        FakeTensorMode(),
        torch.device(device),
        torch.random.fork_rng(devices=[]),
        hf_forward.assume_unpacked_rows(),
    ):
        ids = torch.zeros(rows, length, dtype=torch.long)
        with Account([ids]) as account:
            # the model
            model = _adapted(config, rank, attach, checkpointing, four_bit)
            if four_bit or rank or attach:
                gc.collect()  # what was replaced may wait for it
            kinds = {"weights": account.live}

            # what the loss holds: a teacher, say
            row_loss = loss(model) if loss else None
            kinds["beside"] = account.live - kinds["weights"]

            # the optimizers' states, which a step with any gradients makes
            params = [p for p in model.parameters() if p.requires_grad]
            if not params:
                raise ValueError("nothing trains: give a rank, or attach what does")
            optimizers = _optimizers(optimizer, model, params)
            for p in params:
                p.grad = torch.zeros_like(p)
            for one in optimizers:
                one.step()
                one.zero_grad(set_to_none=True)
        kinds["optimizer"] = _bytes_of_states(optimizers)

        # a step; the second micro-batch finds gradients, and no later one finds more
        with Account() as during:
            during.known.update(account.known)
            marks = training_step(
                model,
                optimizers,
                ids,
                precision,
                logits,
                during,
                loss=row_loss,
                accumulate=min(2, accumulate),
            )

    return kinds | {
        "gradients": _bytes(params),
        "activations": marks["hidden"],
        "logits": marks["loss"] - marks["hidden"],
        "peak": sum(kinds.values()) + during.most,
    }


def _check_choices(*, optimizer, precision: str, logits: str) -> None:
    """Refuse a name that nothing has."""
    for name, value, allowed in (
        ("optimizer", optimizer, OPTIMIZERS),
        ("precision", precision, PRECISIONS),
        ("logits", logits, LOGITS),
    ):
        if not callable(value) and value not in allowed:
            raise ValueError(f"{name} = {value!r}: allowed are {', '.join(allowed)}")


def _check_sizes(config, *, rows: int, length: int, rank: int, accumulate: int) -> None:
    """Refuse sizes that are too small to train with, or beyond any machine."""
    for name, value, least in (
        ("rows", rows, 1),
        ("length", length, 2),
        ("rank", rank, 0),
        ("accumulate", accumulate, 1),
    ):
        if value < least:
            raise ValueError(f"{name} = {value}: must be at least {least}")
    if rows * length > MOST_TOKENS:
        raise ValueError(
            f"rows x length = {rows * length:,} tokens: must be at most {MOST_TOKENS:,}"
        )
    for name, most in MOST.items():
        size = getattr(config, name, 1)
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most:
            raise ValueError(
                f"the config's {name} = {size!r}: must be a whole number from 1 to {most:,}"
            )


def _adapted(config, rank: int, attach, checkpointing: bool, four_bit: bool) -> nn.Module:
    """Return the model that trains, as `estimate` describes it."""
    model = build(config)
    layers: list[Callable[[nn.Module], nn.Module]] = []
    if four_bit:
        layers.append(Linear4bit)
    if rank:
        layers.append(partial(_LowRank, rank=rank))
    for layer in layers:
        for block in compiling.blocks(wiring.freeze(model)):
            swapped = wiring.select(block)
            wiring.swap(block, lambda _, linear, layer=layer: layer(linear), swapped)
    if attach:
        attach(model)
    if checkpointing:
        compiling.checkpoint_blocks(model)
    return model


def _optimizers(optimizer, model: nn.Module, params: list[Tensor]) -> list[Optimizer]:
    made = optimizer(model) if callable(optimizer) else OPTIMIZERS[optimizer](params)
    return made if isinstance(made, list) else [made]


def _bytes_of_states(optimizers: list[Optimizer]) -> int:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return _bytes(v for state in states for v in state.values() if isinstance(v, Tensor))


def fit(
    need: Callable[[int], int],
    *,
    rows: int,
    accumulate: int,
    default: int,
    machine: runtime.Machine,
    beside: int = 0,
    room: int | None = None,
) -> tuple[int, int]:
    """Return (rows, accumulate) of a step.

    `rows` 0 takes as many of the default x accumulate rows as fit at once, and the batch stays the
    same; without a card it is the default. `need` gives the bytes for a number of rows, from
    `estimate`; `beside` are bytes that others will take later; `room` is what the card has free,
    which is measured where it is not given.
    """
    if rows or (machine.device.type != "cuda" and room is None):
        return rows or default, accumulate
    if room is None:
        reserved = torch.cuda.memory_reserved(machine.device)
        unused = reserved - torch.cuda.memory_allocated(machine.device)
        room = torch.cuda.mem_get_info(machine.device)[0] + unused

    # the most rows that divide the batch and fit: a step needs more with more rows
    need = cache(need)
    batch = default * accumulate
    choices = [n for n in range(1, batch + 1) if batch % n == 0]
    fitting = bisect.bisect_right(choices, int(room * SHARE) - beside, key=need)
    if not fitting:
        raise ValueError(
            f"rows = 0: not even one row fits, it needs {(need(1) + beside) / 1e9:.1f} GB by "
            f"estimate, and {SHARE:.0%} of the {room / 1e9:.1f} GB free can be used; "
            "checkpointing, shorter rows or a smaller model would help"
        )
    rows = choices[fitting - 1]
    needed = (need(rows) + beside) / 1e9
    print(f"rows {rows} x {batch // rows}: {needed:.1f} of {room / 1e9:.1f} GB by estimate")
    return rows, batch // rows


def config_of(name: str):
    """Return the config of a model by hub name or folder, or of the tiny default."""
    return models.tiny(4096).config if name == "tiny" else models.load_config(name)


def build(config) -> nn.Module:
    """Return a model of this config with random fp32 weights; no memory inside of `estimate`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


# ------------------------------------------------------------------ layers that take fake weights


class _LowRank(nn.Module):
    """Hold the tensors of peft's adapter; peft itself cannot be attached to fake weights."""

    def __init__(self, base: nn.Module, rank: int):
        super().__init__()
        self.base = base
        out, width = wiring.shape(base)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 2.0


class Linear4bit(nn.Linear):
    """Hold the tensors of bitsandbytes' layer, whose class of parameters takes no fake weights.

    It has that layer's name. The forward product unpacks the matrix inside one operation, where
    nobody sees it. The backward does so in the open, and needs as much.
    """

    def __init__(self, base: nn.Linear):
        from bitsandbytes.functional import QuantState

        nn.Module.__init__(self)
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.bias = base.bias

        # two weights a byte, one scale for 64 weights, and the scales quantised in their turn
        size = base.weight.numel()
        scales = -(-size // 64)
        packed = torch.empty(-(-size // 2), 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        of_scales = QuantState(
            torch.empty(-(-scales // 256)),
            code=torch.empty(256),
            blocksize=256,
            dtype=torch.float32,
        )
        self.state = QuantState(
            torch.empty(scales, dtype=torch.uint8),
            offset=torch.empty(()),
            state2=of_scales,
            shape=base.weight.shape,
            code=torch.empty(16),
            blocksize=64,
            quant_type="nf4",
            dtype=torch.float32,
        )

    def forward(self, x: Tensor) -> Tensor:
        product = importlib.import_module("bitsandbytes").matmul_4bit
        y = product(x.float(), self.weight, bias=self.bias, quant_state=self.state)
        return y.to(x.dtype)


# ------------------------------------------------------------------ the step that is counted


def training_step(
    model: nn.Module,
    optimizer: Optimizer | list[Optimizer],
    ids: Tensor,
    precision: str = "fp32",
    logits: str = "chunked",
    account: Account | None = None,
    *,
    loss: losses.Loss | None = None,
    accumulate: int = 1,
) -> dict[str, int]:
    """Take one training step; with an account return what is alive at two moments.

    "hidden" is what is alive after the blocks, "loss" the most until their backward begins.
    """
    low = PRECISIONS[precision]
    loss = loss or partial(_plain, logits)
    marks: dict[str, int] = {}
    batch = Batch(ids, ids.view_as(ids))  # all are supervised

    def watch(_, inputs, output) -> None:
        if account is None or "hidden" in marks:
            return
        marks["hidden"] = account.live

        def backward_begins(_) -> None:
            if "loss" not in marks:
                marks["loss"] = account.most

        output[0].register_hook(backward_begins)

    backbone = (losses.backbone_and_head(model) or [model.base_model])[0]
    watching = backbone.register_forward_hook(watch)
    for _ in range(accumulate):
        with torch.autocast(ids.device.type, dtype=low) if low else nullcontext():
            value = sum(loss(model, batch).values())
        value.backward()
        del value
    watching.remove()

    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        one.step()
        one.zero_grad(set_to_none=True)
    return marks


def _plain(logits: str, model: nn.Module, batch: losses.Batch) -> losses.Terms:
    states = losses.hidden_states(model, {"input_ids": batch["input_ids"]})
    if states is None:  # a head that is more than one product: only the model can give its logits
        return losses.causal_lm(model, batch)
    return {"ce": LOGITS[logits](model, *states, batch["input_ids"])}


def in_full(model: nn.Module, hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    """Return the loss as transformers computes it: hidden (B, T, D), head (V, D), ids (B, T)."""
    logits = nn.functional.linear(hidden, head).float()  # (B, T, V) at once, in fp32
    return model.loss_function(logits=logits, labels=ids, vocab_size=len(head))


def in_chunks(model: nn.Module, hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    """Return the same loss with a chunk of rows scored at a time."""
    rows = hidden[:, :-1].flatten(0, 1)  # (B, T, D) -> (B*(T-1), D)
    targets = ids[:, 1:].flatten()
    return losses.chunked_loss(rows, head, targets)  # (some rows, V) at a time


LOGITS = {"chunked": in_chunks, "full": in_full}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
