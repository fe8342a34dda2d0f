"""The doctor's magics of a notebook as plain Python, for tests that read or run cells without
IPython.

    %load_ext loopdoctor                    nothing
    %%doctor --steps 10 --into mine         with doctor.watch(steps=10, say=False) as mine:
    for x, y in loader: ...                     for x, y in loader: ...
"""

import re

MAGIC = re.compile(r"%%doctor(?: --steps (\d+))?(?: --into (\w+))?\n(.*)", re.S)


def plain(source: str) -> str:
    """Write a cell without the doctor's magics."""
    source = re.sub(r"^%load_ext loopdoctor$", "", source, flags=re.M)
    match = MAGIC.fullmatch(source)
    if match is None:
        return source
    steps, name, body = match[1] or "10", match[2] or "report", match[3]
    lines = [f"    {line}" if line else "" for line in body.splitlines()]
    return "\n".join([f"with doctor.watch(steps={steps}, say=False) as {name}:", *lines, name])
