"""A VQ-VAE: the nearest code replaces each place, and the slope passes the choice; two terms
of equal value pull codes and encoder towards each other.

After: zalandoresearch/pytorch-vq-vae
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

torch.manual_seed(0)


class VectorQuantizer(nn.Module):
    def __init__(self, num_embeddings, embedding_dim, commitment_cost):
        super().__init__()
        self.commitment_cost = commitment_cost
        self.embedding = nn.Embedding(num_embeddings, embedding_dim)
        self.embedding.weight.data.uniform_(-1 / num_embeddings, 1 / num_embeddings)

    def forward(self, inputs):
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        flat = inputs.view(-1, inputs.shape[-1])
        weight = self.embedding.weight
        distances = (flat**2).sum(1, keepdim=True) + (weight**2).sum(1) - 2 * flat @ weight.t()
        indices = torch.argmin(distances, dim=1)
        quantized = self.embedding(indices).view(inputs.shape)
        e_latent_loss = F.mse_loss(quantized.detach(), inputs)
        q_latent_loss = F.mse_loss(quantized, inputs.detach())
        loss = q_latent_loss + self.commitment_cost * e_latent_loss
        quantized = inputs + (quantized - inputs).detach()
        avg_probs = F.one_hot(indices, len(weight)).float().mean(dim=0)
        perplexity = torch.exp(-torch.sum(avg_probs * torch.log(avg_probs + 1e-10)))
        return loss, quantized.permute(0, 3, 1, 2), perplexity


encoder = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 6, 1)
)
vq_vae = VectorQuantizer(num_embeddings=12, embedding_dim=6, commitment_cost=0.25)
decoder = nn.Sequential(
    nn.Conv2d(6, 16, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)
)  # fmt: skip
model = nn.ModuleList([encoder, vq_vae, decoder])
optimizer = optim.Adam(model.parameters(), lr=3e-3, amsgrad=False)
axis = torch.linspace(0, 1, 10)
for i in range(20):
    fx, fy, shift = torch.rand(3, 22, 1, 1) * 4 + 2
    data = torch.sin(fx * axis.view(10, 1) + fy * axis + shift).unsqueeze(1)
    optimizer.zero_grad()
    vq_loss, quantized, perplexity = vq_vae(encoder(data))
    recon_error = F.mse_loss(decoder(quantized), data)
    (recon_error + vq_loss).backward()
    optimizer.step()
    print(f"{i} recon_error {recon_error.item():.4f} perplexity {perplexity.item():.2f}")
