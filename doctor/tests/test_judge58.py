"""Twenty-four programs of language models (libraries, and by hand) by an author who had not seen the checks and was
asked for the most common bugs.

The first sight of them is in judge58_first_sight.json: 21 of 24 named first, nothing wrong, no twin blamed.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge58")

NAMED = {
    "pretrain_gpt2": "F17",
    "sft_llama": "F16",
    "mlm_bert": "F33",
    "reward_pairs": "S61",
    "translate_seq2seq": "F33",
    "extend_vocab": "S3",
    "lora_cls": "S22",
    "ckpt_finetune": "S10",
    "mingpt_groups": "S3",
    "accum_loop": "N2",
    "moe_lm": "S33",
    "intent_classifier": "F3",
    "linear_schedule": "N11",
    "adam_decay": "N26",
    "simple_trainer": "N1",
    "own_attention": "F30",
    "encoder_positions": "S23",
    "topic_encoder": "F34",
    "packed_docs": "F12",
    "dpo_gpt2": "N14",
    "distil_lm": "F57",
    "small_corpus": "N16",
    "bf16_tune": "N4",
    "amp_clip": "N7",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, {}, harm=1.1)
    assert record["summary"]["named first"] == 21 and len(BLIND.faults) == 24


test_the_cause_is_named_first, _, test_nothing_is_said_of_a_twin = judged(BLIND, NAMED, {})
