"""Forty-four more programs with bugs that people often make, by two people who had not seen the checks: what is named.

The first sight of them, before any check was changed, is in judge10_first_sight.json: 25 of 44 named first, 3 true
warnings of the effect, one finding that was wrong, and nothing said of a twin.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge10")

NAMED = {
    "softmax_before_cross_entropy": "F3",
    "size_head_broadcasts": "F21",
    "lstm_not_batch_first": "S21",
    "sample_weights_after_mean": "F54",
    "autorec_loss_over_unrated": "F55",
    "constant_weight_init": "S20",
    "head_replaced_after_optimizer": "S3",
    "conv_blocks_in_python_list": "S19",
    "eval_left_on_after_validation": "N16",
    "ema_skips_batchnorm_buffers": "N29",
    "frame_features_detached": "B1",
    "amp_clip_before_unscale": "N7",
    "accumulation_zeroed_every_microbatch": "N2",
    "epoch_scheduler_stepped_per_batch": "N9",
    "padding_mask_inverted": "F34",
    "flip_image_but_not_mask": "D14",
    "fake_quant_without_straight_through": "B7",
    "distillation_kl_without_log": "F3",
    "table_columns_not_standardised": "D9",
    "forecast_target_inside_window": "F50",
    "box_loss_on_background_cells": "F41",
    "dcgan_generator_on_detached_fake": "B1",
    "wgan_gp_critic_grads_never_zeroed": "N1",
    "vae_recon_mean_kl_sum": "F40",
    "ddpm_noise_drawn_twice": "F23",
    "realnvp_couplings_in_python_list": "S19",
    "dqn_no_done_mask": "F56",
    "ppo_ratio_times_advantage_broadcast": "F21",
    "sac_action_by_sample_not_rsample": "F22",
    "simclr_same_view_twice": "F27",
    "simsiam_no_stop_gradient": "F57",
    "batch_hard_triplet_sqrt_at_zero": "N17",
    "gnn_edge_list_viewed_not_transposed": "F30",
    "pinn_second_derivative_without_create_graph": "F25",
    "neural_ode_scheduler_stepped_per_batch": "N9",
    "siren_default_linear_init": "S31",
    "mdn_density_without_log_sigma": "F58",
    "dann_reversal_layer_without_minus": "F59",
    "set_pooling_padding_mask_inverted": "F34",
    "arcface_head_not_in_optimizer": "S3",
    "amp_clip_without_unscale": "N7",
    "mc_dropout_eval_never_back_to_train": "N16",
    "pointnet_sorted_by_class_not_shuffled": "F20",
    "contrastive_label_convention_swapped": "F74",
}
UNSEEN: dict[str, str] = {}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 25 and len(BLIND.faults) == 44
    assert not any(p["of the twin"] for p in record["programs"].values())


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
