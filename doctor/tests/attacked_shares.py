"""Healthy programs whose form meets that of a fault: shares, maxima, groups, flips, columns."""

import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Normal
from torch.utils.data import DataLoader, TensorDataset

PROGRAMS = {}
STEPS = 14


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def net(i, o, h=32, act=nn.Tanh):
    return nn.Sequential(nn.Linear(i, h), act(), nn.Linear(h, o))


def convs(i, o, h=12):
    return nn.Sequential(nn.Conv2d(i, h, 3, padding=1), nn.ReLU(), nn.Conv2d(h, o, 3, padding=1))


def adam_of(*ms, lr=1e-3):
    return torch.optim.Adam([p for m in ms for p in (m.parameters() if isinstance(m, nn.Module) else [m])], lr)


def step(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()


def spots(n, size=16, width=2.0):
    """Pictures (n, 1, size, size) of one bright spot on dark grey, and its place (n, 2) as x and y from 0 to 1."""
    at = torch.rand(n, 2) * 0.8 + 0.1
    grid = torch.arange(size) + 0.5
    across = (-((grid - at[:, :1] * size) ** 2) / (2 * width**2)).exp()
    down = (-((grid - at[:, 1:] * size) ** 2) / (2 * width**2)).exp()
    return (down[:, :, None] * across[:, None] + 0.05 * torch.randn(n, size, size))[:, None], at


# ---------------------------------------------------------------------------------------------------------- F39
@program
def greedy_player_learns_as_it_acts():
    """F39: online Q-learning of a vectorised game without exploration but for the noise of the game: the largest value
    and its action come of one max, that action is taken at once, and its reward is what the value is asked for. The
    largest value is the value of the action that was taken."""
    q, gamma = net(4, 3), 0.9
    opt, s = adam_of(q), torch.randn(32, 4)
    for _ in range(STEPS):
        value, action = q(s).max(1)
        after = 0.8 * s + 0.5 * torch.randn(32, 4) + 0.3 * (action - 1).float()[:, None]
        reward = -after[:, 0].abs()
        with torch.no_grad():
            target = reward + gamma * q(after).max(1).values
        step(opt, F.mse_loss(value, target))
        s = after


@program
def bags_with_a_mean_teacher():
    """F39: multiple-instance learning with a mean teacher: a bag's score is the largest of its instances', in the
    student and in the teacher, and labelled bags have a BCE beside it. Nothing here is an action."""
    student = net(8, 1)
    teacher, opt = copy.deepcopy(student), adam_of(student)
    for _ in range(STEPS):
        x, y = torch.randn(24, 10, 8), torch.randint(2, (24,)).float()
        x[y == 1, 0, 0] += 3
        score = student(x + 0.1 * torch.randn_like(x)).squeeze(-1).max(1).values
        with torch.no_grad():
            asked = teacher(x + 0.1 * torch.randn_like(x)).squeeze(-1).max(1).values
        step(opt, F.binary_cross_entropy_with_logits(score[:12], y[:12]) + F.mse_loss(score, asked))
        with torch.no_grad():
            for t, p in zip(teacher.parameters(), student.parameters()):
                t.lerp_(p, 0.01)


@program
def episode_through_both_networks_at_once():
    """F39: the whole episode s_0 ... s_T goes through the network and the target network in one call each, and the
    values of the next states are rows 1 to T of the latter. The shift is done after the networks (as in R2D2)."""
    q = net(4, 3)
    target, opt = copy.deepcopy(q), adam_of(q)
    for n in range(STEPS):
        states, s = [], torch.randn(4)
        for _ in range(33):
            states.append(s)
            s = 0.8 * s + 0.5 * torch.randn(4)
        states, actions = torch.stack(states), torch.randint(3, (32,))
        rewards = (actions == (states[:-1, 0] > 0).long()).float()
        values = q(states)[:-1].gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            wanted = rewards + 0.95 * target(states)[1:].max(1).values
        step(opt, F.smooth_l1_loss(values, wanted))
        if n % 100 == 99:
            target.load_state_dict(q.state_dict())


@program
def soft_q_learning_with_its_own_logsumexp():
    """F39: soft Q-learning with a logsumexp written by hand: the largest number of all is taken from the exponents and
    added again after the logarithm, which changes nothing but the range of the exponentials."""
    q = net(4, 3)
    target, opt = copy.deepcopy(q), adam_of(q)
    for _ in range(STEPS):
        s, a = torch.randn(32, 4), torch.randint(3, (32,))
        after, r = s + 0.3 * torch.randn(32, 4), (a == (s[:, 0] > 0).long()).float()
        with torch.no_grad():
            v = target(after)
            top = v.max()
            soft = (v - top).exp().sum(1).log() + top
            wanted = r + 0.95 * soft
        step(opt, F.mse_loss(q(s).gather(1, a[:, None]).squeeze(1), wanted))
        with torch.no_grad():
            for t, p in zip(target.parameters(), q.parameters()):
                t.lerp_(p, 0.005)


@program
def state_values_of_frozen_action_values():
    """F39: a network of state values is distilled from finished action values: V(s) = max_a Q(s, a) minus what being in
    s costs, which is known. Both are values of the same state, as they must be."""
    q, v = net(4, 3), net(4, 1)
    q.requires_grad_(False)
    opt = adam_of(v)
    for _ in range(STEPS):
        s = torch.randn(64, 4)
        cost = 0.1 * s.pow(2).sum(1)
        with torch.no_grad():
            wanted = q(s).max(1).values - cost
            wanted = wanted + 0.01 * s[:, 0]
        step(opt, F.mse_loss(v(s).squeeze(1), wanted))


# ---------------------------------------------------------------------------------------------------------- F28
@program
def dqn_with_a_copy_that_acts():
    """F28: DQN with a target network that is copied every 500 steps. Besides, an actor plays with its own copy of the
    network, which is brought up to date after each step (as in Ape-X). The acting copy is no target."""
    q = net(4, 3)
    target, actor, opt = copy.deepcopy(q).requires_grad_(False), copy.deepcopy(q).requires_grad_(False), adam_of(q)
    for n in range(STEPS):
        s = torch.randn(32, 4)
        with torch.no_grad():
            a = torch.where(torch.rand(32) < 0.1, torch.randint(3, (32,)), actor(s).argmax(1))
            after, r = s + 0.3 * torch.randn(32, 4), (a == (s[:, 0] > 0).long()).float()
            wanted = r + 0.95 * target(after).max(1).values
        step(opt, F.smooth_l1_loss(q(s).gather(1, a[:, None]).squeeze(1), wanted))
        actor.load_state_dict(q.state_dict())
        if n % 500 == 499:
            target.load_state_dict(q.state_dict())


# ---------------------------------------------------------------------------------------------------------- F72
@program
def soft_labels_of_ordered_classes():
    """F72: SORD (Diaz and Marathe, 2019): the soft label of an ordered class is a softmax of minus the distances to all
    classes, divided by a width of 2. These are labels, and no teacher's logits."""
    model = net(8, 10)
    opt, w = adam_of(model), torch.randn(8)
    for _ in range(STEPS):
        x = torch.randn(64, 8)
        y = (x @ w).add(5).round().clamp(0, 9)
        far = (torch.arange(10.0) - y[:, None]).abs()
        soft = F.softmax(-far / 2.0, dim=1)
        step(opt, F.kl_div(F.log_softmax(model(x), 1), soft, reduction="batchmean"))


@program
def mpo_with_few_actions():
    """F72: MPO: the improved policy is a softmax of the action values divided by a temperature of 2 (times the policy
    of before), and the policy is asked for it as it is. The numbers that are divided are returns, and no logits."""
    policy, critic = net(4, 5), net(4, 5)
    opt, critic_opt = adam_of(policy), adam_of(critic)
    for _ in range(STEPS):
        s, a = torch.randn(64, 4), torch.randint(5, (64,))
        r = 10 * (a == (s[:, 0] * 2 + 2).round().clamp(0, 4).long()).float()
        step(critic_opt, F.mse_loss(critic(s).gather(1, a[:, None]).squeeze(1), r))
        with torch.no_grad():
            better = F.softmax(critic(s) / 2.0, dim=1)
        step(opt, -(better * F.log_softmax(policy(s), 1)).sum(1).mean())


@program
def attention_is_distilled():
    """F72: a student is asked for its teacher's attention (MiniLM). The teacher's queries are divided by sqrt(d) before
    the product and the student's scores after it, which is the same."""
    d = 16
    tq, tk, sq, sk = (nn.Linear(12, d) for _ in range(4))
    for m in (tq, tk):
        m.requires_grad_(False)
    opt = adam_of(sq, sk)
    for _ in range(STEPS):
        x = torch.randn(8, 10, 12)
        with torch.no_grad():
            there = F.softmax((tq(x) * d**-0.5) @ tk(x).transpose(1, 2), -1)
        here = F.log_softmax(sq(x) @ sk(x).transpose(1, 2) / math.sqrt(d), -1)
        step(opt, F.kl_div(here, there, reduction="batchmean"))


@program
def explored_at_a_temperature():
    """F72: a policy explores at a temperature of 2, and its gradient is corrected by the ratio of the policy itself to
    the one that acted. Both logarithms of shares are right as they are."""
    policy = net(4, 3)
    opt = adam_of(policy)
    for _ in range(STEPS):
        s = torch.randn(64, 4)
        with torch.no_grad():
            acted = F.log_softmax(policy(s) / 2.0, 1)
            a = Categorical(logits=acted).sample()
        r = (a == (s[:, 0] > 0).long()).float() - 0.4
        ratio = (F.log_softmax(policy(s), 1) - acted).exp().gather(1, a[:, None]).squeeze(1)
        step(opt, -(ratio.clamp(max=5) * r).mean())


# ---------------------------------------------------------------------------------------------------------- F80
@program
def thin_plate_splines():
    """F80: a network of thin-plate splines, r**2 * log(r), whose centres learn, on a domain of diameter 1. The distance
    r lies between 0 and 1 and is no probability."""
    centres, out = nn.Parameter(torch.rand(20, 2) * 0.7), nn.Linear(20, 1)
    opt = adam_of(centres, out, lr=1e-2)
    for _ in range(STEPS):
        x = torch.rand(64, 2) * 0.7
        y = torch.sin(6 * x[:, 0]) * torch.cos(5 * x[:, 1])
        r = torch.cdist(x, centres) + 1e-6
        basis = r.pow(2) * torch.log(r)
        step(opt, F.mse_loss(out(basis).squeeze(1), y))


@program
def bending_plate_by_point_loads():
    """F80: the deflection of a thin plate is a sum of r**2 log r over point loads (the fundamental solution of the
    biharmonic equation), whose places and sizes are sought from measured deflections."""
    true_at, true_load = torch.rand(5, 2) * 0.6, torch.randn(5)
    at, load = nn.Parameter(torch.rand(5, 2) * 0.6), nn.Parameter(torch.zeros(5) + 0.1)
    opt = adam_of(at, load, lr=1e-2)
    for _ in range(STEPS):
        x = torch.rand(80, 2) * 0.6
        far = (x[:, None] - true_at).norm(dim=-1)
        measured = (true_load * far**2 * far.log()).sum(1) + 0.001 * torch.randn(80)
        r = ((x[:, None] - at) ** 2).sum(-1).add(1e-10).sqrt()
        green = r**2 * r.log()
        step(opt, F.mse_loss(green @ load, measured))


# ---------------------------------------------------------------------------------------------------------- F15
@program
def padding_with_a_class_weight_of_zero():
    """F15: a tagger whose pad tag is 0, a class of its own with a weight of 0 in the cross-entropy. Places with it count
    for nothing in the sum and in what the sum is divided by."""
    table, head = nn.Embedding(100, 16), nn.Linear(16, 6)
    opt = adam_of(table, head, lr=1e-2)
    weight = torch.ones(6)
    weight[0] = 0
    for _ in range(STEPS):
        ids = torch.randint(1, 100, (16, 20))
        tags = ids % 5 + 1
        past = torch.arange(20) >= torch.randint(8, 20, (16, 1))
        ids[past], tags[past] = 0, 0
        step(opt, F.cross_entropy(head(table(ids)).reshape(-1, 6), tags.reshape(-1), weight=weight))


@program
def roman_numerals_to_digits():
    """F15: a network reads a Roman numeral of up to 9 letters, and writes 9 digits at once, where 10 stands for
    nothing. How many digits there are is to be learned, so the places after the last digit count, as everywhere."""
    table, body, head = nn.Embedding(8, 16), nn.GRU(16, 32, batch_first=True, bidirectional=True), nn.Linear(64, 11)
    opt = adam_of(table, body, head, lr=1e-2)
    for _ in range(STEPS):
        ids, wanted = torch.zeros(32, 9, dtype=torch.long), torch.full((32, 9), 10)
        for row, number in enumerate(torch.randint(1, 89, (32,)).tolist()):
            left, letters = number, []
            for size, text in ((50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
                while left >= size:
                    letters += ["-IVXLCDM".index(c) for c in text]
                    left -= size
            digits = [int(c) for c in str(number)]
            ids[row, : len(letters)] = torch.tensor(letters[:9])
            wanted[row, : len(digits)] = torch.tensor(digits)
        wide = wanted.clone()
        step(opt, F.cross_entropy(head(body(table(ids))[0]).flatten(0, 1), wide.flatten()))


@program
def evidence_in_the_passage_of_a_pair():
    """F15: a pair encoder tags the words of a passage that answer the question after it. The table of segments has a row
    for passage (0) and one for question (1), so rows end in runs of 1 that are words and no padding; no word of a
    question is evidence, and the model is asked to say so."""
    words, segments = nn.Embedding(200, 16), nn.Embedding(2, 16)
    body, head = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 5)
    opt = adam_of(words, segments, body, head)
    for _ in range(STEPS):
        ids = torch.randint(200, (16, 24))
        question = (torch.arange(24) >= torch.randint(14, 20, (16, 1))).long()
        tags = (ids % 4 + 1) * ((ids % 2 == ids[:, -1:] % 2) & (question == 0))  # 0, or one of four roles
        answer = head(body(words(ids) + segments(question)))
        step(opt, F.cross_entropy(answer.reshape(-1, 5), tags.reshape(-1)))


# ---------------------------------------------------------------------------------------------------------- D18
@program
def flow_of_a_still_camera():
    """D18: optical flow (two numbers for each pixel) and a mask of what moves, from a camera that stands still. Where
    nothing moves the flow is 0, measured and true, and the network has to answer so."""
    model = convs(2, 3)
    opt = adam_of(model)
    for _ in range(STEPS):
        picture, at = spots(16)
        moving = (picture[:, 0] > 0.4).long()
        move = torch.randint(1, 3, (16, 2, 1, 1)).float() + 0.1 * torch.rand(16, 2, 1, 1)
        flow = move * moving[:, None]
        later = torch.stack([p.roll((int(m[1]), int(m[0])), (-2, -1)) for p, m in zip(picture, move)])
        answer = model(torch.cat([picture, later], 1))
        loss = F.binary_cross_entropy_with_logits(answer[:, 0], moving.float())
        step(opt, loss + F.l1_loss(answer[:, 1:], flow))


@program
def forces_at_the_feet():
    """D18: whether each of 8 contact points of a robot touches the ground, and the force there (x, y, z). Without a
    contact the force is 0 by physics, and a model that answers anything else breaks the balance of forces."""
    touches, force = net(12, 8), net(12, 24)
    opt, w = adam_of(touches, force), torch.randn(12, 8)
    for _ in range(STEPS):
        state = torch.randn(64, 12)
        contact = (state @ w > 3).long()
        wanted = contact[..., None] * torch.stack([state[:, :8] * 0.2, state[:, 4:] * 0.2, 5 + state[:, :8]], -1)
        loss = F.binary_cross_entropy_with_logits(touches(state), contact.float())
        step(opt, loss + 0.1 * F.mse_loss(force(state).view(64, 8, 3), wanted))


@program
def premultiplied_sprites():
    """D18: an autoencoder of sprites with an alpha channel, premultiplied as for blending: colour is 0 where nothing is
    drawn. Alpha is asked by a BCE and the colours by an L1, over the whole picture, as published renderers do."""
    encoder, decoder = nn.Sequential(nn.Flatten(), nn.Linear(4 * 256, 32), nn.ReLU()), nn.Linear(32, 4 * 256)
    opt = adam_of(encoder, decoder)
    for _ in range(STEPS):
        picture, _ = spots(32, 16, 2.5)
        alpha = (picture > 0.4).float()
        colour = alpha * (0.2 + 0.8 * torch.rand(32, 3, 1, 1))
        answer = decoder(encoder(torch.cat([colour, alpha], 1))).view(32, 4, 16, 16)
        loss = F.binary_cross_entropy_with_logits(answer[:, 3:], alpha)
        step(opt, loss + F.l1_loss(answer[:, :3].sigmoid(), colour))


# ---------------------------------------------------------------------------------------------------------- F30
@program
def frames_flattened_one_by_one():
    """F30: a clip (B, 16, 32, 32) of grey frames becomes 16 rows of 1024 numbers, a frame each, for a GRU. Only the
    lines of one frame are joined; each row is one frame, whole."""
    body, head = nn.GRU(1024, 32, batch_first=True), nn.Linear(32, 2)
    opt = adam_of(body, head)
    for _ in range(STEPS):
        y = torch.randint(2, (8,))
        clip = 0.3 * torch.randn(8, 16, 32, 32) + (y * 2 - 1)[:, None, None, None] * torch.linspace(-1, 1, 16)[:, None, None]
        step(opt, F.cross_entropy(head(body(clip.view(8, 16, 32 * 32))[0][:, -1]), y))


@program
def each_channel_by_its_own_mean():
    """F30: pictures of four bands (red, green, blue, near infrared) are normalised, each band of each picture by its own
    mean and spread, over `x.view(B, 4, -1)`."""
    model = nn.Sequential(convs(4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.randint(3, (16,))
        x = torch.randn(16, 4, 32, 32) * torch.rand(16, 4, 1, 1) + torch.rand(16, 4, 1, 1)
        x[torch.arange(16), y, :16] *= 3
        flat = x.view(16, 4, -1)
        x = (x - flat.mean(2)[..., None, None]) / flat.std(2)[..., None, None]
        step(opt, F.cross_entropy(model(x), y))


@program
def decoder_that_begins_with_a_convolution():
    """F30: a decoder whose first layer is a 1x1 convolution of the code (B, 16, 1, 1), laid out as 4x4 pixels of 8
    channels. Of a map of one pixel nothing can be taken apart: it is a linear layer and an unflatten."""
    first, rest = nn.Conv2d(16, 128, 1), nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, 16))
    opt = adam_of(first, rest, encoder)
    for _ in range(STEPS):
        picture, _ = spots(16)
        code = encoder(picture)[:, :, None, None]
        step(opt, F.mse_loss(rest(first(code).view(16, 8, 4, 4)), picture))


@program
def patches_with_their_pixels_apart():
    """F30: latents (B, 4, 16, 16) are cut into 4x4 squares rightly, first as (B, 16, 16, 4), squares by pixels by
    channels, to which a place for each pixel is added, and then joined to 64 numbers a square."""
    embed, body, head = nn.Linear(64, 32), nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), nn.Linear(32, 3)
    opt, places = adam_of(embed, body, head), torch.linspace(-0.1, 0.1, 16)[:, None]
    for _ in range(STEPS):
        y = torch.randint(3, (16,))
        x = torch.randn(16, 4, 16, 16)
        x[torch.arange(16), y] *= 3
        squares = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).flatten(1, 2).flatten(2, 3) + places
        step(opt, F.cross_entropy(head(body(embed(squares.reshape(16, 16, 64))).mean(1)), y))


# ---------------------------------------------------------------------------------------------------------- N9
@program
def cross_validation_with_a_cosine_each():
    """N9: three folds, each with a new model, a new optimizer and a new CosineAnnealingLR over all of its steps. The
    rate starts anew because the training does."""
    x = torch.randn(90, 6)
    y = (x[:, 0] + x[:, 1] > 0).long()
    for fold in range(3):
        model = net(6, 2)
        opt = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=30)
        train = torch.cat([torch.arange(0, fold * 30), torch.arange((fold + 1) * 30, 90)])
        for _ in range(30):
            pick = train[torch.randperm(60)[:20]]
            step(opt, F.cross_entropy(model(x[pick]), y[pick]))
            schedule.step()


@program
def snapshots_at_the_low_points():
    """N9: snapshots (Huang et al., 2017; FGE): the rate of a CosineAnnealingLR goes down and up on purpose, and the
    model is kept each time it is at its lowest, for an ensemble."""
    x = torch.randn(200, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = net(6, 2)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    cycle, kept = 6, []
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=cycle, eta_min=1e-3)
    for n in range(1, 6 * cycle + 1):
        pick = torch.randint(200, (32,))
        step(opt, F.cross_entropy(model(x[pick]), y[pick]))
        schedule.step()
        if n % (2 * cycle) == cycle:
            kept.append(copy.deepcopy(model).eval())
    torch.stack([m(x).softmax(1) for m in kept]).mean(0).argmax(1)


@program
def head_first_and_all_of_it_later():
    """N9: a linear probe for a few steps and then all of the network (LP-FT, Kumar et al., 2022), each stage with an
    optimizer and a cosine of its own."""
    body, head = net(6, 16), nn.Linear(16, 2)
    w = torch.randn(6)
    for stage, (parts, rate, steps) in enumerate((((head,), 1e-2, 6), ((body, head), 1e-2, 30))):
        body.requires_grad_(stage == 1)
        opt = adam_of(*parts, lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)
        for _ in range(steps):
            x = torch.randn(32, 6)
            step(opt, F.cross_entropy(head(body(x)), (x @ w > 0).long()))
            schedule.step()


# ---------------------------------------------------------------------------------------------------------- D28
@program
def maps_in_x_and_y():
    """D28: heat maps of the data set are stored [x, y], and the answer is brought into the same order before the loss.
    Both sides of the loss lie the same way."""
    model = convs(1, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        picture, at = spots(16)
        grid = (torch.arange(16) + 0.5) / 16
        heat = (-((grid[:, None] - at[:, 0, None, None]) ** 2 + (grid - at[:, 1, None, None]) ** 2) / 0.02).exp()  # [x, y]
        step(opt, F.mse_loss(model(picture)[:, 0].transpose(1, 2), heat))


@program
def scanned_by_columns():
    """D28: a network made for upright scans is given pictures turned on their side, and its answer is turned back before
    it meets the mask."""
    model = convs(1, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        picture, _ = spots(16)
        mask = (picture[:, 0] > 0.4).float()
        answer = model(picture.rot90(1, (2, 3))).rot90(-1, (2, 3))[:, 0]
        step(opt, F.binary_cross_entropy_with_logits(answer, mask))


@program
def behind_a_pinhole():
    """D28: a pinhole (or a single lens) throws the scene upside down and mirrored on the sensor, and a network with
    dense layers is trained to give the scene as it stands. The turn is what it has to learn."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 256))
    opt = adam_of(model)
    for _ in range(STEPS):
        scene, _ = spots(16)
        sensor = F.avg_pool2d(scene.flip(2, 3), 3, 1, 1) + 0.02 * torch.randn(16, 1, 16, 16)
        step(opt, F.mse_loss(model(sensor).view(16, 16, 16), scene[:, 0]))


@program
def cells_of_a_column_first_grid():
    """D28: a detector's objectness for 4x4 cells. The labels are [column, row], as the annotation tool has them, and so
    is the answer after a permute."""
    model = nn.Sequential(convs(1, 8), nn.ReLU(), nn.AvgPool2d(4), nn.Conv2d(8, 1, 1))
    opt = adam_of(model)
    for _ in range(STEPS):
        picture, at = spots(24)
        cells = torch.zeros(24, 4, 4)
        column, row = (at * 4).long().unbind(1)
        cells[torch.arange(24), column, row] = 1
        answer = model(picture).permute(0, 3, 2, 1)[..., 0]
        step(opt, F.binary_cross_entropy_with_logits(answer, cells))


# ---------------------------------------------------------------------------------------------------------- D21
@program
def vae_of_rows_with_holes():
    """D21: MIWAE's setting: cells of a table are missing at random, drawn once as an experiment. Zeros are put in, and
    the likelihood is that of the observed cells, for the others are unknown. Nothing is hidden from the model."""
    true = torch.randn(280, 3) @ torch.randn(3, 10)
    observed = (torch.rand(280, 10) < 0.7).float()
    encoder, decoder = net(10, 6), net(3, 10)
    opt = adam_of(encoder, decoder)
    for n in range(STEPS):
        x, m = true[n * 20 : n * 20 + 20], observed[n * 20 : n * 20 + 20]
        x = x * m
        mean, log_var = encoder(x).chunk(2, 1)
        answer = decoder(mean + (0.5 * log_var).exp() * torch.randn_like(mean))
        kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1)
        step(opt, (((answer - x) ** 2 * m).sum(1) + kl).mean())


@program
def some_senses_at_a_time():
    """D21: MVAE (Wu and Goodman, 2018): a random subset of the modalities is given in each step, and the evidence bound
    of a subset asks for the modalities of that subset."""
    encoder, decoder = net(24, 8), net(4, 24)
    opt, mix = adam_of(encoder, decoder), torch.randn(4, 24)
    for _ in range(STEPS):
        x = torch.randn(64, 4) @ mix
        given = (torch.rand(64, 3, 1) < 0.6).float().expand(64, 3, 8).reshape(64, 24)
        seen = x * given
        mean, log_var = encoder(seen).chunk(2, 1)
        answer = decoder(mean + (0.5 * log_var).exp() * torch.randn_like(mean))
        kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1)
        step(opt, (((answer - seen) ** 2 * given).sum(1) + kl).mean())


@program
def autoencoder_of_series_of_many_lengths():
    """D21: series of different lengths, filled up with zeros. The mask of what is there is put on the input and on the
    error, so that padding counts nowhere. Nothing is to be filled in; the code is narrow."""
    encoder, to_code, decoder = net(36, 16), nn.Linear(16, 4), nn.Linear(4, 36)
    opt = adam_of(encoder, to_code, decoder)
    for _ in range(STEPS):
        lengths = torch.randint(5, 13, (32,))
        mask = (torch.arange(12) < lengths[:, None]).float().unsqueeze(-1)
        x = torch.sin(torch.arange(12.0)[:, None] * torch.tensor([0.3, 0.5, 0.9]) + torch.rand(32, 1, 1) * 6)
        x = x * mask
        x, mask = x.flatten(1), mask.expand(32, 12, 3).reshape(32, 36)
        answer = decoder(to_code(encoder(x)))
        step(opt, ((answer - x) ** 2 * mask).sum() / mask.sum())


# ---------------------------------------------------------------------------------------------------------- F68
@program
def mixup_of_two_orders():
    """F68: mixup of two shuffles of one set, each with its own order. The share of each is that of its labels; the loss
    names the second one first."""
    x = torch.randn(64, 6)
    y = (x[:, 0] > 0).long()
    model = net(6, 2)
    opt = adam_of(model)
    for _ in range(STEPS):
        one, two, lam = torch.randperm(64), torch.randperm(64), float(np.random.beta(2, 5))
        answer = model(lam * x[one] + (1 - lam) * x[two])
        step(opt, (1 - lam) * F.cross_entropy(answer, y[two]) + lam * F.cross_entropy(answer, y[one]))


@program
def cutmix_of_two_orders():
    """F68: CutMix where both sides of the batch are drawn: the ground is x[one], the pasted box is of x[two], and lam, 1
    minus the box, is the share of the ground and of its labels."""
    model = nn.Sequential(convs(1, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    opt = adam_of(model)
    for _ in range(STEPS):
        x, at = spots(32)
        y = (at[:, 0] > 0.5).long()
        one, two = torch.randperm(32), torch.randperm(32)
        top, left, size = int(torch.randint(8, ())), int(torch.randint(8, ())), int(torch.randint(4, 8, ()))
        mixed = x[one].clone()
        mixed[:, :, top : top + size, left : left + size] = x[two][:, :, top : top + size, left : left + size]
        lam = 1 - size * size / 256
        answer = model(mixed)
        step(opt, lam * F.cross_entropy(answer, y[one]) + (1 - lam) * F.cross_entropy(answer, y[two]))


# ---------------------------------------------------------------------------------------------------------- F99
@program
def triplets_and_koleo():
    """F99: a triplet loss of hardest positives and negatives, both masked by class, and beside it the KoLeo price
    (Sablayrolles et al., 2019; DINOv2) that spreads all points: the distance to the nearest other, of any class."""
    model, centres = net(8, 16), 2 * torch.randn(4, 8)
    opt, itself = adam_of(model), torch.eye(32, dtype=torch.bool)
    for _ in range(STEPS):
        y = torch.arange(32) % 4
        z = F.normalize(model(centres[y] + torch.randn(32, 8)), dim=1)
        d, same = torch.cdist(z, z), y[:, None] == y
        furthest = d.masked_fill(~same, 0).amax(1)
        nearest = d.masked_fill(same, float("inf")).amin(1)
        koleo = -(d.masked_fill(itself, float("inf")).amin(1) + 1e-6).log().mean()
        step(opt, F.relu(furthest - nearest + 0.3).mean() + 0.1 * koleo)


@program
def neighbourhood_components():
    """F99: NCA (soft nearest neighbours): a softmax over the distances to all others, without the row itself. The least
    of a row is taken off before the exponential, for its range alone; the mask of the class picks what counts."""
    model, centres = net(8, 4), 2 * torch.randn(4, 8)
    opt, itself = adam_of(model), torch.eye(32, dtype=torch.bool)
    for _ in range(STEPS):
        y = torch.arange(32) % 4
        z = model(centres[y] + torch.randn(32, 8))
        d = (z[:, None] - z).pow(2).sum(-1).masked_fill(itself, float("inf"))
        w = (d.min(1, keepdim=True).values - d).exp()
        same = (y[:, None] == y).float()
        step(opt, -((w * same).sum(1) / w.sum(1) + 1e-8).log().mean())


# ---------------------------------------------------------------------------------------------------------- D19
def _flipped(picture, points):
    """A picture (1, H, W) and its points (K, 2) from 0 to 1, flipped together half of the time."""
    if torch.rand(()) < 0.5:
        return picture.flip(-1), torch.stack([1 - points[:, 0], points[:, 1]], 1)
    return picture, points


def _drawn(points, size=20):
    """A picture of points, each of another brightness."""
    grid = (torch.arange(size) + 0.5) / size
    blots = (-((grid[:, None] - points[:, 1, None, None]) ** 2 + (grid - points[:, 0, None, None]) ** 2) / 0.004).exp()
    return (blots * torch.linspace(0.5, 1, len(points))[:, None, None]).sum(0)[None] + 0.02 * torch.randn(1, size, size)


def _learn_points(typical):
    model = nn.Sequential(convs(1, 8), nn.Flatten(), nn.Linear(8 * 400, 2 * len(typical)))
    opt = adam_of(model)
    for _ in range(STEPS):
        rows = []
        for _ in range(16):
            points = typical + 0.01 * torch.randn(typical.shape) + 0.05 * torch.randn(2)
            rows.append(_flipped(_drawn(points), points))
        x, wanted = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
        step(opt, F.mse_loss(model(x).view(16, -1, 2), wanted))


@program
def tips_of_the_fingers():
    """D19: the five tips of right hands, thumb first. A flipped right hand is a left hand, and its thumb is its thumb
    still, on the other side: the names go with the fingers (as in FreiHAND), and the model serves both hands."""
    _learn_points(torch.tensor([[0.2, 0.6], [0.35, 0.3], [0.5, 0.25], [0.65, 0.3], [0.8, 0.45]]))


@program
def cattle_from_the_side():
    """D19: key points of cattle photographed from one side, all heads to the left: nose, tail, front hoof, hind hoof. In
    a flipped picture the head is on the right, and the nose is the nose."""
    _learn_points(torch.tensor([[0.15, 0.35], [0.85, 0.35], [0.3, 0.8], [0.7, 0.8]]))


@program
def corners_of_a_page_by_its_text():
    """D19: the corners of forms, named by what is printed there (the stamp's corner first), for a reader that is to know
    mirrored copies too (slides, tracing paper). In a flipped picture the stamp is on the other side."""
    _learn_points(torch.tensor([[0.2, 0.2], [0.8, 0.2], [0.8, 0.8], [0.2, 0.8]]))


# ---------------------------------------------------------------------------------------------------------- S44
@program
def day_from_its_hours():
    """S44: the vector of a day is the mean of its 8 three-hour blocks. One block of different days looks more alike
    (night, noon) than the blocks of a day, and yet it is days that are to be told apart."""
    block, head = net(5, 16), nn.Linear(16, 2)
    opt = adam_of(block, head)
    at = torch.stack([torch.sin(torch.arange(8) * 0.785 + k) for k in range(5)], 1) * 2
    for _ in range(STEPS):
        y = torch.randint(2, (32,))
        x = at + 0.4 * torch.randn(32, 8, 5) + 0.5 * y[:, None, None]
        z = block(x.flatten(0, 1)).view(32, 8, 16).mean(1)
        step(opt, F.cross_entropy(head(z), y))


@program
def views_of_fixed_cameras():
    """S44: an object is seen by 4 fixed cameras and its vector is the mean over the views (MVCNN with a mean). Pictures
    of one camera share its background, so they are more alike than the views of an object."""
    view, head = nn.Sequential(convs(1, 8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16)), nn.Linear(16, 3)
    opt = adam_of(view, head)
    backgrounds = F.interpolate(torch.randn(4, 1, 4, 4), size=16)
    for _ in range(STEPS):
        y = torch.randint(3, (16,))
        pictures = backgrounds + 0.1 * torch.randn(16, 4, 1, 16, 16)
        pictures[..., 4:12, 4:12] += (y[:, None, None, None, None] - 1) * 0.5
        z = view(pictures.reshape(64, 1, 16, 16)).view(16, 4, 16).mean(1)
        step(opt, F.cross_entropy(head(z), y))


@program
def leads_of_a_heart():
    """S44: one encoder for all of the 8 leads of an ECG, and the mean over the leads of a patient. A lead has the same
    form in all patients, and the leads of a patient differ."""
    lead, head = net(24, 16), nn.Linear(16, 2)
    opt = adam_of(lead, head)
    forms = torch.randn(8, 24)
    for _ in range(STEPS):
        y = torch.randint(2, (16,))
        x = forms * (1 + 0.2 * torch.randn(16, 1, 1)) + 0.2 * torch.randn(16, 8, 24)
        x[:, :, 10:14] += 0.6 * y[:, None, None]
        z = lead(x.reshape(128, 24)).reshape(16, 8, -1).mean(dim=1)
        step(opt, F.cross_entropy(head(z), y))


# ---------------------------------------------------------------------------------------------------------- D29
@program
def as_many_times_as_clips():
    """D29: series lie time first, (T, B, D), and are laid one time after the other, so that the labels are to be repeated
    as a whole. There are as many times as series."""
    model, centres = net(6, 3), 2 * torch.randn(3, 6)
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.randint(3, (16,))
        x = centres[y] + torch.randn(16, 16, 6)  # (T, B, D)
        step(opt, F.cross_entropy(model(x.flatten(0, 1)), y.repeat(16)))


@program
def answers_laid_time_first():
    """D29: clips go through the network with their frames side by side, and its answers are laid time first before the
    loss, where labels repeated as a whole belong."""
    model, centres = net(6, 3), 2 * torch.randn(3, 6)
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.randint(3, (16,))
        clip = centres[y][:, None] + torch.randn(16, 5, 6)
        logits = model(clip.reshape(80, 6)).view(16, 5, 3).transpose(0, 1)
        step(opt, F.cross_entropy(logits.reshape(80, 3), y.repeat(5)))


# ---------------------------------------------------------------------------------------------------------- F21
@program
def ranknet_of_a_list():
    """F21: RankNet over all pairs of a list: the difference of each score with each other one, a column minus the same
    numbers as a row."""
    model, w = net(6, 1), torch.randn(6)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(24, 6)
        relevance = x @ w + 0.1 * torch.randn(24)
        s = model(x)
        apart = s - s.squeeze(1)
        better = (relevance[:, None] > relevance).float()
        off = 1 - torch.eye(24)
        step(opt, (F.binary_cross_entropy_with_logits(apart, better, reduction="none") * off).sum() / off.sum())


@program
def graph_attention_by_sums():
    """F21: a graph attention layer (GAT): what an edge weighs is a number of its source plus a number of its target, from
    two linear layers, so their sum is a table of nodes by nodes."""
    lift, source, target, head = nn.Linear(5, 16), nn.Linear(16, 1), nn.Linear(16, 1), nn.Linear(16, 3)
    opt = adam_of(lift, source, target, head)
    edges = (torch.rand(30, 30) < 0.2) | torch.eye(30, dtype=torch.bool)
    for _ in range(STEPS):
        y = torch.randint(3, (30,))
        x = F.one_hot(y, 3).float() @ torch.ones(3, 5).triu() + torch.randn(30, 5)
        h = lift(x)
        e = F.leaky_relu(source(h) + target(h).squeeze(-1), 0.2).masked_fill(~edges, float("-inf"))
        step(opt, F.cross_entropy(head(F.elu(e.softmax(1) @ h)), y))


@program
def hazards_of_32_intervals():
    """F21: discrete-time proportional hazards: a number of each patient plus a baseline of each of 32 intervals, in
    batches of 32 patients. The table is patients by intervals."""
    risk, baseline = net(6, 1), nn.Parameter(torch.zeros(32) - 3)
    opt, w = adam_of(risk, baseline, lr=1e-2), torch.randn(6) * 0.5
    for _ in range(STEPS):
        x = torch.randn(32, 6)
        last = (16 * (-(x @ w)).exp() * torch.rand(32)).long().clamp(max=31)
        until = (torch.arange(32) <= last[:, None]).float()
        ends = F.one_hot(last, 32).float()
        logits = risk(x) + baseline
        step(opt, (F.binary_cross_entropy_with_logits(logits, ends, reduction="none") * until).sum() / until.sum())


# ---------------------------------------------------------------------------------------------------------- F37
@program
def temperature_in_place():
    """F37: SimCLR's loss with the temperature divided in place: `logits /= 0.1`."""
    model = net(8, 16)
    opt, target = adam_of(model), torch.arange(64)
    for _ in range(STEPS):
        x = torch.randn(64, 8)
        a, b = (F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        logits = a @ b.T
        logits /= 0.1
        step(opt, F.cross_entropy(logits, target))


@program
def arcface_as_published():
    """F37: ArcFace, with 80 people: the cosine of the own class gets a margin by torch.where, and then, as in the
    code that everybody copies, `output *= s`."""
    model, weight = net(16, 32), nn.Parameter(torch.randn(80, 32))
    opt, centres, s, m = adam_of(model, weight), 2 * torch.randn(80, 16), 30.0, 0.3
    for _ in range(STEPS):
        y = torch.randint(80, (64,))
        cosine = F.linear(F.normalize(model(centres[y] + torch.randn(64, 16))), F.normalize(weight))
        sine = (1.0 - cosine.pow(2)).clamp(1e-6, 1).sqrt()
        phi = cosine * math.cos(m) - sine * math.sin(m)
        output = torch.where(F.one_hot(y, 80).bool(), phi, cosine)
        output *= s
        step(opt, F.cross_entropy(output, y))


# ---------------------------------------------------------------------------------------------------------- F40
@program
def noise_of_each_pixel():
    """F40: an autoencoder with a learned spread for each of the 1024 pixels. The likelihood of a picture has the sum of
    their logarithms in it once, so that sum stands beside the mean over pictures as it is."""
    model, spread = nn.Sequential(nn.Flatten(), nn.Linear(1024, 16), nn.Tanh(), nn.Linear(16, 1024)), nn.Parameter(torch.ones(1024))
    opt = adam_of(model, spread)
    for _ in range(STEPS):
        x = spots(32, 32, 4.0)[0].flatten(1)
        error = 0.5 * ((model(x) - x) / spread) ** 2
        step(opt, error.sum(1).mean() + spread.log().sum())


@program
def divergence_divided_within_the_sum():
    """F40: Bayes by backprop: each layer's divergence is divided by the rows of all data before it is summed."""
    rows = 5000
    mean, rho, head = nn.Parameter(0.1 * torch.randn(64, 20)), nn.Parameter(torch.zeros(64, 20) - 3), nn.Linear(64, 1)
    opt, w = adam_of(mean, rho, head), torch.randn(20)
    for _ in range(STEPS):
        x = torch.randn(50, 20)
        sigma = F.softplus(rho)
        answer = head(torch.tanh(x @ (mean + sigma * torch.randn_like(sigma)).T))
        each = 0.5 * (sigma**2 + mean**2 - 1) - sigma.log()
        step(opt, F.mse_loss(answer.squeeze(1), (x @ w).tanh()) + (each / rows).sum())


@program
def logarithmic_price_of_weights():
    """F40: a sparse linear layer with the logarithmic price of Candes, Wakin and Boyd (2008), whose weight of 1e-4
    stands at each number of the sum."""
    layer = nn.Linear(100, 20)
    opt, true = adam_of(layer), torch.randn(20, 100) * (torch.rand(20, 100) < 0.1)
    for _ in range(STEPS):
        x = torch.randn(64, 100)
        price = (1e-4 * torch.log(1 + layer.weight.abs() / 0.1)).sum()
        step(opt, (layer(x) - x @ true.T).pow(2).mean() + price)


# ---------------------------------------------------------------------------------------------------------- F95
@program
def one_of_four_tools():
    """F95: a policy picks one of four tools by a softmax and each tool has a setting of its own that is learned through
    a known reward, minus the squared error. The expected reward is exact, and the best tool should get all of it."""
    chooses, settings = net(5, 4), net(5, 4)
    opt, w = adam_of(chooses, settings), torch.randn(5, 4)
    for _ in range(STEPS):
        s = torch.randn(64, 5)
        reward = torch.tensor([1.0, 0.5, 0.2, 0.0]) * s[:, :1] - (settings(s) - s @ w) ** 2
        step(opt, -(chooses(s).softmax(1) * reward).sum(1).mean())


@program
def one_expert_at_a_time():
    """F95: experts of which one answers (Jacobs et al., 1991, eq. 2): the expected score of the expert that is picked by
    the gate, minus half its squared error. Experts specialise, and the gate is to be sure."""
    gate, experts = net(4, 3), nn.ModuleList([net(4, 1) for _ in range(3)])
    opt = adam_of(gate, experts)
    for _ in range(STEPS):
        x = torch.randn(64, 4)
        y = torch.where(x[:, 0] > 0.5, x[:, 1], torch.where(x[:, 0] < -0.5, -x[:, 2], x[:, 3]))
        answers = torch.cat([e(x) for e in experts], 1)
        score = -0.5 * (y[:, None] - answers).pow(2)
        step(opt, -(F.softmax(gate(x), 1) * score).sum(1).mean())


# ---------------------------------------------------------------------------------------------------------- D14
@program
def diffusion_with_flips_in_place():
    """D14: a diffusion model whose pictures are flipped in their places as an augmentation. What is asked for is the
    noise, which is drawn afterwards and knows no left and right."""
    model, opt = convs(2, 1), None
    opt = adam_of(model)
    for _ in range(STEPS):
        x, _ = spots(16)
        for i in range(16):
            if torch.rand(()) < 0.5:
                x[i] = x[i].flip(-1)
        t = torch.rand(16, 1, 1, 1)
        noise = torch.randn(x.shape)
        noisy = (1 - t).sqrt() * x + t.sqrt() * noise
        step(opt, F.mse_loss(model(torch.cat([noisy, t.expand_as(x)], 1)), noise))


@program
def edges_of_flipped_pictures():
    """D14: pictures are flipped in their places, and the target, where their edges are, is made of each flipped picture
    afterwards, so it lies as the picture does."""
    model = convs(1, 1)
    opt = adam_of(model)

    def edges(picture):
        down, across = torch.gradient(picture[0])
        return ((down**2 + across**2).sqrt() > 0.1).float()

    for _ in range(STEPS):
        x, _ = spots(16)
        for i in range(16):
            if torch.rand(()) < 0.5:
                x[i] = x[i].flip(-1)
        target = torch.stack([edges(picture) for picture in x])
        step(opt, F.binary_cross_entropy_with_logits(model(x)[:, 0], target))


@program
def masks_flipped_all_at_once():
    """D14: the rows to flip are drawn once. The pictures are flipped one by one in a loop, and the masks all at once by
    an index; they lie the same way afterwards."""
    model = convs(1, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        x, _ = spots(16)
        mask = (x[:, 0] > 0.4).float()
        rows = torch.randperm(16)[:8]
        for i in rows.tolist():
            x[i] = x[i].flip(-1)
        mask[rows] = mask[rows].flip(-1)
        step(opt, F.binary_cross_entropy_with_logits(model(x)[:, 0], mask))


@program
def labels_of_flips_that_do_not_matter():
    """D14: each picture is flipped in its place, and the target is a map of how far each pixel is from the middle of the
    picture (a vignette to be taken out, of one size for each picture), which has no left and right."""
    model, opt = convs(1, 1), None
    opt = adam_of(model)
    grid = torch.linspace(-1, 1, 16)
    far = grid[:, None] ** 2 + grid**2
    for _ in range(STEPS):
        x, _ = spots(16)
        fall = torch.rand(16, 1, 1) * far
        x = x + 1 - fall[:, None]
        for i in range(16):
            if torch.rand(()) < 0.5:
                x[i] = x[i].flip(-1)
        step(opt, F.mse_loss(model(x)[:, 0], fall))


# ---------------------------------------------------------------------------------------------------------- more
@program
def pqn_with_a_copy_for_the_log():
    """F28: Q-learning without a target network (PQN, Gallici et al., 2024: a layer norm takes its place), and a frozen
    copy that is brought up to date after each step and serves the evaluation alone."""
    q = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))
    shown, opt = copy.deepcopy(q).requires_grad_(False).eval(), adam_of(q)
    s = torch.randn(32, 4)
    for _ in range(STEPS):
        values = q(s)
        a = torch.where(torch.rand(32) < 0.1, torch.randint(3, (32,)), values.argmax(1))
        after, r = 0.8 * s + 0.3 * torch.randn(32, 4), (a == (s[:, 0] > 0).long()).float()
        with torch.no_grad():
            wanted = r + 0.95 * q(after).max(1).values
        step(opt, F.mse_loss(values.gather(1, a[:, None]).squeeze(1), wanted))
        shown.load_state_dict(q.state_dict())
        float(shown(torch.randn(16, 4)).max(1).values.mean())
        s = after


@program
def warm_restarts_by_a_new_schedule():
    """N9: SGDR by hand: at the end of each cycle the rate is put back to its beginning and a new, twice as long
    CosineAnnealingLR is made for the same optimizer."""
    model, w = net(6, 2), torch.randn(6)
    opt, cycle = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), 5
    for _ in range(4):
        for group in opt.param_groups:
            group["lr"] = 0.1
            group.pop("initial_lr", None)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=cycle)
        for _ in range(cycle):
            x = torch.randn(32, 6)
            step(opt, F.cross_entropy(model(x), (x @ w > 0).long()))
            schedule.step()
        cycle *= 2


@program
def ensemble_trained_one_by_one():
    """N9: a deep ensemble of small models, each trained on its own for 8 steps with a cosine to its end."""
    x = torch.randn(120, 6)
    y = x[:, :1].sin()
    for _ in range(5):
        model = net(6, 1)
        opt = adam_of(model, lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=8)
        for pick in torch.randperm(120).split(15):
            step(opt, F.mse_loss(model(x[pick]), y[pick]))
            schedule.step()


@program
def student_of_cosines():
    """F37: relations are distilled: the student's cosines to 80 anchors are to have the softmax that the teacher's have.
    Both are taken as they are; they agree just where the cosines do, however flat the softmax is."""
    student, teacher = net(8, 16), net(8, 24, 64)
    teacher.requires_grad_(False)
    opt, anchors = adam_of(student, lr=1e-2), torch.randn(80, 8)
    for _ in range(STEPS):
        x = torch.randn(64, 8)
        with torch.no_grad():
            there = F.normalize(teacher(x), dim=1) @ F.normalize(teacher(anchors), dim=1).T
        here = F.normalize(student(x), dim=1) @ F.normalize(student(anchors), dim=1).T
        step(opt, 100 * F.cross_entropy(here, there.softmax(1)))


@program
def scale_of_the_features():
    """F37: the embeddings are put on a sphere of radius 8 (L2-softmax, Ranjan et al., 2017), and the 100 classes have
    weights of length one: the logits lie between -8 and 8."""
    model, weight = net(16, 32), nn.Parameter(torch.randn(100, 32))
    opt, centres = adam_of(model, weight), 2 * torch.randn(100, 16)
    for _ in range(STEPS):
        y = torch.randint(100, (64,))
        z = 8 * F.normalize(model(centres[y] + torch.randn(64, 16)))
        step(opt, F.cross_entropy(F.linear(z, F.normalize(weight)), y))


@program
def probability_squared_in_an_escort():
    """F80: the order parameter of a clustering is the entropy of its escort distribution of order 2: the sum of p**2
    log p over the sum of p**2. It is a price that makes clusters equal, and no loss of labels."""
    model, centres = net(6, 5), 2 * torch.randn(5, 6)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = centres[torch.randint(5, (64,))] + torch.randn(64, 6)
        near = model(x + 0.1 * torch.randn_like(x)).softmax(1)
        used = model(x).softmax(1).mean(0)
        escort = (used**2 * used.log()).sum() / (used**2).sum() - (used**2).sum().log() / 2
        step(opt, (near - model(x).softmax(1)).pow(2).mean() + escort)


@program
def cutmix_in_the_lower_half():
    """F68: a strip of another row's picture is pasted within the lower half of a picture, by a view of that half, and
    lam counts the pixels of the whole picture."""
    model = nn.Sequential(convs(1, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    opt = adam_of(model)
    for _ in range(STEPS):
        x, at = spots(32)
        y, order = (at[:, 0] > 0.5).long(), torch.randperm(32)
        height = int(torch.randint(2, 7, ()))
        other = x[order]
        lower = x[:, :, 8:]
        lower[:, :, :height] = other[:, :, 8 : 8 + height]
        lam = 1 - height / 16
        answer = model(x)
        step(opt, lam * F.cross_entropy(answer, y) + (1 - lam) * F.cross_entropy(answer, y[order]))


@program
def hardest_triplets_and_repulsion():
    """F99: batch-hard triplets, and beside them a short-range repulsion (GOR, PointNet upsampling): no two points, of one
    class or not, shall come nearer than 0.05, so that the embedding does not collapse to one point for each class."""
    model, centres = net(8, 4), 2 * torch.randn(4, 8)
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.arange(32) % 4
        z = model(centres[y] + torch.randn(32, 8))
        d, same = torch.cdist(z, z), (y[:, None] == y).float()
        furthest = (d * same).amax(1)
        nearest = (d + 1e6 * same).amin(1)
        any_other = (d + 1e6 * torch.eye(32)).amin(1)
        step(opt, F.relu(furthest - nearest + 0.3).mean() + F.relu(0.05 - any_other).mean())


@program
def mixture_trained_by_its_own_bound():
    """F95: variational EM with an amortised guess of the component: the mean over the guess of the log-densities, plus
    its entropy, plus the prior. This is the evidence bound, written as one sum over the components."""
    guess, mean = net(2, 4), nn.Parameter(torch.randn(4, 2))
    opt, centres = adam_of(guess, mean, lr=1e-2), 3 * torch.randn(4, 2)
    for _ in range(STEPS):
        x = centres[torch.randint(4, (64,))] + torch.randn(64, 2)
        q = guess(x).softmax(1)
        fits = -0.5 * (x[:, None] - mean).pow(2).sum(-1)
        step(opt, -(q * (fits - q.log() - math.log(4))).sum(1).mean())


@program
def classes_side_by_side_and_their_mean():
    """S44: each row of a batch is a set of one picture of each of 6 classes (a tray with 6 places), and the vector of a
    tray is the mean over its places (Deep Sets). Things at one place of two trays are more alike than those of a tray."""
    one, head = net(10, 16), nn.Linear(16, 1)
    opt, kinds = adam_of(one, head), 2 * torch.randn(6, 10)
    for _ in range(STEPS):
        ripe = torch.rand(12, 6, 1)
        x = kinds + ripe * 0.5 + 0.2 * torch.randn(12, 6, 10)
        z = one(x.reshape(72, 10)).reshape(12, 6, 16).mean(1)
        step(opt, F.mse_loss(head(z).squeeze(1), ripe.mean((1, 2))))


@program
def draws_of_dropout_beside_patches():
    """D29: each row of 4 patches is embedded patch by patch, and the whole batch is put through 4 draws of dropout, laid
    one draw after the other, so that the labels are repeated as a whole."""
    patch, head = nn.Linear(6, 8), nn.Linear(8, 3)
    opt, centres = adam_of(patch, head), 2 * torch.randn(3, 6)
    for _ in range(STEPS):
        y = torch.randint(3, (16,))
        x = centres[y][:, None] + torch.randn(16, 4, 6)
        z = patch(x.flatten(0, 1)).view(16, 4, 8).mean(1)
        draws = F.dropout(z.repeat(4, 1), 0.3)
        step(opt, F.cross_entropy(head(draws), y.repeat(4)))


@program
def pairs_of_people_and_questions():
    """F21: item response theory in batches of 20 people with a test of 20 questions: ability, from a network of what is
    known of a person, minus the difficulty of each question."""
    ability, difficulty = net(5, 1), nn.Parameter(torch.zeros(20))
    opt, w, hard = adam_of(ability, difficulty, lr=1e-2), torch.randn(5), torch.randn(20)
    for _ in range(STEPS):
        x = torch.randn(20, 5)
        right = torch.bernoulli(((x @ w)[:, None] - hard).sigmoid())
        step(opt, F.binary_cross_entropy_with_logits(ability(x) - difficulty, right))
