"""Chunked losses against plain ones, in float64 where equality is meant, and their memory."""

import pytest
import torch
import transformers as tf
from conftest import FP32
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from nblib import losses, memory, models
from nblib.batch import Batch
from nblib.methods.distill import objective


def _leaves(n=37, d=16, v=53, dtype=torch.float64):
    h = torch.randn(n, d, dtype=dtype, requires_grad=True)
    w = torch.randn(v, d, dtype=dtype, requires_grad=True)
    return h, w, torch.randint(v, (n,))


def _grads(value, *leaves):
    return torch.autograd.grad(value * 0.37, leaves)  # a scale other than one, as accumulation has


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_cross_entropy_equals_the_plain_one(chunk):
    h, w, y = _leaves()
    plain = F.cross_entropy(h @ w.T, y, reduction="sum")
    ours = losses.chunked_loss(h, w, y, chunk=chunk)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for a, b in zip(_grads(ours, h, w), _grads(plain, h, w)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_any_row_loss_can_be_summed():
    h, w, y = _leaves()

    def focal(logits, targets):
        nll = F.cross_entropy(logits, targets, reduction="none")
        return (1 - torch.exp(-nll)) ** 2 * nll

    def rows(logits, targets):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            values = focal(leaf, targets)
            return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]

    plain = focal(h @ w.T, y).sum()
    ours = losses.chunked_loss(h, w, y, rows=rows, chunk=8)
    torch.testing.assert_close(ours, plain)
    for a, b in zip(_grads(ours, h, w), _grads(plain, h, w)):
        torch.testing.assert_close(a, b)


def test_frozen_sides_get_no_gradient_and_no_buffer():
    h, w, y = _leaves()
    losses.chunked_loss(h, w.detach(), y).backward()
    assert h.grad is not None and w.grad is None
    with torch.no_grad():
        assert not losses.chunked_loss(h, w, y).requires_grad


def test_second_backward_raises():
    h, w, y = _leaves()
    value = losses.chunked_loss(h, w, y)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward called twice"):
        value.backward()


def test_autocast_keeps_the_loss_in_fp32():
    h, w, y = _leaves(n=256, d=64, v=512, dtype=torch.float32)
    plain = F.cross_entropy(h @ w.T, y, reduction="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = losses.chunked_loss(h, w, y, chunk=50)
    assert ours.dtype == torch.float32
    assert abs(float((ours - plain).detach()) / float(plain.detach())) < 5e-3
    for a, b in zip(_grads(ours, h, w), _grads(plain, h, w)):
        assert F.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.999


def test_the_heads_gradient_in_slices_of_the_vocabulary_is_that_of_the_whole(monkeypatch):
    """In a low precision, where each slice is added to the sum in fp32; no slice is wider than
    asked for.
    """
    h, w = torch.randn(24, 8), torch.randn(50, 8, requires_grad=True)
    y = torch.randint(50, (24,))
    gradients, largest = [], []
    for width in (2**15, 16):
        monkeypatch.setattr(losses, "SLICE", width)
        w.grad = None
        with torch.autocast("cpu", torch.bfloat16), memory.Account() as account:
            losses.chunked_loss(h, w, y).backward()
        gradients.append(w.grad.clone())
        largest.append(account.most)
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0
    assert largest[1] < largest[0]


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_model_loss_equals_transformers_own(family):
    """Every family, tied head, ragged labels: loss and gradients as `model(labels=...)` gives
    them.
    """
    # GPT-2 has dropout
    model = models.tiny(128, family=family, hidden=32, layers=2, heads=2).eval()
    ids = torch.randint(128, (3, 20))
    labels = ids.masked_fill(torch.rand(3, 20) < 0.4, losses.IGNORED)
    assert losses.backbone_and_head(model) is not None
    n = int(losses.supervised(labels))
    with FP32.autocast():
        ours = losses.causal_lm(model, {"input_ids": ids, "labels": labels})["ce"] / n
    theirs = model(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    a = torch.autograd.grad(ours, list(model.parameters()), allow_unused=True)
    b = torch.autograd.grad(theirs, list(model.parameters()), allow_unused=True)
    for x, y in zip(a, b):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-6)


def test_a_wrapped_head_falls_back_to_the_logits():
    model = models.tiny(64, hidden=32, layers=1, heads=2, tie_word_embeddings=False)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert losses.backbone_and_head(model) is None
    ids = torch.randint(64, (2, 8))
    ours = losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"] / 14
    torch.testing.assert_close(ours, model(input_ids=ids, labels=ids).loss)


SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=48,
)
SHAPE |= dict(pad_token_id=0, eos_token_id=1, bos_token_id=2)
MAMBA = dict(mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8)
GRIFFIN = dict(lru_width=32, head_dim=16, attention_window_size=16)
AROUND = {  # each by a name of its own in its config: the logits -99 and 99 become these
    "soft cap": (
        lambda: tf.Gemma2Config(**SHAPE, num_hidden_layers=2, head_dim=16),
        "-29.9 to 29.9",
    ),
    "FalconH1": (
        lambda: tf.FalconH1Config(**SHAPE, num_hidden_layers=2, lm_head_multiplier=0.3, **MAMBA),
        "29.7",
    ),
    "RecurrentGemma": (
        lambda: tf.RecurrentGemmaConfig(**SHAPE, logits_soft_cap=0.5, **GRIFFIN),
        "-0.5 to 0.5",
    ),
    "Granite": (
        lambda: tf.GraniteConfig(**SHAPE, num_hidden_layers=2, logits_scaling=8.0),
        "-12.4 to 12.4",
    ),
    "Cohere": (lambda: tf.CohereConfig(**SHAPE, num_hidden_layers=2), "-6.19 to 6.19"),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_model_that_scales_or_caps_its_logits_gets_its_own_loss(name):
    """The loss is that of its own logits, and what needs a plain head is refused with what the
    model does to them.
    """
    config, becomes = AROUND[name]
    model = tf.AutoModelForCausalLM.from_config(config()).eval()
    ids = torch.randint(3, 64, (2, 8))
    ours = losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"] / 14
    torch.testing.assert_close(ours, model(input_ids=ids, labels=ids, use_cache=False).loss)
    with pytest.raises(
        ValueError, match=f"{type(model).__name__}: the head must be one .*{becomes}"
    ) as refused:
        losses.backbone_and_head(model, needed=True)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="the head must be one matrix product"):
        objective.from_teacher(models.as_teacher(model))(
            models.tiny(64, hidden=32, layers=1, heads=2), {"labels": ids}
        )


def test_a_model_of_ones_own_that_changes_what_its_head_is_given_is_seen():
    """Whatever happens between backbone and head; and the question leaves the model as it was."""

    class Halved(tf.LlamaForCausalLM):
        def forward(self, *args, **options):
            hidden = self.model(*args, **options).last_hidden_state
            return CausalLMOutput(logits=self.lm_head(hidden / 2))

    own = Halved(models.tiny(64, family="llama", hidden=32, layers=1, heads=2).config).train()
    parts = dict(own.named_modules())
    with pytest.raises(ValueError, match="what its head is given is not what its backbone gives"):
        losses.backbone_and_head(own, needed=True)
    assert dict(own.named_modules()) == parts and all(p.grad is None for p in own.parameters())
    other = tf.LlamaForCausalLM(own.config)
    assert losses.backbone_and_head(other, needed=True) == (other.model, other.lm_head.weight)


def test_the_head_is_asked_once_and_not_by_the_model(monkeypatch):
    """No block runs for the question: no dropout is drawn, no hook is called, nothing of a card is
    read.
    """
    model, calls = models.tiny(64, family="gpt2", hidden=32, layers=1, heads=2).train(), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append(1))
    before = torch.get_rng_state()
    assert losses.backbone_and_head(model) is not None
    assert not calls and torch.equal(before, torch.get_rng_state())
    monkeypatch.setattr(losses, "_around_the_head", lambda *_: calls.append(1))
    assert losses.backbone_and_head(model) is not None and not calls


@pytest.mark.slow
def test_memory_at_a_real_vocabulary():
    """151,936 entries, 2,048 tokens, hidden 64, fp32: at most 0.3 GiB over the inputs, and not
    slower.
    """
    import time

    h = torch.randn(2048, 64, requires_grad=True)
    w = (0.02 * torch.randn(151_936, 64)).requires_grad_()
    y = torch.randint(151_936, (2048,))
    figures = {}
    for name, loss in {
        "plain": lambda: F.cross_entropy(h @ w.T, y, reduction="sum"),
        "chunked": lambda: losses.chunked_loss(h, w, y),
    }.items():
        h.grad = w.grad = None
        started = time.perf_counter()
        with memory.peak() as peak:
            loss().backward()
        figures[name] = (peak.gib, time.perf_counter() - started)
        print(
            f"{name}: peak {peak.gib:.2f} GiB over the inputs ({peak.source}), {figures[name][1]:.1f} s"
        )
    assert figures["chunked"][0] < 0.3
    assert figures["plain"][0] > 2.5  # the measurement sees what it should
    assert figures["chunked"][1] < figures["plain"][1]


@pytest.mark.parametrize("whole, positions", [(True, False), (False, False), (True, True)])
def test_a_mask_that_leaves_nothing_out_does_not_reach_the_model(whole, positions):
    """Nor are positions asked for packed rows, unless the batch brings its own."""
    from transformers import masking_utils

    asked, ask = {}, masking_utils.find_packed_sequence_indices
    ids, mask = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4)
    if not whole:
        mask[0, 3] = 0
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    if positions:
        batch["position_ids"] = ids

    def model(**inputs):
        asked.update(inputs, packed=masking_utils.find_packed_sequence_indices)

    losses.forward(model, Batch.of(batch))
    assert ("attention_mask" in asked) == (not whole) and "labels" not in asked
    assert (
        asked["packed"] is ask
    ) == positions and masking_utils.find_packed_sequence_indices is ask


def test_an_ignored_row_has_no_loss_and_no_gradient():
    logits, targets = torch.randn(5, 7), torch.tensor([3, losses.IGNORED, 0, 6, losses.IGNORED])
    leaf = logits.clone().requires_grad_()
    torch.nn.functional.cross_entropy(leaf, targets, reduction="sum").backward()
    values, gradient = losses.cross_entropy_rows(logits.clone(), targets)
    assert values[1] == values[4] == 0
    torch.testing.assert_close(gradient, leaf.grad)
