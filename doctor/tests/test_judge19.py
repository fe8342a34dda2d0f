"""Sixteen programs more of the kind of judge18: the author was told which bugs earlier sets have, and to choose others.

The first sight of them is in judge19_first_sight.json: 5 of 16 named first. Of one the first finding was wrong, and so
was that of its twin (S8 took layers that round their own weights for packed ones).
"""

from .step_programs import Blind, judged

BLIND = Blind("judge19")

NAMED = {
    "mdn_mixture_logits": "F95",
    "distill_student_temperature": "F72",
    "reinforce_return_direction": "F96",
    "vae_posterior_noise": "F43",
    "qat_rounding_gradient": "B7",
    "pinn_activation_curvature": "F32",
    "warmup_first_group_only": "N24",
    "realnvp_same_half": "S40",
    "mmoe_gate_axis": "S33",
    "gru_state_after_padding": "S25",
    "forecaster_mask_offset": "F11",
    "dqn_observation_not_advanced": "D24",
    "maml_outer_on_support": "D25",
}
UNSEEN = {
    "weibull_censoring_flag": "which of two flags says that a death was seen stands nowhere",
    "reservoir_recent_only": "a memory that holds the newest alone is one that people want as well",
}
EFFECT = {"ddpg_actor_replay_action": "B1"}  # that the actor gets no gradient is true, and no_grad is not why


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED | EFFECT, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 5 and len(BLIND.faults) == 16


tests = judged(BLIND, NAMED | EFFECT, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
