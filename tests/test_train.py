"""The loop: invariances, parity with the HF Trainer, the guards inside it, ends asked for from
outside.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FP32
from test_guards import InfiniteGradient

from nblib import guards, losses, models, runtime, text, train


def _ragged(rows: int, length: int = 32, vocab: int = 256) -> list[dict]:
    """One-row micro-batches whose supervised lengths differ by an order of magnitude."""
    draw = torch.Generator().manual_seed(7)
    made = []
    for i in range(rows):
        ids = torch.randint(vocab, (1, length), generator=draw)
        labels = ids.clone()
        labels[:, : (i * 5) % (length - 2)] = losses.IGNORED
        made.append({"input_ids": ids, "labels": labels})
    return made


def _joined(rows: list[dict], size: int) -> list[dict]:
    return [
        {k: torch.cat([r[k] for r in rows[i : i + size]]) for k in rows[0]}
        for i in range(0, len(rows), size)
    ]


def _one_step(size: int, rows: list[dict], loss=losses.causal_lm) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one step over the same rows in micro-batches of `size`; SGD at rate 1
    shows the gradient.
    """
    model = models.tiny(256, hidden=32, layers=2, heads=2)
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    micro = _joined(rows, size)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    record = train.fit(
        model, iter(micro), sgd, total=1, accumulate=len(micro), machine=FP32, clip=0, loss=loss
    )[0]
    return record["loss"], before - torch.cat([p.detach().flatten() for p in model.parameters()])


def test_accumulation_is_invariant_on_ragged_lengths():
    rows = _ragged(8)
    loss, gradient = _one_step(8, rows)
    for size in (4, 1):
        other, other_gradient = _one_step(size, rows)
        error = float((gradient - other_gradient).norm() / gradient.norm())
        print(
            f"1 x 8 against {8 // size} x {size}: loss {abs(loss - other) / loss:.1e}, gradient {error:.1e} relative"
        )
        assert abs(loss - other) / loss < 1e-5 and error < 1e-5


def test_a_mean_of_means_would_fail_that():
    def mean_per_batch(model, batch):
        n = losses.supervised(batch["labels"])
        return {"ce": losses.causal_lm(model, batch)["ce"] / n}

    rows = _ragged(8)
    _, right = _one_step(8, rows, mean_per_batch)
    _, wrong = _one_step(1, rows, mean_per_batch)
    assert float((right / right.norm() - wrong / wrong.norm()).norm()) > 0.05


def test_twenty_steps_equal_the_hf_trainer(stream, tmp_path):
    """Same model, batches, AdamW, clip and accumulation in fp32: the logged losses agree to
    1e-5.
    """
    from transformers import Trainer, TrainingArguments

    rows = [
        r
        for b in _joined(
            [next(text.Batches(stream, rows=1, length=32, seed=i)) for i in range(160)], 1
        )
        for r in [b]
    ]

    class InOrder(Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    theirs_model = models.tiny(256, hidden=32, layers=2, heads=2)
    trainer = InOrder(
        theirs_model,
        TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=20,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            optim="adamw_torch_fused",
        ),
        train_dataset=[{k: v[0] for k, v in r.items()} for r in rows],
    )
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    model = models.tiny(256, hidden=32, layers=2, heads=2)
    optimizer = train.adamw(model, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.999))
    records = train.fit(
        model, iter(_joined(rows, 4)), optimizer, total=20, accumulate=2, machine=FP32
    )
    worst = max(abs(a["loss"] - b) for a, b in zip(records, theirs, strict=True))
    drift = max(
        float((a - b).detach().abs().max())
        for a, b in zip(model.parameters(), theirs_model.parameters())
    )
    print(
        f"largest difference from the HF Trainer over 20 steps: loss {worst:.1e}, weights {drift:.1e}"
    )
    assert worst < 1e-5 and records[-1]["loss"] < records[0]["loss"] - 0.1


def test_the_loss_falls_and_terms_add_up(tiny, batches):
    def two_terms(model, batch):
        ce = losses.causal_lm(model, batch)["ce"]
        return {"ce": ce, "half": ce * 0.5}

    records = train.fit(
        tiny, batches, train.adamw(tiny, lr=1e-2), total=60, machine=FP32, loss=two_terms
    )
    assert records[-1]["ce"] < 0.7 * records[0]["ce"]
    assert all(
        r["loss"] == pytest.approx(r["ce"] + r["half"]) == pytest.approx(1.5 * r["ce"])
        for r in records
    )
    assert [r["tokens"] for r in records[:2]] == [4 * 31, 8 * 31]


def test_schedule_wastes_no_step_and_does_not_climb_back():
    rate = train.cosine(100, warmup=10, floor=0.1)
    factors = [rate(s) for s in range(300)]
    assert factors[0] == 0.1 and factors[9] == 1.0 and max(factors) == 1.0
    assert (
        all(a >= b for a, b in zip(factors[9:], factors[10:]))
        and factors[100:] == [pytest.approx(0.1)] * 200
    )


def test_rates_follow_the_schedule_once_per_optimizer_step(tiny, batches):
    records = train.fit(
        tiny,
        batches,
        train.adamw(tiny, lr=1e-3),
        total=6,
        accumulate=3,
        machine=FP32,
        schedule=train.cosine(6, warmup=2),
    )
    assert [r["lr"] for r in records] == [
        pytest.approx(1e-3 * train.cosine(6, warmup=2)(s)) for s in range(6)
    ]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_keeps_fp32_masters_and_learns(precision, tiny, batches, tmp_path):
    machine = runtime.pick("cpu", precision)
    options = dict(machine=machine, checkpoints=train.Checkpoints(tmp_path, every=20))
    records = train.fit(tiny, batches, train.adamw(tiny, lr=1e-2), total=40, **options)
    assert all(p.dtype == torch.float32 for p in tiny.parameters())
    assert records[-1]["loss"] < 0.8 * records[0]["loss"]
    if precision == "fp16":
        from nblib import checkpoint

        assert (
            checkpoint.newest(tmp_path)["training"]["scaler"]["scale"]
            == records[-1]["loss_scale"]
            > 1
        )


def test_fp16_overflow_is_skipped_by_the_scaler_and_recovers(tiny, batches):
    """A scale that overflows at first: the step is skipped, nothing is poisoned, training goes
    on.
    """

    def huge(model, batch):  # 65536 * 1e4 overflows fp16 until the scale has come down
        return {"ce": losses.causal_lm(model, batch)["ce"] * 1e4}

    sgd = torch.optim.SGD(tiny.parameters(), lr=1e-9)
    records = train.fit(
        tiny, batches, sgd, total=25, machine=runtime.pick("cpu", "fp16"), loss=huge
    )
    assert records[-1]["loss_scale"] < records[0]["loss_scale"] <= 65536
    assert all(torch.isfinite(p).all() for p in tiny.parameters())


def test_an_evaluation_leaves_the_mode_as_it_was_after_ctrl_c_too(tiny, batches, monkeypatch):
    rows = next(batches)["input_ids"]
    tiny.train()
    facts = train.evaluate(tiny, rows, machine=FP32)
    assert tiny.training and facts["tokens"] == rows[:, 1:].numel()
    monkeypatch.setattr(losses, "causal_lm", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.evaluate(tiny, rows, machine=FP32)
    assert all(m.training for m in tiny.modules())


def _interrupted(*_):
    raise KeyboardInterrupt


# ------------------------------------------------------------------ guards


class _Poisoned(text.Batches):
    """Batch number `at` of the run is noise the model has not seen: a data spike, tied to its
    position.
    """

    at = 46

    def __next__(self):
        batch = super().__next__()
        if self.epoch * self.per_epoch + self.position == self.at:
            return batch | {"labels": (batch["labels"] + 100) % 256}
        return batch


def _state(model, optimizer, batches):
    import copy

    return copy.deepcopy(
        [dict(model.named_parameters()), optimizer.state_dict(), torch.get_rng_state()]
    )


def test_rollback_restores_everything_and_moves_on(stream, capsys):
    """After the spike the run stands, bit for bit, where a straight run stands at the snapshot;
    then it goes on.
    """
    # dropout: the generator matters
    model = models.tiny(256, family="gpt2", hidden=32, layers=2, heads=2)
    optimizer = train.adamw(model, lr=1e-2)
    batches = _Poisoned(stream, rows=4, length=32)
    options = dict(
        total=60,
        machine=FP32,
        recovery=train.Recovery(spike=1.3, snapshot_every=10),
        schedule=train.cosine(60),
    )
    rolled, after = None, []
    for record in train.steps(model, batches, optimizer, **options):
        if record.get("event") == "rollback":
            rolled = (record, _state(model, optimizer, batches), batches.state_dict())
        elif rolled:
            after.append(record)
    assert rolled and rolled[0]["back_to"] == 40 and rolled[0]["step"] == 46
    assert rolled[2]["position"] == 46  # past the data that did it

    runtime.seed_all(0)
    straight = models.tiny(256, family="gpt2", hidden=32, layers=2, heads=2)
    straight_optimizer = train.adamw(straight, lr=1e-2)
    straight_batches = text.Batches(stream, rows=4, length=32)
    for record in train.steps(straight, straight_batches, straight_optimizer, **options):
        if record["step"] == 40:
            break
    expected = _state(straight, straight_optimizer, straight_batches)
    for name, p in rolled[1][0].items():
        assert torch.equal(p, expected[0][name]), name
    for key, entry in rolled[1][1]["state"].items():
        assert all(torch.equal(v, expected[1]["state"][key][k]) for k, v in entry.items())
    assert torch.equal(rolled[1][2], expected[2])

    # the cut outlives the schedule
    assert after[0]["lr"] == pytest.approx(0.5e-2 * train.cosine(60)(40))
    assert len(after) == 20 and after[-1]["loss"] < after[0]["loss"] + 0.1
    assert "Rolled back to step 40" in capsys.readouterr().out


def test_without_the_guard_the_spike_goes_in(stream):
    model = models.tiny(256, hidden=32, layers=2, heads=2)
    records = train.fit(
        model,
        _Poisoned(stream, rows=4, length=32),
        train.adamw(model, lr=1e-2),
        total=47,
        machine=FP32,
    )
    assert records[45]["loss"] > 1.3 * records[44]["loss"] and "event" not in records[45]


def test_nan_rolls_back_too_and_gives_up_after_three(stream):
    model = models.tiny(256, hidden=32, layers=2, heads=2)
    calls = iter(range(10_000))

    def breaks_for_good(model, batch):
        ce = losses.causal_lm(model, batch)["ce"]
        return {"ce": ce * float("nan") if next(calls) > 20 else ce}

    with pytest.raises(guards.NonFinite, match="after 3 rollbacks"):
        train.fit(
            model,
            text.Batches(stream, rows=4, length=32),
            train.adamw(model, lr=1e-2),
            total=60,
            machine=FP32,
            recovery=train.Recovery(spike=2.0),
            loss=breaks_for_good,
        )
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_an_overflow_that_no_scale_cures_is_an_error(tiny, batches):
    tiny.model.layers[1].mlp.register_forward_hook(lambda m, i, o: InfiniteGradient.apply(o))
    with pytest.raises(guards.NonFinite, match="gradient of model.layers.1.mlp.down_proj.weight"):
        train.fit(
            tiny, batches, train.adamw(tiny, lr=1e-3), total=60, machine=runtime.pick("cpu", "fp16")
        )


def test_a_step_without_labels_says_so(tiny, batches):
    empty = iter(
        lambda: {
            "input_ids": next(batches)["input_ids"],
            "labels": torch.full((4, 32), losses.IGNORED),
        },
        None,
    )
    with pytest.raises(ValueError, match="step 0: no label is supervised"):
        train.fit(tiny, empty, train.adamw(tiny, lr=1e-3), total=2, machine=FP32)


def test_what_trains_and_what_the_optimizer_holds_must_agree(tiny, batches):
    half = torch.optim.SGD(list(tiny.parameters())[:3], lr=0.1)
    with pytest.raises(ValueError, match="trainable parameters are in no optimizer, the first is"):
        train.fit(tiny, batches, half, total=1, machine=FP32)
    whole = torch.optim.SGD(tiny.parameters(), lr=0.1)
    tiny.model.embed_tokens.requires_grad_(False)
    with pytest.raises(ValueError, match="1 parameters in the optimizer are frozen"):
        train.fit(tiny, batches, whole, total=1, machine=FP32)
    with pytest.raises(ValueError, match="total = 0"):
        train.fit(tiny, batches, whole, total=0, machine=FP32)


# ------------------------------------------------------------------ asked to end


class _Controls:
    stop, lr_scale = False, 1.0


def test_controls_are_read_every_step(tiny, batches, tmp_path):
    controls = _Controls()
    seen, logged = [], []
    options = dict(
        total=50,
        machine=FP32,
        watch=train.Watch(controls=controls, log=logged.append),
        checkpoints=train.Checkpoints(tmp_path),
    )
    for record in train.steps(tiny, batches, train.adamw(tiny, lr=1e-3), **options):
        seen.append(record)
        controls.lr_scale = 0.1
        controls.stop = record["step"] == 4
    # who reads the log knows that it is not whole
    assert (logged[-1]["step"], logged[-1]["stopped"]) == (5, "Stop")
    assert [r["step"] for r in seen] == [1, 2, 3, 4, 5] and seen[-1]["stopped"] == "Stop"
    assert seen[1]["lr"] == pytest.approx(1e-4)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize(
    "sent, raised", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_signals_end_after_the_step_with_a_checkpoint(
    sent, raised, tiny, batches, tmp_path, capsys
):
    before = signal.getsignal(sent)

    def on_step(record):
        if record["step"] == 3:
            os.kill(os.getpid(), sent)

    with pytest.raises(raised):
        train.fit(
            tiny,
            batches,
            train.adamw(tiny, lr=1e-3),
            total=50,
            machine=FP32,
            checkpoints=train.Checkpoints(tmp_path),
            on_step=on_step,
        )
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]
    assert f"stopped by {sent.name} after step 4 of 50, checkpoint saved" in capsys.readouterr().out
    assert signal.getsignal(sent) is before
    records = train.fit(
        tiny,
        batches,
        train.adamw(tiny, lr=1e-3),
        total=6,
        machine=FP32,
        checkpoints=train.Checkpoints(tmp_path),
    )
    # goes on from there, history included
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    seconds = [r["seconds"] for r in records]
    # the clock goes on as well
    assert seconds == sorted(seconds) and not any("stopped" in r for r in records)


@pytest.mark.parametrize("shows_stop", [True, False])
def test_an_interrupted_cell_fails_unless_it_shows_a_stop_button(
    shows_stop, tiny, batches, monkeypatch
):
    """The cells after it would go on with a model that is half trained, and nothing on the page
    would say so.
    """
    monkeypatch.setattr(runtime, "interactive", lambda: True)
    options = dict(
        total=50, machine=FP32, watch=train.Watch(controls=_Controls() if shows_stop else None)
    )
    seen = []
    with contextlib.nullcontext() if shows_stop else pytest.raises(KeyboardInterrupt):
        for record in train.steps(tiny, batches, train.adamw(tiny, lr=1e-3), **options):
            seen.append(record)
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGINT)
    assert len(seen) == 4 and seen[-1]["stopped"] == "SIGINT"


def test_live_hands_control_to_the_event_loop(tiny, batches):
    import asyncio

    async def cell():
        ticks, seen = [], []

        async def heart():
            while len(seen) < 5:
                ticks.append(len(seen))
                await asyncio.sleep(0)

        beat = asyncio.create_task(heart())
        async for record in train.live(
            train.steps(tiny, batches, train.adamw(tiny, lr=1e-3), total=5, machine=FP32)
        ):
            seen.append(record["step"])
        await beat
        return ticks, seen

    ticks, seen = asyncio.run(cell())
    assert seen == [1, 2, 3, 4, 5] and set(ticks) >= {1, 2, 3, 4}


# ------------------------------------------------------------------ several processes

TWO = """
import json, os, signal, sys, torch
sys.path[:0] = [{tests!r}]
from conftest import FP32
from nblib import losses, models, runtime, text, train
torch.set_num_threads(1)
if runtime.world() > 1: torch.distributed.init_process_group("gloo")
steps = torch.randint(1, 4, (20_000,), generator=torch.Generator().manual_seed(1))
def ragged(batch):  # the ranks supervise very different numbers of tokens
    labels = batch["labels"].clone()
    labels[torch.arange(len(labels)) + runtime.rank() * len(labels) >= 2, :20] = losses.IGNORED
    return batch | {{"labels": labels}}
class Ragged(text.Batches):
    def __next__(self): return ragged(super().__next__())
model = models.tiny(256, hidden=32, layers=2, heads=2)
rows = 4 // runtime.world()
def on_step(record):  # one of the processes is asked to end
    if record["step"] == {ask_at} and runtime.rank() == 1: os.kill(os.getpid(), signal.SIGTERM)
batches = Ragged(steps.cumsum(0) % 256, rows=rows, length=32, rank=runtime.rank(), world=runtime.world())
records = train.fit(model, batches, train.adamw(model, lr=1e-2), total=12, accumulate=2, machine=FP32,
                    checkpoints=train.Checkpoints({folder!r}, every=4), on_step=on_step)
if runtime.rank() == 0:
    weights = [float(p.detach().double().abs().sum()) for p in model.parameters()]
    print(json.dumps({{"losses": [r["loss"] for r in records], "weights": weights}}))
if runtime.world() > 1: torch.distributed.destroy_process_group()
"""


def _torchrun(tmp_path, world: int, ask_at: int = 0):
    script = tmp_path / f"two{world}.py"
    script.write_text(
        TWO.format(
            tests=str(Path(__file__).parent), folder=str(tmp_path / f"ck{world}"), ask_at=ask_at
        )
    )
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world}",
        str(script),
    ]
    return subprocess.run(
        launch,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_two_processes_take_the_same_steps_as_one(tmp_path):
    import json

    results = []
    for world in (1, 2):
        out = _torchrun(tmp_path, world)
        assert out.returncode == 0, out.stderr[-2000:]
        results.append(json.loads(out.stdout.strip().splitlines()[-1]))
        assert len(list((tmp_path / f"ck{world}").glob("step-*"))) == 2
    worst = max(abs(a - b) for a, b in zip(results[0]["losses"], results[1]["losses"], strict=True))
    print(f"one process against two over 12 steps: largest loss difference {worst:.1e}")
    assert worst < 1e-5
    assert results[0]["weights"] == pytest.approx(results[1]["weights"], rel=1e-5)


@pytest.mark.slow
def test_one_process_asked_to_end_ends_both_with_one_checkpoint(tmp_path):
    out = _torchrun(tmp_path, 2, ask_at=5)
    assert out.returncode != 0  # each ended as the signal asks
    assert "stopped by SIGTERM after step 6 of 12, checkpoint saved" in out.stdout + out.stderr
    assert [p.name for p in sorted((tmp_path / "ck2").iterdir())] == [
        "step-00000004",
        "step-00000006",
    ]


@pytest.mark.parametrize("ahead", [False, True])
def test_records_count_epochs_and_the_third_is_said_once(ahead, tiny, machine, capsys, monkeypatch):
    if ahead:  # as on a card
        fetch = train.DeviceBatches.fetch_ahead
        monkeypatch.setattr(
            train.DeviceBatches,
            "fetch_ahead",
            lambda feed: setattr(feed, "early", True) or fetch(feed),
        )
    batches = text.Batches(torch.arange(300) % 256, rows=2, length=32)  # four batches an epoch
    records = train.fit(tiny, batches, train.adamw(tiny, lr=1e-4), total=14, machine=machine)
    assert [record["epoch"] for record in records] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 2
    said = [line for line in capsys.readouterr().out.splitlines() if "epoch" in line]
    assert len(said) == 1 and said[0].startswith("step 9: epoch 3 of a corpus of 300 tokens")


def test_batches_that_know_no_epoch_have_none_in_the_record(tiny, machine):
    batches = iter([next(text.Batches(torch.arange(300) % 256, rows=2, length=32))])
    assert (
        "epoch"
        not in train.fit(tiny, batches, train.adamw(tiny, lr=1e-4), total=1, machine=machine)[0]
    )
