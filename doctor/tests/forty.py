"""Forty programs as people write them, after well-known repositories, each small enough for a part of a second.

`@program("style")` puts a function into PROGRAMS. It builds its networks, calls `keep(...)` with them, and trains for a
few steps; it knows nothing of a watch. test_forty.py runs each plain and watched and compares hashes after every step.

Footgun: faithful means with the habits: loops by hand, `.data`, evaluation in between, an EMA by deepcopy, closures,
several optimizers. Do not tidy them.
"""

import copy
import math
import random
from collections import deque

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.bench import batches, lm

PROGRAMS = {}
KEPT: list[nn.Module | Tensor] = []  # what the program under way has made


def keep(*things):
    """Networks and tensors whose hashes are compared; returns the first."""
    KEPT.extend(things)
    return things[0]


def program(style: str):
    def put(function):
        PROGRAMS[f"{style}: {function.__name__}"] = function
        return function

    return put


def pictures(count: int = 48, size: int = 8, classes: int = 4):
    x, y = torch.rand(count, 1, size, size), torch.randint(0, classes, (count,))
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


# ------------------------------------------------------------------------------------------------ pytorch/examples
@program("pytorch/examples")
def mnist():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 4)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
            x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
            return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)

    model, loader = keep(Net()), pictures()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        model.train()
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for data, target in loader:
                F.nll_loss(model(data), target, reduction="sum").item()
        scheduler.step()


@program("pytorch/examples")
def word_language_model():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(50, 16)
            self.rnn, self.decoder = nn.LSTM(16, 16, 2, dropout=0.2), nn.Linear(16, 50)
            self.decoder.weight = self.encoder.weight

        def forward(self, x, hidden):
            out, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
            return F.log_softmax(self.decoder(self.drop(out)).view(-1, 50), dim=1), hidden

    model, criterion, lr = keep(Net()), nn.NLLLoss(), 1.0
    hidden = torch.zeros(2, 4, 16), torch.zeros(2, 4, 16)
    text = torch.randint(0, 50, (64, 4))
    for i in range(0, 63, 9):
        data, targets = text[i : i + 9], text[i + 1 : i + 10].view(-1)
        if len(data) * 4 != len(targets):
            break
        model.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)


@program("pytorch/examples")
def imagenet():
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

        def forward(self, x):
            return F.relu(x + self.bn(self.conv(x)))

    model = keep(
        nn.Sequential(nn.Conv2d(1, 8, 3), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
    for _ in range(2):
        model.train()
        for images, target in pictures():
            output = model(images)
            loss = criterion(output, target)
            _, pred = output.topk(2, 1)
            pred.t().eq(target.view(1, -1)).float().sum().item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()


@program("pytorch/examples")
def dcgan():
    maker = nn.Sequential(
        nn.ConvTranspose2d(8, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    judge = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4), nn.Sigmoid()
    )
    keep(maker, judge)
    criterion = nn.BCELoss()
    for_judge, for_maker = (torch.optim.Adam(m.parameters(), 2e-4, betas=(0.5, 0.999)) for m in (judge, maker))
    for _ in range(6):
        judge.zero_grad()
        real = 2 * torch.rand(8, 1, 8, 8) - 1  # Normalize(0.5, 0.5)
        label = torch.full((8,), 1.0)
        criterion(judge(real).view(-1), label).backward()
        fake = maker(torch.randn(8, 8, 1, 1))
        label.fill_(0.0)
        criterion(judge(fake.detach()).view(-1), label).backward()
        for_judge.step()
        maker.zero_grad()
        label.fill_(1.0)
        criterion(judge(fake).view(-1), label).backward()
        for_maker.step()


@program("pytorch/examples")
def vae():
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
            self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 64)

        def forward(self, x):
            h = F.relu(self.fc1(x.view(-1, 64)))
            mu, logvar = self.fc21(h), self.fc22(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

    model = keep(VAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for data, _ in pictures():
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        bce = F.binary_cross_entropy(recon, data.view(-1, 64), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        (bce + kld).backward()
        optimizer.step()


@program("pytorch/examples")
def reinforce():
    policy = keep(nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.6), nn.ReLU(), nn.Linear(16, 2), nn.Softmax(dim=1)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(6):
        saved, rewards, state = [], [], torch.randn(4)
        for _ in range(10):
            m = Categorical(policy(state.unsqueeze(0)))
            action = m.sample()
            saved.append(m.log_prob(action))
            rewards.append(float(action.item() == (state[0] > 0)))
            state = torch.randn(4)
        returns, total = deque(), 0.0
        for r in rewards[::-1]:
            total = r + 0.99 * total
            returns.appendleft(total)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        optimizer.zero_grad()
        torch.cat([-log * r for log, r in zip(saved, returns)]).sum().backward()
        optimizer.step()


@program("pytorch/examples")
def actor_critic():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.affine, self.action, self.value = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)

        def forward(self, x):
            x = F.relu(self.affine(x))
            return F.softmax(self.action(x), dim=-1), self.value(x)

    model = keep(Policy())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(6):
        policy_losses, value_losses = [], []
        for _ in range(8):
            probs, value = model(torch.randn(4))
            m = Categorical(probs)
            action = m.sample()
            r = random.random() + action.item()
            policy_losses.append(-m.log_prob(action) * (r - value.item()))
            value_losses.append(F.smooth_l1_loss(value, torch.tensor([r])))
        optimizer.zero_grad()
        (torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()).backward()
        optimizer.step()


@program("pytorch/examples")
def siamese():
    body = keep(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8)))
    head = keep(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid()))
    optimizer = torch.optim.Adadelta([*body.parameters(), *head.parameters()], lr=1.0)
    criterion = nn.BCELoss()
    for x, y in pictures():
        other = torch.randperm(len(x))
        optimizer.zero_grad()
        out = head(torch.cat((body(x), body(x[other])), 1)).squeeze()
        criterion(out, (y == y[other]).float()).backward()
        optimizer.step()


@program("pytorch/examples")
def super_resolution():
    model = keep(nn.Sequential(nn.Conv2d(1, 8, 5, 1, 2), nn.ReLU(), nn.Conv2d(8, 4, 3, 1, 1), nn.PixelShuffle(2)))
    nn.init.orthogonal_(model[0].weight, nn.init.calculate_gain("relu"))
    optimizer, criterion = torch.optim.Adam(model.parameters(), lr=1e-2), nn.MSELoss()
    for target, _ in pictures():
        optimizer.zero_grad()
        loss = criterion(model(F.avg_pool2d(target, 2)), target)
        loss.backward()
        optimizer.step()


@program("pytorch/examples")
def regression_by_hand():
    weights = torch.randn(4, 1) * 5
    fc = keep(nn.Linear(4, 1))
    for _ in range(8):
        x = torch.randn(32, 1)
        x = torch.cat([x**i for i in range(1, 5)], 1)
        fc.zero_grad()
        output = F.smooth_l1_loss(fc(x), x.mm(weights))
        output.backward()
        for param in fc.parameters():
            param.data.add_(-0.1 * param.grad)


@program("pytorch/examples")
def gcn():
    class Layer(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.kernel = nn.Parameter(torch.empty(a, b))
            nn.init.xavier_normal_(self.kernel)

        def forward(self, x, adjacency):
            return torch.mm(adjacency, torch.mm(x, self.kernel))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gc1, self.gc2, self.dropout = Layer(6, 16), Layer(16, 3), nn.Dropout(0.5)

        def forward(self, x, adjacency):
            return F.log_softmax(self.gc2(self.dropout(F.relu(self.gc1(x, adjacency))), adjacency), dim=1)

    x, y, model = torch.randn(20, 6), torch.randint(0, 3, (20,)), keep(Net())
    links = (torch.rand(20, 20) < 0.2).float() + torch.eye(20)
    links = (links / links.sum(1, keepdim=True)).to_sparse()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    train, test = torch.arange(12), torch.arange(12, 20)
    for _ in range(6):
        model.train()
        optimizer.zero_grad()
        F.nll_loss(model(x, links)[train], y[train]).backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()
            model(x, links)[test].max(1)[1].eq(y[test]).double().mean()


@program("pytorch/examples")
def gat():
    class Layer(nn.Module):
        def __init__(self, a, b, heads):
            super().__init__()
            self.heads, self.W = heads, nn.Parameter(torch.empty(a, b * heads))
            self.a = nn.Parameter(torch.empty(heads, 2 * b, 1))
            nn.init.xavier_normal_(self.W)
            nn.init.xavier_normal_(self.a)

        def forward(self, h, links):
            h = torch.mm(h, self.W).view(len(h), self.heads, -1).permute(1, 0, 2)
            half = h.shape[-1]
            e = torch.matmul(h, self.a[:, :half]) + torch.matmul(h, self.a[:, half:]).mT
            mask = -9e15 * torch.ones_like(e)
            e = torch.where(links > 0, F.leaky_relu(e, 0.2), mask)
            return torch.matmul(F.dropout(F.softmax(e, dim=-1), 0.3, self.training), h).permute(1, 0, 2).flatten(1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Layer(6, 4, 2), Layer(8, 3, 1)

        def forward(self, x, links):
            return F.log_softmax(self.two(F.elu(self.one(x, links)), links), dim=1)

    x, y, model = torch.randn(20, 6), torch.randint(0, 3, (20,)), keep(Net())
    links = (torch.rand(20, 20) < 0.2).float() + torch.eye(20)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(6):
        optimizer.zero_grad()
        nn.NLLLoss()(model(x, links), y).backward()
        optimizer.step()


@program("pytorch/examples")
def time_sequence_prediction():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8), nn.Linear(8, 1)

        def forward(self, x):
            h, c, h2, c2 = (torch.zeros(x.size(0), 8, dtype=torch.double) for _ in range(4))
            outputs = []
            for part in x.split(1, dim=1):
                h, c = self.lstm1(part, (h, c))
                h2, c2 = self.lstm2(h, (h2, c2))
                outputs.append(self.linear(h2))
            return torch.cat(outputs, dim=1)

    data = torch.sin(torch.arange(13, dtype=torch.double) / 3 + torch.rand(6, 1, dtype=torch.double) * 6)
    seq, criterion = keep(Sequence().double()), nn.MSELoss()
    optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4)
    for _ in range(4):

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(data[:, :-1]), data[:, 1:])
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            criterion(seq(data[:, :-1]), data[:, 1:]).item()


@program("pytorch/examples")
def neural_style():
    """The picture itself is what is trained."""
    features = keep(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))).eval()
    features.requires_grad_(False)

    def gram(x):
        b, c, h, w = x.size()
        flat = x.view(b * c, h * w)
        return torch.mm(flat, flat.t()).div(b * c * h * w)

    target, picture = gram(features(torch.rand(1, 1, 8, 8))).detach(), torch.rand(1, 1, 8, 8).requires_grad_()
    keep(picture)
    optimizer = torch.optim.LBFGS([picture], max_iter=3)
    for _ in range(4):

        def closure():
            with torch.no_grad():
                picture.clamp_(0, 1)
            optimizer.zero_grad()
            loss = 1e3 * F.mse_loss(gram(features(picture)), target)
            loss.backward()
            return loss

        optimizer.step(closure)


@program("pytorch/examples")
def vision_transformer():
    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.cls = nn.Conv2d(1, 16, 4, 4), nn.Parameter(torch.rand(1, 1, 16))
            self.place = nn.Parameter(torch.rand(1, 5, 16))
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 4)

        def forward(self, x):
            x = self.patch(x).flatten(2).mT
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.place
            return self.head(self.encoder(x)[:, 0])

    model, criterion = keep(ViT()), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for img, label in pictures():
        optimizer.zero_grad()
        criterion(model(img), label).backward()
        optimizer.step()


@program("pytorch/examples")
def language_translation():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.src, self.tgt = nn.Embedding(40, 16), nn.Embedding(40, 16)
            self.transformer = nn.Transformer(16, 2, 1, 1, 32, 0.1, batch_first=True)
            self.out = nn.Linear(16, 40)

        def forward(self, src, tgt, mask, src_pad, tgt_pad):
            hidden = self.transformer(
                self.src(src), self.tgt(tgt), tgt_mask=mask, src_key_padding_mask=src_pad,
                tgt_key_padding_mask=tgt_pad, memory_key_padding_mask=src_pad,
            )  # fmt: skip
            return self.out(hidden)

    model, criterion = keep(Net()), nn.CrossEntropyLoss(ignore_index=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    for _ in range(5):
        src, tgt = torch.randint(2, 40, (4, 7)), torch.randint(2, 40, (4, 8))
        src[0, 5:], tgt[1, 6:] = 1, 1
        given, wanted = tgt[:, :-1], tgt[:, 1:]
        mask = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
        logits = model(src, given, mask, src == 1, given == 1)
        optimizer.zero_grad()
        criterion(logits.reshape(-1, 40), wanted.reshape(-1)).backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ nanoGPT and kin
class Attention(nn.Module):
    def __init__(self, width, dropout=0.1):
        super().__init__()
        self.c_attn, self.c_proj, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x):
        length = x.shape[1]
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        return self.drop(self.c_proj((F.softmax(att, dim=-1) @ v).transpose(1, 2).flatten(2)))


class GPT(nn.Module):
    def __init__(self, width=16, vocab=64):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(vocab, width),
                wpe=nn.Embedding(32, width),
                h=nn.ModuleList(nn.Sequential(nn.LayerNorm(width), Attention(width)) for _ in range(2)),
                ln_f=nn.LayerNorm(width),
            )
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        for block in self.transformer.h:
            x = x + block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits[:, [-1], :], None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@program("nanoGPT")
def train():
    data, model = torch.randint(0, 64, (500,)), keep(GPT())

    def get_batch():
        ix = torch.randint(len(data) - 16, (4,))
        return torch.stack([data[i : i + 16] for i in ix]), torch.stack([data[i + 1 : i + 17] for i in ix])

    decay = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": decay, "weight_decay": 0.1}]
    groups += [{"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    x, y = get_batch()
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 3 if step < 3 else 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 6))
        if step % 3 == 0:
            with torch.no_grad():
                model.eval()
                [model(*get_batch())[1].item() for _ in range(2)]
                model.train()
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                _, loss = model(x, y)
                loss = loss / 2
            x, y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


@program("makemore")
def by_tensors():
    """No module at all: a list of tensors, moved by hand."""
    generator = torch.Generator().manual_seed(1)
    table, w1, b1 = (torch.randn(s, generator=generator) for s in ((27, 8), (24, 32), (32,)))
    w2, b2 = torch.randn((32, 27), generator=generator) * 0.01, torch.zeros(27)
    parameters = [table, w1, b1, w2, b2]
    for p in parameters:
        p.requires_grad = True
        keep(p)
    x, y = torch.randint(0, 27, (200, 3)), torch.randint(0, 27, (200,))
    for _ in range(8):
        ix = torch.randint(0, 200, (32,))
        logits = torch.tanh(table[x[ix]].view(-1, 24) @ w1 + b1) @ w2 + b2
        loss = F.cross_entropy(logits, y[ix])
        for p in parameters:
            p.grad = None
        loss.backward()
        for p in parameters:
            p.data += -0.1 * p.grad


# ------------------------------------------------------------------------------------------------ transformers and kin
@program("accelerate")
def accumulate():
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = keep(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, pictures(), scheduler)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def adapted(**options):
    import peft

    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(lm(hidden=32), config)


@program("peft")
def lora():
    model = keep(adapted(lora_dropout=0.05))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ids in batches(5):
        outputs = model(input_ids=ids, labels=ids)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program("peft")
def ia3():
    import peft

    config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=[])
    model = keep(peft.get_peft_model(lm("llama", hidden=32), config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    for ids in batches(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program("TRL")
def sft():
    """Only the completion is learnt."""
    model = keep(lm("llama", hidden=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ids in batches(5):
        labels = ids.clone()
        labels[:, :8] = -100
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        count = (labels[:, 1:] != -100).sum()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def log_probability(model, ids):
    logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None])[..., 0][:, 8:].sum(-1)


@program("TRL")
def dpo():
    model = keep(lm(hidden=32))
    reference = keep(copy.deepcopy(model)).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for chosen, rejected in zip(batches(5), batches(5, seed=1)):
        with torch.no_grad():
            base = log_probability(reference, chosen) - log_probability(reference, rejected)
        margin = log_probability(model, chosen) - log_probability(model, rejected) - base
        loss = -F.logsigmoid(0.1 * margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program("TRL")
def grpo():
    model = keep(lm(hidden=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for prompt in batches(4, rows=4, length=10):
        with torch.no_grad():
            model.eval()
            for _ in range(6):
                chances = model(input_ids=prompt).logits[:, -1].softmax(-1)
                prompt = torch.cat([prompt, torch.multinomial(chances, 1)], 1)
            model.train()
            old = log_probability(model, prompt)
        rewards = (prompt[:, 10:] % 2).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for _ in range(2):
            ratio = (log_probability(model, prompt) - old).exp()
            loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program("TRL")
def gkd():
    student, teacher = keep(lm(hidden=32)), keep(lm(hidden=32, seed=1)).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for ids in batches(5):
        with torch.no_grad():
            wanted = teacher(input_ids=ids).logits.log_softmax(-1)
        given = student(input_ids=ids).logits.log_softmax(-1)
        loss = F.kl_div(given.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ timm
@program("timm")
def mixup_and_ema():
    model = keep(nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(1)))
    model.append(nn.Dropout(0.1)).append(nn.Linear(288, 4))
    average = keep(copy.deepcopy(model)).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    for x, y in pictures():
        share = torch.distributions.Beta(0.8, 0.8).sample()
        x = share * x + (1 - share) * x.flip(0)
        soft = share * F.one_hot(y, 4) + (1 - share) * F.one_hot(y.flip(0), 4)
        loss = torch.sum(-soft * F.log_softmax(model(x), dim=-1), dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():  # adaptive clipping
            limit = p.detach().norm().clamp(min=1e-3) * 0.02
            p.grad.detach().mul_((limit / p.grad.detach().norm().clamp(min=1e-6)).clamp(max=1.0))
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(average.state_dict().values(), model.state_dict().values()):
                old.copy_(0.9 * old + 0.1 * new)


@program("timm")
def binary_targets():
    class DropPath(nn.Module):
        def forward(self, x):
            return x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.9).div_(0.9) if self.training else x

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.dw, self.norm, self.path = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(1, 8), DropPath()
            self.gamma = nn.Parameter(1e-2 * torch.ones(8, 1, 1))

        def forward(self, x):
            return x + self.path(self.gamma * F.gelu(self.norm(self.dw(x))))

    model = keep(nn.Sequential(nn.Conv2d(1, 8, 2, 2), Block(), Block(), nn.Flatten(), nn.Linear(128, 4)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    for x, y in pictures():
        loss = F.binary_cross_entropy_with_logits(model(x), F.one_hot(y, 4).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ cleanrl
def dense(*sizes):
    layers = [layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@program("cleanrl")
def dqn():
    network = keep(dense(4, 16, 16, 2))
    target = keep(dense(4, 16, 16, 2))
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for step in range(10):
        states, actions, rewards, after = torch.randn(16, 4), torch.randint(0, 2, (16, 1)), *torch.randn(2, 16, 4)
        with torch.no_grad():
            target_max, _ = target(after).max(dim=1)
            wanted = rewards[:, 0] + 0.99 * target_max
        loss = F.mse_loss(wanted, network(states).gather(1, actions).squeeze())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            for t, q in zip(target.parameters(), network.parameters()):
                t.data.copy_(0.5 * q.data + 0.5 * t.data)


@program("cleanrl")
def sac():
    actor, one, two = keep(dense(3, 16, 2)), keep(dense(4, 16, 1)), keep(dense(4, 16, 1))
    one_target, two_target = keep(copy.deepcopy(one)), keep(copy.deepcopy(two))
    for_q = torch.optim.Adam([*one.parameters(), *two.parameters()], lr=1e-3)
    for_actor = torch.optim.Adam(actor.parameters(), lr=3e-4)
    log_alpha = keep(torch.zeros(1, requires_grad=True))
    for_alpha = torch.optim.Adam([log_alpha], lr=1e-3)

    def act(x):
        mean, log_std = actor(x).chunk(2, -1)
        normal = Normal(mean, log_std.tanh().exp())
        raw = normal.rsample()
        return torch.tanh(raw), normal.log_prob(raw) - torch.log(1 - torch.tanh(raw).pow(2) + 1e-6)

    for step in range(6):
        x, a, r, after = torch.randn(16, 3), torch.rand(16, 1) * 2 - 1, torch.randn(16, 1), torch.randn(16, 3)
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            b, log = act(after)
            low = torch.min(one_target(torch.cat([after, b], 1)), two_target(torch.cat([after, b], 1)))
            wanted = (r + 0.99 * (low - alpha * log)).view(-1)
        both = [q(torch.cat([x, a], 1)).view(-1) for q in (one, two)]
        for_q.zero_grad()
        (F.mse_loss(both[0], wanted) + F.mse_loss(both[1], wanted)).backward()
        for_q.step()
        if step % 2 == 0:
            b, log = act(x)
            low = torch.min(one(torch.cat([x, b], 1)), two(torch.cat([x, b], 1)))
            for_actor.zero_grad()
            (alpha * log - low).mean().backward()
            for_actor.step()
            with torch.no_grad():
                _, log = act(x)
            for_alpha.zero_grad()
            (-log_alpha.exp() * (log - 1)).mean().backward()
            for_alpha.step()
        for q, t in ((one, one_target), (two, two_target)):
            for p, old in zip(q.parameters(), t.parameters()):
                old.data.copy_(0.005 * p.data + 0.995 * old.data)


@program("cleanrl")
def ppo():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic, self.actor_mean = dense(4, 16, 1), dense(4, 16, 2)
            self.actor_logstd = nn.Parameter(torch.zeros(1, 2))
            for p in self.modules():
                if isinstance(p, nn.Linear):
                    nn.init.orthogonal_(p.weight, 2**0.5)
                    nn.init.constant_(p.bias, 0.0)

        def get(self, x, action=None):
            probs = Normal(self.actor_mean(x), self.actor_logstd.expand(len(x), -1).exp())
            action = probs.sample() if action is None else action
            return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)

    agent = keep(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    for update in range(3):
        optimizer.param_groups[0]["lr"] = 3e-4 * (1 - update / 3)
        obs = torch.randn(32, 4)
        with torch.no_grad():
            actions, logs, _, values = agent.get(obs)
        returns = torch.randn(32) + obs.sum(1)
        advantages = returns - values.flatten()
        for part in torch.randperm(32).view(4, 8):
            _, new, entropy, value = agent.get(obs[part], actions[part])
            ratio = (new - logs[part]).exp()
            scaled = (advantages[part] - advantages[part].mean()) / (advantages[part].std() + 1e-8)
            policy = torch.max(-scaled * ratio, -scaled * ratio.clamp(0.8, 1.2)).mean()
            clipped = values.flatten()[part] + (value.flatten() - values.flatten()[part]).clamp(-0.2, 0.2)
            worse = torch.max((value.flatten() - returns[part]) ** 2, (clipped - returns[part]) ** 2)
            loss = policy - 0.01 * entropy.mean() + 0.5 * 0.5 * worse.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


# ------------------------------------------------------------------------------------------------ GAN, VAE, diffusion
@program("GAN")
def wgan_gp():
    maker, judge = keep(dense(4, 16, 2)), keep(dense(2, 16, 1))
    for_maker, for_judge = (torch.optim.Adam(m.parameters(), 1e-4, betas=(0.0, 0.9)) for m in (maker, judge))
    for step in range(8):
        real, fake = torch.randn(16, 2) + 1, maker(torch.randn(16, 4)).detach()
        between = (real + torch.rand(16, 1) * (fake - real)).requires_grad_(True)
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        for_judge.zero_grad()
        (judge(fake).mean() - judge(real).mean() + 10 * penalty).backward()
        for_judge.step()
        if step % 2:
            for_maker.zero_grad()
            (-judge(maker(torch.randn(16, 4))).mean()).backward()
            for_maker.step()


@program("VAE")
def vq_vae():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = dense(16, 32, 4), dense(4, 32, 16)
            self.codes = nn.Embedding(8, 4)
            self.codes.weight.data.uniform_(-1 / 8, 1 / 8)

        def forward(self, x):
            z = self.encoder(x)
            q = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
            loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
            return self.decoder(z + (q - z).detach()), loss

    model = keep(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
    for _ in range(6):
        x = torch.randn(16, 16)
        optimizer.zero_grad()
        out, loss = model(x)
        (F.mse_loss(out, x) / x.var() + loss).backward()
        optimizer.step()


@program("diffusion")
def ddpm():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.time, self.into = nn.Sequential(nn.Linear(8, 16), nn.SiLU()), nn.Conv2d(1, 16, 3, padding=1)
            self.norm, self.out = nn.GroupNorm(4, 16), nn.Conv2d(16, 1, 3, padding=1)
            nn.init.zeros_(self.out.weight)

        def forward(self, x, t):
            angle = t[:, None] * torch.exp(-torch.arange(4))
            h = self.into(x) + self.time(torch.cat([angle.sin(), angle.cos()], 1))[:, :, None, None]
            return self.out(F.silu(self.norm(h)))

    model = keep(Net())
    swa = torch.optim.swa_utils
    average = keep(swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
    for x, _ in pictures():
        t, noise = torch.randint(0, 100, (len(x),)), torch.randn_like(x)
        a = kept[t][:, None, None, None]
        loss = F.mse_loss(model(a.sqrt() * (2 * x - 1) + (1 - a).sqrt() * noise, t), noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)


# ------------------------------------------------------------------------------------------------ and others
@program("RNN")
def characters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.gru, self.out = nn.Embedding(30, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 30)

        def forward(self, x, h):
            y, h = self.gru(self.table(x), h)
            return self.out(y), h

    model, text, hidden = keep(Net()), torch.randint(0, 30, (4, 81)), None
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for i in range(0, 80, 10):
        logits, hidden = model(text[:, i : i + 10], hidden)
        hidden = hidden.detach()
        loss = F.cross_entropy(logits.transpose(1, 2), text[:, i + 1 : i + 11])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()


@program("speech")
def ctc():
    model = keep(nn.LSTM(8, 12, bidirectional=True, num_layers=1))
    head = keep(nn.Linear(24, 10))
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(5):
        logs = head(model(torch.randn(20, 4, 8))[0]).log_softmax(2)
        targets = torch.randint(1, 10, (4, 6))
        loss = nn.CTCLoss(blank=0)(logs, targets, torch.full((4,), 20), torch.tensor([6, 5, 4, 6]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program("contrastive")
def byol():
    online, head = keep(dense(8, 16, 8)), keep(dense(8, 16, 8))
    target = keep(copy.deepcopy(online)).requires_grad_(False)
    optimizer = torch.optim.SGD([*online.parameters(), *head.parameters()], lr=0.05, momentum=0.9)
    for _ in range(6):
        x = torch.randn(16, 8)
        one, two = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
        loss = sum(2 - 2 * F.cosine_similarity(head(online(a)), target(b)).mean() for a, b in ((one, two), (two, one)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for p, t in zip(online.parameters(), target.parameters()):
            t.data = 0.99 * t.data + 0.01 * p.data


@program("contrastive")
def clip():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.picture, self.text = dense(8, 16, 8), dense(6, 16, 8)
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, a, b):
            a, b = F.normalize(self.picture(a), dim=-1), F.normalize(self.text(b), dim=-1)
            return self.logit_scale.exp() * a @ b.t()

    model = keep(Both())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(6):
        logits, labels = model(torch.randn(8, 8), torch.randn(8, 6)), torch.arange(8)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.logit_scale.data.clamp_(0, 4.6)


@program("meta")
def maml():
    net = keep(dense(1, 16, 1))
    outer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(5):
        outer.zero_grad()
        for _ in range(2):
            x, shift = torch.rand(10, 1) * 6, random.random() * 3
            weights = dict(net.named_parameters())
            inner = F.mse_loss(torch.func.functional_call(net, weights, (x,)), torch.sin(x + shift))
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            fast = {n: w - 0.01 * s for (n, w), s in zip(weights.items(), slopes)}
            (F.mse_loss(torch.func.functional_call(net, fast, (x,)), torch.sin(x + shift)) / 2).backward()
        outer.step()


@program("flow")
def real_nvp():
    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.net, self.flip = dense(1, 16, 2), flip

        def forward(self, x):
            a, b = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
            s, t = self.net(a).chunk(2, 1)
            s = torch.tanh(s)
            return torch.cat([a, b * s.exp() + t], 1), s.sum(1)

    layers = keep(nn.ModuleList(Coupling(n % 2) for n in range(4)))
    optimizer = torch.optim.Adamax(layers.parameters(), lr=1e-3)
    for _ in range(6):
        x, log = torch.randn(32, 2) * 0.5 + 1, 0
        for layer in layers:
            x, more = layer(x)
            log = log + more
        loss = -(Normal(0.0, 1.0).log_prob(x).sum(1) + log).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program("recommender")
def matrix_factorisation():
    users, things = keep(nn.Embedding(20, 4, sparse=True)), keep(nn.Embedding(30, 4, sparse=True))
    optimizer = torch.optim.SparseAdam([*users.parameters(), *things.parameters()], lr=1e-2)
    for _ in range(6):
        u, t, r = torch.randint(0, 20, (16,)), torch.randint(0, 30, (16,)), torch.rand(16)
        optimizer.zero_grad()
        F.mse_loss((users(u) * things(t)).sum(1), r).backward()
        optimizer.step()


@program("multi-task")
def uncertainty():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.kind, self.size = dense(8, 16, 16), nn.Linear(16, 3), nn.Linear(16, 1)
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, x, y, z):
            h = F.relu(self.body(x))
            losses = torch.stack([F.cross_entropy(self.kind(h), y), F.mse_loss(self.size(h).squeeze(-1), z)])
            return (losses * torch.exp(-self.log_vars) + self.log_vars).sum()

    model = keep(Both())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8), torch.randint(0, 3, (16,)), torch.randn(16))
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())


@program("Lightning")
def toggled():
    """Manual optimisation: `step` is given a closure that is over, and each network is frozen in turn."""
    maker, judge = keep(dense(4, 16, 8)), keep(dense(8, 16, 1))
    optimizers = {m: torch.optim.Adam(m.parameters(), lr=2e-4) for m in (maker, judge)}
    for n in range(10):
        mine, other = (judge, maker) if n % 2 else (maker, judge)
        other.requires_grad_(False)
        score = judge(maker(torch.randn(16, 4)))
        loss = F.binary_cross_entropy_with_logits(score, torch.full((16, 1), float(1 - n % 2)))
        optimizers[mine].zero_grad()
        loss.backward()
        optimizers[mine].step(closure=lambda: None)
        other.requires_grad_(True)


@program("detection")
def focal():
    model = keep(nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 1)))
    nn.init.constant_(model[3].bias, -math.log(99))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for x, _ in pictures():
        out = model(x)
        there = (torch.rand(len(x), 8, 8) < 0.1).float()
        p, ce = out[:, 0].sigmoid(), F.binary_cross_entropy_with_logits(out[:, 0], there, reduction="none")
        weight = (there * 0.25 + (1 - there) * 0.75) * (p * (1 - there) + (1 - p) * there) ** 2
        boxes = F.smooth_l1_loss(out[:, 1:].permute(0, 2, 3, 1)[there > 0], torch.rand(int(there.sum()), 4))
        optimizer.zero_grad()
        ((weight * ce).sum() / there.sum().clamp(min=1) + boxes).backward()
        optimizer.step()
