"""A key changes with the code that is reached, and with nothing else: on a copy of the project's
sources.
"""

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblib import paths, runtime, text
from nbworkbook import base_model, code_hash, jobs
from nbworkbook.parameters import ParameterError

SOURCES = ("nblib", "nbworkbook", "notebooks", "doctor/loopdoctor", "parameters")
# which needs no base
METHODS = {path.stem for path in paths.notebooks().glob("[12]*.ipynb")} - {"21_scale_out"}
FIRST = {
    "00_setup",
    "01_freeze_and_adapters",
    "02_compile_and_checkpointing",
    "03_precision_and_optimizers",
    "04_loop_and_recovery",
    "05_doctor",
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    root, here = tmp_path_factory.mktemp("project"), paths.code()
    for name in SOURCES:
        shutil.copytree(here / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.fixture
def project(copied, monkeypatch) -> Iterator[Path]:
    """The copy, put back after the test."""
    for name in ("notebooks", "parameters"):
        monkeypatch.setenv(f"NBLIB_{name.upper()}", str(copied / name))
    monkeypatch.setattr(paths, "code", lambda: copied)
    monkeypatch.setattr(text, "documents", lambda *_: ["prose"])
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    yield copied
    for path in copied.rglob("*"):
        if path.is_file() and path not in before:
            path.unlink()
        elif path.is_file() and path.read_bytes() != before[path]:
            path.write_bytes(before[path])


def keys() -> dict[str, str]:
    machine = runtime.pick("cpu", "fp32")
    return {job.notebook: job.key for job in jobs.plan(jobs.names())} | {
        "base": base_model.key("default", machine)
    }


def changes(before: dict[str, str]) -> set[str]:
    return {name for name, key in keys().items() if key != before[name]}


def reworded(source: str) -> str:
    """Another docstring, message of an error and comment everywhere, and other blank lines."""
    lines, edits = source.encode().splitlines(keepends=True), []
    starts = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)]

    def edit(node: ast.AST) -> None:
        if any(start <= place(node)[0] < end for start, end in edits):
            return  # inside one that is replaced already
        edits.append(place(node))

    def place(node: ast.AST) -> tuple[int, int]:
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return starts[node.lineno - 1] + node.col_offset, end

    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        )
        if documented and ast.get_docstring(node) is not None:
            edit(node.body[0])
        elif isinstance(node, ast.Raise) and node.exc:
            for part in ast.walk(node.exc):  # an f-string comes before what is in it
                if isinstance(part, ast.JoinedStr) or (
                    isinstance(part, ast.Constant) and isinstance(part.value, str)
                ):
                    edit(part)
    content = source.encode()
    for start, end in sorted(edits, reverse=True):
        content = content[:start] + b'"something else"' + content[end:]
    return "# a comment\n\n" + content.decode() + "\n\n# and another\n"


@pytest.mark.slow  # the whole project, written and parsed twice
def test_docstrings_comments_and_messages_of_errors_repeat_nothing(project):
    before, texts = keys(), 0
    for path in project.rglob("*.py"):
        new = reworded(path.read_text(encoding="utf-8"))
        texts += new.count('"something else"')
        path.write_text(new, encoding="utf-8")
    assert texts > 1000 and changes(before) == set()


def test_comments_in_cells_repeat_nothing(project):
    before = keys()
    for path in (project / "notebooks").glob("*.ipynb"):
        path.write_text(path.read_text().replace('"run.finish()"', '"run.finish()  # the end"'))
        assert "the end" in path.read_text()
    assert changes(before) == set()


@pytest.mark.parametrize(
    "file, repeated, others",
    [
        (
            "notebooks/lessons/pitfalls/rollback.py",
            {"04_loop_and_recovery", "05_doctor", "15_spiking_student"},
            None,
        ),
        ("notebooks/lessons/training_rules.py", {"15_spiking_student"}, None),
        ("notebooks/lessons/pitfalls/four_bit.py", {"01_freeze_and_adapters", "05_doctor"}, None),
        ("notebooks/lessons/pitfalls/lrc.py", {"10_lrc", "05_doctor"}, None),
        (
            "notebooks/lessons/pitfalls/bench.py",
            FIRST - {"00_setup"} | METHODS - {"20_compare"},
            None,
        ),
        ("doctor/loopdoctor/causes.py", {"05_doctor"} | METHODS, None),
        ("nblib/methods/moe/jamba.py", {"12_moe_muon", "14_sparse_depth"}, None),
        ("notebooks/lessons/skipping.py", {"14_sparse_depth"}, None),
        ("notebooks/lessons/short_runs.py", {"20_compare"}, None),
        ("notebooks/lessons/scale_out.py", {"21_scale_out"}, None),
        (
            "nblib/methods/lrc/layer.py",
            {"10_lrc", "20_compare"},
            {"00_setup", "02_compile_and_checkpointing", "12_moe_muon", "base"},
        ),
        (
            "nbworkbook/base_model.py",
            {"00_setup", "01_freeze_and_adapters", "base"} | METHODS,
            None,
        ),
        ("notebooks/lessons/exercises.py", set(), None),
        ("notebooks/lessons/demo.py", set(), None),
        ("nbworkbook/cli.py", set(), None),
        ("nbworkbook/runner.py", set(), None),
        ("nbworkbook/report.py", set(), None),
        ("nblib/nobody_imports_this.py", set(), None),
    ],
)
def test_a_change_repeats_what_reaches_it(project, file, repeated, others):
    before = keys()
    with open(project / file, "a", encoding="utf-8") as lines:
        lines.write("\n\nCHANGED = 1\n")
    changed = changes(before)
    assert repeated <= changed and not changed & (
        before.keys() - repeated if others is None else others
    )


def test_the_arithmetic_of_the_loop_repeats_all_that_train(project):
    before, file = keys(), project / "nblib" / "train.py"
    source = file.read_text()
    assert "1 + math.cos" in source
    file.write_text(source.replace("1 + math.cos", "2 + math.cos"))
    trains = {
        "00_setup",
        "01_freeze_and_adapters",
        "03_precision_and_optimizers",
        "05_doctor",
        "base",
    } | METHODS
    assert trains <= changes(before)


def test_every_pitfall_that_a_notebook_shows_is_in_its_key(project):
    """The ids that stand in its stored outputs, whichever way its cells came by them."""
    family, titles = {}, {}
    for file in (project / "notebooks/lessons/pitfalls").glob("*.py"):
        declared = dict(re.findall(r'id="(P\d\d)",\s+title="([^"]+)"', file.read_text()))
        titles |= declared
        family |= dict.fromkeys(declared, f"lessons.pitfalls.{file.stem}")
    assert len(titles) == 74
    for path in sorted((project / "notebooks").glob("*.ipynb")):
        outputs = json.dumps([c.get("outputs", []) for c in json.loads(path.read_text())["cells"]])
        shown = {
            number
            for number in re.findall(r"P\d\d", outputs)
            if f"{number} {titles.get(number, '?')}" in outputs
        }
        assert {family[number] for number in shown} <= code_hash.reached(jobs.cells(path)).keys(), (
            path.stem
        )


def test_imports_of_every_form_are_followed(tmp_path):
    files = {
        "nblib/__init__.py": "",
        "nblib/a.py": "def later():\n    from nblib.methods import one",
        "nblib/b.py": "",
        "nblib/methods/__init__.py": "from . import shared",
        "nblib/methods/one.py": "from ..b import thing\nimport torch",
        "nblib/methods/two.py": "",
        "nblib/methods/shared.py": "",
        "notebooks/lessons/__init__.py": "",
        "notebooks/lessons/pitfalls/__init__.py": "",
        "notebooks/lessons/pitfalls/first.py": 'PITFALLS = [dict(id="P01")]',
        "notebooks/lessons/pitfalls/second.py": 'PITFALLS = [dict(id="P02")]',
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)

    def reached(*cells: str) -> set[str]:
        return set(code_hash.reached(cells, tmp_path))

    methods = {"nblib", "nblib.b", "nblib.methods", "nblib.methods.shared", "nblib.methods.one"}
    pitfalls = {"lessons", "lessons.pitfalls"}
    assert reached("import nblib.a as it") == methods | {"nblib.a"}
    assert reached("x = 1", "if x:\n    from nblib.methods import one") == methods
    assert (
        reached("from nblib.b import *") == {"nblib", "nblib.b"}
        and reached("import numpy") == set()
    )
    assert reached('from lessons.pitfalls import pitfall\npitfall("P02")') == pitfalls | {
        "lessons.pitfalls.second"
    }
    everything = pitfalls | {"lessons.pitfalls.first", "lessons.pitfalls.second"}
    assert reached("from lessons.pitfalls import catalogue") == everything
    assert reached("from lessons import pitfalls\npitfalls.catalogue()") == everything
    assert reached("%matplotlib inline\nfrom nblib import b") == {"nblib", "nblib.b"}  # IPython's
    assert reached("files = !ls") == set()  # neither Python nor a line that can be left out


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("x = 1  # one", "x = (\n    1\n)", True),
        ("def f():\n    '''Says.'''\n    return 1", "def f():\n    return 1", True),
        ("raise ValueError(f'{x} is wrong')", "raise ValueError('is wrong')", True),
        ("assert x, 'one'", "assert x", True),
        ("__version__ = '1'", "__version__ = '2'", True),
        ("await run(1)", "await run( 1 )", True),
        ("raise ValueError(x)", "raise TypeError(x)", False),
        ("raise SystemExit(1)", "raise SystemExit(2)", False),
        ("'what the cell shows'", "'something else'", False),
        ("print('one')", "print('two')", False),
        ("f(a)[b]", "f(a, b)", False),
        ("%timeit f(1)", "%timeit f(2)", False),
        ("%timeit f(1)", "%timeit  f(1)", False),  # hashed as it stands
    ],
)
def test_what_counts_as_the_same_cell(one, other, same):
    assert (code_hash.cell(one).does == code_hash.cell(other).does) == same


def test_a_module_that_is_no_python_ends_planning_in_one_sentence(project):
    (project / "nblib" / "methods" / "lrc/layer.py").write_text("import torch\n\ndef broken(:\n")
    with pytest.raises(ParameterError) as caught:
        jobs.plan(["10_lrc", "20"])
    sentences = str(caught.value).splitlines()
    assert len(sentences) == 2 and all(
        "lrc/layer.py line 3 is not Python: invalid syntax." in s for s in sentences
    )
    assert sentences[0].startswith("10_lrc cannot be planned: ")
    assert len(jobs.plan(["00"])) == 1  # it does not reach that module
