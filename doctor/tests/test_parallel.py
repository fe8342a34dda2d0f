"""DistributedDataParallel called, and gone round (one gloo process: what is seen does not depend on their number)."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import train_doctor as doctor
from tests.bench import assert_healthy, assert_root, batches, lm, quiet


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def parallel(around: bool):
    def program():
        model = DistributedDataParallel(lm(hidden=32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        called = model.module if around else model
        with doctor.watch(model, say=False) as report:
            for ids in batches(3):
                called(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return report

    return program


def test_wrapper_gone_round(group):
    assert_root(quiet(parallel(around=True)), "N21")
    assert_healthy(quiet(parallel(around=False)))
