"""What is declared is what is imported; the locks pin what is declared; and where there is no
conda, environment.yml cannot be executed, so it is held to what the Makefile does.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nblib import paths
from nbworkbook import cli, input_hash

ROOT = paths.root()
LOCKS = ("requirements.lock", "requirements-test.lock")
CORE = {"torch", "transformers", "safetensors", "numpy"}
OURS = {"nblib", "nbworkbook", "loopdoctor"}
NOT_INSTALLED = {
    "lightning": "lightning",
    "optuna": "optuna",
    "ray": "ray",
    "submitit": "submitit",
    "gguf": "gguf",
}
NOT_INSTALLED |= {"trackio": "trackio", "tensorboard": "tensorboard", "pynvml": "nvidia-ml-py"}


def test_environment_yml_installs_what_the_makefile_installs():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert set(environment) == {"name", "channels", "dependencies"} and environment["channels"] == [
        "conda-forge"
    ]
    python, pip, by_pip = environment["dependencies"]
    assert pip == "pip" and by_pip == {
        "pip": [*(f"-r {lock}" for lock in LOCKS), "-e .", "-e ./doctor"]
    }
    recipe = re.findall(r"-m pip install (.*)", (ROOT / "Makefile").read_text())
    # the book's
    installed = [each for each in re.findall(r"-[re] \S+", " ".join(recipe)) if "docs/" not in each]
    assert installed == by_pip["pip"], "make env and environment.yml differ"
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", _project()["requires-python"]).groups()
    assert int(low) <= int(re.fullmatch(r"python=3\.(\d+)", python)[1]) < int(high)


def test_the_locks_pin_everything_the_project_asks_for_and_nothing_twice():
    run, test = (_pins(lock) for lock in LOCKS)
    assert run["torch"] == ["torch==2.13.0"], (
        "a local version like +cpu is not on the package index"
    )
    lines = [line for pins in (run, test) for several in pins.values() for line in several]
    assert all("==" in line and "+" not in line.split(";")[0] for line in lines)
    assert not [line for line in lines if "@" in line or "/" in line], (
        "a path or address works on one machine only"
    )
    assert not run.keys() & test.keys()
    extras = _project()["optional-dependencies"]
    wanted = [*_project()["dependencies"], *_project("doctor")["dependencies"]]
    wanted += [
        line for extra in ("workbook", "data", "four-bit", "adapters") for line in extras[extra]
    ]
    assert [name for name in map(_name, wanted) if name not in run] == []
    asked_by_tests = [*extras["test"], *_project("doctor")["optional-dependencies"]["test"]]
    assert [name for name in map(_name, asked_by_tests) if name not in run | test] == []


@pytest.mark.parametrize(
    "tool", ["ruff", "pytest", "pytest-xdist", "hypothesis", "nbval", "playwright", "jupytext"]
)
def test_what_only_tests_need_is_in_no_lock_of_a_run(tool):
    assert tool not in _pins(LOCKS[0]) and tool in _pins(LOCKS[1])


def test_a_training_script_needs_four_packages_and_any_later_torch():
    project = _project()
    assert {_name(line) for line in project["dependencies"]} == CORE
    for each in (project, _project("doctor")):
        (torch,) = (line for line in each["dependencies"] if _name(line) == "torch")
        assert not re.search("[<~]|==", torch), torch


@pytest.mark.parametrize(
    "package, folder", [("nblib", "."), ("nbworkbook", "."), ("loopdoctor", "doctor")]
)
def test_whatever_is_imported_also_inside_a_function_is_declared(package, folder):
    declared = {_name(line) for line in _declared(_project(folder))}
    undeclared = {}
    for file in sorted((ROOT / folder / package).rglob("*.py")):
        for top in _imported(file):
            names = input_hash.distributions_of(top) or [NOT_INSTALLED.get(top, top)]
            if top not in sys.stdlib_module_names and top not in OURS and not declared & set(names):
                undeclared[top] = str(file.relative_to(ROOT))
    assert undeclared == {}


def test_the_command_can_be_imported_with_the_core_alone():
    """Which modules `import nbworkbook.cli` takes from packages that the core does not bring
    along.
    """
    brought = input_hash.versions(CORE).keys()
    waiting, seen, foreign = ["nbworkbook.cli"], set(), set()
    while waiting:
        name = waiting.pop()
        path = ROOT / f"{name.replace('.', '/')}.py"
        file = path if path.is_file() else path.with_suffix("") / "__init__.py"
        if name in seen or not file.is_file():
            continue
        seen.add(name)
        for found in _imported_at_the_top(file):
            top = found.partition(".")[0]
            waiting += [found, found.rpartition(".")[0]] if top in OURS else []
            if top not in OURS and top not in sys.stdlib_module_names:
                foreign.add((input_hash.distributions_of(top) or [top])[0])
    assert "nbworkbook.parameters" in seen and foreign <= brought, foreign - brought


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        yield from (name.partition(".")[0] for name in _names(node))


def _imported_at_the_top(file: Path) -> Iterator[str]:
    for node in ast.parse(file.read_text("utf-8")).body:
        yield from _names(node)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _project(folder: str = ".") -> dict:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def _declared(project: dict) -> list[str]:
    extras = project["optional-dependencies"].values()
    return [*project["dependencies"], *(line for lines in extras for line in lines)]


def _pins(lock: str) -> dict[str, list[str]]:
    """The lines of a lock by package; one that differs by Python has several."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / lock).read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            found.setdefault(_name(line), []).append(line)
    return found


def _name(requirement: str) -> str:
    return re.sub("[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def test_the_sentence_about_a_missing_package_names_the_extra_that_brings_it():
    extras = _project()["optional-dependencies"]
    for module, extra in cli.EXTRA_OF.items():
        names = input_hash.distributions_of(module) or [NOT_INSTALLED.get(module, module)]
        assert set(names) & {_name(line) for line in extras[extra]}, module


def test_a_command_whose_package_is_missing_says_what_to_install(monkeypatch, capsys):
    from nbworkbook import gpu_check

    for module, code in (("peft", 2), ("peft.tuners", 2), ("not_ours", 70)):

        def fail(module=module):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

        monkeypatch.setattr(gpu_check, "main", fail)
        assert cli.main(["gpu-check"]) == code
        assert ("pip install 'nblib[adapters]'" in capsys.readouterr().err) == (code == 2)
