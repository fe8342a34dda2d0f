"""The spiking recurrent student: its scan against the definition, causality, generation by state,
spikes, the loop.
"""

import math

import pytest
import torch
import transformers as tf
from conftest import FP32

from nblib import compiling, losses, memory, models, text, train, wiring
from nblib.methods import goose
from nblib.methods.distill.objective import from_teacher
from nblib.methods.goose import Spike

DECAYS = (0.38, 0.5, 0.73, 0.88, 0.95, 0.99)
T, D = 256, 24


def _inputs(decay: float, dtype=torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of spikes, as the scan meets them, and a decay per channel around the given one."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, (3, T, D), generator=draw).to(dtype)
    d = (torch.full((D,), decay) + 0.004 * torch.rand(D, generator=draw)).to(dtype)
    return x.requires_grad_(), d.requires_grad_()


def _divided(x, d):
    """The write-up's parallel form."""
    powers = d ** torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    return powers * torch.cumsum(x / (powers + 1e-8), 1)


def _apart(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((ours - wanted).abs().max() / wanted.abs().max()).detach())


@pytest.mark.parametrize("decay", DECAYS)
def test_the_parallel_scan_equals_the_sequential_one_at_every_decay(decay):
    """States and both gradients, in fp32 at length 256, to 1e-5 of the float64 definition."""
    exact = [t.detach().double().requires_grad_() for t in _inputs(decay)]
    weights = torch.randn(3, T, D, dtype=torch.float64)
    wanted = goose.sequential(*exact)
    by_x, by_d = torch.autograd.grad((wanted * weights).sum(), exact)
    for form in (goose.scan, goose.sequential):
        x, d = _inputs(decay)
        states = form(x, d)
        ours = torch.autograd.grad((states * weights.float()).sum(), [x, d])
        assert (
            _apart(states, wanted) < 1e-5
            and _apart(ours[0], by_x) < 1e-5
            and _apart(ours[1], by_d) < 1e-5
        )


def test_dividing_by_powers_of_the_decay_loses_the_state():
    """d^t + 1e-8: where d^t has fallen below 1e-8 nothing is left, and the gradients go with it."""
    first_wrong = {}
    for decay in DECAYS:
        x, d = (t.detach() for t in _inputs(decay))
        d = torch.full_like(d, decay)
        wanted, theirs = goose.sequential(x, d), _divided(x, d)
        off = (theirs - wanted).flatten(2).norm(dim=(0, 2)) / wanted.norm(dim=(0, 2))
        wrong = (off > 0.1).nonzero()
        first_wrong[decay] = int(wrong[0]) if len(wrong) else None
    print("\nfirst position whose state is off by more than a tenth:", first_wrong)
    assert first_wrong[0.95] is None and first_wrong[0.99] is None
    for decay in DECAYS[:4]:  # below d^t = 1e-8 / 9 or so
        assert first_wrong[decay] == pytest.approx(math.log(1e-7) / math.log(decay), rel=0.1)
    late = _divided(*(t.detach() for t in _inputs(0.38)))[:, 100:]
    assert late.abs().max() < 1e-6  # the write-up's own start: no memory at all


def test_the_gradient_of_the_scan_is_right_to_the_last_digit():
    x = torch.randn(2, 13, 3, dtype=torch.float64, requires_grad=True)
    d = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(goose.scan, (x, d))


@pytest.fixture
def model():
    return goose.tiny(64, hidden=32, layers=3, length=64)


@pytest.fixture
def ids():
    return torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(5))


def test_both_forms_of_the_model_agree_gradients_included(ids):
    grads = {}
    for form in goose.SCANS:
        model = goose.tiny(64, hidden=32, layers=3, length=64, scan=form)
        loss = losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"]
        grads[form] = (loss.detach(), torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(grads["doubling"][0], grads["sequential"][0])
    for a, b in zip(grads["doubling"][1], grads["sequential"][1]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_no_position_sees_the_future(model, ids):
    with torch.no_grad():
        before = model(ids).logits
        changed = ids.clone()
        changed[:, 20] = (changed[:, 20] + 1) % 64
        after = model(changed).logits
    assert torch.equal(before[:, :20], after[:, :20])
    # and those after it see the change
    assert (before[:, 20:35] - after[:, 20:35]).abs().amax((0, 2)).gt(0).all()


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("form", goose.SCANS)
def test_packed_and_padded_rows_equal_separate_rows(form, by_token):
    """Logits and gradients.

    Without the positions a packed row leaks; without the mask a padded one is another.
    """
    model = goose.tiny(64, hidden=32, layers=3, length=64, scan=form, decay_by_token=by_token)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))  # so that the state matters
    draw = torch.Generator().manual_seed(2)
    documents = [torch.randint(1, 64, (1, n), generator=draw) for n in (13, 1, 20)]
    apart = [model(one).logits[0] for one in documents]
    positions = torch.cat([torch.arange(one.shape[1]) for one in documents])[None]
    packed = model(torch.cat(documents, 1), position_ids=positions).logits[0]
    left, mask = (torch.zeros(3, 20, dtype=torch.long) for _ in range(2))
    for row, one in enumerate(documents):
        left[row, 20 - one.shape[1] :], mask[row, 20 - one.shape[1] :] = one[0], 1
    padded, turned = (
        model(left, attention_mask=mask).logits,
        model(left.flip(1), attention_mask=mask.flip(1)).logits,
    )
    with torch.no_grad():
        right = [model(one.flip(1)).logits[0] for one in documents]
    for row, one in enumerate(apart):
        start = sum(len(other) for other in apart[:row])
        torch.testing.assert_close(packed[start : start + len(one)], one, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(padded[row, 20 - len(one) :], one, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(turned[row, : len(one)], right[row], rtol=1e-5, atol=1e-5)
    of_each = torch.autograd.grad(
        sum(one.square().sum() for one in apart), list(model.parameters())
    )
    of_packed = torch.autograd.grad(packed.square().sum(), list(model.parameters()))
    for a, b in zip(of_each, of_packed):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    leaks = (model(torch.cat(documents, 1)).logits[0, 14:] - apart[2]).abs().max()
    assert leaks > 0.01 and (model(left).logits[1, -1] - apart[1][0]).abs().max() > 0.01
    alone = [model.generate(one, max_new_tokens=6)[:, -6:] for one in documents]
    told = model.generate(left, mask, max_new_tokens=6)[:, -6:]
    assert torch.equal(told, torch.cat(alone))
    end = int(told[0, 2])
    stopped = model.generate(documents[0], max_new_tokens=6, eos_token_id=end, pad_token_id=0)[
        0, 13:
    ]
    assert (
        stopped.tolist() == told[0, : len(stopped)].tolist()
        and stopped[-1] == end
        and len(stopped) <= 3
    )


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("piece", [1, 7])
def test_step_by_step_equals_all_at_once_with_a_state_of_fixed_size(ids, piece, by_token):
    model = goose.tiny(64, hidden=32, layers=3, length=64, decay_by_token=by_token)
    with torch.no_grad():
        for p in model.parameters() if by_token else ():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        whole = model(ids).logits
        past, parts, sizes = None, [], set()
        for part in ids.split(piece, dim=1):
            out = model(part, past_key_values=past, use_cache=True)
            past = out.past_key_values
            parts.append(out.logits)
            sizes.add(past.shifted.numel() + past.state.numel())
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    assert sizes == {2 * 3 * 2 * 32} and past.length == 48  # 2 D per layer and row
    told = model.generate(ids[:, :10], max_new_tokens=5)
    grown = ids[:, :10]
    for _ in range(5):
        grown = torch.cat([grown, model(grown).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(told, grown)


def test_a_scan_with_a_decay_of_each_position_is_the_recurrence_gradients_included():
    draw = torch.Generator().manual_seed(0)
    documents = (torch.rand(2, 21, generator=draw) < 0.2).cumsum(1)
    for length, where in ((1, None), (2, None), (21, None), (21, documents)):
        x = torch.randn(2, length, 3, dtype=torch.float64, generator=draw).requires_grad_()
        d = torch.rand(2, length, 3, dtype=torch.float64, generator=draw).requires_grad_()
        weights = torch.randn(2, length, 3, dtype=torch.float64, generator=draw)
        found = [form(x, d, where) for form in (goose.sequential, goose.scan)]
        torch.testing.assert_close(found[1], found[0])
        if length > 1:
            grads = [torch.autograd.grad((S * weights).sum(), [x, d]) for S in found]
            torch.testing.assert_close(grads[1], grads[0])
        assert torch.autograd.gradcheck(lambda x, d, where=where: goose.scan(x, d, where), (x, d))
    with torch.no_grad():  # one decay for all positions is the fixed one
        torch.testing.assert_close(goose.scan(x, d[0, 0].expand(2, 21, 3)), goose.scan(x, d[0, 0]))


def test_decays_by_token_start_as_fixed_ones_and_learn_what_to_keep(model, ids):
    own = goose.tiny(64, hidden=32, layers=3, length=64, decay_by_token=True)
    fixed, named = dict(model.named_parameters()), dict(own.named_parameters())
    assert {n for n in named if n not in fixed} == {
        f"model.layers.{i}.recurrent.decay.weight" for i in range(3)
    }
    assert all(torch.equal(named[n], p) for n, p in fixed.items())
    torch.testing.assert_close(own(ids).logits, model(ids).logits, rtol=1e-6, atol=1e-6)
    losses.causal_lm(own, {"input_ids": ids, "labels": ids})["ce"].backward()
    weights = [block.recurrent.decay.weight for block in own.model.layers]
    assert all(float(w.abs().max()) == 0 < float(w.grad.abs().max()) for w in weights)
    with torch.no_grad():
        for w in weights:
            w -= 100 * w.grad
    assert float((own(ids).logits - model(ids).logits).abs().max()) > 1e-4


def test_a_token_can_clear_the_state_which_a_fixed_decay_cannot():
    """Whether the last token stands after a reset: the logits then hang on what came before, or
    they do not.
    """
    layer = goose.Recurrent(
        goose.GooseConfig(hidden_size=8, num_hidden_layers=1, decay_by_token=True), 0
    ).double()
    with torch.no_grad():
        layer.mix["r"].fill_(1), layer.decay.weight.copy_(-50 * torch.eye(8))
        x = torch.randn(2, 6, 8, dtype=torch.float64)
        x[1, 3:] = x[0, 3:]  # two histories, one end
        x[:, 3] = torch.tensor([9.0, 9, 9, 9, -9, -9, -9, -9])
        state = [
            layer(row[None], torch.zeros(1, 8).double(), torch.zeros(1, 8).double())[2][0]
            for row in x
        ]
    cleared, kept = slice(0, 4), slice(4, 8)
    assert (
        float((state[0] - state[1])[cleared].abs().max())
        < 1e-9
        < float((state[0] - state[1])[kept].abs().max())
    )


def test_a_student_with_decays_by_token_is_saved_and_loaded(ids, tmp_path):
    own = goose.tiny(64, hidden=32, layers=2, length=64, decay_by_token=True)
    torch.nn.init.normal_(own.model.layers[1].recurrent.decay.weight)
    own.save_pretrained(tmp_path)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.decay_by_token and torch.equal(again(ids).logits, own(ids).logits)


def test_the_spike_is_ternary_and_straight_through():
    spike = Spike(alpha=1.0)
    spike.amplitude.data.fill_(0.5)
    x = torch.tensor([[3.0, -2.0, 0.5, -0.1]], requires_grad=True)  # mean of |x| is 1.4
    out = spike(x)
    assert out.tolist() == [[0.5, -0.5, 0.0, 0.0]]
    out.backward(torch.tensor([[1.0, 10.0, 100.0, 1000.0]]))
    assert (
        x.grad.tolist() == [[1.0, 10.0, 100.0, 1000.0]]
        and float(spike.amplitude.grad) == 1.0 - 10.0
    )
    assert spike(1e-4 * x).tolist() == [[0.0] * 4]  # the threshold's floor
    assert spike(7 * x).tolist() == out.tolist()  # relative to the token's own channels


def test_the_layer_is_the_write_ups_formula(model):
    """One layer written out, position by position, in float64."""
    layer = model.model.layers[1].recurrent.double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    zeros = torch.zeros(1, 32, dtype=torch.float64)
    ours, last, state = layer(x, zeros, zeros)
    y, S = layer.norm(x[0]), torch.zeros(32, dtype=torch.float64)

    def spiked(z, a):
        theta = z.abs().mean().clamp(0.01, 10)
        return a * ((z > theta).double() - (z < -theta).double())

    for t in range(9):
        shift = {
            n: m * y[t] + (1 - m) * (y[t - 1] if t else torch.zeros(32).double())
            for n, m in layer.mix.items()
        }
        k = spiked(layer.key.weight @ shift["k"], layer.spike_k.amplitude)
        v = spiked(layer.value.weight @ shift["v"], layer.spike_v.amplitude)
        r = torch.sigmoid(layer.receptance.weight @ shift["r"])
        S = torch.sigmoid(layer.w) * S + k * v
        torch.testing.assert_close(ours[0, t], x[0, t] + r * (layer.out.weight @ S))
    torch.testing.assert_close(state[0], S)
    torch.testing.assert_close(last[0], y[-1])


def test_it_starts_as_the_write_up_says():
    model = goose.tiny(512, hidden=128, layers=4)
    layers = [block.recurrent for block in model.model.layers]
    assert [round(float(layer.mix["k"][0]), 3) for layer in layers] == [1.0, 0.667, 0.333, 0.0]
    decays = layers[0].w.detach().sigmoid()
    assert [float(decays[0]), float(decays[-1])] == pytest.approx([0.3, 0.997], abs=1e-4) and (
        decays.diff() > 0
    ).all()
    theirs = (
        goose.tiny(512, hidden=128, layers=4, decays=(0.38, 0.38))
        .model.layers[0]
        .recurrent.w.sigmoid()
    )
    assert theirs.tolist() == pytest.approx([0.38] * 128)
    assert float(layers[0].key.weight.std()) == pytest.approx(0.1 / math.sqrt(128), rel=0.05)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_saved_and_loaded_it_says_the_same(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, goose.GooseForCausalLM) and torch.equal(
        again(ids).logits, model(ids).logits
    )
    assert models.count(again) == models.count(model)


def test_it_fits_the_librarys_tools(model, ids):
    backbone, weight = losses.backbone_and_head(model)
    assert backbone is model.model and weight is model.lm_head.weight
    found = wiring.canary(
        model,
        lambda: losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"] / ids.numel(),
    )
    assert found.alive, found.sentence
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 4 and torch.equal(model.lm_head(states[-1]), model(ids).logits)
    ours = losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"] / (2 * 47)
    torch.testing.assert_close(ours, model(ids, labels=ids).loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(ids).logits.isfinite().all()
    facts = memory.estimate(model.config, rows=2, length=32)
    assert facts["weights"] == 4 * models.count(model)["all"]
    plain = torch.autograd.grad(ours, model.model.layers[0].recurrent.key.weight)[0]
    compiling.checkpoint_blocks(model)
    again = losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"] / (2 * 47)
    torch.testing.assert_close(
        torch.autograd.grad(again, model.model.layers[0].recurrent.key.weight)[0], plain
    )


def test_what_cannot_be_is_refused(model):
    with pytest.raises(ValueError, match="scan = 'divided': allowed are doubling, sequential"):
        goose.tiny(64, scan="divided")
    with pytest.raises(ValueError, match="alpha = 0"):
        goose.tiny(64, alpha=0.0)
    with pytest.raises(
        ValueError, match="decays = .*1.0.: must be two numbers above 0 and below 1"
    ):
        goose.tiny(64, decays=(0.3, 1.0))
    with pytest.raises(ValueError, match=r"attention_mask \(1, 3\): must be \(1, 4\)"):
        model(torch.zeros(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="must be padded at the left"):
        model.generate(
            torch.zeros(1, 2, dtype=torch.long), torch.tensor([[1, 0]]), max_new_tokens=1
        )
    with pytest.raises(ValueError, match="max_position_embeddings allows 64"):
        model(torch.zeros(1, 65, dtype=torch.long))


def test_it_learns_from_a_teacher_and_resumes_to_the_bit(stream, tmp_path):
    teacher = models.tiny(256, hidden=48, layers=2, heads=2, seed=9)
    batches = text.Batches(stream, rows=8, length=32)
    train.fit(teacher, batches, train.adamw(teacher, lr=1e-2), total=40, machine=FP32)
    models.as_teacher(teacher)

    def run(total, folder=None):
        student = goose.tiny(256, hidden=32, layers=2, length=32)
        batches = text.Batches(stream, rows=8, length=32)
        options = dict(
            total=total,
            machine=FP32,
            loss=from_teacher(teacher, 2.0, ce=0.5),
            checkpoints=train.Checkpoints(folder),
        )
        return student, train.fit(student, batches, train.adamw(student, lr=1e-2), **options)

    straight, records = run(60)
    assert records[-1]["loss"] < 0.6 * records[0]["loss"]
    run(57, tmp_path)
    resumed, again = run(60, tmp_path)
    assert [r["loss"] for r in again] == [r["loss"] for r in records]
    for a, b in zip(straight.parameters(), resumed.parameters()):
        assert torch.equal(a, b)
