"""Mixtures balanced without a loss: a bias per expert, which decides who is chosen and weighs nothing.

    chosen = the k largest of s_e + b_e,   weights from s_e alone          s: the scores of the router
    b_e <- b_e + rate x sign(mean load - load_e)   after each optimizer step   (Wang et al., 2024; DeepSeek-V3)

No gradient of a balance loss disturbs the language loss. Routers of DeepSeek-V3 and GLM-4 have this bias as a buffer
and choose by it; theirs is updated here. Softmax routers get one of the same name. It is saved with the weights, and a
new model must have one before it loads them.

Footgun: the rate is in units of a score, and made for sigmoid, where one expert's score does not lower another's.
Where softmax has collapsed onto k experts, the bias must first grow to 1 / k, and then it moves all tokens at once.
"""

from contextlib import suppress
from statistics import mean

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lessons import router_health
from lessons.each import each
from nblib import parallel, runtime, text, train
from nblib.methods import moe, param_groups

BIAS = "e_score_correction_bias"  # its name in transformers


def attach(model: nn.Module, optimizer: Optimizer, *, rate: float = 1e-3) -> list[nn.Module]:
    """Balance every router from now on, once per step of this optimizer; returns the routers."""
    if not 0 < rate < 1:
        raise ValueError(f"rate = {rate}: must be above 0 and below 1")
    routers = moe.routers(model)
    for name, router in routers.items():
        if hasattr(router, "load"):
            raise ValueError(f"{name} has a selection bias already: attach once")
        zeros = torch.zeros(router.num_experts, device=router.weight.device)
        if not hasattr(router, BIAS):
            router.divides = _divides(name, router)
            router.register_buffer(BIAS, zeros.clone())
        router.register_buffer("load", zeros, persistent=False)
        router.register_forward_hook(_count, prepend=True)
        if hasattr(router, "divides"):
            router.register_forward_hook(_choose, prepend=True)  # the first, so that all others see its choice
    optimizer.register_step_post_hook(lambda *_: [update(router, rate) for router in routers.values()])
    return list(routers.values())


@torch.no_grad()
def update(router: nn.Module, rate: float) -> None:
    load = parallel.added(router.load)
    getattr(router, BIAS).add_((load.mean() - load).sign(), alpha=rate)
    load.zero_()


def _scores(logits: Tensor, chosen: Tensor, divide: bool) -> Tensor:
    s = logits.float().softmax(dim=-1).gather(1, chosen)  # (N, k)
    return s / s.sum(dim=1, keepdim=True) if divide else s


def _choose(router: nn.Module, _, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, chosen = output  # (N, E), (N, k), (N, k)
    chosen = (logits.float().softmax(dim=-1) + getattr(router, BIAS)).topk(chosen.shape[1], dim=-1).indices
    return logits, _scores(logits, chosen, router.divides).to(weights.dtype), chosen


@torch.no_grad()
def _count(router: nn.Module, _, output: tuple[Tensor, Tensor, Tensor]) -> None:
    if router.training:  # checkpointing counts twice, and a common factor changes no sign
        chosen = output[2].flatten()
        router.load.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=router.load.dtype))


@torch.no_grad()
def _divides(name: str, router: nn.Module) -> bool:
    """Whether this softmax router divides its k weights by their sum; a sentence where it does something else."""
    x = torch.randn(16, router.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(router.weight)
    with suppress(TypeError):  # some are given more than x
        logits, weights, chosen = router(x)
        for divide in (True, False):
            expected = _scores(logits, chosen, divide)
            if expected.shape == weights.shape and torch.allclose(expected, weights.float(), rtol=0.02, atol=0):
                return divide
    raise ValueError(f"{name} is a {type(router).__name__}: its weights are not its softmax over the chosen experts")


def mixture(
    vocabulary: int, *, hidden: int, layers: int, heads: int, width: int, experts: int, top_k: int, seed: int = 0
) -> nn.Module:
    """A new DeepSeek-V3 without groups of experts: sigmoid scores, and one expert that all tokens share."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    head = hidden // heads
    attention = dict(q_lora_rank=None, kv_lora_rank=hidden // 4, v_head_dim=head, tie_word_embeddings=True)
    attention |= dict(qk_rope_head_dim=head // 2, qk_nope_head_dim=head // 2)
    choice = dict(n_routed_experts=experts, num_experts_per_tok=top_k, n_group=1, topk_group=1, n_shared_experts=1)
    choice |= dict(first_k_dense_replace=0, moe_intermediate_size=width, routed_scaling_factor=1.0)
    sizes = dict(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers)
    sizes |= dict(num_attention_heads=heads, num_key_value_heads=heads)
    with runtime.seeded(seed):
        return AutoModelForCausalLM.from_config(DeepseekV3Config(**sizes, **attention, **choice)).train()


WAYS = ("neither", "balance loss", "selection bias")


def compared(
    stream: Tensor,
    held_out: Tensor,
    *,
    machine: runtime.Machine,
    steps: int,
    rate: float,
    weight: float,
    lr: float = 0.02,
    adamw_lr: float = 3e-3,
    rows: int = 4,
    length: int = 64,
    seeds: int = 3,
    **shape,
) -> list[dict]:
    """The same mixture balanced in each of the ways, a line for each at each seed. Loads are in fair shares."""
    table = []
    runs = [(way, seed) for way in WAYS for seed in range(seeds)]
    for way, seed in each(runs, "trainings", name=lambda run: f"{run[0]}, seed {run[1]}"):
        net = mixture(seed=seed, **shape).to(machine.device)
        optimizers = param_groups.optimizers(net, lr=lr, adamw_lr=adamw_lr)
        if way == "selection bias":
            attach(net, optimizers[0], rate=rate)
        terms = moe.loss(balance_weight=weight if way == "balance loss" else 0.0, z_weight=0.0)
        batches = text.Batches(stream, rows=rows, length=length, seed=seed)
        options = dict(schedule=train.cosine(steps, warmup=steps // 10), loss=terms, clip=0, machine=machine)
        train.fit(net, batches, optimizers, total=steps, **options)
        health = router_health.diagnose(net, held_out)
        line = {"balanced by": way, "seed": seed, "loss": train.evaluate(net, held_out, machine=machine)["loss"]}
        line |= {"smallest load": min(h.smallest for h in health), "largest load": max(h.largest for h in health)}
        table.append(line)
    return table


def by_way(table: list[dict], *ways: str, of: str = "loss") -> list[list[float]]:
    """A figure of each way, seed by seed."""
    return [[line[of] for line in table if line["balanced by"] == way] for way in ways]


def means(table: list[dict]) -> list[dict]:
    """A line for each way: the mean over its seeds."""
    figures = ("loss", "smallest load", "largest load")
    return [{"balanced by": way} | {f: mean(by_way(table, way, of=f)[0]) for f in figures} for way in WAYS]
