"""Twenty-two programs of an author who had not seen the checks, from all fields, after the rules of judge20.

The first sight of them is in judge21_first_sight.json: 18 of 22 named first, nothing wrong, nothing said of the twins.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge21")

NAMED = {
    "defect_segmentation_background_ignored": "F98",
    "student_distillation_kl_input": "F3",
    "demand_quantiles_pinball": "F85",
    "ctr_model_double_sigmoid": "F3",
    "box_localiser_iou_format": "F86",
    "phoneme_ctc_blank": "F66",
    "house_price_mlp_shapes": "F21",
    "advection_diffusion_pinn_graph": "F25",
    "movie_factorisation_start": "B7",
    "digit_finetune_half_weights": "N4",
    "sensor_vae_sampling": "F22",
    "sine_maml_fast_weights": "F1",
    "hinge_gan_feature_freeze": "S42",
    "molecule_graphs_collate": "D22",
    "simsiam_embedding_collapse": "F57",
    "categorical_pooling_shared_tables": "S30",
    "graph_transformer_padding_mask": "F34",
    "organ_segmentation_flip": "D14",
    "signal_diffusion_noise_seed": "D20",
    "face_attributes_accumulation": "N2",
}
UNSEEN = {
    "sensor_imputation_transformer": "the loss is written by hand, so its rows are not known",
    "corridor_dqn_sync": "the weights are copied in the fifteenth step, and ten are watched",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 18 and len(BLIND.faults) == 22
    assert not any(p["of the twin"] for p in record["programs"].values())


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
