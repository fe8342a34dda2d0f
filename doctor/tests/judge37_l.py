import contextlib
import copy
import functools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    get_linear_schedule_with_warmup,
)


# --------------------------------------------------------------------------
# data
# --------------------------------------------------------------------------

def _gen(seed):
    return torch.Generator().manual_seed(seed)


def _table(vocab, seed, sharpness=3.0):
    """Transition matrix of a Markov source."""
    return torch.softmax(torch.randn(vocab, vocab, generator=_gen(seed)) * sharpness, dim=-1)


def _chain(table, n, length, seed, lag=1):
    """n sequences in which token t depends on token t - lag."""
    g = _gen(seed)
    vocab = table.size(0)
    cols = [torch.randint(vocab, (n,), generator=g) for _ in range(lag)]
    while len(cols) < length:
        cols.append(torch.multinomial(table[cols[-lag]], 1, generator=g).squeeze(1))
    return torch.stack(cols[:length], dim=1)


def _loader(dataset, batch_size, seed, shuffle=True):
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, drop_last=shuffle,
                      generator=_gen(seed))


def _cycle(loader):
    while True:
        yield from loader


@contextlib.contextmanager
def _evaluating(*models):
    flags = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, flag in flags:
            m.training = flag


def _next_token_nll(logits, ids, mask=None):
    nll = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none")
    if mask is None:
        return nll.mean()
    mask = mask[:, 1:].float()
    return (nll * mask).sum() / mask.sum()


def _pretrain(model, ids, steps, lr=2e-3, batch_size=32, seed=0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    batches = _cycle(_loader(TensorDataset(ids), batch_size, seed))
    model.train()
    for _ in range(steps):
        (x,) = next(batches)
        loss = model(input_ids=x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


# --------------------------------------------------------------------------
# models
# --------------------------------------------------------------------------

def _gpt2(vocab, d=64, layers=2, heads=4, positions=64, dropout=0.1, **kw):
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=vocab, n_embd=d, n_layer=layers, n_head=heads, n_positions=positions,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        bos_token_id=0, eos_token_id=0, **kw))


def _llama_config(vocab, d=64, layers=2, heads=4, **kw):
    return LlamaConfig(
        vocab_size=vocab, hidden_size=d, intermediate_size=2 * d, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **kw)


def _qwen2(vocab, d=64, layers=2, heads=4, **kw):
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocab, hidden_size=d, intermediate_size=2 * d, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **kw))


class CausalSelfAttention(nn.Module):
    def __init__(self, d, heads, dropout=0.0, causal=True, linear=nn.Linear):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.causal = causal
        self.c_attn = linear(d, 3 * d)
        self.c_proj = linear(d, d)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, d, dropout=0.0, linear=nn.Linear, hidden=None):
        super().__init__()
        hidden = hidden or 4 * d
        self.c_fc = linear(d, hidden)
        self.c_proj = linear(hidden, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, d, attn, mlp):
        super().__init__()
        self.ln_1 = nn.LayerNorm(d)
        self.attn = attn
        self.ln_2 = nn.LayerNorm(d)
        self.mlp = mlp

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab, block_size, d=64, heads=4, layers=2, dropout=0.0, causal=True,
                 linear=nn.Linear, make_mlp=None, tie_weights=True):
        super().__init__()
        if make_mlp is None:
            make_mlp = functools.partial(MLP, d, dropout, linear)
        self.wte = nn.Embedding(vocab, d)
        self.wpe = nn.Embedding(block_size, d)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(
            Block(d, CausalSelfAttention(d, heads, dropout, causal, linear), make_mlp())
            for _ in range(layers))
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.apply(self._init_weights)
        if tie_weights:
            self.lm_head.weight = self.wte.weight

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def _decay_groups(model, weight_decay):
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


# --------------------------------------------------------------------------
# 1. GPT-2 pretraining
# --------------------------------------------------------------------------

class _ChunkDataset(Dataset):
    def __init__(self, ids, pre_shift):
        self.ids = ids
        self.pre_shift = pre_shift

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        chunk = self.ids[i]
        labels = chunk[1:] if self.pre_shift else chunk[:-1]
        return {"input_ids": chunk[:-1], "labels": labels}


def _gpt2_labels_shifted_twice(bad):
    table = _table(40, 101)
    train, held = _chain(table, 2048, 33, 102), _chain(table, 256, 33, 103)
    torch.manual_seed(1)
    model = _gpt2(40)
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.01), lr=1e-3)
    batches = _cycle(_loader(_ChunkDataset(train, pre_shift=bad), 16, 104))
    model.train()

    def step(i):
        batch = next(batches)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            return _next_token_nll(model(input_ids=held).logits, held).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 2. nanoGPT attention
# --------------------------------------------------------------------------

def _nanogpt_attention_sees_future(bad):
    table = _table(32, 201)
    train, held = _chain(table, 2048, 33, 202), _chain(table, 256, 33, 203)
    torch.manual_seed(2)
    model = GPT(32, 32, dropout=0.1, causal=not bad)
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95))
    batches = _cycle(_loader(TensorDataset(train), 16, 204))
    model.train()

    def step(i):
        (chunk,) = next(batches)
        _, loss = model(chunk[:, :-1], chunk[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            losses = []
            for n in (4, 8, 16, 24, 32):
                logits, _ = model(held[:, :n])
                losses.append(F.cross_entropy(logits[:, -1], held[:, n]))
            return torch.stack(losses).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 3. Llama on a mixture of domains, one micro-batch per domain
# --------------------------------------------------------------------------

def _domain_accumulation_zeroed_inside(bad):
    n_domains, vocab = 4, 24

    def domain_ids(k, n, seed):
        body = _chain(_table(vocab, 300 + k), n, 24, seed)
        return torch.cat([torch.full((n, 1), vocab + k), body], dim=1)

    trains = [domain_ids(k, 1024, 310 + k) for k in range(n_domains)]
    helds = [domain_ids(k, 64, 320 + k) for k in range(n_domains)]
    torch.manual_seed(3)
    model = LlamaForCausalLM(_llama_config(vocab + n_domains))
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.01), lr=1e-3)
    streams = [_cycle(_loader(TensorDataset(t), 8, 330 + k)) for k, t in enumerate(trains)]
    model.train()

    def step(i):
        if not bad:
            optimizer.zero_grad()
        for stream in streams:
            if bad:
                optimizer.zero_grad()
            (ids,) = next(stream)
            loss = model(input_ids=ids, labels=ids).loss / len(streams)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            losses = [_next_token_nll(model(input_ids=h).logits, h) for h in helds]
            return torch.stack(losses).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 4. fp16 with a gradient scaler
# --------------------------------------------------------------------------

def _fp16_clip_on_scaled_gradients(bad):
    table = _table(32, 401)
    train, held = _chain(table, 2048, 25, 402), _chain(table, 256, 25, 403)
    torch.manual_seed(4)
    model = GPT(32, 32, d=48)
    optimizer = torch.optim.SGD(_decay_groups(model, 1e-4), lr=0.2, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
    batches = _cycle(_loader(TensorDataset(train), 8, 404))
    model.train()

    def step(i):
        (chunk,) = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            _, loss = model(chunk[:, :-1], chunk[:, 1:])
        scaler.scale(loss).backward()
        if not bad:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    def probe():
        with _evaluating(model):
            _, loss = model(held[:, :-1], held[:, 1:])
            return loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 5. LSTM language model with SGD and tight clipping
# --------------------------------------------------------------------------

class _LSTMLanguageModel(nn.Module):
    def __init__(self, vocab, d=64, layers=2, dropout=0.2):
        super().__init__()
        self.encoder = nn.Embedding(vocab, d)
        self.rnn = nn.LSTM(d, d, layers, dropout=dropout)
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(d, vocab)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x, hidden=None):
        out, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return self.decoder(self.drop(out)), hidden


def _lstm_clip_exhausted_iterator(bad):
    vocab, bptt = 32, 24
    table = _table(vocab, 501)
    stream = _chain(table, 16, 24 * 200 + 1, 502).t().contiguous()
    held = _chain(table, 64, 65, 503).t().contiguous()
    torch.manual_seed(5)
    model = _LSTMLanguageModel(vocab)
    params = filter(lambda p: p.requires_grad, model.parameters())
    if not bad:
        params = list(params)
    optimizer = torch.optim.SGD(params, lr=20.0)
    state = {"hidden": None, "pos": 0}
    model.train()

    def step(i):
        if state["pos"] + bptt + 1 > stream.size(0):
            state["pos"], state["hidden"] = 0, None
        x = stream[state["pos"]:state["pos"] + bptt]
        y = stream[state["pos"] + 1:state["pos"] + bptt + 1]
        state["pos"] += bptt
        hidden = state["hidden"]
        if hidden is not None:
            hidden = tuple(h.detach() for h in hidden)
        logits, state["hidden"] = model(x, hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.25)
        optimizer.step()

    def probe():
        with _evaluating(model):
            logits, _ = model(held[:-1])
            return F.cross_entropy(logits.flatten(0, 1), held[1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 6. Qwen2 with accumulation and a linear schedule
# --------------------------------------------------------------------------

def _schedule_steps_per_micro_batch(bad):
    accum, total_updates = 8, 100
    table = _table(48, 601)
    train, held = _chain(table, 2048, 24, 602), _chain(table, 256, 24, 603)
    torch.manual_seed(6)
    model = _qwen2(48)
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.01), lr=2e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 5, total_updates)
    batches = _cycle(_loader(TensorDataset(train), 4, 604))
    model.train()

    def step(i):
        optimizer.zero_grad()
        for _ in range(accum):
            (ids,) = next(batches)
            loss = model(input_ids=ids, labels=ids).loss / accum
            loss.backward()
            if bad:
                scheduler.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not bad:
            scheduler.step()

    def probe():
        with _evaluating(model):
            return _next_token_nll(model(input_ids=held).logits, held).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 7. small corpus, dropout, validation every few steps
# --------------------------------------------------------------------------

def _validation_leaves_eval_mode(bad):
    table = _table(32, 701, sharpness=2.0)
    train, val = _chain(table, 96, 33, 702), _chain(table, 32, 33, 703)
    held = _chain(table, 256, 33, 704)
    torch.manual_seed(7)
    model = GPT(32, 32, d=64, dropout=0.3)
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95))
    batches = _cycle(_loader(TensorDataset(train), 16, 705))
    history = []
    model.train()

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        _, loss = model(val[:, :-1], val[:, 1:])
        if not bad:
            model.train()
        return loss.item()

    def step(i):
        (chunk,) = next(batches)
        _, loss = model(chunk[:, :-1], chunk[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (i + 1) % 5 == 0:
            history.append(estimate_loss())

    def probe():
        with _evaluating(model):
            _, loss = model(held[:, :-1], held[:, 1:])
            return loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 8. fine-tuning in bfloat16
# --------------------------------------------------------------------------

def _mistral(vocab):
    return MistralForCausalLM(MistralConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        sliding_window=None, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        initializer_range=0.125))


@functools.lru_cache(maxsize=None)
def _mistral_base():
    torch.manual_seed(800)
    return _pretrain(_mistral(32), _chain(_table(32, 801), 2048, 24, 802), 200, seed=803)


def _bf16_weights_without_master_copy(bad):
    base = _mistral_base()
    table = _table(32, 804)
    train, held = _chain(table, 2048, 24, 805), _chain(table, 256, 24, 806)
    torch.manual_seed(8)
    model = _mistral(32)
    model.load_state_dict(base)
    if bad:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    batches = _cycle(_loader(TensorDataset(train), 16, 807))
    model.train()

    def step(i):
        (ids,) = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model), torch.autocast("cpu", dtype=torch.bfloat16):
            return _next_token_nll(model(input_ids=held).logits, held).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 9. masked language modelling
# --------------------------------------------------------------------------

def _bert_config(vocab, **kw):
    return BertConfig(vocab_size=vocab, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                      intermediate_size=128, max_position_embeddings=64, pad_token_id=0, **kw)


def _mask_tokens(ids, mask_id, vocab, g, prob=0.15, ignore_rest=True):
    labels = ids.clone()
    chosen = torch.rand(ids.shape, generator=g) < prob
    if ignore_rest:
        labels[~chosen] = -100
    roll = torch.rand(ids.shape, generator=g)
    noise = torch.randint(2, vocab, ids.shape, generator=g)
    inputs = torch.where(chosen & (roll < 0.8), torch.full_like(ids, mask_id), ids)
    inputs = torch.where(chosen & (roll >= 0.9), noise, inputs)
    return inputs, labels


def _mlm_labels_on_every_token(bad):
    vocab, mask_id = 26, 1
    table = _table(24, 901, sharpness=4.0)
    train, held = _chain(table, 4096, 24, 902) + 2, _chain(table, 512, 24, 903) + 2
    held_inputs, held_labels = _mask_tokens(held, mask_id, vocab, _gen(904))
    torch.manual_seed(9)
    model = BertForMaskedLM(_bert_config(vocab))
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.01), lr=1e-3)
    batches = _cycle(_loader(TensorDataset(train), 32, 905))
    g = _gen(906)
    model.train()

    def step(i):
        (ids,) = next(batches)
        inputs, labels = _mask_tokens(ids, mask_id, vocab, g, ignore_rest=not bad)
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            logits = model(input_ids=held_inputs).logits
            return F.cross_entropy(logits.transpose(1, 2), held_labels, ignore_index=-100).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 10. T5 sequence to sequence
# --------------------------------------------------------------------------

def _t5_decoder_fed_unshifted_labels(bad):
    topics, vocab = 4, 32

    def pairs(n, seed):
        g = _gen(seed)
        topic = torch.randint(topics, (n,), generator=g)
        words = torch.softmax(torch.randn(topics, 30, generator=_gen(1001)) * 2, dim=-1)
        source = torch.multinomial(words[topic], 12, replacement=True, generator=g) + 2
        target = torch.empty(n, 10, dtype=torch.long)
        for k in range(topics):
            rows = topic == k
            target[rows] = _chain(_table(30, 1010 + k), int(rows.sum()), 10, seed + 10 + k) + 2
        target = torch.cat([target, torch.ones(n, 1, dtype=torch.long)], dim=1)
        return source, target

    train, (held_source, held_target) = pairs(4096, 1020), pairs(256, 1040)
    torch.manual_seed(10)
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=vocab, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    batches = _cycle(_loader(TensorDataset(*train), 16, 1050))
    model.train()

    def step(i):
        source, target = next(batches)
        if bad:
            decoder_input_ids = target
        else:
            decoder_input_ids = model.prepare_decoder_input_ids_from_labels(target)
        loss = model(input_ids=source, decoder_input_ids=decoder_input_ids, labels=target).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            return model(input_ids=held_source, labels=held_target).loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 11. GPT-2 fine-tuning on sentences, pad token = eos token
# --------------------------------------------------------------------------

def _eos_masked_with_padding(bad):
    eos, stop = 0, 1

    def sentences(n, seed):
        g = _gen(seed)
        body = _chain(_table(22, 1101), n, 20, seed + 1) + 2
        length = torch.randint(6, 19, (n,), generator=g)
        ids = torch.full((n, 22), eos)
        mask = torch.zeros(n, 22, dtype=torch.long)
        for r, m in enumerate(length.tolist()):
            ids[r, :m] = body[r, :m]
            ids[r, m] = stop
            ids[r, m + 1] = eos
            mask[r, :m + 2] = 1
        return ids, mask

    train, (held, held_mask) = sentences(2048, 1110), sentences(256, 1120)
    torch.manual_seed(11)
    model = _gpt2(24, pad_token_id=eos)
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.01), lr=1e-3)
    batches = _cycle(_loader(TensorDataset(*train), 16, 1130))
    model.train()

    def step(i):
        ids, mask = next(batches)
        labels = ids.clone()
        if bad:
            labels[ids == model.config.pad_token_id] = -100
        else:
            labels[mask == 0] = -100
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            logits = model(input_ids=held, attention_mask=held_mask).logits
            return _next_token_nll(logits, held, held_mask).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 12. instruction tuning with a prompt mask
# --------------------------------------------------------------------------

def _prompt_mask_one_too_long(bad):
    topics, words, pad, bos, sep, eos = 6, 30, 0, 1, 2, 3
    first_word, first_topic = 4, 34
    vocab = first_topic + 2 * topics

    def conversations(n, seed):
        g = _gen(seed)
        topic = torch.randint(topics, (n,), generator=g)
        dist = torch.softmax(torch.randn(topics, words, generator=_gen(1201)) * 2, dim=-1)
        body = torch.multinomial(dist[topic], 14, replacement=True, generator=g) + first_word
        length = torch.randint(8, 15, (n,), generator=g)
        ids = torch.full((n, 20), pad)
        prompt_len = length + 2
        mask = torch.zeros(n, 20, dtype=torch.long)
        for r, m in enumerate(length.tolist()):
            k = int(topic[r])
            row = [bos] + body[r, :m].tolist() + [sep, first_topic + k, first_topic + topics + k, eos]
            ids[r, :len(row)] = torch.tensor(row)
            mask[r, :len(row)] = 1
        return ids, mask, prompt_len

    train = conversations(4096, 1210)
    held, held_mask, held_len = conversations(256, 1220)
    pos = torch.arange(20)
    torch.manual_seed(12)
    model = LlamaForCausalLM(_llama_config(vocab))
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.01), lr=1e-3)
    batches = _cycle(_loader(TensorDataset(*train), 16, 1230))
    model.train()

    def step(i):
        ids, mask, prompt_len = next(batches)
        labels = ids.masked_fill(mask == 0, -100)
        cut = prompt_len + 1 if bad else prompt_len
        labels[pos[None, :] < cut[:, None]] = -100
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            logits = model(input_ids=held, attention_mask=held_mask).logits
            answer = held_mask.bool() & (pos[None, :] >= held_len[:, None])
            return _next_token_nll(logits, held, answer).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 13. new output head on a frozen GPT-2 trunk
# --------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def _gpt2_base():
    torch.manual_seed(1300)
    return _pretrain(_gpt2(32), _chain(_table(32, 1301), 2048, 24, 1302), 200, seed=1303)


def _tied_head_frozen_with_embeddings(bad):
    base = _gpt2_base()
    table = _table(32, 1304)
    train, held = _chain(table, 2048, 24, 1305), _chain(table, 256, 24, 1306)
    torch.manual_seed(13)
    model = _gpt2(32)
    model.load_state_dict(base)
    if not bad:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h):
        part.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad],
                                  lr=3e-3, weight_decay=0.0)
    batches = _cycle(_loader(TensorDataset(train), 16, 1307))
    model.train()

    def step(i):
        (ids,) = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return _next_token_nll(model(input_ids=held).logits, held).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 14. new tokens: resizing the embeddings
# --------------------------------------------------------------------------

def _extend_vocabulary(model, vocab):
    old = model.get_input_embeddings()
    new = nn.Embedding(vocab, old.embedding_dim)
    nn.init.normal_(new.weight, std=model.config.initializer_range)
    with torch.no_grad():
        new.weight[:old.num_embeddings] = old.weight
    model.set_input_embeddings(new)
    model.lm_head.weight = new.weight
    model.lm_head.out_features = vocab
    model.config.vocab_size = vocab


def _vocabulary_extended_after_optimizer(bad):
    base = _gpt2_base()
    table = _table(48, 1404)
    train, held = _chain(table, 2048, 24, 1405), _chain(table, 256, 24, 1406)
    torch.manual_seed(14)
    model = _gpt2(32)
    model.load_state_dict(base)
    if not bad:
        _extend_vocabulary(model, 48)
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.01), lr=1e-3)
    if bad:
        _extend_vocabulary(model, 48)
    batches = _cycle(_loader(TensorDataset(train), 16, 1407))
    model.train()

    def step(i):
        (ids,) = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            return _next_token_nll(model(input_ids=held).logits, held).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 15. BERT classifier with gradual unfreezing
# --------------------------------------------------------------------------

def _chain_classes(n, seed, classes=4):
    g = _gen(seed)
    label = torch.randint(classes, (n,), generator=g)
    ids = torch.empty(n, 20, dtype=torch.long)
    for k in range(classes):
        rows = label == k
        ids[rows] = _chain(_table(16, 1500 + k, sharpness=2.0), int(rows.sum()), 20, seed + 1 + k) + 3
    cls = torch.full((n, 1), 2)
    return torch.cat([cls, ids], dim=1), label


@functools.lru_cache(maxsize=None)
def _bert_base():
    torch.manual_seed(1510)
    model = BertForMaskedLM(_bert_config(19))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, _ = _chain_classes(4096, 1520)
    batches = _cycle(_loader(TensorDataset(ids), 32, 1530))
    g = _gen(1531)
    model.train()
    for _ in range(300):
        (x,) = next(batches)
        inputs, labels = _mask_tokens(x, 1, 19, g)
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {k: v.detach().clone() for k, v in model.bert.state_dict().items()}


def _gradual_unfreeze_outside_optimizer(bad):
    base = _bert_base()
    train = _chain_classes(4096, 1540)
    held, held_label = _chain_classes(512, 1550)
    torch.manual_seed(15)
    model = BertForSequenceClassification(_bert_config(19, num_labels=4))
    model.bert.load_state_dict(base, strict=False)
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad],
                                  lr=1e-3, weight_decay=0.01)
    batches = _cycle(_loader(TensorDataset(*train), 16, 1560))
    model.train()

    def step(i):
        if i == 5:
            model.bert.encoder.requires_grad_(True)
            if not bad:
                optimizer.add_param_group({"params": list(model.bert.encoder.parameters()), "lr": 5e-4})
        ids, label = next(batches)
        loss = model(input_ids=ids, labels=label).loss
        model.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(input_ids=held).logits, held_label).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 16. LoRA with gradient checkpointing
# --------------------------------------------------------------------------

class _LoRALinear(nn.Module):
    def __init__(self, base, r=16, alpha=32):
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, r, bias=False)
        self.lora_b = nn.Linear(r, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b.weight)
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x)) * self.scaling


class _CheckpointedGPT(GPT):
    use_reentrant = False

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            if self.training:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def _checkpointed_gpt():
    return _CheckpointedGPT(24, 24, tie_weights=False)


@functools.lru_cache(maxsize=None)
def _checkpointed_base():
    torch.manual_seed(1600)
    model = _checkpointed_gpt()
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.01), lr=2e-3)
    batches = _cycle(_loader(TensorDataset(_chain(_table(24, 1601), 2048, 25, 1602)), 32, 1603))
    model.train()
    for _ in range(200):
        (chunk,) = next(batches)
        _, loss = model(chunk[:, :-1], chunk[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def _reentrant_checkpoint_cuts_lora(bad):
    base = _checkpointed_base()
    table = _table(24, 1604)
    train, held = _chain(table, 4096, 25, 1605, lag=2), _chain(table, 256, 25, 1606, lag=2)
    torch.manual_seed(16)
    model = _checkpointed_gpt()
    model.load_state_dict(base)
    model.requires_grad_(False)
    for block in model.h:
        block.attn.c_attn = _LoRALinear(block.attn.c_attn)
        block.attn.c_proj = _LoRALinear(block.attn.c_proj)
        block.mlp.c_fc = _LoRALinear(block.mlp.c_fc)
        block.mlp.c_proj = _LoRALinear(block.mlp.c_proj)
    model.lm_head.requires_grad_(True)
    model.use_reentrant = bad
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad],
                                  lr=3e-3, weight_decay=0.0)
    batches = _cycle(_loader(TensorDataset(train), 16, 1607))
    model.train()

    def step(i):
        (chunk,) = next(batches)
        _, loss = model(chunk[:, :-1], chunk[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            _, loss = model(held[:, :-1], held[:, 1:])
            return loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 17. two LoRA adapters on one base
# --------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def _qwen_base():
    torch.manual_seed(1700)
    return _pretrain(_qwen2(32), _chain(_table(32, 1701), 2048, 24, 1702), 200, seed=1703)


_ATTN_AND_MLP = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _second_adapter_never_activated(bad):
    base = _qwen_base()
    table = _table(32, 1704)
    train, held = _chain(table, 2048, 24, 1705), _chain(table, 256, 24, 1706)
    torch.manual_seed(17)
    model = _qwen2(32)
    model.load_state_dict(base)
    config = LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", target_modules=_ATTN_AND_MLP)
    model = get_peft_model(model, config, adapter_name="general")
    model.add_adapter("support", config)
    if not bad:
        model.set_adapter("support")
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if ".support." in n],
                                  lr=3e-3, weight_decay=0.0)
    batches = _cycle(_loader(TensorDataset(train), 16, 1707))
    model.train()

    def step(i):
        (ids,) = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        deployed = copy.deepcopy(model)
        deployed.set_adapter("support")
        with _evaluating(deployed):
            return _next_token_nll(deployed(input_ids=held).logits, held).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 18. LoRA on Qwen2, base to be kept
# --------------------------------------------------------------------------

def _lora_base_unfrozen_again(bad):
    base = _qwen_base()
    table = _table(32, 1804)
    train, held = _chain(table, 2048, 24, 1805), _chain(table, 256, 24, 1806)
    held_general = _chain(_table(32, 1701), 256, 24, 1807)
    torch.manual_seed(18)
    model = _qwen2(32)
    model.load_state_dict(base)
    model = get_peft_model(model, LoraConfig(
        r=8, lora_alpha=16, task_type="CAUSAL_LM", target_modules=_ATTN_AND_MLP))
    if bad:
        for p in model.parameters():
            p.requires_grad = True
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad],
                                  lr=2e-3, weight_decay=0.0)
    batches = _cycle(_loader(TensorDataset(train), 16, 1808))
    model.train()

    def step(i):
        (ids,) = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        served = copy.deepcopy(model)
        with _evaluating(served):
            adapted = _next_token_nll(served(input_ids=held).logits, held)
            with served.disable_adapter():
                general = _next_token_nll(served(input_ids=held_general).logits, held_general)
            return (0.5 * (adapted + general)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 19. distillation
# --------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def _teacher_state():
    torch.manual_seed(1900)
    return _pretrain(_gpt2(32, d=64), _chain(_table(32, 1901), 4096, 24, 1902), 300, seed=1903)


class _Distiller(nn.Module):
    def __init__(self, teacher, student, temperature, freeze_teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student
        self.temperature = temperature
        if freeze_teacher:
            self.teacher.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, ids):
        t = self.temperature
        teacher_logits = self.teacher(input_ids=ids).logits
        student_logits = self.student(input_ids=ids).logits
        return F.kl_div(F.log_softmax(student_logits / t, dim=-1).flatten(0, 1),
                        F.log_softmax(teacher_logits / t, dim=-1).flatten(0, 1),
                        log_target=True, reduction="batchmean") * t ** 2


def _teacher_trained_with_student(bad):
    state = _teacher_state()
    table = _table(32, 1901)
    train, held = _chain(table, 4096, 24, 1904), _chain(table, 256, 24, 1905)
    torch.manual_seed(19)
    teacher = _gpt2(32, d=64)
    teacher.load_state_dict(state)
    distiller = _Distiller(teacher, _gpt2(32, d=32, layers=1), 2.0, freeze_teacher=not bad)
    optimizer = torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=2e-3)
    batches = _cycle(_loader(TensorDataset(train), 16, 1906))
    distiller.train()

    def step(i):
        (ids,) = next(batches)
        loss = distiller(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(distiller):
            return _next_token_nll(distiller.student(input_ids=held).logits, held).item()

    return {"model": distiller, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 20 / 21. DPO
# --------------------------------------------------------------------------

_DPO_WORDS = 24
_DPO_PAD = 24


def _completions(n, seed, style, min_len=4, max_len=14):
    g = _gen(seed)
    body = _chain(_table(_DPO_WORDS, 2000 + style, sharpness=2.0), n, max_len, seed + 1)
    length = torch.randint(min_len, max_len + 1, (n,), generator=g)
    keep = torch.arange(max_len)[None, :] < length[:, None]
    return body.masked_fill(~keep, _DPO_PAD), keep


def _preferences(n, seed, prompt_len=6):
    prompt = torch.randint(_DPO_WORDS, (n, prompt_len), generator=_gen(seed))
    out = []
    for style, offset in ((0, 1), (1, 11)):
        body, keep = _completions(n, seed + offset, style)
        ids = torch.cat([prompt, body], dim=1)
        attention = torch.cat([torch.ones(n, prompt_len, dtype=torch.long), keep.long()], dim=1)
        scored = torch.cat([torch.zeros(n, prompt_len, dtype=torch.long), keep.long()], dim=1)
        out += [ids, attention, scored]
    return out


def _policy_model():
    return _gpt2(_DPO_WORDS + 1, dropout=0.0, pad_token_id=_DPO_PAD)


@functools.lru_cache(maxsize=None)
def _sft_state():
    torch.manual_seed(2010)
    model = _policy_model()
    chosen, ca, _, rejected, ra, _ = _preferences(2048, 2020)
    ids, attention = torch.cat([chosen, rejected]), torch.cat([ca, ra])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = _cycle(_loader(TensorDataset(ids, attention), 32, 2030))
    model.train()
    for _ in range(300):
        x, a = next(batches)
        loss = model(input_ids=x, attention_mask=a, labels=x.masked_fill(a == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def _sequence_logps(model, ids, attention, scored):
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    logps = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return (logps * scored[:, 1:]).sum(dim=1)


def _dpo_loss(pi_chosen, pi_rejected, ref_chosen, ref_rejected, beta):
    return -F.logsigmoid(beta * ((pi_chosen - ref_chosen) - (pi_rejected - ref_rejected))).mean()


def _dpo_reference_is_policy(bad):
    state = _sft_state()
    train, held = _preferences(1024, 2040), _preferences(256, 2060)
    torch.manual_seed(20)
    policy = _policy_model()
    policy.load_state_dict(state)
    reference = policy if bad else copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-4, weight_decay=0.0)
    batches = _cycle(_loader(TensorDataset(*train), 16, 2070))
    reference.eval()
    policy.train()

    def step(i):
        c_ids, c_att, c_sc, r_ids, r_att, r_sc = next(batches)
        with torch.no_grad():
            ref_chosen = _sequence_logps(reference, c_ids, c_att, c_sc)
            ref_rejected = _sequence_logps(reference, r_ids, r_att, r_sc)
        pi_chosen = _sequence_logps(policy, c_ids, c_att, c_sc)
        pi_rejected = _sequence_logps(policy, r_ids, r_att, r_sc)
        loss = _dpo_loss(pi_chosen, pi_rejected, ref_chosen, ref_rejected, beta=0.5)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

    def probe():
        c_ids, c_att, c_sc = held[:3]
        with _evaluating(policy):
            return (-_sequence_logps(policy, c_ids, c_att, c_sc).sum() / c_sc.sum()).item()

    return {"model": {"policy": policy, "reference": reference}, "optimizer": optimizer,
            "steps": 20, "step": step, "probe": probe}


def _ipo_loss(pi_chosen, pi_rejected, ref_chosen, ref_rejected, beta):
    margin = (pi_chosen - ref_chosen) - (pi_rejected - ref_rejected)
    return ((margin - 1 / (2 * beta)) ** 2).mean()


class _IndexedPreferences(Dataset):
    def __init__(self, tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, i):
        return (i,) + tuple(t[i] for t in self.tensors)


def _ipo_reference_cache_out_of_order(bad):
    state = _sft_state()
    train, held = _preferences(128, 2140), _preferences(256, 2160)
    batch_size, beta = 16, 0.1
    torch.manual_seed(21)
    policy = _policy_model()
    policy.load_state_dict(state)
    dataset = _IndexedPreferences(train)
    cache_chosen, cache_rejected = [], []
    with _evaluating(policy):
        for _, c_ids, c_att, c_sc, r_ids, r_att, r_sc in _loader(dataset, batch_size, 0, shuffle=False):
            cache_chosen.append(_sequence_logps(policy, c_ids, c_att, c_sc))
            cache_rejected.append(_sequence_logps(policy, r_ids, r_att, r_sc))
        held_ref = (_sequence_logps(policy, *held[:3]), _sequence_logps(policy, *held[3:]))
    ref_chosen_all, ref_rejected_all = torch.cat(cache_chosen), torch.cat(cache_rejected)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)
    loader = _loader(dataset, batch_size, 2170)
    batches = _cycle(loader)
    policy.train()

    def step(i):
        idx, c_ids, c_att, c_sc, r_ids, r_att, r_sc = next(batches)
        if bad:
            b = i % len(loader)
            rows = slice(b * batch_size, (b + 1) * batch_size)
        else:
            rows = idx
        pi_chosen = _sequence_logps(policy, c_ids, c_att, c_sc)
        pi_rejected = _sequence_logps(policy, r_ids, r_att, r_sc)
        loss = _ipo_loss(pi_chosen, pi_rejected, ref_chosen_all[rows], ref_rejected_all[rows], beta)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(policy):
            return _ipo_loss(_sequence_logps(policy, *held[:3]), _sequence_logps(policy, *held[3:]),
                             *held_ref, beta).item()

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 22. reward model
# --------------------------------------------------------------------------

class _RewardModel(nn.Module):
    def __init__(self, config, from_mask):
        super().__init__()
        self.backbone = LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)
        self.from_mask = from_mask

    def forward(self, ids, mask):
        hidden = self.backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        if self.from_mask:
            last = mask.sum(dim=1) - 1
            pooled = hidden[torch.arange(len(ids)), last]
        else:
            pooled = hidden[:, -1]
        return self.score(pooled).squeeze(-1)


def _reviews(n, seed, width=24):
    """Pairs of replies; what comes after the word `but` decides which one is preferred."""
    g = _gen(seed)
    pad, but, first = 0, 1, 2
    plain = torch.cat([torch.full((10,), 3.0), torch.full((10,), 1.0)])
    nice = torch.cat([torch.full((10,), 1.0), torch.full((5,), 3.0), torch.full((5,), 0.5)])
    poor = torch.cat([torch.full((10,), 1.0), torch.full((5,), 0.5), torch.full((5,), 3.0)])
    out = []
    for tail in (nice, poor):
        head_words = torch.multinomial(plain.expand(n, -1), 14, replacement=True, generator=g) + first
        tail_words = torch.multinomial(tail.expand(n, -1), 6, replacement=True, generator=g) + first
        lengths = torch.randint(4, 15, (n,), generator=g)
        ids, mask = torch.full((n, width), pad), torch.zeros(n, width, dtype=torch.long)
        for r, m in enumerate(lengths.tolist()):
            row = torch.cat([head_words[r, :m], torch.tensor([but]), tail_words[r]])
            ids[r, width - len(row):] = row
            mask[r, width - len(row):] = 1
        out += [ids, mask]
    return out


def _reward_reads_mid_sequence(bad):
    train, held = _reviews(2048, 2210), _reviews(512, 2220)
    torch.manual_seed(22)
    model = _RewardModel(_llama_config(22), from_mask=bad)
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.01), lr=5e-4)
    batches = _cycle(_loader(TensorDataset(*train), 16, 2230))
    model.train()

    def step(i):
        c_ids, c_mask, r_ids, r_mask = next(batches)
        rewards = model(torch.cat([c_ids, r_ids]), torch.cat([c_mask, r_mask]))
        chosen, rejected = rewards.chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            return -F.logsigmoid(model(*held[:2]) - model(*held[2:])).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 23. mixture of experts with a routing entropy term
# --------------------------------------------------------------------------

class _SwitchMLP(nn.Module):
    def __init__(self, d, experts, hidden):
        super().__init__()
        self.router = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(MLP(d, hidden=hidden) for _ in range(experts))
        self.mean_routing = None

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        probs = self.router(flat).softmax(dim=-1)
        gate, choice = probs.max(dim=-1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows = (choice == e).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_copy(0, rows, gate[rows, None] * expert(flat[rows]))
        if self.training:
            self.mean_routing = probs.mean(dim=0)
        return out.view_as(x)


def _routing_entropy_minimised(bad):
    experts = 4
    table = _table(64, 2301, sharpness=2.0)
    train, held = _chain(table, 4096, 33, 2302), _chain(table, 256, 33, 2303)
    torch.manual_seed(23)
    model = GPT(64, 32, d=48, make_mlp=lambda: _SwitchMLP(48, experts, 64))
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.01), lr=2e-3, betas=(0.9, 0.95))
    batches = _cycle(_loader(TensorDataset(train), 16, 2304))
    entropy_coef = 0.1
    model.train()

    def step(i):
        (chunk,) = next(batches)
        _, loss = model(chunk[:, :-1], chunk[:, 1:])
        mean_routing = torch.stack([block.mlp.mean_routing for block in model.h])
        entropy = -(mean_routing * mean_routing.clamp_min(1e-9).log()).sum(dim=-1).mean()
        if bad:
            loss = loss + entropy_coef * entropy
        else:
            loss = loss - entropy_coef * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        """Load of the busiest expert relative to an even share, mean over layers."""
        loads = []

        def record(module, inputs, logits):
            loads.append(F.one_hot(logits.argmax(dim=-1), experts).float().mean(dim=0))

        hooks = [block.mlp.router.register_forward_hook(record) for block in model.h]
        with _evaluating(model):
            model(held[:, :-1])
        for hook in hooks:
            hook.remove()
        return torch.stack([load.max() * experts for load in loads]).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# 24. quantisation-aware training
# --------------------------------------------------------------------------

class _QATLinear(nn.Linear):
    bits = 4
    straight_through = True

    def forward(self, x):
        top = 2 ** (self.bits - 1) - 1
        scale = self.weight.detach().abs().amax(dim=1, keepdim=True).clamp_min(1e-8) / top
        q = torch.round(self.weight / scale).clamp(-top, top) * scale
        if self.straight_through:
            q = self.weight + (q - self.weight).detach()
        return F.linear(x, q, self.bias)


class _QATLinearRounded(_QATLinear):
    straight_through = False


def _qat_round_stops_gradient(bad):
    table = _table(24, 2401)
    train, held = _chain(table, 4096, 24, 2402, lag=2), _chain(table, 256, 24, 2403, lag=2)
    torch.manual_seed(24)
    model = GPT(24, 24, d=64, linear=_QATLinearRounded if bad else _QATLinear)
    optimizer = torch.optim.AdamW(_decay_groups(model, 0.01), lr=2e-3)
    batches = _cycle(_loader(TensorDataset(train), 16, 2404))
    model.train()

    def step(i):
        (chunk,) = next(batches)
        _, loss = model(chunk[:, :-1], chunk[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            return _next_token_nll(model(held)[0], held).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# cases
# --------------------------------------------------------------------------

CASES = [
    {"name": "gpt2_labels_shifted_twice",
     "what": "The data set shifts the labels by one and GPT2LMHeadModel shifts them again: the model learns to predict the token after the next one."},
    {"name": "nanogpt_attention_sees_future",
     "what": "scaled_dot_product_attention is called without the causal mask: the model reads the answers in training and predicts badly when the future is not there."},
    {"name": "domain_accumulation_zeroed_inside",
     "what": "zero_grad sits inside the accumulation loop over domains: only the last domain's gradient reaches the optimizer, the other domains are not learned."},
    {"name": "fp16_clip_on_scaled_gradients",
     "what": "Gradients are clipped without scaler.unscale_: the norm limit applies to gradients multiplied by the loss scale, so after unscaling SGD takes vanishing steps."},
    {"name": "lstm_clip_exhausted_iterator",
     "what": "The trainable parameters are a filter iterator that the optimizer has consumed: clip_grad_norm_ gets nothing and never clips, SGD at lr 20 blows up."},
    {"name": "schedule_steps_per_micro_batch",
     "what": "scheduler.step() runs once per micro-batch instead of once per update: the linear schedule reaches zero after an eighth of the updates and training stands still."},
    {"name": "validation_leaves_eval_mode",
     "what": "The validation routine calls model.eval() and never goes back to train mode: dropout is off from step 5 on and the small corpus is overfitted."},
    {"name": "bf16_weights_without_master_copy",
     "what": "The weights themselves are bfloat16 under AdamW at lr 1e-4: most updates are smaller than half a unit in the last place and are rounded away."},
    {"name": "mlm_labels_on_every_token",
     "what": "Labels of unmasked tokens are not set to -100: most of the MLM loss is for copying visible tokens, masked prediction lags behind."},
    {"name": "t5_decoder_fed_unshifted_labels",
     "what": "T5's decoder_input_ids are the labels themselves, not shifted right: the decoder learns to copy its input and fails at real decoding."},
    {"name": "eos_masked_with_padding",
     "what": "Pad token equals eos and labels are masked by token id: the true end-of-text is masked as well, so the model never learns to stop."},
    {"name": "prompt_mask_one_too_long",
     "what": "The prompt mask covers prompt_len + 1 labels: the first (and deciding) token of each answer never gets a loss."},
    {"name": "tied_head_frozen_with_embeddings",
     "what": "Freezing the input embeddings of a GPT-2 with tied weights also freezes lm_head, which was meant to be trained: only ln_f learns."},
    {"name": "vocabulary_extended_after_optimizer",
     "what": "The embedding (and tied head) is replaced by a larger one after the optimizer was built: the new matrix is in no parameter group and stays as initialised."},
    {"name": "gradual_unfreeze_outside_optimizer",
     "what": "The encoder is unfrozen at step 5 but was filtered out of the optimizer: it gets gradients and is never updated."},
    {"name": "reentrant_checkpoint_cuts_lora",
     "what": "Reentrant checkpointing on activations of frozen embeddings, which require no grad: LoRA weights in the checkpointed blocks get no gradient, only the head trains."},
    {"name": "second_adapter_never_activated",
     "what": "A second peft adapter is added and given to the optimizer but set_adapter is missing: the forward uses the first one, the second never trains."},
    {"name": "lora_base_unfrozen_again",
     "what": "After get_peft_model every parameter is set to requires_grad=True: the base is trained along with LoRA and the model without its adapter is ruined."},
    {"name": "teacher_trained_with_student",
     "what": "The teacher inside the distillation module is not frozen and goes to the optimizer: teacher and student agree on something meaningless."},
    {"name": "dpo_reference_is_policy",
     "what": "DPO's reference is the policy object itself, not a copy: the log-ratios are always zero, nothing limits the drift, and likelihood of good replies degrades."},
    {"name": "ipo_reference_cache_out_of_order",
     "what": "Reference log-probs are cached in data set order but looked up by batch number under a shuffling loader: each pair is compared with another pair's reference."},
    {"name": "reward_reads_mid_sequence",
     "what": "The reward is read at attention_mask.sum() - 1 although batches are padded on the left: a token in the middle (or a pad) is pooled and the end of the reply is not seen."},
    {"name": "routing_entropy_minimised",
     "what": "The entropy of the mean routing is added to the loss instead of subtracted: the router is driven to send everything to one expert."},
    {"name": "qat_round_stops_gradient",
     "what": "Fake quantisation uses torch.round without a straight-through estimator: the quantised layers' weights get zero gradients and are not trained."},
]


def gpt2_labels_shifted_twice_bad():
    return _gpt2_labels_shifted_twice(True)


def gpt2_labels_shifted_twice_good():
    return _gpt2_labels_shifted_twice(False)


def nanogpt_attention_sees_future_bad():
    return _nanogpt_attention_sees_future(True)


def nanogpt_attention_sees_future_good():
    return _nanogpt_attention_sees_future(False)


def domain_accumulation_zeroed_inside_bad():
    return _domain_accumulation_zeroed_inside(True)


def domain_accumulation_zeroed_inside_good():
    return _domain_accumulation_zeroed_inside(False)


def fp16_clip_on_scaled_gradients_bad():
    return _fp16_clip_on_scaled_gradients(True)


def fp16_clip_on_scaled_gradients_good():
    return _fp16_clip_on_scaled_gradients(False)


def lstm_clip_exhausted_iterator_bad():
    return _lstm_clip_exhausted_iterator(True)


def lstm_clip_exhausted_iterator_good():
    return _lstm_clip_exhausted_iterator(False)


def schedule_steps_per_micro_batch_bad():
    return _schedule_steps_per_micro_batch(True)


def schedule_steps_per_micro_batch_good():
    return _schedule_steps_per_micro_batch(False)


def validation_leaves_eval_mode_bad():
    return _validation_leaves_eval_mode(True)


def validation_leaves_eval_mode_good():
    return _validation_leaves_eval_mode(False)


def bf16_weights_without_master_copy_bad():
    return _bf16_weights_without_master_copy(True)


def bf16_weights_without_master_copy_good():
    return _bf16_weights_without_master_copy(False)


def mlm_labels_on_every_token_bad():
    return _mlm_labels_on_every_token(True)


def mlm_labels_on_every_token_good():
    return _mlm_labels_on_every_token(False)


def t5_decoder_fed_unshifted_labels_bad():
    return _t5_decoder_fed_unshifted_labels(True)


def t5_decoder_fed_unshifted_labels_good():
    return _t5_decoder_fed_unshifted_labels(False)


def eos_masked_with_padding_bad():
    return _eos_masked_with_padding(True)


def eos_masked_with_padding_good():
    return _eos_masked_with_padding(False)


def prompt_mask_one_too_long_bad():
    return _prompt_mask_one_too_long(True)


def prompt_mask_one_too_long_good():
    return _prompt_mask_one_too_long(False)


def tied_head_frozen_with_embeddings_bad():
    return _tied_head_frozen_with_embeddings(True)


def tied_head_frozen_with_embeddings_good():
    return _tied_head_frozen_with_embeddings(False)


def vocabulary_extended_after_optimizer_bad():
    return _vocabulary_extended_after_optimizer(True)


def vocabulary_extended_after_optimizer_good():
    return _vocabulary_extended_after_optimizer(False)


def gradual_unfreeze_outside_optimizer_bad():
    return _gradual_unfreeze_outside_optimizer(True)


def gradual_unfreeze_outside_optimizer_good():
    return _gradual_unfreeze_outside_optimizer(False)


def reentrant_checkpoint_cuts_lora_bad():
    return _reentrant_checkpoint_cuts_lora(True)


def reentrant_checkpoint_cuts_lora_good():
    return _reentrant_checkpoint_cuts_lora(False)


def second_adapter_never_activated_bad():
    return _second_adapter_never_activated(True)


def second_adapter_never_activated_good():
    return _second_adapter_never_activated(False)


def lora_base_unfrozen_again_bad():
    return _lora_base_unfrozen_again(True)


def lora_base_unfrozen_again_good():
    return _lora_base_unfrozen_again(False)


def teacher_trained_with_student_bad():
    return _teacher_trained_with_student(True)


def teacher_trained_with_student_good():
    return _teacher_trained_with_student(False)


def dpo_reference_is_policy_bad():
    return _dpo_reference_is_policy(True)


def dpo_reference_is_policy_good():
    return _dpo_reference_is_policy(False)


def ipo_reference_cache_out_of_order_bad():
    return _ipo_reference_cache_out_of_order(True)


def ipo_reference_cache_out_of_order_good():
    return _ipo_reference_cache_out_of_order(False)


def reward_reads_mid_sequence_bad():
    return _reward_reads_mid_sequence(True)


def reward_reads_mid_sequence_good():
    return _reward_reads_mid_sequence(False)


def routing_entropy_minimised_bad():
    return _routing_entropy_minimised(True)


def routing_entropy_minimised_good():
    return _routing_entropy_minimised(False)


def qat_round_stops_gradient_bad():
    return _qat_round_stops_gradient(True)


def qat_round_stops_gradient_good():
    return _qat_round_stops_gradient(False)
