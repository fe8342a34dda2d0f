"""Healthy programs that were written to be wrongly blamed: nothing is said of them, but of those below."""

import random

import pytest
import torch

import train_doctor as doctor

from . import (
    attacked,
    attacked_again,
    attacked_columns,
    attacked_copies,
    attacked_decoders,
    attacked_ends,
    attacked_films,
    attacked_given,
    attacked_labels,
    attacked_left_out,
    attacked_loads,
    attacked_meetings,
    attacked_mixed_up,
    attacked_moves,
    attacked_pairs,
    attacked_panels,
    attacked_passes,
    attacked_picks,
    attacked_plain,
    attacked_prepared,
    attacked_rows,
    attacked_shares,
    attacked_steps,
    attacked_turned,
    attacked_twos,
    attacked_words,
)

STILL = {  # what is said of it, and why
    "weight_spectral_norm_lora": (
        {"S4"},
        "a part that is called while the model is made is taken for a model of its own",
    ),
    "cross_entropy_method_unlikelihood": ({"F71"}, "a divergence keeps what is pushed down from falling for ever"),
    "triplet_linear_with_l2": ({"F70"}, "the squares of the embeddings, which are added, are its floor"),
    "random_feature_mmd": ({"S3", "S32"}, "a layer is made anew on purpose"),
    "capsules_xifeng": ({"F30"}, "channels are cut, as published"),
    "nilm_masked_whole_watts": ({"D9", "F42", "B9"}, "true: thousands of watts go in and are asked for, unscaled"),
}


VIEWS = "two cameras or domains differ more than two kinds"
STILL_TURNED = {
    "f74_time_contrastive_network": ({"F74"}, VIEWS),
    "f74_cross_domain_triplet": ({"F74"}, VIEWS),
    "f74_siamese_view_invariance_faces": ({"F74"}, VIEWS),
    "f75_universal_perturbation": ({"F75"}, "the input of a frozen network is what learns"),
    "f75_manual_gradient_ascent": ({"F75"}, "the step is made by hand, up the gradient"),
    "f76_cost_critics_pessimistic_max": ({"F76"}, "of costs the larger one is the cautious one"),
    "f76_dual_clip_cost_lagrange": ({"F63"}, "of costs that are policed the log-probabilities should fall"),
    "f76_ppo_critic_warmup": ({"B7"}, "true: the policy's loss has the weight 0"),
    "f77_transformed_distribution": ({"S3"}, "true: the critic is in no optimizer"),
}
FEATURES = "true: features that nothing trains are called with gradients on"
STILL_MIXED_UP = {
    "perceptual_not_in_optimizer": ({"F8", "F60"}, FEATURES + "; and pictures are drawn by rand"),
    "perceptual_alone_unfrozen": ({"F8"}, FEATURES),
    "koopman_two_backwards": ({"F81"}, "the other way to the features is in another backward"),
    "loss_on_a_random_subset": ({"D21"}, "what is narrow can't copy its input"),
    "gain_before_noise": ({"F82"}, "a gain has its price in a rate"),
    "segments_and_their_slope": ({"F86"}, "ends of segments are no boxes"),
    "anchored_to_distilling_teacher": ({"N36"}, "an old network may teach and hold back at once"),
    "elastic_averaging_foreach": ({"N36"}, "the centre moves by a function of whole lists"),
    "adapted_for_the_next_batch": ({"N28"}, "what is adapted is used in the next step"),
}
HARD = "hard pairs are chosen for being unlike their kind"
TABLE = "the same sizes in another order are chance"
STILL_AGAIN = {
    "style_with_topic_controlled_negatives": ({"F74"}, HARD),
    "speakers_who_say_the_same_phrase": ({"F74"}, HARD),
    "generator_of_adversarial_perturbations": ({"F75"}, "a frozen network is to be wrong, by weights that learn"),
    "walker_that_gets_far": ({"F75"}, "where it began is to be left"),
    "unlearning_by_ascent": ({"F75"}, "true: answers are driven from their targets, on purpose"),
    "distances_to_goals_twin_max": ({"F76"}, "of distances the larger one is the cautious one"),
    "sac_of_arms_with_joint_ranges": ({"F77"}, "the draw is lost where columns are put together anew"),
    "deepwalk_in_batch_softmax": ({"F78"}, "a start node is drawn, and the other side of the loss is not followed"),
    "wgan_of_one_jet_at_a_time": ({"F79"}, "the batch is one row of the critic"),
    "parcels_on_a_slanting_belt": ({"D19"}, "what lies across goes along with what lies down"),
    "distance_of_parked_cars": ({"D19"}, "a size goes along with a side"),
    "charges_shared_among_atoms": ({"S33"}, "rows are the atoms of one molecule"),
    "residual_gradient_deterministic": ({"F81"}, "Baird's residual gradient has both sides on purpose"),
    "coded_aperture_of_one_camera": ({"D20"}, "the mask belongs to the camera"),
    "fixed_pattern_noise_of_a_sensor": ({"D20"}, "the pattern belongs to the sensor"),
    "bagged_autoencoder": ({"D21"}, "what is narrow can't copy its input"),
    "lipschitz_bound_of_logarithms": ({"F82"}, "a small price of scales"),
    "log_normal_prior_of_a_spread": ({"F82"}, "that prior has this sign"),
    "diffusion_gan": ({"F84"}, "nothing is sampled from noise"),
    "test_time_adaptation_with_restoration": (
        {"N36", "S24"},
        "as above; and a dropout is the augmentation",
    ),
    "exceedance_of_energy_yields": ({"F85"}, "what is exceeded with 90 % is the low one"),
    "reynolds_stress_of_tracks": ({"F86"}, "ends of tracks are no boxes"),
    "energy_of_compatible_pairs": ({"F87"}, "an energy is low for data"),
    "anomaly_score_with_signs_of_deep_sad": ({"F87"}, "1 stands for normal, and the score for not"),
    "sequences_with_padding_and_sampled_negatives": ({"F87"}, "the flags are a mask, and negatives have another call"),
    "forward_kl_to_a_known_density": ({"F88"}, "a divergence is never below 0"),
    "mean_absolute_error_under_noisy_labels": ({"F88"}, "true: the loss is flat, as meant"),
    "shortest_paths_by_their_dual": ({"F90"}, "the 1 is the length of a step"),
    "age_in_completed_years": ({"D17"}, "completed years are meant"),
    "whole_stars": ({"D17"}, "rounding down is meant"),
    "heights_of_buildings": ({"D18"}, "0 is the ground"),
    "pyramidal_lstm": ({"F30"}, TABLE),
    "subpixel_upsampling_in_time": ({"F30"}, TABLE),
    "autoencoder_of_jittered_series": ({"F73"}, "what is narrow can't copy its input"),
    "updates_for_the_log": ({"N28"}, "products for a log that is not yet due"),
    "directions_of_mean_words": ({"S25"}, "only the direction of the mean counts"),
}
STILL_MEETINGS = {
    "spectrum_of_peaks": ({"F95"}, "areas of lines are no shares"),
    "intensity_of_arrivals": ({"F95"}, "an intensity has its integral in the loss"),
    "gaussian_classes_with_free_priors": ({"F95"}, "what all classes share cancels out in another softmax"),
    "returns_and_scores_in_one_loop_backwards": ({"F96"}, "log_prob is asked from the last action to the first"),
    "tags_of_first_pieces": ({"F98"}, "0 stands for later pieces of a word"),
    "masked_residues_of_proteins": ({"F98"}, "an alphabet of 20 is as small as a set of tags"),
    "relevance_scaled_to_one": ({"F99"}, "no number is below 0, and 0 is meant"),
    "block_triangular_transport": ({"S40"}, "one half is normal already"),
    "stochastic_gains_under_wind": ({"S40"}, "a controller with exponentials of its own"),
    "gradients_alike_in_all_domains": ({"D25"}, "a difference of gradients is taken for a step"),
    "one_class_on_each_client": ({"D27", "F20"}, "a client has one class; true of F20"),
    "a_new_class_without_forgetting": ({"D27"}, "a session has one class"),
    "gradual_unfreezing": ({"S41"}, "the table is thawed last"),
    "levels_from_coarse_to_fine": ({"B7"}, "levels are switched on later"),
    "heads_of_data_sets_in_turn": ({"B7"}, "their turn has not come in ten steps"),
    "exponential_decay_over_the_whole_run": ({"N9"}, "the whole run has forty steps"),
    "both_ways_each_causal": ({"F11"}, "the first answer of that shape is the other way's"),
    "wave_that_runs_to_the_left": ({"F11"}, "places, not times"),
    "autoencoder_with_log_spread": ({"F43"}, "the square of the spread is a product in the divergence"),
    "centiles_from_the_top": ({"F85"}, "the list falls"),
    "names_of_variables": ({"F91"}, "var is short for variable"),
    "clusters_and_their_numbers": ({"F92"}, "one minimum for its value and one for its place"),
    "speeds_from_places": ({"F93"}, "the difference is used by itself as well"),
    "offsets_that_stay_small": ({"F93"}, "true: the sum is the other tensor"),
    "pairs_encoded_in_two_chunks": ({"F94"}, "the halves are chunks of a batch of neighbours"),
    "recycling": ({"S38"}, "as published"),
    "pushforward_trick": ({"S38"}, "as published"),
    "squeezed_fields": ({"S39"}, "as published"),
    "items_among_entities": ({"D23"}, "the items are the first rows of a larger table"),
    "wasserstein_dependency": ({"N38"}, "both raise one difference"),
}
PLACES = "whose points have names of their own stands nowhere"
STILL_SHARES = {
    "greedy_player_learns_as_it_acts": ({"F39"}, "the action is the one that the maximum is of"),
    "flow_of_a_still_camera": ({"D18", "F41"}, "0 is the answer where nothing moves"),
    "forces_at_the_feet": ({"F41"}, "0 is the answer without a contact"),
    "premultiplied_sprites": ({"F41"}, "0 is the colour of nothing"),
    "snapshots_at_the_low_points": ({"N9"}, "the rate comes back on purpose"),
    "tips_of_the_fingers": ({"D19"}, PLACES),
    "cattle_from_the_side": ({"D19"}, PLACES),
    "corners_of_a_page_by_its_text": ({"D19"}, PLACES),
    "student_of_cosines": ({"D20"}, "fixed anchors look like draws"),
    "probability_squared_in_an_escort": ({"F80"}, "shares of an escort distribution"),
    "draws_of_dropout_beside_patches": ({"D29", "S24"}, "of two sorts of pieces; the dropout has no training="),
}
STILL_LEFT_OUT = {
    "noise_unconditional_flow": ({"F106"}, "true: without the time on purpose, where many pixels tell it"),
    "swings_that_end_by_the_clock": ({"F56"}, "an end by the clock is left out on purpose"),
    "gains_in_front_of_a_quantiser": ({"F82"}, "a gain has its price in a rate"),
    "teacher_of_the_last_few_steps": ({"F28"}, "a short memory is meant"),
    "what_is_to_be_forgotten_moves_the_body_alone": ({"N1"}, "two losses that pull apart, and both are meant"),
}
STILL_GIVEN = {
    "pumps_on_duty_and_standby": ({"D31"}, "scaled, a pump that is off looks like a code"),
    "costs_that_rise_with_the_grade": ({"F45"}, "costs that are as large as the counts would have them, by chance"),
    "matrix_game_with_recurrent_agents": ({"B7"}, "true: in one step nothing learns what to make of a state"),
    "wells_of_two_dyes": ({"D18"}, "0 and 0 is a true pair, and lies where places do"),
    "some_rows_have_no_class": ({"F104"}, "the data are written as the drop for guidance is"),
    "negative_margin_for_few_shots": ({"F90"}, "a margin below 0 that is written as a plus, as published"),
}
STILL_FILMS = {
    "energy_of_a_band_is_linear_in_the_powers": ({"D42"}, "a linear network of powers is that formula"),
    "powers_of_sources_are_unmixed": ({"D9"}, "powers add, and are large"),
    "loud_frames_alone_where_there_are_any": ({"D42"}, "true of these frames"),
    "pieces_of_one_photograph_matched_as_a_whole": ({"D14"}, "all pieces are compared with all"),
    "mouths_are_followed_through_a_film": ({"D14"}, "each frame is cut where the mouth is"),
    "spread_within_groups_of_a_batch": ({"F30"}, "any rows make a group"),
    "median_of_the_means_of_blocks": ({"F30"}, "any rows make a block"),
    "rows_in_ghost_batches": ({"F30"}, "any rows make a ghost batch"),
    "each_term_of_an_equation_takes_its_own_slope": ({"F117"}, "true: it is taken twice, for nothing"),
    "equation_in_the_scaled_variable": ({"F118"}, "its source is written with the factor inside"),
    "environment_in_torchscript": ({"F24"}, "what is compiled is not seen"),
    "pendulum_that_never_ends": ({"F56"}, "limits of time are left out on purpose"),
    "policy_evaluated_by_its_states": ({"F56"}, "its flags are actions, as fractions"),
    "absorbing_state_after_each_end": ({"D36", "F56"}, "true: nothing reads the flags, on purpose"),
    "own_average_of_answers_as_a_target": ({"F56"}, "an average is written like a discount"),
    "days_without_a_sale_are_zero": ({"D18"}, "NaN stood for 0"),
    "surfaces_that_tell_where_they_are": ({"D36"}, "true: nothing reads the mask, the values tell it"),
    "points_that_tell_whether_they_are_seen": ({"D36"}, "true: nothing reads the flags, the values tell them"),
    "sums_of_sets_filled_up_with_zeros": ({"D36"}, "true: nothing reads the lengths, and zeros add nothing"),
    "classes_take_turns_and_two_views": ({"D38"}, "classes that take turns look like pieces"),
    "five_ways_with_five_views_each": ({"D38"}, "sorted classes look like pieces"),
    "one_lead_of_two_from_the_other": ({"D37"}, "both leads are near to nothing where they meet"),
}
UNSEEN = "what is done out of sight comes back without an order"
ACTS = "actions that one layer reads beside those of a log look like a generator's"
STILL_ROWS = {
    "ensemble_by_vmap_on_shuffled_rows": ({"D11"}, UNSEEN),
    "per_row_answers_by_vmap": ({"D11"}, UNSEEN),
    "pictures_of_a_subclass_in_a_new_order": ({"D11"}, UNSEEN),
    "augmented_by_a_pool_of_threads": ({"D11"}, UNSEEN),
    "oracle_asked_in_the_order_of_the_round": ({"D11"}, UNSEEN),
    "augmented_by_a_scripted_function": ({"D11"}, UNSEEN),
    "shuffled_minibatches_of_values_kept_in_their_order": ({"D11"}, UNSEEN),
    "speech_noise_and_rooms_drawn_apart": ({"D11"}, "three pools of one length that are mixed on purpose"),
    "film_attention_with_rotary_frames": ({"F120"}, "one of two attentions has the other axis"),
    "axial_scores_of_rows_and_columns": ({"F120"}, "half of the scores has the other axis"),
    "no_checkpoint_yet": ({"S51"}, "true: nothing was loaded, on the first run"),
    "weights_broadcast_to_one_worker": ({"S51"}, "one worker is given its own weights"),
    "new_decoder_in_place_of_the_masked_one": ({"S51"}, "the new part is built like the one that is left out"),
}
STILL_ENDS = {
    "router_decides_from_the_question_alone": ({"F122"}, "the question ends where it is read"),
    "sparse_signals_are_found_from_a_few_measurements": ({"S24"}, "a dropout that makes data"),
    "frozen_layer_was_made_under_inference_mode": ({"S24"}, "a dropout that makes data"),
    "target_network_with_dropout_is_copied_now_and_then": ({"S12"}, "it is not copied in ten steps"),
    "unlabelled_rows_get_labels_by_draws_of_a_frozen_network": ({"F6"}, "its dropout is woken on purpose"),
    "odds_of_the_clinic_are_brought_to_those_of_the_country": ({"F45"}, "weights that are near the odds by chance"),
    "head_of_a_fine_tuned_model_is_kept_for_new_domains": ({"S22"}, "trained, and spread as when it was drawn"),
    "loaded_head_is_not_the_one_that_is_used": ({"S22"}, "true of that head, and another one is used"),
    "new_controller_may_only_open_the_valves": ({"D35"}, ACTS),
    "log_is_of_a_gentle_driver": ({"D35"}, ACTS),
    "exploration_reaches_beyond_the_ends_of_the_actor": ({"D35"}, ACTS),
    "a_shared_layer_reads_values_and_their_gates": ({"D35"}, "gates that a layer of data reads as well"),
    "answers_are_laid_into_soft_bins": ({"F21"}, "as many bins as rows"),
    "one_score_against_sixteen_cuts": ({"F21"}, "as many cuts as rows"),
}
STILL_PREPARED = {
    "protected_attribute_is_kept_for_the_audit": ({"D36"}, "true: nothing reads it, on purpose"),
    "age_alone_of_faces_with_two_labels": ({"D36"}, "true: nothing reads it, on purpose"),
    "timeouts_do_not_end_a_continuing_task": ({"D36", "F56"}, "true: nothing reads them, on purpose"),
    "tour_costs_below_what_the_critic_feared": ({"F63"}, "the check says: unless what comes are costs"),
    "rain_and_how_much_of_it": ({"F41", "D18"}, "0 is the amount where there is none"),
    "flow_of_what_moves_before_a_still_camera": ({"F41"}, "0 is the answer where nothing moves"),
    "storms_in_a_window_of_fixed_length": ({"S25"}, "zeros at the end may be measured"),
}
STILL_LOADS = {
    "timm_epoch_scheduler": ({"S52"}, "a scheduler of one's own whose name does not say so"),
    "rl_stacked_actions": ({"S21"}, "steps of time that are stacked look like rows"),
    "odd_things": ({"S21", "B7"}, "true: rows first, and a term times 0"),
}
STILL_PLAIN = {
    "random_convolution_in_front_of_the_policy": ({"N12"}, "a frozen layer that is drawn anew moves"),
    "first_order_maml_on_one_model": ({"N3"}, "weights that are put back again and again, for each task"),
    "prompts_are_tuned_for_one_picture_at_a_time": ({"N3"}, "the same, for each picture"),
    "unlearning_by_ascent_plain": ({"F75"}, "a loss that is to grow, on purpose"),
    "distillation_that_seeks_one_mode": ({"F20"}, "the reverse divergence, on purpose, as the text says"),
    "spectra_of_known_minerals": ({"N39"}, "the pretrained layer is the last one"),
    "the_last_steps_of_a_cosine": ({"N5"}, "true of these steps: the rate is next to nothing"),
    "loss_scale_that_comes_down_from_2_to_the_32": ({"B5"}, "a scaler of one's own"),
    "a_barrier_and_a_search_along_the_line": ({"N17"}, "losses of steps that are tried, without a layer"),
    "watermark_and_its_detector_help_each_other": ({"F65"}, "two networks that want the same, on purpose"),
}
STILL_PICKS = {
    "replies_to_a_first_move": ({"F130"}, "a first move that is given looks like any answer"),
}
STILL_WORDS = {
    "masked_model_with_a_mask_vector_and_ignored_labels": ({"F33"}, "masked after the lookup, by a vector"),
    "language_token_after_the_source": ({"F127"}, "a mark and a language: the same as a mask that is one too long"),
    "nowcast_with_a_ragged_edge": ({"S25"}, "the last place asks, and what is missing looks like padding"),
    "test_time_training_starts_anew_for_each_picture": ({"N3"}, "weights that are put back for each picture"),
    "noisy_copy_beside_a_permuted_one": ({"F74"}, "names of one letter"),
    "knowledge_is_unlearned_by_ascent": ({"F75"}, "a loss that is to grow, on purpose"),
    "reverse_divergence_of_a_student": ({"F20"}, "the reverse divergence, on purpose, as the text says"),
    "product_of_experts_against_a_bias": ({"D46"}, "log-odds of a frozen model, added on purpose"),
    "margin_mse_of_a_ranker": ({"D46"}, "margins of two models that are as large, and that never were one"),
    "several_dropouts_of_each_row": ({"S43"}, "rows that are repeated and averaged look like messages"),
    "adapter_for_the_next_task_waits": ({"S16"}, "an adapter that was made early"),
}
ALL = {program.__name__: (program, STILL) for program in attacked.ALL}
ALL |= {name: (program, STILL_TURNED) for name, program in attacked_turned.PROGRAMS.items()}
ALL |= {name: (program, STILL_MIXED_UP) for name, program in attacked_mixed_up.PROGRAMS.items()}
ALL |= {name + "_again" * (name in ALL): (p, STILL_AGAIN) for name, p in attacked_again.PROGRAMS.items()}
ALL |= {name + "_meets" * (name in ALL): (p, STILL_MEETINGS) for name, p in attacked_meetings.PROGRAMS.items()}
ALL |= {name + "_shares" * (name in ALL): (p, STILL_SHARES) for name, p in attacked_shares.PROGRAMS.items()}
ALL |= {name + "_left_out" * (name in ALL): (p, STILL_LEFT_OUT) for name, p in attacked_left_out.PROGRAMS.items()}
ALL |= {name + "_given" * (name in ALL): (p, STILL_GIVEN) for name, p in attacked_given.PROGRAMS.items()}
ALL |= {name + "_films" * (name in ALL): (p, STILL_FILMS) for name, p in attacked_films.PROGRAMS.items()}
ALL |= {name + "_prepared" * (name in ALL): (p, STILL_PREPARED) for name, p in attacked_prepared.PROGRAMS.items()}
ALL |= {name + "_rows" * (name in ALL): (p, STILL_ROWS) for name, p in attacked_rows.PROGRAMS.items()}
ALL |= {name + "_ends" * (name in ALL): (p, STILL_ENDS) for name, p in attacked_ends.PROGRAMS.items()}

ALL |= {name + "_loads" * (name in ALL): (p, STILL_LOADS) for name, p in attacked_loads.PROGRAMS.items()}
ALL |= {name + "_plain" * (name in ALL): (p, STILL_PLAIN) for name, p in attacked_plain.PROGRAMS.items()}
ALL |= {name + "_words" * (name in ALL): (p, STILL_WORDS) for name, p in attacked_words.PROGRAMS.items()}
ALL |= {name + "_labels" * (name in ALL): (p, {}) for name, p in attacked_labels.PROGRAMS.items()}
ALL |= {name + "_picks" * (name in ALL): (p, STILL_PICKS) for name, p in attacked_picks.PROGRAMS.items()}
ALL |= {name + "_steps" * (name in ALL): (p, {}) for name, p in attacked_steps.PROGRAMS.items()}
ALL |= {name + "_decoders" * (name in ALL): (p, {}) for name, p in attacked_decoders.PROGRAMS.items()}
ALL |= {name + "_columns" * (name in ALL): (p, {}) for name, p in attacked_columns.PROGRAMS.items()}
ALL |= {name + "_pairs" * (name in ALL): (p, {}) for name, p in attacked_pairs.PROGRAMS.items()}
ALL |= {name + "_panels" * (name in ALL): (p, {}) for name, p in attacked_panels.PROGRAMS.items()}
ALL |= {name + "_passes" * (name in ALL): (p, {}) for name, p in attacked_passes.PROGRAMS.items()}
ALL |= {name + "_twos" * (name in ALL): (p, {}) for name, p in attacked_twos.PROGRAMS.items()}
ALL |= {name + "_moves" * (name in ALL): (p, {}) for name, p in attacked_moves.PROGRAMS.items()}
ALL |= {name + "_copies" * (name in ALL): (p, {}) for name, p in attacked_copies.PROGRAMS.items()}


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_said_of_a_healthy_program(name):
    torch.manual_seed(0)
    attacked.np.random.seed(0)
    random.seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    program, still = ALL[name]
    try:
        with doctor.watch(say=False, steps=10) as report:
            program()
    finally:
        torch.set_num_threads(threads)
    said = {f.check for f in report.findings if f.severity != doctor.NOTE}
    assert not report.faults and said == still.get(name, (set(), ""))[0], f"\n{report}"


def test_the_exceptions_are_among_them():
    assert len(attacked.ALL) == 182 and len(attacked_turned.PROGRAMS) == 57
    assert len(attacked_mixed_up.PROGRAMS) == 63 and len(attacked_again.PROGRAMS) == 64
    exceptions = {*STILL, *STILL_TURNED, *STILL_MIXED_UP, *STILL_AGAIN, *STILL_MEETINGS, *STILL_SHARES}
    exceptions |= {*STILL_LEFT_OUT, *STILL_GIVEN, *STILL_PREPARED, *STILL_FILMS, *STILL_ROWS, *STILL_ENDS, *STILL_LOADS}
    exceptions |= {*STILL_PLAIN, *STILL_WORDS, *STILL_PICKS}
    assert len(attacked_plain.PROGRAMS) == 53 and len(attacked_words.PROGRAMS) == 56
    assert len(attacked_labels.PROGRAMS) == 20 and len(attacked_picks.PROGRAMS) == 29
    assert len(attacked_steps.PROGRAMS) == 28 and len(attacked_decoders.PROGRAMS) == 15
    assert len(attacked_columns.PROGRAMS) == 13 and len(attacked_pairs.PROGRAMS) == 22
    assert len(attacked_panels.PROGRAMS) == 22 and len(attacked_passes.PROGRAMS) == 20
    assert len(attacked_twos.PROGRAMS) == 25 and len(attacked_moves.PROGRAMS) == 20
    assert len(attacked_copies.PROGRAMS) == 13
    assert len(attacked_meetings.PROGRAMS) == 47 and len(attacked_shares.PROGRAMS) == 70
    assert len(attacked_left_out.PROGRAMS) == 50 and len(attacked_given.PROGRAMS) == 44
    assert len(attacked_prepared.PROGRAMS) == 61 and len(attacked_films.PROGRAMS) == 57
    assert (
        len(attacked_rows.PROGRAMS) == 54 and len(attacked_ends.PROGRAMS) == 59 and len(attacked_loads.PROGRAMS) == 44
    )
    known = 182 + 57 + 63 + 64 + 47 + 70 + 50 + 44 + 61 + 57 + 54 + 59 + 44 + 53 + 56 + 20 + 29 + 28 + 15 + 13
    known += 22 + 22 + 20 + 25 + 20 + 13
    assert len(ALL) == known and exceptions <= set(ALL)
