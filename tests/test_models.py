"""Models: seeded, quiet, reachable by path, refused in one sentence; 4-bit is real bitsandbytes."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from nblib import compiling, losses, models, runtime, train, wiring
from nblib.methods import ard, lrc


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
        with pytest.raises(
            FileNotFoundError, match="First reason given: Unrecognized model"
        ) as caught:
            load(str(tmp_path))
        assert "\n" not in str(caught.value)


def test_unknown_family_lists_the_known():
    with pytest.raises(ValueError, match="family = 'qwen9': allowed are qwen3"):
        models.tiny(64, family="qwen9")


def _adapted(kind: str) -> nn.Module:
    """A model whose base is frozen, and what trains beside it."""
    torch.manual_seed(3)
    model = models.tiny(256, hidden=64, layers=2, heads=2)
    if kind == "LoRA":
        return get_peft_model(
            model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        )
    if kind == "ARD":
        return ard.attach(model, rank=4, alpha=4.0)
    lrc.attach(
        model, init="kaiming", joint=kind == "LRC, joint", bits=8 if kind == "LRC, 8 bits" else 0
    )
    return model


def _steps(model: nn.Module) -> list[float]:
    machine = runtime.Machine(torch.device("cpu"), "bf16", "a choice")
    ids = torch.arange(4 * 64).view(4, 64) * 7 % 256
    with runtime.seeded(1):
        batches = iter([{"input_ids": ids, "labels": ids}] * 3)
        return [
            r["loss"]
            for r in train.fit(
                model, batches, train.adamw(model, lr=1e-2), total=3, machine=machine
            )
        ]


@pytest.mark.parametrize("kind", ["LoRA", "ARD", "LRC", "LRC, joint", "LRC, 8 bits"])
def test_a_held_base_trains_to_the_same_bits(kind):
    model, held = _adapted(kind), models.hold(_adapted(kind), torch.bfloat16)
    low = {name for name, p in held.named_parameters() if p.dtype == torch.bfloat16}
    assert len(low) == (0 if kind == "LRC, joint" else 2 * 7)
    assert not low & set(wiring.trainable(held)) and not any(
        "norm" in name or "embed" in name for name in low
    )
    assert held.get_input_embeddings().weight is held.get_output_embeddings().weight
    assert _steps(held) == _steps(model)
    for name, p in wiring.trainable(model).items():
        assert torch.equal(p, held.get_parameter(name)), name
    assert {
        tensor.dtype for tensor in held.state_dict().values() if tensor.is_floating_point()
    } == {torch.float32}


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_held_teacher_answers_as_before_and_in_fp32_outside_autocast(family):
    teacher = models.as_teacher(models.tiny(128, family=family, hidden=32, layers=2, heads=2))
    held, ids = (
        models.as_teacher(copy.deepcopy(teacher), torch.bfloat16),
        torch.arange(64).view(2, 32),
    )
    rounded = copy.deepcopy(teacher)
    rounded.load_state_dict(held.state_dict())
    with torch.no_grad():
        apart = (held(ids).logits - rounded(ids).logits).abs().max()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, before = held(ids).logits, teacher(ids).logits
    if family in ("qwen3_moe", "mixtral"):
        assert 0 < apart < 0.05  # on a CPU their products are in the dtype of their weights
        torch.testing.assert_close(logits, before, rtol=0.05, atol=0.05)
    else:
        assert apart == 0 and torch.equal(logits, before)


def test_on_a_cpu_nothing_is_held_unless_a_dtype_is_asked_for(tiny):
    machine = runtime.pick("cpu", "bf16")
    teacher = models.as_teacher(tiny, machine.frozen_dtype)
    assert {p.dtype for p in teacher.parameters()} == {torch.float32}
    assert all(type(m) is not models.HeldLinear for m in teacher.modules())
    assert runtime.Machine(torch.device("cuda"), "fp16", "a choice").frozen_dtype == torch.float16


def test_what_is_saved_of_a_held_model_is_fp32(tmp_path):
    model, held = _adapted("LRC"), models.hold(_adapted("LRC"), torch.bfloat16)
    sizes = [lrc.save(m, tmp_path / name) for m, name in ((model, "free"), (held, "held"))]
    free, kept = (load_file(tmp_path / name / lrc.WEIGHTS) for name in ("free", "held"))
    assert {n: t.dtype for n, t in kept.items()} == {n: t.dtype for n, t in free.items()} and sizes[
        0
    ] == sizes[1]
    ids = torch.arange(64).view(2, 32)
    assert torch.equal(lrc.load(tmp_path / "held")(ids).logits, held.eval()(ids).logits)
    teacher = models.as_teacher(models.tiny(128, hidden=32, layers=2, heads=2), torch.bfloat16)
    teacher.save_pretrained(tmp_path / "teacher")
    stored = load_file(tmp_path / "teacher" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32}
    assert models.load_config(str(tmp_path / "teacher")).dtype == torch.float32


def test_held_blocks_are_compiled_once_for_all():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model = models.as_teacher(models.tiny(64, hidden=32, layers=4, heads=2), torch.bfloat16)
    torch._dynamo.reset()
    compiling.compile_blocks(model, backend=backend, fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        model(torch.arange(32).view(1, 32))
    torch._dynamo.reset()
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "capability, compute",
    [((8, 0), torch.bfloat16), ((7, 5), torch.float16), (None, torch.float32)],
)
def test_four_bits_are_multiplied_in_the_precision_of_the_device(capability, compute, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        models, "_reach", lambda load, name, **options: asked.update(options) or nn.Linear(1, 1)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    runtime.native_precision.cache_clear()
    models.load("a name", four_bit=True, device="cuda:0" if capability else "cpu")
    runtime.native_precision.cache_clear()
    assert (
        asked["quantization_config"].bnb_4bit_compute_dtype == compute
        and asked["dtype"] == torch.float32
    )
