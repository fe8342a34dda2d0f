"""The doctor leaves no trace: same numbers to the last bit, everything put back, nothing kept
alive, next to no cost.

Footgun: a seeded run compares equal only when both start from the same generator state; `run` seeds
each.
"""

import copy
import gc
import os
import time
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim import optimizer as optimizer_module
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import loopdoctor as doctor
from tests import loops


class Stop(Exception):
    """What a program raises on purpose."""


class Net(nn.Module):
    """Embedding, two blocks with dropout, head: called in every way by the programs below."""

    def __init__(self, dropout: float = 0.1, reentrant: bool | None = None):
        super().__init__()
        self.table, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.norm, self.reentrant = nn.BatchNorm1d(32), reentrant

    def forward(self, idx, targets=None):
        h = self.table(idx)
        for block in self.blocks:
            h = h + (
                block(h)
                if self.reentrant is None
                else checkpoint(block, h, use_reentrant=self.reentrant)
            )
        logits = self.head(self.norm(h.transpose(1, 2)).transpose(1, 2))
        return (
            logits
            if targets is None
            else (logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        )


def plain(m, ids, watching, losses):
    o = torch.optim.AdamW(m.parameters(), 1e-3)
    with watching(m, o):
        for x in ids:
            loss = m(x[:, :-1], x[:, 1:])[1]
            o.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            o.step()
            losses.append(loss.item())


def accumulating(m, ids, watching, losses):
    o = torch.optim.SGD(m.parameters(), 1e-1, momentum=0.9)
    schedule = LambdaLR(o, lambda n: 1 / (1 + n))
    with watching(None, None):
        for n, x in enumerate(ids):
            loss = F.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()) / 2
            loss.backward()
            losses.append(loss.item())
            if n % 2:
                o.step()
                schedule.step()
                o.zero_grad()


def scaled(m, ids, watching, losses):
    o = torch.optim.Adam(m.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watching(m, o):
        for x in ids:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(m(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten())
            scaler.scale(loss).backward()
            scaler.unscale_(o)
            scaler.step(o)
            scaler.update()
            o.zero_grad()
            losses.append(loss.item())


def low(m, ids, watching, losses):
    plain(m.bfloat16(), ids, watching, losses)


def parts(m, ids, watching, losses):
    o = [torch.optim.SGD(m.blocks.parameters(), 0.1), torch.optim.Adam(m.head.parameters())]
    with watching(None, o):
        for x in ids:
            loss = F.cross_entropy(m.forward(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            for one in o:
                one.step()
                one.zero_grad()
            losses.append(loss.item())


def closure(m, ids, watching, losses):
    o = torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3)
    with watching(m, o):
        for x in ids:

            def close(x=x):
                o.zero_grad()
                loss = m(x[:, :-1], x[:, 1:])[1]
                loss.backward()
                return loss

            losses.append(o.step(close).item())


def taught(m, ids, watching, losses):
    teacher = copy.deepcopy(m).eval().requires_grad_(False)
    o = torch.optim.AdamW(m.parameters(), 1e-3)
    with watching(None, None):
        for x in ids:
            with torch.no_grad():
                aim = teacher(x).softmax(-1)
            loss = F.kl_div(m(x).log_softmax(-1), aim, reduction="batchmean")
            loss.backward()
            o.step()
            o.zero_grad()
            losses.append(loss.item())


def raising(m, ids, watching, losses):
    o = torch.optim.AdamW(m.parameters(), 1e-3)
    try:
        with watching(m, o):
            for n, x in enumerate(ids):
                loss = m(x[:, :-1], x[:, 1:])[1]
                loss.backward()
                o.step()
                losses.append(loss.item())
                if n == 1:
                    raise Stop("on purpose")
    except Stop:
        pass


def early(m, ids, watching, losses):
    """The watch is over after two of the steps."""
    plain(m, ids, lambda model, o: watching(model, o, steps=2), losses)


PROGRAMS = [plain, accumulating, scaled, low, parts, closure, taught, raising, early]
CASES = [(p, None) for p in PROGRAMS] + [(plain, True), (plain, False)]


def run(program, reentrant, watching):
    torch.manual_seed(0)
    m, losses = Net(reentrant=reentrant), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program(m, loops.batches(4), watching, losses)
    return m.state_dict(), losses, torch.get_rng_state()


@pytest.mark.parametrize("program, reentrant", CASES, ids=[f"{p.__name__}-{r}" for p, r in CASES])
def test_every_bit_is_the_same(program, reentrant):
    reports = []

    def watched(model, optimizer, steps=3):
        class Kept:
            def __enter__(self):
                self.watch = doctor.watch(model, optimizer=optimizer, steps=steps, say=False)
                reports.append(self.watch.__enter__())

            def __exit__(self, *error):
                return self.watch.__exit__(*error)

        return Kept()

    without = run(program, reentrant, lambda *a, **k: nullcontext())
    before = world()
    within = run(program, reentrant, watched)
    assert world() == before
    assert reports[0].done and not reports[0].faults, reports[0].faults
    assert reports[0].rounds == min(
        len(reports) and {accumulating: 2, raising: 2, early: 2}.get(program, 3), 4
    )
    assert without[1] == within[1]
    assert all(torch.equal(without[0][k], within[0][k]) for k in without[0])
    assert torch.equal(without[2], within[2])


def world() -> list:
    """Every attribute that the doctor may replace, and the number of global hooks."""
    optimizers = [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS]
    # torch itself replaces `step` of a class when the first of its optimizers is made
    for kind in optimizers:
        kind([nn.Parameter(torch.zeros(1))])
    optimizers.append(torch.optim.Optimizer)
    owners = [
        torch.autograd,
        torch.nn.utils,
        torch.nn.utils.clip_grad,
        LRScheduler,
        LambdaLR,
        torch.amp.GradScaler,
    ]
    owners += [CheckpointFunction, nn.Module, *optimizers]
    seen = [
        {k: id(v) for k, v in vars(o).items() if callable(v) or isinstance(v, staticmethod)}
        for o in owners
    ]
    seen += [id(warnings.warn), {k: id(v) for k, v in vars(F).items() if callable(v)}, hooks()]
    return seen


def hooks() -> int:
    places = (nn.modules.module, optimizer_module)
    return sum(
        len(v)
        for p in places
        for k, v in vars(p).items()
        if k.startswith("_global_") and hasattr(v, "__len__")
    )


def hooks_of(m: nn.Module) -> int:
    return sum(
        len(v)
        for x in m.modules()
        for k, v in vars(x).items()
        if k.endswith("hooks") or "_hooks_" in k
    )


class Factors(nn.Module):
    """What peft does to a weight that is no layer's own, such as an expert's: a parametrization for
    each call.
    """

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(32, 32)
        self.lora_A, self.lora_B = (
            nn.Parameter(torch.randn(4, 32)),
            nn.Parameter(torch.zeros(32, 4)),
        )

    def forward(self, x):
        parametrize.register_parametrization(self.base, "weight", Added(self.lora_B @ self.lora_A))
        try:
            return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


class Added(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.delta = delta

    def forward(self, weight):
        return weight + self.delta


def test_weights_that_a_call_takes_out_and_puts_back_stay_where_they_are():
    """The adapter's replay calls it on copies, which are no parameters: each came back as a buffer,
    and was lost.
    """
    seen = []
    for watching in (
        lambda *_: nullcontext(),
        lambda m, o: doctor.watch(m, optimizer=o, steps=3, say=False),
    ):
        torch.manual_seed(0)
        m = Net(dropout=0.0)
        m.blocks[0] = Factors()
        for name, p in m.named_parameters():
            p.requires_grad_("lora_" in name)
        o = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2)
        names = {name for name, _ in m.named_parameters()}
        with watching(m, o) as report:
            for x in loops.batches(4):
                m(x[:, :-1], x[:, 1:])[1].backward()
                o.step(), o.zero_grad()
        assert {name for name, _ in m.named_parameters()} == names and type(
            m.blocks[0].base
        ) is nn.Linear
        seen.append(m.state_dict())
    assert not report.faults
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


@pytest.mark.parametrize("wrong", [False, True])
def test_no_hook_is_left(wrong):
    m, before = Net(), world()
    try:
        with doctor.watch(m, say=False):
            assert hooks_of(m) > 0
            plain(m, loops.batches(1), lambda *_: nullcontext(), [])
            if wrong:
                raise Stop
    except Stop:
        pass
    assert hooks_of(m) == 0 and world() == before


def test_hooks_are_gone_when_the_steps_are_over():
    m, before = Net(), world()
    with doctor.watch(m, say=False, steps=2):
        plain(m, loops.batches(3), lambda *_: nullcontext(), [])
        assert hooks_of(m) == 0 and world()[:-1] == before[:-1]
        assert world()[-1] == before[-1] + 1, "the counter of after.py"
    assert world() == before


@pytest.mark.parametrize("order", ["inner first", "outer first"])
def test_watches_that_overlap_put_back_both(order):
    m, before = Net(), world()
    outer, inner = (
        doctor.watch(m, say=False, steps=1 if order == "outer first" else 9) for _ in range(2)
    )
    first = outer.__enter__()
    second = inner.__enter__()
    plain(m, loops.batches(2), lambda *_: nullcontext(), [])
    for one in (outer, inner) if order == "outer first" else (inner, outer):
        one.__exit__(None, None, None)
    assert world() == before and first.done and second.done and not first.faults + second.faults


@pytest.mark.parametrize("program", [plain, raising, parts, taught])
def test_the_report_keeps_nothing_alive(program):
    kept, reports = [], []

    def watching(model, optimizer):
        watch = doctor.watch(model, optimizer=optimizer, say=False)

        class Kept:
            def __enter__(self):
                reports.append(watch.__enter__())

            def __exit__(self, *error):
                return watch.__exit__(*error)

        return Kept()

    def go():
        m = Net()
        kept.extend(weakref.ref(x) for x in (m, m.head.weight))
        program(m, loops.batches(3), watching, [])

    go()
    gc.collect()
    assert reports[0].done and all(ref() is None for ref in kept)


def per_step(
    family: str, hidden: int, layers: int, vocab: int, rows: int, length: int, accumulated: int
):
    """A function that makes one training step and returns its seconds of the processor, and its
    model and optimizer.
    """
    m = loops.lm(family, hidden=hidden, layers=layers, vocab=vocab)
    ids = loops.batches(1, rows=rows, length=length)[0]
    o = torch.optim.AdamW(m.parameters(), 1e-4)

    def step() -> float:
        start = time.process_time()
        for _ in range(accumulated):
            (m(input_ids=ids, labels=ids).loss / accumulated).backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        o.step()
        o.zero_grad()
        return time.process_time() - start

    return step, m, o


SIZES = {
    "blocks": ("qwen3", 256, 4, 1024, 16, 64, 1),
    "vocabulary": ("qwen3", 64, 2, 32768, 4, 64, 1),
    "accumulation": ("gpt2", 64, 2, 256, 4, 32, 32),
}


@pytest.mark.parametrize("steps", [1, 2, 3, 6, 8])
def test_when_the_steps_are_over_no_hook_is_left_although_the_block_goes_on(steps):
    step, m, o = per_step("qwen3", 32, 2, 256, 2, 16, 1)
    with doctor.watch(m, optimizer=o, say=False, steps=steps) as report:
        for _ in range(steps):
            assert not report.done
            step()
        step()
        assert report.done and hooks_of(m) == 0
        step()
    assert hooks_of(m) == 0


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_cost(size):
    """Less than twice the time while watched (2.5 here: cores are shared), nothing after it, next
    to no memory.

    The middle of the steps is compared, by the processor's time, so that other processes decide
    nothing.
    """
    step, m, o = per_step(*SIZES[size])
    step()
    bare = [step() for _ in range(4)]
    before = held()
    with doctor.watch(m, optimizer=o, say=False, steps=6) as report:
        watched = [step() for _ in range(6)]
        during = held()
        step()
        assert report.done and hooks_of(m) == 0
        after = [step() for _ in range(4)]
    bare += [step() for _ in range(4)]
    usual, one, late = (sorted(times)[len(times) // 2] for times in (bare, watched, after))
    told = f"watched {one / usual:.2f}x (first step {watched[0] / usual:.2f}x), after {late / usual:.2f}x"
    print(
        f"\n{size}: step {usual * 1e3:.0f} ms, {told}, {(during - before) / 2**20:.1f} MiB held",
        os.getloadavg(),
    )
    assert one < 2.5 * usual + 0.05
    assert during - before < 16 * 2**20


def held() -> int:
    """Bytes of all tensors that Python knows, without a collection: what only that frees was held
    until then.
    """
    found = (
        x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and type(x.numel()) is int
    )
    return sum(x.numel() * x.element_size() for x in found)
