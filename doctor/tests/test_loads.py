"""S51: checkpoints of which next to nothing was loaded; and that listening to loads (loads.py)
leaves no trace.
"""

import copy
import gc
import importlib
import inspect
import io
import pickle
import threading
from collections import OrderedDict, UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import loopdoctor as doctor
from loopdoctor import loads
from loopdoctor.checks.checkpoints import fitting
from tests.loops import quiet, said

PLAIN = inspect.unwrap(nn.Module.load_state_dict)


class Net(nn.Module):
    def __init__(self, classes: int = 4):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32)
        )
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(F.relu(self.body(x)))


def trained(model: nn.Module | None = None) -> nn.Module:
    model = Net() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(20):
        F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def state(prefix: str = "", of: nn.Module | None = None) -> dict:
    return {prefix + n: p.clone() for n, p in trained(of).state_dict().items()}


def watched(model: nn.Module, inside=None) -> doctor.Report:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=4, say=False) as report:
        if inside is not None:
            inside()
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,))).backward()
            optimizer.step()
    return report


def first(program) -> doctor.Finding:
    report = quiet(program)
    assert report.root is not None and report.root.check == "S51" and not report.faults, (
        f"\n{report}"
    )
    return report.root


def silent(program) -> None:
    report = quiet(program)
    assert "S51" not in said(report) and not report.faults, f"\n{report}"


# ------------------------------------------------------------------------------------ what is named
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "model.backbone."])
def test_a_prefix_of_the_checkpoint_is_named(prefix):
    def program():
        (model := Net()).load_state_dict(state(prefix), strict=False)
        return watched(model)

    finding = first(program)
    assert finding.severity == doctor.ERROR and f'"{prefix}"' in finding.diagnosis
    assert f'k.removeprefix("{prefix}")' in finding.fix and "took 0" in finding.observed
    assert "test_loads.py:" in finding.observed


@pytest.mark.parametrize("wrong", [True, False])
def test_a_model_in_a_wrapper(wrong):
    """The names of the model have the prefix, those of the checkpoint do not."""

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Net()

        def forward(self, x):
            return self.inner(x)

    def program():
        model = Wrapper()
        (model if wrong else model.inner).load_state_dict(state(), strict=False)
        return watched(model)

    if not wrong:
        return silent(program)
    finding = first(program)
    assert '"inner." + k' in finding.fix


def test_a_prefix_in_the_place_of_another():
    def program():
        saved = {
            n.replace("body.", "encoder."): x for n, x in state().items() if n.startswith("body")
        }
        (model := Net()).load_state_dict(saved, strict=False)
        return watched(model)

    assert '"encoder." for "body."' in first(program).diagnosis


def test_a_prefix_in_the_middle_of_names():
    def program():
        saved = {n.replace("body.", "body._orig_mod."): x for n, x in state().items()}
        (model := Net()).load_state_dict(saved, strict=False)
        return watched(model)

    finding = first(program)
    assert finding.severity == doctor.WARN and "_orig_mod" in finding.diagnosis


@pytest.mark.parametrize("wrong", [True, False])
def test_weights_that_are_one_level_deeper(wrong):
    def program():
        checkpoint = {
            "epoch": 3,
            "state_dict": state(),
            "optimizer": {"state": {0: {"step": torch.ones(1)}}},
        }
        (model := Net()).load_state_dict(
            checkpoint if wrong else checkpoint["state_dict"], strict=False
        )
        return watched(model)

    if not wrong:
        return silent(program)
    assert 'checkpoint["state_dict"]' in first(program).fix


@pytest.mark.parametrize("how", ["backbone", "whole", "teacher"])
def test_what_is_frozen(how):
    """The finding stands before S22, which follows from it."""

    class WithTeacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher, self.student = Net().requires_grad_(False).eval(), Net()

        def forward(self, x):
            with torch.no_grad():
                aim = self.teacher(x)
            return self.student(x) + aim

    def program():
        if how == "teacher":
            (model := WithTeacher()).teacher.load_state_dict(state("module."), strict=False)
            return watched(model)
        model = Net()
        if how == "backbone":
            saved = {
                n.replace("body.", "module."): x for n, x in state().items() if n.startswith("body")
            }
            model.body.load_state_dict(saved, strict=False)
        else:
            model.load_state_dict(state("module."), strict=False)
        model.body.requires_grad_(False)
        return watched(model)

    first(program)


@pytest.mark.parametrize("prefix", ["module.", ""])
@pytest.mark.parametrize("how", ["update", "filter"])
def test_a_filter_by_names(how, prefix):
    def program():
        model, saved = Net(), state(prefix)
        own = model.state_dict()
        fits = {n: x for n, x in saved.items() if n in own}
        if how == "update":
            own.update(fits)
            model.load_state_dict(own)
        else:
            model.load_state_dict(fits, strict=False)
        return watched(model)

    if not prefix:
        return silent(program)
    assert "filter" in first(program).diagnosis


def test_a_load_within_the_watch():
    def program():
        model = Net()
        return watched(model, lambda: model.load_state_dict(state("module."), strict=False))

    first(program)


# ------------------------------------------------------------------------------- what is left alone
class Grown(nn.Module):
    """A backbone and a decoder that is much larger."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.decoder = nn.Sequential(
            *[m for _ in range(6) for m in (nn.Linear(32, 32), nn.ReLU())], nn.Linear(32, 4)
        )

    def forward(self, x):
        return self.decoder(self.body(x))


def _healthy(how: str) -> nn.Module:
    model = Net()
    if how == "a new head":
        saved = {n: x for n, x in state().items() if not n.startswith("head")}
        model.load_state_dict(saved, strict=False)
    elif how == "a head of other classes is left out":
        saved = {n: x for n, x in state().items() if not n.startswith("head")} | {
            "fc.weight": torch.ones(9, 32)
        }
        model.load_state_dict(saved, strict=False)
    elif how == "a new decoder":
        model, saved = (
            Grown(),
            state(of=nn.Sequential(OrderedDict(body=Grown().body, fc=nn.Linear(32, 4)))),
        )
        model.load_state_dict(saved, strict=False)
    elif how == "a later load":
        model.load_state_dict(state("module."), strict=False)
        model.load_state_dict(state())
    elif how == "a later load of its parts":
        model.load_state_dict(state("module."), strict=False)
        saved = trained()
        model.body.load_state_dict(saved.body.state_dict())
        model.head.load_state_dict(saved.head.state_dict())
    elif how == "a later load through a wrapper":  # which is gone by then
        model.load_state_dict(state("module."), strict=False)
        nn.ModuleDict({"module": model}).load_state_dict(state("module."))
    elif how == "another model":
        Net().load_state_dict(state("module."), strict=False)
        model.of_nobody = (other := Net(),)  # it stays alive and is no part
        other.load_state_dict(state("module."), strict=False)
    elif how == "an adapter":
        model.body[3].register_parameter("lora_A", nn.Parameter(torch.zeros(2, 32)))
        model.load_state_dict({"body.3.lora_A": torch.randn(2, 32)}, strict=False)
    elif how == "other names and other shapes":
        model.load_state_dict(
            {f"module.{n}": x[:1] for n, x in state().items() if x.dim()}, strict=False
        )
    elif how == "in place, then its own":  # what torch.distributed.checkpoint does
        own, saved = model.state_dict(), state()
        for name, x in own.items():
            x.copy_(saved[name])
        model.load_state_dict(own)
    elif how == "it did not fit, and said so":
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(state("module."))
        model.load_state_dict(state())
    elif how == "in two parts":
        saved = state()
        model.load_state_dict(
            {n: x for n, x in saved.items() if n.startswith("body")}, strict=False
        )
        model.load_state_dict(
            {n: x for n, x in saved.items() if n.startswith("head")}, strict=False
        )
    elif how == "by hand at random":
        torch.nn.init.normal_(model.body[0].weight, std=0.02)
        model.load_state_dict({}, strict=False)
    return model


HEALTHY = [
    "nothing at all",
    "a new head",
    "a head of other classes is left out",
    "a new decoder",
    "a later load",
    "a later load of its parts",
    "a later load through a wrapper",
    "another model",
    "an adapter",
    "other names and other shapes",
    "in place, then its own",
    "it did not fit, and said so",
    "in two parts",
    "by hand at random",
]


@pytest.mark.parametrize("how", HEALTHY)
def test_healthy_loads_are_left_alone(how):
    silent(lambda: watched(_healthy(how)))


# ----------------------------------------------------------------------------------- by other means
def _by_hand(model: nn.Module, saved: dict, names) -> None:
    own = model.state_dict()
    for name in names:
        own[name].copy_(saved[f"module.{name}"])


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("how", ["all", "head", "cast", "none"])
def test_what_was_copied_by_hand_is_left_alone(how, within):
    def program():
        model, saved = Net(), state("module.")

        def load():
            names = model.load_state_dict(saved, strict=False).missing_keys
            if how == "cast":
                model.to(torch.bfloat16).float()
            else:
                _by_hand(model, saved, {"all": names, "head": names[-2:], "none": ()}[how])

        if not within:
            load()
        return watched(model, load if within else None)

    silent(program) if how == "all" else first(program)


@pytest.mark.parametrize("same", [False, True])
def test_a_large_model_copied_by_hand(same):
    """More tensors than are looked at; of norms and biases the numbers may be the same as
    before.
    """

    def deep(std: float) -> nn.Module:
        layers = [nn.Linear(8, 8) for _ in range(40)]
        for layer in layers:
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(
            *(m for layer in layers for m in (layer, nn.BatchNorm1d(8))), nn.Linear(8, 4)
        )

    def program():
        model, saved = deep(0.3), deep(0.4)
        saved = {
            f"module.{n}": x for n, x in (saved if same else trained(saved)).state_dict().items()
        }
        _by_hand(model, saved, model.load_state_dict(saved, strict=False).missing_keys)
        assert 0 < len(loads.kept()[-1].held) <= loads.HELD
        return watched(model)

    silent(program)


@pytest.mark.parametrize("loaded", [True, False])
def test_the_backbone_after_the_whole(loaded):
    """The head has more tensors than the backbone, and one of its names would fit."""

    def program():
        model = nn.Sequential(
            OrderedDict(backbone=Net(8), head=nn.Sequential(*[nn.Linear(8, 8) for _ in range(9)]))
        )
        saved = state(of=Net(8))
        model.load_state_dict(saved, strict=False)
        if loaded:
            model.backbone.load_state_dict(saved)
        return watched(model)

    silent(program) if loaded else first(program)


def test_numbers_of_odd_tensors():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.turned = (
                nn.Parameter(torch.arange(6.0).view(2, 3)),
                nn.Parameter(torch.rand(3, 2).T),
            )
            self.meta, self.none = (
                nn.Parameter(torch.rand(3, device="meta")),
                nn.Parameter(torch.rand(0)),
            )
            self.later, self.whole = (
                nn.UninitializedParameter(),
                nn.Parameter(torch.ones(2).long(), False),
            )
            self.one, self.sparse = (
                nn.Parameter(torch.tensor(3.0)),
                nn.Parameter(torch.eye(3).to_sparse()),
            )
            self.freed = nn.Parameter(torch.rand(3))
            self.freed.untyped_storage().resize_(0)
            with torch.inference_mode():
                self.register_buffer("odd", torch.full((2,), 2.0))

    model, generator = Odd(), torch.get_rng_state()
    held = loads._held(
        model, [n for n, _ in (*model.named_parameters(), *model.named_buffers())] + ["nothing"]
    )
    assert held.keys() == {"plain", "turned", "one", "odd"} and torch.equal(
        generator, torch.get_rng_state()
    )
    assert (
        held["plain"] == [0.0, 1.0, 3.0, 5.0]
        and held["one"] == [3.0] * 4
        and held["odd"] == [2.0] * 4
    )
    assert held["turned"] == model.turned.flatten()[[0, 1, 3, 5]].tolist()


def test_a_mode_of_the_program_sees_no_numbers_being_read():
    class Listening(torch.utils._python_dispatch.TorchDispatchMode):
        names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    model, saved = (
        Net().body[0],
        {"module.weight": torch.ones(32, 8), "module.bias": torch.ones(32)},
    )
    number = loads.count()
    with Listening():
        model.load_state_dict(saved, strict=False)
    assert not Listening.names and loads.count() == number + 1 and not loads.kept()[-1].held
    model.load_state_dict(saved, strict=False)
    assert loads.kept()[-1].held


def test_its_own_state_after_steps_is_left_alone():
    def program():
        model, own = Net(), {}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with doctor.watch(model, optimizer=optimizer, steps=4, say=False) as report:
            for _ in range(4):
                optimizer.zero_grad()
                F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,))).backward()
                optimizer.step()
                own = own or model.state_dict()
                model.load_state_dict(own)
        return report

    silent(program)


def test_prefixes():
    missing = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (2, 2)}
    assert fitting(missing, {f"x.y.{n}": s for n, s in missing.items()})[:3] == (3, "x.y.", "")
    assert fitting({f"x.{n}": s for n, s in missing.items()}, missing)[:3] == (3, "", "x.")
    assert fitting(missing, {f"x.{n}": (7,) for n in missing}).many == 0
    assert fitting(missing, {"z.weight": (2, 3), "z.bias": (2,)}).many == 2
    assert fitting(missing, {"z.weight": (2, 3), "z.bias": (2,)}, moved=False).many == 0
    assert fitting({}, missing).many == fitting(missing, {}).many == 0


# ----------------------------------------------------------------------------------------- no trace
def outcome(load, model: nn.Module, saved, **options):
    try:
        result = load(model, saved, **options)
        return (
            type(result),
            repr(result),
            tuple(result),
            {n: x.clone() for n, x in model.state_dict().items()},
        )
    except Exception as error:
        return type(error), str(error), (), {}


GIVEN = {
    "its names": lambda: state(),
    "a prefix": lambda: state("module."),
    "no dict": lambda: [1, 2],
    "a mapping": lambda: UserDict(state()),
    "other shapes": lambda: {n: x[:1] if x.dim() else x for n, x in state().items()},
    "no tensors": lambda: {"head.weight": 3, "head.bias": None},
    "nothing": lambda: {},
}


@pytest.mark.parametrize(
    "options", [{}, {"strict": False}, {"assign": True, "strict": False}, {"wrong": 1}]
)
@pytest.mark.parametrize("given", list(GIVEN))
def test_torch_does_the_same(given, options):
    saved = GIVEN[given]()
    one = Net()
    two, generator = copy.deepcopy(one), torch.get_rng_state()
    plain, listened = (
        outcome(PLAIN, one, saved, **options),
        outcome(nn.Module.load_state_dict, two, saved, **options),
    )
    assert (
        plain[0] is listened[0]
        and plain[2] == listened[2]
        and plain[3].keys() == listened[3].keys()
    )
    assert plain[1].replace(".<locals>.", "") == listened[1] or plain[1] == listened[1]
    assert all(torch.equal(plain[3][n], listened[3][n]) for n in plain[3])
    assert torch.equal(generator, torch.get_rng_state())


def test_it_looks_like_the_function_of_torch():
    function = nn.Module.load_state_dict
    assert function is not PLAIN and inspect.signature(function) == inspect.signature(PLAIN)
    assert (function.__name__, function.__qualname__, function.__module__, function.__doc__) == (
        PLAIN.__name__,
        PLAIN.__qualname__,
        PLAIN.__module__,
        PLAIN.__doc__,
    )
    assert pickle.loads(pickle.dumps(function)) is function
    model = Net()
    with doctor.watch(say=False) as report:  # as torch.distributed does
        assert nn.Module.load_state_dict(self=model, state_dict=state()).missing_keys == []
    assert loads.kept()[-1].module() is model and not report.faults


def test_a_model_carries_nothing_of_it():
    model = Net()
    before = vars(model).keys(), list(model.state_dict())
    model.load_state_dict(state("module."), strict=False)
    assert (vars(model).keys(), list(model.state_dict())) == before
    buffer = io.BytesIO()
    torch.save(model, buffer)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert vars(other).keys() == vars(model).keys()
    assert b"loopdoctor" not in buffer.getvalue() + pickle.dumps(model) + pickle.dumps(
        model.state_dict()
    )


def test_it_is_put_on_once():
    function, kept = nn.Module.load_state_dict, loads.KEPT
    again = importlib.reload(loads)
    assert nn.Module.load_state_dict is function and again.KEPT is kept
    with doctor.watch(say=False):
        importlib.reload(loads)
        assert loads.KEPT is kept and nn.Module.load_state_dict is not function
    assert nn.Module.load_state_dict is function


@pytest.mark.parametrize("inner_first", [True, False])
def test_watches_and_others_come_and_go(inner_first):
    function, model = nn.Module.load_state_dict, Net()
    one, two = doctor.watch(say=False), doctor.watch(say=False)
    one.__enter__(), two.__enter__()
    number = loads.count()
    model.load_state_dict(model.state_dict())
    assert loads.count() == number + 1
    for watch in (two, one) if inner_first else (one, two):
        watch.__exit__(None, None, None)
    assert nn.Module.load_state_dict is function
    model.load_state_dict(model.state_dict())
    assert loads.count() == number + 2


def test_a_library_that_wraps_it_too(monkeypatch):
    function, calls = nn.Module.load_state_dict, []

    def theirs(self, *args, **kwargs):
        calls.append(self)
        return function(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "load_state_dict", theirs)
    model, number = Net(), loads.count()
    with doctor.watch(say=False):
        model.load_state_dict(state())
    assert nn.Module.load_state_dict is theirs and calls == [model] and loads.count() == number + 1


def test_the_outermost_call_counts_and_a_raised_one_does_not():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Net()
            self.register_load_state_dict_post_hook(
                lambda m, keys: m.inner.load_state_dict(state()) and None
            )

    model, number = Outer(), loads.count()
    model.load_state_dict(model.state_dict())
    assert loads.count() == number + 1 and loads.kept()[-1].module() is model
    with pytest.raises(RuntimeError):
        model.load_state_dict({"nothing": torch.ones(1)})
    assert loads.count() == number + 1
    model.load_state_dict(model.state_dict())
    assert loads.count() == number + 2


def test_it_keeps_little():
    models = [Net() for _ in range(loads.MOST + 10)]
    for model in models:
        for _ in range(2):
            model.load_state_dict(state("module.", of=model), strict=False)
    there = loads.kept()
    assert (
        len(there) == loads.MOST
        and there[-1].module() is model
        and len({id(m.module()) for m in there}) == len(there)
    )
    del models, model
    gc.collect()
    assert not [load for load in loads.kept() if load.kind == "Net"]
    model = Net()
    model.load_state_dict({f"x{i}": torch.ones(1) for i in range(2 * loads.NAMES)}, strict=False)
    last = loads.kept()[-1]
    assert (
        last.module() is model
        and len(last.unexpected) == loads.NAMES
        and last.extra == 2 * loads.NAMES
    )


def test_several_threads():
    model, number = Net(), loads.count()
    saved = state()

    def load():
        for _ in range(50):
            copy.deepcopy(model).load_state_dict(saved)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads.count() == number + 200


@pytest.mark.slow
def test_a_compiled_function_may_load():
    model, saved = Net(), state()

    @torch.compile(backend="eager")
    def step(x):
        model.load_state_dict(saved)
        return model.head.weight.sum() + x

    assert torch.allclose(step(torch.zeros(())), saved["head.weight"].sum())
