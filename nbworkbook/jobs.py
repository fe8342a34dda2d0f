"""What will run: names, profile, files and assignments turned into jobs, before anything is started
or written.

A job's `inputs` are what decides its result, each with its value or a short hash: the notebook's
code, its parameters (with them the kind of device it wants), the files and models they name, the
modules of ours that it reaches by import and those that lie beside it (code_hash.py), the version
of Python (whose documentation is the corpus) and of every package that these modules reach
(input_hash.py), the threads that were asked for, and another store of base models. Its key is the
hash of them. Two runs with one key would give one result, so a done run is not repeated and an
interrupted one can be continued where it stopped; `why` says what differs. The machine that plans
is in no key: a batch planned on a login node is the same batch where it runs.

A notebook is one of the workbook's, by its name, or any other, by its path. One that is named by
its path runs in its own folder; its runs lie in outputs/ as all others do, under its name.

A parameter marked [secret] is no input: what it opens is one, and a new token repeats nothing.

Footgun: `device=auto` is one key on every machine, so a run that is done on a CPU is skipped where
there is a card; give `device=cuda`. A new message of an error repeats nothing either: a stored
output may show the old one.
"""

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from nblib import paths
from nblib.files import digest
from nbworkbook import code_hash, parameters
from nbworkbook import input_hash as inputs
from nbworkbook.parameters import ParameterError

HASH = "sha256:"  # begins what a person cannot read
LONG = 200  # characters of a value; a longer one is an input by its hash
TAKEN = ("base", "batches", "corpora", "published")  # folders of outputs/ that hold no runs
TESTED = ((2, 11), (2, 13))  # of torch, the oldest and the newest (tests/run_versions.py)
# what runs a notebook; it comes with the extra [workbook]
NEEDED = ("papermill", "nbclient", "nbformat", "jupyter_client", "ipykernel", "matplotlib", "yaml")


class Job(NamedTuple):
    notebook: str
    path: Path
    values: dict[str, Any]  # what differs from the declaration, injected as a cell
    parameters: dict[str, Any]  # all of them
    inputs: dict[str, str]  # what decides the result, part by part
    key: str  # a hash of them
    resume: str  # the command that continues this job
    label: str = ""  # which of several jobs of one notebook, said when it starts

    def environment(self) -> dict[str, str]:
        """Return the variables by which a process that runs the job finds what it was planned
        with.
        """
        return {"NBLIB_ROOT": str(paths.root()), "NBLIB_NOTEBOOKS": str(self.path.parent)}


class Code(NamedTuple):
    parts: dict[str, str]  # the notebook and the modules, each with its hash
    versions: dict[str, str]  # of the packages they reach


def names() -> list[str]:
    """Return the names of the workbook's notebooks; ParameterError where there is no workbook."""
    _require_workbook()
    return sorted(path.stem for path in paths.notebooks().glob("[!.]*.ipynb"))


def resolve(name: str) -> str:
    """Return the name of a notebook of the workbook for `00`, `00_setup`, `00_setup.ipynb` or
    `notebooks/00_setup.ipynb`."""
    known, stem = names(), Path(name).name.removesuffix(".ipynb")
    if "/" in name and Path(name).resolve().parent != paths.notebooks():
        raise ParameterError(f"{name} is not in {paths.short(paths.notebooks())}.")
    if stem in known:
        return stem

    starts = [candidate for candidate in known if candidate.startswith(f"{stem}_")]
    if len(starts) != 1:
        sentence = parameters.unknown("notebook", stem, starts or known)
        raise ParameterError(sentence.capitalize())
    return starts[0]


def name_of_runs(name: str) -> str:
    """Return the name under which a notebook's runs lie in outputs/: a notebook of the workbook's,
    or one that ran by its path."""
    stem = Path(name).name.removesuffix(".ipynb")
    ran = stem not in ("", "..", *TAKEN) and any((paths.outputs() / stem).glob("*/run.json"))
    return stem if ran else resolve(name)


def find(name: str) -> Path:
    """Return the file of a notebook, named as for `resolve` or by a path to any other notebook."""
    given = Path(os.path.expanduser(name))
    try:
        elsewhere = name.endswith(".ipynb") and given.is_file()
    except (OSError, ValueError):  # no name that a file can have
        elsewhere = False
    if not elsewhere:
        if not paths.is_workbook() and name.endswith(".ipynb"):
            raise ParameterError(f"there is no notebook {parameters.clip(name)}.")
        return paths.notebooks() / f"{resolve(name)}.ipynb"

    # a link keeps the name and the place that somebody gave it
    path = Path(os.path.realpath(given.parent), given.name)
    if path.stem in TAKEN:
        raise ParameterError(
            f"{parameters.clip(name)}: a notebook called '{path.stem}' would write its runs into "
            f"outputs/{path.stem}, which holds something else; give it another name."
        )
    return path


def plan(
    names: Sequence[str],
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    files: Sequence[str] = (),
    profile_optional: bool = False,
) -> list[Job]:
    """Return the jobs in order; later sources win: profile, then files, then `name=value`.
    ParameterError lists every problem."""
    _require_runner()
    _warn_of_untested_torch()
    jobs: dict[Path, Job] = {}
    known: set[str] = set()
    problems: list[str] = []
    for name in names:
        try:
            path = find(name)
            known |= set(profiles_of(path.stem))
            if path not in jobs:
                jobs[path] = _job(path, profile, overrides, files, profile_optional)
        except ParameterError as error:
            problems += [line for line in str(error).splitlines() if line not in problems]

    if profile is not None and profile_optional and profile not in known:
        problems.append(parameters.unknown("profile", profile, known))
    if problems:
        raise ParameterError("\n".join(problems))
    return list(jobs.values())


def variants(
    notebook: str, assignments: Sequence[Sequence[str]], *, profile: str | None = None
) -> list[Job]:
    """Return a job of the notebook for each list of `name=value`, on top of the profile."""
    _require_runner()
    path = find(notebook)
    code = _code(path)  # read once for all
    return [_job(path, profile, each, (), False, code) for each in assignments]


def same(job: Job, record: Mapping[str, Any]) -> bool:
    """Return whether the run with this record (run.json) has the job's inputs. A commit that one of
    them does not have yet is no difference: the run that fetches a model from the hub is the one
    that continues with it."""
    if record.get("key") == job.key:
        return True
    before = record.get("inputs")
    return isinstance(before, Mapping) and bool(before) and not why(before, job.inputs)


def why(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what differs between the inputs of two runs, in a few words; empty when nothing does,
    and for a run of old that kept no inputs."""
    if not isinstance(before, Mapping) or not before:
        return ""
    pairs = {part: (before.get(part), now.get(part)) for part in {**now, **before}}
    changed = {
        part: (a, b) for part, (a, b) in pairs.items() if a != b and not _one_is_to_come(a, b)
    }

    phrases = []
    for part, (a, b) in changed.items():
        if a is not None and b is not None:
            readable = HASH not in f"{a}{b}"
            phrases.append(
                f"{_brief(part)} {_brief(a)} to {_brief(b)}" if readable else _brief(part)
            )
        elif f"parameter {part.split(' ')[0]}" not in changed:
            # else it is another file, since the parameter names another one
            phrases.append(f"{_brief(part)} is {'new' if a is None else 'gone'}")

    if len(phrases) > 3:
        phrases[3:] = [f"and {len(phrases) - 3} more"]
    return ", ".join(phrases)


def profiles_of(notebook: str) -> list[str]:
    """Return the names of a notebook's profiles."""
    files = [path for path in _files_of(notebook) if not is_plan(path)]
    return [path.name[len(notebook) + 1 : -len(".yaml")] for path in files]


def sweeps_of(notebook: str) -> list[Path]:
    """Return the sweep files of a notebook."""
    return [path for path in _files_of(notebook) if path.name.endswith(".sweep.yaml")]


def is_plan(file: Path) -> bool:
    """Return whether a file is a plan of runs and no profile: `<notebook>.sweep.yaml`,
    `<notebook>.<name>.sweep.yaml` or the same with `.search.yaml`."""
    return file.name.endswith((".sweep.yaml", ".search.yaml"))


def gpus() -> list[tuple[str, str]]:
    """Return (id, name) of the visible NVIDIA cards, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"]
    try:
        listing = subprocess.run(
            query, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []

    cards = dict(line.split(", ", 1) for line in listing.splitlines() if ", " in line)
    chosen = cards
    if visible is not None:
        chosen = [each for each in visible.split(",") if each not in ("", "-1")]
    return [(each, cards.get(each, next(iter(cards.values()), "GPU"))) for each in chosen]


def cells(path: Path) -> list[str]:
    """Return the code cells of a notebook."""
    return [cell["source"] for cell in parameters.cells(path) if cell["cell_type"] == "code"]


def _require_workbook() -> None:
    """End with one sentence in a folder that is no workbook."""
    if paths.is_workbook() or os.environ.get("NBLIB_NOTEBOOKS"):
        return
    raise ParameterError(
        f"{paths.root()} is no workbook: `nblib init DIR` makes one, "
        "and `nblib run path/to/your.ipynb` runs a notebook from anywhere."
    )


def _require_runner() -> None:
    """End with one sentence where the packages that run notebooks are not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ParameterError(
            f"to run notebooks, {', '.join(missing)} must be installed: "
            "pip install 'nblib[workbook]'"
        )


@functools.cache
def _warn_of_untested_torch() -> None:
    """Print one sentence, once, where the installed torch is older or newer than those tested."""
    installed = inputs.version("torch") or ""
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None or TESTED[0] <= (int(numbers[1]), int(numbers[2])) <= TESTED[1]:
        return
    low, high = (".".join(map(str, each)) for each in TESTED)
    sentence = f"torch {installed} is untested here; tested are {low} to {high}"
    print(f"nblib: {sentence}.", file=sys.stderr, flush=True)


def _job(
    path: Path,
    profile: str | None,
    overrides: Iterable[str],
    files: Iterable[str],
    profile_optional: bool,
    code: Code | None = None,
) -> Job:
    """Return the job of one notebook; what its parameters name is looked up beside it."""
    typed = path.stem if path.parent == paths.notebooks() else paths.short(path)
    with paths.notebooks_at(path.parent):
        return _job_here(path, typed, profile, overrides, files, profile_optional, code)


def _job_here(
    path: Path,
    typed: str,
    profile: str | None,
    overrides: Iterable[str],
    files: Iterable[str],
    profile_optional: bool,
    code: Code | None,
) -> Job:
    name = path.stem
    known = parameters.declared(path)
    sources = [Path(file) for file in files]

    # the profile comes before the files
    if profile is not None:
        if profile in profiles_of(name):
            sources.insert(0, paths.profiles() / f"{name}.{profile}.yaml")
        elif profile_optional:
            print(f"[{name}] has no profile '{profile}' and runs on its defaults", flush=True)
            profile = None
        else:
            sentence = parameters.unknown("profile", profile, profiles_of(name))
            raise ParameterError(f"{name}: {sentence}")

    # each source is checked on its own, so that a sentence can name it
    values: dict[str, Any] = {}
    for source in sources:
        values |= parameters.check(known, parameters.load_yaml(source), paths.short(source))
    for text in overrides:
        pair = dict([parameters.parse_assignment(text, known)])
        values |= parameters.check(known, pair, f"-p {text}")
    everything = {name: parameter.default for name, parameter in known.items()} | values

    # what decides the result; a person looks for the parameters first
    code = code or _code(path)
    parts = _values(known, everything) | inputs.threads() | code.versions | code.parts

    # the command that gives this job again
    resume = ["nblib", "run", typed, *(["--profile", profile] if profile else [])]
    for option, given in (("-f", files), ("-p", overrides)):
        resume += [part for each in given for part in (option, str(each))]
    return Job(name, path, values, everything, parts, digest(parts), shlex.join(resume))


def _code(path: Path) -> Code:
    """Return the notebook's own code, without the declarations, which `_values` has; the modules
    and packages it reaches; where their base model lies, if that is not the usual place.
    """
    sources = cells(path)
    try:
        modules = code_hash.reached(sources, beside=path.parent)
    except ValueError as error:  # a module that does not parse
        raise ParameterError(f"{path.stem} cannot be planned: {error}.") from None

    parts = {f"notebook {path.stem}": _hash([code_hash.cell(s).does for s in sources[1:]])}
    parts |= {f"code of {name}": HASH + code.does[:16] for name, code in sorted(modules.items())}
    if "nbworkbook.base_model" in modules:
        usual = paths.store() == paths.usual_store()
        parts["NBLIB_BASE"] = "unset" if usual else str(paths.store())

    # what the cells and the modules beside them import is the user's choice, the rest is ours
    ours = {name for name in modules if name.partition(".")[0] in code_hash.PACKAGES}
    own = [code_hash.cell(source).names for source in sources]
    own += [code.names for name, code in modules.items() if name not in ours]
    library = [modules[name].names for name in ours]
    known = code_hash.PACKAGES.keys() | {name.partition(".")[0] for name in modules}
    return Code(parts, inputs.versions(_foreign(own, known), _foreign(library, known)))


def _foreign(groups: Iterable[Iterable[str]], known: Iterable[str]) -> set[str]:
    """Return the dotted names that stand for no module whose code is hashed."""
    names = {name for group in groups for name in group}
    return {name for name in names if name.partition(".")[0] not in known}


def _values(known: Mapping[str, parameters.Parameter], values: Mapping[str, Any]) -> dict[str, str]:
    """Return each parameter that a result may hang on, and what each points at."""
    parts = {}
    for name, value in values.items():
        if known[name].allowed == "secret":
            continue
        spelled = parameters.spell(value)
        parts[f"parameter {name}"] = spelled if len(spelled) <= LONG else _hash(spelled)
        for text in value if isinstance(value, list) else [value]:
            content = inputs.named(text, known[name].allowed) if isinstance(text, str) else None
            if content:
                parts[f"{name} {text}"] = content
    return parts


def _files_of(notebook: str) -> list[Path]:
    return sorted(paths.profiles().glob(f"{notebook}.*.yaml"))


def _one_is_to_come(a: Any, b: Any) -> bool:
    """Return whether one is a commit, and the other a name on the hub that nobody had fetched."""
    return inputs.UNKNOWN in (a, b) and None not in (a, b) and HASH not in f"{a}{b}"


def _brief(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:59]}…"


def _hash(value: Any) -> str:
    return HASH + digest(value)[:16]
