"""Twenty-four small language-model training programs.

Each program is built by NAME_bad() / NAME_good(), which return a dictionary with
the model, the optimizer, a step function, the number of steps and an evaluation
on held-out data (lower is better).
"""
import copy
import itertools
import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import (
    BertConfig, BertForMaskedLM, BertForSequenceClassification,
    DistilBertConfig, DistilBertForSequenceClassification,
    GPT2Config, GPT2LMHeadModel, GPT2Model,
    GPTNeoXConfig, GPTNeoXForCausalLM,
    LlamaConfig, LlamaForCausalLM,
    OPTConfig, OPTForCausalLM,
    RobertaConfig, RobertaForSequenceClassification,
    get_linear_schedule_with_warmup,
)

torch.set_num_threads(1)
SEED = 0


# ----------------------------------------------------------------------------
# synthetic text
# ----------------------------------------------------------------------------
def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_chain(vocab, seed, sharp=2.5, contexts=None):
    g = torch.Generator().manual_seed(seed)
    return torch.softmax(sharp * torch.randn(contexts or vocab, vocab, generator=g), -1)


def walk(P, n, length, g, lag=1):
    """n sequences in which token t is drawn from P[token t-lag]."""
    x = torch.empty(n, length, dtype=torch.long)
    x[:, :lag] = torch.randint(0, P.size(1), (n, lag), generator=g)
    for t in range(lag, length):
        x[:, t] = torch.multinomial(P[x[:, t - lag]], 1, generator=g)[:, 0]
    return x


def walk2(P, n, length, g):
    """second-order chain: token t is drawn from P[(token t-1, token t-2)]."""
    V = P.size(1)
    x = torch.randint(0, V, (n, length), generator=g)
    for t in range(2, length):
        x[:, t] = torch.multinomial(P[x[:, t - 1] * V + x[:, t - 2]], 1, generator=g)[:, 0]
    return x


@torch.no_grad()
def heldout_nll(model, x, start=1):
    was = model.training
    model.eval()
    out = model(x)
    logits = out.logits if hasattr(out, "logits") else out
    logits = logits.float()
    nll = F.cross_entropy(logits[:, start - 1:-1].reshape(-1, logits.size(-1)), x[:, start:].reshape(-1))
    model.train(was)
    return nll.item()


def tiny_gpt2(vocab, n_positions=64, dim=48, layers=2, heads=4, drop=0.0, **kw):
    kw.setdefault("bos_token_id", 0)
    kw.setdefault("eos_token_id", 0)
    return GPT2Config(vocab_size=vocab, n_positions=n_positions, n_embd=dim, n_layer=layers, n_head=heads,
                      resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop, **kw)


def tiny_llama(vocab, dim=48, layers=2, **kw):
    kw.setdefault("bos_token_id", 0)
    kw.setdefault("eos_token_id", 0)
    return LlamaConfig(vocab_size=vocab, hidden_size=dim, intermediate_size=2 * dim, num_hidden_layers=layers,
                       num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, **kw)


def warm_lm(model, x, steps, lr=5e-3, batch=32):
    """short language-model pre-training, stands for a downloaded checkpoint"""
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for i in range(steps):
        j = (i * batch) % (len(x) - batch + 1)
        b = x[j:j + batch]
        loss = model(input_ids=b, labels=b).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
    return model


CASES = []


def case(name, what):
    CASES.append({"name": name, "what": what})


# ----------------------------------------------------------------------------
# supervised fine-tuning, prompts masked
# ----------------------------------------------------------------------------
case("sft_stop",
     "The collator pads with the EOS id and then sets labels to -100 wherever input_ids equals the pad id, so the real "
     "EOS at the end of every answer is masked too: the model never learns to stop.")


class InstructionData(Dataset):
    """prompt: letters then SEP; answer: the letters moved by three places, then EOS"""
    EOS, SEP, BASE, LETTERS = 0, 1, 2, 12

    def __init__(self, n, seed):
        r = random.Random(seed)
        self.rows = []
        for _ in range(n):
            word = [r.randrange(self.LETTERS) for _ in range(r.randint(2, 6))]
            prompt = [self.BASE + w for w in word] + [self.SEP]
            answer = [self.BASE + (w + 3) % self.LETTERS for w in word] + [self.EOS]
            self.rows.append({"prompt": prompt, "answer": answer})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def _sft_stop(good):
    set_seed(SEED)
    pad_id = InstructionData.EOS
    train = InstructionData(4000, 1)
    test = InstructionData(256, 2)
    model = GPT2LMHeadModel(tiny_gpt2(14, n_positions=16, dim=64, pad_token_id=pad_id))

    def collate(rows):
        width = max(len(r["prompt"]) + len(r["answer"]) for r in rows)
        ids = torch.full((len(rows), width), pad_id)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for k, r in enumerate(rows):
            seq = r["prompt"] + r["answer"]
            ids[k, :len(seq)] = torch.tensor(seq)
            mask[k, :len(seq)] = 1
        labels = ids.clone()
        if good:
            labels[mask == 0] = -100
        else:
            labels[ids == pad_id] = -100
        for k, r in enumerate(rows):
            labels[k, :len(r["prompt"])] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    loader = DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(i=None):
        model.train()
        batch = next(batches)
        loss = model(**batch).loss
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        total, count = 0.0, 0
        for r in test.rows:
            seq = torch.tensor([r["prompt"] + r["answer"]])
            lp = model(seq, attention_mask=torch.ones_like(seq)).logits.log_softmax(-1)[0]
            n = len(r["prompt"])
            for t in range(n, seq.size(1)):
                total -= lp[t - 1, seq[0, t]].item()
                count += 1
        model.train()
        return total / count

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def sft_stop_bad(): return _sft_stop(False)
def sft_stop_good(): return _sft_stop(True)


# ----------------------------------------------------------------------------
# causal pre-training of a small llama
# ----------------------------------------------------------------------------
case("pretrain_llama",
     "The data set already returns inputs x[:-1] and targets x[1:], and the targets go in as labels= of the Hugging Face "
     "model, which shifts once more: the model learns to predict the token after the next one.")


class WindowData(Dataset):
    def __init__(self, stream, block):
        self.stream, self.block = stream, block

    def __len__(self):
        return (len(self.stream) - 1) // self.block

    def __getitem__(self, i):
        s = i * self.block
        chunk = self.stream[s:s + self.block + 1]
        return chunk[:-1], chunk[1:]


def _pretrain_llama(good):
    set_seed(SEED)
    P = make_chain(24, 11)
    g = torch.Generator().manual_seed(12)
    stream = walk(P, 64, 513, g).reshape(-1)
    valid = walk(P, 64, 32, g)
    loader = DataLoader(WindowData(stream, 32), batch_size=16, shuffle=True, drop_last=True)
    model = LlamaForCausalLM(tiny_llama(24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    it = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(i=None):
        model.train()
        x, y = next(it)
        if good:
            logits = model(input_ids=x).logits
            loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), y.reshape(-1))
        else:
            loss = model(input_ids=x, labels=y).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, valid)}


def pretrain_llama_bad(): return _pretrain_llama(False)
def pretrain_llama_good(): return _pretrain_llama(True)


# ----------------------------------------------------------------------------
# reward model
# ----------------------------------------------------------------------------
case("reward_model",
     "The reward is read at position -1 of right-padded answers, i.e. at a padding token for all but the longest answers "
     "of the batch, not at the last real token.")


class RewardModel(nn.Module):
    def __init__(self, cfg, at_end):
        super().__init__()
        self.backbone = GPT2Model(cfg)
        self.v_head = nn.Sequential(nn.Linear(cfg.n_embd, cfg.n_embd), nn.Tanh(), nn.Linear(cfg.n_embd, 1, bias=False))
        self.at_end = at_end

    def forward(self, input_ids, attention_mask):
        h = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        values = self.v_head(h).squeeze(-1)
        if self.at_end:
            last = attention_mask.sum(1) - 1
            return values[torch.arange(len(values)), last]
        return values[:, -1]


def _reward_model(good):
    set_seed(SEED)
    r = random.Random(5)
    merit = [0.0] + [r.gauss(0, 1) for _ in range(29)]

    def answer():
        return [r.randrange(1, 30) for _ in range(r.randint(2, 20))]

    def quality(a):
        return sum(merit[t] for t in a) / len(a)

    def pairs(n):
        rows = []
        while len(rows) < n:
            a, b = answer(), answer()
            if abs(quality(a) - quality(b)) > 0.1:
                rows.append((a, b) if quality(a) > quality(b) else (b, a))
        return rows

    train, test = pairs(1500), pairs(400)
    model = RewardModel(tiny_gpt2(30, n_positions=24), at_end=good)

    def pad(seqs):
        width = max(map(len, seqs))
        ids = torch.tensor([s + [0] * (width - len(s)) for s in seqs])
        mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in seqs])
        return ids, mask

    def collate(rows):
        return pad([c for c, _ in rows]) + pad([j for _, j in rows])

    loader = itertools.chain.from_iterable(
        itertools.repeat(DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i=None):
        model.train()
        c_ids, c_mask, r_ids, r_mask = next(loader)
        loss = -F.logsigmoid(model(c_ids, c_mask) - model(r_ids, r_mask)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        loss = 0.0
        for c, j in test:
            one = model(torch.tensor([c]), torch.ones(1, len(c), dtype=torch.long))
            two = model(torch.tensor([j]), torch.ones(1, len(j), dtype=torch.long))
            loss -= F.logsigmoid(one - two).item()
        model.train()
        return loss / len(test)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def reward_model_bad(): return _reward_model(False)
def reward_model_good(): return _reward_model(True)


# ----------------------------------------------------------------------------
# masked language model
# ----------------------------------------------------------------------------
case("mlm",
     "The collator takes the labels from input_ids after [MASK] has been written into them, so the target of every masked "
     "position is the [MASK] token itself.")


class MaskingCollator:
    def __init__(self, mask_id, vocab, prob, labels_first):
        self.mask_id, self.vocab, self.prob, self.labels_first = mask_id, vocab, prob, labels_first

    def __call__(self, rows):
        ids = torch.stack(rows)
        chosen = torch.rand(ids.shape) < self.prob
        if self.labels_first:
            labels = torch.where(chosen, ids, -100)
        replace = chosen & (torch.rand(ids.shape) < 0.8)
        ids[replace] = self.mask_id
        other = chosen & ~replace & (torch.rand(ids.shape) < 0.5)
        ids[other] = torch.randint(0, self.vocab, (int(other.sum()),))
        if not self.labels_first:
            labels = torch.where(chosen, ids, -100)
        return {"input_ids": ids, "labels": labels}


def _mlm(good):
    set_seed(SEED)
    V = 16
    P = make_chain(V, 21, sharp=3.0)
    g = torch.Generator().manual_seed(22)
    train, valid = walk(P, 2000, 24, g), walk(P, 128, 24, g)
    cfg = BertConfig(vocab_size=V + 1, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                     intermediate_size=128, max_position_embeddings=32, pad_token_id=None,
                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForMaskedLM(cfg)
    loader = DataLoader(train, batch_size=32, shuffle=True,
                        collate_fn=MaskingCollator(V, V, 0.15, good))
    stream = itertools.chain.from_iterable(itertools.repeat(loader))
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(i=None):
        model.train()
        batch = next(stream)
        optim.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        total = 0.0
        spots = [3, 8, 13, 19]
        for k in spots:
            x = valid.clone()
            x[:, k] = V
            total += F.cross_entropy(model(input_ids=x).logits[:, k], valid[:, k]).item()
        model.train()
        return total / len(spots)

    return {"model": model, "optimizer": optim, "step": step, "steps": 20, "evaluate": evaluate}


def mlm_bad(): return _mlm(False)
def mlm_good(): return _mlm(True)


# ----------------------------------------------------------------------------
# LoRA for classification
# ----------------------------------------------------------------------------
case("lora_cls",
     "The LoraConfig has no task_type (and no modules_to_save), so peft freezes the freshly initialised classification "
     "head together with the base: the random head never learns.")


def bag_task(n, vocab, classes, length, seed, first=0):
    g = torch.Generator().manual_seed(1234)
    belongs = torch.randint(0, classes, (vocab,), generator=g)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    x = torch.randint(first, vocab, (n, length), generator=g)
    for c in range(classes):
        own = (belongs == c).nonzero()[:, 0]
        own = own[own >= first]
        rows = (y == c).nonzero()[:, 0]
        pick = own[torch.randint(0, len(own), (len(rows), length), generator=g)]
        keep = torch.rand(len(rows), length, generator=g) < 0.35
        x[rows] = torch.where(keep, pick, x[rows])
    return x, y


def _lora_cls(good):
    from peft import LoraConfig, get_peft_model
    set_seed(SEED)
    cfg = BertConfig(vocab_size=60, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
                     max_position_embeddings=32, num_labels=4, hidden_dropout_prob=0.0,
                     attention_probs_dropout_prob=0.0, initializer_range=0.1)
    base = BertForSequenceClassification(cfg)
    nn.init.normal_(base.classifier.weight, std=0.02)
    kw = {"task_type": "SEQ_CLS"} if good else {}
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0,
                                            target_modules=["query", "value"], **kw))
    xtr, ytr = bag_task(2000, 60, 4, 20, 41, first=1)
    xte, yte = bag_task(300, 60, 4, 20, 42, first=1)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True)
    data = itertools.chain.from_iterable(itertools.repeat(loader))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    def step(i=None):
        model.train()
        x, y = next(data)
        loss = model(input_ids=x, attention_mask=torch.ones_like(x), labels=y).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        model.eval()
        out = model(input_ids=xte, attention_mask=torch.ones_like(xte)).logits
        model.train()
        return F.cross_entropy(out, yte).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def lora_cls_bad(): return _lora_cls(False)
def lora_cls_good(): return _lora_cls(True)


# ----------------------------------------------------------------------------
# a GPT by hand
# ----------------------------------------------------------------------------
class SelfAttention(nn.Module):
    def __init__(self, dim, heads, drop=0.0):
        super().__init__()
        self.heads, self.drop = heads, drop
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.drop if self.training else 0.0)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, dim, heads, drop=0.0, attn=None, mlp=None):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = attn or SelfAttention(dim, heads, drop)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = mlp or nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


def init_gpt(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.05)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.05)


case("frozen_embeddings",
     "Blocks run under torch.utils.checkpoint with use_reentrant=True while the word vectors are frozen (positions are sinusoids): no input of the "
     "first blocks needs a gradient, so the checkpointed blocks get no gradients and only ln_f and the head learn.")


def sinusoids(length, dim):
    angle = torch.arange(length)[:, None] * torch.exp(-math.log(10000.0) * torch.arange(0, dim, 2) / dim)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class CheckpointGPT(nn.Module):
    def __init__(self, vocab, block, dim, layers, heads, reentrant):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.register_buffer("pe", sinusoids(block, dim))
        self.h = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.reentrant = reentrant
        self.apply(init_gpt)

    def forward(self, idx):
        x = self.wte(idx) + self.pe[:idx.size(1)]
        for blk in self.h:
            if self.training:
                x = checkpoint(blk, x, use_reentrant=self.reentrant)
            else:
                x = blk(x)
        return self.lm_head(self.ln_f(x))


def _frozen_embeddings(good):
    set_seed(SEED)
    P = make_chain(16, 51, sharp=3.0)
    g = torch.Generator().manual_seed(52)
    train, valid = walk(P, 2000, 25, g, lag=2), walk(P, 64, 25, g, lag=2)
    model = CheckpointGPT(16, 32, 48, 2, 4, reentrant=not good)
    word_vectors = torch.randn(16, 48, generator=g)  # stands for vectors from disk
    model.wte = nn.Embedding.from_pretrained(word_vectors, freeze=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    loader = itertools.chain.from_iterable(itertools.repeat(DataLoader(train, batch_size=32, shuffle=True)))

    def step(i=None):
        model.train()
        seq = next(loader)
        logits = model(seq[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), seq[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, valid, start=2)}


def frozen_embeddings_bad(): return _frozen_embeddings(False)
def frozen_embeddings_good(): return _frozen_embeddings(True)


# ----------------------------------------------------------------------------
# a decoder with a configurable stack
# ----------------------------------------------------------------------------
case("decoder_stack",
     "The blocks are kept in a plain Python list, not in an nn.ModuleList: model.parameters() does not contain them, so the "
     "optimizer trains only the embeddings, the last norm and the head.")


class Decoder(nn.Module):
    def __init__(self, vocab, block, dim, heads, depth, container):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab, dim)
        self.pos_emb = nn.Embedding(block, dim)
        self.blocks = container([Block(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, vocab)
        nn.init.normal_(self.tok_emb.weight, std=0.1)
        nn.init.normal_(self.pos_emb.weight, std=0.1)

    def forward(self, ids):
        h = self.tok_emb(ids) + self.pos_emb.weight[:ids.size(1)]
        for block in self.blocks:
            h = block(h)
        return self.to_logits(self.norm(h))


def _decoder_stack(good):
    set_seed(SEED)
    vocab, T = 16, 24
    P = make_chain(vocab, 31, sharp=5.0)
    g = torch.Generator().manual_seed(32)
    train, valid = walk(P, 2000, T + 1, g, lag=2), walk(P, 64, T + 1, g, lag=2)
    model = Decoder(vocab, T + 1, 48, 4, 2, nn.ModuleList if good else list)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = itertools.chain.from_iterable(itertools.repeat(DataLoader(train, batch_size=32, shuffle=True)))
    criterion = nn.CrossEntropyLoss()

    def step(i=None):
        model.train()
        seq = next(loader)
        optimizer.zero_grad()
        logits = model(seq[:, :-1])
        loss = criterion(logits.transpose(1, 2), seq[:, 1:])
        loss.backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, valid, start=2)}


def decoder_stack_bad(): return _decoder_stack(False)
def decoder_stack_good(): return _decoder_stack(True)


# ----------------------------------------------------------------------------
# mixture of experts
# ----------------------------------------------------------------------------
case("moe_dispatch",
     "Tokens are sorted by expert for the dispatch, but the outputs are put back with y[order] instead of the inverse "
     "permutation: each token gets the expert output of another token.")


class SparseMLP(nn.Module):
    def __init__(self, dim, experts, unsort):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(experts)])
        self.unsort = unsort
        self.aux = None

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        probs = self.router(flat).softmax(-1)
        gate, expert = probs.max(-1)
        counts = expert.bincount(minlength=len(self.experts))
        share = counts.float() / len(flat)
        self.aux = len(self.experts) * (share * probs.mean(0)).sum()
        order = expert.argsort(stable=True)
        parts = flat[order].split(counts.tolist())
        y = torch.cat([f(p) for f, p in zip(self.experts, parts)])
        if self.unsort:
            y = torch.empty_like(y).index_copy(0, order, y)
        else:
            y = y[order]
        return (gate.unsqueeze(-1) * y).view_as(x)


class MoEGPT(nn.Module):
    def __init__(self, vocab, block, dim, layers, heads, experts, unsort):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(block, dim)
        self.blocks = nn.ModuleList(
            [Block(dim, heads, mlp=SparseMLP(dim, experts, unsort)) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(init_gpt)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for b in self.blocks:
            x = b(x)
        return self.head(self.ln_f(x))

    def aux_loss(self):
        return sum(b.mlp.aux for b in self.blocks)


def _moe_dispatch(good):
    set_seed(SEED)
    P = make_chain(8, 61, sharp=6.0, contexts=64)
    g = torch.Generator().manual_seed(62)
    train, valid = walk2(P, 3000, 25, g), walk2(P, 64, 25, g)
    model = MoEGPT(8, 32, 48, 1, 4, experts=4, unsort=good)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = itertools.chain.from_iterable(itertools.repeat(DataLoader(train, batch_size=32, shuffle=True)))

    def step(i=None):
        model.train()
        seq = next(loader)
        logits = model(seq[:, :-1])
        ce = F.cross_entropy(logits.flatten(0, 1), seq[:, 1:].flatten())
        loss = ce + 0.01 * model.aux_loss()
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, valid, start=2)}


def moe_dispatch_bad(): return _moe_dispatch(False)
def moe_dispatch_good(): return _moe_dispatch(True)


# ----------------------------------------------------------------------------
# gradient accumulation over sources
# ----------------------------------------------------------------------------
case("mixed_sources",
     "optimizer.zero_grad() stands inside the accumulation loop, before each backward, so only the gradient of the last "
     "micro-batch (the last source) reaches the update.")


def _mixed_sources(good):
    set_seed(SEED)
    g = torch.Generator().manual_seed(72)
    n_src, V = 4, 20
    loaders, valid = [], []
    for s in range(n_src):
        P = make_chain(V, 710 + s)
        tag = lambda x: torch.cat([torch.full((len(x), 1), V + s), x], 1)
        loaders.append(iter(itertools.chain.from_iterable(itertools.repeat(
            DataLoader(tag(walk(P, 800, 20, g)), batch_size=8, shuffle=True)))))
        valid.append(tag(walk(P, 32, 20, g)))
    valid = torch.cat(valid)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(
        vocab_size=V + n_src, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(i=None):
        model.train()
        if good:
            optimizer.zero_grad()
        for loader in loaders:
            ids = next(loader)
            if not good:
                optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss / n_src
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, valid, start=2)}


def mixed_sources_bad(): return _mixed_sources(False)
def mixed_sources_good(): return _mixed_sources(True)


# ----------------------------------------------------------------------------
# distillation
# ----------------------------------------------------------------------------
case("distill_kl",
     "F.kl_div gets the student's probabilities (softmax) as its first argument where it wants log-probabilities.")


class Distiller:
    def __init__(self, teacher, student, lr, temperature, use_log):
        self.teacher, self.student = teacher, student
        self.T, self.use_log = temperature, use_log
        self.opt = torch.optim.AdamW(student.parameters(), lr=lr)

    def loss(self, ids):
        with torch.no_grad():
            target = F.softmax(self.teacher(input_ids=ids).logits / self.T, dim=-1)
        logits = self.student(input_ids=ids).logits / self.T
        ours = F.log_softmax(logits, dim=-1) if self.use_log else F.softmax(logits, dim=-1)
        V = ours.size(-1)
        return F.kl_div(ours.view(-1, V), target.view(-1, V), reduction="batchmean") * self.T ** 2

    def train_step(self, ids):
        self.teacher.eval()
        self.student.train()
        loss = self.loss(ids)
        self.opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.opt.step()
        return loss.item()


def _distill_kl(good):
    set_seed(SEED)
    P = make_chain(24, 81, sharp=2.0)
    g = torch.Generator().manual_seed(82)
    text, valid = walk(P, 2400, 20, g), walk(P, 64, 20, g)
    teacher = warm_lm(GPT2LMHeadModel(tiny_gpt2(24, n_positions=32)), text, 60)
    teacher.requires_grad_(False)
    student = GPT2LMHeadModel(tiny_gpt2(24, n_positions=32, dim=32, layers=1))
    d = Distiller(teacher, student, 3e-3, 2.0, use_log=good)
    loader = itertools.chain.from_iterable(itertools.repeat(DataLoader(text, batch_size=32, shuffle=True)))

    def step(i=None):
        d.train_step(next(loader))

    return {"model": student, "optimizer": d.opt, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(student, valid)}


def distill_kl_bad(): return _distill_kl(False)
def distill_kl_good(): return _distill_kl(True)


# ----------------------------------------------------------------------------
# scoring essays: regression
# ----------------------------------------------------------------------------
case("essay_score",
     "F.mse_loss compares logits of shape (B, 1) with scores of shape (B,): they broadcast to (B, B), and the model learns "
     "to give everybody the mean score.")


def _essay_score(good):
    set_seed(SEED)
    V = 40
    g = torch.Generator().manual_seed(92)
    worth = torch.randn(V, generator=g)

    def essays(n):
        x = torch.randint(1, V, (n, 16), generator=g)
        return x, worth[x].mean(1) * 4

    xtr, ytr = essays(2000)
    xte, yte = essays(256)
    mu, sd = ytr.mean(), ytr.std()
    ytr, yte = (ytr - mu) / sd, (yte - mu) / sd
    model = RobertaForSequenceClassification(RobertaConfig(
        vocab_size=V, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=20, num_labels=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = itertools.chain.from_iterable(
        itertools.repeat(DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True)))

    def step(i=None):
        model.train()
        ids, score = next(loader)
        pred = model(input_ids=ids, attention_mask=(ids != 0).long()).logits
        if good:
            pred = pred.squeeze(-1)
        loss = F.mse_loss(pred, score)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        pred = model(input_ids=xte, attention_mask=(xte != 0).long()).logits[:, 0]
        model.train()
        return ((pred - yte) ** 2).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def essay_score_bad(): return _essay_score(False)
def essay_score_good(): return _essay_score(True)


# ----------------------------------------------------------------------------
# fine-tuning a classifier for several epochs
# ----------------------------------------------------------------------------
case("cls_epochs",
     "The linear schedule gets len(loader) as its number of training steps, the steps of one epoch, though training runs for "
     "many epochs: the learning rate is 0 after the first epoch (8 steps).")


def _cls_epochs(good):
    set_seed(SEED)
    epochs = 30
    xtr, ytr = bag_task(512, 50, 3, 16, 101, first=1)
    xte, yte = bag_task(300, 50, 3, 16, 102, first=1)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True)
    model = DistilBertForSequenceClassification(DistilBertConfig(
        vocab_size=50, dim=48, n_layers=2, n_heads=4, hidden_dim=96, max_position_embeddings=24, num_labels=3,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    total_steps = len(loader) * epochs if good else len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=total_steps)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(i=None):
        model.train()
        ids, y = next(batches)
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=y).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        model.eval()
        out = model(input_ids=xte, attention_mask=torch.ones_like(xte)).logits
        model.train()
        return F.cross_entropy(out, yte).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def cls_epochs_bad(): return _cls_epochs(False)
def cls_epochs_good(): return _cls_epochs(True)


# ----------------------------------------------------------------------------
# nanoGPT style pre-training
# ----------------------------------------------------------------------------
case("nano_adamw",
     "AdamW is called with positional arguments (params, lr, betas, 0.1): the fourth is eps, not weight_decay, so Adam runs "
     "with eps=0.1 and its steps are tiny.")


class NanoGPT(nn.Module):
    def __init__(self, vocab, block, dim=48, layers=2, heads=4, drop=0.0):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(vocab, dim),
            wpe=nn.Embedding(block, dim),
            drop=nn.Dropout(drop),
            h=nn.ModuleList([Block(dim, heads, drop) for _ in range(layers)]),
            ln_f=nn.LayerNorm(dim),
        ))
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(init_gpt)

    def forward(self, idx, targets=None):
        t = self.transformer
        x = t.drop(t.wte(idx) + t.wpe(torch.arange(idx.size(1), device=idx.device)))
        for block in t.h:
            x = block(x)
        logits = self.lm_head(t.ln_f(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def _nano_adamw(good):
    set_seed(SEED)
    learning_rate, beta1, beta2, weight_decay = 2e-3, 0.9, 0.95, 0.1
    block_size, batch_size = 24, 32
    P = make_chain(32, 111)
    g = torch.Generator().manual_seed(112)
    data = walk(P, 100, 400, g, lag=2).reshape(-1)
    valid = walk(P, 64, 24, g, lag=2)
    model = NanoGPT(32, block_size)

    def get_batch():
        ix = torch.randint(len(data) - block_size - 1, (batch_size,))
        x = torch.stack([data[i:i + block_size] for i in ix])
        y = torch.stack([data[i + 1:i + 1 + block_size] for i in ix])
        return x, y

    if good:
        optimizer = torch.optim.AdamW(model.parameters(), learning_rate, (beta1, beta2), weight_decay=weight_decay)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), learning_rate, (beta1, beta2), weight_decay)

    def step(i=None):
        model.train()
        X, Y = get_batch()
        logits, loss = model(X, Y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, valid, start=2)}


def nano_adamw_bad(): return _nano_adamw(False)
def nano_adamw_good(): return _nano_adamw(True)


# ----------------------------------------------------------------------------
# OPT from scratch
# ----------------------------------------------------------------------------
case("opt_loop",
     "zero_grad is missing from the loop: the gradients of all the steps so far add up.")


def _opt_loop(good):
    set_seed(SEED)
    P = make_chain(24, 121, sharp=6.0)
    g = torch.Generator().manual_seed(122)
    train, valid = walk(P, 2000, 24, g, lag=2), walk(P, 64, 24, g, lag=2)
    model = OPTForCausalLM(OPTConfig(
        vocab_size=24, hidden_size=48, word_embed_proj_dim=48, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, dropout=0.0, pad_token_id=None, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    loader = itertools.chain.from_iterable(itertools.repeat(DataLoader(train, batch_size=32, shuffle=True)))

    def step(i=None):
        model.train()
        ids = next(loader)
        if good:
            optimizer.zero_grad()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        """mean KL from the true distribution of the next token to the model's"""
        model.eval()
        logp = model(input_ids=valid).logits[:, 2:-1].log_softmax(-1)
        true = P[valid[:, 1:-2]]
        model.train()
        return (true * (true.clamp_min(1e-12).log() - logp)).sum(-1).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def opt_loop_bad(): return _opt_loop(False)
def opt_loop_good(): return _opt_loop(True)


# ----------------------------------------------------------------------------
# own attention
# ----------------------------------------------------------------------------
case("rotary",
     "The rotary embedding takes dimension 1 for the time axis, but q and k have already been transposed to (B, heads, T, d): "
     "they are rotated by the index of the head, and the model has no positions at all.")


def rotary(x, base=10000.0):
    """x: (batch, time, heads, head_dim)"""
    T, D = x.size(1), x.size(-1)
    freq = base ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
    angle = torch.arange(T, dtype=torch.float32)[:, None] * freq
    cos, sin = angle.cos()[None, :, None, :], angle.sin()[None, :, None, :]
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)


class RotaryAttention(nn.Module):
    def __init__(self, dim, heads, rotate_first):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.heads, self.rotate_first = heads, rotate_first

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (w(x).view(B, T, self.heads, -1) for w in (self.wq, self.wk, self.wv))
        if self.rotate_first:
            q, k = rotary(q), rotary(k)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        else:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            q, k = rotary(q), rotary(k)
        att = (q @ k.transpose(-2, -1)) * (q.size(-1) ** -0.5)
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        att = att.masked_fill(future, float("-inf")).softmax(-1)
        return self.wo((att @ v).transpose(1, 2).reshape(B, T, C))


class RotaryGPT(nn.Module):
    def __init__(self, vocab, dim, layers, heads, rotate_first):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            [Block(dim, heads, attn=RotaryAttention(dim, heads, rotate_first)) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        self.apply(init_gpt)

    def forward(self, idx):
        h = self.embed(idx)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def _rotary(good):
    set_seed(SEED)
    P = make_chain(16, 131, sharp=3.0)
    g = torch.Generator().manual_seed(132)
    train, valid = walk(P, 2000, 33, g, lag=3), walk(P, 128, 33, g, lag=3)
    model = RotaryGPT(16, 48, 2, 4, rotate_first=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    loader = itertools.chain.from_iterable(itertools.repeat(DataLoader(train, batch_size=32, shuffle=True)))

    def step(i=None):
        model.train()
        seq = next(loader)
        logits = model(seq[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), seq[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, valid, start=3)}


def rotary_bad(): return _rotary(False)
def rotary_good(): return _rotary(True)


# ----------------------------------------------------------------------------
# tagging
# ----------------------------------------------------------------------------
case("tagger",
     "nn.TransformerEncoderLayer is built without batch_first=True but fed (batch, time, dim): attention runs across the "
     "sentences of the batch, not along the sentence.")


class Tagger(nn.Module):
    def __init__(self, vocab, tags, dim, length, **layer_kw):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(1, length, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, **layer_kw)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, tags)
        nn.init.normal_(self.tok.weight, std=0.1)

    def forward(self, ids):
        return self.out(self.encoder(self.tok(ids) + self.pos[:, :ids.size(1)]))


def _tagger(good):
    set_seed(SEED)
    V, tags, L = 16, 5, 12
    g = torch.Generator().manual_seed(142)
    tag_of = torch.randint(0, tags, (V,), generator=g)

    def sentences(n):
        x = torch.randint(0, V, (n, L), generator=g)
        y = tag_of[x.roll(1, dims=1)]
        y[:, 0] = 0
        return x, y

    train, (xte, yte) = sentences(2000), sentences(200)
    model = Tagger(V, tags, 48, L, **({"batch_first": True} if good else {}))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = itertools.chain.from_iterable(
        itertools.repeat(DataLoader(TensorDataset(*train), batch_size=32, shuffle=True, drop_last=True)))
    criterion = nn.CrossEntropyLoss()

    def step(i=None):
        model.train()
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x).reshape(-1, tags), y.reshape(-1))
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        err = (model(xte).argmax(-1) != yte).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def tagger_bad(): return _tagger(False)
def tagger_good(): return _tagger(True)


# ----------------------------------------------------------------------------
# packed instruction data
# ----------------------------------------------------------------------------
case("packing",
     "While packing, start = len(ids) is taken after the prompt has been appended, so the span set to -100 lies on the answer: "
     "the prompts are trained and the answers are (mostly) masked.")


class Packer:
    """fills rows of fixed length with whole conversations; each keeps its own positions and its own attention"""

    def __init__(self, examples, row_len, seed, before):
        self.examples, self.row_len, self.rand, self.before = examples, row_len, random.Random(seed), before

    def row(self):
        ids, doc, pos, spans = [], [], [], []
        while len(ids) < self.row_len:
            prompt, answer = self.rand.choice(self.examples)
            if self.before:
                start = len(ids)
                ids.extend(prompt)
            else:
                ids.extend(prompt)
                start = len(ids)
            ids.extend(answer)
            n = len(prompt) + len(answer)
            doc.extend([len(spans)] * n)
            pos.extend(range(n))
            spans.append((start, start + len(prompt)))
        labels = list(ids)
        for a, b in spans:
            for k in range(a, min(b, len(ids))):
                labels[k] = -100
        return tuple(torch.tensor(x[:self.row_len]) for x in (ids, labels, doc, pos))

    def batch(self, size):
        return tuple(torch.stack(c) for c in zip(*[self.row() for _ in range(size)]))


def _packing(good):
    set_seed(SEED)
    r = random.Random(151)
    topics, words, eos = 6, 24, 30
    g = torch.Generator().manual_seed(152)
    tables = [torch.randperm(words, generator=g)[:4].tolist() for _ in range(topics)]

    def conversation():
        t = r.randrange(topics)
        prompt = [words + t] + [r.randrange(words) for _ in range(r.randint(2, 4))] + [eos + 1]
        answer = [r.choice(tables[t]) for _ in range(r.randint(3, 8))] + [eos]
        return prompt, answer

    packer = Packer([conversation() for _ in range(1000)], 64, 153, before=good)
    held = [conversation() for _ in range(150)]
    model = GPT2LMHeadModel(tiny_gpt2(eos + 2, n_positions=64, bos_token_id=eos, eos_token_id=eos))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    causal = torch.ones(64, 64, dtype=torch.bool).tril()

    def step(i=None):
        model.train()
        ids, labels, doc, pos = packer.batch(8)
        allowed = (doc[:, :, None] == doc[:, None, :]) & causal
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        loss = model(input_ids=ids, attention_mask=mask[:, None], position_ids=pos, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        total, n = 0.0, 0
        for prompt, answer in held:
            x = torch.tensor([prompt + answer])
            lp = model(input_ids=x).logits[0, len(prompt) - 1:-1].log_softmax(-1)
            total -= lp.gather(1, x[0, len(prompt):, None]).sum().item()
            n += len(answer)
        model.train()
        return total / n

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def packing_bad(): return _packing(False)
def packing_good(): return _packing(True)


# ----------------------------------------------------------------------------
# translation with nn.Transformer
# ----------------------------------------------------------------------------
case("translate",
     "src_key_padding_mask and memory_key_padding_mask are built as src != PAD; nn.Transformer masks what is True, so the "
     "real source words are hidden and only the padding is seen.")


class Translator(nn.Module):
    PAD, BOS, EOS = 0, 1, 2

    def __init__(self, vocab, dim, max_len, true_is_pad):
        super().__init__()
        self.src_emb = nn.Embedding(vocab, dim)
        self.tgt_emb = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.core = nn.Transformer(dim, 4, 1, 1, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(dim, vocab)
        self.true_is_pad = true_is_pad

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), dtype=torch.bool)
        pad = (src == self.PAD) if self.true_is_pad else (src != self.PAD)
        s = self.src_emb(src) + self.pos(torch.arange(src.size(1)))
        t = self.tgt_emb(tgt) + self.pos(torch.arange(tgt.size(1)))
        h = self.core(s, t, tgt_mask=mask, src_key_padding_mask=pad, memory_key_padding_mask=pad, tgt_is_causal=True)
        return self.out(h)


def _translate(good):
    set_seed(SEED)
    V, M = 20, 12
    r = random.Random(161)
    perm = list(range(3, V))
    r.shuffle(perm)

    def pairs(n):
        S, Tt = [], []
        for _ in range(n):
            words = [r.randrange(3, V) for _ in range(r.randint(3, M - 3))]
            s = words + [Translator.EOS]
            t = [Translator.BOS] + [perm[w - 3] for w in words] + [Translator.EOS]
            S.append(s + [0] * (M - len(s)))
            Tt.append(t + [0] * (M - len(t)))
        return torch.tensor(S), torch.tensor(Tt)

    train, (ste, tte) = pairs(3000), pairs(200)
    model = Translator(V, 48, M, true_is_pad=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss_fn = nn.CrossEntropyLoss(ignore_index=Translator.PAD)
    loader = itertools.chain.from_iterable(
        itertools.repeat(DataLoader(TensorDataset(*train), batch_size=32, shuffle=True)))

    def step(i=None):
        model.train()
        src, tgt = next(loader)
        logits = model(src, tgt[:, :-1])
        loss = loss_fn(logits.reshape(-1, V), tgt[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        loss = loss_fn(model(ste, tte[:, :-1]).reshape(-1, V), tte[:, 1:].reshape(-1)).item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def translate_bad(): return _translate(False)
def translate_good(): return _translate(True)


# ----------------------------------------------------------------------------
# DPO
# ----------------------------------------------------------------------------
case("dpo",
     "The reference is the policy itself (ref_model = policy, no copy): the log-ratio is always 0, the loss stays at log 2, and "
     "nothing holds the policy near its start.")


def sequence_logp(model, ids, prompt_len):
    logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    tok = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return tok[:, prompt_len - 1:].sum(-1)


def _dpo(good):
    set_seed(SEED)
    V, plen, rlen, beta = 16, 4, 8, 0.5
    g = torch.Generator().manual_seed(172)
    nice, plain = make_chain(V, 173, 1.5), make_chain(V, 174, 1.5)
    mixed = torch.cat([walk(nice, 1600, plen + rlen, g), walk(plain, 1600, plen + rlen, g)])
    mixed = mixed[torch.randperm(len(mixed), generator=g)]
    policy = warm_lm(GPT2LMHeadModel(tiny_gpt2(V, n_positions=16)), mixed, 60)

    def continue_with(P, prompt):
        seq = [prompt]
        last = prompt[:, -1]
        for _ in range(rlen):
            last = torch.multinomial(P[last], 1, generator=g)[:, 0]
            seq.append(last[:, None])
        return torch.cat(seq, 1)

    def preferences(n):
        prompt = torch.randint(0, V, (n, plen), generator=g)
        return continue_with(nice, prompt), continue_with(plain, prompt)

    train, (good_ans, bad_ans) = preferences(1000), preferences(200)
    ref_model = copy.deepcopy(policy) if good else policy
    ref_model.eval()
    if good:
        ref_model.requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-4)
    loader = itertools.chain.from_iterable(
        itertools.repeat(DataLoader(TensorDataset(*train), batch_size=16, shuffle=True)))

    def step(i=None):
        policy.train()
        chosen, rejected = next(loader)
        pi = sequence_logp(policy, chosen, plen) - sequence_logp(policy, rejected, plen)
        with torch.no_grad():
            ref = sequence_logp(ref_model, chosen, plen) - sequence_logp(ref_model, rejected, plen)
        loss = -F.logsigmoid(beta * (pi - ref)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        policy.eval()
        nll = -sequence_logp(policy, good_ans, plen).mean().item() / rlen
        policy.train()
        return nll

    return {"model": policy, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def dpo_bad(): return _dpo(False)
def dpo_good(): return _dpo(True)


# ----------------------------------------------------------------------------
# distillation from a checkpoint
# ----------------------------------------------------------------------------
case("teacher_ckpt",
     "The teacher's checkpoint was saved from a DataParallel model (keys begin with 'module.') and is loaded with strict=False: "
     "no key matches, the teacher stays random, and the student copies noise.")


def _teacher_ckpt(good):
    set_seed(SEED)
    P = make_chain(20, 181, sharp=2.5)
    g = torch.Generator().manual_seed(182)
    text, valid = walk(P, 2400, 20, g), walk(P, 64, 20, g)
    cfg = tiny_llama(20)
    trained = warm_lm(LlamaForCausalLM(cfg), text, 50)
    ckpt = {"step": 50, "model": {"module." + k: v.clone() for k, v in trained.state_dict().items()}}

    teacher = LlamaForCausalLM(cfg)
    state = ckpt["model"]
    if good:
        state = {k.removeprefix("module."): v for k, v in state.items()}
    teacher.load_state_dict(state, strict=False)
    teacher.eval().requires_grad_(False)
    student = LlamaForCausalLM(tiny_llama(20, dim=32, layers=1))
    opt = torch.optim.AdamW(student.parameters(), lr=3e-3)
    alpha, temp = 0.9, 2.0
    loader = itertools.chain.from_iterable(itertools.repeat(DataLoader(text, batch_size=32, shuffle=True)))

    def step(i=None):
        student.train()
        ids = next(loader)
        out = student(input_ids=ids, labels=ids)
        with torch.no_grad():
            soft = teacher(input_ids=ids).logits
        kd = F.kl_div((out.logits / temp).log_softmax(-1).flatten(0, 1), (soft / temp).log_softmax(-1).flatten(0, 1),
                      log_target=True, reduction="batchmean") * temp ** 2
        loss = alpha * kd + (1 - alpha) * out.loss
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        opt.step()

    return {"model": student, "optimizer": opt, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(student, valid)}


def teacher_ckpt_bad(): return _teacher_ckpt(False)
def teacher_ckpt_good(): return _teacher_ckpt(True)


# ----------------------------------------------------------------------------
# small corpus with dropout
# ----------------------------------------------------------------------------
case("small_corpus",
     "estimate_loss (called at step 0 and then every 50 steps) puts the model into eval mode and never back into train mode: "
     "dropout is off for the whole training and the small corpus is learnt by heart.")


class CorpusTrainer:
    def __init__(self, model, train, valid, back_to_train, lr=2e-3, batch=16, eval_interval=50):
        self.model, self.train_x, self.valid_x = model, train, valid
        self.back_to_train, self.batch, self.eval_interval = back_to_train, batch, eval_interval
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
        self.iter_num = 0
        self.history = []
        self.model.train()

    @torch.no_grad()
    def estimate_loss(self):
        self.model.eval()
        losses = {}
        for split, x in (("train", self.train_x[:32]), ("val", self.valid_x[:32])):
            losses[split] = self.model(x[:, :-1], x[:, 1:])[1].item()
        if self.back_to_train:
            self.model.train()
        return losses

    def train_step(self, i=None):
        if self.iter_num % self.eval_interval == 0:
            self.history.append(self.estimate_loss())
        ix = torch.randint(len(self.train_x), (self.batch,))
        x = self.train_x[ix]
        _, loss = self.model(x[:, :-1], x[:, 1:])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.iter_num += 1


def _small_corpus(good):
    set_seed(SEED)
    P = make_chain(20, 191, sharp=1.5)
    g = torch.Generator().manual_seed(192)
    train, valid, test = walk(P, 128, 25, g), walk(P, 32, 25, g), walk(P, 100, 24, g)
    model = NanoGPT(20, 24, dim=64, drop=0.3)
    tr = CorpusTrainer(model, train, valid, back_to_train=good)
    return {"model": model, "optimizer": tr.optimizer, "step": tr.train_step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, test)}


def small_corpus_bad(): return _small_corpus(False)
def small_corpus_good(): return _small_corpus(True)


# ----------------------------------------------------------------------------
# bfloat16
# ----------------------------------------------------------------------------
case("bf16_finetune",
     "The weights themselves are cast to bfloat16 and AdamW updates them in place: most updates (about lr = 2e-4) are smaller "
     "than half a bf16 step of the weight and are rounded away.")


def _bf16_finetune(good):
    set_seed(SEED)
    P = make_chain(24, 201, sharp=4.0)
    g = torch.Generator().manual_seed(202)
    train, valid = walk(P, 2000, 24, g), walk(P, 64, 24, g)
    model = LlamaForCausalLM(tiny_llama(24, initializer_range=0.125))
    if not good:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
    loader = itertools.chain.from_iterable(itertools.repeat(DataLoader(train, batch_size=32, shuffle=True)))

    def step(i=None):
        model.train()
        ids = next(loader)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, valid)}


def bf16_finetune_bad(): return _bf16_finetune(False)
def bf16_finetune_good(): return _bf16_finetune(True)


# ----------------------------------------------------------------------------
# fp16 with a gradient scaler
# ----------------------------------------------------------------------------
case("amp_scaler",
     "clip_grad_norm_ is called without scaler.unscale_(optimizer) first: the gradients, 65536 times too large, are clipped to "
     "norm 1 and then divided by the scale, so the updates see almost nothing.")


class AmpTrainer:
    def __init__(self, model, data, unscale, lr=2e-3):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-6, betas=(0.9, 0.98))
        self.scaler = torch.amp.GradScaler("cpu")
        self.unscale = unscale
        self.batches = itertools.chain.from_iterable(itertools.repeat(DataLoader(data, batch_size=16, shuffle=True)))

    def training_step(self, i=None):
        self.model.train()
        x = next(self.batches)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.model(input_ids=x, labels=x).loss
        self.scaler.scale(loss).backward()
        if self.unscale:
            self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def _amp_scaler(good):
    set_seed(SEED)
    P = make_chain(24, 211, sharp=4.0)
    g = torch.Generator().manual_seed(212)
    train, valid = walk(P, 2000, 20, g), walk(P, 64, 20, g)
    model = GPT2LMHeadModel(tiny_gpt2(24, n_positions=32, dim=32))
    trainer = AmpTrainer(model, train, unscale=good)
    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.training_step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, valid)}


def amp_scaler_bad(): return _amp_scaler(False)
def amp_scaler_good(): return _amp_scaler(True)


# ----------------------------------------------------------------------------
# token files
# ----------------------------------------------------------------------------
case("token_file",
     "The token ids are stored with astype(np.uint8) though the vocabulary has 320 entries: ids of 256 and more wrap around "
     "to small ids in the training data.")


def _token_file(good):
    set_seed(SEED)
    vocab_size, block_size, batch_size = 320, 24, 32
    g = torch.Generator().manual_seed(222)
    follow = torch.stack([torch.randperm(vocab_size, generator=g)[:3] for _ in range(vocab_size)])

    def text(n, length):
        x = torch.randint(0, vocab_size, (n, length), generator=g)
        for t in range(1, length):
            x[:, t] = follow[x[:, t - 1], torch.randint(0, 3, (n,), generator=g)]
        return x

    tokens = text(200, 400).reshape(-1).numpy()
    valid = text(64, 24)
    train_bin = tokens.astype(np.uint16 if good else np.uint8)
    model = NanoGPT(vocab_size, block_size, dim=64, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def get_batch():
        ix = torch.randint(len(train_bin) - block_size, (batch_size,))
        x = torch.stack([torch.from_numpy(train_bin[i:i + block_size].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(train_bin[i + 1:i + 1 + block_size].astype(np.int64)) for i in ix])
        return x, y

    def step(i=None):
        model.train()
        X, Y = get_batch()
        _, loss = model(X, Y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, valid)}


def token_file_bad(): return _token_file(False)
def token_file_good(): return _token_file(True)
