"""ARD-LoRA: the KL and its input, padding, priors, relevance, pruning, calibration, files, and the Trainer."""

import copy
import time
from types import SimpleNamespace

import numpy
import peft
import pytest
import torch
import transformers as tf
from conftest import FP32
from torch import nn
from torch.distributions import Normal, kl_divergence

from nblib import checkpoint, compiling, doctor, losses, models, text, train, wiring
from nblib.methods import ard, ard_ranks, ard_run, ard_trainer, uncertainty

KINDS = ("q_proj", "v_proj", "o_proj")


def _model(family: str = "qwen3", *, rank: int = 4, kinds=KINDS, wake: bool = True, hidden: int = 64, **options):
    """Two layers with adapters; `wake` gives B values, or the adapters would not be seen in the output."""
    model = models.tiny(256, family=family, hidden=hidden, layers=2)
    torch.manual_seed(0)
    ard.attach(model, rank=rank, alpha=2 * rank, targets=ard.projections(model, kinds), **options)
    if wake:
        for a in ard.adapters(model).values():
            nn.init.normal_(a.lora_up, std=0.1)
            if a.lora_logvar is not None:
                nn.init.normal_(a.lora_logvar, std=0.05)  # so that the noise depends on the input
    return model


def _batch(rows: int = 4, length: int = 16, seed: int = 3) -> dict:
    ids = torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def _ragged(lengths=(16, 5, 9, 12), side: str = "right", pad: int = 0) -> tuple[dict, list[dict]]:
    """One padded batch, and the same rows one by one without padding."""
    rows = [_batch(1, n, seed=n) for n in lengths]
    made = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        n = max(lengths) - row["input_ids"].shape[1]
        room = (0, n) if side == "right" else (n, 0)
        made["input_ids"].append(nn.functional.pad(row["input_ids"], room, value=pad))
        made["labels"].append(nn.functional.pad(row["labels"], room, value=losses.IGNORED))
        made["attention_mask"].append(nn.functional.pad(torch.ones_like(row["input_ids"]), room))
    return {name: torch.cat(parts) for name, parts in made.items()}, rows


def _collected(model, batch) -> tuple[dict, torch.Tensor]:
    with ard.collect(model) as seen:
        losses.causal_lm(model, batch)
    return seen, ard.kl(seen, batch.get("attention_mask"))


def _gradients(model, batch, loss) -> tuple[dict, dict]:
    """Terms and gradients of one step in training mode, from a fixed seed."""
    torch.manual_seed(5)
    model.train().zero_grad()
    terms = loss(model, batch)
    sum(terms.values()).backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in wiring.trainable(model).items()}
    terms = {name: term.detach() for name, term in terms.items()}
    return terms, {name: grad.clone() for name, grad in found.items()}


def _by_content(monkeypatch) -> None:
    """Noise that depends on the token's latent alone, so that batches may be cut in any way."""
    monkeypatch.setattr(ard.torch, "randn_like", lambda x: torch.sin(7 * x.detach()))


# ------------------------------------------------------------------ the layer and its KL


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kl_equals_torch_distributions(dtype):
    mean, logvar = torch.randn(500, 8, dtype=dtype) * 2, torch.randn(500, 8, dtype=dtype) * 3
    variance = torch.logspace(-4, 2, 8, dtype=dtype)
    exact = [x.double() for x in (mean, logvar, variance)]
    reference = kl_divergence(Normal(exact[0], (exact[1] / 2).exp()), Normal(torch.zeros(8).double(), exact[2].sqrt()))
    error = (ard.divergence(mean, logvar, variance).double() - reference).abs() / (1 + reference)
    print(f"{dtype}: largest relative difference {float(error.max()):.1e}")
    assert error.max() < 1e-6 and float(ard.divergence(torch.zeros(1), torch.zeros(1), torch.ones(1))) == 0


@pytest.mark.parametrize("logvar", ard.LOGVARS)
def test_the_sampled_forward_has_the_stated_mean_and_variance(logvar):
    torch.manual_seed(0)
    layer = ard.ARDLinear(nn.Linear(16, 5), 3, 0.5, bounds=(-8.0, 4.0) if logvar == "bounded" else None).double()
    nn.init.normal_(layer.lora_up)
    nn.init.normal_(layer.lora_logvar, std=0.5)
    x, draws = torch.randn(1, 16, dtype=torch.float64), 40_000
    mean, spread = layer.latent(x)
    stated = layer.base(x) + 0.5 * mean @ layer.lora_up.T
    variance = 0.25 * (layer.lora_up.square() @ spread.exp().squeeze(0))  # independent ranks
    with torch.no_grad():
        seen = layer.train()(x.expand(draws, -1))
        assert torch.equal(layer.eval()(x), layer.eval()(x)) and torch.allclose(layer.eval()(x), stated)
    assert ((seen.mean(0) - stated).abs() < 5 * (variance / draws).sqrt()).all()
    assert ((seen.var(0) / variance - 1).abs() < 5 * (2 / draws) ** 0.5).all()
    if logvar == "bounded":
        wild = layer.latent(1e4 * x)[1]
        assert wild.min() >= -8 and wild.max() <= 4 and layer.latent(0 * x)[1].sub(-2).abs().max() < 0.1
    else:
        torch.testing.assert_close(layer.latent(x)[1], x @ layer.lora_logvar.T, rtol=0, atol=1e-14)


def test_a_fresh_adapter_changes_nothing_and_everything_trains():
    plain = models.tiny(256, hidden=64, layers=2).eval()
    model, batch = _model(wake=False), _batch()
    assert torch.equal(model(batch["input_ids"]).logits, plain(batch["input_ids"]).logits)  # in training mode
    expected = {f"{n}.{p}" for n in ard.adapters(model) for p in ("lora_mean", "lora_logvar", "lora_middle", "lora_up")}
    assert set(wiring.trainable(model)) == expected
    loss = ard.objective(model, beta=0.1)
    assert wiring.canary(model, lambda: sum(loss(model, batch).values()) / 60, expect=expected).alive


def test_the_kl_is_that_of_the_very_input_of_the_projection():
    """A hook on the frozen projection says what it sees; the KL recomputed from that in float64 is the collected one.
    On the residual stream, where q_proj and v_proj do not live, it is another number, and so on o_proj's."""
    model, batch = _model(kinds=(*KINDS, "down_proj")).train(), _batch()
    inputs, streams = {}, {}
    for name, a in ard.adapters(model).items():
        a.base.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0].detach()}))
    for i, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda _, args, i=i: streams.update({i: args[0].detach()}))
    seen, total = _collected(model, batch)
    assert len(inputs) == 8 and float(total.detach()) > 0
    for name, a in ard.adapters(model).items():
        (latent,) = seen[name]
        right = _kl_at(a, inputs[name])
        assert torch.allclose(latent.kl.double(), right, rtol=1e-5, atol=1e-6)
        if "down_proj" not in name:  # whose input is not as wide as the stream
            wrong = _kl_at(a, streams[int(name.split(".")[2])])
            assert (wrong.mean() / right.mean() - 1).abs() > 0.01


def _kl_at(a: ard.ARDLinear, x: torch.Tensor) -> torch.Tensor:
    """Summed over ranks, in float64, by torch.distributions."""
    mean, logvar = copy.deepcopy(a).double().latent(x.double())
    return kl_divergence(
        Normal(mean, (logvar / 2).exp()), Normal(torch.zeros(a.rank).double(), a.prior.double().sqrt())
    ).sum(-1)


def test_beta_means_the_same_at_any_rank_and_depth():
    """Gradient of the KL term for one rank: not changed by more ranks, nor by more layers."""
    few, many, deep = (_model(rank=r, kinds=k, wake=False) for r, k in ((2, KINDS[:1]), (6, KINDS[:1]), (2, KINDS)))
    name, seen = "model.layers.0.self_attn.q_proj", []
    start = ard.adapters(few)[name]
    for model in (few, many, deep):
        a = ard.adapters(model)[name]
        with torch.no_grad():
            a.lora_mean[:2], a.lora_logvar[:2] = start.lora_mean, start.lora_logvar
        terms, _ = _gradients(model, _batch(), ard.objective(model, beta=0.3))
        a.lora_mean.grad = None
        ard.kl(_collected(model, _batch())[0]).backward()
        seen.append(a.lora_mean.grad[:2].clone())
    assert all(torch.allclose(g, seen[0], rtol=1e-4, atol=1e-6) for g in seen) and seen[0].abs().max() > 0


# ------------------------------------------------------------------ padding, accumulation, checkpointing


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_neither_the_kl_nor_the_priors(side):
    model = _model().eval()
    padded, rows = _ragged(side=side)
    if side == "left":  # positions as they are without padding
        padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        total, singly = float(_collected(model, padded)[1]), sum(float(_collected(model, row)[1]) for row in rows)
    assert total == pytest.approx(singly, rel=1e-5)
    unmasked = {name: t for name, t in padded.items() if name != "attention_mask"}
    assert float(_collected(model, unmasked)[1].detach()) > 1.1 * singly  # what the mask is for

    tokens = ard_ranks.estimate_priors(model, [padded])
    with_padding = {name: a.prior.clone() for name, a in ard.adapters(model).items()}
    assert tokens == ard_ranks.estimate_priors(model, rows) == 42
    for name, a in ard.adapters(model).items():
        assert torch.allclose(a.prior, with_padding[name], rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_checkpointing_changes_no_bit_and_counts_nothing_twice(family):
    """Recomputation draws the same noise, and its KL is not added: loss and gradients are equal bit for bit."""
    model, batch = _model(family), _ragged()[0]
    loss = ard.objective(model, beta=0.1)
    terms, gradients = _gradients(model, batch, loss)
    calls = []
    for a in ard.adapters(model).values():
        a.base.register_forward_hook(lambda *_: calls.append(1))
    again, recomputed = _gradients(compiling.checkpoint_blocks(model), batch, loss)
    assert len(calls) == 2 * len(ard.adapters(model))  # each adapter ran twice
    assert all(torch.equal(terms[k], again[k]) for k in ("ce", "kl"))
    assert all(torch.equal(g, recomputed[n]) for n, g in gradients.items())
    assert all(a.seen is None for a in ard.adapters(model).values())  # recomputation keeps nothing alive


def test_reentrant_checkpointing_is_refused():
    model = _model()
    model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="no graph.*reentrant.*use_reentrant=False"):
        ard.objective(model, beta=0.1)(model.train(), _batch())


def test_accumulation_is_invariant_on_ragged_rows_with_warm_up(monkeypatch):
    """1 x 8 and 2 x 4: the same two steps, and beta rises once per step and not per micro-batch."""
    _by_content(monkeypatch)
    whole, _ = _ragged((16, 5, 9, 12, 3, 16, 7, 10))
    found = []
    for size in (8, 4, 1):
        model = _model()
        sgd = torch.optim.SGD(wiring.trainable(model).values(), lr=0.05)
        micro = [{k: v[i : i + size] for k, v in whole.items()} for i in range(0, 8, size)] * 2
        options = dict(total=2, accumulate=8 // size, machine=FP32, clip=0)
        loss = ard.objective(model, beta=0.1, warmup=4, optimizer=sgd)
        records = train.fit(model, iter(micro), sgd, loss=loss, **options)
        found.append((records, torch.cat([p.detach().flatten() for p in wiring.trainable(model).values()])))
        assert int(model.ard_steps) == 2
    for records, weights in found[1:]:
        assert [r["loss"] for r in records] == pytest.approx([r["loss"] for r in found[0][0]], rel=1e-5)
        assert torch.allclose(weights, found[0][1], atol=1e-6)
    assert found[0][0][1]["kl"] > 1.5 * found[0][0][0]["kl"]  # a quarter of beta, then a half


# ------------------------------------------------------------------ two passes, as the method was first written


def _two_passes(model, batch, beta, through: bool = True):
    """The reference: run the model, run its backbone again for the inputs of the projections, and compute the KL of
    every adapter there in plain operations, with the noise of the first pass. `through` False cuts the inputs off, as
    has been done: cheaper, and no gradient of the KL reaches the layers below."""
    state = torch.get_rng_state()
    ce = losses.causal_lm(model, batch)["ce"]
    torch.set_rng_state(state)
    kept, hooks = {}, []
    for name, a in ard.adapters(model).items():
        hooks.append(a.base.register_forward_pre_hook(lambda _, args, name=name: kept.update({name: args[0]})))
    with torch.set_grad_enabled(through):
        losses.hidden_states(model, batch)
    for hook in hooks:
        hook.remove()
    total = 0
    for name, a in ard.adapters(model).items():
        x = kept[name].float()
        mean, u = x @ a.lora_mean.T, x @ a.lora_logvar.T + a.lora_middle
        logvar = -2 + 6 * torch.tanh((u + 2) / 6)  # bounds (-8, 4)
        each = 0.5 * (a.prior.log() - logvar + (logvar.exp() + mean**2) / a.prior - 1).sum(-1)
        total = total + each[batch["attention_mask"].bool()].sum()
    return {"ce": ce, "kl": beta * total}


def test_two_passes_give_the_same_loss_and_gradients():
    model, batch = _model(), _ragged()[0]
    terms, gradients = _gradients(model, batch, ard.objective(model, beta=0.1))
    reference, theirs = _gradients(model, batch, lambda m, b: _two_passes(m, b, 0.1))
    assert all(float(terms[k]) == pytest.approx(float(reference[k]), rel=1e-5) for k in ("ce", "kl"))
    assert all(torch.allclose(g, theirs[n], rtol=1e-3, atol=1e-3) for n, g in gradients.items())


def test_two_pass_step_is_slower():
    """One run, steps in turn, medians. Aim 1.3 on an idle machine; asserted lower, because this one may be shared."""
    model, batch = _model(hidden=128), _ragged((128,) * 6)[0]
    ways = {
        "ours": ard.objective(model, beta=0.1),
        "two passes": lambda m, b: _two_passes(m, b, 0.1),
        "second one cut off": lambda m, b: _two_passes(m, b, 0.1, through=False),
    }
    times = {name: [] for name in ways}
    for _ in range(12):
        for name, way in ways.items():
            started = time.perf_counter()
            _gradients(model, batch, way)
            times[name].append(time.perf_counter() - started)
    middle = {name: sorted(seconds)[6] for name, seconds in times.items()}
    print(", ".join(f"{n} {1e3 * t:.0f} ms ({t / middle['ours']:.2f})" for n, t in middle.items()))
    assert middle["two passes"] / middle["ours"] > 1.1


# ------------------------------------------------------------------ references: peft, 4 bits, autocast


def test_deterministic_mode_is_peft_lora():
    model, batch = _model(deterministic=True), _batch()
    base = models.tiny(256, hidden=64, layers=2)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(KINDS))
    theirs = peft.get_peft_model(base, config).train()
    for name, a in ard.adapters(model).items():
        layer = theirs.base_model.model.get_submodule(name)
        layer.lora_A.default.weight.data.copy_(a.lora_mean.data)
        layer.lora_B.default.weight.data.copy_(a.lora_up.data)
    terms, gradients = _gradients(model, batch, ard.objective(model, beta=0.1))
    ce, reference = _gradients(theirs, batch, losses.causal_lm)
    assert float(terms["kl"]) == 0 and float(terms["ce"]) == pytest.approx(float(ce["ce"]), rel=1e-6)
    for name in ard.adapters(model):
        for mine, its in (("lora_mean", "lora_A"), ("lora_up", "lora_B")):
            expected = reference[f"base_model.model.{name}.{its}.default.weight"]
            assert torch.allclose(gradients[f"{name}.{mine}"], expected, rtol=1e-4, atol=1e-5)


def test_a_four_bit_base_trains_and_survives_an_evaluation(tmp_path):
    """Loaded as anybody would, without our loader: attach itself forbids the repacking that spoils gradients."""
    import bitsandbytes as bnb

    models.tiny(256, hidden=64, layers=2).save_pretrained(tmp_path)
    config = tf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
    torch.manual_seed(0)
    ard.attach(model, rank=4, alpha=8)
    assert [type(a.base) for a in ard.adapters(model).values()] == [bnb.nn.Linear4bit] * 14
    packed = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}

    twin = models.tiny(256, hidden=64, layers=2)  # the same numbers in fp32
    for name, m in wiring.select(twin).items():
        four = model.get_submodule(name)
        weight = (four.base if isinstance(four, ard.ARDLinear) else four).weight
        m.weight.data.copy_(bnb.functional.dequantize_4bit(weight.data, weight.quant_state))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        twin.get_parameter(name).data.copy_(model.get_parameter(name).data)
    ard.attach(twin, rank=4, alpha=8)
    twin.load_state_dict({n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, strict=False)

    losses.causal_lm(model.eval(), _batch())  # one evaluation
    (a, mine), (b, theirs) = (_gradients(m, _batch(), ard.objective(m, beta=0.1)) for m in (model, twin))
    assert float(a["ce"]) == pytest.approx(float(b["ce"]), rel=1e-5)
    assert all(torch.allclose(g, theirs[n], rtol=1e-3, atol=1e-4) for n, g in mine.items())

    curves = []
    for m in (model, twin):
        torch.manual_seed(1)
        adamw, options = train.adamw(m, lr=2e-2, weight_decay=0.0), dict(total=20, machine=FP32, clip=0)
        records = train.fit(m, iter([_batch()] * 20), adamw, loss=ard.objective(m, beta=1e-3), **options)
        curves.append([r["ce"] for r in records])
    assert curves[0] == pytest.approx(curves[1], abs=1e-3) and curves[0][-1] < curves[0][0] - 0.05
    assert all(torch.equal(p, packed[n]) for n, p in model.named_parameters() if n in packed)


def test_adapter_math_is_fp32_under_autocast():
    model, batch = _model(kinds=("q_proj",)).eval(), _batch()
    kept = {}
    a = next(iter(ard.adapters(model).values()))
    a.register_forward_hook(lambda m, args, out: kept.update(x=args[0], out=out))
    with torch.autocast("cpu", dtype=torch.bfloat16), ard.collect(model) as seen:
        losses.hidden_states(model, batch)
        base = a.base(kept["x"])
    (latent,) = seen[next(iter(seen))]
    exact = kept["x"].double() @ a.lora_mean.double().T
    assert latent.mean.dtype == latent.kl.dtype == torch.float32
    assert torch.allclose(latent.mean.double(), exact, atol=1e-5)  # bf16 products are a hundred times further off
    assert kept["out"].dtype == base.dtype == torch.bfloat16


@pytest.mark.parametrize("four_bit", [False, True])
def test_the_doctor_is_clean(four_bit, stream, tmp_path):
    model = models.tiny(256, hidden=64, layers=2)
    if four_bit:
        model.save_pretrained(tmp_path)
        model = models.load(str(tmp_path), four_bit=True).train()
    ard.attach(model, rank=4, alpha=8)
    optimizer = train.adamw(model, lr=1e-2, weight_decay=0.0)
    objective = ard.objective(model, beta=0.01, warmup=4, optimizer=optimizer)
    with doctor.watch(model, optimizer=optimizer, steps=8) as report:

        def loss(model, batch):
            terms = objective(model, batch)
            report.terms(**terms)
            return terms

        batches, options = text.Batches(stream, rows=4, length=32), dict(total=8, machine=FP32, clip=0)
        train.fit(model, batches, optimizer, loss=loss, **options)
    assert not report.findings, str(report)


# ------------------------------------------------------------------ training: resume, priors, relevance


def _run(folder, stream, steps: int, at_most: int = 99) -> tuple[list[dict], nn.Module]:
    model = _model(wake=False)
    optimizer = train.adamw(model, lr=1e-2)
    batches = text.Batches(stream[:2000], rows=4, length=32)  # 15 steps an epoch
    pool = ard_ranks.HeldOut(text.fixed_rows(stream[4000:8000], length=32), count=16)

    def evaluate() -> dict:
        return {"tokens": ard_ranks.estimate_priors(model, pool.set_epoch(batches.epoch))}

    loss = ard.objective(model, beta=0.05, warmup=12, optimizer=optimizer)
    options = dict(total=steps, machine=FP32, evaluate=evaluate, eval_every=5, checkpoints=folder, checkpoint_every=1)
    records = []
    for record in train.steps(model, batches, optimizer, loss=loss, **options):
        records.append(record)
        if len(records) == at_most:
            break
    return records, model


def test_resume_is_bit_equal_through_warm_up_and_new_priors(tmp_path, stream):
    """Stopped at step 8, inside the warm-up, between two prior updates; the second part crosses an epoch."""
    straight, model = _run(tmp_path / "straight", stream, 20)
    first, _ = _run(tmp_path / "resumed", stream, 20, at_most=8)
    rest, again = _run(tmp_path / "resumed", stream, 20)
    assert rest[0]["step"] == 9 and int(again.ard_steps) == 20
    assert [r["loss"] for r in first + rest] == [r["loss"] for r in straight]
    assert [r["kl"] for r in first + rest] == [r["kl"] for r in straight]
    mine, theirs = model.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert any(not torch.equal(a.prior, torch.ones(4)) for a in ard.adapters(model).values())


def test_a_second_objective_does_not_count_steps_twice():
    model = _model()
    sgd = torch.optim.SGD(wiring.trainable(model).values(), lr=0.0)
    for _ in range(2):
        ard.objective(model, beta=1.0, warmup=4, optimizer=sgd)
    shares = []
    for _ in range(6):
        shares.append(float(ard.warm(model, 4)))
        sgd.step()
    assert shares == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_priors_are_the_mean_square_of_the_latent():
    """Planted means and variances per rank come back, in order; a Monte-Carlo estimate over draws agrees."""
    model = _model(kinds=("q_proj",)).eval()
    name, a = next(iter(ard.adapters(model).items()))
    with torch.no_grad():
        a.lora_mean.copy_(torch.linalg.qr(torch.randn(64, 64))[0][:4] * torch.tensor([2.0, 0.1, 1.0, 0.5])[:, None])
        a.lora_logvar.zero_()
        a.lora_middle.copy_(torch.tensor([0.2, 0.002, 0.05, 0.01]).log())
    seen = {}
    a.base.register_forward_pre_hook(lambda _, args: seen.update(x=args[0].double()))
    batch = _batch(rows=16, length=32)
    ard_ranks.estimate_priors(model, [batch])
    mean, logvar = copy.deepcopy(a).double().latent(seen["x"].flatten(0, 1))
    assert torch.allclose(a.prior.double(), mean.square().mean(0) + logvar.exp()[0], rtol=1e-5)
    assert torch.allclose(a.power.double(), mean.square().mean(0), rtol=1e-5)
    assert a.prior.argsort(descending=True).tolist() == [0, 2, 3, 1]
    draws = mean + torch.randn(200, *mean.shape).double() * (logvar / 2).exp()
    assert torch.allclose(a.prior.double(), draws.square().mean((0, 1)), rtol=0.05)


class _Regression(nn.Module):
    """A projection of fixed random inputs: the smallest thing that priors can be estimated on."""

    base_model_prefix, config = "", SimpleNamespace()

    def __init__(self, n: int = 512):
        super().__init__()
        self.inputs, self.proj = nn.Embedding(n, 16), nn.Linear(16, 12, bias=False)

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, use_cache=None):
        return self.proj(self.inputs(input_ids))


def _planted(deterministic: bool) -> dict[str, list[float]]:
    """Six ranks learn a noisy map of rank three by the evidence bound; relevance per measure, sorted."""
    torch.manual_seed(0)
    model, ids, noise = _Regression(), torch.arange(512)[None], 0.1
    left, right = (torch.linalg.qr(torch.randn(n, n))[0][:, :3] for n in (12, 16))
    planted = left @ torch.diag(torch.tensor([2.0, 1.0, 0.5])) @ right.T
    targets = model(ids)[0].detach() + model.inputs.weight.detach() @ planted.T + noise * torch.randn(512, 12)
    ard.attach(model, rank=6, alpha=6, targets=[model.proj], deterministic=deterministic).train()
    adam = torch.optim.Adam(wiring.trainable(model).values(), lr=2e-2)
    for step in range(1200):
        with ard.collect(model) as seen:
            misfit = 0.5 * (model(ids)[0] - targets).square().sum() / noise**2
        adam.zero_grad()
        ((misfit + ard.kl(seen)) / 512).backward()
        adam.step()
        if step % 100 == 99:
            ard_ranks.estimate_priors(model, [{"input_ids": ids}])
    scores = {by: ard_ranks.relevance(model, by=by)["proj"] for by in ard_ranks.MEASURES}
    return {by: s.sort(descending=True)[0].tolist() for by, s in scores.items()}


def test_ranks_nobody_needs_switch_themselves_off():
    """A map of rank three is planted under six ranks: three stay, with the squared singular values as their signal.
    Without noise and price all six share the work. The prior variance alone does not tell the idle ranks."""
    found, plain = _planted(deterministic=False), _planted(deterministic=True)
    print({by: [round(x, 4) for x in s] for by, s in found.items()}, [round(x, 4) for x in plain["signal"]])
    assert found["signal"][:3] == pytest.approx([4.0, 1.0, 0.25], rel=0.15)
    assert found["signal"][3] < 1e-3 * found["signal"][2] and plain["signal"][3] > 0.1 * plain["signal"][2]
    assert found["variance"][3] > 0.1 * found["variance"][2]


def test_relevance_does_not_depend_on_how_a_rank_is_scaled():
    model = _model().eval()
    ard_ranks.estimate_priors(model, [_batch()])
    before = {by: ard_ranks.relevance(model, by=by) for by in ard_ranks.MEASURES}
    logits = model(_batch()["input_ids"]).logits
    for a in ard.adapters(model).values():
        with torch.no_grad():
            a.lora_mean[1] *= 3.0  # the same map, written differently
            a.lora_up[:, 1] /= 3.0
    ard_ranks.estimate_priors(model, [_batch()])
    after = {by: ard_ranks.relevance(model, by=by) for by in ard_ranks.MEASURES}
    assert torch.allclose(model(_batch()["input_ids"]).logits, logits, atol=1e-5)
    for name in before["signal"]:
        assert torch.allclose(after["signal"][name], before["signal"][name], rtol=1e-4)
        assert after["variance"][name][1] > 3 * before["variance"][name][1]


def test_grades_and_table():
    assert [ard_ranks.grade(v) for v in (0.5, 0.1, 0.05, 0.01, 0.001)] == ["High", "Medium", "Medium", "Low", "Low"]
    assert ard_ranks.grade(0.5, (1.0, 2.0)) == "Low"
    model = _model()
    with pytest.raises(ValueError, match="never estimated"):
        ard_ranks.table(model)
    ard_ranks.estimate_priors(model, [_batch()])
    rows = ard_ranks.table(model)
    assert len(rows) == 6 and all(row["High"] + row["Medium"] + row["Low"] == row["ranks"] == 4 for row in rows)
    assert all(sum(row[f"share of {by}"] for row in rows) == pytest.approx(1) for by in ard_ranks.MEASURES)


def test_the_pool_is_a_function_of_seed_and_epoch_and_apart_from_training():
    rows = torch.arange(40)[:, None].expand(40, 8)
    pool = ard_ranks.HeldOut(rows, count=12, batch=5, seed=1)

    def drawn(epoch: int) -> list[int]:
        return [int(r[0]) for b in pool.set_epoch(epoch) for r in b["input_ids"]]

    first = drawn(0)
    assert len(set(first)) == 12 and drawn(1) != first and drawn(0) == first  # nothing to save, nothing to rewind
    documents = [f"text {i % 150}" for i in range(300)]  # every text twice
    for_training, for_pool = ard_ranks.hold_out(documents, percent=20)
    assert not set(for_training) & set(for_pool) and len(for_training) + len(for_pool) == 300
    assert 0.1 < len(for_pool) / 300 < 0.3
    kept, pool_rows = ard_ranks.hold_out(rows.repeat(2, 1), percent=30)  # every row twice
    assert not set(kept[:, 0].tolist()) & set(pool_rows[:, 0].tolist()) and len(kept) + len(pool_rows) == 80
    with pytest.raises(ValueError, match="percent = 100: allowed are 1 to 99"):
        ard_ranks.hold_out(documents, percent=100)
    with pytest.raises(ValueError, match="leaves one side empty"):
        ard_ranks.hold_out(documents[:1], percent=50)
    for bad in (0, 41):
        with pytest.raises(ValueError, match=f"count = {bad}: allowed are 1 to 40"):
            ard_ranks.HeldOut(rows, count=bad)


# ------------------------------------------------------------------ pruning


def test_pruned_ranks_are_gone_and_what_is_left_acts_as_before():
    model = _model().eval()
    ids, dead = _batch()["input_ids"], {}
    for i, (name, a) in enumerate(ard.adapters(model).items()):
        dead[name] = torch.ones(4)
        dead[name][: i % 5] = 0  # from no rank to all of them
        with torch.no_grad():
            a.lora_up[:, dead[name] == 0] = 0
    logits, before = model(ids).logits, sum(p.numel() for p in wiring.trainable(model).values())
    left = ard_ranks.prune(model, dead, keep=int(sum(d.sum() for d in dead.values())))
    assert list(left.values()) == [4, 3, 2, 1, 0, 4] and len(ard.adapters(model)) == 5
    assert torch.allclose(model(ids).logits, logits, atol=1e-6)
    assert sum(p.numel() for p in wiring.trainable(model).values()) < 0.7 * before
    for name, a in ard.adapters(model).items():
        assert a.lora_mean.shape == a.lora_logvar.shape == (left[name], a.base.in_features) and a.rank == left[name]
        assert a.lora_up.shape == (a.base.out_features, left[name]) and len(a.prior) == len(a.lora_middle) == left[name]
    assert type(model.model.layers[1].self_attn.v_proj) is nn.Linear
    loss = ard.objective(model, beta=0.1)
    records = train.fit(model, iter([_batch()] * 3), train.adamw(model, lr=1e-2), total=3, loss=loss, machine=FP32)
    assert records[-1]["loss"] < records[0]["loss"]


def test_prune_says_what_is_wrong():
    model = _model()
    scores = {name: torch.rand(4) for name in ard.adapters(model)}
    with pytest.raises(ValueError, match="keep = 25: allowed are 0 to 24"):
        ard_ranks.prune(model, scores, keep=25)
    with pytest.raises(ValueError, match="one number per rank of each of the 6 adapters"):
        ard_ranks.prune(model, {}, keep=1)


@pytest.mark.slow
@pytest.mark.base
def test_pruning_by_relevance_costs_less_than_at_random():
    """The stored base model adapted to code by three seeds; then half the ranks go."""
    from nblib import base

    stored = base.load()
    stream = text.encode(text.documents("code"), stored.tokenizer)
    pool, held_out = (
        text.fixed_rows(text.encode(text.documents("code", split), stored.tokenizer), length=64, limit=n)
        for split, n in (("validation", 32), ("held_out", 32))
    )
    for seed in range(3):
        model = copy.deepcopy(stored.model)
        torch.manual_seed(seed)
        ard.attach(model, rank=8, alpha=8, targets=ard.projections(model, KINDS))
        optimizer, batches = train.adamw(model, lr=1e-2), text.Batches(stream, rows=8, length=64, seed=seed)
        options = dict(total=20, machine=FP32, clip=0, schedule=train.cosine(20, warmup=3))
        start = train.evaluate(model, held_out, machine=FP32)["loss"]
        train.fit(model, batches, optimizer, loss=ard.objective(model, beta=0.01), **options)
        ard_ranks.estimate_priors(model, ard_ranks.HeldOut(pool, count=32))
        whole = train.evaluate(model, held_out, machine=FP32)["loss"]
        draw = torch.Generator().manual_seed(seed)
        ways = {by: ard_ranks.relevance(model, by=by) for by in ard_ranks.MEASURES}
        ways["random"] = {name: torch.rand(a.rank, generator=draw) for name, a in ard.adapters(model).items()}
        cost = {}
        for by, scores in ways.items():
            pruned = copy.deepcopy(model)
            ard_ranks.prune(pruned, scores, keep=48)
            cost[by] = train.evaluate(pruned, held_out, machine=FP32)["loss"] - whole
        print(
            f"seed {seed}: {start:.3f} -> {whole:.3f}; half the ranks cost", {k: round(v, 4) for k, v in cost.items()}
        )
        assert whole < start and cost["signal"] < 0.7 * cost["random"]


# ------------------------------------------------------------------ watching and checking


def test_gradient_norms_per_term_leave_no_trace():
    model, batch = compiling.checkpoint_blocks(_model()).train(), _ragged()[0]
    loss = ard.objective(model, beta=0.1)
    kept = {p: torch.randn_like(p) for p in wiring.trainable(model).values()}
    for p, g in kept.items():
        p.grad = g.clone()  # what accumulation has gathered so far
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rows = ard_run.gradient_norms(model, batch, loss)
    assert torch.equal(torch.get_rng_state(), before) and all(torch.equal(p.grad, g) for p, g in kept.items())
    tokens, n = int(losses.supervised(batch["labels"])), 0
    for term in ("ce", "kl", "total"):
        _, found = _gradients(model, batch, lambda m, b, term=term: _only(loss(m, b), term))
        for row in rows:
            own = [g.flatten() for name, g in found.items() if name.startswith(row["layer"] + ".")]
            assert row[term] == pytest.approx(float(torch.cat(own).norm()) / tokens, rel=1e-4)
            n += 1
    assert n == 18


def _only(terms: dict, term: str) -> dict:
    return terms if term == "total" else {term: terms[term]}


def test_statistics_are_those_of_the_real_tokens():
    model, (padded, rows) = _model(), _ragged()
    found, singly = ard_run.statistics(model, [padded]), ard_run.statistics(model, rows)
    assert [r["layer"] for r in found] == list(ard.adapters(model)) and model.training
    for a, b in zip(found, singly):
        assert a["logvar min"] < a["logvar mean"] < a["logvar max"]
        assert all(a[k] == pytest.approx(b[k], rel=1e-4) for k in a if k != "layer")
    total = float(_collected(model.eval(), padded)[1].detach())
    assert sum(r["kl"] for r in found) * 42 == pytest.approx(total, rel=1e-4)


class _Tokens(SimpleNamespace):
    def __len__(self):
        return self.size


def _spoil(model, batch, tokenizer, what: str) -> None:
    if what == "embedding":
        model.get_input_embeddings().weight.requires_grad_(True)
    elif what == "frozen":
        next(iter(ard.adapters(model).values())).lora_up.requires_grad_(False)
    elif what == "bf16":
        model.bfloat16()
    elif what == "vocabulary":
        tokenizer.size = 300
    elif what == "pad":
        model.config.pad_token_id = 7
    elif what == "supervised":
        batch["labels"] = batch["input_ids"]
    elif what == "unmasked":
        del batch["attention_mask"]
    elif what == "labels":
        batch["labels"] = torch.full_like(batch["labels"], losses.IGNORED)
    elif what == "dead":
        for a in ard.adapters(model).values():
            a.register_forward_hook(lambda m, args, out: out.detach())


@pytest.mark.parametrize(
    "what, says",
    [
        ("embedding", "model.embed_tokens.weight is no adapter and trains"),
        ("frozen", "up is an adapter that is frozen"),
        ("bf16", "must be fp32.*bfloat16"),
        ("vocabulary", "300 tokens, the model embeds 256"),
        ("pad", "pad is token 0 for the tokenizer and 7 for the model"),
        ("supervised", "22 padding positions are supervised"),
        ("unmasked", "no attention_mask: its KL would count"),
        ("labels", "none is supervised"),
        ("dead", "a trial of two steps failed"),
    ],
)
def test_preflight_names_the_reason(what, says):
    model, (batch, _) = _model(wake=False), _ragged()
    tokenizer = _Tokens(size=256, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    loss = ard.objective(model, beta=0.1)
    facts = ard_run.preflight(model, tokenizer, batch, loss=loss)
    assert facts["adapters"] == 6 and facts["trainable"] == models.count(model)["trainable"]
    _spoil(model, batch, tokenizer, what)
    with pytest.raises(ValueError, match=says):
        ard_run.preflight(model, tokenizer, batch, loss=loss)


# ------------------------------------------------------------------ uncertainty


def test_ece_and_reliability_against_a_plain_loop():
    draw = numpy.random.default_rng(0)
    confidence = numpy.concatenate([draw.random(3000), numpy.arange(1, 16) / 15])  # and every upper edge
    right = draw.random(len(confidence)) < confidence**2
    rows = uncertainty.reliability(torch.tensor(confidence), torch.tensor(right))
    expected, edges = 0.0, numpy.linspace(0, 1, 16)
    for row, low, high in zip(rows, edges, edges[1:]):
        inside = (confidence > low) & (confidence <= high)
        assert row["tokens"] == inside.sum()
        expected += inside.sum() / len(confidence) * abs(right[inside].mean() - confidence[inside].mean())
    assert uncertainty.ece(rows) == pytest.approx(expected, abs=1e-12) and expected > 0.05
    assert uncertainty.ece(uncertainty.reliability(torch.ones(4), torch.ones(4))) == 0


def test_monte_carlo_averages_probabilities_and_leaves_the_run_alone():
    model, batch = _model().train(), _ragged()[0]
    options = dict(sampling=ard.sampling, seed=4)
    state = torch.get_rng_state()
    found = uncertainty.measure(model, [batch], samples=3, **options)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    in_chunks = uncertainty.measure(model, [batch], samples=3, chunk=7, **options)
    for kind in ("accuracy", "nll", "ece", "tokens"):
        assert found[kind] == pytest.approx(in_chunks[kind], rel=1e-6)
    assert not any(a.sampled for a in ard.adapters(model).values())

    model.eval()
    torch.manual_seed(4)
    keep = batch["labels"][:, 1:] != losses.IGNORED
    true, inputs = batch["labels"][:, 1:][keep], {k: batch[k] for k in ("input_ids", "attention_mask")}
    with torch.no_grad(), ard.sampling(model):
        p = sum(model(**inputs).logits[:, :-1][keep].softmax(-1) for _ in range(3)) / 3
    with torch.no_grad():
        point = model(**inputs).logits[:, :-1][keep]
    assert found["nll"] == pytest.approx(float(-p[range(len(true)), true].log().mean()), rel=1e-5)
    assert found["accuracy"] == float((p.argmax(-1) == true).double().mean()) and found["tokens"] == len(true) == 38
    plain = uncertainty.measure(model, [batch])
    assert plain["nll"] == pytest.approx(float(nn.functional.cross_entropy(point, true)), rel=1e-5) != found["nll"]
    with pytest.raises(ValueError, match="samples = 3: give sampling"):
        uncertainty.measure(model, [batch], samples=3)


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("pruned", [False, True])
def test_exported_peft_folder_and_own_file_give_the_same_logits(pruned, tmp_path):
    model, ids = _model().eval(), _batch()["input_ids"]
    if pruned:
        torch.manual_seed(1)
        scores = {name: torch.rand(4) for name in ard.adapters(model)}
        scores[next(iter(scores))] = torch.zeros(4)  # one layer loses all
        assert len(set(ard_ranks.prune(model, scores, keep=11).values())) > 2
    logits = model(ids).logits
    ard_run.export_peft(model, tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(models.tiny(256, hidden=64, layers=2), tmp_path / "peft").eval()
    assert torch.allclose(theirs(ids).logits, logits, atol=1e-6)

    ard_ranks.estimate_priors(model, [_batch()])
    model.ard_steps.fill_(7)
    ard_run.save(model, tmp_path)
    again = ard_run.load(models.tiny(256, hidden=64, layers=2), tmp_path)
    assert torch.equal(again.eval()(ids).logits, logits) and int(again.ard_steps) == 7
    mine, other = model.state_dict(), again.state_dict()
    assert mine.keys() == other.keys() and all(torch.equal(mine[n], other[n]) for n in mine)
    (a, _), (b, _) = (_gradients(m, _batch(), ard.objective(m, beta=0.1)) for m in (model, again))
    assert torch.equal(a["kl"], b["kl"])  # bounds and priors too


def test_loading_says_what_does_not_fit(tmp_path):
    ard_run.save(_model(), tmp_path)
    with pytest.raises(FileNotFoundError, match="no saved adapters"):
        ard_run.load(models.tiny(256, hidden=64, layers=2), tmp_path / "nowhere")
    with pytest.raises(ValueError, match="modules that this model lacks"):
        ard_run.load(models.tiny(256, hidden=64, layers=1), tmp_path)
    with pytest.raises(ValueError, match=r"mean is \(4, 64\), the model's \(4, 32\)"):
        ard_run.load(models.tiny(256, hidden=32, layers=2), tmp_path)
    with pytest.raises(ValueError, match="different adapters"):
        ard_run.load(_model(kinds=("q_proj",)), tmp_path)


# ------------------------------------------------------------------ attaching


def test_adapters_go_where_they_are_told_by_identity():
    model = models.tiny(256, hidden=64, layers=2)
    target = model.model.layers[1].mlp.up_proj
    ard.attach(model, rank=2, alpha=2, targets=[target])
    assert list(ard.adapters(model)) == ["model.layers.1.mlp.up_proj"]
    assert model.model.layers[1].mlp.up_proj.base is target
    every = ard.attach(models.tiny(256, hidden=64, layers=2), rank=2, alpha=2)
    assert len(ard.adapters(every)) == 14 and not isinstance(every.lm_head, ard.ARDLinear)


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(rank=0, alpha=1), "rank = 0, alpha = 1"),
        (dict(rank=2, alpha=2, logvar="free"), "logvar = 'free': allowed are bounded, raw"),
        (dict(rank=2, alpha=2, start=9.0), "start = 9.0: must lie inside"),
        (dict(rank=2, alpha=2, targets=[]), "targets: 0 modules"),
        (dict(rank=2, alpha=2, targets=[nn.Linear(3, 3)]), "1 modules, of which 0 are linear layers of this model"),
    ],
)
def test_attach_says_what_is_wrong(options, says):
    model = models.tiny(256, hidden=64, layers=2)
    with pytest.raises(ValueError, match=says):
        ard.attach(model, **options)
    assert not ard.adapters(model) and models.count(model)["trainable"] == models.count(model)["all"]


def test_other_misuse_is_named():
    model = _model()
    with pytest.raises(ValueError, match="has adapters already"):
        ard.attach(model, rank=2, alpha=2)
    with pytest.raises(ValueError, match="no 'gate'; allowed are down_proj"):
        ard.projections(models.tiny(256, hidden=64, layers=2), ("gate",))
    with pytest.raises(ValueError, match="warmup = 5: give the optimizer"):
        ard.objective(model, beta=0.1, warmup=5)
    with pytest.raises(ValueError, match="only projections that see every token once"):
        ard.kl(_collected(model, _batch())[0], torch.ones(3, 3))
    with ard.collect(model) as seen:
        pass
    with pytest.raises(ValueError, match="was not reached by the forward pass"):
        ard.kl(seen)


# ------------------------------------------------------------------ the Trainer


def _trainer(folder, stream, epochs: int = 3, **options) -> tuple:
    model = _model(wake=False)
    rows = text.fixed_rows(stream, length=32)
    made = [{"input_ids": r, "labels": r} for r in rows[:32]]
    pool = ard_ranks.HeldOut(rows[32:96], count=16)
    watch = ard_trainer.Uncertainty([{"input_ids": rows[96:104], "labels": rows[96:104]}], samples=2)
    say = ard_trainer.Predictions(["ab"])
    arguments = tf.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=epochs,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    tokenizer = text.train_tokenizer(["abc abd"] * 20, vocab_size=300)
    model.resize_token_embeddings(len(tokenizer))
    trainer = ard_trainer.Trainer(
        model,
        arguments,
        train_dataset=made,
        eval_dataset=[{"input_ids": r, "labels": r} for r in rows[96:104]],
        processing_class=tokenizer,
        callbacks=[ard_trainer.Priors(pool), watch, say],
        beta=0.05,
        warmup=6,
    )
    return trainer, watch, say


def test_the_trainer_route_trains_logs_and_resumes_bit_equal(stream, tmp_path):
    trainer, watch, say = _trainer(tmp_path / "straight", stream)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "ce" in entry]
    assert len(logs) == 12 and logs[-1]["ce"] < logs[0]["ce"]
    assert all(entry["loss"] == pytest.approx(entry["ce"] + entry["kl"], rel=1e-4) for entry in logs)
    assert 3 < logs[5]["kl"] / logs[0]["kl"]  # a sixth of beta at first, all of it at the sixth step
    measured = [entry for entry in trainer.state.log_history if "mean_ece" in entry]
    assert [entry["epoch"] for entry in measured] == [1, 2, 3] and len(watch.tables) == 3
    assert [entry["epoch"] for entry in say.history] == [0, 1, 2, 3]  # and the tokenizer arrived
    assert all(not torch.equal(a.prior, torch.ones(4)) for a in ard.adapters(trainer.model).values())

    again, _, _ = _trainer(tmp_path / "resumed", stream)  # from the middle of the second epoch
    again.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-6"))
    resumed = [entry for entry in again.state.log_history if "ce" in entry]
    assert [entry["ce"] for entry in resumed] == [entry["ce"] for entry in logs]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(measured[-1]["point_nll"], rel=1e-4)  # no KL in it
    mine, theirs = trainer.model.state_dict(), again.model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def test_the_trainer_takes_a_four_bit_base(stream, tmp_path):
    models.tiny(256, hidden=64, layers=2).save_pretrained(tmp_path)
    model = ard.attach(models.load(str(tmp_path), four_bit=True).train(), rank=4, alpha=8)
    options = dict(max_steps=2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True)
    rows = text.fixed_rows(stream, length=32, limit=32)
    data = [{"input_ids": r, "labels": r} for r in rows]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    arguments = tf.TrainingArguments(output_dir=str(tmp_path / "run"), learning_rate=1e-2, **options)
    ard_trainer.Trainer(model, arguments, train_dataset=data, beta=0.01).train()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(wiring.trainable(model))


def test_the_trainer_and_the_loop_are_the_same_step(stream, tmp_path, monkeypatch):
    _by_content(monkeypatch)
    trainer, _, _ = _trainer(tmp_path, stream, max_steps=2, max_grad_norm=0.0, save_strategy="no")
    trainer.callback_handler.callbacks = [
        c for c in trainer.callback_handler.callbacks if not isinstance(c, ard_trainer.Priors)
    ]
    model = copy.deepcopy(trainer.model)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    rows = text.fixed_rows(stream, length=32)
    adamw = train.adamw(model, lr=1e-2, weight_decay=0.0, betas=(0.9, 0.999))
    batches = iter([{"input_ids": rows[i : i + 4], "labels": rows[i : i + 4]} for i in range(0, 16, 4)])
    loss = ard.objective(model, beta=0.05, warmup=6, optimizer=adamw)
    records = train.fit(model, batches, adamw, total=2, accumulate=2, loss=loss, machine=FP32, clip=0)
    theirs = [entry for entry in trainer.state.log_history if "ce" in entry]
    assert [r["ce"] for r in records] == pytest.approx([entry["ce"] for entry in theirs], rel=1e-4)
    assert [r["kl"] for r in records] == pytest.approx([entry["kl"] for entry in theirs], rel=1e-4)


def test_checkpoints_of_the_loop_hold_priors_and_the_step_count():
    names = set(checkpoint.capture(_model(), [], progress={"step": 0})["weights"])
    assert {"ard_steps", "model.layers.0.self_attn.q_proj.prior", "model.layers.0.self_attn.q_proj.power"} <= names
