"""Healthy programs whose targets are drawn anew where their pictures were flipped, are moved by one and filled up, or
are tags; and adapters that wait for their turn."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

from .attacked_panels import GPT
from .attacked_parts import texts, update

PROGRAMS = {}
STEPS, SIZE, HIDDEN = 10, 24, -100


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def adam(model, rate=1e-3):
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)


# --------------------------------------------------------------------------------- drawn after the places were mirrored
def dots(n=64):
    """Pictures of a bright and a dark dot, and where these are (x, y)."""
    x, at = 0.1 * torch.randn(n, 1, SIZE, SIZE), torch.randint(3, SIZE - 3, (n, 2, 2))
    for picture, places in zip(x, at.tolist()):
        for (across, down), light in zip(places, (2, -2)):
            picture[0, down - 1 : down + 2, across - 1 : across + 2] += light
    return x, at.float()


def strided(maps, times=2):
    body = [nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 16, 5, times, 2), nn.ReLU()]
    return nn.Sequential(*body, nn.Conv2d(16, maps, 3, padding=1))


def flipped(model, target_of, loss_of):
    """Half of the pictures are flipped, and their places are mirrored."""
    opt, (pictures, places) = adam(model), dots()
    for _ in range(STEPS):
        xs, ys = [], []
        for i in random.sample(range(len(pictures)), 16):
            x, at = pictures[i], places[i].clone()
            if random.random() < 0.5:
                x, at[:, 0] = x.flip(-1), SIZE - 1 - at[:, 0]
            xs.append(x)
            ys.append(target_of(at))
        update(opt, loss_of(model(torch.stack(xs)), torch.stack(ys)))


def heat(at, size, spread=1.0):
    grid = torch.arange(size).float()
    x, y = at[:, 0, None, None] * size / SIZE, at[:, 1, None, None] * size / SIZE
    return torch.exp(-((grid[None, None, :] - x) ** 2 + (grid[None, :, None] - y) ** 2) / (2 * spread**2))


@program
def heat_maps_of_mirrored_joints():
    """SimpleBaseline, HRNet: at a fourth of the size."""
    flipped(strided(2), lambda at: heat(at, 6), F.mse_loss)


@program
def heat_maps_of_many_mirrored_joints_one_by_one():
    flipped(strided(4), lambda at: torch.stack([heat(a[None], 6)[0] for a in (*at, *at)]), F.mse_loss)


@program
def heat_maps_of_a_grid_that_is_kept():
    grid = torch.arange(6).float()

    def target_of(at):
        x, y = at[:, 0, None, None] / 4, at[:, 1, None, None] / 4
        return torch.exp(-((grid[None, None, :] - x) ** 2 + (grid[None, :, None] - y) ** 2) / 2)

    flipped(strided(2), target_of, F.mse_loss)


@program
def centres_of_mirrored_boxes():
    """CenterNet (Zhou 2019)."""
    flipped(strided(1), lambda at: heat(at[:1], 6, 0.7), F.binary_cross_entropy_with_logits)


@program
def landmarks_at_full_size():
    model = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 2, 5, padding=2))
    flipped(model, lambda at: heat(at, SIZE, 1.5), F.mse_loss)


@program
def cells_of_mirrored_boxes():
    """YOLO, channels first."""

    def target_of(at):
        y = torch.zeros(3, 6, 6)
        across, down = (at[0] // 4).long().tolist()
        y[:, down, across] = torch.tensor([1.0, float(at[0, 0] % 4) / 4, float(at[0, 1] % 4) / 4])
        return y

    def loss_of(z, y):
        on = y[:, :1]
        return F.binary_cross_entropy_with_logits(z[:, :1], on) + (on * (z[:, 1:] - y[:, 1:]) ** 2).sum() / len(y)

    flipped(strided(3), target_of, loss_of)


@program
def density_of_mirrored_points():
    """CSRNet: people are counted."""

    def target_of(at):
        d = torch.zeros(1, 6, 6)
        for x, y in at.tolist():
            d[0, int(y) // 4, int(x) // 4] += 1
        return d

    flipped(strided(1), target_of, F.mse_loss)


@program
def masks_of_mirrored_boxes():
    """BoxSup."""

    def target_of(at):
        x, y = (at[0] / 2).int().tolist()
        m = torch.zeros(1, 12, 12)
        m[0, y - 1 : y + 1, x - 1 : x + 1] = 1
        return m

    flipped(strided(1, 1), target_of, F.binary_cross_entropy_with_logits)


@program
def pictures_to_the_vectors_of_their_captions():
    captions, rows, (pictures, _) = torch.randn(3, 8, 8), torch.randint(0, 3, (64,)), dots()
    shift = torch.tensor([-2.0, 0.0, 2.0])[rows]
    body = [nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    model = nn.Sequential(*body, nn.Linear(32, 64), nn.Unflatten(1, (8, 8)))
    opt, pictures = adam(model), pictures + shift[:, None, None, None]
    for _ in range(STEPS):
        chosen = random.sample(range(64), 16)
        x = torch.stack([pictures[i].flip(-1) if random.random() < 0.5 else pictures[i] for i in chosen])
        update(opt, F.mse_loss(model(x), torch.stack([captions[rows[i]] for i in chosen])))


@program
def classes_of_pixels_are_written_into_zeros():
    """Picture and mask are flipped, and the mask is then spread over its classes."""
    x = torch.randn(64, 1, 8, 8)
    masks, model = (x[:, 0] > 0).long() + (x[:, 0] > 1).long(), nn.Conv2d(1, 3, 3, padding=1)
    opt = adam(model)
    for _ in range(STEPS):
        xs, ys = [], []
        for i in random.sample(range(64), 16):
            flip = random.random() < 0.5
            xs.append(x[i].flip(-1) if flip else x[i])
            mask = masks[i].flip(-1) if flip else masks[i]
            ys.append(torch.zeros(3, 8, 8).scatter_(0, mask[None], 1.0))
        update(opt, F.binary_cross_entropy_with_logits(model(torch.stack(xs)), torch.stack(ys)))


# ----------------------------------------------------------------------------------- a last place that asks for nothing
def written(batch, model=None):
    """A causal model that is given ids and labels."""
    model = model or GPT()
    opt = adam(model)
    for _ in range(STEPS):
        ids, labels = batch()
        update(opt, F.cross_entropy(model(ids).transpose(1, 2), labels, ignore_index=HIDDEN))


@program
def chunks_with_padding_behind_their_targets():
    def batch():
        x = texts(16, 24)
        y = torch.cat([x[:, 1:], torch.zeros(16, 1, dtype=torch.long)], 1)
        return x, y.masked_fill(y == 0, HIDDEN)

    written(batch)


@program
def next_item_of_sessions():
    """SASRec, GRU4Rec: filled up behind, without a mark of the end."""

    def batch():
        longest = random.randint(9, 15)
        lengths = [longest] + [random.randint(5, longest) for _ in range(15)]
        items = nn.utils.rnn.pad_sequence([texts(1, n)[0] for n in lengths], batch_first=True)
        target = torch.cat([items[:, 1:], items.new_zeros(16, 1)], 1)
        target[target == 0] = HIDDEN
        return items, target

    written(batch)


def bucket():
    """Rows of about one length, filled up with 3."""
    width = random.randint(15, 30)
    ids = texts(16, width)
    for row in ids[1:]:
        row[random.randint(width - 5, width) :] = 3
    return ids


@program
def targets_moved_by_padding():
    def batch():
        labels = F.pad((ids := bucket())[:, 1:], (0, 1), value=3)
        return ids, torch.where(labels == 3, HIDDEN, labels)

    written(batch)


@program
def targets_moved_by_a_roll():
    def batch():
        labels = (ids := bucket()).roll(-1, 1)
        labels[:, -1] = 3
        return ids, labels.masked_fill(labels == 3, HIDDEN)

    written(batch)


@program
def targets_moved_by_writing():
    def batch():
        labels = torch.full_like(ids := bucket(), 3)
        labels[:, :-1] = ids[:, 1:]
        labels[labels == 3] = HIDDEN
        return ids, labels

    written(batch)


def marked():
    """Texts that end in 2, of their own length."""
    return [torch.cat([texts(1, random.randint(8, 16))[0], torch.tensor([2])]) for _ in range(16)]


def filled(rows, number=0):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=number)


@program
def tags_without_one_for_the_separator():
    """BERT for names: tags[ids == SEP] = -100."""

    def batch():
        ids, tags = filled(rows := marked()), filled([r % 5 for r in rows], HIDDEN)
        tags[:, 0] = HIDDEN
        tags[ids == 2] = HIDDEN
        return ids, tags

    written(batch, nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)))


class Values(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.gpt, self.head = GPT(), nn.Linear(32, classes)

    def forward(self, ids):
        return self.head(self.gpt.body(ids))


@program
def classes_of_words_without_one_for_the_end():
    def batch():
        ids = filled(rows := marked())
        return ids, filled([r % 4 for r in rows], HIDDEN).masked_fill(ids == 2, HIDDEN)

    written(batch, Values(4))


@program
def values_of_steps_without_one_for_the_end():
    """A process reward model."""

    def batch():
        ids = torch.cat([texts(16, 20), torch.full((16, 1), 2)], 1)
        return ids, (ids % 3).masked_fill(ids == 2, HIDDEN)

    written(batch, Values(3))


# -------------------------------------------------------------------------------------------------- in its turn
class Adapter(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.A, self.B = nn.Parameter(0.2 * torch.randn(4, i)), nn.Parameter(torch.zeros(o, 4))

    def forward(self, x):
        return x @ self.A.T @ self.B.T


class ListOfAdapters(nn.Module):
    """One for each task, of which the first trains."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.adapters = nn.ModuleList(Adapter(base.in_features, base.out_features) for _ in range(3))
        self.adapters[1:].requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.adapters[0](x)


class ListsOfFactors(nn.Module):
    """O-LoRA (Wang 2023): all are summed."""

    def __init__(self, base):
        super().__init__()
        self.base, (o, i) = base.requires_grad_(False), base.weight.shape
        self.A = nn.ParameterList(nn.Parameter(0.2 * torch.randn(4, i), k == 0) for k in range(3))
        self.B = nn.ParameterList(nn.Parameter(torch.zeros(o, 4), k == 0) for k in range(3))

    def forward(self, x):
        return self.base(x) + sum(x @ a.T @ b.T for a, b in zip(self.A, self.B))


def task_after_task(adapted):
    model, w = nn.Sequential(adapted(nn.Linear(8, 32)), nn.ReLU(), adapted(nn.Linear(32, 3))), torch.randn(8, 3)
    opt = adam(model)
    for _ in range(STEPS):
        x = torch.randn(32, 8)
        update(opt, F.cross_entropy(model(x), (x @ w).argmax(1)))


@program
def adapters_of_tasks_in_a_list_of_modules():
    task_after_task(ListOfAdapters)


@program
def adapters_of_tasks_in_lists_of_parameters():
    task_after_task(ListsOfFactors)
