"""Forty-four more programs outside language models, by the question of judge36 and two more authors who had not seen
the checks.

The first sight of them is in judge38_first_sight.json, of the state after judge36 and judge37 were mended: 35 of 44
named first, the effect of two more; nothing wrong, nothing said of a twin.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge38")

NAMED = {
    "texture_cnn": "F3",
    "housing_mlp": "F21",
    "cell_segmenter": "S33",
    "scene_tagger": "F20",
    "distil_student": "F3",
    "stroke_vae": "F40",
    "signature_siamese": "F20",
    "anchor_focal": "F80",
    "load_forecaster": "F91",
    "grid_dqn": "F39",
    "ring_gan": "F65",
    "flower_transfer": "S3",
    "demand_experts": "S20",
    "pedestrian_head": "B7",
    "twin_tower": "N3",
    "movie_factors": "N4",
    "urban_sound": "S18",
    "molecule_gnn": "N24",
    "gesture_gru": "B7",
    "spiral_diffusion": "B7",
    "patch_vit": "S19",
    "simsiam_target_gradient": "F57",
    "distill_teacher_mode": "F6",
    "gru_sequence_axis": "S21",
    "mil_attention_axis": "S33",
    "segmentation_logit_layout": "F3",
    "audio_padding_mask": "F34",
    "multitask_heads_list": "S30",
    "recsys_embedding_lookup": "S54",
    "ema_model_statistics": "N29",
    "vqvae_codebook_loss": "B1",
    "dqn_target_network": "N28",
    "gan_generator_grads": "N1",
    "amp_clip_order": "N7",
    "forecast_scheduler_unit": "N9",
    "gnn_accumulation_scale": "N6",
    "transfer_group_rates": "N39",
    "field_grid_upsampling": "S3",
    "tabular_bf16_weights": "N4",
    "triplet_distance_sqrt": "N35",
    "diffusion_noise_seed": "D20",
    "detection_flip_boxes": "D19",
    "keyword_loader_order": "D27",
}
UNSEEN = {
    "digit_ctc": "a batch has as many rows as frames, so nothing tells the two apart",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 35 and len(BLIND.faults) == 44


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
