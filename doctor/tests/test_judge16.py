"""Twenty-two programs with bugs that people often make, no two of a kind, by somebody who had not seen
the checks.

The first sight of them is in judge16_first_sight.json: 22 of 22 named first; beside one of them, and on its twin, a
wrong warning of a draw that was made once and kept (D20), which was mended.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge16")

NAMED = {
    "softmax_before_cross_entropy": "F3",
    "kl_div_gets_probabilities": "F3",
    "cosine_embedding_zero_labels": "F20",
    "box_loss_over_background_cells": "F41",
    "gan_generator_step_on_detached_fake": "B1",
    "hidden_layers_in_python_list": "S19",
    "head_replaced_after_optimizer": "S3",
    "constant_weight_init": "S20",
    "segmentation_view_instead_of_permute": "F3",
    "lstm_without_batch_first": "S21",
    "task_heads_share_one_module": "S30",
    "eval_mode_never_left": "N16",
    "actor_critic_advantage_not_detached": "F29",
    "dqn_target_without_done_mask": "F56",
    "vae_mean_reconstruction_summed_kl": "F40",
    "pinn_derivative_without_create_graph": "F25",
    "maml_query_loss_with_unadapted_weights": "N28",
    "neighbour_sum_by_indexed_plus_equals": "F31",
    "zero_grad_never_called": "N1",
    "epoch_scheduler_stepped_per_batch": "N9",
    "flip_image_but_not_mask": "D14",
    "squared_error_broadcasts": "F21",
}
UNSEEN: dict[str, str] = {}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 22 and len(BLIND.faults) == 22
    twins = [n for n, p in record["programs"].items() if p["of the twin"]]
    assert twins == ["actor_critic_advantage_not_detached"]


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
