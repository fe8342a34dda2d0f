"""Thirty-two more programs, most outside language models, by somebody who had not seen the checks: what is named.

The first sight of them, before any check was changed, is in judge6_first_sight.json: 11 of 32 named first, nothing said
of a twin. What is asked here is what holds after the checks were mended.
"""

import json

import pytest

from train_doctor import NOTE

from .judge6 import FAULTS, RECORD, examine

NAMED = {
    "point_diffusion": "F84",
    "triplet_retrieval": "F74",
    "survival_cox": "F69",
    "glyph_cnn": "F3",
    "box_detector": "N9",
    "blob_vae": "F40",
    "house_prices": "F21",
    "load_forecast": "N6",
    "keyword_audio": "F30",
    "ring_gan": "B1",
    "citation_gnn": "F31",
    "machine_wear": "S21",
    "reverse_seq2seq": "F33",
    "simclr_patches": "F27",
    "movie_ratings": "B7",
    "scene_tags": "F20",
    "poisson_pinn": "F32",
    "distill_cnn": "F3",
    "spectrum_fit": "N1",
    "texture_deepnet": "S11",
    "transfer_probe": "S51",
    "intent_classifier": "F34",
    "lora_adapter": "S22",
    "masked_tokens": "F33",
    "event_order": "S23",
    "sensor_finetune": "N4",
    "siamese_signals": "F57",
}
UNSEEN = {
    "lesion_segmentation": "two draws for two turns are right where two views are made",
    "actor_critic_tracker": "a loss by hand may have a gradient in all of its parts",
    "dqn_docking": "that an episode ended is a number like others",
    "expert_mixture": "a router may learn from a balance term alone",
    "robot_arm": "a gradient by hand may differ from the slope on purpose (straight-through, reversal)",
}


def test_the_first_sight_is_on_record():
    record = json.loads(RECORD.read_text())
    assert list(record["programs"]) == list(FAULTS) and len(FAULTS) == 32
    reads = [p["read"] for p in record["programs"].values()]
    assert record["summary"]["named first"] == reads.count("first") == 11
    assert not any(p["of the twin"] for p in record["programs"].values())
    assert sorted([*NAMED, *UNSEEN]) == sorted(FAULTS)
    assert all(name in NAMED for name, p in record["programs"].items() if p["read"] == "first")


@pytest.mark.parametrize("name", NAMED)
def test_the_cause_is_named_first(name):
    report, _ = examine(name, mended=False)
    assert not report.faults, report.faults
    assert report.root is not None and report.root.check == NAMED[name], f"{FAULTS[name][1]['what']}\n{report}"


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_not_seen_is_not_named_wrongly(name):
    """One that is named some day moves up to NAMED."""
    report, _ = examine(name, mended=False)
    assert not report.faults and not [f for f in report.findings if f.severity != NOTE], report


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_is_said_of_a_twin(name):
    report, _ = examine(name, mended=True)
    assert not report.faults and not [f for f in report.findings if f.severity != NOTE], f"\n{report}"
