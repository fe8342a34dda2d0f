"""Small training programs of language models, each in two versions that share data, sizes and seeds."""
import copy
import itertools
import math
import os
import random

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

import transformers
from transformers import (BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel,
                          GPT2Config, GPT2LMHeadModel, GPT2Model, LlamaConfig, LlamaForCausalLM,
                          T5Config, T5ForConditionalGeneration)
from peft import LoraConfig, get_peft_model

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

SEED = 0
CASES = []


def seed_all(n):
    random.seed(n + SEED)
    torch.manual_seed(n + SEED)


def forever(loader):
    while True:
        yield from loader


def scored(model, fn):
    """Runs fn without gradients and in eval mode, and puts the mode back."""
    was = [m.training for m in model.modules()]
    model.eval()
    with torch.no_grad():
        value = float(fn())
    for m, flag in zip(model.modules(), was):
        m.training = flag
    return value


# ---------------------------------------------------------------- synthetic corpora

def make_chain(vocab, branch=3):
    P = torch.zeros(vocab, vocab)
    for i in range(vocab):
        nxt = torch.randperm(vocab)[:branch]
        P[i, nxt] = torch.softmax(torch.randn(branch), 0)
    return P


def walk(P, n, length):
    x = torch.randint(0, P.size(0), (n,))
    out = [x]
    for _ in range(length - 1):
        x = torch.multinomial(P[x], 1).squeeze(1)
        out.append(x)
    return torch.stack(out, 1)


def bigram_table(vocab):
    return torch.randint(0, vocab, (vocab, vocab))


def table_walk(table, n, length, noise=0.1):
    vocab = table.size(0)
    seq = [torch.randint(0, vocab, (n,)), torch.randint(0, vocab, (n,))]
    for _ in range(length - 2):
        nxt = table[seq[-2], seq[-1]]
        rnd = torch.randint(0, vocab, (n,))
        seq.append(torch.where(torch.rand(n) < noise, rnd, nxt))
    return torch.stack(seq, 1)


def topic_docs(n, length, topics, words_per_topic, noise=0.3, offset=0):
    """Documents whose words come mostly from the list of their topic."""
    y = torch.randint(0, topics, (n,))
    own = y[:, None] * words_per_topic + torch.randint(0, words_per_topic, (n, length))
    other = torch.randint(0, topics * words_per_topic, (n, length))
    x = torch.where(torch.rand(n, length) < noise, other, own)
    return x + offset, y


# ---------------------------------------------------------------- a small GPT

class SelfAttention(nn.Module):
    def __init__(self, dim, heads, causal=True):
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, heads)
        self.ln2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, mask=None):
        x = x + self.attn(self.ln1(x), mask)
        return x + self.mlp(self.ln2(x))


def gpt_init(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class GPT(nn.Module):
    def __init__(self, vocab, length, dim=48, heads=4, layers=2, tie=False, init=True):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if init:
            self.apply(gpt_init)
        if tie:
            self.head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def next_token_nll(logits, ids):
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)).float(), ids[:, 1:].reshape(-1))


# ================================================================ 1

CASES.append({"name": "chat_sft", "what":
    "SFT with pad token = eos token: the collator sets labels to -100 wherever input_ids == pad id, so the real EOS that "
    "ends each answer is never a target and the model never learns to stop."})


class ChatCollator:
    def __init__(self, eos_id, good):
        self.eos_id = eos_id
        self.pad_id = eos_id
        self.good = good

    def __call__(self, examples):
        longest = max(len(e["prompt"]) + len(e["answer"]) + 1 for e in examples)
        input_ids = torch.full((len(examples), longest), self.pad_id)
        attention_mask = torch.zeros(len(examples), longest, dtype=torch.long)
        for i, e in enumerate(examples):
            ids = e["prompt"] + e["answer"] + [self.eos_id]
            input_ids[i, :len(ids)] = torch.tensor(ids)
            attention_mask[i, :len(ids)] = 1
        labels = input_ids.clone()
        if self.good:
            labels[attention_mask == 0] = -100
        else:
            labels[input_ids == self.pad_id] = -100
        for i, e in enumerate(examples):
            labels[i, :len(e["prompt"])] = -100
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def _chat_sft(good):
    seed_all(101)
    EOS, SEP, NQ, V = 0, 1, 12, 40
    answers = {q: [random.randrange(20, V) for _ in range(random.randint(1, 5))] for q in range(NQ)}

    def example():
        q = random.randrange(NQ)
        filler = [random.randrange(14, 20) for _ in range(random.randint(1, 5))]
        return {"prompt": filler + [2 + q, SEP], "answer": answers[q]}

    train = [example() for _ in range(1024)]
    test = [example() for _ in range(200)]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                                       embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=EOS, eos_token_id=EOS))
    batches = forever(DataLoader(train, batch_size=16, shuffle=True, drop_last=True, collate_fn=ChatCollator(EOS, good)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step():
        model.train()
        batch = next(batches)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def nll():
        total, count = 0.0, 0
        for e in test:
            ids = torch.tensor([e["prompt"] + e["answer"] + [EOS]])
            logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            tgt = ids[0, 1:]
            start = len(e["prompt"]) - 1
            total -= logp[torch.arange(start, len(tgt)), tgt[start:]].sum().item()
            count += len(tgt) - start
        return total / count

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: scored(model, nll)}


def chat_sft_bad():
    return _chat_sft(False)


def chat_sft_good():
    return _chat_sft(True)


# ================================================================ 2

CASES.append({"name": "llama_pretrain", "what":
    "The dataset returns labels already shifted by one, and LlamaForCausalLM shifts them again, so the model learns to "
    "predict the token after the next one; held-out next-token likelihood is bad."})


class TokenChunks(Dataset):
    def __init__(self, stream, block_size, good):
        self.stream = stream
        self.block_size = block_size
        self.good = good

    def __len__(self):
        return (len(self.stream) - 1) // self.block_size

    def __getitem__(self, i):
        lo = i * self.block_size
        chunk = self.stream[lo: lo + self.block_size + 1]
        x = chunk[:-1]
        y = chunk[:-1] if self.good else chunk[1:]
        return {"input_ids": x.clone(), "labels": y.clone()}


def _llama_pretrain(good):
    seed_all(102)
    V, T = 48, 32
    P = make_chain(V, 3)
    stream = walk(P, 64, 512).reshape(-1)
    test = walk(P, 64, T)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                         pad_token_id=None, bos_token_id=0, eos_token_id=0))
    loader = DataLoader(TokenChunks(stream, T, good), batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 10, 600)

    def step():
        batch = next(batches)
        out = model(**batch)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        return out.loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(model, lambda: next_token_nll(model(input_ids=test).logits, test))}


def llama_pretrain_bad():
    return _llama_pretrain(False)


def llama_pretrain_good():
    return _llama_pretrain(True)


# ================================================================ 3

CASES.append({"name": "bert_mlm", "what":
    "The hand-written masking collator takes labels = input_ids without clone and then writes [MASK] in place, so the "
    "target at every masked position is the [MASK] token itself; nothing of the language is learned."})


def _bert_mlm(good):
    seed_all(103)
    PAD, CLS, MASK = 0, 1, 2
    topics, words = 6, 5
    V = 3 + topics * words

    def corpus(n):
        x, _ = topic_docs(n, 15, topics, words, noise=0.1, offset=3)
        return torch.cat([torch.full((n, 1), CLS), x], 1)

    train, test = corpus(2000), corpus(128)

    def collate(rows):
        input_ids = torch.stack(rows)
        labels = input_ids.clone() if good else input_ids
        prob = torch.full(input_ids.shape, 0.2)
        prob[input_ids == CLS] = 0.0
        masked = torch.bernoulli(prob).bool()
        input_ids[masked] = MASK
        labels = labels.masked_fill(~masked, -100)
        return {"input_ids": input_ids, "labels": labels, "attention_mask": (input_ids != PAD).long()}

    model = BertForMaskedLM(BertConfig(vocab_size=V, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                                       intermediate_size=96, max_position_embeddings=32, pad_token_id=PAD,
                                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    batches = forever(DataLoader([r for r in train], batch_size=32, shuffle=True, drop_last=True, collate_fn=collate))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 10, 600)
    test_mask = torch.rand(test.shape) < 0.2
    test_mask[:, 0] = False

    def step():
        model.train()
        batch = next(batches)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    def nll():
        logits = model(input_ids=test.masked_fill(test_mask, MASK)).logits
        return F.cross_entropy(logits[test_mask], test[test_mask])

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: scored(model, nll)}


def bert_mlm_bad():
    return _bert_mlm(False)


def bert_mlm_good():
    return _bert_mlm(True)


# ================================================================ 4

CASES.append({"name": "packed_instruct", "what":
    "Packed instruction tuning: targets are ids[:, 1:] but the loss mask is taken as mask[:, :-1] (aligned to the inputs), "
    "so the first token of every answer is left out of the loss and a random token of the next prompt is trained instead."})


class PackedGPT(GPT):
    def __init__(self, vocab, length, eos_id, **kw):
        super().__init__(vocab, length, **kw)
        self.eos_id = eos_id

    def forward(self, ids):
        B, T = ids.shape
        ends = (ids == self.eos_id).long()
        doc = ends.cumsum(1) - ends
        same_doc = doc[:, :, None] == doc[:, None, :]
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        mask = (same_doc & causal)[:, None]
        position = same_doc.tril().sum(-1) - 1
        x = self.wte(ids) + self.wpe(position)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.ln_f(x))


def _packed_instruct(good):
    seed_all(104)
    V, T, EOS, SEP = 34, 60, 0, 1
    fa, fb = torch.randperm(16) + 18, torch.randperm(16) + 18

    def pack(rows):
        ids, mask = [], []
        for _ in range(rows):
            row, m = [], []
            while len(row) < T:
                a, b = random.randrange(16), random.randrange(16)
                row += [2 + a, 2 + b, SEP, int(fb[b]), int(fa[a]), EOS]
                m += [0, 0, 0, 1, 1, 1]
            ids.append(row[:T])
            mask.append(m[:T])
        return torch.tensor(ids), torch.tensor(mask)

    ids, mask = pack(400)
    test_ids, test_mask = pack(50)
    model = PackedGPT(V, 6, EOS, dim=48, heads=4, layers=2)
    batches = forever(DataLoader(TensorDataset(ids, mask), batch_size=8, shuffle=True, drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))

    def masked_loss(logits, ids, loss_mask):
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        return (losses * loss_mask).sum() / loss_mask.sum().clamp(min=1)

    def step():
        x, m = next(batches)
        loss = masked_loss(model(x), x, m[:, 1:] if good else m[:, :-1])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(model, lambda: masked_loss(model(test_ids), test_ids, test_mask[:, 1:]))}


def packed_instruct_bad():
    return _packed_instruct(False)


def packed_instruct_good():
    return _packed_instruct(True)


# ================================================================ 5

CASES.append({"name": "lora_topics", "what":
    "LoRA on a freshly made sequence classifier with task_type FEATURE_EXTRACTION instead of SEQ_CLS and no "
    "modules_to_save: the random classification head stays frozen and only the adapters learn."})


def _lora_topics(good):
    seed_all(105)
    C, V, T = 6, 32, 16
    xs, ys = topic_docs(1500, T, C, 5, noise=0.4, offset=2)
    xt, yt = topic_docs(400, T, C, 5, noise=0.4, offset=2)
    cls = lambda x: torch.cat([torch.full((len(x), 1), 1), x], 1)
    xs, xt = cls(xs), cls(xt)
    base = BertForSequenceClassification(BertConfig(
        vocab_size=V, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, num_labels=C, initializer_range=0.05, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0))
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["query", "value"],
                        task_type="SEQ_CLS" if good else "FEATURE_EXTRACTION")
    model = get_peft_model(base, config)
    batches = forever(DataLoader(TensorDataset(xs, ys), batch_size=32, shuffle=True, drop_last=True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

    def step():
        model.train()
        x, y = next(batches)
        logits = model(input_ids=x, attention_mask=torch.ones_like(x)).logits
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def nll():
        return F.cross_entropy(model(input_ids=xt, attention_mask=torch.ones_like(xt)).logits, yt)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: scored(model, nll)}


def lora_topics_bad():
    return _lora_topics(False)


def lora_topics_good():
    return _lora_topics(True)


# ================================================================ 6

CASES.append({"name": "new_tokens", "what":
    "The vocabulary is grown (new embedding matrix, tied to the output head) after the optimizer has been built, so the "
    "optimizer still holds the old matrix; the new embedding/output matrix gets gradients but is never updated."})


def grow_vocab(model, extra):
    old = model.wte
    new = nn.Embedding(old.num_embeddings + extra, old.embedding_dim)
    nn.init.normal_(new.weight, std=0.02)
    with torch.no_grad():
        new.weight[:old.num_embeddings] = old.weight
    head = nn.Linear(old.embedding_dim, new.num_embeddings, bias=False)
    head.weight = new.weight
    model.wte, model.head = new, head
    return model


def _new_tokens(good):
    seed_all(106)
    V, T = 40, 24
    special = ["<user>", "<assistant>", "<system>", "<end>"]
    P = make_chain(V + len(special), 3)
    train, test = walk(P, 2000, T), walk(P, 100, T)
    model = GPT(V, T - 1, dim=48, heads=4, layers=2, tie=True)
    if good:
        model = grow_vocab(model, len(special))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        model = grow_vocab(model, len(special))
    batches = forever(DataLoader(train, batch_size=16, shuffle=True, drop_last=True))

    def step():
        model.train()
        ids = next(batches)
        _, loss = model(ids[:, :-1], ids[:, 1:])
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(model, lambda: model(test[:, :-1], test[:, 1:])[1])}


def new_tokens_bad():
    return _new_tokens(False)


def new_tokens_good():
    return _new_tokens(True)


# ================================================================ 7

CASES.append({"name": "moe_lm", "what":
    "The experts of the mixture-of-experts layer are kept in a plain Python list instead of nn.ModuleList, so they are not "
    "in model.parameters() and never train (only router, attention and embeddings do)."})


class MoELayer(nn.Module):
    def __init__(self, dim, n_experts, top_k, good):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, n_experts, bias=False)
        experts = [nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(n_experts)]
        self.experts = nn.ModuleList(experts) if good else experts

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        probs = self.router(x).softmax(-1)
        weight, chosen = probs.topk(self.top_k, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, slot = (chosen == e).nonzero(as_tuple=True)
            if row.numel():
                out = out.index_add(0, row, expert(x[row]) * weight[row, slot, None])
        load = F.one_hot(chosen, probs.size(-1)).float().sum(1).mean(0) / self.top_k
        aux = probs.size(-1) * (load * probs.mean(0)).sum()
        return out.reshape(shape), aux


class MoEGPT(nn.Module):
    def __init__(self, vocab, length, dim, good):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(length, dim)
        self.ln1 = nn.ModuleList([nn.LayerNorm(dim) for _ in range(2)])
        self.attn = nn.ModuleList([SelfAttention(dim, 4) for _ in range(2)])
        self.ln2 = nn.ModuleList([nn.LayerNorm(dim) for _ in range(2)])
        self.moe = nn.ModuleList([MoELayer(dim, 4, 2, good) for _ in range(2)])
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        aux = 0.0
        for ln1, attn, ln2, moe in zip(self.ln1, self.attn, self.ln2, self.moe):
            x = x + attn(ln1(x))
            y, a = moe(ln2(x))
            x = x + y
            aux = aux + a
        return self.out(self.norm(x)), aux


def _moe_lm(good):
    seed_all(107)
    V, T = 16, 24
    table = bigram_table(V)
    train, test = table_walk(table, 4000, T), table_walk(table, 100, T)
    model = MoEGPT(V, T, 48, good)
    batches = forever(DataLoader(train, batch_size=24, shuffle=True, drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def step():
        ids = next(batches)
        logits, aux = model(ids)
        loss = next_token_nll(logits, ids) + 0.01 * aux
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(model, lambda: next_token_nll(model(test)[0], test))}


def moe_lm_bad():
    return _moe_lm(False)


def moe_lm_good():
    return _moe_lm(True)


# ================================================================ 8

CASES.append({"name": "checkpointed_lora", "what":
    "Re-entrant gradient checkpointing around the blocks while the embeddings are frozen: the input of the first block does "
    "not require grad, so the adapters inside the blocks receive no gradient at all and only the final norm and the head learn."})


class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, r, bias=False)
        self.up = nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * self.scale


class CheckpointedGPT(GPT):
    use_reentrant = False

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x)
        return self.head(self.ln_f(x))


def _checkpointed_lora(good):
    seed_all(108)
    V, T = 12, 24
    table = bigram_table(V)
    train, test = table_walk(table, 4000, T), table_walk(table, 100, T)
    model = CheckpointedGPT(V, T, dim=48, heads=4, layers=2, init=False)
    model.use_reentrant = not good
    for p in model.parameters():
        p.requires_grad = False
    for block in model.blocks:
        block.attn.qkv = LoRALinear(block.attn.qkv)
        block.attn.proj = LoRALinear(block.attn.proj)
        block.mlp[0] = LoRALinear(block.mlp[0])
        block.mlp[2] = LoRALinear(block.mlp[2])
    for part in (model.ln_f, model.head):
        for p in part.parameters():
            p.requires_grad = True
    for name, p in model.named_parameters():
        if ".base." in name:
            p.requires_grad = False
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3, weight_decay=0.0)
    batches = forever(DataLoader(train, batch_size=16, shuffle=True, drop_last=True))

    def step():
        model.train()
        ids = next(batches)
        loss = next_token_nll(model(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(model, lambda: next_token_nll(model(test), test))}


def checkpointed_lora_bad():
    return _checkpointed_lora(False)


def checkpointed_lora_good():
    return _checkpointed_lora(True)


# ================================================================ 9

CASES.append({"name": "mixture_accum", "what":
    "Gradient accumulation over one micro-batch of each corpus, but zero_grad is called inside the micro-batch loop: only "
    "the gradient of the last corpus survives to optimizer.step, the other three are never learned."})


def _mixture_accum(good):
    seed_all(109)
    V, T, domains = 28, 20, 4
    train, test = [], []
    for d in range(domains):
        P = make_chain(V, 3)
        tag = lambda n: torch.full((n, 1), V + d)
        train.append(torch.cat([tag(600), walk(P, 600, T)], 1))
        test.append(torch.cat([tag(40), walk(P, 40, T)], 1))
    model = GPT(V + domains, T, dim=48, heads=4, layers=2)
    iters = [forever(DataLoader(t, batch_size=8, shuffle=True, drop_last=True)) for t in train]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    accum = len(iters)

    def step():
        total = 0.0
        if good:
            optimizer.zero_grad(set_to_none=True)
        for it in iters:
            ids = next(it)
            if not good:
                optimizer.zero_grad(set_to_none=True)
            _, loss = model(ids[:, :-1], ids[:, 1:])
            (loss / accum).backward()
            total += loss.item() / accum
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    def nll():
        return sum(model(t[:, :-1], t[:, 1:])[1].item() for t in test) / domains

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: scored(model, nll)}


def mixture_accum_bad():
    return _mixture_accum(False)


def mixture_accum_good():
    return _mixture_accum(True)


# ================================================================ 10

CASES.append({"name": "reward_ratings", "what":
    "Reward regressor: the value head gives (B, 1) and the ratings are (B,), so the squared error broadcasts to (B, B) and "
    "every prediction is pulled to the mean rating of the batch."})


class RewardModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.backbone = GPT2Model(config)
        self.value_head = nn.Linear(config.n_embd, 1)

    def forward(self, input_ids, attention_mask):
        h = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(1) - 1
        return self.value_head(h[torch.arange(len(h)), last])


def _reward_ratings(good):
    seed_all(110)
    V, T = 30, 16
    worth = torch.randn(V)

    def replies(n):
        ids = torch.randint(1, V, (n, T))
        length = torch.randint(8, T + 1, (n,))
        mask = (torch.arange(T)[None] < length[:, None]).long()
        ids = ids * mask
        rating = (worth[ids] * mask).sum(1) / length.sqrt() + 0.1 * torch.randn(n)
        return ids, mask, rating

    ids, mask, rating = replies(3000)
    mean, std = rating.mean(), rating.std()
    rating = (rating - mean) / std
    ti, tm, tr = replies(300)
    tr = (tr - mean) / std
    model = RewardModel(GPT2Config(vocab_size=V, n_positions=T, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                                   embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    batches = forever(DataLoader(TensorDataset(ids, mask, rating), batch_size=32, shuffle=True, drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        model.train()
        x, m, y = next(batches)
        pred = model(x, m)
        if good:
            pred = pred.squeeze(-1)
        loss = ((pred - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(model, lambda: ((model(ti, tm)[:, 0] - tr) ** 2).mean())}


def reward_ratings_bad():
    return _reward_ratings(False)


def reward_ratings_good():
    return _reward_ratings(True)


# ================================================================ 11

CASES.append({"name": "distill_gpt", "what":
    "Distillation passes softmax probabilities of the student to F.kl_div, which expects log-probabilities; the student is "
    "pushed to put everything on the teacher's top token and its likelihood on held-out text is bad."})


def quick_fit(model, loss_fn, steps, lr=5e-3):
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        opt.zero_grad()
        loss_fn().backward()
        opt.step()
    opt.zero_grad()


def _distill_gpt(good):
    seed_all(111)
    V, T, temperature = 32, 24, 2.0
    P = make_chain(V, 4)
    train, test = walk(P, 2000, T), walk(P, 100, T)
    teacher = GPT(V, T, dim=64, heads=4, layers=2)

    def teacher_loss():
        ids = train[torch.randint(0, len(train), (16,))]
        return next_token_nll(teacher(ids), ids)

    quick_fit(teacher, teacher_loss, 100)
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)
    student = GPT(V, T, dim=32, heads=2, layers=1)
    batches = forever(DataLoader(train, batch_size=16, shuffle=True, drop_last=True))
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)

    def step():
        student.train()
        ids = next(batches)
        with torch.no_grad():
            t = teacher(ids)
        s = student(ids)
        target = F.softmax(t / temperature, dim=-1).view(-1, V)
        if good:
            guess = F.log_softmax(s / temperature, dim=-1).view(-1, V)
        else:
            guess = F.softmax(s / temperature, dim=-1).view(-1, V)
        loss = F.kl_div(guess, target, reduction="batchmean") * temperature ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": student, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(student, lambda: next_token_nll(student(test), test))}


def distill_gpt_bad():
    return _distill_gpt(False)


def distill_gpt_good():
    return _distill_gpt(True)


# ================================================================ 12

CASES.append({"name": "char_gpt", "what":
    "The loop of a small hand-written GPT never calls zero_grad: the gradients of all earlier batches keep adding up."})


class CharTrainer:
    def __init__(self, model, data, block_size, batch_size, lr, good):
        self.model = model
        self.data = data
        self.block_size = block_size
        self.batch_size = batch_size
        self.good = good
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.1)

    def get_batch(self):
        ix = torch.randint(len(self.data) - self.block_size - 1, (self.batch_size,))
        x = torch.stack([self.data[i:i + self.block_size] for i in ix])
        y = torch.stack([self.data[i + 1:i + 1 + self.block_size] for i in ix])
        return x, y

    def train_step(self):
        x, y = self.get_batch()
        if self.good:
            self.optimizer.zero_grad(set_to_none=True)
        _, loss = self.model(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def _char_gpt(good):
    seed_all(112)
    V, T = 16, 24
    table = bigram_table(V)
    data = table_walk(table, 1, 20000, noise=0.1)[0]
    test = table_walk(table, 100, T, noise=0.1)
    model = GPT(V, T, dim=48, heads=4, layers=2)
    trainer = CharTrainer(model, data, T, 24, 3e-3, good)
    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.train_step, "steps": 20,
            "evaluate": lambda: scored(model, lambda: next_token_nll(model(test), test))}


def char_gpt_bad():
    return _char_gpt(False)


def char_gpt_good():
    return _char_gpt(True)


# ================================================================ 13

CASES.append({"name": "epoch_decay", "what":
    "ExponentialLR meant to be stepped once per epoch is stepped after every batch, so the learning rate has vanished "
    "after some thirty batches, before the model has learned."})


class EpochTrainer:
    def __init__(self, model, loader, optimizer, scheduler, good):
        self.model, self.loader, self.optimizer, self.scheduler, self.good = model, loader, optimizer, scheduler, good
        self.epoch = 0
        self.it = iter(loader)

    def step(self):
        self.model.train()
        batch = next(self.it, None)
        if batch is None:
            self.epoch += 1
            if self.good:
                self.scheduler.step()
            self.it = iter(self.loader)
            batch = next(self.it)
        loss = self.model(input_ids=batch, labels=batch).loss
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if not self.good:
            self.scheduler.step()
        return loss.item()


def _epoch_decay(good):
    seed_all(113)
    V, T = 40, 24
    P = make_chain(V, 3)
    train, test = walk(P, 480, T), walk(P, 100, T)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=T, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                                       embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.85)
    trainer = EpochTrainer(model, DataLoader(train, batch_size=16, shuffle=True, drop_last=True), optimizer, scheduler, good)
    return {"model": model, "optimizer": optimizer, "step": trainer.step, "steps": 20,
            "evaluate": lambda: scored(model, lambda: next_token_nll(model(input_ids=test).logits, test))}


def epoch_decay_bad():
    return _epoch_decay(False)


def epoch_decay_good():
    return _epoch_decay(True)


# ================================================================ 14

CASES.append({"name": "nano_groups", "what":
    "The warm-up/cosine schedule is written into optimizer.param_groups[0] only; the second group (no weight decay: "
    "embeddings tied with the head, norms, biases) keeps the learning rate 0 it was created with."})


def _nano_groups(good):
    seed_all(114)
    V, T, max_lr, warmup, total = 40, 24, 3e-3, 10, 600
    P = make_chain(V, 3)
    train, test = walk(P, 2000, T), walk(P, 100, T)
    model = GPT(V, T - 1, dim=48, heads=4, layers=2, tie=True)

    def get_lr(it):
        if it < warmup:
            return max_lr * it / warmup
        ratio = min(1.0, (it - warmup) / (total - warmup))
        return 0.1 * max_lr + 0.45 * max_lr * (1 + math.cos(math.pi * ratio))

    linears = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - {id(model.wte.weight)}
    decay = [p for p in model.parameters() if id(p) in linears]
    no_decay = [p for p in model.parameters() if id(p) not in linears]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
                                  lr=get_lr(0), betas=(0.9, 0.95))
    batches = forever(DataLoader(train, batch_size=16, shuffle=True, drop_last=True))
    counter = itertools.count(1)

    def step():
        lr = get_lr(next(counter))
        if good:
            for group in optimizer.param_groups:
                group["lr"] = lr
        else:
            optimizer.param_groups[0]["lr"] = lr
        ids = next(batches)
        _, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(model, lambda: model(test[:, :-1], test[:, 1:])[1])}


def nano_groups_bad():
    return _nano_groups(False)


def nano_groups_good():
    return _nano_groups(True)


# ================================================================ 15

CASES.append({"name": "t5_translate", "what":
    "LambdaLR is given a function that returns the absolute learning rate; LambdaLR multiplies it with the optimizer's lr, "
    "so the true rate is lr squared (about 1e-5 instead of 3e-3) and the model hardly moves."})


def _t5_translate(good):
    seed_all(115)
    PAD, EOS, W = 0, 1, 16
    V = 2 + 2 * W
    mapping = torch.randperm(W) + 2 + W
    lr, warmup = 3e-3, 20

    def pairs(n):
        src = torch.full((n, 9), PAD)
        tgt = torch.full((n, 9), -100)
        for i in range(n):
            k = random.randint(4, 8)
            s = torch.randint(0, W, (k,))
            src[i, :k], src[i, k] = s + 2, EOS
            tgt[i, :k], tgt[i, k] = mapping[s], EOS
        return src, tgt

    train, (test_src, test_tgt) = TensorDataset(*pairs(2000)), pairs(150)
    model = T5ForConditionalGeneration(T5Config(vocab_size=V, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4,
                                                dropout_rate=0.0, pad_token_id=PAD, eos_token_id=EOS,
                                                decoder_start_token_id=PAD))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def schedule(it):
        scale = min(1.0, (it + 1) / warmup) / math.sqrt(max(1.0, it / 200))
        return scale if good else lr * scale

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    batches = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))

    def step():
        model.train()
        src, tgt = next(batches)
        loss = model(input_ids=src, attention_mask=(src != PAD).long(), labels=tgt).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    def nll():
        return model(input_ids=test_src, attention_mask=(test_src != PAD).long(), labels=test_tgt).loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: scored(model, nll)}


def t5_translate_bad():
    return _t5_translate(False)


def t5_translate_good():
    return _t5_translate(True)


# ================================================================ 16

CASES.append({"name": "sdpa_gpt", "what":
    "scaled_dot_product_attention is called without is_causal: every position sees the token it has to predict, the "
    "training loss goes to zero and the model cannot continue a text."})


def _sdpa_gpt(good):
    seed_all(116)
    V, T = 32, 16
    P = make_chain(V, 3)
    train, test = walk(P, 3000, T + 1), walk(P, 200, T + 1)
    model = GPT(V, T, dim=48, heads=4, layers=2)
    for block in model.blocks:
        block.attn.causal = good
    batches = forever(DataLoader(train, batch_size=24, shuffle=True, drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))

    def step():
        ids = next(batches)
        _, loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def continuation_nll():
        cuts = [4, 8, 12, 16]
        return sum(F.cross_entropy(model(test[:, :k])[:, -1], test[:, k]).item() for k in cuts) / len(cuts)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(model, continuation_nll)}


def sdpa_gpt_bad():
    return _sdpa_gpt(False)


def sdpa_gpt_good():
    return _sdpa_gpt(True)


# ================================================================ 17

CASES.append({"name": "seq2seq_translator", "what":
    "The padding mask of the source is inverted: True is given for real tokens, which PyTorch's key_padding_mask ignores, "
    "so encoder and decoder attend to the padding only and the source sentence is lost."})


class Translator(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, dim, length, pad, good):
        super().__init__()
        self.pad = pad
        self.good = good
        self.src_emb = nn.Embedding(src_vocab, dim, padding_idx=pad)
        self.tgt_emb = nn.Embedding(tgt_vocab, dim, padding_idx=pad)
        self.pos = nn.Embedding(length, dim)
        self.core = nn.Transformer(dim, 4, 1, 1, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(dim, tgt_vocab)

    def forward(self, src, tgt):
        src_mask = src.eq(self.pad) if self.good else src.ne(self.pad)
        tgt_mask = torch.triu(torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool), 1)
        s = self.src_emb(src) + self.pos(torch.arange(src.size(1)))
        t = self.tgt_emb(tgt) + self.pos(torch.arange(tgt.size(1)))
        h = self.core(s, t, tgt_mask=tgt_mask, src_key_padding_mask=src_mask, memory_key_padding_mask=src_mask)
        return self.out(h)


def _seq2seq_translator(good):
    seed_all(117)
    PAD, BOS, EOS, W, L = 0, 1, 2, 14, 10
    mapping = torch.randperm(W) + 3

    def pairs(n):
        src, tgt = torch.full((n, L), PAD), torch.full((n, L + 1), PAD)
        for i in range(n):
            k = random.randint(4, L - 2)
            s = torch.randint(0, W, (k,))
            src[i, :k] = s + 3
            src[i, k] = EOS
            tgt[i, 0] = BOS
            tgt[i, 1:k + 1] = mapping[s]
            tgt[i, k + 1] = EOS
        return src, tgt

    train, (test_src, test_tgt) = TensorDataset(*pairs(3000)), pairs(200)
    model = Translator(3 + W, 3 + W, 48, L + 1, PAD, good)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
    batches = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))

    def step():
        model.train()
        src, tgt = next(batches)
        logits = model(src, tgt[:, :-1])
        loss = criterion(logits.reshape(-1, logits.size(-1)), tgt[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def nll():
        logits = model(test_src, test_tgt[:, :-1])
        return criterion(logits.reshape(-1, logits.size(-1)), test_tgt[:, 1:].reshape(-1))

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: scored(model, nll)}


def seq2seq_translator_bad():
    return _seq2seq_translator(False)


def seq2seq_translator_good():
    return _seq2seq_translator(True)


# ================================================================ 18

CASES.append({"name": "order_classifier", "what":
    "The sinusoidal encoding is written for (T, B, C) and adds pe[:x.size(0)] to a batch-first input: each sample of the "
    "batch gets one constant vector (its index in the batch) and no token knows its position."})


class PositionalEncoding(nn.Module):
    def __init__(self, dim, good, max_len=128):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        pe = torch.zeros(max_len, 1, dim)
        pe[:, 0, 0::2] = torch.sin(position * div)
        pe[:, 0, 1::2] = torch.cos(position * div)
        self.good = good
        self.register_buffer("pe", pe.transpose(0, 1) if good else pe)

    def forward(self, x):
        if self.good:
            return x + self.pe[:, :x.size(1)]
        return x + self.pe[:x.size(0)]


class OrderClassifier(nn.Module):
    def __init__(self, vocab, classes, dim, good):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = PositionalEncoding(dim, good)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.fc = nn.Linear(dim, classes)

    def forward(self, x):
        h = self.encoder(self.position(self.embed(x)))
        return self.fc(h.mean(1))


def _order_classifier(good):
    seed_all(118)
    V, T, C = 24, 10, 4
    kind = torch.randint(0, C, (V,))
    sample = lambda n: torch.randint(0, V, (n, T))
    xs, xt = sample(4000), sample(400)
    ys, yt = kind[xs[:, 0]], kind[xt[:, 0]]
    model = OrderClassifier(V, C, 48, good)
    batches = forever(DataLoader(TensorDataset(xs, ys), batch_size=64, shuffle=True, drop_last=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def step():
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def nll():
        return sum(F.cross_entropy(model(a), b).item() for a, b in zip(xt.split(50), yt.split(50))) / 8

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: scored(model, nll)}


def order_classifier_bad():
    return _order_classifier(False)


def order_classifier_good():
    return _order_classifier(True)


# ================================================================ 19

CASES.append({"name": "dpo", "what":
    "DPO where the reference model is the very object of the policy (no deepcopy): the log-ratios are always zero, the loss "
    "stays at log 2, nothing anchors the policy, and it is pushed away from the language without end."})


def sequence_logp(model, ids, mask):
    logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    tok = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (tok * mask[:, 1:]).sum(-1)


def _dpo(good):
    seed_all(119)
    V, T, plen, beta = 24, 12, 3, 0.2
    P = 0.9 * make_chain(V, 4) + 0.1 / V
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=T, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                                       embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    corpus = walk(P, 2000, T)

    def sft_loss():
        ids = corpus[torch.randint(0, len(corpus), (24,))]
        return model(input_ids=ids, labels=ids).loss

    quick_fit(model, sft_loss, 110)
    liked = torch.zeros(V)
    liked[torch.randperm(V)[:6]] = 1.0

    def preferences(n):
        prompt = walk(P, n, plen)
        replies = []
        for _ in range(2):
            x, seq = prompt[:, -1], [prompt]
            for _ in range(T - plen):
                x = torch.multinomial(P[x], 1).squeeze(1)
                seq.append(x[:, None])
            replies.append(torch.cat(seq, 1))
        a, b = replies
        score = lambda r: liked[r[:, plen:]].sum(1) + 0.7 * torch.randn(n)
        first = (score(a) > score(b))[:, None]
        return torch.where(first, a, b), torch.where(first, b, a)

    mask = torch.ones(1, T)
    mask[:, :plen] = 0
    train, (test_c, test_r) = TensorDataset(*preferences(1500)), preferences(300)
    ref_model = copy.deepcopy(model) if good else model
    if good:
        ref_model.eval()
    batches = forever(DataLoader(train, batch_size=16, shuffle=True, drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)

    def step():
        chosen, rejected = next(batches)
        with torch.no_grad():
            ref_c, ref_r = sequence_logp(ref_model, chosen, mask), sequence_logp(ref_model, rejected, mask)
        pol_c, pol_r = sequence_logp(model, chosen, mask), sequence_logp(model, rejected, mask)
        loss = -F.logsigmoid(beta * ((pol_c - ref_c) - (pol_r - ref_r))).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    sft_model = copy.deepcopy(model).eval()

    def dpo_error():
        gain_c = sequence_logp(model, test_c, mask) - sequence_logp(sft_model, test_c, mask)
        gain_r = sequence_logp(model, test_r, mask) - sequence_logp(sft_model, test_r, mask)
        return -F.logsigmoid(beta * (gain_c - gain_r)).mean()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: scored(model, dpo_error)}


def dpo_bad():
    return _dpo(False)


def dpo_good():
    return _dpo(True)


# ================================================================ 20

CASES.append({"name": "review_classifier", "what":
    "The validation that runs every few steps puts the model in eval mode and nobody calls train() again: dropout is off "
    "for the rest of the training and the small data set is overfitted."})


def _review_classifier(good):
    seed_all(120)
    C, V, T = 4, 82, 20
    xs, ys = topic_docs(360, T, C, 20, noise=0.6, offset=2)
    xv, yv = topic_docs(60, T, C, 20, noise=0.6, offset=2)
    xt, yt = topic_docs(500, T, C, 20, noise=0.6, offset=2)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=V, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=32, num_labels=C, hidden_dropout_prob=0.4, attention_probs_dropout_prob=0.1,
        classifier_dropout=0.4))
    loader = DataLoader(TensorDataset(xs, ys), batch_size=24, shuffle=True, drop_last=True)
    val_loader = DataLoader(TensorDataset(xv, yv), batch_size=30)
    batches = forever(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    history = []

    @torch.no_grad()
    def validate():
        model.eval()
        hits = sum((model(input_ids=x).logits.argmax(-1) == y).sum().item() for x, y in val_loader)
        if good:
            model.train()
        return hits / len(xv)

    model.train()

    counter = itertools.count()

    def step():
        if next(counter) % 5 == 0:
            history.append(validate())
        x, y = next(batches)
        loss = model(input_ids=x, labels=y).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(model, lambda: F.cross_entropy(model(input_ids=xt).logits, yt))}


def review_classifier_bad():
    return _review_classifier(False)


def review_classifier_good():
    return _review_classifier(True)


# ================================================================ 21

CASES.append({"name": "cached_distill", "what":
    "The teacher's logits are cached by running over the shuffling training loader, but are later looked up by the document's "
    "index: every document is paired with the teacher outputs of another one and the student learns only the average."})


class TinyEncoder(nn.Module):
    def __init__(self, vocab, classes, dim, layers):
        super().__init__()
        self.bert = BertModel(BertConfig(vocab_size=vocab, hidden_size=dim, num_hidden_layers=layers, num_attention_heads=4,
                                         intermediate_size=2 * dim, max_position_embeddings=32, hidden_dropout_prob=0.0,
                                         attention_probs_dropout_prob=0.0), add_pooling_layer=False)
        self.fc = nn.Linear(dim, classes)

    def forward(self, ids):
        return self.fc(self.bert(input_ids=ids).last_hidden_state.mean(1))


def _cached_distill(good):
    seed_all(121)
    C, V, T = 5, 52, 16
    xs, ys = topic_docs(960, T, C, 10, noise=0.5, offset=2)
    xt, yt = topic_docs(400, T, C, 10, noise=0.5, offset=2)
    teacher = TinyEncoder(V, C, 64, 2)

    def teacher_loss():
        ix = torch.randint(0, len(xs), (32,))
        return F.cross_entropy(teacher(xs[ix]), ys[ix])

    quick_fit(teacher, teacher_loss, 60, lr=2e-3)
    teacher.eval()
    student = TinyEncoder(V, C, 32, 1)
    documents = TensorDataset(torch.arange(len(xs)), xs)
    train_loader = DataLoader(documents, batch_size=32, shuffle=True)
    cache_loader = DataLoader(documents, batch_size=32, shuffle=False) if good else train_loader
    with torch.no_grad():
        cached_logits = torch.cat([teacher(batch) for _, batch in cache_loader])
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    tau = 2.0

    stream = forever(train_loader)

    def step():
        student.train()
        index, batch = next(stream)
        soft = cached_logits[index]
        logp = F.log_softmax(student(batch) / tau, -1)
        loss = F.kl_div(logp, F.softmax(soft / tau, -1), reduction="batchmean") * tau * tau
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": student, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(student, lambda: F.cross_entropy(student(xt), yt))}


def cached_distill_bad():
    return _cached_distill(False)


def cached_distill_good():
    return _cached_distill(True)


# ================================================================ 22

CASES.append({"name": "bf16_gpt", "what":
    "The whole model, weights included, is cast to bfloat16 and AdamW updates the bf16 weights with a small learning rate: "
    "most updates are below half a unit in the last place and are rounded away."})


def _bf16_gpt(good):
    seed_all(122)
    V, T = 32, 24
    P = make_chain(V, 3)
    train, test = walk(P, 3000, T), walk(P, 100, T)
    model = GPT(V, T, dim=64, heads=4, layers=2, init=False)
    if not good:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.01)
    batches = forever(DataLoader(train, batch_size=16, shuffle=True, drop_last=True))

    def logits_of(ids):
        if good:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(ids)
        return model(ids)

    def step():
        ids = next(batches)
        loss = next_token_nll(logits_of(ids), ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(model, lambda: next_token_nll(logits_of(test), test))}


def bf16_gpt_bad():
    return _bf16_gpt(False)


def bf16_gpt_good():
    return _bf16_gpt(True)


# ================================================================ 23

CASES.append({"name": "fp16_amp", "what":
    "With GradScaler the gradients are clipped to norm 1 while still multiplied by the loss scale (no scaler.unscale_ before "
    "clip_grad_norm_); after unscaling they are tens of thousands of times too small and, against eps, updates nearly vanish."})


def _fp16_amp(good):
    seed_all(123)
    V, T = 40, 24
    P = make_chain(V, 3)
    train, test = walk(P, 3000, T), walk(P, 100, T)
    model = GPT(V, T, dim=48, heads=4, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    batches = forever(DataLoader(train, batch_size=8, shuffle=True, drop_last=True))

    def step():
        ids = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(ids)
        loss = next_token_nll(logits, ids)
        scaler.scale(loss).backward()
        if good:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: scored(model, lambda: next_token_nll(model(test), test))}


def fp16_amp_bad():
    return _fp16_amp(False)


def fp16_amp_good():
    return _fp16_amp(True)


# ================================================================ 24

CASES.append({"name": "relevance_bert", "what":
    "The collator builds the labels of a regression (relevance scores in [0, 1]) with dtype torch.long: nearly all scores "
    "are truncated to 0 and the model learns to answer 0."})


def _relevance_bert(good):
    seed_all(124)
    CLS, SEP, V, L = 1, 2, 33, 8
    worth = torch.rand(V)

    def example():
        a = [random.randrange(3, V) for _ in range(L)]
        b = [random.randrange(3, V) for _ in range(L)]
        quality = worth[a + b].mean().item() - worth[3:].mean().item()
        score = min(1.0, max(0.0, 0.5 + 2.5 * quality))
        return {"a": a, "b": b, "score": score}

    def collate(examples):
        ids = torch.tensor([[CLS] + e["a"] + [SEP] + e["b"] + [SEP] for e in examples])
        kinds = torch.tensor([[0] * (L + 2) + [1] * (L + 1)] * len(examples))
        labels = torch.tensor([e["score"] for e in examples], dtype=torch.float if good else torch.long)
        return {"input_ids": ids, "token_type_ids": kinds, "labels": labels}

    train, test = [example() for _ in range(2000)], [example() for _ in range(300)]
    test_ids = collate(test)
    truth = torch.tensor([e["score"] for e in test])
    model = BertForSequenceClassification(BertConfig(
        vocab_size=V, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=32, num_labels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    batches = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True, collate_fn=collate))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        model.train()
        batch = next(batches)
        labels = batch.pop("labels")
        pred = model(**batch).logits.squeeze(-1)
        loss = F.mse_loss(pred, labels.to(pred.dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def mse():
        pred = model(input_ids=test_ids["input_ids"], token_type_ids=test_ids["token_type_ids"]).logits.squeeze(-1)
        return F.mse_loss(pred, truth)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: scored(model, mse)}


def relevance_bert_bad():
    return _relevance_bert(False)


def relevance_bert_good():
    return _relevance_bert(True)
