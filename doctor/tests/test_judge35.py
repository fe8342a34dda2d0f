"""Twenty-two more programs outside language models, by the question of judge28; their author had not seen the checks.

The first sight of them is in judge35_first_sight.json, in the same state as that of judge34: 14 of 22 named first;
nothing wrong, nothing said of a twin.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge35")

NAMED = {
    "shape_cnn": "N9",
    "cell_segmentation": "D14",
    "box_detector": "S3",
    "spoken_ctc": "F66",
    "gait_sequences": "S25",
    "load_forecast": "N26",
    "sensor_tabular": "D13",
    "fraud_tabular": "F45",
    "two_tower": "D12",
    "citation_gcn": "S24",
    "molecule_graphs": "D22",
    "glyph_vae": "F22",
    "ring_gan": "D35",
    "spiral_diffusion": "F84",
    "moons_flow": "S40",
    "colour_contrast": "F27",
    "patch_mae": "D21",
    "poisson_pinn": "F25",
    "image_field": "N4",
    "faces_multitask": "F125",
}
UNSEEN = {
    "corridor_dqn": "the end of an episode is nowhere in the step: a task without ends looks the same",
    "fewshot_proto": "in which order the rows of an episode lie is known to its sampler alone",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 14 and len(BLIND.faults) == 22


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
