"""A small GPT-2 gets LoRA in all its layers while its tied embedding is trained in full, prompts
and padding have labels of -100, and the pad token is the one that ends a text.

After: huggingface/peft
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

torch.manual_seed(42)
vocab, eos, batch_size = 40, 39, 8
config = GPT2Config(
    vocab_size=vocab,
    n_positions=24,
    n_embd=32,
    n_layer=2,
    n_head=4,
    eos_token_id=eos,
    bos_token_id=eos,
    attn_pdrop=0.0,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
)


def collate():
    rows = []
    for size in torch.randint(3, 7, (batch_size,)).tolist():
        prompt = torch.randint(1, 18, (size,))
        rows.append((prompt, torch.cat([prompt + 18, torch.tensor([eos])])))
    longest = max(len(p) + len(a) for p, a in rows)
    input_ids = torch.full((batch_size, longest), eos)
    labels = torch.full((batch_size, longest), -100)
    attention_mask = torch.zeros(batch_size, longest, dtype=torch.long)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[i, :end] = torch.cat([prompt, answer])
        labels[i, len(prompt) : end] = answer
        attention_mask[i, :end] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def main():
    model = GPT2LMHeadModel(config)
    peft_config = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        fan_in_fan_out=True,
        target_modules=["c_attn", "c_proj", "c_fc"],
    )
    model = get_peft_model(model, peft_config)
    model.base_model.model.transformer.wte.weight.requires_grad = True
    model.print_trainable_parameters()
    num_steps = 18
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 2, num_steps)
    model.train()
    for step in range(num_steps):
        loss = model(**collate()).loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        print(step, loss.item())


if __name__ == "__main__":
    main()
