"""The shape of the code, read from its imports: one way, no circles, and a test file for every module.

What decides is the syntax tree, so imports inside functions count as well.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from nblib import paths

ROOT = paths.root()
HOMES = {
    "nblib": ROOT / "nblib",
    "lessons": ROOT / "notebooks" / "lessons",
    "loopdoctor": ROOT / "doctor/loopdoctor",
}
# Modules without a test file of their own name, and where they are tested. To become fewer.
TESTED_ELSEWHERE = {
    "notebooks/lessons/claims.py": "test_docs.py",
    "notebooks/lessons/programs.py": "lessons/test_peers.py",
}


class Import(NamedTuple):
    importer: str
    imported: str
    inside: bool  # a function: not when the module is loaded


def modules(package: str) -> dict[str, Path]:
    """Dotted name to file."""
    files = sorted(HOMES[package].rglob("*.py"))
    parts = {file: (package, *file.relative_to(HOMES[package]).with_suffix("").parts) for file in files}
    return {".".join(part for part in names if part != "__init__"): file for file, names in parts.items()}


MODULES = {name: file for package in HOMES for name, file in modules(package).items()}


def imports(name: str) -> set[Import]:
    """What a module imports, as names of modules where they are ours, else as they stand."""
    file = MODULES[name]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Import):
            found.update(Import(name, alias.name, inside) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(Import(name, whole if whole in MODULES else base, inside))
        for child in ast.iter_child_nodes(node):
            visit(child, inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    visit(ast.parse(file.read_text()), False)
    return found


IMPORTS = [each for name in MODULES for each in sorted(imports(name))]


def room(name: str) -> str:
    """Where in nblib a module is: core, methods, run or cli."""
    parts = name.split(".")
    return parts[1] if parts[1:2] and parts[1] in ("methods", "run", "cli") else "core"


def arrows(package: str) -> list[Import]:
    return [each for each in IMPORTS if each.importer.split(".")[0] == package]


def written(unwanted: list[Import]) -> list[str]:
    return [f"{each.importer} imports {each.imported}" for each in unwanted]


def test_no_circle():
    """Also none by way of an import inside a function."""
    graph = {name: {each.imported for each in IMPORTS if each.importer == name} for name in MODULES}
    done: set[str] = set()

    def circle(name: str, path: tuple[str, ...]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done or name not in graph:
            return []
        found = next(filter(None, (circle(each, (*path, name)) for each in sorted(graph[name] - {name}))), [])
        done.add(name)
        return found

    assert [path for path in (circle(name, ()) for name in graph) if path] == []


def test_no_arrow_upwards():
    """Core knows no method and no runner, and methods know no runner. The base model is trained by Muon."""
    allowed = {"core": {"core"}, "methods": {"core", "methods"}, "run": {"core", "methods", "run"}}
    allowed["cli"] = {*allowed["run"], "cli"}
    wrong = [
        each
        for each in arrows("nblib")
        if each.imported.startswith("nblib.")
        and room(each.imported) not in allowed[room(each.importer)]
        and not (each.importer == "nblib.base" and room(each.imported) == "methods")
    ]
    assert written(wrong) == []


def test_nblib_stands_without_the_lessons_and_without_the_doctors_inside():
    """The command line lists pitfalls, when it is asked to; the doctor is handed on by one module."""

    def wrong(each: Import) -> bool:
        package = each.imported.split(".")[0]
        if package == "lessons":
            return each.importer != "nblib.cli" or not each.inside
        return package == "loopdoctor" and each.importer not in ("nblib.doctor", "nblib.cli")

    assert written(list(filter(wrong, arrows("nblib")))) == []


def test_the_doctor_stands_alone():
    wrong = [each for each in arrows("loopdoctor") if each.imported.split(".")[0] in ("nblib", "lessons")]
    assert written(wrong) == []


def test_the_catch_of_this_file():
    """It sees imports of every form."""
    seen = {(each.importer, each.imported) for each in IMPORTS}
    assert {
        ("nblib.base", "nblib.train"),
        ("nblib.base", "nblib.methods.param_groups"),
        ("nblib.base", "torch"),
    } <= seen
    assert any(each.inside for each in IMPORTS) and not all(each.inside for each in IMPORTS)


@pytest.mark.parametrize("package", ["nblib", "lessons"])
def test_every_module_has_a_test_file_of_its_name(package):
    """nblib/x.py has tests/test_x.py, nblib/methods/x.py tests/methods/test_x.py, lessons/x.py tests/lessons/test_x.py;
    the pitfalls have test_pitfalls.py, which runs them all."""
    missing = []
    for file in modules(package).values():
        within = file.relative_to(HOMES[package])
        test = ROOT / "tests" / ("lessons" if package == "lessons" else "") / within.with_name(f"test_{within.name}")
        if file.name != "__init__.py" and within.parts[0] not in ("drawings", "pitfalls") and not test.exists():
            missing.append(str(file.relative_to(ROOT)))
    assert [name for name in missing if name not in TESTED_ELSEWHERE] == []


def test_names_of_test_files_are_unique():
    names = [file.name for file in (ROOT / "tests").rglob("*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
