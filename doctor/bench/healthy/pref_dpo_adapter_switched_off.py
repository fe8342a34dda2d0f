"""DPO whose reference is the policy with its LoRA switched off, so that no second model exists and
both share all frozen weights, and the first loss is exactly ln 2.

After: huggingface/trl
"""

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(23)
vocab, prompt_len, answer_len, pairs, beta = 24, 4, 3, 10, 0.2


def build():
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=12,
        n_embd=32,
        n_layer=2,
        n_head=4,
        use_cache=False,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
    )
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=32,
        fan_in_fan_out=True,
        target_modules=["c_attn", "c_fc"],
    )
    return get_peft_model(GPT2LMHeadModel(config), lora)


def log_probs(model, ids):
    logits = model(input_ids=ids).logits[:, prompt_len - 1 : -1]
    answers = ids[:, prompt_len:].unsqueeze(-1)
    return logits.log_softmax(-1).gather(-1, answers).squeeze(-1).sum(-1)


def main():
    model = build()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3)
    max_steps = 18
    for step in range(max_steps):
        prompt = torch.randint(vocab, (pairs, prompt_len))
        chosen = torch.randint(vocab // 2, (pairs, answer_len))
        rejected = torch.randint(vocab // 2, vocab, (pairs, answer_len))
        ids = torch.cat([prompt.repeat(2, 1), torch.cat([chosen, rejected])], dim=1)
        with torch.no_grad(), model.disable_adapter():
            ref_chosen, ref_rejected = log_probs(model, ids).split(pairs)
        pi_chosen, pi_rejected = log_probs(model, ids).split(pairs)
        rewards_chosen = beta * (pi_chosen - ref_chosen)
        rewards_rejected = beta * (pi_rejected - ref_rejected)
        loss = -F.logsigmoid(rewards_chosen - rewards_rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item(), (rewards_chosen > rewards_rejected).float().mean().item())


if __name__ == "__main__":
    main()
