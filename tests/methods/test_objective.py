"""One loss of several terms: float64 references, sums that add up, the rules for a teacher, state
that resumes.
"""

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
from torch.distributions import Categorical
from torch.nn import functional as F
from toy_distillation import confident_teacher, other_teacher, ragged

from nblib import compiling, losses, models, runtime, text, train, wiring
from nblib.methods import goose
from nblib.methods.distill import divergences, objective
from nblib.methods.distill.loss_weights import Curriculum, Router
from nblib.methods.distill.objective import Objective, from_teacher
from nblib.methods.distill.temperature import Learned

EVERY = {"ce": 1.0, "logits": 2.0, "hidden": 0.5, "masked": 0.3}

MASK = 255  # no token of the streams below


def _student(seed: int = 0) -> nn.Module:
    return models.tiny(256, hidden=32, layers=2, heads=2, seed=seed)


def _teacher() -> nn.Module:
    return models.as_teacher(_student(seed=9))


def _objective(weights=None, **options) -> Objective:
    return Objective(
        weights or EVERY, **(dict(teacher=_teacher(), temperature=2.0, mask_id=MASK) | options)
    )


def _batches(rows: int = 4):
    steps = torch.randint(1, 4, (20_000,), generator=torch.Generator().manual_seed(1))
    return text.Batches(steps.cumsum(0) % 250, rows=rows, length=32)


# ----------------------------------------------------- each loss against its definition, in float64


def _logits(h, w, th, tw, labels, *, temperature: float):
    """T^2 KL alone."""
    T = torch.tensor(temperature, dtype=h.dtype)
    return objective.distillation(h, w, labels, (th,), divergences.live(T, tw), temperature=T)[0]


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_logit_distillation_is_t_squared_kl_over_the_supervised_rows(temperature):
    labels = ragged(4, 12)["labels"]
    h, w = torch.randn(4, 12, 16, dtype=torch.float64), torch.randn(53, 16, dtype=torch.float64)
    th, tw = torch.randn(4, 12, 9, dtype=torch.float64), torch.randn(53, 9, dtype=torch.float64)
    h.requires_grad_()
    ours = _logits(h, w, th, tw, labels, temperature=temperature)
    plain = 0
    for b, t in itertools.product(range(4), range(11)):
        if labels[b, t + 1] != losses.IGNORED:
            p = torch.distributions.Categorical(logits=(tw @ th[b, t]) / temperature)
            q = torch.distributions.Categorical(logits=(w @ h[b, t]) / temperature)
            plain = plain + temperature**2 * torch.distributions.kl_divergence(p, q)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(*(torch.autograd.grad(x, h)[0] for x in (ours, plain)))


def test_the_gradient_keeps_its_size_at_high_temperature():
    """T^2 KL tends to half the squared distance of centred logits over V: the gradient has a limit,
    it does not die.
    """
    labels = torch.zeros(2, 6, dtype=torch.long)
    h = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    w, th, tw = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((53, 16), (2, 6, 9), (53, 9))
    )
    logits, wanted = h[:, :-1] @ w.T, th[:, :-1] @ tw.T
    apart = (logits - logits.mean(-1, keepdim=True)) - (wanted - wanted.mean(-1, keepdim=True))
    limit = torch.autograd.grad(apart.square().sum() / (2 * 53), h)[0]
    for temperature in (1e3, 1e5):
        value = _logits(h, w, th, tw, labels, temperature=temperature)
        gradient = torch.autograd.grad(value, h)[0]
        assert float((gradient - limit).norm() / limit.norm()) < 30 / temperature


def test_one_pass_is_the_sum_of_two(stream):
    """The term `distillation` is kd `logits` + ce `ce`, gradients included; what is seen is the
    same in both.
    """
    teacher, batch, grads, means = _teacher(), ragged(4), [], []
    for one_pass in (False, True):
        model = _student()
        loss = Objective(
            {"ce": 0.3, "logits": 0.7}, teacher=teacher, temperature=2.0, one_pass=one_pass
        )
        terms = loss(model, batch)
        assert set(terms) == ({"distillation"} if one_pass else {"ce", "logits"})
        sum(terms.values()).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        means.append(loss.seen())
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 1e-5 and means[
        0
    ] == pytest.approx(means[1], rel=1e-5)
    assert means[0]["temperature"] == 2 and means[0]["weight_logits"] == pytest.approx(0.7)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_states_compared_are_those_of_transformers_without_the_embedding(family):
    student, teacher = (
        models.tiny(256, family=family, hidden=32, layers=3, heads=2, seed=i) for i in range(2)
    )
    student, teacher, batch = student.eval(), models.as_teacher(teacher), ragged(2)
    ids = {"input_ids": batch["input_ids"], "output_hidden_states": True}
    # its hooks would stay
    theirs = [copy.deepcopy(m)(**ids).hidden_states[1:] for m in (student, teacher)]
    plain = objective.hidden_distillation(*theirs, batch["labels"])
    loss = _objective({"hidden": 1}, teacher=teacher)
    torch.testing.assert_close(loss(student, batch)["hidden"], plain)


def test_the_first_loss_is_t_squared_times_ln_v_less_the_teachers_entropy(tiny, batches):
    """Not ln V: an almost uniform student, a teacher that knows something (P44)."""
    teacher, batch = other_teacher(), next(batches)
    with torch.no_grad():
        teacher.model.embed_tokens.weight.mul_(25)
        tiny.model.embed_tokens.weight.mul_(0.01)
        p = Categorical(logits=teacher(**{"input_ids": batch["input_ids"]}).logits[:, :-1] / 3)
        loss = from_teacher(teacher, temperature=3.0)(tiny, batch)[
            "distillation"
        ] / losses.supervised(batch["labels"])
    expected = 9 * (math.log(256) - float(p.entropy().mean()))
    assert float(loss) == pytest.approx(expected, rel=1e-3) and abs(expected - math.log(256)) > 1


@pytest.mark.parametrize("family", [*models.FAMILIES, "goose"])
def test_the_states_of_the_layers_are_those_of_transformers_and_no_hook_stays(family, batches):
    """Embeddings first, the last after the final norm; what else a batch carries is not for the
    model.
    """
    options = {} if family == "goose" else dict(family=family, heads=2)
    model = (goose.tiny if family == "goose" else models.tiny)(
        256, hidden=32, layers=3, **options
    ).eval()
    batch = next(batches)
    theirs = copy.deepcopy(model)(
        input_ids=batch["input_ids"], output_hidden_states=True
    ).hidden_states
    for _ in range(2):  # nothing is left over from one pass to the next
        last, head, states = objective.states_of(
            model, batch | {objective.TOKEN_WEIGHTS: torch.ones(4, 32)}, layers=True
        )
        torch.testing.assert_close(states, list(theirs))
        assert states[-1] is last and head is model.get_output_embeddings().weight
    assert not any(block._forward_pre_hooks for block in compiling.blocks(model))


# ---------------------------------------------------------------- masking


def test_masking_spares_special_tokens_and_has_its_rate():
    ids, special = torch.randint(40, (200, 500)), [0, 3, 7]
    for probability in (0.15, 0.6):
        masked, chosen = objective.mask_tokens(
            ids, mask_id=39, probability=probability, special_ids=special
        )
        maskable = ~torch.isin(ids, torch.tensor([*special, 39]))
        assert not (chosen & ~maskable).any() and (masked[chosen] == 39).all()
        assert torch.equal(masked[~chosen], ids[~chosen])
        n = int(maskable.sum())
        deviation = math.sqrt(n * probability * (1 - probability))
        assert abs(int(chosen.sum()) - n * probability) < 5 * deviation
        halves = [
            chosen[:100].sum() / maskable[:100].sum(),
            chosen[:, :250].sum() / maskable[:, :250].sum(),
        ]
        # nowhere more than elsewhere
        assert all(abs(float(h) - probability) < 10 * deviation / n for h in halves)
    all_of_it, chosen = objective.mask_tokens(ids, mask_id=39, probability=1.0, among=ids > 20)
    assert torch.equal(chosen, (ids > 20) & (ids != 39))


def test_a_masked_token_is_predicted_from_the_position_before_it():
    """Against the model's own logits on the masked ids, token by token; unsupervised tokens stay
    visible.
    """
    model, batch = _student().double(), ragged(12, 16)
    batch["labels"][::2] = batch["input_ids"][::2]  # supervised from the first token on
    state = torch.get_rng_state()
    ours = objective.masked_tokens(model, batch, mask_id=MASK, probability=0.4, special_ids=[5])
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
    """Only the last token can be masked, and no position that predicts it sees it: its loss does
    not depend on the mask, so the estimate has a known mean and deviation, and the two
    complementary views have the sum itself.
    """
    model = _student()
    ids = torch.randint(250, (600, 8))
    labels = torch.full_like(ids, losses.IGNORED)
    labels[:, -1] = ids[:, -1]
    batch = {"input_ids": ids, "labels": labels}
    with torch.no_grad():
        each = F.cross_entropy(model(input_ids=ids).logits[:, -2], ids[:, -1], reduction="none")
        for p in (0.15, 0.5):
            estimate = objective.masked_tokens(model, batch, mask_id=MASK, probability=p)
            deviation = float((each.square().sum() * (1 - p) / p).sqrt())
            assert 0 < abs(float(estimate - each.sum())) < 4 * deviation
            both = objective.masked_tokens(
                model, batch, mask_id=MASK, probability=p, complementary=True
            )
            torch.testing.assert_close(both, each.sum(), rtol=1e-5, atol=1e-3)


def test_nothing_masked_or_supervised_adds_zero_with_a_graph():
    model, batch = _student(), ragged(2)
    batch["labels"] = torch.full_like(batch["labels"], losses.IGNORED)
    terms = _objective()(model, batch)
    assert set(terms) == set(EVERY) and all(float(t.detach()) == 0 for t in terms.values())
    sum(terms.values()).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_mask_id_must_be_a_special_token():
    tokenizer = text.train_tokenizer(["the mask is a token of its own"] * 20, vocab_size=300)
    special = objective.check_mask_id(tokenizer, tokenizer.mask_token_id)
    assert special == sorted(
        [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id]
    )
    ordinary = tokenizer.convert_tokens_to_ids("!")
    with pytest.raises(
        ValueError,
        match=rf"mask_id = {ordinary} is the ordinary token '!': allowed are .*{special[0]}",
    ):
        objective.check_mask_id(tokenizer, ordinary)
    for outside in (-1, len(tokenizer), None):
        with pytest.raises(ValueError, match="not in the vocabulary"):
            objective.check_mask_id(tokenizer, outside)


# ---------------------------------------------------------------- the teacher


def test_a_teacher_that_breaks_a_rule_is_refused_with_the_reason(tiny):
    good = other_teacher()
    objective.check_teacher(good, tiny)
    with pytest.raises(ValueError, match="not frozen .model.embed_tokens"):
        objective.check_teacher(models.tiny(256, hidden=32, layers=1, heads=2).eval(), tiny)
    with pytest.raises(ValueError, match="training mode"):
        objective.check_teacher(other_teacher().train(), tiny)
    half = other_teacher()
    half.model.layers[1].train()
    with pytest.raises(ValueError, match=r"training mode \(model.layers.1"):
        objective.check_teacher(half, tiny)
    with pytest.raises(ValueError, match="one vocabulary"):
        objective.check_teacher(
            models.as_teacher(models.tiny(250, hidden=32, layers=1, heads=2)), tiny
        )
    with torch.inference_mode():
        inferred = other_teacher()
    with pytest.raises(ValueError, match="inference_mode"):
        objective.check_teacher(inferred, tiny)
    tiny.teacher = good
    with pytest.raises(ValueError, match="inside the student"):
        objective.check_teacher(good, tiny)


def test_the_teacher_is_asked_without_a_graph_and_without_a_cache(tiny, batches):
    teacher, calls = other_teacher(), []
    teacher.model.register_forward_hook(
        lambda m, args, kwargs, out: calls.append((out, kwargs["use_cache"])), with_kwargs=True
    )
    sum(from_teacher(teacher)(tiny, next(batches)).values()).backward()
    (out, use_cache), *rest = calls
    assert not rest and use_cache is False and out.past_key_values is None
    assert not out.last_hidden_state.requires_grad and all(
        p.grad is None for p in teacher.parameters()
    )


def test_the_teacher_gets_no_gradient_and_stays_as_it_is():
    model, teacher, graphs = _student(), _teacher(), []
    teacher.model.register_forward_hook(
        lambda _, inputs, out: graphs.append(out.last_hidden_state.requires_grad)
    )
    before = copy.deepcopy(teacher.state_dict())
    loss = _objective(teacher=teacher)
    train.fit(model, _batches(), train.adamw(model, lr=1e-3), total=3, machine=FP32, loss=loss)
    assert (
        graphs == [False] * 3
        and not teacher.training
        and all(p.grad is None for p in teacher.parameters())
    )
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
            _objective(teacher=wrong)(model, ragged(2))


# ---------------------------------------------------------------- in the loop


def _gradient(loss, size: int, **options) -> tuple[dict, torch.Tensor]:
    """One step over the same eight ragged rows in micro-batches of `size`; SGD at rate 1 shows the
    gradient.
    """
    runtime.seed_all(3)  # the same masks: they are drawn row after row
    model, whole = _student(), ragged(8)
    micro = [{k: v[i : i + size] for k, v in whole.items()} for i in range(0, 8, size)]
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    options = dict(total=1, accumulate=len(micro), machine=FP32, clip=0, loss=loss) | options
    record = train.fit(model, iter(micro), sgd, **options)[0]
    return record, before - torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "weights", [*({n: w} for n, w in EVERY.items()), EVERY], ids=[*EVERY, "all"]
)
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


@pytest.mark.parametrize("ce", [0.0, 0.5])
def test_micro_batches_with_a_learned_temperature_add_up(stream, ce):
    """Token-weighted on ragged labels, the prior on T included, which must not count once per
    micro-batch.
    """
    rows = text.Batches(stream, rows=8, length=32)

    def ragged():
        batch = next(rows)
        labels = batch["labels"].clone()
        for i in range(8):
            labels[i, : 3 * i] = losses.IGNORED
        return batch | {"labels": labels}

    whole = ragged()
    halves = [{name: x[part] for name, x in whole.items()} for part in (slice(0, 3), slice(3, 8))]
    grads = []
    for micro in ([whole], halves):
        model = _student()
        model.temperature = Learned(2.5, anchor=2.0)
        loss = from_teacher(other_teacher(), temperature=model.temperature, ce=ce)
        tokens = sum(losses.supervised(b["labels"]) for b in micro)
        for batch in micro:
            (sum(loss(model, batch).values()) / tokens).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-6)
    assert grads[0]["temperature.raw"].abs() > 1e-3


def test_what_is_logged_without_weights_is_what_was_trained_on():
    loss, model, batch = _objective(), _student(), ragged(4)
    terms = {n: float(t.detach()) for n, t in loss(model, batch).items()}
    seen, n = loss.seen(), int(losses.supervised(batch["labels"]))
    assert all(
        seen[name] * EVERY[name] * n == pytest.approx(terms[name], rel=1e-5) for name in EVERY
    )
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
        _objective(weights, teacher=teacher, **options)(model, ragged(2))
        return sorted(calls)

    assert asked({"ce": 1, "logits": 1, "hidden": 1}) == ["student", "teacher"]
    assert asked({"ce": 1, "logits": 0, "hidden": 0, "masked": 0}) == ["student"]
    assert asked({"masked": 1}) == ["student"]
    assert asked({"ce": 1, "masked": 1}, complementary=True) == ["student", "student"]
    model.mixer = Curriculum([(0.5, {"ce": 1}), (1, {"logits": 1})], total=4)
    # the teacher is not run before its phase
    assert asked(model.mixer) == asked(model.mixer) == ["student"]
    assert asked(model.mixer) == asked(model.mixer) == ["student", "teacher"]


def _compiled(model: nn.Module) -> list[int]:
    """Compile the blocks with a backend that runs the graphs as they are; per graph, how often it
    ran.
    """
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
    """Every layer's states come out of recomputed and of compiled blocks, and every block runs as
    one graph.
    """

    def gradients(prepare: bool) -> list[torch.Tensor]:
        runtime.seed_all(3)
        torch._dynamo.reset()
        model, batch, loss = (
            _student(),
            ragged(4),
            _objective({"ce": 1.0, "logits": 2.0, "hidden": 0.5}),
        )
        if prepare and way != "compiled":
            compiling.checkpoint_blocks(model)
        ran = _compiled(model) if prepare and way != "checkpointed" else None
        losses.causal_lm(model, batch)  # compiled before anybody asks for the layers
        for _ in range(2):
            model.zero_grad()
            sum(loss(model, batch).values()).backward()
        losses.causal_lm(model, batch)
        # four forward passes, two blocks, one graph for both
        assert ran is None or ran == [4 * 2], ran
        return [p.grad for p in model.parameters()]

    for plain, other in zip(gradients(False), gradients(True), strict=True):
        assert plain.norm() > 0 and float((plain - other).norm() / plain.norm()) < 1e-5


def test_the_student_learns_what_the_teacher_thinks(stream):
    teacher = confident_teacher()
    model = _student()
    optimizers = [train.adamw(model, lr=3e-3)]
    records = train.fit(
        model,
        text.Batches(stream, rows=8, length=32),
        optimizers,
        total=100,
        machine=FP32,
        loss=from_teacher(teacher),
    )
    assert records[-1]["distillation"] < 0.7 * records[0]["distillation"]


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


def test_curriculum_moves_once_per_optimizer_step_and_not_in_evaluation():
    model = _student()
    adam = train.adamw(model, lr=1e-3)
    phases = [(0.5, {"ce": 1.0}), (1, {"ce": 3.0})]
    model.mixer = Curriculum(phases, total=6, accumulate=2, how="linear")
    loss = _objective(model.mixer)

    def evaluate() -> dict:
        model.eval()
        return {"weight": float(sum(loss(model, ragged(1)).values()).detach())}

    weights = []
    options = dict(
        total=6,
        accumulate=2,
        machine=FP32,
        loss=loss,
        watch=train.Watch(evaluate=evaluate, eval_every=1),
    )
    train.fit(
        model,
        _batches(),
        adam,
        **options,
        on_step=lambda _: weights.append(loss.seen()["weight_ce"]),
    )
    assert weights == pytest.approx([1, 1 + 2 / 3, 1 + 4 / 3, 3, 3, 3])
    assert int(model.mixer.micro_batches) == 12


# ---------------------------------------------------------------- with a router


def _routed(accumulate: int = 1, curriculum: bool = False, **router):
    runtime.seed_all(0)
    model = _student()
    adam = train.adamw(model, lr=1e-3)
    model.mixer = Router(list(EVERY), **router)
    weights = EVERY
    if curriculum:
        phases = [
            (0.4, {"ce": 1.0}),
            (0.8, {"ce": 1.0, "hidden": 1.0, "masked": 0.5}),
            (1.0, EVERY),
        ]
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
@pytest.mark.parametrize(
    "router", [dict(normalise="none", learns="total"), dict(normalise="initial"), {}], ids=str
)
def test_resume_is_bit_equal(tmp_path, router, curriculum):
    def run(total: int, folder) -> tuple[list, dict]:
        model, optimizers, loss = _routed(2, curriculum, **router)
        folder = dict(checkpoints=train.Checkpoints(tmp_path / folder, every=100))
        options = dict(total=total, accumulate=2, machine=FP32, loss=loss, **folder)
        return train.fit(model, _batches(2), optimizers, **options), model.state_dict()

    straight, whole = run(10, "straight")
    run(5, "parts")
    rest, resumed = run(10, "parts")
    assert [r["step"] for r in rest] == list(range(1, 11))
    assert [r["loss"] for r in rest] == [r["loss"] for r in straight]
    assert whole.keys() == resumed.keys() and all(
        torch.equal(t, resumed[n]) for n, t in whole.items()
    )
    if curriculum:
        assert (
            "masked" not in straight[0]
            and "logits" in straight[-1]
            and int(whole["phases.micro_batches"]) == 20
        )


def test_the_canary_finds_router_and_model_alive_and_leaves_both_as_they_were():
    model, _, loss = _routed()
    before = copy.deepcopy(model.state_dict())
    verdict = wiring.canary(model, lambda: sum(loss(model, ragged(4)).values()) / 60)
    assert verdict.alive, verdict.sentence
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


TWO = """
import json, sys, torch
sys.path[:0] = {folders!r}
from test_objective import FP32, Router, _batches, _objective, _student
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
    """The router of every process sees the same losses, so that weights and running means stay the
    same in all.
    """
    results = []
    for world in (1, 2):
        script = tmp_path / f"routed{world}.py"
        script.write_text(
            TWO.format(folders=[str(folder) for folder in Path(__file__).parents[:2]])
        )
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={world}",
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        out = subprocess.run(
            [*launch, str(script)], capture_output=True, text=True, timeout=240, env=env
        )
        assert out.returncode == 0, out.stderr[-2000:]
        results.append(json.loads(out.stdout.strip().splitlines()[-1]))
    ((one,), losses_of_one), (two, losses_of_two) = results
    assert two[0] == two[1]
    for ours, theirs in zip(one, two[0]):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert losses_of_one == pytest.approx(losses_of_two, rel=1e-5)


# ---------------------------------------------------------------- bad input


def test_bad_input_is_named():
    model, batch = _student(), ragged(2)
    for match, call in {
        "objective 'kd': allowed are ce, logits, hidden, masked": lambda: Objective({"kd": 1.0}),
        "'ce': 0.* not all zero": lambda: Objective({"ce": 0}),
        "'ce': -1.* from 0 up": lambda: Objective({"ce": -1}),
        "teacher = None: needed for logits and hidden": lambda: Objective(
            {"hidden": 1, "logits": 1}
        ),
        "teacher = None: needed for alignment": lambda: Objective(
            {"ce": 1}, alignment=nn.Identity()
        ),
        "mask_id = None": lambda: Objective({"masked": 1}),
        "the router mixes ce, masked; with a weight are ce": lambda: Objective(
            {"ce": 1}, router=Router(["ce", "masked"])
        ),
        "one_pass = True: the router": lambda: Objective(
            {"ce": 1}, router=Router(["ce"]), one_pass=True
        ),
        "router: the Router is not attached": lambda: Objective({"ce": 1}, router=Router(["ce"]))(
            model, batch
        ),
        "weights: the Curriculum is not attached": lambda: Objective(
            Curriculum([(1, {"ce": 1})], total=3)
        )(model, batch),
        "temperature: the Learned is not attached": lambda: from_teacher(_teacher(), Learned(2.0))(
            model, batch
        ),
        "objective 'kd'": lambda: Objective(Curriculum([(1, {"kd": 1})], total=3)),
        "probability = 0: must be above 0": lambda: objective.mask_tokens(
            batch["input_ids"], mask_id=1, probability=0
        ),
        "temperature = 0: must be above 0": lambda: _objective(temperature=0),
        "temperature = 0.0: must be above 0": lambda: from_teacher(_teacher(), 0.0),
        "allowed are forward, reverse, js, soft_ce": lambda: from_teacher(
            _teacher(), divergence="kl"
        ),
        "kd must be above 0": lambda: from_teacher(_teacher(), kd=0.0),
        "allowed are drawn, spread, bucket, none": lambda: from_teacher(_teacher(), tail="all"),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    wrapped = models.tiny(64, hidden=32, layers=1, heads=2, tie_word_embeddings=False)
    wrapped.lm_head = nn.Sequential(wrapped.lm_head)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: the head must be one matrix product"):
        Objective({"ce": 1})(wrapped, batch)
