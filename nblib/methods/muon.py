"""Muon: update hidden matrices by the nearest orthogonal matrix to their momentum (Jordan et al., 2024).

`torch.optim.Muon` holds the update. What goes wrong in practice is who is given to it, so that is what stands here:
hidden 2-D matrices go to Muon; embeddings, the output head, norms, biases and routers go to AdamW with a rate of
their own. An embedding is 2-D too, but its rows are looked up one by one, not multiplied as a map.

The learning rate is a convention. "original" moves a matrix by about `lr` in spectral norm (0.02 is usual);
"match_rms_adamw" rescales so that AdamW's rate can be reused.

Footgun: filtering by `p.ndim == 2` alone, as torch's own example does, hands it embeddings, head and router.
"""

import torch
from torch import nn
from torch.optim import AdamW, Optimizer


def hidden_matrices(model: nn.Module) -> list[str]:
    """Names of the parameters that belong in Muon: 2-D, trainable, inside the blocks, not a router."""
    outside = {
        id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m for p in m.parameters()
    }
    return [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.ndim == 2 and id(p) not in outside and not name.endswith("mlp.gate.weight")
    ]


def optimizers(
    model: nn.Module, *, lr: float = 0.02, adamw_lr: float = 3e-3, weight_decay: float = 0.1, adjust: str = "original"
) -> list[Optimizer]:
    """[Muon over hidden matrices, fused AdamW over the rest]; torch scales Muon's decay by its unadjusted rate."""
    names = set(hidden_matrices(model))
    matrices = [p for n, p in model.named_parameters() if n in names]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and n not in names]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, momentum=0.95, adjust_lr_fn=adjust)
    return [muon, AdamW([g for g in groups if g["params"]], lr=adamw_lr, betas=(0.9, 0.95), fused=True)]
