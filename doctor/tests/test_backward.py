"""Programs in which part of a model gets no gradient, each next to one where that is as it should be."""

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import train_doctor as doctor
from tests.bench import VOCABULARY, assert_healthy, assert_root, batches, lm, quiet


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    """A model by hand; `cut` says what is done to the stream after the first block."""

    def __init__(self, width: int = 32, layers: int = 3, cut: str = "", reentrant: bool | None = None):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.spare = nn.ModuleList(Block(width) for _ in range(2))  # experts that no token goes to
        self.pooler = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.cut, self.reentrant = cut, reentrant

    def forward(self, ids):
        x = self.table(ids)
        if self.cut == "table":
            x = x.detach()
        for number, block in enumerate(self.blocks):
            if self.cut == "no_grad" and number < 2:
                with torch.no_grad():
                    x = block(x)
            elif self.reentrant is not None:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
            if self.cut == "detach" and number == 1:
                x = x.detach()
            if self.cut == "data" and number == 1:
                x = torch.tensor(x.data.tolist())
        if self.cut == "pooler":
            self.pooled = self.pooler(x[:, -1])
        return self.head(x)


def by_hand(*, frozen: str = "", lr: float = 1e-3, rounds: int = 3, anchored: bool = False, **shape):
    def program():
        model = Plain(**shape)
        for name, p in model.named_parameters():
            p.requires_grad_(not (frozen and name.startswith(tuple(frozen.split()))))
        live = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(live, lr=lr)
        with doctor.watch(model, say=False) as report:
            for ids in batches(rounds):
                if anchored:  # a reference pass, which makes torch warn
                    with torch.no_grad():
                        model(ids)
                logits = model(ids)[:, :-1]
                loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return report

    return program


@pytest.mark.parametrize("cut", ["detach", "data", "no_grad", "table"])
def test_cut_inside_the_model(cut):
    assert_root(quiet(by_hand(cut=cut)), "B1")
    assert_root(quiet(by_hand(cut=cut, width=48, layers=4, rounds=5)), "B1")


def test_reentrant_checkpoint_behind_frozen_inputs():
    assert_root(quiet(by_hand(frozen="table", reentrant=True)), "S10")
    assert_root(quiet(by_hand(frozen="table blocks.0", reentrant=True)), "S10")


@pytest.mark.parametrize(
    "shape",
    [
        {"reentrant": True},
        {"reentrant": False, "frozen": "table"},
        {"reentrant": True, "frozen": "table blocks"},
        {"reentrant": True, "anchored": True},
        {"frozen": "table blocks.0 blocks.1"},
        {},
    ],
)
def test_parts_that_may_have_no_gradient(shape):
    assert_healthy(quiet(by_hand(**shape)))


def test_an_unused_pooler_is_a_warning():
    assert_healthy(quiet(by_hand(cut="pooler")), warnings_allowed=("B1",))  # its output may be meant to be used


def adapted(
    *, zero: bool = False, hook: bool = True, reentrant: bool | None = None, rounds: int = 4, dead: bool = False
):
    def program():
        base = lm(hidden=32)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        model = peft.get_peft_model(base, config)
        model.train()
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            if not hook:
                base.disable_input_require_grads()
        for name, p in model.named_parameters():
            if zero and "lora_A" in name:
                nn.init.zeros_(p)
            if "lm_head" in name and not hook:
                p.requires_grad_(True)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        with doctor.watch(model, optimizer=optimizer, say=False) as report:
            for ids in batches(rounds):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                if dead:
                    loss = loss.detach() + sum(p.sum() * 0 for p in model.parameters() if p.requires_grad)
                optimizer.zero_grad()
                try:
                    loss.backward()
                except RuntimeError:  # nothing requires a gradient
                    break
                optimizer.step()
        return report

    return program


def test_adapters():
    assert_root(quiet(adapted(zero=True)), "B3")
    assert_root(quiet(adapted(dead=True)), "B3", "F1", "F2")
    assert_root(quiet(adapted(reentrant=True, hook=False)), "S10")
    assert_healthy(quiet(adapted()))
    assert_healthy(quiet(adapted(rounds=1)))
    assert_healthy(quiet(adapted(reentrant=True)))
    assert_healthy(quiet(adapted(reentrant=False)))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_without_tokens(family):
    def program():
        model = lm(family, hidden=32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with doctor.watch(model, say=False) as report:
            for ids in batches(3, rows=1, length=8):
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
        return report

    assert_healthy(quiet(program))


class Factored(nn.Module):
    """A stream with low-rank factors; `cut` is what is done between the two of them."""

    def __init__(self, cut=lambda x: x):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.lora_A, self.lora_B, self.cut = nn.Parameter(torch.randn(4, 32)), nn.Parameter(torch.zeros(32, 4)), cut
        for part in (self.table, self.head):
            part.requires_grad_(False)

    def forward(self, ids):
        x = self.table(ids)
        return self.head(x + self.cut(x @ self.lora_A.T) @ self.lora_B.T)


def factored(model, loss_of=lambda loss: loss, rounds=5):
    def program():
        net = model()
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        with doctor.watch(net, say=False) as report:
            for ids in batches(rounds):
                logits = net(ids)[:, :-1]
                optimizer.zero_grad()
                loss_of(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())).backward()
                optimizer.step()
        return report

    return program


def test_first_factor():
    assert_root(quiet(factored(lambda: Factored(lambda x: x.detach() + 0 * x))), "B2")
    assert_root(quiet(factored(lambda: Factored(lambda x: x.round() + 0 * x))), "B2")
    assert_healthy(quiet(factored(Factored)))


class Infinite(torch.autograd.Function):
    """A backward that overflows, as a kernel of somebody's own may."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def test_gradients_that_are_not_finite():
    report = quiet(factored(Plain, lambda loss: Infinite.apply(loss), rounds=1))
    assert_root(report, "B4")
    assert "B4" in {f.check for f in quiet(factored(Plain, lambda loss: Infinite.apply(loss))).findings}
    assert_healthy(quiet(factored(Plain)))
