"""The picture itself is optimised: the network is frozen, loss modules inside it note their losses
while data runs through, and LBFGS asks its closure several times for one step.

After: gordicaleksa/pytorch-neural-style-transfer
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ContentLoss(nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = target.detach()

    def forward(self, input):
        self.loss = F.mse_loss(input, self.target)
        return input


def gram_matrix(input):
    features = input.view(input.size(1), -1)
    return torch.mm(features, features.t()).div(features.numel())


class StyleLoss(nn.Module):
    def __init__(self, target_feature):
        super().__init__()
        self.target = gram_matrix(target_feature).detach()

    def forward(self, input):
        self.loss = F.mse_loss(gram_matrix(input), self.target)
        return input


torch.manual_seed(0)
axis = torch.linspace(0, 6.3, 14)
content_img = (0.5 + 0.4 * torch.sin(axis.view(14, 1) + torch.zeros(14))).expand(1, 3, 14, 14)
style_img = (0.5 + 0.4 * torch.sin(4 * axis + 4 * axis.view(14, 1))).expand(1, 3, 14, 14)
first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
second = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU())
content = ContentLoss(second(first(content_img)))
styles = [StyleLoss(first(style_img)), StyleLoss(second(first(style_img)))]
model = nn.Sequential(first, styles[0], second, content, styles[1]).eval().requires_grad_(False)
input_img = content_img.clone().requires_grad_(True)
optimizer = torch.optim.LBFGS([input_img], max_iter=5, line_search_fn="strong_wolfe")

for run in range(15):

    def closure():
        optimizer.zero_grad()
        model(input_img)
        loss = 1e4 * sum(s.loss for s in styles) + content.loss
        loss.backward()
        return loss

    print(run, optimizer.step(closure).item())
print(input_img.detach().clamp(0, 1).mean())
