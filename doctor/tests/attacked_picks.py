"""Healthy programs that pick, place and group things in their own way, whose lines meet those of a fault."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from .attacked_parts import LM, net, texts, update

PROGRAMS = {}
STEPS = 14


def program(f):
    PROGRAMS[f.__name__] = f
    return f


class Towers(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = net(a, 16), net(b, 16)

    def forward(self, a, b):
        return (self.a(a) * self.b(b)).sum(1)


def masked_lm(model, opt, ids, answers):
    """answers: the places that are to answer, open at the end."""
    logits = model(ids)[:, :-1]
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    mask = answers[:, :-1].float()
    update(opt, (each * mask).sum() / mask.sum())


@program
def cosine_to_fixed_prototypes():
    """F88/no-softmax: hyperspherical prototypes that are fixed and apart (a simplex ETF): features of length one are
    drawn to the prototype of their class, loss = -cos. It is bounded, and fixed prototypes need no negatives."""
    model = net(10, 16)
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    basis = torch.linalg.qr(torch.randn(16, 4))[0]
    etf = (basis @ (torch.eye(4) - 0.25) * (4 / 3) ** 0.5).T.contiguous()
    centres = torch.randn(4, 10)

    for _ in range(STEPS):
        y = torch.randint(4, (32,))
        z = F.normalize(model(centres[y] + 0.5 * torch.randn(32, 10)), dim=1)
        cosines = F.linear(z, etf)
        update(opt, -cosines.gather(1, y[:, None]).mean())


@program
def actor_of_a_critic_with_a_head_per_task():
    """F88/no-softmax: multi-task DDPG: the critic has one value per task, that of the row's task is picked, and the
    actor climbs it."""

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = nn.Sequential(net(9, 2), nn.Tanh()), net(8, 3)

    model = Agent()
    actor_opt = torch.optim.Adam(model.actor.parameters(), 1e-3)
    critic_opt = torch.optim.Adam(model.critic.parameters(), 3e-3)
    goals = torch.tensor([[0.5, 0.0], [-0.5, 0.3], [0.0, -0.6]])

    for _ in range(STEPS):
        s, task = torch.randn(32, 6), torch.randint(3, (32,))
        a = 2 * torch.rand(32, 2) - 1
        reward = -(a - goals[task]).pow(2).sum(1)
        q = model.critic(torch.cat([s, a], 1)).gather(1, task[:, None]).squeeze(1)
        update(critic_opt, F.mse_loss(q, reward))
        mine = model.actor(torch.cat([s, F.one_hot(task, 3).float()], 1))
        update(actor_opt, -model.critic(torch.cat([s, mine], 1)).gather(1, task[:, None]).mean())


@program
def generator_before_a_critic_per_domain():
    """F88/no-softmax: FUNIT, StarGAN v2: the discriminator has one answer per domain; the hinge loss of the generator
    is minus the answer of the wanted domain."""

    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.g, self.d = net(7, 2), net(2, 3)

    model = Gan()
    g_opt = torch.optim.Adam(model.g.parameters(), 1e-3, betas=(0.0, 0.99))
    d_opt = torch.optim.Adam(model.d.parameters(), 1e-3, betas=(0.0, 0.99))
    centres = torch.tensor([[1.0, 0.0], [-1.0, 0.5], [0.0, -1.0]])

    for _ in range(STEPS):
        y, rows = torch.randint(3, (32,)), torch.arange(32)
        real = centres[y] + 0.2 * torch.randn(32, 2)
        fake = model.g(torch.cat([torch.randn(32, 4), F.one_hot(y, 3).float()], 1))
        loss_d = F.relu(1 - model.d(real)[rows, y]).mean() + F.relu(1 + model.d(fake.detach())[rows, y]).mean()
        update(d_opt, loss_d)
        update(g_opt, -model.d(fake)[rows, y].mean())


@program
def optimality_gap():
    """F88/no-error: learning to optimise: the loss is the mean gap of the objective at the network's answer to the
    known optimum of each problem, which is 0 at least."""
    model = net(6, 3)
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    A = torch.randn(3, 6)

    for _ in range(STEPS):
        b = torch.randn(32, 6)
        best = b @ A.T
        lowest = 1 + best.abs().sum(1)  # of |x - best|^2 + lowest
        x = model(b)
        objective = (x - best).pow(2).sum(1) + lowest
        update(opt, (objective - lowest).mean())


@program
def generator_lowers_the_distance_itself():
    """F88/no-error: a WGAN whose generator step lowers the whole estimate of the distance, critic(real) - critic(fake),
    with the critic's weights frozen for it; the first part is a constant there."""

    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.g, self.c = net(4, 2), net(2, 1)

    model = Gan()
    g_opt, c_opt = torch.optim.RMSprop(model.g.parameters(), 5e-4), torch.optim.RMSprop(model.c.parameters(), 1e-3)

    for _ in range(STEPS):
        real = torch.randn(32, 2) * 0.3 + 1
        model.c.requires_grad_(True)
        with torch.no_grad():
            fake = model.g(torch.randn(32, 4))
        x = (torch.rand(32, 1) * (real - fake) + fake).requires_grad_()
        slope = torch.autograd.grad(model.c(x).sum(), x, create_graph=True)[0]
        update(c_opt, model.c(fake).mean() - model.c(real).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean())
        model.c.requires_grad_(False)
        distance = (model.c(real) - model.c(model.g(torch.randn(32, 4)))).mean()
        update(g_opt, distance)


@program
def confidence_held_to_accuracy():
    """F88/squared-mean: DCA (Liang et al. 2020), an auxiliary loss of calibration: the distance of the mean confidence
    to the accuracy of the batch, beside the cross-entropy."""
    model = net(10, 4)
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    centres = torch.randn(4, 10)

    for _ in range(STEPS):
        y = torch.randint(4, (64,))
        logits = model(centres[y] + 1.2 * torch.randn(64, 10))
        confidence, said = logits.softmax(1).max(1)
        dca = (confidence - (said == y).float()).mean().abs()
        update(opt, 0.5 * dca + F.cross_entropy(logits, y))


@program
def parity_of_mean_and_rate():
    """F88/squared-mean: a click model with a penalty of calibration in the large, the squared difference of the mean
    prediction and the click rate, beside binary cross-entropy."""
    model = net(10, 1)
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    w = torch.randn(10)

    for _ in range(STEPS):
        x = torch.randn(64, 10)
        y = (torch.rand(64) < (x @ w - 1).sigmoid()).float()
        logits = model(x).squeeze(1)
        loss = (logits.sigmoid() - y).mean() ** 2
        loss = loss + F.binary_cross_entropy_with_logits(logits, y)
        update(opt, loss)


@program
def pseudo_labels_at_test_time():
    """F88/own-choice: test-time adaptation by pseudo-labels (Lee 2013; the PL baseline of TENT): a trained model's
    norms are tuned on unlabelled shifted data by cross-entropy against its own choice."""
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    centres = torch.randn(4, 10)
    first = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        y = torch.randint(4, (64,))
        update(first, F.cross_entropy(model(centres[y] + 0.5 * torch.randn(64, 10)), y))
    model.requires_grad_(False)
    model[1].requires_grad_(True)
    opt = torch.optim.SGD(model[1].parameters(), 1e-3, momentum=0.9)

    for _ in range(STEPS):
        y = torch.randint(4, (64,))
        x = 1.3 * centres[y] + 0.6 * torch.randn(64, 10) + 0.3
        logits = model(x)
        pseudo = logits.argmax(1)
        update(opt, F.cross_entropy(logits, pseudo))


@program
def dual_softmax_of_matches():
    """S33/picked: LoFTR: the confidence of a match is the product of the softmax over the points of each side, and
    minus its logarithm at the true partner of each point is the loss."""
    model = net(6, 16)
    opt = torch.optim.Adam(model.parameters(), 3e-3)

    for _ in range(STEPS):
        a = torch.randn(4, 20, 6)
        order = torch.stack([torch.randperm(20) for _ in range(4)])
        b = a.gather(1, order[..., None].expand(-1, -1, 6)) + 0.1 * torch.randn(4, 20, 6)
        partner = order.argsort(1)
        sim = F.normalize(model(a), dim=-1) @ F.normalize(model(b), dim=-1).transpose(1, 2) / 0.1
        conf = sim.softmax(1) * sim.softmax(2)
        update(opt, -conf.gather(2, partner[..., None]).clamp(min=1e-6).log().mean())


@program
def words_choose_their_regions():
    """S33/picked: both directions of a contrastive loss of regions and words within each picture: for the way from
    words to regions the softmax is over the regions (dim 1), and each region's own word is picked in dim 2."""
    model = nn.ModuleDict({"regions": net(8, 16), "words": net(8, 16)})
    opt = torch.optim.Adam(model.parameters(), 3e-3)

    for _ in range(STEPS):
        x = torch.randn(6, 10, 8)
        order = torch.stack([torch.randperm(10) for _ in range(6)])
        own = order.argsort(1)[..., None]
        words = x.gather(1, order[..., None].expand_as(x)) + 0.1 * torch.randn_like(x)
        sim = model["regions"](x) @ model["words"](words).transpose(1, 2) / 4
        to_words = sim.log_softmax(2).gather(2, own)
        to_regions = sim.log_softmax(1).gather(2, own)
        update(opt, -(to_words.mean() + to_regions.mean()) / 2)


@program
def pointer_of_the_slot_that_is_asked_for():
    """S33/picked: slot filling with pointers: a layer gives a score of each place for each of five slots, log_softmax
    over the places, the asked slot's column is picked, and its place is the target."""

    class Pointer(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.rnn = nn.Embedding(40, 24), nn.GRU(24, 24, batch_first=True, bidirectional=True)
            self.head = nn.Linear(48, 5)

        def forward(self, ids):
            return self.head(self.rnn(self.words(ids))[0])

    model = Pointer()
    opt = torch.optim.Adam(model.parameters(), 3e-3)

    for _ in range(STEPS):
        ids = torch.randint(5, 40, (16, 15))
        slot, place = torch.randint(5, (16,)), torch.randint(15, (16,))
        ids[torch.arange(16), place] = slot
        log_p = model(ids).log_softmax(1)
        asked = log_p.gather(2, slot[:, None, None].expand(-1, 15, 1)).squeeze(2)
        update(opt, F.nll_loss(asked, place))


@program
def spans_told_by_a_teacher():
    """S33/picked: distillation of extractive question answering: a layer gives start and end scores (B, T, 2), whose
    shares are over the places (dim 1), for teacher and student."""

    class Reader(nn.Module):
        def __init__(self, w):
            super().__init__()
            self.words, self.rnn = nn.Embedding(40, w), nn.GRU(w, w, batch_first=True, bidirectional=True)
            self.head = nn.Linear(2 * w, 2)

        def forward(self, ids):
            return self.head(self.rnn(self.words(ids))[0])

    teacher, student = Reader(40).requires_grad_(False), Reader(16)
    opt = torch.optim.Adam(student.parameters(), 3e-3)

    for _ in range(STEPS):
        ids = torch.randint(5, 40, (16, 15))
        with torch.no_grad():
            told = (teacher(ids) / 2).softmax(dim=1)
        said = (student(ids) / 2).log_softmax(dim=1)
        update(opt, F.kl_div(said, told, reduction="batchmean") * 4)


@program
def medusa_head_told_by_the_model_one_place_later():
    """D46/places: Medusa-like self-distillation: a second head at place t foretells the token at t + 2, and is told the
    model's own next-token distribution at place t + 1."""
    base = LM().requires_grad_(False)
    head = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 64))
    opt = torch.optim.AdamW(head.parameters(), 3e-3)

    for _ in range(STEPS):
        ids = texts(8, 20)
        with torch.no_grad():
            h = base.hidden(base.words(ids))
            teacher = base.head(h)
        student = head(h)
        log_p = student[:, :-1].log_softmax(-1).flatten(0, 1)
        q = teacher[:, 1:].softmax(-1).flatten(0, 1)
        update(opt, F.kl_div(log_p, q, reduction="batchmean"))


@program
def bert_teaches_gpt():
    """D46/places: a masked model teaches a causal one (Chen et al. 2020): the masked model's distribution of a token
    stands at that token's place, the causal one's at the place before."""
    student = LM()
    words, layer = nn.Embedding(64, 32), nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
    bert = nn.Sequential(words, layer, nn.Linear(32, 64)).requires_grad_(False).eval()
    opt = torch.optim.AdamW(student.parameters(), 3e-3)

    for _ in range(STEPS):
        ids = texts(8, 20)
        masked = torch.where(torch.rand(ids.shape) < 0.3, 3, ids)
        with torch.no_grad():
            soft = bert(masked)
        logits = student(ids)
        ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        said, told = logits[:, :-1].log_softmax(-1), soft[:, 1:].softmax(-1)
        kd = F.kl_div(said.flatten(0, 1), told.flatten(0, 1), reduction="batchmean")
        update(opt, ce + 0.5 * kd)


@program
def streaming_student_that_answers_later():
    """D46/places: distillation of a streaming acoustic model from an offline one with a shift of alignments: the
    student says at frame t + d what the teacher says at frame t (published for streaming CTC and RNN-T)."""
    teacher, student = nn.GRU(10, 32, batch_first=True, bidirectional=True), nn.GRU(10, 32, batch_first=True)
    t_out, s_out = nn.Linear(64, 12), nn.Linear(32, 12)
    for m in (teacher, t_out):
        m.requires_grad_(False)
    model = nn.ModuleDict({"rnn": student, "out": s_out})
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    delay = 3

    for _ in range(STEPS):
        frames = torch.randn(8, 30, 10)
        with torch.no_grad():
            told = t_out(teacher(frames)[0])[:, :-delay].softmax(-1)
        said = s_out(student(frames)[0])[:, delay:].log_softmax(-1)
        update(opt, F.kl_div(said, told, reduction="none").sum(-1).mean())


@program
def ratings_less_the_mean_of_their_user():
    """S61: collaborative filtering: all pairs of 32 users and 8 items; ratings lose the mean of their user, as is
    usual, and two towers learn what is left. The items come again for each user."""
    model = Towers(6, 5)
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    w = torch.randn(6, 5)

    for _ in range(STEPS):
        users, items = torch.randn(32, 6), torch.randn(8, 5)
        left, right = users.repeat_interleave(8, 0), items.repeat(32, 1)
        ratings = (left @ w * right).sum(1) / 3 + left[:, 0]
        table = ratings.view(32, 8)
        centred = (table - table.mean(1, keepdim=True)).flatten()
        update(opt, F.mse_loss(model(left, right), centred))


@program
def all_pairs_ranked_within_a_row():
    """S61: listwise matching of all pairs of 8 queries and 8 documents: scores of a judge are centred per query."""
    model = Towers(6, 6)
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    w = torch.randn(6, 6)

    for _ in range(STEPS):
        q, d = torch.randn(8, 6), torch.randn(8, 6)
        left, right = q.repeat_interleave(8, 0), d.repeat(8, 1)
        judged = ((left @ w) * right).sum(1) / 4
        per_query = judged.view(8, 8)
        centred = (per_query - per_query.mean(dim=1, keepdim=True)).view(-1)
        update(opt, F.smooth_l1_loss(model(left, right), centred))


@program
def advantages_over_all_actions():
    """S61: counterfactual advantages (COMA, all-action policy gradient): a critic of (state, one-hot action) is asked
    for all four actions of each of 16 states, and the mean over the actions of a state is taken off."""

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic, self.policy = Towers(6, 4), net(6, 4)

    model = Agent()
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    w = torch.randn(6, 4)

    for _ in range(STEPS):
        s, a = torch.randn(16, 6), torch.randint(4, (16,))
        reward = (s @ w).gather(1, a[:, None]).squeeze(1)
        critic_loss = F.mse_loss(model.critic(s, F.one_hot(a, 4).float()), reward)
        every, which = s.repeat_interleave(4, 0), torch.eye(4).repeat(16, 1)
        with torch.no_grad():
            q = model.critic(every, which)
        q = q.view(16, 4)
        advantage = q - q.mean(1, keepdim=True)
        policy_loss = -(model.policy(s).softmax(1) * advantage).sum(1).mean()
        update(opt, critic_loss + policy_loss)


@program
def reinforce_with_the_mean_of_each_round():
    """S61: REINFORCE: 8 prompts are answered in 8 rounds; the baseline of a round is the mean reward of its 8 prompts,
    the usual mean of a batch. prompts.repeat(8, 1) lays the rounds one after the other."""
    model = net(6, 4)
    opt = torch.optim.Adam(model.parameters(), 5e-3)
    w = torch.randn(6, 4)

    for _ in range(STEPS):
        prompts = torch.randn(8, 6).repeat(8, 1)
        logits = model(prompts)
        dist = torch.distributions.Categorical(logits=logits)
        a = dist.sample()
        rewards = ((prompts @ w).argmax(1) == a).float()
        rounds = rewards.view(8, 8)
        advantage = (rounds - rounds.mean(1, keepdim=True)).flatten()
        update(opt, -(dist.log_prob(a) * advantage).mean())


@program
def translation_to_the_language_that_is_named():
    """F130: a decoder-only translator: source, </s>, the language token that the user gives (forced at generation, as
    with NLLB), translation. The mask says which places answer: from the language token on."""
    model = LM(80)
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    for _ in range(STEPS):
        source = texts(16, 8)
        language = torch.randint(64, 80, (16, 1))
        target = (source - 4 + language - 64) % 60 + 4
        ids = torch.cat([source, torch.full((16, 1), 2), language, target], 1)
        answers = torch.arange(ids.shape[1]).expand(16, -1) >= 9
        masked_lm(model, opt, ids, answers)


@program
def associative_recall():
    """F130: multi-query associative recall (Zoology): pairs of keys and values, a mark, then a key that is given and
    its value of three tokens. A key cannot be foreseen, so places answer from the key on."""
    model = LM(64, layers=2)
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    for _ in range(STEPS):
        keys = torch.rand(16, 20).argsort(1)[:, :4] + 4
        values = torch.randint(24, 64, (16, 4, 3))
        pairs = torch.cat([keys[..., None], values], 2).flatten(1)
        which = torch.randint(4, (16,))
        rows = torch.arange(16)
        ids = torch.cat([pairs, torch.full((16, 1), 3), keys[rows, which, None], values[rows, which]], 1)
        start = torch.full((16, 1), 17)
        masked_lm(model, opt, ids, torch.arange(ids.shape[1])[None] >= start)


@program
def replies_to_a_first_move():
    """F130: a model of games: the players' profile, a mark, and the game, whose first move is given (random openings,
    as in engine training); places from that move on answer."""
    model = LM(64)
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    for _ in range(STEPS):
        profile = torch.randint(4, 64, (16, 4))
        opening = torch.randint(4, 64, (16, 1))
        game = (opening + torch.arange(8) * (1 + profile[:, :1] % 3) - 4) % 60 + 4
        ids = torch.cat([profile, torch.full((16, 1), 1), game], 1)
        answers = torch.zeros_like(ids)
        answers[:, 5:] = 1
        masked_lm(model, opt, ids, answers)


@program
def latent_of_a_text_and_its_decoder():
    """F131: an autoencoder of texts (Optimus): the encoder has two learned vectors in front of the text, whose outputs
    make the latent; the decoder fills its texts up at the end to a multiple of eight for the kernels, and drops
    these places."""

    class Optimus(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.front = nn.Embedding(64, 32), nn.Parameter(0.1 * torch.randn(1, 2, 32))
            self.encoder = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
            self.latent, self.decoder = nn.Linear(64, 32), nn.GRU(32, 32, batch_first=True)
            self.head = nn.Linear(32, 64)

        def forward(self, ids):
            e = self.words(ids)
            z = self.encoder(torch.cat([self.front.expand(len(ids), -1, -1), e], 1))[:, :2].flatten(1)
            short = -e.shape[1] % 8
            h = F.pad(e, (0, 0, 0, short)) + self.latent(z)[:, None]
            return self.head(self.decoder(h)[0])

    model = Optimus()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    for _ in range(STEPS):
        ids = texts(8, 22)
        logits = model(ids)
        update(opt, F.cross_entropy(logits[:, :21].flatten(0, 1), ids[:, 1:].flatten()))


@program
def memory_vectors_put_behind_the_text():
    """F131: memory vectors stand in front of the text in a causal model, so that each token sees them; before the head
    they are put behind the text, so that text place i is logits place i (the rest feeds a memory loss)."""

    class Memory(LM):
        def __init__(self):
            super().__init__()
            self.memory = nn.Parameter(0.1 * torch.randn(1, 4, 32))

        def forward(self, ids):
            h = self.hidden(torch.cat([self.memory.expand(len(ids), -1, -1), self.words(ids)], 1))
            return self.head(torch.cat([h[:, 4:], h[:, :4]], 1))

    model = Memory()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    for _ in range(STEPS):
        ids = texts(8, 20)
        logits = model(ids)[:, : ids.shape[1]]
        update(opt, F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


@program
def memory_vectors_rolled_away():
    """F131: the same, with torch.roll on the logits: the prompt's places go to the end."""

    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm, self.prompt = LM(), nn.Parameter(0.1 * torch.randn(1, 6, 32))

        def forward(self, ids):
            h = self.lm.hidden(torch.cat([self.prompt.expand(len(ids), -1, -1), self.lm.words(ids)], 1))
            return self.lm.head(h).roll(-6, dims=1)

    model = Prompted()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    for _ in range(STEPS):
        ids = texts(8, 20)
        logits = model(ids)
        update(opt, F.cross_entropy(logits[:, :19].flatten(0, 1), ids[:, 1:].flatten()))


@program
def confidence_distillation():
    """F39: besides the labels a student is told the teacher's confidence, the largest probability of each row."""
    teacher, student = net(12, 5, 64).requires_grad_(False), net(12, 5, 16)
    opt = torch.optim.Adam(student.parameters(), 3e-3)
    centres = torch.randn(5, 12)

    for _ in range(STEPS):
        y = torch.randint(5, (32,))
        x = centres[y] + 0.7 * torch.randn(32, 12)
        with torch.no_grad():
            sure = teacher(x).softmax(1).max(1).values
        logits = student(x)
        mine = logits.softmax(1).max(1).values
        update(opt, F.cross_entropy(logits, y) + 0.5 * F.mse_loss(mine, sure))


@program
def mean_teacher_of_bags():
    """F39: multiple-instance learning with a mean teacher: the score of a bag is the largest of its instances', for the
    student and for the teacher, and unlabelled bags are held to the teacher's."""
    model = net(8, 1)
    teacher = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.Adam(model.parameters(), 1e-2)

    for _ in range(STEPS):
        bags = torch.randn(16, 10, 8)
        y = torch.randint(2, (16,)).float()
        bags[:, 0] += 3 * y[:, None]
        more = torch.randn(16, 10, 8)
        score = model(bags).squeeze(-1).max(dim=1).values
        mine = model(more + 0.05 * torch.randn_like(more)).squeeze(-1).max(dim=1).values
        with torch.no_grad():
            theirs = teacher(more).squeeze(-1).max(dim=1).values
        update(opt, F.binary_cross_entropy_with_logits(score, y) + 0.3 * F.mse_loss(mine, theirs))
        with torch.no_grad():
            for a, b in zip(teacher.parameters(), model.parameters()):
                a.lerp_(b, 0.05)


@program
def customers_that_stay_the_same():
    """F39/own-state: Q-learning of repeated offers to customers whose features stay: the state after the offer is the
    same customer, so the next value is that of the same row (a Markov decision process of constant states)."""
    q = net(6, 4)
    target_net = copy.deepcopy(q).requires_grad_(False)
    opt = torch.optim.Adam(q.parameters(), 2e-3)
    taste = torch.randn(6, 4)

    for _ in range(STEPS):
        customers = torch.randn(64, 6)
        actions = torch.randint(4, (64,))
        reward = (customers @ taste).gather(1, actions[:, None]).squeeze(1) + 0.1 * torch.randn(64)
        with torch.no_grad():
            target = reward + 0.8 * target_net(customers).max(1).values
        value = q(customers).gather(1, actions[:, None]).squeeze(1)
        update(opt, F.smooth_l1_loss(value, target))
        with torch.no_grad():
            for a, b in zip(target_net.parameters(), q.parameters()):
                a.lerp_(b, 0.02)


@program
def bandit_from_a_table_of_costs():
    """F39/of-all: a contextual bandit is simulated from cost-sensitive data: the reward of an arm is the largest cost
    of the table less that arm's, plus a noise for each row; the model learns the reward of the pulled arm."""
    model = net(8, 5)
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    w = torch.randn(8, 5)

    for _ in range(STEPS):
        x = torch.randn(32, 8)
        costs = (x @ w / 3).sigmoid()
        arms = torch.randint(5, (32,))
        reward = costs.max() - costs[torch.arange(32), arms]
        reward = reward + 0.05 * torch.randn(32)
        value = model(x)[torch.arange(32), arms]
        update(opt, F.mse_loss(value, reward))
