"""Objectives, curriculum and router: float64 references, sums that add up, state that resumes, and the collapse."""

import copy
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FP32
from torch import nn
from torch.nn import functional as F

from nblib import compiling, losses, models, runtime, text, train, wiring
from nblib.methods import alignment, loss_weights, objectives
from nblib.methods.loss_weights import Curriculum, Router
from nblib.methods.objectives import Objective

EVERY = {"ce": 1.0, "logits": 2.0, "hidden": 0.5, "masked": 0.3}
MASK = 255  # no token of the streams below


def _student(seed: int = 0) -> nn.Module:
    return models.tiny(256, hidden=32, layers=2, heads=2, seed=seed)


def _teacher() -> nn.Module:
    return models.as_teacher(_student(seed=9))


def _objective(weights=None, **options) -> Objective:
    return Objective(weights or EVERY, **(dict(teacher=_teacher(), temperature=2.0, mask_id=MASK) | options))


def _ragged(rows: int, length: int = 32) -> dict:
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(250, (rows, length), generator=draw)
    labels = ids.clone()
    for i in range(rows):
        labels[i, : (i * 5) % (length - 2)] = losses.IGNORED
    return {"input_ids": ids, "labels": labels}


def _batches(rows: int = 4):
    steps = torch.randint(1, 4, (20_000,), generator=torch.Generator().manual_seed(1))
    return text.Batches(steps.cumsum(0) % 250, rows=rows, length=32)


# ---------------------------------------------------------------- each loss against its definition, in float64


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_logit_distillation_is_t_squared_kl_over_the_supervised_rows(temperature):
    labels = _ragged(4, 12)["labels"]
    h, w = torch.randn(4, 12, 16, dtype=torch.float64), torch.randn(53, 16, dtype=torch.float64)
    th, tw = torch.randn(4, 12, 9, dtype=torch.float64), torch.randn(53, 9, dtype=torch.float64)
    h.requires_grad_()
    ours = objectives.logit_distillation(h, w, th, tw, labels, temperature=temperature)
    plain = 0
    for b, t in itertools.product(range(4), range(11)):
        if labels[b, t + 1] != losses.IGNORED:
            p = torch.distributions.Categorical(logits=(tw @ th[b, t]) / temperature)
            q = torch.distributions.Categorical(logits=(w @ h[b, t]) / temperature)
            plain = plain + temperature**2 * torch.distributions.kl_divergence(p, q)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(*(torch.autograd.grad(x, h)[0] for x in (ours, plain)))


def test_the_gradient_keeps_its_size_at_high_temperature():
    """T^2 KL tends to half the squared distance of centred logits over V: the gradient has a limit, it does not die."""
    labels = torch.zeros(2, 6, dtype=torch.long)
    h = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    w, th, tw = (torch.randn(*shape, dtype=torch.float64) for shape in ((53, 16), (2, 6, 9), (53, 9)))
    logits, wanted = h[:, :-1] @ w.T, th[:, :-1] @ tw.T
    apart = (logits - logits.mean(-1, keepdim=True)) - (wanted - wanted.mean(-1, keepdim=True))
    limit = torch.autograd.grad(apart.square().sum() / (2 * 53), h)[0]
    for temperature in (1e3, 1e5):
        value = objectives.logit_distillation(h, w, th, tw, labels, temperature=temperature)
        gradient = torch.autograd.grad(value, h)[0]
        assert float((gradient - limit).norm() / limit.norm()) < 30 / temperature


def _one(kind: str, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The distance of two vectors, written out."""
    if kind == "mse":
        return ((s - t) ** 2).sum() / len(s)
    if kind == "relative":
        return ((s - t) ** 2).sum() / (t @ t)
    if kind == "normalised":
        return ((s / s.norm() - t / t.norm()) ** 2).sum() / len(s)
    return 1 - (s @ t) / (s.norm() * t.norm())


@pytest.mark.parametrize("kind", list(alignment.DISTANCES))
@pytest.mark.parametrize("weights", ["uniform", "progressive", "exponential", [0.0, 2.0, 6.0]])
def test_hidden_distillation_equals_the_definition(kind, weights):
    labels = _ragged(3, 10)["labels"]
    student = [torch.randn(3, 10, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    teacher = [torch.randn(3, 10, 8, dtype=torch.float64) for _ in range(3)]
    share = {"uniform": [1, 1, 1], "progressive": [1, 2, 3], "exponential": [2, 4, 8]}.get(str(weights), weights)
    plain = sum(
        share[k] / sum(share) * _one(kind, student[k][b, t], teacher[k][b, t])
        for k, b, t in itertools.product(range(3), range(3), range(9))
        if labels[b, t + 1] != losses.IGNORED
    )
    ours = alignment.hidden_distillation(student, teacher, labels, kind=kind, weights=weights)
    torch.testing.assert_close(ours, plain)
    last = torch.autograd.grad(ours, student[2], retain_graph=True)[0]
    torch.testing.assert_close(last, torch.autograd.grad(plain, student[2])[0])
    assert last[:, -1].abs().max() == 0 and last[:, 0].abs().max() > 0  # the last position predicts nothing


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_states_compared_are_those_of_transformers_without_the_embedding(family):
    student, teacher = (models.tiny(256, family=family, hidden=32, layers=3, heads=2, seed=i) for i in range(2))
    student, teacher, batch = student.eval(), models.as_teacher(teacher), _ragged(2)
    ids = {"input_ids": batch["input_ids"], "output_hidden_states": True}
    theirs = [copy.deepcopy(m)(**ids).hidden_states[1:] for m in (student, teacher)]  # its hooks would stay
    plain = alignment.hidden_distillation(*theirs, batch["labels"])
    loss = _objective({"hidden": 1}, teacher=teacher)
    torch.testing.assert_close(loss(student, batch)["hidden"], plain)


def test_normalised_is_cosine_over_half_the_width():
    s, t = torch.randn(5, 8), torch.randn(5, 8)
    torch.testing.assert_close(alignment.DISTANCES["normalised"](s, t) * 4, alignment.DISTANCES["cosine"](s, t))


# ---------------------------------------------------------------- masking


def test_masking_spares_special_tokens_and_has_its_rate():
    ids, special = torch.randint(40, (200, 500)), [0, 3, 7]
    for probability in (0.15, 0.6):
        masked, chosen = objectives.mask_tokens(ids, mask_id=39, probability=probability, special_ids=special)
        maskable = ~torch.isin(ids, torch.tensor([*special, 39]))
        assert not (chosen & ~maskable).any() and (masked[chosen] == 39).all()
        assert torch.equal(masked[~chosen], ids[~chosen])
        n = int(maskable.sum())
        deviation = math.sqrt(n * probability * (1 - probability))
        assert abs(int(chosen.sum()) - n * probability) < 5 * deviation
        halves = [chosen[:100].sum() / maskable[:100].sum(), chosen[:, :250].sum() / maskable[:, :250].sum()]
        assert all(abs(float(h) - probability) < 10 * deviation / n for h in halves)  # nowhere more than elsewhere
    all_of_it, chosen = objectives.mask_tokens(ids, mask_id=39, probability=1.0, among=ids > 20)
    assert torch.equal(chosen, (ids > 20) & (ids != 39))


def test_a_masked_token_is_predicted_from_the_position_before_it():
    """Against the model's own logits on the masked ids, token by token; unsupervised tokens stay visible."""
    model, batch = _student().double(), _ragged(12, 16)
    batch["labels"][::2] = batch["input_ids"][::2]  # supervised from the first token on
    state = torch.get_rng_state()
    ours = objectives.masked_tokens(model, batch, mask_id=MASK, probability=0.4, special_ids=[5])
    torch.set_rng_state(state)
    draw = torch.rand(12, 16)
    ids, labels = batch["input_ids"], batch["labels"]
    chosen = [
        (b, i)
        for b, i in itertools.product(range(12), range(1, 16))
        if draw[b, i] < 0.4 and ids[b, i] != 5 and labels[b, i] != losses.IGNORED
    ]
    seen = ids.clone()
    for b, i in chosen:
        seen[b, i] = MASK
    logits = model(input_ids=seen).logits
    plain = sum(F.cross_entropy(logits[b, i - 1], ids[b, i]) for b, i in chosen) / 0.4
    torch.testing.assert_close(ours, plain)


def test_dividing_by_the_probability_estimates_the_sum_over_all_maskable_tokens():
    """Only the last token can be masked, and no position that predicts it sees it: its loss does not depend on the
    mask, so the estimate has a known mean and deviation, and the two complementary views have the sum itself."""
    model = _student()
    ids = torch.randint(250, (600, 8))
    labels = torch.full_like(ids, losses.IGNORED)
    labels[:, -1] = ids[:, -1]
    batch = {"input_ids": ids, "labels": labels}
    with torch.no_grad():
        each = F.cross_entropy(model(input_ids=ids).logits[:, -2], ids[:, -1], reduction="none")
        for p in (0.15, 0.5):
            estimate = objectives.masked_tokens(model, batch, mask_id=MASK, probability=p)
            deviation = float((each.square().sum() * (1 - p) / p).sqrt())
            assert 0 < abs(float(estimate - each.sum())) < 4 * deviation
            both = objectives.masked_tokens(model, batch, mask_id=MASK, probability=p, complementary=True)
            torch.testing.assert_close(both, each.sum(), rtol=1e-5, atol=1e-3)


def test_nothing_masked_or_supervised_adds_zero_with_a_graph():
    model, batch = _student(), _ragged(2)
    batch["labels"] = torch.full_like(batch["labels"], losses.IGNORED)
    terms = _objective()(model, batch)
    assert set(terms) == set(EVERY) and all(float(t.detach()) == 0 for t in terms.values())
    sum(terms.values()).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_mask_id_must_be_a_special_token():
    tokenizer = text.train_tokenizer(["the mask is a token of its own"] * 20, vocab_size=300)
    special = objectives.check_mask_id(tokenizer, tokenizer.mask_token_id)
    assert special == sorted([tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id])
    ordinary = tokenizer.convert_tokens_to_ids("!")
    with pytest.raises(
        ValueError, match=rf"mask_id = {ordinary} is the ordinary token '!': allowed are .*{special[0]}"
    ):
        objectives.check_mask_id(tokenizer, ordinary)
    for outside in (-1, len(tokenizer), None):
        with pytest.raises(ValueError, match="not in the vocabulary"):
            objectives.check_mask_id(tokenizer, outside)


# ---------------------------------------------------------------- in the loop


def _gradient(loss, size: int, **options) -> tuple[dict, torch.Tensor]:
    """One step over the same eight ragged rows in micro-batches of `size`; SGD at rate 1 shows the gradient."""
    runtime.seed_all(3)  # the same masks: they are drawn row after row
    model, whole = _student(), _ragged(8)
    micro = [{k: v[i : i + size] for k, v in whole.items()} for i in range(0, 8, size)]
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    options = dict(total=1, accumulate=len(micro), machine=FP32, clip=0, loss=loss) | options
    record = train.fit(model, iter(micro), sgd, **options)[0]
    return record, before - torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("weights", [*({n: w} for n, w in EVERY.items()), EVERY], ids=[*EVERY, "all"])
def test_micro_batches_add_up_to_the_large_batch(weights):
    loss = _objective(weights)
    record, gradient = _gradient(loss, 8)
    assert gradient.norm() > 1e-3
    means = loss.seen()
    for size in (4, 1):
        other, other_gradient = _gradient(loss, size)
        assert all(abs(other[n] - record[n]) / record[n] < 1e-5 for n in weights)
        assert float((gradient - other_gradient).norm() / gradient.norm()) < 2e-5
        assert loss.seen() == pytest.approx(means, rel=1e-5)


def test_what_is_logged_without_weights_is_what_was_trained_on():
    loss, model, batch = _objective(), _student(), _ragged(4)
    terms = {n: float(t.detach()) for n, t in loss(model, batch).items()}
    seen, n = loss.seen(), int(losses.supervised(batch["labels"]))
    assert all(seen[name] * EVERY[name] * n == pytest.approx(terms[name], rel=1e-5) for name in EVERY)
    assert all(seen[f"weight_{name}"] == pytest.approx(EVERY[name], rel=1e-5) for name in EVERY)
    assert seen["ce"] == pytest.approx(float(model(**batch).loss.detach()), rel=1e-5)
    model.eval()
    loss(model, batch)
    assert loss.seen() == {}  # asking empties it, and evaluation does not count


def test_one_forward_pass_is_shared_and_what_has_no_weight_is_not_computed():
    model, teacher, calls = _student(), _teacher(), []
    model.model.register_forward_hook(lambda *_: calls.append("student"))
    teacher.model.register_forward_hook(lambda *_: calls.append("teacher"))

    def asked(weights, **options) -> list[str]:
        calls.clear()
        _objective(weights, teacher=teacher, **options)(model, _ragged(2))
        return sorted(calls)

    assert asked({"ce": 1, "logits": 1, "hidden": 1}) == ["student", "teacher"]
    assert asked({"ce": 1, "logits": 0, "hidden": 0, "masked": 0}) == ["student"]
    assert asked({"masked": 1}) == ["student"]
    assert asked({"ce": 1, "masked": 1}, complementary=True) == ["student", "student"]
    model.mixer = Curriculum([(0.5, {"ce": 1}), (1, {"logits": 1})], total=4)
    assert asked(model.mixer) == asked(model.mixer) == ["student"]  # the teacher is not run before its phase
    assert asked(model.mixer) == asked(model.mixer) == ["student", "teacher"]


def test_the_teacher_gets_no_gradient_and_stays_as_it_is():
    model, teacher, graphs = _student(), _teacher(), []
    teacher.model.register_forward_hook(lambda _, inputs, out: graphs.append(out.last_hidden_state.requires_grad))
    before = copy.deepcopy(teacher.state_dict())
    loss = _objective(teacher=teacher)
    train.fit(model, _batches(), train.adamw(model, lr=1e-3), total=3, machine=FP32, loss=loss)
    assert graphs == [False] * 3 and not teacher.training and all(p.grad is None for p in teacher.parameters())
    assert all(torch.equal(t, before[n]) for n, t in teacher.state_dict().items())
    wider = models.as_teacher(models.tiny(257, hidden=32, layers=2, heads=2))
    model.tutor = models.as_teacher(_student())
    for wrong, match in (
        (teacher.train(), "training mode"),
        (_student().eval(), "not frozen"),
        (wider, "student scores 256 tokens, the teacher 257"),
        (model, "inside the student"),
        (model.tutor, "inside the student"),
    ):
        with pytest.raises(ValueError, match=match):
            _objective(teacher=wrong)(model, _ragged(2))


def _compiled(model: nn.Module) -> list[int]:
    """Compile the blocks with a backend that runs the graphs as they are; per graph, how often it ran."""
    ran = []

    def backend(graph, inputs):
        at = len(ran)
        ran.append(0)

        def run(*args):
            ran[at] += 1
            return graph(*args)

        return run

    compiling.compile_blocks(model, backend=backend)
    return ran


@pytest.mark.parametrize("way", ["checkpointed", "compiled", "both"])
def test_gradients_are_those_of_plain_blocks(way):
    """Every layer's states come out of recomputed and of compiled blocks, and every block runs as one graph."""

    def gradients(prepare: bool) -> list[torch.Tensor]:
        runtime.seed_all(3)
        torch._dynamo.reset()
        model, batch, loss = _student(), _ragged(4), _objective({"ce": 1.0, "logits": 2.0, "hidden": 0.5})
        if prepare and way != "compiled":
            compiling.checkpoint_blocks(model)
        ran = _compiled(model) if prepare and way != "checkpointed" else None
        losses.causal_lm(model, batch)  # compiled before anybody asks for the layers
        for _ in range(2):
            model.zero_grad()
            sum(loss(model, batch).values()).backward()
        losses.causal_lm(model, batch)
        assert ran is None or ran == [4 * 2], ran  # four forward passes, two blocks, one graph for both
        return [p.grad for p in model.parameters()]

    for plain, other in zip(gradients(False), gradients(True), strict=True):
        assert plain.norm() > 0 and float((plain - other).norm() / plain.norm()) < 1e-5


def test_bf16_trains_on_everything_with_a_router():
    model = _student()
    adam = train.adamw(model, lr=1e-2)
    model.mixer = Router(list(EVERY))
    loss = _objective(router=model.mixer)
    both = [adam, train.adamw(model.mixer, lr=1e-3, weight_decay=0.0)]
    train.fit(model, _batches(), both, total=10, machine=runtime.pick("cpu", "bf16"), loss=loss)
    first = loss.seen()
    train.fit(model, _batches(), both, total=30, machine=runtime.pick("cpu", "bf16"), loss=loss)
    last = loss.seen()
    assert all(math.isfinite(v) for v in last.values()) and all(last[n] < first[n] for n in EVERY)


# ---------------------------------------------------------------- curriculum


def test_curriculum_values():
    a, b, c = {"ce": 1.0}, {"ce": 0.5, "logits": 2.0}, {"logits": 1.0}
    made = {how: Curriculum([(0.25, a), (0.75, b), (1, c)], total=100, how=how) for how in ("step", "linear", "cosine")}
    for how, at in made.items():  # a phase starts at its own weights, whatever the way to the next
        starts = (at.at(s) for s in (0.0, 0.25, 0.75))
        assert [[w.get(n, 0) for n in ("ce", "logits")] for w in starts] == [[1, 0], [0.5, 2], [0, 1]], how
        assert at.at(0.99) == at.at(1.0) == at.at(7.0)
    assert made["step"].at(0.2499)["ce"] == 1.0
    assert made["linear"].at(0.125) == {"ce": 0.75, "logits": 1.0}
    assert made["linear"].at(0.65)["ce"] == pytest.approx(0.1) and made["linear"].at(0.65)["logits"] == pytest.approx(
        1.2
    )
    third = 0.25 / 3
    assert made["cosine"].at(third)["logits"] == pytest.approx(2 * 0.25)  # (1 - cos 60 degrees) / 2
    assert made["cosine"].at(0.125)["ce"] == pytest.approx(0.75)


def test_curriculum_moves_once_per_optimizer_step_and_not_in_evaluation():
    model = _student()
    adam = train.adamw(model, lr=1e-3)
    phases = [(0.5, {"ce": 1.0}), (1, {"ce": 3.0})]
    model.mixer = Curriculum(phases, total=6, accumulate=2, how="linear")
    loss = _objective(model.mixer)

    def evaluate() -> dict:
        model.eval()
        return {"weight": float(sum(loss(model, _ragged(1)).values()).detach())}

    weights = []
    options = dict(total=6, accumulate=2, machine=FP32, loss=loss, evaluate=evaluate, eval_every=1)
    train.fit(model, _batches(), adam, **options, on_step=lambda _: weights.append(loss.seen()["weight_ce"]))
    assert weights == pytest.approx([1, 1 + 2 / 3, 1 + 4 / 3, 3, 3, 3])
    assert int(model.mixer.micro_batches) == 12


# ---------------------------------------------------------------- router


def _router(k: int = 2, **options) -> Router:
    return Router([f"l{i}" for i in range(k)], **options)


def test_router_total_and_gradients_equal_the_formula():
    router = _router(3, penalty=0.2, normalise="none", learns="total").double()
    l = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    mixed, spread, weights = router(l)
    w = F.softmax(router.net(l.detach()), dim=0)
    order = (w * l).sort().values
    total = (w * l).sum() + 0.2 * (order.diff().sum())  # the write-up's sum of gaps of the sorted losses
    leaves = [l, *router.parameters()]
    torch.testing.assert_close(mixed.sum() + spread, total)
    for ours, plain in zip(torch.autograd.grad(mixed.sum() + spread, leaves), torch.autograd.grad(total, leaves)):
        torch.testing.assert_close(ours, plain)
    assert torch.equal(weights, w.detach()) and float(weights.sum()) == pytest.approx(1)


def test_learning_the_spread_keeps_the_two_levels_apart():
    router = _router(2, penalty=0.2, normalise="none", learns="spread")
    l = torch.tensor([3.0, 1.0], requires_grad=True)
    mixed, spread, weights = router(l)
    assert torch.equal(torch.autograd.grad(mixed.sum(), l)[0], weights)  # the model sees the weighted sum ...
    mixed, spread, _ = router(l)
    assert set(torch.autograd.grad(mixed.sum(), list(router.parameters()), allow_unused=True)) == {None}
    assert torch.autograd.grad(spread, l, allow_unused=True, retain_graph=True)[0] is None  # ... the weights the spread
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(spread, list(router.parameters())))


@pytest.mark.parametrize("penalty", [0.1, 0.3, 0.5])
def test_the_published_router_collapses_beyond_its_threshold(penalty):
    threshold = (1 + penalty) / (1 - penalty)
    ratios = [0.9 * threshold, 1.1 * threshold]
    inside, outside = loss_weights.phase_diagram(
        ratios, [penalty], normalise="none", learns="total", steps=800
    ).flatten()
    print(f"penalty {penalty}, threshold {threshold:.3f}: w1 {inside:.3f} at {ratios[0]:.2f}, {outside:.4f} beyond")
    assert abs(float(inside) - 1 / (1 + ratios[0])) < 0.03  # at the balance w1 l1 = w2 l2
    assert float(outside) < 0.01


CONSTANT, APART = [1.5, 3.0, 10.0], dict(falls=(0.0, 3.0))  # ratios, and a second loss that falls twenty-fold


def test_dividing_by_the_first_value_only_hides_the_threshold():
    options = dict(normalise="initial", learns="total")
    assert (loss_weights.phase_diagram(CONSTANT, [0.1], **options) - 0.5).abs().max() < 0.02
    assert loss_weights.phase_diagram([1.0], [0.1], **options, **APART) < 0.01


@pytest.mark.slow
def test_dividing_by_the_running_mean_helps_while_losses_change_slowly():
    options = dict(normalise="running", learns="total", **APART)
    fast, slow = (loss_weights.phase_diagram([3.0], [0.1], steps=n, **options) for n in (400, 2000))
    assert fast < 0.01 and slow > 0.45


def test_learning_the_spread_alone_does_not_collapse():
    balance = loss_weights.phase_diagram(CONSTANT, [0.1, 0.5], normalise="none", learns="spread", steps=800)
    torch.testing.assert_close(balance, (1 / (1 + torch.tensor(CONSTANT)))[:, None].expand(-1, 2), atol=0.01, rtol=0)
    for falls in ((0.0, 3.0), (3.0, 0.0), (0.0, 0.0)):  # the default normalises by the running mean as well
        weights = loss_weights.phase_diagram(CONSTANT, [0.1], falls=falls)
        assert weights.min() > 0.35 and weights.max() < 0.65


def test_the_diagram_is_made_by_the_router_itself():
    """One cell under vmap is the same module stepped by hand."""
    options = dict(normalise="running", learns="total")
    ours = loss_weights.phase_diagram([1.0, 1.4], [0.3, 0.1], steps=40, falls=(0.0, 1.0), seed=4, **options)[1, 0]
    runtime.seed_all(4)
    router = Router(("one", "two"), penalty=0.3, **options)
    adam, late = torch.optim.Adam(router.parameters(), lr=3e-3), []
    for step in range(40):
        mixed, spread, weights = router(torch.tensor([1.4, math.exp(-step / 40)]))
        late.append(weights[0])
        adam.zero_grad()
        (mixed.sum() + spread).backward()
        adam.step()
    torch.testing.assert_close(ours, torch.stack(late[-2:]).mean(), rtol=1e-4, atol=1e-5)


def test_absent_losses_take_no_weight():
    router = _router(3, normalise="none", learns="total")
    mixed, spread, weights = router(torch.tensor([2.0, 0.0, 1.0]))
    assert weights[1] == 0 and float(weights.sum()) == pytest.approx(1) and mixed[1] == 0
    alone, spread, weights = router(torch.tensor([0.0, 4.0, 0.0]))
    assert weights.tolist() == [0, 1, 0] and alone.tolist() == [0, 4, 0] and spread == 0
    nothing, spread, _ = router(torch.zeros(3))
    assert not nothing.any() and spread == 0  # and not NaN
    router = _router(2, normalise="running")
    for values in ([2.0, 0.0], [4.0, 0.0], [4.0, 5.0]):
        router(torch.tensor(values))
    assert router.scale.tolist() == pytest.approx([0.98 * (0.98 * 2 + 0.02 * 4) + 0.02 * 4, 5.0])
    router.eval()(torch.tensor([9.0, 9.0]))
    assert router.scale[1] == 5.0


def _routed(accumulate: int = 1, curriculum: bool = False, **router):
    runtime.seed_all(0)
    model = _student()
    adam = train.adamw(model, lr=1e-3)
    model.mixer = Router(list(EVERY), **router)
    weights = EVERY
    if curriculum:
        phases = [(0.4, {"ce": 1.0}), (0.8, {"ce": 1.0, "hidden": 1.0, "masked": 0.5}), (1.0, EVERY)]
        weights = model.phases = Curriculum(phases, total=10, accumulate=accumulate, how="cosine")
    own = torch.optim.Adam(model.mixer.parameters(), lr=1e-3)
    return model, [adam, own], _objective(weights, router=model.mixer)


def test_the_router_steps_once_per_optimizer_step_and_is_clipped_with_the_model():
    model, optimizers, loss = _routed(normalise="none", learns="total")
    before = copy.deepcopy(model.mixer.state_dict())
    options = dict(accumulate=4, machine=FP32, clip=1e-3)
    records = train.fit(model, _batches(1), optimizers, total=3, loss=loss, **options)
    assert {int(state["step"]) for state in optimizers[1].state.values()} == {3}
    assert all("spread" in r and set(EVERY) <= set(r) for r in records)
    assert any(not torch.equal(t, before[n]) for n, t in model.mixer.state_dict().items())

    model, _, loss = _routed(normalise="none", learns="total")
    before = torch.cat([p.detach().clone().flatten() for p in model.mixer.parameters()])
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    train.fit(model, _batches(1), sgd, total=1, loss=loss, **options)
    moved = torch.cat([p.detach().flatten() for p in model.mixer.parameters()]) - before
    assert 0 < float(moved.norm()) <= 1.001e-3


@pytest.mark.parametrize("curriculum", [False, True], ids=["router", "router and curriculum"])
@pytest.mark.parametrize("router", [dict(normalise="none", learns="total"), dict(normalise="initial"), {}], ids=str)
def test_resume_is_bit_equal(tmp_path, router, curriculum):
    def run(total: int, folder) -> tuple[list, dict]:
        model, optimizers, loss = _routed(2, curriculum, **router)
        folder = dict(checkpoints=tmp_path / folder, checkpoint_every=100)
        options = dict(total=total, accumulate=2, machine=FP32, loss=loss, **folder)
        return train.fit(model, _batches(2), optimizers, **options), model.state_dict()

    straight, whole = run(10, "straight")
    run(5, "parts")
    rest, resumed = run(10, "parts")
    assert [r["step"] for r in rest] == [6, 7, 8, 9, 10]
    assert [r["loss"] for r in rest] == [r["loss"] for r in straight[5:]]
    assert whole.keys() == resumed.keys() and all(torch.equal(t, resumed[n]) for n, t in whole.items())
    if curriculum:
        assert "masked" not in straight[0] and "logits" in straight[-1] and int(whole["phases.micro_batches"]) == 20


def test_the_canary_finds_router_and_model_alive_and_leaves_both_as_they_were():
    model, _, loss = _routed()
    before = copy.deepcopy(model.state_dict())
    verdict = wiring.canary(model, lambda: sum(loss(model, _ragged(4)).values()) / 60)
    assert verdict.alive, verdict.sentence
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


TWO = """
import json, sys, torch
sys.path[:0] = [{tests!r}]
from test_objectives import FP32, Router, _batches, _objective, _student
from nblib import runtime, text, train
torch.set_num_threads(1)
if runtime.world() > 1: torch.distributed.init_process_group("gloo")
model = _student()
adam = train.adamw(model, lr=1e-3)
names = ["ce", "logits", "hidden"]
torch.manual_seed(2)
model.mixer = Router(names)
loss = _objective(dict.fromkeys(names, 1.0), router=model.mixer)
stream, rank, world = _batches().stream, runtime.rank(), runtime.world()
batches = text.Batches(stream, rows=4 // world, length=32, rank=rank, world=world)
optimizers = [adam, torch.optim.Adam(model.mixer.parameters(), lr=1e-2)]
records = train.fit(model, batches, optimizers, total=8, machine=FP32, loss=loss)
mine = [model.mixer.scale.tolist(), [float(p.detach().double().abs().sum()) for p in model.parameters()]]
every = [mine]
if world > 1:
    every = [None] * world
    torch.distributed.all_gather_object(every, mine)
    torch.distributed.destroy_process_group()
if rank == 0:
    print(json.dumps([every, [r["loss"] for r in records]]))
"""


@pytest.mark.slow
def test_two_processes_route_like_one(tmp_path):
    """The router of every process sees the same losses, so that weights and running means stay the same in all."""
    results = []
    for world in (1, 2):
        script = tmp_path / f"routed{world}.py"
        script.write_text(TWO.format(tests=str(Path(__file__).parent)))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        out = subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=240, env=env)
        assert out.returncode == 0, out.stderr[-2000:]
        results.append(json.loads(out.stdout.strip().splitlines()[-1]))
    ((one,), losses_of_one), (two, losses_of_two) = results
    assert two[0] == two[1]
    for ours, theirs in zip(one, two[0]):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert losses_of_one == pytest.approx(losses_of_two, rel=1e-5)


# ---------------------------------------------------------------- bad input


def test_bad_input_is_named():
    model, batch = _student(), _ragged(2)
    h = [torch.zeros(2, 32, 8)] * 3
    for match, call in {
        "objective 'kd': allowed are ce, logits, hidden, masked": lambda: Objective({"kd": 1.0}),
        "'ce': 0.* not all zero": lambda: Objective({"ce": 0}),
        "'ce': -1.* from 0 up": lambda: Objective({"ce": -1}),
        "teacher = None: needed for logits and hidden": lambda: Objective({"hidden": 1, "logits": 1}),
        "mask_id = None": lambda: Objective({"masked": 1}),
        "the router mixes ce, masked; with a weight are ce": lambda: Objective(
            {"ce": 1}, router=Router(["ce", "masked"])
        ),
        "Router is not attached": lambda: Objective({"ce": 1}, router=Router(["ce"]))(model, batch),
        "Curriculum is not attached": lambda: Objective(Curriculum([(1, {"ce": 1})], total=3))(model, batch),
        "objective 'kd'": lambda: Objective(Curriculum([(1, {"kd": 1})], total=3)),
        "kind = 'l1': allowed are mse, relative": lambda: alignment.hidden_distillation(
            h, h, batch["labels"], kind="l1"
        ),
        "student 3 of .*, teacher 2 of": lambda: alignment.hidden_distillation(h, h[:2], batch["labels"]),
        "weights = 'linear': allowed are uniform": lambda: alignment.layer_weights("linear", 2),
        r"weights = \[1.0\]: allowed are 2 numbers": lambda: alignment.layer_weights([1.0], 2),
        "probability = 0: must be above 0": lambda: objectives.mask_tokens(
            batch["input_ids"], mask_id=1, probability=0
        ),
        "temperature = 0: must be above 0": lambda: _objective(temperature=0),
        r"phases end at \[0.5\]: must rise": lambda: Curriculum([(0.5, {"ce": 1})], total=3),
        "how = 'sine': allowed are step": lambda: Curriculum([(1, {"ce": 1})], total=3, how="sine"),
        "total = 0": lambda: Curriculum([(1, {"ce": 1})], total=0),
        "normalise = 'first': allowed are none": lambda: _router(normalise="first"),
        "learns = 'all': allowed are total": lambda: _router(learns="all"),
        "penalty = 0": lambda: _router(penalty=0),
        "decay = 1": lambda: _router(decay=1),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    wrapped = models.tiny(64, hidden=32, layers=1, heads=2, tie_word_embeddings=False)
    wrapped.lm_head = nn.Sequential(wrapped.lm_head)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: the head must be one matrix product"):
        Objective({"ce": 1})(wrapped, batch)
