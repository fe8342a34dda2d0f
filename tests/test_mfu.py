"""FLOPs: equal to hand formulas, to torch's own counter, counted once; and counting changes no
training.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import peft
import pytest
import torch
from conftest import FP32
from torch.utils.flop_counter import FlopCounterMode

from nblib import compiling, losses, mfu, models, text, train
from nblib.methods import lrc, moe
from nblib.methods.distill import objective
from nblib.methods.muon import groups

B, T, D, V, LAYERS, INNER, KV = 2, 32, 64, 256, 2, 192, 32
N, SCORED = B * T, B * (T - 1)  # tokens, and those that the head sees
ATTENTION = LAYERS * 4 * B * T * T * D  # forward: scores, and their product with the values
LINEAR = {
    "q": (D, D),
    "k": (D, KV),
    "v": (D, KV),
    "o": (D, D),
    "gate": (D, INNER),
    "up": (D, INNER),
}
LINEAR |= {"down": (INNER, D)}
BLOCKS = LAYERS * sum(i * o for i, o in LINEAR.values())


def tiny(**options) -> torch.nn.Module:
    return models.tiny(V, hidden=D, layers=LAYERS, heads=4, **options)


def counted(net: torch.nn.Module, loss=losses.causal_lm) -> mfu.Count:
    ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
    with mfu.Count() as count:
        sum(loss(net, {"input_ids": ids, "labels": ids}).values()).backward()
    return count


def forward(blocks: int = BLOCKS) -> int:
    return 2 * N * blocks + 2 * SCORED * V * D + ATTENTION


def test_a_dense_model_by_hand():
    assert counted(tiny()).new == 3 * forward()


def test_a_mixture_counts_the_experts_that_are_chosen():
    chosen = 2 * 3 * D * D  # two of eight, as wide as the model
    attention = sum(i * o for name, (i, o) in LINEAR.items() if name in "qkvo")
    assert counted(tiny(family="qwen3_moe"), moe.loss()).new == 3 * forward(
        LAYERS * (attention + chosen + D * 8)
    )


def test_a_live_teacher_counts_its_forward_pass():
    loss = objective.from_teacher(models.as_teacher(tiny(seed=1)), ce=0.5)
    assert counted(tiny(), loss).new == 3 * forward() + forward()


def test_frozen_weights_save_their_gradients_and_low_rank_factors_count():
    """LRC: W and the head have no weight gradient, and what stands before the first factors has
    none at all.
    """
    net = tiny()
    lrc.attach(net, percent=15, init="kaiming")
    total = 3 * ATTENTION + 2 * 2 * SCORED * V * D
    for i, o in LAYERS * list(LINEAR.values()):
        r = lrc.rank_of(o, i, 15)
        total += 2 * N * (2 * i * o + 3 * r * (i + o))
    for i, o in (LINEAR[name] for name in "qkv"):  # of the first block: their input has no gradient
        total -= 2 * N * i * (o + lrc.rank_of(o, i, 15))
    assert counted(net).new == total


def test_what_a_checkpoint_computes_again_is_counted_apart():
    plain, checkpointed = counted(tiny()), counted(compiling.checkpoint_blocks(tiny()))
    # the last product of a block: backward does not need its result
    down = LAYERS * 2 * N * INNER * D
    assert checkpointed.new == plain.new
    assert checkpointed.again - plain.again == 2 * N * BLOCKS + ATTENTION - down
    assert plain.again == ATTENTION // 2  # the kernel of attention keeps no scores


def test_the_reentrant_checkpoint_is_counted_apart_too():
    net = tiny()
    if hasattr(net, "activation_checkpointing_enable"):  # transformers 5.23's name
        net.activation_checkpointing_enable({"use_reentrant": True})
    else:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    count = counted(net)
    assert count.new == 3 * forward() and count.again == 2 * N * BLOCKS + ATTENTION + ATTENTION // 2


def test_attention_by_hand_equals_attention_by_kernel():
    eager, kernel = counted(tiny(attn_implementation="eager")), counted(tiny())
    assert (eager.new, eager.again) == (kernel.new, 0)


def test_torch_counts_the_same_where_it_knows_the_operation():
    net, x = (
        torch.nn.Sequential(torch.nn.Conv1d(3, 5, 4), torch.nn.Linear(29, 7)),
        torch.randn(2, 3, 32),
    )
    with FlopCounterMode(display=False) as theirs, mfu.Count() as ours:
        net(x).sum().backward()
    assert ours.new == theirs.get_total_flops() > 0 and ours.again == 0
    # four heads share a key
    q, k = torch.empty(2, 8, 16, 4, device="meta"), torch.empty(2, 2, 24, 4, device="meta")
    op = torch.ops.aten._scaled_dot_product_flash_attention
    assert mfu.of(op.default, (q, k, k), {}, None) == (2 * 2 * 8 * 16 * 24 * (4 + 4), 0)


def test_grouped_products_by_their_shapes():
    rows, stacked, columns = torch.empty(12, 5), torch.empty(3, 5, 7), torch.empty(5, 12)
    offsets = torch.tensor([4, 6, 12], dtype=torch.int32)
    op = torch.ops.aten._grouped_mm.default
    for a, b, product in ((rows, stacked, 12 * 5 * 7), (columns, torch.empty(12, 7), 5 * 12 * 7)):
        assert mfu.of(op, (a, b, offsets), {}, None) == (2 * product, 0)
    assert mfu.of(op, (torch.empty(3, 7, 5), columns, offsets), {}, None) == (2 * 7 * 12 * 5, 0)


class Uncounted(mfu.Speed):
    """The loop as it would be without this module."""

    def counting(self, micro):
        return nullcontext()

    def step(self, micro, spent):
        return {}


def trained(stream, net, **options) -> list[dict]:
    torch.manual_seed(3)
    batches = text.Batches(stream, rows=B, length=T)
    return train.fit(
        net, batches, groups.optimizers(net), total=3, machine=FP32, accumulate=2, **options
    )


def lora() -> torch.nn.Module:
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    return peft.get_peft_model(tiny(), config)


NETS = {
    "dense": tiny,
    "dropout": lora,
    "mixture": lambda: tiny(family="qwen3_moe"),
    "checkpointed": lambda: compiling.checkpoint_blocks(tiny()),
}


@pytest.mark.parametrize("name", NETS)
def test_counting_changes_no_bit_and_draws_no_number(name, stream, monkeypatch):
    mfu.peak.cache_clear()
    ends = []
    for speed in (mfu.Speed, Uncounted):
        monkeypatch.setattr(mfu, "Speed", speed)
        torch.manual_seed(0)
        net = NETS[name]()
        records = trained(stream, net)
        ends.append(
            (
                [(r["loss"], r["grad_norm"]) for r in records],
                torch.get_rng_state(),
                list(net.parameters()),
            )
        )
    (losses_, state, weights), (others, other_state, other_weights) = ends
    assert (
        losses_ == others
        and torch.equal(state, other_state)
        and all(map(torch.equal, weights, other_weights))
    )


@pytest.mark.slow
def test_compiled_blocks_are_compiled_and_counted_in_the_first_step(stream, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain = trained(stream, tiny())
    ends = {}
    for speed in (mfu.Speed, Uncounted):
        torch._dynamo.reset()
        monkeypatch.setattr(mfu, "Speed", speed)
        graphs.clear()
        ends[speed] = (
            trained(stream, compiling.compile_blocks(tiny(), backend=backend)),
            len(graphs),
        )
    (records, compiled), (others, without) = ends.values()
    assert compiled == without > 0 and [r["loss"] for r in records] == [r["loss"] for r in others]
    assert records[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-5)


def test_the_record_has_speed_and_share_of_the_measured_peak(stream, monkeypatch):
    monkeypatch.setattr(mfu, "peak", lambda device, dtype: 1e9)
    records = trained(stream, compiling.checkpoint_blocks(tiny()))
    for record in records:
        assert 0 < record["mfu"] == pytest.approx(record["flop_per_s"] / 1e9)
        assert record["mfu"] < record["hfu"] < 4 / 3 * record["mfu"] * 1.01
        assert not [name for name in record if name.startswith("card_")]
    first, *later = records
    assert first["flop_per_s"] * first["seconds"] == pytest.approx(2 * 3 * forward())
    took = later[-1]["seconds"] - first["seconds"]  # the first step has left the mean
    assert later[-1]["flop_per_s"] * took == pytest.approx(2 * 2 * 3 * forward())
    assert "hfu" in records[0] and "hfu" not in Uncounted(FP32).step([], 1.0)


def test_steps_of_other_lengths_count_by_their_positions():
    speed = mfu.Speed(FP32)
    speed.count.new, speed.positions = 600, 60
    steps = [(60, 2.0), (30, 3.0), (90, 4.0)]  # positions, seconds since the start
    rates = [speed.step([{"labels": torch.zeros(1, n)}], spent)["flop_per_s"] for n, spent in steps]
    assert rates == pytest.approx([600 / 2, 300 / 1, 1200 / 2])


def test_the_peak_is_measured_once_and_is_that_of_a_product():
    mfu.peak.cache_clear()
    state = torch.get_rng_state()
    peak = mfu.peak(torch.device("cpu"), torch.float32)
    assert 1e8 < peak < 1e15 and peak == mfu.peak(torch.device("cpu"), torch.float32)
    assert torch.equal(state, torch.get_rng_state()) and mfu.peak.cache_info().misses == 1


def test_the_card_is_asked_by_another_thread(monkeypatch):
    asked = []
    answers = {"device_memory_used": 3 * 2**30, "utilization": 97, "power_draw": 350_000}
    for name, answer in answers.items():
        call = lambda device, answer=answer: asked.append(mfu.threading.current_thread()) or answer  # noqa: E731
        monkeypatch.setattr(torch.cuda, name, call)
    monkeypatch.setattr(mfu, "peak", lambda device, dtype: 1e9)
    speed = mfu.Speed(SimpleNamespace(device=torch.device("cuda:0"), dtype=torch.bfloat16))
    speed.count.new, speed.positions = 600, 60
    micro = [{"labels": torch.zeros(1, 60)}]
    speed.step(micro, 1.0)
    for thread in mfu.threading.enumerate():
        if thread is not mfu.threading.current_thread() and thread.name.endswith("(_read_card)"):
            thread.join(10)
    facts = speed.step(micro, 2.0)
    assert facts["card_gib"] == 3.0 and facts["card_busy"] == 0.97 and facts["card_watts"] == 350.0
    # and not again within a second
    assert len(asked) == 3 and mfu.threading.main_thread() not in asked


def test_the_figures_come_from_nvidia_ml_py(monkeypatch):
    """torch reads them by the module that nvidia-ml-py brings; here a card is put beneath that."""
    import pynvml

    answers = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByIndex": "card",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5 * 2**30),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=42),
        "nvmlDeviceGetPowerUsage": 611_700,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: 0)
    speed = mfu.Speed(SimpleNamespace(device=torch.device("cuda:0"), dtype=torch.bfloat16))
    speed._read_card()
    assert speed.card == {"card_gib": 5.0, "card_busy": 0.42, "card_watts": 611.7}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here")
def test_without_a_card_nothing_is_said_of_one():
    speed = mfu.Speed(SimpleNamespace(device=torch.device("cuda:0"), dtype=torch.bfloat16))
    speed._read_card()
    assert speed.card == {}
