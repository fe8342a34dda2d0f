"""A notebook as one script: its code cells, one after the other, in one namespace, without Jupyter.

    loopdoctor page.ipynb           all cells, watched from the first to the last
    loopdoctor page.ipynb:7         cells 1 to 7, and only the last of them is watched

Cells are counted as Jupyter counts them in a fresh kernel: code cells from 1, without the empty
ones. Each is compiled under a name of its own (cells.py), so a traceback says `page.ipynb, cell 7`,
and a line keeps its number.

What is not Python belongs to Jupyter: magics (`%matplotlib inline`), shell lines (`!pip install`,
`files = !ls`), help (`loss?`), cells in another language (`%%bash`). It is left out, and listed at
the end. What a magic runs as Python is run: the statement behind `%time`, the cell under `%%time`
or `%%capture`. `display(x)` prints, `await` works at the top of a cell, the working folder is that
of the notebook, and figures are drawn without a window.

Footgun: a line that starts with % or ! is a magic only where a statement starts. Within a text in
triple quotes or within brackets it is text or arithmetic, so lines are read in order, with the
quotes and brackets that are open.
"""

import __future__

import ast
import asyncio
import inspect
import json
import os
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from loopdoctor import cells

ENDING = ".ipynb"
OTHERS = frozenset(  # cell magics whose cell is no Python of this namespace
    "! R SVG ai bash bigquery cmd css cython file html HTML javascript js julia latex markdown "
    "mermaid perl powershell pypy python python2 python3 ruby script sh sql svg sx system "
    "writefile".split()
)
ON_A_STATEMENT = ("time",)  # line magics that run the rest of their line
OURS = re.compile(r"%+doctor\b|%(re|un)?load_ext\s+loopdoctor\b")
MAGIC = re.compile(r"%\s*(?P<name>\w+)\s*(?P<rest>.*)")
HELP = re.compile(r"\?{1,2}\s*[\w.%*]+|[\w.%*]+\?{1,2}")
ASSIGNED = re.compile(r"""(?P<to>[A-Za-z_][\w.\[\]'", ]*?)\s*=\s*(?P<what>[!%].*)""")
WORDS = "pip|pip3|conda|mamba|uv|cd|ls|ll|mkdir|rmdir|cat|cp|mv|rm|matplotlib|load_ext|env"
WITHOUT_MARK = re.compile(rf"({WORDS})\s+[\w./~-].*")  # magics to Jupyter, where they are no Python
LISTINGS = re.compile(r"(ls|ll|pwd)(\s+-\w+)?")
FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class Unreadable(ValueError):
    """The notebook or the cell cannot be run; the text is one sentence that says why."""


class Cell(NamedTuple):
    number: int
    code: types.CodeType
    left_out: list[str]  # each with its place


class Notebook:
    """A notebook that can be run: `with page: page.run_before(); page.run()`."""

    def __init__(self, path: Path, chosen: str = ""):
        """`chosen` is the number of the one cell that is meant, or nothing for all of them."""
        self.path = path
        texts = _texts(path)
        if chosen and not 1 <= int(chosen) <= len(texts):
            raise Unreadable(f"{path} has no cell {chosen}; its code cells are 1 to {len(texts)}.")
        last = int(chosen) if chosen else len(texts)
        all_cells = list(_compiled(path.name, texts[:last]))
        self.before = all_cells[:-1] if chosen else []
        self.meant = all_cells[-1:] if chosen else all_cells
        self.files = {cell.code.co_filename for cell in all_cells}
        self.left_out: list[str] = []  # of the cells that were run
        self.module = types.ModuleType("__main__")

    def __enter__(self) -> "Notebook":
        """Set up what a kernel has: `__main__`, the folder, a loop for `await`, no windows."""
        self.kept = sys.modules.get("__main__"), os.getcwd(), os.environ.get("MPLBACKEND")
        self.loop: asyncio.AbstractEventLoop | None = None
        vars(self.module).update(display=display, get_ipython=lambda: Shell(self))
        sys.modules["__main__"] = self.module
        os.chdir(self.path.resolve().parent)
        os.environ.setdefault("MPLBACKEND", "agg")
        return self

    def __exit__(self, *raised) -> None:
        """Put it back."""
        main, folder, backend = self.kept
        sys.modules["__main__"] = main
        os.chdir(folder)
        if backend is None:
            os.environ.pop("MPLBACKEND", None)
        if self.loop is not None:
            _close(self.loop)

    def run_before(self) -> None:
        """Run the cells above the one that is meant."""
        for cell in self.before:
            self._run(cell)

    def run(self) -> None:
        """Run the cell that is meant, or all of them."""
        for cell in self.meant:
            self._run(cell)

    def _run(self, cell: Cell) -> None:
        self.left_out += cell.left_out
        result = eval(cell.code, vars(self.module))
        # A cell with `await` at its top gives a coroutine.
        if inspect.iscoroutine(result) and cell.code.co_flags & inspect.CO_COROUTINE:
            self.loop = self.loop or asyncio.new_event_loop()
            self.loop.run_until_complete(result)


def display(*objects: Any, **options: Any) -> "Shown":
    """Print what Jupyter would show."""
    if objects:
        print(*objects)
    return Shown()


class Shown:
    """What `display(x, display_id=True)` gives: the place on the page, to be changed later."""

    def display(self, *objects: Any, **options: Any) -> None:
        display(*objects)

    update = display


class Shell:
    """Stands for IPython's shell: what it is asked for is noted and not done."""

    def __init__(self, page: Notebook):
        self._page = page
        self.user_ns = vars(page.module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def note(*args: Any, **kwargs: Any) -> None:
            given = ", ".join(map(repr, args))
            self._page.left_out.append(f"get_ipython().{name}({given})")

        return note


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """End what still waits, and the loop."""
    waiting = asyncio.all_tasks(loop)
    for task in waiting:
        task.cancel()
    if waiting:
        loop.run_until_complete(asyncio.wait(waiting))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


# ------------------------------------------------------------------------------------------ reading
def check(path: Path, chosen: str) -> None:
    """Raise `Unreadable` for what cannot be run, and say nothing else."""
    with warnings.catch_warnings():
        # of Python about the text of a cell; it comes when the cell is to run
        warnings.simplefilter("ignore")
        Notebook(path, chosen)


def _texts(path: Path) -> list[str]:
    """Read the code cells that are not empty."""
    try:
        page = json.loads(path.read_text(encoding="utf-8"))
        about = page.get("metadata", {})
        language = about.get("kernelspec", {}).get("language", "python")
        language = about.get("language_info", {}).get("name", language)
        found = [cell for cell in page["cells"] if cell["cell_type"] == "code"]
        texts = ["".join(cell["source"]) for cell in found]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise Unreadable(
            f"{path} cannot be read as a notebook of Jupyter, version 4 ({told})."
        ) from error
    if not language.startswith(("python", "ipython")):
        raise Unreadable(f"{path} is a notebook in {language}; only one in Python can be run.")
    return [text for text in texts if text.strip()]


def _compiled(page: str, texts: list[str]) -> Iterator[Cell]:
    """Compile the cells. What one imports from `__future__` holds in the later ones."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for number, text in enumerate(texts, 1):
        name = cells.name(page, number)
        code, left_out = as_python(text)
        cells.show_in_tracebacks(name, text)
        try:
            made = compile(code, name, "exec", flags=flags, dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            where = cells.place(name, getattr(error, "lineno", None) or 1)
            what = getattr(error, "msg", None) or error
            raise Unreadable(f"{where} cannot be run as Python: {what}.") from error
        flags |= made.co_flags & FUTURES
        yield Cell(number, made, [f"{line} ({cells.place(name, n)})" for n, line in left_out])


def as_python(text: str) -> tuple[str, list[tuple[int, str]]]:
    """Give a cell as Python, line for line, and what was left out: numbers of lines, their text."""
    lines = text.split("\n")
    python: list[str] = []
    left_out: list[tuple[int, str]] = []
    # Magics over the whole cell come first, perhaps several, one under the other.
    while len(python) < len(lines) and re.match(r"%%|\s*$", lines[len(python)]):
        line = lines[len(python)].strip()
        if line.startswith("%%"):
            name = (line[2:].split() or ["!"])[0]
            if name in OTHERS or name.startswith("!"):
                return "", [(len(python) + 1, line)]
        python.append("")
    # Then the lines, each with what is still open from those above it.
    above = Above()
    while len(python) < len(lines):
        number = len(python)
        line = lines[number]
        bare = line.strip()
        indent = line[: len(line) - len(line.lstrip())]
        stand_in = _instead(bare) if above.nothing_open else None
        if stand_in is None:
            if above.nothing_open and _statement(bare) != bare:
                line = indent + _statement(bare)
            above.read(line)
            python.append(line)
            continue
        python.append(indent + stand_in)
        # One that ends in a backslash goes on in the next line.
        while lines[len(python) - 1].rstrip().endswith("\\") and len(python) < len(lines):
            python.append("")
        told = " ".join(part.strip().rstrip("\\").strip() for part in lines[number : len(python)])
        left_out += [] if OURS.match(told) else [(number + 1, told)]
    return "\n".join(python) + "\n", left_out


def _statement(bare: str) -> str:
    """Give the statement of a line without a magic in it: `x = f()` of `x = %time f()`."""
    assigned = ASSIGNED.fullmatch(bare)
    magic = MAGIC.fullmatch(assigned["what"] if assigned else bare)
    if magic is None or magic["name"] not in ON_A_STATEMENT or not magic["rest"]:
        return bare
    return f"{assigned['to']} = {magic['rest']}" if assigned else magic["rest"]


def _instead(bare: str) -> str | None:
    """Give what stands in place of a line that is left out; None where it is Python."""
    bare = _statement(bare)
    if bare.startswith(("%", "!")) or HELP.fullmatch(bare) or LISTINGS.fullmatch(bare):
        return "pass"
    if WITHOUT_MARK.fullmatch(bare) and not _is_python(bare):
        return "pass"
    # The answer of a shell line is a list of lines; what a magic answers differs.
    assigned = ASSIGNED.fullmatch(bare)
    if assigned is None:
        return None
    return f"{assigned['to']} = {'[]' if assigned['what'].startswith('!') else 'None'}"


def _is_python(line: str) -> bool:
    try:
        ast.parse(line)
    except SyntaxError:
        return False
    return True


class Above:
    """What the lines so far have left open: a text, brackets, a line that goes on."""

    def __init__(self):
        self.quote = ""  # that ends the text which is open
        self.brackets = 0
        self.goes_on = False

    @property
    def nothing_open(self) -> bool:
        """Whether a statement begins in the next line."""
        return not self.quote and not self.brackets and not self.goes_on

    def read(self, line: str) -> None:
        """Go through a line of Python."""
        at = 0
        self.goes_on = False
        while at < len(line):
            if line[at] == "\\":
                self.goes_on = at == len(line) - 1
                at += 2
            elif self.quote:
                ends = line.startswith(self.quote, at)
                at += len(self.quote) if ends else 1
                self.quote = "" if ends else self.quote
            elif line[at] == "#":
                break
            elif line[at] in "'\"":
                long = 3 * line[at]
                self.quote = long if line.startswith(long, at) else line[at]
                at += len(self.quote)
            else:
                self.brackets += (line[at] in "([{") - (line[at] in ")]}")
                at += 1
        # A text in single quotes ends with its line.
        if len(self.quote) == 1 and not self.goes_on:
            self.quote = ""
