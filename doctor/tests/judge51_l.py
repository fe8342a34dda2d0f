"""Small language-model training programs.  Every program comes as NAME_bad() and NAME_good(); both return a
dict with the model, the optimizer, a function for one training step, and a function that measures the error."""
import copy
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import (BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM,
                          BertForSequenceClassification, BertModel, DistilBertConfig,
                          DistilBertForSequenceClassification, GPT2Config, GPT2LMHeadModel, GPT2Model,
                          LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup)
from peft import LoraConfig, get_peft_model

torch.set_num_threads(1)


def seed_all(seed):
    seed = seed + SEED_SHIFT
    random.seed(seed)
    torch.manual_seed(seed)


SEED_SHIFT = 0


def forever(loader):
    while True:
        yield from loader


class evaluating:
    """Puts models in eval mode for a while, and back to what they were."""

    def __init__(self, *models):
        self.models = models

    def __enter__(self):
        self.was = [m.training for m in self.models]
        for m in self.models:
            m.eval()
        self.ng = torch.no_grad()
        self.ng.__enter__()

    def __exit__(self, *a):
        self.ng.__exit__(*a)
        for m, w in zip(self.models, self.was):
            m.train(w)


# ---------------------------------------------------------------- toy languages

class Bigrams:
    """A language in which every token has a few likely successors."""

    def __init__(self, vocab, seed, branch=3, low=0):
        g = torch.Generator().manual_seed(seed)
        self.low, self.vocab = low, vocab
        self.next = torch.stack([torch.randperm(vocab, generator=g)[:branch] for _ in range(vocab)])
        p = 0.5 ** torch.arange(branch).float()
        self.p = p / p.sum()

    def sample(self, n, length, g=None):
        x = torch.empty(n, length, dtype=torch.long)
        x[:, 0] = torch.randint(self.vocab, (n,), generator=g)
        for t in range(1, length):
            k = torch.multinomial(self.p, n, replacement=True, generator=g)
            x[:, t] = self.next[x[:, t - 1], k]
        return x + self.low


class Trigrams:
    """The next token follows from the last two, most of the time."""

    def __init__(self, vocab, seed, noise=0.1):
        g = torch.Generator().manual_seed(seed)
        self.vocab, self.noise = vocab, noise
        self.table = torch.randint(vocab, (vocab, vocab), generator=g)

    def sample(self, n, length, g=None):
        x = torch.randint(self.vocab, (n, length), generator=g)
        free = torch.rand(n, length, generator=g) < self.noise
        for t in range(2, length):
            x[:, t] = torch.where(free[:, t], x[:, t], self.table[x[:, t - 2], x[:, t - 1]])
        return x


# ---------------------------------------------------------------- a small GPT

class Attention(nn.Module):
    def __init__(self, dim, heads, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (z.view(B, T, self.heads, C // self.heads).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.out(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, dim, heads, dropout=0.0, attn=None, mlp=None):
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.attn = attn if attn is not None else Attention(dim, heads, dropout)
        self.ln2 = nn.LayerNorm(dim)
        self.mlp = mlp if mlp is not None else MLP(dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.mlp(self.ln2(x)))


class GPT(nn.Module):
    def __init__(self, vocab, block_size, dim=48, heads=4, layers=2, dropout=0.0, make_block=None):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(block_size, dim)
        self.drop = nn.Dropout(dropout)
        make_block = make_block or (lambda: Block(dim, heads, dropout))
        self.blocks = nn.ModuleList([make_block() for _ in range(layers)])
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(self._init)

    def _init(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.06)
        if isinstance(m, nn.Linear) and m.bias is not None:
            nn.init.zeros_(m.bias)

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.tok(idx) + self.pos(pos))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def lm_nll(model, x):
    with evaluating(model):
        _, loss = model(x[:, :-1], x[:, 1:])
    return loss.item()


def prefix_nll(model, x, cuts):
    """Next-token likelihood as in generation: the model is shown the prefix only."""
    total = 0.0
    with evaluating(model):
        for t in cuts:
            logits = model(x[:, :t])[:, -1]
            total += F.cross_entropy(logits, x[:, t]).item()
    return total / len(cuts)


# ================================================================ supervised fine-tuning

def _sft_phrases(good):
    seed_all(11)
    BOS, EOS, SEP = 0, 1, 2
    vocab, n_topics = 64, 8
    g = torch.Generator().manual_seed(5)
    phrases = [torch.randint(20, vocab, (int(n),), generator=g).tolist() for n in torch.randint(3, 9, (n_topics,), generator=g)]

    def example():
        topic = random.randrange(n_topics)
        prompt = [BOS] + [random.randrange(12, 20) for _ in range(random.randint(1, 4))] + [3 + topic, SEP]
        return {"prompt": prompt, "answer": phrases[topic] + [EOS]}

    class PhraseSet(Dataset):
        def __init__(self, n):
            self.rows = [example() for _ in range(n)]

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            return self.rows[i]

    pad_id = EOS

    def collate(rows):
        seqs = [torch.tensor(r["prompt"] + r["answer"]) for r in rows]
        input_ids = pad_sequence(seqs, batch_first=True, padding_value=pad_id)
        lengths = torch.tensor([len(s) for s in seqs])
        attention_mask = (torch.arange(input_ids.size(1))[None] < lengths[:, None]).long()
        labels = input_ids.clone()
        if good:
            labels[attention_mask == 0] = -100
        else:
            labels[labels == pad_id] = -100
        for i, r in enumerate(rows):
            labels[i, : len(r["prompt"])] = -100
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
                                         bos_token_id=BOS, eos_token_id=EOS, pad_token_id=None))
    loader = forever(DataLoader(PhraseSet(512), batch_size=16, shuffle=True, collate_fn=collate))
    held_out = PhraseSet(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    model.train()

    def step():
        batch = next(loader)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        total, count = 0.0, 0
        with evaluating(model):
            for r in held_out.rows:
                ids = torch.tensor([r["prompt"] + r["answer"]])
                logits = model(input_ids=ids).logits[0]
                n = len(r["prompt"])
                total += F.cross_entropy(logits[n - 1:-1], ids[0, n:], reduction="sum").item()
                count += ids.size(1) - n
        return total / count

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ================================================================ pre-training on packed documents

def _packed_corpus(good):
    seed_all(12)
    vocab, block, eos = 33, 32, 32
    lang = Bigrams(32, seed=2)
    docs = lang.sample(400, 24)
    stream = []
    for d in docs:
        stream += d[: random.randint(8, 24)].tolist() + [eos]
    stream = torch.tensor(stream)

    class Packed(Dataset):
        def __init__(self, stream):
            self.stream = stream

        def __len__(self):
            return (len(self.stream) - 1) // block

        def __getitem__(self, i):
            chunk = self.stream[i * block: (i + 1) * block + 1]
            if good:
                return {"input_ids": chunk[:-1], "labels": chunk[:-1].clone()}
            return {"input_ids": chunk[:-1], "labels": chunk[1:].clone()}

    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=block, n_embd=48, n_layer=2, n_head=4,
                                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                       bos_token_id=eos, eos_token_id=eos))
    model.train()
    loader = DataLoader(Packed(stream), batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    test = lang.sample(64, 24)

    def train_step():
        batch = next(batches)
        out = model(input_ids=batch["input_ids"], labels=batch["labels"])
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)

    def evaluate():
        with evaluating(model):
            logits = model(input_ids=test[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten()).item()

    return {"model": model, "optimizer": opt, "step": train_step, "steps": 20, "evaluate": evaluate}


# ================================================================ masked language model

def _mlm_templates(good):
    seed_all(13)
    PAD, CLS, SEP, MASK = 0, 1, 2, 3
    vocab, width, n_templates = 60, 14, 10
    g = torch.Generator().manual_seed(8)
    templates = torch.randint(4, vocab, (n_templates, width), generator=g)

    def sentences(n):
        x = templates[torch.randint(n_templates, (n,))].clone()
        noise = torch.rand(n, width) < 0.1
        x[noise] = torch.randint(4, vocab, (int(noise.sum()),))
        return torch.cat([torch.full((n, 1), CLS), x, torch.full((n, 1), SEP)], 1)

    def mask_tokens(input_ids, p=0.15):
        labels = input_ids.clone() if good else input_ids
        special = (input_ids == CLS) | (input_ids == SEP) | (input_ids == PAD)
        picked = (torch.rand(input_ids.shape) < p) & ~special
        input_ids[picked] = MASK
        labels = labels.masked_fill(~picked, -100)
        return input_ids, labels

    model = BertForMaskedLM(BertConfig(vocab_size=vocab, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                                       intermediate_size=96, max_position_embeddings=32, hidden_dropout_prob=0.0,
                                       attention_probs_dropout_prob=0.0, pad_token_id=PAD))
    train = DataLoader(sentences(1024), batch_size=32, shuffle=True)
    batches = forever(train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    test = sentences(128)
    gen = torch.Generator().manual_seed(3)
    hide = torch.rand(test.shape, generator=gen) < 0.15
    hide &= test > 3

    def step():
        input_ids, labels = mask_tokens(next(batches))
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            logits = model(input_ids=test.masked_fill(hide, MASK)).logits
        return F.cross_entropy(logits[hide], test[hide]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ================================================================ translation

def _translate(good):
    seed_all(14)
    PAD, START, EOS = 0, 1, 2
    vocab = 24
    g = torch.Generator().manual_seed(4)
    lexicon = torch.arange(vocab)
    lexicon[3:] = 3 + torch.randperm(vocab - 3, generator=g)

    def pairs(n):
        rows = []
        for _ in range(n):
            src = torch.randint(3, vocab, (random.randint(3, 6),))
            rows.append((torch.cat([src, torch.tensor([EOS])]), torch.cat([lexicon[src], torch.tensor([EOS])])))
        return rows

    def shift_right(ids):
        return torch.cat([torch.full_like(ids[:, :1], START), ids[:, :-1]], dim=1)

    def collate(rows):
        src = pad_sequence([s for s, _ in rows], batch_first=True, padding_value=PAD)
        tgt = pad_sequence([t for _, t in rows], batch_first=True, padding_value=PAD)
        return {"input_ids": src, "attention_mask": (src != PAD).long(),
                "decoder_input_ids": shift_right(tgt) if good else tgt,
                "labels": tgt.masked_fill(tgt == PAD, -100)}

    config = BartConfig(vocab_size=vocab, d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=16,
                        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, init_std=0.06, pad_token_id=PAD,
                        bos_token_id=START, eos_token_id=EOS, decoder_start_token_id=START, forced_eos_token_id=None)
    model = BartForConditionalGeneration(config)
    model.train()
    loader = forever(DataLoader(pairs(1500), batch_size=32, shuffle=True, collate_fn=collate))
    test_rows = pairs(96)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step():
        batch = next(loader)
        opt.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()

    def evaluate():
        src = pad_sequence([s for s, _ in test_rows], batch_first=True, padding_value=PAD)
        tgt = pad_sequence([t for _, t in test_rows], batch_first=True, padding_value=PAD)
        with evaluating(model):
            logits = model(input_ids=src, attention_mask=(src != PAD).long(), decoder_input_ids=shift_right(tgt)).logits
        return F.cross_entropy(logits.flatten(0, 1), tgt.flatten(), ignore_index=PAD).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


# ================================================================ bottleneck adapters on a frozen language model

class Adapter(nn.Module):
    def __init__(self, dim, bottleneck):
        super().__init__()
        self.down = nn.Linear(dim, bottleneck)
        self.up = nn.Linear(bottleneck, dim)
        nn.init.normal_(self.up.weight, std=1e-3)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return x + self.up(F.gelu(self.down(x)))


def _adapter_classifier(good):
    seed_all(15)
    vocab, length, n_classes = 40, 16, 4
    lang = Bigrams(vocab, seed=6, branch=6)
    lean = torch.randn(vocab, n_classes, generator=torch.Generator().manual_seed(13))

    class AdapterClassifier(nn.Module):
        def __init__(self, backbone, dim, n_classes, bottleneck=16):
            super().__init__()
            self.backbone = backbone
            for p in self.backbone.parameters():
                p.requires_grad = False
            adapters = [Adapter(dim, bottleneck) for _ in backbone.blocks]
            self.adapters = nn.ModuleList(adapters) if good else adapters
            self.norm = nn.LayerNorm(dim)
            self.classifier = nn.Linear(dim, n_classes)

        def forward(self, ids):
            x = self.backbone.tok(ids) + self.backbone.pos(torch.arange(ids.size(1)))
            for block, adapter in zip(self.backbone.blocks, self.adapters):
                x = adapter(block(x))
            return self.classifier(self.norm(x[:, -1]))

    backbone = GPT(vocab, length, dim=48, layers=2)
    pre = torch.optim.AdamW(backbone.parameters(), lr=2e-3)
    for _ in range(80):
        x = lang.sample(16, length + 1)
        _, loss = backbone(x[:, :-1], x[:, 1:])
        pre.zero_grad()
        loss.backward()
        pre.step()
    backbone.zero_grad()

    def make(n):
        x = lang.sample(n, length)
        return x, lean[x].sum(1).argmax(1)

    model = AdapterClassifier(backbone, 48, n_classes)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    train = forever(DataLoader(TensorDataset(*make(4096)), batch_size=32, shuffle=True))
    test_x, test_y = make(512)
    model.train()

    def step():
        x, y = next(train)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            return F.cross_entropy(model(test_x), test_y).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ================================================================ LoRA written by hand

class LoRALinear(nn.Module):
    def __init__(self, base, rank, alpha, good):
        super().__init__()
        self.base = base
        self.scaling = alpha / rank
        self.lora_A = nn.Parameter(torch.zeros(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        if good:
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def _own_lora(good):
    seed_all(16)
    vocab, length = 32, 24
    base_lang, new_lang = Bigrams(vocab, seed=1), Bigrams(vocab, seed=21)
    model = GPT(vocab, length, dim=48, layers=2)
    pre = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(100):
        x = base_lang.sample(16, length + 1)
        _, loss = model(x[:, :-1], x[:, 1:])
        pre.zero_grad()
        loss.backward()
        pre.step()
    model.zero_grad()
    for p in model.parameters():
        p.requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv = LoRALinear(block.attn.qkv, 8, 16, good)
        block.attn.proj = LoRALinear(block.attn.proj, 8, 16, good)
        block.mlp.fc = LoRALinear(block.mlp.fc, 8, 16, good)
        block.mlp.out = LoRALinear(block.mlp.out, 8, 16, good)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3, weight_decay=0.0)
    data = new_lang.sample(1024, length + 1)
    test = new_lang.sample(64, length + 1)
    loader = forever(DataLoader(data, batch_size=16, shuffle=True))
    model.train()

    def step():
        x = next(loader)
        _, loss = model(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: lm_nll(model, test)}


# ================================================================ peft and gradient checkpointing

class CheckpointedGPT(GPT):
    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.tok(idx) + self.pos(pos))
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        logits = self.head(self.ln_f(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _peft_long_context(good):
    seed_all(17)
    vocab, length = 10, 32
    general, special = Trigrams(vocab, seed=1), Trigrams(vocab, seed=31)
    base = CheckpointedGPT(vocab, length, dim=48, layers=2)
    pre = torch.optim.AdamW(base.parameters(), lr=3e-3)
    base.eval()
    for _ in range(150):
        x = general.sample(16, length + 1)
        _, loss = base(x[:, :-1], x[:, 1:])
        pre.zero_grad()
        loss.backward()
        pre.step()
    base.zero_grad()
    if good:
        base.tok.register_forward_hook(lambda module, args, out: out.requires_grad_(True))
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["qkv", "proj", "fc", "out"],
                                            modules_to_save=["head"]))
    model.train()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01)
    loader = forever(DataLoader(special.sample(2048, length + 1), batch_size=16, shuffle=True))
    test = special.sample(64, length + 1)

    def step():
        x = next(loader)
        _, loss = model(x[:, :-1], x[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: lm_nll(model, test)}


# ================================================================ four sources, accumulated gradients

def _mixture_of_sources(good):
    seed_all(18)
    vocab, length, accum = 32, 24, 4
    sources = [Bigrams(28, seed=40 + k, low=4) for k in range(4)]

    def tagged(k, n):
        return torch.cat([torch.full((n, 1), k), sources[k].sample(n, length)], dim=1)

    loaders = [forever(DataLoader(tagged(k, 512), batch_size=8, shuffle=True)) for k in range(4)]
    test = torch.cat([tagged(k, 24) for k in range(4)])
    model = GPT(vocab, length, dim=48, layers=2)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def micro_step(i):
        x = next(loaders[i % len(loaders)])
        _, loss = model(x[:, :-1], x[:, 1:])
        (loss / accum).backward()
        if (i + 1) % accum == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if good:
                optimizer.zero_grad()
        if not good:
            optimizer.zero_grad()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": micro_step, "steps": 20, "evaluate": lambda: lm_nll(model, test)}


# ================================================================ distillation of a language model

def _distil_lm(good):
    seed_all(19)
    vocab, length, T = 32, 24, 2.0
    lang = Bigrams(vocab, seed=3, branch=4)

    def gpt2(dim, layers):
        return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=length, n_embd=dim, n_layer=layers, n_head=4,
                                          resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))

    teacher = gpt2(48, 2)
    t_opt = torch.optim.AdamW(teacher.parameters(), lr=3e-3)
    for _ in range(100):
        x = lang.sample(16, length)
        loss = teacher(input_ids=x, labels=x).loss
        t_opt.zero_grad()
        loss.backward()
        t_opt.step()
    teacher.eval()
    teacher.requires_grad_(False)
    student = gpt2(32, 1)
    student.train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    loader = forever(DataLoader(lang.sample(1024, length), batch_size=16, shuffle=True))
    test = lang.sample(96, length)

    def distillation_loss(s_logits, t_logits):
        target = F.softmax(t_logits / T, dim=-1)
        pred = F.log_softmax(s_logits / T, dim=-1) if good else F.softmax(s_logits / T, dim=-1)
        return F.kl_div(pred.flatten(0, 1), target.flatten(0, 1), reduction="batchmean") * T * T

    def step():
        ids = next(loader)
        with torch.no_grad():
            t_logits = teacher(input_ids=ids).logits
        s_logits = student(input_ids=ids).logits
        loss = distillation_loss(s_logits, t_logits)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        with evaluating(student):
            logits = student(input_ids=test).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), test[:, 1:].flatten()).item()

    return {"model": student, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ================================================================ scoring of essays

def _essay_scores(good):
    seed_all(20)
    vocab, max_len = 50, 20
    g = torch.Generator().manual_seed(9)
    quality = torch.randn(vocab, generator=g)
    quality[0] = 0

    def make(n):
        ids = torch.randint(1, vocab, (n, max_len))
        lengths = torch.randint(8, max_len + 1, (n,))
        mask = (torch.arange(max_len)[None] < lengths[:, None]).long()
        ids = ids * mask
        score = (quality[ids] * mask).sum(1) / lengths.float().sqrt()
        return ids, mask, score

    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = BertModel(BertConfig(vocab_size=vocab, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                                                intermediate_size=96, max_position_embeddings=32, hidden_dropout_prob=0.0,
                                                attention_probs_dropout_prob=0.0, pad_token_id=0), add_pooling_layer=False)
            self.head = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))

        def forward(self, input_ids, attention_mask):
            h = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            m = attention_mask.unsqueeze(-1).float()
            out = self.head((h * m).sum(1) / m.sum(1))
            return out.squeeze(-1) if good else out

    ids, mask, score = make(2048)
    mean, std = score.mean(), score.std()
    train = forever(DataLoader(TensorDataset(ids, mask, (score - mean) / std), batch_size=32, shuffle=True))
    t_ids, t_mask, t_score = make(256)
    t_score = (t_score - mean) / std
    model = Scorer()
    model.train()
    criterion = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        input_ids, attention_mask, target = next(train)
        optimizer.zero_grad()
        loss = criterion(model(input_ids, attention_mask), target)
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            return F.mse_loss(model(t_ids, t_mask).flatten(), t_score).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ================================================================ a reward model

def _reward_model(good):
    seed_all(21)
    vocab, p_len, r_len = 40, 6, 10
    g = torch.Generator().manual_seed(7)
    worth = torch.randn(vocab, generator=g)

    def make(n):
        rows = []
        for _ in range(n):
            prompt = torch.randint(1, vocab, (p_len,))
            a, b = torch.randint(1, vocab, (2, r_len))
            if worth[a].sum() < worth[b].sum():
                a, b = b, a
            rows.append({"chosen": torch.cat([prompt, a]), "rejected": torch.cat([prompt, b])})
        return rows

    class RewardModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer = GPT2Model(GPT2Config(vocab_size=vocab, n_positions=32, n_embd=48, n_layer=2, n_head=4,
                                                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
            self.v_head = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1, bias=False))

        def forward(self, input_ids):
            h = self.transformer(input_ids=input_ids).last_hidden_state
            return self.v_head(h[:, -1]).squeeze(-1)

    def collate(rows):
        ids = []
        for r in rows:
            ids.append(r["chosen"])
            ids.append(r["rejected"])
        return torch.stack(ids)

    model = RewardModel()
    model.train()
    loader = forever(DataLoader(make(1024), batch_size=16, shuffle=True, collate_fn=collate))
    test = make(200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def step():
        rewards = model(next(loader))
        if good:
            chosen, rejected = rewards[0::2], rewards[1::2]
        else:
            chosen, rejected = rewards.chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        with evaluating(model):
            c = model(torch.stack([r["chosen"] for r in test]))
            d = model(torch.stack([r["rejected"] for r in test]))
        return (c <= d).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ================================================================ mixed precision

def _bert_amp(good):
    seed_all(22)
    vocab, length, n_classes = 50, 14, 5
    g = torch.Generator().manual_seed(10)
    lean = torch.randn(vocab, n_classes, generator=g)

    def make(n):
        x = torch.randint(2, vocab, (n, length))
        y = lean[x].sum(1).argmax(1)
        return torch.cat([torch.ones(n, 1, dtype=torch.long), x], dim=1), y

    model = BertForSequenceClassification(BertConfig(vocab_size=vocab, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                                                     intermediate_size=96, max_position_embeddings=32, num_labels=n_classes,
                                                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
    loader = forever(DataLoader(TensorDataset(*make(4096)), batch_size=16, shuffle=True))
    test_x, test_y = make(400)
    model.train()

    def step():
        x, y = next(loader)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=x, labels=y).loss
        scaler.scale(loss).backward()
        if good:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    def evaluate():
        with evaluating(model):
            return F.cross_entropy(model(input_ids=test_x).logits, test_y).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ================================================================ a trainer with epochs and a schedule

def _classify_epochs(good):
    seed_all(23)
    vocab, length, n_classes, num_epochs = 40, 14, 3, 40
    g = torch.Generator().manual_seed(12)
    lean = torch.randn(vocab, n_classes, generator=g)

    def make(n):
        x = torch.randint(2, vocab, (n, length))
        y = lean[x].sum(1).argmax(1)
        return torch.cat([torch.ones(n, 1, dtype=torch.long), x], dim=1), y

    class Trainer:
        def __init__(self, model, train_loader, epochs, lr, warmup=2):
            self.model, self.loader = model, train_loader
            self.batches = forever(train_loader)
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
            total_steps = len(train_loader) * epochs if good else len(train_loader)
            self.scheduler = get_linear_schedule_with_warmup(self.optimizer, num_warmup_steps=warmup,
                                                             num_training_steps=total_steps)

        def training_step(self):
            self.model.train()
            x, y = next(self.batches)
            out = self.model(input_ids=x, labels=y)
            out.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=vocab, dim=48, n_layers=2, n_heads=4, hidden_dim=96,
                                                                 max_position_embeddings=32, num_labels=n_classes, dropout=0.0,
                                                                 attention_dropout=0.0, seq_classif_dropout=0.0))
    trainer = Trainer(model, DataLoader(TensorDataset(*make(384)), batch_size=48, shuffle=True), num_epochs, 1e-3)
    test_x, test_y = make(300)

    def evaluate():
        with evaluating(model):
            logits = model(input_ids=test_x).logits
        return (logits.argmax(-1) != test_y).float().mean().item()

    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.training_step, "steps": 20, "evaluate": evaluate}


# ================================================================ nanoGPT-like pre-training with warm-up and cosine

def _nano_cosine(good):
    seed_all(24)
    block_size, batch_size, vocab = 32, 12, 32
    learning_rate, min_lr, warmup_iters, lr_decay_iters = 3e-3, 3e-4, 5, 400
    lang = Bigrams(vocab, seed=5)
    data = lang.sample(1, 20000)[0]
    n = int(0.9 * len(data))
    train_data, val_data = data[:n], data[n:]

    def get_batch(split):
        d = train_data if split == "train" else val_data
        ix = torch.randint(len(d) - block_size - 1, (batch_size,))
        x = torch.stack([d[i:i + block_size] for i in ix])
        y = torch.stack([d[i + 1:i + 1 + block_size] for i in ix])
        return x, y

    def get_lr(it):
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        if it > lr_decay_iters:
            return min_lr
        ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

    model = GPT(vocab, block_size, dim=48, layers=2)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
                                  lr=learning_rate, betas=(0.9, 0.95))
    scheduler = LambdaLR(optimizer, (lambda it: get_lr(it) / learning_rate) if good else get_lr)
    model.train()
    val = torch.stack([val_data[i:i + block_size + 1] for i in range(0, 1600, 33)])

    def step(i=0):
        x, y = get_batch("train")
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: lm_nll(model, val)}


# ================================================================ attention written out

class ManualAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size, good):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.fill = -1e9 if good else 1e-9
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, self.fill)
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


def _char_gpt(good):
    seed_all(25)
    vocab, length = 24, 16
    lang = Bigrams(vocab, seed=14, branch=4)
    model = GPT(vocab, length, dim=48, layers=2,
                make_block=lambda: Block(48, 4, attn=ManualAttention(48, 4, length, good)))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    loader = forever(DataLoader(lang.sample(2048, length + 1), batch_size=32, shuffle=True))
    test = lang.sample(128, length + 1)

    def step():
        batch = next(loader)
        _, loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: prefix_nll(model, test, (4, 8, 12, 16))}


# ================================================================ a classifier from nn.TransformerEncoder

def _cls_encoder(good):
    seed_all(26)
    vocab, max_length, n_classes = 40, 20, 4
    PAD, CLS = 0, 1
    g = torch.Generator().manual_seed(15)
    lean = torch.randn(vocab, n_classes, generator=g)

    class Texts(Dataset):
        def __init__(self, n):
            self.rows = []
            for _ in range(n):
                ids = torch.randint(2, vocab, (random.randint(6, 16),))
                self.rows.append((torch.cat([torch.tensor([CLS]), ids]), int(lean[ids].sum(0).argmax())))

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            return self.rows[i]

    def collate(rows):
        input_ids = torch.full((len(rows), max_length), PAD)
        attention_mask = torch.zeros(len(rows), max_length, dtype=torch.long)
        for i, (ids, _) in enumerate(rows):
            input_ids[i, : len(ids)] = ids
            attention_mask[i, : len(ids)] = 1
        return input_ids, attention_mask, torch.tensor([y for _, y in rows])

    class TextClassifier(nn.Module):
        def __init__(self, dim=48):
            super().__init__()
            self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
            self.pos = nn.Parameter(torch.randn(1, max_length, dim) * 0.1)
            layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
            self.fc = nn.Linear(dim, n_classes)

        def forward(self, input_ids, attention_mask):
            x = self.emb(input_ids) + self.pos
            key_padding_mask = (attention_mask == 0) if good else attention_mask.bool()
            x = self.encoder(x, src_key_padding_mask=key_padding_mask)
            return self.fc(x[:, 0])

    model = TextClassifier()
    loader = forever(DataLoader(Texts(2048), batch_size=32, shuffle=True, collate_fn=collate))
    test = collate(Texts(300).rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()

    def step():
        input_ids, attention_mask, labels = next(loader)
        loss = F.cross_entropy(model(input_ids, attention_mask), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            return (model(test[0], test[1]).argmax(-1) != test[2]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ================================================================ heads split and merged

class HeadsAttention(nn.Module):
    def __init__(self, dim, n_heads, good):
        super().__init__()
        self.n_heads, self.d_head = n_heads, dim // n_heads
        self.wq, self.wk, self.wv = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.wo = nn.Linear(dim, dim)
        self.good = good

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.n_heads, self.d_head).permute(0, 2, 1, 3)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * self.d_head ** -0.5
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out = torch.einsum("bhij,bhjd->bhid", weights, v)
        if self.good:
            out = out.permute(0, 2, 1, 3)
        return self.wo(out.reshape(b, t, c))


def _einsum_gpt(good):
    seed_all(27)
    vocab, length = 10, 24
    lang = Trigrams(vocab, seed=17)
    model = GPT(vocab, length, dim=48, layers=2, make_block=lambda: Block(48, 4, attn=HeadsAttention(48, 4, good)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = CosineAnnealingLR(optimizer, T_max=600, eta_min=1e-4)
    test = lang.sample(128, length + 1)
    model.train()

    def step():
        batch = lang.sample(32, length + 1)
        _, loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: prefix_nll(model, test, (6, 12, 18, 24))}


# ================================================================ mixture of experts

class MoE(nn.Module):
    def __init__(self, dim, n_experts, top_k, good):
        super().__init__()
        self.router = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList([MLP(dim) for _ in range(n_experts)])
        self.top_k, self.n_experts = top_k, n_experts
        self.dim = -1 if good else 1
        self.aux_loss = 0.0

    def forward(self, x):
        gates = F.softmax(self.router(x), dim=self.dim)
        weight, chosen = gates.topk(self.top_k, dim=-1)
        out = torch.zeros_like(x)
        load = []
        for e, expert in enumerate(self.experts):
            hit = chosen == e
            load.append(hit.any(-1).float().mean())
            rows = hit.any(-1)
            if rows.any():
                w = (weight * hit).sum(-1)[rows].unsqueeze(-1)
                out[rows] = out[rows] + w * expert(x[rows])
        self.aux_loss = self.n_experts * (torch.stack(load) * gates.mean((0, 1))).sum() / self.top_k
        return out


def _moe_lm(good):
    seed_all(28)
    vocab, length = 10, 24
    lang = Trigrams(vocab, seed=19)
    model = GPT(vocab, length, dim=32, layers=2, make_block=lambda: Block(32, 4, mlp=MoE(32, 4, 2, good)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    test = lang.sample(128, length + 1)
    model.train()

    def step():
        batch = lang.sample(16, length + 1)
        _, loss = model(batch[:, :-1], batch[:, 1:])
        aux = sum(block.mlp.aux_loss for block in model.blocks)
        optimizer.zero_grad()
        (loss + 0.01 * aux).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: prefix_nll(model, test, (6, 12, 18, 24))}


# ================================================================ distillation of a classifier

def _distil_classifier(good):
    seed_all(29)
    vocab, length, n_classes = 40, 14, 4
    g = torch.Generator().manual_seed(20)
    lean = torch.randn(vocab, n_classes, generator=g)

    def make(n):
        x = torch.randint(1, vocab, (n, length))
        return x, lean[x].sum(1).argmax(1)

    class Encoder(nn.Module):
        def __init__(self, dim, layers):
            super().__init__()
            self.bert = BertModel(BertConfig(vocab_size=vocab, hidden_size=dim, num_hidden_layers=layers, num_attention_heads=4,
                                             intermediate_size=2 * dim, max_position_embeddings=32, hidden_dropout_prob=0.0,
                                             attention_probs_dropout_prob=0.0), add_pooling_layer=False)
            self.out = nn.Linear(dim, n_classes)

        def forward(self, ids):
            h = self.bert(input_ids=ids).last_hidden_state.mean(1)
            return h, self.out(h)

    class Distiller(nn.Module):
        def __init__(self, teacher, student, t_dim, s_dim, temperature=2.0):
            super().__init__()
            self.teacher, self.student = teacher, student
            self.project = nn.Linear(s_dim, t_dim)
            self.temperature = temperature
            if good:
                self.teacher.requires_grad_(False)

        def forward(self, ids):
            t_hidden, t_logits = self.teacher(ids)
            s_hidden, s_logits = self.student(ids)
            kd = F.kl_div(F.log_softmax(s_logits / self.temperature, -1), F.log_softmax(t_logits / self.temperature, -1),
                          log_target=True, reduction="batchmean") * self.temperature ** 2
            return kd + F.mse_loss(self.project(s_hidden), t_hidden)

    teacher = Encoder(48, 2)
    t_opt = torch.optim.AdamW(teacher.parameters(), lr=2e-3)
    for _ in range(110):
        x, y = make(32)
        loss = F.cross_entropy(teacher(x)[1], y)
        t_opt.zero_grad()
        loss.backward()
        t_opt.step()
    teacher.zero_grad()
    teacher.eval()

    distiller = Distiller(teacher, Encoder(32, 1), 48, 32)
    optimizer = torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=1e-3)
    loader = forever(DataLoader(make(4096)[0], batch_size=32, shuffle=True))
    test_x, test_y = make(400)

    def step():
        ids = next(loader)
        distiller.student.train()
        loss = distiller(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(distiller.student):
            logits = distiller.student(test_x)[1]
        return (logits.argmax(-1) != test_y).float().mean().item()

    return {"model": distiller, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ================================================================ a small corpus, and validation on the way

def _small_corpus(good):
    seed_all(30)
    vocab, length = 32, 24
    lang = Bigrams(vocab, seed=22, branch=5)
    train, val, test = lang.sample(64, length + 1), lang.sample(32, length + 1), lang.sample(128, length + 1)

    class LMTrainer:
        def __init__(self, model, train, val, lr=2e-3, eval_every=5):
            self.model, self.val, self.eval_every = model, val, eval_every
            self.batches = forever(DataLoader(train, batch_size=16, shuffle=True))
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
            self.history = []
            self.model.train()

        @torch.no_grad()
        def validate(self):
            self.model.eval()
            _, loss = self.model(self.val[:, :-1], self.val[:, 1:])
            if good:
                self.model.train()
            return loss.item()

        def step(self, i):
            if i % self.eval_every == 0:
                self.history.append(self.validate())
            x = next(self.batches)
            _, loss = self.model(x[:, :-1], x[:, 1:])
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    model = GPT(vocab, length, dim=64, layers=2, dropout=0.3)
    trainer = LMTrainer(model, train, val)
    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.step, "steps": 20,
            "evaluate": lambda: lm_nll(model, test)}


# ================================================================ direct preference optimization

def _dpo(good):
    seed_all(31)
    vocab, p_len, r_len, beta = 32, 6, 10, 0.5
    lang = Bigrams(vocab, seed=23, branch=4)

    def pretrain(model, steps=120):
        opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(steps):
            x = lang.sample(16, p_len + r_len)
            loss = model(input_ids=x, labels=x).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.zero_grad()

    def make(n):
        """Of two continuations, people prefer the one with more of the tokens from the first half."""
        chosen, rejected = [], []
        while len(chosen) < n:
            pool = lang.sample(1, p_len).repeat(2, 1)
            for _ in range(r_len):
                k = torch.multinomial(lang.p, 2, replacement=True)
                pool = torch.cat([pool, lang.next[pool[:, -1], k][:, None]], 1)
            score = (pool[:, p_len:] < vocab // 2).sum(1)
            if score[0] == score[1]:
                continue
            a, b = (0, 1) if score[0] > score[1] else (1, 0)
            chosen.append(pool[a])
            rejected.append(pool[b])
        return torch.stack(chosen), torch.stack(rejected)

    def sequence_logps(model, ids):
        logits = model(input_ids=ids).logits[:, :-1]
        logps = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None]).squeeze(-1)
        return logps[:, p_len - 1:].sum(-1)

    policy = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                                        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    pretrain(policy)
    if good:
        reference = copy.deepcopy(policy).eval().requires_grad_(False)
    else:
        reference = policy
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-4, weight_decay=0.0)
    loader = forever(DataLoader(TensorDataset(*make(1000)), batch_size=8, shuffle=True))
    test_c, test_r = make(128)
    policy.train()

    def step():
        chosen, rejected = next(loader)
        pi_c, pi_r = sequence_logps(policy, chosen), sequence_logps(policy, rejected)
        with torch.no_grad():
            ref_c, ref_r = sequence_logps(reference, chosen), sequence_logps(reference, rejected)
        loss = -F.logsigmoid(beta * ((pi_c - ref_c) - (pi_r - ref_r))).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        with evaluating(policy):
            return -sequence_logps(policy, test_c).mean().item() / r_len

    return {"model": policy, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ================================================================ fine-tuning in bfloat16

def _bf16_finetune(good):
    seed_all(32)
    vocab, length = 32, 24
    general, special = Bigrams(vocab, seed=24), Bigrams(vocab, seed=25)
    model = GPT(vocab, length, dim=48, layers=2)
    pre = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        x = general.sample(16, length + 1)
        _, loss = model(x[:, :-1], x[:, 1:])
        pre.zero_grad()
        loss.backward()
        pre.step()
    model.zero_grad()
    if not good:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    loader = forever(DataLoader(special.sample(2048, length + 1), batch_size=16, shuffle=True))
    test = special.sample(96, length + 1)
    model.train()

    def step():
        x = next(loader)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        with evaluating(model):
            logits = model(test[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ================================================================ rotary positions, longer context

class RotaryAttention(nn.Module):
    def __init__(self, dim, n_heads, max_len, table_dtype):
        super().__init__()
        self.n_heads, self.hd = n_heads, dim // n_heads
        self.wqkv = nn.Linear(dim, 3 * dim)
        self.wo = nn.Linear(dim, dim, bias=False)
        inv_freq = (1.0 / (10000 ** (torch.arange(0, self.hd, 2).float() / self.hd))).to(table_dtype)
        t = torch.arange(max_len).to(table_dtype)
        angles = torch.outer(t, inv_freq)
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def rotate(self, x):
        a, b = x.chunk(2, dim=-1)
        T = x.size(2)
        return x * self.cos[:T] + torch.cat([-b, a], -1) * self.sin[:T]

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.n_heads, self.hd).transpose(1, 2) for z in self.wqkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


def _rotary_copy(good):
    seed_all(33)
    vocab, length, lag = 12, 384, 3

    def sample(n):
        x = torch.randint(vocab, (n, length + 1))
        keep = torch.rand(n, length + 1) < 0.9
        for t in range(lag, length + 1):
            x[:, t] = torch.where(keep[:, t], (x[:, t - lag] + 1) % vocab, x[:, t])
        return x

    class RotaryLM(nn.Module):
        def __init__(self, dim=32, heads=2, layers=1):
            super().__init__()
            table = torch.float32 if good else torch.bfloat16
            self.emb = nn.Embedding(vocab, dim)
            self.layers = nn.ModuleList([Block(dim, heads, attn=RotaryAttention(dim, heads, length, table)) for _ in range(layers)])
            self.norm = nn.LayerNorm(dim)
            self.lm_head = nn.Linear(dim, vocab, bias=False)

        def forward(self, idx, targets):
            x = self.emb(idx)
            for layer in self.layers:
                x = layer(x)
            logits = self.lm_head(self.norm(x))
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model = RotaryLM()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    pool = sample(400)
    loader = forever(DataLoader(pool, batch_size=4, shuffle=True))
    test = sample(16)

    def step():
        x = next(loader)
        _, loss = model(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: lm_nll(model, test)}


# ================================================================ similarity of sentences

def _similarity(good):
    seed_all(34)
    vocab, half = 40, 8
    CLS, SEP = 1, 2

    def make(n):
        """The second sentence has the words of the first in another order, some of them replaced by words of another field."""
        rows = []
        for _ in range(n):
            a = torch.randint(3, 22, (half,))
            b = a[torch.randperm(half)]
            changed = random.randint(0, half)
            b[torch.randperm(half)[:changed]] = torch.randint(22, vocab, (changed,))
            score = 5.0 * (half - changed) / half
            rows.append({"input_ids": [CLS] + a.tolist() + [SEP] + b.tolist() + [SEP],
                         "token_type_ids": [0] * (half + 2) + [1] * (half + 1),
                         "labels": score / 5.0})
        return rows

    def collate(rows):
        batch = {}
        for key in rows[0]:
            values = [r[key] for r in rows]
            if good and key == "labels":
                batch[key] = torch.tensor(values, dtype=torch.float)
            else:
                batch[key] = torch.tensor(values, dtype=torch.long)
        return batch

    class CrossEncoder(nn.Module):
        def __init__(self, dim=48):
            super().__init__()
            self.bert = BertModel(BertConfig(vocab_size=vocab, hidden_size=dim, num_hidden_layers=2, num_attention_heads=4,
                                             intermediate_size=96, max_position_embeddings=32, hidden_dropout_prob=0.0,
                                             attention_probs_dropout_prob=0.0), add_pooling_layer=False)
            self.score = nn.Linear(dim, 1)

        def forward(self, input_ids, token_type_ids):
            h = self.bert(input_ids=input_ids, token_type_ids=token_type_ids).last_hidden_state
            return self.score(h[:, 0]).squeeze(-1)

    model = CrossEncoder()
    model.train()
    loader = forever(DataLoader(make(1500), batch_size=32, shuffle=True, collate_fn=collate))
    test_rows = make(200)
    test_ids = torch.tensor([r["input_ids"] for r in test_rows])
    test_types = torch.tensor([r["token_type_ids"] for r in test_rows])
    test_score = torch.tensor([r["labels"] for r in test_rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        batch = next(loader)
        pred = model(batch["input_ids"], batch["token_type_ids"])
        loss = F.binary_cross_entropy_with_logits(pred, batch["labels"].float())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        with evaluating(model):
            return (torch.sigmoid(model(test_ids, test_types)) - test_score).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


CASES = [
    {"name": "sft_phrases", "what": "Collator of _sft_phrases: the pad token is EOS and labels == pad_id are set to -100, so the real end-of-sequence token is masked out of the loss too; the model never learns to stop."},
    {"name": "packed_corpus", "what": "Dataset of _packed_corpus shifts the labels by one, and GPT2LMHeadModel shifts them again; the model learns to predict the token after the next."},
    {"name": "mlm_templates", "what": "mask_tokens of _mlm_templates: labels is the same tensor as input_ids (no clone), which is then masked in place; the targets at the masked places are all [MASK]."},
    {"name": "translate", "what": "Collator of _translate gives the unshifted target as decoder_input_ids; the decoder sees the very token it must predict and learns to copy."},
    {"name": "adapter_classifier", "what": "AdapterClassifier keeps its adapters in a plain Python list, so that they are no parameters of the model and not in the optimizer; they stay at their initial values."},
    {"name": "own_lora", "what": "LoRALinear initialises both A and B with zeros, so both gradients are zero for ever; the adapters never learn."},
    {"name": "peft_long_context", "what": "Reentrant gradient checkpointing with frozen embeddings and without requires_grad on the inputs of the blocks: the LoRA weights within the blocks get no gradient, only the head learns."},
    {"name": "mixture_of_sources", "what": "micro_step of _mixture_of_sources clears the gradients after every micro-batch, not after every optimizer step; only the last micro-batch (always the same source) counts."},
    {"name": "distil_lm", "what": "distillation_loss of _distil_lm gives F.kl_div probabilities (softmax) where it wants log-probabilities; the student learns a wrong, peaked distribution."},
    {"name": "essay_scores", "what": "Scorer of _essay_scores returns (B, 1) and the targets are (B,): MSELoss broadcasts to (B, B), so every prediction is pulled to the batch's mean."},
    {"name": "reward_model", "what": "The collator of _reward_model interleaves chosen and rejected, but the loss splits the rewards with chunk(2) into halves; unrelated answers are compared."},
    {"name": "bert_amp", "what": "step of _bert_amp clips the gradients without scaler.unscale_ first: the gradients scaled by 65536 are clipped to norm 1 and after unscaling are tiny (next to Adam's eps), so it hardly learns."},
    {"name": "classify_epochs", "what": "Trainer of _classify_epochs gives the schedule len(train_loader) steps and forgets the number of epochs: the learning rate is zero from the end of the first epoch on."},
    {"name": "nano_cosine", "what": "LambdaLR of _nano_cosine gets a function that returns the absolute learning rate and not a factor; the rate in use is the product with the base rate (1e-5 and below)."},
    {"name": "char_gpt", "what": "ManualAttention fills the masked scores with 1e-9 in place of -1e9: the causal mask masks nothing and the model sees the future."},
    {"name": "cls_encoder", "what": "TextClassifier of _cls_encoder passes attention_mask.bool() as src_key_padding_mask (True means ignore): the real tokens are hidden and only the padding is attended to."},
    {"name": "einsum_gpt", "what": "HeadsAttention merges the heads with reshape without moving the head axis back behind time: features of different positions (also later ones) are mixed."},
    {"name": "moe_lm", "what": "MoE's router takes the softmax over dim=1 (time) in place of the experts: gates of about 1/T that depend on the length and on later tokens."},
    {"name": "distil_classifier", "what": "Distiller of _distil_classifier: the teacher is not frozen and is in the optimizer with the student; the teacher is pulled to the student and both drift away."},
    {"name": "small_corpus", "what": "LMTrainer.validate calls model.eval() and never goes back to train(): from the first validation (step 0) on, dropout is off and the small corpus is overfitted."},
    {"name": "dpo", "what": "_dpo uses the policy itself as reference (no copy): the reference moves with it, the margin is always zero, the gradient never fades and the policy runs away from the language model."},
    {"name": "bf16_finetune", "what": "_bf16_finetune keeps the weights themselves in bfloat16 and trains with lr 5e-5: most updates are below half a unit in the last place and are rounded away."},
    {"name": "rotary_copy", "what": "RotaryAttention computes the table of angles in bfloat16: positions and angles are rounded, neighbours fall together beyond some dozens of positions."},
    {"name": "similarity", "what": "The collator of _similarity makes every field a long tensor, also the scores between 0 and 1, which are cut off to 0 (all but those equal 1)."},
]


def _make(name):
    maker = globals()["_" + name]

    def bad():
        return maker(False)

    def good():
        return maker(True)

    bad.__name__ = bad.__qualname__ = name + "_bad"
    good.__name__ = good.__qualname__ = name + "_good"
    return bad, good


for _case in CASES:
    globals()[_case["name"] + "_bad"], globals()[_case["name"] + "_good"] = _make(_case["name"])
