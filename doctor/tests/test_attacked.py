"""Healthy programs that were written to be wrongly blamed: nothing is said of them, but of those below."""

import random

import pytest
import torch

import train_doctor as doctor

from . import attacked

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


@pytest.mark.parametrize("program", attacked.ALL, ids=lambda program: program.__name__)
def test_nothing_is_said_of_a_healthy_program(program):
    torch.manual_seed(0)
    attacked.np.random.seed(0)
    random.seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with doctor.watch(say=False, steps=10) as report:
            program()
    finally:
        torch.set_num_threads(threads)
    said = {f.check for f in report.findings if f.severity != doctor.NOTE}
    assert not report.faults and said == STILL.get(program.__name__, (set(), ""))[0], f"\n{report}"


def test_the_exceptions_are_among_them():
    assert len(attacked.ALL) == 182 and set(STILL) <= {program.__name__ for program in attacked.ALL}
