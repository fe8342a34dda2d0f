"""Twenty-four more programs of language models, by the question of judge37 and another author who had not seen the
checks.

The first sight of them is in judge39_first_sight.json, of the state after judge38 was mended: 20 of 24 named first, one
second. A rule that was an hour old blamed a table whose rows were not asked for, in one of the faults and in six twins;
two other rules blamed a twin each. All three are mended. Most causes are those of judge37.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge39")

NAMED = {
    "lora_classifier_frozen_score": "S22",
    "adapters_in_python_list": "S19",
    "gradual_unfreeze_optimizer_groups": "S3",
    "second_adapter_not_activated": "S16",
    "labels_shifted_twice": "F17",
    "eos_masked_with_padding": "F16",
    "mlm_labels_after_masking": "F33",
    "t5_decoder_sees_targets": "F3",
    "distill_teacher_trained_along": "F57",
    "distill_teacher_dropout_active": "S12",
    "dpo_reference_shares_policy": "N14",
    "dpo_cached_reference_order": "D46",
    "reward_pools_first_token": "F124",
    "moe_balance_from_counts": "F2",
    "qat_round_has_no_gradient": "B7",
    "checkpoint_reentrant_frozen_embeddings": "S10",
    "accumulation_cleared_every_microbatch": "N2",
    "clip_before_unscale": "N7",
    "bf16_weights_lose_small_updates": "N4",
    "tied_head_unit_variance_embedding": "F4",
    "schedule_counts_one_epoch": "N11",
    "clip_gets_consumed_generator": "N8",
    "rotary_only_on_queries": "F120",
    "left_padding_without_mask": "F13",
}
UNSEEN: dict[str, str] = {}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 20 and len(BLIND.faults) == 24


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
