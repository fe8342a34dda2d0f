"""Twenty-four more programs that train language models; their author had not seen the checks nor the sets before.

The first sight of them is in judge34_first_sight.json, after what judge33 led to: 20 of 24 named first and one third;
nothing wrong, nothing said of a twin. Of judge32 it was 13, of judge33 19, and half of the causes are those of these
two.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge34")

NAMED = {
    "story_pretraining": "F17",
    "faq_answer_tuning": "F16",
    "domain_adapter_tuning": "S3",
    "packed_articles_pretraining": "F11",
    "assistant_dpo": "N14",
    "student_distillation": "F3",
    "sparse_expert_lm": "D11",
    "masked_encoder_pretraining": "F33",
    "ticket_reply_seq2seq": "F3",
    "news_domain_tuning": "N4",
    "mixed_precision_pretraining": "N7",
    "accumulated_pretraining": "N9",
    "second_stage_pretraining": "S52",
    "chat_format_adapter": "S14",
    "document_category_sft": "F14",
    "domain_mixture_pretraining": "D16",
    "rotary_decoder_lm": "F120",
    "group_policy_tuning": "F35",
    "padded_encoder_mlm": "F34",
    "character_recurrent_lm": "S21",
    "compact_tied_gpt": "F4",
    "memory_saving_adapter": "S10",
    "grouped_decay_gpt2": "S3",
}
UNSEEN = {"passage_retrieval_encoder": "lists were sorted in Python, before there were tensors: no sign of the pairs"}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 20 and len(BLIND.faults) == 24


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
