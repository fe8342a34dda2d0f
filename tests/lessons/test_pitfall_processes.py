"""After a kill: the library falls back to the last whole checkpoint."""

from lessons.pitfalls import processes


def test_a_damaged_checkpoint_falls_back_to_the_one_before():
    facts = processes.damaged_folder()
    assert facts["step_left"] == 1 and "step-00000002 is damaged" in facts["said"]
