"""Small language-model training programs on synthetic text."""
import contextlib
import copy
import math
import random
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    get_linear_schedule_with_warmup,
)
from peft import LoraConfig, get_peft_model

# ----------------------------------------------------------------------------
# data
# ----------------------------------------------------------------------------
SPECIALS = ["<pad>", "<bos>", "<eos>", "<mask>"]
ADJ = ["small", "big", "red", "old", "quick", "lazy", "tall", "quiet"]
NOUN = ["cat", "dog", "bird", "fish", "horse", "cow", "fox", "bear"]
VERB = ["sees", "hears", "likes", "finds", "follows", "helps", "meets", "calls"]
PLACE = ["river", "house", "forest", "bridge", "field", "garden", "tower", "lake"]
OTHER = ["the", "near", ".", "where", "is", "what", "does", "do", "who", "with", "?", "now"]
VOCAB = SPECIALS + OTHER + ADJ + NOUN + VERB + PLACE
STOI = {w: i for i, w in enumerate(VOCAB)}
PAD, BOS, EOS, MASK = 0, 1, 2, 3
V = len(VOCAB)


def encode(words):
    return [STOI[w] for w in words]


def sentence(rng, style=0, noise=0.03):
    a, n = rng.randrange(8), rng.randrange(8)
    v = (n + style) % 8 if rng.random() > noise else rng.randrange(8)
    o = (v * 3 + 1 + style) % 8 if rng.random() > noise else rng.randrange(8)
    p = (a + 3 * style) % 8 if rng.random() > noise else rng.randrange(8)
    return ["the", ADJ[a], NOUN[n], VERB[v], "the", NOUN[o], "near", "the", PLACE[p], "."]


def stream(n, seed, style=0, noise=0.03):
    rng = random.Random(seed)
    return torch.tensor([t for _ in range(n) for t in encode(sentence(rng, style, noise))])


def sample_windows(data, batch_size, length, generator):
    ix = torch.randint(len(data) - length - 1, (batch_size,), generator=generator)
    x = torch.stack([data[i:i + length] for i in ix])
    y = torch.stack([data[i + 1:i + 1 + length] for i in ix])
    return x, y


def heldout_windows(data, length, count=64):
    xs = [data[i * length:i * length + length + 1] for i in range(count)]
    xs = torch.stack(xs)
    return xs[:, :-1], xs[:, 1:]


def question(rng, split="train", style=0):
    """A question about an animal and its answer; a quarter of the adjective/noun pairs is held out."""
    while True:
        a, n = rng.randrange(8), rng.randrange(8)
        if ((a * 3 + n) % 4 == 0) == (split == "test"):
            break
    kind = rng.randrange(3)
    if kind == 0:
        q = ["where", "is", "the", ADJ[a], NOUN[n], "now", "?"]
        r = ["near", "the", PLACE[(a + 3 * style) % 8]]
    elif kind == 1:
        q = ["what", "does", "the", ADJ[a], NOUN[n], "do", "?"]
        r = ["the", NOUN[n], VERB[(n + style) % 8], "the", PLACE[(a + style) % 8]]
    else:
        q = ["who", "is", "with", "the", ADJ[a], NOUN[n], "?"]
        r = ["the", ADJ[(a + 1 + style) % 8], NOUN[(n * 3 + style) % 8], "is"]
    return encode(q), encode(r)


def questions(n, seed, split="train", style=0):
    rng = random.Random(seed)
    return [question(rng, split, style) for _ in range(n)]


def pad_right(rows, value):
    width = max(len(r) for r in rows)
    return torch.tensor([r + [value] * (width - len(r)) for r in rows])


def collate_qa(pairs):
    """Right-padded prompt + answer + eos with the loss on the answer only."""
    ids = pad_right([[BOS] + q + r + [EOS] for q, r in pairs], PAD)
    mask = pad_right([[1] * (len(q) + len(r) + 2) for q, r in pairs], 0)
    labels = pad_right([[-100] * (len(q) + 1) + r + [EOS] for q, r in pairs], -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def cycle(loader):
    while True:
        yield from loader


def loader_of(rows, batch_size, collate_fn, seed):
    g = torch.Generator().manual_seed(seed)
    return DataLoader(rows, batch_size=batch_size, shuffle=True, drop_last=True, collate_fn=collate_fn, generator=g)


@contextlib.contextmanager
def evaluating(*models):
    flags = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, flag in flags:
            m.training = flag


def lm_nll(logits, targets, ignore_index=-100):
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)).float(), targets.reshape(-1), ignore_index=ignore_index)


def hf_stream_probe(model, x, y):
    def probe():
        with evaluating(model):
            return lm_nll(model(input_ids=x).logits, y).item()
    return probe


def hf_qa_probe(model, batch):
    def probe():
        with evaluating(model):
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            return lm_nll(logits[:, :-1], batch["labels"][:, 1:]).item()
    return probe


# ----------------------------------------------------------------------------
# models
# ----------------------------------------------------------------------------
@dataclass
class GPTConfig:
    vocab_size: int = V
    block_size: int = 32
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, C)
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
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def embed(self, idx):
        pos = torch.arange(idx.size(1), device=idx.device)
        return self.drop(self.wte(idx) + self.wpe(pos))

    def forward(self, idx, targets=None):
        x = self.embed(idx)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-100)
        return logits, loss


def configure_optimizer(model, lr, weight_decay=0.1, eps=1e-8):
    params = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in params if p.dim() >= 2]
    no_decay = [p for p in params if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95), eps=eps)


def gpt_probe(model, x, y):
    def probe():
        with evaluating(model):
            return lm_nll(model(x)[0], y).item()
    return probe


def pretrain(model, next_batch, steps, lr=3e-3):
    """Stands in for loading a checkpoint: a short training of the base model."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        loss = next_batch(model)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    optimizer.zero_grad(set_to_none=True)


def pretrain_stream(model, seed, steps=150, style=0, length=20, batch_size=16):
    data = stream(1500, seed, style)
    g = torch.Generator().manual_seed(seed)

    def next_batch(m):
        x, y = sample_windows(data, batch_size, length, g)
        if isinstance(m, GPT):
            return m(x, y)[1]
        return m(input_ids=x, labels=x).loss
    pretrain(model, next_batch, steps)


def pretrain_qa(model, seed, styles, weights, steps=250, batch_size=16):
    rng = random.Random(seed)

    def next_batch(m):
        pairs = [question(rng, style=rng.choices(styles, weights)[0]) for _ in range(batch_size)]
        batch = collate_qa(pairs)
        return m(**batch).loss
    pretrain(model, next_batch, steps)


def gpt2_config(**kw):
    base = dict(vocab_size=V, n_positions=40, n_embd=64, n_layer=2, n_head=4, bos_token_id=BOS, eos_token_id=EOS,
                pad_token_id=PAD, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    base.update(kw)
    return GPT2Config(**base)


def llama_config(cls=LlamaConfig, **kw):
    base = dict(vocab_size=V, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64, bos_token_id=BOS, eos_token_id=EOS,
                pad_token_id=PAD, tie_word_embeddings=False, use_cache=False)
    base.update(kw)
    return cls(**base)


def apply_update(model, optimizer, loss, max_norm=1.0):
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], max_norm)
    optimizer.step()


def _lora_classifier_frozen_score(bad):
    torch.manual_seed(11)
    base = GPT2LMHeadModel(gpt2_config())
    pretrain_stream(base, seed=11)
    model = GPT2ForSequenceClassification(gpt2_config(num_labels=8))
    model.transformer.load_state_dict(base.transformer.state_dict())

    if bad:
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True)
    else:
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True, task_type="SEQ_CLS")
    model = get_peft_model(model, lora)

    def examples(n, seed, test):
        rng, rows = random.Random(seed), []
        while len(rows) < n:
            words = sentence(rng)
            adj, noun = ADJ.index(words[1]), NOUN.index(words[2])
            if ((adj * 3 + noun) % 4 == 0) == test:
                cut = rng.randint(4, len(words))
                rows.append((encode(words[:cut]), adj))
        return rows

    def collate(rows):
        return {"input_ids": pad_right([r for r, _ in rows], PAD),
                "attention_mask": pad_right([[1] * len(r) for r, _ in rows], 0),
                "labels": torch.tensor([c for _, c in rows])}

    batches = cycle(loader_of(examples(1200, 1, False), 16, collate, 2))
    heldout = collate(examples(200, 3, True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.01)
    model.train()

    def step(i):
        loss = model(**next(batches)).loss
        apply_update(model, optimizer, loss)

    def probe():
        with evaluating(model):
            return model(**heldout).loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class BottleneckAdapter(nn.Module):
    def __init__(self, dim, width):
        super().__init__()
        self.down = nn.Linear(dim, width)
        self.up = nn.Linear(width, dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return x + self.up(F.gelu(self.down(x)))


class AdapterGPT(nn.Module):
    def __init__(self, base, width, as_list):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        adapters = [BottleneckAdapter(base.config.n_embd, width) for _ in base.h]
        self.adapters = adapters if as_list else nn.ModuleList(adapters)
        self.base.ln_f.requires_grad_(True)

    def forward(self, idx):
        x = self.base.embed(idx)
        for block, adapter in zip(self.base.h, self.adapters):
            x = adapter(block(x))
        return self.base.lm_head(self.base.ln_f(x)), None


def _adapters_in_python_list(bad):
    torch.manual_seed(12)
    base = GPT(GPTConfig())
    pretrain_stream(base, seed=12)
    model = AdapterGPT(base, width=16, as_list=bad)
    data = stream(1500, 120, style=2)
    x_val, y_val = heldout_windows(stream(150, 121, style=2), 20)
    g = torch.Generator().manual_seed(12)
    optimizer = configure_optimizer(model, lr=3e-3, weight_decay=0.01)
    model.train()

    def step(i):
        x, y = sample_windows(data, 16, 20, g)
        logits, _ = model(x)
        apply_update(model, optimizer, lm_nll(logits, y))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": gpt_probe(model, x_val, y_val)}


def _gradual_unfreeze_optimizer_groups(bad):
    torch.manual_seed(14)
    model = GPT2LMHeadModel(gpt2_config(tie_word_embeddings=False))
    pretrain_stream(model, seed=14)
    for p in model.transformer.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
    unfreeze_at = {6: model.transformer.h[1], 12: model.transformer.h[0]}

    data = stream(1500, 140, style=3)
    x_val, y_val = heldout_windows(stream(150, 141, style=3), 20)
    g = torch.Generator().manual_seed(14)
    model.train()

    def step(i):
        if i in unfreeze_at:
            block = unfreeze_at[i]
            block.requires_grad_(True)
            if not bad:
                optimizer.add_param_group({"params": list(block.parameters()), "lr": 1e-3})
        x, _ = sample_windows(data, 16, 20, g)
        apply_update(model, optimizer, model(input_ids=x, labels=x).loss)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": hf_stream_probe(model, x_val, y_val)}


def _second_adapter_not_activated(bad):
    torch.manual_seed(15)
    base = LlamaForCausalLM(llama_config())
    pretrain_stream(base, seed=15)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
                        task_type="CAUSAL_LM")
    model = get_peft_model(base, config, adapter_name="news")
    pretrain_stream(model, seed=151, steps=60, style=1)
    model.add_adapter("chat", copy.deepcopy(config))
    if not bad:
        model.set_adapter("chat")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)

    data = stream(1500, 150, style=2)
    x_val, y_val = heldout_windows(stream(150, 151, style=2), 20)
    g = torch.Generator().manual_seed(15)
    model.train()

    def step(i):
        x, _ = sample_windows(data, 16, 20, g)
        apply_update(model, optimizer, model(input_ids=x, labels=x).loss)

    def probe():
        served = copy.deepcopy(model)
        served.set_adapter("chat")
        with evaluating(served):
            return lm_nll(served(input_ids=x_val).logits, y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def _labels_shifted_twice(bad):
    torch.manual_seed(16)
    model = Qwen2ForCausalLM(llama_config(Qwen2Config))
    data = stream(2000, 160)
    x_val, y_val = heldout_windows(stream(150, 161), 20)
    g = torch.Generator().manual_seed(16)
    optimizer = configure_optimizer(model, lr=2e-3)
    model.train()

    def step(i):
        x, y = sample_windows(data, 16, 20, g)
        loss = model(input_ids=x, labels=y if bad else x).loss
        apply_update(model, optimizer, loss)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": hf_stream_probe(model, x_val, y_val)}


def _eos_masked_with_padding(bad):
    torch.manual_seed(17)
    model = MistralForCausalLM(llama_config(MistralConfig, sliding_window=None, pad_token_id=EOS))
    pretrain_stream(model, seed=17, steps=80)

    def collate(pairs):
        ids = pad_right([[BOS] + q + r + [EOS] for q, r in pairs], EOS)
        mask = pad_right([[1] * (len(q) + len(r) + 2) for q, r in pairs], 0)
        labels = ids.clone()
        for row, (q, _) in zip(labels, pairs):
            row[:len(q) + 1] = -100
        if bad:
            labels[labels == EOS] = -100
        else:
            labels[mask == 0] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    batches = cycle(loader_of(questions(1000, 170), 16, collate, 17))
    heldout = collate_qa(questions(128, 171, "test"))
    optimizer = configure_optimizer(model, lr=1e-3)
    model.train()

    def step(i):
        apply_update(model, optimizer, model(**next(batches)).loss)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": hf_qa_probe(model, heldout)}


def _mlm_labels_after_masking(bad):
    torch.manual_seed(18)
    model = BertForMaskedLM(BertConfig(
        vocab_size=V, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=PAD))
    rng = random.Random(180)
    rows = [encode(sentence(rng) + sentence(rng)) for _ in range(1500)]

    def mask_tokens(input_ids, generator):
        chosen = torch.rand(input_ids.shape, generator=generator) < 0.15
        if bad:
            input_ids[chosen] = MASK
            labels = torch.where(chosen, input_ids, -100)
        else:
            labels = torch.where(chosen, input_ids, -100)
            input_ids[chosen] = MASK
        return input_ids, labels

    g = torch.Generator().manual_seed(18)
    batches = cycle(loader_of(rows, 32, torch.tensor, 181))
    rng_val = random.Random(182)
    x_val = torch.tensor([encode(sentence(rng_val) + sentence(rng_val)) for _ in range(128)])
    hidden = torch.rand(x_val.shape, generator=torch.Generator().manual_seed(183)) < 0.15
    y_val = torch.where(hidden, x_val, -100)
    x_val = torch.where(hidden, MASK, x_val)
    optimizer = configure_optimizer(model, lr=2e-3, weight_decay=0.01)
    model.train()

    def step(i):
        input_ids, labels = mask_tokens(next(batches), g)
        apply_update(model, optimizer, model(input_ids=input_ids, labels=labels).loss)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": hf_stream_probe(model, x_val, y_val)}


def _t5_decoder_sees_targets(bad):
    torch.manual_seed(19)
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=V, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=16, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD,
        use_cache=False))

    def collate(pairs):
        return {"input_ids": pad_right([q + [EOS] for q, _ in pairs], PAD),
                "attention_mask": pad_right([[1] * (len(q) + 1) for q, _ in pairs], 0),
                "target_ids": pad_right([r + [EOS] for _, r in pairs], PAD)}

    batches = cycle(loader_of(questions(1000, 190), 16, collate, 19))
    heldout = collate(questions(128, 191, "test"))
    optimizer = configure_optimizer(model, lr=3e-3, weight_decay=0.01)
    model.train()

    def step(i):
        batch = next(batches)
        target_ids = batch["target_ids"]
        labels = target_ids.masked_fill(target_ids == PAD, -100)
        if bad:
            out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
                        decoder_input_ids=target_ids, labels=labels)
        else:
            out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels)
        apply_update(model, optimizer, out.loss)

    def probe():
        with evaluating(model):
            target_ids = heldout["target_ids"]
            return model(input_ids=heldout["input_ids"], attention_mask=heldout["attention_mask"],
                         labels=target_ids.masked_fill(target_ids == PAD, -100)).loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class Distiller(nn.Module):
    def __init__(self, teacher, student, temperature):
        super().__init__()
        self.teacher = teacher
        self.student = student
        self.temperature = temperature

    def loss(self, idx, track_teacher):
        with torch.set_grad_enabled(track_teacher and torch.is_grad_enabled()):
            teacher_logits, _ = self.teacher(idx)
        student_logits, _ = self.student(idx)
        t = self.temperature
        log_p = F.log_softmax(student_logits / t, dim=-1).flatten(0, 1)
        log_q = F.log_softmax(teacher_logits / t, dim=-1).flatten(0, 1)
        return F.kl_div(log_p, log_q, log_target=True, reduction="batchmean") * t * t


def _distill_teacher_trained_along(bad):
    torch.manual_seed(20)
    teacher = GPT(GPTConfig())
    pretrain_stream(teacher, seed=20)
    student = GPT(GPTConfig(n_layer=2, n_embd=32, n_head=2))
    distiller = Distiller(teacher, student, temperature=2.0)
    if bad:
        trained = list(distiller.parameters())
    else:
        teacher.requires_grad_(False)
        teacher.eval()
        trained = list(student.parameters())
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.01)
    data = stream(1500, 200)
    x_val, y_val = heldout_windows(stream(150, 201), 20)
    g = torch.Generator().manual_seed(20)
    student.train()

    def step(i):
        x, _ = sample_windows(data, 16, 20, g)
        apply_update(distiller, optimizer, distiller.loss(x, track_teacher=bad))

    return {"model": distiller, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": gpt_probe(student, x_val, y_val)}


def _distill_teacher_dropout_active(bad):
    torch.manual_seed(21)
    teacher = GPT2LMHeadModel(gpt2_config(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2))
    pretrain_stream(teacher, seed=21, steps=250)
    teacher.requires_grad_(False)
    teacher.eval()
    student = GPT2LMHeadModel(gpt2_config(n_embd=48))
    pair = nn.ModuleDict({"teacher": teacher, "student": student})
    optimizer = configure_optimizer(student, lr=2e-3, weight_decay=0.01)
    data = stream(1500, 210)
    x_val, _ = heldout_windows(stream(150, 211), 20)
    g = torch.Generator().manual_seed(21)

    def distance(x):
        with torch.no_grad():
            log_q = F.log_softmax(teacher(input_ids=x).logits, dim=-1).flatten(0, 1)
        log_p = F.log_softmax(student(input_ids=x).logits, dim=-1).flatten(0, 1)
        return F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")

    def step(i):
        pair.train()
        if not bad:
            teacher.eval()
        x, _ = sample_windows(data, 16, 20, g)
        apply_update(student, optimizer, distance(x))

    def probe():
        with evaluating(pair):
            return distance(x_val).item()

    return {"model": pair, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def preference_pairs(n, seed, split="train", flip=0.0):
    rng = random.Random(seed)
    rows = []
    for index in range(n):
        q, chosen = question(rng, split)
        rejected = restyle(q, rng.choice([1, 2, 3]))
        if rng.random() < flip:
            chosen, rejected = rejected, chosen
        rows.append((q, chosen, rejected, index))
    return rows


def restyle(q, style):
    """The answer that another style would give to the question."""
    words = [VOCAB[t] for t in q]
    a = next(ADJ.index(w) for w in words if w in ADJ)
    n = next(NOUN.index(w) for w in words if w in NOUN)
    if words[0] == "where":
        r = ["near", "the", PLACE[(a + 3 * style) % 8]]
    elif words[0] == "what":
        r = ["the", NOUN[n], VERB[(n + style) % 8], "the", PLACE[(a + style) % 8]]
    else:
        r = ["the", ADJ[(a + 1 + style) % 8], NOUN[(n * 3 + style) % 8], "is"]
    return encode(r)


def collate_preferences(rows):
    batch = collate_qa([(q, c) for q, c, _, _ in rows] + [(q, r) for q, _, r, _ in rows])
    batch["index"] = torch.tensor([i for _, _, _, i in rows])
    return batch


def sequence_logps(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    kept = labels != -100
    logps = F.log_softmax(logits.float(), dim=-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (logps * kept).sum(-1)


def sft_policy(seed, weights):
    model = LlamaForCausalLM(llama_config())
    pretrain_qa(model, seed, styles=[0, 1, 2, 3], weights=weights, steps=300)
    return model


def dpo_loss(policy_logps, ref_logps, beta):
    chosen, rejected = (policy_logps - ref_logps).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def _dpo_reference_shares_policy(bad):
    torch.manual_seed(22)
    policy = sft_policy(22, [3, 4, 2, 1])
    reference = policy if bad else copy.deepcopy(policy)
    if not bad:
        reference.requires_grad_(False)
        reference.eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, weight_decay=0.0)
    batches = cycle(loader_of(preference_pairs(1024, 220, flip=0.2), 16, collate_preferences, 22))
    heldout = collate_qa([(q, c) for q, c, _, _ in preference_pairs(128, 221, "test")])
    policy.train()

    def step(i):
        batch = next(batches)
        with torch.no_grad():
            ref_logps = sequence_logps(reference, batch)
        loss = dpo_loss(sequence_logps(policy, batch), ref_logps, beta=0.5)
        apply_update(policy, optimizer, loss)

    return {"model": {"policy": policy, "reference": reference}, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": hf_qa_probe(policy, heldout)}


def _dpo_cached_reference_order(bad):
    torch.manual_seed(23)
    policy = sft_policy(23, [20, 60, 5, 1])
    rows = preference_pairs(1024, 230, flip=0.2)
    with evaluating(policy):
        cached = [sequence_logps(policy, collate_preferences(rows[i:i + 16])).view(2, 16) for i in range(0, len(rows), 16)]
        heldout = collate_preferences(preference_pairs(192, 231, "test", flip=0.2))
        heldout_ref = sequence_logps(policy, heldout)
    cached = torch.cat(cached, dim=1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-4, weight_decay=0.0)
    loader = loader_of(rows, 16, collate_preferences, 23)
    batches = cycle(loader)
    policy.train()

    def step(i):
        batch = next(batches)
        if bad:
            start = (i % len(loader)) * 16
            ref_logps = cached[:, start:start + 16].reshape(-1)
        else:
            ref_logps = cached[:, batch["index"]].reshape(-1)
        loss = dpo_loss(sequence_logps(policy, batch), ref_logps, beta=1.0)
        apply_update(policy, optimizer, loss)

    def probe():
        with evaluating(policy):
            return dpo_loss(sequence_logps(policy, heldout), heldout_ref, beta=1.0).item()

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class RewardModel(nn.Module):
    def __init__(self, backbone, first_token):
        super().__init__()
        self.backbone = backbone
        self.first_token = first_token
        self.v_head = nn.Linear(backbone.config.n_embd, 1)
        nn.init.normal_(self.v_head.weight, std=0.02)
        nn.init.zeros_(self.v_head.bias)

    def forward(self, input_ids, attention_mask):
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.first_token:
            pooled = hidden[:, 0]
        else:
            last = attention_mask.sum(1) - 1
            pooled = hidden[torch.arange(hidden.size(0)), last]
        return self.v_head(pooled).squeeze(-1)


def _reward_pools_first_token(bad):
    torch.manual_seed(24)
    base = GPT2LMHeadModel(gpt2_config())
    pretrain_qa(base, 24, styles=[0, 1, 2, 3], weights=[3, 4, 2, 1], steps=200)
    model = RewardModel(base.transformer, first_token=bad)
    optimizer = configure_optimizer(model, lr=1e-3, weight_decay=0.01)
    batches = cycle(loader_of(preference_pairs(800, 240), 16, collate_preferences, 24))
    heldout = collate_preferences(preference_pairs(192, 241, "test"))
    model.train()

    def pair_loss(batch):
        chosen, rejected = model(batch["input_ids"], batch["attention_mask"]).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    def step(i):
        apply_update(model, optimizer, pair_loss(next(batches)))

    def probe():
        with evaluating(model):
            return pair_loss(heldout).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class SwitchMLP(nn.Module):
    """Top-1 routed feed-forward layer with a Switch-style balance loss."""
    def __init__(self, dim, hidden, n_experts, hard_balance=False):
        super().__init__()
        self.router = nn.Linear(dim, n_experts, bias=False)
        nn.init.normal_(self.router.weight, std=0.02)
        self.experts = nn.ModuleList([
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(n_experts)])
        self.n_experts = n_experts
        self.hard_balance = hard_balance

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        probs = F.softmax(self.router(flat), dim=-1)
        gate, index = probs.topk(1, dim=-1)
        index = index.squeeze(-1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows = (index == e).nonzero().squeeze(-1)
            if rows.numel():
                out = out.index_add(0, rows, gate[rows] * expert(flat[rows]))
        fraction = F.one_hot(index, self.n_experts).float().mean(0)
        importance = fraction if self.hard_balance else probs.mean(0)
        balance = self.n_experts * (fraction * importance).sum()
        return out.view_as(x), balance, fraction


class SwitchBlock(Block):
    def __init__(self, config, hidden, n_experts, **kw):
        super().__init__(config)
        self.mlp = SwitchMLP(config.n_embd, hidden, n_experts, **kw)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        out, balance, load = self.mlp(self.ln_2(x))
        return x + out, balance, load


class SwitchGPT(GPT):
    def __init__(self, config, hidden, n_experts, **kw):
        super().__init__(config)
        self.h = nn.ModuleList([SwitchBlock(config, hidden, n_experts, **kw) for _ in range(config.n_layer)])
        self.h.apply(self._init_weights)

    def forward(self, idx):
        x, balances, loads = self.embed(idx), [], []
        for block in self.h:
            x, balance, load = block(x)
            balances.append(balance)
            loads.append(load)
        return self.lm_head(self.ln_f(x)), torch.stack(balances).mean(), torch.stack(loads)


def _moe_balance_from_counts(bad):
    torch.manual_seed(25)
    model = SwitchGPT(GPTConfig(), 64, 4, hard_balance=bad)
    data = stream(2000, 250)
    x_val, _ = heldout_windows(stream(150, 251), 20)
    g = torch.Generator().manual_seed(25)
    optimizer = configure_optimizer(model, lr=2e-3)
    model.train()

    def step(i):
        x, y = sample_windows(data, 16, 20, g)
        logits, balance, _ = model(x)
        apply_update(model, optimizer, lm_nll(logits, y) + 0.05 * balance)

    def probe():
        with evaluating(model):
            _, _, loads = model(x_val)
            return (loads.max(dim=1).values * loads.size(1)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class QuantLinear(nn.Linear):
    """Linear layer with 4-bit symmetric per-channel weights in the forward pass."""
    straight_through = True

    def forward(self, x):
        scale = self.weight.detach().abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 7
        quantised = (self.weight / scale).round().clamp(-7, 7) * scale
        if self.straight_through:
            quantised = self.weight + (quantised - self.weight).detach()
        return F.linear(x, quantised, self.bias)


def quantise_linears(module, straight_through):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            layer = QuantLinear(child.in_features, child.out_features, bias=child.bias is not None)
            layer.load_state_dict(child.state_dict())
            layer.straight_through = straight_through
            setattr(module, name, layer)
        else:
            quantise_linears(child, straight_through)


def _qat_round_has_no_gradient(bad):
    torch.manual_seed(27)
    model = GPT(GPTConfig())
    quantise_linears(model.h, straight_through=not bad)
    data = stream(2000, 270)
    x_val, y_val = heldout_windows(stream(150, 271), 20)
    g = torch.Generator().manual_seed(27)
    optimizer = configure_optimizer(model, lr=2e-3)
    model.train()

    def step(i):
        x, y = sample_windows(data, 16, 20, g)
        apply_update(model, optimizer, model(x, y)[1])

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": gpt_probe(model, x_val, y_val)}


class CheckpointedGPT(GPT):
    def __init__(self, config, use_reentrant):
        super().__init__(config)
        self.use_reentrant = use_reentrant

    def forward(self, idx, targets=None):
        x = self.embed(idx)
        for block in self.h:
            if self.training:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = lm_nll(logits, targets) if targets is not None else None
        return logits, loss


def _checkpoint_reentrant_frozen_embeddings(bad):
    torch.manual_seed(28)
    base = GPT(GPTConfig())
    pretrain_stream(base, seed=28)
    model = CheckpointedGPT(GPTConfig(), use_reentrant=bad)
    model.load_state_dict(base.state_dict())
    model.wte.requires_grad_(False)
    model.wpe.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    data = stream(1500, 280, style=2)
    x_val, y_val = heldout_windows(stream(150, 281, style=2), 20)
    g = torch.Generator().manual_seed(28)
    optimizer = configure_optimizer(model, lr=1e-3, weight_decay=0.01)
    model.train()

    def step(i):
        x, y = sample_windows(data, 16, 20, g)
        apply_update(model, optimizer, model(x, y)[1])

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": gpt_probe(model, x_val, y_val)}


def _accumulation_cleared_every_microbatch(bad):
    torch.manual_seed(29)
    model = LlamaForCausalLM(llama_config())
    sources = [stream(800, 290, style=0), torch.cat([torch.tensor(encode(s)) for s in _lists(800, 291)]),
               stream(800, 292, style=0, noise=0.0)]
    x_list, y_list = heldout_windows(torch.cat([torch.tensor(encode(s)) for s in _lists(150, 293)]), 16)
    x_text, y_text = heldout_windows(stream(150, 294), 16)
    x_val, y_val = torch.cat([x_text, x_list]), torch.cat([y_text, y_list])
    g = torch.Generator().manual_seed(29)
    optimizer = configure_optimizer(model, lr=2e-3)
    model.train()

    def step(i):
        if not bad:
            optimizer.zero_grad(set_to_none=True)
        for data in sources:
            if bad:
                optimizer.zero_grad(set_to_none=True)
            x, _ = sample_windows(data, 8, 16, g)
            loss = model(input_ids=x, labels=x).loss / len(sources)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": hf_stream_probe(model, x_val, y_val)}


def _lists(n, seed):
    """Enumerations: four places in cyclic order, then what does what."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        k = rng.randrange(8)
        rows.append(["what", "is", "near"] + [PLACE[(k + j) % 8] for j in range(4)] + ["?", VERB[k], "now"])
    return rows


def _clip_before_unscale(bad):
    torch.manual_seed(30)
    model = GPT2LMHeadModel(gpt2_config())
    data = stream(2000, 300)
    x_val, y_val = heldout_windows(stream(150, 301), 20)
    g = torch.Generator().manual_seed(30)
    optimizer = configure_optimizer(model, lr=2e-3, weight_decay=0.01, eps=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
    model.train()

    def step(i):
        x, _ = sample_windows(data, 8, 20, g)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=x, labels=x).loss
        scaler.scale(loss).backward()
        if not bad:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": hf_stream_probe(model, x_val, y_val)}


def _bf16_weights_lose_small_updates(bad):
    torch.manual_seed(31)
    model = LlamaForCausalLM(llama_config())
    pretrain_stream(model, seed=31, style=0)
    if bad:
        model = model.to(torch.bfloat16)
    data = stream(1500, 310, style=2)
    x_val, y_val = heldout_windows(stream(150, 311, style=2), 20)
    g = torch.Generator().manual_seed(31)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    model.train()

    def step(i):
        x, _ = sample_windows(data, 16, 20, g)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not bad):
            loss = model(input_ids=x, labels=x).loss
        apply_update(model, optimizer, loss)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": hf_stream_probe(model, x_val, y_val)}


class TiedGPT(nn.Module):
    def __init__(self, config, init_embeddings):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=0.02)
                if m.bias is not None:
                    nn.init.zeros_(m.bias)
            elif isinstance(m, nn.Embedding) and init_embeddings:
                nn.init.normal_(m.weight, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x)), None


def _tied_head_unit_variance_embedding(bad):
    torch.manual_seed(32)
    model = TiedGPT(GPTConfig(n_embd=96), init_embeddings=not bad)
    data = stream(2000, 320)
    x_val, y_val = heldout_windows(stream(150, 321), 20)
    g = torch.Generator().manual_seed(32)
    optimizer = configure_optimizer(model, lr=1e-3)
    model.train()

    def step(i):
        x, y = sample_windows(data, 16, 20, g)
        apply_update(model, optimizer, lm_nll(model(x)[0], y))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": gpt_probe(model, x_val, y_val)}


def _schedule_counts_one_epoch(bad):
    torch.manual_seed(33)
    model = GPT2LMHeadModel(gpt2_config())
    rng = random.Random(330)
    loader = loader_of([encode(sentence(rng) + sentence(rng)) for _ in range(256)], 16, torch.tensor, 33)
    epochs = 20
    batches = cycle(loader)
    x_val, y_val = heldout_windows(stream(150, 331), 20)
    optimizer = configure_optimizer(model, lr=3e-3)
    total = len(loader) if bad else epochs * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=total)
    model.train()

    def step(i):
        x = next(batches)
        apply_update(model, optimizer, model(input_ids=x, labels=x).loss)
        scheduler.step()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": hf_stream_probe(model, x_val, y_val)}


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, 1)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x, hidden=None):
        output, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(output), hidden


def _clip_gets_consumed_generator(bad):
    torch.manual_seed(34)
    model = RNNModel(V, 64, 64)

    def batchify(data, bsz):
        n = data.size(0) // bsz
        return data[:n * bsz].view(bsz, n).t().contiguous()

    data = batchify(stream(2000, 340), 16)
    val = batchify(stream(200, 341), 16)
    params = filter(lambda p: p.requires_grad, model.parameters())
    if not bad:
        params = list(params)
    optimizer = torch.optim.SGD(params, lr=20.0)
    bptt = 20
    state = {"hidden": None, "at": 0}
    model.train()

    def step(i):
        if state["at"] + bptt + 1 > data.size(0):
            state["hidden"], state["at"] = None, 0
        at = state["at"]
        x, y = data[at:at + bptt], data[at + 1:at + bptt + 1]
        if state["hidden"] is not None:
            state["hidden"] = tuple(h.detach() for h in state["hidden"])
        optimizer.zero_grad(set_to_none=True)
        logits, state["hidden"] = model(x, state["hidden"])
        lm_nll(logits, y).backward()
        nn.utils.clip_grad_norm_(params, 0.25)
        optimizer.step()
        state["at"] = at + bptt

    def probe():
        with evaluating(model):
            return lm_nll(model(val[:-1])[0], val[1:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


class RotaryAttention(nn.Module):
    def __init__(self, dim, n_head, max_len, rotate_keys):
        super().__init__()
        self.n_head = n_head
        self.rotate_keys = rotate_keys
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        head = dim // n_head
        freq = 1.0 / (100.0 ** (torch.arange(0, head, 2).float() / head))
        angle = torch.outer(torch.arange(max_len).float(), freq)
        angle = torch.cat([angle, angle], dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (w(x).view(B, T, self.n_head, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        cos, sin = self.cos[:T], self.sin[:T]
        q = q * cos + rotate_half(q) * sin
        if self.rotate_keys:
            k = k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class RotaryBlock(nn.Module):
    def __init__(self, dim, n_head, max_len, rotate_keys):
        super().__init__()
        self.norm1 = RMSNorm(dim)
        self.attn = RotaryAttention(dim, n_head, max_len, rotate_keys)
        self.norm2 = RMSNorm(dim)
        self.ffn = SwiGLU(dim, 2 * dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class RotaryLM(nn.Module):
    def __init__(self, vocab, dim=64, n_layer=2, n_head=4, max_len=32, rotate_keys=True):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([RotaryBlock(dim, n_head, max_len, rotate_keys) for _ in range(n_layer)])
        self.norm = RMSNorm(dim)
        self.out = nn.Linear(dim, vocab, bias=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)

    def forward(self, idx):
        x = self.tok(idx)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x)), None


def _rotary_only_on_queries(bad):
    torch.manual_seed(35)
    model = RotaryLM(16, rotate_keys=not bad)

    def echoes(n, generator):
        motif = torch.randint(16, (n, 6), generator=generator)
        row = motif.repeat(1, 5)[:, :25]
        return row[:, :-1], row[:, 1:]

    g = torch.Generator().manual_seed(35)
    x_val, y_val = echoes(128, torch.Generator().manual_seed(350))
    y_val = y_val.clone()
    y_val[:, :5] = -100
    optimizer = configure_optimizer(model, lr=3e-3, weight_decay=0.01)
    model.train()

    def step(i):
        x, y = echoes(16, g)
        apply_update(model, optimizer, lm_nll(model(x)[0], y))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": gpt_probe(model, x_val, y_val)}


def _left_padding_without_mask(bad):
    torch.manual_seed(36)
    model = GPT2LMHeadModel(gpt2_config())
    width = 36

    def collate(pairs):
        ids, mask, labels = [], [], []
        for q, r in pairs:
            row = [BOS] + q + r + [EOS]
            fill = width - len(row)
            ids.append([PAD] * fill + row)
            mask.append([0] * fill + [1] * len(row))
            labels.append([-100] * (fill + len(q) + 1) + r + [EOS])
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}

    batches = cycle(loader_of(questions(1000, 360), 16, collate, 36))
    heldout = collate_qa(questions(128, 361, "test"))
    optimizer = configure_optimizer(model, lr=2e-3, weight_decay=0.01)
    model.train()

    def step(i):
        batch = next(batches)
        if bad:
            loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        else:
            position_ids = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            loss = model(position_ids=position_ids, **batch).loss
        apply_update(model, optimizer, loss)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": hf_qa_probe(model, heldout)}


def lora_classifier_frozen_score_bad():
    return _lora_classifier_frozen_score(True)


def lora_classifier_frozen_score_good():
    return _lora_classifier_frozen_score(False)


def adapters_in_python_list_bad():
    return _adapters_in_python_list(True)


def adapters_in_python_list_good():
    return _adapters_in_python_list(False)


def gradual_unfreeze_optimizer_groups_bad():
    return _gradual_unfreeze_optimizer_groups(True)


def gradual_unfreeze_optimizer_groups_good():
    return _gradual_unfreeze_optimizer_groups(False)


def second_adapter_not_activated_bad():
    return _second_adapter_not_activated(True)


def second_adapter_not_activated_good():
    return _second_adapter_not_activated(False)


def labels_shifted_twice_bad():
    return _labels_shifted_twice(True)


def labels_shifted_twice_good():
    return _labels_shifted_twice(False)


def eos_masked_with_padding_bad():
    return _eos_masked_with_padding(True)


def eos_masked_with_padding_good():
    return _eos_masked_with_padding(False)


def mlm_labels_after_masking_bad():
    return _mlm_labels_after_masking(True)


def mlm_labels_after_masking_good():
    return _mlm_labels_after_masking(False)


def t5_decoder_sees_targets_bad():
    return _t5_decoder_sees_targets(True)


def t5_decoder_sees_targets_good():
    return _t5_decoder_sees_targets(False)


def distill_teacher_trained_along_bad():
    return _distill_teacher_trained_along(True)


def distill_teacher_trained_along_good():
    return _distill_teacher_trained_along(False)


def distill_teacher_dropout_active_bad():
    return _distill_teacher_dropout_active(True)


def distill_teacher_dropout_active_good():
    return _distill_teacher_dropout_active(False)


def dpo_reference_shares_policy_bad():
    return _dpo_reference_shares_policy(True)


def dpo_reference_shares_policy_good():
    return _dpo_reference_shares_policy(False)


def dpo_cached_reference_order_bad():
    return _dpo_cached_reference_order(True)


def dpo_cached_reference_order_good():
    return _dpo_cached_reference_order(False)


def reward_pools_first_token_bad():
    return _reward_pools_first_token(True)


def reward_pools_first_token_good():
    return _reward_pools_first_token(False)


def moe_balance_from_counts_bad():
    return _moe_balance_from_counts(True)


def moe_balance_from_counts_good():
    return _moe_balance_from_counts(False)


def qat_round_has_no_gradient_bad():
    return _qat_round_has_no_gradient(True)


def qat_round_has_no_gradient_good():
    return _qat_round_has_no_gradient(False)


def checkpoint_reentrant_frozen_embeddings_bad():
    return _checkpoint_reentrant_frozen_embeddings(True)


def checkpoint_reentrant_frozen_embeddings_good():
    return _checkpoint_reentrant_frozen_embeddings(False)


def accumulation_cleared_every_microbatch_bad():
    return _accumulation_cleared_every_microbatch(True)


def accumulation_cleared_every_microbatch_good():
    return _accumulation_cleared_every_microbatch(False)


def clip_before_unscale_bad():
    return _clip_before_unscale(True)


def clip_before_unscale_good():
    return _clip_before_unscale(False)


def bf16_weights_lose_small_updates_bad():
    return _bf16_weights_lose_small_updates(True)


def bf16_weights_lose_small_updates_good():
    return _bf16_weights_lose_small_updates(False)


def tied_head_unit_variance_embedding_bad():
    return _tied_head_unit_variance_embedding(True)


def tied_head_unit_variance_embedding_good():
    return _tied_head_unit_variance_embedding(False)


def schedule_counts_one_epoch_bad():
    return _schedule_counts_one_epoch(True)


def schedule_counts_one_epoch_good():
    return _schedule_counts_one_epoch(False)


def clip_gets_consumed_generator_bad():
    return _clip_gets_consumed_generator(True)


def clip_gets_consumed_generator_good():
    return _clip_gets_consumed_generator(False)


def rotary_only_on_queries_bad():
    return _rotary_only_on_queries(True)


def rotary_only_on_queries_good():
    return _rotary_only_on_queries(False)


def left_padding_without_mask_bad():
    return _left_padding_without_mask(True)


def left_padding_without_mask_good():
    return _left_padding_without_mask(False)


CASES = [
    {"name": "lora_classifier_frozen_score",
     "what": "LoraConfig without task_type=\"SEQ_CLS\" (and without modules_to_save) leaves the newly initialised score head of GPT2ForSequenceClassification frozen at its random values; only the LoRA factors learn and the classifier stays poor."},
    {"name": "adapters_in_python_list",
     "what": "Bottleneck adapters are kept in a plain Python list instead of nn.ModuleList, so they are not among model.parameters(), never reach the optimizer and stay at identity; only the final norm adapts."},
    {"name": "gradual_unfreeze_optimizer_groups",
     "what": "The optimizer is built from the parameters trainable at the start; blocks unfrozen later by requires_grad_(True) are never added to it, so they get gradients but are never updated."},
    {"name": "second_adapter_not_activated",
     "what": "A second LoRA adapter is added with add_adapter but set_adapter is not called, so training goes on in the first adapter (which is overwritten) and the new one stays untrained."},
    {"name": "labels_shifted_twice",
     "what": "Labels already shifted by one are handed to a transformers causal LM, which shifts once more: the model learns to predict the token after the next."},
    {"name": "eos_masked_with_padding",
     "what": "pad token = eos token and labels equal to the pad id are set to -100, so the true end-of-sequence token is masked as well and the model never learns to stop."},
    {"name": "mlm_labels_after_masking",
     "what": "MLM labels are taken from input_ids after the in-place masking, so every label is the mask token itself; the loss collapses while the model learns nothing about words."},
    {"name": "t5_decoder_sees_targets",
     "what": "The unshifted targets are passed as decoder_input_ids together with labels, so the T5 decoder sees at each position the token it has to predict and learns to copy it."},
    {"name": "distill_teacher_trained_along",
     "what": "The optimizer takes the parameters of the whole distiller and the teacher runs with gradients, so the KL loss moves the teacher towards the untrained student and its knowledge is destroyed."},
    {"name": "distill_teacher_dropout_active",
     "what": "Calling train() on the container puts the frozen teacher back in train mode, so its targets are computed with active dropout and the student learns a blurred teacher."},
    {"name": "dpo_reference_shares_policy",
     "what": "The DPO reference is the policy object itself rather than a frozen copy: the log-ratios are always zero, the loss stays at log 2 and nothing keeps the policy near its start."},
    {"name": "dpo_cached_reference_order",
     "what": "Reference log-probs precomputed in dataset order are looked up by batch position while the loader shuffles, so each pair gets the reference values of other pairs."},
    {"name": "reward_pools_first_token",
     "what": "The reward model on a causal backbone pools the first token's hidden state (BERT habit); that position sees nothing of the answer, chosen and rejected get the same reward and no gradient arises."},
    {"name": "moe_balance_from_counts",
     "what": "The Switch balance loss uses the hard token counts in both factors instead of counts times mean router probability, so it has no gradient and the experts stay unbalanced."},
    {"name": "qat_round_has_no_gradient",
     "what": "Fake quantisation rounds the weights without a straight-through estimator, so all quantised linear layers get zero gradient and keep their initial values (but for weight decay)."},
    {"name": "checkpoint_reentrant_frozen_embeddings",
     "what": "Reentrant gradient checkpointing with frozen embeddings: the checkpointed block's input does not require grad, so the graph of the blocks is cut and they get no gradients; only the final norm learns."},
    {"name": "accumulation_cleared_every_microbatch",
     "what": "zero_grad is called inside the micro-batch loop of gradient accumulation, so only the last micro-batch (the last data source) counts in the update; the other sources are never learned."},
    {"name": "clip_before_unscale",
     "what": "With a GradScaler the gradients are clipped before unscale_, so the scaled gradients are cut to norm 1 and after unscaling are about 1e-5, near Adam's eps; training crawls."},
    {"name": "bf16_weights_lose_small_updates",
     "what": "The weights themselves are bf16 and are fine-tuned at a small rate, so most updates are rounded away (no fp32 master weights); adaptation is much slower."},
    {"name": "tied_head_unit_variance_embedding",
     "what": "The head is tied to an embedding left at nn.Embedding's default N(0,1) init, so the initial logits are far too large (loss about 65 instead of 3.9) and training starts from there."},
    {"name": "schedule_counts_one_epoch",
     "what": "The linear decay schedule is given the steps of one epoch as its total, so the learning rate is zero from the second of twenty epochs on."},
    {"name": "clip_gets_consumed_generator",
     "what": "The parameters are a filter object consumed by the optimizer's constructor; clip_grad_norm_ then gets an empty iterator and never clips, at an SGD rate that relies on clipping."},
    {"name": "rotary_only_on_queries",
     "what": "Rotary embedding is applied to the queries but not to the keys, so attention scores do not depend on the relative distance and the model cannot look back by a fixed lag."},
    {"name": "left_padding_without_mask",
     "what": "Left-padded batches are trained without attention_mask and position_ids, so the model attends to padding and learns absolute positions that it never meets on unpadded prompts."},
]
