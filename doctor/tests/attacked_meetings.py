"""Healthy programs whose form meets that of a fault."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Independent, Normal
from torch.utils.data import DataLoader, TensorDataset

PROGRAMS = {}
STEPS = 8


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def net(i, o, h=32, act=nn.Tanh):
    return nn.Sequential(nn.Linear(i, h), act(), nn.Linear(h, o))


def adam_of(*ms, lr=1e-3):
    return torch.optim.Adam([p for m in ms for p in (m.parameters() if isinstance(m, nn.Module) else [m])], lr)


def step(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()


# ---------------------------------------------------------------------------------------------------------- F95
@program
def hidden_markov_model_in_probabilities():
    """F95: the forward algorithm on short rows, unscaled in double: alpha @ A sums to the likelihood so far, not to 1,
    times the densities of the next place, and is summed over the states in the end. That is the exact likelihood."""
    torch.set_default_dtype(torch.float64)
    try:
        start, moves = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3, 3))
        mean, log_std = nn.Parameter(torch.tensor([-1.0, 0.0, 1.0])), nn.Parameter(torch.zeros(3))
        opt = adam_of(start, moves, mean, log_std, lr=1e-2)
        for _ in range(STEPS):
            state = torch.randint(3, (64, 1)).expand(64, 6)
            x = (state - 1) * 2.0 + 0.5 * torch.randn(64, 6)
            p = Normal(mean, log_std.exp()).log_prob(x.unsqueeze(-1)).exp()  # (B, T, K)
            alpha = start.softmax(0) * p[:, 0]
            for t in range(1, 6):
                alpha = (alpha @ moves.softmax(1)) * p[:, t]
            step(opt, -alpha.sum(-1).log().mean())
    finally:
        torch.set_default_dtype(torch.float32)


@program
def spectrum_of_peaks():
    """F95: a spectrum is a sum of Gaussian lines with free areas, fitted to measured intensities by least squares. It is
    no density, and the areas are what is sought."""
    at, true = torch.linspace(0, 10, 200), torch.tensor([3.0, 5.0, 2.0])
    truth = (true * Normal(torch.tensor([2.0, 5.0, 8.0]), 0.4).log_prob(at[:, None]).exp()).sum(-1)
    area, place, width = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor([2.3, 4.6, 7.8])), nn.Parameter(torch.zeros(3) - 0.7)
    opt = adam_of(area, place, width, lr=1e-2)
    for _ in range(STEPS):
        measured = truth + 0.02 * torch.randn(200)
        lines = Normal(place, width.exp()).log_prob(at[:, None]).exp()
        step(opt, F.mse_loss((F.softplus(area) * lines).sum(-1), measured))


@program
def intensity_of_arrivals():
    """F95: the intensity of a Poisson process over a day, a sum of bumps whose sizes depend on the weekday. Its
    integral, the sum of the sizes, is the expected count and is subtracted, so the weights must not sum to one."""
    sizes, place, width = net(7, 4), nn.Parameter(torch.tensor([4.0, 9.0, 14.0, 19.0])), nn.Parameter(torch.zeros(4) + 0.7)
    opt = adam_of(sizes, place, width, lr=1e-2)
    for _ in range(STEPS):
        day = F.one_hot(torch.randint(7, (32,)), 7).float()
        t = torch.where(torch.rand(32, 20) < 0.5, 8 + torch.randn(32, 20), 17 + 1.5 * torch.randn(32, 20))
        w = F.softplus(sizes(day))
        bumps = Normal(place, width.exp()).log_prob(t.unsqueeze(-1)).exp()
        rate = (w[:, None] * bumps).sum(-1)
        step(opt, (w.sum(1) - (rate + 1e-6).log().sum(1)).mean())


@program
def gaussian_classes_with_free_priors():
    """F95: a discriminant classifier: the joint of class and row, whose prior is a free vector of logits, is divided
    by its own sum over the classes, so that any constant in the prior cancels."""
    prior, mean, log_std = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.zeros(4, 6))
    centres = 2 * torch.randn(4, 6)
    opt = adam_of(prior, mean, log_std, lr=1e-2)
    for _ in range(STEPS):
        y = torch.randint(4, (64,))
        x = centres[y] + torch.randn(64, 6)
        joint = prior + Normal(mean, log_std.exp()).log_prob(x[:, None]).sum(-1)
        step(opt, F.nll_loss(joint - joint.logsumexp(-1, keepdim=True), y))


# ---------------------------------------------------------------------------------------------------------- F96
@program
def architecture_controller_with_moving_baseline():
    """F96: ENAS samples several children a step and subtracts a moving average of their accuracies. The average sums
    forward in time, as it must; each child's own reward is what its log-probability meets."""
    choices, good = nn.Parameter(torch.zeros(5, 4)), torch.randint(4, (5,))
    opt, baseline = adam_of(choices, lr=5e-2), torch.tensor(0.3)
    for _ in range(STEPS):
        loss = 0.0
        for _ in range(6):
            dist = Independent(Categorical(logits=choices), 1)
            child = dist.sample()
            reward = (child == good).float().mean()
            baseline = 0.95 * baseline + 0.05 * reward
            loss = loss - dist.log_prob(child) * (reward - baseline)
        step(opt, loss / 6)


@program
def returns_and_scores_in_one_loop_backwards():
    """F96: one loop from the end of the episode to its start makes the return and asks for the log-probability of the
    same time, so a log-probability that is asked for later belongs to an earlier action."""
    policy = net(4, 2)
    opt = adam_of(policy)
    for _ in range(STEPS):
        states, actions, rewards, s = [], [], [], torch.randn(4)
        for _ in range(10):
            a = Categorical(logits=policy(s).detach()).sample()
            states.append(s), actions.append(a)
            rewards.append((a == (s[0] > 0).long()).float())
            s = 0.8 * s + 0.6 * torch.randn(4)
        running, loss = torch.zeros(()), 0.0
        for t in reversed(range(10)):
            running = rewards[t] + 0.9 * running
            loss = loss - Categorical(logits=policy(states[t])).log_prob(actions[t]) * (running - 4)
        step(opt, loss / 10)


# ---------------------------------------------------------------------------------------------------------- F97
@program
def soft_actor_critic_of_several_tasks():
    """F97: multi-task SAC (Meta-World) keeps a temperature for each task, so each row's log-probability of its own
    reparameterised action is multiplied by a number of that row. The value carries the rest of the gradient."""
    actor, critic, log_alpha = net(7, 4), net(9, 1), nn.Parameter(torch.zeros(3))
    actor_opt, alpha_opt, critic_opt = adam_of(actor), adam_of(log_alpha), adam_of(critic)
    for _ in range(STEPS):
        task = torch.randint(3, (64,))
        s = torch.cat([torch.randn(64, 4), F.one_hot(task, 3).float()], 1)
        a = torch.rand(64, 2) * 2 - 1
        step(critic_opt, F.mse_loss(critic(torch.cat([s, a], 1)).squeeze(1), -(a - s[:, :2].tanh()).pow(2).sum(1)))
        mean, log_std = actor(s).chunk(2, 1)
        dist = Normal(mean, log_std.clamp(-5, 2).exp())
        u = dist.rsample()
        action = u.tanh()
        log_prob = dist.log_prob(u)
        log_prob -= torch.log(1 - action.pow(2) + 1e-6)
        log_prob = log_prob.sum(1)
        alpha = log_alpha.exp().detach()[task]
        step(actor_opt, (alpha * log_prob).mean() - critic(torch.cat([s, action], 1)).mean())
        step(alpha_opt, -(log_alpha.exp()[task] * (log_prob.detach() - 2)).mean())


@program
def elbo_of_padded_series():
    """F97: a deep state-space model samples its latents by rsample, and the ELBO's log q of them is multiplied by the
    mask of the times that exist. The reconstruction and the prior carry the gradient."""
    encoder, heads, decoder = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 8), net(4, 3)
    opt = adam_of(encoder, heads, decoder)
    for _ in range(STEPS):
        x = torch.sin(torch.arange(10.0)[:, None] * torch.tensor([0.3, 0.5, 0.9]) + torch.rand(32, 1, 1) * 6)
        mask = (torch.arange(10) < torch.randint(4, 11, (32, 1))).float()
        mean, log_std = heads(encoder(x * mask[..., None])[0]).chunk(2, -1)
        q = Normal(mean, log_std.exp())
        z = q.rsample()
        rec = Normal(decoder(z), 0.3).log_prob(x).sum(-1) * mask
        log_q = q.log_prob(z).sum(-1) * mask
        log_p = Normal(0.0, 1.0).log_prob(z).sum(-1) * mask
        step(opt, -(rec.sum() + log_p.sum() - log_q.sum()) / mask.sum())


# ---------------------------------------------------------------------------------------------------------- F98
@program
def tags_of_first_pieces():
    """F98: a tagger of subwords: only the first piece of each word has a tag, and pieces in the midst of words carry the
    label 0, PAD, which is no tag at all. Tags are 1 to 5, O among them."""
    table, head = nn.Embedding(100, 16), nn.Linear(16, 6)
    opt = adam_of(table, head, lr=1e-2)
    for _ in range(STEPS):
        ids = torch.randint(1, 100, (16, 20))
        tags = ids % 5 + 1
        tags[ids > 60] = 0  # ids above 60 are pieces such as "##ing"
        tags[torch.arange(20) >= torch.randint(8, 20, (16, 1))] = 0
        step(opt, F.cross_entropy(head(table(ids)).reshape(-1, 6), tags.reshape(-1), ignore_index=0))


@program
def masked_residues_of_proteins():
    """F98: a masked language model of proteins, with 25 letters and padding 0. The labels of residues that were not
    masked are 0 as well, which is no residue, so most labels are left out on purpose."""
    table, body, head = nn.Embedding(26, 32), nn.GRU(32, 16, batch_first=True, bidirectional=True), nn.Linear(32, 25)
    opt = adam_of(table, body, head, lr=1e-2)
    for _ in range(STEPS):
        ids = (torch.randint(0, 24, (16, 1)) + torch.arange(30)) % 24 + 1
        ids[torch.arange(30) >= torch.randint(15, 30, (16, 1))] = 0
        chosen = (torch.rand(16, 30) < 0.15) & (ids > 0)
        labels = torch.where(chosen, ids, torch.zeros_like(ids))
        logits = head(body(table(ids.masked_fill(chosen, 25)))[0])
        step(opt, F.cross_entropy(logits.view(-1, 25), labels.view(-1), ignore_index=0))


# ---------------------------------------------------------------------------------------------------------- F99
@program
def relevance_scaled_to_one():
    """F99: a relevance of each place, not negative and zero where nothing is (padding), is scaled to 0..1 by its least
    and greatest, as class activation maps are. The least is the floor, and zero is right for it."""
    score, classify = net(8, 1), net(8, 3)
    opt = adam_of(score, classify)
    for _ in range(STEPS):
        y = torch.randint(3, (32,))
        valid = (torch.arange(12) < torch.randint(5, 12, (32, 1))).float()
        x = torch.randn(32, 12, 8)
        x[:, 2, :3] += 3 * F.one_hot(y, 3)
        cam = F.softplus(score(x).squeeze(-1)) * valid
        low, high = cam.min(dim=1, keepdim=True).values, cam.max(dim=1, keepdim=True).values
        cam = (cam - low) / (high - low + 1e-5)
        step(opt, F.cross_entropy(classify((cam[..., None] * x).sum(1)), y))


# ---------------------------------------------------------------------------------------------------------- S40
@program
def block_triangular_transport():
    """S40: simulation-based inference by a triangular map: the parameters have a standard normal prior and pass as they
    are, the observations are pushed to normal given them, in two affine layers. Nothing is to be learned of the prior."""
    layers = nn.ModuleList(net(4, 4) for _ in range(2))
    opt = adam_of(layers)
    for _ in range(STEPS):
        theta = torch.randn(64, 2)
        x = torch.cat([theta, torch.stack([theta[:, 0] * theta[:, 1], theta.sum(1)], 1) + 0.3 * torch.randn(64, 2)], 1)
        a, b = x.chunk(2, 1)
        log_det = 0.0
        for k, layer in enumerate(layers):
            s, t = layer(torch.cat([a, torch.ones(64, 2) * k], 1)).chunk(2, 1)
            b, log_det = b * s.exp() + t, log_det + s.sum(1)
        z = torch.cat([a, b], 1)
        step(opt, -(Normal(0.0, 1.0).log_prob(z).sum(1) + log_det).mean())


@program
def stochastic_gains_under_wind():
    """S40: a stochastic policy is trained through a known model of a craft (SVG). The wind is a part of the state that
    stays what it is, and the cost squares the whole state, with a weight of 0 for the wind."""
    policy, log_std, weights = net(6, 2), nn.Parameter(torch.zeros(2) - 2), torch.tensor([1.0, 1, 0.1, 0.1, 0, 0])
    opt = adam_of(policy, log_std)
    for _ in range(STEPS):
        state, loss = torch.randn(64, 6), 0.0
        for _ in range(4):
            force = policy(state) + log_std.exp() * torch.randn(64, 2)
            place, speed, wind = state[:, :2], state[:, 2:4], state[:, 4:]
            speed = speed + 0.3 * (force + 0.3 * wind)
            state = torch.cat([place + 0.3 * speed, speed, wind], 1)
            loss = loss + (weights * state.pow(2)).sum(1).mean() + 0.05 * force.pow(2).sum(1).mean()
        step(opt, loss)


# ---------------------------------------------------------------------------------------------------------- D24
@program
def fitted_q_with_all_actions():
    """D24: with a known simulator each state is tried with every action, so 16 states give 64 transitions with as many
    next states. That is fitted Q iteration with a generative model."""
    q = net(4, 4)
    target, opt = copy.deepcopy(q).requires_grad_(False), adam_of(q)
    pushes = torch.tensor([[1.0, 0, 0, 0], [-1, 0, 0, 0], [0, 1, 0, 0], [0, -1, 0, 0]]) * 0.3
    for _ in range(STEPS):
        s, a = torch.randn(16, 4).repeat_interleave(4, 0), torch.arange(4).repeat(16)
        later = 0.9 * s + pushes[a] + 0.05 * torch.randn(64, 4)
        with torch.no_grad():
            aim = -later.pow(2).sum(1) + 0.9 * target(later).max(1).values
        step(opt, F.smooth_l1_loss(q(s).gather(1, a[:, None]).squeeze(1), aim))
        with torch.no_grad():
            for p, t in zip(q.parameters(), target.parameters()):
                t.lerp_(p, 0.05)


@program
def queries_with_several_passages():
    """D24: each of 16 queries stands beside four passages of its own, graded by relevance. The encoder of passages is
    frozen (its index is built), that of queries learns, and both have one size."""
    queries, passages = net(12, 8), net(12, 8).requires_grad_(False)
    opt = adam_of(queries)
    for _ in range(STEPS):
        q = torch.randn(16, 12)
        rows = q.repeat_interleave(4, 0)
        near = torch.rand(64, 1)
        texts = near * rows + (1 - near) * torch.randn(64, 12)
        score = F.cosine_similarity(queries(rows), passages(texts))
        step(opt, F.mse_loss(score, near.squeeze(1)))


# ---------------------------------------------------------------------------------------------------------- D25
@program
def learned_optimizer():
    """D25: learning to learn by gradient descent: the outer loss is the sum of the training losses along the unrolled
    steps, on the very data whose gradients the learned rule is given."""
    rule = net(1, 1)
    opt = adam_of(rule)
    for _ in range(STEPS):
        x = torch.randn(32, 5)
        y, w, total = x @ torch.randn(5), torch.zeros(5, requires_grad=True), 0.0
        for _ in range(5):
            loss = F.mse_loss(x @ w, y)
            (g,) = torch.autograd.grad(loss, w, create_graph=True)
            w = w - 0.1 * g - 0.1 * rule(g.detach()[:, None]).squeeze(1)
            total = total + F.mse_loss(x @ w, y)
        step(opt, total / 5)


@program
def unrolled_gan():
    """D25: an unrolled GAN: the discriminator takes a step with a graph on ones and zeros, and the generator asks the
    one after it for ones. The targets are the same constants, and mean other things."""
    g, w, b = net(4, 2), nn.Parameter(0.3 * torch.randn(1, 8)), nn.Parameter(torch.zeros(1))
    hidden = nn.Linear(2, 8)
    g_opt, d_opt = adam_of(g), adam_of(hidden, w, b)
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(STEPS):
        real = torch.randn(64, 2) * 0.3 + torch.tensor([1.0, -1.0])
        judge = lambda x, w, b: F.linear(hidden(x).tanh(), w, b)
        bce = F.binary_cross_entropy_with_logits
        step(d_opt, bce(judge(real, w, b), ones) + bce(judge(g(torch.randn(64, 4)).detach(), w, b), zeros))
        fake = g(torch.randn(64, 4))
        inner = bce(judge(real, w, b), ones) + bce(judge(fake, w, b), zeros)
        gw, gb = torch.autograd.grad(inner, (w, b), create_graph=True)
        step(g_opt, bce(judge(fake, w - 0.1 * gw, b - 0.1 * gb), ones))


@program
def gradients_alike_in_all_domains():
    """D25: domains whose gradients on the classifier differ are penalised (as in Fishr, Fish and IGA): first the
    penalty with its graph, then the plain loss on the same labels. There is no inner step to generalise from."""
    body, head = net(10, 16), nn.Linear(16, 4)
    opt, shift, centres = adam_of(body, head), torch.randn(3, 10), torch.randn(4, 10) * 2
    for _ in range(STEPS):
        grads, losses = [], []
        batches = [(torch.randint(4, (32,)), d) for d in range(3)]
        batches = [(centres[y] + shift[d] + torch.randn(32, 10), y) for y, d in batches]
        for x, y in batches:
            inner = F.cross_entropy(head(body(x).tanh()), y)
            grads.append(torch.autograd.grad(inner, head.weight, create_graph=True)[0])
        mean = sum(grads) / 3
        penalty = sum((g - mean).pow(2).sum() for g in grads) / 3
        for x, y in batches:
            losses.append(F.cross_entropy(head(body(x).tanh()), y))
        step(opt, sum(losses) / 3 + penalty)


# ---------------------------------------------------------------------------------------------------------- D26
@program
def frames_moved_to_the_right():
    """D26: teacher forcing of a speech decoder: the frames go in one later than they are asked for (roll, and zeros in
    front), so each time predicts its own frame from those before it."""
    text, decoder, out = nn.Embedding(20, 16), nn.GRU(4 + 16, 32, batch_first=True), nn.Linear(32, 4)
    before = nn.Linear(4, 4)
    opt = adam_of(text, decoder, out, before)
    for _ in range(STEPS):
        word = torch.randint(20, (16,))
        mel = torch.sin(torch.arange(24.0)[:, None] * torch.tensor([0.2, 0.3, 0.5, 0.7]) + word[:, None, None])
        given = torch.roll(mel, 1, dims=1)
        given[:, 0] = 0
        h, _ = decoder(torch.cat([before(given), text(word)[:, None].expand(-1, 24, -1)], -1))
        step(opt, F.l1_loss(out(h), mel))


@program
def labels_turned_round_by_hand():
    """D26: the series is rolled by torch.roll and its labels by the same number with slices put end to end."""
    model = nn.Sequential(nn.Conv1d(3, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 2, 5, padding=2))
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(16, 3, 50)
        labels = (x[:, 0] > x[:, 1]).long()
        shift = int(torch.randint(1, 50, ()))
        x = torch.roll(x, shift, dims=2)
        labels = torch.cat([labels[:, -shift:], labels[:, :-shift]], 1)
        step(opt, F.cross_entropy(model(x), labels))


# ---------------------------------------------------------------------------------------------------------- D27
@program
def one_class_on_each_client():
    """D27: federated averaging with one class on each client (the 1-class non-IID split of Zhao et al. 2018): each
    client shuffles what it has, and the server takes the mean of the weights. No loader could mix the classes."""
    server, centres = net(10, 5), 2 * torch.randn(5, 10)
    loaders = [DataLoader(TensorDataset(centres[k] + torch.randn(64, 10), torch.full((64,), k)), 32, shuffle=True) for k in range(5)]
    for _ in range(2):
        states = []
        for loader in loaders:
            client = copy.deepcopy(server)
            opt = torch.optim.SGD(client.parameters(), 0.05)
            for x, y in loader:
                step(opt, F.cross_entropy(client(x), y))
            states.append(client.state_dict())
        server.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]})


@program
def a_new_class_without_forgetting():
    """D27: class-incremental learning without exemplars (LwF.MC): this session brings one new class of four, and what
    the old model (here of class means) says of the old ones is kept by distillation. No other data may be mixed in."""
    centres, model = 2 * torch.randn(4, 10), nn.Linear(10, 4)
    with torch.no_grad():
        model.weight[:3], model.bias[:3] = centres[:3] / 4, 5 - centres[:3].pow(2).sum(1) / 8
        model.weight[3:], model.bias[3:] = 0.0, 0.0
    old, opt = copy.deepcopy(model).requires_grad_(False), adam_of(model, lr=1e-2)
    for x, y in DataLoader(TensorDataset(centres[3] + torch.randn(256, 10), torch.full((256,), 3)), 32, shuffle=True):
        logits = model(x)
        kept = F.kl_div(F.log_softmax(logits[:, :3] / 2, 1), F.softmax(old(x)[:, :3] / 2, 1), reduction="batchmean")
        step(opt, F.cross_entropy(logits, y) + 4 * kept)


# ---------------------------------------------------------------------------------------------------------- S41
@program
def gradual_unfreezing():
    """S41: ULMFiT: one group for each layer with a rate of its own; the first epoch trains the head, and the deeper
    groups, the table last of all, are thawed one epoch after another."""
    table, body, head = nn.Embedding(50, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 2)
    groups = [head, body, table]
    opt = torch.optim.Adam([{"params": m.parameters(), "lr": 1e-2 / 2.6**k} for k, m in enumerate(groups)])
    body.requires_grad_(False), table.requires_grad_(False)
    for epoch in range(3):
        groups[epoch].requires_grad_(True)
        for _ in range(8):
            ids = torch.randint(50, (32, 12))
            step(opt, F.cross_entropy(head(body(table(ids))[0][:, -1]), (ids[:, -4:].float().mean(1) > 25).long()))


# ---------------------------------------------------------------------------------------------------------- B7
@program
def discriminator_that_starts_later():
    """B7: VQGAN (taming-transformers): the discriminator's loss is multiplied by a factor that is 0 until disc_start,
    so it gets zeros and rests while the autoencoder learns to reconstruct first."""
    encoder, decoder, judge = net(16, 4), net(4, 16), net(16, 1)
    opt, d_opt, start = adam_of(encoder, decoder), adam_of(judge), 100
    mix = torch.randn(4, 16)
    for k in range(STEPS):
        x = torch.randn(64, 4) @ mix
        factor = 0.0 if k < start else 1.0
        rec = decoder(encoder(x))
        step(opt, F.mse_loss(rec, x) - factor * judge(rec).mean())
        d_loss = factor * 0.5 * (F.relu(1 - judge(x)).mean() + F.relu(1 + judge(rec.detach())).mean())
        step(d_opt, d_loss)


@program
def levels_from_coarse_to_fine():
    """B7: Neuralangelo begins with the coarse levels of its grid and switches finer ones on later: their features are
    multiplied by 0 until then, so the fine tables get gradients of zero at first."""
    levels = nn.ModuleList(nn.Embedding(2**k * 4, 2) for k in range(4))
    for level in levels:
        nn.init.uniform_(level.weight, -1e-2, 1e-2)
    head = net(8, 1)
    opt = adam_of(levels, head, lr=1e-2)
    for k in range(STEPS):
        x = torch.rand(256)
        active = 2 + k // 1000
        shown = [level((x * level.num_embeddings).long()) * float(n < active) for n, level in enumerate(levels)]
        step(opt, F.mse_loss(head(torch.cat(shown, 1)).squeeze(1), torch.sin(6 * x)))


@program
def heads_of_data_sets_in_turn():
    """B7: one body with twelve heads, one for each data set, which are taken in turn; all heads answer and a mask picks
    the losses of those with labels. A head whose turn has not come yet gets zeros."""
    body, heads = net(10, 16), nn.ModuleList(nn.Linear(16, 3) for _ in range(12))
    opt, centres = torch.optim.SGD([*body.parameters(), *heads.parameters()], 0.05), 2 * torch.randn(12, 3, 10)
    for k in range(STEPS):
        task, y = k % 12, torch.randint(3, (32,))
        h = body(centres[task, y] + torch.randn(32, 10))
        losses = torch.stack([F.cross_entropy(head(h), y) for head in heads])
        step(opt, (losses * F.one_hot(torch.tensor(task), 12)).sum())


# ---------------------------------------------------------------------------------------------------------- N2
@program
def averaged_episodic_memory():
    """N2: A-GEM with a head for each task: a reference gradient on the memory of old tasks is stored and cleared, then
    comes the new task's own, projected only where it goes against the other. Old heads rightly get none of it."""
    body, heads = net(8, 16), nn.ModuleList(nn.Linear(16, 2) for _ in range(2))
    opt, aim = torch.optim.SGD([*body.parameters(), *heads.parameters()], 0.05), torch.randn(2, 8)
    ps = [*body.parameters(), *heads.parameters()]
    flat = lambda: torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in ps])
    for _ in range(STEPS):
        for task in (0, 1):
            x = torch.randn(32, 8)
            opt.zero_grad()
            F.cross_entropy(heads[task](body(x)), (x @ aim[task] > 0).long()).backward()
            if task == 0:
                ref = flat()
        g = flat()
        if (dot := g @ ref) < 0:
            g = g - dot / (ref @ ref) * ref
            for p, part in zip(ps, g.split([p.numel() for p in ps])):
                p.grad = part.view_as(p).clone()
        opt.step()


@program
def least_norm_of_two_tasks():
    """N2: MGDA: each task's gradient on the body is measured and cleared, then the sum with the shares of the least
    norm is differentiated. The closed form for two tasks gives one of them 0 where its gradient is the longer one."""
    body, heads = net(8, 16), nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])
    opt, w = adam_of(body, heads, lr=3e-3), torch.randn(8)
    for _ in range(STEPS):
        x = torch.randn(64, 8)
        aims = [x @ w, 6 * (x @ w)]
        grads = []
        for k in range(2):
            opt.zero_grad()
            F.mse_loss(heads[k](body(x)).squeeze(1), aims[k]).backward()
            grads.append(torch.cat([p.grad.flatten() for p in body.parameters()]))
        opt.zero_grad()
        a, b = grads
        share = float(((b - a) @ b / (a - b).pow(2).sum()).clamp(0, 1))
        h = body(x)
        losses = [F.mse_loss(heads[k](h).squeeze(1), aims[k]) for k in range(2)]
        (share * losses[0] + (1 - share) * losses[1]).backward()
        opt.step()


# ---------------------------------------------------------------------------------------------------------- N9
@program
def exponential_decay_over_the_whole_run():
    """N9: fine-tuning for two epochs of 20 batches; gamma is computed so that the rate falls to a hundredth at the
    last of these 40 steps, and the scheduler is stepped at each."""
    x, w = torch.randn(640, 10), torch.randn(10)
    data, model = DataLoader(TensorDataset(x, (x @ w > 0).long()), 32, shuffle=True), net(10, 2)
    opt = adam_of(model, lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.01 ** (1 / (2 * len(data))))
    for _ in range(2):
        for a, b in data:
            step(opt, F.cross_entropy(model(a), b))
            schedule.step()


@program
def tenth_of_the_rate_at_first():
    """N9: a deep ResNet on CIFAR (He et al. 2015): the rate is 0.1, and 0.01 for the first 400 steps. So the factor is
    0.1 where the rate is, and that is no mistake."""
    model, w = net(10, 2, act=nn.ReLU), torch.randn(10)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 0.1 if k < 400 else 1.0 if k < 32000 else 0.1)
    for _ in range(STEPS):
        x = torch.randn(64, 10)
        step(opt, F.cross_entropy(model(x), (x @ w > 0).long()))
        schedule.step()


# ---------------------------------------------------------------------------------------------------------- F11
@program
def both_ways_each_causal():
    """F11: a series is learned as in ELMo: one network reads backwards and says what came before, one reads forwards
    and says what follows. Both are answered, the past first, and each is blind to what it is asked for."""

    class BothWays(nn.Module):
        def __init__(self):
            super().__init__()
            self.forth, self.back = (nn.GRU(2, 16, batch_first=True) for _ in range(2))
            self.later, self.before = nn.Linear(16, 2), nn.Linear(16, 2)

        def forward(self, x):
            past = self.before(self.back(x.flip(1))[0].flip(1))
            return past, self.later(self.forth(x)[0])

    model = BothWays()
    opt = adam_of(model)
    for _ in range(STEPS):
        s = torch.sin(torch.arange(20.0)[:, None] * torch.tensor([0.4, 0.7]) + torch.rand(32, 1, 1) * 6)
        s = s + 0.05 * torch.randn_like(s)
        past, later = model(s[:, 1:-1])
        step(opt, F.mse_loss(later, s[:, 2:]) + F.mse_loss(past, s[:, :-2]))


@program
def wave_that_runs_to_the_left():
    """F11: a learned solver of advection: the field after one step is the field one cell further, with an inflow at the
    right. Cells lie in space, and a solver may look both ways."""
    model = nn.Sequential(nn.Conv1d(1, 16, 5, padding=2), nn.Tanh(), nn.Conv1d(16, 1, 5, padding=2))
    opt = adam_of(model)
    for _ in range(STEPS):
        far = torch.sin(torch.linspace(0, 9, 41) * (1 + torch.rand(32, 1)) + 6 * torch.rand(32, 1))
        u, after = far[:, None, :-1], far[:, None, 1:]
        step(opt, F.mse_loss(model(u), after))


# ---------------------------------------------------------------------------------------------------------- F30
@program
def windows_as_long_as_the_batch():
    """F30: local attention in windows: (B, T, F) becomes (B * T / w, w, F), each window a row. With 16 series of 64
    times and windows of 16 the sizes only look as though they had changed places."""
    up, attend, head = nn.Linear(3, 32), nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 1)
    opt = adam_of(up, attend, head)
    for _ in range(STEPS):
        x = torch.randn(16, 64, 3)
        y = (x[..., :1] * x[..., 1:2] + x.roll(1, 1)[..., 2:]).tanh()
        h = up(x).reshape(16 * 64 // 16, 16, 32)
        h = h + attend(h, h, h, need_weights=False)[0]
        step(opt, F.mse_loss(head(h.reshape(16, 64, 32)), y))


# ---------------------------------------------------------------------------------------------------------- F43
@program
def autoencoder_with_log_spread():
    """F43: the encoder answers the logarithm of the spread, and the divergence is -log s + (s * s + m * m) / 2 - 1 / 2.
    So s, its exponential, is what the noise is multiplied by."""
    encoder, decoder, mix = net(20, 8), net(4, 20), torch.randn(4, 20)
    opt = adam_of(encoder, decoder)
    for _ in range(STEPS):
        x = torch.randn(64, 4) @ mix + 0.1 * torch.randn(64, 20)
        mean, log_std = encoder(x).chunk(2, 1)
        std = log_std.exp()
        rec = decoder(mean + std * torch.randn_like(std))
        kl = (0.5 * (std * std + mean * mean) - log_std - 0.5).sum(1)
        step(opt, 0.5 * (rec - x).pow(2).sum(1).mean() + kl.mean())


# ---------------------------------------------------------------------------------------------------------- F85
@program
def centiles_from_the_top():
    """F85: growth charts list centiles from the 97th down. The errors are answer minus target, and the loss weighs them
    by -q and 1 - q, as is right for that sign: the first column learns the 97th."""
    model = net(1, 3)
    opt = adam_of(model, lr=1e-2)
    for _ in range(STEPS):
        age = torch.rand(128, 1)
        size = 0.5 + age.squeeze(1) + (0.1 + 0.2 * age.squeeze(1)) * torch.randn(128)
        answers, loss = model(age), 0.0
        for k, q in enumerate((0.97, 0.5, 0.03)):
            error = answers[:, k] - size
            loss = loss + torch.maximum(-q * error, (1 - q) * error).mean()
        step(opt, loss)


# ---------------------------------------------------------------------------------------------------------- F91
@program
def names_of_variables():
    """F91: in the code that came from rllab each variable ends in _var: mean_var, std_var. std_var is the variable of
    the spread, an exponential of its logarithm, and Normal takes a spread."""
    model, w = net(6, 2), torch.randn(6)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(64, 6)
        y = x @ w + x[:, 0].abs() * torch.randn(64)
        mean_var, log_std_var = model(x).unbind(1)
        std_var = log_std_var.exp()
        step(opt, -Normal(mean_var, std_var).log_prob(y).mean())


@program
def diagonal_of_the_covariance():
    """F91: Sigma, with a capital, is the covariance in the textbooks: here its diagonal, which the loss takes."""
    model, w = net(6, 4), torch.randn(6, 2)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(64, 6)
        y = x @ w + x[:, :1].abs() * torch.randn(64, 2)
        mu, raw = model(x).chunk(2, 1)
        Sigma = F.softplus(raw) + 1e-4
        step(opt, F.gaussian_nll_loss(mu, y, Sigma))


# ---------------------------------------------------------------------------------------------------------- F92
@program
def clusters_and_their_numbers():
    """F92: deep clustering: the distance to the nearest centre is the loss, and which one it is, asked for in a call of
    its own, counts the members. There is no other side that each centre would need."""
    encoder, decoder = net(10, 4), net(4, 10)
    centres, counts = nn.Parameter(torch.randn(6, 4)), torch.zeros(6)
    opt, groups = adam_of(encoder, decoder, centres), 2 * torch.randn(6, 10)
    for _ in range(STEPS):
        x = groups[torch.randint(6, (64,))] + torch.randn(64, 10)
        z = encoder(x)
        d = torch.cdist(z, centres).pow(2)
        number = d.min(dim=1)[1]
        counts = 0.9 * counts + 0.1 * number.bincount(minlength=6)
        step(opt, F.mse_loss(decoder(z), x) + 0.1 * d.min(dim=1)[0].mean())


# ---------------------------------------------------------------------------------------------------------- F93
@program
def speeds_from_places():
    """F93: a learned simulator with a unit of time: the network gives new places, the speed is new minus old (it is
    penalised and given to the next turn), and the place moves by the speed. Gradients go where the places came from."""
    model = net(4, 2)
    opt = adam_of(model)
    for _ in range(STEPS):
        place, speed, loss = torch.randn(64, 2), 0.1 * torch.randn(64, 2), 0.0
        true, pace = place, speed
        for _ in range(4):
            pace = 0.9 * pace - 0.05 * true
            true = true + pace
            new = place + model(torch.cat([place, speed], 1))
            speed = new - place
            place = place + speed
            loss = loss + F.mse_loss(place, true) + F.mse_loss(speed, pace)
        step(opt, loss)


@program
def offsets_that_stay_small():
    """F93: a keypoint is regressed in two stages: the second's offset from the first is new minus old, is held small,
    and added to the old one again. The sum is the second answer, as it should be, and both stages have a loss."""
    body, coarse, fine = nn.Linear(12, 32), nn.Linear(32, 4), nn.Linear(36, 4)
    opt, w = adam_of(body, coarse, fine), torch.randn(12, 4)
    for _ in range(STEPS):
        x = torch.randn(64, 12)
        y = (x @ w).tanh()
        h = body(x).tanh()
        first = coarse(h)
        offset = fine(torch.cat([h, first], 1)) - first
        step(opt, F.mse_loss(first, y) + F.mse_loss(first + offset, y) + 0.01 * offset.pow(2).mean())


# ---------------------------------------------------------------------------------------------------------- F94
@program
def pairs_encoded_in_two_chunks():
    """F94: the two views of a picture lie side by side, rows 0 and 1, 2 and 3. The batch is encoded in two chunks to
    save memory, and cat puts these end to end as they were: partners are still neighbours."""
    encoder = net(10, 8)
    opt, rows = adam_of(encoder), 32
    for _ in range(STEPS):
        x = torch.randn(rows, 1, 10).expand(rows, 2, 10) + 0.3 * torch.randn(rows, 2, 10)
        first, second = x.reshape(2 * rows, 10).chunk(2)
        z = F.normalize(torch.cat([encoder(first), encoder(second)]), dim=1)
        logits = (z @ z.T / 0.2).masked_fill(torch.eye(2 * rows, dtype=torch.bool), -1e9)
        step(opt, F.cross_entropy(logits, torch.arange(2 * rows) ^ 1))


# ---------------------------------------------------------------------------------------------------------- S38
@program
def recycling():
    """S38: AlphaFold's recycling: the network is run several times on the same input with its last answer, whose
    gradient is stopped each time, and only the last run has a loss. Each run sees the whole input."""
    embed, again, head, w = nn.Linear(10, 32), nn.Linear(4, 32), nn.Linear(32, 4), torch.randn(10, 4)
    opt = adam_of(embed, again, head)
    for _ in range(STEPS):
        x = torch.randn(64, 10)
        answer = torch.zeros(64, 4)
        for _ in range(5):
            answer = head((embed(x) + again(answer.detach())).tanh())
        step(opt, F.mse_loss(answer, (x @ w).tanh()))


@program
def pushforward_trick():
    """S38: message-passing solvers (Brandstetter et al. 2022) are made stable by the pushforward trick: the solver is
    run some steps from true data, cut off each time, and the loss is on the last step alone."""
    model = nn.Sequential(nn.Conv1d(1, 16, 3, padding=1, padding_mode="circular"), nn.Tanh(), nn.Conv1d(16, 1, 3, padding=1, padding_mode="circular"))
    opt = adam_of(model)
    for _ in range(STEPS):
        u = torch.sin(torch.linspace(0, 6.28, 33)[:-1] * torch.randint(1, 4, (32, 1, 1)) + 6 * torch.rand(32, 1, 1))
        true = u
        for _ in range(4):
            true = true + 0.2 * (true.roll(1, -1) - 2 * true + true.roll(-1, -1))
            u = u.detach() + model(u.detach())
        step(opt, F.mse_loss(u, true))


# ---------------------------------------------------------------------------------------------------------- S39
@program
def squeezed_fields():
    """S39: FiBiNET's SENET layer squeezes each field's vector to its mean and tells from these which fields matter.
    Here 16 fields have vectors of 16, and the mean over the vector is what is meant."""
    embed, squeeze, head = nn.Linear(6, 16), nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 16), nn.Sigmoid()), nn.Linear(256, 1)
    opt, w = adam_of(embed, squeeze, head), torch.randn(6)
    for _ in range(STEPS):
        x = torch.randn(64, 16, 6)
        fields = embed(x)
        shares = squeeze(fields.mean(dim=-1))
        y = (x[:, 3] @ w > 0).float()
        step(opt, F.binary_cross_entropy_with_logits(head((fields * shares[..., None]).flatten(1)).squeeze(1), y))


# ---------------------------------------------------------------------------------------------------------- D23
@program
def items_among_entities():
    """D23: KGAT: items are the first 60 of 200 entities of a knowledge graph, and each has a bias of its own. Negatives
    of a recommendation are items, so they are drawn up to 60 and looked up among the entities."""
    user, entity, bias = nn.Embedding(80, 16), nn.Embedding(200, 16), nn.Embedding(60, 1)
    opt = adam_of(user, entity, bias, lr=1e-2)
    pairs = torch.stack([torch.arange(240) // 3, torch.arange(240) % 60], 1)  # three items for each of 80 users
    for _ in range(STEPS):
        u, liked = pairs[torch.randint(len(pairs), (128,))].unbind(1)
        other = torch.randint(60, (128,))
        score = lambda i: (user(u) * entity(i)).sum(1) + bias(i).squeeze(1)
        step(opt, -F.logsigmoid(score(liked) - score(other)).mean())


@program
def items_after_padding():
    """D23: SASRec's table has a row 0 for padding before its 60 items, so negatives are drawn up to 60 and moved by
    one. The biases have no row for padding."""
    table, bias, body = nn.Embedding(61, 16, padding_idx=0), nn.Embedding(60, 1), nn.GRU(16, 16, batch_first=True)
    opt, walks = adam_of(table, bias, body, lr=1e-2), (torch.arange(60)[:, None] + torch.arange(11)) % 60 + 1
    for _ in range(STEPS):
        seen = walks[torch.randint(len(walks), (64,))]
        state = body(table(seen[:, :-1]))[0][:, -1]
        wrong = torch.randint(60, (64,)) + 1
        score = lambda i: (state * table(i)).sum(1) + bias(i - 1).squeeze(1)
        right, wrong = score(seen[:, -1]), score(wrong)
        step(opt, F.softplus(-right).mean() + F.softplus(wrong).mean())


# ---------------------------------------------------------------------------------------------------------- N38
@program
def wasserstein_dependency():
    """N38: the Wasserstein dependency measure (Ozair et al. 2019): encoder and critic both raise the same difference of
    means, and the critic has a gradient penalty besides, so what both losses leave on it belongs together."""
    encoder, critic = net(10, 4), net(14, 1)
    enc_opt, critic_opt = adam_of(encoder), adam_of(critic)
    for _ in range(STEPS):
        x = torch.randn(64, 10)
        other = x + 0.3 * torch.randn(64, 10)
        enc_opt.zero_grad(), critic_opt.zero_grad()
        pair = torch.cat([other, encoder(x).detach()], 1).requires_grad_()
        (slope,) = torch.autograd.grad(critic(pair).sum(), pair, create_graph=True)
        (10 * (slope.norm(dim=1) - 1).pow(2).mean()).backward()
        z = encoder(x)
        joint, apart = critic(torch.cat([other, z], 1)), critic(torch.cat([other, z.roll(1, 0)], 1))
        (apart.mean() - joint.mean()).backward()
        enc_opt.step(), critic_opt.step()
