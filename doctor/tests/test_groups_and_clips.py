"""Gradients that a clip makes 0 (B4), rounded weights (N3), an average that is left in the model (N36), groups of
answers to other prompts (S61), and an attention's dropout in eval mode (S24)."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from train_doctor.thrown_back import _left

IN, CLASSES = 12, 5
fixed = torch.Generator().manual_seed(5)
X, W = torch.randn(512, IN, generator=fixed), torch.randn(IN, CLASSES, generator=fixed)
Y = (X @ W).argmax(1)


def watched(model, loss, optimizer=None, clip=None, after=None, before=None, loops=12, clear=True, **how):
    """The report of a loop that is right but for what it is given."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=2e-3)
    with doctor.watch(model, optimizer=optimizer, say=False, **how) as report:
        for i in range(loops):
            if before is not None:
                before(i)
            value = loss(i)
            optimizer.zero_grad()
            value.backward()
            if not clear:
                optimizer.zero_grad()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if after is not None:
                after(i)
    assert not report.faults, report.faults
    return report


def of(model):
    def loss(i):
        rows = torch.arange(32 * i, 32 * i + 32) % len(X)
        return F.cross_entropy(model(X[rows]), Y[rows])

    return loss


def faults(report) -> set[str]:
    return {f"{f.check} {f.name}" for f in report.findings if f.severity != doctor.NOTE}


def checks(report) -> set[str]:
    return {f.check for f in report.findings if f.severity != doctor.NOTE}


def net(width=32, out=CLASSES, ins=IN):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(ins, width), nn.Tanh(), nn.Linear(width, out))


# ---------------------------------------------------------------- B4 clipped-away
class Grows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


CLIPS = {  # which steps have gradients whose norm overflows, steps that are watched, what is said
    "always": (lambda i: True, 10, True),
    "mostly": (lambda i: i % 4, 10, True),
    "now and then": (lambda i: i % 4 == 1, 10, False),
    "two steps": (lambda i: True, 2, False),
    "never": (lambda i: False, 10, False),
}


@pytest.mark.parametrize("how", CLIPS)
def test_gradients_that_a_clip_makes_zero(how):
    bad, steps, told = CLIPS[how]
    model = net()

    def loss(i):
        h = Grows.apply(model[0](X[:64]), 1e22 if bad(i) else 1.0)
        return F.cross_entropy(model[2](model[1](h)), Y[:64])

    report = watched(model, loss, clip=1.0, steps=steps)
    found = [f for f in report.findings if f.check == "B4"]
    assert bool(found) == told
    assert not {"N2", "B3"} & checks(report)
    if told:
        assert "0." in found[0].diagnosis and "divides" in found[0].diagnosis


@pytest.mark.parametrize("factor", [1e15, 1e3])
def test_gradients_that_grow_on_their_way_back(factor):
    model = net()

    def loss(i):
        h = Grows.apply(model[0](X[:64]), factor)
        return F.cross_entropy(model[2](model[1](h)), Y[:64])

    report = watched(model, loss, clip=1e-3)
    found = [f.diagnosis for f in report.findings if f.check == "B6"]
    assert any("grow in each layer" in words for words in found) is (factor > 1e9), f"\n{report}"


def test_gradients_that_are_cleared_before_the_step_are_still_named():
    model = net()
    assert "N2" in checks(watched(model, of(model), clip=1.0, clear=False))


# ---------------------------------------------------------------- N3 rounded-in-place
def by_row(w, bits=4):
    scale = w.flatten(1).abs().amax(1).view(-1, *(1,) * (w.dim() - 1)) / (2 ** (bits - 1) - 1)
    return (w / scale).round() * scale


def by_group(w, size=64):
    groups = w.reshape(-1, size)
    return by_row(groups, 3).view_as(w)


def pruned(w):
    return w * (w.abs() > w.abs().flatten().kthvalue(int(0.95 * w.numel())).values)


WRITTEN = {
    "by row": (by_row, True),
    "by group": (by_group, True),
    "signs": (lambda w: w.sign() * w.abs().mean(), True),
    "put back": (by_row, False),
    "pruned": (pruned, False),
    "clamped": (lambda w: w.clamp(-1e-3, 1e-3), False),
    "all one": (torch.ones_like, False),
    "normalised": (lambda w: w / w.norm(dim=1, keepdim=True), False),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_weights_that_are_rounded_in_place(how):
    change, told = WRITTEN[how]
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(IN, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, CLASSES)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def before(i):
        kept[:] = [model[2].weight.data.clone()]
        model[2].weight.data = change(model[2].weight.data)

    def loss(i):
        value = of(model)(i)
        value.register_hook(lambda g: put_back())
        return value

    def put_back():
        if how == "put back":  # between the forward and the step, as BinaryConnect does
            model[2].weight.data = kept[0]

    report = watched(model, loss, optimizer=optimizer, before=before)
    assert any("rounded" in f.diagnosis for f in report.findings if f.check == "N3") == told


# ---------------------------------------------------------------- N36 left-in-place
RETURNS = {
    "left": True,
    "left, all steps alike": True,
    "restored": False,
    "lookahead": False,
    "best": False,
    "latest": False,
    "shrunk": False,
    "accelerated": False,
    "every step": False,
    "no validation": False,
    "after a rise": False,
    "at the end": False,
    "several steps each": False,
}


@pytest.mark.parametrize("how", RETURNS)
def test_an_average_that_is_left_in_the_model(how):
    model = net()
    ps, states = list(model.parameters()), []
    optimizer = torch.optim.SGD(ps, lr=0.5 if how == "after a rise" else 0.05, momentum=0.5)
    first = [p.detach().clone() for p in ps]
    average = copy.deepcopy(model)
    every = 1 if how == "every step" else 10 if how == "at the end" else 5

    @torch.no_grad()
    def put(new):
        for p, q in zip(ps, new):
            p.copy_(q)

    @torch.no_grad()
    def after(i):
        states.append([p.clone() for p in ps])
        if how == "left, all steps alike":  # a mean of the first state, and a little of each
            for n, (a, f) in enumerate(zip(average.parameters(), first)):
                a.copy_(0.8 * f + 0.2 * torch.stack([s[n] for s in states]).mean(0))
        else:
            for a, p in zip(average.parameters(), ps):
                a.lerp_(p, 0.03)
        if (i + 1) % every:
            return
        kept = states[-1]
        if how in ("left", "restored", "no validation", "every step", "after a rise", "several steps each"):
            put(average.parameters())
        elif how == "left, all steps alike":
            model.load_state_dict(average.state_dict())
        elif how == "lookahead":
            put([0.7 * f + 0.3 * p for f, p in zip(first, ps)])
        elif how == "best":
            put(states[-4])
        elif how == "latest":
            put([torch.stack(s).mean(0) for s in zip(*states[-3:])])
        elif how == "shrunk":
            put([0.4 * p + 0.01 * torch.randn_like(p) for p in ps])
        elif how == "accelerated":
            put([f + 0.3 * (a - f) + 0.2 * (c - b) for f, a, b, c in zip(first, states[-4], states[-3], states[-2])])
        elif how == "at the end":
            put(average.parameters())
        if how != "no validation":
            model(X)
        if how == "restored":
            put(kept)

    def loss(i):
        if how == "several steps each" and i:
            optimizer.step()
        return of(model)(i) * (1 + i * (how == "after a rise"))

    report = watched(model, loss, optimizer=optimizer, after=after, loops=10 if how == "at the end" else 12)
    found = [f for f in report.findings if f.check == "N36"]
    assert bool(found) == RETURNS[how], found
    if found:
        assert found[0].name == "average-goes-back" and "validation" in found[0].diagnosis


def test_few_numbers_are_a_mean_of_anything():
    torch.manual_seed(0)
    states = list(torch.rand(6, 4, dtype=torch.float64))
    now = sum(states) / 6 + 0.3 * (states[0] - states[-1])
    assert _left(now, states) is None
    states = list(torch.rand(6, 64, dtype=torch.float64))
    now = sum(states) / 6 + 0.3 * (states[0] - states[-1])
    assert _left(now, states) is not None
    assert _left(now * torch.nan, states) is None


# ---------------------------------------------------------------- S61
GROUPS = {  # how the answers lie, how the baseline is made
    "tiled": ("tile", "group", True),
    "tiled by cat": ("cat", "others", True),
    "tiled, mean laid out": ("tile", "laid out", True),
    "side by side": ("beside", "group", False),
    "tiled, over the other axis": ("tile", "across", False),
    "side by side, over the other axis": ("beside", "across", True),
    "other prompts each, over the other axis": ("none", "across", False),
    "two prompts side by side, over the other axis": ("two beside", "across", False),
    "tiled, for a log": ("tile", "log", False),
    "tiled, one by one": ("tile", "slices", True),
    "side by side, one by one": ("beside", "slices", False),
    "side by side, one by one in strides": ("beside", "strides", True),
    "tiled, one by one in strides": ("tile", "strides", False),
    "side by side, one stride alone": ("beside", "one", False),
    "tiled, shares of a batch": ("tile", "shares", False),
    "other prompts each": ("none", "group", False),
    "two prompts": ("two", "group", False),
}


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("how", GROUPS)
def test_groups_of_answers_to_other_prompts(how, text):
    lie, make, told = GROUPS[how]
    torch.manual_seed(0)
    table = nn.Embedding(20, 16)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(80, 6)) if text else net(out=6, ins=5)
    size, count = 4, 2 if "two" in lie else 6
    log = []

    def loss(i):
        prompts = torch.randint(0, 20, (count, 5))
        prompts[:, 0] = 1
        if "beside" in lie:
            ids = prompts.repeat_interleave(size, 0)
        elif lie == "none":
            ids = torch.randint(0, 20, (count * size, 5))
        else:
            ids = torch.cat([prompts] * size) if lie == "cat" else prompts.repeat(size, 1)
        logp = model(ids if text else ids.float()).log_softmax(1)
        action = torch.multinomial(logp.detach().exp(), 1)[:, 0]
        rewards = (action == ids[:, 1] % 6).float() + torch.rand(len(ids))
        if make == "group":
            r = rewards.view(-1, size)
            advantage = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()
        elif make == "others":
            r = rewards.reshape(count, size)
            advantage = (r - (r.sum(dim=1, keepdim=True) - r) / (size - 1)).flatten()
        elif make == "laid out":
            advantage = rewards - rewards.view(-1, size).mean(dim=1).repeat_interleave(size, dim=0)
        elif make == "across":
            r = rewards.view(size, -1)
            advantage = (r - r.mean(0, keepdim=True)).flatten()
        elif make == "shares":
            r = rewards.view(2, -1)
            advantage = (r - r.mean(1, keepdim=True)).flatten()
        elif make in ("slices", "strides", "one"):
            near = make == "slices"
            groups = [slice(k * size, (k + 1) * size) if near else slice(k, None, count) for k in range(count)]
            advantage = rewards.clone()
            for rows in groups[: 1 if make == "one" else count]:
                advantage[rows] = rewards[rows] - rewards[rows].mean()
        else:
            log.append(rewards.view(-1, size).mean(1))
            advantage = rewards - rewards.mean()
        return -(logp[range(len(ids)), action] * advantage).mean()

    assert ("S61" in checks(watched(model, loss))) == told


# ---------------------------------------------------------------- S24 attention
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.dropout = 0.2
        self.drop = nn.Dropout(0.2)
        self.calm = nn.Dropout(0.1)

    def heads(self, x):
        return self.qkv(x).view(len(x), -1, 2, 12).transpose(1, 2).split(4, -1)


class Always(Attention):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout).transpose(1, 2).flatten(2))


class OfAModule(Attention):
    def forward(self, x):
        q, k, v = self.heads(x)
        h = F.scaled_dot_product_attention(q, k, v, None, self.drop.p)
        return self.out(h.transpose(1, 2).flatten(2))


class Computed(Attention):
    def share(self):
        return 0.2

    def forward(self, x):
        q, k, v = self.heads(x)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=self.share())
        return self.out(h.transpose(1, 2).flatten(2))


class Right(Attention):
    def forward(self, x):
        q, k, v = self.heads(x)
        p = self.dropout if self.training else 0.0
        return self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2))


class OwnTrain(Always):
    def train(self, mode=True):
        self.dropout = 0.2 if mode else 0.0
        return super().train(mode)


class Property(Attention):
    def __init__(self):
        super().__init__()
        del self.dropout
        self.p = 0.2

    def __getattr__(self, name):
        return (self.p if self.training else 0.0) if name == "dropout" else super().__getattr__(name)

    forward = Always.forward


class Told(Attention):
    def forward(self, x, p=None):
        q, k, v = self.heads(x)
        p = self.dropout if p is None else p
        return self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2))


class Off(Always):
    def __init__(self):
        super().__init__()
        self.dropout = 0.0


def attend(q, k, v, p):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p)


class ByAFunction(Attention):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out(attend(q, k, v, self.dropout if self.training else 0.0).transpose(1, 2).flatten(2))


ATTENDING = {  # whether the program evaluates, and how
    "never evaluated": (Always, "", True),
    "of a module": (OfAModule, "", True),
    "computed, evaluated": (Computed, "eval", True),
    "computed": (Computed, "", False),
    "told, evaluated": (Told, "eval", True),
    "told, drawn several times": (Told, "draws", False),
    "drawn several times": (Always, "draws", False),
    "dropouts awake": (Told, "awake", False),
    "with gradients": (Told, "gradients", False),
    "right": (Right, "eval", False),
    "a train() of its own": (OwnTrain, "eval", False),
    "asked for": (Property, "eval", False),
    "off": (Off, "eval", False),
    "by a function": (ByAFunction, "eval", False),
}


@pytest.mark.parametrize("how", ATTENDING)
def test_attention_that_drops_in_eval_mode(how):
    kind, evaluated, told = ATTENDING[how]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), kind(), nn.Linear(8, 20))
    held = torch.randint(0, 20, (16, 6))

    def loss(i):
        ids = torch.randint(0, 20, (16, 6))
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    def after(i):
        if not evaluated:
            return
        model.eval()
        if evaluated == "awake":
            model[1].calm.train()
        with torch.set_grad_enabled(evaluated == "gradients"):
            for _ in range(3 if evaluated == "draws" else 1):
                model(held)
        model.train()

    assert ("S24" in checks(watched(model, loss, after=after))) == told


def test_a_step_without_answers():
    """No group was sampled: there is nothing to compare, and nothing fails."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(_):
        none = torch.zeros(0, 6)
        rewards = torch.zeros(0).view(-1, 4)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        x = torch.randn(16, 6)
        return (model(none).sum(1) * advantages).sum() + F.cross_entropy(model(x), x[:, :4].argmax(1))

    watched(model, loss)  # which asserts that nothing of the watch failed
