"""Teachers and references: F6, S12, F7, F8, F9, N14, with the runs that look like them."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import FusedCrossEntropy, assert_healthy, assert_root, batches, lm, quiet
from tests.programs_a import Nano, adamw, lora, loss_of, train


def gpt2(p=0.1, seed=1):
    return lm("gpt2", resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, seed=seed)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    out = model(ids)
    return out[0] if isinstance(out, tuple) else out.logits


def distil(student, model_above, /, *, grad=False, extra=(), mean=False, steps=4, after=None, optimizer=None, **watch):
    optimizer = optimizer or adamw(student, *extra)
    with doctor.watch(say=False, steps=steps, **watch) as report:
        for ids in batches(steps):
            with torch.set_grad_enabled(grad):
                goal = logits_of(model_above, ids)
            mine = logits_of(student, ids)
            kd = F.kl_div(mine.log_softmax(-1), goal.softmax(-1), reduction="none").sum(-1).mean()
            loss = kd + F.cross_entropy(mine[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if after:
                after()
    return report


def sequence(model: nn.Module, ids: Tensor) -> Tensor:
    return logits_of(model, ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].sum(-1)


def dpo(policy, reference, /, *, steps=4, beta=0.1, lr=1e-3, **watch):
    """`reference` is a model, or a function of ids."""
    optimizer, ask = adamw(policy, lr=lr), reference
    if isinstance(reference, nn.Module):

        def ask(ids):
            return sequence(reference, ids)

    with doctor.watch(say=False, steps=steps, **watch) as report:
        for good, bad in zip(batches(steps), batches(steps, seed=5)):
            with torch.no_grad():
                theirs = ask(good) - ask(bad)
            ours = sequence(policy, good) - sequence(policy, bad)
            loss = -F.logsigmoid(beta * (ours - theirs)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return report


def noisy_gpt2():
    return distil(lm("gpt2"), gpt2().train().requires_grad_(False))


def noisy_nano():
    return distil(Nano(), Nano(dropout=0.1), steps=3)


def noisy_reference():
    policy = Nano(dropout=0.1)
    return dpo(policy, copy.deepcopy(policy))


def noisy_declared():
    student, teacher = lm("llama"), gpt2()
    return distil(student, teacher, model=student, teacher=teacher)


def same_object():
    model = lm("llama")
    return dpo(model, model)


def same_declared():
    model = lm("llama")
    return dpo(model, model, model=model, teacher=model)


def shallow_copy():
    model = Nano()
    return dpo(model, copy.copy(model))


def assigned():
    policy, reference = Nano(tie=False), Nano(tie=False)
    reference.load_state_dict(policy.state_dict(), assign=True)
    return dpo(policy, reference.eval())


def beta_zero():
    policy = Nano()
    return dpo(policy, copy.deepcopy(policy).eval(), beta=0.0, steps=3)


def adapter_left_on():
    policy = lora(lm("llama"))
    return dpo(policy, lambda ids: sequence(policy, ids))


def in_the_graph():
    return distil(lm("llama"), lm("llama", seed=3), grad=True)


def optimizer_of_the_teacher():
    student, teacher = Nano(), Nano(tie=False)
    return distil(student, teacher, optimizer=adamw(teacher))


def in_the_optimizer():
    student, teacher = Nano(), Nano(tie=False)
    return distil(student, teacher, grad=True, extra=[teacher], model=student, teacher=teacher)


def under_inference_mode():
    student, teacher, scale, report = Nano(), Nano(), nn.Parameter(torch.ones(())), None
    optimizer = adamw(student, [scale])
    try:
        with doctor.watch(student, teacher=teacher, say=False) as report:
            for ids in batches(2):
                with torch.inference_mode():
                    goal = logits_of(teacher, ids)
                loss = F.mse_loss(logits_of(student, ids), goal * scale)
                loss.backward()
                optimizer.step()
    except RuntimeError:
        pass
    return report


FAULTS = {
    noisy_gpt2: ("F6", "S12"),
    noisy_nano: ("F6", "S12"),
    noisy_reference: ("F6", "S12"),
    noisy_declared: ("F6", "S12"),
    same_object: ("N14", "F7"),
    same_declared: ("F7",),
    shallow_copy: ("F7",),
    assigned: ("F7",),
    beta_zero: ("N14",),
    adapter_left_on: ("N14",),
    in_the_graph: ("F8",),
    optimizer_of_the_teacher: ("S3",),
    in_the_optimizer: ("F8",),
    under_inference_mode: ("F9",),
}


@pytest.mark.parametrize("program", FAULTS, ids=lambda p: p.__name__)
def test_faults(program):
    assert_root(quiet(program), *FAULTS[program])


def quiet_teacher():
    return distil(lm("gpt2"), gpt2().eval().requires_grad_(False))


def train_mode_without_dropout():
    return distil(Nano(dropout=0.1), Nano().train())


def own_copy():
    policy = Nano()
    return dpo(policy, copy.deepcopy(policy).eval())


def low_rate():
    policy = lm("llama")
    return dpo(policy, copy.deepcopy(policy).eval().requires_grad_(False), lr=1e-6)


def adapter_off():
    policy = lora(lm("llama"))

    def reference(ids):
        with policy.disable_adapter():
            return sequence(policy, ids)

    return dpo(policy, reference, lr=1e-2)


def lora_on_shared_base():
    base = Nano().requires_grad_(False)
    policy = copy.copy(base)
    policy._modules = dict(base._modules)
    policy.lm_head = nn.Linear(32, 256, bias=False)
    return distil(policy, base)


def evaluated_between():
    model = Nano(dropout=0.1)

    def between(step):
        with torch.no_grad():
            loss_of(model.eval(), batches(1, seed=4)[0])
        model.train()

    return train(model, adamw(model), between=between)


def evaluated_first_and_trained_by_its_backbone():
    """A loss without logits calls a part of the model, the evaluation before it the whole."""
    model = lm()
    optimizer = adamw(model)
    with doctor.watch(say=False, steps=4) as report:
        with torch.no_grad():
            model.eval()(batches(1, rows=8)[0])
        model.train()
        for ids in batches(4):
            optimizer.zero_grad()
            hidden, targets = model.model(ids).last_hidden_state[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            (FusedCrossEntropy.apply(hidden, model.lm_head.weight, targets) / len(targets)).backward()
            optimizer.step()
    return report


def teach_each_other():
    one, two = Nano(), Nano(hidden=48)
    optimizer = adamw(one, two)
    with doctor.watch(say=False, steps=4) as report:
        for ids in batches(4):
            answers = [logits_of(model, ids) for model in (one, two)]
            own = sum(F.cross_entropy(a[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for a in answers)
            both = F.kl_div(answers[0].log_softmax(-1), answers[1].softmax(-1), reduction="none").sum(-1).mean()
            optimizer.zero_grad()
            (own + both).backward()
            optimizer.step()
    return report


def temperature_under_no_grad():
    student, teacher, scale = Nano(), Nano(), nn.Parameter(torch.ones(()))
    optimizer = adamw(student, [scale])
    with doctor.watch(student, teacher=teacher, say=False, steps=3) as report:
        for ids in batches(3):
            with torch.no_grad():
                goal = logits_of(teacher.eval(), ids)
            optimizer.zero_grad()
            F.mse_loss(logits_of(student, ids), goal * scale).backward()
            optimizer.step()
    return report


def constant_under_inference_mode():
    student, teacher = Nano(), Nano(tie=False)
    optimizer = adamw(student)
    with doctor.watch(say=False, steps=3) as report:
        for ids in batches(3):
            with torch.inference_mode():
                goal = logits_of(teacher, ids)
            optimizer.zero_grad()
            F.mse_loss(logits_of(student, ids), goal.clone()).backward()
            optimizer.step()
    return report


HEALTHY = [
    quiet_teacher,
    train_mode_without_dropout,
    own_copy,
    low_rate,
    adapter_off,
    lora_on_shared_base,
    evaluated_between,
    evaluated_first_and_trained_by_its_backbone,
    teach_each_other,
    temperature_under_no_grad,
    constant_under_inference_mode,
]


@pytest.mark.parametrize("program", HEALTHY, ids=lambda p: p.__name__)
def test_healthy(program):
    assert_healthy(quiet(program))


def test_a_mean_teacher_with_noise_is_no_error():
    def program():
        student = Nano(dropout=0.1)
        teacher = copy.deepcopy(student).requires_grad_(False)

        def average():
            with torch.no_grad():
                for t, s in zip(teacher.parameters(), student.parameters()):
                    t.lerp_(s, 0.1)

        return distil(student, teacher, after=average)

    assert_healthy(quiet(program), warnings_allowed=("F6",))  # noise on both sides is how some mean teachers work


def test_replays_leave_no_trace():
    def losses(watched: bool) -> list[float]:
        torch.manual_seed(0)
        student, teacher = Nano(dropout=0.1), Nano(dropout=0.1)
        seen = []

        def record(student=student):
            seen.append(float(sum(p.double().sum() for p in student.parameters())))

        if watched:
            distil(student, teacher, after=record)
            return seen
        original, doctor.watch = doctor.watch, _nothing
        try:
            distil(student, teacher, after=record)
        finally:
            doctor.watch = original
        return seen

    assert losses(True) == losses(False)


class _nothing:
    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return None

    def __exit__(self, *args):
        return False


def averaged(rate, *, before_the_step: bool = False, steps: int = 8):
    """A mean teacher that goes so much of the way at each step."""
    torch.manual_seed(0)
    student = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), 1e-2)

    def follow(n):
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters()):
                t.lerp_(s, rate(n))

    with doctor.watch(student, optimizer=optimizer, teacher=teacher, say=False) as report:
        for n in range(steps):
            x = torch.randn(16, 4)
            with torch.no_grad():
                aim = teacher(x + 0.1 * torch.randn_like(x))
            loss = F.mse_loss(student(x), x.flip(1)) + F.mse_loss(student(x), aim)
            optimizer.zero_grad()
            loss.backward()
            follow(n) if before_the_step else None
            optimizer.step()
            follow(n) if not before_the_step else None
    assert not report.faults, report.faults
    return {f.check for f in report.findings}


@pytest.mark.parametrize("before", (False, True))
def test_a_teacher_that_follows_at_once(before):
    assert "F28" in averaged(lambda n: 0.9, before_the_step=before)
    assert "F28" not in averaged(lambda n: 0.1, before_the_step=before)


RATES = {"a copy": lambda n: 1.0, "of all so far": lambda n: 1 / (n + 1), "warmed up": lambda n: 1 - (1 + n) / (10 + n)}


@pytest.mark.parametrize("how", RATES)
def test_averages_that_begin_at_once(how):
    assert "F28" not in averaged(RATES[how])
