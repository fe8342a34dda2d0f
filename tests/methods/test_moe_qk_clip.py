"""QK-clip: a head above tau comes to tau, the others keep every bit, and a shared key head is
scaled once.
"""

import pytest
import torch
import transformers as tf
from conftest import FP32
from torch import distributed as dist
from torch import nn

from nblib import models, text, train
from nblib.methods.moe import qk_clip
from nblib.methods.muon import groups

TAU = 2.0


def model(family="llama", *, kv=4, seed=0, **config):
    return models.tiny(
        64, family=family, hidden=64, layers=1, heads=4, num_key_value_heads=kv, seed=seed, **config
    )


def attention(net) -> nn.Module:
    return net.model.layers[0].self_attn


@pytest.fixture
def ids():
    return torch.randint(64, (3, 12), generator=torch.Generator().manual_seed(0))


def logits(net, ids) -> torch.Tensor:
    """Largest logits (H,) of the only layer, from its input, step by step."""
    seen = {}

    def take(module, args, kwargs):
        seen["x"], seen["rope"] = kwargs["hidden_states"], kwargs["position_embeddings"]

    m = attention(net)
    hook = m.register_forward_pre_hook(take, with_kwargs=True)
    with torch.no_grad():
        net(ids)
        hook.remove()
        x, (cos, sin) = seen["x"], seen["rope"]
        shape = (*x.shape[:2], -1, m.head_dim)
        normed = [getattr(m, n, nn.Identity()) for n in ("q_norm", "k_norm")]
        q, k = (n(p(x).view(shape)).transpose(1, 2) for n, p in zip(normed, (m.q_proj, m.k_proj)))
        rotate = tf.models.llama.modeling_llama.apply_rotary_pos_emb
        q, k = rotate(q, k, cos, sin)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q @ k.mT / m.head_dim**0.5  # (B, H, T, T)
        below = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~below, -torch.inf).amax(dim=(0, 2, 3))


def raised(net, heads, *, times):
    """Some query heads with larger weights."""
    m = attention(net)
    with torch.no_grad():
        for h in heads:
            m.q_proj.weight.view(-1, m.head_dim, 64)[h] *= times


def clipped(net, ids, *, tau=TAU):
    """One forward pass in training mode and one step that moves nothing."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    clip = qk_clip.attach(net, optimizer, tau=tau)
    net.train()(ids)
    seen = next(iter(clip.largest().values()))
    optimizer.step()
    return clip, seen


@pytest.mark.parametrize("kv", [4, 2])
def test_what_is_seen_is_the_largest_logit_and_the_loss_stays(ids, kv):
    net = model(kv=kv)
    with torch.no_grad():
        before, expected = net(ids).logits, logits(net, ids)
    _, seen = clipped(net, ids, tau=1e9)
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(net(ids).logits, before)


def test_a_head_above_comes_to_tau_and_the_others_keep_every_bit(ids):
    net = model()
    raised(net, [1, 3], times=2000)
    m, at_first = attention(net), logits(net, ids)
    assert (at_first > TAU).tolist() == [False, True, False, True]
    before = {
        n: p.detach().clone().view(4, m.head_dim, -1)
        for n, p in m.named_parameters()
        if n[0] in "qk"
    }
    clip, _ = clipped(net, ids)
    assert clip.clipped == 2
    torch.testing.assert_close(logits(net, ids)[[1, 3]], torch.full((2,), TAU), rtol=1e-4, atol=0)
    for name, p in m.named_parameters():
        if name in before:
            now = p.detach().view(4, m.head_dim, -1)
            assert torch.equal(now[[0, 2]], before[name][[0, 2]]), name
            root = (TAU / at_first[[1, 3]]).sqrt()[:, None, None]
            torch.testing.assert_close(now[[1, 3]], before[name][[1, 3]] * root, rtol=1e-4, atol=0)


def test_a_shared_key_head_is_scaled_once_by_what_its_worst_head_needs(ids):
    """Heads 0 and 1 share key head 0.

    Both are above, at different heights; heads 2 and 3 keep every bit.
    """
    net = model(kv=2)
    raised(net, [0], times=1000), raised(net, [1], times=8000)
    m, at_first = attention(net), logits(net, ids)
    assert (at_first > TAU).tolist() == [True, True, False, False]
    keys = m.k_proj.weight.detach().clone().view(2, m.head_dim, -1)
    queries = m.q_proj.weight.detach().clone().view(4, m.head_dim, -1)
    clipped(net, ids)
    torch.testing.assert_close(logits(net, ids)[:2], torch.full((2,), TAU), rtol=1e-4, atol=0)
    now = m.k_proj.weight.detach().view(2, m.head_dim, -1)
    torch.testing.assert_close(
        now[0], keys[0] * (TAU / at_first[:2].max()).sqrt(), rtol=1e-4, atol=0
    )
    assert torch.equal(now[1], keys[1])
    assert torch.equal(m.q_proj.weight.detach().view(4, m.head_dim, -1)[2:], queries[2:])


def test_a_quiet_head_beside_a_loud_one_keeps_its_logits(ids):
    net = model(kv=2)
    raised(net, [1], times=4000)
    before = logits(net, ids)
    clipped(net, ids)
    after = logits(net, ids)
    assert before[1] > TAU and float(after[1]) == pytest.approx(TAU, rel=1e-4)
    torch.testing.assert_close(after[0], before[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_with_norms_of_all_heads_the_norms_shrink_and_the_worst_head_comes_to_tau(ids, family):
    net = model(family, kv=2)
    m = attention(net)
    with torch.no_grad():
        m.q_norm.weight.mul_(5), m.k_norm.weight.mul_(3)
    before, weights = (
        logits(net, ids),
        [p.detach().clone() for p in (m.q_proj.weight, m.k_proj.weight)],
    )
    assert before.max() > TAU
    clipped(net, ids)
    torch.testing.assert_close(logits(net, ids), before * TAU / before.max(), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(p, w) for p, w in zip((m.q_proj.weight, m.k_proj.weight), weights))


def test_with_norms_over_the_whole_width_each_head_has_weights_of_its_own(ids):
    """OLMoE's."""
    shape = dict(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    config = tf.OlmoeConfig(**shape, intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    net = tf.AutoModelForCausalLM.from_config(config)
    m = attention(net)
    with torch.no_grad():
        m.q_norm.weight.view(4, -1)[2] *= 30
    before = m.q_norm.weight.detach().clone().view(4, -1)
    _, seen = clipped(net, ids, tau=5.0)
    assert seen[2] > 5 and (seen[[0, 1, 3]] < 5).all()
    now = m.q_norm.weight.detach().view(4, -1)
    assert torch.equal(now[[0, 1, 3]], before[[0, 1, 3]]) and bool((now[2] < before[2]).all())
    net.train()(ids)
    again = getattr(m, qk_clip.LARGEST)
    assert float(again[2]) == pytest.approx(5.0, rel=1e-3)


def test_evaluation_is_not_seen_and_a_padded_position_is_not_either(ids):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    clip = qk_clip.attach(net, optimizer, tau=TAU)
    with torch.no_grad():
        net.eval()(ids)
        assert all(s.isinf().all() for s in clip.largest().values())
        mask = torch.ones_like(ids)
        mask[:, 6:] = 0
        net.train()(ids, attention_mask=mask)
        padded = next(iter(clip.largest().values()))
        optimizer.step()
        net(ids[:, :6])
    assert (next(iter(clip.largest().values())) <= padded + 1e-6).all()


def test_in_a_training_no_head_begins_a_step_far_above_and_a_resume_is_the_straight_run(
    stream, tmp_path
):
    """The head that is loud at the start is at tau after the first step."""
    found = {}
    for name, totals in {"straight": (4,), "resumed": (2, 4)}.items():
        for total in totals:
            net = models.tiny(256, family="llama", hidden=32, layers=2, heads=2, seed=1)
            with torch.no_grad():
                net.model.layers[0].self_attn.q_proj.weight.mul_(3000)
            both = groups.optimizers(net)
            clip = qk_clip.attach(net, both[0], tau=TAU)
            options = dict(
                total=total,
                schedule=train.cosine(4, warmup=1),
                machine=FP32,
                checkpoints=train.Checkpoints(tmp_path / name),
            )
            train.fit(net, text.Batches(stream, rows=2, length=16), both, **options)
            if name == "straight":
                assert clip.clipped > 0
        found[name] = [p.detach() for p in net.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(*found.values()))


@pytest.mark.parametrize(
    ("family", "sentence"),
    [("gpt2", "no attention with q_proj and k_proj"), ("llama", "tau = 0.0: must be above 0")],
)
def test_refused(family, sentence):
    net = models.tiny(64, family=family, hidden=32, layers=1, heads=2)
    with pytest.raises(ValueError, match=sentence):
        qk_clip.attach(
            net, torch.optim.SGD(net.parameters(), lr=0.0), tau=TAU if family == "gpt2" else 0.0
        )


def test_refused_twice_and_with_a_norm_that_adds_one(ids):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    qk_clip.attach(net, optimizer)
    with pytest.raises(ValueError, match="clipped already"):
        qk_clip.attach(net, optimizer)
    gemma = tf.Gemma3TextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16
    )
    other = tf.AutoModelForCausalLM.from_config(gemma)
    with pytest.raises(
        ValueError, match="q_norm is a Gemma3RMSNorm, whose output its weight does not scale"
    ):
        qk_clip.attach(other, optimizer)


def test_all_processes_scale_by_the_largest_of_all(ids, monkeypatch):
    """Otherwise copies of a model that are meant to stay equal would part."""
    nets = [model(), model()]
    clip, seen = clipped(nets[0], ids)
    elsewhere = seen + 10 * TAU  # what another process saw

    def largest_of_both(here, op):
        assert op == dist.ReduceOp.MAX
        here.copy_(torch.maximum(here, elsewhere))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", largest_of_both)
    clipped(nets[1], ids)
    expected = model()
    qk_clip.scale(attention(expected), elsewhere, tau=TAU)
    assert torch.equal(attention(nets[1]).q_proj.weight, attention(expected).q_proj.weight)
    assert not torch.equal(attention(nets[0]).q_proj.weight, attention(expected).q_proj.weight)


def test_weights_that_are_cut_are_refused(ids, monkeypatch):
    net = model()
    monkeypatch.setattr(qk_clip, "DTensor", nn.Parameter)
    with pytest.raises(ValueError, match="use mesh=ddp"):
        clipped(net, ids)
