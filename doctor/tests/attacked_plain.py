"""Healthy programs whose form meets that of a fault: rows, ends, edges, signs, seeds, rates, tables, straight-through."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

PROGRAMS = {}
STEPS = 14


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


# ---------------------------------------------------------------------------------------------------------- S53
class PointSegmenter(nn.Module):
    def __init__(self, i, o, h=32):
        super().__init__()
        self.point, self.head = net(i, h), net(2 * h, o)

    def forward(self, x):  # (points, features) of one scene
        h = self.point(x)
        scene = h.max(0, keepdim=True).values
        return self.head(torch.cat([h, scene.expand_as(h)], 1))


@program
def pointnet_segments_one_scene_at_a_time():
    """S53: PointNet's segmentation network on one room per step: the rows are the
    points of a scene (256 are drawn), and each is told the maximum over all of them. That is the method."""
    model = PointSegmenter(6, 5)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.rand(256, 6)
        y = (x[:, 2] * 4.99).long()
        step(opt, F.cross_entropy(model(x), y))


class AcrossRows(nn.Module):
    def __init__(self, i, o, h=32):
        super().__init__()
        self.lift, self.rows, self.head = (
            nn.Linear(i, h),
            nn.MultiheadAttention(h, 4, batch_first=True),
            nn.Linear(h, o),
        )

    def forward(self, x):  # (rows, features)
        h = self.lift(x)[None]
        return self.head((h + self.rows(h, h, h)[0])[0])


@program
def tabular_network_with_attention_between_samples():
    """S53: SAINT (Somepalli 2021) and the non-parametric transformers (Kossen 2021): attention runs between the rows of
    a batch on purpose, so that a row may borrow from rows that are like it. In use it is given a batch too."""
    model, opt = AcrossRows(10, 3), None
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(64, 10)
        y = x[:, :3].argmax(1)
        step(opt, F.cross_entropy(model(x), y))


@program
def documents_of_one_query_are_ranked_together():
    """S53: SetRank and allRank: the rows are the documents of one query, they attend to each other, and each has a grade
    of relevance. One query per step. A document is never scored without its list."""
    model = AcrossRows(12, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(40, 12)
        y = (x[:, :1] > x[:, :1].mean()).float()
        step(opt, F.binary_cross_entropy_with_logits(model(x), y))


class MinibatchDiscriminator(nn.Module):
    def __init__(self, i, h=32, kinds=8, size=4):
        super().__init__()
        self.body, self.shape = nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.2)), (kinds, size)
        self.into, self.head = nn.Linear(h, kinds * size, bias=False), nn.Linear(h + kinds, 1)

    def forward(self, x):
        h = self.body(x)
        m = self.into(h).view(len(x), *self.shape)
        near = (-(m[:, None] - m[None]).abs().sum(3)).exp().sum(1) - 1  # (B, kinds)
        return self.head(torch.cat([h, near], 1))


@program
def minibatch_discrimination():
    """S53: minibatch discrimination (Salimans 2016): the discriminator is told how near each sample is to the others of
    its batch, so that a generator that collapsed can be seen. Rows see each other on purpose."""
    g, d = net(4, 10), MinibatchDiscriminator(10)
    opt_g, opt_d = adam_of(g, lr=2e-4), adam_of(d, lr=2e-4)
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(STEPS):
        bce, real = F.binary_cross_entropy_with_logits, torch.randn(32, 10) * torch.linspace(0.5, 1.5, 10)
        opt_d.zero_grad()
        bce(d(real), ones).backward()
        fake = g(torch.randn(32, 4))
        bce(d(fake.detach()), zeros).backward()
        opt_d.step()
        step(opt_g, bce(d(fake), ones))


class FrameTagger(nn.Module):
    def __init__(self, i, o, h=32):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv1d(i, h, 5, padding=2), nn.ReLU(), nn.Conv1d(h, o, 5, padding=2))

    def forward(self, x):  # (frames, features) of one utterance
        return self.convs(x.t()[None])[0].t()


@program
def frames_of_one_utterance():
    """S53: a time-delay network for phonemes that is given a hundred frames of one utterance per step, (frames,
    features). The rows are frames, and each sees its neighbours through the convolutions."""
    model = FrameTagger(13, 6)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(100, 13).cumsum(0) * 0.1
        y = (x[:, 0] * 2).round().clamp(-2, 3).long() + 2
        step(opt, F.cross_entropy(model(x), y))


@program
def agents_that_tell_each_other():
    """S53: CommNet (Sukhbaatar 2016) on one game at a time: the rows are the agents of a team, and each hears the mean of
    what the others say before it answers. Imitation of an expert here."""

    class CommNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.see, self.hear, self.act = nn.Linear(7, 32), nn.Linear(32, 32), nn.Linear(32, 4)

        def forward(self, x):
            h = torch.tanh(self.see(x))
            others = (h.sum(0, keepdim=True) - h) / (len(h) - 1)
            return self.act(torch.tanh(h + self.hear(others)))

    model = CommNet()
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(10, 7)
        y = (x[:, 0] > x[:, 0].mean()).long() + 2 * (x[:, 1] > 0).long()
        step(opt, F.cross_entropy(model(x), y))


# ---------------------------------------------------------------------------------------------------------- N26
@program
def graph_network_on_bags_of_words():
    """N26: DAGNN and PPNP on Cora: Adam with lr=0.01 and weight_decay=0.005 on the first layer (their authors' values).
    The features are bags of words, so many columns of the first weight have no gradient at all: these words stand in no
    labelled paper's neighbourhood, and it is right that their weights shrink."""
    nodes, words, classes = 300, 1000, 5
    y = torch.randint(classes, (nodes,))
    x = (torch.rand(nodes, words) < 0.006 + 0.03 * (torch.arange(words)[None] % 50 == y[:, None])).float()
    x = x / x.sum(1, keepdim=True).clamp(min=1)
    a = ((torch.rand(nodes, nodes) < 0.003 + 0.02 * (y[:, None] == y)).float() + torch.eye(nodes)).clamp(max=1)
    a = ((a + a.t()) > 0).float()
    a = a / a.sum(1, keepdim=True)
    train = torch.arange(60)
    model = nn.Sequential(nn.Dropout(), nn.Linear(words, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, classes))
    opt = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-3)
    for _ in range(STEPS):
        z = h = model(x)
        for _ in range(5):
            z = 0.9 * (a @ z) + 0.1 * h
        step(opt, F.cross_entropy(z[train], y[train]))


# ---------------------------------------------------------------------------------------------------------- B9
@program
def discs_are_fitted_to_a_silhouette():
    """B9: differentiable rasterisation (SoftRas, DiffVG): a disc is drawn as a sigmoid of the distance to its edge, sharp
    to half a pixel, so nearly all pixels are 0 or 1. It is compared after a blur (a convolution with a fixed kernel), as
    in a pyramid of resolutions. The edge leads the gradient, and is all that should."""
    grid = torch.stack(torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij"), -1)
    line = torch.exp(-(torch.arange(-6, 7.0) ** 2) / 18)
    blur = (line[:, None] * line)[None, None] / line.sum() ** 2

    def draw(centre, radius):
        return torch.sigmoid((radius - (grid - centre).norm(dim=-1)).view(1, 1, 64, 64) / 0.5)

    wanted = F.conv2d(draw(torch.tensor([34.0, 30.0]), 6.5), blur)
    centre, radius = nn.Parameter(torch.tensor([30.3, 33.2])), nn.Parameter(torch.tensor(5.0))
    opt = torch.optim.Adam([centre, radius], lr=0.3)
    for _ in range(STEPS):
        step(opt, F.mse_loss(F.conv2d(draw(centre, radius), blur), wanted, reduction="sum"))


@program
def hashing_at_the_end_of_its_continuation():
    """B9: HashNet (Cao 2017): codes are tanh(beta * z) and beta grows from stage to stage, so that in the last stage they
    are nearly signs, which is what they are stored as. A linear classifier reads the codes (as in SSDH)."""
    encode, classify, beta = nn.Linear(20, 48), nn.Linear(48, 4), 200.0
    opt = torch.optim.SGD([*encode.parameters(), *classify.parameters()], lr=1e-3, momentum=0.9)
    for _ in range(STEPS):
        x = torch.randn(64, 20)
        y = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        step(opt, F.cross_entropy(classify(torch.tanh(beta * encode(x))), y))


# ---------------------------------------------------------------------------------------------------------- B6
@program
def summed_loss_with_values_clipped_under_adam():
    """B6: an autoencoder with the loss summed over pixels and batch, gradient_clip_algorithm="value" with 1.0, and Adam,
    which divides by the size of the gradient anyway: what is left is the sign, as in Lion and signSGD."""
    model, mixed = net(100, 100, h=16), torch.randn(4, 100)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(256, 4) @ mixed + 1
        opt.zero_grad()
        F.mse_loss(model(x), x, reduction="sum").backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        opt.step()


# ---------------------------------------------------------------------------------------------------------- N3
@program
def random_convolution_in_front_of_the_policy():
    """N3: network randomisation (Lee 2020) and RandConv: a frozen convolution in front of the encoder is drawn anew for
    each batch, so that the network comes to look at shapes. It is frozen, and model.parameters() gives it to the
    optimizer as well, which passes over it."""

    class Randomised(nn.Module):
        def __init__(self):
            super().__init__()
            self.random = nn.Conv2d(3, 3, 3, padding=1, bias=False).requires_grad_(False)
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 4))

        def forward(self, x):
            if self.training:
                nn.init.xavier_normal_(self.random.weight)
                x = self.random(x)
            return self.body(x)

    model = Randomised()
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.randint(4, (16,))
        x = 0.1 * torch.randn(16, 3, 16, 16)
        for i, c in enumerate(y.tolist()):
            x[i, :, 8 * (c // 2) : 8 * (c // 2) + 8, 8 * (c % 2) : 8 * (c % 2) + 8] += 1
        step(opt, F.cross_entropy(model(x), y))


@program
def many_starts_of_a_second_order_method():
    """N3: a small network that is fitted with L-BFGS from several random starts, of which the best is kept: the loss has
    many valleys and one call of step makes all the iterations of a start. The usual way for fits of this size."""
    model, best = net(1, 1, h=8), math.inf
    x = torch.linspace(-2, 2, 50)[:, None]
    y = torch.sin(3 * x)
    for _ in range(STEPS):
        for layer in (model[0], model[2]):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.uniform_(layer.bias, -1, 1)
        opt = torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe")

        def closure():
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)
        with torch.no_grad():
            loss = float(F.mse_loss(model(x), y))
        if loss < best:
            best, kept = loss, copy.deepcopy(model)


@program
def temperature_of_clip_at_its_cap():
    """N3: CLIP is fine-tuned from its checkpoint, whose logit_scale stands at ln(100), the cap: after each step it is
    clamped to at most ln(100), as in the paper. The gradient pushes it up, and the clamp puts it back."""

    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.logit_scale = nn.Parameter(torch.tensor(math.log(100)))
            self.image, self.text = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            self.text.weight.data.copy_(self.image.weight.data)

        def forward(self, a, b):
            return self.logit_scale.exp() * F.normalize(self.image(a), dim=1) @ F.normalize(self.text(b), dim=1).t()

    model = Clip()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(STEPS):
        a = torch.randn(32, 64)
        logits, own = model(a, a + torch.randn(32, 64)), torch.arange(32)
        step(opt, (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2)
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))


@program
def old_classes_are_put_back():
    """N3: class-incremental learning with CWR* (Lomonaco): the rows of the head that belong to earlier classes are put
    back after each step, so that the new classes cannot spoil them."""
    body, head = nn.Linear(16, 32), nn.Linear(32, 10)
    model = nn.Sequential(body, nn.ReLU(), head)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    old_w, old_b = head.weight.detach()[:8].clone(), head.bias.detach()[:8].clone()
    for _ in range(STEPS):
        x = torch.randn(32, 16)
        y = 8 + (x[:, 0] > 0).long()
        step(opt, F.cross_entropy(model(x), y))
        with torch.no_grad():
            head.weight[:8] = old_w
            head.bias[:8] = old_b


@program
def lottery_ticket_at_one_percent():
    """N3: a lottery ticket at 1% of the weights: after each step the mask is laid over them again, as the gradient of a
    pruned weight is not zero. Most places are zero before each step, as they were before the last."""
    model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 5))
    masks = {p: (torch.rand_like(p) < 0.01).float() if p.dim() > 1 else torch.ones_like(p) for p in model.parameters()}
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p, m in masks.items():
        p.data.mul_(m)
    for _ in range(STEPS):
        x = torch.randn(64, 100)
        y = x[:, :5].argmax(1)
        step(opt, F.cross_entropy(model(x), y))
        for p, m in masks.items():
            p.data.mul_(m)


@program
def first_order_maml_on_one_model():
    """N3: first-order MAML without copies of the model: each task takes one inner step, its gradient there is kept, and
    the weights are put back before the next task. The meta-step comes after four tasks."""
    model = net(1, 1, h=40)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        start, total = [p.detach().clone() for p in model.parameters()], [0.0] * 4
        for _ in range(4):
            a, phase = torch.rand(()) * 4 + 1, torch.rand(()) * 3
            x = torch.rand(20, 1) * 10 - 5
            y = a * torch.sin(x + phase)
            step(inner, F.mse_loss(model(x[:10]), y[:10]))
            g = torch.autograd.grad(F.mse_loss(model(x[10:]), y[10:]), list(model.parameters()))
            total = [t + one / 4 for t, one in zip(total, g)]
            with torch.no_grad():
                for p, s in zip(model.parameters(), start):
                    p.copy_(s)
        with torch.no_grad():
            for p, t in zip(model.parameters(), total):
                p -= 0.005 * t


@program
def prompts_are_tuned_for_one_picture_at_a_time():
    """N3: test-time prompt tuning (TPT, Shu 2022; MEMO): for each test picture the entropy of the mean over its augmented
    views is lowered by one step, the picture is classified, and the prompt is put back. Episodic by design."""

    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.prompt, self.body = nn.Parameter(0.1 * torch.randn(8, 16)), net(16, 5).requires_grad_(False)

        def forward(self, x):
            return self.body(x + self.prompt.mean(0))

    model = Prompted()
    source, opt = model.prompt.detach().clone(), torch.optim.SGD([model.prompt], lr=5e-2)
    for _ in range(STEPS):
        views = torch.randn(16) + 0.3 * torch.randn(32, 16)
        p = model(views).softmax(1).mean(0)
        step(opt, -(p * p.log()).sum())
        with torch.no_grad():
            model(views[:1]).argmax()
            model.prompt.copy_(source)


# ---------------------------------------------------------------------------------------------------------- D45
@program
def gates_of_a_circuit_in_order():
    """D45: a network over a circuit (DeepGate, DAG-GNN): the gates of a netlist stand in topological order and messages
    go from inputs to outputs only, as signals do. Each edge has a direction that means something."""
    n = 120
    src = torch.cat([torch.randint(max(1, i - 30), i + 1, (2,)) - 1 for i in range(8, n)])
    dst = torch.arange(8, n).repeat_interleave(2)
    lift, pass_on, head = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 1)
    opt = adam_of(lift, pass_on, head)
    for _ in range(STEPS):
        x = torch.randn(n, 6)
        truth = torch.sigmoid(x[:, :1] + torch.zeros(n, 1).index_add(0, dst, x[src, 1:2]))
        h = torch.relu(lift(x))
        for _ in range(2):
            h = torch.relu(h + torch.zeros(n, 32).index_add(0, dst, pass_on(h)[src]))
        step(opt, F.mse_loss(torch.sigmoid(head(h)), truth))


@program
def blood_follows_the_neurons():
    """D45: an encoding model for fMRI: what a network says of the neurons is convolved with the haemodynamic response, as
    a product with a banded lower-triangular matrix (scans, scans), and compared with the measured signal. Blood comes
    after neurons and never before."""
    scans, t = 120, torch.arange(16.0)
    hrf = t**3 * torch.exp(-t) / 6
    lag = torch.arange(scans)[:, None] - torch.arange(scans)
    response = torch.where((lag >= 0) & (lag < 16), hrf[lag.clamp(0, 15)], torch.zeros(()))
    model = net(10, 5)
    opt = adam_of(model)
    for _ in range(STEPS):
        stimuli = torch.randn(scans, 10)
        bold = response @ torch.tanh(stimuli[:, :5]) + 0.1 * torch.randn(scans, 5)
        step(opt, F.mse_loss(response @ model(stimuli), bold))


@program
def hazards_in_strata():
    """D45: a Cox network with strata (hospitals): patients are sorted by hospital and time, and the matrix of who is at
    risk has a triangle for each hospital. It is multiplied with the exponentials of the scores."""
    n, strata = 160, 8
    model = net(6, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(n, 6)
        time = torch.empty(n).exponential_() * (-x[:, 0]).exp()
        stratum = torch.arange(strata).repeat_interleave(n // strata)
        order = time.argsort()
        order = order[stratum[order].argsort(stable=True)]
        x, time, event = x[order], time[order], (torch.rand(n) < 0.7).float()
        at_risk = ((time[None] >= time[:, None]) & (stratum[None] == stratum[:, None])).float()
        score = model(x)
        risk = (at_risk @ score.exp()).squeeze(1)
        step(opt, -((score.squeeze(1) - risk.log()) * event).sum() / event.sum())


# ---------------------------------------------------------------------------------------------------------- F56
@program
def features_of_the_end_are_zero():
    """F56: semi-gradient TD(0) on the random walk of five states with linear features and no bias, as in Sutton and Barto: the features
    of the terminal state are all zero, so its value is 0 and needs no flag."""
    n = 5
    value = nn.Linear(n, 1, bias=False)
    opt, memory = torch.optim.SGD(value.parameters(), lr=0.5), []
    eye = torch.cat([torch.zeros(1, n), torch.eye(n), torch.zeros(1, n)])
    for _ in range(60):
        s = (n + 1) // 2
        while 0 < s <= n:
            after = s + int(torch.randint(2, ())) * 2 - 1
            memory.append((s, after, float(after > n)))
            s = after
    s, after, r = map(torch.tensor, zip(*memory))
    for _ in range(STEPS):
        rows = torch.randint(len(s), (128,))
        with torch.no_grad():
            target = r[rows, None] + 0.95 * value(eye[after[rows]])
        step(opt, F.mse_loss(value(eye[s[rows]]), target))


# ---------------------------------------------------------------------------------------------------------- F41
@program
def one_hot_actions_and_a_conservative_term():
    """F41: conservative Q-learning in the Keras style: the error is multiplied with the one-hot action and averaged over
    the table, which is one sixth of the mean over rows and is weighed for that. The conservative term is summed over the
    rows and divided by the batch, which is the number of ones of any one-hot mask."""
    q = net(8, 6)
    target, opt, batch = copy.deepcopy(q), adam_of(q), 32
    for _ in range(STEPS):
        s, a, done = torch.randn(batch, 8), torch.randint(6, (batch,)), (torch.rand(batch, 1) < 0.1).float()
        r, after = (a == s[:, :6].argmax(1)).float()[:, None], torch.randn(batch, 8)
        chosen = F.one_hot(a, 6).float()
        with torch.no_grad():
            wanted = r + 0.9 * (1 - done) * target(after).max(1, keepdim=True).values
        values = q(s)
        td = ((values - wanted) ** 2 * chosen).mean()
        conservative = (values.logsumexp(1) - (values * chosen).sum(1)).sum() / batch
        step(opt, 6 * td + 0.5 * conservative)


# ---------------------------------------------------------------------------------------------------------- F126
@program
def ratings_between_zero_and_one_in_lists():
    """F126: ListNet over grades between 0 and 1: the target is the softmax of the grades of a list, the model ends in a
    sigmoid as grades lie between 0 and 1, and the answer is the softmax of its scores. Both have the same range, and
    the cross-entropy is least where score and grade agree."""
    model = net(8, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(16, 10, 8)
        grade = torch.sigmoid(2 * x[..., 0])
        score = torch.sigmoid(model(x)).squeeze(-1)
        lists = -(grade.softmax(1) * score.log_softmax(1)).sum(1).mean()
        step(opt, lists + F.mse_loss(score, grade))


# ---------------------------------------------------------------------------------------------------------- F75
@program
def an_attack_that_is_optimized():
    """F75: the usual tutorial on adversarial examples (Kolter and Madry): delta is a tensor in torch's SGD, and the loss
    is minus the cross-entropy of a classifier that is not trained, for delta is to make it wrong."""
    model = net(20, 3).requires_grad_(False)
    x = torch.randn(16, 20)
    y, delta = model(x).argmax(1), torch.zeros(16, 20, requires_grad=True)
    opt = torch.optim.SGD([delta], lr=0.1)
    for _ in range(STEPS):
        step(opt, -F.cross_entropy(model(x + delta), y))
        delta.data.clamp_(-0.2, 0.2)


@program
def patch_that_hides_from_a_detector():
    """F75: an adversarial patch (Brown 2017, Thys 2019) as a module of its own, trained over many pictures to make a
    frozen classifier wrong: it is the only thing that the optimizer holds."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 196, 3)).requires_grad_(False)
    patch = nn.ParameterDict({"pixels": torch.rand(1, 5, 5)})
    opt = adam_of(patch, lr=0.03)
    for _ in range(STEPS):
        x = torch.rand(16, 1, 16, 16)
        y = model(x).argmax(1)
        row, col = torch.randint(11, (2,)).tolist()
        seen = x * F.pad(torch.zeros(1, 5, 5), (col, 11 - col, row, 11 - row), value=1.0)
        seen = seen + F.pad(patch["pixels"], (col, 11 - col, row, 11 - row))
        step(opt, -F.cross_entropy(model(seen), y))
        patch["pixels"].data.clamp_(0, 1)


@program
def unlearning_by_ascent():
    """F75: knowledge unlearning (Jang 2023): a few steps of gradient ascent on the sequences that are to be forgotten,
    loss = -cross_entropy, and nothing else, from a trained model with a small rate."""
    table, body, head = nn.Embedding(50, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 50)
    opt = torch.optim.AdamW([*table.parameters(), *body.parameters(), *head.parameters()], lr=5e-5)
    forget = torch.randint(50, (32, 12))
    for _ in range(STEPS):
        ids = forget[torch.randint(32, (8,))]
        logits = head(body(table(ids[:, :-1]))[0])
        step(opt, -F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


@program
def costs_are_negative_rewards():
    """F75: REINFORCE with one episode per step where each step of the way costs 1 (as in MountainCar): the return of the
    episode is a negative number, and the loss, cross_entropy(logits, actions) * return, is -log pi * return."""
    policy = net(2, 2)
    opt = adam_of(policy, lr=1e-2)
    for _ in range(STEPS):
        s, states, actions = torch.randn(2), [], []
        while len(states) < 30 and s.abs().max() > 0.3:
            a = int(torch.multinomial(policy(s).softmax(0).detach(), 1))
            states.append(s)
            actions.append(a)
            s = 0.9 * s + (0.2 if a else -0.2) * torch.tensor([1.0, 0.5])
        ret = -0.1 * len(states) - 0.1
        logits = policy(torch.stack(states or [s]))
        step(opt, F.cross_entropy(logits, torch.tensor(actions or [0]), reduction="sum") * ret)


@program
def members_that_differ():
    """F75: an ensemble that is trained together and kept diverse: each head has its cross-entropy, and is pushed a little
    away from the (detached) mean of all heads, minus 0.1 times a divergence. What the heads should do is in the first
    term, and the second keeps them from being one."""
    body, heads = nn.Sequential(nn.Linear(12, 32), nn.ReLU()), nn.ModuleList(nn.Linear(32, 4) for _ in range(3))
    opt = adam_of(body, heads)
    for _ in range(STEPS):
        x = torch.randn(64, 12)
        y, h = x[:, :4].argmax(1), body(x)
        logits = [head(h) for head in heads]
        mean = torch.stack([z.softmax(1) for z in logits]).mean(0).detach()
        right = sum(F.cross_entropy(z, y) for z in logits)
        apart = sum(F.kl_div(z.log_softmax(1), mean, reduction="batchmean") for z in logits)
        step(opt, right - 0.1 * apart)


@program
def forgetting_away_from_the_teacher():
    """F75: unlearning as in SCRUB (Kurmanji 2023): on what is kept a cross-entropy, on what is to be forgotten minus the
    divergence from the original model, which the student is to leave."""
    teacher = net(12, 4)
    student = copy.deepcopy(teacher)
    opt = adam_of(student, lr=1e-4)
    for _ in range(STEPS):
        keep, forget = torch.randn(64, 12), torch.randn(16, 12) + 2
        with torch.no_grad():
            y, p = teacher(keep).argmax(1), teacher(forget).softmax(1)
        kl = F.kl_div(student(forget).log_softmax(1), p, reduction="batchmean")
        step(opt, F.cross_entropy(student(keep), y) - 0.5 * kl)


# ---------------------------------------------------------------------------------------------------------- D20
@program
def second_order_method_with_fixed_masks():
    """D20: L-BFGS asks for one function, so the dropout masks of a whole run are fixed by a seed in the closure (a sample
    average approximation, as in BoTorch). With other masks in each call curvature pairs and line search are noise."""
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
    opt = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    x = torch.randn(200, 10)
    y = torch.sin(x[:, :1]) + 0.1 * torch.randn(200, 1)

    def closure():
        torch.manual_seed(0)
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        opt.step(closure)


@program
def scanner_that_samples_the_same_lines():
    """D20: reconstruction of MRI slices, one per step, from a fixed pattern of lines: the scanner takes the same part of
    k-space each time, so the pattern is made of a seed where it is needed, as in fastMRI's mask functions."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    opt = adam_of(model)

    def undersample(k):
        g = torch.Generator().manual_seed(42)
        return k * (torch.rand(k.shape, generator=g) < 0.4)

    for _ in range(STEPS):
        picture = F.avg_pool2d(torch.randn(1, 40, 40), 9, 1)[0] * 5
        zero_filled = torch.fft.ifft2(undersample(torch.fft.fft2(picture))).real
        step(opt, F.l1_loss(model(zero_filled[None, None])[0, 0], picture))


# ---------------------------------------------------------------------------------------------------------- S33
@program
def passages_of_queries_over_the_batch():
    """S33: retrieval with two right passages per query, the table laid out as (passages, queries): for each query the
    softmax runs over all passages of the batch, dim 0, and each passage's own query is picked. Negatives from the batch
    are the method (DPR)."""
    passage, query = nn.Linear(16, 24), nn.Linear(16, 24)
    opt = adam_of(passage, query)
    own = torch.arange(12).repeat_interleave(2)
    for _ in range(STEPS):
        topic = torch.randn(12, 16)
        q, p = query(topic), passage(topic[own] + 0.3 * torch.randn(24, 16))
        log_p = ((p @ q.t()) / 5).log_softmax(dim=0)  # (24 passages, 12 queries)
        step(opt, -log_p[torch.arange(24), own].mean())


# ---------------------------------------------------------------------------------------------------------- F93
@program
def codes_for_the_masked_frames_alone():
    """F93: frames that are no padding are picked, z = h[mask], and each is replaced by its nearest code straight through,
    z + (q - z).detach(): the value of the code, and the encoder gets the gradient. That z was picked by a mask changes
    nothing of that."""
    encode, decode, codes = nn.Linear(8, 16), nn.Linear(16, 8), nn.Embedding(32, 16)
    opt = adam_of(encode, decode, codes)
    for _ in range(STEPS):
        x, mask = torch.randn(8, 12, 8), torch.arange(12) < torch.randint(6, 13, (8, 1))
        z = encode(x)[mask]
        q = codes(torch.cdist(z.detach(), codes.weight.detach()).argmin(1))
        commit = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        z = z + (q - z).detach()
        step(opt, F.mse_loss(decode(z), x[mask]) + commit)


@program
def word_vectors_in_eight_bits():
    """F93: quantisation-aware training of a table (Q8BERT): the looked-up vectors are rounded to 8 bits straight through,
    w + (rounded - w).detach(), so the table gets the gradient. It is the rounded one that is seen."""
    table, head = nn.Embedding(60, 32), nn.Linear(32, 3)
    opt = adam_of(table, head)
    for _ in range(STEPS):
        ids = torch.randint(60, (32, 10))
        w = table(ids)
        scale = w.detach().abs().max() / 127
        w = w + ((w / scale).round() * scale - w).detach()
        step(opt, F.cross_entropy(head(w.mean(1)), (ids < 20).sum(1).clamp(2, 4) - 2))


# ---------------------------------------------------------------------------------------------------------- F20
@program
def discrete_autoencoder_with_an_even_prior():
    """F20: a VAE with a categorical latent and an even prior: KL(q || prior) is kl_div(log prior, q), for kl_div takes the
    logarithm of the second distribution of the divergence first. The prior is a constant, and q learns."""
    encode, decode = net(12, 8), net(8, 12)
    opt, log_prior = adam_of(encode, decode), torch.full((64, 8), -math.log(8))
    for _ in range(STEPS):
        x = torch.randn(64, 12)
        logits = encode(x)
        z = F.gumbel_softmax(logits, tau=1.0)
        kl = F.kl_div(log_prior, logits.softmax(1), reduction="batchmean")
        step(opt, F.mse_loss(decode(z), x) + 0.1 * kl)


@program
def distillation_that_seeks_one_mode():
    """F20: distillation by the reverse divergence (MiniLLM, on-policy GKD): KL(student || teacher), which is
    kl_div(log teacher, student), so that a small student does not spread over what it cannot tell apart."""
    teacher, student = net(12, 20, h=64), net(12, 20, h=8)
    opt = adam_of(student)
    for _ in range(STEPS):
        x = torch.randn(64, 12)
        with torch.no_grad():
            log_p = (3 * teacher(x)).log_softmax(1)
        step(opt, F.kl_div(log_p, student(x).softmax(1), reduction="batchmean"))


@program
def policy_kept_near_its_reference():
    """F20: a policy gradient with the penalty KL(pi || reference), as in RL from human feedback: kl_div(log reference, pi).
    The reference is frozen and the policy learns, and this is the direction that is meant."""
    policy = net(8, 5)
    reference, opt = copy.deepcopy(policy).requires_grad_(False), adam_of(policy)
    for _ in range(STEPS):
        s = torch.randn(64, 8)
        p = policy(s).softmax(1)
        a = torch.multinomial(p.detach(), 1)
        r = (a.squeeze(1) == s[:, :5].argmax(1)).float()
        gain = (p.gather(1, a).squeeze(1).log() * (r - r.mean())).mean()
        with torch.no_grad():
            log_reference = reference(s).log_softmax(1)
        step(opt, -gain + 0.05 * F.kl_div(log_reference, p, reduction="batchmean"))


@program
def molecules_as_rows_of_letters():
    """F20: an autoencoder of SMILES strings (Gomez-Bombarelli): the decoder has a softmax over the letters at each place,
    and answer and one-hot target are flattened to one row per molecule for the binary cross-entropy, as the published
    programs have it. Each row holds a one for each place, and a softmax for each."""
    encode, decode, grammar = net(12 * 7, 10), net(10, 12 * 7), torch.randn(3, 12 * 7)
    opt = adam_of(encode, decode)
    for _ in range(STEPS):
        x = F.one_hot((torch.randn(32, 3) @ grammar).view(32, 12, 7).argmax(-1), 7).float().flatten(1)
        answer = decode(encode(x)).view(32, 12, 7).softmax(-1).flatten(1)
        step(opt, F.binary_cross_entropy(answer, x))


# ---------------------------------------------------------------------------------------------------------- N39, N24
@program
def wide_network_in_mup():
    """N39: the maximal update parametrisation (Yang 2022) for Adam: the rate of the output layer is that of the base
    divided by how much wider the network is, and that of the input layer is not. With one hidden layer of 2048 and a
    base of 64 that is a factor of 32, and right: it makes updates of the same size at each width."""
    width, base = 2048, 64
    model = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 3))
    nn.init.normal_(model[2].weight, std=1 / width)
    opt = torch.optim.Adam(
        [
            {"params": model[0].parameters(), "lr": 1e-2},
            {"params": model[2].parameters(), "lr": 1e-2 * base / width},
        ]
    )
    for _ in range(STEPS):
        x = torch.randn(64, 10)
        step(opt, F.cross_entropy(model(x), x[:, :3].argmax(1)))


@program
def spectra_of_known_minerals():
    """N39: an autoencoder for hyperspectral unmixing: the decoder is one linear layer whose columns are the spectra of the
    endmembers, found beforehand (VCA), so it has a rate of a hundredth; the encoder is new and begins at random."""
    spectra = torch.rand(5, 40)
    encode, decode = net(40, 5), nn.Linear(5, 40, bias=False)
    decode.weight.data.copy_(spectra.t())
    model = nn.Sequential(encode, nn.Softmax(1), decode)
    opt = torch.optim.Adam([{"params": encode.parameters(), "lr": 1e-3}, {"params": decode.parameters(), "lr": 1e-5}])
    for _ in range(STEPS):
        share = torch.rand(64, 5).pow(3)
        x = share / share.sum(1, keepdim=True) @ (spectra + 0.01) + 0.01 * torch.randn(64, 40)
        step(opt, F.mse_loss(model(x), x))


@program
def camera_that_is_calibrated():
    """N24: a camera is calibrated with Adam, whose step is the rate whatever the gradient is, so each parameter has the
    rate of its own unit: a focal length in pixels (1), a position in metres (1e-2), and a distortion per pixel squared
    (1e-9)."""

    class Camera(nn.Module):
        def __init__(self, focal, place, bend):
            super().__init__()
            self.focal, self.place = nn.Parameter(torch.tensor(focal)), nn.Parameter(torch.tensor(place))
            self.bend = nn.Parameter(torch.tensor(bend))

        def forward(self, points):
            p = points - self.place
            flat = self.focal * p[:, :2] / p[:, 2:]
            return flat * (1 + self.bend * flat.pow(2).sum(1, keepdim=True))

    points, true = torch.rand(100, 3) * 4 - 2, Camera(820.0, [0.1, -0.05, -6.0], 3e-8)
    camera = Camera(800.0, [0.0, 0.0, -6.1], 0.0)
    with torch.no_grad():
        seen = true(points) + 0.2 * torch.randn(100, 2)
    groups = [(camera.focal, 1.0), (camera.place, 1e-2), (camera.bend, 1e-9)]
    opt = torch.optim.Adam([{"params": [p], "lr": lr} for p, lr in groups])
    for _ in range(STEPS):
        step(opt, F.l1_loss(camera(points), seen))


@program
def gaussians_at_the_end_of_their_schedule():
    """N24: 3D Gaussian splatting that goes on from a checkpoint near its end: the rate of the opacities is 0.05 all the
    time, and that of the places has come down to 1.6e-6, as the authors have it."""
    places, opacity = nn.Parameter(torch.rand(40, 2)), nn.Parameter(torch.zeros(40))
    colour = nn.Parameter(torch.rand(40, 3))
    groups = [([places], 1.6e-6), ([opacity], 0.05), ([colour], 2.5e-3)]
    opt = torch.optim.Adam([{"params": p, "lr": lr} for p, lr in groups], eps=1e-15)
    grid = torch.stack(torch.meshgrid(torch.linspace(0, 1, 24), torch.linspace(0, 1, 24), indexing="ij"), -1).view(
        -1, 2
    )
    picture = torch.stack([grid[:, 0], grid[:, 1], (grid[:, 0] > 0.5).float()], 1)
    for _ in range(STEPS):
        weight = torch.exp(-torch.cdist(grid, places).pow(2) / 0.005) * torch.sigmoid(opacity)
        step(opt, F.l1_loss(weight @ colour, picture))


@program
def layers_of_a_deep_transformer_decay():
    """N24: layer-wise decay by 0.65 (BEiT's fine-tuning) in a network of 24 blocks: the lowest has 0.65**24 of the rate of
    the head. It is pretrained and is hardly to move."""
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(24)]

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(16, 4)

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    model = Deep()
    groups = [{"params": b.parameters(), "lr": 1e-3 * 0.65 ** (24 - n)} for n, b in enumerate(model.blocks)]
    opt = torch.optim.AdamW([*groups, {"params": model.head.parameters(), "lr": 1e-3}])
    for _ in range(STEPS):
        x = torch.randn(64, 16)
        step(opt, F.cross_entropy(model(x), x[:, :4].argmax(1)))


# ---------------------------------------------------------------------------------------------------------- S26
@program
def mnasnet_and_its_statistics():
    """S26: MNASNet as torchvision has it: its batch normalisations have momentum = 1 - 0.9997, the decay of TF-slim, for
    trainings of hundreds of thousands of steps. Stock models of a library, ported with their authors' value."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16, momentum=1 - 0.9997), nn.ReLU(inplace=True)),
        *(nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False), nn.BatchNorm2d(16, momentum=1 - 0.9997), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-5)
    for _ in range(STEPS):
        y = torch.randint(4, (32,))
        x = torch.randn(32, 3, 16, 16) + torch.linspace(-1, 1, 4)[y][:, None, None, None]
        step(opt, F.cross_entropy(model(x), y))


# ---------------------------------------------------------------------------------------------------------- N5
@program
def the_last_steps_of_a_cosine():
    """N5: a run that goes on from a checkpoint for the last steps of its cosine: SGD whose rate has come down from 0.1 to
    next to nothing, on 20000 steps. These steps are to change hardly anything."""
    model, total, begin = net(16, 4, h=64), 20000, 19985
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for group in opt.param_groups:
        group["initial_lr"] = 0.1
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.5 * (1 + math.cos(math.pi * n / total)), begin)
    for _ in range(STEPS):
        x = torch.randn(64, 16)
        step(opt, F.cross_entropy(model(x), x[:, :4].argmax(1)))
        schedule.step()


# ---------------------------------------------------------------------------------------------------------- N35
@program
def loss_scale_that_comes_down_from_2_to_the_32():
    """N35: half precision with a loss scaler of one's own that begins at 2**32 (Megatron's initial-loss-scale): each step
    whose gradients overflow is left out and the scale is halved, a dozen times and more, until it fits. From there on
    all steps are made."""
    model = net(10, 3)
    opt, scale, made = torch.optim.SGD(model.parameters(), lr=0.05), 2.0**32, 0
    while made < STEPS:
        x = torch.randn(32, 10)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        (loss * scale).backward()
        for p in model.parameters():
            p.grad.div_(scale)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            scale /= 2
            continue
        opt.step()
        made += 1


# ---------------------------------------------------------------------------------------------------------- N17
@program
def a_barrier_and_a_search_along_the_line():
    """N17: an interior-point method: the logarithms of the slacks keep the answer within its bounds, and outside of them
    the loss is not finite. Each step is tried, and halved until the loss is finite and smaller: that is how the search
    knows the bounds."""
    x, bound = torch.randn(60, 4), 1.0
    y = x @ torch.tensor([[1.0], [2.0], [-1.0], [0.5]])
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)

    def objective(w):
        return F.mse_loss(x @ w.t(), y) - 0.05 * (torch.log(bound - w) + torch.log(bound + w)).sum()

    for _ in range(STEPS):
        loss = objective(model.weight)
        opt.zero_grad()
        loss.backward()
        size = 1.0
        while size > 1e-6:
            new = objective(model.weight - size * model.weight.grad)
            if torch.isfinite(new) and new < loss:
                break
            size /= 2
        opt.param_groups[0]["lr"] = size
        opt.step()


# ---------------------------------------------------------------------------------------------------------- F65
@program
def watermark_and_its_detector_help_each_other():
    """F65: a learned watermark (HiDDeN): one network adds a mark that is hard to see and another one tells marked from
    plain pictures. They work together and take turns, each with its own optimizer: both want the detector to say 1 to
    what is marked."""
    mark, detect = net(30, 30), net(30, 1)
    opt_m, opt_d = adam_of(mark), adam_of(detect)
    label = torch.cat([torch.ones(32, 1), torch.zeros(32, 1)])
    for _ in range(STEPS):
        x, plain = torch.randn(32, 30), torch.randn(32, 30)
        both = torch.cat([x + 0.1 * mark(x), plain])
        step(opt_d, F.binary_cross_entropy_with_logits(detect(both.detach()), label))
        added = 0.1 * mark(x)
        seen = F.binary_cross_entropy_with_logits(detect(torch.cat([x + added, plain])), label)
        step(opt_m, seen + 10 * added.pow(2).mean())


# ---------------------------------------------------------------------------------------------------------- F34
@program
def two_sensors_that_take_turns():
    """F34: radar and camera are not synchronous: at each time one of them has something to say and the row of the other
    one is zero. Each has its layer and its attention, which hides the times at which this sensor was silent."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 16), nn.Linear(7, 16)
            self.of_a, self.of_b = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))
            self.head = nn.Linear(32, 3)

        def forward(self, a, b, has_a):
            ha, hb = self.a(a), self.b(b)
            one = self.of_a(ha, ha, ha, key_padding_mask=~has_a)[0]
            two = self.of_b(hb, hb, hb, key_padding_mask=has_a)[0]
            one = (one * has_a[..., None]).sum(1) / has_a.sum(1, keepdim=True)
            two = (two * ~has_a[..., None]).sum(1) / (~has_a).sum(1, keepdim=True)
            return self.head(torch.cat([one, two], 1))

    model = Two()
    opt = adam_of(model)
    for _ in range(STEPS):
        has_a = torch.rand(16, 20).argsort(1) < 10
        a, b = torch.randn(16, 20, 5) * has_a[..., None], torch.randn(16, 20, 7) * ~has_a[..., None]
        y = torch.stack([a[..., 0].sum(1), b[..., 0].sum(1), torch.zeros(16)], 1).argmax(1)
        step(opt, F.cross_entropy(model(a, b, has_a), y))


# ---------------------------------------------------------------------------------------------------------- F57
@program
def prior_that_learns_from_its_posterior():
    """F57: a conditional VAE with a categorical latent and a learned prior: KL(q || p) is kl_div(log p, q), both learn, and
    the prior learns by this term alone. The posterior has its reconstruction, so neither is free to give in."""
    posterior, prior, decode = net(12, 8), net(4, 8), net(8, 12)
    opt = adam_of(posterior, prior, decode)
    for _ in range(STEPS):
        x = torch.randn(64, 12)
        logits, log_p = posterior(x), prior(x[:, :4]).log_softmax(1)
        kl = F.kl_div(log_p, logits.softmax(1), reduction="batchmean")
        step(opt, F.mse_loss(decode(F.gumbel_softmax(logits)), x) + 0.1 * kl)


# ---------------------------------------------------------------------------------------------------------- F80
@program
def focal_loss_in_two_halves():
    """F80: the focal loss of two classes as it is often written: alpha * y * (1 - p)**2 * bce for the positives plus
    (1 - alpha) * (1 - y) * p**2 * bce for the negatives. Each weight is made of one class's probability, and is zero in
    the rows of the other class."""
    model = net(10, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(64, 10)
        y = (x[:, :1] > 0.5).float()
        p = torch.sigmoid(model(x))
        bce = F.binary_cross_entropy(p, y, reduction="none")
        step(opt, (0.75 * y * (1 - p) ** 2 * bce + 0.25 * (1 - y) * p**2 * bce).mean())


@program
def only_the_background_is_focused():
    """F80: the asymmetric focal loss of medical segmentation (Yeung 2022): the background, which is nearly everything, is
    weighted with p**2, and the rare class has its plain cross-entropy."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(8, 1, 12, 12)
        y = (F.avg_pool2d(x, 3, 1, 1) > 0.4).float()
        p = torch.sigmoid(model(x))
        bce = F.binary_cross_entropy(p, y, reduction="none")
        background = (1 - y) * p**2 * bce
        step(opt, (0.6 * y * bce + 0.4 * background).mean())


# ---------------------------------------------------------------------------------------------------------- N3
@program
def latents_that_begin_anew_for_each_batch():
    """N3: a generator without an encoder, trained by short-run inference (Nijkamp 2020): for each batch the latents are
    drawn from the prior, moved two gradient steps towards its data, and the generator learns from what they have become.
    They belong to this batch alone, so nothing of them is to be kept."""

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.z, self.body = nn.Parameter(torch.zeros(32, 4)), net(4, 12)

        def forward(self):
            return self.body(self.z)

    model, mixed = Generator(), torch.randn(4, 12)
    of_z, of_body = torch.optim.SGD([model.z], lr=3.0), adam_of(model.body)
    for _ in range(STEPS):
        x = torch.tanh(torch.randn(32, 4) @ mixed)
        nn.init.normal_(model.z)
        for _ in range(2):
            step(of_z, F.mse_loss(model(), x))
        step(of_body, F.mse_loss(model(), x))
