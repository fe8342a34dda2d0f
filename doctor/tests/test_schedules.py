"""Programs whose learning rate goes wrong, each next to one that is meant so."""

import torch
from torch.optim.lr_scheduler import LambdaLR

import train_doctor as doctor
from tests.bench import assert_healthy, assert_root, batches, lm, quiet


def scheduled(shape=None, *, order: str = "zbsl", rounds: int = 6, lr: float = 1e-3):
    """As in test_steps; l steps the scheduler."""

    def program():
        model = lm(hidden=32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = LambdaLR(optimizer, shape) if shape else None
        data = iter(batches(rounds * order.count("b")))
        with doctor.watch(model, say=False) as report:
            for _ in range(rounds):
                for letter in order:
                    if letter == "z":
                        optimizer.zero_grad()
                    elif letter == "b":
                        ids = next(data)
                        (model(input_ids=ids, labels=ids, use_cache=False).loss / order.count("b")).backward()
                    elif letter == "s":
                        optimizer.step()
                    elif scheduler:
                        scheduler.step()
        return report

    return program


def test_rate_zero():
    assert_root(quiet(scheduled(lambda t: max(0.0, 1 - t / 2))), "N11")
    assert_root(quiet(scheduled(lambda t: t // 10)), "N11")
    assert_root(quiet(scheduled(lambda t: min(1.0, t / 5), order="zbs")), "N11")
    assert_healthy(quiet(scheduled(lambda t: min(1.0, t / 5))))
    assert_healthy(quiet(scheduled(lambda t: max(0.0, 1 - t / 6))))


def test_scheduler_rate():

    def decay(t: int) -> float:
        return 0.99**t

    assert_root(quiet(scheduled(decay, order="zblblbls")), "N9")
    assert_root(quiet(scheduled(decay, order="zbls")), "N9")
    assert_healthy(quiet(scheduled(decay, order="zbbbsl")))


def test_size_of_updates():
    assert_root(quiet(scheduled(lr=1.0)), "N5")
    assert_root(quiet(scheduled(lr=1e-9)), "N5")
    assert_healthy(quiet(scheduled(lr=1e-2)))
    assert_healthy(quiet(scheduled(lr=1e-5)))


def muon(*, everything: bool = False, lr: float = 0.02, adjust: str = "original", decay: str = ""):
    def program():
        model = lm("llama", hidden=32, tie_word_embeddings=False)
        hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and (everything or "layers" in n)]
        mine = {id(p) for p in hidden}
        rest = [p for p in model.parameters() if id(p) not in mine]
        both = [torch.optim.Muon(hidden, lr=lr, adjust_lr_fn=adjust), torch.optim.AdamW(rest, lr=1e-3)]
        schedulers = [LambdaLR(both[int(i)], lambda t: 0.9**t) for i in decay]
        with doctor.watch(model, say=False) as report:
            for ids in batches(5):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                for optimizer in both:
                    optimizer.step()
                    optimizer.zero_grad()
                for scheduler in schedulers:
                    scheduler.step()
        return report

    return program


def test_muon():
    assert_root(quiet(muon(everything=True)), "S13")
    assert_root(quiet(muon(lr=3e-4)), "N5b")
    assert_root(quiet(muon(lr=0.05, adjust="match_rms_adamw")), "N5b", "N5")
    assert_root(quiet(muon(decay="0")), "N10")
    assert_healthy(quiet(muon()))
    assert_healthy(quiet(muon(decay="01")))
    assert_healthy(quiet(muon(lr=3e-4, adjust="match_rms_adamw")))


def clipped(limit: float, weight: float = 1.0, rounds: int = 10):
    def program():
        model = lm(hidden=32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with doctor.watch(model, say=False) as report:
            for ids in batches(rounds):
                optimizer.zero_grad()
                (weight * model(input_ids=ids, labels=ids, use_cache=False).loss).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
                optimizer.step()
        return report

    return program


def test_every_step_is_clipped():
    assert_root(quiet(clipped(1e-3)), "B6")
    assert_root(quiet(clipped(0.1, weight=1000.0)), "B6")
    assert_healthy(quiet(clipped(1.0)))
    few = quiet(clipped(1e-3, rounds=4))
    assert few.root is None and few.verdicts["B6"].state == "UNKNOWN"


def test_schedule_that_ends_early():
    report = quiet(scheduled(lambda t: max(0.0, 1 - t / 2), rounds=4))
    assert_root(report, "N9")
    assert_healthy(quiet(scheduled(lambda t: max(0.0, 1 - t / 4), rounds=4)))
    assert_healthy(quiet(scheduled(lambda t: abs(1 - t % 4 / 2), rounds=9)))  # a cycle that touches zero


def test_a_function_that_returns_a_rate():
    """LambdaLR multiplies: a function that gives the rate itself squares it."""
    base = 1e-3
    assert_root(quiet(scheduled(lambda t: base * 0.99**t, lr=base)), "N9")
    assert_healthy(quiet(scheduled(lambda t: 0.99**t, lr=base)))
    assert_healthy(quiet(scheduled(lambda t: base * 0.99**t, lr=1.0)), warnings_allowed=("N5",))
    assert_healthy(quiet(scheduled(lambda t: base + t / 5, lr=base)), warnings_allowed=("N5",))  # a warm-up from there
