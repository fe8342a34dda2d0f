"""Forty-eight programs of language models for the faults that earlier sets had missed at first sight, each written anew
by authors who were told the fault and had not seen the checks: other architectures, libraries and ways to say the same.

So they tell how far a rule that was made after one program reaches. The first sight of them is in
judge56_first_sight.json: 30 of 48 named first, the effect of four more, one for a wrong reason. Two twins were blamed
wrongly (padding where several losses have masks of their own, and a mark behind which a prompt goes on); mended.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge56")

NAMED = {
    "speech_units": "D44",
    "tone_judge": "N14",
    "switch_tagger": "D11",
    "slogan_ppo": "F35",
    "phoneme_seq2seq": "N8",
    "faq_adapter": "S16",
    "tagger_compression": "F57",
    "call_outcome": "F122",
    "translation_ranker": "F124",
    "topic_distillation": "F103",
    "spelling_bart": "F3",
    "reply_reranker": "N14",
    "language_id": "N25",
    "command_tokens": "S14",
    "int8_adapters": "B6",
    "cloze_ema": "N36",
    "edge_sentiment": "N3",
    "ner_lora": "S22",
    "semantic_parser": "F34",
    "title_grpo": "S61",
    "low_resource_tagger": "N16",
    "accent_marker": "F30",
    "summary_ipo": "N14",
    "essay_grader": "F124",
    "topic_rl": "S61",
    "second_domain": "S52",
    "liaison_tagger": "S21",
    "masked_units": "F33",
    "head_only_opt": "S1",
    "dialect_adapter": "S55",
    "ipo_summaries": "D46",
    "expert_tagger": "F62",
    "echo_lm": "F120",
    "voice_to_call": "F15",
    "pair_judge": "F34",
    "pitch_labels": "F3",
    "chat_turns": "F130",
    "soft_prompt": "F131",
    "shared_vocab_mt": "F4",
    "slot_filler": "S24",
    "mt_quality": "S25",
    "code_switch": "S21",
    "polyak_spell": "N4",
    "bart_subtitles": "N9",
    "passage_ranker": "S61",
    "sparse_story_lm": "F11",
}
UNSEEN = {
    "ticket_router": "a mark that is given with the question looks like one that is to be answered",
    "embedding_student": "vectors that were kept in a shuffled order before the watch; no labels tell whose they are",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.1)
    assert record["summary"]["named first"] == 30 and len(BLIND.faults) == 48


tests = judged(BLIND, NAMED, UNSEEN, {"phoneme_seq2seq": {"B6"}})
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
