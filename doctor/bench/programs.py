"""A program of the bench: its text, what is right to say of it, and its mended twin.

    # broken
    loss = F.cross_entropy(logits.softmax(-1), y)
    # mended
    # loss = F.cross_entropy(logits, y)
    # end

A fault is written once, with the mended lines beside the broken ones as comments. Its docstring
says what is wrong, in which public threads people met it (`Threads:`) and which checks are right to
name it (`Names:`, the best one first). A miss that is known carries its reason (`Missed:`), and
still counts as a miss.

Footgun: a block may lack broken or mended lines, where something is missing or too much. A twin
with an empty body would not compile, so `texts` compiles both.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
FIELD = re.compile(r"^(Threads|Names|Missed|After):[ \t]*(.*(?:\n[ \t]+\S.*)*)", re.M)


class Program(NamedTuple):
    name: str
    fault: bool
    text: str
    twin: str  # "" for a healthy program
    names: tuple[str, ...]  # checks that are right, the best one first
    threads: tuple[str, ...]
    missed: str  # why the doctor says nothing of it, where that is known


def programs() -> list[Program]:
    """Read all programs, the faults first."""
    faults = [_read(file, fault=True) for file in sorted((HERE / "faults").glob("*.py"))]
    healthy = [_read(file, fault=False) for file in sorted((HERE / "healthy").glob("*.py"))]
    return faults + healthy


def _read(file: Path, *, fault: bool) -> Program:
    text = file.read_text(encoding="utf-8")
    page = ast.get_docstring(ast.parse(text, str(file))) or ""
    fields = {key: " ".join(value.split()) for key, value in FIELD.findall(page)}
    twin = mend(text) if fault else ""
    if fault:
        compile(twin, f"{file.stem}_mended.py", "exec")
    return Program(
        name=file.stem,
        fault=fault,
        text=text,
        twin=twin,
        names=tuple(fields.get("Names", "").split()),
        threads=tuple(fields.get("Threads", "").split()),
        missed=fields.get("Missed", ""),
    )


def mend(text: str) -> str:
    """Return the mended twin: without the broken lines, and with the mended ones."""
    lines: list[str] = []
    part = ""
    for line in text.splitlines():
        word = line.strip()
        if word in ("# broken", "# mended", "# end"):
            part = "" if word == "# end" else word.removeprefix("# ")
        elif part == "mended":
            lines.append(re.sub(r"^(\s*)# ?", r"\1", line))
        elif part != "broken":
            lines.append(line)
    if part:
        raise ValueError(f"a block that begins with `# {part}` has no `# end`")
    return "\n".join(lines) + "\n"
