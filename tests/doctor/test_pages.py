"""docs/doctor.md is what the code says, and its index is complete."""

from nblib import places
from nblib.doctor import checks, pages


def test_the_pages_are_those_of_the_code():
    path = places.root() / "docs" / "doctor.md"
    assert path.read_text() == pages.render(), "run: python -m nblib.doctor.pages docs/doctor.md"


def test_every_check_has_a_row_a_section_and_a_symptom():
    text = pages.render()
    for check, function in checks.ALL:
        assert text.count(f"| [{check}](#") == 1 and f"\n## {check} " in text, check
        assert _first(function).startswith(f"{check}. "), f"{check}: the docstring begins with another id"


def _first(function) -> str:
    return (function.__doc__ or "").strip()
