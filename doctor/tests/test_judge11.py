"""Forty-four more programs with bugs that people often make, by two more people who had not seen the checks.

The first sight of them, before any check was changed, is in judge11_first_sight.json: 32 of 44 named first, nothing
wrong, and nothing said of a twin.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge11")

NAMED = {
    "digits_softmax_before_ce": "F3",
    "house_prices_broadcast_mse": "F21",
    "lstm_forecast_no_zero_grad": "N1",
    "activity_lstm_not_batch_first": "S21",
    "gan_generator_step_on_detached_fake": "B1",
    "vae_mean_bce_summed_kl": "F40",
    "ddpm_uniform_noise": "F60",
    "dqn_no_done_mask": "F56",
    "a2c_advantage_not_detached": "F29",
    "simclr_self_similarity_kept": "F46",
    "audio_blocks_in_python_list": "S19",
    "finetune_head_replaced_after_optimizer": "S3",
    "churn_scheduler_stepped_per_batch": "N9",
    "box_regression_uint8_wraparound": "D15",
    "ecg_eval_mode_never_left": "S11",
    "segmentation_flip_image_only": "D14",
    "multilabel_cross_entropy": "F20",
    "autoencoder_sigmoid_on_centred_input": "F20",
    "matrix_factorisation_default_embedding_init": "F61",
    "transformer_padding_mask_inverted": "F34",
    "seg_logits_viewed_without_permute": "F3",
    "forecast_target_window_starts_in_input": "F50",
    "autorec_loss_counts_unrated_items": "F55",
    "wgan_gp_without_create_graph": "F25",
    "vae_recon_mean_kl_sum": "F40",
    "ddpm_noise_drawn_uniform": "F60",
    "dqn_bootstraps_through_terminal": "F56",
    "sac_actor_sample_not_rsample": "F22",
    "simsiam_without_stop_gradient": "F57",
    "distill_kldiv_given_probabilities": "F3",
    "gcn_functional_dropout_always_on": "S24",
    "pinn_unknown_coefficient_not_optimised": "S3",
    "triplet_sqrt_of_zero_distance": "N17",
    "moe_experts_in_plain_list": "S19",
    "lora_frozen_after_injection": "S22",
    "amp_clip_without_unscale": "N7",
    "ema_without_batchnorm_buffers": "N29",
    "set_attention_padding_mask_inverted": "F34",
    "cross_network_unscaled_randn_weights": "F4",
    "siamese_contrastive_label_flipped": "F74",
    "keypoint_flip_leaves_coordinates": "D19",
    "warmup_lambda_returns_lr_not_factor": "N9",
}
UNSEEN = {
    "gcn_loss_on_unlabelled_nodes": "which nodes have a label was settled before the loop, and a filler is a class",
    "det_cxcywh_boxes_into_xyxy_giou": "four numbers do not say whether they are corners or a centre and a size",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 32 and len(BLIND.faults) == 44
    assert not any(p["of the twin"] for p in record["programs"].values())


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
