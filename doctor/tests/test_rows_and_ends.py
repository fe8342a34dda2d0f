"""Rows that met others than their own (D11, F21), rows read too early (F122), teachers that are woken (S12), targets
that went in (F33), heads that were never trained (S22), weights upside down (F45): each fault, its twin, and lines it
could be mistaken for. What a sigmoid cannot make (D35) is in test_members_and_dead_terms.py."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from train_doctor.echoes import ALIAS, MASK, echo

from .test_formulas import ROWS, net, told
from .test_meetings import named

STAYS = torch.Generator().manual_seed(3)


# ------------------------------------------------------------------------------------------------ D11
class Experts(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.before, self.router = how, nn.Linear(6, 6), nn.Linear(6, 3)
        self.experts, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 1)

    def forward(self, x):
        gate, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort()
        chunks = x[order].split(torch.bincount(expert, minlength=3).tolist())
        out = torch.cat([f(c) for f, c in zip(self.experts, chunks)])
        if self.how == "gates sorted as well":
            out = out * gate[order][:, None]
            return self.head(torch.zeros_like(x).index_add(0, order, out))
        if self.how == "put back":
            out = out[order.argsort()]
        if self.how == "written to its places":
            places = torch.empty_like(out)
            places[order] = out
            out = places
        if self.how == "all stay sorted":
            return self.head(x[order] + out), order
        return self.head(self.before(x) * gate[:, None] + out if self.how == "no gate" else out * gate[:, None])


EXPERTS = {"left sorted": True, "no gate": True, "put back": False, "written to its places": False}
EXPERTS |= {"gates sorted as well": False, "all stay sorted": False}


@pytest.mark.parametrize("how", EXPERTS)
def test_pieces_of_sorted_rows(how):
    def loss_of(model):
        x = torch.randn(64, 6)
        y, answer = x.sum(1, keepdim=True), model(x)
        return F.mse_loss(answer[0], y[answer[1]]) if isinstance(answer, tuple) else F.mse_loss(answer, y)

    assert told("D11", loss_of, Experts(how)) is EXPERTS[how]


class Pairs(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.picture, self.text = how, nn.Linear(8, 12), nn.GRU(5, 12, batch_first=True)

    def forward(self, pictures, texts, lengths):
        lengths, order = lengths.sort(descending=True)
        _, h = self.text(pack_padded_sequence(texts[order], lengths, batch_first=True))
        text = h[-1] if self.how in ("left sorted", "both sorted") else h[-1][order.argsort()]
        pictures = pictures[order] if self.how == "both sorted" else pictures
        return 5 * F.normalize(self.picture(pictures), dim=-1) @ F.normalize(text, dim=-1).t()


@pytest.mark.parametrize("how", ["left sorted", "sorted back", "both sorted"])
def test_pairs_of_pictures_and_sorted_texts(how):
    rows, lengths = torch.randn(ROWS, 8, generator=STAYS), torch.randint(2, 7, (ROWS,), generator=STAYS)

    def loss_of(model):
        logits = model(rows, rows[:, None, :5].repeat(1, 6, 1), lengths)
        asked = torch.arange(ROWS)
        return (F.cross_entropy(logits, asked) + F.cross_entropy(logits.t(), asked)) / 2

    assert told("D11", loss_of, Pairs(how)) is (how == "left sorted")


REPEATED = {
    "one laid, one by row": True,
    "pairs of a batch with itself": False,
    "both by row": False,
    "all pairs": False,
    "one number for all": False,
}


@pytest.mark.parametrize("how", REPEATED)
def test_groups_of_answers(how):
    asked = torch.randint(0, 9, (12, 2), generator=STAYS)

    def loss_of(model):
        rows = 4 if how == "all pairs" else 12
        x = asked[:rows]
        each = x.repeat_interleave(4, dim=0)
        answers = x if how == "pairs of a batch with itself" else x.clone()
        right = answers.repeat_interleave(4, dim=0) if how == "both by row" else answers.repeat(4, 1)
        if how == "one number for all":
            right = torch.full((12, 2), 3).repeat(4, 1)
        scores = model(torch.cat([each, torch.randint(0, 9, each.shape)], 1).float()).log_softmax(-1)
        drawn = scores.exp().multinomial(1)
        reward = (torch.cat([each, drawn], 1)[:, :2] == right).float().mean(1)
        return -(scores.gather(1, drawn).squeeze(1) * (reward - reward.mean())).mean()

    assert told("D11", loss_of, net(4, 3)) is REPEATED[how]


SLICES = {"one by the slice": True, "both by the piece": False, "neither": False, "of an order that was there": False}


@pytest.mark.parametrize("how", SLICES)
def test_a_piece_of_a_permutation_and_the_same_slice(how):
    x, there = torch.randn(96, 6, generator=STAYS), torch.randperm(96, generator=STAYS)

    def loss_of(model):
        with torch.no_grad():
            old = model(x)[:, 0] + 0.1
        order = (there if how == "of an order that was there" else torch.randperm(96))[32:64]
        one = slice(32, 64) if how == "neither" else order
        ratio = (model(x[one])[:, 0] - old[order if how == "both by the piece" else slice(32, 64)]).exp()
        return -(ratio * x[one].sum(1)).mean()

    assert told("D11", loss_of) is SLICES[how]


# ------------------------------------------------------------------------------------------------ F21
class Ratings(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.users, self.items, self.bias = nn.Embedding(40, 4), nn.Embedding(40, 4), nn.Embedding(40, 1)

    def forward(self, user, item):
        dot = (self.users(user) * self.items(item)).sum(1)
        bias = self.bias(user)
        if self.how == "a table of all pairs":
            return (self.users(user) @ self.items(item).t() + bias).diagonal()
        return dot + (bias if self.how == "a column" else bias.squeeze(1))


@pytest.mark.parametrize("how", ["a column", "squeezed", "a table of all pairs"])
def test_a_bias_that_is_a_column(how):
    def loss_of(model):
        user, item = torch.randint(40, (2, ROWS))
        return (model(user, item) - (user % 5).float()).pow(2).mean()

    assert told("F21", loss_of, Ratings(how)) is (how == "a column")


# ------------------------------------------------------------------------------------------------ S12
class Distiller(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        dropout = nn.Dropout(0.3)
        self.how, self.teacher = how, nn.Sequential(nn.Linear(6, 16), nn.ReLU(), dropout, nn.Linear(16, 3))
        self.teacher.requires_grad_(False)
        self.student = copy.deepcopy(self.teacher[::2]).requires_grad_(True) if how == "average" else net()

    def forward(self, x):
        if self.how == "put to sleep":
            self.teacher.eval()
        with torch.no_grad():
            soft = self.teacher(x).softmax(1)
        if self.how == "not the target":
            return F.cross_entropy(self.student(x), x[:, :3].argmax(1)) + 0 * soft.sum()
        return F.kl_div(self.student(x).log_softmax(1), soft, reduction="batchmean")


WOKEN = {"woken": True, "put to sleep": False, "not the target": False, "moves": False}


@pytest.mark.parametrize("how", WOKEN)
def test_a_teacher_inside_the_model(how):
    def loss_of(model):
        model.train()
        if how == "moves":
            with torch.no_grad():
                model.teacher[0].weight.lerp_(model.student[0].weight, 0.01)
                model.teacher[3].weight.mul_(0.999)
        return model(torch.randn(ROWS, 6))

    assert told("S12", loss_of, Distiller(how)) is WOKEN[how]


# ------------------------------------------------------------------------------------------------ F33
def test_labels_that_are_the_masked_tensor():
    ids, other = torch.arange(24).view(4, 6), torch.zeros(4, 6, dtype=torch.long)
    hidden = torch.zeros(4, 6, dtype=torch.bool).index_fill(1, torch.tensor([1, 4]), True)
    masked = ids.masked_fill(hidden, 99)
    assert echo([masked], masked.masked_fill(~hidden, -100), -100) == ALIAS
    assert echo([masked, other], masked.masked_fill(~hidden, -100), -100) == ALIAS  # kinds of places come last
    assert echo([masked, other], ids.masked_fill(hidden, -100), -100) == MASK
    assert echo([masked, other], ids.masked_fill(~hidden, -100), -100) == ""
    assert echo([masked], masked, -100) == ""  # all places are asked for: whatever it is, no mask


class Pixels(nn.Module):
    def __init__(self, kinds: str):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(1 if n == 0 else 8, 8, 3, padding=1) for n in range(len(kinds)))
        self.head = nn.Conv2d(8, 1, 1)
        for kind, layer in zip(kinds, self.layers):
            mask = torch.ones(3, 3)
            mask[1, 1 + (kind == "B") :] = 0
            mask[2:] = 0
            layer.register_buffer("mask", mask if kind != "all" else torch.ones(3, 3))

    def forward(self, x):
        for layer in self.layers:
            x = F.conv2d(x, layer.weight * layer.mask, layer.bias, padding=1).relu()
        return self.head(x)


PIXELS = {"B first": ("BB", True), "A first": ("AB", False), "shifted": ("BB", False), "another picture": ("BB", False)}


@pytest.mark.parametrize("how", PIXELS)
def test_a_masked_kernel_over_its_own_pixel(how):
    kinds, wrong = PIXELS[how]

    def loss_of(model):
        x = (torch.rand(16, 1, 8, 8) < 0.3).float()
        given = F.pad(x, (1, 0))[..., :-1] if how == "shifted" else x
        asked = x.flip(-1) if how == "another picture" else x
        return F.binary_cross_entropy_with_logits(model(given), asked)

    assert told("F33", loss_of, Pixels(kinds)) is wrong


# ------------------------------------------------------------------------------------------------ F122
class Judge(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.table, self.body, self.head = how, nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, ids, lengths):
        h = self.body(self.table(ids)).cumsum(1).tanh()
        values = self.head(h).squeeze(-1)
        first = (ids == 0).int().argmax(1) - 1
        at = {"first": first, "last": lengths - 2, "the middle": lengths // 2, "indexed": first}
        at["second"] = ((ids == 0).cumsum(1) < 2).sum(1) - 1
        at = at[self.how]
        if self.how == "indexed":
            return values[torch.arange(len(ids)), at]
        return values.gather(1, at[:, None]).squeeze(1)


def conversations(turns: int, rows: int = 24, pad: int = 0):
    texts = [[[*torch.randint(2, 20, (4 + n % 3,)).tolist(), 0] for _ in range(turns)] for n in range(rows)]
    texts = [torch.tensor(sum(text, [])) for text in texts]
    lengths = torch.tensor([len(text) for text in texts])
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad), lengths


READ = {("first", 2, 0): True, ("indexed", 2, 0): True, ("last", 2, 0): False, ("the middle", 2, 0): False}
READ |= {("first", 1, 0): False, ("first", 2, 1): False}  # one turn; a padding token of its own
READ |= {("second", 3, 0): False}  # a turn that is chosen


@pytest.mark.parametrize("how, turns, pad", READ)
def test_where_a_conversation_is_read(how, turns, pad):
    def loss_of(model):
        ids, lengths = conversations(turns, pad=pad)
        chosen, rejected = model(ids, lengths).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    assert told("F122", loss_of, Judge(how)) is READ[how, turns, pad]


# ------------------------------------------------------------------------------------------------ F45
ODDS = {"positives over negatives": True, "negatives over positives": False, "common labels": False, "one": False}


@pytest.mark.parametrize("how", ODDS)
def test_a_weight_for_each_label(how):
    rates = torch.tensor([0.1, 0.15, 0.2]) if how != "common labels" else torch.tensor([0.6, 0.5, 0.4])
    weight = rates / (1 - rates)
    weight = {"negatives over positives": 1 / weight, "one": torch.ones(3)}.get(how, weight)

    def loss_of(model):
        x = torch.randn(64, 6)
        asked = (torch.rand(64, 3) < rates).float()
        return F.binary_cross_entropy_with_logits(model(x), asked, pos_weight=weight)

    assert told("F45", loss_of) is ODDS[how]


# ------------------------------------------------------------------------------------------------ S22
class Config:
    num_labels, initializer_range = 3, 0.02


class BodyForSequenceClassification(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.idle = how == "idle"
        self.config, self.body, self.score = Config(), nn.Linear(6, 64), nn.Linear(64, 3, bias=how == "trained")
        self.body.lora_A, self.body.lora_B = nn.Linear(6, 2, bias=False), nn.Linear(2, 64, bias=False)
        nn.init.normal_(self.score.weight, std=0.1 if how == "of another size" else 0.02)
        for name, p in self.named_parameters():
            p.requires_grad_("lora" in name or how == "trains" and "score" in name)

    def forward(self, x):
        h = (self.body(x) + self.body.lora_B(self.body.lora_A(x))).tanh()
        return h[:, :3] if self.idle else self.score(h)


@pytest.mark.parametrize("how", ["frozen", "trains", "trained", "of another size", "idle"])
def test_a_new_head_beside_adapters(how):
    torch.manual_seed(0)  # one draw in some hundred lies beyond what the check allows

    def loss(model):
        x = torch.randn(ROWS, 6)
        return F.cross_entropy(model(x), x[:, :3].argmax(1))

    assert named("S22", BodyForSequenceClassification(how), loss, "new head") is (how == "frozen")


# ------------------------------------------------------------------------------------------------ F123
STEPS_OF = {"the first": True, "the mean": True, "of all": True, "its own": False, "from end to end": False}


def path(field, y, times, how: str):
    states, n = [y], times.shape[1] - 1
    for k in range(n):
        if how == "of all":
            h = times.diff(dim=1).mean()
        elif how == "the first":
            h = times[:, 1:2] - times[:, :1]
        elif how == "its own":
            h = times[:, k + 1 : k + 2] - times[:, k : k + 1]
        else:
            h = (times[:, -1:] - times[:, :1]) / n
        y = y + h * field(y)
        states.append(y)
    return y if how == "from end to end" else torch.stack(states, 1)


@pytest.mark.parametrize("how, even", [*((how, False) for how in STEPS_OF), ("the first", True)])
def test_one_step_for_all_times(how, even):
    gaps = torch.ones(64, 6) if even else torch.rand(64, 6, generator=STAYS) + 0.05
    times = torch.cat([torch.zeros(64, 1), gaps.cumsum(1)], 1)
    readings = times[..., None].sin().repeat(1, 1, 2)

    def loss_of(model):
        rows = torch.randint(64, (ROWS,))
        y, t = readings[rows], times[rows]
        asked = y[:, -1] if how == "from end to end" else y
        return F.mse_loss(path(model, y[:, 0], t, how), asked)

    assert told("F123", loss_of, net(2, 2)) is (STEPS_OF[how] and not even)


# ------------------------------------------------------------------------------------------------ F86
def corners(boxes, written: str):
    x, y, w, h = boxes.unbind(-1) if written == "unbound" else [boxes[:, n] for n in range(4)]
    return torch.stack([x - w / 2, y - 0.5 * h, x + w / 2, y + 0.5 * h], -1)


BOXES = {"from a corner": True, "from a centre": False, "in pixels": False, "cut off": False, "small": False}


@pytest.mark.parametrize("written", ["unbound", "by columns"])
@pytest.mark.parametrize("how", BOXES)
def test_boxes_read_from_a_centre(how, written):
    sizes = torch.rand(256, 2, generator=STAYS) * (0.02 if how == "small" else 0.4) + 0.1 * (how != "small")
    begins = torch.rand(256, 2, generator=STAYS) * (1 - sizes)
    boxes = torch.cat([begins + sizes / 2 * (how == "from a centre"), sizes], 1)
    if how == "cut off":  # centres of what a piece of a picture shows in part
        boxes = torch.cat([torch.rand(256, 2, generator=STAYS), sizes], 1)
    boxes = boxes * (64 if how == "in pixels" else 1)

    def loss_of(model):
        target = boxes[torch.randint(256, (ROWS,))]
        return (corners(model(torch.randn(ROWS, 6)).sigmoid(), "unbound") - corners(target, written)).abs().mean()

    assert told("F86", loss_of, net(6, 4)) is BOXES[how]


# ------------------------------------------------------------------------------------------------ F30
UNFOLDED = {"the other way": True, "as they were": False, "laid anew": False}


@pytest.mark.parametrize("how", UNFOLDED)
def test_frames_that_are_taken_apart_again(how):
    order = torch.arange(32).view(8, 4).t().reshape(-1)

    def loss_of(model):
        x = torch.randn(8, 4, 6)
        h = model(x.flatten(0, 1))
        films = (
            h[order].view(4, 8, 3) if how == "laid anew" else h.view(*((4, 8) if how == "the other way" else (8, 4)), 3)
        )
        return (films.mean(0) - x.sum(2).mean()).pow(2).mean()

    assert told("F30", loss_of) is UNFOLDED[how]


# ------------------------------------------------------------------------------------------------ F124
class Reader(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.table, self.head = how, nn.Embedding(20, 16), nn.Linear(16, 3)
        if "torch's layer" in how:
            self.layer = nn.MultiheadAttention(16, 2, batch_first=True)
        else:
            self.qkv = nn.Linear(16, 48)

    def forward(self, ids):
        h = self.table(ids)
        places = ids.shape[1]
        mask = torch.ones(places, places, dtype=torch.bool).tril()
        if "torch's layer" in self.how:
            hidden = None if "no mask" in self.how else ~mask
            h, _ = self.layer(h, h, h, attn_mask=hidden, need_weights=False)
            return self.head(h[:, 0] + (h.mean(1) if "mean" in self.how else 0.0))
        q, k, v = (part[:, None] for part in self.qkv(h).chunk(3, -1))
        if self.how == "by a mask":
            h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]
        elif self.how == "by hand":
            scores = (q @ k.transpose(-2, -1) / 4).masked_fill(~mask, float("-inf"))
            h = (scores.softmax(-1) @ v)[:, 0]
        else:
            h = F.scaled_dot_product_attention(q, k, v, is_causal=self.how != "all see all")[:, 0]
        if self.how == "the mean as well":
            return self.head(h[:, 0] + h[:, 1:].mean(1))
        return self.head(h[:, -1] if self.how == "the last" else h[:, 0])


FIRST = {"the first": True, "by a mask": True, "by hand": True, "the last": False, "all see all": False}
FIRST |= {"torch's layer": True, "torch's layer, no mask": False, "a mean of torch's layer": False}
FIRST |= {"the mean as well": False, "other tokens": False}


@pytest.mark.parametrize("how", FIRST)
def test_the_first_place_of_a_causal_network(how):
    def loss_of(model):
        ids = torch.randint(2, 20, (ROWS, 9))
        ids[:, 0] = 2 + torch.arange(ROWS) % 3 if how == "other tokens" else 1
        return F.cross_entropy(model(ids), ids[:, 3] % 3)

    assert told("F124", loss_of, Reader(how)) is FIRST[how]
