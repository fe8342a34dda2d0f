"""Twenty-two programs of an author who had not seen the checks: tables, series, graphs, agents, equations and others.

The first sight of them is in judge22_first_sight.json: 19 of 22 named first, nothing wrong of them. Of the twins one
true warning (of ten updates all are clipped), and a wrong one: a small memory drew the same states again with new
actions, which D24 took for states that stand still.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge22")

NAMED = {
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
TRUE = {"ppo_navigation": {"B6"}}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, {}, harm=1.15)
    assert record["summary"]["named first"] == 19 and len(BLIND.faults) == 22


tests = judged(BLIND, NAMED, {}, TRUE)
test_the_cause_is_named_first, _, test_nothing_is_said_of_a_twin = tests
