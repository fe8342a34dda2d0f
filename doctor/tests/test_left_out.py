"""What was left out of an optimizer, an average, a graph, a loop or a copy: S3, N29, N27, D12, D13, F1, B3, N17."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import train_doctor as doctor
from train_doctor import ERROR

from .bench import quiet
from .test_arithmetic import net, regression, said, train


# ------------------------------------------------------------------------------------------------ S3, F8
class Centres(nn.Module):
    """Center loss: a row for each class, to which the answers are drawn."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 4))

    def forward(self, answers, classes):
        return (answers - self.centres[classes]).pow(2).mean()


class Perceptual(nn.Module):
    """A network that is frozen by nobody and compares answers with targets."""

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(4, 4)

    def forward(self, answers, wanted):
        return F.mse_loss(self.features(answers), self.features(wanted).detach())


def criterion_loop(how: str):
    model, loss = net(), Perceptual() if how == "perceptual" else Centres()
    held = [*model.parameters(), *(loss.parameters() if how == "given" else ())]
    optimizer = torch.optim.Adam(held, 1e-2)
    if how == "frozen":
        loss.requires_grad_(False)
    with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
        for _ in range(6):
            x = torch.randn(16, 4)
            total = F.mse_loss(model(x), x.flip(1))
            total = total + loss(model(x), x.flip(1) if how == "perceptual" else torch.randint(0, 3, (16,)))
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            if how == "by hand":
                with torch.no_grad():
                    loss.centres.sub_(0.5 * loss.centres.grad)
                loss.centres.grad = None
    return report


def test_weights_of_a_loss_that_no_optimizer_holds():
    report = quiet(lambda: criterion_loop("left out"))
    assert report.root is not None and report.root.check == "S3" and "Centres.centres" in report.root.observed
    assert "F8" not in said(report)


@pytest.mark.parametrize("watched", ["generator", "judge"])
def test_the_other_half_of_a_gan_is_no_teacher(watched):
    """One fake with a graph, first for the judge, detached, and then for the generator; one of both is watched."""
    both = {"generator": net(6, 4), "judge": net(6, 1)}
    by = {name: torch.optim.Adam(m.parameters(), 1e-3) for name, m in both.items()}
    with doctor.watch(both[watched], optimizer=by[watched], steps=6, say=False) as report:
        for _ in range(6):
            c = F.one_hot(torch.randint(0, 2, (32,)), 2).float()
            real, fake = 0.3 * torch.randn(32, 4) + c[:, :1], both["generator"](torch.cat([c, torch.randn(32, 4)], 1))

            def loss_of(x, y, c=c):
                return F.binary_cross_entropy_with_logits(both["judge"](torch.cat([c, x], 1)), torch.full((32, 1), y))

            by["judge"].zero_grad()
            loss_of(real, 1.0).backward()
            loss_of(fake.detach(), 0.0).backward()
            by["judge"].step()
            by["generator"].zero_grad()
            loss_of(fake, 1.0).backward()
            by["generator"].step()
    assert "F8" not in said(report)


@pytest.mark.parametrize("how", ("given", "frozen", "by hand", "perceptual"))
def test_weights_of_a_loss_that_are_held_or_rest(how):
    assert "S3" not in said(quiet(lambda: criterion_loop(how)))


# ------------------------------------------------------------------------------------------------ N29
def averaged(how: str):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    if how == "by torch":
        average = torch.optim.swa_utils.AveragedModel(model)
    else:
        average = copy.deepcopy(model).eval().requires_grad_(False)

    def follow(model):
        if how == "by torch":
            return average.update_parameters(model)
        with torch.no_grad():
            for e, p in zip(average.parameters(), model.parameters()):
                if how == "lerp":
                    e.lerp_(p, 0.1)
                else:
                    e.mul_(0.9).add_(p, alpha=0.1)
            for e, b in zip(average.buffers(), model.buffers()) if how == "buffers" else ():
                e.copy_(b)
            if how == "train mode":
                average.train()(torch.randn(8, 4))
        return None

    return train(regression, model, after=follow)


@pytest.mark.parametrize("how", ("", "lerp"))
def test_an_average_of_parameters_only(how):
    report = quiet(lambda: averaged(how))
    assert report.root is not None and report.root.check == "N29", f"\n{report}"


@pytest.mark.parametrize("how", ("buffers", "by torch", "train mode"))
def test_an_average_that_is_whole_or_finished_later(how):
    assert "N29" not in said(quiet(lambda: averaged(how)))


# ------------------------------------------------------------------------------------------------ N27
def collected(how: str):
    kept = []

    def after(model):
        x = torch.randn(16, 4)
        if how == "under no_grad":
            with torch.no_grad():
                kept.append(model(x))
        elif how == "the last":
            kept[:] = [F.mse_loss(model(x), x)]
        elif how == "a number":
            kept.append(F.mse_loss(model(x), x).item())
        elif how == "outputs":
            kept.append(model(x))
        else:
            kept.append(F.mse_loss(model(x), x))

    return quiet(lambda: train(regression, after=after, steps=8))


@pytest.mark.parametrize("how", ("losses", "outputs"))
def test_answers_that_are_kept_with_their_graphs(how):
    report = collected(how)
    assert report.root is not None and report.root.check == "N27" and "no_grad" in report.root.fix, f"\n{report}"


@pytest.mark.parametrize("how", ("under no_grad", "the last", "a number"))
def test_answers_that_are_let_go_of(how):
    assert "N27" not in said(collected(how))


# ------------------------------------------------------------------------------------------------ D12
def loaded(how: str):
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size=64 if how == "one batch" else 16, shuffle="mix" in how)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    stream, by_heart = iter(loader), next(iter(loader))
    with doctor.watch(model, optimizer=optimizer, steps=4, say=False) as report:
        for _ in range(4):
            if how == "by heart":
                given, wanted = by_heart
            elif how == "a pass":
                given, wanted = next(stream)
            elif how == "validated":
                given, wanted = next(stream)
                with torch.no_grad():
                    model(next(iter(loader))[0])
            else:
                given, wanted = next(iter(loader))
            optimizer.zero_grad()
            F.mse_loss(model(given), wanted).backward()
            optimizer.step()
    return report


def test_a_loader_that_begins_at_each_step():
    report = quiet(lambda: loaded("begun"))
    assert report.root is not None and report.root.check == "D12", f"\n{report}"


@pytest.mark.parametrize("how", ("by heart", "a pass", "validated", "one batch", "begun and mixed"))
def test_a_loader_that_goes_on(how):
    assert "D12" not in said(quiet(lambda: loaded(how)))


# ------------------------------------------------------------------------------------------------ D13
class Kept(Dataset):
    def __init__(self, how: str):
        self.how, self.data, self.cache, self.there = how, torch.randn(64, 4), torch.zeros(64, 4), torch.zeros(64)

    def __len__(self):
        return 64

    def __getitem__(self, k):
        x = self.data[k]
        if self.how == "copied":
            x = x.clone()
        if self.how in ("masked", "copied", "subset"):
            x[int(torch.randint(0, 4, ()))] = 0
        elif self.how == "noise":
            x += 0.1 * torch.randn(4)
        elif self.how == "kept":
            self.cache[k] = x * 2
            x = self.cache[k]
        elif self.how == "counted":
            self.there[k] += 1
        elif self.how == "another tensor":
            x = x * (torch.rand(4) > 0.2)
        return x


def fetched(how: str):
    data = Kept(how)
    loader = DataLoader(Subset(data, range(32)) if how == "subset" else data, batch_size=8, shuffle=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with doctor.watch(model, optimizer=optimizer, steps=4, say=False) as report:
        for x in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), x.flip(1)).backward()
            optimizer.step()
    return report


@pytest.mark.parametrize("how", ("masked", "noise", "subset"))
def test_data_that_are_written_into(how):
    report = quiet(lambda: fetched(how))
    assert report.root is not None and report.root.check == "D13" and "Kept" in report.root.diagnosis or how == "subset"
    assert "D13" in said(report)


@pytest.mark.parametrize("how", ("copied", "kept", "counted", "another tensor"))
def test_data_that_stay(how):
    assert "D13" not in said(quiet(lambda: fetched(how)))


# ------------------------------------------------------------------------------------------------ F1, B8, N2
def inner_loop(how: str):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with doctor.watch(model, optimizer=optimizer, steps=5, say=False) as report:
        for _ in range(5):
            optimizer.zero_grad()
            for _ in range(3):
                x = torch.randn(8, 4)
                weights = dict(model.named_parameters())
                inner = F.mse_loss(torch.func.functional_call(model, weights, (x,)), x)
                slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), slopes)}
                if how != "whole":
                    fast = {n: w.detach().requires_grad_() for n, w in fast.items()}
                F.mse_loss(torch.func.functional_call(model, fast, (x,)), x.flip(1)).backward()
                for n, w in model.named_parameters() if how == "carried over" else ():
                    w.grad = fast[n].grad if w.grad is None else w.grad + fast[n].grad
            optimizer.step()
    return report


def test_fast_weights_that_are_detached():
    report = quiet(lambda: inner_loop("detached"))
    assert report.root is not None and report.root.check == "F1" and "copies" in report.root.diagnosis, f"\n{report}"
    assert "N2" not in said(report)


@pytest.mark.parametrize("how", ("whole", "carried over"))
def test_fast_weights_that_reach_the_model(how):
    report = quiet(lambda: inner_loop(how))
    assert not [f for f in report.findings if f.severity == ERROR], f"\n{report}"


# ------------------------------------------------------------------------------------------------ B3
class Adapted(nn.Module):
    def __init__(self, layers: bool, zero: bool):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down = nn.Linear(4, 2, bias=False) if layers else nn.Parameter(torch.randn(2, 4))
        self.up = nn.Linear(2, 4, bias=False) if layers else nn.Parameter(torch.randn(4, 2))
        for p in self.parameters():
            if p.requires_grad and (zero or p.shape == (4, 2)):
                nn.init.zeros_(p)

    def forward(self, x):
        if isinstance(self.down, nn.Linear):
            return self.base(x) + self.up(self.down(x))
        return self.base(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("layers", (False, True))
def test_both_factors_at_zero_whatever_they_are_called(layers):
    report = quiet(lambda: train(regression, Adapted(layers, True)))
    assert report.root is not None and report.root.check == "B3" and "both factors" in report.root.diagnosis
    assert "B3" not in said(quiet(lambda: train(regression, Adapted(layers, False))))


def test_a_loss_times_zero_is_not_both_factors():
    report = quiet(lambda: train(lambda model: regression(model) * 0 + 1.0))
    assert report.root is not None and report.root.check == "B3" and "both factors" not in report.root.diagnosis


# ------------------------------------------------------------------------------------------------ N17
def distance(how: str):
    def loss_of(model):
        x = torch.randn(8, 4)
        other = model(torch.cat([x[:2], torch.randn(6, 4)]))
        far = (model(x) - other).pow(2).sum(1)
        far = far.add(1e-8).sqrt() if how == "held off zero" else far**0.5 if how == "power" else far.sqrt()
        return far.mean() if how != "norm" else (model(x) - other).norm(dim=1).mean()

    return loss_of


@pytest.mark.parametrize("how", ("root", "power"))
def test_a_root_of_zero_is_named(how):
    report = quiet(lambda: train(distance(how)))
    what = "a square root" if how == "root" else "a power of 0.5"
    assert report.root is not None and report.root.check == "N17", f"\n{report}"
    assert f"{what} was given 2 zeros" in report.root.diagnosis


def test_a_root_in_a_checkpoint_is_not_computed_once_more():
    calls = []

    def region(x):
        calls.append(1)
        return (x * x).add(1e-6).sqrt()

    def loss_of(model):
        return checkpoint(region, model(torch.randn(8, 4)), use_reentrant=False).mean()

    report = train(loss_of, steps=4)
    assert len(calls) == 8 and "N17" not in said(report)  # forward and backward of four steps


@pytest.mark.parametrize("how", ("held off zero", "norm"))
def test_roots_that_are_sound(how):
    assert not {"N17", "B4"} & said(quiet(lambda: train(distance(how))))
