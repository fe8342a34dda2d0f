"""What the README and CONTRIBUTING tell people to type exists, and the links lead somewhere."""

import re
import shlex

import pytest

from loopdoctor import script
from nblib import paths
from nbworkbook import cli

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "tests/README.md",
    "parameters/README.md",
    "outputs/README.md",
    "nblib/README.md",
)


def typed(page: str, command: str) -> list[str]:
    """The lines of the page's code blocks that call this command, comments cut off."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", _text(page), re.S | re.M)
    lines = [
        line.split("  #")[0].strip()
        for language, block in blocks
        if not language
        for line in block.splitlines()
    ]
    return [line for line in lines if re.match(rf"(\.venv/bin/)?{command} ", line)]


@pytest.mark.parametrize("page", ["README.md", "docs/clusters.md"])
def test_nblib_commands_parse(page):
    commands = typed(page, "nblib")
    assert commands
    for line in commands:
        words = shlex.split(line)[1:]
        words = words[: words.index("--")] if "--" in words else words
        if words[0] == "doctor":
            assert script.command_line().parse_args(words[1:]).target, line
        else:
            assert cli.command_line().parse_args(words).command, line


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", _text("Makefile"), re.M))
    named = re.findall(r"`make ([a-z-]+)", _text(page)) + [
        line.split()[1] for line in typed(page, "make")
    ]
    assert set(named) <= targets


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    folder = (paths.root() / page).parent
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", _text(page)) if "://" not in link]
    assert [link for link in links if not (folder / link).exists()] == []


def test_every_notebook_has_a_row():
    rows = re.findall(r"^\| \[(\w+)\]", _text("README.md"), re.M)
    assert rows == sorted(path.stem for path in paths.notebooks().glob("*.ipynb"))


def _text(page: str) -> str:
    return (paths.root() / page).read_text()
