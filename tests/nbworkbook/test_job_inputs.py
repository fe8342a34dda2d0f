"""The key of a job moves with each thing that its result hangs on, `why` names that thing, and
nothing else moves it.

A whole small project: modules, a notebook, a profile, corpora, models, a cache of the hub, a home.
One thing at a time is changed in it, as a user would change it, and the job is planned before and
after.
"""

import importlib.metadata
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from small_notebooks import move_workbook, write

from nblib import paths
from nbworkbook import code_hash, input_hash, jobs, parameters, sweep

PARAMETERS = """seed: int = 0  # random seed [0 .. ]
lr: float = 1e-3  # learning rate [0 .. 1]
device: str = "auto"  # where to compute [auto, cpu, cuda]
quick: bool = False  # a short run
sizes: list[int] = [1, 2]  # of layers [1 .. 9]
words: list[str] = ["a"]  # any words
notes: str = ""  # any text
corpus: str = "corpus"  # text [a corpus]
linked: str = "links"  # text behind links [a corpus]
home: str = "~/texts"  # text at home [a corpus]
lines: str = "one.jsonl"  # text in one file [a corpus]
sets: str = "hf:some/set"  # text from the hub [a corpus]
embedded: str = "prose"  # Python's text [a corpus]
student: str = "student"  # a folder [a model]
teacher: str = "some/teacher"  # of the hub [a model]
table: str = "tables/a.csv"  # a file that the notebook reads
tables: list[str] = ["tables", "none.csv"]  # files and folders
token: str = ""  # for the hub [secret]"""
CELL = "from nblib import train\nfrom nbworkbook import base_model\nloss = train.step(seed) * 2"
LOCK = {
    "torch": "2.13.0",
    "transformers": "5.22.0",
    "tokenizers": "0.23.3",
    "peft": "0.21.2",
    "numpy": "2.4.6",
}
LOCK |= {"bitsandbytes": "0.50.2", "absent-one": None}
# in the lock, and reached by nothing
TOOLS = {"ruff": "0.17.5", "pytest": "9.2.0", "jupyterlab": "4.6.6"}
# by the metadata of packages; what only an extra or another Python asks for does not count
REQUIRED = {
    "torch": ["numpy; extra == 'all'", "ruff; extra == 'test'", "jupyterlab; python_version < '3'"],
    "transformers": [
        "numpy>=2",
        "Absent_One",
        "tokenizers<1; python_version > '3'",
        "sub-marine",
        "not a name!",
    ],
    "sub-marine": ["pytest; extra == 'test'"],
}
TREE = {
    "nblib/__init__.py": "",
    "nbworkbook/__init__.py": "",
    "nblib/train.py": '"""Says."""\nimport torch\ndef step(x):\n    """It steps."""\n    if x < 0:\n'
    '        raise ValueError("no")\n    return x + 1  # one\n',
    "nbworkbook/base_model.py": "from nblib.methods import muon\ndef make():\n    import transformers.models\n",
    "nblib/methods/__init__.py": "",
    "nblib/methods/muon.py": "RATE = 0.02\n",
    "nblib/methods/other.py": "RATE = 0.01\n",
    "notebooks/corpus/a.txt": "one text",
    "notebooks/corpus/deep/er/b.md": "another text",
    "notebooks/corpus/picture.png": "no text",
    "notebooks/links/own.txt": "own text",
    "elsewhere/linked.txt": "a linked text",
    "elsewhere/folder/c.txt": "a text in a linked folder",
    "elsewhere/folder/back/d.txt": "deeper",
    "home/texts/e.txt": "a text at home",
    "another/texts/e.txt": "a text in another home",
    "notebooks/one.jsonl": '{"text": "a line"}\n',
    "notebooks/student/config.json": "{}",
    "notebooks/student/model.safetensors": "weights",
    "notebooks/student/more/vocab.txt": "words",
    "notebooks/tables/a.csv": "1,2",
    "notebooks/tables/b.bin": "34",
    "hub/models--some--teacher/refs/main": "a" * 40,
    "hub/datasets--some--set/refs/main": "c" * 40,
    "parameters/00_a.full.yaml": "seed: 7\n",
    "outputs/base/README": "",
    "notebooks/beside.py": "from deeper import still\nimport my_physics_2\n",
    "notebooks/deeper/still.py": "",
}


@pytest.fixture
def world(tmp_path, monkeypatch) -> Path:
    move_workbook(tmp_path, monkeypatch)
    for name, content in TREE.items():
        put(tmp_path / name, content)
    for name, target in {
        "file.txt": "linked.txt",
        "folder": "folder",
        "nowhere.png": "gone",
    }.items():
        (tmp_path / "notebooks/links" / name).symlink_to(tmp_path / "elsewhere" / target)
    (tmp_path / "elsewhere/folder/back/loop").symlink_to(tmp_path / "notebooks/links")
    put(
        tmp_path / "requirements.lock",
        "".join(f"{name}==0 ; python_version > '3'\n" for name in LOCK | TOOLS),
    )
    installed = (
        LOCK
        | TOOLS
        | {"some-editor": "1.0", "datasets": "4.0", "sub-marine": "1.0", "my-physics": "1.0"}
    )

    def distribution(name: str) -> SimpleNamespace:
        if installed.get(name) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return SimpleNamespace(version=installed[name], requires=REQUIRED.get(name))

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(distribution, "installed", installed, raising=False)
    monkeypatch.setattr(parameters, "find_spec", lambda name: True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    monkeypatch.setattr(paths, "code", lambda: tmp_path)
    for name, value in {
        "HOME": str(tmp_path / "home"),
        "NBLIB_BASE": str(tmp_path / "outputs/base"),
    }.items():
        monkeypatch.setenv(name, value)
    for name in input_hash.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write("00_a", CELL, parameters=PARAMETERS)
    yield tmp_path
    input_hash.forget()


def put(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def plan(*overrides: str, **options) -> jobs.Job:
    """As a new process would."""
    input_hash.forget()
    (job,) = jobs.plan(["00_a"], overrides=overrides, **options)
    return job


def text(file: str, content: str):
    return lambda world, monkeypatch: put(world / file, content)


def sub(file: str, old: str, new: str):
    def change(world, monkeypatch):
        content = (world / file).read_text()
        assert old in content
        put(world / file, content.replace(old, new))

    return change


def install(name: str, version: str | None):
    return lambda world, monkeypatch: monkeypatch.setitem(
        importlib.metadata.distribution.installed, name, version
    )


def env(name: str, value: str):
    return lambda world, monkeypatch: monkeypatch.setenv(name, value.replace("WORLD", str(world)))


def cell(*sources: str, parameters: str = PARAMETERS):
    return lambda world, monkeypatch: write("00_a", *sources, parameters=parameters)


def declare(old: str, new: str):
    assert old in PARAMETERS
    return cell(CELL, parameters=PARAMETERS.replace(old, new))


def swapped(world, monkeypatch):
    """Another content of the same size, with the times of the old one."""
    file = world / "notebooks/corpus/a.txt"
    at = file.stat()
    file.write_text("two text")
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (at.st_size, at.st_mtime_ns)


def relinked(world, monkeypatch):
    put(world / "elsewhere/other.txt", "another linked text")
    (world / "notebooks/links/file.txt").unlink()
    (world / "notebooks/links/file.txt").symlink_to(world / "elsewhere/other.txt")


MOVES = {  # what is changed -> how, and what is said of it
    "a text of a corpus": (text("notebooks/corpus/a.txt", "one text more"), "corpus corpus"),
    "a text in a subfolder": (text("notebooks/corpus/deep/er/b.md", "changed"), "corpus corpus"),
    "one letter, the same size and times": (swapped, "corpus corpus"),
    "a text behind a link": (text("elsewhere/linked.txt", "changed"), "linked links"),
    "a link that leads to another text": (relinked, "linked links"),
    "a text in a linked folder": (text("elsewhere/folder/c.txt", "changed"), "linked links"),
    "a text deep in a linked folder": (
        text("elsewhere/folder/back/d.txt", "changed"),
        "linked links",
    ),
    "a text under ~": (text("home/texts/e.txt", "changed"), "home ~/texts"),
    "another home": (env("HOME", "WORLD/another"), "home ~/texts"),
    "a corpus of one file": (
        text("notebooks/one.jsonl", '{"text": "another"}\n'),
        "lines one.jsonl",
    ),
    "a file added": (text("notebooks/corpus/deep/new.txt", "new"), "corpus corpus"),
    "an empty file added": (text("notebooks/corpus/deep/new.txt", ""), "corpus corpus"),
    "a file removed": (
        lambda w, _: (w / "notebooks/corpus/deep/er/b.md").unlink(),
        "corpus corpus",
    ),
    "a file renamed": (
        lambda w, _: (w / "notebooks/corpus/a.txt").rename(w / "notebooks/corpus/z.txt"),
        "corpus corp",
    ),
    "a data set fetched anew": (
        text("hub/datasets--some--set/refs/main", "d" * 40),
        "sets hf:some/set c+ to d+",
    ),
    "the weights of a model": (
        text("notebooks/student/model.safetensors", "WEIGHTS"),
        "student student",
    ),
    "the config of a model": (text("notebooks/student/config.json", "{ }"), "student student"),
    "a file deep in a model": (
        text("notebooks/student/more/vocab.txt", "Words"),
        "student student",
    ),
    "a model fetched anew": (
        text("hub/models--some--teacher/refs/main", "b" * 40),
        "teacher some/teacher a+ to b+",
    ),
    "a folder in place of a hub name": (
        text("notebooks/some/teacher/config.json", "{}"),
        "teacher some/teacher",
    ),
    "a file that a word names": (text("notebooks/tables/a.csv", "1,3"), "table tables/a.csv"),
    "any file of a folder that a list names": (
        text("notebooks/tables/b.bin", "35"),
        "tables tables",
    ),
    "a file that was not there": (text("notebooks/none.csv", "5"), "tables none.csv is new"),
    "a file that went away": (
        lambda w, _: (w / "notebooks/tables/a.csv").unlink(),
        "tables tables, table tables/a.csv is gone",
    ),
    **{
        f"{name} upgraded": (install(name, "99.1"), f"{name} {was} to 99.1")
        for name, was in LOCK.items()
        if was
    },
    "a package installed": (install("absent-one", "1.2"), "absent-one is new"),
    "a package removed": (install("peft", None), "peft is gone"),
    "Python": (
        lambda w, m: m.setattr(input_hash.platform, "python_version", lambda: "3.99.0"),
        r"python 3\S+ to 3.99.0",
    ),
    "OMP_NUM_THREADS": (env("OMP_NUM_THREADS", "8"), "OMP_NUM_THREADS auto to 8"),
    "MKL_NUM_THREADS": (env("MKL_NUM_THREADS", "3"), "MKL_NUM_THREADS auto to 3"),
    "NBLIB_BASE elsewhere": (env("NBLIB_BASE", "WORLD/store"), "NBLIB_BASE unset to /"),
    "the outputs moved, the base not": (
        env("NBLIB_OUTPUTS", "WORLD/more"),
        "NBLIB_BASE unset to /",
    ),
    "the code of a cell": (cell(CELL.replace("* 2", "* 3")), "notebook 00_a"),
    "a cell more": (cell(CELL, "loss"), "notebook 00_a"),
    "a new import": (
        cell("from nblib.methods import other\n" + CELL),
        "notebook 00_a, code of nblib.methods.other is",
    ),
    "a default": (declare("seed: int = 0", "seed: int = 3"), "parameter seed 0 to 3"),
    "the type of a parameter": (
        declare("seed: int = 0", "seed: float = 0.0"),
        "parameter seed 0 to 0.0",
    ),
    "a parameter more": (
        declare("notes: str", "rank: int = 2  # rank\nnotes: str"),
        "parameter rank is new",
    ),
    "a parameter less": (declare('notes: str = ""  # any text\n', ""), "parameter notes is gone"),
    "the arithmetic of a module": (sub("nblib/train.py", "x + 1", "x + 2"), "code of nblib.train"),
    "a module that a module reaches": (
        sub("nblib/methods/muon.py", "0.02", "0.03"),
        "code of nblib.methods.muon",
    ),
    "the __init__ of a package": (
        text("nblib/methods/__init__.py", "A = 1\n"),
        "code of nblib.methods",
    ),
    "a module beside the notebook": (
        cell("import beside\n" + CELL),
        "notebook 00_a, code of beside is new, code of deeper.still is new$",
    ),
    "a package that a cell imports, in no lock": (
        cell("import my_physics.laws\n" + CELL),
        "my-physics is new, notebook 00_a$",
    ),
}

VALUES = {  # each parameter, given another value -> what is said of it
    "seed=1": "parameter seed 0 to 1",
    "lr=0.01": "parameter lr 0.001 to 0.01",
    "device=cpu": 'parameter device "auto" to "cpu"',
    "quick=true": "parameter quick false to true",
    "sizes=1,3": r"parameter sizes \[1, 2\] to \[1, 3\]",
    "words=b": r'parameter words \["a"\] to \["b"\]',
    f"words={'word,' * 99}": "parameter words",
    "notes=x": 'parameter notes "" to "x"',
    "corpus=links": 'parameter corpus "corpus" to "links"',
    "linked=corpus/a.txt": 'parameter linked "links" to "corpus/a.txt"',
    "home=~/texts/e.txt": 'parameter home "~/texts" to "~/texts/e.txt"',
    "lines=corpus": 'parameter lines "one.jsonl" to "corpus"',
    "sets=hf:other/set": 'parameter sets "hf:some/set" to "hf:other/set"',
    "embedded=code": 'parameter embedded "prose" to "code"',
    "student=other/student": 'parameter student "student" to "other/student"',
    "teacher=student": 'parameter teacher "some/teacher" to "student"',
    "table=tables/b.bin": 'parameter table "tables/a.csv" to "tables/b.bin"',
    "tables=tables": r'parameter tables \["tables", "none.csv"\] to \["tables"\]',
}


def says(phrase: str, before: jobs.Job, now: jobs.Job) -> None:
    assert before.key != now.key and not jobs.same(
        now, {"key": before.key, "inputs": before.inputs}
    )
    stored = json.loads(json.dumps(before.inputs))  # as run.json has it
    assert re.search(phrase, jobs.why(stored, now.inputs)), jobs.why(stored, now.inputs)
    assert jobs.why(now.inputs, now.inputs) == ""


@pytest.mark.parametrize("changed", MOVES)
def test_what_a_result_hangs_on_moves_the_key_and_is_named(world, monkeypatch, changed):
    change, phrase = MOVES[changed]
    before = plan()
    change(world, monkeypatch)
    says(f"^{phrase}", before, plan())


@pytest.mark.parametrize("assignment", VALUES)
def test_every_value_moves_the_key_and_is_named_once(world, assignment):
    says(f"^{VALUES[assignment]}$", plan(), plan(assignment))


def test_every_parameter_was_tried(world):
    names = {line.split(":")[0] for line in PARAMETERS.splitlines()}
    assert {each.split("=")[0] for each in VALUES} == names - {"token"}
    assert {
        part.removeprefix("parameter ") for part in plan().inputs if part.startswith("parameter ")
    } == names - {"token"}


def test_a_profile_a_file_and_a_sweep_move_the_key(world):
    says("^parameter seed 0 to 7$", plan(), plan(profile="full"))
    before = plan(profile="full")
    put(world / "parameters/00_a.full.yaml", "seed: 8\n")
    says("^parameter seed 7 to 8$", before, plan(profile="full"))
    put(world / "mine.yaml", "lr: 0.5\n")
    says("^parameter lr 0.001 to 0.5$", plan(), plan(files=["mine.yaml"]))
    put(world / "parameters/00_a.sweep.yaml", "seed: [1, 2]\ncorpus: [corpus, links]\n")
    one, two, three, four = sweep.plan("00").jobs
    says("^parameter seed 1 to 2, parameter corpus", one, four)
    assert len({one.key, two.key, three.key, four.key}) == 4 and one.key == plan("seed=1").key
    text("notebooks/corpus/a.txt", "changed")(world, None)
    again = sweep.plan("00").jobs
    assert [a.key == b.key for a, b in zip([one, two, three, four], again)] == [
        False,
        True,
        False,
        True,
    ]


def touched(world, monkeypatch):
    for file in (world / "notebooks").rglob("*"):
        os.utime(file, (1, 1), follow_symlinks=False) if not file.is_symlink() else None


def elsewhere(world, monkeypatch):
    """The same files in another place, behind a link: the value of the parameter is the same."""
    (world / "notebooks/corpus").rename(world / "moved")
    (world / "notebooks/corpus").symlink_to(world / "moved")


def copied(world, monkeypatch):
    shutil.copytree(world / "notebooks/student", world / "student")
    shutil.rmtree(world / "notebooks/student")
    (world / "student").rename(world / "notebooks/student")


def outputs(world, monkeypatch):
    path = world / "notebooks/00_a.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][-1] |= {"outputs": [{"output_type": "stream", "name": "stdout", "text": "1"}]}
    notebook["cells"][-1]["execution_count"] = 7
    notebook["metadata"]["kernelspec"]["display_name"] = "Another"
    path.write_text(json.dumps(notebook))


def markdown(world, monkeypatch):
    path = world / "notebooks/00_a.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"].insert(2, {"cell_type": "markdown", "metadata": {}, "source": "More words."})
    path.write_text(json.dumps(notebook))


def machine(world, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(input_hash.platform, "node", lambda: "another")


STAYS = {
    "nothing": lambda world, monkeypatch: None,
    "times of all files": touched,
    "the same text written again": text("notebooks/corpus/a.txt", "one text"),
    "a folder moved and linked": elsewhere,
    "a model copied": copied,
    "a file beside the texts that nobody reads": text("notebooks/corpus/picture.png", "changed"),
    "a new file that nobody reads": text("notebooks/corpus/deep/data.bin", "1"),
    "an empty folder": lambda world, _: (world / "notebooks/corpus/empty").mkdir(),
    "a file beside the corpus": text("notebooks/more.txt", "1"),
    "where a link that nobody reads leads": text("elsewhere/gone", "now it is there"),
    "a snapshot of another model": text("hub/models--some--other/refs/main", "e" * 40),
    "another branch in the cache": text("hub/models--some--teacher/refs/dev", "e" * 40),
    "a docstring": sub("nblib/train.py", "It steps.", "One step."),
    "a module's docstring": sub("nblib/train.py", "Says.", "Says more."),
    "a comment": sub("nblib/train.py", "# one", "# 1"),
    "the text of an error": sub("nblib/train.py", '"no"', '"not so"'),
    "blank lines": sub("nblib/train.py", "    return", "\n    return"),
    "a module that nothing reaches": sub("nblib/methods/other.py", "0.01", "0.09"),
    "a comment in a cell": cell(CELL + "  # twice"),
    "an empty line in a cell": cell(CELL.replace("\n", "\n\n")),
    "the meaning of a parameter": declare("# random seed", "# seed of all draws"),
    "the range of a parameter": declare("[0 .. 1]", "[0 .. 2]"),
    "the order of the parameters": cell(
        CELL, parameters="\n".join(reversed(PARAMETERS.splitlines()))
    ),
    "a markdown cell": markdown,
    "outputs and the kernel's name": outputs,
    "another notebook": lambda world, _: write("01_b", "1", parameters=PARAMETERS),
    "another profile": text("parameters/00_a.gpu.yaml", "seed: 9\n"),
    "the working directory": lambda world, monkeypatch: monkeypatch.chdir("/"),
    "the terminal": env("TERM", "dumb"),
    "a token": env("HF_TOKEN", "hf_abc"),
    "which card": env("CUDA_VISIBLE_DEVICES", "3"),
    "threads of something else": env("RAYON_NUM_THREADS", "1"),
    "threads: an empty word": env("OMP_NUM_THREADS", ""),
    "the store named as it is": env("NBLIB_BASE", "WORLD/outputs/../outputs/base"),
    "the store not named": lambda world, monkeypatch: monkeypatch.delenv("NBLIB_BASE"),
    "cores and name of the machine": machine,
    "a package that the lock does not name": install("some-editor", "2.0"),
    "a package that is reached and that the lock does not name": install("sub-marine", "2.0"),
    "a module beside the notebook that nothing imports": text("notebooks/beside.py", "x = 1\n"),
    **{
        f"{name}, which the lock names and nothing reaches": install(name, "99.1") for name in TOOLS
    },
    "a comment and an order of the lock": lambda world, _: put(
        world / "requirements.lock", "# new\n" + "".join(f"{name}==1\n" for name in reversed(LOCK))
    ),
    "a run made meanwhile": text("outputs/00_a/1/run.json", "{}"),
    "a base model made meanwhile": text("outputs/base/abc/base.json", "{}"),
}


@pytest.mark.parametrize("changed", STAYS)
def test_nothing_else_moves_it(world, monkeypatch, changed):
    before = plan()
    STAYS[changed](world, monkeypatch)
    now = plan()
    assert jobs.why(before.inputs, now.inputs) == "" and now.key == before.key
    assert jobs.same(now, {"key": before.key}) and jobs.same(now, {"inputs": before.inputs})


def test_only_what_reaches_the_base_model_asks_for_its_store(world, monkeypatch):
    write("00_a", "from nblib import train", parameters=PARAMETERS)
    before = plan()
    monkeypatch.setenv("NBLIB_BASE", str(world / "store"))
    assert plan().key == before.key and "NBLIB_BASE" not in before.inputs


def test_a_run_that_fetches_its_model_is_continued_with_it(world):
    """The commit is not known before the first run, and that run is not repeated when it is."""
    (world / "hub/models--some--teacher/refs/main").unlink()
    fetches = plan()
    assert fetches.inputs["teacher some/teacher"] == input_hash.UNKNOWN
    text("hub/models--some--teacher/refs/main", "a" * 40)(world, None)
    fetched, record = plan(), {"key": fetches.key, "inputs": fetches.inputs}
    assert jobs.same(fetched, record) and jobs.why(fetches.inputs, fetched.inputs) == ""
    assert not jobs.same(plan("seed=1"), record), "the rest still counts"
    text("notebooks/some/teacher/config.json", "{}")(world, None)
    assert not jobs.same(plan(), record) and "teacher" in jobs.why(fetches.inputs, plan().inputs), (
        "a folder is no commit"
    )


def test_a_secret_is_no_input(world, monkeypatch):
    monkeypatch.setenv("MINE", "hf_hidden")
    without, job = plan("seed=2"), plan("token=@MINE", "seed=2")
    assert (job.inputs, job.key) == (without.inputs, without.key) and job.parameters[
        "token"
    ] == "@MINE"
    assert job.resume == "nblib run 00_a -p token=@MINE -p seed=2" and "hidden" not in str(job)
    put(world / "parameters/00_a.sweep.yaml", 'seed: [1, 2]\ntoken: ["", "@MINE"]\n')
    with pytest.raises(parameters.ParameterError, match="'token' is secret and cannot vary"):
        sweep.plan("00")


@pytest.mark.parametrize(
    "assignment, said",
    [
        ("corpus=pictures", "it holds no file to read (.txt, .md, .py, .jsonl, .parquet)"),
        ("corpus=pipe", "it holds no file to read (.txt, .md, .py, .jsonl, .parquet)"),
        ("corpus=/dev/null", "it holds no file to read (.txt, .md, .py, .jsonl, .parquet)"),
        (
            f"corpus={'x' * 5000}",
            "it is neither prose, code, hf:<dataset> nor a file or folder that exists",
        ),
        ("corpus=a\0b", "it is neither prose, code, hf:<dataset> nor a file or folder that exists"),
        (
            "corpus=~nobody/x",
            "it is neither prose, code, hf:<dataset> nor a file or folder that exists",
        ),
        (
            f"student={'x' * 5000}",
            "it is neither a folder with a model nor a hub name like Qwen/Qwen3-0.6B",
        ),
        (
            "student=~/texts",
            "it is neither a folder with a model nor a hub name like Qwen/Qwen3-0.6B",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(world, assignment, said):
    put(world / "notebooks/pictures/a.png", "")
    os.mkfifo(world / "notebooks/pipe")
    with pytest.raises(parameters.ParameterError) as caught:
        plan(assignment)
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_model_at_home_is_found(world):
    shutil.copytree(world / "notebooks/student", world / "home/student")
    assert plan("student=~/student").inputs["student ~/student"] == plan().inputs["student student"]


def test_why_is_short_and_starts_with_what_a_person_changed(world, monkeypatch):
    before = plan()
    for name in LOCK:
        install(name, "99.1")(world, monkeypatch)
    sub("nblib/train.py", "x + 1", "x + 2")(world, monkeypatch)
    said = jobs.why(before.inputs, plan("seed=9", "notes=" + "long " * 30).inputs)
    assert said.startswith("parameter seed 0 to 9, parameter notes") and said.endswith(
        ", and 7 more"
    )
    assert "numpy 2.4.6 to 99.1" in said and len(said) < 250 and "\n" not in said
    for unknown in ({}, None, [], "words"):  # a run of old, or a damaged record
        assert jobs.why(unknown, before.inputs) == "" and not jobs.same(before, {"inputs": unknown})
    assert not jobs.same(before, {}) and jobs.why(
        {"torch": 3, "parameter seed": None, "x": []}, before.inputs
    )


def test_inputs_are_flat_and_each_module_has_its_own(world):
    found = plan().inputs
    assert all(isinstance(part, str) and isinstance(value, str) for part, value in found.items())
    reached = {f"code of {name}" for name in code_hash.reached([CELL])}
    assert {part for part in found if part.startswith("code of ")} == reached and len(reached) == 6
    assert (
        found["torch"] == "2.13.0"
        and found["lines one.jsonl"].startswith("sha256:")
        and "some-editor" not in found
    )
    packages = {name for name, version in LOCK.items() if version}
    assert packages <= found.keys() and not found.keys() & (
        TOOLS.keys() | {"sub-marine", "nblib", "nbworkbook"}
    )
    assert len(MOVES) + len(VALUES) >= 50 and len(STAYS) >= 30
