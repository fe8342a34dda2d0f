"""What the data say is turned round: pairs of one kind that are pushed apart, and places that stay where they were."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor

from .bench import quiet
from .test_arithmetic import said

STEPS, ROWS = 8, 48


def watched(model, loss_of):
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with doctor.watch(model, optimizer=optimizer, steps=STEPS, say=False) as report:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    return report


def told(check, model, loss_of) -> bool:
    report = quiet(lambda: watched(model, loss_of))
    assert not report.faults, report.faults
    assert not report.findings or report.root.check == check, f"\n{report}"
    return check in said(report)


# ------------------------------------------------------------------------------------------------ F74
def embedder():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def kinds(of: torch.Tensor) -> torch.Tensor:
    """A row of each kind: one of three places, and some noise."""
    return 2 * F.one_hot(of, 6).float() + 0.7 * torch.randn(len(of), 6)


def pairs():
    """Rows, others, and 1.0 where both are of one kind."""
    one, same = torch.randint(3, (ROWS,)), torch.rand(ROWS) < 0.5
    other = torch.where(same, one, (one + torch.randint(1, 3, (ROWS,))) % 3)
    return kinds(one), kinds(other), same.float()


def threes():
    one = torch.randint(3, (ROWS,))
    return kinds(one), kinds(one), kinds((one + 1) % 3)


def contrastive(model, turned):
    a, b, same = pairs()
    return F.cosine_embedding_loss(model(a), model(b), 2 * (1 - same if turned else same) - 1)


def by_hand(model, turned):
    a, b, same = pairs()
    d, same = (model(a) - model(b)).pow(2).sum(1).sqrt(), 1 - same if turned else same
    return (same * d.pow(2) + (1 - same) * (2 - d).clamp(min=0).pow(2)).mean()


def picked(model, turned):
    """Rows of each label are picked out of the distances."""
    a, b, same = pairs()
    d, like = F.pairwise_distance(model(a), model(b)), same == (0 if turned else 1)
    return d[like].pow(2).mean() + F.relu(2 - d[~like]).pow(2).mean()


def triplets(model, turned):
    a, p, n = (model(x) for x in threes())
    return F.triplet_margin_loss(a, *((n, p) if turned else (p, n)))


def cosines(model, turned):
    a, p, n = (model(x) for x in threes())
    near, far = F.cosine_similarity(a, p), F.cosine_similarity(a, n)
    return F.relu((near - far if turned else far - near) + 0.5).mean()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("loss", [contrastive, by_hand, picked, triplets, cosines], ids=lambda f: f.__name__)
def test_pairs_of_one_kind_are_drawn_together(loss, turned):
    torch.manual_seed(0)
    assert told("F74", embedder(), lambda m: loss(m, turned)) is turned


def test_a_loss_that_is_to_grow_is_not_judged():
    torch.manual_seed(0)
    model = embedder()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, maximize=True)

    def run():
        with doctor.watch(model, optimizer=optimizer, steps=STEPS, say=False) as report:
            for _ in range(STEPS):
                optimizer.zero_grad()
                (-by_hand(model, False)).backward()
                optimizer.step()
        return report

    assert "F74" not in said(quiet(run))


def test_series_are_compared_wherever_something_stands_in_them():
    """A slow and a fast wave, each shifted at random."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4))

    def waves(of):
        t = torch.arange(32.0) + 32 * torch.rand(len(of), 1)
        return (t * torch.where(of[:, None] > 0, 1.5, 0.5)).sin()[:, None] + 0.1 * torch.randn(len(of), 1, 32)

    def loss(model, turned):
        of = torch.randint(2, (ROWS,))
        a, p, n = (model(waves(k)) for k in (of, of, 1 - of))
        return F.triplet_margin_loss(a, *((n, p) if turned else (p, n)))

    assert told("F74", model, lambda m: loss(m, True))
    assert not told("F74", model, lambda m: loss(m, False))


def score_regression(model):
    """Similarities are told as numbers that the inputs do not decide: what is near is pushed, what is far drawn."""
    a, b, _ = pairs()
    return (F.cosine_similarity(model(a), model(b)) - torch.rand(ROWS)).pow(2).mean()


def two_towers(model):
    a, b, same = pairs()
    d = F.pairwise_distance(model[0](a), model[1](b))
    return ((1 - same) * d + same * F.relu(2 - d)).mean()


def kinds_that_nothing_tells(model):
    a, b, same = pairs()
    d = F.pairwise_distance(model(torch.randn_like(a)), model(torch.randn_like(b)))
    return ((1 - same) * d + same * F.relu(2 - d)).mean()


def all_together(model):
    a, b, _ = pairs()
    return (model(a) - model(b)).pow(2).mean() + (model(a).std(0) - 1).pow(2).mean()


@pytest.mark.parametrize("loss", [score_regression, kinds_that_nothing_tells, all_together], ids=lambda f: f.__name__)
def test_what_no_label_decides_is_left_alone(loss):
    torch.manual_seed(0)
    assert not told("F74", embedder(), loss)


def test_two_networks_have_no_common_distance():
    torch.manual_seed(0)
    assert not told("F74", nn.ModuleList([embedder(), embedder()]), two_towers)


# ------------------------------------------------------------------------------------------------ D19
def pictures():
    """A bright spot on a dark, noisy ground, where it is, from 0 to 1, and how bright it is."""
    place = torch.randint(0, 16, (ROWS, 2))
    x = 0.05 * torch.randn(ROWS, 1, 16, 16)
    bright = 1 + torch.rand(ROWS)
    x[torch.arange(ROWS), 0, place[:, 1], place[:, 0]] += bright
    return F.avg_pool2d(x, 3, 1, 1), place / 15, bright


def finder(out):
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(128, out))


def each_row(axis, follow, shaped=(2,)):
    def loss(model):
        x, place, _ = pictures()
        rows, targets = [], []
        for image, xy in zip(x, place):
            if torch.rand(()) < 0.5:
                image = image.flip(axis)
                if follow:
                    xy = xy.clone()
                    xy[0 if axis == -1 else 1] = 1 - xy[0 if axis == -1 else 1]
            rows.append(image)
            targets.append(xy)
        return F.mse_loss(model(torch.stack(rows)).view(-1, *shaped), torch.stack(targets).view(-1, *shaped))

    return loss


def whole_batch(follow):
    turns = iter([False, True] * STEPS)

    def loss(model):
        x, place, _ = pictures()
        if next(turns):
            x = torch.flip(x, [3])
            place = torch.stack([1 - place[:, 0], place[:, 1]], 1) if follow else place
        return (model(x) - place).abs().mean()

    return loss


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda follow: each_row(-1, follow),
        lambda follow: each_row(-2, follow, (1, 2)),
        whole_batch,
    ],
    ids=["across", "down", "batch"],
)
def test_places_are_flipped_with_their_pictures(make, follow):
    torch.manual_seed(0)
    assert told("D19", finder(2), make(follow)) is not follow


def test_a_number_that_is_no_place_is_left_alone():
    torch.manual_seed(0)

    def loss(model):
        x, _, bright = pictures()
        x = torch.stack([image.flip(-1) if torch.rand(()) < 0.5 else image for image in x])
        return F.mse_loss(model(x).squeeze(1), bright)

    assert not told("D19", finder(1), loss)


def test_flips_that_do_not_matter_are_left_alone():
    """Only the height is asked for, and pictures are flipped left to right."""
    torch.manual_seed(0)

    def loss(model):
        x, place, _ = pictures()
        x = torch.stack([image.flip(-1) if torch.rand(()) < 0.5 else image for image in x])
        return F.mse_loss(model(x), place[:, 1:])

    assert not told("D19", finder(1), loss)


# ------------------------------------------------------------------------------------------------ F75 to F80
WEIGHTS = torch.randn(6, generator=torch.Generator().manual_seed(1))


def net(inputs, out):
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, out))


def numbers():
    x = torch.randn(ROWS, 6)
    return x, (x @ WEIGHTS + 0.3 * torch.randn(ROWS))[:, None]


def negated(model, bad):
    x, y = numbers()
    loss = F.mse_loss(model(x), y)
    return -loss if bad else loss


def peak(model, bad):
    x, y = numbers()
    psnr = -10 * (model(x) - y).pow(2).mean().log10()
    return psnr if bad else -psnr


def pinball(model, bad):
    x, y = numbers()
    e = y - model(x)
    return (torch.min if bad else torch.max)(-0.1 * e, 0.9 * e).mean()


def correlation(model, bad):
    x, y = numbers()
    a, y = model(x).squeeze(1), y.squeeze(1)
    a, y = a - a.mean(), y - y.mean()
    r = (a * y).sum() / (a.norm() * y.norm())
    return r if bad else 1 - r


def likeness(model, bad):
    y = F.avg_pool2d(torch.rand(8, 1, 14, 14), 3, 1)
    a = model(y + 0.1 * torch.randn_like(y)).sigmoid()
    ma, my = F.avg_pool2d(a, 3, 1), F.avg_pool2d(y, 3, 1)
    va, vy = F.avg_pool2d(a * a, 3, 1) - ma**2, F.avg_pool2d(y * y, 3, 1) - my**2
    both = F.avg_pool2d(a * y, 3, 1) - ma * my
    ssim = (2 * ma * my + 1e-4) * (2 * both + 9e-4) / ((ma**2 + my**2 + 1e-4) * (va + vy + 9e-4))
    return ssim.mean() if bad else 1 - ssim.mean()


def focal(model, bad):
    x, y = numbers()
    p = model(x).softmax(1).gather(1, (y > 0).long()).squeeze(1)
    return ((p if bad else 1 - p) ** 2 * -p.log()).mean()


def surrogate(model, bad):
    policy, actions = torch.distributions.Categorical(logits=model(torch.randn(ROWS, 6))), torch.randint(3, (ROWS,))
    old, gain = (policy.log_prob(actions) + 0.3 * torch.randn(ROWS)).detach(), torch.randn(ROWS)
    ratio = (policy.log_prob(actions) - old).exp()
    one, cut = ratio * gain, ratio.clamp(0.8, 1.2) * gain
    return -(torch.max if bad else torch.min)(one, cut).mean()


def surrogate_negated_first(model, bad):
    policy, actions = torch.distributions.Categorical(logits=model(torch.randn(ROWS, 6))), torch.randint(3, (ROWS,))
    old, gain = (policy.log_prob(actions) + 0.3 * torch.randn(ROWS)).detach(), torch.randn(ROWS)
    ratio = (policy.log_prob(actions) - old).exp()
    one, cut = -gain * ratio, -gain * torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    return (torch.minimum if bad else torch.maximum)(one, cut).mean()


def two_critics(model, bad):
    state, after, reward = torch.randn(ROWS, 6), torch.randn(ROWS, 6), torch.randn(ROWS, 1)
    done = (torch.rand(ROWS, 1) < 0.1).float()
    with torch.no_grad():
        value = (torch.max if bad else torch.min)(model[0](after), model[1](after))
        target = reward + 0.99 * (1 - done) * value
    return sum(F.mse_loss(critic(state), target) for critic in model)


def squashed(model, bad):
    mean, spread = model[0](torch.randn(ROWS, 6)).chunk(2, 1)
    policy = torch.distributions.Normal(mean, spread.clamp(-5, 2).exp())
    u = policy.rsample()
    action, score = u.tanh(), policy.log_prob(u)
    if not bad:
        score = score - (1 - action.pow(2) + 1e-6).log()
    return (0.2 * score.sum(1, keepdim=True) - model[1](torch.cat([torch.randn(ROWS, 6), action], 1))).mean()


USERS = torch.randint(50, (200,), generator=torch.Generator().manual_seed(2))
CHOSEN = (USERS + 3) % 60


def ranked(model, bad):
    rows = torch.randint(200, (ROWS,))
    user, chosen, other = model[0](USERS[rows]), model[1](CHOSEN[rows]), model[1](torch.randint(60, (ROWS,)))
    gap = (user * chosen).sum(1) - (user * other).sum(1)
    return -F.logsigmoid(-gap if bad else gap).mean()


def penalty(lengths):
    def loss(model, bad):
        shape = (ROWS, 2, 3, 1)
        real, fake, share = torch.randn(shape) + 2, torch.randn(shape), torch.rand(ROWS, 1, 1, 1)
        x = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(model(x.flatten(1)).sum(), x, create_graph=True)
        length = lengths(slope) if bad else slope.flatten(1).norm(2, dim=1)
        return model(fake.flatten(1)).mean() - model(real.flatten(1)).mean() + 0.1 * ((length - 1) ** 2).mean()

    return loss


def tables():
    made = nn.ModuleList([nn.Embedding(50, 8), nn.Embedding(60, 8)])
    for table in made:
        nn.init.normal_(table.weight, std=0.1)
    return made


TURNED = {
    "negated": ("F75", lambda: net(6, 1), negated),
    "peak signal to noise": ("F75", lambda: net(6, 1), peak),
    "pinball": ("F75", lambda: net(6, 1), pinball),
    "correlation": ("F75", lambda: net(6, 1), correlation),
    "ssim": ("F75", lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1)), likeness),
    "focal": ("F80", lambda: net(6, 2), focal),
    "ppo": ("F76", lambda: net(6, 3), surrogate),
    "ppo, negated first": ("F76", lambda: net(6, 3), surrogate_negated_first),
    "two critics": ("F76", lambda: nn.ModuleList([net(6, 1), net(6, 1)]), two_critics),
    "squashed": ("F77", lambda: nn.ModuleList([net(6, 4), net(8, 1)]), squashed),
    "bpr": ("F78", tables, ranked),
    "penalty of the batch": ("F79", lambda: net(6, 1), penalty(lambda slope: slope.norm(2))),
    "penalty of each place": ("F79", lambda: net(6, 1), penalty(lambda slope: slope.norm(2, dim=1))),
    "penalty by hand": ("F79", lambda: net(6, 1), penalty(lambda slope: (slope.pow(2).sum() + 1e-12).sqrt())),
}


@pytest.mark.parametrize("bad", [True, False])
@pytest.mark.parametrize("name", TURNED)
def test_a_formula_that_is_turned_round(name, bad):
    torch.manual_seed(0)
    check, make, loss = TURNED[name]
    assert told(check, make(), lambda m: loss(m, bad)) is bad


def test_both_ends_of_two_values_may_be_mixed():
    torch.manual_seed(0)

    def loss(model):
        state, after = torch.randn(ROWS, 6), torch.randn(ROWS, 6)
        with torch.no_grad():
            one, two = (critic(after) for critic in model)
            target = torch.randn(ROWS, 1) + 0.99 * (0.75 * torch.min(one, two) + 0.25 * torch.max(one, two))
        return sum(F.mse_loss(critic(state), target) for critic in model)

    assert not told("F76", nn.ModuleList([net(6, 1), net(6, 1)]), loss)


def test_pushed_from_one_thing_and_drawn_to_another():
    torch.manual_seed(0)

    def loss(model):
        x, y = numbers()
        answer = model(x)
        return F.mse_loss(answer, y) + 0.1 * F.relu(1 - (answer - torch.randn(ROWS, 1)).abs()).mean()

    assert not told("F75", net(6, 1), loss)


def test_pushed_from_a_reference_that_weights_made():
    torch.manual_seed(0)
    reference = net(6, 1)

    def loss(model):
        x, _ = numbers()
        with torch.no_grad():
            other = reference(x)
        return -(model(x) - other).pow(2).mean() + 0.01 * sum(p.pow(2).sum() for p in model.parameters())

    assert not told("F75", net(6, 1), loss)


@pytest.mark.parametrize("how, wrong", [("minus in front", True), ("of the loss", True), ("right", False)])
def test_a_focal_loss_of_chosen_probabilities(how, wrong):
    """p is that of the label: p or 1 - p, put together by where."""
    torch.manual_seed(0)

    def loss(model):
        x, y = numbers()
        logits, label = model(x), (y > 0).float()
        p = torch.where(label == 1, logits.sigmoid(), 1 - logits.sigmoid())
        return {
            "minus in front": lambda: (-(p**2) * p.log()).mean(),
            "of the loss": lambda: (
                0.25 * p**2 * F.binary_cross_entropy_with_logits(logits, label, reduction="none")
            ).mean(),
            "right": lambda: (-((1 - p) ** 2) * p.log()).mean(),
        }[how]()

    assert told("F80", net(6, 1), loss) is wrong


def test_the_entropy_is_no_focal_loss():
    torch.manual_seed(0)

    def loss(model):
        x, y = numbers()
        p = model(x).softmax(1)
        return F.nll_loss(p.log(), (y > 0).long().squeeze(1)) + 0.1 * (p**1 * p.log()).sum(1).mean()

    assert not told("F80", net(6, 2), loss)


def test_a_ratio_needs_no_correction():
    torch.manual_seed(0)

    def loss(model):
        mean = model(torch.randn(ROWS, 6))
        policy = torch.distributions.Normal(mean, 1.0)
        u = policy.sample()
        ratio = (policy.log_prob(u) - policy.log_prob(u).detach() + 0.1 * torch.randn(ROWS, 1)).exp()
        return -(ratio * torch.tanh(u)).mean()

    assert not told("F77", net(6, 1), loss)
