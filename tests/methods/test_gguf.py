"""What leaves as GGUF is the same model but for scales of eleven bits, and it opens with its own
package alone.
"""

import sys

import pytest
import torch
import transformers as tf

from nblib import models, text
from nblib.methods import lrc
from nblib.methods.lrc import gguf as lrc_gguf
from nblib.methods.lrc import ternary

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'nblib[gguf]'")


def corrected(family="qwen3", config=None, hidden=256, **options):
    if family == "qwen2":  # with biases
        shape = dict(vocab_size=300, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4)
        model = tf.AutoModelForCausalLM.from_config(
            tf.Qwen2Config(**shape, num_key_value_heads=2, **config)
        )
    else:
        model = models.tiny(300, hidden=hidden, layers=2, heads=4, family=family, **(config or {}))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    lrc.attach(model, **(dict(rank=6) | options))
    return model.eval()


WIDE = {"intermediate_size": 512}


@pytest.mark.parametrize(
    "family, config, options",
    [
        ("qwen3", WIDE, {}),
        ("qwen3", WIDE, dict(scale="rows", bits=8)),
        ("qwen3", WIDE | {"tie_word_embeddings": False}, dict(joint=True)),
        ("qwen2", WIDE, dict(rounds=1)),
    ],
    ids=str,
)
@torch.no_grad()
def test_the_model_comes_back_but_for_its_scales(family, config, options, tmp_path):
    model, ids = corrected(family, config, **options), torch.randint(300, (4, 24))
    again, expected = (
        lrc_gguf.read(lrc_gguf.save(model, tmp_path / "out"), model.config),
        lrc_gguf.rounded(model),
    )
    theirs = expected.state_dict()
    assert again.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.state_dict().items())
    assert torch.equal(again(ids).logits, expected(ids).logits)
    for name, layer in lrc.layers(model).items():
        weight = ternary.ternary(layer.weight, layer.scale) if layer.joint else layer.weight
        stored = again.get_submodule(name).weight
        assert torch.equal(stored.sign(), weight.sign())
        assert ((stored - weight).abs() <= weight.abs() * 2**-11).all()
    assert (again(ids).logits - model(ids).logits).norm() < 0.05 * model(ids).logits.norm()


def test_transformers_reads_the_ternary_part(tmp_path):
    """A reader that is not ours: the names, the shape and the order of the weights are those of the
    format.
    """
    model = corrected(config=WIDE)
    folder = lrc_gguf.save(
        model, tmp_path / "out", tokenizer=text.train_tokenizer(["a b c ab bc"] * 9, vocab_size=290)
    )
    theirs = tf.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=lrc_gguf.MODEL, config=model.config
    )
    for name, layer in lrc.layers(lrc_gguf.rounded(model)).items():
        assert torch.equal(theirs.get_submodule(name).weight.float(), layer.weight)


def test_the_weights_take_two_bits_and_a_sixteenth(tmp_path):
    model = corrected(config=WIDE)
    folder = lrc_gguf.save(model, tmp_path / "out")
    tensors = gguf.GGUFReader(folder / "model.gguf").tensors
    kinds = {t.name: (t.tensor_type.name, t.n_bytes, t.n_elements) for t in tensors}
    packed = [each for each in kinds.values() if each[0] == "TQ2_0"]
    assert len(packed) == len(lrc.layers(model))
    assert all(8 * size / weights == 2 + 16 / lrc_gguf.BLOCK for _, size, weights in packed)
    assert not any("lora" in name for name in kinds)
    adapter = {t.name: t for t in gguf.GGUFReader(folder / "adapter.gguf").tensors}
    assert len(adapter) == 2 * len(packed) and {name[:-7] for name in adapter} <= kinds.keys()


def test_what_cannot_leave_ends_in_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match="rows of 128 weights, and TQ2_0 holds multiples of 256 alone"
    ):
        lrc_gguf.save(corrected(hidden=128), tmp_path / "out")
    with pytest.raises(ValueError, match="model_type = 'llama': to GGUF can go qwen2, qwen3"):
        lrc_gguf.save(corrected("llama", WIDE), tmp_path / "out")
    with pytest.raises(ValueError, match="no LRC layers: attach first"):
        lrc_gguf.save(models.tiny(64, hidden=32, layers=1), tmp_path / "out")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="gguf is not installed; pip install 'nblib\\[gguf\\]'"):
        lrc_gguf.save(corrected(config=WIDE), tmp_path / "out")
    assert not list(tmp_path.iterdir())
