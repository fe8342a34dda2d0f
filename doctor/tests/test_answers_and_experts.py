"""Answers compared across prompts, experts that share their weights over places, heads merged before they changed
places, angles rounded in 16 bits, and a reference that is the policy: each beside what it could be taken for."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor

WORDS, WIDE, PAIRS, LONG = 24, 16, 8, 12


def said(model, loss_of, steps=6) -> dict[str, str]:
    """The causes by check."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=steps, say=False) as report:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    assert not report.faults, report.faults
    return {f.check: f.diagnosis for f in report.findings}


# ------------------------------------------------------------------------------------------------ pairs (S61)
class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, 1)
        self.mix = nn.GRU(WIDE, WIDE, batch_first=True)

    def forward(self, ids):
        return self.head(self.mix(self.table(ids))[0][:, -1])


def pairs(beside: bool, prompt=4, begun=2):
    """Chosen and rejected answers to one prompt, side by side or half a batch apart. All prompts begin alike."""
    prompts = torch.cat([torch.ones(PAIRS, begun, dtype=torch.long), torch.randint(2, WORDS, (PAIRS, prompt))], 1)
    both = [torch.cat([prompts, torch.randint(2, WORDS, (PAIRS, 5))], 1) for _ in range(2)]
    return torch.stack(both, 1).flatten(0, 1) if beside else torch.cat(both)


CUTS = {
    "chunk": (lambda s: s.squeeze(-1).chunk(2), False),
    "split": (lambda s: torch.split(s, PAIRS), False),
    "slices": (lambda s: (s[:PAIRS], s[PAIRS:]), False),
    "view": (lambda s: s.view(2, -1).unbind(0), False),
    "every second": (lambda s: (s[0::2], s[1::2]), True),
    "rows of two": (lambda s: s.view(-1, 2).unbind(1), True),
    "columns": (lambda s: (s.reshape(-1, 2)[:, 0], s.reshape(-1, 2)[:, 1]), True),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("beside", [True, False])
def test_scores_of_one_prompt_are_compared(cut, beside):
    parts, of_neighbours = CUTS[cut]

    def loss_of(model):
        one, two = parts(model(pairs(beside)))
        return -F.logsigmoid(one - two).mean()

    cause = said(Scores(), loss_of).get("S61", "")
    wrong = "first half of the scores" if beside else "Scores that stand side by side"
    assert not cause if of_neighbours == beside else wrong in cause


def test_values_of_states_that_follow_each_other():
    """One step of eight walks and the next: neighbours in the batch are of one walk's start, and so are all pairs."""

    def loss_of(model):
        start = torch.ones(2 * PAIRS, 3, dtype=torch.long)
        states = torch.cat([start, torch.randint(WORDS, (2 * PAIRS, 4))], 1)
        now, then = model(states).chunk(2)
        return (now - then - 1).square().mean()

    assert "S61" not in said(Scores(), loss_of)


@pytest.mark.parametrize("meant", [False, True])
def test_prompts_that_come_again(meant):
    """Of three prompts, so that one pair in three is of one prompt by chance."""
    draw = torch.Generator().manual_seed(0)

    def loss_of(model):
        asked = (2 + torch.randint(3, (2 * PAIRS, 1), generator=draw)).repeat(1, 3)
        both = [torch.cat([asked, torch.randint(2, WORDS, (2 * PAIRS, 6), generator=draw)], 1) for _ in range(2)]
        scores = model(torch.stack(both, 1).flatten(0, 1)).squeeze(1)
        one, two = (scores[0::2], scores[1::2]) if meant else scores.chunk(2)
        return -F.logsigmoid(one - two).mean()

    assert ("S61" in said(Scores(), loss_of)) is not meant


def test_ranks_by_a_margin_loss():
    def loss_of(model):
        one, two = model(pairs(beside=True)).squeeze(1).chunk(2)
        return F.margin_ranking_loss(one, two, torch.ones(PAIRS), margin=0.5)

    assert "first half of the scores" in said(Scores(), loss_of)["S61"]


# ------------------------------------------------------------------------------------ experts (S33), heads (F30)
class Experts(nn.Module):
    def __init__(self, route):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, WORDS)
        self.router, self.experts = nn.Linear(WIDE, 4), nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))
        self.route = route

    def forward(self, ids):
        x = self.table(ids)
        weights = self.route(self.router(x))  # (B, T, 4)
        return self.head(x + sum(weights[..., i : i + 1] * expert(x).relu() for i, expert in enumerate(self.experts)))


def spread(weights, values, chosen, dim):
    return torch.zeros_like(weights).scatter(dim, chosen, values)


ROUTES = {
    "over the places": (lambda s: spread(w := s.softmax(1), *w.topk(2, -1), -1), True),
    "over the places, then to a sum of 1": (
        lambda s: (lambda w, top: spread(w, top[0] / top[0].sum(-1, keepdim=True), top[1], -1))(
            w := F.softmax(s, dim=1), torch.topk(w, 2)
        ),
        True,
    ),
    "over the experts": (lambda s: spread(w := s.softmax(-1), *w.topk(2, -1), -1), False),
    "experts choose": (lambda s: spread(w := s.softmax(-1), *w.topk(3, 1), 1), False),
    "pooled over the places": (lambda s: s.softmax(1), False),
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_router(route):
    ways, wrong = ROUTES[route]

    def loss_of(model):
        ids = torch.randint(WORDS, (6, LONG))
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    assert ("Shares were made along dim 1" in said(Experts(ways), loss_of).get("S33", "")) is wrong


class Heads(nn.Module):
    def __init__(self, attend, merge):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, WORDS)
        self.q, self.k, self.v = (nn.Linear(WIDE, WIDE) for _ in range(3))
        self.attend, self.merge = attend, merge

    def forward(self, ids):
        x = self.table(ids)
        q, k, v = (f(x).view(len(x), LONG, 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.head(x + self.merge(self.attend(q, k, v)))


def by_hand(q, k, v):
    return F.dropout(torch.softmax(q @ k.mT / 2, -1), 0.1) @ v


def by_einsum(q, k, v):
    return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)


MERGES = {
    "reshape": (lambda y: y.reshape(len(y), LONG, WIDE), True),
    "contiguous": (lambda y: y.contiguous().view(len(y), LONG, -1), True),
    "transpose": (lambda y: y.transpose(1, 2).reshape(len(y), LONG, WIDE), False),
    "permute": (lambda y: y.permute(0, 2, 1, 3).flatten(2), False),
}


@pytest.mark.parametrize("attend", [by_hand, by_einsum, F.scaled_dot_product_attention])
@pytest.mark.parametrize("merge", MERGES)
def test_heads_change_places_before_they_are_merged(attend, merge):
    way, wrong = MERGES[merge]

    def loss_of(model):
        ids = torch.randint(WORDS, (6, LONG))
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    assert ("F30" in said(Heads(attend, way), loss_of)) is wrong


SPLITS = {
    "queries and keys": (lambda x: x.view(len(x), 4, LONG, -1), 2, True),
    "with a transpose": (lambda x: x.view(len(x), LONG, 4, -1).transpose(1, 2), 2, False),
    "one tensor, in pieces of its own": (lambda x: x.view(len(x), 4, LONG, -1), 1, False),
}


class Split(nn.Module):
    def __init__(self, way, number):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, WORDS)
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(number))
        self.way = way

    def forward(self, ids):
        x = self.table(ids)
        heads = [self.way(layer(x)) for layer in self.layers]  # (B, 4, T, D) each
        y = by_hand(heads[0], heads[-1], heads[-1]) if len(heads) > 1 else heads[0].softmax(-1)
        return self.head(x + y.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("how", SPLITS)
def test_heads_are_split_where_they_lie(how):
    way, number, wrong = SPLITS[how]

    def loss_of(model):
        ids = torch.randint(WORDS, (6, LONG))
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    assert ("F30" in said(Split(way, number), loss_of)) is wrong


class Unfolded(nn.Module):
    """What one layer gives has no axes before it is cut."""

    def __init__(self):
        super().__init__()
        self.make, self.head = nn.Linear(6, LONG * WIDE), nn.Linear(WIDE, WORDS)

    def forward(self, z):
        return self.head(self.make(z).view(len(z), 4, LONG, -1).reshape(len(z), LONG, WIDE))


def test_numbers_of_one_layer_are_cut_twice():
    def loss_of(model):
        return F.cross_entropy(model(torch.randn(6, 6)).flatten(0, 1), torch.randint(WORDS, (6 * LONG,)))

    assert "F30" not in said(Unfolded(), loss_of)


# ------------------------------------------------------------------------------------ angles (S15), DPO (N14)
class Rotary(nn.Module):
    def __init__(self, dtype, after=torch.float32, length=400, filled=0):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, WORDS)
        steps = 1.0 / 10_000 ** (torch.arange(0, WIDE, 2) / WIDE)
        angles = torch.outer(torch.arange(length).to(dtype), steps.to(dtype)).repeat(1, 2)
        angles[len(angles) - filled :] = 0
        self.register_buffer("cos", angles.cos().to(after).float(), persistent=False)
        self.register_buffer("sin", angles.sin().to(after).float(), persistent=False)

    def forward(self, ids):
        x = self.table(ids)
        one, two = x.chunk(2, -1)
        length = ids.shape[1]
        q = x * self.cos[:length] + torch.cat([-two, one], -1) * self.sin[:length]
        return self.head(F.scaled_dot_product_attention(q, q, x, is_causal=True))


ROUNDED = {
    "angles in bf16": (lambda: Rotary(torch.bfloat16), 400, True),
    "in fp32": (lambda: Rotary(torch.float32), 400, False),
    "cosines in bf16": (lambda: Rotary(torch.float32, torch.bfloat16), 400, False),
    "angles in bf16, short texts": (lambda: Rotary(torch.bfloat16), 40, False),
    "angles in fp16, which count so far": (lambda: Rotary(torch.float16), 400, False),
    "a table that was filled up": (lambda: Rotary(torch.float32, filled=100), 400, False),
}


@pytest.mark.parametrize("rounded", ROUNDED)
def test_angles(rounded):
    make, length, wrong = ROUNDED[rounded]

    def loss_of(model):
        ids = torch.randint(WORDS, (2, length))
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    assert ("S15" in said(make(), loss_of)) is wrong


@pytest.mark.parametrize("how", ["by text", "by model", "a copy", "pairs of the first pass"])
def test_the_reference_of_another_loss(how):
    """The loss of IPO, and ratios of a policy that gave its answers itself."""
    model = Scores()
    other = copy.deepcopy(model) if how == "a copy" else model

    def loss_of(model):
        chosen, rejected = pairs(beside=False).chunk(2)
        one, two = model(chosen).squeeze(1), model(rejected).squeeze(1)
        with torch.no_grad():
            one_before, two_before = other(chosen).squeeze(1), other(rejected).squeeze(1)
        by_text = how == "by text"
        margin = (one - one_before) - (two - two_before) if by_text else (one - two) - (one_before - two_before)
        if how == "pairs of the first pass":
            return -(margin.exp() * torch.randn(len(margin))).mean()
        return (margin - 5.0).pow(2).mean()

    found = said(model, loss_of)
    assert ("Policy and reference give the same" in found.get("N14", "")) is how.startswith("by"), found


@pytest.mark.parametrize("ordered", ["by text", "by model"])
def test_a_reference_that_is_the_policy(ordered):
    """ln 2 for ever, and not because the texts have one score."""

    def loss_of(model):
        chosen, rejected = pairs(beside=False).chunk(2)
        one, two = model(chosen).squeeze(1), model(rejected).squeeze(1)
        with torch.no_grad():
            one_before, two_before = model(chosen).squeeze(1), model(rejected).squeeze(1)
        by_text, by_model = (one - one_before) - (two - two_before), (one - two) - (one_before - two_before)
        return -F.logsigmoid(by_text if ordered == "by text" else by_model).mean()

    assert "Policy and reference give the same" in said(Scores(), loss_of)["N14"]
