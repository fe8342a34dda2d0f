"""Forty-four programs of every kind, 22 by each of two people who had not seen the checks.

The first sight of them is in judge17_first_sight.json: 26 of 44 named first. One other was called a teacher that is
none, and one twin got a warning (D18, a dark picture as the target of a denoiser), which was mended.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge17")

NAMED = {
    "seg_logits_view": "F3",
    "det_giou_center_boxes": "F86",
    "siamese_cosine_zero_one": "F20",
    "ctc_default_blank": "F66",
    "autorec_unobserved_zeros": "F55",
    "gaussian_nll_gets_sigma": "F91",
    "distill_kl_needs_log": "F3",
    "pointnet_layers_in_list": "S19",
    "unfreeze_without_param_group": "S3",
    "gnn_gate_and_branch_zero": "B7",
    "video_state_detached_every_frame": "S38",
    "tabular_weights_in_bfloat16": "N4",
    "lambda_lr_returns_absolute_rate": "N9",
    "graph_batch_without_offset": "D22",
    "video_transformer_not_batch_first": "S21",
    "simsiam_without_stop_gradient": "F57",
    "multitask_heads_are_one_module": "S30",
    "cloud_max_over_channels": "S39",
    "flip_drawn_twice": "D14",
    "denoise_target_aliases_input": "F73",
    "mean_teacher_ema_rebinds_name": "N28",
    "bpr_negatives_from_user_range": "D23",
    "a2c_advantage_broadcast": "F21",
    "cox_unsorted_risk_set": "F69",
    "vae_kl_mean_vs_recon_sum": "F40",
    "distill_kl_on_probabilities": "F3",
    "realnvp_logdet_sign": "F82",
    "ddpm_fresh_noise_target": "F23",
    "missing_labels_as_negatives": "D18",
    "ddpg_actor_uses_no_grad_action": "B1",
    "pinn_derivative_without_graph": "F25",
    "nbeats_blocks_in_plain_list": "S19",
    "lora_both_factors_zero": "B7",
    "bfloat16_master_weights": "N4",
    "gan_both_optimizers_on_discriminator": "S3",
    "lstm_runs_over_batch_axis": "S21",
    "key_padding_mask_inverted": "F34",
    "td_target_keeps_gradient": "F81",
    "task_heads_are_one_module": "S30",
    "teacher_left_in_train_mode": "F6",
    "sampler_gets_class_weights": "D16",
    "mirrored_frame_same_steering": "D19",
    "critic_steps_on_actor_gradients": "N38",
}
UNSEEN = {
    "reptile_snapshot_is_alias": "the first outer step comes after ten inner ones, when the watch is over",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 26 and len(BLIND.faults) == 44
    assert [n for n, p in record["programs"].items() if p["of the twin"]] == ["denoise_target_aliases_input"]


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
