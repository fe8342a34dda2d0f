"""A diffusion language model without a causal mask fills masked tokens, its labels are the tokens
of the same places, and each loss is divided by the share that was masked.

After: ML-GSAI/LLaDA
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(8)
vocab_size, mask_id, dim, seq_len, batch_size = 16, 16, 32, 11, 20


def forward_process(input_ids, eps=1e-3):
    b, n = input_ids.shape
    t = torch.rand(b)
    p_mask = ((1 - eps) * t + eps)[:, None].repeat(1, n)
    masked_indices = torch.rand((b, n)) < p_mask
    noisy = torch.where(masked_indices, mask_id, input_ids)
    return noisy, masked_indices, p_mask


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size + 1, dim), nn.Embedding(seq_len, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, ids):
        return self.head(self.blocks(self.wte(ids) + self.wpe.weight))


def main():
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    num_steps = 20
    for step in range(num_steps):
        start = torch.randint(vocab_size, (batch_size, 1))
        input_ids = (start + torch.arange(seq_len) * torch.tensor([1, 3])[start % 2]) % vocab_size
        noisy, masked_indices, p_mask = forward_process(input_ids)
        logits = model(noisy)
        target = input_ids[masked_indices]
        token_loss = F.cross_entropy(logits[masked_indices], target, reduction="none")
        loss = (token_loss / p_mask[masked_indices]).sum() / input_ids.numel()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(step, loss.item(), token_loss.mean().item())


if __name__ == "__main__":
    main()
