"""Bytes: predicted before a run, and measured as the peak of a block of code over what was there before it.

The prediction really runs the step: forward, loss, backward, update, with the library's own loss and torch's own
optimizer. It runs on fake tensors, which have a shape and a storage size and no memory. `Account` adds up what is alive
at every operation. So it follows the code, checkpointing, autocast's copies and chunks of logits included, and there is
no formula that ages. It says what tensors need. A CUDA context, an allocator's gaps and the workspaces of matrix
libraries come on top, so leave a tenth of a card free.

CUDA counts every allocation, so its peak is exact. A CPU process has only its resident set: the kernel keeps the
high-water mark, and writing 5 to /proc/self/clear_refs sets it back. Large tensors are mapped and unmapped one by one,
so the mark is good to a few percent. That fails for tensors of up to 32 MB. glibc moves them into a pool as soon as it
has seen one freed, and the pool's gaps then count. We saw up to three times too much. So while a peak is measured on
Linux everything from 64 KB on is mapped by itself, which costs a little time.

Footgun: `ru_maxrss`, the usual answer, never goes down. Measured after a large step it reports the large step for ever.
Here the mark is reset; where it cannot be (macOS) a thread samples instead.
"""

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nblib import compiling, losses, models, wiring

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
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
    start = resident()
    try:
        if _mark_reset():  # asked before the block, whose own errors must pass through
            yield result
            result.bytes, result.source = _status("VmHWM") - start, "kernel high-water mark"
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


def resident() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS") if Path("/proc/self/status").exists() else 0


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
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, size)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2 * size)  # M_TRIM_THRESHOLD, in glibc's own proportion
    except (OSError, AttributeError):
        pass


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
    optimizer: str = "adamw",
    checkpointing: bool = False,
    logits: str = "chunked",
) -> dict[str, int]:
    """Bytes by kind of one training step of a transformers model, given as its config or as the model itself.

    `rank` 0 trains all weights; above that, LoRA of this rank on every linear layer of the blocks. `attach` adapts
    the model in another way, `lambda model: lrc.attach(model, init="kaiming")`. `precision` is autocast's, the
    weights are fp32. `logits` full is the plain loss of transformers, chunked is `losses.causal_lm`.

    Each kind is counted where it is largest, and not all are alive at once: gradients grow while activations shrink.
    With checkpointing the peak also holds the inside of the block that is being recomputed, which is no kind of its
    own. So `peak`, the number to compare with a card, is counted and not added up.
    """
    config = getattr(config, "config", config)
    for name, value, allowed in (
        ("optimizer", optimizer, OPTIMIZERS),
        ("precision", precision, PRECISIONS),
        ("logits", logits, LOGITS),
    ):
        if value not in allowed:
            raise ValueError(f"{name} = {value!r}: allowed are {', '.join(allowed)}")
    for name, value, least in (("rows", rows, 1), ("length", length, 2), ("rank", rank, 0)):
        if value < least:
            raise ValueError(f"{name} = {value}: must be at least {least}")
    if rows * length > MOST_TOKENS:
        raise ValueError(f"rows x length = {rows * length:,} tokens: must be at most {MOST_TOKENS:,}")
    for name, most in MOST.items():
        if isinstance(size := getattr(config, name, 1), bool) or not isinstance(size, int) or not 1 <= size <= most:
            raise ValueError(f"the config's {name} = {size!r}: must be a whole number from 1 to {most:,}")
    with FakeTensorMode(), torch.random.fork_rng(devices=[]), models.whole_rows():
        model = _build(config, rank)
        if attach:
            attach(model)
        if checkpointing:
            compiling.checkpoint_blocks(model)
        params = [p for p in model.parameters() if p.requires_grad]
        updater = OPTIMIZERS[optimizer](params)
        ids = torch.zeros(rows, length, dtype=torch.long)
        training_step(model, updater, ids, precision, logits)  # the first step makes the optimizer's state
        weights = {id(t): t for t in [*model.parameters(), *model.buffers()]}
        state = [t for s in updater.state.values() for t in s.values() if isinstance(t, Tensor)]
        constant = {"weights": _bytes(weights.values()), "optimizer": _bytes(state)}
        with Account([*weights.values(), *state, ids]) as account:
            marks = training_step(model, updater, ids, precision, logits, account)
    return constant | {
        "gradients": _bytes(params),
        "activations": marks["hidden"],
        "logits": marks["loss"] - marks["hidden"],
        "peak": sum(constant.values()) + account.most,
    }


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


def _build(config, rank: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    if rank:
        wiring.freeze(model)
        for block in compiling.blocks(model):
            wiring.swap(block, lambda _, linear: _LowRank(linear, rank), wiring.select(block))
    return model


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    precision: str = "fp32",
    logits: str = "chunked",
    account: Account | None = None,
) -> dict[str, int]:
    """One training step; given an account, what is alive after the blocks and at most until they go back."""
    low, marks = PRECISIONS[precision], {}
    with torch.autocast("cpu", dtype=low) if low else nullcontext():
        losses.backbone_and_head(model, needed=True)  # or its logits cannot be counted apart
        hidden, weight = losses.hidden_states(model, {"input_ids": ids})
        if account:
            marks["hidden"] = account.live
            hidden.register_hook(lambda _: marks.update(loss=account.most))
        loss = LOGITS[logits](model, hidden, weight, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return marks


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
