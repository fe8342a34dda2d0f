"""Twenty-four programs that train language models; the author had not seen the checks, the question is that of judge28.

The first sight of them is in judge32_first_sight.json, in the same state as that of judge31: 13 of 24 named first, and
of one more the effect; nothing wrong, nothing said of a twin. It is the first set of language models by that question,
and the poorest: what was missing are bugs of their data and of their wiring.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge32")

NAMED = {
    "stream_gpt2": "F17",
    "support_chat": "F16",
    "report_sft": "F14",
    "topic_lora": "S22",
    "few_shot_head": "S18",
    "cloze_bert": "F33",
    "rewrite_t5": "F3",
    "small_student": "F3",
    "pair_dpo": "N14",
    "pair_reward": "F122",
    "range_grpo": "D11",
    "sorted_moe": "D11",
    "packed_notes": "F12",
    "record_gpt2": "F121",
    "rotary_lm": "F120",
    "padded_decoder": "F11",
    "mixture_accum": "N2",
    "half_finetune": "N4",
    "warm_start": "S51",
    "tool_tokens": "S3",
    "int4_qat": "B7",
    "epoch_linear": "N11",
}
UNSEEN = {
    "shard_tokens": "the numbers of tokens were cut to a byte in numpy, before torch saw them",
    "dialect_head": "the weights were drawn anew before the watch began",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 13 and len(BLIND.faults) == 24


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
