"""Twenty-four more programs of language models, by another author who had not seen the checks and was asked for the
bugs of public write-ups and of fixed issues of transformers, peft, TRL, accelerate and nanoGPT.

The first sight of them is in judge44_first_sight.json: 14 of 24 named first, the effect of one more. One finding was
wrong: gradients that a clip had made 0, since their norm was infinite, were said to have been cleared. That is mended.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge44")

NAMED = {
    "sft_pad_eos": "F16",
    "completion_mask": "F130",
    "resume_adapter": "S1",
    "checkpointed_blocks": "S10",
    "tool_tokens": "S14",
    "dpo_lora": "N14",
    "soft_prompt": "F131",
    "grpo": "S61",
    "int8_kernel": "B4",
    "distill": "F72",
    "switch_dispatch": "D11",
    "muon_groups": "S3",
    "tied_gpt": "F4",
    "ema_validation": "N36",
    "lambda_schedule": "N9",
    "bf16_training": "N4",
    "fp16_scaler": "N7",
    "rope_layout": "F120",
    "packed": "F11",
    "seq2seq": "F3",
    "mlm": "F33",
    "attention_dropout": "S24",
    "quant_aware": "N3",
    "token_file": "D44",
}
UNSEEN: dict[str, str] = {}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.2)
    assert record["summary"]["named first"] == 14 and len(BLIND.faults) == 24


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
