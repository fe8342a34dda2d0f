"""Forty-four programs of two authors who had not seen the checks: pictures and generators, and all other fields.

The first sight of them is in judge22_first_sight.json: 36 of 44 named first, nothing wrong of them. Of the twins one
true warning (of ten updates all are clipped), and a wrong one: a small memory drew the same states again with new
actions, which D24 took for states that stand still.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge22")

NAMED = {
    "cls_double_softmax": "F3",
    "cls_sorted_loader": "F20",
    "vit_batch_first": "S21",
    "age_broadcast": "F21",
    "aug_cutout_inplace": "D13",
    "seg_flip_mask": "D14",
    "seg_view_logits": "F3",
    "det_hflip_boxes": "F86",
    "det_heatmap_xy": "D28",
    "audio_ctc_blank": "F66",
    "audio_last_frame": "S25",
    "audio_lambda_lr": "N9",
    "simsiam_stopgrad": "F57",
    "gan_detached_fake": "B1",
    "vae_kl_scale": "F40",
    "ddpm_broadcast": "F21",
    "siamese_label": "F74",
    "distill_kldiv": "F3",
    "transfer_prefix": "S51",
    "transfer_head_optim": "S3",
    "mean_teacher_ema": "N29",
    "house_price": "F21",
    "credit_default": "F45",
    "claims_frequency": "F3",
    "sensor_lstm": "S21",
    "eeg_conv": "F30",
    "demand_forecast": "F85",
    "load_forecast": "N9",
    "gcn_nodes": "S24",
    "particle_graph": "S43",
    "dqn_corridor": "F56",
    "ddpg_point_mass": "N28",
    "ppo_navigation": "F35",
    "sac_control": "F22",
    "actor_critic_cues": "F96",
    "implicit_mf": "F20",
    "pinn_growth": "F25",
    "cox_deepsurv": "F69",
    "hetero_gaussian": "F91",
    "maml_sine": "N28",
    "multitask_net": "S19",
    "trajectory_transformer": "F34",
    "series_decoder": "F11",
}
UNSEEN = {"simclr_batch_aug": "an augmentation that is drawn once for a batch is no fault elsewhere"}
TRUE = {"ppo_navigation": {"B6"}}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 36 and len(BLIND.faults) == 44


tests = judged(BLIND, NAMED, UNSEEN, TRUE)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
