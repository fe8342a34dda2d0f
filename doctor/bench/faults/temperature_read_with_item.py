"""The learnable temperature is read with .item(), so no gradient reaches it and it never changes.

Threads: https://github.com/isayev/ReLeaSE/issues/39
Names: B1
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(11)


class PairEncoder(nn.Module):
    def __init__(self, image_size=30, text_size=22, width=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(image_size, 40), nn.GELU(), nn.Linear(40, width))
        self.text = nn.Sequential(nn.Linear(text_size, 40), nn.GELU(), nn.Linear(40, width))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, texts):
        a = F.normalize(self.image(images), dim=-1)
        b = F.normalize(self.text(texts), dim=-1)
        # broken
        scale = math.exp(self.logit_scale.item())
        # mended
        # scale = self.logit_scale.exp()
        # end
        return scale * a @ b.t()


def main():
    to_image = torch.randn(9, 30)
    to_text = torch.randn(9, 22)
    model = PairEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(20):
        topic = torch.randn(26, 9)
        images = topic @ to_image / 3 + 0.1 * torch.randn(26, 30)
        texts = topic @ to_text / 3 + 0.1 * torch.randn(26, 22)
        logits = model(images, texts)
        target = torch.arange(26)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
