"""Small language-model training scripts, one pair of functions for each."""
import copy
import math
import random
import tempfile
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

torch.set_num_threads(1)

CASES = [
    {"name": 'sft_stop',
     "what": "The pad token is the eos token, and the collator sets every label equal to the pad id to -100, so the true end-of-answer token is never in the loss: the model never learns to stop."},
    {"name": 'mlm',
     "what": "The masked-LM collator makes labels an alias of input_ids (no clone) before writing [MASK] in place, so every label of a masked place is the [MASK] id itself: the model learns to predict [MASK]."},
    {"name": 'char_pretrain',
     "what": "get_batch already returns targets shifted by one, and they are passed as labels to a transformers model which shifts again: the model learns to predict the token after the next."},
    {"name": 'translate',
     "what": "The decoder inputs are the target itself, not shifted right by one, so in training each decoder place sees the token that it must predict; the model learns to copy and cannot generate."},
    {"name": 'new_tokens',
     "what": "The optimizer is built before the embedding is replaced by a larger one (tied to the output head) for new tokens: the optimizer holds the old tensor, and the new embedding and head never learn."},
    {"name": 'nano_blocks',
     "what": "The transformer blocks are kept in a plain Python list in place of nn.ModuleList, so model.parameters() lacks them and they stay at their random start."},
    {"name": 'nano_heads',
     "what": "The heads' outputs (B, heads, T, d) are reshaped to (B, T, C) without the transpose, which mixes times and heads: each place reads other times, future ones too."},
    {"name": 'moe_lm',
     "what": "The router's softmax is taken over dim 1, which is time in (batch, time, experts), in place of the experts: the gates of a token do not sum to 1, are tiny, and depend on the future and on the length."},
    {"name": 'lora_cls',
     "what": "Reentrant gradient checkpointing in a LoRA model whose embeddings are frozen, and the input of the first block is not made to require a gradient: no checkpointed block gets a gradient, so the adapters stay as they were and only the head learns."},
    {"name": 'multi_domain',
     "what": "optimizer.zero_grad() stands inside the accumulation loop, so each micro-batch wipes out the gradients of the former ones and only the last domain is learnt."},
    {"name": 'topics',
     "what": "The head ends with a Softmax and its output goes to CrossEntropyLoss, which applies log-softmax again: the gradients are weak and the loss cannot fall."},
    {"name": 'reward',
     "what": "MSELoss between rewards of shape (B, 1) and scores of shape (B,) broadcasts to (B, B): each reward is pulled to the mean score of the batch."},
    {"name": 'llama_scratch',
     "what": "LambdaLR expects a factor, but the function returns the learning rate itself, so the true rate is lr * lr (about 1e-5 in place of 3e-3) and hardly anything is learnt."},
    {"name": 'facts',
     "what": "The warm-up schedule counts steps, but scheduler.step() is called once an epoch: the learning rate is exactly 0 in all of the first epoch and a small part of the wanted one in the next."},
    {"name": 'trainer',
     "what": "optimizer.zero_grad is named without being called (no parentheses), so the gradients of all steps pile up and old gradients drown the new one."},
    {"name": 'packed',
     "what": "The 4-D mask for packed sequences only says 'same document'; a given 4-D mask replaces the model's causal mask, so each token sees the later ones of its document (also its own target)."},
    {"name": 'winner',
     "what": "The positional encoding of the (T, B, C) tutorial is used with (B, T, C) inputs: pe[:x.size(0)] adds the code of the sample's place in the batch, the same for all its tokens, and word order is lost."},
    {"name": 'padded_encoder',
     "what": "The tokenizer's attention_mask (1 = keep) goes to src_key_padding_mask (True = ignore) without being inverted: the attention reads only the padding."},
    {"name": 'distill',
     "what": "The optimizer takes all trainable parameters of the wrapper, and the teacher within it is not frozen (no requires_grad_(False), no no_grad): it learns to agree with the untrained student and loses what it knew."},
    {"name": 'dpo',
     "what": "The reference log-probabilities of DPO come from the same adapted model (the adapter is not disabled), so the log-ratio is always 0, the loss stays at log 2, and nothing stops the drift from the base model."},
    {"name": 'small_corpus',
     "what": "from_pretrained() returns a model in eval mode and the loop never calls model.train(): the dropout is off and the model overfits the small data."},
    {"name": 'bf16_finetune',
     "what": "The weights themselves are turned to bfloat16 and trained by AdamW at a small learning rate: most updates are smaller than half a bf16 step and are rounded away."},
    {"name": 'amp_lm',
     "what": "The gradients are clipped to norm 1 while they are still multiplied by the loss scale (no unscale_ before it), so after unscaling they are about 65536 times too small and sink below Adam's eps."},
    {"name": 'records',
     "what": "The rotary angles are computed in bfloat16 (positions and frequencies): beyond 256 the positions cannot be told apart (steps of 2) and the angles are wrong, so attention by distance fails in long rows."},
]


# --------------------------------------------------------------------------- shared helpers


def seed_everything(seed):
    random.seed(seed + SEED_SHIFT)
    torch.manual_seed(seed + SEED_SHIFT)


SEED_SHIFT = 0

NOUNS = ["cat", "dog", "bird", "horse", "fox", "mouse"]
VERBS = {"cat": "hunts", "dog": "chases", "bird": "watches", "horse": "carries", "fox": "tricks", "mouse": "fears"}
ADJ = {"cat": "sly", "dog": "loyal", "bird": "tiny", "horse": "strong", "fox": "red", "mouse": "grey"}
PLACES = {"hunts": "barn", "chases": "yard", "watches": "tree", "carries": "field", "tricks": "wood", "fears": "house"}


def make_sentence(rng):
    a, b = rng.sample(NOUNS, 2)
    verb = VERBS[a]
    return ["the", ADJ[a], a, verb, "the", ADJ[b], b, "in", "the", PLACES[verb], "."]


def make_corpus(n, seed):
    rng = random.Random(seed)
    return " ".join(" ".join(make_sentence(rng)) for _ in range(n)) + " "


class CharTokenizer:
    def __init__(self, text):
        self.chars = sorted(set(text))
        self.stoi = {c: i for i, c in enumerate(self.chars)}
        self.vocab_size = len(self.chars)

    def encode(self, s):
        return [self.stoi[c] for c in s]


class WordTokenizer:
    def __init__(self, words, specials=("<pad>", "<bos>", "<eos>", "<mask>")):
        self.itos = list(specials) + sorted(set(words))
        self.stoi = {w: i for i, w in enumerate(self.itos)}
        self.vocab_size = len(self.itos)
        self.pad_token_id, self.bos_token_id, self.eos_token_id = 0, 1, 2
        self.mask_token_id = self.stoi.get("<mask>")

    def encode(self, words):
        return [self.stoi[w] for w in words]


def forever(loader):
    while True:
        yield from loader


@contextmanager
def inference(model):
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was_training)


def sample_windows(data, block_size, batch_size, generator=None):
    ix = torch.randint(len(data) - block_size - 1, (batch_size,), generator=generator)
    x = torch.stack([data[i:i + block_size] for i in ix])
    y = torch.stack([data[i + 1:i + 1 + block_size] for i in ix])
    return x, y


def small_gpt2(vocab_size, n_positions=64, n_embd=48, n_layer=2, n_head=4, dropout=0.0, **kw):
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=vocab_size, n_positions=n_positions, n_embd=n_embd, n_layer=n_layer, n_head=n_head,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0, **kw))


def small_llama_config(vocab_size, hidden=48, layers=2, heads=4, **kw):
    kw.setdefault("pad_token_id", 0)
    kw.setdefault("bos_token_id", 1)
    kw.setdefault("eos_token_id", 2)
    return LlamaConfig(vocab_size=vocab_size, hidden_size=hidden, intermediate_size=2 * hidden,
                       num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
                       max_position_embeddings=128, **kw)


def small_bert_config(vocab_size, hidden=48, layers=2, dropout=0.0, **kw):
    return BertConfig(vocab_size=vocab_size, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
                      intermediate_size=2 * hidden, max_position_embeddings=64, hidden_dropout_prob=dropout,
                      attention_probs_dropout_prob=dropout, pad_token_id=0, **kw)


# --------------------------------------------------------------------------- instruction tuning with a repeat task


class RepeatInstructions(Dataset):
    """'say WORD COUNT :' is answered with WORD repeated COUNT times."""

    def __init__(self, tok, n, seed):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            w, k = rng.choice(NOUNS), rng.randint(1, 4)
            self.rows.append({"prompt": tok.encode(["say", w, str(k), ":"]), "answer": tok.encode([w] * k)})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def _sft_stop(good):
    seed_everything(11)
    tok = WordTokenizer(NOUNS + ["say", ":", "1", "2", "3", "4"])
    tok.pad_token_id = tok.eos_token_id
    config = small_llama_config(tok.vocab_size, pad_token_id=None, eos_token_id=tok.eos_token_id)
    model = LlamaForCausalLM(config)

    def collate(rows):
        width = max(len(r["prompt"]) + len(r["answer"]) + 1 for r in rows)
        input_ids, attention_mask, labels = [], [], []
        for r in rows:
            ids = r["prompt"] + r["answer"] + [tok.eos_token_id]
            n_pad = width - len(ids)
            lab = [-100] * len(r["prompt"]) + ids[len(r["prompt"]):]
            input_ids.append(ids + [tok.pad_token_id] * n_pad)
            labels.append(lab + [tok.pad_token_id] * n_pad)
            attention_mask.append([1] * len(ids) + [0] * n_pad)
        batch = {"input_ids": torch.tensor(input_ids), "attention_mask": torch.tensor(attention_mask)}
        labels = torch.tensor(labels)
        if good:
            labels[batch["attention_mask"] == 0] = -100
        else:
            labels[labels == tok.pad_token_id] = -100
        batch["labels"] = labels
        return batch

    train = RepeatInstructions(tok, 512, 1)
    test = RepeatInstructions(tok, 24, 2)
    loader = forever(DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, 600)
    model.train()

    def step():
        batch = next(loader)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    def evaluate():
        misses = 0
        with inference(model):
            for r in test:
                ids = torch.tensor([r["prompt"]])
                for _ in range(6):
                    nxt = model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
                    ids = torch.cat([ids, nxt], dim=1)
                    if nxt.item() == tok.eos_token_id:
                        break
                misses += ids[0, len(r["prompt"]):].tolist() != r["answer"] + [tok.eos_token_id]
        return (misses + 0.5) / len(test)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def sft_stop_bad():
    return _sft_stop(False)


def sft_stop_good():
    return _sft_stop(True)


# --------------------------------------------------------------------------- masked language model


class MlmCollator:
    def __init__(self, tok, mlm_probability, keep_copy):
        self.tok, self.p, self.keep_copy = tok, mlm_probability, keep_copy

    def __call__(self, rows):
        input_ids = torch.tensor([r["input_ids"] for r in rows])
        labels = input_ids.clone() if self.keep_copy else input_ids
        special = (input_ids == self.tok.bos_token_id) | (input_ids == self.tok.eos_token_id)
        picked = torch.bernoulli(torch.full(input_ids.shape, self.p)).bool() & ~special
        input_ids[picked] = self.tok.mask_token_id
        labels = labels.masked_fill(~picked, -100)
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}


def _mlm(good):
    seed_everything(12)
    rng = random.Random(5)
    sents = [make_sentence(rng) for _ in range(600)]
    tok = WordTokenizer([w for s in sents for w in s])
    rows = [{"input_ids": [tok.bos_token_id] + tok.encode(s) + [tok.eos_token_id]} for s in sents]
    collator = MlmCollator(tok, 0.2, keep_copy=good)
    loader = DataLoader(rows[:500], batch_size=32, shuffle=True, collate_fn=collator)
    batches = forever(loader)
    model = BertForMaskedLM(small_bert_config(tok.vocab_size, dropout=0.05))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()

    def step():
        batch = next(batches)
        optimizer.zero_grad()
        out = model(**batch)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        ids = torch.tensor([r["input_ids"] for r in rows[500:]])
        wrong, total = 0, 0
        with inference(model):
            for pos in (3, 4, 7, 10):
                x = ids.clone()
                x[:, pos] = tok.mask_token_id
                pred = model(input_ids=x).logits[:, pos].argmax(-1)
                wrong += (pred != ids[:, pos]).sum().item()
                total += len(ids)
        return (wrong + 0.5) / total

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def mlm_bad():
    return _mlm(False)


def mlm_good():
    return _mlm(True)


# --------------------------------------------------------------------------- char-level pre-training of GPT-2


def _char_pretrain(good):
    seed_everything(13)
    text = make_corpus(400, 3)
    tok = CharTokenizer(text)
    data = torch.tensor(tok.encode(text))
    n = int(0.9 * len(data))
    train_data, val_data = data[:n], data[n:]
    block_size, batch_size = 32, 12
    model = small_gpt2(tok.vocab_size, n_positions=block_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def get_batch(split):
        return sample_windows(train_data if split == "train" else val_data, block_size, batch_size)

    model.train()

    def step():
        xb, yb = get_batch("train")
        out = model(input_ids=xb, labels=xb if good else yb)
        optimizer.zero_grad(set_to_none=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        g = torch.Generator().manual_seed(0)
        x, y = sample_windows(val_data, block_size, 64, g)
        with inference(model):
            logits = model(input_ids=x).logits
            return F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def char_pretrain_bad():
    return _char_pretrain(False)


def char_pretrain_good():
    return _char_pretrain(True)


# --------------------------------------------------------------------------- translation with BART


def _translate(good):
    seed_everything(14)
    src_words = [f"s{i}" for i in range(10)]
    tgt_words = [f"t{i}" for i in range(10)]
    tok = WordTokenizer(src_words + tgt_words)
    mapping = list(range(10))
    random.Random(9).shuffle(mapping)

    def make_rows(n, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(n):
            ws = [rng.randrange(10) for _ in range(rng.randint(2, 4))]
            rows.append({"src": tok.encode([f"s{w}" for w in ws]) + [tok.eos_token_id],
                         "tgt": tok.encode([f"t{mapping[w]}" for w in ws]) + [tok.eos_token_id]})
        return rows

    def pad(seqs, value):
        width = max(map(len, seqs))
        return torch.tensor([s + [value] * (width - len(s)) for s in seqs])

    def collate(rows):
        src = pad([r["src"] for r in rows], tok.pad_token_id)
        tgt = pad([r["tgt"] for r in rows], tok.pad_token_id)
        batch = {"input_ids": src, "attention_mask": (src != tok.pad_token_id).long(),
                 "labels": tgt.masked_fill(tgt == tok.pad_token_id, -100)}
        if good:
            bos = torch.full((len(rows), 1), tok.bos_token_id)
            batch["decoder_input_ids"] = torch.cat([bos, tgt[:, :-1]], dim=1)
        else:
            batch["decoder_input_ids"] = tgt
        return batch

    config = BartConfig(vocab_size=tok.vocab_size, d_model=48, encoder_layers=1, decoder_layers=1,
                        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
                        max_position_embeddings=32, dropout=0.0, pad_token_id=tok.pad_token_id,
                        bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id,
                        decoder_start_token_id=tok.bos_token_id, forced_eos_token_id=None, init_std=0.08)
    model = BartForConditionalGeneration(config)
    loader = forever(DataLoader(make_rows(1000, 1), batch_size=32, shuffle=True, collate_fn=collate))
    test = make_rows(60, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=600)
    model.train()

    def step():
        batch = next(loader)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    def evaluate():
        src = pad([r["src"] for r in test], tok.pad_token_id)
        mask = (src != tok.pad_token_id).long()
        ys = torch.full((len(test), 1), tok.bos_token_id)
        with inference(model):
            for _ in range(5):
                logits = model(input_ids=src, attention_mask=mask, decoder_input_ids=ys).logits
                ys = torch.cat([ys, logits[:, -1:].argmax(-1)], dim=1)
        wrong = total = 0
        for row, y in zip(test, ys[:, 1:].tolist()):
            wrong += sum(a != b for a, b in zip(row["tgt"], y))
            total += len(row["tgt"])
        return (wrong + 0.5) / total

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def translate_bad():
    return _translate(False)


def translate_good():
    return _translate(True)


# --------------------------------------------------------------------------- movie reviews

POS, NEG = ["good", "great", "lovely", "fine"], ["bad", "awful", "boring", "poor"]
FILL = ["film", "plot", "actor", "scene", "music", "it", "was", "so", "really", "and"]


def make_reviews(tok, n, seed, length=(5, 10)):
    """Sentiment word with an optional negation somewhere before it."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        words = [rng.choice(FILL) for _ in range(rng.randint(*length))]
        positive, negated = rng.random() < 0.5, rng.random() < 0.5
        words.insert(rng.randint(2, len(words)), rng.choice(POS if positive else NEG))
        if negated:
            at = next(i for i, w in enumerate(words) if w in POS + NEG)
            words.insert(at, "not")
        rows.append({"input_ids": tok.encode(words), "label": int(positive != negated)})
    return rows


def review_tokenizer():
    return WordTokenizer(POS + NEG + FILL + ["not"])


def pad_reviews(rows, to=None):
    width = to or max(len(r["input_ids"]) for r in rows)
    ids = torch.tensor([r["input_ids"] + [0] * (width - len(r["input_ids"])) for r in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([r["label"] for r in rows])}


# --------------------------------------------------------------------------- adding domain tokens


def _new_tokens(good):
    seed_everything(16)
    rng = random.Random(4)
    sents = [make_sentence(rng) for _ in range(500)]
    base_words = [w for s in sents for w in s]
    tok = WordTokenizer(base_words)
    model = small_gpt2(tok.vocab_size, n_positions=32)

    def build_optimizer():
        no_decay = ("bias", "ln_")
        named = list(model.named_parameters())
        return torch.optim.AdamW([
            {"params": [p for n, p in named if not any(k in n for k in no_decay)], "weight_decay": 0.05},
            {"params": [p for n, p in named if any(k in n for k in no_decay)], "weight_decay": 0.0},
        ], lr=2e-3)

    extra = ["<user>", "<bot>", "<end>", "hello", "yes", "no"]
    if not good:
        optimizer = build_optimizer()
    for w in extra:
        tok.stoi[w] = len(tok.itos)
        tok.itos.append(w)
    tok.vocab_size = len(tok.itos)
    old = model.transformer.wte.weight.data
    wte = nn.Embedding(tok.vocab_size, old.size(1))
    nn.init.normal_(wte.weight, std=0.02)
    wte.weight.data[:len(old)] = old
    model.transformer.wte = wte
    model.lm_head = nn.Linear(old.size(1), tok.vocab_size, bias=False)
    model.lm_head.weight = wte.weight
    model.config.vocab_size = tok.vocab_size
    if good:
        optimizer = build_optimizer()

    def to_chat(s):
        reply = "yes" if s[2] in ("cat", "dog", "fox") else "no"
        return ["<user>", "hello"] + s[:7] + ["<end>", "<bot>", reply, "<end>"]

    ids = torch.tensor([tok.encode(to_chat(s)) for s in sents])
    train, test = ids[:400], ids[400:]
    loader = forever(DataLoader(train, batch_size=16, shuffle=True))
    model.train()

    def step():
        batch = next(loader)
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        with inference(model):
            logits = model(input_ids=test).logits[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def new_tokens_bad():
    return _new_tokens(False)


def new_tokens_good():
    return _new_tokens(True)


# --------------------------------------------------------------------------- hand-written GPTs


@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int = 32
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 48


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg.n_head
        self.c_attn = nn.Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(self.merge(y, B, T, C))

    def merge(self, y, B, T, C):
        return y.transpose(1, 2).reshape(B, T, C)


class FlatMergeAttention(CausalSelfAttention):
    def merge(self, y, B, T, C):
        return y.reshape(B, T, C)


class Block(nn.Module):
    def __init__(self, cfg, attn_cls=CausalSelfAttention):
        super().__init__()
        self.ln_1 = nn.LayerNorm(cfg.n_embd)
        self.attn = attn_cls(cfg)
        self.ln_2 = nn.LayerNorm(cfg.n_embd)
        self.mlp = nn.Sequential(nn.Linear(cfg.n_embd, 4 * cfg.n_embd), nn.GELU(),
                                 nn.Linear(4 * cfg.n_embd, cfg.n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, cfg, blocks):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd)
        self.blocks = blocks
        self.ln_f = nn.LayerNorm(cfg.n_embd)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        nn.init.normal_(self.wte.weight, std=0.1)
        nn.init.normal_(self.wpe.weight, std=0.1)

    def forward(self, idx, targets=None):
        T = idx.size(1)
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def char_data(seed):
    text = make_corpus(400, seed)
    tok = CharTokenizer(text)
    data = torch.tensor(tok.encode(text))
    n = int(0.9 * len(data))
    return tok, data[:n], data[n:]


def prefix_nll(forward, val, block_size, n=24):
    """Likelihood of the next character, given prefixes of many lengths."""
    g = torch.Generator().manual_seed(0)
    losses = []
    for length in (4, 7, 11, 16, 23, 29, block_size):
        x, y = sample_windows(val, length, n, g)
        losses.append(F.cross_entropy(forward(x)[:, -1], y[:, -1]).item())
    return sum(losses) / len(losses)


def _nano_blocks(good):
    seed_everything(17)
    tok, train, val = char_data(6)
    cfg = GPTConfig(tok.vocab_size, n_layer=3)
    blocks = [Block(cfg) for _ in range(cfg.n_layer)]
    model = GPT(cfg, nn.ModuleList(blocks) if good else blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()

    def step():
        x, y = sample_windows(train, cfg.block_size, 12)
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        with inference(model):
            return prefix_nll(lambda x: model(x)[0], val, cfg.block_size)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def nano_blocks_bad():
    return _nano_blocks(False)


def nano_blocks_good():
    return _nano_blocks(True)


def _nano_heads(good):
    seed_everything(18)
    tok, train, val = char_data(7)
    cfg = GPTConfig(tok.vocab_size)
    attn = CausalSelfAttention if good else FlatMergeAttention
    model = GPT(cfg, nn.ModuleList(Block(cfg, attn) for _ in range(cfg.n_layer)))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
                                  lr=2e-3, betas=(0.9, 0.95))

    def step(i=0):
        model.train()
        xb, yb = sample_windows(train, cfg.block_size, 12)
        logits, loss = model(xb, yb)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        with inference(model):
            return prefix_nll(lambda x: model(x)[0], val, cfg.block_size)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def nano_heads_bad():
    return _nano_heads(False)


def nano_heads_good():
    return _nano_heads(True)


# --------------------------------------------------------------------------- mixture of experts


class MoE(nn.Module):
    def __init__(self, dim, hidden, n_experts, gate_dim):
        super().__init__()
        self.router = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(n_experts))
        self.n_experts, self.gate_dim = n_experts, gate_dim

    def forward(self, x):
        gates = F.softmax(self.router(x), dim=self.gate_dim)
        weight, index = gates.topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            hit = (index == e)
            rows = hit.any(-1)
            if rows.any():
                w = (weight * hit).sum(-1)[rows]
                out[rows] = out[rows] + w.unsqueeze(-1) * expert(x[rows])
        share = F.one_hot(index, self.n_experts).float().sum(2).mean((0, 1)) / 2
        balance = self.n_experts * (share * gates.mean((0, 1))).sum()
        return out, balance


class MoEBlock(nn.Module):
    def __init__(self, cfg, gate_dim):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(cfg.n_embd), nn.LayerNorm(cfg.n_embd)
        self.attn = CausalSelfAttention(cfg)
        self.moe = MoE(cfg.n_embd, 2 * cfg.n_embd, 4, gate_dim)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        y, balance = self.moe(self.ln_2(x))
        return x + y, balance


class MoEGPT(nn.Module):
    def __init__(self, cfg, gate_dim):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.pos = nn.Embedding(cfg.block_size, cfg.n_embd)
        self.layers = nn.ModuleList(MoEBlock(cfg, gate_dim) for _ in range(cfg.n_layer))
        self.norm = nn.LayerNorm(cfg.n_embd)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        nn.init.normal_(self.tok.weight, std=0.1)
        nn.init.normal_(self.pos.weight, std=0.1)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        aux = 0.0
        for layer in self.layers:
            x, balance = layer(x)
            aux = aux + balance
        return self.head(self.norm(x)), aux


def _moe_lm(good):
    seed_everything(19)
    tok, train, val = char_data(8)
    cfg = GPTConfig(tok.vocab_size)
    model = MoEGPT(cfg, gate_dim=-1 if good else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    model.train()

    def step():
        x, y = sample_windows(train, cfg.block_size, 12)
        logits, aux = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.01 * aux
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        with inference(model):
            return prefix_nll(lambda x: model(x)[0], val, cfg.block_size)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def moe_lm_bad():
    return _moe_lm(False)


def moe_lm_good():
    return _moe_lm(True)

# --------------------------------------------------------------------------- LoRA on a hand-written classifier


class ReviewClassifier(nn.Module):
    def __init__(self, cfg, n_labels, checkpointing, prepare_inputs):
        super().__init__()
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.ln_f = nn.LayerNorm(cfg.n_embd)
        self.score = nn.Linear(cfg.n_embd, n_labels)
        self.checkpointing, self.prepare_inputs = checkpointing, prepare_inputs

    def forward(self, input_ids, attention_mask):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.size(1)))
        if self.training and self.prepare_inputs:
            x.requires_grad_(True)
        for block in self.blocks:
            if self.checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        last = attention_mask.sum(1) - 1
        return self.score(self.ln_f(x)[torch.arange(len(x)), last])


def _lora_cls(good):
    seed_everything(15)
    tok = review_tokenizer()
    cfg = GPTConfig(tok.vocab_size)
    base = ReviewClassifier(cfg, 2, checkpointing=True, prepare_inputs=good)
    peft_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, modules_to_save=["score"],
                             target_modules=["c_attn", "c_proj", "mlp.0", "mlp.2"])
    model = get_peft_model(base, peft_config)
    train, test = make_reviews(tok, 800, 1), make_reviews(tok, 200, 2)
    loader = forever(DataLoader(train, batch_size=32, shuffle=True, collate_fn=pad_reviews))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    model.train()

    def step():
        batch = next(loader)
        logits = model(batch["input_ids"], batch["attention_mask"])
        loss = F.cross_entropy(logits, batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def evaluate():
        batch = pad_reviews(test)
        with inference(model):
            pred = model(batch["input_ids"], batch["attention_mask"]).argmax(-1)
        return ((pred != batch["labels"]).sum().item() + 0.5) / len(test)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def lora_cls_bad():
    return _lora_cls(False)


def lora_cls_good():
    return _lora_cls(True)


# --------------------------------------------------------------------------- one model, several domains


def _multi_domain(good):
    seed_everything(20)
    rng = random.Random(1)
    days = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]

    def calendar():
        d = rng.randrange(7)
        return ["after"] + [w for k in range(5) for w in (days[(d + k) % 7], "comes")]

    def commands():
        w, k = rng.choice(NOUNS), rng.randint(1, 4)
        return ["say", w, str(k), ":"] + [w] * k + ["stop"] * (7 - k)

    texts = {"story": [make_sentence(rng) for _ in range(300)],
             "calendar": [calendar() for _ in range(300)],
             "commands": [commands() for _ in range(300)]}
    tok = WordTokenizer([w for rows in texts.values() for r in rows for w in r])
    data = {k: torch.tensor([[tok.bos_token_id] + tok.encode(r) for r in rows]) for k, rows in texts.items()}
    loaders = {k: forever(DataLoader(v[:250], batch_size=8, shuffle=True)) for k, v in data.items()}
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=tok.vocab_size, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, 400)
    model.train()

    def step():
        if good:
            optimizer.zero_grad()
        for name, loader in loaders.items():
            if not good:
                optimizer.zero_grad()
            ids = next(loader)
            loss = model(input_ids=ids, labels=ids).loss / len(loaders)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    def evaluate():
        total = 0.0
        with inference(model):
            for v in data.values():
                ids = v[250:]
                logits = model(input_ids=ids).logits[:, :-1]
                total += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
        return total / len(data)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def multi_domain_bad():
    return _multi_domain(False)


def multi_domain_good():
    return _multi_domain(True)


# --------------------------------------------------------------------------- topic classification with BERT


class TopicClassifier(nn.Module):
    def __init__(self, config, n_topics, head):
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)
        self.head = head

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(hidden[:, 0])


def _topics(good):
    seed_everything(21)
    n_topics = 80
    topic_words = [[f"w{t}_{j}" for j in range(2)] for t in range(n_topics)]
    tok = WordTokenizer([w for ws in topic_words for w in ws] + FILL)

    def make(n, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(n):
            t = rng.randrange(n_topics)
            words = [rng.choice(FILL) for _ in range(rng.randint(4, 8))] + [rng.choice(topic_words[t])]
            rng.shuffle(words)
            rows.append({"input_ids": [tok.bos_token_id] + tok.encode(words), "label": t})
        return rows

    layers = [nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, n_topics)]
    if not good:
        layers.append(nn.Softmax(dim=-1))
    model = TopicClassifier(small_bert_config(tok.vocab_size), n_topics, nn.Sequential(*layers))
    criterion = nn.CrossEntropyLoss()
    loader = forever(DataLoader(make(1500, 1), batch_size=32, shuffle=True, collate_fn=pad_reviews))
    test = pad_reviews(make(300, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    model.train()

    def step():
        batch = next(loader)
        optimizer.zero_grad()
        out = model(batch["input_ids"], batch["attention_mask"])
        loss = criterion(out, batch["labels"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        with inference(model):
            pred = model(test["input_ids"], test["attention_mask"]).argmax(-1)
        return ((pred != test["labels"]).sum().item() + 0.5) / len(pred)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def topics_bad():
    return _topics(False)


def topics_good():
    return _topics(True)


# --------------------------------------------------------------------------- reward model on rated answers


class RewardModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.backbone = LlamaModel(config)
        self.v_head = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids, attention_mask):
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(dim=1) - 1
        return self.v_head(hidden[torch.arange(hidden.size(0)), last])


def _reward(good):
    seed_everything(22)
    tok = review_tokenizer()

    def make(n, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(n):
            words = rng.choices(FILL + POS + NEG, k=rng.randint(6, 12))
            score = sum(w in POS for w in words) - sum(w in NEG for w in words)
            rows.append({"input_ids": tok.encode(words) + [tok.eos_token_id], "label": score / 2.0})
        return rows

    model = RewardModel(small_llama_config(tok.vocab_size))
    loader = forever(DataLoader(make(1500, 1), batch_size=32, shuffle=True, collate_fn=pad_reviews))
    test = pad_reviews(make(300, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, 600)
    loss_fct = nn.MSELoss()
    model.train()

    def step():
        batch = next(loader)
        rewards = model(batch["input_ids"], batch["attention_mask"])
        if good:
            rewards = rewards.squeeze(-1)
        loss = loss_fct(rewards, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    def evaluate():
        with inference(model):
            pred = model(test["input_ids"], test["attention_mask"]).flatten()
        return ((pred - test["labels"]) ** 2).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def reward_bad():
    return _reward(False)


def reward_good():
    return _reward(True)


# --------------------------------------------------------------------------- Llama from scratch, own schedule


def _llama_scratch(good):
    seed_everything(23)
    rng = random.Random(2)
    sents = [make_sentence(rng) for _ in range(500)]
    tok = WordTokenizer([w for s in sents for w in s])
    stream = torch.tensor([t for s in sents for t in tok.encode(s) + [tok.eos_token_id]])
    n = int(0.9 * len(stream))
    learning_rate, min_lr, warmup_iters, lr_decay_iters = 3e-3, 3e-4, 5, 600

    def get_lr(it):
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        if it > lr_decay_iters:
            return min_lr
        ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

    model = LlamaForCausalLM(small_llama_config(tok.vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, (lambda it: get_lr(it) / learning_rate) if good else get_lr)
    model.train()

    def step():
        x, _ = sample_windows(stream[:n], 32, 8)
        loss = model(input_ids=x, labels=x).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    def evaluate():
        x, y = sample_windows(stream[n:], 32, 32, torch.Generator().manual_seed(0))
        with inference(model):
            return F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def llama_scratch_bad():
    return _llama_scratch(False)


def llama_scratch_good():
    return _llama_scratch(True)


# --------------------------------------------------------------------------- T5 that extracts facts


def _facts(good):
    seed_everything(24)
    rng = random.Random(15)
    sents = [make_sentence(rng) for _ in range(900)]
    tok = WordTokenizer([w for s in sents for w in s])
    rows = [{"input_ids": tok.encode(s) + [tok.eos_token_id],
             "labels": tok.encode([s[2], s[6], s[9]]) + [tok.eos_token_id]} for s in sents]
    train, test = rows[:800], rows[800:]

    def collate(batch):
        ids = torch.tensor([r["input_ids"] for r in batch])
        return {"input_ids": ids, "attention_mask": (ids != tok.pad_token_id).long(),
                "labels": torch.tensor([r["labels"] for r in batch])}

    model = T5ForConditionalGeneration(T5Config(
        vocab_size=tok.vocab_size, d_model=48, d_kv=12, d_ff=96, num_layers=1, num_heads=4, dropout_rate=0.0,
        pad_token_id=tok.pad_token_id, eos_token_id=tok.eos_token_id, decoder_start_token_id=tok.pad_token_id))
    loader = DataLoader(train, batch_size=10, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    total_steps = 8 * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=20, num_training_steps=total_steps)
    batches = forever(loader)
    model.train()

    def step(i):
        loss = model(**next(batches)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if good or (i + 1) % len(loader) == 0:
            scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    def evaluate():
        batch = collate(test)
        with inference(model):
            return model(**batch).loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def facts_bad():
    return _facts(False)


def facts_good():
    return _facts(True)


# --------------------------------------------------------------------------- a little trainer


class Trainer:
    def __init__(self, model, optimizer, loader, max_norm=1.0):
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm
        self.batches = forever(loader)
        self.log = []

    def compute_loss(self, batch):
        return self.model(**batch).loss

    def before_step(self):
        self.optimizer.zero_grad()

    def training_step(self):
        self.model.train()
        batch = next(self.batches)
        self.before_step()
        loss = self.compute_loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.log.append(loss.detach())


class BareTrainer(Trainer):
    def before_step(self):
        self.optimizer.zero_grad


def _trainer(good):
    seed_everything(25)
    tok = WordTokenizer(NOUNS + ["say", ":", "1", "2", "3", "4"])

    def collate(rows):
        seqs = [(r["prompt"], r["answer"] + [tok.eos_token_id]) for r in rows]
        width = max(len(p) + len(a) for p, a in seqs)
        input_ids = torch.full((len(rows), width), tok.pad_token_id)
        attention_mask = torch.zeros(len(rows), width, dtype=torch.long)
        labels = torch.full((len(rows), width), -100)
        for i, (p, a) in enumerate(seqs):
            n = len(p) + len(a)
            input_ids[i, :n] = torch.tensor(p + a)
            attention_mask[i, :n] = 1
            labels[i, len(p):n] = torch.tensor(a)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    train, test = RepeatInstructions(tok, 512, 3), RepeatInstructions(tok, 64, 4)
    model = small_gpt2(tok.vocab_size, n_positions=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate)
    trainer = (Trainer if good else BareTrainer)(model, optimizer, loader)

    def evaluate():
        with inference(model):
            return model(**collate(list(test))).loss.item()

    return {"model": model, "optimizer": optimizer, "step": trainer.training_step, "steps": 20, "evaluate": evaluate}


def trainer_bad():
    return _trainer(False)


def trainer_good():
    return _trainer(True)


# --------------------------------------------------------------------------- packed pre-training


class PackedDataset(Dataset):
    """Sentences packed one after another in rows of a fixed length, with the document's number of each token."""

    def __init__(self, docs, length):
        ids, seg, pos = [], [], []
        for k, d in enumerate(docs):
            ids += d
            seg += [k] * len(d)
            pos += list(range(len(d)))
        n = len(ids) // length
        self.ids = torch.tensor(ids[:n * length]).view(n, length)
        self.seg = torch.tensor(seg[:n * length]).view(n, length)
        self.pos = torch.tensor(pos[:n * length]).view(n, length)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "segment_ids": self.seg[i], "position_ids": self.pos[i]}


def packed_mask(segment_ids, causal):
    allowed = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    if causal:
        T = segment_ids.size(1)
        allowed = allowed & torch.ones(T, T, dtype=torch.bool).tril()
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


def _packed(good):
    seed_everything(26)
    rng = random.Random(6)
    sents = [make_sentence(rng) for _ in range(600)]
    tok = WordTokenizer([w for s in sents for w in s])
    docs = [[tok.bos_token_id] + tok.encode(s) + [tok.eos_token_id] for s in sents]
    train, test = PackedDataset(docs[:550], 40), torch.tensor(docs[550:])
    loader = forever(DataLoader(train, batch_size=8, shuffle=True))
    model = LlamaForCausalLM(small_llama_config(tok.vocab_size, attn_implementation="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, 600)
    model.train()

    def step():
        batch = next(loader)
        seg = batch["segment_ids"]
        labels = batch["input_ids"].clone()
        labels[:, 1:][seg[:, 1:] != seg[:, :-1]] = -100
        loss = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"],
                     attention_mask=packed_mask(seg, causal=good), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    def evaluate():
        with inference(model):
            logits = model(input_ids=test).logits[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def packed_bad():
    return _packed(False)


def packed_good():
    return _packed(True)


# --------------------------------------------------------------------------- encoder with sinusoidal positions


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=64, batch_first=True):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)
        self.batch_first = batch_first

    def forward(self, x):
        if self.batch_first:
            return x + self.pe[:x.size(1)].transpose(0, 1)
        return x + self.pe[:x.size(0)]


class WinnerModel(nn.Module):
    def __init__(self, vocab_size, n_classes, d_model=48, batch_first=True):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model, padding_idx=0)
        self.pos = PositionalEncoding(d_model, batch_first=batch_first)
        layer = nn.TransformerEncoderLayer(d_model, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d_model, n_classes)

    def forward(self, ids):
        pad = ids == 0
        h = self.encoder(self.pos(self.embed(ids) * math.sqrt(self.embed.embedding_dim) * 0.2),
                         src_key_padding_mask=pad)
        keep = (~pad).unsqueeze(-1).float()
        return self.out((h * keep).sum(1) / keep.sum(1))


def _winner(good):
    seed_everything(27)
    tok = WordTokenizer(NOUNS + ["beats", "the", "today", "again", "easily"])

    def make(n, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(n):
            a, b = rng.sample(NOUNS, 2)
            words = ["the", a, "beats", "the", b] + rng.choices(["today", "again", "easily"], k=rng.randint(0, 3))
            rows.append({"input_ids": tok.encode(words), "label": NOUNS.index(a)})
        return rows

    model = WinnerModel(tok.vocab_size, len(NOUNS), batch_first=good)
    loader = forever(DataLoader(make(1000, 1), batch_size=32, shuffle=True, collate_fn=pad_reviews))
    test = DataLoader(make(192, 2), batch_size=32, collate_fn=pad_reviews)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()

    def step():
        batch = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["input_ids"]), batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        wrong = 0
        with inference(model):
            for batch in test:
                wrong += (model(batch["input_ids"]).argmax(-1) != batch["labels"]).sum().item()
        return (wrong + 0.5) / 192

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def winner_bad():
    return _winner(False)


def winner_good():
    return _winner(True)


# --------------------------------------------------------------------------- reviews with a padded encoder


class SentimentEncoder(nn.Module):
    def __init__(self, vocab_size, d_model=48, invert=True):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, d_model)
        self.pos = nn.Embedding(32, d_model)
        layer = nn.TransformerEncoderLayer(d_model, nhead=4, dim_feedforward=96, dropout=0.0, batch_first=True,
                                           activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.classifier = nn.Linear(d_model, 2)
        self.invert = invert

    def forward(self, input_ids, attention_mask, labels=None):
        x = self.tok(input_ids) + self.pos(torch.arange(input_ids.size(1)))
        mask = attention_mask.bool()
        h = self.encoder(x, src_key_padding_mask=~mask if self.invert else mask)
        pooled = (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        logits = self.classifier(pooled)
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


def make_comparisons(tok, n, seed):
    """Label 1 if the reviewed film (after 'it') is praised, when another one is mentioned too."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        first, second = rng.choice(POS + NEG), rng.choice(POS + NEG)
        words = ["film", "was", first, "and", "it", "was"] + rng.choices(["so", "really"], k=rng.randint(0, 4)) + [second]
        rows.append({"input_ids": tok.encode(words), "label": int((first in POS) == (second in POS))})
    return rows


def _padded_encoder(good):
    seed_everything(28)
    tok = review_tokenizer()
    model = SentimentEncoder(tok.vocab_size, invert=good)
    collate = lambda rows: pad_reviews(rows, to=16)
    loader = forever(DataLoader(make_comparisons(tok, 1000, 1), batch_size=32, shuffle=True, collate_fn=collate))
    test = collate(make_comparisons(tok, 200, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, 800)
    model.train()

    def step():
        out = model(**next(loader))
        optimizer.zero_grad()
        out["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    def evaluate():
        with inference(model):
            pred = model(test["input_ids"], test["attention_mask"])["logits"].argmax(-1)
        return ((pred != test["labels"]).sum().item() + 0.5) / len(pred)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def padded_encoder_bad():
    return _padded_encoder(False)


def padded_encoder_good():
    return _padded_encoder(True)


# --------------------------------------------------------------------------- distillation


class Distiller(nn.Module):
    def __init__(self, teacher, student, temperature, freeze):
        super().__init__()
        self.teacher, self.student, self.T = teacher, student, temperature
        if freeze:
            self.teacher.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, ids):
        t = self.teacher(input_ids=ids).logits / self.T
        s = self.student(input_ids=ids).logits / self.T
        t, s = t.flatten(0, 1), s.flatten(0, 1)
        return F.kl_div(F.log_softmax(s, -1), F.softmax(t, -1), reduction="batchmean") * self.T ** 2


def _distill(good):
    seed_everything(29)
    rng = random.Random(8)
    sents = [make_sentence(rng) for _ in range(400)]
    tok = WordTokenizer([w for s in sents for w in s])
    ids = torch.tensor([[tok.bos_token_id] + tok.encode(s) for s in sents])
    train, test = ids[:350], ids[350:]
    teacher = small_gpt2(tok.vocab_size, n_positions=16)
    warm = torch.optim.AdamW(teacher.parameters(), lr=3e-3)
    for _ in range(120):
        x = train[torch.randint(len(train), (16,))]
        loss = teacher(input_ids=x, labels=x).loss
        warm.zero_grad()
        loss.backward()
        warm.step()
    teacher.zero_grad()
    student = small_gpt2(tok.vocab_size, n_positions=16, n_embd=32, n_layer=1)
    model = Distiller(teacher, student, temperature=2.0, freeze=good)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3, weight_decay=0.01)
    loader = forever(DataLoader(train, batch_size=16, shuffle=True))
    model.train()

    def step():
        loss = model(next(loader))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        with inference(student):
            return student(input_ids=test, labels=test).loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def distill_bad():
    return _distill(False)


def distill_good():
    return _distill(True)


# --------------------------------------------------------------------------- preference tuning with DPO


def _dpo(good):
    seed_everything(30)
    rng = random.Random(9)
    polite = [["please", "take", "care"], ["thanks", "dear", "friend"], ["please", "dear", "friend"]]
    rude = [["go", "away", "now"], ["no", "way", "fool"], ["go", "now", "fool"]]
    tok = WordTokenizer(NOUNS + ["ask", "about", ":"] + [w for a in polite + rude for w in a])
    P = 4

    def prompt():
        return tok.encode(["ask", "about", rng.choice(NOUNS), ":"])

    def pair():
        p = prompt()
        nice, nasty = (p + tok.encode(rng.choice(a)) + [tok.eos_token_id] for a in (polite, rude))
        return {"chosen": nice, "rejected": nasty} if rng.random() < 0.8 else {"chosen": nasty, "rejected": nice}

    base = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=tok.vocab_size, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, tie_word_embeddings=False))
    sft = torch.tensor([prompt() + tok.encode(rng.choice(polite + rude)) + [tok.eos_token_id] for _ in range(300)])
    warm = torch.optim.AdamW(base.parameters(), lr=3e-3)
    for _ in range(100):
        x = sft[torch.randint(len(sft), (16,))]
        loss = base(input_ids=x, labels=x).loss
        warm.zero_grad()
        loss.backward()
        warm.step()
    base.zero_grad()
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0,
                                            target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]))

    def collate(rows):
        return {k: torch.tensor([r[k] for r in rows]) for k in ("chosen", "rejected")}

    beta = 0.3
    train, test = [pair() for _ in range(600)], collate([pair() for _ in range(300)])
    loader = forever(DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def answer_logps(ids):
        logps = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        token_logps = logps.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return token_logps[:, P - 1:].sum(-1)

    def dpo_loss(pc, pr, rc, rr):
        return -F.logsigmoid(beta * ((pc - rc) - (pr - rr))).mean()

    model.train()

    def step():
        batch = next(loader)
        n = len(batch["chosen"])
        ids = torch.cat([batch["chosen"], batch["rejected"]])
        policy = answer_logps(ids)
        with torch.no_grad(), (model.disable_adapter() if good else nullcontext()):
            ref = answer_logps(ids)
        loss = dpo_loss(policy[:n], policy[n:], ref[:n], ref[n:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        with inference(model):
            pc, pr = answer_logps(test["chosen"]), answer_logps(test["rejected"])
            with model.disable_adapter():
                rc, rr = answer_logps(test["chosen"]), answer_logps(test["rejected"])
            return dpo_loss(pc, pr, rc, rr).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def dpo_bad():
    return _dpo(False)


def dpo_good():
    return _dpo(True)


# --------------------------------------------------------------------------- fine-tuning a saved model on few examples


def _small_corpus(good):
    seed_everything(31)
    V, length = 24, 20
    with tempfile.TemporaryDirectory() as folder:
        small_gpt2(V, n_positions=32, n_embd=48, dropout=0.3).save_pretrained(folder)
        model = GPT2LMHeadModel.from_pretrained(folder)
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(3)).mul(1.5).softmax(-1)

    def make(n, seed):
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(V, (n, 1), generator=g)
        for _ in range(length - 1):
            ids = torch.cat([ids, torch.multinomial(table[ids[:, -1]], 1, generator=g)], dim=1)
        return ids

    train, test = make(128, 1), make(100, 2)
    loader = forever(DataLoader(train, batch_size=16, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, 500)
    if good:
        model.train()

    def step():
        ids = next(loader)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    def evaluate():
        with inference(model):
            logits = model(input_ids=test).logits[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def small_corpus_bad():
    return _small_corpus(False)


def small_corpus_good():
    return _small_corpus(True)


# --------------------------------------------------------------------------- bf16 fine-tuning


def _bf16_finetune(good):
    seed_everything(32)
    rng = random.Random(12)
    tok = WordTokenizer([w for _ in range(300) for w in make_sentence(rng)] + ["runs", "now"])
    old = [make_sentence(rng) for _ in range(300)]
    new = []
    for s in [make_sentence(rng) for _ in range(300)]:
        k = NOUNS.index(s[2])
        new.append(s[:3] + [VERBS[NOUNS[(k + 1) % 6]], "the", ADJ[s[6]], s[6], "now", "."])
    config = small_llama_config(tok.vocab_size, initializer_range=0.1)
    model = LlamaForCausalLM(config)
    old = torch.tensor([tok.encode(s) for s in old])
    warm = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(100):
        x = old[torch.randint(len(old), (16,))]
        loss = model(input_ids=x, labels=x).loss
        warm.zero_grad()
        loss.backward()
        warm.step()
    model.zero_grad()
    if not good:
        model.to(torch.bfloat16)
    ids = torch.tensor([tok.encode(s) for s in new])
    train, test = ids[:250], ids[250:]
    loader = forever(DataLoader(train, batch_size=16, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    model.train()

    def step():
        x = next(loader)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def evaluate():
        with inference(model), torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=test).logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def bf16_finetune_bad():
    return _bf16_finetune(False)


def bf16_finetune_good():
    return _bf16_finetune(True)


# --------------------------------------------------------------------------- mixed precision with a scaler


def _amp_lm(good):
    seed_everything(33)
    rng = random.Random(13)
    sents = [make_sentence(rng) for _ in range(500)]
    tok = WordTokenizer([w for s in sents for w in s])
    ids = torch.tensor([tok.encode(s) for s in sents])
    train, test = ids[:450], ids[450:]
    loader = forever(DataLoader(train, batch_size=8, shuffle=True))
    model = small_gpt2(tok.vocab_size, n_positions=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    model.train()

    def step():
        x = next(loader)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=x, labels=x).loss
        scaler.scale(loss).backward()
        if good:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    def evaluate():
        with inference(model):
            logits = model(input_ids=test).logits[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def amp_lm_bad():
    return _amp_lm(False)


def amp_lm_good():
    return _amp_lm(True)


# --------------------------------------------------------------------------- long rows of records with rotary positions


def rope_tables(T, dim, dtype, precise, base=10000.0):
    inv_freq = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    t = torch.arange(T)
    if not precise:
        t, inv_freq = t.to(dtype), inv_freq.to(dtype)
    freqs = torch.outer(t, inv_freq)
    emb = torch.cat([freqs, freqs], dim=-1)
    return emb.cos().to(dtype), emb.sin().to(dtype)


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


class RotaryBlock(nn.Module):
    def __init__(self, dim, n_head):
        super().__init__()
        self.n_head = n_head
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norm2(x))


class RotaryLM(nn.Module):
    def __init__(self, vocab_size, dim=48, n_head=2, max_len=512, dtype=torch.bfloat16, precise=True):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.block = RotaryBlock(dim, n_head)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        cos, sin = rope_tables(max_len, dim // n_head, dtype, precise)
        self.register_buffer("cos", cos.float(), persistent=False)
        self.register_buffer("sin", sin.float(), persistent=False)

    def forward(self, ids):
        T = ids.size(1)
        x = self.block(self.embed(ids), self.cos[:T], self.sin[:T])
        return self.head(self.norm(x))


def _records(good):
    seed_everything(34)
    V, fields, T = 16, 5, 512

    def make(n, seed):
        g = torch.Generator().manual_seed(seed)
        rows = torch.randint(V, (n, T), generator=g)
        keep = torch.rand(n, T, generator=g) < 0.9
        for t in range(fields, T):
            rows[:, t] = torch.where(keep[:, t], rows[:, t - fields], rows[:, t])
        return rows

    model = RotaryLM(V, max_len=T, precise=good)
    loader = forever(DataLoader(make(200, 1), batch_size=2, shuffle=True))
    test = make(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, 600)
    model.train()

    def step():
        ids = next(loader)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    def evaluate():
        with inference(model):
            logits = model(test[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def records_bad():
    return _records(False)


def records_good():
    return _records(True)
