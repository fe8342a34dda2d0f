"""What a forward prints, logs or writes is told once, by the program: a replay tells nothing."""

import functools
import io
import logging
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import loopdoctor as doctor
from loopdoctor import replays, unheard

WORDS = 32


class Model(nn.Module):
    def __init__(self, told):
        super().__init__()
        self.table, self.mix, self.head = (
            nn.Embedding(WORDS, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, WORDS),
        )
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


class Tee(Memory):
    """Its own method hands on to that of the file."""

    def __init__(self, file):
        self.file = file

    def write(self, what):
        self.file.write(what)


def by_a_tee(file):
    tee = Tee(file)
    return lambda what, shape: tee.write(what)


def under_another_name(file):
    def note(what, shape):
        tell(what)

    tell = file.write
    return note


loud = functools.partial(print, flush=True)


def printed_by_a_partial(file):
    return lambda what, shape: loud(what, tuple(shape))


def printed_by_what_it_was_given(file):
    def note(what, shape, log=print):
        log(what, tuple(shape))

    return note


def in_a_data_base(file):
    class Base:
        execute = staticmethod(file.write)

    base = Base()
    return lambda what, shape: base.execute(what)


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


NOT_AGAIN = [in_a_file, by_a_helper, by_a_tee, under_another_name, in_a_data_base]
HEARD = [printed, logged, warned, in_a_memory, printed_by_a_partial, printed_by_what_it_was_given]


@pytest.mark.parametrize("told", NOT_AGAIN + HEARD)
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
    assert (report.verdicts["F11"].state == "OK") == (told not in NOT_AGAIN), report.verdicts["F11"]


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


@pytest.mark.parametrize("held", [lambda hook: hook, functools.partial])
def test_what_a_hook_writes(held):
    file, model = io.StringIO(), Model(lambda what, shape: None)

    def to_file(module, args, out):
        file.write("a hook")

    model.head.register_forward_hook(held(to_file))
    with pytest.raises(RuntimeError, match="write a second time"):
        replays.again(model, (torch.zeros(1, 2, dtype=torch.long),), {})
    assert not file.getvalue()


@pytest.mark.parametrize(
    "told",
    [
        lambda path: np.savez(path / "a.npz", np.zeros(2)),
        lambda path: (path / "a.txt").write_text("a call"),
        lambda path: (path / "a.bin").write_bytes(b"a call"),
    ],
)
def test_a_file_that_is_opened_ends_a_replay(told, tmp_path):
    model = Model(lambda what, shape: told(tmp_path))
    with pytest.raises(RuntimeError, match="a second time"):
        replays.again(model, (torch.zeros(1, 2, dtype=torch.long),), {})
    assert not list(tmp_path.iterdir())
    told(tmp_path)
    assert list(tmp_path.iterdir())


def test_a_file_is_read_in_a_replay_and_written_by_others(tmp_path):
    path = tmp_path / "a.txt"
    with unheard.silence():
        other = threading.Thread(target=path.write_text, args=("another thread",))
        other.start()
        other.join()
        assert Path(path).read_text() == "another thread"
