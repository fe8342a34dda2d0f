"""A watch never breaks a run, however odd the loop: same losses, weights and generators, and watching has no fault.

What a program returns, raises or leaves behind must be the same with a watch around it and without. Whether the doctor
understands what it sees is another matter; that the report has no `faults` is asked, that it knows the model is not.

Footgun: the programs run twice in one process. What they register globally must be gone after the first time.
"""

import copy
import gc
import io
import pickle
import warnings
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jvp, vmap
from torch.nn import functional as F

import train_doctor as doctor
from tests import bench


class Net(nn.Module):
    """`out` is what it returns."""

    def __init__(self, out="logits", sparse=False):
        super().__init__()
        self.out, self.table = out, nn.Embedding(256, 32, sparse=sparse)
        self.body = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(32, 256)

    def forward(self, idx):
        logits = self.head(self.body(self.table(idx)))
        if self.out == "logits":
            return logits
        self.kept = logits
        made = {"none": None, "text": "nothing to see", "pair": (ce(logits, idx), {3: [logits]})}
        return made[self.out] if self.out in made else (x for x in [logits])


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.mix = nn.Parameter(torch.randn(16, 16, dtype=torch.cfloat) * 0.1)

    def forward(self, idx):
        return self.head((self.table(idx).to(torch.cfloat) @ self.mix).abs())


class Scriptable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)

    def forward(self, idx):
        return self.head(self.table(idx))


class Plain(torch.optim.Optimizer):
    """An optimizer without a learning rate."""

    def __init__(self, ps):
        super().__init__(ps, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p -= 0.01 * p.grad


def ce(logits, x):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def of_logits(m, x):
    return ce(m(x), x)


def loop(m, ids, losses, *, o=None, loss_of=of_logits, back=torch.Tensor.backward, each=None):
    o = o or torch.optim.AdamW(m.parameters(), 1e-3)
    for n, x in enumerate(ids):
        loss = loss_of(m, x)
        back(loss)
        o.step()
        o.zero_grad()
        losses.append(loss.detach().clone())
        if each is not None:
            each(n, m, o)


# ------------------------------------------------------------------------------------------------ backward
def retained(m, ids, watching, losses):
    with watching(m):
        loop(m, ids, losses, back=lambda loss: (loss.backward(retain_graph=True), loss.backward()))


def given_a_gradient(m, ids, watching, losses):
    def each_token(m, x):
        return F.cross_entropy(m(x).flatten(0, 1), x.flatten(), reduction="none")

    with watching(m):
        loop(m, ids, losses, loss_of=each_token, back=lambda loss: loss.backward(torch.full_like(loss, 0.5)))


def two_losses(m, ids, watching, losses):
    with watching(m):
        loop(m, ids, losses, back=lambda loss: torch.autograd.backward([loss, m.head.weight.square().sum()]))


def twice_differentiated(m, ids, watching, losses):
    def penalised(m, x):
        loss = of_logits(m, x)
        found = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
        return loss + 0.1 * sum(g.square().sum() for g in found)

    with watching(m):
        loop(m, ids, losses, loss_of=penalised)


def by_hand(m, ids, watching, losses):
    with watching(m):
        for x in ids:
            loss = of_logits(m, x)
            with torch.no_grad():
                for p, g in zip(m.parameters(), torch.autograd.grad(loss, list(m.parameters()))):
                    p -= 0.1 * g
            losses.append(loss.detach())


def nothing_to_differentiate(m, ids, watching, losses):
    with watching(m):
        for what in (3.0, torch.ones(2)):
            with pytest.raises((RuntimeError, AttributeError, TypeError)):
                torch.autograd.backward(what)
        loop(m, ids, losses)


def fails_on_the_way(m, ids, watching, losses):
    with watching(m):
        for x in ids:
            loss = of_logits(m, x)
            loss.backward()
            for wrong in (loss.backward, lambda: m("no ids")):
                with pytest.raises((RuntimeError, TypeError)):
                    wrong()
        loop(m, ids, losses)


# ------------------------------------------------------------------------------------------------ models
@pytest.mark.parametrize("out", ["none", "text", "generator", "pair"])
def test_what_a_model_returns(out):
    def program(m, ids, watching, losses):
        def loss_of(m, x):
            made = m(x)
            return made[0] if out == "pair" else ce(m.kept, x)

        m.out = out
        with watching(None):
            loop(m, ids, losses, loss_of=loss_of)

    same(program)


def empty_batches(m, ids, watching, losses):
    with watching(m):
        loop(m, [ids[0][:0], *ids], losses, loss_of=lambda m, x: m(x).square().sum())


def empty_batches_scored_by_hand(m, ids, watching, losses):
    def scored(m, x):
        return -m(x)[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None]).sum()

    with watching(m):
        loop(m, [ids[0][:0], *ids], losses, loss_of=scored)


def rows_of_ids(m, ids, watching, losses):
    with watching(m):
        loop(m, [x[0] for x in ids], losses, loss_of=lambda m, x: F.cross_entropy(m(x)[:-1], x[1:]))


def nested(m, ids, watching, losses):
    def ragged(m, x):
        rows = torch.nested.nested_tensor([x[0], x[1, :20]], layout=torch.jagged)
        return m(rows).values().square().mean()

    with watching(m):
        loop(m, ids, losses, loss_of=ragged)


def on_meta(m, ids, watching, losses):
    with watching(m.to("meta")):
        loop(m, [x.to("meta") for x in ids], [])


def part_on_meta(m, ids, watching, losses):
    m.extra = nn.Linear(3, 3, device="meta")
    with watching(m):
        loop(m, ids, losses, o=torch.optim.SGD([p for p in m.parameters() if not p.is_meta], 0.1))


def of_other_numbers(m, ids, watching, losses):
    m.small = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    m.eight = nn.Parameter(torch.ones(8, 8).to(torch.float8_e4m3fn), requires_grad=False)
    m.none, m.one = nn.Parameter(torch.zeros(0, 8)), nn.Parameter(torch.tensor(1.0))
    with watching(m):
        loop(m, ids, losses, o=torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1))


def double(m, ids, watching, losses):
    with watching(m.double()):
        loop(m, ids, losses)


def complex_numbers(m, ids, watching, losses):
    with watching(None):
        loop(Complex(), ids, losses)


def changes(m, ids, watching, losses):
    """New groups, new tables, layers gone."""

    def each(n, m, o):
        if n == 0:
            m.late = nn.Linear(4, 4)
            o.add_param_group({"params": list(m.late.parameters())})
            m.table = nn.Embedding(300, 32)
        elif n == 1:
            del m.body[2]

    with watching(None):
        loop(m, ids, losses, each=each)


def lazy(m, ids, watching, losses):
    m.body[0] = nn.LazyLinear(32)
    with watching(m):
        m(ids[0])
        loop(m, ids, losses)


def parallel(m, ids, watching, losses):
    m = nn.DataParallel(m)
    with watching(m):
        loop(m, ids, losses)


def scripted(m, ids, watching, losses):
    given, found = torch.jit.script(Scriptable()), torch.jit.script(Scriptable())
    with watching(given):
        loop(given, ids, losses)
        loop(found, ids, losses)


def scripted_part(m, ids, watching, losses):
    m.head = torch.jit.script(m.head)
    with watching(None):
        loop(m, ids, losses)


def traced(m, ids, watching, losses):
    with watching(m):
        torch.jit.trace(m.eval(), ids[0])
        loop(m.train(), ids, losses)


def transformed(m, ids, watching, losses):
    """torch.func: tensors inside have no numbers."""
    m.eval()
    ps = {k: p.detach().clone() for k, p in m.named_parameters()}
    with watching(m):
        for x in ids:
            found, value = grad_and_value(lambda ps, x=x: ce(functional_call(m, ps, (x,)), x))(ps)
            one = grad(lambda ps, x: ce(functional_call(m, ps, (x[None],)), x[None]))
            every = vmap(one, in_dims=(None, 0))(ps, x)
            h = m.table(x).detach()
            along = jvp(lambda h: m.head(m.body(h)), (h,), (torch.ones_like(h),))[1]
            ps = {k: p - 0.1 * found[k] for k, p in ps.items()}
            losses += [value.detach(), every["head.bias"].sum(), along.detach().sum()]
        loop(m.train(), ids, losses)


def gone_inside(m, ids, watching, losses):
    with watching(None):
        for _ in range(2):
            loop(Net(), ids, losses)
            gc.collect()


def indexed_by_numpy(m, ids, watching, losses):
    """Boxes and times that look like those of other programs, taken by an array."""
    rows, boxes = np.arange(32), torch.rand(32, 4, generator=torch.Generator().manual_seed(1))
    times = torch.rand(32, 9, generator=torch.Generator().manual_seed(2)).cumsum(1)

    def taken(m, x):
        return (m(x).mean() - boxes[rows, 2] + boxes[rows, 0] - times[rows, 1] - times[rows, 0]).square().mean()

    with watching(m):
        loop(m, ids, losses, loss_of=taken)


def let_go(m, ids, watching, losses):
    """Of what goes through many frozen layers most is gone before the backward: the memory is the program's."""
    frozen = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(64)).requires_grad_(False)

    def through(m, x):
        h, seen = x[:, :24].float(), []
        for layer in frozen:
            h = layer(h)
            seen.append(weakref.ref(h))
        more = h.mean()
        del h
        losses.append(torch.tensor(float(sum(one() is not None for one in seen) < 32)))
        return m(x).square().mean() + more

    with watching(m):
        loop(m, ids, losses, loss_of=through)


# ------------------------------------------------------------------------------------------------ copies
def copied(m, ids, watching, losses):
    """Copies and files carry no hooks of ours."""

    def each(n, m, o):
        file = io.BytesIO()
        torch.save({"model": m, "optimizer": o}, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)["model"]
        for other in (read, copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
            assert not any(v for x in other.modules() for k, v in vars(x).items() if k.endswith("_hooks"))
            losses.append(other.eval()(ids[0]).sum().detach())
        m.train()

    with watching(m):
        loop(m, ids, losses, each=each)


def passes_on(module, args, output):
    return output


def copied_with_a_handle(m, ids, watching, losses):
    """A handle that is kept leads to all hooks of its module, and from ours to the doctor."""
    m.handles = [m.table.register_forward_hook(passes_on)]

    def each(n, m, o):
        for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
            losses.append(other.eval()(ids[0]).sum().detach())
        m.train()

    with watching(m):
        loop(m, ids, losses, each=each)


def averaged(m, ids, watching, losses):
    with watching(None):
        mean = torch.optim.swa_utils.AveragedModel(m)
        loop(m, ids, losses, each=lambda n, m, o: (mean.update_parameters(m), losses.append(mean(ids[0]).sum())))


# ------------------------------------------------------------------------------------------------ optimizers
def sparse(m, ids, watching, losses):
    m = Net(sparse=True)
    one = torch.optim.SparseAdam(m.table.parameters())
    two = torch.optim.Adam([*m.body.parameters(), *m.head.parameters()])
    with watching(m):
        loop(m, ids, losses, o=one, back=lambda loss: (two.zero_grad(), loss.backward(), two.step()))


def without_rates(m, ids, watching, losses):
    o = Plain([*m.table.parameters(), *m.body.parameters()])
    o.add_param_group({"params": list(m.head.parameters()), "lr": None})
    with watching(m):
        loop(m, ids, losses, o=o)


def rate_as_tensor(m, ids, watching, losses):
    with watching(m):
        loop(m, ids, losses, o=torch.optim.Adam(m.parameters(), torch.tensor(1e-3)))


PROGRAMS = [
    v for v in list(globals().values()) if getattr(v, "__code__", None) and "watching" in v.__code__.co_varnames
]


def run(program, watching):
    torch.manual_seed(0)
    m, losses = Net(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program(m, bench.batches(4), watching, losses)
    return losses, [p for p in m.state_dict().values() if not p.is_meta], torch.get_rng_state()


def same(program):
    reports = []

    class Kept:
        def __init__(self, model):
            self.watch = doctor.watch(model, steps=3, say=False)

        def __enter__(self):
            reports.append(self.watch.__enter__())

        def __exit__(self, *error):
            return self.watch.__exit__(*error)

    without, within = run(program, lambda model: nullcontext()), run(program, Kept)
    for kind in (0, 1):
        assert len(without[kind]) == len(within[kind])
        assert all(torch.equal(a, b) for a, b in zip(without[kind], within[kind]))
    assert torch.equal(without[2], within[2])
    assert reports[0].done and not reports[0].faults, reports[0].faults
    return reports[0]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_run_is_never_broken(program):
    same(program)


@pytest.mark.parametrize("program", [sparse, without_rates, double, complex_numbers])
def test_and_unusual_is_not_wrong(program):
    assert same(program).root is None
