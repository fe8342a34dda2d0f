"""Models: seeded, quiet, reachable by path, refused in one sentence; 4-bit is real bitsandbytes."""

import pytest
import torch

from nblib import compiling, losses, models


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


@pytest.mark.parametrize("family", models.FAMILIES)
def test_checkpointed_blocks_give_the_same_bits(family):
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.randint(64, (2, 16))
    found = {}
    for name, prepare in {"plain": lambda m: m, "checkpointed": compiling.checkpoint_blocks}.items():
        model = prepare(models.tiny(64, family=family, hidden=32, layers=2, heads=2)).train()
        torch.manual_seed(0)
        with FlopCounterMode(display=False) as flops:
            losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"].backward()
        found[name] = flops.get_total_flops(), [p.grad for p in model.parameters()]
    assert found["checkpointed"][0] > found["plain"][0]  # it does recompute
    assert all(torch.equal(a, b) for a, b in zip(found["plain"][1], found["checkpointed"][1]))


@pytest.mark.slow
def test_compiled_blocks_keep_names_and_gradients():
    ids = torch.randint(64, (2, 16))
    plain, compiled = (models.tiny(64, hidden=32, layers=2, heads=2) for _ in range(2))
    compiling.compile_blocks(compiled, backend="aot_eager")
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    for model in (plain, compiled):
        losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"].backward()
    for a, b in zip(plain.parameters(), compiled.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_breaks_are_found_with_their_line():
    def broken(x):
        if x.sum().item() > 0:
            return x + 1
        return x - 1

    report = compiling.breaks(broken, torch.ones(3))
    assert report["breaks"] >= 1 and any(f"{__file__}:" in w["line"] for w in report["where"])
    assert compiling.breaks(lambda x: x * 2, torch.ones(3)) == {"graphs": 1, "breaks": 0, "where": []}
