"""Losses without tokens: each is fed the wrong thing in the way people do it, and mended by one line.

A fault and its mended twin train the same small network on the same batches. What is wrong is named first, at the
severity that its evidence supports; the twin, and healthy programs that look alike, raise nothing.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import binary_cross_entropy_with_logits as bce_logits_by_name
from torch.nn.functional import cross_entropy as entropy_by_name
from torch.nn.functional import mse_loss as mse_by_name
from torch.nn.functional import nll_loss as nll_by_name

import train_doctor as doctor
from tests.bench import lm
from train_doctor import ERROR, NOTE, WARN

N, CLASSES = 32, 5


def train(loss_of, *, out: int = CLASSES, top=None, rounds: int = 6, model=None, per_step: int = 1):
    """Train a small network, `top` at its end, on `loss_of(outputs, inputs)`."""
    torch.manual_seed(0)
    body = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, out)]
    model = model or nn.Sequential(*body, *([top] if top is not None else []))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with contextlib.suppress(RuntimeError, ValueError), doctor.watch(model, say=False) as report:
        for _ in range(rounds):
            optimizer.zero_grad()
            for _ in range(per_step):
                x = torch.randn(N, 8)
                loss_of(model(x), x).backward()
            optimizer.step()
    return report


def classes(x):
    """Targets that can be learnt."""
    return x[:, :CLASSES].argmax(1)


def flags(x, width: int = CLASSES):
    return (x[:, :width] > 0).float()


def value(x):
    """(N)"""
    return x.sum(1)


def soft(x):
    return (2 * x[:, :CLASSES]).softmax(-1)


CE, NLL, BCE, BCEL = nn.CrossEntropyLoss(), nn.NLLLoss(), nn.BCELoss(), nn.BCEWithLogitsLoss()
KL = nn.KLDivLoss(reduction="batchmean")


def case(wrong, right, check, fault, severity=ERROR, **how):
    """`how` is for both; what ends in _wrong or _right for one of them."""
    common = {k: v for k, v in how.items() if not k.endswith(("_wrong", "_right"))}
    ways = [
        common | {k.removesuffix(end): v for k, v in how.items() if k.endswith(end)} for end in ("_wrong", "_right")
    ]
    return (wrong, ways[0]), (right, ways[1]), check, fault, severity


def dense(loss):
    """On images: (N, C, H, W)."""
    return lambda y, x: loss(y.view(-1, CLASSES, 2, 2), (x[:, :4] > 0).long().view(-1, 2, 2))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 16 * CLASSES)

    def forward(self, x):
        return self.inner(x).view(-1, CLASSES, 16)


CASES = {
    "softmax layer, module": case(
        lambda y, x: CE(y, classes(x)), lambda y, x: CE(y, classes(x)), "F3", "double softmax", top_wrong=nn.Softmax(-1)
    ),
    "softmax, function": case(
        lambda y, x: F.cross_entropy(y.softmax(1), classes(x)),
        lambda y, x: F.cross_entropy(y, classes(x)),
        "F3",
        "double softmax",
    ),
    "softmax, two classes": case(
        lambda y, x: F.cross_entropy(y.softmax(1), (x[:, 0] > 0).long()),
        lambda y, x: F.cross_entropy(y, (x[:, 0] > 0).long()),
        "F3",
        "double softmax",
        out=2,
    ),
    "softmax by hand": case(
        lambda y, x: CE(y.exp() / y.exp().sum(-1, keepdim=True), classes(x)),
        lambda y, x: CE(y, classes(x)),
        "F3",
        "double softmax",
    ),
    "softmax, soft targets": case(
        lambda y, x: CE(y.softmax(-1), soft(x)), lambda y, x: CE(y, soft(x)), "F3", "double softmax"
    ),
    "softmax, a name of one's own": case(
        lambda y, x: entropy_by_name(y.softmax(-1), classes(x)),
        lambda y, x: entropy_by_name(y, classes(x)),
        "F3",
        "double softmax",
    ),
    "softmax on images": case(
        dense(lambda y, t: CE(y.softmax(1), t)), dense(CE), "F3", "double softmax", out=4 * CLASSES
    ),
    "softmax under log_softmax": case(
        lambda y, x: NLL(F.log_softmax(y.softmax(-1), -1), classes(x)),
        lambda y, x: NLL(F.log_softmax(y, -1), classes(x)),
        "F3",
        "double softmax",
    ),
    "sigmoid before cross_entropy": case(
        lambda y, x: CE(y, classes(x)), lambda y, x: CE(y, classes(x)), "F3", "sigmoid", WARN, top_wrong=nn.Sigmoid()
    ),
    "ReLU before cross_entropy": case(
        lambda y, x: CE(y, classes(x)), lambda y, x: CE(y, classes(x)), "F3", "relu", WARN, top_wrong=nn.ReLU()
    ),
    "logits into nll_loss": case(
        lambda y, x: F.nll_loss(y, classes(x)),
        lambda y, x: F.nll_loss(y.log_softmax(-1), classes(x)),
        "F3",
        "softmax is missing",
    ),
    "logits into nll_loss, a name of one's own": case(
        lambda y, x: nll_by_name(y, classes(x)),
        lambda y, x: nll_by_name(y.log_softmax(-1), classes(x)),
        "F3",
        "softmax is missing",
    ),
    "probabilities into nll_loss": case(
        lambda y, x: NLL(y, classes(x)),
        lambda y, x: NLL(y, classes(x)),
        "F3",
        "given probabilities",
        top_wrong=nn.Softmax(-1),
        top_right=nn.LogSoftmax(-1),
    ),
    "softmax over the batch": case(
        lambda y, x: NLL(y.log_softmax(0), classes(x)),
        lambda y, x: NLL(y.log_softmax(1), classes(x)),
        "F3",
        "dimension",
    ),
    "logits into BCE": case(
        lambda y, x: BCE(y, flags(x)), lambda y, x: BCE(y, flags(x)), "F3", "sigmoid is", top_right=nn.Sigmoid()
    ),
    "sigmoid twice": case(
        lambda y, x: BCEL(y, flags(x)), lambda y, x: BCEL(y, flags(x)), "F3", "double sigmoid", top_wrong=nn.Sigmoid()
    ),
    "sigmoid twice, squeezed": case(
        lambda y, x: F.binary_cross_entropy_with_logits(y.sigmoid().squeeze(-1), flags(x, 1).squeeze(-1)),
        lambda y, x: F.binary_cross_entropy_with_logits(y.squeeze(-1), flags(x, 1).squeeze(-1)),
        "F3",
        "double sigmoid",
        out=1,
    ),
    "sigmoid twice, a name of one's own": case(
        lambda y, x: bce_logits_by_name(y.sigmoid(), flags(x)),
        lambda y, x: bce_logits_by_name(y, flags(x)),
        "F3",
        "double sigmoid",
    ),
    "sigmoid twice before BCE": case(
        lambda y, x: BCE(y.sigmoid(), flags(x)),
        lambda y, x: BCE(y, flags(x)),
        "F3",
        "double sigmoid",
        top=nn.Sigmoid(),
    ),
    "softmax into BCE with logits": case(
        lambda y, x: BCEL(y.softmax(-1), flags(x)), lambda y, x: BCEL(y, flags(x)), "F3", "double sigmoid"
    ),
    "probabilities into kl_div": case(
        lambda y, x: KL(y.softmax(-1), soft(x)),
        lambda y, x: KL(y.log_softmax(-1), soft(x)),
        "F3",
        "given probabilities",
    ),
    "logits into kl_div": case(
        lambda y, x: F.kl_div(y, soft(x), reduction="batchmean"),
        lambda y, x: F.kl_div(y.log_softmax(-1), soft(x), reduction="batchmean"),
        "F3",
        "softmax is missing",
    ),
    "logarithms as targets of kl_div": case(
        lambda y, x: KL(y.log_softmax(-1), soft(x).log()),
        lambda y, x: F.kl_div(y.log_softmax(-1), soft(x).log(), reduction="batchmean", log_target=True),
        "F20",
        "log_target",
    ),
    "probabilities with log_target": case(
        lambda y, x: F.kl_div(y.log_softmax(-1), soft(x), reduction="batchmean", log_target=True),
        lambda y, x: F.kl_div(y.log_softmax(-1), soft(x), reduction="batchmean"),
        "F20",
        "log_target",
    ),
    "classes of -1 and 1 in BCE with logits": case(
        lambda y, x: BCEL(y, 2 * flags(x) - 1), lambda y, x: BCEL(y, flags(x)), "F20", "targets"
    ),
    "pixels of 0 to 255 in BCE": case(
        lambda y, x: BCE(y, 255 * flags(x)), lambda y, x: BCE(y, flags(x)), "F20", "255", top=nn.Sigmoid()
    ),
    "several classes in cross_entropy": case(
        lambda y, x: CE(y, flags(x)), lambda y, x: BCEL(y, flags(x)), "F20", "multi-hot", WARN
    ),
    "(N, 1) and (N) in MSE": case(
        lambda y, x: nn.MSELoss()(y, value(x)),
        lambda y, x: nn.MSELoss()(y.squeeze(-1), value(x)),
        "F21",
        "shape",
        out=1,
    ),
    "(N) and (N, 1) in L1": case(
        lambda y, x: F.l1_loss(y.squeeze(-1), value(x)[:, None]),
        lambda y, x: F.l1_loss(y, value(x)[:, None]),
        "F21",
        "shape",
        out=1,
    ),
    "(N, 1) and (N) in Huber": case(
        lambda y, x: nn.HuberLoss()(y, value(x)),
        lambda y, x: nn.HuberLoss()(y, value(x)[:, None]),
        "F21",
        "shape",
        out=1,
    ),
    "(N, 1) and (N) in SmoothL1": case(
        lambda y, x: nn.SmoothL1Loss()(y, value(x)),
        lambda y, x: nn.SmoothL1Loss()(y, value(x)[:, None]),
        "F21",
        "shape",
        out=1,
    ),
    "(N, 1) and (N), a name of one's own": case(
        lambda y, x: mse_by_name(y, value(x)), lambda y, x: mse_by_name(y[:, 0], value(x)), "F21", "shape", out=1
    ),
    "(N, 1) minus (N) by hand": case(
        lambda y, x: (y - value(x)).pow(2).mean(),
        lambda y, x: (y[:, 0] - value(x)).pow(2).mean(),
        "F21",
        "shape",
        WARN,
        out=1,
    ),
    "(N) minus (N, 1) by hand": case(
        lambda y, x: (value(x)[:, None] - y[:, 0]).abs().mean(),
        lambda y, x: (value(x) - y[:, 0]).abs().mean(),
        "F21",
        "shape",
        WARN,
        out=1,
    ),
    "(N, 5) and (N, 1) in MSE": case(
        lambda y, x: F.mse_loss(y, value(x)[:, None]), lambda y, x: F.mse_loss(y, x[:, :5]), "F21", "shape", WARN
    ),
    "(N, 1) and (N) in BCE with logits": case(
        lambda y, x: BCEL(y, flags(x, 1)[:, 0]), lambda y, x: BCEL(y, flags(x, 1)), "F21", "shape", out=1
    ),
    "(N, 1) and (N) in BCE": case(
        lambda y, x: BCE(y, flags(x, 1)[:, 0]),
        lambda y, x: BCE(y, flags(x, 1)),
        "F21",
        "shape",
        out=1,
        top=nn.Sigmoid(),
    ),
    "one class": case(
        lambda y, x: CE(y, torch.zeros(N, dtype=torch.long)), lambda y, x: BCEL(y, flags(x, 1)), "F21", "one", out=1
    ),
    "summed over the batch": case(
        lambda y, x: F.cross_entropy(y, classes(x), reduction="sum"),
        lambda y, x: F.cross_entropy(y, classes(x), reduction="sum") / N,
        "F3",
        "sum over",
        WARN,
    ),
    "a mean divided by the batch": case(
        lambda y, x: F.cross_entropy(y, classes(x)) / N,
        lambda y, x: F.cross_entropy(y, classes(x)),
        "F3",
        "twice",
        WARN,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_fault_is_named_first(name):
    (loss_of, how), _, check, words, severity = CASES[name]
    report = train(loss_of, **how)
    root = report.root
    assert not report.faults, report.faults
    assert root is not None and (root.check, root.severity) == (check, severity), f"\n{report}"
    assert words in f"{root.observed} {root.diagnosis} {root.fix}".lower(), f"\n{report}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_its_mended_twin_is_clean(name):
    _, (loss_of, how), check, *_ = CASES[name]
    report = train(loss_of, **how)
    clean(report)
    seen = {"OK"} | ({"NOT-APPLICABLE"} if check == "F20" else set())  # the twin's targets may be classes
    unseen = {"UNKNOWN"} if "by hand" in name or "of one's own" in name else set()  # its shapes leave no trace
    assert report.verdicts[check].state in seen | unseen, report.verdicts[check]


def clean(report) -> None:
    assert report.done and not report.faults, report.faults
    assert report.exception is None
    assert not [f for f in report.findings if f.severity != NOTE], f"\n{report}"


# ------------------------------------------------------------------------------------------------ healthy ones
def mixture(y, x):
    """Two softmax outputs are mixed; the logarithm of the mixture goes into the loss."""
    mixed = 0.3 * y.softmax(-1) + 0.7 * (2 * y).softmax(-1)
    return F.nll_loss(mixed.log(), classes(x))


def focal(y, x):
    each = F.cross_entropy(y, classes(x), reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def focal_binary(y, x):
    p, t = y.sigmoid(), flags(x)
    each = F.binary_cross_entropy_with_logits(y, t, reduction="none")
    return ((1 - (p * t + (1 - p) * (1 - t))) ** 2 * each).mean()


def smoothed(y, x):
    return F.cross_entropy(y, classes(x), label_smoothing=0.1)


def mixed_up(y, x):
    """Mixup, as soft targets and as two losses."""
    hard = F.one_hot(classes(x), CLASSES).float()
    return F.cross_entropy(y, 0.3 * hard + 0.7 * hard.flip(0)) + 0.3 * F.cross_entropy(y, classes(x).flip(0))


def distilled(y, x):
    """Hinton's: both softened, times the square of the temperature, beside the hard loss."""
    goal = (soft(x).log() / 2).softmax(-1)
    return 0.5 * 4 * F.kl_div((y / 2).log_softmax(-1), goal, reduction="batchmean") + 0.5 * CE(y, classes(x))


def distilled_from_logarithms(y, x):
    return F.kl_div(y.log_softmax(-1), soft(x).log(), reduction="batchmean", log_target=True)


def jensen(y, x):
    p, q = y.softmax(-1), soft(x)
    middle = ((p + q) / 2).log()
    return F.kl_div(middle, p, reduction="batchmean") + F.kl_div(middle, q, reduction="batchmean")


def entropy_added(y, x):
    """An entropy of the softmax, by hand, and the accuracy of probabilities for the log."""
    p = y.softmax(-1)
    F.cross_entropy(p.detach(), classes(x))
    F.cross_entropy(p, classes(x))  # for the log, and nothing hangs on it
    return CE(y, classes(x)) + 0.01 * (p * p.log()).sum(-1).mean()


def policy_gradient(y, x):
    """REINFORCE by nll_loss: log-probabilities times advantages of both signs."""
    return F.nll_loss(y.log_softmax(-1) * (x[:, :1]), classes(x))


def rewarded(y, x):
    logp = y.log_softmax(-1).gather(1, classes(x)[:, None])[:, 0]
    return -(logp * x[:, 0]).mean()


def contrast(y, x):
    """InfoNCE: similarities of unit vectors, over a temperature."""
    a, b = F.normalize(y, dim=-1), F.normalize(x[:, :CLASSES], dim=-1)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def pairs_by_hand(y, x):
    """All pairs on purpose, both ways round."""
    return ((y[:, None] - y[None]).pow(2).sum(-1) - (x[:, None] - x[None]).pow(2).sum(-1)).abs().mean()


def ranking(y, x):
    gaps = y[:, :1] - y[:, :1].T
    return F.softplus(-gaps * (value(x)[:, None] - value(x)[None]).sign()).mean()


def adversary(y, x):
    """Noisy one-sided labels."""
    return F.binary_cross_entropy_with_logits(y, torch.empty_like(y).uniform_(0.7, 1.2))


def least_squares_gan(y, x):
    return F.mse_loss(y, torch.tensor(1.0).expand_as(y)) + (y - 1.0).pow(2).mean()


def one_number(y, x):
    return F.mse_loss(y, torch.tensor(0.5)) + F.l1_loss(y, torch.zeros(1))


def template(y, x):
    """One row that all rows are to come near to."""
    return F.mse_loss(y, torch.linspace(0, 1, CLASSES)[None])


def autoencoder(y, x):
    """VAE of pytorch/examples: a summed BCE and a divergence by hand."""
    mean, log_var = y[:, :2], y[:, 2:4]
    z = mean + torch.randn_like(mean) * (log_var / 2).exp()
    made = (z @ torch.ones(2, 8)).sigmoid()
    return (
        F.binary_cross_entropy(made, x.sigmoid(), reduction="sum") - 0.5 * (1 + log_var - mean**2 - log_var.exp()).sum()
    )


def clamped(y, x):
    return F.binary_cross_entropy(y.sigmoid().clamp(1e-6, 1 - 1e-6), flags(x))


def attention_inside(y, x):
    """A softmax that is a gate, not the output."""
    return CE(y * y.detach().softmax(-1) + y.softmax(-1) @ torch.ones(CLASSES, CLASSES), classes(x))


def capped(y, x):
    return CE(30 * (y / 30).tanh(), classes(x))


def weighed(y, x):
    return F.cross_entropy(y, classes(x), weight=torch.linspace(0.1, 2, CLASSES)) + F.multi_margin_loss(y, classes(x))


def one_sided(y, x):
    """All targets are of one class: an unlucky batch, or all there is."""
    return CE(y, torch.zeros(N, dtype=torch.long)) + BCEL(y, torch.ones_like(y))


def ordinal(y, x):
    """Probabilities made by differences, and their logarithm."""
    edges = torch.cat([torch.zeros(N, 1), y[:, : CLASSES - 1].sort(-1).values.sigmoid(), torch.ones(N, 1)], 1)
    return F.nll_loss((edges.diff(dim=1) + 1e-6).log(), classes(x))


def averaged_by_hand(y, x):
    return F.cross_entropy(y, classes(x), reduction="sum") / len(y)


def trained_by_a_bound(y, x):
    """A gate between 0 and 1, scaled: it may be a logit."""
    return BCEL(8 * y.sigmoid() - 4, flags(x)) + F.huber_loss(y.sigmoid(), flags(x))


def aligned(y, x):
    """CTC, cosine and triplet: losses that are not judged."""
    a, b, c = y, x[:, :CLASSES], x[:, 1 : 1 + CLASSES]
    return F.triplet_margin_loss(a, b, c) + F.cosine_embedding_loss(a, b, torch.ones(N))


def bernoulli_divergence(y, x):
    return F.kl_div(F.logsigmoid(y), x[:, :CLASSES].sigmoid(), reduction="batchmean")


HEALTHY = [mixture, focal, focal_binary, smoothed, mixed_up, distilled, distilled_from_logarithms, jensen]
HEALTHY += [entropy_added, policy_gradient, rewarded, contrast, pairs_by_hand, ranking, adversary, least_squares_gan]
HEALTHY += [one_number, template, autoencoder, clamped, attention_inside, capped, weighed, one_sided, ordinal]
HEALTHY += [averaged_by_hand, trained_by_a_bound, aligned, bernoulli_divergence]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss_of", HEALTHY, ids=lambda f: f.__name__)
def test_a_healthy_loss_raises_nothing(loss_of):
    clean(train(loss_of))


@pytest.mark.filterwarnings("ignore")
def test_as_many_micro_batches_as_rows_are_divided_rightly():
    clean(train(lambda y, x: CE(y, classes(x)) / N, per_step=N, rounds=4))


@pytest.mark.filterwarnings("ignore")
def test_critic_and_actor_on_one_body():
    """PPO's loss: a ratio that is clipped, a value, an entropy."""

    def loss_of(y, x):
        spread = torch.distributions.Categorical(logits=y[:, :4])
        logp = spread.log_prob(classes(x) % 4)
        ratio, gain = (logp - logp.detach()).exp(), value(x)
        policy = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
        return policy + 0.5 * (y[:, 4] - value(x)).pow(2).mean() - 0.01 * spread.entropy().mean()

    clean(train(loss_of))


@pytest.mark.filterwarnings("ignore")
def test_an_answer_that_is_not_finite_is_no_missing_sigmoid():
    """BCE refuses NaN with the same words."""
    report = train(lambda y, x: BCE((y * float("nan")).sigmoid(), flags(x)))
    assert not [f for f in report.findings if f.check == "F3"], f"\n{report}"


@pytest.mark.filterwarnings("ignore")
def test_a_token_model_is_judged_as_before():
    """The loss inside a transformers model is a cross-entropy as well."""
    model = lm()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with doctor.watch(model, say=False) as report:
        for _ in range(3):
            ids = torch.randint(3, 256, (4, 32))
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    clean(report)
    assert report.verdicts["F3"].state == "OK"


@pytest.mark.filterwarnings("ignore")
def test_the_first_line_says_when_the_loss_was_not_judged():
    told = str(train(lambda y, x: (y[:, 0] - value(x)).pow(2).mean())).splitlines()[0]
    assert "nothing found" in told and "its loss was not judged" in told
    assert "not judged" not in str(train(lambda y, x: CE(y, classes(x))))
    assert "not judged" not in str(train(lambda y, x: CE(y.softmax(-1), classes(x))))


# ------------------------------------------------------------------------------------------------ CTC, ranges, sorting
class Speech(nn.Module):
    """(rows, times, 8) to (times, rows, classes)."""

    def __init__(self, how: str):
        super().__init__()
        self.body, self.how = nn.Linear(8, CLASSES), how

    def forward(self, x):
        logits = self.body(x.view(4, N // 4, 8)).transpose(0, 1)
        if self.how == "probabilities":
            return logits.softmax(-1)
        return logits.log_softmax(-1) if self.how == "right" else logits


def spoken(answer, x):
    labels, lengths = 1 + torch.arange(12).view(4, 3) % (CLASSES - 1), torch.full((4,), 3)
    return F.ctc_loss(answer, labels, torch.full((4,), N // 4), lengths)


def test_ctc_of_logits():
    report = train(spoken, model=Speech("logits"))
    assert report.root.check == "F3" and report.root.severity == ERROR and "ctc_loss" in report.root.observed, str(
        report
    )
    assert train(spoken, model=Speech("probabilities")).root.check == "F3"
    assert train(spoken, model=Speech("right")).root is None


def boxes(scale: float):
    return lambda answer, x: F.mse_loss(answer, scale * x[:, :CLASSES].abs())


def test_targets_that_no_last_layer_can_reach():
    report = train(boxes(100.0), top=nn.Sigmoid())
    assert report.root.check == "F20" and "sigmoid" in report.root.diagnosis, str(report)
    assert train(lambda answer, x: F.l1_loss(answer, 5 * x[:, :CLASSES]), top=nn.Tanh()).root.check == "F20"
    assert "F20" not in {f.check for f in train(boxes(0.2), top=nn.Sigmoid()).findings}
    assert "F20" not in {f.check for f in train(boxes(100.0)).findings}
    back = train(lambda answer, x: F.mse_loss(100 * answer, 100 * x[:, :CLASSES].abs()), top=nn.Sigmoid())
    assert "F20" not in {f.check for f in back.findings}, "scaled back outside of the model"


def sorted_by_class(change: bool):
    """Batches of one class each: another one in each step, or the same for ever."""
    steps = iter(range(1000))
    return lambda answer, x: F.cross_entropy(answer, torch.full((N,), next(steps) % CLASSES if change else 1))


def two_domains(answer, x):
    """Each domain is one batch, and both are in each step."""
    return F.cross_entropy(answer, torch.zeros(N).long()) + F.cross_entropy(-answer, torch.ones(N).long())


def test_batches_of_one_class():
    report = train(sorted_by_class(change=True))
    assert report.root.check == "F20" and "shuffle" in report.root.fix, str(report)
    for loss_of in (sorted_by_class(change=False), two_domains, lambda answer, x: CE(answer, classes(x))):
        assert "F20" not in {f.check for f in train(loss_of).findings}


def test_a_domain_without_a_row():
    """Of no rows nothing is known, not that they sum to 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 12))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for _ in range(6):
            ids = torch.randint(12, (8, 10))
            parts = [(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()) for x in (ids[:0], ids)]
            optimizer.zero_grad()
            (sum(F.cross_entropy(*part, reduction="sum") for part in parts) / 72).backward()
            optimizer.step()
    assert not report.faults and "F3" not in {f.check for f in report.findings}, str(report)
