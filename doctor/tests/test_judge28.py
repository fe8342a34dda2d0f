"""Forty-four programs of two more authors who had not seen the checks: pictures, sound and generators, and all other
fields. They were asked for what a working engineer meets, neither for what is commonest nor for what is rare.

The first sight of them is in judge28_first_sight.json: 30 of 44 named first, and of one more the effect; nothing wrong,
nothing said of a twin.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge28")

NAMED = {
    "img_thumbs": "F30",
    "img_recipe": "N9",
    "img_holdout": "N16",
    "det_grid": "F41",
    "det_wide": "D41",
    "seg_resize": "F36",
    "seg_void": "D39",
    "kp_flip": "D19",
    "kp_heat": "D40",
    "aud_ctc": "F66",
    "aud_rate": "S25",
    "aud_pitch": "F21",
    "gen_wgan": "F25",
    "gen_vae": "F22",
    "gen_ddpm": "F23",
    "ssl_views": "F27",
    "ssl_patches": "D21",
    "kd_cache": "F103",
    "kd_prob": "F3",
    "ft_head": "S3",
    "ft_freeze": "S18",
    "house_price_mlp": "F21",
    "credit_finetune": "S3",
    "load_forecast_window_norm": "D37",
    "demand_quantiles": "F85",
    "sensor_gru_regressor": "S25",
    "tcn_next_step": "F11",
    "molecule_gnn": "D22",
    "dqn_point_reacher": "F39",
    "reinforce_balance": "F96",
    "ddpg_servo": "N38",
    "implicit_ncf": "D38",
    "two_tower_retrieval": "D27",
    "forced_relaxation_pinn": "F25",
    "deepsurv_cox": "F69",
    "discrete_hazard_net": "D36",
    "sine_maml": "N28",
    "uncertainty_multitask": "F58",
    "pointnet_shapes": "F30",
    "ellipsoid_axes_net": "D13",
    "pump_autoencoder": "F20",
    "vibration_denoising_ae": "F73",
    "ft_prefix": "S51",
    "irregular_neural_ode": "F123",
}
UNSEEN = {
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 30 and len(BLIND.faults) == 44


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
