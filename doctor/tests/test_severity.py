"""Healthy programs that show what a fault would show: none of them may be called an error.

They are strange on purpose (that is what an unseen healthy program is), so a warning is allowed; an error is not.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import assert_root, batches, lm, quiet
from train_doctor import ERROR


class Stream(nn.Module):
    """Embedding, two layers and a head."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.table, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def features(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x

    def forward(self, ids):
        return self.head(self.features(ids))


def ce(model, ids):
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model, loss_of=ce, optimizer=None, *, rounds=6, before=None, after=None, clear=True, **watch):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    with doctor.watch(model, say=False, **watch) as report:
        for number, ids in enumerate(batches(rounds)):
            if clear:
                optimizer.zero_grad()
            loss_of(model, ids).backward()
            if before is None or before(number, optimizer):
                optimizer.step()
            if after:
                after(number, optimizer)
    return report


class Muon(torch.optim.Optimizer):
    """One group for everything; what is a matrix is sorted inside the step, as some published versions do."""

    def __init__(self, params, lr=1e-3, momentum=0.9, adamw_betas=(0.9, 0.95)):
        super().__init__(params, {"lr": lr, "momentum": momentum, "adamw_betas": adamw_betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * group["lr"])


def muon_that_sorts():
    model = Stream()
    return train(model, optimizer=Muon(model.parameters()))


class Contrast(nn.Module):
    """A second encoder follows the first as an average, and is in the optimizer because nobody left it out."""

    def __init__(self, frozen: bool, cut: str):
        super().__init__()
        self.fast, self.cut = Stream(), cut
        self.slow = copy.deepcopy(self.fast).requires_grad_(not frozen)

    def forward(self, ids):
        if self.cut == "no_grad":
            with torch.no_grad():
                goal = self.slow.features(ids)
        else:
            goal = self.slow.features(ids).detach()
        return self.fast(ids) + 0.1 * (self.fast.features(ids) - goal).square().mean()

    @torch.no_grad()
    def follow(self):
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters()):
            slow.lerp_(fast, 0.1)


def average(frozen: bool, cut: str):
    def program():
        model = Contrast(frozen, cut)
        return train(model, after=lambda *_: model.follow())

    return program


def bottom_under_no_grad():
    """Features of a part that is left as it is, though nobody told its flags."""

    class Probe(Stream):
        def forward(self, ids):
            with torch.no_grad():
                x = self.features(ids)
            return self.head(x)

    return train(Probe())


def nan_batch_skipped():
    def loss_of(model, ids):
        loss = ce(model, ids)
        return loss * float("nan") if int(ids[0, 0]) == first else loss

    first = int(batches(6)[2][0, 0])
    model = Stream()

    def sound(number, optimizer):
        return all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())

    return train(model, loss_of, before=sound)


def nan_batches_skipped_in_accumulation():
    model, optimizer = Stream(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with doctor.watch(model, say=False) as report:
        for number, ids in enumerate(batches(12)):
            loss = ce(model, ids) * (float("nan") if number in (3, 4) else 1.0)
            (loss / 2).backward()
            if number in (3, 4):
                optimizer.zero_grad()
            elif number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return report


def fused_under_a_scaler():
    model = Stream()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=100, backoff_factor=2.0**-60)
    with doctor.watch(model, say=False) as report:
        for ids in batches(6):
            optimizer.zero_grad()
            scaler.scale(1e3 * ce(model, ids)).backward()
            scaler.step(optimizer)
            scaler.update()
    return report


def late_start():
    model = Stream()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.0 if t < 3 else 1e-3)
    return train(model, optimizer=optimizer, after=lambda *_: schedule.step())


def group_at_rest():
    model = Stream()
    groups = [{"params": model.table.parameters(), "lr": 0.0}, {"params": [*model.layers.parameters()]}]
    return train(model, optimizer=torch.optim.AdamW([*groups, {"params": model.head.parameters()}], lr=1e-3))


def cycle():
    model = Stream()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.0, 0.1, step_size_up=2)
    return train(model, optimizer=optimizer, after=lambda *_: schedule.step(), rounds=10)


def slightly_noised_input():
    """A denoiser: nearly all of what it is asked stands in its input."""

    def loss_of(model, ids):
        noised = ids.clone()
        noised[:, 7] = 2
        return F.cross_entropy(model(noised).flatten(0, 1), ids.flatten())

    return train(Stream(), loss_of)


def drops_on_purpose():
    """Dropouts of the teacher are woken by themselves, for an average over its guesses."""
    student, teacher = lm("gpt2", hidden=32), lm("gpt2", hidden=32, resid_pdrop=0.1).requires_grad_(False).eval()
    for m in teacher.modules():
        if isinstance(m, nn.Dropout):
            m.train()

    def loss_of(model, ids):
        with torch.no_grad():
            goal = sum(teacher(ids).logits.softmax(-1) for _ in range(3)) / 3
        return F.kl_div(model(ids).logits.log_softmax(-1).flatten(0, 1), goal.flatten(0, 1), reduction="batchmean")

    return train(student, loss_of)


def staged():
    """The optimizer has a small part now, and a module of a later stage that nothing calls yet."""
    model, later = Stream(), nn.Linear(7, 5)
    return train(model, optimizer=torch.optim.AdamW([*model.head.parameters(), *later.parameters()], lr=1e-3))


def new_head_on_a_tied_config():
    model = lm("gpt2", hidden=32)
    model.lm_head = nn.Linear(32, 256, bias=False)
    return train(model, lambda m, ids: m(input_ids=ids, labels=ids).loss)


def window():
    """A step after each backward, and gradients cleared after every third."""
    model = Stream()

    def after(number, optimizer):
        if number % 3 == 2:
            optimizer.zero_grad()

    return train(model, clear=False, after=after, rounds=9)


def one_batch_without_targets():
    def loss_of(model, ids):
        labels = ids[:, 1:].clone()
        labels[:] = torch.where(torch.tensor(int(ids[0, 0]) == first), -100, labels)
        each = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
        return each / max(1, int((labels != -100).sum()))

    first = int(batches(6)[0][0, 0])
    return train(Stream(), loss_of)


def dummy_for_an_empty_batch():
    def loss_of(model, ids):
        return ce(model, ids) if int(ids[0, 0]) != first else torch.zeros((), requires_grad=True)

    first = int(batches(6)[3][0, 0])
    return train(Stream(), loss_of)


def rewards_all_alike():
    return train(Stream(), lambda model, ids: ce(model, ids) * 0.0, rounds=4)


def mask_of_opposite_meaning():
    class Padded(Stream):
        def forward(self, ids, attention_mask=None):
            return super().forward(ids)

    def loss_of(model, ids):
        pads = torch.zeros_like(ids)
        pads[:, 20:] = 1
        labels = torch.where(pads == 1, -100, ids)
        logits = model(ids, attention_mask=pads)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return train(Padded(), loss_of)


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": inner.param_groups[0]["lr"]})

    def step(self):
        self.inner.step()


def optimizer_in_an_optimizer():
    model = Stream()
    return train(model, optimizer=Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)))


def search_for_a_rate():
    model = Stream()
    start = copy.deepcopy(model.state_dict())
    return train(model, rounds=6, after=lambda n, _: model.load_state_dict(start) if n == 5 else None)


def experts_with_room_for_few():
    """Which tokens an expert takes depends on all tokens of the batch, those to come among them."""

    class Routed(Stream):
        def __init__(self):
            super().__init__()
            self.router, self.expert = nn.Linear(32, 1), nn.Linear(32, 32)

        def features(self, ids):
            x = super().features(ids)
            score = self.router(x).flatten()
            chosen = score.topk(len(score) // 4).indices
            out = torch.zeros_like(x).flatten(0, 1)
            out = out.index_add(0, chosen, self.expert(x.flatten(0, 1)[chosen]) * score[chosen, None].sigmoid())
            return x + out.view_as(x)

    return train(Routed())


HEALTHY = {
    "muon_that_sorts": muon_that_sorts,
    "average frozen": average(True, "no_grad"),
    "average no_grad": average(False, "no_grad"),
    "average detach": average(False, "detach"),
} | {
    p.__name__: p
    for p in (
        bottom_under_no_grad,
        nan_batch_skipped,
        nan_batches_skipped_in_accumulation,
        fused_under_a_scaler,
        late_start,
        group_at_rest,
        cycle,
        slightly_noised_input,
        drops_on_purpose,
        staged,
        new_head_on_a_tied_config,
        window,
        one_batch_without_targets,
        dummy_for_an_empty_batch,
        rewards_all_alike,
        mask_of_opposite_meaning,
        optimizer_in_an_optimizer,
        search_for_a_rate,
        experts_with_room_for_few,
    )
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_error(name):
    report = quiet(HEALTHY[name])
    assert report.done and not report.faults and report.rounds > 2, report.faults
    assert not [f for f in report.findings if f.severity == ERROR], report


def test_what_nan_does_when_it_is_not_skipped():
    assert_root(quiet(lambda: train(Stream(), lambda m, ids: ce(m, ids) * float("nan"))), "N17")
