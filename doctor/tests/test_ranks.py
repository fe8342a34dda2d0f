"""Two processes that should be one: what each rank says of the other, through the store they met in."""

import json
import subprocess
import sys

import pytest

from tests.bench import ELSEWHERE

WORK = """
import copy, json, sys, warnings, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
import train_doctor as doctor
from tests.bench import batches

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(256, 32), nn.Linear(32, 32), nn.Linear(32, 256)
    def forward(self, ids):
        return self.head(F.gelu(self.mix(self.table(ids))))

def go(kind, rank, watched=True):
    torch.manual_seed(0 if kind != "shards" else rank)
    model = Model()
    called = nn.parallel.DistributedDataParallel(model) if kind in ("ddp", "scribbled", "alone") else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    def loop():
        for ids in batches(4, seed=rank):
            loss = F.cross_entropy(called(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            if kind == "scribbled" and rank == 1:
                nn.utils.clip_grad_norm_(model.mix.parameters(), 1e-3)
                model.mix.weight.grad.mul_(-1)
            optimizer.step()
    if not watched:
        return loop()
    with doctor.watch(called, say=False) as report:
        loop()
    found = {f.check: f.name + " " + f.severity for f in report.findings}
    return found.get("N21", report.verdicts["N21"].state if "N21" in report.verdicts else "?"), report.faults

def work(rank, folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    said = {kind: go(kind, rank) for kind in ("ddp", "apart", "scribbled", "shards")}
    said["alone"] = go("alone", rank, watched=rank == 0)
    with open(f"{folder}/said{rank}", "w") as file:
        json.dump(said, file)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.slow
def test_ranks(tmp_path):
    script = tmp_path / "work.py"
    script.write_text(WORK)
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120, env=ELSEWHERE
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads((tmp_path / f"said{rank}").read_text()) for rank in (0, 1)]
    assert not any(faults for one in said for _, faults in filter(None, one.values()))
    found = {kind: {one[kind][0] for one in said if one[kind]} for kind in said[0]}
    assert found["ddp"] <= {"OK", "UNKNOWN"} and "OK" in found["ddp"], found
    assert "ranks-apart WARN" in found["apart"] and "OK" not in found["apart"], found
    assert "ranks-apart ERROR" in found["scribbled"] and "OK" not in found["scribbled"], found
    assert found["shards"] == {"UNKNOWN"} and found["alone"] == {"UNKNOWN"}, found
