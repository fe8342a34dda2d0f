"""Where the links of a notebook lead once it is a page in the folder of its run.

A relative link counts from the notebook's folder; the page lies elsewhere. So it is written anew,
from the page to the file: to its page in the site (`make book`) where there is one, else to itself.
A link to a file that is not there, or outside the project, leads nowhere, and what it says is text.
A link within the page (`#the-formulas`) finds its heading whatever the case and the punctuation, as
each program that shows notebooks spells these names in its own way.

Footgun: links count on the folders' places. A run folder that is moved elsewhere loses them.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote

from nblib import paths

PAGES = (".ipynb", ".md")  # what the site shows as a page


class Links:
    """The links of one page."""

    def __init__(self, notebooks: Path, page: Path, names: Iterable[str] = ()) -> None:
        """Take the folder of the notebook, that of the page, and the ids in the page."""
        self.notebooks = notebooks
        self.page = page
        self.names = {_spelled_anyhow(name): name for name in reversed(list(names))}

    def lead(self, address: str) -> str | None:
        """Return the address for the page; None where it leads nowhere."""
        if re.match(r"(https?|mailto|data):", address):
            return address
        path, _, fragment = address.partition("#")
        if not path:
            name = self.names.get(_spelled_anyhow(unquote(fragment)))
            return None if name is None else f"#{quote(name)}"

        file = self._file(unquote(path.partition("?")[0]))
        if file is None:
            return None
        way = quote(os.path.relpath(_in_the_site(file) or file, os.path.abspath(self.page)))
        return f"{way}#{fragment}" if fragment else way

    def _file(self, path: str) -> Path | None:
        """Return the file of the project that a path from the notebook names, if it is there."""
        file = Path(os.path.abspath(self.notebooks / path))
        places = (os.path.abspath(self.notebooks), os.path.abspath(paths.root()))
        try:
            is_there = any(file.is_relative_to(place) for place in places) and file.exists()
        except (OSError, ValueError):  # no name that a file can have
            return None
        return file if is_there else None


def site() -> Path:
    """Return the folder of the site, which need not be there."""
    return paths.outputs() / "book"


def _in_the_site(file: Path) -> Path | None:
    """Return the page of the site that shows this file, if there is one."""
    root = os.path.abspath(paths.root())
    if file.suffix not in PAGES or not file.is_relative_to(root):
        return None
    page = (site() / file.relative_to(root)).with_suffix(".html")
    return page if page.is_file() else None


def _spelled_anyhow(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()
