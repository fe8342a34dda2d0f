"""Forty-four programs of two more authors who had not seen the checks, with the question of judge28.

The first sight of them is in judge29_first_sight.json, after the rules that judge28 and probes of our own led to: 36 of
44 named first, nothing wrong, nothing said of a twin.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge29")

NAMED = {
    "mixup_gratings": "F68",
    "stamp_classifier": "N9",
    "grid_detector": "D28",
    "center_detector": "D36",
    "scene_unet_scale": "F36",
    "scene_unet_flat": "F3",
    "pose_regression": "D36",
    "pitch_estimator": "F21",
    "keyword_spotter": "D13",
    "motion_gru": "S21",
    "motion_c3d": "D14",
    "blob_gan": "N1",
    "blob_vae": "F40",
    "blob_ddpm": "F23",
    "texture_simsiam": "F57",
    "texture_mae": "D21",
    "grating_distill": "F3",
    "cached_distill": "F103",
    "linear_transfer": "S51",
    "gradual_unfreeze": "S3",
    "dncnn_denoise": "F73",
    "espcn_sr": "D14",
    "house_prices": "F21",
    "credit_transfer": "S3",
    "load_forecast": "F50",
    "retail_horizon": "D37",
    "gesture_gru": "S21",
    "vibration_tcn": "F11",
    "recall_cell": "S38",
    "citation_nodes": "F31",
    "pole_dqn": "F56",
    "gridpoint_reinforce": "F24",
    "cart_ddpg": "N1",
    "click_fm": "D23",
    "movie_bpr": "D23",
    "decay_pinn": "F25",
    "beam_pinn": "F118",
    "trial_cox": "F69",
    "churn_hazard": "D36",
    "assay_multitask": "D18",
    "scan_pointnet": "F30",
    "surface_normals": "D43",
    "pump_autoencoder": "N9",
    "badge_triplet": "F99",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, {}, harm=1.15)
    assert record["summary"]["named first"] == 36 and len(BLIND.faults) == 44


test_the_cause_is_named_first, _, test_nothing_is_said_of_a_twin = judged(BLIND, NAMED, {})
