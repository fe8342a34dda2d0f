"""CHECKS.md is what the code says, and its index is complete."""

from pathlib import Path

from train_doctor import checks, pages


def test_the_pages_are_those_of_the_code():
    path = Path(__file__).parents[1] / "CHECKS.md"
    assert path.read_text() == pages.render(), "run: python -m train_doctor.pages doctor/CHECKS.md"


def test_every_check_has_a_row_a_section_and_a_symptom():
    text = pages.render()
    for check, function in checks.ALL:
        assert text.count(f"| [{check}](#") == 1 and f"\n## {check} " in text, check
        assert _first(function).startswith(f"{check}. "), f"{check}: the docstring begins with another id"


def _first(function) -> str:
    return (function.__doc__ or "").strip()
