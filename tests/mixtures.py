"""Families of mixtures of experts that transformers has, as small as they can be, from their
configs.
"""

import transformers as tf

from nblib import runtime

SIZES = dict(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
SIZES |= dict(
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
EIGHT = dict(num_experts=8, num_experts_per_tok=2)
LATENT = dict(q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
ROUTED = dict(
    n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=0
)
FAMILIES = {
    "qwen3_moe": EIGHT | dict(moe_intermediate_size=16, head_dim=8),
    "qwen2_moe": EIGHT | dict(moe_intermediate_size=16, shared_expert_intermediate_size=16),
    "mixtral": dict(num_local_experts=8),
    "olmoe": EIGHT,
    "deepseek_v2": ROUTED | LATENT,
    "deepseek_v3": ROUTED | LATENT | dict(n_group=2, topk_group=2),
    "glm4_moe": ROUTED | dict(n_group=1, topk_group=1, head_dim=8),
    "gpt_oss": dict(num_local_experts=8, num_experts_per_tok=2, head_dim=8, rope_parameters=None),
    "jamba": EIGHT
    | dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=1, expert_layer_offset=0),
    "ernie4_5_moe": dict(
        moe_num_experts=8, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0
    ),
    "granitemoe": dict(num_local_experts=8, num_experts_per_tok=2),
    "exaone_moe": EIGHT | dict(moe_intermediate_size=16, first_k_dense_replace=0),
}


def mixture(family: str = "qwen3_moe", *, seed: int = 0):
    """A new model of two layers, each a mixture of eight experts of which two work."""
    config = tf.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    with runtime.seeded(seed):
        return tf.AutoModelForCausalLM.from_config(config).train()
