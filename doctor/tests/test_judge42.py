"""Forty-four programs outside language models, by two authors who had not seen the checks: losses of every kind,
tensors that do not learn, structure, and the order of data, steps and schedules, about equally.

The first sight of them is in judge42_first_sight.json: 34 of 44 named first, the effect of two more; nothing wrong.
What is said of one twin is true of it: its gradients are ten times the length at which PPO clips them by custom.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge42")

NAMED = {
    "siamese_verification": "F20",
    "distill_classifier": "F3",
    "coupling_flow": "F135",
    "grid_detector": "F41",
    "shape_segmentation": "F3",
    "super_resolution": "S19",
    "transfer_head": "S3",
    "blob_gan": "S36",
    "image_vae": "F22",
    "vit_lora": "S22",
    "tile_transformer": "S21",
    "simsiam": "F57",
    "ema_classifier": "N29",
    "attribute_heads": "S30",
    "plain_cnn": "S62",
    "validated_classifier": "S11",
    "diffusion": "F21",
    "adversarial_training": "N1",
    "scheduled_autoencoder": "N9",
    "augmented_segmentation": "D14",
    "image_denoiser": "F73",
    "stream_classifier": "D12",
    "bike_counts": "F3",
    "price_density": "F91",
    "point_normals": "F134",
    "load_quantiles": "F85",
    "phone_ctc": "F66",
    "ratings_mf": "F21",
    "sac_reach": "F22",
    "pinn_growth": "B1",
    "maml_sine": "N51",
    "ppo_balance": "F35",
    "multitask_weights": "S3",
    "gesture_gru": "S21",
    "graph_collate": "D22",
    "td_value": "N27",
    "horizon_heads": "S30",
    "clinic_tabular": "N16",
    "shape_ema": "N29",
    "grid_dqn": "F39",
    "ddpg_tank": "N38",
    "lbfgs_calibration": "N1",
    "weibull_survival": "N9",
    "window_forecast": "F50",
}
UNSEEN: dict[str, str] = {}
TRUE = {"ppo_balance": {"B6"}}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.2)
    assert record["summary"]["named first"] == 34 and len(BLIND.faults) == 44


tests = judged(BLIND, NAMED, UNSEEN, TRUE)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
