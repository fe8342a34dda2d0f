"""What a forward prints, logs or writes is told once, by the program: a replay tells nothing."""

import io
import logging
import threading
import warnings
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from train_doctor import replays, unheard

WORDS = 32


class Model(nn.Module):
    def __init__(self, told):
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, WORDS)
        self.told = told

    def forward(self, ids):
        self.told("a call", ids.shape)
        return self.head(self.mix(self.table(ids))[0])


class Memory:
    """Of its own, with a method of the name that files have."""

    def __init__(self):
        self.kept = []

    def write(self, what, shape):
        self.kept.append(shape)


def printed(file):
    return lambda what, shape: print(what, tuple(shape))


def logged(file):
    return lambda what, shape: logging.getLogger("a model").warning("%s %s", what, tuple(shape))


def warned(file):
    return lambda what, shape: warnings.warn(f"{what} {shape}", stacklevel=1)


def in_a_file(file):
    return lambda what, shape: file.write(what)


def by_a_helper(file):
    def note(what):
        file.writelines([what])

    return lambda what, shape: note(what)


def in_a_memory(file):
    memory = Memory()
    return lambda what, shape: memory.write(what, shape)


def train(told, watch=nullcontext):
    torch.manual_seed(0)
    file = io.StringIO()
    model = Model(told(file))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with watch() as report:
        for _ in range(6):
            ids = (torch.randint(WORDS, (4, 1)) + torch.arange(9)) % WORDS
            optimizer.zero_grad()
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    return file.getvalue(), report


@pytest.mark.parametrize("told", [printed, logged, warned, in_a_file, by_a_helper, in_a_memory])
def test_what_it_tells_is_told_once(told, capsys, caplog, recwarn):
    def heard(watch=nullcontext):
        caplog.clear(), recwarn.clear()
        file, report = train(told, watch)
        ours = [str(w.message) for w in recwarn if w.filename == __file__]
        return (file, capsys.readouterr().out, caplog.messages.copy(), ours), report

    warnings.simplefilter("always")
    alone, _ = heard()
    with mock.patch.object(replays, "again", wraps=replays.again) as again:
        watched, report = heard(lambda: doctor.watch(steps=4, say=False))
    assert watched == alone and (told is in_a_memory or any(alone))
    assert again.call_count and not report.faults, report.faults
    assert (report.verdicts["F11"].state == "OK") == (told not in (in_a_file, by_a_helper)), report.verdicts["F11"]


def test_other_threads_are_heard(capsys):
    with unheard.silence():
        print("a replay")
        other = threading.Thread(target=print, args=("another thread",))
        other.start()
        other.join()
    print("afterwards")
    assert capsys.readouterr().out == "another thread\nafterwards\n"


def test_what_only_other_methods_write_is_no_reason():
    class Saves(Model):
        def export(self, path):
            with open(path, "w") as file:
                file.write(str(self))

    ids = torch.zeros(1, 2, dtype=torch.long)
    assert replays.again(Saves(lambda what, shape: None), (ids,), {}).shape == (1, 2, WORDS)


def test_what_a_hook_writes():
    file, model = io.StringIO(), Model(lambda what, shape: None)

    def to_file(module, args, out):
        file.write("a hook")

    model.head.register_forward_hook(to_file)
    with pytest.raises(RuntimeError, match="write a second time"):
        replays.again(model, (torch.zeros(1, 2, dtype=torch.long),), {})
    assert not file.getvalue()
