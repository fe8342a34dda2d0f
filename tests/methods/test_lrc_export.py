"""What leaves as BitNet and LoRA is the same model in stock transformers and PEFT."""

import json

import peft
import pytest
import torch
import transformers as tf

from nblib import models, text
from nblib.methods import lrc
from nblib.methods.lrc import export


def corrected(family="qwen3", config=None, **options):
    model = models.tiny(512, hidden=64, layers=2, family=family, **(config or {}))
    for name, p in model.named_parameters():
        if name.endswith("bias"):  # they start at zero, where a wrong scale of them would not show
            torch.nn.init.normal_(p)
    lrc.attach(model, **options)
    return model.eval()


@pytest.fixture(autouse=True)
def eager():
    """The stock layer compiles its rounding, which takes longer than all the rest."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def opened(folder):
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    return peft.PeftModel.from_pretrained(model, folder / export.ADAPTER).eval()


@pytest.mark.parametrize(
    "family, config, options",
    [
        ("qwen3", {}, {}),
        ("qwen3", {}, dict(bits=4)),
        ("qwen3", {}, dict(joint=True)),
        ("qwen3", {"intermediate_size": 150}, dict(scale="mean")),  # rows that four do not divide
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("llama", {"tie_word_embeddings": False}, dict(rounds=1)),
        ("qwen3_moe", {}, {}),
    ],
    ids=str,
)
def test_the_logits_are_those_of_the_model(family, config, options, tmp_path):
    """Their products are added up in another order, so now and then an activation falls on the
    other side of the middle between two of its 255 levels. That moves its row from there on by a
    part of a level, and no other row.
    """
    model, ids = corrected(family, config, **options), torch.randint(512, (32, 32))
    theirs = opened(export.save(model, tmp_path / "out"))
    with torch.no_grad():
        logits = model(ids).logits
        off = (theirs(ids).logits - logits).abs().amax(-1)  # (rows, tokens)
        with theirs.disable_adapter():
            without = (theirs(ids).logits - logits).abs().amax(-1)
    assert off.median() < 1e-6 and off.max() < 1e-2
    assert (off.amax(1) < 1e-4).float().mean() > 0.7
    assert without.median() > 1e-2  # the correction is in the adapter alone


def test_the_weights_take_two_bits_on_disk_and_the_folder_says_what_it_is(tmp_path):
    model, tokenizer = corrected(), text.train_tokenizer(["a b c"] * 9, vocab_size=300)
    folder = export.save(model, tmp_path / "out", tokenizer=tokenizer)
    layers = tuple(lrc.layers(model))
    other = sum(p.nbytes for name, p in model.named_parameters() if not name.startswith(layers))
    ternary = sum(layer.weight.numel() for layer in lrc.layers(model).values())
    header = 16_384
    assert (
        (folder / "model.safetensors").stat().st_size
        < ternary // 4 + other + header
        < ternary + other
    )
    assert (
        json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
        == "bitnet"
    )
    assert models.load_tokenizer(str(folder)).get_vocab() == tokenizer.get_vocab()
    assert peft.PeftConfig.from_pretrained(folder / export.ADAPTER).base_model_name_or_path == str(
        folder
    )


def test_what_transformers_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="c_attn is a Conv1D in transformers"):
        export.save(corrected("gpt2"), tmp_path / "out")
    with pytest.raises(ValueError, match="a scale for each row, and BitNet one for each layer"):
        export.save(corrected(scale="rows"), tmp_path / "out")
    with pytest.raises(ValueError, match="no LRC layers: attach first"):
        export.save(models.tiny(64, hidden=32, layers=1), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_but_for_the_rounding_of_inputs_every_logit_is_the_same(tmp_path, monkeypatch):
    """Where neither side rounds its inputs, nothing can fall on another side: the weights, scales,
    biases and factors are the same.
    """
    from transformers.integrations import bitnet

    model, ids = corrected("llama", {"attention_bias": True}), torch.randint(512, (32, 32))
    theirs = opened(export.save(model, tmp_path / "out"))
    monkeypatch.setattr(bitnet.ActQuant, "apply", lambda x: x)
    for layer in lrc.layers(model).values():
        layer.once = lambda x: x
    with torch.no_grad():
        assert (theirs(ids).logits - model(ids).logits).abs().max() < 1e-4


def test_the_folder_never_loads_as_a_model_of_random_weights(tmp_path):
    """All its tensors are taken and none is new; without them there is no model."""
    folder = export.save(corrected(), tmp_path / "out")
    _, report = tf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        tf.AutoModelForCausalLM.from_pretrained(folder)
