"""Muon: its conventions of the rate, and the parameters that are wrongly given to it."""

from lessons.pitfalls import optimizers


def test_the_original_convention_shrinks_with_width_and_the_other_does_not():
    small, large = (
        {a: optimizers.step_size(n, n, adjust=a) for a in ("original", "match_rms_adamw")}
        for n in (64, 512)
    )
    assert large["original"] < 0.5 * small["original"]
    assert abs(large["match_rms_adamw"] / small["match_rms_adamw"] - 1) < 0.15


def test_two_dimensions_pick_embeddings_heads_and_routers_and_leave_stacked_experts():
    taken = optimizers.wrongly_taken("qwen3_moe", tied=False)
    assert {name.split(".")[-2] for name in taken} == {"embed_tokens", "gate", "lm_head"}
    assert "only supports 2D" in optimizers.stacked_experts()
