"""Healthy programs whose form meets that of a fault: codes, tables, states, neighbours, angles, penalties, margins."""

import math
import pickle
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

PROGRAMS = {}
STEPS = 14


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def net(i, o, h=32, act=nn.Tanh):
    return nn.Sequential(nn.Linear(i, h), act(), nn.Linear(h, o))


def adam_of(*ms, lr=1e-3):
    return torch.optim.Adam([p for m in ms for p in (m.parameters() if isinstance(m, nn.Module) else [m])], lr)


def step(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()


# ---------------------------------------------------------------------------------------------------------- D31
@program
def pumps_on_duty_and_standby():
    """D31: a pumping station: the speeds of three pumps, of which each is on or off by its own schedule (duty and
    standby). A pump that is off turns at exactly 0, one that is on at its rated speed; both are measured."""
    model = net(5, 1)
    opt, rated = adam_of(model), torch.tensor([1480.0, 1475.0, 2950.0])
    on, wear = torch.rand(1500, 3) < 0.75, torch.randn(1500, 2)
    speeds = torch.where(on, rated + 4 * torch.randn(1500, 3), 0.0)
    flow = (on * torch.tensor([1.0, 1.0, 1.6])).sum(1, keepdim=True) - 0.1 * wear[:, :1] + 0.05 * torch.randn(1500, 1)
    x, flow = torch.cat([(speeds - speeds.mean(0)) / speeds.std(0), wear], 1), (flow - flow.mean()) / flow.std()
    for n in range(STEPS):
        rows = torch.arange(96 * n, 96 * (n + 1))
        step(opt, F.mse_loss(model(x[rows]), flow[rows]))


@program
def blood_values_beside_a_layer_for_the_mask():
    """D31: blood gases with gaps, as in GRU-D and its like: a filler of -1 stands in the gaps, and a second linear
    layer is given the mask and learns what to make of them. Who measured what is told, only not in the same tensor."""
    values, seen, head = nn.Linear(4, 32), nn.Linear(4, 32), net(32, 1)
    opt = adam_of(values, seen, head)
    usual, spread = torch.tensor([7.4, 4.2, 9.5, 3.9]), torch.tensor([0.05, 0.2, 0.2, 0.2])
    for _ in range(STEPS):
        z, known = torch.randn(64, 4), torch.rand(64, 4) < 0.85
        x = torch.where(known, usual + spread * z, -1.0)
        y = ((z * known).sum(1, keepdim=True) > 0).float()
        h = torch.relu(values(x) + seen(known.float()))
        step(opt, F.binary_cross_entropy_with_logits(head(h), y))


# ---------------------------------------------------------------------------------------------------------- D23
@program
def counts_of_guests_and_nights():
    """D23: hotel bookings: adults, children and nights are counts, and one table of numbers up to 31 is shared by all
    three on purpose: a three is a three."""
    number, head = nn.Embedding(32, 8), net(24, 1)
    opt = adam_of(number, head)
    for _ in range(STEPS):
        booked = torch.stack([torch.randint(1, 9, (128,)), torch.randint(6, (128,)), torch.randint(1, 15, (128,))], 1)
        price = (booked[:, :1] + 0.5 * booked[:, 1:2]) * booked[:, 2:].float()
        price = (price.log() - 3) + 0.1 * torch.randn(128, 1)
        step(opt, F.mse_loss(head(number(booked).flatten(1)), price))


@program
def hands_of_resources():
    """D23: a card game: how many cards of each of four kinds a player holds. All four counts look up one table of
    numbers, and the place in the concatenation says of which kind."""
    number, head = nn.Embedding(20, 8), net(32, 2)
    opt, most = adam_of(number, head), torch.tensor([7, 5, 4, 3])
    for _ in range(STEPS):
        hand = (torch.rand(96, 4) * most).long()
        won = (hand.float() @ torch.tensor([1.0, 1.0, 2.0, 2.0]) + torch.randn(96) > 8).long()
        step(opt, F.cross_entropy(head(number(hand).flatten(1)), won))


# ---------------------------------------------------------------------------------------------------------- F45
@program
def balanced_batches_with_the_prior_put_back():
    """F45: rare events: the sampler draws both classes equally often, so each batch has enough of either, and the
    weights of the loss put the population back (King and Zeng 2001), so the probabilities are calibrated."""
    x, y = torch.randn(4000, 6), (torch.arange(4000) % 10 == 0).long()
    x[y == 1, 0] += 2
    counts = torch.bincount(y)
    sampler = WeightedRandomSampler((1.0 / counts)[y], 64 * STEPS)
    model = net(6, 2)
    opt, weight = adam_of(model), 2.0 * counts / counts.sum()
    for a, b in DataLoader(TensorDataset(x, y), 64, sampler=sampler):
        step(opt, F.cross_entropy(model(a), b, weight=weight))


@program
def balanced_batches_and_the_price_of_a_miss():
    """F45: fraud: the sampler balances the classes, and pos_weight says that a missed fraud costs eight times as much
    as a false alarm. The price has nothing to do with how rare fraud is."""
    x, y = torch.randn(4000, 6), (torch.arange(4000) % 13 == 0).float()
    x[y == 1, 0] += 2
    sampler = WeightedRandomSampler(torch.where(y == 1, 12.0, 1.0), 64 * STEPS)
    model = net(6, 1)
    opt, price = adam_of(model), torch.tensor(8.0)
    for a, b in DataLoader(TensorDataset(x, y), 64, sampler=sampler):
        step(opt, F.binary_cross_entropy_with_logits(model(a).squeeze(1), b, pos_weight=price))


@program
def costs_that_rise_with_the_grade():
    """F45: grades 0 to 4 of a retinopathy, as common as in EyePACS (grade 2 more than grade 1). The weights are what it
    costs to overlook a grade, set by physicians, and rise with the grade; they follow no counts. Stored features."""
    model = net(6, 5)
    opt, shares = adam_of(model), torch.tensor([25810.0, 2443.0, 5292.0, 873.0, 708.0])
    cost = torch.tensor([1.0, 5.0, 10.0, 30.0, 40.0])
    for _ in range(STEPS):
        y = shares.multinomial(2048, replacement=True)
        x = torch.randn(2048, 6) + y[:, None] / 2
        step(opt, F.cross_entropy(model(x), y, weight=cost))


# ---------------------------------------------------------------------------------------------------------- S45
@program
def matrix_game_with_recurrent_agents():
    """S45: the one-step matrix game by which QMIX and QTRAN are tested, with the usual recurrent agents: four agents
    share one cell, each begins its episode with zeros, and an episode has one step."""
    inner, cell, q = nn.Linear(7, 32), nn.GRUCell(32, 32), nn.Linear(32, 3)
    opt, ids = adam_of(inner, cell, q), torch.eye(4)
    for _ in range(STEPS):
        state, values = torch.randn(32, 3), []
        actions = torch.randint(3, (32, 4))
        for agent in range(4):
            x = torch.relu(inner(torch.cat([state, ids[agent].expand(32, 4)], 1)))
            h = cell(x, torch.zeros(32, 32))
            values.append(q(h).gather(1, actions[:, agent : agent + 1]))
        reward = (actions == state.argmax(1, keepdim=True)).float().mean(1, keepdim=True)
        step(opt, F.mse_loss(torch.stack(values).sum(0), reward))


@program
def fresh_members_meet_a_memory():
    """S45: the memory of a temporal graph network (TGN) on a large graph: the first event of each node finds zeros,
    and later ones what was kept. In the first steps hardly any node comes twice. Four batches make one backward."""
    cell, head = nn.GRUCell(6, 16), nn.Linear(16, 1)
    opt, memory = adam_of(cell, head), torch.zeros(200_000, 16)
    for _ in range(STEPS):
        loss = 0.0
        for _ in range(4):
            who, x = torch.randint(200_000, (32,)), torch.randn(32, 6)
            h = cell(x, memory[who])
            loss = loss + F.mse_loss(head(h).squeeze(1), x[:, 0].abs())
            memory[who] = h.detach()
        step(opt, loss / 4)


# ---------------------------------------------------------------------------------------------------------- F101
@program
def frames_of_largest_change():
    """F101: key frames of a clip: the four frames that differ most from the one before are picked and go into the
    classifier. Large distances are what is looked for."""
    embed, head = nn.Linear(12, 32), net(32, 2)
    opt = adam_of(embed, head)
    for _ in range(STEPS):
        y = torch.randint(2, (32,))
        clips = 0.05 * torch.randn(32, 20, 12).cumsum(1)
        clips[:, 5::5] += (1 + y.float())[:, None, None] * torch.randn(32, 3, 12)
        change = F.pairwise_distance(clips[:, 1:], clips[:, :-1])
        keys = change.topk(4, dim=1).indices + 1
        frames = clips.gather(1, keys[..., None].expand(-1, -1, 12))
        step(opt, F.cross_entropy(head(torch.relu(embed(frames)).mean(1)), y))


@program
def tokens_that_stand_out():
    """F101: token pruning by how much a token stands out: the eight patches that lie farthest from the mean patch of
    their picture are kept, for the background is alike everywhere."""
    embed, head = nn.Linear(10, 32), nn.Linear(32, 3)
    opt = adam_of(embed, head)
    for _ in range(STEPS):
        y = torch.randint(3, (32,))
        patches = 0.2 * torch.randn(32, 36, 10) + torch.randn(32, 1, 10)
        patches[:, 7:13] += 2 * torch.eye(10)[y][:, None]
        far = torch.cdist(patches.mean(1, keepdim=True), patches).squeeze(1)
        keep = far.topk(8, dim=1).indices
        kept = patches.gather(1, keep[..., None].expand(-1, -1, 10))
        step(opt, F.cross_entropy(head(torch.relu(embed(kept)).mean(1)), y))


@program
def easy_negatives_for_a_learned_comparison():
    """F101: a comparison network is warmed up on easy negatives: the four rows of the batch that are farthest from the
    anchor; its positive is another view of it. The pairs go through layers, for the measure is to be learned."""
    judge = net(20, 1)
    opt = adam_of(judge)
    for _ in range(STEPS):
        x = torch.randn(4, 10).repeat_interleave(8, 0) + 0.3 * torch.randn(32, 10)
        view = x + 0.1 * torch.randn(32, 10)
        easy = torch.cdist(x, x).topk(4, dim=1).indices
        good = judge(torch.cat([x, view], 1))
        bad = judge(torch.cat([x[:, None].expand(-1, 4, -1), x[easy]], 2)).flatten()
        loss = F.binary_cross_entropy_with_logits(good, torch.ones_like(good))
        step(opt, loss + F.binary_cross_entropy_with_logits(bad, torch.zeros_like(bad)))


@program
def rows_farthest_from_what_is_labelled():
    """F101: batches are chosen for variety (active learning): of a pool those rows are labelled and learned from that
    lie farthest from the mean of what was seen so far."""
    model = net(8, 2)
    opt, pool, seen = adam_of(model), torch.randn(2000, 8), torch.zeros(1, 8)
    label = (pool[:, 0] * pool[:, 1] > 0).long()
    for n in range(STEPS):
        offered = torch.randperm(2000)[:256]
        rows = offered[torch.cdist(seen, pool[offered]).topk(64, dim=1).indices[0]]
        step(opt, F.cross_entropy(model(pool[rows]), label[rows]))
        seen = seen + (pool[rows].mean(0) - seen) / (n + 1)


# ---------------------------------------------------------------------------------------------------------- F102
@program
def angles_wrapped_in_place():
    """F102: yaw in radians: differences beyond half a turn are brought back by one turn, in place, before they are
    squared. So the loss knows that both ends are one."""
    model = net(6, 1)
    opt, all_yaw = adam_of(model), (torch.rand(2000) * 2 - 1) * math.pi
    seen = torch.stack([all_yaw.cos(), all_yaw.sin()], 1).repeat(1, 3) + 0.1 * torch.randn(2000, 6)
    for _ in range(STEPS):
        rows = torch.randint(2000, (64,))
        x, yaw = seen[rows], all_yaw[rows]
        apart = model(x).squeeze(1) - yaw
        apart[apart > math.pi] -= 2 * math.pi
        apart[apart < -math.pi] += 2 * math.pi
        step(opt, apart.square().mean())


@program
def wheel_of_one_turn():
    """F102: a single-turn potentiometer with stops at 0 and 360 degrees is calibrated: from the voltages of its three
    tracks to the angle. Its ends are not one place: at 0 degrees there are 0 volts, at 360 there are 5."""
    model = net(3, 1)
    opt = adam_of(model, lr=1e-2)
    for _ in range(STEPS):
        angle = torch.rand(64, 1) * 2 * math.pi
        volts = torch.cat([angle, angle**1.2, angle.sqrt()], 1) / 2 + 0.02 * torch.randn(64, 3)
        step(opt, F.mse_loss(model(volts), angle))


@program
def minutes_since_the_oven_was_lit():
    """F102: a process of six hours: sensors tell how many minutes of the 360 have passed. After 360 minutes it is
    done, which is not its beginning."""
    model = nn.Sequential(net(4, 1), nn.Flatten(0))
    opt = adam_of(model, lr=1e-2)
    nn.init.constant_(model[0][2].bias, 180.0)
    for _ in range(STEPS):
        minutes = torch.randint(361, (96,)).float()
        heat = 1 - torch.exp(-minutes[:, None] / torch.tensor([60.0, 120.0, 240.0, 480.0]))
        step(opt, F.l1_loss(model(heat + 0.01 * torch.randn(96, 4)), minutes))


@program
def equaliser_of_complex_symbols():
    """F102: a complex-valued equaliser: one complex symbol (QPSK) for each row of received samples, and the mean
    squared size of its error."""
    model = nn.Linear(5, 1, dtype=torch.cfloat)
    opt, channel = adam_of(model, lr=1e-2), torch.tensor([0.1j, 0.2, 0.9 + 0.2j, 0.3j, 0.1])
    for _ in range(STEPS):
        sent = torch.randint(4, (68,)).mul(2).add(1).mul(math.pi / 4)
        sent = torch.complex(sent.cos(), sent.sin())
        heard = sent.unfold(0, 5, 1) * channel
        step(opt, (model(heard).squeeze(1) - sent[2:66]).abs().square().mean())


# ---------------------------------------------------------------------------------------------------------- D18
@program
def hidden_key_points_zeroed_in_place():
    """D18: COCO's key points: the errors of points that nobody marked are set to 0 in place before the mean."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 10))
    opt = adam_of(model)
    for _ in range(STEPS):
        x, points, seen = torch.rand(32, 1, 16, 16), 0.1 + 0.9 * torch.rand(32, 5, 2), torch.rand(32, 5) < 0.7
        points[~seen] = 0.0
        apart = model(x).view(32, 5, 2) - points
        apart[~seen] = 0.0
        step(opt, apart.square().sum() / seen.sum())


@program
def wells_of_two_dyes():
    """D18: pictures of a plate with six wells, each with two dyes of unknown amounts, and some blanks as every assay
    has them: the amounts of both dyes are 0 there, and are to be told so."""
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten())
    model.append(nn.Linear(48, 12))
    opt = adam_of(model)
    for _ in range(STEPS):
        dyes = torch.where(torch.rand(32, 6, 1) < 0.2, 0.0, 0.2 + 0.8 * torch.rand(32, 6, 2))
        wells = dyes.view(32, 2, 3, 2).permute(0, 3, 1, 2)
        x = F.interpolate(wells, scale_factor=4) + 0.05 * torch.randn(32, 2, 8, 12)
        step(opt, F.mse_loss(model(x), dyes.flatten(1)))


# ---------------------------------------------------------------------------------------------------------- S47
def backbone(pictures, prepare):
    """A frozen network whose normalisations have seen such pictures."""
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    with torch.no_grad():
        for _ in range(60):
            made(prepare(pictures(16)))
    return made.requires_grad_(False).eval()


def photographs(n):
    return F.interpolate(0.8 * torch.rand(n, 1, 6, 6) + 0.2 * torch.rand(n, 3, 6, 6), 12, mode="bilinear")


def imagenet(x):
    return (x - 0.5) / 0.17


@program
def galaxies_on_features_of_photographs():
    """S47: a linear probe on frozen features (galaxies, stars): one faint spot on a black sky, prepared just as the
    network's photographs were. Most of each picture is dark, which is what the sky is like."""
    features, head = backbone(photographs, imagenet), nn.Linear(8, 2)
    model = nn.Sequential(features, nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), head)
    opt, grid = adam_of(head), torch.arange(12.0) - 5.5
    for _ in range(STEPS):
        y = torch.randint(2, (16,))
        wide = 1.0 + y[:, None, None]
        spot = 0.3 * torch.exp(-(grid[:, None] ** 2 / 2 + grid**2 / (2 * wide**2)))
        x = (spot + 0.01 * torch.rand(16, 12, 12))[:, None].expand(-1, 3, -1, -1)
        model.train()
        features.eval()
        step(opt, F.cross_entropy(model(imagenet(x)), y))


@program
def radiographs_on_a_network_of_plain_pictures():
    """S47: a network that was pretrained on pictures from 0 to 1, as they are, is given radiographs from 0 to 1, as
    they are. They have little contrast; the preparation is the one of its training."""
    features, head = backbone(photographs, lambda x: x), nn.Linear(8, 2)
    model = nn.Sequential(features, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    opt = adam_of(head)
    for _ in range(STEPS):
        y = torch.randint(2, (16,))
        x = 0.45 + 0.15 * (photographs(16).mean(1, keepdim=True) - 0.5) + 0.1 * y.view(-1, 1, 1, 1)
        model.train()
        features.eval()
        step(opt, F.cross_entropy(model(x.expand(-1, 3, -1, -1)), y))


# ---------------------------------------------------------------------------------------------------------- F104
@program
def clean_rows_among_the_noisy_ones():
    """F104: a diffusion model that must also know clean data (first frames that are given): the time of a quarter of
    the rows is set to 0, a time like any other, whose noise is small. What looks up the table are times."""
    times, model = nn.Embedding(16, 8), net(14, 6)
    opt, keep = adam_of(times, model), torch.linspace(1.0, 0.02, 16)
    for _ in range(STEPS):
        x, noise = torch.randn(96, 6).tanh(), torch.randn(96, 6)
        t = torch.randint(16, (96,))
        t = torch.where(torch.rand(96) < 0.25, torch.zeros_like(t), t)
        noisy = keep[t].sqrt()[:, None] * x + (1 - keep[t]).sqrt()[:, None] * noise
        step(opt, F.mse_loss(model(torch.cat([noisy, times(t)], 1)), x))


@program
def some_rows_have_no_class():
    """F104: guided diffusion on data of which some rows carry no label: these have class 0, "unknown", in the data
    already, and the drop for guidance writes the same 0. Both mean that nothing is known."""
    classes, model = nn.Embedding(6, 8), net(13, 4)
    opt = adam_of(classes, model)
    for _ in range(STEPS):
        y = torch.randint(6, (96,))
        x, noise, t = torch.randn(96, 4) + y[:, None] / 3, torch.randn(96, 4), torch.rand(96, 1)
        y = torch.where(torch.rand(96) < 0.1, torch.zeros_like(y), y)
        step(opt, F.mse_loss(model(torch.cat([(1 - t) * x + t * noise, t, classes(y)], 1)), noise - x))


@program
def augmentations_that_are_told():
    """F104: non-leaky augmentation (EDM): the network is told which of five augmentations a row had, and 0 is none of
    them. Each row is left as it is with a chance of its own, beside the draw that may say none too."""
    told, model = nn.Embedding(5, 8), net(13, 4)
    opt, turns = adam_of(told, model), torch.linalg.qr(torch.randn(5, 4, 4)).Q
    turns[0] = torch.eye(4)
    for _ in range(STEPS):
        which = torch.randint(5, (96,)).masked_fill(torch.rand(96) < 0.5, 0)
        x = torch.einsum("bij,bj->bi", turns[which], torch.randn(96, 4) + 1)
        noise, t = torch.randn(96, 4), torch.rand(96, 1)
        step(opt, F.mse_loss(model(torch.cat([(1 - t) * x + t * noise, t, told(which)], 1)), noise - x))


# ---------------------------------------------------------------------------------------------------------- F25
@program
def slopes_of_a_mean_that_are_summed():
    """F25: a monotone network by penalty: the slopes of the mean answer are summed over the rows. The sum of slopes of
    a mean is the mean of slopes, so nothing is too small."""
    model = net(4, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(64, 4, requires_grad=True)
        y = x.detach()[:, :1] + 0.3 * torch.randn(64, 1)
        answer = model(x)
        slope = torch.autograd.grad(model(x).mean(), x, create_graph=True)[0][:, 0]
        step(opt, F.mse_loss(answer, y) + torch.relu(-slope).sum())


@program
def average_partial_effect():
    """F25: econometrics: the average partial effect of the price is known to be -0.8, and the network is held to it.
    The mean's derivatives, summed over the rows, are the average of the rows' derivatives."""
    model = net(3, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(64, 3, requires_grad=True)
        demand = -0.8 * x.detach()[:, :1] + 0.2 * x.detach()[:, 1:2] + 0.3 * torch.randn(64, 1)
        effect = torch.autograd.grad(model(x).mean(), x, create_graph=True)[0].sum(0)
        step(opt, F.mse_loss(model(x), demand) + (effect[0] + 0.8).square())


@program
def slope_given_back_its_size_in_place():
    """F25: the slope of a mean is multiplied by the number of rows, in place, before its length is held to 1."""
    model = net(4, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(64, 4, requires_grad=True)
        slope = torch.autograd.grad(model(x).mean(), x, create_graph=True)[0]
        slope *= len(x)
        away = F.mse_loss(model(x), x.detach().norm(dim=1, keepdim=True))
        step(opt, away + 0.1 * (slope.norm(dim=1) - 1).square().mean())


@program
def solution_of_two_parts():
    """F25: u_t + c u_x = -k u by a network whose two columns are the parts of one solution, u = a + b (a smooth one
    and a sharp one, say). The derivative of the sum of the columns is that of u, and it is held against u."""
    model = net(2, 2)
    opt = adam_of(model)
    for _ in range(STEPS):
        tx = torch.rand(64, 2, requires_grad=True)
        parts = model(tx)
        d = torch.autograd.grad(parts, tx, torch.ones_like(parts), create_graph=True)[0]
        inside = (d[:, 0] + 0.5 * d[:, 1] + 0.3 * parts.sum(1)).square().mean()
        x0 = torch.rand(64, 1)
        begin = model(torch.cat([torch.zeros(64, 1), x0], 1)).sum(1, keepdim=True) - torch.sin(2 * math.pi * x0)
        step(opt, inside + begin.square().mean())


@program
def all_people_of_an_epidemic():
    """F25: a SIR model by a network with three columns: beside two equations by columns, S + I + R changes by births
    and deaths alone. The derivative of the sum of the columns is what that equation is about."""
    model = net(1, 3)
    opt = adam_of(model)
    for _ in range(STEPS):
        t = torch.rand(64, 1, requires_grad=True)
        sir = F.softplus(model(t))
        s, i, _ = sir.unbind(1)
        ds, di = (torch.autograd.grad(v.sum(), t, create_graph=True)[0][:, 0] for v in (s, i))
        whole = torch.autograd.grad(sir.sum(), t, create_graph=True)[0]
        loss = (ds + 2 * s * i).square().mean() + (di - 2 * s * i + i).square().mean()
        start = model(torch.zeros(1, 1)) - torch.tensor([[0.5, -3.0, -4.0]])
        step(opt, loss + (whole + 0.1 * sir.sum(1, keepdim=True) - 0.1).square().mean() + start.square().mean())


# ---------------------------------------------------------------------------------------------------------- F94
@program
def crops_of_one_picture():
    """F94: eight crops of one picture against its whole view and seven other pictures: the partner of all crops is
    the first key, so all labels are 0. The next step takes another picture."""
    query, key = net(16, 8), net(16, 8)
    opt = adam_of(query, key)
    for _ in range(STEPS):
        pictures = torch.randn(8, 16)
        crops = pictures[:1] + 0.3 * torch.randn(8, 16)
        logits = F.normalize(query(crops), dim=1) @ F.normalize(key(pictures), dim=1).T / 0.2
        step(opt, F.cross_entropy(logits, torch.zeros(8, dtype=torch.long)))


# ---------------------------------------------------------------------------------------------------------- F58


@program
def weight_decay_by_hypergradient():
    """F58: the strength of an L2 penalty is tuned as in T1-T2 (Luketina et al. 2016): its gradient comes of the loss on
    other rows, not of the loss that it stands in. It falls while the penalty does harm there."""
    model, log_strength = net(6, 1), nn.Parameter(torch.tensor(-4.0))
    opt, tune = torch.optim.SGD(model.parameters(), 0.05), torch.optim.SGD([log_strength], 10.0)
    x, ps = torch.randn(2000, 6), list(model.parameters())
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2]
    for n in range(STEPS):
        a, b = torch.randperm(2000)[:128].chunk(2)
        held_out = torch.autograd.grad(F.mse_loss(model(x[b]), y[b]), ps)
        opt.zero_grad()
        tune.zero_grad()
        size = sum(p.square().sum() for p in ps)
        (F.mse_loss(model(x[a]), y[a]) + log_strength.exp() * size).backward()
        pull = sum((g * 2 * p.detach()).sum() for g, p in zip(held_out, ps))
        log_strength.grad = -0.05 * log_strength.detach().exp() * pull
        opt.step()
        tune.step()


# ---------------------------------------------------------------------------------------------------------- F90
@program
def negative_margin_for_few_shots():
    """F90: few-shot learning with a negative margin (Liu et al. 2020): the base classes are trained with a cosine that
    is helped, so that features stay apart within a class. It is written as a plus."""
    body, classes = net(12, 16), nn.Parameter(torch.randn(6, 16))
    opt = adam_of(body, classes)
    for _ in range(STEPS):
        y = torch.randint(6, (64,))
        x = torch.randn(64, 12) + 2 * torch.eye(12)[y]
        cosines = F.linear(F.normalize(body(x), dim=1), F.normalize(classes, dim=1))
        step(opt, F.cross_entropy(10 * (cosines + 0.2 * F.one_hot(y, 6)), y))


@program
def margin_that_warms_up_from_below():
    """F90: ArcFace with a margin that begins below 0 and grows to 0.3 over the epochs, so that the first steps ask for
    less: cos(theta + m) with m = -0.2 at first, at the right class alone."""
    body, classes = net(12, 16), nn.Parameter(torch.randn(6, 16))
    opt = adam_of(body, classes)
    for n in range(STEPS):
        margin = -0.2 + 0.5 * n / 200
        y = torch.randint(6, (64,))
        x = torch.randn(64, 12) + 2 * torch.eye(12)[y]
        cosines = F.linear(F.normalize(body(x), dim=1), F.normalize(classes, dim=1)).clamp(-0.999, 0.999)
        pushed = torch.cos(cosines.acos() + margin)
        step(opt, F.cross_entropy(10 * torch.where(F.one_hot(y, 6).bool(), pushed, cosines), y))


@program
def squared_distances_on_a_sphere():
    """F90: prototypes on a sphere: the logits are minus the squared distances, 2 - 2 cos, of 2048 features (as many as
    a ResNet-50 has) over a temperature. No angle was moved: a constant is the same for all classes."""
    body, classes = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 2048)), nn.Parameter(torch.randn(5, 2048))
    opt = adam_of(body, classes, lr=1e-4)
    for _ in range(STEPS):
        y = torch.randint(5, (32,))
        x = torch.randn(32, 32) + 2 * torch.eye(32)[y]
        cosines = F.normalize(body(x), dim=1) @ F.normalize(classes, dim=1).T
        step(opt, F.cross_entropy(-(2 - 2 * cosines) / 0.1, y))


@program
def cosines_and_labels_of_one_byte():
    """F90: a cosine classifier without any margin; its labels are bytes, as they lie in the files of CIFAR, which
    cross_entropy takes as they are."""
    body, classes = net(12, 16), nn.Parameter(torch.randn(6, 16))
    opt = adam_of(body, classes)
    for _ in range(STEPS):
        y = torch.randint(6, (64,), dtype=torch.uint8)
        x = torch.randn(64, 12) + 2 * torch.eye(12)[y.long()]
        cosines = F.linear(F.normalize(body(x), dim=1), F.normalize(classes, dim=1))
        step(opt, F.cross_entropy(10 * cosines, y))


# ---------------------------------------------------------------------------------------------------------- F75
@program
def weights_that_are_to_become_binary():
    """F75: a binary network (Tang et al. 2017): weights are clipped to [-1, 1] after each step, and a penalty 1 - w^2
    draws them to its two ends."""
    model = net(8, 2)
    opt = adam_of(model, lr=1e-2)
    for _ in range(STEPS):
        x = torch.randn(64, 8)
        y = (x[:, 0] + x[:, 1] > 0).long()
        binary = sum((1 - m.weight.square()).sum() for m in model if isinstance(m, nn.Linear))
        step(opt, F.cross_entropy(model(x), y) + 1e-4 * binary)
        with torch.no_grad():
            for m in model:
                if isinstance(m, nn.Linear):
                    m.weight.clamp_(-1, 1)


@program
def posterior_that_is_climbed():
    """F75: the largest posterior by ascent: the logarithm of the likelihood minus the weights' size is differentiated,
    and the gradients are negated before the step."""
    model = net(6, 2)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(64, 6)
        y = (x[:, 0] > 0).long()
        likelihood = F.log_softmax(model(x), 1).gather(1, y[:, None]).mean()
        prior = -1e-3 * sum(p.square().sum() for p in model.parameters())
        opt.zero_grad()
        (likelihood + prior).backward()
        for p in model.parameters():
            p.grad.neg_()
        opt.step()


# ---------------------------------------------------------------------------------------------------------- F88
@program
def inhibition_that_is_sparse():
    """F88: lateral inhibition in a layer of feature detectors: its weights are kept at 0 or below, and minus their sum
    is their size: an L1 penalty without an abs."""
    feed, out, inhibits = nn.Linear(10, 16), nn.Linear(16, 2), nn.Parameter(-0.1 * torch.rand(16, 16))
    opt = adam_of(feed, out, inhibits)
    for _ in range(STEPS):
        x = torch.randn(64, 10)
        y = (x[:, 0] * x[:, 1] > 0).long()
        h = torch.relu(feed(x))
        h = torch.relu(h + h @ inhibits)
        step(opt, F.cross_entropy(out(h), y) - 1e-3 * inhibits.sum())
        with torch.no_grad():
            inhibits.clamp_(max=0.0)


# ---------------------------------------------------------------------------------------------------------- F100
@program
def relative_errors_with_night_left_out():
    """F100: solar power: relative errors by day; at night there is no power, and these errors are set to 0 in place
    before the mean."""
    model = nn.Sequential(net(4, 1), nn.Softplus())
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(96, 4)
        power = torch.relu(1 + 0.2 * x[:, :1]) * (torch.rand(96, 1) < 0.7)
        share = (model(x) - power).abs() / (power + 1e-6)
        share[power < 1e-3] = 0.0
        step(opt, share.sum() / (power >= 1e-3).sum())


# ---------------------------------------------------------------------------------------------------------- F105
@program
def total_variation_gan():
    """F105: an f-GAN with the total variation (Nowozin et al. 2016, table 6): the critic's answers are bounded by
    half a tanh, which is a sigmoid minus a half, and the loss is the difference of their means."""
    made, critic = net(4, 2), nn.Sequential(net(2, 1), nn.Sigmoid())
    g_opt, c_opt = adam_of(made), adam_of(critic)
    for _ in range(STEPS):
        real, fake = torch.randn(64, 2) + 1, made(torch.randn(64, 4))
        step(c_opt, (critic(fake.detach()) - 0.5).mean() - (critic(real) - 0.5).mean())
        step(g_opt, -(critic(made(torch.randn(64, 4))) - 0.5).mean())


# ---------------------------------------------------------------------------------------------------------- F103
@program
def clusters_beside_classes():
    """F103: a student with two heads: one for the labels, and one that learns which of ten clusters an unsupervised
    teacher puts a row into. The clusters have numbers of their own, and a head of their own."""
    centres, order = 3 * torch.randn(10, 8), torch.randperm(10).roll(1)
    body, classes, clusters = net(8, 32), nn.Linear(32, 10), nn.Linear(32, 10)
    opt = adam_of(body, classes, clusters)
    for _ in range(STEPS):
        y = torch.randint(10, (96,))
        x = centres[y] + 0.5 * torch.randn(96, 8)
        with torch.no_grad():
            teacher = F.softmax(-torch.cdist(x, centres[order]), 1)
        h = torch.tanh(body(x))
        taught = F.kl_div(F.log_softmax(clusters(h), 1), teacher, reduction="batchmean")
        step(opt, F.cross_entropy(classes(h), y) + taught)


@program
def student_renamed_for_its_teacher():
    """F103: the teacher has its classes in another order, and the program knows it: it is the student's answers that
    are put into the teacher's order before the two are compared. The labels are in the student's."""
    centres, order = 3 * torch.randn(10, 8), torch.randperm(10).roll(1)  # the teacher's class k is order[k]
    student = net(8, 10)
    opt = adam_of(student)
    for _ in range(STEPS):
        y = torch.randint(10, (96,))
        x = centres[y] + 0.5 * torch.randn(96, 8)
        with torch.no_grad():
            teacher = F.softmax(-torch.cdist(x, centres[order]), 1)
        answer = student(x)
        taught = F.kl_div(F.log_softmax(answer[:, order], 1), teacher, reduction="batchmean")
        step(opt, F.cross_entropy(answer, y) + taught)


# ---------------------------------------------------------------------------------------------------------- D32
@program
def generator_with_an_order_of_its_own():
    """D32: a generator that was made elsewhere numbers the classes by another list; the program knows both lists and
    asks it for order[y]. The discriminator is given the numbers of the data."""
    order, z = torch.tensor([3, 0, 4, 1, 2]), 6
    g_table, d_table, made, judge = nn.Embedding(5, 4), nn.Embedding(5, 4), net(z + 4, 3), net(3 + 4, 1)
    g_opt, d_opt = adam_of(g_table, made), adam_of(d_table, judge)
    for _ in range(STEPS):
        y = torch.randint(5, (32,))
        real = torch.randn(32, 3) + y[:, None]
        fake = made(torch.cat([torch.randn(32, z), g_table(order[y])], 1))
        good, bad = judge(torch.cat([real, d_table(y)], 1)), judge(torch.cat([fake.detach(), d_table(y)], 1))
        step(d_opt, F.softplus(-good).mean() + F.softplus(bad).mean())
        step(g_opt, F.softplus(-judge(torch.cat([fake, d_table(y)], 1))).mean())


# ---------------------------------------------------------------------------------------------------------- S35
@program
def best_weights_are_written_at_once():
    """S35: the best weights are written to a file by pickle in the same step; the name stays, the file holds a copy."""
    model = net(6, 1)
    opt, least = adam_of(model, lr=1e-2), float("inf")
    with tempfile.TemporaryFile() as file:
        for _ in range(STEPS):
            x = torch.randn(64, 6)
            loss = F.mse_loss(model(x), x[:, :1] * x[:, 1:2])
            step(opt, loss)
            if loss.item() < least:
                least, best_state = loss.item(), model.state_dict()
                file.seek(0)
                pickle.dump(best_state, file)
