"""Forty-four programs of two authors who had not seen the checks: pictures and generators, and all other fields.

The first sight of them is in judge23_first_sight.json: 30 of 44 named first, nothing wrong of them, and of the twins
one wrong warning: three tasks that are learned from one batch were taken for parts of a batch (N6).
"""

from .step_programs import Blind, judged

BLIND = Blind("judge23")

NAMED = {
    "cutmix_lambda": "F68",
    "seg_flatten_logits": "F3",
    "seg_joint_augment": "D14",
    "det_grid_assign": "D28",
    "kpt_flip": "D19",
    "audio_specaug": "D13",
    "ctc_charset": "F66",
    "dcgan_fake": "B1",
    "wgan_penalty": "F25",
    "vae_elbo": "F40",
    "ddpm_loss": "F23",
    "realnvp_masks": "S40",
    "simclr_views": "F27",
    "masked_patches": "D21",
    "triplet_mining": "F99",
    "distill_kl": "F3",
    "espcn_upscale": "F30",
    "video_frame_labels": "D29",
    "vit_encoder": "S21",
    "finetune_head": "S3",
    "checkpoint_prefix": "S51",
    "multilabel_loss": "F3",
    "housing_amp": "N7",
    "churn_dropout": "S11",
    "load_gru": "N9",
    "tcn_nextstep": "F11",
    "wave_transformer": "S23",
    "graph_collate": "D22",
    "cartpole_dqn": "F56",
    "thermostat_reinforce": "F96",
    "dock_a2c": "F21",
    "two_tower": "F37",
    "pinn_reaction": "F25",
    "cox_survival": "F69",
    "multitask_heads": "N2",
    "sensor_vae": "F40",
    "bayes_regression": "F40",
    "arm_mdn": "F95",
    "jet_sets": "F34",
    "bilstm_tagger": "F30",
    "pointnet_ema": "N28",
    "rollout_control": "S38",
}
UNSEEN = {
    "ridge_awr": "returns that were summed up before training, across the ends of episodes",
    "proto_episodes": "what makes classes alike is hidden below what makes rows differ",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 30 and len(BLIND.faults) == 44


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
