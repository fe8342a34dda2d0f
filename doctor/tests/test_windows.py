"""A watch that stays on: what it finds late, that it leaves nothing behind between windows, what it
costs there.
"""

import copy
import gc
import json
import math
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as torch_optimizer

import loopdoctor as doctor
from loopdoctor import NOTE, record, script
from tests.test_noninterference import hooks, world


def net(width: int = 16, kind=torch.optim.SGD, rate: float = 0.05):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    return model, kind(model.parameters(), rate)


def loop(model, optimizer, steps: int, before=lambda n: None, scheduler=None):
    losses = []
    for n in range(steps):
        before(n)
        x = torch.randn(8, model[0].in_features)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def freeze_at(optimizer, when: int):
    def before(n):
        if n == when:
            optimizer.param_groups[0]["lr"] = 0.0

    return before


def test_a_late_fault_is_found_with_its_steps():
    model, optimizer = net()
    with doctor.watch(steps=4, at=[0, 20, 40], say=False) as report:
        loop(model, optimizer, 60, freeze_at(optimizer, 30))
    assert [(w.first, w.rounds) for w in report.windows] == [
        (0, 4),
        (20, 4),
        (40, 4),
    ] and not report.faults
    assert report.root.check == "N11" and report.root.observed.startswith("steps 41 to 44: "), str(
        report
    )
    assert report.rounds == 12 and "in 3 windows" in str(report)
    assert not [f for w in report.windows[:2] for f in w.findings if f.severity != NOTE]


@pytest.mark.parametrize("given", ["everything", "nothing"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_healthy_run_stays_silent_and_every_bit_is_the_same(given, kind):
    def run(**watch):
        model, optimizer = net(kind=kind)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        told = dict(model=model, optimizer=optimizer) if given == "everything" else {}
        with doctor.watch(**told, **watch, say=False) as report:
            losses = loop(model, optimizer, 60, scheduler=scheduler)
        return losses, model.state_dict(), torch.get_rng_state(), report

    plain = run(steps=1)
    watched = run(steps=4, at=[2], every=10)
    report = watched[3]
    assert plain[0] == watched[0] and torch.equal(plain[2], watched[2])
    assert all(torch.equal(a, b) for a, b in zip(plain[1].values(), watched[1].values()))
    assert [w.first for w in report.windows] == [0, 10, 20, 30, 40, 50], (
        "2 falls into a window that is open"
    )
    assert not report.faults and not [f for f in report.findings if f.severity != NOTE], str(report)


def test_between_windows_there_is_one_counter_and_nothing_else():
    model, optimizer = net()
    loop(model, optimizer, 2)
    clean, attached, seen = world()[:-1], hooks(), []

    def look(n):
        ours = [
            h
            for h in torch_optimizer._global_optimizer_post_hooks.values()
            if "windows" in h.__module__
        ]
        seen.append(
            (
                world()[:-1] == clean,
                hooks() - attached - len(ours),
                len(ours),
                bool(model._forward_hooks),
            )
        )

    with doctor.watch(steps=3, at=[5, 15], say=False) as report:
        loop(model, optimizer, 25, look)
    assert world()[:-1] == clean and hooks() == attached, "nothing is left"
    assert all(same == (more == 0) and not (same and hooked) for same, more, _, hooked in seen)
    inside = [n for n, (same, *_) in enumerate(seen) if not same]
    assert inside == [*range(5, 9), *range(15, 19)], (
        "a window ends with the first backward after its steps"
    )
    assert all(ours == 1 for _, _, ours, _ in seen) and report.rounds == 6


def test_two_networks_that_take_turns():
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 8), nn.Linear(8, 1)
    one, two = (torch.optim.Adam(m.parameters(), 1e-3) for m in (maker, judge))

    def run():
        for _ in range(40):
            two.zero_grad()
            real, made = torch.randn(16, 8) + 1, maker(torch.randn(16, 4))
            score = torch.cat([judge(real), judge(made.detach())])
            F.binary_cross_entropy_with_logits(
                score, torch.cat([torch.ones(16, 1), torch.zeros(16, 1)])
            ).backward()
            two.step()
            one.zero_grad()
            F.binary_cross_entropy_with_logits(judge(made), torch.ones(16, 1)).backward()
            one.step()

    with doctor.watch(steps=6, every=10, say=False) as report:
        run()
    assert len(report.windows) == 5 and not report.faults, report.faults
    assert not [f for f in report.findings if f.severity != NOTE], str(report)


@pytest.mark.slow
def test_memory_is_bounded():
    model, optimizer = net(4)
    sizes = []

    def look(n):
        if n in (5_000, 9_999):
            gc.collect()
            sizes.append((len(gc.get_objects()), torch_bytes(), len(report.json())))

    with doctor.watch(steps=2, every=250, say=False) as report:
        loop(model, optimizer, 10_000, look)
    assert report.rounds == 40 * 2 and len(report.windows) == 16 and not report.faults
    (objects, tensors, text), (objects_later, tensors_later, text_later) = sizes
    assert (
        objects_later < objects + 500 and tensors_later <= tensors and text_later < 1.05 * text
    ), sizes


def torch_bytes() -> int:
    """Of all that is alive: also what the tests before this one left, such as a sparse graph, which
    has no storage.
    """
    alive = (
        x
        for x in gc.get_objects()
        if type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided
    )
    return sum(x.untyped_storage().nbytes() for x in alive)


@pytest.mark.slow
def test_outside_a_window_it_costs_next_to_nothing():
    """All that runs between windows is the counter (see above), so its share of a tiny step is the
    cost. Taken in turns over 10,000 steps, the least of each: other programs on the machine make
    the mean of either uncertain by more.
    """
    model, optimizer = net()
    step, counter = math.inf, math.inf
    with doctor.watch(at=[10**9], say=False):
        (count,) = torch_optimizer._global_optimizer_post_hooks.values()
        for _ in range(1000):
            begun = time.process_time()
            loop(model, optimizer, 10)
            step = min(step, (time.process_time() - begun) / 10)
            begun = time.process_time()
            for _ in range(100):
                count(optimizer, (), {})
            counter = min(counter, (time.process_time() - begun) / 100)
    print(
        f"outside a window: {1e6 * counter:.2f} of {1e6 * step:.0f} microseconds, {counter / step:.2%}"
    )
    assert counter < 0.01 * step


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(every=10), "every = 10: must be a whole number above steps = 10"),
        (dict(every=2.5), "every = 2.5"),
        (dict(at=[0, 5]), "the window at 5 opens before the one before it is over"),
        (dict(at=[-1]), "at = [-1]: must be a list of whole numbers from 0 on"),
        (dict(at="0,5"), "at = '0,5'"),
    ],
)
def test_windows_that_cannot_be(options, said):
    with pytest.raises(ValueError) as refused, doctor.watch(**options):
        pass
    assert said in str(refused.value)


def test_a_run_that_raises_between_windows():
    model, optimizer = net()

    def fail(n):
        if n == 7:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError), doctor.watch(steps=2, at=[0, 50], say=False) as report:
        loop(model, optimizer, 9, fail)
    assert report.done and report.rounds == 2 and "on purpose" in str(report.exception)


# ------------------------------------------------------------------------------------ the first NaN
class Divides(nn.Module):
    """Divides by the spread of each row, which is 0 for rows that are all alike."""

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


@pytest.mark.parametrize("when", [0, 25])
def test_a_nan_is_traced_to_its_module_and_what_went_in(when):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Divides(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with doctor.watch(model, at=[0, 20], steps=10, say=False) as report:
        for n in range(when + 4):
            if n == when:
                with torch.no_grad():
                    model[0].weight.zero_()
                    model[0].bias.fill_(0.5)
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
    assert report.root.check == "F5", str(report)
    assert (
        "output of 2 (Divides, float32), into which went (16, 8) from 0.462 to 0.462"
        in report.root.observed
    )


# ------------------------------------------------------------------------------------ a healthy run
def reported(change=None, **watch):
    model, optimizer = net()
    if change:
        change(model, optimizer)
    with doctor.watch(say=False, **({"steps": 6} | watch)) as report:
        loop(model, optimizer, 40, getattr(change, "before", lambda n: None))
    return report


def saved(tmp_path, report):
    path = tmp_path / "healthy.json"
    path.write_text(report.json())
    return record.load(path)


def wider(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.2


def other_weights(model, optimizer):
    with torch.no_grad():
        model[2].weight.mul_(3)


def another(model, optimizer):
    model[2].bias.requires_grad_(False)


def test_what_changed_first_against_a_healthy_run(tmp_path):
    healthy = saved(tmp_path, reported())
    assert record.compare(reported(), healthy) == [
        "no difference in 6 steps beyond 1e-06 of a number"
    ]
    assert (
        "step 1: the learning rate is 0.2, and was 0.05"
        in record.compare(reported(wider), healthy)[0]
    )
    assert "step 1: the loss is " in record.compare(reported(other_weights), healthy)[0]
    said = record.compare(reported(another), healthy)
    assert (
        said[0].startswith("set-up: trainable is 3 tensors")
        and "step 1: the gradient norm of" not in said[0]
    )


def test_the_first_window_that_differs_is_named(tmp_path):
    windows = dict(steps=4, at=[0, 20])
    healthy = saved(tmp_path, reported(**windows))

    def late(model, optimizer):
        late.before = freeze_at(optimizer, 21)

    said = record.compare(reported(late, **windows), healthy)
    assert said[0] == "first difference: step 22: the learning rate is 0, and was 0.05"
    assert record.compare(reported(), saved(tmp_path, reported(steps=4, at=[20])))[0].startswith(
        "no window"
    )


def test_numbers_that_json_does_not_have_come_back(tmp_path):
    report = reported()
    report.record = copy.deepcopy(report.record)
    report.record["curves"]["loss"][3] = float("nan")
    ((_, read),) = saved(tmp_path, report)
    assert str(read["curves"]["loss"][3]) == "nan"
    said = record.compare(reported(), [(0, read)])
    assert said[0].startswith("first difference: step 4: the loss is ") and said[0].endswith(
        "and was nan"
    )


def test_the_command_compares(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import sys, torch\ntorch.manual_seed(0)\nm = torch.nn.Linear(4, 4)\n"
        "o = torch.optim.SGD(m.parameters(), float(sys.argv[1]))\nfor _ in range(30):\n"
        "    x = torch.randn(8, 4); o.zero_grad(); (m(x) - x).square().mean().backward(); o.step()\n"
    )
    assert script.command(["train.py", "--json", "--steps", "3", "--every", "10", "--", "0.1"]) == 0
    text = capsys.readouterr().out
    assert [w["first"] for w in json.loads(text)["windows"]] == [0, 10, 20]
    (tmp_path / "healthy.json").write_text(text)
    line = ["train.py", "--baseline", "healthy.json", "--steps", "3", "--every", "10", "--", "0.2"]
    assert script.command(line) == 0
    assert (
        "against the baseline: first difference: step 1: the learning rate is 0.2"
        in capsys.readouterr().out
    )
    assert script.command(["train.py", "--every", "10", "--", "0.1"]) == 2
    (tmp_path / "healthy.json").write_text("{}")
    assert script.command(line) == 2
    assert "is no report to compare with: it has no 'windows'" in capsys.readouterr().err
