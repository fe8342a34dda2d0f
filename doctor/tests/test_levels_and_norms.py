"""One norm after several layers (S62), angles along another axis (F134), levels that lie across rows (F21) and
logarithms that are summed over rows (F135). `True` stands for a program that is wrong and is named."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

import train_doctor as doctor

from .test_arithmetic import said

ROWS = 16


def told(check, model, loss_of, batches=None) -> bool:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for _ in range(10):
            loss = loss_of(model, *(next(batches) if batches else ()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return check in said(report)


# ------------------------------------------------------------------------------------------------ S62
class Net(nn.Module):
    """Three layers and one norm, which `way` puts together."""

    def __init__(self, way, norm=None, wrap=lambda layer: layer):
        super().__init__()
        self.layers = nn.ModuleList(wrap(nn.Linear(8, 8)) for _ in range(3))
        self.norm, self.way, self.head = norm or nn.BatchNorm1d(8), way, nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.way(self, x))


def in_turn(net, x):
    for layer in net.layers:
        x = F.relu(net.norm(layer(x)))
    return x


def after_the_activation(net, x):
    for layer in net.layers:
        x = net.norm(F.relu(layer(x)))
    return x


def residual(net, x):
    h = F.relu(net.norm(net.layers[0](x)))
    return F.relu(x + net.norm(net.layers[1](h)))


def twice(net, x):
    """An encoder for two views, which goes wrong inside."""
    return in_turn(net, x) - in_turn(net, x.flip(1))


def views(net, x):
    one, two = (F.relu(net.norm(net.layers[0](v))) for v in (x, x.flip(1)))
    return net.layers[1](one) - net.layers[1](two)


def recurrent(net, x):
    for _ in range(3):
        x = F.relu(net.norm(net.layers[0](x)))
    return x


def side_by_side(net, x):
    return sum(F.relu(net.norm(layer(x))) for layer in net.layers)


def turns_of_a_block(net, x):
    x = net.layers[0](x)
    for _ in range(3):
        x = net.layers[2](F.relu(net.layers[1](F.relu(net.norm(x)))))
    return x


def sums(net, x):
    for layer in net.layers:
        x = x + layer(F.relu(net.norm(x)))
    return x


def sums_the_other_way(net, x):
    for layer in net.layers:
        x = layer(F.relu(net.norm(x))) + x
    return x


def still(net, x):
    net.norm.eval()
    return in_turn(net, x)


NETS = {
    "in turn": (True, in_turn, {}),
    "after the activation": (True, after_the_activation, {}),
    "residual": (True, residual, {}),
    "twice": (True, twice, {}),
    "views": (False, views, {}),
    "recurrent": (False, recurrent, {}),
    "side by side": (False, side_by_side, {}),
    "turns of a block": (False, turns_of_a_block, {}),
    "sums": (False, sums, {}),
    "sums, the other way": (False, sums_the_other_way, {}),
    "still": (False, still, {}),
    "spectral norm, recurrent": (False, recurrent, {"wrap": spectral_norm}),
    "weights made anew": (False, in_turn, {"wrap": spectral_norm}),
    "no running statistics": (False, in_turn, {"norm": "none"}),
}


@pytest.mark.parametrize("name", NETS)
def test_one_norm_after_several_layers(name):
    torch.manual_seed(0)
    wrong, way, more = NETS[name]
    norm = nn.BatchNorm1d(8, track_running_stats=False) if more.get("norm") else None
    net = Net(way, norm, more.get("wrap", lambda layer: layer))
    assert told("S62", net, lambda m: m(torch.randn(32, 8)).square().mean()) is wrong


def test_the_norm_is_named():
    torch.manual_seed(0)
    net = Net(in_turn)
    with doctor.watch(net, optimizer=(optimizer := torch.optim.SGD(net.parameters(), 0.01)), say=False) as report:
        for _ in range(10):
            optimizer.zero_grad()
            net(torch.randn(32, 8)).square().mean().backward()
            optimizer.step()
    assert "(norm) stands behind 3 layers" in next(f for f in report.findings if f.check == "S62").diagnosis


# ------------------------------------------------------------------------------------------------ F134
DIM = 6


def points():
    x = torch.randn(ROWS, 12, 3)
    return x, F.normalize(x * torch.tensor([1.0, 2.0, 3.0]), dim=-1)


def mlp(out=3, given=3):
    return nn.Sequential(nn.Linear(given, 16), nn.ReLU(), nn.Linear(16, out))


def tokens(m, last=None):
    """Students and teachers of texts; `last` is what the answers go through."""
    ids = torch.randint(0, 20, (ROWS, DIM))
    z, teacher = m(ids), (m(ids.flip(1)).detach())
    return (z, teacher) if last is None else (last(z), last(teacher))


def tokens_and_distance(m):
    z, teacher = tokens(m)
    return F.mse_loss(z, teacher) + 1 - F.cosine_similarity(z, teacher).mean()


def reader():
    return nn.Sequential(nn.Embedding(20, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM))


def normals(m, given=lambda a, b: F.cosine_similarity(a, b)):
    x, n = points()
    return 1 - given(m(x), n).mean()


def masked(m):
    x, n = points()
    n[:, 8:] = 0
    return 1 - F.cosine_similarity(n, m(x)).mean()


def lengths_of_normals(m, dim=None):
    x, n = points()
    z = F.normalize(m(x)) if dim is None else F.normalize(m(x), dim=dim)
    return F.mse_loss(z, n)


def lengths_of_points(m):
    """Each feature of all points has length one, here and there."""
    x = points()[0].cumsum(1)
    return F.mse_loss(F.normalize(m(x)), x / x.norm(dim=1, keepdim=True))


def arrows(m):
    """Some of them have length one."""
    x, n = points()
    return 1 - F.cosine_similarity(m(x), n * (1 + (torch.rand(ROWS, 12, 1) < 0.3))).mean()


def single_points(m):
    x, n = points()
    return 1 - F.cosine_similarity(m(x[:, :1]), n[:, :1]).mean()


def rotations(m):
    x = torch.randn(ROWS, 3, 3)
    return 1 - F.cosine_similarity(m(x), torch.linalg.qr(x)[0]).mean()


def classes_of_places(m):
    x, _ = points()
    hot = F.one_hot(x.argmax(2), 3).float()
    return 1 - F.cosine_similarity(m(x).softmax(2), hot).mean()


def series(m):
    x, _ = points()
    return 1 - F.cosine_similarity(m(x), x.cumsum(1)).mean()


def pairs_of_rows(m, dim=1):
    z = m(torch.randn(ROWS, 3))
    return F.cosine_similarity(z[:, None], z[None, :], dim=dim).mean()


def all_tokens(m, product):
    z, other = (F.normalize(t) for t in tokens(m))
    return product(z, other).square().mean()


def written(z, other):
    return F.cosine_similarity(z, other, dim=1).mean()


def centred(z, other):
    return F.cosine_similarity(*(t - t.mean(1, keepdim=True) for t in (z, other))).mean()


def turned(z, other):
    return F.cosine_similarity(z.transpose(1, 2), other.mT).mean()


ANGLES = {
    "normals": (True, mlp, normals),
    "normals, masked": (True, mlp, masked),
    "normals, along the last": (False, mlp, lambda m: normals(m, lambda a, b: F.cosine_similarity(a, b, dim=-1))),
    "normals, dim=1 is written": (False, mlp, lambda m: normals(m, lambda a, b: F.cosine_similarity(a, b, dim=1))),
    "normals in dim 1": (
        False,
        mlp,
        lambda m: normals(m, lambda a, b: F.cosine_similarity(a.transpose(1, 2), b.transpose(1, 2))),
    ),
    "arrows": (False, mlp, arrows),
    "single points": (False, mlp, single_points),
    "rotations": (False, mlp, rotations),
    "classes of places": (False, mlp, classes_of_places),
    "series": (False, mlp, series),
    "tokens": (True, reader, lambda m: 1 - F.cosine_similarity(*tokens(m)).mean()),
    "tokens, and their distance": (True, reader, tokens_and_distance),
    "tokens, a module": (False, reader, lambda m: 1 - nn.CosineSimilarity(-1)(*tokens(m)).mean()),
    "tokens, dim=1 is written": (False, reader, lambda m: 1 - written(*tokens(m))),
    "tokens, centred": (False, reader, lambda m: 1 - centred(*tokens(m))),
    "tokens, turned": (False, reader, lambda m: 1 - turned(*tokens(m))),
    "two dims in a norm": (
        False,
        lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm((12, 5))),
        lambda m: 1 - F.cosine_similarity(m(points()[0]), m(points()[1])).mean(),
    ),
    "maps": (
        False,
        lambda: nn.Sequential(nn.Conv1d(12, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 8, 1)),
        lambda m: 1 - F.cosine_similarity(m(points()[0]), m(points()[1]).detach()).mean(),
    ),
    "pairs of rows": (True, lambda: mlp(8), pairs_of_rows),
    "pairs of rows, along the last": (False, lambda: mlp(8), lambda m: pairs_of_rows(m, -1)),
    "lengths of normals": (True, mlp, lengths_of_normals),
    "lengths of normals, along the last": (False, mlp, lambda m: lengths_of_normals(m, -1)),
    "lengths of normals, dim=1 is written": (False, mlp, lambda m: lengths_of_normals(m, 1)),
    "lengths of points": (False, mlp, lengths_of_points),
    "all tokens": (True, reader, lambda m: all_tokens(m, lambda z, t: z @ t.transpose(1, 2))),
    "tokens that belong together": (True, reader, lambda m: all_tokens(m, lambda z, t: (z * t).sum(-1))),
    "tokens and channels": (False, reader, lambda m: all_tokens(m, lambda z, t: z @ t)),
    "tokens and sizes of channels": (False, reader, lambda m: all_tokens(m, lambda z, t: z @ t.abs())),
    "channels": (False, reader, lambda m: all_tokens(m, lambda z, t: z.transpose(1, 2) @ t)),
    "channels that belong together": (False, reader, lambda m: all_tokens(m, lambda z, t: (z * t).sum(1))),
    "points of a layer, one by one": (
        False,
        lambda: mlp(8),
        lambda m: (F.normalize(m(points()[0])) * F.normalize(m(points()[1]))).sum(-1).mean(),
    ),
    "points of a layer": (False, lambda: mlp(8), lambda m: ((z := F.normalize(m(points()[0]))) @ z.mT).square().mean()),
}


@pytest.mark.parametrize("name", ANGLES)
def test_angles_along_another_axis(name):
    torch.manual_seed(0)
    wrong, model, loss = ANGLES[name]
    assert told("F134", model(), loss) is wrong


# ------------------------------------------------------------------------------------------------ F21
LEVELS = torch.linspace(0.9, 0.1, 50)


class Denoiser(nn.Module):
    """Is given each row's level as a column, or by a lookup."""

    def __init__(self, lookup: bool):
        super().__init__()
        self.time = nn.Embedding(50, 4) if lookup else None
        self.body = nn.Sequential(nn.Linear(ROWS + (4 if lookup else 1), 32), nn.ReLU(), nn.Linear(32, ROWS))

    def forward(self, x, t):
        return self.body(torch.cat([x, self.time(t) if self.time else t[:, None]], 1))


def by_lookup(m, right=False):
    x, noise, t = torch.randn(ROWS, ROWS), torch.randn(ROWS, ROWS), torch.randint(0, 50, (ROWS,))
    a = LEVELS[t].unsqueeze(1) if right else LEVELS[t]
    return F.mse_loss(m(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


def on_a_line(m, right=False):
    x, noise, t = torch.randn(ROWS, ROWS), torch.randn(ROWS, ROWS), torch.rand(ROWS)
    a = t[:, None] if right else t
    return F.mse_loss(m((1 - a) * noise + a * x, t), x - noise)


def scales_of_columns(m):
    """Each column is scaled at random; the level that the network is told is another draw."""
    x = torch.randn(ROWS, ROWS) * torch.rand(ROWS)
    return F.mse_loss(m(x, torch.rand(ROWS)), x)


def columns_taken(m):
    """Spreads of the columns, in a table that is the same in each step, beside the lookup of their names."""
    names = torch.arange(ROWS)
    x = torch.randn(ROWS, ROWS) * LEVELS[names]
    return F.mse_loss(m(x, names), x)


def weights_of_pairs(m):
    """Rows of one label are drawn together, weighed by the levels of both."""
    t, label = torch.rand(ROWS), torch.randint(0, 3, (ROWS,))
    z = m(torch.randn(ROWS, ROWS), t)
    pairs = (label[:, None] == label[None]).float() * t
    return (torch.cdist(z, z) * pairs).mean()


def likenesses(m):
    """Those of all pairs of rows and answers, with a level for each answer."""
    x, t = torch.randn(ROWS, ROWS), torch.rand(ROWS)
    return (m(x, t) @ x.t() * t).square().mean()


NOISY = {
    "by lookup": (True, True, by_lookup),
    "by lookup, as a column": (False, True, lambda m: by_lookup(m, True)),
    "on a line": (True, False, on_a_line),
    "on a line, as a column": (False, False, lambda m: on_a_line(m, True)),
    "scales of columns": (False, False, scales_of_columns),
    "columns taken": (False, True, columns_taken),
    "likenesses": (False, False, likenesses),
    "weights of pairs": (False, False, weights_of_pairs),
}


@pytest.mark.parametrize("name", NOISY)
def test_levels_that_lie_across_rows(name):
    torch.manual_seed(0)
    wrong, lookup, loss = NOISY[name]
    assert told("F21", Denoiser(lookup), loss) is wrong


def forever(loader):
    while True:
        yield from loader


WEIGHED = {
    "errors": (True, lambda z, y, w: w * (z - y) ** 2),
    "errors, by torch": (True, lambda z, y, w: F.mse_loss(z, y, reduction="none") * w),
    "errors, as a column": (False, lambda z, y, w: w[:, None] * (z - y) ** 2),
    "all pairs": (False, lambda z, y, w: (z @ z.t()).sigmoid() * w),
    "all pairs, by a layer's function": (False, lambda z, y, w: F.linear(z, z).sigmoid() * w),
    "weights of columns": (False, lambda z, y, w: (z - y) ** 2 * torch.linspace(0, 1, ROWS)),
}


@pytest.mark.parametrize("name", WEIGHED)
def test_weights_of_rows_that_lie_across(name):
    torch.manual_seed(0)
    wrong, loss = WEIGHED[name]
    data = TensorDataset(torch.randn(256, 5), torch.randn(256, ROWS), torch.rand(256))
    batches = forever(DataLoader(data, ROWS, shuffle=True))
    assert told("F21", mlp(ROWS, 5), lambda m, x, y, w: loss(m(x), y, w).mean(), batches) is wrong


def test_weights_that_a_program_puts_beside_the_batch():
    torch.manual_seed(0)
    columns = torch.linspace(0, 1, ROWS)
    data = TensorDataset(torch.randn(256, 5), torch.randn(256, ROWS))
    beside = DataLoader(data, ROWS, collate_fn=lambda rows: (*map(torch.stack, zip(*rows)), columns))
    assert not told("F21", mlp(ROWS, 5), lambda m, x, y, w: (w * (m(x) - y) ** 2).mean(), forever(beside))


# ------------------------------------------------------------------------------------------------ F135
class Flow(nn.Module):
    """One coupling, with a scale of its own in front that is the same for each row (ActNorm)."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(ROWS))
        self.net = nn.Sequential(nn.Linear(ROWS // 2, 16), nn.ReLU(), nn.Linear(16, ROWS))

    def forward(self, x):
        a, b = (x * self.scale.exp()).chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        return torch.cat([a, b * s.exp() + t], 1), s


def likelihood(m, log_det):
    z, s = m(torch.randn(ROWS, ROWS))
    log_p = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1) + log_det(m, s)
    return -log_p.mean()


def flat(m):
    return m(torch.randn(ROWS, ROWS))[1].sum()


def spread(m, total):
    """A mean and a spread of each row, and the density by hand."""
    x, y = torch.randn(ROWS, 3), torch.randn(ROWS)
    mean, log_s = m(x).unbind(1)
    return (0.5 * ((y - mean) / log_s.exp()) ** 2 + total(log_s)).mean()


def variational(m, kl):
    mu, log_var = m(x := torch.randn(ROWS, 3)).chunk(2, 1)
    z = mu + (0.5 * log_var).exp() * torch.randn_like(mu)
    return ((z - x) ** 2).sum(1).add(kl(1 + log_var - mu**2 - log_var.exp())).mean()


def scored(m, total):
    """Two networks' densities, of which one is summed over all rows."""
    x = torch.randn(ROWS, 3)
    mean, log_s = m(x).chunk(2, 1)
    density = torch.distributions.Normal(mean, F.softplus(log_s)).log_prob(x)
    return -(total(density) + density.sum(1)).mean()


def penalty(m, total):
    h = m[:2](torch.randn(ROWS, 3))
    return (m[2](h).square().sum(1) + total(h)).mean()


def one_row(m):
    """A row alone: its logarithms are those of dims."""
    mean, log_s = m(torch.randn(3)).chunk(2)
    return (0.5 * ((torch.randn(ROWS) - mean) / log_s.exp()) ** 2 + log_s.sum()).mean()


SUMS = {
    "a flow": (True, Flow, lambda m: likelihood(m, lambda m, s: s.sum())),
    "a flow, with ActNorm": (True, Flow, lambda m: likelihood(m, lambda m, s: m.scale.sum() + s.sum())),
    "a flow, each row": (False, Flow, lambda m: likelihood(m, lambda m, s: m.scale.sum() + s.sum(1))),
    "a flow, the mean of rows": (False, Flow, lambda m: likelihood(m, lambda m, s: s.sum() / ROWS)),
    "a flow, less a share": (False, Flow, lambda m: likelihood(m, lambda m, s: 0.01 * s.sum())),
    "a flow, numbers": (False, Flow, lambda m: likelihood(m, lambda m, s: s.sum(1) + s.detach().sum())),
    "a spread": (True, lambda: mlp(2), lambda m: spread(m, lambda s: s.sum())),
    "a spread, each row": (False, lambda: mlp(2), lambda m: spread(m, lambda s: s)),
    "a spread, a logarithm": (True, lambda: mlp(2), lambda m: spread(m, lambda s: s.exp().log().sum())),
    "variational": (True, lambda: mlp(6), lambda m: variational(m, lambda kl: -0.5 * kl.sum())),
    "variational, each row": (False, lambda: mlp(6), lambda m: variational(m, lambda kl: -0.5 * kl.sum(1))),
    "variational, a weight": (False, lambda: mlp(6), lambda m: variational(m, lambda kl: -0.01 * kl.sum())),
    "densities": (True, lambda: mlp(6), lambda m: scored(m, lambda p: p.sum())),
    "densities, each row": (False, lambda: mlp(6), lambda m: scored(m, lambda p: p.sum(1))),
    "a penalty": (False, lambda: mlp(3), lambda m: penalty(m, lambda h: h.abs().sum())),
    "a penalty of all pairs": (False, lambda: mlp(3), lambda m: penalty(m, lambda h: (h @ h.t()).exp().log().sum())),
    "a penalty of all pairs, by a layer's function": (
        False,
        lambda: mlp(3),
        lambda m: penalty(m, lambda h: F.linear(h, h).exp().log().sum()),
    ),
    "a row alone": (False, lambda: mlp(2 * ROWS), one_row),
    "a vector of data": (False, Flow, lambda m: (torch.randn(ROWS) + flat(m)).mean()),
    "one mean and one sum": (False, Flow, lambda m: -(s := m(torch.randn(ROWS, ROWS))[1]).sum() + s.exp().mean()),
}


@pytest.mark.parametrize("name", SUMS)
def test_logarithms_summed_over_rows(name):
    torch.manual_seed(0)
    wrong, model, loss = SUMS[name]
    assert told("F135", model(), loss) is wrong
