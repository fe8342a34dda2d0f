"""Forty-four programs of two more authors who had not seen the checks, with the question of judge28.

The first sight of them is in judge31_first_sight.json, after what judge30 led to: 33 of 44 named first, nothing wrong;
of one twin something true.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge31")

NAMED = {
    "fundus_grading": "D16",
    "road_tiles": "D14",
    "cell_segments": "F3",
    "clip_motion": "D14",
    "letters_ctc": "F66",
    "tone_commands": "S21",
    "keyword_specs": "D13",
    "event_tagger": "F45",
    "glyph_gan": "D35",
    "shape_vae": "F40",
    "spot_ddpm": "F23",
    "moons_flow": "S40",
    "pixel_net": "F33",
    "caption_clip": "D11",
    "siamese_views": "F57",
    "compact_student": "S12",
    "xray_transfer": "S51",
    "flower_finetune": "S3",
    "scene_audio": "N9",
    "mean_teacher": "N29",
    "churn_mlp": "N9",
    "load_forecast": "F50",
    "demand_quantiles": "F85",
    "traffic_seq2seq": "F33",
    "event_rnn": "S25",
    "molecule_gnn": "D22",
    "citation_gcn": "N16",
    "balance_dqn": "F56",
    "reach_ppo": "D11",
    "pointmass_sac": "F22",
    "ratings_mf": "F21",
    "session_rec": "F11",
    "poisson_pinn": "F25",
    "cox_net": "F69",
    "sine_maml": "N28",
    "shop_tasks": "N2",
    "shapes_pointnet": "F30",
    "sensor_dae": "D13",
    "proxy_metric": "S3",
    "bayes_mlp": "F40",
    "spiral_node": "F123",
    "box_regressor": "F86",
}
UNSEEN = {
    "pose_points": "one pair of key points may change sides rightly, as a head and a tail do",
    "claims_table": "the codes were given to each shard before torch saw them",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 33 and len(BLIND.faults) == 44


tests = judged(BLIND, NAMED, UNSEEN, {"reach_ppo": {"B6"}})
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
