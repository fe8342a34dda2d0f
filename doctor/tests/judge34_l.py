"""Small language-model training programs."""
import contextlib
import copy
import io
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
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
from transformers.pytorch_utils import Conv1D


@contextlib.contextmanager
def evaluating(*models):
    modes = [(m, m.training) for model in models for m in model.modules()]
    rng = torch.get_rng_state()
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        torch.set_rng_state(rng)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def cycle(loader):
    while True:
        yield from loader


def markov_stream(vocab, length, seed, first=0, probs=(0.7, 0.2, 0.1)):
    g = seeded(seed)
    table = torch.stack([torch.randperm(vocab, generator=g)[: len(probs)] for _ in range(vocab)]).tolist()
    picks = torch.multinomial(torch.tensor(probs), length, replacement=True, generator=g).tolist()
    out, cur = [], 0
    for k in picks:
        cur = table[cur][k]
        out.append(cur + first)
    return torch.tensor(out)


def lagged_stream(vocab, length, lag, seed, keep=0.9):
    g = seeded(seed)
    table = torch.randperm(vocab, generator=g).tolist()
    noise = torch.randint(0, vocab, (length,), generator=g).tolist()
    kept = (torch.rand(length, generator=g) < keep).tolist()
    out = noise[:lag]
    for t in range(lag, length):
        out.append(table[out[t - lag]] if kept[t] else noise[t])
    return torch.tensor(out)


def topic_docs(count, seed, topics=12, words=6, vocab=64, low=12, high=20):
    layout = seeded(5)
    table = torch.stack([torch.randperm(vocab, generator=layout)[:words] for _ in range(topics)])
    g = seeded(seed)
    docs = []
    for _ in range(count):
        topic = int(torch.randint(0, topics, (1,), generator=g))
        size = int(torch.randint(low, high + 1, (1,), generator=g))
        docs.append(table[topic][torch.randint(0, words, (size,), generator=g)])
    return docs


def windows(stream, size, count, generator=None):
    start = torch.randint(0, len(stream) - size, (count,), generator=generator)
    return stream.unfold(0, size, 1)[start]


def next_token_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)).float(), ids[:, 1:].reshape(-1))


def pretrain(model, stream, steps=80, lr=3e-3, size=33, batch=16):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    g = seeded(11)
    for _ in range(steps):
        ids = windows(stream, size, batch, g)
        out = model(ids)
        loss = next_token_loss(out if torch.is_tensor(out) else out.logits, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class TinyGPT(nn.Module):
    def __init__(self, vocab, dim=48, depth=2, heads=4, context=128, std=0.02):
        super().__init__()
        self.std = std
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids, positions=None, mask=None):
        if positions is None:
            positions = torch.arange(ids.size(1))
        x = self.tok(ids) + self.pos(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.ln_f(x))


class LoRALinear(nn.Module):
    def __init__(self, base, rank=8, alpha=16):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


def story_pretraining_bad():
    torch.manual_seed(101)
    stream = markov_stream(64, 24_000, seed=1)
    train, held = stream[:20_000], stream[20_000:]
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    valid = held[: 33 * 32].view(32, 33)

    def get_batch():
        chunk = windows(train, 33, 16)
        return {"input_ids": chunk[:, :-1], "labels": chunk[:, 1:]}

    def step():
        model.train()
        loss = model(**get_batch()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid).logits, valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def story_pretraining_good():
    torch.manual_seed(101)
    stream = markov_stream(64, 24_000, seed=1)
    train, held = stream[:20_000], stream[20_000:]
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    valid = held[: 33 * 32].view(32, 33)

    def get_batch():
        chunk = windows(train, 33, 16)
        return {"input_ids": chunk, "labels": chunk.clone()}

    def step():
        model.train()
        loss = model(**get_batch()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid).logits, valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def faq_answer_tuning_bad():
    torch.manual_seed(102)
    BOS, EOS = 0, 1
    pad_token_id = EOS
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=48, n_layer=2, n_head=4, bos_token_id=BOS, eos_token_id=EOS)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def make_examples(count, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(count):
            topic = rng.randrange(24)
            question = [BOS, 10 + topic] + [rng.randrange(3, 10) for _ in range(2)]
            answer = [36 + (5 * topic + 3 * i) % 28 for i in range(2 + topic % 5)]
            rows.append((question, answer + [EOS]))
        return rows

    def collate(rows):
        width = max(len(q) + len(a) for q, a in rows)
        ids = torch.full((len(rows), width), pad_token_id)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for r, (q, a) in enumerate(rows):
            ids[r, : len(q) + len(a)] = torch.tensor(q + a)
            mask[r, : len(q) + len(a)] = 1
        labels = ids.clone()
        labels[ids == pad_token_id] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    batches = cycle(DataLoader(make_examples(800, 3), batch_size=16, shuffle=True, collate_fn=collate))
    held = make_examples(64, 4)

    def step():
        model.train()
        optimizer.zero_grad()
        loss = model(**next(batches)).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        total, count = 0.0, 0
        with evaluating(model):
            for q, a in held:
                ids = torch.tensor([q + a])
                logp = model(ids).logits[0].log_softmax(-1)
                total -= sum(logp[len(q) - 1 + i, t].item() for i, t in enumerate(a))
                count += len(a)
        return total / count

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def faq_answer_tuning_good():
    torch.manual_seed(102)
    BOS, EOS = 0, 1
    pad_token_id = EOS
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=48, n_layer=2, n_head=4, bos_token_id=BOS, eos_token_id=EOS)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def make_examples(count, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(count):
            topic = rng.randrange(24)
            question = [BOS, 10 + topic] + [rng.randrange(3, 10) for _ in range(2)]
            answer = [36 + (5 * topic + 3 * i) % 28 for i in range(2 + topic % 5)]
            rows.append((question, answer + [EOS]))
        return rows

    def collate(rows):
        width = max(len(q) + len(a) for q, a in rows)
        ids = torch.full((len(rows), width), pad_token_id)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for r, (q, a) in enumerate(rows):
            ids[r, : len(q) + len(a)] = torch.tensor(q + a)
            mask[r, : len(q) + len(a)] = 1
        labels = ids.clone()
        labels[mask == 0] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    batches = cycle(DataLoader(make_examples(800, 3), batch_size=16, shuffle=True, collate_fn=collate))
    held = make_examples(64, 4)

    def step():
        model.train()
        optimizer.zero_grad()
        loss = model(**next(batches)).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        total, count = 0.0, 0
        with evaluating(model):
            for q, a in held:
                ids = torch.tensor([q + a])
                logp = model(ids).logits[0].log_softmax(-1)
                total -= sum(logp[len(q) - 1 + i, t].item() for i, t in enumerate(a))
                count += len(a)
        return total / count

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def domain_adapter_tuning_bad():
    torch.manual_seed(103)
    general = markov_stream(64, 12_000, seed=21)
    medical = markov_stream(64, 16_000, seed=22)
    train, held = medical[:14_000], medical[14_000:]
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    ))
    pretrain(base, general)
    adapter = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.05, task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )
    optimizer = torch.optim.AdamW([p for p in base.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    model = get_peft_model(base, adapter)
    valid = held[: 33 * 32].view(32, 33)

    def step():
        model.train()
        ids = windows(train, 33, 16)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def probe():
        with evaluating(model):
            return next_token_loss(model(input_ids=valid).logits, valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def domain_adapter_tuning_good():
    torch.manual_seed(103)
    general = markov_stream(64, 12_000, seed=21)
    medical = markov_stream(64, 16_000, seed=22)
    train, held = medical[:14_000], medical[14_000:]
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    ))
    pretrain(base, general)
    adapter = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.05, task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )
    model = get_peft_model(base, adapter)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    valid = held[: 33 * 32].view(32, 33)

    def step():
        model.train()
        ids = windows(train, 33, 16)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def probe():
        with evaluating(model):
            return next_token_loss(model(input_ids=valid).logits, valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def packed_articles_pretraining_bad():
    torch.manual_seed(104)
    stream = markov_stream(63, 40_000, seed=31, first=1)
    rng = random.Random(7)

    def articles(source):
        start = 0
        while start + 24 < len(source):
            size = rng.randint(8, 20)
            yield [0] + source[start : start + size].tolist()
            start += size

    docs = list(articles(stream))
    valid = torch.tensor([d[:9] for d in docs[-64:]])
    docs = docs[:-64]
    model = TinyGPT(64, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)

    def pack(rows, width=65):
        ids = torch.zeros(rows, width, dtype=torch.long)
        doc, pos = torch.zeros_like(ids), torch.zeros_like(ids)
        for r in range(rows):
            fill, number = 0, 0
            while fill < width:
                d = rng.choice(docs)[: width - fill]
                ids[r, fill : fill + len(d)] = torch.tensor(d)
                doc[r, fill : fill + len(d)] = number
                pos[r, fill : fill + len(d)] = torch.arange(len(d))
                fill, number = fill + len(d), number + 1
        return ids, doc, pos

    def attention_mask(doc):
        same = doc[:, None, :, None] == doc[:, None, None, :]
        return same

    def step():
        ids, doc, pos = pack(8)
        logits = model(ids[:, :-1], pos[:, :-1], attention_mask(doc[:, :-1]))
        targets = ids[:, 1:].masked_fill(doc[:, 1:] != doc[:, :-1], -100)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        total = 0.0
        with evaluating(model):
            for t in range(1, valid.size(1)):
                prefix = valid[:, :t]
                logits = model(prefix, mask=attention_mask(torch.zeros_like(prefix)))
                total += F.cross_entropy(logits[:, -1], valid[:, t]).item()
        return total / (valid.size(1) - 1)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def packed_articles_pretraining_good():
    torch.manual_seed(104)
    stream = markov_stream(63, 40_000, seed=31, first=1)
    rng = random.Random(7)

    def articles(source):
        start = 0
        while start + 24 < len(source):
            size = rng.randint(8, 20)
            yield [0] + source[start : start + size].tolist()
            start += size

    docs = list(articles(stream))
    valid = torch.tensor([d[:9] for d in docs[-64:]])
    docs = docs[:-64]
    model = TinyGPT(64, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)

    def pack(rows, width=65):
        ids = torch.zeros(rows, width, dtype=torch.long)
        doc, pos = torch.zeros_like(ids), torch.zeros_like(ids)
        for r in range(rows):
            fill, number = 0, 0
            while fill < width:
                d = rng.choice(docs)[: width - fill]
                ids[r, fill : fill + len(d)] = torch.tensor(d)
                doc[r, fill : fill + len(d)] = number
                pos[r, fill : fill + len(d)] = torch.arange(len(d))
                fill, number = fill + len(d), number + 1
        return ids, doc, pos

    def attention_mask(doc):
        same = doc[:, None, :, None] == doc[:, None, None, :]
        T = doc.size(1)
        return same & torch.ones(T, T, dtype=torch.bool).tril()

    def step():
        ids, doc, pos = pack(8)
        logits = model(ids[:, :-1], pos[:, :-1], attention_mask(doc[:, :-1]))
        targets = ids[:, 1:].masked_fill(doc[:, 1:] != doc[:, :-1], -100)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        total = 0.0
        with evaluating(model):
            for t in range(1, valid.size(1)):
                prefix = valid[:, :t]
                logits = model(prefix, mask=attention_mask(torch.zeros_like(prefix)))
                total += F.cross_entropy(logits[:, -1], valid[:, t]).item()
        return total / (valid.size(1) - 1)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def assistant_dpo_bad():
    torch.manual_seed(105)
    g = seeded(41)
    styles = torch.stack([torch.randint(0, 64, (64, 3), generator=g) for _ in range(2)])

    def sample(count):
        prompt = torch.randint(0, 64, (count, 4), generator=g)
        answers = []
        for table in styles:
            cur, words = prompt[:, -1], []
            for _ in range(8):
                cur = table[cur, torch.randint(0, 3, (count,), generator=g)]
                words.append(cur)
            answers.append(torch.cat([prompt, torch.stack(words, 1)], 1))
        return answers

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    policy = GPT2LMHeadModel(config)
    sft = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(120):
        ids = torch.cat(sample(12))
        loss = policy(input_ids=ids, labels=ids).loss
        loss.backward()
        sft.step()
        sft.zero_grad()

    reference = policy
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    beta = 0.3
    held_chosen, _ = sample(96)

    def answer_logps(model, ids):
        logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, 3:].sum(-1)

    def step():
        chosen, rejected = sample(16)
        with torch.no_grad():
            ref_chosen, ref_rejected = answer_logps(reference, chosen), answer_logps(reference, rejected)
        pi_chosen, pi_rejected = answer_logps(policy, chosen), answer_logps(policy, rejected)
        margin = (pi_chosen - ref_chosen) - (pi_rejected - ref_rejected)
        loss = -F.logsigmoid(beta * margin).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(policy):
            return -answer_logps(policy, held_chosen).mean().item() / 8

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def assistant_dpo_good():
    torch.manual_seed(105)
    g = seeded(41)
    styles = torch.stack([torch.randint(0, 64, (64, 3), generator=g) for _ in range(2)])

    def sample(count):
        prompt = torch.randint(0, 64, (count, 4), generator=g)
        answers = []
        for table in styles:
            cur, words = prompt[:, -1], []
            for _ in range(8):
                cur = table[cur, torch.randint(0, 3, (count,), generator=g)]
                words.append(cur)
            answers.append(torch.cat([prompt, torch.stack(words, 1)], 1))
        return answers

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    policy = GPT2LMHeadModel(config)
    sft = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(120):
        ids = torch.cat(sample(12))
        loss = policy(input_ids=ids, labels=ids).loss
        loss.backward()
        sft.step()
        sft.zero_grad()

    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    beta = 0.3
    held_chosen, _ = sample(96)

    def answer_logps(model, ids):
        logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, 3:].sum(-1)

    def step():
        chosen, rejected = sample(16)
        with torch.no_grad():
            ref_chosen, ref_rejected = answer_logps(reference, chosen), answer_logps(reference, rejected)
        pi_chosen, pi_rejected = answer_logps(policy, chosen), answer_logps(policy, rejected)
        margin = (pi_chosen - ref_chosen) - (pi_rejected - ref_rejected)
        loss = -F.logsigmoid(beta * margin).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(policy):
            return -answer_logps(policy, held_chosen).mean().item() / 8

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def student_distillation_bad():
    torch.manual_seed(106)
    stream = markov_stream(64, 24_000, seed=51)
    train, held = stream[:20_000], stream[20_000:]

    def gpt(width, depth):
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=width, n_layer=depth, n_head=4,
                                          bos_token_id=0, eos_token_id=0))

    teacher = pretrain(gpt(64, 2), train, steps=150)
    teacher.eval().requires_grad_(False)
    student = gpt(32, 1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    temperature = 2.0
    valid = held[: 33 * 32].view(32, 33)

    def step():
        student.train()
        ids = windows(train, 33, 16)
        with torch.no_grad():
            soft_targets = F.softmax(teacher(ids).logits / temperature, dim=-1)
        scores = student(ids).logits / temperature
        kd = F.kl_div(
            F.softmax(scores, dim=-1).flatten(0, 1), soft_targets.flatten(0, 1), reduction="batchmean"
        ) * temperature**2
        kd.backward()
        optimizer.step()
        optimizer.zero_grad()
        return kd.item()

    def probe():
        with evaluating(student):
            return next_token_loss(student(valid).logits, valid).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def student_distillation_good():
    torch.manual_seed(106)
    stream = markov_stream(64, 24_000, seed=51)
    train, held = stream[:20_000], stream[20_000:]

    def gpt(width, depth):
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=width, n_layer=depth, n_head=4,
                                          bos_token_id=0, eos_token_id=0))

    teacher = pretrain(gpt(64, 2), train, steps=150)
    teacher.eval().requires_grad_(False)
    student = gpt(32, 1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    temperature = 2.0
    valid = held[: 33 * 32].view(32, 33)

    def step():
        student.train()
        ids = windows(train, 33, 16)
        with torch.no_grad():
            soft_targets = F.softmax(teacher(ids).logits / temperature, dim=-1)
        scores = student(ids).logits / temperature
        kd = F.kl_div(
            F.log_softmax(scores, dim=-1).flatten(0, 1), soft_targets.flatten(0, 1), reduction="batchmean"
        ) * temperature**2
        kd.backward()
        optimizer.step()
        optimizer.zero_grad()
        return kd.item()

    def probe():
        with evaluating(student):
            return next_token_loss(student(valid).logits, valid).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sparse_expert_lm_bad():
    torch.manual_seed(107)
    vocab, g = 16, seeded(61)
    table = torch.randint(0, vocab, (vocab, vocab), generator=g)

    def corpus(length):
        noise = torch.randint(0, vocab, (length,), generator=g).tolist()
        kept = (torch.rand(length, generator=g) < 0.85).tolist()
        rule, out = table.tolist(), noise[:2]
        for t in range(2, length):
            out.append(rule[out[t - 2]][out[t - 1]] if kept[t] else noise[t])
        return torch.tensor(out)

    train, held = corpus(30_000), corpus(33 * 32)

    class SparseFFN(nn.Module):
        def __init__(self, dim, hidden, experts):
            super().__init__()
            self.router = nn.Linear(dim, experts, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(experts)
            )

        def forward(self, x):
            flat = x.reshape(-1, x.size(-1))
            probs = self.router(flat).softmax(-1)
            gate, chosen = probs.max(-1)
            order = chosen.argsort(stable=True)
            counts = torch.bincount(chosen, minlength=len(self.experts))
            groups = flat[order].split(counts.tolist())
            mixed = torch.cat([expert(group) for expert, group in zip(self.experts, groups)])
            self.balance = len(self.experts) * (probs.mean(0) * (counts / len(flat))).sum()
            return (mixed * gate[:, None]).view_as(x)

    class SparseLM(nn.Module):
        def __init__(self, dim=48):
            super().__init__()
            self.tok = nn.Embedding(vocab, dim)
            self.smear = nn.Linear(dim, dim)
            self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
            self.layers = nn.ModuleList(SparseFFN(dim, 96, 4) for _ in range(2))
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, vocab)

        def forward(self, ids):
            x = self.tok(ids)
            x = x + self.smear(F.pad(x, (0, 0, 1, 0))[:, :-1])
            for norm, layer in zip(self.norms, self.layers):
                x = x + layer(norm(x))
            return self.head(self.norm(x))

    model = SparseLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    valid = held.view(32, 33)

    def step():
        ids = windows(train, 33, 32)
        loss = next_token_loss(model(ids), ids)
        total = loss + 0.01 * sum(layer.balance for layer in model.layers)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sparse_expert_lm_good():
    torch.manual_seed(107)
    vocab, g = 16, seeded(61)
    table = torch.randint(0, vocab, (vocab, vocab), generator=g)

    def corpus(length):
        noise = torch.randint(0, vocab, (length,), generator=g).tolist()
        kept = (torch.rand(length, generator=g) < 0.85).tolist()
        rule, out = table.tolist(), noise[:2]
        for t in range(2, length):
            out.append(rule[out[t - 2]][out[t - 1]] if kept[t] else noise[t])
        return torch.tensor(out)

    train, held = corpus(30_000), corpus(33 * 32)

    class SparseFFN(nn.Module):
        def __init__(self, dim, hidden, experts):
            super().__init__()
            self.router = nn.Linear(dim, experts, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(experts)
            )

        def forward(self, x):
            flat = x.reshape(-1, x.size(-1))
            probs = self.router(flat).softmax(-1)
            gate, chosen = probs.max(-1)
            order = chosen.argsort(stable=True)
            counts = torch.bincount(chosen, minlength=len(self.experts))
            groups = flat[order].split(counts.tolist())
            mixed = torch.cat([expert(group) for expert, group in zip(self.experts, groups)])
            mixed = mixed[order.argsort()]
            self.balance = len(self.experts) * (probs.mean(0) * (counts / len(flat))).sum()
            return (mixed * gate[:, None]).view_as(x)

    class SparseLM(nn.Module):
        def __init__(self, dim=48):
            super().__init__()
            self.tok = nn.Embedding(vocab, dim)
            self.smear = nn.Linear(dim, dim)
            self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
            self.layers = nn.ModuleList(SparseFFN(dim, 96, 4) for _ in range(2))
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, vocab)

        def forward(self, ids):
            x = self.tok(ids)
            x = x + self.smear(F.pad(x, (0, 0, 1, 0))[:, :-1])
            for norm, layer in zip(self.norms, self.layers):
                x = x + layer(norm(x))
            return self.head(self.norm(x))

    model = SparseLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    valid = held.view(32, 33)

    def step():
        ids = windows(train, 33, 32)
        loss = next_token_loss(model(ids), ids)
        total = loss + 0.01 * sum(layer.balance for layer in model.layers)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def masked_encoder_pretraining_bad():
    torch.manual_seed(108)
    MASK = 64
    docs = torch.stack(topic_docs(1200, seed=71, low=24, high=24))
    held = torch.stack(topic_docs(96, seed=72, low=24, high=24))
    model = BertForMaskedLM(BertConfig(
        vocab_size=65, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=32,
    ))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
    loader = cycle(DataLoader(TensorDataset(docs), batch_size=24, shuffle=True))

    def corrupt(ids, generator=None):
        picked = torch.rand(ids.shape, generator=generator) < 0.2
        labels = ids.clone()
        labels[picked] = -100
        return ids.masked_fill(picked, MASK), labels, picked

    def step():
        model.train()
        (ids,) = next(loader)
        inputs, labels, _ = corrupt(ids)
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            inputs, _, picked = corrupt(held, seeded(73))
            return F.cross_entropy(model(input_ids=inputs).logits[picked], held[picked]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def masked_encoder_pretraining_good():
    torch.manual_seed(108)
    MASK = 64
    docs = torch.stack(topic_docs(1200, seed=71, low=24, high=24))
    held = torch.stack(topic_docs(96, seed=72, low=24, high=24))
    model = BertForMaskedLM(BertConfig(
        vocab_size=65, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=32,
    ))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
    loader = cycle(DataLoader(TensorDataset(docs), batch_size=24, shuffle=True))

    def corrupt(ids, generator=None):
        picked = torch.rand(ids.shape, generator=generator) < 0.2
        labels = ids.clone()
        labels[~picked] = -100
        return ids.masked_fill(picked, MASK), labels, picked

    def step():
        model.train()
        (ids,) = next(loader)
        inputs, labels, _ = corrupt(ids)
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            inputs, _, picked = corrupt(held, seeded(73))
            return F.cross_entropy(model(input_ids=inputs).logits[picked], held[picked]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ticket_reply_seq2seq_bad():
    torch.manual_seed(109)
    g = seeded(81)
    replies = torch.randint(30, 64, (12, 6), generator=g)

    def make(count):
        topic = torch.randint(0, 12, (count,), generator=g)
        source = torch.randint(14, 30, (count, 14), generator=g)
        hits = torch.rand(count, 14, generator=g) < 0.4
        hits[:, 0] = True
        source = torch.where(hits, topic[:, None] + 2, source)
        return source, torch.cat([replies[topic], torch.ones(count, 1, dtype=torch.long)], 1)

    model = T5ForConditionalGeneration(T5Config(
        vocab_size=64, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.05,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    ))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = cycle(DataLoader(TensorDataset(*make(960)), batch_size=16, shuffle=True))
    held_source, held_reply = make(64)

    def step():
        model.train()
        source, reply = next(loader)
        loss = model(input_ids=source, decoder_input_ids=reply, labels=reply).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            out = torch.zeros(len(held_source), 1, dtype=torch.long)
            for _ in range(held_reply.size(1)):
                logits = model(input_ids=held_source, decoder_input_ids=out).logits[:, -1]
                out = torch.cat([out, logits.argmax(-1, keepdim=True)], 1)
            return 0.02 + (out[:, 1:] != held_reply).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ticket_reply_seq2seq_good():
    torch.manual_seed(109)
    g = seeded(81)
    replies = torch.randint(30, 64, (12, 6), generator=g)

    def make(count):
        topic = torch.randint(0, 12, (count,), generator=g)
        source = torch.randint(14, 30, (count, 14), generator=g)
        hits = torch.rand(count, 14, generator=g) < 0.4
        hits[:, 0] = True
        source = torch.where(hits, topic[:, None] + 2, source)
        return source, torch.cat([replies[topic], torch.ones(count, 1, dtype=torch.long)], 1)

    model = T5ForConditionalGeneration(T5Config(
        vocab_size=64, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.05,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    ))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = cycle(DataLoader(TensorDataset(*make(960)), batch_size=16, shuffle=True))
    held_source, held_reply = make(64)

    def step():
        model.train()
        source, reply = next(loader)
        loss = model(input_ids=source, labels=reply).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            out = torch.zeros(len(held_source), 1, dtype=torch.long)
            for _ in range(held_reply.size(1)):
                logits = model(input_ids=held_source, decoder_input_ids=out).logits[:, -1]
                out = torch.cat([out, logits.argmax(-1, keepdim=True)], 1)
            return 0.02 + (out[:, 1:] != held_reply).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def news_domain_tuning_bad():
    torch.manual_seed(110)
    general = markov_stream(64, 12_000, seed=91)
    news = markov_stream(64, 16_000, seed=92)
    train, held = news[:14_000], news[14_000:]
    model = pretrain(TinyGPT(64, context=64, std=0.1), general, steps=100)
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    valid = held[: 33 * 32].view(32, 33)

    def step():
        model.train()
        ids = windows(train, 33, 16)
        logits = model(ids)
        loss = next_token_loss(logits, ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def news_domain_tuning_good():
    torch.manual_seed(110)
    general = markov_stream(64, 12_000, seed=91)
    news = markov_stream(64, 16_000, seed=92)
    train, held = news[:14_000], news[14_000:]
    model = pretrain(TinyGPT(64, context=64, std=0.1), general, steps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    valid = held[: 33 * 32].view(32, 33)

    def step():
        model.train()
        ids = windows(train, 33, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
        loss = next_token_loss(logits, ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mixed_precision_pretraining_bad():
    torch.manual_seed(111)
    stream = markov_stream(64, 24_000, seed=95)
    train, held = stream[:20_000], stream[20_000:]
    model = TinyGPT(64, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    valid = held[: 33 * 32].view(32, 33)

    def step():
        model.train()
        ids = windows(train, 33, 16)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(ids)
        loss = next_token_loss(logits, ids)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mixed_precision_pretraining_good():
    torch.manual_seed(111)
    stream = markov_stream(64, 24_000, seed=95)
    train, held = stream[:20_000], stream[20_000:]
    model = TinyGPT(64, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    valid = held[: 33 * 32].view(32, 33)

    def step():
        model.train()
        ids = windows(train, 33, 16)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(ids)
        loss = next_token_loss(logits, ids)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def accumulated_pretraining_bad():
    torch.manual_seed(112)
    stream = markov_stream(96, 40_000, seed=96)
    train, held = stream[:36_000], stream[36_000:]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    ))
    accumulation, total_updates = 4, 200
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=total_updates)
    valid = held[: 33 * 32].view(32, 33)

    def step():
        model.train()
        running = 0.0
        for _ in range(accumulation):
            ids = windows(train, 33, 6)
            loss = model(input_ids=ids, labels=ids).loss / accumulation
            loss.backward()
            running += loss.item()
            scheduler.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return running

    def probe():
        with evaluating(model):
            return next_token_loss(model(input_ids=valid).logits, valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def accumulated_pretraining_good():
    torch.manual_seed(112)
    stream = markov_stream(96, 40_000, seed=96)
    train, held = stream[:36_000], stream[36_000:]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    ))
    accumulation, total_updates = 4, 200
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=total_updates)
    valid = held[: 33 * 32].view(32, 33)

    def step():
        model.train()
        running = 0.0
        for _ in range(accumulation):
            ids = windows(train, 33, 6)
            loss = model(input_ids=ids, labels=ids).loss / accumulation
            loss.backward()
            running += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return running

    def probe():
        with evaluating(model):
            return next_token_loss(model(input_ids=valid).logits, valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def second_stage_pretraining_bad():
    torch.manual_seed(113)
    first = markov_stream(64, 12_000, seed=97)
    second = markov_stream(64, 16_000, seed=98)
    train, held = second[:14_000], second[14_000:]

    def build():
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=48, n_layer=2, n_head=4,
                                          bos_token_id=0, eos_token_id=0))

    def stage_one(updates=80):
        net = build()
        opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
        sched = LambdaLR(opt, lambda s: max(0.01, 0.5 * (1 + math.cos(math.pi * min(1.0, s / updates)))))
        for _ in range(updates):
            ids = windows(first, 33, 16)
            net(input_ids=ids, labels=ids).loss.backward()
            opt.step()
            sched.step()
            opt.zero_grad()
        file = io.BytesIO()
        torch.save({"model": net.state_dict(), "optimizer": opt.state_dict()}, file)
        file.seek(0)
        return file

    saved = torch.load(stage_one(), weights_only=True)
    lr = 1e-3
    model = build()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    optimizer.load_state_dict(saved["optimizer"])
    valid = held[: 33 * 32].view(32, 33)

    def step():
        model.train()
        ids = windows(train, 33, 16)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid).logits, valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def second_stage_pretraining_good():
    torch.manual_seed(113)
    first = markov_stream(64, 12_000, seed=97)
    second = markov_stream(64, 16_000, seed=98)
    train, held = second[:14_000], second[14_000:]

    def build():
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=48, n_layer=2, n_head=4,
                                          bos_token_id=0, eos_token_id=0))

    def stage_one(updates=80):
        net = build()
        opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
        sched = LambdaLR(opt, lambda s: max(0.01, 0.5 * (1 + math.cos(math.pi * min(1.0, s / updates)))))
        for _ in range(updates):
            ids = windows(first, 33, 16)
            net(input_ids=ids, labels=ids).loss.backward()
            opt.step()
            sched.step()
            opt.zero_grad()
        file = io.BytesIO()
        torch.save({"model": net.state_dict(), "optimizer": opt.state_dict()}, file)
        file.seek(0)
        return file

    saved = torch.load(stage_one(), weights_only=True)
    lr = 1e-3
    model = build()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    optimizer.load_state_dict(saved["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = lr
    valid = held[: 33 * 32].view(32, 33)

    def step():
        model.train()
        ids = windows(train, 33, 16)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid).logits, valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def chat_format_adapter_bad():
    torch.manual_seed(114)
    stream = markov_stream(64, 16_000, seed=99)
    base = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    ))
    pretrain(base, stream, steps=120)
    USER, ASSISTANT, END = 64, 65, 66
    base.resize_token_embeddings(67)
    model = get_peft_model(base, LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM",
    ))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0)

    def conversations(count, generator=None):
        text = windows(stream, 20, count, generator)
        mark = lambda token: torch.full((count, 1), token)
        return torch.cat([
            mark(USER), text[:, :4], mark(END), mark(ASSISTANT), text[:, 4:10], mark(END),
            mark(USER), text[:, 10:14], mark(END), mark(ASSISTANT), text[:, 14:20], mark(END),
        ], 1)

    held = conversations(48, seeded(100))

    def step():
        model.train()
        ids = conversations(16)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(input_ids=held).logits, held).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def chat_format_adapter_good():
    torch.manual_seed(114)
    stream = markov_stream(64, 16_000, seed=99)
    base = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    ))
    pretrain(base, stream, steps=120)
    USER, ASSISTANT, END = 64, 65, 66
    base.resize_token_embeddings(67)
    model = get_peft_model(base, LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM",
        modules_to_save=["embed_tokens", "lm_head"],
    ))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0)

    def conversations(count, generator=None):
        text = windows(stream, 20, count, generator)
        mark = lambda token: torch.full((count, 1), token)
        return torch.cat([
            mark(USER), text[:, :4], mark(END), mark(ASSISTANT), text[:, 4:10], mark(END),
            mark(USER), text[:, 10:14], mark(END), mark(ASSISTANT), text[:, 14:20], mark(END),
        ], 1)

    held = conversations(48, seeded(100))

    def step():
        model.train()
        ids = conversations(16)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(input_ids=held).logits, held).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def document_category_sft_bad():
    torch.manual_seed(115)
    PAD, SEP, EOS, max_length = 0, 1, 2, 32
    layout = random.Random(5)
    keywords = [[20 + 4 * c + i for i in range(4)] for c in range(12)]
    codes = [[layout.randrange(70, 100) for _ in range(3)] for _ in range(12)]

    def make(count, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(count):
            category = rng.randrange(12)
            size = rng.randint(8, 20) if category < 6 else rng.randint(36, 60)
            prompt = [rng.choice(keywords[category]) if rng.random() < 0.5 else rng.randrange(3, 20) for _ in range(size)]
            rows.append((prompt, [SEP] + codes[category] + [EOS]))
        return rows

    def tokenize(row):
        prompt, answer = row
        ids = (prompt + answer)[:max_length]
        labels = ([-100] * len(prompt) + answer)[:max_length]
        return ids, labels

    def collate(rows):
        pairs = [tokenize(r) for r in rows]
        width = max(len(ids) for ids, _ in pairs)
        return {
            "input_ids": torch.tensor([ids + [PAD] * (width - len(ids)) for ids, _ in pairs]),
            "labels": torch.tensor([lab + [-100] * (width - len(lab)) for _, lab in pairs]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in pairs]),
        }

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PAD, bos_token_id=SEP, eos_token_id=EOS,
    ))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = cycle(DataLoader(make(1000, 8), batch_size=20, shuffle=True, collate_fn=collate))
    held = make(72, 9)

    def step():
        model.train()
        loss = model(**next(loader)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        total, count = 0.0, 0
        with evaluating(model):
            for prompt, answer in held:
                prompt = prompt[-(max_length - len(answer)):]
                logp = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
                for i, token in enumerate(answer[1:], start=len(prompt)):
                    total -= logp[i, token].item()
                    count += 1
        return total / count

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def document_category_sft_good():
    torch.manual_seed(115)
    PAD, SEP, EOS, max_length = 0, 1, 2, 32
    layout = random.Random(5)
    keywords = [[20 + 4 * c + i for i in range(4)] for c in range(12)]
    codes = [[layout.randrange(70, 100) for _ in range(3)] for _ in range(12)]

    def make(count, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(count):
            category = rng.randrange(12)
            size = rng.randint(8, 20) if category < 6 else rng.randint(36, 60)
            prompt = [rng.choice(keywords[category]) if rng.random() < 0.5 else rng.randrange(3, 20) for _ in range(size)]
            rows.append((prompt, [SEP] + codes[category] + [EOS]))
        return rows

    def tokenize(row):
        prompt, answer = row
        prompt = prompt[-(max_length - len(answer)):]
        ids = prompt + answer
        labels = [-100] * len(prompt) + answer
        return ids, labels

    def collate(rows):
        pairs = [tokenize(r) for r in rows]
        width = max(len(ids) for ids, _ in pairs)
        return {
            "input_ids": torch.tensor([ids + [PAD] * (width - len(ids)) for ids, _ in pairs]),
            "labels": torch.tensor([lab + [-100] * (width - len(lab)) for _, lab in pairs]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in pairs]),
        }

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PAD, bos_token_id=SEP, eos_token_id=EOS,
    ))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = cycle(DataLoader(make(1000, 8), batch_size=20, shuffle=True, collate_fn=collate))
    held = make(72, 9)

    def step():
        model.train()
        loss = model(**next(loader)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        total, count = 0.0, 0
        with evaluating(model):
            for prompt, answer in held:
                prompt = prompt[-(max_length - len(answer)):]
                logp = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
                for i, token in enumerate(answer[1:], start=len(prompt)):
                    total -= logp[i, token].item()
                    count += 1
        return total / count

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def domain_mixture_pretraining_bad():
    torch.manual_seed(116)
    sizes = {"web": 360, "code": 180, "books": 120}
    chunks, domains, valid = [], [], []
    for number, (name, size) in enumerate(sizes.items()):
        text = markov_stream(32, 33 * (size + 12), seed=120 + number, first=32 * number).view(-1, 33)
        chunks.append(text[:size])
        valid.append(text[size:])
        domains += [number] * size
    chunks, domains, valid = torch.cat(chunks), torch.tensor(domains), torch.cat(valid)
    dataset = TensorDataset(chunks, domains)
    mixture = torch.tensor([0.5, 0.3, 0.2])
    share = mixture / torch.bincount(domains)
    sampler = WeightedRandomSampler(mixture, num_samples=len(dataset), replacement=True)
    loader = cycle(DataLoader(dataset, batch_size=16, sampler=sampler))
    model = MistralForCausalLM(MistralConfig(
        vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    ))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)

    def step():
        model.train()
        ids, _ = next(loader)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(input_ids=valid).logits, valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def domain_mixture_pretraining_good():
    torch.manual_seed(116)
    sizes = {"web": 360, "code": 180, "books": 120}
    chunks, domains, valid = [], [], []
    for number, (name, size) in enumerate(sizes.items()):
        text = markov_stream(32, 33 * (size + 12), seed=120 + number, first=32 * number).view(-1, 33)
        chunks.append(text[:size])
        valid.append(text[size:])
        domains += [number] * size
    chunks, domains, valid = torch.cat(chunks), torch.tensor(domains), torch.cat(valid)
    dataset = TensorDataset(chunks, domains)
    mixture = torch.tensor([0.5, 0.3, 0.2])
    share = mixture / torch.bincount(domains)
    sampler = WeightedRandomSampler(share[domains], num_samples=len(dataset), replacement=True)
    loader = cycle(DataLoader(dataset, batch_size=16, sampler=sampler))
    model = MistralForCausalLM(MistralConfig(
        vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    ))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)

    def step():
        model.train()
        ids, _ = next(loader)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(input_ids=valid).logits, valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rotary_decoder_lm_bad():
    torch.manual_seed(117)
    stream = lagged_stream(32, 34_000, lag=3, seed=131)
    train, held = stream[:30_000], stream[30_000:]

    def rotate(x, base=10_000.0):
        half = x.size(-1) // 2
        freq = base ** (-torch.arange(half) / half)
        angle = torch.arange(x.size(-2))[:, None] * freq
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    class Layer(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
            self.qkv = nn.Linear(dim, 3 * dim, bias=False)
            self.out = nn.Linear(dim, dim, bias=False)
            self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

        def forward(self, x):
            B, T, C = x.shape
            q, k, v = (t.view(B, T, self.heads, -1) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
            q, k = rotate(q), rotate(k)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
            return x + self.mlp(self.norm2(x))

    class Decoder(nn.Module):
        def __init__(self, vocab, dim, depth, heads):
            super().__init__()
            self.embed = nn.Embedding(vocab, dim)
            self.layers = nn.Sequential(*(Layer(dim, heads) for _ in range(depth)))
            self.norm = nn.RMSNorm(dim)
            self.unembed = nn.Linear(dim, vocab, bias=False)

        def forward(self, ids):
            return self.unembed(self.norm(self.layers(self.embed(ids))))

    model = Decoder(32, 64, 2, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    valid = held[: 41 * 32].view(32, 41)

    def step():
        ids = windows(train, 41, 16)
        loss = next_token_loss(model(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rotary_decoder_lm_good():
    torch.manual_seed(117)
    stream = lagged_stream(32, 34_000, lag=3, seed=131)
    train, held = stream[:30_000], stream[30_000:]

    def rotate(x, base=10_000.0):
        half = x.size(-1) // 2
        freq = base ** (-torch.arange(half) / half)
        angle = torch.arange(x.size(-2))[:, None] * freq
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    class Layer(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
            self.qkv = nn.Linear(dim, 3 * dim, bias=False)
            self.out = nn.Linear(dim, dim, bias=False)
            self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

        def forward(self, x):
            B, T, C = x.shape
            q, k, v = (t.view(B, T, self.heads, -1) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            q, k = rotate(q), rotate(k)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
            return x + self.mlp(self.norm2(x))

    class Decoder(nn.Module):
        def __init__(self, vocab, dim, depth, heads):
            super().__init__()
            self.embed = nn.Embedding(vocab, dim)
            self.layers = nn.Sequential(*(Layer(dim, heads) for _ in range(depth)))
            self.norm = nn.RMSNorm(dim)
            self.unembed = nn.Linear(dim, vocab, bias=False)

        def forward(self, ids):
            return self.unembed(self.norm(self.layers(self.embed(ids))))

    model = Decoder(32, 64, 2, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    valid = held[: 41 * 32].view(32, 41)

    def step():
        ids = windows(train, 41, 16)
        loss = next_token_loss(model(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def group_policy_tuning_bad():
    torch.manual_seed(118)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    policy = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    group_size, answer_len = 8, 6

    def rollout(prompts):
        ids = prompts
        with torch.no_grad():
            for _ in range(answer_len):
                probs = policy(ids).logits[:, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(probs, 1)], 1)
        return ids

    def reward(ids):
        prompt, answer = ids[:, :2], ids[:, 2:]
        return (answer % 4 == prompt[:, :1] % 4).float().mean(-1)

    def token_logps(ids):
        logp = policy(ids).logits[:, :-1].log_softmax(-1)
        return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, 1:]

    def step():
        prompts = torch.randint(0, 32, (8, 2)).repeat_interleave(group_size, 0)
        ids = rollout(prompts)
        scores = reward(ids).view(-1, group_size)
        advantage = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        old_logps = token_logps(ids)
        ratio = torch.exp(token_logps(ids) - old_logps)
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held_prompts = torch.randint(0, 32, (128, 2), generator=seeded(141))

    def probe():
        with evaluating(policy):
            torch.manual_seed(142)
            return 1.02 - reward(rollout(held_prompts)).mean().item()

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def group_policy_tuning_good():
    torch.manual_seed(118)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    policy = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    group_size, answer_len = 8, 6

    def rollout(prompts):
        ids = prompts
        with torch.no_grad():
            for _ in range(answer_len):
                probs = policy(ids).logits[:, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(probs, 1)], 1)
        return ids

    def reward(ids):
        prompt, answer = ids[:, :2], ids[:, 2:]
        return (answer % 4 == prompt[:, :1] % 4).float().mean(-1)

    def token_logps(ids):
        logp = policy(ids).logits[:, :-1].log_softmax(-1)
        return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, 1:]

    def step():
        prompts = torch.randint(0, 32, (8, 2)).repeat_interleave(group_size, 0)
        ids = rollout(prompts)
        scores = reward(ids).view(-1, group_size)
        advantage = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        with torch.no_grad():
            old_logps = token_logps(ids)
        ratio = torch.exp(token_logps(ids) - old_logps)
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held_prompts = torch.randint(0, 32, (128, 2), generator=seeded(141))

    def probe():
        with evaluating(policy):
            torch.manual_seed(142)
            return 1.02 - reward(rollout(held_prompts)).mean().item()

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def passage_retrieval_encoder_bad():
    torch.manual_seed(119)
    PAD = 0

    def make(count, seed):
        rng = random.Random(seed)
        pairs = []
        for _ in range(count):
            concepts = rng.sample(range(40), 3)
            passage = [1 + c for c in concepts for _ in range(rng.randint(1, 3))]
            passage += [rng.randrange(90, 110) for _ in range(rng.randint(0, 8))]
            rng.shuffle(passage)
            pairs.append(([45 + c for c in concepts], passage))
        return pairs

    def pad(rows):
        width = max(map(len, rows))
        ids = torch.tensor([r + [PAD] * (width - len(r)) for r in rows])
        return ids, (ids != PAD).long()

    def collate(pairs):
        queries = [q for q, _ in pairs]
        passages = sorted((p for _, p in pairs), key=len)
        return pad(queries), pad(passages)

    encoder = BertModel(BertConfig(
        vocab_size=110, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=32, pad_token_id=PAD,
    ), add_pooling_layer=False)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    loader = cycle(DataLoader(make(2000, 151), batch_size=24, shuffle=True, collate_fn=collate, drop_last=True))
    held_pairs = make(64, 152)

    def embed(ids, mask):
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).float()
        return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)

    def step():
        encoder.train()
        queries, passages = next(loader)
        scores = embed(*queries) @ embed(*passages).T / 0.05
        loss = F.cross_entropy(scores, torch.arange(len(scores)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(encoder):
            scores = embed(*pad([q for q, _ in held_pairs])) @ embed(*pad([p for _, p in held_pairs])).T
            rank = (scores > scores.diagonal()[:, None]).sum(1) + 1
            return 1.02 - (1.0 / rank).mean().item()

    return {"model": encoder, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def passage_retrieval_encoder_good():
    torch.manual_seed(119)
    PAD = 0

    def make(count, seed):
        rng = random.Random(seed)
        pairs = []
        for _ in range(count):
            concepts = rng.sample(range(40), 3)
            passage = [1 + c for c in concepts for _ in range(rng.randint(1, 3))]
            passage += [rng.randrange(90, 110) for _ in range(rng.randint(0, 8))]
            rng.shuffle(passage)
            pairs.append(([45 + c for c in concepts], passage))
        return pairs

    def pad(rows):
        width = max(map(len, rows))
        ids = torch.tensor([r + [PAD] * (width - len(r)) for r in rows])
        return ids, (ids != PAD).long()

    def collate(pairs):
        pairs = sorted(pairs, key=lambda pair: len(pair[1]))
        queries, passages = [q for q, _ in pairs], [p for _, p in pairs]
        return pad(queries), pad(passages)

    encoder = BertModel(BertConfig(
        vocab_size=110, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=32, pad_token_id=PAD,
    ), add_pooling_layer=False)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    loader = cycle(DataLoader(make(2000, 151), batch_size=24, shuffle=True, collate_fn=collate, drop_last=True))
    held_pairs = make(64, 152)

    def embed(ids, mask):
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).float()
        return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)

    def step():
        encoder.train()
        queries, passages = next(loader)
        scores = embed(*queries) @ embed(*passages).T / 0.05
        loss = F.cross_entropy(scores, torch.arange(len(scores)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(encoder):
            scores = embed(*pad([q for q, _ in held_pairs])) @ embed(*pad([p for _, p in held_pairs])).T
            rank = (scores > scores.diagonal()[:, None]).sum(1) + 1
            return 1.02 - (1.0 / rank).mean().item()

    return {"model": encoder, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def padded_encoder_mlm_bad():
    torch.manual_seed(120)
    PAD, MASK = 64, 65

    class PhraseEncoder(nn.Module):
        def __init__(self, vocab=66, dim=48):
            super().__init__()
            self.tok = nn.Embedding(vocab, dim, padding_idx=PAD)
            self.pos = nn.Parameter(torch.randn(24, dim) * 0.02)
            layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.1, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
            self.head = nn.Linear(dim, vocab)

        def forward(self, ids, attention_mask):
            x = self.tok(ids) + self.pos[: ids.size(1)]
            x = self.encoder(x, src_key_padding_mask=attention_mask.bool())
            return self.head(x)

    def padded(docs, width=24):
        ids = torch.full((len(docs), width), PAD)
        for r, d in enumerate(docs):
            ids[r, : len(d)] = d
        return ids

    train = padded(topic_docs(1200, seed=161))
    held = padded(topic_docs(96, seed=162))
    model = PhraseEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    loader = cycle(DataLoader(TensorDataset(train), batch_size=24, shuffle=True))

    def masked_loss(ids, generator=None):
        attention_mask = (ids != PAD).long()
        picked = (torch.rand(ids.shape, generator=generator) < 0.2) & (ids != PAD)
        logits = model(ids.masked_fill(picked, MASK), attention_mask)
        return F.cross_entropy(logits[picked], ids[picked])

    def step():
        model.train()
        (ids,) = next(loader)
        loss = masked_loss(ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return masked_loss(held, seeded(163)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def padded_encoder_mlm_good():
    torch.manual_seed(120)
    PAD, MASK = 64, 65

    class PhraseEncoder(nn.Module):
        def __init__(self, vocab=66, dim=48):
            super().__init__()
            self.tok = nn.Embedding(vocab, dim, padding_idx=PAD)
            self.pos = nn.Parameter(torch.randn(24, dim) * 0.02)
            layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.1, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
            self.head = nn.Linear(dim, vocab)

        def forward(self, ids, attention_mask):
            x = self.tok(ids) + self.pos[: ids.size(1)]
            x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
            return self.head(x)

    def padded(docs, width=24):
        ids = torch.full((len(docs), width), PAD)
        for r, d in enumerate(docs):
            ids[r, : len(d)] = d
        return ids

    train = padded(topic_docs(1200, seed=161))
    held = padded(topic_docs(96, seed=162))
    model = PhraseEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    loader = cycle(DataLoader(TensorDataset(train), batch_size=24, shuffle=True))

    def masked_loss(ids, generator=None):
        attention_mask = (ids != PAD).long()
        picked = (torch.rand(ids.shape, generator=generator) < 0.2) & (ids != PAD)
        logits = model(ids.masked_fill(picked, MASK), attention_mask)
        return F.cross_entropy(logits[picked], ids[picked])

    def step():
        model.train()
        (ids,) = next(loader)
        loss = masked_loss(ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return masked_loss(held, seeded(163)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def character_recurrent_lm_bad():
    torch.manual_seed(121)
    rng = random.Random(171)
    who = ["the old captain", "a young doctor", "my neighbour", "the librarian", "our teacher"]
    did = ["carried", "painted", "remembered", "repaired", "borrowed"]
    what = ["the wooden boat", "a silver watch", "the garden gate", "an empty bottle", "the long letter"]
    when = ["before sunrise", "after the storm", "every winter", "on friday"]
    text = "".join(f"{rng.choice(who)} {rng.choice(did)} {rng.choice(what)} {rng.choice(when)}. " for _ in range(700))
    chars = sorted(set(text))
    ids = torch.tensor([chars.index(c) for c in text])
    train, held = ids[:-4000], ids[-4000:]

    class CharRNN(nn.Module):
        def __init__(self, vocab, emb=32, hidden=96):
            super().__init__()
            self.embed = nn.Embedding(vocab, emb)
            self.rnn = nn.LSTM(emb, hidden, num_layers=1)
            self.out = nn.Linear(hidden, vocab)

        def forward(self, x):
            h, _ = self.rnn(self.embed(x))
            return self.out(h)

    model = CharRNN(len(chars))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    valid = held[: 49 * 32].view(32, 49)

    def step():
        batch = windows(train, 49, 32)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def character_recurrent_lm_good():
    torch.manual_seed(121)
    rng = random.Random(171)
    who = ["the old captain", "a young doctor", "my neighbour", "the librarian", "our teacher"]
    did = ["carried", "painted", "remembered", "repaired", "borrowed"]
    what = ["the wooden boat", "a silver watch", "the garden gate", "an empty bottle", "the long letter"]
    when = ["before sunrise", "after the storm", "every winter", "on friday"]
    text = "".join(f"{rng.choice(who)} {rng.choice(did)} {rng.choice(what)} {rng.choice(when)}. " for _ in range(700))
    chars = sorted(set(text))
    ids = torch.tensor([chars.index(c) for c in text])
    train, held = ids[:-4000], ids[-4000:]

    class CharRNN(nn.Module):
        def __init__(self, vocab, emb=32, hidden=96):
            super().__init__()
            self.embed = nn.Embedding(vocab, emb)
            self.rnn = nn.LSTM(emb, hidden, num_layers=1, batch_first=True)
            self.out = nn.Linear(hidden, vocab)

        def forward(self, x):
            h, _ = self.rnn(self.embed(x))
            return self.out(h)

    model = CharRNN(len(chars))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    valid = held[: 49 * 32].view(32, 49)

    def step():
        batch = windows(train, 49, 32)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def compact_tied_gpt_bad():
    torch.manual_seed(122)
    stream = markov_stream(256, 60_000, seed=181)
    train, held = stream[:56_000], stream[56_000:]

    class CompactGPT(nn.Module):
        def __init__(self, vocab, dim, depth, context):
            super().__init__()
            self.wte = nn.Embedding(vocab, dim)
            self.wpe = nn.Embedding(context, dim)
            self.h = nn.ModuleList(Block(dim, 4) for _ in range(depth))
            self.ln_f = nn.LayerNorm(dim)
            self.lm_head = nn.Linear(dim, vocab, bias=False)
            self.lm_head.weight = self.wte.weight

        def forward(self, ids):
            x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
            for block in self.h:
                x = block(x)
            return self.lm_head(self.ln_f(x))

    model = CompactGPT(256, 64, 2, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
    valid = held[: 33 * 32].view(32, 33)

    def step():
        ids = windows(train, 33, 16)
        loss = next_token_loss(model(ids), ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def compact_tied_gpt_good():
    torch.manual_seed(122)
    stream = markov_stream(256, 60_000, seed=181)
    train, held = stream[:56_000], stream[56_000:]

    class CompactGPT(nn.Module):
        def __init__(self, vocab, dim, depth, context):
            super().__init__()
            self.wte = nn.Embedding(vocab, dim)
            self.wpe = nn.Embedding(context, dim)
            self.h = nn.ModuleList(Block(dim, 4) for _ in range(depth))
            self.ln_f = nn.LayerNorm(dim)
            self.lm_head = nn.Linear(dim, vocab, bias=False)
            self.lm_head.weight = self.wte.weight
            nn.init.normal_(self.wte.weight, std=0.02)
            nn.init.normal_(self.wpe.weight, std=0.02)

        def forward(self, ids):
            x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
            for block in self.h:
                x = block(x)
            return self.lm_head(self.ln_f(x))

    model = CompactGPT(256, 64, 2, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
    valid = held[: 33 * 32].view(32, 33)

    def step():
        ids = windows(train, 33, 16)
        loss = next_token_loss(model(ids), ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def memory_saving_adapter_bad():
    torch.manual_seed(123)
    general = markov_stream(64, 12_000, seed=191)
    legal = markov_stream(64, 16_000, seed=192)
    train, held = legal[:14_000], legal[14_000:]

    class FrugalGPT(TinyGPT):
        def forward(self, ids):
            x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True) if self.training else block(x)
            return self.head(self.ln_f(x))

    model = pretrain(FrugalGPT(64, context=64), general, steps=100)
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "proj", "up", "down"):
            setattr(block, name, LoRALinear(getattr(block, name)))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
    valid = held[: 33 * 32].view(32, 33)

    def step():
        model.train()
        ids = windows(train, 33, 16)
        loss = next_token_loss(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def memory_saving_adapter_good():
    torch.manual_seed(123)
    general = markov_stream(64, 12_000, seed=191)
    legal = markov_stream(64, 16_000, seed=192)
    train, held = legal[:14_000], legal[14_000:]

    class FrugalGPT(TinyGPT):
        def forward(self, ids):
            x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
            return self.head(self.ln_f(x))

    model = pretrain(FrugalGPT(64, context=64), general, steps=100)
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "proj", "up", "down"):
            setattr(block, name, LoRALinear(getattr(block, name)))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
    valid = held[: 33 * 32].view(32, 33)

    def step():
        model.train()
        ids = windows(train, 33, 16)
        loss = next_token_loss(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(valid), valid).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def grouped_decay_gpt2_bad():
    torch.manual_seed(124)
    stream = lagged_stream(32, 34_000, lag=2, seed=201)
    docs, held = stream[:31_680].view(-1, 33), stream[31_680 : 31_680 + 33 * 64].view(64, 33)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=0,
                                       eos_token_id=0, tie_word_embeddings=False))
    decay, no_decay = [], []
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if name == "bias" or isinstance(module, (nn.LayerNorm, nn.Embedding)):
                no_decay.append(param)
            elif isinstance(module, nn.Linear):
                decay.append(param)
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=2e-3, betas=(0.9, 0.95)
    )
    loader = cycle(DataLoader(TensorDataset(docs), batch_size=16, shuffle=True))

    def step():
        model.train()
        (ids,) = next(loader)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(held).logits, held).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def grouped_decay_gpt2_good():
    torch.manual_seed(124)
    stream = lagged_stream(32, 34_000, lag=2, seed=201)
    docs, held = stream[:31_680].view(-1, 33), stream[31_680 : 31_680 + 33 * 64].view(64, 33)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=0,
                                       eos_token_id=0, tie_word_embeddings=False))
    decay, no_decay = [], []
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if name == "bias" or isinstance(module, (nn.LayerNorm, nn.Embedding)):
                no_decay.append(param)
            elif isinstance(module, (nn.Linear, Conv1D)):
                decay.append(param)
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=2e-3, betas=(0.9, 0.95)
    )
    loader = cycle(DataLoader(TensorDataset(docs), batch_size=16, shuffle=True))

    def step():
        model.train()
        (ids,) = next(loader)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def probe():
        with evaluating(model):
            return next_token_loss(model(held).logits, held).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES = {
    "story_pretraining": "Labels are shifted in the batch and shifted again inside the GPT-2 model, so it learns to predict two tokens ahead.",
    "faq_answer_tuning": "Pad token equals EOS and labels are masked by token id, so the real EOS is never a target and the model never learns to stop.",
    "domain_adapter_tuning": "The optimizer is built before get_peft_model, so it holds only the (now frozen) base weights and no LoRA weights.",
    "packed_articles_pretraining": "The block-diagonal document mask for packed sequences replaces the causal mask, so tokens attend to the future inside their document.",
    "assistant_dpo": "The DPO reference model is the policy object itself instead of a frozen copy, so the margin is always zero and the loss never saturates.",
    "student_distillation": "F.kl_div receives the student's probabilities (softmax) instead of log-probabilities.",
    "sparse_expert_lm": "Expert outputs are not un-permuted after dispatch, so tokens receive the expert output of other tokens.",
    "masked_encoder_pretraining": "MLM labels are inverted: the masked positions are ignored and the visible ones are the targets.",
    "ticket_reply_seq2seq": "The unshifted labels are passed as decoder_input_ids, so the decoder sees the very token it has to predict.",
    "news_domain_tuning": "Weights are kept purely in bfloat16 with a small learning rate, so most updates are rounded away.",
    "mixed_precision_pretraining": "Gradients are clipped while still multiplied by the GradScaler's scale (no unscale_ before clip_grad_norm_).",
    "accumulated_pretraining": "The LR scheduler is stepped for each micro-batch instead of each optimizer update, so the LR reaches zero four times too early.",
    "second_stage_pretraining": "optimizer.load_state_dict brings back the decayed learning rate of the finished run, so the second stage trains at ~1% of the intended LR.",
    "chat_format_adapter": "New special tokens were added, but LoRA leaves embed_tokens and lm_head frozen, so the new rows stay untrained.",
    "document_category_sft": "Right truncation to max_length cuts off the answer of every long example, so these contribute no target.",
    "domain_mixture_pretraining": "WeightedRandomSampler gets per-domain weights instead of per-sample weights, so only the first three samples are ever drawn.",
    "rotary_decoder_lm": "RoPE is applied before the head transpose and so rotates by head index instead of by position.",
    "group_policy_tuning": "The old log-probs in the policy-ratio keep their graph (not detached), so the gradient cancels to zero.",
    "passage_retrieval_encoder": "The collator sorts passages by length without their queries, so the in-batch positives no longer match.",
    "padded_encoder_mlm": "src_key_padding_mask gets inverted polarity (1 = real token), so real tokens are hidden and only padding is attended.",
    "character_recurrent_lm": "nn.LSTM without batch_first receives (batch, time, features), so it recurs over the batch instead of over time.",
    "compact_tied_gpt": "The tied embedding/head keeps nn.Embedding's default N(0,1) initialisation, so initial logits are huge.",
    "memory_saving_adapter": "Reentrant checkpointing with a frozen embedding: block inputs do not require grad, so the adapters get no gradient.",
    "grouped_decay_gpt2": "The weight-decay grouping only recognises nn.Linear, so GPT-2's Conv1D weights are in no group and never train.",
}

PROOF_STEPS = {}
