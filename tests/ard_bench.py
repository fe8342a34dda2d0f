"""Small models with ARD adapters, and batches of random tokens, for the tests of ARD-LoRA."""

import torch
from torch import nn

from nblib import losses, models, wiring
from nblib.methods import ard

KINDS = ("q_proj", "v_proj", "o_proj")


def adapted(
    family: str = "qwen3",
    *,
    rank: int = 4,
    kinds=KINDS,
    wake: bool = True,
    hidden: int = 64,
    **options,
):
    """Two layers with adapters; `wake` gives B values, or the adapters would not be seen in the
    output.
    """
    model = models.tiny(256, family=family, hidden=hidden, layers=2)
    torch.manual_seed(0)
    ard.attach(model, rank=rank, alpha=2 * rank, targets=ard.projections(model, kinds), **options)
    if wake:
        for a in ard.adapters(model).values():
            nn.init.normal_(a.lora_up, std=0.1)
            if a.lora_logvar is not None:
                nn.init.normal_(a.lora_logvar, std=0.05)  # so that the noise depends on the input
    return model


def random_batch(rows: int = 4, length: int = 16, seed: int = 3) -> dict:
    ids = torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def ragged(lengths=(16, 5, 9, 12), side: str = "right", pad: int = 0) -> tuple[dict, list[dict]]:
    """One padded batch, and the same rows one by one without padding."""
    rows = [random_batch(1, n, seed=n) for n in lengths]
    parts = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        n = max(lengths) - row["input_ids"].shape[1]
        room = (0, n) if side == "right" else (n, 0)
        parts["input_ids"].append(nn.functional.pad(row["input_ids"], room, value=pad))
        parts["labels"].append(nn.functional.pad(row["labels"], room, value=losses.IGNORED))
        parts["attention_mask"].append(nn.functional.pad(torch.ones_like(row["input_ids"]), room))
    return {name: torch.cat(tensors) for name, tensors in parts.items()}, rows


def collected(model, batch) -> tuple[dict, torch.Tensor]:
    with ard.collect(model) as seen:
        losses.causal_lm(model, batch)
    return seen, ard.kl(seen, batch.get("attention_mask"))


def gradients_of(model, batch, loss) -> tuple[dict, dict]:
    """Terms and gradients of one step in training mode, from a fixed seed."""
    torch.manual_seed(5)
    model.train().zero_grad()
    terms = loss(model, batch)
    sum(terms.values()).backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in wiring.trainable(model).items()
    }
    terms = {name: term.detach() for name, term in terms.items()}
    return terms, {name: grad.clone() for name, grad in grads.items()}


def noise_by_content(monkeypatch) -> None:
    """Noise that depends on the token's latent alone, so that batches may be cut in any way."""
    monkeypatch.setattr(ard.layer.torch, "randn_like", lambda x: torch.sin(7 * x.detach()))
