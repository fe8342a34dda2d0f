"""Programs with a wrong loss, and healthy ones that look alike."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import assert_healthy, assert_root, batches, lm, quiet


class Small(nn.Module):
    """A causal model as people write it: returns logits, or logits and loss."""

    def __init__(self, vocab=256, width=48, causal=True, diagonal=0, seed_shift=False):
        super().__init__()
        self.table, self.place = nn.Embedding(vocab, width), nn.Embedding(128, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.causal, self.diagonal, self.seed_shift = causal, diagonal, seed_shift

    def forward(self, idx, targets=None):
        if self.seed_shift:  # the input is moved inside, so that logits[t] predict idx[t]
            idx = F.pad(idx, (1, 0))[:, :-1]
        n = idx.shape[1]
        x = self.table(idx) + self.place(torch.arange(n))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mask = torch.ones(n, n, dtype=torch.bool).tril(self.diagonal) if self.causal else None
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def loop(model, loss_of, data, steps=4, lr=1e-3, **watch):
    """One backward a step; `loss_of(model, ids)` gives the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with contextlib.suppress(RuntimeError), doctor.watch(model, optimizer=optimizer, say=False, **watch) as report:
        for ids in data[:steps]:
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            optimizer.step()
    return report


def hf(loss_of, rows=4, length=32, **config):
    return lambda: loop(lm(**config), loss_of, batches(4, rows, length))


def own(loss_of, **options):
    return lambda: loop(Small(**options), loss_of, batches(4))


def ce(logits, targets, **options):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), **options)


def picked(logits, targets):
    return -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def shift(model, ids, k):
    logits = model(ids)
    logits = logits if torch.is_tensor(logits) else logits.logits
    return logits[:, : ids.shape[1] - k], ids[:, k:]


def chunked(model, ids):
    logits, targets = shift(model, ids, 1)
    pairs = zip(logits.reshape(-1, 256).chunk(3), targets.reshape(-1).chunk(3))
    return sum(F.cross_entropy(a, b, reduction="sum") for a, b in pairs) / targets.numel()


def smoothed(model, ids):
    return ce(*shift(model, ids, 1), label_smoothing=0.1)


def with_z(model, ids):
    logits, targets = shift(model, ids, 1)
    return ce(logits, targets) + 1e-2 * logits.logsumexp(-1).square().mean()


def several_ahead(model, ids):
    logits, targets = shift(model, ids, 1)
    return ce(logits, targets) + 0.3 * ce(logits[:, :-1], targets[:, 1:])


def masked_lm(model, ids):
    hole = torch.rand(ids.shape) < 0.3
    return ce(model(torch.where(hole, 2, ids)), torch.where(hole, ids, -100))


def metric(model, ids):
    logits, targets = shift(model, ids, 1)
    ce(logits.detach(), targets)
    return ce(logits, targets)


def kd(live, **options):
    teacher = lm(hidden=32).eval().requires_grad_(False)

    def loss(model, ids):
        out = model(input_ids=ids, labels=ids)
        with torch.no_grad():
            theirs = teacher(ids).logits
        mine = out.logits if live else out.logits.detach()
        kind = {"reduction": "batchmean"} | options
        flat = (mine.log_softmax(-1).flatten(0, 1), theirs.softmax(-1).flatten(0, 1))
        return 0.5 * out.loss + 0.5 * F.kl_div(*flat, **kind)

    return loss


def kd_by_hand(live):
    teacher = lm(hidden=32).eval().requires_grad_(False)

    def loss(model, ids):
        out = model(input_ids=ids, labels=ids)
        with torch.no_grad():
            theirs = teacher(ids).logits.log_softmax(-1)
        mine = (out.logits if live else out.logits.detach()).log_softmax(-1)
        return 0.3 * out.loss + 0.7 * (theirs.exp() * (theirs - mine)).sum(-1).mean()

    return loss


def kd_of_itself(model, ids):
    with torch.no_grad():
        theirs = model(ids).logits
    kl = F.kl_div(theirs.log_softmax(-1).flatten(0, 1), theirs.softmax(-1).flatten(0, 1), reduction="batchmean")
    return model(input_ids=ids, labels=ids).loss + kl


def no_grad(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss


def preference(model, ids):
    a, b = ids.chunk(2)
    gap = picked(*shift(model, b, 1)).sum(1) - picked(*shift(model, a, 1)).sum(1)
    return -F.logsigmoid(0.1 * gap).mean()


FAULTS = {
    "F1 rewrapped": ("F1", hf(lambda m, i: torch.tensor(m(input_ids=i, labels=i).loss.item(), requires_grad=True))),
    "F1 no_grad": ("F1", hf(no_grad)),
    "F1 detached": ("F1", own(lambda m, i: m(i, i)[1].detach())),
    "F1 new logits": ("F1", own(lambda m, i: ce(m(i).detach().requires_grad_(True)[:, :-1], i[:, 1:]))),
    "F2 dead kd": ("F2", hf(kd(False))),
    "F2 dead kd by hand": ("F2", hf(kd_by_hand(False))),
    "F2 kd of itself": ("F2", hf(kd_of_itself)),
    "F3 backwards": ("F3", own(lambda m, i: ce(m(i)[:, 1:], i[:, :-1]))),
    "F3 kd by vocabulary": ("F3", hf(kd(True, reduction="mean"))),
    "F3 twice, hf logits": ("F3", hf(lambda m, i: ce(*shift(m, i, 2)))),
    "F3 twice, own": ("F3", own(lambda m, i: ce(*shift(m, i, 2)))),
    "F3 twice, gather": ("F3", own(lambda m, i: picked(*shift(m, i, 2)).mean())),
    "F3 twice, xy": ("F3", own(lambda m, i: m(i[:, :-2], i[:, 2:])[1])),
    "F3 none, hf": ("F3", hf(lambda m, i: ce(m(i).logits, i))),
    "F3 none, own": ("F3", own(lambda m, i: m(i, i)[1])),
    "F3 none, gather": ("F3", own(lambda m, i: picked(m(i), i).mean())),
    "F3 none, nll": ("F3", own(lambda m, i: nn.NLLLoss()(m(i).log_softmax(-1).flatten(0, 1), i.flatten()))),
    "F3 none, 3-D": ("F3", own(lambda m, i: nn.CrossEntropyLoss()(m(i).transpose(1, 2), i))),
    "F3 sum": ("F3", hf(lambda m, i: ce(*shift(m, i, 1), reduction="sum"))),
    "F3 softmax too many": ("F3", own(lambda m, i: ce(m(i).softmax(-1)[:, :-1], i[:, 1:]))),
    "F3 no softmax": ("F3", own(lambda m, i: F.nll_loss(m(i)[:, :-1].flatten(0, 1), i[:, 1:].flatten()))),
    "F17": ("F17", hf(lambda m, i: m(input_ids=i[:, :-1], labels=i[:, 1:]).loss)),
    "F17 rolled": ("F17", hf(lambda m, i: m(input_ids=i, labels=F.pad(i[:, 1:], (0, 1), value=-100)).loss)),
    "F11": ("F11", own(lambda m, i: ce(*shift(m, i, 1)), causal=False)),
    "F11 by one": ("F11", own(lambda m, i: m(i[:, :-1], i[:, 1:])[1], diagonal=1)),
    "N17": ("N17", own(lambda m, i: ce(*shift(m, i, 1)) + (m(i).softmax(-1) * 0).log().mul(0).mean())),
}

HEALTHY = {
    "hf": hf(lambda m, i: m(input_ids=i, labels=i).loss),
    "gpt2": hf(lambda m, i: m(input_ids=i, labels=i).loss, family="gpt2"),
    "moe": hf(lambda m, i: m(input_ids=i, labels=i, output_router_logits=True).loss, family="mixtral"),
    "hf logits": hf(lambda m, i: ce(*shift(m, i, 1))),
    "own": own(lambda m, i: ce(*shift(m, i, 1))),
    "xy": own(lambda m, i: m(i[:, :-1], i[:, 1:])[1]),
    "xy outside": own(lambda m, i: ce(m(i[:, :-1]), i[:, 1:])),
    "gather": own(lambda m, i: picked(m(i[:, :-1]), i[:, 1:]).mean()),
    "summed and divided": own(lambda m, i: ce(*shift(m, i, 1), reduction="sum") / i[:, 1:].numel()),
    "chunked": own(chunked),
    "smoothing": own(smoothed),
    "z-loss": own(with_z),
    "several ahead": own(several_ahead),
    "masked lm": own(masked_lm, causal=False),
    "moved inside": own(lambda m, i: m(i, i)[1], seed_shift=True),
    "metric": own(metric),
    "distillation": hf(kd(True)),
    "distillation by hand": hf(kd_by_hand(True)),
    "a constant": hf(lambda m, i: m(input_ids=i, labels=i).loss + 3.0),
    "preference": hf(preference),
    "pure bf16 loss": lambda: loop(lm(), lambda m, i: ce(*(shift(m, i, 1))).bfloat16().float(), batches(4)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_named(name):
    check, program = FAULTS[name]
    assert_root(quiet(program), check)


@pytest.mark.parametrize("name", HEALTHY)
def test_the_healthy_program_is_left_alone(name):
    assert_healthy(quiet(HEALTHY[name]))


def accumulating(loss_of, lengths=(16, 16, 16, 16), clip=False, by_hand=1, model=lm):
    """Micro-batches of these numbers of tokens in a row, one step."""

    def program():
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        stream = iter(batches(4 * len(lengths), 4, 32))
        with doctor.watch(net, optimizer=optimizer, say=False) as report:
            for _ in range(4):
                micro = [(next(stream), n) for n in lengths]
                labels = [torch.where(torch.arange(32) < n, ids, -100) for ids, n in micro]
                total = sum(int((x[:, 1:] != -100).sum()) for x in labels)
                for (ids, _), label in zip(micro, labels):
                    loss_of(net, ids, label, len(lengths), total).backward()
                if by_hand > 1:
                    for p in net.parameters():
                        p.grad.div_(by_hand)
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return report

    return program


def whole(net, ids, labels, k, total):
    return net(input_ids=ids, labels=labels).loss


def divided(net, ids, labels, k, total):
    return net(input_ids=ids, labels=labels).loss / k


def by_tokens(net, ids, labels, k, total):
    return net(input_ids=ids, labels=labels, num_items_in_batch=total).loss


@pytest.mark.parametrize(
    "program", [accumulating(whole), accumulating(whole, (16, 16)), accumulating(divided, (31, 4, 8, 30))]
)
def test_accumulation_at_the_wrong_scale(program):
    assert_root(quiet(program), "N6")


@pytest.mark.parametrize(
    "program",
    [
        accumulating(divided),
        accumulating(by_tokens, (31, 4, 8, 30), clip=True),
        accumulating(whole, by_hand=4),
        accumulating(whole, by_hand=4, clip=True),
    ],
)
def test_accumulation_as_it_should_be(program):
    assert_healthy(quiet(program))


def test_two_losses_of_one_batch_are_no_accumulation():
    def program():
        net = lm()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        with doctor.watch(net, optimizer=optimizer, say=False) as report:
            for ids in batches(4):
                optimizer.zero_grad()
                ce(*shift(net, ids, 1)).backward()
                smoothed(net, ids).backward()
                optimizer.step()
        return report

    assert_healthy(quiet(program))


def test_declared_terms():
    def program(alive):
        net = lm()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        with doctor.watch(net, optimizer=optimizer, say=False) as report:
            for ids in batches(4):
                logits, targets = shift(net, ids, 1)
                main, extra = ce(logits, targets), (logits if alive else logits.detach()).square().mean()
                report.terms(ce=main, extra=extra)
                optimizer.zero_grad()
                (main + 0.1 * extra).backward()
                optimizer.step()
        return report

    assert_root(quiet(lambda: program(False)), "F2")
    assert_healthy(quiet(lambda: program(True)))


def test_the_first_loss_of_an_untrained_model():
    def program(scale):
        net = Small()
        with torch.no_grad():
            net.head.weight.mul_(scale)
        return loop(net, lambda m, i: ce(*shift(m, i, 1)), batches(4), from_scratch=True)

    assert_root(quiet(lambda: program(20)), "F4")
    assert_healthy(quiet(lambda: program(0.1)))
