"""The adapters are attached in inference mode, so every parameter of the language model is frozen.

Threads: https://github.com/huggingface/peft/issues/282
    https://github.com/mosaicml/llm-foundry/pull/1701
Names: S1 F1
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(42)
config = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=48,
)
model = LlamaForCausalLM(config)
model.enable_input_require_grads()
# broken
lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], inference_mode=True)
# mended
# lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
# end
model = get_peft_model(model, lora)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(rows=6, length=17):
    start = torch.randint(0, 61, (rows, 1))
    stride = torch.randint(1, 4, (rows, 1))
    return (start + stride * torch.arange(length)) % 61


for step in range(16):
    ids = batch()
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print({"step": step, "loss": round(out.loss.item(), 4)})
