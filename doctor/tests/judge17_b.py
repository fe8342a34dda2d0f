"""Twenty-two programs of reinforcement learning, generative models, series, physics and transfer, each with one bug and a mended
twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Normal
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.set_num_threads(1)


def gen(seed):
    g = torch.Generator()
    g.manual_seed(seed)
    return g


def forever(loader):
    while True:
        for batch in loader:
            yield batch


CASES = [
    {"name": "a2c_advantage_broadcast", "what": "The advantage keeps the critic's trailing dimension ([N,1]) while the log-probs are [N]; the product is an [N,N] matrix, so every action is reinforced with the average advantage of the batch and the policy gets no useful gradient.", "steps": 250},
    {"name": "cox_unsorted_risk_set", "what": "The Cox partial likelihood takes a running log-sum-exp as risk set, but the shuffled batch is never ordered by descending survival time, so the risk sets are random and the ranking of hazards is not learned.", "steps": 300},
    {"name": "vae_kl_mean_vs_recon_sum", "what": "The reconstruction term is summed over the batch and pixels but the KL term is averaged over batch and latent dimensions, so the KL weighs hundreds of times too little and the latent code drifts far from the prior; samples from the prior are bad.", "steps": 1500},
    {"name": "distill_kl_on_probabilities", "what": "F.kl_div expects log-probabilities as its first argument but gets softmax probabilities of the student; the loss is then a linear function of the probabilities and pushes the student to one-hot instead of matching the teacher.", "steps": 400},
    {"name": "realnvp_logdet_sign", "what": "The log-determinant of the forward (data to latent) map is subtracted instead of added to the base log-density, so the flow is rewarded for contracting and does not maximise the likelihood.", "steps": 400},
    {"name": "ddpm_fresh_noise_target", "what": "The noise the network must predict is drawn anew for the loss instead of being the noise that was mixed into x_t; it is independent of the input, so the best prediction is zero and no denoiser is learned.", "steps": 500},
    {"name": "missing_labels_as_negatives", "what": "In the multi-task assay table most labels are missing (NaN); nan_to_num turns them into zeros and the loss is averaged over all of them, so unmeasured compounds are trained as negatives.", "steps": 400},
    {"name": "ddpg_actor_uses_no_grad_action", "what": "The actor loss takes its action from the helper that is meant for acting and runs under no_grad, so no gradient goes from the critic to the actor and the policy stays at its random start.", "steps": 400},
    {"name": "pinn_derivative_without_graph", "what": "The time derivative in the physics residual is taken with retain_graph=True but without create_graph, so it is a constant for the optimizer and the network is not trained to satisfy the differential equation.", "steps": 800},
    {"name": "nbeats_blocks_in_plain_list", "what": "The residual blocks of the forecaster sit in a plain Python list, so they are not registered, are not in model.parameters() and keep their random weights; only the linear skip is trained.", "steps": 500},
    {"name": "lora_both_factors_zero", "what": "Both low-rank factors of the adapters start at zero, so the gradient of each is multiplied by the other one and stays exactly zero; only the head is fine-tuned.", "steps": 600},
    {"name": "bfloat16_master_weights", "what": "The whole network is cast to bfloat16 and trained with small Adam steps; most updates are smaller than half a unit in the last place of the weights and are rounded away.", "steps": 1200},
    {"name": "lstm_runs_over_batch_axis", "what": "The LSTM is built without batch_first but gets (batch, time, feature) input, so its recurrence runs over the shuffled rows of the batch and not over time.", "steps": 400},
    {"name": "key_padding_mask_inverted", "what": "The key_padding_mask marks the valid events with True, but True means 'ignore' there; the attention pool sees only padding and never the events.", "steps": 500},
    {"name": "td_target_keeps_gradient", "what": "The bootstrapped target of TD(0) is neither detached nor computed under no_grad, so its gradient flows into the next state's value as well; with random transitions this residual gradient converges to wrong values.", "steps": 800},
    {"name": "task_heads_are_one_module", "what": "The list of task heads is made by multiplying a list with one Linear inside, so all three tasks share the very same head and have to give the same output.", "steps": 400},
    {"name": "sampler_gets_class_weights", "what": "WeightedRandomSampler gets one weight per class instead of one per example, so it only ever draws the first four rows of the dataset and the network memorises them.", "steps": 300},
    {"name": "mirrored_frame_same_steering", "what": "For augmentation half of the camera frames are mirrored left to right, but the steering angle of the expert keeps its sign, so the cloned driver averages left and right.", "steps": 250},
    {"name": "critic_steps_on_actor_gradients", "what": "The critic's gradients are zeroed and filled, then the actor loss is back-propagated through the critic, and only then both optimizers step; the critic update contains the gradient that raises Q, so it overestimates.", "steps": 400},
    {"name": "reptile_snapshot_is_alias", "what": "The snapshot of the meta-weights is state_dict() without a copy; it shares memory with the model, so after the inner loop old and new weights are equal and the interpolation does nothing: the model just follows the last task.", "steps": 400},
    {"name": "teacher_left_in_train_mode", "what": "The teacher with batch norm and dropout is never put into eval mode for distillation, so its targets are random and its running statistics follow the student's noisy augmented inputs.", "steps": 400},
    {"name": "gan_both_optimizers_on_discriminator", "what": "The generator's optimizer was copied from the discriminator's and still holds the discriminator's parameters; the generator step trains the discriminator to accept fakes and the generator never moves.", "steps": 600},
]

PROBES = {
    "a2c_advantage_broadcast": "Mean distance to the goal of the greedy policy over an episode from held-out starting positions.",
    "cox_unsorted_risk_set": "One minus the concordance index on held-out patients.",
    "vae_kl_mean_vs_recon_sum": "Negative log-likelihood per example on held-out data, estimated with 2000 latents drawn from the prior.",
    "distill_kl_on_probabilities": "KL divergence from the teacher's to the student's class distribution on held-out points.",
    "realnvp_logdet_sign": "Exact negative log-likelihood per point on held-out two-moons data.",
    "ddpm_fresh_noise_target": "Mean squared error of the predicted noise on held-out noised points (1.0 = predicts nothing).",
    "missing_labels_as_negatives": "Binary cross-entropy against the complete labels of held-out compounds.",
    "ddpg_actor_uses_no_grad_action": "Mean cost per step of the noise-free policy from held-out starting states.",
    "pinn_derivative_without_graph": "Root mean squared error against the exact solution of the ODE on a fine grid.",
    "nbeats_blocks_in_plain_list": "Mean squared forecast error on held-out series.",
    "lora_both_factors_zero": "Cross-entropy of the fine-tuned classifier on held-out data of the target task.",
    "bfloat16_master_weights": "Gaussian negative log-likelihood plus 2 on held-out data.",
    "lstm_runs_over_batch_axis": "Mean squared error on held-out sequences.",
    "key_padding_mask_inverted": "Mean squared error on held-out event sequences.",
    "td_target_keeps_gradient": "Root mean squared error of the predicted state values against the exact values of the chain.",
    "task_heads_are_one_module": "Mean squared error averaged over the three tasks on held-out data.",
    "sampler_gets_class_weights": "Cross-entropy with equal class weights on held-out data.",
    "mirrored_frame_same_steering": "Mean squared steering error against the expert on held-out, unmirrored frames.",
    "critic_steps_on_actor_gradients": "Root mean squared error of Q against discounted Monte Carlo returns of the current policy from held-out states.",
    "reptile_snapshot_is_alias": "Mean squared error after 5 adaptation steps on held-out sine tasks.",
    "teacher_left_in_train_mode": "KL divergence from the evaluated original teacher to the student on held-out points.",
    "gan_both_optimizers_on_discriminator": "Energy distance between generated points (fixed noise) and held-out real points.",
}


def a2c_advantage_broadcast_bad():
    torch.manual_seed(0)
    class ActorCritic(nn.Module):
        def __init__(self, obs_dim=2, n_act=4, hidden=48):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
            self.pi = nn.Linear(hidden, n_act)
            self.v = nn.Linear(hidden, 1)

        def forward(self, s):
            h = self.body(s)
            return self.pi(h), self.v(h)

    moves = torch.tensor([[0.2, 0.0], [-0.2, 0.0], [0.0, 0.2], [0.0, -0.2]])
    goal = torch.tensor([0.5, -0.3])

    def env_step(pos, a):
        pos = (pos + moves[a]).clamp(-1, 1)
        return pos, -(pos - goal).norm(dim=-1)

    net = ActorCritic()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    gamma, horizon, n_env = 0.8, 8, 32

    def step(i):
        pos = torch.rand(n_env, 2) * 2 - 1
        logps, values, rewards, ents = [], [], [], []
        for _ in range(horizon):
            logits, v = net(pos)
            dist = Categorical(logits=logits)
            a = dist.sample()
            pos, r = env_step(pos, a)
            logps.append(dist.log_prob(a))
            ents.append(dist.entropy())
            values.append(v)
            rewards.append(r)
        with torch.no_grad():
            R = net(pos)[1].squeeze(-1)
        returns = []
        for r in reversed(rewards):
            R = r + gamma * R
            returns.insert(0, R)
        returns = torch.cat(returns)
        logp, ent = torch.cat(logps), torch.cat(ents)
        values = torch.cat(values)
        adv = returns.unsqueeze(-1) - values
        policy_loss = -(logp * adv.detach()).mean()
        value_loss = adv.pow(2).mean()
        loss = policy_loss + 0.5 * value_loss - 0.005 * ent.mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss.item()

    start = torch.rand(256, 2, generator=gen(7)) * 2 - 1

    @torch.no_grad()
    def probe():
        pos, tot = start.clone(), 0.0
        for _ in range(12):
            pos, r = env_step(pos, net(pos)[0].argmax(-1))
            tot -= r.mean().item()
        return tot / 12

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def a2c_advantage_broadcast_good():
    torch.manual_seed(0)
    class ActorCritic(nn.Module):
        def __init__(self, obs_dim=2, n_act=4, hidden=48):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
            self.pi = nn.Linear(hidden, n_act)
            self.v = nn.Linear(hidden, 1)

        def forward(self, s):
            h = self.body(s)
            return self.pi(h), self.v(h)

    moves = torch.tensor([[0.2, 0.0], [-0.2, 0.0], [0.0, 0.2], [0.0, -0.2]])
    goal = torch.tensor([0.5, -0.3])

    def env_step(pos, a):
        pos = (pos + moves[a]).clamp(-1, 1)
        return pos, -(pos - goal).norm(dim=-1)

    net = ActorCritic()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    gamma, horizon, n_env = 0.8, 8, 32

    def step(i):
        pos = torch.rand(n_env, 2) * 2 - 1
        logps, values, rewards, ents = [], [], [], []
        for _ in range(horizon):
            logits, v = net(pos)
            dist = Categorical(logits=logits)
            a = dist.sample()
            pos, r = env_step(pos, a)
            logps.append(dist.log_prob(a))
            ents.append(dist.entropy())
            values.append(v)
            rewards.append(r)
        with torch.no_grad():
            R = net(pos)[1].squeeze(-1)
        returns = []
        for r in reversed(rewards):
            R = r + gamma * R
            returns.insert(0, R)
        returns = torch.cat(returns)
        logp, ent = torch.cat(logps), torch.cat(ents)
        values = torch.cat(values).squeeze(-1)
        adv = returns - values
        policy_loss = -(logp * adv.detach()).mean()
        value_loss = adv.pow(2).mean()
        loss = policy_loss + 0.5 * value_loss - 0.005 * ent.mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss.item()

    start = torch.rand(256, 2, generator=gen(7)) * 2 - 1

    @torch.no_grad()
    def probe():
        pos, tot = start.clone(), 0.0
        for _ in range(12):
            pos, r = env_step(pos, net(pos)[0].argmax(-1))
            tot -= r.mean().item()
        return tot / 12

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def cox_unsorted_risk_set_bad():
    torch.manual_seed(0)
    class DeepSurv(nn.Module):
        def __init__(self, d=8):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, x):
            return self.net(x).squeeze(-1)

    def make_patients(n, seed):
        g = gen(seed)
        x = torch.randn(n, 8, generator=g)
        risk = 1.2 * x[:, 0] - 0.9 * x[:, 1] + 0.7 * x[:, 2] * x[:, 3]
        t = -torch.log(torch.rand(n, generator=g).clamp_min(1e-6)) * torch.exp(-risk)
        c = -torch.log(torch.rand(n, generator=g).clamp_min(1e-6)) * 6.0
        return x, torch.minimum(t, c), (t <= c).float()

    def cox_ph_loss(log_hr, time, event):
        log_risk = torch.logcumsumexp(log_hr, dim=0)
        return -((log_hr - log_risk) * event).sum() / event.sum().clamp_min(1.0)

    train = TensorDataset(*make_patients(1024, 1))
    batches = forever(DataLoader(train, batch_size=64, shuffle=True, drop_last=True))
    model = DeepSurv()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)

    def step(i):
        model.train()
        x, time, event = next(batches)
        optimizer.zero_grad()
        loss = cox_ph_loss(model(x), time, event)
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, tv, ev = make_patients(500, 2)

    @torch.no_grad()
    def probe():
        model.eval()
        r = model(xv)
        model.train()
        comparable = (tv[:, None] < tv[None, :]) & (ev[:, None] > 0)
        concordant = (r[:, None] > r[None, :]) & comparable
        return 1.0 - concordant.sum().item() / comparable.sum().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cox_unsorted_risk_set_good():
    torch.manual_seed(0)
    class DeepSurv(nn.Module):
        def __init__(self, d=8):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, x):
            return self.net(x).squeeze(-1)

    def make_patients(n, seed):
        g = gen(seed)
        x = torch.randn(n, 8, generator=g)
        risk = 1.2 * x[:, 0] - 0.9 * x[:, 1] + 0.7 * x[:, 2] * x[:, 3]
        t = -torch.log(torch.rand(n, generator=g).clamp_min(1e-6)) * torch.exp(-risk)
        c = -torch.log(torch.rand(n, generator=g).clamp_min(1e-6)) * 6.0
        return x, torch.minimum(t, c), (t <= c).float()

    def cox_ph_loss(log_hr, time, event):
        order = torch.argsort(time, descending=True)
        log_hr, event = log_hr[order], event[order]
        log_risk = torch.logcumsumexp(log_hr, dim=0)
        return -((log_hr - log_risk) * event).sum() / event.sum().clamp_min(1.0)

    train = TensorDataset(*make_patients(1024, 1))
    batches = forever(DataLoader(train, batch_size=64, shuffle=True, drop_last=True))
    model = DeepSurv()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)

    def step(i):
        model.train()
        x, time, event = next(batches)
        optimizer.zero_grad()
        loss = cox_ph_loss(model(x), time, event)
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, tv, ev = make_patients(500, 2)

    @torch.no_grad()
    def probe():
        model.eval()
        r = model(xv)
        model.train()
        comparable = (tv[:, None] < tv[None, :]) & (ev[:, None] > 0)
        concordant = (r[:, None] > r[None, :]) & comparable
        return 1.0 - concordant.sum().item() / comparable.sum().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_kl_mean_vs_recon_sum_bad():
    torch.manual_seed(0)
    class VAE(nn.Module):
        def __init__(self, d=24, h=64, z=6):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(d, h), nn.ReLU())
            self.fc_mu, self.fc_logvar = nn.Linear(h, z), nn.Linear(h, z)
            self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, d))

        def forward(self, x):
            h = self.enc(x)
            mu, logvar = self.fc_mu(h), self.fc_logvar(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return self.dec(z), mu, logvar

    def make_bits(n, seed):
        g = gen(seed)
        W = torch.randn(2, 24, generator=gen(99)) * 2.5
        c = torch.randn(24, generator=gen(98))
        s = torch.randn(n, 2, generator=g)
        p = torch.sigmoid(torch.sin(1.3 * s) @ W + c)
        return torch.bernoulli(p, generator=g)

    def loss_function(recon, x, mu, logvar):
        bce = F.binary_cross_entropy_with_logits(recon, x, reduction="sum")
        kld = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())
        return bce + kld

    data = make_bits(2048, 3)
    loader = forever(DataLoader(TensorDataset(data), batch_size=64, shuffle=True, drop_last=True))
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        (x,) = next(loader)
        optimizer.zero_grad()
        recon, mu, logvar = model(x)
        loss = loss_function(recon, x, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item() / len(x)

    held = make_bits(256, 4)
    z_prior = torch.randn(2000, 6, generator=gen(5))

    @torch.no_grad()
    def probe():
        logits = model.dec(z_prior)
        lp = held @ F.logsigmoid(logits).T + (1 - held) @ F.logsigmoid(-logits).T
        return -(torch.logsumexp(lp, 1) - math.log(len(z_prior))).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_kl_mean_vs_recon_sum_good():
    torch.manual_seed(0)
    class VAE(nn.Module):
        def __init__(self, d=24, h=64, z=6):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(d, h), nn.ReLU())
            self.fc_mu, self.fc_logvar = nn.Linear(h, z), nn.Linear(h, z)
            self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, d))

        def forward(self, x):
            h = self.enc(x)
            mu, logvar = self.fc_mu(h), self.fc_logvar(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return self.dec(z), mu, logvar

    def make_bits(n, seed):
        g = gen(seed)
        W = torch.randn(2, 24, generator=gen(99)) * 2.5
        c = torch.randn(24, generator=gen(98))
        s = torch.randn(n, 2, generator=g)
        p = torch.sigmoid(torch.sin(1.3 * s) @ W + c)
        return torch.bernoulli(p, generator=g)

    def loss_function(recon, x, mu, logvar):
        bce = F.binary_cross_entropy_with_logits(recon, x, reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return bce + kld

    data = make_bits(2048, 3)
    loader = forever(DataLoader(TensorDataset(data), batch_size=64, shuffle=True, drop_last=True))
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        (x,) = next(loader)
        optimizer.zero_grad()
        recon, mu, logvar = model(x)
        loss = loss_function(recon, x, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item() / len(x)

    held = make_bits(256, 4)
    z_prior = torch.randn(2000, 6, generator=gen(5))

    @torch.no_grad()
    def probe():
        logits = model.dec(z_prior)
        lp = held @ F.logsigmoid(logits).T + (1 - held) @ F.logsigmoid(-logits).T
        return -(torch.logsumexp(lp, 1) - math.log(len(z_prior))).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kl_on_probabilities_bad():
    torch.manual_seed(0)
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))

        def forward(self, x):
            return self.f(x)

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(10, 32)
            self.fc2 = nn.Linear(32, 5)

        def forward(self, x):
            return self.fc2(F.relu(self.fc1(x)))

    centers = torch.randn(5, 10, generator=gen(11))

    def blobs(n, seed):
        g = gen(seed)
        y = torch.randint(0, 5, (n,), generator=g)
        return centers[y] + 1.3 * torch.randn(n, 10, generator=g), y

    xt, yt = blobs(3000, 12)
    teacher = Teacher()
    t_opt = torch.optim.Adam(teacher.parameters(), lr=1e-3)
    for k in range(80):
        idx = torch.randint(0, 3000, (128,))
        t_opt.zero_grad()
        F.cross_entropy(teacher(xt[idx]), yt[idx]).backward()
        t_opt.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = Student()
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    T, alpha = 2.0, 0.9

    def distillation_loss(s_logits, t_logits, y):
        soft = F.kl_div(F.softmax(s_logits / T, dim=1), F.softmax(t_logits / T, dim=1), reduction="batchmean") * T * T
        return alpha * soft + (1 - alpha) * F.cross_entropy(s_logits, y)

    def step(i):
        idx = torch.randint(0, 3000, (64,))
        x, y = xt[idx], yt[idx]
        with torch.no_grad():
            t_logits = teacher(x)
        loss = distillation_loss(student(x), t_logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, _ = blobs(1000, 13)

    @torch.no_grad()
    def probe():
        return F.kl_div(F.log_softmax(student(xv), 1), F.softmax(teacher(xv), 1), reduction="batchmean").item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kl_on_probabilities_good():
    torch.manual_seed(0)
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))

        def forward(self, x):
            return self.f(x)

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(10, 32)
            self.fc2 = nn.Linear(32, 5)

        def forward(self, x):
            return self.fc2(F.relu(self.fc1(x)))

    centers = torch.randn(5, 10, generator=gen(11))

    def blobs(n, seed):
        g = gen(seed)
        y = torch.randint(0, 5, (n,), generator=g)
        return centers[y] + 1.3 * torch.randn(n, 10, generator=g), y

    xt, yt = blobs(3000, 12)
    teacher = Teacher()
    t_opt = torch.optim.Adam(teacher.parameters(), lr=1e-3)
    for k in range(80):
        idx = torch.randint(0, 3000, (128,))
        t_opt.zero_grad()
        F.cross_entropy(teacher(xt[idx]), yt[idx]).backward()
        t_opt.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = Student()
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    T, alpha = 2.0, 0.9

    def distillation_loss(s_logits, t_logits, y):
        soft = F.kl_div(F.log_softmax(s_logits / T, dim=1), F.softmax(t_logits / T, dim=1), reduction="batchmean") * T * T
        return alpha * soft + (1 - alpha) * F.cross_entropy(s_logits, y)

    def step(i):
        idx = torch.randint(0, 3000, (64,))
        x, y = xt[idx], yt[idx]
        with torch.no_grad():
            t_logits = teacher(x)
        loss = distillation_loss(student(x), t_logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, _ = blobs(1000, 13)

    @torch.no_grad()
    def probe():
        return F.kl_div(F.log_softmax(student(xv), 1), F.softmax(teacher(xv), 1), reduction="batchmean").item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def realnvp_logdet_sign_bad():
    torch.manual_seed(0)
    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.flip = flip
            self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

        def forward(self, x):
            a, b = x.chunk(2, dim=1)
            if self.flip:
                a, b = b, a
            s, t = self.net(a).chunk(2, dim=1)
            s = torch.tanh(s)
            b = b * torch.exp(s) + t
            out = torch.cat([b, a] if self.flip else [a, b], dim=1)
            return out, s.sum(dim=1)

    class RealNVP(nn.Module):
        def __init__(self, n=6):
            super().__init__()
            self.layers = nn.ModuleList([Coupling(k % 2 == 1) for k in range(n)])

        def forward(self, x):
            logdet = x.new_zeros(len(x))
            for layer in self.layers:
                x, ld = layer(x)
                logdet = logdet + ld
            return x, logdet

    def moons(n, g=None):
        th = math.pi * torch.rand(n, generator=g)
        up = (torch.rand(n, generator=g) < 0.5).float()
        x = up * torch.cos(th) + (1 - up) * (1 - torch.cos(th))
        y = up * torch.sin(th) + (1 - up) * (0.5 - torch.sin(th))
        pts = torch.stack([(x - 0.5) / 0.87, (y - 0.25) / 0.5], 1)
        return pts + 0.15 * torch.randn(n, 2, generator=g)

    flow = RealNVP()
    opt = torch.optim.Adam(flow.parameters(), lr=2e-3)
    base = Normal(0.0, 1.0)

    def step(i):
        x = moons(128)
        z, logdet = flow(x)
        log_prob = base.log_prob(z).sum(dim=1)
        loss = -(log_prob - logdet).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    xv = moons(1000, gen(21))

    @torch.no_grad()
    def probe():
        z, logdet = flow(xv)
        return -(base.log_prob(z).sum(1) + logdet).mean().item()

    return {"model": flow, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def realnvp_logdet_sign_good():
    torch.manual_seed(0)
    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.flip = flip
            self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

        def forward(self, x):
            a, b = x.chunk(2, dim=1)
            if self.flip:
                a, b = b, a
            s, t = self.net(a).chunk(2, dim=1)
            s = torch.tanh(s)
            b = b * torch.exp(s) + t
            out = torch.cat([b, a] if self.flip else [a, b], dim=1)
            return out, s.sum(dim=1)

    class RealNVP(nn.Module):
        def __init__(self, n=6):
            super().__init__()
            self.layers = nn.ModuleList([Coupling(k % 2 == 1) for k in range(n)])

        def forward(self, x):
            logdet = x.new_zeros(len(x))
            for layer in self.layers:
                x, ld = layer(x)
                logdet = logdet + ld
            return x, logdet

    def moons(n, g=None):
        th = math.pi * torch.rand(n, generator=g)
        up = (torch.rand(n, generator=g) < 0.5).float()
        x = up * torch.cos(th) + (1 - up) * (1 - torch.cos(th))
        y = up * torch.sin(th) + (1 - up) * (0.5 - torch.sin(th))
        pts = torch.stack([(x - 0.5) / 0.87, (y - 0.25) / 0.5], 1)
        return pts + 0.15 * torch.randn(n, 2, generator=g)

    flow = RealNVP()
    opt = torch.optim.Adam(flow.parameters(), lr=2e-3)
    base = Normal(0.0, 1.0)

    def step(i):
        x = moons(128)
        z, logdet = flow(x)
        log_prob = base.log_prob(z).sum(dim=1)
        loss = -(log_prob + logdet).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    xv = moons(1000, gen(21))

    @torch.no_grad()
    def probe():
        z, logdet = flow(xv)
        return -(base.log_prob(z).sum(1) + logdet).mean().item()

    return {"model": flow, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def ddpm_fresh_noise_target_bad():
    torch.manual_seed(0)
    class Denoiser(nn.Module):
        def __init__(self, T=100, h=96):
            super().__init__()
            self.t_emb = nn.Embedding(T, 32)
            self.inp = nn.Linear(2 + 32, h)
            self.mid = nn.Linear(h, h)
            self.out = nn.Linear(h, 2)

        def forward(self, x, t):
            h = F.silu(self.inp(torch.cat([x, self.t_emb(t)], dim=-1)))
            h = h + F.silu(self.mid(h))
            return self.out(h)

    T = 100
    betas = torch.linspace(1e-3, 0.06, T)
    alpha_bar = torch.cumprod(1 - betas, dim=0)

    def q_sample(x0, t, noise):
        ab = alpha_bar[t].unsqueeze(-1)
        return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

    def ring(n, g=None):
        k = torch.randint(0, 8, (n,), generator=g).float() * (math.pi / 4)
        return 1.4 * torch.stack([k.cos(), k.sin()], 1) + 0.08 * torch.randn(n, 2, generator=g)

    model = Denoiser(T)
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def step(i):
        x0 = ring(128)
        t = torch.randint(0, T, (128,))
        x_t = q_sample(x0, t, torch.randn_like(x0))
        loss = F.mse_loss(model(x_t, t), torch.randn_like(x0))
        optim.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        return loss.item()

    gv = gen(31)
    xv, tv = ring(1000, gv), torch.randint(0, T, (1000,), generator=gv)
    nv = torch.randn(1000, 2, generator=gv)

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(q_sample(xv, tv, nv), tv), nv).item()

    return {"model": model, "optimizer": optim, "steps": 20, "step": step, "probe": probe}


def ddpm_fresh_noise_target_good():
    torch.manual_seed(0)
    class Denoiser(nn.Module):
        def __init__(self, T=100, h=96):
            super().__init__()
            self.t_emb = nn.Embedding(T, 32)
            self.inp = nn.Linear(2 + 32, h)
            self.mid = nn.Linear(h, h)
            self.out = nn.Linear(h, 2)

        def forward(self, x, t):
            h = F.silu(self.inp(torch.cat([x, self.t_emb(t)], dim=-1)))
            h = h + F.silu(self.mid(h))
            return self.out(h)

    T = 100
    betas = torch.linspace(1e-3, 0.06, T)
    alpha_bar = torch.cumprod(1 - betas, dim=0)

    def q_sample(x0, t, noise):
        ab = alpha_bar[t].unsqueeze(-1)
        return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

    def ring(n, g=None):
        k = torch.randint(0, 8, (n,), generator=g).float() * (math.pi / 4)
        return 1.4 * torch.stack([k.cos(), k.sin()], 1) + 0.08 * torch.randn(n, 2, generator=g)

    model = Denoiser(T)
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def step(i):
        x0 = ring(128)
        t = torch.randint(0, T, (128,))
        noise = torch.randn_like(x0)
        x_t = q_sample(x0, t, noise)
        loss = F.mse_loss(model(x_t, t), noise)
        optim.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        return loss.item()

    gv = gen(31)
    xv, tv = ring(1000, gv), torch.randint(0, T, (1000,), generator=gv)
    nv = torch.randn(1000, 2, generator=gv)

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(q_sample(xv, tv, nv), tv), nv).item()

    return {"model": model, "optimizer": optim, "steps": 20, "step": step, "probe": probe}


def missing_labels_as_negatives_bad():
    torch.manual_seed(0)
    class AssayNet(nn.Module):
        def __init__(self, d=20, tasks=6):
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(d, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
            self.tasks = nn.ModuleList([nn.Linear(32, 1) for _ in range(tasks)])

        def forward(self, x):
            h = self.shared(x)
            return torch.cat([t(h) for t in self.tasks], dim=1)

    W = torch.randn(20, 6, generator=gen(50)) * 0.7

    def compounds(n, seed, missing):
        g = gen(seed)
        x = torch.randn(n, 20, generator=g)
        y = torch.bernoulli(torch.sigmoid(x @ W), generator=g)
        y[torch.rand(n, 6, generator=g) < missing] = float("nan")
        return x, y

    loader = forever(DataLoader(TensorDataset(*compounds(3000, 51, 0.6)), batch_size=64, shuffle=True))
    model = AssayNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        x, y = next(loader)
        logits = model(x)
        y = torch.nan_to_num(y, nan=0.0)
        loss = F.binary_cross_entropy_with_logits(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, yv = compounds(800, 52, 0.0)

    @torch.no_grad()
    def probe():
        return F.binary_cross_entropy_with_logits(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def missing_labels_as_negatives_good():
    torch.manual_seed(0)
    class AssayNet(nn.Module):
        def __init__(self, d=20, tasks=6):
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(d, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
            self.tasks = nn.ModuleList([nn.Linear(32, 1) for _ in range(tasks)])

        def forward(self, x):
            h = self.shared(x)
            return torch.cat([t(h) for t in self.tasks], dim=1)

    W = torch.randn(20, 6, generator=gen(50)) * 0.7

    def compounds(n, seed, missing):
        g = gen(seed)
        x = torch.randn(n, 20, generator=g)
        y = torch.bernoulli(torch.sigmoid(x @ W), generator=g)
        y[torch.rand(n, 6, generator=g) < missing] = float("nan")
        return x, y

    loader = forever(DataLoader(TensorDataset(*compounds(3000, 51, 0.6)), batch_size=64, shuffle=True))
    model = AssayNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        x, y = next(loader)
        logits = model(x)
        known = ~torch.isnan(y)
        y = torch.nan_to_num(y, nan=0.0)
        loss = F.binary_cross_entropy_with_logits(logits[known], y[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, yv = compounds(800, 52, 0.0)

    @torch.no_grad()
    def probe():
        return F.binary_cross_entropy_with_logits(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpg_actor_uses_no_grad_action_bad():
    torch.manual_seed(0)
    class Actor(nn.Module):
        def __init__(self, s_dim, a_dim):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(s_dim, 64), nn.ReLU(), nn.Linear(64, a_dim), nn.Tanh())

        def forward(self, s):
            return self.net(s)

    class Critic(nn.Module):
        def __init__(self, s_dim, a_dim):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(s_dim + a_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, s, a):
            return self.net(torch.cat([s, a], -1)).squeeze(-1)

    def dynamics(s, a):
        s2 = (s + 0.4 * a @ torch.tensor([[1.0, 0.3], [-0.3, 1.0]])).clamp(-2, 2)
        return s2, -(s2 ** 2).sum(-1) - 0.05 * (a ** 2).sum(-1)

    class ReplayBuffer:
        def __init__(self, cap):
            self.cap, self.data = cap, []

        def add(self, s, a, r, s2):
            self.data.extend(zip(s, a, r, s2))
            self.data = self.data[-self.cap:]

        def sample(self, n):
            idx = torch.randint(0, len(self.data), (n,)).tolist()
            return [torch.stack(col) for col in zip(*[self.data[j] for j in idx])]

    actor, critic = Actor(2, 2), Critic(2, 2)
    actor_targ, critic_targ = copy.deepcopy(actor), copy.deepcopy(critic)
    pi_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    q_opt = torch.optim.Adam(critic.parameters(), lr=2e-3)
    buf = ReplayBuffer(4000)
    state = {"s": torch.rand(16, 2) * 4 - 2}
    gamma, tau = 0.9, 0.02

    @torch.no_grad()
    def select_action(s, noise=0.0):
        return (actor(s) + noise * torch.randn(len(s), 2)).clamp(-1, 1)

    def collect(k):
        for _ in range(k):
            s = state["s"]
            a = select_action(s, noise=0.4)
            s2, r = dynamics(s, a)
            buf.add(s, a, r, s2)
            fresh = torch.rand(16, 1) < 0.1
            state["s"] = torch.where(fresh, torch.rand(16, 2) * 4 - 2, s2)

    collect(20)

    def step(i):
        collect(1)
        s, a, r, s2 = buf.sample(64)
        with torch.no_grad():
            target = r + gamma * critic_targ(s2, actor_targ(s2))
        q_loss = F.mse_loss(critic(s, a), target)
        q_opt.zero_grad()
        q_loss.backward()
        q_opt.step()

        pi_loss = -critic(s, select_action(s)).mean()
        pi_opt.zero_grad()
        pi_loss.backward()
        pi_opt.step()

        with torch.no_grad():
            for net, targ in ((actor, actor_targ), (critic, critic_targ)):
                for p, pt in zip(net.parameters(), targ.parameters()):
                    pt.lerp_(p, tau)
        return q_loss.item()

    s0 = torch.rand(256, 2, generator=gen(61)) * 4 - 2

    @torch.no_grad()
    def probe():
        s, cost = s0.clone(), 0.0
        for _ in range(15):
            s, r = dynamics(s, actor(s))
            cost -= r.mean().item()
        return cost / 15

    return {"model": [actor, critic], "optimizer": [pi_opt, q_opt], "steps": 20, "step": step, "probe": probe}


def ddpg_actor_uses_no_grad_action_good():
    torch.manual_seed(0)
    class Actor(nn.Module):
        def __init__(self, s_dim, a_dim):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(s_dim, 64), nn.ReLU(), nn.Linear(64, a_dim), nn.Tanh())

        def forward(self, s):
            return self.net(s)

    class Critic(nn.Module):
        def __init__(self, s_dim, a_dim):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(s_dim + a_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, s, a):
            return self.net(torch.cat([s, a], -1)).squeeze(-1)

    def dynamics(s, a):
        s2 = (s + 0.4 * a @ torch.tensor([[1.0, 0.3], [-0.3, 1.0]])).clamp(-2, 2)
        return s2, -(s2 ** 2).sum(-1) - 0.05 * (a ** 2).sum(-1)

    class ReplayBuffer:
        def __init__(self, cap):
            self.cap, self.data = cap, []

        def add(self, s, a, r, s2):
            self.data.extend(zip(s, a, r, s2))
            self.data = self.data[-self.cap:]

        def sample(self, n):
            idx = torch.randint(0, len(self.data), (n,)).tolist()
            return [torch.stack(col) for col in zip(*[self.data[j] for j in idx])]

    actor, critic = Actor(2, 2), Critic(2, 2)
    actor_targ, critic_targ = copy.deepcopy(actor), copy.deepcopy(critic)
    pi_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    q_opt = torch.optim.Adam(critic.parameters(), lr=2e-3)
    buf = ReplayBuffer(4000)
    state = {"s": torch.rand(16, 2) * 4 - 2}
    gamma, tau = 0.9, 0.02

    @torch.no_grad()
    def select_action(s, noise=0.0):
        return (actor(s) + noise * torch.randn(len(s), 2)).clamp(-1, 1)

    def collect(k):
        for _ in range(k):
            s = state["s"]
            a = select_action(s, noise=0.4)
            s2, r = dynamics(s, a)
            buf.add(s, a, r, s2)
            fresh = torch.rand(16, 1) < 0.1
            state["s"] = torch.where(fresh, torch.rand(16, 2) * 4 - 2, s2)

    collect(20)

    def step(i):
        collect(1)
        s, a, r, s2 = buf.sample(64)
        with torch.no_grad():
            target = r + gamma * critic_targ(s2, actor_targ(s2))
        q_loss = F.mse_loss(critic(s, a), target)
        q_opt.zero_grad()
        q_loss.backward()
        q_opt.step()

        pi_loss = -critic(s, actor(s)).mean()
        pi_opt.zero_grad()
        pi_loss.backward()
        pi_opt.step()

        with torch.no_grad():
            for net, targ in ((actor, actor_targ), (critic, critic_targ)):
                for p, pt in zip(net.parameters(), targ.parameters()):
                    pt.lerp_(p, tau)
        return q_loss.item()

    s0 = torch.rand(256, 2, generator=gen(61)) * 4 - 2

    @torch.no_grad()
    def probe():
        s, cost = s0.clone(), 0.0
        for _ in range(15):
            s, r = dynamics(s, actor(s))
            cost -= r.mean().item()
        return cost / 15

    return {"model": [actor, critic], "optimizer": [pi_opt, q_opt], "steps": 20, "step": step, "probe": probe}


def pinn_derivative_without_graph_bad():
    torch.manual_seed(0)
    class FieldNet(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

        def forward(self, t):
            return self.net(t)

    k = 1.5

    def residual(net, t):
        t = t.requires_grad_(True)
        u = net(t)
        du = torch.autograd.grad(u, t, grad_outputs=torch.ones_like(u), retain_graph=True)[0]
        return du + k * u - torch.cos(3 * t)

    def exact(t):
        c = 1.0 - k / (k * k + 9)
        return (k * torch.cos(3 * t) + 3 * torch.sin(3 * t)) / (k * k + 9) + c * torch.exp(-k * t)

    net = FieldNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    t0 = torch.zeros(1, 1)
    u0 = torch.ones(1, 1)

    def step(i):
        opt.zero_grad()
        t = torch.rand(64, 1) * 3.0
        loss_pde = residual(net, t).pow(2).mean()
        loss_ic = (net(t0) - u0).pow(2).mean()
        loss = loss_pde + 10.0 * loss_ic
        loss.backward()
        opt.step()
        return loss.item()

    grid = torch.linspace(0, 3, 301).unsqueeze(1)

    @torch.no_grad()
    def probe():
        return (net(grid) - exact(grid)).pow(2).mean().sqrt().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def pinn_derivative_without_graph_good():
    torch.manual_seed(0)
    class FieldNet(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

        def forward(self, t):
            return self.net(t)

    k = 1.5

    def residual(net, t):
        t = t.requires_grad_(True)
        u = net(t)
        du = torch.autograd.grad(u, t, grad_outputs=torch.ones_like(u), create_graph=True)[0]
        return du + k * u - torch.cos(3 * t)

    def exact(t):
        c = 1.0 - k / (k * k + 9)
        return (k * torch.cos(3 * t) + 3 * torch.sin(3 * t)) / (k * k + 9) + c * torch.exp(-k * t)

    net = FieldNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    t0 = torch.zeros(1, 1)
    u0 = torch.ones(1, 1)

    def step(i):
        opt.zero_grad()
        t = torch.rand(64, 1) * 3.0
        loss_pde = residual(net, t).pow(2).mean()
        loss_ic = (net(t0) - u0).pow(2).mean()
        loss = loss_pde + 10.0 * loss_ic
        loss.backward()
        opt.step()
        return loss.item()

    grid = torch.linspace(0, 3, 301).unsqueeze(1)

    @torch.no_grad()
    def probe():
        return (net(grid) - exact(grid)).pow(2).mean().sqrt().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def nbeats_blocks_in_plain_list_bad():
    torch.manual_seed(0)
    class Block(nn.Module):
        def __init__(self, lookback, horizon, last, h=48):
            super().__init__()
            self.fc = nn.Sequential(nn.Linear(lookback, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
            self.back = None if last else nn.Linear(h, lookback)
            self.fore = nn.Linear(h, horizon)

        def forward(self, x):
            z = self.fc(x)
            return (0.0 if self.back is None else self.back(z)), self.fore(z)

    class NBeats(nn.Module):
        def __init__(self, lookback, horizon, n_blocks=3):
            super().__init__()
            self.skip = nn.Linear(lookback, horizon)
            self.blocks = [Block(lookback, horizon, k == n_blocks - 1) for k in range(n_blocks)]

        def forward(self, x):
            forecast = self.skip(x)
            for block in self.blocks:
                b, f = block(x)
                x = x - b
                forecast = forecast + f
            return forecast

    def windows(n, seed):
        g = gen(seed)
        x = torch.rand(n, 1, generator=g) * 1.6 - 0.8
        cols = [x[:, 0]]
        for _ in range(15):
            cols.append(1.0 - 1.75 * cols[-1] ** 2)
        s = torch.stack(cols, 1)
        s = s + 0.02 * torch.randn(s.shape, generator=g)
        return s[:, :12], s[:, 12:14]

    loader = forever(DataLoader(TensorDataset(*windows(4000, 71)), batch_size=64, shuffle=True))
    model = NBeats(12, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, yv = windows(1000, 72)

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def nbeats_blocks_in_plain_list_good():
    torch.manual_seed(0)
    class Block(nn.Module):
        def __init__(self, lookback, horizon, last, h=48):
            super().__init__()
            self.fc = nn.Sequential(nn.Linear(lookback, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
            self.back = None if last else nn.Linear(h, lookback)
            self.fore = nn.Linear(h, horizon)

        def forward(self, x):
            z = self.fc(x)
            return (0.0 if self.back is None else self.back(z)), self.fore(z)

    class NBeats(nn.Module):
        def __init__(self, lookback, horizon, n_blocks=3):
            super().__init__()
            self.skip = nn.Linear(lookback, horizon)
            self.blocks = nn.ModuleList([Block(lookback, horizon, k == n_blocks - 1) for k in range(n_blocks)])

        def forward(self, x):
            forecast = self.skip(x)
            for block in self.blocks:
                b, f = block(x)
                x = x - b
                forecast = forecast + f
            return forecast

    def windows(n, seed):
        g = gen(seed)
        x = torch.rand(n, 1, generator=g) * 1.6 - 0.8
        cols = [x[:, 0]]
        for _ in range(15):
            cols.append(1.0 - 1.75 * cols[-1] ** 2)
        s = torch.stack(cols, 1)
        s = s + 0.02 * torch.randn(s.shape, generator=g)
        return s[:, :12], s[:, 12:14]

    loader = forever(DataLoader(TensorDataset(*windows(4000, 71)), batch_size=64, shuffle=True))
    model = NBeats(12, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, yv = windows(1000, 72)

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lora_both_factors_zero_bad():
    torch.manual_seed(0)
    class LoRALinear(nn.Module):
        def __init__(self, base, r=8):
            super().__init__()
            self.base = base
            for p in self.base.parameters():
                p.requires_grad_(False)
            self.A = nn.Parameter(torch.zeros(r, base.in_features))
            self.B = nn.Parameter(torch.zeros(base.out_features, r))

        def forward(self, x):
            return self.base(x) + (x @ self.A.t()) @ self.B.t()

    class Backbone(nn.Module):
        def __init__(self, d=16, h=48):
            super().__init__()
            self.l1, self.l2 = nn.Linear(d, h), nn.Linear(h, h)
            self.head = nn.Linear(h, 2)

        def forward(self, x):
            return self.head(F.gelu(self.l2(F.gelu(self.l1(x)))))

    def task(n, seed, shift):
        x = torch.randn(n, 16, generator=gen(seed))
        a = x[:, shift] * x[:, shift + 1] + x[:, shift + 2] * x[:, shift + 3]
        return x, (a > 0).long()

    model = Backbone()
    pre = torch.optim.Adam(model.parameters(), lr=2e-3)
    xa, ya = task(3000, 81, 0)
    for k in range(300):
        j = torch.randint(0, 3000, (128,))
        pre.zero_grad()
        F.cross_entropy(model(xa[j]), ya[j]).backward()
        pre.step()

    model.l1, model.l2 = LoRALinear(model.l1), LoRALinear(model.l2)
    model.head = nn.Linear(48, 2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
    loader = forever(DataLoader(TensorDataset(*task(4000, 82, 2)), batch_size=64, shuffle=True))

    def step(i):
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, yv = task(1000, 83, 2)

    @torch.no_grad()
    def probe():
        return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lora_both_factors_zero_good():
    torch.manual_seed(0)
    class LoRALinear(nn.Module):
        def __init__(self, base, r=8):
            super().__init__()
            self.base = base
            for p in self.base.parameters():
                p.requires_grad_(False)
            self.A = nn.Parameter(torch.randn(r, base.in_features) / math.sqrt(base.in_features))
            self.B = nn.Parameter(torch.zeros(base.out_features, r))

        def forward(self, x):
            return self.base(x) + (x @ self.A.t()) @ self.B.t()

    class Backbone(nn.Module):
        def __init__(self, d=16, h=48):
            super().__init__()
            self.l1, self.l2 = nn.Linear(d, h), nn.Linear(h, h)
            self.head = nn.Linear(h, 2)

        def forward(self, x):
            return self.head(F.gelu(self.l2(F.gelu(self.l1(x)))))

    def task(n, seed, shift):
        x = torch.randn(n, 16, generator=gen(seed))
        a = x[:, shift] * x[:, shift + 1] + x[:, shift + 2] * x[:, shift + 3]
        return x, (a > 0).long()

    model = Backbone()
    pre = torch.optim.Adam(model.parameters(), lr=2e-3)
    xa, ya = task(3000, 81, 0)
    for k in range(300):
        j = torch.randint(0, 3000, (128,))
        pre.zero_grad()
        F.cross_entropy(model(xa[j]), ya[j]).backward()
        pre.step()

    model.l1, model.l2 = LoRALinear(model.l1), LoRALinear(model.l2)
    model.head = nn.Linear(48, 2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
    loader = forever(DataLoader(TensorDataset(*task(4000, 82, 2)), batch_size=64, shuffle=True))

    def step(i):
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, yv = task(1000, 83, 2)

    @torch.no_grad()
    def probe():
        return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bfloat16_master_weights_bad():
    torch.manual_seed(0)
    class HeteroscedasticNet(nn.Module):
        def __init__(self, d=6, h=64):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(d, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU())
            self.mu = nn.Linear(h, 1)
            self.raw = nn.Linear(h, 1)

        def forward(self, x):
            z = self.body(x)
            return self.mu(z).squeeze(-1), F.softplus(self.raw(z)).squeeze(-1) + 1e-3

    def sample(n, seed):
        g = gen(seed)
        x = torch.randn(n, 6, generator=g)
        f = 1.5 * torch.sin(x[:, 0] * 1.5) + x[:, 1] * x[:, 2]
        return x, f + (0.1 + 0.2 * torch.sigmoid(2 * x[:, 3])) * torch.randn(n, generator=g)

    model = HeteroscedasticNet().to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    criterion = nn.GaussianNLLLoss()
    loader = forever(DataLoader(TensorDataset(*sample(4096, 91)), batch_size=64, shuffle=True))

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        mu, var = model(x.to(torch.bfloat16))
        loss = criterion(mu.float(), y, var.float())
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, yv = sample(1000, 92)

    @torch.no_grad()
    def probe():
        net = copy.deepcopy(model).float()
        mu, var = net(xv)
        return 2.0 + (0.5 * (var.log() + (yv - mu) ** 2 / var)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bfloat16_master_weights_good():
    torch.manual_seed(0)
    class HeteroscedasticNet(nn.Module):
        def __init__(self, d=6, h=64):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(d, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU())
            self.mu = nn.Linear(h, 1)
            self.raw = nn.Linear(h, 1)

        def forward(self, x):
            z = self.body(x)
            return self.mu(z).squeeze(-1), F.softplus(self.raw(z)).squeeze(-1) + 1e-3

    def sample(n, seed):
        g = gen(seed)
        x = torch.randn(n, 6, generator=g)
        f = 1.5 * torch.sin(x[:, 0] * 1.5) + x[:, 1] * x[:, 2]
        return x, f + (0.1 + 0.2 * torch.sigmoid(2 * x[:, 3])) * torch.randn(n, generator=g)

    model = HeteroscedasticNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    criterion = nn.GaussianNLLLoss()
    loader = forever(DataLoader(TensorDataset(*sample(4096, 91)), batch_size=64, shuffle=True))

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mu, var = model(x)
        loss = criterion(mu.float(), y, var.float())
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, yv = sample(1000, 92)

    @torch.no_grad()
    def probe():
        net = copy.deepcopy(model).float()
        mu, var = net(xv)
        return 2.0 + (0.5 * (var.log() + (yv - mu) ** 2 / var)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_runs_over_batch_axis_bad():
    torch.manual_seed(0)
    class SensorLSTM(nn.Module):
        def __init__(self, n_feat=3, hidden=32):
            super().__init__()
            self.lstm = nn.LSTM(n_feat, hidden, num_layers=1)
            self.fc = nn.Linear(hidden, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1]).squeeze(-1)

    def sequences(n, seed):
        x = torch.randn(n, 16, 3, generator=gen(seed))
        w = 0.85 ** torch.arange(15, -1, -1).float()
        y = (x[:, :, 0] * w).sum(1) * 0.6 + 0.5 * torch.tanh(x[:, -1, 1])
        return x, y

    train_dl = DataLoader(TensorDataset(*sequences(2048, 111)), batch_size=32, shuffle=True)
    batches = forever(train_dl)
    model = SensorLSTM()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def step(i):
        xb, yb = next(batches)
        pred = model(xb)
        loss = criterion(pred, yb)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    xv, yv = sequences(512, 112)

    @torch.no_grad()
    def probe():
        return criterion(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_runs_over_batch_axis_good():
    torch.manual_seed(0)
    class SensorLSTM(nn.Module):
        def __init__(self, n_feat=3, hidden=32):
            super().__init__()
            self.lstm = nn.LSTM(n_feat, hidden, num_layers=1, batch_first=True)
            self.fc = nn.Linear(hidden, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1]).squeeze(-1)

    def sequences(n, seed):
        x = torch.randn(n, 16, 3, generator=gen(seed))
        w = 0.85 ** torch.arange(15, -1, -1).float()
        y = (x[:, :, 0] * w).sum(1) * 0.6 + 0.5 * torch.tanh(x[:, -1, 1])
        return x, y

    train_dl = DataLoader(TensorDataset(*sequences(2048, 111)), batch_size=32, shuffle=True)
    batches = forever(train_dl)
    model = SensorLSTM()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def step(i):
        xb, yb = next(batches)
        pred = model(xb)
        loss = criterion(pred, yb)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    xv, yv = sequences(512, 112)

    @torch.no_grad()
    def probe():
        return criterion(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def key_padding_mask_inverted_bad():
    torch.manual_seed(0)
    class EventPool(nn.Module):
        def __init__(self, d_in=3, d=32):
            super().__init__()
            self.embed = nn.Sequential(nn.Linear(d_in, d), nn.GELU(), nn.Linear(d, d))
            self.query = nn.Parameter(0.1 * torch.randn(1, 1, d))
            self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
            self.norm = nn.LayerNorm(d)
            self.out = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, 1))

        def forward(self, x, lengths):
            h = self.embed(x)
            pos = torch.arange(x.shape[1])[None, :]
            mask = pos < lengths[:, None]
            q = self.query.expand(len(x), -1, -1)
            pooled, _ = self.attn(q, h, h, key_padding_mask=mask, need_weights=False)
            return self.out(self.norm(pooled[:, 0])).squeeze(-1)

    MAX_LEN = 14

    def visits(n, seed):
        g = gen(seed)
        lengths = torch.randint(3, MAX_LEN, (n,), generator=g)
        level = torch.randn(n, 1, generator=g)
        x = torch.randn(n, MAX_LEN, 3, generator=g)
        x[:, :, 0] = level + 0.7 * x[:, :, 0]
        valid = (torch.arange(MAX_LEN)[None, :] < lengths[:, None]).float()
        y = (x[:, :, 0].sin() * valid).sum(1) / lengths
        return x * valid.unsqueeze(-1), lengths, y

    loader = forever(DataLoader(TensorDataset(*visits(3000, 121)), batch_size=64, shuffle=True))
    model = EventPool()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)

    def step(i):
        x, lengths, y = next(loader)
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(model(x, lengths), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, lv, yv = visits(800, 122)

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(xv, lv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def key_padding_mask_inverted_good():
    torch.manual_seed(0)
    class EventPool(nn.Module):
        def __init__(self, d_in=3, d=32):
            super().__init__()
            self.embed = nn.Sequential(nn.Linear(d_in, d), nn.GELU(), nn.Linear(d, d))
            self.query = nn.Parameter(0.1 * torch.randn(1, 1, d))
            self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
            self.norm = nn.LayerNorm(d)
            self.out = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, 1))

        def forward(self, x, lengths):
            h = self.embed(x)
            pos = torch.arange(x.shape[1])[None, :]
            mask = pos >= lengths[:, None]
            q = self.query.expand(len(x), -1, -1)
            pooled, _ = self.attn(q, h, h, key_padding_mask=mask, need_weights=False)
            return self.out(self.norm(pooled[:, 0])).squeeze(-1)

    MAX_LEN = 14

    def visits(n, seed):
        g = gen(seed)
        lengths = torch.randint(3, MAX_LEN, (n,), generator=g)
        level = torch.randn(n, 1, generator=g)
        x = torch.randn(n, MAX_LEN, 3, generator=g)
        x[:, :, 0] = level + 0.7 * x[:, :, 0]
        valid = (torch.arange(MAX_LEN)[None, :] < lengths[:, None]).float()
        y = (x[:, :, 0].sin() * valid).sum(1) / lengths
        return x * valid.unsqueeze(-1), lengths, y

    loader = forever(DataLoader(TensorDataset(*visits(3000, 121)), batch_size=64, shuffle=True))
    model = EventPool()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)

    def step(i):
        x, lengths, y = next(loader)
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(model(x, lengths), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, lv, yv = visits(800, 122)

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(xv, lv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def td_target_keeps_gradient_bad():
    torch.manual_seed(0)
    class ValueNet(nn.Module):
        def __init__(self, n_states=13, hidden=64):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(n_states, hidden), nn.ReLU(), nn.Linear(hidden, 1))

        def forward(self, s):
            return self.net(F.one_hot(s, 13).float()).squeeze(-1)

    N, gamma = 13, 0.97
    P = torch.zeros(N, N)
    for s in range(N):
        for jump in (-4, -2, -1, 1, 2, 4):
            P[s, (s + jump) % N] += 1 / 6
    R = torch.zeros(N)
    R[6], R[0] = 5.0, -2.0
    V_true = torch.linalg.solve(torch.eye(N) - gamma * P, P @ R)

    net = ValueNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    walkers = {"s": torch.randint(0, N, (128,))}

    def step(i):
        s = walkers["s"]
        s2 = torch.multinomial(P[s], 1).squeeze(1)
        r = R[s2]
        walkers["s"] = s2
        v = net(s)
        target = r + gamma * net(s2)
        loss = F.mse_loss(v, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return (net(torch.arange(N)) - V_true).pow(2).mean().sqrt().item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def td_target_keeps_gradient_good():
    torch.manual_seed(0)
    class ValueNet(nn.Module):
        def __init__(self, n_states=13, hidden=64):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(n_states, hidden), nn.ReLU(), nn.Linear(hidden, 1))

        def forward(self, s):
            return self.net(F.one_hot(s, 13).float()).squeeze(-1)

    N, gamma = 13, 0.97
    P = torch.zeros(N, N)
    for s in range(N):
        for jump in (-4, -2, -1, 1, 2, 4):
            P[s, (s + jump) % N] += 1 / 6
    R = torch.zeros(N)
    R[6], R[0] = 5.0, -2.0
    V_true = torch.linalg.solve(torch.eye(N) - gamma * P, P @ R)

    net = ValueNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    walkers = {"s": torch.randint(0, N, (128,))}

    def step(i):
        s = walkers["s"]
        s2 = torch.multinomial(P[s], 1).squeeze(1)
        r = R[s2]
        walkers["s"] = s2
        v = net(s)
        with torch.no_grad():
            target = r + gamma * net(s2)
        loss = F.mse_loss(v, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return (net(torch.arange(N)) - V_true).pow(2).mean().sqrt().item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def task_heads_are_one_module_bad():
    torch.manual_seed(0)
    class MultiTaskNet(nn.Module):
        def __init__(self, d=10, n_tasks=3, h=64):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, h), nn.GELU())
            self.heads = nn.ModuleList([nn.Linear(h, 1)] * n_tasks)

        def forward(self, x):
            z = self.encoder(x)
            return [head(z).squeeze(1) for head in self.heads]

    def properties(n, seed):
        x = torch.randn(n, 10, generator=gen(seed))
        y = torch.stack([x[:, 0] * x[:, 1], torch.sin(2 * x[:, 2]) + 0.5 * x[:, 0], x[:, 3] - 0.7 * x[:, 4].abs()], 1)
        return x, y + 0.05 * torch.randn(n, 3, generator=gen(seed + 500))

    loader = forever(DataLoader(TensorDataset(*properties(3000, 131)), batch_size=64, shuffle=True))
    net = MultiTaskNet()
    weights = [1.0, 1.0, 0.5]
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def step(i):
        x, y = next(loader)
        outs = net(x)
        losses = [w * F.mse_loss(o, y[:, k]) for k, (w, o) in enumerate(zip(weights, outs))]
        total = sum(losses)
        opt.zero_grad()
        total.backward()
        opt.step()
        return total.item()

    xv, yv = properties(800, 132)

    @torch.no_grad()
    def probe():
        return F.mse_loss(torch.stack(net(xv), 1), yv).item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def task_heads_are_one_module_good():
    torch.manual_seed(0)
    class MultiTaskNet(nn.Module):
        def __init__(self, d=10, n_tasks=3, h=64):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, h), nn.GELU())
            self.heads = nn.ModuleList([nn.Linear(h, 1) for _ in range(n_tasks)])

        def forward(self, x):
            z = self.encoder(x)
            return [head(z).squeeze(1) for head in self.heads]

    def properties(n, seed):
        x = torch.randn(n, 10, generator=gen(seed))
        y = torch.stack([x[:, 0] * x[:, 1], torch.sin(2 * x[:, 2]) + 0.5 * x[:, 0], x[:, 3] - 0.7 * x[:, 4].abs()], 1)
        return x, y + 0.05 * torch.randn(n, 3, generator=gen(seed + 500))

    loader = forever(DataLoader(TensorDataset(*properties(3000, 131)), batch_size=64, shuffle=True))
    net = MultiTaskNet()
    weights = [1.0, 1.0, 0.5]
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def step(i):
        x, y = next(loader)
        outs = net(x)
        losses = [w * F.mse_loss(o, y[:, k]) for k, (w, o) in enumerate(zip(weights, outs))]
        total = sum(losses)
        opt.zero_grad()
        total.backward()
        opt.step()
        return total.item()

    xv, yv = properties(800, 132)

    @torch.no_grad()
    def probe():
        return F.mse_loss(torch.stack(net(xv), 1), yv).item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def sampler_gets_class_weights_bad():
    torch.manual_seed(0)
    class FaultClassifier(nn.Module):
        def __init__(self, d=12, n_cls=4):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_cls))

        def forward(self, x):
            return self.net(x)

    centers = torch.randn(4, 12, generator=gen(150)) * 0.8

    def faults(n, seed, freq):
        g = gen(seed)
        y = torch.multinomial(torch.tensor(freq), n, replacement=True, generator=g)
        return centers[y] + torch.randn(n, 12, generator=g), y

    x, y = faults(3000, 151, [0.7, 0.15, 0.1, 0.05])
    class_counts = torch.bincount(y, minlength=4)
    class_weights = 1.0 / class_counts.double()
    sampler = WeightedRandomSampler(class_weights, num_samples=len(y), replacement=True)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=64, sampler=sampler))
    model = FaultClassifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        xb, yb = next(loader)
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, yv = faults(1200, 152, [0.25, 0.25, 0.25, 0.25])

    @torch.no_grad()
    def probe():
        model.eval()
        out = criterion(model(xv), yv).item()
        model.train()
        return out

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sampler_gets_class_weights_good():
    torch.manual_seed(0)
    class FaultClassifier(nn.Module):
        def __init__(self, d=12, n_cls=4):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_cls))

        def forward(self, x):
            return self.net(x)

    centers = torch.randn(4, 12, generator=gen(150)) * 0.8

    def faults(n, seed, freq):
        g = gen(seed)
        y = torch.multinomial(torch.tensor(freq), n, replacement=True, generator=g)
        return centers[y] + torch.randn(n, 12, generator=g), y

    x, y = faults(3000, 151, [0.7, 0.15, 0.1, 0.05])
    class_counts = torch.bincount(y, minlength=4)
    class_weights = 1.0 / class_counts.double()
    sampler = WeightedRandomSampler(class_weights[y], num_samples=len(y), replacement=True)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=64, sampler=sampler))
    model = FaultClassifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        xb, yb = next(loader)
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, yv = faults(1200, 152, [0.25, 0.25, 0.25, 0.25])

    @torch.no_grad()
    def probe():
        model.eval()
        out = criterion(model(xv), yv).item()
        model.train()
        return out

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mirrored_frame_same_steering_bad():
    torch.manual_seed(0)
    class DriverNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
            )
            self.fc = nn.Sequential(nn.Flatten(), nn.Linear(16 * 3 * 4, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, img):
            return self.fc(self.conv(img)).squeeze(1)

    def drive(n, seed):
        g = gen(seed)
        offset = torch.rand(n, 1, 1, generator=g) * 1.4 - 0.7
        bend = torch.rand(n, 1, 1, generator=g) * 1.0 - 0.5
        rows = torch.linspace(0, 1, 12).view(1, 12, 1)
        cols = torch.linspace(-1, 1, 16).view(1, 1, 16)
        lane = torch.exp(-((cols - offset * rows - bend * (1 - rows) ** 2) ** 2) / 0.05)
        img = lane + 0.1 * torch.randn(n, 12, 16, generator=g)
        return img.unsqueeze(1), (0.8 * offset + 0.9 * bend).view(n)

    def augment(img, angle):
        flip = torch.rand(len(img)) < 0.5
        img = torch.where(flip.view(-1, 1, 1, 1), img.flip(-1), img)
        img = img * (0.8 + 0.4 * torch.rand(len(img), 1, 1, 1))
        return img, angle

    loader = forever(DataLoader(TensorDataset(*drive(1500, 161)), batch_size=32, shuffle=True))
    policy = DriverNet()
    opt = torch.optim.Adam(policy.parameters(), lr=1e-3)

    def step(i):
        img, angle = augment(*next(loader))
        opt.zero_grad()
        loss = F.mse_loss(policy(img), angle)
        loss.backward()
        opt.step()
        return loss.item()

    xv, av = drive(400, 162)

    @torch.no_grad()
    def probe():
        return F.mse_loss(policy(xv), av).item()

    return {"model": policy, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def mirrored_frame_same_steering_good():
    torch.manual_seed(0)
    class DriverNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
            )
            self.fc = nn.Sequential(nn.Flatten(), nn.Linear(16 * 3 * 4, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, img):
            return self.fc(self.conv(img)).squeeze(1)

    def drive(n, seed):
        g = gen(seed)
        offset = torch.rand(n, 1, 1, generator=g) * 1.4 - 0.7
        bend = torch.rand(n, 1, 1, generator=g) * 1.0 - 0.5
        rows = torch.linspace(0, 1, 12).view(1, 12, 1)
        cols = torch.linspace(-1, 1, 16).view(1, 1, 16)
        lane = torch.exp(-((cols - offset * rows - bend * (1 - rows) ** 2) ** 2) / 0.05)
        img = lane + 0.1 * torch.randn(n, 12, 16, generator=g)
        return img.unsqueeze(1), (0.8 * offset + 0.9 * bend).view(n)

    def augment(img, angle):
        flip = torch.rand(len(img)) < 0.5
        img = torch.where(flip.view(-1, 1, 1, 1), img.flip(-1), img)
        img = img * (0.8 + 0.4 * torch.rand(len(img), 1, 1, 1))
        angle = torch.where(flip, -angle, angle)
        return img, angle

    loader = forever(DataLoader(TensorDataset(*drive(1500, 161)), batch_size=32, shuffle=True))
    policy = DriverNet()
    opt = torch.optim.Adam(policy.parameters(), lr=1e-3)

    def step(i):
        img, angle = augment(*next(loader))
        opt.zero_grad()
        loss = F.mse_loss(policy(img), angle)
        loss.backward()
        opt.step()
        return loss.item()

    xv, av = drive(400, 162)

    @torch.no_grad()
    def probe():
        return F.mse_loss(policy(xv), av).item()

    return {"model": policy, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def critic_steps_on_actor_gradients_bad():
    torch.manual_seed(0)
    class GaussianActor(nn.Module):
        def __init__(self, s_dim=3, a_dim=1):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(s_dim, 48), nn.ReLU())
            self.mean, self.log_std = nn.Linear(48, a_dim), nn.Linear(48, a_dim)

        def forward(self, s, g=None):
            h = self.trunk(s)
            mu, std = self.mean(h), self.log_std(h).clamp(-4, 0.5).exp()
            u = mu + std * torch.randn(mu.shape, generator=g)
            a = torch.tanh(u)
            logp = (Normal(mu, std).log_prob(u) - torch.log(1 - a.pow(2) + 1e-5)).sum(-1)
            return a, logp

    class TwinQ(nn.Module):
        def __init__(self, s_dim=3, a_dim=1):
            super().__init__()
            def mlp():
                return nn.Sequential(nn.Linear(s_dim + a_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
            self.q1, self.q2 = mlp(), mlp()

        def forward(self, s, a):
            sa = torch.cat([s, a], -1)
            return self.q1(sa).squeeze(-1), self.q2(sa).squeeze(-1)

    A = torch.tensor([[0.9, 0.2, 0.0], [-0.2, 0.9, 0.1], [0.0, -0.1, 0.8]])
    B = torch.tensor([[0.1, 0.3, 0.5]])

    def transition(s, a):
        s2 = (s @ A.t() + a @ B).clamp(-3, 3)
        return s2, -(s2.pow(2).mean(-1)) - 0.05 * a.pow(2).mean(-1)

    actor, critic = GaussianActor(), TwinQ()
    critic_t = copy.deepcopy(critic).requires_grad_(False)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=2e-3)
    gamma, tau, alpha = 0.9, 0.02, 0.02

    def step(i):
        s = torch.randn(96, 3)
        with torch.no_grad():
            a, _ = actor(s)
            s2, r = transition(s, a)
            a2, logp2 = actor(s2)
            y = r + gamma * (torch.min(*critic_t(s2, a2)) - alpha * logp2)
        q1, q2 = critic(s, a)
        critic_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        critic_opt.zero_grad()
        critic_loss.backward()

        pi, logp = actor(s)
        actor_loss = (alpha * logp - torch.min(*critic(s, pi))).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()
        critic_opt.step()

        with torch.no_grad():
            for p, pt in zip(critic.parameters(), critic_t.parameters()):
                pt.mul_(1 - tau).add_(tau * p)
        return critic_loss.item()

    s_val = torch.randn(256, 3, generator=gen(171))

    @torch.no_grad()
    def probe():
        g = gen(172)
        s, ret = s_val.repeat(8, 1), 0.0
        a0, _ = actor(s_val, g)
        a = a0.repeat(8, 1)
        for k in range(40):
            s, r = transition(s, a)
            a, logp = actor(s, g)
            ret = ret + gamma ** k * (r - gamma * alpha * logp)
        mc = ret.view(8, -1).mean(0)
        return (torch.min(*critic(s_val, a0)) - mc).pow(2).mean().sqrt().item()

    return {"model": [actor, critic], "optimizer": [actor_opt, critic_opt], "steps": 20, "step": step, "probe": probe}


def critic_steps_on_actor_gradients_good():
    torch.manual_seed(0)
    class GaussianActor(nn.Module):
        def __init__(self, s_dim=3, a_dim=1):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(s_dim, 48), nn.ReLU())
            self.mean, self.log_std = nn.Linear(48, a_dim), nn.Linear(48, a_dim)

        def forward(self, s, g=None):
            h = self.trunk(s)
            mu, std = self.mean(h), self.log_std(h).clamp(-4, 0.5).exp()
            u = mu + std * torch.randn(mu.shape, generator=g)
            a = torch.tanh(u)
            logp = (Normal(mu, std).log_prob(u) - torch.log(1 - a.pow(2) + 1e-5)).sum(-1)
            return a, logp

    class TwinQ(nn.Module):
        def __init__(self, s_dim=3, a_dim=1):
            super().__init__()
            def mlp():
                return nn.Sequential(nn.Linear(s_dim + a_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
            self.q1, self.q2 = mlp(), mlp()

        def forward(self, s, a):
            sa = torch.cat([s, a], -1)
            return self.q1(sa).squeeze(-1), self.q2(sa).squeeze(-1)

    A = torch.tensor([[0.9, 0.2, 0.0], [-0.2, 0.9, 0.1], [0.0, -0.1, 0.8]])
    B = torch.tensor([[0.1, 0.3, 0.5]])

    def transition(s, a):
        s2 = (s @ A.t() + a @ B).clamp(-3, 3)
        return s2, -(s2.pow(2).mean(-1)) - 0.05 * a.pow(2).mean(-1)

    actor, critic = GaussianActor(), TwinQ()
    critic_t = copy.deepcopy(critic).requires_grad_(False)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=2e-3)
    gamma, tau, alpha = 0.9, 0.02, 0.02

    def step(i):
        s = torch.randn(96, 3)
        with torch.no_grad():
            a, _ = actor(s)
            s2, r = transition(s, a)
            a2, logp2 = actor(s2)
            y = r + gamma * (torch.min(*critic_t(s2, a2)) - alpha * logp2)
        q1, q2 = critic(s, a)
        critic_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        pi, logp = actor(s)
        actor_loss = (alpha * logp - torch.min(*critic(s, pi))).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()

        with torch.no_grad():
            for p, pt in zip(critic.parameters(), critic_t.parameters()):
                pt.mul_(1 - tau).add_(tau * p)
        return critic_loss.item()

    s_val = torch.randn(256, 3, generator=gen(171))

    @torch.no_grad()
    def probe():
        g = gen(172)
        s, ret = s_val.repeat(8, 1), 0.0
        a0, _ = actor(s_val, g)
        a = a0.repeat(8, 1)
        for k in range(40):
            s, r = transition(s, a)
            a, logp = actor(s, g)
            ret = ret + gamma ** k * (r - gamma * alpha * logp)
        mc = ret.view(8, -1).mean(0)
        return (torch.min(*critic(s_val, a0)) - mc).pow(2).mean().sqrt().item()

    return {"model": [actor, critic], "optimizer": [actor_opt, critic_opt], "steps": 20, "step": step, "probe": probe}


def reptile_snapshot_is_alias_bad():
    torch.manual_seed(0)
    class SineNet(nn.Module):
        def __init__(self, h=48):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 1))

        def forward(self, x):
            return self.net(x)

    def make_task(g=None):
        amp = 0.5 + 2.5 * torch.rand(1, generator=g)
        phase = 2 * math.pi * torch.rand(1, generator=g)
        return lambda x: amp * torch.sin(x + phase)

    model = SineNet()
    inner_opt = torch.optim.SGD(model.parameters(), lr=0.02)
    inner_steps, meta_lr, meta_iters = 10, 0.15, 2000

    def step(i):
        before = model.state_dict()
        f = make_task()
        xs = torch.rand(40, 1) * 10 - 5
        ys = f(xs)
        for k in range(inner_steps):
            j = torch.randint(0, 40, (20,))
            inner_opt.zero_grad()
            loss = F.mse_loss(model(xs[j]), ys[j])
            loss.backward()
            inner_opt.step()
        after = model.state_dict()
        eps = meta_lr * (1 - i / meta_iters)
        model.load_state_dict({k: before[k] + eps * (after[k] - before[k]) for k in before})
        return loss.item()

    def probe():
        g, tot = gen(181), 0.0
        for _ in range(40):
            f = make_task(g)
            net = copy.deepcopy(model)
            o = torch.optim.SGD(net.parameters(), lr=0.02)
            xs = torch.rand(10, 1, generator=g) * 10 - 5
            for k in range(5):
                o.zero_grad()
                F.mse_loss(net(xs), f(xs)).backward()
                o.step()
            grid = torch.linspace(-5, 5, 100).unsqueeze(1)
            with torch.no_grad():
                tot += F.mse_loss(net(grid), f(grid)).item()
        return tot / 40

    return {"model": model, "optimizer": inner_opt, "steps": 20, "step": step, "probe": probe}


def reptile_snapshot_is_alias_good():
    torch.manual_seed(0)
    class SineNet(nn.Module):
        def __init__(self, h=48):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 1))

        def forward(self, x):
            return self.net(x)

    def make_task(g=None):
        amp = 0.5 + 2.5 * torch.rand(1, generator=g)
        phase = 2 * math.pi * torch.rand(1, generator=g)
        return lambda x: amp * torch.sin(x + phase)

    model = SineNet()
    inner_opt = torch.optim.SGD(model.parameters(), lr=0.02)
    inner_steps, meta_lr, meta_iters = 10, 0.15, 2000

    def step(i):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        f = make_task()
        xs = torch.rand(40, 1) * 10 - 5
        ys = f(xs)
        for k in range(inner_steps):
            j = torch.randint(0, 40, (20,))
            inner_opt.zero_grad()
            loss = F.mse_loss(model(xs[j]), ys[j])
            loss.backward()
            inner_opt.step()
        after = model.state_dict()
        eps = meta_lr * (1 - i / meta_iters)
        model.load_state_dict({k: before[k] + eps * (after[k] - before[k]) for k in before})
        return loss.item()

    def probe():
        g, tot = gen(181), 0.0
        for _ in range(40):
            f = make_task(g)
            net = copy.deepcopy(model)
            o = torch.optim.SGD(net.parameters(), lr=0.02)
            xs = torch.rand(10, 1, generator=g) * 10 - 5
            for k in range(5):
                o.zero_grad()
                F.mse_loss(net(xs), f(xs)).backward()
                o.step()
            grid = torch.linspace(-5, 5, 100).unsqueeze(1)
            with torch.no_grad():
                tot += F.mse_loss(net(grid), f(grid)).item()
        return tot / 40

    return {"model": model, "optimizer": inner_opt, "steps": 20, "step": step, "probe": probe}


def teacher_left_in_train_mode_bad():
    torch.manual_seed(0)
    class TeacherNet(nn.Module):
        def __init__(self, d=12, k=6, h=96):
            super().__init__()
            self.f = nn.Sequential(
                nn.Linear(d, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Dropout(0.5),
                nn.Linear(h, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Dropout(0.5), nn.Linear(h, k))

        def forward(self, x):
            return self.f(x)

    class StudentNet(nn.Module):
        def __init__(self, d=12, k=6, h=64):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, k))

        def forward(self, x):
            return self.f(x)

    centers = 0.9 * torch.randn(6, 12, generator=gen(190))

    def clusters(n, seed):
        g = gen(seed)
        y = torch.randint(0, 6, (n,), generator=g)
        return centers[y] + torch.randn(n, 12, generator=g), y

    x, y = clusters(4000, 191)
    teacher = TeacherNet()
    t_opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for k in range(400):
        j = torch.randint(0, 4000, (128,))
        t_opt.zero_grad()
        F.cross_entropy(teacher(x[j]), y[j]).backward()
        t_opt.step()
    for p in teacher.parameters():
        p.requires_grad_(False)
    reference = copy.deepcopy(teacher).eval()

    student = StudentNet()
    loader = forever(DataLoader(TensorDataset(x), batch_size=32, shuffle=True, drop_last=True))
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    kd = nn.KLDivLoss(reduction="batchmean", log_target=True)

    def step(i):
        (xb,) = next(loader)
        xb = xb + 0.1 * torch.randn_like(xb)
        with torch.no_grad():
            t = F.log_softmax(teacher(xb), dim=1)
        s = F.log_softmax(student(xb), dim=1)
        loss = kd(s, t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, _ = clusters(1000, 192)

    @torch.no_grad()
    def probe():
        return kd(F.log_softmax(student(xv), 1), F.log_softmax(reference(xv), 1)).item()

    return {"model": [student, teacher], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def teacher_left_in_train_mode_good():
    torch.manual_seed(0)
    class TeacherNet(nn.Module):
        def __init__(self, d=12, k=6, h=96):
            super().__init__()
            self.f = nn.Sequential(
                nn.Linear(d, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Dropout(0.5),
                nn.Linear(h, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Dropout(0.5), nn.Linear(h, k))

        def forward(self, x):
            return self.f(x)

    class StudentNet(nn.Module):
        def __init__(self, d=12, k=6, h=64):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, k))

        def forward(self, x):
            return self.f(x)

    centers = 0.9 * torch.randn(6, 12, generator=gen(190))

    def clusters(n, seed):
        g = gen(seed)
        y = torch.randint(0, 6, (n,), generator=g)
        return centers[y] + torch.randn(n, 12, generator=g), y

    x, y = clusters(4000, 191)
    teacher = TeacherNet()
    t_opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for k in range(400):
        j = torch.randint(0, 4000, (128,))
        t_opt.zero_grad()
        F.cross_entropy(teacher(x[j]), y[j]).backward()
        t_opt.step()
    for p in teacher.parameters():
        p.requires_grad_(False)
    reference = copy.deepcopy(teacher).eval()
    teacher.eval()

    student = StudentNet()
    loader = forever(DataLoader(TensorDataset(x), batch_size=32, shuffle=True, drop_last=True))
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    kd = nn.KLDivLoss(reduction="batchmean", log_target=True)

    def step(i):
        (xb,) = next(loader)
        xb = xb + 0.1 * torch.randn_like(xb)
        with torch.no_grad():
            t = F.log_softmax(teacher(xb), dim=1)
        s = F.log_softmax(student(xb), dim=1)
        loss = kd(s, t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    xv, _ = clusters(1000, 192)

    @torch.no_grad()
    def probe():
        return kd(F.log_softmax(student(xv), 1), F.log_softmax(reference(xv), 1)).item()

    return {"model": [student, teacher], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gan_both_optimizers_on_discriminator_bad():
    torch.manual_seed(0)
    class Generator(nn.Module):
        def __init__(self, nz=6, h=64):
            super().__init__()
            self.main = nn.Sequential(nn.Linear(nz, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, 2))

        def forward(self, z):
            return self.main(z)

    class Discriminator(nn.Module):
        def __init__(self, h=64):
            super().__init__()
            self.main = nn.Sequential(nn.Linear(2, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, 1))

        def forward(self, x):
            return self.main(x).squeeze(1)

    def real_batch(n, g=None):
        k = torch.randint(0, 5, (n,), generator=g).float() * (2 * math.pi / 5)
        return 1.2 * torch.stack([k.cos(), k.sin()], 1) + 0.2 * torch.randn(n, 2, generator=g) + 0.3

    nz, bs = 6, 128
    netG, netD = Generator(nz), Discriminator()
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    ones, zeros = torch.ones(bs), torch.zeros(bs)

    def step(i):
        netD.zero_grad()
        errD_real = criterion(netD(real_batch(bs)), ones)
        errD_real.backward()
        fake = netG(torch.randn(bs, nz))
        errD_fake = criterion(netD(fake.detach()), zeros)
        errD_fake.backward()
        optimizerD.step()

        netD.zero_grad()
        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optimizerG.step()
        return (errD_real + errD_fake).item()

    zv = torch.randn(500, nz, generator=gen(201))
    xv = real_batch(500, gen(202))

    @torch.no_grad()
    def probe():
        f = netG(zv)
        return (2 * torch.cdist(f, xv).mean() - torch.cdist(f, f).mean() - torch.cdist(xv, xv).mean()).item()

    return {"model": [netG, netD], "optimizer": [optimizerD, optimizerG], "steps": 20, "step": step, "probe": probe}


def gan_both_optimizers_on_discriminator_good():
    torch.manual_seed(0)
    class Generator(nn.Module):
        def __init__(self, nz=6, h=64):
            super().__init__()
            self.main = nn.Sequential(nn.Linear(nz, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, 2))

        def forward(self, z):
            return self.main(z)

    class Discriminator(nn.Module):
        def __init__(self, h=64):
            super().__init__()
            self.main = nn.Sequential(nn.Linear(2, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, 1))

        def forward(self, x):
            return self.main(x).squeeze(1)

    def real_batch(n, g=None):
        k = torch.randint(0, 5, (n,), generator=g).float() * (2 * math.pi / 5)
        return 1.2 * torch.stack([k.cos(), k.sin()], 1) + 0.2 * torch.randn(n, 2, generator=g) + 0.3

    nz, bs = 6, 128
    netG, netD = Generator(nz), Discriminator()
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    ones, zeros = torch.ones(bs), torch.zeros(bs)

    def step(i):
        netD.zero_grad()
        errD_real = criterion(netD(real_batch(bs)), ones)
        errD_real.backward()
        fake = netG(torch.randn(bs, nz))
        errD_fake = criterion(netD(fake.detach()), zeros)
        errD_fake.backward()
        optimizerD.step()

        netD.zero_grad()
        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optimizerG.step()
        return (errD_real + errD_fake).item()

    zv = torch.randn(500, nz, generator=gen(201))
    xv = real_batch(500, gen(202))

    @torch.no_grad()
    def probe():
        f = netG(zv)
        return (2 * torch.cdist(f, xv).mean() - torch.cdist(f, f).mean() - torch.cdist(xv, xv).mean()).item()

    return {"model": [netG, netD], "optimizer": [optimizerD, optimizerG], "steps": 20, "step": step, "probe": probe}
