"""Small training programs for language models: pre-training, fine-tuning, LoRA,
distillation, preference tuning, translation, tagging and classification.

Every program comes as NAME_bad() and NAME_good() and returns a dict with the model,
the optimizer, a step function and an evaluation.
"""
import copy
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
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

SEED = 0


def seed_all(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def forever(loader):
    while True:
        yield from loader


class MarkovText:
    """A toy language: a first-order chain with a few likely successors per token."""

    def __init__(self, vocab, seed, branch=3, offset=0):
        g = torch.Generator().manual_seed(seed)
        self.vocab, self.offset = vocab, offset
        weights = torch.tensor([0.75, 0.15, 0.1])[:branch]
        weights = weights / weights.sum()
        self.P = torch.full((vocab, vocab), 1e-9)
        for s in range(vocab):
            nxt = torch.randperm(vocab, generator=g)[:branch]
            self.P[s, nxt] = weights
        self.P /= self.P.sum(1, keepdim=True)
        self.g = torch.Generator().manual_seed(seed + 1)

    def sample(self, n, length, g=None):
        g = g or self.g
        cur = torch.randint(0, self.vocab, (n,), generator=g)
        out = [cur]
        for _ in range(length - 1):
            cur = torch.multinomial(self.P[cur], 1, generator=g).squeeze(1)
            out.append(cur)
        return torch.stack(out, 1) + self.offset


CASES = []


# --------------------------------------------------------------------------------------
# 1. Supervised fine-tuning of GPT-2 on prompt / response pairs
# --------------------------------------------------------------------------------------
CASES.append({"name": "gpt2_sft_collate", "what": "The hand-written SFT collator already shifts labels by one against input_ids, and GPT2LMHeadModel shifts them again inside: the model learns to predict the token after the next, so responses come out wrong."})


class InstructionSet(Dataset):
    PAD, SEP, EOS, FIRST, NSYM = 0, 1, 2, 3, 12

    def __init__(self, n, seed):
        rng = random.Random(seed)
        table = list(range(self.NSYM))
        random.Random(77).shuffle(table)
        self.rows = []
        for _ in range(n):
            syms = [rng.randrange(self.NSYM) for _ in range(rng.randint(3, 6))]
            prompt = [self.FIRST + s for s in syms] + [self.SEP]
            answer = [self.FIRST + table[s] for s in syms] + [self.EOS]
            self.rows.append((prompt, answer))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def _gpt2_sft_collate(good):
    seed_all(SEED + 1)
    train, held = InstructionSet(4000, SEED + 1), InstructionSet(200, SEED + 900)
    PAD = InstructionSet.PAD

    def collate(rows):
        ids, labels, attn = [], [], []
        for prompt, answer in rows:
            full = torch.tensor(prompt + answer)
            lab = full.clone()
            lab[: len(prompt)] = -100
            if not good:
                full, lab = full[:-1], lab[1:]
            ids.append(full)
            labels.append(lab)
            attn.append(torch.ones_like(full))
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=PAD),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
            "attention_mask": pad_sequence(attn, batch_first=True, padding_value=0),
        }

    config = GPT2Config(vocab_size=16, n_positions=32, n_embd=48, n_layer=2, n_head=4,
                        bos_token_id=None, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    batches = forever(DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate, drop_last=True))

    def step():
        batch = next(batches)
        out = model(**batch)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        model.eval()
        miss = total = 0
        for prompt, answer in held.rows:
            ids = torch.tensor([prompt + answer])
            pred = model(input_ids=ids).logits.argmax(-1)[0, len(prompt) - 1 : -1]
            miss += (pred != torch.tensor(answer)).sum().item()
            total += len(answer)
        model.train()
        return miss / total

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def gpt2_sft_collate_bad():
    return _gpt2_sft_collate(False)


def gpt2_sft_collate_good():
    return _gpt2_sft_collate(True)


# --------------------------------------------------------------------------------------
# 2. Llama, chat-style completions that must know when to stop
# --------------------------------------------------------------------------------------
CASES.append({"name": "llama_repeat_sft", "what": "pad_token is eos_token, and the collator sets labels to -100 wherever the id equals pad, so the real EOS at the end of each answer is never trained: generation never stops."})


def _llama_repeat_sft(good):
    seed_all(SEED + 2)
    EOS, SEP, COUNT0, TOK0 = 0, 1, 2, 8
    tokenizer_pad = EOS

    def make(n, rng):
        rows = []
        for _ in range(n):
            k, tok = rng.randint(1, 5), rng.randrange(12)
            rows.append(([COUNT0 + k, TOK0 + tok, SEP], [TOK0 + tok] * k + [EOS]))
        return rows

    train = make(3000, random.Random(SEED + 2))

    def collate(rows):
        n = max(len(p) + len(a) for p, a in rows)
        input_ids = torch.full((len(rows), n), tokenizer_pad)
        attention_mask = torch.zeros(len(rows), n, dtype=torch.long)
        for i, (p, a) in enumerate(rows):
            input_ids[i, : len(p) + len(a)] = torch.tensor(p + a)
            attention_mask[i, : len(p) + len(a)] = 1
        labels = input_ids.clone()
        if good:
            labels[attention_mask == 0] = -100
        else:
            labels[labels == tokenizer_pad] = -100
        for i, (p, _) in enumerate(rows):
            labels[i, : len(p)] = -100
        return input_ids, attention_mask, labels

    loader = DataLoader(train, batch_size=24, shuffle=True, collate_fn=collate, drop_last=True)
    cfg = LlamaConfig(vocab_size=20, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
                      bos_token_id=None, eos_token_id=EOS, pad_token_id=None)
    model = LlamaForCausalLM(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 20, 2000)
    it = forever(loader)

    def step():
        model.train()
        input_ids, attention_mask, labels = next(it)
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        rows = make(120, random.Random(SEED + 902))
        ids = torch.tensor([p for p, _ in rows])
        for _ in range(7):
            nxt = model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, nxt], 1)
        wrong = 0
        for row, (p, a) in zip(ids.tolist(), rows):
            wrong += row[len(p) : len(p) + len(a)] != a
        model.train()
        return wrong / len(rows)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def llama_repeat_sft_bad():
    return _llama_repeat_sft(False)


def llama_repeat_sft_good():
    return _llama_repeat_sft(True)


# --------------------------------------------------------------------------------------
# 3. Masked language modelling with BERT
# --------------------------------------------------------------------------------------
CASES.append({"name": "bert_mlm", "what": "In the MLM masking the labels are cloned after [MASK] has been written into input_ids, so nearly every target is the [MASK] id itself; the loss falls to almost nothing and no word is learnt."})


class MaskingCollator:
    def __init__(self, mask_id, first_word, vocab, labels_first, p=0.2):
        self.mask_id, self.first_word, self.vocab, self.labels_first, self.p = mask_id, first_word, vocab, labels_first, p

    def __call__(self, rows):
        input_ids = torch.stack([r[0] for r in rows]).clone()
        chosen = torch.rand(input_ids.shape) < self.p
        if self.labels_first:
            labels = input_ids.clone()
        r = torch.rand(input_ids.shape)
        input_ids[chosen & (r < 0.8)] = self.mask_id
        swap = chosen & (r >= 0.8) & (r < 0.9)
        input_ids[swap] = torch.randint(self.first_word, self.vocab, (int(swap.sum()),))
        if not self.labels_first:
            labels = input_ids.clone()
        labels[~chosen] = -100
        return {"input_ids": input_ids, "labels": labels, "attention_mask": torch.ones_like(input_ids)}


def _bert_mlm(good):
    seed_all(SEED + 3)
    lang = MarkovText(20, 31, offset=3)
    vocab, mask_id = 23, 2
    data = TensorDataset(lang.sample(4000, 16))
    held = lang.sample(200, 16, torch.Generator().manual_seed(SEED + 903))
    collator = MaskingCollator(mask_id, 3, vocab, good)
    batches = forever(DataLoader(data, batch_size=32, shuffle=True, collate_fn=collator, drop_last=True))
    model = BertForMaskedLM(BertConfig(vocab_size=vocab, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                                       intermediate_size=96, max_position_embeddings=32,
                                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step():
        batch = next(batches)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        model.eval()
        g = torch.Generator().manual_seed(5)
        pick = torch.rand(held.shape, generator=g) < 0.2
        ids = held.masked_fill(pick, mask_id)
        pred = model(input_ids=ids).logits.argmax(-1)
        model.train()
        return (pred[pick] != held[pick]).float().mean().item()

    model.train()
    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def bert_mlm_bad():
    return _bert_mlm(False)


def bert_mlm_good():
    return _bert_mlm(True)


# --------------------------------------------------------------------------------------
# 4. Token tagging with nn.TransformerEncoder
# --------------------------------------------------------------------------------------
CASES.append({"name": "encoder_tagger", "what": "src_key_padding_mask is passed with True for real tokens (the HuggingFace sense), while torch ignores the True positions: tokens attend only to padding and never see each other."})


class EncoderTagger(nn.Module):
    def __init__(self, vocab, n_tags, d_model=48, max_len=20, pad_id=0, mask_pads=True):
        super().__init__()
        self.pad_id, self.mask_pads = pad_id, mask_pads
        self.tok = nn.Embedding(vocab, d_model, padding_idx=pad_id)
        self.pos = nn.Embedding(max_len, d_model)
        layer = nn.TransformerEncoderLayer(d_model, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(d_model), enable_nested_tensor=False)
        self.out = nn.Linear(d_model, n_tags)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.size(1), device=tokens.device))
        if self.mask_pads:
            mask = tokens == self.pad_id
        else:
            mask = tokens != self.pad_id
        x = self.encoder(x, src_key_padding_mask=mask)
        return self.out(x)


def _encoder_tagger(good):
    seed_all(SEED + 4)
    n_words, n_tags, L = 16, 6, 20
    table = torch.randint(0, n_tags, (4, n_words), generator=torch.Generator().manual_seed(40))

    def make(n, seed):
        g = torch.Generator().manual_seed(seed)
        domain = torch.randint(0, 4, (n,), generator=g)
        words = torch.randint(0, n_words, (n, L - 1), generator=g)
        lengths = torch.randint(8, L - 3, (n, 1), generator=g)
        tags = table[domain[:, None], words]
        pad = torch.arange(L - 1)[None] >= lengths
        x = torch.cat([domain[:, None] + 1, (words + 5).masked_fill(pad, 0)], 1)
        y = torch.cat([torch.full((n, 1), -100), tags.masked_fill(pad, -100)], 1)
        return TensorDataset(x, y)

    train, test = make(4000, SEED + 4), make(300, SEED + 904)
    loader = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))
    model = EncoderTagger(5 + n_words, n_tags, mask_pads=good)
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step():
        x, y = next(loader)
        optimizer.zero_grad()
        logits = model(x)
        loss = criterion(logits.reshape(-1, n_tags), y.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        x, y = test.tensors
        model.eval()
        pred = model(x).argmax(-1)
        model.train()
        return (pred[y >= 0] != y[y >= 0]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def encoder_tagger_bad():
    return _encoder_tagger(False)


def encoder_tagger_good():
    return _encoder_tagger(True)


# --------------------------------------------------------------------------------------
# 5. LoRA adaptation of a causal LM to a new domain
# --------------------------------------------------------------------------------------
CASES.append({"name": "lora_domain", "what": "The optimizer is built from the trainable parameters before get_peft_model: it holds only base weights, which peft then freezes, and none of the LoRA matrices, so nothing is learnt."})


def _lora_domain(good):
    seed_all(SEED + 5)
    source, target = MarkovText(20, 50), MarkovText(20, 51)
    cfg = LlamaConfig(vocab_size=20, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32,
                      bos_token_id=None, eos_token_id=None, pad_token_id=None)
    base = LlamaForCausalLM(cfg)
    base_opt = torch.optim.AdamW(base.parameters(), lr=5e-3)
    for _ in range(60):
        ids = source.sample(16, 16)
        base(input_ids=ids, labels=ids).loss.backward()
        base_opt.step()
        base_opt.zero_grad()
    del base_opt

    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, task_type=TaskType.CAUSAL_LM,
                      target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    if good:
        model = get_peft_model(base, lora)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    else:
        optimizer = torch.optim.AdamW([p for p in base.parameters() if p.requires_grad], lr=5e-3)
        model = get_peft_model(base, lora)
    batches = forever(DataLoader(TensorDataset(target.sample(3000, 16)), batch_size=16, shuffle=True))
    held = target.sample(200, 16, torch.Generator().manual_seed(SEED + 905))

    def step():
        model.train()
        (ids,) = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        model.eval()
        return model(input_ids=held, labels=held).loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def lora_domain_bad():
    return _lora_domain(False)


def lora_domain_good():
    return _lora_domain(True)


# --------------------------------------------------------------------------------------
# Hand-written GPT pieces (nanoGPT style)
# --------------------------------------------------------------------------------------
class SelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size, direct_view=False):
        super().__init__()
        self.n_head, self.direct_view = n_head, direct_view
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        if self.direct_view:
            q = q.reshape(B, self.n_head, T, C // self.n_head)
            k = k.reshape(B, self.n_head, T, C // self.n_head)
            v = v.reshape(B, self.n_head, T, C // self.n_head)
        else:
            q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class FeedForward(nn.Module):
    def __init__(self, n_embd, hidden):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, hidden)
        self.c_proj = nn.Linear(hidden, n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, block_size, ffn=None, direct_view=False):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = SelfAttention(n_embd, n_head, block_size, direct_view)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = ffn if ffn is not None else FeedForward(n_embd, 4 * n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab, block_size=16, n_layer=2, n_head=4, n_embd=48, make_ffn=None, direct_view=False):
        super().__init__()
        self.block_size = block_size
        self.wte = nn.Embedding(vocab, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([
            Block(n_embd, n_head, block_size, make_ffn() if make_ffn else None, direct_view) for _ in range(n_layer)
        ])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.apply(self._init_weights)
        self.lm_head.weight = self.wte.weight

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss


@torch.no_grad()
def prefix_error(model, ids, cuts):
    """Next-token error when only the text to the left is given."""
    model.eval()
    miss = total = 0
    for t in cuts:
        logits = model(ids[:, :t])
        logits = logits[0] if isinstance(logits, tuple) else logits
        miss += (logits[:, -1].argmax(-1) != ids[:, t]).sum().item()
        total += ids.size(0)
    model.train()
    return miss / total


# --------------------------------------------------------------------------------------
# 6. Mixture of experts
# --------------------------------------------------------------------------------------
CASES.append({"name": "moe_gpt", "what": "The experts are built as nn.ModuleList([expert] * n): all entries are one and the same module, so the mixture has the capacity of a single small expert and routing means nothing."})


class MoE(nn.Module):
    def __init__(self, n_embd, hidden, n_experts, top_k, shared):
        super().__init__()
        self.top_k, self.n_experts = top_k, n_experts
        self.gate = nn.Linear(n_embd, n_experts, bias=False)
        if shared:
            self.experts = nn.ModuleList([FeedForward(n_embd, hidden)] * n_experts)
        else:
            self.experts = nn.ModuleList([FeedForward(n_embd, hidden) for _ in range(n_experts)])
        self.aux_loss = 0.0

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        probs = F.softmax(self.gate(flat), dim=-1)
        weight, index = probs.topk(self.top_k, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, slot = torch.where(index == e)
            if rows.numel():
                out.index_add_(0, rows, weight[rows, slot, None] * expert(flat[rows]))
        load = F.one_hot(index, self.n_experts).float().sum(1).mean(0) / self.top_k
        self.aux_loss = self.n_experts * (load * probs.mean(0)).sum()
        return out.view_as(x)


def _moe_gpt(good):
    seed_all(SEED + 7)
    n_words, n_dialects = 40, 6
    table = torch.stack([torch.randperm(n_words, generator=torch.Generator().manual_seed(70 + d))
                         for d in range(n_dialects)])

    def get_batch(n, g):
        # every document: its dialect, then words, each followed by its translation
        dialect = torch.randint(0, n_dialects, (n, 1), generator=g)
        words = torch.randint(0, n_words, (n, 8), generator=g)
        pairs = torch.stack([words, table[dialect, words]], 2).reshape(n, 16)
        ids = torch.cat([dialect + n_words, pairs], 1)
        x, y = ids[:, :-1], ids[:, 1:].clone()
        y[:, 0::2] = -1
        return x, y

    g = torch.Generator().manual_seed(SEED + 7)
    model = GPT(n_words + n_dialects, n_embd=24, n_layer=1, n_head=2,
                make_ffn=lambda: MoE(24, 16, 8, 2, shared=not good))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)

    def step():
        x, y = get_batch(32, g)
        _, loss = model(x, y)
        loss = loss + 0.01 * sum(b.mlp.aux_loss for b in model.h)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        x, y = get_batch(300, torch.Generator().manual_seed(SEED + 907))
        loss = model(x, y)[1].item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def moe_gpt_bad():
    return _moe_gpt(False)


def moe_gpt_good():
    return _moe_gpt(True)


# --------------------------------------------------------------------------------------
# 7. LoRA classifier with gradient checkpointing
# --------------------------------------------------------------------------------------
CASES.append({"name": "lora_checkpointing", "what": "Every block runs under checkpoint(..., use_reentrant=True) while the embeddings are frozen: the inputs of the checkpointed blocks need no gradient, so all LoRA weights get none and only the classifier head learns."})


class CheckpointedClassifier(nn.Module):
    def __init__(self, vocab, n_classes, n_embd=48, n_layer=2, n_head=4, max_len=14, reentrant=True):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(max_len, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head, max_len) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.classifier = nn.Linear(n_embd, n_classes)
        self.reentrant = reentrant

    def forward(self, input_ids):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.size(1), device=input_ids.device))
        for block in self.h:
            if self.training:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return self.classifier(self.ln_f(x)[:, -1])


def _lora_checkpointing(good):
    seed_all(SEED + 8)
    n_words, L = 16, 14
    flip = torch.arange(n_words) % 2

    def make(n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randint(0, n_words, (n, L), generator=g)
        y = flip[x[:, 0]] ^ flip[x[:, -1]]
        return TensorDataset(x, y)

    backbone = CheckpointedClassifier(n_words, 2, reentrant=not good)
    model = get_peft_model(backbone, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0,
                                                target_modules=["c_attn", "c_proj", "c_fc"],
                                                modules_to_save=["classifier"]))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=4e-3)
    train, test = make(4000, SEED + 8), make(400, SEED + 908)
    batches = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))

    def step():
        model.train()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        x, y = test.tensors
        model.eval()
        return (model(x).argmax(-1) != y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def lora_checkpointing_bad():
    return _lora_checkpointing(False)


def lora_checkpointing_good():
    return _lora_checkpointing(True)


# --------------------------------------------------------------------------------------
# 8. Knowledge distillation, small student
# --------------------------------------------------------------------------------------
CASES.append({"name": "kd_student", "what": "F.kl_div is given the student's softmax instead of its log_softmax as input; the result is not a divergence, and its gradient only pushes mass onto the teacher's favourite token."})


def _kd_student(good):
    seed_all(SEED + 9)
    lang = MarkovText(24, 90)

    def gpt2(n_embd, n_layer):
        return GPT2LMHeadModel(GPT2Config(vocab_size=24, n_positions=24, n_embd=n_embd, n_layer=n_layer, n_head=4,
                                          resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                          bos_token_id=None, eos_token_id=None))

    teacher = gpt2(48, 2)
    opt = torch.optim.AdamW(teacher.parameters(), lr=5e-3)
    for _ in range(120):
        ids = lang.sample(24, 12)
        teacher(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = gpt2(32, 1)
    student.train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    temperature, alpha = 2.0, 0.9
    held = lang.sample(300, 16, torch.Generator().manual_seed(SEED + 909))

    def distillation_loss(s_logits, t_logits):
        t = F.softmax(t_logits / temperature, dim=-1)
        if good:
            s = F.log_softmax(s_logits / temperature, dim=-1)
        else:
            s = F.softmax(s_logits / temperature, dim=-1)
        vocab = s.size(-1)
        return F.kl_div(s.view(-1, vocab), t.view(-1, vocab), reduction="batchmean") * temperature ** 2

    def step():
        ids = lang.sample(16, 16)
        with torch.no_grad():
            t_logits = teacher(input_ids=ids).logits
        out = student(input_ids=ids, labels=ids)
        loss = alpha * distillation_loss(out.logits, t_logits) + (1 - alpha) * out.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        student.eval()
        loss = student(input_ids=held, labels=held).loss.item()
        student.train()
        return loss

    return {"model": student, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def kd_student_bad():
    return _kd_student(False)


def kd_student_good():
    return _kd_student(True)


# --------------------------------------------------------------------------------------
# 9. LSTM language model
# --------------------------------------------------------------------------------------
CASES.append({"name": "lstm_lm", "what": "The LSTM language model ends in softmax and its probabilities go to nn.CrossEntropyLoss, which applies log_softmax again: gradients are tiny and the loss cannot go below a high floor."})


class LSTMLanguageModel(nn.Module):
    def __init__(self, vocab, emb=32, hidden=64, probs=False):
        super().__init__()
        self.embedding = nn.Embedding(vocab, emb)
        self.lstm = nn.LSTM(emb, hidden, num_layers=1, batch_first=True)
        self.fc = nn.Linear(hidden, vocab)
        self.probs = probs

    def forward(self, x):
        h, _ = self.lstm(self.embedding(x))
        out = self.fc(h)
        if self.probs:
            out = torch.softmax(out, dim=-1)
        return out


def _lstm_lm(good):
    seed_all(SEED + 10)
    vocab = 40
    lang = MarkovText(vocab, 100)
    text = lang.sample(3000, 17)
    held = lang.sample(300, 17, torch.Generator().manual_seed(SEED + 910))
    loader = forever(DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=32, shuffle=True))
    model = LSTMLanguageModel(vocab, probs=not good)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step():
        x, y = next(loader)
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out.reshape(-1, vocab), y.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        out = model(held[:, :-1])
        logp = out.log() if model.probs else out.log_softmax(-1)
        return F.nll_loss(logp.reshape(-1, vocab), held[:, 1:].reshape(-1)).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def lstm_lm_bad():
    return _lstm_lm(False)


def lstm_lm_good():
    return _lstm_lm(True)


# --------------------------------------------------------------------------------------
# 10. Pre-training on a mix of sources with gradient accumulation
# --------------------------------------------------------------------------------------
CASES.append({"name": "gpt_source_mix", "what": "optimizer.zero_grad() sits inside the micro-batch loop of gradient accumulation, so the update uses only the last micro-batch (a single source), and the other sources never teach."})


def _gpt_source_mix(good):
    seed_all(SEED + 11)
    vocab, sources = 24, [MarkovText(24, 110 + s) for s in range(4)]
    grad_accum = len(sources)
    model = GPT(vocab + grad_accum)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def tagged(s, n, g=None):
        ids = sources[s].sample(n, 16, g)
        return torch.cat([torch.full((n, 1), vocab + s), ids], 1)

    def step():
        optimizer.zero_grad(set_to_none=True)
        for micro in range(grad_accum):
            if not good:
                optimizer.zero_grad(set_to_none=True)
            ids = tagged(micro, 8)
            _, loss = model(ids[:, :-1], ids[:, 1:])
            (loss / grad_accum).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        losses = []
        for s in range(grad_accum):
            ids = tagged(s, 100, torch.Generator().manual_seed(SEED + 911 + s))
            losses.append(model(ids[:, :-1], ids[:, 1:])[1].item())
        model.train()
        return sum(losses) / len(losses)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def gpt_source_mix_bad():
    return _gpt_source_mix(False)


def gpt_source_mix_good():
    return _gpt_source_mix(True)


# --------------------------------------------------------------------------------------
# 11. Scalar reward model
# --------------------------------------------------------------------------------------
CASES.append({"name": "reward_regressor", "what": "The reward head gives shape (B, 1) and the scores have shape (B,): the squared difference broadcasts to (B, B), every prediction is pulled to the mean of the batch."})


class RewardModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.backbone = GPT2Model(config)
        self.score = nn.Linear(config.n_embd, 1)

    def forward(self, input_ids, attention_mask):
        h = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(1) - 1
        return self.score(h[torch.arange(h.size(0)), last])


def _reward_regressor(good):
    seed_all(SEED + 12)
    n_words, L = 20, 14
    worth = torch.randn(n_words, generator=torch.Generator().manual_seed(120))
    worth = (worth - worth.mean()) / worth.std()

    def make(n, seed):
        g = torch.Generator().manual_seed(seed)
        words = torch.randint(0, n_words, (n, L), generator=g)
        lengths = torch.randint(6, L + 1, (n, 1), generator=g)
        mask = (torch.arange(L)[None] < lengths).long()
        r = (worth[words] * mask).sum(1) / mask.sum(1).sqrt()
        return TensorDataset((words + 1) * mask, mask, r)

    train, test = make(4000, SEED + 12), make(400, SEED + 912)
    loader = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))
    model = RewardModel(GPT2Config(vocab_size=n_words + 1, n_positions=16, n_embd=48, n_layer=2, n_head=4,
                                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                   bos_token_id=None, eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step():
        ids, mask, reward = next(loader)
        pred = model(ids, mask)
        if good:
            pred = pred.squeeze(-1)
        loss = ((pred - reward) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        ids, mask, reward = test.tensors
        model.eval()
        err = ((model(ids, mask).squeeze(-1) - reward) ** 2).mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def reward_regressor_bad():
    return _reward_regressor(False)


def reward_regressor_good():
    return _reward_regressor(True)


# --------------------------------------------------------------------------------------
# 12. nanoGPT-style pre-training with a cosine schedule
# --------------------------------------------------------------------------------------
CASES.append({"name": "nanogpt_cosine", "what": "LambdaLR gets a function that returns the absolute learning rate, but LambdaLR multiplies it with the optimizer's base rate: the rate in use is lr squared, about 1e-5 to 1e-6, and training creeps."})


def _nanogpt_cosine(good):
    seed_all(SEED + 13)
    vocab, max_lr, min_lr, warmup, total = 32, 3e-3, 3e-4, 10, 600
    lang = MarkovText(vocab, 130)
    train_ids = lang.sample(1, 40000)[0]
    held = lang.sample(200, 17, torch.Generator().manual_seed(SEED + 913))
    model = GPT(vocab)

    def get_lr(it):
        if it < warmup:
            return max_lr * (it + 1) / warmup
        ratio = min(1.0, (it - warmup) / (total - warmup))
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (max_lr - min_lr)

    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
                                  lr=max_lr, betas=(0.9, 0.99))
    if good:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: get_lr(it) / max_lr)
    else:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, get_lr)

    def get_batch(batch_size=24, block=16):
        ix = torch.randint(len(train_ids) - block - 1, (batch_size,))
        x = torch.stack([train_ids[i : i + block] for i in ix])
        y = torch.stack([train_ids[i + 1 : i + 1 + block] for i in ix])
        return x, y

    def step():
        x, y = get_batch()
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        loss = model(held[:, :-1], held[:, 1:])[1].item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def nanogpt_cosine_bad():
    return _nanogpt_cosine(False)


def nanogpt_cosine_good():
    return _nanogpt_cosine(True)


# --------------------------------------------------------------------------------------
# 13. BART translation with accumulation and a linear schedule
# --------------------------------------------------------------------------------------
CASES.append({"name": "bart_accumulate", "what": "scheduler.step() is called after every micro-batch instead of after every optimizer step, so the linear schedule (counted in updates) runs four times too fast and the rate is zero after a quarter of the training."})


class BartTrainer:
    PAD, EOS, BOS, BASE, NSYM = 0, 1, 2, 3, 12

    def __init__(self, per_update, num_updates=300, accumulate=4):
        seed_all(SEED + 14)
        self.per_update, self.accumulate = per_update, accumulate
        self.table = torch.randperm(self.NSYM, generator=torch.Generator().manual_seed(140))
        self.model = BartForConditionalGeneration(BartConfig(
            vocab_size=self.BASE + self.NSYM, d_model=48, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=96,
            decoder_ffn_dim=96, encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=12,
            dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, init_std=0.1, pad_token_id=0,
            bos_token_id=2, eos_token_id=1, decoder_start_token_id=2, forced_eos_token_id=None))
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1.5e-3, weight_decay=0.01)
        self.scheduler = get_linear_schedule_with_warmup(self.optimizer, 8, num_updates)
        self.g = torch.Generator().manual_seed(SEED + 14)

    def batch(self, n, g):
        lengths = [3 + i % 4 for i in range(n)]
        src, tgt = [], []
        for k in lengths:
            w = torch.randint(0, self.NSYM, (k,), generator=g)
            src.append(torch.cat([w + self.BASE, torch.tensor([self.EOS])]))
            tgt.append(torch.cat([self.table[w] + self.BASE, torch.tensor([self.EOS])]))
        src = pad_sequence(src, batch_first=True, padding_value=self.PAD)
        tgt = pad_sequence(tgt, batch_first=True, padding_value=-100)
        return src, (src != self.PAD).long(), tgt

    def step(self):
        for _ in range(self.accumulate):
            src, mask, labels = self.batch(8, self.g)
            loss = self.model(input_ids=src, attention_mask=mask, labels=labels).loss / self.accumulate
            loss.backward()
            if not self.per_update:
                self.scheduler.step()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.per_update:
            self.scheduler.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        src, mask, labels = self.batch(200, torch.Generator().manual_seed(SEED + 914))
        out = torch.full((src.size(0), 1), self.BOS)
        for _ in range(labels.size(1)):
            nxt = self.model(input_ids=src, attention_mask=mask, decoder_input_ids=out).logits[:, -1].argmax(-1)
            out = torch.cat([out, nxt[:, None]], 1)
        keep = labels != -100
        self.model.train()
        return (out[:, 1:][keep] != labels[keep]).float().mean().item()


def _bart_accumulate(good):
    t = BartTrainer(good)
    return {"model": t.model, "optimizer": t.optimizer, "step": t.step, "steps": 20, "evaluate": t.evaluate}


def bart_accumulate_bad():
    return _bart_accumulate(False)


def bart_accumulate_good():
    return _bart_accumulate(True)


# --------------------------------------------------------------------------------------
# 14. Word-level LSTM language model, SGD and truncated backpropagation
# --------------------------------------------------------------------------------------
CASES.append({"name": "word_lstm_sgd", "what": "clip_grad_norm_ is called before loss.backward(), when there are no gradients yet, so the recipe with SGD lr 20 and clip 0.25 runs without any clipping and is thrown about."})


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp=48, nhid=48, nlayers=2):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nhid, self.nlayers = nhid, nlayers
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output), hidden

    def init_hidden(self, bsz):
        z = torch.zeros(self.nlayers, bsz, self.nhid)
        return z, z.clone()


def _word_lstm_sgd(good):
    seed_all(SEED + 15)
    vocab, bsz, bptt = 30, 20, 16
    lang = MarkovText(vocab, 150)
    stream = lang.sample(bsz, 1601).t().contiguous()
    held = lang.sample(40, 60, torch.Generator().manual_seed(SEED + 915)).t().contiguous()
    model = RNNModel(vocab)
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    state = {"hidden": model.init_hidden(bsz), "pos": 0}

    def step():
        if state["pos"] + bptt >= len(stream):
            state["pos"], state["hidden"] = 0, model.init_hidden(bsz)
        i = state["pos"]
        data, target = stream[i : i + bptt], stream[i + 1 : i + 1 + bptt]
        hidden = tuple(h.detach() for h in state["hidden"])
        optimizer.zero_grad()
        output, state["hidden"] = model(data, hidden)
        loss = F.cross_entropy(output.view(-1, vocab), target.reshape(-1))
        if not good:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        loss.backward()
        if good:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        state["pos"] += bptt

    @torch.no_grad()
    def evaluate():
        output, _ = model(held[:-1], model.init_hidden(held.size(1)))
        return F.cross_entropy(output.view(-1, vocab), held[1:].reshape(-1)).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def word_lstm_sgd_bad():
    return _word_lstm_sgd(False)


def word_lstm_sgd_good():
    return _word_lstm_sgd(True)


# --------------------------------------------------------------------------------------
# 15. Sentence classification with sinusoidal positions
# --------------------------------------------------------------------------------------
CASES.append({"name": "order_classifier", "what": "The sinusoidal PositionalEncoding of the PyTorch tutorial (time first) is used with batch_first inputs: pe[:x.size(0)] adds one vector per row of the batch, so tokens carry no position."})


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=256, time_first=True):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(1000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(1) if time_first else pe.unsqueeze(0))
        self.time_first = time_first

    def forward(self, x):
        if self.time_first:
            return x + self.pe[: x.size(0)]
        return x + self.pe[:, : x.size(1)]


class SentenceClassifier(nn.Module):
    def __init__(self, vocab, n_classes, d_model=48, time_first=True):
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model)
        self.pos = PositionalEncoding(d_model, time_first=time_first)
        layer = nn.TransformerEncoderLayer(d_model, nhead=4, dim_feedforward=96, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(d_model, n_classes)

    def forward(self, x):
        h = self.encoder(self.pos(self.embed(x)))
        return self.head(h.mean(dim=1))


def _order_classifier(good):
    seed_all(SEED + 16)
    n_words, L = 12, 16

    def make(n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randint(2, n_words, (n, L), generator=g)
        where = torch.rand(n, L, generator=g).argsort(1)[:, :2]
        x[torch.arange(n), where[:, 0]] = 0
        x[torch.arange(n), where[:, 1]] = 1
        return TensorDataset(x, (where[:, 0] < where[:, 1]).long())

    train, test = make(6000, SEED + 16), make(320, SEED + 916)
    loader = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))
    model = SentenceClassifier(n_words, 2, time_first=not good)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step():
        model.train()
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        miss = 0
        for x, y in DataLoader(test, batch_size=32):
            miss += (model(x).argmax(-1) != y).sum().item()
        return miss / len(test)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def order_classifier_bad():
    return _order_classifier(False)


def order_classifier_good():
    return _order_classifier(True)


# --------------------------------------------------------------------------------------
# 16. Character GPT with its own attention
# --------------------------------------------------------------------------------------
CASES.append({"name": "char_gpt", "what": "In the hand-written attention q, k and v are reshaped straight to (B, heads, T, d) instead of (B, T, heads, d) followed by a transpose: heads mix tokens and channels, and the causal mask no longer matches time, so the future leaks."})


def _char_gpt(good):
    seed_all(SEED + 17)
    vocab = 26
    lang = MarkovText(vocab, 170)
    text = lang.sample(3000, 17)
    held = lang.sample(200, 17, torch.Generator().manual_seed(SEED + 917))
    model = GPT(vocab, direct_view=not good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step(i):
        rows = torch.randint(len(text), (24,))
        x, y = text[rows, :-1], text[rows, 1:]
        logits, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: prefix_error(model, held, (4, 8, 12, 16))}


def char_gpt_bad():
    return _char_gpt(False)


def char_gpt_good():
    return _char_gpt(True)


# --------------------------------------------------------------------------------------
# 17. Packed documents with nn.MultiheadAttention
# --------------------------------------------------------------------------------------
CASES.append({"name": "packed_mha", "what": "The block-diagonal mask for packed documents keeps documents apart but forgets the causal part, so within a document every token sees the tokens it must predict."})


class PackedBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x, blocked):
        h = self.norm1(x)
        a, _ = self.attn(h, h, h, attn_mask=blocked.repeat_interleave(self.heads, 0), need_weights=False)
        x = x + a
        return x + self.ff(self.norm2(x))


class PackedLM(nn.Module):
    def __init__(self, vocab, d=48, heads=4, layers=2, max_len=16, causal=True):
        super().__init__()
        self.causal = causal
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.blocks = nn.ModuleList([PackedBlock(d, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab)

    def forward(self, ids, doc_ids, position_ids):
        blocked = doc_ids[:, :, None] != doc_ids[:, None, :]
        if self.causal:
            T = ids.size(1)
            blocked = blocked | torch.ones(T, T, dtype=torch.bool, device=ids.device).triu(1)
        x = self.tok(ids) + self.pos(position_ids)
        for block in self.blocks:
            x = block(x, blocked)
        return self.head(self.norm(x))


def _packed_mha(good):
    seed_all(SEED + 18)
    vocab, T = 24, 36
    lang = MarkovText(vocab, 180)
    held = lang.sample(200, 13, torch.Generator().manual_seed(SEED + 918))

    def pack(n):
        ids, doc, pos, labels = [], [], [], []
        for _ in range(n):
            row, d, p, lab, k = [], [], [], [], 0
            while len(row) < T:
                text = lang.sample(1, random.randint(6, 14))[0].tolist()
                row += text
                d += [k] * len(text)
                p += range(len(text))
                lab += text[1:] + [-100]
                k += 1
            ids.append(row[:T]); doc.append(d[:T]); pos.append(p[:T]); labels.append(lab[:T])
        return [torch.tensor(t) for t in (ids, doc, pos, labels)]

    data = TensorDataset(*pack(250))
    loader = forever(DataLoader(data, batch_size=10, shuffle=True))
    model = PackedLM(vocab, causal=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step():
        ids, doc, pos, labels = next(loader)
        logits = model(ids, doc, pos)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        miss = total = 0
        for t in (3, 6, 9, 12):
            x = held[:, :t]
            pos = torch.arange(t).expand_as(x)
            pred = model(x, torch.zeros_like(x), pos)[:, -1].argmax(-1)
            miss += (pred != held[:, t]).sum().item()
            total += len(held)
        return miss / total

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def packed_mha_bad():
    return _packed_mha(False)


def packed_mha_good():
    return _packed_mha(True)


# --------------------------------------------------------------------------------------
# 18. Translation with nn.Transformer
# --------------------------------------------------------------------------------------
CASES.append({"name": "nn_transformer_mt", "what": "The decoder is fed tgt[:, 1:], the very tokens it is scored on, instead of tgt[:, :-1]: it learns to copy its input, and cannot translate when it decodes by itself."})


class Seq2SeqTransformer(nn.Module):
    def __init__(self, vocab, d_model=48, max_len=16):
        super().__init__()
        self.src_emb, self.tgt_emb = nn.Embedding(vocab, d_model), nn.Embedding(vocab, d_model)
        self.pos = nn.Embedding(max_len, d_model)
        self.transformer = nn.Transformer(d_model, nhead=4, num_encoder_layers=1, num_decoder_layers=1,
                                          dim_feedforward=96, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(d_model, vocab)

    def forward(self, src, tgt, src_pad, tgt_pad=None):
        where = lambda t: self.pos(torch.arange(t.size(1), device=t.device))
        causal = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool, device=tgt.device).triu(1)
        h = self.transformer(self.src_emb(src) + where(src), self.tgt_emb(tgt) + where(tgt), tgt_mask=causal,
                             src_key_padding_mask=src_pad, tgt_key_padding_mask=tgt_pad,
                             memory_key_padding_mask=src_pad)
        return self.generator(h)


def _nn_transformer_mt(good):
    seed_all(SEED + 19)
    PAD, BOS, EOS, BASE, N = 0, 1, 2, 3, 12
    table = torch.randperm(N, generator=torch.Generator().manual_seed(190))

    def batch(n, g):
        src, tgt = [], []
        for k in torch.randint(3, 7, (n,), generator=g).tolist():
            w = torch.randint(0, N, (k,), generator=g)
            src.append(torch.cat([w + BASE, torch.tensor([EOS])]))
            tgt.append(torch.cat([torch.tensor([BOS]), table[w] + BASE, torch.tensor([EOS])]))
        return (pad_sequence(src, batch_first=True, padding_value=PAD),
                pad_sequence(tgt, batch_first=True, padding_value=PAD))

    g = torch.Generator().manual_seed(SEED + 19)
    model = Seq2SeqTransformer(BASE + N)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-3, betas=(0.9, 0.98), eps=1e-9)

    def step():
        model.train()
        src, tgt = batch(32, g)
        tgt_out = tgt[:, 1:]
        if good:
            tgt_in = tgt[:, :-1]
        else:
            tgt_in = tgt[:, 1:]
        logits = model(src, tgt_in, src == PAD, tgt_in == PAD)
        loss = criterion(logits.reshape(-1, logits.size(-1)), tgt_out.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        src, tgt = batch(200, torch.Generator().manual_seed(SEED + 919))
        out = torch.full((len(src), 1), BOS)
        for _ in range(tgt.size(1) - 1):
            nxt = model(src, out, src == PAD)[:, -1].argmax(-1, keepdim=True)
            out = torch.cat([out, nxt], 1)
        gold = tgt[:, 1:]
        return (out[:, 1:][gold != PAD] != gold[gold != PAD]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def nn_transformer_mt_bad():
    return _nn_transformer_mt(False)


def nn_transformer_mt_good():
    return _nn_transformer_mt(True)


# --------------------------------------------------------------------------------------
# 19. Direct preference optimisation
# --------------------------------------------------------------------------------------
CASES.append({"name": "dpo_gpt2", "what": "The reference model of DPO is the policy itself (ref_model = model, no copy), so the log-ratios are always zero, the loss stays at log 2 and its pull never lets up: the policy drifts without bound from the SFT model."})


def _dpo_gpt2(good):
    seed_all(SEED + 20)
    vocab, plen, rlen, beta = 20, 4, 6, 0.5
    lang = MarkovText(vocab, 200)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=16, n_embd=48, n_layer=2, n_head=4,
                                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                       bos_token_id=None, eos_token_id=None))
    model.train()
    sft = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(90):
        ids = lang.sample(24, plen + rlen)
        model(input_ids=ids, labels=ids).loss.backward()
        sft.step()
        sft.zero_grad()
    sft_model = copy.deepcopy(model).eval().requires_grad_(False)

    liked = torch.randn(vocab, generator=torch.Generator().manual_seed(201))

    def preferences(n, seed):
        g = torch.Generator().manual_seed(seed)
        a = lang.sample(n, plen + rlen, g)
        b = a.clone()
        start = a[:, plen - 1]
        for t in range(rlen):
            start = torch.multinomial(lang.P[start], 1, generator=g).squeeze(1)
            b[:, plen + t] = start
        margin = liked[a[:, plen:]].sum(1) - liked[b[:, plen:]].sum(1)
        first = torch.rand(n, generator=g) < torch.sigmoid(margin)
        return torch.where(first[:, None], a, b), torch.where(first[:, None], b, a)

    chosen, rejected = preferences(2000, SEED + 202)
    loader = forever(DataLoader(TensorDataset(chosen, rejected), batch_size=16, shuffle=True))

    def sequence_logps(m, ids):
        logp = m(input_ids=ids).logits[:, :-1].log_softmax(-1)
        logp = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return logp[:, plen - 1 :].sum(-1)

    if good:
        ref_model = copy.deepcopy(model).eval().requires_grad_(False)
    else:
        ref_model = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)

    def dpo_loss(ids_w, ids_l, reference):
        pi_w, pi_l = sequence_logps(model, ids_w), sequence_logps(model, ids_l)
        with torch.no_grad():
            ref_w, ref_l = sequence_logps(reference, ids_w), sequence_logps(reference, ids_l)
        return -F.logsigmoid(beta * ((pi_w - pi_l) - (ref_w - ref_l))).mean()

    def step():
        ids_w, ids_l = next(loader)
        loss = dpo_loss(ids_w, ids_l, ref_model)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    held = preferences(400, SEED + 920)

    @torch.no_grad()
    def evaluate():
        return dpo_loss(*held, sft_model).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def dpo_gpt2_bad():
    return _dpo_gpt2(False)


def dpo_gpt2_good():
    return _dpo_gpt2(True)


# --------------------------------------------------------------------------------------
# 20. TinyBERT-like distillation
# --------------------------------------------------------------------------------------
CASES.append({"name": "bert_distiller", "what": "The distiller holds teacher and student, and the teacher is never frozen: it gets gradients, sits in the optimizer and moves towards the student, so both agree on an uninformative answer."})


class Distiller(nn.Module):
    def __init__(self, teacher, student, temperature=2.0):
        super().__init__()
        self.teacher, self.student, self.temperature = teacher, student, temperature
        self.project = nn.Linear(student.config.hidden_size, teacher.config.hidden_size)

    def forward(self, input_ids, attention_mask):
        t = self.teacher(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        s = self.student(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        T = self.temperature
        masked = input_ids == 2
        soft = F.kl_div(F.log_softmax(s.logits[masked] / T, -1), F.log_softmax(t.logits[masked] / T, -1),
                        reduction="batchmean", log_target=True) * T * T
        hidden = F.mse_loss(self.project(s.hidden_states[-1]), t.hidden_states[-1])
        return soft + hidden


def _bert_distiller(good):
    seed_all(SEED + 21)
    lang = MarkovText(16, 210, offset=3)
    vocab, mask_id = 19, 2

    def bert(hidden, layers):
        return BertForMaskedLM(BertConfig(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers,
                                          num_attention_heads=4, intermediate_size=2 * hidden,
                                          max_position_embeddings=32, hidden_dropout_prob=0.0,
                                          attention_probs_dropout_prob=0.0))

    def masked_batch(n, g=None):
        words = lang.sample(n, 12, g)
        pick = torch.zeros(n, 12, dtype=torch.bool)
        pick[torch.arange(n), torch.randint(1, 6, (n,), generator=g)] = True
        pick[torch.arange(n), torch.randint(7, 12, (n,), generator=g)] = True
        return words.masked_fill(pick, mask_id), words, pick

    teacher, student = bert(48, 2), bert(32, 1)
    teacher.train()
    pre = torch.optim.AdamW(teacher.parameters(), lr=3e-3)
    for _ in range(180):
        ids, words, pick = masked_batch(32)
        F.cross_entropy(teacher(input_ids=ids).logits[pick], words[pick]).backward()
        pre.step()
        pre.zero_grad()
    teacher.eval()
    if good:
        teacher.requires_grad_(False)

    distiller = Distiller(teacher, student)
    distiller.student.train()
    optimizer = torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=2e-3)

    def step():
        ids, _, _ = masked_batch(24)
        loss = distiller(ids, torch.ones_like(ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        ids, words, pick = masked_batch(300, torch.Generator().manual_seed(SEED + 921))
        student.eval()
        logits = student(input_ids=ids).logits
        student.train()
        return F.cross_entropy(logits[pick], words[pick]).item()

    return {"model": distiller, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def bert_distiller_bad():
    return _bert_distiller(False)


def bert_distiller_good():
    return _bert_distiller(True)


# --------------------------------------------------------------------------------------
# 21. bfloat16 training of a causal nn.TransformerEncoder
# --------------------------------------------------------------------------------------
CASES.append({"name": "bf16_causal_lm", "what": "The whole model, weights and Adam state, is cast to bfloat16 instead of using autocast over float32 weights: most updates are smaller than half a bfloat16 step of the weight and are rounded away."})


class CausalTransformer(nn.Module):
    def __init__(self, vocab, d=48, heads=4, layers=2, max_len=16):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        layer = nn.TransformerEncoderLayer(d, heads, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(d), enable_nested_tensor=False)
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        T = ids.size(1)
        mask = torch.ones(T, T, dtype=torch.bool, device=ids.device).triu(1)
        x = self.tok(ids) + self.pos(torch.arange(T, device=ids.device))
        return self.head(self.body(x, mask=mask))


def _bf16_causal_lm(good):
    seed_all(SEED + 23)
    vocab = 32
    lang = MarkovText(vocab, 230)
    held = lang.sample(300, 17, torch.Generator().manual_seed(SEED + 923))
    model = CausalTransformer(vocab)
    if not good:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)

    def loss_on(ids):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=good):
            logits = model(ids[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def step():
        model.train()
        loss = loss_on(lang.sample(24, 17))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        return loss_on(held).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def bf16_causal_lm_bad():
    return _bf16_causal_lm(False)


def bf16_causal_lm_good():
    return _bf16_causal_lm(True)


# --------------------------------------------------------------------------------------
# 22. Exponential moving average of the weights
# --------------------------------------------------------------------------------------
CASES.append({"name": "ema_gpt", "what": "The moving average of the weights is kept in bfloat16: the small increments (1 - decay) * (p - ema) are rounded away, the average stalls near the start, and it is this average that is evaluated."})


class EMA:
    def __init__(self, model, decay, dtype):
        self.decay = decay
        self.shadow = copy.deepcopy(model).to(dtype).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.shadow.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p.to(e.dtype), alpha=1 - self.decay)


def _ema_gpt(good):
    seed_all(SEED + 24)
    vocab = 28
    lang = MarkovText(vocab, 240)
    held = lang.sample(300, 17, torch.Generator().manual_seed(SEED + 924))
    model = GPT(vocab)
    ema = EMA(model, 0.995, torch.float32 if good else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step():
        ids = lang.sample(24, 17)
        _, loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model)

    @torch.no_grad()
    def evaluate():
        return copy.deepcopy(ema.shadow).float()(held[:, :-1], held[:, 1:])[1].item()

    return {"model": (model, ema.shadow), "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def ema_gpt_bad():
    return _ema_gpt(False)


def ema_gpt_good():
    return _ema_gpt(True)


# --------------------------------------------------------------------------------------
# 23. Half-precision fine-tuning of BERT with a gradient scaler
# --------------------------------------------------------------------------------------
CASES.append({"name": "bert_fp16_scaler", "what": "clip_grad_norm_ runs on gradients still multiplied by the loss scale (no scaler.unscale_ before it), so after unscaling the gradient norm is about 1/65536 and Adam with eps 1e-6 hardly moves."})


def _bert_fp16_scaler(good):
    seed_all(SEED + 25)
    n_words, L = 24, 8
    worth = torch.randn(n_words, generator=torch.Generator().manual_seed(250))

    def make(n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randint(0, n_words, (n, L), generator=g)
        return TensorDataset(x + 1, (worth[x].sum(1) > 0).long())

    train, test = make(3000, SEED + 25), make(400, SEED + 925)
    loader = forever(DataLoader(train, batch_size=16, shuffle=True, drop_last=True))
    model = BertForSequenceClassification(BertConfig(
        vocab_size=n_words + 1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, eps=1e-6, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")

    def step():
        x, y = next(loader)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=x, attention_mask=torch.ones_like(x), labels=y).loss
        scaler.scale(loss).backward()
        if good:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        x, y = test.tensors
        model.eval()
        pred = model(input_ids=x, attention_mask=torch.ones_like(x)).logits.argmax(-1)
        model.train()
        return (pred != y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def bert_fp16_scaler_bad():
    return _bert_fp16_scaler(False)


def bert_fp16_scaler_good():
    return _bert_fp16_scaler(True)


# --------------------------------------------------------------------------------------
# 24. Review classification with validation during training
# --------------------------------------------------------------------------------------
CASES.append({"name": "review_validation", "what": "The validation that runs every few steps puts the model into eval mode, and nothing puts it back: from the first validation on the strong dropout is off and the small training set is learnt by heart."})


class ReviewClassifier(nn.Module):
    def __init__(self, vocab, n_classes, d=64, dropout=0.4, max_len=12):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(d, 4, 128, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.fc = nn.Linear(d, n_classes)

    def forward(self, ids):
        x = self.drop(self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device)))
        return self.fc(self.drop(self.encoder(x).mean(1)))


def _review_validation(good):
    seed_all(SEED + 26)
    n_words, L = 30, 12
    worth = torch.randn(n_words, generator=torch.Generator().manual_seed(260))

    def make(n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randint(0, n_words, (n, L), generator=g)
        p = torch.sigmoid(0.8 * worth[x].sum(1))
        return TensorDataset(x, (torch.rand(n, generator=g) < p).long())

    train, valid, test = make(320, SEED + 26), make(100, SEED + 926), make(600, SEED + 927)
    loader = forever(DataLoader(train, batch_size=16, shuffle=True))
    model = ReviewClassifier(n_words, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    history = []

    @torch.no_grad()
    def validate():
        model.eval()
        x, y = valid.tensors
        loss = F.cross_entropy(model(x), y).item()
        if good:
            model.train()
        return loss

    def step(i):
        if i % 4 == 3:
            history.append(validate())
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        was_training = model.training
        model.eval()
        x, y = test.tensors
        loss = F.cross_entropy(model(x), y).item()
        model.train(was_training)
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def review_validation_bad():
    return _review_validation(False)


def review_validation_good():
    return _review_validation(True)
