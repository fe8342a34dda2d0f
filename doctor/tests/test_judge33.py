"""Twenty-four more programs that train language models; their author had not seen the checks nor judge32.

The first sight of them is in judge33_first_sight.json, after what judge31 and judge32 led to: 19 of 24 named first, one
second and of one more the effect; nothing wrong, nothing said of a twin. Of judge32 it was 13.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge33")

NAMED = {
    "gpt2_windows": "F17",
    "rope_decoder": "F120",
    "tied_nano": "F4",
    "packed_docs": "F12",
    "source_rounds": "N2",
    "llama_epochs": "N11",
    "domain_mixture": "D16",
    "chat_sft": "F16",
    "qa_sft": "F14",
    "adapter_round_two": "S1",
    "role_tokens": "S14",
    "bert_mlm": "F33",
    "t5_rewrite": "F3",
    "gpt_sentiment": "F124",
    "pair_embedder": "F37",
    "teacher_student": "F3",
    "dpo_pairs": "N14",
    "reward_pairs": "F122",
    "moe_lm": "D11",
    "small_finetune": "N4",
    "continue_pretrain": "S51",
    "int4_lm": "B7",
    "binary_corpus": "D44",
    "grpo_answers": "S61",
}
UNSEEN: dict[str, str] = {}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 19 and len(BLIND.faults) == 24


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
