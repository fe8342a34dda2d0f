"""Three of the kills of kill_worlds.py, whose script makes as many as it is asked for."""

import kill_worlds
import pytest


@pytest.mark.slow
@pytest.mark.kernel
def test_killed_at_random_moments_two_processes_go_on_to_the_straight_run(tmp_path):
    facts = kill_worlds.campaign(tmp_path, 3, 4, "fsdp")
    print(facts)
    assert facts["kills"] == 3 and kill_worlds.fine(facts)
    facts["largest difference"] = 1e-3
    assert not kill_worlds.fine(facts)
