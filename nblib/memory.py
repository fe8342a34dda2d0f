"""Bytes: predicted before a run, and measured as the peak of a block of code over what was there before it.

The prediction really runs the step: forward, loss, backward, update, with the library's own loss and torch's own
optimizer. It runs on fake tensors, which have a shape and a storage size and no memory. `Account` adds up what is alive
at every operation. So it follows the code, checkpointing, autocast's copies and chunks of logits included, and there is
no formula that ages. `fit` asks it how many rows a card has room for. It says what tensors need. A CUDA context, an
allocator's gaps and the workspaces of matrix libraries come on top, so leave a tenth of a card free.

CUDA counts every allocation, so its peak is exact. A CPU process has only its resident set: the kernel keeps the
high-water mark, and writing 5 to /proc/self/clear_refs sets it back. Large tensors are mapped and unmapped one by one,
so the mark is good to a few percent. That fails for tensors of up to 32 MB. glibc moves them into a pool as soon as it
has seen one freed, and the pool's gaps then count: up to three times too much. So while a peak is measured on Linux,
everything from 64 KB on is mapped by itself. Pages of files that came in and stayed are taken off: the kernel drops
the code of libraries when memory is short and reads it again, which was a fifth of a small step.

Footgun: `ru_maxrss`, the usual answer, never goes down. Measured after a large step it reports the large step for ever.
Here the mark is reset; where it cannot be (macOS) a thread samples instead.
"""

import bisect
import ctypes
import gc
import importlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nblib import compiling, losses, models, runtime, wiring

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
}  # one tensor at a time holds what fused does; fused SGD knows no fake tensors, and would run on real ones as large
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARE = 0.9  # of a card's free memory; the rest is for what no tensor holds
GROUPED = (torch.ops.aten._grouped_mm.default,) if hasattr(torch.ops.aten, "_grouped_mm") else ()
# Beyond any machine; the operations of larger ones would be counted for hours, though nothing is computed.
MOST_TOKENS, MOST = 2**22, {"hidden_size": 2**20, "num_hidden_layers": 1000, "vocab_size": 2**24}


class Peak:
    """Filled when the block ends: bytes over the start, and where the figure comes from."""

    bytes: int = 0
    source: str = ""

    @property
    def gib(self) -> float:
        return self.bytes / 2**30


@contextmanager
def peak(device: torch.device | str = "cpu") -> Iterator[Peak]:
    """`with memory.peak() as p: ...` then `p.gib`: the most memory the block held beyond what was there before."""
    result = Peak()
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        yield result
        torch.cuda.synchronize(device)
        result.bytes, result.source = torch.cuda.max_memory_allocated(device) - start, "CUDA allocator"
        return
    _give_back_free_pages()
    _map_from(2**16)
    start, code = resident(), resident("RssFile")
    try:
        if _mark_reset():  # asked before the block, whose own errors must pass through
            yield result
            grown = max(0, resident("RssFile") - code)
            result.bytes, result.source = _status("VmHWM") - start - grown, "kernel high-water mark"
        else:
            with _sampled() as read:
                yield result
            result.bytes, result.source = read() - start, "sampled every millisecond"
    finally:
        _map_from(2**25)  # where glibc's own rule ends up after large tensors


class Account(TorchDispatchMode):
    """Counts the bytes of every storage made in the block for as long as it lives: exact, and without the allocator.

    Works on real tensors and on fake ones, where nothing is computed and nothing allocated.
    """

    def __init__(self, ignore: Iterable[Tensor] = ()):
        super().__init__()
        self.live = self.most = 0
        self.known = weakref.WeakSet(t.untyped_storage() for t in ignore)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most of all calls ask this
        if function in GROUPED and isinstance(args[0], FakeTensor) and args[0].dtype != torch.bfloat16:
            a, b, offs = (*args, *(kwargs or {}).values())[:3]  # rows (S, K) by a stack (E, K, N), or two of rows
            out = a.new_empty((*[len(offs)] * (b.ndim == 2), a.shape[0], b.shape[-1]))  # torch's shapes know bf16 only
        else:
            out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.live += size
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.live -= size


def resident(field: str = "VmRSS") -> int:
    """Bytes of this process in memory now."""
    return _status(field) if Path("/proc/self/status").exists() else 0


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _mark_reset() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _map_from(size: int) -> None:
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, size)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2 * size)  # M_TRIM_THRESHOLD, in glibc's own proportion


def _give_back_free_pages() -> None:
    try:  # glibc keeps freed memory; without this, a block could reuse it unseen
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except OSError:
        pass


@contextmanager
def _sampled() -> Iterator[Callable[[], int]]:
    import psutil

    process, most, done = psutil.Process(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: most
    finally:
        done.set()
        thread.join()


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
    """Bytes by kind of one training step of a transformers model, given as its config or as the model itself.

    `rank` 0 trains all weights; above that, LoRA of this rank on every linear layer of the blocks. `attach` adapts
    the model in another way, `lambda model: lrc.attach(model, init="kaiming")`, and `four_bit` packs the blocks first.
    `precision` is autocast's, the weights are fp32. `logits` full is the plain loss of transformers, chunked is
    `losses.causal_lm`. `optimizer` may make its own, as `param_groups.optimizers` does. `loss` makes another from the
    model; a teacher from `build(config)` in it counts as `beside`. `device` decides between the paths for CPU and card.
    Compiled blocks are counted uncompiled: we assume that they hold no more.

    Each kind is counted where it is largest, and not all are alive at once: gradients grow while activations shrink.
    With checkpointing the peak also holds the inside of the block that is being recomputed, which is no kind of its
    own. So `peak`, the number to compare with a card, is counted and not added up.
    """
    config = getattr(config, "config", config)
    choices = (optimizer, OPTIMIZERS), (precision, PRECISIONS), (logits, LOGITS)
    for name, (value, allowed) in zip(("optimizer", "precision", "logits"), choices):
        if not callable(value) and value not in allowed:
            raise ValueError(f"{name} = {value!r}: allowed are {', '.join(allowed)}")
    sizes = (("rows", rows, 1), ("length", length, 2), ("rank", rank, 0), ("accumulate", accumulate, 1))
    for name, value, least in sizes:
        if value < least:
            raise ValueError(f"{name} = {value}: must be at least {least}")
    if rows * length > MOST_TOKENS:
        raise ValueError(f"rows x length = {rows * length:,} tokens: must be at most {MOST_TOKENS:,}")
    for name, most in MOST.items():
        if isinstance(size := getattr(config, name, 1), bool) or not isinstance(size, int) or not 1 <= size <= most:
            raise ValueError(f"the config's {name} = {size!r}: must be a whole number from 1 to {most:,}")
    with FakeTensorMode(), torch.device(device), torch.random.fork_rng(devices=[]), models.whole_rows():
        ids = torch.zeros(rows, length, dtype=torch.long)
        with Account([ids]) as account:
            model = build(config)
            for layer in [Linear4bit] * four_bit + [partial(_LowRank, rank=rank)] * bool(rank):
                for block in compiling.blocks(wiring.freeze(model)):
                    wiring.swap(block, lambda _, linear, layer=layer: layer(linear), wiring.select(block))
            if attach:
                attach(model)
            if checkpointing:
                compiling.checkpoint_blocks(model)
            if four_bit or rank or attach:
                gc.collect()  # what was replaced may wait for it
            kinds = {"weights": account.live}
            told = loss(model) if loss else None
            kinds["beside"] = account.live - kinds["weights"]
            params = [p for p in model.parameters() if p.requires_grad]
            if not params:
                raise ValueError("nothing trains: give a rank, or attach what does")
            updaters = optimizer(model) if callable(optimizer) else OPTIMIZERS[optimizer](params)
            updaters = updaters if isinstance(updaters, list) else [updaters]
            for p in params:  # a step with any gradients makes the optimizer's state
                p.grad = torch.zeros_like(p)
            for one in updaters:
                one.step()
                one.zero_grad(set_to_none=True)
        states = [t for one in updaters for s in one.state.values() for t in s.values()]
        kinds["optimizer"] = _bytes(t for t in states if isinstance(t, Tensor))
        with Account() as during:
            during.known.update(account.known)
            # the second of two finds gradients, and no later one finds more
            options = dict(loss=told, accumulate=min(2, accumulate))
            marks = training_step(model, updaters, ids, precision, logits, during, **options)
    return kinds | {
        "gradients": _bytes(params),
        "activations": marks["hidden"],
        "logits": marks["loss"] - marks["hidden"],
        "peak": sum(kinds.values()) + during.most,
    }


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
    """(rows, accumulate) of a step. `rows` 0 asks for as many of the default x accumulate rows as fit at once; without
    a card it is the default. The batch stays the same. `need` gives the bytes for a number of rows, from `estimate`,
    `beside` are bytes that others will take later, `room` is what the card has free: it is asked."""
    if rows or (machine.device.type != "cuda" and room is None):
        return rows or default, accumulate
    if room is None:
        unused = torch.cuda.memory_reserved(machine.device) - torch.cuda.memory_allocated(machine.device)
        room = torch.cuda.mem_get_info(machine.device)[0] + unused
    need, batch = cache(need), default * accumulate
    choices = [n for n in range(1, batch + 1) if batch % n == 0]
    many = bisect.bisect_right(choices, int(room * SHARE) - beside, key=need)  # a step needs more with more rows
    if not many:
        raise ValueError(
            f"rows = 0: not even one row fits, it needs {(need(1) + beside) / 1e9:.1f} GB by estimate, and {SHARE:.0%} "
            f"of the {room / 1e9:.1f} GB free can be used; checkpointing, shorter rows or a smaller model would help"
        )
    rows = choices[many - 1]
    print(f"rows {rows} x {batch // rows}: {(need(rows) + beside) / 1e9:.1f} of {room / 1e9:.1f} GB by estimate")
    return rows, batch // rows


def config_of(name: str):
    """The config of a model by hub name or folder, or of the tiny default."""
    return models.tiny(4096).config if name == "tiny" else models.load_config(name)


class _LowRank(nn.Module):
    """An adapter with the tensors of peft's; peft itself cannot be attached to fake weights."""

    def __init__(self, base: nn.Module, rank: int):
        super().__init__()
        self.base = base
        out, width = wiring.shape(base)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 2.0


class Linear4bit(nn.Linear):
    """The layer of bitsandbytes by its name: its own class of parameters cannot hold fake weights. The forward product
    unpacks the matrix inside one operation, where nobody sees it. The backward does so in the open, and needs as much.
    """

    def __init__(self, base: nn.Linear):
        from bitsandbytes.functional import QuantState

        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        size, low, scales = base.weight.numel(), torch.uint8, -(-base.weight.numel() // 64)  # one scale for 64 weights
        self.weight = nn.Parameter(torch.empty(-(-size // 2), 1, dtype=low), requires_grad=False)
        twice = QuantState(torch.empty(-(-scales // 256)), code=torch.empty(256), blocksize=256, dtype=torch.float32)
        more = dict(shape=base.weight.shape, code=torch.empty(16), blocksize=64, quant_type="nf4", dtype=torch.float32)
        self.state = QuantState(torch.empty(scales, dtype=low), offset=torch.empty(()), state2=twice, **more)

    def forward(self, x: Tensor) -> Tensor:
        options = dict(bias=self.bias, quant_state=self.state)
        return importlib.import_module("bitsandbytes").matmul_4bit(x.float(), self.weight, **options).to(x.dtype)


def build(config) -> nn.Module:
    """A model of this config with random weights in fp32; inside of `estimate` it holds no memory."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


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
    """One training step; given an account, what is alive after the blocks and at most until they go back."""
    low, marks, labels = PRECISIONS[precision], {}, ids.view_as(ids)
    labels.rows = slice(None)  # all are supervised: nobody has to ask them (feed.py)

    def watch(_, inputs, output) -> None:
        if account and "hidden" not in marks:
            marks["hidden"] = account.live
            output[0].register_hook(lambda _: marks.update(loss=marks.get("loss", account.most)))

    watching = (losses.backbone_and_head(model) or [model.base_model])[0].register_forward_hook(watch)
    for _ in range(accumulate):
        with torch.autocast(ids.device.type, dtype=low) if low else nullcontext():
            value = sum((loss or partial(_plain, logits))(model, {"input_ids": ids, "labels": labels}).values())
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
    """The loss as transformers computes it: hidden (B, T, D), head (V, D), ids (B, T)."""
    logits = nn.functional.linear(hidden, head).float()  # (B, T, V) at once, in fp32
    return model.loss_function(logits=logits, labels=ids, vocab_size=len(head))


def in_chunks(model: nn.Module, hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    """The same loss with a chunk of rows scored at a time."""
    rows, targets = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    return losses.chunked_loss(rows, head, targets)  # (some rows, V) at a time


LOGITS = {"chunked": in_chunks, "full": in_full}


def _bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
