"""Which modules of this project a piece of code reaches by import, and a hash of what those modules do.

A result depends on the code behind it and on nothing else in the project. So the name of a stored result (a run, the
base model) holds the hash of that code alone. Imports are read from the syntax tree; nothing is executed. An import
counts wherever it stands, in a function too; `from nblib.methods import lrc` reaches lrc and its packages, not the
other methods. The catalogue of pitfalls loads its modules by name at run time, so there is one more rule. Code that
names a pitfall ("P07") reaches the module that declares it. Code that uses `catalogue` reaches all of them.

A module is hashed as its syntax tree. Docstrings, comments, layout, the messages of `raise` and `assert`, and
`__version__` are left out, so a reworded sentence repeats no run.

Footgun: what is imported under a computed name, and code that stands in a string, is not seen.
"""

import ast
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from nblib import paths

# a package by the name it is imported under, and its folder in the project
PACKAGES = {"nblib": "nblib", "lessons": "notebooks/lessons", "loopdoctor": "doctor/loopdoctor"}
PITFALLS, ALL = "lessons.pitfalls", "lessons.pitfalls.catalogue"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LOOKED_AT = (*DOCUMENTED, ast.Import, ast.ImportFrom, ast.Attribute, ast.Constant, ast.Raise, ast.Assert, ast.Assign)
MAGIC = re.compile(r"^(\s*)[%!].*$", flags=re.M)  # lines of a cell that only IPython understands


class Code(NamedTuple):
    does: str  # a hash of what it does
    names: frozenset[str]  # dotted names it may import


def digest(cells: Iterable[str], root: Path | None = None) -> str:
    """One hash of all the project's modules that pieces of code, the cells of a notebook for example, reach."""
    return _sha256(repr(sorted((name, module.does) for name, module in reached(cells, root).items())))


def reached(cells: Iterable[str], root: Path | None = None) -> dict[str, Code]:
    """The modules by dotted name. ValueError when one of them is not Python."""
    root, modules, family, seen = root or paths.root(), {}, [], set()
    waiting = {name for source in cells for name in cell(source).names}
    while waiting:
        seen.add(name := waiting.pop())
        if name == ALL or re.fullmatch(rf"{PITFALLS}\.P\d\d", name):
            if not family and (init := _file(PITFALLS, root)):
                family = [f"{PITFALLS}.{file.stem}" for file in init.parent.glob("[!_]*.py")]
            waiting |= {each for each in family if name == ALL or name in _module(each, root).names} - seen
        parts = name.split(".")
        for package in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):  # a package's __init__ runs first
            if package not in modules and _file(package, root):
                modules[package] = _module(package, root)
                waiting |= modules[package].names - seen
    return modules


@functools.cache
def cell(source: str) -> Code:
    """A cell of a notebook; one with a line that only IPython can read is hashed as it stands."""
    for text in (source, MAGIC.sub(r"\1pass", source)):
        try:  # Interactive: its first string is no docstring, it may be what the cell shows
            code = _examine(ast.Interactive(ast.parse(text).body))
            return code if text == source else code._replace(does=_sha256(source))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return Code(_sha256(source), frozenset())


def _module(name: str, root: Path) -> Code:
    path = _file(name, root)
    return _parsed(path, name, path.stat().st_mtime_ns, path.stat().st_size)


@functools.cache
def _parsed(path: Path, name: str, *stamp: int) -> Code:
    """Kept by time and size too: a file may be edited while we run."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        where = f"{paths.short(path)} line {error.lineno}" if isinstance(error, SyntaxError) else paths.short(path)
        raise ValueError(f"{where} is not Python: {getattr(error, 'msg', error)}") from None
    return _examine(tree, name if path.name == "__init__.py" else name.rpartition(".")[0])


def _file(name: str, root: Path) -> Path | None:
    first, *rest = name.split(".")
    if first not in PACKAGES:
        return None
    top = root / PACKAGES[first]
    path = (top if top.is_dir() else root / first).joinpath(*rest)  # installed, all of them stand side by side
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _examine(tree: ast.AST, package: str = "") -> Code:
    """One walk: what is imported, and all nodes and values but the sentences (lists with their length, so that no two
    trees are spelled alike)."""
    waiting, spelled, names = [tree], [], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            spelled.append(len(node))
            waiting += node
        elif isinstance(node, ast.AST):
            if isinstance(node, LOOKED_AT):
                names.update(_names(node, package))
                _forget_sentences(node)
            spelled.append(type(node).__name__)
            waiting += [getattr(node, field, None) for field in node._fields if field != "ctx"]
        else:
            spelled.append(repr(node))
    return Code(_sha256(repr(spelled)), frozenset(names))


def _names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
    elif isinstance(node, ast.Attribute) and node.attr == "catalogue":
        yield ALL
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"P\d\d", node.value):
        yield f"{PITFALLS}.{node.value}"


def _forget_sentences(node: ast.AST) -> None:
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:]
    elif isinstance(node, ast.Raise) and node.exc:
        node.exc = _Blank().visit(node.exc)
    elif isinstance(node, ast.Assert):
        node.msg = None
    elif isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__version__"]:
        node.value = None


class _Blank(ast.NodeTransformer):
    """Every text empty, also one with values in it."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        return ast.Constant("")

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
