"""Memory of a step: only chunks cure the logits, the estimate is near a real run, the chart names
the largest kind.
"""

import os
import subprocess
import sys

import pytest

from lessons import step_memory
from nblib import memory, paths


@pytest.fixture(scope="module")
def peaks():
    return step_memory.cures(rank=16, vocab=8192, length=128)


def test_no_cure_changes_the_loss_and_only_chunks_lower_the_peak(peaks):
    losses = [facts["loss"] for facts in peaks.values() if facts["rank"] == 16]
    assert len(losses) == 5 and max(losses) - min(losses) < 1e-4
    assert peaks["rank 1"]["copies"] > 2 and peaks["checkpointing"]["copies"] > 2
    assert peaks["torch's fused loss, chunks of 256"]["peak MiB"] < peaks["nothing"]["peak MiB"]


@pytest.mark.slow
def test_predicted_and_measured_lie_close():
    """In a process of its own, as a notebook is: what other tests hold and let go of would
    count.
    """
    code = "from lessons import step_memory as s; config = s.config_of(8192); "
    code += "(row,) = s.compared(config, [dict(logits='full')], rows=4, length=128); print(row['logits'], row['ratio'])"
    environment = os.environ | {"PYTHONPATH": str(paths.notebooks())}
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert out.returncode == 0, out.stderr[-2000:]
    logits, ratio = out.stdout.split()[-2:]
    assert logits == "full" and 0.8 < float(ratio) < 1.25


def test_the_chart_names_the_largest_kind_and_the_peak():
    drawn = step_memory.chart({"weights": 2**30, "logits": 3 * 2**30, "peak": 4 * 2**30})
    assert "largest kind is logits" in drawn.summary and "4 GiB" in drawn.summary


def test_the_first_choices_draw_whole_logits():
    first = {name: options[0] for name, options in step_memory.MENUS.items()}
    assert first["logits"] == "full" and set(first["optimizer"].split()) <= set(memory.OPTIMIZERS)
    assert "largest kind is logits" in step_memory.draw(**first).summary


@pytest.mark.parametrize(
    "changed", [dict(), dict(rows=1, length=512), dict(vocabulary=131072, precision="bf16")]
)
def test_two_chunks_are_counted_as_all(changed):
    """Within a few numbers of four bytes, of hundreds of megabytes."""
    chosen = (
        {name: options[0] for name, options in step_memory.MENUS.items()}
        | dict(rows=4, logits="chunked")
        | changed
    )
    config = step_memory.config_of(chosen.pop("vocabulary"))
    whole = memory.estimate(config, **chosen)
    with step_memory._two_of_each():
        two = memory.estimate(config, **chosen)
    assert all(abs(whole[kind] - two[kind]) <= 64 for kind in whole)


def test_the_config_asked_for_is_not_the_one_kept():
    assert (
        step_memory.config_of(64).vocab_size == 64
        and step_memory.config_of(4096).vocab_size == 4096
    )
