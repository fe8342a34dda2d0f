"""AdaLoRA and MonteCLoRA from peft in the plain loop, so that ARD-LoRA can be compared with them on
equal terms.

*AdaLoRA* (arXiv:2303.10512) starts with more ranks than it may keep and masks the least important
ones on a schedule: it begins after `tinit` steps and ends `tfinal` steps before the end. It needs
the gradients of the step just taken, so `allocate` runs it right after the optimizer's step, when
they are still there. peft keeps how important each rank was in plain dicts, which no checkpoint
holds; `allocate` keeps it in buffers, so that a run resumes where it stopped. peft adds the penalty
that keeps its factors orthogonal to the loss that the model computes itself; a loop with a loss of
its own must add it, and `adalora_loss` does.

*MonteCLoRA* (arXiv:2411.04358) perturbs the first factor of LoRA by a mixture of Gaussian samples
whose covariance is learned. Its divergence belongs to the last forward pass, and it draws in
training mode only.

Footgun: MonteCLoRA fills a buffer of noise ahead. A forward pass that is recomputed, as under
activation checkpointing, draws other noise. Its gradients are wrong, and nothing is raised (pitfall
P57). After a forward pass in training mode it cannot be copied by `copy.deepcopy`.
"""

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nblib import losses, wiring
from nblib.train import Batch, Terms


def adalora(
    model: nn.Module, *, rank: int, keep: int, alpha: float, kinds: Iterable[str], steps: int
) -> nn.Module:
    """AdaLoRA of `rank` ranks per layer; after half the steps `keep` of them are left on
    average.
    """
    from peft import AdaLoraConfig

    if not 1 <= keep <= rank:
        raise ValueError(f"keep = {keep}: allowed are 1 to {rank}, the rank")
    if steps < 6:
        raise ValueError(f"steps = {steps}: at least 6, or there is no time to take ranks away")
    spans = dict(tinit=steps // 6, tfinal=steps // 2, deltaT=1, total_step=steps)
    shape = dict(init_r=rank, target_r=keep, lora_alpha=alpha, target_modules=list(kinds))
    return _adapted(model, AdaLoraConfig(**shape, **spans, task_type="CAUSAL_LM"))


def allocate(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Let AdaLoRA choose its ranks after every step of this optimizer.

    What it goes by is in buffers of the model.
    """
    inner = model.base_model
    allocator, config = inner.rankallocator, inner.peft_config[inner.trainable_adapter_name]
    factors = {name: p for name, p in inner.model.named_parameters() if ".lora_" in name}
    sizes, device = [p.numel() for p in factors.values()], next(iter(factors.values())).device
    model.register_buffer("adalora_step", torch.zeros((), dtype=torch.long, device=device))
    model.register_buffer("adalora_averages", torch.zeros(2, sum(sizes), device=device))

    def remember(*_) -> None:
        # what was masked before a resume is exactly zero, until the step
        if not config.rank_pattern:
            config.rank_pattern = {
                n: p.ne(0).flatten().tolist() for n, p in factors.items() if ".lora_E." in n
            }

    def update(*_) -> None:
        model.adalora_step += 1
        for kept, row in zip(
            (allocator.exp_avg_ipt, allocator.exp_avg_unc), model.adalora_averages
        ):
            kept |= {n: part.view_as(p) for (n, p), part in zip(factors.items(), row.split(sizes))}
        # peft starts anew with what it does not find here
        allocator.ipt = dict(allocator.exp_avg_ipt)
        inner.update_and_allocate(int(model.adalora_step))
        for kept, row in zip(
            (allocator.exp_avg_ipt, allocator.exp_avg_unc), model.adalora_averages
        ):
            if kept:  # peft forgets them once the ranks are final
                row.copy_(torch.cat([kept[n].flatten() for n in factors]))

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(update)
    return optimizer


def orthogonality(model: nn.Module) -> Tensor:
    """How far AdaLoRA's factors are from orthogonal ones: the mean Frobenius distance of their Gram
    matrices.
    """
    factors = [
        (name, p)
        for name, p in model.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    ]
    grams = [p @ p.T if ".lora_A." in name else p.T @ p for name, p in factors]
    return sum((g - torch.eye(len(g), device=g.device, dtype=g.dtype)).norm() for g in grams) / len(
        grams
    )


def adalora_loss(model: nn.Module, batch: Batch, *, weight: float = 0.5) -> Terms:
    """Next-token loss and the penalty with the weight peft gives it."""
    tokens = losses.supervised(batch["labels"])
    return losses.causal_lm(model, batch) | {
        "orthogonality": weight * tokens * orthogonality(model)
    }


def ranks_left(model: nn.Module) -> int:
    """Ranks that AdaLoRA has not masked, over all layers."""
    return sum(
        int(p.detach().ne(0).sum()) for name, p in model.named_parameters() if ".lora_E." in name
    )


def monteclora(
    model: nn.Module, *, rank: int, alpha: float, kinds: Iterable[str], **noise
) -> nn.Module:
    """MonteCLoRA with peft's defaults; `noise` are options of its MontecloraConfig."""
    from peft import LoraConfig, MontecloraConfig

    shape = dict(r=rank, lora_alpha=alpha, target_modules=list(kinds))
    return _adapted(model, LoraConfig(**shape, monteclora_config=MontecloraConfig(**noise)))


def monteclora_loss(model: nn.Module, batch: Batch) -> Terms:
    """Next-token loss and the divergence, which is a number per token and already weighted."""
    terms = losses.causal_lm(model, batch)
    return terms | {
        "kl": model.base_model._get_monteclora_loss() * losses.supervised(batch["labels"])
    }


def drawing(model: nn.Module) -> AbstractContextManager:
    """Let MonteCLoRA draw while something is measured: `sampling` of uncertainty.measure.

    Dropout would come along.
    """
    return wiring.in_mode(model, training=True)


def _adapted(model: nn.Module, config) -> nn.Module:
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers by a name that is on its way out
        return get_peft_model(model, config).train()
