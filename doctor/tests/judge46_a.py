"""Small training programs from many fields. Each NAME_bad / NAME_good returns a dict with the
model, its optimizer, a function for one training step and a held-out error (lower is better)."""
import copy
import itertools
import math
import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)
_SHIFT = int(os.environ.get("J46_SEED", "0"))


def seed_everything(seed):
    random.seed(seed + _SHIFT)
    np.random.seed(seed + _SHIFT)
    torch.manual_seed(seed + _SHIFT)


def endless(loader):
    while True:
        for batch in loader:
            yield batch


CASES = [
    {"name": "image_classifier", "what": "The CNN's forward returns softmax probabilities, which go into nn.CrossEntropyLoss (that applies log_softmax itself). The loss cannot fall below about 1.46 and the gradients are small, so it learns slowly and to a much worse error."},
    {"name": "vae", "what": "In vae_loss the reconstruction term is the mean over all pixels while the KL term is summed over latents per image: the KL is weighted about 200 times too heavily. The posterior collapses and reconstructions are the average image."},
    {"name": "segmentation", "what": "The (B, C, H, W) logits are reshaped to (-1, C) without moving the channels last (no permute), so each row mixes scores of different pixels and meets the wrong label. The segmentation is useless."},
    {"name": "bike_counts", "what": "The model outputs the rate itself (softplus), but nn.PoissonNLLLoss is left at its default log_input=True, which takes the output to be the log of the rate. The model learns log(rate) and predicts it as the rate."},
    {"name": "face_pairs", "what": "CosineEmbeddingLoss gets labels 1/0 instead of 1/-1; a pair labelled 0 contributes no loss, so different people are never pushed apart and all embeddings collapse to one direction."},
    {"name": "ppo", "what": "log_prob of the Gaussian policy keeps its action dimension (N, 1) (no .sum(-1)), so ratio (N, 1) times advantage (N,) broadcasts to (N, N). Every action is credited with every sample's normalised advantage (mean zero): the policy gets no useful signal."},
    {"name": "grid_detector", "what": "The convolution stages are kept in a plain Python list instead of nn.ModuleList, so their parameters are not in model.parameters() nor in the optimizer (nor do they follow train/eval): most of the backbone stays at its random initialisation."},
    {"name": "recommender", "what": "nn.Embedding.from_pretrained(item_vectors) freezes by default; the item vectors meant to be fine-tuned have requires_grad=False and never move. The error of the predicted ratings stays high."},
    {"name": "sac", "what": "The actor draws its action with dist.sample() instead of dist.rsample(): no gradient flows from the critics through the action, the actor is trained only by the entropy term on log_prob and its policy does not improve."},
    {"name": "maml", "what": "The inner loop adapts a deepcopy of the model and the query loss is backpropagated into the copy only; the gradients are never brought back to the meta-model, whose .grad stays None, so meta_opt.step() changes nothing."},
    {"name": "diffusion", "what": "The whole model is cast to bfloat16 (weights and Adam state, no fp32 master weights) with lr 1e-4: most updates are smaller than half a bfloat16 step of the weight and are rounded away, so the weights hardly move. Good: fp32 weights under autocast."},
    {"name": "td_value", "what": "The bootstrapped target r + gamma * V(s') is computed without no_grad/detach, so gradient flows through the target too (residual gradient); in a stochastic chain the learned values are strongly biased and learning is slow."},
    {"name": "forecast", "what": "TransformerEncoderLayer is built without batch_first=True while the input is (batch, time, features): attention mixes the series of a batch with one another at each time step and never looks back in time."},
    {"name": "molecules", "what": "In collate_graphs the edge indices are not shifted by the number of nodes before each graph, so all edges of the batch fall on the nodes of the first graphs: messages cross between graphs and most nodes get none."},
    {"name": "multitask", "what": "The heads are built with [nn.Linear(...)] * n_tasks: all tasks share one and the same head (tied weights), so all outputs are identical and the tasks cannot be fitted apart."},
    {"name": "pinn", "what": "The second derivative u'' is taken with torch.autograd.grad(..., retain_graph=True) without create_graph=True, so it is a constant for the loss: the residual's gradient misses the path through u'' and the equation is not solved."},
    {"name": "transfer", "what": "The validation run every 5 steps calls net.eval() and the training step never goes back to net.train(): dropout is off for the rest of the training, and the head overfits the small noisy training set."},
    {"name": "super_resolution", "what": "Low- and high-resolution images come from two DataLoaders that shuffle independently and are zipped: input and target of a pair are different images. The network learns to blur toward the mean image."},
    {"name": "keywords", "what": "scheduler.step() of a StepLR meant in epochs (step_size=3, gamma=0.5) is called after every batch: the learning rate halves every 3 batches and is practically zero after a few dozen steps."},
    {"name": "gan", "what": "Copy-paste in the discriminator block: optG.zero_grad() instead of optD.zero_grad(). The discriminator's gradients (those of its own loss and those of the generator's loss) are never cleared and pile up from step to step."},
    {"name": "point_cloud", "what": "The augmentation in CloudDataset.__getitem__ works in place (pts *= scale, pts += shift, pts += jitter) on a view of the stored tensor: the data set itself is changed at each visit and drifts and grows noisier from epoch to epoch."},
    {"name": "survival", "what": "cox_loss sorts by time ascending instead of descending, so the cumulative log-sum-exp runs over the patients who left before (not the risk set of those still under observation): the learned risk is reversed."},
]


# --------------------------------------------------------------------------------------------
# image classification
# --------------------------------------------------------------------------------------------
def make_images(n, templates, noise):
    k = templates.shape[0]
    y = torch.randint(0, k, (n,))
    x = templates[y].clone()
    dx = torch.randint(-2, 3, (n,)).tolist()
    dy = torch.randint(-2, 3, (n,)).tolist()
    x = torch.stack([torch.roll(im, (a, b), (1, 2)) for im, a, b in zip(x, dx, dy)])
    x = x + noise * torch.randn_like(x)
    return x / math.sqrt(1 + noise ** 2), y


def smooth_templates(k, c, size, coarse=4):
    t = torch.randn(k, c, coarse, coarse)
    t = F.interpolate(t, size=(size, size), mode="bilinear", align_corners=False)
    return (t - t.mean()) / t.std()


class SmallCNN(nn.Module):
    def __init__(self, num_classes, probs):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.fc = nn.Linear(32 * 4 * 4, num_classes)
        self.probs = probs

    def forward(self, x):
        x = self.features(x).flatten(1)
        x = self.fc(x)
        return F.softmax(x, dim=1) if self.probs else x


def _image_classifier(good):
    seed_everything(11)
    templates = smooth_templates(10, 3, 16)
    xtr, ytr = make_images(1500, templates, 3.5)
    xte, yte = make_images(800, templates, 3.5)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True)
    batches = endless(loader)
    model = SmallCNN(10, probs=not good)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)

    def step():
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def image_classifier_bad():
    return _image_classifier(False)


def image_classifier_good():
    return _image_classifier(True)


# --------------------------------------------------------------------------------------------
# variational autoencoder
# --------------------------------------------------------------------------------------------
def blobs(n, size=14):
    g = torch.arange(size).float()
    cx = torch.rand(n, 1, 1) * (size - 5) + 2
    cy = torch.rand(n, 1, 1) * (size - 5) + 2
    w = torch.rand(n, 1, 1) * 1.5 + 1.0
    d = (g.view(1, -1, 1) - cy) ** 2 + (g.view(1, 1, -1) - cx) ** 2
    return torch.exp(-d / (2 * w ** 2)).unsqueeze(1)


class VAE(nn.Module):
    def __init__(self, size=14, hidden=128, latent=6):
        super().__init__()
        self.size = size
        self.enc = nn.Sequential(nn.Flatten(), nn.Linear(size * size, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, size * size))

    def encode(self, x):
        h = self.enc(x)
        return self.mu(h), self.logvar(h)

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z).view(-1, 1, self.size, self.size), mu, logvar


def _vae(good):
    seed_everything(12)
    train, test = blobs(2000), blobs(400)
    loader = DataLoader(TensorDataset(train), batch_size=64, shuffle=True)
    it = endless(loader)
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    def vae_loss(logits, x, mu, logvar):
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        if good:
            rec = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / x.size(0)
        else:
            rec = F.binary_cross_entropy_with_logits(logits, x)
        return rec + kld

    def step():
        (x,) = next(it)
        logits, mu, logvar = model(x)
        loss = vae_loss(logits, x, mu, logvar)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        mu, _ = model.encode(test)
        rec = torch.sigmoid(model.dec(mu)).view_as(test)
        return F.mse_loss(rec, test).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def vae_bad():
    return _vae(False)


def vae_good():
    return _vae(True)


# --------------------------------------------------------------------------------------------
# segmentation
# --------------------------------------------------------------------------------------------

def scenes(n, size=24):
    """Background, disks and squares."""
    g = torch.arange(size).float()
    masks = torch.zeros(n, size, size, dtype=torch.long)
    for label in (1, 2):
        c = torch.rand(n, 2, 1, 1) * (size - 8) + 4
        r = torch.rand(n, 1, 1) * 3 + 2.5
        dy, dx = (g.view(1, -1, 1) - c[:, 0]).abs(), (g.view(1, 1, -1) - c[:, 1]).abs()
        inside = (dy ** 2 + dx ** 2 < r ** 2) if label == 1 else (torch.maximum(dy, dx) < r)
        masks[inside] = label
    shade = F.interpolate(torch.randn(n, 1, 3, 3), size=(size, size), mode="bilinear", align_corners=False)
    level = torch.tensor([0.0, 1.0, -1.0])[masks].unsqueeze(1)
    image = level + 0.3 * shade + 0.4 * torch.randn(n, 1, size, size)
    return (image - image.mean()) / image.std(), masks


def conv_block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class TinyUNet(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.down1 = conv_block(1, 8)
        self.down2 = conv_block(8, 16)
        self.mid = conv_block(16, 16)
        self.up1 = conv_block(32, 8)
        self.up2 = conv_block(16, 8)
        self.out = nn.Conv2d(8, n_classes, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.mid(F.max_pool2d(b, 2))
        c = F.interpolate(c, scale_factor=2)
        c = self.up1(torch.cat([c, b], 1))
        c = F.interpolate(c, scale_factor=2)
        return self.out(self.up2(torch.cat([c, a], 1)))


def _segmentation(good):
    seed_everything(13)
    n_classes = 3
    xtr, mtr = scenes(600)
    xte, mte = scenes(200)
    it = endless(DataLoader(TensorDataset(xtr, mtr), batch_size=16, shuffle=True, drop_last=True))
    net = TinyUNet(n_classes)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

    def step():
        net.train()
        x, m = next(it)
        optimizer.zero_grad()
        logits = net(x)
        if good:
            logits = logits.permute(0, 2, 3, 1)
        loss = criterion(logits.reshape(-1, n_classes), m.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        net.eval()
        with torch.no_grad():
            p = net(xte).argmax(1)
            ious = [((p == k) & (mte == k)).sum() / ((p == k) | (mte == k)).sum().clamp(min=1)
                    for k in range(n_classes)]
        net.train()
        return 1 - torch.stack(ious).mean().item()

    return {"model": net, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def segmentation_bad():
    return _segmentation(False)


def segmentation_good():
    return _segmentation(True)


# --------------------------------------------------------------------------------------------
# counts
# --------------------------------------------------------------------------------------------
class RateNet(nn.Module):
    """Expected number of rentals per hour."""

    def __init__(self, d):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.rate = nn.Linear(64, 1)

    def forward(self, x):
        return F.softplus(self.rate(self.body(x))).squeeze(-1)


def _bike_counts(good):
    seed_everything(14)
    n, d = 3000, 8
    x = torch.randn(n, d)
    w = torch.randn(d) * 0.35
    lam = torch.exp(1.2 + x @ w + 0.4 * torch.sin(2 * x[:, 0]))
    y = torch.poisson(lam.clamp(max=60))
    xtr, ytr, xte, yte = x[:2400], y[:2400], x[2400:], y[2400:]
    it = endless(DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True))
    model = RateNet(d)
    loss_fn = nn.PoissonNLLLoss(log_input=False) if good else nn.PoissonNLLLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step():
        xb, yb = next(it)
        loss = loss_fn(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        mu = model(xte).clamp(min=1e-6)
        dev = 2 * (torch.xlogy(yte, yte / mu) - (yte - mu))
        return dev.mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def bike_counts_bad():
    return _bike_counts(False)


def bike_counts_good():
    return _bike_counts(True)


# --------------------------------------------------------------------------------------------
# siamese verification
# --------------------------------------------------------------------------------------------
class PairDataset(Dataset):
    def __init__(self, feats, ids, negative_label):
        self.feats, self.ids = feats, ids
        self.by_id = {int(k): torch.nonzero(ids == k).flatten().tolist() for k in ids.unique()}
        self.negative_label = negative_label

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        me = int(self.ids[i])
        if random.random() < 0.5:
            j, label = random.choice([k for k in self.by_id[me] if k != i]), 1
        else:
            other = random.choice([k for k in self.by_id if k != me])
            j, label = random.choice(self.by_id[other]), self.negative_label
        return self.feats[i], self.feats[j], torch.tensor(label)


def _face_pairs(good):
    seed_everything(15)
    people, dim = 40, 12
    centres = torch.randn(people, dim)
    mix = torch.randn(dim + 20, 48) / math.sqrt(dim)

    def shots(ids):
        z = torch.cat([centres[ids] + 0.25 * torch.randn(len(ids), dim), 1.2 * torch.randn(len(ids), 20)], 1)
        return torch.tanh(z @ mix)

    tr_ids = torch.randint(0, 30, (1200,))
    te_ids = torch.randint(30, 40, (300,))
    xtr, xte = shots(tr_ids), shots(te_ids)
    ds = PairDataset(xtr, tr_ids, negative_label=-1 if good else 0)
    it = endless(DataLoader(ds, batch_size=64, shuffle=True, drop_last=True))
    encoder = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 32))
    criterion = nn.CosineEmbeddingLoss(margin=0.2)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)

    def step():
        a, b, label = next(it)
        loss = criterion(encoder(a), encoder(b), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        e = F.normalize(encoder(xte), dim=1)
        s = e @ e.t()
        iu = torch.triu_indices(len(e), len(e), 1)
        s = s[iu[0], iu[1]]
        same = te_ids[iu[0]] == te_ids[iu[1]]
        rank = s.argsort().argsort().double() + 1
        n1, n0 = same.sum().item(), (~same).sum().item()
        auc = (rank[same].sum().item() - n1 * (n1 + 1) / 2) / (n1 * n0)
        return 1 - auc

    return {"model": encoder, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def face_pairs_bad():
    return _face_pairs(False)


def face_pairs_good():
    return _face_pairs(True)


# --------------------------------------------------------------------------------------------
# proximal policy optimisation
# --------------------------------------------------------------------------------------------

class LineWorld:
    """Many carts on a line; each should be driven to its own goal."""

    def __init__(self, n):
        self.n = n

    def reset(self):
        self.pos = torch.rand(self.n) * 2 - 1
        self.goal = torch.rand(self.n) * 2 - 1
        return self.obs()

    def obs(self):
        return torch.stack([self.pos, self.goal], 1)

    def step(self, action):
        self.pos = (self.pos + 0.3 * action.squeeze(-1).clamp(-1, 1)).clamp(-1.5, 1.5)
        return self.obs(), -(self.pos - self.goal).abs()


class GaussianActorCritic(nn.Module):
    def __init__(self, obs_dim=2, act_dim=1, hidden=64):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, act_dim))
        self.critic = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))

    def dist(self, obs):
        return torch.distributions.Normal(self.actor(obs), self.log_std.exp())

    def value(self, obs):
        return self.critic(obs).squeeze(-1)


class PPO:
    gamma, lam, clip, horizon, epochs = 0.9, 0.95, 0.2, 8, 3

    def __init__(self, sum_dims):
        self.sum_dims = sum_dims
        self.env = LineWorld(32)
        self.net = GaussianActorCritic()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=3e-3)

    def log_prob(self, obs, act):
        logp = self.net.dist(obs).log_prob(act)
        return logp.sum(-1) if self.sum_dims else logp

    @torch.no_grad()
    def rollout(self):
        obs = self.env.reset()
        S, A, LP, R, V = [], [], [], [], []
        for _ in range(self.horizon):
            act = self.net.dist(obs).sample()
            S.append(obs)
            A.append(act)
            LP.append(self.log_prob(obs, act))
            V.append(self.net.value(obs))
            obs, rew = self.env.step(act)
            R.append(rew)
        V.append(self.net.value(obs))
        adv, gae = [], torch.zeros(self.env.n)
        for t in reversed(range(self.horizon)):
            delta = R[t] + self.gamma * V[t + 1] - V[t]
            gae = delta + self.gamma * self.lam * gae
            adv.insert(0, gae)
        adv = torch.cat(adv)
        return torch.cat(S), torch.cat(A), torch.cat(LP), adv, adv + torch.cat(V[:-1])

    def train_step(self):
        obs, act, old_logp, adv, returns = self.rollout()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(self.epochs):
            ratio = torch.exp(self.log_prob(obs, act) - old_logp)
            surr1 = ratio * adv
            surr2 = ratio.clamp(1 - self.clip, 1 + self.clip) * adv
            policy_loss = -torch.min(surr1, surr2).mean()
            value_loss = F.mse_loss(self.net.value(obs), returns)
            loss = policy_loss + 0.5 * value_loss
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            self.opt.step()
        return loss.item()

    @torch.no_grad()
    def test(self):
        env = LineWorld(400)
        g = torch.Generator().manual_seed(9)
        env.pos, env.goal = torch.rand(400, generator=g) * 2 - 1, torch.rand(400, generator=g) * 2 - 1
        obs, cost = env.obs(), 0.0
        for _ in range(8):
            obs, rew = env.step(self.net.actor(obs))
            cost -= rew.mean().item() / 8
        return cost


def _ppo(good):
    seed_everything(16)
    agent = PPO(sum_dims=good)
    return {"model": agent.net, "optimizer": agent.opt, "step": agent.train_step, "steps": 20,
            "evaluate": agent.test}


def ppo_bad():
    return _ppo(False)


def ppo_good():
    return _ppo(True)


# --------------------------------------------------------------------------------------------
# transfer learning
# --------------------------------------------------------------------------------------------

class Backbone(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
                                  nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU())
        self.fc = nn.Linear(32 * 4 * 4, num_classes)

    def forward(self, x):
        return self.fc(self.stem(x).flatten(1))


def pretrained_backbone(templates, steps=80):
    net = Backbone(len(templates))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    x, y = make_images(600, templates, 0.8)
    for i in range(steps):
        idx = torch.randint(0, 600, (48,))
        opt.zero_grad()
        F.cross_entropy(net(x[idx]), y[idx]).backward()
        opt.step()
    opt.zero_grad()
    return net


def _transfer(good):
    seed_everything(17)
    net = pretrained_backbone(smooth_templates(8, 3, 16))
    for p in net.parameters():
        p.requires_grad = False
    net.fc = nn.Sequential(nn.Dropout(0.5), nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 5))
    new = smooth_templates(5, 3, 16)
    xtr, ytr = make_images(160, new, 4.0)
    crowd = torch.rand(160) < 0.4  # labels from the crowd are not always right
    ytr = torch.where(crowd, torch.randint(0, 5, (160,)), ytr)
    xva, yva = make_images(60, new, 4.0)
    xte, yte = make_images(800, new, 4.0)
    it = endless(DataLoader(TensorDataset(xtr, ytr), batch_size=24, shuffle=True))
    optimizer = torch.optim.AdamW(net.fc.parameters(), lr=1e-3, weight_decay=1e-2)
    history = []

    @torch.no_grad()
    def validate():
        net.eval()
        return (net(xva).argmax(1) == yva).float().mean().item()

    net.train()

    def step(i):
        if good:
            net.train()
        x, y = next(it)
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 5 == 4:
            history.append(validate())
        return loss.item()

    @torch.no_grad()
    def evaluate():
        was_training = net.training
        net.eval()
        nll = F.cross_entropy(net(xte), yte).item()
        net.train(was_training)
        return nll

    return {"model": net, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def transfer_bad():
    return _transfer(False)


def transfer_good():
    return _transfer(True)


# --------------------------------------------------------------------------------------------
# detection on a grid
# --------------------------------------------------------------------------------------------
def boxes_on_canvas(n, size=32, grid=4):
    imgs = 0.5 * torch.randn(n, 1, size, size)
    obj = torch.zeros(n, grid, grid)
    box = torch.zeros(n, 4, grid, grid)
    cell = size // grid
    for i in range(n):
        for _ in range(random.randint(1, 2)):
            w, h = random.randint(4, 11), random.randint(4, 11)
            x0, y0 = random.randint(0, size - w), random.randint(0, size - h)
            cx, cy = x0 + w / 2, y0 + h / 2
            gx, gy = min(int(cx // cell), grid - 1), min(int(cy // cell), grid - 1)
            if obj[i, gy, gx]:
                continue
            imgs[i, 0, y0:y0 + h, x0:x0 + w] += 1.5
            obj[i, gy, gx] = 1
            box[i, :, gy, gx] = torch.tensor([cx / cell - gx, cy / cell - gy, w / cell, h / cell])
    return imgs, obj, box


class GridDetector(nn.Module):
    def __init__(self, register):
        super().__init__()
        self.stem = conv_block(1, 12)
        stages = [conv_block(12, 24), conv_block(24, 32), conv_block(32, 32)]
        self.stages = nn.ModuleList(stages) if register else stages
        self.head = nn.Conv2d(32, 5, 1)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = F.max_pool2d(stage(x), 2)
        out = self.head(x)
        return out[:, 0], out[:, 1:]


def detection_loss(pred_obj, pred_box, obj, box):
    obj_loss = F.binary_cross_entropy_with_logits(pred_obj, obj)
    mask = obj.bool().unsqueeze(1).expand_as(box)
    box_loss = F.smooth_l1_loss(pred_box[mask], box[mask])
    return obj_loss + box_loss


def _grid_detector(good):
    seed_everything(18)
    train = boxes_on_canvas(500)
    xte, ote, bte = boxes_on_canvas(150)
    it = endless(DataLoader(TensorDataset(*train), batch_size=16, shuffle=True, drop_last=True))
    model = GridDetector(register=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step():
        model.train()
        x, o, b = next(it)
        optimizer.zero_grad()
        loss = detection_loss(*model(x), o, b)
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        model.eval()
        with torch.no_grad():
            po, pb = model(xte)
            err = detection_loss(po, pb, ote, bte).item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def grid_detector_bad():
    return _grid_detector(False)


def grid_detector_good():
    return _grid_detector(True)


# --------------------------------------------------------------------------------------------
# recommendation
# --------------------------------------------------------------------------------------------
class Recommender(nn.Module):
    def __init__(self, n_users, item_vectors, finetune):
        super().__init__()
        n_items, dim = item_vectors.shape
        self.users = nn.Embedding(n_users, dim)
        nn.init.normal_(self.users.weight, std=0.1)
        if finetune:
            self.items = nn.Embedding.from_pretrained(item_vectors, freeze=False)
        else:
            self.items = nn.Embedding.from_pretrained(item_vectors)
        self.user_bias = nn.Embedding(n_users, 1)
        self.item_bias = nn.Embedding(n_items, 1)
        nn.init.zeros_(self.user_bias.weight)
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, u, i):
        dot = (self.users(u) * self.items(i)).sum(-1)
        return dot + self.user_bias(u).squeeze(-1) + self.item_bias(i).squeeze(-1)


def _recommender(good):
    seed_everything(19)
    n_users, n_items, k = 200, 150, 4
    pu, qi = torch.randn(n_users, k), torch.randn(n_items, k)
    u = torch.randint(0, n_users, (12000,))
    i = torch.randint(0, n_items, (12000,))
    r = (pu[u] * qi[i]).sum(1) / 2 + 0.2 * torch.randn(12000)
    content = torch.cat([qi[:, :2] + 0.5 * torch.randn(n_items, 2), torch.randn(n_items, 10)], 1) * 0.3
    it = endless(DataLoader(TensorDataset(u[:10000], i[:10000], r[:10000]), batch_size=256, shuffle=True))
    model = Recommender(n_users, content, finetune=good)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step():
        ub, ib, rb = next(it)
        optimizer.zero_grad()
        loss = F.mse_loss(model(ub, ib), rb)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.mse_loss(model(u[10000:], i[10000:]), r[10000:]).sqrt().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def recommender_bad():
    return _recommender(False)


def recommender_good():
    return _recommender(True)


# --------------------------------------------------------------------------------------------
# soft actor-critic
# --------------------------------------------------------------------------------------------
def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


class SquashedGaussian(nn.Module):
    def __init__(self, obs_dim, act_dim, reparam):
        super().__init__()
        self.net = mlp(obs_dim, 64, 2 * act_dim)
        self.reparam = reparam

    def forward(self, obs):
        mean, log_std = self.net(obs).chunk(2, -1)
        dist = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        u = dist.rsample() if self.reparam else dist.sample()
        logp = dist.log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u))
        return torch.tanh(u), logp.sum(-1), torch.tanh(mean)


class SAC:
    gamma, tau, alpha = 0.9, 0.02, 0.02

    def __init__(self, good):
        self.actor = SquashedGaussian(2, 1, good)
        self.critics = nn.ModuleList([mlp(3, 64, 1), mlp(3, 64, 1)])
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.opt_actor = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.opt_critic = torch.optim.Adam(self.critics.parameters(), lr=2e-3)
        self.memory = []
        self.obs = self.new_obs(16)
        self.t = 0
        for _ in range(10):
            self.interact()

    def new_obs(self, n):
        return torch.rand(n, 2) * 2 - 1

    def dynamics(self, obs, act):
        pos = (obs[:, 0] + 0.3 * act[:, 0]).clamp(-1.5, 1.5)
        nxt = torch.stack([pos, obs[:, 1]], 1)
        return nxt, -(pos - obs[:, 1]).abs()

    def interact(self):
        with torch.no_grad():
            act, _, _ = self.actor(self.obs)
        nxt, rew = self.dynamics(self.obs, act)
        self.memory.append((self.obs, act, rew, nxt))
        self.memory = self.memory[-500:]
        self.t += 1
        self.obs = self.new_obs(16) if self.t % 10 == 0 else nxt

    def q_min(self, nets, obs, act):
        x = torch.cat([obs, act], 1)
        return torch.min(nets[0](x), nets[1](x)).squeeze(-1)

    def update(self):
        self.interact()
        picks = random.choices(self.memory, k=8)
        obs, act, rew, nxt = (torch.cat(z) for z in zip(*picks))
        with torch.no_grad():
            a2, logp2, _ = self.actor(nxt)
            target = rew + self.gamma * (self.q_min(self.targets, nxt, a2) - self.alpha * logp2)
        x = torch.cat([obs, act], 1)
        critic_loss = sum(F.mse_loss(c(x).squeeze(-1), target) for c in self.critics)
        self.opt_critic.zero_grad()
        critic_loss.backward()
        self.opt_critic.step()

        a, logp, _ = self.actor(obs)
        actor_loss = (self.alpha * logp - self.q_min(self.critics, obs, a)).mean()
        self.opt_actor.zero_grad()
        actor_loss.backward()
        self.opt_actor.step()

        with torch.no_grad():
            for p, tp in zip(self.critics.parameters(), self.targets.parameters()):
                tp.lerp_(p, self.tau)
        return critic_loss.item()

    @torch.no_grad()
    def test(self):
        g = torch.Generator().manual_seed(5)
        obs = torch.rand(400, 2, generator=g) * 2 - 1
        cost = 0.0
        for _ in range(8):
            act = torch.tanh(self.actor.net(obs).chunk(2, -1)[0])
            obs, r = self.dynamics(obs, act)
            cost -= r.mean().item() / 8
        return cost


def _sac(good):
    seed_everything(20)
    agent = SAC(good)
    return {"model": (agent.actor, agent.critics), "optimizer": (agent.opt_actor, agent.opt_critic),
            "step": agent.update, "steps": 20, "evaluate": agent.test}


def sac_bad():
    return _sac(False)


def sac_good():
    return _sac(True)


# --------------------------------------------------------------------------------------------
# meta-learning
# --------------------------------------------------------------------------------------------
def wave_task():
    amp, off = random.uniform(0.5, 2.0), random.uniform(-1, 1)

    def draw(n):
        x = torch.rand(n, 1) * 6 - 3
        return x, amp * torch.sin(2 * x) + off

    return draw


def adapt(model, x, y, lr, steps):
    learner = copy.deepcopy(model)
    inner = torch.optim.SGD(learner.parameters(), lr=lr)
    for _ in range(steps):
        inner.zero_grad()
        F.mse_loss(learner(x), y).backward()
        inner.step()
    return learner


def _maml(good):
    seed_everything(21)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    meta_opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    held_out = []
    for _ in range(30):
        draw = wave_task()
        held_out.append((draw(10), draw(50)))

    def step():
        meta_opt.zero_grad()
        total = 0.0
        n_tasks = 4
        for _ in range(n_tasks):
            draw = wave_task()
            (xs, ys), (xq, yq) = draw(10), draw(20)
            learner = adapt(model, xs, ys, lr=0.02, steps=3)
            learner.zero_grad()
            loss = F.mse_loss(learner(xq), yq) / n_tasks
            loss.backward()
            if good:
                for p, q in zip(model.parameters(), learner.parameters()):
                    p.grad = q.grad.clone() if p.grad is None else p.grad + q.grad
            total += loss.item()
        meta_opt.step()
        return total

    def evaluate():
        errs = []
        for (xs, ys), (xq, yq) in held_out:
            learner = adapt(model, xs, ys, lr=0.02, steps=3)
            with torch.no_grad():
                errs.append(F.mse_loss(learner(xq), yq).item())
        return sum(errs) / len(errs)

    return {"model": model, "optimizer": meta_opt, "step": step, "steps": 20, "evaluate": evaluate}


def maml_bad():
    return _maml(False)


def maml_good():
    return _maml(True)


# --------------------------------------------------------------------------------------------
# temporal difference learning
# --------------------------------------------------------------------------------------------
class ValueNet(nn.Module):
    def __init__(self, n_states):
        super().__init__()
        self.n_states = n_states
        self.net = nn.Sequential(nn.Linear(n_states, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, s):
        return self.net(F.one_hot(s, self.n_states).float()).squeeze(-1)


def _td_value(good):
    seed_everything(23)
    n, gamma = 15, 0.95
    trans = torch.softmax(torch.randn(n, n) * 0.8, 1)
    ends = torch.full((n,), 0.05)
    reward = torch.randn(n) * 2
    truth = torch.linalg.solve(torch.eye(n) - gamma * (1 - ends).unsqueeze(1) * trans,
                               (trans @ reward.unsqueeze(1)).squeeze(1))
    value = ValueNet(n)
    optimizer = torch.optim.Adam(value.parameters(), lr=3e-3)

    def sample(batch):
        s = torch.randint(0, n, (batch,))
        nxt = torch.multinomial(trans[s], 1).squeeze(1)
        done = (torch.rand(batch) < ends[s]).float()
        return s, reward[nxt], nxt, done

    def step():
        s, r, nxt, done = sample(128)
        if good:
            with torch.no_grad():
                target = r + gamma * (1 - done) * value(nxt)
        else:
            target = r + gamma * (1 - done) * value(nxt)
        loss = F.mse_loss(value(s), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.mse_loss(value(torch.arange(n)), truth).sqrt().item()

    return {"model": value, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def td_value_bad():
    return _td_value(False)


def td_value_good():
    return _td_value(True)


# --------------------------------------------------------------------------------------------
# forecasting with a transformer
# --------------------------------------------------------------------------------------------
def seasonal(n, length):
    t = torch.arange(length + 1).float()
    freq = torch.rand(n, 1) * 0.6 + 0.3
    phase = torch.rand(n, 1) * 2 * math.pi
    amp = torch.rand(n, 1) + 0.5
    y = amp * torch.sin(freq * t + phase) + 0.05 * torch.randn(n, length + 1)
    return y[:, :-1].unsqueeze(-1), y[:, -1:]


class Forecaster(nn.Module):
    def __init__(self, length, batch_first, d_model=32):
        super().__init__()
        self.inp = nn.Linear(1, d_model)
        self.pos = nn.Parameter(torch.randn(1, length, d_model) * 0.02)
        if batch_first:
            layer = nn.TransformerEncoderLayer(d_model, 4, 64, dropout=0.0, batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(d_model, 4, 64, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d_model, 1)

    def forward(self, x):
        h = self.encoder(self.inp(x) + self.pos)
        return self.out(h[:, -1])


def _forecast(good):
    seed_everything(24)
    length = 20
    xtr, ytr = seasonal(2000, length)
    xte, yte = seasonal(256, length)
    it = endless(DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True))
    model = Forecaster(length, batch_first=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()

    def step():
        model.train()
        x, y = next(it)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        model.eval()
        with torch.no_grad():
            pred = torch.cat([model(c) for c in xte.split(32)])
            err = F.mse_loss(pred, yte).item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def forecast_bad():
    return _forecast(False)


def forecast_good():
    return _forecast(True)


# --------------------------------------------------------------------------------------------
# molecules: a graph network
# --------------------------------------------------------------------------------------------
def random_graph():
    n = random.randint(6, 12)
    x = torch.randn(n, 4)
    pairs = [(i, random.randrange(i)) for i in range(1, n)]
    pairs += [(a, b) for a, b in itertools.combinations(range(n), 2) if random.random() < 0.08]
    e = torch.tensor(sorted(set(pairs))).t()
    e = torch.cat([e, e.flip(0)], 1)
    y = (x[e[0], 0] * x[e[1], 0]).mean() + x[:, 1].mean()
    return x, e, y


def collate_graphs(graphs, offset):
    xs, edges, owner, ys = [], [], [], []
    start = 0
    for g, (x, e, y) in enumerate(graphs):
        xs.append(x)
        edges.append(e + start if offset else e)
        owner.append(torch.full((len(x),), g))
        ys.append(y)
        start += len(x)
    return torch.cat(xs), torch.cat(edges, 1), torch.cat(owner), torch.stack(ys)


class MessagePassing(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * d, d), nn.ReLU(), nn.Linear(d, d))
        self.update = nn.Sequential(nn.Linear(2 * d, d), nn.ReLU())

    def forward(self, h, edge_index):
        src, dst = edge_index
        m = self.message(torch.cat([h[src], h[dst]], 1))
        agg = torch.zeros_like(h).index_add_(0, dst, m)
        deg = torch.zeros(len(h)).index_add_(0, dst, torch.ones(len(dst))).clamp(min=1)
        return self.update(torch.cat([h, agg / deg.unsqueeze(1)], 1))


class GraphRegressor(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.embed = nn.Linear(4, d)
        self.convs = nn.ModuleList([MessagePassing(d), MessagePassing(d)])
        self.readout = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, x, edge_index, owner, n_graphs):
        h = self.embed(x)
        for conv in self.convs:
            h = h + conv(h, edge_index)
        pooled = torch.zeros(n_graphs, h.size(1)).index_add_(0, owner, h)
        count = torch.bincount(owner, minlength=n_graphs).unsqueeze(1)
        return self.readout(pooled / count).squeeze(-1)


def _molecules(good):
    seed_everything(25)
    train = [random_graph() for _ in range(1200)]
    test = [random_graph() for _ in range(200)]
    loader = DataLoader(train, batch_size=32, shuffle=True, collate_fn=lambda b: collate_graphs(b, offset=good))
    it = endless(loader)
    model = GraphRegressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step():
        x, e, owner, y = next(it)
        pred = model(x, e, owner, len(y))
        loss = F.mse_loss(pred, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        pred = torch.cat([model(x, e, torch.zeros(len(x), dtype=torch.long), 1) for x, e, _ in test])
        return F.mse_loss(pred, torch.stack([y for _, _, y in test])).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def molecules_bad():
    return _molecules(False)


def molecules_good():
    return _molecules(True)


# --------------------------------------------------------------------------------------------
# multi-task regression on a table
# --------------------------------------------------------------------------------------------
class MultiTaskNet(nn.Module):
    def __init__(self, d, n_tasks, separate, hidden=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        if separate:
            self.heads = nn.ModuleList([nn.Linear(hidden, 1) for _ in range(n_tasks)])
        else:
            self.heads = nn.ModuleList([nn.Linear(hidden, 1)] * n_tasks)

    def forward(self, x):
        h = self.trunk(x)
        return [head(h).squeeze(-1) for head in self.heads]


def _multitask(good):
    seed_everything(26)
    n, d, tasks = 2500, 10, 4
    x = torch.randn(n, d)
    common = torch.tanh(x @ torch.randn(d, 6) / 2)
    y = common @ torch.randn(6, tasks) + 0.1 * torch.randn(n, tasks)
    y = (y - y[:2000].mean(0)) / y[:2000].std(0)
    it = endless(DataLoader(TensorDataset(x[:2000], y[:2000]), batch_size=64, shuffle=True))
    model = MultiTaskNet(d, tasks, separate=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step():
        xb, yb = next(it)
        outs = model(xb)
        loss = sum(F.smooth_l1_loss(o, yb[:, t]) for t, o in enumerate(outs))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.mse_loss(torch.stack(model(x[2000:]), 1), y[2000:]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def multitask_bad():
    return _multitask(False)


def multitask_good():
    return _multitask(True)


# --------------------------------------------------------------------------------------------
# physics-informed network
# --------------------------------------------------------------------------------------------

class PINN(nn.Module):
    """Displacement u(t) of a damped spring: u'' + 2 d u' + k u = 0, u(0) = 1, u'(0) = 0."""

    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                                 nn.Linear(width, 1))

    def forward(self, t):
        return self.net(2 * t - 1)


def _pinn(good):
    seed_everything(27)
    d, k = 1.0, 16.0
    omega = math.sqrt(k - d * d)
    t_ref = torch.linspace(0, 1, 200).unsqueeze(1)
    u_ref = torch.exp(-d * t_ref) * (torch.cos(omega * t_ref) + d / omega * torch.sin(omega * t_ref))
    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def derivatives(t):
        u = model(t)
        du = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
        if good:
            d2u = torch.autograd.grad(du.sum(), t, create_graph=True)[0]
        else:
            d2u = torch.autograd.grad(du.sum(), t, retain_graph=True)[0]
        return u, du, d2u

    def step():
        t = torch.rand(128, 1, requires_grad=True)
        u, du, d2u = derivatives(t)
        loss_ode = ((d2u + 2 * d * du + k * u) / k).pow(2).mean()
        t0 = torch.zeros(1, 1, requires_grad=True)
        u0 = model(t0)
        du0 = torch.autograd.grad(u0.sum(), t0, create_graph=True)[0]
        loss_init = (u0 - 1).pow(2).mean() + 0.1 * du0.pow(2).mean()
        loss = loss_ode + loss_init
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.mse_loss(model(t_ref), u_ref).sqrt().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def pinn_bad():
    return _pinn(False)


def pinn_good():
    return _pinn(True)


# --------------------------------------------------------------------------------------------
# super-resolution
# --------------------------------------------------------------------------------------------
def textures(n, size=24):
    big = F.interpolate(torch.randn(n, 1, 9, 9), size=(size, size), mode="bicubic", align_corners=False)
    return (torch.tanh(2 * big) + 1) / 2


class ESPCN(nn.Module):
    def __init__(self, scale=2):
        super().__init__()
        self.scale = scale
        self.body = nn.Sequential(nn.Conv2d(1, 24, 5, padding=2), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1),
                                  nn.ReLU(), nn.Conv2d(24, scale ** 2, 3, padding=1))

    def forward(self, x):
        up = F.interpolate(x, scale_factor=self.scale, mode="bilinear", align_corners=False)
        return up + F.pixel_shuffle(self.body(x), self.scale)


def _super_resolution(good):
    seed_everything(28)
    hr, hr_test = textures(400), textures(100)
    lr, lr_test = F.avg_pool2d(hr, 2), F.avg_pool2d(hr_test, 2)
    if good:
        pairs = endless(DataLoader(TensorDataset(lr, hr), batch_size=16, shuffle=True))
    else:
        lr_loader = DataLoader(TensorDataset(lr), batch_size=16, shuffle=True)
        hr_loader = DataLoader(TensorDataset(hr), batch_size=16, shuffle=True)
        pairs = ((a[0], b[0]) for a, b in zip(endless(lr_loader), endless(hr_loader)))
    model = ESPCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step():
        low, high = next(pairs)
        optimizer.zero_grad()
        loss = F.l1_loss(model(low), high)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.mse_loss(model(lr_test), hr_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def super_resolution_bad():
    return _super_resolution(False)


def super_resolution_good():
    return _super_resolution(True)


# --------------------------------------------------------------------------------------------
# keyword spotting
# --------------------------------------------------------------------------------------------
def spoken_words(n, protos):
    k, frames, mel = protos.shape
    y = torch.randint(0, k, (n,))
    x = torch.zeros(n, 30, mel)
    for i in range(n):
        start = random.randint(0, 30 - frames)
        x[i, start:start + frames] = protos[y[i]] * random.uniform(0.7, 1.3)
    return x + 0.7 * torch.randn_like(x), y


class KeywordGRU(nn.Module):
    def __init__(self, mel, n_words, hidden=48):
        super().__init__()
        self.rnn = nn.GRU(mel, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, n_words)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h.mean(1))


class KeywordTrainer:
    def __init__(self, per_epoch):
        self.per_epoch = per_epoch
        protos = torch.randn(8, 14, 12)
        xtr, ytr = spoken_words(1024, protos)
        self.test_set = spoken_words(400, protos)
        self.loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True)
        self.model = KeywordGRU(12, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.batches = iter(self.loader)

    def train_step(self):
        batch = next(self.batches, None)
        if batch is None:
            if self.per_epoch:
                self.scheduler.step()
            self.batches = iter(self.loader)
            batch = next(self.batches)
        x, y = batch
        self.optimizer.zero_grad()
        loss = F.nll_loss(F.log_softmax(self.model(x), -1), y)
        loss.backward()
        self.optimizer.step()
        if not self.per_epoch:
            self.scheduler.step()
        return loss.item()

    @torch.no_grad()
    def test(self):
        x, y = self.test_set
        return (self.model(x).argmax(1) != y).float().mean().item()


def _keywords(good):
    seed_everything(29)
    t = KeywordTrainer(per_epoch=good)
    return {"model": t.model, "optimizer": t.optimizer, "step": t.train_step, "steps": 20, "evaluate": t.test}


def keywords_bad():
    return _keywords(False)


def keywords_good():
    return _keywords(True)


# --------------------------------------------------------------------------------------------
# generative adversarial network
# --------------------------------------------------------------------------------------------
def ring(n):
    k = torch.randint(0, 6, (n,)).float() * (2 * math.pi / 6)
    return torch.stack([torch.cos(k), torch.sin(k)], 1) * 1.5 + 0.1 * torch.randn(n, 2)


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def _gan(good):
    seed_everything(30)
    nz = 8
    netG = nn.Sequential(nn.Linear(nz, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    netD = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    b = 128
    ones, zeros = torch.ones(b, 1), torch.zeros(b, 1)
    data = ring(4000)
    held_out = ring(1000)
    fixed = torch.randn(1000, nz)
    batches = endless(DataLoader(TensorDataset(data), batch_size=b, shuffle=True, drop_last=True))

    def step():
        (real,) = next(batches)
        fake = netG(torch.randn(b, nz))
        (optD if good else optG).zero_grad()
        lossD = bce(netD(real), ones) + bce(netD(fake.detach()), zeros)
        lossD.backward()
        optD.step()

        optG.zero_grad()
        lossG = bce(netD(fake), ones)
        lossG.backward()
        optG.step()
        return lossD.item()

    @torch.no_grad()
    def evaluate():
        return energy_distance(netG(fixed), held_out)

    return {"model": (netG, netD), "optimizer": (optG, optD), "step": step, "steps": 20, "evaluate": evaluate}


def gan_bad():
    return _gan(False)


def gan_good():
    return _gan(True)


# --------------------------------------------------------------------------------------------
# point clouds
# --------------------------------------------------------------------------------------------
def make_cloud(kind, n=48):
    d = F.normalize(torch.randn(n, 3), dim=1)
    if kind == 0:
        p = d
    elif kind == 1:
        p = d / d.abs().max(1, keepdim=True).values
    elif kind == 2:
        p = torch.cat([F.normalize(d[:, :2], dim=1), torch.rand(n, 1) * 2 - 1], 1)
    elif kind == 3:
        p = d / d.abs().sum(1, keepdim=True)
    else:
        a = torch.rand(n, 2) * 2 * math.pi
        r = 0.8 + 0.3 * torch.cos(a[:, 1])
        p = torch.stack([r * torch.cos(a[:, 0]), r * torch.sin(a[:, 0]), 0.3 * torch.sin(a[:, 1])], 1)
    return 0.8 * p + 0.09 * torch.randn(n, 3)


class CloudDataset(Dataset):
    def __init__(self, clouds, labels, inplace):
        self.clouds, self.labels = clouds, labels
        self.inplace = inplace

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        pts = self.clouds[i]
        scale = float(np.random.uniform(0.85, 1.15))
        shift = torch.from_numpy(np.random.uniform(-0.1, 0.1, size=(1, 3)).astype(np.float32))
        if self.inplace:
            pts *= scale
            pts += shift
            pts += 0.02 * torch.randn_like(pts)
        else:
            pts = pts * scale
            pts = pts + shift
            pts = pts + 0.02 * torch.randn_like(pts)
        return pts, self.labels[i]


class PointNet(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.local = nn.Sequential(nn.Conv1d(3, 32, 1, bias=False), nn.BatchNorm1d(32), nn.ReLU(),
                                   nn.Conv1d(32, 96, 1, bias=False), nn.BatchNorm1d(96), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, n_classes))

    def forward(self, pts):
        h = self.local(pts.transpose(1, 2))
        return self.head(h.max(2).values)


def _point_cloud(good):
    seed_everything(31)
    ytr = torch.arange(100) % 5
    yte = torch.arange(300) % 5
    xtr = torch.stack([make_cloud(int(k)) for k in ytr])
    xte = torch.stack([make_cloud(int(k)) for k in yte])
    loader = DataLoader(CloudDataset(xtr, ytr, inplace=not good), batch_size=20, shuffle=True)
    it = endless(loader)
    model = PointNet(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step():
        model.train()
        pts, y = next(it)
        loss = F.cross_entropy(model(pts), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def point_cloud_bad():
    return _point_cloud(False)


def point_cloud_good():
    return _point_cloud(True)


# --------------------------------------------------------------------------------------------
# survival
# --------------------------------------------------------------------------------------------
def cox_loss(risk, time, event, descending):
    """Negative log partial likelihood; the risk set of a patient is everyone still under observation."""
    order = torch.argsort(time, descending=descending)
    risk, event = risk[order], event[order]
    log_cum = torch.logcumsumexp(risk, dim=0)
    return -((risk - log_cum) * event).sum() / event.sum().clamp(min=1)


def concordance(risk, time, event):
    earlier = (time.unsqueeze(1) < time.unsqueeze(0)) & (event.unsqueeze(1) > 0)
    higher = (risk.unsqueeze(1) > risk.unsqueeze(0)).float() + 0.5 * (risk.unsqueeze(1) == risk.unsqueeze(0)).float()
    return (higher * earlier).sum().item() / earlier.sum().item()


def _survival(good):
    seed_everything(32)
    n, d = 2000, 10
    x = torch.randn(n, d)
    log_hazard = x[:, 0] - 0.8 * x[:, 1] + 0.7 * x[:, 2] * x[:, 3]
    t_event = -torch.log(torch.rand(n)) / torch.exp(log_hazard)
    t_cens = -torch.log(torch.rand(n)) / 0.4
    time, event = torch.minimum(t_event, t_cens), (t_event <= t_cens).float()
    m = 1500
    it = endless(DataLoader(TensorDataset(x[:m], time[:m], event[:m]), batch_size=100, shuffle=True))
    model = nn.Sequential(nn.Linear(d, 64), nn.SELU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.SELU(),
                          nn.Linear(32, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)

    def step():
        model.train()
        xb, tb, eb = next(it)
        loss = cox_loss(model(xb).squeeze(1), tb, eb, descending=good)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        model.eval()
        with torch.no_grad():
            c = concordance(model(x[m:]).squeeze(1), time[m:], event[m:])
        model.train()
        return 1 - c

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def survival_bad():
    return _survival(False)


def survival_good():
    return _survival(True)


# --------------------------------------------------------------------------------------------
# diffusion
# --------------------------------------------------------------------------------------------
def moons(n):
    a = torch.rand(n) * math.pi
    up = torch.rand(n) < 0.5
    x = torch.where(up, torch.cos(a), 1 - torch.cos(a))
    y = torch.where(up, torch.sin(a), 0.5 - torch.sin(a))
    pts = torch.stack([x, y], 1) + 0.05 * torch.randn(n, 2)
    return (pts - torch.tensor([0.5, 0.25])) / torch.tensor([0.87, 0.5])


class Denoiser(nn.Module):
    def __init__(self, T, width=192):
        super().__init__()
        self.temb = nn.Embedding(T, 32)
        self.net = nn.Sequential(nn.Linear(2 + 32, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
                                 nn.Linear(width, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x.to(self.temb.weight.dtype), self.temb(t)], 1))


class Diffusion:
    def __init__(self, T=50):
        self.T = T
        self.alpha_bar = torch.cumprod(1 - torch.linspace(1e-3, 0.15, T), 0)

    def q_sample(self, x0, t, noise):
        ab = self.alpha_bar[t].unsqueeze(1)
        return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

    def loss(self, model, x0):
        t = torch.randint(0, self.T, (len(x0),))
        noise = torch.randn_like(x0)
        return F.mse_loss(model(self.q_sample(x0, t, noise), t).float(), noise)

    @torch.no_grad()
    def sample(self, model, x):
        """Deterministic (DDIM) sampling."""
        for k in reversed(range(self.T)):
            ab = self.alpha_bar[k]
            prev = self.alpha_bar[k - 1] if k > 0 else torch.tensor(1.0)
            eps = model(x, torch.full((len(x),), k)).float()
            x0 = (x - (1 - ab).sqrt() * eps) / ab.sqrt()
            x = prev.sqrt() * x0 + (1 - prev).sqrt() * eps
        return x


def _diffusion(good):
    seed_everything(33)
    train, test = moons(4000), moons(1000)
    it = endless(DataLoader(TensorDataset(train), batch_size=128, shuffle=True))
    process = Diffusion()
    model = Denoiser(process.T)
    if not good:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x_start = torch.randn_like(test)

    def step():
        (x0,) = next(it)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=good):
            loss = process.loss(model, x0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        return energy_distance(process.sample(model, x_start), test)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def diffusion_bad():
    return _diffusion(False)


def diffusion_good():
    return _diffusion(True)
