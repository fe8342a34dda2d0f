"""Forty-four programs of two more authors who had not seen the checks: pictures and generators, and all other fields.

The first sight of them is in judge25_first_sight.json: 38 of 44 named first, one named second, nothing wrong. All
steps of a program are made, so what is wrong from the eleventh on is told at the end (N16). One warning of a twin is
true: the last block of N-BEATS makes a backcast that nothing uses (B1).
"""

from .step_programs import Blind, judged

BLIND = Blind("judge25")

NAMED = {
    "clf_softmax_then_ce": "F3",
    "clf_hwc_view_to_chw": "F30",
    "clf_scheduler_stepped_per_batch": "N9",
    "clf_ema_skips_bn_buffers": "N29",
    "audio_missing_zero_grad": "N1",
    "seg_mask_bilinear_resize": "F36",
    "seg_unpaired_augmentation": "D14",
    "det_flip_without_boxes": "D19",
    "det_box_loss_on_background": "F41",
    "age_regression_broadcast": "F21",
    "audio_lstm_batch_first": "S21",
    "audio_ctc_blank_is_char": "F66",
    "vae_mean_recon_sum_kl": "F40",
    "gan_detached_generator_step": "B1",
    "ddpm_uniform_noise": "F60",
    "flow_coupling_same_mask": "S40",
    "simclr_identical_views": "F27",
    "simsiam_no_stop_gradient": "F57",
    "kd_teacher_in_train_mode": "F6",
    "finetune_head_after_optimizer": "S3",
    "tabular_softmax_before_ce": "F3",
    "tabular_mse_broadcast": "F21",
    "fraud_class_weights_as_sampler_weights": "D16",
    "tabular_eval_mode_left_on": "N16",
    "forecast_target_is_last_input": "F50",
    "forecast_steplr_per_batch": "N9",
    "lstm_batch_first_missing": "S21",
    "gru_last_padded_step": "S25",
    "rnn_hidden_detached_in_loop": "S38",
    "graph_collate_no_offset": "D22",
    "gcn_dropout_always_on": "S24",
    "dqn_no_done_mask": "F56",
    "reinforce_returns_forward": "F96",
    "mf_implicit_positives_only": "F20",
    "sasrec_no_causal_mask": "F11",
    "pinn_relu_second_derivative": "F32",
    "cox_risk_set_ascending": "F69",
    "maml_meta_loss_on_support": "D25",
    "multitask_missing_labels_as_negative": "D18",
    "pointnet_view_instead_of_transpose": "F30",
    "embedding_replaced_after_optimizer": "S3",
    "ctr_zero_grad_missing": "N1",
    "kpt_unlabelled_joints_in_loss": "D18",
    "finetune_no_input_normalize": "S47",
}
UNSEEN: dict[str, str] = {}
TRUE = {"forecast_steplr_per_batch": {"B1"}}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 38 and len(BLIND.faults) == 44


tests = judged(BLIND, NAMED, UNSEEN, TRUE)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
