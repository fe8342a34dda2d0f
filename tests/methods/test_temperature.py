"""A temperature that is learned: where it goes when nothing holds it, what holds it, and that it
resumes.
"""

import math

import pytest
import torch
from conftest import FP32
from torch import nn
from toy_distillation import confident_teacher, distilled, other_teacher, problem

from nblib import losses, models, text, train
from nblib.methods.distill.objective import from_teacher
from nblib.methods.distill.temperature import Adversarial, Learned, Reversed


def _student(seed: int = 0, temperature: nn.Module | None = None):
    """A student, its optimizers and the temperature attached between them."""
    model = models.tiny(256, hidden=32, layers=2, heads=2, seed=seed)
    optimizers = [train.adamw(model, lr=3e-3)]
    if temperature is not None:
        model.temperature = temperature
        optimizers.append(temperature.optimizer(lr=1e-2))
    return model, optimizers


class _Straight(nn.Module):
    """The same temperature without gradient reversal: what one minimises by mistake."""

    def __init__(self, start):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(math.log(start)))

    def forward(self):
        return self.raw.exp()

    def optimizer(self, lr):
        return torch.optim.Adam(self.parameters(), lr=lr)


def _alone(temperature: nn.Module, p: dict, steps: int = 300) -> float:
    """Only T moves; the student stands still."""
    optimizer, tokens = temperature.optimizer(lr=1e-2), int(losses.supervised(p["labels"]))
    for _ in range(steps):
        loss = distilled(p, temperature()) / tokens
        (loss + temperature.penalty() if hasattr(temperature, "penalty") else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(temperature().detach())


def test_the_hump_repels_a_minimised_temperature_and_attracts_a_reversed_one():
    p = problem()
    # a student that knows little, a teacher who knows something
    p["h"], p["th"] = 0.05 * p["h"], 0.6 * p["th"]
    grid = torch.linspace(0.2, 8.0, 118).tolist()
    values = [float(distilled(p, torch.tensor(T))) for T in grid]
    top = grid[values.index(max(values))]
    assert 0.5 < top < 5.0
    below, above = (_alone(_Straight(top * f), p) for f in (0.8, 1.25))
    assert below < 0.5 * top and above > 2 * top  # away from it, on both sides
    ends = [
        _alone(Adversarial(top * f, total=300, rest=0.0, low=0.1, high=8.0), p) for f in (0.7, 1.4)
    ]
    assert all(abs(T / top - 1) < 0.12 for T in ends), (top, ends)
    held = [_alone(Learned(start, anchor=2.0), p) for start in (1.3, 4.0)]
    # wherever it began
    assert abs(held[0] - held[1]) < 0.02 and all(abs(T / 2.0 - 1) < 0.3 for T in held), held


def test_a_clamped_temperature_is_stuck_and_takes_its_regulariser_along(stream):
    """The write-up's: exp(raw).clamp(1, 10) with 0.1 (T - 2)^2 on the clamped value.

    Ours pulls from anywhere.
    """
    teacher, batch = confident_teacher(), next(text.Batches(stream, rows=4, length=32))

    class Clamped(_Straight):
        def forward(self):
            return self.raw.exp().clamp(1, 10)

        def penalty(self):
            return 0.1 * (self() - 2).square()

    grads = {}
    for name, temperature in {"clamped": Clamped(11.0), "free": Learned(11.0, anchor=2.0)}.items():
        model, _ = _student(temperature=temperature)
        sum(from_teacher(teacher, temperature=temperature)(model, batch).values()).backward()
        grads[name] = float(temperature.raw.grad)
    assert grads["clamped"] == 0 and grads["free"] > 0


def test_at_strength_0_only_weight_decay_moves_the_temperature(stream):
    """The write-up read T = 2.0014 at step 600 as learning.

    Ours stands still, to the bit, until the rest is over.
    """
    batch = next(text.Batches(stream, rows=4, length=32))
    ends = {}
    for decay in (0.0, 0.01):
        temperature = Adversarial(2.0, total=400, rest=0.25)
        model, (_, own) = _student(temperature=temperature)
        start = temperature.raw.item()
        optimizer = (
            torch.optim.AdamW(temperature.parameters(), lr=1e-3, weight_decay=decay)
            if decay
            else own
        )
        loss = from_teacher(other_teacher(), temperature=temperature)
        for _ in range(100):
            loss(model, batch)["distillation"].backward()
            optimizer.step()
            optimizer.zero_grad()
        ends[decay] = temperature.raw.item() - start
    assert ends[0.0] == 0 and 0 < ends[0.01] == pytest.approx(
        1.0986 * (1 - (1 - 1e-5) ** 100), rel=0.02
    )
    strengths = []
    for at in (0, 100, 250, 400):
        temperature.micro_batches.fill_(at)
        strengths.append(temperature.strength())
    assert strengths == pytest.approx([0, 0, 0.5, 1])


def test_reversal_is_the_identity_forward_and_minus_strength_backward():
    x = torch.tensor([1.5, -2.0], requires_grad=True)
    y = Reversed.apply(x, 0.25)
    assert torch.equal(y, x)
    (y * torch.tensor([3.0, 4.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([-0.75, -1.0]))


@pytest.mark.parametrize("kind", ["learned", "adversarial"])
def test_a_run_with_its_temperature_resumes_to_the_bit(tmp_path, stream, kind):
    def run(total, folder):
        made = (
            Learned(3.0, anchor=2.0) if kind == "learned" else Adversarial(3.0, total=16, rest=0.25)
        )
        model, optimizers = _student(temperature=made)
        loss = from_teacher(other_teacher(), temperature=made, ce=0.3, divergence="js")
        batches = text.Batches(stream, rows=4, length=32)
        options = dict(
            total=total,
            accumulate=2,
            machine=FP32,
            checkpoints=train.Checkpoints(folder),
            loss=loss,
        )
        records = train.fit(model, batches, optimizers, **options)
        return model, records, loss

    straight, records, loss = run(8, None)
    run(5, tmp_path)
    resumed, again, _ = run(8, tmp_path)
    assert [r["loss"] for r in again] == [r["loss"] for r in records]
    for (name, a), b in zip(straight.state_dict().items(), resumed.state_dict().values()):
        assert torch.equal(a, b), name
    assert straight.temperature.raw.item() != math.log(3.0) or kind == "adversarial"
    seen = loss.seen()
    assert (
        seen["logits"] > 0
        and seen["ce"] > 0
        and 2 < seen["temperature"] < 3.1
        and loss.seen() == {}
    )


def test_a_temperature_that_cannot_be_is_refused():
    for wrong in ({"start": 0.0}, {"anchor": -1.0}, {"strength": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Learned(**wrong)
    with pytest.raises(ValueError, match="must rise"):
        Adversarial(6.0, total=10)
    with pytest.raises(ValueError, match="total = 0"):
        Adversarial(2.0, total=0)
