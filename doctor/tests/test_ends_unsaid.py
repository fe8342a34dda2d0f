"""Ends of episodes that no flag tells (F56 not-kept), and edges that are listed once (D45)."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from train_doctor.watchers.never_left import _ends

from .test_turned import said

PLACES = 9


class Corridor:
    """Walks to the right or the left; at both ends an episode is over."""

    def __init__(self, walkers: int):
        self.at = torch.randint(1, PLACES - 1, (walkers,))

    def step(self, action):
        reached = self.at + 2 * action - 1
        done = (reached == 0) | (reached == PLACES - 1)
        before, self.at = self.at, torch.where(done, torch.randint(1, PLACES - 1, reached.shape), reached)
        return before, reached, (reached == PLACES - 1).float(), done.float()


WAYS = {
    "as it is": True,
    "a table": True,
    "values of a critic": True,
    "double": True,
    "flags in a product": False,
    "flags in the discount": False,
    "written over": False,
    "numbers": False,
    "no ends": False,
    "of what goes on": False,
    "seldom": False,
}


@pytest.mark.parametrize("how", WAYS)
def test_states_that_are_never_left(how):
    torch.manual_seed(0)
    flags = "flags" in how or how == "written over"
    table, critic = how == "a table", how == "values of a critic"
    net = (
        nn.Embedding(PLACES, 2) if table else nn.Sequential(nn.Linear(PLACES, 24), nn.ReLU(), nn.Linear(24, 2 - critic))
    )
    target_net, env, memory = copy.deepcopy(net), Corridor(32), []
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def see(places):
        hot = places if table else F.one_hot(places, PLACES).float()
        return hot + 0.1 * torch.rand(len(places), 1) if how == "numbers" else hot

    def remember():
        action = torch.randint(0, 2, (32,))
        state, reached, reward, done = env.step(action)
        if how == "no ends":
            reached = torch.where(done > 0, env.at, reached)
        if how == "of what goes on":
            keep = done == 0
            state, action, reward, reached, done = (t[keep] for t in (state, action, reward, reached, done))
        memory.append((state, action, reward, reached, *([done] if flags else ())))

    for _ in range(40):
        remember()
    with doctor.watch(net, optimizer=optimizer, say=False) as report:
        for _ in range(10):
            remember()
            whole = [torch.cat(part) for part in zip(*memory)]
            pick = torch.randint(0, len(whole[0]), (8 if how == "seldom" else 96,))
            s, a, r, s2, *d = (t[pick] for t in whole)
            with torch.no_grad():
                after = target_net(see(s2))
                if critic:
                    after = after.squeeze(1)
                elif how == "double":
                    after = after.gather(1, net(see(s2)).argmax(1, keepdim=True)).squeeze(1)
                else:
                    after = after.max(1).values
                if how == "written over":
                    after[d[0] > 0] = 0
                if how == "flags in a product":
                    after = after * (1 - d[0])
                target = r + 0.9 * (1 - d[0]) * after if how == "flags in the discount" else r + 0.9 * after
            value = net(see(s)).squeeze(1) if critic else net(see(s)).gather(1, a[:, None]).squeeze(1)
            loss = F.smooth_l1_loss(value, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert ("F56" in said(report)) is WAYS[how], f"\n{report}"
    assert not report.faults


@pytest.mark.parametrize(
    "times, ends, found", [(10, 1, (1, 30, 360)), (2, 1, None), (10, 5, None)], ids=["one", "by chance", "too many"]
)
def test_what_counts_as_an_end(times, ends, found):
    """Of twelve states, each reached some times in each of three steps, the last ones are never left."""
    states = 1.0 + torch.arange(12)[:, None]
    reached = states.repeat(times, 1)
    assert _ends([(reached[(reached <= 12 - ends)[:, 0]], reached)] * 3) == found


EDGES = {
    "once": True,
    "once, downwards": True,
    "once, as a matrix": True,
    "once, in several graphs": True,
    "with loops": True,
    "both ways": False,
    "both ways, as a matrix": False,
    "numbers of no order": False,
    "a tree": False,
    "a grid": False,
    "a causal mask": False,
    "two sums": False,
    "few": False,
}


def edges_of(how: str, nodes: int):
    pairs = torch.triu(torch.rand(nodes, nodes) < 0.12, 1).nonzero().t()  # (2, edges)
    if how == "both ways":
        return torch.cat([pairs, pairs.flip(0)], dim=1)
    if how == "once, downwards":
        return pairs.flip(0)
    if how == "numbers of no order":
        return torch.randperm(nodes)[pairs]
    if how == "a tree":
        return torch.tensor([[int(torch.randint(0, child, ())) for child in range(1, nodes)], list(range(1, nodes))])
    if how == "a grid":
        at = torch.arange(nodes)
        return torch.cat([torch.stack([at[:-step], at[step:]]) for step in (1, 8)], dim=1)
    if how == "with loops":
        return torch.cat([pairs, torch.arange(nodes).repeat(2, 1)], dim=1)
    return pairs[:, :20] if how == "few" else pairs


@pytest.mark.parametrize("how", EDGES)
def test_edges_that_are_listed_once(how):
    torch.manual_seed(0)
    nodes = 64
    edges, labels = edges_of(how, nodes), torch.randint(0, 3, (nodes,))
    x = torch.randn(nodes, 8)
    dense = torch.zeros(nodes, nodes).index_put_((edges[1], edges[0]), torch.ones(()))
    if how == "both ways, as a matrix":
        dense = (dense + dense.T).clamp(max=1)
    if how == "a causal mask":
        dense = torch.ones(nodes, nodes).tril()
    if how == "once, in several graphs":
        dense, x = torch.triu(torch.rand(8, 16, 16) < 0.3, 1).float(), torch.randn(8, 16, 8)
        labels = torch.randint(0, 3, (128,))
    one, two = nn.Linear(8, 16), nn.Linear(16, 3)
    net = nn.ModuleList([one, two])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def spread(h):
        if how in ("once, as a matrix", "both ways, as a matrix", "a causal mask", "once, in several graphs"):
            return h + dense @ h
        src, dst = edges
        out = torch.zeros_like(h).index_add_(0, dst, h[src])
        return out + torch.zeros_like(h).index_add_(0, src, h[dst]) if how == "two sums" else out + h

    with doctor.watch(net, optimizer=optimizer, say=False) as report:
        for _ in range(10):
            out = two(torch.relu(spread(one(x))))
            loss = F.cross_entropy(spread(out).flatten(0, -2), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert ("D45" in said(report)) is EDGES[how], f"\n{report}"
    assert not report.faults
