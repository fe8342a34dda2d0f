"""The faults of judge23 that got a rule, and of a reader's list of gaps, and healthy programs that look like them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor

from .bench import quiet
from .test_meetings import blamed
from .test_turned import net, watched


def conv(out: int, *, channels: int = 1):
    return nn.Conv2d(channels, out, 3, padding=1)


def classifier(side: int, classes: int = 3):
    return nn.Sequential(conv(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * side * side, classes))


# ------------------------------------------------------------------------------------------------ F68
def mixed(how: str):
    def loss(model):
        x, y = torch.randn(16, 1, 8, 8), torch.randint(3, (16,))
        order, wide = torch.randperm(16), 4 if how == "half and half" else 2
        lam = 1 - wide / 8
        if how == "cut in two steps":
            x = x.clone()
            x[:, :, :, :wide] = x[order][:, :, :, :wide]
        elif "mixup" in how:
            x = lam * x + (1 - lam) * x[order]
        else:
            x = x.clone()
            x[:, :, :, :wide] = x[order, :, :, :wide]
        asked = 1 - lam if "right" not in how else lam
        out = model(x)
        return asked * F.cross_entropy(out, y) + (1 - asked) * F.cross_entropy(out, y[order])

    return loss


MIXED = {"cut": True, "cut in two steps": True, "mixup": True, "right": False, "mixup, right": False}


@pytest.mark.parametrize("how, wrong", [*MIXED.items(), ("half and half", False)])
def test_shares_of_mixed_rows(how, wrong):
    assert blamed("F68", classifier(8), mixed(how)) is wrong


# ------------------------------------------------------------------------------------------------ F99
def mining(how: str):
    def loss(model):
        labels = torch.arange(4).repeat_interleave(4) if how != "views" else torch.arange(16)
        z = F.normalize(model(torch.randn(16, 6) + F.one_hot(labels % 6, 6)), dim=1)
        d, same, own = torch.cdist(z, z), labels[:, None] == labels[None, :], torch.eye(16, dtype=torch.bool)
        farthest = (d * same.float()).amax(1)
        nearest = {
            "added": lambda: (d + 1e6 * own.float()).min(1).values,
            "filled": lambda: d.masked_fill(own, float("inf")).amin(dim=1),
            "views": lambda: d.masked_fill(own, float("inf")).amin(dim=1),
            "right": lambda: d.masked_fill(same, float("inf")).amin(dim=1),
            "right, added": lambda: (d + 1e6 * same.float()).min(1).values,
        }[how]()
        return F.relu(farthest - nearest + 0.3).mean()

    return loss


@pytest.mark.parametrize("how", ("added", "filled", "views", "right", "right, added"))
def test_the_nearest_negative_is_of_another_class(how):
    assert blamed("F99", net(6, 8), mining(how)) is (how in ("added", "filled"))


# ------------------------------------------------------------------------------------------------ D29
def clips(how: str):
    def loss(model):
        y = torch.randint(3, (6,))
        clip = torch.randn(6, 4, 1, 8, 8) + y.view(6, 1, 1, 1, 1)
        frames = clip.transpose(0, 1).reshape(24, 1, 8, 8) if how == "time first" else clip.flatten(0, 1)
        return F.cross_entropy(model(frames), y.repeat_interleave(4) if how == "right" else y.repeat(4))

    return loss


@pytest.mark.parametrize("how, wrong", [("", True), ("right", False), ("time first", False)])
def test_labels_of_clips(how, wrong):
    assert blamed("D29", classifier(8), clips(how)) is wrong


# ------------------------------------------------------------------------------------------------ D21
class Filler(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.table, self.token = how, nn.Linear(6, 8), nn.Parameter(torch.zeros(8))
        self.reader, self.out = nn.GRU(8, 8, batch_first=True, bidirectional=True), nn.Linear(16, 6)

    def forward(self, x, hidden):
        kept = ~hidden[..., None]
        if self.how == "arithmetic":
            h = self.table(x) * kept.float() + self.token * hidden[..., None].float()
        else:
            h = torch.where(kept, self.table(x), self.token)
        return self.out(self.reader(h)[0])


@pytest.mark.parametrize("how", ("where", "arithmetic"))
@pytest.mark.parametrize("wrong", (True, False))
def test_the_loss_asks_for_what_is_hidden(how, wrong):
    def loss(model):
        x = torch.randn(8, 5, 6)
        hidden = torch.rand(8, 5).argsort(1) < 2
        error = (model(x, hidden) - x).pow(2).mean(-1)
        asked = ~hidden if wrong else hidden
        return (error * asked.float()).sum() / asked.sum()

    assert blamed("D21", Filler(how), loss) is wrong


# ------------------------------------------------------------------------------------------------ F30
@pytest.mark.parametrize("right", (True, False))
def test_a_larger_picture_is_made_by_pixel_shuffle(right):
    def loss(model):
        x = torch.randn(4, 1, 16, 16)
        out = model(F.avg_pool2d(x, 2))  # (4, 4, 8, 8)
        return F.mse_loss(F.pixel_shuffle(out, 2) if right else out.view(4, 1, 16, 16), x)

    assert blamed("F30", conv(4), loss) is not right


@pytest.mark.parametrize("how, wrong", [("lines", True), ("patches", False), ("rows of a sequence", False)])
def test_patches_are_squares(how, wrong):
    side = 16 if how == "rows of a sequence" else 24

    def loss(model):
        x = torch.randn(4, 1, side, side)
        if how == "patches":
            x = x.reshape(4, 1, 6, 4, 6, 4).permute(0, 2, 4, 1, 3, 5)
        return F.cross_entropy(model(x.reshape(4, (side // 4) ** 2, 16)).mean(1), torch.randint(3, (4,)))

    assert blamed("F30", net(16, 3), loss) is wrong


# ------------------------------------------------------------------------------------------------ F21
@pytest.mark.parametrize("how, wrong", [("column", True), ("squeezed", False), ("rewards as a column", False)])
def test_the_column_of_a_critic(how, wrong):
    def loss(model):
        states, coming, rewards = torch.randn(16, 4), torch.randn(16, 4), torch.randn(16)

        def value(x):
            return model(x).squeeze(-1) if how == "squeezed" else model(x)

        if how == "rewards as a column":
            rewards = rewards[:, None]
        with torch.no_grad():
            wanted = rewards + 0.9 * value(coming)
        return (wanted - value(states)).pow(2).mean()

    assert blamed("F21", net(4, 1), loss) is wrong


# ------------------------------------------------------------------------------------------------ F37, F4
@pytest.mark.parametrize("rows, over, wrong", [(96, 1.0, True), (96, 0.1, False), (16, 1.0, False)])
def test_cosines_of_many_rows_need_a_temperature(rows, over, wrong):
    def loss(model):
        x = torch.randn(rows, 6)
        one, two = (F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        return F.cross_entropy(one @ two.T / over if over != 1 else one @ two.T, torch.arange(rows))

    assert blamed("F37", net(6, 8), loss) is wrong


def test_a_margin_with_its_scale_begins_far_from_guessing():
    weight = nn.Parameter(torch.randn(5, 8))

    def loss(model):
        x = torch.randn(32, 6)
        y = x[:, :5].argmax(1)
        cosines = F.normalize(model[0](x), dim=1) @ F.normalize(weight, dim=1).T
        return F.cross_entropy(64 * (cosines - 0.35 * F.one_hot(y, 5)), y)

    model = nn.ModuleList([net(6, 8)])
    model.register_parameter("weight", weight)
    assert not blamed("F4", model, loss)


# ------------------------------------------------------------------------------------------------ F40
class Bayes(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.rho = nn.Parameter(torch.randn(200, 6) / 3), nn.Parameter(torch.full((200, 6), -4.0))
        self.head = nn.Linear(200, 1)

    def forward(self, x):
        return self.head(F.relu(x @ (self.mean + F.softplus(self.rho) * torch.randn_like(self.mean)).T))

    def cost(self):
        spread = F.softplus(self.rho)
        return (0.5 * (spread**2 + self.mean**2 - 1) - spread.log()).sum()


@pytest.mark.parametrize("how, wrong", [("whole", True), ("divided", False), ("a decay", False)])
def test_a_divergence_of_weights_counts_once_for_all_data(how, wrong):
    def loss(model):
        x = torch.randn(32, 6)
        cost = {
            "whole": model.cost,
            "divided": lambda: model.cost() / 4000,
            "a decay": lambda: sum(p.pow(2).sum() for p in model.parameters()),
        }[how]()
        return F.mse_loss(model(x), x[:, :1]) + cost

    assert blamed("F40", Bayes(), loss) is wrong


# ------------------------------------------------------------------------------------------------ F95
COMPONENTS = ("of logarithms", "with the entropy", "of responsibilities", "gates of experts", "logsumexp")


@pytest.mark.parametrize("how", COMPONENTS)
def test_a_logarithm_of_a_sum(how):
    def loss(model):
        x = torch.randn(32, 6)
        pi, mean, spread = model(x).chunk(3, 1)
        log_pi, spread = pi.log_softmax(1), spread.clamp(-3, 3)
        density = -0.5 * ((x[:, :1] - mean) / spread.exp()) ** 2 - spread
        if how == "of logarithms":
            return -(log_pi.exp() * density).sum(1).mean()
        if how == "with the entropy":
            return -(log_pi.exp() * (density - log_pi)).sum(1).mean()
        if how == "of responsibilities":
            return -((log_pi + density).softmax(1).detach() * (log_pi + density)).sum(1).mean()
        if how == "gates of experts":
            return ((log_pi.exp() * mean).sum(1) - x[:, 0]).pow(2).mean()
        return -(log_pi + density).logsumexp(1).mean()

    assert blamed("F95", net(6, 12), loss) is (how == "of logarithms")


# ------------------------------------------------------------------------------------------------ S44
@pytest.mark.parametrize("how, wrong", [("", True), ("right", False), ("drawn in turns", False), ("other way", True)])
def test_prototypes_of_one_class_each(how, wrong):
    def loss(model):
        middles = 3 * torch.randn(5, 6)
        turns = how in ("drawn in turns", "other way")
        of = torch.arange(5).repeat(4) if turns else torch.arange(5).repeat_interleave(4)
        z = model(middles[of] + 0.5 * torch.randn(20, 6))
        queries = torch.arange(5).repeat_interleave(3)
        by_class = how in ("right", "other way")
        prototypes = z.view(5, 4, -1).mean(1) if by_class else z.view(4, 5, -1).mean(0)
        return F.cross_entropy(-torch.cdist(model(middles[queries]), prototypes), queries)

    assert blamed("S44", net(6, 8), loss) is wrong


# ------------------------------------------------------------------------------------------------ D18
def test_a_mean_counts_once_however_often_it_is_compared():
    torch.manual_seed(0)

    def loss(model):
        middles = 3 * torch.randn(5, 6)
        z = model(middles.repeat_interleave(4, 0) + 0.5 * torch.randn(20, 6))
        prototypes, queries = z.view(4, 5, -1).mean(0), model(middles)
        far = torch.stack([(queries - prototypes[n]).pow(2).sum(1) for n in range(5)], 1)
        return F.cross_entropy(-far, torch.arange(5))

    report = quiet(lambda: watched(net(6, 8), loss))
    assert report.root.check == "S44" and report.root.observed.endswith("in 3 cuts")


@pytest.mark.parametrize("how", ("grid", "anchors", "of what is there", "with weights", "amounts"))
def test_boxes_of_the_background(how):
    def loss(model):
        there = torch.rand(8, 1, 12, 12) < 0.06
        x, boxes = there + 0.1 * torch.randn(8, 1, 12, 12), torch.rand(8, 4, 12, 12) * there
        out = model(x)
        classes = F.binary_cross_entropy_with_logits(out[:, :1], there.float())
        if how == "anchors":
            rows, wanted = out.flatten(2).transpose(1, 2), boxes.flatten(2).transpose(1, 2)
            classes = F.cross_entropy(rows[..., :2].reshape(-1, 2), there.flatten().long())
            return classes + F.smooth_l1_loss(rows[..., 1:], wanted)
        if how == "of what is there":
            on = there.expand_as(boxes)
            return classes + F.smooth_l1_loss(out[:, 1:][on], boxes[on])
        if how == "with weights":
            return classes + (F.smooth_l1_loss(out[:, 1:], boxes, reduction="none") * there).sum() / there.sum()
        if how == "amounts":
            return classes + F.mse_loss(out[:, 1:2], boxes[:, :1])
        return classes + F.smooth_l1_loss(out[:, 1:], boxes)

    assert blamed("D18", conv(5), loss) is (how in ("grid", "anchors"))


# ------------------------------------------------------------------------------------------------ D28
@pytest.mark.parametrize("turned", (True, False))
def test_cells_of_a_detector(turned):
    def loss(model):
        x, cells = 0.1 * torch.randn(16, 1, 24, 24), torch.zeros(16, 6, 6)
        for n, (row, column) in enumerate(torch.randint(6, (16, 2)).tolist()):
            x[n, 0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
            cells[n, column if turned else row, row if turned else column] = 1
        return F.binary_cross_entropy_with_logits(F.avg_pool2d(model(x), 4)[:, 0], cells)

    assert blamed("D28", conv(1), loss) is turned


# ------------------------------------------------------------------------------------------------ D19
@pytest.mark.parametrize("how, wrong", [("names kept", True), ("exchanged", False), ("one pair", False)])
def test_names_of_key_points(how, wrong):
    points = 2 if how == "one pair" else 4

    def loss(model):
        pictures, wanted = [], []
        for across, apart in zip((8 + 8 * torch.rand(16)).tolist(), (4 + 2 * torch.rand(16)).tolist(), strict=True):
            x, found = 0.05 * torch.randn(1, 24, 24), torch.zeros(points, 2)
            for n in range(points):
                at = across + (apart if n % 2 else -apart) / 2
                x[0, 8 + 6 * (n // 2), int(at)] = 1.0
                found[n] = torch.tensor([at / 23, (8 + 6 * (n // 2)) / 23])
            if torch.rand(()) < 0.5:
                x = x.flip(-1)
                found[:, 0] = 1 - found[:, 0]
                found = found[[1, 0, 3, 2][:points]] if how == "exchanged" else found
            pictures.append(x)
            wanted.append(found)
        return F.smooth_l1_loss(model(torch.stack(pictures)).view(16, points, 2), torch.stack(wanted))

    assert blamed("D19", classifier(24, 2 * points), loss) is wrong


# ------------------------------------------------------------------------------------------------ N6
@pytest.mark.parametrize("tasks", (True, False))
def test_tasks_on_one_batch_are_no_parts_of_a_batch(tasks):
    torch.manual_seed(0)
    data, model = torch.randn(200, 6), net(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def program():
        with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
            for _ in range(6):
                optimizer.zero_grad()
                order = torch.randperm(200)
                for part in range(3):
                    rows = data[order[:32] if tasks else order[32 * part : 32 * part + 32]]
                    F.mse_loss(model(rows)[:, part], rows[:, part]).backward()
                optimizer.step()
        return report

    assert ("N6" in {f.check for f in quiet(program).findings}) is not tasks


# ------------------------------------------------------------------------------------------------ D20
@pytest.mark.parametrize("how", ("generator", "generator, drawn anew", "denoiser", "one picture", "standardised"))
def test_noise_that_was_drawn_once(how):
    torch.manual_seed(0)
    kept, table = torch.randn(32, 8), torch.randn(32, 8)
    table = (table - table.mean(0)) / table.std(0, unbiased=False)
    maker, judge = net(8, 8), net(8, 1)

    def loss(model):
        x = torch.randn(32, 1) + 0.1 * torch.randn(32, 8)
        if how == "denoiser":
            share = torch.rand(32, 1)
            return F.mse_loss(model[0](share.sqrt() * x + (1 - share).sqrt() * kept), kept)
        if how == "one picture":
            return F.mse_loss(model[0](kept), torch.ones(32, 8))
        if how == "standardised":  # users' features, and items that are drawn
            return -(model[0](table) * model[0](x)).sum(1).sigmoid().log().mean()
        z = torch.randn(32, 8) if "anew" in how else kept
        return F.softplus(-model[1](x)).mean() + F.softplus(model[1](model[0](z))).mean()

    assert blamed("D20", nn.ModuleList([maker, judge]), loss) is (how in ("generator", "denoiser"))


# ------------------------------------------------------------------------------------------------ F63, F71, F90, F27
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net(6, 1)

    def forward(self, state, action):
        return self.net(torch.cat([state, action], 1))


ACTORS = [("grows", True), ("falls", False), ("a tensor's factor", False), ("an adversary", False)]


@pytest.mark.parametrize("how, wrong", ACTORS)
def test_an_actor_looks_for_high_values(how, wrong):
    torch.manual_seed(0)
    actor, critic = net(4, 2), Critic()
    of_actor, of_critic = (torch.optim.Adam(m.parameters(), 1e-3) for m in (actor, critic))

    def program():
        with doctor.watch(nn.ModuleList([actor, critic]), optimizer=[of_actor, of_critic], say=False) as report:
            for _ in range(11):
                states, actions = torch.randn(32, 4), torch.randn(32, 2)
                of_critic.zero_grad()
                if how == "an adversary":  # its own convention: low for what is real
                    made = actor(states).detach()
                    (critic(states, actions).mean() - critic(states, made).mean()).backward()
                else:
                    F.mse_loss(critic(states, actions), -actions.pow(2).sum(1, keepdim=True)).backward()
                of_critic.step()
                of_actor.zero_grad()
                value = critic(states, actor(states)).mean()
                if how == "a tensor's factor":  # TD3 + BC
                    value = -(2.5 / value.abs().detach()) * value
                (-value if how == "falls" else value).backward()
                of_actor.step()
        return report

    report = quiet(program)
    assert not report.faults and ("F63" in {f.check for f in report.findings}) is wrong, f"\n{report}"


@pytest.mark.parametrize("how, wrong", [("itself", True), ("one minus", False), ("minus", False), ("logarithm", False)])
def test_the_overlap_of_boxes_is_to_grow(how, wrong):
    def corners(middle, size):
        return torch.cat([middle - size / 2, middle + size / 2], 1)

    def area(box):
        return (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])

    def loss(model):
        middle, size = torch.rand(32, 2), torch.rand(32, 2) + 0.2
        out, wanted = model(torch.cat([middle, size], 1)), corners(middle, size)
        box = corners(out[:, :2], F.softplus(out[:, 2:]))
        extent = (torch.min(box[:, 2:], wanted[:, 2:]) - torch.max(box[:, :2], wanted[:, :2])).clamp(min=0)
        both = extent[:, 0] * extent[:, 1]
        iou = both / (area(box) + area(wanted) - both + 1e-6)
        return {
            "itself": lambda: iou.mean(),
            "one minus": lambda: (1 - iou).mean(),
            "minus": lambda: -iou.mean(),
            "logarithm": lambda: -(iou + 0.01).log().mean(),
        }[how]()

    assert blamed("F71", net(4, 4), loss) is wrong


@pytest.mark.parametrize("wrong", (True, False))
def test_the_hinge_on_a_spread(wrong):
    """VICReg. Its covariances are of columns with themselves, which are not two views (F27)."""

    def loss(model):
        x = torch.randn(32, 6)
        sides = [model(x + 0.1 * torch.randn_like(x)) for _ in range(2)]
        total = 25 * F.mse_loss(*sides)
        for z in sides:
            spread = (z.var(dim=0) + 1e-4).sqrt()
            total = total + 25 * F.relu(spread - 1 if wrong else 1 - spread).mean()
            total = total + (((z - z.mean(0)).T @ (z - z.mean(0)) / 31).fill_diagonal_(0) ** 2).sum() / 8
        return total

    assert blamed("F90", net(6, 8), loss) is wrong
    assert not blamed("F27", net(6, 8), loss)


# ------------------------------------------------------------------------------------------------ F72, F66
@pytest.mark.parametrize("how, wrong", [("0.9", True), ("as it is", True), ("squared", False), ("no labels", False)])
def test_the_square_of_a_temperature(how, wrong):
    teacher = net(6, 3).requires_grad_(False)

    def loss(model):
        x = torch.randn(32, 6)
        soft = F.kl_div(F.log_softmax(model(x) / 5, 1), F.softmax(teacher(x) / 5, 1), reduction="batchmean")
        soft = {"0.9": 0.9, "squared": 0.9 * 25}.get(how, 1) * soft if how != "as it is" else soft
        return soft if how == "no labels" else soft + 0.1 * F.cross_entropy(model(x), x[:, :3].argmax(1))

    assert blamed("F72", net(6, 3), loss) is wrong


@pytest.mark.parametrize("how", ("of the filled rows", "of the labels", "a blank within"))
def test_lengths_of_labels_that_were_filled_up(how):
    def loss(model):
        lengths = torch.randint(2, 6, (8,))
        labels = torch.randint(1, 4, (8, 6)).masked_fill(torch.arange(6) >= lengths[:, None], 0)
        if how == "a blank within":
            labels[0, 0] = 0
        scores = model(torch.randn(20, 8, 6)).log_softmax(2)
        given = torch.full((8,), 6) if how == "of the filled rows" else lengths
        return F.ctc_loss(scores, labels, torch.full((8,), 20), given, zero_infinity=True)

    torch.manual_seed(0)
    report = quiet(lambda: watched(net(6, 4), loss))
    findings = [f for f in report.findings if f.check == "F66"]
    assert bool(findings) is (how != "of the labels")
    assert not findings or ("lengths" in findings[0].diagnosis) is (how == "of the filled rows")


# ------------------------------------------------------------------------------------------------ judge24
@pytest.mark.parametrize("how, wrong", [("y first", True), ("x first", False), ("some turned", False)])
def test_the_places_of_a_grid(how, wrong):
    def loss(model):
        x = torch.randn(8, 1, 12, 12)
        steps = torch.linspace(-1, 1, 12)
        down, across = torch.meshgrid(steps, steps, indexing="ij")
        straight, turned = torch.stack((across, down), -1), torch.stack((down, across), -1)
        grid = turned if how == "y first" else straight
        grid = torch.stack([turned, *[grid] * 7]) if how == "some turned" else grid.expand(8, -1, -1, -1)
        return (model(F.grid_sample(x, grid, align_corners=True)) - x).pow(2).mean()

    assert blamed("D30", conv(1), loss) is wrong


class Flow(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.layers = how, nn.ModuleList([net(1, 2) for _ in range(4)])

    def forward(self, x):
        total = torch.zeros(len(x))
        for n, layer in enumerate(self.layers):
            a, b = (x[:, 1:], x[:, :1]) if n % 2 else (x[:, :1], x[:, 1:])
            s, t = layer(a).tanh().chunk(2, 1)
            b = b * s.exp() + t
            x = torch.cat([b, a] if n % 2 else [a, b], 1)
            counts = s * (torch.rand_like(s) > 0.2) if self.how == "one masked" and n == 3 else s
            total = counts.sum(1) if self.how == "last alone" else total + counts.sum(1)
        return x, total


@pytest.mark.parametrize("how, wrong", [("last alone", True), ("all", False), ("one masked", False)])
def test_a_flow_counts_all_of_its_scales(how, wrong):
    def loss(model):
        z, total = model(torch.randn(32, 2))
        return (0.5 * z.pow(2).sum(1) - total).mean()

    assert blamed("F82", Flow(how), loss) is wrong


class Placed(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        zeros = torch.zeros(1, 5, 8)
        self.places = nn.Parameter(zeros) if how == "parameter" else torch.randn(1, 5, 8) if how == "fixed" else zeros
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) + self.places).mean(1))


@pytest.mark.parametrize("how", ("zeros", "parameter", "fixed"))
def test_places_of_zeros_that_nothing_trains(how):
    def loss(model):
        x = torch.randn(16, 5, 6)
        return F.cross_entropy(model(x), x[:, 0, :3].argmax(1))

    assert blamed("S19", Placed(how), loss) is (how == "zeros")


class Masked(nn.Module):
    """Attention with a mask that hides nothing, as a plain tensor."""

    def __init__(self):
        super().__init__()
        self.mask, self.first, self.last = torch.zeros(5, 5), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        return self.last(((h @ h.transpose(1, 2) + self.mask).softmax(-1) @ h).mean(1))


def test_a_mask_of_zeros_is_no_embedding():
    def loss(model):
        x = torch.randn(16, 5, 6)
        return F.cross_entropy(model(x), x[:, 0, :3].argmax(1))

    assert not blamed("S19", Masked(), loss)


class Words(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.turned = how == "turned"
        self.table, self.reader = nn.Embedding(20, 6), nn.LSTM(6, 6, batch_first=how == "rows first")
        self.head = nn.Linear(6, 4)

    def forward(self, ids):
        h = self.table(ids)
        h = self.reader(h.transpose(0, 1))[0].transpose(0, 1) if self.turned else self.reader(h)[0]
        return self.head(h)


@pytest.mark.parametrize("picked", (True, False))
@pytest.mark.parametrize("how, wrong", [("", True), ("rows first", False), ("turned", False)])
def test_words_have_rows_first(how, wrong, picked):
    data = torch.randint(20, (64, 7))

    def loss(model):
        index = torch.randint(64, (8,))
        ids = data[index] if picked else torch.stack([data[i] for i in index.tolist()])
        return F.cross_entropy(model(ids).flatten(0, 1), (ids % 4).flatten())

    assert blamed("S21", Words(how), loss) is wrong


@pytest.mark.parametrize("turned", (True, False))
def test_returns_of_an_episode_that_is_scored_at_once(turned):
    def loss(model):
        states, actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(6):
                states.append(torch.randn(4, 6))
                actions.append(torch.distributions.Categorical(logits=model(states[-1])).sample())
                rewards.append(torch.rand(4))
        returns, running = [], torch.zeros(4)
        for reward in reversed(rewards):
            running = reward + 0.9 * running
            returns.append(running)
        if turned:
            returns.reverse()
        scores = torch.distributions.Categorical(logits=model(torch.cat(states))).log_prob(torch.cat(actions))
        return -(scores * (torch.cat(returns) - 1)).mean()

    assert blamed("F96", net(6, 3), loss) is not turned
