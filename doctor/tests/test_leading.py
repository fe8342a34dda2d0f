"""Padding on the left under absolute positions (F121), and models whose answers do not hang on it."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from train_doctor import leading

from .bench import quiet
from .test_arithmetic import said

transformers = pytest.importorskip("transformers")
WORDS, WIDTH = 30, 32


def batch(number: int, how: str):
    """Ids and their mask; the longest text of a batch has 9 to 12 tokens."""
    longest = 12 if how == "one length" else 12 - number % 4 if how == "longest first" else 9 + number % 4
    lengths = [longest - n % 5 for n in range(8)]
    if how == "no padding":
        lengths = [longest] * 8
    if how == "as much in each row":
        longest += 3
    ids, mask = torch.zeros(8, longest, dtype=torch.long), torch.zeros(8, longest, dtype=torch.long)
    for row, n in enumerate(lengths if how != "as much in each row" else [longest - 3] * 8):
        where = slice(0, n) if how == "right" else slice(longest - n, longest)
        ids[row, where], mask[row, where] = torch.randint(1, WORDS, (n,)), 1
    return ids, mask


def library(kind: str, **options):
    shape = dict(vocab_size=WORDS, num_hidden_layers=1, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    if kind == "gpt2":
        shape = dict(vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=32, bos_token_id=None)
        shape |= dict(eos_token_id=None, pad_token_id=0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape | options)).train()
    if kind == "opt":
        config = transformers.OPTConfig(hidden_size=WIDTH, ffn_dim=WIDTH, num_attention_heads=4, dropout=0.0,
                                        word_embed_proj_dim=WIDTH, max_position_embeddings=32, **shape)  # fmt: skip
        return transformers.OPTForCausalLM(config)
    if kind == "bloom":
        return transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=WIDTH, n_head=4, **shape))
    config = transformers.LlamaConfig(hidden_size=WIDTH, intermediate_size=WIDTH, num_attention_heads=4, **shape)
    return transformers.LlamaForCausalLM(config)


class Own(nn.Module):
    """By hand, with its positions in one of several ways; a mask is 1 at what counts, or `hidden` is."""

    def __init__(self, how="learned", hidden=False, places=32):
        super().__init__()
        self.how, self.hidden = how, hidden
        self.table, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(places, WIDTH))
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.state = nn.GRU(WIDTH, WIDTH, batch_first=True) if how == "state" else None

    def forward(self, words, mask, more=None):
        mask = mask if not self.hidden else ~mask
        h, n = self.table(words), words.shape[1]
        if self.how == "given":
            h = h + self.place[more].view(-1, len(words), n, WIDTH).sum(0)
        if self.how == "less the pads":
            pads = (mask == 0).sum(1) if more is None else torch.as_tensor(more)
            h = h + self.place[(torch.arange(n) - pads.view(-1, 1)).clamp(min=0)]
        if self.how == "less the length":
            h = h + self.place[(torch.arange(n) - n + more[:, None]).clamp(min=0)]
        if self.how == "from the end":
            h = h + self.place[:n].flip(0)
        if self.how == "learned":
            h = h + self.place[:n]
        if self.how == "sines":
            angles = torch.outer(torch.arange(n).float(), 100.0 ** -(torch.arange(WIDTH // 2) / 16))
            h = h + torch.cat([angles.sin(), angles.cos()], 1)
        if self.how == "from the mask":
            h = h + self.place[(mask.long().cumsum(1) - 1).clamp(min=0)]
        if self.state is not None:
            h = self.state(h * mask[..., None])[0]
        q, k, v = self.qkv(h).chunk(3, -1)
        see = torch.ones(n, n).tril().bool() & (mask != 0)[:, None] | torch.eye(n).bool()
        scores = q @ k.transpose(1, 2) / math.sqrt(WIDTH)
        if self.how == "sharper in longer rows":
            scores = scores * n
        if self.how == "a bias":
            see, scores = torch.ones(n, n).tril().bool().expand(scores.shape), scores + more[:, 0]
        if self.how == "distances":
            scores = scores - (torch.arange(n)[:, None] - torch.arange(n)).abs()
        h = h + self.out(scores.masked_fill(~see, -1e9).softmax(-1) @ v)
        return self.head(F.dropout(h, 0.1, self.training))


MORE = {  # given to a model beside ids and mask
    "pads": lambda ids, mask: (mask == 0).sum(1),
    "pads in a list": lambda ids, mask: (mask == 0).sum(1).tolist(),
    "pads in a column": lambda ids, mask: (mask == 0).sum(1, keepdim=True),
    "lengths": lambda ids, mask: mask.sum(1),
    "first words": lambda ids, mask: mask.argmax(1) + 1,
    "a bias": lambda ids, mask: (1.0 - mask.float())[:, None, None] * -1e4,
    "places": lambda ids, mask: (mask.cumsum(1) - 1).clamp(min=0),
    "three axes": lambda ids, mask: (mask.cumsum(1) - 1).clamp(min=0).expand(3, -1, -1),
    "places from the left": lambda ids, mask: torch.arange(ids.shape[1]).expand(ids.shape),
    "places from the end": lambda ids, mask: torch.arange(ids.shape[1]).flip(0).expand(ids.shape),
    "sparse weights": lambda ids, mask: mask.float().to_sparse(),
    "flags": lambda ids, mask: torch.ones_like(mask, dtype=torch.bool),
}


def ask(model, ids, mask, how):
    if isinstance(model, Own):
        more = [MORE[how](ids, mask)] if how in MORE else []
        return model(ids, mask == 0 if model.hidden else mask, *more)
    extra = {}
    if how == "counted from the mask":
        extra["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if how == "counted from the left":
        extra["position_ids"] = torch.arange(ids.shape[1]).expand(ids.shape)
    return model(input_ids=ids, attention_mask=mask, use_cache=False, **extra).logits


def program(make, how: str):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    state = torch.get_rng_state()
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for number in range(5):
            ids, mask = batch(number, how)
            loss = F.cross_entropy(
                ask(model, ids, mask, how)[:, :-1].flatten(0, 1), ids.masked_fill(mask == 0, -100)[:, 1:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert not report.faults and not torch.equal(state, torch.get_rng_state())
    assert all(m.training for m in model.modules())
    return report


def run(make, how):
    return quiet(lambda: program(make, how))


WRONG = {
    "gpt2": (lambda: library("gpt2"), "left"),
    "gpt2, always of one length": (lambda: library("gpt2"), "one length"),
    "gpt2, without dropout": (lambda: library("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), "left"),
    "gpt2, counted from the left": (lambda: library("gpt2"), "counted from the left"),
    "gpt2, attention by hand": (lambda: library("gpt2", attn_implementation="eager"), "left"),
    "gpt2, 16 bits": (lambda: library("gpt2").bfloat16(), "left"),
    "a table": (lambda: Own("learned"), "left"),
    "sines": (lambda: Own("sines"), "left"),
    "a mask of what is hidden": (lambda: Own("learned", hidden=True), "left"),
    "a table, longest first": (lambda: Own("learned", places=14), "longest first"),
    "pads given": (lambda: Own("learned"), "pads"),
    "lengths given": (lambda: Own("learned"), "lengths"),
    "flags given": (lambda: Own("learned"), "flags"),
    "places given": (lambda: Own("given"), "places from the left"),
}
RIGHT = {
    "gpt2, padded on the right": (lambda: library("gpt2"), "right"),
    "gpt2, no padding": (lambda: library("gpt2"), "no padding"),
    "gpt2, as much in each row": (lambda: library("gpt2"), "as much in each row"),
    "gpt2, counted from the mask": (lambda: library("gpt2"), "counted from the mask"),
    "opt": (lambda: library("opt"), "left"),
    "rotary": (lambda: library("llama"), "left"),
    "rotary, counted from the left": (lambda: library("llama"), "counted from the left"),
    "rotary, 16 bits": (lambda: library("llama").bfloat16(), "left"),
    "alibi": (lambda: library("bloom"), "left"),
    "counted from the mask": (lambda: Own("from the mask"), "left"),
    "distances": (lambda: Own("distances"), "left"),
    "no positions": (lambda: Own("none"), "left"),
    "a state before": (lambda: Own("state"), "left"),
    "histories of one length": (lambda: Own("learned"), "one length"),
    "by hand, padded on the right": (lambda: Own("learned"), "right"),
    "less the pads": (lambda: Own("less the pads"), "left"),
    "less the pads, given": (lambda: Own("less the pads"), "pads"),
    "less the pads, given in a list": (lambda: Own("less the pads"), "pads in a list"),
    "less the pads, given in a column": (lambda: Own("less the pads"), "pads in a column"),
    "less another number of each row": (lambda: Own("less the pads"), "first words"),
    "by the lengths": (lambda: Own("less the length"), "lengths"),
    "from the end": (lambda: Own("from the end"), "left"),
    "given from the end": (lambda: Own("given"), "places from the end"),
    "given from the mask": (lambda: Own("given"), "places"),
    "three axes": (lambda: Own("given"), "three axes"),
    "a bias of attention": (lambda: Own("a bias"), "a bias"),
    "sharper in longer rows": (lambda: Own("sharper in longer rows"), "left"),
    "sparse weights": (lambda: Own("from the mask"), "sparse weights"),
    "a table that ends": (lambda: Own("learned", places=12), "longest first"),
    "gpt2, a table that ends": (lambda: library("gpt2", n_positions=12), "longest first"),
}


@pytest.mark.parametrize("name", WRONG)
def test_positions_that_count_the_padding(name):
    report = run(*WRONG[name])
    assert report.root is not None and report.root.check == "F121", f"\n{report}"
    assert said(report) == {"F121"}


@pytest.mark.parametrize("name", RIGHT)
def test_positions_that_do_not(name):
    assert not said(run(*RIGHT[name]))


def test_the_loop_gets_the_same_numbers():
    def numbers(watched):
        torch.manual_seed(0)
        model = library("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses = []
        with doctor.watch(model, optimizer=optimizer, say=False) if watched else torch.enable_grad():
            for number in range(3):
                ids, mask = batch(number, "left")
                loss = F.cross_entropy(ask(model, ids, mask, "")[:, -2], ids[:, -1])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    assert numbers(True) == numbers(False)


@pytest.mark.parametrize(
    "places, device, fits",
    [(12, "meta", False), (15, "meta", False), (25, "meta", False), (18, "meta", True), (12, "cpu", True)],
)
def test_a_table_off_the_cpu_is_not_asked_for_what_it_may_lack(places, device, fits):
    """There it would end the run."""
    model = Own(places=places).to(device)
    e = SimpleNamespace(config=None, modules=lambda: [*model.named_modules()])
    assert leading._fits(e, 14) is fits


def test_a_row_that_the_config_has_no_room_for():
    model = library("gpt2")
    e = SimpleNamespace(config=model.config, modules=lambda: [*model.named_modules()])
    assert leading._fits(e, 32) and not leading._fits(e, 33)
