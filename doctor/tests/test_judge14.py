"""Forty-four programs with bugs that people often make, by two more people who had not seen the checks.

One was asked for agents, series, tables, graphs and mechanics, the other for tensors that do not learn and for wrong
structures. The first sight of them is in judge14_first_sight.json: 29 of 44 named first (16 and 13), one true
warning of the effect, and nothing said of a twin.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge14")

NAMED = {
    "reinforce_softmax_as_logits": "F83",
    "dqn_q_target_broadcast": "F21",
    "a2c_advantage_not_detached": "F29",
    "ddpg_soft_update_swapped": "N36",
    "lstm_not_batch_first": "S21",
    "har_conv_view_for_permute": "F30",
    "traffic_missing_counted_in_loss": "D18",
    "entity_embeddings_in_python_list": "S19",
    "biomarker_eval_mode_left_on": "N16",
    "claims_poisson_log_input": "F3",
    "wine_argmax_loss_requires_grad": "F1",
    "cox_risk_set_ascending": "F69",
    "mf_default_normal_embeddings": "F61",
    "graph_collate_without_offset": "D22",
    "ctc_label_on_blank_index": "F66",
    "keyword_padding_mask_inverted": "F34",
    "pinn_residual_without_create_graph": "F25",
    "realnvp_log_det_sign": "F82",
    "maml_query_with_initial_weights": "N28",
    "multitask_loss_overwritten": "B1",
    "amp_clip_before_unscale": "N7",
    "ae_scheduler_stepped_every_batch": "N9",
    "vit_pos_embed_plain_tensor": "S19",
    "head_replaced_after_optimizer": "S3",
    "require_grad_misspelt_backbone": "S18",
    "steplr_stepped_every_batch": "N9",
    "amp_clip_while_scaled": "N7",
    "bf16_weights_lose_updates": "N4",
    "atanh_eps_lost_in_float32": "N17",
    "zero_grad_between_two_losses": "N2",
    "lora_both_factors_zero": "B3",
    "critic_optimizer_holds_actor": "S3",
    "weights_filled_with_constant": "S20",
    "lstm_without_batch_first": "S21",
    "mil_attention_softmax_over_batch": "S33",
    "td_target_keeps_gradient": "F81",
    "perceptual_net_is_trained": "F81",
    "frozen_backbone_batchnorm_moves": "N12",
    "gan_generator_optimizer_holds_d": "S36",
    "unet_skip_concats_itself": "S34",
    "noise_reseeded_every_batch": "D20",
    "imputer_sees_the_missing_values": "D21",
    "task_heads_are_one_module": "S30",
    "anchor_weights_not_cloned": "S35",
}
UNSEEN: dict[str, str] = {}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 29 and len(BLIND.faults) == 44
    assert not any(p["of the twin"] for p in record["programs"].values())


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
