"""The parameters of a notebook: one tagged cell declares them, and no value gets past that declaration unchecked.

One code cell of a notebook, above all that uses them, is tagged `parameters` and holds one declaration per line:

    lr: float = 3e-4  # peak learning rate [0 .. 1]
    precision: str = "auto"  # autocast dtype [auto, fp32, bf16, fp16]

Type, default, meaning and what is allowed stand in one place that a reader sees first, papermill understands, and
this file reads with `ast` (nothing is executed). Brackets at the end of the comment are a choice, a range with
either end open, or `[a corpus]` and `[a model]`, which must be there to be found; without them every value of the
type is allowed. For a list they speak about each element.

`token: str = ""  # access to the hub [secret]` takes the name of an environment variable, `-p token=@HF_TOKEN`. That
name is all that is ever stored, printed or hashed; `runs.begin` gives the notebook what it stands for.

Values come from flat YAML files and from `name=value` on the command line. They are written so that every reader
agrees: each string is quoted and each float has its dot, so plain `papermill -f` reads the same values.

Footgun: YAML 1.1 as papermill reads it turns `1e-3` into a string, `010` into 8, `12:30` into 750 and `yes` into True.
Here numbers are what Python calls numbers and the other three stay text, which the type check then refuses.

Footgun: a default computed from another parameter would keep its old value when that other one is set from outside. The
injected cell comes after this one. So defaults are literals, and everything derived is computed later.
"""

import ast
import difflib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nblib import inputs

SCALARS = {"int": int, "float": float, "str": str, "bool": bool}
TYPES = (*SCALARS, "list[int]", "list[float]", "list[str]")


class ParameterError(ValueError):
    """One or more problems with what was asked for, one sentence per line."""


def _corpus(value: str) -> str | None:
    """What keeps a corpus from being read, or None."""
    try:
        place, _ = inputs.corpus_options(value)
    except ValueError as error:
        return f"cannot be read: {error}"
    if place.startswith("hf:"):
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place[3:]):
            return "names no dataset of the hub; write hf:HuggingFaceFW/fineweb-edu?tokens=200M"
        return None if find_spec("datasets") else "needs the package datasets: pip install datasets"
    if value in inputs.EMBEDDED:
        return None
    if not os.path.exists(path := inputs.resolve(place)):
        return "is neither prose, code, hf:<dataset> nor a file or folder that exists"
    return None if inputs.files_of(path) else f"holds no file to read ({', '.join(inputs.TEXTS)})"


def _model(value: str) -> str | None:
    """What keeps a model from being loaded, as far as it can be told without the network, or None."""
    if os.path.exists(os.path.join(inputs.resolve(value), "config.json")):
        return None
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", value):
        return "is neither a folder with a model nor a hub name like Qwen/Qwen3-0.6B"
    from huggingface_hub import constants, try_to_load_from_cache

    offline = constants.HF_HUB_OFFLINE and not isinstance(try_to_load_from_cache(value, "config.json"), str)
    return "is not in the local cache, and the hub is switched off (HF_HUB_OFFLINE)" if offline else None


def _secret(value: str) -> str | None:
    """What keeps a secret from being looked up, or None."""
    if not re.fullmatch(r"@[A-Za-z_]\w*", value):
        return "must be given as @NAME, the name of an environment variable, and never as itself"
    return None if value[1:] in os.environ else f"stands for the environment variable {value[1:]}, which is not set"


MUST_EXIST = {"a corpus": _corpus, "a model": _model, "secret": _secret}
LARGEST, LARGEST_NOTEBOOK = 2**18, 2**28  # bytes that are read: of what a person writes, of what a run leaves


class Secret(str):
    """What the notebook gets for a secret. Shown, and checked once more, it is the reference that was given."""

    reference: str

    def __repr__(self) -> str:
        return repr(self.reference)


class Range(NamedTuple):
    low: float | None
    high: float | None

    def __contains__(self, number: Any) -> bool:
        return (self.low is None or number >= self.low) and (self.high is None or number <= self.high)

    def __str__(self) -> str:
        return " .. ".join("" if end is None else f"{end:g}" for end in self).strip()


class Parameter(NamedTuple):
    name: str
    type: str
    default: Any
    comment: str
    allowed: Range | tuple | str | None  # a tuple of choices, or a name in MUST_EXIST


def declared(notebook: Path) -> dict[str, Parameter]:
    """The parameters a notebook declares, in order; ParameterError when the cell that declares them breaks a rule."""
    tagged = (c for c in cells(notebook) if c["cell_type"] == "code" and "parameters" in c["metadata"].get("tags", []))
    if (cell := next(tagged, None)) is None:
        raise ParameterError(f"{notebook.name}: one code cell must carry the tag 'parameters'.")
    parameters, problems = {}, []
    for number, line in enumerate(cell["source"].splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            parameter = _parse_line(line)
            if parameter.name in parameters:
                raise ParameterError(f"'{parameter.name}' is declared twice")
            parameters[parameter.name] = parameter
        except ParameterError as error:
            problems.append(f"{notebook.name}, parameters cell, line {number}: {clip(str(error), 600)}.")
    if problems:
        raise ParameterError("\n".join(problems))
    return parameters


def cells(notebook: Path) -> list[dict]:
    """The cells of a notebook file, read as plain JSON; their kinds, sources, tags and outputs are as they must be."""
    text = _read(notebook, "notebook", LARGEST_NOTEBOOK)
    try:
        document = json.loads(text)
        if document["nbformat"] == 4 and isinstance(document["cells"], list):
            return [_cell(cell) for cell in document["cells"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ParameterError(f"{notebook} is not a readable version 4 notebook.")


def _cell(cell: dict) -> dict:
    source, metadata = "".join(cell["source"]), cell.get("metadata", {})
    source.encode()  # half a pair of surrogates is no text
    if cell["cell_type"] not in ("code", "markdown", "raw") or not isinstance(metadata.get("tags", []), list):
        raise ValueError
    if not all(isinstance(output["output_type"], str) for output in cell.get("outputs", [])):
        raise ValueError
    return cell | {"source": source, "metadata": metadata}


def _read(path: Path, what: str, limit: int) -> str:
    """The text of a regular file; a device or a pipe could be read for ever."""
    try:
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode):
            why = "it is no file"
        elif facts.st_size > limit:
            why = f"its {facts.st_size:,} bytes are more than the {limit:,} that are read"
        else:
            return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        why = "it is not UTF-8 text"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
    raise ParameterError(f"Cannot read the {what} {clip(str(path), 1000)}: {why}.")


def title(notebook: Path) -> str:
    """The first heading of a notebook."""
    texts = [cell["source"] for cell in cells(notebook) if cell["cell_type"] == "markdown"]
    return next((line.lstrip("# ") for text in texts for line in text.splitlines() if line.startswith("# ")), "")


def parse_assignment(text: str, parameters: Mapping[str, Parameter]) -> tuple[str, Any]:
    """`name=value` from a command line, typed by the declaration; lists as `1,2` or `[1, 2]`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ParameterError(f"-p {clip(text)}: expected name=value.")
    if name not in parameters:
        raise ParameterError(f"-p {clip(name)}=...: {unknown('parameter', name, parameters)}")
    kind = parameters[name].type
    if not kind.startswith("list"):
        return name, _from_text(value, kind)
    if kind == "list[str]" and (quoted := _quoted(value)) is not None:
        return name, quoted
    inside = value.strip().removeprefix("[").removesuffix("]")
    return name, [_from_text(item.strip(" '\""), kind[5:-1]) for item in inside.split(",") if item.strip()]


def assignment(name: str, value: Any) -> str:
    """The text that `parse_assignment` reads as this value."""
    return f"{name}={value if isinstance(value, str) else spell(value)}"


def check(parameters: Mapping[str, Parameter], values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The values, converted where that loses nothing; ParameterError listing everything that is wrong with them."""
    good, problems = {}, []
    for name, value in values.items():
        if name not in parameters:
            problems.append(f"{clip(source)}: {unknown('parameter', name, parameters)}")
            continue
        good[name], problem = _judge(parameters[name], value)
        if problem:  # a secret may stand in what a command line says
            at = source.partition("=")[0] if parameters[name].allowed == "secret" else source
            problems.append(f"{clip(at)}: {problem}.")
    if problems:
        raise ParameterError("\n".join(problems))
    return good


def secrets(parameters: Mapping[str, Parameter], values: Mapping[str, Any]) -> dict[str, Secret]:
    """What the secrets among checked values stand for."""
    found = {}
    for name in parameters:
        if parameters[name].allowed == "secret" and values[name]:
            found[name] = Secret(os.environ[values[name][1:]])
            found[name].reference = values[name]
    return found


def clip(text: str, limit: int = 200) -> str:
    """On one line, without what moves a cursor, and no longer than a sentence can bear."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def unknown(what: str, name: Any, known: Iterable[str]) -> str:
    """The sentence about a name nobody knows, with the nearest one that exists."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}."
    return f"unknown {what} '{clip(str(name))}'; {hint}"


def _parse_line(line: str) -> Parameter:
    form = "write `name: type = literal  # meaning, unit [allowed]` on one line"
    # the first four are limits of papermill's own parser, which drops such lines without a word
    if line.count("=") != 1 or "|" in line:
        raise ParameterError(f"{form}, with one '=' and no '|' anywhere in it")
    if line.count("#") != 1:
        raise ParameterError(f"{form}, with one '#'")
    code, _, comment = line.partition("#")
    comment = comment.strip()
    if not comment or comment.startswith("type:"):
        raise ParameterError(f"{form}; the comment must say what the parameter means")
    try:
        statement = ast.parse(code).body[0]
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            raise ParameterError(form)
        value = ast.literal_eval(statement.value)
        repr(value)  # a ValueError where it has more digits than Python writes
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ParameterError(f"{form}, where the default is a literal and not an expression") from None
    kind = ast.unparse(statement.annotation)
    if kind not in TYPES:
        raise ParameterError(f"type '{clip(kind)}' is not one of {', '.join(TYPES)}")
    parameter = Parameter(statement.target.id, kind, value, comment, _parse_allowed(comment, kind))
    default, problem = _judge(parameter, value)
    if problem:
        raise ParameterError(f"the default breaks its own declaration: {problem}")
    if parameter.allowed == "secret" and (kind != "str" or default):
        raise ParameterError(f"'{parameter.name}' is a secret: its type is str and its default is \"\"")
    return parameter._replace(default=default)


def _parse_allowed(comment: str, kind: str) -> Range | tuple | None:
    brackets = re.search(r"\[([^\[\]]*)\]$", comment)
    if not brackets:
        return None
    text, inner = brackets[1], kind[5:-1] if kind.startswith("list") else kind
    if text in MUST_EXIST and inner == "str":
        return text
    low, dots, high = text.partition("..")
    if not dots:
        return tuple(_from_text(item.strip(), inner) for item in text.split(","))
    if inner not in ("int", "float"):
        raise ParameterError(f"a range like [{text}] needs numbers, the type is '{kind}'")
    ends = [_from_text(end.strip(), "float") if end.strip() else None for end in (low, high)]
    if any(isinstance(end, str) for end in ends):
        raise ParameterError(f"[{clip(text)}] is not a range; write [low .. high], either end may be left out")
    return Range(*ends)


def _judge(parameter: Parameter, value: Any) -> tuple[Any, str | None]:
    """The converted value, or what is wrong with it."""
    name, kind, _, _, allowed = parameter
    typed, shown = _cast(value, kind), "hidden" if allowed == "secret" else clip(repr(value))
    if typed is None:
        example = {"bool": "true or false", "float": "a finite number", "int": "of 64 bits", "str": "UTF-8"}.get(kind)
        return value, f"'{name}' is {shown}, but it must be of type {kind}{f' ({example})' if example else ''}"
    for item in typed if isinstance(typed, list) else [typed]:
        if isinstance(allowed, str):
            if item and (problem := _missing(item, allowed)):
                return value, f"'{name}' is {shown}, allowed is {allowed}: it {problem}"
        elif allowed is not None and item not in allowed:
            choices = f"{allowed}" if isinstance(allowed, Range) else ", ".join(map(str, allowed))
            return value, f"'{name}' is {shown}, allowed: {choices}"
    return typed, None


def _missing(value: str, what: str) -> str | None:
    try:
        return MUST_EXIST[what](value)
    except (OSError, ValueError, RuntimeError) as error:  # too long for a name, a null byte, ~nobody
        return f"cannot be looked up: {getattr(error, 'strerror', None) or error}"


def _cast(value: Any, kind: str) -> Any | None:
    """The value as its type, None when it is not of that type. An int is a fine float; a bool is not an int."""
    if kind.startswith("list"):
        items = [_cast(item, kind[5:-1]) for item in value] if isinstance(value, list) else [None]
        return None if None in items else items
    if kind == "float" and type(value) in (int, float):
        return float(value) if abs(value) < 1e308 else None  # False for nan and inf too
    if type(value) is not SCALARS[kind] or (kind == "int" and value.bit_length() > 64):
        return None
    return None if kind == "str" and re.search("[\ud800-\udfff]", value) else value  # bytes of another encoding


def _quoted(text: str) -> list[str] | None:
    """The strings of a list that quotes every one of them, so that they may hold commas; else None."""
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return items if isinstance(items, list) and all(isinstance(item, str) for item in items) else None


def _from_text(text: str, kind: str) -> Any:
    """Text as the type where it can be read so; otherwise the text itself, for `check` to name."""
    if kind == "bool":
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return SCALARS[kind](text)
    except ValueError:
        return text


def load_yaml(path: Path, *, depth: int = 1) -> dict[str, Any]:
    """A flat YAML mapping of parameter values; `depth` is how deep lists may go: 2 allows lists of lists."""
    text = _read(path, "parameter file", LARGEST)
    try:
        loader = _Yaml(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        _refuse_nesting_and_doubles(node, path, depth)
        return {key.value: loader.construct_object(value, deep=True) for key, value in node.value}
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "not valid YAML"
        raise ParameterError(f"{path}{f', line {mark.line + 1}' if mark else ''}: {problem}.") from None
    except ParameterError:
        raise
    except RecursionError:
        raise ParameterError(f"{path}: the mapping must be flat.") from None
    except ValueError:
        raise ParameterError(f"{path}: a number has more digits than Python reads.") from None


def dump_yaml(values: Mapping[str, Any]) -> str:
    """The values as YAML that this file and plain papermill read alike."""
    return "".join(f"{name}: {spell(value)}\n" for name, value in values.items())


def spell(value: Any) -> str:
    """One value as YAML. Strings are always quoted and floats always have a dot, so no reader can mistake them."""
    if isinstance(value, str):
        # what YAML takes for the end of a line, or does not allow as it stands
        escaped = "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]"
        return re.sub(escaped, lambda c: f"\\u{ord(c[0]):04x}", json.dumps(value, ensure_ascii=False))
    if isinstance(value, list):
        return "[" + ", ".join(map(spell, value)) + "]"
    text = repr(value).lower()  # Python's True is YAML's true
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def _refuse_nesting_and_doubles(node: yaml.Node, path: Path, depth: int) -> None:
    if not isinstance(node, yaml.MappingNode):
        raise ParameterError(f"{path}: expected lines of `name: value`.")
    names = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or not _is_flat(value, depth):
            raise ParameterError(f"{path}, line {key.start_mark.line + 1}: the mapping must be flat.")
        if key.value in names:
            raise ParameterError(f"{path}, line {key.start_mark.line + 1}: '{key.value}' is given twice.")
        names.add(key.value)


def _is_flat(node: yaml.Node, depth: int) -> bool:
    if isinstance(node, yaml.SequenceNode):
        return depth > 0 and all(_is_flat(item, depth - 1) for item in node.value)
    return isinstance(node, yaml.ScalarNode)


class _Yaml(yaml.SafeLoader):
    """SafeLoader with Python's idea of a number (the footgun above)."""

    yaml_implicit_resolvers = {}

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        if getattr(event, "tag", None) or getattr(event, "anchor", None):
            problem = "a value is what it looks like: no tag (!), anchor (&) or alias (*)"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)


for _tag, _pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9]\d*(_\d+)*)",
    "float": r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+",
}.items():
    _Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)
