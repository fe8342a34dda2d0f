"""Programs whose loop is in disorder, each next to one that looks alike and is not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import assert_healthy, assert_root, batches, lm, quiet


def loop(order: str, *, rounds: int = 4, lr: float = 1e-3, kind=torch.optim.AdamW, family: str = "qwen3"):
    """One letter per call: z zero_grad, b backward, s step, c clip, i clip at infinity, n zero_grad(set_to_none=False),
    h clearing by hand."""

    def program():
        model = lm(family, hidden=32)
        optimizer = kind(model.parameters(), lr=lr)
        data = iter(batches(rounds * order.count("b")))
        with doctor.watch(model, optimizer=optimizer, say=False) as report:
            for _ in range(rounds):
                for letter in order:
                    if letter == "z":
                        optimizer.zero_grad()
                    elif letter == "n":
                        optimizer.zero_grad(set_to_none=False)
                    elif letter == "h":
                        for p in model.parameters():
                            p.grad = None
                    elif letter == "b":
                        ids = next(data)
                        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
                        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
                        (loss / order.count("b")).backward()
                    elif letter in "ci":
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 if letter == "c" else float("inf"))
                    elif letter == "s":
                        optimizer.step()
        return report

    return program


@pytest.mark.parametrize("order", ["bs", "bcs", "bbs"])
def test_missing_zero_grad(order):
    assert_root(quiet(loop(order)), "N1")
    assert_root(quiet(loop(order, rounds=3, kind=torch.optim.SGD, family="gpt2")), "N1")


@pytest.mark.parametrize("order", ["bzs", "zbzs", "bns", "bhs", "bzcs", "zbzbs", "zbzbzbs"])
def test_cleared_too_soon(order):
    assert_root(quiet(loop(order)), "N2")


@pytest.mark.parametrize("order", ["cbsz", "zcbs", "bcbcsz", "bscz"])
def test_clip_at_wrong_time(order):
    assert_root(quiet(loop(order)), "N8")


@pytest.mark.parametrize("order", ["zbs", "bsz", "nbcs", "bsn", "hbs", "bsh", "zbbcs", "bbsz", "zbibis", "zibs"])
def test_orders_that_are_right(order):
    report = quiet(loop(order))
    assert_healthy(report)
    assert report.verdicts["N1"].state == report.verdicts["N2"].state == "OK"


def adversaries(clear: bool):
    def program():
        one, two = lm(hidden=32), lm("gpt2", hidden=32)
        a = torch.optim.AdamW(one.parameters(), lr=1e-3)
        b = torch.optim.AdamW(two.parameters(), lr=1e-3)
        with doctor.watch(say=False) as report:
            for ids in batches(4):
                for model, optimizer in ((one, a), (two, b)):
                    if clear:
                        optimizer.zero_grad()
                    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                    optimizer.step()
        return report

    return program


def test_two_optimizers_that_take_turns():
    assert_healthy(quiet(adversaries(clear=True)))
    assert_root(quiet(adversaries(clear=False)), "N1")


def test_sharpness_aware_minimisation_is_healthy():
    def program():
        model = lm(hidden=32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with doctor.watch(model, say=False) as report:
            for ids in batches(4):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                climbed = [(p, 0.01 * p.grad / p.grad.norm()) for p in model.parameters() if p.grad is not None]
                with torch.no_grad():
                    for p, way in climbed:
                        p.add_(way)
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                with torch.no_grad():
                    for p, way in climbed:
                        p.sub_(way)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return report

    assert_healthy(quiet(program))


def restored(fault: bool):
    def program():
        model = lm(hidden=32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        start = {k: v.clone() for k, v in model.state_dict().items()}
        with doctor.watch(model, say=False) as report:
            for ids in batches(4):
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                if fault:
                    model.load_state_dict(start)
        return report

    return program


def test_weights_put_back():
    assert_root(quiet(restored(True)), "N3")
    assert_healthy(quiet(restored(False)))


def scaled(order: str, limit: float = 1.0):
    def program():
        model = lm(hidden=32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with doctor.watch(model, say=False) as report:
            for ids in batches(4):
                optimizer.zero_grad()
                scaler.scale(model(input_ids=ids, labels=ids, use_cache=False).loss).backward()
                for letter in order:
                    if letter == "u":
                        scaler.unscale_(optimizer)
                    else:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
                scaler.step(optimizer)
                scaler.update()
        return report

    return program


def test_clip_before_unscale():
    assert_root(quiet(scaled("c")), "N7")
    assert_root(quiet(scaled("cu")), "N7")
    assert_healthy(quiet(scaled("uc")))
    assert_healthy(quiet(scaled("c", float("inf"))))


def test_a_step_that_fp32_rounds_away_is_no_stuck_weight():
    """The gradient of a bias in front of a normalisation is what rounding leaves of zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    before = model[0].bias.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with doctor.watch(model, optimizer=optimizer, say=False, steps=6) as report:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            assert model[0].bias.grad.any()
            optimizer.step()
    assert torch.equal(model[0].bias, before), "it does not move at all"
    assert report.verdicts["N3"].state == "OK", f"\n{report}"
