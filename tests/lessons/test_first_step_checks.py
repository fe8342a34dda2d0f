"""Examining: what alarms in a healthy first step, a loss beside its readings, and updates that
arrive or do not.
"""

import pytest
import torch

from lessons import first_step_checks, programs
from nblib import doctor


def test_a_warm_up_moves_nothing_in_its_first_step_and_has_all_gradients():
    facts = first_step_checks.first_step(programs.warm_up_from_zero())
    assert facts["unmoved"] == facts["of tensors"] and facts["without gradient"] == 0


def test_a_fresh_lora_has_zero_gradients_in_one_factor_of_each_pair():
    facts = first_step_checks.first_step(programs.second_factor_zero())
    assert 2 * facts["without gradient"] == facts["of"]


def test_adapters_cut_off_leave_a_gradient_to_the_head_alone():
    program = programs.adapters_cut_off()
    programs.train(program, 1)
    assert first_step_checks.with_gradient(program) == 1


def test_the_picture_names_the_reading_nearest_to_the_loss():
    said = first_step_checks.fingerprint({"a": 1.0, "b": 2.0, "c": 3.0}, 2.1).summary
    assert "'b'" in said and "'a'" not in said


def test_all_of_an_update_arrives_in_fp32_and_little_of_a_small_one_in_bf16():
    torch.manual_seed(0)
    assert first_step_checks.arriving("fp32", 1e-5, 2) == pytest.approx(1, abs=1e-4)
    assert first_step_checks.arriving("bf16", 1e-6, 2) < 0.2
    assert first_step_checks.arriving("bf16, stochastic rounding", 1e-5, 2) == pytest.approx(
        1, abs=0.2
    )


def test_a_report_is_counted_by_roots():
    program = programs.labels_shifted_twice()
    with doctor.watch(program.model, optimizer=program.optimizer, say=False, steps=3) as report:
        programs.train(program, 3)
    row = first_step_checks.folded(report)
    assert (
        row["findings"] == 2
        and row["roots"] == 1
        and row["root"].startswith("F17")
        and row["folded"] == "F3"
    )
