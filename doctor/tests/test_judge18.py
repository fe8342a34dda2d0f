"""Sixteen programs whose author had not seen the checks, and was told to leave out what earlier sets have: no bug here
is one of theirs, or it is told in another way.

The first sight of them is in judge18_first_sight.json: 5 of 16 named first, nothing said of the others and the twins.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge18")

NAMED = {
    "mask_resize_bilinear": "F36",
    "unfreeze_attribute": "S18",
    "mil_attention_axis": "S33",
    "teacher_buffers": "N29",
    "multi_site_gradients": "N2",
    "chamfer_same_side": "F92",
    "ntxent_pair_index": "F94",
    "inpaint_positions": "S19",
    "vq_straight_through": "F93",
    "wavenet_padding": "F11",
    "centernet_xy_swap": "D28",
    "cutmix_area_weight": "F68",
}
UNSEEN = {
    "item_vectors_from_pretrained": "from_pretrained freezes, and often that is meant",
    "two_stream_norm": "two inputs of one network share a normalisation on purpose as well",
    "gnn_edge_direction": "the direction of an edge stands nowhere",
    "target_encoding": "the leak was made before training",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 5 and len(BLIND.faults) == 16
    assert not any(p["of the twin"] for p in record["programs"].values())


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
