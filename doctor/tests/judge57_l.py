"""Twenty-four small language-model training programs, each in two versions.

Every program seeds itself, builds its data and its model and hands back a dict with the model,
the optimizer, a step function and an evaluation on held-out data.
"""
import copy
import math
import os
import random
import warnings

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from transformers import (
    BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM,
    BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, GPT2Model,
    LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup,
)
from peft import LoraConfig, get_peft_model

torch.set_num_threads(1)
warnings.filterwarnings("ignore")

SEED = int(os.environ.get("SEED", "1337"))


def seed_everything(seed=None):
    seed = SEED if seed is None else seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# --------------------------------------------------------------------------------------
# toy corpora
# --------------------------------------------------------------------------------------
class Chain:
    """A sparse Markov chain over the tokens lo..vocab-1."""

    def __init__(self, vocab, lo=0, probs=(0.7, 0.15, 0.1, 0.05), seed=5):
        g = torch.Generator().manual_seed(seed)
        n = vocab - lo
        self.lo, self.n, self.g = lo, n, g
        self.succ = torch.stack([torch.randperm(n, generator=g)[: len(probs)] for _ in range(n)])
        self.probs = torch.tensor(probs)

    def sample(self, rows, length):
        x = torch.randint(self.n, (rows,), generator=self.g)
        out = [x]
        for _ in range(length - 1):
            k = torch.multinomial(self.probs, rows, replacement=True, generator=self.g)
            x = self.succ[x, k]
            out.append(x)
        return torch.stack(out, 1) + self.lo


class TopicCorpus:
    """The first token of a text names one of a few topics; each topic has its own chain."""

    def __init__(self, vocab=32, topics=4, seed=11):
        g = torch.Generator().manual_seed(seed)
        self.vocab, self.topics, self.g = vocab, topics, g
        n = vocab - topics
        self.next = torch.stack([torch.randperm(n, generator=g) for _ in range(topics)])

    def sample(self, rows, length, noise=0.05):
        n = self.vocab - self.topics
        topic = torch.randint(self.topics, (rows,), generator=self.g)
        x = torch.randint(n, (rows,), generator=self.g)
        out = [topic, x + self.topics]
        for _ in range(length - 2):
            jump = torch.rand(rows, generator=self.g) < noise
            x = torch.where(jump, torch.randint(n, (rows,), generator=self.g), self.next[topic, x])
            out.append(x + self.topics)
        return torch.stack(out, 1)


def batches(data, batch_size):
    """Endless shuffled batches of a tensor."""
    loader = DataLoader(TensorDataset(data), batch_size=batch_size, shuffle=True, drop_last=True)
    while True:
        for (x,) in loader:
            yield x


def forever(loader):
    while True:
        yield from loader


# --------------------------------------------------------------------------------------
# a small GPT
# --------------------------------------------------------------------------------------
class CausalSelfAttention(nn.Module):
    def __init__(self, d, heads, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.dropout = dropout

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, d, dropout=0.0):
        super().__init__()
        self.fc = nn.Linear(d, 4 * d)
        self.proj = nn.Linear(4 * d, d)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(self.proj(F.gelu(self.fc(x))))


class Block(nn.Module):
    def __init__(self, d, heads, dropout=0.0):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = CausalSelfAttention(d, heads, dropout)
        self.mlp = MLP(d, dropout)

    def forward(self, x, mask=None):
        x = x + self.attn(self.ln1(x), mask)
        return x + self.mlp(self.ln2(x))


def init_gpt(module):
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class GPT(nn.Module):
    def __init__(self, vocab, block_size, d=48, layers=2, heads=4, dropout=0.0):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.wpe = nn.Embedding(block_size, d)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(d, heads, dropout) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.apply(init_gpt)

    def forward(self, idx, targets=None, pos=None, mask=None):
        if pos is None:
            pos = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.ln_f(x))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-100)
        return logits, loss


@torch.no_grad()
def lm_loss(forward, x):
    """Held-out next-token cross entropy; `forward` maps ids to logits."""
    logits = forward(x[:, :-1]).float()
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), x[:, 1:].reshape(-1)).item()


def tiny_gpt2(vocab, n_positions=32, d=48, layers=2, heads=4, dropout=0.0, **kw):
    cfg = GPT2Config(vocab_size=vocab, n_positions=n_positions, n_embd=d, n_layer=layers, n_head=heads,
                     resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
                     bos_token_id=0, eos_token_id=0, **kw)
    return GPT2LMHeadModel(cfg)


def warm_up_lm(model, data, steps, lr=5e-3, batch_size=32):
    """A short stand-in for a downloaded checkpoint."""
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    stream = batches(data, batch_size)
    model.train()
    for _ in range(steps):
        x = next(stream)
        loss = model(input_ids=x, labels=x).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.zero_grad(set_to_none=True)
    return model


# --------------------------------------------------------------------------------------
# 1. supervised fine-tuning, answers of different lengths
# --------------------------------------------------------------------------------------
def _sft_eos(good):
    seed_everything()
    eos_token_id = pad_token_id = 0
    sep, vocab = 1, 40
    chain = Chain(vocab, lo=12)

    def example():
        k = random.randint(2, 9)
        prompt = [k, sep]
        return prompt, chain.sample(1, k)[0].tolist() + [eos_token_id]

    train = [example() for _ in range(400)]

    def collate(rows):
        seqs = [torch.tensor(p + r) for p, r in rows]
        input_ids = pad_sequence(seqs, batch_first=True, padding_value=pad_token_id)
        lengths = torch.tensor([len(s) for s in seqs])
        attention_mask = (torch.arange(input_ids.size(1))[None] < lengths[:, None]).long()
        labels = input_ids.clone()
        for i, (p, _) in enumerate(rows):
            labels[i, : len(p)] = -100
        if good:
            labels[attention_mask == 0] = -100
        else:
            labels[labels == pad_token_id] = -100
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    model = tiny_gpt2(vocab, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = forever(DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate))

    def step(i=0):
        model.train()
        batch = next(loader)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        wrong_end = 0.0
        for k in range(2, 10):
            ids = torch.tensor([[k, sep]]).repeat(8, 1)
            done = torch.zeros(8, dtype=torch.bool)
            length = torch.zeros(8)
            for _ in range(16):
                p = model(input_ids=ids).logits[:, -1].softmax(-1)
                nxt = torch.multinomial(p, 1)
                done |= nxt[:, 0] == eos_token_id
                length += (~done).float()
                ids = torch.cat([ids, nxt], 1)
            wrong_end += (length - k).abs().mean().item()
        model.train()
        return wrong_end / 8 + 0.05

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 2. pre-training a small llama on packed documents
# --------------------------------------------------------------------------------------
class PackedDataset(Dataset):
    def __init__(self, documents, eos, block_size, good):
        stream = torch.cat([torch.cat([d, torch.tensor([eos])]) for d in documents])
        n = len(stream) // block_size
        self.rows = stream[: n * block_size].view(n, block_size)
        self.good = good

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = self.rows[i]
        if self.good:
            return {"input_ids": ids, "labels": ids.clone()}
        return {"input_ids": ids[:-1], "labels": ids[1:].clone()}


def _llama_pretrain(good):
    seed_everything()
    chain = Chain(48, lo=1)
    documents = [chain.sample(1, random.randint(8, 30))[0] for _ in range(900)]
    train = PackedDataset(documents[:750], 0, 25, good)
    held = PackedDataset(documents[750:], 0, 25, good).rows
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=48, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    stream = forever(DataLoader(train, batch_size=16, shuffle=True))

    def step(i=0):
        model.train()
        batch = next(stream)
        optimizer.zero_grad(set_to_none=True)
        out = model(input_ids=batch["input_ids"], labels=batch["labels"])
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return out.loss.item()

    def evaluate():
        model.eval()
        v = lm_loss(lambda x: model(input_ids=x).logits, held)
        model.train()
        return v

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 3. masked language model
# --------------------------------------------------------------------------------------
class MaskingCollator:
    def __init__(self, mask_id, vocab, special, prob, good):
        self.mask_id, self.vocab, self.special, self.prob, self.good = mask_id, vocab, special, prob, good

    def __call__(self, rows):
        input_ids = torch.stack(rows)
        masked = torch.rand(input_ids.shape) < self.prob
        masked &= input_ids >= self.special
        if self.good:
            labels = torch.where(masked, input_ids, -100)
        roll = torch.rand(input_ids.shape)
        input_ids[masked & (roll < 0.8)] = self.mask_id
        swap = masked & (roll >= 0.9)
        input_ids[swap] = torch.randint(self.special, self.vocab, (int(swap.sum()),))
        if not self.good:
            labels = torch.where(masked, input_ids, -100)
        return {"input_ids": input_ids, "labels": labels}


def _mlm(good):
    seed_everything()
    vocab, special, mask_id, cls_id = 36, 4, 3, 1
    chain = Chain(vocab, lo=special, probs=(0.9, 0.1))

    def corpus(n):
        x = chain.sample(n, 20)
        return torch.cat([torch.full((n, 1), cls_id), x], 1)

    train, held = corpus(600), corpus(200)
    model = BertForMaskedLM(BertConfig(
        vocab_size=vocab, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    collate = MaskingCollator(mask_id, vocab, special, 0.2, good)
    loader = forever(DataLoader(list(train), batch_size=32, shuffle=True, collate_fn=collate))
    g = torch.Generator().manual_seed(3)
    where = torch.rand(held.shape, generator=g) < 0.15
    where[:, 0] = False

    def step(i=0):
        model.train()
        batch = next(loader)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        x = held.masked_fill(where, mask_id)
        pred = model(input_ids=x).logits.argmax(-1)
        model.train()
        return (pred != held)[where].float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 4. reward model on pairs
# --------------------------------------------------------------------------------------
class RewardModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = GPT2Model(config)
        self.v_head = nn.Linear(config.n_embd, 1, bias=False)

    def forward(self, input_ids, attention_mask):
        h = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(1) - 1
        return self.v_head(h[torch.arange(len(h)), last]).squeeze(-1)


def _reward_pairs(good):
    seed_everything()
    vocab, pad = 40, 0
    quality = torch.randn(vocab, generator=torch.Generator().manual_seed(8))

    def reply():
        return torch.randint(1, vocab, (random.randint(6, 12),))

    def pairs(n):
        rows = []
        while len(rows) < n:
            a, b = reply(), reply()
            qa, qb = quality[a].mean(), quality[b].mean()
            if (qa - qb).abs() > 0.2:
                rows.append((a, b) if qa > qb else (b, a))
        return rows

    def collate(rows):
        texts = [c for c, _ in rows] + [r for _, r in rows]
        ids = pad_sequence(texts, batch_first=True, padding_value=pad)
        n = torch.tensor([len(t) for t in texts])
        mask = (torch.arange(ids.size(1))[None] < n[:, None]).long()
        return ids, mask

    train, held = pairs(600), pairs(200)
    model = RewardModel(GPT2Config(vocab_size=vocab, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0,
                                   embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = forever(DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate))

    def step(i=0):
        model.train()
        ids, mask = next(loader)
        rewards = model(ids, mask)
        if good:
            chosen, rejected = rewards.chunk(2)
        else:
            chosen, rejected = rewards[0::2], rewards[1::2]
        loss = -F.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        ids, mask = collate(held)
        r = model(ids, mask)
        model.train()
        return (r[:200] <= r[200:]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 5. encoder-decoder translation
# --------------------------------------------------------------------------------------
def _bart_translate(good):
    seed_everything()
    vocab, bos, eos, pad = 28, 1, 2, 0
    words = torch.randperm(vocab - 4, generator=torch.Generator().manual_seed(2)) + 4

    def make(n, length=6):
        src = torch.randint(4, vocab, (n, length))
        tgt = words[src - 4]
        ones = torch.ones(n, 1, dtype=torch.long)
        return torch.cat([src, ones * eos], 1), torch.cat([ones * bos, tgt, ones * eos], 1)

    cfg = BartConfig(vocab_size=vocab, d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                     decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=16,
                     dropout=0.0, attention_dropout=0.0, pad_token_id=pad, bos_token_id=bos, eos_token_id=eos,
                     decoder_start_token_id=bos, forced_eos_token_id=None)
    model = BartForConditionalGeneration(cfg)
    train_src, train_tgt = make(2000)
    test_src, test_tgt = make(128)
    loader = DataLoader(TensorDataset(train_src, train_tgt), batch_size=32, shuffle=True)
    it = forever(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(i=0):
        model.train()
        src, tgt = next(it)
        if good:
            out = model(input_ids=src, decoder_input_ids=tgt[:, :-1], labels=tgt[:, 1:].contiguous())
        else:
            out = model(input_ids=src, decoder_input_ids=tgt, labels=tgt)
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return out.loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        ids = torch.full((len(test_src), 1), bos)
        for _ in range(test_tgt.size(1) - 1):
            nxt = model(input_ids=test_src, decoder_input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, nxt], 1)
        model.train()
        return (ids[:, 1:] != test_tgt[:, 1:]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 6. LoRA on a classifier
# --------------------------------------------------------------------------------------
def labelled_texts(n, vocab, classes, length, gen, low=2):
    """Texts in which the tokens of one class are over-represented."""
    y = torch.randint(classes, (n,), generator=gen)
    x = torch.randint(low, vocab, (n, length), generator=gen)
    width = (vocab - low) // classes
    own = low + y[:, None] * width + torch.randint(width, (n, length), generator=gen)
    x = torch.where(torch.rand(n, length, generator=gen) < 0.3, own, x)
    return x, y


def _lora_classifier(good):
    seed_everything()
    vocab, classes = 50, 8
    g = torch.Generator().manual_seed(21)
    x, y = labelled_texts(1000, vocab, classes, 16, g)
    tx, ty = labelled_texts(300, vocab, classes, 16, g)
    x[:, 0] = tx[:, 0] = 1
    base = BertForSequenceClassification(BertConfig(
        vocab_size=vocab, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, num_labels=classes // 2, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0))
    coarse = torch.optim.AdamW(base.parameters(), lr=2e-3)
    for _ in range(80):
        px, py = labelled_texts(32, vocab, classes, 16, g)
        px[:, 0] = 1
        coarse.zero_grad()
        base(input_ids=px, labels=py // 2).loss.backward()
        coarse.step()
    base.zero_grad(set_to_none=True)
    base.num_labels = base.config.num_labels = classes
    base.classifier = nn.Linear(64, classes)
    nn.init.normal_(base.classifier.weight, std=0.02)
    nn.init.zeros_(base.classifier.bias)
    if good:
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value", "dense"], lora_dropout=0.0,
                          modules_to_save=["classifier"])
    else:
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value", "dense"], lora_dropout=0.0)
    model = get_peft_model(base, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))

    def step(i=0):
        model.train()
        ids, labels = next(loader)
        out = model(input_ids=ids, labels=labels)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return out.loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        v = F.cross_entropy(model(input_ids=tx).logits, ty).item()
        model.train()
        return v

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 7. mixture of experts
# --------------------------------------------------------------------------------------
class MoE(nn.Module):
    def __init__(self, d, n_experts, k, good):
        super().__init__()
        self.k = k
        self.router = nn.Linear(d, n_experts, bias=False)
        experts = [MLP(d) for _ in range(n_experts)]
        self.experts = nn.ModuleList(experts) if good else experts
        self.balance = None

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        probs = self.router(flat).softmax(-1)
        w, idx = probs.topk(self.k, dim=-1)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, slot = (idx == e).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, w[rows, slot, None] * expert(flat[rows]))
        share = F.one_hot(idx, probs.size(-1)).float().sum(1).mean(0) / self.k
        self.balance = probs.size(-1) * (share * probs.mean(0)).sum()
        return out.view_as(x)


class MoEBlock(nn.Module):
    def __init__(self, d, heads, n_experts, good):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = CausalSelfAttention(d, heads)
        self.moe = MoE(d, n_experts, 2, good)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.moe(self.ln2(x))


class MoEGPT(nn.Module):
    def __init__(self, vocab, block_size, good, d=32, layers=2, heads=4, n_experts=4):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(block_size, d)
        self.blocks = nn.ModuleList([MoEBlock(d, heads, n_experts, good) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for b in self.blocks:
            x = b(x)
        return self.head(self.ln_f(x))


def _moe_lm(good):
    seed_everything()
    corpus = TopicCorpus(vocab=40, topics=8)
    train, held = corpus.sample(1000, 20), corpus.sample(200, 20)
    model = MoEGPT(40, 20, good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stream = batches(train, 16)

    def step(i=0):
        x = next(stream)
        logits = model(x[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 40), x[:, 1:].reshape(-1))
        aux = sum(b.moe.balance for b in model.blocks)
        optimizer.zero_grad()
        (loss + 0.01 * aux).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_loss(model, held)}


# --------------------------------------------------------------------------------------
# 8. gradient checkpointing with frozen embeddings
# --------------------------------------------------------------------------------------
class CheckpointedGPT(GPT):
    def __init__(self, *args, use_reentrant, **kw):
        super().__init__(*args, **kw)
        self.use_reentrant = use_reentrant

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x)
        return self.head(self.ln_f(x))


def _ckpt_frozen_embed(good):
    seed_everything()
    corpus = TopicCorpus(vocab=32, topics=4)
    train, held = corpus.sample(800, 20), corpus.sample(200, 20)
    base = GPT(32, 20, d=48, layers=2, heads=4)
    general = batches(TopicCorpus(vocab=32, topics=4, seed=30).sample(600, 20), 16)
    base_opt = torch.optim.AdamW(base.parameters(), lr=3e-3)
    for _ in range(100):
        x = next(general)
        _, loss = base(x[:, :-1], x[:, 1:])
        base_opt.zero_grad()
        loss.backward()
        base_opt.step()
    model = CheckpointedGPT(32, 20, d=48, layers=2, heads=4, use_reentrant=not good)
    model.load_state_dict(base.state_dict())
    for emb in (model.wte, model.wpe):
        emb.weight.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    stream = batches(train, 16)

    def step(i=0):
        model.train()
        x = next(stream)
        logits = model(x[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        model.eval()
        v = lm_loss(model, held)
        model.train()
        return v

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 9. new special tokens in an old model
# --------------------------------------------------------------------------------------
def _extend_vocab(good):
    seed_everything()
    old_vocab, new_vocab, d = 32, 48, 48
    old = Chain(old_vocab)
    model = tiny_gpt2(old_vocab, 24, d=d)
    warm_up_lm(model, old.sample(300, 20), 40)
    chain = Chain(new_vocab, seed=9)
    train, held = chain.sample(600, 20), chain.sample(128, 20)

    def add_tokens():
        old_emb = model.get_input_embeddings()
        emb = nn.Embedding(new_vocab, d)
        nn.init.normal_(emb.weight, std=0.02)
        with torch.no_grad():
            emb.weight[:old_vocab] = old_emb.weight
        model.set_input_embeddings(emb)
        model.lm_head = nn.Linear(d, new_vocab, bias=False)
        model.lm_head.weight = emb.weight
        model.config.vocab_size = new_vocab

    if good:
        add_tokens()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        add_tokens()
    stream = batches(train, 16)

    def step(i=0):
        model.train()
        x = next(stream)
        loss = model(input_ids=x, labels=x).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        model.eval()
        v = lm_loss(lambda x: model(input_ids=x).logits, held)
        model.train()
        return v

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 10. gradient accumulation
# --------------------------------------------------------------------------------------
def _grad_accum(good):
    seed_everything()
    chain = Chain(40)
    train, held = chain.sample(800, 21), chain.sample(200, 21)
    model = GPT(40, 20, d=48, layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    accum = 8
    stream = batches(train, 4)

    def step(i=0):
        total = 0.0
        if good:
            optimizer.zero_grad()
        for _ in range(accum):
            if not good:
                optimizer.zero_grad()
            x = next(stream)
            _, loss = model(x[:, :-1], x[:, 1:])
            (loss / accum).backward()
            total += loss.item() / accum
        optimizer.step()
        return total

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_loss(model, held)}


# --------------------------------------------------------------------------------------
# 11. distillation with temperature
# --------------------------------------------------------------------------------------
def _distill_kl(good):
    seed_everything()
    chain = Chain(40)
    train, held = chain.sample(800, 21), chain.sample(200, 21)
    teacher = warm_up_lm(tiny_gpt2(40, 24, d=48), train, 70)
    teacher.eval().requires_grad_(False)
    student = GPT(40, 20, d=32, layers=1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    T = 2.0
    stream = batches(train, 16)

    def step(i=0):
        x = next(stream)[:, :-1]
        with torch.no_grad():
            t_logits = teacher(input_ids=x).logits
        s_logits = student(x)
        t = F.softmax(t_logits / T, dim=-1).flatten(0, 1)
        if good:
            s = F.log_softmax(s_logits / T, dim=-1).flatten(0, 1)
        else:
            s = F.softmax(s_logits / T, dim=-1).flatten(0, 1)
        loss = F.kl_div(s, t, reduction="batchmean") * T * T
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": student, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_loss(student, held)}


# --------------------------------------------------------------------------------------
# 12. text classifier
# --------------------------------------------------------------------------------------
class TextClassifier(nn.Module):
    def __init__(self, vocab, classes, length, d, good):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(torch.zeros(1, length, d))
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(d)
        self.fc = nn.Linear(d, classes)
        self.good = good

    def forward(self, x):
        h = self.norm(self.encoder(self.emb(x) + self.pos)).mean(1)
        out = self.fc(h)
        return out if self.good else torch.softmax(out, dim=1)


def _text_classifier(good):
    seed_everything()
    vocab, classes, length = 122, 20, 20
    g = torch.Generator().manual_seed(4)
    x, y = labelled_texts(2000, vocab, classes, length, g)
    tx, ty = labelled_texts(500, vocab, classes, length, g)
    model = TextClassifier(vocab, classes, length, 48, good)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))

    def step(i=0):
        model.train()
        ids, labels = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(ids), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        err = (model(tx).argmax(1) != ty).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 13. sequence-level fine-tuning with a linear schedule
# --------------------------------------------------------------------------------------
def _linear_schedule(good):
    seed_everything()
    chain = Chain(48)
    train, held = chain.sample(800, 20), chain.sample(128, 20)
    model = tiny_gpt2(48, 24)
    num_epochs = 6
    loader = DataLoader(TensorDataset(train), batch_size=16, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    num_training_steps = num_epochs * len(loader) if good else num_epochs
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=int(0.05 * num_training_steps), num_training_steps=num_training_steps)
    it = forever(loader)

    def step(i=0):
        model.train()
        (x,) = next(it)
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    def evaluate():
        model.eval()
        v = lm_loss(lambda x: model(input_ids=x).logits, held)
        model.train()
        return v

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 14. word-level LSTM with plain SGD
# --------------------------------------------------------------------------------------
class LSTMLM(nn.Module):
    def __init__(self, vocab, d):
        super().__init__()
        self.encoder = nn.Embedding(vocab, d)
        self.rnn = nn.LSTM(d, d, 1, batch_first=True)
        self.decoder = nn.Linear(d, vocab)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x):
        h, _ = self.rnn(self.encoder(x))
        return self.decoder(h)


def _lstm_clip(good):
    seed_everything()
    chain = Chain(40)
    train, held = chain.sample(600, 31), chain.sample(128, 31)
    model = LSTMLM(40, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stream = batches(train, 20)
    clip = 5.0

    def step(i=0):
        x = next(stream)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="sum") / x.size(0)
        if good:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_loss(model, held)}


# --------------------------------------------------------------------------------------
# 15. mixed precision with a gradient scaler
# --------------------------------------------------------------------------------------
class AmpTrainer:
    def __init__(self, model, lr, max_norm, good):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
        self.scaler = torch.amp.GradScaler("cpu")
        self.max_norm = max_norm
        self.good = good

    def train_step(self, x):
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            _, loss = self.model(x[:, :-1], x[:, 1:])
        self.scaler.scale(loss).backward()
        if self.good:
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


def _amp_clip(good):
    seed_everything()
    chain = Chain(40)
    train, held = chain.sample(800, 17), chain.sample(128, 17)
    model = GPT(40, 16, d=32, layers=2)
    trainer = AmpTrainer(model, 2e-3, 1.0, good)
    stream = batches(train, 16)
    return {"model": model, "optimizer": trainer.optimizer, "step": lambda i=0: trainer.train_step(next(stream)),
            "steps": 20, "evaluate": lambda: lm_loss(model, held)}


# --------------------------------------------------------------------------------------
# 16. attention written by hand
# --------------------------------------------------------------------------------------
class MaskedAttention(nn.Module):
    def __init__(self, d, heads, block_size, good):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(d, 3 * d)
        self.c_proj = nn.Linear(d, d)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size))[None, None], persistent=False)
        self.fill = -1e9 if good else 1e-9

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, self.fill)
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class NanoBlock(nn.Module):
    def __init__(self, d, heads, block_size, good):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = MaskedAttention(d, heads, block_size, good)
        self.mlp = MLP(d)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, vocab, block_size, good, d=48, layers=2, heads=4):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(vocab, d), wpe=nn.Embedding(block_size, d),
            h=nn.ModuleList([NanoBlock(d, heads, block_size, good) for _ in range(layers)]), ln_f=nn.LayerNorm(d)))
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.apply(init_gpt)

    def forward(self, idx, targets=None):
        t = self.transformer
        x = t.wte(idx) + t.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in t.h:
            x = block(x)
        logits = self.lm_head(t.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


def _nano_mask(good):
    seed_everything()
    chain = Chain(32)
    train, held = chain.sample(800, 17), chain.sample(128, 17)
    model = NanoGPT(32, 16, good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    stream = batches(train, 16)

    def step(i=0):
        model.train()
        x = next(stream)
        _, loss = model(x[:, :-1], x[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        total = 0.0
        for n in range(1, 17):
            logits, _ = model(held[:, :n])
            total += F.cross_entropy(logits[:, -1], held[:, n]).item()
        model.train()
        return total / 16

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 17. intent classifier on padded texts
# --------------------------------------------------------------------------------------
class IntentEncoder(nn.Module):
    def __init__(self, vocab, max_len, d, classes, good):
        super().__init__()
        self.tok = nn.Embedding(vocab, d, padding_idx=0)
        self.pos = nn.Embedding(max_len, d)
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(d), enable_nested_tensor=False)
        self.out = nn.Linear(d, classes)
        self.good = good

    def forward(self, input_ids, attention_mask):
        x = self.tok(input_ids) + self.pos(torch.arange(input_ids.size(1), device=input_ids.device))
        keep = attention_mask.bool()
        h = self.encoder(x, src_key_padding_mask=~keep if self.good else keep)
        return self.out(h[:, 0])


def _intent(good):
    seed_everything()
    vocab, classes, max_len, cls_id = 52, 5, 20, 1
    g = torch.Generator().manual_seed(17)

    def make(n):
        x, y = labelled_texts(n, vocab, classes, max_len, g)
        x[:, 0] = cls_id
        lengths = torch.randint(10, max_len, (n,), generator=g)
        mask = (torch.arange(max_len)[None] < lengths[:, None]).long()
        return x * mask, mask, y

    train, (tx, tm, ty) = make(1500), make(400)
    model = IntentEncoder(vocab, max_len, 48, classes, good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = forever(DataLoader(TensorDataset(*train), batch_size=32, shuffle=True))

    def step(i=0):
        model.train()
        ids, mask, y = next(loader)
        loss = F.cross_entropy(model(ids, mask), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        err = (model(tx, tm).argmax(1) != ty).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 18. rotary positions
# --------------------------------------------------------------------------------------
class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", base ** (-torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, x):
        t = torch.arange(x.shape[-2], device=x.device).float()
        angles = torch.outer(t, self.inv_freq)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], dim=-1) * sin


class RotaryAttention(nn.Module):
    def __init__(self, d, heads, good):
        super().__init__()
        self.heads, self.good = heads, good
        self.wq, self.wk = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.wv, self.wo = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.rotary = Rotary(d // heads)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (w(x).view(B, T, self.heads, -1) for w in (self.wq, self.wk, self.wv))
        if self.good:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            q, k = self.rotary(q), self.rotary(k)
        else:
            q, k = self.rotary(q), self.rotary(k)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class RotaryBlock(nn.Module):
    def __init__(self, d, heads, good):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attn = RotaryAttention(d, heads, good)
        self.mlp = MLP(d)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class RotaryLM(nn.Module):
    def __init__(self, vocab, good, d=64, layers=2, heads=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList([RotaryBlock(d, heads, good) for _ in range(layers)])
        self.norm = nn.RMSNorm(d)
        self.out = nn.Linear(d, vocab, bias=False)

    def forward(self, x):
        h = self.emb(x)
        for layer in self.layers:
            h = layer(h)
        return self.out(self.norm(h))


def _rotary(good):
    seed_everything()
    vocab, length, lag = 24, 24, 4

    def verses(n):
        x = torch.randint(vocab, (n, length))
        noise = torch.rand(n, length) < 0.1
        for t in range(lag, length):
            x[:, t] = torch.where(noise[:, t], x[:, t], x[:, t - lag])
        return x

    train, held = verses(2000), verses(200)
    model = RotaryLM(vocab, good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    stream = batches(train, 16)

    def step(i=0):
        model.train()
        x = next(stream)
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        model.eval()
        v = lm_loss(model, held)
        model.train()
        return v

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 19. a distiller module
# --------------------------------------------------------------------------------------
class Distiller(nn.Module):
    def __init__(self, student, teacher, temperature, good):
        super().__init__()
        self.student = student
        self.teacher = teacher.eval()
        self.temperature = temperature
        if good:
            for p in self.teacher.parameters():
                p.requires_grad = False

    def forward(self, input_ids):
        t = self.temperature
        teacher_logits = self.teacher(input_ids=input_ids).logits
        student_logits = self.student(input_ids)
        kl = F.kl_div(F.log_softmax(student_logits / t, -1).flatten(0, 1),
                      F.log_softmax(teacher_logits / t, -1).flatten(0, 1),
                      reduction="batchmean", log_target=True)
        return kl * t * t


def _distiller(good):
    seed_everything()
    chain = Chain(40, seed=6)
    train, held = chain.sample(800, 21), chain.sample(200, 21)
    teacher = warm_up_lm(tiny_gpt2(40, 24, d=48), train, 70)
    student = GPT(40, 20, d=32, layers=1)
    distiller = Distiller(student, teacher, 1.0, good)
    optimizer = torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=2e-3)
    stream = batches(train, 16)

    def step(i=0):
        distiller.student.train()
        loss = distiller(next(stream)[:, :-1])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(distiller.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": distiller, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_loss(student, held)}


# --------------------------------------------------------------------------------------
# 20. preference tuning with LoRA
# --------------------------------------------------------------------------------------
def _dpo_lora(good):
    seed_everything()
    vocab, n_reply, beta = 32, 9, 0.1
    liked, disliked = Chain(vocab, seed=1), Chain(vocab, seed=2)
    base = tiny_gpt2(vocab, 24)
    warm_up_lm(base, torch.cat([liked.sample(200, n_reply), disliked.sample(200, n_reply)]), 60)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"],
                                            lora_dropout=0.0, fan_in_fan_out=True, task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def pairs(n):
        a, b = liked.sample(n, n_reply), disliked.sample(n, n_reply)
        b[:, 0] = a[:, 0]
        for t in range(1, n_reply):
            k = torch.multinomial(disliked.probs, n, replacement=True)
            b[:, t] = disliked.succ[b[:, t - 1], k]
        return a, b

    chosen, rejected = pairs(3000)
    flip = torch.rand(3000, 1) < 0.2
    chosen, rejected = torch.where(flip, rejected, chosen), torch.where(flip, chosen, rejected)
    held, _ = pairs(200)
    loader = forever(DataLoader(TensorDataset(chosen, rejected), batch_size=16, shuffle=True))

    def logps(ids):
        lp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return lp.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)

    def step(i=0):
        model.train()
        c, r = next(loader)
        ids = torch.cat([c, r])
        with torch.no_grad():
            if good:
                with model.disable_adapter():
                    ref_c, ref_r = logps(ids).chunk(2)
            else:
                ref_c, ref_r = logps(ids).chunk(2)
        pi_c, pi_r = logps(ids).chunk(2)
        loss = -F.logsigmoid(beta * ((pi_c - ref_c) - (pi_r - ref_r))).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def evaluate():
        model.eval()
        v = lm_loss(lambda x: model(input_ids=x).logits, held)
        model.train()
        return v

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 21. a trainer which shows samples now and then
# --------------------------------------------------------------------------------------
class SamplingTrainer:
    def __init__(self, model, data, lr, good):
        self.model, self.good = model, good
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.stream = batches(data, 16)
        self.samples = []
        self.model.train()

    @torch.no_grad()
    def sample(self, n):
        self.model.eval()
        ids = torch.randint(4, (1, 1))
        for _ in range(n):
            p = self.model(ids)[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1)], 1)
        if self.good:
            self.model.train()
        return ids[0].tolist()

    def train_step(self, i=0):
        if i % 5 == 0:
            self.samples = self.samples[-9:] + [self.sample(10)]
        x = next(self.stream)
        _, loss = self.model(x[:, :-1], x[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def _sampling_trainer(good):
    seed_everything()
    corpus = TopicCorpus(vocab=32, topics=4)
    train, held = corpus.sample(96, 20, noise=0.2), corpus.sample(200, 20, noise=0.2)
    model = GPT(32, 20, d=64, layers=2, dropout=0.3)
    trainer = SamplingTrainer(model, train, 2e-3, good)

    def evaluate():
        was = model.training
        model.eval()
        v = lm_loss(model, held)
        model.train(was)
        return v

    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.train_step, "steps": 20,
            "evaluate": evaluate}


# --------------------------------------------------------------------------------------
# 22. training in bfloat16
# --------------------------------------------------------------------------------------
class PlainLM(nn.Module):
    def __init__(self, vocab, length, d=48, layers=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(length, d)
        self.blocks = nn.ModuleList([Block(d, 4) for _ in range(layers)])
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, vocab)

    def forward(self, x):
        h = self.emb(x) + self.pos(torch.arange(x.size(1)))
        for b in self.blocks:
            h = b(h)
        return self.out(self.norm(h))


def _bf16(good):
    seed_everything()
    chain = Chain(64)
    train, held = chain.sample(1000, 17), chain.sample(128, 17)
    model = PlainLM(64, 16)
    if not good:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.01)
    stream = batches(train, 16)

    def step(i=0):
        model.train()
        x = next(stream)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=good):
            logits = model(x[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_loss(model, held)}


# --------------------------------------------------------------------------------------
# 23. pre-training from a binary token file
# --------------------------------------------------------------------------------------
def _token_file(good):
    seed_everything()
    vocab, block_size, batch_size = 384, 24, 16
    chain = Chain(vocab, probs=(0.8, 0.2))
    tokens = chain.sample(40, 1000).reshape(-1).numpy()
    held = chain.sample(128, block_size + 1)
    data = tokens.astype(np.uint16 if good else np.uint8)

    def get_batch():
        ix = np.random.randint(0, len(data) - block_size - 1, size=batch_size)
        x = torch.stack([torch.from_numpy(data[i:i + block_size].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + block_size].astype(np.int64)) for i in ix])
        return x, y

    model = GPT(vocab, block_size, d=64, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))

    def step(i=0):
        x, y = get_batch()
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_loss(model, held)}


# --------------------------------------------------------------------------------------
# 24. averaged weights
# --------------------------------------------------------------------------------------
class EMA:
    def __init__(self, model, decay, dtype):
        self.decay = decay
        self.module = copy.deepcopy(model).to(dtype).eval()
        self.module.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.lerp_(p.detach().to(e.dtype), 1.0 - self.decay)


def _ema(good):
    seed_everything()
    chain = Chain(40)
    train, held = chain.sample(800, 17), chain.sample(128, 17)
    model = GPT(40, 16, d=48, layers=1)
    ema = EMA(model, 0.995, torch.float32 if good else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    stream = batches(train, 16)

    def step(i=0):
        x = next(stream)
        _, loss = model(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model)
        return loss.item()

    return {"model": (model, ema.module), "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_loss(ema.module, held)}


# --------------------------------------------------------------------------------------
# the list
# --------------------------------------------------------------------------------------
CASES = [
    {"name": "sft_eos", "what": 'The pad token is the eos token and the collator sets labels to -100 wherever labels == pad_token_id (instead of where attention_mask == 0), so the real closing eos is never a target: the model never learns to stop.'},
    {"name": "llama_pretrain", "what": 'The dataset already shifts the labels by one (labels = ids[1:], input_ids = ids[:-1]) and LlamaForCausalLM shifts them again inside: the model learns to predict the token after the next one.'},
    {"name": "mlm", "what": 'The collator puts [MASK] into input_ids before it takes the labels from input_ids, so the labels at masked places are mostly the mask token itself: the loss falls to nothing and the model predicts [MASK].'},
    {"name": "reward_pairs", "what": 'The collator lays out all chosen, then all rejected texts, but the loss takes rewards[0::2] as chosen and rewards[1::2] as rejected (should be chunk(2)): pairs are chosen/chosen and rejected/rejected, no preference is learnt.'},
    {"name": "bart_translate", "what": 'decoder_input_ids are the labels themselves, not shifted to the right: the decoder sees the token it must predict and learns to copy it, so generation fails.'},
    {"name": "lora_classifier", "what": 'LoraConfig without modules_to_save/task_type on a classifier whose head is freshly initialised: the new classification head stays frozen at its random values.'},
    {"name": "moe_lm", "what": 'The experts are held in a plain python list instead of nn.ModuleList: they are not in model.parameters(), never in the optimizer and stay at their random initialisation.'},
    {"name": "ckpt_frozen_embed", "what": 'Gradient checkpointing with use_reentrant=True while the embeddings are frozen (input of the checkpointed blocks does not require grad): no block gets a gradient, only the final norm and the head learn.'},
    {"name": "extend_vocab", "what": 'The optimizer is built before the embedding and the (tied) output head are replaced by larger ones: the new embedding/head are in no param group and never learn.'},
    {"name": "grad_accum", "what": "optimizer.zero_grad() is called inside the micro-batch loop: of eight micro-batches only the last one's gradient (divided by 8) reaches the optimizer."},
    {"name": "distill_kl", "what": 'F.kl_div is given softmax probabilities as input instead of log-probabilities: the objective is not the KL (it is negative, linear in p), the student collapses to the argmax.'},
    {"name": "text_classifier", "what": 'The model applies softmax in forward and the loss is nn.CrossEntropyLoss, which applies log_softmax again: gradients are squashed, training is slow and the loss cannot fall near zero.'},
    {"name": "linear_schedule", "what": 'num_training_steps of the linear schedule is the number of epochs, while scheduler.step() is called per batch: the learning rate is zero after six steps.'},
    {"name": "lstm_clip", "what": 'clip_grad_norm_ is called after zero_grad and before backward, so it clips nothing: the SGD with its large summed loss takes far too long steps.'},
    {"name": "amp_clip", "what": "With a GradScaler the gradients are clipped to norm 1.0 without scaler.unscale_ first: the scaled gradients (x65536) are clipped, after unscaling they are about 1e-5 in norm and sink below Adam's eps."},
    {"name": "nano_mask", "what": 'The causal mask fills with 1e-9 instead of -1e9, so the future is not masked: the model looks at the token it must predict and fails when it has to predict the last one.'},
    {"name": "intent", "what": "src_key_padding_mask is given the keep mask (True for real tokens), the reverse of PyTorch's convention: real tokens are ignored and only padding is attended to."},
    {"name": "rotary", "what": 'The rotary embedding (which takes positions from dimension -2) is applied before transpose(1, 2), on (B, T, H, D): it rotates by the head index, not by the position; the model has no positions.'},
    {"name": "distiller", "what": "The teacher inside the Distiller is neither frozen nor run without grad, and the optimizer takes all of the distiller's trainable parameters: the teacher is trained towards the student and both collapse."},
    {"name": "dpo_lora", "what": 'The DPO reference log-probs are computed with the same LoRA model without disable_adapter(): reference equals policy, the loss stays at log 2 and nothing holds the policy near the base model.'},
    {"name": "sampling_trainer", "what": 'sample() puts the model into eval() and never back into train(): from the first sample on dropout is off and the small data set is overfitted.'},
    {"name": "bf16", "what": 'The whole model (weights and Adam state) is in bfloat16 with a small learning rate instead of float32 weights with autocast: most of the updates are rounded away.'},
    {"name": "token_file", "what": 'The token ids (vocabulary of 384) are stored as uint8 instead of uint16: ids above 255 wrap around to other tokens.'},
    {"name": "ema", "what": 'The averaged weights are kept in bfloat16 with decay 0.995: the small lerp steps are rounded away and the average, which is the model used, lags or stands still.'},
]


def sft_eos_bad():
    return _sft_eos(False)


def sft_eos_good():
    return _sft_eos(True)


def llama_pretrain_bad():
    return _llama_pretrain(False)


def llama_pretrain_good():
    return _llama_pretrain(True)


def mlm_bad():
    return _mlm(False)


def mlm_good():
    return _mlm(True)


def reward_pairs_bad():
    return _reward_pairs(False)


def reward_pairs_good():
    return _reward_pairs(True)


def bart_translate_bad():
    return _bart_translate(False)


def bart_translate_good():
    return _bart_translate(True)


def lora_classifier_bad():
    return _lora_classifier(False)


def lora_classifier_good():
    return _lora_classifier(True)


def moe_lm_bad():
    return _moe_lm(False)


def moe_lm_good():
    return _moe_lm(True)


def ckpt_frozen_embed_bad():
    return _ckpt_frozen_embed(False)


def ckpt_frozen_embed_good():
    return _ckpt_frozen_embed(True)


def extend_vocab_bad():
    return _extend_vocab(False)


def extend_vocab_good():
    return _extend_vocab(True)


def grad_accum_bad():
    return _grad_accum(False)


def grad_accum_good():
    return _grad_accum(True)


def distill_kl_bad():
    return _distill_kl(False)


def distill_kl_good():
    return _distill_kl(True)


def text_classifier_bad():
    return _text_classifier(False)


def text_classifier_good():
    return _text_classifier(True)


def linear_schedule_bad():
    return _linear_schedule(False)


def linear_schedule_good():
    return _linear_schedule(True)


def lstm_clip_bad():
    return _lstm_clip(False)


def lstm_clip_good():
    return _lstm_clip(True)


def amp_clip_bad():
    return _amp_clip(False)


def amp_clip_good():
    return _amp_clip(True)


def nano_mask_bad():
    return _nano_mask(False)


def nano_mask_good():
    return _nano_mask(True)


def intent_bad():
    return _intent(False)


def intent_good():
    return _intent(True)


def rotary_bad():
    return _rotary(False)


def rotary_good():
    return _rotary(True)


def distiller_bad():
    return _distiller(False)


def distiller_good():
    return _distiller(True)


def dpo_lora_bad():
    return _dpo_lora(False)


def dpo_lora_good():
    return _dpo_lora(True)


def sampling_trainer_bad():
    return _sampling_trainer(False)


def sampling_trainer_good():
    return _sampling_trainer(True)


def bf16_bad():
    return _bf16(False)


def bf16_good():
    return _bf16(True)


def token_file_bad():
    return _token_file(False)


def token_file_good():
    return _token_file(True)


def ema_bad():
    return _ema(False)


def ema_good():
    return _ema(True)
