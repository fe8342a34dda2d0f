"""JSON Schemas of the parameters that notebooks declare, for editors that read YAML.

`parameters/<notebook>.schema.json` stands for the profiles, `<notebook>.sweep.schema.json` for the
sweep files, in which each parameter is a value or a list of values, and
`<notebook>.search.schema.json` for the search files, with ranges `low .. high log` and the lines
that name the goal. The last two are written where there are such files. The first line of each
parameter file names its schema, in the comment that YAML language servers look for:

    # yaml-language-server: $schema=./10_lrc.schema.json

An editor then completes names, shows what they mean and marks wrong ones. What a schema cannot say
is still checked before a kernel starts: whether a corpus or a model is there, and that a sweep
varies something.

Footgun: a schema is as old as the command that wrote it. After a change of a parameters cell,
`nblib schema` writes it again.
"""

import codecs
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nblib import files, paths
from nbworkbook import jobs, parameters
from nbworkbook.parameters import Parameter, ParameterError, Range

# Words of a search file that are no parameters: the goal, and what is watched with --prune.
GOALS = ("minimise", "maximise")
WATCHED = ("prune_high", "prune_low")

DRAFT = (
    "http://json-schema.org/draft-07/schema#"  # the newest that YAML language servers read whole
)
LINE = "# yaml-language-server: $schema="
TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
NUMBER = r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?"
RANGE = rf"^\s*{NUMBER}\s*\.\.\s*{NUMBER}(\s+log)?\s*$"
SECRET = r"^(@[A-Za-z_]\w*)?$"

Schema = dict[str, Any]


def write(notebooks: Sequence[str]) -> list[Path]:
    """Write what differs from the declarations and return it; ParameterError before any of that."""
    contents: dict[Path, bytes] = {}
    problems: list[str] = []
    for name in dict.fromkeys(notebooks):
        try:
            contents |= _files_of(jobs.resolve(name))
        except ParameterError as error:
            problems += str(error).splitlines()
    if problems:
        raise ParameterError("\n".join(problems))

    changed = []
    for path, content in contents.items():
        if not path.is_file() or path.read_bytes() != content:
            files.write(path, content)
            changed.append(path)
    return changed


def _files_of(notebook: str) -> dict[Path, bytes]:
    """Return the schemas of a notebook, and its parameter files with the line that names them."""
    known = parameters.declared(paths.notebooks() / f"{notebook}.ipynb")
    makers = {"sweep": of_sweeps, "search": of_searches}

    contents = {_place(notebook, ""): of_profiles(notebook, known)}
    texts: dict[Path, bytes] = {}
    for file in sorted(paths.profiles().glob(f"{notebook}.*.yaml")):
        kind = file.name.split(".")[-2]
        kind = kind if kind in makers else ""
        place = _place(notebook, kind)
        if kind:
            contents[place] = makers[kind](notebook, known)
        if file.is_file() and not file.is_symlink():
            texts[file] = _with_line(file.read_bytes(), place.name)

    written = {place: files.to_json(schema, indent=1) + "\n" for place, schema in contents.items()}
    return {place: text.encode() for place, text in written.items()} | texts


def _place(notebook: str, kind: str) -> Path:
    """Return where the schema lies of a notebook's files of this kind."""
    return paths.profiles() / ".".join(filter(None, [notebook, kind, "schema.json"]))


def _with_line(content: bytes, schema: str) -> bytes:
    """Return a parameter file whose first line names the schema; a line of its author's stays."""
    content = content.removeprefix(codecs.BOM_UTF8)
    first, _, rest = content.partition(b"\n")
    if first.startswith(f"{LINE}./".encode()) and first.rstrip().endswith(b".schema.json"):
        content = rest
    elif LINE.encode() in content:
        return content
    return f"{LINE}./{schema}\n".encode() + content


# ------------------------------------------------------------------ the three forms


def of_profiles(notebook: str, known: Mapping[str, Parameter]) -> Schema:
    """Return the schema of `name: value`."""
    properties = {name: _described(parameter) for name, parameter in known.items()}
    return _schema(f"Parameters of {notebook}", properties)


def of_sweeps(notebook: str, known: Mapping[str, Parameter]) -> Schema:
    """Return the schema of `name: value` and `name: [a, b]`."""
    properties = {}
    for name, parameter in known.items():
        value = _value(parameter)
        properties[name] = {"description": parameter.comment, "anyOf": [value, _several(value)]}
    return _schema(f"A sweep of {notebook}", properties)


def of_searches(notebook: str, known: Mapping[str, Parameter]) -> Schema:
    """Return the schema of `name: value`, `name: [a, b]`, `name: low .. high log` and the goal."""
    properties: Schema = {}
    for word in GOALS:
        text = f"the result of the run to {word}; exactly one goal"
        properties[word] = {"type": "string", "description": text}
    for word in WATCHED:
        text = f"with --prune: stop runs in which this metric is {word.partition('_')[2]}"
        properties[word] = {"type": "string", "description": text}

    for name, parameter in known.items():
        value = _value(parameter)
        forms = [value, _several(value)]
        if parameter.type in ("int", "float"):
            forms.append({"type": "string", "pattern": RANGE})
        properties[name] = {"description": parameter.comment, "anyOf": forms}

    goals = [{"required": [word]} for word in GOALS]
    return _schema(f"A search of {notebook}", properties) | {"oneOf": goals}


def _schema(title: str, properties: Schema) -> Schema:
    """Return the schema of a flat mapping that takes these names and no other."""
    return {
        "$schema": DRAFT,
        "title": title,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _described(parameter: Parameter) -> Schema:
    """Return the schema of a value, with what it means and its default."""
    value = _value(parameter)
    return {"description": parameter.comment, "default": parameter.default} | value


def _several(value: Schema) -> Schema:
    """Return the schema of a list of different values."""
    return {"type": "array", "items": value, "minItems": 1, "uniqueItems": True}


def _value(parameter: Parameter) -> Schema:
    """Return the schema of what the parameter may be: type, minimum, maximum, enum."""
    kind = parameter.type
    if kind.startswith("list"):
        element = parameter._replace(type=kind.removeprefix("list[").removesuffix("]"))
        return {"type": "array", "items": _value(element)}

    value: Schema = {"type": TYPES[kind]}
    allowed = parameter.allowed
    if isinstance(allowed, Range):
        for word, end in (("minimum", allowed.low), ("maximum", allowed.high)):
            if end is not None and math.isfinite(end):
                value[word] = int(end) if end == int(end) else end
    elif isinstance(allowed, tuple):
        value["enum"] = list(allowed)
    elif allowed == "secret":
        value["pattern"] = SECRET
    return value
