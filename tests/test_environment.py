"""environment.yml cannot be executed where there is no conda, so it is held to what the Makefile does."""

import re
import tomllib

import yaml

from nblib import paths

ROOT = paths.root()


def test_environment_yml_installs_what_the_makefile_installs():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert set(environment) == {"name", "channels", "dependencies"} and environment["channels"] == ["conda-forge"]
    python, pip, by_pip = environment["dependencies"]
    assert pip == "pip" and by_pip == {"pip": ["-r requirements.lock", "-e .", "-e ./doctor"]}
    recipe = re.findall(r"-m pip install (.*)", (ROOT / "Makefile").read_text())
    installed = [each for each in re.findall(r"-[re] \S+", " ".join(recipe)) if "docs/" not in each]  # the book's
    assert installed == by_pip["pip"], "make env and environment.yml differ"
    assert (ROOT / "requirements.lock").is_file() and (ROOT / "pyproject.toml").is_file()
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", _project()["requires-python"]).groups()
    assert int(low) <= int(re.fullmatch(r"python=3\.(\d+)", python)[1]) < int(high)


def test_the_lock_pins_everything_the_project_asks_for():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = {_name(line): line for line in lines if line.strip() and not line.startswith("#")}
    assert pins["torch"] == "torch==2.13.0", "a local version like +cpu is not on the package index"
    assert all("==" in line and "+" not in line.split(";")[0] for line in pins.values())
    assert not [line for line in lines if "@" in line or "/" in line], "a path or address works on one machine only"
    wanted = [line for project in (_project(), _project("doctor")) for line in _asked(project)]
    assert [name for name in map(_name, wanted) if name not in pins] == []


def _project(folder: str = ".") -> dict:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def _asked(project: dict) -> list[str]:
    return [*project["dependencies"], *project["optional-dependencies"]["test"]]


def _name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")
