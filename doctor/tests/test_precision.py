"""Programs in 16 bits: updates that are lost, scalers that are wrong, and their healthy twins."""

import pytest
import torch

import train_doctor as doctor
from tests.bench import RoundingAdamW, assert_healthy, assert_root, batches, lm, quiet
from tests.test_backward import Infinite


class Rounding(torch.optim.AdamW):
    """AdamW whose step is rounded stochastically, with a generator of its own."""

    @torch.no_grad()
    def step(self, closure=None):
        ps = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        if ps[0].dtype != torch.bfloat16:  # the step of 32 bits
            return super().step()
        make = self.__dict__.setdefault("make", torch.Generator().manual_seed(1))
        if not hasattr(self, "twin"):
            self.twin = {p: p.float().clone().requires_grad_() for p in ps}
            self.inner = torch.optim.AdamW(list(self.twin.values()), lr=self.param_groups[0]["lr"])
        for p, double in self.twin.items():
            double.data.copy_(p.float())
            double.grad = p.grad.float()
        self.inner.step()
        for p, double in self.twin.items():
            bits = double.detach().view(torch.int32) + torch.randint(0, 2**16, p.shape, generator=make).int()
            p.copy_((bits & -65536).view(torch.float32).bfloat16())


def low(lr: float, *, dtype=torch.bfloat16, kind=torch.optim.AdamW, rounds: int = 8, family: str = "llama"):
    def program():
        model = lm(family, hidden=32).to(dtype)
        optimizer = kind(model.parameters(), lr=lr)
        with doctor.watch(model, say=False) as report:
            for ids in batches(rounds):
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
        return report

    return program


@pytest.mark.parametrize("lr", [1e-6, 1e-5])
def test_updates_rounded_away(lr):
    assert_root(quiet(low(lr)), "N4")
    assert_root(quiet(low(lr, rounds=3, family="gpt2")), "N4")


def test_low_precision_that_works():
    assert_healthy(quiet(low(1e-3)))
    assert_healthy(quiet(low(1e-5, dtype=torch.float32)))
    assert_healthy(quiet(low(1e-5, kind=Rounding)))


def test_fp16_parameters_under_a_scaler():
    def program():
        model = lm(hidden=32).half()
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-4), torch.amp.GradScaler("cpu")
        report = None
        try:
            with doctor.watch(model, say=False) as report:
                for ids in batches(3):
                    optimizer.zero_grad()
                    scaler.scale(model(input_ids=ids, labels=ids, use_cache=False).loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
        except ValueError:
            pass
        return report

    assert_root(quiet(program), "S7")


def half(scaler, rounds: int = 4):
    def program():
        model = lm(hidden=32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with doctor.watch(model, say=False) as report:
            for ids in batches(rounds):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                scaler().scale(loss).backward()
                scaler().step(optimizer)
                scaler().update()
        return report

    made = scaler
    kept = []

    def scaler():
        if not kept:
            kept.append(made())
        return kept[0]

    return program


def test_scalers():
    assert_root(quiet(half(lambda: torch.amp.GradScaler("cpu", enabled=False))), "B5")
    assert_root(quiet(half(lambda: torch.amp.GradScaler("cuda"))), "B5")
    assert_healthy(quiet(half(lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10))))


def scaled_by(scale: float, broken: bool = False):
    def program():
        model = lm(hidden=32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with doctor.watch(model, say=False) as report:
            for ids in batches(10):
                optimizer.zero_grad()
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                scaler.scale(Infinite.apply(loss) if broken else loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return report

    return program


def test_scaler_that_never_accepts():
    assert_root(quiet(scaled_by(2.0**10, broken=True)), "N15")
    assert_healthy(quiet(scaled_by(2.0**10)))
    assert_healthy(quiet(scaled_by(2.0**127)))  # a few skips until the scale is found


def test_an_optimizer_that_rounds_its_fp32_copies_as_well_casts_no_shadow():
    """Two roundings by chance differ from each other as much as they move; that is no lost update."""
    model = lm().bfloat16()
    optimizer = RoundingAdamW(model.parameters(), lr=1e-5)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for ids in batches(10):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    assert not report.findings or all(f.check != "N4" for f in report.findings), str(report)
    assert report.verdicts["N4"].state == "UNKNOWN" and "rounds" in report.verdicts["N4"].why
