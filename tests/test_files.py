"""A file is the old one or the new one; what was written is on the device; a lock has one holder at
a time.
"""

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import time

import numpy
import pytest
import torch
from bit_flips import flips

from nblib import files

DEAD = 999_999_999  # no process has this number


def test_the_old_content_stays_when_the_block_fails(tmp_path):
    path = tmp_path / "a.txt"
    files.write(path, "old")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as partial:
        partial.write_text("half of the n")
        assert path.read_text() == "old"  # a reader sees nothing of it yet
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    files.write(path, b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "deep" / "model"
    for names in ("ab", "bc"):
        with files.replacing(folder) as partial:
            partial.mkdir()
            for name in names:
                (partial / name).write_text(names)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"b": "bc", "c": "bc"}


def test_killed_while_writing_leaves_the_old_content_and_the_next_writer_succeeds(tmp_path):
    path = tmp_path / "run.json"
    files.write(path, "old")
    code = f"""import os
from pathlib import Path
from nblib import files
with files.replacing(Path({str(path)!r})) as partial:
    partial.write_text("half")
    os.kill(os.getpid(), 9)"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    files.remove_partials(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert (
        subprocess.run([sys.executable, "-c", code]).returncode == -9
        and len(list(tmp_path.iterdir())) == 2
    )
    files.write(path, "old")  # whoever writes it again sweeps too
    assert list(tmp_path.iterdir()) == [path]
    # of a process that had our number, as in a container that starts again
    left = tmp_path / f".run.json.{os.getpid()}@{files.HOST}.partial"
    left.mkdir()
    files.write(path, "new")
    assert path.read_text() == "new" and not left.exists()


def test_only_what_dead_processes_left_is_removed(tmp_path):
    for name in (
        f".step-1.{DEAD}.partial",
        f".step-1.{os.getpid()}.partial",
        f".other.{DEAD}.partial",
        "step-1",
    ):
        (tmp_path / name).write_text("")
    files.remove_partials(tmp_path, "step-*")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [f".step-1.{os.getpid()}.partial", f".other.{DEAD}.partial", "step-1"]
    )


def test_content_is_on_the_device_before_the_name_and_the_name_before_the_return(
    tmp_path, monkeypatch
):
    order = []
    fsync, replace = os.fsync, os.replace

    def log_fsync(descriptor):
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("rename"), replace(*names)))
    with files.replacing(tmp_path / "model") as partial:
        (partial / "inside").mkdir(parents=True)
        (partial / "inside" / "weights").write_text("1")
    at = order.index("rename")
    assert {"weights", "inside", partial.name} <= set(order[:at]) and order[at + 1 :] == [
        tmp_path.name
    ]


@pytest.mark.parametrize("place", ["a_file/run.json", "/proc/nblib/run.json"])
def test_no_place_to_write_is_one_sentence(tmp_path, place):
    (tmp_path / "a_file").write_text("earlier")
    with pytest.raises(files.Unwritable, match=f"^Cannot write {tmp_path / place}: .*[.]$"):
        files.write(tmp_path / place, "x")
    with pytest.raises(files.Unwritable, match="^Cannot create the folder "):
        files.make_folder((tmp_path / place).parent)
    assert (tmp_path / "a_file").read_text() == "earlier"


def test_a_lock_has_one_holder_and_goes_with_its_process(tmp_path):
    code = f"""import time
from pathlib import Path
from nblib import files
with files.locked(Path({str(tmp_path / "x" / "lock")!r}), waiting=""):
    print("mine", flush=True)
    time.sleep(60)"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "mine\n"
        assert files.claim(tmp_path / "x" / "lock") is None
    finally:
        process.kill()
        process.wait()
    descriptor = files.claim(tmp_path / "x" / "lock")
    assert descriptor is not None and files.claim(tmp_path / "x" / "lock") is None
    os.close(descriptor)


def test_who_waits_for_a_lock_says_so(tmp_path, capfd):
    code = f"""from pathlib import Path
from nblib import files
with files.locked(Path({str(tmp_path / "lock")!r}), waiting="waiting for the other"):
    print("mine", flush=True)"""
    with files.locked(tmp_path / "lock", waiting="nobody is there to wait for"):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert select.select([process.stdout], [], [], 30)[0], "it waits without a word"
        assert process.stdout.readline() == "waiting for the other\n"
    assert process.communicate(timeout=30)[0] == "mine\n"
    assert capfd.readouterr().out == ""


def test_json_stays_json():
    values = {
        "loss": math.nan,
        "most": math.inf,
        "least": -math.inf,
        3: (1, True, None),
        "t": torch.tensor([0.5]),
    }
    text = files.to_json(values | {"n": numpy.float64(2.0), "é": files.Path("a")})
    assert json.loads(text, parse_constant=pytest.fail) == {
        "loss": "nan", "most": "inf", "least": "-inf", "3": [1, True, None], "t": [0.5], "n": 2.0, "é": "a",
    }  # fmt: skip
    assert math.isnan(float(json.loads(text)["loss"])) and "é" in text


def test_facts_are_added_to_what_is_there(tmp_path):
    path = tmp_path / "result.json"
    assert files.read_json(path) == {}
    files.merge(path, {"loss": 1.0, "tokens": 7})
    files.merge(path, {"loss": 2.0})
    assert files.read_json(path) == {"loss": 2.0, "tokens": 7}


BAD_JSON = {
    "torn": b'{"loss": 1',
    "a list": b"[1]",
    "empty": b"",
    "bytes": b"\xff\xfe{}",
    "too deep": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "a huge number": b'{"a": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("content", BAD_JSON.values(), ids=BAD_JSON)
def test_a_damaged_file_is_one_sentence_and_merging_sets_it_aside(tmp_path, content, capsys):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(files.Unreadable, match=f"^cannot read {path}: .+") as caught:
        files.read_json(path)
    assert "\n" not in str(caught.value)
    for _ in range(3):
        path.write_bytes(content)
        files.merge(path, {"status": "done"})
        assert files.read_json(path) == {"status": "done"}
    assert [p.read_bytes() for p in sorted(tmp_path.glob("damaged-*"))] == [content] * 3
    assert capsys.readouterr().out.count("is set aside as") == 3


def test_what_is_no_file_is_not_read(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(files.Unreadable, match="it is no file"):
            files.read_json(tmp_path / name)


def test_no_write_follows_a_planted_link(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "store"
    victim.write_text("precious")
    folder.mkdir()
    (folder / f".run.json.{os.getpid()}@{files.HOST}.partial").symlink_to(victim)
    files.write(folder / "run.json", "new")
    (folder / "link.json").symlink_to(victim)
    files.write(folder / "link.json", "new")
    (folder / "lock").symlink_to(victim)
    with (
        pytest.raises(files.Unwritable, match="Cannot lock"),
        files.locked(folder / "lock", waiting=""),
    ):
        pass
    (tmp_path / "victims").mkdir()
    (tmp_path / "victims" / "file").write_text("precious")
    (folder / "model").symlink_to(tmp_path / "victims")
    with files.replacing(folder / "model") as partial:
        partial.mkdir()
    assert victim.read_text() == (tmp_path / "victims" / "file").read_text() == "precious"
    assert (folder / "link.json").read_text() == "new" and not (folder / "model").is_symlink()


def test_a_living_process_with_the_number_of_a_dead_one_keeps_it_for_a_day_at_most(tmp_path):
    old, new = (tmp_path / f".{name}.{os.getpid()}.partial" for name in ("old", "new"))
    for partial, age in ((old, files.DAY + 60), (new, files.DAY - 60)):
        partial.mkdir()
        os.utime(partial, (time.time() - age,) * 2)
    files.remove_partials(tmp_path)
    assert list(tmp_path.iterdir()) == [new]


def test_what_another_machine_writes_is_swept_by_nobody_else_for_a_day(tmp_path):
    new, old = (tmp_path / f".run.json.{DEAD}@{host}.partial" for host in ("another", "a-third"))
    for partial in (new, old):
        partial.write_text("half")
    os.utime(old, (0, 0))
    files.write(tmp_path / "run.json", "whole")
    assert sorted(tmp_path.iterdir()) == [new, tmp_path / "run.json"]


KILLED = """import os
from pathlib import Path
from nblib import files
calls, replace = [], os.replace
def die(source, target):
    calls.append(target)
    if len(calls) == NUMBER:
        os.kill(os.getpid(), 9)
    replace(source, target)
with files.replacing(Path(FOLDER)) as partial:
    partial.mkdir()
    (partial / "a").write_text("new")
    os.replace = die"""


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("next_step", ["sweep", "verify", "write"])
def test_a_folder_that_was_to_be_replaced_is_there_again_after_a_kill(tmp_path, number, next_step):
    """Killed before and after the old one lost its name."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_text("old")
    files.seal(folder)
    os.utime(folder, (0, 0))  # it was written long ago
    code = KILLED.replace("NUMBER", str(number)).replace("FOLDER", repr(str(folder)))
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert folder.exists() == (number == 1)
    if next_step == "sweep":
        files.remove_partials(tmp_path)
    elif next_step == "verify":
        assert files.verify(folder) == {"a"}
    else:
        with pytest.raises(KeyboardInterrupt), files.replacing(folder):
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [folder] and (folder / "a").read_text() == "old"


def test_a_folder_that_is_being_replaced_is_left_to_its_writer(tmp_path):
    left = tmp_path / f".model.{os.getpid()}@{files.HOST}.replaced"
    left.mkdir()
    files.remove_partials(tmp_path)
    assert list(tmp_path.iterdir()) == [left]


def test_an_error_between_the_two_names_leaves_the_old_folder(tmp_path, monkeypatch):
    folder, replace = tmp_path / "model", os.replace
    folder.mkdir()

    def interrupted(source, target):
        if str(source).endswith(".partial"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), files.replacing(folder) as partial:
        partial.mkdir()
    assert list(tmp_path.iterdir()) == [folder]


@pytest.fixture
def sealed(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(range(256)))
    (folder / "config").write_text("{}")
    files.seal(folder)
    return folder


def test_a_sealed_folder_is_whole(sealed):
    files.verify(sealed)
    files.verify(sealed, {"weights", "config"})
    (sealed / "beside").write_text("what nobody asks for")
    files.verify(sealed, {"weights", "config"})


def test_every_flipped_bit_of_a_sealed_folder_is_noticed(sealed):
    for file in ("weights", "config", files.MANIFEST):
        whole = (sealed / file).read_bytes()
        for hurt in flips(sealed / file):
            with contextlib.suppress(files.Unreadable):
                files.verify(sealed, {"weights", "config"})
                # whitespace, or a digit of the layout: what it says is the same
                assert file == files.MANIFEST and json.loads(hurt) == json.loads(whole)


@pytest.mark.parametrize(
    "manifest",
    [None, [], {}, {"weights": "x"}, {"weights": 1, "config": None}]
    + [
        {"weights": "x", "config": "x", other: "x"}
        for other in ("more", "../victim", "/etc/hostname", "..")
    ],
)
def test_a_manifest_that_names_other_files_verifies_nothing(sealed, manifest):
    (sealed / files.MANIFEST).write_text(json.dumps({"sha256": manifest}))
    with pytest.raises(files.Unreadable, match="is damaged"):
        files.verify(sealed, {"weights", "config"})
    with pytest.raises(files.Unreadable, match="is damaged"):
        files.verify(sealed)


def test_a_hash_is_of_the_content(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert (
        files.sha256(tmp_path / "a")
        == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
