"""One attention, several kernels: what each keeps for the backward pass, and how far their
gradients lie apart.

    softmax(Q K^T / sqrt(d)) V
    the plain kernel keeps the length x length table, the fused ones make it again

`torch.nn.functional.scaled_dot_product_attention` chooses by device, dtype and mask. Here the
kernel is forced.

Footgun: a kernel that does not exist for a device raises; the table says so, with the reason that
torch gives.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nblib import memory

KERNELS = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def compared(length: int, *, device: torch.device | str = "cpu", seed: int = 0) -> list[dict]:
    """Each kernel on the same queries, keys and values: the bytes kept, and the gradient beside the
    plain kernel's.
    """
    ran = {kernel: _run(kernel, length, device, seed) for kernel in KERNELS}
    right, table = ran[SDPBackend.MATH][0], []
    for gradient, facts in ran.values():
        if gradient is not None:
            facts["largest difference"] = float((gradient - right).abs().max())
        table.append(facts)
    return table


def _run(kernel: SDPBackend, length: int, device, seed: int) -> tuple[torch.Tensor | None, dict]:
    make = torch.Generator().manual_seed(seed)
    q, k, v = (
        part.clone().requires_grad_()
        for part in torch.randn(3, 1, 4, length, 64, generator=make).to(device)
    )
    with sdpa_kernel(kernel), memory.Account([q, k, v]) as account:
        try:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        except RuntimeError as error:
            return None, {
                "kernel": kernel.name,
                "runs here": False,
                "reason": str(error).split(".")[0],
            }
        kept = account.live
        out.sum().backward()
    return q.grad, {"kernel": kernel.name, "runs here": True, "kept KiB": kept / 1024}
