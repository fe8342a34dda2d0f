"""Twelve programs at the sizes at which their authors publish them: what watching costs where steps are of use.

    python -m tests.cost 3 published

The forty programs (forty.py) are toys whose step is a millisecond, so that each can be run hundreds of times, and
there whatever looks on costs several steps. Here the batch, the widths and the pictures are those of the example, with
random numbers for data. Two are smaller than published, as one step would take seconds on two cores: dcgan has 16
pictures in place of 64, and imagenet has 8 of 112 pixels in place of 256 of 224.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 12


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor], clip: float = 0.0) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def mnist() -> None:
    """pytorch/examples, batches of 64."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1),
    )  # fmt: skip
    x, y = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    loop(model, torch.optim.Adadelta(model.parameters(), lr=1.0), lambda: F.nll_loss(model(x), y))


def vae() -> None:
    """pytorch/examples, batches of 128."""
    net = nn.ModuleDict(dict(fc1=nn.Linear(784, 400), mu=nn.Linear(400, 20), logvar=nn.Linear(400, 20)))
    net["fc3"], net["fc4"] = nn.Linear(20, 400), nn.Linear(400, 784)
    x = torch.rand(128, 784)

    def loss_of() -> Tensor:
        h = F.relu(net["fc1"](x))
        mu, logvar = net["mu"](h), net["logvar"](h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        seen = torch.sigmoid(net["fc4"](F.relu(net["fc3"](z))))
        rebuilt = F.binary_cross_entropy(seen, x, reduction="sum")
        return rebuilt - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

    loop(net, torch.optim.Adam(net.parameters(), lr=1e-3), loss_of)


def word_language_model() -> None:
    """pytorch/examples: two LSTM layers of 200, 35 words of 20 texts, WikiText-2's 33,278 words."""
    words = 33278
    net = nn.ModuleDict(dict(encoder=nn.Embedding(words, 200), rnn=nn.LSTM(200, 200, 2), decoder=nn.Linear(200, words)))
    data, target = torch.randint(words, (35, 20)), torch.randint(words, (700,))
    hidden = [None]

    def loss_of() -> Tensor:
        output, state = net["rnn"](F.dropout(net["encoder"](data), 0.2, net.training), hidden[0])
        hidden[0] = tuple(h.detach() for h in state)
        return F.nll_loss(F.log_softmax(net["decoder"](output).view(-1, words), 1), target)

    loop(net, torch.optim.SGD(net.parameters(), lr=1.0), loss_of, clip=0.25)


def dcgan() -> None:
    """pytorch/examples: discriminator and generator of 64 filters, pictures of 64 pixels."""

    def up(a: int, b: int, *how: int) -> list[nn.Module]:
        return [nn.ConvTranspose2d(a, b, 4, *how, bias=False), nn.BatchNorm2d(b), nn.ReLU(True)]

    def down(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2, inplace=True)]

    last = [nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh()]
    g = nn.Sequential(*up(100, 512, 1, 0), *up(512, 256, 2, 1), *up(256, 128, 2, 1), *up(128, 64, 2, 1), *last)
    first = [nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    end = [nn.Conv2d(512, 1, 4, 1, 0, bias=False), nn.Sigmoid()]
    d = nn.Sequential(*first, *down(64, 128), *down(128, 256), *down(256, 512), *end)
    of_d, of_g = (torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (d, g))
    real, criterion = torch.rand(16, 3, 64, 64) * 2 - 1, nn.BCELoss()
    for _ in range(STEPS):
        d.zero_grad()
        criterion(d(real).view(-1), torch.ones(16)).backward()
        fake = g(torch.randn(16, 100, 1, 1))
        criterion(d(fake.detach()).view(-1), torch.zeros(16)).backward()
        of_d.step()
        g.zero_grad()
        criterion(d(fake).view(-1), torch.ones(16)).backward()
        of_g.step()


class Residual(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        past = [nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)]
        self.past = nn.Sequential(*past) if before != after or stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.past(x))


def resnet(first: nn.Module, widths: tuple[int, ...], deep: int, classes: int) -> nn.Module:
    blocks, before = [], widths[0]
    for n, width in enumerate(widths):
        for k in range(deep):
            blocks.append(Residual(before, width, 2 if n and not k else 1))
            before = width
    return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def imagenet() -> None:
    """pytorch/examples with resnet18."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    model = resnet(nn.Sequential(*stem), (64, 128, 256, 512), 2, 1000)
    x, y = torch.randn(8, 3, 112, 112), torch.randint(1000, (8,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    loop(model, optimizer, lambda: F.cross_entropy(model(x), y))


def cifar() -> None:
    """The ResNet-20 of He et al. for CIFAR-10, batches of 128."""
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = resnet(nn.Sequential(*stem), (16, 32, 64), 3, 10)
    x, y = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    loop(model, optimizer, lambda: F.cross_entropy(model(x), y))


class Block(nn.Module):
    """Attention and a network of two layers, each with a way past it."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        x = x + self.c_proj(y)
        return x + self.mlp(self.ln_2(x))


def nano_gpt() -> None:
    """nanoGPT's run on a CPU: four layers of 128, 64 characters of 12 texts."""
    parts = dict(
        wte=nn.Embedding(65, 128), wpe=nn.Embedding(64, 128), ln_f=nn.LayerNorm(128), lm_head=nn.Linear(128, 65)
    )
    net = nn.ModuleDict(parts | {"h": nn.Sequential(*(Block(128, 4, True) for _ in range(4)))})
    x, y = torch.randint(65, (12, 64)), torch.randint(65, (12, 64))

    def loss_of() -> Tensor:
        hidden = net["h"](net["wte"](x) + net["wpe"](torch.arange(64)))
        return F.cross_entropy(net["lm_head"](net["ln_f"](hidden)).view(-1, 65), y.view(-1))

    loop(net, torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.99)), loss_of, clip=1.0)


def vision_transformer() -> None:
    """A small ViT for CIFAR: patches of 4, six layers of 192, batches of 32."""
    parts = dict(patches=nn.Conv2d(3, 192, 4, 4), norm=nn.LayerNorm(192), head=nn.Linear(192, 10))
    net = nn.ModuleDict(parts | {"blocks": nn.Sequential(*(Block(192, 3, False) for _ in range(6)))})
    x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))

    def loss_of() -> Tensor:
        return F.cross_entropy(net["head"](net["norm"](net["blocks"](net["patches"](x).flatten(2).mT)).mean(1)), y)

    loop(net, torch.optim.AdamW(net.parameters(), lr=3e-4), loss_of)


def gcn() -> None:
    """Kipf and Welling on Cora: 2,708 papers, 1,433 words, 10,556 edges, 16 hidden."""
    edges = torch.randint(2708, (2, 10556))
    adjacency = torch.sparse_coo_tensor(edges, torch.full((10556,), 0.2), (2708, 2708)).coalesce()
    x, y, mask = (torch.rand(2708, 1433) < 0.01).float(), torch.randint(7, (2708,)), torch.arange(2708) < 140
    net = nn.ModuleDict(dict(one=nn.Linear(1433, 16), two=nn.Linear(16, 7)))

    def loss_of() -> Tensor:
        hidden = F.dropout(F.relu(adjacency @ net["one"](x)), 0.5, net.training)
        return F.nll_loss(F.log_softmax(adjacency @ net["two"](hidden), 1)[mask], y[mask])

    loop(net, torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4), loss_of)


def diffusion() -> None:
    """DDPM with a small convolutional network on pictures of MNIST, batches of 128."""

    def conv(a: int, b: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, stride, 1), nn.GroupNorm(8, b), nn.SiLU()]

    parts = dict(start=nn.Sequential(*conv(1, 32)), down=nn.Sequential(*conv(32, 64, 2), *conv(64, 64)))
    parts |= dict(time=nn.Linear(64, 64), up=nn.ConvTranspose2d(64, 32, 2, 2), end=nn.Conv2d(64, 1, 3, 1, 1))
    net, kept = nn.ModuleDict(parts), torch.linspace(0.9999, 0.98, 1000).cumprod(0)
    x0, waves = torch.rand(128, 1, 28, 28) * 2 - 1, torch.exp(-torch.arange(32) / 4)

    def loss_of() -> Tensor:
        t, noise = torch.randint(1000, (128,)), torch.randn_like(x0)
        a = kept[t].view(-1, 1, 1, 1)
        start = net["start"](a.sqrt() * x0 + (1 - a).sqrt() * noise)
        angles = t[:, None] * waves
        middle = net["down"](start) + net["time"](torch.cat([angles.sin(), angles.cos()], 1))[..., None, None]
        return F.mse_loss(net["end"](torch.cat([start, net["up"](middle)], 1)), noise)

    loop(net, torch.optim.Adam(net.parameters(), lr=2e-4), loss_of)


def ppo() -> None:
    """cleanrl's PPO for CartPole, one minibatch of 128: a step of a millisecond or two, as there."""

    def network(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    net = nn.ModuleDict(dict(critic=network(1), actor=network(2)))
    obs, actions = torch.randn(128, 4), torch.randint(2, (128,))
    old, advantages, returns = torch.full((128,), -0.69), torch.randn(128), torch.randn(128)

    def loss_of() -> Tensor:
        policy = torch.distributions.Categorical(logits=net["actor"](obs))
        ratio = (policy.log_prob(actions) - old).exp()
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        pg_loss = torch.max(-scaled * ratio, -scaled * ratio.clamp(0.8, 1.2)).mean()
        v_loss = 0.5 * ((net["critic"](obs).view(-1) - returns) ** 2).mean()
        return pg_loss - 0.01 * policy.entropy().mean() + 0.5 * v_loss

    loop(net, torch.optim.Adam(net.parameters(), lr=2.5e-4, eps=1e-5), loss_of, clip=0.5)


def super_resolution() -> None:
    """pytorch/examples: a factor of 3, batches of 4, pictures of 85 pixels."""
    convs = [nn.Conv2d(1, 64, 5, 1, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(), nn.Conv2d(64, 32, 3, 1, 1)]
    model = nn.Sequential(*convs, nn.ReLU(), nn.Conv2d(32, 9, 3, 1, 1), nn.PixelShuffle(3))
    x, y = torch.rand(4, 1, 85, 85), torch.rand(4, 1, 255, 255)
    loop(model, torch.optim.Adam(model.parameters(), lr=1e-3), lambda: F.mse_loss(model(x), y))


PROGRAMS = {
    f"published: {program.__name__}": program
    for program in (
        mnist, vae, word_language_model, dcgan, imagenet, cifar, nano_gpt, vision_transformer, gcn, diffusion, ppo,
        super_resolution,
    )
}  # fmt: skip
