"""Twenty-two more programs outside language models, from widely spread fields, by an author who had not seen the checks
and was asked for the most common bugs.

The first sight of them is in judge55_first_sight.json: 20 of 22 named first, nothing wrong, no twin blamed. Not seen
were flips drawn twice for pictures of two sizes, and noise that was written into slices of the training data.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge55")

NAMED = {
    "digits_cnn": "F3",
    "house_prices": "F21",
    "glyph_vae": "F40",
    "siamese_faces": "F20",
    "event_counts": "F3",
    "scene_seg": "F3",
    "transfer_head": "S3",
    "multitask_lab": "S19",
    "sac_reach": "F22",
    "pinn_poisson": "F25",
    "ring_gan": "S36",
    "simsiam_img": "F57",
    "checker_flow": "S30",
    "phoneme_gru": "S21",
    "load_forecast": "F11",
    "pointnet_shapes": "S11",
    "molecule_gnn": "D22",
    "movie_ratings": "N1",
    "box_detector": "N9",
    "superres_aug": "D14",
    "wave_diffusion": "D13",
    "dqn_grid": "F56",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, {}, harm=1.2)
    assert record["summary"]["named first"] == 20 and len(BLIND.faults) == 22


test_the_cause_is_named_first, _, test_nothing_is_said_of_a_twin = judged(BLIND, NAMED, {})
