"""Twenty-four programs of language models (libraries, and by hand) by an author who had not seen the checks and was
asked for the most common bugs.

The first sight of them is in judge57_first_sight.json: 22 of 24 named first, nothing wrong, no twin blamed.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge57")

NAMED = {
    "sft_eos": "F16",
    "llama_pretrain": "F17",
    "mlm": "F33",
    "bart_translate": "F3",
    "reward_pairs": "S61",
    "lora_classifier": "S22",
    "moe_lm": "S19",
    "ckpt_frozen_embed": "S10",
    "extend_vocab": "S3",
    "grad_accum": "N2",
    "distill_kl": "F3",
    "text_classifier": "F3",
    "linear_schedule": "N11",
    "lstm_clip": "N8",
    "amp_clip": "N7",
    "nano_mask": "F11",
    "intent": "F34",
    "rotary": "F120",
    "distiller": "F57",
    "dpo_lora": "N14",
    "sampling_trainer": "S11",
    "bf16": "N4",
    "ema": "N4",
}
UNSEEN = {
    "token_file": "ids of 384 that were cut to a byte, of words as unlike in number as the codes of a padded table",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.1)
    assert record["summary"]["named first"] == 22 and len(BLIND.faults) == 24


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
