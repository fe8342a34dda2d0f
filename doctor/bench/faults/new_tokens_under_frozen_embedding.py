"""New tokens are added and only low-rank adapters are trained, so their embeddings stay as resized.

Threads: https://github.com/szqwu/Motion-Agent/issues/6
    https://github.com/feizc/Visual-LLaMA/issues/2
Names: S14
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

OLD_VOCAB, NEW_TOKENS = 53, 4


def build():
    config = LlamaConfig(
        vocab_size=OLD_VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=40,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.resize_token_embeddings(OLD_VOCAB + NEW_TOKENS)
    new_ids = list(range(OLD_VOCAB, OLD_VOCAB + NEW_TOKENS))
    lora = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "down_proj"],
        # broken
        # mended
        # trainable_token_indices=new_ids,
        # end
    )
    return get_peft_model(model, lora), new_ids


def batch(new_ids, rows=7, length=18):
    rule = torch.randint(len(new_ids), (rows, 1))
    start = torch.randint(OLD_VOCAB, (rows, 1))
    text = (start + (rule + 1) * torch.arange(length)) % OLD_VOCAB
    return torch.cat([torch.tensor(new_ids)[rule], text], dim=1)


def main():
    torch.manual_seed(12)
    model, new_ids = build()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for step in range(16):
        ids = batch(new_ids)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, round(loss.item(), 4))


if __name__ == "__main__":
    main()
