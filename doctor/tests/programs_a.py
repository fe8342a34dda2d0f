"""Material for the programs about wiring, modes, adapters and teachers: a hand-written model, hand-written LoRA, loops.

Footgun: a loop that is written once is tried once. The programs vary model, loss and optimizer through its arguments,
and those with a shape of their own write their own loop.
"""

import tempfile

import bitsandbytes as bnb
import peft
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import VOCABULARY, batches, lm


class Nano(nn.Module):
    """A language model as people write it by hand: returns (logits, loss)."""

    class Block(nn.Module):
        def __init__(self, hidden: int, dropout: float):
            super().__init__()
            self.norm = nn.LayerNorm(hidden)
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
            self.drop = nn.Dropout(dropout)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
            return x + self.drop(self.down(F.gelu(self.up(x))))

    def __init__(self, vocab: int = VOCABULARY, hidden: int = 32, layers: int = 2, dropout: float = 0.0, tie=True):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(128, hidden)
        self.blocks = nn.ModuleList(self.Block(hidden, dropout) for _ in range(layers))
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        if tie:
            self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class HandLora(nn.Module):
    """A linear layer with two low-rank factors beside it, as in a hundred repositories."""

    def __init__(self, linear: nn.Linear, rank: int = 4, alpha: float = 8.0):
        super().__init__()
        self.linear, self.scaling = linear.requires_grad_(False), alpha / rank
        self.lora_A = nn.Parameter(torch.randn(rank, linear.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def hand_lora(model: nn.Module, kind: type = HandLora, **options) -> nn.Module:
    model.requires_grad_(False)
    for m in list(model.modules()):
        for name, child in list(m.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head" and not isinstance(m, HandLora):
                setattr(m, name, kind(child, **options))
    return model


def lora(model: nn.Module, **options) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(**({"r": 4, "target_modules": "all-linear"} | options)))


def four_bit(family: str = "llama") -> nn.Module:
    """A tiny model with its linear layers packed in NF4, the rest as it was."""
    model = lm(family)
    for m in list(model.modules()):
        for name, child in list(m.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                new = bnb.nn.Linear4bit(child.in_features, child.out_features, bias=False, quant_type="nf4")
                new.weight = bnb.nn.Params4bit(child.weight.data.clone(), requires_grad=False, quant_type="nf4")
                setattr(m, name, new.to("cpu"))
    return model


def loss_of(model: nn.Module, ids: Tensor, how: str = "labels") -> Tensor:
    if isinstance(model, Nano):
        return model(ids[:, :-1], ids[:, 1:])[1]
    if how == "labels":
        return model(input_ids=ids, labels=ids).loss
    logits = model(ids).logits[:, :-1]
    if how == "gather":
        return -logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train(network, optimizers, /, *, steps: int = 4, how: str = "labels", loss=None, between=None, **watch):
    """Watch a plain loop; returns the report. `between(step)` runs after each step."""
    optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    with doctor.watch(steps=steps, say=False, **watch) as report:
        for step, ids in enumerate(batches(steps)):
            for o in optimizers:
                o.zero_grad()
            (loss or loss_of)(network, ids, *(() if loss else (how,))).backward()
            for o in optimizers:
                o.step()
            if between:
                between(step)
    return report


def adamw(*sources, lr: float = 1e-3) -> torch.optim.Optimizer:
    ps = [p for s in sources for p in (s.parameters() if isinstance(s, nn.Module) else s)]
    return torch.optim.AdamW([p for p in ps if p.requires_grad], lr=lr)


def reloaded(model: nn.Module, **options) -> nn.Module:
    """Saved and loaded again by from_pretrained: in eval mode, as transformers returns it."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, **options)
