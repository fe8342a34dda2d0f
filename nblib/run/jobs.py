"""What will run: names, profile, files and assignments turned into jobs, before anything is started or written.

A job's `inputs` are what decides its result, each with its value or a short hash: the notebook's code, its parameters
(with them the kind of device it asks for), the files and models they name (inputs.py), the modules of this project that
it reaches by import (closure.py), the version of Python (whose documentation is the corpus) and of every package of the
lock, the threads that are asked for, and another store of base models. Its key is the hash of them. Two runs with one
key would give one result, so a done run is not repeated and an interrupted one can be continued where it stopped; `why`
says what differs. The machine that plans is in no key: a batch planned on a login node is the same batch where it runs.

A parameter marked [secret] is no input: what it opens is one, and a new token repeats nothing.

Footgun: `device=auto` is one key on every machine, so a run that is done on a CPU is skipped where there is a card;
ask for `device=cuda`. A new message of an error repeats nothing either: a stored output may show the old one.
"""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nblib import closure, hashed, inputs, paths
from nblib.run import parameters
from nblib.run.parameters import ParameterError

HASH = "sha256:"  # begins what a person cannot read
LONG = 200  # characters of a value; a longer one is an input by its hash


class Job(NamedTuple):
    notebook: str
    path: Path
    values: dict[str, Any]  # what differs from the declaration, injected as a cell
    parameters: dict[str, Any]  # all of them
    inputs: dict[str, str]  # what decides the result, part by part
    key: str  # a hash of them
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
    code = _code(notebook)  # read once for all
    return [_job(notebook, profile, each, (), False, code) for each in assignments]


def same(job: Job, record: Mapping[str, Any]) -> bool:
    """Whether the run with this record (run.json) has the job's inputs. A commit that one of them does not know yet is
    no difference. The run that fetches a model from the hub is the one that continues with it."""
    before = record.get("inputs")
    return record.get("key") == job.key or bool(_is_known(before) and not why(before, job.inputs))


def why(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between the inputs of two runs, in a few words; empty when nothing does, and for a run of old that
    kept no inputs."""
    parts = {**now, **before} if _is_known(before) else {}
    pairs = {part: (before.get(part), now.get(part)) for part in parts}
    changed = {part: pair for part, pair in pairs.items() if pair[0] != pair[1] and not _one_is_to_come(*pair)}
    phrases = []
    for part, (a, b) in changed.items():
        if a is not None and b is not None:
            phrases.append(_brief(part) if HASH in f"{a}{b}" else f"{_brief(part)} {_brief(a)} to {_brief(b)}")
        elif f"parameter {part.split(' ')[0]}" not in changed:  # else another file, since another one is named
            phrases.append(f"{_brief(part)} is {'new' if a is None else 'gone'}")
    return ", ".join([*phrases[:3], *([f"and {len(phrases) - 3} more"] if len(phrases) > 3 else [])])


def _is_known(before: Any) -> bool:
    return isinstance(before, Mapping) and len(before) > 0


def _one_is_to_come(a: Any, b: Any) -> bool:
    """One is a commit, and the other a name on the hub that nobody had fetched yet."""
    return inputs.UNKNOWN in (a, b) and None not in (a, b) and HASH not in f"{a}{b}"


def _brief(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:59]}…"


def profiles_of(notebook: str) -> list[str]:
    return [path.name[len(notebook) + 1 : -len(".yaml")] for path in _files_of(notebook) if not is_plan(path)]


def sweeps_of(notebook: str) -> list[Path]:
    return [path for path in _files_of(notebook) if path.name.endswith(".sweep.yaml")]


def is_plan(file: Path) -> bool:
    """`<notebook>.sweep.yaml`, `<notebook>.<name>.sweep.yaml` and `.search.yaml` are plans of runs and no profiles."""
    return file.name.endswith((".sweep.yaml", ".search.yaml"))


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


def _job(name: str, profile: str | None, overrides: Any, files: Any, profile_optional: bool, code: Any = None) -> Job:
    path = paths.notebooks() / f"{name}.ipynb"
    known = parameters.declared(path)
    sources, values = list(map(Path, files)), {}
    if profile is not None:
        if profile in profiles_of(name):
            sources.insert(0, paths.profiles() / f"{name}.{profile}.yaml")
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
    parts = _values(known, everything) | inputs.versions() | inputs.threads() | (code or _code(name))
    return Job(name, path, values, everything, parts, hashed.digest(parts), shlex.join(resume))


def _code(name: str) -> dict[str, str]:
    """The notebook's own code, without the declarations, which `_values` has; the modules it reaches; where their base
    model lies, if that is not the usual place."""
    sources = cells(paths.notebooks() / f"{name}.ipynb")
    try:
        modules = closure.reached(sources)
    except ValueError as error:  # a module that does not parse
        raise ParameterError(f"{name} cannot be planned: {error}.") from None
    parts = {f"notebook {name}": _hash([closure.cell(source).does for source in sources[1:]])}
    parts |= {f"code of {module}": HASH + code.does[:16] for module, code in sorted(modules.items())}
    usual = paths.store() == paths.outputs() / "base"
    return parts | ({"NBLIB_BASE": "unset" if usual else str(paths.store())} if "nblib.base" in modules else {})


def _values(known: Mapping[str, parameters.Parameter], values: Mapping[str, Any]) -> dict[str, str]:
    """Each parameter that a result may hang on, and what each points at."""
    parts = {}
    for name, value in values.items():
        if known[name].allowed == "secret":
            continue
        spelled = parameters.spell(value)
        parts[f"parameter {name}"] = spelled if len(spelled) <= LONG else _hash(spelled)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (content := inputs.named(text, known[name].allowed)):
                parts[f"{name} {text}"] = content
    return parts


def _hash(value: Any) -> str:
    return HASH + hashed.digest(value)[:16]


def cells(path: Path) -> list[str]:
    """The code cells of a notebook."""
    return [cell["source"] for cell in parameters.cells(path) if cell["cell_type"] == "code"]
