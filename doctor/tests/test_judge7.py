"""Forty more programs, ten of them language models, by somebody who had not seen the checks: what is named.

The first sight of them, before any check was changed, is in judge7_first_sight.json: 18 of 40 named first, nothing said
of a twin. What is asked here is what holds after the checks were mended.
"""

import json

import pytest

from train_doctor import NOTE

from .judge7 import FAULTS, PROOFS, RECORD, examine

NAMED = {
    "flow_logdet_sign": "F82",
    "wgan_gp": "F25",
    "vae_kl_batch_sum": "F40",
    "vqvae_straight_through": "F38",
    "diffusion_target_noise": "F23",
    "seg_mask_interpolation": "F36",
    "det_box_loss_all_cells": "F41",
    "simclr_temperature": "F37",
    "dqn_max_not_taken_action": "F39",
    "ppo_old_logprob_live": "F35",
    "a2c_advantage_live": "F29",
    "regression_broadcast": "F21",
    "gru_batch_axis": "S21",
    "gnn_index_add": "F31",
    "recsys_tables_in_list": "S19",
    "audio_specaugment_inplace": "D13",
    "loader_restarted": "D12",
    "multitask_uncertainty_weights": "S3",
    "triplet_sqrt_at_zero": "N17",
    "maml_fast_weights": "F1",
    "lbfgs_closure": "N1",
    "ema_buffers": "N29",
    "amp_clip_before_unscale": "N7",
    "accumulation_zeroed": "N2",
    "frozen_backbone_bn": "N12",
    "validation_graph_kept": "N27",
    "lm_lora_both_zero": "B3",
    "lm_peft_reentrant_checkpointing": "S10",
    "lm_resume_prefix": "S51",
    "lm_distill_kl_input": "F3",
    "lm_tail_labels_on_padding": "F15",
    "lm_warmup_floor": "N11",
    "lm_accum_mean_of_means": "N6",
    "lm_bf16_weights": "N4",
    "lm_dpo_reference_alias": "N14",
    "simsiam_stop_gradient": "F57",
    "mixture_density_logsum": "F95",
}
UNSEEN = {
    "dqn_terminal_bootstrap": "that an episode ended is a number like others",
    "ranking_margin_sign": "which of two rows is the better one stands nowhere",
    "lm_packed_documents": "packed without a mask between documents is how many language models are trained",
}


def test_the_first_sight_is_on_record():
    record, proofs = json.loads(RECORD.read_text()), json.loads(PROOFS.read_text())
    assert list(record["programs"]) == list(FAULTS) and sorted(proofs) == sorted(FAULTS) and len(FAULTS) == 40
    assert all(not p["faulty"] <= p["mended"] for p in proofs.values())  # NaN is worse too
    reads = [p["read"] for p in record["programs"].values()]
    assert record["summary"]["named first"] == reads.count("first") == 18
    assert not any(p["of the twin"] for p in record["programs"].values())
    assert sorted([*NAMED, *UNSEEN]) == sorted(FAULTS)
    assert all(name in NAMED for name, p in record["programs"].items() if p["read"] == "first")


@pytest.mark.parametrize("name", NAMED)
def test_the_cause_is_named_first(name):
    report = examine(name, mended=False)
    assert not report.faults, report.faults
    assert report.root is not None and report.root.check == NAMED[name], f"{FAULTS[name][1]['what']}\n{report}"


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_not_seen_is_not_named_wrongly(name):
    """One that is named some day moves up to NAMED."""
    report = examine(name, mended=False)
    assert not report.faults and not [f for f in report.findings if f.severity != NOTE], report


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_is_said_of_a_twin(name):
    report = examine(name, mended=True)
    assert not report.faults and not [f for f in report.findings if f.severity != NOTE], f"\n{report}"
