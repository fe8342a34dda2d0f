"""Parameter values as a flat YAML file, read the way a person means it and written so that every reader agrees.

Footgun: YAML 1.1 as papermill reads it turns `1e-3` into a string, `010` into 8, `12:30` into 750 and `yes` into
True. Here numbers are what Python calls numbers and the other three stay text, which the type check then refuses.
What is written quotes every string and gives every float its dot, so plain `papermill -f` reads the same values.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


class ParameterError(ValueError):
    """One or more problems with what was asked for, one sentence per line."""


def load_yaml(path: Path, *, depth: int = 1) -> dict[str, Any]:
    """A flat YAML mapping of parameter values; `depth` is how deep lists may go: 2 allows lists of lists."""
    try:
        loader = _Yaml(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return {}
        _refuse_nesting_and_doubles(node, path, depth)
        return loader.construct_document(node)
    except OSError as error:
        raise ParameterError(f"Cannot read the parameter file {path}: {error.strerror}.") from None
    except yaml.YAMLError as error:
        mark, what = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "not valid YAML"
        raise ParameterError(f"{path}{f', line {mark.line + 1}' if mark else ''}: {what}.") from None
    except UnicodeDecodeError:
        raise ParameterError(f"{path} is not UTF-8 text.") from None


def dump_yaml(values: Mapping[str, Any]) -> str:
    """The values as YAML that this file and plain papermill read alike."""
    return "".join(f"{name}: {spell(value)}\n" for name, value in values.items())


def spell(value: Any) -> str:
    """One value as YAML. Strings are always quoted and floats always have a dot, so no reader can mistake them."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(map(spell, value)) + "]"
    text = repr(value).lower()  # Python's True is YAML's true
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def _refuse_nesting_and_doubles(node: yaml.Node, path: Path, depth: int) -> None:
    if not isinstance(node, yaml.MappingNode):
        raise ParameterError(f"{path}: expected lines of `name: value`.")
    seen = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or not _is_flat(value, depth):
            raise ParameterError(f"{path}, line {key.start_mark.line + 1}: the mapping must be flat.")
        if key.value in seen:
            raise ParameterError(f"{path}, line {key.start_mark.line + 1}: '{key.value}' is given twice.")
        seen.add(key.value)


def _is_flat(node: yaml.Node, depth: int) -> bool:
    if isinstance(node, yaml.SequenceNode):
        return depth > 0 and all(_is_flat(item, depth - 1) for item in node.value)
    return isinstance(node, yaml.ScalarNode)


class _Yaml(yaml.SafeLoader):
    """SafeLoader with Python's idea of a number (the footgun above)."""

    yaml_implicit_resolvers = {}


for _tag, _pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9]\d*(_\d+)*)",
    "float": r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+",
}.items():
    _Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)
