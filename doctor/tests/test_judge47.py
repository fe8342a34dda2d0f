"""Twenty-four programs of language models, some of them of torch's own layers, by an author who had not seen the checks
and was asked for the most common bugs.

The first sight of them is in judge47_first_sight.json: 23 of 24 named first, nothing wrong. Of one mended twin it was
said, and is, that its frozen base holds random numbers.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge47")

NAMED = {
    "gpt2_sft_collate": "F3",
    "llama_repeat_sft": "F16",
    "bert_mlm": "F33",
    "encoder_tagger": "F34",
    "lora_domain": "S3",
    "moe_gpt": "S30",
    "lora_checkpointing": "S10",
    "kd_student": "F3",
    "lstm_lm": "F3",
    "gpt_source_mix": "N2",
    "reward_regressor": "F21",
    "nanogpt_cosine": "N9",
    "bart_accumulate": "N9",
    "word_lstm_sgd": "N8",
    "order_classifier": "S23",
    "char_gpt": "F30",
    "packed_mha": "F11",
    "nn_transformer_mt": "F33",
    "dpo_gpt2": "N14",
    "bert_distiller": "F57",
    "bf16_causal_lm": "N4",
    "ema_gpt": "N4",
    "bert_fp16_scaler": "N7",
    "review_validation": "N16",
}
TRUE = {"lora_checkpointing": {"S22"}}  # its LoRA is put on a base that nobody has trained


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, {}, harm=1.2)
    assert record["summary"]["named first"] == 23 and len(BLIND.faults) == 24


test_the_cause_is_named_first, _, test_nothing_is_said_of_a_twin = judged(BLIND, NAMED, {}, TRUE)
