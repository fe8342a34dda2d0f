"""Twenty-four more programs of language models, by an author who had not seen the checks and was asked for the most
common bugs.

The first sight of them is in judge52_first_sight.json: 23 of 24 named first, nothing wrong, no twin blamed.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge52")

NAMED = {
    "chat_sft": "F16",
    "llama_pretrain": "F17",
    "bert_mlm": "F33",
    "packed_instruct": "F130",
    "lora_topics": "S22",
    "new_tokens": "S3",
    "moe_lm": "S19",
    "checkpointed_lora": "S10",
    "mixture_accum": "N2",
    "reward_ratings": "F21",
    "distill_gpt": "F3",
    "char_gpt": "N1",
    "epoch_decay": "N9",
    "nano_groups": "N24",
    "t5_translate": "N9",
    "sdpa_gpt": "F11",
    "seq2seq_translator": "F34",
    "order_classifier": "S23",
    "dpo": "N14",
    "review_classifier": "S11",
    "bf16_gpt": "N4",
    "fp16_amp": "N7",
    "relevance_bert": "D17",
}
UNSEEN = {"cached_distill": "a classifier's answers that were kept before the watch; no labels tell whose they are"}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.1)
    assert record["summary"]["named first"] == 23 and len(BLIND.faults) == 24


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
