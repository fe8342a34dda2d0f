"""The parameters of a notebook: one tagged cell declares them, and no value gets past that
unchecked.

One code cell of a notebook, above all that uses them, is tagged `parameters` and holds one
declaration per line:

    lr: float = 3e-4  # peak learning rate [0 .. 1]
    precision: str = "auto"  # autocast dtype [auto, fp32, bf16, fp16]

Type, default, meaning and what is allowed stand in one place that a reader sees first, papermill
understands, and this file reads with `ast` (nothing is executed). Brackets at the end of the
comment are a choice, a range with either end open, or `[a corpus]` and `[a model]`, which must be
there to be found. Without brackets every value of the type is allowed. For a list they are about
each element.

`token: str = ""  # access to the hub [secret]` takes the name of an environment variable,
`-p token=@HF_TOKEN`. That name is all that is ever stored, printed or hashed; `runs.begin` gives
the notebook the value of the variable.

Values come from flat YAML files and from `name=value` on the command line. They are written so that
every reader agrees: each string is quoted and each float has its dot, so plain `papermill -f` reads
the same values.

Footgun: YAML 1.1 as papermill reads it turns `1e-3` into a string, `010` into 8, `12:30` into 750
and `yes` into True. Here numbers are what Python calls numbers and the other three stay text, which
the type check then refuses.

Footgun: a default computed from another parameter would keep its old value when that other one is
set from outside, since the injected cell comes after this one. So defaults are literals, and
everything derived is computed later.
"""

import ast
import difflib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nblib import corpus_files

SCALARS = {"int": int, "float": float, "str": str, "bool": bool}
TYPES = (*SCALARS, "list[int]", "list[float]", "list[str]")
LARGEST = 2**18  # bytes of a parameter file, which a person writes
LARGEST_NOTEBOOK = 2**28  # bytes of a notebook, whose outputs a run writes
FORM = "write `name: type = literal  # meaning, unit [allowed]` on one line"
EXAMPLES = {
    "bool": "true or false",
    "float": "a finite number",
    "int": "of 64 bits",
    "str": "UTF-8",
}


class ParameterError(ValueError):
    """One or more problems with what was given, one sentence per line."""


class Secret(str):
    """The value of a secret, for the notebook. Its repr is the reference that was given."""

    reference: str

    def __repr__(self) -> str:
        """Return the repr of the reference, so that no output shows the value."""
        return repr(self.reference)


class Range(NamedTuple):
    """The numbers from low to high, both included; None is an open end."""

    low: float | None
    high: float | None

    def __contains__(self, number: Any) -> bool:
        """Return whether the number lies inside."""
        if self.low is not None and not number >= self.low:
            return False
        return self.high is None or number <= self.high

    def __str__(self) -> str:
        """Return the range as a declaration writes it: `0 .. 1`, `1 ..`."""
        ends = ["" if end is None else f"{end:g}" for end in self]
        return " .. ".join(ends).strip()


class Parameter(NamedTuple):
    """One line of the parameters cell."""

    name: str
    type: str  # one of TYPES
    default: Any  # of that type
    comment: str  # the meaning, with the brackets at its end
    allowed: Range | tuple | str | None  # a range, choices, a word of MUST_EXIST, or anything


# ------------------------------------------------------------------ what must exist


def _corpus_problem(value: str) -> str | None:
    """Return what keeps a corpus from being read, or None."""
    try:
        place, _ = corpus_files.corpus_options(value)
    except ValueError as error:
        return f"cannot be read: {error}"

    if place.startswith("hf:"):
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place[3:]):
            return "names no dataset of the hub; write hf:HuggingFaceFW/fineweb-edu?tokens=200M"
        return None if find_spec("datasets") else "needs the package datasets: pip install datasets"

    if value in corpus_files.EMBEDDED:
        return None
    path = corpus_files.resolve(place)
    if not os.path.exists(path):
        return "is neither prose, code, hf:<dataset> nor a file or folder that exists"
    if not corpus_files.files_of(path):
        return f"holds no file to read ({', '.join(corpus_files.TEXTS)})"
    return None


def _model_problem(value: str) -> str | None:
    """Return what keeps a model from being loaded, as far as it shows without the network."""
    if os.path.exists(os.path.join(corpus_files.resolve(value), "config.json")):
        return None
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", value):
        return "is neither a folder with a model nor a hub name like Qwen/Qwen3-0.6B"

    from huggingface_hub import constants, try_to_load_from_cache

    is_cached = isinstance(try_to_load_from_cache(value, "config.json"), str)
    if constants.HF_HUB_OFFLINE and not is_cached:
        return "is not in the local cache, and the hub is switched off (HF_HUB_OFFLINE)"
    return None


def _secret_problem(value: str) -> str | None:
    """Return what keeps a secret from being looked up, or None."""
    if not re.fullmatch(r"@[A-Za-z_]\w*", value):
        return "must be given as @NAME, the name of an environment variable, and never as itself"
    if value[1:] not in os.environ:
        return f"stands for the environment variable {value[1:]}, which is not set"
    return None


MUST_EXIST: dict[str, Callable[[str], str | None]] = {
    "a corpus": _corpus_problem,
    "a model": _model_problem,
    "secret": _secret_problem,
}


# ------------------------------------------------------------------ the notebook


def declared(notebook: Path) -> dict[str, Parameter]:
    """Return the parameters that a notebook declares, in order.

    ParameterError where the cell that declares them is missing or breaks a rule.
    """
    source = _parameters_cell(notebook)
    parameters: dict[str, Parameter] = {}
    problems = []
    for number, line in enumerate(source.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            parameter = _parse_line(line)
            if parameter.name in parameters:
                raise ParameterError(f"'{parameter.name}' is declared twice")
        except ParameterError as error:
            where = f"{notebook.name}, parameters cell, line {number}"
            problems.append(f"{where}: {clip(str(error), 600)}.")
            continue
        parameters[parameter.name] = parameter

    if problems:
        raise ParameterError("\n".join(problems))
    return parameters


def _parameters_cell(notebook: Path) -> str:
    for cell in cells(notebook):
        if cell["cell_type"] == "code" and "parameters" in cell["metadata"].get("tags", []):
            return cell["source"]
    raise ParameterError(f"{notebook.name}: one code cell must carry the tag 'parameters'.")


def cells(notebook: Path) -> list[dict]:
    """Return the cells of a notebook file, read as plain JSON.

    Their kinds, sources, tags and outputs are as they must be, else ParameterError.
    """
    text = _read(notebook, "notebook", LARGEST_NOTEBOOK)
    try:
        document = json.loads(text)
        if document["nbformat"] == 4 and isinstance(document["cells"], list):
            return [_checked_cell(cell) for cell in document["cells"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ParameterError(f"{notebook} is not a readable version 4 notebook.")


def _checked_cell(cell: dict) -> dict:
    """Return the cell with its source as one text; an error of any kind where it is no cell."""
    source = "".join(cell["source"])
    source.encode()  # half a pair of surrogates is no text
    metadata = cell.get("metadata", {})
    if cell["cell_type"] not in ("code", "markdown", "raw"):
        raise ValueError("unknown type of cell")
    if not isinstance(metadata.get("tags", []), list):
        raise ValueError("tags are no list")
    for output in cell.get("outputs", []):
        if not isinstance(output["output_type"], str):
            raise ValueError("unknown type of output")
    return cell | {"source": source, "metadata": metadata}


def title(notebook: Path) -> str:
    """Return the first heading of a notebook, empty where it has none."""
    for cell in cells(notebook):
        if cell["cell_type"] != "markdown":
            continue
        for line in cell["source"].splitlines():
            if line.startswith("# "):
                return line.lstrip("# ")
    return ""


def _read(path: Path, what: str, limit: int) -> str:
    """Return the text of a regular file; a device or a pipe could be read for ever."""
    try:
        facts = os.stat(path)
        if stat.S_ISREG(facts.st_mode) and facts.st_size <= limit:
            return Path(path).read_text(encoding="utf-8-sig")
        why = "it is no file"
        if stat.S_ISREG(facts.st_mode):
            why = f"its {facts.st_size:,} bytes are more than the {limit:,} that are read"
    except UnicodeDecodeError:
        why = "it is not UTF-8 text"
    except (OSError, ValueError) as error:
        why = str(getattr(error, "strerror", None) or error)
    raise ParameterError(f"Cannot read the {what} {clip(str(path), 1000)}: {why}.")


# ------------------------------------------------------------------ one declaration


def _parse_line(line: str) -> Parameter:
    """Return the parameter that a line declares."""
    # These are limits of papermill's own parser, which drops such lines without a word.
    if line.count("=") != 1 or "|" in line:
        raise ParameterError(f"{FORM}, with one '=' and no '|' anywhere in it")
    if line.count("#") != 1:
        raise ParameterError(f"{FORM}, with one '#'")
    code, _, comment = line.partition("#")
    comment = comment.strip()
    if not comment or comment.startswith("type:"):
        raise ParameterError(f"{FORM}; the comment must say what the parameter means")

    name, kind, value = _parse_code(code)
    if kind not in TYPES:
        raise ParameterError(f"type '{clip(kind)}' is not one of {', '.join(TYPES)}")
    allowed = _parse_allowed(comment, kind)
    parameter = Parameter(name, kind, value, comment, allowed)

    # A default must pass its own declaration.
    default, problem = _judge(parameter, value)
    if problem:
        raise ParameterError(f"the default breaks its own declaration: {problem}")
    if allowed == "secret" and (kind != "str" or default):
        raise ParameterError(f"'{name}' is a secret: its type is str and its default is \"\"")
    return parameter._replace(default=default)


def _parse_code(code: str) -> tuple[str, str, Any]:
    """Return name, type and default of `name: type = literal`."""
    try:
        statement = ast.parse(code).body[0]
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            raise ParameterError(FORM)
        value = ast.literal_eval(statement.value)
        repr(value)  # a ValueError where it has more digits than Python writes
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        problem = f"{FORM}, where the default is a literal and not an expression"
        raise ParameterError(problem) from None
    return statement.target.id, ast.unparse(statement.annotation), value


def _parse_allowed(comment: str, kind: str) -> Range | tuple | str | None:
    """Return what the brackets at the end of a comment allow, None where there are none."""
    brackets = re.search(r"\[([^\[\]]*)\]$", comment)
    if brackets is None:
        return None
    text = brackets[1]
    of_each = _type_of_each(kind)

    if text in MUST_EXIST and of_each == "str":
        return text
    low, dots, high = text.partition("..")
    if not dots:
        return tuple(_from_text(item.strip(), of_each) for item in text.split(","))

    if of_each not in ("int", "float"):
        raise ParameterError(f"a range like [{text}] needs numbers, the type is '{kind}'")
    ends = []
    for end in (low.strip(), high.strip()):
        ends.append(_from_text(end, "float") if end else None)
    if any(isinstance(end, str) for end in ends):
        raise ParameterError(
            f"[{clip(text)}] is not a range; write [low .. high], either end may be left out"
        )
    return Range(*ends)


def _type_of_each(kind: str) -> str:
    """Return the type of the elements of a list, and of another type itself."""
    return kind.removeprefix("list[").removesuffix("]")


# ------------------------------------------------------------------ values


def parse_assignment(text: str, parameters: Mapping[str, Parameter]) -> tuple[str, Any]:
    """Return name and value of a `name=value` of the command line, typed by the declaration.

    A list is written as `1,2` or `[1, 2]`; a list of strings may quote each of them.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ParameterError(f"-p {clip(text)}: expected name=value.")
    if name not in parameters:
        raise ParameterError(f"-p {clip(name)}=...: {unknown('parameter', name, parameters)}")
    kind = parameters[name].type
    if not kind.startswith("list"):
        return name, _from_text(value, kind)

    if kind == "list[str]":
        quoted = _quoted_strings(value)
        if quoted is not None:
            return name, quoted
    inside = value.strip().removeprefix("[").removesuffix("]")
    items = [item.strip(" '\"") for item in inside.split(",") if item.strip()]
    return name, [_from_text(item, _type_of_each(kind)) for item in items]


def assignment(name: str, value: Any) -> str:
    """Return the text that `parse_assignment` reads as this value."""
    return f"{name}={value if isinstance(value, str) else spell(value)}"


def check(
    parameters: Mapping[str, Parameter], values: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """Return the values, converted where that loses nothing.

    ParameterError with a sentence for everything that is wrong with them; each begins with the
    source.
    """
    good: dict[str, Any] = {}
    problems = []
    for name, value in values.items():
        if name not in parameters:
            problems.append(f"{clip(source)}: {unknown('parameter', name, parameters)}")
            continue
        good[name], problem = _judge(parameters[name], value)
        if problem:
            # A secret may stand in an assignment of the command line.
            is_secret = parameters[name].allowed == "secret"
            where = source.partition("=")[0] if is_secret else source
            problems.append(f"{clip(where)}: {problem}.")

    if problems:
        raise ParameterError("\n".join(problems))
    return good


def secrets(parameters: Mapping[str, Parameter], values: Mapping[str, Any]) -> dict[str, Secret]:
    """Return the values of the environment variables that the secrets among checked values name."""
    found = {}
    for name, parameter in parameters.items():
        if parameter.allowed != "secret" or not values[name]:
            continue
        secret = Secret(os.environ[values[name][1:]])
        secret.reference = values[name]
        found[name] = secret
    return found


def _judge(parameter: Parameter, value: Any) -> tuple[Any, str | None]:
    """Return the converted value and None, or the value and what is wrong with it."""
    allowed = parameter.allowed
    shown = "hidden" if allowed == "secret" else clip(repr(value))
    subject = f"'{parameter.name}' is {shown}"

    # The type.
    typed = _cast(value, parameter.type)
    if typed is None:
        example = EXAMPLES.get(parameter.type)
        hint = f" ({example})" if example else ""
        return value, f"{subject}, but it must be of type {parameter.type}{hint}"

    # What is allowed, for each element of a list.
    for item in typed if isinstance(typed, list) else [typed]:
        if allowed is None:
            continue
        if isinstance(allowed, str):
            problem = _missing(item, allowed) if item else None
            if problem:
                return value, f"{subject}, allowed is {allowed}: it {problem}"
        elif item not in allowed:
            choices = str(allowed) if isinstance(allowed, Range) else ", ".join(map(str, allowed))
            return value, f"{subject}, allowed: {choices}"
    return typed, None


def _missing(value: str, what: str) -> str | None:
    """Return why a corpus, a model or a secret is not there, or None."""
    try:
        return MUST_EXIST[what](value)
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, ~nobody
        return f"cannot be looked up: {getattr(error, 'strerror', None) or error}"


def _cast(value: Any, kind: str) -> Any | None:
    """Return the value as its type, None when it is not of that type.

    An int is a fine float; a bool is not an int; nan, infinity and an int of more than 64 bits are
    refused, and so is text that is not UTF-8 (bytes of another encoding become lone surrogates).
    """
    if kind.startswith("list"):
        if not isinstance(value, list):
            return None
        items = [_cast(item, _type_of_each(kind)) for item in value]
        return None if None in items else items

    if kind == "float" and type(value) in (int, float):
        return float(value) if abs(value) < 1e308 else None
    if type(value) is not SCALARS[kind]:
        return None
    if kind == "int" and value.bit_length() > 64:
        return None
    if kind == "str" and re.search("[\ud800-\udfff]", value):
        return None
    return value


def _from_text(text: str, kind: str) -> Any:
    """Return text as the type where it can be read so, else the text, for `check` to name."""
    if kind == "bool":
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return SCALARS[kind](text)
    except ValueError:
        return text


def _quoted_strings(text: str) -> list[str] | None:
    """Return a list in which every string is quoted, so that it may hold commas; else None."""
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(items, list) and all(isinstance(item, str) for item in items):
        return items
    return None


# ------------------------------------------------------------------ sentences


def clip(text: str, limit: int = 200) -> str:
    """Return text on one line, without what moves a cursor, of at most so many characters."""
    line = " ".join(text.split())
    printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"


def unknown(what: str, name: Any, known: Iterable[str]) -> str:
    """Return the sentence about a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names) or 'none'}."
    return f"unknown {what} '{clip(str(name))}'; {hint}"


# ------------------------------------------------------------------ YAML


def load_yaml(path: Path, *, depth: int = 1) -> dict[str, Any]:
    """Return a flat YAML mapping of parameter values.

    `depth` is how deep lists may go: 2 allows lists of lists. ParameterError with file and line.
    """
    text = _read(path, "parameter file", LARGEST)
    try:
        loader = _Yaml(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        _refuse_nesting_and_doubles(node, path, depth)
        return {key.value: loader.construct_object(value, deep=True) for key, value in node.value}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "not valid YAML"
        where = f"{path}, line {mark.line + 1}" if mark else f"{path}"
        raise ParameterError(f"{where}: {problem}.") from None
    except ParameterError:
        raise
    except RecursionError:
        raise ParameterError(f"{path}: the mapping must be flat.") from None
    except ValueError:
        raise ParameterError(f"{path}: a number has more digits than Python reads.") from None


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return the values as YAML that this file and plain papermill read alike."""
    return "".join(f"{name}: {spell(value)}\n" for name, value in values.items())


def spell(value: Any) -> str:
    """Return one value as YAML. Strings are always quoted and floats always have a dot."""
    if isinstance(value, str):
        # Line ends of YAML, and characters that it does not allow, become escapes.
        escaped = "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]"
        quoted = json.dumps(value, ensure_ascii=False)
        return re.sub(escaped, lambda match: f"\\u{ord(match[0]):04x}", quoted)
    if isinstance(value, list):
        return f"[{', '.join(map(spell, value))}]"
    text = repr(value).lower()  # Python's True is YAML's true
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")
    return text


def _refuse_nesting_and_doubles(node: yaml.Node, path: Path, depth: int) -> None:
    if not isinstance(node, yaml.MappingNode):
        raise ParameterError(f"{path}: expected lines of `name: value`.")
    names = set()
    for key, value in node.value:
        where = f"{path}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode) or not _is_flat(value, depth):
            raise ParameterError(f"{where}: the mapping must be flat.")
        if key.value in names:
            raise ParameterError(f"{where}: '{key.value}' is given twice.")
        names.add(key.value)


def _is_flat(node: yaml.Node, depth: int) -> bool:
    if isinstance(node, yaml.SequenceNode):
        return depth > 0 and all(_is_flat(item, depth - 1) for item in node.value)
    return isinstance(node, yaml.ScalarNode)


class _Yaml(yaml.SafeLoader):
    """SafeLoader with Python's idea of a number (the first footgun above), and without tags."""

    yaml_implicit_resolvers: dict = {}

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        """Return the next node; an error where it carries a tag, an anchor or an alias."""
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
