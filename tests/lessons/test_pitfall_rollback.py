"""Rollback and nan hooks: each fault of P39 alone, and what hooks are shown."""

from lessons.pitfalls import rollback


def test_each_fault_of_the_rollback_alone():
    right = dict(clone=True, moments=True, rate="base")
    faults = {
        "weights not restored": dict(clone=False),
        "moments still poisoned": dict(moments=False),
        "rate cut undone": dict(rate="group"),
    }
    for name, change in faults.items():
        facts = rollback.spike_and_return(**(right | change)) | {"nan_noticed": True}
        assert name in rollback.rollback_faults(facts)
    assert len(rollback.rollback_faults(rollback.rollback_as_written())) == 4


def test_hooks_by_position_by_name_and_after_compilation():
    shown = [(row["called"], row["gradients_shown"]) for row in rollback.blind_spots()]
    assert shown == [(1, 1), (1, 0), (0, 0)]
