"""A mixture balanced by a loss, by a selection bias, or not at all: the same training three times,
at several seeds.

Footgun: with few tokens the three cannot be told apart. Look at the spread over the seeds before
the means.
"""

from statistics import mean

from torch import Tensor, nn

from lessons.progress import each
from nblib import runtime, text, train
from nblib.methods.moe import router_health, router_losses, selection_bias
from nblib.methods.muon import groups


def mixture(
    vocabulary: int,
    *,
    hidden: int,
    layers: int,
    heads: int,
    width: int,
    experts: int,
    top_k: int,
    seed: int = 0,
) -> nn.Module:
    """Return a new DeepSeek-V3 without groups of experts: sigmoid scores, and one expert that all
    tokens share.
    """
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    head = hidden // heads
    attention = dict(
        q_lora_rank=None, kv_lora_rank=hidden // 4, v_head_dim=head, tie_word_embeddings=True
    )
    attention |= dict(qk_rope_head_dim=head // 2, qk_nope_head_dim=head // 2)
    choice = dict(
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
    )
    choice |= dict(first_k_dense_replace=0, moe_intermediate_size=width, routed_scaling_factor=1.0)
    sizes = dict(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers
    )
    sizes |= dict(num_attention_heads=heads, num_key_value_heads=heads)
    with runtime.seeded(seed):
        return AutoModelForCausalLM.from_config(
            DeepseekV3Config(**sizes, **attention, **choice)
        ).train()


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
    """Return the same mixture balanced in each of the ways, a line for each at each seed.

    Loads are in fair shares.
    """
    table = []
    runs = [(way, seed) for way in WAYS for seed in range(seeds)]
    for way, seed in each(runs, "trainings", name=lambda run: f"{run[0]}, seed {run[1]}"):
        net = mixture(seed=seed, **shape).to(machine.device)
        optimizers = groups.optimizers(net, lr=lr, adamw_lr=adamw_lr)
        if way == "selection bias":
            selection_bias.attach(net, optimizers[0], rate=rate)
        terms = router_losses.loss(
            balance_weight=weight if way == "balance loss" else 0.0, z_weight=0.0
        )
        batches = text.Batches(stream, rows=rows, length=length, seed=seed)
        options = dict(
            schedule=train.cosine(steps, warmup=steps // 10), loss=terms, clip=0, machine=machine
        )
        train.fit(net, batches, optimizers, total=steps, **options)
        health = router_health.diagnose(net, held_out)
        line = {
            "balanced by": way,
            "seed": seed,
            "loss": train.evaluate(net, held_out, machine=machine)["loss"],
        }
        line |= {
            "smallest load": min(h.smallest for h in health),
            "largest load": max(h.largest for h in health),
        }
        table.append(line)
    return table


def by_way(table: list[dict], *ways: str, of: str = "loss") -> list[list[float]]:
    """Return a figure of each way, seed by seed."""
    return [[line[of] for line in table if line["balanced by"] == way] for way in ways]


def means(table: list[dict]) -> list[dict]:
    """Return a line for each way: the mean over its seeds."""
    figures = ("loss", "smallest load", "largest load")
    return [
        {"balanced by": way} | {f: mean(by_way(table, way, of=f)[0]) for f in figures}
        for way in WAYS
    ]
