"""A collection of small language-model training scripts.

Every script builds its model, its data and its optimizer and hands back one
training step and a held-out evaluation.
"""
import copy
import math
import os
import random
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)

SEED_OFFSET = int(os.environ.get("SEED_OFFSET", "0"))


def set_seed(seed):
    random.seed(seed + SEED_OFFSET)
    torch.manual_seed(seed + SEED_OFFSET)


def forever(loader):
    while True:
        for batch in loader:
            yield batch


# ---------------------------------------------------------------------------
# synthetic text
# ---------------------------------------------------------------------------

class Source:
    """A random n-gram language: every context has a few weighted successors."""

    def __init__(self, vocab, order=1, seed=0, probs=(0.7, 0.2, 0.1), first=0):
        g = torch.Generator().manual_seed(seed)
        self.vocab, self.order, self.first = vocab, order, first
        n_ctx = vocab ** order
        self.table = torch.stack([torch.randperm(vocab, generator=g)[:len(probs)] for _ in range(n_ctx)])
        self.probs = torch.tensor(probs)

    def sample(self, n, length, seed):
        g = torch.Generator().manual_seed(seed)
        seq = [torch.randint(0, self.vocab, (n,), generator=g) for _ in range(self.order)]
        while len(seq) < length:
            ctx = seq[-1] if self.order == 1 else seq[-2] * self.vocab + seq[-1]
            pick = torch.multinomial(self.probs, n, replacement=True, generator=g)
            seq.append(self.table[ctx, pick])
        return torch.stack(seq[:length], 1) + self.first


PAD, CLS, FLIP = 0, 1, 2
POSITIVE, NEGATIVE = list(range(3, 9)), list(range(9, 15))
REVIEW_VOCAB = 32


def make_reviews(n, seed, flips=True):
    """Short reviews; the sarcasm marker turns the meaning of the whole text round."""
    rng = random.Random(seed)
    texts, labels = [], []
    for _ in range(n):
        k = rng.choice([1, 3])
        words = [rng.choice(POSITIVE if rng.random() < 0.5 else NEGATIVE) for _ in range(k)]
        y = int(sum(1 if w in POSITIVE else -1 for w in words) > 0)
        words += [rng.randrange(15, REVIEW_VOCAB) for _ in range(rng.randint(2, 8))]
        if flips and rng.random() < 0.5:
            words.append(FLIP)
            y = 1 - y
        rng.shuffle(words)
        texts.append([CLS] + words)
        labels.append(y)
    return texts, labels


def pad_batch(texts, value=PAD):
    return pad_sequence([torch.tensor(t) for t in texts], batch_first=True, padding_value=value)


# ---------------------------------------------------------------------------
# models
# ---------------------------------------------------------------------------

@dataclass
class GPTConfig:
    vocab_size: int = 32
    block_size: int = 32
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.dropout

    def forward(self, x, attn_mask=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=attn_mask is None,
                                           dropout_p=self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config, attn=None, mlp=None):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = attn if attn is not None else CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = mlp if mlp is not None else MLP(config)

    def forward(self, x, attn_mask=None):
        x = x + self.attn(self.ln_1(x), attn_mask)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config, make_block=None):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([make_block(config) if make_block else Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def features(self, idx, pos=None, attn_mask=None):
        if pos is None:
            pos = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x, attn_mask)
        return self.ln_f(x)

    def forward(self, idx, targets=None, pos=None, attn_mask=None):
        logits = self.lm_head(self.features(idx, pos, attn_mask))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-100)
        return logits, loss


class EncoderLayer(nn.Module):
    def __init__(self, d_model, n_head, d_ff):
        super().__init__()
        self.n_head = n_head
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_model, d_model)
        self.v = nn.Linear(d_model, d_model)
        self.o = nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x, mask):
        B, T, C = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(B, T, self.n_head, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        out = scores.softmax(dim=-1) @ v
        x = x + self.o(out.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TextEncoder(nn.Module):
    def __init__(self, vocab=REVIEW_VOCAB, d_model=48, n_layer=2, n_head=4, max_len=13):
        super().__init__()
        self.tok = nn.Embedding(vocab, d_model, padding_idx=PAD)
        self.pos = nn.Embedding(max_len, d_model)
        self.layers = nn.ModuleList([EncoderLayer(d_model, n_head, 4 * d_model) for _ in range(n_layer)])
        self.norm = nn.LayerNorm(d_model)

    def forward(self, ids):
        mask = ids != PAD
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x) * mask[..., None]
        return x.sum(1) / mask.sum(1, keepdim=True)


@torch.no_grad()
def lm_nll(model, seqs):
    """Mean next-token negative log-likelihood on held-out text."""
    was = model.training
    model.eval()
    logits, _ = model(seqs[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), seqs[:, 1:].flatten()).item()
    model.train(was)
    return loss


@torch.no_grad()
def prefix_nll(model, seqs, first=2):
    """The same, the way generation sees it: only the prefix is given."""
    was = model.training
    model.eval()
    total = []
    for t in range(first, seqs.size(1), 3):
        logits = model(seqs[:, :t])[0][:, -1]
        total.append(F.cross_entropy(logits, seqs[:, t]).item())
    model.train(was)
    return sum(total) / len(total)


def pretrain(model, source, steps, lr=3e-3, block=32, batch=16, seed=900):
    data = source.sample(steps * batch, block + 1, seed)
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for ids in data.split(batch):
        _, loss = model(ids[:, :-1], ids[:, 1:])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return model


@torch.no_grad()
def kl_to_teacher(student, teacher, seqs):
    modes = student.training, teacher.training
    student.eval()
    teacher.eval()
    s = student(seqs)[0].log_softmax(-1)
    t = teacher(seqs)[0].log_softmax(-1)
    student.train(modes[0])
    teacher.train(modes[1])
    return (t.exp() * (t - s)).sum(-1).mean().item()


class Windows(Dataset):
    """nanoGPT-like blocks (x, y) out of one long stream."""

    def __init__(self, data, block):
        self.data, self.block = data, block

    def __len__(self):
        return (len(self.data) - 1) // self.block

    def __getitem__(self, i):
        s = i * self.block
        return self.data[s:s + self.block], self.data[s + 1:s + 1 + self.block]


CASES = []


def case(name, what):
    CASES.append({"name": name, "what": what})


# ---------------------------------------------------------------------------
case("sft_stop_token",
     "The pad token is the EOS token and the collator sets every label equal to the pad id to -100, so the real "
     "EOS after each answer is never a target. The model never learns to stop.")


def _sft_stop_token(good):
    set_seed(11)
    EOS, BOS, SEP, VOCAB = 0, 1, 2, 32
    pad_id = EOS

    def make(n, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(n):
            d = rng.randint(0, 5)
            prompt = [BOS] + [rng.randrange(12, VOCAB) for _ in range(rng.randint(1, 4))] + [3 + d, SEP]
            answer = [3 + k for k in range(d, -1, -1)]
            rows.append((prompt, answer + [EOS]))
        return rows

    def collate(rows):
        width = max(len(p) + len(a) for p, a in rows)
        ids = torch.full((len(rows), width), pad_id)
        labels = torch.full((len(rows), width), -100)
        for i, (p, a) in enumerate(rows):
            ids[i, :len(p) + len(a)] = torch.tensor(p + a)
            labels[i, len(p):len(p) + len(a)] = torch.tensor(a)
        if not good:
            labels[labels == pad_id] = -100
        return ids, labels

    loader = DataLoader(make(1500, 1), batch_size=16, shuffle=True, collate_fn=collate)
    batches = forever(loader)
    model = GPT(GPTConfig(vocab_size=VOCAB, block_size=24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        ids, labels = next(batches)
        _, loss = model(ids[:, :-1], labels[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    test = make(60, 2)

    @torch.no_grad()
    def evaluate():
        model.eval()
        miss = 0
        for prompt, answer in test:
            ids, out = list(prompt), []
            for _ in range(8):
                nxt = model(torch.tensor([ids]))[0][0, -1].argmax().item()
                ids.append(nxt)
                out.append(nxt)
                if nxt == EOS:
                    break
            miss += out != answer
        model.train()
        return miss / len(test)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def sft_stop_token_bad():
    return _sft_stop_token(False)


def sft_stop_token_good():
    return _sft_stop_token(True)


# ---------------------------------------------------------------------------
case("mlm_labels_alias",
     "In the MLM collator labels is the same tensor as input_ids; writing [MASK] into input_ids in place also "
     "overwrites the targets, so the model learns to answer [MASK] at every masked position.")


def _mlm_labels_alias(good):
    from transformers import BertConfig, BertForMaskedLM
    set_seed(13)
    MASK, CLS_ID, V = 0, 1, 16
    source = Source(V - 2, seed=3, probs=(0.9, 0.1), first=2)

    def with_cls(seqs):
        return torch.cat([torch.full((len(seqs), 1), CLS_ID), seqs], 1)

    class MLMCollator:
        def __init__(self, p):
            self.p = p

        def __call__(self, rows):
            input_ids = torch.stack(rows)
            labels = input_ids.clone() if good else input_ids
            masked = torch.rand(input_ids.shape) < self.p
            masked &= input_ids != CLS_ID
            input_ids[masked] = MASK
            labels = labels.masked_fill(~masked, -100)
            return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}

    train = list(with_cls(source.sample(3000, 16, 1)))
    batches = forever(DataLoader(train, batch_size=16, shuffle=True, collate_fn=MLMCollator(0.15)))
    config = BertConfig(vocab_size=V, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=128, max_position_embeddings=17, type_vocab_size=1,
                        initializer_range=0.05, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=None)
    model = BertForMaskedLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        out = model(**next(batches))
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return out.loss.item()

    test = with_cls(source.sample(200, 16, 2))
    hole = (torch.rand(test.shape, generator=torch.Generator().manual_seed(7)) < 0.15) & (test != CLS_ID)

    @torch.no_grad()
    def evaluate():
        model.eval()
        pred = model(input_ids=test.masked_fill(hole, MASK)).logits.argmax(-1)
        model.train()
        return (pred[hole] != test[hole]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def mlm_labels_alias_bad():
    return _mlm_labels_alias(False)


def mlm_labels_alias_good():
    return _mlm_labels_alias(True)


# ---------------------------------------------------------------------------
case("gpt2_shifted_twice",
     "The dataset already returns y shifted by one against x, and y is passed as labels= to GPT2LMHeadModel, which "
     "shifts again. The model learns to predict the token after the next one.")


def _gpt2_shifted_twice(good):
    from transformers import GPT2Config, GPT2LMHeadModel
    set_seed(14)
    source = Source(40, seed=4)
    stream = source.sample(20, 1500, 1).flatten()
    loader = DataLoader(Windows(stream, 32), batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=48, n_layer=2, n_head=4,
                                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                       bos_token_id=None, eos_token_id=None))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))

    def step():
        x, y = next(batches)
        loss = model(input_ids=x, labels=x if good else y).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    test = source.sample(64, 33, 2)

    @torch.no_grad()
    def evaluate():
        model.eval()
        logits = model(input_ids=test[:, :-1]).logits
        model.train()
        return F.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def gpt2_shifted_twice_bad():
    return _gpt2_shifted_twice(False)


def gpt2_shifted_twice_good():
    return _gpt2_shifted_twice(True)


# ---------------------------------------------------------------------------
case("reward_pairs_interleaved",
     "The collator stacks the pairs as chosen0, rejected0, chosen1, rejected1, ... but the loss splits the rewards "
     "with chunk(2), as if all chosen came first. Pairs are compared at random and nothing is learned.")


def _reward_pairs_interleaved(good):
    set_seed(15)

    class RewardModel(nn.Module):
        def __init__(self, vocab, max_len):
            super().__init__()
            self.backbone = GPT(GPTConfig(vocab_size=vocab, block_size=max_len, n_embd=48))
            self.backbone.lm_head = nn.Identity()
            self.v_head = nn.Linear(48, 1)
            nn.init.normal_(self.v_head.weight, std=1 / math.sqrt(49))
            nn.init.zeros_(self.v_head.bias)

        def forward(self, ids, lengths):
            h = self.backbone.features(ids)
            last = h[torch.arange(len(ids)), lengths - 1]
            return self.v_head(last).squeeze(-1)

    def quality(words):
        return sum((w in POSITIVE) - (w in NEGATIVE) for w in words)

    def pairs(n, seed):
        rng = random.Random(seed)
        rows = []
        while len(rows) < n:
            prompt = [CLS] + [rng.randrange(15, REVIEW_VOCAB) for _ in range(3)]
            a, b = ([rng.randrange(3, REVIEW_VOCAB) for _ in range(rng.randint(3, 9))] for _ in range(2))
            if quality(a) != quality(b):
                a, b = (a, b) if quality(a) > quality(b) else (b, a)
                rows.append({"chosen": prompt + a, "rejected": prompt + b})
        return rows

    def collate(rows):
        texts = []
        for row in rows:
            texts.append(row["chosen"])
            texts.append(row["rejected"])
        return pad_batch(texts), torch.tensor([len(t) for t in texts])

    batches = forever(DataLoader(pairs(3000, 1), batch_size=16, shuffle=True, collate_fn=collate))
    model = RewardModel(REVIEW_VOCAB, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def step():
        ids, lengths = next(batches)
        rewards = model(ids, lengths)
        if good:
            chosen, rejected = rewards.view(-1, 2).unbind(1)
        else:
            chosen, rejected = rewards.chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    test = pairs(300, 2)

    @torch.no_grad()
    def evaluate():
        model.eval()
        scores = []
        for key in ("chosen", "rejected"):
            texts = [row[key] for row in test]
            scores.append(model(pad_batch(texts), torch.tensor([len(t) for t in texts])))
        model.train()
        return (scores[0] <= scores[1]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def reward_pairs_interleaved_bad():
    return _reward_pairs_interleaved(False)


def reward_pairs_interleaved_good():
    return _reward_pairs_interleaved(True)


# ---------------------------------------------------------------------------
case("lora_checkpoint_no_input_grads",
     "LoRA on a frozen encoder with re-entrant gradient checkpointing: the frozen embeddings give an input without "
     "requires_grad, so the checkpointed blocks are cut from the graph and the adapters get no gradient. Only the "
     "head learns.")


class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def _lora_checkpoint_no_input_grads(good):
    set_seed(16)

    class CheckpointedEncoder(TextEncoder):
        def enable_input_require_grads(self):
            self.tok.register_forward_hook(lambda module, args, output: output.requires_grad_(True))

        def forward(self, ids):
            mask = ids != PAD
            x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
            for layer in self.layers:
                if self.training:
                    x = checkpoint(layer, x, mask, use_reentrant=True)
                else:
                    x = layer(x, mask)
            x = self.norm(x) * mask[..., None]
            return x.sum(1) / mask.sum(1, keepdim=True)

    class Classifier(nn.Module):
        def __init__(self, encoder, d_model=48):
            super().__init__()
            self.encoder = encoder
            self.head = nn.Linear(d_model, 2)

        def forward(self, ids):
            return self.head(self.encoder(ids))

    def loader(texts, labels):
        return DataLoader(list(zip(texts, labels)), batch_size=16, shuffle=True,
                          collate_fn=lambda b: (pad_batch([t for t, _ in b]), torch.tensor([y for _, y in b])))

    def pretrained_encoder():
        net = Classifier(TextEncoder())
        opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
        for ids, y in loader(*make_reviews(1600, 50, flips=False)):
            opt.zero_grad()
            F.cross_entropy(net(ids), y).backward()
            opt.step()
        return net.encoder.state_dict()

    encoder = CheckpointedEncoder()
    encoder.load_state_dict(pretrained_encoder())
    for p in encoder.parameters():
        p.requires_grad = False
    for layer in encoder.layers:
        for name in ("q", "k", "v", "o", "up", "down"):
            setattr(layer, name, LoRALinear(getattr(layer, name)))
    if good:
        encoder.enable_input_require_grads()
    model = Classifier(encoder)

    batches = forever(loader(*make_reviews(3000, 1)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)

    def step():
        ids, y = next(batches)
        loss = F.cross_entropy(model(ids), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    test, test_y = make_reviews(400, 2)
    test, test_y = pad_batch(test), torch.tensor(test_y)

    @torch.no_grad()
    def evaluate():
        model.eval()
        err = (model(test).argmax(-1) != test_y).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def lora_checkpoint_no_input_grads_bad():
    return _lora_checkpoint_no_input_grads(False)


def lora_checkpoint_no_input_grads_good():
    return _lora_checkpoint_no_input_grads(True)


# ---------------------------------------------------------------------------
case("resize_after_optimizer",
     "The optimizer is built before the vocabulary is extended, which makes a new (tied) embedding matrix. The "
     "optimizer still holds the old one, so the token embeddings and the output head never change.")


def extend_vocab(model, n_new):
    """Add rows for new special tokens, keep the old ones, tie the head again."""
    old = model.wte.weight.data
    wte = nn.Embedding(old.size(0) + n_new, old.size(1))
    nn.init.normal_(wte.weight, std=0.02)
    wte.weight.data[:old.size(0)] = old
    model.wte = wte
    model.lm_head = nn.Linear(old.size(1), wte.num_embeddings, bias=False)
    model.lm_head.weight = model.wte.weight
    model.config.vocab_size = wte.num_embeddings


def _resize_after_optimizer(good):
    set_seed(17)
    V, USER, BOT = 120, 120, 121
    source = Source(V, seed=6, probs=(0.6, 0.3, 0.1))

    def chats(n, seed):
        turns = source.sample(2 * n, 15, seed)
        user = torch.cat([torch.full((n, 1), USER), turns[:n]], 1)
        bot = torch.cat([torch.full((n, 1), BOT), turns[n:]], 1)
        return torch.cat([user, bot], 1)

    model = pretrain(GPT(GPTConfig(vocab_size=V, block_size=32, n_embd=32)),
                     Source(V, seed=5, probs=(0.6, 0.3, 0.1)), 60)
    if good:
        extend_vocab(model, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    if not good:
        extend_vocab(model, 2)

    batches = forever(DataLoader(chats(2500, 1), batch_size=16, shuffle=True))

    def step():
        ids = next(batches)
        _, loss = model(ids[:, :-1], ids[:, 1:])
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    test = chats(100, 2)
    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_nll(model, test)}


def resize_after_optimizer_bad():
    return _resize_after_optimizer(False)


def resize_after_optimizer_good():
    return _resize_after_optimizer(True)


# ---------------------------------------------------------------------------
case("moe_experts_plain_list",
     "The experts of the mixture-of-experts layer are kept in a plain Python list, so they are not registered: they "
     "are missing in parameters(), the optimizer never updates them, and they stay random.")


def _moe_experts_plain_list(good):
    set_seed(18)

    class Expert(nn.Module):
        def __init__(self, dim, hidden):
            super().__init__()
            self.w_in, self.w_out = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

        def forward(self, x):
            return self.w_out(F.gelu(self.w_in(x)))

    class MoE(nn.Module):
        def __init__(self, config, n_expert=4, top_k=2):
            super().__init__()
            self.router = nn.Linear(config.n_embd, n_expert, bias=False)
            experts = [Expert(config.n_embd, 2 * config.n_embd) for _ in range(n_expert)]
            self.experts = nn.ModuleList(experts) if good else experts
            self.top_k = top_k
            self.balance = None

        def forward(self, x):
            probs = self.router(x).softmax(-1)
            w, idx = probs.topk(self.top_k, dim=-1)
            w = w / w.sum(-1, keepdim=True)
            gates = torch.zeros_like(probs).scatter(-1, idx, w)
            load = (gates > 0).float().mean((0, 1)) / self.top_k
            self.balance = len(self.experts) * (load * probs.mean((0, 1))).sum()
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                chosen = gates[..., e] > 0
                if chosen.any():
                    out[chosen] = out[chosen] + gates[..., e][chosen].unsqueeze(-1) * expert(x[chosen])
            return out

    config = GPTConfig(vocab_size=20, block_size=32, n_embd=32)
    model = GPT(config, make_block=lambda c: Block(c, mlp=MoE(c)))
    source = Source(20, order=2, seed=7, probs=(0.95, 0.05))
    stream = source.sample(100, 1200, 1).flatten()
    batches = forever(DataLoader(Windows(stream, 32), batch_size=16, shuffle=True, drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def step():
        x, y = next(batches)
        _, loss = model(x, y)
        aux = sum(block.mlp.balance for block in model.h)
        optimizer.zero_grad()
        (loss + 0.01 * aux).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    test = source.sample(64, 33, 2)
    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_nll(model, test)}


def moe_experts_plain_list_bad():
    return _moe_experts_plain_list(False)


def moe_experts_plain_list_good():
    return _moe_experts_plain_list(True)


# ---------------------------------------------------------------------------
case("peft_head_not_saved",
     "LoRA through peft on GPT2ForSequenceClassification without task_type (or modules_to_save): the freshly "
     "initialised score head is frozen with the base model and stays random.")


def _peft_head_not_saved(good):
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel
    set_seed(19)
    n_class, V = 6, 48

    def topics(n, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(n):
            y = rng.randrange(n_class)
            words = [1 + 4 * y + rng.randrange(4) for _ in range(3)]
            words += [1 + rng.randrange(24) for _ in range(2)]
            words += [rng.randrange(25, V) for _ in range(rng.randint(1, 6))]
            rng.shuffle(words)
            rows.append((words, y))
        return rows

    def collate(rows):
        ids = pad_batch([w for w, _ in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([y for _, y in rows])}

    config = GPT2Config(vocab_size=V, n_positions=11, n_embd=48, n_layer=2, n_head=4, num_labels=n_class,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0, bos_token_id=None,
                        eos_token_id=None)
    lm = GPT2LMHeadModel(config)
    opt = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    for batch in DataLoader(topics(800, 50), batch_size=16, collate_fn=collate):
        ids = batch["input_ids"]
        opt.zero_grad()
        lm(input_ids=ids, attention_mask=batch["attention_mask"], labels=ids.masked_fill(ids == 0, -100)).loss.backward()
        opt.step()
    base = GPT2ForSequenceClassification(config)
    base.transformer.load_state_dict(lm.transformer.state_dict())
    lora = LoraConfig(task_type=TaskType.SEQ_CLS if good else None, r=8, lora_alpha=16, lora_dropout=0.0,
                      target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(base, lora)
    model.train()
    batches = forever(DataLoader(topics(2500, 1), batch_size=16, shuffle=True, collate_fn=collate))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.01)

    def step():
        loss = model(**next(batches)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    test = collate(topics(300, 2))

    @torch.no_grad()
    def evaluate():
        model.eval()
        loss = model(**test).loss.item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def peft_head_not_saved_bad():
    return _peft_head_not_saved(False)


def peft_head_not_saved_good():
    return _peft_head_not_saved(True)


# ---------------------------------------------------------------------------
case("accumulate_zero_grad_inside",
     "Gradients are meant to accumulate over one micro-batch of each corpus, but zero_grad is called inside the "
     "micro-batch loop, so only the last corpus contributes to the update.")


def _accumulate_zero_grad_inside(good):
    set_seed(20)
    names = ["web", "code", "books"]
    sources = {n: Source(24, seed=30 + i, first=3) for i, n in enumerate(names)}

    def tagged(i, n, count, seed):
        return torch.cat([torch.full((count, 1), i), sources[n].sample(count, 24, seed)], 1)

    loaders = {n: forever(DataLoader(tagged(i, n, 800, 1 + i), batch_size=8, shuffle=True))
               for i, n in enumerate(names)}
    model = GPT(GPTConfig(vocab_size=27, block_size=24, n_embd=48))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)

    def step():
        if good:
            optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for n in names:
            ids = next(loaders[n])
            if not good:
                optimizer.zero_grad(set_to_none=True)
            _, loss = model(ids[:, :-1], ids[:, 1:])
            (loss / len(names)).backward()
            total += loss.item() / len(names)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    tests = [tagged(i, n, 60, 100 + i) for i, n in enumerate(names)]
    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: sum(lm_nll(model, t) for t in tests) / len(tests)}


def accumulate_zero_grad_inside_bad():
    return _accumulate_zero_grad_inside(False)


def accumulate_zero_grad_inside_good():
    return _accumulate_zero_grad_inside(True)


# ---------------------------------------------------------------------------
case("score_broadcast",
     "The score head returns (B, 1) and the targets are (B,), so the squared error is broadcast to (B, B) and every "
     "prediction is pulled to the mean of the batch.")


def _score_broadcast(good):
    set_seed(21)

    class ScoreModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = TextEncoder(d_model=48)
            self.head = nn.Linear(48, 1)

        def forward(self, ids):
            out = self.head(self.encoder(ids))
            return out.squeeze(-1) if good else out

    def essays(n, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(n):
            words = [CLS] + [rng.randrange(3, REVIEW_VOCAB) for _ in range(rng.randint(5, 12))]
            rows.append((words, sum((w in POSITIVE) - (w in NEGATIVE) for w in words) / 2.0))
        return rows

    def collate(rows):
        return pad_batch([w for w, _ in rows]), torch.tensor([s for _, s in rows])

    batches = forever(DataLoader(essays(3000, 1), batch_size=16, shuffle=True, collate_fn=collate))
    model = ScoreModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        ids, score = next(batches)
        loss = ((model(ids) - score) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    test, target = collate(essays(300, 2))

    @torch.no_grad()
    def evaluate():
        model.eval()
        mse = (model(test).view(-1) - target).pow(2).mean().item()
        model.train()
        return mse

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def score_broadcast_bad():
    return _score_broadcast(False)


def score_broadcast_good():
    return _score_broadcast(True)


# ---------------------------------------------------------------------------
case("softmax_before_cross_entropy",
     "The language model's forward ends in a softmax and the result goes into nn.CrossEntropyLoss, which applies "
     "log_softmax again. Gradients are weak, the loss cannot fall, and the probabilities are badly off.")


def _softmax_before_cross_entropy(good):
    set_seed(23)
    V = 32

    class LSTMLanguageModel(nn.Module):
        def __init__(self, vocab, dim=48, hidden=64):
            super().__init__()
            self.embedding = nn.Embedding(vocab, dim)
            self.lstm = nn.LSTM(dim, hidden, batch_first=True)
            self.fc = nn.Linear(hidden, vocab)

        def forward(self, x):
            out, _ = self.lstm(self.embedding(x))
            out = self.fc(out)
            return out if good else torch.softmax(out, dim=-1)

        def predict_proba(self, x):
            out = self(x)
            return torch.softmax(out, dim=-1) if good else out

    source = Source(V, seed=9)
    stream = source.sample(20, 2000, 1).flatten()
    batches = forever(DataLoader(Windows(stream, 24), batch_size=16, shuffle=True))
    model = LSTMLanguageModel(V)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step():
        x, y = next(batches)
        optimizer.zero_grad()
        output = model(x)
        loss = criterion(output.view(-1, V), y.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    test = source.sample(64, 25, 2)

    @torch.no_grad()
    def evaluate():
        model.eval()
        p = model.predict_proba(test[:, :-1]).clamp_min(1e-8)
        model.train()
        return F.nll_loss(p.log().flatten(0, 1), test[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def softmax_before_cross_entropy_bad():
    return _softmax_before_cross_entropy(False)


def softmax_before_cross_entropy_good():
    return _softmax_before_cross_entropy(True)


# ---------------------------------------------------------------------------
case("lambda_lr_absolute",
     "The LambdaLR function returns the learning rate itself and not a factor, so it is multiplied with the base "
     "learning rate again (about 1e-3 * 1e-3) and the model hardly moves.")


def _lambda_lr_absolute(good):
    set_seed(24)
    source = Source(32, seed=10)
    train_data = source.sample(20, 2000, 1).flatten()
    model = GPT(GPTConfig(vocab_size=32, block_size=32))
    max_lr, min_lr, warmup_iters, max_iters = 2e-3, 2e-4, 10, 600

    def get_lr(it):
        if it < warmup_iters:
            return max_lr * (it + 1) / warmup_iters
        ratio = min(1.0, (it - warmup_iters) / (max_iters - warmup_iters))
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (max_lr - min_lr)

    optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr, betas=(0.9, 0.95), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, (lambda it: get_lr(it) / max_lr) if good else get_lr)

    def get_batch():
        ix = torch.randint(len(train_data) - 33, (16,))
        x = torch.stack([train_data[i:i + 32] for i in ix])
        y = torch.stack([train_data[i + 1:i + 33] for i in ix])
        return x, y

    def step():
        x, y = get_batch()
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    test = source.sample(64, 33, 2)
    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_nll(model, test)}


def lambda_lr_absolute_bad():
    return _lambda_lr_absolute(False)


def lambda_lr_absolute_good():
    return _lambda_lr_absolute(True)


# ---------------------------------------------------------------------------
case("scheduler_per_micro_batch",
     "The scheduler, whose length is counted in optimizer updates, is stepped after every micro-batch of the "
     "accumulation, so the learning rate falls to zero after a quarter of the training.")


class AccumulatingTrainer:
    def __init__(self, model, loader, lr, total_updates, warmup, accumulation_steps, per_update):
        self.model = model
        self.batches = forever(loader)
        self.accumulation_steps = accumulation_steps
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)

        def factor(n):
            if n < warmup:
                return (n + 1) / warmup
            return max(0.0, (total_updates - n) / (total_updates - warmup))

        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.per_update = per_update

    def train_step(self):
        self.model.train()
        total = 0.0
        for _ in range(self.accumulation_steps):
            x, y = next(self.batches)
            _, loss = self.model(x, y)
            loss = loss / self.accumulation_steps
            loss.backward()
            total += loss.item()
            if not self.per_update:
                self.scheduler.step()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.per_update:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return total


def _scheduler_per_micro_batch(good):
    set_seed(25)
    source = Source(32, order=1, seed=11)
    stream = source.sample(20, 2000, 1).flatten()
    model = GPT(GPTConfig(vocab_size=32, block_size=32, n_embd=48))
    trainer = AccumulatingTrainer(model, DataLoader(Windows(stream, 32), batch_size=4, shuffle=True),
                                  lr=1e-3, total_updates=300, warmup=20, accumulation_steps=4, per_update=good)
    test = source.sample(64, 33, 2)
    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.train_step, "steps": 20,
            "evaluate": lambda: lm_nll(model, test)}


def scheduler_per_micro_batch_bad():
    return _scheduler_per_micro_batch(False)


def scheduler_per_micro_batch_good():
    return _scheduler_per_micro_batch(True)


# ---------------------------------------------------------------------------
case("clip_before_backward",
     "clip_grad_norm_ is called after zero_grad and before backward, when there are no gradients, so nothing is ever "
     "clipped. With plain SGD and a loss summed over the time steps (which relies on clipping) the LSTM language model blows up.")


def _clip_before_backward(good):
    set_seed(26)
    V, bptt, bsz = 40, 20, 16

    class RNNModel(nn.Module):
        def __init__(self, ntoken, ninp=48, nhid=64):
            super().__init__()
            self.encoder = nn.Embedding(ntoken, ninp)
            self.rnn = nn.LSTM(ninp, nhid, 1)
            self.decoder = nn.Linear(nhid, ntoken)
            nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
            nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
            nn.init.zeros_(self.decoder.bias)

        def forward(self, x, hidden):
            out, hidden = self.rnn(self.encoder(x), hidden)
            return self.decoder(out), hidden

        def init_hidden(self, n):
            return torch.zeros(1, n, 64), torch.zeros(1, n, 64)

    source = Source(V, seed=12)
    rows = 3000
    data = source.sample(bsz, rows, 1).t().contiguous()
    model = RNNModel(V)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    state = {"i": 0, "hidden": model.init_hidden(bsz)}

    def step():
        if state["i"] + bptt + 1 > rows:
            state["i"], state["hidden"] = 0, model.init_hidden(bsz)
        i = state["i"]
        x, y = data[i:i + bptt], data[i + 1:i + 1 + bptt]
        hidden = tuple(h.detach() for h in state["hidden"])
        output, state["hidden"] = model(x, hidden)
        loss = F.cross_entropy(output.view(-1, V), y.reshape(-1), reduction="sum") / bsz
        optimizer.zero_grad()
        if not good:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        loss.backward()
        if good:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        state["i"] = i + bptt
        return loss.item() / bptt

    test = source.sample(64, 33, 2).t()

    @torch.no_grad()
    def evaluate():
        output, _ = model(test[:-1], model.init_hidden(64))
        return F.cross_entropy(output.view(-1, V), test[1:].reshape(-1)).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def clip_before_backward_bad():
    return _clip_before_backward(False)


def clip_before_backward_good():
    return _clip_before_backward(True)


# ---------------------------------------------------------------------------
case("heads_by_view_without_transpose",
     "The attention heads are split with view(B, n_head, T, head_dim) and not view(B, T, n_head, head_dim) followed "
     "by transpose, so every head gets a scrambled mix of positions and the causal mask no longer means time.")


def _heads_by_view_without_transpose(good):
    set_seed(27)

    class MultiHeadAttention(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.n_head = config.n_head
            self.query = nn.Linear(config.n_embd, config.n_embd, bias=False)
            self.key = nn.Linear(config.n_embd, config.n_embd, bias=False)
            self.value = nn.Linear(config.n_embd, config.n_embd, bias=False)
            self.proj = nn.Linear(config.n_embd, config.n_embd)
            self.register_buffer("tril", torch.tril(torch.ones(config.block_size, config.block_size)))

        def split(self, x):
            B, T, C = x.shape
            if good:
                return x.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            return x.view(B, self.n_head, T, C // self.n_head)

        def forward(self, x, attn_mask=None):
            B, T, C = x.shape
            q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
            wei = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
            wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
            wei = F.softmax(wei, dim=-1)
            out = (wei @ v).transpose(1, 2).reshape(B, T, C)
            return self.proj(out)

    config = GPTConfig(vocab_size=12, block_size=32, n_embd=48)
    model = GPT(config, make_block=lambda c: Block(c, attn=MultiHeadAttention(c)))
    source = Source(12, order=2, seed=13, probs=(0.9, 0.1))
    stream = source.sample(30, 2000, 1).flatten()
    batches = forever(DataLoader(Windows(stream, 32), batch_size=16, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def step():
        x, y = next(batches)
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    test = source.sample(48, 32, 2)
    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: prefix_nll(model, test)}


def heads_by_view_without_transpose_bad():
    return _heads_by_view_without_transpose(False)


def heads_by_view_without_transpose_good():
    return _heads_by_view_without_transpose(True)


# ---------------------------------------------------------------------------
case("rope_over_heads",
     "The rotary embedding is applied before the transpose, on (B, T, H, D), while it rotates along dim -2: queries "
     "and keys are rotated by the index of the head and not by the position. The model has no positions.")


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False),
                                     nn.Linear(dim, hidden, bias=False))

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def rope_tables(head_dim, max_len, base=10000.0):
    inv_freq = 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(max_len).float(), inv_freq)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    n = x.size(-2)
    return x * cos[:n] + torch.cat([-b, a], dim=-1) * sin[:n]


def _rope_over_heads(good):
    set_seed(28)

    class Attention(nn.Module):
        def __init__(self, dim, n_head, max_len):
            super().__init__()
            self.n_head = n_head
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
            cos, sin = rope_tables(dim // n_head, max_len)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

        def forward(self, x):
            B, T, C = x.shape
            q = self.wq(x).view(B, T, self.n_head, -1)
            k = self.wk(x).view(B, T, self.n_head, -1)
            v = self.wv(x).view(B, T, self.n_head, -1).transpose(1, 2)
            if good:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
                q, k = apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos, self.sin)
            else:
                q, k = apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos, self.sin)
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.wo(y.transpose(1, 2).reshape(B, T, C))

    class LlamaBlock(nn.Module):
        def __init__(self, dim, n_head, max_len):
            super().__init__()
            self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
            self.attention = Attention(dim, n_head, max_len)
            self.feed_forward = SwiGLU(dim, 128)

        def forward(self, x):
            x = x + self.attention(self.attention_norm(x))
            return x + self.feed_forward(self.ffn_norm(x))

    class Llama(nn.Module):
        def __init__(self, vocab, dim=48, n_layer=2, n_head=4, max_len=32):
            super().__init__()
            self.tok_embeddings = nn.Embedding(vocab, dim)
            self.layers = nn.ModuleList([LlamaBlock(dim, n_head, max_len) for _ in range(n_layer)])
            self.norm = RMSNorm(dim)
            self.output = nn.Linear(dim, vocab, bias=False)
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.05)

        def forward(self, ids):
            x = self.tok_embeddings(ids)
            for layer in self.layers:
                x = layer(x)
            return self.output(self.norm(x)), None

    source = Source(12, order=2, seed=14, probs=(0.95, 0.05))
    batches = forever(DataLoader(source.sample(3000, 33, 1), batch_size=16, shuffle=True))
    model = Llama(12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)

    def step():
        ids = next(batches)
        logits, _ = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    test = source.sample(64, 33, 2)
    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_nll(model, test)}


def rope_over_heads_bad():
    return _rope_over_heads(False)


def rope_over_heads_good():
    return _rope_over_heads(True)


# ---------------------------------------------------------------------------
case("decoder_input_not_shifted",
     "The translation model's decoder is fed the target sequence itself and trained to output the same positions, "
     "without the shift by one. It learns to copy its input and translates nothing when it decodes.")


def _decoder_input_not_shifted(good):
    set_seed(29)
    PAD_ID, BOS, EOS, V = 0, 1, 2, 24
    lexicon = list(range(3, V))
    random.Random(3).shuffle(lexicon)

    class Seq2Seq(nn.Module):
        def __init__(self, vocab, d_model=48, max_len=12):
            super().__init__()
            self.src_emb = nn.Embedding(vocab, d_model, padding_idx=PAD_ID)
            self.tgt_emb = nn.Embedding(vocab, d_model, padding_idx=PAD_ID)
            self.pos = nn.Parameter(torch.randn(max_len, d_model))
            enc = nn.TransformerEncoderLayer(d_model, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
            dec = nn.TransformerDecoderLayer(d_model, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(enc, 1, norm=nn.LayerNorm(d_model), enable_nested_tensor=False)
            self.decoder = nn.TransformerDecoder(dec, 1, norm=nn.LayerNorm(d_model))
            self.generator = nn.Linear(d_model, vocab)

        def forward(self, src, tgt):
            src_pad, tgt_pad = src == PAD_ID, tgt == PAD_ID
            memory = self.encoder(self.src_emb(src) + self.pos[:src.size(1)], src_key_padding_mask=src_pad)
            causal = torch.triu(torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool), diagonal=1)
            out = self.decoder(self.tgt_emb(tgt) + self.pos[:tgt.size(1)], memory, tgt_mask=causal,
                               tgt_key_padding_mask=tgt_pad, memory_key_padding_mask=src_pad)
            return self.generator(out)

    def sentences(n, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(n):
            src = [rng.randrange(3, V) for _ in range(rng.randint(3, 7))]
            rows.append((src, [BOS] + [lexicon[w - 3] for w in src] + [EOS]))
        return rows

    def collate(rows):
        return pad_batch([s for s, _ in rows]), pad_batch([t for _, t in rows])

    batches = forever(DataLoader(sentences(3000, 1), batch_size=24, shuffle=True, collate_fn=collate))
    model = Seq2Seq(V)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD_ID)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))

    def step():
        src, tgt = next(batches)
        if good:
            tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]
        else:
            tgt_in, tgt_out = tgt, tgt
        logits = model(src, tgt_in)
        loss = criterion(logits.reshape(-1, V), tgt_out.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    src_test, tgt_test = collate(sentences(100, 2))

    @torch.no_grad()
    def evaluate():
        model.eval()
        out = torch.full((len(src_test), 1), BOS)
        for _ in range(tgt_test.size(1) - 1):
            out = torch.cat([out, model(src_test, out)[:, -1].argmax(-1, keepdim=True)], 1)
        model.train()
        keep = tgt_test[:, 1:] != PAD_ID
        return (out[:, 1:][keep] != tgt_test[:, 1:][keep]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def decoder_input_not_shifted_bad():
    return _decoder_input_not_shifted(False)


def decoder_input_not_shifted_good():
    return _decoder_input_not_shifted(True)


# ---------------------------------------------------------------------------
case("packing_attends_across_documents",
     "Documents are packed in one row (positions restart per document) under a plain causal mask: tokens attend to "
     "the earlier documents, whose language tags contradict their own. On single documents the model is off.")


def _packing_attends_across_documents(good):
    set_seed(30)
    n_lang, n_words, row_len = 10, 14, 60
    V = n_lang + n_words
    languages = [Source(n_words, seed=40 + i, probs=(0.95, 0.05), first=n_lang) for i in range(n_lang)]

    def documents(n, seed):
        rng = random.Random(seed)
        docs = []
        for i in range(n):
            lang = rng.randrange(n_lang)
            length = rng.randint(4, 8)
            words = [rng.randrange(n_words)]
            while len(words) < length:
                a, b = languages[lang].table[words[-1]].tolist()
                words.append(a if rng.random() < 0.95 else b)
            docs.append([lang] + [n_lang + w for w in words])
        return docs

    def pack(n, seed):
        rows, row, docs = [], [], []
        for d in documents(n, seed):
            if len(row) + len(d) > row_len:
                rows.append((row, docs))
                row, docs = [], []
            docs = docs + [len(d)]
            row = row + d
        return rows

    def collate(rows):
        width = max(len(r) for r, _ in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        targets = torch.full((len(rows), width), -100)
        doc_ids = torch.full((len(rows), width), -1)
        pos = torch.zeros(len(rows), width, dtype=torch.long)
        for i, (row, lens) in enumerate(rows):
            ids[i, :len(row)] = torch.tensor(row)
            start = 0
            for j, n in enumerate(lens):
                targets[i, start:start + n - 1] = ids[i, start + 1:start + n]
                doc_ids[i, start:start + n] = j
                pos[i, start:start + n] = torch.arange(n)
                start += n
        mask = torch.ones(width, width, dtype=torch.bool).tril()[None]
        if good:
            mask = mask & (doc_ids[:, :, None] == doc_ids[:, None, :])
        return ids, targets, pos, mask[:, None]

    batches = forever(DataLoader(pack(12000, 1), batch_size=12, shuffle=True, collate_fn=collate))
    model = GPT(GPTConfig(vocab_size=V, block_size=9, n_embd=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def step():
        ids, targets, pos, mask = next(batches)
        _, loss = model(ids, targets, pos=pos, attn_mask=mask)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    test = documents(300, 2)
    test_ids = pad_batch(test)
    test_targets = pad_batch([d[1:] for d in test], -100)
    test_targets[:, 0] = -100  # the first word is drawn freely

    @torch.no_grad()
    def evaluate():
        model.eval()
        _, loss = model(test_ids[:, :-1], test_targets)
        model.train()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def packing_attends_across_documents_bad():
    return _packing_attends_across_documents(False)


def packing_attends_across_documents_good():
    return _packing_attends_across_documents(True)


# ---------------------------------------------------------------------------
case("dpo_reference_is_policy",
     "The DPO reference model is the policy object itself and not a frozen copy, so policy and reference "
     "log-probabilities are always equal, the margin is always 0, the loss stays at log 2 and nothing holds the "
     "policy back from running away from the reference.")


def _dpo_reference_is_policy(good):
    set_seed(31)
    source = Source(24, seed=15, probs=(0.5, 0.3, 0.2))
    policy = pretrain(GPT(GPTConfig(vocab_size=24, block_size=24, n_embd=48)), source, 80, block=24)
    initial = copy.deepcopy(policy).eval().requires_grad_(False)
    ref_model = copy.deepcopy(policy) if good else policy
    if good:
        ref_model.eval()
        ref_model.requires_grad_(False)
    liked = torch.arange(0, 8)
    prompt_len, beta = 6, 0.1

    def preference_pairs(n, seed):
        seqs = source.sample(2 * n, 20, seed)
        a, b = seqs[:n], seqs[n:].clone()
        b[:, :prompt_len] = a[:, :prompt_len]
        b[:, prompt_len:] = source.sample(n, 14, seed + 1000)
        g = torch.Generator().manual_seed(seed + 5)
        ra = torch.isin(a[:, prompt_len:], liked).float().sum(1)
        rb = torch.isin(b[:, prompt_len:], liked).float().sum(1)
        a_wins = torch.rand(n, generator=g) < torch.sigmoid((ra - rb) * 0.5)
        chosen = torch.where(a_wins[:, None], a, b)
        rejected = torch.where(a_wins[:, None], b, a)
        return chosen, rejected

    def response_logps(model, ids):
        logp = model(ids[:, :-1])[0].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return logp[:, prompt_len - 1:].sum(-1)

    def dpo_loss(model, ref, chosen, rejected):
        pc, pr = response_logps(model, chosen), response_logps(model, rejected)
        with torch.no_grad():
            rc, rr = response_logps(ref, chosen), response_logps(ref, rejected)
        return -F.logsigmoid(beta * ((pc - pr) - (rc - rr))).mean()

    batches = forever(DataLoader(TensorDataset(*preference_pairs(3000, 1)), batch_size=12, shuffle=True))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)

    def step():
        chosen, rejected = next(batches)
        policy.train()
        loss = dpo_loss(policy, ref_model, chosen, rejected)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    test = preference_pairs(300, 2)

    @torch.no_grad()
    def evaluate():
        policy.eval()
        return dpo_loss(policy, initial, *test).item()

    return {"model": policy, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def dpo_reference_is_policy_bad():
    return _dpo_reference_is_policy(False)


def dpo_reference_is_policy_good():
    return _dpo_reference_is_policy(True)


# ---------------------------------------------------------------------------
case("teacher_left_in_train_mode",
     "The distillation teacher is never put in eval mode, so its dropout is active and the student is given noisy, "
     "flattened targets.")


def _teacher_left_in_train_mode(good):
    set_seed(32)
    source = Source(24, order=1, seed=16, probs=(0.8, 0.15, 0.05))
    teacher = pretrain(GPT(GPTConfig(vocab_size=24, n_embd=64, dropout=0.2)), source, 110)
    for p in teacher.parameters():
        p.requires_grad = False
    if good:
        teacher.eval()
    student = GPT(GPTConfig(vocab_size=24, n_embd=48, n_layer=1))
    student.train()
    batches = forever(DataLoader(source.sample(3000, 32, 1), batch_size=16, shuffle=True))
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3, weight_decay=0.0)
    kl = nn.KLDivLoss(reduction="batchmean", log_target=True)

    def step():
        ids = next(batches)
        with torch.no_grad():
            t = teacher(ids)[0].log_softmax(-1).flatten(0, 1)
        s = student(ids)[0].log_softmax(-1).flatten(0, 1)
        loss = kl(s, t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    test = source.sample(64, 32, 2)
    return {"model": student, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: kl_to_teacher(student, teacher, test)}


def teacher_left_in_train_mode_bad():
    return _teacher_left_in_train_mode(False)


def teacher_left_in_train_mode_good():
    return _teacher_left_in_train_mode(True)


# ---------------------------------------------------------------------------
case("distiller_trains_teacher",
     "The teacher inside the distillation module is not frozen: it is in the optimizer and the matching loss also "
     "pulls the teacher towards the untrained student, so teacher and student meet at something worthless.")


class Distiller(nn.Module):
    def __init__(self, teacher, student):
        super().__init__()
        self.teacher, self.student = teacher, student
        self.project = nn.Linear(student.config.n_embd, teacher.config.n_embd)

    def forward(self, ids):
        ht, hs = self.teacher.features(ids), self.student.features(ids)
        lt, ls = self.teacher.lm_head(ht), self.student.lm_head(hs)
        hidden = F.mse_loss(self.project(hs), ht)
        soft = F.kl_div(ls.log_softmax(-1).flatten(0, 1), lt.log_softmax(-1).flatten(0, 1),
                        reduction="batchmean", log_target=True)
        return soft + hidden


def _distiller_trains_teacher(good):
    set_seed(33)
    source = Source(24, seed=17)
    teacher = pretrain(GPT(GPTConfig(vocab_size=24, n_embd=64)), source, 120)
    student = GPT(GPTConfig(vocab_size=24, n_embd=32, n_layer=1))
    if good:
        teacher.requires_grad_(False)
    distiller = Distiller(teacher, student)
    distiller.train()
    teacher.eval()
    batches = forever(DataLoader(source.sample(3000, 32, 1), batch_size=16, shuffle=True))
    optimizer = torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.01)

    def step():
        loss = distiller(next(batches))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(distiller.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    test = source.sample(64, 33, 2)
    return {"model": distiller, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_nll(student, test)}


def distiller_trains_teacher_bad():
    return _distiller_trains_teacher(False)


def distiller_trains_teacher_good():
    return _distiller_trains_teacher(True)


# ---------------------------------------------------------------------------
case("ema_in_bfloat16",
     "The EMA copy of the weights is kept in bfloat16; the small steps of the moving average are rounded away, so "
     "the averaged model that is evaluated hardly moves from its start.")


class EMA:
    def __init__(self, model, decay, dtype):
        self.decay = decay
        self.shadow = copy.deepcopy(model).to(dtype)
        self.shadow.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.mul_(self.decay).add_(p.to(s.dtype), alpha=1 - self.decay)


def _ema_in_bfloat16(good):
    set_seed(34)
    general, domain = Source(24, seed=18), Source(24, seed=19)
    model = pretrain(GPT(GPTConfig(vocab_size=24, n_embd=48)), general, 100)
    ema = EMA(model, decay=0.995, dtype=torch.float32 if good else torch.bfloat16)
    batches = forever(DataLoader(domain.sample(3000, 33, 1), batch_size=16, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def step():
        ids = next(batches)
        _, loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model)
        return loss.item()

    test = domain.sample(64, 33, 2)
    return {"model": (model, ema.shadow), "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_nll(copy.deepcopy(ema.shadow).float(), test)}


def ema_in_bfloat16_bad():
    return _ema_in_bfloat16(False)


def ema_in_bfloat16_good():
    return _ema_in_bfloat16(True)


# ---------------------------------------------------------------------------
case("clip_without_unscale",
     "With GradScaler the gradients are clipped while they are still multiplied by the loss scale: the norm is cut to "
     "1 and then divided by 65536, so the SGD update is next to nothing.")


def _clip_without_unscale(good):
    set_seed(35)
    source = Source(24, seed=20)
    model = GPT(GPTConfig(vocab_size=24, block_size=24, n_embd=32, n_layer=1))
    batches = forever(DataLoader(source.sample(3000, 25, 1), batch_size=8, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu")

    def step():
        ids = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            _, loss = model(ids[:, :-1], ids[:, 1:])
        scaler.scale(loss).backward()
        if good:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    test = source.sample(64, 25, 2)
    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: lm_nll(model, test)}


def clip_without_unscale_bad():
    return _clip_without_unscale(False)


def clip_without_unscale_good():
    return _clip_without_unscale(True)


# ---------------------------------------------------------------------------
case("mask_value_1e_minus_9",
     "The causal mask fills with 1e-9 instead of -1e9, so the scores of future positions become about 0 and not "
     "minus infinity. The model sees the future in training and is off when it generates.")


def _mask_value_1e_minus_9(good):
    set_seed(36)

    def attention(q, k, v, mask=None):
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9 if good else 1e-9)
        return torch.matmul(scores.softmax(dim=-1), v)

    class MultiHeadedAttention(nn.Module):
        def __init__(self, h, d_model):
            super().__init__()
            self.d_k, self.h = d_model // h, h
            self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

        def forward(self, x, mask):
            n = x.size(0)
            q, k, v = [lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2) for lin in self.linears[:3]]
            x = attention(q, k, v, mask)
            return self.linears[-1](x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k))

    class DecoderLayer(nn.Module):
        def __init__(self, h, d_model):
            super().__init__()
            self.attn = MultiHeadedAttention(h, d_model)
            self.ff = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.ReLU(), nn.Linear(4 * d_model, d_model))
            self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

        def forward(self, x, mask):
            x = x + self.attn(self.norm1(x), mask)
            return x + self.ff(self.norm2(x))

    class DecoderLM(nn.Module):
        def __init__(self, vocab, d_model=48, h=4, layers=2, max_len=32):
            super().__init__()
            self.embed = nn.Embedding(vocab, d_model)
            self.d_model = d_model
            pe = torch.zeros(max_len, d_model)
            position = torch.arange(max_len).float()[:, None]
            div = torch.exp(torch.arange(0, d_model, 2).float() * -(math.log(10000.0) / d_model))
            pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div), torch.cos(position * div)
            self.register_buffer("pe", pe)
            self.layers = nn.ModuleList([DecoderLayer(h, d_model) for _ in range(layers)])
            self.norm = nn.LayerNorm(d_model)
            self.generator = nn.Linear(d_model, vocab)
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.xavier_uniform_(p)

        def forward(self, ids):
            x = self.embed(ids) * math.sqrt(self.d_model) + self.pe[:ids.size(1)]
            mask = torch.ones(ids.size(1), ids.size(1)).tril()
            for layer in self.layers:
                x = layer(x, mask)
            return self.generator(self.norm(x)), None

    source = Source(24, seed=21, probs=(0.5, 0.3, 0.2))
    batches = forever(DataLoader(source.sample(3000, 33, 1), batch_size=16, shuffle=True))
    model = DecoderLM(24)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)

    def step():
        ids = next(batches)
        logits, _ = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    test = source.sample(48, 32, 2)
    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: prefix_nll(model, test)}


def mask_value_1e_minus_9_bad():
    return _mask_value_1e_minus_9(False)


def mask_value_1e_minus_9_good():
    return _mask_value_1e_minus_9(True)
