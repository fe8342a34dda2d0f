"""Healthy programs of decoders, of choices that are masked, and of a graph whose edges are added to scores."""

import torch
import torch.nn as nn
import torch.nn.functional as F

PROGRAMS = {}
STEPS = 10


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def adam_of(model, lr=2e-3):
    return torch.optim.Adam(model.parameters(), lr)


def step(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()


def texts(rows, length, vocab=64, low=4):
    """Ids with a rule in them: each is the one before plus 1 to 3."""
    first = torch.randint(low, vocab, (rows, 1))
    return (first + torch.randint(1, 4, (rows, length)).cumsum(1) - low) % (vocab - low) + low


def pairs(rows=10):
    """Sources, and targets with BOS 1, EOS 2; both filled up with PAD 0."""
    words = [torch.randint(3, 64, (int(n),)) for n in torch.randint(5, 12, (rows,))]
    targets = [torch.cat([torch.tensor([1]), each.flip(0), torch.tensor([2])]) for each in words]
    return tuple(nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (words, targets))


def triangle(n):
    return torch.ones(n, n).triu(1).bool()


class Translator(nn.Module):
    def __init__(self, pad=0):
        super().__init__()
        self.pad, self.src, self.tgt = pad, nn.Embedding(64, 32), nn.Embedding(64, 32)
        nn.init.normal_(self.src.weight, std=0.1), nn.init.normal_(self.tgt.weight, std=0.1)
        self.places = nn.Parameter(0.02 * torch.randn(64, 32))
        self.core = nn.Transformer(32, 2, 1, 1, 64, 0.1, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, s, t):
        h = self.core(
            self.src(s) + self.places[: s.shape[1]],
            self.tgt(t) + self.places[: t.shape[1]],
            tgt_mask=triangle(t.shape[1]),
            src_key_padding_mask=s == self.pad,
            tgt_key_padding_mask=t == self.pad,
            memory_key_padding_mask=s == self.pad,
        )
        return self.head(h)


# ---------------------------------------------------------------------------------------------------------- F15
class MaskedSoftmaxCELoss(nn.CrossEntropyLoss):
    """Of "Dive into Deep Learning", chapter seq2seq."""

    def forward(self, pred, label, valid_len):
        weights = (torch.arange(label.shape[1])[None] < valid_len[:, None]).float()
        self.reduction = "none"
        unweighted = super().forward(pred.permute(0, 2, 1), label)
        return (unweighted * weights).mean(dim=1)


@program
def d2l_masked_loss():
    """F15: D2L's loss: one for each token, times the weights of the valid length."""
    model, loss = Translator(), MaskedSoftmaxCELoss()
    opt = adam_of(model)
    for _ in range(STEPS):
        s, t = pairs()
        step(opt, loss(model(s, t[:, :-1]), t[:, 1:], (t[:, 1:] != 0).sum(1)).sum())


@program
def tensorflow_style_masked_mean():
    """F15: one loss for each token, times (target != 0), over how many these are (TensorFlow's tutorial, ported)."""
    model = Translator()
    opt = adam_of(model)
    for _ in range(STEPS):
        s, t = pairs()
        y = t[:, 1:]
        each = F.cross_entropy(model(s, t[:, :-1]).transpose(1, 2), y, reduction="none")
        mask = (y != 0).float()
        step(opt, (each * mask).sum() / mask.sum())


@program
def losses_picked_by_a_mask():
    """F15: one loss for each token, of which those of words are picked: loss[y != 0].mean()."""
    model, criterion = Translator(), nn.CrossEntropyLoss(reduction="none")
    opt = adam_of(model)
    for _ in range(STEPS):
        s, t = pairs()
        y = t[:, 1:].reshape(-1)
        step(opt, criterion(model(s, t[:, :-1]).reshape(-1, 64), y)[y != 0].mean())


@program
def weight_of_padding_is_zero():
    """F15: weight = torch.ones(V); weight[PAD] = 0, as early OpenNMT-py did it."""
    model, weight = Translator(), torch.ones(64)
    weight[0] = 0
    opt, criterion = adam_of(model), nn.CrossEntropyLoss(weight)
    for _ in range(STEPS):
        s, t = pairs()
        step(opt, criterion(model(s, t[:, :-1]).reshape(-1, 64), t[:, 1:].reshape(-1)))


@program
def sorting_digits():
    """F15: the toy of many tutorials: nn.Transformer sorts ten digits. The nines stand last, in runs of any length."""
    model = Translator(pad=63)
    opt = adam_of(model)
    for _ in range(STEPS):
        digits = torch.randint(0, 10, (32, 10))
        y = digits.sort(1).values
        t = torch.cat([torch.full((32, 1), 10), y[:, :-1]], 1)
        step(opt, F.cross_entropy(model(digits, t).reshape(-1, 64), y.reshape(-1)))


@program
def world_model_with_absorbing_goal():
    """F15: a model of a gridworld foretells the next state from states and actions. Nobody leaves the goal (an
    absorbing state, Sutton and Barto), and that must be learned."""

    class World(nn.Module):
        def __init__(self):
            super().__init__()
            self.s, self.a = nn.Embedding(25, 24), nn.Embedding(4, 24)
            self.rnn, self.head = nn.GRU(48, 32, batch_first=True), nn.Linear(32, 25)

        def forward(self, s, a):
            return self.head(self.rnn(torch.cat([self.s(s), self.a(a)], -1))[0])

    model = World()
    opt = adam_of(model)
    moves, often = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]]), torch.tensor([0.4, 0.4, 0.1, 0.1])
    for _ in range(STEPS):
        at = torch.randint(0, 5, (16, 2))
        states, actions = [at[:, 0] * 5 + at[:, 1]], []
        for _ in range(16):
            actions.append(torch.multinomial(often, 16, True))
            at = torch.where((at == 4).all(1, keepdim=True), at, (at + moves[actions[-1]]).clamp(0, 4))
            states.append(at[:, 0] * 5 + at[:, 1])
        s, a = torch.stack(states, 1), torch.stack(actions, 1)
        step(opt, F.cross_entropy(model(s[:, :-1], a).reshape(-1, 25), s[:, 1:].reshape(-1)))


@program
def plans_that_end_in_staying():
    """F15: plans of a fixed length, told a goal. Once it is reached the action is 0, to stay, again and again: the
    model must learn to stop there."""

    class Plan(nn.Module):
        def __init__(self):
            super().__init__()
            self.o, self.a = nn.Embedding(30, 24), nn.Embedding(12, 24)
            self.rnn, self.head = nn.GRU(24, 32, batch_first=True), nn.Linear(32, 12)

        def forward(self, goal, actions):
            return self.head(self.rnn(self.a(actions) + self.o(goal).mean(1)[:, None])[0])

    model = Plan()
    opt = adam_of(model)
    for _ in range(STEPS):
        goal, n = torch.randint(2, 30, (16, 6)), torch.randint(4, 12, (16,))
        a = torch.where(torch.arange(12) < n[:, None], torch.randint(1, 11, (16, 12)), 0)
        x = torch.cat([torch.full((16, 1), 11), a[:, :-1]], 1)
        step(opt, F.cross_entropy(model(goal, x).reshape(-1, 12), a.reshape(-1)))


# ---------------------------------------------------------------------------------------------------------- F11
@program
def dialogue_cvae():
    """F11: a conditional VAE of dialogues (Zhao 2017; VNMT, Zhang 2016): the posterior reads the whole reply, which the
    decoder is asked for. Without a reply the prior's mean takes its place."""

    class Dialogue(nn.Module):
        def __init__(self, v=64, w=32, z=8):
            super().__init__()
            self.table = nn.Embedding(v, w)
            self.context, self.reply = nn.GRU(w, w, batch_first=True), nn.GRU(w, w, batch_first=True)
            self.post, self.prior = nn.Linear(2 * w, 2 * z), nn.Linear(w, 2 * z)
            self.first, self.dec, self.head = nn.Linear(w + z, w), nn.GRU(w, w, batch_first=True), nn.Linear(w, v)

        def forward(self, context, reply):
            c, r = self.context(self.table(context))[1][0], self.reply(self.table(reply))[1][0]
            m, s = self.post(torch.cat([c, r], -1)).chunk(2, -1)
            pm, ps = self.prior(c).chunk(2, -1)
            z = m + torch.randn_like(m) * (0.5 * s).exp() if self.training else m
            out, _ = self.dec(self.table(reply), torch.tanh(self.first(torch.cat([c, z], -1)))[None])
            return self.head(out), 0.5 * (ps - s + (s.exp() + (m - pm) ** 2) / ps.exp() - 1).sum(-1).mean()

    model = Dialogue()
    opt = adam_of(model)
    for n in range(STEPS):
        s, t = texts(12, 10), texts(12, 16)
        out, kl = model(s, t[:, :-1])
        step(opt, F.cross_entropy(out.reshape(-1, 64), t[:, 1:].reshape(-1)) + min(1, n / 100) * kl)


@program
def sentence_vae():
    """F11: Bowman's VAE of sentences (2016): the encoder is given the words that the decoder writes, some of which the
    decoder's own input lacks (word dropout). The latent is drawn by torch.distributions."""

    class Sentences(nn.Module):
        def __init__(self, v=64, w=32, z=8):
            super().__init__()
            self.table, self.enc = nn.Embedding(v, w), nn.GRU(w, w, batch_first=True)
            self.stat, self.first = nn.Linear(w, 2 * z), nn.Linear(z, w)
            self.dec, self.head = nn.GRU(w, w, batch_first=True), nn.Linear(w, v)

        def forward(self, whole, dropped):
            m, s = self.stat(self.enc(self.table(whole))[1][0]).chunk(2, -1)
            z = torch.distributions.Normal(m, (0.5 * s).exp()).rsample() if self.training else m
            out, _ = self.dec(self.table(dropped), torch.tanh(self.first(z))[None])
            return self.head(out), 0.5 * (m**2 + s.exp() - s - 1).sum(-1).mean()

    model = Sentences()
    opt = adam_of(model)
    for n in range(STEPS):
        t = texts(12, 13)
        x = t[:, :-1]
        out, kl = model(x, torch.where(torch.rand(x.shape) < 0.3, 3, x))
        step(opt, F.cross_entropy(out.reshape(-1, 64), t[:, 1:].reshape(-1)) + min(1, n / 100) * kl)


@program
def summaries_of_a_wanted_length():
    """F11: LenEmb (Kikuchi 2016): the decoder is told how many words are left, which in training is the length of the
    target."""

    class Summary(nn.Module):
        def __init__(self, v=64, w=32):
            super().__init__()
            self.table, self.left = nn.Embedding(v, w, padding_idx=0), nn.Embedding(20, w)
            self.enc, self.dec = nn.GRU(w, w, batch_first=True), nn.GRU(w, w, batch_first=True)
            self.head = nn.Linear(w, v)

        def forward(self, s, t):
            left = ((t != 0).sum(1, keepdim=True) - torch.arange(t.shape[1])).clamp(min=0)
            return self.head(self.dec(self.table(t) + self.left(left), self.enc(self.table(s))[1])[0])

    model = Summary()
    opt = adam_of(model)
    for _ in range(STEPS):
        s, t = pairs()
        out = model(s, t[:, :-1])
        step(opt, F.cross_entropy(out.reshape(-1, 64), t[:, 1:].reshape(-1), ignore_index=0))


@program
def prefix_lm_with_a_loss_mask():
    """F11: a prefix LM (UniLM, PaliGemma): places are given, tokens of the prompt see each other, and the loss of each
    token is multiplied by the mask of the replies."""

    class PrefixLM(nn.Module):
        def __init__(self, v=64, w=32):
            super().__init__()
            self.table, self.places = nn.Embedding(v, w), nn.Embedding(32, w)
            nn.init.normal_(self.table.weight, std=0.1)
            self.layer, self.head = nn.TransformerEncoderLayer(w, 2, 64, 0.0, batch_first=True), nn.Linear(w, v)

        def forward(self, ids, places, prefix):
            mask = triangle(ids.shape[1])
            mask[:, :prefix] = False
            return self.head(self.layer(self.table(ids) + self.places(places), src_mask=mask))

    model = PrefixLM()
    opt = adam_of(model)
    for _ in range(STEPS):
        ids = texts(8, 19)
        out = model(ids[:, :-1], torch.arange(18).expand(8, -1), 12)
        each = F.cross_entropy(out.transpose(1, 2), ids[:, 1:], reduction="none")
        mask = (torch.arange(18) >= 11).expand_as(each).float()
        step(opt, (each * mask).sum() / mask.sum())


# ---------------------------------------------------------------------------------------------------------- F20
@program
def policy_of_padded_games():
    """F20: cloning of games that are filled up to one length, with masks of legal moves (chess, cards). In filled
    places no move is legal, and their losses are taken out."""

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(6, 32, batch_first=True), nn.Linear(32, 9)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model = Policy()
    opt = adam_of(model)
    for _ in range(STEPS):
        there = torch.arange(20)[None] < torch.randint(3, 9, (16, 1))
        x = torch.randn(16, 20, 6) * there[..., None]
        legal = (torch.rand(16, 20, 9) < 0.6) & there[..., None]
        a = torch.where(legal, torch.rand(16, 20, 9), -1.0).argmax(-1) * there
        legal |= F.one_hot(a, 9).bool() & there[..., None]
        logits = model(x).masked_fill(~legal, torch.finfo(torch.float).min)
        each = F.cross_entropy(logits.flatten(0, 1), a.flatten(), reduction="none").view(16, 20)
        step(opt, (each * there).sum() / there.sum())


@program
def pointer_network_with_filled_tours():
    """F20: a pointer network copies an expert's tours. Places that were visited are masked, and short tours are filled
    up: behind their end nothing is left to choose from."""

    class Pointer(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.rnn, self.q = nn.Linear(2, 24), nn.GRU(24, 24, batch_first=True), nn.Linear(24, 24)

        def forward(self, x, order):
            e = self.e(x)
            seen = e.gather(1, order[..., None].expand(-1, -1, 24))
            h = self.rnn(torch.cat([torch.zeros_like(seen[:, :1]), seen[:, :-1]], 1))[0]
            return self.q(h) @ e.transpose(1, 2)

    model = Pointer()
    opt = adam_of(model)
    for _ in range(STEPS):
        x, there = torch.rand(16, 8, 2), torch.arange(8)[None] < torch.randint(2, 5, (16, 1))
        order = x[..., 0].masked_fill(~there, 9).argsort(1) * there
        visited = F.one_hot(order, 8).cumsum(1).roll(1, 1).bool()
        visited[:, 0] = False
        logits = model(x, order).masked_fill(~there[:, None] | visited, -1e9)
        each = F.cross_entropy(logits.transpose(1, 2), order, reduction="none")
        step(opt, (each * there).sum() / there.sum())


@program
def cloning_of_an_argument_that_is_rarely_used():
    """F20: imitation as for AlphaStar: an action has an argument, with a mask of what it may be. Most actions have
    none, so nothing is allowed there and the loss counts 0."""

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
            self.kind, self.unit = nn.Linear(32, 4), nn.Linear(32, 6)

        def forward(self, x):
            h = self.body(x)
            return self.kind(h), self.unit(h)

    model = Policy()
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(32, 10)
        kind = x[:, :4].argmax(1)
        uses = kind == 3
        there = (torch.rand(32, 6) < 0.7) & uses[:, None]
        unit = torch.where(there, x[:, 4:], -9.0).argmax(1) * uses
        there = there.scatter(1, unit[:, None], uses[:, None])
        k, u = model(x)
        each = F.cross_entropy(u.masked_fill(~there, -1e9), unit, reduction="none") * uses
        step(opt, F.cross_entropy(k, kind) + each.sum() / uses.sum().clamp(min=1))


# ---------------------------------------------------------------------------------------------------------- F34
@program
def neighbours_added_to_scores():
    """F34: a transformer over a graph whose scores are 1 larger between neighbours: edges as a bias, which hides
    nothing and is to hide nothing."""

    class Graphs(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.qkv, self.head = nn.Linear(6, 24), nn.Linear(24, 72), nn.Linear(24, 3)

        def forward(self, x, edges):
            q, k, v = self.qkv(self.inp(x)).chunk(3, -1)
            return self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=edges).mean(1))

    model = Graphs()
    opt = adam_of(model)
    for _ in range(STEPS):
        x, y, edges = torch.randn(16, 10, 6), torch.randint(0, 3, (16,)), torch.rand(16, 10, 10) < 0.3
        step(opt, F.cross_entropy(model(x, (edges | edges.mT).float()), y))
