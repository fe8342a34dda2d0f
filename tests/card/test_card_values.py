"""The tensors that say they are on a card mix devices as a card allows, and in no other way."""

import json
import os
import subprocess
import sys

import absent_card
import pytest

pytestmark = [
    pytest.mark.skipif(bool(absent_card.missing()), reason=absent_card.missing()),
    pytest.mark.slow,  # a C++ extension is compiled first
]

ALLOWED = """
card + number
card.mul_(number)
torch.where(card > 0, card, number)
card[torch.tensor([0, 2])]
card[torch.tensor([True, False, True])]
card.index_put_((torch.tensor([0]),), number)
card.copy_(host)
host.copy_(card)
host[torch.tensor([1])] = number
torch.tensor([card.sum(), card[0]])
float(card.sum()), card.tolist(), bool(card.sum() >= 0), f"{card.sum():.2f}"
card.cpu().numpy()
with torch.device("meta"): assert torch.tensor([1.0]).device.type == torch.as_tensor([1.0]).device.type == "meta"
copy.deepcopy(nn.Linear(3, 3).to("cuda"))(card)
nn.Linear(3, 3).to("cuda").load_state_dict(nn.Linear(3, 3).state_dict())
torch.zeros(3, device="cuda") + torch.tensor([1.0, 2.0, 3.0], device="cuda") + card.new_tensor([1.0, 2.0, 3.0])
torch.randn(3, device="cuda")
safetensors.torch.save({"card": card})
"""
REFUSED = """
card + host
card.add_(host)
number.add_(card.sum())
host + card.sum()
host[torch.tensor([0], device="cuda")]
host[card > 0]
card.masked_fill(host > 0, 0.0)
card.index_put_((torch.tensor([0, 1]),), torch.ones(2))
torch.cat([card, host])
torch.stack([card.sum(), number])
nn.Linear(3, 3)(card)
nn.Linear(3, 3).to("cuda")(host)
nn.functional.embedding(torch.tensor([0]), torch.zeros(2, 2, device="cuda"))
card.numpy()
numpy.asarray(card)
torch.randn(3, device="cuda", generator=torch.Generator())
torch.empty(3, device="cuda").uniform_(generator=torch.Generator())
"""
THREAD = (
    'ThreadPoolExecutor().submit(lambda: torch.zeros(3, device="cuda") + host.to("cuda")).result()'
)
PROGRAM = """
import card_values
import copy, json, sys
from concurrent.futures import ThreadPoolExecutor
import numpy, torch, safetensors.torch
from torch import nn
card_values.begin()
ends = {}
for line in json.loads(sys.argv[1]):
    names = dict(card=torch.ones(3).to("cuda"), host=torch.ones(3), number=torch.tensor(2.0))
    try:
        exec(line, globals() | names)
        ends[line] = ""
    except Exception as error:
        ends[line] = f"{type(error).__name__}: {error}"
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends() -> dict:
    lines = json.dumps([*(ALLOWED + REFUSED).split("\n"), THREAD])
    environment = os.environ | {"PYTHONPATH": str(absent_card.HERE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, lines]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_what_a_card_allows_is_allowed(ends):
    assert not {line: ends[line] for line in ALLOWED.split("\n") if ends[line]}


def test_what_a_card_refuses_is_refused(ends):
    assert not [line for line in REFUSED.strip().split("\n") if not ends[line]]
    sentences = ("same device", "to numpy", "device type for generator", "either on cpu")
    assert not [
        end
        for end in map(ends.get, REFUSED.strip().split("\n"))
        if not any(s in end for s in sentences)
    ]


def test_another_thread_sees_the_card_too(ends):
    assert ends[THREAD] == ""
