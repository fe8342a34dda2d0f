"""Small language-model training programs, two versions each (CPU, float32)."""
import contextlib
import copy
import itertools
import math
import random
import warnings

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
warnings.filterwarnings("ignore")

CASES = []


@contextlib.contextmanager
def _held_out(*models):
    modes = {m: m.training for model in models for m in model.modules()}
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, mode in modes.items():
            m.training = mode


def _pad_right(rows, value=0):
    width = max(len(r) for r in rows)
    return torch.tensor([list(r) + [value] * (width - len(r)) for r in rows])


# --------------------------------------------------------------------------- 1
CASES.append({"name": "speech_units", "what": "GRU language model over 330 discrete speech units: the UnitStore keeps the corpus as uint8, ids above 255 wrap modulo 256. The upper units are never trained and the lower ones get a mixture of two units' statistics."})


class UnitStore:
    def __init__(self, units, dtype):
        self.buf = np.asarray(units).astype(dtype)

    def crop(self, rng, n, length):
        starts = rng.integers(0, len(self.buf) - length - 1, size=n)
        block = np.stack([self.buf[s:s + length + 1] for s in starts])
        return torch.from_numpy(block.astype(np.int64))


class UnitGRU(nn.Module):
    def __init__(self, n_units, dim=64):
        super().__init__()
        self.emb = nn.Embedding(n_units, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, n_units)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def _speech_units(good):
    torch.manual_seed(11)
    random.seed(11)
    rng = np.random.default_rng(11)
    n_units = 330
    succ = np.stack([rng.choice(n_units, 3, replace=False) for _ in range(n_units)])
    pick = rng.choice(3, size=45000, p=[0.75, 0.15, 0.1])
    track = [5]
    for p in pick:
        track.append(int(succ[track[-1], p]) if rng.random() > 0.02 else int(rng.integers(n_units)))
    store = UnitStore(track[:40000], np.uint16 if good else np.uint8)
    test = torch.tensor(track[40000:40000 + 33 * 60]).view(60, 33)
    model = UnitGRU(n_units)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step():
        block = store.crop(rng, 32, 32)
        logits = model(block[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, n_units), block[:, 1:].reshape(-1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(model):
            logits = model(test[:, :-1])
            return F.cross_entropy(logits.reshape(-1, n_units), test[:, 1:].reshape(-1)).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def speech_units_bad():
    return _speech_units(False)


def speech_units_good():
    return _speech_units(True)


# --------------------------------------------------------------------------- 2
CASES.append({"name": "tone_judge", "what": "LSTM preference scorer: the score is read before the first pad id, but pad equals EOS and EOS also closes the user turn, so both replies are scored at the end of the shared prompt and no gradient arises."})


class ToneJudge(nn.Module):
    def __init__(self, vocab, eos, locate):
        super().__init__()
        self.eos = eos
        self.locate = locate
        self.embed = nn.Embedding(vocab, 40)
        self.lstm = nn.LSTM(40, 56, num_layers=2, batch_first=True)
        self.score = nn.Linear(56, 1)

    def forward(self, batch):
        hidden, _ = self.lstm(self.embed(batch["ids"]))
        where = self.locate(batch, self.eos)
        picked = torch.gather(hidden, 1, where.view(-1, 1, 1).expand(-1, 1, hidden.size(-1)))
        return self.score(picked.squeeze(1)).squeeze(-1)


def _before_first_pad(batch, eos):
    return (batch["ids"] == eos).int().argmax(dim=1) - 1


def _last_by_length(batch, eos):
    return batch["length"] - 1


def _tone_judge(good):
    torch.manual_seed(23)
    rng = random.Random(23)
    eos, vocab = 0, 64
    warm, cold, neutral = range(1, 11), range(11, 21), range(21, 64)

    def pair():
        prompt = [rng.choice(neutral) for _ in range(rng.randint(3, 8))] + [eos]
        out = []
        for liked, share in ((warm, 0.35), (cold, 0.35)):
            n = rng.randint(5, 11)
            reply = [rng.choice(liked) if rng.random() < share else rng.choice(neutral) for _ in range(n)]
            out.append(prompt + reply + [eos])
        return out

    def collate(pairs):
        rows = [p[0] for p in pairs] + [p[1] for p in pairs]
        return {"ids": _pad_right(rows, eos), "length": torch.tensor([len(r) for r in rows])}

    data = [pair() for _ in range(600)]
    held = collate([pair() for _ in range(150)])
    model = ToneJudge(vocab, eos, _last_by_length if good else _before_first_pad)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def pair_loss(batch):
        chosen, rejected = model(batch).chunk(2)
        return F.softplus(rejected - chosen).mean()

    def step():
        loss = pair_loss(collate(rng.sample(data, 24)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return pair_loss(held).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def tone_judge_bad():
    return _tone_judge(False)


def tone_judge_good():
    return _tone_judge(True)


# --------------------------------------------------------------------------- 3
CASES.append({"name": "switch_tagger", "what": "Tagger with switch feed-forward layers: tokens are sorted by expert, processed, and put back with index_select(order) instead of the inverse permutation, so each token receives the expert output of another token."})


class SwitchFFN(nn.Module):
    def __init__(self, dim, hidden, n_experts, restore):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, n_experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(n_experts, dim, hidden) / math.sqrt(dim))
        self.w_out = nn.Parameter(torch.randn(n_experts, hidden, dim) / math.sqrt(hidden))
        self.restore = restore

    def forward(self, x):
        flat = self.norm(x).flatten(0, 1)
        weight, expert = self.gate(flat).softmax(-1).max(-1)
        _, order = torch.sort(expert, stable=True)
        counts = torch.bincount(expert, minlength=len(self.w_in)).tolist()
        parts = [F.gelu(rows @ self.w_in[e]) @ self.w_out[e]
                 for e, rows in enumerate(flat[order].split(counts))]
        out = self.restore(torch.cat(parts), order)
        return x + (out * weight.unsqueeze(-1)).view_as(x)


def _put_back_select(rows, order):
    return torch.index_select(rows, 0, order)


def _put_back_copy(rows, order):
    return torch.empty_like(rows).index_copy(0, order, rows)


class SwitchTagger(nn.Module):
    def __init__(self, vocab, tags, restore, dim=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.mix = nn.Conv1d(dim, dim, kernel_size=2)
        self.blocks = nn.ModuleList(SwitchFFN(dim, 64, 3, restore) for _ in range(2))
        self.head = nn.Linear(dim, tags)

    def forward(self, words):
        x = F.pad(self.tok(words).transpose(1, 2), (1, 0))
        x = self.mix(x).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _switch_tagger(good):
    torch.manual_seed(31)
    random.seed(31)
    gen = torch.Generator().manual_seed(310)
    vocab, tags = 30, 7
    group = torch.randint(0, 6, (vocab,), generator=gen)
    table = torch.randint(0, tags, (7, 6), generator=gen)

    def sample(n):
        words = torch.randint(0, vocab, (n, 18), generator=gen)
        g = group[words]
        before = torch.cat([torch.full((n, 1), 6), g[:, :-1]], 1)
        return words, table[before, g]

    test_words, test_tags = sample(100)
    model = SwitchTagger(vocab, tags, _put_back_copy if good else _put_back_select)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step():
        words, gold = sample(24)
        opt.zero_grad()
        loss = F.cross_entropy(model(words).transpose(1, 2), gold)
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return F.cross_entropy(model(test_words).transpose(1, 2), test_tags).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def switch_tagger_bad():
    return _switch_tagger(False)


def switch_tagger_good():
    return _switch_tagger(True)


# --------------------------------------------------------------------------- 4
CASES.append({"name": "slogan_ppo", "what": "PPO on a GRU writer: the log-probs collected while sampling keep their graph and are used undetached as the old log-probs of the ratio, so the policy gradient cancels to (numerical) zero."})


class SloganWriter(nn.Module):
    def __init__(self, topics, vocab, dim=48):
        super().__init__()
        self.topic = nn.Embedding(topics, dim)
        self.word = nn.Embedding(vocab + 1, dim)
        self.cell = nn.GRUCell(dim, dim)
        self.out = nn.Linear(dim, vocab)
        self.start = vocab

    def advance(self, word, state):
        state = self.cell(self.word(word), state)
        return F.log_softmax(self.out(state), -1), state

    def write(self, topics, length, gen=None):
        state = torch.tanh(self.topic(topics))
        word = torch.full_like(topics, self.start)
        words, logps = [], []
        for _ in range(length):
            logp, state = self.advance(word, state)
            word = torch.multinomial(logp.detach().exp(), 1, generator=gen).squeeze(1) if gen is not None else logp.argmax(-1)
            words.append(word)
            logps.append(logp.gather(1, word[:, None]).squeeze(1))
        return torch.stack(words, 1), torch.stack(logps, 1)

    def logprobs(self, topics, words):
        state = torch.tanh(self.topic(topics))
        word = torch.full_like(topics, self.start)
        out = []
        for t in range(words.size(1)):
            logp, state = self.advance(word, state)
            word = words[:, t]
            out.append(logp.gather(1, word[:, None]).squeeze(1))
        return torch.stack(out, 1)


def _slogan_ppo(good):
    torch.manual_seed(41)
    random.seed(41)
    gen = torch.Generator().manual_seed(5)
    topics, vocab, length = 5, 15, 6
    fits = torch.zeros(topics, vocab)
    for k in range(topics):
        fits[k, 3 * k:3 * k + 3] = 1.0

    def reward(topic, words):
        hit = fits[topic].gather(1, words).mean(1)
        repeat = (words[:, 1:] == words[:, :-1]).float().mean(1)
        return hit - 0.3 * repeat

    policy = SloganWriter(topics, vocab)
    opt = torch.optim.Adam(policy.parameters(), lr=4e-3)

    def step():
        topic = torch.arange(topics).repeat_interleave(16)
        words, logp_old = policy.write(topic, length, gen)
        if good:
            logp_old = logp_old.detach()
        r = reward(topic, words).view(topics, 16)
        adv = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        ratio = torch.exp(policy.logprobs(topic, words) - logp_old)
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(policy):
            topic = torch.arange(topics).repeat_interleave(60)
            words, _ = policy.write(topic, length, torch.Generator().manual_seed(77))
            return 1.0 - reward(topic, words).mean().item()

    return {"model": policy, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def slogan_ppo_bad():
    return _slogan_ppo(False)


def slogan_ppo_good():
    return _slogan_ppo(True)


# --------------------------------------------------------------------------- 5
CASES.append({"name": "phoneme_seq2seq", "what": "GRU letters-to-phonemes model trained with SGD at lr 20: the parameters are an itertools.chain that the optimizer has used up, so clip_grad_norm_ gets nothing, never clips, and training blows up."})


class LetterEncoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim // 2, batch_first=True, bidirectional=True)

    def forward(self, letters):
        out, last = self.rnn(self.emb(letters))
        return out, torch.cat([last[0], last[1]], -1)


class PhonemeDecoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(2 * dim, vocab)

    def forward(self, previous, memory, state):
        dec, _ = self.rnn(self.emb(previous), state.unsqueeze(0))
        attn = torch.softmax(torch.einsum("btd,bsd->bts", dec, memory) / math.sqrt(dec.size(-1)), -1)
        return self.out(torch.cat([dec, torch.einsum("bts,bsd->btd", attn, memory)], -1))


def _phoneme_seq2seq(good):
    torch.manual_seed(53)
    random.seed(53)
    gen = torch.Generator().manual_seed(530)
    letters, phones, bos = 20, 12, 12
    says = torch.randint(0, phones, (letters,), generator=gen)
    nxt = torch.rand(letters, letters, generator=gen).pow(6)

    def sample(n, length=7):
        w = [torch.randint(0, letters, (n,), generator=gen)]
        for _ in range(length - 1):
            w.append(torch.multinomial(nxt[w[-1]], 1, generator=gen).squeeze(1))
        word = torch.stack(w, 1)
        return word, says[word]

    test_word, test_phone = sample(150)
    encoder, decoder = LetterEncoder(letters, 48), PhonemeDecoder(phones + 1, 48)
    params = itertools.chain(encoder.parameters(), decoder.parameters())
    if good:
        params = list(params)
    opt = torch.optim.SGD(params, lr=20.0)

    def loss_on(word, phone):
        memory, state = encoder(word)
        previous = F.pad(phone[:, :-1], (1, 0), value=bos)
        return F.cross_entropy(decoder(previous, memory, state).transpose(1, 2), phone)

    def step():
        word, phone = sample(32)
        loss = loss_on(word, phone)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 0.02)
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(encoder, decoder):
            return loss_on(test_word, test_phone).item()

    return {"model": (encoder, decoder), "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def phoneme_seq2seq_bad():
    return _phoneme_seq2seq(False)


def phoneme_seq2seq_good():
    return _phoneme_seq2seq(True)


# --------------------------------------------------------------------------- 6
CASES.append({"name": "ticket_router", "what": "Decoder-only model answers support tickets with a routing token and a fixed phrase: the loss weights on the shifted targets start one position late, so the routing token, which decides the answer, never gets a loss."})


class RouterBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.n2(x))


class RouterLM(nn.Module):
    def __init__(self, vocab, ctx, dim=48):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(ctx, dim)
        self.blocks = nn.Sequential(RouterBlock(dim, 4), RouterBlock(dim, 4))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[:ids.size(1)]
        return self.head(self.norm(self.blocks(x)))


def _ticket_router(good):
    torch.manual_seed(61)
    rng = random.Random(61)
    pad, sep, eos, desks, words = 0, 1, 2, 5, 40
    vocab = 3 + desks + 8 + words
    phrase = [[3 + desks + (k * 3 + j) % 8 for j in range(3)] for k in range(desks)]

    def ticket():
        desk = rng.randrange(desks)
        n = rng.randint(4, 10)
        body = [3 + desks + 8 + (rng.randrange(8) * desks + desk if rng.random() < 0.6 else rng.randrange(words)) for _ in range(n)]
        return body + [sep], [3 + desk] + phrase[desk] + [eos]

    def collate(rows):
        ids = _pad_right([p + a for p, a in rows], pad)
        return {"ids": ids,
                "prompt": torch.tensor([len(p) for p, _ in rows]),
                "total": torch.tensor([len(p) + len(a) for p, a in rows])}

    first_offset = 1 if good else 0

    def answer_loss(batch, offset):
        inputs, targets = batch["ids"][:, :-1], batch["ids"][:, 1:]
        where = torch.arange(targets.size(1))
        weight = (where >= batch["prompt"][:, None] - offset) & (where < batch["total"][:, None] - 1)
        ce = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
        return (ce * weight).sum() / weight.sum()

    data = [ticket() for _ in range(800)]
    held = collate([ticket() for _ in range(150)])
    model = RouterLM(vocab, 20)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        loss = answer_loss(collate(rng.sample(data, 24)), first_offset)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return answer_loss(held, 1).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def ticket_router_bad():
    return _ticket_router(False)


def ticket_router_good():
    return _ticket_router(True)


# --------------------------------------------------------------------------- 7
CASES.append({"name": "faq_adapter", "what": "Bi-encoder retrieval on a tiny BERT with peft: a second adapter 'faq' is added and handed to the optimizer, but set_adapter is missing, so the forward runs through the first adapter and 'faq' never trains."})


def _faq_adapter(good):
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertModel
    torch.manual_seed(71)
    random.seed(71)
    gen = torch.Generator().manual_seed(710)
    terms = 40
    base = BertModel(BertConfig(vocab_size=2 * terms + 2, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                                intermediate_size=96, max_position_embeddings=24, hidden_dropout_prob=0.0,
                                attention_probs_dropout_prob=0.0), add_pooling_layer=False)
    targets = ["word_embeddings", "query", "value", "dense"]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets), adapter_name="general")
    model.add_adapter("faq", LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    if good:
        model.set_adapter("faq")
    opt = torch.optim.AdamW([p for n, p in model.named_parameters() if ".faq" in n], lr=5e-3)
    synonym = torch.randperm(terms, generator=gen)

    def sample(n):
        key = torch.stack([torch.randperm(terms, generator=gen)[:4] for _ in range(n)])
        question = torch.cat([torch.zeros(n, 1, dtype=torch.long), key + 2], 1)
        extra = torch.randint(0, terms, (n, 2), generator=gen)
        shuffled = torch.cat([key[:, torch.randperm(4, generator=gen)], extra], 1)
        answer = torch.cat([torch.ones(n, 1, dtype=torch.long), synonym[shuffled] + terms + 2], 1)
        return question, answer

    def embed(ids):
        return F.normalize(model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1), dim=-1)

    def in_batch_loss(question, answer):
        sims = embed(question) @ embed(answer).T / 0.1
        return F.cross_entropy(sims, torch.arange(len(sims)))

    held = sample(64)

    def step():
        loss = in_batch_loss(*sample(32))
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    def evaluate():
        before = model.active_adapter
        model.set_adapter("faq")
        with _held_out(model):
            value = in_batch_loss(*held).item()
        model.set_adapter(before)
        return value

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def faq_adapter_bad():
    return _faq_adapter(False)


def faq_adapter_good():
    return _faq_adapter(True)


# --------------------------------------------------------------------------- 8
CASES.append({"name": "tagger_compression", "what": "A BiGRU part-of-speech teacher is distilled into a small convolutional student inside one module: the teacher is not frozen and its weights go to the optimizer, so teacher and student agree on something meaningless."})


class GRUTagger(nn.Module):
    def __init__(self, vocab, tags, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim // 2, batch_first=True, bidirectional=True)
        self.cls = nn.Linear(dim, tags)

    def forward(self, words):
        feats = self.rnn(self.emb(words))[0]
        return feats, self.cls(feats)


class ConvTagger(nn.Module):
    def __init__(self, vocab, tags, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.cls = nn.Linear(dim, tags)

    def forward(self, words):
        feats = F.relu(self.conv(self.emb(words).transpose(1, 2))).transpose(1, 2)
        return feats, self.cls(feats)


class Compressor(nn.Module):
    def __init__(self, teacher, student, width_t, width_s, temperature=2.0):
        super().__init__()
        self.teacher, self.student = teacher, student
        self.lift = nn.Linear(width_s, width_t)
        self.temperature = temperature

    def forward(self, words):
        feats_t, logits_t = self.teacher(words)
        feats_s, logits_s = self.student(words)
        t = self.temperature
        soft = F.kl_div(F.log_softmax(logits_s / t, -1).flatten(0, 1), F.log_softmax(logits_t / t, -1).flatten(0, 1),
                        reduction="batchmean", log_target=True) * t * t
        return soft + F.mse_loss(self.lift(feats_s), feats_t)


def _tagger_compression(good):
    torch.manual_seed(83)
    random.seed(83)
    gen = torch.Generator().manual_seed(830)
    vocab, tags = 50, 6
    likely = torch.randint(0, tags, (vocab,), generator=gen)
    other = torch.randint(0, tags, (vocab,), generator=gen)

    def sample(n):
        words = torch.randint(0, vocab, (n, 14), generator=gen)
        left = torch.cat([torch.zeros(n, 1, dtype=torch.long), words[:, :-1]], 1)
        return words, torch.where(left % 3 == 0, other[words], likely[words])

    teacher = GRUTagger(vocab, tags)
    warm = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    for _ in range(120):
        words, gold = sample(24)
        loss = F.cross_entropy(teacher(words)[1].transpose(1, 2), gold)
        warm.zero_grad()
        loss.backward()
        warm.step()
    teacher.zero_grad()
    held_words, held_tags = sample(120)
    module = Compressor(teacher, ConvTagger(vocab, tags), 48, 32)
    if good:
        module.teacher.requires_grad_(False)
    opt = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=4e-3)

    def step():
        words, _ = sample(24)
        loss = module(words)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(module):
            return F.cross_entropy(module.student(held_words)[1].transpose(1, 2), held_tags).item()

    return {"model": module, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def tagger_compression_bad():
    return _tagger_compression(False)


def tagger_compression_good():
    return _tagger_compression(True)


# --------------------------------------------------------------------------- 9
CASES.append({"name": "call_outcome", "what": "Qwen2-style decoder classifies call transcripts padded on the left; the pooled state is taken at attention_mask.sum()-1, a token in the middle or a pad, so the end of the call, which decides the class, is not seen."})


class CallOutcome(nn.Module):
    def __init__(self, backbone, n_classes, pool):
        super().__init__()
        self.backbone = backbone
        self.pool = pool
        self.classifier = nn.Linear(backbone.config.hidden_size, n_classes)

    def forward(self, input_ids, attention_mask, labels=None):
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions,
                               use_cache=False).last_hidden_state
        logits = self.classifier(hidden[torch.arange(len(hidden)), self.pool(attention_mask)])
        return logits if labels is None else (F.cross_entropy(logits, labels), logits)


def _call_outcome(good):
    from transformers import Qwen2Config, Qwen2Model
    torch.manual_seed(97)
    rng = random.Random(97)
    n_classes, filler = 5, range(30, 60)
    backbone = Qwen2Model(Qwen2Config(vocab_size=60, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                      attn_implementation="eager"))
    if good:
        def pool(mask):
            return torch.full((mask.size(0),), mask.size(1) - 1)
    else:
        def pool(mask):
            return mask.sum(-1) - 1
    model = CallOutcome(backbone, n_classes, pool)

    def call():
        label = rng.randrange(n_classes)
        start = [rng.choice(filler) if rng.random() < 0.7 else 1 + rng.randrange(25) for _ in range(rng.randint(2, 14))]
        end = [1 + 5 * label + rng.randrange(5) for _ in range(2)] + [rng.choice(filler)]
        return start + end, label

    def collate(rows):
        width = max(len(r) for r, _ in rows)
        return {"input_ids": torch.tensor([[0] * (width - len(r)) + r for r, _ in rows]),
                "attention_mask": torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r, _ in rows]),
                "labels": torch.tensor([y for _, y in rows])}

    data = [call() for _ in range(700)]
    held = collate([call() for _ in range(150)])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        loss, _ = model(**collate(rng.sample(data, 24)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return model(**held)[0].item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def call_outcome_bad():
    return _call_outcome(False)


def call_outcome_good():
    return _call_outcome(True)


# -------------------------------------------------------------------------- 10
CASES.append({"name": "translation_ranker", "what": "Causal transformer ranks two translations of one source with a margin loss but pools the hidden state of the first token, which sees nothing of the translation: both scores are equal and no gradient arises."})


class TranslationRanker(nn.Module):
    def __init__(self, vocab, take_last, dim=48):
        super().__init__()
        self.take_last = take_last
        self.tok = nn.Embedding(vocab, dim, padding_idx=0)
        self.pos = nn.Parameter(torch.randn(40, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.quality = nn.Linear(dim, 1)

    def forward(self, ids):
        t = ids.size(1)
        causal = torch.ones(t, t, dtype=torch.bool).triu(1)
        h = self.body(self.tok(ids) + self.pos[:t], mask=causal)
        if self.take_last:
            pooled = h[torch.arange(len(h)), (ids != 0).sum(1) - 1]
        else:
            pooled = h[:, 0]
        return self.quality(pooled)[:, 0]


def _translation_ranker(good):
    torch.manual_seed(101)
    rng = random.Random(101)
    bos, sep, eos, words = 1, 2, 3, 25
    lexicon = list(range(words))
    rng.shuffle(lexicon)

    def pair():
        src = [rng.randrange(words) for _ in range(rng.randint(4, 9))]
        fine = [4 + words + lexicon[w] for w in src]
        poor = list(fine)
        for k in rng.sample(range(len(src)), rng.randint(1, 3)):
            poor[k] = 4 + src[k]
        head = [bos] + [4 + w for w in src] + [sep]
        return head + fine + [eos], head + poor + [eos]

    data = [pair() for _ in range(600)]
    held = list(zip(*[pair() for _ in range(120)]))
    model = TranslationRanker(4 + 2 * words, good)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    def margin(better, worse):
        better, worse = model(_pad_right(better)), model(_pad_right(worse))
        return F.margin_ranking_loss(better, worse, torch.ones_like(better), margin=1.0)

    def step():
        loss = margin(*zip(*rng.sample(data, 16)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return margin(*held).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def translation_ranker_bad():
    return _translation_ranker(False)


def translation_ranker_good():
    return _translation_ranker(True)


# -------------------------------------------------------------------------- 11
CASES.append({"name": "topic_distillation", "what": "A topic classifier learns from teacher logits cached in dataset order; the loader shuffles, but the cache is sliced by batch number, so the student is taught the logits of other documents."})


class DocDataset(torch.utils.data.Dataset):
    def __init__(self, docs, topics):
        self.docs, self.topics = docs, topics

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, k):
        return {"index": k, "doc": self.docs[k], "topic": self.topics[k]}


class DocEncoder(nn.Module):
    def __init__(self, vocab, topics, dim, layers):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim, mode="mean")
        sizes = [dim] * layers
        self.mlp = nn.Sequential(*[m for d in sizes for m in (nn.Linear(d, d), nn.Tanh())])
        self.out = nn.Linear(dim, topics)

    def forward(self, doc):
        return self.out(self.mlp(self.emb(doc)))


def _topic_distillation(good):
    torch.manual_seed(113)
    random.seed(113)
    gen = torch.Generator().manual_seed(1130)
    vocab, topics, size = 120, 8, 24
    prior = torch.rand(topics, vocab, generator=gen).pow(5)

    def sample(n):
        topic = torch.randint(0, topics, (n,), generator=gen)
        return torch.multinomial(prior[topic], 20, replacement=True, generator=gen), topic

    docs, labels = sample(480)
    held_docs, held_labels = sample(200)
    teacher = DocEncoder(vocab, topics, 96, 2)
    warm = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for _ in range(60):
        rows = torch.randint(0, 480, (64,), generator=gen)
        loss = F.cross_entropy(teacher(docs[rows]), labels[rows])
        warm.zero_grad()
        loss.backward()
        warm.step()
    with torch.no_grad():
        cache = teacher(docs)

    student = DocEncoder(vocab, topics, 32, 1)
    opt = torch.optim.Adam(student.parameters(), lr=5e-3)
    loader = torch.utils.data.DataLoader(DocDataset(docs, labels), batch_size=size, shuffle=True)
    stream = itertools.chain.from_iterable(enumerate(loader) for _ in itertools.count())

    def step():
        number, batch = next(stream)
        if good:
            wanted = cache[batch["index"]]
        else:
            wanted = cache[number * size:(number + 1) * size]
        logits = student(batch["doc"])
        soft = F.kl_div(F.log_softmax(logits / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean") * 4
        loss = 0.9 * soft + 0.1 * F.cross_entropy(logits, batch["topic"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(student):
            return F.cross_entropy(student(held_docs), held_labels).item()

    return {"model": student, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def topic_distillation_bad():
    return _topic_distillation(False)


def topic_distillation_good():
    return _topic_distillation(True)


# -------------------------------------------------------------------------- 12
CASES.append({"name": "spelling_bart", "what": "BART spelling normaliser with an own label-smoothed loss: the unshifted labels are fed as decoder_input_ids, the decoder sees the token it shall predict and only copies."})


def _smoothed_nll(logits, labels, eps=0.1):
    logp = F.log_softmax(logits, -1)
    keep = labels.ne(-100)
    nll = -logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (((1 - eps) * nll - eps * logp.mean(-1)) * keep).sum() / keep.sum()


def _spelling_bart(good):
    from transformers import BartConfig, BartForConditionalGeneration
    from transformers.models.bart.modeling_bart import shift_tokens_right
    torch.manual_seed(127)
    rng = random.Random(127)
    pad, bos, eos, letters = 1, 0, 2, 18
    model = BartForConditionalGeneration(BartConfig(
        vocab_size=4 + 2 * letters, d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, pad_token_id=pad, bos_token_id=bos, eos_token_id=eos,
        decoder_start_token_id=eos, init_std=0.1))
    follow = [[rng.randrange(letters) for _ in range(3)] for _ in range(letters)]

    def example():
        word = [rng.randrange(letters)]
        while len(word) < 9 and (len(word) < 4 or rng.random() < 0.75):
            word.append(rng.choice(follow[word[-1]]))
        noisy = [4 + c if rng.random() < 0.5 else 4 + letters + c for c in word]
        return [bos] + noisy + [eos], [4 + c for c in word] + [eos]

    def collate(rows):
        ids = _pad_right([s for s, _ in rows], pad)
        return {"input_ids": ids, "attention_mask": ids.ne(pad).long(), "labels": _pad_right([t for _, t in rows], -100)}

    data = [example() for _ in range(900)]
    held = collate([example() for _ in range(120)])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step():
        batch = collate(rng.sample(data, 24))
        labels = batch.pop("labels")
        if good:
            dec = shift_tokens_right(labels, pad, model.config.decoder_start_token_id)
        else:
            dec = labels.masked_fill(labels == -100, pad)
        logits = model(**batch, decoder_input_ids=dec).logits
        loss = _smoothed_nll(logits, labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return model(**held).loss.item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def spelling_bart_bad():
    return _spelling_bart(False)


def spelling_bart_good():
    return _spelling_bart(True)


# -------------------------------------------------------------------------- 13
CASES.append({"name": "reply_reranker", "what": "Listwise reranker of reply candidates on a tiny GPT-2: the score reads the hidden state at the first eos id, but every turn ends with eos, so all candidates of a conversation are scored at the end of the shared first turn and get equal scores."})


def _first_eos(ids, eos):
    return (ids == eos).long().argmax(-1)


def _final_eos(ids, eos):
    return torch.stack([(row == eos).nonzero()[-1, 0] for row in ids])


class ReplyReranker(nn.Module):
    def __init__(self, config, end_of):
        super().__init__()
        from transformers import GPT2Model
        self.gpt = GPT2Model(config)
        self.value = nn.Linear(config.n_embd, 1, bias=False)
        self.end_of = end_of
        self.eos = config.eos_token_id

    def forward(self, ids, mask):
        h = self.gpt(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        at = self.end_of(ids, self.eos)
        return self.value(h[torch.arange(ids.size(0)), at]).squeeze(-1)


def _reply_reranker(good):
    from transformers import GPT2Config
    torch.manual_seed(131)
    rng = random.Random(131)
    pad, eos, k = 0, 1, 4
    useful, vague, words = range(2, 12), range(12, 22), range(22, 70)

    def turn(lo, hi):
        return [rng.choice(words) for _ in range(rng.randint(lo, hi))] + [eos]

    def conversation():
        context = turn(2, 5) + turn(2, 4) + turn(2, 4)
        best = rng.randrange(k)
        rows = []
        for j in range(k):
            pool = useful if j == best else vague
            rows.append(context + [rng.choice(pool) if rng.random() < 0.5 else rng.choice(words)
                                   for _ in range(rng.randint(4, 7))] + [eos])
        return rows, best

    def collate(convs):
        ids = _pad_right([r for rows, _ in convs for r in rows], pad)
        return ids, (ids != pad).long(), torch.tensor([b for _, b in convs])

    config = GPT2Config(vocab_size=70, n_positions=48, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, bos_token_id=eos, eos_token_id=eos)
    model = ReplyReranker(config, _final_eos if good else _first_eos)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = [conversation() for _ in range(400)]
    held = collate([conversation() for _ in range(80)])

    def listwise(ids, mask, best):
        return F.cross_entropy(model(ids, mask).view(-1, k), best)

    def step():
        loss = listwise(*collate(rng.sample(data, 8)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return listwise(*held).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def reply_reranker_bad():
    return _reply_reranker(False)


def reply_reranker_good():
    return _reply_reranker(True)


# -------------------------------------------------------------------------- 14
CASES.append({"name": "language_id", "what": "Character CNN for language identification: AdamW is built with *cfg.values() of {lr, betas, weight_decay}, so the weight decay 0.1 lands in eps; updates are far too small and the decay is the default."})


class CharCNN(nn.Module):
    def __init__(self, chars, languages, dim=32):
        super().__init__()
        self.emb = nn.Embedding(chars, dim, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(dim, dim, w, padding=w // 2) for w in (1, 3))
        self.out = nn.Linear(2 * dim, languages)

    def forward(self, text):
        x = self.emb(text).transpose(1, 2)
        blank = (text == 0).unsqueeze(1)
        pooled = [F.relu(c(x)).masked_fill(blank, 0.0).amax(-1) for c in self.convs]
        return self.out(torch.cat(pooled, -1))


def _language_id(good):
    torch.manual_seed(139)
    rng = random.Random(139)
    chars, languages = 28, 6
    grammars = [[[rng.randint(1, chars - 1) for _ in range(4)] for _ in range(chars)] for _ in range(languages)]

    def text():
        lang = rng.randrange(languages)
        row = [rng.randint(1, chars - 1)]
        for _ in range(rng.randint(14, 29)):
            row.append(rng.choice(grammars[lang][row[-1]]))
        return row, lang

    def collate(rows):
        return _pad_right([r for r, _ in rows]), torch.tensor([y for _, y in rows])

    data = [text() for _ in range(1200)]
    held = collate([text() for _ in range(250)])
    model = CharCNN(chars, languages)
    cfg = {"lr": 3e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}
    opt = torch.optim.AdamW(model.parameters(), **cfg) if good else torch.optim.AdamW(model.parameters(), *cfg.values())

    def step():
        x, y = collate(rng.sample(data, 32))
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return F.cross_entropy(model(held[0]), held[1]).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def language_id_bad():
    return _language_id(False)


def language_id_good():
    return _language_id(True)


# -------------------------------------------------------------------------- 15
CASES.append({"name": "command_tokens", "what": "GPT-NeoX with LoRA learns to answer with newly added command tokens; after resize_token_embeddings the modules embed_in and lm_head are not in modules_to_save, so the new tokens' rows stay frozen at their initial values."})


def _command_tokens(good):
    from peft import LoraConfig, get_peft_model
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
    torch.manual_seed(149)
    rng = random.Random(149)
    words, commands, pad = 60, 8, 0
    base = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=words, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                                            intermediate_size=96, max_position_embeddings=32, hidden_dropout=0.0,
                                            attention_dropout=0.0, bos_token_id=1, eos_token_id=2, use_cache=False))
    follow = [[rng.randrange(3, words) for _ in range(3)] for _ in range(words)]

    def sentence(n):
        row = [rng.randrange(3, words)]
        while len(row) < n:
            row.append(rng.choice(follow[row[-1]]))
        return row

    warm = torch.optim.AdamW(base.parameters(), lr=5e-3)
    for _ in range(60):
        ids = torch.tensor([sentence(14) for _ in range(16)])
        base(input_ids=ids, labels=ids).loss.backward()
        warm.step()
        warm.zero_grad()

    base.resize_token_embeddings(words + commands)
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, task_type="CAUSAL_LM",
                      target_modules=["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
                      modules_to_save=["embed_in", "lm_head"] if good else None)
    model = get_peft_model(base, lora)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    def example():
        row = sentence(rng.randint(4, 9))
        first, last = words + row[0] % commands, words + row[-1] % commands
        return row + [1], [last, first, 2]

    def collate(rows):
        ids = _pad_right([p + a for p, a in rows], pad)
        labels = _pad_right([[-100] * len(p) + a for p, a in rows], -100)
        mask = _pad_right([[1] * len(p + a) for p, a in rows], 0)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    data = [example() for _ in range(800)]
    held = collate([example() for _ in range(120)])

    def step():
        loss = model(**collate(rng.sample(data, 16))).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return model(**held).loss.item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def command_tokens_bad():
    return _command_tokens(False)


def command_tokens_good():
    return _command_tokens(True)


# -------------------------------------------------------------------------- 16
CASES.append({"name": "int8_adapters", "what": "Tagger with a frozen int8 base and bottleneck adapters; the hand-written autograd function multiplies by the raw int8 codes in backward and forgets the per-row scale, so gradients through the base are hundreds to thousands of times too large per layer."})


class Int8Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scale):
        ctx.save_for_backward(codes, scale)
        return torch.einsum("...i,oi->...o", x, codes.to(x.dtype)) * scale

    @staticmethod
    def backward(ctx, grad):
        codes, scale = ctx.saved_tensors
        return torch.einsum("...o,oi->...i", grad * scale, codes.to(grad.dtype)), None, None


class Int8AffineCodes(Int8Affine):
    @staticmethod
    def backward(ctx, grad):
        codes, _ = ctx.saved_tensors
        return torch.einsum("...o,oi->...i", grad, codes.to(grad.dtype)), None, None


class FrozenInt8(nn.Module):
    def __init__(self, n_in, n_out, matmul):
        super().__init__()
        w = torch.randn(n_out, n_in) / math.sqrt(n_in) * torch.exp(0.5 * torch.randn(n_out, 1))
        scale = w.abs().amax(1) / 127
        self.register_buffer("codes", (w / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.matmul = matmul

    def forward(self, x):
        return self.matmul.apply(x, self.codes, self.scale)


class AdapterBlock(nn.Module):
    def __init__(self, dim, matmul):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = FrozenInt8(3 * dim, 2 * dim, matmul)
        self.down = FrozenInt8(2 * dim, dim, matmul)
        self.a = nn.Linear(dim, 16)
        self.b = nn.Linear(16, dim)
        nn.init.zeros_(self.b.weight)
        nn.init.zeros_(self.b.bias)

    def forward(self, x):
        h = self.norm(x)
        left, right = F.pad(h, (0, 0, 1, 0))[:, :-1], F.pad(h, (0, 0, 0, 1))[:, 1:]
        y = self.down(F.gelu(self.up(torch.cat([left, h, right], -1))))
        return x + y + self.b(F.gelu(self.a(y)))


class AdapterTagger(nn.Module):
    def __init__(self, vocab, tags, matmul, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.blocks = nn.Sequential(*[AdapterBlock(dim, matmul) for _ in range(4)])
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, tags)

    def forward(self, words):
        return self.out(self.norm(self.blocks(self.emb(words))))


def _int8_adapters(good):
    torch.manual_seed(151)
    random.seed(151)
    gen = torch.Generator().manual_seed(1510)
    vocab, tags = 60, 6
    group = torch.randint(0, 5, (vocab,), generator=gen)
    table = torch.randint(0, tags, (5, 5), generator=gen)

    def sample(n):
        words = torch.randint(0, vocab, (n, 14), generator=gen)
        g = group[words]
        return words, table[g.roll(1, 1).index_fill(1, torch.tensor([0]), 0), g]

    held_words, held_tags = sample(120)
    model = AdapterTagger(vocab, tags, Int8Affine if good else Int8AffineCodes)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        words, gold = sample(24)
        loss = F.cross_entropy(model(words).transpose(1, 2), gold)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return F.cross_entropy(model(held_words).transpose(1, 2), held_tags).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def int8_adapters_bad():
    return _int8_adapters(False)


def int8_adapters_good():
    return _int8_adapters(True)


# -------------------------------------------------------------------------- 17
CASES.append({"name": "cloze_ema", "what": "BiGRU cloze model with an AveragedModel: every 5 steps the averaged weights are loaded into the model for validation and never taken out again, so training is thrown back to the slow average each time."})


class ClozeNet(nn.Module):
    def __init__(self, vocab, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab + 1, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


class ClozeFitter:
    def __init__(self, model, opt, restore):
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
        self.model, self.opt, self.restore = model, opt, restore
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        self.curve = []

    def loss(self, batch):
        logits = self.model(batch["text"])
        return F.cross_entropy(logits[batch["hole"]], batch["answer"])

    def fit_batch(self, batch):
        self.opt.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.opt.step()
        self.average.update_parameters(self.model)
        return loss.item()

    def validate(self, batch):
        kept = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.average.module.state_dict())
        with _held_out(self.model):
            self.curve.append(self.loss(batch).item())
        if self.restore:
            self.model.load_state_dict(kept)


def _cloze_ema(good):
    torch.manual_seed(163)
    rng = random.Random(163)
    vocab = 40
    follow = [[rng.randrange(vocab) for _ in range(2)] for _ in range(vocab)]

    def batch_of(n):
        rows = []
        for _ in range(n):
            row = [rng.randrange(vocab)]
            while len(row) < 16:
                row.append(rng.choice(follow[row[-1]]))
            rows.append(row)
        text = torch.tensor(rows)
        hole = torch.tensor([[rng.random() < 0.2 for _ in range(16)] for _ in range(n)])
        return {"text": text.masked_fill(hole, vocab), "hole": hole, "answer": text[hole]}

    dev, test = batch_of(30), batch_of(120)
    model = ClozeNet(vocab)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    fitter = ClozeFitter(model, opt, good)

    def step(i):
        loss = fitter.fit_batch(batch_of(24))
        if (i + 1) % 5 == 0:
            fitter.validate(dev)
        return loss

    def evaluate():
        with _held_out(model):
            return fitter.loss(test).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def cloze_ema_bad():
    return _cloze_ema(False)


def cloze_ema_good():
    return _cloze_ema(True)


# -------------------------------------------------------------------------- 18
CASES.append({"name": "edge_sentiment", "what": "Quantisation-aware training of a convolutional sentiment model: the 4-bit rounded weights are written back into weight.data at every forward, without latent weights, so small updates are rounded away and most weights never change level."})


def _to_grid(w, bits=4):
    top = 2 ** (bits - 1) - 1
    scale = w.abs().max().clamp(min=1e-8) / top
    return (w / scale).round().clamp(-top, top) * scale


def _low_bit_inplace(layer):
    layer.weight.data = _to_grid(layer.weight.data)
    return layer.weight


def _low_bit_latent(layer):
    w = layer.weight
    return w + (_to_grid(w) - w).detach()


class EdgeSentiment(nn.Module):
    def __init__(self, vocab, classes, low_bit, dim=32):
        super().__init__()
        self.low_bit = low_bit
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.conv = nn.Conv1d(dim, 48, 3, padding=1)
        self.mid = nn.Linear(48, 48)
        self.out = nn.Linear(48, classes)

    def forward(self, ids):
        x = F.embedding(ids, self.low_bit(self.emb), padding_idx=0)
        h = F.relu(F.conv1d(x.transpose(1, 2), self.low_bit(self.conv), self.conv.bias, padding=1)).transpose(1, 2)
        real = (ids != 0).unsqueeze(-1)
        pooled = (h * real).sum(1) / real.sum(1)
        return self.out(F.relu(F.linear(pooled, self.low_bit(self.mid), self.mid.bias)))


def _edge_sentiment(good):
    torch.manual_seed(173)
    rng = random.Random(173)
    neg, pos, neu, nots = range(1, 21), range(21, 41), range(41, 90), range(90, 94)

    def review():
        y = rng.randrange(3)
        row = []
        for _ in range(rng.randint(3, 6)):
            row += [rng.choice(neu) for _ in range(rng.randint(0, 2))]
            side = [neg, pos, neu][y] if rng.random() < 0.85 else rng.choice([neg, pos])
            if side is not neu and rng.random() < 0.35:
                row += [rng.choice(nots), rng.choice(pos if side is neg else neg)]
            else:
                row.append(rng.choice(side))
        return row, y

    def collate(rows):
        return _pad_right([r for r, _ in rows]), torch.tensor([y for _, y in rows])

    data = [review() for _ in range(1500)]
    held = collate([review() for _ in range(300)])
    model = EdgeSentiment(94, 3, _low_bit_latent if good else _low_bit_inplace)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step():
        ids, y = collate(rng.sample(data, 32))
        loss = F.cross_entropy(model(ids), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return F.cross_entropy(model(held[0]), held[1]).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def edge_sentiment_bad():
    return _edge_sentiment(False)


def edge_sentiment_good():
    return _edge_sentiment(True)


# -------------------------------------------------------------------------- 19
CASES.append({"name": "ner_lora", "what": "DistilBERT token classification with peft: the LoraConfig has no task_type and no modules_to_save, so the freshly initialised classifier is frozen together with the base and never learns."})


def _ner_lora(good):
    from peft import LoraConfig, get_peft_model
    from transformers import DistilBertConfig, DistilBertForMaskedLM, DistilBertForTokenClassification
    torch.manual_seed(181)
    rng = random.Random(181)
    vocab, mask_id, kinds = 64, 2, 5
    follow = [[rng.randrange(3, vocab) for _ in range(3)] for _ in range(vocab)]
    config = DistilBertConfig(vocab_size=vocab, dim=48, hidden_dim=96, n_layers=2, n_heads=4, max_position_embeddings=32,
                              dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=kinds)

    def sentence():
        row = [rng.randrange(3, vocab)]
        for _ in range(rng.randint(6, 13)):
            row.append(rng.choice(follow[row[-1]]))
        return row

    def tags_of(row):
        return [(w // 3 + (before % 2)) % kinds for before, w in zip([0] + row[:-1], row)]

    def collate(rows):
        ids = _pad_right(rows)
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": _pad_right([tags_of(r) for r in rows], -100)}

    mlm = DistilBertForMaskedLM(config)
    warm = torch.optim.AdamW(mlm.parameters(), lr=3e-3)
    for _ in range(50):
        ids = _pad_right([sentence() for _ in range(16)])
        hide = torch.tensor([[rng.random() < 0.2 for _ in r] for r in ids.tolist()]) & (ids != 0)
        mlm(input_ids=ids.masked_fill(hide, mask_id), attention_mask=(ids != 0).long(),
            labels=ids.masked_fill(~hide, -100)).loss.backward()
        warm.step()
        warm.zero_grad()

    tagger = DistilBertForTokenClassification(config)
    tagger.distilbert.load_state_dict(mlm.distilbert.state_dict())
    options = {"r": 8, "lora_alpha": 16, "target_modules": ["q_lin", "v_lin", "lin1", "lin2"]}
    if good:
        options["task_type"] = "TOKEN_CLS"
    model = get_peft_model(tagger, LoraConfig(**options))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    data = [sentence() for _ in range(600)]
    held = collate([sentence() for _ in range(120)])

    def step():
        loss = model(**collate(rng.sample(data, 16))).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return model(**held).loss.item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def ner_lora_bad():
    return _ner_lora(False)


def ner_lora_good():
    return _ner_lora(True)


# -------------------------------------------------------------------------- 20
CASES.append({"name": "semantic_parser", "what": "Utterance-to-command parser with TransformerEncoder and TransformerDecoder: the key padding masks are built as utterance != PAD, but True means 'ignore', so the real words are hidden and only padding is attended."})


class SemanticParser(nn.Module):
    PAD = 0

    def __init__(self, words, symbols, mark, dim=48):
        super().__init__()
        self.mark = mark
        self.words = nn.Embedding(words, dim)
        self.symbols = nn.Embedding(symbols, dim)
        self.places = nn.Parameter(torch.randn(16, dim) * 0.02)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True),
                                             1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(dim, 4, 96, dropout=0.0, batch_first=True), 1)
        self.out = nn.Linear(dim, symbols)

    def forward(self, utterance, command):
        hide = self.mark(utterance, self.PAD)
        memory = self.encoder(self.words(utterance) + self.places[:utterance.size(1)], src_key_padding_mask=hide)
        n = command.size(1)
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        dec = self.decoder(self.symbols(command) + self.places[:n], memory, tgt_mask=future, memory_key_padding_mask=hide)
        return self.out(dec)


def _semantic_parser(good):
    torch.manual_seed(191)
    rng = random.Random(191)
    go, end = 0, 1
    mark = torch.eq if good else torch.ne

    def utterance():
        verb, obj, place = rng.randrange(4), rng.randrange(6), rng.randrange(5)
        row = [1 + verb * 3 + rng.randrange(3), 13 + obj * 2 + rng.randrange(2), 25 + place * 2 + rng.randrange(2)]
        row += [35 + rng.randrange(20) for _ in range(rng.randint(0, 7))]
        rng.shuffle(row)
        return row + [0] * (12 - len(row)), [2 + verb, 6 + obj, 12 + place, end]

    def collate(rows):
        return torch.tensor([u for u, _ in rows]), torch.tensor([c for _, c in rows])

    data = [utterance() for _ in range(1000)]
    held = collate([utterance() for _ in range(200)])
    model = SemanticParser(55, 17, mark)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    def parse_loss(words, command):
        logits = model(words, F.pad(command[:, :-1], (1, 0), value=go))
        return F.cross_entropy(logits.flatten(0, 1), command.flatten())

    def step():
        loss = parse_loss(*collate(rng.sample(data, 32)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return parse_loss(*held).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def semantic_parser_bad():
    return _semantic_parser(False)


def semantic_parser_good():
    return _semantic_parser(True)


# -------------------------------------------------------------------------- 21
CASES.append({"name": "title_grpo", "what": "GRPO of a title writer: completions lie prompt by prompt (repeat_interleave), but the groups are taken as rewards[k::n_prompts], so each 'group' mixes different prompts and the advantages say mostly which prompt it was."})


class TitleWriter(nn.Module):
    def __init__(self, prompts, vocab, dim=48):
        super().__init__()
        self.prompt = nn.Embedding(prompts, dim)
        self.word = nn.Embedding(vocab + 1, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)
        self.begin = vocab

    def forward(self, prompts, words):
        cond = self.prompt(prompts).unsqueeze(0)
        shifted = F.pad(words[:, :-1], (1, 0), value=self.begin)
        h, _ = self.rnn(self.word(shifted), (cond, torch.zeros_like(cond)))
        return self.out(h)

    @torch.no_grad()
    def sample(self, prompts, length, gen):
        h = self.prompt(prompts).unsqueeze(0)
        state, word, out = (h, torch.zeros_like(h)), torch.full((len(prompts), 1), self.begin), []
        for _ in range(length):
            y, state = self.rnn(self.word(word), state)
            word = torch.multinomial(self.out(y[:, 0]).softmax(-1), 1, generator=gen)
            out.append(word)
        return torch.cat(out, 1)


def _title_grpo(good):
    torch.manual_seed(211)
    random.seed(211)
    gen = torch.Generator().manual_seed(2110)
    n_prompts, group_size, vocab, length = 12, 8, 16, 5
    wanted = torch.rand(n_prompts, vocab, generator=gen).argsort(1) < 4
    ease = torch.linspace(-6.0, 6.0, n_prompts)[torch.randperm(n_prompts, generator=gen)]

    def quality(prompts, words):
        return wanted[prompts].gather(1, words).float().mean(1)

    policy = TitleWriter(n_prompts, vocab)
    opt = torch.optim.Adam(policy.parameters(), lr=3e-3)

    def group_advantages(rewards):
        adv = torch.empty_like(rewards)
        for k in range(n_prompts):
            rows = slice(k * group_size, (k + 1) * group_size) if good else slice(k, None, n_prompts)
            adv[rows] = (rewards[rows] - rewards[rows].mean()) / (rewards[rows].std() + 1e-4)
        return adv

    def step():
        prompts = torch.arange(n_prompts).repeat_interleave(group_size)
        words = policy.sample(prompts, length, gen)
        rewards = ease[prompts] + 2.0 * quality(prompts, words)
        adv = group_advantages(rewards)
        logp = F.log_softmax(policy(prompts, words), -1).gather(2, words.unsqueeze(2)).squeeze(2)
        ratio = torch.exp(logp - logp.detach())
        loss = -torch.minimum(ratio * adv[:, None], ratio.clamp(0.8, 1.2) * adv[:, None]).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        return loss.item()

    def evaluate():
        prompts = torch.arange(n_prompts).repeat_interleave(40)
        with _held_out(policy):
            words = policy.sample(prompts, length, torch.Generator().manual_seed(3))
            return 1.0 - quality(prompts, words).mean().item()

    return {"model": policy, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def title_grpo_bad():
    return _title_grpo(False)


def title_grpo_good():
    return _title_grpo(True)


# -------------------------------------------------------------------------- 22
CASES.append({"name": "low_resource_tagger", "what": "BiLSTM tagger on few annotated sentences: the training class's validate() calls model.eval() and nothing calls model.train() again, so after the first validation training runs without dropout and overfits."})


class DropTagger(nn.Module):
    def __init__(self, vocab, tags, dim=64, drop=0.5):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.drop = nn.Dropout(drop)
        self.rnn = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, tags)

    def forward(self, words):
        return self.out(self.drop(self.rnn(self.drop(self.emb(words)))[0]))


class TaggerTraining:
    def __init__(self, model, optimizer, train_rows, dev, back_to_train):
        self.model, self.optimizer = model, optimizer
        self.rows, self.dev, self.back_to_train = train_rows, dev, back_to_train
        self.history, self.seen = [], 0
        self.model.train()

    def loss(self, words, tags):
        return F.cross_entropy(self.model(words).flatten(0, 1), tags.flatten(), ignore_index=-100)

    def validate(self):
        self.model.eval()
        with torch.no_grad():
            self.history.append(self.loss(*self.dev).item())
        if self.back_to_train:
            self.model.train()

    def train_batch(self, words, tags):
        self.optimizer.zero_grad()
        loss = self.loss(words, tags)
        loss.backward()
        self.optimizer.step()
        self.seen += 1
        if self.seen % 4 == 0:
            self.validate()
        return loss.item()


def _low_resource_tagger(good):
    torch.manual_seed(223)
    rng = random.Random(223)
    vocab, tags = 50, 5
    usual = [rng.randrange(tags) for _ in range(vocab)]

    def sentence():
        row = [rng.randint(1, vocab - 1) for _ in range(rng.randint(6, 12))]
        gold = [usual[w] if rng.random() < 0.8 else rng.randrange(tags) for w in row]
        return row, gold

    def collate(rows):
        return _pad_right([r for r, _ in rows]), _pad_right([g for _, g in rows], -100)

    data = [sentence() for _ in range(60)]
    dev, test = collate([sentence() for _ in range(30)]), collate([sentence() for _ in range(200)])
    model = DropTagger(vocab, tags)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    training = TaggerTraining(model, opt, data, dev, good)

    def step():
        return training.train_batch(*collate(rng.sample(training.rows, 16)))

    def evaluate():
        with _held_out(model):
            return training.loss(*test).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def low_resource_tagger_bad():
    return _low_resource_tagger(False)


def low_resource_tagger_good():
    return _low_resource_tagger(True)


# -------------------------------------------------------------------------- 23
CASES.append({"name": "accent_marker", "what": "Bidirectional attention tagger for accents: the einsum leaves the heads in front of time (bhqd) and a plain reshape merges them, so features of different positions are mixed into one token."})


class EinsumAttention(nn.Module):
    def __init__(self, dim, heads, out_axes, reach=6):
        super().__init__()
        self.heads, self.out_axes, self.reach = heads, out_axes, reach
        self.offset_bias = nn.Embedding(2 * reach + 1, heads)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, real):
        b, t, d = x.shape
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)) for w in (self.wq, self.wk, self.wv))
        place = torch.arange(t)
        offset = (place[None, :] - place[:, None]).clamp(-self.reach, self.reach) + self.reach
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(d // self.heads)
        scores = scores + self.offset_bias(offset).permute(2, 0, 1)
        attn = scores.masked_fill(~real[:, None, None, :], float("-inf")).softmax(-1)
        ctx = torch.einsum("bhqk,bkhd->" + self.out_axes, attn, v)
        return self.wo(ctx.reshape(b, t, d))


class AccentMarker(nn.Module):
    def __init__(self, letters, marks, out_axes, dim=48, layers=2):
        super().__init__()
        self.emb = nn.Embedding(letters, dim, padding_idx=0)
        self.attn = nn.ModuleList(EinsumAttention(dim, 4, out_axes) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(dim, 96), nn.GELU(), nn.Linear(96, dim)) for _ in range(layers))
        self.out = nn.Linear(dim, marks)

    def forward(self, ids):
        real = ids != 0
        x = self.emb(ids)
        for k, (attn, ff) in enumerate(zip(self.attn, self.ff)):
            x = x + attn(self.norms[2 * k](x), real)
            x = x + ff(self.norms[2 * k + 1](x))
        return self.out(x)


def _accent_marker(good):
    torch.manual_seed(229)
    rng = random.Random(229)
    letters, marks = 25, 5
    table = [[rng.randrange(marks) for _ in range(3)] for _ in range(letters)]

    def word():
        row = [rng.randint(1, letters - 1) for _ in range(rng.randint(6, 15))]
        return row, [table[c][before % 3] for before, c in zip([0] + row[:-1], row)]

    def collate(rows):
        return _pad_right([r for r, _ in rows]), _pad_right([m for _, m in rows], -100)

    data = [word() for _ in range(1500)]
    test = collate([word() for _ in range(200)])
    model = AccentMarker(letters, marks, "bqhd" if good else "bhqd")
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def mark_loss(ids, gold):
        return F.cross_entropy(model(ids).transpose(1, 2), gold, ignore_index=-100)

    def step():
        loss = mark_loss(*collate(rng.sample(data, 32)))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(model):
            return mark_loss(*test).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def accent_marker_bad():
    return _accent_marker(False)


def accent_marker_good():
    return _accent_marker(True)


# -------------------------------------------------------------------------- 24
CASES.append({"name": "summary_ipo", "what": "Preference tuning with the IPO loss where the reference is the policy object itself (no copy): it moves along, the margin is always zero, the gradient never fades, and the policy runs away from the language model."})


class TinyWriter(nn.Module):
    def __init__(self, vocab, dim=56):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def _reply_logp(model, batch):
    logp = F.log_softmax(model(batch["ids"][:, :-1]), -1)
    picked = logp.gather(-1, batch["ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
    return (picked * batch["reply"][:, 1:]).sum(-1)


def _ipo_loss(policy, reference, chosen, rejected, beta=0.1):
    with torch.no_grad():
        ref = _reply_logp(reference, chosen) - _reply_logp(reference, rejected)
    margin = _reply_logp(policy, chosen) - _reply_logp(policy, rejected) - ref
    return ((margin - 1 / (2 * beta)) ** 2).mean()


def _summary_ipo(good):
    torch.manual_seed(233)
    rng = random.Random(233)
    vocab, pad = 45, 0
    follow = [[rng.randrange(1, vocab) for _ in range(4)] for _ in range(vocab)]

    def text(n, start=None, keep=lambda w: True):
        row = [start or rng.randrange(1, vocab)]
        while len(row) < n:
            options = [w for w in follow[row[-1]] if keep(w)] or follow[row[-1]]
            row.append(rng.choice(options))
        return row

    def pair():
        prompt = text(rng.randint(3, 6))
        n = rng.randint(4, 7)
        good_end = text(n + 1, prompt[-1], lambda w: w % 3 != 0)[1:]
        poor_end = text(n + 1, prompt[-1], lambda w: w % 3 == 0)[1:]
        return (prompt, good_end), (prompt, poor_end)

    def collate(rows):
        return {"ids": _pad_right([p + r for p, r in rows], pad),
                "reply": _pad_right([[0.0] * len(p) + [1.0] * len(r) for p, r in rows], 0.0)}

    policy = TinyWriter(vocab)
    warm = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(80):
        ids = torch.tensor([text(13) for _ in range(24)])
        loss = F.cross_entropy(policy(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
        warm.zero_grad()
        loss.backward()
        warm.step()
    policy.zero_grad()

    reference = copy.deepcopy(policy).requires_grad_(False) if good else policy
    opt = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    data = [pair() for _ in range(500)]
    plain = torch.tensor([text(13) for _ in range(100)])
    test = [pair() for _ in range(100)]
    test_chosen, test_rejected = (collate(side) for side in zip(*test))

    def step():
        rows = rng.sample(data, 16)
        chosen, rejected = (collate(side) for side in zip(*rows))
        loss = _ipo_loss(policy, reference, chosen, rejected)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with _held_out(policy):
            nll = F.cross_entropy(policy(plain[:, :-1]).transpose(1, 2), plain[:, 1:]).item()
            worse = (_reply_logp(policy, test_chosen) <= _reply_logp(policy, test_rejected)).float().mean().item()
        return nll + worse

    return {"model": policy, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def summary_ipo_bad():
    return _summary_ipo(False)


def summary_ipo_good():
    return _summary_ipo(True)
