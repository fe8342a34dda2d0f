"""FLOPs of a step, and what share of the machine's peak a training reaches: MFU, the model FLOPs utilisation.

    MFU = FLOPs of forward and backward / (seconds x peak)                             (PaLM, arXiv:2204.02311)

Counted are matrix products, convolutions and attention, with torch's formulas, while the first step of a process runs.
So the count is exact for any model, loss and teacher: of a mixture the chosen experts count, and a causal mask saves
nothing. The step runs the same kernels, compiled ones too; a pass over fake tensors would have to rebuild what a loss
holds. Later steps count by their positions. What backward computes again, in a checkpointed block or a kernel of
attention, is no progress: `hfu` has it, MFU has not. The optimizer's products are in neither. The peak is measured, the
fastest product in the machine's precision. Each process counts for itself.

Footgun: kernels that torch does not know (flash-attn, Triton) and recurrences without products count as nothing. And
other processes lower the peak, so on a CPU that is shared MFU is a hint.
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
KERNELS = [f"_scaled_dot_product_{name}" for name in ("efficient_attention", "flash_attention", "cudnn_attention")]
KERNELS += ["_scaled_dot_product_flash_attention_for_cpu"]
FORWARD, BACKWARD = ({getattr(aten, kernel + way) for kernel in KERNELS} for way in ("", "_backward"))
IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}  # torch has no formula of theirs


def of(op, args: tuple, kwargs: dict, out) -> tuple[int, int]:
    """FLOPs of one operation: new ones, and those that were computed before."""
    packet = getattr(op, "overloadpacket", op)
    if packet in FORWARD or packet in BACKWARD:
        q, k, v = args[:3] if packet in FORWARD else args[1:4]  # (B, H, S, D), (B, H', T, D), (B, H', T, E)
        one = 2 * q.shape[:-1].numel() * k.shape[-2]
        scores, values = one * q.shape[-1], one * v.shape[-1]
        return (scores + values, 0) if packet in FORWARD else (2 * (scores + values), scores)
    if packet is aten._grouped_mm:  # rows (S, K) or stacked ones, by group times (E, K, N) or columns (K, N)
        a, b = args[:2]
        return 2 * a.numel() * b.shape[-1] // (len(a) if a.ndim > b.ndim else 1), 0
    formula = flop_registry.get(IN_PLACE.get(packet, packet))
    return (formula(*args, **kwargs, out_val=out) if formula else 0), 0


class Count(TorchDispatchMode):
    """FLOPs of the block: `new`, and `again` what was computed before."""

    supports_higher_order_operators = True
    new = again = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else what is compiled would run eagerly, with other bits

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        new, again = of(op, args, kwargs or {}, out)
        # in backward, where checkpointing watches what is saved, or (the reentrant kind) builds a graph
        watched = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or torch.is_grad_enabled()
        if watched and torch._C._current_graph_task_id() != -1:
            new, again = 0, new + again
        self.new, self.again = self.new + new, self.again + again
        return out


@cache
def peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest square product, in 0.2 s. It touches no generator; zeros would draw too little power."""
    wait, fastest = torch.cuda.synchronize if device.type == "cuda" else lambda _: None, 0.0
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
    """FLOP/s of a training without its first step, which counts, compiles and warms up."""

    def __init__(self, machine: Machine):
        self.machine, self.count, self.positions, self.card, self.asked = machine, Count(), 0, {}, 0.0
        self.done = self.since = 0.0  # steps after the first, in units of its positions, and when it ended

    def counting(self, micro: list[Batch]) -> AbstractContextManager:
        """For forward and backward: the first time it counts."""
        first, self.positions = not self.positions, self.positions or _positions(micro)
        return self.count if first else nullcontext()

    @torch.no_grad()
    def step(self, micro: list[Batch], spent: float) -> dict[str, float]:
        """For the record of this step, `spent` seconds of training after the process began."""
        self.done += _positions(micro) / self.positions
        rate = self.done * self.count.new / (spent - self.since)
        if not self.since:  # the first step has a rate of its own, and what follows is counted from its end
            self.done, self.since = 0.0, spent
        mfu = rate / peak(self.machine.device, self.machine.dtype)
        again = {"hfu": mfu * (1 + self.count.again / self.count.new)} if self.count.again else {}
        if self.machine.device.type == "cuda" and time.monotonic() - self.asked > 1:
            self.asked = time.monotonic()
            threading.Thread(target=self._ask, daemon=True).start()
        return {"flop_per_s": rate, "mfu": mfu, **again, **self.card}

    def _ask(self) -> None:
        """What NVML says of the card. Nothing without nvidia-ml-py, or where the driver does not tell."""
        with suppress(Exception):
            asks = (torch.cuda.device_memory_used, torch.cuda.utilization, torch.cuda.power_draw)
            used, busy, milliwatts = (ask(self.machine.device) for ask in asks)
            self.card = {"card_gib": used / 2**30, "card_busy": busy / 100, "card_watts": milliwatts / 1000}


def _positions(micro: list[Batch]) -> int:
    return sum(batch["labels"].numel() for batch in micro)
