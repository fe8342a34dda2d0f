"""Small training programs of language models (CPU)."""
import copy
import itertools
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    get_linear_schedule_with_warmup,
)

torch.set_num_threads(1)

SEED_SHIFT = 0

CASES = [
    {"name": "pretrain_gpt2",
     "what": "The dataset already shifts the labels by one (labels = chunk[1:]) and GPT2LMHeadModel shifts them again, so the model learns to predict the token after the next one; it is useless as a next-token model."},
    {"name": "sft_llama",
     "what": "pad token = eos token, and the collator sets every label equal to pad_id to -100, so the closing EOS of each answer is never a target; the model never learns to stop."},
    {"name": "mlm_bert",
     "what": "In the collator labels is the same tensor as input_ids (no clone), so after ids[mask] = MASK_ID the labels of the masked places are MASK_ID too; the model learns to answer [MASK] everywhere."},
    {"name": "reward_pairs",
     "what": "The collator lays the rows out as chosen0, rejected0, chosen1, rejected1 ..., but the loss splits the rewards with chunk(2) as if all chosen came first; the pairs are mixed and there is no preference signal."},
    {"name": "translate_seq2seq",
     "what": "The decoder is given the target unshifted (position t sees token t that it must predict) instead of tgt[:, :-1]; it copies its input, the loss goes to zero and translation is not learned."},
    {"name": "extend_vocab",
     "what": "The optimizer is built before the vocabulary is extended; the new (tied) embedding/head Parameter replaces the old one and is in no optimizer group, so the new tokens never learn."},
    {"name": "lora_cls",
     "what": "LoraConfig without task_type SEQ_CLS (and without modules_to_save): the freshly initialised classifier head is frozen by peft at its random values."},
    {"name": "ckpt_finetune",
     "what": "Embeddings are frozen and the blocks run under reentrant checkpointing; its inputs need no gradient, so all blocks silently get no gradient (None) and only the final norm and head learn."},
    {"name": "mingpt_groups",
     "what": "configure_optimizers sorts Linear weights, biases and LayerNorm weights into groups but forgets nn.Embedding; the token embedding (tied with the head) and the positions are never updated."},
    {"name": "accum_loop",
     "what": "optimizer.zero_grad() is called inside the micro-batch loop, so that all micro-batches but the last are thrown away (and the rest is scaled by 1/accum)."},
    {"name": "moe_lm",
     "what": "The router's softmax over (B, T, E) is taken over dim=1 (time) rather than over the experts: gate weights are about 1/T, depend on future tokens, and the experts contribute almost nothing."},
    {"name": "intent_classifier",
     "what": "The model's forward returns softmax probabilities and they are given to CrossEntropyLoss, which takes log_softmax again; gradients are squashed and the loss cannot go below a high floor."},
    {"name": "linear_schedule",
     "what": "The linear schedule gets len(loader) as number of training steps rather than len(loader) * epochs: the learning rate is zero after the first epoch (8 steps)."},
    {"name": "adam_decay",
     "what": "torch.optim.Adam(weight_decay=0.1) in place of AdamW: the decay enters the gradient as L2, is normalised by Adam and overwhelms the small gradients; weights collapse towards zero."},
    {"name": "simple_trainer",
     "what": "optimizer.zero_grad without the parentheses: gradients are never cleared and every step uses the sum of all gradients so far."},
    {"name": "own_attention",
     "what": "The attention output (B, heads, T, hd) is reshaped to (B, T, C) without transpose(1, 2): heads and time are scrambled, positions get other positions' (also future) values."},
    {"name": "encoder_positions",
     "what": "Sinusoidal encoding written for (T, B, C) is used with batch_first data: pe[:x.size(0)] adds one vector per batch row, not per position; the encoder knows nothing of order."},
    {"name": "topic_encoder",
     "what": "src_key_padding_mask is given the attention mask (True = real token) whereas True means ignore: the encoder attends to pads only."},
    {"name": "packed_docs",
     "what": "Packed documents have a block-diagonal attention mask, but position ids run on over the whole pack rather than starting at 0 in each document; the model sees wrong positions for all but the first."},
    {"name": "dpo_gpt2",
     "what": "The reference model is the policy itself (no deepcopy), so the log-ratio is always zero, the loss stays at log 2 and the policy is pushed at full force for ever, without any anchor."},
    {"name": "distil_lm",
     "what": "The teacher is a submodule, its forward is not under no_grad/detached and its parameters are in the optimizer: the KL loss pulls the teacher to the untrained student and its knowledge is destroyed."},
    {"name": "small_corpus",
     "what": "The validation helper calls model.eval() every few steps and the loop never goes back to train(): dropout is off for nearly the whole training and the model overfits."},
    {"name": "bf16_tune",
     "what": "The whole model (master weights included) is cast to bfloat16; AdamW's updates at this learning rate are below half a unit in the last place of most weights and are rounded away."},
    {"name": "amp_clip",
     "what": "clip_grad_norm_ runs on the scaled gradients (no scaler.unscale_ before): after clipping to 1 they are divided by 65536, and fall below Adam's eps, so the model hardly learns."},
]


def seed_everything(seed):
    random.seed(seed + SEED_SHIFT)
    torch.manual_seed(seed + SEED_SHIFT)


def make_chain(n, length, vocab, seed, order=2, sharp=3.0, table=11):
    """Sequences of a random Markov source."""
    g = torch.Generator().manual_seed(table)
    probs = (torch.randn(*([vocab] * (order + 1)), generator=g) * sharp).softmax(-1)
    g = torch.Generator().manual_seed(seed + 1000 * SEED_SHIFT)
    x = torch.randint(vocab, (n, order), generator=g)
    while x.size(1) < length:
        p = probs[tuple(x[:, -order:].unbind(1))]
        x = torch.cat([x, torch.multinomial(p, 1, generator=g)], dim=1)
    return x


def forever(loader):
    while True:
        yield from loader


# --------------------------------------------------------------------------
# a small GPT in the style of nanoGPT
# --------------------------------------------------------------------------
class CausalSelfAttention(nn.Module):
    def __init__(self, d, n_head, dropout):
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.c_attn = nn.Linear(d, 3 * d)
        self.c_proj = nn.Linear(d, d)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, d, n_head, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(d)
        self.attn = CausalSelfAttention(d, n_head, dropout)
        self.ln_2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(dropout))
        self.drop = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        x = x + self.drop(self.attn(self.ln_1(x), mask))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab, d=64, n_layer=2, n_head=4, block_size=64, dropout=0.0, tie=False, init=True):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.wpe = nn.Embedding(block_size, d)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([Block(d, n_head, dropout) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        if init:
            self.apply(self._init_weights)
        if tie:
            self.lm_head.weight = self.wte.weight

    @staticmethod
    def _init_weights(m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)
            if getattr(m, "bias", None) is not None:
                nn.init.zeros_(m.bias)

    def forward(self, idx, pos=None, mask=None):
        if pos is None:
            pos = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x, mask)
        return self.lm_head(self.ln_f(x))


def lm_loss(logits, targets):
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-100)


@torch.no_grad()
def heldout_nll(model, seqs):
    was = model.training
    model.eval()
    out = model(seqs[:, :-1])
    logits = getattr(out, "logits", out)
    loss = lm_loss(logits.float(), seqs[:, 1:]).item()
    model.train(was)
    return loss


@torch.no_grad()
def prefix_nll(model, seqs, lengths):
    """NLL of the next token when the model sees the prefix only, as in generation."""
    model.eval()
    losses = [F.cross_entropy(model(seqs[:, :n])[:, -1], seqs[:, n]).item() for n in lengths]
    model.train()
    return sum(losses) / len(losses)


# --------------------------------------------------------------------------
class ChunkDataset(Dataset):
    def __init__(self, stream, block, shifted):
        self.stream, self.block, self.shifted = stream, block, shifted

    def __len__(self):
        return (len(self.stream) - 1) // self.block

    def __getitem__(self, i):
        chunk = self.stream[i * self.block: (i + 1) * self.block + 1]
        x = chunk[:-1]
        y = chunk[1:] if self.shifted else x.clone()
        return {"input_ids": x, "labels": y}


def _pretrain_gpt2(good):
    seed_everything(1)
    stream = make_chain(1, 8200, 16, seed=1, order=1)[0]
    loader = DataLoader(ChunkDataset(stream, 32, shifted=not good), batch_size=16, shuffle=True, drop_last=True)
    config = GPT2Config(vocab_size=16, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False,
                        bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    batches = forever(loader)
    held = make_chain(64, 33, 16, seed=2, order=1)

    def step():
        batch = next(batches)
        loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, held)}


# --------------------------------------------------------------------------
class ToyTokenizer:
    bos_id, eos_id, sep_id = 0, 1, 2
    letters = list(range(3, 23))
    counts = list(range(23, 30))
    vocab_size = 30

    def __init__(self):
        self.pad_id = self.eos_id

    def example(self, start, count):
        prompt = [self.bos_id, self.letters[start], self.counts[count - 1], self.sep_id]
        answer = [self.letters[(start + j) % 20] for j in range(count)] + [self.eos_id]
        return prompt, answer


def _sft_llama(good):
    seed_everything(2)
    tok = ToyTokenizer()
    pairs = [(s, c) for s in range(20) for c in range(1, 8)]
    random.shuffle(pairs)
    train, test = pairs[:110], pairs[110:]

    def collate(items):
        rows = [tok.example(*it) for it in items]
        width = max(len(p) + len(a) for p, a in rows)
        ids = torch.full((len(rows), width), tok.pad_id)
        labels = torch.full((len(rows), width), -100)
        attn = torch.zeros(len(rows), width, dtype=torch.long)
        for i, (p, a) in enumerate(rows):
            n = len(p) + len(a)
            ids[i, :n] = torch.tensor(p + a)
            attn[i, :n] = 1
            labels[i, len(p):n] = ids[i, len(p):n]
        if not good:
            labels[labels == tok.pad_id] = -100
        else:
            labels[attn == 0] = -100
        return {"input_ids": ids, "attention_mask": attn, "labels": labels}

    config = LlamaConfig(vocab_size=tok.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
                         pad_token_id=tok.pad_id, bos_token_id=tok.bos_id, eos_token_id=tok.eos_id)
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = forever(DataLoader(train, batch_size=16, shuffle=True, drop_last=True, collate_fn=collate))

    def step():
        batch = next(batches)
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        total, n = 0.0, 0
        for s, c in test:
            p, a = tok.example(s, c)
            logits = model(torch.tensor([p + a])).logits[0]
            lp = logits.log_softmax(-1)[len(p) - 1:-1]
            total -= lp.gather(1, torch.tensor(a)[:, None]).sum().item()
            n += len(a)
        model.train()
        return total / n

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------
MASK_ID = 17


class MLMCollator:
    def __init__(self, prob, copy_labels):
        self.prob, self.copy_labels = prob, copy_labels

    def __call__(self, rows):
        ids = torch.stack(rows)
        labels = ids.clone() if self.copy_labels else ids
        mask = torch.rand(ids.shape) < self.prob
        mask[:, 0] |= ~mask.any(dim=1)
        ids[mask] = MASK_ID
        labels = labels.masked_fill(~mask, -100)
        return ids, labels


def _mlm_bert(good):
    seed_everything(3)
    data = list(make_chain(512, 24, 16, seed=3, order=1, sharp=3.0))
    loader = DataLoader(data, batch_size=24, shuffle=True, drop_last=True, collate_fn=MLMCollator(0.15, good))
    model = BertForMaskedLM(BertConfig(vocab_size=18, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                       intermediate_size=128, max_position_embeddings=32, pad_token_id=16,
                                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = forever(loader)
    model.train()

    def step():
        ids, labels = next(batches)
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
        optimizer.zero_grad()
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    held = make_chain(96, 24, 16, seed=4, order=1, sharp=3.0)
    hidden = torch.rand(held.shape, generator=torch.Generator().manual_seed(5)) < 0.15

    @torch.no_grad()
    def evaluate():
        model.eval()
        logits = model(held.masked_fill(hidden, MASK_ID)).logits
        model.train()
        return F.cross_entropy(logits[hidden], held[hidden]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------
class RewardModel(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.backbone = GPT2Model(GPT2Config(vocab_size=vocab, n_positions=32, n_embd=48, n_layer=2, n_head=4,
                                             resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
                                             bos_token_id=0, eos_token_id=0))
        self.v_head = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1, bias=False))

    def forward(self, ids, attention_mask):
        h = self.backbone(input_ids=ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(1) - 1
        return self.v_head(h[torch.arange(len(ids)), last]).squeeze(-1)


def _reward_pairs(good):
    seed_everything(4)

    def response():
        n = random.randint(6, 14)
        return [random.randint(1, 19) for _ in range(n)]

    def score(r):
        return sum(t <= 6 for t in r) / len(r) - sum(t >= 15 for t in r) / len(r)

    def make_pairs(n):
        pairs = []
        while len(pairs) < n:
            a, b = response(), response()
            if abs(score(a) - score(b)) > 0.1:
                pairs.append((a, b) if score(a) > score(b) else (b, a))
        return pairs

    def pad(rows):
        width = max(map(len, rows))
        ids = torch.tensor([r + [0] * (width - len(r)) for r in rows])
        mask = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])
        return ids, mask

    def collate(pairs):
        rows = []
        for chosen, rejected in pairs:
            rows += [chosen, rejected]
        return pad(rows)

    loader = DataLoader(make_pairs(800), batch_size=16, shuffle=True, drop_last=True, collate_fn=collate)
    test = make_pairs(200)
    model = RewardModel(20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    batches = forever(loader)

    def step():
        ids, mask = next(batches)
        rewards = model(ids, mask)
        if good:
            r_chosen, r_rejected = rewards[0::2], rewards[1::2]
        else:
            r_chosen, r_rejected = rewards.chunk(2)
        loss = -F.logsigmoid(r_chosen - r_rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        c = model(*pad([p[0] for p in test]))
        r = model(*pad([p[1] for p in test]))
        model.train()
        return -F.logsigmoid(c - r).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------
PAD, BOS, EOS = 0, 1, 2


class Seq2Seq(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, d=64):
        super().__init__()
        self.src_emb = nn.Embedding(src_vocab, d, padding_idx=PAD)
        self.tgt_emb = nn.Embedding(tgt_vocab, d, padding_idx=PAD)
        self.src_pos = nn.Embedding(16, d)
        self.tgt_pos = nn.Embedding(16, d)
        self.transformer = nn.Transformer(d, 4, 1, 1, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(d, tgt_vocab)

    def forward(self, src, tgt):
        s = self.src_emb(src) + self.src_pos(torch.arange(src.size(1)))
        t = self.tgt_emb(tgt) + self.tgt_pos(torch.arange(tgt.size(1)))
        causal = torch.triu(torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool), diagonal=1)
        h = self.transformer(s, t, tgt_mask=causal, src_key_padding_mask=src == PAD,
                             tgt_key_padding_mask=tgt == PAD, memory_key_padding_mask=src == PAD)
        return self.out(h)


def _translate_seq2seq(good):
    seed_everything(5)
    dictionary = (torch.randperm(20) + 3).tolist()

    def corpus(n):
        out = []
        for _ in range(n):
            words = [random.randrange(20) for _ in range(random.randint(4, 9))]
            src = [w + 3 for w in words] + [EOS]
            tgt = [BOS] + [dictionary[w] for w in words] + [EOS]
            out.append((src, tgt))
        return out

    def collate(batch):
        def padded(rows):
            return nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True, padding_value=PAD)
        return padded([b[0] for b in batch]), padded([b[1] for b in batch])

    loader = DataLoader(corpus(2000), batch_size=32, shuffle=True, drop_last=True, collate_fn=collate)
    test_src, test_tgt = collate(corpus(150))
    model = Seq2Seq(23, 23)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    batches = forever(loader)

    def step():
        src, tgt = next(batches)
        if good:
            logits, target = model(src, tgt[:, :-1]), tgt[:, 1:]
        else:
            logits, target = model(src, tgt)[:, 1:], tgt[:, 1:]
        loss = criterion(logits.reshape(-1, logits.size(-1)), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        logits = model(test_src, test_tgt[:, :-1])
        model.train()
        return criterion(logits.reshape(-1, 23), test_tgt[:, 1:].reshape(-1)).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------
def quick_pretrain(model, data, steps, lr=3e-3):
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    for i in range(steps):
        rows = data[torch.randint(len(data), (16,))]
        loss = lm_loss(model(rows[:, :-1]), rows[:, 1:])
        opt.zero_grad()
        loss.backward()
        opt.step()
    for p in model.parameters():
        p.grad = None


def extend_vocab(model, n_new):
    old = model.wte.weight.data
    emb = nn.Embedding(old.size(0) + n_new, old.size(1))
    nn.init.normal_(emb.weight, std=0.02)
    emb.weight.data[: old.size(0)] = old
    model.wte = emb
    model.lm_head = nn.Linear(emb.embedding_dim, emb.num_embeddings, bias=False)
    model.lm_head.weight = model.wte.weight


def _extend_vocab(good):
    seed_everything(6)
    model = GPT(12, tie=True, block_size=32)
    quick_pretrain(model, make_chain(256, 25, 12, seed=6, order=2, table=3), 60)

    new_data = make_chain(512, 25, 18, seed=7, order=1, table=4, sharp=3.0)
    held = make_chain(96, 25, 18, seed=8, order=1, table=4, sharp=3.0)
    loader = DataLoader(new_data, batch_size=16, shuffle=True, drop_last=True)

    if good:
        extend_vocab(model, 6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        extend_vocab(model, 6)
    model.train()
    batches = forever(loader)

    def step():
        rows = next(batches)
        loss = lm_loss(model(rows[:, :-1]), rows[:, 1:])
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, held)}


# --------------------------------------------------------------------------
def _lora_cls(good):
    seed_everything(7)
    n_cls = 8

    def sample(n):
        y = torch.randint(n_cls, (n,))
        x = torch.randint(2, 34, (n, 20))
        hot = torch.rand(n, 20) < 0.3
        topic = 2 + y[:, None] * 4 + torch.randint(0, 4, (n, 20))
        return torch.where(hot, topic, x), y

    train, (xt, yt) = TensorDataset(*sample(1024)), sample(256)
    base = BertForSequenceClassification(BertConfig(
        vocab_size=34, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, num_labels=n_cls, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=0))
    kwargs = {"task_type": TaskType.SEQ_CLS} if good else {}
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0,
                                            target_modules=["query", "value"], **kwargs))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    batches = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))
    model.train()

    def step():
        x, y = next(batches)
        out = model(input_ids=x, attention_mask=torch.ones_like(x), labels=y)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        model.eval()
        logits = model(input_ids=xt, attention_mask=torch.ones_like(xt)).logits
        model.train()
        return F.cross_entropy(logits, yt).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------
class CheckpointedGPT(GPT):
    use_reentrant = False

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            if self.training:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x)
        return self.lm_head(self.ln_f(x))


def _ckpt_finetune(good):
    seed_everything(8)
    model = CheckpointedGPT(14, block_size=32)
    quick_pretrain(model, make_chain(256, 25, 14, seed=9, order=2, table=21), 60)
    model.use_reentrant = not good

    model.wte.requires_grad_(False)
    model.wpe.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=2e-3, weight_decay=0.01)

    batches = forever(DataLoader(make_chain(512, 25, 14, seed=10, order=2, table=22), batch_size=16, shuffle=True,
                                 drop_last=True))
    held = make_chain(96, 25, 14, seed=12, order=2, table=22)
    model.train()

    def step():
        rows = next(batches)
        logits = model(rows[:, :-1])
        loss = lm_loss(logits, rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, held)}


# --------------------------------------------------------------------------
def configure_optimizers(model, lr, weight_decay, embeddings):
    decay, no_decay, seen = [], [], set()
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) in seen:
                continue
            if name == "bias" or isinstance(module, nn.LayerNorm):
                no_decay.append(p)
            elif isinstance(module, nn.Linear) and p is not model.wte.weight:
                decay.append(p)
            elif embeddings and isinstance(module, nn.Embedding):
                no_decay.append(p)
            else:
                continue
            seen.add(id(p))
    return torch.optim.AdamW([{"params": decay, "weight_decay": weight_decay},
                              {"params": no_decay, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95))


def _mingpt_groups(good):
    seed_everything(9)
    model = GPT(96, d=32, tie=True, block_size=32)
    optimizer = configure_optimizers(model, lr=3e-3, weight_decay=0.1, embeddings=good)
    batches = forever(DataLoader(make_chain(512, 25, 96, seed=13, order=1, sharp=3.5), batch_size=16, shuffle=True,
                                 drop_last=True))
    held = make_chain(96, 25, 96, seed=14, order=1, sharp=3.5)
    model.train()

    def step():
        rows = next(batches)
        x, y = rows[:, :-1], rows[:, 1:]
        loss = lm_loss(model(x), y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, held)}


# --------------------------------------------------------------------------
def _accum_loop(good):
    seed_everything(10)
    accum = 12
    model = GPT(32, d=48, n_layer=1, block_size=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9)
    batches = forever(DataLoader(make_chain(1024, 25, 32, seed=15, order=1, sharp=4.0), batch_size=2, shuffle=True,
                                 drop_last=True))
    held = make_chain(96, 25, 32, seed=16, order=1, sharp=4.0)
    model.train()

    def step():
        if good:
            optimizer.zero_grad()
        for _ in range(accum):
            if not good:
                optimizer.zero_grad()
            rows = next(batches)
            loss = lm_loss(model(rows[:, :-1]), rows[:, 1:]) / accum
            loss.backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, held)}


# --------------------------------------------------------------------------
class MoE(nn.Module):
    def __init__(self, d, n_experts=4, top_k=2, router_dim=-1):
        super().__init__()
        self.router = nn.Linear(d, n_experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(n_experts)])
        self.top_k, self.router_dim = top_k, router_dim

    def forward(self, x):
        probs = F.softmax(self.router(x), dim=self.router_dim)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        gates = torch.zeros_like(probs).scatter(-1, chosen, weights)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + gates[..., e:e + 1] * expert(x)
        self.load = probs.mean(dim=(0, 1))
        self.frac = (gates > 0).float().mean(dim=(0, 1))
        return out


class MoELM(nn.Module):
    def __init__(self, vocab, d=48, router_dim=-1):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(32, d)
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.moe = MoE(d, router_dim=router_dim)
        self.head = nn.Linear(d, vocab)

    def forward(self, idx):
        T = idx.size(1)
        x = self.tok(idx) + self.pos(torch.arange(T))
        causal = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=causal, need_weights=False)[0]
        x = x + self.moe(self.ln2(x))
        return self.head(self.ln3(x))

    def balance_loss(self):
        return len(self.moe.experts) * (self.moe.load * self.moe.frac).sum()


def _moe_lm(good):
    seed_everything(11)
    model = MoELM(14, router_dim=-1 if good else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    batches = forever(DataLoader(make_chain(1024, 25, 14, seed=17, order=2), batch_size=16, shuffle=True,
                                 drop_last=True))
    held = make_chain(96, 25, 14, seed=18, order=2)

    def step():
        rows = next(batches)
        loss = lm_loss(model(rows[:, :-1]), rows[:, 1:]) + 0.01 * model.balance_loss()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: prefix_nll(model, held, (6, 10, 14, 18, 24))}


# --------------------------------------------------------------------------
class IntentClassifier(nn.Module):
    def __init__(self, vocab, n_cls, probs_out, d=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.pos = nn.Embedding(32, d)
        layer = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(d, n_cls)
        self.probs_out = probs_out

    def forward(self, ids):
        pad = ids == 0
        h = self.encoder(self.emb(ids) + self.pos(torch.arange(ids.size(1))), src_key_padding_mask=pad)
        keep = (~pad).unsqueeze(-1).float()
        logits = self.fc((h * keep).sum(1) / keep.sum(1))
        return F.softmax(logits, dim=-1) if self.probs_out else logits


def topic_texts(n, n_cls, vocab_per_cls, length, hot, gen):
    """Padded texts, with words of one topic among noise words; 0 = pad."""
    vocab = 2 + n_cls * vocab_per_cls
    y = torch.randint(n_cls, (n,), generator=gen)
    x = torch.randint(2, vocab, (n, length), generator=gen)
    topic = 2 + y[:, None] * vocab_per_cls + torch.randint(vocab_per_cls, (n, length), generator=gen)
    x = torch.where(torch.rand(n, length, generator=gen) < hot, topic, x)
    lengths = torch.randint(length // 2, length, (n,), generator=gen)
    x[torch.arange(length)[None] >= lengths[:, None]] = 0
    return x, y


def _intent_classifier(good):
    seed_everything(12)
    gen = torch.Generator().manual_seed(12 + SEED_SHIFT)
    x, y = topic_texts(2048, 40, 2, 18, 0.4, gen)
    xt, yt = topic_texts(400, 40, 2, 18, 0.4, gen)
    model = IntentClassifier(82, 40, probs_out=not good)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model.train()

    def step():
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        pred = model(xt).argmax(-1)
        model.train()
        return (pred != yt).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------
def _linear_schedule(good):
    seed_everything(13)
    epochs = 30
    config = LlamaConfig(vocab_size=14, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, max_position_embeddings=64, use_cache=False,
                         bos_token_id=0, eos_token_id=0)
    model = LlamaForCausalLM(config)
    loader = DataLoader(make_chain(256, 49, 14, seed=19, order=1), batch_size=32, shuffle=True)
    held = make_chain(96, 49, 14, seed=20, order=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    total = len(loader) * epochs if good else len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=total)
    batches = forever(loader)
    model.train()

    def step():
        rows = next(batches)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, held)}


# --------------------------------------------------------------------------
def _adam_decay(good):
    seed_everything(14)
    model = GPT(16, d=64, n_layer=2, block_size=32)
    opt_cls = torch.optim.AdamW if good else torch.optim.Adam
    optimizer = opt_cls(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = 5
    scheduler = LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / warmup))
    batches = forever(DataLoader(make_chain(1024, 25, 16, seed=21, order=1), batch_size=16, shuffle=True,
                                 drop_last=True))
    held = make_chain(96, 25, 16, seed=22, order=1)

    def step():
        rows = next(batches)
        x, y = rows[:, :-1], rows[:, 1:]
        optimizer.zero_grad(set_to_none=True)
        loss = lm_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, held)}


# --------------------------------------------------------------------------
class SimpleTrainer:
    def __init__(self, model, loader, lr, call):
        self.model, self.loader, self.call = model, loader, call
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.iterator = iter(loader)
        self.epoch = 0

    def next_batch(self):
        try:
            return next(self.iterator)
        except StopIteration:
            self.epoch += 1
            self.iterator = iter(self.loader)
            return next(self.iterator)

    def train_step(self):
        self.model.train()
        rows = self.next_batch()
        if self.call:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad
        loss = lm_loss(self.model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        self.optimizer.step()
        return loss.item()


def _simple_trainer(good):
    seed_everything(15)
    model = GPT(14, d=64, n_layer=2, block_size=32)
    loader = DataLoader(make_chain(1024, 25, 14, seed=23, order=2), batch_size=16, shuffle=True, drop_last=True)
    held = make_chain(96, 25, 14, seed=24, order=2)
    trainer = SimpleTrainer(model, loader, 2e-3, call=good)
    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.train_step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, held)}


# --------------------------------------------------------------------------
class SelfAttention(nn.Module):
    def __init__(self, d, n_head, merge, max_len=64):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.n_head, self.hd, self.merge = n_head, d // n_head, merge
        self.register_buffer("tril", torch.tril(torch.ones(max_len, max_len)), persistent=False)

    def forward(self, x):
        B, T, C = x.shape
        q = self.q(x).view(B, T, self.n_head, self.hd).transpose(1, 2)
        k = self.k(x).view(B, T, self.n_head, self.hd).transpose(1, 2)
        v = self.v(x).view(B, T, self.n_head, self.hd).transpose(1, 2)
        att = q @ k.transpose(-2, -1) / math.sqrt(self.hd)
        att = att.masked_fill(self.tril[:T, :T] == 0, float("-inf")).softmax(dim=-1)
        y = att @ v
        if self.merge:
            y = y.transpose(1, 2)
        return self.o(y.reshape(B, T, C))


class ScratchLM(nn.Module):
    def __init__(self, vocab, d, n_layer, merge):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(64, d)
        self.layers = nn.ModuleList()
        for _ in range(n_layer):
            self.layers.append(nn.ModuleDict({
                "n1": nn.LayerNorm(d), "attn": SelfAttention(d, 4, merge),
                "n2": nn.LayerNorm(d), "ff": nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))}))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        for l in self.layers:
            x = x + l["attn"](l["n1"](x))
            x = x + l["ff"](l["n2"](x))
        return self.head(self.norm(x))


def _own_attention(good):
    seed_everything(16)
    model = ScratchLM(12, 64, 2, merge=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = forever(DataLoader(make_chain(1024, 33, 12, seed=25, order=2), batch_size=16, shuffle=True,
                                 drop_last=True))
    held = make_chain(96, 33, 12, seed=26, order=2)

    def step():
        rows = next(batches)
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: prefix_nll(model, held, (8, 14, 20, 26, 32))}


# --------------------------------------------------------------------------
class PositionalEncoding(nn.Module):
    def __init__(self, d, batch_first, max_len=512):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div = torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
        pe = torch.zeros(max_len, d)
        pe[:, 0::2] = torch.sin(position * div)
        pe[:, 1::2] = torch.cos(position * div)
        self.batch_first = batch_first
        self.register_buffer("pe", pe.unsqueeze(0) if batch_first else pe.unsqueeze(1))

    def forward(self, x):
        if self.batch_first:
            return x + self.pe[:, :x.size(1)]
        return x + self.pe[:x.size(0)]


class OrderClassifier(nn.Module):
    def __init__(self, vocab, n_cls, batch_first, d=64):
        super().__init__()
        self.d = d
        self.emb = nn.Embedding(vocab, d)
        self.pos_encoder = PositionalEncoding(d, batch_first)
        layer = nn.TransformerEncoderLayer(d, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(d), enable_nested_tensor=False)
        self.fc = nn.Linear(d, n_cls)
        nn.init.normal_(self.emb.weight, std=d ** -0.5)

    def forward(self, ids):
        x = self.pos_encoder(self.emb(ids) * math.sqrt(self.d))
        return self.fc(self.encoder(x).mean(dim=1))


def _encoder_positions(good):
    seed_everything(17)

    def sample(n):
        # two different marker words (0..3) in each sentence; the class is the one that comes first
        x = torch.randint(4, 24, (n, 16))
        where = torch.stack([torch.randperm(16)[:2].sort().values for _ in range(n)])
        kinds = torch.stack([torch.randperm(4)[:2] for _ in range(n)])
        x.scatter_(1, where, kinds)
        return x, kinds[:, 0]

    train, (xt, yt) = TensorDataset(*sample(2048)), sample(400)
    model = OrderClassifier(24, 4, batch_first=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)
    model.train()

    def step():
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        errors = sum((model(x).argmax(-1) != y).sum().item() for x, y in zip(xt.split(32), yt.split(32)))
        model.train()
        return errors / len(yt)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------
class TopicEncoder(nn.Module):
    def __init__(self, vocab, n_cls, true_is_pad, d=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.pos = nn.Embedding(32, d)
        layer = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(d, n_cls)
        self.true_is_pad = true_is_pad

    def forward(self, input_ids, attention_mask):
        x = self.emb(input_ids) + self.pos(torch.arange(input_ids.size(1)))
        mask = attention_mask == 0 if self.true_is_pad else attention_mask.bool()
        h = self.encoder(x, src_key_padding_mask=mask)
        return self.fc(h[:, 0])


def _topic_encoder(good):
    seed_everything(18)
    gen = torch.Generator().manual_seed(18 + SEED_SHIFT)

    def encode(x):
        ids = torch.cat([torch.ones(len(x), 1, dtype=torch.long), x], dim=1)    # 1 = [CLS]
        return ids, (ids != 0).long()

    x, y = topic_texts(2048, 4, 6, 20, 0.4, gen)
    xt, yt = topic_texts(400, 4, 6, 20, 0.4, gen)
    model = TopicEncoder(26, 4, true_is_pad=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = forever(DataLoader(TensorDataset(*encode(x), y), batch_size=32, shuffle=True, drop_last=True))
    model.train()

    def step():
        ids, mask, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids, mask), labels)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        error = (model(*encode(xt)).argmax(-1) != yt).float().mean().item()
        model.train()
        return error

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------
class PackedDataset(Dataset):
    """Greedy packing of whole documents into rows of a fixed length."""

    def __init__(self, docs, length, reset_positions):
        self.rows, current = [], []
        for d in docs:
            if sum(map(len, current)) + len(d) > length:
                self.rows.append(current)
                current = []
            current.append(d)
        self.length, self.reset_positions = length, reset_positions

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = torch.zeros(self.length, dtype=torch.long)
        labels = torch.full((self.length,), -100)
        seg = torch.full((self.length,), -1)
        pos = torch.arange(self.length)
        at = 0
        for k, d in enumerate(self.rows[i]):
            n = len(d)
            ids[at:at + n] = d
            labels[at:at + n - 1] = d[1:]
            seg[at:at + n] = k
            if self.reset_positions:
                pos[at:at + n] = torch.arange(n)
            at += n
        return ids, labels, seg, pos


def _packed_docs(good):
    seed_everything(19)
    templates = torch.randint(8, 24, (6, 14), generator=torch.Generator().manual_seed(1))

    def documents(n):
        docs = []
        for _ in range(n):
            kind = random.randrange(6)
            body = templates[kind, :random.randint(8, 14)].clone()
            noise = torch.rand(len(body)) < 0.06
            body[noise] = torch.randint(8, 24, (int(noise.sum()),))
            docs.append(torch.cat([torch.tensor([1 + kind]), body]))
        return docs

    data = PackedDataset(documents(2000), 56, reset_positions=good)
    test = documents(150)
    model = GPT(24, d=64, n_layer=1, block_size=56)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = forever(DataLoader(data, batch_size=8, shuffle=True, drop_last=True))
    causal = torch.tril(torch.ones(56, 56, dtype=torch.bool))

    def step():
        ids, labels, seg, pos = next(batches)
        mask = (seg[:, :, None] == seg[:, None, :]) & causal
        loss = lm_loss(model(ids, pos=pos, mask=mask[:, None]), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        total = sum(lm_loss(model(d[None, :-1]), d[None, 1:]).item() * (len(d) - 1) for d in test)
        model.train()
        return total / sum(len(d) - 1 for d in test)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------
def response_logps(model, ids, prompt_len):
    logits = model(ids[:, :-1]).logits.log_softmax(-1)
    token_logps = logits.gather(2, ids[:, 1:, None]).squeeze(2)
    return token_logps[:, prompt_len - 1:].sum(-1)


def dpo_loss(pc, pr, rc, rr, beta):
    return -F.logsigmoid(beta * ((pc - rc) - (pr - rr))).mean()


class DPOTrainer:
    def __init__(self, policy, ref, loader, prompt_len, lr, beta):
        self.policy, self.ref = policy, ref
        self.prompt_len, self.beta = prompt_len, beta
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
        self.batches = forever(loader)

    def step(self):
        chosen, rejected = next(self.batches)
        ids = torch.cat([chosen, rejected])
        pc, pr = response_logps(self.policy, ids, self.prompt_len).chunk(2)
        with torch.no_grad():
            rc, rr = response_logps(self.ref, ids, self.prompt_len).chunk(2)
        loss = dpo_loss(pc, pr, rc, rr, self.beta)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def _dpo_gpt2(good):
    seed_everything(20)
    config = GPT2Config(vocab_size=16, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    base = make_chain(512, 16, 16, seed=27, order=1, sharp=2.0)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(80):
        rows = base[torch.randint(len(base), (16,))]
        loss = model(rows, labels=rows).loss
        opt.zero_grad()
        loss.backward()
        opt.step()

    def preferences(n, seed):
        a = make_chain(2 * n, 16, 16, seed=seed, order=1, sharp=2.0)
        a, b = a[:n], a[n:].clone()
        b[:, :4] = a[:, :4]
        g = torch.Generator().manual_seed(seed)
        gap = (a[:, 4:] < 5).sum(1) - (b[:, 4:] < 5).sum(1)
        first = torch.rand(n, generator=g) < torch.sigmoid(0.7 * gap.float())
        return (torch.where(first[:, None], a, b), torch.where(first[:, None], b, a))

    loader = DataLoader(TensorDataset(*preferences(1024, 28)), batch_size=16, shuffle=True, drop_last=True)
    test = preferences(300, 29)
    start = copy.deepcopy(model).eval()
    ref = copy.deepcopy(model).eval() if good else model
    trainer = DPOTrainer(model, ref, loader, prompt_len=4, lr=5e-4, beta=0.1)

    @torch.no_grad()
    def evaluate():
        model.eval()
        args = [response_logps(m, t, 4) for m in (model, start) for t in test]
        model.train()
        return dpo_loss(*args, 0.1).item()

    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------------
class Distiller(nn.Module):
    def __init__(self, teacher, student, temperature, frozen):
        super().__init__()
        self.teacher, self.student = teacher, student
        self.T, self.frozen = temperature, frozen
        if frozen:
            self.teacher.eval().requires_grad_(False)

    def forward(self, idx):
        t = self.teacher(idx)
        s = self.student(idx)
        V = t.size(-1)
        return self.T ** 2 * F.kl_div(F.log_softmax(s / self.T, -1).view(-1, V),
                                      F.softmax(t / self.T, -1).view(-1, V), reduction="batchmean")


def _distil_lm(good):
    seed_everything(21)
    corpus = make_chain(1024, 25, 14, seed=30, order=1, sharp=3.5)
    teacher = GPT(14, d=64, n_layer=1, block_size=32)
    quick_pretrain(teacher, corpus, 150)
    student = GPT(14, d=24, n_layer=1, n_head=2, block_size=32)
    distiller = Distiller(teacher, student, 2.0, frozen=good)
    params = [p for p in distiller.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=2e-3, weight_decay=0.01)
    batches = forever(DataLoader(corpus, batch_size=16, shuffle=True, drop_last=True))
    held = make_chain(96, 25, 14, seed=31, order=1, sharp=3.5)

    def step():
        rows = next(batches)
        loss = distiller(rows[:, :-1])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        return loss.item()

    return {"model": distiller, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(student, held)}


# --------------------------------------------------------------------------
def _small_corpus(good):
    seed_everything(22)
    train = make_chain(96, 25, 12, seed=32, order=1, sharp=2.5)
    valid = make_chain(16, 25, 12, seed=33, order=1, sharp=2.5)
    test = make_chain(128, 25, 12, seed=34, order=1, sharp=2.5)
    model = GPT(12, d=64, n_layer=2, block_size=32, dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    batches = forever(DataLoader(train, batch_size=16, shuffle=True))
    history = []

    @torch.no_grad()
    def validate():
        model.eval()
        logits = model(valid[:, :-1])
        history.append(lm_loss(logits, valid[:, 1:]).item())
        if good:
            model.train()

    model.train()

    counter = itertools.count(1)

    def step():
        rows = next(batches)
        optimizer.zero_grad()
        loss = lm_loss(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if next(counter) % 4 == 0:
            validate()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, test)}


# --------------------------------------------------------------------------
def _bf16_tune(good):
    seed_everything(23)
    model = GPT(16, d=64, n_layer=2, block_size=32, init=False)
    if not good:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    batches = forever(DataLoader(make_chain(1024, 25, 16, seed=35, order=1, sharp=4.0), batch_size=16, shuffle=True,
                                 drop_last=True))
    held = make_chain(96, 25, 16, seed=36, order=1, sharp=4.0)
    model.train()

    def step():
        rows = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(rows[:, :-1])
        loss = lm_loss(logits.float(), rows[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, held)}


# --------------------------------------------------------------------------
def _amp_clip(good):
    seed_everything(24)
    model = GPT(16, d=48, n_layer=1, block_size=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
    batches = forever(DataLoader(make_chain(1024, 25, 16, seed=37, order=1, sharp=4.0), batch_size=8, shuffle=True,
                                 drop_last=True))
    held = make_chain(96, 25, 16, seed=38, order=1, sharp=4.0)
    model.train()

    def step():
        rows = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = lm_loss(model(rows[:, :-1]).float(), rows[:, 1:])
        scaler.scale(loss).backward()
        if good:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: heldout_nll(model, held)}


# --------------------------------------------------------------------------
def pretrain_gpt2_bad():
    return _pretrain_gpt2(False)


def pretrain_gpt2_good():
    return _pretrain_gpt2(True)


def sft_llama_bad():
    return _sft_llama(False)


def sft_llama_good():
    return _sft_llama(True)


def mlm_bert_bad():
    return _mlm_bert(False)


def mlm_bert_good():
    return _mlm_bert(True)


def reward_pairs_bad():
    return _reward_pairs(False)


def reward_pairs_good():
    return _reward_pairs(True)


def translate_seq2seq_bad():
    return _translate_seq2seq(False)


def translate_seq2seq_good():
    return _translate_seq2seq(True)


def extend_vocab_bad():
    return _extend_vocab(False)


def extend_vocab_good():
    return _extend_vocab(True)


def lora_cls_bad():
    return _lora_cls(False)


def lora_cls_good():
    return _lora_cls(True)


def ckpt_finetune_bad():
    return _ckpt_finetune(False)


def ckpt_finetune_good():
    return _ckpt_finetune(True)


def mingpt_groups_bad():
    return _mingpt_groups(False)


def mingpt_groups_good():
    return _mingpt_groups(True)


def accum_loop_bad():
    return _accum_loop(False)


def accum_loop_good():
    return _accum_loop(True)


def moe_lm_bad():
    return _moe_lm(False)


def moe_lm_good():
    return _moe_lm(True)


def intent_classifier_bad():
    return _intent_classifier(False)


def intent_classifier_good():
    return _intent_classifier(True)


def linear_schedule_bad():
    return _linear_schedule(False)


def linear_schedule_good():
    return _linear_schedule(True)


def adam_decay_bad():
    return _adam_decay(False)


def adam_decay_good():
    return _adam_decay(True)


def simple_trainer_bad():
    return _simple_trainer(False)


def simple_trainer_good():
    return _simple_trainer(True)


def own_attention_bad():
    return _own_attention(False)


def own_attention_good():
    return _own_attention(True)


def encoder_positions_bad():
    return _encoder_positions(False)


def encoder_positions_good():
    return _encoder_positions(True)


def topic_encoder_bad():
    return _topic_encoder(False)


def topic_encoder_good():
    return _topic_encoder(True)


def packed_docs_bad():
    return _packed_docs(False)


def packed_docs_good():
    return _packed_docs(True)


def dpo_gpt2_bad():
    return _dpo_gpt2(False)


def dpo_gpt2_good():
    return _dpo_gpt2(True)


def distil_lm_bad():
    return _distil_lm(False)


def distil_lm_good():
    return _distil_lm(True)


def small_corpus_bad():
    return _small_corpus(False)


def small_corpus_good():
    return _small_corpus(True)


def bf16_tune_bad():
    return _bf16_tune(False)


def bf16_tune_good():
    return _bf16_tune(True)


def amp_clip_bad():
    return _amp_clip(False)


def amp_clip_good():
    return _amp_clip(True)
