"""One thing taken for another, where it was meant. The faults and their mended twins are in judge14 and judge15."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor

from .bench import quiet
from .test_arithmetic import said
from .test_turned import ROWS, net, numbers, watched


def left_alone(loss_of, *parts) -> bool:
    """Nothing is said of a loss of these parts."""
    torch.manual_seed(0)
    report = quiet(lambda: watched(nn.ModuleList(parts), loss_of))
    assert not report.faults, report.faults
    return not said(report)


def shares_of_a_bag(model):
    """The rows of one bag share out its attention, and there is one answer."""
    bag = torch.randn(ROWS, 6)
    weights = model[0](bag).softmax(dim=0)
    return F.binary_cross_entropy_with_logits((weights * model[1](bag)).sum(0), torch.ones(1))


def both_ways(model):
    """All pairs of rows, as in CLIP."""
    logits = model[0](torch.randn(ROWS, 6)) @ model[1](torch.randn(ROWS, 6)).T
    at = torch.arange(ROWS)
    return -(logits.log_softmax(0)[at, at] + logits.log_softmax(1)[at, at]).mean()


def two_views(model):
    """Rows stand twice along dim 0."""
    x, y = numbers()
    return F.mse_loss(model[0](torch.cat([x, x])), torch.cat([y, y])) + F.mse_loss(model[1](x), y)


def value_of_a_reward_model(model):
    """The reward is learned too, by another network."""
    x, y = numbers()
    with torch.no_grad():
        target = y + 0.9 * model[0](x)
    return F.mse_loss(model[0](x), target) + F.mse_loss(model[1](x), y)


def latent_cycle(model):
    """Encoder, decoder and encoder again: the encoder also learns from the first error."""
    x, y = numbers()
    code = model[0](x)
    return F.mse_loss(model[1](code), y.expand(-1, 6)) + 0.1 * F.mse_loss(model[0](model[1](code)), code)


def spread_with_its_price(model):
    x, y = numbers()
    s = model[1](x)
    return ((model[0](x) - y) ** 2 * torch.exp(-s) + s).mean()


def flow(model):
    x = torch.randn(ROWS, 6)
    s, t = model[0](x[:, :3]).tanh(), model[1](x[:, :3])
    z = torch.cat([x[:, :3], x[:, 3:] * s.exp() + t], 1)
    return (0.5 * z.pow(2).sum(1) - s.sum(1)).mean()


def flow_that_divides(model):
    x = torch.randn(ROWS, 6)
    s, t = model[0](x[:, :3]).tanh(), model[1](x[:, :3])
    z = torch.cat([x[:, :3], (x[:, 3:] - t) * torch.exp(-s)], 1)
    return (0.5 * z.pow(2).sum(1) + s.sum(1)).mean()


@pytest.mark.parametrize("loss, outputs", [
    (shares_of_a_bag, (1, 1)), (both_ways, (8, 8)), (two_views, (1, 1)), (value_of_a_reward_model, (1, 1)),
    (latent_cycle, (6, 6)), (spread_with_its_price, (1, 1)),
], ids=lambda f: getattr(f, "__name__", ""))  # fmt: skip
def test_it_was_meant(loss, outputs):
    assert left_alone(loss, *(net(6, out) for out in outputs))


@pytest.mark.parametrize("loss", [flow, flow_that_divides])
def test_a_flow_has_its_scale_and_the_logarithm_the_other_way(loss):
    assert left_alone(loss, net(3, 3), net(3, 3))


def test_an_anchor_is_a_copy_and_the_same_draw_is_an_evaluation():
    torch.manual_seed(0)
    model = net(6, 1)
    anchor = copy.deepcopy(model)

    def loss(m):
        with torch.no_grad():
            torch.manual_seed(1)
            m(torch.randn(ROWS, 6) + torch.randn(ROWS, 6))
        torch.seed()
        x, y = numbers()
        far = sum((p - q.detach()).pow(2).sum() for p, q in zip(m.parameters(), anchor.parameters()))
        return F.mse_loss(m(x), y) + 0.01 * far

    assert not said(quiet(lambda: watched(model, loss)))


class Reading(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.read, self.head = how, nn.GRU(6, 8, batch_first=True, bidirectional=True), nn.Linear(16, 1)

    def forward(self, x):
        output, state = self.read(x)
        if self.how == "last place":
            return self.head(output[:, -1])
        if self.how == "viewed":
            return self.head(state.view(len(x), -1))
        if self.how == "forward half":
            return self.head(torch.cat([output[:, -1, :8], output[:, 0, 8:]], 1))
        return self.head(torch.cat([state[-2], state[-1]], 1))


@pytest.mark.parametrize("how, check", [("last place", "S37"), ("viewed", "F30"), ("forward half", ""), ("states", "")])
def test_both_ways_of_a_recurrent_network(how, check):
    torch.manual_seed(0)
    model = Reading(how)
    report = quiet(lambda: watched(model, lambda m: (m(x := torch.randn(ROWS, 5, 6)) - x[:, 0, :1]).pow(2).mean()))
    assert not report.faults and (report.root.check if report.root else "") == check, f"\n{report}"


class Placed(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.place, self.body = how, nn.Parameter(0.1 * torch.randn(6)), net(6, 1)

    def forward(self, x):
        if self.how == "dropped":
            x + self.place
        elif self.how == "in place":
            x = x.clone()
            x.add_(self.place.detach())
        elif self.how == "for its hooks":
            self.body(x)
        return self.body(x if self.how == "dropped" else x + self.place)


@pytest.mark.parametrize("how", ["dropped", "in place", "for its hooks", "kept"])
def test_a_line_whose_result_is_dropped(how):
    torch.manual_seed(0)
    model = Placed(how)

    def loss(m):
        x, y = numbers()
        return F.mse_loss(m(x), y)

    report = quiet(lambda: watched(model, loss))
    assert not report.faults and ("N37" in said(report)) == (how == "dropped"), f"\n{report}"
    assert report.root is None or report.root.check == "N37"


@pytest.mark.parametrize(
    "call", ["x.clamp(0, 1)", "1 - x", "F.softmax(x, 1)", "torch.sigmoid(x)", "x.to(torch.float64)"]
)
def test_a_dropped_result_is_seen_however_it_is_called(call):
    model = net(6, 1)
    exec(f"def body(x):\n    {call}\n", globals(), space := {})
    report = quiet(lambda: watched(model, lambda m: (space["body"](x := numbers()[0]), m(x).pow(2).mean())[1]))
    assert not report.faults and "N37" in said(report), f"\n{report}"


def test_what_others_functions_drop_is_not_the_programs():
    """Terms are declared, gradients clipped, a distribution asked, each on a line of its own, as in notebook 11."""
    torch.manual_seed(0)
    model = net(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def fit():
        with doctor.watch(model, optimizer=optimizer, steps=3, say=False) as report:
            for _ in range(3):
                x, y = numbers()
                loss = F.mse_loss(model(x), y)
                small = 1e-3 * model(x).pow(2).mean()
                report.terms(loss=loss, small=small)
                torch.distributions.Normal(0.0, 1.0).log_prob(x)
                optimizer.zero_grad()
                (loss + small).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return report

    report = quiet(fit)
    assert not report.faults and report.root is None, f"\n{report}"


def pooled(masked):
    def loss(model):
        lengths = torch.randint(3, 13, (ROWS, 1))
        mask = (torch.arange(12) < lengths)[..., None].float()
        x = torch.randn(ROWS, 12, 6) * mask
        h = model(x).tanh()
        h = (h * mask).mean(1) * 12 / lengths if masked else h.mean(1)
        return (h - x.sum(1)[:, :1] / lengths).pow(2).mean()

    return loss


@pytest.mark.parametrize("masked", [True, False])
def test_a_mean_over_places_leaves_the_padding_out(masked):
    torch.manual_seed(0)
    report = quiet(lambda: watched(nn.Linear(6, 1), pooled(masked)))
    assert not report.faults and said(report) == (set() if masked else {"S25"}), f"\n{report}"


class Heard(nn.Module):
    """Convolutions over time, or a GRU, and a mean."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.net, self.head = how, nn.Conv1d(6, 8, 3, padding=1), nn.Linear(8, 1)
        if how == "recurrent":
            self.net = nn.GRU(6, 8, batch_first=True)

    def forward(self, x, mask):
        h = self.net(x)[0].transpose(1, 2) if self.how == "recurrent" else self.net(x.transpose(1, 2)).relu()
        if self.how == "masked":
            return self.head((h * mask.transpose(1, 2)).sum(-1) / mask.sum(1))
        return self.head(F.adaptive_avg_pool1d(h, 1).squeeze(-1) if self.how == "a layer" else h.mean(-1))


@pytest.mark.parametrize("how", ("a mean", "a layer", "recurrent", "masked", "of one length"))
def test_a_mean_over_time_leaves_the_padding_out(how):
    torch.manual_seed(0)

    def loss(model):
        lengths = torch.randint(3, 13, (ROWS, 1)) if how != "of one length" else torch.full((ROWS, 1), 12)
        mask = (torch.arange(12) < lengths)[..., None].float()
        x = torch.randn(ROWS, 12, 6) * mask
        return (model(x, mask) - x.sum(1)[:, :1] / lengths).pow(2).mean()

    report = quiet(lambda: watched(Heard(how), loss))
    assert not report.faults and ("S25" in said(report)) is (how not in ("masked", "of one length")), f"\n{report}"


def rings(moved: bool):
    """Ten rings of three nodes, and a graph of forty without an edge."""
    ring = torch.tensor([[0, 1, 2], [1, 2, 0]])
    edges = torch.cat([ring + (3 * n if moved else 0) for n in range(10)], 1)
    graph_of = torch.cat([torch.arange(10).repeat_interleave(3), torch.full((40,), 10)])

    def loss(model):
        x = torch.randn(70, 6)
        h = x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        pooled = torch.zeros(11, 1).index_add(0, graph_of, model(h))
        return (pooled - torch.zeros(11, 1).index_add(0, graph_of, x[:, :1])).pow(2).mean()

    return loss


@pytest.mark.parametrize("moved", [True, False])
def test_edges_have_the_offset_of_their_graph(moved):
    torch.manual_seed(0)
    report = quiet(lambda: watched(net(6, 1), rings(moved)))
    assert not report.faults and ("D22" in said(report)) is not moved, f"\n{report}"


def test_two_optimizers_may_share_what_they_do_not_fight_about():
    """An encoder is in the optimizer of the critic and in its own (SAC-AE)."""
    torch.manual_seed(0)
    encoder, head, decoder = net(6, 4), net(4, 1), net(4, 6)
    both = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 1e-3)
    alone = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-3)

    def run():
        with doctor.watch(say=False, steps=8) as report:
            for _ in range(8):
                x, y = numbers()
                for optimizer, part, target in ((both, head, y), (alone, decoder, x)):
                    optimizer.zero_grad()
                    F.mse_loss(part(encoder(x)), target).backward()
                    optimizer.step()
        return report

    assert "S36" not in said(quiet(run))
