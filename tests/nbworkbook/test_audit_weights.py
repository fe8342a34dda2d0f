"""A healthy file of weights is passed, each damage is named with its tensor, and the numbers are
torch's own.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from experiments import muon_race
from nblib import files
from nbworkbook import audit_weights

SHAPE = dict(hidden=32, layers=4, heads=2, width=16, experts=4, top_k=2)
STACK = "model.layers.1.mlp.experts.down_proj"
ROUTER = "model.layers.2.mlp.gate.weight"
NORM = "model.layers.3.input_layernorm.weight"
MATRIX = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def weights():
    """Of a mixture whose every tensor has moved a little."""
    generator = torch.Generator().manual_seed(0)
    model = muon_race.backbone(64, family="qwen3_moe", **SHAPE)
    return {
        n: p.detach() + 0.01 * torch.randn(p.shape, generator=generator)
        for n, p in model.named_parameters()
    }


def audit(tensors, folder, earlier=None):
    """The findings about these tensors as a file."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    measured = list(audit_weights.measure(folder, earlier))
    return audit_weights.findings(measured)


def test_the_numbers_are_those_of_the_tensors_in_pieces_of_any_size(weights, tmp_path, monkeypatch):
    save_file(weights, tmp_path / "a.safetensors")
    for pieces in (2**24, 64, 1):
        monkeypatch.setattr(audit_weights, "AT_ONCE", pieces)
        for t in audit_weights.measure(tmp_path):
            w = weights[t.name].double()
            assert t.norm == pytest.approx(float(w.norm()), rel=1e-12)
            assert t.size == pytest.approx(float(w.square().mean().sqrt()), rel=1e-12)
            assert (t.zeros, t.bad, t.shape) == (0, 0, tuple(w.shape))
            if t.name in (STACK, ROUTER):
                assert t.rows == pytest.approx(
                    w.flatten(1).square().mean(1).sqrt().tolist(), rel=1e-12
                )


def test_a_healthy_mixture_is_passed(weights, tmp_path):
    assert audit(weights, tmp_path) == []
    assert audit({n: w.bfloat16() for n, w in weights.items()}, tmp_path) == []


def put(name, place, value):
    def damage(weights):
        weights[name][place] = value

    return damage


def scaled(name, times):
    def damage(weights):
        weights[name] *= times

    return damage


def copied(weights):
    weights[STACK][1] = weights[STACK][2]


def as_made(weights):
    weights[NORM][:] = 1


def mostly_zero(weights):
    weights[MATRIX].view(-1)[: weights[MATRIX].numel() * 3 // 4] = 0


@pytest.mark.parametrize(
    "damage, name, words",
    [
        (put(STACK, (3, 0, 0), torch.nan), STACK, "1 of 2,048 entries are nan or infinite"),
        (put(MATRIX, (0, 0), torch.inf), MATRIX, "nan or infinite"),
        (put(STACK, 2, 0), STACK, "expert 2 is all zeros and adds nothing (1 of 4)"),
        (put(ROUTER, 1, 0), ROUTER, "row 1 is all zeros and scores 0 for every token"),
        (lambda w: w[STACK][0].mul_(6), STACK, "expert 0 is"),
        (lambda w: w[STACK][0].mul_(0.1), STACK, "expert 0 is"),
        (lambda w: w[ROUTER][3].mul_(6), ROUTER, "row 3 is"),
        (scaled(MATRIX, 20), MATRIX, "the size of the median of its kind (4 tensors)"),
        (scaled(MATRIX, 0.01), MATRIX, "the size of the median of its kind"),
        (put(MATRIX, ..., 0), MATRIX, "is all zeros, so nothing passes"),
        (mostly_zero, MATRIX, "75% of the entries are zero"),
        (copied, STACK, "experts 2 and 1 have one norm to the last bit"),
        (as_made, NORM, "1 of 17 norms are exactly 1, as they were made"),
    ],
)
def test_one_damage_is_one_finding_with_its_name(damage, name, words, weights, tmp_path):
    mine = {n: w.clone() for n, w in weights.items()}
    damage(mine)
    (said,) = audit(mine, tmp_path)
    assert name in said and words in said
    # what to do stands in the sentence
    assert any(verb in said for verb in ("Go back", "look", "Look", "Unless", "never", "trained"))


def test_norms_that_bf16_holds_are_told_why(weights, tmp_path):
    mine = {n: w.bfloat16() for n, w in weights.items()}
    mine[NORM] = torch.ones_like(mine[NORM])
    (said,) = audit(mine, tmp_path)
    assert "in BF16 a step smaller than half the distance to the next number is lost" in said


def test_experts_in_files_of_their_own_names_are_one_kind(tmp_path):
    """As transformers writes them: one tensor per expert."""
    name = "model.layers.{}.mlp.experts.{}.down_proj.weight"
    generator = torch.Generator().manual_seed(0)
    mine = {
        name.format(i, e): torch.randn(8, 4, generator=generator)
        for i in range(2)
        for e in range(4)
    }
    assert audit(mine, tmp_path) == []
    mine[name.format(1, 3)] *= 30
    (said,) = audit(mine, tmp_path)
    assert name.format(1, 3) in said and "(8 tensors)" in said


def test_vectors_and_layers_of_other_shapes_are_not_judged_as_maps(tmp_path):
    """AdaLoRA switches ranks off in a column; the two layers of a predictor have other sizes by
    their shapes.
    """
    mine = {f"layers.{i}.lora_E": torch.zeros(8, 1) for i in range(4)}
    mine |= {
        f"layers.{i}.predictor.{j}.weight": torch.randn(4, 8 >> j) * (20 if j else 1)
        for i in range(2)
        for j in (0, 2)
    }
    assert audit(mine, tmp_path) == []


def test_what_did_not_change_since_the_checkpoint_before_is_named(weights, tmp_path):
    generator = torch.Generator().manual_seed(1)
    later = {n: w + 0.001 * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    (tmp_path / "before").mkdir()
    save_file(weights, tmp_path / "before" / "model.safetensors")
    assert audit(later, tmp_path / "now", tmp_path / "before") == []
    later[STACK][3] = weights[STACK][3]
    later[NORM] = weights[NORM]
    whole, expert = audit(later, tmp_path / "now", tmp_path / "before")
    assert whole.startswith("1 of") and NORM in whole
    assert f"{STACK}: expert 3 did not change" in expert and "(1 of 4)" in expert


def test_a_file_that_was_cut_is_one_sentence_and_the_others_are_read(weights, tmp_path):
    save_file(weights, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "b.safetensors")
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[: len(whole) // 2])
    said, other = audit_weights.measure(tmp_path)
    assert said.startswith("a.safetensors cannot be read (") and other.name == "b"


def test_a_folder_that_is_not_what_was_written(weights, tmp_path):
    save_file(weights, tmp_path / "model.safetensors")
    files.seal(tmp_path)
    names = {n: "model.safetensors" for n in weights}
    assert audit_weights.integrity(tmp_path) == []
    (tmp_path / audit_weights.LIST).write_text(json.dumps({"weight_map": names}))
    assert audit_weights.integrity(tmp_path) == []
    (tmp_path / audit_weights.LIST).write_text(
        json.dumps({"weight_map": names | {"more": "other.safetensors"}})
    )
    assert "names 1 tensors that are not there, more first" in audit_weights.integrity(tmp_path)[0]
    (tmp_path / audit_weights.LIST).write_text("[]")
    assert "is not a list of tensors" in audit_weights.integrity(tmp_path)[0]
    save_file({n: w + 1 for n, w in weights.items()}, tmp_path / "model.safetensors")
    assert "model.safetensors changed since it was written" in audit_weights.integrity(tmp_path)[0]


def test_no_pickle_is_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"whatever")
    with pytest.raises(ValueError, match="a pickle, which runs code"):
        audit_weights.files_of(tmp_path)


def test_the_states_of_optimizers_are_not_judged(weights, tmp_path):
    """A checkpoint of ours holds them in files beside its weights."""
    states = {"training/optimizers/0/state/0/exp_avg": torch.zeros(4, 4)}
    save_file(states, tmp_path / "training-00001-of-00001.safetensors")
    assert audit(weights, tmp_path) == []
    assert {tensor.name for tensor in audit_weights.measure(tmp_path)} == set(weights)
