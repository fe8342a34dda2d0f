"""Forty-four programs of two more authors who had not seen the checks: pictures and generators, and all other fields.

The first sight of them is in judge24_first_sight.json: 35 of 44 named first, nothing wrong of them but a true B6 where
the cause was not seen. Of the twins that true warning, and a wrong one: an ArcFace whose first loss is far from
guessing because of its scale (F4).
"""

from .step_programs import Blind, judged

BLIND = Blind("judge24")

NAMED = {
    "cls_shapes": "F3",
    "seg_circles": "F3",
    "det_grid": "F41",
    "depth_kinect": "D18",
    "flow_warp": "D30",
    "speech_keyword": "S33",
    "gan_ring": "B1",
    "vae_bumps": "F40",
    "vqvae_gratings": "F38",
    "ddpm_moons": "F60",
    "realnvp_moons": "F82",
    "simsiam_views": "F57",
    "arcface_ids": "S3",
    "kd_spirals": "F3",
    "denoise_photos": "D15",
    "video_dots": "S21",
    "vit_corners": "S19",
    "finetune_shapes": "S3",
    "multilabel_tags": "F20",
    "ocr_lines": "F66",
    "house_price_column_target": "F21",
    "tcn_chomp_wrong_side": "F11",
    "transformer_pe_over_batch": "S23",
    "gcn_scatter_to_source": "S43",
    "dqn_bootstrap_past_done": "F56",
    "a2c_returns_left_reversed": "F96",
    "ddpg_actor_grads_in_critic": "N1",
    "two_tower_temperature_multiplied": "F37",
    "pinn_second_derivative_no_graph": "F25",
    "cox_ascending_risk_set": "F69",
    "fomaml_grads_stay_in_copy": "B8",
    "dae_noisy_target": "F73",
    "bbb_kl_not_scaled": "F40",
    "mdn_mean_of_logs": "F95",
    "pointnet_view_not_transpose": "F30",
    "tagger_lstm_batch_as_time": "S21",
    "molecule_accum_zero_grad_inside": "N2",
    "ewc_anchor_aliased": "S35",
    "amp_clip_before_unscale": "N7",
    "ema_without_bn_buffers": "N29",
    "fixmatch_arcs": "F107",
    "control_rollout_detached": "S38",
}
UNSEEN = {
    "pose_flip": "one pair of points that changes sides with a flip may be a head and a tail",
    "multitask_missing_as_negative": "what was missing had been filled in before training",
}
TRUE = {"a2c_returns_left_reversed": {"B6"}}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 35 and len(BLIND.faults) == 44


tests = judged(BLIND, NAMED, UNSEEN, TRUE)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
