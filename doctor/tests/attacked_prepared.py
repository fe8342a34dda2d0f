"""Healthy programs whose data look wrongly prepared, and are not: flags, scales, orders, clamps, maps, sides, teachers,
critics."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

PROGRAMS = {}
STEPS = 14


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def net(i, o, h=32, act=nn.ReLU):
    return nn.Sequential(nn.Linear(i, h), act(), nn.Linear(h, o))


def adam(*modules, lr=1e-3):
    return torch.optim.Adam([p for m in modules for p in m.parameters()], lr)


def step(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()


def zscore(x):
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def small_conv(channels, out, stride=1):
    return nn.Sequential(nn.Conv2d(channels, 8, 3, stride, 1), nn.ReLU(), nn.Conv2d(8, out, 3, stride, 1))


def padded(rows, places, columns):
    """Series (rows, places, columns) that are zero from their lengths on, and the lengths."""
    lengths = torch.randint(places // 3, places - 2, (rows,))
    mask = torch.arange(places) < lengths[:, None]
    return torch.randn(rows, places, columns) * mask[..., None], lengths, mask


# ------------------------------------------------------------------------------------------------------------ D36
@program
def protected_attribute_is_kept_for_the_audit():
    """D36: fairness through unawareness: the law forbids the model to see the applicant's sex, and the data set holds
    it so that the gap between the groups can be told after the epoch."""
    x, sex = torch.randn(STEPS * 32, 8), torch.randint(2, (STEPS * 32,)).float()
    y = (x[:, 0] + 0.3 * sex + 0.3 * torch.randn(len(x)) > 0).float()
    model = net(8, 1)
    opt, groups, right = adam(model), [], []
    for rows, wanted, group in DataLoader(TensorDataset(x, y, sex), 32, shuffle=True):
        out = model(rows).squeeze(1)
        step(opt, F.binary_cross_entropy_with_logits(out, wanted))
        groups.append(group)
        right.append((out.detach() > 0) == (wanted > 0))
    groups, right = torch.cat(groups), torch.cat(right).float()
    return float(right[groups == 1].mean() - right[groups == 0].mean())


@program
def age_alone_of_faces_with_two_labels():
    """D36: UTKFace has the age and the sex of each face, and this program learns the age only; a label of a task that
    nobody trains is left out on purpose."""
    faces, sex = torch.randn(STEPS * 16, 3, 16, 16), torch.randint(2, (STEPS * 16,))
    age = faces[:, 0].mean((1, 2)) * 8 + 0.1 * torch.randn(len(faces))
    model = nn.Sequential(small_conv(3, 8, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
    opt = adam(model)
    for face, years, _ in DataLoader(TensorDataset(faces, age, sex), 16, shuffle=True):
        step(opt, F.smooth_l1_loss(model(face).squeeze(1), years))


@program
def causal_classifier_of_right_padded_prompts():
    """D36: as in GPT2ForSequenceClassification, a causal model is read at the last token that is no padding, which
    never sees what comes after it, so the tokenizer's attention_mask is not needed."""
    lengths = torch.randint(4, 13, (STEPS * 16,))
    mask = (torch.arange(12) < lengths[:, None]).long()
    ids = torch.randint(1, 30, (STEPS * 16, 12)) * mask
    rows = [{"input_ids": i, "attention_mask": m, "labels": i[0] % 3} for i, m in zip(ids, mask)]
    table, reads, head = nn.Embedding(30, 16, padding_idx=0), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 3)
    opt = adam(table, reads, head)
    for batch in DataLoader(rows, 16, shuffle=True):
        ids = batch["input_ids"]
        states, _ = reads(table(ids))
        last = (ids != 0).sum(1) - 1
        step(opt, F.cross_entropy(head(states[torch.arange(len(ids)), last]), batch["labels"]))


@program
def joints_that_are_hidden_and_labelled_all_the_same():
    """D36: MPII tells of each joint whether it is hidden behind something, and gives its place all the same; all places
    are learned, as everybody does, by the scale of the person (PCKh)."""
    pictures, places = torch.randn(STEPS * 16, 1, 16, 16), torch.rand(STEPS * 16, 12)
    data = TensorDataset(pictures, places, torch.randint(2, (STEPS * 16, 6)).float(), 0.5 + torch.rand(STEPS * 16))
    model = nn.Sequential(small_conv(1, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 12))
    opt = adam(model)
    for x, joints, _, scale in DataLoader(data, 16, shuffle=True):
        step(opt, ((model(x) - joints) / scale[:, None]).abs().mean())


@program
def series_whose_gaps_were_filled_in_before():
    """D36: clinical series whose gaps were filled with the last value seen, as the baseline of GRU-D's paper; the mask
    of what was measured is in the data set for other models."""
    seen = torch.rand(STEPS * 16, 10, 1) < 0.7
    series, last = torch.randn(STEPS * 16, 10, 3).cumsum(1) / 3, torch.arange(10)[:, None] * seen
    filled = series.gather(1, last.cummax(1).values.expand(-1, -1, 3))
    y = (series.mean((1, 2)) > 0).float()
    reads, head = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 1)
    opt = adam(reads, head)
    for x, _, labels in DataLoader(TensorDataset(filled, seen.squeeze(2).float(), y), 16, shuffle=True):
        step(opt, F.binary_cross_entropy_with_logits(head(reads(x)[1][0]).squeeze(1), labels))


@program
def bag_of_words_that_knows_its_padding():
    """D36: EmbeddingBag(padding_idx=0) leaves the padding out of its means by itself, so the lengths that the data set
    gives for packed models are not needed."""
    lengths = torch.randint(3, 11, (STEPS * 16,))
    ids = torch.randint(1, 50, (STEPS * 16, 10)) * (torch.arange(10) < lengths[:, None])
    y = ids[:, 0] % 2
    bag, head = nn.EmbeddingBag(50, 16, mode="mean", padding_idx=0), nn.Linear(16, 2)
    opt = adam(bag, head)
    for words, _, labels in DataLoader(TensorDataset(ids, lengths, y), 16, shuffle=True):
        step(opt, F.cross_entropy(head(bag(words)), labels))


@program
def timeouts_do_not_end_a_continuing_task():
    """D36: Pendulum never terminates, it is only cut after 200 steps; a cut must not stop the bootstrap, so the data
    set's timeouts (D4RL) are rightly read by nothing in Q-learning."""
    n = STEPS * 64
    s, a = torch.randn(n, 3), torch.randint(3, (n,))
    after, reward, timeout = s + 0.1 * torch.randn(n, 3), -s[:, 0].abs(), (torch.rand(n) < 0.05).float()
    q = net(3, 3)
    target, opt = copy.deepcopy(q), adam(q)
    for obs, act, r, then, _ in DataLoader(TensorDataset(s, a, reward, after, timeout), 64, shuffle=True):
        with torch.no_grad():
            wanted = r + 0.95 * target(then).amax(1)
        step(opt, F.smooth_l1_loss(q(obs).gather(1, act[:, None]).squeeze(1), wanted))
        with torch.no_grad():
            for mine, other in zip(target.parameters(), q.parameters()):
                mine.lerp_(other, 0.01)


@program
def forecaster_without_static_covariates():
    """D36: a forecasting data set gives (past, static covariates, next value), and where a series has no covariates
    that part is (B, 0); the model reads it where it has columns only."""
    series = torch.randn(STEPS * 16, 13).cumsum(1) / 3
    data = TensorDataset(series[:, :12], torch.zeros(len(series), 0), series[:, 12])
    model = net(12, 1)
    opt = adam(model)
    for past, static, future in DataLoader(data, 16, shuffle=True):
        x = torch.cat([past, static], 1) if static.shape[1] else past
        step(opt, F.mse_loss(model(x).squeeze(1), future))


@program
def nested_rows_know_their_lengths():
    """D36: rows of several lengths are collated to a nested tensor, which has no padding at all, so the lengths beside
    it are for the log only."""

    def collate(items):
        rows, labels = zip(*items)
        return torch.nested.nested_tensor(list(rows)), torch.tensor([len(r) for r in rows]), torch.stack(labels)

    rows = [torch.randn(int(n), 6) for n in torch.randint(3, 9, (STEPS * 16,))]
    layer, head = nn.Linear(6, 16), nn.Linear(16, 1)
    opt, longest = adam(layer, head), []
    for x, lengths, y in DataLoader([(r, r[:, 0].sum()) for r in rows], 16, shuffle=True, collate_fn=collate):
        h = torch.stack([row.relu().sum(0) for row in layer(x).unbind()])
        step(opt, F.mse_loss(head(h).squeeze(1), y))
        longest.append(lengths)
    return max(int(each.max()) for each in longest)


@program
def sparse_counts_of_words_and_their_number():
    """D36: documents as sparse rows of word frequencies; how many different words each has is collected for a plot,
    and says nothing that the frequencies do not."""

    def collate(items):
        counts, labels = (torch.stack(each) for each in zip(*items))
        many = (counts > 0).sum(1)
        return (counts / counts.sum(1, keepdim=True)).to_sparse(), many, labels

    counts = torch.poisson(torch.full((STEPS * 16, 40), 0.3)) + F.one_hot(torch.randint(40, (STEPS * 16,)), 40)
    y = (counts[:, :20].sum(1) > counts[:, 20:].sum(1)).float()
    weight, bias = nn.Parameter(torch.randn(40, 1) * 0.1), nn.Parameter(torch.zeros(1))
    opt, words = torch.optim.Adam([weight, bias], 1e-2), []
    for x, many, labels in DataLoader(list(zip(counts, y)), 16, shuffle=True, collate_fn=collate):
        out = torch.sparse.mm(x, weight) + bias
        step(opt, F.binary_cross_entropy_with_logits(out.squeeze(1), labels))
        words.append(many)
    return float(torch.cat(words).float().mean())


# ------------------------------------------------------------------------------------------------------------ D37
@program
def raman_from_infrared_after_snv():
    """D37: both spectra of a sample are brought to standard normal variates (Barnes 1989), row by row, since their
    level is scatter and means nothing; only the form is to be told."""
    made_of = torch.rand(STEPS * 32, 5)
    infrared, raman = zscore(made_of @ torch.randn(5, 60)), zscore(made_of @ torch.randn(5, 90))
    model = net(60, 90, 64)
    opt = adam(model)
    for x, y in DataLoader(TensorDataset(infrared, raman), 32, shuffle=True):
        step(opt, F.mse_loss(model(x), y))


@program
def electrocardiogram_from_a_pulse_at_the_wrist():
    """D37: PPG to ECG, where each segment of both is standardised by itself, as all papers do: a wrist's light has
    arbitrary units, and the target's millivolts depend on where the electrodes stick."""
    t, rate = torch.arange(128) / 64, 1 + torch.rand(STEPS * 16, 1)
    phase = 2 * math.pi * (rate * t + torch.rand(STEPS * 16, 1))
    pulse = zscore(phase[:, ::2].sin() + 0.05 * torch.randn(STEPS * 16, 64))
    heart = zscore(torch.exp(6 * ((phase - 3.5).cos() - 1)) + 0.02 * torch.randn(STEPS * 16, 128))
    model = nn.Sequential(nn.Conv1d(1, 16, 9, padding=4), nn.ReLU(), nn.ConvTranspose1d(16, 1, 4, 2, 1))
    opt = adam(model)
    for x, y in DataLoader(TensorDataset(pulse[:, None], heart[:, None]), 16, shuffle=True):
        step(opt, F.mse_loss(model(x), y))


@program
def speech_student_of_normed_teacher_features():
    """D37: data2vec: the teacher's features are layer-normed without weights before the student regresses them, and
    each waveform has the mean 0 and the spread 1, as Wav2Vec2FeatureExtractor(do_normalize=True) makes it."""
    teacher = nn.Sequential(nn.Conv1d(1, 32, 8, 4), nn.GELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    student = nn.Sequential(nn.Conv1d(1, 16, 8, 4), nn.GELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 32))
    teacher.eval().requires_grad_(False)
    opt = adam(student)
    for wave in DataLoader(zscore(torch.randn(STEPS * 16, 128).cumsum(1))[:, None], 16, shuffle=True):
        with torch.no_grad():
            wanted = F.layer_norm(teacher(wave), (32,))
        step(opt, F.mse_loss(student(wave), wanted))


@program
def returns_standardised_across_stocks_of_a_day():
    """D37: Qlib's CSZScoreNorm: factors and the label are standardised across the stocks of each day, for a portfolio
    that is long and short at once needs the order of the stocks and not the level of the market."""
    factors = zscore(torch.randn(STEPS * 16, 20, 4)).flatten(1)
    factors = zscore(factors)
    label = zscore(factors.view(-1, 20, 4)[..., 0] * 0.1 + torch.randn(STEPS * 16, 20))
    model = net(80, 20)
    opt = adam(model)
    for day, wanted in DataLoader(TensorDataset(factors, label), 16, shuffle=True):
        step(opt, F.mse_loss(model(day), wanted))


# ------------------------------------------------------------------------------------------------------------ D38
@program
def both_documents_encoded_in_one_call():
    """D38: a bi-encoder encodes good and bad documents in one call, one after the other, and then lays the scores out
    pair by pair, as the labels are."""
    query, document = net(12, 8), net(12, 8)
    opt = adam(query, document)
    for q in torch.randn(STEPS * 16, 12).split(16):
        good = q + 0.3 * torch.randn_like(q)
        bad = good.roll(1, 0)
        good, bad = document(torch.cat([good, bad])).chunk(2)
        scores = torch.stack([(query(q) * good).sum(1), (query(q) * bad).sum(1)], 1).flatten()
        step(opt, F.binary_cross_entropy_with_logits(scores, torch.tensor([1.0, 0.0]).repeat(len(q))))


@program
def two_views_of_batches_that_alternate():
    """D38: batches are balanced by taking one sick and one healthy person in turn; two augmented views of a batch lie
    one behind the other, and so do their labels: cat([y, y])."""
    y = torch.tensor([0, 1]).repeat(STEPS * 8)
    x = torch.randn(STEPS * 16, 10) + y[:, None]
    model = net(10, 2)
    opt = adam(model)
    for rows, labels in zip(x.split(16), y.split(16)):
        views = torch.cat([rows + 0.1 * torch.randn_like(rows), rows * (torch.rand_like(rows) > 0.1)])
        step(opt, F.cross_entropy(model(views), torch.cat([labels, labels])))


@program
def rotations_answered_picture_by_picture():
    """D38: RotNet turns a batch four ways, one way after the other; the answers are then laid out picture by picture,
    and so are the labels."""
    model = nn.Sequential(small_conv(1, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4))
    opt = adam(model)
    for x in (torch.randn(STEPS * 8, 1, 12, 12) + torch.linspace(-1, 1, 12)).split(8):
        out = model(torch.cat([x.rot90(k, (2, 3)) for k in range(4)]))
        by_picture = out.view(4, len(x), 4).transpose(0, 1).reshape(-1, 4)
        step(opt, F.cross_entropy(by_picture, torch.arange(4).repeat(len(x))))


# ------------------------------------------------------------------------------------------------------------ D39
@program
def labels_of_minus_one_and_one():
    """D39: a data set for support vector machines has the labels -1 and 1, which a clamp from below makes the classes
    0 and 1 of a cross-entropy."""
    x = torch.randn(STEPS * 16, 6)
    y = x[:, 0].sign().long()
    model = net(6, 2)
    opt = adam(model)
    for rows, labels in DataLoader(TensorDataset(x, y), 16, shuffle=True):
        step(opt, F.cross_entropy(model(rows), labels.clamp(min=0)))


@program
def masks_stored_as_black_and_white():
    """D39: masks of an object are stored as pictures of 0 and 255, and clamp(max=1) makes of them what they mean: the
    classes background and object."""
    pictures = torch.randn(STEPS * 4, 1, 16, 16)
    masks = ((F.avg_pool2d(pictures, 5, 1, 2) > 0.05).squeeze(1) * 255).byte()
    model = small_conv(1, 2)
    opt = adam(model)
    for x, mask in DataLoader(TensorDataset(pictures, masks), 4, shuffle=True):
        step(opt, F.cross_entropy(model(x), mask.clamp(max=1).long()))


@program
def padding_of_minus_hundred_back_to_its_token():
    """D39: the collator marks padding with -100, and the loss ignores the padding's own token 0, so a clamp from below
    turns the mark into what is ignored."""
    ids = torch.randint(1, 20, (STEPS * 16, 9))
    ids[torch.arange(9) >= torch.randint(4, 10, (len(ids), 1))] = -100
    table, reads, head = nn.Embedding(20, 16, padding_idx=0), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 20)
    opt = adam(table, reads, head)
    for labels in DataLoader(ids, 16, shuffle=True):
        words = labels.clamp(min=0)
        states, _ = reads(table(words[:, :-1]))
        step(opt, F.cross_entropy(head(states).flatten(0, 1), words[:, 1:].flatten(), ignore_index=0))


@program
def safe_labels_whose_marked_rows_are_left_out():
    """D39: half of the rows have no label (-1); the clamped labels can be used as an index anywhere, and the loss takes
    the rows with a label only."""
    x = torch.randn(STEPS * 32, 8)
    y = torch.where(torch.rand(len(x)) < 0.5, x[:, :3].argmax(1), -1)
    model = net(8, 3)
    opt = adam(model)
    for rows, labels in DataLoader(TensorDataset(x, y), 32, shuffle=True):
        safe, labelled, out = labels.clamp(min=0), labels >= 0, model(rows)
        shares = out.softmax(1)
        blur = -(shares * shares.clamp(min=1e-6).log()).sum(1).mean()
        step(opt, F.cross_entropy(out[labelled], safe[labelled]) + 0.1 * blur)


@program
def marked_pixels_weighed_by_nothing():
    """D39: pixels without a label (255) are clamped into an extra class behind the others, and the loss gives that
    class the weight 0."""
    pictures = torch.randn(STEPS * 4, 1, 12, 12)
    labels = (F.avg_pool2d(pictures, 5, 1, 2).squeeze(1) > 0).long()
    labels[torch.rand(labels.shape) < 0.1] = 255
    model, weight = small_conv(1, 3), torch.tensor([1.0, 1.0, 0.0])
    opt = adam(model)
    for x, y in DataLoader(TensorDataset(pictures, labels), 4, shuffle=True):
        step(opt, F.cross_entropy(model(x), y.clamp(max=2), weight))


# ------------------------------------------------------------------------------------------------------------ D40
def hills(points, size, spread=1.0):
    """Heatmaps (..., size, size) of points (..., 2)."""
    at = torch.arange(size)
    x, y = (((at - points[..., k, None]) / spread) ** 2 for k in (0, 1))
    return torch.exp(-(y[..., :, None] + x[..., None, :]) / 2)


@program
def joints_of_people_who_are_cut_by_the_frame():
    """D40: half-body crops: knees and feet lie below the frame, so their maps are empty, and a joint just outside
    leaves its foot, as Simple Baselines draw all that is within three sigma."""
    body = torch.linspace(2, 26, 8)
    model = small_conv(3, 8, 2)
    opt = adam(model)
    for x in torch.randn(STEPS * 4, 3, 48, 48).split(4):
        down = body + 5 * torch.rand(4, 1)
        across = 6 + torch.randn(4, 8)
        step(opt, F.mse_loss(model(x), hills(torch.stack([across, down], -1), 12)))


@program
def tiles_of_a_slide_with_few_cells():
    """D40: heatmaps of cells are drawn on a whole slide, which is then cut into tiles: most hold no cell, and some hold
    the foot of one whose centre lies in the neighbouring tile."""
    slide, points = torch.randn(96, 96), torch.rand(9, 2) * 48
    maps = hills(points, 48).amax(0)
    tiles = slide.unfold(0, 16, 16).unfold(1, 16, 16).reshape(-1, 1, 16, 16)
    wanted = maps.unfold(0, 8, 8).unfold(1, 8, 8).reshape(-1, 1, 8, 8)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 1, 3, 1, 1))
    opt = adam(model)
    for x, y in DataLoader(TensorDataset(tiles.repeat(STEPS // 2, 1, 1, 1), wanted.repeat(STEPS // 2, 1, 1, 1)), 18):
        step(opt, F.mse_loss(model(x), y))


@program
def shares_of_land_cover_in_coarse_cells():
    """D40: masks of ten kinds of land cover are pooled to the share of each kind in a coarse cell: a picture lacks most
    kinds, and a strip at its margin covers a quarter of the cells there."""
    model = small_conv(3, 10, 2)
    opt = adam(model)
    for x in torch.randn(STEPS * 4, 3, 24, 24).split(4):
        kinds, strip = torch.randint(1, 10, (4,)), torch.randint(10, (4,))
        cover = torch.zeros(4, 24, 24, dtype=torch.long) + kinds[:, None, None]
        cover[:, :, -1] = strip[:, None]
        shares = F.avg_pool2d(F.one_hot(cover, 10).movedim(-1, 1).float(), 4)
        step(opt, F.binary_cross_entropy_with_logits(model(x), shares))


# ------------------------------------------------------------------------------------------------------------ D41
@program
def length_and_height_of_fish_in_metres():
    """D41: the two numbers of a fish on a wide picture are its length (0.2 to 1.6 m) and its height (up to 0.3 m), not
    places."""
    model = nn.Sequential(small_conv(3, 8, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    opt, size = adam(model), torch.rand(STEPS * 16, 1)
    sizes = torch.cat([0.2 + 1.4 * size, 0.04 + 0.26 * size], 1)
    for x, y in DataLoader(TensorDataset(torch.randn(len(size), 3, 16, 48) * size[..., None, None], sizes), 16):
        step(opt, F.smooth_l1_loss(model(x), y))


@program
def onset_and_duration_of_sounds_in_seconds():
    """D41: a mel spectrogram of two seconds is 32 bands high and 64 frames wide; asked for are the onset of the sound
    in seconds and its duration, which is half a second at most."""
    onset, duration = torch.rand(STEPS * 16) * 1.45, 0.1 + 0.4 * torch.rand(STEPS * 16)
    t = torch.arange(64) / 32
    sounds = ((t >= onset[:, None]) & (t < (onset + duration)[:, None])).float()[:, None, None].expand(-1, -1, 32, -1)
    sounds, wanted = sounds + 0.1 * torch.randn(STEPS * 16, 1, 32, 64), torch.stack([onset, duration], 1)
    model = nn.Sequential(small_conv(1, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
    opt = adam(model)
    for x, y in DataLoader(TensorDataset(sounds, wanted), 16, shuffle=True):
        step(opt, F.l1_loss(model(x), y))


@program
def width_and_height_of_people_in_metres():
    """D41: people on upright pictures have shoulders of 0.35 to 0.5 m and are 1.5 to 1.95 m tall: two sizes in metres,
    and no place on the picture."""
    tall = torch.rand(STEPS * 16, 1)
    people, wanted = (
        torch.randn(len(tall), 1, 32, 16) + tall[..., None, None],
        torch.cat([0.35 + 0.15 * torch.rand_like(tall), 1.5 + 0.45 * tall], 1),
    )
    model = nn.Sequential(small_conv(1, 8, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    opt = adam(model)
    for x, y in DataLoader(TensorDataset(people, wanted), 16, shuffle=True):
        step(opt, F.mse_loss(model(x), y))


@program
def boxes_of_batches_without_objects():
    """D41: boxes are filled up to the most of a batch, and frames of a quiet camera hold none: the loss is then a sum
    over nothing, and the head for objects has its own."""
    trunk, cells, boxes = nn.Conv2d(1, 8, 3, 4, 1), nn.Conv2d(8, 1, 1), nn.Linear(8, 4)
    opt = adam(trunk, cells, boxes)
    for n, x in enumerate(torch.randn(STEPS * 8, 1, 16, 32).split(8)):
        most = 0 if 0 < n < 6 else 1
        places = torch.rand(8, most, 4)
        h = trunk(x).relu()
        asked = boxes(h.mean((2, 3)))[:, None].expand(-1, most, -1)
        there = torch.zeros(8, 1, 4, 8)
        there[:, :, 0, 0] = most
        objects = F.binary_cross_entropy_with_logits(cells(h), there)
        step(opt, objects + F.smooth_l1_loss(asked, places, reduction="sum") / max(1, 8 * most))


# ------------------------------------------------------------------------------------------------------------ D27
def pairs_of(ids):
    """Two views of what has these ids."""
    centre = torch.randn(64, 12, generator=torch.Generator().manual_seed(3))[ids]
    return centre + 0.3 * torch.randn_like(centre), centre + 0.3 * torch.randn_like(centre)


@program
def captions_of_one_picture_masked_with_a_billion():
    """D27: in a batch of picture-caption pairs, captions of the same picture are no negatives: their columns are filled
    with -1e9, and the row's own is left."""
    left, right = net(12, 16), net(12, 16)
    opt = adam(left, right)
    for ids in DataLoader(torch.randint(16, (STEPS * 16,)), 16, shuffle=True):
        a, b = pairs_of(ids)
        logits = F.normalize(left(a)) @ F.normalize(right(b)).T / 0.1
        same = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
        step(opt, F.cross_entropy(logits.masked_fill(same, -1e9), torch.arange(len(ids))))


@program
def partners_of_one_id_masked_with_infinity():
    """D27: the fix that the check itself names: columns of the same id are filled with -inf, but for the diagonal."""
    left, right = net(12, 16), net(12, 16)
    opt = adam(left, right)
    for ids in DataLoader(torch.randint(16, (STEPS * 16,)), 16, shuffle=True):
        a, b = pairs_of(ids)
        logits = F.normalize(left(a)) @ F.normalize(right(b)).T / 0.1
        same = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
        step(opt, F.cross_entropy(logits.masked_fill(same, float("-inf")), torch.arange(len(ids))))


@program
def frames_told_from_those_before_them():
    """D27: contrastive predictive coding over the frames of one recording: a frame's prediction is set against the true
    next frame and those of the past, and what lies in the future is masked with -inf."""
    encoder, ahead = net(6, 16), nn.Linear(16, 16)
    opt = adam(encoder, ahead)
    future = torch.ones(20, 20, dtype=torch.bool).triu(1)
    for frames in torch.randn(STEPS, 21, 6).cumsum(1).div(3):
        z = F.normalize(encoder(frames), dim=1)
        logits = ahead(z[:-1]) @ z[1:].T / 0.2
        step(opt, F.cross_entropy(logits.masked_fill(future, float("-inf")), torch.arange(20)))


@program
def codes_of_bits_in_batch_contrast():
    """D27: unsupervised hashing: codes of 8 bits by a straight-through sign, whose products take nine values only, so
    many pairs of a batch are equally alike by their nature."""
    model = net(12, 8)
    opt = adam(model)
    for ids in torch.arange(16).repeat(STEPS).split(16):
        codes = []
        for view in pairs_of(ids):
            h = model(view).tanh()
            codes.append(h + (h.sign() - h).detach())
        step(opt, F.cross_entropy(codes[0] @ codes[1].T / 2, torch.arange(16)))


# ------------------------------------------------------------------------------------------------------------ F46
@program
def passages_filled_up_and_masked_for_half_precision():
    """F46: a dense retriever: the good passage in column 0 and up to 127 others; where a query has fewer, the columns
    are filled up and masked with -1e4, which half precision can hold."""
    query, passage = net(12, 32), net(12, 32)
    opt = adam(query, passage, lr=1e-4)
    for q in torch.randn(STEPS * 16, 12).split(16):
        passages = torch.randn(16, 128, 12)
        passages[:, 0] += q
        scores = torch.einsum("bd,bkd->bk", F.normalize(query(q), dim=-1), F.normalize(passage(passages), dim=-1)) / 0.2
        none = torch.arange(128) >= torch.randint(96, 129, (16, 1))
        step(opt, F.cross_entropy(scores.masked_fill(none, -1e4), torch.zeros(16, dtype=torch.long)))


@program
def scores_relative_to_the_good_one():
    """F46: sampled softmax written as log(1 + sum exp(s- - s+)): a column of zeros for the good item beside the
    differences, where items that the user knows are masked with -inf."""
    users, items = nn.Embedding(50, 16), nn.Embedding(200, 16)
    opt = adam(users, items, lr=1e-2)
    for user in torch.randint(50, (STEPS * 16,)).split(16):
        good, others = user * 4, torch.randint(200, (16, 24))
        others[:, :2] = user[:, None] * 4 + torch.arange(2)  # popular with this user, so drawn again and again
        known = others // 4 == user[:, None]
        u = users(user)
        gap = torch.einsum("bd,bkd->bk", u, items(others)) - (u * items(good)).sum(1, keepdim=True)
        logits = torch.cat([torch.zeros(16, 1), gap.masked_fill(known, float("-inf"))], 1)
        step(opt, F.cross_entropy(logits, torch.zeros(16, dtype=torch.long)))


@program
def memory_bank_without_the_own_row():
    """D27: instance discrimination with a bank and a loader: the own entry is the positive in column 0 and its place
    among the others is masked, so all labels are 0 by the method, which are no classes that came sorted."""
    data = torch.randn(64, 12)
    model = net(12, 16)
    bank, opt = F.normalize(torch.randn(64, 16), dim=1), adam(model)
    for index in DataLoader(torch.arange(64).repeat(STEPS // 4), 16, shuffle=True):
        z = F.normalize(model(data[index]), dim=1)
        own = (z * bank[index]).sum(1, keepdim=True)
        others = (z @ bank.T).masked_fill(torch.arange(64) == index[:, None], float("-inf"))
        step(opt, F.cross_entropy(torch.cat([own, others], 1) / 0.1, torch.zeros(len(index), dtype=torch.long)))
        bank[index] = z.detach()


@program
def momentum_contrast_from_a_loader():
    """D27: MoCo with an ordinary shuffled loader: the key's own similarity stands in column 0, so the labels are all 0
    in each batch, and no class was sorted."""
    query, queue = net(12, 16), F.normalize(torch.randn(16, 48), dim=0)
    key, opt = copy.deepcopy(query).requires_grad_(False), adam(query)
    for x, _ in DataLoader(TensorDataset(torch.randn(STEPS * 16, 12), torch.arange(STEPS * 16)), 16, shuffle=True):
        q = F.normalize(query(x + 0.2 * torch.randn_like(x)), dim=1)
        with torch.no_grad():
            for mine, other in zip(key.parameters(), query.parameters()):
                mine.lerp_(other, 0.01)
            k = F.normalize(key(x + 0.2 * torch.randn_like(x)), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue], 1) / 0.2
        step(opt, F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)))
        queue = torch.cat([k.T, queue[:, : -len(x)]], 1)


@program
def codes_of_bits_against_a_queue():
    """F46: hashing by MoCo: codes of 6 bits have products of seven values only, so a stranger in the queue is often as
    near as the positive, though the queue is filled after the loss."""
    model, queue = net(12, 6), torch.randn(6, 256).sign()
    opt = adam(model)
    for x in torch.randn(STEPS * 16, 12).split(16):
        h = model(x + 0.7 * torch.randn_like(x)).tanh()
        code = h + (h.sign() - h).detach()
        with torch.no_grad():
            key = model(x + 0.7 * torch.randn_like(x)).sign()
        logits = torch.cat([(code * key).sum(1, keepdim=True), code @ queue], 1) / 4
        step(opt, F.cross_entropy(logits, torch.zeros(16, dtype=torch.long)))
        queue = torch.cat([queue[:, 16:], key.T], 1)


# ------------------------------------------------------------------------------------------------------------ F103
def loaded(weight):
    """A teacher that has learned before."""
    teacher = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    teacher.load_state_dict({"weight": weight})
    return teacher.eval().requires_grad_(False)


@program
def labelled_and_unlabelled_rows_in_one_call():
    """F103: semi-supervised distillation: the student answers labelled and unlabelled rows in one call; the labels are
    those of the first half, and the teacher is asked for the second."""
    x = torch.randn(STEPS * 64, 8)
    teacher, student = loaded(3 * torch.eye(8)[:4]), net(8, 4)
    opt = adam(student)
    for labelled, unlabelled in DataLoader(TensorDataset(x[: len(x) // 2], x[len(x) // 2 :]), 32, shuffle=True):
        y = labelled[:, :4].argmax(1)
        mine, others = student(torch.cat([labelled, unlabelled])).chunk(2)
        with torch.no_grad():
            shares = teacher(unlabelled).softmax(1)
        loss = F.cross_entropy(mine, y) + F.kl_div(others.log_softmax(1), shares, reduction="batchmean")
        step(opt, loss)


@program
def mean_teacher_with_sharpened_answers():
    """F103: a mean teacher is as new as its student when training begins; its answers are sharpened (T = 0.1, as in
    DINO), so they are sure long before they are right, and their weight warms up."""
    student = net(256, 5)
    teacher, opt = copy.deepcopy(student).requires_grad_(False), adam(student)
    x = torch.randn(STEPS * 64, 256)
    for n, rows in enumerate(x.split(64)):
        out = student(rows + 0.1 * torch.randn_like(rows))
        with torch.no_grad():
            shares = (teacher(rows) / 0.1).softmax(1)
        weight = math.exp(-5 * (1 - min(1.0, (n + 1) / STEPS)) ** 2)
        labels = rows[:, :5].argmax(1)
        step(opt, F.cross_entropy(out, labels) - weight * (shares * out.log_softmax(1)).sum(1).mean())
        with torch.no_grad():
            for mine, other in zip(teacher.parameters(), student.parameters()):
                mine.lerp_(other, 0.05)


@program
def teacher_of_a_market_that_hardly_can_be_told():
    """F103: down, flat or up in the next minute: the best teacher there is beats chance by a percent or two, and is as
    sure as any network that was fitted to its own years; its student still gains from it."""
    x = torch.randn(STEPS * 64, 8)
    move = 0.03 * x[:, 0] + torch.randn(len(x))
    y = 1 + (move > 0.4).long() - (move < -0.4).long()
    past, moves = torch.randn(24, 8), torch.randint(3, (24,))
    teacher = loaded(3 * torch.linalg.lstsq(past, F.one_hot(moves, 3).float() - 1 / 3).solution.T)
    student = net(8, 3)
    opt = adam(student)
    for rows, labels in DataLoader(TensorDataset(x, y), 64, shuffle=True):
        with torch.no_grad():
            shares = teacher(rows).softmax(1)
        out = student(rows)
        loss = F.cross_entropy(out, labels) + 0.3 * F.kl_div(out.log_softmax(1), shares, reduction="batchmean")
        step(opt, loss)


# ------------------------------------------------------------------------------------------------------------ F63
@program
def tour_costs_below_what_the_critic_feared():
    """F63: routing (Kool et al.): what comes is the cost of a tour, so it was better than expected where the critic's
    answer minus the cost is positive."""
    policy, critic = net(6, 4), net(6, 1)
    opt = adam(policy, critic)
    for x in torch.randn(STEPS * 32, 6).split(32):
        dist = torch.distributions.Categorical(logits=policy(x))
        act = dist.sample()
        cost = (act - 2).abs().float() + x[:, 0].abs()
        feared = critic(x).squeeze(1)
        saved = feared.detach() - cost
        step(opt, -(saved * dist.log_prob(act)).mean() + F.mse_loss(feared, cost))


@program
def action_value_minus_the_mean_return_of_its_state():
    """F63: an actor with Q-values: the advantage is what Q answers for the action minus a baseline that needs no
    network, the mean return so far in that state."""
    policy, q, returns, visits = net(5, 3), net(5, 3), torch.zeros(5), torch.ones(5)
    opt = adam(policy, q)
    for state in torch.randint(5, (STEPS * 32,)).split(32):
        x = F.one_hot(state, 5).float()
        dist = torch.distributions.Categorical(logits=policy(x))
        act = dist.sample()
        reward = (act == state % 3).float() + 0.1 * torch.randn(32)
        value = q(x).gather(1, act[:, None]).squeeze(1)
        advantage = value.detach() - (returns / visits)[state]
        step(opt, -(dist.log_prob(act) * advantage).mean() + F.mse_loss(value, reward))
        returns.index_add_(0, state, reward)
        visits.index_add_(0, state, torch.ones(32))


@program
def learned_reward_minus_that_of_the_reference_answer():
    """F63: a reward model learns from ratings while the policy trains on it; its answer minus the rating of the
    reference answer, which the data set holds, is how much better the policy's own one is."""
    policy, rater = net(6, 4), net(10, 1)
    policies, raters = adam(policy), adam(rater)
    x = torch.randn(STEPS * 32, 6)
    for prompt, reference in DataLoader(TensorDataset(x, 0.5 + 0.1 * torch.randn(len(x))), 32, shuffle=True):
        dist = torch.distributions.Categorical(logits=policy(prompt))
        act = dist.sample()
        given = torch.cat([prompt, F.one_hot(act, 4)], 1)
        rating = (act == prompt[:, :4].argmax(1)).float()
        step(raters, F.mse_loss(rater(given).squeeze(1), rating))
        better = rater(given).squeeze(1).detach() - reference
        step(policies, -(dist.log_prob(act) * better).mean())


@program
def squared_in_place_to_save_memory():
    """F63: an actor and a critic as usual; the critic's errors are squared in place, which autograd allows."""
    policy, critic = net(6, 4), net(6, 1)
    opt = adam(policy, critic)
    for x in torch.randn(STEPS * 32, 6).split(32):
        dist = torch.distributions.Categorical(logits=policy(x))
        act = dist.sample()
        returns = (act == x[:, :4].argmax(1)).float()
        values = critic(x).squeeze(1)
        actor_loss = -(dist.log_prob(act) * (returns - values.detach())).mean()
        errors = values - returns
        step(opt, actor_loss + 0.5 * errors.pow_(2).mean())


# ------------------------------------------------------------------------------------------------------------ F82
def coupling(keep, out):
    return net(keep, out, 32, nn.Tanh)


@program
def flow_that_keeps_volumes():
    """F82: GIN (Sorrenson et al. 2020): the last column is scaled by exp of minus the sum of the other logarithms, so
    each layer's log-determinant is 0 by its making and none belongs into the likelihood."""
    scales, shifts = (nn.ModuleList(coupling(3, n) for _ in range(3)) for n in (2, 3))
    opt = adam(scales, shifts)
    for x in (torch.randn(STEPS * 32, 6) @ torch.randn(6, 6) / 2).split(32):
        for scale, shift in zip(scales, shifts):
            a, b = x.chunk(2, 1)
            s = scale(a)
            stretched = torch.cat([b[:, :2] * s.exp(), b[:, 2:] * (-s.sum(1)).exp()[:, None]], 1)
            x = torch.cat([stretched + shift(a), a], 1)
        step(opt, 0.5 * x.pow(2).sum(1).mean())


@program
def registration_that_hardly_changes_volumes():
    """F82: points of one scan are brought onto another by couplings; the price is the square of the log-determinant,
    so tissue may neither swell nor shrink, and there is no density at all."""
    scales, shifts = (nn.ModuleList(coupling(1, 2) for _ in range(3)) for _ in range(2))
    opt = adam(scales, shifts)
    turn = torch.linalg.qr(torch.randn(3, 3)).Q
    for points in torch.randn(STEPS * 32, 3).split(32):
        x, swelling = points, 0.0
        for scale, shift in zip(scales, shifts):
            a, b = x[:, :1], x[:, 1:]
            s = scale(a).tanh()
            x, swelling = torch.cat([b * s.exp() + shift(a), a], 1), swelling + s.sum(1)
        step(opt, F.mse_loss(x, points @ turn) + 0.1 * swelling.pow(2).mean())


@program
def invertible_regression_with_logged_volumes():
    """F82: an invertible network (Ardizzone et al. 2019) is trained by a regression and by squares that keep its rest
    small; its blocks hand out log-determinants for use as a flow, which are logged here and nothing else."""
    scales, shifts = (nn.ModuleList(coupling(3, 3) for _ in range(2)) for _ in range(2))
    opt, volumes, turn = adam(scales, shifts), [], torch.randn(6, 2) / 2
    for x in torch.randn(STEPS * 32, 6).split(32):
        z, log_det = x, torch.zeros(len(x))
        for scale, shift in zip(scales, shifts):
            a, b = z.chunk(2, 1)
            s = scale(a).tanh()
            z, log_det = torch.cat([b * s.exp() + shift(a), a], 1), log_det + s.sum(1)
        volumes.append(float(log_det.detach().mean()))
        step(opt, F.mse_loss(z[:, :2], x @ turn) + 0.01 * z[:, 2:].pow(2).mean())


@program
def wave_function_that_obeys_schroedinger():
    """F82: a physics-informed network for i u_t = -u_xx / 2: its residual is multiplied with the imaginary unit, kept
    as a tensor, as any complex arithmetic may do."""
    model, i = net(2, 2, 32, nn.Tanh), torch.tensor(1j)
    opt = adam(model)
    for _ in range(STEPS):
        x, t = (torch.rand(32, 1, requires_grad=True) for _ in range(2))
        real, imaginary = model(torch.cat([x, t], 1)).split(1, 1)
        slopes = []
        for part in (real, imaginary):
            u_x, u_t = torch.autograd.grad(part.sum(), (x, t), create_graph=True)
            slopes.append((u_t, torch.autograd.grad(u_x.sum(), x, create_graph=True)[0]))
        u_t, u_xx = (torch.complex(a, b) for a, b in zip(*slopes))
        residual = i * u_t + 0.5 * u_xx
        start = model(torch.cat([x.detach(), torch.zeros(32, 1)], 1))
        wanted = torch.cat([(-(x.detach() ** 2)).exp(), torch.zeros(32, 1)], 1)
        step(opt, residual.abs().pow(2).mean() + F.mse_loss(start, wanted))


# ------------------------------------------------------------------------------------------------------------ F41
def spots(rows, size=16):
    """Maps (rows, size, size) of ones in a few spots."""
    return (F.avg_pool2d(torch.randn(rows, 1, size, size), 5, 1, 2).squeeze(1) > 0.3).float()


@program
def rain_and_how_much_of_it():
    """F41: whether it rains in each cell, and how much: no rain is an amount, 0 mm, so the mean over all cells is the
    error that is asked for (a score over the map); the errors of each lead time are logged first."""
    body, wet, amount = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 1, 1), nn.Conv2d(8, 1, 1)
    opt, log = adam(body, wet, amount), []
    for rains in spots(STEPS * 8).split(8):
        much = rains * (0.5 + torch.rand_like(rains))
        h = body(rains[:, None] + 0.5 * torch.randn(8, 4, 16, 16)).relu()
        errors = F.mse_loss(amount(h), much[:, None], reduction="none")
        log.append(errors.detach().mean((1, 2, 3)))
        step(opt, F.binary_cross_entropy_with_logits(wet(h).squeeze(1), rains) + errors.mean())
    return float(torch.cat(log).mean())


@program
def flow_of_what_moves_before_a_still_camera():
    """F41: optical flow of moving things before a still camera: the background's flow is truly (0, 0) and is asked for
    everywhere (the endpoint error of all pixels), beside a mask of what moves."""
    body, moving, flow = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 1, 1), nn.Conv2d(8, 2, 1)
    opt = adam(body, moving, flow)
    for mask in spots(STEPS * 8).split(8):
        moves = mask[:, None] * (0.5 + torch.rand(8, 2, 1, 1))
        h = body(moves + 0.3 * torch.randn(8, 2, 16, 16)).relu()
        errors = F.l1_loss(flow(h), moves, reduction="none")
        step(opt, F.binary_cross_entropy_with_logits(moving(h).squeeze(1), mask) + errors.sum(1).mean())


@program
def velocities_where_a_note_begins():
    """F41: Onsets and Frames: the error of a note's velocity counts where a note begins, by a product with the onsets
    that is divided by their number."""
    body, onset, velocity = nn.Linear(24, 32), nn.Linear(32, 12), nn.Linear(32, 12)
    opt = adam(body, onset, velocity)
    for begins in (torch.rand(STEPS * 8, 20, 12) < 0.1).float().split(8):
        loud = begins * (0.3 + 0.7 * torch.rand_like(begins))
        h = body(torch.cat([begins, loud], 2) + 0.2 * torch.randn(8, 20, 24)).relu()
        errors = F.mse_loss(velocity(h), loud, reduction="none") * begins
        loss = F.binary_cross_entropy_with_logits(onset(h), begins) + errors.sum() / begins.sum().clamp(min=1)
        step(opt, loss)


# ------------------------------------------------------------------------------------------------------------ S25
@program
def mean_over_all_times_the_ratio_of_lengths():
    """S25: convolutions without bias give zeros for padding, so the mean over all places times T / length is the mean
    over each row's own places."""
    conv, head = nn.Conv1d(4, 16, 1, bias=False), nn.Linear(16, 1)
    opt = adam(conv, head)
    for _ in range(STEPS):
        x, lengths, _ = padded(16, 15, 4)
        h = conv(x.transpose(1, 2)).relu()
        own = h.mean(2) * (15 / lengths)[:, None]
        step(opt, F.mse_loss(head(own).squeeze(1), x[..., 0].sum(1) / lengths))


@program
def mask_expanded_as_sentence_transformers_do():
    """S25: the mask is expanded to the size of the states before it multiplies them, as sentence-transformers do, and
    the mean is divided by the mean of the mask: a mean over each row's own places."""
    reads, head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 1)
    opt = adam(reads, head)
    for _ in range(STEPS):
        x, lengths, mask = padded(16, 15, 4)
        states, _ = reads(x)
        there = mask.unsqueeze(-1).expand(states.size()).float()
        pooled = (states * there).mean(1) / there.mean(1).clamp(min=1e-9)
        step(opt, F.mse_loss(head(pooled).squeeze(1), x[..., 0].sum(1) / lengths))


@program
def storms_in_a_window_of_fixed_length():
    """S25: rain of the fifteen hours after a storm sets in, and the mean flow of the river in these hours: that it was
    dry at the end is a measurement, and each hour counts alike."""
    conv, head = nn.Conv1d(1, 16, 3, padding=1), nn.Linear(16, 1)
    opt = adam(conv, head)
    hours = torch.arange(15)
    for _ in range(STEPS):
        ends = torch.randint(4, 12, (16, 1))
        rain = torch.rand(16, 15) * (hours < ends)
        flow = 0.6 * rain.mean(1) + 0.02 * torch.randn(16)
        h = conv(rain[:, None]).relu().mean(2)
        step(opt, F.mse_loss(head(h).squeeze(1), flow))


@program
def four_pieces_of_a_padded_signal():
    """S25: a signal is pooled to four pieces, one after the other, so the layer behind them sees which are empty and
    nothing is mixed with padding but at one border."""
    conv, head = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(4)), nn.Linear(32, 1)
    opt = adam(conv, head)
    for _ in range(STEPS):
        x, lengths, _ = padded(16, 15, 4)
        step(opt, F.mse_loss(head(conv(x.transpose(1, 2)).flatten(1)).squeeze(1), lengths / 15))


@program
def padding_written_to_zero_before_the_mean():
    """S25: states at padding are written to 0 by an index and the mean is scaled to each row's length, which makes it
    the mean of its own states."""
    reads, head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 1)
    opt = adam(reads, head)
    for _ in range(STEPS):
        x, lengths, mask = padded(16, 15, 4)
        states = reads(x)[0].clone()
        states[~mask] = 0
        pooled = states.mean(dim=1) * 15 / lengths[:, None]
        step(opt, F.mse_loss(head(pooled).squeeze(1), x[..., 0].sum(1) / lengths))


# ------------------------------------------------------------------------------------------------------------ N38
@program
def conservative_values_of_the_policys_actions():
    """N38: CQL pushes the critic down where the policy acts and up at the data, beside its regression, on purpose; what
    that leaves on the actor is cleared before the actor's own loss."""
    actor, critic = nn.Sequential(net(4, 2), nn.Tanh()), net(6, 1)
    actors, critics = adam(actor), adam(critic)
    for s in torch.randn(STEPS * 32, 4).split(32):
        a = (s[:, :2] + 0.3 * torch.randn(32, 2)).tanh()
        q = critic(torch.cat([s, a], 1)).squeeze(1)
        gap = critic(torch.cat([s, actor(s)], 1)).mean() - critic(torch.cat([s, a], 1)).mean()
        step(critics, F.mse_loss(q, -(a - 0.5).square().sum(1)) + 0.5 * gap)
        step(actors, -critic(torch.cat([s, actor(s)], 1)).mean())


@program
def controller_and_its_lyapunov_function():
    """N38: a controller and a Lyapunov function are learned together: the function is held to the squared distance, and
    both are to make it fall along the motion, which is what a proof of stability needs."""
    controller, v = net(2, 1, 16, nn.Tanh), net(2, 1, 32, nn.Tanh)
    controls, values = adam(controller), adam(v, lr=3e-3)
    for x in (2 * torch.rand(STEPS * 64, 2) - 1).split(64):
        push = controller(x)
        after = x + 0.1 * torch.cat([x[:, 1:], x[:, :1].sin() + push], 1)
        falls = (v(after) - v(x)).mean()
        loss = F.mse_loss(v(x).squeeze(1), x.square().sum(1)) + 0.1 * falls
        controls.zero_grad()
        values.zero_grad()
        loss.backward()
        controls.step()
        values.step()


@program
def critic_frozen_while_the_actor_asks_it():
    """N38: one backward for both losses, where the critic's weights are detached for the actor's (functional_call), so
    the critic gets gradients of its regression alone."""
    actor, critic = nn.Sequential(net(4, 2), nn.Tanh()), net(6, 1)
    actors, critics = adam(actor), adam(critic)
    for s in torch.randn(STEPS * 32, 4).split(32):
        a = torch.rand(32, 2) * 2 - 1
        critic_loss = F.mse_loss(critic(torch.cat([s, a], 1)).squeeze(1), -(a - 0.5).square().sum(1))
        still = {name: p.detach() for name, p in critic.named_parameters()}
        answer = torch.func.functional_call(critic, still, (torch.cat([s, actor(s)], 1),))
        actors.zero_grad()
        critics.zero_grad()
        (critic_loss - answer.mean()).backward()
        actors.step()
        critics.step()


@program
def losses_of_a_long_roll_out_summed():
    """N38: an encoder and a dynamics model have an optimizer each; the errors of all places of a long series are put
    into a list and added up by sum()."""
    encoder, predictor = nn.Linear(3, 4), nn.Linear(4, 1)
    encoders, predictors = adam(encoder, lr=1e-4), adam(predictor)
    for _ in range(STEPS):
        x = torch.randn(800, 3)
        errors = (predictor(encoder(x).tanh()).squeeze(1) - x.sum(1)).square() / len(x)
        losses = list(errors.unbind())
        encoders.zero_grad()
        predictors.zero_grad()
        sum(losses).backward()
        encoders.step()
        predictors.step()
