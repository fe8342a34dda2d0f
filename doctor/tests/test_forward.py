"""Programs whose forward goes wrong, and healthy ones that look alike."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import assert_healthy, assert_root, batches, lm, quiet
from tests.test_labels import PAD, Words, by_mask, hf, padded, train
from tests.test_loss import Small, ce


def packed(mask=None, cache=False, family="llama", resets=True, own=None):
    """Rows of three documents whose positions begin anew."""

    def program():
        net = lm(family)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        places = torch.cat([torch.arange(10), torch.arange(12), torch.arange(10)]) if resets else torch.arange(32)
        kind = torch.repeat_interleave(torch.arange(3), torch.tensor([10, 12, 10]))
        with doctor.watch(net, optimizer=optimizer, say=False) as report:
            for ids in batches(4):
                extra = {}
                if mask == "ones":
                    extra["attention_mask"] = torch.ones_like(ids)
                elif mask == "blocks":
                    same = (kind[:, None] == kind[None]) & torch.ones(32, 32).tril().bool()
                    extra["attention_mask"] = same[None, None].expand(len(ids), 1, 32, 32)
                places_ = places[None].expand(len(ids), -1)
                out = net(input_ids=ids, position_ids=places_, labels=ids, use_cache=cache, **extra)
                optimizer.zero_grad()
                out.loss.backward()
                optimizer.step()
        return report

    return program


class Masked(Small):
    """A model with a padding mask of its own making."""

    def __init__(self, fill=None, obey=True):
        super().__init__()
        self.fill, self.obey = fill, obey

    def forward(self, idx, attention_mask=None):
        n = idx.shape[1]
        x = self.table(idx) + self.place(torch.arange(n))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        see = torch.ones(n, n, dtype=torch.bool).tril()[None].expand(len(idx), n, n)
        if self.obey:
            see = see & (attention_mask != 0)[:, None, :]
        scores = (q @ k.transpose(1, 2) / 7).masked_fill(~see, self.fill)
        return self.head(self.norm(x + self.out(scores.softmax(-1) @ v)))


class Steep(nn.Module):
    """A layer that takes the logarithm of what is not positive."""

    def __init__(self):
        super().__init__()
        self.small, self.log = Small(), Log()

    def forward(self, idx):
        return self.log(self.small(idx))


class Log(nn.Module):
    def forward(self, x):
        return x.log()


def masked(**options):
    def loss(m, i, a):
        return ce(m(i, attention_mask=a)[:, :-1], torch.where(a != 0, i, -100)[:, 1:])

    return lambda: train(loss, padded(left=True), lambda: Masked(**options))


def unmasked(family="llama", left=True):
    """The mask is used for the labels and not given to the model."""

    def loss(m, i, a):
        return m(input_ids=i, labels=by_mask(i, a)).loss

    return lambda: train(loss, padded(left=left), lambda: lm(family), Words())


def vocabulary_filled():
    """Logits of a vocabulary that was filled up are minus infinity on purpose."""

    def loss(m, i, a):
        logits = m(i)
        logits = torch.where(torch.arange(256) < 250, logits, -torch.inf)
        return ce(logits[:, :-1], i[:, 1:])

    return train(loss, [(ids.clamp(max=249), None) for ids in batches(4)], Small)


def prefix(model):
    """A prefix that may see all of itself, which is not asked for."""

    def loss(m, i, a):
        return ce(m(i)[:, 10:-1], i[:, 11:])

    return train(loss, [(ids, None) for ids in batches(4)], model)


class Prefix(Small):
    def forward(self, idx, targets=None):
        n = idx.shape[1]
        x = self.table(idx) + self.place(torch.arange(n))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        see = torch.ones(n, n, dtype=torch.bool).tril()
        see[:, :11] = True
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=see))
        return self.head(self.norm(x))


FAULTS = {
    "F5 log": ("F5", lambda: train(lambda m, i, a: ce(m(i)[:, :-1], i[:, 1:]), padded(), Steep)),
    "F5 left pad": ("F5", masked(fill=-torch.inf)),
    "F12 ones": ("F12", packed("ones")),
    "F12 cache": ("F12", packed(cache=True)),
    "F12 qwen3 ones": ("F12", packed("ones", family="qwen3")),
    "F13 ignored": ("F13", masked(fill=-1e9, obey=False)),
    "F13 not given": ("F13", unmasked()),
}

HEALTHY = {
    "packed": packed(),
    "packed in blocks": packed("blocks"),
    "end to end": packed("ones", cache=True, resets=False),
    "masked": masked(fill=-1e9),
    "right padding without a mask": unmasked(left=False),
    "left padding, masked": lambda: train(hf(by_mask), padded(left=True), tokenizer=Words(pad=PAD)),
    "vocabulary filled": vocabulary_filled,
    "prefix": lambda: prefix(Prefix),
    "dropout": lambda: train(hf(by_mask), padded(), lambda: lm("gpt2", resid_pdrop=0.1, attn_pdrop=0.1).train()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_named(name):
    check, program = FAULTS[name]
    assert_root(quiet(program), check)


@pytest.mark.parametrize("name", HEALTHY)
def test_the_healthy_program_is_left_alone(name):
    assert_healthy(quiet(HEALTHY[name]))


def test_the_first_broken_module_is_named():
    report = quiet(FAULTS["F5 log"][1])
    assert "log (Log" in report.root.observed and "logarithm" in report.root.diagnosis


def test_replays_leave_no_trace():
    def program(watching):
        net = lm("gpt2", resid_pdrop=0.2).train()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        losses = []
        with doctor.watch(net, say=False) if watching else contextlib.nullcontext():
            for ids, mask in padded():
                loss = net(input_ids=ids, attention_mask=mask, labels=by_mask(ids, mask)).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses + [torch.rand(()).item()]

    assert quiet(lambda: program(True)) == quiet(lambda: program(False))
