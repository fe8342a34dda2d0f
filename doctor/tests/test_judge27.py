"""Forty-four programs of two more authors who had not seen the checks: pictures and generators, and all other fields.

Each author first wrote down sixty faults of these fields and then drew 22 of them at random, so that the set holds more
than what is best known. The first sight of them is in judge27_first_sight.json: 25 of 44 named first, nothing wrong,
nothing said of a twin.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge27")

NAMED = {
    "gcn_undirected_edges": "D45",
    "audio_power_spectrogram": "D42",
    "ctc_input_lengths": "F110",
    "seg_mask_resize": "F36",
    "seg_hard_dice": "F2",
    "accumulation_zero_grad": "N2",
    "keypoint_flip": "D19",
    "mixup_permutation": "F68",
    "manual_label_smoothing": "F20",
    "frozen_backbone_bn": "N12",
    "distill_kl_input": "F3",
    "simclr_self_similarity": "F46",
    "clip_unnormalized": "F115",
    "simsiam_stop_gradient": "F57",
    "realnvp_masks": "S40",
    "image_flow_logdet": "F82",
    "dcgan_detach": "N1",
    "fraud_detection_weights": "F45",
    "pointnet_finetune_head": "S3",
    "lstm_forecast_hidden": "S28",
    "activity_conv1d_layout": "F30",
    "tcn_next_value": "F11",
    "quantile_demand_forecast": "F85",
    "sales_gru_target_scale": "F42",
    "event_gru_last_step": "S25",
    "packed_lstm_sorting": "D11",
    "graph_classifier_collate": "D22",
    "gcn_functional_dropout": "S24",
    "reinforce_returns": "F96",
    "ddpg_soft_update": "F28",
    "pinn_heat_equation": "F25",
    "pinn_oscillator_activation": "F32",
    "multitask_shared_bottom": "B1",
}
UNSEEN = {
    "audio_cmvn_axis": "a normalisation may go over any axis",
    "detection_background_index": "labels begin at 0 in most programs",
    "cutmix_lam": "in none of the three steps that are looked at anything was mixed",
    "triplet_order": "the pictures of a kind are hardly nearer, number by number, than others",
    "ddpm_single_timestep": "one strength of noise for a batch is slower, and right",
    "ddpm_target": "what a sampler does with an answer is seen in no step",
    "house_price_categories": "numbers of a column may have an order",
    "ctr_target_encoding": "features that were made before training",
    "sage_hub_graph": "sums over neighbours are right elsewhere",
    "dqn_target_network": "Q-learning without a target network is a method",
    "pinn_poisson_boundary": "the weights of two terms are a choice",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 25 and len(BLIND.faults) == 44


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
