"""FLOPs of a step, and what share of the machine's peak a training reaches: MFU, the model FLOPs
utilisation.

    MFU = FLOPs of forward and backward / (seconds x peak)                             (PaLM,
    arXiv:2204.02311)

Counted are matrix products, convolutions and attention, with torch's formulas, while the first step
of a process runs. So the count is exact for any model, loss and teacher: of a mixture the chosen
experts count, and a causal mask saves nothing. The step runs the same kernels, compiled ones too; a
pass over fake tensors would have to rebuild what a loss holds. Later steps count by their
positions. What backward computes again, in a checkpointed block or a kernel of attention, is no
progress: `hfu` has it, MFU has not. The optimizer's products are in neither. The peak is measured,
the fastest product in the machine's precision. Each process counts for itself.

Footgun: kernels that torch does not know (flash-attn, Triton) and recurrences without products
count as nothing. And other processes lower the peak, so on a CPU that is shared MFU is a hint.
"""

import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nblib.losses import Batch
from nblib.runtime import Machine

aten = torch.ops.aten
KERNELS = [
    f"_scaled_dot_product_{name}"
    for name in ("efficient_attention", "flash_attention", "cudnn_attention")
]
KERNELS += ["_scaled_dot_product_flash_attention_for_cpu"]
FORWARD = {getattr(aten, kernel) for kernel in KERNELS}
BACKWARD = {getattr(aten, kernel + "_backward") for kernel in KERNELS}
IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}  # torch has no formula of theirs


def of(op, args: tuple, kwargs: dict, out) -> tuple[int, int]:
    """Return the FLOPs of one operation: new ones, and those that were computed before."""
    packet = getattr(op, "overloadpacket", op)

    # attention: q (B, H, S, D), k (B, H', T, D), v (B, H', T, E)
    if packet in FORWARD or packet in BACKWARD:
        q, k, v = args[:3] if packet in FORWARD else args[1:4]
        one = 2 * q.shape[:-1].numel() * k.shape[-2]
        scores = one * q.shape[-1]
        values = one * v.shape[-1]
        if packet in FORWARD:
            return scores + values, 0
        return 2 * (scores + values), scores  # backward computes the scores again

    # products by group: rows (S, K) or stacked ones, times (E, K, N) or columns (K, N)
    if packet is aten._grouped_mm:
        a, b = args[:2]
        groups = len(a) if a.ndim > b.ndim else 1
        return 2 * a.numel() * b.shape[-1] // groups, 0

    formula = flop_registry.get(IN_PLACE.get(packet, packet))
    if formula is None:
        return 0, 0
    return formula(*args, **kwargs, out_val=out), 0


class Count(TorchDispatchMode):
    """Count the FLOPs of a block: `new` ones, and `again` what was computed before."""

    supports_higher_order_operators = True
    new = 0
    again = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, or what is compiled would run eagerly, with other bits."""
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        """Run an operation and count it."""
        out = op(*args, **(kwargs or {}))
        new, again = of(op, args, kwargs or {}, out)
        if _recomputes():
            self.again += new + again
        else:
            self.new += new
            self.again += again
        return out


def _recomputes() -> bool:
    """Return whether backward computes a checkpointed block again.

    Checkpointing watches what is saved; its reentrant kind builds a graph.
    """
    if torch._C._current_graph_task_id() == -1:  # not in backward
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or torch.is_grad_enabled()


@cache
def peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest square product, measured in 0.2 s.

    It touches no generator; zeros would draw too little power.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    fastest = 0.0
    for side in (512, 1024, 2048, 4096, 6144):
        row = torch.arange(side, device=device).mul(12.9898).sin()
        a = torch.outer(row, row.flip(0)).to(dtype)
        out = torch.mm(a, a.T)  # loads the kernel
        for calls in (1, 2, 8, 8):
            wait(device)
            began = time.perf_counter()
            for _ in range(calls):
                torch.mm(a, a.T, out=out)
            wait(device)
            took = time.perf_counter() - began
            fastest = max(fastest, 2 * calls * side**3 / took)
            if took > 0.03:
                return fastest
    return fastest


class Speed:
    """Measure the FLOP/s of a training without its first step, which counts and compiles."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.count = Count()
        self.positions = 0  # of the first step
        self.done = 0.0  # steps after the first, in units of its positions
        self.since = 0.0  # seconds, when the first step ended
        self.card: dict[str, float] = {}
        self.card_read = 0.0  # when

    def counting(self, micro: list[Batch]) -> AbstractContextManager:
        """Return a context for forward and backward that counts at the first step."""
        if self.positions:
            return nullcontext()
        self.positions = _positions(micro)
        return self.count

    @torch.no_grad()
    def step(self, micro: list[Batch], spent: float) -> dict[str, float]:
        """Return figures for the record of a step that ended after `spent` seconds of training."""
        self.done += _positions(micro) / self.positions
        rate = self.done * self.count.new / (spent - self.since)
        if not self.since:  # the first step has a rate of its own, the others count from its end
            self.done = 0.0
            self.since = spent

        mfu = rate / peak(self.machine.device, self.machine.dtype)
        figures = {"flop_per_s": rate, "mfu": mfu}
        if self.count.again:
            figures["hfu"] = mfu * (1 + self.count.again / self.count.new)

        # the driver takes milliseconds to answer, so a thread reads it, once per second
        if self.machine.device.type == "cuda" and time.monotonic() - self.card_read > 1:
            self.card_read = time.monotonic()
            threading.Thread(target=self._read_card, daemon=True).start()
        return figures | self.card

    def _read_card(self) -> None:
        """Read what NVML reports of the card; nothing without nvidia-ml-py."""
        device = self.machine.device
        with suppress(Exception):
            self.card = {
                "card_gib": torch.cuda.device_memory_used(device) / 2**30,
                "card_busy": torch.cuda.utilization(device) / 100,
                "card_watts": torch.cuda.power_draw(device) / 1000,
            }


def _positions(micro: list[Batch]) -> int:
    return sum(batch["labels"].numel() for batch in micro)
