"""The parameters of a notebook: one tagged cell declares them, and no value gets past that declaration unchecked.

The first code cell of a notebook is tagged `parameters` and holds one declaration per line:

    lr: float = 3e-4  # peak learning rate [0 .. 1]
    precision: str = "auto"  # autocast dtype [auto, fp32, bf16, fp16]

Type, default, meaning and what is allowed stand in one place that a reader sees first, papermill understands, and
this file reads with `ast` (nothing is executed). Brackets at the end of the comment are a choice, a range with
either end open, or `[a corpus]` and `[a model]`, which must be there to be found; without them every value of the
type is allowed. For a list they speak about each element.

Footgun: a default computed from another parameter would keep its old value when that other one is set from outside,
since the injected cell comes after this one. So defaults are literals, and everything derived is computed later.
"""

import ast
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from nblib import paths
from nblib.run.flat_yaml import ParameterError as ParameterError
from nblib.run.flat_yaml import dump_yaml as dump_yaml
from nblib.run.flat_yaml import load_yaml as load_yaml
from nblib.run.flat_yaml import spell

SCALARS = {"int": int, "float": float, "str": str, "bool": bool}
TYPES = (*SCALARS, "list[int]", "list[float]", "list[str]")
WORDS = {"true": True, "false": False}


def _corpus(value: str) -> str | None:
    """What keeps a corpus from being read, or None."""
    if value.startswith("hf:"):
        return None if find_spec("datasets") else "needs the package datasets: pip install datasets"
    found = value in ("prose", "code") or (paths.notebooks() / Path(value).expanduser()).exists()
    return None if found else "is neither prose, code, hf:<dataset> nor a file or folder that exists"


def _model(value: str) -> str | None:
    """What keeps a model from being loaded, as far as it can be told without the network, or None."""
    if (paths.notebooks() / Path(value).expanduser() / "config.json").exists():
        return None
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", value):
        return "is neither a folder with a model nor a hub name like Qwen/Qwen3-0.6B"
    from huggingface_hub import constants, try_to_load_from_cache

    offline = constants.HF_HUB_OFFLINE and not isinstance(try_to_load_from_cache(value, "config.json"), str)
    return "is not in the local cache, and the hub is switched off (HF_HUB_OFFLINE)" if offline else None


FOUND = {"a corpus": _corpus, "a model": _model}


class Range(NamedTuple):
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return " .. ".join("" if end is None else f"{end:g}" for end in self).strip()


class Parameter(NamedTuple):
    name: str
    type: str
    default: Any
    comment: str
    allowed: Range | tuple | str | None  # a tuple of choices, or a name in FOUND


def declared(notebook: Path) -> dict[str, Parameter]:
    """The parameters a notebook declares, in order; ParameterError when its first code cell breaks a rule."""
    cell = next((cell for cell in cells(notebook) if cell["cell_type"] == "code"), None)
    if cell is None or "parameters" not in cell.get("metadata", {}).get("tags", []):
        raise ParameterError(f"{notebook.name}: the first code cell must carry the tag 'parameters'.")
    found, problems = {}, []
    for number, line in enumerate("".join(cell["source"]).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            parameter = _parse_line(line)
            if parameter.name in found:
                raise ParameterError(f"'{parameter.name}' is declared twice")
            found[parameter.name] = parameter
        except ParameterError as error:
            problems.append(f"{notebook.name}, parameters cell, line {number}: {error}.")
    if problems:
        raise ParameterError("\n".join(problems))
    return found


def cells(notebook: Path) -> list[dict]:
    """The cells of a notebook file, read as plain JSON."""
    try:
        document = json.loads(notebook.read_text(encoding="utf-8"))
        found = document["cells"]
        return [cell | {"source": "".join(cell["source"])} for cell in found]
    except OSError as error:
        raise ParameterError(f"Cannot read the notebook {notebook}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise ParameterError(f"{notebook} is not a readable version 4 notebook.") from None


def title(notebook: Path) -> str:
    """The first heading of a notebook."""
    texts = [cell["source"] for cell in cells(notebook) if cell["cell_type"] == "markdown"]
    return next((line.lstrip("# ") for text in texts for line in text.splitlines() if line.startswith("# ")), "")


def parse_assignment(text: str, parameters: Mapping[str, Parameter]) -> tuple[str, Any]:
    """`name=value` from a command line, typed by the declaration; lists as `1,2` or `[1, 2]`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ParameterError(f"-p {text}: expected name=value.")
    if name not in parameters:
        raise ParameterError(f"-p {text}: {unknown('parameter', name, parameters)}")
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
            problems.append(f"{source}: {unknown('parameter', name, parameters)}")
            continue
        good[name], wrong = _judge(parameters[name], value)
        if wrong:
            problems.append(f"{source}: {wrong}.")
    if problems:
        raise ParameterError("\n".join(problems))
    return good


def unknown(what: str, name: Any, known: Iterable[str]) -> str:
    """The sentence about a name nobody knows, with the nearest one that exists."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}."
    return f"unknown {what} '{name}'; {hint}"


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
    except (SyntaxError, ValueError, TypeError):
        raise ParameterError(f"{form}, where the default is a literal and not an expression") from None
    kind = ast.unparse(statement.annotation)
    if kind not in TYPES:
        raise ParameterError(f"type '{kind}' is not one of {', '.join(TYPES)}")
    parameter = Parameter(statement.target.id, kind, value, comment, _parse_allowed(comment, kind))
    default, wrong = _judge(parameter, value)
    if wrong:
        raise ParameterError(f"the default breaks its own declaration: {wrong}")
    return parameter._replace(default=default)


def _parse_allowed(comment: str, kind: str) -> Range | tuple | None:
    found = re.search(r"\[([^\[\]]*)\]$", comment)
    if not found:
        return None
    inner = kind[5:-1] if kind.startswith("list") else kind
    if found[1] in FOUND and inner == "str":
        return found[1]
    low, dots, high = found[1].partition("..")
    if not dots:
        return tuple(_from_text(item.strip(), inner) for item in found[1].split(","))
    if inner not in ("int", "float"):
        raise ParameterError(f"a range like [{found[1]}] needs numbers, the type is '{kind}'")
    ends = [_from_text(end.strip(), "float") if end.strip() else None for end in (low, high)]
    if any(isinstance(end, str) for end in ends):
        raise ParameterError(f"[{found[1]}] is not a range; write [low .. high], either end may be left out")
    return Range(*ends)


def _judge(parameter: Parameter, value: Any) -> tuple[Any, str | None]:
    """The converted value, or what is wrong with it."""
    name, kind, _, _, allowed = parameter
    fit = _cast(value, kind)
    if fit is None:
        example = {"bool": " (true or false)", "float": " (a finite number)"}.get(kind, "")
        return value, f"'{name}' is {value!r}, but it must be of type {kind}{example}"
    for item in fit if isinstance(fit, list) else [fit]:
        if isinstance(allowed, str):
            if item and (wrong := FOUND[allowed](item)):
                return value, f"'{name}' is {value!r}, allowed is {allowed}: it {wrong}"
            continue
        if isinstance(allowed, Range):
            inside = (allowed.low is None or item >= allowed.low) and (allowed.high is None or item <= allowed.high)
        else:
            inside = allowed is None or item in allowed
        if not inside:
            spelt = f"{allowed}" if isinstance(allowed, Range) else ", ".join(map(str, allowed))
            return value, f"'{name}' is {value!r}, allowed: {spelt}"
    return fit, None


def _cast(value: Any, kind: str) -> Any | None:
    """The value as its type, None when it is not of that type. An int is a fine float; a bool is not an int."""
    if kind.startswith("list"):
        items = [_cast(item, kind[5:-1]) for item in value] if isinstance(value, list) else [None]
        return None if None in items else items
    if kind == "float" and type(value) in (int, float):
        return float(value) if abs(value) < 1e308 else None  # False for nan and inf too
    return value if type(value) is SCALARS[kind] else None


def _quoted(text: str) -> list[str] | None:
    """The strings of a list that quotes every one of them, so that they may hold commas; else None."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else None


def _from_text(text: str, kind: str) -> Any:
    """Text as the type where it can be read so; otherwise the text itself, for `check` to name."""
    if kind == "bool":
        return WORDS.get(text.lower(), text)
    try:
        return SCALARS[kind](text)
    except ValueError:
        return text
