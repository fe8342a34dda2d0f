"""Twenty-four more programs of language models, by the question of judge37 and another author who had not seen the
checks.

The first sight of them is in judge41_first_sight.json, in the same state as that of judge40: 20 of 24 named first, the
effect of one more; nothing wrong. What is said of one twin is true: its experts have room for so many tokens, so tokens
that come later, and other rows, decide who is served.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge41")

NAMED = {
    "distil_gpt2_cached_logits": "D46",
    "t5_smoothed_seq2seq": "F33",
    "bert_pair_classifier": "F34",
    "gpt2_gradual_unfreeze": "S3",
    "llama_lora_classifier": "S22",
    "gpt_lora_checkpointing": "S10",
    "gpt2_sft_pad_token": "F16",
    "dpo_lora_reference": "N14",
    "dpo_token_logps": "F3",
    "distil_llama": "F57",
    "llama_lora_new_tokens": "S14",
    "llama_accumulation_schedule": "N9",
    "bert_mlm_grad_scaler": "N7",
    "qwen2_bf16_finetune": "N4",
    "switch_balance": "F2",
    "gpt_qat": "B7",
    "qwen2_response_mask": "F14",
    "gpt2_periodic_validation": "N16",
    "reward_pooling": "F124",
    "bert_mlm_labels": "F33",
    "mistral_second_adapter": "S16",
    "llama_frozen_trunk": "S18",
    "gpt_tied_head_init": "F4",
    "gpt2_left_padding": "F121",
}
UNSEEN: dict[str, str] = {}
TRUE = {"switch_balance": {"F11", "S23"}}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 20 and len(BLIND.faults) == 24


tests = judged(BLIND, NAMED, UNSEEN, TRUE)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
