"""Healthy programs of language models and their kin, whose lines meet those of a fault."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import FNetConfig, FNetForSequenceClassification, GPT2Config, GPT2LMHeadModel
from transformers import T5Config, T5ForConditionalGeneration

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


def gpt(vocab=64, layers=1, width=32, places=40, **more):
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab,
            n_positions=places,
            n_embd=width,
            n_layer=layers,
            n_head=2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **more,
        )
    )


def texts(rows=8, length=20, vocab=64, low=4):
    """Right-padded ids with a rule in them (each token is the one before plus 1 to 3), and their mask."""
    first = torch.randint(low, vocab, (rows, 1))
    ids = (first + torch.randint(1, 4, (rows, length)).cumsum(1) - low) % (vocab - low) + low
    lengths = torch.randint(length // 3, length + 1, (rows,))
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    return ids * mask, mask


class Encoder(nn.Module):
    """Embeddings with places, a layer of attention, logits of each place."""

    def __init__(self, vocab, out, length, width=32, layers=1):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, width), nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 64, 0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(width, out)

    def forward(self, ids):
        return self.head(self.layers(self.words(ids) + self.places))


# ---------------------------------------------------------------------------------------------------------- F33
@program
def masked_model_with_a_learned_mask_vector():
    """F33: a masked model over the codes of a tokenizer of sounds (as data2vec, BEiT or wav2vec do it): codes are looked
    up first, and the vectors of masked places are then replaced by one learned vector. Nothing of what is asked for can
    be read behind the embedding."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes, self.places = nn.Embedding(64, 32), nn.Parameter(0.02 * torch.randn(24, 32))
            self.mask_vector = nn.Parameter(0.02 * torch.randn(32))
            self.layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
            self.head = nn.Linear(32, 64)

        def forward(self, codes, masked):
            h = torch.where(masked[..., None], self.mask_vector, self.codes(codes))
            return self.head(self.layer(h + self.places))

    model = Masked()
    opt = adam_of(model)
    for _ in range(STEPS):
        codes = (torch.randint(64, (16, 1)) + torch.randint(1, 3, (16, 24)).cumsum(1)) % 64
        masked = torch.rand(codes.shape) < 0.3
        step(opt, F.cross_entropy(model(codes, masked)[masked], codes[masked]))


@program
def masked_model_with_a_mask_vector_and_ignored_labels():
    """F33: the same with labels of -100 at the places that are seen, as the collators of transformers make them."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.items, self.places = nn.Embedding(64, 32), nn.Parameter(0.02 * torch.randn(24, 32))
            self.mask_vector = nn.Parameter(0.02 * torch.randn(32))
            self.layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
            self.head = nn.Linear(32, 64)

        def forward(self, items, masked):
            h = self.items(items).masked_fill(masked[..., None], 0.0) + masked[..., None] * self.mask_vector
            return self.head(self.layer(h + self.places))

    model = Masked()
    opt = adam_of(model)
    for _ in range(STEPS):
        items = (torch.randint(64, (16, 1)) + torch.randint(1, 3, (16, 24)).cumsum(1)) % 64
        masked = torch.rand(items.shape) < 0.2
        labels = items.masked_fill(~masked, -100)
        step(opt, F.cross_entropy(model(items, masked).flatten(0, 1), labels.flatten()))


@program
def latin_squares_are_filled_in():
    """F33: a transformer solves small sudokus: the clues go in, 0 stands for an empty cell, and the loss is taken over
    all cells of the solution, as recurrent solvers of sudoku are trained (the clues are to stand in the answer too)."""
    model = Encoder(5, 5, 16)
    opt = adam_of(model)
    base = torch.tensor([[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]])
    for _ in range(STEPS):
        names = torch.stack([torch.randperm(4) + 1 for _ in range(32)])
        names = torch.cat([torch.zeros(32, 1, dtype=torch.long), names], 1)
        solution = names.gather(1, base.flatten().expand(32, 16))
        clues = solution * (torch.rand(32, 16) < 0.7)
        step(opt, F.cross_entropy(model(clues).transpose(1, 2), solution))


@program
def genotypes_are_imputed():
    """F33: a denoising autoencoder imputes genotypes (0, 1, 2): a tenth of the sites is hidden as missing (3), and the
    loss is over all sites (as in SCDA), because what is measured goes through a narrow layer and must be rebuilt."""

    class Imputer(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 4)
            self.narrow = nn.Sequential(nn.Flatten(), nn.Linear(40 * 4, 16), nn.ReLU(), nn.Linear(16, 40 * 3))

        def forward(self, sites):
            return self.narrow(self.table(sites)).view(-1, 40, 3)

    model = Imputer()
    opt = adam_of(model)
    haplotypes = torch.randint(2, (6, 40))
    for _ in range(STEPS):
        sites = haplotypes[torch.randint(6, (32,))] + haplotypes[torch.randint(6, (32,))]
        shown = sites.masked_fill(torch.rand(sites.shape) < 0.1, 3)
        step(opt, F.cross_entropy(model(shown).transpose(1, 2), sites))


# ---------------------------------------------------------------------------------------------------------- F13
@program
def fourier_mixing_of_padded_texts():
    """F13: FNet mixes places by a Fourier transform and takes no mask: texts are always filled up to one length, in
    training and in use, as in the paper and in transformers."""
    config = FNetConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=64,
        num_labels=2,
        max_position_embeddings=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = FNetForSequenceClassification(config)
    opt = adam_of(model)
    for _ in range(STEPS):
        ids, mask = texts()
        step(opt, model(input_ids=ids, labels=(mask.sum(1) > 14).long()).loss)


@program
def masked_sum_of_texts_of_one_length():
    """F13: texts are always filled up to 20 tokens; masked states are summed and divided by 20, which is a sum with a
    constant factor. The mask hides the padding from it."""

    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer, self.head = nn.Embedding(64, 32, padding_idx=0), nn.Linear(32, 32), nn.Linear(32, 2)

        def forward(self, input_ids, attention_mask):
            h = torch.relu(self.layer(self.table(input_ids))) * attention_mask[..., None]
            return self.head(h.mean(1))

    model = Summed()
    opt = adam_of(model)
    for _ in range(STEPS):
        ids, mask = texts()
        step(opt, F.cross_entropy(model(input_ids=ids, attention_mask=mask), (ids[:, 0] > 30).long()))


@program
def convolutions_over_words_with_masked_maximum():
    """F13: a TextCNN (Kim 2014) whose maximum leaves out padding. Its windows at the end of a text see the vector 0 of
    padding_idx, and the second layer what the first one makes of it, as at any border."""

    class TextCNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(64, 32, padding_idx=0)
            self.one, self.two = nn.Conv1d(32, 32, 3, padding=1), nn.Conv1d(32, 32, 3, padding=1)
            self.head = nn.Linear(32, 2)

        def forward(self, input_ids, attention_mask):
            h = torch.relu(self.one(self.table(input_ids).transpose(1, 2)))
            h = self.two(h).masked_fill(attention_mask[:, None] == 0, -1e9)
            return self.head(h.max(2).values)

    model = TextCNN()
    opt = adam_of(model)
    for _ in range(STEPS):
        ids, mask = texts()
        step(opt, F.cross_entropy(model(input_ids=ids, attention_mask=mask), (ids[:, 0] > 30).long()))


# ---------------------------------------------------------------------------------------------------------- F15
def seq2seq():
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return T5ForConditionalGeneration(config)


@program
def labels_make_the_decoder_inputs_alone():
    """F15: labels are given to T5 so that it shifts them for its decoder; the loss is the program's own, with label
    smoothing and ignore_index = pad, as in fairseq and the older examples of transformers."""
    model = seq2seq()
    opt = adam_of(model)
    for _ in range(STEPS):
        ids, mask = texts()
        labels, _ = texts(length=12)
        logits = model(input_ids=ids, attention_mask=mask, labels=labels).logits
        loss = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=0, label_smoothing=0.1)
        step(opt, loss)


class Tagger(nn.Module):
    def __init__(self, vocab=64, out=64, width=32):
        super().__init__()
        self.table, self.head = nn.Embedding(vocab, width), nn.Linear(width, out)
        self.layer = nn.TransformerEncoderLayer(width, 2, 64, 0.0, batch_first=True)

    def forward(self, input_ids, attention_mask):
        h = self.layer(self.table(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.head(h)


@program
def label_smoothing_of_the_annotated_transformer():
    """F15: LabelSmoothing of The Annotated Transformer: nn.KLDivLoss(reduction="sum") against smoothed targets whose
    rows are all 0 at padding, so padding gives nothing; the sum is divided by the number of words."""
    model, criterion = Tagger(), nn.KLDivLoss(reduction="sum")
    opt = adam_of(model)
    for _ in range(STEPS):
        ids, mask = texts()
        target = ((ids + 5) % 64).masked_fill(mask == 0, 0)
        log_p = model(input_ids=ids, attention_mask=mask).log_softmax(-1).view(-1, 64)
        true = torch.full_like(log_p, 0.1 / 62).scatter(1, target.view(-1, 1), 0.9)
        true[:, 0] = 0
        true[mask.view(-1) == 0] = 0
        step(opt, criterion(log_p, true) / mask.sum())


@program
def teacher_probabilities_are_zero_at_padding():
    """F15: distillation of a tagger: the teacher's probabilities are multiplied with the mask, so kl_div is 0 where
    there is padding, and its sum is divided by the number of real tokens."""
    teacher, student = Tagger(out=9), Tagger(out=9, width=16)
    teacher.requires_grad_(False).eval()
    opt = adam_of(student)
    for _ in range(STEPS):
        ids, mask = texts()
        with torch.no_grad():
            p = teacher(input_ids=ids, attention_mask=mask).softmax(-1) * mask[..., None]
        log_q = student(input_ids=ids, attention_mask=mask).log_softmax(-1)
        step(opt, F.kl_div(log_q, p, reduction="sum") / mask.sum())


# --------------------------------------------------------------------------------------------------------- F127
@program
def language_token_after_the_source():
    """F127: a decoder-only model translates: source, <to>, the token of the language that is wanted, translation. The
    language is chosen by who asks and never generated, so the first target is the first word after it."""
    model = gpt(vocab=80)
    opt = adam_of(model)
    for _ in range(STEPS):
        source, _ = texts(8, 8)
        language = torch.randint(70, 76, (8, 1))
        translation = (source + language - 60) % 60 + 4
        ids = torch.cat([source.clamp(min=4), torch.full((8, 1), 79), language, translation], 1)
        labels = ids.clone()
        labels[:, :10] = -100
        step(opt, model(input_ids=ids, labels=labels).loss)


# ---------------------------------------------------------------------------------------------------------- D46
@program
def dpo_with_the_reference_turned_round():
    """D46: DPO whose reference margin is written as rejected less chosen and therefore added:
    (pi_c - pi_r) + (ref_r - ref_c) is (pi_c - pi_r) - (ref_c - ref_r)."""
    model = gpt()
    reference, opt = copy.deepcopy(model).requires_grad_(False).eval(), adam_of(model)

    def score(m, ids):
        return m(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(-1).sum(-1)

    for _ in range(STEPS):
        chosen, rejected = (torch.randint(4, 64, (8, 12)) for _ in range(2))
        chosen[:, 6:] = rejected[:, 6:] - rejected[:, 6:] % 2
        with torch.no_grad():
            ref_margin = score(reference, rejected) - score(reference, chosen)
        margin = score(model, chosen) - score(model, rejected)
        step(opt, -F.logsigmoid(0.1 * (margin + ref_margin)).mean())


@program
def product_of_experts_against_a_bias():
    """D46: "Don't take the easy way out" (Clark 2019): the log-odds of a frozen model that knows the bias alone are
    added to the model's own in training, so that the model learns what the bias does not explain."""
    bias, model = net(2, 2), net(6, 2)
    bias.requires_grad_(False)
    opt = adam_of(model)
    for _ in range(STEPS):
        x, y = torch.randn(32, 6), torch.randint(2, (32,)).float()
        x[:, 0] += 2 * y
        own = model(x).log_softmax(1)
        with torch.no_grad():
            easy = bias(x[:, :2]).log_softmax(1)
        odds = (own[:, 1] - own[:, 0]) + (easy[:, 1] - easy[:, 0])
        step(opt, F.binary_cross_entropy_with_logits(odds, y))


@program
def margin_mse_of_a_ranker():
    """D46: Margin-MSE (Hofstätter 2020): a student's margin between a relevant and another passage is to be the frozen
    teacher's. Both score by the log-probability of "relevant" (as monoT5 does), and the student knows nothing yet."""
    teacher, student = net(96, 2, h=64), net(96, 2, h=64)
    with torch.no_grad():
        teacher[2].weight *= 5
    teacher.requires_grad_(False)
    opt = adam_of(student, lr=1e-4)
    for _ in range(STEPS):
        pos, neg = (torch.randn(64, 96) for _ in range(2))
        with torch.no_grad():
            wanted = teacher(pos).log_softmax(1)[:, 1] - teacher(neg).log_softmax(1)[:, 1]
        margin = student(pos).log_softmax(1)[:, 1] - student(neg).log_softmax(1)[:, 1]
        step(opt, (margin - wanted).pow(2).mean())


# ---------------------------------------------------------------------------------------------------------- S25
@program
def nowcast_with_a_ragged_edge():
    """S25: the newest values of a series come late, for a varying number of steps: they are 0 with a flag "missing", and
    the state of the last step (today) is asked for. The last place is where the forecast belongs."""

    class Nowcast(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.places = nn.Linear(4, 32), nn.Parameter(0.02 * torch.randn(24, 32))
            self.layer, self.head = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), nn.Linear(32, 1)

        def forward(self, x):
            return self.head(self.layer(self.first(x) + self.places)[:, -1])

    model = Nowcast()
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(32, 24, 3).cumsum(1) / 5
        y = x[:, -1].mean(1, keepdim=True)
        late = torch.randint(0, 8, (32, 1))
        there = (torch.arange(24) < 24 - late)[..., None].float()
        step(opt, F.mse_loss(model(torch.cat([x * there, 1 - there], -1)), y))


@program
def cue_is_remembered_over_a_delay():
    """S25: the delay task of working memory: a cue of varying length, then nothing until the trial ends, when the answer
    is read. Causal convolutions must carry the cue over the silence; the last place is when the animal answers."""

    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
            self.layers = nn.ModuleList([nn.Conv1d(32, 32, 3, dilation=2**k) for k in range(4)])

        def forward(self, x):
            h = self.first(x)
            for k, conv in enumerate(self.layers):
                h = h + torch.relu(conv(F.pad(h.transpose(1, 2), (2 * 2**k, 0)))).transpose(1, 2)
            return self.head(h[:, -1])

    model = Memory()
    opt = adam_of(model)
    for _ in range(STEPS):
        y, ends = torch.randint(4, (32,)), torch.randint(6, 20, (32, 1))
        cue = F.one_hot(y, 8).float()[:, None] + 0.3 * torch.randn(32, 24, 8)
        step(opt, F.cross_entropy(model(cue * (torch.arange(24) < ends)[..., None]), y))


# --------------------------------------------------------------------------------------------------------- F120
class Rotary(nn.Module):
    """Attention with rotary positions; `after` is what is done to queries and keys behind the turning."""

    def __init__(self, after, width=32, heads=2, vocab=64):
        super().__init__()
        self.table, self.qkv, self.head = (
            nn.Embedding(vocab, width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, vocab),
        )
        self.heads, self.after = heads, after
        self.heat = nn.Parameter(torch.zeros(heads, 1, 1))

    def forward(self, ids):
        b, t = ids.shape
        h = self.table(ids)
        q, k, v = self.qkv(h).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        d = q.shape[-1]
        angle = torch.arange(t)[:, None] * 1000 ** (-torch.arange(0, d, 2) / d)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)

        def turn(x):
            one, two = x.chunk(2, -1)
            return x * cos + torch.cat([-two, one], -1) * sin

        q, k = self.after(self, turn(q), turn(k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(h + out.transpose(1, 2).reshape(b, t, -1))


def next_words(model):
    opt = adam_of(model)
    for _ in range(STEPS):
        ids = (torch.randint(64, (8, 1)) + torch.randint(1, 4, (8, 20)).cumsum(1)) % 64
        step(opt, F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:]))


@program
def queries_grow_with_the_logarithm_of_their_place():
    """F120: log-n scaling (Su; Qwen): behind the rotary turning, queries are multiplied with the logarithm of the number
    of places they see. Both sides are turned."""

    def after(model, q, k):
        places = torch.arange(1, q.shape[2] + 1).float()
        return q * (places.log() / math.log(8)).clamp(min=1)[:, None], k

    next_words(Rotary(after))


@program
def keys_of_the_cache_in_eight_bits():
    """F120: LLM-QAT (Liu 2023): keys and values are what a cache will hold in 8 bits, so they are fake-quantized in
    training, behind the rotary turning; queries are not. Both sides are turned."""

    def after(model, q, k):
        scale = float(k.detach().abs().max()) / 127
        return q, torch.fake_quantize_per_tensor_affine(k, scale, 0, -128, 127)

    next_words(Rotary(after))


# ---------------------------------------------------------------------------------------------------------- F62
@program
def marginal_entropy_over_augmentations():
    """F62: test-time prompt tuning (TPT, Shu 2022; MEMO, Zhang 2021): many augmentations of one picture, of which the
    surest tenth is kept, and the entropy of their mean prediction is made small. These shares are classes."""
    model = net(16, 5)
    opt = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(STEPS):
        views = torch.randn(1, 16) + 0.3 * torch.randn(64, 16)
        probs = model(views).softmax(1)
        sure = probs.max(1).values.topk(8).indices
        mean = probs[sure].mean(0)
        step(opt, -(mean * mean.log()).sum())


@program
def soft_votes_by_mean_absolute_error():
    """F62: multiple-instance learning: a bag's probabilities are the mean of its instances', and the loss is 1 less that
    of the right class (the mean absolute error, robust against wrong labels, Ghosh 2017). The votes are logged."""
    model, log = net(8, 4), []
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.randint(4, (16,))
        bags = torch.randn(16, 6, 8)
        bags[..., :4] += 2 * F.one_hot(y, 4)[:, None]
        probs = model(bags).softmax(-1)
        votes = probs.argmax(-1).mode(1).values
        right = (probs.mean(1) * F.one_hot(y, 4).float()).sum(1)
        step(opt, 1 - right.mean())
        log.append((votes == y).float().mean().item())


# ----------------------------------------------------------------------------------------------------------- B7
@program
def nearest_images_in_a_tilted_box():
    """B7: a potential of atoms in a triclinic box: distances go to the nearest image, d - round(d / box) box, as a
    product of matrices, and forces are gradients with respect to the places. The rounding is constant nearly everywhere
    and rightly has no slope."""
    model, box = net(1, 1), torch.tensor([[4.0, 0, 0], [1.0, 4.0, 0], [0.5, 0.7, 4.0]])
    inverse, opt = torch.linalg.inv(box), adam_of(model)
    for _ in range(STEPS):
        x = (torch.rand(8, 3) @ box).requires_grad_()
        d = x[:, None] - x[None]
        d = d - torch.round(d @ inverse) @ box
        r = (d.pow(2).sum(-1) + torch.eye(8)).sqrt()
        pair = (1 - torch.eye(8)) / 2
        energy = (model(r[..., None]).squeeze(-1) * pair).sum()
        force = -torch.autograd.grad(energy, x, create_graph=True)[0]
        wanted = torch.autograd.grad(((-r).exp() * pair).sum(), x, retain_graph=True)[0]
        error = (energy - ((-r).exp() * pair).sum()) / 8
        step(opt, error.pow(2) + (force + wanted).pow(2).mean())


# ----------------------------------------------------------------------------------------------------------- N3
class Binarized(nn.Linear):
    """BinarizeLinear of BinaryNet.pytorch (Hubara): the weight holds its signs in the forward, and `org` the numbers."""

    def forward(self, x):
        if not hasattr(self.weight, "org"):
            self.weight.org = self.weight.data.clone()
        self.weight.data = self.weight.org.sign()
        return F.linear(x, self.weight, self.bias)


@program
def binarized_networks_of_hubara():
    """N3: BinaryNet.pytorch: in the forward the weight is its sign; before the step the full numbers are put back, the
    optimizer moves these, and they are kept in `org`. No small step is lost."""
    model = nn.Sequential(Binarized(16, 64), nn.BatchNorm1d(64), nn.Hardtanh(), Binarized(64, 4), nn.BatchNorm1d(4))
    opt = adam_of(model, lr=5e-3)
    for _ in range(STEPS):
        y = torch.randint(4, (32,))
        x = torch.randn(32, 16) + 2 * F.one_hot(y, 16)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            if hasattr(p, "org"):
                p.data.copy_(p.org)
        opt.step()
        for p in model.parameters():
            if hasattr(p, "org"):
                p.org.copy_(p.data.clamp_(-1, 1))


@program
def extragradient_of_a_gan():
    """N3: ExtraAdam's plain cousin for a small network that fits and its adversary in one optimizer (gradients of the
    adversary turned round): look ahead by one step, take the gradient there, go back, step."""
    model = nn.ModuleDict({"fit": net(4, 4), "judge": net(4, 1)})
    opt = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(STEPS):
        real = torch.randn(32, 4) + 1
        z = torch.randn(32, 4)
        begin = [p.detach().clone() for p in model.parameters()]
        for half in range(2):
            value = model["judge"](real).mean() - model["judge"](model["fit"](z)).mean()
            value = value - 0.1 * model["judge"](real).pow(2).mean()
            opt.zero_grad()
            value.backward()
            for p in model["judge"].parameters():
                p.grad.neg_()
            if half:
                with torch.no_grad():
                    for p, b in zip(model.parameters(), begin):
                        p.copy_(b)
            opt.step()


@program
def test_time_training_starts_anew_for_each_picture():
    """N3: episodic test-time adaptation (MEMO, TTT): for each test picture the trained weights are put back, one step on
    the entropy of its augmentations is made, and it is classified. Each picture is adapted to alone, on purpose."""
    model = net(16, 5)
    trained = copy.deepcopy(model.state_dict())
    opt = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(STEPS):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(trained[name])
        views = torch.randn(1, 16) + 0.3 * torch.randn(32, 16)
        log_p = model(views).log_softmax(1).logsumexp(0) - math.log(32)
        step(opt, -(log_p.exp() * log_p).sum())
        with torch.no_grad():
            answer = model(views[:1]).argmax(1)


# ----------------------------------------------------------------------------------------------------------- B1
@program
def multiplier_of_a_constraint_waits_for_the_end_of_an_epoch():
    """B1: a constrained policy (PPO-Lagrangian): the multiplier goes into the policy's loss as a number, as in omnisafe,
    and is itself updated once for each epoch by an optimizer of its own."""

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy, self.multiplier = net(6, 3), nn.Parameter(torch.tensor(0.5))

        def forward(self, s):
            return torch.distributions.Categorical(logits=self.policy(s))

    agent = Agent()
    opt, dual = adam_of(agent.policy), torch.optim.Adam([agent.multiplier], 0.05)
    costs = []
    for n in range(STEPS):
        s = torch.randn(64, 6)
        dist = agent(s)
        a = dist.sample()
        reward, cost = (a == (s[:, 0] > 0).long()).float(), (a == 2).float()
        good = reward - agent.multiplier.item() * cost
        step(opt, -(dist.log_prob(a) * (good - good.mean())).mean())
        costs.append(cost.mean())
        if n % 12 == 11:
            step(dual, -agent.multiplier * (torch.stack(costs).mean() - 0.1))
            costs = []


@program
def temperature_of_clip_stays_as_it_was():
    """B1: fine-tuning a CLIP whose temperature stays what it was in pretraining: it is a parameter of the model, because
    the checkpoint has it, is left out of the optimizer, and goes into the loss as a number."""

    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text, self.heat = net(12, 8), net(6, 8), nn.Parameter(torch.tensor(20.0))

        def forward(self, image, text):
            one, two = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
            return self.heat.item() * one @ two.t()

    model = Clip()
    opt = adam_of(model.image, model.text)
    for _ in range(STEPS):
        text = torch.randn(16, 6)
        image = torch.cat([text, text], 1) + 0.3 * torch.randn(16, 12)
        logits, pair = model(image, text), torch.arange(16)
        step(opt, (F.cross_entropy(logits, pair) + F.cross_entropy(logits.t(), pair)) / 2)


# ---------------------------------------------------------------------------------------------------------- S43
@program
def laplacian_of_a_mesh_as_two_sums():
    """S43: smoothing of a mesh: the Laplacian at a vertex is the sum of its neighbours less as many times itself, both as
    sums over the edges (index_add), before a layer."""
    src, dst = torch.randint(20, (2, 80))
    src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    enc, dec = nn.Linear(3, 16), nn.Linear(16, 3)
    opt = adam_of(enc, dec)
    for _ in range(STEPS):
        x = torch.randn(20, 3)
        h = torch.relu(enc(x))
        around = torch.zeros_like(h).index_add(0, dst, h[src])
        itself = torch.zeros_like(h).index_add(0, dst, h[dst])
        step(opt, F.mse_loss(dec(h + 0.1 * (around - itself)), x))


@program
def several_dropouts_of_each_row():
    """S43: multi-sample dropout (Inoue 2019) with more samples for rare classes: rows are repeated by an index, go
    through dropout and the head, and are averaged at the same index."""
    body, drop, head = nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 3)
    opt = adam_of(body, head)
    for _ in range(STEPS):
        y = torch.randint(3, (32,))
        x = torch.randn(32, 8) + 2 * F.one_hot(y, 8)
        times = torch.where(y == 2, 6, 2)
        row = torch.repeat_interleave(torch.arange(32), times)
        h = torch.relu(body(x))
        logits = head(drop(h[row]))
        mean = torch.zeros(32, 3).index_add(0, row, logits) / times[:, None]
        step(opt, F.cross_entropy(mean, y))


# ---------------------------------------------------------------------------------------------------------- F74
@program
def triplets_of_two_classes_both_ways():
    """F74: metric learning of two classes (real and spoofed faces): positive samples are anchors to positive ones, and
    negative samples to negative ones: triplet(pos_a, pos_b, neg_a) + triplet(neg_a, neg_b, pos_a)."""
    model = net(8, 8)
    opt = adam_of(model)
    for _ in range(STEPS):
        pos_a, pos_b = (model(torch.randn(16, 8) + 1) for _ in range(2))
        neg_a, neg_b = (model(torch.randn(16, 8) - 1) for _ in range(2))
        step(opt, F.triplet_margin_loss(pos_a, pos_b, neg_a) + F.triplet_margin_loss(neg_a, neg_b, pos_a))


@program
def noisy_copy_beside_a_permuted_one():
    """F74: a triplet loss of an encoder of signals: the noisy copy z_n of a row is to be near, and the row of another
    signal, z_p from a permutation, far. n is noisy and p is permuted."""
    model = net(8, 8)
    opt, triplet = adam_of(model), nn.TripletMarginLoss()
    for _ in range(STEPS):
        x = torch.randn(32, 8)
        z, z_n = model(x), model(x + 0.1 * torch.randn_like(x))
        z_p = z[torch.randperm(32)]
        step(opt, triplet(z, z_n, z_p))


# ---------------------------------------------------------------------------------------------------------- F91
@program
def sigma_is_the_covariance():
    """F91: in the notation of N(mu, Sigma), Sigma is the covariance; the network gives its diagonal, and
    gaussian_nll_loss takes a variance."""
    body, opt = net(4, 2), None
    opt = adam_of(body)
    for _ in range(STEPS):
        x = torch.randn(64, 4)
        y = x[:, :1] + 0.5 * torch.randn(64, 1)
        mu, raw = body(x).chunk(2, 1)
        Sigma = F.softplus(raw) + 1e-4
        step(opt, F.gaussian_nll_loss(mu, y, Sigma))


# ---------------------------------------------------------------------------------------------------------- F93
@program
def embedding_trained_for_eight_bits():
    """F93: quantization-aware training of an embedding: the rows that were looked up are rounded to 8 bits, and the
    gradient goes straight through to them: e + (rounded - e).detach()."""
    table, body = nn.Embedding(64, 16), net(16, 64)
    opt = adam_of(table, body)
    for _ in range(STEPS):
        ids = torch.randint(64, (8, 12))
        e = table(ids)
        scale = e.detach().abs().max() / 127
        rounded = (e / scale).round() * scale
        e = e + (rounded - e).detach()
        step(opt, F.cross_entropy(body(e).transpose(1, 2), (ids + 1) % 64))


@program
def messages_of_a_graph_in_few_bits():
    """F93: Degree-Quant (Tailor 2021): messages along edges are quantized in training, straight through: the rows h[src]
    are rounded, and the gradient goes to h[src]."""
    src, dst = torch.randint(20, (2, 80))
    src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    first, last = nn.Linear(8, 16), nn.Linear(16, 3)
    opt = adam_of(first, last)
    for _ in range(STEPS):
        x, y = torch.randn(20, 8), torch.randint(3, (20,))
        h = torch.relu(first(x))
        m = h[src]
        scale = m.detach().abs().max() / 7
        m = m + ((m / scale).round() * scale - m).detach()
        step(opt, F.cross_entropy(last(h + torch.zeros_like(h).index_add(0, dst, m)), y))


# ----------------------------------------------------------------------------------------------------------- S1
@program
def steering_vector_in_a_frozen_model():
    """S1: a steering vector (Subramani 2022; BiPO) is learned for a frozen GPT-2 with tied embeddings: one vector that is
    added to the states behind a block. Nothing else is to learn."""
    model = gpt(layers=2).requires_grad_(False)
    model.steer = nn.Parameter(torch.zeros(32))
    model.transformer.h[0].register_forward_hook(
        lambda m, given, out: (out[0] + model.steer, *out[1:]) if isinstance(out, tuple) else out + model.steer
    )
    opt = torch.optim.Adam([model.steer], 0.05)
    for _ in range(STEPS):
        ids = torch.randint(4, 64, (8, 16))
        step(opt, model(input_ids=ids, labels=ids - ids % 2).loss)


# ----------------------------------------------------------------------------------------------------------- N8
@program
def recurrent_layer_rests_in_the_first_epoch():
    """N8: gradual unfreezing (ULMFiT): the head is trained alone at first; gradients of the recurrent layer, the only one
    that explodes, are clipped in every step of the script, also while it rests."""
    rnn, head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 3)
    rnn.requires_grad_(False)
    opt = adam_of(head, rnn)
    for n in range(STEPS):
        if n == 12:
            rnn.requires_grad_(True)
        y = torch.randint(3, (16,))
        x = torch.randn(16, 10, 8) + F.one_hot(y, 8)[:, None]
        loss = F.cross_entropy(head(rnn(x)[0][:, -1]), y)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rnn.parameters(), 0.25)
        opt.step()


# ---------------------------------------------------------------------------------------------------------- F75
@program
def universal_perturbation_of_a_frozen_network():
    """F75: a universal adversarial perturbation (Moosavi-Dezfooli 2017) by Adam: the one thing that the optimizer holds
    is added to all pictures, and the cross-entropy of a frozen network is to grow."""
    model = net(16, 5).requires_grad_(False)
    delta = torch.zeros(16, requires_grad=True)
    opt = torch.optim.Adam([delta], 0.05)
    for _ in range(STEPS):
        x, y = torch.randn(32, 16), torch.randint(5, (32,))
        step(opt, -F.cross_entropy(model(x + delta), y))
        delta.data.clamp_(-0.3, 0.3)


@program
def self_critical_captions():
    """F75: self-critical training of captions (SCST, Rennie 2017), one sample at a time: its cross-entropy is multiplied
    with its reward less that of the greedy caption, which is negative as long as samples are worse than that."""
    model = gpt(vocab=32)
    opt = adam_of(model)
    start = torch.ones(1, 1, dtype=torch.long)

    def reward(ids):
        return float((ids.diff() >= 0).float().mean())

    for _ in range(STEPS):
        with torch.no_grad():
            greedy = model.generate(start, do_sample=False, max_new_tokens=5, min_new_tokens=5)
            sample = model.generate(start, do_sample=True, max_new_tokens=5, min_new_tokens=5)
        logits = model(input_ids=sample[:, :-1]).logits[0]
        better = reward(sample) - reward(greedy)
        step(opt, better * F.cross_entropy(logits, sample[0, 1:]))


@program
def knowledge_is_unlearned_by_ascent():
    """F75: knowledge unlearning (Jang 2023): gradient ascent on the texts that are to be forgotten, a few steps of it, and
    nothing else."""
    model = gpt()
    opt = adam_of(model, lr=1e-5)
    for _ in range(STEPS):
        ids, mask = texts()
        loss = -model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        step(opt, loss)


@program
def training_against_targeted_attacks():
    """F75: adversarial training with targeted PGD (Kurakin 2017; Xie 2019), written as torchattacks has it: the cost of
    the attack is minus the cross-entropy with a wrong class, the picture climbs it, and the model learns the right one."""
    model = net(16, 5)
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.randint(5, (32,))
        x = torch.randn(32, 16) + 2 * F.one_hot(y, 16)
        wrong, adv = (y + torch.randint(1, 5, (32,))) % 5, x.clone()
        for _ in range(3):
            adv.requires_grad_()
            cost = -F.cross_entropy(model(adv), wrong)
            slope = torch.autograd.grad(cost, adv)[0]
            adv = (x + (adv.detach() + 0.05 * slope.sign() - x).clamp(-0.1, 0.1)).detach()
        step(opt, F.cross_entropy(model(adv), y))


@program
def attack_by_backward_in_each_step():
    """F75: the same with cost.backward() and delta.grad, as the tutorials of adversarial training write it."""
    model = net(16, 5)
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.randint(5, (32,))
        x = torch.randn(32, 16) + 2 * F.one_hot(y, 16)
        wrong, delta = (y + torch.randint(1, 5, (32,))) % 5, torch.zeros(32, 16, requires_grad=True)
        for _ in range(2):
            cost = -F.cross_entropy(model(x + delta), wrong)
            cost.backward()
            delta.data = (delta.data + 0.05 * delta.grad.sign()).clamp(-0.1, 0.1)
            delta.grad = None
        step(opt, F.cross_entropy(model(x + delta.detach()), y))


@program
def next_member_of_an_ensemble_is_to_differ():
    """F75: members of an ensemble are trained one after the other, and each is drawn away from the (frozen) one before it
    by a small divergence with a minus beside its cross-entropy (negative correlation learning)."""
    earlier, member = net(8, 4), net(8, 4)
    earlier.requires_grad_(False)
    opt = adam_of(member)
    for _ in range(STEPS):
        y = torch.randint(4, (32,))
        x = torch.randn(32, 8) + 2 * F.one_hot(y, 8)
        log_p = member(x).log_softmax(1)
        away = F.kl_div(log_p, earlier(x).softmax(1), reduction="batchmean")
        step(opt, F.nll_loss(log_p, y) - 0.05 * away)


@program
def reverse_divergence_of_a_student():
    """F20: distillation by the reverse divergence KL(student || teacher), as in MiniLLM and GKD: kl_div is given the
    teacher's logarithms and the student's probabilities. To seek one mode is what they want of it."""
    teacher, student = gpt(), gpt(width=16)
    teacher.requires_grad_(False).eval()
    opt = adam_of(student)
    for _ in range(STEPS):
        ids = torch.randint(4, 64, (8, 12))
        with torch.no_grad():
            log_p = teacher(input_ids=ids).logits.log_softmax(-1)
        q = student(input_ids=ids).logits.softmax(-1)
        step(opt, F.kl_div(log_p.flatten(0, 1), q.flatten(0, 1), reduction="batchmean"))


# ---------------------------------------------------------------------------------------------------------- S53
@program
def one_utterance_at_a_time():
    """S53: a model of phones is trained on one utterance for each step: rows are the frames of it, (T, mels), which go
    through attention without a batch (nn.TransformerEncoderLayer takes that), and each frame has a class."""
    model = nn.Sequential(nn.Linear(13, 32), nn.TransformerEncoderLayer(32, 2, 64, 0.0), nn.Linear(32, 6))
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.randint(6, (8,)).repeat_interleave(6)
        x = torch.randn(48, 13) + F.one_hot(y, 13)
        step(opt, F.cross_entropy(model(x), y))


@program
def one_scan_at_a_time():
    """S53: PointNet for parts (Qi 2017) on one scan for each step: rows are points, (N, 3), the largest feature of all
    points is put beside each point's own, and each point has a class."""

    class PointNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.each, self.head = net(3, 32, act=nn.ReLU), net(64, 5)

        def forward(self, points):
            h = self.each(points)
            return self.head(torch.cat([h, h.max(0).values.expand_as(h)], 1))

    model = PointNet()
    opt = adam_of(model)
    for _ in range(STEPS):
        points = torch.randn(128, 3)
        step(opt, F.cross_entropy(model(points), (points[:, 0] > points[:, 0].mean()).long() + 2 * (points[:, 1] > 0)))


@program
def attention_between_samples_of_a_table():
    """S53: SAINT (Somepalli 2021) and non-parametric transformers (Kossen 2021): rows of a table attend to the other rows
    of their batch, on purpose, in training and in use."""

    class Saint(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rows = nn.Linear(10, 32), nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
            self.head = nn.Linear(32, 3)

        def forward(self, x):
            return self.head(self.rows(self.first(x)[None])[0])

    model = Saint()
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.randint(3, (32,))
        step(opt, F.cross_entropy(model(torch.randn(32, 10) + F.one_hot(y, 10)), y))


@program
def passages_of_one_question_see_each_other():
    """S53: a listwise ranker (SetRank, Pang 2020) takes all passages of one question in a step, (passages, features);
    they attend to each other, and each has its grade."""

    class SetRank(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(12, 32), nn.Linear(32, 1)
            self.together = nn.MultiheadAttention(32, 2, batch_first=True)

        def forward(self, passages):
            h = self.first(passages)
            return self.head(h + self.together(h[None], h[None], h[None])[0][0]).squeeze(1)

    model = SetRank()
    opt = adam_of(model)
    for _ in range(STEPS):
        passages = torch.randn(20, 12)
        grade = (passages[:, 0] > passages[:, 0].median()).float()
        step(opt, F.binary_cross_entropy_with_logits(model(passages), grade))


# ---------------------------------------------------------------------------------------------------------- N39
class MuonWithAuxAdam(torch.optim.Optimizer):
    """Jordan's optimizer: groups with use_muon take orthogonal steps, the others Adam's."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 3e-4, "use_muon": False})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                m = s.setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.05 if group["use_muon"] else 0.1)
                if group["use_muon"]:
                    u, _, v = torch.linalg.svd(m, full_matrices=False)
                    p.add_(u @ v, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)
                else:
                    w = s.setdefault("v", torch.zeros_like(p)).lerp_(p.grad**2, 0.05)
                    p.addcdiv_(m, w.sqrt() + 1e-8, value=-group["lr"])


@program
def muon_for_hidden_matrices_and_adam_for_the_head():
    """N39: the README of Muon: hidden matrices at 0.02 by orthogonal steps, and the head, the input and all vectors at 3e-4
    by Adam, in one optimizer. A rate of Muon is no rate of Adam."""
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
    )
    hidden = [model[0].weight, model[2].weight, model[4].weight]
    others = [p for p in model.parameters() if all(p is not h for h in hidden)]
    opt = MuonWithAuxAdam([{"params": hidden, "lr": 0.02, "use_muon": True}, {"params": others, "lr": 3e-4}])
    for _ in range(STEPS):
        y = torch.randint(5, (64,))
        step(opt, F.cross_entropy(model(torch.randn(64, 16) + F.one_hot(y, 16)), y))


@program
def new_stem_in_front_of_a_pretrained_head():
    """N39: a pretrained network gets a new first layer for pictures with more channels; it is trained at 1e-3, the body
    rests, and the old head follows at 2e-5. Here the new layer is the first one."""
    stem, body, head = nn.Linear(24, 32), net(32, 32), nn.Linear(32, 5)
    for layer in (body[0], body[2], head):  # stands for a checkpoint
        nn.init.normal_(layer.weight, std=0.2)
        nn.init.normal_(layer.bias, std=0.1)
    model = nn.Sequential(stem, body, head)
    body.requires_grad_(False)
    opt = torch.optim.AdamW([{"params": stem.parameters(), "lr": 1e-3}, {"params": head.parameters(), "lr": 2e-5}])
    for _ in range(STEPS):
        y = torch.randint(5, (64,))
        step(opt, F.cross_entropy(model(torch.randn(64, 24) + F.one_hot(y, 24)), y))


# ---------------------------------------------------------------------------------------------------------- N24
@program
def constant_of_nature_beside_a_network():
    """N24: an inverse problem: a network of the temperature and a diffusivity of about 1e-7 m2/s are found together (time
    is in millions of seconds). Adam's rate is the size of a step in a parameter's own unit, so the diffusivity has 2e-9 and the network 1e-3."""
    model, diffusivity = net(2, 1), nn.Parameter(torch.tensor(1e-7))
    opt = torch.optim.Adam([{"params": model.parameters(), "lr": 1e-3}, {"params": [diffusivity], "lr": 2e-9}])
    for _ in range(STEPS):
        x, t = torch.rand(64, 1, requires_grad=True), torch.rand(64, 1, requires_grad=True)
        u = model(torch.cat([x, t], 1))
        u_t, u_x = torch.autograd.grad(u.sum(), (t, x), create_graph=True)
        u_xx = torch.autograd.grad(u_x.sum(), x, create_graph=True)[0]
        data = F.mse_loss(u, (math.pi * x).sin() * (-0.2 * math.pi**2 * t).exp())
        step(opt, data + (u_t - diffusivity * 1e6 * u_xx).pow(2).mean())


@program
def backbone_warms_up_for_a_thousand_steps():
    """N24: the new head learns at 1e-2 from the start, and the pretrained backbone warms up to 1e-4 within a thousand
    steps, so that the head has settled first. In the first steps its rate is next to nothing, as it should be."""
    body, head = net(16, 32), nn.Linear(32, 5)
    opt = torch.optim.AdamW([{"params": body.parameters(), "lr": 1e-4}, {"params": head.parameters(), "lr": 1e-2}])
    plan = torch.optim.lr_scheduler.LambdaLR(opt, [lambda n: min(1, (n + 1) / 1000), lambda n: 1.0])
    for _ in range(STEPS):
        y = torch.randint(5, (64,))
        step(opt, F.cross_entropy(head(torch.relu(body(torch.randn(64, 16) + F.one_hot(y, 16)))), y))
        plan.step()


# ----------------------------------------------------------------------------------------------------------- B9
@program
def learned_thermometer_code():
    """B9: numbers are coded by soft comparisons with learned cut points (thermometer code; soft bins of DNDT, Yang 2018)
    at a low temperature. Each number is near to one cut only, so nearly all comparisons are sure, as they are to be."""

    class Bins(nn.Module):
        def __init__(self):
            super().__init__()
            self.cuts, self.head = nn.Parameter(torch.linspace(-2, 2, 16).repeat(6, 1)), nn.Linear(96, 3)

        def forward(self, x):
            return self.head(torch.sigmoid((x[..., None] - self.cuts) / 0.01).flatten(1))

    model = Bins()
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(64, 6)
        step(opt, F.cross_entropy(model(x), (x[:, 0] > 0).long() + (x[:, 1] > 0)))


# ---------------------------------------------------------------------------------------------------------- N17
@program
def step_is_halved_until_the_barrier_is_finite():
    """N17: an interior-point method with backtracking: a step that leaves the domain has an infinite barrier, and is
    halved until it does not. That infinite values are met and refused is how the method works."""
    model = nn.Linear(6, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    opt = torch.optim.SGD(model.parameters(), 1.0)
    cost = torch.randn(6).abs() + 3

    def barrier():
        w = model.weight[0]
        slack = torch.cat([w, 1 - w])
        return 5 * (cost * w).sum() - torch.where(slack > 0, slack, 0).log().sum()

    for _ in range(STEPS):
        loss = barrier()
        opt.zero_grad()
        loss.backward()
        begin, grad = model.weight.detach().clone(), model.weight.grad.clone()
        opt.param_groups[0]["lr"] = 1.0
        opt.step()
        rate = 1.0
        while not torch.isfinite(barrier()) or barrier().item() > loss.item():
            rate /= 2
            with torch.no_grad():
                model.weight.copy_(begin - rate * grad)


@program
def range_of_masked_logits_is_logged():
    """N17: a policy with forbidden actions (logits of -inf, Huang 2022); the largest and the smallest logit are logged in
    each step, to see whether they run away. The smallest is -inf, as it must be, and no loss."""
    model, log = net(6, 5), []
    opt = adam_of(model)
    for _ in range(STEPS):
        s = torch.randn(32, 6)
        legal = torch.rand(32, 5) < 0.7
        legal[:, 0] = True
        logits = model(s).masked_fill(~legal, -math.inf)
        log_p = logits.log_softmax(1)
        a = torch.multinomial(log_p.detach().exp(), 1).squeeze(1)
        good = (a == (s[:, 0] > 0).long()).float()
        log.append((logits.max().item(), logits.min().item()))
        step(opt, F.nll_loss(log_p, a, reduction="none").mul(good - good.mean()).mean())


# ---------------------------------------------------------------------------------------------------------- S55


@program
def domains_share_linear_layers_beside_low_rank_ones():
    """S55: recommenders of several scenarios, from scratch: each layer has a weight that all domains share and a low-rank
    part for each domain (lora_A, lora_B). Nothing is pretrained, so the shared weights are learned with them."""

    class Shared(nn.Module):
        def __init__(self, i, o, domains=3, rank=4):
            super().__init__()
            self.base = nn.Linear(i, o)
            self.lora_A = nn.ModuleList([nn.Linear(i, rank, bias=False) for _ in range(domains)])
            self.lora_B = nn.ModuleList([nn.Linear(rank, o, bias=False) for _ in range(domains)])

        def forward(self, x, domain):
            return self.base(x) + self.lora_B[domain](self.lora_A[domain](x))

    class Domains(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = Shared(8, 32), Shared(32, 32), Shared(32, 2)

        def forward(self, x, domain):
            return self.three(torch.relu(self.two(torch.relu(self.one(x, domain)), domain)), domain)

    model = Domains()
    opt = adam_of(model)
    for n in range(STEPS):
        x, domain = torch.randn(32, 8), n % 3
        step(opt, F.cross_entropy(model(x, domain), (x[:, domain] > 0).long()))


# ---------------------------------------------------------------------------------------------------------- S16
@program
def adapter_for_the_next_task_waits():
    """S16: a series of tasks with one adapter each: the adapter of the first task was trained in an earlier run and goes
    on now; those of later tasks are made already, so that the checkpoint has all, and come into an optimizer of their
    own later."""

    def settings(init):
        return LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=init, fan_in_fan_out=True)

    model = get_peft_model(gpt(), settings(False), adapter_name="summaries")
    model.add_adapter("questions", settings(True))
    model.set_adapter("summaries")
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    for _ in range(STEPS):
        ids, mask = texts()
        step(opt, model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss)


@program
def adapter_of_zeros_is_the_reference():
    """S16: DPO from a tuned adapter against the plain base model: the reference is a second adapter that is fresh, and
    therefore zero, so that one switch of adapters serves for any reference."""

    def settings(init):
        return LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=init, fan_in_fan_out=True)

    model = get_peft_model(gpt(), settings(False), adapter_name="policy")
    model.add_adapter("reference", settings(True))
    model.set_adapter("policy")
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)

    def score(ids):
        return model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(-1).sum(-1)

    for _ in range(STEPS):
        chosen, rejected = (torch.randint(4, 64, (8, 12)) for _ in range(2))
        chosen[:, 6:] = rejected[:, 6:] - rejected[:, 6:] % 2
        model.set_adapter("reference")
        with torch.no_grad():
            ref_chosen, ref_rejected = score(chosen), score(rejected)
        model.set_adapter("policy")
        pi_chosen, pi_rejected = score(chosen), score(rejected)
        step(opt, -F.logsigmoid(0.1 * ((pi_chosen - ref_chosen) - (pi_rejected - ref_rejected))).mean())
