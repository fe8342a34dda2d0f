"""Forty-four programs with bugs that people often make, by two more people who had not seen the checks.

One was asked for pictures, sounds and clouds of points, the other for losses and what they are fed. The first sight of
them is in judge15_first_sight.json: 33 of 44 named first (20 and 13), one true warning of the effect, and one wrong
warning on a twin, which was mended: a network that takes its answer from its input.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge15")

NAMED = {
    "dqn_bootstraps_from_terminal_states": "F56",
    "audio_tags_sigmoid_before_bcelogits": "F3",
    "age_regression_mse_broadcast": "F21",
    "lesion_flip_only_image": "D14",
    "scene_seg_view_without_permute": "F3",
    "inpaint_sigmoid_output_for_tanh_range": "F20",
    "dcgan_generator_fed_detached_fake": "B1",
    "vae_mean_recon_summed_kl": "F40",
    "ddpm_alpha_instead_of_alpha_bar": "F84",
    "denoiser_never_zeroes_gradients": "N1",
    "yolo_box_loss_on_empty_cells": "F41",
    "simsiam_without_stop_gradient": "F57",
    "batch_hard_triplet_sqrt_of_zero": "N17",
    "distill_kldiv_gets_probabilities": "F3",
    "longtail_sampler_given_class_weights": "D16",
    "transfer_head_replaced_after_optimizer": "S3",
    "depth_holes_counted_in_loss": "D18",
    "pointnet_layers_in_python_list": "S19",
    "sr_scheduler_stepped_every_batch": "N9",
    "ecg_amp_clip_without_unscale": "N7",
    "spectrogram_net_left_in_eval_mode": "S11",
    "dann_reversal_layer_keeps_the_sign": "F59",
    "digit_cnn_softmax_then_ce": "F3",
    "activity_nll_on_logits": "F3",
    "audio_tags_sigmoid_then_bce_with_logits": "F3",
    "gcn_log_softmax_over_nodes": "F3",
    "house_price_mse_broadcast": "F21",
    "distill_kl_student_probabilities": "F3",
    "ecg_logits_flattened_without_permute": "F3",
    "lesion_dice_on_raw_logits": "F49",
    "vae_mean_reconstruction_summed_kl": "F40",
    "face_multitask_age_term_item": "F2",
    "signature_cosine_loss_zero_one_targets": "F20",
    "moisture_targets_collated_as_long": "D17",
    "recommender_bpr_arguments_swapped": "F78",
    "fraud_pos_weight_inverted": "F45",
    "ppo_ratio_inverted": "F63",
    "load_forecast_pinball_error_sign": "F85",
    "assay_mask_applied_after_mean": "F54",
    "localiser_giou_on_xywh_targets": "F86",
    "bike_counts_poisson_log_input": "F3",
    "gaussian_head_variance_passed_as_scale": "F91",
    "segmenter_background_ignored": "F98",
}
UNSEEN = {
    "protonet_support_axes_swapped": "which of two axes holds the classes is known to the program alone",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 33 and len(BLIND.faults) == 44
    twins = [n for n, p in record["programs"].items() if p["of the twin"]]
    assert twins == ["denoiser_never_zeroes_gradients"]


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
