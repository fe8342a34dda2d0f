"""Forty-four more programs outside language models, by the question of judge36 and two more authors who had not seen
the checks.

The first sight of them is in judge40_first_sight.json, of the state after judge38 and judge39 were mended: 40 of 44
named first, one third, the effect of one more; nothing wrong, one twin blamed by a rule that was an hour old, which is
mended.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge40")

NAMED = {
    "image_sigmoid_before_cross_entropy": "F3",
    "tagging_cross_entropy_multi_hot": "F20",
    "forecast_poisson_rate_read_as_log": "F3",
    "segmentation_dice_batch_broadcast": "F21",
    "distill_kl_on_probabilities": "F3",
    "detection_box_loss_mean_over_all_cells": "F41",
    "vae_reconstruction_mean_kl_sum": "F40",
    "siamese_cosine_targets_zero_one": "F20",
    "speech_ctc_blank_is_a_letter": "F66",
    "frame_tagger_view_for_transpose": "F30",
    "fraud_focal_factor_on_easy": "F80",
    "gan_generator_asks_for_fake_label": "F65",
    "policy_log_std_plain_tensor": "S19",
    "transfer_head_replaced_after_optimizer": "S3",
    "mil_attention_weights_detached": "B1",
    "image_adapters_both_factors_zero": "B7",
    "wide_deep_constant_init_tower": "S20",
    "gnn_node_embedding_reloaded_each_forward": "N3",
    "keyword_unfreeze_misspelt_attribute": "S18",
    "diffusion_condition_rate_integer_division": "N24",
    "recommender_bf16_tables_small_rate": "N4",
    "keypoint_prior_bias_on_hidden_relu": "B7",
    "shape_segmenter": "F3",
    "wave_lstm": "S21",
    "bag_attention": "S33",
    "td_value": "F81",
    "ema_image_net": "N29",
    "vq_autoencoder": "F93",
    "teacher_student": "S12",
    "graph_regressor": "D22",
    "fourier_field": "S30",
    "series_transformer": "F11",
    "spiky_gru": "N8",
    "multi_source_tabular": "N2",
    "rating_factors": "N26",
    "head_swap": "S3",
    "tone_amp": "N7",
    "spectrum_autoencoder": "N4",
    "grid_field": "S3",
    "ddpg_point": "N38",
    "point_diffusion": "D20",
    "box_regressor": "D19",
    "view_contrast": "N9",
}
UNSEEN = {
    "ring_gan": "a mean that keeps its graph is no answer of a model, and its graphs are small",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 40 and len(BLIND.faults) == 44


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
