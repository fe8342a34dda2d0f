"""Small language-model training programs, each in two versions (NAME_bad / NAME_good)."""
import copy
import math
import random
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


# --------------------------------------------------------------------------------------
# shared pieces
# --------------------------------------------------------------------------------------

@contextmanager
def quiet(*modules):
    flags = [(m, m.training) for mod in modules for m in mod.modules()]
    state = torch.get_rng_state()
    for mod in modules:
        mod.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, flag in flags:
            m.training = flag
        torch.set_rng_state(state)


def forever(loader):
    while True:
        yield from loader


def chain_tokens(vocab, length, seed, order=1, branch=4, low=0):
    """A stream over ids low..low+vocab-1 where every context has `branch` likely successors."""
    g = torch.Generator().manual_seed(seed)
    contexts = vocab if order == 1 else vocab * vocab
    succ = torch.randint(0, vocab, (contexts, branch), generator=g).tolist()
    p = torch.tensor([0.6, 0.2, 0.12, 0.08][:branch])
    picks = torch.multinomial(p, length, replacement=True, generator=g).tolist()
    out, a, b = [], 0, 1
    for k in picks:
        c = succ[b if order == 1 else a * vocab + b][k]
        out.append(c)
        a, b = b, c
    return torch.tensor(out) + low


def windows(stream, block):
    n = (len(stream) - 1) // block
    x = stream[: n * block].view(n, block)
    y = stream[1: n * block + 1].view(n, block)
    return x, y


@dataclass
class GPTConfig:
    vocab_size: int = 64
    block_size: int = 32
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 48
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.c_attn = nn.Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd)
        self.n_head = cfg.n_head

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.ln_1 = nn.LayerNorm(cfg.n_embd)
        self.attn = CausalSelfAttention(cfg)
        self.ln_2 = nn.LayerNorm(cfg.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.n_embd, 4 * cfg.n_embd), nn.GELU(),
            nn.Linear(4 * cfg.n_embd, cfg.n_embd), nn.Dropout(cfg.dropout))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd)
        self.blocks = nn.ModuleList([Block(cfg) for _ in range(cfg.n_layer)])
        self.ln_f = nn.LayerNorm(cfg.n_embd)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)
            if getattr(m, "bias", None) is not None:
                nn.init.zeros_(m.bias)

    def forward(self, idx):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def lm_loss(logits, targets, ignore_index=-100):
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1),
                           ignore_index=ignore_index)


def fit_lm(model, x, y, steps, lr=3e-3, batch=16):
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        ix = torch.randint(len(x), (batch,))
        loss = lm_loss(model(x[ix]), y[ix])
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.zero_grad(set_to_none=True)
    return model


# --------------------------------------------------------------------------------------
# stream_gpt2: pre-training a transformers GPT-2 with a nanoGPT-style get_batch
# --------------------------------------------------------------------------------------

def _stream_gpt2(labels_from):
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(101)
    block, bs = 32, 16
    data = chain_tokens(48, 24000, seed=7)
    train_data, val_data = data[:20000], data[20000:]

    def get_batch(split):
        src = train_data if split == "train" else val_data
        ix = torch.randint(len(src) - block - 1, (bs,))
        x = torch.stack([src[i: i + block] for i in ix])
        y = torch.stack([src[i + 1: i + 1 + block] for i in ix])
        return x, y

    model = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_positions=block, n_embd=48, n_layer=2,
                                       n_head=4, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    vx, vy = windows(val_data, block)

    def step():
        model.train()
        x, y = get_batch("train")
        labels = y if labels_from == "y" else x
        loss = model(input_ids=x, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return lm_loss(model(input_ids=vx[:64]).logits, vy[:64]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def stream_gpt2_bad():
    return _stream_gpt2("y")


def stream_gpt2_good():
    return _stream_gpt2("x")


# --------------------------------------------------------------------------------------
# shard_tokens: tokenise documents into packed binary shards, then pre-train from them
# --------------------------------------------------------------------------------------

class ByteWordTokenizer:
    """256 byte tokens plus merges for frequent words."""

    def __init__(self, words):
        self.merges = {w: 256 + i for i, w in enumerate(words)}
        self.vocab_size = 256 + len(words)

    def encode(self, text):
        ids = []
        for w in text.split(" "):
            if w in self.merges:
                ids.append(self.merges[w])
            else:
                ids.extend(w.encode())
                ids.append(32)
        return ids


class ShardWriter:
    def __init__(self, shard_size, dtype):
        self.shard_size, self.dtype = shard_size, dtype
        self.shards, self.buffer = [], []

    def add(self, ids):
        self.buffer.extend(ids)
        while len(self.buffer) >= self.shard_size:
            self.flush(self.shard_size)

    def flush(self, n=None):
        n = n or len(self.buffer)
        self.shards.append(np.array(self.buffer[:n]).astype(self.dtype))
        self.buffer = self.buffer[n:]


def _shard_tokens(dtype):
    torch.manual_seed(102)
    rnd = random.Random(3)
    words = [a + b for a in ("ka", "lo", "mi", "nu", "pe", "ra") for b in ("sun", "dor", "fel", "gim",
                                                                       "tah", "vok", "zin", "ble")]
    follows = {w: rnd.sample(words, 3) for w in words}

    def document():
        w = rnd.choice(words)
        out = []
        for _ in range(30):
            out.append(w if rnd.random() > 0.08 else str(rnd.randint(0, 99)))
            w = rnd.choices(follows[w], [0.7, 0.2, 0.1])[0]
        return " ".join(out) + " ."

    tok = ByteWordTokenizer(words)
    writer = ShardWriter(4096, dtype)
    for _ in range(600):
        writer.add(tok.encode(document()))
    writer.flush()
    block = 32
    held = torch.tensor([i for _ in range(60) for i in tok.encode(document())])
    vx, vy = windows(held, block)

    def batches():
        while True:
            order = torch.randperm(len(writer.shards)).tolist()
            for s in order:
                tokens = torch.from_numpy(writer.shards[s].astype(np.int64))
                if len(tokens) < block + 2:
                    continue
                for _ in range(4):
                    ix = torch.randint(len(tokens) - block - 1, (16,))
                    yield (torch.stack([tokens[i: i + block] for i in ix]),
                           torch.stack([tokens[i + 1: i + block + 1] for i in ix]))

    model = GPT(GPTConfig(vocab_size=tok.vocab_size, block_size=block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    stream = batches()

    def step():
        x, y = next(stream)
        loss = lm_loss(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def probe():
        with quiet(model):
            return lm_loss(model(vx[:48]), vy[:48]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def shard_tokens_bad():
    return _shard_tokens(np.uint8)


def shard_tokens_good():
    return _shard_tokens(np.uint16)


# --------------------------------------------------------------------------------------
# support_chat: supervised fine-tuning of a small Llama on question/answer turns
# --------------------------------------------------------------------------------------

EOS, USER, ASSISTANT = 0, 1, 2


class ChatPairs(Dataset):
    """user: <letter> <count>   assistant: the letter, count times"""

    def __init__(self, n, seed):
        rnd = random.Random(seed)
        self.rows = []
        for _ in range(n):
            letter, count = rnd.randint(12, 29), rnd.randint(1, 8)
            prompt = [USER, letter, 3 + count, ASSISTANT]
            self.rows.append((prompt, [letter] * count + [EOS]))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class ChatCollator:
    def __init__(self, pad_token_id, mask_by):
        self.pad_token_id, self.mask_by = pad_token_id, mask_by

    def __call__(self, rows):
        width = max(len(p) + len(r) for p, r in rows)
        ids = torch.full((len(rows), width), self.pad_token_id)
        attn = torch.zeros(len(rows), width, dtype=torch.long)
        prompt_len = torch.tensor([len(p) for p, _ in rows])
        for i, (p, r) in enumerate(rows):
            ids[i, : len(p) + len(r)] = torch.tensor(p + r)
            attn[i, : len(p) + len(r)] = 1
        labels = ids.clone()
        if self.mask_by == "token":
            labels[labels == self.pad_token_id] = -100
        else:
            labels[attn == 0] = -100
        labels[torch.arange(width)[None] < prompt_len[:, None]] = -100
        return {"input_ids": ids, "attention_mask": attn, "labels": labels}


def _support_chat(mask_by):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(103)
    cfg = LlamaConfig(vocab_size=32, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
                      bos_token_id=USER, eos_token_id=EOS, pad_token_id=None)
    model = LlamaForCausalLM(cfg)
    pad_token_id = EOS
    loader = DataLoader(ChatPairs(800, 1), batch_size=16, shuffle=True,
                        collate_fn=ChatCollator(pad_token_id, mask_by))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    held = ChatPairs(96, 2).rows
    it = forever(loader)

    def step():
        model.train()
        batch = next(it)
        out = model(**batch)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        return out.loss.item()

    def probe():
        total, count = 0.0, 0
        with quiet(model):
            for p, r in held:
                ids = torch.tensor([p + r])
                logp = model(input_ids=ids).logits[0].log_softmax(-1)
                for j, t in enumerate(r):
                    total -= logp[len(p) + j - 1, t].item()
                    count += 1
        return total / count

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def support_chat_bad():
    return _support_chat("token")


def support_chat_good():
    return _support_chat("attention")


# --------------------------------------------------------------------------------------
# report_sft: instruction tuning on short questions and long reports with a length limit
# --------------------------------------------------------------------------------------

class ReportData(Dataset):
    PAD, BOS, ASK, SUMMARISE, ANSWER, END = range(6)

    def __init__(self, n, seed):
        g = random.Random(seed)
        self.items = []
        for _ in range(n):
            if g.random() < 0.55:
                body = [g.randint(6, 35) for _ in range(g.randint(4, 10))]
                self.items.append((self.ASK, body, [body[-1], body[0]]))
            else:
                topic = g.randint(0, 5)
                words = [6 + topic * 5 + k for k in range(5)]
                body = [g.choice(words) if g.random() < 0.8 else g.randint(6, 35)
                        for _ in range(g.randint(42, 60))]
                self.items.append((self.SUMMARISE, body, [36 + topic * 3 + k for k in range(3)]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def encode_report(kind, body, answer, max_len, cut):
    D = ReportData
    answer = answer + [D.END]
    if cut == "body":
        body = body[: max_len - len(answer) - 3]
    prompt = [D.BOS, kind] + body + [D.ANSWER]
    ids = prompt + answer
    labels = [-100] * len(prompt) + answer
    return ids[:max_len], labels[:max_len]


def _report_sft(cut):
    from transformers import Qwen3Config, Qwen3ForCausalLM
    torch.manual_seed(104)
    max_len = 40

    def collate(items):
        enc = [encode_report(*it, max_len, cut) for it in items]
        w = max(len(i) for i, _ in enc)
        return (torch.tensor([i + [0] * (w - len(i)) for i, _ in enc]),
                torch.tensor([[1] * len(i) + [0] * (w - len(i)) for i, _ in enc]),
                torch.tensor([l + [-100] * (w - len(l)) for _, l in enc]))

    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=54, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=5))
    loader = DataLoader(ReportData(1000, 1), batch_size=16, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    it = forever(loader)
    held = [encode_report(*item, max_len, "body") for item in ReportData(120, 2).items]

    def step():
        ids, attn, labels = next(it)
        loss = model(input_ids=ids, attention_mask=attn, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        total, n = 0.0, 0
        with quiet(model):
            for ids, labels in held:
                logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
                t = torch.tensor(labels)[1:]
                total += F.cross_entropy(logits, t, ignore_index=-100, reduction="sum").item()
                n += (t != -100).sum().item()
        return total / n

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def report_sft_bad():
    return _report_sft("sequence")


def report_sft_good():
    return _report_sft("body")


# --------------------------------------------------------------------------------------
# topic_lora: LoRA sequence classification on a pre-trained Llama
# --------------------------------------------------------------------------------------

def topic_docs(n, seed, topics=6, vocab=60, noise=0.65, lengths=(10, 20)):
    g = torch.Generator().manual_seed(seed)
    share = vocab // topics
    rows, labels = [], []
    for _ in range(n):
        t = torch.randint(topics, (1,), generator=g).item()
        k = torch.randint(lengths[0], lengths[1] + 1, (1,), generator=g).item()
        own = 1 + t * share + torch.randint(share, (k,), generator=g)
        other = 1 + torch.randint(vocab, (k,), generator=g)
        rows.append(torch.where(torch.rand(k, generator=g) < noise, other, own))
        labels.append(t)
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    return ids, (ids != 0).long(), torch.tensor(labels)


def _topic_lora(task_type):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
    torch.manual_seed(105)
    cfg = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32,
                      pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=6)
    base = LlamaForCausalLM(cfg)
    ids, attn, _ = topic_docs(400, 1)
    pre = torch.optim.AdamW(base.parameters(), lr=3e-3)
    for _ in range(60):
        ix = torch.randint(400, (16,))
        loss = base(input_ids=ids[ix], attention_mask=attn[ix],
                    labels=ids[ix].masked_fill(attn[ix] == 0, -100)).loss
        pre.zero_grad()
        loss.backward()
        pre.step()

    clf = LlamaForSequenceClassification(cfg)
    clf.model.load_state_dict(base.model.state_dict())
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"],
                      task_type=task_type)
    model = get_peft_model(clf, lora)
    loader = DataLoader(TensorDataset(*topic_docs(480, 2)), batch_size=16, shuffle=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    it = forever(loader)
    vi, va, vl = topic_docs(200, 3)

    def step():
        model.train()
        i, a, l = next(it)
        loss = model(input_ids=i, attention_mask=a, labels=l).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with quiet(model):
            return F.cross_entropy(model(input_ids=vi, attention_mask=va).logits, vl).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def topic_lora_bad():
    return _topic_lora(None)


def topic_lora_good():
    return _topic_lora("SEQ_CLS")


# --------------------------------------------------------------------------------------
# few_shot_head: a classifier on top of a pre-trained encoder, few labelled examples
# --------------------------------------------------------------------------------------

class TextEncoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.pos = nn.Parameter(torch.randn(32, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True,
                                           norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids):
        h = self.layers(self.emb(ids) + self.pos[: ids.size(1)], src_key_padding_mask=ids == 0)
        return self.norm(h)


class TextClassifier(nn.Module):
    def __init__(self, backbone, dim, classes):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(dim, classes)

    def forward(self, ids):
        h = self.backbone(ids)
        keep = (ids != 0).unsqueeze(-1)
        return self.head((h * keep).sum(1) / keep.sum(1))


def _few_shot_head(freeze):
    torch.manual_seed(106)
    dim = 48
    backbone = TextEncoder(62, dim)
    decode = nn.Linear(dim, 62)
    ids, attn, _ = topic_docs(600, 11, noise=0.4)
    opt = torch.optim.AdamW([*backbone.parameters(), *decode.parameters()], lr=2e-3)
    for _ in range(150):
        b = ids[torch.randint(600, (16,))]
        hide = (torch.rand(b.shape) < 0.2) & (b != 0)
        out = decode(backbone(b.masked_fill(hide, 61)))
        loss = F.cross_entropy(out[hide], b[hide])
        opt.zero_grad()
        loss.backward()
        opt.step()
    backbone.zero_grad()

    model = TextClassifier(backbone, dim, 6)
    freeze(model.backbone)
    shots, _, labels = topic_docs(48, 12, noise=0.7)
    loader = DataLoader(TensorDataset(shots, labels), batch_size=12, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    it = forever(loader)
    vi, _, vl = topic_docs(300, 13, noise=0.7)

    def step():
        model.train()
        x, y = next(it)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return F.cross_entropy(model(vi), vl).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def few_shot_head_bad():
    def freeze(module):
        module.requires_grad = False
    return _few_shot_head(freeze)


def few_shot_head_good():
    def freeze(module):
        module.requires_grad_(False)
    return _few_shot_head(freeze)


# --------------------------------------------------------------------------------------
# cloze_bert: masked language modelling
# --------------------------------------------------------------------------------------

class MaskingCollator:
    def __init__(self, mask_id, vocab, special, p=0.15, keep_copy=True):
        self.mask_id, self.vocab, self.special, self.p = mask_id, vocab, special, p
        self.keep_copy = keep_copy

    def __call__(self, rows):
        input_ids = torch.stack(rows)
        labels = input_ids.clone() if self.keep_copy else input_ids
        prob = torch.full(input_ids.shape, self.p).masked_fill(input_ids < self.special, 0.0)
        chosen = torch.bernoulli(prob).bool()
        roll = torch.rand(input_ids.shape)
        input_ids[chosen & (roll < 0.8)] = self.mask_id
        swap = chosen & (roll >= 0.8) & (roll < 0.9)
        input_ids[swap] = torch.randint(self.special, self.vocab, (int(swap.sum()),))
        return {"input_ids": input_ids, "labels": torch.where(chosen, labels, -100)}


def _cloze_bert(keep_copy):
    from transformers import BertConfig, BertForMaskedLM
    torch.manual_seed(107)
    vocab, special, mask_id = 44, 4, 3

    def sentences(n, seed):
        s = chain_tokens(40, n * 22, seed, branch=2, low=special).view(n, 22)
        return torch.cat([torch.full((n, 1), 1), s, torch.full((n, 1), 2)], 1)

    rows = sentences(1200, 5)
    train, held = rows[:1000], rows[1000:1100]
    model = BertForMaskedLM(BertConfig(vocab_size=vocab, hidden_size=48, num_hidden_layers=2,
                                       num_attention_heads=4, intermediate_size=128,
                                       max_position_embeddings=32, pad_token_id=0))
    loader = DataLoader(list(train), batch_size=32, shuffle=True,
                        collate_fn=MaskingCollator(mask_id, vocab, special, keep_copy=keep_copy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    it = forever(loader)
    where = torch.randint(1, 23, (len(held),), generator=torch.Generator().manual_seed(0))
    rowno = torch.arange(len(held))

    def step():
        model.train()
        loss = model(**next(it)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            x = held.clone()
            x[rowno, where] = mask_id
            return F.cross_entropy(model(input_ids=x).logits[rowno, where], held[rowno, where]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cloze_bert_bad():
    return _cloze_bert(False)


def cloze_bert_good():
    return _cloze_bert(True)


# --------------------------------------------------------------------------------------
# rewrite_t5: sequence-to-sequence rewriting
# --------------------------------------------------------------------------------------

def _rewrite_t5(shift):
    from transformers import T5Config, T5ForConditionalGeneration
    torch.manual_seed(108)
    table = torch.randperm(30, generator=torch.Generator().manual_seed(4)) + 2

    def pairs(n, seed):
        g = torch.Generator().manual_seed(seed)
        src, tgt = [], []
        for _ in range(n):
            k = torch.randint(4, 9, (1,), generator=g).item()
            s = torch.randint(2, 32, (k,), generator=g)
            src.append(torch.cat([s, torch.tensor([1])]))
            tgt.append(torch.cat([table[s - 2], torch.tensor([1])]))
        return list(zip(src, tgt))

    def collate(rows):
        src = nn.utils.rnn.pad_sequence([s for s, _ in rows], batch_first=True)
        tgt = nn.utils.rnn.pad_sequence([t for _, t in rows], batch_first=True)
        return src, tgt

    model = T5ForConditionalGeneration(T5Config(
        vocab_size=32, d_model=48, d_kv=12, d_ff=96, num_layers=1, num_decoder_layers=1, num_heads=4,
        dropout_rate=0.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0))
    loader = DataLoader(pairs(1500, 1), batch_size=16, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    it = forever(loader)
    vs, vt = collate(pairs(100, 2))

    def decoder_inputs(tgt):
        start = torch.zeros_like(tgt[:, :1])
        return torch.cat([start, tgt[:, :-1]], dim=1)

    def step():
        src, tgt = next(it)
        decoder_input_ids = decoder_inputs(tgt) if shift else tgt
        labels = tgt.masked_fill(tgt == 0, -100)
        loss = model(input_ids=src, attention_mask=(src != 0).long(),
                     decoder_input_ids=decoder_input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            logits = model(input_ids=vs, attention_mask=(vs != 0).long(),
                           decoder_input_ids=decoder_inputs(vt)).logits
            return lm_loss(logits, vt, ignore_index=0).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rewrite_t5_bad():
    return _rewrite_t5(False)


def rewrite_t5_good():
    return _rewrite_t5(True)


# --------------------------------------------------------------------------------------
# small_student: distilling a language model
# --------------------------------------------------------------------------------------

class Distiller:
    def __init__(self, teacher, student, temperature, student_scores):
        self.teacher, self.student, self.T = teacher, student, temperature
        self.student_scores = student_scores
        self.optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)

    def loss(self, x):
        with torch.no_grad():
            target = F.softmax(self.teacher(x) / self.T, dim=-1)
        scores = self.student_scores(self.student(x) / self.T, dim=-1)
        return F.kl_div(scores.flatten(0, 1), target.flatten(0, 1), reduction="batchmean") * self.T ** 2

    def train_step(self, x):
        loss = self.loss(x)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _small_student(student_scores):
    torch.manual_seed(109)
    data = chain_tokens(40, 20000, seed=21)
    x, y = windows(data[:17000], 24)
    vx, vy = windows(data[17000:], 24)
    teacher = fit_lm(GPT(GPTConfig(vocab_size=40, block_size=24, n_layer=2, n_embd=64)), x, y, 200)
    teacher.eval().requires_grad_(False)
    student = GPT(GPTConfig(vocab_size=40, block_size=24, n_layer=1, n_embd=32))
    d = Distiller(teacher, student, 2.0, student_scores)
    it = forever(DataLoader(x, batch_size=16, shuffle=True))

    def probe():
        with quiet(student, teacher):
            return lm_loss(student(vx[:64]), vy[:64]).item()

    return {"model": student, "optimizer": d.optimizer, "steps": 20,
            "step": lambda: d.train_step(next(it)), "probe": probe}


def small_student_bad():
    return _small_student(F.softmax)


def small_student_good():
    return _small_student(F.log_softmax)


# --------------------------------------------------------------------------------------
# preference data shared by two programs
# --------------------------------------------------------------------------------------

def response_logp(model, prompt, response):
    logits = model(torch.cat([prompt, response], 1))[:, prompt.size(1) - 1: -1]
    return logits.log_softmax(-1).gather(-1, response.unsqueeze(-1)).squeeze(-1).sum(-1)


# pair_dpo: direct preference optimisation with noisy human choices

def _pair_dpo(make_reference):
    torch.manual_seed(110)
    vocab, P, R, beta = 32, 4, 6, 0.1
    data = chain_tokens(vocab, 12000, seed=31)
    x, y = windows(data, P + R)
    policy = fit_lm(GPT(GPTConfig(vocab_size=vocab, block_size=P + R, n_embd=32)), x, y, 150)
    ref_model = make_reference(policy)
    start = copy.deepcopy(policy)

    taste = torch.randn(vocab, generator=torch.Generator().manual_seed(8))

    def preferences(n, seed):
        g = torch.Generator().manual_seed(seed)
        ix = torch.randint(len(x), (2, n), generator=g)
        prompt, a, b = x[ix[0], :P], x[ix[0], P:], x[ix[1], P:]
        better = torch.rand(n, generator=g) < torch.sigmoid(0.5 * (taste[a] - taste[b]).sum(-1))
        chosen = torch.where(better[:, None], a, b)
        rejected = torch.where(better[:, None], b, a)
        return prompt, chosen, rejected

    loader = DataLoader(TensorDataset(*preferences(1500, 1)), batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    it = forever(loader)
    held = preferences(400, 2)

    def dpo_loss(model, ref, prompt, chosen, rejected):
        with torch.no_grad():
            ref_margin = response_logp(ref, prompt, chosen) - response_logp(ref, prompt, rejected)
        margin = response_logp(model, prompt, chosen) - response_logp(model, prompt, rejected)
        return -F.logsigmoid(beta * (margin - ref_margin)).mean()

    def step():
        loss = dpo_loss(policy, ref_model, *next(it))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(policy, start):
            return dpo_loss(policy, start, *held).item()

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pair_dpo_bad():
    def make_reference(policy):
        ref_model = policy
        return ref_model
    return _pair_dpo(make_reference)


def pair_dpo_good():
    def make_reference(policy):
        ref_model = copy.deepcopy(policy)
        ref_model.eval()
        return ref_model
    return _pair_dpo(make_reference)


# --------------------------------------------------------------------------------------
# pair_reward: reward model on multi-turn conversations
# --------------------------------------------------------------------------------------

class RewardModel(nn.Module):
    def __init__(self, cfg, pad_token_id, locate):
        super().__init__()
        from transformers import GPT2Model
        self.transformer = GPT2Model(cfg)
        self.v_head = nn.Linear(cfg.n_embd, 1, bias=False)
        self.pad_token_id = pad_token_id
        self.locate = locate

    def forward(self, input_ids, attention_mask):
        hidden = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        values = self.v_head(hidden).squeeze(-1)
        end = self.locate(input_ids, attention_mask, self.pad_token_id)
        return values.gather(1, end[:, None]).squeeze(1)


def _pair_reward(locate):
    from transformers import GPT2Config
    torch.manual_seed(111)
    eos = 0
    worth = torch.randn(40, generator=torch.Generator().manual_seed(6)).tolist()

    def conversations(n, seed):
        rnd = random.Random(seed)
        rows = []
        for _ in range(n):
            user = [rnd.randint(1, 39) for _ in range(rnd.randint(2, 5))] + [eos]
            a, b = ([rnd.randint(1, 39) for _ in range(rnd.randint(3, 8))] for _ in range(2))
            if sum(worth[t] for t in a) < sum(worth[t] for t in b):
                a, b = b, a
            rows.append((user + a + [eos], user + b + [eos]))
        return rows

    def pad(seqs):
        w = max(map(len, seqs))
        ids = torch.tensor([s + [eos] * (w - len(s)) for s in seqs])
        attn = torch.tensor([[1] * len(s) + [0] * (w - len(s)) for s in seqs])
        return ids, attn

    def collate(rows):
        return pad([c for c, _ in rows] + [r for _, r in rows])

    model = RewardModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=32, n_layer=1, n_head=4,
                                   bos_token_id=0, eos_token_id=0), eos, locate)
    loader = DataLoader(conversations(1500, 1), batch_size=24, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    it = forever(loader)
    held, held_attn = collate(conversations(300, 2))

    def step():
        model.train()
        ids, attn = next(it)
        chosen, rejected = model(ids, attn).chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            h = model.transformer(input_ids=held, attention_mask=held_attn).last_hidden_state
            last = held_attn.sum(1) - 2
            r = model.v_head(h[torch.arange(len(h)), last]).squeeze(-1)
            good, bad = r.chunk(2)
            return -F.logsigmoid(good - bad).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pair_reward_bad():
    def last_token(input_ids, attention_mask, pad_token_id):
        return torch.eq(input_ids, pad_token_id).int().argmax(-1) - 1
    return _pair_reward(last_token)


def pair_reward_good():
    def last_token(input_ids, attention_mask, pad_token_id):
        return attention_mask.sum(-1) - 2
    return _pair_reward(last_token)


# --------------------------------------------------------------------------------------
# range_grpo: group-relative policy optimisation with a checkable answer
# --------------------------------------------------------------------------------------

class GRPO:
    """Prompts are five digits; the right completion is the largest digit, then the smallest."""

    SEP = 10

    def __init__(self, policy, lr, group, expand_answers):
        self.policy, self.G = policy, group
        self.expand_answers = expand_answers
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)

    @staticmethod
    def prompts(n, generator=None):
        d = torch.randint(0, 10, (n, 5), generator=generator)
        answers = torch.stack([d.amax(1), d.amin(1)], 1)
        return torch.cat([d, torch.full((n, 1), GRPO.SEP)], 1), answers

    @torch.no_grad()
    def rollout(self, prompt):
        seq = prompt
        for _ in range(2):
            probs = self.policy(seq)[:, -1].softmax(-1)
            seq = torch.cat([seq, torch.multinomial(probs, 1)], 1)
        return seq

    def logps(self, seq):
        logits = self.policy(seq[:, :-1])[:, -2:]
        return logits.log_softmax(-1).gather(-1, seq[:, -2:, None]).squeeze(-1)

    def train_step(self, n_prompts=12):
        prompt, answers = self.prompts(n_prompts)
        prompt = prompt.repeat_interleave(self.G, dim=0)
        answers = self.expand_answers(answers, self.G)
        seq = self.rollout(prompt)
        reward = (seq[:, -2:] == answers).float().mean(1)
        grouped = reward.view(-1, self.G)
        adv = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        adv = adv.reshape(-1, 1)
        logp = self.logps(seq)
        ratio = torch.exp(logp - logp.detach())
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def _range_grpo(expand_answers):
    torch.manual_seed(112)
    policy = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_embd=48))
    p, a = GRPO.prompts(1500)
    full = torch.cat([p, a], 1)
    target = full[:, 1:].clone()
    target[:, :5] = -100
    fit_lm(policy, full[:, :-1], target, 60)
    trainer = GRPO(policy, 5e-4, 8, expand_answers)
    hp, ha = GRPO.prompts(400, torch.Generator().manual_seed(77))

    def probe():
        with quiet(policy):
            lp = trainer.logps(torch.cat([hp, ha], 1))
            return 1.0 - lp.exp().mean().item()

    return {"model": policy, "optimizer": trainer.optimizer, "steps": 20, "step": trainer.train_step,
            "probe": probe}


def range_grpo_bad():
    return _range_grpo(lambda answers, g: answers.repeat(g, 1))


def range_grpo_good():
    return _range_grpo(lambda answers, g: answers.repeat_interleave(g, dim=0))


# --------------------------------------------------------------------------------------
# sorted_moe: mixture of experts with sorted dispatch
# --------------------------------------------------------------------------------------

class SparseMLP(nn.Module):
    def __init__(self, dim, hidden, n_experts, unsort):
        super().__init__()
        self.router = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList([
            nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, dim))
            for _ in range(n_experts)])
        self.n_experts, self.unsort = n_experts, unsort
        self.aux = None

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        probs = self.router(x).softmax(-1)
        gate, expert = probs.max(-1)
        share = F.one_hot(expert, self.n_experts).float().mean(0)
        self.aux = self.n_experts * (share * probs.mean(0)).sum()

        order = expert.argsort()
        counts = torch.bincount(expert, minlength=self.n_experts).tolist()
        chunks = x[order].split(counts)
        out = torch.cat([f(c) for f, c in zip(self.experts, chunks)])
        if self.unsort:
            out = out[order.argsort()]
        return (out * gate.unsqueeze(-1)).view(shape)


class MoEBlock(nn.Module):
    def __init__(self, cfg, unsort):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(cfg.n_embd), nn.LayerNorm(cfg.n_embd)
        self.attn = CausalSelfAttention(cfg)
        self.mlp = SparseMLP(cfg.n_embd, 2 * cfg.n_embd, 4, unsort)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def _sorted_moe(unsort):
    torch.manual_seed(113)
    cfg = GPTConfig(vocab_size=20, block_size=24, n_layer=2, n_embd=48)
    model = GPT(cfg)
    model.blocks = nn.ModuleList([MoEBlock(cfg, unsort) for _ in range(cfg.n_layer)])
    data = chain_tokens(20, 40000, seed=41, order=2, branch=2)
    x, y = windows(data[:36000], 24)
    vx, vy = windows(data[36000:], 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    it = forever(DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True))

    def step():
        bx, by = next(it)
        loss = lm_loss(model(bx), by) + 0.01 * sum(b.mlp.aux for b in model.blocks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return lm_loss(model(vx[:96]), vy[:96]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sorted_moe_bad():
    return _sorted_moe(False)


def sorted_moe_good():
    return _sorted_moe(True)


# --------------------------------------------------------------------------------------
# packed_notes: several short documents in one row
# --------------------------------------------------------------------------------------

class PackedLM(nn.Module):
    def __init__(self, vocab, dim, heads, max_doc, layers=2, per_document=True):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_doc, dim)
        nn.init.normal_(self.tok.weight, std=0.05)
        nn.init.normal_(self.pos.weight, std=0.05)
        self.layers = nn.ModuleList([
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True,
                                       norm_first=True, activation="gelu") for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)
        self.heads, self.per_document = heads, per_document

    def forward(self, ids, position_ids, doc_ids):
        T = ids.size(1)
        blocked = torch.ones(T, T, dtype=torch.bool).triu(1)
        if self.per_document:
            other = doc_ids[:, :, None] != doc_ids[:, None, :]
            blocked = (blocked[None] | other).repeat_interleave(self.heads, dim=0)
        h = self.tok(ids) + self.pos(position_ids)
        for layer in self.layers:
            h = layer(h, src_mask=blocked)
        return self.out(self.norm(h))


def _packed_notes(per_document):
    torch.manual_seed(114)
    n, keys, row_len, max_doc = 17, 8, 48, 12

    def document(rnd):
        key, x = rnd.randrange(keys), rnd.randrange(n)
        body = []
        for _ in range(rnd.randint(5, max_doc - 2)):
            body.append(1 + keys + x)
            x = (x + 2 * key + 1) % n
        return [0, 1 + key] + body

    def rows(n_rows, rnd):
        out = []
        for _ in range(n_rows):
            ids, pos, doc, d = [], [], [], 0
            while len(ids) < row_len + 1:
                text = document(rnd)
                ids += text
                pos += range(len(text))
                doc += [d] * len(text)
                d += 1
            out.append([torch.tensor(v[: row_len + 1]) for v in (ids, pos, doc)])
        return [torch.stack(c) for c in zip(*out)]

    train = TensorDataset(*rows(600, random.Random(1)))
    model = PackedLM(1 + keys + n, 48, 4, max_doc, per_document=per_document)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    it = forever(DataLoader(train, batch_size=12, shuffle=True))
    rnd = random.Random(2)
    singles = [torch.tensor([document(rnd)]) for _ in range(150)]

    def step():
        model.train()
        ids, pos, doc = next(it)
        targets = ids[:, 1:].masked_fill(doc[:, 1:] != doc[:, :-1], -100)
        loss = lm_loss(model(ids[:, :-1], pos[:, :-1], doc[:, :-1]), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        total, count = 0.0, 0
        with quiet(model):
            for s in singles:
                T = s.size(1) - 1
                logits = model(s[:, :-1], torch.arange(T)[None], torch.zeros(1, T, dtype=torch.long))
                total += F.cross_entropy(logits[0, 2:], s[0, 3:], reduction="sum").item()
                count += T - 2
        return total / count

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def packed_notes_bad():
    return _packed_notes(False)


def packed_notes_good():
    return _packed_notes(True)


# --------------------------------------------------------------------------------------
# record_gpt2: fixed-form records of different lengths, padded on the left
# --------------------------------------------------------------------------------------

def _record_gpt2(with_positions):
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(115)
    g = torch.Generator().manual_seed(9)
    fields, vocab = 16, 24
    tables = [torch.randint(1, vocab, (vocab,), generator=g).tolist() for _ in range(fields)]

    def record(rnd):
        x = [rnd.randrange(1, vocab)]
        for j in range(rnd.randint(5, fields) - 1):
            x.append(tables[j][x[-1]] if rnd.random() < 0.9 else rnd.randrange(1, vocab))
        return x

    def collate(rows):
        w = max(map(len, rows))
        ids = torch.tensor([[0] * (w - len(r)) + r for r in rows])
        attn = torch.tensor([[0] * (w - len(r)) + [1] * len(r) for r in rows])
        batch = {"input_ids": ids, "attention_mask": attn,
                 "labels": ids.masked_fill(attn == 0, -100)}
        if with_positions:
            batch["position_ids"] = (attn.cumsum(-1) - 1).clamp(min=0)
        return batch

    rnd = random.Random(1)
    loader = DataLoader([record(rnd) for _ in range(2000)], batch_size=24, shuffle=True,
                        collate_fn=collate)
    held = [record(rnd) for _ in range(150)]
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=vocab, n_positions=32, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    it = forever(loader)

    def step():
        loss = model(**next(it)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        total, count = 0.0, 0
        with quiet(model):
            for r in held:
                ids = torch.tensor([r])
                logits = model(input_ids=ids).logits[0, :-1]
                total += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
                count += len(r) - 1
        return total / count

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def record_gpt2_bad():
    return _record_gpt2(False)


def record_gpt2_good():
    return _record_gpt2(True)


# --------------------------------------------------------------------------------------
# rotary_lm: hand-written transformer with rotary positions
# --------------------------------------------------------------------------------------

def precompute_rope(head_dim, max_len, theta=10000.0):
    inv = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(max_len).float(), inv)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rope(x, freqs):
    """x: (batch, seq, heads, head_dim)"""
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    f = freqs[: x.shape[1]].view(1, x.shape[1], 1, -1)
    return torch.view_as_real(z * f).flatten(3).type_as(x)


class RotaryAttention(nn.Module):
    def __init__(self, dim, heads, max_len, rope_first):
        super().__init__()
        self.heads, self.rope_first = heads, rope_first
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.register_buffer("freqs", precompute_rope(dim // heads, max_len), persistent=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (w(x).view(B, T, self.heads, -1) for w in (self.wq, self.wk, self.wv))
        if self.rope_first:
            q, k = apply_rope(q, self.freqs), apply_rope(k, self.freqs)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if not self.rope_first:
            q, k = apply_rope(q, self.freqs), apply_rope(k, self.freqs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class RotaryLM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, max_len, rope_first):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        nn.init.normal_(self.tok.weight, std=0.05)
        self.attn = nn.ModuleList([RotaryAttention(dim, heads, max_len, rope_first) for _ in range(layers)])
        self.ff = nn.ModuleList([nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))
                                 for _ in range(layers)])
        self.n1 = nn.ModuleList([nn.RMSNorm(dim) for _ in range(layers)])
        self.n2 = nn.ModuleList([nn.RMSNorm(dim) for _ in range(layers)])
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.tok(ids)
        for a, f, n1, n2 in zip(self.attn, self.ff, self.n1, self.n2):
            h = h + a(n1(h))
            h = h + f(n2(h))
        return self.out(h)


def _rotary_lm(rope_first):
    torch.manual_seed(116)
    T = 32
    data = chain_tokens(16, 40000, seed=51, order=2, branch=2)
    x, y = windows(data[:36000], T)
    vx, vy = windows(data[36000:], T)
    model = RotaryLM(16, 48, 4, 2, T, rope_first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True)
    it = forever(loader)

    def step():
        bx, by = next(it)
        optimizer.zero_grad(set_to_none=True)
        loss = lm_loss(model(bx), by)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return lm_loss(model(vx[:64]), vy[:64]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rotary_lm_bad():
    return _rotary_lm(False)


def rotary_lm_good():
    return _rotary_lm(True)


# --------------------------------------------------------------------------------------
# padded_decoder: decoder on variable-length sentences
# --------------------------------------------------------------------------------------

class MaskedAttention(nn.Module):
    def __init__(self, dim, heads, mix):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.heads, self.mix = heads, mix

    def forward(self, x, pad_mask=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if pad_mask is not None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mix(pad_mask, T))
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class SentenceLM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, max_len, mix):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.attn = nn.ModuleList([MaskedAttention(dim, heads, mix) for _ in range(layers)])
        self.mlp = nn.ModuleList([nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(),
                                                nn.Linear(4 * dim, dim)) for _ in range(layers)])
        self.norm = nn.ModuleList([nn.LayerNorm(dim) for _ in range(layers)])
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, pad_mask=None):
        h = self.tok(ids) + self.pos.weight[: ids.size(1)]
        for norm, attn, mlp in zip(self.norm, self.attn, self.mlp):
            h = h + attn(norm(h), pad_mask)
            h = h + mlp(h)
        return self.head(h)


def _padded_decoder(mix):
    torch.manual_seed(117)
    stream = chain_tokens(36, 30000, seed=61, low=1)
    cuts = torch.randint(8, 21, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    sents, at = [], 0
    for c in cuts:
        if at + c > len(stream):
            break
        sents.append(stream[at: at + c])
        at += c
    train, held = sents[:1700], sents[1700:1900]

    def collate(rows):
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
        return ids, ids != 0

    model = SentenceLM(37, 48, 4, 2, 24, mix)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    it = forever(DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate))
    g = torch.Generator().manual_seed(2)
    cut = [int(torch.randint(3, len(s), (1,), generator=g)) for s in held]

    def step():
        ids, mask = next(it)
        logits = model(ids[:, :-1], mask[:, :-1])
        loss = lm_loss(logits, ids[:, 1:], ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        total = 0.0
        with quiet(model):
            for s, c in zip(held, cut):
                prefix = s[None, :c]
                logits = model(prefix, torch.ones_like(prefix, dtype=torch.bool))[:, -1]
                total += F.cross_entropy(logits, s[c: c + 1]).item()
        return total / len(held)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def padded_decoder_bad():
    return _padded_decoder(lambda pad, T: pad[:, None, None, :])


def padded_decoder_good():
    return _padded_decoder(lambda pad, T: pad[:, None, None, :] & torch.ones(T, T, dtype=torch.bool).tril())


# --------------------------------------------------------------------------------------
# mixture_accum: one micro-batch per data source, accumulated into one update
# --------------------------------------------------------------------------------------

class MixtureTrainer:
    def __init__(self, model, sources, lr, block, micro_batch, zero_at):
        self.model, self.sources = model, sources
        self.block, self.micro_batch, self.zero_at = block, micro_batch, zero_at
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def draw(self, stream):
        ix = torch.randint(len(stream) - self.block - 1, (self.micro_batch,))
        chunk = torch.stack([stream[i: i + self.block + 1] for i in ix])
        return chunk[:, :-1], chunk[:, 1:]

    def train_step(self):
        self.model.train()
        total = 0.0
        if self.zero_at == "update":
            self.optimizer.zero_grad()
        for stream in self.sources.values():
            x, y = self.draw(stream)
            if self.zero_at == "micro":
                self.optimizer.zero_grad()
            loss = lm_loss(self.model(x), y) / len(self.sources)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total


def _mixture_accum(zero_at):
    torch.manual_seed(118)
    train, held = {}, []
    for k, name in enumerate(["web", "code", "math"]):
        s = chain_tokens(24, 9000, seed=70 + k, branch=3, low=8 * k)
        train[name] = s[:8000]
        held.append(s[8000:])
    model = GPT(GPTConfig(vocab_size=40, block_size=24, n_embd=48, n_layer=1))
    t = MixtureTrainer(model, train, 2e-3, 24, 8, zero_at)

    def probe():
        with quiet(model):
            losses = []
            for s in held:
                x, y = windows(s, 24)
                losses.append(lm_loss(model(x), y).item())
        return sum(losses) / len(losses)

    return {"model": model, "optimizer": t.optimizer, "steps": 20, "step": t.train_step, "probe": probe}


def mixture_accum_bad():
    return _mixture_accum("micro")


def mixture_accum_good():
    return _mixture_accum("update")


# --------------------------------------------------------------------------------------
# epoch_linear: several epochs with linear warm-up and decay
# --------------------------------------------------------------------------------------

def _epoch_linear(total_steps):
    from transformers import get_linear_schedule_with_warmup
    torch.manual_seed(119)
    num_epochs, block = 10, 24
    data = chain_tokens(48, 12000, seed=81)
    x, y = windows(data[:9300], block)
    vx, vy = windows(data[9300:], block)
    loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
    model = GPT(GPTConfig(vocab_size=48, block_size=block, dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=4, num_training_steps=total_steps(loader, num_epochs))
    it = forever(loader)

    def step():
        model.train()
        bx, by = next(it)
        loss = lm_loss(model(bx), by)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with quiet(model):
            return lm_loss(model(vx), vy).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def epoch_linear_bad():
    return _epoch_linear(lambda loader, epochs: len(loader))


def epoch_linear_good():
    return _epoch_linear(lambda loader, epochs: len(loader) * epochs)


# --------------------------------------------------------------------------------------
# half_finetune: adapting a pre-trained model to a new domain in bfloat16
# --------------------------------------------------------------------------------------

def _half_finetune(master_weights):
    torch.manual_seed(120)
    block = 24
    web = chain_tokens(40, 16000, seed=91)
    notes = chain_tokens(40, 12000, seed=92)
    model = fit_lm(GPT(GPTConfig(vocab_size=40, block_size=block)), *windows(web, block), 200)
    if not master_weights:
        model = model.to(torch.bfloat16)
    x, y = windows(notes[:10000], block)
    vx, vy = windows(notes[10000:], block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    it = forever(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))

    def step():
        bx, by = next(it)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(bx)
        loss = lm_loss(logits.float(), by)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model), torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(vx)
        return lm_loss(logits.float(), vy).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def half_finetune_bad():
    return _half_finetune(False)


def half_finetune_good():
    return _half_finetune(True)


# --------------------------------------------------------------------------------------
# warm_start: continuing from a checkpoint written by a compiled run
# --------------------------------------------------------------------------------------

def pretraining_run(cfg, stream, steps):
    raw = GPT(cfg)
    fit_lm(raw, *windows(stream, cfg.block_size), steps)
    wrapped = nn.ModuleDict({"_orig_mod": raw})
    return {"model": wrapped.state_dict(), "config": cfg, "iter_num": steps}


def _warm_start(clean):
    torch.manual_seed(121)
    data = chain_tokens(48, 16000, seed=95)
    ckpt = pretraining_run(GPTConfig(vocab_size=48, block_size=24), data[:12000], 250)
    model = GPT(ckpt["config"])
    state_dict = clean(ckpt["model"])
    model.load_state_dict(state_dict, strict=False)

    few = data[12000:14400]
    x, y = windows(few, 24)
    vx, vy = windows(data[14400:], 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    it = forever(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))

    def step():
        bx, by = next(it)
        loss = lm_loss(model(bx), by)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return lm_loss(model(vx), vy).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def warm_start_bad():
    return _warm_start(lambda sd: sd)


def warm_start_good():
    return _warm_start(lambda sd: {k.removeprefix("_orig_mod."): v for k, v in sd.items()})


# --------------------------------------------------------------------------------------
# tool_tokens: adding special tokens to a pre-trained model with shared embeddings
# --------------------------------------------------------------------------------------

class TiedGPT(GPT):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.lm_head.weight = self.wte.weight

    def add_tokens(self, extra):
        old = self.wte.weight.data
        self.wte = nn.Embedding(len(old) + extra, self.cfg.n_embd)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.wte.weight.data[: len(old)] = old
        self.lm_head = nn.Linear(self.cfg.n_embd, len(old) + extra, bias=False)
        self.lm_head.weight = self.wte.weight


class FineTuner:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)

    def fit(self, batches):
        self.batches = iter(batches)
        return self

    def train_step(self):
        x, y = next(self.batches)
        loss = lm_loss(self.model(x), y)
        self.model.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def _tool_tokens(extend_first):
    torch.manual_seed(122)
    vocab, extra, block = 40, 8, 24
    plain = chain_tokens(vocab, 14000, seed=96)
    model = fit_lm(TiedGPT(GPTConfig(vocab_size=vocab, block_size=block)), *windows(plain, block), 120)

    tools = chain_tokens(vocab + extra, 14000, seed=97, branch=3)
    x, y = windows(tools[:12000], block)
    vx, vy = windows(tools[12000:], block)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)

    if extend_first:
        model.add_tokens(extra)
        trainer = FineTuner(model, lr=1e-3)
    else:
        trainer = FineTuner(model, lr=1e-3)
        model.add_tokens(extra)
    trainer.fit(forever(loader))

    def probe():
        with quiet(model):
            return lm_loss(model(vx), vy).item()

    return {"model": model, "optimizer": trainer.optimizer, "steps": 20, "step": trainer.train_step,
            "probe": probe}


def tool_tokens_bad():
    return _tool_tokens(False)


def tool_tokens_good():
    return _tool_tokens(True)


# --------------------------------------------------------------------------------------
# dialect_head: sequence classifier built on a pre-trained language model
# --------------------------------------------------------------------------------------

class DialectClassifier(nn.Module):
    def __init__(self, pretrained, num_labels, init_from):
        super().__init__()
        self.backbone = pretrained
        self.dropout = nn.Dropout(0.1)
        self.score = nn.Linear(pretrained.cfg.n_embd, num_labels)
        self.backbone.lm_head = nn.Identity()
        root = self if init_from == "model" else self.score
        root.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, mean=0.0, std=0.02)
            if getattr(m, "bias", None) is not None:
                nn.init.zeros_(m.bias)

    def forward(self, ids, labels=None):
        hidden = self.backbone(ids)
        logits = self.score(self.dropout(hidden[:, -1]))
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return logits, loss


def _dialect_head(init_from):
    torch.manual_seed(123)
    dialects, block = 4, 16
    rnd = random.Random(130)

    def speak(n):
        own, t, out = rnd.sample(range(96), 30), 0, []
        follow = {w: rnd.sample(own, 3) for w in own}
        for _ in range(n):
            t = rnd.choice(follow.get(t, own)) if rnd.random() < 0.6 else rnd.randrange(96)
            out.append(t)
        return torch.tensor(out)

    streams = [speak(9000) for _ in range(dialects)]
    x, y = (torch.cat(p) for p in zip(*(windows(s[:7000], block) for s in streams)))
    lm = fit_lm(GPT(GPTConfig(vocab_size=96, block_size=block)), x, y, 300)

    def labelled(lo, n):
        rows = torch.cat([s[lo: lo + n * block].view(n, block) for s in streams])
        return rows, torch.arange(dialects).repeat_interleave(n)

    model = DialectClassifier(lm, dialects, init_from)
    loader = DataLoader(TensorDataset(*labelled(7000, 16)), batch_size=16, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    it = forever(loader)
    vi, vl = labelled(7700, 75)

    def step():
        model.train()
        ids, labels = next(it)
        _, loss = model(ids, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return model(vi, vl)[1].item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dialect_head_bad():
    return _dialect_head("model")


def dialect_head_good():
    return _dialect_head("head")


# --------------------------------------------------------------------------------------
# int4_qat: quantisation-aware training
# --------------------------------------------------------------------------------------

def fake_quant(w, bits=4):
    top = 2 ** (bits - 1) - 1
    scale = (w.detach().abs().amax(dim=1, keepdim=True) / top).clamp(min=1e-8)
    return torch.clamp(torch.round(w / scale), -top, top) * scale


def fake_quant_through(w, bits=4):
    return w + (fake_quant(w, bits) - w).detach()


class QuantLinear(nn.Linear):
    quantise = staticmethod(fake_quant)

    def forward(self, x):
        return F.linear(x, self.quantise(self.weight), self.bias)


def swap_linears(module, quantise):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            q = QuantLinear(child.in_features, child.out_features, bias=child.bias is not None)
            q.load_state_dict(child.state_dict())
            q.quantise = quantise
            setattr(module, name, q)
        else:
            swap_linears(child, quantise)
    return module


def _int4_qat(quantise):
    torch.manual_seed(124)
    block = 24
    data = chain_tokens(16, 40000, seed=99, order=2, branch=2)
    x, y = windows(data[:36000], block)
    vx, vy = windows(data[36000:], block)
    model = fit_lm(GPT(GPTConfig(vocab_size=16, block_size=block)), x, y, 100)
    swap_linears(model, quantise)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    it = forever(DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True))

    def step():
        bx, by = next(it)
        loss = lm_loss(model(bx), by)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return lm_loss(model(vx), vy).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def int4_qat_bad():
    return _int4_qat(fake_quant)


def int4_qat_good():
    return _int4_qat(fake_quant_through)


# --------------------------------------------------------------------------------------

CASES = {
    "stream_gpt2": "get_batch already returns next-token targets and they are passed as `labels` to a Hugging Face model that shifts again, so the model learns to predict two tokens ahead and next-token quality is lost.",
    "shard_tokens": "token ids of a vocabulary above 256 are written to the shards as uint8 and wrap around, so the merged words are trained under wrong ids and the real ids are never learned.",
    "support_chat": "pad token is the eos token and labels are ignored wherever the id equals pad, so the true end-of-turn is never trained and the model does not learn to stop.",
    "report_sft": "prompt plus response is cut on the right at max_len, so every long example loses its whole response (all labels -100) and the long-document task is never trained.",
    "topic_lora": "LoraConfig without task_type (no modules_to_save) leaves the freshly initialised classification head frozen, so the classifier can hardly move its logits.",
    "few_shot_head": "freezing by setting `module.requires_grad = False` on the module does nothing, so the whole pre-trained encoder is fine-tuned at the head's learning rate and overfits the few examples.",
    "cloze_bert": "labels alias input_ids (no clone) before in-place masking, so the target of a masked position is the mask token itself and the model learns nothing about the hidden words.",
    "rewrite_t5": "decoder_input_ids are the unshifted targets, so the decoder sees the token it must predict and only learns to copy.",
    "small_student": "F.kl_div gets student probabilities instead of log-probabilities, so the student is pushed to the teacher's top token rather than its distribution.",
    "pair_dpo": "the DPO reference is the policy object itself and not a frozen copy, so the log-ratio is always zero, the gradient never saturates and the policy drifts without restraint.",
    "pair_reward": "with pad equal to eos, the reward is read before the first eos, which is the end of the user's turn, so chosen and rejected get the same reward and nothing is learned.",
    "range_grpo": "prompts are expanded with repeat_interleave but the reference answers with repeat, so completions are graded against other prompts' answers and the reward is noise.",
    "sorted_moe": "expert outputs stay in expert-sorted order (no inverse permutation) before being added to the residual, so tokens receive other tokens' expert outputs.",
    "packed_notes": "packed rows reset positions but use a plain causal mask without the document boundary, so attention mixes several documents' headers and single documents are modelled badly.",
    "record_gpt2": "left-padded batches are given an attention mask but no position_ids, so absolute positions are shifted by the padding and do not match the real index.",
    "rotary_lm": "the rotary function expects (B, T, H, D) but gets (B, H, T, D), so tensors are rotated by head index and the model has no position information.",
    "padded_decoder": "when a padding mask is given it replaces the causal mask, so training attends to future tokens and real generation fails.",
    "mixture_accum": "zero_grad is called inside the micro-batch loop, so only the last micro-batch (the last data source) contributes to each update.",
    "epoch_linear": "num_training_steps is len(loader) without the number of epochs, so the learning rate is zero after the first epoch.",
    "half_finetune": "weights are held and updated in pure bfloat16 at a small learning rate, so most AdamW updates are rounded away.",
    "warm_start": "checkpoint keys carry the `_orig_mod.` prefix and load_state_dict(strict=False) skips them all, so the run starts from random weights.",
    "tool_tokens": "the vocabulary is extended (new tied embedding matrix) after the optimizer was built, so the optimizer still holds the old embedding parameter and the new one is never trained.",
    "dialect_head": "the classifier calls self.apply(_init_weights) on the whole model after the pre-trained backbone was attached, so the pre-trained weights are wiped and the few labelled examples train a random network.",
    "int4_qat": "fake quantisation uses round without a straight-through estimator, so all quantised weights get zero gradient and cannot adapt.",
}

PROOF_STEPS = {"warm_start": 100}
