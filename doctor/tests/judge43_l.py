"""Twenty-four small training programs of language models, each in two versions.

Every function NAME_bad() / NAME_good() builds a program and returns
{"model", "optimizer", "step", "steps", "evaluate"}.
"""
import copy
import math
import random
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)

CASES = []
SEED = 1337


def set_seed(offset=0):
    random.seed(SEED + offset)
    np.random.seed(SEED + offset)
    torch.manual_seed(SEED + offset)


@contextmanager
def evaluating(*models):
    modes = [m.training for m in models]
    for m in models:
        m.eval()
    with torch.no_grad():
        yield
    for m, mode in zip(models, modes):
        m.train(mode)


def endless(loader):
    while True:
        yield from loader


# --------------------------------------------------------------------------
# data
# --------------------------------------------------------------------------

def markov_table(vocab, seed, low=0, branch=3):
    g = torch.Generator().manual_seed(seed)
    table = torch.zeros(vocab, vocab)
    p = torch.tensor([0.7, 0.2, 0.1][:branch])
    p = p / p.sum()
    for v in range(vocab):
        nxt = torch.randperm(vocab - low, generator=g)[:branch] + low
        table[v, nxt] = p
    return table


def markov_sample(table, n, length, seed, low=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(low, table.size(0), (n,), generator=g)
    out = [x]
    for _ in range(length - 1):
        x = torch.multinomial(table[x], 1, generator=g).squeeze(1)
        out.append(x)
    return torch.stack(out, 1)


def order2_sample(vocab, n, length, seed, noise=0.1, low=0, table_seed=5):
    tg = torch.Generator().manual_seed(table_seed)
    table = torch.randint(0, vocab, (vocab, vocab), generator=tg)
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randint(0, vocab, (n,), generator=g) for _ in range(2)]
    for _ in range(length - 2):
        nxt = table[xs[-2], xs[-1]]
        rnd = torch.randint(0, vocab, (n,), generator=g)
        flip = torch.rand(n, generator=g) < noise
        xs.append(torch.where(flip, rnd, nxt))
    return torch.stack(xs, 1) + low


ADJ = "small old red quick quiet happy brown tall".split()
NOUN = "cat dog king bird child horse farmer queen".split()
VERB = "sees likes follows finds helps calls".split()
PLACE = "garden river house forest market".split()


def make_sentence(rng):
    s = f"the {rng.choice(ADJ)} {rng.choice(NOUN)} {rng.choice(VERB)} the {rng.choice(NOUN)}"
    if rng.random() < 0.5:
        s += f" in the {rng.choice(PLACE)}"
    return s


def make_text(n, seed):
    rng = random.Random(seed)
    return ". ".join(make_sentence(rng) for _ in range(n)) + ". "


CHARS = sorted(set("abcdefghijklmnopqrstuvwxyz. "))
STOI = {c: i for i, c in enumerate(CHARS)}


def encode(text):
    return torch.tensor([STOI[c] for c in text], dtype=torch.long)


def random_windows(data, block, batch, gen):
    ix = torch.randint(0, len(data) - block - 1, (batch,), generator=gen)
    x = torch.stack([data[i:i + block] for i in ix])
    y = torch.stack([data[i + 1:i + block + 1] for i in ix])
    return x, y


# --------------------------------------------------------------------------
# a GPT in the usual style
# --------------------------------------------------------------------------

@dataclass
class GPTConfig:
    vocab_size: int = 28
    block_size: int = 48
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg.n_head
        self.dropout = cfg.dropout
        self.c_attn = nn.Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, cfg, attn=CausalSelfAttention, mlp=None):
        super().__init__()
        self.ln_1 = nn.LayerNorm(cfg.n_embd)
        self.attn = attn(cfg)
        self.ln_2 = nn.LayerNorm(cfg.n_embd)
        self.mlp = mlp(cfg) if mlp else nn.Sequential(
            nn.Linear(cfg.n_embd, 4 * cfg.n_embd), nn.GELU(), nn.Linear(4 * cfg.n_embd, cfg.n_embd))
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, mask=None):
        x = x + self.drop(self.attn(self.ln_1(x)) if mask is None else self.attn(self.ln_1(x), mask))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self, cfg, attn=CausalSelfAttention, mlp=None, use_wpe=True):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd) if use_wpe else None
        self.drop = nn.Dropout(cfg.dropout)
        self.h = nn.ModuleList(Block(cfg, attn, mlp) for _ in range(cfg.n_layer))
        self.ln_f = nn.LayerNorm(cfg.n_embd)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02 if isinstance(m, nn.Embedding) else 0.05)
            if isinstance(m, nn.Linear) and m.bias is not None:
                nn.init.zeros_(m.bias)

    def hidden(self, idx, pos=None, mask=None):
        x = self.wte(idx)
        if self.wpe is not None:
            pos = torch.arange(idx.size(1), device=idx.device) if pos is None else pos
            x = x + self.wpe(pos)
        x = self.drop(x)
        for block in self.h:
            x = block(x, mask)
        return self.ln_f(x)

    def forward(self, idx, pos=None, mask=None):
        return self.lm_head(self.hidden(idx, pos, mask))


def nll(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def fit_lm(model, table, low, steps, seed, length=24, lr=3e-3):
    """Short pre-training on sequences of the chain."""
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    data = markov_sample(table, 1024, length, seed, low)
    for i in range(steps):
        x = data[(i * 32) % 1024:(i * 32) % 1024 + 32]
        logits = model(x[:, :-1])
        logits = getattr(logits, "logits", logits)
        loss = nll(logits, x[:, 1:])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return model


# --------------------------------------------------------------------------
# 1
# --------------------------------------------------------------------------
CASES.append({"name": "sft_shift", "what":
    "The collator shifts the labels by one itself, and LlamaForCausalLM shifts them again inside its loss: every "
    "position is trained on the token after next, so the answers come out wrong."})


class TranslatePairs(Dataset):
    """prompt tokens, a separator, then each token translated, then <eos>"""
    PAD, SEP, EOS, LOW = 0, 1, 2, 3

    def __init__(self, n, seed, words=16, lo=4, hi=8):
        rng = random.Random(seed)
        lex = list(range(words))
        random.Random(77).shuffle(lex)
        self.items = []
        for _ in range(n):
            src = [rng.randrange(words) for _ in range(rng.randint(lo, hi))]
            prompt = [s + self.LOW for s in src] + [self.SEP]
            answer = [lex[s] + self.LOW + words for s in src] + [self.EOS]
            self.items.append((prompt, answer))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def _sft_shift(good):
    from transformers import LlamaConfig, LlamaForCausalLM
    set_seed(1)
    D = TranslatePairs

    def collate(batch):
        ids, labels = [], []
        for prompt, answer in batch:
            ids.append(torch.tensor(prompt + answer))
            labels.append(torch.tensor([-100] * len(prompt) + answer))
        input_ids = pad_sequence(ids, batch_first=True, padding_value=D.PAD)
        labels = pad_sequence(labels, batch_first=True, padding_value=-100)
        attention_mask = torch.zeros_like(input_ids)
        for row, t in enumerate(ids):
            attention_mask[row, :len(t)] = 1
        if not good:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    config = LlamaConfig(vocab_size=40, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
                         pad_token_id=D.PAD, bos_token_id=None, eos_token_id=D.EOS, initializer_range=0.08)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    loader = DataLoader(D(2048, 1), batch_size=32, shuffle=True, collate_fn=collate, drop_last=True)
    batches = endless(loader)
    model.train()

    def step():
        batch = next(batches)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held = D(200, 2)

    def evaluate():
        misses = total = 0
        with evaluating(model):
            for prompt, answer in held:
                ids = torch.tensor([prompt + answer])
                pred = model(input_ids=ids).logits[0, len(prompt) - 1:-1].argmax(-1)
                misses += (pred != torch.tensor(answer)).sum().item()
                total += len(answer)
        return misses / total

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def sft_shift_bad():
    return _sft_shift(False)


def sft_shift_good():
    return _sft_shift(True)


# --------------------------------------------------------------------------
# 2
# --------------------------------------------------------------------------
CASES.append({"name": "eos_pad", "what":
    "The pad token is the eos token, and the collator sets every label equal to the pad id to -100: the true eos at "
    "the end of each line is masked too, so the model never learns to stop."})


def _eos_pad(good):
    from transformers import GPT2Config, GPT2LMHeadModel
    set_seed(2)
    eos = 0
    words = {w: i + 1 for i, w in enumerate(sorted(set(ADJ + NOUN + VERB + PLACE + ["the", "in"])))}
    vocab = len(words) + 1
    pad = eos

    def lines(n, seed):
        rng = random.Random(seed)
        return [[words[w] for w in make_sentence(rng).split()] + [eos] for _ in range(n)]

    def collate(rows):
        longest = max(len(r) for r in rows)
        ids = torch.full((len(rows), longest), pad)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for i, r in enumerate(rows):
            ids[i, :len(r)] = torch.tensor(r)
            mask[i, :len(r)] = 1
        labels = ids.clone()
        if good:
            labels[mask == 0] = -100
        else:
            labels[labels == pad] = -100
        return ids, mask, labels

    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=32, n_embd=48, n_layer=2, n_head=4,
                                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                       bos_token_id=eos, eos_token_id=eos, pad_token_id=pad))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(lines(1500, 3), batch_size=32, shuffle=True, collate_fn=collate, drop_last=True)
    stream = endless(loader)
    model.train()

    def step():
        ids, mask, labels = next(stream)
        optimizer.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, labels=labels)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return out.loss.item()

    held = lines(150, 4)

    def evaluate():
        total = count = 0
        with evaluating(model):
            for r in held:
                x = torch.tensor([r])
                lp = model(input_ids=x[:, :-1]).logits.log_softmax(-1)
                total -= lp.gather(-1, x[:, 1:, None]).sum().item()
                count += len(r) - 1
        return total / count

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def eos_pad_bad():
    return _eos_pad(False)


def eos_pad_good():
    return _eos_pad(True)


# --------------------------------------------------------------------------
# 3
# --------------------------------------------------------------------------
CASES.append({"name": "mlm_collator", "what":
    "In the hand-written masking the labels are the same tensor as the inputs (no clone), so the tokens written in "
    "for masking overwrite the labels: the model learns to predict [MASK] where it sees [MASK]."})


class WholeMasker:
    def __init__(self, mask_id, vocab, low, p=0.15):
        self.mask_id, self.vocab, self.low, self.p = mask_id, vocab, low, p

    def choose(self, shape):
        return torch.rand(shape) < self.p

    def corrupt(self, ids, chosen):
        r = torch.rand(ids.shape)
        ids[chosen & (r < 0.8)] = self.mask_id
        swap = chosen & (r >= 0.8) & (r < 0.9)
        ids[swap] = torch.randint(self.low, self.vocab, (int(swap.sum()),))
        return ids


def _mlm_collator(good):
    from transformers import BertConfig, BertForMaskedLM
    set_seed(3)
    PAD, MASK, LOW, V = 0, 1, 2, 34
    masker = WholeMasker(MASK, V, LOW)
    table = markov_table(V, 11, LOW, branch=2)

    def collate(rows):
        input_ids = torch.stack([r[0] for r in rows])
        chosen = masker.choose(input_ids.shape)
        if good:
            labels = input_ids.clone()
        else:
            labels = input_ids
        input_ids = masker.corrupt(input_ids, chosen)
        labels = labels.masked_fill(~chosen, -100)
        return input_ids, labels

    model = BertForMaskedLM(BertConfig(vocab_size=V, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                       intermediate_size=128, max_position_embeddings=32, pad_token_id=PAD,
                                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                                       initializer_range=0.05))
    train = TensorDataset(markov_sample(table, 3000, 24, 12, LOW))
    it = endless(DataLoader(train, batch_size=32, shuffle=True, drop_last=True, collate_fn=collate))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    model.train()

    def step():
        input_ids, labels = next(it)
        loss = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held = markov_sample(table, 128, 24, 13, LOW)
    chosen = torch.rand(held.shape, generator=torch.Generator().manual_seed(5)) < 0.15

    def evaluate():
        with evaluating(model):
            logits = model(input_ids=held.masked_fill(chosen, MASK), attention_mask=torch.ones_like(held)).logits
            return F.cross_entropy(logits[chosen], held[chosen]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def mlm_collator_bad():
    return _mlm_collator(False)


def mlm_collator_good():
    return _mlm_collator(True)


# --------------------------------------------------------------------------
# 4
# --------------------------------------------------------------------------
CASES.append({"name": "reward_end", "what":
    "The reward head reads the hidden state at the first eos id. Every turn of the conversation ends with eos, so it "
    "reads the end of the first turn, which chosen and rejected share: the two rewards are always equal."})


class RewardModel(nn.Module):
    def __init__(self, backbone, hidden):
        super().__init__()
        self.backbone = backbone
        self.value = nn.Linear(hidden, 1, bias=False)

    def forward(self, input_ids, attention_mask, end):
        h = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = h[torch.arange(h.size(0)), end]
        return self.value(last).squeeze(-1)


def _reward_end(good):
    from transformers import GPT2Config, GPT2Model
    set_seed(4)
    EOS, V = 0, 30
    quality = torch.randn(V, generator=torch.Generator().manual_seed(9))

    def talk(n, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(n):
            q = [rng.randrange(1, V) for _ in range(rng.randint(3, 6))] + [EOS]
            a, b = ([rng.randrange(1, V) for _ in range(rng.randint(3, 8))] for _ in range(2))
            score = [quality[t].mean().item() for t in (a, b)]
            if score[0] < score[1]:
                a, b = b, a
            rows.append((q + a + [EOS], q + b + [EOS]))
        return rows

    def pad(seqs):
        n = max(map(len, seqs))
        ids = torch.tensor([s + [EOS] * (n - len(s)) for s in seqs])
        mask = torch.tensor([[1] * len(s) + [0] * (n - len(s)) for s in seqs])
        return ids, mask

    def collate(pairs):
        return pad([p[0] for p in pairs] + [p[1] for p in pairs])

    def end_of(ids, mask):
        if good:
            return mask.sum(1) - 1
        return (ids == EOS).int().argmax(1)

    base = GPT2Model(GPT2Config(vocab_size=V, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                                embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=EOS, eos_token_id=EOS))
    model = RewardModel(base, 48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    pairs = endless(DataLoader(talk(3000, 1), batch_size=24, shuffle=True, collate_fn=collate))

    def step():
        model.train()
        ids, mask = next(pairs)
        r = model(ids, mask, end_of(ids, mask))
        chosen, rejected = r.chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held = collate(talk(300, 2))

    def evaluate():
        with evaluating(model):
            ids, mask = held
            chosen, rejected = model(ids, mask, end_of(ids, mask)).chunk(2)
            return -F.logsigmoid(chosen - rejected).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def reward_end_bad():
    return _reward_end(False)


def reward_end_good():
    return _reward_end(True)


# --------------------------------------------------------------------------
# 5
# --------------------------------------------------------------------------
CASES.append({"name": "new_tokens", "what":
    "The optimizer is made before extend_vocab, which puts new embedding and output modules into the model: the "
    "optimizer still holds the old matrices, and the embedding and head in use never learn."})


def extend_vocab(model, extra):
    old_wte, old_head = model.wte, model.lm_head
    V, C = old_wte.weight.shape
    wte, head = nn.Embedding(V + extra, C), nn.Linear(C, V + extra, bias=False)
    with torch.no_grad():
        for new, old in ((wte, old_wte), (head, old_head)):
            new.weight.normal_(std=0.02)
            new.weight[:V] = old.weight
    model.wte, model.lm_head = wte, head
    model.cfg.vocab_size = V + extra
    return model


def _new_tokens(good):
    from transformers import get_constant_schedule_with_warmup
    set_seed(5)
    base_vocab, extra = 24, 24
    model = GPT(GPTConfig(vocab_size=base_vocab, block_size=32, n_layer=1, n_embd=64))
    fit_lm(model, markov_table(base_vocab, 20), 0, 80, seed=20)

    V = base_vocab + extra
    table = markov_table(V, 21)
    if good:
        extend_vocab(model, extra)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    scheduler = get_constant_schedule_with_warmup(optimizer, num_warmup_steps=10)
    if not good:
        extend_vocab(model, extra)

    loader = DataLoader(TensorDataset(markov_sample(table, 2000, 24, 22)), batch_size=32, shuffle=True, drop_last=True)
    data = endless(loader)
    model.train()

    def step():
        (ids,) = next(data)
        loss = nll(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
        return loss.item()

    held = markov_sample(table, 128, 24, 23)

    def evaluate():
        with evaluating(model):
            return nll(model(held[:, :-1]), held[:, 1:]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def new_tokens_bad():
    return _new_tokens(False)


def new_tokens_good():
    return _new_tokens(True)


# --------------------------------------------------------------------------
# 6
# --------------------------------------------------------------------------
CASES.append({"name": "lora_ckpt", "what":
    "LoRA with reentrant gradient checkpointing of the blocks: the frozen embeddings' output does not require grad, "
    "so the checkpointed blocks give no gradient to the adapters, and only the score head learns."})


def order_task(n, seed, vocab=20, length=16, low=2):
    """label: does the token 2 come before the token 3?"""
    rng = random.Random(seed)
    X, y = [], []
    for _ in range(n):
        row = [rng.randrange(low + 2, vocab) for _ in range(length)]
        i, j = rng.sample(range(length), 2)
        row[i], row[j] = low, low + 1
        X.append(row)
        y.append(int(i < j))
    return torch.tensor(X), torch.tensor(y)


class GPTScorer(nn.Module):
    def __init__(self, gpt, classes, reentrant):
        super().__init__()
        self.gpt = gpt
        self.reentrant = reentrant
        self.score = nn.Linear(gpt.cfg.n_embd, classes, bias=False)

    def forward(self, input_ids):
        x = self.gpt.wte(input_ids) + self.gpt.wpe.weight[:input_ids.size(1)]
        for block in self.gpt.h:
            if self.training:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return self.score(self.gpt.ln_f(x).mean(1))


def _lora_ckpt(good):
    from peft import LoraConfig, get_peft_model
    set_seed(6)
    gpt = GPT(GPTConfig(vocab_size=20, block_size=24, n_layer=2, n_embd=64))
    fit_lm(gpt, markov_table(20, 7, 2), 2, 100, seed=8, length=17)
    gpt.lm_head = nn.Identity()
    net = GPTScorer(gpt, 2, reentrant=not good)
    model = get_peft_model(net, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, modules_to_save=["score"],
                                           target_modules=["c_attn", "c_proj", "mlp.0", "mlp.2"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    loader = endless(DataLoader(TensorDataset(*order_task(3000, 1)), batch_size=32, shuffle=True))
    model.train()

    def step():
        x, y = next(loader)
        loss = F.cross_entropy(model(input_ids=x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        return loss.item()

    hx, hy = order_task(400, 2)

    def evaluate():
        with evaluating(model):
            return (model(input_ids=hx).argmax(-1) != hy).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def lora_ckpt_bad():
    return _lora_ckpt(False)


def lora_ckpt_good():
    return _lora_ckpt(True)


# --------------------------------------------------------------------------
# 7
# --------------------------------------------------------------------------
CASES.append({"name": "moe_experts", "what":
    "The experts of the mixture layer are kept in a plain Python list, so they are no submodules: they are in neither "
    "model.parameters() nor the optimizer and stay at their random initial values."})


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MoELayer(nn.Module):
    def __init__(self, dim, n_experts=4, k=2, registered=True):
        super().__init__()
        self.k = k
        self.router = nn.Linear(dim, n_experts, bias=False)
        experts = [Expert(dim, 2 * dim) for _ in range(n_experts)]
        self.experts = nn.ModuleList(experts) if registered else experts
        self.aux = None

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        probs = self.router(x).softmax(-1)
        weight, index = probs.topk(self.k, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slot = (index == e).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, slot, None])
        share = F.one_hot(index, len(self.experts)).float().sum(1).mean(0) / self.k
        self.aux = len(self.experts) * (share * probs.mean(0)).sum()
        return out.view(shape)


def _moe_experts(good):
    set_seed(7)
    V, T = 14, 20
    cfg = GPTConfig(vocab_size=V, block_size=T, n_layer=2, n_head=2, n_embd=32)
    model = GPT(cfg, mlp=lambda c: MoELayer(c.n_embd, registered=good))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    train = TensorDataset(order2_sample(V, 4000, T + 1, 31, noise=0.02))
    batches = endless(DataLoader(train, batch_size=32, shuffle=True))

    def step():
        model.train()
        (seq,) = next(batches)
        logits = model(seq[:, :-1])
        loss = nll(logits, seq[:, 1:]) + 0.01 * sum(b.mlp.aux for b in model.h)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held = order2_sample(V, 200, T + 1, 32, noise=0.02)

    def evaluate():
        with evaluating(model):
            return nll(model(held[:, :-1])[:, 1:], held[:, 2:]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def moe_experts_bad():
    return _moe_experts(False)


def moe_experts_good():
    return _moe_experts(True)


# --------------------------------------------------------------------------
# 8
# --------------------------------------------------------------------------
CASES.append({"name": "unfreeze_top", "what":
    "After freezing everything, the encoder layers to be tuned are 'unfrozen' with layer.requires_grad = True, which "
    "only sets an attribute of the module: their parameters stay frozen, and only the head learns."})


class DocClassifier(nn.Module):
    def __init__(self, encoder, dim, classes):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, classes))

    def forward(self, ids):
        h = self.encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        return self.head(h.mean(1))


def fit_mlm(model, rows, mask_id, low, steps=80, lr=2e-3):
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    masker = WholeMasker(mask_id, model.config.vocab_size, low)
    for i in range(steps):
        ids = rows[(i * 32) % len(rows):(i * 32) % len(rows) + 32]
        chosen = masker.choose(ids.shape)
        inputs = masker.corrupt(ids.clone(), chosen)
        loss = model(input_ids=inputs, attention_mask=torch.ones_like(ids),
                     labels=ids.masked_fill(~chosen, -100)).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
    return model


def _unfreeze_top(good):
    from transformers import DistilBertConfig, DistilBertForMaskedLM
    set_seed(8)
    config = DistilBertConfig(vocab_size=20, dim=48, n_layers=3, n_heads=4, hidden_dim=96, dropout=0.0,
                              attention_dropout=0.0, max_position_embeddings=32, initializer_range=0.08)
    pretrained = fit_mlm(DistilBertForMaskedLM(config), order_task(1024, 9)[0], mask_id=1, low=2)
    model = DocClassifier(pretrained.distilbert, 48, 2)
    for p in model.encoder.parameters():
        p.requires_grad = False
    for layer in model.encoder.transformer.layer[-2:]:
        if good:
            layer.requires_grad_(True)
        else:
            layer.requires_grad = True

    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
    loader = endless(DataLoader(TensorDataset(*order_task(3000, 3)), batch_size=32, shuffle=True))
    criterion = nn.CrossEntropyLoss()

    def step():
        model.train()
        x, y = next(loader)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    hx, hy = order_task(400, 4)

    def evaluate():
        with evaluating(model):
            return (model(hx).argmax(-1) != hy).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def unfreeze_top_bad():
    return _unfreeze_top(False)


def unfreeze_top_good():
    return _unfreeze_top(True)


# --------------------------------------------------------------------------
# 9
# --------------------------------------------------------------------------
CASES.append({"name": "char_gpt", "what":
    "The loss is F.cross_entropy of softmax(logits): softmax is applied twice, the loss can hardly fall, and the "
    "gradients are tiny."})


def _char_gpt(good):
    set_seed(9)
    data = encode(make_text(1500, 1))
    held_text = encode(make_text(120, 2))
    cfg = GPTConfig(vocab_size=len(CHARS), block_size=32)
    model = GPT(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    gen = torch.Generator().manual_seed(SEED)

    def step():
        model.train()
        xb, yb = random_windows(data, cfg.block_size, 16, gen)
        logits = model(xb)
        if good:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), yb.view(-1))
        else:
            probs = F.softmax(logits, dim=-1)
            loss = F.cross_entropy(probs.view(-1, probs.size(-1)), yb.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    hx, hy = random_windows(held_text, cfg.block_size, 64, torch.Generator().manual_seed(3))

    def evaluate():
        with evaluating(model):
            return nll(model(hx), hy).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def char_gpt_bad():
    return _char_gpt(False)


def char_gpt_good():
    return _char_gpt(True)


# --------------------------------------------------------------------------
# 10
# --------------------------------------------------------------------------
CASES.append({"name": "kd_weight", "what":
    "F.kl_div is called with its default reduction 'mean', which also divides by the vocabulary size: the "
    "distillation term is 64 times too weak, and the student only fits its few hard labels."})


def _kd_weight(good):
    set_seed(10)
    V, T, temp, alpha = 64, 20, 2.0, 0.2
    table = markov_table(V, 41)
    teacher = GPT(GPTConfig(vocab_size=V, block_size=32, n_layer=1, n_embd=64))
    fit_lm(teacher, table, 0, 130, seed=42)
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)
    student = GPT(GPTConfig(vocab_size=V, block_size=32, n_layer=1, n_embd=48))
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    train = TensorDataset(markov_sample(table, 48, T + 1, 43))
    loader = endless(DataLoader(train, batch_size=16, shuffle=True))

    def step():
        student.train()
        (seq,) = next(loader)
        x, y = seq[:, :-1], seq[:, 1:].reshape(-1)
        with torch.no_grad():
            t_logits = teacher(x).view(-1, V)
        s_logits = student(x).view(-1, V)
        log_p = F.log_softmax(s_logits / temp, dim=-1)
        q = F.softmax(t_logits / temp, dim=-1)
        soft = F.kl_div(log_p, q, reduction="batchmean") if good else F.kl_div(log_p, q)
        loss = alpha * F.cross_entropy(s_logits, y) + (1 - alpha) * temp ** 2 * soft
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held = markov_sample(table, 200, T + 1, 44)

    def evaluate():
        with evaluating(student):
            return nll(student(held[:, :-1]), held[:, 1:]).item()

    return {"model": student, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def kd_weight_bad():
    return _kd_weight(False)


def kd_weight_good():
    return _kd_weight(True)


# --------------------------------------------------------------------------
# 11
# --------------------------------------------------------------------------
CASES.append({"name": "accum_loop", "what":
    "Gradient accumulation with zero_grad inside the loop over the micro batches: only the last of the eight micro "
    "batches (divided by eight) reaches the optimizer."})


class AccumTrainer:
    def __init__(self, model, loader, lr, accum, clear_once):
        self.model, self.accum, self.clear_once = model, accum, clear_once
        self.batches = endless(loader)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def train_step(self):
        self.model.train()
        total = 0.0
        if self.clear_once:
            self.optimizer.zero_grad()
        for _ in range(self.accum):
            if not self.clear_once:
                self.optimizer.zero_grad()
            (seq,) = next(self.batches)
            loss = nll(self.model(seq[:, :-1]), seq[:, 1:]) / self.accum
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total


def _accum_loop(good):
    set_seed(11)
    V, T = 64, 16
    table = markov_table(V, 51)
    model = GPT(GPTConfig(vocab_size=V, block_size=T, n_layer=1, n_embd=48))
    loader = DataLoader(TensorDataset(markov_sample(table, 4000, T + 1, 52)), batch_size=4, shuffle=True)
    trainer = AccumTrainer(model, loader, 0.1, 8, good)
    held = markov_sample(table, 200, T + 1, 53)

    def evaluate():
        with evaluating(model):
            return nll(model(held[:, :-1]), held[:, 1:]).item()

    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.train_step, "steps": 20,
            "evaluate": evaluate}


def accum_loop_bad():
    return _accum_loop(False)


def accum_loop_good():
    return _accum_loop(True)


# --------------------------------------------------------------------------
# 12
# --------------------------------------------------------------------------
CASES.append({"name": "seq2seq_flat", "what":
    "nn.Transformer runs sequence-first, so the logits are (T, B, V), but they are flattened against labels of shape "
    "(B, T): each prediction is scored against a token of another sentence and place."})


class Translator(nn.Module):
    def __init__(self, vocab, dim=48, max_len=24):
        super().__init__()
        self.src_emb = nn.Embedding(vocab, dim)
        self.tgt_emb = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.core = nn.Transformer(dim, 4, 1, 1, 96, dropout=0.0)
        self.out = nn.Linear(dim, vocab)

    def forward(self, src, tgt, src_pad, tgt_pad):
        """src, tgt: (B, S) and (B, T); returns (T, B, V)"""
        s = (self.src_emb(src) + self.pos.weight[:src.size(1)]).transpose(0, 1)
        t = (self.tgt_emb(tgt) + self.pos.weight[:tgt.size(1)]).transpose(0, 1)
        causal = torch.triu(torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool), diagonal=1)
        h = self.core(s, t, tgt_mask=causal, src_key_padding_mask=src_pad, tgt_key_padding_mask=tgt_pad,
                      memory_key_padding_mask=src_pad)
        return self.out(h)


def _seq2seq_flat(good):
    set_seed(12)
    PAD, BOS, EOS, LOW, W = 0, 1, 2, 3, 16

    def collate(rows):
        src = pad_sequence([torch.tensor(p[:-1]) for p, _ in rows], batch_first=True, padding_value=PAD)
        tgt = pad_sequence([torch.tensor([BOS] + a) for _, a in rows], batch_first=True, padding_value=PAD)
        return src, tgt

    model = Translator(LOW + 2 * W)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    loader = endless(DataLoader(TranslatePairs(3000, 5), batch_size=32, shuffle=True, collate_fn=collate))

    def step():
        model.train()
        src, tgt = next(loader)
        tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]
        logits = model(src, tgt_in, src == PAD, tgt_in == PAD)
        if good:
            logits = logits.transpose(0, 1)
        loss = criterion(logits.reshape(-1, logits.size(-1)), tgt_out.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    src, tgt = collate(list(TranslatePairs(200, 6)))

    def evaluate():
        with evaluating(model):
            logits = model(src, tgt[:, :-1], src == PAD, tgt[:, :-1] == PAD).transpose(0, 1)
            real = tgt[:, 1:] != PAD
            return (logits.argmax(-1) != tgt[:, 1:])[real].float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def seq2seq_flat_bad():
    return _seq2seq_flat(False)


def seq2seq_flat_good():
    return _seq2seq_flat(True)


# --------------------------------------------------------------------------
# 13
# --------------------------------------------------------------------------
CASES.append({"name": "lr_schedule", "what":
    "scheduler.step() is called for every micro batch, while the schedule was planned in optimizer steps: with eight "
    "micro batches per step the learning rate reaches zero after an eighth of the training."})


def _lr_schedule(good):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, get_linear_schedule_with_warmup
    set_seed(13)
    V = 40
    table = markov_table(V, 61)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=V, hidden_size=48, num_hidden_layers=1,
                                             num_attention_heads=4, intermediate_size=96, initializer_range=0.05,
                                             max_position_embeddings=32, bos_token_id=0, eos_token_id=0))
    accum, max_steps = 8, 240
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=16, num_training_steps=max_steps)
    train = TensorDataset(markov_sample(table, 4000, 20, 62))
    loader = endless(DataLoader(train, batch_size=4, shuffle=True))

    def step():
        model.train()
        running = 0.0
        for micro in range(accum):
            (ids,) = next(loader)
            loss = model(input_ids=ids, labels=ids).loss / accum
            loss.backward()
            running += loss.item()
            if micro == accum - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if good:
                    scheduler.step()
                optimizer.zero_grad()
            if not good:
                scheduler.step()
        return running

    held = markov_sample(table, 150, 20, 63)

    def evaluate():
        with evaluating(model):
            return nll(model(input_ids=held).logits[:, :-1], held[:, 1:]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def lr_schedule_bad():
    return _lr_schedule(False)


def lr_schedule_good():
    return _lr_schedule(True)


# --------------------------------------------------------------------------
# 14
# --------------------------------------------------------------------------
CASES.append({"name": "adam_args", "what":
    "AdamW is called with positional arguments (params, lr, betas, weight_decay), but the fourth is eps: eps is 0.1 "
    "instead of 1e-8, so the updates are far too small (and the weight decay is the default)."})


@dataclass
class TrainConfig:
    lr: float = 2e-3
    betas: tuple = (0.9, 0.95)
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    batch_size: int = 16


def _adam_args(good):
    set_seed(14)
    tc = TrainConfig()
    data, held_text = encode(make_text(1500, 5)), encode(make_text(120, 6))
    cfg = GPTConfig(vocab_size=len(CHARS), block_size=32, n_layer=2, n_embd=48)
    model = GPT(cfg)
    if good:
        optimizer = torch.optim.AdamW(model.parameters(), tc.lr, tc.betas, weight_decay=tc.weight_decay)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), tc.lr, tc.betas, tc.weight_decay)
    gen = torch.Generator().manual_seed(SEED)

    def step():
        model.train()
        X, Y = random_windows(data, cfg.block_size, tc.batch_size, gen)
        loss = nll(model(X), Y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), tc.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    hx, hy = random_windows(held_text, cfg.block_size, 64, torch.Generator().manual_seed(3))

    def evaluate():
        with evaluating(model):
            return nll(model(hx), hy).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def adam_args_bad():
    return _adam_args(False)


def adam_args_good():
    return _adam_args(True)


# --------------------------------------------------------------------------
# 15
# --------------------------------------------------------------------------
CASES.append({"name": "amp_clip", "what":
    "Mixed precision with a GradScaler: clip_grad_norm_ is called without scaler.unscale_ first, so it clips "
    "gradients that are 65536 times too large to norm 1; after unscaling they are of the order of Adam's eps or less."})


def _amp_clip(good):
    from transformers import OPTConfig, OPTForCausalLM
    set_seed(15)
    V = 40
    table = markov_table(V, 71, 2)
    model = OPTForCausalLM(OPTConfig(vocab_size=V, hidden_size=48, word_embed_proj_dim=48, num_hidden_layers=1,
                                     num_attention_heads=4, ffn_dim=96, max_position_embeddings=40, pad_token_id=1,
                                     bos_token_id=0, eos_token_id=0, dropout=0.0, attention_dropout=0.0,
                                     init_std=0.05))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    loader = endless(DataLoader(TensorDataset(markov_sample(table, 3000, 24, 72, 2)), batch_size=16,
                                shuffle=True, drop_last=True))
    model.train()

    def step():
        (ids,) = next(loader)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if good:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    held = markov_sample(table, 128, 24, 73, 2)

    def evaluate():
        with evaluating(model):
            logits = model(input_ids=held, attention_mask=torch.ones_like(held)).logits
            return nll(logits[:, :-1], held[:, 1:]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def amp_clip_bad():
    return _amp_clip(False)


def amp_clip_good():
    return _amp_clip(True)


# --------------------------------------------------------------------------
# 16
# --------------------------------------------------------------------------
CASES.append({"name": "encoder_mask", "what":
    "The attention mask (1 = real token) is passed as src_key_padding_mask, where True means 'ignore': every token "
    "attends to the padding only, and the real tokens are hidden."})


class EncoderClassifier(nn.Module):
    def __init__(self, vocab, dim, heads, layers, max_len, classes, keep_is_true):
        super().__init__()
        self.keep_is_true = keep_is_true
        self.tok = nn.Embedding(vocab, dim, padding_idx=0)
        self.pos = nn.Embedding(max_len, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, classes)

    def forward(self, ids, attention_mask):
        x = self.tok(ids) + self.pos.weight[:ids.size(1)]
        mask = attention_mask.bool() if self.keep_is_true else attention_mask == 0
        x = self.encoder(x, src_key_padding_mask=mask)
        m = attention_mask.unsqueeze(-1).float()
        return self.fc(self.norm((x * m).sum(1) / m.sum(1)))


def _encoder_mask(good):
    set_seed(16)
    max_len = 20

    def dataset(n, seed):
        rng = random.Random(seed)
        ids, labels = order_task(n, seed, vocab=24, length=12)
        X = torch.zeros(n, max_len, dtype=torch.long)
        M = torch.zeros(n, max_len, dtype=torch.long)
        for i in range(n):
            tail = [rng.randrange(4, 24) for _ in range(rng.randint(0, 6))]
            k = 12 + len(tail)
            X[i, :k] = torch.cat([ids[i], torch.tensor(tail, dtype=torch.long)])
            M[i, :k] = 1
        return TensorDataset(X, M, labels)

    model = EncoderClassifier(24, 48, 4, 2, max_len, 2, keep_is_true=not good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    loader = endless(DataLoader(dataset(4000, 1), batch_size=32, shuffle=True))

    def step():
        model.train()
        ids, mask, labels = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(ids, mask), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    hx, hm, hy = dataset(400, 2).tensors

    def evaluate():
        with evaluating(model):
            return (model(hx, hm).argmax(-1) != hy).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def encoder_mask_bad():
    return _encoder_mask(False)


def encoder_mask_good():
    return _encoder_mask(True)


# --------------------------------------------------------------------------
# 17
# --------------------------------------------------------------------------
CASES.append({"name": "own_attention", "what":
    "The causal mask is tril(..., diagonal=1): every position sees the next token, which it must predict. The "
    "training loss falls towards zero, and generation is useless."})


def masked_attention(diagonal):
    class MaskedAttention(nn.Module):
        def __init__(self, cfg):
            super().__init__()
            self.n_head, self.head_dim = cfg.n_head, cfg.n_embd // cfg.n_head
            self.query = nn.Linear(cfg.n_embd, cfg.n_embd)
            self.key = nn.Linear(cfg.n_embd, cfg.n_embd)
            self.value = nn.Linear(cfg.n_embd, cfg.n_embd)
            self.proj = nn.Linear(cfg.n_embd, cfg.n_embd)
            mask = torch.tril(torch.ones(cfg.block_size, cfg.block_size), diagonal=diagonal)
            self.register_buffer("mask", mask.view(1, 1, cfg.block_size, cfg.block_size))

        def forward(self, x):
            B, T, C = x.size()
            q, k, v = (f(x).view(B, T, self.n_head, self.head_dim).transpose(1, 2)
                       for f in (self.query, self.key, self.value))
            att = (q @ k.transpose(-2, -1)) / math.sqrt(self.head_dim)
            att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
            y = att.softmax(dim=-1) @ v
            return self.proj(y.transpose(1, 2).reshape(B, T, C))
    return MaskedAttention


def _own_attention(good):
    set_seed(17)
    data, held_text = encode(make_text(1500, 11)), encode(make_text(120, 12))
    cfg = GPTConfig(vocab_size=len(CHARS), block_size=32, n_layer=2, n_embd=48)
    model = GPT(cfg, attn=masked_attention(0 if good else 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    gen = torch.Generator().manual_seed(SEED)

    def step():
        model.train()
        x, y = random_windows(data, cfg.block_size, 16, gen)
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, cfg.vocab_size), y.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    hx, hy = random_windows(held_text, cfg.block_size, 64, torch.Generator().manual_seed(3))

    def evaluate():
        """the next character after a prefix, as in generation"""
        losses = []
        with evaluating(model):
            for t in (4, 8, 12, 16, 20, 24, 28, 32):
                logits = model(hx[:, :t])[:, -1]
                losses.append(F.cross_entropy(logits, hy[:, t - 1]).item())
        return sum(losses) / len(losses)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def own_attention_bad():
    return _own_attention(False)


def own_attention_good():
    return _own_attention(True)


# --------------------------------------------------------------------------
# 18
# --------------------------------------------------------------------------
CASES.append({"name": "packed_docs", "what":
    "For the block-diagonal mask of packed sequences the documents are numbered with cumsum over dim 0 (the batch) "
    "instead of dim 1: the mask hides arbitrary earlier tokens of the own document and shows other documents."})


class PackedDocs(Dataset):
    """Rows of several documents: <bos>, a topic, then tokens that follow the topic's chain."""
    BOS, TOPICS, WORDS = 0, 6, 12

    def __init__(self, rows, length, seed):
        g = random.Random(99)
        self.rule = [g.sample(range(self.WORDS), self.WORDS) for _ in range(self.TOPICS)]
        self.rng = random.Random(seed)
        self.rows = []
        for _ in range(rows):
            row = []
            while len(row) < length + 1:
                row += self.document()
            self.rows.append(torch.tensor(row[:length + 1]))

    def document(self):
        topic, word = self.rng.randrange(self.TOPICS), self.rng.randrange(self.WORDS)
        doc = [self.BOS, 1 + topic]
        for _ in range(self.rng.randint(6, 14)):
            doc.append(1 + self.TOPICS + word)
            word = self.rule[topic][word]
        return doc

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def _packed_docs(good):
    set_seed(18)
    T, V = 48, 1 + PackedDocs.TOPICS + PackedDocs.WORDS
    train = PackedDocs(1500, T, 1)
    model = GPT(GPTConfig(vocab_size=V, block_size=T, n_layer=2, n_embd=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    loader = endless(DataLoader(train, batch_size=16, shuffle=True, drop_last=True))
    causal = torch.tril(torch.ones(T, T, dtype=torch.bool))

    def layout(ids):
        starts = ids == PackedDocs.BOS
        doc = torch.cumsum(starts.long(), dim=1 if good else 0)
        mask = (doc[:, :, None] == doc[:, None, :]) & causal
        index = torch.arange(ids.size(1)).expand_as(ids)
        first = torch.where(starts, index, torch.zeros_like(index)).cummax(dim=1).values
        return index - first, mask.unsqueeze(1)

    def step():
        model.train()
        rows = next(loader)
        ids, targets = rows[:, :-1], rows[:, 1:]
        targets = targets.masked_fill(targets == PackedDocs.BOS, -100)
        pos, mask = layout(ids)
        loss = nll(model(ids, pos, mask), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    source = PackedDocs(0, T, 2)
    held = [torch.tensor([source.document()]) for _ in range(120)]

    def evaluate():
        total = count = 0
        with evaluating(model):
            for doc in held:
                logits = model(doc[:, :-1])[:, 2:]
                total += F.cross_entropy(logits[0], doc[0, 3:], reduction="sum").item()
                count += doc.size(1) - 3
        return total / count

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def packed_docs_bad():
    return _packed_docs(False)


def packed_docs_good():
    return _packed_docs(True)


# --------------------------------------------------------------------------
# 19
# --------------------------------------------------------------------------
CASES.append({"name": "rope_heads", "what":
    "The rotary embedding is applied to queries and keys of shape (B, T, H, D) before the transpose, while it takes "
    "axis -2 for the position: it rotates by the number of the head, and attention knows no positions."})


def rotate(x, base=10000.0):
    n, d = x.shape[-2], x.shape[-1]
    freq = base ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = torch.outer(torch.arange(n, device=x.device, dtype=torch.float32), freq)
    cos, sin = angle.cos(), angle.sin()
    x1, x2 = x[..., :d // 2], x[..., d // 2:]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def rope_attention(early):
    class RotaryAttention(nn.Module):
        def __init__(self, cfg):
            super().__init__()
            self.n_head = cfg.n_head
            self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=False)
            self.out = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

        def forward(self, x):
            B, T, C = x.shape
            q, k, v = self.qkv(x).view(B, T, 3, self.n_head, -1).unbind(2)
            if early:
                q, k = rotate(q), rotate(k)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            if not early:
                q, k = rotate(q), rotate(k)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).reshape(B, T, C))
    return RotaryAttention


def _rope_heads(good):
    set_seed(19)
    V, T = 16, 32
    cfg = GPTConfig(vocab_size=V, block_size=T, n_layer=2, n_head=4, n_embd=64)
    model = GPT(cfg, attn=rope_attention(early=not good), use_wpe=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    train = TensorDataset(order2_sample(V, 6000, T + 1, 81))
    loader = endless(DataLoader(train, batch_size=16, shuffle=True))

    def step():
        model.train()
        (seq,) = next(loader)
        loss = nll(model(seq[:, :-1]), seq[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held = order2_sample(V, 150, T + 1, 82)

    def evaluate():
        with evaluating(model):
            return nll(model(held[:, :-1])[:, 1:], held[:, 2:]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def rope_heads_bad():
    return _rope_heads(False)


def rope_heads_good():
    return _rope_heads(True)


# --------------------------------------------------------------------------
# 20
# --------------------------------------------------------------------------
CASES.append({"name": "teacher_load", "what":
    "The teacher's checkpoint was saved from a wrapped model, its keys begin with 'module.', and it is loaded with "
    "strict=False: nothing is loaded, and the student is distilled from a teacher with random weights."})


class Distiller:
    def __init__(self, teacher, student, lr, temperature=2.0, alpha=0.9):
        self.teacher, self.student = teacher.eval().requires_grad_(False), student
        self.optimizer = torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.01)
        self.temperature, self.alpha = temperature, alpha

    def loss(self, ids):
        x, y = ids[:, :-1], ids[:, 1:]
        s = self.student(input_ids=x).logits.flatten(0, 1)
        with torch.no_grad():
            t = self.teacher(input_ids=x).logits.flatten(0, 1)
        T = self.temperature
        soft = F.kl_div((s / T).log_softmax(-1), (t / T).softmax(-1), reduction="batchmean") * T * T
        return self.alpha * soft + (1 - self.alpha) * F.cross_entropy(s, y.flatten())

    def train_on(self, ids):
        self.student.train()
        loss = self.loss(ids)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def _teacher_load(good):
    from transformers import LlamaConfig, LlamaForCausalLM
    set_seed(20)
    V = 36
    table = markov_table(V, 91)

    def build(dim, layers):
        return LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=dim, intermediate_size=2 * dim,
                                            num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                                            max_position_embeddings=32, initializer_range=0.08, bos_token_id=None,
                                            eos_token_id=None))

    trained = nn.ModuleDict({"module": fit_lm(build(64, 1), table, 0, 100, seed=92)})
    ckpt = {"model": copy.deepcopy(trained.state_dict()), "step": 100}

    teacher = build(64, 1)
    state = ckpt["model"]
    if good:
        state = {k.removeprefix("module."): v for k, v in state.items()}
    teacher.load_state_dict(state, strict=False)
    student = build(32, 1)
    distiller = Distiller(teacher, student, lr=3e-3)
    loader = endless(DataLoader(TensorDataset(markov_sample(table, 1500, 24, 93)), batch_size=24, shuffle=True))

    def step():
        (ids,) = next(loader)
        return distiller.train_on(ids)

    held = markov_sample(table, 128, 24, 94)

    def evaluate():
        with evaluating(student):
            return nll(student(input_ids=held).logits[:, :-1], held[:, 1:]).item()

    return {"model": student, "optimizer": distiller.optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def teacher_load_bad():
    return _teacher_load(False)


def teacher_load_good():
    return _teacher_load(True)


# --------------------------------------------------------------------------
# 21
# --------------------------------------------------------------------------
CASES.append({"name": "dpo_lora", "what":
    "DPO with LoRA: the reference log-probabilities are computed without model.disable_adapter(), so the reference "
    "is the policy itself; the loss stays at log 2 and pushes with constant force, never anchored to the start."})


def sequence_logp(model, ids, mask):
    """sum of log p over the answer tokens"""
    logits = model(input_ids=ids[:, :-1]).logits
    lp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (lp * mask[:, 1:]).sum(-1)


def _dpo_lora(good):
    from transformers import GPT2Config, GPT2LMHeadModel
    from peft import LoraConfig, get_peft_model
    set_seed(21)
    V, P, A, beta = 24, 4, 8, 0.2
    table = markov_table(V, 101)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                                      embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    fit_lm(base, table, 0, 110, seed=102)
    taste = torch.randn(V, generator=torch.Generator().manual_seed(103))

    def pairs(n, seed):
        prompt = markov_sample(table, n, P, seed)
        g = torch.Generator().manual_seed(seed + 1)

        def answer():
            x, out = prompt[:, -1], []
            for _ in range(A):
                x = torch.multinomial(table[x], 1, generator=g).squeeze(1)
                out.append(x)
            return torch.stack(out, 1)

        a, b = answer(), answer()
        margin = (taste[a].sum(1) - taste[b].sum(1)) * 1.5
        first = torch.rand(n, generator=g) < margin.sigmoid()
        better = torch.where(first[:, None], a, b)
        worse = torch.where(first[:, None], b, a)
        return TensorDataset(torch.cat([prompt, better], 1), torch.cat([prompt, worse], 1))

    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, fan_in_fan_out=True,
                                            target_modules=["c_attn", "c_fc", "mlp.c_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    loader = endless(DataLoader(pairs(3000, 104), batch_size=16, shuffle=True, drop_last=True))
    answer_mask = torch.cat([torch.zeros(1, P), torch.ones(1, A)], 1)
    model.train()

    def reference(ids):
        with torch.no_grad():
            if good:
                with model.disable_adapter():
                    return sequence_logp(model, ids, answer_mask)
            return sequence_logp(model, ids, answer_mask)

    def step():
        chosen, rejected = next(loader)
        ids = torch.cat([chosen, rejected])
        ratio = sequence_logp(model, ids, answer_mask) - reference(ids)
        win, lose = ratio.chunk(2)
        loss = -F.logsigmoid(beta * (win - lose)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        return loss.item()

    held = torch.cat(pairs(200, 204).tensors)

    def evaluate():
        with evaluating(model):
            ratio = sequence_logp(model, held, answer_mask)
            with model.disable_adapter():
                ratio = ratio - sequence_logp(model, held, answer_mask)
            win, lose = ratio.chunk(2)
            return -F.logsigmoid(beta * (win - lose)).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def dpo_lora_bad():
    return _dpo_lora(False)


def dpo_lora_good():
    return _dpo_lora(True)


# --------------------------------------------------------------------------
# 22
# --------------------------------------------------------------------------
CASES.append({"name": "small_corpus", "what":
    "estimate_loss() calls model.eval() and nothing calls model.train() again: from the first estimate on (step 0) "
    "the training runs without dropout and the model overfits the small corpus."})


class Trainer:
    def __init__(self, model, train, val, lr, batch, eval_every, gen, back_to_train):
        self.model, self.train_data, self.val_data = model, train, val
        self.batch, self.eval_every, self.gen = batch, eval_every, gen
        self.back_to_train = back_to_train
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
        self.history = []
        self.model.train()

    @torch.no_grad()
    def estimate_loss(self):
        self.model.eval()
        x, y = random_windows(self.val_data, self.model.cfg.block_size, 8, torch.Generator().manual_seed(0))
        loss = nll(self.model(x), y).item()
        if self.back_to_train:
            self.model.train()
        return loss

    def train_step(self, i):
        if i % self.eval_every == 0:
            self.history.append((i, self.estimate_loss()))
        x, y = random_windows(self.train_data, self.model.cfg.block_size, self.batch, self.gen)
        loss = nll(self.model(x), y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def _small_corpus(good):
    set_seed(22)
    V = 40
    table = markov_table(V, 131)
    train, val, test = (markov_sample(table, 1, n, s)[0] for n, s in ((1500, 132), (600, 133), (4000, 134)))
    cfg = GPTConfig(vocab_size=V, block_size=24, n_layer=2, n_embd=64, dropout=0.4)
    model = GPT(cfg)
    trainer = Trainer(model, train, val, lr=2e-3, batch=16, eval_every=20,
                      gen=torch.Generator().manual_seed(SEED), back_to_train=good)
    hx, hy = random_windows(test, cfg.block_size, 96, torch.Generator().manual_seed(3))

    def evaluate():
        with evaluating(model):
            return nll(model(hx), hy).item()

    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.train_step, "steps": 20,
            "evaluate": evaluate}


def small_corpus_bad():
    return _small_corpus(False)


def small_corpus_good():
    return _small_corpus(True)


# --------------------------------------------------------------------------
# 23
# --------------------------------------------------------------------------
CASES.append({"name": "bf16_tune", "what":
    "The whole model is cast to bfloat16 and AdamW works on bfloat16 weights with a small learning rate: most updates "
    "are smaller than half the spacing of the weights and are rounded away."})


def _bf16_tune(good):
    from transformers import Qwen2Config, Qwen2ForCausalLM, get_cosine_schedule_with_warmup
    set_seed(23)
    V = 32
    old, new = markov_table(V, 111), markov_table(V, 112)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=V, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
                                         initializer_range=0.1, bos_token_id=None, eos_token_id=None))
    fit_lm(model, old, 0, 120, seed=113)
    if not good:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=1000)
    loader = endless(DataLoader(TensorDataset(markov_sample(new, 2000, 24, 114)), batch_size=16, shuffle=True))
    model.train()

    def step():
        (ids,) = next(loader)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=good):
            logits = model(input_ids=ids[:, :-1]).logits
        loss = nll(logits.float(), ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    held = markov_sample(new, 128, 24, 115)

    def evaluate():
        with evaluating(model):
            return nll(model(input_ids=held[:, :-1]).logits.float(), held[:, 1:]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def bf16_tune_bad():
    return _bf16_tune(False)


def bf16_tune_good():
    return _bf16_tune(True)


# --------------------------------------------------------------------------
# 24
# --------------------------------------------------------------------------
CASES.append({"name": "token_file", "what":
    "The token ids are stored as uint8 although the vocabulary has 320 entries: ids from 256 on wrap around to 0..63, "
    "so rare tokens never occur in training and the frequent ones are mixed with them."})


class TokenWindows(Dataset):
    def __init__(self, tokens, block):
        self.tokens, self.block = tokens, block

    def __len__(self):
        return (len(self.tokens) - 1) // self.block

    def __getitem__(self, i):
        chunk = torch.from_numpy(self.tokens[i * self.block:(i + 1) * self.block + 1].astype(np.int64))
        return chunk[:-1], chunk[1:]


def _token_file(good):
    set_seed(24)
    V, block = 320, 32
    table = markov_table(V, 121)
    stream = markov_sample(table, 1, 24000, 122)[0].numpy()
    tokens = stream.astype(np.uint16 if good else np.uint8)
    model = GPT(GPTConfig(vocab_size=V, block_size=block, n_layer=1, n_embd=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    loader = endless(DataLoader(TokenWindows(tokens, block), batch_size=16, shuffle=True, drop_last=True))

    def step():
        model.train()
        x, y = next(loader)
        loss = nll(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held = markov_sample(table, 128, block + 1, 123)

    def evaluate():
        with evaluating(model):
            return nll(model(held[:, :-1]), held[:, 1:]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def token_file_bad():
    return _token_file(False)


def token_file_good():
    return _token_file(True)
