"""Twenty-four programs of language models, by an author who had not seen the checks and was asked for the most common
bugs: what every second newcomer's code holds, and that of experienced people on a bad day.

The first sight of them is in judge45_first_sight.json: 18 of 24 named first, nothing wrong, no twin blamed.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge45")

NAMED = {
    "sft_stop": "F16",
    "pretrain_llama": "F17",
    "reward_model": "S25",
    "mlm": "F33",
    "lora_cls": "S22",
    "frozen_embeddings": "S10",
    "decoder_stack": "S19",
    "moe_dispatch": "D11",
    "mixed_sources": "N2",
    "distill_kl": "F3",
    "essay_score": "F21",
    "cls_epochs": "N11",
    "nano_adamw": "N25",
    "opt_loop": "N1",
    "rotary": "F120",
    "tagger": "S21",
    "translate": "F34",
    "dpo": "N14",
    "teacher_ckpt": "S51",
    "small_corpus": "S11",
    "bf16_finetune": "N4",
    "amp_scaler": "N7",
    "token_file": "D44",
}
UNSEEN = {
    "packing": "labels hide the answers in place of the prompts, and nothing tells which is which",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 18 and len(BLIND.faults) == 24


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
