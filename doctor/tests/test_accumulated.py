"""N6 for losses without tokens: several whole means added up in a step, and what looks like it and is right."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import quiet
from tests.test_arithmetic import net, said


def run(how: str, loss_of=F.mse_loss, k: int = 4):
    torch.manual_seed(0)
    model = net(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with doctor.watch(model, optimizer=optimizer, steps=5, say=False) as report:
        for _ in range(5):
            for _ in range(k):
                x = torch.randn(16, 4)
                loss = loss_of(model(x), torch.randint(3, (16,)) if loss_of is F.cross_entropy else x[:, :3])
                (loss / k if how == "divided" else loss).backward()
            if how == "divided by hand":
                for p in model.parameters():
                    p.grad /= k
            optimizer.step()
            optimizer.zero_grad()
    return report


@pytest.mark.parametrize("loss_of", [F.mse_loss, F.smooth_l1_loss, F.cross_entropy])
def test_means_that_are_added_up_are_named(loss_of):
    report = quiet(lambda: run("added", loss_of))
    assert report.root is not None and report.root.check == "N6" and "4 micro-batches" in report.root.diagnosis, report


@pytest.mark.parametrize("how, k", [("divided", 4), ("divided by hand", 4), ("added", 1), ("added", 2)])
def test_means_of_one_or_of_all_are_left_alone(how, k):
    assert "N6" not in said(quiet(lambda: run(how, k=k)))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(4, 16), nn.ModuleList(nn.Linear(16, 1) for _ in range(3))

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return [head(h) for head in self.heads]


def test_tasks_of_one_forward_are_left_alone():
    def tasks():
        model = Heads()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        with doctor.watch(model, optimizer=optimizer, steps=5, say=False) as report:
            for _ in range(5):
                x = torch.randn(16, 4)
                for n, answer in enumerate(model(x)):
                    F.mse_loss(answer, x[:, n : n + 1]).backward(retain_graph=n < 2)
                optimizer.step()
                optimizer.zero_grad()
        return report

    assert "N6" not in said(quiet(tasks))
