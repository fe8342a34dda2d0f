"""Healthy programs about films, crops, spectra, slopes and turned clouds that look wrong, and are not."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import distributions
from torch.utils.data import DataLoader, Dataset, TensorDataset

PROGRAMS = {}
STEPS = 14


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def loader(*parts, size=16, shuffle=True):
    return DataLoader(TensorDataset(*parts), batch_size=size, shuffle=shuffle, drop_last=True)


def tones(rows, length=512):
    """Waves of one tone each, of very different loudness, and which of four tones it is."""
    kind = torch.randint(4, (rows,))
    time = torch.arange(length) / length
    loud = torch.rand(rows, 1) + 0.2
    wave = loud * torch.sin(2 * math.pi * 20 * (kind[:, None] + 1) * time) + 0.02 * torch.randn(rows, length)
    return wave, kind


def powers(wave):
    spectrum = torch.stft(wave, 64, hop_length=32, window=torch.hann_window(64), return_complex=True)
    return spectrum.abs().pow(2)


def turns(rows):
    """Random rotations."""
    q, r = torch.linalg.qr(torch.randn(rows, 3, 3))
    q = q * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return q * torch.linalg.det(q)[:, None, None].sign()


def per_point(outputs=3):
    return nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


def photographs(rows=64, channels=3, size=24):
    """Smooth pictures."""
    return F.interpolate(torch.rand(rows, channels, 4, 4), size=size, mode="bilinear")


def to_picture(channels=3):
    return nn.Sequential(nn.Conv2d(channels, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, channels, 3, padding=1))


# ------------------------------------------------------------------------------------------------ D42
@program
def learned_filterbank_before_the_logarithm():
    """D42: the bank of filters learns as well (Sainath 2013), so the logarithm comes after the first learned layer."""
    bank, net = nn.Parameter(torch.randn(16, 33) - 2), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam([bank, *net.parameters()], lr=0.01)
    batches = loader(*tones(16 * STEPS))
    for wave, kind in batches:
        energies = F.linear(powers(wave).transpose(1, 2), bank.exp())
        loss = F.cross_entropy(net(energies.add(1e-6).log()).mean(1), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def gains_of_channels_by_a_learned_smoother():
    """D42: PCEN divides each energy by its own learned running mean, which does what a logarithm would (Wang 2017)."""
    smoother = nn.Conv1d(33, 33, 5, padding=2, groups=33, bias=False)
    nn.init.constant_(smoother.weight, 0.2)
    net = nn.Linear(33, 4)
    optimizer = torch.optim.Adam([*smoother.parameters(), *net.parameters()], lr=0.01)
    for wave, kind in loader(*tones(16 * STEPS)):
        energy = powers(wave)
        level = smoother(energy).clamp_min(0)
        evened = (energy / (level + 1e-4) ** 0.9 + 2).sqrt() - math.sqrt(2)
        loss = F.cross_entropy(net(evened.mean(2)), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def energy_of_a_band_is_linear_in_the_powers():
    """D42: the energy in a band is a sum of powers (Parseval), so one linear layer on powers is the exact model."""
    waves, _ = tones(16 * STEPS)
    energy = powers(waves)[:, 2:12].sum(1).mean(1, keepdim=True)
    net = nn.Linear(33, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    scale = energy.mean()
    for wave, wanted in loader(waves, energy / scale):
        loss = F.mse_loss(net(powers(wave).mean(2)), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def powers_of_sources_are_unmixed():
    """D42: powers of independent sources add, logarithms don't, so a mixture is taken apart in powers (as in NMF)."""
    first, _ = tones(16 * STEPS)
    second, _ = tones(16 * STEPS)
    parts = nn.Parameter(torch.randn(33, 33) * 0.1 - 3)
    optimizer = torch.optim.Adam([parts], lr=0.01)
    for one, other in loader(first, second.flip(1)):
        mixture = powers(one + other).mean(2)
        answer = F.linear(mixture, F.softplus(parts))
        loss = (answer.add(1e-4).log() - powers(one).mean(2).add(1e-4).log()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def exponents_of_a_spectrum_learn():
    """D42: the exponent of each frequency is learned, and begins at a root, so the powers are compressed."""
    exponents, net = nn.Parameter(torch.full((33, 1), 0.5)), nn.Linear(33, 4)
    optimizer = torch.optim.Adam([exponents, *net.parameters()], lr=0.01)
    window = torch.hann_window(64)
    for wave, kind in loader(*tones(16 * STEPS)):
        size = torch.stft(wave, 64, hop_length=32, window=window, return_complex=True).abs()
        loss = F.cross_entropy(net((size**exponents).mean(2)), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ D43
@program
def colours_of_turned_points():
    """D43: the three numbers of each point are its colour, which no rotation of the cloud changes."""
    points = torch.randn(8 * STEPS, 24, 3)
    colours = torch.stack([points.norm(dim=2), points.abs().amax(2), points.square().mean(2)], 2).div(3).clamp(0, 1)
    net = per_point()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for cloud, colour in loader(points, colours, size=8):
        loss = F.mse_loss(net(cloud @ turns(len(cloud)).transpose(1, 2)), colour)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def places_in_the_normalised_object():
    """D43: NOCS (Wang 2019) asks for each point's place in the upright object, scaled to a unit cube, in any pose."""
    clouds = torch.randn(8 * STEPS, 24, 3) * torch.tensor([3.0, 1.0, 0.3])
    low, high = clouds.amin((1, 2), keepdim=True), clouds.amax((1, 2), keepdim=True)
    net, whole = nn.Linear(6, 32), nn.Linear(3, 3)
    head = nn.Linear(32, 3)
    optimizer = torch.optim.Adam([*net.parameters(), *whole.parameters(), *head.parameters()], lr=0.01)
    for cloud, place in loader(clouds, (clouds - low) / (high - low), size=8):
        posed = torch.bmm(cloud, turns(len(cloud)))
        shared = whole(posed).amax(1, keepdim=True).expand_as(posed)
        loss = F.smooth_l1_loss(head(net(torch.cat([posed, shared], 2)).relu()), place)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def noisy_scans_brought_upright():
    """D43: a noisy scan in any small tilt is asked for as the clean cloud in its first position (canonicalisation)."""
    clean = torch.randn(8 * STEPS, 24, 3) * torch.tensor([2.0, 1.0, 0.5])
    net = per_point()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for cloud in (rows for (rows,) in loader(clean, size=8)):
        angle = 0.2 * torch.randn(len(cloud))
        zero, one = torch.zeros_like(angle), torch.ones_like(angle)
        rows = [angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero, zero, zero, one]
        tilt = torch.stack(rows, 1).view(-1, 3, 3)
        scan = (cloud + 0.02 * torch.randn_like(cloud)) @ tilt
        loss = (net(scan) - cloud).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def pixels_in_opponent_colours():
    """D43: pixels go in as orthonormal opponent colours and are asked for as RGB: the 'rotation' is one of colours."""
    opponent = torch.tensor([[1.0, 1, 1], [1, -1, 0], [1, 1, -2]])
    opponent = opponent / opponent.norm(dim=1, keepdim=True)
    pixels = torch.rand(8 * STEPS, 36, 3)
    net = per_point()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for clean in (rows for (rows,) in loader(pixels, size=8)):
        noisy = clean + 0.1 * torch.randn_like(clean)
        loss = F.mse_loss(net(noisy @ opponent.T), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def flow_of_a_turning_cloud():
    """D43: the flow is what the turn has done to each point, so it is made of the turned cloud itself."""
    points = torch.randn(8 * STEPS, 24, 3)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for cloud in (rows for (rows,) in loader(points, size=8)):
        later = cloud @ turns(len(cloud))
        loss = F.mse_loss(net(torch.cat([cloud, later], 2)), later - cloud)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ D14
class NextDoor(Dataset):
    """A piece of a picture, and the piece to the right of it."""

    def __init__(self, pictures, size=8):
        self.pictures, self.size = pictures, size

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, n):
        size = self.size
        a, b = (int(torch.randint(end, ())) for end in (24 - size, 24 - 2 * size))
        picture = self.pictures[n]
        return picture[:, a : a + size, b : b + size], picture[:, a : a + size, b + size : b + 2 * size]


@program
def piece_next_door_is_painted():
    """D14 crops: outpainting asks for the piece to the right of the one that is given, so the places must differ."""
    net = to_picture()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for here, there in DataLoader(NextDoor(photographs(8 * STEPS)), batch_size=8, shuffle=True):
        loss = F.mse_loss(net(here), there)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def two_cameras_side_by_side():
    """D14 crops: the second camera sees all 3 lines lower and 2 columns further left, so its pieces are cut there."""
    seen = photographs(8 * STEPS)
    heat = torch.roll(seen.mean(1, keepdim=True), (3, -2), (2, 3))
    net = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 3, padding=1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(STEPS):
        corners = torch.randint(2, 12, (8, 2)).tolist()
        rows = [step + STEPS * n for n in range(8)]
        x = torch.stack([seen[n, :, a : a + 8, b : b + 8] for n, (a, b) in zip(rows, corners, strict=True)])
        y = torch.stack([heat[n, :, a + 3 : a + 11, b - 2 : b + 6] for n, (a, b) in zip(rows, corners, strict=True)])
        loss = F.l1_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def pieces_of_one_photograph_matched_as_a_whole():
    """D14 crops: all pairs of made and real pieces are compared (an energy distance), so no two belong together."""
    photograph = photographs(1)[0]
    net = to_picture()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def some():
        corners = torch.randint(16, (8, 2)).tolist()
        return torch.stack([photograph[:, a : a + 8, b : b + 8] for a, b in corners])

    for _ in range(STEPS):
        made, real = net(some()), some()
        across = (made.unsqueeze(0) - real.unsqueeze(1)).flatten(2).square().sum(2).add(1e-6).sqrt().mean()
        inside = (made.unsqueeze(1) - made.unsqueeze(0)).flatten(2).square().sum(2).add(1e-6).sqrt().mean()
        loss = 2 * across - inside
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def mouths_are_followed_through_a_film():
    """D14 frames: lip reading cuts each frame around the mouth's landmark, which moves, so the mouth stays in place."""
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    films, words = torch.rand(4 * STEPS, 6, 1, 20, 20), torch.randint(3, (4 * STEPS,))
    marks = torch.randint(8, (4 * STEPS, 1, 2)) + torch.randint(4, (4 * STEPS, 6, 2))
    for film, mark, word in loader(films, marks, words, size=4):
        clips = []
        for frames, places in zip(film, mark.tolist(), strict=True):
            cut = [frame[:, a : a + 8, b : b + 8] for frame, (a, b) in zip(frames, places, strict=True)]
            clips.append(torch.stack(cut))
        x = torch.stack(clips)
        loss = F.cross_entropy(net(x.flatten(0, 1)).view(4, 6, 3).mean(1), word)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def corner(picture, size=12):
    a, b = torch.randint(picture.shape[-1] - size, (2,)).tolist()
    return picture[:, a : a + size, b : b + size]


@program
def two_random_pieces_of_each_picture():
    """D14 frames: SimCLR cuts each picture of a batch twice, at places of its own; the batch is no film."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for (pictures,) in loader(photographs(8 * STEPS), size=8):
        one = torch.stack([corner(picture) for picture in pictures])
        two = torch.stack([corner(picture) for picture in pictures])
        alike = F.normalize(net(one), dim=1) @ F.normalize(net(two), dim=1).T / 0.2
        loss = F.cross_entropy(alike, torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def pieces_and_their_finer_ones():
    """D14 frames: super-resolution cuts each pair of a batch at one corner of its own; the batch is no film."""
    net = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    fine = photographs(8 * STEPS)
    for small, large in loader(F.avg_pool2d(fine, 2), fine, size=8):
        corners = torch.randint(6, (8, 2)).tolist()
        x = torch.stack([p[:, a : a + 6, b : b + 6] for p, (a, b) in zip(small, corners, strict=True)])
        y = [p[:, 2 * a : 2 * a + 12, 2 * b : 2 * b + 12] for p, (a, b) in zip(large, corners, strict=True)]
        loss = F.l1_loss(net(x), torch.stack(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ F30
@program
def spread_within_groups_of_a_batch():
    """F30 unfolded: StyleGAN's spread of a minibatch takes any four rows as a group, whatever they were before."""
    net, head = nn.Linear(6, 16), nn.Linear(17, 1)
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=0.01)
    for _ in range(STEPS):
        scenes = torch.randn(8, 4, 6)
        real = (torch.arange(8) % 2).float()
        scenes = scenes * (1 + real[:, None, None])
        h = net(scenes.flatten(0, 1)).relu()
        groups = h.view(4, 8, 16)
        spread = groups.var(0, correction=0).add(1e-8).sqrt().mean(1)
        h = torch.cat([h, spread.repeat(4)[:, None]], 1)
        loss = F.binary_cross_entropy_with_logits(head(h).squeeze(1), real.repeat_interleave(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def median_of_the_means_of_blocks():
    """F30 unfolded: a robust loss takes the median of the means of blocks of rows, and any blocks do."""
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    data = torch.randn(12 * STEPS, 5, 5)
    for x in (rows for (rows,) in loader(data, size=12)):
        y = x.sum(2).flatten() + torch.distributions.StudentT(2.0).sample((60,)) * 0.1
        errors = (net(x.flatten(0, 1)) - y[:, None]).square()
        loss = errors.view(5, 12).mean(1).median()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def rows_in_ghost_batches():
    """F30 unfolded: rows and labels are laid out alike in ghost batches, which are normalised apart (Hoffer 2017)."""
    first, norm, last = nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *norm.parameters(), *last.parameters()], lr=0.1)
    films = torch.randn(16 * STEPS, 8, 5)
    for film, label in loader(films, (films.sum(2) > 0).long()):
        ghosts = first(film.flatten(0, 1)).view(8, 16, 16)
        answer = torch.stack([last(norm(ghost).relu()) for ghost in ghosts])
        loss = F.cross_entropy(answer.flatten(0, 1), label.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ F116
class Values(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x):
        return self.layers(x)


def moves(rows=32):
    return (
        torch.randn(rows, 4),
        torch.randint(3, (rows,)),
        torch.randn(rows),
        torch.randn(rows, 4),
        (torch.rand(rows) < 0.1).float(),
    )


def own_target(net, reward, later, done):
    with torch.no_grad():
        return reward + 0.9 * net(later).max(1).values * (1 - done)


@program
def values_kept_near_where_they_began():
    """F116: without a target network by design (PQN); the copy is what weights are pulled to (L2 init, Kumar 2023)."""
    net = Values()
    start = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(STEPS):
        state, action, reward, later, done = moves()
        q = net(state).gather(1, action[:, None]).squeeze(1)
        near = sum((p - s).square().sum() for p, s in zip(net.parameters(), start.parameters(), strict=True))
        loss = F.mse_loss(q, own_target(net, reward, later, done)) + 1e-3 * near
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def average_of_values_for_the_evaluation():
    """F116: without a target network by design (PQN); the copy is an average of weights, evaluated at the end."""
    net = Values()
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(STEPS):
        state, action, reward, later, done = moves()
        q = net(state).gather(1, action[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, own_target(net, reward, later, done))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(net)


@program
def best_values_so_far_are_kept():
    """F116: without a target network by design (PQN); the copy is the best one so far, for the file at the end."""
    net = Values()
    best, best_loss = copy.deepcopy(net), math.inf
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(STEPS):
        state, action, reward, later, done = moves()
        q = net(state).gather(1, action[:, None]).squeeze(1)
        loss = F.mse_loss(q, own_target(net, reward, later, done))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < best_loss:
            best_loss = loss.item()
            best.load_state_dict(net.state_dict())


# ------------------------------------------------------------------------------------------------ F117
@program
def score_sliced_in_several_directions():
    """F117: sliced score matching (Song 2019) asks for one product with the Jacobian for each random direction."""
    net = nn.Sequential(nn.Linear(3, 32), nn.Softplus(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for (x,) in loader(torch.randn(32 * STEPS, 3), size=32):
        x = x.requires_grad_()
        score, loss = net(x), 0.0
        for _ in range(3):
            v = torch.randn_like(x)
            (vj,) = torch.autograd.grad(score, x, grad_outputs=v, create_graph=True)
            loss = loss + ((vj * v).sum(1) + 0.5 * (score * v).sum(1).square()).mean() / 3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def jacobian_taken_row_by_row():
    """F117: a contractive autoencoder takes its Jacobian one row at a time, each by a unit vector of its own."""
    encode, decode = nn.Sequential(nn.Linear(6, 3), nn.Sigmoid()), nn.Linear(3, 6)
    optimizer = torch.optim.Adam([*encode.parameters(), *decode.parameters()], lr=0.01)
    for (x,) in loader(torch.rand(16 * STEPS, 6)):
        x.requires_grad_()
        code, price = encode(x), 0.0
        for unit in torch.eye(3):
            row = torch.autograd.grad(code, x, unit.expand_as(code), create_graph=True)[0]
            price = price + row.square().sum(1).mean()
        loss = F.mse_loss(decode(code), x.detach()) + 0.01 * price
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def slope(u, x):
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


@program
def each_term_of_an_equation_takes_its_own_slope():
    """F117: an equation of first order whose two terms each compute the slope for themselves: slower, and right."""
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def transport(u, x, t):
        return (slope(u, t) + 0.5 * slope(u, x)).square().mean()

    def smoothness(u, x):
        return slope(u, x).abs().mean()

    for _ in range(STEPS):
        x, t = torch.rand(32, 1, requires_grad=True), torch.rand(32, 1, requires_grad=True)
        u = net(torch.cat([x, t], 1))
        first = torch.rand(32, 1)
        start = net(torch.cat([first, torch.zeros_like(first)], 1)) - (math.pi * first).sin()
        loss = transport(u, x, t) + 1e-3 * smoothness(u, x) + start.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def inner_step_of_body_and_head_apart():
    """F117: MAML with two inner rates takes the gradients of one loss by the body's weights, and by the head's."""
    body, head = nn.Sequential(nn.Linear(3, 16), nn.Tanh()), nn.Linear(16, 1)
    lower, upper = dict(body.named_parameters()), dict(head.named_parameters())
    optimizer = torch.optim.Adam([*lower.values(), *upper.values()], lr=0.01)
    for _ in range(STEPS):
        x = torch.randn(24, 3)
        y = x @ torch.randn(3, 1)
        inner = F.mse_loss(head(body(x[:12])), y[:12])
        by_lower, by_upper = (torch.autograd.grad(inner, p.values(), create_graph=True) for p in (lower, upper))
        adapted = {name: p - 0.01 * g for (name, p), g in zip(lower.items(), by_lower, strict=True)}
        above = {name: p - 0.1 * g for (name, p), g in zip(upper.items(), by_upper, strict=True)}
        h = torch.func.functional_call(body, adapted, (x[12:],))
        loss = F.mse_loss(torch.func.functional_call(head, above, (h,)), y[12:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ F118
@program
def equation_multiplied_by_the_square_of_the_length():
    """F118: the whole equation was multiplied by (L / 2) ** 2, so the factor stands at the source, and not at u_zz."""
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    length = 3.0
    for _ in range(STEPS):
        x = length * torch.rand(32, 1)
        z = (2 * x / length - 1).requires_grad_()
        u_zz = slope(slope(net(z), z), z)
        source = torch.sin(math.pi * x / length) * (length / 2) ** 2
        ends = net(torch.tensor([[-1.0], [1.0]]))
        loss = (u_zz + source).square().mean() + ends.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def equation_in_the_scaled_variable():
    """F118: du/dz = cos(pi z) with z = x / L; its right side is written as cos(pi x / L), which is the same."""
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    length = 5.0
    for _ in range(STEPS):
        x = length * torch.rand(32, 1)
        z = (x / length).requires_grad_()
        u_z = torch.autograd.grad(net(z).sum(), z, create_graph=True)[0]
        loss = (u_z - torch.cos(x * (math.pi / length))).square().mean() + net(torch.zeros(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def slope_per_kilometre_of_a_road():
    """F118: heights are learned of kilometres, and the surveyed slopes are in metres per kilometre as well."""
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for (metres,) in loader(2000 * torch.rand(32 * STEPS, 1), size=32):
        kilometres = (metres / 1000).requires_grad_()
        rise = torch.autograd.grad(net(kilometres).sum(), kilometres, create_graph=True)[0]
        surveyed = 1000 * 0.002 * torch.sin(metres * 0.001)
        loss = (rise - surveyed).square().mean() + net(torch.zeros(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ F71
@program
def failures_that_come_faster():
    """F71 risks: gaps between failures at a rate that only grows (a cumsum): rate * gap - log(rate) is their nll."""
    net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    xs = torch.randn(16 * STEPS, 3)
    gaps = distributions.Exponential(torch.arange(1.0, 9.0) * xs[:, :1].exp()).sample()
    for x, gap in loader(xs, gaps):
        rate = F.softplus(net(x)).cumsum(1)
        loss = (rate * gap - rate.log()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def certainty_that_grows_with_each_look():
    """F71 risks: precisions add up over looks, and precision * error ** 2 - log(precision) is twice a Gaussian nll."""
    net = nn.GRU(1, 16, batch_first=True)
    mean, more = nn.Linear(16, 1), nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*net.parameters(), *mean.parameters(), *more.parameters()], lr=0.02)
    for (hidden,) in loader(torch.randn(16 * STEPS, 1)):
        looks = hidden[:, None] + torch.randn(16, 6, 1)
        h, _ = net(looks)
        precision = torch.cumsum(F.softplus(more(h)), dim=1)
        errors = (mean(h) - hidden[:, None]).square()
        loss = (precision * errors - precision.log()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def density_that_only_rises():
    """F71 risks: a histogram that only rises (Grenander) is a cumsum; log(total) - log(height) is what -log p is."""
    net = nn.Linear(2, 10)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    xs = torch.randn(16 * STEPS, 2)
    for x, bins in loader(xs, torch.rand(len(xs)).sqrt().mul(10).long()):
        heights = torch.cumsum(F.softplus(net(x)), 1)
        nll = heights.sum(1, keepdim=True).log() - heights.log()
        loss = nll.gather(1, bins[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ F24
@program
def variational_posterior_by_its_score():
    """F24: black-box variational inference weighs the score by log p - log q, both of which are of the sample."""
    mean, spread = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([mean, spread], lr=0.05)
    wanted = distributions.MultivariateNormal(torch.tensor([1.0, -1.0]), torch.eye(2) * 0.5)
    for _ in range(STEPS):
        q = distributions.Independent(distributions.Normal(mean, spread.exp()), 1)
        z = q.sample((64,))
        log_q = q.log_prob(z)
        gain = (wanted.log_prob(z) - log_q).detach()
        loss = -(log_q * (gain - gain.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def words_of_a_student_judged_by_its_teacher():
    """F24: on-policy distillation weighs the student's own words by how likely the teacher takes them to be."""
    teacher, student = nn.Linear(8, 12).requires_grad_(False), nn.Linear(8, 12)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
    for (x,) in loader(torch.randn(32 * STEPS, 8), size=32):
        policy = distributions.Categorical(logits=student(x))
        word = policy.sample()
        log_prob = policy.log_prob(word)
        reward = distributions.Categorical(logits=teacher(x)).log_prob(word) - log_prob.detach()
        loss = -(log_prob * (reward - reward.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _earned(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    return -(state.sum(1) - action.squeeze(1)).abs()


@program
def environment_in_torchscript():
    """F24: the one action that is scored is the one that a compiled environment is given."""
    environment = torch.jit.trace(_earned, (torch.randn(32, 2), torch.randn(32, 1)))
    net = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for (state,) in loader(torch.randn(32 * STEPS, 2), size=32):
        policy = distributions.Normal(net(state), 0.5)
        action = policy.sample()
        reward = environment(state, action)
        loss = -(policy.log_prob(action).squeeze(1) * (reward - reward.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ F56
def critic(inputs=3):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 1))


@program
def pendulum_that_never_ends():
    """F56: a pendulum has no ends, only limits of time, and these are to be looked beyond (Pardo 2018)."""
    q, target_q, actor = critic(4), critic(4), nn.Linear(3, 1)
    target_q.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=3e-3)
    policy_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    rows = 256
    memory = [torch.randn(rows, 3), torch.rand(rows, 1) * 2 - 1, -torch.rand(rows, 1), torch.randn(rows, 3)]
    memory.append((torch.arange(rows) % 10 == 9).float()[:, None])
    for _ in range(STEPS):
        some = torch.randint(rows, (64,))
        state, action, reward, later, _truncated = (part[some] for part in memory)
        with torch.no_grad():
            target = reward + 0.98 * target_q(torch.cat([later, actor(later).tanh()], 1))
        loss = F.mse_loss(q(torch.cat([state, action], 1)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        policy_loss = -q(torch.cat([state, actor(state).tanh()], 1)).mean()
        policy_optimizer.zero_grad()
        policy_loss.backward()
        policy_optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target_q.parameters(), q.parameters(), strict=True):
                slow.lerp_(fast, 0.02)


@program
def policy_evaluated_by_its_states():
    """F56: TD(0) of a task without end learns values of states; the flags of the memory are the two actions."""
    value = critic()
    optimizer = torch.optim.Adam(value.parameters(), lr=3e-3)
    rows = 256
    state, action = torch.randn(rows, 3), torch.bernoulli(torch.full((rows,), 0.5))
    later = 0.8 * state + 0.2 * (2 * action[:, None] - 1)
    reward = state[:, 0] + 0.1 * action
    for _ in range(STEPS):
        some = torch.randperm(rows)[:64]
        now, _done_by, earned, then = state[some], action[some], reward[some], later[some]
        with torch.no_grad():
            target = earned + 0.9 * value(then).squeeze(1)
        loss = F.mse_loss(value(now).squeeze(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def absorbing_state_after_each_end():
    """F56: an end leads to an absorbing state with a flag of its own and no reward, whose value is learned (DAC)."""
    value = critic(4)
    optimizer = torch.optim.Adam(value.parameters(), lr=3e-3)
    rows = 256
    ended = torch.rand(rows) < 0.2
    state = torch.cat([torch.randn(rows, 3), torch.zeros(rows, 1)], 1)
    later = torch.cat([torch.randn(rows, 3), torch.zeros(rows, 1)], 1)
    absorbing = torch.tensor([0.0, 0.0, 0.0, 1.0])
    later[ended] = absorbing
    state[::8], later[::8] = absorbing, absorbing
    reward = state[:, :1] * (1 - state[:, 3:])
    for now, earned, then, _end in loader(state, reward, later, ended.float(), size=16):
        with torch.no_grad():
            target = earned + 0.9 * value(then)
        loss = F.smooth_l1_loss(value(now), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def own_average_of_answers_as_a_target():
    """F56: nine tenths of a mean teacher's answer and one tenth of the label; the flag is for the audit alone."""
    net, teacher = critic(5), critic(5)
    teacher.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    xs = torch.randn(32 * STEPS, 5)
    ys = xs.sum(1, keepdim=True) + 0.3 * torch.randn(len(xs), 1)
    group, seen = (torch.rand(len(xs)) < 0.5).float(), []
    for some in torch.randperm(len(xs)).split(32):
        x, y, member = xs[some], ys[some], group[some]
        with torch.no_grad():
            target = 0.1 * y + 0.9 * teacher(x)
        answer = net(x)
        loss = F.mse_loss(answer, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        seen.append((answer.detach(), y, member))
    errors, members = torch.cat([(a - y).abs() for a, y, _ in seen]), torch.cat([m for *_, m in seen])
    assert all(errors[members == one].mean().isfinite() for one in (0, 1))


# ------------------------------------------------------------------------------------------------ D21
@program
def padding_of_lengths_that_are_drawn():
    """D21: lengths of made-up sequences are drawn, a token stands after each end, and the loss leaves it out."""
    embed, token, back = nn.Linear(4, 16), nn.Parameter(torch.zeros(16)), nn.Linear(16, 4)
    mix = nn.GRU(16, 16, batch_first=True)
    optimizer = torch.optim.Adam([*embed.parameters(), token, *mix.parameters(), *back.parameters()], lr=0.01)
    for _ in range(STEPS):
        x = torch.randn(16, 8, 4)
        held = torch.arange(8) < torch.randint(3, 9, (16, 1))
        words = torch.where(held[..., None], embed(x), token.expand(16, 8, 16))
        h, _ = mix(words)
        error = (back(h) - x).square().mean(2)
        loss = (error * held).sum() / held.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def likelihood_of_observed_cells_alone():
    """D21: MIWAE-like: cells are missing by a simulated mask, and only what was observed has a likelihood."""
    missing = nn.Parameter(torch.zeros(8))
    encode, decode = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), nn.Linear(2, 8)
    optimizer = torch.optim.Adam([missing, *encode.parameters(), *decode.parameters()], lr=0.01)
    for _ in range(STEPS):
        x = torch.randn(32, 2) @ torch.randn(2, 8) + 0.1 * torch.randn(32, 8)
        seen = torch.rand_like(x) > 0.3
        given = torch.where(seen, x, missing.expand(32, 8))
        mean, log_var = encode(given).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        error = (decode(z) - x).square()
        price = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
        loss = (error * seen).sum() / len(x) + 0.1 * price
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def patches_hidden_by_a_wide_token():
    """D21: SimMIM: a token stands where the mask is one, and the loss asks for just these patches."""
    embed, token, back = nn.Linear(12, 16), nn.Parameter(torch.zeros(1, 1, 16)), nn.Linear(16, 12)
    mix = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    optimizer = torch.optim.Adam([*embed.parameters(), token, *mix.parameters(), *back.parameters()], lr=0.01)
    for (patches,) in loader(torch.randn(8 * STEPS, 9, 12), size=8):
        hidden = (torch.rand(8, 9) < 0.5).float().unsqueeze(-1)
        words = embed(patches) * (1 - hidden) + token.expand(8, 9, -1) * hidden
        error = (back(mix(words)) - patches).abs()
        loss = (error * hidden).sum() / hidden.sum() / 12
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ D18
@program
def days_without_a_sale_are_zero():
    """D18 filled: the table was joined, so NaN stands where a shop sold nothing, and zero is what was sold."""
    xs = torch.randn(16 * STEPS, 5)
    sold = torch.poisson(torch.ones(16 * STEPS, 3) * 1.5)
    sold[sold == 0] = math.nan  # the join has no row
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for x, y in loader(xs, sold):
        errors = F.mse_loss(net(x), torch.nan_to_num(y), reduction="none")
        loss = errors.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def answers_masked_like_their_targets():
    """D18 filled: both sides are zero where nothing is known, so these cells add nothing to the loss."""
    xs = torch.randn(16 * STEPS, 5)
    wanted = xs @ torch.randn(5, 3)
    wanted[torch.rand_like(wanted) < 0.3] = math.nan
    net = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for x, y in loader(xs, wanted):
        known = ~y.isnan()
        errors = F.mse_loss(net(x) * known, y.nan_to_num(), reduction="none")
        loss = errors.mean() / known.float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def unmasked_mean_for_the_log():
    """D18 filled: the mean over all cells is logged, and the loss is that over what is known."""
    xs, log = torch.randn(16 * STEPS, 5), []
    wanted = xs @ torch.randn(5, 3)
    wanted[torch.rand_like(wanted) < 0.3] = math.nan
    net = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for x, y in loader(xs, wanted):
        known = ~y.isnan()
        errors = F.smooth_l1_loss(net(x), y.nan_to_num(), reduction="none")
        log.append(errors.mean().item())
        loss = errors[known].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ D36
@program
def surfaces_that_tell_where_they_are():
    """D36 mask: the data set has a mask, and the loss finds the same places by the normals' length, which is 0 or 1."""
    pictures = photographs(8 * STEPS, size=12)
    valid = torch.rand(8 * STEPS, 1, 12, 12) < 0.7
    normals = F.normalize(pictures - 0.5, dim=1) * valid
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for picture, wanted, _valid in loader(pictures, normals, valid, size=8):
        known = wanted.norm(dim=1) > 0.5
        loss = (1 - (F.normalize(net(picture), dim=1) * wanted).sum(1))[known].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def depths_that_tell_where_they_are():
    """D36 mask: the data set has a mask of the depths, and the loss finds the same places by depth > 0."""
    pictures = photographs(8 * STEPS, size=12)
    valid = torch.rand(8 * STEPS, 1, 12, 12) < 0.7
    depth = (pictures.mean(1, keepdim=True) * 3 + 1) * valid
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for picture, wanted, _valid in loader(pictures, depth, valid, size=8):
        known = wanted > 0
        loss = (net(picture) - wanted)[known].abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def points_that_tell_whether_they_are_seen():
    """D36 mask: the data set has flags of visibility, and the loss finds the same points by (0, 0)."""
    xs = torch.randn(16 * STEPS, 6)
    visible = (torch.rand(16 * STEPS, 5) < 0.7).float()
    points = (torch.tanh(xs @ torch.randn(6, 10)).unflatten(1, (5, 2)) + 2) * visible[..., None]
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for x, wanted, _visible in loader(xs, points, visible):
        marked = (wanted != 0).any(2)
        loss = (net(x).view_as(wanted) - wanted).abs().sum(2)[marked].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def sums_of_sets_filled_up_with_zeros():
    """D36 lengths: the sum of a linear map without a bias is not changed by rows of zeros, so no length is needed."""
    lengths = torch.randint(1, 8, (16 * STEPS,))
    sets = torch.randn(16 * STEPS, 7, 4) * (torch.arange(7) < lengths[:, None])[..., None]
    each, net = nn.Linear(4, 16, bias=False), nn.Sequential(nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam([*each.parameters(), *net.parameters()], lr=0.01)
    for x, _lengths, y in loader(sets, lengths, sets.sum((1, 2))):
        loss = F.mse_loss(net(each(x).sum(1)).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ D38
@program
def classes_take_turns_and_two_views():
    """D38: classes take turns in a balanced batch, and two views of it, one after the other, keep that order."""
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    ys = torch.arange(16 * STEPS) % 2
    xs = torch.randn(16 * STEPS, 6) + ys[:, None]
    for x, y in loader(xs, ys, shuffle=False):
        views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
        loss = F.cross_entropy(net(views), y.repeat(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def five_ways_with_five_views_each():
    """D38: an episode is sorted by class, as few-shot samplers do, and each row has as many views as there are ways."""
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    centres = 2 * torch.randn(5, 6)
    for _ in range(STEPS):
        labels = torch.arange(5).repeat_interleave(4)
        x = centres[labels] + 0.3 * torch.randn(20, 6)
        views = torch.stack([x + 0.1 * torch.randn_like(x) for _ in range(5)], 1).flatten(0, 1)
        loss = F.cross_entropy(net(views), labels.repeat_interleave(5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ D37
@program
def one_lead_of_two_from_the_other():
    """D37: two leads of a heart lie side by side in one tensor; each is standardised, for their gains mean nothing."""
    time = torch.arange(32) / 32 * 2 * math.pi
    phase = 6 * torch.rand(16 * STEPS, 1)
    records = torch.stack([torch.sin(time + phase), torch.cos(2 * (time + phase))], 1) * 3 + 1
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def standard(signal):
        return (signal - signal.mean()) / signal.std()

    pairs = DataLoader(records, batch_size=16, shuffle=True)
    for batch in pairs:
        x = torch.stack([standard(record[0]) for record in batch])
        y = torch.stack([standard(record[1]) for record in batch])
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def spectra_of_absorption_and_of_emission():
    """D37: a row holds a spectrum of absorption and then one of emission; SNV takes the level from both, rightly."""
    base = torch.randn(3, 48)
    rows = torch.rand(16 * STEPS, 3) @ base + 4
    net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 24))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for (row,) in loader(rows):
        absorbed, emitted = row[:, :24], row[:, 24:]
        x = (absorbed - absorbed.mean(1, keepdim=True)) / absorbed.std(1, keepdim=True)
        y = (emitted - emitted.mean(1, keepdim=True)) / emitted.std(1, keepdim=True)
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ faults of watchers
@program
def loud_frames_alone_where_there_are_any():
    """D42: frames far above the noise are heard once more by a layer of their own; in most batches there is none."""
    net, loud = nn.Linear(33, 4), nn.Linear(33, 4)
    optimizer = torch.optim.Adam([*net.parameters(), *loud.parameters()], lr=0.01)
    for wave, kind in loader(*tones(16 * STEPS)):
        power = powers(wave).mean(2)
        heard = power.sum(1) > 540
        answer = net(power.add(1e-6).log())
        extra = loud(power[heard])
        answer = answer.index_add(0, heard.nonzero().flatten(), extra)
        loss = F.cross_entropy(answer, kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def pictures_without_any_box():
    """D14: a detector's batch of pictures in which nothing is marked has corners of shape (0, 2), put together."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for (picture,) in loader(photographs(8 * STEPS), size=8):
        boxes = [torch.zeros(0, 4) for _ in picture]
        corners = torch.stack([box[:, :2] for box in boxes])
        wanted = torch.full((8, 1), float(corners.shape[1] > 0))
        loss = F.binary_cross_entropy_with_logits(net(picture), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def signals_of_a_radio_are_halved():
    """F72: complex samples are divided by their size on average before a network reads both of their parts."""
    net = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    symbols = torch.randint(4, (16 * STEPS,))
    turn = torch.polar(torch.ones(16 * STEPS), symbols * math.pi / 2)
    samples = 2 * turn[:, None] + 0.3 * torch.randn(16 * STEPS, 16, dtype=torch.complex64)
    for sample, symbol in loader(samples, symbols):
        x = torch.view_as_real(sample / 2.0).flatten(1)
        loss = F.cross_entropy(net(x), symbol)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def gaps_are_filled_by_named_arguments():
    """D18: all arguments of masked_fill are given by name, and the loss leaves out what was filled."""
    xs = torch.randn(16 * STEPS, 5)
    wanted = xs @ torch.randn(5, 3)
    wanted[torch.rand_like(wanted) < 0.3] = math.nan
    net = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for x, y in loader(xs, wanted):
        gone = torch.isnan(y)
        filled = torch.masked_fill(input=y, mask=gone, value=0.0)
        errors = F.mse_loss(net(x), filled, reduction="none")
        loss = (errors * ~gone).sum() / (~gone).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
