"""Healthy programs that were written to be wrongly blamed: nothing is said of them, but of those below."""

import random

import pytest
import torch

import train_doctor as doctor

from . import attacked, attacked_mixed_up, attacked_turned

STILL = {  # what is said of it, and why
    "weight_spectral_norm_lora": (
        {"S4"},
        "a part that is called while the model is made is taken for a model of its own",
    ),
    "cross_entropy_method_unlikelihood": ({"F71"}, "a divergence keeps what is pushed down from falling for ever"),
    "triplet_linear_with_l2": ({"F70"}, "the squares of the embeddings, which are added, are its floor"),
    "random_feature_mmd": ({"S3", "S32"}, "a layer is made anew on purpose"),
    "capsules_xifeng": ({"F30"}, "channels are cut, as published"),
    "nilm_masked_whole_watts": ({"D9", "F42"}, "true: thousands of watts go in and are asked for, unscaled"),
}


VIEWS = "two cameras or domains differ more than two kinds"
STILL_TURNED = {
    "f74_time_contrastive_network": ({"F74"}, VIEWS),
    "f74_cross_domain_triplet": ({"F74"}, VIEWS),
    "f74_siamese_view_invariance_faces": ({"F74"}, VIEWS),
    "f75_universal_perturbation": ({"F75"}, "the input of a frozen network is what learns"),
    "f75_manual_gradient_ascent": ({"F75"}, "the step is made by hand, up the gradient"),
    "f75_negated_gradients_maximise": ({"F71"}, "the gradients are negated by hand"),
    "f76_cost_critics_pessimistic_max": ({"F76"}, "of costs the larger one is the cautious one"),
    "f76_dual_clip_cost_lagrange": ({"F63"}, "of costs that are policed the log-probabilities should fall"),
    "f76_ppo_critic_warmup": ({"B7"}, "true: the policy's loss has the weight 0"),
    "f77_transformed_distribution": ({"S3"}, "true: the critic is in no optimizer"),
    "f80_transmittance_depth": ({"F80"}, "a depth is minus the logarithm of what comes through"),
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
    "portfolio_tracks_index": ({"S33"}, "rows are the assets of one portfolio"),
}
ALL = {program.__name__: (program, STILL) for program in attacked.ALL}
ALL |= {name: (program, STILL_TURNED) for name, program in attacked_turned.PROGRAMS.items()}
ALL |= {name: (program, STILL_MIXED_UP) for name, program in attacked_mixed_up.PROGRAMS.items()}


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
    assert len(attacked_mixed_up.PROGRAMS) == 63 and {*STILL, *STILL_TURNED, *STILL_MIXED_UP} <= set(ALL)
