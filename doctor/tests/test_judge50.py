"""Twenty-two more programs outside language models, from fields beside the most usual ones, by an author who had not
seen the checks and was asked for the most common bugs.

The first sight of them is in judge50_first_sight.json: 21 of 22 named first, nothing wrong, no twin blamed.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge50")

NAMED = {
    "cloud_volume": "F21",
    "clone_policy": "F3",
    "flow_density": "F82",
    "cox_risk": "F69",
    "pair_verify": "F20",
    "visit_counts": "F3",
    "ordinal_grades": "S19",
    "block_forecast": "S19",
    "sound_transfer": "S3",
    "sac_pointmass": "F22",
    "pinn_growth": "F25",
    "sr_perceptual": "F81",
    "keyword_pool": "S33",
    "sensor_tasks": "S30",
    "slippery_q": "F81",
    "ppo_tracker": "F35",
    "clinic_dropout": "N16",
    "keypoint_flip": "D19",
    "load_windows": "F50",
    "proto_schedule": "N9",
    "ratings_mf": "D12",
    "gcn_nodes": "N1",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, {}, harm=1.2)
    assert record["summary"]["named first"] == 21 and len(BLIND.faults) == 22


test_the_cause_is_named_first, _, test_nothing_is_said_of_a_twin = judged(BLIND, NAMED, {})
