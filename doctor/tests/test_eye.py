"""The eye leaves no trace: the program's own modes, its fast paths, its workers, and the stack of modes after it."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

import train_doctor as doctor
from train_doctor.attach import Attachments
from train_doctor.evidence import Evidence
from train_doctor.eye import Eye, Known, Watcher
from train_doctor.watchers import aims


def depth() -> int:
    return torch._C._len_torch_function_stack()


def loop(model, optimizer, steps: int = 8, around=lambda n: None, inside=lambda n: None, data=None):
    losses = []
    for n in range(steps):
        x = torch.randn(8, 4) if data is None else data()
        around(n)
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        inside(n)
        optimizer.step()
        losses.append(loss.item())
    return losses


def small():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), 0.1)


class Counting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_it_is_on_from_the_first_step_to_the_fourth():
    seen = []
    with doctor.watch(say=False) as report:
        loop(*small(), around=lambda n: seen.append(depth()), inside=lambda n: seen.append(depth()))
    assert seen == [0, 0] + [1, 1] * 3 + [0, 0] * 4 and not report.faults


@pytest.mark.parametrize("steps", (1, 2, 3, 4, 10))
def test_nothing_is_on_the_stack_afterwards(steps):
    with doctor.watch(say=False, steps=steps):
        loop(*small())
        assert depth() == 0
    assert depth() == 0


def test_nothing_is_on_the_stack_after_an_exception():
    class Stop(Exception):
        pass

    def stop(n):
        if n == 2:
            assert depth() == 1
            raise Stop

    before = torch.overrides.has_torch_function
    with pytest.raises(Stop), doctor.watch(say=False):
        loop(*small(), inside=stop)
    assert depth() == 0 and torch.overrides.has_torch_function is before


def test_a_watch_that_ends_in_the_middle_of_a_backward():
    model, optimizer = small()
    with doctor.watch(model, say=False, steps=1) as report:
        for _ in range(300):  # it gives up after 256
            F.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 4)).backward()
    assert report.done and depth() == 0


def test_modes_of_the_program_keep_their_place():
    mine, opened = Counting(), []

    def around(n):
        if n == 2:
            mine.__enter__()
            assert depth() == 2
        if n == 6:
            assert depth() == 1
            mine.__exit__(None, None, None)
        opened.append(depth())

    with doctor.watch(say=False) as report:
        loop(*small(), around=around)
    assert opened == [0, 1, 2, 2, 1, 1, 0, 0] and not report.faults
    alone = Counting()
    loop(*small(), around=lambda n: alone.__enter__() if n == 2 else n == 6 and alone.__exit__(None, None, None))
    ours = [name for name in mine.names if name in ("linear", "mse_loss", "backward")]
    assert ours == [name for name in alone.names if name in ("linear", "mse_loss", "backward")]


def test_a_default_device_that_comes_and_goes():
    seen = []

    def inside(n):
        with torch.device("cpu"):
            seen.append(depth())

    with doctor.watch(say=False) as report:
        loop(*small(), inside=inside)
    with torch.device("cpu"), doctor.watch(say=False):
        loop(*small())
    assert seen == [1, 2, 2, 2, 1, 1, 1, 1] and not report.faults and depth() == 0


def test_the_fast_path_of_a_transformer_has_the_same_bits():
    def run(watched: bool):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        teacher = nn.TransformerEncoder(layer, 2).eval()
        model = nn.Linear(16, 16)
        optimizer, answers = torch.optim.SGD(model.parameters(), 0.1), []

        def train():
            for _ in range(6):
                x = torch.randn(3, 5, 16)
                with torch.no_grad():
                    aim = teacher(x)
                optimizer.zero_grad()
                F.mse_loss(model(x), aim).backward()
                optimizer.step()
                answers.append(aim)

        if watched:
            with doctor.watch(model, say=False) as report:
                train()
            assert not report.faults, report.faults
        else:
            train()
        return answers, model.weight.detach()

    (plain, weight), (watched, other) = run(False), run(True)
    assert all(map(torch.equal, plain, watched)) and torch.equal(weight, other)


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, n):
        return torch.full((4,), float(depth()))


@pytest.mark.slow
def test_workers_that_load_data_are_not_watched():
    depths = []

    def data():
        batch = next(iter(DataLoader(Rows(), batch_size=8, num_workers=1)))
        depths.append(batch.max().item())
        return torch.randn(8, 4)

    with doctor.watch(say=False) as report:
        loop(*small(), data=data, steps=5)
    assert depths == [0.0] * 5 and not report.faults


def test_what_was_compiled_is_not_compiled_anew():
    pytest.importorskip("torch._dynamo")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend)
    double(torch.zeros(8, 4))
    seen = []
    try:
        with doctor.watch(say=False) as report:
            loop(*small(), around=lambda n: seen.append(depth()), data=lambda: double(torch.randn(8, 4)))
    finally:
        torch._dynamo.reset()
    assert len(graphs) == 1 and set(seen) == {0} and not report.faults


def test_what_is_compiled_meanwhile_has_the_same_numbers():
    double = torch.compile(lambda x: (2 * x).relu() + 1, backend="eager", fullgraph=True)

    def data():
        x = torch.randn(8, 4)
        if depth():
            assert torch.equal(double(x), (2 * x).relu() + 1)
        return x

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with doctor.watch(say=False) as report:
            loop(*small(), data=data)
    finally:
        torch._dynamo.reset()
    assert not report.faults and depth() == 0


def test_nothing_is_kept_alive():
    refs = []

    def data():
        x = torch.rand(8, 4)
        y = x + torch.randn_like(x)
        refs.extend([weakref.ref(x), weakref.ref(y)])
        return y

    with doctor.watch(say=False):
        loop(*small(), data=data)
        gc.collect()
        assert not any(ref() is not None for ref in refs)


def test_what_is_known_goes_with_the_tensor():
    gone = []
    eye = Eye(Attachments(Evidence()))
    first, second = Watcher(eye), Watcher(eye)
    known, x = Known(second, gone.append), torch.zeros(2)
    known.put(x, "first")
    known.put(x, "second")
    assert known.get(x) == "second" and known.get(torch.zeros(2)) is None
    del x
    gc.collect()
    assert not known.by_id and gone == ["second"] and not eye.marks
    assert first.bit != second.bit and Evidence().shown == set()


def test_who_is_told_of_a_call():
    """Those that begin with it; of the rest those that know something of what is given; all, where nothing is given."""
    eye = Eye(Attachments(Evidence()))

    class Begins(Watcher):
        names, begins = {"mul", "add"}, {"mul"}

    class Between(Watcher):
        begins, between = frozenset(), True

    one, two, every = Begins(eye), Between(eye), Watcher(eye)
    eye.start([one, two, every])
    x = torch.zeros(2)
    Known(one).put(x, True)
    assert eye._asked("mul", 0) == [one, two, every] and eye._asked("add", 0) == [two, every]
    eye.forward = True
    assert eye._asked("mul", 0) == [one, every] and eye._asked("add", 0) == [every]
    assert eye._asked("add", eye.marks[id(x)]) == [one, every] and eye._asked("sub", -1) == [two, every]


def test_tensors_of_other_kinds_are_passed_over():
    def data():
        x = torch.randn(8, 4)
        nested = torch.nested.nested_tensor([x[:3], x[3:]])
        (nested + nested).unbind()
        (x.to_sparse() * 2.0).to_dense()
        torch.empty(3, device="meta") * 2
        return x

    with doctor.watch(say=False) as report:
        loop(*small(), data=data)
    assert not report.faults, report.faults


def test_a_watcher_that_fails_does_not_shut_the_eye_for_the_others(monkeypatch):
    from train_doctor.watchers import ALL, Scales

    def broken(self, op):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Scales, "saw", broken)
    seen = []
    last = ALL[-1]
    monkeypatch.setattr(last, "names", None)
    monkeypatch.setattr(last, "begins", None)
    monkeypatch.setattr(last, "saw", lambda self, op: seen.append((self.eye.turn, op.name)))
    with doctor.watch(say=False) as report:
        loop(*small())
    assert len(report.faults) == 1 and report.faults[0].startswith("Scales") and "a fault of ours" in report.faults[0]
    first = seen.index(next(one for one in seen if one[1] == "linear"))
    assert "mse_loss" in [name for n, name in seen[first:] if n == seen[first][0]], "the rest of the step at fault"


def test_a_fault_in_what_is_heard_of_a_gradient_does_not_end_the_backward(monkeypatch):
    def weights(fails: bool):
        def fail(*_):
            raise RuntimeError("a fault of ours")

        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with monkeypatch.context() as patched, doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
            if fails:
                patched.setattr(aims, "_gain", fail)
            for _ in range(6):
                optimizer.zero_grad()
                (model(torch.randn(32, 4)) - torch.randn(32, 1)).pow(2).mean().backward()
                optimizer.step()
        return model.weight.detach().clone(), report

    (plain, healthy), (watched, report) = weights(False), weights(True)
    assert torch.equal(plain, watched) and not healthy.faults
    assert len(report.faults) == 1 and report.faults[0].startswith("Aims") and "a fault of ours" in report.faults[0]


def test_a_watcher_that_is_gone_does_not_break_what_it_patched(monkeypatch):
    from train_doctor.watchers import Entropies, Likelihoods, Scored

    def broken(self, op):
        raise RuntimeError("a fault of ours")

    for watcher in (Entropies, Likelihoods, Scored):
        monkeypatch.setattr(watcher, "saw", broken)
        monkeypatch.setattr(watcher, "begins", None)
    model, optimizer = small()
    with doctor.watch(say=False) as report:
        for _ in range(8):
            policy = torch.distributions.Categorical(logits=model(torch.randn(8, 4)))
            optimizer.zero_grad()
            (-policy.log_prob(policy.sample()).mean() - 0.01 * policy.entropy().mean()).backward()
            optimizer.step()
    assert len(report.faults) == 3 and report.done


@pytest.mark.parametrize("first", [0, 1])
def test_two_watches_that_end_in_any_order_leave_distributions_whole(first):
    before = [torch.distributions.Normal.log_prob, torch.distributions.Categorical.sample]
    watches = [doctor.watch(say=False), doctor.watch(say=False)]
    for watch in watches:
        watch.__enter__()
    policy = torch.distributions.Categorical(logits=torch.zeros(4))
    watches.pop(first).__exit__(None, None, None)
    gc.collect()
    policy.log_prob(policy.sample()) + policy.entropy()
    watches.pop().__exit__(None, None, None)
    policy.log_prob(policy.sample()) + policy.entropy()
    assert before == [torch.distributions.Normal.log_prob, torch.distributions.Categorical.sample]


def test_a_distribution_that_can_be_compared_has_no_hash():
    class Compared(torch.distributions.Categorical):
        def __eq__(self, other):
            return bool(torch.equal(self.probs, other.probs))

    model, optimizer = small()
    with doctor.watch(say=False) as report:
        for _ in range(8):
            policy = Compared(logits=model(torch.randn(8, 4)))
            optimizer.zero_grad()
            (-policy.log_prob(policy.sample()).mean()).backward()
            optimizer.step()
    assert report.done and not report.faults, report.faults


def test_numbers_are_made_by_name():
    with doctor.watch(say=False) as report:
        loop(*small(), data=lambda: torch.randn(8, 4) * torch.tensor(data=2))
    assert not report.faults, report.faults


def test_where_optimizers_take_turns_each_is_seen_three_times():
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    depths = []
    with doctor.watch(say=False):
        for n in range(16):
            x = torch.randn(8, 4)
            optimizers[n % 2].zero_grad()
            depths.append(depth())
            F.mse_loss(models[n % 2](x), x).backward()
            optimizers[n % 2].step()
    assert depths[0] == 0 and all(sum(depths[k::2]) >= 2 for k in (0, 1)) and not any(depths[8:]), depths


def slope_in_a_closure(model, optimizer, depths=None):
    """LBFGS, whose closure is asked several times a step; in it a derivative is taken by autograd.grad."""
    for _ in range(8):
        t = torch.rand(32, 1, requires_grad=True)

        def closure(t=t):
            optimizer.zero_grad()
            u = 1 + t * model(t)
            (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
            loss = (slope + u).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        if depths is not None:
            depths.append(depth())


@pytest.mark.parametrize("default", [False, True])
def test_there_is_one_mode_where_a_closure_has_backwards(default):
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    original = torch.overrides.has_torch_function
    if default:
        torch.set_default_device("cpu")
    try:
        before, depths = depth(), []
        with doctor.watch(say=False) as report:
            slope_in_a_closure(model, optimizer, depths)
        assert set(depths[:3]) == {before + 1} and set(depths[3:]) == {before} and depth() == before
    finally:
        torch.set_default_device(None)
    assert "F117" not in {f.check for f in report.findings} and not report.faults, f"\n{report}"
    assert torch.overrides.has_torch_function is original


def test_a_closure_that_raises_leaves_no_mode():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def broken(calls):
        loss = model(torch.ones(4, 1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        calls.append(depth())
        if len(calls) == 2:
            raise KeyError("the data are over")
        return loss

    with doctor.watch(say=False) as report:
        slope_in_a_closure(model, optimizer)
    assert depth() == 0
    with doctor.watch(say=False) as report:
        for _ in range(6):
            calls = []
            try:
                optimizer.step(lambda calls=calls: broken(calls))
            except KeyError:
                pass
            assert depth() <= 1
    assert depth() == 0 and not report.faults


def test_a_closure_sees_the_fast_path_of_torch_as_it_was():
    """The mode rests on the stack between the backwards of a closure, and the answers keep their bits."""
    answers = []
    for watched in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval().requires_grad_(False)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        found = []

        def closure(layer=layer, model=model, optimizer=optimizer, found=found):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 64).view(2, 4, 8)
            with torch.no_grad():
                found.append(layer(x))
            loss = F.mse_loss(model(x), found[-1])
            loss.backward()
            return loss

        def run(optimizer=optimizer, closure=closure):
            for _ in range(5):
                optimizer.step(closure)

        if watched:
            with doctor.watch(say=False):
                run()
        else:
            run()
        answers.append(found)
    assert len(answers[0]) == len(answers[1]) and all(map(torch.equal, *answers))
