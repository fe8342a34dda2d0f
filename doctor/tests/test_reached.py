"""What a forward changes beside its tensors stands as it was after each replay: a program that counts its calls, or
draws from a generator of its own, trains on to the same bits."""

import argparse
import enum
import functools
import io
import itertools
import multiprocessing
import queue
import random
import threading
import types
import weakref
from collections import OrderedDict, deque
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import RandomSampler

import train_doctor as doctor
from train_doctor import reached, replays
from train_doctor.evidence import Call

WORDS, COUNT = 32, 0


class Model(nn.Module):
    """Whatever `change` does to the hidden layer."""

    calls = 0

    def __init__(self, change):
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, WORDS)
        self.change = change

    def forward(self, ids):
        return self.head(self.change(self, self.mix(self.table(ids))[0]))


class Counter:
    def __init__(self, generator=None):
        self.count, self.generator = 0, generator

    def __call__(self, model=None, h=None):
        self.count += 1
        noise = 0.0 if self.generator is None else torch.rand((), generator=self.generator)
        return self.count + noise if h is None else h / (1 + 0.1 * self.count + noise)


def a_global(model, h):
    global COUNT
    COUNT += 1
    return h / (1 + 0.1 * COUNT)


def by_default(model, h, state=[0]):  # noqa: B006
    state[0] += 1
    return h / (1 + 0.1 * state[0])


def of_the_class(model, h):
    Model.calls += 1
    return h / (1 + 0.1 * Model.calls)


FOLDER, SETTINGS = types.ModuleType("folder"), types.ModuleType("folder.settings")
FOLDER.__path__, SETTINGS.__file__, FOLDER.settings = [str(Path(__file__).parent)], __file__, SETTINGS


def of_a_file_of_settings(model, h):
    FOLDER.settings.step += 1
    return h / (1 + 0.1 * FOLDER.settings.step)


def of_a_class_that_it_names():
    class Schedule:
        step = 0

    def change(model, h):
        Schedule.step += 1
        return h / (1 + 0.1 * Schedule.step)

    return change


def of_a_function_of_its_own():
    class Steep(torch.autograd.Function):
        slope = 1.0

        @staticmethod
        def forward(ctx, x):
            Steep.slope *= 1.1
            return x / Steep.slope

        @staticmethod
        def backward(ctx, gradient):
            return gradient / Steep.slope

    return lambda model, h: Steep.apply(h)


def of_the_function():
    def change(model, h):
        change.calls = getattr(change, "calls", 0) + 1
        return h / (1 + 0.1 * change.calls)

    return change


def of_this_thread():
    local = threading.local()
    local.state = 0

    def change(model, h):
        local.state += 1
        return h / (1 + 0.1 * local.state)

    return change


def nonlocal_number():
    count = 0

    def change(model, h):
        nonlocal count
        count += 1
        return h / (1 + 0.1 * count)

    return change


def in_a_container(state, step):
    return lambda model, h: h / (1 + 0.1 * step(state))


def of_the_module(model, h):
    model.late = getattr(model, "late", 0) + 1  # made by the first call
    return h / (1 + 0.1 * model.late)


def drawn(draw):
    return lambda model, h: h * (1 + 0.1 * draw())


def hooked():
    seen = []

    def change(model, h):
        if not hasattr(model, "hook"):
            model.hook = model.table.register_forward_hook(lambda m, args, out: seen.append(1))
        return h / (1 + 0.1 * len(seen))

    return change


def added(state):
    state.append(1)
    return len(state)


def counted(state):
    state["n"] = state.get("n", 0) + 1
    return state["n"]


def numbered(state):
    state += 1
    return float(state.sum())


def by_keyword(model, h, *, state={}):  # noqa: B006
    return h / (1 + 0.1 * counted(state))


def raised(settings):
    settings.step += 1
    return settings.step


def inner_settings(outer):
    return raised(outer.inner)


def put(line):
    line.put(1)
    return line.qsize()


def shared(count):
    count.value += 1
    return count.value


def sobol():
    engine = torch.quasirandom.SobolEngine(1, scramble=True, seed=0)
    return drawn(lambda: float(engine.draw(1)))


def sampled():
    sampler = RandomSampler(range(9), generator=torch.Generator().manual_seed(0))
    return drawn(lambda: next(iter(sampler)) / 9)


def partly(state, model, h):
    return h / (1 + 0.1 * counted(state))


def inner(norm):
    return lambda model, h: norm(h.transpose(1, 2)).transpose(1, 2)


@dataclass(slots=True, frozen=True)
class Slotted:
    state: dict

    def __call__(self, model, h):
        return partly(self.state, model, h)


WAYS = {
    "a number around it": nonlocal_number,
    "a number of the file": lambda: a_global,
    "a default": lambda: by_default,
    "the class": lambda: of_the_class,
    "a class that it names": of_a_class_that_it_names,
    "a function of autograd": of_a_function_of_its_own,
    "the function": of_the_function,
    "a file of settings": lambda: of_a_file_of_settings,
    "its thread": of_this_thread,
    "the module": lambda: of_the_module,
    "an object": Counter,
    "an object with slots": lambda: Slotted({}),
    "an object in a list": lambda: in_a_container([Counter()], lambda held: held[0]()),
    "an object in a dict of dicts": lambda: in_a_container({"a": {"b": [Counter()]}}, lambda held: held["a"]["b"][0]()),
    "a method": lambda: Counter().__call__,
    "a list": lambda: in_a_container([], added),
    "a queue": lambda: in_a_container(deque(maxlen=5), added),
    "a dict": lambda: in_a_container({}, counted),
    "a tensor": lambda: in_a_container(torch.zeros(2), numbered),
    "an array": lambda: in_a_container(np.zeros(2), numbered),
    "a partial's dict": lambda: functools.partial(partly, {}),
    "a partial's word": lambda: functools.partial(lambda model, h, state: partly(state, model, h), state={}),
    "an iterator": lambda: in_a_container(iter(range(1000)), next),
    "a count": lambda: in_a_container(itertools.count(), next),
    "a hook": hooked,
    "another module": lambda: inner(nn.BatchNorm1d(8, momentum=0.5, affine=False)),
    "Python's numbers": lambda: drawn(lambda: random.random()),  # by the module's name: a copy of the function is none
    "numpy's numbers": lambda: drawn(lambda: np.random.rand()),
    "numbers of Python of its own": lambda: drawn(random.Random(1).random),
    "numbers of numpy of its own": lambda: drawn(np.random.default_rng(1).random),
    "old numbers of numpy of its own": lambda: drawn(np.random.RandomState(1).rand),
    "numbers of torch of its own": lambda: Counter(torch.Generator().manual_seed(1)),
    "a default by keyword": lambda: by_keyword,
    "numbers of Python by a partial": lambda: drawn(functools.partial(random.Random(1).random)),
    "settings of argparse": lambda: in_a_container(argparse.Namespace(step=0), raised),
    "settings in settings": lambda: in_a_container(
        types.SimpleNamespace(inner=types.SimpleNamespace(step=0)), inner_settings
    ),
    "numbers of Sobol": sobol,
    "a sampler": sampled,
    "a queue of threads": lambda: in_a_container(queue.Queue(), put),
    "a number of processes": lambda: in_a_container(multiprocessing.Value("i", 0), shared),
    "a generator of Python": lambda: in_a_container((n / 10 for n in range(1000)), next),
}


# such a forward is not called again
REFUSED = {"a generator of Python", "a queue of threads", "a number of processes"}


def train(way: str, watch=nullcontext):
    global COUNT
    by_keyword.__kwdefaults__["state"].clear()
    COUNT, Model.calls, by_default.__defaults__[0][0], SETTINGS.step = 0, 0, 0, 0
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    model = Model(WAYS[way]())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with watch() as report:
        for _ in range(6):
            ids = (torch.randint(WORDS, (4, 1)) + torch.arange(9)) % WORDS
            optimizer.zero_grad()
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    numbers = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
    return [numbers, *model.parameters()], report


@pytest.mark.parametrize("way", WAYS)
def test_a_replay_leaves_it_as_it_was(way):
    alone, _ = train(way)
    with mock.patch.object(replays, "again", wraps=replays.again) as again:
        watched, report = train(way, lambda: doctor.watch(steps=4, say=False))
    assert again.call_count and not report.faults, report.faults
    assert all(map(torch.equal, alone, watched))
    if way != "another module":  # statistics over all places: the model does see the future
        assert (report.verdicts["F11"].state == "OK") == (way not in REFUSED), report.verdicts["F11"]


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.rand(), lambda: float(torch.rand(()))])
def test_two_answers_of_one_replay_draw_the_same(draw):
    """An adapter without effect has none, whatever is drawn between its two answers."""
    model = Model(drawn(draw))
    model.lora_A = nn.Parameter(torch.ones(2))
    ids = torch.zeros(1, 2, dtype=torch.long)
    call = Call(round=0, role="model", grad=True, inference=False, training=True, autocast=None, args=(ids,), kwargs={})
    call.module = weakref.ref(model)
    assert replays._effect(call) == 0


def test_what_is_too_large_is_not_copied(monkeypatch):
    monkeypatch.setattr(reached, "ROOM", 100)
    large, small = torch.zeros(100), torch.zeros(2)

    def change(model, h):
        large[0] = small[0] = 1
        return h

    replays.again(Model(change), (torch.zeros(1, 2, dtype=torch.long),), {})
    assert large[0] == 1 and small[0] == 0


# ------------------------------------------------------------------------------------------------ one call
class Kept(Model):
    """Each way leaves something behind; `left` tells it."""

    log, seen = [], 0

    def __init__(self):
        super().__init__(lambda model, h: h)
        self.file = io.StringIO("a line")  # an iterator that is left as it is

    @property
    def asked(self):
        ASKED.append(1)
        return 1.0

    @staticmethod
    def counted(h):
        COUNTED.append(1)
        return h

    def forward(self, ids):
        h = self.counted(super().forward(ids)) * self.asked
        [MADE.append(n) for n in range(2)]
        Kept.log.append(1)
        self.late = h
        self.table.weight.requires_grad_(False)
        return h


ASKED, COUNTED, MADE, HOOKED, LONG = [], [], [], [], [0] * (reached.ITEMS + 1)


def test_a_call_leaves_nothing():
    model = Kept()
    model.head.register_forward_hook(lambda m, args, out: HOOKED.append(len(LONG)))
    replays.again(model, (torch.zeros(1, 2, dtype=torch.long),), {})
    assert not (ASKED or COUNTED or MADE or HOOKED or Kept.log or hasattr(model, "late"))
    assert all(p.requires_grad for p in model.parameters())


def test_a_module_that_it_only_knows():
    norm = nn.Sequential(nn.BatchNorm1d(8))
    before = norm[0].running_mean.clone()
    model = Model(inner(norm))
    replays.again(model, (torch.zeros(1, 2, dtype=torch.long),), {})
    assert torch.equal(norm[0].running_mean, before) and int(norm[0].num_batches_tracked) == 0


def test_a_long_list_is_copied_but_not_what_is_in_it():
    held, many = [[]] * (reached.ITEMS + 1), dict.fromkeys(range(reached.ITEMS + 1), [])

    def change(model, h):
        held.append(1), many.update(new=1), held[0].append(1), many[0].append(1)
        return h

    replays.again(Model(change), (torch.zeros(1, 2, dtype=torch.long),), {})
    assert len(held) == len(many) == reached.ITEMS + 1 and held[0] == many[0] == [1]


def test_what_is_not_there_yet():
    def change(model, h):
        return h if model.training else later(h)

    model = Model(change)
    replays.again(model, (torch.zeros(1, 2, dtype=torch.long),), {})
    later = abs
    assert later(-1) == 1 and change.__closure__[0].cell_contents is abs


def test_a_descriptor_of_a_class_is_not_called(monkeypatch):
    class Raises:
        def __get__(self, one, kind=None):
            raise RuntimeError("asked")

    monkeypatch.setattr(Model, "word", Raises(), raising=False)
    replays.again(Model(lambda m, h: h), (torch.zeros(1, 2, dtype=torch.long),), {})


def test_an_endless_chain_ends(monkeypatch):
    class Link:
        def __init__(self, inner):
            self.inner, self.count = inner, 0

    link = Link(None)
    for _ in range(50):
        link = Link(link)
    monkeypatch.setattr(reached, "LIMIT", 20)
    model = Model(lambda m, h: h)
    model.link = link
    assert len(reached._Found(model).owners) < 40


class Frozen(type):
    def __setattr__(cls, name, value):
        raise AttributeError("not to be changed")


class Settings(metaclass=Frozen):
    sizes, words = [1, 2], {"a": [1]}


class Phase(enum.IntEnum):
    FIRST, SECOND = 1, 2


def test_a_class_that_is_frozen():
    sizes = Settings.sizes

    def change(model, h):
        Settings.sizes.append(len(Settings.words["a"]) + Phase.SECOND)
        return h

    replays.again(Model(change), (torch.zeros(1, 2, dtype=torch.long),), {})
    assert Settings.sizes is sizes and sizes == [1, 2] and list(Phase) == [Phase(1), Phase(2)]


class Locked(OrderedDict):
    """As the outputs of transformers."""

    def update(self, *args, **kwargs):
        raise Exception("not with this one")


def test_what_cannot_be_written_to_and_what_two_know():
    locked, features = Locked(out=torch.zeros(2)), []

    def change(model, h):
        model.features.append(h)
        assert len(features) == 1 and features[0] is h
        return h + locked["out"].sum()

    model = Model(change)
    model.features, model.graph = features, torch.eye(3).to_sparse()
    replays.again(model, (torch.zeros(1, 2, dtype=torch.long),), {})
    assert not features and model.features is features


def test_of_a_long_list_only_the_beginning_is_looked_at():
    model = Model(lambda m, h: h)
    model.held = [Counter() for _ in range(2 * reached.LOOKED)]
    assert len(reached._Found(model).owners) < 1.1 * reached.LOOKED
    model.held = [[Counter() for _ in range(100)] for _ in range(100)]
    assert len(reached._Found(model).owners) < 1.1 * reached.LOOKED


def test_of_many_lists_only_the_first_are_copied_with_what_is_in_them(monkeypatch):
    monkeypatch.setattr(reached, "ALL_ITEMS", 25)
    lists = [[[] for _ in range(10)] for _ in range(3)]
    copier = reached.Copier()
    twins = [copier(x) for x in lists]
    assert all(twin is not x and twin == x for twin, x in zip(twins, lists))
    assert [twin[0] is x[0] for twin, x in zip(twins, lists)] == [False, False, True]


def test_an_object_with_a_lock_is_left_alone():
    """Other threads use it meanwhile: what they write must not be put back."""
    event = threading.Event()
    model = Model(lambda m, h: h if event.set() is None else h)
    replays.again(model, (torch.zeros(1, 2, dtype=torch.long),), {})
    assert event.is_set()


class Asked(dict):
    count = 0

    def values(self):
        Asked.count += 1
        return super().values()


def test_of_dicts_in_dicts_the_first_are_looked_at(monkeypatch):
    """So many in all, not of each: a thousand thousands would take long."""
    monkeypatch.setattr(reached, "LOOKED", 20)
    assert not list(reached._inside(Asked({n: Asked({m: Asked() for m in range(20)}) for n in range(20)})))
    assert Asked.count <= 21
