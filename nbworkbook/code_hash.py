"""The modules that a piece of code reaches by import, and a hash of what those modules do.

A result depends on the code behind it and on nothing else in the project. So the name of a stored
result (a run, the base model) holds the hash of that code alone. Imports are read from the syntax
tree; nothing is executed. An import counts wherever it stands, in a function too; `from
nblib.methods import lrc` reaches lrc and its packages, not the other methods. The catalogue of
pitfalls loads its modules by name at run time, so there is one more rule. Code that names a pitfall
("P07") reaches the module that declares it. Code that uses `catalogue` reaches all of them.

A module is hashed as its syntax tree. Docstrings, comments, layout, the messages of `raise` and
`assert`, and `__version__` are left out, so a reworded sentence repeats no run.

A module that lies beside the notebook is part of its code as well, since a kernel imports from the
folder it runs in.

Footgun: what is imported under a computed name, and code that stands in a string, is not seen. Nor
is a module of your own that is installed from elsewhere: it counts by the version of its package
alone (input_hash.py).
"""

import ast
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from nblib import paths

# A package by the name it is imported under, and its folder in the clone.
PACKAGES = {
    "nblib": "nblib",
    "nbworkbook": "nbworkbook",
    "lessons": "notebooks/lessons",
    "experiments": "notebooks/experiments",
    "loopdoctor": "doctor/loopdoctor",
}
PITFALLS = "lessons.pitfalls"
ALL_PITFALLS = "lessons.pitfalls.catalogue"
PITFALL_ID = re.compile(r"P\d\d")
# Decides which folder a person's run takes, and does nothing in a run of the runner: in no run's
# key by way of `runs`.
BY_HAND = "nbworkbook.interactive_run"
MAGIC = re.compile(r"^(\s*)[%!].*$", flags=re.M)  # lines of a cell that only IPython understands
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# The nodes that import something or hold a sentence.
LOOKED_AT = (
    *DOCUMENTED,
    ast.Import,
    ast.ImportFrom,
    ast.Attribute,
    ast.Constant,
    ast.Raise,
    ast.Assert,
    ast.Assign,
)


class Code(NamedTuple):
    """A module or a cell."""

    does: str  # a hash of what it does
    names: frozenset[str]  # dotted names it may import


class Places(NamedTuple):
    """The folders in which modules are looked for."""

    root: Path  # the clone, or where our packages are installed
    beside: Path | None  # the notebook's own

    def file_of(self, name: str) -> Path | None:
        """Return the file of a module of ours or of one beside the notebook; None for all
        others.
        """
        first, *rest = name.split(".")
        path = self._top_of(first).joinpath(*rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        return None

    def _top_of(self, first: str) -> Path:
        """Return the folder of a package, or the file of a module without its suffix."""
        local = (self.beside or self.root) / first
        if first not in PACKAGES:
            return local

        # Our packages stand in their folders of the clone; installed, side by side.
        for top in (self.root / PACKAGES[first], self.root / first):
            if top.is_dir():
                return top
        if first == "loopdoctor" and not local.is_dir():
            spec = find_spec(first)
            if spec and spec.origin:
                return Path(spec.origin).parent  # it is installed from elsewhere
        return local

    def code_of(self, name: str) -> Code:
        """Return the code of a module that has a file."""
        file = self.file_of(name)
        facts = file.stat()
        return _parsed(file, name, facts.st_mtime_ns, facts.st_size)

    def first_names(self) -> set[str]:
        """Return the first names of all that has a file: most imports are of torch, and need no
        look at the disk.
        """
        names = set(PACKAGES)
        if self.beside is not None:
            names |= {name.removesuffix(".py") for name in os.listdir(self.beside)}
        return names


def digest(cells: Iterable[str], root: Path | None = None) -> str:
    """Return one hash of all the modules that pieces of code, the cells of a notebook for example,
    reach.
    """
    modules = reached(cells, root)
    return _sha256(repr(sorted((name, module.does) for name, module in modules.items())))


def reached(
    cells: Iterable[str], root: Path | None = None, beside: Path | None = None
) -> dict[str, Code]:
    """Return the modules that are reached, by dotted name: ours, and those in the folder `beside`.

    ValueError where one of them is not Python.
    """
    places = Places(root or paths.code(), beside)
    first_names = places.first_names()
    modules: dict[str, Code] = {}
    seen = {BY_HAND}
    waiting: set[str] = set()
    for source in cells:
        waiting |= cell(source).names

    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting |= _pitfall_modules(name, places) - seen

        # Every package on the way to the module: its __init__ runs first.
        parts = name.split(".")
        if parts[0] not in first_names:
            continue
        for count in range(1, len(parts) + 1):
            package = ".".join(parts[:count])
            if package not in modules and places.file_of(package) is not None:
                modules[package] = places.code_of(package)
                waiting |= modules[package].names - seen
    return modules


def _pitfall_modules(name: str, places: Places) -> set[str]:
    """Return the modules that declare a pitfall, where this is the name of one or of the
    catalogue.
    """
    is_one = name.startswith(f"{PITFALLS}.") and PITFALL_ID.fullmatch(
        name.removeprefix(f"{PITFALLS}.")
    )
    if name != ALL_PITFALLS and not is_one:
        return set()
    package = places.file_of(PITFALLS)
    if package is None:
        return set()
    family = {f"{PITFALLS}.{file.stem}" for file in package.parent.glob("[!_]*.py")}
    if name == ALL_PITFALLS:
        return family
    return {module for module in family if name in places.code_of(module).names}


@functools.cache
def cell(source: str) -> Code:
    """Return the code of a notebook's cell.

    One with a line that only IPython can read is hashed as it stands.
    """
    for text in (source, MAGIC.sub(r"\1pass", source)):
        try:
            # Interactive: its first string is no docstring, it may be what the cell shows.
            code = _examine(ast.Interactive(ast.parse(text).body))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return code if text == source else code._replace(does=_sha256(source))
    return Code(_sha256(source), frozenset())


@functools.cache
def _parsed(path: Path, name: str, *stamp: int) -> Code:
    """Return the code of a file; kept by time and size too, as a file may be edited while we
    run.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ValueError(
            f"{paths.short(path)} line {error.lineno} is not Python: {error.msg}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{paths.short(path)} is not Python: {error}") from None
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return _examine(tree, package)


# ------------------------------------------------------------------ the syntax tree


def _examine(tree: ast.AST, package: str = "") -> Code:
    """Return the code of a tree, from one walk through its nodes.

    What is spelled out for the hash are all nodes and values but the sentences, and each list with
    its length, so that no two trees are spelled alike.
    """
    waiting: list = [tree]
    spelled: list = []
    names: set[str] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            spelled.append(len(node))
            waiting += node
        elif isinstance(node, ast.AST):
            if isinstance(node, LOOKED_AT):
                names.update(_imported(node, package))
                _forget_sentences(node)
            spelled.append(type(node).__name__)
            waiting += [getattr(node, field, None) for field in node._fields if field != "ctx"]
        else:
            spelled.append(repr(node))
    return Code(_sha256(repr(spelled)), frozenset(names))


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the dotted names that a node of a module in this package may import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
    elif isinstance(node, ast.ImportFrom):
        base = _base_of(node, package)
        yield base
        for alias in node.names:
            yield f"{base}.{alias.name}"
    elif isinstance(node, ast.Attribute) and node.attr == "catalogue":
        yield ALL_PITFALLS
    elif (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and PITFALL_ID.fullmatch(node.value)
    ):
        yield f"{PITFALLS}.{node.value}"


def _base_of(node: ast.ImportFrom, package: str) -> str:
    """Return the module that `from ... import` names, absolute: one dot is the package, each
    further one above it.
    """
    parts = []
    if node.level:
        packages = package.split(".")
        parts = packages[: len(packages) + 1 - node.level]
    if node.module:
        parts.append(node.module)
    return ".".join(parts)


def _forget_sentences(node: ast.AST) -> None:
    """Take docstrings, messages of errors and the version out of a node."""
    if isinstance(node, DOCUMENTED):
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    elif isinstance(node, ast.Raise):
        if node.exc:
            node.exc = _EmptyTexts().visit(node.exc)
    elif isinstance(node, ast.Assert):
        node.msg = None
    elif isinstance(node, ast.Assign):
        targets = [getattr(target, "id", "") for target in node.targets]
        if targets == ["__version__"]:
            node.value = None


class _EmptyTexts(ast.NodeTransformer):
    """Every text becomes empty, also one with values in it."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        """Return an empty text for an f-string."""
        return ast.Constant("")

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        """Return an empty text for a text, and other constants as they are."""
        return ast.Constant("") if isinstance(node.value, str) else node


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
