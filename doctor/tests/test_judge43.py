"""Twenty-four programs of language models, by an author who had not seen the checks: labels, masks and padding, what
learns, reductions, optimizer and schedule, attention and positions, teachers and modes, precision, about equally.

The first sight of them is in judge43_first_sight.json: 20 of 24 named first, the effect of one more; nothing wrong. One
twin was blamed: a word that often follows itself was taken for padding without a name, which is mended.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge43")

NAMED = {
    "sft_shift": "F17",
    "eos_pad": "F16",
    "mlm_collator": "F33",
    "reward_end": "N14",
    "new_tokens": "S3",
    "lora_ckpt": "S10",
    "moe_experts": "S19",
    "unfreeze_top": "S18",
    "char_gpt": "F3",
    "kd_weight": "F3",
    "accum_loop": "N2",
    "seq2seq_flat": "F3",
    "lr_schedule": "N9",
    "adam_args": "N25",
    "amp_clip": "N7",
    "encoder_mask": "F34",
    "own_attention": "F11",
    "packed_docs": "F12",
    "rope_heads": "F120",
    "teacher_load": "S51",
    "dpo_lora": "N14",
    "small_corpus": "S11",
    "bf16_tune": "N4",
    "token_file": "D44",
}
UNSEEN: dict[str, str] = {}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.2)
    assert record["summary"]["named first"] == 20 and len(BLIND.faults) == 24


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
