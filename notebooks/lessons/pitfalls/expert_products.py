"""P72: a mixture of experts that autocast does not reach.

Autocast is a list of operations. `F.linear` is on it, the grouped product that multiplies all
experts at once is not. transformers casts the inputs of that product up to the dtype of the
weights. Beside fp32 weights, which is what one has under autocast, the experts run in fp32, forward
and backward. They are most of a mixture's work.

Here one training step runs under bf16 autocast of the CPU, and `Products` counts, below autograd,
in which dtype each matrix product ran and how many multiply-adds it took. The product inside
attention is not among them.

What cannot be measured here is what it costs on a card. There, a grouped product in fp32 misses the
tensor cores, and it fetches the sizes of the groups first, which makes the host wait (P73).
`nblib.models` puts the mended lines in the place of the library's for a card, when it is imported,
and leaves a CPU as it is.

Footgun: the output of a layer does not tell. It is cast back to the dtype that came in.
"""

from collections import Counter
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import moe as experts

from lessons.pitfalls import VERSIONS, Pitfall
from lessons.pitfalls.bench import byte_model, byte_rows, mean_loss
from nblib.methods import moe

aten = torch.ops.aten
# where the first of the two factors stands
FACTORS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten._grouped_mm: 0}


class Products(TorchDispatchMode):
    """Inside, counts matrix products by dtype, and the multiply-adds in them."""

    def __init__(self):
        super().__init__()
        self.grouped: Counter[torch.dtype] = Counter()  # products of all experts of a layer
        self.work: Counter[torch.dtype] = Counter()  # multiply-adds of all products

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        packet = op.overloadpacket
        if packet in FACTORS:
            first, second = args[FACTORS[packet] :][:2]
            self.grouped[first.dtype] += packet is aten._grouped_mm
            # (M, K) x (K, N), K in groups or not
            self.work[first.dtype] += first.numel() * second.shape[-1]
        return op(*args, **(kwargs or {}))


def up_to_the_weights(inputs: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    inputs = inputs.to(weight.dtype)  # at fault: the weights are fp32 under autocast
    return F.grouped_mm(inputs, weight, offs=offs)  # autocast does not know this one


def down_to_autocast(inputs: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    low = torch.get_autocast_dtype(inputs.device.type)  # as nn.Linear would
    return F.grouped_mm(inputs.to(low), weight.to(low), offs=offs)


def _router_in_fp32(model: nn.Module) -> None:
    for router in moe.routers(model).values():

        def exact(x: Tensor, forward: Callable = router.forward):
            with torch.autocast("cpu", enabled=False):
                return forward(x.float())

        router.forward = exact


def computed(product: Callable | None, *, exact_router: bool = False) -> dict:
    """Return a forward and a backward pass under bf16 autocast, in which dtype.

    None: the product as it is installed.
    """
    model = byte_model(family="qwen3_moe", moe_intermediate_size=128)
    if exact_router:
        _router_in_fp32(model)
    rows = byte_rows(4, 64)
    products = mock.patch.object(experts, "_grouped_mm", product or experts._grouped_mm)
    with products, torch.autocast("cpu", torch.bfloat16), Products() as counted:
        loss = mean_loss(model, {"input_ids": rows, "labels": rows})
        loss.backward()
    return {
        "experts' products in fp32": counted.grouped[torch.float32],
        "experts' products in bf16": counted.grouped[torch.bfloat16],
        "share of the multiply-adds in fp32": counted.work[torch.float32] / counted.work.total(),
        "loss": float(loss.detach()),
    }


PITFALLS = [
    Pitfall(
        id="P72",
        title="The mixture that ran in fp32",
        symptom="A mixture is many times slower than its active parameters say, and bf16 "
        "autocast gains nothing.",
        claim="the router is slow: it is computed in fp32 (folklore)",
        verdict="With the router in fp32 alone, nearly all of the work is in bf16. The experts "
        "are the work. "
        "Autocast has no rule for their grouped product, and transformers casts its inputs up "
        "to the fp32 weights, so "
        "forward and backward of every expert run in fp32. Autocast is on all the while: the "
        "other products are in "
        f"bf16. How much slower that is on a card was not measured here. Seen on {VERSIONS}.",
        fix="Cast inputs and weights to the autocast dtype before the product. `nblib.models` "
        "does so on a card. Count "
        "the products by dtype once, before a long run.",
        broken=lambda: computed(up_to_the_weights),
        claimed=lambda: computed(down_to_autocast, exact_router=True),
        fixed=lambda: computed(down_to_autocast),
        seen=lambda facts: facts["share of the multiply-adds in fp32"] > 0.5,
        wrong=up_to_the_weights,
        right=down_to_autocast,
    ),
]
