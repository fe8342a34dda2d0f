"""Which package may import which: read from the syntax of every module, so imports inside functions
count as well.

nblib is for somebody's own training script, nbworkbook runs notebooks, lessons and experiments
stand beside the notebooks, and the doctor stands alone. What is not installed with a script's torch
must not be needed to import nblib.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from nblib import paths

ROOT = paths.root()
HOMES = {
    "nblib": ROOT / "nblib",
    "nbworkbook": ROOT / "nbworkbook",
    "lessons": ROOT / "notebooks" / "lessons",
    "experiments": ROOT / "notebooks" / "experiments",
    "loopdoctor": ROOT / "doctor" / "loopdoctor",
}
# Our own packages that each may import.
MAY_IMPORT = {
    "nblib": {"nblib"},
    "nbworkbook": {"nblib", "nbworkbook"},
    "lessons": {"nblib", "nbworkbook", "lessons", "experiments"},
    "experiments": {"nblib", "nbworkbook", "lessons", "experiments"},
    "loopdoctor": {"loopdoctor"},
}
# Modules that hand the doctor on, to who has it installed.
DOCTORS_DOORS = {"nblib.doctor", "nbworkbook.cli"}
# What nblib imports when it is loaded; anything else is imported inside the function that needs it.
AT_IMPORT = {"torch", "transformers", "safetensors", "numpy"}
JUPYTER = {
    "IPython",
    "ipykernel",
    "ipywidgets",
    "jupyter_client",
    "jupyter_core",
    "nbformat",
    "nbclient",
    "nbconvert",
}
JUPYTER |= {"papermill", "traitlets", "matplotlib"}
# The pitfalls are a folder of modules that their catalogue goes through.
BY_STRING = {"lessons", "lessons.pitfalls"}


class Import(NamedTuple):
    importer: str
    imported: str
    inside: bool  # a function, so not when the module is loaded


def modules(package: str) -> dict[str, Path]:
    """Return dotted name to file."""
    found = {}
    for file in sorted(HOMES[package].rglob("*.py")):
        parts = (package, *file.relative_to(HOMES[package]).with_suffix("").parts)
        found[".".join(part for part in parts if part != "__init__")] = file
    return found


MODULES = {name: file for package in HOMES for name, file in modules(package).items()}


def imports(name: str) -> set[Import]:
    """Return what a module imports, as names of modules where they are ours, else as they stand."""
    file = MODULES[name]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Import):
            found.update(Import(name, alias.name, inside) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(Import(name, whole if whole in MODULES else base, inside))
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inside or function)

    visit(ast.parse(file.read_text()), False)
    return found


IMPORTS = [each for name in MODULES for each in sorted(imports(name))]


def written(unwanted: list[Import]) -> list[str]:
    return [f"{each.importer} imports {each.imported}" for each in unwanted]


def test_arrows_go_one_way():
    wrong = []
    for each in IMPORTS:
        importer, imported = each.importer.partition(".")[0], each.imported.partition(".")[0]
        if imported not in HOMES or imported in MAY_IMPORT[importer]:
            continue
        if imported == "loopdoctor" and (
            each.importer in DOCTORS_DOORS or importer in ("lessons", "experiments")
        ):
            continue
        wrong.append(each)
    assert written(wrong) == []


def test_the_core_of_nblib_knows_no_method():
    wrong = [
        each
        for each in IMPORTS
        if each.importer.startswith("nblib.")
        and not each.importer.startswith("nblib.methods")
        and each.imported.startswith("nblib.methods")
    ]
    assert written(wrong) == []


def test_no_circle():
    """Also none by way of an import inside a function."""
    graph = {name: {each.imported for each in IMPORTS if each.importer == name} for name in MODULES}
    done: set[str] = set()

    def circle(name: str, path: tuple[str, ...]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done or name not in graph:
            return []
        for each in sorted(graph[name] - {name}):
            if found := circle(each, (*path, name)):
                return found
        done.add(name)
        return []

    assert [path for path in (circle(name, ()) for name in graph) if path] == []


def test_nblib_asks_for_four_packages_when_it_is_loaded_and_never_for_jupyter():
    wrong = []
    for each in IMPORTS:
        if each.importer.partition(".")[0] != "nblib":
            continue
        package = each.imported.partition(".")[0]
        if package in HOMES or package in sys.stdlib_module_names:
            continue
        if package in JUPYTER or not (each.inside or package in AT_IMPORT):
            wrong.append(each)
    assert written(wrong) == []


def strings_imported(name: str) -> list[str]:
    """Return our own modules that a module imports by a string."""
    found = []
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "meta_path":
            found.append("sys.meta_path")
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
        text = (
            first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
        )
        if "import" in called and text.partition(".")[0] in HOMES:
            found.append(text)
    return found


def test_no_package_of_ours_is_imported_by_a_string():
    assert {
        name: found
        for name in MODULES
        if name not in BY_STRING and (found := strings_imported(name))
    } == {}


STATE = """
import atexit, gc, json, logging, sys, time
import torch, transformers
from transformers import masking_utils
from transformers.integrations import moe as experts

def state():
    loggers = {name: logging.getLogger(name).level for name in ("bitsandbytes.backends.cpu.ops", "transformers")}
    patched = [masking_utils.find_packed_sequence_indices, experts._grouped_mm]
    bars = transformers.utils.logging.is_progress_bar_enabled()
    return [gc.get_threshold(), gc.get_freeze_count(), gc.isenabled(), loggers, list(map(id, patched)), bars,
            atexit._ncallbacks(), len(sys.meta_path)]

before = state()
import nblib
from nblib import checkpoint, losses, models, train, wiring
from nblib.methods import ard, distill, goose, lrc, moe, muon
print(json.dumps([before, state()]))
"""


def fresh(program: str) -> str:
    """Return what a new process prints."""
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env
    ).stdout


@pytest.mark.kernel
def test_importing_nblib_changes_nothing_in_its_host():
    before, after = json.loads(fresh(STATE).splitlines()[-1])
    assert after == before


SECONDS = """
import time, sys
import torch
began = time.process_time()
from nblib import train
print(time.process_time() - began, "transformers" in sys.modules, "torch._dynamo" in sys.modules)
"""


@pytest.mark.kernel
def test_the_loop_is_imported_in_three_tenths_of_a_second_beside_torch():
    """The seconds are the smallest of three; what would cost them is named besides."""
    runs = [fresh(SECONDS).split() for _ in range(3)]
    assert min(float(seconds) for seconds, *_ in runs) < 0.3
    assert runs[0][1:] == ["False", "False"], "train must not import transformers or torch._dynamo"
