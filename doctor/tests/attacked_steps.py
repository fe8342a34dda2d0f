"""Healthy programs whose steps, roundings and sums are written like a fault: attacks, meta-gradients, averages."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

from .attacked_parts import net, update

PROGRAMS = {}
STEPS = 14
CENTRES = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))


def program(make):
    """A function that gives a step, which is made some times."""

    def run():
        step = make()
        for _ in range(STEPS):
            step()

    PROGRAMS[make.__name__] = run
    return make


def classes3(n=32):
    y = torch.randint(3, (n,))
    return CENTRES[y] + 0.5 * torch.randn(n, 8), y


def spots(n=32):
    y = torch.randint(4, (n,))
    x = 0.3 * torch.randn(n, 1, 8, 8)
    for i in range(4):
        x[y == i, :, 4 * (i // 2) : 4 * (i // 2) + 4, 4 * (i % 2) : 4 * (i % 2) + 4] += 0.7
    return x, y


def cnn():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))


class Weighted(nn.Module):
    def __init__(self, n, classes=3):
        super().__init__()
        self.net, self.extra = net(8, classes), nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return self.net(x)


@program
def clean_and_adversarial_losses_summed():
    """N1/of-an-attack: adversarial training of Goodfellow et al. 2015: the sum of the clean and the adversarial loss.
    One backward of the clean loss gives the weights' share and the gradient of the inputs for FGSM; the second adds its
    own."""
    model = cnn()
    opt = torch.optim.SGD(model.parameters(), 0.05)

    def step():
        x, y = spots()
        opt.zero_grad()
        x.requires_grad_(True)
        clean = 0.5 * F.cross_entropy(model(x), y)
        clean.backward()
        x_adv = (x + 0.1 * x.grad.sign()).detach()
        adversarial = 0.5 * F.cross_entropy(model(x_adv), y)
        adversarial.backward()
        opt.step()

    return step


@program
def clean_and_adversarial_parts_of_one_batch():
    """N1/of-an-attack: Kurakin et al. 2017, mixed clean and adversarial halves, accumulated one after the other; the
    attack itself reuses the input gradient of the clean half's training backward."""
    model = net(12, 3)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    centres = torch.randn(3, 12)

    def step():
        y = torch.randint(3, (32,))
        x = centres[y] + 0.5 * torch.randn(32, 12)
        x.requires_grad = True
        opt.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        (loss / 1.3).backward()
        with torch.no_grad():
            adv = x + 0.1 * torch.sign(x.grad)
        (0.3 * F.cross_entropy(model(adv), y) / 1.3).backward()
        opt.step()

    return step


@program
def learned_weights_of_sources_in_one_optimizer():
    """N51: weights of four data sources are learned by the validation loss after a virtual step (Ren et al. 2018). One
    optimizer has two groups; the validation's backward is asked for the source weights alone, and the gradients of the
    virtual step are those of the real one."""
    model = Weighted(4)
    ps = dict(model.net.named_parameters())
    opt = torch.optim.Adam([{"params": list(ps.values())}, {"params": [model.extra], "lr": 2e-2}], lr=3e-3)

    def step():
        y = torch.randint(3, (64,))
        x = CENTRES[y] + 0.5 * torch.randn(64, 8)
        source = torch.randint(4, (64,))
        wrong = torch.where(source == 3, torch.randint(3, (64,)), y)
        vy = torch.randint(3, (32,))
        vx = CENTRES[vy] + 0.5 * torch.randn(32, 8)
        opt.zero_grad()
        each = F.cross_entropy(model.net(x), wrong, reduction="none")
        loss = (each * 4 * model.extra.softmax(0)[source]).mean()
        grads = torch.autograd.grad(loss, list(ps.values()), create_graph=True)
        fast = {n: p.detach() - 0.5 * g for (n, p), g in zip(ps.items(), grads)}
        F.cross_entropy(functional_call(model.net, fast, (vx,)), vy).backward(inputs=[model.extra])
        for p, g in zip(ps.values(), grads):
            p.grad = g.detach()
        opt.step()

    return step


@program
def meta_gradient_of_a_discount():
    """N51: meta-gradient reinforcement learning (Xu et al. 2018): a return's mixing weight is learned through one
    update of the value network; all in one optimizer, the weights' gradients set from the inner loss."""

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.value, self.eta = net(6, 1), nn.Parameter(torch.tensor([0.0]))

    model = Agent()
    ps = dict(model.value.named_parameters())
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    w = torch.randn(6)

    def step():
        s = torch.randn(48, 6)
        true = s @ w
        short, long = true + 0.5, true + torch.randn(48)
        mix = model.eta.sigmoid()
        inner = (model.value(s).squeeze(1) - (mix * short + (1 - mix) * long)).pow(2).mean()
        grads = torch.autograd.grad(inner, list(ps.values()), create_graph=True)
        after = {n: p.detach() - 0.01 * g for (n, p), g in zip(ps.items(), grads)}
        s2 = torch.randn(48, 6)
        outer = (functional_call(model.value, after, (s2,)).squeeze(1) - s2 @ w).pow(2).mean()
        opt.zero_grad()
        outer.backward(inputs=[model.eta])
        for p, g in zip(ps.values(), grads):
            p.grad = g.detach()
        opt.step()

    return step


@program
def learned_smoothing_of_labels():
    """N51: how much labels are smoothed is learned by the validation loss after a virtual step; after its backward the
    weights' gradients are replaced by those of the training loss. One optimizer."""
    model = Weighted(3)
    ps = dict(model.net.named_parameters())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step():
        y = torch.randint(3, (64,))
        x = CENTRES[y] + 0.5 * torch.randn(64, 8)
        vy = torch.randint(3, (32,))
        vx = CENTRES[vy] + 0.5 * torch.randn(32, 8)
        eps = 0.3 * model.extra.sigmoid()[y][:, None]
        targets = (1 - eps) * F.one_hot(y, 3) + eps / 3
        loss = -(targets * model.net(x).log_softmax(1)).sum(1).mean()
        grads = torch.autograd.grad(loss, list(ps.values()), create_graph=True)
        fast = {n: p.data - 0.5 * g for (n, p), g in zip(ps.items(), grads)}
        opt.zero_grad()
        F.cross_entropy(functional_call(model.net, fast, (vx,)), vy).backward()
        for p, g in zip(ps.values(), grads):
            p.grad = g.detach()
        opt.step()

    return step


@program
def stochastic_rounding_to_fixed_point():
    """N3/rounded-in-place: training with fixed-point weights and stochastic rounding (Gupta et al. 2015): small steps
    are kept in the mean."""
    model = net(64, 4, 64)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    centres, q = torch.randn(4, 64) / 4, 2.0**-5

    def rounded():
        for p in model.parameters():
            p.data = torch.floor(p.data / q + torch.rand_like(p)) * q

    rounded()

    def step():
        y = torch.randint(4, (64,))
        x = centres[y] + 0.5 * torch.randn(64, 64)
        update(opt, F.cross_entropy(model(x), y))
        rounded()

    return step


@program
def shared_centroids_are_tuned():
    """N3/rounded-in-place: Deep Compression's trained quantisation: each weight is one of 16 centroids, and after each
    step a centroid moves by the mean of its weights' updates."""
    model = net(32, 4, 64)
    opt = torch.optim.SGD(model.parameters(), 0.2)
    centres = torch.randn(4, 32) / 2
    which = {}
    for n, p in model.named_parameters():
        if p.dim() > 1:
            edges = torch.quantile(p.data.flatten(), torch.linspace(0, 1, 17)[1:-1])
            which[n] = torch.bucketize(p.data, edges)

    def share():
        for n, p in model.named_parameters():
            if n in which:
                flat = which[n].flatten()
                sums = torch.zeros(16).index_add_(0, flat, p.data.flatten())
                p.data = (sums / torch.bincount(flat, minlength=16))[which[n]]

    share()

    def step():
        y = torch.randint(4, (64,))
        x = centres[y] + 0.5 * torch.randn(64, 32)
        update(opt, F.cross_entropy(model(x), y))
        share()

    return step


@program
def discrete_state_transitions():
    """N3/rounded-in-place: ternary weights by discrete state transitions (GXNOR-Net, Deng et al. 2018): a step's update
    becomes a jump to the next state with a probability that grows with it."""
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    layers = [model[0], model[3]]
    for m in layers:
        m.weight.data = torch.randint(-1, 2, m.weight.shape).float() * 0.1
    opt = torch.optim.SGD(model.parameters(), 0.5)
    centres = torch.randn(4, 32)

    def step():
        y = torch.randint(4, (64,))
        x = centres[y] + 0.5 * torch.randn(64, 32)
        before = [m.weight.detach().clone() for m in layers]
        update(opt, F.cross_entropy(model(x), y))
        for m, old in zip(layers, before):
            wish = (m.weight.detach() - old) / 0.1
            jump = wish.sign() * (torch.rand_like(wish) < torch.tanh(3 * wish.abs())).float()
            m.weight.data = (old / 0.1 + jump).round().clamp(-1, 1) * 0.1

    return step


@program
def scales_of_frozen_weights():
    """B7/rounded: post-training quantisation: weights are frozen, and the scale of each layer is calibrated by its
    exact derivative: round(w / s) * s has the slope round(w / s) in s."""

    class Quantised(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.register_buffer("weight", layer.weight.detach().clone())
            self.register_buffer("bias", layer.bias.detach().clone())
            self.scale = nn.Parameter(self.weight.abs().max() / 7 * 1.4)

        def forward(self, x):
            w = (self.weight / self.scale).round().clamp(-8, 7) * self.scale
            return F.linear(x, w, self.bias)

    full = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).requires_grad_(False)
    model = nn.Sequential(Quantised(full[0]), nn.ReLU(), Quantised(full[2]))
    opt = torch.optim.Adam(model.parameters(), 1e-3)

    def step():
        x = torch.randn(64, 16)
        update(opt, F.mse_loss(model(x), full(x)))

    return step


@program
def pinn_with_an_interface():
    """B7/rounded: a discontinuity-capturing network (Hu, Lin & Lai 2022) for an interface problem: the sign of the
    level set is an input of its own beside x, and u is differentiated by x for the equation."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.of_x, self.of_side, self.rest = nn.Linear(1, 32), nn.Linear(1, 32, bias=False), nn.Linear(32, 1)

        def forward(self, x):
            side = torch.sign(x - 0.3)
            return self.rest(torch.tanh(self.of_x(x) + self.of_side(side)))

    model = Net()
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    ends, values = torch.tensor([[-1.0], [1.0]]), torch.tensor([[0.0], [1.0]])

    def step():
        x = (2 * torch.rand(128, 1) - 1).requires_grad_()
        u = model(x)
        ux = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        uxx = torch.autograd.grad(ux.sum(), x, create_graph=True)[0]
        update(opt, uxx.pow(2).mean() + 10 * F.mse_loss(model(ends), values))

    return step


@program
def standardised_for_the_loss_alone():
    """S62: Barlow Twins with a predictor: one nn.BatchNorm1d(affine=False) standardises embeddings in the loss, those
    of the projector and, behind it, of the predictor. It is used in training only; what is kept is the encoder."""

    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.predictor = net(16, 8), net(8, 8)
            self.bn = nn.BatchNorm1d(8, affine=False)

        def forward(self, a, b):
            za, zb = self.bn(self.encoder(a)), self.bn(self.encoder(b))
            pa = self.bn(self.predictor(za))
            c = pa.T @ zb / len(a)
            eye = torch.eye(8)
            return ((c - eye).pow(2) * (eye + 0.01 * (1 - eye))).sum()

    model = Twins()
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    w = torch.randn(8, 16)

    def step():
        x = torch.randn(64, 8) @ w
        update(opt, model(x + 0.3 * torch.randn_like(x), x + 0.3 * torch.randn_like(x)))

    return step


@program
def divergence_per_element_with_its_factor():
    """F89: distillation with the default mean of kl_div, times the number of classes: what batchmean gives."""
    teacher, student = net(12, 5, 64).requires_grad_(False), net(12, 5, 16)
    opt = torch.optim.Adam(student.parameters(), 3e-3)
    criterion = nn.KLDivLoss(reduction="mean")

    def step():
        x = torch.randn(32, 12)
        log_p, q = (student(x) / 2).log_softmax(1), (teacher(x) / 2).softmax(1)
        update(opt, 4 * 5 * criterion(log_p, q))

    return step


@program
def divergence_divided_before_the_sum():
    """F135: a VAE whose divergence is divided by the rows before it is summed; that number is added to the error of
    each row, and the mean is the usual loss."""

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = net(20, 8), net(4, 20)

        def forward(self, x):
            mu, log_var = self.encoder(x).chunk(2, 1)
            z = mu + torch.randn_like(mu) * (log_var / 2).exp()
            return self.decoder(z), mu, log_var

    model = VAE()
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    w = torch.randn(3, 20)

    def step():
        x = torch.randn(32, 3) @ w
        out, mu, log_var = model(x)
        each = 0.5 * (out - x).pow(2).sum(1)
        kl = (-0.5 * (1 + log_var - mu.pow(2) - log_var.exp()) / len(x)).sum()
        update(opt, (each + kl).mean())

    return step


@program
def spread_weighted_by_shares():
    """F135: a regression with its own spread, under shares that sum to one (importance weights): the weighted mean of
    the log spreads is a sum of shares times it, added to the errors scaled for the same."""
    model = net(6, 2)
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    w = torch.randn(6)

    def step():
        x = torch.randn(32, 6)
        y = x @ w + 0.3 * torch.randn(32)
        mean, log_var = model(x).unbind(1)
        shares = torch.rand(32)
        shares = shares / shares.sum()
        errors = 32 * shares * (y - mean).pow(2) * (-log_var).exp()
        logs = (shares * log_var).sum()
        update(opt, 0.5 * (errors + logs).mean())

    return step


@program
def agents_with_a_joint_entropy():
    """F135: soft policies of six agents in one environment: the logarithm of the joint policy is the sum over the
    agents, and the joint value is the mean of their values (rewards are scaled so that the temperature is 1)."""

    class Team(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy = net(5, 4)

    model = Team()
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    goal = torch.randn(5, 2)

    def step():
        seen = torch.randn(6, 5)
        mean, log_std = model.policy(seen).chunk(2, 1)
        dist = torch.distributions.Normal(mean, log_std.clamp(-3, 1).exp())
        a = dist.rsample()
        log_joint = dist.log_prob(a).sum()
        values = -20 * (a - seen @ goal).pow(2).sum(1)
        update(opt, (log_joint - values).mean())

    return step


@program
def switch_ema():
    """N36/left-in-place: Switch EMA (Li et al. 2024): after each epoch, once it was validated, the average of the
    weights is put into the model, and training goes on from it."""
    model = net(8, 3)
    ema = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    count = [0]

    def step():
        if count[0] and count[0] % 4 == 0:
            ema.eval()
            with torch.no_grad():
                x, y = classes3()
                (model(x).argmax(1) == y).float().mean()
            model.load_state_dict(ema.state_dict())
        x, y = classes3()
        update(opt, F.cross_entropy(model(x), y))
        with torch.no_grad():
            for a, b in zip(ema.parameters(), model.parameters()):
                a.lerp_(b, 0.1)
        count[0] += 1

    return step


@program
def federated_averaging_in_one_model():
    """N36/left-in-place: federated averaging, simulated with one model: three clients with data of their own train from
    the global weights in turn, their mean is the new global model, and is validated."""
    model = net(8, 3)
    opt = torch.optim.SGD(model.parameters(), 0.05)
    state = {"global": copy.deepcopy(model.state_dict()), "ends": [], "n": 0}

    def step():
        n = state["n"]
        if n and n % 3 == 0:
            state["ends"].append(copy.deepcopy(model.state_dict()))
            if len(state["ends"]) == 3:
                state["global"] = {k: sum(e[k] for e in state["ends"]) / 3 for k in state["global"]}
                state["ends"] = []
            model.load_state_dict(state["global"])
            with torch.no_grad():
                x, y = classes3()
                F.cross_entropy(model(x), y)
        client = n // 3 % 3
        x, y = classes3(64)
        mostly = (y == client) | (torch.rand(64) < 0.05)
        update(opt, F.cross_entropy(model(x[mostly]), y[mostly]))
        state["n"] += 1

    return step


@program
def adam_with_an_epsilon_of_one():
    """epsilon-vanishes/decides: Adam with eps=1 and a rate to match (Choi et al. 2019 tune both together; TF's advice
    for Inception): it is momentum SGD with a bounded step."""
    model = net(10, 4)
    opt = torch.optim.Adam(model.parameters(), lr=0.5, eps=1.0)
    centres = torch.randn(4, 10)

    def step():
        y = torch.randint(4, (64,))
        update(opt, F.cross_entropy(model(centres[y] + 0.5 * torch.randn(64, 10)), y))

    return step


@program
def eeg_siamese_layer_norm_over_time():
    """F134: SimSiam on EEG; the encoder of (B, channels, T) normalises each channel over time with nn.LayerNorm(T), and
    the cosine is taken over the channels at each time, which is dim 1 and the default."""

    class Siam(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv1d(8, 16, 5, padding=2),
                nn.BatchNorm1d(16),
                nn.ReLU(),
                nn.Conv1d(16, 24, 5, padding=2),
                nn.LayerNorm(40),
            )
            self.predictor = nn.Sequential(nn.Conv1d(24, 24, 1))

        def forward(self, x):
            z = self.encoder(x)
            return self.predictor(z), z.detach()

    model = Siam()
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def step():
        phase = torch.rand(16, 8, 1) * 6.3
        x = torch.sin(torch.linspace(0, 12, 40) * torch.randint(1, 4, (16, 1, 1)) + phase)
        p1, z1 = model(x + 0.1 * torch.randn_like(x))
        p2, z2 = model(x * (0.8 + 0.4 * torch.rand(16, 1, 1)) + 0.1 * torch.randn_like(x))
        update(opt, -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean()) / 2)

    return step


@program
def eeg_maps_of_channels_with_unit_energy():
    """F134: EEG denoising; each channel has unit energy (F.normalize over time, as is usual), and the loss is one minus
    the spatial correlation of electrodes at each sample (as in microstate analysis): dim 1, the default."""
    model = nn.Sequential(nn.Conv1d(12, 32, 7, padding=3), nn.ReLU(), nn.Conv1d(32, 12, 7, padding=3))
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    mixing = torch.randn(12, 4)

    def step():
        sources = torch.sin(torch.linspace(0, 9, 50) * torch.rand(16, 4, 1) * 3 + 6.3 * torch.rand(16, 4, 1))
        clean = F.normalize(mixing @ sources, dim=-1)
        noisy = 7 * clean + 0.3 * torch.randn_like(clean)
        update(opt, (1 - F.cosine_similarity(model(noisy), clean)).mean())

    return step


@program
def grey_axis_of_neutral_patches():
    """F134/one-number: white balance: on neutral patches the angle of each pixel's colour to the grey axis, as the
    cosine of the pixel and its own grey version, broadcast over the three colours."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1), nn.Softplus())
    opt = torch.optim.Adam(model.parameters(), 2e-3)

    def step():
        clean = torch.rand(8, 1, 12, 12).expand(-1, 3, -1, -1) * 0.8 + 0.1
        cast = clean * (0.6 + 0.8 * torch.rand(8, 3, 1, 1))
        out = model(cast)
        angle = 1 - F.cosine_similarity(out, out.mean(1, keepdim=True), dim=1)
        update(opt, F.l1_loss(out, clean) + 0.5 * angle.mean())

    return step


@program
def forecaster_told_by_an_lstm_teacher():
    """F134: a small LSTM forecaster is distilled from a larger one by mean squares and the cosine over time of each
    channel (B, T, C): the shape of each series, dim 1, the default."""

    class Forecaster(nn.Module):
        def __init__(self, h):
            super().__init__()
            self.rnn, self.head = nn.LSTM(5, h, batch_first=True), nn.Linear(h, 5)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    teacher, student = Forecaster(48), Forecaster(12)
    teacher.requires_grad_(False).eval()
    opt = torch.optim.Adam(student.parameters(), 3e-3)

    def step():
        t = torch.arange(31) / 5
        series = torch.sin(t[None, :, None] * (1 + torch.rand(16, 1, 5)) + 6 * torch.rand(16, 1, 5))
        x, y = series[:, :-1], series[:, 1:]
        with torch.no_grad():
            told = teacher(x)
        out = student(x)
        shape = 1 - F.cosine_similarity(out, told).mean()
        update(opt, F.mse_loss(out, y) + 0.1 * shape)

    return step


@program
def kernel_of_features_with_unit_energy():
    """F134/lengths: similarity-preserving distillation of a transformer: each feature is scaled to unit energy over the
    tokens, so that no outlier feature decides, and the linear kernels of the tokens are compared."""

    def body(w):
        return nn.Sequential(nn.Embedding(50, w), nn.Linear(w, w), nn.GELU(), nn.LayerNorm(w))

    teacher, student = body(48).requires_grad_(False), body(16)
    opt = torch.optim.Adam(student.parameters(), 2e-3)

    def kernel(h):
        h = F.normalize(h)  # features over tokens
        k = h @ h.transpose(1, 2)
        return k / k.flatten(1).norm(dim=1)[:, None, None]

    def step():
        ids = torch.randint(50, (16, 12))
        with torch.no_grad():
            k = kernel(teacher(ids))
        update(opt, 10 * F.mse_loss(kernel(student(ids)), k))

    return step


@program
def table_with_hidden_columns():
    """F21/across: a model of tables for any set of given columns (arbitrary conditioning): one set of columns is drawn
    for each batch, x * keep hides the others, and an embedding of the flag is added to each column's token. 16 rows, 16
    columns."""

    class Tabular(nn.Module):
        def __init__(self, columns=16, width=24):
            super().__init__()
            self.scale, self.flag = nn.Parameter(torch.randn(columns, width) / 5), nn.Embedding(2, width)
            self.bias = nn.Parameter(torch.randn(columns, width) / 5)
            self.layer, self.head = nn.TransformerEncoderLayer(width, 2, 48, 0.0, batch_first=True), nn.Linear(width, 1)

        def forward(self, x, keep):
            tokens = x[..., None] * self.scale + self.bias + self.flag(keep.long())
            return self.head(self.layer(tokens)).squeeze(-1)

    model = Tabular()
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    w = torch.randn(3, 16)

    def step():
        x = torch.randn(16, 3) @ w
        keep = (torch.rand(16) < 0.6).float()
        out = model(x * keep, keep)
        hidden = 1 - keep
        update(opt, ((out - x).pow(2) @ hidden).sum() / (16 * hidden.sum().clamp(min=1)))

    return step


@program
def random_gains_of_sensors():
    """F21/across: gains of 12 sensors are drawn anew for a batch of 12 windows; the reader is told them as one token
    per sensor (gain[:, None] through a layer) and reconstructs the true readings."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.body = nn.Linear(1, 8), nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, x, gain):
            told = self.gain(gain[:, None]).expand(len(x), -1, -1)
            return self.body(torch.cat([x[..., None], told], -1)).squeeze(-1)

    model = Reader()
    opt = torch.optim.Adam(model.parameters(), 3e-3)

    def step():
        x = torch.randn(12, 12)
        gain = 0.5 + torch.rand(12)
        update(opt, F.mse_loss(model(x * gain, gain), x))

    return step


@program
def bootstrapped_kernel_teacher():
    """F21/across: a network is distilled from Nadaraya-Watson regressions under the Bayesian bootstrap: weights of the
    32 training points are drawn in each step; the kernel of queries and points has a column for each point."""
    model = net(3, 2)
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    points = torch.randn(32, 3)
    values = torch.stack([points[:, 0].sin(), points[:, 1]], 1)

    def step():
        queries = torch.randn(32, 3)
        weights = torch.rand(32)
        kernel = torch.exp(-torch.cdist(queries, points).pow(2)) * weights
        prior = (weights[:, None] * values).sum(0) / weights.sum()
        told = (kernel @ values + 0.01 * prior) / (kernel.sum(1, keepdim=True) + 0.01)
        update(opt, F.mse_loss(model(queries), told))

    return step


@program
def tokens_in_groups_of_experts():
    """F3/crossed: GShard: tokens of (B, T) are cut into groups of fixed size for the experts, in their order, and their
    logits are (groups, size, classes); the transformer before turns rows and places for itself."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(32, 32)
            self.layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
            self.router, self.experts = nn.Linear(32, 4), nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
            self.head = nn.Linear(32, 6)

        def forward(self, ids):
            h = self.layer(self.words(ids)).reshape(-1, 8, 32)  # groups of 8 tokens
            gates = self.router(h).softmax(-1)
            h = h + sum(gates[..., i : i + 1] * e(h) for i, e in enumerate(self.experts))
            return self.head(h)

    model = Model()
    opt = torch.optim.Adam(model.parameters(), 2e-3)

    def step():
        ids = torch.randint(32, (8, 16))
        tags = ids % 6
        logits = model(ids)
        update(opt, F.cross_entropy(logits.reshape(-1, 6), tags.reshape(-1)))

    return step


@program
def time_first_windows_regrouped():
    """F3/crossed: an LSTM with the time first tags (T, B), is put back to rows first, and its tokens are normalised in
    ghost batches of as many tokens as there are rows; flat tokens are in the order of (B, T) throughout."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.rnn = nn.Embedding(32, 24), nn.LSTM(24, 24)
            self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 5)

        def forward(self, ids):
            h = self.rnn(self.words(ids).transpose(0, 1))[0].transpose(0, 1).flatten(0, 1)
            ghost = h.view(-1, 16, 24)
            ghost = (ghost - ghost.mean(1, keepdim=True)) / ghost.std(1, keepdim=True).clamp(min=1e-3)
            return self.head(self.norm(ghost))

    model = Model()
    opt = torch.optim.Adam(model.parameters(), 3e-3)

    def step():
        ids = torch.randint(32, (16, 10))
        tags = ids % 5
        update(opt, F.cross_entropy(model(ids).view(-1, 5), tags.view(-1)))

    return step
