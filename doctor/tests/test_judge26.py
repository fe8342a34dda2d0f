"""Forty-four programs of two more authors who had not seen the checks: pictures and generators, and all other fields.

The first sight of them is in judge26_first_sight.json: 42 of 44 named first, nothing wrong, nothing said of a twin.
They were asked for what is common, as those of judge25 were, and chose much that these had chosen.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge26")

NAMED = {
    "gcn_edges_one_direction": "D45",
    "digits_softmax_cross_entropy": "F3",
    "finetune_no_zero_grad": "N1",
    "finetune_head_after_optimizer": "S3",
    "resnet_steplr_every_batch": "N9",
    "imagefolder_no_shuffle": "D27",
    "unet_flip_image_only": "D14",
    "fcn_mask_bilinear_resize": "F36",
    "bbox_pixels_vs_sigmoid": "F20",
    "keypoints_no_visibility": "D18",
    "age_regression_broadcast": "F21",
    "ctc_blank_is_a_letter": "F66",
    "keyword_view_for_transpose": "F30",
    "vae_mean_recon_sum_kl": "F40",
    "gan_detach_for_generator": "B1",
    "wgan_gp_without_create_graph": "F25",
    "ddpm_uniform_noise": "F60",
    "realnvp_same_mask": "S40",
    "simclr_same_view_twice": "F27",
    "simsiam_no_stop_gradient": "F57",
    "distill_kl_without_log": "F3",
    "eval_mode_after_validation": "N16",
    "vdsr_layers_in_list": "S19",
    "tabular_mse_broadcast": "F21",
    "tabular_unscaled_features": "D9",
    "tabular_eval_mode_left_on": "N16",
    "forecast_target_off_by_one": "F50",
    "forecast_relu_output": "F20",
    "ts_transformer_no_causal_mask": "F11",
    "forecast_scheduler_per_batch": "N9",
    "rnn_batch_first_missing": "S21",
    "rnn_last_padded_step": "S25",
    "rnn_missing_zero_grad": "N1",
    "gcn_functional_dropout_always_on": "S24",
    "dqn_no_done_mask": "F56",
    "mf_positives_only": "F20",
    "fm_missing_field_offsets": "D23",
    "pinn_relu_second_derivative": "F32",
    "cox_ascending_sort": "F69",
    "maml_deepcopy_learner": "B8",
    "mtl_heads_python_list": "S19",
    "pointnet_view_instead_of_transpose": "F30",
    "siamese_labels_flipped": "F74",
    "reinforce_returns_order": "F96",
}
UNSEEN = {}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 42 and len(BLIND.faults) == 44


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
