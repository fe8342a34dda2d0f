"""Writing into bf16: what survives, that stochastic rounding is unbiased, that Kahan loses nothing, and the moments."""

import pytest
import torch
from torch import nn

from lessons import bf16_adamw
from lessons.pitfalls import autocast, byte_model, loss_scaling, optimizers, precision


@pytest.mark.parametrize("value", [1.0, 1.5, -0.02, 300.0])
def test_what_survives_is_what_the_format_says(value):
    up = torch.nextafter(torch.tensor(abs(value)).bfloat16(), torch.tensor(torch.inf, dtype=torch.bfloat16))
    gap = float(up) - float(torch.tensor(abs(value)).bfloat16())
    assert bf16_adamw.survives(value, 0.51 * gap) and not bf16_adamw.survives(value, 0.24 * gap)
    assert bf16_adamw.survives(value, 1e-4 * value, torch.float32)


def test_below_a_power_of_two_the_numbers_stand_twice_as_close():
    assert bf16_adamw.survives(1.0, -0.003) and not bf16_adamw.survives(1.0, 0.003)


def test_stochastic_rounding_is_exact_on_average_and_keeps_what_is_exact():
    exact = torch.full((200_000,), 1.0 + 2**-10)  # an eighth of the way to the next bf16 number
    got = bf16_adamw.stochastically(exact)
    assert got.dtype == torch.bfloat16 and set(got.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert abs(float(got.double().mean()) - float(exact[0])) < 4 * 2**-7 * (0.125 * 0.875 / len(exact)) ** 0.5
    whole = torch.randn(1000).bfloat16()
    assert torch.equal(bf16_adamw.stochastically(whole.float()), whole)
    assert torch.equal(bf16_adamw.stochastically(-exact).sign(), -torch.ones(len(exact)))


@pytest.mark.parametrize(("way", "arrives"), [("nearest", False), ("kahan", True), ("stochastic", True)])
def test_a_thousand_small_steps_arrive_or_do_not(way, arrives):
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = bf16_adamw.BF16AdamW([p], lr=1e-4, way=way)
    for _ in range(1000):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert abs(float(p.detach().float().mean()) - (0.9 if arrives else 1.0)) < 0.006


def test_the_update_is_that_of_torch():
    torch.manual_seed(0)
    mine, theirs = (nn.Parameter(torch.zeros(7, 5)) for _ in range(2))
    ours = bf16_adamw.BF16AdamW([mine], lr=1e-2, way="nearest")
    reference = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.0)
    for _ in range(5):
        mine.grad = theirs.grad = torch.randn(7, 5)
        ours.step()
        reference.step()
    torch.testing.assert_close(mine, theirs)


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="way = 'up': allowed are nearest, stochastic, kahan"):
        bf16_adamw.BF16AdamW([nn.Parameter(torch.ones(1))], lr=1.0, way="up")


def test_fp32_moments_alone_do_not_save_bf16_weights():
    assert precision.against_fp32("bf16, nearest")["share of fp32's gain"] < 0.5


@pytest.mark.slow
def test_a_scaler_left_out_of_the_checkpoint_skips_its_first_steps_again():
    assert (
        loss_scaling.resumed_scaler(saved=False)["steps skipped after"]
        > loss_scaling.resumed_scaler(saved=True)["steps skipped after"]
    )


def test_the_number_of_labels_is_told_apart_from_a_norm_that_is_nan():
    line = precision.trainer_logs(byte_model.untrained(), supervised=False)[0]
    assert line["loss"] == 0.0 and line["grad_norm"] == 0.0


def test_inference_mode_fails_where_autograd_saves_and_nowhere_else():
    use, every = autocast.teacher_use, autocast.DOWNSTREAM
    fine = [name for name in every if use(name)["raised"] is None]
    assert fine == ["kl(s, softmax(t / 2))", "t + T", "t.clone() / T", "t.bfloat16() / T"]
    assert all(use(name, mode=torch.no_grad)["raised"] is None for name in every)


def test_the_original_convention_shrinks_with_width_and_the_other_does_not():
    small, large = (
        {a: optimizers.step_size(n, n, adjust=a) for a in ("original", "match_rms_adamw")} for n in (64, 512)
    )
    assert large["original"] < 0.5 * small["original"]
    assert abs(large["match_rms_adamw"] / small["match_rms_adamw"] - 1) < 0.15


def test_two_dimensions_pick_embeddings_heads_and_routers_and_leave_stacked_experts():
    taken = optimizers.wrongly_taken("qwen3_moe", tied=False)
    assert {name.split(".")[-2] for name in taken} == {"embed_tokens", "gate", "lm_head"}
    assert "only supports 2D" in optimizers.stacked_experts()
