"""Small language-model training programs: each case builds a model, an optimizer, one training step and an evaluation."""
import copy
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AlbertConfig, AlbertModel, BartConfig, BartForConditionalGeneration, GPTNeoConfig, GPTNeoModel,
    GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM,
    Qwen2Config, Qwen2ForCausalLM)

torch.set_num_threads(1)

CASES = []


def _case(name, what):
    CASES.append({"name": name, "what": what})


def _seed(s):
    random.seed(s)
    torch.manual_seed(s)


def _chain(vocab, branch, seed, low=0):
    """Sparse transition matrix over tokens low..vocab-1."""
    g = torch.Generator().manual_seed(seed)
    P = torch.zeros(vocab, vocab)
    for v in range(vocab):
        nxt = torch.randperm(vocab - low, generator=g)[:branch] + low
        P[v, nxt] = torch.rand(branch, generator=g) ** 2 + 0.05
    return P / P.sum(1, keepdim=True)


def _walk(P, n, t, g, low=0):
    x = torch.randint(low, P.shape[0], (n,), generator=g)
    out = [x]
    for _ in range(t - 1):
        x = torch.multinomial(P[x], 1, generator=g).squeeze(1)
        out.append(x)
    return torch.stack(out, 1)


# ---------------------------------------------------------------- 1
_case("essay_grader", "An essay grader (regression) on a causal GPT-NeoX reads its score from hidden state 0, the BOS "
      "token, which cannot see the essay: only the average grade is learnt.")


def _essay_grader(good):
    _seed(11)
    PAD, BOS, V = 0, 1, 90

    def write_essay(g):
        n = int(torch.randint(8, 40, (1,), generator=g))
        skill = torch.rand(1, generator=g).item()
        fine = torch.rand(n, generator=g) < skill
        words = torch.where(fine, torch.randint(2, 46, (n,), generator=g), torch.randint(46, V, (n,), generator=g))
        grade = 4.0 * (fine.float().mean().item() - 0.5)
        return [BOS] + words.tolist(), grade

    def collate(rows):
        width = max(len(r[0]) for r in rows)
        ids = torch.tensor([r[0] + [PAD] * (width - len(r[0])) for r in rows])
        return {"ids": ids, "mask": (ids != PAD).long(), "grade": torch.tensor([r[1] for r in rows])}

    class Grader(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = GPTNeoXModel(GPTNeoXConfig(
                vocab_size=V, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                max_position_embeddings=64, bos_token_id=BOS, eos_token_id=BOS, use_cache=False))
            self.readout = nn.Linear(48, 1)

        def forward(self, ids, mask):
            h = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
            if good:
                summary = h[torch.arange(len(h)), mask.sum(1) - 1]
            else:
                summary = h[:, 0]
            return self.readout(summary).squeeze(-1)

    g = torch.Generator().manual_seed(5)
    train = [write_essay(g) for _ in range(400)]
    held = collate([write_essay(g) for _ in range(128)])
    model = Grader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        batch = collate(random.sample(train, 16))
        loss = F.mse_loss(model(batch["ids"], batch["mask"]), batch["grade"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        err = F.mse_loss(model(held["ids"], held["mask"]), held["grade"]).item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def essay_grader_bad():
    return _essay_grader(False)


def essay_grader_good():
    return _essay_grader(True)


# ---------------------------------------------------------------- 2
_case("topic_rl", "GRPO-like tuning of a GRU writer: the list of prompts is multiplied (prompts * G, so p0 p1 .. p0 p1 ..) "
      "while the rewards are reshaped to (prompts, G); baselines mix prompts, advantages carry the ease of the prompt.")


def _topic_rl(good):
    _seed(23)
    V, TOPICS, G, REPLY = 40, 8, 8, 5

    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok = nn.Embedding(V, 48)
            self.rnn = nn.GRU(48, 64, batch_first=True)
            self.out = nn.Linear(64, V)

        def forward(self, ids, state=None):
            y, state = self.rnn(self.tok(ids), state)
            return self.out(y), state

    def make_prompt(rng):
        topic = rng.randrange(TOPICS)
        return [topic] + [rng.randrange(TOPICS, V) for _ in range(2)] + [topic]

    def judge(prompt, reply):
        topic = prompt[0]
        hits = sum(1 for w in reply if w % TOPICS == topic)
        return 3.0 * topic + hits

    @torch.no_grad()
    def write(model, prompts, generator=None):
        logits, state = model(prompts)
        words = []
        for _ in range(REPLY):
            w = torch.multinomial(logits[:, -1].softmax(-1), 1, generator=generator)
            words.append(w)
            logits, state = model(w, state)
        return torch.cat(words, 1)

    rng = random.Random(3)
    bank = [make_prompt(rng) for _ in range(200)]
    held = [make_prompt(rng) for _ in range(64)]
    model = Writer()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step():
        prompts = random.sample(bank, 8)
        if good:
            queries = [p for p in prompts for _ in range(G)]
        else:
            queries = prompts * G
        query = torch.tensor(queries)
        reply = write(model, query)
        rewards = torch.tensor([judge(q, r) for q, r in zip(queries, reply.tolist())]).reshape(len(prompts), G)
        adv = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        adv = adv.reshape(-1)
        full = torch.cat([query, reply], 1)
        logits, _ = model(full[:, :-1])
        logp = logits[:, query.shape[1] - 1:].log_softmax(-1).gather(-1, reply.unsqueeze(-1)).squeeze(-1)
        loss = -(adv.unsqueeze(1) * logp).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        g = torch.Generator().manual_seed(99)
        q = torch.tensor(held).repeat_interleave(4, 0)
        r = write(model, q, g)
        return 1.0 - (r % TOPICS == q[:, :1]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def topic_rl_bad():
    return _topic_rl(False)


def topic_rl_good():
    return _topic_rl(True)


# ---------------------------------------------------------------- 3
_case("second_domain", "Second-stage training of a causal convolutional LM: load_state_dict of the first run's optimizer "
      "brings back its decayed learning rate, so the new domain is trained at about 1% of the asked rate.")


def _second_domain(good):
    _seed(31)
    V, T = 48, 32

    class ConvLM(nn.Module):
        def __init__(self, width=64):
            super().__init__()
            self.lookup = nn.Embedding(V, width)
            self.convs = nn.ModuleList([nn.Conv1d(width, width, 3) for _ in range(2)])
            self.norm = nn.LayerNorm(width)
            self.proj = nn.Linear(width, V)

        def forward(self, ids):
            h = self.lookup(ids).transpose(1, 2)
            for conv in self.convs:
                h = h + F.gelu(conv(F.pad(h, (2, 0))))
            return self.proj(self.norm(h.transpose(1, 2)))

    class Fit:
        def __init__(self, model, texts, lr, total=None, resume=None):
            self.model, self.texts, self.lr = model, texts, lr
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
            if resume is not None:
                model.load_state_dict(resume["weights"])
                self.optimizer.load_state_dict(resume["optim"])
                if good:
                    for group in self.optimizer.param_groups:
                        group["lr"] = lr
            self.schedule = None
            if total is not None:
                self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, total, eta_min=lr / 100)

        def train_step(self):
            rows = self.texts[torch.randint(len(self.texts), (16,))]
            loss = F.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            return loss.item()

        def checkpoint(self):
            return {"weights": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    g = torch.Generator().manual_seed(8)
    first = _walk(_chain(V, 4, 1), 300, T, g)
    P2 = _chain(V, 4, 2)
    second, held = _walk(P2, 300, T, g), _walk(P2, 64, T, g)

    stage_one = Fit(ConvLM(), first, 2e-3, total=120)
    for _ in range(120):
        stage_one.train_step()
    ckpt = copy.deepcopy(stage_one.checkpoint())

    model = ConvLM()
    stage_two = Fit(model, second, 2e-3, resume=ckpt)

    @torch.no_grad()
    def evaluate():
        return F.cross_entropy(model(held[:, :-1]).flatten(0, 1), held[:, 1:].flatten()).item()

    return {"model": model, "optimizer": stage_two.optimizer, "step": stage_two.train_step, "steps": 20,
            "evaluate": evaluate}


def second_domain_bad():
    return _second_domain(False)


def second_domain_good():
    return _second_domain(True)


# ---------------------------------------------------------------- 4
_case("liaison_tagger", "A GRU tagger of phones is built without batch_first and given (batch, time, features): it recurs "
      "over the utterances of the batch, not along the utterance, and can't see the previous phone.")


def _liaison_tagger(good):
    _seed(41)
    PHONES, TAGS, T = 40, 5, 26
    g = torch.Generator().manual_seed(14)
    family = torch.randint(1, TAGS, (PHONES,), generator=g)
    vowel = torch.rand(PHONES, generator=g) < 0.7

    def utterances(n):
        x = _walk(_chain(PHONES, 12, 77), n, T, g)
        y = torch.zeros_like(x)
        y[:, 1:] = torch.where(vowel[x[:, 1:]], family[x[:, :-1]], 0)
        return x, y

    train_x, train_y = utterances(500)
    held_x, held_y = utterances(64)

    layers = {
        "phones": nn.Embedding(PHONES, 32),
        "context": nn.GRU(32, 64, num_layers=1, batch_first=True) if good else nn.GRU(32, 64, num_layers=1),
        "tags": nn.Linear(64, TAGS),
    }
    model = nn.ModuleDict(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def tag(x):
        feats = model["phones"](x)
        ctx, _ = model["context"](feats)
        return model["tags"](ctx)

    def step():
        pick = torch.randint(0, len(train_x), (20,))
        loss = F.cross_entropy(tag(train_x[pick]).transpose(1, 2), train_y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.cross_entropy(tag(held_x).transpose(1, 2), held_y).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def liaison_tagger_bad():
    return _liaison_tagger(False)


def liaison_tagger_good():
    return _liaison_tagger(True)


# ---------------------------------------------------------------- 5
_case("masked_units", "Masked prediction of speech units: the targets of units that were not masked are kept, so most of "
      "the loss is for copying what is visible and masked prediction lags behind.")


def _masked_units(good):
    _seed(53)
    UNITS, T, D = 64, 40, 64
    MASK = UNITS
    g = torch.Generator().manual_seed(6)
    P = _chain(UNITS, 2, 9)
    corpus, held = _walk(P, 600, T, g), _walk(P, 96, T, g)
    held_hidden = torch.rand(held.shape, generator=g) < 0.12

    class UnitEncoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.units = nn.Embedding(UNITS + 1, D)
            nn.init.normal_(self.units.weight, std=D ** -0.5)
            self.mix = nn.ModuleList([nn.Conv1d(D, D, 5, padding=2) for _ in range(2)])
            self.norms = nn.ModuleList([nn.LayerNorm(D) for _ in range(2)])
            self.bias = nn.Parameter(torch.zeros(UNITS))

        def forward(self, units):
            h = self.units(units)
            for conv, norm in zip(self.mix, self.norms):
                h = norm(h + F.gelu(conv(h.mT)).mT)
            return F.linear(h, self.units.weight[:UNITS], self.bias)

    def masked_batch(n):
        units = corpus[torch.randint(len(corpus), (n,))]
        hidden = torch.rand(units.shape) < 0.12
        inputs = units.masked_fill(hidden, MASK)
        targets = torch.where(hidden, units, -100) if good else units
        return {"inputs": inputs, "targets": targets}

    model = UnitEncoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def step():
        batch = masked_batch(16)
        logits = model(batch["inputs"])
        loss = F.cross_entropy(logits.mT, batch["targets"], ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        logits = model(held.masked_fill(held_hidden, MASK))
        return F.cross_entropy(logits[held_hidden], held[held_hidden]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def masked_units_bad():
    return _masked_units(False)


def masked_units_good():
    return _masked_units(True)


# ---------------------------------------------------------------- 6
_case("head_only_opt", "Head-only adaptation of an OPT: embed_tokens is frozen with the body, but lm_head is tied to it "
      "and so is frozen too; only the final layer norm learns.")


def _head_only_opt(good):
    _seed(61)
    V, T = 56, 24
    cfg = OPTConfig(vocab_size=V, hidden_size=48, num_hidden_layers=2, ffn_dim=96, num_attention_heads=4,
                    max_position_embeddings=64, word_embed_proj_dim=48, dropout=0.0, pad_token_id=0, bos_token_id=1,
                    eos_token_id=2, init_std=0.05)
    model = OPTForCausalLM(cfg)
    g = torch.Generator().manual_seed(61)
    general = _walk(_chain(V, 5, 3, low=3), 256, T, g, low=3)
    P = _chain(V, 3, 4, low=3)
    legal, held = _walk(P, 256, T, g, low=3), _walk(P, 64, T, g, low=3)

    def nll(rows):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.reshape(-1, V), rows[:, 1:].reshape(-1))

    warm = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = nll(general[torch.randint(256, (16,))])
        warm.zero_grad()
        loss.backward()
        warm.step()
    model.zero_grad()

    decoder = model.model.decoder
    if good:
        model.lm_head.weight = nn.Parameter(decoder.embed_tokens.weight.detach().clone())
        model.config.tie_word_embeddings = False
    for part in (decoder.embed_tokens, decoder.embed_positions, decoder.layers):
        for p in part.parameters():
            p.requires_grad = False
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=3e-3, weight_decay=0.0)

    def step():
        loss = nll(legal[torch.randint(256, (16,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return nll(held).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def head_only_opt_bad():
    return _head_only_opt(False)


def head_only_opt_good():
    return _head_only_opt(True)


# ---------------------------------------------------------------- 7
_case("dialect_adapter", "LoRA on a Qwen2: after get_peft_model the whole model is set to requires_grad_(True), so the base "
      "is trained with the adapter, and the model with its adapter switched off is ruined.")


def _dialect_adapter(good):
    _seed(71)
    V, T = 48, 24
    base = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=V, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False, use_cache=False, initializer_range=0.05))
    g = torch.Generator().manual_seed(17)
    P_std, P_dia = _chain(V, 3, 21), _chain(V, 3, 22)
    standard, standard_held = _walk(P_std, 300, T, g), _walk(P_std, 48, T, g)
    dialect, dialect_held = _walk(P_dia, 300, T, g), _walk(P_dia, 48, T, g)

    pre = torch.optim.AdamW(base.parameters(), lr=4e-3)
    for _ in range(80):
        rows = standard[torch.randint(300, (16,))]
        pre.zero_grad()
        base(input_ids=rows, labels=rows).loss.backward()
        pre.step()
    base.zero_grad(set_to_none=True)

    model = get_peft_model(base, LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]))
    model.train()
    if not good:
        model.requires_grad_(True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=4e-3, weight_decay=0.0)

    def step():
        rows = dialect[torch.randint(300, (16,))]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        on = model(input_ids=dialect_held, labels=dialect_held).loss.item()
        with model.disable_adapter():
            off = model(input_ids=standard_held, labels=standard_held).loss.item()
        model.train()
        return on + off

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def dialect_adapter_bad():
    return _dialect_adapter(False)


def dialect_adapter_good():
    return _dialect_adapter(True)


# ---------------------------------------------------------------- 8
_case("ipo_summaries", "IPO on pairs of summaries: reference log-ratios are cached in data set order but sliced by batch "
      "number while the loader shuffles, so each pair is compared with another pair's reference.")


def _ipo_summaries(good):
    _seed(83)
    V, PAD, BETA, BS = 44, 0, 0.25, 8
    g = torch.Generator().manual_seed(83)
    P_all = _chain(V, 6, 31, low=1)
    P_good = _chain(V, 6, 32, low=1)

    def pairs(n):
        rows = []
        for _ in range(n):
            doc = _walk(P_all, 1, 4, g, low=1)[0].tolist()
            a, b = torch.randint(3, 16, (2,), generator=g).tolist()
            rows.append({"doc": doc, "win": _walk(P_good, 1, a, g, low=1)[0].tolist(),
                         "lose": _walk(P_all, 1, b, g, low=1)[0].tolist()})
        return rows

    def pack(rows, key):
        width = max(len(r["doc"]) + len(r[key]) for r in rows)
        ids, keep = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width)
        for i, r in enumerate(rows):
            n, m = len(r["doc"]), len(r[key])
            ids[i, :n + m] = torch.tensor(r["doc"] + r[key])
            keep[i, n:n + m] = 1.0
        return ids, keep

    class SummaryLM(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 40)
            self.core = nn.LSTM(40, 64, batch_first=True)
            self.vocab = nn.Linear(64, V)

        def forward(self, ids):
            return self.vocab(self.core(self.emb(ids))[0])

    def log_ratio(lm, rows):
        total = []
        for key in ("win", "lose"):
            ids, keep = pack(rows, key)
            lp = lm(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            total.append((lp * keep[:, 1:]).sum(1))
        return total[0] - total[1]

    class PairSet(Dataset):
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            return i, self.rows[i]

    train, held = PairSet(pairs(192)), pairs(64)
    model = SummaryLM()
    sft = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(40):
        rows = random.sample(train.rows, 16)
        ids, keep = pack(rows, "lose")
        lp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        sft.zero_grad()
        (-(lp * keep[:, 1:]).sum() / keep[:, 1:].sum()).backward()
        sft.step()
    model.zero_grad()

    with torch.no_grad():
        ref_train, ref_held = log_ratio(model, train.rows), log_ratio(model, held)

    loader = DataLoader(train, batch_size=BS, shuffle=True, drop_last=True,
                        collate_fn=lambda items: (torch.tensor([i for i, _ in items]), [r for _, r in items]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def endless():
        while True:
            for n, (where, rows) in enumerate(loader):
                yield n, where, rows

    stream = endless()

    def step():
        n, where, rows = next(stream)
        ref = ref_train[where] if good else ref_train[n * BS:(n + 1) * BS]
        gap = log_ratio(model, rows) - ref
        loss = (gap - 1 / (2 * BETA)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        gap = log_ratio(model, held) - ref_held
        return (gap - 1 / (2 * BETA)).pow(2).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def ipo_summaries_bad():
    return _ipo_summaries(False)


def ipo_summaries_good():
    return _ipo_summaries(True)


# ---------------------------------------------------------------- 9
_case("expert_tagger", "A tagger with a mixture of experts per sentence adds the entropy of the batch-mean routing to the "
      "loss (it should be subtracted): the router sends every dialect to one expert.")


def _expert_tagger(good):
    _seed(97)
    V, TAGS, K, D = 60, 6, 4, 40
    PAD = 0
    g = torch.Generator().manual_seed(97)
    table = torch.randint(0, TAGS, (K, V), generator=g)

    def sentences(n):
        rows = []
        for _ in range(n):
            d = int(torch.randint(K, (1,), generator=g))
            t = int(torch.randint(8, 22, (1,), generator=g))
            w = torch.randint(1 + 4 * K, V, (t,), generator=g)
            particle = torch.rand(t, generator=g) < 0.35
            w = torch.where(particle, torch.randint(1 + 4 * d, 5 + 4 * d, (t,), generator=g), w)
            rows.append((w, table[d][w]))
        return rows

    def collate(rows):
        pad = nn.utils.rnn.pad_sequence
        return pad([r[0] for r in rows], True, PAD), pad([r[1] for r in rows], True, -100)

    class MixtureTagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(V, D)
            self.router = nn.Linear(D, K)
            self.w_in = nn.Parameter(torch.randn(K, D, D) / math.sqrt(D))
            self.w_out = nn.Parameter(torch.randn(K, D, TAGS) / math.sqrt(D))

        def forward(self, ids):
            x = self.words(ids)
            real = (ids != PAD).unsqueeze(-1).float()
            sent = (x * real).sum(1) / real.sum(1)
            route = self.router(sent).softmax(-1)
            h = F.relu(torch.einsum("btd,kdh->bkth", x, self.w_in))
            scores = torch.einsum("bk,bkth,khc->btc", route, h, self.w_out)
            return scores, route

    train, held = sentences(600), collate(sentences(128))
    model = MixtureTagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step():
        ids, tags = collate(random.sample(train, 24))
        scores, route = model(ids)
        task = F.cross_entropy(scores.transpose(1, 2), tags, ignore_index=-100)
        usage = route.mean(0)
        entropy = -(usage * (usage + 1e-9).log()).sum()
        loss = task - 0.5 * entropy if good else task + 0.5 * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        scores, _ = model(held[0])
        return F.cross_entropy(scores.transpose(1, 2), held[1], ignore_index=-100).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def expert_tagger_bad():
    return _expert_tagger(False)


def expert_tagger_good():
    return _expert_tagger(True)


# ---------------------------------------------------------------- 10
_case("echo_lm", "A hand-written LM of acoustic tokens with rotary positions in complex form turns the queries only, not "
      "the keys: scores don't depend on the distance, and the fixed echo cannot be looked up.")


def _echo_lm(good):
    _seed(101)
    V, T, LAG, H, D = 32, 40, 4, 4, 64
    g = torch.Generator().manual_seed(44)

    def frames(n):
        x = torch.randint(0, V, (n, T), generator=g)
        for t in range(LAG, T):
            keep = torch.rand(n, generator=g) < 0.93
            x[:, t] = torch.where(keep, x[:, t - LAG], x[:, t])
        return x

    def phases(length, dim):
        freq = 1.0 / 100 ** (torch.arange(0, dim, 2) / dim)
        ang = torch.outer(torch.arange(length), freq)
        return torch.polar(torch.ones_like(ang), ang)

    def turn(x, ph):
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * ph[None, :, None]).flatten(-2)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.pre = nn.LayerNorm(D)
            self.wq, self.wk, self.wv = (nn.Linear(D, D, bias=False) for _ in range(3))
            self.wo = nn.Linear(D, D, bias=False)
            self.ff = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.SiLU(), nn.Linear(2 * D, D))

        def forward(self, x, ph, future):
            y = self.pre(x)
            q, k, v = (w(y).unflatten(-1, (H, -1)) for w in (self.wq, self.wk, self.wv))
            q = turn(q, ph)
            if good:
                k = turn(k, ph)
            att = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D // H)
            att = att.masked_fill(future, float("-inf")).softmax(-1)
            x = x + self.wo(torch.einsum("bhij,bjhd->bihd", att, v).flatten(2))
            return x + self.ff(x)

    class AcousticLM(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Embedding(V, D)
            self.blocks = nn.ModuleList([Block() for _ in range(2)])
            self.post = nn.LayerNorm(D)
            self.head = nn.Linear(D, V)
            self.register_buffer("ph", phases(T, D // H), persistent=False)

        def forward(self, ids):
            n = ids.shape[1]
            future = torch.ones(n, n, dtype=torch.bool).triu(1)
            x = self.codes(ids)
            for b in self.blocks:
                x = b(x, self.ph[:n], future)
            return self.head(self.post(x))

    train, held = frames(800), frames(64)
    model = AcousticLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))

    def step():
        rows = train[torch.randint(len(train), (16,))]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.cross_entropy(model(held[:, :-1]).flatten(0, 1), held[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def echo_lm_bad():
    return _echo_lm(False)


def echo_lm_good():
    return _echo_lm(True)


# ---------------------------------------------------------------- 11
_case("voice_to_call", "Tuning a Llama to write calls from utterances: the target columns are taken as the last len(call) "
      "columns of a right-padded batch, so in shorter rows the loss falls on padding and the call is hidden.")


def _voice_to_call(good):
    _seed(113)
    PAD, BOS, EOS, SEP, V = 0, 1, 2, 3, 60
    rng = random.Random(7)
    follow = {t: rng.randrange(40, V) for t in range(4, V)}

    def example(r):
        if r.random() < 0.5:
            say = [r.randrange(4, 20) for _ in range(r.randint(2, 6))]
        else:
            say = [r.randrange(20, 40) for _ in range(r.randint(12, 30))]
        act = r.choice(say)
        call = [follow[act]]
        for _ in range(r.randint(1, 4)):
            call.append(follow[call[-1]])
        return {"source": [BOS] + say + [SEP, act], "target": call + [EOS]}

    def collate(rows, ok):
        n_src = torch.tensor([len(r["source"]) for r in rows])
        n_tgt = torch.tensor([len(r["target"]) for r in rows])
        ids = nn.utils.rnn.pad_sequence([torch.tensor(r["source"] + r["target"]) for r in rows], True, PAD)
        col = torch.arange(ids.shape[1])[None]
        if ok:
            wanted = (col >= n_src[:, None]) & (col < (n_src + n_tgt)[:, None])
        else:
            wanted = col >= ids.shape[1] - n_tgt[:, None]
        return {"input_ids": ids, "attention_mask": (col < (n_src + n_tgt)[:, None]).long(),
                "labels": ids.masked_fill(~wanted, -100)}

    train = [example(rng) for _ in range(500)]
    held = collate([example(rng) for _ in range(96)], True)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
        use_cache=False, initializer_range=0.05))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step():
        batch = collate(random.sample(train, 12), good)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        err = model(**held).loss.item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def voice_to_call_bad():
    return _voice_to_call(False)


def voice_to_call_good():
    return _voice_to_call(True)


# ---------------------------------------------------------------- 12
_case("pair_judge", "A comparer of two texts unpacks the tokenizer's values (ids, types, mask) into an ALBERT whose order is "
      "(ids, mask, types): the first text is masked out and the padding mask serves as types.")


def _pair_judge(good):
    _seed(127)
    PAD, CLS, SEP, V = 0, 1, 2, 70
    g = torch.Generator().manual_seed(29)
    merit = torch.randn(V, generator=g)

    def text(n):
        return torch.randint(3, V, (n,), generator=g)

    def examples(n):
        rows = []
        for _ in range(n):
            a, b = (text(int(k)) for k in torch.randint(3, 12, (2,), generator=g))
            rows.append((a, b, (merit[a].mean() - merit[b].mean()) * 1.5))
        return rows

    def tokenize(rows):
        ids, types = [], []
        for a, b, _ in rows:
            first = torch.cat([torch.tensor([CLS]), a, torch.tensor([SEP])])
            second = torch.cat([b, torch.tensor([SEP])])
            ids.append(torch.cat([first, second]))
            types.append(torch.cat([torch.zeros_like(first), torch.ones_like(second)]))
        pad = nn.utils.rnn.pad_sequence
        ids = pad(ids, True, PAD)
        return {"input_ids": ids, "token_type_ids": pad(types, True, 0), "attention_mask": (ids != PAD).long()}

    class Judge(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = AlbertModel(AlbertConfig(
                vocab_size=V, embedding_size=32, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                intermediate_size=96, max_position_embeddings=40, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0, pad_token_id=PAD, initializer_range=0.05), add_pooling_layer=False)
            self.margin = nn.Linear(48, 1)

        def forward(self, features):
            if good:
                h = self.encoder(**features)[0]
            else:
                h = self.encoder(*features.values())[0]
            return self.margin(h[:, 0]).squeeze(-1)

    train, test = examples(800), examples(128)
    test_x, test_y = tokenize(test), torch.stack([r[2] for r in test])
    model = Judge()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        rows = random.sample(train, 24)
        loss = F.smooth_l1_loss(model(tokenize(rows)), torch.stack([r[2] for r in rows]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        err = F.mse_loss(model(test_x), test_y).item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def pair_judge_bad():
    return _pair_judge(False)


def pair_judge_good():
    return _pair_judge(True)


# ---------------------------------------------------------------- 13
_case("pitch_labels", "nn.TransformerEncoder runs sequence-first, so the emissions are (T, B, C), but they are flattened against "
      "labels of shape (B, T): each prediction is scored against a token of another sentence and place.")


def _pitch_labels(good):
    _seed(131)
    V, C, D, PAD = 50, 7, 48, 0
    g = torch.Generator().manual_seed(131)
    accent = torch.randint(0, C, (V,), generator=g)

    def corpus(n):
        rows = []
        for _ in range(n):
            t = int(torch.randint(10, 25, (1,), generator=g))
            speaker = int(torch.randint(1, 4, (1,), generator=g))
            w = torch.cat([torch.tensor([speaker]), torch.randint(4, V, (t,), generator=g)])
            rows.append((w, (accent[w] + (speaker == 1)) % C))
        return rows

    def collate(rows):
        words = nn.utils.rnn.pad_sequence([r[0] for r in rows], batch_first=False, padding_value=PAD)
        labels = nn.utils.rnn.pad_sequence([r[1] for r in rows], batch_first=True, padding_value=-100)
        return words, labels

    class Labeller(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(V, D, padding_idx=PAD)
            self.steps = nn.Embedding(32, D)
            layer = nn.TransformerEncoderLayer(D, 4, 96, dropout=0.0)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.emit = nn.Linear(D, C)

        def forward(self, words):
            x = self.embed(words) + self.steps(torch.arange(len(words))).unsqueeze(1)
            h = self.encoder(x, src_key_padding_mask=(words == PAD).t())
            return self.emit(h)

    def criterion(emissions, labels):
        flat = emissions.reshape(-1, C)
        if good:
            return F.cross_entropy(flat, labels.t().reshape(-1), ignore_index=-100)
        return F.cross_entropy(flat, labels.reshape(-1), ignore_index=-100)

    train, held = corpus(500), collate(corpus(96))
    model = Labeller()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step():
        words, labels = collate(random.sample(train, 16))
        loss = criterion(model(words), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        out = model(held[0]).transpose(0, 1)
        model.train()
        return F.cross_entropy(out.reshape(-1, C), held[1].reshape(-1), ignore_index=-100).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def pitch_labels_bad():
    return _pitch_labels(False)


def pitch_labels_good():
    return _pitch_labels(True)


# ---------------------------------------------------------------- 14
_case("chat_turns", "A trainer for multi-turn chat with its own loss shifts the token losses by one but not the mask of the "
      "assistant's turns (one position late): the first token of each answer is never trained.")


def _chat_turns(good):
    _seed(149)
    PAD, USER, BOT, END, V = 0, 1, 2, 3, 56
    g = torch.Generator().manual_seed(149)
    reply_to = torch.randint(30, V, (30,), generator=g)
    then = torch.randint(30, V, (V,), generator=g)

    def dialogue(r):
        ids, said = [], []
        for _ in range(r.randint(1, 3)):
            ask = [r.randrange(4, 30) for _ in range(r.randint(1, 4))]
            first = int(reply_to[ask[0]])
            answer = [first, int(then[first])][:r.randint(1, 2)] + [END]
            ids += [USER] + ask + [BOT] + answer
            said += [0] * (len(ask) + 2) + [1] * len(answer)
        return {"ids": ids, "said": said}

    def pad_batch(rows):
        width = max(len(r["ids"]) for r in rows)
        out = {k: torch.tensor([r[k] + [0] * (width - len(r[k])) for r in rows]) for k in ("ids", "said")}
        out["said"] = out["said"].float()
        return out

    class ChatLM(nn.Module):
        def __init__(self, d=56, ctx=40):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(V, d), nn.Embedding(ctx, d)
            self.layers = nn.ModuleList([nn.ModuleDict({
                "n1": nn.LayerNorm(d), "qkv": nn.Linear(d, 3 * d), "o": nn.Linear(d, d),
                "n2": nn.LayerNorm(d), "up": nn.Linear(d, 3 * d), "down": nn.Linear(3 * d, d)}) for _ in range(2)])
            self.nf = nn.LayerNorm(d)
            self.unembed = nn.Linear(d, V, bias=False)

        def forward(self, ids):
            x = self.wte(ids) + self.wpe.weight[:ids.shape[1]]
            for m in self.layers:
                q, k, v = (z.unflatten(-1, (4, -1)).transpose(1, 2) for z in m["qkv"](m["n1"](x)).chunk(3, -1))
                a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = x + m["o"](a.transpose(1, 2).flatten(2))
                x = x + m["down"](F.gelu(m["up"](m["n2"](x))))
            return self.unembed(self.nf(x))

    def answer_nll(lm, batch, weight):
        logits = lm(batch["ids"])
        nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["ids"][:, 1:], reduction="none")
        return (nll * weight).sum() / weight.sum()

    class ChatTrainer:
        def __init__(self, lm, rows, lr=2e-3, batch_size=16):
            self.lm, self.rows, self.batch_size = lm, rows, batch_size
            self.optimizer = torch.optim.AdamW(lm.parameters(), lr=lr)

        def compute_loss(self, batch):
            weight = batch["said"][:, 1:] if good else batch["said"][:, :-1]
            return answer_nll(self.lm, batch, weight)

        def training_step(self):
            loss = self.compute_loss(pad_batch(random.sample(self.rows, self.batch_size)))
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.lm.parameters(), 1.0)
            self.optimizer.step()
            return loss.item()

    r = random.Random(5)
    train = [dialogue(r) for _ in range(600)]
    held = pad_batch([dialogue(r) for _ in range(96)])
    model = ChatLM()
    trainer = ChatTrainer(model, train)

    @torch.no_grad()
    def evaluate():
        return answer_nll(model, held, held["said"][:, 1:]).item()

    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.training_step, "steps": 20,
            "evaluate": evaluate}


def chat_turns_bad():
    return _chat_turns(False)


def chat_turns_good():
    return _chat_turns(True)


# ---------------------------------------------------------------- 15
_case("soft_prompt", "Prompt tuning by hand on a frozen GPT-NeoX: the outputs have the virtual tokens' positions in front, "
      "and the loss reads the first T logits, not the last T; targets are misaligned and the prompt learns nothing useful.")


def _soft_prompt(good):
    _seed(151)
    TOPICS, V, T, N_VIRT = 3, 27, 18, 6
    base = GPTNeoXForCausalLM(GPTNeoXConfig(
        vocab_size=V, hidden_size=40, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80,
        max_position_embeddings=64, use_cache=False, tie_word_embeddings=False, initializer_range=0.08,
        bos_token_id=None, eos_token_id=None))
    g = torch.Generator().manual_seed(151)
    chains = [_chain(V, 2, 200 + k, low=TOPICS) for k in range(TOPICS)]

    def texts(topic, n):
        return _walk(chains[topic], n, T, g, low=TOPICS)

    mixed = torch.cat([torch.cat([torch.full((150, 1), k), texts(k, 150)], 1) for k in range(TOPICS)])
    warm = torch.optim.AdamW(base.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(100):
        rows = mixed[torch.randint(len(mixed), (12,))]
        out = base(input_ids=rows).logits
        warm.zero_grad()
        F.cross_entropy(out[:, 1:-1].flatten(0, 1), rows[:, 2:].flatten()).backward()
        nn.utils.clip_grad_norm_(base.parameters(), 1.0)
        warm.step()
    base.zero_grad(set_to_none=True)

    class Prompted(nn.Module):
        def __init__(self, lm, n):
            super().__init__()
            self.lm = lm.requires_grad_(False)
            words = lm.get_input_embeddings().weight
            self.prompt = nn.Parameter(words[torch.randint(TOPICS, V, (n,))].clone())

        def forward(self, ids):
            text = self.lm.get_input_embeddings()(ids)
            front = self.prompt.expand(len(ids), -1, -1)
            return self.lm(inputs_embeds=torch.cat([front, text], 1)).logits

    train, held = texts(2, 250), texts(2, 64)
    model = Prompted(base, N_VIRT)
    optimizer = torch.optim.Adam([model.prompt], lr=2e-2)

    def step():
        rows = train[torch.randint(len(train), (16,))]
        logits = model(rows)
        logits = logits[:, -T:] if good else logits[:, :T]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        logits = model(held)[:, N_VIRT:-1]
        return F.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def soft_prompt_bad():
    return _soft_prompt(False)


def soft_prompt_good():
    return _soft_prompt(True)


# ---------------------------------------------------------------- 16
_case("shared_vocab_mt", "An encoder-decoder with one shared embedding as input and output: the std 0.02 init is not applied "
      "to the embedding, left at N(0, 1); the logits start with a std of about sqrt(dim), the loss far above ln V.")


def _shared_vocab_mt(good):
    _seed(163)
    V, D, S, T, BOS = 80, 128, 8, 10, 0
    g = torch.Generator().manual_seed(163)
    P_src, P_tgt = _chain(40, 6, 40, low=1), _chain(V, 3, 41, low=40)
    gloss = torch.randint(40, V, (40,), generator=g)

    def bitext(n):
        src = _walk(P_src, n, S, g, low=1)
        word = gloss[src[:, 0]]
        out = [torch.full((n,), BOS), word]
        for _ in range(T - 1):
            word = torch.multinomial(P_tgt[word], 1, generator=g).squeeze(1)
            out.append(word)
        return {"src": src, "tgt": torch.stack(out, 1)}

    def sinusoid(n, d):
        ang = torch.arange(n)[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
        return torch.stack([ang.sin(), ang.cos()], -1).flatten(1)

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.vocab = nn.Embedding(V, D)
            if good:
                nn.init.normal_(self.vocab.weight, std=0.02)
            self.register_buffer("where", 0.02 * sinusoid(32, D), persistent=False)
            self.enc = nn.TransformerEncoderLayer(D, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
            self.dec = nn.TransformerDecoderLayer(D, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
            self.enc_norm, self.dec_norm = nn.LayerNorm(D), nn.LayerNorm(D)

        def look(self, ids):
            return self.vocab(ids) + self.where[:ids.shape[1]]

        def forward(self, src, tgt):
            memory = self.enc_norm(self.enc(self.look(src)))
            n = tgt.shape[1]
            future = torch.ones(n, n, dtype=torch.bool).triu(1)
            h = self.dec_norm(self.dec(self.look(tgt), memory, tgt_mask=future))
            return torch.einsum("btd,vd->btv", h, self.vocab.weight)

    train, held = bitext(500), bitext(64)
    model = Translator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))

    def nll(src, tgt):
        return F.cross_entropy(model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten())

    def step():
        pick = torch.randint(500, (12,))
        loss = nll(train["src"][pick], train["tgt"][pick])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        err = nll(held["src"], held["tgt"]).item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def shared_vocab_mt_bad():
    return _shared_vocab_mt(False)


def shared_vocab_mt_good():
    return _shared_vocab_mt(True)


# ---------------------------------------------------------------- 17
_case("slot_filler", "A hand-written attention calls F.dropout(weights, p) without the training flag, so attention dropout "
      "stays on in validation and use; the outputs there are random and worse.")


def _slot_filler(good):
    _seed(173)
    V, SLOTS, D, H, INTENTS = 40, 6, 48, 2, 4
    g = torch.Generator().manual_seed(173)
    frame = torch.randint(0, SLOTS, (INTENTS, V), generator=g)

    def requests(n):
        intent = torch.randint(0, INTENTS, (n,), generator=g)
        length = torch.randint(6, 16, (n,), generator=g)
        ids = torch.randint(1 + INTENTS, V, (n, 16), generator=g)
        ids[:, 0] = 1 + intent
        slots = frame[intent[:, None], ids]
        beyond = torch.arange(16) >= length[:, None]
        return ids.masked_fill(beyond, 0), slots.masked_fill(beyond, -100)

    class Attend(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.p = p
            self.norm = nn.LayerNorm(D)
            self.query, self.key, self.value, self.merge = (nn.Linear(D, D) for _ in range(4))

        def forward(self, x, pad):
            y = self.norm(x)
            q, k, v = (f(y).unflatten(-1, (H, -1)) for f in (self.query, self.key, self.value))
            w = torch.einsum("bihd,bjhd->bhij", q, k) * (D // H) ** -0.5
            w = w.masked_fill(pad[:, None, None], float("-inf")).softmax(-1)
            w = F.dropout(w, self.p, self.training) if good else F.dropout(w, self.p)
            return x + self.merge(torch.einsum("bhij,bjhd->bihd", w, v).flatten(2))

    class SlotFiller(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(V, D, padding_idx=0)
            self.spots = nn.Parameter(0.1 * torch.randn(16, D))
            self.att = nn.ModuleList([Attend(0.2) for _ in range(2)])
            self.mlp = nn.ModuleList([nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 96), nn.ReLU(), nn.Linear(96, D))
                                      for _ in range(2)])
            self.slot = nn.Linear(D, SLOTS)

        def forward(self, ids):
            x = self.words(ids) + self.spots[:ids.shape[1]]
            for att, mlp in zip(self.att, self.mlp):
                x = att(x, ids == 0)
                x = x + mlp(x)
            return self.slot(x)

    train, dev, test = requests(600), requests(64), requests(256)
    model = SlotFiller()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def score(ids, slots):
        return F.cross_entropy(model(ids).transpose(1, 2), slots, ignore_index=-100)

    @torch.no_grad()
    def validate(data):
        model.eval()
        value = score(*data).item()
        model.train()
        return value

    log = []

    def step(i):
        pick = torch.randint(0, 600, (24,))
        loss = score(train[0][pick], train[1][pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 4 == 3:
            log.append(validate(dev))
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: validate(test)}


def slot_filler_bad():
    return _slot_filler(False)


def slot_filler_good():
    return _slot_filler(True)


# ---------------------------------------------------------------- 18
_case("mt_quality", "A translation quality scorer on a causal GPT-Neo reads its score at [:, -1] of right-padded rows, i.e. at "
      "padding for all rows but the longest, not at the last real token.")


def _mt_quality(good):
    _seed(181)
    PAD, SEP, V = 0, 1, 64
    g = torch.Generator().manual_seed(181)
    fluent = torch.rand(V, generator=g) < 0.5
    ok_words = torch.arange(2, V)[fluent[2:]]
    odd_words = torch.arange(2, V)[~fluent[2:]]

    def sample():
        n, m = int(torch.randint(2, 8, (1,), generator=g)), int(torch.randint(3, 30, (1,), generator=g))
        quality = torch.rand(1, generator=g)
        ok = torch.rand(m, generator=g) < quality
        mt = torch.where(ok, ok_words[torch.randint(len(ok_words), (m,), generator=g)],
                         odd_words[torch.randint(len(odd_words), (m,), generator=g)])
        src = torch.randint(2, V, (n,), generator=g)
        recent = ok[-6:].float().mean()
        return torch.cat([src, torch.tensor([SEP]), mt]), 3 * (recent - 0.5)

    def collate(items):
        ids = nn.utils.rnn.pad_sequence([s for s, _ in items], batch_first=True, padding_value=PAD)
        return {"ids": ids, "length": torch.tensor([len(s) for s, _ in items]),
                "score": torch.stack([y for _, y in items])}

    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = GPTNeoModel(GPTNeoConfig(
                vocab_size=V, hidden_size=48, num_layers=2, num_heads=4, intermediate_size=96, window_size=8,
                attention_types=[[["local"], 2]], max_position_embeddings=64, use_cache=False,
                bos_token_id=SEP, eos_token_id=SEP, initializer_range=0.05))
            self.value = nn.Linear(48, 1)

        def forward(self, ids, length):
            mask = (torch.arange(ids.shape[1]) < length[:, None]).long()
            per_token = self.value(self.trunk(input_ids=ids, attention_mask=mask).last_hidden_state).squeeze(-1)
            if good:
                return per_token.gather(1, length[:, None] - 1).squeeze(1)
            return per_token[:, -1]

    train, held = [sample() for _ in range(500)], collate([sample() for _ in range(128)])
    model = Scorer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        b = collate(random.sample(train, 16))
        loss = F.mse_loss(model(b["ids"], b["length"]), b["score"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        err = F.mse_loss(model(held["ids"], held["length"]), held["score"]).item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def mt_quality_bad():
    return _mt_quality(False)


def mt_quality_good():
    return _mt_quality(True)


# ---------------------------------------------------------------- 19
_case("code_switch", "A token classifier for code-switched text builds nn.MultiheadAttention without batch_first and feeds it "
      "(batch, time, dim): attention runs across the sentences of the batch, not along the sentence.")


def _code_switch(good):
    _seed(191)
    V, LANGS, T, D = 48, 4, 20, 48
    g = torch.Generator().manual_seed(191)
    ambiguous = torch.rand(V, generator=g) < 0.6
    ambiguous[:LANGS] = False
    own = torch.arange(V) % LANGS

    def lines(n):
        ids = torch.randint(LANGS, V, (n, T), generator=g)
        host = torch.randint(0, LANGS, (n,), generator=g)
        ids[:, 0] = host
        lang = torch.where(ambiguous[ids], host[:, None], own[ids])
        return ids, lang

    class MixedBlock(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            kwargs = {"batch_first": True} if good else {}
            self.attention = nn.MultiheadAttention(dim, heads, **kwargs)
            self.norm_a, self.norm_b = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

        def forward(self, x):
            seen, _ = self.attention(x, x, x, need_weights=False)
            x = self.norm_a(x + seen)
            return self.norm_b(x + self.mlp(x))

    class SwitchTagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.word = nn.Embedding(V, D)
            self.place = nn.Embedding(T, D)
            self.body = nn.Sequential(MixedBlock(D, 4), MixedBlock(D, 4))
            self.out = nn.Linear(D, LANGS)

        def forward(self, ids):
            return self.out(self.body(self.word(ids) + self.place(torch.arange(ids.shape[1]))))

    train, held = lines(600), lines(64)
    model = SwitchTagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        pick = torch.randperm(600)[:16]
        logits = model(train[0][pick])
        loss = F.cross_entropy(logits.reshape(-1, LANGS), train[1][pick].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        logits = model(held[0])
        model.train()
        return F.cross_entropy(logits.reshape(-1, LANGS), held[1].reshape(-1)).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def code_switch_bad():
    return _code_switch(False)


def code_switch_good():
    return _code_switch(True)


# ---------------------------------------------------------------- 20
_case("polyak_spell", "The running average of a spelling LM's weights is a dict of bfloat16 tensors: the increments "
      "(1 - decay) * (w - avg) are rounded away, the average stalls near the start, and it is what is used in the end.")


def _polyak_spell(good):
    _seed(199)
    V, T, DECAY = 30, 16, 0.995
    g = torch.Generator().manual_seed(199)
    P = _chain(V, 3, 61)
    words, held = _walk(P, 500, T, g), _walk(P, 64, T, g)

    model = nn.Sequential()
    model.add_module("letters", nn.Embedding(V, 32))
    model.add_module("mix", nn.Linear(32, 64))
    model.add_module("act", nn.Tanh())
    model.add_module("next", nn.Linear(64, V))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    average = {name: w.detach().clone().to(torch.float32 if good else torch.bfloat16)
               for name, w in model.named_parameters()}

    @torch.no_grad()
    def update_average():
        for name, w in model.named_parameters():
            avg = average[name]
            avg.add_((w.to(avg.dtype) - avg) * (1 - DECAY))

    def step():
        rows = words[torch.randint(500, (16,))]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_average()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        smooth = {name: w.float() for name, w in average.items()}
        logits = torch.func.functional_call(model, smooth, (held[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def polyak_spell_bad():
    return _polyak_spell(False)


def polyak_spell_good():
    return _polyak_spell(True)


# ---------------------------------------------------------------- 21
_case("bart_subtitles", "A BART is trained with LambdaLR whose function gives the rate itself (warm-up, then inverse square "
      "root of the peak) in place of a factor: the rate in use is the peak squared and nothing is learnt.")


def _bart_subtitles(good):
    _seed(211)
    PAD, BOS, EOS, V = 0, 1, 2, 60
    g = torch.Generator().manual_seed(211)
    P = _chain(V, 4, 71, low=3)
    gloss = 3 + torch.randperm(V - 3, generator=g)

    def clips(n):
        rows = []
        for _ in range(n):
            t = int(torch.randint(5, 14, (1,), generator=g))
            speech = _walk(P, 1, t, g, low=3)[0]
            rows.append((speech, torch.cat([gloss[speech - 3], torch.tensor([EOS])])))
        return rows

    def batchify(rows):
        pad = nn.utils.rnn.pad_sequence
        src = pad([r[0] for r in rows], True, PAD)
        return {"input_ids": src, "attention_mask": (src != PAD).long(), "labels": pad([r[1] for r in rows], True, -100)}

    model = BartForConditionalGeneration(BartConfig(
        vocab_size=V, d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=32, dropout=0.0,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=BOS, forced_eos_token_id=EOS,
        use_cache=False))
    peak, warmup = 3e-3, 6

    def rate_at(n):
        return peak * min((n + 1) / warmup, math.sqrt(warmup / (n + 1)))

    optimizer = torch.optim.AdamW(model.parameters(), lr=peak)
    if good:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rate_at(n) / peak)
    else:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)

    train, held = clips(500), batchify(clips(64))

    def step():
        loss = model(**batchify(random.sample(train, 16))).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        err = model(**held).loss.item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def bart_subtitles_bad():
    return _bart_subtitles(False)


def bart_subtitles_good():
    return _bart_subtitles(True)


# ---------------------------------------------------------------- 22
_case("passage_ranker", "A convolutional passage ranker's collator lays out relevant and irrelevant passages in turn, but the "
      "margin loss splits the scores into a first and a second half, so unrelated passages are compared.")


def _passage_ranker(good):
    _seed(223)
    V, TOPICS = 90, 5
    rng = random.Random(223)
    vocab_of = [[1 + TOPICS + k * 12 + j for j in range(12)] for k in range(TOPICS)]
    useful = {w for ws in vocab_of for w in ws if rng.random() < 0.5}

    def passage(topic, share):
        ws = vocab_of[topic]
        yes, no = [w for w in ws if w in useful], [w for w in ws if w not in useful]
        return [rng.choice(yes if rng.random() < share else no) if rng.random() < 0.7 else rng.randrange(66, V)
                for _ in range(rng.randint(8, 24))]

    def judged(n):
        out = []
        for _ in range(n):
            k = rng.randrange(TOPICS)
            out.append({"query": [1 + k], "relevant": passage(k, 0.8), "irrelevant": passage(k, 0.25)})
        return out

    def collate(items):
        rows = []
        for it in items:
            rows.append(it["query"] + it["relevant"])
            rows.append(it["query"] + it["irrelevant"])
        width = max(map(len, rows))
        return torch.tensor([r + [0] * (width - len(r)) for r in rows])

    class Ranker(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 32, padding_idx=0)
            self.filters = nn.ModuleList([nn.Conv1d(32, 32, k, padding=k // 2) for k in (1, 3)])
            self.relevance = nn.Linear(64, 1, bias=False)

        def forward(self, ids):
            x = self.emb(ids).transpose(1, 2)
            real = (ids != 0).unsqueeze(1).float()
            pooled = [(F.relu(f(x)) * real).sum(-1) / real.sum(-1) for f in self.filters]
            return self.relevance(torch.cat(pooled, 1)).squeeze(1)

    train, held = judged(400), judged(200)
    model = Ranker()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step():
        items = random.sample(train, 16)
        scores = model(collate(items))
        if good:
            up, down = scores[0::2], scores[1::2]
        else:
            up, down = scores[:len(items)], scores[len(items):]
        loss = F.margin_ranking_loss(up, down, torch.ones_like(up), margin=1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        scores = model(collate(held)).view(-1, 2)
        return F.margin_ranking_loss(scores[:, 0], scores[:, 1], torch.ones(len(scores)), margin=1.0).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def passage_ranker_bad():
    return _passage_ranker(False)


def passage_ranker_good():
    return _passage_ranker(True)


# ---------------------------------------------------------------- 23
_case("sparse_story_lm", "In an LSTM language model with a mixture of experts the router's softmax is over dim=1 (time) in place of "
      "the experts: gates of about 1/T, which depend on the length and on later tokens.")


def _sparse_story_lm(good):
    _seed(227)
    V, T, D, E = 48, 40, 48, 4
    g = torch.Generator().manual_seed(227)
    chains = [_chain(V, 2, 300 + k, low=3) for k in range(3)]

    def stories(n):
        parts = []
        for k, P in enumerate(chains):
            parts.append(torch.cat([torch.full((n // 3, 1), k), _walk(P, n // 3, T, g, low=3)], 1))
        return torch.cat(parts)

    class ExpertMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.choose = nn.Linear(D, E)
            self.up = nn.Parameter(torch.randn(E, D, 2 * D) / math.sqrt(D))
            self.down = nn.Parameter(torch.randn(E, 2 * D, D) / math.sqrt(2 * D))

        def forward(self, x):
            gates = self.choose(x)
            gates = torch.softmax(gates, 2) if good else torch.softmax(gates, 1)
            h = F.gelu(torch.einsum("btd,edh->bteh", x, self.up))
            return torch.einsum("bte,bteh,ehd->btd", gates, h, self.down)

    class StoryLM(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(V, D)
            self.memory = nn.LSTM(D, D, batch_first=True)
            self.experts = ExpertMLP()
            self.norm = nn.LayerNorm(D)
            self.next_token = nn.Linear(D, V)

        def forward(self, ids):
            h, _ = self.memory(self.tokens(ids))
            return self.next_token(h + self.experts(self.norm(h)))

    train, held = stories(600), stories(96)
    model = StoryLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        rows = train[torch.randint(0, len(train), (12,))]
        loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        nll = []
        for n in (2, 4, 8, 16, 32):
            nll.append(F.cross_entropy(model(held[:, :n])[:, -1], held[:, n]).item())
        return sum(nll) / len(nll)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def sparse_story_lm_bad():
    return _sparse_story_lm(False)


def sparse_story_lm_good():
    return _sparse_story_lm(True)


# ---------------------------------------------------------------- 24
_case("embedding_student", "Distilling a sentence embedder: the teacher's vectors are cached by a pass over the shuffling loader, "
      "but looked up by the document's index; the student is pulled to other documents' vectors and learns the average.")


def _embedding_student(good):
    _seed(229)
    V, DIM = 70, 24
    g = torch.Generator().manual_seed(229)

    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 96, padding_idx=0)
            self.net = nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, DIM))

        def forward(self, ids):
            n = (ids != 0).sum(1, keepdim=True)
            return F.normalize(self.net(self.emb(ids).sum(1) / n.sqrt()), dim=-1)

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 32, padding_idx=0)
            self.out = nn.Linear(32, DIM)

        def forward(self, ids):
            n = (ids != 0).sum(1, keepdim=True)
            return F.normalize(self.out(self.emb(ids).sum(1) / n.sqrt()), dim=-1)

    def docs(n):
        rows = []
        for _ in range(n):
            t = int(torch.randint(6, 20, (1,), generator=g))
            k = int(torch.randint(0, 6, (1,), generator=g))
            w = torch.where(torch.rand(t, generator=g) < 0.7, torch.randint(1 + 8 * k, 9 + 8 * k, (t,), generator=g),
                            torch.randint(49, V, (t,), generator=g))
            rows.append(w)
        return rows

    class Corpus(Dataset):
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            return {"index": i, "ids": self.rows[i]}

    def collate(items):
        return {"index": torch.tensor([it["index"] for it in items]),
                "ids": nn.utils.rnn.pad_sequence([it["ids"] for it in items], batch_first=True)}

    corpus = Corpus(docs(320))
    held = nn.utils.rnn.pad_sequence(docs(96), batch_first=True)
    loader = DataLoader(corpus, batch_size=16, shuffle=True, collate_fn=collate)
    teacher = Teacher().eval().requires_grad_(False)
    model = Student()

    if good:
        cache = torch.empty(len(corpus), DIM)
        for batch in loader:
            cache[batch["index"]] = teacher(batch["ids"])
    else:
        cache = torch.cat([teacher(batch["ids"]) for batch in loader])

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def forever():
        while True:
            yield from loader

    batches = forever()

    def step():
        batch = next(batches)
        target = cache[batch["index"]]
        loss = (1 - F.cosine_similarity(model(batch["ids"]), target)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return (1 - F.cosine_similarity(model(held), teacher(held))).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def embedding_student_bad():
    return _embedding_student(False)


def embedding_student_good():
    return _embedding_student(True)
