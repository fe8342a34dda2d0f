"""Distillation against torch.distributions and autograd in float64, the temperature as a parameter, and the loop."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import FP32
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F

from nblib import compiling, losses, memory, models, text, train
from nblib.methods import distill, divergences, goose
from nblib.methods.distill import Distillation
from nblib.methods.temperature import Adversarial, Learned, Reversed

B, T, D, V = 4, 12, 16, 53


def _teacher(**options) -> nn.Module:
    return models.as_teacher(models.tiny(256, **(dict(hidden=48, layers=3, heads=2, seed=9) | options)))


def _problem(seed: int = 0) -> dict:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (B, T), generator=draw)
    for row in range(B):
        labels[row, : 3 * row] = losses.IGNORED
    made = {"h": (B, T, D), "w": (V, D), "th": (B, T, 9), "tw": (V, 9)}
    made = {name: torch.randn(*shape, dtype=torch.float64, generator=draw) for name, shape in made.items()}
    return made | {"labels": labels}


def _ours(p: dict, temperature: torch.Tensor, **options):
    scores = divergences.live(temperature.detach(), p["tw"])
    return distill.distillation(p["h"], p["w"], p["labels"], (p["th"],), scores, temperature=temperature, **options)[0]


def _definition(divergence: str, t: torch.Tensor, s: torch.Tensor, T) -> torch.Tensor:
    """One position, by torch.distributions where it has the divergence."""
    p, q = Categorical(logits=t / T), Categorical(logits=s / T)
    if divergence == "forward":
        return T**2 * kl_divergence(p, q)
    if divergence == "reverse":
        return T**2 * kl_divergence(q, p)
    if divergence == "js":
        middle = Categorical(probs=(p.probs + q.probs) / 2)
        return T**2 * (kl_divergence(p, middle) + kl_divergence(q, middle)) / 2
    return -(T**2) * (p.probs * q.logits).sum()


def _plain(p: dict, temperature, *, divergence="forward", kd=1.0, ce=0.0, token_weights=None):
    total = 0.0
    for b in range(B):
        for t in range(T - 1):
            y = p["labels"][b, t + 1]
            if y == losses.IGNORED:
                continue
            s, said = p["w"] @ p["h"][b, t], p["tw"] @ p["th"][b, t]
            loss = kd * _definition(divergence, said, s, temperature) + ce * F.cross_entropy(s, y)
            total = total + loss * (1.0 if token_weights is None else token_weights[b, t + 1])
    return total


@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 4.0])
@pytest.mark.parametrize("divergence", divergences.DIVERGENCES)
def test_every_loss_and_all_its_gradients_equal_the_definition(divergence, temperature, chunk):
    """With masked labels, token weights and the hard labels in the same pass; the gradient of T included."""
    p = _problem()
    leaves = [p["h"].requires_grad_(), p["w"].requires_grad_()]
    temp = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    options = dict(divergence=divergence, kd=0.7, ce=0.3, token_weights=torch.rand(B, T, dtype=torch.float64))
    ours, plain = _ours(p, temp, chunk=chunk, **options), _plain(p, temp, **options)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(0.37 * x, [*leaves, temp]) for x in (ours, plain))):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
        assert b.abs().max() > 1e-3


@pytest.mark.parametrize("divergence", divergences.DIVERGENCES)
def test_nothing_is_lost_or_pulls_where_student_and_teacher_agree(divergence):
    p = _problem()
    p["th"], p["tw"] = p["h"].clone(), p["w"].clone()
    p["h"].requires_grad_()
    temp = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    value = _ours(p, temp, divergence=divergence)
    by_h, by_T = torch.autograd.grad(value, [p["h"], temp])
    assert by_h.abs().max() < 1e-12
    if divergence == "soft_ce":  # what is left is the teacher's own entropy
        rows = losses.shifted_rows(p["h"].detach(), p["labels"])[0] @ p["w"].T / 2
        torch.testing.assert_close(value, 4 * Categorical(logits=rows).entropy().sum())
    else:
        assert abs(float(value.detach())) < 1e-12 and abs(float(by_T)) < 1e-12


def test_the_teachers_impossible_tokens_are_no_nan():
    """Logits of -inf, as padded vocabularies have them."""
    p = _problem()
    said = (p["th"] @ p["tw"].T).index_fill(2, torch.arange(50, V), -torch.inf)

    scores = divergences.stored(torch.tensor(2.0), SimpleNamespace(k=0))  # a cache of everything
    temp = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    p["h"].requires_grad_()
    for divergence in ("forward", "js", "soft_ce"):
        value, _ = distill.distillation(
            p["h"], p["w"], p["labels"], (said,), scores, temperature=temp, divergence=divergence
        )
        assert all(g.isfinite().all() for g in torch.autograd.grad(value, [p["h"], temp]))
        assert value.isfinite()


def test_t_squared_keeps_the_size_of_the_gradient():
    """Without it the gradient falls as 1 / T^2; with it there is a limit, that of fitting the centred logits."""
    p = _problem()
    p["h"].requires_grad_()
    norms = {}
    for T in (8.0, 16.0, 32.0, 1e4):
        gradient = torch.autograd.grad(_ours(p, torch.tensor(T, dtype=torch.float64)), p["h"])[0]
        norms[T] = float(gradient.norm())
    logits, wanted = (losses.shifted_rows(p[h], p["labels"])[0] @ p[w].T for h, w in (("h", "w"), ("th", "tw")))
    apart = (logits - logits.mean(1, keepdim=True)) - (wanted - wanted.mean(1, keepdim=True))
    limit = float(torch.autograd.grad(apart.square().sum() / (2 * V), p["h"])[0].norm())
    assert norms[1e4] == pytest.approx(limit, rel=1e-2)
    plain = {T: norm / T**2 for T, norm in norms.items()}
    assert norms[8.0] / norms[32.0] == pytest.approx(1.0, abs=0.3) and plain[8.0] / plain[32.0] > 10


def test_the_logits_of_neither_model_are_held_whole():
    n, vocab = 1024, 32_768  # 128 MiB of logits for each
    h = torch.randn(1, n + 1, 32, requires_grad=True)
    w, th, tw = torch.randn(vocab, 32, requires_grad=True), torch.randn(1, n + 1, 32), torch.randn(vocab, 32)
    labels = torch.randint(vocab, (1, n + 1))
    one = torch.tensor(2.0)
    with memory.Account() as account:
        value, _ = distill.distillation(
            h, w, labels, (th,), divergences.live(one, tw), temperature=one, ce=0.5, chunk=16
        )
        value.backward()
    assert account.most < 0.3 * n * vocab * 4


# ---------------------------------------------------------------- the teacher


def test_a_teacher_that_breaks_a_rule_is_refused_with_the_reason(tiny):
    good = _teacher()
    distill.check_teacher(good, tiny)
    with pytest.raises(ValueError, match="not frozen .model.embed_tokens"):
        distill.check_teacher(models.tiny(256, hidden=32, layers=1, heads=2).eval(), tiny)
    with pytest.raises(ValueError, match="training mode"):
        distill.check_teacher(_teacher().train(), tiny)
    half = _teacher()
    half.model.layers[1].train()
    with pytest.raises(ValueError, match=r"training mode \(model.layers.1"):
        distill.check_teacher(half, tiny)
    with pytest.raises(ValueError, match="one vocabulary"):
        distill.check_teacher(models.as_teacher(models.tiny(250, hidden=32, layers=1, heads=2)), tiny)
    with torch.inference_mode():
        inferred = _teacher()
    with pytest.raises(ValueError, match="inference_mode"):
        distill.check_teacher(inferred, tiny)
    tiny.teacher = good
    with pytest.raises(ValueError, match="inside the student"):
        distill.check_teacher(good, tiny)


def test_the_teacher_is_asked_without_a_graph_and_without_a_cache(tiny, batches):
    teacher, calls = _teacher(), []
    teacher.model.register_forward_hook(
        lambda m, args, kwargs, out: calls.append((out, kwargs["use_cache"])), with_kwargs=True
    )
    sum(Distillation(teacher)(tiny, next(batches)).values()).backward()
    (out, use_cache), *rest = calls
    assert not rest and use_cache is False and out.past_key_values is None
    assert not out.last_hidden_state.requires_grad and all(p.grad is None for p in teacher.parameters())


def test_the_first_loss_is_t_squared_times_ln_v_less_the_teachers_entropy(tiny, batches):
    """Not ln V: an almost uniform student, a teacher that knows something (P44)."""
    teacher, batch = _teacher(), next(batches)
    with torch.no_grad():
        teacher.model.embed_tokens.weight.mul_(25)
        tiny.model.embed_tokens.weight.mul_(0.01)
        p = Categorical(logits=teacher(**{"input_ids": batch["input_ids"]}).logits[:, :-1] / 3)
        loss = Distillation(teacher, temperature=3.0)(tiny, batch)["distillation"] / losses.supervised(batch["labels"])
    expected = 9 * (math.log(256) - float(p.entropy().mean()))
    assert float(loss) == pytest.approx(expected, rel=1e-3) and abs(expected - math.log(256)) > 1


def test_options_that_cannot_be_are_refused(tiny, batches):
    teacher = _teacher()
    for wrong, said in (
        ({"divergence": "kl"}, "allowed are forward, reverse, js, soft_ce"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"kd": 0.0}, "kd must be above 0"),
        ({"tail": "all"}, "allowed are drawn, spread, bucket, none"),
    ):
        with pytest.raises(ValueError, match=said):
            Distillation(teacher, **wrong)
    with pytest.raises(ValueError, match="not attached to the model"):
        Distillation(teacher, temperature=Learned(2.0))(tiny, next(batches))
    for wrong in ({"start": 0.0}, {"anchor": -1.0}, {"strength": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Learned(**wrong)
    with pytest.raises(ValueError, match="must rise"):
        Adversarial(6.0, total=10)


@pytest.mark.parametrize("family", [*models.FAMILIES, "goose"])
def test_the_states_of_the_layers_are_those_of_transformers_and_no_hook_stays(family, batches):
    """Embeddings first, the last after the final norm; what else a batch carries is not for the model."""
    options = {} if family == "goose" else dict(family=family, heads=2)
    model = (goose.tiny if family == "goose" else models.tiny)(256, hidden=32, layers=3, **options).eval()
    batch = next(batches)
    theirs = copy.deepcopy(model)(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
    for _ in range(2):  # nothing is left over from one pass to the next
        last, head, states = distill.states_of(model, batch | {distill.TOKEN_WEIGHTS: torch.ones(4, 32)}, layers=True)
        torch.testing.assert_close(states, list(theirs))
        assert states[-1] is last and head is model.get_output_embeddings().weight
    assert not any(block._forward_pre_hooks for block in compiling.blocks(model))


# ---------------------------------------------------------------- in the loop


def _student(seed: int = 0, temperature: nn.Module | None = None):
    """A student, its optimizers and the temperature attached between them."""
    model = models.tiny(256, hidden=32, layers=2, heads=2, seed=seed)
    optimizers = [train.adamw(model, lr=3e-3)]
    if temperature is not None:
        model.temperature = temperature
        optimizers.append(temperature.optimizer(lr=1e-2))
    return model, optimizers


@pytest.mark.parametrize("ce", [0.0, 0.5])
def test_micro_batches_add_up_to_the_large_batch(stream, ce):
    """Token-weighted on ragged labels, the prior on T included, which must not count once per micro-batch."""
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
        model, _ = _student(temperature=Learned(2.5, anchor=2.0))
        loss = Distillation(_teacher(), temperature=model.temperature, ce=ce)
        tokens = sum(losses.supervised(b["labels"]) for b in micro)
        for batch in micro:
            (sum(loss(model, batch).values()) / tokens).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-6)
    assert grads[0]["temperature.raw"].abs() > 1e-3


class _Straight(nn.Module):
    """The same temperature without gradient reversal: what one minimises by mistake."""

    def __init__(self, start):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(math.log(start)))

    def forward(self):
        return self.raw.exp()

    def optimizer(self, lr):
        return torch.optim.Adam(self.parameters(), lr=lr)


def _confident_teacher() -> nn.Module:
    teacher = _teacher()
    with torch.no_grad():
        teacher.model.embed_tokens.weight.mul_(20)  # logits with a spread, so that T^2 KL has its hump inside (0.3, 10)
    return teacher


def _alone(temperature: nn.Module, p: dict, steps: int = 300) -> float:
    """Only T moves; the student stands still."""
    optimizer, tokens = temperature.optimizer(lr=1e-2), int(losses.supervised(p["labels"]))
    for _ in range(steps):
        loss = _ours(p, temperature()) / tokens
        (loss + temperature.penalty() if hasattr(temperature, "penalty") else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(temperature().detach())


def test_the_hump_repels_a_minimised_temperature_and_attracts_a_reversed_one():
    p = _problem()
    p["h"], p["th"] = 0.05 * p["h"], 0.6 * p["th"]  # a student that knows little, a teacher who knows something
    grid = torch.linspace(0.2, 8.0, 118).tolist()
    values = [float(_ours(p, torch.tensor(T))) for T in grid]
    top = grid[values.index(max(values))]
    assert 0.5 < top < 5.0
    below, above = (_alone(_Straight(top * f), p) for f in (0.8, 1.25))
    assert below < 0.5 * top and above > 2 * top  # away from it, on both sides
    ends = [_alone(Adversarial(top * f, total=300, rest=0.0, low=0.1, high=8.0), p) for f in (0.7, 1.4)]
    assert all(abs(T / top - 1) < 0.12 for T in ends), (top, ends)
    held = [_alone(Learned(start, anchor=2.0), p) for start in (1.3, 4.0)]
    assert abs(held[0] - held[1]) < 0.02 and all(abs(T / 2.0 - 1) < 0.3 for T in held), held  # wherever it began


def test_a_clamped_temperature_is_stuck_and_takes_its_regulariser_along(stream):
    """The write-up's: exp(raw).clamp(1, 10) with 0.1 (T - 2)^2 on the clamped value. Ours pulls from anywhere."""
    teacher, batch = _confident_teacher(), next(text.Batches(stream, rows=4, length=32))

    class Clamped(_Straight):
        def forward(self):
            return self.raw.exp().clamp(1, 10)

        def penalty(self):
            return 0.1 * (self() - 2).square()

    grads = {}
    for name, temperature in {"clamped": Clamped(11.0), "free": Learned(11.0, anchor=2.0)}.items():
        model, _ = _student(temperature=temperature)
        sum(Distillation(teacher, temperature=temperature)(model, batch).values()).backward()
        grads[name] = float(temperature.raw.grad)
    assert grads["clamped"] == 0 and grads["free"] > 0


def test_at_strength_0_only_weight_decay_moves_the_temperature(stream):
    """The write-up read T = 2.0014 at step 600 as learning. Ours stands still, to the bit, until the rest is over."""
    batch = next(text.Batches(stream, rows=4, length=32))
    ends = {}
    for decay in (0.0, 0.01):
        temperature = Adversarial(2.0, total=400, rest=0.25)
        model, (_, own) = _student(temperature=temperature)
        start = temperature.raw.item()
        optimizer = torch.optim.AdamW(temperature.parameters(), lr=1e-3, weight_decay=decay) if decay else own
        loss = Distillation(_teacher(), temperature=temperature)
        for _ in range(100):
            loss(model, batch)["distillation"].backward()
            optimizer.step()
            optimizer.zero_grad()
        ends[decay] = temperature.raw.item() - start
    assert ends[0.0] == 0 and 0 < ends[0.01] == pytest.approx(1.0986 * (1 - (1 - 1e-5) ** 100), rel=0.02)
    strengths = []
    for at in (0, 100, 250, 400):
        temperature.micro_batches.fill_(at)
        strengths.append(temperature.strength())
    assert strengths == pytest.approx([0, 0, 0.5, 1])


def test_reversal_is_the_identity_forward_and_minus_strength_backward():
    x = torch.tensor([1.5, -2.0], requires_grad=True)
    y = Reversed.apply(x, 0.25)
    assert torch.equal(y, x)
    (y * torch.tensor([3.0, 4.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([-0.75, -1.0]))


@pytest.mark.parametrize("kind", ["learned", "adversarial"])
def test_a_run_with_its_temperature_resumes_to_the_bit(tmp_path, stream, kind):
    def run(total, folder):
        made = Learned(3.0, anchor=2.0) if kind == "learned" else Adversarial(3.0, total=16, rest=0.25)
        model, optimizers = _student(temperature=made)
        loss = Distillation(_teacher(), temperature=made, ce=0.3, divergence="js")
        batches = text.Batches(stream, rows=4, length=32)
        options = dict(total=total, accumulate=2, machine=FP32, checkpoints=folder, loss=loss)
        records = train.fit(model, batches, optimizers, **options)
        return model, records, loss

    straight, records, loss = run(8, None)
    run(5, tmp_path)
    resumed, again, _ = run(8, tmp_path)
    assert [r["loss"] for r in again] == [r["loss"] for r in records[5:]]
    for (name, a), b in zip(straight.state_dict().items(), resumed.state_dict().values()):
        assert torch.equal(a, b), name
    assert straight.temperature.raw.item() != math.log(3.0) or kind == "adversarial"
    seen = loss.seen()
    assert seen["kd"] > 0 and seen["ce"] > 0 and 2 < seen["temperature"] < 3.1 and loss.seen() == {}


def test_the_student_learns_what_the_teacher_thinks(stream):
    teacher = _confident_teacher()
    model, optimizers = _student()
    records = train.fit(
        model, text.Batches(stream, rows=8, length=32), optimizers, total=100, machine=FP32, loss=Distillation(teacher)
    )
    assert records[-1]["distillation"] < 0.7 * records[0]["distillation"]
