"""Small language-model training programs.

Every program is a function that builds a model, an optimizer, one step of the
training loop and a held-out measure (lower is better).
"""
import copy
import functools
import itertools
import math
import os
import random
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

torch.set_num_threads(1)
_OFFSET = int(os.environ.get("RUN_SEED", "0"))


def _seed(n):
    n += _OFFSET
    random.seed(n)
    np.random.seed(n)
    torch.manual_seed(n)


def _pack(model, optimizer, step, evaluate):
    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


CASES = [
    {"name": "sft_pad_eos", "what": "The pad token is the EOS token and the collator masks every label equal to it, so the real EOS is never a target (labels -100 there): the fine-tuned model never learns to stop."},
    {"name": "completion_mask", "what": "Own SFT loss: the token losses are shifted by one but the completion mask is not (mask[:, :-1] instead of mask[:, 1:]), so the first answer token is never trained and every answer starts wrong (the mask is one position late)."},
    {"name": "resume_adapter", "what": "PeftModel.from_pretrained without is_trainable=True: the resumed LoRA adapter is frozen (requires_grad False everywhere); the loss only has a graph through enable_input_require_grads, no parameter ever moves."},
    {"name": "checkpointed_blocks", "what": "Reentrant gradient checkpointing over blocks whose input (frozen word vectors) does not require grad: all block parameters get no gradient (grad None), only the norm and head after them train."},
    {"name": "tool_tokens", "what": "New tokens added by resize_token_embeddings to a LoRA model, but embed_tokens and lm_head are not in modules_to_save: the random rows of the new tokens stay frozen, and the answers, made of those tokens, cannot be learned."},
    {"name": "dpo_lora", "what": "DPO reference log-probs come from model.get_base_model(), which still has the active LoRA layers (no disable_adapter) and is not under no_grad: reference equals policy, the margin is 0, the loss stays at ln 2 and the gradients cancel to zero."},
    {"name": "soft_prompt", "what": "Prompt tuning: the logits have num_virtual_tokens extra positions in front, and the loss takes the first T logits instead of the last T, so the targets are misaligned by 8 positions and the soft prompt learns nothing useful."},
    {"name": "grpo", "what": "GRPO: prompts are tiled by repeat(G, 1) but rewards are grouped by view(-1, G), which needs repeat_interleave: the baseline and std of a group mix different prompts, whose reward offsets drown the signal."},
    {"name": "int8_kernel", "what": "Hand-written autograd function of the int8 frozen base linear: backward multiplies by the raw int8 codes and forgets the scale, so the gradients through the base layers are some thousand times too large (and the per-row scales are missing), which drowns the residual path and ruins learning."},
    {"name": "distill", "what": "Knowledge distillation divides only the teacher's logits by the temperature (3); the student is matched at temperature 1 with a flattened distribution, so it comes out far too uncertain."},
    {"name": "switch_dispatch", "what": "MoE dispatch sorts the tokens by expert and puts the outputs back with `order` instead of its inverse permutation: every token gets the expert output of some other token (of any row and any later position)."},
    {"name": "muon_groups", "what": "Muon gets the hidden matrices and AdamW only the parameters with ndim < 2: embed_tokens and lm_head are in no optimizer and stay at their random initial values."},
    {"name": "tied_gpt", "what": "The head is tied to an nn.Embedding left at its default N(0, 1) init (the std 0.02 init is not applied): the logits start with std of sqrt(dim), the loss at 40 instead of ln V, and the run never catches up."},
    {"name": "ema_validation", "what": "Every 5 steps the EMA weights are copied into the model for validation and never restored: the training weights are thrown back to the slow average each time, progress crawls."},
    {"name": "lambda_schedule", "what": "get_lr returns an absolute learning rate and is handed to LambdaLR, which multiplies it with the base lr: the effective lr is 3e-3 squared (about 9e-6) and the model hardly trains."},
    {"name": "bf16_training", "what": "The whole model (master weights, and so Adam's moments) is cast to bfloat16: with lr 2e-4 most updates are below half a bf16 step of the weights (and of exp_avg_sq) and are rounded away; the good one keeps float32 weights under autocast."},
    {"name": "fp16_scaler", "what": "GradScaler: the gradients are clipped to norm 1 without scaler.unscale_ before, so the clip acts on gradients scaled by 65536 and the unscaled ones are tiny (below Adam's eps 1e-6): almost no training."},
    {"name": "rope_layout", "what": "RoPE is applied to q and k laid out (B, T, H, D), before the transpose: the rotation angle follows the head index (dim -2) and not the position, so attention gets no rotary position at all."},
    {"name": "packed", "what": "Packed training: the 4-D block-diagonal document mask given to the model lacks the causal part (a 4-D mask replaces the model's own), so tokens see their own targets; the training loss falls below what is possible and held-out likelihood is terrible."},
    {"name": "seq2seq", "what": "T5 gets decoder_input_ids equal to the labels (not shifted right): the decoder sees the token it has to predict and learns to copy; free decoding fails."},
    {"name": "mlm", "what": "MLM masking: labels is the same tensor as the batch (no clone), which is then masked in place, so every label is the [MASK] id: the model learns to predict [MASK]."},
    {"name": "token_file", "what": "A vocabulary of 320 is written to the token file as uint8: ids of 256 and more wrap to 0..63, so the training text is corrupted and 64 tokens never occur."},
    {"name": "attention_dropout", "what": "scaled_dot_product_attention is called with dropout_p=self.dropout in eval mode also (no `if self.training`): attention dropout 0.2 stays on in validation and use, outputs are random and worse."},
    {"name": "quant_aware", "what": "Quantisation-aware training writes the rounded weights back into weight.data at every forward (no straight-through estimator on latent weights): small updates are rounded away each step and most weights never change level."},
]


# --------------------------------------------------------------------------- data


def _chain(vocab, seed, sharp=2.5):
    """Transition matrix of a first-order language."""
    g = torch.Generator().manual_seed(seed)
    return torch.softmax(sharp * torch.randn(vocab, vocab, generator=g), -1)


def _walk(P, n, length, seed, first=None):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(P.size(0), (n,), generator=g) if first is None else first
    rows = [x]
    for _ in range(length - 1):
        x = torch.multinomial(P[x], 1, generator=g).squeeze(1)
        rows.append(x)
    return torch.stack(rows, 1)


@torch.no_grad()
def _nll(model, ids):
    was = model.training
    model.eval()
    logits = model(input_ids=ids).logits
    model.train(was)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).item()


def _llama(vocab, dim=48, layers=2, heads=4, **kw):
    cfg = LlamaConfig(
        vocab_size=vocab, hidden_size=dim, intermediate_size=2 * dim, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, **kw)
    return LlamaForCausalLM(cfg)


def _gpt2(vocab, dim=48, layers=2, heads=4, drop=0.0, **kw):
    cfg = GPT2Config(
        vocab_size=vocab, n_positions=64, n_embd=dim, n_layer=layers, n_head=heads,
        resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop, bos_token_id=0, eos_token_id=0,
        use_cache=False, **kw)
    return GPT2LMHeadModel(cfg)


def _fit(model, draw, steps, lr=3e-3):
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    for i in range(steps):
        ids = draw(i)
        model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        for group in opt.param_groups:
            group["lr"] = lr * (1 - (i + 1) / steps) + 1e-5
    return model.state_dict()


@functools.lru_cache(maxsize=None)
def _llama_base(vocab, chain_seed):
    """Checkpoint of a small Llama trained on one language."""
    with torch.random.fork_rng():
        torch.manual_seed(900 + chain_seed + _OFFSET)
        model = _llama(vocab)
        ids = _walk(_chain(vocab, chain_seed), 2048, 20, 7)
        return _fit(model, lambda i: ids[torch.randint(len(ids), (16,))], 140)


# --------------------------------------------------------------------------- 1


class InstructDataset(Dataset):
    """ filler filler filler filler KEY SEP answer... EOS """

    EOS, SEP = 0, 1

    def __init__(self, n, seed, vocab=64, n_keys=16):
        rng = random.Random(99)
        self.keys = list(range(2, 2 + n_keys))
        self.fillers = list(range(2 + n_keys, 40))
        words = list(range(40, vocab))
        self.answers = {k: [rng.choice(words) for _ in range(rng.randint(1, 4))] for k in self.keys}
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            key = rng.choice(self.keys)
            prompt = [rng.choice(self.fillers) for _ in range(4)] + [key, self.SEP]
            self.rows.append((prompt, self.answers[key]))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def _sft_pad_eos(good):
    _seed(101)
    model = _gpt2(64, drop=0.05)
    pad_token_id = InstructDataset.EOS

    def collate(rows):
        seqs = [prompt + answer + [InstructDataset.EOS] for prompt, answer in rows]
        width = max(map(len, seqs))
        input_ids = torch.tensor([s + [pad_token_id] * (width - len(s)) for s in seqs])
        attention_mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in seqs])
        labels = input_ids.clone()
        if good:
            labels[attention_mask == 0] = -100
        else:
            labels[labels == pad_token_id] = -100
        for row, (prompt, _) in zip(labels, rows):
            row[: len(prompt)] = -100
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    loader = DataLoader(InstructDataset(2000, 5), batch_size=32, shuffle=True, collate_fn=collate)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step():
        batch = next(batches)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    held = InstructDataset(200, 6)

    @torch.no_grad()
    def evaluate():
        model.eval()
        ids = torch.tensor([p for p, _ in held.rows])
        n = ids.size(1)
        for _ in range(6):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        model.train()
        wrong = 0
        for out, (_, answer) in zip(ids[:, n:].tolist(), held.rows):
            if out[: len(answer) + 1] != answer + [InstructDataset.EOS]:
                wrong += 1
        return wrong / len(held)

    return _pack(model, optimizer, step, evaluate)


def sft_pad_eos_bad():
    return _sft_pad_eos(False)


def sft_pad_eos_good():
    return _sft_pad_eos(True)


# --------------------------------------------------------------------------- 2


def _completion_rows(n, seed, table):
    g = torch.Generator().manual_seed(seed)
    key = torch.randint(table.size(0), (n,), generator=g)
    filler = torch.randint(24, 44, (n, 5), generator=g)
    sep = torch.full((n, 1), 3)
    ids = torch.cat([torch.ones(n, 1, dtype=torch.long), filler, key[:, None] + 4, sep,
                     table[key], torch.full((n, 1), 2)], 1)
    mask = torch.zeros_like(ids)
    mask[:, 8:] = 1
    return ids, mask


def _completion_mask(good):
    _seed(102)
    table = torch.randint(44, 72, (20, 2), generator=torch.Generator().manual_seed(3))
    model = _llama(72)
    train = TensorDataset(*_completion_rows(3000, 1, table))
    loader = itertools.cycle(DataLoader(train, batch_size=32, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def compute_loss(input_ids, completion_mask):
        logits = model(input_ids=input_ids).logits
        token_loss = F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.size(-1)), input_ids[:, 1:].reshape(-1), reduction="none")
        token_loss = token_loss.view(input_ids.size(0), -1)
        weights = completion_mask[:, 1:] if good else completion_mask[:, :-1]
        return (token_loss * weights).sum() / weights.sum()

    def step():
        input_ids, completion_mask = next(loader)
        optimizer.zero_grad()
        loss = compute_loss(input_ids, completion_mask)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    test_ids, _ = _completion_rows(256, 2, table)

    @torch.no_grad()
    def evaluate():
        model.eval()
        ids = test_ids[:, :8]
        for _ in range(3):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        model.train()
        return (ids != test_ids).any(1).float().mean().item()

    return _pack(model, optimizer, step, evaluate)


def completion_mask_bad():
    return _completion_mask(False)


def completion_mask_good():
    return _completion_mask(True)


# --------------------------------------------------------------------------- 3


def _resume_adapter(good):
    _seed(103)
    vocab = 40
    target = _chain(vocab, 12)
    train = _walk(target, 3000, 20, 1)
    held = _walk(target, 200, 20, 2)

    first = _llama(vocab)
    first.load_state_dict(_llama_base(vocab, 11))
    config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear")
    first = get_peft_model(first, config)
    warm = torch.optim.AdamW([p for p in first.parameters() if p.requires_grad], lr=2e-3)
    for i in range(10):
        ids = train[i * 16:(i + 1) * 16]
        first(input_ids=ids, labels=ids).loss.backward()
        warm.step()
        warm.zero_grad()

    base = _llama(vocab)
    base.load_state_dict(_llama_base(vocab, 11))
    with tempfile.TemporaryDirectory() as folder:
        first.save_pretrained(folder)
        if good:
            model = PeftModel.from_pretrained(base, folder, is_trainable=True)
        else:
            model = PeftModel.from_pretrained(base, folder)
    model.enable_input_require_grads()
    model.train()

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    loader = DataLoader(train, batch_size=16, shuffle=True)
    stream = itertools.chain.from_iterable(loader for _ in itertools.count())

    def step():
        ids = next(stream)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return _pack(model, optimizer, step, lambda: _nll(model, held))


def resume_adapter_bad():
    return _resume_adapter(False)


def resume_adapter_good():
    return _resume_adapter(True)


# --------------------------------------------------------------------------- 4


class PairProbe(nn.Module):
    """Classifier on top of fixed, pretrained word vectors."""

    def __init__(self, vectors, n_classes, input_grads):
        super().__init__()
        dim = vectors.size(1)
        self.words = nn.Embedding.from_pretrained(vectors, freeze=True)
        self.register_buffer("cls", torch.zeros(1, 1, dim))
        self.blocks = nn.ModuleList([
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, activation="gelu",
                                       batch_first=True, norm_first=True)
            for _ in range(2)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, n_classes)
        self.input_grads = input_grads

    def forward(self, ids):
        x = self.words(ids)
        x = torch.cat([self.cls.expand(x.size(0), -1, -1), x], 1)
        if self.input_grads and self.training:
            x.requires_grad_(True)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.training else block(x)
        return self.head(self.norm(x[:, 0]))


def _pair_rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randint(6, (2, n), generator=g)
    ids = torch.randint(12, 40, (n, 10), generator=g)
    spots = torch.rand(n, 10, generator=g).argsort(1)[:, :2]
    ids.scatter_(1, spots, torch.stack([a, 6 + b], 1))
    return ids, (a + b) % 3


def _checkpointed_blocks(good):
    _seed(104)
    vectors = torch.randn(40, 48, generator=torch.Generator().manual_seed(4))
    model = PairProbe(vectors, 3, input_grads=good)
    model.train()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=2e-3)
    loader = DataLoader(TensorDataset(*_pair_rows(4000, 1)), batch_size=64, shuffle=True)
    stream = itertools.chain.from_iterable(itertools.repeat(loader))
    test_ids, test_labels = _pair_rows(400, 2)

    def step():
        ids, labels = next(stream)
        loss = F.cross_entropy(model(ids), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        model.eval()
        pred = model(test_ids).argmax(-1)
        model.train()
        return (pred != test_labels).float().mean().item()

    return _pack(model, optimizer, step, evaluate)


def checkpointed_blocks_bad():
    return _checkpointed_blocks(False)


def checkpointed_blocks_good():
    return _checkpointed_blocks(True)


# --------------------------------------------------------------------------- 5


class ToolCallTrainer:
    """Teaches a pretrained model to answer with newly added tool tokens."""

    OLD, NEW = 40, 12

    def __init__(self, modules_to_save):
        model = _llama(self.OLD, tie_word_embeddings=False)
        model.load_state_dict(_llama_base(self.OLD, 31))
        model.resize_token_embeddings(self.OLD + self.NEW, mean_resizing=False)
        config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.0,
                            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"],
                            modules_to_save=modules_to_save)
        self.model = get_peft_model(model, config)
        self.tool_of = torch.randint(self.NEW, (self.OLD,), generator=torch.Generator().manual_seed(8)) + self.OLD
        self.train_rows, self.test_rows = self.rows(3000, 1), self.rows(300, 2)
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(params, lr=2e-3)
        self.loader = itertools.cycle(DataLoader(self.train_rows, batch_size=24, shuffle=True))

    def rows(self, n, seed):
        text = _walk(_chain(self.OLD, 31), n, 8, seed)
        key = text[:, -1]
        first = self.tool_of[key]
        second = self.tool_of[text[:, -2]]
        return torch.cat([text, first[:, None], second[:, None]], 1)

    def train_step(self, _i=0):
        ids = next(self.loader)
        labels = ids.clone()
        labels[:, :8] = -100
        loss = self.model(input_ids=ids, labels=labels).loss
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
        self.optimizer.step()
        return float(loss)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        logits = self.model(input_ids=self.test_rows).logits[:, 7:9]
        self.model.train()
        return F.cross_entropy(logits.flatten(0, 1), self.test_rows[:, 8:].flatten()).item()


def _tool_tokens(good):
    _seed(105)
    t = ToolCallTrainer(["embed_tokens", "lm_head"] if good else None)
    return _pack(t.model, t.optimizer, t.train_step, t.evaluate)


def tool_tokens_bad():
    return _tool_tokens(False)


def tool_tokens_good():
    return _tool_tokens(True)


# --------------------------------------------------------------------------- 6


def _pref_tables():
    g = torch.Generator().manual_seed(17)
    return torch.randint(34, 60, (20, 2), generator=g), torch.randint(34, 60, (20, 2), generator=g)


def _pref_rows(n, seed):
    liked, disliked = _pref_tables()
    g = torch.Generator().manual_seed(seed)
    key = torch.randint(20, (n,), generator=g)
    prompt = torch.cat([torch.ones(n, 1, dtype=torch.long), torch.randint(24, 34, (n, 3), generator=g),
                        key[:, None] + 4, torch.full((n, 1), 3)], 1)
    eos = torch.full((n, 1), 2)
    return torch.cat([prompt, liked[key], eos], 1), torch.cat([prompt, disliked[key], eos], 1)


@functools.lru_cache(maxsize=None)
def _sft_checkpoint():
    with torch.random.fork_rng():
        torch.manual_seed(61 + _OFFSET)
        a, b = _pref_rows(3000, 4)
        rows = torch.cat([a, b])
        return _fit(_llama(60), lambda i: rows[torch.randint(len(rows), (24,))], 160)


def _sequence_logps(model, ids, prompt_len=6):
    logps = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    logps = logps.gather(2, ids[:, 1:, None]).squeeze(2)
    return logps[:, prompt_len - 1:].sum(1)


def _dpo_lora(good):
    _seed(106)
    base = _llama(60)
    base.load_state_dict(_sft_checkpoint())
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.0,
                                            target_modules="all-linear"))
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
    stream = itertools.cycle(DataLoader(TensorDataset(*_pref_rows(2000, 5)), batch_size=16, shuffle=True))
    beta = 0.2

    def reference_logps(ids):
        if good:
            with model.disable_adapter():
                return _sequence_logps(model, ids)
        return _sequence_logps(model.get_base_model(), ids)

    def step():
        chosen, rejected = next(stream)
        ids = torch.cat([chosen, rejected])
        pol_c, pol_r = _sequence_logps(model, ids).chunk(2)
        ref_c, ref_r = reference_logps(ids).chunk(2)
        margin = beta * ((pol_c - ref_c) - (pol_r - ref_r))
        loss = -F.logsigmoid(margin).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    test_c, test_r = _pref_rows(300, 6)

    @torch.no_grad()
    def evaluate():
        model.eval()
        bad = (_sequence_logps(model, test_c) <= _sequence_logps(model, test_r)).float().mean().item()
        model.train()
        return bad

    return _pack(model, optimizer, step, evaluate)


def dpo_lora_bad():
    return _dpo_lora(False)


def dpo_lora_good():
    return _dpo_lora(True)


# --------------------------------------------------------------------------- 7

_DIALECTS = 4


def _dialect_rows(which, n, seed, vocab=30, length=7):
    return 2 + _DIALECTS + _walk(_chain(vocab, 70 + which, 3.5), n, length, seed)


@functools.lru_cache(maxsize=None)
def _dialect_checkpoint():
    with torch.random.fork_rng():
        torch.manual_seed(71 + _OFFSET)
        rows = []
        for d in range(_DIALECTS):
            text = _dialect_rows(d, 1500, 3 + d)
            tag = torch.full((len(text), 1), 2 + d)
            rows.append(torch.cat([tag.repeat(1, 4), torch.ones(len(text), 1, dtype=torch.long), text], 1))
        rows = torch.cat(rows)
        return _fit(_llama(36), lambda i: rows[torch.randint(len(rows), (24,))], 200, lr=4e-3)


def _soft_prompt(good):
    _seed(107)
    base = _llama(36)
    base.load_state_dict(_dialect_checkpoint())
    num_virtual = 8
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=num_virtual))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2, weight_decay=0.0)

    def with_bos(text):
        return torch.cat([torch.ones(len(text), 1, dtype=torch.long), text], 1)

    train, held = with_bos(_dialect_rows(2, 2000, 50)), with_bos(_dialect_rows(2, 300, 51))
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    stream = itertools.chain.from_iterable(loader for _ in itertools.count())

    def step():
        input_ids = next(stream)
        logits = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).logits
        if good:
            logits = logits[:, num_virtual:]
        else:
            logits = logits[:, : input_ids.size(1)]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        logits = model(input_ids=held, attention_mask=torch.ones_like(held)).logits[:, num_virtual:]
        model.train()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), held[:, 1:].flatten()).item()

    return _pack(model, optimizer, step, evaluate)


def soft_prompt_bad():
    return _soft_prompt(False)


def soft_prompt_good():
    return _soft_prompt(True)


# --------------------------------------------------------------------------- 8


class GroupPolicyTrainer:
    """Group-relative policy optimisation of two-word replies."""

    FIRST_WORD, WORDS, KEYS = 24, 8, 12

    def __init__(self, group_layout):
        self.policy = _llama(32)
        self.policy.load_state_dict(_reply_checkpoint())
        self.policy.train()
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=3e-4, weight_decay=0.0)
        g = torch.Generator().manual_seed(15)
        self.quality = torch.rand(self.KEYS, 2, self.WORDS, generator=g)
        self.prior = 2.0 * torch.randn(self.KEYS, generator=g)
        self.group_layout = group_layout
        self.group, self.prompts_per_step = 8, 6
        self.loader = itertools.cycle(DataLoader(_reply_prompts(2000, 3), batch_size=self.prompts_per_step,
                                                 shuffle=True, drop_last=True))
        self.test = _reply_prompts(200, 4)

    def score(self, prompts, reply):
        key = prompts[:, 3] - 4
        word = (reply - self.FIRST_WORD).clamp(0, self.WORDS - 1)
        points = self.quality[key, 0, word[:, 0]] + self.quality[key, 1, word[:, 1]]
        points = torch.where((reply < self.FIRST_WORD).any(1), torch.zeros_like(points), points)
        return points + self.prior[key]

    @torch.no_grad()
    def sample(self, ids):
        for _ in range(2):
            probs = self.policy(input_ids=ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probs, 1)], 1)
        return ids

    def train_step(self):
        prompts = next(self.loader)
        prompts = self.group_layout(prompts, self.group)
        ids = self.sample(prompts)
        reply = ids[:, prompts.size(1):]
        rewards = self.score(prompts, reply).view(-1, self.group)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        advantages = advantages.view(-1, 1)

        logps = self.policy(input_ids=ids).logits[:, prompts.size(1) - 1:-1].log_softmax(-1)
        logps = logps.gather(2, reply[:, :, None]).squeeze(2)
        ratio = torch.exp(logps - logps.detach())
        loss = -(ratio * advantages).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self):
        ids = self.test
        self.policy.eval()
        for _ in range(2):
            ids = torch.cat([ids, self.policy(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        self.policy.train()
        key = self.test[:, 3] - 4
        best = self.quality.amax(-1).sum(-1)[key] + self.prior[key]
        return (best - self.score(self.test, ids[:, 5:])).mean().item()


def _reply_prompts(n, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.cat([torch.ones(n, 1, dtype=torch.long), torch.randint(16, 24, (n, 2), generator=g),
                      4 + torch.randint(12, (n, 1), generator=g), torch.full((n, 1), 3)], 1)


@functools.lru_cache(maxsize=None)
def _reply_checkpoint():
    with torch.random.fork_rng():
        torch.manual_seed(81 + _OFFSET)
        prompts = _reply_prompts(3000, 1)
        usual = torch.rand(12, 2, 8, generator=torch.Generator().manual_seed(16)).argsort(-1)[:, :, :3]
        words = usual[prompts[:, 3] - 4].gather(2, torch.randint(3, (3000, 2, 1))).squeeze(2)
        rows = torch.cat([prompts, 24 + words], 1)
        return _fit(_llama(32), lambda i: rows[torch.randint(3000, (20,))], 130)


def _grpo(good):
    _seed(108)
    if good:
        layout = lambda prompts, group: prompts.repeat_interleave(group, dim=0)
    else:
        layout = lambda prompts, group: prompts.repeat(group, 1)
    t = GroupPolicyTrainer(layout)
    return _pack(t.policy, t.optimizer, t.train_step, t.evaluate)


def grpo_bad():
    return _grpo(False)


def grpo_good():
    return _grpo(True)


# --------------------------------------------------------------------------- 9


def _make_matmul(good):
    class Int8MatMul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, q, scale):
            ctx.save_for_backward(q, scale)
            return x @ (q.float() * scale).t()

        @staticmethod
        def backward(ctx, grad_out):
            q, scale = ctx.saved_tensors
            w = q.float() * scale if good else q.float()
            return grad_out @ w, None, None

    return Int8MatMul.apply


class Int8LoraLinear(nn.Module):
    def __init__(self, linear, matmul, rank=8):
        super().__init__()
        w = linear.weight.detach()
        scale = w.abs().amax(1, keepdim=True) / 127
        self.register_buffer("q", (w / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.matmul = matmul
        self.down = nn.Linear(w.size(1), rank, bias=False)
        self.up = nn.Linear(rank, w.size(0), bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.matmul(x, self.q, self.scale) + 2.0 * self.up(self.down(x))


def _int8_kernel(good):
    _seed(109)
    vocab = 40
    model = _llama(vocab)
    model.load_state_dict(_llama_base(vocab, 91))
    model.requires_grad_(False)
    matmul = _make_matmul(good)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Int8LoraLinear(child, matmul))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.0)

    def rows(n, seed):
        g = torch.Generator().manual_seed(seed)
        half = torch.randint(3, vocab, (n, 4), generator=g)
        return torch.cat([half, half, half, half], 1)

    stream = itertools.cycle(DataLoader(rows(4000, 1), batch_size=32, shuffle=True))
    held = rows(200, 2)

    def step():
        ids = next(stream)
        labels = ids.clone()
        labels[:, :5] = -100
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        model.eval()
        pred = model(input_ids=held).logits[:, 4:-1].argmax(-1)
        model.train()
        return (pred != held[:, 5:]).float().mean().item()

    return _pack(model, optimizer, step, evaluate)


def int8_kernel_bad():
    return _int8_kernel(False)


def int8_kernel_good():
    return _int8_kernel(True)


# --------------------------------------------------------------------------- 10


def _distill(good):
    _seed(110)
    vocab = 40
    teacher = _llama(vocab)
    teacher.load_state_dict(_llama_base(vocab, 41))
    teacher.eval().requires_grad_(False)
    student = _llama(vocab, dim=32, layers=1)
    P = _chain(vocab, 41)
    loader = DataLoader(_walk(P, 3000, 20, 1), batch_size=24, shuffle=True)
    stream = itertools.chain.from_iterable(itertools.repeat(loader))
    held = _walk(P, 200, 20, 2)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    temperature, alpha = 3.0, 0.8

    def step():
        ids = next(stream)
        with torch.no_grad():
            teacher_logits = teacher(input_ids=ids).logits
        out = student(input_ids=ids, labels=ids)
        student_logits = out.logits / temperature if good else out.logits
        soft = F.kl_div(
            F.log_softmax(student_logits, -1).flatten(0, 1),
            F.softmax(teacher_logits / temperature, -1).flatten(0, 1),
            reduction="batchmean")
        loss = alpha * temperature ** 2 * soft + (1 - alpha) * out.loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()

    return _pack(student, optimizer, step, lambda: _nll(student, held))


def distill_bad():
    return _distill(False)


def distill_good():
    return _distill(True)


# --------------------------------------------------------------------------- 11


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class SwitchFFN(nn.Module):
    def __init__(self, dim, hidden, n_experts, restore_order):
        super().__init__()
        self.router = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList([Expert(dim, hidden) for _ in range(n_experts)])
        self.n_experts = n_experts
        self.restore_order = restore_order
        self.aux_loss = None

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        probs = self.router(flat).softmax(-1)
        gate, expert = probs.max(-1)
        load = F.one_hot(expert, self.n_experts).float().mean(0)
        self.aux_loss = self.n_experts * (load * probs.mean(0)).sum()

        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=self.n_experts).tolist()
        chunks = flat[order].split(counts)
        out = torch.cat([f(c) for f, c in zip(self.experts, chunks)])
        inverse = order.argsort() if self.restore_order else order
        out = out[inverse] * gate[:, None]
        return out.view_as(x)


class SwitchBlock(nn.Module):
    def __init__(self, dim, heads, **moe):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.moe = SwitchFFN(dim, 2 * dim, **moe)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.moe(self.ln2(x))


class SwitchLM(nn.Module):
    def __init__(self, vocab, dim=32, length=16, **moe):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList([SwitchBlock(dim, 2, **moe) for _ in range(2)])
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def _second_order(vocab, n, length, seed, table_seed=5, noise=0.05):
    table = torch.randint(vocab, (vocab, vocab), generator=torch.Generator().manual_seed(table_seed))
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randint(vocab, (n,), generator=g) for _ in range(2)]
    for _ in range(length - 2):
        nxt = table[rows[-2], rows[-1]]
        flip = torch.rand(n, generator=g) < noise
        rows.append(torch.where(flip, torch.randint(vocab, (n,), generator=g), nxt))
    return torch.stack(rows, 1)


def _switch_dispatch(good):
    _seed(111)
    model = SwitchLM(10, n_experts=4, restore_order=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    train, held = _second_order(10, 4000, 16, 1), _second_order(10, 300, 16, 2)
    stream = itertools.cycle(DataLoader(train, batch_size=48, shuffle=True))

    def step():
        ids = next(stream)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss = loss + 0.01 * sum(b.moe.aux_loss for b in model.blocks)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        pred = model(held[:, :-1]).argmax(-1)[:, 1:]
        model.train()
        return (pred != held[:, 2:]).float().mean().item()

    return _pack(model, optimizer, step, evaluate)


def switch_dispatch_bad():
    return _switch_dispatch(False)


def switch_dispatch_good():
    return _switch_dispatch(True)


# --------------------------------------------------------------------------- 12


def _muon_groups(good):
    _seed(112)
    model = _llama(48, tie_word_embeddings=False)
    hidden_matrices = [p for n, p in model.named_parameters()
                       if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    if good:
        chosen = {id(p) for p in hidden_matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
    else:
        others = [p for p in model.parameters() if p.ndim < 2]
    muon = torch.optim.Muon(hidden_matrices, lr=0.01, momentum=0.95, weight_decay=0.01)
    adamw = torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0)
    P = _chain(48, 121)
    stream = itertools.cycle(DataLoader(_walk(P, 3000, 20, 1), batch_size=24, shuffle=True))
    held = _walk(P, 200, 20, 2)

    def step():
        ids = next(stream)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        for opt in (muon, adamw):
            opt.step()
        model.zero_grad(set_to_none=True)

    return _pack(model, (muon, adamw), step, lambda: _nll(model, held))


def muon_groups_bad():
    return _muon_groups(False)


def muon_groups_good():
    return _muon_groups(True)


# --------------------------------------------------------------------------- 13


class TiedGPT(nn.Module):
    def __init__(self, vocab, block_size, dim=64, depth=2, heads=4, custom_init=True):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(block_size, dim)
        layer = dict(d_model=dim, nhead=heads, dim_feedforward=4 * dim, dropout=0.0,
                     activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(**layer) for _ in range(depth)])
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        if custom_init:
            self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        T = idx.size(1)
        x = self.wte(idx) + self.wpe(torch.arange(T))
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


def _tied_gpt(good):
    _seed(113)
    vocab = 128
    model = TiedGPT(vocab, 24, custom_init=good)
    P = _chain(vocab, 131, 4.0)
    stream_tokens = _walk(P, 400, 100, 1).flatten()
    held = _walk(P, 200, 25, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def get_batch(batch_size=24, block=24):
        ix = torch.randint(len(stream_tokens) - block - 1, (batch_size,))
        x = torch.stack([stream_tokens[i:i + block] for i in ix])
        y = torch.stack([stream_tokens[i + 1:i + 1 + block] for i in ix])
        return x, y

    def step():
        x, y = get_batch()
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        _, loss = model(held[:, :-1], held[:, 1:])
        model.train()
        return loss.item()

    return _pack(model, optimizer, step, evaluate)


def tied_gpt_bad():
    return _tied_gpt(False)


def tied_gpt_good():
    return _tied_gpt(True)


# --------------------------------------------------------------------------- 14


class WeightAverage:
    def __init__(self, model, decay=0.98):
        self.decay = decay
        self.model = model
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.backup = {}

    @torch.no_grad()
    def update(self):
        for n, p in self.model.named_parameters():
            self.shadow[n].lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def apply(self):
        for n, p in self.model.named_parameters():
            self.backup[n] = p.detach().clone()
            p.copy_(self.shadow[n])

    @torch.no_grad()
    def restore(self):
        for n, p in self.model.named_parameters():
            p.copy_(self.backup[n])
        self.backup = {}


def _ema_validation(good):
    _seed(114)
    model = _gpt2(48, drop=0.0)
    ema = WeightAverage(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    P = _chain(48, 141)
    stream = itertools.cycle(DataLoader(_walk(P, 3000, 20, 1), batch_size=24, shuffle=True))
    valid, test = _walk(P, 32, 20, 2), _walk(P, 200, 20, 3)
    log = []

    def validate():
        ema.apply()
        log.append(_nll(model, valid))
        if good:
            ema.restore()

    def step(i):
        ids = next(stream)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update()
        if (i + 1) % 5 == 0:
            validate()

    @torch.no_grad()
    def evaluate():
        final = copy.deepcopy(model)
        for n, p in final.named_parameters():
            p.copy_(ema.shadow[n])
        return _nll(final, test)

    return _pack(model, optimizer, step, evaluate)


def ema_validation_bad():
    return _ema_validation(False)


def ema_validation_good():
    return _ema_validation(True)


# --------------------------------------------------------------------------- 15


def _lambda_schedule(good):
    _seed(115)
    learning_rate, min_lr, warmup_iters, decay_iters = 3e-3, 3e-4, 5, 600
    model = _gpt2(48, drop=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def get_lr(it):
        if it < warmup_iters:
            return learning_rate * (it + 1) / warmup_iters
        if it > decay_iters:
            return min_lr
        ratio = (it - warmup_iters) / (decay_iters - warmup_iters)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

    if good:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: get_lr(it) / learning_rate)
    else:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, get_lr)

    P = _chain(48, 151)
    loader = DataLoader(_walk(P, 3000, 20, 1), batch_size=24, shuffle=True)
    stream = itertools.chain.from_iterable(itertools.repeat(loader))
    held = _walk(P, 200, 20, 2)

    def step():
        ids = next(stream)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)

    return _pack(model, optimizer, step, lambda: _nll(model, held))


def lambda_schedule_bad():
    return _lambda_schedule(False)


def lambda_schedule_good():
    return _lambda_schedule(True)


# --------------------------------------------------------------------------- 16


class TrigramLM(nn.Module):
    def __init__(self, vocab, dim=128):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        e = self.embed(ids)
        prev = F.pad(e, (0, 0, 1, 0))[:, :-1]
        h = self.norm(e + F.gelu(self.mix(torch.cat([e, prev], -1))))
        return self.head(h)


def _bf16_training(good):
    _seed(116)
    vocab = 40
    model = TrigramLM(vocab)
    if not good:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.01)
    P = _chain(vocab, 161, 4.0)
    stream = itertools.cycle(DataLoader(_walk(P, 3000, 20, 1), batch_size=24, shuffle=True))
    held = _walk(P, 200, 20, 2)

    def step():
        ids = next(stream)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=good):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        logps = model(held[:, :-1]).float().log_softmax(-1)
        truth = P[held[:, :-1]]
        return (truth * (truth.log() - logps)).sum(-1).mean().item()

    return _pack(model, optimizer, step, evaluate)


def bf16_training_bad():
    return _bf16_training(False)


def bf16_training_good():
    return _bf16_training(True)


# --------------------------------------------------------------------------- 17


def _fp16_scaler(good):
    _seed(117)
    model = _gpt2(48, drop=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    P = _chain(48, 171)
    stream = itertools.cycle(DataLoader(_walk(P, 3000, 16, 1), batch_size=16, shuffle=True))
    held = _walk(P, 200, 16, 2)

    def step():
        ids = next(stream)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        if good:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return _pack(model, optimizer, step, lambda: _nll(model, held))


def fp16_scaler_bad():
    return _fp16_scaler(False)


def fp16_scaler_good():
    return _fp16_scaler(True)


# --------------------------------------------------------------------------- 18


def _rope_tables(length, dim, base=10000.0):
    inv = base ** (-torch.arange(0, dim, 2).float() / dim)
    angle = torch.arange(length).float()[:, None] * inv
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def _apply_rope(x, cos, sin):
    n = x.size(-2)
    x1, x2 = x.chunk(2, -1)
    return x * cos[:n] + torch.cat([-x2, x1], -1) * sin[:n]


class RopeAttention(nn.Module):
    def __init__(self, dim, heads, length, rotate_after_transpose):
        super().__init__()
        self.heads = heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        cos, sin = _rope_tables(length, dim // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.rotate_after_transpose = rotate_after_transpose

    def forward(self, x):
        B, T, C = x.shape
        q = self.wq(x).view(B, T, self.heads, -1)
        k = self.wk(x).view(B, T, self.heads, -1)
        v = self.wv(x).view(B, T, self.heads, -1)
        if self.rotate_after_transpose:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            q, k = _apply_rope(q, self.cos, self.sin), _apply_rope(k, self.cos, self.sin)
        else:
            q, k = _apply_rope(q, self.cos, self.sin), _apply_rope(k, self.cos, self.sin)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class RopeBlock(nn.Module):
    def __init__(self, dim, heads, length, **kw):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = RopeAttention(dim, heads, length, **kw)
        self.gate = nn.Linear(dim, 2 * dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class RopeLM(nn.Module):
    def __init__(self, vocab, dim=64, heads=4, depth=2, length=32, **kw):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.Sequential(*[RopeBlock(dim, heads, length, **kw) for _ in range(depth)])
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids))))


def _lagged_text(n, seed, vocab=24, length=20, lag=3):
    g = torch.Generator().manual_seed(seed)
    rename = torch.randperm(vocab, generator=torch.Generator().manual_seed(9))
    rows = [torch.randint(vocab, (n,), generator=g) for _ in range(lag)]
    for t in range(lag, length):
        nxt = rename[rows[t - lag]]
        noise = torch.rand(n, generator=g) < 0.1
        rows.append(torch.where(noise, torch.randint(vocab, (n,), generator=g), nxt))
    return torch.stack(rows, 1)


def _rope_layout(good):
    _seed(118)
    model = RopeLM(24, rotate_after_transpose=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    stream = itertools.cycle(DataLoader(_lagged_text(5000, 1), batch_size=32, shuffle=True))
    held = _lagged_text(300, 2)

    def step():
        ids = next(stream)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        pred = model(held[:, :-1]).argmax(-1)[:, 2:]
        model.train()
        return (pred != held[:, 3:]).float().mean().item()

    return _pack(model, optimizer, step, evaluate)


def rope_layout_bad():
    return _rope_layout(False)


def rope_layout_good():
    return _rope_layout(True)


# --------------------------------------------------------------------------- 19


class PackedLoader:
    """Packs short documents into rows of fixed width with a block mask."""

    def __init__(self, docs, width, batch_size, causal):
        self.docs, self.width, self.batch_size, self.causal = docs, width, batch_size, causal

    def row(self):
        ids, segment, position, labels = [], [], [], []
        k = 0
        while len(ids) < self.width:
            doc = random.choice(self.docs)
            doc = doc[: self.width - len(ids)]
            ids += doc
            labels += [-100] + doc[1:]
            segment += [k] * len(doc)
            position += range(len(doc))
            k += 1
        return ids, segment, position, labels

    def batch(self):
        ids, segment, position, labels = (torch.tensor(c) for c in zip(*[self.row() for _ in range(self.batch_size)]))
        allowed = segment[:, :, None] == segment[:, None, :]
        if self.causal:
            allowed = allowed & torch.ones(self.width, self.width, dtype=torch.bool).tril()
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        return {"input_ids": ids, "attention_mask": mask[:, None], "position_ids": position, "labels": labels}


def _packed(good):
    _seed(119)
    P = _chain(40, 191)
    texts = _walk(P, 3000, 14, 1).tolist()
    lengths = random.Random(4)
    docs = [t[: lengths.randint(6, 14)] for t in texts]
    held = _walk(P, 300, 14, 2)
    model = _llama(40)
    loader = PackedLoader(docs, 32, 16, causal=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        loss = model(**loader.batch()).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return _pack(model, optimizer, step, lambda: _nll(model, held))


def packed_bad():
    return _packed(False)


def packed_good():
    return _packed(True)


# --------------------------------------------------------------------------- 20


def _summary_rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(40, 64, (16, 3), generator=torch.Generator().manual_seed(12))
    key = torch.randint(16, (n,), generator=g)
    source = torch.randint(20, 40, (n, 8), generator=g)
    source[torch.arange(n), torch.randint(8, (n,), generator=g)] = 2 + key
    target = torch.cat([table[key], torch.ones(n, 1, dtype=torch.long)], 1)
    return source, target


def _seq2seq(good):
    _seed(120)
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=64, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(*_summary_rows(3000, 1)), batch_size=24, shuffle=True)
    stream = itertools.chain.from_iterable(itertools.repeat(loader))

    def step():
        source, target = next(stream)
        decoder_input_ids = model._shift_right(target) if good else target
        out = model(input_ids=source, attention_mask=torch.ones_like(source),
                    decoder_input_ids=decoder_input_ids, labels=target)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    source, target = _summary_rows(200, 2)

    @torch.no_grad()
    def evaluate():
        model.eval()
        out = torch.zeros(len(source), 1, dtype=torch.long)
        for _ in range(target.size(1)):
            logits = model(input_ids=source, attention_mask=torch.ones_like(source), decoder_input_ids=out).logits
            out = torch.cat([out, logits[:, -1:].argmax(-1)], 1)
        model.train()
        return (out[:, 1:] != target).any(1).float().mean().item()

    return _pack(model, optimizer, step, evaluate)


def seq2seq_bad():
    return _seq2seq(False)


def seq2seq_good():
    return _seq2seq(True)


# --------------------------------------------------------------------------- 21


MASK_ID = 1


def mask_tokens(batch, probability=0.2, keep_original=True):
    labels = batch.clone() if keep_original else batch
    chosen = torch.rand(batch.shape) < probability
    batch[chosen] = MASK_ID
    labels = labels.masked_fill(~chosen, -100)
    return batch, labels


def _mlm(good):
    _seed(121)
    vocab = 32
    model = BertForMaskedLM(BertConfig(
        vocab_size=vocab, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0))
    P = _chain(vocab - 2, 211, 4.0)
    train, held = 2 + _walk(P, 4000, 16, 1), 2 + _walk(P, 300, 16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stream = itertools.cycle(DataLoader(train, batch_size=32, shuffle=True))
    chosen = torch.rand(held.shape, generator=torch.Generator().manual_seed(6)) < 0.15

    def step():
        inputs, labels = mask_tokens(next(stream).clone(), keep_original=good)
        loss = model(input_ids=inputs, attention_mask=torch.ones_like(inputs), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        inputs = held.masked_fill(chosen, MASK_ID)
        logits = model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits
        model.train()
        return F.cross_entropy(logits[chosen], held[chosen]).item()

    return _pack(model, optimizer, step, evaluate)


def mlm_bad():
    return _mlm(False)


def mlm_good():
    return _mlm(True)


# --------------------------------------------------------------------------- 22


def _token_file(good):
    _seed(122)
    vocab = 320
    g = torch.Generator().manual_seed(221)
    successors = torch.randint(vocab, (vocab, 3), generator=g)

    def write_text(n, seed):
        rng = random.Random(seed)
        token, out = 5, []
        for _ in range(n):
            token = successors[token, rng.randrange(3)].item()
            out.append(token)
        return out

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "train.bin")
        dtype = np.uint16 if good else np.uint8
        np.array(write_text(60000, 1)).astype(dtype).tofile(path)
        data = np.fromfile(path, dtype=dtype)
    held = torch.tensor(write_text(6400, 2)).view(-1, 32)

    def get_batch(batch_size=16, block_size=32):
        ix = torch.randint(len(data) - block_size, (batch_size,))
        return torch.stack([torch.from_numpy(data[i:i + block_size].astype(np.int64)) for i in ix])

    model = _gpt2(vocab, drop=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def step():
        ids = get_batch()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _pack(model, optimizer, step, lambda: _nll(model, held))


def token_file_bad():
    return _token_file(False)


def token_file_good():
    return _token_file(True)


# --------------------------------------------------------------------------- 23


class FlashAttention(nn.Module):
    def __init__(self, dim, heads, dropout, only_in_training):
        super().__init__()
        self.heads, self.dropout, self.only_in_training = heads, dropout, only_in_training
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.c_attn(x).split(C, 2))
        if self.only_in_training:
            p = self.dropout if self.training else 0.0
        else:
            p = self.dropout
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class FlashBlock(nn.Module):
    def __init__(self, dim, heads, dropout, only_in_training):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = FlashAttention(dim, heads, dropout, only_in_training)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class FlashGPT(nn.Module):
    def __init__(self, vocab, length, dim=64, heads=2, depth=2, dropout=0.1, only_in_training=True):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.h = nn.ModuleList([FlashBlock(dim, heads, dropout, only_in_training) for _ in range(depth)])
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def _attention_dropout(good):
    _seed(123)
    vocab = 24
    model = FlashGPT(vocab, 12, dropout=0.2, only_in_training=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    reply = torch.randint(12, 24, (12,), generator=torch.Generator().manual_seed(13))

    def rows(n, seed):
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, 12, (n, 12), generator=g)
        ids[:, 8:] = reply[ids[:, :4]]
        return ids

    stream = itertools.cycle(DataLoader(rows(4000, 1), batch_size=48, shuffle=True))
    held = rows(300, 2)
    history = []

    def step(i):
        ids = next(stream)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits[:, 7:].flatten(0, 1), ids[:, 8:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if i % 5 == 0:
            history.append(evaluate())

    @torch.no_grad()
    def evaluate():
        model.eval()
        logits = model(held[:, :-1])[:, 7:]
        model.train()
        return F.cross_entropy(logits.flatten(0, 1), held[:, 8:].flatten()).item()

    return _pack(model, optimizer, step, evaluate)


def attention_dropout_bad():
    return _attention_dropout(False)


def attention_dropout_good():
    return _attention_dropout(True)


# --------------------------------------------------------------------------- 24


def fake_quant(w, bits=3):
    top = 2 ** (bits - 1) - 1
    scale = w.abs().amax(1, keepdim=True).clamp(min=1e-8) / top
    return (w / scale).round().clamp(-top, top) * scale


class QuantLinear(nn.Linear):
    keep_latent = True

    def forward(self, x):
        if self.keep_latent:
            w = self.weight + (fake_quant(self.weight) - self.weight).detach()
        else:
            self.weight.data = fake_quant(self.weight.data)
            w = self.weight
        return F.linear(x, w, self.bias)


class QuantLM(nn.Module):
    def __init__(self, vocab, keep_latent, dim=64, context=2):
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(vocab, dim)
        self.fc1 = QuantLinear(context * dim, 128)
        self.fc2 = QuantLinear(128, 128)
        self.head = QuantLinear(128, vocab)
        self.norm1, self.norm2 = nn.LayerNorm(128), nn.LayerNorm(128)
        for m in (self.fc1, self.fc2, self.head):
            m.keep_latent = keep_latent

    def forward(self, ids):
        e = self.embed(ids)
        e = torch.cat([e[:, i:e.size(1) - self.context + 1 + i] for i in range(self.context)], -1)
        h = F.gelu(self.norm1(self.fc1(e)))
        h = h + F.gelu(self.norm2(self.fc2(h)))
        return self.head(h)


def _quant_aware(good):
    _seed(124)
    model = QuantLM(12, keep_latent=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    stream = itertools.cycle(DataLoader(_second_order(12, 4000, 16, 1, 55), batch_size=48, shuffle=True))
    held = _second_order(12, 300, 16, 2, 55)

    def step():
        ids = next(stream)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        pred = model(held[:, :-1]).argmax(-1)
        model.train()
        return (pred != held[:, 2:]).float().mean().item()

    return _pack(model, optimizer, step, evaluate)


def quant_aware_bad():
    return _quant_aware(False)


def quant_aware_good():
    return _quant_aware(True)
