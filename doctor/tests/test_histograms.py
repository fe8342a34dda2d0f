"""Counts by power of two: right, few, in the steps 1 and 8, and without a trace in the program."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import loopdoctor as doctor
from loopdoctor import histograms
from loopdoctor.histograms import BINS, COLUMNS, GIVEN, GRADIENTS, LOW, NUMBERS, TENSORS, WIDTH


def train(steps: int = 10, depth: int = 2, scale: float = 1.0, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(
        *[layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 4)
    )
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with doctor.watch(model, say=False) as report:
        for _ in range(steps):
            x = torch.randn(32, 64, dtype=dtype)
            optimizer.zero_grad()
            (scale * F.cross_entropy(model(x).float(), x[:, :4].argmax(1))).backward()
            optimizer.step()
    assert not report.faults, report.faults
    return report


def column(value: float) -> int:
    if value == 0:
        return 0
    if not math.isfinite(value):
        return COLUMNS - 1
    return 1 + min(BINS - 1, max(0, (math.floor(math.log2(abs(value))) - LOW) // WIDTH))


def test_each_number_is_in_its_column():
    values = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        1.99,
        2.0,
        3.99,
        4.0,
        2.0**-40,
        1e-30,
        1e30,
        -math.inf,
        math.inf,
        math.nan,
    ]
    for dtype in (torch.float64, torch.float32):
        counts = histograms.counted(
            [torch.tensor(values, dtype=dtype), torch.zeros(3, dtype=dtype)]
        )
        wanted = [sum(column(v) == c for v in values) for c in range(COLUMNS)]
        assert counts == [wanted, [3] + [0] * (COLUMNS - 1)]


@pytest.mark.parametrize("shape", [(5,), (NUMBERS + 1,), (2048, 1024), (3, 700, 700)])
def test_a_sample_is_small_and_evenly_spread(shape):
    t = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    for given in (t, t.transpose(0, -1), nn.Parameter(t)):
        sample = histograms.few(given)
        assert len(sample) == min(t.numel(), NUMBERS) and len(sample.unique()) > 0.6 * len(sample)
        assert sample.untyped_storage().nbytes() == 8 * len(sample), "it holds no view of the whole"
        assert t.numel() < NUMBERS or sample.max() - sample.min() > 0.99 * t.numel()
    rows, columns = histograms.few(t) // shape[-1], histograms.few(t) % shape[-1]
    assert len(columns.unique()) > 0.6 * min(len(sample), shape[-1]), (
        "not the same columns of every row"
    )
    assert (rows == columns).float().mean() < 0.1 or len(shape) == 1, "and not the diagonal"


def test_what_has_no_numbers_to_look_at():
    for t in (
        torch.zeros(3, device="meta"),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(0),
        torch.eye(3).to_sparse(),
    ):
        assert histograms.few(t) is None


def test_they_are_in_the_record_and_in_the_page():
    report = train(10)
    kept = report.record["histograms"]
    assert set(kept[GRADIENTS]) == {f"{n}.{p}" for n in (0, 2, 4) for p in ("weight", "bias")}
    assert set(kept[GIVEN]) == {"0", "2", "4"}
    assert all(list(at) == ["1", "8"] for kind in (GRADIENTS, GIVEN) for at in kept[kind].values())
    assert len(kept["columns"]) == COLUMNS == len(kept[GRADIENTS]["0.weight"]["1"])
    assert kept[GIVEN]["0"]["1"][0] == 0 and 300 < kept[GIVEN]["2"]["1"][0] < 700, (
        "a ReLU makes half of them zero"
    )
    assert sum(kept[GIVEN]["2"]["8"]) == NUMBERS and sum(kept[GRADIENTS]["4.bias"]["8"]) == 4
    assert json.loads(report.json())["record"]["histograms"] == kept
    page = report.html()
    assert page.count("size of the numbers") == 2 and "step 8" in page
    assert list(train(7).record["histograms"][GIVEN]["2"]) == ["1"]


def test_a_thousand_times_is_five_columns_further():
    one, thousand = (
        train(1, scale=s).record["histograms"][GRADIENTS]["2.weight"]["1"] for s in (1.0, 1024.0)
    )
    assert one[1:-6] == thousand[6:-1] and one[0] == thousand[0]


def test_infinite_gradients_are_counted():
    counts = train(1, scale=1e38, dtype=torch.bfloat16).record["histograms"][GRADIENTS]
    assert counts["4.weight"]["1"][-2] > 0
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with doctor.watch(model, say=False) as report:
        (model(torch.ones(2, 4)) * math.inf).sum().backward()
        optimizer.step()
    assert report.record["histograms"][GRADIENTS]["weight"]["1"][-1] == 16


def test_a_deep_model_gives_no_more():
    kept = train(2, depth=60).record["histograms"]
    assert len(kept[GRADIENTS]) == len(kept[GIVEN]) == TENSORS
    assert len(json.dumps(kept)) < 16_000
