"""63 healthy programs by somebody who had read the checks S33 to S36, F81 to F86, D18, D20 to D22, N28, N36 and F54 and
looked for what they would wrongly blame. 42 were blamed at first; test_attacked.py names those that still are.

They are kept as they were written.
"""
# ruff: noqa

import copy, itertools, math
import torch, torch.nn as nn, torch.nn.functional as F
from torch.distributions import Categorical, Bernoulli, Normal
PROGRAMS = {}
def program(f): PROGRAMS[f.__name__] = f; return f
def mlp(i, h, o): return nn.Sequential(nn.Linear(i, h), nn.Tanh(), nn.Linear(h, o))
STEPS = 8

# ---------------------------------------------------------------- S33
@program
def plsa_word_topics():
    """S33: pLSA by gradient: p(word|topic) is a softmax over words (dim 0); rows are the vocabulary, no batch."""
    V, D, K = 60, 40, 5
    p = F.softmax(torch.randn(V, K) * 2, 0) @ F.softmax(torch.randn(K, D), 0)
    w, h = nn.Parameter(torch.randn(V, K) * .1), nn.Parameter(torch.randn(K, D) * .1)
    opt = torch.optim.Adam([w, h], 0.05)
    for _ in range(STEPS):
        q = w.softmax(0) @ h.softmax(0)
        loss = F.mse_loss(q * V, p * V)
        opt.zero_grad(); loss.backward(); opt.step()

@program
def dual_softmax_matching():
    """S33: LoFTR's dual softmax, one image pair of N x M keypoints; rows and columns both compete by design."""
    enc = nn.Linear(16, 32); opt = torch.optim.Adam(enc.parameters(), 1e-3)
    for _ in range(STEPS):
        a = torch.randn(40, 16); perm = torch.randperm(40)[:32]; b = a[perm] + .1 * torch.randn(32, 16)
        sim = enc(a) @ enc(b).T / 0.1 / 32
        conf = F.softmax(sim, 0) * F.softmax(sim, 1)
        gt = torch.zeros(40, 32); gt[perm, torch.arange(32)] = 1
        loss = F.binary_cross_entropy(conf.clamp(1e-6, 1 - 1e-6), gt)
        opt.zero_grad(); loss.backward(); opt.step()

@program
def temporal_attention_time_first():
    """S33: time-first layout (T, B, D): attention over time is dim 0, and there is an answer for each time step."""
    T, B, D = 20, 32, 8
    rnn, score, out = nn.GRU(D, 16), nn.Linear(16, 1), nn.Linear(16, 1)
    opt = torch.optim.Adam([*rnn.parameters(), *score.parameters(), *out.parameters()], 1e-3)
    for _ in range(STEPS):
        x = torch.randn(T, B, D); y = x.cumsum(0).mean(-1)
        h, _ = rnn(x)
        a = torch.softmax(score(h), dim=0)
        h = h * (1 + T * a)
        loss = F.mse_loss(out(h).squeeze(-1), y)
        opt.zero_grad(); loss.backward(); opt.step()

@program
def one_graph_node_importance():
    """S33: one graph, all nodes in the batch: importance shared out over the nodes, regression of each node."""
    N = 64; x = torch.randn(N, 8); A = (torch.rand(N, N) < .1).float(); A = (A + A.T + torch.eye(N)).clamp(max=1); A /= A.sum(1, keepdim=True)
    y = (A @ A @ x).mean(1, keepdim=True)
    l1, s, l2 = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)
    opt = torch.optim.Adam([*l1.parameters(), *s.parameters(), *l2.parameters()], 1e-2)
    for _ in range(STEPS):
        h = torch.relu(A @ l1(x))
        h = h * N * torch.softmax(s(h), dim=0)
        loss = F.mse_loss(l2(A @ h), y)
        opt.zero_grad(); loss.backward(); opt.step()

# ---------------------------------------------------------------- F81
@program
def ranking_tensor_margin():
    """F81: cost-augmented ranking, relu(margin + s(neg) - s(pos)) with a margin for each pair; both must learn."""
    net = mlp(10, 32, 1); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(STEPS):
        pos = torch.randn(64, 10) + .5; neg = torch.randn(64, 10)
        margin = (pos - neg).norm(dim=1, keepdim=True) / 5
        loss = F.relu(margin + net(neg) - net(pos)).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@program
def neural_lyapunov():
    """F81: a Lyapunov function must fall along the dynamics: relu(V(next) + a|x|^2 - V(x)); both sides learn."""
    V = mlp(2, 32, 1); opt = torch.optim.Adam(V.parameters(), 1e-3)
    A = torch.tensor([[.9, .2], [-.2, .9]])
    for _ in range(STEPS):
        x = torch.randn(128, 2)
        nxt = x @ A.T
        loss = F.relu(V(nxt) + .05 * x.pow(2).sum(1, keepdim=True) - V(x)).mean() + V(torch.zeros(1, 2)).pow(2).mean() + F.relu(.1 * x.norm(dim=1, keepdim=True) - V(x)).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@program
def pinn_finite_difference():
    """F81: a discrete-time physics loss u(t+h) = u(t) + h f(t) with an initial condition; both sides must learn."""
    u = mlp(1, 32, 1); opt = torch.optim.Adam(u.parameters(), 1e-3); h = .05
    for _ in range(STEPS):
        t = torch.rand(64, 1)
        res = u(t + h) - (u(t) + h * torch.cos(3 * t))
        loss = (res / h).pow(2).mean() + u(torch.zeros(1, 1)).pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@program
def perceptual_not_in_optimizer():
    """F81: perceptual loss; the features are not frozen by requires_grad but are in no optimizer, so stay as they are."""
    vgg = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)).eval()
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(STEPS):
        y = torch.rand(32, 3, 8, 8); x = y + .1 * torch.randn_like(y)
        out = net(x)
        loss = F.mse_loss(vgg(out), vgg(y)) + F.l1_loss(out, y)
        opt.zero_grad(); loss.backward(); opt.step()

def blobs(n, d, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=g) @ torch.randn(3, d, generator=g) + .1 * torch.randn(n, d, generator=g)
def batches(x, b=32):
    for i in range(STEPS):
        yield x[torch.arange(i * b, (i + 1) * b) % len(x)]

# ---------------------------------------------------------------- F81 (2)
@program
def vaegan_encoder_features():
    """F81: VAE/GAN: the encoder's and decoder's loss is the distance in D's features; D is stepped by its own loss only."""
    x_all = blobs(512, 12)
    E, G, Df, Dh = mlp(12, 32, 8), mlp(4, 32, 12), nn.Linear(12, 32), nn.Linear(32, 1)
    og = torch.optim.Adam([*E.parameters(), *G.parameters()], 1e-3); od = torch.optim.Adam([*Df.parameters(), *Dh.parameters()], 1e-3)
    for x in batches(x_all):
        mu, lv = E(x).chunk(2, 1)
        xr = G(mu + torch.exp(.5 * lv) * torch.randn_like(mu))
        d = lambda v: Dh(F.leaky_relu(Df(v)))
        ld = F.softplus(-d(x)).mean() + F.softplus(d(xr.detach())).mean()
        od.zero_grad(); ld.backward(); od.step()
        kl = -.5 * (1 + lv - mu.pow(2) - lv.exp()).sum(1).mean()
        lg = F.mse_loss(F.leaky_relu(Df(xr)), F.leaky_relu(Df(x))) + .01 * kl
        og.zero_grad(); lg.backward(); og.step()

@program
def path_consistency():
    """F81: path consistency learning (Nachum 2017): r + gamma V(s') - V(s) - tau log pi is squared, gradient through all."""
    V, pi = mlp(6, 32, 1), mlp(6, 32, 4)
    opt = torch.optim.Adam([*V.parameters(), *pi.parameters()], 1e-3); tau, gamma = .1, .95
    for _ in range(STEPS):
        s = torch.randn(64, 6); dist = Categorical(logits=pi(s)); a = dist.sample()
        s2 = .9 * s + .1 * F.one_hot(a, 6); r = s2[:, 0] - .1 * a
        c = (r + gamma * V(s2).squeeze(1)) - V(s).squeeze(1) - tau * dist.log_prob(a)
        loss = .5 * c.pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@program
def koopman_two_backwards():
    """F81: Koopman autoencoder, losses differentiated one after the other; reconstruction keeps the encoder honest."""
    enc, dec, K = mlp(3, 32, 6), mlp(6, 32, 3), nn.Parameter(torch.eye(6))
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters(), K], 1e-3); A = torch.tensor([[.9, .3, 0], [-.3, .9, 0], [0, 0, .8]])
    for _ in range(STEPS):
        x = torch.randn(64, 3); y = x @ A
        opt.zero_grad()
        F.mse_loss(dec(enc(x)), x).backward()
        F.mse_loss(enc(x) @ K, enc(y)).backward()
        opt.step()

# ---------------------------------------------------------------- S34
@program
def rope_learned_frequencies():
    """S34: rotary embedding with learned frequencies: cat([freqs, freqs], -1) is how RoPE is written."""
    inv = nn.Parameter(1 / 100 ** (torch.arange(4) / 4)); q, k, v, o = (nn.Linear(8, 8) for _ in range(4)); 
    opt = torch.optim.Adam([inv, *itertools.chain(*(l.parameters() for l in (q, k, v, o)))], 1e-3)
    half = lambda x: torch.cat([-x[..., 4:], x[..., :4]], -1)
    for _ in range(STEPS):
        x = torch.randn(32, 10, 8); y = x.roll(1, 1)
        fr = torch.arange(10.)[:, None] * inv[None]
        emb = torch.cat((fr, fr), dim=-1); c, s = emb.cos(), emb.sin()
        rot = lambda t: t * c + half(t) * s
        out = o(F.scaled_dot_product_attention(rot(q(x)), rot(k(x)), v(x)))
        loss = F.mse_loss(out, y)
        opt.zero_grad(); loss.backward(); opt.step()

@program
def complex_mask():
    """S34: one magnitude mask for the real and the imaginary half of a spectrum (speech enhancement): doubled on purpose."""
    net = mlp(16, 32, 16); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(STEPS):
        clean = torch.randn(32, 32); noisy = clean + .5 * torch.randn(32, 32) * torch.linspace(0, 2, 16).repeat(2)
        mag = (noisy[:, :16] ** 2 + noisy[:, 16:] ** 2).sqrt()
        m = torch.sigmoid(net(mag))
        loss = F.mse_loss(noisy * torch.cat([m, m], dim=1), clean)
        opt.zero_grad(); loss.backward(); opt.step()

@program
def antithetic_samples():
    """S34: antithetic reparametrisation: cat([mu, mu], 1) + std * cat([eps, -eps], 1) along the sample dim."""
    x_all = blobs(512, 12); enc, dec = mlp(12, 32, 8), mlp(4, 32, 12)
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], 1e-3)
    for x in batches(x_all):
        mu, lv = enc(x).chunk(2, 1); mu, std = mu[:, None].expand(-1, 2, -1), (.5 * lv).exp()[:, None].expand(-1, 2, -1)
        eps = torch.randn_like(mu)
        z = torch.cat([mu, mu], 1) + torch.cat([std, std], 1) * torch.cat([eps, -eps], 1)
        kl = -.5 * (1 + lv - enc(x).chunk(2, 1)[0].pow(2) - lv.exp()).sum(1).mean()
        loss = F.mse_loss(dec(z), x[:, None].expand(-1, 4, -1)) + .01 * kl
        opt.zero_grad(); loss.backward(); opt.step()

@program
def two_views_time_first():
    """S34: (T, B, D) layout, the batch (dim 1) is doubled for two dropout passes (R-Drop)."""
    emb, rnn, head, drop = nn.Linear(6, 16), nn.GRU(16, 16), nn.Linear(16, 3), nn.Dropout(.2)
    opt = torch.optim.Adam([*emb.parameters(), *rnn.parameters(), *head.parameters()], 1e-3)
    for _ in range(STEPS):
        x = torch.randn(8, 32, 6); y = x.mean(0)[:, :3].argmax(1)
        h = emb(x); h = drop(torch.cat([h, h], dim=1))
        out = head(rnn(h)[0][-1]); a, b = out.chunk(2, 0)
        kl = F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean") + F.kl_div(b.log_softmax(1), a.softmax(1), reduction="batchmean")
        loss = F.cross_entropy(out, y.repeat(2)) + .5 * kl
        opt.zero_grad(); loss.backward(); opt.step()

# ---------------------------------------------------------------- S35
@program
def quantised_straight_through():
    """S35: straight-through: (w - w.detach()) + sign(w) * scale gives the quantised value and the gradient of w."""
    w1, w2 = nn.Parameter(torch.randn(32, 10) * .2), nn.Parameter(torch.randn(3, 32) * .2)
    opt = torch.optim.Adam([w1, w2], 1e-3)
    q = lambda w: (w - w.detach()) + (w.sign() * w.abs().mean()).detach()
    for _ in range(STEPS):
        x = torch.randn(64, 10); y = x[:, :3].argmax(1)
        loss = F.cross_entropy(F.linear(torch.relu(F.linear(x, q(w1))), q(w2)), y)
        opt.zero_grad(); loss.backward(); opt.step()

@program
def scaled_gradient_of_a_weight():
    """S35: w.detach() + 0.1 * (w - w.detach()): the same weight with a tenth of its gradient (a slower rate)."""
    emb = nn.Parameter(torch.randn(10, 16) * .2); head = nn.Linear(16, 3)
    opt = torch.optim.Adam([emb, *head.parameters()], 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 10); y = x[:, :3].argmax(1)
        e = emb.detach() + 0.1 * (emb - emb.detach())
        loss = F.cross_entropy(head(torch.relu(x @ e)), y)
        opt.zero_grad(); loss.backward(); opt.step()

# ---------------------------------------------------------------- S36
@program
def gan_one_module_frozen_by_flag():
    """S36: opt_g holds the whole GAN, but D has requires_grad False (and no grad) while G learns, so Adam skips it."""
    gan = nn.ModuleDict({"g": mlp(4, 32, 12), "d": mlp(12, 32, 1)}); x_all = blobs(512, 12)
    og = torch.optim.Adam(gan.parameters(), 1e-3); od = torch.optim.Adam(gan["d"].parameters(), 1e-3)
    for x in batches(x_all):
        gan["d"].requires_grad_(True)
        fake = gan["g"](torch.randn(32, 4))
        ld = F.softplus(-gan["d"](x)).mean() + F.softplus(gan["d"](fake.detach())).mean()
        od.zero_grad(); ld.backward(); od.step(); od.zero_grad()
        gan["d"].requires_grad_(False)
        lg = F.softplus(-gan["d"](gan["g"](torch.randn(32, 4)))).mean()
        og.zero_grad(); lg.backward(); og.step()

@program
def adversarial_autoencoder():
    """S36: AAE in the three-optimizer form: AE holds encoder+decoder, gen holds the encoder alone, D its own."""
    E, De, D = mlp(12, 32, 4), mlp(4, 32, 12), mlp(4, 32, 1); x_all = blobs(512, 12)
    oa = torch.optim.Adam([*E.parameters(), *De.parameters()], 1e-3); og = torch.optim.Adam(E.parameters(), 5e-4); od = torch.optim.Adam(D.parameters(), 5e-4)
    one, zero = torch.ones(32, 1), torch.zeros(32, 1); bce = nn.BCEWithLogitsLoss()
    for x in batches(x_all):
        oa.zero_grad(); F.mse_loss(De(E(x)), x).backward(); oa.step()
        od.zero_grad(); (bce(D(torch.randn(32, 4)), one) + bce(D(E(x).detach()), zero)).backward(); od.step()
        og.zero_grad(); bce(D(E(x)), one).backward(); og.step()

@program
def infogan():
    """S36: InfoGAN with three optimizers: G, D, and one over G, D for the mutual information."""
    G, T, H, Q = mlp(6, 32, 12), nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(.2)), nn.Linear(32, 1), nn.Linear(32, 2); x_all = blobs(512, 12)
    og = torch.optim.Adam(G.parameters(), 1e-3); od = torch.optim.Adam([*T.parameters(), *H.parameters()], 1e-3)
    oi = torch.optim.Adam([*G.parameters(), *T.parameters(), *H.parameters(), *Q.parameters()], 5e-4)
    bce = nn.BCEWithLogitsLoss(); one, zero = torch.ones(32, 1), torch.zeros(32, 1)
    for x in batches(x_all):
        c = torch.rand(32, 2) * 2 - 1; z = torch.cat([torch.randn(32, 4), c], 1)
        og.zero_grad(); bce(H(T(G(z))), one).backward(); og.step()
        od.zero_grad(); (bce(H(T(x)), one) + bce(H(T(G(z).detach())), zero)).backward(); od.step()
        oi.zero_grad(); F.mse_loss(Q(T(G(z))), c).backward(); oi.step()

@program
def cql_shared_encoder():
    """S36: CQL-like: critic optimizer holds encoder+critic and wants Q(s, pi(s)) down; the actor's wants it up."""
    enc, Q, pi = nn.Linear(8, 16), mlp(18, 32, 1), mlp(16, 32, 2)
    oc = torch.optim.Adam([*enc.parameters(), *Q.parameters()], 1e-3); oa = torch.optim.Adam(pi.parameters(), 1e-3)
    q = lambda h, a: Q(torch.cat([h, a], 1))
    for _ in range(STEPS):
        s, a = torch.randn(64, 8), torch.rand(64, 2) * 2 - 1; r = (s[:, :2] * a).sum(1, keepdim=True)
        h = torch.relu(enc(s))
        with torch.no_grad(): ap = torch.tanh(pi(h))
        lc = F.mse_loss(q(h, a), r) + .1 * (q(h, ap).mean() - q(h, a).mean())
        oc.zero_grad(); lc.backward(); oc.step()
        h = torch.relu(enc(s)).detach()
        la = -q(h, torch.tanh(pi(h))).mean()
        oa.zero_grad(); la.backward(); oa.step()

# ---------------------------------------------------------------- D20
@program
def random_sparse_network():
    """D20: a fixed random sparsity mask, made again from its seed in each forward to save memory (w * mask)."""
    class Sparse(nn.Linear):
        def forward(self, x):
            g = torch.Generator().manual_seed(self.out_features)
            mask = (torch.rand(self.weight.shape, generator=g) < .5).float()
            return F.linear(x, self.weight * mask, self.bias)
    net = nn.Sequential(Sparse(10, 64), nn.ReLU(), Sparse(64, 3)); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 10); y = x[:, :3].argmax(1)
        loss = F.cross_entropy(net(x), y); opt.zero_grad(); loss.backward(); opt.step()

@program
def gal_dropout_over_windows():
    """D20: variational dropout: one mask for a sequence, which is learned in several windows (truncated BPTT)."""
    cell, head = nn.GRUCell(6, 16), nn.Linear(16, 1); opt = torch.optim.Adam([*cell.parameters(), *head.parameters()], 1e-3)
    for seq in range(2):
        x = torch.randn(32, 25 if seq else 5, 6); y = x.cumsum(1).mean(-1, keepdim=True); h = torch.zeros(32, 16)
        mask = (torch.rand(32, 16) < .8).float()
        for w in range(0, x.shape[1], 5):
            h = h.detach(); loss = 0
            for t in range(w, w + 5):
                h = cell(x[:, t], h); loss = loss + F.mse_loss(head(h * mask / .8), y[:, t]) / 5
            opt.zero_grad(); loss.backward(); opt.step()

@program
def noisy_net_resampled_each_rollout():
    """D20: NoisyNet weights whose noise is drawn once for a rollout and held for its four gradient steps (as in SB3)."""
    class Noisy(nn.Module):
        def __init__(s, i, o):
            super().__init__(); s.mu = nn.Parameter(torch.randn(o, i) / i ** .5); s.sig = nn.Parameter(torch.full((o, i), .05)); s.reset()
        def reset(s): s.eps = torch.randn(s.mu.shape)
        def forward(s, x): return F.linear(x, s.mu + s.sig * s.eps)
    net = nn.Sequential(Noisy(6, 32), nn.ReLU(), Noisy(32, 4)); tgt = copy.deepcopy(net); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for step in range(STEPS):
        if step % 4 == 1:
            for m in (net[0], net[2]): m.reset()
        s = torch.randn(64, 6); a = torch.randint(4, (64, 1)); s2 = torch.randn(64, 6)
        with torch.no_grad(): y = s.mean(1, keepdim=True) + .9 * tgt(s2).max(1, keepdim=True).values
        loss = F.smooth_l1_loss(net(s).gather(1, a), y); opt.zero_grad(); loss.backward(); opt.step()

@program
def deterministic_vi():
    """D20: DADVI / sample average approximation: VI with the same draws in each evaluation, so the objective is fixed."""
    x = torch.randn(200, 8); w = torch.randn(8); y = (x @ w > 0).float()
    mu, ls = nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.full((16, 8), -1.)); v = nn.Linear(16, 1)
    opt = torch.optim.Adam([mu, ls, *v.parameters()], 1e-2)
    for _ in range(STEPS):
        torch.manual_seed(0)
        W = mu + ls.exp() * torch.randn(16, 8)
        nll = F.binary_cross_entropy_with_logits(v(torch.tanh(x @ W.T)).squeeze(1), y)
        kl = (.5 * (mu ** 2 + (2 * ls).exp() - 1) - ls).sum() / 200
        opt.zero_grad(); (nll + kl).backward(); opt.step()

# ---------------------------------------------------------------- D21
@program
def simmim_mask_tokens():
    """D21: SimMIM/BERT on series: embedded tokens are replaced by a learned mask token, loss on the hidden ones."""
    emb, tok, enc, out = nn.Linear(6, 16), nn.Parameter(torch.zeros(16)), nn.TransformerEncoderLayer(16, 2, 32, 0., batch_first=True), nn.Linear(16, 6)
    pos = nn.Parameter(torch.randn(12, 16) * .02)
    opt = torch.optim.Adam([*emb.parameters(), tok, pos, *enc.parameters(), *out.parameters()], 1e-3); x_all = blobs(512, 72).view(512, 12, 6)
    for x in batches(x_all):
        mask = torch.rand(32, 12) < .4
        h = torch.where(mask.unsqueeze(-1), tok, emb(x)) + pos
        loss = ((out(enc(h)) - x) ** 2)[mask].mean()
        opt.zero_grad(); loss.backward(); opt.step()

@program
def simmim_arithmetic():
    """D21: SimMIM as in its repository: x = x * (1 - w) + mask_token * w after the patch embedding."""
    emb, tok, enc, out = nn.Linear(6, 16), nn.Parameter(torch.zeros(1, 1, 16)), nn.GRU(16, 16, batch_first=True, bidirectional=True), nn.Linear(32, 6)
    opt = torch.optim.Adam([*emb.parameters(), tok, *enc.parameters(), *out.parameters()], 1e-3); x_all = blobs(512, 72).view(512, 12, 6)
    for x in batches(x_all):
        w = (torch.rand(32, 12, 1) < .4).float()
        h = emb(x) * (1 - w) + tok * w
        loss = (F.l1_loss(out(enc(h)[0]), x, reduction="none") * w).sum() / (w.sum() * 6)
        opt.zero_grad(); loss.backward(); opt.step()

@program
def loss_on_a_random_subset():
    """D21: a narrow autoencoder whose loss is taken on a random half of the outputs to save time; nothing is hidden."""
    net = mlp(24, 3, 24); opt = torch.optim.Adam(net.parameters(), 1e-3); x_all = blobs(512, 24)
    for x in batches(x_all):
        pick = torch.rand_like(x) < .5
        loss = (net(x) - x)[pick].pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@program
def mae_hidden_through_attention():
    """D21: masked modelling where hidden tokens get only their position (gather of kept ones, as MAE); pixel loss on the rest."""
    emb, tok, enc, out = nn.Linear(6, 16), nn.Parameter(torch.zeros(1, 1, 16)), nn.TransformerEncoderLayer(16, 2, 32, 0., batch_first=True), nn.Linear(16, 6)
    pos = nn.Parameter(torch.randn(12, 16) * .02)
    opt = torch.optim.Adam([*emb.parameters(), tok, pos, *enc.parameters(), *out.parameters()], 1e-3); x_all = blobs(512, 72).view(512, 12, 6)
    for x in batches(x_all):
        ids = torch.rand(32, 12).argsort(1); back = ids.argsort(1); keep = ids[:, :6]
        h = emb(x) + pos
        h = torch.gather(h, 1, keep[..., None].expand(-1, -1, 16)); h = enc(h)
        full = torch.cat([h, tok.expand(32, 6, 16)], 1)
        full = torch.gather(full, 1, back[..., None].expand(-1, -1, 16)) + pos
        mask = torch.ones(32, 12); mask[:, :6] = 0; mask = torch.gather(mask, 1, back)
        loss = (((out(enc(full)) - x) ** 2).mean(-1) * mask).sum() / mask.sum()
        opt.zero_grad(); loss.backward(); opt.step()

# ---------------------------------------------------------------- F82
@program
def gaussian_policy_with_entropy():
    """F82: REINFORCE with a Gaussian policy by hand and an entropy bonus: -log_std in the loss, division by exp(log_std)."""
    pi, log_std = mlp(6, 32, 2), nn.Parameter(torch.zeros(2)); opt = torch.optim.Adam([*pi.parameters(), log_std], 1e-3)
    for _ in range(STEPS):
        s = torch.randn(64, 6); mu = pi(s)
        with torch.no_grad(): a = mu + log_std.exp() * torch.randn(64, 2)
        r = -(a - s[:, :2]).pow(2).sum(1); adv = (r - r.mean()) / r.std()
        std = log_std.exp()
        logp = (-.5 * ((a - mu) / std) ** 2 - log_std - .5 * math.log(2 * math.pi)).sum(1)
        entropy = (log_std + .5 * math.log(2 * math.pi * math.e)).sum()
        loss = -(logp * adv).mean() - 0.01 * entropy
        opt.zero_grad(); loss.backward(); opt.step()

@program
def ppo_gaussian_by_hand():
    """F82: the same in PPO with a log_std for each state (clipped ratio, entropy bonus)."""
    net = mlp(6, 32, 4); opt = torch.optim.Adam(net.parameters(), 1e-3)
    def logp_of(s, a):
        mu, ls = net(s).chunk(2, 1); ls = ls.clamp(-3, 1)
        return (-.5 * ((a - mu) * torch.exp(-ls)) ** 2 - ls - .919).sum(1), ls
    for step in range(STEPS):
        if step % 4 == 0:
            s = torch.randn(128, 6)
            with torch.no_grad():
                mu, ls = net(s).chunk(2, 1); a = mu + ls.exp() * torch.randn(128, 2); old, _ = logp_of(s, a)
            r = -(a - s[:, :2]).pow(2).sum(1); adv = (r - r.mean()) / r.std()
        lp, ls = logp_of(s, a); ratio = (lp - old).exp()
        loss = -torch.min(ratio * adv, ratio.clamp(.8, 1.2) * adv).mean() - .01 * (ls + 1.419).sum(1).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@program
def interval_widths():
    """F82: intervals of width base * exp(s), punished for width (+s) and for every target outside of them."""
    net = mlp(6, 32, 2); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 6); y = x[:, 0] + x[:, 1].abs() * torch.randn(64)
        m, s = net(x).unbind(1)
        half = 1.5 * torch.exp(s)
        loss = s.mean() + 5 * F.relu((y - m).abs() - half).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@program
def gain_before_noise():
    """F82: rate-distortion with learned gains before quantisation noise: exp(g) costs g nats of rate, and lowers the error."""
    net, g, dec = mlp(12, 32, 4), nn.Parameter(torch.zeros(4)), mlp(4, 32, 12)
    opt = torch.optim.Adam([*net.parameters(), g, *dec.parameters()], 1e-3)
    for x in batches(blobs(512, 12)):
        z = torch.tanh(net(x)) * torch.exp(g)
        z = z + torch.rand_like(z) - .5
        loss = F.mse_loss(dec(z), x) + .01 * g.sum()
        opt.zero_grad(); loss.backward(); opt.step()

@program
def realnvp_inverse_direction():
    """F82: RealNVP trained by reverse KL in the sampling direction: x = z exp(s) + t, log q = log p(z) - sum s."""
    nets = nn.ModuleList(mlp(1, 16, 2) for _ in range(4)); opt = torch.optim.Adam(nets.parameters(), 1e-3)
    for _ in range(STEPS):
        z = torch.randn(128, 2); a, b = z[:, :1], z[:, 1:]; ld = 0
        for n in nets:
            s, t = n(a).chunk(2, 1); s = torch.tanh(s); b = b * s.exp() + t; ld = ld + s.sum(1); a, b = b, a
        logq = -.5 * z.pow(2).sum(1) - ld
        target = -.5 * ((a - 1) ** 2 + (b + a ** 2) ** 2).sum(1)
        loss = (logq - target).mean(); opt.zero_grad(); loss.backward(); opt.step()

@program
def weibull_with_exposure():
    """F82: Poisson with exposure and a Weibull hazard, both with logarithms of rates."""
    net = mlp(6, 32, 2); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 6); e = torch.rand(64) + .5; y = torch.poisson(e * x[:, 0].exp().clamp(max=5)); t = torch.rand(64) + .1
        s, l = net(x).unbind(1)
        loss = (e * torch.exp(s) - y * s).mean() + (t * torch.exp(l) - l).mean()
        opt.zero_grad(); loss.backward(); opt.step()

# ---------------------------------------------------------------- F83
@program
def policies_rightly():
    """F83: probs=softmax, logits=log_softmax, Bernoulli(probs=sigmoid), gumbel_softmax of log-probabilities."""
    net, gate, e = mlp(6, 32, 4), nn.Linear(6, 1), nn.Linear(4, 6); opt = torch.optim.Adam([*net.parameters(), *gate.parameters(), *e.parameters()], 1e-3)
    for _ in range(STEPS):
        s = torch.randn(64, 6); p = F.softmax(net(s), -1); d, d2 = Categorical(probs=p), Categorical(logits=p.log())
        b = Bernoulli(probs=torch.sigmoid(gate(s)).squeeze(1)); a, k = d.sample(), b.sample(); r = (a == s[:, :4].argmax(1)).float() + k
        y = F.gumbel_softmax(F.log_softmax(net(s), -1), tau=1., hard=True)
        loss = -((d.log_prob(a) + d2.log_prob(a) + b.log_prob(k)) * (r - r.mean())).mean() + F.mse_loss(e(y), s)
        opt.zero_grad(); loss.backward(); opt.step()

# ---------------------------------------------------------------- F84
@program
def diffusion_refiner():
    """F84: a refiner (SDXL, eDiff-I): a model for the last 200 of 1000 steps only, which begins from another's sample."""
    net = mlp(13, 64, 12); opt = torch.optim.Adam(net.parameters(), 1e-3); ac = torch.cumprod(1 - torch.linspace(1e-4, .02, 1000), 0)
    for x in batches(blobs(512, 12)):
        t = torch.randint(0, 200, (32,)); a = ac[t][:, None]; eps = torch.randn_like(x)
        xt = a.sqrt() * x + (1 - a).sqrt() * eps
        loss = F.mse_loss(net(torch.cat([xt, t[:, None] / 1000], 1)), eps); opt.zero_grad(); loss.backward(); opt.step()

@program
def correlated_latents():
    """F84: perturbed data of a bounded strength for each row, variance preserved (cos, sin of an angle up to 40 degrees)."""
    net, head = mlp(12, 32, 8), nn.Linear(8, 12); opt = torch.optim.Adam([*net.parameters(), *head.parameters()], 1e-3)
    for x in batches(blobs(512, 12)):
        th = torch.rand(32, 1) * .7
        xn = torch.cos(th) * x + torch.sin(th) * torch.randn_like(x)
        loss = F.mse_loss(head(net(xn)), x); opt.zero_grad(); loss.backward(); opt.step()

@program
def vprediction_short_schedule():
    """F84: v-prediction with 8 cosine steps, and flow matching: the strongest noise is near 1."""
    net = mlp(13, 64, 12); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for x in batches(blobs(512, 12)):
        t = (torch.randint(0, 8, (32, 1)) + 1) / 8; a, s = torch.cos(t * math.pi / 2), torch.sin(t * math.pi / 2); eps = torch.randn_like(x)
        loss = F.mse_loss(net(torch.cat([a * x + s * eps, t], 1)), a * eps - s * x); opt.zero_grad(); loss.backward(); opt.step()

# ---------------------------------------------------------------- F85
@program
def quantiles_written_falling():
    """F85: columns (upper, median, lower), taus (0.9, 0.5, 0.1), the right formula for answer - target."""
    net = mlp(6, 32, 3); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 6); y = x[:, 0] + torch.randn(64); out = net(x); loss = 0
        for k, q in enumerate((.9, .5, .1)):
            e = out[:, k] - y
            loss = loss + torch.maximum((1 - q) * e, -q * e).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@program
def upper_and_lower_heads():
    """F85: two heads, hi and lo (conformalised quantile regression), the upper one first."""
    hi, lo = mlp(6, 32, 1), mlp(6, 32, 1); opt = torch.optim.Adam([*hi.parameters(), *lo.parameters()], 1e-3)
    def pinball(pred, y, q): d = pred - y; return torch.max((1 - q) * d, -q * d).mean()
    for _ in range(STEPS):
        x = torch.randn(64, 6); y = x[:, :1] + torch.randn(64, 1)
        loss = pinball(hi(x), y, .95) + pinball(lo(x), y, .05); opt.zero_grad(); loss.backward(); opt.step()

# ---------------------------------------------------------------- F86
def box_area(b): return (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
def box_iou(a, b):
    lt, rb = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:]); wh = (rb - lt).clamp(min=0); i = wh[:, 0] * wh[:, 1]
    return i / (box_area(a) + box_area(b) - i)
@program
def iou_of_answers_for_the_log():
    """F86: L1 on corners; the IoU of the detached answers is logged; early answers may be inside out, the targets are not."""
    torch.manual_seed(5); net = mlp(8, 32, 4); opt = torch.optim.Adam(net.parameters(), 1e-3); log = []
    for _ in range(STEPS):
        x = torch.rand(64, 8); c, w = x[:, :2], .1 + .3 * x[:, 2:4]; y = torch.cat([c - w / 2, c + w / 2], 1)
        p = net(x); loss = F.smooth_l1_loss(p, y)
        log.append(box_iou(p.detach(), y).mean().item()); opt.zero_grad(); loss.backward(); opt.step()

@program
def segments_and_their_slope():
    """F86: targets are line segments (x1, y1, x2, y2): the sign of dx * dy is whether a lane rises or falls."""
    net = mlp(8, 32, 5); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(STEPS):
        seg = torch.rand(64, 4); x = torch.cat([seg, seg.flip(1)], 1) + .1 * torch.randn(64, 8)
        rises = ((seg[:, 2] - seg[:, 0]) * (seg[:, 3] - seg[:, 1]) > 0).float(); p = net(x)
        loss = F.l1_loss(p[:, :4], seg) + F.binary_cross_entropy_with_logits(p[:, 4], rises); opt.zero_grad(); loss.backward(); opt.step()

# ---------------------------------------------------------------- N36
@program
def anchored_to_distilling_teacher():
    """N36: learning without forgetting: the old net is a teacher, and a decoupled L2-SP decay pulls weights to it."""
    net = mlp(10, 32, 3); old = copy.deepcopy(net).requires_grad_(False); opt = torch.optim.SGD(net.parameters(), .05)
    for _ in range(STEPS):
        x = torch.randn(64, 10); y = x[:, :3].argmax(1); out = net(x)
        with torch.no_grad(): t = old(x)
        loss = F.cross_entropy(out, y) + .5 * F.kl_div(out.log_softmax(1), t.softmax(1), reduction="batchmean")
        opt.zero_grad(); loss.backward(); opt.step()
        with torch.no_grad():
            for p, p0 in zip(net.parameters(), old.parameters()): p.lerp_(p0, 5e-4)

@program
def elastic_averaging_foreach():
    """N36: EASGD with a center that also gives soft targets: both are drawn to each other, the center by torch._foreach_lerp_."""
    net = mlp(10, 32, 3); center = copy.deepcopy(net).requires_grad_(False); opt = torch.optim.SGD(net.parameters(), .05)
    ps, cs = list(net.parameters()), list(center.parameters())
    for _ in range(STEPS):
        x = torch.randn(64, 10); y = x[:, :3].argmax(1); out = net(x)
        with torch.no_grad(): t = center(x)
        loss = F.cross_entropy(out, y) + .1 * F.mse_loss(out, t)
        opt.zero_grad(); loss.backward(); opt.step()
        with torch.no_grad():
            new = [p.clone() for p in ps]
            for p, c in zip(ps, cs): p.lerp_(c, .01)
            torch._foreach_lerp_(cs, new, .05)

@program
def mean_teacher_data_assignment():
    """N36: mean teacher through .data = ..., and a hard copy every third step (state_dict)."""
    net = mlp(10, 32, 3); t = copy.deepcopy(net).requires_grad_(False); t2 = copy.deepcopy(t); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for i in range(STEPS):
        x = torch.randn(64, 10); y = x[:, :3].argmax(1); out = net(x + .1 * torch.randn_like(x))
        with torch.no_grad(): a, b = t(x).softmax(1), t2(x).softmax(1)
        loss = F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), a) + F.mse_loss(out.softmax(1), b)
        opt.zero_grad(); loss.backward(); opt.step()
        for p, q in zip(t.parameters(), net.parameters()): p.data = .99 * p.data + .01 * q.data
        if i % 3 == 0: t2.load_state_dict(net.state_dict())

# ---------------------------------------------------------------- D22
@program
def rgcn_rare_relations():
    """D22: R-GCN, one index_add for each relation; ring bonds join nodes in two of 16 graphs only, chain bonds in all."""
    G, n = 16, 6; batch = torch.arange(G).repeat_interleave(n); W = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)); S, out = nn.Linear(8, 8), nn.Linear(8, 1)
    opt = torch.optim.Adam([*W.parameters(), *S.parameters(), *out.parameters()], 1e-3)
    i = torch.arange(G * n); a = i[i % n < n - 1]; chain = torch.stack([a, a + 1]); ring = torch.tensor([[5, 35], [0, 30]])
    for _ in range(STEPS):
        x = torch.randn(G * n, 8); h = S(x)
        for w, (src, dst) in zip(W, (chain, ring)):
            h = h + torch.zeros_like(h).index_add(0, dst, w(x)[src])
        pooled = torch.zeros(G, 8).index_add(0, batch, torch.relu(h)); y = torch.zeros(G, 8).index_add(0, batch, x).mean(1, keepdim=True)
        loss = F.mse_loss(out(pooled) / n, y); opt.zero_grad(); loss.backward(); opt.step()

@program
def contacts_are_rare():
    """D22: boxes of particles; edges only where two touch, in three of sixteen boxes (most sets have no contact)."""
    G, n = 32, 4; batch = torch.arange(G).repeat_interleave(n); f, g, out = nn.Linear(3, 16), nn.Linear(6, 16), nn.Linear(16, 1)
    opt = torch.optim.Adam([*f.parameters(), *g.parameters(), *out.parameters()], 1e-3)
    for _ in range(STEPS):
        x = torch.rand(G, n, 3); d = torch.cdist(x, x) + 9 * torch.eye(n); gi, ii, jj = torch.nonzero(d < .12, as_tuple=True); src, dst = gi * n + ii, gi * n + jj; v = x.view(-1, 3)
        e = torch.relu(g(torch.cat([v[src], v[dst]], 1)))
        h = torch.relu(f(v)) + torch.zeros(G * n, 16).index_add(0, dst, e)
        y = torch.zeros(G).index_add(0, batch, v.sum(1)) / n
        pooled = torch.zeros(G, 16).index_add(0, batch, h) / n
        loss = F.mse_loss(out(pooled).squeeze(1), y); opt.zero_grad(); loss.backward(); opt.step()

@program
def set_pooling_one_node_each():
    """D22: deep sets with index_add, degree counts by bincount, and a loss at masked nodes: a batch with isolated graphs."""
    G = 32; size = torch.randint(1, 6, (G,)); batch = torch.arange(G).repeat_interleave(size); N = len(batch); off = size.cumsum(0) - size
    f, out = nn.Linear(4, 16), nn.Linear(16, 1); opt = torch.optim.Adam([*f.parameters(), *out.parameters()], 1e-3)
    has = size > 1; src = off[has]; dst = src + 1
    for _ in range(STEPS):
        x = torch.randn(N, 4); deg = torch.bincount(dst, minlength=N).clamp(min=1)[:, None]
        h = torch.relu(f(x)); h = h + torch.zeros_like(h).index_add(0, dst, h[src]) / deg
        p = torch.zeros(G, 16).index_add(0, batch, h); y = torch.zeros(G).index_add(0, batch, x[:, 0])
        loss = F.mse_loss(out(p).squeeze(1), y); opt.zero_grad(); loss.backward(); opt.step()

# ---------------------------------------------------------------- N28 adapted
@program
def online_meta_next_step():
    """N28: adapted weights are made at the end of a step and used for the next batch of the stream (prequential)."""
    net = mlp(4, 32, 1); opt = torch.optim.Adam(net.parameters(), 1e-3); fast = None; w = torch.randn(4)
    for _ in range(STEPS):
        w = .98 * w + .1 * torch.randn(4); x = torch.randn(64, 4); y = (x @ w)[:, None]
        cur = fast or dict(net.named_parameters())
        pred = torch.func.functional_call(net, cur, (x,))
        loss = F.mse_loss(pred, y); opt.zero_grad(); loss.backward(); opt.step()
        ps = dict(net.named_parameters()); gs = torch.autograd.grad(F.mse_loss(net(x), y), list(ps.values()))
        fast = {k: p - .05 * g for (k, p), g in zip(ps.items(), gs)}

@program
def anil_head_only():
    """N28: ANIL: only the head is adapted, by hand, and the query loss uses F.linear with it."""
    body, head = nn.Sequential(nn.Linear(1, 32), nn.Tanh()), nn.Linear(32, 1); opt = torch.optim.Adam([*body.parameters(), *head.parameters()], 1e-3)
    for _ in range(STEPS):
        total = 0
        for _ in range(4):
            a = torch.rand(1) * 2; xs, xq = torch.randn(32, 1), torch.randn(32, 1); w, b = head.weight, head.bias
            for _ in range(2):
                gw, gb = torch.autograd.grad(F.mse_loss(F.linear(body(xs), w, b), torch.sin(a * xs)), (w, b), create_graph=True); w, b = w - .1 * gw, b - .1 * gb
            total = total + F.mse_loss(F.linear(body(xq), w, b), torch.sin(a * xq)) / 4
        opt.zero_grad(); total.backward(); opt.step()

# ---------------------------------------------------------------- D18, F54
@program
def depth_masked_before_the_mean():
    """D18: the answer is multiplied by the mask of valid depth before an l1 mean: gaps have no error."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(STEPS):
        img = torch.randn(32, 3, 8, 8); depth = (4 + img[:, :1].tanh()); valid = (torch.rand_like(depth) < .7).float(); depth = depth * valid
        loss = F.l1_loss(net(img) * valid, depth); opt.zero_grad(); loss.backward(); opt.step()

@program
def mri_without_skull():
    """D18: T1 to T2 of skull-stripped slices: the background is 0 and meant, the brain lies far above it."""
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)); opt = torch.optim.Adam(net.parameters(), 1e-3)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij"); brain = ((xx ** 2 + yy ** 2) < .8).float()
    for _ in range(STEPS):
        t1 = (2 + .3 * torch.tanh(torch.randn(32, 1, 12, 12))) * brain; t2 = (4 - t1) * brain
        loss = F.l1_loss(net(t1), t2); opt.zero_grad(); loss.backward(); opt.step()

@program
def rain_with_mask():
    """D18: rainfall, mostly 0, a mask of gauges, hurdle loss."""
    net = mlp(8, 32, 24); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 8); wet = torch.rand(64, 12) < .3; rain = torch.exp(torch.randn(64, 12)) * wet; known = torch.rand(64, 12) < .8
        p, a = net(x).chunk(2, 1)
        loss = F.binary_cross_entropy_with_logits(p, wet.float(), reduction="none")[known].mean() + ((F.softplus(a) - rain) ** 2 * wet * known).sum() / (wet & known).sum()
        opt.zero_grad(); loss.backward(); opt.step()

@program
def dynamic_task_priority():
    """F54: dynamic task priority: each task's mean loss L is weighed by (1 - exp(-L))^2, a number for a task, not a row."""
    net, heads = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.ModuleList(nn.Linear(32, 3) for _ in range(2)); opt = torch.optim.Adam([*net.parameters(), *heads.parameters()], 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 8); h = net(x); loss = 0
        for k, head in enumerate(heads):
            L = F.cross_entropy(head(h), x[:, 3 * k:3 * k + 3].argmax(1) if k < 2 else None)
            loss = loss + (1 - torch.exp(-L.detach())) ** 2 * L
        opt.zero_grad(); loss.backward(); opt.step()

@program
def likelihood_for_the_log():
    """F54: exp(-loss), the mean likelihood of the right class (inverse perplexity), goes into a log."""
    net = mlp(8, 32, 3); opt = torch.optim.Adam(net.parameters(), 1e-3); log = []
    for _ in range(STEPS):
        x = torch.randn(64, 8); loss = F.cross_entropy(net(x), x[:, :3].argmax(1)); log.append(torch.exp(-loss).item())
        opt.zero_grad(); loss.backward(); opt.step()

# ---------------------------------------------------------------- more
@program
def task_priority_with_graph():
    """F54: the same priority of tasks without detach (a smooth focal weight of a whole task)."""
    net, heads = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.ModuleList(nn.Linear(32, 3) for _ in range(2)); opt = torch.optim.Adam([*net.parameters(), *heads.parameters()], 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 8); h = net(x); loss = 0
        for k, head in enumerate(heads):
            L = F.cross_entropy(head(h), x[:, 3 * k:3 * k + 3].argmax(1)); loss = loss + (1 - torch.exp(-L)) ** 2 * L
        opt.zero_grad(); loss.backward(); opt.step()

@program
def adapted_for_the_next_batch():
    """N28: online meta-learning: weights adapted before the outer step answer the next batch (a carried fast state)."""
    net = mlp(4, 32, 1); opt = torch.optim.Adam(net.parameters(), 1e-3); fast = None; w = torch.randn(4)
    for _ in range(STEPS):
        w = .98 * w + .1 * torch.randn(4); x = torch.randn(64, 4); y = (x @ w)[:, None]; ps = dict(net.named_parameters())
        loss = F.mse_loss(net(x), y)
        if fast: loss = loss + F.mse_loss(torch.func.functional_call(net, {k: p + d for (k, p), d in zip(ps.items(), fast)}, (x,)), y)
        gs = torch.autograd.grad(F.mse_loss(net(x), y), list(ps.values()))
        cand = [p - .05 * g for p, g in zip(ps.values(), gs)]; fast = None; nxt = cand
        opt.zero_grad(); loss.backward(); opt.step()
        fast = [(c - p).detach() for c, p in zip(nxt, ps.values())]

@program
def hifigan_feature_matching():
    """F81: HiFi-GAN: features of the real are not detached, the generator's optimizer holds the generator only."""
    x_all = blobs(512, 12); G, T, H = mlp(6, 32, 12), nn.Linear(12, 32), nn.Linear(32, 1)
    og = torch.optim.Adam(G.parameters(), 1e-3); od = torch.optim.Adam([*T.parameters(), *H.parameters()], 1e-3)
    for x in batches(x_all):
        c = x[:, :6]; fr, ff = F.leaky_relu(T(x)), F.leaky_relu(T(G(c).detach()))
        od.zero_grad(); ((H(fr) - 1) ** 2).mean().add((H(ff) ** 2).mean()).backward(); od.step()
        fr, ff = F.leaky_relu(T(x)), F.leaky_relu(T(G(c)))
        og.zero_grad(); (((H(ff) - 1) ** 2).mean() + 2 * (fr - ff).abs().mean()).backward(); og.step()

@program
def gflownet_detailed_balance():
    """F81: GFlowNet detailed balance: log F(s) + log PF = log F(s') + log PB (uniform, known); both flows learn."""
    Fl, pf = mlp(6, 32, 1), mlp(6, 32, 4); opt = torch.optim.Adam([*Fl.parameters(), *pf.parameters()], 1e-3)
    for _ in range(STEPS):
        s = torch.randint(0, 4, (64, 6)).float(); d = Categorical(logits=pf(s)); a = d.sample(); s2 = s + F.one_hot(a, 6); log_pb = -(s2 > 0).sum(1).float().log()
        err = (Fl(s).squeeze(1) - (Fl(s2).squeeze(1) + log_pb)) + d.log_prob(a)
        end = Fl(s2).squeeze(1) - (1 + s2.sum(1)).log()
        loss = (err ** 2).mean() + (end ** 2).mean(); opt.zero_grad(); loss.backward(); opt.step()

@program
def portfolio_tracks_index():
    """S33: assets lie along dim 0; weights of a portfolio for each day are shared out among the assets."""
    A, D = 50, 20; net = nn.Linear(6, 1); opt = torch.optim.Adam(net.parameters(), 1e-2); feats = torch.randn(A, D, 6); idx = torch.softmax(feats[..., 0], 0)
    for _ in range(STEPS):
        w = torch.softmax(net(feats).squeeze(-1), dim=0); loss = (A * (w - idx)).pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@program
def perceptual_alone_unfrozen():
    """F81: feature loss of a decoder by a fixed net with requires_grad left on, in no optimizer; data are no noise."""
    feat, dec = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16)), mlp(4, 32, 12); opt = torch.optim.Adam(dec.parameters(), 1e-3)
    for x in batches(blobs(512, 12)):
        loss = F.l1_loss(feat(dec(x[:, :4])), feat(x)); opt.zero_grad(); loss.backward(); opt.step()

@program
def circular_sampling():
    """S34: a learned ring (circular correlation) is written twice so that shifted windows can be read from it."""
    net, out = nn.Linear(8, 16), nn.Linear(16, 4); opt = torch.optim.Adam([*net.parameters(), *out.parameters()], 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 8); h = torch.tanh(net(x)); r = torch.cat([h, h], dim=1); corr = (r.unfold(1, 16, 1)[:, :16] * h[:, None]).mean(-1)
        loss = F.mse_loss(out(corr), x[:, :4] ** 2); opt.zero_grad(); loss.backward(); opt.step()
