"""Twenty-four programs of language models that use the libraries (transformers, peft, loaders, own trainers), by an
author who had not seen the checks and was asked for the most common bugs.

The first sight of them is in judge53_first_sight.json: **24 of 24** named first. Two twins have a warning each that is
true of them: an adapter on a base of random weights, and a clip that sets the length of every step.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge53")

NAMED = {
    "sft_stop": "F16",
    "mlm": "F33",
    "char_pretrain": "F17",
    "translate": "F3",
    "new_tokens": "S3",
    "nano_blocks": "S19",
    "nano_heads": "F30",
    "moe_lm": "S33",
    "lora_cls": "S10",
    "multi_domain": "N2",
    "topics": "F3",
    "reward": "F21",
    "llama_scratch": "N9",
    "facts": "N11",
    "trainer": "N1",
    "packed": "F11",
    "winner": "S23",
    "padded_encoder": "F34",
    "distill": "F57",
    "dpo": "N14",
    "small_corpus": "S11",
    "bf16_finetune": "N4",
    "amp_lm": "N7",
    "records": "S15",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, {}, harm=1.1)
    assert record["summary"]["named first"] == 24 and len(BLIND.faults) == 24


TRUE = {"lora_cls": {"S22"}, "reward": {"B6"}}  # the base is random; the clip sets each step
test_the_cause_is_named_first, _, test_nothing_is_said_of_a_twin = judged(BLIND, NAMED, {}, TRUE)
