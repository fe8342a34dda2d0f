"""Twenty more programs with bugs that people often make, by somebody who had not seen the checks: what is named.

The first sight of them, before any check was changed, is in judge8_first_sight.json: 14 of 20 named first, and nothing
said of 19 twins. Of one it was said that its frozen layers hold the random numbers of the start, which is so.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge8")

NAMED = {
    "image_softmax_ce": "F3",
    "vae_recon_mean_kl_sum": "F40",
    "gnn_log_softmax_dim0": "F3",
    "diffusion_noise_resampled": "F23",
    "seg_dice_on_hard_mask": "F1",
    "detection_box_loss_all_cells": "F41",
    "transfer_new_head_after_optimizer": "S3",
    "audio_scheduler_every_batch": "N9",
    "amp_clip_without_unscale": "N7",
    "accum_zero_grad_every_micro_batch": "N2",
    "ema_without_buffers": "N29",
    "gan_generator_detached": "B1",
    "actor_critic_advantage_not_detached": "F29",
    "recsys_zero_init_embeddings": "B7",
    "tabular_mse_broadcast": "F21",
    "lstm_without_batch_first": "S21",
    "lm_labels_not_shifted": "F3",
    "same_batch_every_step": "D12",
}
UNSEEN = {
    "triplet_args_swapped": "which of two rows is like the anchor stands nowhere",
    "inputs_and_labels_shuffled_apart": "which label belongs to which row stands nowhere",
}
TRUE_OF_TWINS = {"transfer_new_head_after_optimizer": {"S22"}}  # its frozen layers are random, as in no program of use


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.3)
    assert record["summary"]["named first"] == 14 and len(BLIND.faults) == 20
    warned = {name: {f["check"].split()[0] for f in p["of the twin"]} for name, p in record["programs"].items()}
    assert {name: checks for name, checks in warned.items() if checks} == TRUE_OF_TWINS


tests = judged(BLIND, NAMED, UNSEEN, TRUE_OF_TWINS)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
