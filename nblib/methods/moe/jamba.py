"""A small Jamba: state-space layers, attention every few, experts every second (Lieber et al.,
2024); routed Mamba.

Without its CUDA kernels transformers runs Mamba as a loop over positions in Python: correct,
trainable on a CPU, and slow in proportion to the length. So the builder is for short rows;
`mamba-ssm` and `causal-conv1d` are used where they are installed.

Routed Mamba makes experts of whole Mamba mixers. A router chooses k of E per token. Every expert
that some token chose runs over the whole row, because its state must see all that came before. The
outputs are weighted per token. So it costs up to E mixers, not k: it buys capacity, not speed. With
k = E it is the dense mixture.

Footgun: a state-space layer has 2-D and 3-D parameters that are no maps (A_log, the convolution's
taps). A split by `ndim` hands them to Muon.
"""

import logging

import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.jamba.modeling_jamba import JambaMambaMixer

from nblib import runtime, wiring

# transformers writes to stderr, once per function, what the docstring above says.
logging.getLogger("transformers.integrations.hub_kernels").addFilter(
    lambda record: "falling back to its reference" not in record.getMessage()
)


def jamba(
    vocab_size: int,
    *,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    experts: int = 4,
    top_k: int = 2,
    attention_every: int = 4,
    length: int = 1024,
    seed: int = 0,
    **config,
) -> nn.Module:
    """Return a Jamba with random weights: one attention layer in `attention_every`, experts in
    every second layer.
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k = {top_k}: must be at least 1 and at most experts = {experts}")
    shape = dict(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        intermediate_size=2 * hidden,
        max_position_embeddings=length,
        num_experts=experts,
        num_experts_per_tok=top_k,
        attn_layer_period=attention_every,
        attn_layer_offset=attention_every // 2,
        expert_layer_period=2,
        expert_layer_offset=1,
    )
    tokens = dict(vocab_size=vocab_size, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    config = tf.JambaConfig(
        **(shape | tokens | dict(use_cache=False, tie_word_embeddings=True) | config)
    )
    with runtime.seeded(seed):
        return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


class MambaRouter(nn.Module):
    """The k best of E mixers per token: (logits (N, E), weights (N, k) summing to 1, indices (N,
    k)).
    """

    def __init__(self, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.num_experts, self.top_k = experts, top_k
        self.weight = nn.Parameter(torch.empty(experts, hidden).normal_(std=0.02))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.flatten(0, -2), self.weight)
        weights, chosen = logits.float().softmax(dim=1).topk(self.top_k, dim=1)
        return logits, (weights / weights.sum(dim=1, keepdim=True)).to(x.dtype), chosen


class RoutedMamba(nn.Module):
    """In the place of a mixer: E of them, weighted per token."""

    def __init__(self, mixers: list[nn.Module], top_k: int):
        super().__init__()
        self.mixers = nn.ModuleList(mixers)
        self.router = MambaRouter(mixers[0].hidden_size, len(mixers), top_k)

    def forward(
        self, hidden_states: Tensor, cache_params=None, attention_mask: Tensor | None = None
    ) -> Tensor:
        if cache_params is not None:
            raise ValueError(
                "use_cache: routed Mamba keeps no state between calls; generate with "
                "use_cache=False"
            )
        _, weights, chosen = self.router(hidden_states)
        shares = torch.zeros(
            len(weights), len(self.mixers), dtype=weights.dtype, device=weights.device
        )
        shares = shares.scatter(1, chosen, weights).view(*hidden_states.shape[:-1], -1)  # (B, T, E)
        total = torch.zeros_like(hidden_states)
        for e, mixer in enumerate(self.mixers):
            if (chosen == e).any():
                y = mixer(
                    hidden_states=hidden_states, cache_params=None, attention_mask=attention_mask
                )
                total = total + shares[..., e, None] * y
        return total


def route_mamba(model: nn.Module, *, experts: int = 4, top_k: int = 1, seed: int = 0) -> list[str]:
    """Put a routed mixer in the place of every Mamba mixer: the one that was there, and new ones
    beside it.
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k = {top_k}: must be at least 1 and at most experts = {experts}")
    mixers = {name: m for name, m in model.named_modules() if isinstance(m, JambaMambaMixer)}
    if not mixers:
        raise ValueError(f"{type(model).__name__} has no Mamba mixer to route between")

    def replace(name: str, mixer: nn.Module) -> RoutedMamba:
        fresh = [type(mixer)(mixer.config, mixer.layer_idx) for _ in range(experts - 1)]
        for m in fresh:
            m.apply(model._init_weights)
        return RoutedMamba([mixer, *fresh], top_k).to(mixer.out_proj.weight)

    with runtime.seeded(seed):
        return wiring.swap(model, replace, mixers)
