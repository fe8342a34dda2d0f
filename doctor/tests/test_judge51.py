"""Twenty-four more programs of language models, by an author who had not seen the checks and was asked for the most
common bugs.

The first sight of them is in judge51_first_sight.json: 19 of 24 named first, two by their effect, two not seen. One
finding was wrong: a policy that is its own reference was told that its texts have one score. No twin was blamed.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge51")

NAMED = {
    "sft_phrases": "F16",
    "packed_corpus": "F17",
    "mlm_templates": "F33",
    "translate": "F3",
    "adapter_classifier": "S19",
    "own_lora": "B3",
    "peft_long_context": "S10",
    "mixture_of_sources": "N2",
    "distil_lm": "F3",
    "essay_scores": "F21",
    "reward_model": "S61",
    "bert_amp": "N7",
    "classify_epochs": "N11",
    "nano_cosine": "N9",
    "char_gpt": "F11",
    "cls_encoder": "F34",
    "einsum_gpt": "F30",
    "moe_lm": "S33",
    "distil_classifier": "F57",
    "small_corpus": "S11",
    "dpo": "N14",
    "bf16_finetune": "N4",
    "rotary_copy": "S15",
    "similarity": "D17",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, {}, harm=1.1)
    assert record["summary"]["named first"] == 19 and len(BLIND.faults) == 24


test_the_cause_is_named_first, _, test_nothing_is_said_of_a_twin = judged(BLIND, NAMED, {})
