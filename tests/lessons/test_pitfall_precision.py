"""bf16 parameters: the moments alone do not save them; and a log line without labels."""

from lessons.pitfalls import bench, precision


def test_fp32_moments_alone_do_not_save_bf16_weights():
    assert precision.against_fp32("bf16, nearest")["share of fp32's gain"] < 0.5


def test_the_number_of_labels_is_told_apart_from_a_norm_that_is_nan():
    line = precision.trainer_logs(bench.byte_model(), supervised=False)[0]
    assert line["loss"] == 0.0 and line["grad_norm"] == 0.0
