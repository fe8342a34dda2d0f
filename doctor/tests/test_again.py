"""Which judged programs `-m "not again"` leaves out: no cause loses all of its programs, and the newest stay."""

from types import SimpleNamespace

from .conftest import EACH, pytest_collection_modifyitems

SETS = 7


def _item(number: int, test: str, name: str, named: dict[str, str]) -> SimpleNamespace:
    module = SimpleNamespace(__name__=f"tests.test_judge{number}", NAMED=named)
    marks = []
    callspec = SimpleNamespace(params={"name": name})
    return SimpleNamespace(
        name=f"{test}[{name}]", module=module, callspec=callspec, marks=marks, add_marker=marks.append
    )


def _collected() -> list[SimpleNamespace]:
    """Sets 8 to 14, of which each has a program of F3, the first one of S3 and the last one that is not seen."""
    items = []
    for number in range(8, 8 + SETS):
        named = {f"softmax_{number}": "F3"} | ({"head": "S3"} if number == 8 else {})
        unseen = ["dark"] if number == 14 else []
        items += [_item(number, "named", name, named) for name in [*named, *unseen]]
        items += [_item(number, "twin", name, named) for name in [*named, *unseen]]
    return items


def test_the_newest_of_each_cause_stay_and_a_twin_goes_with_its_program():
    items = _collected()
    pytest_collection_modifyitems(items)
    left_out = {item.name for item in items if item.marks}
    older = range(8, 8 + SETS - EACH)
    assert left_out == {f"{test}[softmax_{number}]" for test in ("named", "twin") for number in older}


def test_in_its_own_file_nothing_is_left_out():
    items = [item for item in _collected() if item.module.__name__ == "tests.test_judge8"]
    pytest_collection_modifyitems(items)
    assert items and not any(item.marks for item in items)
