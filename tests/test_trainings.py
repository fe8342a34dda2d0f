"""Every training that a notebook shows with controls hears them, and a stopped one goes on when its
cell runs again.

Both are asked of the notebooks themselves: what stands in their cells, and the cells executed, with
short parameters.
"""

import ast
import asyncio
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from IPython.display import display
from magics import plain
from test_continue import NO_MODEL, SHORT
from test_continue import small as small

from nblib import paths
from nbworkbook import runs, show

# What is shown of each training, by a text of the cell; its other cells are those that this one
# needs.
RESULTS = {
    "00_setup": "live = show.Training(",
    "10_lrc": "lrc_tables.gap(",
    "11_ard_lora": "{training.label}: held-out loss",
    "12_moe_muon": "router_pictures.training(",
    "13_distillation": "'of the parameters' is",
    "14_sparse_depth": "router_pictures.training(",
    "15_spiking_student": '"student": training.label',
}
MORE = {
    "00_setup": dict(live_steps=12, rows=2, length=32),
    "12_moe_muon": dict(rival=False),
    "13_distillation": dict(others=False),
    "15_spiking_student": dict(others=False),
}
MAIN = {"__name__": "__main__", "display": display}  # what a kernel brings
STORED = NO_MODEL | {"00_setup"}  # they load the stored base model, or its tokenizer
AT = 5  # the step at which Stop is pressed


def cells(name: str) -> list[ast.Module]:
    notebook = json.loads((paths.notebooks() / f"{name}.ipynb").read_text())
    return [
        ast.parse(plain("".join(c["source"])))
        for c in notebook["cells"]
        if c["cell_type"] == "code"
    ]


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Calls of `a.name(...)` or `name(...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name in (
            getattr(node.func, "attr", None),
            getattr(node.func, "id", None),
        ):
            yield node


def trainings(tree: ast.Module) -> list[str]:
    """The names of the trainings that a cell makes."""
    makes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and list(calls(node.value, "Training"))
    ]
    names = [
        (node.targets[0].elts[-1] if isinstance(node.targets[0], ast.Tuple) else node.targets[0])
        for node in makes
    ]
    return [name.id for name in names]


def handed_on(name: str, tree: ast.AST, functions: dict[str, ast.FunctionDef]) -> set[str]:
    """As which options the training reaches the loop: by keyword here, or by the notebook's
    function that takes it.
    """
    options = {
        k.arg
        for k in ast.walk(tree)
        if isinstance(k, ast.keyword) and getattr(k.value, "id", 0) == name
    }
    records = [k for k in ast.walk(tree) if isinstance(k, ast.keyword) and k.arg == "records"]
    options |= (
        {"records"} if any(ast.unparse(k.value) == f"{name}.records" for k in records) else set()
    )
    for call in (each for each in ast.walk(tree) if isinstance(each, ast.Call)):
        places = [
            n for n, argument in enumerate(call.args) if getattr(argument, "id", None) == name
        ]
        function = functions.get(getattr(call.func, "id", None))
        if places and function:
            options |= handed_on(function.args.args[places[0]].arg, function, functions)
    return options


def test_the_notebooks_are_those_that_train_with_controls():
    having = {
        path.stem
        for path in paths.notebooks().glob("*.ipynb")
        if any(map(trainings, cells(path.stem)))
    }
    assert having == set(RESULTS)


@pytest.mark.parametrize("name", RESULTS)
def test_every_training_on_a_page_reaches_the_loop_of_its_cell_and_no_other(name):
    trees = cells(name)
    functions = {
        f.name: f for tree in trees for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)
    }
    for tree in trees:
        followed = [ast.unparse(call.func.value) for call in calls(tree, "follow")]
        assert followed == trainings(tree)  # made, and followed once, in the same cell
        for training in followed:
            assert {"controls", "records"} <= handed_on(training, tree, functions), (
                f"{name}: {ast.unparse(tree)}"
            )
    titles = [call.args[0].value for tree in trees for call in calls(tree, "Training")]
    assert len(set(titles)) == len(titles)
    assert not any(list(calls(tree, gone)) for tree in trees for gone in ("Controls", "live"))


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_training_cell_needs_is_still_there_when_the_whole_page_has_run(name):
    """Or it could not run again: no later cell gives one of the names that it needs to something
    else.
    """
    codes = [ast.unparse(tree) for tree in cells(name)]
    functions = {
        f.name: ast.unparse(f) for code in codes for f in ast.parse(code).body if hasattr(f, "args")
    }
    for number, code in enumerate(codes):
        if trainings(ast.parse(code)):
            needs, todo = set(), [code]
            while todo:
                found = browser._names(todo.pop())[0] - needs
                needs, todo = (
                    needs | found,
                    todo + [functions[each] for each in found & functions.keys()],
                )
            needs -= browser._names(code)[1]
            lost = {
                each: later
                for later in codes[number + 1 :]
                for each in needs & browser._names(later)[1]
            }
            assert needs and lost == {}


def execute(source: str, namespace: dict) -> None:
    code = compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, namespace))
    else:
        exec(code, namespace)


def sources(name: str, model: Path) -> list[str]:
    """The code of the cells that the result needs, with short parameters."""
    values = SHORT.get(name, {}) | MORE.get(name, {})
    values |= {} if name in STORED else {"model": str(model)}
    kept = [
        c
        for c in browser.only(browser.stored(name), RESULTS[name])["cells"]
        if c["cell_type"] == "code"
    ]
    codes = ["".join(c["source"]) for c in kept]
    (at,) = [n for n, c in enumerate(kept) if "parameters" in c["metadata"].get("tags", [])]
    codes[at] += "".join(
        f"\n{key} = {value if value == '[0.5]' else repr(value)}" for key, value in values.items()
    )
    return codes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.base] if n in STORED else []) for n in RESULTS]
)
def test_stop_ends_a_training_and_its_cell_run_again_goes_on(
    name, small, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("NBLIB_OUTPUTS", str(tmp_path))
    codes = sources(name, small)
    (cell, *_) = [n for n, code in enumerate(codes) if "show.Training(" in code]
    straight, namespace, press = {**MAIN}, {**MAIN}, False
    take = show.Training.__call__

    def pressed(training: show.Training, record: dict) -> None:
        take(training, record)
        training.stop |= press and record["step"] == AT and training.title != "control"

    monkeypatch.setattr(show.Training, "__call__", pressed)
    for code in codes:
        execute(code, straight)
    press = True
    for code in codes:
        execute(code, namespace)
    (training,) = [
        each
        for each in namespace.values()
        if isinstance(each, show.Training) and each.title != "control"
    ]
    total = training.record["of"]
    assert training.stopped and AT < training.record["step"] <= AT + 3 < total
    assert (
        f"{training.title} was stopped at step {training.record['step']} of {total}"
        == runs.notice()
    )
    assert "stopped" in runs.record(namespace["run"].dir)
    if name == "10_lrc":  # the control trained on by itself
        assert (
            not namespace["beside"].stopped
            and f"float, {total} steps and not {AT + 1}" in capsys.readouterr().out
        )

    press = False
    for code in codes[cell:]:
        execute(code, namespace)
    whole = next(
        each
        for each in straight.values()
        if isinstance(each, show.Training) and each.title == training.title
    )
    again = next(
        each
        for each in namespace.values()
        if isinstance(each, show.Training) and each.title == training.title
    )
    assert again.losses == whole.losses and [step for step, _ in again.losses] == list(
        range(1, total + 1)
    )
    assert again.looks == whole.looks and again.label == again.title and runs.notice() == ""
    assert not runs.record(namespace["run"].dir).get("stopped")
    for result in (
        "table",
        "race",
        "trained",
        "after",
        "distilled",
        "predictions",
        "spiking_loss",
        "measured",
        "judged",
    ):
        if isinstance(straight.get(result), (float, list, dict)) and "_per_s" not in str(
            straight[result]
        ):
            assert str(namespace[result]) == str(straight[result]), result
