"""Records of experiments: what was measured once, where and when, in a file that every page and
test reads.

An experiment is a list of units of work (a seed, a rate, a method on a base). A `Store` measures
those that its file does not hold yet and writes the file after each of them, so a killed command
goes on where it stopped:

    store = Store(path, {"steps": 60, "rows": 8})
    store.measure(({"seed": seed} for seed in range(3)), one_seed)

A finished record lies in outputs/published as <date>-<name>-<device>.json, and
`read_published(name)` reads the newest. `command` is the command line that all experiments share.
They are run from the folder notebooks:

    cd notebooks && ../.venv/bin/python -m experiments.NAME [--json FILE] [--device auto|cpu|cuda]

Footgun: date and environment are those of the first unit. A record that is continued on another
machine, or after the code changed, mixes both and does not say so. Only other settings are refused.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nblib import files, paths, runtime

Unit = dict[str, Any]


class OtherSettings(ValueError):
    """A file that was begun with other settings, said in one sentence."""


def newest(name: str) -> Path:
    """Return the path of the newest published record of this name."""
    found = sorted(_published_folder().glob(f"*-{name}*.json"))
    if not found:
        raise FileNotFoundError(f"name = {name!r}: no such record in {_published_folder()}")
    return found[-1]


def read_published(name: str) -> dict:
    """Return the newest published record of this name."""
    return json.loads(newest(name).read_text(encoding="utf-8"))


class Store:
    """A record in a file, which is written after every unit of work."""

    def __init__(
        self, path: Path, settings: dict[str, Any], *, lists: tuple[str, ...] = ("lines",)
    ):
        """Open the record at `path`, or begin one there.

        `lists` are the names that its results stand under.
        """
        self.path = path
        # as a file gives them back: lists, no tuples
        settings = json.loads(files.to_json(settings))
        stored = files.read_json(path)

        for name, value in settings.items():
            if stored.get(name, value) != value:
                raise OtherSettings(
                    f"{path}: its results have other settings, {name} = {stored[name]} and not "
                    f"{value}; "
                    "name another file"
                )

        begun = {"date": datetime.date.today().isoformat(), "environment": runtime.environment()}
        empty: dict[str, list[dict]] = {name: [] for name in lists}
        self.content: dict[str, Any] = begun | settings | empty | stored

    def holds(self, unit: Unit, *, within: str = "lines") -> bool:
        """Return whether a result has all values of this unit."""
        return any(unit.items() <= line.items() for line in self.content[within])

    def add(self, *lines: dict, to: str = "lines") -> None:
        """Append results, write the file, and print what of them fits on a line."""
        self.content[to].extend(lines)
        self.write()
        for line in lines:
            print(_brief(line), flush=True)

    def measure(
        self, units: Iterable[Unit], of: Callable[[Unit], dict | list[dict]], *, to: str = "lines"
    ) -> dict:
        """Measure by `of` every unit that the file does not hold yet, and return the whole record.

        `of` returns what the unit has as one result or as several; the unit's own values are put in
        front of each. `units` may be a generator that looks at the results so far.
        """
        for unit in units:
            if self.holds(unit, within=to):
                continue
            results = of(unit)
            if isinstance(results, dict):
                results = [results]
            self.add(*(unit | result for result in results), to=to)
        return self.content

    def write(self) -> None:
        """Write the file as a whole: the old one or the new one."""
        files.write(self.path, files.to_json(self.content, indent=1))


def command(
    name: str,
    essay: str,
    measure: Callable[..., dict],
    *,
    words: Callable[[dict], str] | None = None,
    options: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Run an experiment from the command line: `measure(path, machine)` returns the record `name`.

    Until it is whole it lies in outputs/published/unfinished, where the same command finds it on
    any later day. `essay` is the module's docstring, `words` the sentences to print of a record,
    `options` further arguments.
    """
    module = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{module}", description=essay.splitlines()[0]
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="the record, to begin or to go on with"
    )
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: auto"
    )
    for option, details in (options or {}).items():
        parser.add_argument(option, **details)
    arguments = vars(parser.parse_args())
    given, device = arguments.pop("json"), arguments.pop("device")

    try:
        machine = runtime.pick(device)
    except ValueError as error:
        parser.error(str(error))

    device = machine.device.type
    try:
        path = given or _published_folder() / "unfinished" / f"{name}-{device}.json"
        record = measure(path, machine, **arguments)
    except (OtherSettings, files.Unwritable, files.Unreadable) as error:
        parser.error(str(error))

    # Whole now: to its place among the published ones, under the day that it was begun on.
    if given is None:
        whole = _published_folder() / f"{record['date']}-{name}-{device}.json"
        path = path.replace(whole)
    if words is not None:
        print(words(record))
    print(path)


def _published_folder() -> Path:
    return paths.root() / "outputs" / "published"


def _brief(line: dict) -> str:
    """Return the words and numbers of a result, without its lists and tables."""
    parts = []
    for name, value in line.items():
        if isinstance(value, float):
            parts.append(f"{name} {value:.4g}")
        elif isinstance(value, str | int):
            parts.append(f"{name} {value}")
    return ", ".join(parts)
