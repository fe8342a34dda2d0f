"""A disk that forgets what was not flushed: which states may a reader find after the power went?

    for left in power_cut.states(folder, act): ...
    `left` is a copy of the folder as the disk has it

`act()` runs once per crash point: power goes at each rename and each flush in turn, and once after
it has returned (then `left.done` is true, and what it promised must be there). A file whose content
was not flushed loses its second half. A rename whose folder was not flushed may be lost or kept, so
both are tried. A deletion always lasts.

Footgun: only what goes through `os.fsync` and `os.replace` counts as flushed and renamed.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

DEAD = 999_999_999  # no process has this number


class Left(NamedTuple):
    folder: Path
    done: bool


class PowerCut(BaseException):
    pass


def states(folder: Path, act: Callable[[], object]) -> Iterator[Left]:
    for at in range(10_000):
        for lost in (False, True):
            work = folder.with_name(f"{folder.name}-{at}-{lost}")
            shutil.copytree(folder, work, symlinks=True)
            shutil.move(folder, folder.with_name("kept-away"))
            os.rename(work, folder)
            done = _crash(folder, act, at, lost)
            os.rename(folder, work)
            shutil.move(folder.with_name("kept-away"), folder)
            yield Left(work, done)
            shutil.rmtree(work)
        if done:
            return
    raise AssertionError("it never ended")


def _crash(folder: Path, act: Callable[[], object], at: int, lost: bool) -> bool:  # noqa: C901
    """Return whether `act` returned; the folder is then as the disk has it."""
    flushed, renamed, count = {}, [], 0  # inode -> its stamp; (from, to, what was there)
    fsync, replace, aside = os.fsync, os.replace, folder.with_name("aside")
    aside.mkdir()

    def event() -> None:
        nonlocal count
        if count == at:
            raise PowerCut
        count += 1

    def flush(descriptor: int) -> None:
        event()
        fsync(descriptor)
        facts, path = os.fstat(descriptor), Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed[facts.st_ino] = _stamp(path)
        renamed[:] = [each for each in renamed if each[1].parent != path]

    def rename(source, target) -> None:
        event()
        before = None
        if os.path.lexists(target) and folder in Path(target).parents:
            before = aside / str(len(list(aside.iterdir())))
            shutil.copytree(target, before) if Path(target).is_dir() else shutil.copy2(
                target, before
            )
        replace(source, target)
        if folder in Path(target).parents:
            renamed.append((Path(source), Path(target), before))

    known = {path.stat().st_ino: _stamp(path) for path in folder.rglob("*") if path.is_file()}
    done = False
    with mock.patch("os.fsync", flush), mock.patch("os.replace", rename):
        try:
            act()
            done = True
        except PowerCut:
            pass
    for path in [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]:
        durable = (known | flushed).get(path.stat().st_ino)
        if durable != _stamp(path):
            os.truncate(path, path.stat().st_size // 2)
    for source, target, before in reversed(renamed) if lost else []:
        if os.path.lexists(target):
            None if os.path.lexists(source) else replace(target, source)
        if before is not None:
            shutil.rmtree(target, ignore_errors=True)
            os.rename(before, target)
    shutil.rmtree(aside)
    for path in folder.rglob(f".*.{os.getpid()}@*"):  # after the power came back no process lives
        path.rename(path.with_name(path.name.replace(f".{os.getpid()}@", f".{DEAD}@")))
    return done


def _stamp(path: Path) -> tuple:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns
