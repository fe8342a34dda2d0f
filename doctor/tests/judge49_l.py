"""Small language-model training programs, each in two versions."""
import copy
import itertools
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import (BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM,
                          BertForSequenceClassification, BertModel, GPT2Config,
                          GPT2LMHeadModel, LlamaConfig,
                          LlamaForCausalLM, T5Config, T5ForConditionalGeneration)
from peft import LoraConfig, get_peft_model

torch.set_num_threads(1)

SEED = 0
CASES = []


def seed_all(s):
    random.seed(SEED + s)
    torch.manual_seed(SEED + s)


# ------------------------------------------------------------------ corpora

def markov_text(n, length, vocab, lang=0, sharp=3.0, low=0):
    g = torch.Generator().manual_seed(1000 + lang)
    table = torch.softmax(torch.randn(vocab, vocab, generator=g) * sharp, -1)
    x = torch.randint(vocab, (n,))
    out = [x]
    for _ in range(length - 1):
        x = torch.multinomial(table[x], 1).squeeze(1)
        out.append(x)
    return torch.stack(out, 1) + low


def lag_text(n, length, vocab, lag=2, noise=0.1, lang=0):
    g = torch.Generator().manual_seed(2000 + lang)
    perm = torch.randperm(vocab, generator=g)
    x = torch.randint(vocab, (n, length))
    for t in range(lag, length):
        keep = torch.rand(n) > noise
        x[:, t] = torch.where(keep, perm[x[:, t - lag]], x[:, t])
    return x


def pair_text(n, length, vocab, noise=0.05):
    g = torch.Generator().manual_seed(3000)
    table = torch.randint(vocab, (vocab, vocab), generator=g)
    x = torch.randint(vocab, (n, length))
    for t in range(2, length):
        keep = torch.rand(n) > noise
        x[:, t] = torch.where(keep, table[x[:, t - 1], x[:, t - 2]], x[:, t])
    return x


@torch.no_grad()
def lm_nll(forward, x, skip=0):
    logits = forward(x[:, :-1])
    return F.cross_entropy(logits[:, skip:].flatten(0, 1), x[:, 1 + skip:].flatten()).item()


# ------------------------------------------------------------- a small GPT

class CausalSelfAttention(nn.Module):
    def __init__(self, d, n_head, merge="transpose"):
        super().__init__()
        self.n_head = n_head
        self.merge = merge
        self.c_attn = nn.Linear(d, 3 * d)
        self.c_proj = nn.Linear(d, d)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.merge == "transpose":
            y = y.transpose(1, 2)
        y = y.contiguous().view(B, T, C)
        return self.c_proj(y)


class MLP(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.c_fc = nn.Linear(d, 4 * d)
        self.c_proj = nn.Linear(4 * d, d)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, d, n_head, merge="transpose", mlp=None):
        super().__init__()
        self.ln_1 = nn.LayerNorm(d)
        self.attn = CausalSelfAttention(d, n_head, merge)
        self.ln_2 = nn.LayerNorm(d)
        self.mlp = mlp if mlp is not None else MLP(d)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    def __init__(self, vocab, block_size, d=48, n_head=4, n_layer=2, merge="transpose", mlp_cls=None):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.wpe = nn.Embedding(block_size, d)
        self.h = nn.ModuleList([Block(d, n_head, merge, mlp_cls(d) if mlp_cls else None)
                                for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, 0.0, 0.02)
            if m.bias is not None:
                nn.init.zeros_(m.bias)
        elif isinstance(m, nn.Embedding):
            nn.init.normal_(m.weight, 0.0, 0.02)

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


def get_batch(data, batch_size):
    ix = torch.randint(data.size(0), (batch_size,))
    rows = data[ix]
    return rows[:, :-1], rows[:, 1:]


def pretrain(model, data, steps, lr=3e-3):
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        x, y = get_batch(data, 16)
        _, loss = model(x, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.zero_grad(set_to_none=True)
    return model


# ------------------------------------------------------------------ case 1
CASES.append({"name": "clm_double_shift", "what": "GPT-2 pre-training: the dataset already shifts the labels by one token (labels = x[1:]) and GPT2LMHeadModel shifts them again inside, so the model learns to predict the token after next; next-token likelihood is poor."})


class BlockDataset(Dataset):
    def __init__(self, rows, offset):
        self.rows = rows
        self.offset = offset

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        chunk = self.rows[i]
        n = len(chunk) - 1
        return {"input_ids": chunk[:n], "labels": chunk[self.offset:self.offset + n]}


def _clm_double_shift(good):
    seed_all(11)
    vocab = 24
    train, held = markov_text(1024, 33, vocab), markov_text(128, 33, vocab)
    config = GPT2Config(vocab_size=vocab, n_positions=64, n_embd=48, n_layer=2, n_head=4,
                        bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    loader = itertools.cycle(DataLoader(BlockDataset(train, 0 if good else 1), batch_size=16, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step():
        model.train()
        batch = next(loader)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def evaluate():
        model.eval()
        return lm_nll(lambda x: model(x).logits, held)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def clm_double_shift_bad():
    return _clm_double_shift(False)


def clm_double_shift_good():
    return _clm_double_shift(True)


# ------------------------------------------------------------------ case 2
CASES.append({"name": "sft_eos_masked", "what": "Supervised fine-tuning of a Llama with pad token = EOS token: the collator sets every label equal to the pad id to -100, which also removes the true EOS at the end of each answer, so the model never learns to stop."})

SFT_EOS, SFT_SEP, SFT_BASE = 0, 1, 2


def sft_example():
    k = random.randint(2, 7)
    topic = random.randint(0, 7)
    prompt = [SFT_BASE + 8 + topic, SFT_BASE + k, SFT_SEP]
    answer = [SFT_BASE + 16 + (topic * 3 + 1) % 8] + [SFT_BASE + j for j in range(k, 0, -1)] + [SFT_EOS]
    return prompt, answer


class SFTCollator:
    def __init__(self, pad_token_id, by_attention):
        self.pad_token_id = pad_token_id
        self.by_attention = by_attention

    def __call__(self, examples):
        longest = max(len(p) + len(a) for p, a in examples)
        ids, attn, labels = [], [], []
        for p, a in examples:
            n = longest - len(p) - len(a)
            ids.append(p + a + [self.pad_token_id] * n)
            attn.append([1] * (len(p) + len(a)) + [0] * n)
            labels.append([-100] * len(p) + a + [self.pad_token_id] * n)
        ids, attn, labels = torch.tensor(ids), torch.tensor(attn), torch.tensor(labels)
        if self.by_attention:
            labels[attn == 0] = -100
        else:
            labels[labels == self.pad_token_id] = -100
        return {"input_ids": ids, "attention_mask": attn, "labels": labels}


def _sft_eos_masked(good):
    seed_all(12)
    config = LlamaConfig(vocab_size=SFT_BASE + 24, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                         pad_token_id=SFT_EOS, eos_token_id=SFT_EOS, bos_token_id=SFT_SEP)
    model = LlamaForCausalLM(config)
    train = [sft_example() for _ in range(600)]
    held = [sft_example() for _ in range(100)]
    collate = SFTCollator(SFT_EOS, good)
    loader = itertools.cycle(DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        model.train()
        batch = next(loader)
        optimizer.zero_grad()
        out = model(**batch)
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        total, count = 0.0, 0
        for p, a in held:
            ids = torch.tensor([p + a])
            logp = model(ids).logits.log_softmax(-1)[0, len(p) - 1:-1]
            total -= logp.gather(1, torch.tensor(a)[:, None]).sum().item()
            count += len(a)
        return total / count

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def sft_eos_masked_bad():
    return _sft_eos_masked(False)


def sft_eos_masked_good():
    return _sft_eos_masked(True)


# ------------------------------------------------------------------ case 3
CASES.append({"name": "mlm_labels_after_mask", "what": "BERT masked language model: the labels are cloned from input_ids after the [MASK] tokens were written into them, so every label is the id of [MASK]; the loss goes to zero and the model only learns to say [MASK]."})

MLM_MASK = 1


def mask_tokens(ids, copy_first, p=0.15):
    ids = ids.clone()
    picked = torch.rand(ids.shape) < p
    if copy_first:
        labels = ids.clone()
        ids[picked] = MLM_MASK
    else:
        ids[picked] = MLM_MASK
        labels = ids.clone()
    labels[~picked] = -100
    return ids, labels


def _mlm_labels_after_mask(good):
    seed_all(13)
    vocab = 12
    train = markov_text(1500, 24, vocab, lang=3, sharp=4.0, low=2)
    held = markov_text(200, 24, vocab, lang=3, sharp=4.0, low=2)
    held_mask = torch.rand(held.shape) < 0.15
    model = BertForMaskedLM(BertConfig(vocab_size=vocab + 2, hidden_size=48, num_hidden_layers=2,
                                       num_attention_heads=4, intermediate_size=96,
                                       max_position_embeddings=32, hidden_dropout_prob=0.0,
                                       attention_probs_dropout_prob=0.0))

    def collate(rows):
        ids, labels = mask_tokens(torch.stack(rows), good)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    loader = itertools.cycle(DataLoader(list(train), batch_size=32, shuffle=True, collate_fn=collate))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step():
        model.train()
        loss = model(**next(loader)).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        logits = model(held.masked_fill(held_mask, MLM_MASK)).logits
        return F.cross_entropy(logits[held_mask], held[held_mask]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def mlm_labels_after_mask_bad():
    return _mlm_labels_after_mask(False)


def mlm_labels_after_mask_good():
    return _mlm_labels_after_mask(True)


# ------------------------------------------------------------------ case 4
CASES.append({"name": "t5_unshifted_decoder", "what": "T5 fine-tuning (text to topic phrase): decoder_input_ids are the labels themselves instead of the labels shifted right, so the decoder sees the token it must predict and learns to copy its input; useless for generation."})


def _t5_unshifted_decoder(good):
    seed_all(14)
    n_topic, vocab, n = 12, 36, 5
    phrase = torch.randint(vocab, (n_topic, n))
    topic = torch.randint(n_topic, (1200,))
    own = topic[:, None] * 3 + torch.randint(3, (1200, 10))
    src = torch.where(torch.rand(1200, 10) < 0.5, own, torch.randint(vocab, (1200, 10)))
    tgt = phrase[topic]
    eos = torch.full((1200, 1), 1)
    src, tgt = torch.cat([src + 2, eos], 1), torch.cat([tgt + 2, eos], 1)
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=vocab + 2, d_model=48, d_kv=12, d_ff=96, num_layers=1, num_decoder_layers=1, num_heads=4,
        dropout_rate=0.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0))
    loader = itertools.cycle(DataLoader(TensorDataset(src[:1000], tgt[:1000]), batch_size=32, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def step():
        model.train()
        input_ids, labels = next(loader)
        decoder_input_ids = model._shift_right(labels) if good else labels
        out = model(input_ids=input_ids, decoder_input_ids=decoder_input_ids, labels=labels)
        optimizer.zero_grad()
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        s, t = src[1000:], tgt[1000:]
        out = torch.zeros(len(s), 1, dtype=torch.long)
        for _ in range(n):
            nxt = model(input_ids=s, decoder_input_ids=out).logits[:, -1].argmax(-1)
            out = torch.cat([out, nxt[:, None]], 1)
        return (out[:, 1:] != t[:, :n]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def t5_unshifted_decoder_bad():
    return _t5_unshifted_decoder(False)


def t5_unshifted_decoder_good():
    return _t5_unshifted_decoder(True)


# ------------------------------------------------------------------ case 5
CASES.append({"name": "lstm_target_order", "what": "LSTM language model with time-major layout: the logits (T, B, V) are flattened time-first but the targets (B, T) are flattened batch-first, so nearly every prediction is compared with the token of another sequence and place."})


class RNNLM(nn.Module):
    def __init__(self, vocab, emb=32, hidden=64):
        super().__init__()
        self.encoder = nn.Embedding(vocab, emb)
        self.rnn = nn.LSTM(emb, hidden)
        self.decoder = nn.Linear(hidden, vocab)

    def forward(self, x):
        output, _ = self.rnn(self.encoder(x))
        return self.decoder(output)


def _lstm_target_order(good):
    seed_all(15)
    vocab = 20
    train, held = markov_text(800, 25, vocab, lang=5), markov_text(100, 25, vocab, lang=5)
    model = RNNLM(vocab)
    criterion = nn.CrossEntropyLoss()
    loader = itertools.cycle(DataLoader(TensorDataset(train[:, :-1], train[:, 1:]), batch_size=16,
                                        shuffle=True, drop_last=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step():
        model.train()
        x, y = next(loader)
        logits = model(x.t())
        target = y.t() if good else y
        loss = criterion(logits.reshape(-1, vocab), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        model.eval()
        return lm_nll(lambda x: model(x.t()).transpose(0, 1), held)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def lstm_target_order_bad():
    return _lstm_target_order(False)


def lstm_target_order_good():
    return _lstm_target_order(True)


# ------------------------------------------------------------------ case 6
CASES.append({"name": "moe_experts_list", "what": "Mixture-of-experts GPT: the experts are kept in a plain Python list, not an nn.ModuleList, so they are missing from model.parameters() and from the optimizer; only router, attention and embeddings learn."})


class MoE(nn.Module):
    def __init__(self, d, n_experts=4, top_k=2, container=nn.ModuleList):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(d, n_experts, bias=False)
        self.experts = container([nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
                                  for _ in range(n_experts)])

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights, chosen = torch.softmax(self.router(x), -1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == e)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return out.view(shape)


def _moe_experts_list(good):
    seed_all(16)
    vocab = 12
    train, held = pair_text(2000, 25, vocab), pair_text(200, 25, vocab)
    container = nn.ModuleList if good else list
    model = GPT(vocab, 24, d=32, n_head=4, n_layer=1, mlp_cls=lambda d: MoE(d, container=container))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)

    def step():
        model.train()
        x, y = get_batch(train, 16)
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        model.eval()
        return lm_nll(lambda x: model(x)[0], held, skip=1)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def moe_experts_list_bad():
    return _moe_experts_list(False)


def moe_experts_list_good():
    return _moe_experts_list(True)


# ------------------------------------------------------------------ case 7
CASES.append({"name": "lora_both_zero", "what": "Hand-written LoRA: both lora_A and lora_B are initialised with zeros, so the gradient of each is exactly zero and the adapters never move."})


class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16, init_a=None):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.zeros(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r
        if init_a is not None:
            init_a(self.lora_A)

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.t() @ self.lora_B.t()) * self.scaling


def add_lora(module, init_a):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child, init_a=init_a))
        else:
            add_lora(child, init_a)


def _lora_both_zero(good):
    seed_all(18)
    vocab = 20
    model = pretrain(GPT(vocab, 24, d=48), markov_text(500, 25, vocab, lang=8), 80)
    train, held = markov_text(1000, 25, vocab, lang=9), markov_text(128, 25, vocab, lang=9)
    for p in model.parameters():
        p.requires_grad = False
    init_a = (lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5))) if good else nn.init.zeros_
    add_lora(model, init_a)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)

    def step():
        model.train()
        x, y = get_batch(train, 16)
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        model.eval()
        return lm_nll(lambda x: model(x)[0], held)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def lora_both_zero_bad():
    return _lora_both_zero(False)


def lora_both_zero_good():
    return _lora_both_zero(True)


# ------------------------------------------------------------------ case 8
CASES.append({"name": "lora_checkpoint_no_grad", "what": "peft LoRA on a GPT with reentrant gradient checkpointing and a frozen embedding: nothing makes the embedding output require a gradient (the enable_input_require_grads hook is missing), so the checkpointed blocks return detached results, the adapters get no gradient and only the head learns."})


class CheckpointedGPT(GPT):
    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx)
        x = x + self.wpe(pos)
        for block in self.h:
            if self.training:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def _lora_checkpoint_no_grad(good):
    seed_all(19)
    vocab = 16
    base = CheckpointedGPT(vocab, 24, d=48, n_layer=1)
    pretrain(base, lag_text(1000, 25, vocab, lag=3, lang=4), 150, lr=5e-3)
    train, held = lag_text(1500, 25, vocab, lang=4), lag_text(200, 25, vocab, lang=4)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0,
                                            target_modules=["c_attn", "c_fc", "c_proj"], modules_to_save=["lm_head"]))
    if good:
        base.wte.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)

    def step():
        model.train()
        x, y = get_batch(train, 16)
        _, loss = model(x, targets=y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate():
        model.eval()
        return lm_nll(lambda x: model(x)[0], held, skip=1)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def lora_checkpoint_no_grad_bad():
    return _lora_checkpoint_no_grad(False)


def lora_checkpoint_no_grad_good():
    return _lora_checkpoint_no_grad(True)


# ------------------------------------------------------------------ case 9
CASES.append({"name": "accum_zero_inside", "what": "Gradient accumulation: optimizer.zero_grad() stands inside the micro-batch loop, so only the last of the four micro-batches (already divided by four) reaches the optimizer step."})


def _accum_zero_inside(good):
    seed_all(20)
    vocab, accum = 16, 4
    train, held = lag_text(1500, 25, vocab, lag=2, lang=3), lag_text(128, 25, vocab, lag=2, lang=3)
    model = GPT(vocab, 24, d=32, n_layer=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def step():
        model.train()
        if good:
            optimizer.zero_grad()
        for micro_step in range(accum):
            if not good:
                optimizer.zero_grad()
            x, y = get_batch(train, 4)
            _, loss = model(x, y)
            loss = loss / accum
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        model.eval()
        return lm_nll(lambda x: model(x)[0], held)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def accum_zero_inside_bad():
    return _accum_zero_inside(False)


def accum_zero_inside_good():
    return _accum_zero_inside(True)


# ------------------------------------------------------------------ case 10
CASES.append({"name": "score_broadcast", "what": "BERT regression of quality scores: predictions have shape (B, 1), targets (B,), and MSELoss broadcasts them to (B, B); the model can only learn the mean score."})


class ScoreModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(config.hidden_size, 1)

    def forward(self, ids):
        hidden = self.bert(ids).last_hidden_state
        return self.head(hidden.mean(1))


def _score_broadcast(good):
    seed_all(21)
    vocab = 30
    value = torch.randn(vocab, generator=torch.Generator().manual_seed(5))
    x = torch.randint(vocab, (1600, 12))
    y = value[x].mean(1)
    y = (y - y.mean()) / y.std()
    x = x + 1
    model = ScoreModel(BertConfig(vocab_size=vocab + 1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                                  intermediate_size=96, max_position_embeddings=16, hidden_dropout_prob=0.0,
                                  attention_probs_dropout_prob=0.0))
    loader = itertools.cycle(DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=32, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()

    def step():
        model.train()
        ids, score = next(loader)
        pred = model(ids)
        if good:
            pred = pred.squeeze(-1)
        loss = criterion(pred, score)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        return (model(x[1400:]).flatten() - y[1400:]).pow(2).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def score_broadcast_bad():
    return _score_broadcast(False)


def score_broadcast_good():
    return _score_broadcast(True)


# ------------------------------------------------------------------ case 11
CASES.append({"name": "softmax_before_ce", "what": "GRU text classifier: forward() already returns softmax probabilities and nn.CrossEntropyLoss applies log_softmax again, so the gradients are tiny and the loss cannot fall below about log(K-1+e)-1; learning is far too slow."})


class GRUClassifier(nn.Module):
    def __init__(self, vocab, n_class, probs, emb=32, hidden=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb)
        self.gru = nn.GRU(emb, hidden, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, n_class)
        self.probs = probs

    def forward(self, x):
        out, _ = self.gru(self.emb(x))
        logits = self.fc(out.mean(1))
        return F.softmax(logits, dim=1) if self.probs else logits


def _softmax_before_ce(good):
    seed_all(22)
    vocab, n_class = 60, 20
    topic = torch.randint(n_class, (2200,))
    words = torch.randint(vocab, (2200, 14))
    own = topic[:, None] * 3 + torch.randint(3, (2200, 14))
    x = torch.where(torch.rand(2200, 14) < 0.3, own, words)
    model = GRUClassifier(vocab, n_class, probs=not good)
    criterion = nn.CrossEntropyLoss()
    loader = itertools.cycle(DataLoader(TensorDataset(x[:1800], topic[:1800]), batch_size=32, shuffle=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step():
        model.train()
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        return (model(x[1800:]).argmax(1) != topic[1800:]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def softmax_before_ce_bad():
    return _softmax_before_ce(False)


def softmax_before_ce_good():
    return _softmax_before_ce(True)


# ------------------------------------------------------------------ case 12
CASES.append({"name": "grpo_group_view", "what": "GRPO: the completions are laid out prompt by prompt (repeat_interleave), but the rewards are reshaped as (G, B) before the group mean and std are taken, so every 'group' mixes different prompts and the advantages are dominated by which prompt it was."})


def _grpo_group_view(good):
    seed_all(23)
    vocab, n_prompt, B, G, L = 12, 24, 8, 6, 2
    g = torch.Generator().manual_seed(9)
    answers = torch.randint(vocab, (n_prompt, L), generator=g)
    base_score = torch.randn(n_prompt, generator=g) * 2.0
    policy = GPT2LMHeadModel(GPT2Config(vocab_size=vocab + n_prompt, n_positions=8, n_embd=32, n_layer=1, n_head=2,
                                        bos_token_id=0, eos_token_id=0,
                                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)

    @torch.no_grad()
    def rollout(prompt):
        seq = (prompt + vocab)[:, None]
        for _ in range(L):
            logits = policy(seq).logits[:, -1, :vocab]
            seq = torch.cat([seq, torch.multinomial(logits.softmax(-1), 1)], 1)
        return seq

    def score(prompt, completion):
        return (completion == answers[prompt]).float().mean(1) + base_score[prompt]

    def step():
        prompts = torch.randint(n_prompt, (B,))
        repeated = prompts.repeat_interleave(G)
        seq = rollout(repeated)
        rewards = score(repeated, seq[:, 1:])
        if good:
            grouped = rewards.view(B, G)
            adv = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        else:
            grouped = rewards.view(G, B)
            adv = (grouped - grouped.mean(0, keepdim=True)) / (grouped.std(0, keepdim=True) + 1e-4)
        adv = adv.view(-1, 1)
        logp = policy(seq[:, :-1]).logits[..., :vocab].log_softmax(-1)
        logp = logp.gather(2, seq[:, 1:, None]).squeeze(2)
        ratio = torch.exp(logp - logp.detach())
        loss = -(ratio * adv).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        prompts = torch.arange(n_prompt)
        seq = (prompts + vocab)[:, None]
        first = policy(seq).logits[:, -1, :vocab].softmax(-1)
        p1 = first.gather(1, answers[:, :1]).mean()
        hit = 0.0
        for tok in range(vocab):
            s = torch.cat([seq, torch.full((n_prompt, 1), tok)], 1)
            second = policy(s).logits[:, -1, :vocab].softmax(-1).gather(1, answers[:, 1:])
            hit = hit + (first[:, tok:tok + 1] * second).mean()
        return 1.0 - 0.5 * (p1 + hit).item()

    return {"model": policy, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def grpo_group_view_bad():
    return _grpo_group_view(False)


def grpo_group_view_good():
    return _grpo_group_view(True)


# ------------------------------------------------------------------ case 13
CASES.append({"name": "lambda_lr_absolute", "what": "Llama pre-training: the function given to LambdaLR returns the learning rate itself (warm-up and cosine of max_lr) instead of a factor, so the rate in use is max_lr squared and nothing is learnt."})


class LlamaTrainer:
    def __init__(self, model, data, max_lr, factor, warmup=10, max_iters=600):
        self.model = model
        self.max_lr, self.warmup, self.max_iters = max_lr, warmup, max_iters
        self.peak = 1.0 if factor else max_lr
        self.loader = itertools.cycle(DataLoader(TensorDataset(data), batch_size=16, shuffle=True))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.get_lr)

    def get_lr(self, it):
        if it < self.warmup:
            return self.peak * (it + 1) / self.warmup
        t = min(1.0, (it - self.warmup) / (self.max_iters - self.warmup))
        return self.peak * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * t)))

    def train_step(self):
        self.model.train()
        (ids,) = next(self.loader)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def _lambda_lr_absolute(good):
    seed_all(24)
    vocab = 20
    train, held = lag_text(800, 24, vocab), lag_text(128, 24, vocab)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=4,
                                         max_position_embeddings=64, pad_token_id=None,
                                         bos_token_id=0, eos_token_id=0))
    trainer = LlamaTrainer(model, train, max_lr=3e-3, factor=good)

    def evaluate():
        model.eval()
        return lm_nll(lambda x: model(x).logits, held, skip=1)

    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.train_step, "steps": 20,
            "evaluate": evaluate}


def lambda_lr_absolute_bad():
    return _lambda_lr_absolute(False)


def lambda_lr_absolute_good():
    return _lambda_lr_absolute(True)


# ------------------------------------------------------------------ case 14
CASES.append({"name": "clip_after_step", "what": "LSTM language model in the style of the PyTorch word_language_model example (SGD with a large rate): clip_grad_norm_ is called after optimizer.step(), so the steps use unclipped gradients and training thrashes."})


class WordLM(nn.Module):
    def __init__(self, vocab, emb=32, hidden=48, layers=2):
        super().__init__()
        self.encoder = nn.Embedding(vocab, emb)
        self.rnn = nn.LSTM(emb, hidden, layers)
        self.decoder = nn.Linear(hidden, vocab)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x, hidden=None):
        out, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(out), hidden


def _clip_after_step(good):
    seed_all(25)
    vocab, bptt, bsz = 16, 20, 16
    stream = markov_text(bsz, 4001, vocab, lang=12).t().contiguous()
    held = markov_text(64, 30, vocab, lang=12)
    model = WordLM(vocab)
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    state = {"pos": 0, "hidden": None}

    def step():
        model.train()
        if state["pos"] + bptt + 1 > stream.size(0):
            state["pos"], state["hidden"] = 0, None
        x = stream[state["pos"]:state["pos"] + bptt]
        y = stream[state["pos"] + 1:state["pos"] + bptt + 1]
        hidden = state["hidden"]
        if hidden is not None:
            hidden = tuple(h.detach() for h in hidden)
        optimizer.zero_grad()
        logits, state["hidden"] = model(x, hidden)
        loss = F.cross_entropy(logits.reshape(-1, vocab), y.reshape(-1))
        loss.backward()
        if good:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
        else:
            optimizer.step()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        state["pos"] += bptt

    def evaluate():
        model.eval()
        return lm_nll(lambda x: model(x.t())[0].transpose(0, 1), held)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def clip_after_step_bad():
    return _clip_after_step(False)


def clip_after_step_good():
    return _clip_after_step(True)


# ------------------------------------------------------------------ case 15
CASES.append({"name": "never_zeroed", "what": "BART denoising/translation loop: zero_grad() is called once at the start of an epoch and never in the loop, so each step uses the sum of all gradients since the start of the epoch."})


def _never_zeroed(good):
    seed_all(26)
    vocab, n = 14, 6
    perm = torch.randperm(vocab)
    src = torch.randint(vocab, (2400, n))
    tgt = perm[src]
    bos, eos = torch.zeros(2400, 1, dtype=torch.long), torch.full((2400, 1), 2)
    src, tgt = torch.cat([bos, src + 3, eos], 1), torch.cat([bos, tgt + 3, eos], 1)
    model = BartForConditionalGeneration(BartConfig(
        vocab_size=vocab + 3, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=16,
        dropout=0.0, attention_dropout=0.0, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=2))
    loader = DataLoader(TensorDataset(src[:2000], tgt[:2000]), batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def epochs():
        while True:
            model.train()
            optimizer.zero_grad()
            for input_ids, labels in loader:
                yield model(input_ids=input_ids, labels=labels).loss

    losses = epochs()

    def step():
        model.train()
        loss = next(losses)
        if good:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        return model(input_ids=src[2000:], labels=tgt[2000:]).loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def never_zeroed_bad():
    return _never_zeroed(False)


def never_zeroed_good():
    return _never_zeroed(True)


# ------------------------------------------------------------------ case 16
CASES.append({"name": "heads_merge_no_transpose", "what": "nanoGPT-like attention: the heads are merged with .contiguous().view(B, T, C) without the transpose(1, 2) back, which mixes up positions and heads (and lets positions see the future)."})


def _heads_merge_no_transpose(good):
    seed_all(27)
    vocab = 16
    train, held = lag_text(1500, 25, vocab, lag=2, lang=2), lag_text(300, 25, vocab, lag=2, lang=2)
    model = GPT(vocab, 24, d=48, n_head=4, n_layer=2, merge="transpose" if good else "view")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step():
        model.train()
        x, y = get_batch(train, 16)
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        total = 0.0
        lengths = [6, 10, 14, 18, 22]
        for n in lengths:
            logits, _ = model(held[:, :n])
            total += F.cross_entropy(logits[:, -1], held[:, n]).item()
        return total / len(lengths)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def heads_merge_no_transpose_bad():
    return _heads_merge_no_transpose(False)


def heads_merge_no_transpose_good():
    return _heads_merge_no_transpose(True)


# ------------------------------------------------------------------ case 17
CASES.append({"name": "pe_batch_dim", "what": "Encoder tagger with batch_first=True but the tutorial's PositionalEncoding for (T, B, E): pe[:x.size(0)] is indexed by the batch, so all positions of one sequence get the same vector and the model cannot see order."})


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=64, batch_first=False):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        if batch_first:
            pe = pe.transpose(0, 1)
        self.register_buffer("pe", pe)
        self.dim = 1 if batch_first else 0

    def forward(self, x):
        return x + self.pe.narrow(self.dim, 0, x.size(self.dim))


class Tagger(nn.Module):
    def __init__(self, vocab, n_tags, pos, d=48):
        super().__init__()
        self.d = d
        self.embed = nn.Embedding(vocab, d)
        nn.init.normal_(self.embed.weight, 0.0, d ** -0.5)
        self.pos = pos
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d, n_tags)

    def forward(self, x):
        return self.out(self.encoder(self.pos(self.embed(x) * math.sqrt(self.d))))


def _pe_batch_dim(good):
    seed_all(28)
    vocab, T = 8, 10
    x = torch.randint(vocab, (2400, T))
    tags = torch.cat([x[:, :1], x[:, :-1]], 1)
    model = Tagger(vocab, vocab, PositionalEncoding(48, batch_first=good))
    loader = itertools.cycle(DataLoader(TensorDataset(x[:2000], tags[:2000]), batch_size=32, shuffle=True,
                                        drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        model.train()
        xb, yb = next(loader)
        loss = F.cross_entropy(model(xb).flatten(0, 1), yb.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        errors = [(model(xb).argmax(-1) != yb).float().mean().item()
                 for xb, yb in zip(x[2000:2384].split(32), tags[2000:2384].split(32))]
        return sum(errors) / len(errors)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def pe_batch_dim_bad():
    return _pe_batch_dim(False)


def pe_batch_dim_good():
    return _pe_batch_dim(True)


# ------------------------------------------------------------------ case 18
CASES.append({"name": "padding_mask_inverted", "what": "nn.TransformerEncoder classifier with CLS token: the Hugging Face style mask (1 = real token) is passed as src_key_padding_mask, where True means ignore, so attention sees only the padding and CLS learns nothing of the text."})


class SentenceEncoder(nn.Module):
    def __init__(self, vocab, n_class, d=48, max_len=24):
        super().__init__()
        self.tok = nn.Embedding(vocab, d, padding_idx=0)
        self.pos = nn.Embedding(max_len, d)
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(d), enable_nested_tensor=False)
        self.cls = nn.Linear(d, n_class)

    def forward(self, ids, mask):
        h = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        h = self.encoder(h, src_key_padding_mask=mask)
        return self.cls(h[:, 0])


def _padding_mask_inverted(good):
    seed_all(29)
    vocab, n_class, max_len = 32, 6, 20
    samples = []
    for _ in range(2400):
        label = random.randrange(n_class)
        n = random.randint(6, max_len - 3)
        words = [2 + (label * 5 + random.randrange(5) if random.random() < 0.5 else random.randrange(30))
                 for _ in range(n)]
        samples.append(([1] + words, label))

    def collate(batch):
        ids = torch.zeros(len(batch), max_len, dtype=torch.long)
        mask = torch.zeros(len(batch), max_len, dtype=torch.bool)
        for i, (words, _) in enumerate(batch):
            ids[i, :len(words)] = torch.tensor(words)
            mask[i, :len(words)] = True
        if good:
            mask = ~mask
        return ids, mask, torch.tensor([label for _, label in batch])

    model = SentenceEncoder(vocab, n_class)
    loader = itertools.cycle(DataLoader(samples[:2000], batch_size=32, shuffle=True, collate_fn=collate))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        model.train()
        ids, mask, y = next(loader)
        loss = F.cross_entropy(model(ids, mask), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.train(False)
        ids, mask, y = collate(samples[2000:])
        return (model(ids, mask).argmax(-1) != y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def padding_mask_inverted_bad():
    return _padding_mask_inverted(False)


def padding_mask_inverted_good():
    return _padding_mask_inverted(True)


# ------------------------------------------------------------------ case 19
CASES.append({"name": "teacher_learns_too", "what": "Distillation: the teacher is a sub-module of the Distiller and is not frozen, so the KL loss also trains the teacher, which drifts towards the untrained student; the student ends far from the real teacher and the data."})


class Distiller(nn.Module):
    def __init__(self, teacher, student, temperature=2.0, freeze=True):
        super().__init__()
        self.teacher = teacher
        self.student = student
        self.T = temperature
        if freeze:
            self.teacher.requires_grad_(False)

    def forward(self, x):
        t_logits, _ = self.teacher(x)
        s_logits, _ = self.student(x)
        return F.kl_div(F.log_softmax(s_logits / self.T, -1).flatten(0, 1),
                        F.softmax(t_logits / self.T, -1).flatten(0, 1),
                        reduction="batchmean") * self.T ** 2


def _teacher_learns_too(good):
    seed_all(31)
    vocab = 20
    train, held = markov_text(800, 25, vocab, lang=14), markov_text(128, 25, vocab, lang=14)
    teacher = pretrain(GPT(vocab, 24, d=48, n_layer=1), train, 150, lr=5e-3)
    student = GPT(vocab, 24, d=24, n_head=2, n_layer=1)
    distiller = Distiller(teacher, student, freeze=good)
    optimizer = torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=3e-3)

    def step():
        student.train()
        teacher.eval()
        x, _ = get_batch(train, 16)
        loss = distiller(x)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(distiller.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        student.eval()
        return lm_nll(lambda x: student(x)[0], held)

    return {"model": distiller, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def teacher_learns_too_bad():
    return _teacher_learns_too(False)


def teacher_learns_too_good():
    return _teacher_learns_too(True)


# ------------------------------------------------------------------ case 20
CASES.append({"name": "dpo_ref_is_policy", "what": "DPO: the reference model is the policy itself (no deepcopy), so the log-ratios are always zero, the loss stays at log 2 and its gradient never saturates; the policy is pushed without bound and the likelihood of good answers collapses."})


def sequence_logps(model, ids, prompt_len):
    logits = model(ids).logits[:, :-1]
    logp = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    return logp[:, prompt_len - 1:].sum(-1)


def _dpo_ref_is_policy(good):
    seed_all(32)
    vocab, P = 16, 4
    policy = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=16, n_embd=32, n_layer=1, n_head=4,
                                        bos_token_id=0, eos_token_id=0,
                                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    text = markov_text(800, 10, vocab, lang=15, sharp=2.0)
    sft = torch.optim.AdamW(policy.parameters(), lr=5e-3)
    for _ in range(100):
        ids = text[torch.randint(800, (16,))]
        loss = policy(ids, labels=ids).loss
        sft.zero_grad()
        loss.backward()
        sft.step()
    policy.zero_grad()

    def pairs(n):
        pool = markov_text(2 * n, 10, vocab, lang=15, sharp=2.0)
        prompt, a, b = pool[:n, :P], pool[:n, P:], pool[n:, P:]
        taste = (a % 2 == 0).sum(1) - (b % 2 == 0).sum(1) + torch.randn(n)
        first = (taste > 0)[:, None]
        chosen, rejected = torch.where(first, a, b), torch.where(first, b, a)
        return torch.cat([prompt, chosen], 1), torch.cat([prompt, rejected], 1)

    chosen, rejected = pairs(1000)
    held_c, held_r = pairs(200)
    start = copy.deepcopy(policy).eval().requires_grad_(False)
    ref = copy.deepcopy(policy).eval().requires_grad_(False) if good else policy
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    loader = itertools.cycle(DataLoader(TensorDataset(chosen, rejected), batch_size=16, shuffle=True))
    beta = 0.2

    def dpo_loss(reference, c, r):
        pi = sequence_logps(policy, c, P) - sequence_logps(policy, r, P)
        with torch.no_grad():
            base = sequence_logps(reference, c, P) - sequence_logps(reference, r, P)
        return -F.logsigmoid(beta * (pi - base)).mean()

    def step():
        policy.train()
        c, r = next(loader)
        loss = dpo_loss(ref, c, r)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        policy.eval()
        return dpo_loss(start, held_c, held_r).item()

    return {"model": policy, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def dpo_ref_is_policy_bad():
    return _dpo_ref_is_policy(False)


def dpo_ref_is_policy_good():
    return _dpo_ref_is_policy(True)


# ------------------------------------------------------------------ case 21
CASES.append({"name": "eval_never_back", "what": "BERT classification on few examples: the validation inside the training class calls model.eval() and nothing calls model.train() again, so all training runs without dropout and overfits."})


class Finetuner:
    def __init__(self, model, train_set, val_set, lr, back):
        self.model = model
        self.val_set = val_set
        self.loader = itertools.cycle(DataLoader(train_set, batch_size=16, shuffle=True))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
        self.back = back
        self.model.train()
        self.best = self.validate()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        x, y = self.val_set
        loss = self.model(input_ids=x, labels=y).loss.item()
        if self.back:
            self.model.train()
        return loss

    def step(self, i):
        if i > 0 and i % 50 == 0:
            self.best = min(self.best, self.validate())
        x, y = next(self.loader)
        loss = self.model(input_ids=x, labels=y).loss
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def _eval_never_back(good):
    seed_all(33)
    vocab, n_class = 40, 4

    def make(n):
        y = torch.randint(n_class, (n,))
        own = y[:, None] * 10 + torch.randint(10, (n, 12))
        x = torch.where(torch.rand(n, 12) < 0.4, own, torch.randint(vocab, (n, 12)))
        return x + 1, y

    train, val, test = make(200), make(64), make(500)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=vocab + 1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=16, num_labels=n_class, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.1))
    tuner = Finetuner(model, TensorDataset(*train), val, lr=5e-4, back=good)

    @torch.no_grad()
    def evaluate():
        was = model.training
        model.eval()
        loss = model(input_ids=test[0], labels=test[1]).loss.item()
        model.train(was)
        return loss

    return {"model": model, "optimizer": tuner.optimizer, "step": tuner.step, "steps": 20, "evaluate": evaluate}


def eval_never_back_bad():
    return _eval_never_back(False)


def eval_never_back_good():
    return _eval_never_back(True)


# ------------------------------------------------------------------ case 22
CASES.append({"name": "pure_bf16_adamw", "what": "Low-precision fine-tuning of a pre-trained GPT: the whole model is cast to bfloat16 (model.to(torch.bfloat16)) and AdamW updates bf16 weights with a small rate, so most updates are rounded away; the mended one keeps fp32 weights and uses autocast."})


def _pure_bf16_adamw(good):
    seed_all(34)
    vocab = 20
    model = pretrain(GPT(vocab, 24, d=48, n_layer=1), markov_text(500, 25, vocab, lang=15), 200, lr=5e-3)
    train, held = markov_text(800, 25, vocab, lang=16), markov_text(128, 25, vocab, lang=16)
    if not good:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)

    def step():
        model.train()
        x, y = get_batch(train, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=good):
            _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        model.eval()
        return lm_nll(lambda x: model(x)[0].float(), held)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def pure_bf16_adamw_bad():
    return _pure_bf16_adamw(False)


def pure_bf16_adamw_good():
    return _pure_bf16_adamw(True)


# ------------------------------------------------------------------ case 23
CASES.append({"name": "clip_before_unscale", "what": "GradScaler: clip_grad_norm_ is called on the scaled gradients (no scaler.unscale_ before), so after unscaling in scaler.step the gradient has norm 1/65536 and the model hardly moves."})


def _clip_before_unscale(good):
    seed_all(35)
    vocab = 16
    train, held = markov_text(800, 25, vocab, lang=17), markov_text(128, 25, vocab, lang=17)
    model = GPT(vocab, 24, d=32, n_layer=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)

    def step():
        model.train()
        x, y = get_batch(train, 16)
        with torch.autocast("cpu", dtype=torch.float16):
            _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        if good:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    def evaluate():
        model.eval()
        return lm_nll(lambda x: model(x)[0], held)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def clip_before_unscale_bad():
    return _clip_before_unscale(False)


def clip_before_unscale_good():
    return _clip_before_unscale(True)


# ------------------------------------------------------------------ case 24
CASES.append({"name": "uint8_token_ids", "what": "Token ids of a vocabulary of 320 are stored as uint8 (as in a packed data file), so all ids above 255 wrap round to small ids: these tokens are never trained and other tokens get false contexts."})


class PackedTokens:
    def __init__(self, rows, dtype):
        self.rows = rows.to(dtype)

    def batch(self, batch_size):
        ix = torch.randint(len(self.rows), (batch_size,))
        rows = self.rows[ix].long()
        return rows[:, :-1], rows[:, 1:]


def _uint8_token_ids(good):
    seed_all(36)
    vocab = 320
    train = markov_text(1500, 25, vocab, lang=18, sharp=5.0)
    held = markov_text(200, 25, vocab, lang=18, sharp=5.0)
    corpus = PackedTokens(train, torch.int16 if good else torch.uint8)
    model = GPT(vocab, 24, d=48, n_layer=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def step():
        model.train()
        x, y = corpus.batch(32)
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        model.eval()
        return lm_nll(lambda x: model(x)[0], held)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def uint8_token_ids_bad():
    return _uint8_token_ids(False)


def uint8_token_ids_good():
    return _uint8_token_ids(True)
