"""Twenty-two small programs as novices and students write, each with one bug that people often make, and a mended
twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""
# ruff: noqa

import math
import random
from collections import deque
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)


# ---------------------------------------------------------------- shared helpers


@contextmanager
def _evaluating(*models):
    """Evaluation that leaves modes, gradients and random state as they were."""
    rng, py = torch.get_rng_state(), random.getstate()
    flags = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, f in flags:
            m.training = f
        torch.set_rng_state(rng)
        random.setstate(py)


def _cycle(loader):
    while True:
        for batch in loader:
            yield batch


_SEGMENTS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"]


def _digits(n, seed, size=16, noise=0.15, classes=10):
    """Hand-drawn-like seven-segment digits, pictures 1 x size x size in [0, 1]."""
    g = torch.Generator().manual_seed(seed)
    r = lambda k: int(torch.randint(0, k, (1,), generator=g))
    y = torch.randint(0, classes, (n,), generator=g)
    x = torch.zeros(n, 1, size, size)
    for i in range(n):
        h, w = 9 + r(3), 5 + r(3)
        top, left = 1 + r(size - h - 1), 1 + r(size - w - 1)
        mid, bot, right = top + h // 2, top + h - 1, left + w - 1
        ink = 0.7 + 0.3 * float(torch.rand(1, generator=g))
        p = x[i, 0]
        for s in _SEGMENTS[int(y[i])]:
            if s == "a":
                p[top, left : right + 1] = ink
            if s == "g":
                p[mid, left : right + 1] = ink
            if s == "d":
                p[bot, left : right + 1] = ink
            if s == "f":
                p[top : mid + 1, left] = ink
            if s == "b":
                p[top : mid + 1, right] = ink
            if s == "e":
                p[mid : bot + 1, left] = ink
            if s == "c":
                p[mid : bot + 1, right] = ink
    x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 1) * 0.9 + 0.6 * x
    x = (x + noise * torch.randn(x.shape, generator=g)).clamp(0, 1)
    return x, y


def _sensor_windows(n, seed, classes=6, T=32, C=6):
    """Wearable-sensor windows (n, T, C): each activity has its own rhythm and sway."""
    g = torch.Generator().manual_seed(seed)
    gw = torch.Generator().manual_seed(77)
    freq = 1.0 + 0.7 * torch.arange(classes).float()
    amp = 0.5 + torch.rand(classes, C, generator=gw)
    y = torch.randint(0, classes, (n,), generator=g)
    t = torch.arange(T).float() / T
    phase = 2 * math.pi * torch.rand(n, 1, C, generator=g) * 0.5
    speed = 1 + 0.08 * torch.randn(n, 1, 1, generator=g)
    x = amp[y][:, None] * torch.sin(2 * math.pi * freq[y][:, None, None] * speed * t[None, :, None] + phase)
    x = x + 0.4 * torch.randn(n, T, C, generator=g)
    return x, y


def _lesions(n, seed, size=24):
    """Grey pictures with one or two bright blobs and their masks."""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    img = 0.35 + 0.08 * torch.randn(n, 1, size, size, generator=g)
    mask = torch.zeros(n, 1, size, size)
    for i in range(n):
        for _ in range(1 + int(torch.randint(0, 2, (1,), generator=g))):
            cx, cy = (4 + (size - 8) * torch.rand(2, generator=g)).tolist()
            a, b = (3 + 3 * torch.rand(2, generator=g)).tolist()
            inside = (((xx - cx) / a) ** 2 + ((yy - cy) / b) ** 2) < 1
            mask[i, 0][inside] = 1.0
            img[i, 0][inside] += 0.25
    return img.clamp(0, 1), mask


class _CartPoles:
    """A batch of cart-poles (the usual equations), restarted on their own when they fall."""

    def __init__(self, n, seed, limit=200):
        self.g = torch.Generator().manual_seed(seed)
        self.n, self.limit = n, limit
        self.scale = torch.tensor([1.0, 1.0, 0.1, 1.0])
        self.s = self._fresh(n)
        self.t = torch.zeros(n)

    def _fresh(self, n):
        return (torch.rand(n, 4, generator=self.g) - 0.5) * 0.1

    def obs(self):
        return self.s / self.scale

    def step(self, a):
        x, v, th, w = self.s.unbind(1)
        force = torch.where(a == 1, 10.0, -10.0)
        cos, sin = th.cos(), th.sin()
        tmp = (force + 0.05 * w**2 * sin) / 1.1
        thacc = (9.8 * sin - cos * tmp) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        xacc = tmp - 0.05 * thacc * cos / 1.1
        self.s = torch.stack([x + 0.02 * v, v + 0.02 * xacc, th + 0.02 * w, w + 0.02 * thacc], 1)
        self.t = self.t + 1
        fell = (self.s[:, 0].abs() > 2.4) | (self.s[:, 2].abs() > 0.2095)
        nxt = self.obs()
        over = fell | (self.t >= self.limit)
        if over.any():
            self.s = torch.where(over[:, None], self._fresh(self.n), self.s)
            self.t = torch.where(over, torch.zeros(self.n), self.t)
        return nxt, torch.ones(self.n), fell.float()


def _cartpole_lost_return(policy, seed=4321, n=32, limit=200):
    """Share of the attainable return that the greedy policy loses."""
    env = _CartPoles(n, seed, limit=10**9)
    alive, total = torch.ones(n), 0.0
    for _ in range(limit):
        _, _, fell = env.step(policy(env.obs()))
        total += float(alive.sum())
        alive = alive * (1 - fell)
        if not alive.any():
            break
    return 1.0 - total / (n * limit)


def _energy_distance(a, b):
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


CASES = [
    {
        "name": "digits_softmax_before_ce",
        "steps": 300,
        "what": "The network ends in nn.Softmax and its probabilities are given to nn.CrossEntropyLoss, which applies log-softmax itself; the loss sees a double softmax, cannot fall below about 1.46 for ten classes, and its gradients are squashed.",
    },
    {
        "name": "house_prices_broadcast_mse",
        "steps": 400,
        "what": "The network returns (N, 1) and the targets are (N,), so MSELoss broadcasts to an (N, N) matrix and every prediction is pulled towards the mean of the batch's targets.",
    },
    {
        "name": "lstm_forecast_no_zero_grad",
        "steps": 300,
        "what": "optimizer.zero_grad() is never called, so every step uses the sum of all gradients since the start of training.",
    },
    {
        "name": "activity_lstm_not_batch_first",
        "steps": 400,
        "what": "The windows are (batch, time, channel) but nn.LSTM is built without batch_first=True, so it runs along the batch axis and out[:, -1] sees a single time step of each window.",
    },
    {
        "name": "gan_generator_step_on_detached_fake",
        "steps": 1000,
        "what": "The generator's loss is computed on D(fake.detach()), so no gradient reaches the generator and it never learns.",
    },
    {
        "name": "vae_mean_bce_summed_kl",
        "steps": 400,
        "what": "The reconstruction term is averaged over all pixels while the KL term is summed, so the KL outweighs it several hundred times and the posterior collapses to the prior.",
    },
    {
        "name": "ddpm_uniform_noise",
        "steps": 800,
        "what": "The forward process adds torch.rand_like noise (uniform on [0, 1), mean 0.5) where DDPM needs standard normal noise, so the model is trained on another process than the one it is sampled with.",
    },
    {
        "name": "dqn_no_done_mask",
        "steps": 3000,
        "what": "The Q-learning target bootstraps from the next state also where the episode ended there: the (1 - done) factor is missing, so falling over costs nothing.",
    },
    {
        "name": "a2c_advantage_not_detached",
        "steps": 800,
        "what": "The advantage in the actor's loss is not detached, so the policy-gradient term also pushes the critic's values (by -log pi each step), and the bootstrapped values drift far from the true returns.",
    },
    {
        "name": "simclr_self_similarity_kept",
        "steps": 200,
        "what": "In the NT-Xent loss the diagonal of the similarity matrix (each sample with itself) is not masked out, so each row's largest logit is always the sample itself, which swallows the softmax.",
    },
    {
        "name": "gcn_loss_on_unlabelled_nodes",
        "steps": 200,
        "what": "The loss is taken over all nodes though only the training nodes have labels; the unlabelled ones carry the filler class 0 and teach the network to answer class 0.",
    },
    {
        "name": "audio_blocks_in_python_list",
        "steps": 300,
        "what": "The residual blocks are kept in a plain Python list and not an nn.ModuleList, so their parameters are not registered and the optimizer never trains them.",
    },
    {
        "name": "finetune_head_replaced_after_optimizer",
        "steps": 300,
        "what": "The optimizer is built before model.fc is replaced for the new task, so it holds the discarded head's parameters and the new head is never updated.",
    },
    {
        "name": "churn_scheduler_stepped_per_batch",
        "steps": 600,
        "what": "ExponentialLR(gamma=0.9) is meant to be stepped once an epoch but is stepped after every batch, so the rate is almost zero after a few dozen batches.",
    },
    {
        "name": "box_regression_uint8_wraparound",
        "steps": 400,
        "what": "The mean is subtracted while the pictures are still uint8, so every pixel darker than 128 wraps around to a large positive value.",
    },
    {
        "name": "ecg_eval_mode_never_left",
        "steps": 250,
        "what": "evaluate() is called for a baseline before training and puts the model in eval mode; model.train() is never called afterwards, so batch norm keeps its initial statistics and dropout is off while training.",
    },
    {
        "name": "segmentation_flip_image_only",
        "steps": 200,
        "what": "The random horizontal flip of the augmentation is applied to the picture but not to its mask, so for half of the samples the mask does not belong to the picture.",
    },
    {
        "name": "multilabel_cross_entropy",
        "steps": 500,
        "what": "The targets are multi-hot (several tags may be on at once) but the loss is nn.CrossEntropyLoss, whose softmax makes the tags compete; the sigmoid outputs that are thresholded at 0.5 are never trained.",
    },
    {
        "name": "siamese_contrastive_label_flipped",
        "steps": 300,
        "what": "The contrastive loss expects label 0 for a pair of the same class and 1 for a different pair, but the dataset gives 1 for the same class; the network pushes equal pairs apart and pulls unequal pairs together.",
    },
    {
        "name": "autoencoder_sigmoid_on_centred_input",
        "steps": 400,
        "what": "The pictures are normalised to [-1, 1] but the decoder ends in a Sigmoid, whose range is (0, 1), so everything darker than mid-grey cannot be reconstructed.",
    },
    {
        "name": "matrix_factorisation_default_embedding_init",
        "steps": 300,
        "what": "The user and item factors keep nn.Embedding's default N(0, 1) initialisation, so with 16 factors the first dot products have a standard deviation of 4 on a 1-5 star scale and the model memorises noise instead of taste.",
    },
    {
        "name": "transformer_padding_mask_inverted",
        "steps": 500,
        "what": "src_key_padding_mask is True where a step is real, while PyTorch ignores the positions that are True; attention sees only the padding and none of the data.",
    },
]


# ---------------------------------------------------------------- the programs


def digits_softmax_before_ce_bad():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.pool = nn.MaxPool2d(2)
            self.fc1 = nn.Linear(32 * 4 * 4, 64)
            self.fc2 = nn.Linear(64, 10)
            self.softmax = nn.Softmax(dim=1)

        def forward(self, x):
            x = self.pool(F.relu(self.conv1(x)))
            x = self.pool(F.relu(self.conv2(x)))
            x = torch.flatten(x, 1)
            x = F.relu(self.fc1(x))
            return self.softmax(self.fc2(x))

    X_train, y_train = _digits(3000, seed=1)
    X_test, y_test = _digits(800, seed=2)
    mean, std = X_train.mean(), X_train.std()
    X_train, X_test = (X_train - mean) / std, (X_test - mean) / std
    train_loader = DataLoader(TensorDataset(X_train, y_train), batch_size=64, shuffle=True)
    batches = _cycle(train_loader)

    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_test).argmax(1) != y_test).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def digits_softmax_before_ce_good():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.pool = nn.MaxPool2d(2)
            self.fc1 = nn.Linear(32 * 4 * 4, 64)
            self.fc2 = nn.Linear(64, 10)

        def forward(self, x):
            x = self.pool(F.relu(self.conv1(x)))
            x = self.pool(F.relu(self.conv2(x)))
            x = torch.flatten(x, 1)
            x = F.relu(self.fc1(x))
            return self.fc2(x)

    X_train, y_train = _digits(3000, seed=1)
    X_test, y_test = _digits(800, seed=2)
    mean, std = X_train.mean(), X_train.std()
    X_train, X_test = (X_train - mean) / std, (X_test - mean) / std
    train_loader = DataLoader(TensorDataset(X_train, y_train), batch_size=64, shuffle=True)
    batches = _cycle(train_loader)

    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_test).argmax(1) != y_test).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def house_prices_broadcast_mse_bad():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(10)
    n = 2500
    num = torch.randn(n, 8, generator=g)
    num[:, 1] = 0.6 * num[:, 0] + 0.8 * num[:, 1]
    cat = torch.randint(0, 5, (n,), generator=g)
    area = torch.tensor([-0.8, -0.3, 0.0, 0.4, 0.9])[cat]
    log_price = (
        12
        + 0.35 * num[:, 0]
        + 0.2 * num[:, 1]
        - 0.15 * num[:, 2]
        + 0.1 * num[:, 3] * num[:, 4]
        + 0.3 * area
        + 0.08 * torch.randn(n, generator=g)
    )
    num = num * torch.tensor([600.0, 1.2, 15.0, 0.8, 40.0, 2.0, 9.0, 300.0]) + torch.tensor(
        [1500.0, 3.0, 30.0, 2.0, 100.0, 6.0, 20.0, 900.0]
    )

    n_train = 2000
    mu, sd = num[:n_train].mean(0), num[:n_train].std(0)
    features = torch.cat([(num - mu) / sd, F.one_hot(cat, 5).float()], dim=1)
    y_mu, y_sd = log_price[:n_train].mean(), log_price[:n_train].std()
    target = (log_price - y_mu) / y_sd
    train_ds = TensorDataset(features[:n_train], target[:n_train])
    X_val, y_val = features[n_train:], target[n_train:]
    loader = DataLoader(train_ds, batch_size=64, shuffle=True)
    it = _cycle(loader)

    model = nn.Sequential(
        nn.Linear(13, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.MSELoss()

    def step(i):
        model.train()
        xb, yb = next(it)
        pred = model(xb)
        loss = loss_fn(pred, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float(((model(X_val)[:, 0] - y_val) ** 2).mean().sqrt())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def house_prices_broadcast_mse_good():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(10)
    n = 2500
    num = torch.randn(n, 8, generator=g)
    num[:, 1] = 0.6 * num[:, 0] + 0.8 * num[:, 1]
    cat = torch.randint(0, 5, (n,), generator=g)
    area = torch.tensor([-0.8, -0.3, 0.0, 0.4, 0.9])[cat]
    log_price = (
        12
        + 0.35 * num[:, 0]
        + 0.2 * num[:, 1]
        - 0.15 * num[:, 2]
        + 0.1 * num[:, 3] * num[:, 4]
        + 0.3 * area
        + 0.08 * torch.randn(n, generator=g)
    )
    num = num * torch.tensor([600.0, 1.2, 15.0, 0.8, 40.0, 2.0, 9.0, 300.0]) + torch.tensor(
        [1500.0, 3.0, 30.0, 2.0, 100.0, 6.0, 20.0, 900.0]
    )

    n_train = 2000
    mu, sd = num[:n_train].mean(0), num[:n_train].std(0)
    features = torch.cat([(num - mu) / sd, F.one_hot(cat, 5).float()], dim=1)
    y_mu, y_sd = log_price[:n_train].mean(), log_price[:n_train].std()
    target = (log_price - y_mu) / y_sd
    train_ds = TensorDataset(features[:n_train], target[:n_train])
    X_val, y_val = features[n_train:], target[n_train:]
    loader = DataLoader(train_ds, batch_size=64, shuffle=True)
    it = _cycle(loader)

    model = nn.Sequential(
        nn.Linear(13, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.MSELoss()

    def step(i):
        model.train()
        xb, yb = next(it)
        pred = model(xb)
        loss = loss_fn(pred.squeeze(1), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float(((model(X_val)[:, 0] - y_val) ** 2).mean().sqrt())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_forecast_no_zero_grad_bad():
    torch.manual_seed(0)

    def make_series(n_series, length, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(length).float()
        day = 0.8 + 0.4 * torch.rand(n_series, 1, generator=g)
        ph = 2 * math.pi * torch.rand(n_series, 2, generator=g)
        s = day * torch.sin(2 * math.pi * t / 12 + ph[:, :1]) + 0.6 * torch.sin(2 * math.pi * t / 31 + ph[:, 1:])
        return 50 + 20 * (s + 0.1 * torch.randn(n_series, length, generator=g))

    def sliding_windows(series, seq_len):
        xs, ys = [], []
        for s in series:
            for k in range(0, len(s) - seq_len, 3):
                xs.append(s[k : k + seq_len])
                ys.append(s[k + seq_len])
        return torch.stack(xs).unsqueeze(-1), torch.stack(ys).unsqueeze(-1)

    train_raw, test_raw = make_series(30, 200, 21), make_series(8, 200, 22)
    mean, std = train_raw.mean(), train_raw.std()
    trainX, trainY = sliding_windows((train_raw - mean) / std, 24)
    testX, testY = sliding_windows((test_raw - mean) / std, 24)

    class LSTMForecaster(nn.Module):
        def __init__(self, input_size=1, hidden_size=32):
            super().__init__()
            self.lstm = nn.LSTM(input_size, hidden_size, batch_first=True)
            self.fc = nn.Linear(hidden_size, 1)

        def forward(self, x):
            out, (h, c) = self.lstm(x)
            return self.fc(out[:, -1, :])

    model = LSTMForecaster()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = _cycle(DataLoader(TensorDataset(trainX, trainY), batch_size=64, shuffle=True))

    def step(i):
        model.train()
        x, y = next(batches)
        outputs = model(x)
        loss = criterion(outputs, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float(F.mse_loss(model(testX), testY).sqrt())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_forecast_no_zero_grad_good():
    torch.manual_seed(0)

    def make_series(n_series, length, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(length).float()
        day = 0.8 + 0.4 * torch.rand(n_series, 1, generator=g)
        ph = 2 * math.pi * torch.rand(n_series, 2, generator=g)
        s = day * torch.sin(2 * math.pi * t / 12 + ph[:, :1]) + 0.6 * torch.sin(2 * math.pi * t / 31 + ph[:, 1:])
        return 50 + 20 * (s + 0.1 * torch.randn(n_series, length, generator=g))

    def sliding_windows(series, seq_len):
        xs, ys = [], []
        for s in series:
            for k in range(0, len(s) - seq_len, 3):
                xs.append(s[k : k + seq_len])
                ys.append(s[k + seq_len])
        return torch.stack(xs).unsqueeze(-1), torch.stack(ys).unsqueeze(-1)

    train_raw, test_raw = make_series(30, 200, 21), make_series(8, 200, 22)
    mean, std = train_raw.mean(), train_raw.std()
    trainX, trainY = sliding_windows((train_raw - mean) / std, 24)
    testX, testY = sliding_windows((test_raw - mean) / std, 24)

    class LSTMForecaster(nn.Module):
        def __init__(self, input_size=1, hidden_size=32):
            super().__init__()
            self.lstm = nn.LSTM(input_size, hidden_size, batch_first=True)
            self.fc = nn.Linear(hidden_size, 1)

        def forward(self, x):
            out, (h, c) = self.lstm(x)
            return self.fc(out[:, -1, :])

    model = LSTMForecaster()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = _cycle(DataLoader(TensorDataset(trainX, trainY), batch_size=64, shuffle=True))

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        outputs = model(x)
        loss = criterion(outputs, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float(F.mse_loss(model(testX), testY).sqrt())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def activity_lstm_not_batch_first_bad():
    torch.manual_seed(0)

    class ActivityLSTM(nn.Module):
        def __init__(self, n_features, n_hidden, n_classes):
            super().__init__()
            self.lstm = nn.LSTM(n_features, n_hidden, num_layers=1)
            self.dropout = nn.Dropout(0.2)
            self.fc = nn.Linear(n_hidden, n_classes)

        def forward(self, x):
            out, _ = self.lstm(x)
            out = self.dropout(out[:, -1, :])
            return self.fc(out)

    X_train, y_train = _sensor_windows(3000, seed=31)
    X_test, y_test = _sensor_windows(600, seed=32)
    mu, sd = X_train.mean(dim=(0, 1)), X_train.std(dim=(0, 1))
    X_train, X_test = (X_train - mu) / sd, (X_test - mu) / sd
    loader = DataLoader(TensorDataset(X_train, y_train), batch_size=64, shuffle=True)
    data_iter = _cycle(loader)

    model = ActivityLSTM(6, 48, 6)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        x, y = next(data_iter)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_test).argmax(1) != y_test).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def activity_lstm_not_batch_first_good():
    torch.manual_seed(0)

    class ActivityLSTM(nn.Module):
        def __init__(self, n_features, n_hidden, n_classes):
            super().__init__()
            self.lstm = nn.LSTM(n_features, n_hidden, num_layers=1, batch_first=True)
            self.dropout = nn.Dropout(0.2)
            self.fc = nn.Linear(n_hidden, n_classes)

        def forward(self, x):
            out, _ = self.lstm(x)
            out = self.dropout(out[:, -1, :])
            return self.fc(out)

    X_train, y_train = _sensor_windows(3000, seed=31)
    X_test, y_test = _sensor_windows(600, seed=32)
    mu, sd = X_train.mean(dim=(0, 1)), X_train.std(dim=(0, 1))
    X_train, X_test = (X_train - mu) / sd, (X_test - mu) / sd
    loader = DataLoader(TensorDataset(X_train, y_train), batch_size=64, shuffle=True)
    data_iter = _cycle(loader)

    model = ActivityLSTM(6, 48, 6)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        x, y = next(data_iter)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_test).argmax(1) != y_test).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gan_generator_step_on_detached_fake_bad():
    torch.manual_seed(0)
    nz = 32
    netG = nn.Sequential(
        nn.Linear(nz, 128, bias=False),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 256, bias=False),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, 16 * 16),
        nn.Tanh(),
    )
    netD = nn.Sequential(
        nn.Linear(16 * 16, 128),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(128, 64),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(64, 1),
    )
    real_all = _digits(3000, seed=41, noise=0.05)[0] * 2 - 1
    held_out = (_digits(400, seed=42, noise=0.05)[0] * 2 - 1).flatten(1)
    dataloader = DataLoader(TensorDataset(real_all), batch_size=64, shuffle=True, drop_last=True)
    batches = _cycle(dataloader)

    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def step(i):
        netG.train(), netD.train()
        real = next(batches)[0].flatten(1)
        b = real.size(0)
        real_label, fake_label = torch.ones(b, 1), torch.zeros(b, 1)

        # (1) update D
        netD.zero_grad()
        errD_real = criterion(netD(real), real_label)
        fake = netG(torch.randn(b, nz))
        errD_fake = criterion(netD(fake.detach()), fake_label)
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()

        # (2) update G
        netG.zero_grad()
        errG = criterion(netD(fake.detach()), real_label)
        errG.backward()
        optimizerG.step()
        return errG.item()

    def probe():
        with _evaluating(netG, netD):
            z = torch.randn(400, nz, generator=torch.Generator().manual_seed(5))
            return _energy_distance(netG(z), held_out)

    return {
        "model": {"G": netG, "D": netD},
        "optimizer": (optimizerD, optimizerG),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def gan_generator_step_on_detached_fake_good():
    torch.manual_seed(0)
    nz = 32
    netG = nn.Sequential(
        nn.Linear(nz, 128, bias=False),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 256, bias=False),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, 16 * 16),
        nn.Tanh(),
    )
    netD = nn.Sequential(
        nn.Linear(16 * 16, 128),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(128, 64),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(64, 1),
    )
    real_all = _digits(3000, seed=41, noise=0.05)[0] * 2 - 1
    held_out = (_digits(400, seed=42, noise=0.05)[0] * 2 - 1).flatten(1)
    dataloader = DataLoader(TensorDataset(real_all), batch_size=64, shuffle=True, drop_last=True)
    batches = _cycle(dataloader)

    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def step(i):
        netG.train(), netD.train()
        real = next(batches)[0].flatten(1)
        b = real.size(0)
        real_label, fake_label = torch.ones(b, 1), torch.zeros(b, 1)

        # (1) update D
        netD.zero_grad()
        errD_real = criterion(netD(real), real_label)
        fake = netG(torch.randn(b, nz))
        errD_fake = criterion(netD(fake.detach()), fake_label)
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()

        # (2) update G
        netG.zero_grad()
        errG = criterion(netD(fake), real_label)
        errG.backward()
        optimizerG.step()
        return errG.item()

    def probe():
        with _evaluating(netG, netD):
            z = torch.randn(400, nz, generator=torch.Generator().manual_seed(5))
            return _energy_distance(netG(z), held_out)

    return {
        "model": {"G": netG, "D": netD},
        "optimizer": (optimizerD, optimizerG),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def vae_mean_bce_summed_kl_bad():
    torch.manual_seed(0)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(256, 128)
            self.fc21 = nn.Linear(128, 10)
            self.fc22 = nn.Linear(128, 10)
            self.fc3 = nn.Linear(10, 128)
            self.fc4 = nn.Linear(128, 256)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            eps = torch.randn_like(std)
            return mu + eps * std

        def decode(self, z):
            h3 = F.relu(self.fc3(z))
            return torch.sigmoid(self.fc4(h3))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 256))
            z = self.reparameterize(mu, logvar)
            return self.decode(z), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        BCE = F.binary_cross_entropy(recon_x, x.view(-1, 256))
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (BCE + KLD) / x.size(0)

    train = _digits(3000, seed=51, noise=0.03)[0]
    test = _digits(500, seed=52, noise=0.03)[0]
    train_loader = DataLoader(TensorDataset(train), batch_size=64, shuffle=True)
    batches = _cycle(train_loader)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (data,) = next(batches)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            mu, _ = model.encode(test.view(-1, 256))
            return float(F.binary_cross_entropy(model.decode(mu), test.view(-1, 256), reduction="sum") / len(test))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_mean_bce_summed_kl_good():
    torch.manual_seed(0)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(256, 128)
            self.fc21 = nn.Linear(128, 10)
            self.fc22 = nn.Linear(128, 10)
            self.fc3 = nn.Linear(10, 128)
            self.fc4 = nn.Linear(128, 256)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            eps = torch.randn_like(std)
            return mu + eps * std

        def decode(self, z):
            h3 = F.relu(self.fc3(z))
            return torch.sigmoid(self.fc4(h3))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 256))
            z = self.reparameterize(mu, logvar)
            return self.decode(z), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        BCE = F.binary_cross_entropy(recon_x, x.view(-1, 256), reduction="sum")
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (BCE + KLD) / x.size(0)

    train = _digits(3000, seed=51, noise=0.03)[0]
    test = _digits(500, seed=52, noise=0.03)[0]
    train_loader = DataLoader(TensorDataset(train), batch_size=64, shuffle=True)
    batches = _cycle(train_loader)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (data,) = next(batches)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            mu, _ = model.encode(test.view(-1, 256))
            return float(F.binary_cross_entropy(model.decode(mu), test.view(-1, 256), reduction="sum") / len(test))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_uniform_noise_bad():
    torch.manual_seed(0)

    def two_moons(n, seed):
        g = torch.Generator().manual_seed(seed)
        t = math.pi * torch.rand(n, generator=g)
        top = torch.rand(n, generator=g) < 0.5
        x = torch.where(top, t.cos(), 1 - t.cos())
        y = torch.where(top, t.sin(), 0.5 - t.sin())
        return torch.stack([x, y], 1) + 0.05 * torch.randn(n, 2, generator=g)

    T = 100
    betas = torch.linspace(1e-3, 0.2, T)
    alphas = 1.0 - betas
    alphas_cumprod = torch.cumprod(alphas, dim=0)
    sqrt_ab = alphas_cumprod.sqrt()
    sqrt_1mab = (1 - alphas_cumprod).sqrt()

    class NoisePredictor(nn.Module):
        def __init__(self, dim=64, hidden=128):
            super().__init__()
            self.register_buffer("freqs", torch.exp(-math.log(10000.0) * torch.arange(dim // 2) / (dim // 2)))
            self.time_mlp = nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
            self.inp = nn.Linear(2, hidden)
            self.mid = nn.Sequential(
                nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU()
            )
            self.out = nn.Linear(hidden, 2)

        def forward(self, x, t):
            ang = t[:, None].float() * self.freqs[None]
            emb = self.time_mlp(torch.cat([ang.sin(), ang.cos()], dim=1))
            return self.out(self.mid(self.inp(x) + emb))

    raw = two_moons(4000, 61)
    mean, std = raw.mean(0), raw.std(0)
    data = (raw - mean) / std
    held_out = (two_moons(600, 62) - mean) / std
    batches = _cycle(DataLoader(TensorDataset(data), batch_size=128, shuffle=True, drop_last=True))
    model = NoisePredictor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (x0,) = next(batches)
        t = torch.randint(0, T, (x0.shape[0],))
        noise = torch.rand_like(x0)
        x_t = sqrt_ab[t][:, None] * x0 + sqrt_1mab[t][:, None] * noise
        loss = F.mse_loss(model(x_t, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            g = torch.Generator().manual_seed(7)
            x = torch.randn(600, 2, generator=g)
            for k in reversed(range(T)):
                eps = model(x, torch.full((600,), k))
                x = (x - betas[k] / sqrt_1mab[k] * eps) / alphas[k].sqrt()
                if k > 0:
                    x = x + betas[k].sqrt() * torch.randn(600, 2, generator=g)
            return max(_energy_distance(x, held_out), 0.0)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_uniform_noise_good():
    torch.manual_seed(0)

    def two_moons(n, seed):
        g = torch.Generator().manual_seed(seed)
        t = math.pi * torch.rand(n, generator=g)
        top = torch.rand(n, generator=g) < 0.5
        x = torch.where(top, t.cos(), 1 - t.cos())
        y = torch.where(top, t.sin(), 0.5 - t.sin())
        return torch.stack([x, y], 1) + 0.05 * torch.randn(n, 2, generator=g)

    T = 100
    betas = torch.linspace(1e-3, 0.2, T)
    alphas = 1.0 - betas
    alphas_cumprod = torch.cumprod(alphas, dim=0)
    sqrt_ab = alphas_cumprod.sqrt()
    sqrt_1mab = (1 - alphas_cumprod).sqrt()

    class NoisePredictor(nn.Module):
        def __init__(self, dim=64, hidden=128):
            super().__init__()
            self.register_buffer("freqs", torch.exp(-math.log(10000.0) * torch.arange(dim // 2) / (dim // 2)))
            self.time_mlp = nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
            self.inp = nn.Linear(2, hidden)
            self.mid = nn.Sequential(
                nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU()
            )
            self.out = nn.Linear(hidden, 2)

        def forward(self, x, t):
            ang = t[:, None].float() * self.freqs[None]
            emb = self.time_mlp(torch.cat([ang.sin(), ang.cos()], dim=1))
            return self.out(self.mid(self.inp(x) + emb))

    raw = two_moons(4000, 61)
    mean, std = raw.mean(0), raw.std(0)
    data = (raw - mean) / std
    held_out = (two_moons(600, 62) - mean) / std
    batches = _cycle(DataLoader(TensorDataset(data), batch_size=128, shuffle=True, drop_last=True))
    model = NoisePredictor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (x0,) = next(batches)
        t = torch.randint(0, T, (x0.shape[0],))
        noise = torch.randn_like(x0)
        x_t = sqrt_ab[t][:, None] * x0 + sqrt_1mab[t][:, None] * noise
        loss = F.mse_loss(model(x_t, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            g = torch.Generator().manual_seed(7)
            x = torch.randn(600, 2, generator=g)
            for k in reversed(range(T)):
                eps = model(x, torch.full((600,), k))
                x = (x - betas[k] / sqrt_1mab[k] * eps) / alphas[k].sqrt()
                if k > 0:
                    x = x + betas[k].sqrt() * torch.randn(600, 2, generator=g)
            return max(_energy_distance(x, held_out), 0.0)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_no_done_mask_bad():
    torch.manual_seed(0)
    random.seed(0)
    GAMMA, BATCH, LR = 0.98, 64, 1e-3

    class QNetwork(nn.Module):
        def __init__(self, n_obs, n_actions):
            super().__init__()
            self.layer1 = nn.Linear(n_obs, 64)
            self.layer2 = nn.Linear(64, 64)
            self.layer3 = nn.Linear(64, n_actions)

        def forward(self, x):
            x = F.relu(self.layer1(x))
            x = F.relu(self.layer2(x))
            return self.layer3(x)

    env = _CartPoles(1, seed=71)
    policy_net = QNetwork(4, 2)
    target_net = QNetwork(4, 2)
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=LR)
    memory = deque(maxlen=10000)

    def act_and_store(epsilon):
        state = env.obs()
        if random.random() < epsilon:
            action = torch.tensor([random.randrange(2)])
        else:
            with torch.no_grad():
                action = policy_net(state).argmax(1)
        next_state, reward, done = env.step(action)
        memory.append((state, action, reward, next_state, done))

    for _ in range(1000):  # warm-up with random play
        act_and_store(1.0)

    def step(i):
        act_and_store(max(0.05, 1.0 - i / 1000))
        batch = random.sample(memory, BATCH)
        states, actions, rewards, next_states, dones = (torch.cat(c) for c in zip(*batch))
        q = policy_net(states).gather(1, actions.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = target_net(next_states).max(1)[0]
            target = rewards + GAMMA * next_q
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy_net.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():  # soft update
            for p, tp in zip(policy_net.parameters(), target_net.parameters()):
                tp.lerp_(p, 0.01)
        return loss.item()

    def probe():
        with _evaluating(policy_net):
            return _cartpole_lost_return(lambda s: policy_net(s).argmax(1))

    return {"model": policy_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_no_done_mask_good():
    torch.manual_seed(0)
    random.seed(0)
    GAMMA, BATCH, LR = 0.98, 64, 1e-3

    class QNetwork(nn.Module):
        def __init__(self, n_obs, n_actions):
            super().__init__()
            self.layer1 = nn.Linear(n_obs, 64)
            self.layer2 = nn.Linear(64, 64)
            self.layer3 = nn.Linear(64, n_actions)

        def forward(self, x):
            x = F.relu(self.layer1(x))
            x = F.relu(self.layer2(x))
            return self.layer3(x)

    env = _CartPoles(1, seed=71)
    policy_net = QNetwork(4, 2)
    target_net = QNetwork(4, 2)
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=LR)
    memory = deque(maxlen=10000)

    def act_and_store(epsilon):
        state = env.obs()
        if random.random() < epsilon:
            action = torch.tensor([random.randrange(2)])
        else:
            with torch.no_grad():
                action = policy_net(state).argmax(1)
        next_state, reward, done = env.step(action)
        memory.append((state, action, reward, next_state, done))

    for _ in range(1000):  # warm-up with random play
        act_and_store(1.0)

    def step(i):
        act_and_store(max(0.05, 1.0 - i / 1000))
        batch = random.sample(memory, BATCH)
        states, actions, rewards, next_states, dones = (torch.cat(c) for c in zip(*batch))
        q = policy_net(states).gather(1, actions.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = target_net(next_states).max(1)[0]
            target = rewards + GAMMA * next_q * (1 - dones)
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy_net.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():  # soft update
            for p, tp in zip(policy_net.parameters(), target_net.parameters()):
                tp.lerp_(p, 0.01)
        return loss.item()

    def probe():
        with _evaluating(policy_net):
            return _cartpole_lost_return(lambda s: policy_net(s).argmax(1))

    return {"model": policy_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def a2c_advantage_not_detached_bad():
    torch.manual_seed(0)
    GAMMA, N_ENVS, N_STEPS = 0.95, 16, 5

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
            self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

        def forward(self, s):
            return torch.distributions.Categorical(logits=self.actor(s)), self.critic(s).squeeze(-1)

    env = _CartPoles(N_ENVS, seed=81, limit=10**9)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        log_probs, values, rewards, dones, entropies = [], [], [], [], []
        for _ in range(N_STEPS):
            dist, value = model(env.obs())
            action = dist.sample()
            _, reward, done = env.step(action)
            log_probs.append(dist.log_prob(action))
            entropies.append(dist.entropy())
            values.append(value)
            rewards.append(reward)
            dones.append(done)
        with torch.no_grad():
            R = model(env.obs())[1]
        returns = []
        for r, d in zip(reversed(rewards), reversed(dones)):
            R = r + GAMMA * R * (1 - d)
            returns.insert(0, R)
        returns, values = torch.stack(returns), torch.stack(values)
        advantage = returns - values
        actor_loss = -(torch.stack(log_probs) * advantage).mean()
        critic_loss = advantage.pow(2).mean()
        loss = actor_loss + 0.5 * critic_loss - 0.01 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            g = torch.Generator().manual_seed(9)
            test_env = _CartPoles(32, seed=4321, limit=10**9)
            vs, rs, ds = [], [], []
            for _ in range(220):
                s = test_env.obs()
                p = F.softmax(model.actor(s), dim=1)
                a = (torch.rand(32, generator=g) < p[:, 1]).long()
                vs.append(model.critic(s).squeeze(1))
                _, r, d = test_env.step(a)
                rs.append(r)
                ds.append(d)
            R, err = model.critic(test_env.obs()).squeeze(1) * 0 + 1 / (1 - GAMMA), []
            for t in reversed(range(220)):
                R = rs[t] + GAMMA * R * (1 - ds[t])
                if t < 120:
                    err.append((vs[t] - R).abs().mean())
            return float(torch.stack(err).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def a2c_advantage_not_detached_good():
    torch.manual_seed(0)
    GAMMA, N_ENVS, N_STEPS = 0.95, 16, 5

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
            self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

        def forward(self, s):
            return torch.distributions.Categorical(logits=self.actor(s)), self.critic(s).squeeze(-1)

    env = _CartPoles(N_ENVS, seed=81, limit=10**9)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        log_probs, values, rewards, dones, entropies = [], [], [], [], []
        for _ in range(N_STEPS):
            dist, value = model(env.obs())
            action = dist.sample()
            _, reward, done = env.step(action)
            log_probs.append(dist.log_prob(action))
            entropies.append(dist.entropy())
            values.append(value)
            rewards.append(reward)
            dones.append(done)
        with torch.no_grad():
            R = model(env.obs())[1]
        returns = []
        for r, d in zip(reversed(rewards), reversed(dones)):
            R = r + GAMMA * R * (1 - d)
            returns.insert(0, R)
        returns, values = torch.stack(returns), torch.stack(values)
        advantage = returns - values
        actor_loss = -(torch.stack(log_probs) * advantage.detach()).mean()
        critic_loss = advantage.pow(2).mean()
        loss = actor_loss + 0.5 * critic_loss - 0.01 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            g = torch.Generator().manual_seed(9)
            test_env = _CartPoles(32, seed=4321, limit=10**9)
            vs, rs, ds = [], [], []
            for _ in range(220):
                s = test_env.obs()
                p = F.softmax(model.actor(s), dim=1)
                a = (torch.rand(32, generator=g) < p[:, 1]).long()
                vs.append(model.critic(s).squeeze(1))
                _, r, d = test_env.step(a)
                rs.append(r)
                ds.append(d)
            R, err = model.critic(test_env.obs()).squeeze(1) * 0 + 1 / (1 - GAMMA), []
            for t in reversed(range(220)):
                R = rs[t] + GAMMA * R * (1 - ds[t])
                if t < 120:
                    err.append((vs[t] - R).abs().mean())
            return float(torch.stack(err).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simclr_self_similarity_kept_bad():
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(8, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(16 * 16, 64),
                nn.ReLU(),
            )
            self.projector = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

        def forward(self, x):
            return self.projector(self.backbone(x))

    def augment(x):
        dx, dy = random.randint(-1, 1), random.randint(-1, 1)
        x = torch.roll(x, (dy, dx), dims=(2, 3))
        gain = 0.8 + 0.4 * torch.rand(x.size(0), 1, 1, 1)
        return x * gain + 0.2 * torch.randn_like(x)

    def nt_xent_loss(z1, z2, temperature=0.1):
        n = z1.size(0)
        z = F.normalize(torch.cat([z1, z2], dim=0), dim=1)
        sim = z @ z.t() / temperature
        labels = torch.cat([torch.arange(n) + n, torch.arange(n)])
        return F.cross_entropy(sim, labels)

    random.seed(0)
    X_train, y_train = _digits(3000, seed=91)
    X_test, y_test = _digits(500, seed=92)
    mean, std = X_train.mean(), X_train.std()
    X_train, X_test = (X_train - mean) / std, (X_test - mean) / std
    batches = _cycle(DataLoader(TensorDataset(X_train), batch_size=64, shuffle=True, drop_last=True))
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (x,) = next(batches)
        loss = nt_xent_loss(model(augment(x)), model(augment(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            ref = F.normalize(model(X_train[:1000]), dim=1)
            q = F.normalize(model(X_test), dim=1)
            return float((y_train[:1000][(q @ ref.t()).argmax(1)] != y_test).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simclr_self_similarity_kept_good():
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(8, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(16 * 16, 64),
                nn.ReLU(),
            )
            self.projector = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

        def forward(self, x):
            return self.projector(self.backbone(x))

    def augment(x):
        dx, dy = random.randint(-1, 1), random.randint(-1, 1)
        x = torch.roll(x, (dy, dx), dims=(2, 3))
        gain = 0.8 + 0.4 * torch.rand(x.size(0), 1, 1, 1)
        return x * gain + 0.2 * torch.randn_like(x)

    def nt_xent_loss(z1, z2, temperature=0.1):
        n = z1.size(0)
        z = F.normalize(torch.cat([z1, z2], dim=0), dim=1)
        sim = z @ z.t() / temperature
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        labels = torch.cat([torch.arange(n) + n, torch.arange(n)])
        return F.cross_entropy(sim, labels)

    random.seed(0)
    X_train, y_train = _digits(3000, seed=91)
    X_test, y_test = _digits(500, seed=92)
    mean, std = X_train.mean(), X_train.std()
    X_train, X_test = (X_train - mean) / std, (X_test - mean) / std
    batches = _cycle(DataLoader(TensorDataset(X_train), batch_size=64, shuffle=True, drop_last=True))
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (x,) = next(batches)
        loss = nt_xent_loss(model(augment(x)), model(augment(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            ref = F.normalize(model(X_train[:1000]), dim=1)
            q = F.normalize(model(X_test), dim=1)
            return float((y_train[:1000][(q @ ref.t()).argmax(1)] != y_test).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_loss_on_unlabelled_nodes_bad():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(101)
    N, C, D = 400, 4, 24
    labels = torch.randint(0, C, (N,), generator=g)
    same = labels[:, None] == labels[None, :]
    adj = (torch.rand(N, N, generator=g) < torch.where(same, 0.04, 0.008)).float().triu(1)
    adj = adj + adj.t()
    centers = torch.randn(C, D, generator=g)
    features = 0.4 * centers[labels] + torch.randn(N, D, generator=g)
    features = (features - features.mean(0)) / features.std(0)
    perm = torch.randperm(N, generator=g)
    train_mask = torch.zeros(N, dtype=torch.bool)
    train_mask[perm[:160]] = True
    test_mask = ~train_mask
    y = torch.zeros(N, dtype=torch.long)  # what the competition gives out: 0 where unknown
    y[train_mask] = labels[train_mask]

    a_hat = adj + torch.eye(N)
    d = a_hat.sum(1).pow(-0.5)
    a_hat = d[:, None] * a_hat * d[None, :]

    class GraphConv(nn.Module):
        def __init__(self, fin, fout):
            super().__init__()
            self.lin = nn.Linear(fin, fout, bias=False)
            self.bias = nn.Parameter(torch.zeros(fout))
            nn.init.xavier_uniform_(self.lin.weight)

        def forward(self, x, a):
            return a @ self.lin(x) + self.bias

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.gc1 = GraphConv(D, 16)
            self.gc2 = GraphConv(16, C)

        def forward(self, x, a):
            x = F.relu(self.gc1(x, a))
            x = F.dropout(x, 0.5, training=self.training)
            return self.gc2(x, a)

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(epoch):
        model.train()
        optimizer.zero_grad()
        out = model(features, a_hat)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            pred = model(features, a_hat).argmax(1)
            return float((pred[test_mask] != labels[test_mask]).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_loss_on_unlabelled_nodes_good():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(101)
    N, C, D = 400, 4, 24
    labels = torch.randint(0, C, (N,), generator=g)
    same = labels[:, None] == labels[None, :]
    adj = (torch.rand(N, N, generator=g) < torch.where(same, 0.04, 0.008)).float().triu(1)
    adj = adj + adj.t()
    centers = torch.randn(C, D, generator=g)
    features = 0.4 * centers[labels] + torch.randn(N, D, generator=g)
    features = (features - features.mean(0)) / features.std(0)
    perm = torch.randperm(N, generator=g)
    train_mask = torch.zeros(N, dtype=torch.bool)
    train_mask[perm[:160]] = True
    test_mask = ~train_mask
    y = torch.zeros(N, dtype=torch.long)  # what the competition gives out: 0 where unknown
    y[train_mask] = labels[train_mask]

    a_hat = adj + torch.eye(N)
    d = a_hat.sum(1).pow(-0.5)
    a_hat = d[:, None] * a_hat * d[None, :]

    class GraphConv(nn.Module):
        def __init__(self, fin, fout):
            super().__init__()
            self.lin = nn.Linear(fin, fout, bias=False)
            self.bias = nn.Parameter(torch.zeros(fout))
            nn.init.xavier_uniform_(self.lin.weight)

        def forward(self, x, a):
            return a @ self.lin(x) + self.bias

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.gc1 = GraphConv(D, 16)
            self.gc2 = GraphConv(16, C)

        def forward(self, x, a):
            x = F.relu(self.gc1(x, a))
            x = F.dropout(x, 0.5, training=self.training)
            return self.gc2(x, a)

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(epoch):
        model.train()
        optimizer.zero_grad()
        out = model(features, a_hat)
        loss = F.cross_entropy(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            pred = model(features, a_hat).argmax(1)
            return float((pred[test_mask] != labels[test_mask]).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_blocks_in_python_list_bad():
    torch.manual_seed(0)

    def log_mel_clips(n, seed, n_mels=24, frames=32):
        gen = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 8, (n,), generator=gen)
        t = torch.linspace(0, 1, frames)
        m = torch.arange(n_mels).float()
        start = (y % 2).float() * 6 + 5 + 5 * torch.rand(n, generator=gen)
        slope = ((y // 2) % 2).float() * 16 - 8 + torch.randn(n, generator=gen)
        trem = (y // 4).float() * 5 + 3
        track = start[:, None] + slope[:, None] * (t[None] - 0.5) + 4
        loud = 0.55 + 0.45 * torch.sin(2 * math.pi * trem[:, None] * t[None] + 6.28 * torch.rand(n, 1, generator=gen))
        spec = loud[:, None] * torch.exp(-0.5 * ((m[None, :, None] - track[:, None]) / 1.5) ** 2)
        spec = spec + 0.15 * torch.randn(n, n_mels, frames, generator=gen).abs()
        return torch.log(spec + 0.05), y

    class ConvBlock(nn.Module):
        def __init__(self, ch):
            super().__init__()
            self.conv = nn.Conv1d(ch, ch, kernel_size=3, padding=1)

        def forward(self, x):
            return x + F.relu(self.conv(x))

    class AudioClassifier(nn.Module):
        def __init__(self, n_mels=24, ch=48, n_blocks=3, n_classes=8):
            super().__init__()
            self.stem = nn.Conv1d(n_mels, ch, kernel_size=1)
            self.blocks = [ConvBlock(ch) for _ in range(n_blocks)]
            self.head = nn.Linear(ch, n_classes)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(dim=2))

    X_train, y_train = log_mel_clips(2500, 111)
    X_val, y_val = log_mel_clips(600, 112)
    mean, std = X_train.mean(), X_train.std()
    X_train, X_val = (X_train - mean) / std, (X_val - mean) / std
    train_loader = DataLoader(TensorDataset(X_train, y_train), batch_size=32, shuffle=True)
    batches = _cycle(train_loader)
    model = AudioClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        spec, label = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(spec), label)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_val).argmax(1) != y_val).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_blocks_in_python_list_good():
    torch.manual_seed(0)

    def log_mel_clips(n, seed, n_mels=24, frames=32):
        gen = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 8, (n,), generator=gen)
        t = torch.linspace(0, 1, frames)
        m = torch.arange(n_mels).float()
        start = (y % 2).float() * 6 + 5 + 5 * torch.rand(n, generator=gen)
        slope = ((y // 2) % 2).float() * 16 - 8 + torch.randn(n, generator=gen)
        trem = (y // 4).float() * 5 + 3
        track = start[:, None] + slope[:, None] * (t[None] - 0.5) + 4
        loud = 0.55 + 0.45 * torch.sin(2 * math.pi * trem[:, None] * t[None] + 6.28 * torch.rand(n, 1, generator=gen))
        spec = loud[:, None] * torch.exp(-0.5 * ((m[None, :, None] - track[:, None]) / 1.5) ** 2)
        spec = spec + 0.15 * torch.randn(n, n_mels, frames, generator=gen).abs()
        return torch.log(spec + 0.05), y

    class ConvBlock(nn.Module):
        def __init__(self, ch):
            super().__init__()
            self.conv = nn.Conv1d(ch, ch, kernel_size=3, padding=1)

        def forward(self, x):
            return x + F.relu(self.conv(x))

    class AudioClassifier(nn.Module):
        def __init__(self, n_mels=24, ch=48, n_blocks=3, n_classes=8):
            super().__init__()
            self.stem = nn.Conv1d(n_mels, ch, kernel_size=1)
            self.blocks = nn.ModuleList([ConvBlock(ch) for _ in range(n_blocks)])
            self.head = nn.Linear(ch, n_classes)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(dim=2))

    X_train, y_train = log_mel_clips(2500, 111)
    X_val, y_val = log_mel_clips(600, 112)
    mean, std = X_train.mean(), X_train.std()
    X_train, X_val = (X_train - mean) / std, (X_val - mean) / std
    train_loader = DataLoader(TensorDataset(X_train, y_train), batch_size=32, shuffle=True)
    batches = _cycle(train_loader)
    model = AudioClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        spec, label = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(spec), label)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_val).argmax(1) != y_val).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def finetune_head_replaced_after_optimizer_bad():
    torch.manual_seed(0)

    class SmallCNN(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            self.fc = nn.Linear(32 * 16, num_classes)

        def forward(self, x):
            return self.fc(self.features(x).flatten(1))

    # "pretrained" weights from the source task (digits 0-9)
    Xs, ys = _digits(2000, seed=121)
    mean, std = Xs.mean(), Xs.std()
    Xs = (Xs - mean) / std
    model = SmallCNN(num_classes=10)
    pre_opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for xb, yb in DataLoader(TensorDataset(Xs, ys), batch_size=64, shuffle=True):
            pre_opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            pre_opt.step()
    del pre_opt
    model.zero_grad()

    # new task: another scanner, and 5 groups of digits
    def new_task(n, seed):
        x, y = _digits(n, seed=seed, noise=0.18)
        return (x - mean) / std, y // 2

    X_train, y_train = new_task(1500, 122)
    X_test, y_test = new_task(600, 123)

    # feature extraction: freeze the backbone, train a new head
    for param in model.parameters():
        param.requires_grad = False
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.fc = nn.Linear(model.fc.in_features, 5)

    criterion = nn.CrossEntropyLoss()
    batches = _cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=32, shuffle=True))

    def step(i):
        model.train()
        inputs, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_test).argmax(1) != y_test).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def finetune_head_replaced_after_optimizer_good():
    torch.manual_seed(0)

    class SmallCNN(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            self.fc = nn.Linear(32 * 16, num_classes)

        def forward(self, x):
            return self.fc(self.features(x).flatten(1))

    # "pretrained" weights from the source task (digits 0-9)
    Xs, ys = _digits(2000, seed=121)
    mean, std = Xs.mean(), Xs.std()
    Xs = (Xs - mean) / std
    model = SmallCNN(num_classes=10)
    pre_opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for xb, yb in DataLoader(TensorDataset(Xs, ys), batch_size=64, shuffle=True):
            pre_opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            pre_opt.step()
    del pre_opt
    model.zero_grad()

    # new task: another scanner, and 5 groups of digits
    def new_task(n, seed):
        x, y = _digits(n, seed=seed, noise=0.18)
        return (x - mean) / std, y // 2

    X_train, y_train = new_task(1500, 122)
    X_test, y_test = new_task(600, 123)

    # feature extraction: freeze the backbone, train a new head
    for param in model.parameters():
        param.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 5)
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=1e-3)

    criterion = nn.CrossEntropyLoss()
    batches = _cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=32, shuffle=True))

    def step(i):
        model.train()
        inputs, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_test).argmax(1) != y_test).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def churn_scheduler_stepped_per_batch_bad():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(131)
    n = 4000
    tenure = torch.rand(n, generator=g) * 72
    charges = 20 + 100 * torch.rand(n, generator=g)
    calls = torch.poisson(torch.full((n,), 1.5), generator=g)
    contract = torch.randint(0, 3, (n,), generator=g)
    payment = torch.randint(0, 4, (n,), generator=g)
    logit = (
        -0.06 * (tenure - 30)
        + 0.03 * (charges - 70)
        + 0.9 * (calls - 1.5)
        + torch.tensor([1.6, -0.2, -1.8])[contract]
        + torch.tensor([0.8, 0.0, -0.4, -0.4])[payment]
        + 0.04 * (charges - 70) * (contract == 0).float()
    )
    churn = (torch.rand(n, generator=g) < torch.sigmoid(logit)).float()
    num = torch.stack([tenure, charges, calls], dim=1)
    num = (num - num[:3200].mean(0)) / num[:3200].std(0)
    X = torch.cat([num, F.one_hot(contract, 3).float(), F.one_hot(payment, 4).float()], dim=1)
    X_train, y_train, X_val, y_val = X[:3200], churn[:3200], X[3200:], churn[3200:]
    train_loader = DataLoader(TensorDataset(X_train, y_train), batch_size=64, shuffle=True)

    class ChurnNet(nn.Module):
        def __init__(self, n_in):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(n_in, 64),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(64, 32),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(32, 1),
            )

        def forward(self, x):
            return self.net(x).squeeze(-1)

    model = ChurnNet(X.size(1))
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    batches = _cycle(train_loader)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float(criterion(model(X_val), y_val))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def churn_scheduler_stepped_per_batch_good():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(131)
    n = 4000
    tenure = torch.rand(n, generator=g) * 72
    charges = 20 + 100 * torch.rand(n, generator=g)
    calls = torch.poisson(torch.full((n,), 1.5), generator=g)
    contract = torch.randint(0, 3, (n,), generator=g)
    payment = torch.randint(0, 4, (n,), generator=g)
    logit = (
        -0.06 * (tenure - 30)
        + 0.03 * (charges - 70)
        + 0.9 * (calls - 1.5)
        + torch.tensor([1.6, -0.2, -1.8])[contract]
        + torch.tensor([0.8, 0.0, -0.4, -0.4])[payment]
        + 0.04 * (charges - 70) * (contract == 0).float()
    )
    churn = (torch.rand(n, generator=g) < torch.sigmoid(logit)).float()
    num = torch.stack([tenure, charges, calls], dim=1)
    num = (num - num[:3200].mean(0)) / num[:3200].std(0)
    X = torch.cat([num, F.one_hot(contract, 3).float(), F.one_hot(payment, 4).float()], dim=1)
    X_train, y_train, X_val, y_val = X[:3200], churn[:3200], X[3200:], churn[3200:]
    train_loader = DataLoader(TensorDataset(X_train, y_train), batch_size=64, shuffle=True)

    class ChurnNet(nn.Module):
        def __init__(self, n_in):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(n_in, 64),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(64, 32),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(32, 1),
            )

        def forward(self, x):
            return self.net(x).squeeze(-1)

    model = ChurnNet(X.size(1))
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    batches = _cycle(train_loader)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(train_loader) == 0:  # end of the epoch
            scheduler.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float(criterion(model(X_val), y_val))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def box_regression_uint8_wraparound_bad():
    torch.manual_seed(0)

    def scenes(n, seed, size=24):
        gen = torch.Generator().manual_seed(seed)
        base = 125 + 8 * torch.randn(n, 3, 1, 1, generator=gen)
        ramp = torch.linspace(-1, 1, size)
        tilt = 18 * torch.randn(n, 2, 1, 1, generator=gen)
        shade = tilt[:, 0] * ramp[None, :, None] + tilt[:, 1] * ramp[None, None, :]
        img = base + shade[:, None] + 8 * torch.randn(n, 3, size, size, generator=gen)
        boxes = torch.zeros(n, 4)
        for k in range(n):
            w, h = (5 + torch.randint(0, 7, (2,), generator=gen)).tolist()
            x0 = int(torch.randint(0, size - w + 1, (1,), generator=gen))
            y0 = int(torch.randint(0, size - h + 1, (1,), generator=gen))
            tint = torch.tensor([1.0, -1.0])[torch.randint(0, 2, (3,), generator=gen)]
            img[k, :, y0 : y0 + h, x0 : x0 + w] += 32 * tint[:, None, None]
            boxes[k] = torch.tensor([x0 + w / 2, y0 + h / 2, w, h]) / size
        return img.clamp(0, 255).to(torch.uint8), boxes

    class PetsDataset(Dataset):
        def __init__(self, images, boxes):
            self.images, self.boxes = images, boxes

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            image = (self.images[idx] - 128) / 32.0
            return image, self.boxes[idx]

    train_set = PetsDataset(*scenes(2500, 141))
    val_set = PetsDataset(*scenes(400, 142))
    X_val = torch.stack([val_set[k][0] for k in range(len(val_set))])
    loader = _cycle(DataLoader(train_set, batch_size=32, shuffle=True))

    class BoxNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(32, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            self.fc = nn.Sequential(nn.Flatten(), nn.Linear(32 * 9, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x):
            return torch.sigmoid(self.fc(self.conv(x)))

    model = BoxNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.L1Loss()

    def step(i):
        model.train()
        images, boxes = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(images), boxes)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_val) - val_set.boxes).abs().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def box_regression_uint8_wraparound_good():
    torch.manual_seed(0)

    def scenes(n, seed, size=24):
        gen = torch.Generator().manual_seed(seed)
        base = 125 + 8 * torch.randn(n, 3, 1, 1, generator=gen)
        ramp = torch.linspace(-1, 1, size)
        tilt = 18 * torch.randn(n, 2, 1, 1, generator=gen)
        shade = tilt[:, 0] * ramp[None, :, None] + tilt[:, 1] * ramp[None, None, :]
        img = base + shade[:, None] + 8 * torch.randn(n, 3, size, size, generator=gen)
        boxes = torch.zeros(n, 4)
        for k in range(n):
            w, h = (5 + torch.randint(0, 7, (2,), generator=gen)).tolist()
            x0 = int(torch.randint(0, size - w + 1, (1,), generator=gen))
            y0 = int(torch.randint(0, size - h + 1, (1,), generator=gen))
            tint = torch.tensor([1.0, -1.0])[torch.randint(0, 2, (3,), generator=gen)]
            img[k, :, y0 : y0 + h, x0 : x0 + w] += 32 * tint[:, None, None]
            boxes[k] = torch.tensor([x0 + w / 2, y0 + h / 2, w, h]) / size
        return img.clamp(0, 255).to(torch.uint8), boxes

    class PetsDataset(Dataset):
        def __init__(self, images, boxes):
            self.images, self.boxes = images, boxes

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            image = (self.images[idx].float() - 128) / 32.0
            return image, self.boxes[idx]

    train_set = PetsDataset(*scenes(2500, 141))
    val_set = PetsDataset(*scenes(400, 142))
    X_val = torch.stack([val_set[k][0] for k in range(len(val_set))])
    loader = _cycle(DataLoader(train_set, batch_size=32, shuffle=True))

    class BoxNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(32, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            self.fc = nn.Sequential(nn.Flatten(), nn.Linear(32 * 9, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x):
            return torch.sigmoid(self.fc(self.conv(x)))

    model = BoxNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.L1Loss()

    def step(i):
        model.train()
        images, boxes = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(images), boxes)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_val) - val_set.boxes).abs().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ecg_eval_mode_never_left_bad():
    torch.manual_seed(0)

    def beats(n, seed, L=64):
        gen = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 4, (n,), generator=gen)
        t = torch.arange(L).float()[None]
        centre = 32 + 3 * torch.randn(n, 1, generator=gen)
        bump = lambda c, w: torch.exp(-0.5 * ((t - c) / w) ** 2)
        width = torch.where(y == 1, 3.6, 2.2)[:, None] + 0.25 * torch.randn(n, 1, generator=gen)
        p_wave = torch.where(y == 2, 0.05, 0.3)[:, None]
        t_wave = torch.where(y == 3, -0.25, 0.35)[:, None]
        x = bump(centre, width) + p_wave * bump(centre - 14, 3.0) + t_wave * bump(centre + 17, 5.0)
        drift = 0.3 * torch.sin(2 * math.pi * (t / 90 + torch.rand(n, 1, generator=gen)))
        x = x * (0.8 + 0.4 * torch.rand(n, 1, generator=gen)) + drift + 0.1 * torch.randn(n, L, generator=gen)
        return x[:, None], y

    X_train, y_train = beats(2500, 151)
    X_val, y_val = beats(600, 152)
    mu, sd = X_train.mean(), X_train.std()
    X_train, X_val = (X_train - mu) / sd, (X_val - mu) / sd

    def conv_block(cin, cout):
        return nn.Sequential(
            nn.Conv1d(cin, cout, 5, padding=2, bias=False),
            nn.BatchNorm1d(cout),
            nn.ReLU(),
            nn.Conv1d(cout, cout, 5, padding=2, bias=False),
            nn.BatchNorm1d(cout),
            nn.ReLU(),
            nn.MaxPool1d(2),
        )

    model = nn.Sequential(
        conv_block(1, 16),
        conv_block(16, 32),
        conv_block(32, 32),
        conv_block(32, 32),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4, 4),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    train_iter = _cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=64, shuffle=True))

    def evaluate():
        model.eval()
        with torch.no_grad():
            return float((model(X_val).argmax(1) == y_val).float().mean())

    baseline = evaluate()  # should be near chance

    def step(i):
        x, y = next(train_iter)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_val).argmax(1) != y_val).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ecg_eval_mode_never_left_good():
    torch.manual_seed(0)

    def beats(n, seed, L=64):
        gen = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 4, (n,), generator=gen)
        t = torch.arange(L).float()[None]
        centre = 32 + 3 * torch.randn(n, 1, generator=gen)
        bump = lambda c, w: torch.exp(-0.5 * ((t - c) / w) ** 2)
        width = torch.where(y == 1, 3.6, 2.2)[:, None] + 0.25 * torch.randn(n, 1, generator=gen)
        p_wave = torch.where(y == 2, 0.05, 0.3)[:, None]
        t_wave = torch.where(y == 3, -0.25, 0.35)[:, None]
        x = bump(centre, width) + p_wave * bump(centre - 14, 3.0) + t_wave * bump(centre + 17, 5.0)
        drift = 0.3 * torch.sin(2 * math.pi * (t / 90 + torch.rand(n, 1, generator=gen)))
        x = x * (0.8 + 0.4 * torch.rand(n, 1, generator=gen)) + drift + 0.1 * torch.randn(n, L, generator=gen)
        return x[:, None], y

    X_train, y_train = beats(2500, 151)
    X_val, y_val = beats(600, 152)
    mu, sd = X_train.mean(), X_train.std()
    X_train, X_val = (X_train - mu) / sd, (X_val - mu) / sd

    def conv_block(cin, cout):
        return nn.Sequential(
            nn.Conv1d(cin, cout, 5, padding=2, bias=False),
            nn.BatchNorm1d(cout),
            nn.ReLU(),
            nn.Conv1d(cout, cout, 5, padding=2, bias=False),
            nn.BatchNorm1d(cout),
            nn.ReLU(),
            nn.MaxPool1d(2),
        )

    model = nn.Sequential(
        conv_block(1, 16),
        conv_block(16, 32),
        conv_block(32, 32),
        conv_block(32, 32),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4, 4),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    train_iter = _cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=64, shuffle=True))

    def evaluate():
        model.eval()
        with torch.no_grad():
            return float((model(X_val).argmax(1) == y_val).float().mean())

    baseline = evaluate()  # should be near chance
    model.train()

    def step(i):
        x, y = next(train_iter)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_val).argmax(1) != y_val).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def segmentation_flip_image_only_bad():
    torch.manual_seed(0)

    class LesionDataset(Dataset):
        def __init__(self, images, masks, train):
            self.images, self.masks, self.train = images, masks, train

        def __len__(self):
            return len(self.images)

        def __getitem__(self, k):
            image, mask = self.images[k], self.masks[k]
            if self.train and random.random() < 0.5:
                image = torch.flip(image, dims=[-1])
            image = (image - 0.4) / 0.15
            return image, mask

    class MiniUNet(nn.Module):
        def __init__(self):
            super().__init__()

            def double(i, o):
                return nn.Sequential(
                    nn.Conv2d(i, o, 3, padding=1, bias=False),
                    nn.BatchNorm2d(o),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(o, o, 3, padding=1, bias=False),
                    nn.BatchNorm2d(o),
                    nn.ReLU(inplace=True),
                )

            self.down1, self.down2 = double(1, 8), double(8, 16)
            self.pool = nn.MaxPool2d(2)
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.conv = double(16, 8)
            self.out = nn.Conv2d(8, 1, 1)

        def forward(self, x):
            a = self.down1(x)
            b = self.down2(self.pool(a))
            return self.out(self.conv(torch.cat([self.up(b), a], dim=1)))

    random.seed(0)
    train_ds = LesionDataset(*_lesions(800, 161), train=True)
    val_ds = LesionDataset(*_lesions(200, 162), train=False)
    X_val = torch.stack([val_ds[k][0] for k in range(len(val_ds))])
    M_val = val_ds.masks
    loader = _cycle(DataLoader(train_ds, batch_size=16, shuffle=True))
    model = MiniUNet()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        images, masks = next(loader)
        logits = model(images)
        loss = criterion(logits, masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            pred = (torch.sigmoid(model(X_val)) > 0.5).float()
            inter = (pred * M_val).sum()
            return float(1 - 2 * inter / (pred.sum() + M_val.sum() + 1e-6))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def segmentation_flip_image_only_good():
    torch.manual_seed(0)

    class LesionDataset(Dataset):
        def __init__(self, images, masks, train):
            self.images, self.masks, self.train = images, masks, train

        def __len__(self):
            return len(self.images)

        def __getitem__(self, k):
            image, mask = self.images[k], self.masks[k]
            if self.train and random.random() < 0.5:
                image = torch.flip(image, dims=[-1])
                mask = torch.flip(mask, dims=[-1])
            image = (image - 0.4) / 0.15
            return image, mask

    class MiniUNet(nn.Module):
        def __init__(self):
            super().__init__()

            def double(i, o):
                return nn.Sequential(
                    nn.Conv2d(i, o, 3, padding=1, bias=False),
                    nn.BatchNorm2d(o),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(o, o, 3, padding=1, bias=False),
                    nn.BatchNorm2d(o),
                    nn.ReLU(inplace=True),
                )

            self.down1, self.down2 = double(1, 8), double(8, 16)
            self.pool = nn.MaxPool2d(2)
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.conv = double(16, 8)
            self.out = nn.Conv2d(8, 1, 1)

        def forward(self, x):
            a = self.down1(x)
            b = self.down2(self.pool(a))
            return self.out(self.conv(torch.cat([self.up(b), a], dim=1)))

    random.seed(0)
    train_ds = LesionDataset(*_lesions(800, 161), train=True)
    val_ds = LesionDataset(*_lesions(200, 162), train=False)
    X_val = torch.stack([val_ds[k][0] for k in range(len(val_ds))])
    M_val = val_ds.masks
    loader = _cycle(DataLoader(train_ds, batch_size=16, shuffle=True))
    model = MiniUNet()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        images, masks = next(loader)
        logits = model(images)
        loss = criterion(logits, masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            pred = (torch.sigmoid(model(X_val)) > 0.5).float()
            inter = (pred * M_val).sum()
            return float(1 - 2 * inter / (pred.sum() + M_val.sum() + 1e-6))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def multilabel_cross_entropy_bad():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(171)
    n, n_feat, n_tags = 3500, 40, 8
    W = torch.randn(n_feat, n_tags, generator=g) / math.sqrt(n_feat)
    feats = torch.randn(n, n_feat, generator=g)
    score = 2.0 * feats @ W + 0.3 * torch.randn(n, n_tags, generator=g)
    tags = (score > torch.linspace(-0.3, 0.9, n_tags)).float()
    feats = feats * (0.5 + 3 * torch.rand(n_feat, generator=g)) + 5 * torch.randn(n_feat, generator=g)
    X_train, X_test, Y_train, Y_test = feats[:3000], feats[3000:], tags[:3000], tags[3000:]
    mu, sd = X_train.mean(0), X_train.std(0)
    X_train, X_test = (X_train - mu) / sd, (X_test - mu) / sd

    class MusicTagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(n_feat, 64, bias=False)
            self.bn1 = nn.BatchNorm1d(64)
            self.drop = nn.Dropout(0.1)
            self.fc2 = nn.Linear(64, n_tags)

        def forward(self, x):
            return self.fc2(self.drop(F.relu(self.bn1(self.fc1(x)))))

    model = MusicTagger()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = _cycle(DataLoader(TensorDataset(X_train, Y_train), batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float(((torch.sigmoid(model(X_test)) > 0.5).float() != Y_test).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def multilabel_cross_entropy_good():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(171)
    n, n_feat, n_tags = 3500, 40, 8
    W = torch.randn(n_feat, n_tags, generator=g) / math.sqrt(n_feat)
    feats = torch.randn(n, n_feat, generator=g)
    score = 2.0 * feats @ W + 0.3 * torch.randn(n, n_tags, generator=g)
    tags = (score > torch.linspace(-0.3, 0.9, n_tags)).float()
    feats = feats * (0.5 + 3 * torch.rand(n_feat, generator=g)) + 5 * torch.randn(n_feat, generator=g)
    X_train, X_test, Y_train, Y_test = feats[:3000], feats[3000:], tags[:3000], tags[3000:]
    mu, sd = X_train.mean(0), X_train.std(0)
    X_train, X_test = (X_train - mu) / sd, (X_test - mu) / sd

    class MusicTagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(n_feat, 64, bias=False)
            self.bn1 = nn.BatchNorm1d(64)
            self.drop = nn.Dropout(0.1)
            self.fc2 = nn.Linear(64, n_tags)

        def forward(self, x):
            return self.fc2(self.drop(F.relu(self.bn1(self.fc1(x)))))

    model = MusicTagger()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = _cycle(DataLoader(TensorDataset(X_train, Y_train), batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float(((torch.sigmoid(model(X_test)) > 0.5).float() != Y_test).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def siamese_contrastive_label_flipped_bad():
    torch.manual_seed(0)

    class SiamesePairs(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y
            self.by_class = {c: (y == c).nonzero().flatten().tolist() for c in y.unique().tolist()}

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            c = int(self.y[i])
            if random.random() < 0.5:
                j = random.choice(self.by_class[c])
            else:
                other = random.choice([k for k in self.by_class if k != c])
                j = random.choice(self.by_class[other])
            label = float(self.y[i] == self.y[j])
            return self.x[i], self.x[j], torch.tensor(label)

    class ContrastiveLoss(nn.Module):
        def __init__(self, margin=1.0):
            super().__init__()
            self.margin = margin

        def forward(self, out1, out2, label):
            d = F.pairwise_distance(out1, out2)
            return torch.mean((1 - label) * d.pow(2) + label * torch.clamp(self.margin - d, min=0.0).pow(2))

    class SiameseNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
            )
            self.fc = nn.Sequential(nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 16, bias=False))

        def forward_once(self, x):
            return self.fc(self.cnn(x))

        def forward(self, a, b):
            return self.forward_once(a), self.forward_once(b)

    random.seed(0)
    X, y = _digits(2500, seed=181)
    X_test, y_test = _digits(300, seed=182)
    mean, std = X.mean(), X.std()
    X, X_test = (X - mean) / std, (X_test - mean) / std
    batches = _cycle(DataLoader(SiamesePairs(X, y), batch_size=64, shuffle=True))
    model = SiameseNet()
    criterion = ContrastiveLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        img0, img1, label = next(batches)
        optimizer.zero_grad()
        output1, output2 = model(img0, img1)
        loss = criterion(output1, output2, label)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            e = model.forward_once(X_test)
            d = torch.cdist(e, e)
            off = ~torch.eye(len(e), dtype=torch.bool)
            same = y_test[:, None] == y_test[None]
            pos, neg = d[same & off], d[~same]
            neg = neg.sort().values
            above = len(neg) - torch.searchsorted(neg, pos)
            return float(1 - above.float().mean() / len(neg))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def siamese_contrastive_label_flipped_good():
    torch.manual_seed(0)

    class SiamesePairs(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y
            self.by_class = {c: (y == c).nonzero().flatten().tolist() for c in y.unique().tolist()}

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            c = int(self.y[i])
            if random.random() < 0.5:
                j = random.choice(self.by_class[c])
            else:
                other = random.choice([k for k in self.by_class if k != c])
                j = random.choice(self.by_class[other])
            label = float(self.y[i] != self.y[j])
            return self.x[i], self.x[j], torch.tensor(label)

    class ContrastiveLoss(nn.Module):
        def __init__(self, margin=1.0):
            super().__init__()
            self.margin = margin

        def forward(self, out1, out2, label):
            d = F.pairwise_distance(out1, out2)
            return torch.mean((1 - label) * d.pow(2) + label * torch.clamp(self.margin - d, min=0.0).pow(2))

    class SiameseNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
            )
            self.fc = nn.Sequential(nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 16, bias=False))

        def forward_once(self, x):
            return self.fc(self.cnn(x))

        def forward(self, a, b):
            return self.forward_once(a), self.forward_once(b)

    random.seed(0)
    X, y = _digits(2500, seed=181)
    X_test, y_test = _digits(300, seed=182)
    mean, std = X.mean(), X.std()
    X, X_test = (X - mean) / std, (X_test - mean) / std
    batches = _cycle(DataLoader(SiamesePairs(X, y), batch_size=64, shuffle=True))
    model = SiameseNet()
    criterion = ContrastiveLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        img0, img1, label = next(batches)
        optimizer.zero_grad()
        output1, output2 = model(img0, img1)
        loss = criterion(output1, output2, label)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            e = model.forward_once(X_test)
            d = torch.cdist(e, e)
            off = ~torch.eye(len(e), dtype=torch.bool)
            same = y_test[:, None] == y_test[None]
            pos, neg = d[same & off], d[~same]
            neg = neg.sort().values
            above = len(neg) - torch.searchsorted(neg, pos)
            return float(1 - above.float().mean() / len(neg))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def autoencoder_sigmoid_on_centred_input_bad():
    torch.manual_seed(0)

    def faces(n, seed, size=16):
        gen = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
        r = lambda a, b: a + (b - a) * torch.rand(n, 1, 1, generator=gen)
        blob = lambda cx, cy, sx, sy: torch.exp(-(((xx - cx) / sx) ** 2) - ((yy - cy) / sy) ** 2)
        dx, dy, gap = r(-0.2, 0.2), r(-0.2, 0.2), r(0.22, 0.4)
        img = r(0.0, 0.25) + r(0.5, 0.75) * blob(dx, dy, r(0.6, 0.9), r(0.7, 1.0))
        img = img - r(0.2, 0.5) * (blob(dx - gap, dy - 0.25, 0.15, 0.12) + blob(dx + gap, dy - 0.25, 0.15, 0.12))
        img = img - r(0.1, 0.5) * blob(dx, dy + 0.4, r(0.15, 0.4), 0.1)
        return (img + 0.02 * torch.randn(n, size, size, generator=gen)).clamp(0, 1)[:, None]

    transform = lambda img: (img - 0.5) / 0.5
    train_data, test_data = transform(faces(3000, 191)), transform(faces(400, 192))
    batches = _cycle(DataLoader(TensorDataset(train_data), batch_size=64, shuffle=True))

    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(32 * 16, 16),
            )
            self.decoder = nn.Sequential(
                nn.Linear(16, 32 * 16),
                nn.ReLU(),
                nn.Unflatten(1, (32, 4, 4)),
                nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
                nn.ReLU(),
                nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
                nn.Sigmoid(),
            )

        def forward(self, x):
            return self.decoder(self.encoder(x))

    model = Autoencoder()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (img,) = next(batches)
        output = model(img)
        loss = criterion(output, img)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float(F.mse_loss(model(test_data), test_data))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def autoencoder_sigmoid_on_centred_input_good():
    torch.manual_seed(0)

    def faces(n, seed, size=16):
        gen = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
        r = lambda a, b: a + (b - a) * torch.rand(n, 1, 1, generator=gen)
        blob = lambda cx, cy, sx, sy: torch.exp(-(((xx - cx) / sx) ** 2) - ((yy - cy) / sy) ** 2)
        dx, dy, gap = r(-0.2, 0.2), r(-0.2, 0.2), r(0.22, 0.4)
        img = r(0.0, 0.25) + r(0.5, 0.75) * blob(dx, dy, r(0.6, 0.9), r(0.7, 1.0))
        img = img - r(0.2, 0.5) * (blob(dx - gap, dy - 0.25, 0.15, 0.12) + blob(dx + gap, dy - 0.25, 0.15, 0.12))
        img = img - r(0.1, 0.5) * blob(dx, dy + 0.4, r(0.15, 0.4), 0.1)
        return (img + 0.02 * torch.randn(n, size, size, generator=gen)).clamp(0, 1)[:, None]

    transform = lambda img: (img - 0.5) / 0.5
    train_data, test_data = transform(faces(3000, 191)), transform(faces(400, 192))
    batches = _cycle(DataLoader(TensorDataset(train_data), batch_size=64, shuffle=True))

    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(32 * 16, 16),
            )
            self.decoder = nn.Sequential(
                nn.Linear(16, 32 * 16),
                nn.ReLU(),
                nn.Unflatten(1, (32, 4, 4)),
                nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
                nn.ReLU(),
                nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
                nn.Tanh(),
            )

        def forward(self, x):
            return self.decoder(self.encoder(x))

    model = Autoencoder()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (img,) = next(batches)
        output = model(img)
        loss = criterion(output, img)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float(F.mse_loss(model(test_data), test_data))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def matrix_factorisation_default_embedding_init_bad():
    torch.manual_seed(0)

    class MatrixFactorization(nn.Module):
        def __init__(self, n_users, n_items, n_factors, global_mean):
            super().__init__()
            self.user_factors = nn.Embedding(n_users, n_factors)
            self.item_factors = nn.Embedding(n_items, n_factors)
            self.user_bias = nn.Embedding(n_users, 1)
            self.item_bias = nn.Embedding(n_items, 1)
            nn.init.zeros_(self.user_bias.weight)
            nn.init.zeros_(self.item_bias.weight)
            self.register_buffer("global_mean", global_mean)

        def forward(self, user, item):
            dot = (self.user_factors(user) * self.item_factors(item)).sum(dim=1)
            return self.global_mean + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1) + dot

    g = torch.Generator().manual_seed(201)
    n_users, n_items, n = 150, 120, 13500
    pu, qi = torch.randn(n_users, 3, generator=g), torch.randn(n_items, 3, generator=g)
    bu, bi = 0.4 * torch.randn(n_users, generator=g), 0.5 * torch.randn(n_items, generator=g)
    pairs = torch.randperm(n_users * n_items, generator=g)[:n]
    users, items = pairs // n_items, pairs % n_items
    ratings = 3.4 + bu[users] + bi[items] + 0.45 * (pu[users] * qi[items]).sum(1) + 0.3 * torch.randn(n, generator=g)
    ratings = ratings.round().clamp(1, 5)
    train_ds = TensorDataset(users[:12000], items[:12000], ratings[:12000])
    u_val, i_val, r_val = users[12000:], items[12000:], ratings[12000:]

    model = MatrixFactorization(n_users, n_items, 16, ratings[:12000].mean())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss_func = nn.MSELoss()
    batches = _cycle(DataLoader(train_ds, batch_size=128, shuffle=True))

    def step(i):
        model.train()
        u, v, r = next(batches)
        pred = model(u, v)
        loss = loss_func(pred, r)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float(F.mse_loss(model(u_val, i_val), r_val).sqrt())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def matrix_factorisation_default_embedding_init_good():
    torch.manual_seed(0)

    class MatrixFactorization(nn.Module):
        def __init__(self, n_users, n_items, n_factors, global_mean):
            super().__init__()
            self.user_factors = nn.Embedding(n_users, n_factors)
            self.item_factors = nn.Embedding(n_items, n_factors)
            self.user_bias = nn.Embedding(n_users, 1)
            self.item_bias = nn.Embedding(n_items, 1)
            nn.init.normal_(self.user_factors.weight, std=0.1)
            nn.init.normal_(self.item_factors.weight, std=0.1)
            nn.init.zeros_(self.user_bias.weight)
            nn.init.zeros_(self.item_bias.weight)
            self.register_buffer("global_mean", global_mean)

        def forward(self, user, item):
            dot = (self.user_factors(user) * self.item_factors(item)).sum(dim=1)
            return self.global_mean + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1) + dot

    g = torch.Generator().manual_seed(201)
    n_users, n_items, n = 150, 120, 13500
    pu, qi = torch.randn(n_users, 3, generator=g), torch.randn(n_items, 3, generator=g)
    bu, bi = 0.4 * torch.randn(n_users, generator=g), 0.5 * torch.randn(n_items, generator=g)
    pairs = torch.randperm(n_users * n_items, generator=g)[:n]
    users, items = pairs // n_items, pairs % n_items
    ratings = 3.4 + bu[users] + bi[items] + 0.45 * (pu[users] * qi[items]).sum(1) + 0.3 * torch.randn(n, generator=g)
    ratings = ratings.round().clamp(1, 5)
    train_ds = TensorDataset(users[:12000], items[:12000], ratings[:12000])
    u_val, i_val, r_val = users[12000:], items[12000:], ratings[12000:]

    model = MatrixFactorization(n_users, n_items, 16, ratings[:12000].mean())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss_func = nn.MSELoss()
    batches = _cycle(DataLoader(train_ds, batch_size=128, shuffle=True))

    def step(i):
        model.train()
        u, v, r = next(batches)
        pred = model(u, v)
        loss = loss_func(pred, r)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float(F.mse_loss(model(u_val, i_val), r_val).sqrt())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def transformer_padding_mask_inverted_bad():
    torch.manual_seed(0)
    MAX_LEN = 20

    def gestures(n, seed):
        gen = torch.Generator().manual_seed(seed)
        out = []
        for _ in range(n):
            y = int(torch.randint(0, 6, (1,), generator=gen))
            L = int(torch.randint(8, 17, (1,), generator=gen))
            ph = 6.28 * float(torch.rand(1, generator=gen))
            turn = [0.0, 0.3, -0.3, 0.8, -0.8, 0.0][y]
            k = torch.arange(L).float()
            ang = ph + turn * k + (math.pi * (k >= L // 2).float() if y == 5 else 0.0)
            xy = torch.stack([ang.cos(), ang.sin()], 1) + 0.1 * torch.randn(L, 2, generator=gen)
            out.append((xy, y))
        return out

    def collate(batch):
        lengths = torch.tensor([len(s) for s, _ in batch])
        x = torch.zeros(len(batch), MAX_LEN, 2)
        for k, (s, _) in enumerate(batch):
            x[k, : len(s)] = s
        return x, lengths, torch.tensor([y for _, y in batch])

    class GestureTransformer(nn.Module):
        def __init__(self, d_model=32, n_classes=6):
            super().__init__()
            self.proj = nn.Linear(2, d_model)
            self.cls = nn.Parameter(0.02 * torch.randn(1, 1, d_model))
            self.pos = nn.Parameter(0.02 * torch.randn(1, MAX_LEN + 1, d_model))
            layer = nn.TransformerEncoderLayer(d_model, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
            self.fc = nn.Linear(d_model, n_classes)

        def forward(self, x, lengths):
            B = x.size(0)
            h = torch.cat([self.cls.expand(B, -1, -1), self.proj(x)], dim=1) + self.pos
            valid = torch.arange(MAX_LEN + 1)[None, :] < (lengths + 1)[:, None]
            h = self.encoder(h, src_key_padding_mask=valid)
            return self.fc(h[:, 0])

    train_loader = DataLoader(gestures(3000, 211), batch_size=32, shuffle=True, collate_fn=collate)
    X_val, len_val, y_val = collate(gestures(500, 212))
    batches = _cycle(train_loader)
    model = GestureTransformer()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step(i):
        model.train()
        x, lengths, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x, lengths), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_val, len_val).argmax(1) != y_val).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def transformer_padding_mask_inverted_good():
    torch.manual_seed(0)
    MAX_LEN = 20

    def gestures(n, seed):
        gen = torch.Generator().manual_seed(seed)
        out = []
        for _ in range(n):
            y = int(torch.randint(0, 6, (1,), generator=gen))
            L = int(torch.randint(8, 17, (1,), generator=gen))
            ph = 6.28 * float(torch.rand(1, generator=gen))
            turn = [0.0, 0.3, -0.3, 0.8, -0.8, 0.0][y]
            k = torch.arange(L).float()
            ang = ph + turn * k + (math.pi * (k >= L // 2).float() if y == 5 else 0.0)
            xy = torch.stack([ang.cos(), ang.sin()], 1) + 0.1 * torch.randn(L, 2, generator=gen)
            out.append((xy, y))
        return out

    def collate(batch):
        lengths = torch.tensor([len(s) for s, _ in batch])
        x = torch.zeros(len(batch), MAX_LEN, 2)
        for k, (s, _) in enumerate(batch):
            x[k, : len(s)] = s
        return x, lengths, torch.tensor([y for _, y in batch])

    class GestureTransformer(nn.Module):
        def __init__(self, d_model=32, n_classes=6):
            super().__init__()
            self.proj = nn.Linear(2, d_model)
            self.cls = nn.Parameter(0.02 * torch.randn(1, 1, d_model))
            self.pos = nn.Parameter(0.02 * torch.randn(1, MAX_LEN + 1, d_model))
            layer = nn.TransformerEncoderLayer(d_model, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
            self.fc = nn.Linear(d_model, n_classes)

        def forward(self, x, lengths):
            B = x.size(0)
            h = torch.cat([self.cls.expand(B, -1, -1), self.proj(x)], dim=1) + self.pos
            valid = torch.arange(MAX_LEN + 1)[None, :] < (lengths + 1)[:, None]
            h = self.encoder(h, src_key_padding_mask=~valid)
            return self.fc(h[:, 0])

    train_loader = DataLoader(gestures(3000, 211), batch_size=32, shuffle=True, collate_fn=collate)
    X_val, len_val, y_val = collate(gestures(500, 212))
    batches = _cycle(train_loader)
    model = GestureTransformer()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step(i):
        model.train()
        x, lengths, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x, lengths), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return float((model(X_val, len_val).argmax(1) != y_val).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
