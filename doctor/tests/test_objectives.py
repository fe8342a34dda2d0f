"""F35 to F41: lines between a model and its loss; each with its mended twin, and what looks like it and is healthy."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

import train_doctor as doctor

from .bench import quiet
from .test_arithmetic import net, said, train


def named(report, check: str) -> bool:
    found = check in said(report)
    assert not found or report.root.check == check, f"\n{report}"
    return found


# ------------------------------------------------------------------------------------------------ F35
def policy_loss(how: str):
    def loss_of(model):
        x, gain = torch.randn(16, 4), torch.randn(16)
        scores = F.log_softmax(model(x), 1)
        actions = torch.randint(0, 4, (16, 1))
        new = scores.gather(1, actions).squeeze(1)
        if how == "computed again":
            old = F.log_softmax(model(x), 1).gather(1, actions).squeeze(1)
        elif how == "by a distribution":
            new, old = (Categorical(logits=model(x)).log_prob(actions[:, 0]) for _ in range(2))
        elif how == "itself":
            old = new
        elif how == "another policy":
            old = F.log_softmax(0.5 * model(x), 1).gather(1, actions).squeeze(1)
        else:
            old = new.detach()
        ratio = torch.exp(new - old)
        # the value keeps the gradient from being zero everywhere
        return -(ratio * gain).mean() + (scores.exp() * scores).sum(1).mean()

    return loss_of


@pytest.mark.parametrize("how", ("computed again", "by a distribution", "itself"))
def test_a_ratio_of_a_policy_with_itself(how):
    assert named(quiet(lambda: train(policy_loss(how))), "F35")


@pytest.mark.parametrize("how", ("detached", "another policy"))
def test_a_ratio_that_has_a_gradient(how):
    assert not named(quiet(lambda: train(policy_loss(how))), "F35")


# ------------------------------------------------------------------------------------------------ F36
def segmentation(how: str, mode: str):
    def loss_of(model):
        mask = torch.randint(0, 2 if how == "two classes" else 4, (2, 6, 6))
        picture = torch.randn(2, 4, 12, 12)
        if how == "by upsample":
            wanted = nn.Upsample(scale_factor=2, mode=mode)(mask.unsqueeze(1).to(torch.float32)).squeeze(1).long()
        elif how == "by grid":
            grid = F.affine_grid(torch.eye(2, 3).expand(2, 2, 3) * 0.7, (2, 1, 12, 12), align_corners=False)
            wanted = F.grid_sample(mask[:, None].float(), grid, mode=mode, align_corners=False)[:, 0].round().long()
        elif how == "pixels":
            picture = F.interpolate(torch.randint(0, 255, (2, 4, 6, 6)).float(), size=12, mode=mode) / 255
            wanted = mask.repeat_interleave(2, 1).repeat_interleave(2, 2)
        else:
            wanted = F.interpolate(mask[:, None].float(), size=12, mode=mode).squeeze(1).long()
        return F.cross_entropy(model(picture), wanted)

    return loss_of


SEGMENTS = [("", "bilinear"), ("by upsample", "bicubic"), ("by grid", "bilinear")]


@pytest.mark.parametrize("how, mode", SEGMENTS)
def test_classes_that_were_mixed(how, mode):
    assert named(quiet(lambda: train(segmentation(how, mode), nn.Conv2d(4, 4, 1))), "F36")


SOUND = [("", "nearest"), ("by grid", "nearest"), ("two classes", "bilinear"), ("pixels", "bilinear")]


@pytest.mark.parametrize("how, mode", SOUND)
def test_classes_that_were_there_before(how, mode):
    assert not named(quiet(lambda: train(segmentation(how, mode), nn.Conv2d(4, 4, 1))), "F36")


# ------------------------------------------------------------------------------------------------ F37
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.factor = net(), nn.Parameter(torch.tensor(0.1))


def contrast(how: str):
    def loss_of(model):
        x = torch.randn(16, 4)
        inner = getattr(model, "net", model)
        a, b = inner(x + 0.1 * torch.randn_like(x)), inner(x + 0.1 * torch.randn_like(x))
        if how == "by norm":
            a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=-1, keepdim=True)
        elif how != "no cosines":
            a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
        alike = a @ b.T
        if how == "divided":
            alike = alike / 0.1
        elif how == "by a large scale":
            alike = alike * 16.0
        elif how == "learned":
            alike = alike * model.factor
        elif how == "divided by ten":
            alike = alike / 10
        elif how != "as they are":
            alike = alike * 0.1
        if how == "attention":
            return F.mse_loss(alike.softmax(-1) @ inner(x), x)
        return F.cross_entropy(alike, torch.arange(16))

    return loss_of


@pytest.mark.parametrize("how", ("multiplied", "by norm", "divided by ten"))
def test_cosines_that_were_made_smaller(how):
    assert named(quiet(lambda: train(contrast(how))), "F37")


@pytest.mark.parametrize("how", ("divided", "by a large scale", "learned", "as they are", "no cosines", "attention"))
def test_cosines_that_span_enough(how):
    assert not named(quiet(lambda: train(contrast(how), Scale() if how == "learned" else None)), "F37")


# ------------------------------------------------------------------------------------------------ F38
class Coder(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.encoder, self.decoder = how, nn.Linear(4, 3), nn.Linear(3, 4)
        self.table, self.words = nn.Embedding(8, 3), nn.Embedding(8, 3)

    def forward(self, x):
        z = self.encoder(x)
        if self.how == "tokenizer":
            with torch.no_grad():
                index = torch.cdist(z, self.table.weight).argmin(1)
            return self.decoder(self.words(index)), z.pow(2).mean()
        if self.how == "by hand":
            far = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.table.weight.T + self.table.weight.pow(2).sum(1)
            q = self.table.weight[far.min(1)[1]]
        else:
            q = self.table(torch.cdist(z, self.table.weight).argmin(1))
        pull = F.mse_loss(q, z.detach()) + F.mse_loss(q.detach(), z)
        if self.how == "straight through":
            q = z + (q - z).detach()
        elif self.how == "straight through the other way":
            q = q.detach() + (z - z.detach())
        elif self.how == "another table":
            index = torch.cdist(z, self.table.weight).argmin(1)
            q = self.words(index) + z
        elif self.how in ("detached", "by hand"):
            q = q.detach()
        return self.decoder(q), pull


def coded(model):
    x = torch.randn(16, 4)
    answer, pull = model(x)
    return F.mse_loss(answer, x) + pull


@pytest.mark.parametrize("how", ("detached", "by hand", "as it is"))
def test_codes_that_cut_the_graph(how):
    assert named(quiet(lambda: train(coded, Coder(how))), "F38")


@pytest.mark.parametrize("how", ("straight through", "straight through the other way", "tokenizer", "another table"))
def test_codes_with_a_way_round(how):
    assert not named(quiet(lambda: train(coded, Coder(how))), "F38")


# ------------------------------------------------------------------------------------------------ F39
def q_learning(how: str):
    def loss_of(model):
        states, coming, gain = torch.randn(16, 4), torch.randn(16, 4), torch.randn(16)
        actions = torch.randint(0, 4, (16, 1))
        with torch.no_grad():
            best = model(coming)
            best = best.gather(1, best.argmax(1, keepdim=True)).squeeze(1) if how == "double" else best.max(1)[0]
            wanted = gain + 0.9 * best
        if how == "pooled":
            return F.mse_loss(model(states).max(1).values, gain)
        if how in ("taken", "double"):
            return F.smooth_l1_loss(model(states).gather(1, actions).squeeze(1), wanted)
        largest = model(states).amax(1) if how == "amax" else model(states).max(dim=1).values
        return (largest - wanted).pow(2).mean() if how == "by hand" else F.mse_loss(largest, wanted)

    return loss_of


@pytest.mark.parametrize("how", ("", "amax", "by hand"))
def test_the_largest_value_learns(how):
    assert named(quiet(lambda: train(q_learning(how))), "F39")


def looks_ahead(how: str):
    """Q-learning with a target network; the one word says what is different."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for step in range(11):
            states, coming, gain = torch.randn(16, 4), torch.randn(16, 4), torch.randn(16)
            going_on = (torch.rand(16) > 0.1).float()
            with torch.no_grad():
                for _ in range(9 if how == "asked often" else 0):
                    target(states)  # how sure it is of them, say
                values = target(states if how == "own state" else coming)
                best = values.max() if how == "of all" else values.max(1).values
                if how == "both states":
                    best = best + 0.1 * target(states).logsumexp(1)
                wanted = gain + 0.9 * going_on * best
                if how == "scaled":
                    wanted = gain * target(coming).max() / 10
            taken = model(states).gather(1, torch.randint(0, 4, (16, 1))).squeeze(1)
            optimizer.zero_grad()
            F.smooth_l1_loss(taken, wanted).backward()
            optimizer.step()
            if how == "copied" or step == 5:
                target.load_state_dict(model.state_dict())
    return report


AHEAD = {
    "of all": ("F39", "all rows and actions together"),
    "own state": ("F39", "from the state that the action was taken in"),
    "copied": ("F28", "copied from the network at every step"),
}


@pytest.mark.parametrize("how, told", AHEAD.items())
def test_a_target_that_does_not_look_ahead(how, told):
    report = quiet(lambda: looks_ahead(how))
    assert not report.faults and named(report, told[0]) and told[1] in report.root.diagnosis, f"\n{report}"


@pytest.mark.parametrize("how", ("", "both states", "scaled", "asked often"))
def test_a_target_that_looks_ahead(how):
    report = quiet(lambda: looks_ahead(how))
    assert not report.faults and not said(report) & {"F39", "F28"}, f"\n{report}"


@pytest.mark.parametrize("how", ("taken", "double", "pooled"))
def test_the_value_of_the_action_learns(how):
    assert not named(quiet(lambda: train(q_learning(how))), "F39")


# ------------------------------------------------------------------------------------------------ F40
class Auto(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.spread, self.back = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 4)

    def forward(self, x):
        mean, spread = self.mean(x), self.spread(x)
        return self.back(mean + torch.randn_like(mean) * (0.5 * spread).exp()), mean, spread


def autoencoder(how: str):
    def loss_of(model):
        x = torch.rand(16, 4)
        answer, mean, spread = model(x)
        each = 1 + spread - mean.pow(2) - spread.exp()
        if how == "turned":
            kl = 0.5 * (mean * mean + spread.exp() - 1 - spread).sum()
        elif how == "mean of rows":
            kl = -0.5 * each.sum(1).mean()
        elif how == "weighted":
            kl = 0.01 * (-0.5 * torch.sum(each))
        elif how == "divided":
            kl = -0.5 * torch.sum(each) / len(x)
        else:
            kl = -0.5 * torch.sum(each)
        if how == "binary":
            return F.binary_cross_entropy_with_logits(answer, x) + kl
        if how in ("both sums", "both divided"):
            total = F.mse_loss(answer, x, reduction="sum") + kl
            return total / len(x) if how == "both divided" else total
        rows = F.mse_loss(answer, x, reduction="sum") / len(x)
        return (F.mse_loss(answer, x) if how == "plain mean" else rows) + kl

    return loss_of


@pytest.mark.parametrize("how", ("", "turned", "binary", "plain mean"))
def test_a_divergence_that_is_summed_beside_a_mean(how):
    assert named(quiet(lambda: train(autoencoder(how), Auto())), "F40")


@pytest.mark.parametrize("how", ("mean of rows", "weighted", "divided", "both sums", "both divided"))
def test_divergences_that_fit(how):
    assert not named(quiet(lambda: train(autoencoder(how), Auto())), "F40")


# ------------------------------------------------------------------------------------------------ F41
def detector(how: str):
    def loss_of(model):
        there = (torch.rand(4, 8, 8) < 0.05).float()
        there[:, 0, 0] = 1
        wanted = torch.rand(4, 2, 8, 8).clamp(min=0.1) * there[:, None]
        if how == "a map":
            wanted = torch.rand(4, 2, 8, 8) * (torch.rand(4, 1, 8, 8) < 0.05)
        if how == "half is there":
            there = (torch.rand(4, 8, 8) < 0.5).float()
            wanted = torch.rand(4, 2, 8, 8).clamp(min=0.1) * there[:, None]
        answer = model(torch.randn(4, 4, 8, 8))
        boxes = answer[:, 1:3]
        if how == "masked":
            mask = there[:, None].expand_as(boxes) > 0
            boxes, wanted = boxes[mask], wanted[mask]
        binary = F.binary_cross_entropy_with_logits(answer[:, 0], there)
        if how == "summed":
            return binary + F.l1_loss(boxes * there[:, None], wanted, reduction="sum") / there.sum()
        if how == "channels last":
            return binary + F.mse_loss(boxes.permute(0, 2, 3, 1), wanted.permute(0, 2, 3, 1))
        each = F.smooth_l1_loss(boxes, wanted, reduction="none")
        if how == "by hand":
            return binary + 2 * each.sum(1).mean()
        if how == "summed by hand":
            return binary + each.sum() / there.sum()
        if how == "weighed by hand":
            return binary + (each * there[:, None]).sum(1).mean()
        return binary + F.smooth_l1_loss(boxes, wanted)

    return loss_of


@pytest.mark.parametrize("how", ("", "channels last", "by hand"))
def test_boxes_of_nothing(how):
    assert named(quiet(lambda: train(detector(how), nn.Conv2d(4, 4, 3, padding=1))), "F41")


@pytest.mark.parametrize("how", ("masked", "summed", "summed by hand", "weighed by hand", "a map", "half is there"))
def test_boxes_of_something(how):
    assert not named(quiet(lambda: train(detector(how), nn.Conv2d(4, 4, 3, padding=1))), "F41")
