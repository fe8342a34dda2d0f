"""The figures on top of the gpu profiles are those of the profiles as they are now."""

import absent_card
import card_runs
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent_card.missing()), reason=absent_card.missing()),
]

PROFILES = (
    "10_lrc",
    "11_ard_lora",
    "12_moe_muon",
    "13_distillation",
    "14_sparse_depth",
    "15_spiking_student",
)


@pytest.fixture(scope="module")
def computed(tmp_path_factory) -> dict:
    return card_runs.answer(tmp_path_factory, "profile_memory.py", *PROFILES, "--one")


@pytest.mark.parametrize("name", PROFILES)
def test_tokens_and_hours_are_those_of_the_profile(name, computed):
    assert computed[name]["second"] in computed[name]["lines"], (
        "python tests/card/profile_memory.py " + name
    )


@pytest.mark.parametrize("name", PROFILES)
def test_memory_is_that_of_the_profile(name, computed):
    facts = computed[name]
    if facts["said"] is None:
        pytest.skip("this profile states no memory")
    assert all(rows * accumulate == facts["batch"] for rows, accumulate in facts["rows"])
    assert abs(facts["computed"] - facts["said"]) < 0.1 + 0.01 * facts["said"], (
        "python tests/card/profile_memory.py " + name
    )
