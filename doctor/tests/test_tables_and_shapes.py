"""What a model is given, and taken for something else: codes in tables, tables without offsets, states that are not
passed on, the farthest for the nearest; and healthy programs that look like them."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from .test_meetings import named
from .test_turned import net


# ------------------------------------------------------------------------------------------------ D31
def table(how: str):
    """64 rows of a table of 6 columns, as they are given to a model, and what is asked for."""
    drawn = torch.Generator().manual_seed(7)
    raw = 3 + 2 * torch.randn(2000, 6, generator=drawn)
    y = (raw[:, 0] - raw[:, 1] > 0).float()[:, None]
    gone = torch.rand(2000, 6, generator=drawn) < 0.08
    if how in ("standardised", "raw", "ranged", "flagged", "filled", "large"):
        raw = raw.masked_fill(gone, 9999.0 if how == "large" else -999.0)
    if how == "filled":
        raw = torch.where(gone, 3.0, raw)
    if how == "filled with zeros":
        raw = raw.masked_fill(gone, 0.0)
    if how == "off":  # all at once
        raw = torch.where(gone[:, :1], 0.0, 230 + raw)
    if how == "bought nothing":
        raw = torch.where(gone, 0.0, raw.exp())
    if how == "brought between -1 and 1":
        raw = torch.where(gone, 0.0, 900 + 100 * torch.rand(2000, 6, generator=drawn))
        raw = torch.cat([raw[:, :1] / 500 - 1, torch.randn(2000, 5, generator=drawn)], 1)
    if how == "cut":
        raw = raw.clamp(1, 5)
    if how == "flags":
        raw[:, :3] = gone[:, :3].float()
    if how == "counts":
        raw = torch.poisson(raw.abs(), generator=drawn)
        raw[gone] = 500.0
    if how not in ("raw", "large", "brought between -1 and 1"):
        raw = (raw - raw.mean(0)) / raw.std(0)
    if how == "ranged":
        raw = (raw - raw.amin(0)) / (raw.amax(0) - raw.amin(0))
    return (torch.cat([raw, gone.float()], 1) if how == "flagged" else raw), y


TABLES = dict.fromkeys(("standardised", "raw", "ranged", "large"), True)
TABLES |= dict.fromkeys(("", "filled", "filled with zeros", "off", "bought nothing", "cut", "flags", "counts"), False)


@pytest.mark.parametrize("how, wrong", [*TABLES.items(), ("flagged", False), ("brought between -1 and 1", False)])
def test_a_code_for_what_is_missing(how, wrong):
    x, y = table(how)

    def loss(model):
        rows = torch.randint(2000, (64,))
        return F.binary_cross_entropy_with_logits(model(x[rows]), y[rows])

    assert named("D31", net(x.shape[1], 1), loss) is wrong


def test_a_code_before_a_normalisation():
    x, y = table("raw")

    def loss(model):
        rows = torch.randint(2000, (64,))
        return F.mse_loss(model(x[rows]), y[rows])

    assert named("D31", nn.Sequential(nn.BatchNorm1d(6), net(6, 1)), loss)


# ------------------------------------------------------------------------------------------------ D23
SIZES = torch.tensor([30, 20, 12, 6])


class Rows(nn.Module):
    """A table for all columns; how its rows are looked up and put together is told."""

    def __init__(self, how: str, rows: int):
        super().__init__()
        self.how, self.table = how, nn.Embedding(rows, 8)
        self.bag, self.out = nn.EmbeddingBag(rows, 8, mode="sum"), nn.Linear(8, 1)

    def forward(self, ids):
        if self.how == "bag":
            return self.out(self.bag(ids))
        if self.how == "functional":
            return self.out(F.embedding(ids, self.table.weight).sum(1))
        return self.out(self.table(ids).mean(1))


IDS = {
    "module": (lambda: (torch.rand(64, 4) * SIZES).long(), 68, True),
    "functional": (lambda: (torch.rand(64, 4) * SIZES).long(), 68, True),
    "bag": (lambda: (torch.rand(64, 4) * SIZES).long(), 68, True),
    "a row for padding": (lambda: (torch.rand(64, 4) * SIZES).int() + 1, 72, True),
    "a large column": (lambda: (torch.rand(256, 3) * torch.tensor([600, 50, 40])).long(), 690, True),
    "offsets": (lambda: (torch.rand(64, 4) * SIZES).long() + torch.tensor([0, 30, 50, 62]), 68, False),
    "one range": (lambda: torch.randint(17, (64, 4)), 68, False),
    "pairs of one kind": (lambda: torch.randint(15, (64, 2)), 30, False),
    "a text": (lambda: torch.randint(68, (64, 4)), 68, False),
    "rare words": (lambda: (torch.rand(64, 25).pow(4) * 2000).long(), 30000, False),
    "a board": (lambda: torch.randint(13, (64, 64)), 13, False),
    "widening": (lambda: (torch.rand(64, 4) * SIZES).long(), 30, False),
    "hashed": (lambda: torch.randint(10**6, (64, 4)) % 68, 68, False),
}


@pytest.mark.parametrize("how", IDS)
def test_columns_of_one_table_have_rows_of_their_own(how):
    ids, rows, wrong = IDS[how]

    def loss(model):
        return F.binary_cross_entropy_with_logits(model(ids()), torch.randint(2, (len(ids()), 1)).float())

    assert named("D23", Rows(how, rows), loss, "has room for") is wrong


# ------------------------------------------------------------------------------------------------ F45
def sampled(sampling: str, weighing: str):
    """A loss of rows of a data set, 6 % of one class, that a loader draws."""
    drawn = torch.Generator().manual_seed(3)
    y = (torch.rand(3000, generator=drawn) < (0.5 if sampling == "even data" else 0.06)).long()
    x, counts = torch.randn(3000, 6, generator=drawn) + y[:, None], torch.bincount(y)
    sampler = {
        "balanced": lambda: WeightedRandomSampler((1 / counts)[y], 3000),
        "of rows": lambda: WeightedRandomSampler(1 + 9 * torch.rand(3000, generator=drawn), 3000),
        "half way": lambda: WeightedRandomSampler(counts.rsqrt()[y], 3000),
    }.get(sampling, lambda: None)()
    loader = DataLoader(TensorDataset(x, y), batch_size=64, sampler=sampler, shuffle=sampler is None)
    share = counts[0] / counts[1] if sampling != "even data" else torch.tensor(15.0)
    ask = {
        "pos_weight": lambda out, y: nn.BCEWithLogitsLoss(pos_weight=share)(out[:, 0], y.float()),
        "functional": lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y.float(), pos_weight=share),
        "classes": lambda out, y: nn.CrossEntropyLoss(weight=1 / counts)(out, y),
        "a price": lambda out, y: F.cross_entropy(out, y, weight=torch.tensor([1.0, 4.0])),
        "none": lambda out, y: F.cross_entropy(out, y),
    }[weighing]
    batches = []

    def loss(model):
        if not batches:
            batches.append(iter(loader))
        rows, of = next(batches[0])
        return ask(model(rows), of)

    return loss


SAMPLED = {
    **dict.fromkeys([("balanced", "pos_weight"), ("balanced", "functional"), ("balanced", "classes")], True),
    **dict.fromkeys([("balanced", "a price"), ("balanced", "none"), ("", "pos_weight"), ("", "classes")], False),
    **dict.fromkeys([("of rows", "pos_weight"), ("half way", "pos_weight"), ("even data", "pos_weight")], False),
}


@pytest.mark.parametrize("sampling, weighing", SAMPLED)
def test_rare_classes_are_made_up_for_once(sampling, weighing):
    told = named("F45", net(6, 2), sampled(sampling, weighing), "twice")
    assert told is SAMPLED[sampling, weighing]


COUNTS = torch.tensor([0.5, 0.06, 0.3, 0.14])
WEIGHTS = {
    "by count": (1 / COUNTS.sort(descending=True).values, True),
    "by count, rising": (1 / COUNTS.sort().values, True),
    "roots by count": (COUNTS.sort(descending=True).values.rsqrt(), True),
    "by index": (1 / COUNTS, False),
    "roots": (COUNTS.rsqrt(), False),
    "prices": (torch.tensor([1.0, 2.0, 20.0, 2.0]), False),
    "nearly even": (torch.tensor([1.0, 1.1, 1.2, 1.3]), False),
}


@pytest.mark.parametrize("how", WEIGHTS)
@pytest.mark.parametrize("maps", (True, False))
def test_weights_stand_in_the_order_of_the_classes(how, maps):
    weights, wrong = WEIGHTS[how]

    def loss(model):
        y = torch.multinomial(COUNTS, 384, True)
        out = model(torch.randn(384, 6) + y[:, None])
        if maps:
            out, y = out.view(6, 8, 8, 4).permute(0, 3, 1, 2), y.view(6, 8, 8)
        return F.cross_entropy(out, y, weight=weights)

    assert named("F45", net(6, 4), loss, "another order") is wrong


# ------------------------------------------------------------------------------------------------ S45
class Reader(nn.Module):
    """Reads 6 steps of time, one after the other; how it passes its state on is told."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.out = how, nn.Linear(8, 1)
        kind = {"gru": nn.GRUCell, "rnn": nn.RNNCell, "made anew": nn.GRUCell, "handed on": nn.GRUCell}
        layers = {"layer": nn.LSTM, "layer, time first": nn.GRU, "layer, handed on": nn.LSTM, "whole": nn.LSTM}
        if how in layers:
            self.cell = layers[how](3, 8, batch_first=how != "layer, time first")
        else:
            self.cell = kind.get(how, nn.LSTMCell)(3, 8)
        self.first = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        state = h = None
        for t in range(6):
            now = x[:, t]
            if self.how in ("gru", "rnn"):
                h = self.cell(now)
            elif self.how == "made anew":
                h = self.cell(now, torch.zeros(len(x), 8))
            elif self.how == "handed on":
                h = self.cell(now, h)
            elif self.how in ("layer", "layer, time first"):
                h = self.cell(now[:, None] if self.how == "layer" else now[None])[0].flatten(0, 1)
            elif self.how == "layer, handed on":
                h, state = self.cell(now[:, None], state)
                h = h[:, 0]
            elif self.how == "whole":
                h = self.cell(x[:, t:])[0][:, -1]
            elif self.how == "learned beginning":
                h, _ = self.cell(now, 2 * (self.first.expand(len(x), 8),))
            elif self.how == "lstm, handed on":
                h, state = state = self.cell(now, state)
            elif self.how == "a tree":
                h, state = state = self.cell(now, None if t < 4 else state)
            elif self.how == "once" and t == 5 or self.how == "lstm":
                h, _ = self.cell(now)
        return self.out(h)


READERS = dict.fromkeys(("lstm", "gru", "rnn", "made anew", "layer", "layer, time first"), True)
READERS |= dict.fromkeys(("handed on", "layer, handed on", "lstm, handed on", "whole", "once", "a tree"), False)


@pytest.mark.parametrize("how", [*READERS, "learned beginning"])
def test_a_state_is_passed_on(how):
    def loss(model):
        x = torch.randn(16, 6, 3)
        return F.mse_loss(model(x), x[:, :, :1].sum(1))

    assert named("S45", Reader(how), loss) is READERS.get(how, False)


# ------------------------------------------------------------------------------------------------ F101
def quadratic(x, sign: int = 1):
    """Distances of (B, D, N), as networks on points compute them."""
    inner, square = -2 * torch.matmul(x.transpose(2, 1), x), (x**2).sum(1, keepdim=True)
    return sign * square + sign * inner + sign * square.transpose(2, 1)


def rows(x, idx):
    return x[torch.arange(len(x))[:, None, None], idx]


def gathered(x, idx):
    flat = idx.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
    return x.gather(1, flat).view(*idx.shape, -1)


def looked_up(x, idx):
    idx = idx + torch.arange(len(x)).view(-1, 1, 1) * x.shape[1]
    return x.reshape(-1, x.shape[-1])[idx.view(-1), :].view(*idx.shape, -1)


def masked(x):
    d = torch.cdist(x, x)
    return rows(x, torch.where(d < 1, d, torch.zeros_like(d)).topk(4).indices)


def pairs(x):
    return (x[:, :, None] - x[:, None]).pow(2).sum(-1)


def covering(x):
    d = torch.cdist(x, x)
    return rows(x, torch.stack([d.sum(-1).argmax(1), d[:, 0].argmax(1)], 1)[:, None].expand(-1, 12, -1))


NEIGHBOURS = {
    "cdist": (lambda x: rows(x, torch.cdist(x, x).topk(4).indices), True),
    "gathered": (lambda x: gathered(x, torch.topk(torch.cdist(x, x), k=5, dim=-1)[1]), True),
    "roots": (lambda x: rows(x, (pairs(x) + 1e-9).sqrt().topk(4)[1]), True),
    "pairs": (lambda x: looked_up(x, pairs(x).topk(4)[1]), True),
    "norms": (lambda x: rows(x, torch.norm(x.unsqueeze(2) - x.unsqueeze(1), dim=-1).topk(4)[1]), True),
    "quadratic": (lambda x: looked_up(x, quadratic(x.transpose(2, 1)).topk(k=4, dim=-1)[1]), True),
    "negative, least": (lambda x: rows(x, (-torch.cdist(x, x)).topk(4, largest=False)[1]), True),
    "falling order": (lambda x: rows(x, torch.cdist(x, x).argsort(descending=True)[..., :4]), True),
    "end of an order": (lambda x: rows(x, torch.cdist(x, x).sort(-1)[1][:, :, -4:]), True),
    "cdist, least": (lambda x: rows(x, torch.cdist(x, x).topk(4, largest=False).indices), False),
    "quadratic, negative": (lambda x: looked_up(x, quadratic(x.transpose(2, 1), -1).topk(k=4, dim=-1)[1]), False),
    "negative": (lambda x: rows(x, (-torch.cdist(x, x)).topk(4)[1]), False),
    "of each column": (lambda x: rows(x, torch.cdist(x, x).argsort(1, True)[..., :4]), False),
    "order": (lambda x: rows(x, torch.cdist(x, x).argsort()[..., 1:5]), False),
    "likeness": (lambda x: rows(x, (-pairs(x)).exp().topk(4)[1]), False),
    "products": (lambda x: rows(x, (x @ x.transpose(1, 2)).topk(4)[1]), False),
    "under a mask": (masked, False),
    "both ends": (
        lambda x: torch.cat([rows(x, torch.cdist(x, x).topk(4, largest=w)[1]) for w in (True, False)], 2),
        False,
    ),
    "nearly all": (lambda x: rows(x, torch.cdist(x, x).topk(10)[1]), False),
    "distances alone": (lambda x: torch.cdist(x, x).topk(4)[0][..., None].expand(-1, -1, -1, 3), False),
    "covering": (covering, False),
}


class Points(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.neighbours, self.edge, self.out = NEIGHBOURS[how][0], net(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        near = self.neighbours(x)
        own = x[:, :, None].expand_as(near)
        return self.out(self.edge(torch.cat([own, near - own], -1)).amax(2).mean(1))


@pytest.mark.parametrize("how", NEIGHBOURS)
def test_neighbours_are_the_nearest(how):
    def loss(model):
        return F.cross_entropy(model(torch.randn(8, 12, 3)), torch.randint(3, (8,)))

    assert named("F101", Points(how), loss) is NEIGHBOURS[how][1]


@pytest.mark.parametrize("how", ("negatives", "hard rows"))
def test_the_farthest_are_wanted_in_a_loss(how):
    def loss(model):
        x = torch.randn(16, 6)
        z = model(x)
        if how == "negatives":
            far = z[torch.cdist(z, z).topk(4)[1]]
            return (z[:, None] * far).sum(-1).exp().mean() + (z - model(x + 0.1)).pow(2).mean()
        errors = (z - x).pow(2).sum(1)
        return errors[errors.topk(4)[1]].mean()

    assert not named("F101", net(6, 6), loss)


# ------------------------------------------------------------------------------------------------ F102
def wrapped(error):
    return torch.remainder(error + math.pi, 2 * math.pi) - math.pi


def shorter(error):
    return torch.minimum(error.abs(), 2 * math.pi - error.abs())


ANGLES = {
    "mse": (lambda out, a: F.mse_loss(out, a), True),
    "module": (lambda out, a: nn.SmoothL1Loss()(out[:, 0], a[:, 0]), True),
    "huber": (lambda out, a: F.huber_loss(out, a, reduction="sum") / len(a), True),
    "by hand": (lambda out, a: ((out - a) ** 2).mean(), True),
    "absolute": (lambda out, a: (a - out).abs().mean(), True),
    "from zero": (lambda out, a: F.l1_loss(out, a + math.pi), True),
    "degrees": (lambda out, a: F.l1_loss(out, (a + math.pi).rad2deg()), True),  # the squares of these explode
    "halves": (lambda out, a: F.mse_loss(out, a / 2), False),
    "three": (lambda out, a: F.mse_loss(out, 3 * a / math.pi), False),
    "of one": (lambda out, a: F.mse_loss(out, a / math.pi), False),
    "normal": (lambda out, a: F.mse_loss(out, torch.randn_like(a).clamp(-math.pi, math.pi)), False),
    "about a middle": (lambda out, a: F.mse_loss(out, a * (a / math.pi).abs() ** 1.2), False),  # and out to both ends
    "half the circle": (lambda out, a: F.mse_loss(out, a.abs()), False),
    "for the log": (lambda out, a: F.mse_loss(out, a / 2) + 0 * F.mse_loss(out, a).item(), False),
    "wrapped": (lambda out, a: wrapped(out - a).pow(2).mean(), False),
    "the shorter way": (lambda out, a: shorter(out - a).mean(), False),
    "cosine of the error": (lambda out, a: (1 - torch.cos(out - a)).mean(), False),
    "sine and cosine": (lambda out, a: F.mse_loss(out.sin(), a.sin()) + F.mse_loss(out.cos(), a.cos()), False),
}
AROUND = (2 * torch.rand(2000, 1, generator=torch.Generator().manual_seed(5)) - 1) * math.pi
SHOWN = torch.cat([AROUND.sin(), AROUND.cos(), torch.randn(2000, 4)], 1)


@pytest.mark.parametrize("how", ANGLES)
def test_the_ends_of_a_circle_are_one(how):
    def loss(model):
        at = torch.randint(2000, (96,))
        return ANGLES[how][0](model(SHOWN[at]), AROUND[at])

    assert named("F102", net(6, 1), loss) is ANGLES[how][1]


def test_a_number_that_goes_in_is_no_angle():
    def loss(model):
        at = torch.randint(2000, (96,))
        return F.mse_loss(model(AROUND[at]), AROUND[at])

    assert not named("F102", net(1, 1), loss)


# ------------------------------------------------------------------------------------------------ D18
class Pose(nn.Module):
    def __init__(self, out: int = 10):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, out))

    def forward(self, x):
        return self.net(x)


def placed(how: str):
    def loss(model):
        x = torch.randn(16, 1, 8, 8)
        seen = torch.rand(16, 5) > 0.3
        places = {
            "shifts": torch.randn(16, 5, 2),
            "rain": torch.empty(16, 5, 2).exponential_(),
            "mass and volume": (1 + torch.rand(16, 5, 1)) * (0.9 + 0.2 * torch.rand(16, 5, 2)),
            "mass and price": (0.7 * torch.randn(16, 5, 2)).exp() * torch.tensor([1.0, 8.0]),
        }.get(how, 0.1 + 0.8 * torch.rand(16, 5, 2))
        if how == "pixels":
            places = (places * 192).round(decimals=1)
        places = places if how == "all marked" else places * seen[..., None]
        out = model(x).view(16, 5, 2)
        return {
            "functional": lambda: F.mse_loss(out, places),
            "pixels": lambda: F.smooth_l1_loss(out, places),
            "summed": lambda: F.l1_loss(out, places, reduction="none").sum(-1).mean(),
            "by hand": lambda: ((out - places) ** 2).sum(-1).mean(),
            "flat": lambda: nn.MSELoss()(out.flatten(1), places.flatten(1)),
            "lengths": lambda: (places - out).norm(dim=-1).mean(),
            "mask": lambda: ((out - places).pow(2).sum(-1) * seen).sum() / seen.sum(),
            "mask, functional": lambda: (F.l1_loss(out, places, reduction="none") * seen[..., None]).mean(),
            "index": lambda: F.mse_loss(out[seen], places[seen]),
            "chosen": lambda: (out - places).abs().sum(-1)[seen].mean(),
            "for the log": lambda: F.mse_loss(out[seen], places[seen]) + 0 * F.mse_loss(out, places).item(),
            "both masked": lambda: F.mse_loss(out * seen[..., None], places),
        }.get(how, lambda: F.mse_loss(out, places))()

    return loss


PLACES = dict.fromkeys(("functional", "pixels", "summed", "by hand", "flat", "lengths"), True)
PLACES |= dict.fromkeys(
    ("mask", "mask, functional", "index", "chosen", "both masked", "all marked", "for the log"), False
)
PLACES |= dict.fromkeys(("shifts", "rain", "mass and volume", "mass and price"), False)


@pytest.mark.parametrize("how", PLACES)
def test_points_that_nobody_marked(how):
    assert named("D18", Pose(), placed(how), "key points") is PLACES[how]


# ------------------------------------------------------------------------------------------------ S47
def natural(rows: int, drawn=None):
    """Pictures from 0 to 1 with some contrast."""
    return F.interpolate(torch.rand(rows, 3, 6, 6, generator=drawn), 12, mode="bilinear")


def normal(x):
    return (x - 0.48) / 0.22


class Backbone(nn.Module):
    """A network that learned from normal pictures, or is frozen as it was made, and a new head."""

    def __init__(self, learned: bool = True, given=normal):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.features.append(nn.BatchNorm2d(8))
        if learned:
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(1)
                for _ in range(60):
                    self.features(given(natural(16)))
        for p in self.features.parameters():
            p.requires_grad = False
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(F.relu(self.features(x)).mean((2, 3)))


def frozen(how: str):
    def loss(model):
        model.features.train(how == "in train mode" or how == "moving")
        x = natural(16)
        if how == "moving":
            model(normal(x))
            model.features.eval()
        if how == "evaluated":
            with torch.no_grad():
                model.features(normal(x))
        x = {
            "normal": normal,
            "evaluated": normal,
            "low contrast": lambda x: normal(0.4 * x),
            "0 to 255": lambda x: 255 * x,
        }.get(how, lambda x: x)(x)
        if how == "no_grad":
            with torch.no_grad():
                h = F.relu(model.features(x)).mean((2, 3))
            return F.cross_entropy(model.head(h), torch.randint(3, (16,)))
        return F.cross_entropy(model(x), torch.randint(3, (16,)))

    return loss


FROZEN = dict.fromkeys(("0 to 1", "0 to 255", "no_grad"), True)
FROZEN |= dict.fromkeys(("normal", "in train mode", "moving", "low contrast", "evaluated"), False)


@pytest.mark.parametrize("how", FROZEN)
def test_what_a_frozen_network_is_fed(how):
    torch.manual_seed(0)
    assert named("S47", Backbone(), frozen(how)) is FROZEN[how]


@pytest.mark.parametrize("how", ("as it was made", "pretrained on 0 to 1"))
def test_a_frozen_network_that_knows_its_pictures(how):
    torch.manual_seed(0)
    model = Backbone(how != "as it was made", lambda x: x)
    assert not named("S47", model, frozen("0 to 1"))


# ------------------------------------------------------------------------------------------------ F104
class Guided(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.hot = how == "one-hot"
        self.table, self.net = nn.Embedding(9 if how in ("a row of its own", "unused row") else 8, 8), net(13, 4)

    def forward(self, x, t, y):
        shown = F.one_hot(y, 8).float() if self.hot else self.table(y)
        return self.net(torch.cat([x, t, shown], 1))


def dropped(y, how: str):
    drop = torch.rand(len(y)) < 0.2
    if how == "filled":
        return y.masked_fill(drop, 0)
    if how == "filled in place":
        y = y.clone()
        y[drop] = 7
        return y
    if how == "product":
        return y * (torch.rand(len(y)) > 0.2).long()
    if how == "bernoulli":
        keep = torch.bernoulli(torch.full((len(y),), 0.8)).bool()
        return torch.where(keep, y, 0)
    if how == "others":
        return torch.where(drop, torch.randint(8, y.shape), y)
    null = 8 if how == "a row of its own" else 0
    return torch.where(drop, torch.full_like(y, null), y)


def guided(how: str):
    def loss(model):
        x, noise, t = torch.randn(64, 4), torch.randn(64, 4), torch.rand(64, 1)
        y = torch.randint(8, (64,))
        if how == "classes from 1":
            y = y.clamp_min(1)
        if how == "rarely unknown":
            y = torch.where(torch.arange(64) == 5, 0, y.clamp_min(1))
        if how == "by class":
            return F.cross_entropy(model(x, t, dropped(y, how)), y % 4)
        if how == "no guidance":
            return F.mse_loss(model(x, t, y), noise)
        out = model((1 - t) * x + t * noise, t, dropped(y, how))
        return (out - noise).pow(2).mean() if how == "filled" else F.mse_loss(out, noise)

    return loss


GUIDED = dict.fromkeys(("", "filled", "filled in place", "product", "bernoulli", "one-hot"), True)
GUIDED |= dict.fromkeys(("a row of its own", "classes from 1", "rarely unknown", "by class", "no guidance"), False)
GUIDED |= dict.fromkeys(("unused row", "others"), False)


@pytest.mark.parametrize("how", GUIDED)
def test_no_condition_is_no_class(how):
    assert named("F104", Guided(how), guided(how)) is GUIDED[how]
