"""Forty-four programs with bugs that people often make, by two more people who had not seen the checks.

The first sight of them, before any check was changed for them, is in judge13_first_sight.json: 34 of 44 named first,
one finding was wrong, and an error on the twin of the same program: a client of federated learning begins at the global
weights in each round. That was mended first.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge13")

NAMED = {
    "realnvp_log_det_sign": "F82",
    "softmax_layer_before_cross_entropy": "F3",
    "head_replaced_after_optimizer": "S3",
    "gan_generator_step_on_detached_fake": "B1",
    "vae_pixel_mean_reconstruction": "F40",
    "ddpm_target_noise_not_the_one_added": "F23",
    "simsiam_missing_stop_gradient": "F57",
    "distill_kldiv_without_log": "F3",
    "yolo_box_loss_over_background_cells": "F41",
    "seg_logits_view_without_permute": "F3",
    "denoiser_target_overwritten_in_place": "F73",
    "style_features_of_output_under_no_grad": "F2",
    "pointnet_layers_in_plain_list": "S19",
    "video_lstm_without_batch_first": "S21",
    "steplr_stepped_every_batch": "N9",
    "amp_clip_before_unscale": "N7",
    "audio_regression_broadcast_loss": "F21",
    "sorted_folders_without_shuffle": "F20",
    "validation_leaves_model_in_eval": "N16",
    "dqn_no_done_mask": "F56",
    "bandit_gather_broadcast": "F21",
    "sac_sample_not_rsample": "F22",
    "ddpg_soft_update_rebinds": "N28",
    "lstm_batch_first_missing": "S21",
    "transformer_pad_mask_inverted": "F34",
    "sensor_sorted_no_shuffle": "F20",
    "fraud_pos_weight_inverted": "F45",
    "cox_risk_set_order": "F69",
    "ncf_double_sigmoid": "F3",
    "two_tower_one_tower_in_optimizer": "S3",
    "gcn_randn_init": "F4",
    "ctc_softmax_no_log": "F3",
    "pinn_second_derivative_cut": "F25",
    "maml_query_on_unadapted": "N28",
    "multitask_loss_rewrapped": "F1",
    "steplr_stepped_per_batch": "N9",
    "amp_clip_without_unscale": "N7",
    "eval_never_back_to_train": "N16",
    "dae_target_is_noisy_input": "F73",
    "siamese_pair_label_convention": "F74",
    "keypoints_not_flipped_with_image": "D19",
    "flow_warp_grid_rows_first": "D30",
}
UNSEEN = {
    "bbb_kl_unscaled": "a divergence of weights beside a mean may have that weight on purpose",
    "fedavg_state_dict_alias": "the first average comes after twenty steps; the watch has ended",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 34 and len(BLIND.faults) == 44
    assert [n for n, p in record["programs"].items() if p["of the twin"]] == ["fedavg_state_dict_alias"]


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
