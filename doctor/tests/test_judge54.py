"""Twenty-four programs of language models, most of them written by hand, by an author who had not seen the checks and
was asked for the most common bugs.

The first sight of them is in judge54_first_sight.json: 20 of 24 named first, the effect of one more (heads that are
split by a view alone); nothing wrong, no twin blamed. Not seen were an end that is hidden with the padding where no
tokenizer tells it, packed rows that are filled up with a word, and a teacher that learns by two distances.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge54")

NAMED = {
    "sft_stop_token": "F16",
    "mlm_labels_alias": "F33",
    "gpt2_shifted_twice": "F17",
    "reward_pairs_interleaved": "S61",
    "lora_checkpoint_no_input_grads": "S10",
    "resize_after_optimizer": "S3",
    "moe_experts_plain_list": "S19",
    "peft_head_not_saved": "S22",
    "accumulate_zero_grad_inside": "N2",
    "score_broadcast": "F21",
    "softmax_before_cross_entropy": "F3",
    "lambda_lr_absolute": "N9",
    "scheduler_per_micro_batch": "N9",
    "clip_before_backward": "N8",
    "heads_by_view_without_transpose": "F30",
    "rope_over_heads": "F120",
    "decoder_input_not_shifted": "F33",
    "packing_attends_across_documents": "F12",
    "dpo_reference_is_policy": "N14",
    "teacher_left_in_train_mode": "F6",
    "distiller_trains_teacher": "F57",
    "ema_in_bfloat16": "N4",
    "clip_without_unscale": "N7",
    "mask_value_1e_minus_9": "F11",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, {}, harm=1.1)
    assert record["summary"]["named first"] == 20 and len(BLIND.faults) == 24


test_the_cause_is_named_first, _, test_nothing_is_said_of_a_twin = judged(BLIND, NAMED, {})
