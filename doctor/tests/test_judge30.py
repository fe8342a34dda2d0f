"""Forty-four programs of two more authors who had not seen the checks, with the question of judge28.

The first sight of them is in judge30_first_sight.json, after what judge29 led to: 34 of 44 named first, and of one more
the effect; nothing wrong, nothing said of a twin.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge30")

NAMED = {
    "mixup_classifier": "F68",
    "decay_classifier": "N9",
    "grid_detector": "F41",
    "flip_segmenter": "D14",
    "pixel_segmenter": "F3",
    "pose_regressor": "D36",
    "speech_ctc": "F66",
    "keyword_spotter": "D13",
    "clip_lstm": "S21",
    "motion_conv3d": "D14",
    "point_diffusion": "F23",
    "ring_gan": "N1",
    "siamese_pretraining": "F57",
    "masked_autoencoder": "D21",
    "soft_label_student": "F3",
    "distiller_module": "F57",
    "new_head_finetune": "S3",
    "image_denoiser": "F21",
    "upscaler": "D14",
    "tab_price": "F21",
    "ts_load": "N9",
    "ts_sales": "D34",
    "seq_sensor": "S21",
    "seq_recall": "S38",
    "graph_molecule": "D22",
    "rl_dqn_corridor": "F56",
    "rl_reinforce_reach": "F24",
    "rec_fm": "D23",
    "rec_listwise": "S33",
    "pinn_poisson": "F25",
    "surv_cox": "F69",
    "surv_discrete": "D36",
    "maml_sine": "N28",
    "mtl_heads": "B1",
    "pc_shapes": "F30",
    "pc_boxes": "D13",
    "ad_vae": "F40",
    "ad_telemetry": "F20",
    "ml_batchhard": "F99",
    "ml_proxies": "S3",
    "checkpoint_finetune": "S51",
    "node_orbit": "F123",
    "box_regressor": "F86",
}
UNSEEN = {
    "face_landmarks": "one pair of key points may change sides rightly, as a head and a tail do",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 34 and len(BLIND.faults) == 44


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
