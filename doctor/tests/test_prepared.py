"""What is prepared for a loss and is wrong, or only looks so (D13, D14, D36 to D44), and a critic's two (N38)."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import train_doctor as doctor

from .bench import quiet
from .test_meetings import blamed, named
from .test_turned import net, said

ROWS = 32


def batches(*parts: torch.Tensor, rows: int = ROWS, names: tuple = ()):
    data = [dict(zip(names, row)) for row in zip(*parts)] if names else TensorDataset(*parts)
    loader = DataLoader(data, rows, shuffle=True, generator=torch.Generator().manual_seed(0))
    return itertools.chain.from_iterable(itertools.repeat(loader))


# ------------------------------------------------------------------------------------------------ D36
FLAGS = {
    "unread": True,
    "unread, by name": True,
    "in the loss": False,
    "in the model": False,
    "cast first": False,
    "as numbers of Python": False,
    "rows alone": False,
    "two parts": False,
    "numbers of other kinds": False,
}


@pytest.mark.parametrize("how", FLAGS)
def test_flags_that_nothing_reads(how):
    x, time = torch.randn(256, 6), torch.rand(256)
    event = (torch.rand(256) < 0.6).float()
    if how == "numbers of other kinds":
        event = torch.rand(256)
    parts = (x, event) if how == "two parts" else (x, time, event)
    given = batches(*parts, names=("x", "time", "event") if how == "unread, by name" else ())

    def loss(model):
        row = next(given)
        x, *others = row.values() if isinstance(row, dict) else row
        event = others[-1]
        if how == "two parts":
            return model(x).pow(2).mean()
        if how == "in the model":
            return (model(x + event[:, None]).squeeze(1) - others[0]).pow(2).mean()
        each = (model(x).squeeze(1) - (0.5 if how == "rows alone" else others[0])).pow(2)
        if how == "in the loss":
            return (each * event).sum() / event.sum()
        if how == "cast first":
            return each[event.bool()].mean()
        if how == "as numbers of Python":
            return torch.stack([one for one, there in zip(each, event.tolist()) if there]).mean()
        return each.mean()

    assert named("D36", net(6, 1), loss, "flags") is FLAGS[how]


@pytest.mark.parametrize("what, read", [("mask", False), ("mask", True), ("lengths", False), ("lengths", True)])
def test_what_tells_where_rows_end(what, read):
    """The loss is of the first place alone, so nothing else is wrong."""
    lengths = torch.randint(2, 9, (256,))
    mask = torch.arange(8) < lengths[:, None]
    x, y = torch.randn(256, 8, 3) * mask[..., None], torch.randn(256)
    given = batches(x, mask if what == "mask" else lengths, y)

    def loss(model):
        x, ends, y = next(given)
        if read:
            x = x * (ends[..., None] if what == "mask" else (torch.arange(8) < ends[:, None])[..., None])
        return (model(x)[:, 0, 0] - y).pow(2).mean()

    assert named("D36", net(3, 1), loss, "mask" if what == "mask" else "lengths") is not read


@pytest.mark.parametrize("read", [True, False])
def test_points_that_can_be_seen(read):
    x, seen = torch.randn(256, 6), (torch.rand(256, 4) < 0.7).float()
    given = batches(x, torch.rand(256, 8) * seen.repeat_interleave(2, 1), seen)

    def loss(model):
        x, y, seen = next(given)
        each = F.smooth_l1_loss(model(x), y, reduction="none")
        return (each * seen.repeat_interleave(2, 1)).mean() if read else each.mean()

    assert named("D36", net(6, 8), loss, "mask") is not read


@pytest.mark.parametrize("read", [True, False])
def test_cells_that_hold_something(read):
    there = (torch.rand(256, 1, 4, 4) < 0.1).float()
    given = batches(torch.randn(256, 3, 4, 4), torch.rand(256, 2, 4, 4) * there, there)

    def loss(model):
        x, sizes, there = next(given)
        each = (model(x) - sizes).abs()
        return (each * there).sum() / there.sum() if read else each.mean()

    assert blamed("D36", nn.Conv2d(3, 2, 3, padding=1), loss) is not read


def test_parts_that_can_hardly_be_looked_at():
    """None of them may end a program."""
    x, y = torch.randn(16, 3), torch.randn(16)
    odd = [torch.zeros(16, 0), torch.eye(16).to_sparse(), torch.zeros(16, device="meta"), torch.zeros(16) + 1j]
    odd += [torch.nested.nested_tensor([torch.ones(1 + n % 3) for n in range(16)]), None, "text", torch.tensor(1.0)]
    for part in odd:
        loader = DataLoader([0], 1, collate_fn=lambda _, part=part: (x, part, y))

        def loss(model, loader=loader):
            x, _, y = next(iter(loader))
            return (model(x).squeeze(1) - y).pow(2).mean()

        assert not blamed("D36", net(3, 1), loss)


# ------------------------------------------------------------------------------------------------ D37
LEVELS = {"its own": True, "the input's": False, "of the series": False, "another signal": False, "itself": False}


@pytest.mark.parametrize("how", LEVELS)
def test_the_level_of_a_window_to_come(how):
    def standard(x, of):
        return (x - of.mean(1, keepdim=True)) / of.std(1, keepdim=True)

    def loss(model):
        series = torch.randn(ROWS, 36).cumsum(1)
        past, to_come = series[:, :24], series[:, 24:]
        if how == "another signal":
            to_come = torch.randn(ROWS, 36).cumsum(1)[:, 24:]
            return F.mse_loss(model(standard(past, past)), standard(to_come, to_come))
        x = past if how == "of the series" else standard(past, past)
        y = {"its own": standard(to_come, to_come), "the input's": standard(to_come, past)}.get(how, to_come)
        if how == "itself":
            return F.mse_loss(nn.functional.pad(model(x), (0, 12)), x)
        return F.mse_loss(model(x), y)

    assert named("D37", net(24, 12), loss) is LEVELS[how]


# ------------------------------------------------------------------------------------------------ D38
class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(50, 8), nn.Embedding(50, 8)

    def forward(self, users, items):
        return (self.user(users) * self.item(items)).sum(1)


@pytest.mark.parametrize("labels", ["row by row", "in blocks"])
@pytest.mark.parametrize("laid", ["row by row", "in blocks"])
def test_labels_of_candidates(laid, labels):
    def loss(model):
        users, one, others = (torch.randint(50, (ROWS, n)) for n in (1, 1, 4))
        table = torch.cat([one, others], 1)  # (B, 5)
        right = torch.cat([torch.ones(ROWS, 1), torch.zeros(ROWS, 4)], 1)
        if laid == "row by row":
            items, users = table.reshape(-1), users.repeat_interleave(5)
        else:
            items, users = torch.cat([one[:, 0], *others.unbind(1)]), users.repeat(5, 1)[:, 0]
        right = right.reshape(-1) if labels == "row by row" else right.T.reshape(-1)
        return F.binary_cross_entropy_with_logits(model(users, items), right)

    assert named("D38", Pairs(), loss) is (laid != labels)


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize("joined", ["cat", "stack"])
def test_labels_of_turned_pictures(joined, wrong):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))

    def loss(model):
        x = torch.randn(16, 1, 8, 8)
        turned = [x.rot90(k, (2, 3)) for k in range(4)]
        views = torch.cat(turned) if joined == "cat" else torch.stack(turned, 1).flatten(0, 1)
        ways = torch.arange(4)
        ways = ways.repeat_interleave(16) if (joined == "cat") is not wrong else ways.repeat(16)
        return F.cross_entropy(model(views), ways)

    assert named("D38", model, loss) is wrong


# ------------------------------------------------------------------------------------------------ D39
CUT = {"255": True, "-1": True, "ignored": False, "masked": False, "bins": False, "nothing to cut": False}


@pytest.mark.parametrize("how", CUT)
def test_labels_that_stand_for_none(how):
    def loss(model):
        x, y = torch.randn(ROWS, 6), torch.randint(5, (ROWS,))
        none = torch.rand(ROWS) < 0.3
        if how in ("255", "ignored", "masked"):
            y = y.masked_fill(none, 255)
        if how == "ignored":
            return F.cross_entropy(model(x), y, ignore_index=255)
        if how == "masked":
            each = F.cross_entropy(model(x), y.clamp(max=4), reduction="none")
            return (each * ~none).sum() / (~none).sum()
        if how == "-1":
            return F.cross_entropy(model(x), y.masked_fill(none, -1).clamp(min=0))
        if how == "bins":
            y = (torch.rand(ROWS) * 6).long()
        return F.cross_entropy(model(x), y.clamp(max=4))

    assert named("D39", net(6, 5), loss) is CUT[how]


# ------------------------------------------------------------------------------------------------ D40
@pytest.mark.parametrize("how", ["as on the picture", "scaled", "points that are not there"])
def test_hills_on_smaller_maps(how):
    axis = torch.arange(8.0)

    def loss(model):
        points = torch.rand(16, 4, 2) * 16 - 0.5  # of a picture of 16
        places = points if how == "as on the picture" else ((points + 0.5) / 2 - 0.5).clamp(0, 7)
        hills = (-((axis - places[..., :1]) ** 2) / 2).exp(), (-((axis - places[..., 1:]) ** 2) / 2).exp()
        maps = hills[1][..., None] * hills[0][:, :, None]
        if how == "points that are not there":
            maps = maps * (torch.rand(16, 4, 1, 1) < 0.4)
        return F.mse_loss(model(torch.randn(16, 1, 16, 16)), maps)

    assert named("D40", nn.Conv2d(1, 4, 3, stride=2, padding=1), loss) is (how == "as on the picture")


# ------------------------------------------------------------------------------------------------ D41
SIDES = {"exchanged": True, "right": False, "one side for both": False, "pixels": False, "a square": False}


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("how", SIDES)
def test_sides_of_a_picture(how, tall):
    high, wide = (16, 16) if how == "a square" else (32, 16) if tall else (16, 32)
    by = {"right": (wide, high), "one side for both": (wide, wide), "pixels": (1, 1)}.get(how, (high, wide))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))

    def loss(model):
        ends = torch.rand(ROWS, 2, 2).sort(1).values * torch.tensor([wide, high])  # two corners, x and y
        return F.l1_loss(model(torch.randn(ROWS, 1, high, wide)), (ends / torch.tensor(by)).flatten(1))

    assert blamed("D41", model, loss) is SIDES[how]


# ------------------------------------------------------------------------------------------------ D13
SLICES = {  # how the noise meets the data -> whether it stays there
    "noise in place": True,
    "a mask in place": True,
    "ids in place": True,
    "a copy": False,
    "a part of what is new": False,
    "a slice that is filled": False,
    "a buffer that is filled": False,
    "a sampler's chain": False,
    "a shift in place": False,
}


@pytest.mark.parametrize("how", SLICES)
def test_slices_of_the_data_that_are_written_into(how):
    ids = torch.randint(1, 9, (64, 6))
    data = ids if "ids" in how else torch.randn(64, 6)
    model = nn.Sequential(nn.Embedding(9, 6) if "ids" in how else nn.Identity(), nn.Linear(6, 6))
    rows = itertools.cycle([slice(0, 16), slice(16, 32), slice(32, 48)])

    def loss(model):
        x = data[next(rows)]
        if how == "noise in place":
            x.mul_(0.9).add_(torch.randn_like(x) * 0.1)
        elif how == "a mask in place":
            x.mul_((torch.rand(x.shape) > 0.2).float())
        elif how == "ids in place":
            x[torch.rand(x.shape) < 0.2] = 0
        elif how == "a copy":
            x = x.clone().add_(torch.randn_like(x))
        elif how == "a part of what is new":
            x = (x + 0)[:8]
            x.add_(torch.randn(8, 6))
        elif how == "a slice that is filled":
            x.copy_(torch.ones(16, 6)).add_(torch.randn(16, 6))
        elif how == "a buffer that is filled":
            data.copy_(torch.ones(64, 6))
            x.add_(torch.randn(16, 6))
        elif how == "a sampler's chain":
            with torch.no_grad():
                model(x)
                x.add_(torch.randn_like(x))
        else:
            x.sub_(x.mean())
        return model(x).square().mean()

    assert named("D13", model, loss, "slice") is SLICES[how]


# ------------------------------------------------------------------------------------------------ D14
@pytest.mark.parametrize("finer", [1, 2])
@pytest.mark.parametrize("how", ["one corner", "two corners", "the middle", "whole"])
def test_pieces_of_pictures_and_of_their_targets(how, finer):
    pictures = torch.rand(32, 1, 24, 24)
    targets = F.interpolate(pictures, scale_factor=finer)

    def corner():
        return torch.randint(12, (2,)).tolist() if how != "the middle" else (6, 6)

    def loss(model):
        xs, ys = [], []
        for n in torch.randperm(32)[:8].tolist():
            a, b = corner()
            xs.append(pictures[n, :, a : a + 12, b : b + 12])
            a, b = corner() if how == "two corners" else (a, b)
            a, b, size = a * finer, b * finer, 12 * finer
            ys.append(targets[n, :, a : a + size, b : b + size])
        if how == "whole":
            xs, ys = list(pictures[:8]), list(targets[:8])
        return F.l1_loss(model(torch.stack(xs)), torch.stack(ys))

    model = nn.Sequential(nn.Conv2d(1, 4 * finer**2, 3, padding=1), nn.PixelShuffle(finer), nn.Conv2d(4, 1, 1))
    assert named("D14", model, loss, "corner") is (how == "two corners")


@pytest.mark.parametrize("how", ["each frame", "each film", "drifting slowly", "one picture"])
def test_frames_of_a_film_are_cut_at_one_place(how):
    films = torch.rand(16, 6, 1, 16, 16)

    def loss(model):
        batch = []
        for n in torch.randperm(16)[:4].tolist():
            frames, (a, b) = [], torch.randint(6, (2,)).tolist()
            for t in range(6):
                if how == "each frame":
                    a, b = torch.randint(6, (2,)).tolist()
                a, b = (a + (t == 3), b) if how == "drifting slowly" else (a, b)
                frames.append(films[n, 0 if how == "one picture" else t, :, a : a + 8, b : b + 8])
            batch.append(torch.stack(frames))
        return model(torch.stack(batch).flatten(0, 1)).pow(2).mean()

    assert named("D14", nn.Conv2d(1, 4, 3), loss, "film") is (how == "each frame")


# ------------------------------------------------------------------------------------------------ D43
class Normals(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net(3, 3)

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


@pytest.mark.parametrize("how", ["the points alone", "both", "neither", "back to the first position", "scaled alone"])
def test_vectors_are_turned_with_their_points(how):
    def loss(model):
        points, normals = torch.randn(4, 16, 3), F.normalize(torch.randn(4, 16, 3), dim=-1)
        turn = torch.linalg.qr(torch.randn(4, 3, 3)).Q
        if how == "scaled alone":
            turn = 2 * torch.eye(3).expand(4, 3, 3)
        given = points if how == "neither" else points @ turn
        if how == "back to the first position":
            return (model(given) - points).pow(2).mean()
        wanted = normals @ turn if how == "both" else normals
        return (1 - (model(given) * wanted).sum(-1)).mean()

    assert named("D43", Normals(), loss) is (how == "the points alone")


# ------------------------------------------------------------------------------------------------ F118
RESCALED = {"without the factor": True, "with it": False, "by x itself": False, "all of z": False, "drawn": False}


@pytest.mark.parametrize("how", RESCALED)
def test_slopes_by_what_was_rescaled(how):
    def slope(of, by):
        return torch.autograd.grad(of.sum(), by, create_graph=True)[0]

    def loss(model):
        x = torch.rand(ROWS, 1) * 5
        if how in ("by x itself", "drawn"):
            x.requires_grad_()
            u = model(x / 5 if how == "by x itself" else x)
            return (slope(slope(u, x), x) + x.sin()).pow(2).mean() + u.pow(2).mean()
        z = (2 * x / 5 - 1).requires_grad_()
        second = slope(slope(model(z), z), z)
        if how == "with it":
            second = second * (2 / 5) ** 2
        return (second + (z if how == "all of z" else x).sin()).pow(2).mean() + model(z).pow(2).mean()

    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    assert named("F118", model, loss) is RESCALED[how]


# ------------------------------------------------------------------------------------------------ F24, F56, D18, D21
@pytest.mark.parametrize("how", ["drawn anew", "as played", "an entropy"])
def test_the_action_that_is_scored_was_played(how):
    def loss(model):
        x = torch.randn(ROWS, 6)
        with torch.no_grad():
            played = torch.distributions.Categorical(logits=model(x)).sample()
        earned = x[:, 0] * played
        policy = torch.distributions.Categorical(logits=model(x))
        scored = played if how == "as played" else policy.sample()
        if how == "an entropy":
            return policy.log_prob(scored).mean() + 0 * earned.mean()
        return -(policy.log_prob(scored) * (earned - earned.mean())).mean()

    assert named("F24", net(6, 3), loss) is (how == "drawn anew")


@pytest.mark.parametrize("how", ["unused", "used", "no ends", "a teacher"])
def test_ends_beside_a_value_of_any_action(how):
    target_net = net(6, 3).requires_grad_(False)

    def loss(model):
        s, following, reward = torch.randn(ROWS, 6), torch.randn(ROWS, 6), torch.randn(ROWS)
        done = torch.rand(4 * ROWS)
        done = (done if how == "no ends" else (done < 0.3).float())[torch.randperm(4 * ROWS)[:ROWS]]
        with torch.no_grad():
            best = model(following).argmax(1, keepdim=True)
            ahead = target_net(following).gather(1, best).squeeze(1)
        if how == "used":
            ahead = ahead * (1 - done)
        wanted = ahead if how == "a teacher" else reward + 0.9 * ahead
        return F.smooth_l1_loss(model(s).gather(1, torch.randint(3, (ROWS, 1))).squeeze(1), wanted)

    assert blamed("F56", net(6, 3), loss) is (how == "unused")


@pytest.mark.parametrize("how", ["a mean by hand", "known alone"])
def test_gaps_that_were_filled_and_a_loss_of_each(how):
    def loss(model):
        x = torch.randn(ROWS, 6)
        y = x[:, :4].masked_fill(torch.rand(ROWS, 4) < 0.4, float("nan"))
        known = ~y.isnan()
        each = F.mse_loss(model(x), y.nan_to_num(0.0), reduction="none")
        return each.mean() if how == "a mean by hand" else (each * known).sum() / known.sum()

    assert blamed("D18", net(6, 4), loss) is (how == "a mean by hand")


@pytest.mark.parametrize("asked", ["hidden", "shown"])
def test_a_token_that_is_expanded_over_what_is_hidden(asked):
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.token, self.head = nn.Linear(12, 8), nn.Parameter(torch.zeros(1, 1, 8)), net(8, 12)

        def forward(self, x, mask):
            h = self.embed(x)
            h = torch.where(mask[..., None].bool(), self.token.expand_as(h), h)
            return self.head(h + h.mean(1, keepdim=True))

    def loss(model):
        x, order = torch.randn(8, 16, 12), torch.rand(8, 16).argsort(1)
        mask = (order.argsort(1) < 8).float()
        each = ((model(x, mask) - x) ** 2).mean(-1)
        mask = mask if asked == "hidden" else 1 - mask
        return (each * mask).sum() / mask.sum()

    assert blamed("D21", Patches(), loss) is (asked == "shown")


# ------------------------------------------------------------------------------------------------ F21, S33
@pytest.mark.parametrize("how", ["without channels", "with channels", "all pairs"])
def test_pictures_of_other_dimensions(how):
    def loss(model):
        x = torch.randn(8, 1, 6, 6)
        answer, target = model(x), torch.randn(8, 6, 6)
        if how == "all pairs":
            return (answer[:, 0][:, None] - target[None]).pow(2).mean()
        return ((answer - (target if how == "without channels" else target[:, None])) ** 2 + 1e-6).sqrt().mean()

    assert blamed("F21", nn.Conv2d(1, 1, 3, padding=1), loss) is (how == "without channels")


@pytest.mark.parametrize("how", ["over the batch", "over each list", "of one list, drawn"])
def test_lists_are_shared_out_one_by_one(how):
    x = torch.randn(256, 10, 6)
    given = batches(x, x[..., 0])

    def loss(model):
        x, wanted = next(given)
        if how == "of one list, drawn":
            wanted = torch.rand(ROWS, 10)
        dim = 1 if how == "over each list" else 0
        return -(F.softmax(wanted, dim=dim) * F.log_softmax(model(x).squeeze(-1), dim=dim)).sum(dim).mean()

    assert named("S33", net(6, 1), loss) is (how == "over the batch")


# ------------------------------------------------------------------------------------------------ F30
class Films(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.frame, self.head = how, nn.Conv2d(1, 8, 3), nn.Linear(8, 4)

    def forward(self, x):  # (B, T, 1, H, W)
        rows, frames = x.shape[:2]
        h = self.frame(x.flatten(0, 1)).relu().mean((2, 3))  # (B * T, 8)
        if self.how == "the other way":
            return self.head(h.view(frames, rows, -1).mean(0))
        if self.how == "turned afterwards":
            return self.head(h.view(rows, frames, -1).transpose(0, 1).mean(0))
        if self.how == "turned before":
            h = self.frame(x.transpose(0, 1).flatten(0, 1)).relu().mean((2, 3))
            return self.head(h.view(frames, rows, -1).mean(0))
        return self.head(h.unflatten(0, (rows, frames)).mean(1))


@pytest.mark.parametrize("how", ["the other way", "turned afterwards", "turned before", "as they were"])
def test_two_axes_that_were_one(how):
    def loss(model):
        return F.cross_entropy(model(torch.randn(8, 5, 1, 6, 6)), torch.randint(4, (8,)))

    assert named("F30", Films(how), loss, "pieces") is (how == "the other way")


# ------------------------------------------------------------------------------------------------ D42
HEARD = {"power": True, "with filters": True, "parts": True, "logarithm": False, "magnitude": False, "root": False}
HEARD |= {"normalised": False}


@pytest.mark.parametrize("how", HEARD)
def test_powers_of_a_spectrogram(how):
    filters = F.one_hot(torch.arange(1, 33, 4), 33) * torch.rand(8, 1)
    bins = 33 if how in ("power", "parts") else 8
    model = nn.Sequential(nn.Conv1d(bins, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten())

    def loss(model):
        tones = torch.rand(ROWS, 1) * torch.arange(512)
        wave = tones.sin() * torch.rand(ROWS, 1) * 5 + 1e-2 * torch.randn(ROWS, 512)
        spectrum = torch.stft(wave, 64, window=torch.hann_window(64), return_complex=True)
        power = spectrum.abs() if how == "magnitude" else spectrum.abs().pow(2)
        if how == "parts":
            power = torch.view_as_real(spectrum).square().sum(-1)
        heard = power if how in ("power", "parts") else filters @ power
        if how == "logarithm":
            heard = (heard + 1e-6).log()
        if how == "root":
            heard = heard**0.3
        if how == "normalised":
            heard = (heard - heard.mean()) / heard.std()
        return F.cross_entropy(model(heard), torch.randint(4, (ROWS,)))

    assert blamed("D42", model, loss) is HEARD[how]


# ------------------------------------------------------------------------------------------------ D27
@pytest.mark.parametrize("how", ["sorted", "shuffled", "masked", "of few kinds"])
def test_partners_of_a_batch_differ(how):
    model = nn.ModuleDict({"left": net(6, 8), "right": nn.Embedding(60, 8)})
    turns = itertools.count()

    def loss(model):
        n = next(turns)
        ids = torch.arange(ROWS) // 16 + 2 * n % 60 if how in ("sorted", "masked") else torch.randperm(60)[:ROWS]
        ids = ids % 3 if how == "of few kinds" else ids
        left, right = F.normalize(model["left"](torch.randn(ROWS, 6))), F.normalize(model["right"](ids))
        table = left @ right.T / 0.1
        if how == "masked":
            again = (ids[:, None] == ids) & ~torch.eye(ROWS, dtype=torch.bool)
            table = table.masked_fill(again, float("-inf"))
        return F.cross_entropy(table, torch.arange(ROWS))

    assert named("D27", model, loss, "partner") is (how in ("sorted", "of few kinds"))


# ------------------------------------------------------------------------------------------------ N38
@pytest.mark.parametrize("how", ["at once", "frozen meanwhile", "one optimizer", "apart"])
def test_both_losses_of_a_critic_at_once(how):
    torch.manual_seed(0)
    actor, critic = net(6, 2), net(8, 1)
    first, second = (torch.optim.SGD(m.parameters(), 1e-2) for m in (actor, critic))
    if how == "one optimizer":
        first = second = torch.optim.SGD([*actor.parameters(), *critic.parameters()], 1e-2)
    optimizers = [first] if how == "one optimizer" else [first, second]

    def fit():
        with doctor.watch(optimizer=optimizers, steps=8, say=False) as report:
            for _ in range(8):
                x, y, action = torch.randn(ROWS, 6), torch.randn(ROWS, 1), torch.randn(ROWS, 2)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                error = F.mse_loss(critic(torch.cat([x, action], 1)), y)
                critic.requires_grad_(how != "frozen meanwhile")
                value = critic(torch.cat([x, torch.tanh(actor(x))], 1)).mean()
                critic.requires_grad_(True)
                if how == "apart":
                    error.backward()
                    second.step()
                    (-critic(torch.cat([x, torch.tanh(actor(x))], 1)).mean()).backward()
                    first.step()
                    continue
                (error - value).backward()
                for optimizer in optimizers:
                    optimizer.step()
        return report

    report = quiet(fit)
    assert not report.faults and ("N38" in said(report)) is (how == "at once"), f"\n{report}"


# ------------------------------------------------------------------------------------------------ D44
WORDS = {  # how ids are drawn -> rows of the table, and whether they were cut
    "to a byte": (330, True),
    "to a byte, one by one": (330, True),
    "to two bytes": (70_000, True),
    "whole": (330, False),
    "whole, once in a while": (330, False),
    "bytes of a text": (330, False),
    "256 codes and a few": (260, False),
    "places of 256": (1024, False),
    "distances": (1024, False),
    "places in any order": (1024, False),
    "256 codes in a padded table": (320, False),
    "320 to a byte": (320, True),
    "384 to a byte": (384, True),
    "256 codes, the first of them common": (320, False),
    "the high ones alone": (330, False),
    "few words of many": (50_257, False),
}


@pytest.mark.parametrize("how", WORDS)
def test_ids_that_were_cut(how):
    rows, cut = WORDS[how]
    model, steps = nn.Sequential(nn.Embedding(rows, 4), nn.Linear(4, 3)), itertools.count()

    def ids() -> torch.Tensor:
        step, some = next(steps), torch.randint(rows, (16, 32))
        if how == "whole, once in a while":
            return some if step % 2 else some % 256
        if how == "bytes of a text":
            return torch.randint(245, (16, 32))
        if how == "places of 256":
            return torch.arange(256).expand(2, 256)
        if how == "distances":
            return (torch.arange(256) - torch.arange(256)[:, None]).abs()
        if how == "places in any order":
            return torch.stack([torch.randperm(256)[:64] for _ in range(8)])
        if how == "256 codes in a padded table":
            return torch.randint(256, (16, 32))
        if how == "256 codes, the first of them common":
            return torch.multinomial(1 / torch.arange(16.0, 272), 512, replacement=True).view(16, 32)
        if how == "the high ones alone":
            return torch.randint(192, 256, (16, 32))
        if how == "few words of many":
            return some % 200
        some = some if how in ("whole", "256 codes and a few") else some % (2**16 if "two" in how else 2**8)
        return some.flatten() if how == "to a byte, one by one" else some

    def loss(model):
        given = ids()
        return F.cross_entropy(model(given).flatten(0, -2), given.flatten() % 3)

    assert named("D44", model, loss, "16 bits" if "two" in how else "8 bits") is cut


@pytest.mark.parametrize("whole", [False, True])
def test_ids_are_whole_where_one_is(whole):
    """After several steps without one: two optimizers take turns, and each is watched for three of its steps."""
    table, heads = nn.Embedding(330, 4), [nn.Linear(4, 3), nn.Linear(4, 3)]
    optimizers = [torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1) for head in heads]
    with doctor.watch(nn.ModuleList([table, *heads]), optimizer=optimizers, steps=10, say=False) as report:
        for step in range(10):
            ids = torch.randint(330, (16, 32)) % (330 if whole and step == 5 else 256)
            F.cross_entropy(heads[step % 2](table(ids)).flatten(0, -2), ids.flatten() % 3).backward()
            optimizers[step % 2].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert ("D44" in {f.check for f in report.findings}) is not whole
