"""Small language-model training programs, each in two versions."""
import contextlib
import copy
import functools
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

PAD, BOS, EOS = 0, 1, 2


# --------------------------------------------------------------------------- data

THE, A, NEAR, DOT = 3, 4, 5, 7
ADJECTIVES = list(range(8, 16))
NOUNS = list(range(16, 28))
VERBS = list(range(28, 36))
PLACES = list(range(36, 40))
STORY_VOCAB = 40


class World:
    """Which adjectives, verbs and places go with which nouns."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.looks = {n: rng.sample(ADJECTIVES, 2) for n in NOUNS}
        self.does = {n: rng.sample(VERBS, 2) for n in NOUNS}
        self.takes = {v: rng.sample(NOUNS, 2) for v in VERBS}
        self.lives = {n: rng.choice(PLACES) for n in NOUNS}

    def sentence(self, noun, rng):
        verb = rng.choice(self.does[noun])
        other = rng.choice(self.takes[verb])
        words = [THE]
        if rng.random() < 0.5:
            words.append(rng.choice(self.looks[noun]))
        words += [noun, verb, A, other, NEAR, self.lives[noun], DOT]
        return words, other

    def story(self, rng, sentences):
        noun = rng.choice(NOUNS)
        words = []
        for _ in range(sentences):
            sentence, noun = self.sentence(noun, rng)
            words += sentence
        return words


def pad_rows(rows, length=None, side="right"):
    length = length or max(len(r) for r in rows)
    ids = torch.full((len(rows), length), PAD)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for k, row in enumerate(rows):
        row = torch.tensor(row[:length])
        where = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        ids[k, where] = row
        mask[k, where] = 1
    return ids, mask


def stories(world, n, seed, sentences=(1, 2, 3)):
    rng, world = random.Random(seed), World(world)
    return pad_rows([[BOS] + world.story(rng, rng.choice(sentences)) + [EOS] for _ in range(n)])


NOT = 3
PRAISE = list(range(8, 16))
BLAME = list(range(16, 24))
FILLER = list(range(24, 40))
REVIEW_VOCAB = 40


def reviews(n, seed):
    rng = random.Random(seed)
    rows, labels = [], []
    for _ in range(n):
        label = rng.randint(0, 1)
        words = []
        for _ in range(rng.randint(4, 7)):
            words += rng.choices(FILLER, k=rng.randint(0, 2))
            good = (rng.random() < 0.9) == bool(label)
            if rng.random() < 0.2:
                words += [NOT, rng.choice(BLAME if good else PRAISE)]
            else:
                words.append(rng.choice(PRAISE if good else BLAME))
        rows.append([BOS] + words + [EOS])
        labels.append(label)
    ids, mask = pad_rows(rows, 24)
    return ids, mask, torch.tensor(labels)


ANSWER = 3
COPY, NEXT, PREVIOUS = 4, 5, 6
DIGITS = list(range(8, 18))
TASK_VOCAB = 18


def instructions(n, seed, lengths=(2, 3, 4, 5)):
    rng = random.Random(seed)
    pairs = []
    for _ in range(n):
        task = rng.choice([COPY, NEXT, PREVIOUS])
        digits = [rng.randrange(10) for _ in range(rng.choice(lengths))]
        shift = {COPY: 0, NEXT: 1, PREVIOUS: -1}[task]
        prompt = [BOS, task] + [DIGITS[d] for d in digits] + [ANSWER]
        response = [DIGITS[(d + shift) % 10] for d in digits] + [EOS]
        pairs.append((prompt, response))
    return pairs


def preferences(n, seed):
    """The same opening continued by the facts of world 11 (chosen) or 12 (rejected)."""
    rng = random.Random(seed)
    liked, other = World(11), World(12)
    chosen, rejected = [], []
    while len(chosen) < n:
        noun = rng.choice(NOUNS)
        c, _ = liked.sentence(noun, rng)
        r, _ = other.sentence(noun, rng)
        if c == r:
            continue
        chosen.append([BOS] + c + [EOS])
        rejected.append([BOS] + r + [EOS])
    (c_ids, c_mask), (r_ids, r_mask) = pad_rows(chosen, 11), pad_rows(rejected, 11)
    return c_ids, c_mask, r_ids, r_mask


def loader_for(*tensors, batch_size=16, seed=0):
    return DataLoader(
        TensorDataset(*tensors),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(seed),
    )


def forever(loader):
    while True:
        yield from loader


# --------------------------------------------------------------------------- evaluation


@contextlib.contextmanager
def inference(*modules):
    flags = [(m, m.training) for module in modules for m in module.modules()]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in flags:
            module.training = flag


def masked_labels(ids, mask):
    return ids.masked_fill(mask == 0, -100)


def next_token_nll(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)


def causal_nll(model, ids, mask, labels=None):
    labels = masked_labels(ids, mask) if labels is None else labels
    with inference(model):
        return next_token_nll(model(input_ids=ids, attention_mask=mask).logits, labels).item()


# --------------------------------------------------------------------------- models


def llama_config(vocab, **kw):
    base = dict(
        vocab_size=vocab, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )
    return LlamaConfig(**{**base, **kw})


def gpt2_config(vocab, **kw):
    base = dict(
        vocab_size=vocab, n_embd=48, n_layer=2, n_head=4, n_positions=64, pad_token_id=PAD, bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return GPT2Config(**{**base, **kw})


def bert_config(vocab, **kw):
    base = dict(
        vocab_size=vocab, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=PAD,
    )
    return BertConfig(**{**base, **kw})


def pretrain(model, ids, mask, steps, lr=3e-3):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    batches = forever(loader_for(ids, mask, batch_size=32, seed=5))
    for _ in range(steps):
        x, m = next(batches)
        loss = model(input_ids=x, attention_mask=m, labels=masked_labels(x, m)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


@functools.lru_cache(maxsize=None)
def pretrained_llama(layers=2):
    torch.manual_seed(100)
    return pretrain(LlamaForCausalLM(llama_config(STORY_VOCAB, num_hidden_layers=layers)), *stories(1, 1000, 1), steps=250)


@functools.lru_cache(maxsize=None)
def pretrained_mistral():
    torch.manual_seed(101)
    return pretrain(MistralForCausalLM(mistral_config()), *stories(1, 1000, 1), steps=250)


@functools.lru_cache(maxsize=None)
def pretrained_gpt2():
    torch.manual_seed(102)
    return pretrain(GPT2LMHeadModel(gpt2_config(STORY_VOCAB)), *stories(1, 1000, 1), steps=300)


@functools.lru_cache(maxsize=None)
def review_gpt2():
    torch.manual_seed(103)
    ids, mask, _ = reviews(1500, 2)
    return pretrain(GPT2LMHeadModel(gpt2_config(REVIEW_VOCAB)), ids, mask, steps=120)


@functools.lru_cache(maxsize=None)
def two_world_gpt2():
    torch.manual_seed(105)
    c_ids, c_mask, r_ids, r_mask = preferences(800, 3)
    model = GPT2LMHeadModel(gpt2_config(STORY_VOCAB, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return pretrain(model, torch.cat([c_ids, r_ids]), torch.cat([c_mask, r_mask]), steps=250)


@functools.lru_cache(maxsize=None)
def two_world_llama():
    torch.manual_seed(106)
    c_ids, c_mask, r_ids, r_mask = preferences(800, 3)
    model = LlamaForCausalLM(llama_config(STORY_VOCAB))
    return pretrain(model, torch.cat([c_ids, r_ids]), torch.cat([c_mask, r_mask]), steps=250)


def mistral_config(**kw):
    base = dict(
        vocab_size=STORY_VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=None, pad_token_id=PAD, bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return MistralConfig(**{**base, **kw})


def qwen2_config(vocab, **kw):
    base = dict(
        vocab_size=vocab, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=PAD,
        bos_token_id=BOS, eos_token_id=EOS,
    )
    return Qwen2Config(**{**base, **kw})


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, dropout, linear):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.c_attn = linear(n_embd, 3 * n_embd)
        self.c_proj = linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, n_embd, linear=nn.Linear):
        super().__init__()
        self.c_fc = linear(n_embd, 4 * n_embd)
        self.c_proj = linear(4 * n_embd, n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, dropout, linear, mlp):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, dropout, linear)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = mlp(n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab, block_size, n_layer=2, n_head=4, n_embd=48, dropout=0.0, linear=nn.Linear, mlp=None,
                 tied=False, init_embeddings=True):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.drop = nn.Dropout(dropout)
        mlp = mlp or (lambda width: MLP(width, linear))
        self.h = nn.ModuleList([Block(n_embd, n_head, dropout, linear, mlp) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.init_types = (nn.Linear, nn.Embedding) if init_embeddings else (nn.Linear,)
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer))
        if tied:
            self.lm_head.weight = self.wte.weight

    def _init_weights(self, module):
        if isinstance(module, self.init_types):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def story_stream(world, n, seed):
    """All stories in one long row of tokens, as in nanoGPT's train.bin."""
    rng, world = random.Random(seed), World(world)
    tokens = []
    for _ in range(n):
        tokens += [BOS] + world.story(rng, rng.choice((1, 2, 3)))
    return torch.tensor(tokens)


def random_blocks(stream, block_size, batch_size, generator):
    starts = torch.randint(len(stream) - block_size - 1, (batch_size,), generator=generator)
    x = torch.stack([stream[s : s + block_size] for s in starts.tolist()])
    y = torch.stack([stream[s + 1 : s + 1 + block_size] for s in starts.tolist()])
    return x, y


def stream_probe(model, world, block_size):
    stream = story_stream(world, 200, 77)
    n = (len(stream) - 1) // block_size
    x = stream[: n * block_size].view(n, block_size)
    y = stream[1 : n * block_size + 1].view(n, block_size)

    def probe():
        with inference(model):
            return model(x, y)[1].item()

    return probe


def decay_groups(model, weight_decay=0.1):
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


# --------------------------------------------------------------------------- 1


def _gpt2_gradual_unfreeze(mended):
    weights = review_gpt2()
    torch.manual_seed(1)
    model = GPT2ForSequenceClassification(gpt2_config(REVIEW_VOCAB, num_labels=2))
    model.load_state_dict({k: v for k, v in weights.items() if k.startswith("transformer.")}, strict=False)
    model.transformer.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    ids, mask, labels = reviews(2000, 21)
    batches = forever(loader_for(ids, mask, labels, seed=1))
    model.train()

    def step(i):
        if i == 6:
            model.transformer.requires_grad_(True)
            if mended:
                optimizer.add_param_group({"params": list(model.transformer.parameters()), "lr": 5e-4})
        x, m, y = next(batches)
        loss = model(input_ids=x, attention_mask=m, labels=y).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held = reviews(400, 22)

    def probe():
        with inference(model):
            return F.cross_entropy(model(input_ids=held[0], attention_mask=held[1]).logits, held[2]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------- 2


def _llama_lora_classifier(mended):
    torch.manual_seed(2)
    ids, mask, labels = reviews(1500, 2)
    lm = LlamaForCausalLM(llama_config(REVIEW_VOCAB))
    weights = pretrain(lm, ids, mask, steps=120)
    torch.manual_seed(2)
    base = LlamaForSequenceClassification(llama_config(REVIEW_VOCAB, num_labels=2))
    base.load_state_dict({k: v for k, v in weights.items() if k.startswith("model.")}, strict=False)
    task = {"task_type": TaskType.SEQ_CLS} if mended else {}
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **task))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    ids, mask, labels = reviews(2000, 21)
    batches = forever(loader_for(ids, mask, labels, seed=2))
    model.train()

    def step(i):
        x, m, y = next(batches)
        loss = model(input_ids=x, attention_mask=m, labels=y).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    held = reviews(400, 22)

    def probe():
        with inference(model):
            return F.cross_entropy(model(input_ids=held[0], attention_mask=held[1]).logits, held[2]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------- 3


class CheckpointedGPT(GPT):
    def __init__(self, *args, use_reentrant=False, **kw):
        super().__init__(*args, **kw)
        self.use_reentrant = use_reentrant

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device)))
        for block in self.h:
            if self.training:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


@functools.lru_cache(maxsize=None)
def pretrained_gpt(block_size):
    torch.manual_seed(107)
    model = GPT(STORY_VOCAB, block_size)
    stream, generator = story_stream(1, 1500, 1), torch.Generator().manual_seed(107)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=2e-3)
    for _ in range(300):
        _, loss = model(*random_blocks(stream, block_size, 16, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def _gpt_lora_checkpointing(mended):
    block_size = 24
    weights = pretrained_gpt(block_size)
    torch.manual_seed(3)
    base = CheckpointedGPT(STORY_VOCAB, block_size, use_reentrant=not mended)
    base.load_state_dict(weights)
    model = get_peft_model(base, LoraConfig(
        r=8, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"], modules_to_save=["lm_head"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    stream, generator = story_stream(2, 1000, 31), torch.Generator().manual_seed(3)
    model.train()

    def step(i):
        _, loss = model(*random_blocks(stream, block_size, 16, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": stream_probe(model, 2, block_size)}


# --------------------------------------------------------------------------- 4


def _gpt2_sft_pad_token(mended):
    torch.manual_seed(4)
    pad = EOS
    model = GPT2LMHeadModel(gpt2_config(TASK_VOCAB, pad_token_id=pad))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def encode(pairs):
        width = max(len(p) + len(r) for p, r in pairs)
        ids = torch.full((len(pairs), width), pad)
        mask = torch.zeros(len(pairs), width, dtype=torch.long)
        prompt = torch.zeros(len(pairs), width, dtype=torch.bool)
        for k, (p, r) in enumerate(pairs):
            ids[k, : len(p) + len(r)] = torch.tensor(p + r)
            mask[k, : len(p) + len(r)] = 1
            prompt[k, : len(p)] = True
        return ids, mask, prompt

    batches = forever(loader_for(*encode(instructions(2000, 41)), seed=4))
    model.train()

    def step(i):
        x, m, prompt = next(batches)
        labels = x.clone()
        if mended:
            labels[m == 0] = -100
        else:
            labels[labels == pad] = -100
        labels[prompt] = -100
        loss = model(input_ids=x, attention_mask=m, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    ids, mask, prompt = encode(instructions(300, 42))
    answers = masked_labels(ids, mask).masked_fill(prompt, -100)
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: causal_nll(model, ids, mask, answers)}


# --------------------------------------------------------------------------- preference helpers


def sequence_logps(logits, labels, shift=True):
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    keep = labels != -100
    logps = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None]).squeeze(-1)
    return (logps * keep).sum(-1)


def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta):
    return -F.logsigmoid(beta * ((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected))).mean()


# --------------------------------------------------------------------------- 5


def _dpo_lora_reference(mended):
    weights = two_world_llama()
    torch.manual_seed(5)
    base = LlamaForCausalLM(llama_config(STORY_VOCAB))
    base.load_state_dict(weights)
    model = get_peft_model(base, LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type=TaskType.CAUSAL_LM))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
    batches = forever(loader_for(*preferences(800, 51), seed=5))
    model.train()

    def logps(ids, mask):
        return sequence_logps(model(input_ids=ids, attention_mask=mask).logits, masked_labels(ids, mask))

    def step(i):
        c, cm, r, rm = next(batches)
        ids, mask = torch.cat([c, r]), torch.cat([cm, rm])
        with torch.no_grad(), model.disable_adapter() if mended else contextlib.nullcontext():
            ref_chosen, ref_rejected = logps(ids, mask).chunk(2)
        chosen, rejected = logps(ids, mask).chunk(2)
        loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.5)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        return loss.item()

    held = preferences(300, 52)
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: causal_nll(model, held[0], held[1])}


# --------------------------------------------------------------------------- 6


def _dpo_token_logps(mended):
    weights = two_world_gpt2()
    torch.manual_seed(6)
    config = gpt2_config(STORY_VOCAB, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    policy = GPT2LMHeadModel(config)
    policy.load_state_dict(weights)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    batches = forever(loader_for(*preferences(800, 61), seed=6))
    policy.train()

    def step(i):
        c, cm, r, rm = next(batches)
        ids, mask = torch.cat([c, r]), torch.cat([cm, rm])
        labels = masked_labels(ids, mask)
        with torch.no_grad():
            ref_chosen, ref_rejected = sequence_logps(
                reference(input_ids=ids, attention_mask=mask).logits, labels, shift=mended).chunk(2)
        chosen, rejected = sequence_logps(
            policy(input_ids=ids, attention_mask=mask).logits, labels, shift=mended).chunk(2)
        loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.2)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    c, cm, r, rm = preferences(300, 62)
    ids, mask = torch.cat([c, r]), torch.cat([cm, rm])
    labels = masked_labels(ids, mask)

    def probe():
        with inference(policy, reference):
            p = sequence_logps(policy(input_ids=ids, attention_mask=mask).logits, labels).chunk(2)
            q = sequence_logps(reference(input_ids=ids, attention_mask=mask).logits, labels).chunk(2)
            return dpo_loss(p[0], p[1], q[0], q[1], beta=0.2).item()

    return {"model": {"policy": policy, "reference": reference}, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": probe}


# --------------------------------------------------------------------------- 7


class Distiller(nn.Module):
    def __init__(self, teacher, student, temperature=2.0):
        super().__init__()
        self.teacher, self.student, self.temperature = teacher, student, temperature

    def forward(self, ids, mask):
        t = self.teacher(input_ids=ids, attention_mask=mask).logits[mask == 1] / self.temperature
        s = self.student(input_ids=ids, attention_mask=mask).logits[mask == 1] / self.temperature
        kl = F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="batchmean")
        return kl * self.temperature**2


def _distil_llama(mended):
    weights = pretrained_llama(3)
    torch.manual_seed(7)
    teacher = LlamaForCausalLM(llama_config(STORY_VOCAB, num_hidden_layers=3))
    teacher.load_state_dict(weights)
    teacher.eval()
    if mended:
        teacher.requires_grad_(False)
    student = LlamaForCausalLM(llama_config(STORY_VOCAB, num_hidden_layers=1))
    student.train()
    model = Distiller(teacher, student)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    batches = forever(loader_for(*stories(1, 1000, 71), seed=7))

    def step(i):
        x, m = next(batches)
        loss = model(x, m)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        return loss.item()

    held = stories(1, 300, 72)
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: causal_nll(student, *held)}


# --------------------------------------------------------------------------- 8


def _distil_gpt2_cached_logits(mended):
    weights = pretrained_gpt2()
    torch.manual_seed(8)
    teacher = GPT2LMHeadModel(gpt2_config(STORY_VOCAB))
    teacher.load_state_dict(weights)
    teacher.eval().requires_grad_(False)
    student = GPT2LMHeadModel(gpt2_config(STORY_VOCAB, n_embd=32, n_layer=1))
    student.train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    ids, mask = stories(1, 800, 81)
    with torch.no_grad():
        cache = torch.cat([teacher(input_ids=x, attention_mask=m).logits
                           for x, m in zip(ids.split(100), mask.split(100))])
    batch_size = 16
    loader = loader_for(torch.arange(len(ids)), ids, mask, batch_size=batch_size, seed=8)
    batches = forever(loader)
    tau = 2.0

    def step(i):
        index, x, m = next(batches)
        if mended:
            target = cache[index]
        else:
            start = (i % len(loader)) * batch_size
            target = cache[start : start + batch_size]
        out = student(input_ids=x, attention_mask=m, labels=masked_labels(x, m))
        keep = m == 1
        kl = F.kl_div((out.logits[keep] / tau).log_softmax(-1), (target[keep] / tau).softmax(-1), reduction="batchmean")
        loss = 0.8 * tau**2 * kl + 0.2 * out.loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held = stories(1, 300, 82)
    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: causal_nll(student, *held)}


# --------------------------------------------------------------------------- 9


def _llama_lora_new_tokens(mended):
    weights = pretrained_llama()
    torch.manual_seed(9)
    base = LlamaForCausalLM(llama_config(STORY_VOCAB))
    base.load_state_dict(weights)
    names = [STORY_VOCAB + k for k in range(6)]
    base.resize_token_embeddings(STORY_VOCAB + len(names))
    extra = {"modules_to_save": ["embed_tokens", "lm_head"]} if mended else {}
    model = get_peft_model(base, LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type=TaskType.CAUSAL_LM,
        **extra))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)

    def renamed(n, seed):
        ids, mask = stories(1, n, seed)
        for noun, name in zip(NOUNS[:6], names):
            ids[ids == noun] = name
        return ids, mask

    batches = forever(loader_for(*renamed(800, 91), seed=9))
    model.train()

    def step(i):
        x, m = next(batches)
        loss = model(input_ids=x, attention_mask=m, labels=masked_labels(x, m)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        return loss.item()

    held = renamed(300, 92)
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: causal_nll(model, *held)}


# --------------------------------------------------------------------------- 10


def _llama_accumulation_schedule(mended):
    torch.manual_seed(10)
    model = LlamaForCausalLM(llama_config(STORY_VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    accumulation, updates = 4, 240
    scheduler = get_linear_schedule_with_warmup(optimizer, 12, updates)
    batches = forever(loader_for(*stories(1, 1500, 101), batch_size=8, seed=10))
    model.train()

    def step(i):
        total = 0.0
        for _ in range(accumulation):
            x, m = next(batches)
            loss = model(input_ids=x, attention_mask=m, labels=masked_labels(x, m)).loss / accumulation
            loss.backward()
            total += loss.item()
            if not mended:
                scheduler.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if mended:
            scheduler.step()
        optimizer.zero_grad()
        return total

    held = stories(1, 300, 102)
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: causal_nll(model, *held)}


# --------------------------------------------------------------------------- 11


def _bert_mlm_grad_scaler(mended):
    torch.manual_seed(11)
    mask_token = STORY_VOCAB
    model = BertForMaskedLM(bert_config(STORY_VOCAB + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    batches = forever(loader_for(*stories(1, 1500, 111), seed=11))
    model.train()

    def hide(x, m, generator=None):
        hidden = (torch.rand(x.shape, generator=generator) < 0.2) & (m == 1) & (x > EOS)
        return x.masked_fill(hidden, mask_token), x.masked_fill(~hidden, -100)

    def step(i):
        x, m = next(batches)
        inputs, labels = hide(x, m)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=inputs, attention_mask=m, labels=labels).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if mended:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    ids, mask = stories(1, 300, 112)
    inputs, labels = hide(ids, mask, torch.Generator().manual_seed(113))

    def probe():
        with inference(model):
            return model(input_ids=inputs, attention_mask=mask, labels=labels).loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------- 12


def _qwen2_bf16_finetune(mended):
    torch.manual_seed(12)
    model = Qwen2ForCausalLM(qwen2_config(STORY_VOCAB))
    pretrain(model, *stories(1, 1000, 1), steps=250)
    torch.manual_seed(12)
    if not mended:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)
    batches = forever(loader_for(*stories(2, 800, 121), seed=12))
    model.train()

    def step(i):
        x, m = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=x, attention_mask=m, labels=masked_labels(x, m)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held = stories(2, 300, 122)
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: causal_nll(model, *held)}


# --------------------------------------------------------------------------- 13


class SwitchFeedForward(nn.Module):
    def __init__(self, n_embd, experts=8, capacity_factor=1.25, differentiable_balance=True):
        super().__init__()
        self.router = nn.Linear(n_embd, experts, bias=False)
        self.experts = nn.ModuleList([MLP(n_embd) for _ in range(experts)])
        self.capacity_factor = capacity_factor
        self.differentiable_balance = differentiable_balance
        self.balance, self.dropped = None, None

    def forward(self, x):
        tokens = x.reshape(-1, x.size(-1))
        probs = self.router(tokens).softmax(-1)
        gate, choice = probs.max(-1)
        assigned = F.one_hot(choice, len(self.experts)).float()
        capacity = math.ceil(self.capacity_factor * len(tokens) / len(self.experts))
        rank = (assigned.cumsum(0) * assigned).sum(-1)
        kept = rank <= capacity
        load = assigned.mean(0)
        importance = probs.mean(0) if self.differentiable_balance else load
        self.balance = len(self.experts) * (load * importance).sum()
        self.dropped = 1.0 - kept.float().mean()
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            rows = ((choice == e) & kept).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(tokens[rows]) * gate[rows, None])
        return out.view_as(x)


def _switch_balance(mended):
    torch.manual_seed(13)
    block_size = 24
    model = GPT(STORY_VOCAB, block_size, mlp=lambda width: SwitchFeedForward(width, differentiable_balance=mended))
    optimizer = torch.optim.AdamW(decay_groups(model, 0.01), lr=1e-3)
    stream = story_stream(1, 1500, 131)
    generator = torch.Generator().manual_seed(13)
    layers = [block.mlp for block in model.h]
    model.train()

    def step(i):
        x, y = random_blocks(stream, block_size, 16, generator)
        _, loss = model(x, y)
        total = loss + 0.02 * sum(layer.balance for layer in layers)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held_stream = story_stream(1, 200, 132)
    n = len(held_stream) // block_size
    held = held_stream[: n * block_size].view(n, block_size)

    def probe():
        """Share of held-out tokens that find their expert full."""
        with inference(model):
            dropped = []
            for x in held.split(16):
                model(x)
                dropped += [layer.dropped.item() for layer in layers]
            return sum(dropped) / len(dropped)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------- 14


class QuantLinear(nn.Linear):
    def __init__(self, in_features, out_features, bits=3, straight_through=True):
        super().__init__(in_features, out_features)
        self.top = 2 ** (bits - 1) - 1
        self.straight_through = straight_through

    def forward(self, x):
        w = self.weight
        scale = w.detach().abs().amax(1, keepdim=True).clamp_min(1e-8) / self.top
        q = torch.round(w / scale).clamp(-self.top, self.top) * scale
        if self.straight_through:
            q = w + (q - w).detach()
        return F.linear(x, q, self.bias)


def _gpt_qat(mended):
    torch.manual_seed(14)
    block_size = 24
    stream = story_stream(1, 1500, 141)
    generator = torch.Generator().manual_seed(14)
    model = GPT(STORY_VOCAB, block_size, linear=lambda a, b: QuantLinear(a, b, bits=4, straight_through=mended))
    optimizer = torch.optim.AdamW(decay_groups(model, 0.01), lr=2e-3)
    model.train()

    def step(i):
        _, loss = model(*random_blocks(stream, block_size, 16, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": stream_probe(model, 1, block_size)}


# --------------------------------------------------------------------------- 15


def _qwen2_response_mask(mended):
    torch.manual_seed(15)
    model = Qwen2ForCausalLM(qwen2_config(TASK_VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    class Instructions(Dataset):
        def __init__(self, pairs):
            self.pairs = pairs

        def __len__(self):
            return len(self.pairs)

        def __getitem__(self, k):
            return self.pairs[k]

    def collate(pairs):
        ids, mask = pad_rows([p + r for p, r in pairs])
        labels = masked_labels(ids, mask)
        for k, (p, r) in enumerate(pairs):
            if mended:
                labels[k, : len(p)] = -100
            else:
                labels[k, : -len(r)] = -100
        return ids, mask, labels

    loader = DataLoader(Instructions(instructions(2000, 151, lengths=(2, 3, 4, 5, 6))), batch_size=16, shuffle=True,
                        drop_last=True, collate_fn=collate, generator=torch.Generator().manual_seed(15))
    batches = forever(loader)
    model.train()

    def step(i):
        x, m, labels = next(batches)
        loss = model(input_ids=x, attention_mask=m, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    pairs = instructions(300, 152, lengths=(2, 3, 4, 5, 6))
    ids, mask = pad_rows([p + r for p, r in pairs])
    answers = masked_labels(ids, mask)
    for k, (p, r) in enumerate(pairs):
        answers[k, : len(p)] = -100
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: causal_nll(model, ids, mask, answers)}


# --------------------------------------------------------------------------- 16


def _gpt2_periodic_validation(mended):
    torch.manual_seed(17)
    model = GPT2LMHeadModel(gpt2_config(STORY_VOCAB, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2))
    optimizer = torch.optim.AdamW(decay_groups(model), lr=2e-3)
    batches = forever(loader_for(*stories(1, 96, 171), seed=17))
    val_ids, val_mask = stories(1, 64, 172)
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            history.append(model(input_ids=val_ids, attention_mask=val_mask,
                                 labels=masked_labels(val_ids, val_mask)).loss.item())
        if mended:
            model.train()

    model.train()

    def step(i):
        x, m = next(batches)
        loss = model(input_ids=x, attention_mask=m, labels=masked_labels(x, m)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (i + 1) % 10 == 0:
            validate()
        return loss.item()

    held = stories(1, 300, 173)
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: causal_nll(model, *held)}


# --------------------------------------------------------------------------- 17


class RewardModel(nn.Module):
    def __init__(self, config, last_token=True):
        super().__init__()
        self.backbone = LlamaModel(config)
        self.reward = nn.Linear(config.hidden_size, 1)
        self.last_token = last_token

    def forward(self, ids, mask):
        hidden = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        if self.last_token:
            pooled = hidden[torch.arange(len(ids)), mask.sum(1) - 1]
        else:
            pooled = hidden[:, 0]
        return self.reward(pooled).squeeze(-1)


def _reward_pooling(mended):
    weights = two_world_llama()
    torch.manual_seed(18)
    model = RewardModel(llama_config(STORY_VOCAB), last_token=mended)
    model.backbone.load_state_dict({k[len("model."):]: v for k, v in weights.items() if k.startswith("model.")})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    batches = forever(loader_for(*preferences(1000, 181), seed=18))
    model.train()

    def step(i):
        c, cm, r, rm = next(batches)
        chosen, rejected = model(torch.cat([c, r]), torch.cat([cm, rm])).chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    c, cm, r, rm = preferences(300, 182)

    def probe():
        with inference(model):
            return -F.logsigmoid(model(c, cm) - model(r, rm)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------- 18


def _bert_mlm_labels(mended):
    torch.manual_seed(19)
    mask_token = STORY_VOCAB
    model = BertForMaskedLM(bert_config(STORY_VOCAB + 1))
    optimizer = torch.optim.AdamW(decay_groups(model, 0.01), lr=2e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, 320)
    batches = forever(loader_for(*stories(1, 1500, 191), seed=19))
    model.train()

    def hide(x, m, generator=None):
        labels = x.clone() if mended else x
        hidden = (torch.rand(x.shape, generator=generator) < 0.2) & (m == 1) & (x > EOS)
        x[hidden] = mask_token
        return x, labels.masked_fill(~hidden, -100)

    def step(i):
        x, m = next(batches)
        inputs, labels = hide(x, m)
        loss = model(input_ids=inputs, attention_mask=m, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    ids, mask = stories(1, 300, 192)
    hidden = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(193)) < 0.2) & (mask == 1) & (ids > EOS)
    held_inputs, held_labels = ids.masked_fill(hidden, mask_token), ids.masked_fill(~hidden, -100)

    def probe():
        with inference(model):
            return model(input_ids=held_inputs, attention_mask=mask, labels=held_labels).loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------- 19


def _t5_smoothed_seq2seq(mended):
    torch.manual_seed(20)
    config = T5Config(vocab_size=TASK_VOCAB, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, pad_token_id=PAD,
                      eos_token_id=EOS, decoder_start_token_id=PAD, dropout_rate=0.1)
    model = T5ForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def encode(pairs):
        ids, mask = pad_rows([p[1:] for p, _ in pairs])
        target, target_mask = pad_rows([r for _, r in pairs])
        return ids, mask, masked_labels(target, target_mask)

    batches = forever(loader_for(*encode(instructions(2000, 201)), seed=20))
    model.train()

    def step(i):
        x, m, labels = next(batches)
        if mended:
            decoder_inputs = model.prepare_decoder_input_ids_from_labels(labels=labels)
        else:
            decoder_inputs = labels.masked_fill(labels == -100, PAD)
        logits = model(input_ids=x, attention_mask=m, decoder_input_ids=decoder_inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    held = encode(instructions(300, 202))

    def probe():
        with inference(model):
            return model(input_ids=held[0], attention_mask=held[1], labels=held[2]).loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------- 20


def _mistral_second_adapter(mended):
    weights = pretrained_mistral()
    torch.manual_seed(21)
    base = MistralForCausalLM(mistral_config())
    base.load_state_dict(weights)
    config = LoraConfig(r=8, lora_alpha=16, task_type=TaskType.CAUSAL_LM,
                        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    model = get_peft_model(base, config, adapter_name="general")
    model.add_adapter("legal", config)
    if mended:
        model.set_adapter("legal")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    if not mended:
        model.set_adapter("legal")
    batches = forever(loader_for(*stories(2, 800, 211), seed=21))
    model.train()

    def step(i):
        x, m = next(batches)
        loss = model(input_ids=x, attention_mask=m, labels=masked_labels(x, m)).loss
        model.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    held = stories(2, 300, 212)
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: causal_nll(model, *held)}


# --------------------------------------------------------------------------- 21


def _llama_frozen_trunk(mended):
    layers = 3
    weights = pretrained_llama(layers)
    torch.manual_seed(22)
    model = LlamaForCausalLM(llama_config(STORY_VOCAB, num_hidden_layers=layers))
    model.load_state_dict(weights)
    for module in [model.model.embed_tokens, *model.model.layers[:-1], model.model.norm, model.lm_head]:
        if mended:
            module.requires_grad_(False)
        else:
            module.requires_grad = False
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batches = forever(loader_for(*stories(3, 200, 221), seed=22))
    model.train()

    def step(i):
        x, m = next(batches)
        loss = model(input_ids=x, attention_mask=m, labels=masked_labels(x, m)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        return loss.item()

    new, old = stories(3, 300, 222), stories(1, 300, 223)
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: (causal_nll(model, *new) + causal_nll(model, *old)) / 2}


# --------------------------------------------------------------------------- 22


def _gpt_tied_head_init(mended):
    torch.manual_seed(23)
    block_size = 24
    model = GPT(STORY_VOCAB, block_size, n_embd=64, tied=True, init_embeddings=mended)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-3, betas=(0.9, 0.95))
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, 220)
    stream = story_stream(1, 1500, 231)
    generator = torch.Generator().manual_seed(23)
    model.train()

    def step(i):
        _, loss = model(*random_blocks(stream, block_size, 16, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": stream_probe(model, 1, block_size)}


# --------------------------------------------------------------------------- 23


def titled_reviews(n, seed):
    """Review text and its title; the title alone gives the verdict away in part of the cases."""
    ids, mask, labels = reviews(n, seed)
    rng = random.Random(seed + 1)
    rows, types = [], []
    for row, m, label in zip(ids.tolist(), mask.tolist(), labels.tolist()):
        text = row[: sum(m)]
        title = rng.choices(FILLER[2:], k=2)
        if rng.random() < 0.3:
            title.append(FILLER[0] if label else FILLER[1])
        rows.append(text + title + [EOS])
        types.append([0] * len(text) + [1] * (len(title) + 1))
    return pad_rows(rows, 28)[0], pad_rows(types, 28)[0], pad_rows(rows, 28)[1], labels


def _bert_pair_classifier(mended):
    torch.manual_seed(24)
    model = BertForSequenceClassification(bert_config(REVIEW_VOCAB, num_labels=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    batches = forever(loader_for(*titled_reviews(2000, 241), batch_size=16, seed=24))
    model.train()

    def step(i):
        x, types, m, y = next(batches)
        logits = (model(x, m, types) if mended else model(x, types, m)).logits
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    ids, types, mask, labels = titled_reviews(400, 242)

    def probe():
        with inference(model):
            return F.cross_entropy(model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits, labels).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------- 24


FIELDS, FIELD_VALUES = 10, 6


def records(n, seed):
    """Fixed-format records: a kind, then fields whose usual value depends on the kind and the field's place."""
    rules = random.Random(9)
    usual = [[rules.randrange(FIELD_VALUES) for _ in range(FIELDS)] for _ in range(4)]
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        kind = rng.randrange(4)
        length = rng.randint(3, FIELDS)
        values = [usual[kind][k] if rng.random() < 0.95 else rng.randrange(FIELD_VALUES) for k in range(length)]
        rows.append([BOS, 4 + kind] + [8 + v for v in values] + [EOS])
    return rows


def _gpt2_left_padding(mended):
    torch.manual_seed(26)
    vocab = 8 + FIELD_VALUES
    model = GPT2LMHeadModel(gpt2_config(vocab))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    ids, mask = pad_rows(records(1000, 261), 24, side="left")
    batches = forever(loader_for(ids, mask, seed=26))
    model.train()

    def step(i):
        x, m = next(batches)
        positions = {"position_ids": (m.cumsum(1) - 1).clamp_min(0)} if mended else {}
        loss = model(input_ids=x, attention_mask=m, labels=masked_labels(x, m), **positions).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    rows = records(300, 262)
    held = pad_rows(rows)
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: causal_nll(model, *held)}


# --------------------------------------------------------------------------- cases


CASES = [
    {"name": 'gpt2_gradual_unfreeze',
     "what": 'GPT-2 classifier warmed up with a frozen body; at step 6 the body is unfrozen, but its parameters are never added to the optimizer (built from the then trainable ones), so they get gradients and never move.'},
    {"name": 'llama_lora_classifier',
     "what": 'LoRA on LlamaForSequenceClassification without task_type or modules_to_save: the fresh, random score head stays frozen, only the adapters learn.'},
    {"name": 'gpt_lora_checkpointing',
     "what": 'Reentrant gradient checkpointing over blocks whose input needs no gradient (embeddings frozen under LoRA): the adapters inside the blocks get no gradient at all, only the saved lm_head trains.'},
    {"name": 'gpt2_sft_pad_token',
     "what": 'pad token = eos and labels equal to pad are set to -100: the true eos at the end of each answer is masked as well, the model never learns to stop.'},
    {"name": 'dpo_lora_reference',
     "what": 'DPO with a LoRA policy computes the reference log-probabilities with the adapter still active: reference = policy, the loss stays at log 2 with a constant push and nothing anchors the policy, the likelihood of the chosen answers collapses.'},
    {"name": 'dpo_token_logps',
     "what": 'DPO log-probabilities are gathered without shifting logits against labels by one: each position is scored on its own input token.'},
    {"name": 'distil_llama',
     "what": 'Distillation wrapper whose teacher was not frozen: teacher is trained by the KL along with the student (it is in the optimizer and the KL reaches it), both agree on a useless distribution.'},
    {"name": 'distil_gpt2_cached_logits',
     "what": 'Teacher logits cached in dataset order are looked up by batch number while the loader shuffles: the student is taught the logits of other examples.'},
    {"name": 'llama_lora_new_tokens',
     "what": 'New tokens are added by resize_token_embeddings, then LoRA on attention only: the new rows of embed_tokens and lm_head stay frozen at their initialisation.'},
    {"name": 'llama_accumulation_schedule',
     "what": 'With gradient accumulation the LR scheduler is stepped per micro-batch while its horizon counts updates: the rate reaches zero after a quarter of training.'},
    {"name": 'bert_mlm_grad_scaler',
     "what": "fp16 autocast with GradScaler: gradients are clipped to norm 1 before being unscaled, so after the division by 65536 they are around Adam's eps and updates shrink."},
    {"name": 'qwen2_bf16_finetune',
     "what": 'Fine-tuning with the weights themselves in bfloat16 and a small rate: most updates are below half a unit in the last place and are rounded away (good: fp32 weights with bf16 autocast).'},
    {"name": 'switch_balance',
     "what": 'Switch MoE load-balancing loss built from the hard assignment shares alone (load*load instead of load*mean probability): it has no gradient to the router, experts overflow and tokens are dropped.'},
    {"name": 'gpt_qat',
     "what": 'Quantisation-aware training (4 bit) without straight-through estimator: round() gives the quantised weights zero gradients, they stay at their initialisation.'},
    {"name": 'qwen2_response_mask',
     "what": "Instruction tuning masks all but the last len(response) columns of a right-padded row: in shorter rows this hides the answers and leaves only padding (or the answer's tail)."},
    {"name": 'gpt2_periodic_validation',
     "what": 'In-loop validation calls model.eval() and never goes back to train(): dropout is off from step 10 on and the small data set is overfitted.'},
    {"name": 'reward_pooling',
     "what": "Reward model on a causal LM pools the first token's hidden state, which sees only BOS: chosen and rejected always get the same reward."},
    {"name": 'bert_mlm_labels',
     "what": 'MLM labels alias the inputs (no clone) when the mask token is written: the labels at hidden places are the mask token itself.'},
    {"name": 't5_smoothed_seq2seq',
     "what": 'T5 with an own label-smoothed loss passes the unshifted labels as decoder_input_ids: the decoder sees the very token it shall predict and only copies.'},
    {"name": 'mistral_second_adapter',
     "what": "A second LoRA adapter is added and activated only after the optimizer was built: the optimizer holds the first adapter's parameters, the active one never moves."},
    {"name": 'llama_frozen_trunk',
     "what": 'Freezing by setting requires_grad = False as an attribute of modules (not requires_grad_): nothing is frozen, the whole model drifts and forgets the old domain.'},
    {"name": 'gpt_tied_head_init',
     "what": '_init_weights leaves out nn.Embedding, whose N(0,1) weights are tied to the output head: initial logits and loss are huge and training lags.'},
    {"name": 'bert_pair_classifier',
     "what": 'BERT called positionally as (ids, token_types, mask), but the order is (ids, mask, token_types): the first segment is masked out and the types are the padding mask.'},
    {"name": 'gpt2_left_padding',
     "what": "Left-padded batches without position_ids in GPT-2: positions count from the padding, so a real token's position depends on the batch width and unpadded use sees untrained places."},
]


def gpt2_gradual_unfreeze_bad():
    return _gpt2_gradual_unfreeze(False)


def gpt2_gradual_unfreeze_good():
    return _gpt2_gradual_unfreeze(True)


def llama_lora_classifier_bad():
    return _llama_lora_classifier(False)


def llama_lora_classifier_good():
    return _llama_lora_classifier(True)


def gpt_lora_checkpointing_bad():
    return _gpt_lora_checkpointing(False)


def gpt_lora_checkpointing_good():
    return _gpt_lora_checkpointing(True)


def gpt2_sft_pad_token_bad():
    return _gpt2_sft_pad_token(False)


def gpt2_sft_pad_token_good():
    return _gpt2_sft_pad_token(True)


def dpo_lora_reference_bad():
    return _dpo_lora_reference(False)


def dpo_lora_reference_good():
    return _dpo_lora_reference(True)


def dpo_token_logps_bad():
    return _dpo_token_logps(False)


def dpo_token_logps_good():
    return _dpo_token_logps(True)


def distil_llama_bad():
    return _distil_llama(False)


def distil_llama_good():
    return _distil_llama(True)


def distil_gpt2_cached_logits_bad():
    return _distil_gpt2_cached_logits(False)


def distil_gpt2_cached_logits_good():
    return _distil_gpt2_cached_logits(True)


def llama_lora_new_tokens_bad():
    return _llama_lora_new_tokens(False)


def llama_lora_new_tokens_good():
    return _llama_lora_new_tokens(True)


def llama_accumulation_schedule_bad():
    return _llama_accumulation_schedule(False)


def llama_accumulation_schedule_good():
    return _llama_accumulation_schedule(True)


def bert_mlm_grad_scaler_bad():
    return _bert_mlm_grad_scaler(False)


def bert_mlm_grad_scaler_good():
    return _bert_mlm_grad_scaler(True)


def qwen2_bf16_finetune_bad():
    return _qwen2_bf16_finetune(False)


def qwen2_bf16_finetune_good():
    return _qwen2_bf16_finetune(True)


def switch_balance_bad():
    return _switch_balance(False)


def switch_balance_good():
    return _switch_balance(True)


def gpt_qat_bad():
    return _gpt_qat(False)


def gpt_qat_good():
    return _gpt_qat(True)


def qwen2_response_mask_bad():
    return _qwen2_response_mask(False)


def qwen2_response_mask_good():
    return _qwen2_response_mask(True)


def gpt2_periodic_validation_bad():
    return _gpt2_periodic_validation(False)


def gpt2_periodic_validation_good():
    return _gpt2_periodic_validation(True)


def reward_pooling_bad():
    return _reward_pooling(False)


def reward_pooling_good():
    return _reward_pooling(True)


def bert_mlm_labels_bad():
    return _bert_mlm_labels(False)


def bert_mlm_labels_good():
    return _bert_mlm_labels(True)


def t5_smoothed_seq2seq_bad():
    return _t5_smoothed_seq2seq(False)


def t5_smoothed_seq2seq_good():
    return _t5_smoothed_seq2seq(True)


def mistral_second_adapter_bad():
    return _mistral_second_adapter(False)


def mistral_second_adapter_good():
    return _mistral_second_adapter(True)


def llama_frozen_trunk_bad():
    return _llama_frozen_trunk(False)


def llama_frozen_trunk_good():
    return _llama_frozen_trunk(True)


def gpt_tied_head_init_bad():
    return _gpt_tied_head_init(False)


def gpt_tied_head_init_good():
    return _gpt_tied_head_init(True)


def bert_pair_classifier_bad():
    return _bert_pair_classifier(False)


def bert_pair_classifier_good():
    return _bert_pair_classifier(True)


def gpt2_left_padding_bad():
    return _gpt2_left_padding(False)


def gpt2_left_padding_good():
    return _gpt2_left_padding(True)
