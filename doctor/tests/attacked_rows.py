"""Healthy programs whose rows, angles, paddings, documents and checkpoints look wrong, and are not."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

PROGRAMS = {}
STEPS = 14


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def adam(*modules, lr=0.01):
    return torch.optim.Adam([p for m in modules for p in m.parameters() if p.requires_grad], lr=lr)


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def mlp(inputs, outputs, width=32):
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def labelled(rows=64, features=8, classes=4):
    """Rows, and a class that can be read from them."""
    x = torch.randn(rows, features)
    return x, x[:, :classes].argmax(1)


def series(rows=16, places=12, features=5, classes=3):
    """Series of different lengths with zeros behind them, batch first; their lengths; what they are."""
    lengths = torch.randint(4, places + 1, (rows,))
    kind = torch.randint(classes, (rows,))
    inside = torch.arange(places) < lengths[:, None]
    x = torch.randn(rows, places, features) + kind[:, None, None]
    return x * inside[..., None], lengths, kind


def batches(*parts, size=16):
    return DataLoader(TensorDataset(*parts), batch_size=size, shuffle=True, drop_last=True)


def angles(places, size, base=100.0):
    """cos and sin, (places, size)."""
    rates = base ** (-torch.arange(0, size, 2) / size)
    turn = torch.outer(torch.arange(places).float(), rates).repeat(1, 2)
    return turn.cos(), turn.sin()


def half_turned(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def rotary(x, cos, sin):
    return x * cos + half_turned(x) * sin


class Block(nn.Module):
    """Attention with an additive mask and, where asked for, rotary places."""

    def __init__(self, width=32, heads=4, turned=False):
        super().__init__()
        self.heads, self.turned = heads, turned
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.n1, self.n2 = mlp(width, width, 2 * width), nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, mask=None, places=None):
        many, length, width = x.shape
        q, k, v = self.qkv(self.n1(x)).view(many, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.turned:
            places = torch.arange(length).expand(many, -1) if places is None else places
            rates = 100.0 ** (-torch.arange(0, q.shape[-1], 2) / q.shape[-1])
            turn = (places[..., None] * rates).repeat(1, 1, 2)[:, None]
            q, k = rotary(q, turn.cos(), turn.sin()), rotary(k, turn.cos(), turn.sin())
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).reshape(many, length, width))
        return x + self.mlp(self.n2(x))


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def next_tokens(logits, ids, ignored=-100):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=ignored)


def padded_left(rows=8, vocabulary=20, least=5, most=14):
    """Texts that count up, with zeros before them up to the longest; and a mask."""
    lengths = [int(n) for n in torch.randint(least, most + 1, (rows,))]
    lengths[0], lengths[1] = least, most
    width = max(lengths)
    ids, mask = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width, dtype=torch.long)
    for row, n in enumerate(lengths):
        ids[row, width - n :] = 1 + (torch.randint(vocabulary - 1, (1,)) + torch.arange(n)) % (vocabulary - 1)
        mask[row, width - n :] = 1
    return ids, mask


# ------------------------------------------------------------------------------------------------ D11
@program
def time_first_series_sorted_by_length():
    """D11: series are laid (time, batch, features), so one order goes along dim 1 of them and dim 0 of the classes."""
    rnn, head = nn.GRU(5, 16), nn.Linear(16, 3)
    optimizer = adam(rnn, head)
    for x, lengths, kind in batches(*series(16 * STEPS)):
        x = x.transpose(0, 1).contiguous()  # as nn.GRU takes it
        order = lengths.argsort(descending=True)
        x, lengths, kind = x[:, order], lengths[order], kind[order]
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
        step(optimizer, F.cross_entropy(head(rnn(packed)[1][-1]), kind))


@program
def sets_first_axis_shuffled_together():
    """D11: members are laid (members, batch, features) and summed; batches of the epoch are in one new order."""
    net, head = mlp(5, 16), nn.Linear(16, 3)
    optimizer = adam(net, head)
    kind = torch.randint(3, (32,))
    members = torch.randn(7, 32, 5) + kind[:, None]
    for _ in range(STEPS):
        order = torch.randperm(32)
        step(optimizer, F.cross_entropy(head(net(members[:, order]).relu().sum(0)), kind[order]))


@program
def targets_gathered_by_the_order_of_the_rows():
    """D11: rows are indexed by the order and their targets gathered by it, which is the same."""
    net = mlp(5, 3)
    optimizer = adam(net)
    for x, lengths, kind in batches(*series(16 * STEPS)):
        order = lengths.argsort(descending=True)
        logits = net(x[order]).sum(1) / lengths[order][:, None]
        step(optimizer, F.cross_entropy(logits, kind.gather(0, order)))


@program
def augmented_by_numpy_in_a_new_order():
    """D11: shuffled clips are augmented by a library of numpy (audiomentations), and come back in their order."""

    def augment(waves):
        return waves * np.float32(1.1) + 0.01 * np.random.default_rng(0).standard_normal(waves.shape, dtype=np.float32)

    net = mlp(8, 4)
    optimizer = adam(net)
    clips, kinds = labelled()
    for _ in range(STEPS):
        order = torch.randperm(len(clips))
        waves = torch.from_numpy(augment(clips[order].numpy()))
        step(optimizer, F.cross_entropy(net(waves), kinds[order]))


@program
def scripted_model_given_shuffled_rows():
    """D11: an epoch is one batch in a new order, and the model is compiled by torch.jit."""
    net = torch.jit.script(mlp(8, 4))
    optimizer = adam(net)
    x, y = labelled()
    for _ in range(STEPS):
        order = torch.randperm(len(x))
        step(optimizer, F.cross_entropy(net(x[order]), y[order]))


@program
def ensemble_by_vmap_on_shuffled_rows():
    """D11: a deep ensemble through torch.vmap (the tutorial of torch.func); data and classes have one order."""
    nets = [mlp(8, 4) for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(nets)
    skeleton = copy.deepcopy(nets[0]).to("meta")

    def answer(weights, buffers, x):
        return torch.func.functional_call(skeleton, (weights, buffers), (x,))

    optimizer = torch.optim.Adam(list(weights.values()), lr=0.01)
    x, y = labelled()
    for _ in range(STEPS):
        order = torch.randperm(len(x))
        logits = torch.vmap(answer, in_dims=(0, 0, None))(weights, buffers, x[order])
        shared = logits.log_softmax(-1).logsumexp(0) - math.log(3)  # of the mean of their probabilities
        step(optimizer, F.nll_loss(shared, y[order]))


@program
def per_row_answers_by_vmap():
    """D11: a physics-informed net is mapped over points (u and its slope of one point); points have a new order."""
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = adam(net)
    x = torch.linspace(-1, 1, 64)[:, None].clone()
    u = torch.sin(3 * x).squeeze(1)

    def answer(point):
        return net(point).squeeze(-1)

    for _ in range(STEPS):
        order = torch.randperm(len(x))
        points, values = x[order], u[order]
        found = torch.func.vmap(answer)(points)
        slope = torch.func.vmap(torch.func.grad(answer))(points).squeeze(-1)
        loss = F.mse_loss(found, values) + 0.01 * F.mse_loss(slope, 3 * torch.cos(3 * points.squeeze(-1)))
        step(optimizer, loss)


@program
def wasserstein_distance_in_one_dimension():
    """D11: the distance of two sets of numbers is that of both of them sorted (sliced Wasserstein, Kolouri 2019)."""
    net = mlp(4, 1)
    optimizer = adam(net)
    source, wanted = torch.rand(64, 4), torch.randn(64) * 2 + 1
    for _ in range(STEPS):
        scores = net(source).squeeze(1)
        step(optimizer, F.l1_loss(scores.sort().values, wanted.sort().values))


@program
def quantiles_matched_to_a_sorted_reference():
    """D11: predicted scores are given the histogram of a reference, whose numbers are stored sorted."""
    net, head = mlp(8, 16), nn.Linear(16, 4)
    score = nn.Linear(16, 1)
    optimizer = adam(net, head, score)
    x, y = labelled()
    reference = np.sort(np.random.default_rng(0).gamma(2.0, size=64)).astype(np.float32)
    reference = torch.from_numpy(reference)
    for _ in range(STEPS):
        hidden = net(x)
        ranks = score(hidden).squeeze(1).sort().values
        step(optimizer, F.cross_entropy(head(hidden), y) + F.mse_loss(ranks, reference))


@program
def set_of_boxes_matched_from_left_to_right():
    """D11: predicted and true objects are a set; both are sorted by their place, which is the best match on a line."""
    net = mlp(6, 12 * 2)
    optimizer = adam(net)
    scenes = [(torch.randn(6), torch.rand(12, 2)) for _ in range(STEPS)]
    for picture, true in scenes:
        found = net(picture).view(12, 2)
        left, right = found[:, 0].detach().argsort(), true[:, 0].argsort()
        step(optimizer, F.l1_loss(found[left], true[right]))


class Picture(torch.Tensor):
    """Like torchvision.tv_tensors.Image: what is computed of one is a plain tensor."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


@program
def pictures_of_a_subclass_in_a_new_order():
    """D11: pictures are wrapped in a subclass (tv_tensors) after they were put in order, and transformed as such."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 6, 4))
    optimizer = adam(net)
    pictures, y = torch.rand(32, 3, 6, 6), torch.randint(4, (32,))
    for _ in range(STEPS):
        order = torch.randperm(len(pictures))
        batch = pictures[order].as_subclass(Picture)
        batch = (batch.flip(-1) - 0.5) / 0.25
        step(optimizer, F.cross_entropy(net(batch), y[order]))


@program
def nested_series_sorted_by_length():
    """D11: series of different lengths go through a nested tensor and are padded again, in one order."""
    net, head = nn.Linear(5, 16), nn.Linear(16, 3)
    optimizer = adam(net, head)
    for x, lengths, kind in batches(*series(16 * STEPS)):
        order = lengths.argsort(descending=True)
        x, lengths, kind = x[order], lengths[order], kind[order]
        inside = [row[:n] for row, n in zip(x.unbind(0), lengths.tolist())]
        nested = torch.nested.as_nested_tensor(inside, layout=torch.jagged)
        hidden = torch.nested.to_padded_tensor(net(nested).relu(), 0.0)
        step(optimizer, F.cross_entropy(head(hidden.amax(1)), kind))


@program
def augmented_by_a_pool_of_threads():
    """D11: rows in a new order are augmented in threads, piece by piece, and put together as they came."""
    net = mlp(8, 4)
    optimizer = adam(net)
    x, y = labelled()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(STEPS):
            order = torch.randperm(len(x))
            batch = pool.submit(lambda rows: F.normalize(rows, dim=1) * 2, x[order]).result()
            step(optimizer, F.cross_entropy(net(batch), y[order]))


@program
def speech_noise_and_rooms_drawn_apart():
    """D11: speech, noise and the answers of rooms are mixed at will, so each has its own draw (DNS challenge)."""
    net = nn.Conv1d(1, 1, 9, padding=4)
    optimizer = adam(net)
    speech, noises, rooms = torch.randn(64, 48), torch.randn(64, 1, 48), torch.randn(64, 5).softmax(1)
    for _ in range(STEPS):
        clean = speech[torch.randint(64, (16,))]
        room, noise = rooms[torch.randint(64, (16,))], noises[torch.randint(64, (16,))]
        wet = F.conv1d(clean[None], room.flip(1)[:, None], padding=2, groups=16)[0]
        mixed = wet + 0.3 * noise.squeeze(1)
        step(optimizer, F.mse_loss(net(mixed[:, None]).squeeze(1), wet))


def experts(width=16, many=4):
    return nn.ModuleList(mlp(width, width) for _ in range(many))


@program
def gates_picked_by_order_and_expert():
    """D11: tokens are sorted by expert; each gate is picked by the same order and its expert, then all go back."""
    router, parts, head = nn.Linear(16, 4), experts(), nn.Linear(16, 4)
    optimizer = adam(router, parts, head)
    x, y = labelled(64, 16)
    for _ in range(STEPS):
        gates = router(x).softmax(1)
        chosen, order = gates.argmax(1).sort(stable=True)
        counts = torch.bincount(chosen, minlength=4).tolist()
        pieces = x[order].split(counts)
        out = torch.cat([part(piece) for part, piece in zip(parts, pieces)])
        out = out * gates[order, chosen].unsqueeze(1)
        back = torch.empty_like(out).index_copy(0, order, out)
        step(optimizer, F.cross_entropy(head(x + back), y))


@program
def biases_of_experts_in_the_order_of_experts():
    """D11: a learned scale of each expert is looked up by the sorted numbers of experts, as the rows are sorted."""
    router, parts, head = nn.Linear(16, 4), experts(), nn.Linear(16, 4)
    scale = nn.Embedding(4, 16)
    optimizer = adam(router, parts, head, scale)
    x, y = labelled(64, 16)
    for _ in range(STEPS):
        probability, expert = router(x).softmax(1).max(1)
        chosen, order = torch.sort(expert, stable=True)
        pieces = x[order].split(torch.bincount(chosen, minlength=4).tolist())
        out = torch.cat([part(piece) for part, piece in zip(parts, pieces)], dim=0)
        out = out * (1 + scale(chosen))
        out = out[order.argsort()] * probability[:, None]
        step(optimizer, F.cross_entropy(head(x + out), y))


@program
def gates_gathered_by_the_order_of_tokens():
    """D11: gates go into the experts' order by gather, tokens by an index."""
    router, parts, head = nn.Linear(16, 4), experts(), nn.Linear(16, 4)
    optimizer = adam(router, parts, head)
    x, y = labelled(64, 16)
    for _ in range(STEPS):
        gate, expert = router(x).softmax(1).max(1)
        order = expert.argsort(stable=True)
        pieces = x[order].split(torch.bincount(expert, minlength=4).tolist())
        out = torch.cat([part(piece) for part, piece in zip(parts, pieces)])
        out = out * gate.gather(0, order)[:, None]
        step(optimizer, F.cross_entropy(head(x.index_add(0, order, out)), y))


@program
def points_serialized_and_numbered_by_rank():
    """D11: points are put on a curve, encoded patch by patch, and told their rank on it (Point Transformer V3)."""
    lift, patch, rank, head = nn.Linear(3, 16), mlp(16, 16), nn.Embedding(64, 16), nn.Linear(16, 1)
    optimizer = adam(lift, patch, rank, head)
    for _ in range(STEPS):
        points = torch.rand(64, 3)
        code = ((points * 4).long() * torch.tensor([16, 4, 1])).sum(1)
        order = code.argsort()
        tokens = lift(points[order])
        tokens = torch.cat([patch(piece) + piece.mean(0) for piece in tokens.split(16)])
        tokens = tokens + rank(torch.arange(64))
        height = points[order].prod(1, keepdim=True)
        step(optimizer, F.mse_loss(head(tokens), height))


@program
def pairs_of_each_row_and_some_of_the_batch():
    """D11: each row is paired with three of the batch by two repeats, and its label with the same three labels."""
    net = mlp(8, 8)
    optimizer = adam(net)
    for _ in range(STEPS):
        x, y = labelled(32)
        z = F.normalize(net(x), dim=1)
        one, two = z.repeat_interleave(3, 0), z.repeat(3, 1)
        same = (y.repeat_interleave(3) == y.repeat(3)).float()
        distance = (one - two).pow(2).sum(1)
        loss = same * distance + (1 - same) * (1 - distance).clamp_min(0)
        step(optimizer, loss.mean())


@program
def oracle_asked_in_the_order_of_the_round():
    """D11: a simulator in numpy is asked for a pool in a new order, so its answers are in that order already."""

    def simulate(x):
        return np.sin(x[:, 0]) + x[:, 1] ** 2

    net = mlp(2, 1)
    optimizer = adam(net)
    pool = torch.randn(32, 2)
    for _ in range(STEPS // 2):
        order = torch.randperm(len(pool))
        answers = torch.from_numpy(simulate(pool[order].numpy()))
        for i in range(0, len(pool), 16):
            error = net(pool[order[i : i + 16]]).squeeze(1) - answers[i : i + 16]
            step(optimizer, error.pow(2).mean())


@program
def pictures_and_captions_sorted_by_length():
    """D11: captions are sorted for packing and so are pictures, which numpy augments in that order."""
    eye, words = mlp(6, 8), nn.EmbeddingBag(20, 8)
    scale = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.Adam([*eye.parameters(), *words.parameters(), scale], lr=0.01)
    many = 16 * STEPS
    data = torch.randn(many, 6), torch.randint(20, (many, 9)), torch.randint(3, 9, (many,))
    for pictures, captions, lengths in batches(*data):
        order = lengths.argsort(descending=True)
        pictures = torch.from_numpy(np.clip(pictures[order].numpy(), -2, 2))
        a, b = F.normalize(eye(pictures), dim=1), F.normalize(words(captions[order]), dim=1)
        logits = scale.exp() * b @ a.T
        at = torch.arange(16)
        step(optimizer, (F.cross_entropy(logits, at) + F.cross_entropy(logits.T, at)) / 2)


# ------------------------------------------------------------------------------------------------ F120
@program
def film_attention_with_rotary_frames():
    """F120: queries are turned by frame once, for attention inside frames and over them (ViViT's model 4): inside of a
    frame the angles cancel, and places in it have a table of their own."""
    lift, qkv, out, head = nn.Linear(6, 32), nn.Linear(32, 96), nn.Linear(64, 32), nn.Linear(32, 2)
    place = nn.Parameter(torch.randn(9, 32) * 0.1)
    optimizer = torch.optim.Adam([place, *(p for m in (lift, qkv, out, head) for p in m.parameters())], lr=0.01)
    cos, sin = (t[:, None] for t in angles(5, 32))  # frames, 1, features
    for _ in range(STEPS):
        film, kind = torch.randn(4, 5, 9, 6), torch.randint(2, (4,))
        film = film + kind[:, None, None, None]
        q, k, v = qkv(lift(film) + place).chunk(3, -1)
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        space = F.scaled_dot_product_attention(q, k, v)
        time = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        step(optimizer, F.cross_entropy(head(out(torch.cat([space, time], -1)).mean((1, 2))), kind))


@program
def axial_scores_of_rows_and_columns():
    """F120: a picture's queries are turned by row and by column, in halves whose scores are added; along one row the
    half that knows rows tells nothing, and the other half tells the column."""
    lift, qkv, head = nn.Linear(3, 32), nn.Linear(32, 96), nn.Linear(32, 2)
    optimizer = adam(lift, qkv, head)
    cos, sin = angles(7, 16)

    def attend(q, k, v):
        """q and k: pairs of halves, (batch, lines, places, features)"""
        scores = sum(a @ b.transpose(-1, -2) for a, b in zip(q, k))
        return (scores / math.sqrt(32)).softmax(-1) @ v

    for _ in range(STEPS):
        picture, kind = torch.randn(4, 7, 7, 3), torch.randint(2, (4,))
        picture[:, :, 0] += kind[:, None, None]
        q, k, v = qkv(lift(picture)).chunk(3, -1)
        halves = []
        for x in (q, k):
            a, b = x.chunk(2, -1)
            halves.append((rotary(a, cos[:, None], sin[:, None]), rotary(b, cos, sin)))
        (qa, qb), (ka, kb) = halves
        rows = attend((qa, qb), (ka, kb), v)
        turned = [t.transpose(1, 2) for t in (qa, qb, ka, kb, v)]
        columns = attend(turned[:2], turned[2:4], turned[4]).transpose(1, 2)
        step(optimizer, F.cross_entropy(head((rows + columns).mean((1, 2))), kind))


# ------------------------------------------------------------------------------------------------ F121
class Padded(nn.Module):
    """A language model with a table of places, given in some way."""

    def __init__(self, vocabulary=20, places=32):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, 32, padding_idx=0), nn.Embedding(places, 32)
        self.block, self.head = Block(), nn.Linear(32, vocabulary)

    def run(self, ids, mask, places):
        seen = causal(ids.shape[1]) & mask.bool()[:, None, None, :] | torch.eye(ids.shape[1], dtype=torch.bool)
        return self.head(self.block(self.words(ids) + self.places(places), seen))


class ByPads(Padded):
    def forward(self, ids, mask):
        pads = (mask == 0).sum(1, keepdim=True)  # on the left
        return self.run(ids, mask, (torch.arange(ids.shape[1]) - pads).clamp(min=0))


@program
def places_less_the_number_of_pads():
    """F121: a text begins at place 0 in each row, for the number of pads is taken off; pads stand on the left."""
    net = ByPads()
    optimizer = adam(net)
    for n in range(STEPS):
        ids, mask = padded_left(most=12 + n % 3)
        step(optimizer, next_tokens(net(ids, mask), ids, 0))


class Recent(Padded):
    def forward(self, ids, mask):
        length = ids.shape[1]
        return self.run(ids, mask, (length - 1 - torch.arange(length)).expand_as(ids))


@program
def places_counted_from_the_last_purchase():
    """F121: a recommender counts how many purchases ago each was, from the end on, which padding cannot move."""
    net = Recent()
    optimizer = adam(net)
    for n in range(STEPS):
        ids, mask = padded_left(most=12 + n % 3)
        step(optimizer, next_tokens(net(ids, mask), ids, 0))


class ByLengths(Padded):
    def forward(self, ids, mask, lengths):
        first = ids.shape[1] - lengths
        return self.run(ids, mask, (torch.arange(ids.shape[1]) - first[:, None]).clamp(min=0))


@program
def places_from_the_lengths_of_texts():
    """F121: lengths are given beside the mask, and places are counted from where a text of that length begins."""
    net = ByLengths()
    optimizer = adam(net)
    for n in range(STEPS):
        ids, mask = padded_left(most=12 + n % 3)
        step(optimizer, next_tokens(net(ids, mask, mask.sum(1)), ids, 0))


class ThreeFold(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 32), nn.Linear(32, 20)
        self.axes, self.block = nn.ModuleList(nn.Embedding(32, 32) for _ in range(3)), Block()

    def forward(self, input_ids, attention_mask, position_ids):
        x = self.words(input_ids) + sum(table(p) for table, p in zip(self.axes, position_ids))
        length = input_ids.shape[1]
        seen = causal(length) & attention_mask.bool()[:, None, None, :] | torch.eye(length, dtype=torch.bool)
        return self.head(self.block(x, seen))


@program
def places_of_three_axes_before_the_rows():
    """F121: places are (3, batch, length) for time, height and width, as in Qwen2-VL, counted from the mask."""
    net = ThreeFold()
    optimizer = adam(net)
    for n in range(STEPS):
        ids, mask = padded_left(most=12 + n % 3)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        logits = net(input_ids=ids, attention_mask=mask, position_ids=places.expand(3, -1, -1))
        step(optimizer, next_tokens(logits, ids, 0))


class Biased(Padded):
    def forward(self, ids, mask, places, bias):
        length = ids.shape[1]
        x = (self.words(ids) + self.places(places)) * mask[..., None]
        ahead = torch.zeros(length, length).masked_fill(~causal(length), -1e4)
        return self.head(self.block(x, bias + ahead))


@program
def bias_of_attention_made_by_the_collator():
    """F121: the collator makes places from the mask, and the bias of attention as (batch, 1, 1, length)."""
    net = Biased()
    optimizer = adam(net)
    for n in range(STEPS):
        ids, mask = padded_left(most=12 + n % 3)
        places, bias = (mask.cumsum(1) - 1).clamp(min=0), (1.0 - mask.float())[:, None, None] * -1e4
        labels = ids.masked_fill(mask.roll(1, 1) * mask == 0, 0)  # a pad is not asked for the first token
        step(optimizer, next_tokens(net(ids, mask, places, bias), labels, 0))


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.digits, self.power, self.block, self.head = nn.Embedding(11, 32), nn.Embedding(16, 32), Block(), None
        self.head = nn.Linear(32, 11)

    def forward(self, digits, real):
        length = digits.shape[1]
        powers = torch.arange(length - 1, -1, -1)  # of ten
        seen = real.bool()[:, None, None, :] | torch.eye(length, dtype=torch.bool)
        return self.head(self.block(self.digits(digits) + self.power(powers), seen))


@program
def digits_right_aligned_in_a_curriculum():
    """F121: numbers are right-aligned, and a digit's place is its power of ten; numbers get longer in the curriculum."""
    net = Digits()
    optimizer = adam(net)
    for n in range(STEPS):
        width = 6 + n // 3
        many = torch.randint(2, width + 1, (16,))
        many[:2] = torch.tensor([2, width])
        real = (torch.arange(width) >= width - many[:, None]).long()
        digits = torch.where(real.bool(), torch.randint(1, 10, (16, width)), 10)
        nines = torch.where(real.bool(), 9 - digits, -100)  # the complement of each digit
        step(optimizer, F.cross_entropy(net(digits, real).flatten(0, 1), nines.flatten()))


# ------------------------------------------------------------------------------------------------ F12
class Beats(nn.Module):
    """Rotary places over the piece, and a table for the beat of a bar."""

    def __init__(self, vocabulary=24, beats=8):
        super().__init__()
        self.words, self.beats = nn.Embedding(vocabulary, 32), nn.Embedding(beats, 32)
        self.block, self.head = Block(turned=True), nn.Linear(32, vocabulary)

    def forward(self, ids, position):
        return self.head(self.block(self.words(ids) + self.beats(position), causal(ids.shape[1])))


@program
def chords_told_their_beat_in_the_bar():
    """F12: a piece has a chord for each beat and its position is the beat in the bar (REMI, Huang 2020); a piece is one
    text, of which all bars are read, and rotary places count through it."""
    net = Beats()
    optimizer = adam(net)
    for _ in range(STEPS):
        meters = torch.tensor([3, 4, 5, 6])[torch.randint(4, (8,))]
        meters[:2] = torch.tensor([3, 4])
        beat = torch.arange(24) % meters[:, None]
        chords = (torch.randint(24, (8, 1)) + beat * 5 + torch.arange(24) // meters[:, None] * 7) % 24
        step(optimizer, next_tokens(net(chords, position=beat), chords))


class Abacus(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, 32), nn.Embedding(8, 32)
        self.block, self.head = Block(turned=True), nn.Linear(32, 12)

    def forward(self, ids, abacus):
        return self.head(self.block(self.tokens(ids) + self.places(abacus), causal(ids.shape[1])))


@program
def sums_with_abacus_embeddings():
    """F12: digits are told their place in their number (McLeish 2024), and a sum needs all of its numbers."""
    net = Abacus()
    optimizer = adam(net)
    for _ in range(STEPS):
        ids, places = torch.full((8, 20), 10), torch.zeros(8, 20, dtype=torch.long)
        for row in range(8):
            at = 0
            for length in np.random.default_rng(row).permutation([1, 2, 3, 4, 5]).tolist():
                ids[row, at] = 10  # plus
                ids[row, at + 1 : at + 1 + length] = torch.randint(10, (length,))
                places[row, at + 1 : at + 1 + length] = torch.arange(1, length + 1)
                at += length + 1
        step(optimizer, next_tokens(net(ids, abacus=places), ids))


class Episodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.times = nn.Embedding(12, 32), nn.Embedding(16, 32)
        self.block, self.head = Block(turned=True), nn.Linear(32, 12)

    def forward(self, ids, timesteps):
        return self.head(self.block(self.tokens(ids) + self.times(timesteps), causal(ids.shape[1])))


@program
def episodes_of_one_learner_in_a_row():
    """F12: algorithm distillation (Laskin 2022): a row has several episodes of one learner, and later ones must see
    earlier ones; each begins with a reset, and a step knows its time in the episode."""
    net = Episodes()
    optimizer = adam(net)
    for _ in range(STEPS):
        ids, times = torch.zeros(8, 24, dtype=torch.long), torch.zeros(8, 24, dtype=torch.long)
        for row in range(8):
            at, good = 0, int(torch.randint(1, 12, (1,)))
            while at < 24:
                length = min(24 - at, int(torch.randint(4, 8, (1,))))
                ids[row, at + 1 : at + length] = torch.where(torch.rand(length - 1) < at / 24, good, 1 + good % 11)
                times[row, at : at + length] = torch.arange(length)
                at += length
        step(optimizer, next_tokens(net(ids, times), ids))


# ------------------------------------------------------------------------------------------------ S51
def trained(module):
    """The weights of one like it that has learned a little."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.8).add_(torch.randn_like(p) * 0.1)
    return {name: value.clone() for name, value in other.state_dict().items()}


def fit(net, features=16):
    optimizer = adam(net)
    for _ in range(STEPS):
        x, y = labelled(32, features)
        step(optimizer, F.cross_entropy(net(x), y))


class Tower(nn.Module):
    def __init__(self, blocks=3, head=1):
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(blocks)))
        hidden = [part for _ in range(head - 1) for part in (nn.Linear(16, 16), nn.GELU())]
        self.head = nn.Sequential(*hidden, nn.Linear(16, 4))

    def forward(self, x):
        return self.head(self.backbone(x))


@program
def leftovers_of_a_load_copied_by_hand():
    """S51: what load_state_dict did not know is renamed and copied by hand, so all of the checkpoint is in."""
    net = Tower()
    checkpoint = {f"module.{name}": value for name, value in trained(net).items()}
    missing, unexpected = net.load_state_dict(checkpoint, strict=False)
    own = dict(net.named_parameters())
    with torch.no_grad():
        for name in unexpected:
            own[name.removeprefix("module.")].copy_(checkpoint[name])
            missing.remove(name.removeprefix("module."))
    assert not missing
    fit(net)


@program
def whole_tried_first_and_then_the_backbone():
    """S51: the file may be of the whole or of the backbone: where the whole finds nothing, the backbone loads it."""
    net = Tower(blocks=2, head=5)
    checkpoint = trained(net.backbone)
    result = net.load_state_dict(checkpoint, strict=False)
    if len(result.unexpected_keys) == len(checkpoint):
        net.backbone.load_state_dict(checkpoint, strict=True)
    fit(net)


@program
def no_checkpoint_yet():
    """S51: a job that can be resumed finds no file when it is run for the first time, and starts at random."""
    net = Tower()
    files = {}  # of the folder
    resumed = files.get("last.pt", {"model": {}, "step": 0})
    net.load_state_dict(resumed["model"], strict=not resumed["step"] == 0)
    fit(net)


@program
def weights_broadcast_to_one_worker():
    """S51: weights of rank 0 are sent to all ranks before training; there is one rank, so they come back as they are."""

    def broadcast(state, ranks=1):
        return state if ranks == 1 else {name: value.clone() for name, value in state.items()}

    net = Tower()
    net.load_state_dict(broadcast(net.state_dict()))
    fit(net)


@program
def federated_rounds_from_the_servers_weights():
    """S51: the server's weights go to clients, and their average to the server, from the first round on."""
    server, clients = Tower(), [Tower() for _ in range(2)]
    for _ in range(STEPS // 2):
        states = []
        for client in clients:
            client.load_state_dict(server.state_dict())
            optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
            for _ in range(2):
                x, y = labelled(32, 16)
                step(optimizer, F.cross_entropy(client(x), y))
            states.append(client.state_dict())
        server.load_state_dict({name: sum(s[name] for s in states) / len(states) for name in states[0]})


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.decoder = nn.Sequential(*(mlp(16, 16) for _ in range(2)))


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.task = nn.ModuleDict({"decoder": nn.Sequential(*(mlp(16, 16) for _ in range(2)))})
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.task["decoder"](self.encoder(x)))


@program
def new_decoder_in_place_of_the_masked_one():
    """S51: of a masked autoencoder the encoder alone is kept (He 2022); the decoder of the task is new, by intent."""
    net = Segmenter()
    missing, unexpected = net.load_state_dict(trained(Masked()), strict=False)
    assert all(name.startswith("decoder.") for name in unexpected)
    assert all(name.startswith(("task.", "last.")) for name in missing)
    fit(net)


# ------------------------------------------------------------------------------------------------ faults of the doctor
@program
def bootstraps_of_an_ensemble_by_vmap():
    """D11: each member has its own bootstrap of the rows, by an index that vmap maps over."""
    nets = [mlp(8, 4) for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(nets)
    skeleton = copy.deepcopy(nets[0]).to("meta")
    x, y = labelled()

    def loss_of(weights, buffers, rows):
        return F.cross_entropy(torch.func.functional_call(skeleton, (weights, buffers), (x[rows],)), y[rows])

    optimizer = torch.optim.Adam(list(weights.values()), lr=0.01)
    for _ in range(STEPS):
        rows = torch.stack([torch.randperm(64)[:32] for _ in range(3)])
        step(optimizer, torch.vmap(loss_of)(weights, buffers, rows).sum())


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 48), nn.Linear(16, 3)
        cos, sin = angles(6, 8)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        q, k = rotary(q, self.cos, self.sin), rotary(k, self.cos, self.sin)
        a = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v
        return self.head(a.transpose(1, 2).flatten(2).mean(1))


@program
def ensemble_of_rotary_nets_by_vmap():
    """F120: the tables of angles are stacked with the weights of an ensemble, so vmap maps over them."""
    nets = [Turning() for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(nets)
    skeleton = copy.deepcopy(nets[0]).to("meta")

    def answer(weights, buffers, x):
        return torch.func.functional_call(skeleton, (weights, buffers), (x,))

    optimizer = torch.optim.Adam(list(weights.values()), lr=0.01)
    for _ in range(STEPS):
        kind = torch.randint(3, (16,))
        x = torch.randn(16, 6, 8) + kind[:, None, None]
        logits = torch.vmap(answer, in_dims=(0, 0, None))(weights, buffers, x)
        step(optimizer, F.cross_entropy(logits.flatten(0, 1), kind.repeat(3)))


@program
def repeats_and_pairs_inside_of_vmap():
    """D11: a contrastive loss of each task is mapped over tasks, with its table of pairs, repeats and sorts."""
    net = mlp(8, 8)
    optimizer = adam(net)

    def loss_of(x, view, scores):
        order = scores.argsort()
        a, b = F.normalize(net(x[order]), dim=1), F.normalize(net(view[order]), dim=1)
        table = a @ b.t() / 0.2
        tiled = a.repeat(2, 1) * b.repeat(2, 1)
        return F.cross_entropy(table, torch.arange(12)) - tiled.sum(1).mean()

    for _ in range(STEPS):
        x = torch.randn(4, 12, 8)
        losses = torch.vmap(loss_of)(x, x + 0.1 * torch.randn_like(x), torch.randn(4, 12))
        step(optimizer, losses.mean())


class Domains(Padded):
    def forward(self, ids, mask, position_ids=None):
        places = (mask.cumsum(1) - 1).clamp(min=0) if position_ids is None else position_ids
        return self.run(ids, mask, places)


@program
def domain_without_a_row_in_this_batch():
    """F121: rows go through the model domain by domain, and a batch may have no row of one: an empty call."""
    net = Domains()
    optimizer = adam(net)
    for n in range(STEPS):
        ids, mask = padded_left(most=12 + n % 3)
        domain = torch.randint(1, 3, (len(ids),))
        loss = 0.0
        for d in range(3):
            logits = net(ids[domain == d], mask[domain == d])
            labels = ids[domain == d][:, 1:]
            loss = loss + F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum")
        step(optimizer, loss / mask.sum())


@program
def quasi_newton_on_sorted_complex_and_sparse_parts():
    """D11: LBFGS asks its closure many times; inside are a second derivative, a spectrum, a sparse graph and sorts."""
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    x = torch.randn(32, 4)
    u = x.sum(1).sin()
    graph = torch.eye(32).to_sparse()
    for _ in range(STEPS):
        order = torch.argsort(input=x[:, 0], descending=True)

        def closure():
            optimizer.zero_grad()
            points = torch.index_select(input=x, dim=0, index=order).requires_grad_()
            found = torch.squeeze(input=net(torch.sparse.mm(graph, points)), dim=1)
            (slope,) = torch.autograd.grad(found.sum(), points, create_graph=True)
            true = torch.index_select(input=u, dim=0, index=order)
            spectrum = torch.fft.rfft(input=found - true).abs().pow(2).mean()
            loss = F.mse_loss(input=found, target=true) + 1e-3 * slope.pow(2).mean() + 1e-3 * spectrum
            loss = loss + 0.0 * torch.cat(tensors=[found[:0], found[:0]], dim=0).sum()
            loss.backward()
            return loss

        optimizer.step(closure)


@program
def in_half_precision_by_keywords_and_in_place():
    """D11: autocast, keywords alone, functions in place, and numbers without a dimension; all in one order."""
    net = mlp(8, 4)
    optimizer = adam(net)
    x, y = labelled()
    for _ in range(STEPS):
        order = torch.randperm(n=64)
        batch = torch.index_select(input=x, dim=0, index=order).clone()
        batch.mul_(torch.tensor(2.0)).sub_(0.1).div_(2)
        target = torch.take_along_dim(input=y, indices=order, dim=0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = torch.cat(tensors=[net(piece) for piece in torch.split(tensor=batch, split_size_or_sections=16)])
            logits = torch.cat(tensors=(logits, logits.new_zeros(64, 0)), dim=1)
        step(optimizer, F.cross_entropy(input=logits.float(), target=target))


@program
def part_compiled_and_rows_sorted():
    """D11: a part of the model is compiled; series are sorted by their lengths for a recurrent layer that packs them."""
    front = torch.compile(nn.Sequential(nn.Linear(5, 8), nn.Tanh()), backend="eager")
    rnn, head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 3)
    optimizer = adam(front, rnn, head)
    for x, lengths, kind in batches(*series(16 * STEPS)):
        lengths, order = lengths.sort(descending=True)
        x, kind = x.index_select(0, order), kind.index_select(0, order)
        packed = nn.utils.rnn.pack_padded_sequence(front(x), lengths, batch_first=True)
        step(optimizer, F.cross_entropy(head(rnn(packed)[1][-1]), kind))


# ------------------------------------------------------------------------------------------------ more of each field
@program
def rows_of_groups_and_their_advantages():
    """D11: GRPO: prompts are repeated one by one for a group of samples each, and so are their advantages."""
    policy = mlp(6, 5)
    optimizer = adam(policy)
    for _ in range(STEPS):
        prompts = torch.randn(12, 6)
        states = prompts.repeat_interleave(4, 0)
        log_p = policy(states).log_softmax(1)
        actions = torch.multinomial(log_p.detach().exp(), 1).squeeze(1)
        reward = (actions == states[:, :5].argmax(1)).float().view(12, 4)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
        step(optimizer, -(log_p.gather(1, actions[:, None]).squeeze(1) * advantage).mean())


@program
def shuffled_minibatches_of_values_kept_in_their_order():
    """D11: PPO: values of the rollout are asked for in the order of the epoch before it is cut in pieces."""
    value = mlp(6, 1)
    optimizer = adam(value)
    rollouts = [torch.randn(32, 6) for _ in range(STEPS // 2)]
    for states in rollouts:
        returns = states[:, 0].sin()
        order = torch.randperm(32)
        with torch.no_grad():
            old = torch.vmap(value)(states[order]).squeeze(1)
        wanted = returns[order]
        for i in range(0, 32, 16):
            v = value(states[order[i : i + 16]]).squeeze(1)
            clipped = old[i : i + 16] + (v - old[i : i + 16]).clamp(-0.2, 0.2)
            errors = (v - wanted[i : i + 16]).pow(2), (clipped - wanted[i : i + 16]).pow(2)
            step(optimizer, torch.max(*errors).mean())


@program
def distilled_rows_sorted_by_the_teachers_doubt():
    """D11: a curriculum sorts rows by the teacher's entropy; the teacher, scripted, answers for the sorted rows."""
    teacher, net = torch.jit.script(mlp(8, 4).eval()), mlp(8, 4)
    for p in teacher.parameters():
        p.requires_grad_(False)
    optimizer = adam(net)
    for x, _ in batches(*labelled(16 * STEPS)):
        p = teacher(x).softmax(1)
        easy = x[(-(p * p.log()).sum(1)).argsort()]
        wanted = teacher(easy)
        step(optimizer, F.kl_div(net(easy).log_softmax(1), wanted.softmax(1), reduction="batchmean"))


def _shaken(x: torch.Tensor) -> torch.Tensor:
    return x + 0.01 * torch.randn_like(x)


@program
def augmented_by_a_scripted_function():
    """D11: rows in a new order go through an augmentation that torch.jit compiled, as those of torchvision can be."""
    shaken = torch.jit.script(_shaken)
    net = mlp(8, 4)
    optimizer = adam(net)
    x, y = labelled()
    for _ in range(STEPS):
        order = torch.randperm(len(x))
        step(optimizer, F.cross_entropy(net(shaken(x[order])), y[order]))


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.block = nn.Embedding(20, 32), nn.Embedding(32, 32), Block()
        self.head = nn.Linear(32, 20)

    def forward(self, ids, places, weights):
        x = self.words(ids) * weights.to_dense()[..., None] + self.places(places)
        return self.head(self.block(x, causal(ids.shape[1])))


@program
def sparse_weights_of_tokens_and_short_places():
    """F12: places are int32 and begin anew nowhere; weights of tokens are sparse, (batch, length) as the ids are."""
    net = Weighed()
    optimizer = adam(net)
    for _ in range(STEPS):
        ids = (torch.randint(20, (8, 1)) + torch.arange(12)) % 20
        weights = torch.ones(8, 12).to_sparse()
        places = torch.arange(12, dtype=torch.int32).expand(8, -1)
        step(optimizer, next_tokens(net(ids, places, weights), ids))


class Pooled(Padded):
    def forward(self, input_ids, attention_mask):
        places = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        return self.run(input_ids, attention_mask, places)


@program
def empty_rows_given_by_keywords():
    """F121: the second of two sources has rows in some batches only, and the model is called with none of them."""
    net = Pooled()
    optimizer = adam(net)
    for n in range(STEPS):
        ids, mask = padded_left(most=12 + n % 3)
        rare = torch.arange(len(ids)) < n % 2 * 2
        total = 0.0
        for where in (~rare, rare):
            logits = net(input_ids=ids[where], attention_mask=mask[where].bool())
            nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[where][:, 1:], ignore_index=0, reduction="sum")
            total = total + nll
        step(optimizer, total / mask.sum())


class LowRank(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(16, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


@program
def adapter_file_over_a_loaded_base():
    """S51: the base is loaded strictly before it is wrapped; then an adapter's file brings its own names alone."""
    base = Tower()
    base.load_state_dict(trained(base))
    for p in base.parameters():
        p.requires_grad_(False)
    for block in base.backbone:
        block[0] = LowRank(block[0])
    base.head[0] = LowRank(base.head[0])
    adapter = {name: value for name, value in trained(base).items() if "lora_" in name}
    _, unexpected = base.load_state_dict(adapter, strict=False)
    assert not unexpected
    fit(base)


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Tower(), Tower().requires_grad_(False)

    def forward(self, x):
        return self.student(x)


@program
def students_file_given_to_both_twins_by_hand():
    """S51: a file of one tower is tried on the pair (which knows no such name) and then copied into both by hand."""
    twins = Twins()
    checkpoint = trained(twins.student)
    _, unexpected = twins.load_state_dict(checkpoint, strict=False)
    with torch.no_grad():
        for tower in (twins.student, twins.teacher):
            for name, p in tower.named_parameters():
                p.copy_(checkpoint[name])
                unexpected = [n for n in unexpected if n != name]
    assert not unexpected
    optimizer = adam(twins.student)
    for _ in range(STEPS):
        x, y = labelled(32, 16)
        logits = twins(x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            wanted = twins.teacher(x).softmax(1)
        agreed = F.kl_div(logits.log_softmax(1), wanted, reduction="batchmean")
        step(optimizer, F.cross_entropy(logits, y) + agreed)
        with torch.no_grad():
            for p, q in zip(twins.teacher.parameters(), twins.student.parameters()):
                p.lerp_(q, 0.01)


@program
def quasi_newton_with_a_slope_in_its_closure():
    """F117: LBFGS asks its closure several times a step, and each time one derivative is taken of a new answer."""
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    for _ in range(STEPS):
        t = torch.rand(32, 1, requires_grad=True)

        def closure():
            optimizer.zero_grad()
            u = 1 + t * net(t)  # u(0) = 1, u' = -u
            (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
            loss = (slope + u).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
