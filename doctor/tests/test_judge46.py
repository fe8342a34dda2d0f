"""Twenty-two programs outside language models, by an author who had not seen the checks and was asked for the most
common bugs of all fields: what every second newcomer's code holds, and that of experienced people on a bad day.

The first sight of them is in judge46_first_sight.json: 20 of 22 named first, nothing wrong, no twin blamed.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge46")

NAMED = {
    "image_classifier": "F3",
    "vae": "F40",
    "segmentation": "F3",
    "bike_counts": "F3",
    "face_pairs": "F20",
    "ppo": "F21",
    "grid_detector": "S19",
    "sac": "F22",
    "maml": "B8",
    "diffusion": "N4",
    "td_value": "F81",
    "forecast": "S21",
    "molecules": "D22",
    "multitask": "S30",
    "pinn": "F25",
    "transfer": "N16",
    "super_resolution": "D54",
    "keywords": "N9",
    "gan": "N1",
    "point_cloud": "D13",
    "survival": "F69",
}
UNSEEN = {
    "recommender": "a table that from_pretrained froze by its default looks like one that rests on purpose",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.2)
    assert record["summary"]["named first"] == 20 and len(BLIND.faults) == 22


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
