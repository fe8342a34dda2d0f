"""Choices come with reasons; what this machine cannot do is refused."""

import json
import random

import numpy
import pytest
import torch

from nblib import memory, runtime


def test_auto_choices_are_explained():
    machine = runtime.pick()
    assert machine.precision in runtime.PRECISIONS and str(machine.device) in machine.reason
    assert ("cuda" in str(machine.device)) == torch.cuda.is_available()


@pytest.mark.parametrize("wrong", [dict(device="tpu"), dict(precision="int8")])
def test_unknown_choices_list_the_allowed(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"{name} = '{value}': allowed are auto, "):
        runtime.pick(**wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_refused():
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        runtime.pick("cuda")


@pytest.mark.parametrize("precision", ["auto", "fp16", "fp32"])
def test_a_card_takes_tf32_for_what_stays_fp32_unless_fp32_is_asked_for(precision, monkeypatch):
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    matmul.allow_tf32 = precision == "fp32"  # the opposite
    runtime.native_precision.cache_clear()
    try:
        with monkeypatch.context() as card:
            for name, answer in dict(
                is_available=True, device_count=1, get_device_capability=(8, 0)
            ).items():
                card.setattr(torch.cuda, name, lambda answer=answer: answer)
            reason = runtime.pick("cuda", precision).reason
        assert matmul.allow_tf32 == ("TF32" in reason) == (precision != "fp32")
        torch.get_float32_matmul_precision()  # inductor asks; after torch's new switch this raises
        assert "TF32" not in runtime.pick("cpu").reason
        assert matmul.allow_tf32 == (precision != "fp32")  # a CPU leaves the switch alone
        assert torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")  # that of the CPU
    finally:
        matmul.allow_tf32 = before
        runtime.native_precision.cache_clear()


def test_seed_reaches_every_generator():
    drawn = []
    for _ in range(2):
        runtime.seed_all(3)
        drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(1))))
    assert drawn[0] == drawn[1]


def test_seeded_draws_the_same_and_leaves_every_generator_where_it_was():
    def draws() -> tuple:
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))

    runtime.seed_all(7)
    expected = [draws() for _ in range(2)]
    runtime.seed_all(7)
    got = [draws()]
    inside = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), runtime.seeded(3):
            inside.append(draws())
            raise KeyboardInterrupt
    got.append(draws())
    assert got == expected and inside[0] == inside[1] and inside[0] not in expected


def test_environment_is_json_and_complete():
    facts = runtime.environment(runtime.pick())
    assert json.loads(json.dumps(facts)) == facts
    assert (
        facts["packages"]["torch"] == torch.__version__
        and facts["reason"]
        and facts["cpu_threads"] >= 1
    )


def test_autocast_lowers_products_only_when_asked():
    a = torch.randn(4, 4)
    for precision, dtype in runtime.PRECISIONS.items():
        with runtime.pick("cpu", precision).autocast():
            assert (a @ a).dtype == dtype


def test_peak_sees_what_was_freed_and_not_what_was_there():
    there = torch.ones(64 * 2**20 // 4)
    with memory.peak() as peak:
        gone = torch.ones(256 * 2**20 // 4)
        del gone
    print(f"256 MiB allocated and freed: measured {peak.bytes / 2**20:.0f} MiB ({peak.source})")
    assert 0.95 * 256 < peak.bytes / 2**20 < 1.1 * 256
    with memory.peak() as small:
        pass
    with pytest.raises(FileNotFoundError, match="nowhere"), memory.peak():
        open("/nowhere")
    assert small.bytes < 2**23 and there.numel()
