"""Two things that transformers does in each forward pass and that a training loop does not need,
switched off by blocks.

    with assume_unpacked_rows(): ...    each row is one sequence: nothing asks the positions for
                                        packed documents
    with experts_in_autocast(): ...     experts' grouped products run in the autocast dtype, as
                                        nn.Linear does

`losses.forward` enters the first, the loop the second: a block that is recomputed in backward needs
it too. What was changed is put back when the block ends. A process that never imported transformers
pays nothing.

Footgun: the functions belong to the process. In a second thread that runs a model meanwhile they
act as well.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_MISSING = object()


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Hold another value under a module's name while the block runs."""
    original = getattr(module, name, _MISSING)
    setattr(module, name, value)
    try:
        yield
    finally:
        if original is _MISSING:
            delattr(module, name)
        else:
            setattr(module, name, original)


@contextmanager
def assume_unpacked_rows() -> Iterator[None]:
    """Treat each row as one sequence inside the block.

    In every forward pass without a mask, transformers asks the positions whether several documents
    were packed into a row. That waits for a card, and positions without values cannot be asked.
    """
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import masking_utils

    with _replaced(masking_utils, "find_packed_sequence_indices", lambda position_ids: None):
        yield


@contextmanager
def experts_in_autocast() -> Iterator[None]:
    """Compute experts' grouped products in the autocast dtype inside the block, on CUDA.

    torch does not autocast the product, so beside fp32 weights transformers casts the inputs up. On
    a card that is ten times slower and asks for the sizes of the groups, one wait for each product.
    """
    experts = sys.modules.get("transformers.integrations.moe")
    # none in an older transformers, whose experts are nn.Linear
    product = getattr(experts, "_grouped_mm", None)
    if product is None:
        yield
        return

    def grouped_mm(inputs: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        if weight.is_cuda and torch.is_autocast_enabled("cuda"):
            low = torch.get_autocast_dtype("cuda")
            inputs, weight = inputs.to(low), weight.to(low)
        return product(inputs, weight, offs)

    with _replaced(experts, "_grouped_mm", grouped_mm):
        yield
