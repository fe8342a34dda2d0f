"""Twenty-four programs of language models, of the faults that users of transformers and peft report; their author had
not seen the checks.

The first sight of them is in judge37_first_sight.json, in the same state as that of judge36: 14 of 24 named first, the
effect of one more; nothing wrong, one true warning of a twin. All are named now.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge37")

NAMED = {
    "gpt2_labels_shifted_twice": "F17",
    "nanogpt_attention_sees_future": "F11",
    "domain_accumulation_zeroed_inside": "N2",
    "fp16_clip_on_scaled_gradients": "N7",
    "lstm_clip_exhausted_iterator": "N8",
    "schedule_steps_per_micro_batch": "N9",
    "validation_leaves_eval_mode": "N16",
    "bf16_weights_without_master_copy": "N4",
    "mlm_labels_on_every_token": "F33",
    "t5_decoder_fed_unshifted_labels": "F3",
    "eos_masked_with_padding": "F16",
    "prompt_mask_one_too_long": "F127",
    "tied_head_frozen_with_embeddings": "S1",
    "vocabulary_extended_after_optimizer": "S3",
    "gradual_unfreeze_outside_optimizer": "S3",
    "reentrant_checkpoint_cuts_lora": "S10",
    "second_adapter_never_activated": "S16",
    "lora_base_unfrozen_again": "S55",
    "teacher_trained_with_student": "F57",
    "dpo_reference_is_policy": "N14",
    "ipo_reference_cache_out_of_order": "D46",
    "reward_reads_mid_sequence": "F122",
    "routing_entropy_minimised": "F62",
    "qat_round_stops_gradient": "B7",
}
UNSEEN: dict[str, str] = {}
TRUE = {"ipo_reference_cache_out_of_order": {"B6"}}  # its gradients are hundreds of times the limit


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 14 and len(BLIND.faults) == 24


tests = judged(BLIND, NAMED, UNSEEN, TRUE)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
