"""Programs beside those of judge17 that look like its faults and are right, and its faults in other words."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

import train_doctor as doctor

from .bench import quiet
from .test_arithmetic import said
from .test_turned import ROWS, net, numbers, watched


def clean(report) -> None:
    assert not report.faults and report.root is None, f"\n{report}"


# ------------------------------------------------------------------------------------------------ F91
@pytest.mark.parametrize("given, wrong", [("sigma", True), ("std", True), ("sigma**2", False), ("var", False)])
def test_a_variance_is_told_by_its_name(given, wrong):
    model = net(6, 2)
    scope = {"F": F, "model": model, "numbers": numbers}
    exec(  # a line of a file is read again; this one stands in linecache
        _written(
            "def loss(m):\n"
            "    x, y = numbers()\n"
            "    mean, raw = m(x).chunk(2, 1)\n"
            "    sigma = std = var = F.softplus(raw) + 1e-3\n"
            f"    return F.gaussian_nll_loss(mean, y, {given})\n"
        ),
        scope,
    )
    report = quiet(lambda: watched(model, scope["loss"]))
    assert not report.faults and ("F91" in said(report)) is wrong, f"\n{report}"


@pytest.mark.parametrize(
    "named, wrong", [("var", True), ("variance", True), ("std", False), ("scale", False), ("logvar", False)]
)
def test_a_spread_is_told_by_its_name(named, wrong):
    model = net(6, 2)
    scope = {"F": F, "Normal": Normal, "numbers": numbers}
    exec(
        _written(
            "def loss(m):\n"
            "    x, y = numbers()\n"
            "    mean, raw = m(x).chunk(2, 1)\n"
            f"    {named} = F.softplus(raw) + 1e-3\n"
            f"    return -Normal(mean, {named}).log_prob(y).mean()\n"
        ),
        scope,
    )
    report = quiet(lambda: watched(model, scope["loss"]))
    assert not report.faults and ("F91" in said(report)) is wrong, f"\n{report}"


def _written(text: str):
    import linecache

    name = f"written_{abs(hash(text))}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    return compile(text, name, "exec")


# ------------------------------------------------------------------------------------------------ S38
class Turns(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.cell, self.head = how, nn.GRUCell(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        h, outs = torch.zeros(len(x), 8), []
        if self.how == "played":
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h.detach())
            return self.head(self.cell(x[:, 0], torch.randn(len(x), 8)))
        for t in range(x.shape[1]):
            cut = self.how in ("each", "each asked for") or self.how == "once" and t == 3
            h = self.cell(x[:, t], h.detach() if cut else h)
            outs.append(self.head(h))
        return torch.stack(outs).mean(0) if self.how == "each asked for" else outs[-1]


@pytest.mark.parametrize("how", ["each", "each asked for", "once", "never", "played"])
def test_a_state_that_is_cut_in_each_turn(how):
    torch.manual_seed(0)
    report = quiet(lambda: watched(Turns(how), lambda m: (m(x := torch.randn(ROWS, 6, 4)) - x[:, 0, :1]).pow(2).mean()))
    assert not report.faults and (report.root.check if report.root else "") == ("S38" if how == "each" else ""), (
        f"\n{report}"
    )


# ------------------------------------------------------------------------------------------------ S39
@pytest.mark.parametrize("dim, places, wrong", [(2, 16, True), (-1, 16, True), (1, 16, False), (1, 10, False)])
def test_features_reduced_to_one_for_each_place(dim, places, wrong):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 16), nn.Linear(16, 1)])

    def loss(m):
        x = torch.randn(ROWS, places, 3)
        return (m[1](torch.relu(m[0](x)).max(dim=dim).values) - x[:, :, 0].amax(1, keepdim=True)).pow(2).mean()

    report = quiet(lambda: watched(model, loss))
    assert not report.faults and ("S39" in said(report)) is wrong, f"\n{report}"


# ------------------------------------------------------------------------------------------------ D23
@pytest.mark.parametrize("high, wrong", [(20, True), (50, False), (30, False)])
def test_draws_from_the_range_of_another_table(high, wrong):
    """30 is no table's size: a set of popular items."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(20, 8), nn.Embedding(50, 8)])

    def loss(m):
        user, item = torch.randint(20, (ROWS,)), torch.randint(50, (ROWS,))
        drawn = torch.randint(0, high, (ROWS,))
        return F.softplus((m[0](user) * m[1](drawn)).sum(1) - (m[0](user) * m[1](item)).sum(1)).mean()

    assert ("D23" in said(quiet(lambda: watched(model, loss)))) is wrong


# ------------------------------------------------------------------------------------------------ N38
@pytest.mark.parametrize("how", ["together", "critic first", "cleared", "two losses"])
def test_a_critic_that_steps_on_the_actors_gradients(how):
    torch.manual_seed(0)
    actor, critic = net(6, 2), net(8, 1)
    first, second = (torch.optim.SGD(m.parameters(), 1e-2) for m in (actor, critic))

    def fit():
        with doctor.watch(optimizer=[first, second], steps=8, say=False) as report:
            for _ in range(8):
                x, y = numbers()
                action = torch.tanh(actor(x))
                error = (critic(torch.cat([x, action.detach()], 1)) - y).pow(2).mean()
                second.zero_grad()
                error.backward()
                if how == "critic first":
                    second.step()
                value = critic(torch.cat([x, torch.tanh(actor(x))], 1))
                first.zero_grad()
                ((value - y).pow(2) if how == "two losses" else -value).mean().backward()
                if how == "cleared":  # the critic's own gradients are made again
                    second.zero_grad()
                    (critic(torch.cat([x, action.detach()], 1)) - y).pow(2).mean().backward()
                first.step()
                if how != "critic first":
                    second.step()
        return report

    report = quiet(fit)
    assert not report.faults and ("N38" in said(report)) is (how == "together"), f"\n{report}"


# ------------------------------------------------------------------------------------------------ older rules, wider
@pytest.mark.parametrize("column", [True, False])
def test_scores_of_a_policy_times_a_column_made_on_purpose(column):
    torch.manual_seed(0)

    def loss(m):
        x = torch.randn(ROWS, 6)
        dist = Categorical(logits=m(x))
        taken = dist.sample()
        gain = (taken == (x[:, 0] > 0)).float() - 0.5
        return -(dist.log_prob(taken) * (gain.unsqueeze(-1) if column else gain)).mean()

    assert ("F21" in said(quiet(lambda: watched(net(6, 2), loss)))) is column


@pytest.mark.parametrize("fill", ["nan_to_num", "where", "in place", "masked", "answers"])
def test_targets_that_were_nan(fill):
    torch.manual_seed(0)

    def loss(m):
        x = torch.randn(ROWS, 6)
        y = (x @ torch.ones(6, 3) > 0).float()
        y[torch.rand(ROWS, 3) < 0.4] = math.nan
        known = ~y.isnan()
        if fill == "answers":
            return F.binary_cross_entropy_with_logits(m(x), torch.where(y.isnan(), m(x).sigmoid().detach(), y))
        if fill == "in place":
            y[y.isnan()] = 0.0
        else:
            y = torch.where(y.isnan(), torch.zeros(()), y) if fill == "where" else torch.nan_to_num(y)
        if fill == "masked":
            each = F.binary_cross_entropy_with_logits(m(x), y, reduction="none")
            return (each * known).sum() / known.sum()
        return F.binary_cross_entropy_with_logits(m(x), y)

    report = quiet(lambda: watched(net(6, 3), loss))
    assert not report.faults and ("D18" in said(report)) is (fill not in ("masked", "answers")), f"\n{report}"


@pytest.mark.parametrize("sorted_, wrong", [(False, True), (True, False)])
def test_a_risk_set_without_an_order(sorted_, wrong):
    torch.manual_seed(0)
    table, times = torch.randn(200, 6), torch.rand(200)
    events = (torch.rand(200) < 0.7).float()

    def loss(m):
        at = torch.randint(200, (ROWS,))
        x, time, event = table[at], times[at], events[at]
        if sorted_:
            order = time.argsort(descending=True)
            x, event = x[order], event[order]
        risk = m(x).squeeze(1)
        return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum()

    report = quiet(lambda: watched(net(6, 1), loss))
    assert not report.faults and ("F69" in said(report)) is wrong, f"\n{report}"


@pytest.mark.parametrize("kl, wrong", [(torch.mean, True), (torch.sum, False)])
def test_a_divergence_that_costs_too_little(kl, wrong):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 8), nn.Linear(4, 6)])

    def loss(m):
        x = torch.randn(ROWS, 6)
        mean, logvar = m[0](x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return F.mse_loss(m[1](z), x, reduction="sum") - 0.5 * kl(1 + logvar - mean.pow(2) - logvar.exp())

    assert ("F40" in said(quiet(lambda: watched(model, loss)))) is wrong


class Schedule:
    def __init__(self, peak: float, warmup: int = 20):
        self.peak, self.warmup = peak, warmup

    def factor(self, step: int) -> float:
        return self.peak * min(1.0, (step + 1) / self.warmup)


@pytest.mark.parametrize(
    "factor, wrong",
    [("rate", True), ("one", False), ("long warm-up", False), ("method", True), ("method of one", False)],
)
def test_a_factor_that_is_the_rate_after_a_warm_up(factor, wrong):
    torch.manual_seed(0)
    model = net(6, 1)
    rate = 1e-3
    optimizer = torch.optim.Adam(model.parameters(), rate)
    made = {
        "rate": lambda step: rate * min(1.0, (step + 1) / 20),
        "one": lambda step: min(1.0, (step + 1) / 20),
        "long warm-up": lambda step: min(1.0, (step + 1) * rate),
        "method": Schedule(rate).factor,
        "method of one": Schedule(1.0).factor,
    }
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, made[factor])

    def fit():
        with doctor.watch(model, optimizer=optimizer, steps=8, say=False) as report:
            for _ in range(8):
                x, y = numbers()
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                schedule.step()
        return report

    report = quiet(fit)
    assert not report.faults and ("N9" in said(report)) is wrong, f"\n{report}"


calls = []


def log(step: int) -> float:
    """Of the program's own, with the name of one of math's, and of a number that an object holds."""
    calls.append(step)
    return 1.0


class Counted:
    def __init__(self):
        self.kept, self.log = 0, 1.0

    def factor(self, step: int) -> float:
        self.kept += 1
        return 1.0

    def named(self, step: int) -> float:
        return log(step)


@pytest.mark.parametrize(
    "how",
    ["in the open", "by a name of its own", "by a closure", "inside", "counted", "a method", "a method by a name"],
)
def test_a_factor_that_keeps_a_count_is_not_asked(how):
    """Nothing of the program's is called that would notice."""
    calls.clear()
    model, count, kept = net(6, 1), calls.append, 0
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def counted(step):
        nonlocal kept
        kept += 1
        return 1.0

    factor = {
        "in the open": lambda step: calls.append(step) or 1.0,
        "by a name of its own": lambda step: log(step),
        "by a closure": lambda step: count(step) or 1.0,
        "inside": lambda step: (lambda: calls.append(step) or 1.0)(),
        "counted": counted,
        "a method": (counting := Counted()).factor,
        "a method by a name": counting.named,
    }[how]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def fit():
        with doctor.watch(model, optimizer=optimizer, steps=4, say=False) as report:
            for _ in range(4):
                x, y = numbers()
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                schedule.step()
        return report

    clean(quiet(fit))
    assert {"counted": kept, "a method": counting.kept}.get(how, len(calls)) == 5
    assert how in ("counted", "a method") or calls == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_what_a_closure_does_is_seen(kind, wrong):
    torch.manual_seed(0)
    model = net(6, 1)
    optimizer = kind(model.parameters(), lr=1e-2)

    def closure():
        x, y = numbers()
        optimizer.zero_grad()
        if wrong:
            x.clamp(0, 1)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    def fit():
        with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
            for _ in range(6):
                optimizer.step(closure)
        return report

    report = quiet(fit)
    assert not report.faults and ("N37" in said(report)) is wrong, f"\n{report}"


@pytest.mark.parametrize("copied", [True, False])
def test_an_outer_step_from_weights_that_were_not_copied(copied):
    """Reptile, or Lookahead, with one inner step: the watch sees a few."""
    torch.manual_seed(0)
    model = net(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def fit():
        with doctor.watch(model, optimizer=optimizer, steps=10, say=False) as report:
            for _ in range(6):
                before = {n: t.clone() if copied else t for n, t in model.state_dict().items()}
                x, y = numbers()
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                after = model.state_dict()
                model.load_state_dict({n: before[n] + 0.5 * (after[n] - before[n]) for n in before})
        return report

    report = quiet(fit)
    assert not report.faults and ("S35" in said(report)) is not copied, f"\n{report}"


# ------------------------------------------------------------------------------------------------ F92 to F94, S19
@pytest.mark.parametrize("dims, wrong", [((2, -1), True), ((1, 1), True), ((2, 1), False), ((2,), False)])
def test_the_nearest_of_one_side_twice(dims, wrong):
    def loss(m):
        made, wanted = m(torch.randn(ROWS, 6)).view(ROWS, 4, 3), torch.randn(ROWS, 5, 3)
        d = torch.cdist(made, wanted)
        return sum(d.min(dim=dim).values.mean() for dim in dims)

    report = quiet(lambda: watched(net(6, 12), loss))
    assert not report.faults and ("F92" in said(report)) is wrong, f"\n{report}"


@pytest.mark.parametrize(
    "how, wrong", [("whole", True), ("detached", False), ("a part", False), ("codes detached", True)]
)
def test_a_straight_through_that_cancels(how, wrong):
    model = nn.ModuleList([net(6, 4), net(4, 6)])

    def loss(m):
        x = torch.randn(ROWS, 6)
        z = m[0](x)
        step = (z.round() if how == "codes detached" else z.tanh()) - z
        z = z + (step.detach() if how == "detached" else 0.5 * step if how == "a part" else step)
        return F.mse_loss(m[1](z), x)

    report = quiet(lambda: watched(model, loss))
    assert not report.faults and ("F93" in said(report)) is wrong, f"\n{report}"


@pytest.mark.parametrize(
    "rows, labels, wrong", [("halves", "^1", True), ("halves", "+n", False), ("turns", "^1", False)]
)
def test_partners_of_two_views(rows, labels, wrong):
    torch.manual_seed(0)

    def loss(m):
        x = torch.randn(ROWS, 6)
        one, two = (F.normalize(m(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        z = torch.cat([one, two]) if rows == "halves" else torch.stack([one, two], 1).flatten(0, 1)
        alike = (z @ z.T / 0.2).masked_fill(torch.eye(2 * ROWS, dtype=torch.bool), -1e9)
        at = torch.arange(2 * ROWS)
        return F.cross_entropy(alike, at ^ 1 if labels == "^1" else (at + ROWS) % (2 * ROWS))

    report = quiet(lambda: watched(net(6, 4), loss))
    assert not report.faults and ("F94" in said(report)) is wrong, f"\n{report}"


class Table(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.body, self.how = net(6, 1), how
        table = nn.Parameter(0.1 * torch.randn(6))
        self.kept = table if how == "registered" else table.unsqueeze(0)
        if how == "of its own":
            self.table = table

    def forward(self, x):
        return self.body(x + self.kept)


@pytest.mark.parametrize("how", ["registered", "made", "of its own"])
def test_what_is_made_of_a_parameter_is_none(how):
    """A graph of a view of a weight lives on from step to step, so of its own means: the weight is registered too."""
    report = quiet(lambda: watched(Table(how), lambda m: (m((b := numbers())[0]) - b[1]).pow(2).mean()))
    assert not report.faults and ("S19" in said(report)) is (how == "made"), f"\n{report}"


# ------------------------------------------------------------------------------------------------ no fault of our own
def test_masks_and_flags_of_no_dimensions():
    """torch.where of a whole batch by one draw, and a number that is a tensor, beside what the watchers follow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 1))

    def loss(m):
        x = torch.randn(ROWS, 1, 8, 8)
        x = torch.where(torch.rand(()) < 0.5, x.flip(-1), x)
        x[:, :, :2] = 0.0
        risk, event = m(x).squeeze(1), (torch.arange(ROWS) % 2).float()
        return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() * torch.tensor(0.5)

    report = quiet(lambda: watched(model, loss))
    assert not report.faults, report.faults


class QuantLinear(nn.Linear):
    """Quantisation-aware training: the weight is trained as it is, and rounded on its way."""

    def forward(self, x):
        scale = self.weight.detach().abs().max() / 7
        rounded = (self.weight / scale).round() * scale
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


def test_a_layer_that_only_rounds_is_not_packed():
    torch.manual_seed(0)
    model = nn.Sequential(QuantLinear(6, 16), nn.Tanh(), QuantLinear(16, 1))
    report = quiet(lambda: watched(model, lambda m: (m((b := numbers())[0]) - b[1]).pow(2).mean()))
    clean(report)


# ------------------------------------------------------------------------------------------------ conditions of rules
def test_a_tensor_beside_a_difference_of_others():
    model = nn.ModuleList([net(6, 4), net(6, 4), net(4, 1)])

    def loss(m):
        x, y = numbers()
        one, two = m[0](x), m[1](x)
        return F.mse_loss(m[2](one + (one.tanh() - two)), y)

    clean(quiet(lambda: watched(model, loss)))


def test_one_number_for_each_place_is_meant_where_the_sizes_differ():
    model = nn.ModuleList([nn.Linear(3, 16), nn.Linear(10, 1)])

    def loss(m):
        x = torch.randn(ROWS, 10, 3)
        return (m[1](m[0](x).mean(dim=2)) - x[:, 0, :1]).pow(2).mean()

    assert "S39" not in said(quiet(lambda: watched(model, loss)))


def test_two_optimizers_of_one_chain_that_both_want_its_answer():
    torch.manual_seed(0)
    parts = net(6, 4), net(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in parts]

    def fit():
        with doctor.watch(optimizer=optimizers, steps=8, say=False) as report:
            for _ in range(8):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                (-parts[1](torch.tanh(parts[0](numbers()[0])))).mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
        return report

    assert "N38" not in said(quiet(fit))


def test_a_sum_that_is_divided_by_the_rows_is_beside_a_mean_of_divergences_a_choice():
    model = nn.ModuleList([nn.Linear(6, 8), nn.Linear(4, 6)])

    def loss(m):
        x = torch.randn(ROWS, 6)
        mean, logvar = m[0](x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        rebuilt = F.mse_loss(m[1](z), x, reduction="sum") / ROWS
        return rebuilt - 0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).mean()

    assert "F40" not in said(quiet(lambda: watched(model, loss)))


def pictures(targets_too: str):
    def loss(m):
        x = torch.randn(ROWS, 1, 8, 8)
        y = (x > 0).float()
        rows = []
        for a, b in zip(x, y):
            one, two = torch.rand(2) < 0.5
            rows.append((a.flip(-1) if one else a, b.flip(-1) if targets_too == "drawn" and two else b))
        x, y = (torch.stack(part) for part in zip(*rows))
        return F.binary_cross_entropy_with_logits(m(x), y)

    return loss


@pytest.mark.parametrize("targets_too, wrong", [("drawn", "draws its own"), ("never", "targets are not")])
def test_which_of_both_was_flipped_is_told(targets_too, wrong):
    report = quiet(lambda: watched(nn.Conv2d(1, 1, 3, padding=1), pictures(targets_too)))
    assert report.root is not None and report.root.check == "D14" and wrong in report.root.diagnosis, f"\n{report}"


def test_a_part_of_flipped_pictures_may_be_blotted_out():
    """And a number that stays behind is seen all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 60, 1))

    def loss(m):
        at, rows = torch.rand(64) * 1.6 - 0.8, []
        columns = torch.linspace(-1, 1, 12)
        for x in torch.exp(-((columns - at[:, None]) ** 2) / 0.05)[:, None, None].expand(-1, 1, 8, -1):
            rows.append(x.flip(-1) if torch.rand(()) < 0.5 else x)
        x = torch.stack(rows)
        x[:, :, :2] = 0.0
        return F.mse_loss(m(x), at[:, None])

    assert "D19" in said(quiet(lambda: watched(model, loss)))


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.GRU(6, 8, batch_first=True, bidirectional=True), nn.Linear(16, 1)

    def forward(self, x):
        output, state = self.lstm(x)
        last = output[:, -1]
        return self.head(torch.cat([last[:, :8], state[-1]], 1))


def test_a_half_of_the_last_place_beside_the_state_of_the_other_way():
    report = quiet(lambda: watched(Halves(), lambda m: (m(x := torch.randn(ROWS, 5, 6)) - x[:, 0, :1]).pow(2).mean()))
    clean(report)


class Own(torch.optim.SGD):
    """An optimizer of the program's own, which computes something for nothing, before and after its closure."""

    def step(self, closure):
        for p in self.param_groups[0]["params"] if self.before else ():
            p.detach().clamp(0, 1)
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            p.grad.clamp(0, 1)
        return super().step()


@pytest.mark.parametrize("came", [True, False])
def test_what_an_optimizer_does_is_not_the_loops(came):
    """Before a closure only where the first backward came already (SAM), after one in any case."""
    torch.manual_seed(0)
    model = net(6, 1)
    optimizer = Own(model.parameters(), lr=1e-2)
    optimizer.before = came

    def closure():
        x, y = numbers()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    def fit():
        with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
            for _ in range(6):
                if came:
                    closure()
                optimizer.step(closure)
        return report

    report = quiet(fit)
    assert not report.faults and "N37" not in said(report), f"\n{report}"


def test_a_warm_up_says_nothing_of_the_steps_to_come():
    torch.manual_seed(0)

    def fit(rising):
        model = net(6, 64).to(torch.bfloat16)
        optimizer = torch.optim.Adam(model.parameters(), 5e-4)
        made = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + 0.1 * step * rising)
        with doctor.watch(model, optimizer=optimizer, steps=4, say=False) as report:
            for _ in range(4):
                x = torch.randn(ROWS, 6)
                optimizer.zero_grad()
                F.mse_loss(model(x.bfloat16()).float(), x.repeat(1, 11)[:, :64]).backward()
                optimizer.step()
                made.step()
        return report

    assert "N4" in said(quiet(lambda: fit(0))) and "N4" not in said(quiet(lambda: fit(1)))


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = net(6, 1), None

    def forward(self, x, factor):
        self.last = self.body(x).tanh().sigmoid().tanh().sigmoid().tanh() * factor
        return self.last


def test_an_answer_that_is_remembered_is_no_parameter():
    torch.manual_seed(0)
    model, factor = Remembering(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), factor], 1e-2)

    def fit():
        with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
            for _ in range(6):
                x, y = numbers()
                optimizer.zero_grad()
                F.mse_loss(model(x, factor), y).backward()
                optimizer.step()
        return report

    assert "S19" not in said(quiet(fit))
