"""Forty-four programs with bugs that people often make, by two more people who had not seen the checks.

The first sight of them, before any check was changed for them, is in judge12_first_sight.json: 31 of 44 named first,
nothing wrong, and nothing said of a twin.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge12")

NAMED = {
    "cls_blocks_in_python_list": "S19",
    "finetune_unfreeze_not_in_optimizer": "S3",
    "det_head_view_without_permute": "F30",
    "seg_flip_image_not_mask": "D14",
    "depth_invalid_not_masked": "D18",
    "sr_conv_init_std_one": "F4",
    "simsiam_no_stop_gradient": "F57",
    "gan_generator_step_on_detached_fake": "B1",
    "vae_recon_mean_kl_sum": "F40",
    "ddpm_uniform_noise": "F60",
    "accum_zero_grad_every_micro_batch": "N2",
    "two_optimizers_one_zero_grad": "N1",
    "amp_clip_without_unscale": "N7",
    "ema_without_bn_buffers": "N29",
    "steplr_stepped_every_batch": "N9",
    "param_groups_miss_factors": "S3",
    "eval_mode_never_switched_back": "S11",
    "sampler_given_class_weights": "D16",
    "multitask_age_broadcast": "F21",
    "lstm_reads_padded_last_step": "S25",
    "dqn_no_terminal_mask": "F56",
    "ppo_advantage_broadcast": "F21",
    "sac_sample_not_rsample": "F22",
    "td3bc_critic_never_zeroed": "N1",
    "lstm_batch_axis": "S21",
    "transformer_no_causal_mask": "F11",
    "cox_sorted_ascending": "F69",
    "churn_minus_one_labels": "F20",
    "ratings_cast_to_long": "D17",
    "gat_mask_not_minus_inf": "F53",
    "gcn_randn_init": "F4",
    "har_inplace_normalise": "D13",
    "keyword_eval_mode_stuck": "S11",
    "sleep_view_not_permute": "F30",
    "ctc_blank_collides": "F66",
    "pinn_retain_not_create_graph": "F25",
    "deeponet_scheduler_per_batch": "N9",
    "vae_kl_sum_recon_mean": "F40",
    "distill_kl_wants_log": "F3",
    "fomaml_grads_stay_on_clone": "B8",
    "clap_temperature_multiplied": "F37",
    "moe_experts_plain_list": "S19",
    "triplet_similarity_as_distance": "F74",
    "bf16_weights_instead_of_autocast": "N4",
}
UNSEEN = {}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 31 and len(BLIND.faults) == 44
    assert not any(p["of the twin"] for p in record["programs"].values())


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
