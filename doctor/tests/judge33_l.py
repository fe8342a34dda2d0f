import contextlib
import copy
import functools
import math
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset, WeightedRandomSampler


# ---------------------------------------------------------------- shared bits

@contextlib.contextmanager
def held_out(*models):
    flags = [(m, m.training) for model in models for m in model.modules()]
    state = torch.get_rng_state()
    for model in models:
        model.eval()
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


def chain_table(vocab, seed, sharp=2.5):
    g = torch.Generator().manual_seed(seed)
    return torch.softmax(sharp * torch.randn(vocab, vocab, generator=g), -1)


def sample_chain(table, n, length, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(table.size(0), (n,), generator=g)
    cols = [x]
    for _ in range(length - 1):
        x = torch.multinomial(table[x], 1, generator=g).squeeze(1)
        cols.append(x)
    return torch.stack(cols, 1)


def next_token_nll(logits, ids):
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)).float(), ids[:, 1:].reshape(-1)).item()


def small_gpt2(vocab, width=48, layers=2, heads=4, positions=64, drop=0.0, **kw):
    from transformers import GPT2Config, GPT2LMHeadModel
    cfg = GPT2Config(vocab_size=vocab, n_embd=width, n_layer=layers, n_head=heads, n_positions=positions,
                     resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop, bos_token_id=0, eos_token_id=0, **kw)
    return GPT2LMHeadModel(cfg)


BASE_VOCAB = 40


@functools.lru_cache(maxsize=None)
def _base_weights():
    with torch.random.fork_rng():
        torch.manual_seed(77)
        model = small_gpt2(BASE_VOCAB)
        data = sample_chain(chain_table(BASE_VOCAB, 5), 1024, 24, 6)
        opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(160):
            b = data[torch.randint(len(data), (32,))]
            loss = model(input_ids=b, labels=b).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
    return {k: v.clone() for k, v in model.state_dict().items()}


def base_gpt2():
    model = small_gpt2(BASE_VOCAB)
    model.load_state_dict(_base_weights())
    return model


# ---------------------------------------------------------------- small decoder used below

class CharAttention(nn.Module):
    def __init__(self, width, heads, block):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block, block)))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q = q.view(B, T, self.heads, -1).transpose(1, 2)
        k = k.view(B, T, self.heads, -1).transpose(1, 2)
        v = v.view(B, T, self.heads, -1).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        att = att.masked_fill(self.tril[:T, :T] == 0, float("-inf")).softmax(-1)
        return self.proj((att @ v).transpose(1, 2).reshape(B, T, C))


class CharBlock(nn.Module):
    def __init__(self, width, heads, block):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CharAttention(width, heads, block)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class CharGPT(nn.Module):
    def __init__(self, vocab, block=32, width=48, layers=2, heads=4):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(block, width)
        self.blocks = nn.Sequential(*[CharBlock(width, heads, block) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, idx, targets=None):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        logits = self.head(self.ln_f(self.blocks(x)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


# ---------------------------------------------------------------- gpt2_windows

class PairWindows(Dataset):
    def __init__(self, stream, size):
        self.stream, self.size = stream, size

    def __len__(self):
        return (len(self.stream) - 1) // self.size

    def __getitem__(self, i):
        chunk = self.stream[i * self.size:(i + 1) * self.size + 1]
        return {"input_ids": chunk[:-1], "labels": chunk[1:]}


class Windows(PairWindows):
    def __getitem__(self, i):
        chunk = self.stream[i * self.size:(i + 1) * self.size]
        return {"input_ids": chunk, "labels": chunk.clone()}


def _gpt2_windows(dataset_class):
    torch.manual_seed(3)
    table = chain_table(32, 11)
    stream = sample_chain(table, 1, 16000, 1)[0]
    test = sample_chain(table, 64, 24, 2)
    model = small_gpt2(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    batches = forever(DataLoader(dataset_class(stream, 24), batch_size=24, shuffle=True, drop_last=True))

    def step():
        model.train()
        out = model(**next(batches))
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return out.loss.detach()

    def probe():
        with held_out(model):
            return next_token_nll(model(input_ids=test).logits, test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gpt2_windows_bad():
    return _gpt2_windows(PairWindows)


def gpt2_windows_good():
    return _gpt2_windows(Windows)


# ---------------------------------------------------------------- rope_decoder

def rotary(x, base=10000.0):
    n, d = x.shape[-2], x.shape[-1]
    freqs = base ** (-torch.arange(0, d, 2).float() / d)
    ang = torch.outer(torch.arange(n).float(), freqs)
    cos, sin = ang.cos(), ang.sin()
    a, b = x[..., : d // 2], x[..., d // 2:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class RotaryAttentionA(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.h, self.d = n_heads, dim // n_heads
        self.wq, self.wk = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wv, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q = rotary(self.wq(x).view(b, t, self.h, self.d))
        k = rotary(self.wk(x).view(b, t, self.h, self.d))
        v = self.wv(x).view(b, t, self.h, self.d)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(o.transpose(1, 2).reshape(b, t, c))


class RotaryAttentionB(RotaryAttentionA):
    def forward(self, x):
        b, t, c = x.shape
        q = rotary(self.wq(x).view(b, t, self.h, self.d).transpose(1, 2))
        k = rotary(self.wk(x).view(b, t, self.h, self.d).transpose(1, 2))
        v = self.wv(x).view(b, t, self.h, self.d).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(o.transpose(1, 2).reshape(b, t, c))


class RotaryDecoder(nn.Module):
    def __init__(self, vocab, dim, layers, attention):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(nn.ModuleDict({
                "n1": nn.RMSNorm(dim), "attn": attention(dim, 4), "n2": nn.RMSNorm(dim),
                "ff": nn.Sequential(nn.Linear(dim, 3 * dim), nn.SiLU(), nn.Linear(3 * dim, dim))}))
        self.norm = nn.RMSNorm(dim)
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for l in self.layers:
            x = x + l["attn"](l["n1"](x))
            x = x + l["ff"](l["n2"](x))
        return self.out(self.norm(x))


def _lag_sequences(n, length, vocab, lag, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(vocab, (n, length), generator=g)
    keep = torch.rand(n, length, generator=g) < 0.95
    for t in range(lag, length):
        x[:, t] = torch.where(keep[:, t], (x[:, t - lag] + 1) % vocab, x[:, t])
    return x


def _rope_decoder(attention):
    torch.manual_seed(8)
    data = _lag_sequences(4000, 24, 16, 2, 1)
    test = _lag_sequences(128, 24, 16, 2, 2)
    net = RotaryDecoder(16, 64, 2, attention)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.95))
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10))

    def step():
        batch = data[torch.randint(len(data), (32,))]
        logits = net(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        sched.step()
        return loss.item()

    def probe():
        with held_out(net):
            return next_token_nll(net(test), test)

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def rope_decoder_bad():
    return _rope_decoder(RotaryAttentionA)


def rope_decoder_good():
    return _rope_decoder(RotaryAttentionB)


# ---------------------------------------------------------------- binary_corpus

def _branching(n, vocab, seed):
    g = np.random.default_rng(seed)
    x, out = int(g.integers(vocab)), []
    for jump in g.integers(0, 3, size=n):
        out.append(x)
        x = (x * 7 + 13 + 101 * int(jump)) % vocab
    return out


def _binary_corpus(dtype):
    torch.manual_seed(21)
    vocab, block = 330, 24
    tokens = np.array(_branching(40000, vocab, 0))
    folder = tempfile.mkdtemp()
    tokens.astype(dtype).tofile(folder + "/train.bin")
    corpus = np.memmap(folder + "/train.bin", dtype=dtype, mode="r")
    val = torch.tensor(_branching(24 * 80, vocab, 1)).view(80, 24)

    model = CharGPT(vocab, block, width=48, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def get_batch(batch_size=32):
        ix = torch.randint(len(corpus) - block - 1, (batch_size,)).tolist()
        x = torch.stack([torch.from_numpy(corpus[i:i + block].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(corpus[i + 1:i + 1 + block].astype(np.int64)) for i in ix])
        return x, y

    def step():
        x, y = get_batch()
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def probe():
        with held_out(model):
            return next_token_nll(model(val)[0], val)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def binary_corpus_bad():
    return _binary_corpus(np.uint8)


def binary_corpus_good():
    return _binary_corpus(np.uint16)


# ---------------------------------------------------------------- tied_nano

class TiedLM(nn.Module):
    def __init__(self, vocab, width=64, layers=2, block=24, init=True):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(block, width)
        self.h = nn.ModuleList([CharBlock(width, 4, block) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if init:
            self.apply(self._init_weights)
        self.lm_head.weight = self.wte.weight

    def _init_weights(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)
            if getattr(m, "bias", None) is not None:
                nn.init.zeros_(m.bias)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.size(1)]
        for blk in self.h:
            x = blk(x)
        return self.lm_head(self.ln_f(x))


def _tied_nano(init):
    torch.manual_seed(50)
    table = chain_table(96, 4, sharp=3.0)
    train = sample_chain(table, 3000, 24, 1)
    test = sample_chain(table, 96, 24, 2)
    model = TiedLM(96, init=init)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    it = forever(DataLoader(TensorDataset(train), batch_size=32, shuffle=True))

    def step():
        (ids,) = next(it)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return next_token_nll(model(test), test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tied_nano_bad():
    return _tied_nano(init=False)


def tied_nano_good():
    return _tied_nano(init=True)


# ---------------------------------------------------------------- packed_docs

class PackedLM(nn.Module):
    def __init__(self, vocab, width=48, heads=4, layers=2, positions=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList([
            nn.TransformerEncoderLayer(width, heads, 3 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)])
        self.heads = heads
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, ids, positions, allowed):
        x = self.emb(ids) + self.pos(positions)
        blocked = ~allowed.repeat_interleave(self.heads, 0)
        for b in self.blocks:
            x = b(x, src_mask=blocked)
        return self.out(self.norm(x))


def _topic_docs(n, seed, topics=6, words=18):
    perms = torch.stack([torch.randperm(words, generator=torch.Generator().manual_seed(k)) for k in range(topics)])
    g = torch.Generator().manual_seed(seed)
    docs = []
    for _ in range(n):
        k = int(torch.randint(topics, (1,), generator=g))
        w = int(torch.randint(words, (1,), generator=g))
        doc = [words + k]
        for _ in range(int(torch.randint(5, 12, (1,), generator=g))):
            doc.append(w)
            w = int(perms[k, w])
        docs.append(doc)
    return docs


def _packed_docs(separate):
    torch.manual_seed(12)
    size = 64
    ids, pos, seg = [], [], []
    for n, doc in enumerate(_topic_docs(3000, 0)):
        ids += doc
        pos += range(len(doc))
        seg += [n] * len(doc)
    rows = len(ids) // size
    ids, pos, seg = (torch.tensor(v[: rows * size]).view(rows, size) for v in (ids, pos, seg))
    model = PackedLM(24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = forever(DataLoader(TensorDataset(ids, pos, seg), batch_size=12, shuffle=True))
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    test = [d for d in _topic_docs(400, 9) if len(d) >= 9]
    test = torch.tensor([d[:9] for d in test])

    def step():
        x, p, s = next(batches)
        allowed = causal.expand(len(x), -1, -1)
        if separate:
            allowed = allowed & (s[:, :, None] == s[:, None, :])
        logits = model(x, p, allowed)
        target = x[:, 1:].masked_fill(s[:, 1:] != s[:, :-1], -100)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            n, t = test.shape
            logits = model(test, torch.arange(t).expand(n, t), causal[:t, :t].expand(n, -1, -1))
            return F.cross_entropy(logits[:, 1:-1].flatten(0, 1), test[:, 2:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def packed_docs_bad():
    return _packed_docs(separate=False)


def packed_docs_good():
    return _packed_docs(separate=True)


# ---------------------------------------------------------------- source_rounds

class SourceRounds:
    """One optimizer step = one micro-batch from every source."""

    def __init__(self, clear_first):
        torch.manual_seed(4)
        self.clear_first = clear_first
        self.tables = [chain_table(30, s) for s in (100, 101, 102)]
        self.loaders = [
            forever(DataLoader(TensorDataset(self.tag(sample_chain(t, 1200, 20, 5 + k), k)), batch_size=12, shuffle=True))
            for k, t in enumerate(self.tables)]
        self.test = torch.cat([self.tag(sample_chain(t, 40, 20, 90 + k), k) for k, t in enumerate(self.tables)])
        self.model = small_gpt2(33)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    @staticmethod
    def tag(x, k):
        return torch.cat([torch.full((len(x), 1), 30 + k), x], 1)

    def train_step(self):
        total = 0.0
        if self.clear_first:
            self.optimizer.zero_grad()
        for loader in self.loaders:
            (ids,) = next(loader)
            if not self.clear_first:
                self.optimizer.zero_grad()
            loss = self.model(input_ids=ids, labels=ids).loss / len(self.loaders)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total

    def evaluate(self):
        with held_out(self.model):
            return next_token_nll(self.model(input_ids=self.test).logits, self.test)


def _source_rounds(clear_first):
    run = SourceRounds(clear_first)
    return {"model": run.model, "optimizer": run.optimizer, "steps": 20,
            "step": lambda: run.train_step(), "probe": lambda: run.evaluate()}


def source_rounds_bad():
    return _source_rounds(clear_first=False)


def source_rounds_good():
    return _source_rounds(clear_first=True)


# ---------------------------------------------------------------- llama_epochs

def _llama_epochs(total):
    from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup
    torch.manual_seed(60)
    epochs = 12
    table = chain_table(40, 9)
    loader = DataLoader(TensorDataset(sample_chain(table, 600, 32, 1)), batch_size=40, shuffle=True)
    test = sample_chain(table, 64, 32, 2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                         pad_token_id=None, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    num_training_steps = total(loader, epochs)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=num_training_steps)
    batches = forever(loader)

    def step():
        (ids,) = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with held_out(model):
            return next_token_nll(model(input_ids=test).logits, test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def llama_epochs_bad():
    return _llama_epochs(lambda loader, epochs: len(loader))


def llama_epochs_good():
    return _llama_epochs(lambda loader, epochs: len(loader) * epochs)


# ---------------------------------------------------------------- domain_mixture

class DomainSet(Dataset):
    def __init__(self, table, n, seed):
        self.rows = sample_chain(table, n, 20, seed)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def _domain_mixture(per_sample):
    torch.manual_seed(14)
    mix = [0.5, 0.3, 0.2]
    tables = [chain_table(32, s) for s in (41, 42, 43)]
    parts = [DomainSet(t, n, k) for k, (t, n) in enumerate(zip(tables, (900, 400, 250)))]
    if per_sample:
        weights = [w / len(p) for w, p in zip(mix, parts) for _ in range(len(p))]
    else:
        weights = mix
    data = ConcatDataset(parts)
    sampler = WeightedRandomSampler(weights, num_samples=len(data), replacement=True)
    batches = forever(DataLoader(data, batch_size=32, sampler=sampler))
    test = torch.cat([sample_chain(t, 40, 20, 70 + k) for k, t in enumerate(tables)])
    model = CharGPT(32, 20, width=48, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        ids = next(batches)
        _, loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return next_token_nll(model(test)[0], test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def domain_mixture_bad():
    return _domain_mixture(per_sample=False)


def domain_mixture_good():
    return _domain_mixture(per_sample=True)


# ---------------------------------------------------------------- chat_sft

EOS, USER, ASSISTANT = 0, 1, 2


class ChatSet(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.items = []
        for _ in range(n):
            count, word = int(rng.integers(1, 6)), int(rng.integers(10, 28))
            prompt = [USER, 3 + count, word, ASSISTANT]
            self.items.append((prompt, [word + 1] * count + [EOS]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate_chat_a(items, pad=EOS):
    width = max(len(p) + len(a) for p, a in items)
    ids = torch.full((len(items), width), pad)
    mask = torch.zeros(len(items), width, dtype=torch.long)
    labels = torch.full((len(items), width), -100)
    for i, (p, a) in enumerate(items):
        row = torch.tensor(p + a)
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
        labels[i, len(p):len(row)] = row[len(p):]
    labels[labels == pad] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def collate_chat_b(items, pad=EOS):
    width = max(len(p) + len(a) for p, a in items)
    ids = torch.full((len(items), width), pad)
    mask = torch.zeros(len(items), width, dtype=torch.long)
    labels = torch.full((len(items), width), -100)
    for i, (p, a) in enumerate(items):
        row = torch.tensor(p + a)
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
        labels[i, len(p):len(row)] = row[len(p):]
    labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _chat_sft(collate):
    from transformers import Qwen3Config, Qwen3ForCausalLM
    torch.manual_seed(70)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=32, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, head_dim=12,
                                         max_position_embeddings=64, pad_token_id=EOS, eos_token_id=EOS, bos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = forever(DataLoader(ChatSet(2000, 0), batch_size=24, shuffle=True, collate_fn=collate))
    tests = list(ChatSet(60, 1))

    def step():
        batch = next(batches)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        total = count = 0
        with held_out(model):
            for p, a in tests:
                ids = torch.tensor([p + a])
                lp = model(input_ids=ids).logits[0].log_softmax(-1)
                for j in range(len(p), len(p) + len(a)):
                    total -= lp[j - 1, ids[0, j]].item()
                    count += 1
        return total / count

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def chat_sft_bad():
    return _chat_sft(collate_chat_a)


def chat_sft_good():
    return _chat_sft(collate_chat_b)


# ---------------------------------------------------------------- qa_sft

def _qa_items(n, seed, low, high, vocab=24):
    rule = torch.randperm(vocab, generator=torch.Generator().manual_seed(404)).tolist()
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        ctx = rng.integers(0, vocab, size=rng.integers(low, high)).tolist()
        w, ans = ctx[-1], []
        for _ in range(5):
            w = rule[w]
            ans.append(w)
        out.append((ctx, ans + [vocab + 1]))
    return out


def encode_a(ctx, ans, max_len, sep=24):
    ids = (ctx + [sep] + ans)[:max_len]
    labels = ([-100] * (len(ctx) + 1) + ans)[:max_len]
    return ids, labels


def encode_b(ctx, ans, max_len, sep=24):
    room = max_len - len(ans) - 1
    ctx = ctx[-room:]
    return ctx + [sep] + ans, [-100] * (len(ctx) + 1) + ans


def _qa_sft(encode):
    torch.manual_seed(33)
    max_len, pad = 32, 26
    rows = [encode(c, a, max_len) for c, a in _qa_items(2000, 0, 12, 60)]
    ids = torch.tensor([i + [pad] * (max_len - len(i)) for i, _ in rows])
    labels = torch.tensor([l + [-100] * (max_len - len(l)) for _, l in rows])
    batches = forever(DataLoader(TensorDataset(ids, labels), batch_size=32, shuffle=True, drop_last=True))
    model = small_gpt2(27, positions=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    val = [encode_b(c, a, max_len) for c, a in _qa_items(200, 1, 30, 60)]
    vx, vy = torch.tensor([v[0] for v in val]), torch.tensor([v[1] for v in val])

    def step():
        x, y = next(batches)
        loss = model(input_ids=x, attention_mask=(x != pad).long(), labels=y).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            logits = model(input_ids=vx).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), vy[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def qa_sft_bad():
    return _qa_sft(encode_a)


def qa_sft_good():
    return _qa_sft(encode_b)


# ---------------------------------------------------------------- adapter_round_two

def _adapter_round_two(**load_args):
    from peft import LoraConfig, PeftModel, get_peft_model
    torch.manual_seed(17)
    table = chain_table(BASE_VOCAB, 55)
    data = sample_chain(table, 1500, 20, 1)
    test = sample_chain(table, 64, 20, 2)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_fc", "c_proj"], lora_dropout=0.0,
                        fan_in_fan_out=True, task_type="CAUSAL_LM")

    def one(model, optimizer):
        b = data[torch.randint(len(data), (24,))]
        loss = model(input_ids=b, labels=b).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    first = get_peft_model(base_gpt2(), config)
    opt = torch.optim.AdamW([p for p in first.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(10):
        one(first, opt)
    folder = tempfile.mkdtemp()
    first.save_pretrained(folder, save_embedding_layers=False)

    base = base_gpt2()
    base.enable_input_require_grads()
    model = PeftModel.from_pretrained(base, folder, **load_args)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def probe():
        with held_out(model):
            return next_token_nll(model(input_ids=test).logits, test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": lambda: one(model, optimizer), "probe": probe}


def adapter_round_two_bad():
    return _adapter_round_two()


def adapter_round_two_good():
    return _adapter_round_two(is_trainable=True)


# ---------------------------------------------------------------- role_tokens

def _role_tokens(train_new):
    from peft import LoraConfig, get_peft_model
    torch.manual_seed(27)
    new = 4
    base = base_gpt2()
    base.resize_token_embeddings(BASE_VOCAB + new)
    new_ids = list(range(BASE_VOCAB, BASE_VOCAB + new))
    extra = {"trainable_token_indices": {"wte": new_ids}} if train_new else {}
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_fc", "c_proj"],
                                            fan_in_fan_out=True, task_type="CAUSAL_LM", **extra))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

    def make(n, seed):
        rows = []
        for k in range(new):
            x = sample_chain(chain_table(12, 300 + k, sharp=4.0), n, 10, seed + k)
            rows.append(torch.cat([torch.full((n, 1), BASE_VOCAB + k), x, torch.full((n, 1), BASE_VOCAB + k)], 1))
        return torch.cat(rows)

    batches = forever(DataLoader(TensorDataset(make(400, 1)), batch_size=32, shuffle=True))
    test = make(30, 50)

    def step():
        model.train()
        (ids,) = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with held_out(model):
            return next_token_nll(model(input_ids=test).logits, test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def role_tokens_bad():
    return _role_tokens(train_new=False)


def role_tokens_good():
    return _role_tokens(train_new=True)


# ---------------------------------------------------------------- bert_mlm

MASK = 1


class MaskCollator:
    def __init__(self, prob=0.2):
        self.prob = prob

    def targets(self, input_ids):
        return input_ids

    def __call__(self, rows):
        input_ids = torch.stack(rows).clone()
        labels = self.targets(input_ids)
        chosen = torch.rand(input_ids.shape) < self.prob
        input_ids[chosen] = MASK
        labels = torch.where(chosen, labels, torch.full_like(labels, -100))
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}


class MaskCollatorB(MaskCollator):
    def targets(self, input_ids):
        return input_ids.clone()


def _bert_mlm(collator):
    from transformers import BertConfig, BertForMaskedLM
    torch.manual_seed(90)
    table = chain_table(28, 3, sharp=3.0)
    train = [r + 2 for r in sample_chain(table, 2000, 20, 1)]
    test = sample_chain(table, 100, 20, 2) + 2
    hide = torch.rand(test.shape, generator=torch.Generator().manual_seed(5)) < 0.2
    model = BertForMaskedLM(BertConfig(vocab_size=30, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                                       intermediate_size=96, max_position_embeddings=32, pad_token_id=0,
                                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = forever(DataLoader(train, batch_size=32, shuffle=True, collate_fn=collator))

    def step():
        out = model(**next(batches))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        return out.loss.item()

    def probe():
        with held_out(model):
            logits = model(input_ids=test.masked_fill(hide, MASK), attention_mask=torch.ones_like(test)).logits
            return F.cross_entropy(logits[hide], test[hide]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bert_mlm_bad():
    return _bert_mlm(MaskCollator())


def bert_mlm_good():
    return _bert_mlm(MaskCollatorB())


# ---------------------------------------------------------------- t5_rewrite

def _t5_rewrite(forward):
    from transformers import T5Config, T5ForConditionalGeneration
    torch.manual_seed(44)
    table = chain_table(20, 8, sharp=3.0)

    def make(n, seed):
        g = torch.Generator().manual_seed(seed)
        src = torch.randint(2, 22, (n, 1), generator=g).repeat(1, 4)
        src[:, 1:] = torch.randint(2, 22, (n, 3), generator=g)
        tgt = sample_chain(table, n, 8, seed) + 2
        src[:, 0] = tgt[:, 0]
        return src, torch.cat([tgt, torch.ones(n, 1, dtype=torch.long)], 1)

    model = T5ForConditionalGeneration(T5Config(vocab_size=24, d_model=48, d_kv=12, d_ff=96, num_layers=1, num_heads=4,
                                                dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = forever(DataLoader(TensorDataset(*make(2000, 0)), batch_size=32, shuffle=True))
    vx, vy = make(100, 1)

    def step():
        src, tgt = next(batches)
        loss = forward(model, src, tgt).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            start = torch.cat([torch.zeros(len(vy), 1, dtype=torch.long), vy[:, :-1]], 1)
            logits = model(input_ids=vx, decoder_input_ids=start).logits
            return F.cross_entropy(logits.flatten(0, 1), vy.flatten()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def t5_rewrite_bad():
    return _t5_rewrite(lambda m, src, tgt: m(input_ids=src, decoder_input_ids=tgt, labels=tgt))


def t5_rewrite_good():
    return _t5_rewrite(lambda m, src, tgt: m(input_ids=src, labels=tgt))


# ---------------------------------------------------------------- gpt_sentiment

class GPTClassifier(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        from transformers import GPT2Config, GPT2Model
        self.body = GPT2Model(GPT2Config(vocab_size=40, n_embd=48, n_layer=2, n_head=4, n_positions=32,
                                         resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
        self.score = nn.Linear(48, classes)

    def pool(self, hidden, attention_mask):
        return hidden[:, 0]

    def forward(self, input_ids, attention_mask):
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.score(self.pool(hidden, attention_mask))


class GPTClassifierB(GPTClassifier):
    def pool(self, hidden, attention_mask):
        last = attention_mask.sum(1) - 1
        return hidden[torch.arange(len(hidden)), last]


def _reviews(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    ids = torch.zeros(n, 20, dtype=torch.long)
    mask = torch.zeros(n, 20, dtype=torch.long)
    for i in range(n):
        length = int(torch.randint(8, 20, (1,), generator=g))
        words = torch.randint(10, 40, (length,), generator=g)
        hot = torch.rand(length, generator=g) < 0.25
        words[hot] = 1 + 3 * y[i] + torch.randint(3, (int(hot.sum()),), generator=g)
        ids[i, 1:length + 1] = words
        mask[i, :length + 1] = 1
    return ids, mask, y


def _gpt_sentiment(cls):
    torch.manual_seed(66)
    model = cls()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = forever(DataLoader(TensorDataset(*_reviews(1500, 0)), batch_size=32, shuffle=True))
    tx, tm, ty = _reviews(200, 1)

    def step():
        x, m, y = next(batches)
        loss = F.cross_entropy(model(x, m), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(tx, tm), ty).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gpt_sentiment_bad():
    return _gpt_sentiment(GPTClassifier)


def gpt_sentiment_good():
    return _gpt_sentiment(GPTClassifierB)


# ---------------------------------------------------------------- pair_embedder

class SentenceEncoder(nn.Module):
    def __init__(self, vocab=120, width=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.proj = nn.Linear(width, 32)

    def forward(self, ids):
        return F.normalize(self.proj(self.layer(self.emb(ids)).mean(1)), dim=-1)


def _paraphrases(n, seed):
    g = torch.Generator().manual_seed(seed)
    meaning = torch.randint(40, (n, 3), generator=g)

    def say():
        words = meaning * 2 + torch.randint(2, meaning.shape, generator=g)
        noise = torch.randint(80, 120, (n, 5), generator=g)
        both = torch.cat([words, noise], 1)
        return both.gather(1, torch.rand(both.shape, generator=g).argsort(1))

    return say(), say()


def _pair_embedder(scores):
    torch.manual_seed(29)
    model = SentenceEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = forever(DataLoader(TensorDataset(*_paraphrases(3000, 0)), batch_size=48, shuffle=True, drop_last=True))
    qa, qb = _paraphrases(300, 1)

    def step():
        a, b = next(batches)
        sim = scores(model(a) @ model(b).T, 0.05)
        target = torch.arange(len(a))
        loss = (F.cross_entropy(sim, target) + F.cross_entropy(sim.T, target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            sim = model(qa) @ model(qb).T
            rank = (sim > sim.diag()[:, None]).sum(1) + 1
            return 1.0 - (1.0 / rank).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pair_embedder_bad():
    return _pair_embedder(lambda cos, temperature: cos * temperature)


def pair_embedder_good():
    return _pair_embedder(lambda cos, temperature: cos / temperature)


# ---------------------------------------------------------------- teacher_student

def _teacher_student(kd):
    torch.manual_seed(35)
    teacher = base_gpt2().eval().requires_grad_(False)
    student = small_gpt2(BASE_VOCAB, width=32, layers=1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    table = chain_table(BASE_VOCAB, 5)
    batches = forever(DataLoader(TensorDataset(sample_chain(table, 1500, 20, 8)), batch_size=24, shuffle=True))
    test = sample_chain(table, 64, 20, 9)
    T = 2.0

    def step():
        (ids,) = next(batches)
        with torch.no_grad():
            t_logits = teacher(input_ids=ids).logits
        s_logits = student(input_ids=ids).logits
        loss = kd(s_logits.flatten(0, 1), t_logits.flatten(0, 1), T)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(student):
            return next_token_nll(student(input_ids=test).logits, test)

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def _kd_a(s, t, T):
    return F.kl_div(F.softmax(s / T, -1), F.softmax(t / T, -1), reduction="batchmean") * T * T


def _kd_b(s, t, T):
    return F.kl_div(F.log_softmax(s / T, -1), F.softmax(t / T, -1), reduction="batchmean") * T * T


def teacher_student_bad():
    return _teacher_student(_kd_a)


def teacher_student_good():
    return _teacher_student(_kd_b)


# ---------------------------------------------------------------- dpo_pairs

def sequence_logp(model, ids, start):
    logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    picked = logp.gather(2, ids[:, 1:, None]).squeeze(2)
    return picked[:, start - 1:].sum(1)


def _preference_batch(n, g, start=4):
    table = chain_table(BASE_VOCAB, 5)
    other = torch.softmax(torch.log(table) * 0.6, -1)
    seed = int(torch.randint(1 << 30, (1,), generator=g))
    prompt = sample_chain(table, n, start, seed)

    def go(tab):
        x, cols = prompt[:, -1], []
        for _ in range(8):
            x = torch.multinomial(tab[x], 1, generator=g).squeeze(1)
            cols.append(x)
        return torch.cat([prompt, torch.stack(cols, 1)], 1)

    even = table.clone()
    even[:, ::2] *= 3
    odd = table.clone()
    odd[:, 1::2] *= 3
    better, worse = go(even / even.sum(1, keepdim=True)), go(odd / odd.sum(1, keepdim=True))
    flip = (torch.rand(n, generator=g) < 0.25)[:, None]
    return torch.where(flip, worse, better), torch.where(flip, better, worse)


def _dpo_pairs(make_reference, beta=0.2):
    torch.manual_seed(53)
    policy = base_gpt2()
    start_copy = copy.deepcopy(policy).eval()
    reference = make_reference(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(2)
    test = _preference_batch(256, torch.Generator().manual_seed(3))

    def margin(ref, chosen, rejected):
        with torch.no_grad():
            ref_c, ref_r = sequence_logp(ref, chosen, 4), sequence_logp(ref, rejected, 4)
        pol_c, pol_r = sequence_logp(policy, chosen, 4), sequence_logp(policy, rejected, 4)
        return beta * ((pol_c - ref_c) - (pol_r - ref_r))

    def step():
        chosen, rejected = _preference_batch(24, g)
        loss = -F.logsigmoid(margin(reference, chosen, rejected)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(policy):
            return -F.logsigmoid(margin(start_copy, *test)).mean().item()

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dpo_pairs_bad():
    return _dpo_pairs(lambda policy: policy)


def dpo_pairs_good():
    return _dpo_pairs(lambda policy: copy.deepcopy(policy).eval().requires_grad_(False))


# ---------------------------------------------------------------- reward_pairs

class RewardModel(nn.Module):
    pad_id = 0

    def __init__(self):
        super().__init__()
        from transformers import LlamaConfig, LlamaModel
        self.backbone = LlamaModel(LlamaConfig(vocab_size=32, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                               num_attention_heads=4, max_position_embeddings=64, pad_token_id=None,
                                               bos_token_id=None, eos_token_id=0))
        self.v_head = nn.Linear(48, 1, bias=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        values = self.v_head(hidden).squeeze(-1)
        return values.gather(1, self.end_index(input_ids, attention_mask)[:, None]).squeeze(1)

    def end_index(self, input_ids, attention_mask):
        return (input_ids == self.pad_id).int().argmax(-1) - 1


class RewardModelB(RewardModel):
    def end_index(self, input_ids, attention_mask):
        return attention_mask.sum(1) - 1


def _dialogues(n, seed):
    g = torch.Generator().manual_seed(seed)

    def one(turn, good):
        reply = torch.randint(1, 32, (int(torch.randint(4, 9, (1,), generator=g)),), generator=g)
        bias = torch.rand(len(reply), generator=g) < 0.4
        reply[bias] = torch.randint(1, 6, (int(bias.sum()),), generator=g) + (0 if good else 6)
        return torch.cat([turn, torch.tensor([0]), reply, torch.tensor([0])])

    out = []
    for _ in range(n):
        turn = torch.randint(1, 32, (int(torch.randint(4, 8, (1,), generator=g)),), generator=g)
        out.append((one(turn, True), one(turn, False)))
    return out


def _pad_pairs(pairs):
    rows = [c for c, _ in pairs] + [r for _, r in pairs]
    lengths = torch.tensor([len(r) for r in rows])
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=RewardModel.pad_id)
    mask = (torch.arange(ids.size(1))[None] < lengths[:, None]).long()
    return ids, mask


def _reward_pairs(cls):
    torch.manual_seed(91)
    model = cls()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = forever(DataLoader(_dialogues(1500, 0), batch_size=16, shuffle=True, collate_fn=_pad_pairs))
    test = _pad_pairs(_dialogues(150, 1))

    def pair_loss(ids, mask):
        chosen, rejected = model(ids, mask).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    def step():
        loss = pair_loss(*next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return pair_loss(*test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def reward_pairs_bad():
    return _reward_pairs(RewardModel)


def reward_pairs_good():
    return _reward_pairs(RewardModelB)


# ---------------------------------------------------------------- grpo_answers

def _grpo_answers(repeat):
    torch.manual_seed(101)
    n_prompts, group, answer, words = 8, 8, 3, 12
    g = torch.Generator().manual_seed(6)
    wanted = torch.randint(words, (24, answer), generator=g)
    generosity = 4.0 * torch.randn(24, generator=g)
    policy = CharGPT(words + 24, 8, width=48, layers=1)
    nn.init.zeros_(policy.head.weight)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)

    def judge(prompt, tokens):
        hit = (tokens == wanted[prompt]).float().mean(1)
        return hit + generosity[prompt]

    def step():
        prompts = torch.randperm(24)[:n_prompts]
        prompts = repeat(prompts, group)
        ids = prompts[:, None] + words
        with torch.no_grad():
            for _ in range(answer):
                logits = policy(ids)[0][:, -1, :words]
                ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
        rewards = judge(prompts, ids[:, 1:])
        grouped = rewards.view(n_prompts, group)
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1)
        logp = policy(ids[:, :-1])[0][..., :words].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio = torch.exp(logp - logp.detach())
        loss = -(ratio * advantages[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(policy):
            ids = torch.arange(24)[:, None] + words
            miss = 0.0
            for j in range(answer):
                p = policy(torch.cat([ids, wanted[:, :j]], 1))[0][:, -1, :words].softmax(-1)
                miss += 1.0 - p.gather(1, wanted[:, j:j + 1]).mean().item()
            return miss / answer

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def grpo_answers_bad():
    return _grpo_answers(lambda p, k: p.repeat(k))


def grpo_answers_good():
    return _grpo_answers(lambda p, k: p.repeat_interleave(k))


# ---------------------------------------------------------------- moe_lm

class MoE(nn.Module):
    def __init__(self, width, hidden, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(experts)])

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        gate, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=len(self.experts)).tolist()
        parts = flat[order].split(counts)
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        return (self.restore(done, order) * gate[:, None]).view_as(x)

    def restore(self, rows, order):
        return rows[order]


class MoEB(MoE):
    def restore(self, rows, order):
        return rows[order.argsort()]


class MoELM(nn.Module):
    def __init__(self, vocab, groups, moe, width=24):
        super().__init__()
        self.word, self.group = nn.Embedding(vocab, width), nn.Embedding(groups, width)
        self.norm, self.moe = nn.LayerNorm(width), moe(width, 32, 4)
        self.out_norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, x, k):
        h = self.word(x) + self.group(k)[:, None]
        h = h + self.moe(self.norm(h))
        return self.head(self.out_norm(h))


def _moe_lm(moe):
    torch.manual_seed(111)
    vocab, groups = 24, 6
    tables = [chain_table(vocab, 500 + k, sharp=5.0) for k in range(groups)]

    def make(n, seed):
        x = torch.cat([sample_chain(t, n, 16, seed + k) for k, t in enumerate(tables)])
        return x, torch.arange(groups).repeat_interleave(n)

    model = MoELM(vocab, groups, moe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    batches = forever(DataLoader(TensorDataset(*make(500, 0)), batch_size=48, shuffle=True))
    tx, tk = make(40, 40)

    def step():
        x, k = next(batches)
        loss = F.cross_entropy(model(x[:, :-1], k).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return next_token_nll(model(tx, tk), tx)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def moe_lm_bad():
    return _moe_lm(MoE)


def moe_lm_good():
    return _moe_lm(MoEB)


# ---------------------------------------------------------------- small_finetune

def _small_finetune(pure):
    torch.manual_seed(121)
    model = base_gpt2()
    if pure:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    table = chain_table(BASE_VOCAB, 5)
    table = table[torch.randperm(BASE_VOCAB, generator=torch.Generator().manual_seed(1))]
    batches = forever(DataLoader(TensorDataset(sample_chain(table, 1500, 20, 1)), batch_size=24, shuffle=True))
    test = sample_chain(table, 64, 20, 2)

    def step():
        (ids,) = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not pure):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return next_token_nll(model(input_ids=test).logits, test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def small_finetune_bad():
    return _small_finetune(pure=True)


def small_finetune_good():
    return _small_finetune(pure=False)


# ---------------------------------------------------------------- continue_pretrain

def _continue_pretrain(clean):
    torch.manual_seed(131)
    checkpoint = {"model": {"_orig_mod." + k: v for k, v in _base_weights().items()}, "iter_num": 160}
    model = small_gpt2(BASE_VOCAB)
    state_dict = checkpoint["model"]
    if clean:
        state_dict = {k.removeprefix("_orig_mod."): v for k, v in state_dict.items()}
    model.load_state_dict(state_dict, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    table = chain_table(BASE_VOCAB, 5)
    batches = forever(DataLoader(TensorDataset(sample_chain(table, 600, 20, 31)), batch_size=16, shuffle=True))
    test = sample_chain(table, 64, 20, 32)

    def step():
        model.train()
        (ids,) = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return next_token_nll(model(input_ids=test).logits, test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def continue_pretrain_bad():
    return _continue_pretrain(clean=False)


def continue_pretrain_good():
    return _continue_pretrain(clean=True)


# ---------------------------------------------------------------- int4_lm

class QuantLinear(nn.Linear):
    bits = 4

    def quantized(self):
        top = 2 ** (self.bits - 1) - 1
        scale = self.weight.detach().abs().amax(1, keepdim=True) / top
        return torch.clamp(torch.round(self.weight / scale), -top, top) * scale

    def forward(self, x):
        return F.linear(x, self.quantized(), self.bias)


class QuantLinearB(QuantLinear):
    def forward(self, x):
        w = self.weight + (self.quantized() - self.weight).detach()
        return F.linear(x, w, self.bias)


def _swap_linears(module, cls):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            new = cls(child.in_features, child.out_features, bias=child.bias is not None)
            new.load_state_dict(child.state_dict())
            setattr(module, name, new)
        else:
            _swap_linears(child, cls)


def _int4_lm(cls):
    torch.manual_seed(141)
    model = CharGPT(32, 20, width=48, layers=2)
    _swap_linears(model, cls)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    table = chain_table(32, 61, sharp=3.5)
    batches = forever(DataLoader(TensorDataset(sample_chain(table, 1500, 20, 1)), batch_size=24, shuffle=True))
    test = sample_chain(table, 64, 20, 2)

    def step():
        (ids,) = next(batches)
        _, loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return next_token_nll(model(test)[0], test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def int4_lm_bad():
    return _int4_lm(QuantLinear)


def int4_lm_good():
    return _int4_lm(QuantLinearB)


CASES = {
    "gpt2_windows": "labels are already shifted by the dataset and the HF model shifts them again, so the model learns to predict the token two ahead and next-token NLL is bad",
    "rope_decoder": "rotary embedding is applied to (B,T,H,D) before the transpose, so it rotates by head index and not by position: the model has no relative positions",
    "binary_corpus": "token ids of a 330-word vocabulary are stored as uint8 and wrap around modulo 256, so the upper ids are never trained and others are corrupted",
    "tied_nano": "the embedding tied to the output head keeps nn.Embedding's N(0,1) init, giving huge initial logits/loss and slow, poor learning",
    "packed_docs": "documents packed in one row (positions reset) attend across document boundaries because the block-diagonal mask is missing, so the model trains on contaminated context",
    "source_rounds": "zero_grad is called inside the micro-batch loop of gradient accumulation, so only the last source's gradient is ever applied and the other sources aren't learned",
    "llama_epochs": "the linear schedule is given the number of steps of one epoch while training lasts 12, so the learning rate hits zero after the first epoch (15 steps) and learning stops",
    "domain_mixture": "WeightedRandomSampler gets one weight per domain rather than per sample, so only the first three rows of the data are ever drawn and the model memorises them",
    "chat_sft": "pad token equals EOS and labels equal to pad are set to -100, so the closing EOS of every answer is never trained and the model doesn't learn to stop",
    "qa_sft": "prompt+answer is truncated at the tail to max_len, so long prompts lose their answers (all labels -100) and answers at late positions/end tokens aren't learned",
    "adapter_round_two": "the LoRA adapter is resumed with PeftModel.from_pretrained without is_trainable=True, so all its weights are frozen and nothing trains",
    "role_tokens": "new special tokens are added to the vocabulary but their embedding rows stay frozen under LoRA (no modules_to_save/trainable tokens), so they stay near-identical and cannot be told apart or produced",
    "bert_mlm": "MLM labels alias input_ids (no clone) and are overwritten with the mask token, so the model learns to predict [MASK] at masked places",
    "t5_rewrite": "the target is passed unshifted as decoder_input_ids as well as labels, so the decoder learns to copy its input rather than predict the next token",
    "gpt_sentiment": "a causal GPT classifier pools position 0 (as with BERT's CLS), which sees only the BOS token, so the classifier can't see the text",
    "pair_embedder": "cosine similarities are multiplied by the temperature 0.05 and not divided by it, so the contrastive softmax is nearly flat and gives hardly any discrimination",
    "teacher_student": "F.kl_div gets softmax rather than log_softmax for the student, so the distillation loss is wrong and the student becomes a miscalibrated mode seeker",
    "dpo_pairs": "the DPO reference is the policy itself (no copy), so log-ratios are always zero, loss stays at ln 2 and the policy drifts without any anchor",
    "reward_pairs": "the reward is read before the first pad token while pad equals EOS, which also ends the user turn, so both replies are scored at the end of the shared prompt",
    "grpo_answers": "prompts are tiled with repeat(G) while rewards are viewed as (prompts, G), so group baselines mix different prompts and advantages reflect prompt difficulty",
    "moe_lm": "tokens are sorted by expert before dispatch and put back with rows[order] rather than the inverse permutation, so each token gets another token's expert output",
    "small_finetune": "the weights themselves are bf16 while fine-tuning with a small learning rate, so most updates round away and the model hardly learns",
    "continue_pretrain": "a checkpoint of a compiled model (keys with _orig_mod. prefix) is loaded with strict=False, so no weight is loaded and training starts from scratch",
    "int4_lm": "fake quantisation uses round() without a straight-through estimator, so the quantised linear weights get zero gradient and don't train",
}

PROOF_STEPS = {"tied_nano": 120, "llama_epochs": 180, "small_finetune": 300, "continue_pretrain": 120, "rope_decoder": 150}
