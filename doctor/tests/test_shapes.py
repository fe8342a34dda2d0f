"""Loops of every shape are seen as what they are: so many calls, backwards and steps, and who is model and who teacher.

Footgun: a check that says OK proves nothing about what was seen. So these tests read the evidence itself.
"""

import copy
import math
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import train_doctor as doctor
from tests import bench
from train_doctor import checks
from train_doctor.evidence import Backward, Call, Entropy, Evidence, Gradients, ScalerStep, Schedule, Step, Unscale

N = 3


@pytest.fixture
def seen(monkeypatch):
    """The evidences that were examined, in order."""
    evidences: list[Evidence] = []
    real = checks.examine
    monkeypatch.setattr(checks, "examine", lambda e: (evidences.append(e), real(e))[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield evidences


def count(e: Evidence) -> dict:
    roles = {role: len(e.of(Call, role=role)) for role in ("model", "teacher")}
    return {"backwards": len(e.of(Backward)), "steps": len(e.of(Step)), **roles}


def expect(e: Evidence, **numbers):
    assert not e.faults, e.faults
    wanted = {"backwards": N, "steps": N, "model": N, "teacher": 0} | numbers
    assert count(e) == wanted
    assert len(e.models) == 1 and e.trainable()
    assert all(b.requires_grad and b.value is not None and b.norm for b in e.of(Backward))
    assert all(s.updates and s.norm for s in e.of(Step))
    for call in e.forwards:
        assert call.ids is not None and call.vocabulary == 256 and call.requires_grad and call.finite


class Hand(nn.Module):
    """A model as people write them: `how` is what it returns."""

    def __init__(self, how: str = "logits", dropout: float = 0.0):
        super().__init__()
        self.how = how
        self.wte, self.drop, self.lm_head = nn.Embedding(256, 32), nn.Dropout(dropout), nn.Linear(32, 256, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(2))

    def forward(self, idx, targets=None):
        h = self.drop(self.wte(idx))
        for block in self.blocks:
            h = h + block(h)
        logits = self.lm_head(h)
        if self.how == "logits":
            return logits
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return (logits, loss) if self.how == "pair" else {"loss": loss, "logits": logits}


def ce(logits, x):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())


def train(losses, optimizers, *, clip=None, every=1):
    """The usual loop over losses that are made one by one."""
    for n, loss in enumerate(losses):
        (loss / every).backward()
        if (n + 1) % every == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(clip, 1.0)
            for o in optimizers:
                o.step()
            for o in optimizers:
                o.zero_grad()


def adam(m):
    return torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-3)


def by_parts(m, x):
    h = m.wte(x)
    for block in m.blocks:
        h = h + block(h)
    return m.lm_head(h)


HAND = {
    "logits": ("logits", lambda m, x: ce(m(x), x)),
    "pair": ("pair", lambda m, x: m(x[:, :-1], x[:, 1:])[1]),
    "dict": ("dict", lambda m, x: m(idx=x[:, :-1], targets=x[:, 1:])["loss"]),
    "forward": ("logits", lambda m, x: ce(m.forward(x), x)),
    "parts": ("logits", lambda m, x: ce(by_parts(m, x), x)),
    "module loss": ("logits", lambda m, x: nn.CrossEntropyLoss()(m(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())),
    "log_softmax": ("logits", lambda m, x: -m(x)[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None]).mean()),
}


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("how", HAND)
def test_hand_written(seen, how, declared):
    kind, loss = HAND[how]
    m = Hand(kind)
    o = adam(m)
    with doctor.watch(m if declared else None, optimizer=o if declared else None, say=False):
        train((loss(m, x) for x in bench.batches(N)), [o])
    expect(seen[0])
    assert seen[0].model is m and seen[0].optimizers[0].ids == {id(p) for p in m.parameters()}
    assert len(seen[0].of(Entropy)) == (0 if how == "log_softmax" else N)
    assert seen[0].embedding() is m.wte.weight and seen[0].head() is m.lm_head.weight


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "mixtral", "qwen3_moe"])
def test_transformers(seen, family, declared):
    m = bench.lm(family, hidden=32)
    with doctor.watch(m if declared else None, say=False):
        train((m(input_ids=x, labels=x).loss for x in bench.batches(N)), [adam(m)], clip=m.parameters())
    expect(seen[0])
    assert all(c.labels is not None for c in seen[0].forwards)


def test_backbone_and_head_apart(seen):
    m = bench.lm(hidden=32)
    with doctor.watch(m, say=False):
        train((ce(m.lm_head(m.model(input_ids=x).last_hidden_state), x) for x in bench.batches(N)), [adam(m)])
    expect(seen[0])


def test_evaluated_whole_first_then_trained_by_its_parts(seen):
    """The backbone and a module attached to the model are two roots; what holds both was no teacher."""
    m = bench.lm(hidden=32)
    m.temperature = torch.nn.Linear(1, 1)
    with doctor.watch(say=False):
        with torch.no_grad():
            m(input_ids=next(iter(bench.batches(1))))

        def loss(x):
            scale = m.temperature(torch.ones(1)).exp()
            return ce(m.lm_head(m.model(input_ids=x).last_hidden_state) / scale, x)

        train((loss(x) for x in bench.batches(N)), [adam(m)])
    expect(seen[0], model=N + 1)  # the question before training, too
    assert seen[0].model is m and not seen[0].teachers


@pytest.mark.parametrize("declared", ["base", "peft", "nothing", "wrapped inside"])
def test_peft(seen, declared):
    import peft

    base = bench.lm(hidden=32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    m = None if declared == "wrapped inside" else peft.get_peft_model(base, config)
    with doctor.watch({"peft": m, "nothing": None}.get(declared, base), say=False):
        m = m or peft.get_peft_model(base, config)
        train((m(input_ids=x, labels=x).loss for x in bench.batches(N)), [adam(m)])
    expect(seen[0])


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_distillation(seen, frozen, declared):
    m, teacher = bench.lm(hidden=32), bench.lm(hidden=32).eval().requires_grad_(not frozen)
    named = {"model": m, "teacher": teacher} if declared else {}

    def loss(x):
        with torch.set_grad_enabled(not frozen):  # a teacher with gradients is wrong, and still a teacher
            aim = teacher(input_ids=x).logits.softmax(-1)
        return F.kl_div(m(input_ids=x).logits.log_softmax(-1), aim, reduction="none").sum(-1).mean()

    with doctor.watch(**named, say=False):
        train((loss(x) for x in bench.batches(N)), [adam(m)])
    expect(seen[0], teacher=N)
    assert seen[0].model is m and seen[0].teachers == [teacher]


@pytest.mark.parametrize("declared", [True, False])
def test_dpo(seen, declared):
    m, reference = bench.lm(hidden=32), bench.lm(hidden=32).eval().requires_grad_(False)
    named = {"model": m, "teacher": reference} if declared else {}

    def score(model, x):
        return model(input_ids=x).logits[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None]).sum((1, 2))

    def loss(x, y):
        with torch.no_grad():
            aim = score(reference, x) - score(reference, y)
        return -F.logsigmoid(0.1 * (score(m, x) - score(m, y) - aim)).mean()

    with doctor.watch(**named, say=False):
        train((loss(x, x.flip(0)) for x in bench.batches(N)), [adam(m)])
    expect(seen[0], model=2 * N, teacher=2 * N)


@pytest.mark.parametrize("declared", [True, False])
def test_evaluated_before_it_trains(seen, declared):
    m = Hand()
    with doctor.watch(m if declared else None, say=False):
        with torch.no_grad():
            m.eval()(bench.batches(1)[0])
        m.train()
        train((ce(m(x), x) for x in bench.batches(N)), [adam(m)])
    assert seen[0].model is m and not seen[0].teachers and len(seen[0].forwards) == N
    assert count(seen[0])["steps"] == N


def test_several_optimizers_scaler_schedule_and_accumulation(seen):
    m = Hand("pair")
    o = [torch.optim.SGD(m.blocks.parameters(), 0.1), torch.optim.Adam([m.wte.weight, m.lm_head.weight])]
    scaler, schedule = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.lr_scheduler.StepLR(o[0], 2)
    with doctor.watch(say=False):
        for n, x in enumerate(bench.batches(2 * N)):
            scaler.scale(m(x[:, :-1], x[:, 1:])[1] / 2).backward()
            if n % 2:
                for one in o:
                    scaler.unscale_(one)
                    scaler.step(one)
                scaler.update()
                schedule.step()
                for one in o:
                    one.zero_grad()
    e = seen[0]
    expect(e, backwards=2 * N, model=2 * N, steps=2 * N)
    assert {b.round for b in e.of(Backward)} == set(range(N)) == {g.round for g in e.of(Gradients)}
    assert all(b.scale == 8.0 and b.value < math.log(256) for b in e.of(Backward))
    assert [len(e.of(k)) for k in (Unscale, ScalerStep, Schedule)] == [2 * N, 2 * N, N]
    assert all(s.backwards == 2 for s in e.of(Step))


def test_value_head_and_loss_with_parameters(seen):
    m, value, weigh = Hand(), nn.Linear(256, 1), nn.Linear(1, 1)
    o = torch.optim.AdamW([*m.parameters(), *value.parameters(), *weigh.parameters()])

    def loss(x):
        logits = m(x)
        return weigh(ce(logits, x)[None])[0].abs() + value(logits).square().mean()

    with doctor.watch(m, optimizer=o, say=False):
        train((loss(x) for x in bench.batches(N)), [o])
    e = seen[0]
    assert not e.faults and e.models[0] is m and not e.teachers and len(e.forwards) >= N
    assert {id(p) for x in (m, value, weigh) for p in x.parameters()} == {id(p) for p in e.parameters().values()}


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adam])
def test_closure(seen, kind):
    m = Hand()
    o = kind(m.parameters(), lr=0.01, **({"max_iter": 2} if kind is torch.optim.LBFGS else {}))
    with doctor.watch(m, say=False):
        for x in bench.batches(N):

            def closure(x=x):
                o.zero_grad()
                loss = ce(m(x), x)
                loss.backward()
                return loss

            o.step(closure)
    e = seen[0]
    assert not e.faults and len(e.of(Step)) == N == e.rounds and all(s.updates for s in e.of(Step))
    assert {s.round for s in e.of(Step)} == set(range(N)) == {b.round for b in e.of(Backward)}


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(seen, reentrant, declared):
    m = Hand(dropout=0.1)
    for block in m.blocks:
        block.forward = lambda h, f=block.forward: checkpoint(f, h, use_reentrant=reentrant)
    with doctor.watch(m if declared else None, say=False):
        train((ce(m(x), x) for x in bench.batches(N)), [adam(m)])
    expect(seen[0])
    assert seen[0].regions == (2 * N if reentrant else 0) and not seen[0].cut_regions


@pytest.mark.parametrize("how", ["before", "before, not declared", "inside", "in place", "blocks", "warm"])
def test_compiled(seen, how):
    torch._dynamo.reset()
    m, options = Hand(), {"backend": "aot_eager", "fullgraph": True}
    call = torch.compile(m, **options) if how in ("before", "before, not declared", "warm") else m
    if how == "in place":
        m.compile(**options)
    if how == "blocks":
        m.blocks = nn.ModuleList(torch.compile(b, **options) for b in m.blocks)
    if how == "warm":
        ce(call(bench.batches(1)[0]), bench.batches(1)[0]).backward()
        m.zero_grad()
    with doctor.watch(None if how == "before, not declared" else call, say=False) as report:
        if how == "inside":
            call = torch.compile(m, **options)
        train((ce(call(x), x) for x in bench.batches(N)), [adam(m)])
    e = seen[0]
    assert not e.faults and count(e) == {"backwards": N, "steps": N, "model": N, "teacher": 0}
    assert e.models == [m] and report.verdicts["S1"].state == "OK"
    assert bool(e.opaque) == (how != "blocks")


def test_interrupted(seen):
    m = Hand()

    def steps():
        with doctor.watch(m, say=False) as report:
            yield report
            for n, x in enumerate(bench.batches(9)):
                train([ce(m(x), x)], [adam(m)])
                if n == N - 1:
                    raise KeyboardInterrupt
                yield

    going = steps()
    report = next(going)
    with pytest.raises(KeyboardInterrupt):
        list(going)
    assert report.done and report.rounds == N and isinstance(report.exception, KeyboardInterrupt)
    closed = steps()
    report = next(closed)
    closed.close()
    assert report.done and "nothing" in str(report) or "GeneratorExit" in str(report)


def test_nested_then_again_then_in_a_thread(seen):
    m = Hand()
    o = adam(m)

    def go(steps=9):
        with doctor.watch(m, steps=steps, say=False):
            train((ce(m(x), x) for x in bench.batches(N)), [o])

    with doctor.watch(say=False):
        go()
    go(steps=1)
    go()
    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    assert len(seen) == 5 and [e.rounds for e in seen] == [N, N, 1, N, N]
    for e in (*seen[:2], *seen[3:]):
        expect(e)


DDP = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import train_doctor as doctor
from train_doctor import checks
from tests.test_shapes import Hand, adam, bench, ce, count, train

def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    real = checks.examine
    for declared in (True, False):
        seen, m = [], Hand()
        checks.examine = lambda e: (seen.append(e), real(e))[1]
        ddp = torch.nn.parallel.DistributedDataParallel(m)
        with doctor.watch(ddp if declared else None, say=False):
            train((ce(ddp(x), x) for x in bench.batches(3, seed=rank)), [adam(m)])
        e = seen[0]
        assert not e.faults and count(e) == {"backwards": 3, "steps": 3, "model": 3, "teacher": 0}, count(e)
        assert e.models == [m] and e.wrappers == [ddp] and id(m.wte) in e.called
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    (tmp_path / "ddp.py").write_text(DDP)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "ddp.py"), str(tmp_path)], capture_output=True, text=True, env=bench.ELSEWHERE
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_frozen_model_is_the_model(seen):
    m = copy.deepcopy(Hand()).requires_grad_(False)
    with pytest.raises(RuntimeError), doctor.watch(say=False) as report:
        train((ce(m(x), x) for x in bench.batches(N)), [])
    assert report.root.check == "S1" and seen[0].model is m
