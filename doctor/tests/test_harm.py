"""The doctor does no harm: programs that it once crashed, slowed or blamed, written as people write them.

The first seven were found on public programs. Each trains alone, and must train to the same bits under the watch.
"""

import contextlib
import copy
import gc
import io
import pickle
from collections import OrderedDict, UserDict
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as optimizer_module
from torch.utils._python_dispatch import TorchDispatchMode

import train_doctor as doctor
from tests.bench import batches
from train_doctor import ERROR, NOTE, evidence, replays


def entropy(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def small(dropout: float = 0.0):
    return nn.Sequential(nn.Embedding(256, 16), nn.Dropout(dropout), nn.Linear(16, 256))


def silent(report) -> None:
    assert report.done and not report.faults, report.faults
    assert not [f for f in report.findings if f.severity != NOTE], f"\n{report}"


# ------------------------------------------------------------------------------------------------ two networks
def gan(rounds: int = 12):
    """Both parts of the discriminator's loss are differentiated before the generator's graph is used again."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    judge = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
    for_judge, for_maker = (torch.optim.Adam(m.parameters(), 2e-4) for m in (judge, maker))
    loss, real, fake = nn.BCELoss(), torch.ones(32, 1), torch.zeros(32, 1)

    def train():
        for _ in range(rounds):
            judge.zero_grad()
            loss(judge(torch.randn(32, 4) + 2), real).backward()
            made = maker(torch.randn(32, 8))
            loss(judge(made.detach()), fake).backward()
            for_judge.step()
            maker.zero_grad()
            loss(judge(made), real).backward()
            for_maker.step()
        return [*maker.state_dict().values(), *judge.state_dict().values()]

    return train, maker, [for_judge, for_maker]


@pytest.mark.parametrize("told", ["nothing", "the generator", "the optimizers"])
def test_a_replay_writes_to_no_buffer_of_a_graph_that_is_alive(told):
    alone = gan()[0]()
    train, maker, optimizers = gan()
    given = {"nothing": {}, "the generator": {"model": maker, "optimizer": optimizers}}
    with doctor.watch(**given.get(told, {"optimizer": optimizers}), say=False) as report:
        watched = train()
    silent(report)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched))


def test_networks_that_take_turns_with_a_closure_that_makes_no_backward():
    """One is frozen while the other learns (Lightning's toggle), and step is given a closure that is over already."""
    torch.manual_seed(0)
    judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    both = nn.ModuleDict({"maker": nn.Linear(8, 4), "judge": judge})
    optimizers = {name: torch.optim.Adam(m.parameters(), 1e-3) for name, m in both.items()}

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = both

        def forward(self, z):
            return self.both["maker"](z)

    whole = Whole()
    with doctor.watch(whole, say=False) as report:
        for number in range(14):
            learner, other = ("judge", "maker") if number % 2 else ("maker", "judge")
            both[other].requires_grad_(False)
            score = both["judge"](whole(torch.randn(16, 8)))
            F.binary_cross_entropy_with_logits(score, torch.full((16, 1), float(number % 2))).backward()
            optimizers[learner].step(lambda: None)
            optimizers[learner].zero_grad()
            both[other].requires_grad_(True)
    silent(report)


class Packed(nn.Parameter):
    """A weight of a kind of its own, as those of bitsandbytes."""


class PackedLayer(nn.Module):
    """Packs its weight anew at a forward in eval mode without gradients, as 4-bit layers do on some CPUs."""

    def __init__(self):
        super().__init__()
        self.weight, self.more = Packed(torch.randn(16, 16), requires_grad=False), nn.Linear(16, 16)

    def forward(self, x):
        if not self.training and not torch.is_grad_enabled():
            self.weight.data += 1
        return F.linear(x, self.weight) + self.more(x)


class PackedTexts(nn.Module):
    def __init__(self, decodes: bool):
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(24, 16), PackedLayer(), nn.Linear(16, 24)
        self.decodes = decodes

    def forward(self, ids, texts=None):
        h = self.layer(self.words(ids))
        return self.head(h + self.words(texts) if self.decodes else h)


@pytest.mark.parametrize("decodes", [True, False])
def test_packed_weights_are_called_in_no_other_mode(decodes):
    torch.manual_seed(0)
    model = PackedTexts(decodes)
    optimizer, before = torch.optim.Adam([p for p in model.parameters() if p.requires_grad]), model.layer.weight.clone()
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for _ in range(12):
            source, target = torch.randint(0, 24, (8, 9)), torch.randint(0, 24, (8, 10))
            z = model(source, target[:, :-1]) if decodes else model(target[:, :-1])
            optimizer.zero_grad()
            F.cross_entropy(z.flatten(0, 1), target[:, 1:].flatten()).backward()
            optimizer.step()
    assert not report.faults and model.layer.weight.equal(before)


# ------------------------------------------------------------------------------------------------ copies and files
class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(256, 8), kind(8, 8, batch_first=True), nn.Linear(8, 256)

    def forward(self, ids):
        return self.head(self.body(self.table(ids))[0])


class CopiesItself(nn.Linear):
    """A class with a way of its own to be copied, as averages and packed layers have."""

    def __deepcopy__(self, memo):
        twin = type(self)(self.in_features, self.out_features)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class Reduces(nn.Linear):
    def __reduce_ex__(self, protocol):
        return _made, (dict(self.__dict__),)


def _made(state):
    made = nn.Linear.__new__(Reduces)
    made.__dict__.update(state)
    return made


def with_layer(kind):
    return lambda: nn.Sequential(nn.Embedding(256, 16), kind(16, 256))


def traced():
    return torch.fx.symbolic_trace(small())


MODELS = [Recurrent, lambda: Recurrent(nn.GRU), with_layer(CopiesItself), with_layer(Reduces), traced]


def entries(model) -> int:
    return sum(len(getattr(m, k)) for m in model.modules() for k in vars(m) if k.endswith("hooks") or "_hooks_" in k)


@pytest.mark.parametrize("make", MODELS, ids=["lstm", "gru", "deepcopy", "reduce", "fx"])
def test_copies_and_files_made_meanwhile_carry_no_hook(make):
    model, saved, copies = make(), [], []
    model.register_forward_hook(_mine)
    own, state = entries(model), None
    without = entries(copy.deepcopy(model)), entries(pickle.loads(pickle.dumps(model)))  # a traced graph drops hooks
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for number, ids in enumerate(batches(4)):
            optimizer.zero_grad()
            entropy(model, ids).backward()
            optimizer.step()
            if number < 3:
                assert entries(model) > own  # the watch is on, and still is after the copies
            copies.append((copy.deepcopy(model), pickle.loads(pickle.dumps(model))))
            torch.save(model, file := io.BytesIO())
            saved.append(file)
            state = model.state_dict()
            torch.save([state, optimizer.state_dict(), copy.deepcopy(optimizer)], io.BytesIO())
    silent(report)
    assert report.rounds == 4
    for file, (copied, pickled) in zip(saved, copies):
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert (entries(copied), entries(pickled), entries(loaded)) == (*without, without[1])
        for made in (copied, pickled, loaded):
            assert set(made.state_dict()) == set(state) and pickle.dumps(made)
    assert entries(model) == own


def _mine(module, args, output):
    """A hook of the user's: it stays in every copy."""


# ------------------------------------------------------------------------------------------------ without an end
def by_hand(steps: int, model, moves: bool = True):
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters() if moves else ():
                p.add_(p.grad, alpha=-1e-2)


def test_a_watch_ends_where_weights_are_moved_by_hand():
    model = nn.Linear(4, 1)
    with doctor.watch(model, say=False, steps=5) as report:
        by_hand(12, model)
        assert report.done and report.rounds == 5 and entries(model) == 0
    silent(report)


def test_a_watch_ends_where_nothing_moves():
    model = nn.Linear(4, 1)
    with doctor.watch(model, say=False, steps=2) as report:
        by_hand(700, model, moves=False)
        assert report.done and entries(model) == 0


class Sparse(nn.Module):
    """Weights, a graph and data that are kept as sparse tensors, which have no storage, no rows and no address."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter((0.2 * torch.randn(8, 8)).to_sparse())
        self.words = nn.Embedding(10, 8, sparse=True)
        self.head = nn.Linear(8, 1)
        self.register_buffer("graph", torch.eye(16).to_sparse())

    def forward(self, x):  # (16, 8)
        h = torch.sparse.mm(self.mix, x.t()).t()
        return self.head(torch.sparse.mm(self.graph, h) + self.words(torch.arange(16) % 10))[:, 0]


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x, self.graph = torch.randn(64, 8), torch.eye(64).to_sparse()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        row = self.x[i].clone()
        row.mul_(2.0)
        return row, row.sum()


def test_sparse_weights_graphs_and_data():
    torch.manual_seed(0)
    student, teacher = Sparse(), Sparse()
    for p in teacher.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.003)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=16, shuffle=True)
    with doctor.watch(steps=10, say=False) as report:
        for x, y in (batch for _ in range(3) for batch in loader):
            with torch.no_grad():
                asked = teacher(x)
            answer = student(x)
            optimizer.zero_grad()
            (F.mse_loss(answer, y) + F.mse_loss(answer, asked)).backward()
            optimizer.step()
            best = student.state_dict()  # wrong, and said: these are the live weights
        student.load_state_dict(best)
    assert report.done and not report.faults, report.faults
    assert [f.check for f in report.findings if f.severity != NOTE] == ["S35"], f"\n{report}"


@pytest.mark.parametrize("table", [True, False])
def test_a_weight_that_is_computed_is_not_asked_for(table):
    """spectral_norm writes its vectors whenever somebody reads `.weight`: each reading is a step of its own."""

    def run(watch):
        torch.manual_seed(0)
        normed = nn.utils.parametrizations.spectral_norm(nn.Embedding(16, 16) if table else nn.Linear(16, 16))
        rest = [nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
        model = nn.Sequential(normed, *rest)
        groups = [{"params": normed.parameters()}, {"params": model[1:].parameters()}]
        optimizer = torch.optim.Adam(groups, 1e-3)
        with watch as report:
            for _ in range(8):
                x = torch.randint(16, (8,)) if table else torch.randn(8, 16)
                optimizer.zero_grad()
                F.mse_loss(model(x)[:, 0], torch.ones(8)).backward()
                optimizer.step()
        return [*model.parameters(), *model.buffers()], report

    (plain, _), (watched, report) = run(contextlib.nullcontext()), run(doctor.watch(steps=6, say=False))
    assert report.done and not report.faults, report.faults
    assert all(map(torch.equal, plain, watched))


def test_one_move_by_hand_before_the_optimizer_steps_is_no_step():
    """SAM looks for its direction first."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with doctor.watch(model, say=False, steps=4) as report:
        for _ in range(5):
            by_hand(1, model)
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        assert report.done and report.rounds == 4


def test_evidence_is_bounded():
    """A long evaluation, and hundreds of backwards for one step."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    counts = []
    with doctor.watch(model, say=False) as report:
        for calls in (300, 900):
            with torch.no_grad():
                for _ in range(calls):
                    F.mse_loss(model(torch.randn(2, 4)), torch.zeros(2, 1))
            for _ in range(calls):
                model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
            counts.append(sum(isinstance(x, evidence.Event) for x in gc.get_objects()))
    assert counts[1] <= 2 * counts[0] and counts[0] < 5 * evidence.ROOM
    assert not report.faults and not report.errors, f"\n{report}"


def test_a_watch_of_calls_alone_ends(monkeypatch):
    monkeypatch.setattr("train_doctor.calls.CALLS", 50)
    model = nn.Linear(4, 1)
    with doctor.watch(model, say=False, steps=2) as report:
        for _ in range(120):
            model(torch.randn(2, 4))
        assert report.done and not report.faults and entries(model) == 0


# ------------------------------------------------------------------------------------------------ hooks of the user
def test_hooks_of_the_user_see_the_run_and_not_the_replays():
    """The fp32 shadow steps an optimizer of its own, and a teacher is asked again: neither is the user's."""
    student, teacher = small().bfloat16(), small().bfloat16().eval()
    optimizer = torch.optim.AdamW(student.parameters(), 1e-2)
    steps, calls = [], []
    handles = [
        optimizer_module.register_optimizer_step_pre_hook(lambda o, *_: steps.append(o)),
        optimizer_module.register_optimizer_step_post_hook(lambda o, *_: steps.append(o)),
        nn.modules.module.register_module_forward_hook(lambda m, *_: calls.append(m)),
    ]
    try:
        with doctor.watch(student, optimizer=optimizer, teacher=teacher, say=False) as report:
            for ids in batches(3):
                with torch.no_grad():
                    goal = teacher(ids).float().softmax(-1)
                F.kl_div(student(ids).float().log_softmax(-1), goal, reduction="batchmean").div(ids.shape[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        for handle in handles:
            handle.remove()
    assert all(o is optimizer for o in steps) and len(steps) == 6
    assert calls.count(teacher) == calls.count(student) == 3
    assert report.verdicts["F6"].state == "OK", report.verdicts["F6"]  # it was replayed


class Counts(nn.Module):
    """Keeps what a forward leaves behind in every way there is."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(256, 16, max_norm=0.5), nn.Linear(16, 256)
        self.calls, self.seen, self.mean = 0, [], torch.zeros(16)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, ids):
        x = self.table(ids)
        self.calls += 1
        self.seen.append(ids.shape)
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        self.total += 1
        if self.calls > 1:
            self.register_buffer("late", x.detach().mean(), persistent=False)
        return self.head(x)


def test_a_replay_leaves_nothing_behind_in_a_module():
    torch.manual_seed(0)
    teacher, student = Counts(), small(0.1)
    twin = copy.deepcopy(teacher)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
    ids = batches(3)
    with doctor.watch(student, teacher=teacher, say=False) as report:
        for x in ids:
            with torch.no_grad():
                goal = teacher(x).softmax(-1)
            optimizer.zero_grad()
            F.kl_div(student(x).log_softmax(-1).flatten(0, 1), goal.flatten(0, 1), reduction="batchmean").backward()
            optimizer.step()
    with torch.no_grad():
        for x in ids:
            twin(x)
    assert report.verdicts["F6"].state == "OK", report.verdicts["F6"]
    assert (teacher.calls, teacher.seen, float(teacher.total)) == (3, twin.seen, 3.0)
    assert torch.equal(teacher.mean, twin.mean) and torch.equal(teacher.table.weight, twin.table.weight)
    assert torch.equal(teacher.late, twin.late)


# ------------------------------------------------------------------------------------------------ clearing
class Waiting(torch.optim.SGD):
    """Clears and steps only with the last micro-batch, as accelerate's optimizers do."""

    sync = False

    def zero_grad(self, set_to_none: bool = True):
        if self.sync:
            super().zero_grad(set_to_none)

    def step(self, closure=None):
        return super().step(closure) if self.sync else None


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_clearing_counts_by_its_effect(waits, set_to_none):
    """The loop of accelerate's guide. Where clearing does not wait, only the last micro-batch counts, which is N2."""
    model = small()
    torch.optim.SGD(model.parameters(), 0.1)  # torch puts the hooks of a step into a class when it is first made
    optimizer = Waiting(model.parameters(), 0.1)
    with doctor.watch(model, say=False) as report:
        for number, ids in enumerate(batches(16)):
            optimizer.sync = bool(number % 2)
            (entropy(model, ids) / 2).backward()
            if optimizer.sync:
                torch.optim.SGD.step(optimizer)
            if waits:
                optimizer.zero_grad(set_to_none)
            else:
                torch.optim.SGD.zero_grad(optimizer, set_to_none)
    if waits:
        silent(report)
    else:
        assert report.root is not None and report.root.check == "N2", f"\n{report}"


def test_accelerate_as_its_guide_shows_it():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = small()
    loader = torch.utils.data.DataLoader(torch.cat(batches(16)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), loader)
    with doctor.watch(say=False) as report:
        for ids in loader:
            with accelerator.accumulate(model):
                accelerator.backward(entropy(model, ids))
                optimizer.step()
                optimizer.zero_grad()
    silent(report)
    assert report.rounds == 8


# ------------------------------------------------------------------------------------------------ who teaches
def test_a_model_that_was_only_shown_is_no_teacher():
    """A tutorial shows the norm of one model's gradients, then trains another."""
    torch.manual_seed(0)
    with doctor.watch(say=False) as report:
        first = small(0.1)
        entropy(first, batches(1)[0]).backward()
        nn.utils.clip_grad_norm_(first.parameters(), 1.0)
        model = small(0.1)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for ids in batches(12):
            optimizer.zero_grad()
            entropy(model, ids).backward()
            optimizer.step()
    silent(report)


@pytest.mark.parametrize("rounds", [1, 6])
def test_a_teacher_that_is_asked_at_each_step_is_one(rounds):
    torch.manual_seed(0)
    with doctor.watch(say=False) as report:
        teacher, student = small(0.3), small()
        optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
        for ids in batches(rounds):
            with torch.no_grad():
                goal = teacher(ids).softmax(-1).flatten(0, 1)
            optimizer.zero_grad()
            F.kl_div(student(ids).log_softmax(-1).flatten(0, 1), goal, reduction="batchmean").backward()
            optimizer.step()
    found = [f for f in report.findings if f.check == "F6"]
    assert found and found[0].severity == ERROR, f"\n{report}"


def test_a_replay_of_tied_and_shared_parts_leaves_every_parameter_in_place():
    """functional_call puts its own copy back where one module stands under two names."""
    torch.manual_seed(0)
    shared, table = nn.Linear(16, 16), nn.Embedding(256, 16)
    teacher = nn.Sequential(table, shared, nn.GELU(), nn.ModuleDict({"again": shared})["again"], nn.Linear(16, 256))
    teacher[4].weight = table.weight
    before = [id(p) for m in teacher.modules() for p in m._parameters.values()]
    student = small()
    optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
    with doctor.watch(student, teacher=teacher, say=False) as report:
        for ids in batches(3):
            with torch.no_grad():
                goal = teacher(ids).softmax(-1).flatten(0, 1)
            optimizer.zero_grad()
            F.kl_div(student(ids).log_softmax(-1).flatten(0, 1), goal, reduction="batchmean").backward()
            optimizer.step()
    assert report.verdicts["F6"].state == "OK", report.verdicts["F6"]
    assert [id(p) for m in teacher.modules() for p in m._parameters.values()] == before


def test_a_large_model_is_not_held_twice(monkeypatch):
    """Its weights stay where they are for a replay, but for a table that the forward itself writes to."""
    monkeypatch.setattr(replays, "LARGE", 0)
    model, given = Counts(), mock.Mock()
    model.head.register_forward_pre_hook(lambda m, args: given(m.weight, model.table.weight) and None)
    replays.again(model, (batches(1)[0],), {})
    head, table = given.call_args.args
    assert head is model.head.weight and table is not model.table.weight
    assert model.calls == 0 and not model.seen


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, batch):
        batch["ids"].clamp_(max=200)
        return self.inner(batch.pop("ids"))


@pytest.mark.parametrize("kind", [dict, UserDict, OrderedDict])
def test_a_replay_takes_nothing_out_of_a_batch(kind):
    batch = kind(ids=torch.tensor([[255, 3]]))
    replays.again(Takes(), (batch,), {})
    assert batch["ids"].tolist() == [[255, 3]]


# ------------------------------------------------------------------------------------------------ a dead distillation
def distil(dead: bool, by_hand: bool):
    """The student's logits are detached in the second term."""
    torch.manual_seed(0)
    teacher, student = small().eval(), small()
    optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
    with doctor.watch(student, teacher=teacher, say=False) as report:
        for ids in batches(6):
            with torch.no_grad():
                goal = teacher(ids[:, :-1]).softmax(-1).flatten(0, 1)
            logits = student(ids[:, :-1]).flatten(0, 1)
            mine = (logits.detach() if dead else logits).log_softmax(-1)
            if by_hand:
                kd = (goal * (goal.log() - mine)).sum(-1).mean()
            else:
                kd = F.kl_div(mine, goal, reduction="batchmean")
            optimizer.zero_grad()
            (F.cross_entropy(logits, ids[:, 1:].flatten()) + 2.0 * kd).backward()
            optimizer.step()
    return report


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_dead_distillation_is_an_error(by_hand):
    root = distil(dead=True, by_hand=by_hand).root
    assert root is not None and (root.check, root.severity) == ("F2", ERROR), root
    silent(distil(dead=False, by_hand=by_hand))


class Counting(TorchDispatchMode):
    """A program that counts operations, as profilers and counters of FLOPs do."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_a_program_may_look_at_every_operation_itself():
    model = small()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with doctor.watch(model, optimizer=sgd, say=False) as report:
        for ids in batches(8):
            with Counting():
                (entropy(model, ids) + 0.001 * model[0].weight.square().mean()).backward()
            sgd.step()
            sgd.zero_grad()
    silent(report)


def test_torchs_own_layers_stay_fused():
    """At rest, without gradients, an encoder layer is one operation, but not with hooks in it."""

    def run(watch):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 1))
        optimizer, calls = torch.optim.SGD(model.parameters(), 0.01), []
        fused = torch._transformer_encoder_layer_fwd
        with watch, mock.patch.object(torch, "_transformer_encoder_layer_fwd", wraps=fused) as counted:
            for _ in range(4):
                x = torch.randn(4, 6, 16)
                optimizer.zero_grad()
                F.mse_loss(model.train()(x), x.sum(2, keepdim=True)).backward()
                optimizer.step()
                with torch.no_grad():
                    model.eval()(x)
                calls.append(counted.call_count)
        return calls

    assert run(doctor.watch(steps=3, say=False)) == run(contextlib.nullcontext()) == [2, 4, 6, 8]
