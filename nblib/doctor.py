"""The doctor, under the name that the notebooks use. It is a package of its own, `loopdoctor`, in
the folder doctor/.

    with doctor.watch(model, optimizer=optimizer) as report: ...

Footgun: names are passed on when they are asked for. So `from nblib.doctor import watch` works, but
`import nblib.doctor.checks` does not. Import what is not a public name from `loopdoctor`.
"""

from typing import Any

try:
    import loopdoctor
except ModuleNotFoundError as error:
    if error.name != "loopdoctor":
        raise
    raise ModuleNotFoundError(
        "The doctor is not installed here: run `make env`, or `pip install ./doctor` in the "
        "repository.",
        name="loopdoctor",
    ) from error

__all__ = list(loopdoctor.__all__)


def __getattr__(name: str) -> Any:
    return getattr(loopdoctor, name)
