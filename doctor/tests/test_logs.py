"""A log alone: what it shows is named, what it cannot tell is said, and a healthy one is left
alone.
"""

import json
import math
import random

import pytest

from loopdoctor import log_lines, log_texts, logs, script
from loopdoctor.control import control

NAN = math.nan


def log(entries, *, rate=lambda n: 1e-4, loss=lambda n: 3 / (1 + n / 9), norm=lambda n: 1.0):
    draw = random.Random(0)
    return [
        {
            "step": 10 * n + 10,
            "loss": loss(n) * (1 + 0.02 * draw.random()),
            "grad_norm": norm(n) * (1 + 0.2 * draw.random()),
            "learning_rate": rate(n),
        }
        for n in range(entries)
    ]


def lines(entries):
    return "\n".join(json.dumps(entry) for entry in entries)


@pytest.fixture
def read(tmp_path):
    """The log of a text, or of bytes."""

    def of(text):
        path = tmp_path / "train.log"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return logs.read(path)

    return of


@pytest.fixture
def report(read):
    """The report of a text."""
    return lambda text: logs.diagnose(read(text), control(None, None))


TRIPLE = dict(loss=lambda n: 0.0, norm=lambda n: NAN, rate=lambda n: 0.0)
LATE = dict(loss=lambda n: 3 / (1 + n) if n < 12 else 0.0, norm=lambda n: 1.0 if n < 12 else NAN)
CASES = {
    "healthy": (log(40), []),
    "healthy, warming up": (log(40, rate=lambda n: 1e-4 * min(n, 10)), []),
    "healthy, rate ends at 0": (log(40, rate=lambda n: 1e-4 * (39 - n)), []),
    "healthy, a scaler skipped": (log(40, norm=lambda n: math.inf if n in (0, 20) else 1.0), []),
    "healthy, the norm is not logged": (log(40, norm=lambda n: 0.0), []),
    "healthy, short": (log(5), []),
    "the triple": (log(20, **TRIPLE), ["L1"]),
    "the triple, from step 130 on": (log(40, **LATE), ["L1"]),
    "nan from a step on": (log(40, loss=lambda n: 3 / (1 + n) if n < 30 else NAN), ["L2"]),
    "rate 0 from the start": (log(40, rate=lambda n: 0.0, loss=lambda n: 3.0), ["L3"]),
    "norm exploding": (log(40, norm=lambda n: 1.5**n), ["L4"]),
    "never falls": (log(40, loss=lambda n: 3.0), ["L5"]),
    "rises": (log(40, loss=lambda n: 3.0 + n), ["L5"]),
    "norm 0": (log(40, loss=lambda n: 3.0, norm=lambda n: 0.0), ["L6"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_numbers_show(report, name):
    entries, wanted = CASES[name]
    made = report(lines(entries))
    assert [f.check for f in made.findings if not f.because] == wanted, f"\n{made}"
    assert all("The log cannot tell " in f.diagnosis for f in made.findings)
    assert {f.check for f in made.findings} | set(made.verdicts) == {f.id for f in logs.FAULTS}
    json.loads(made.json(), parse_constant=lambda text: pytest.fail(text))
    assert made.html() and "step" not in made.verdicts


def test_where_it_begins_is_named(report):
    assert (
        "first at step 130" in report(lines(CASES["the triple, from step 130 on"][0])).root.observed
    )


def test_short_logs_say_that_they_are(report):
    verdicts = report(lines(CASES["healthy, short"][0])).verdicts
    assert verdicts["L5"].state == verdicts["L4"].state == "UNKNOWN"


# what stands in a file, and (step, epoch, loss, norm, rate) of its last entry
BAR = "\r  3%|3         | 3/100 [00:03<01:20,  1.21it/s]"
FORMS = {
    "a dict, quoted": (
        f"{BAR}\n{BAR}{{'loss': '0', 'grad_norm': 'nan', 'learning_rate': '1e-05', 'epoch': '0.06'}}\n",
        (None, 0.06, 0.0, NAN, 1e-5),
    ),
    "two dicts behind a bar": (
        BAR + "{'loss': 2.5, 'grad_norm': 1.0, 'epoch': 0.5}{'loss': 2.25, 'epoch': 0.75}",
        (None, 0.75, 2.25, None, None),
    ),
    "a dict that is wrapped": (
        "{'loss': 2.5, 'grad_norm': 1.25,\n 'learning_rate': 0.5, 'epoch': 0.25}\n",
        (None, 0.25, 2.5, 1.25, 0.5),
    ),
    "nanoGPT": (
        "iter 90: loss 3.5, time 1.0ms\nstep 100: train loss 3.25, val loss 3.3\niter 100: loss 3.0, mfu 12%",
        (100, None, 3.0, None, None),
    ),
    "losses of an evaluation alone": (
        "step 100: train loss 3.5, val loss 3.75\nstep 200: train loss 3.25, val loss 3.5",
        (200, None, 3.25, None, None),
    ),
    "epoch and step": ("Epoch 1/5, Step 10, Loss: 2.5", (10, 1, 2.5, None, None)),
    "brackets": ("Epoch [2/5], Step [100/600], Loss: 2.5000 (2.75)", (100, 2, 2.5, None, None)),
    "bars between": (
        "epoch 3 | step 120 | loss 2.5 | lr 3e-4 | norm: 0.5",
        (120, 3, 2.5, 0.5, 3e-4),
    ),
    "thousands": ("step 1,234: loss 2.5e-05", (1234, None, 2.5e-5, None, None)),
    "the end of a bar": (
        "\r  1%|1 | 1/100 [00:00<00:20, 4it/s, loss=2.5]\r  2%|2 | 2/100 [00:00<00:20, 4it/s, loss=2.25]",
        (2, None, 2.25, None, None),
    ),
    "colours": (
        "\x1b[32mINFO\x1b[0m step \x1b[1m10\x1b[0m \x1b[33mloss\x1b[0m: 2.5",
        (10, None, 2.5, None, None),
    ),
    "PowerShell": ("step 10: loss 2.5\r\n".encode("utf-16"), (10, None, 2.5, None, None)),
    "a table of a notebook": (
        "Step\tTraining Loss\tValidation Loss\n500\t2.5\tNo log\n1000\t2.25\t2.5\n",
        (1000, None, 2.25, None, None),
    ),
    "a table of Lightning": (
        "epoch,step,train_loss,val_loss\n0,49,2.5,\n0,49,,2.75\n1,99,2.25,\n",
        (99, 1, 2.25, None, None),
    ),
    "Megatron": (
        " iteration      100/  500000 | learning rate: 1.0E-04 | global batch size:   256 | lm loss: 6.5E+00 | "
        "loss scale: 1.0 | grad norm: 1.25 | number of skipped iterations:   0 |",
        (100, None, 6.5, 1.25, 1e-4),
    ),
    "settings are no entries": (
        "max_grad_norm: 1.0\nloss_scale = 128\nstep 10 loss 2.5\nlabel smoothing 0.1",
        (10, None, 2.5, None, None),
    ),
    "parts of a loss": (
        "step 1 loss 2.5 (ce_loss 2.0, kl_loss 0.5)\nstep 2 kl_loss 0.25",
        (1, None, 2.5, None, None),
    ),
    "a value on each line": ("step 10\nloss: 2.5\ngrad_norm: 1.25\n", (10, None, 2.5, 1.25, None)),
    "a tensor": (
        "step 3 loss: tensor(2.5, device='cuda:0', grad_fn=<NllLossBackward0>)",
        (3, None, 2.5, None, None),
    ),
    "trainer_state.json, indented": (
        json.dumps(
            {"epoch": 3.0, "global_step": 9, "log_history": log(2, loss=lambda n: 0)}, indent=2
        ),
        (20, None, 0, pytest.approx(1.1, abs=0.1), 1e-4),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_logs_as_people_have_them(read, name):
    text, wanted = FORMS[name]
    found = read(text).entries[-1]
    assert str(found[1:6]) == str(wanted) or found[1:6] == wanted


WRITE_UP = (
    "Step 7: forward with autocast\n  loss 2.59\nStep 8: backward with gradient checkpointing\n"
    "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn\n\n"
    "trainable params: 161,480,704 || all params: 7,777,097,216 || trainable%: 2.0764\n"
    + "".join(
        f"{BAR}\r{{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 0.0, 'epoch': {0.06 * n:.2f}}}\n"
        for n in range(1, 6)
    )
)


def test_the_write_up_on_the_order_of_checkpointing(report):
    made = report(WRITE_UP)
    first, second = (f for f in made.findings if not f.because)
    # the error is that of reentrant checkpointing, and another fault than the NaN
    assert (first.check, first.name, second.check) == ("S10", "reentrant-checkpoint-cut", "L1")
    assert "line 4" in first.observed and "line 3" in first.observed
    assert "use_reentrant" in first.fix and "enable_input_require_grads" in first.fix
    for finding in (first, second):
        assert (
            "The log cannot tell " in finding.diagnosis
            and "`loopdoctor train.py`" in finding.diagnosis
        )


WARNED = "torch/utils/checkpoint.py:92: UserWarning: None of the inputs have requires_grad=True. Gradients will be None\n"
ELEMENT = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn\n"
FLAT = lines(log(16, loss=lambda n: 4.17, norm=lambda n: 0.0))
FALLS = lines(log(16))
LED = {
    "a graph that is cut": (WARNED + ELEMENT, ["S10 ERROR"]),
    "a loss that was made to require a gradient": (WARNED + FLAT, ["S10 ERROR"]),
    "a warning alone": (WARNED + FALLS, ["S10 WARN"]),
    "an error alone": (ELEMENT, ["F1 ERROR"]),
    "an error, checkpointing is not reentrant": (
        "gradient_checkpointing=True, gradient_checkpointing_kwargs={'use_reentrant': False}\n"
        + ELEMENT,
        ["F1 ERROR"],
    ),
    "an error, checkpointing is off": ("gradient_checkpointing=False,\n" + ELEMENT, ["F1 ERROR"]),
    "an error, nothing may learn": (
        "trainable params: 0 || all params: 7 || trainable%: 0.0\n" + ELEMENT,
        ["S1 ERROR"],
    ),
    "a gradient of 0 under checkpointing": (
        "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.\n"
        + FLAT,
        ["L6 ERROR"],
    ),
    "a schedule": (
        "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`. In\n"
        + FALLS,
        ["N9 WARN"],
    ),
    "fp16": ("ValueError: Attempting to unscale FP16 gradients.\n", ["S7 ERROR"]),
    "memory": (
        FALLS + "\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
        ["L7 ERROR"],
    ),
    "shapes": (
        "UserWarning: Using a target size (torch.Size([8])) that is different to the input size (torch.Size([8, 1])).\n"
        + FALLS,
        ["F21 WARN"],
    ),
    "cache warned of, and it learns": (
        "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.\n"
        + FALLS,
        [],
    ),
    "a scaler finds its scale": (
        FALLS + "\nGradient overflow.  Skipping step, reducing loss scale\n" * 9,
        [],
    ),
}


@pytest.mark.parametrize("name", LED)
def test_messages_lead_to_the_cause(report, name):
    text, wanted = LED[name]
    made = report(text)
    assert [f"{f.check} {f.severity}" for f in made.findings if not f.because] == wanted, (
        f"\n{made}"
    )
    assert all("The log cannot tell " in f.diagnosis for f in made.findings)


def test_messages_have_the_names_of_the_live_checks_and_texts_without_blanks():
    for known in log_texts.MESSAGES.values():
        if known.check:
            finding = log_texts._finding(known, "")
            assert finding.name == log_texts.PAGES[known.check].faults[known.fault].name
            assert "{" not in (finding.diagnosis + finding.fix).replace('{"use', "")


def test_of_several_runs_the_last_is_judged(report):
    broken = "".join(f"step {n}: loss nan\n" for n in range(0, 200, 10)) + ELEMENT
    healthy = "".join(f"step {n}: loss {5 - n / 100}\n" for n in range(0, 200, 10))
    made = report(broken + healthy)
    assert made.root is None and made.rounds == 20
    assert "2 runs" in made.notes[0] and "line 22" in made.notes[0] and made.notes[0] in str(made)
    # steps that begin again with each epoch are one run
    epochs = "".join(f"Epoch {e}\n" + healthy for e in range(3))
    assert report(epochs).rounds == 60 and not report(epochs).notes


def test_a_long_log_is_read_in_parts_and_the_first_nan_is_found(report, monkeypatch):
    for name, value in dict(MOST=100, PART=512, TAIL=2048, BLOCK=1 << 14).items():
        monkeypatch.setattr(log_lines, name, value)
    loss = [f"{5 - n / 5000:.4f}" if n < 12_345 else "nan" for n in range(20_000)]
    made = report(
        "".join(f"step {n}: loss {x}\n" for n, x in enumerate(loss))
        + "Loss is nan, stopping training\n"
    )
    assert made.root.check == "L2" and "at step 12345," in made.root.observed
    assert {f.check for f in made.findings} == {"L2", "N17"}
    assert len(made.record["curves"]["loss"]) < 2_00 and made.rounds < 5_000


def test_the_command_reads_what_loggers_write(tmp_path, capsys):
    state, printed = tmp_path / "trainer_state.json", tmp_path / "log.jsonl"
    healthy = log(40) + [
        {"step": 400, "eval_loss": 1.0},
        {"step": 400, "train_runtime": 3.0, "train_loss": 1.0},
    ]
    state.write_text(json.dumps({"log_history": healthy, "global_step": 400}))
    assert script.command(["--log", str(state)]) == 0
    assert "nothing found that a log can show" in capsys.readouterr().out
    rows = [
        {"train/loss": str(e["loss"]), "lr": e["learning_rate"], "grad_norm": "nan"}
        for e in log(9, **TRIPLE)
    ]
    printed.write_text(lines(rows))
    assert script.command(["--log", str(printed), "--format", "annotations"]) == 1
    assert capsys.readouterr().out.startswith("::error ")


@pytest.mark.parametrize(
    "data", [b"", b" \n", b"once upon a time\n", b"loss\0\x01\x02" * 99, b"[1]", b"{]"]
)
def test_what_is_no_log(tmp_path, capsys, data):
    path = tmp_path / "log.json"
    path.write_bytes(data)
    for file in (path, tmp_path / "none", tmp_path):
        assert script.command(["--log", str(file)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert script.command([]) == script.command(["x.py", "--log", "y"]) == 2
