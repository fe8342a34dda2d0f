"""Healthy programs that make a step for each pass over a loader, begin at a tenth of the rate, or learn derivatives."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

PROGRAMS = {}
STEPS = 12


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def net(i, o, h=32, act=nn.ReLU):
    return nn.Sequential(nn.Linear(i, h), act(), nn.Linear(h, o))


def update(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()


def blobs(n=32, d=8, k=3):
    y = torch.randint(0, k, (n,))
    return torch.randn(n, d) + 2 * F.one_hot(y, d).float(), y


def spots(n=16, k=3):
    """Pictures with a bright square, whose place is the class."""
    y = torch.randint(0, k, (n,))
    x = 0.3 * torch.randn(n, 1, 12, 12)
    for i in range(n):
        c = 2 + 3 * int(y[i])
        x[i, 0, c : c + 2, c : c + 2] += 2
    return x, y


def cnn(k):
    a, b = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
    head = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, k)
    return nn.Sequential(a, nn.ReLU(), nn.MaxPool2d(2), b, nn.ReLU(), *head)


def graph(nodes, share):
    """Who is whose neighbour, and each node its own, as an average."""
    adj = torch.eye(nodes) + (torch.rand(nodes, nodes) < share).float()
    adj = ((adj + adj.t()) > 0).float()
    return adj / adj.sum(1, keepdim=True)


class Names(nn.Module):
    """The mean of the tokens of each class's name."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 16), nn.Linear(16, 16)

    def forward(self, ids):
        return self.out(self.table(ids).mean(1))


class ByNames(nn.Module):
    """Classes that are told by their names."""

    def __init__(self, body):
        super().__init__()
        self.text, self.body, self.scale = Names(), body, nn.Parameter(torch.tensor(1.0))

    def forward(self, names, x):
        return self.scale.exp() * F.normalize(self.body(x), dim=1) @ F.normalize(self.text(names), dim=1).t()


class Nodes(nn.Module):
    """A layer of a graph, of all its nodes."""

    def __init__(self, adj):
        super().__init__()
        self.adj, self.table, self.out = adj, nn.Embedding(len(adj), 16), nn.Linear(16, 16)

    def forward(self, ids):
        return self.adj @ F.relu(self.out(self.adj @ self.table(ids)))


# ---------------------------------------------------------------------------------------------------------- D12
@program
def full_gradient_of_a_table_of_ids():
    """D12: the gradients of all batches of a loader that does not shuffle are added up, and one step is made a pass."""
    loader = DataLoader(TensorDataset(torch.randint(0, 20, (64, 3)), torch.randn(64, 1)), batch_size=16)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), net(24, 1))
    opt = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(STEPS):
        opt.zero_grad()
        for ids, y in loader:
            (F.mse_loss(model(ids), y) / len(loader)).backward()
        opt.step()


@program
def lbfgs_over_all_batches():
    """D12: the closure of LBFGS goes over the whole loader, which does not shuffle."""
    loader = DataLoader(TensorDataset(*blobs(64)), batch_size=16)
    model = net(8, 3, act=nn.Tanh)
    opt = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4, line_search_fn="strong_wolfe")

    def closure():
        opt.zero_grad()
        loss = sum(F.cross_entropy(model(x), y) for x, y in loader) / len(loader)
        loss.backward()
        return loss

    for _ in range(STEPS):
        opt.step(closure)


@program
def lbfgs_of_an_autoencoder():
    """D12: the same without a search along the line, whose closure adds up gradients."""
    loader = DataLoader(TensorDataset(blobs(64)[0]), 32)
    model = net(8, 8, 4, nn.Tanh)
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure():
        opt.zero_grad()
        total = 0.0
        for (x,) in loader:
            loss = F.mse_loss(model(x), x) / len(loader)
            loss.backward()
            total += loss.item()
        return torch.tensor(total)

    for _ in range(STEPS):
        opt.step(closure)


@program
def langevin_steps_of_all_data():
    """D12: each step of a sampler takes the gradient of all data, in batches of a loader that does not shuffle."""
    loader = DataLoader(TensorDataset(*blobs(64)), batch_size=16)
    model = nn.Linear(8, 3)
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(STEPS):
        opt.zero_grad()
        for x, y in loader:
            (F.cross_entropy(model(x), y, reduction="sum") / 64).backward()
        opt.step()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=1e-3)


@program
def names_of_classes_beside_a_whole_pass():
    """D12: classes are told by their names, which stay; gradients of all batches of a shuffled loader are added up."""
    loader, names = DataLoader(TensorDataset(*blobs(64)), 16, shuffle=True), torch.randint(1, 20, (3, 4))
    model = ByNames(net(8, 16))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(STEPS):
        opt.zero_grad()
        for x, y in loader:
            (F.cross_entropy(model(names, x), y) / len(loader)).backward()
        opt.step()


@program
def all_nodes_beside_all_pairs():
    """D12: all nodes of a graph go in, and the losses of all batches of pairs of a shuffled loader are added up."""
    pairs, linked = torch.randint(0, 24, (64, 2)), torch.rand(64).round()
    loader = DataLoader(TensorDataset(pairs, linked), batch_size=16, shuffle=True)
    model, ids = Nodes(graph(24, 0.2)), torch.arange(24)
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(STEPS):
        loss = 0
        for pair, y in loader:
            h = model(ids)
            loss = loss + F.binary_cross_entropy_with_logits((h[pair[:, 0]] * h[pair[:, 1]]).sum(1), y)
        update(opt, loss / len(loader))


@program
def equation_with_fixed_ends_and_a_loader_of_points():
    """D12: the ends of an equation, which stay, go in first, and then all batches of points within it."""
    model = net(1, 1, 32, nn.Tanh)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    loader = DataLoader(TensorDataset(torch.linspace(0, 1, 64)[:, None]), 16, shuffle=True)
    ends = torch.tensor([[0.0], [1.0]])
    for _ in range(STEPS):
        opt.zero_grad()
        (10 * model(ends).pow(2).mean()).backward()
        for (x,) in loader:
            u = model(x.requires_grad_())
            du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
            ddu = torch.autograd.grad(du.sum(), x, create_graph=True)[0]
            ((ddu + math.pi**2 * torch.sin(math.pi * x)).pow(2).mean() / len(loader)).backward()
        opt.step()


@program
def names_of_classes_beside_a_random_batch():
    """D12: names of classes, which stay, go in first; the pictures are a random batch, next(iter(loader))."""
    loader, names = DataLoader(TensorDataset(*spots(64)), 16, shuffle=True), torch.randint(1, 20, (3, 4))
    model = ByNames(cnn(16))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x, y = next(iter(loader))
        update(opt, F.cross_entropy(model(names, x), y))


@program
def all_nodes_beside_random_pairs():
    """D12: all nodes of a graph go in, and the pairs that are bought are a random batch, next(iter(loader))."""
    loader = DataLoader(TensorDataset(torch.randint(0, 24, (64, 2))), batch_size=16, shuffle=True)
    model, ids = Nodes(graph(24, 0.1)), torch.arange(24)
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(STEPS):
        (pair,) = next(iter(loader))
        h, other = model(ids), torch.randint(0, 24, (16,))
        bought, drawn = (h[pair[:, 0]] * h[pair[:, 1]]).sum(1), (h[pair[:, 0]] * h[other]).sum(1)
        update(opt, -F.logsigmoid(bought).mean() - F.logsigmoid(-drawn).mean())


@program
def labels_of_random_nodes():
    """D12: the same for the classes of a random batch of nodes."""
    x, y = blobs(60)
    adj = graph(60, 0.1)
    model = net(8, 3)
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    loader = DataLoader(torch.arange(60), 20, shuffle=True)
    for _ in range(STEPS):
        nodes = next(iter(loader))
        update(opt, F.cross_entropy((adj @ model(x))[nodes], y[nodes]))


# ----------------------------------------------------------------------------------------------------------- N9
def scheduled(opt, model, factors):
    schedule = LambdaLR(opt, factors)
    for _ in range(STEPS):
        x, y = blobs()
        update(opt, F.cross_entropy(model(x), y))
        schedule.step()


@program
def a_tenth_of_the_rate_for_500_steps():
    """N9: a tenth of the rate at first, and the rate is a tenth as well."""
    model = net(8, 3)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduled(opt, model, lambda step: 0.1 if step < 500 else 1.0)


class Warm:
    """A small factor at first, and then all of the rate."""

    def __init__(self, first):
        self.first = first

    def factor(self, step):
        return 0.1 if step < self.first else 1.0


@program
def a_tenth_of_the_rate_by_a_method():
    """N9: the same by a method."""
    model = net(8, 3)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduled(opt, model, Warm(400).factor)


class Powers:
    """A small factor at first, and then one that falls by a power of what is left."""

    def __init__(self, total, power, warm, low):
        self.total, self.power, self.warm, self.low = total, power, warm, low

    def __call__(self, step):
        if step < self.warm:
            return self.low
        return (1 - min(step, self.total - 1) / self.total) ** self.power


@program
def a_hundredth_of_the_rate_before_it_falls():
    """N9: a hundredth of a rate of a hundredth for 50 steps, and then a decay by a power."""
    model = net(8, 3)
    opt = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    scheduled(opt, model, Powers(1000, 0.9, 50, 0.01).__call__)


@program
def body_at_a_tenth_by_its_own_function():
    """N9: one function for each group, and that of the body has a factor of a tenth, as the rate is."""
    model = net(8, 3)
    opt = torch.optim.SGD([dict(params=model[k].parameters()) for k in (0, 2)], 0.1, momentum=0.9)
    scheduled(opt, model, [lambda step: 0.1 * 0.999**step, lambda step: 0.999**step])


# ----------------------------------------------------------------------------------------------- F50, F11 and B1
@program
def vector_field_of_a_spring():
    """F50: of a place and a speed the derivative is the speed and the force."""
    model = net(2, 2, 64, nn.Tanh)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 2)
        update(opt, F.mse_loss(model(x), torch.stack([x[:, 1], -x[:, 0]], 1)))


@program
def derivatives_of_a_damped_pendulum():
    """F50: the same for an angle and its speed, from a loader."""
    state = torch.rand(512, 2) * 6 - 3
    slope = torch.stack([state[:, 1], -state[:, 0].sin() - 0.1 * state[:, 1]], 1)
    model = net(2, 2, 64, nn.Tanh)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for x, y in DataLoader(TensorDataset(state, slope), 32, shuffle=True):
        update(opt, F.mse_loss(model(x), y))


@program
def derivatives_of_a_cart_and_its_pole():
    """F50: place, speed, angle and its speed: the first derivative is the second column, and not the last one."""
    model = net(4, 4, 64, nn.Tanh)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 4)
        force, turn = x[:, 2].cos() * x[:, 3].pow(2), x[:, 2].sin() - 0.1 * x[:, 1]
        update(opt, F.mse_loss(model(x), torch.stack([x[:, 1], force, x[:, 3], turn], 1)))


@program
def derivatives_of_two_bodies():
    """F11: of places and speeds the derivative is speeds and forces: what is asked for stands half a row later."""
    model = net(8, 8, 64, nn.Softplus)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x, v = torch.randn(64, 2, 2), torch.randn(64, 2, 2)
        d = x[:, 1] - x[:, 0]
        f = d / (d.pow(2).sum(1, keepdim=True) + 0.5) ** 1.5
        state, slope = torch.cat([x, v], 1), torch.cat([v, torch.stack([f, -f], 1)], 1)
        update(opt, F.mse_loss(model(state.flatten(1)), slope.flatten(1)))


@program
def hamiltonian_network():
    """F50 and B1: an energy whose derivatives are the motion; its last bias has none."""
    model = net(2, 1, 32, nn.Tanh)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 2, requires_grad=True)
        d = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        motion = torch.stack([x[:, 1], -x[:, 0]], 1).detach()
        update(opt, F.mse_loss(torch.stack([d[:, 1], -d[:, 0]], 1), motion))


def distances(places):
    return (places[:, :, None] - places[:, None]).pow(2).sum(-1)[:, *torch.triu_indices(4, 4, 1)]


@program
def forces_of_an_energy():
    """B1: a potential of atoms that is trained by its forces alone: its last bias has no part in them."""
    model = net(1, 1, 32, nn.SiLU)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        places = torch.randn(16, 4, 3, requires_grad=True)
        known = torch.autograd.grad((-distances(places)).exp().sum(), places)[0]
        energy = model(distances(places)[..., None]).sum()
        forces = torch.autograd.grad(energy, places, create_graph=True)[0]
        update(opt, F.mse_loss(-forces, -known))
