"""The place of a line as a person reads it: `page.ipynb, cell 7, line 3` or `train.py, line 12`.

Code says where it is by the name of its file and a number. In a notebook that name is one that
nobody has seen: `/tmp/ipykernel_311/2705.py`. What a person sees there is a cell and the lines of
that cell.

A notebook that runs as one script (notebook.py) names the code of each of its cells as `name` does,
so tracebacks, warnings and `place` say the same. A kernel has names of its own, and IPython knows
which cell they belong to.

Footgun: IPython counts how often a cell was run, so a cell has another number after each run, and
an old number may belong to code that was changed since.
"""

import linecache
import os
import sys
from pathlib import Path


def name(page: str, number: int) -> str:
    """Name the code of a cell: what stands where a file has its path."""
    return f"{page}, cell {number}"


def show_in_tracebacks(name: str, code: str) -> None:
    """Let tracebacks, `inspect` and `warnings` find the text of a cell under its name."""
    lines = code.splitlines(keepends=True)
    linecache.cache[name] = (len(code), None, lines, name)


def place(file: str, line: int) -> str:
    """Tell where a line is, from the file name of its code and its number."""
    return f"{_seen(file)}, line {line}"


def _seen(file: str) -> str:
    """Give what a person knows the file by."""
    # A cell of a kernel: IPython is asked only where the program has it already.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if hasattr(ipython, "get_ipython") else None
    known = shell.compile.format_code_name(file) if shell is not None else None
    if known is not None:
        return known[1]
    # A cell of a notebook that runs as a script, and code without a file (<string>).
    if not os.path.isabs(file):
        return file
    # A file in the working folder, or beneath it, or elsewhere.
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
