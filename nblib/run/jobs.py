"""What will run: names, profile, files and assignments turned into jobs, before anything is started or written.

A job's key is a hash of what decides its result: the notebook's code, its parameters (with them the kind of device
it asks for), the files they name, the modules of this project that it reaches by import (closure.py), and the versions
of Python (whose documentation is the corpus), torch and the libraries around it. Two runs with one key would give one
result, so a done run is not repeated and an interrupted one can be continued where it stopped. The machine that plans
is in no key: a batch planned on a login node is the same batch where it runs.

Footgun: `device=auto` is one key on every machine, so a run that is done on a CPU is skipped where there is a card;
ask for `device=cuda`. A new message of an error repeats nothing either: a stored output may show the old one.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nblib import closure, paths
from nblib.run import parameters
from nblib.run.parameters import ParameterError

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "tokenizers", "accelerate")


class Job(NamedTuple):
    notebook: str
    path: Path
    values: dict[str, Any]  # what differs from the declaration, injected as a cell
    parameters: dict[str, Any]  # all of them
    key: str
    resume: str  # the command that continues this job
    label: str = ""  # which of several jobs of one notebook, said when it starts


def names() -> list[str]:
    return sorted(path.stem for path in paths.notebooks().glob("[!.]*.ipynb"))


def resolve(name: str) -> str:
    """`00`, `00_setup`, `00_setup.ipynb` or `notebooks/00_setup.ipynb`."""
    known, stem = names(), Path(name).name.removesuffix(".ipynb")
    if "/" in name and Path(name).resolve().parent != paths.notebooks():
        raise ParameterError(f"{name} is not in {paths.short(paths.notebooks())}.")
    starts = [candidate for candidate in known if candidate.startswith(f"{stem}_")]
    if stem in known:
        return stem
    if len(starts) != 1:
        raise ParameterError(f"{parameters.unknown('notebook', stem, starts or known)}".capitalize())
    return starts[0]


def plan(
    names: Sequence[str],
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    files: Sequence[str] = (),
    profile_optional: bool = False,
) -> list[Job]:
    """Jobs in order; later sources win: profile, then files, then `name=value`. ParameterError lists every problem."""
    jobs, problems = [], []
    for name in names:
        try:
            notebook = resolve(name)
            if notebook not in [job.notebook for job in jobs]:
                jobs.append(_job(notebook, profile, overrides, files, profile_optional))
        except ParameterError as error:
            problems += [line for line in str(error).splitlines() if line not in problems]
    known = {each for job in jobs for each in profiles_of(job.notebook)}
    if profile is not None and profile_optional and profile not in known:
        problems.append(parameters.unknown("profile", profile, known))
    if problems:
        raise ParameterError("\n".join(problems))
    return jobs


def variants(notebook: str, assignments: Sequence[Sequence[str]], *, profile: str | None = None) -> list[Job]:
    """A job of the notebook for each list of `name=value`, on top of the profile."""
    return [_job(notebook, profile, each, (), False) for each in assignments]


def profile_file(notebook: str, profile: str) -> Path:
    return paths.profiles() / f"{notebook}.{profile}.yaml"


def profiles_of(notebook: str) -> list[str]:
    return [path.name[len(notebook) + 1 : -len(".yaml")] for path in _files_of(notebook) if not is_sweep(path)]


def sweeps_of(notebook: str) -> list[Path]:
    return [path for path in _files_of(notebook) if is_sweep(path)]


def is_sweep(file: Path) -> bool:
    """`<notebook>.sweep.yaml` and `<notebook>.<name>.sweep.yaml` hold grids (sweep.py) and are no profiles."""
    return file.name.endswith(".sweep.yaml")


def _files_of(notebook: str) -> list[Path]:
    return sorted(paths.profiles().glob(f"{notebook}.*.yaml"))


def gpus() -> list[tuple[str, str]]:
    """(id, name) of the visible NVIDIA cards, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    cards = dict(line.split(", ", 1) for line in listing.splitlines() if ", " in line)
    chosen = cards if visible is None else [each for each in visible.split(",") if each not in ("", "-1")]
    return [(each, cards.get(each, next(iter(cards.values()), "GPU"))) for each in chosen]


def _job(name: str, profile: str | None, overrides: Any, files: Any, profile_optional: bool) -> Job:
    path = paths.notebooks() / f"{name}.ipynb"
    known = parameters.declared(path)
    sources, values = list(map(Path, files)), {}
    if profile is not None:
        if profile in profiles_of(name):
            sources.insert(0, profile_file(name, profile))
        elif profile_optional:
            print(f"[{name}] has no profile '{profile}' and runs on its defaults", flush=True)
            profile = None
        else:
            raise ParameterError(f"{name}: {parameters.unknown('profile', profile, profiles_of(name))}")
    for source in sources:
        values |= parameters.check(known, parameters.load_yaml(source), paths.short(source))
    for text in overrides:
        values |= parameters.check(known, dict([parameters.parse_assignment(text, known)]), f"-p {text}")
    everything = {name: parameter.default for name, parameter in known.items()} | values
    resume = ["nblib", "run", name, *(["--profile", profile] if profile else [])]
    for option, given in (("-f", files), ("-p", overrides)):
        resume += [part for each in given for part in (option, str(each))]
    return Job(name, path, values, everything, _key(path, everything), shlex.join(resume))


def _key(path: Path, values: dict[str, Any]) -> str:
    code = cells(path)
    texts = [text for value in values.values() for text in (value if isinstance(value, list) else [value])]
    inputs = [_stamp(paths.notebooks() / text) for text in texts if isinstance(text, str) and text]
    try:
        parts = [[closure.cell(source).does for source in code], values, inputs, closure.digest(code), _versions()]
    except ValueError as error:  # a module that does not parse
        raise ParameterError(f"{path.stem} cannot be planned: {error}.") from None
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def cells(path: Path) -> list[str]:
    """The code cells of a notebook."""
    return [cell["source"] for cell in parameters.cells(path) if cell["cell_type"] == "code"]


def _stamp(path: Path) -> list:
    """Size and time of a file that a parameter names, or of the files directly in a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


@functools.cache
def _versions() -> list[str]:
    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "absent"

    return [platform.python_version(), *map(version, LIBRARIES)]
