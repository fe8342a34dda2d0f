"""Twenty-four more programs of language models, by an author who had not seen the checks and was asked for the most
common bugs.

The first sight of them is in judge49_first_sight.json: 20 of 24 named first, one by its effect, nothing wrong, no twin
blamed.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge49")

NAMED = {
    "clm_double_shift": "F17",
    "sft_eos_masked": "F16",
    "mlm_labels_after_mask": "F33",
    "t5_unshifted_decoder": "F3",
    "lstm_target_order": "F3",
    "moe_experts_list": "S19",
    "lora_both_zero": "B3",
    "lora_checkpoint_no_grad": "S10",
    "accum_zero_inside": "N2",
    "score_broadcast": "F21",
    "softmax_before_ce": "F3",
    "grpo_group_view": "S61",
    "lambda_lr_absolute": "N9",
    "clip_after_step": "N8",
    "never_zeroed": "N1",
    "heads_merge_no_transpose": "F30",
    "pe_batch_dim": "S23",
    "padding_mask_inverted": "F34",
    "teacher_learns_too": "F57",
    "dpo_ref_is_policy": "N14",
    "eval_never_back": "S11",
    "pure_bf16_adamw": "N4",
    "clip_before_unscale": "N7",
    "uint8_token_ids": "D44",
}
UNSEEN: dict[str, str] = {}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.2)
    assert record["summary"]["named first"] == 20 and len(BLIND.faults) == 24


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
