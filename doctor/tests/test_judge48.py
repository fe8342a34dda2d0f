"""Twenty-two more programs outside language models, by an author who had not seen the checks and was asked for the most
common bugs of all fields.

The first sight of them is in judge48_first_sight.json: 21 of 22 named first, nothing wrong, no twin blamed.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge48")

NAMED = {
    "dqn_walk": "F21",
    "img_classes": "F3",
    "vae_blobs": "F40",
    "count_visits": "F3",
    "pair_metric": "F20",
    "grid_detect": "F41",
    "point_shapes": "S19",
    "transfer_head": "S3",
    "gan_ring": "B1",
    "sac_reach": "F22",
    "maml_sine": "F1",
    "pinn_cooling": "F25",
    "wave_forecast": "S21",
    "simsiam": "F57",
    "graph_batches": "D22",
    "deep_conv": "S11",
    "multi_task": "S30",
    "seg_lesions": "D14",
    "movie_ratings": "D12",
    "keyword_gru": "N1",
    "super_res": "N9",
    "diffusion_2d": "F23",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, {}, harm=1.2)
    assert record["summary"]["named first"] == 21 and len(BLIND.faults) == 22


test_the_cause_is_named_first, _, test_nothing_is_said_of_a_twin = judged(BLIND, NAMED, {})
