"""Models: seeded, quiet, reachable by path, refused in one sentence; 4-bit is real bitsandbytes."""

import pytest
import torch

from nblib import losses, models


@pytest.mark.parametrize("family", models.FAMILIES)
def test_tiny_depends_on_its_seed_alone(family):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = models.tiny(64, family=family, hidden=32, layers=2, heads=2)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    two = models.tiny(64, family=family, hidden=32, layers=2, heads=2)
    other = models.tiny(64, family=family, hidden=32, layers=2, heads=2, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))
    assert one.training and all(p.dtype == torch.float32 for p in one.parameters())


def test_default_is_about_four_million_parameters():
    model = models.tiny(4096)
    facts = models.count(model)
    assert type(model).__name__ == "Qwen3ForCausalLM" and 3.5e6 < facts["all"] < 5e6
    assert facts["all"] - facts["outside_embeddings"] == 4096 * 256  # tied, counted once
    assert models.count(models.as_teacher(model))["trainable"] == 0 and not model.training


def test_bf16_files_load_as_fp32_unless_told(tiny, tmp_path):
    tiny.to(torch.bfloat16).save_pretrained(tmp_path)
    assert models.load(str(tmp_path)).dtype == torch.float32
    assert models.load(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_four_bit_base_trains_adapters(tiny, tmp_path):
    from bitsandbytes.nn import Linear4bit
    from peft import LoraConfig, get_peft_model

    models.tiny(128, hidden=64, layers=2, heads=2).save_pretrained(tmp_path)
    model = models.load(str(tmp_path), four_bit=True)
    kinds = [type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert kinds.count(Linear4bit) == 2 * 7
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    ids = torch.randint(128, (2, 16))
    losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"].backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if "lora_B" in n}
    with torch.no_grad():
        losses.causal_lm(model.eval(), {"input_ids": ids, "labels": ids})
    model.train().zero_grad()
    losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"].backward()
    for name, grad in before.items():  # an evaluation in between changes nothing
        torch.testing.assert_close(model.get_parameter(name).grad, grad)


@pytest.mark.parametrize("name", ["/no/such/folder", "nobody/has-this-model"])
def test_an_unreachable_model_is_one_sentence(name):
    for load in (models.load, models.load_config, models.load_tokenizer):
        with pytest.raises(FileNotFoundError, match=f"model '{name}'") as caught:
            load(name)
        assert "\n" not in str(caught.value)


def test_a_folder_whose_config_names_no_model_is_one_sentence_too(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for load in (models.load, models.load_config):
        with pytest.raises(FileNotFoundError, match="First reason given: Unrecognized model") as caught:
            load(str(tmp_path))
        assert "\n" not in str(caught.value)


def test_unknown_family_lists_the_known():
    with pytest.raises(ValueError, match="family = 'qwen9': allowed are qwen3"):
        models.tiny(64, family="qwen9")
