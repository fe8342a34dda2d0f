"""LRC against references: counts, float64, Eckart-Young, gradients in every mode, storage, resume,
speed, doctor.
"""

import copy
import json
import statistics
import time

import peft
import pytest
import torch
import transformers as tf
from bit_flips import flips
from torch import nn

from lessons import graph_breaks
from nblib import (
    checkpoint,
    compiling,
    doctor,
    files,
    losses,
    memory,
    models,
    runtime,
    text,
    train,
    wiring,
)
from nblib.methods import lrc
from nblib.methods.lrc import ternary
from nbworkbook import base_model, cli

QWEN3_06B = dict(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
) | dict(num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)


def small(family="qwen3", **options):
    model = models.tiny(512, hidden=64, layers=2, family=family)
    lrc.attach(model, **options)
    return model


@pytest.fixture
def batch():
    ids = torch.randint(512, (2, 32))
    return {"input_ids": ids, "labels": ids}


def gradients(model, batch):
    model.zero_grad()
    loss = losses.causal_lm(model, batch)["ce"] / losses.supervised(batch["labels"])
    loss.backward()
    return float(loss.detach()), {
        name: p.grad.clone() for name, p in wiring.trainable(model).items()
    }


@pytest.mark.parametrize(
    "percent, trains", [(5, 32_169_984), (10, 64_339_968), (15, 96_509_952), (25, 161_480_704)]
)
def test_counts_of_qwen3_06b(percent, trains):
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(tf.Qwen3Config(**QWEN3_06B))
    float_count = models.count(model)["all"]
    lrc.attach(model, percent=percent, init="kaiming")
    found = lrc.facts(model)
    assert found["trainable"] == trains and found["layers"] == 28 * 7
    assert found["all"] == float_count + trains and (percent != 15 or found["all"] == 692_559_872)


def test_the_rank_rule_rounds_down_and_stays_above_zero():
    assert lrc.rank_of(1024, 3072, 15) == 153 and lrc.rank_of(4, 4, 1) == 1
    assert lrc.rank_of(100, 100, 29) == 29  # 100 * 0.29 would be 28.999...


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("joint", [False, True])
def test_forward_and_gradients_equal_a_float64_reference(joint, bits):
    linear, x = nn.Linear(40, 24), torch.randn(3, 5, 40)
    model = nn.Sequential(linear)
    W, b = linear.weight.detach().double(), linear.bias.detach().double()
    lrc.attach(model, rank=8, joint=joint, bits=bits)
    layer = model[0]
    s = W.abs().mean()
    codes = (W / s).round().clamp(-1, 1)
    Q = codes * (s if joint else (W * codes).sum() / codes.abs().sum())
    g = x.double().abs().amax(-1, keepdim=True)
    xq = g / 127 * (127 * x.double() / g).round()
    factors = [layer.U.detach().double(), layer.V.detach().double()]
    if bits:  # both sizes are multiples of 32; test_ternary.py has a group that is not full
        groups = [f.view(-1, 32) for f in factors]
        scales = [g.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1) for g in groups]
        factors = [((g / s).round() * s).view_as(f) for g, s, f in zip(groups, scales, factors)]
    U, V = factors
    x.requires_grad_()
    out = layer(x)
    torch.testing.assert_close(
        out.double(), xq @ Q.T + x.detach().double() @ V @ U.T + b, rtol=1e-5, atol=1e-5
    )
    G = torch.randn(3, 5, 24)
    (out * G).sum().backward()
    G, flat_x = G.double(), x.detach().double().flatten(0, 1)
    torch.testing.assert_close(x.grad.double(), G @ Q + G @ U @ V.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        layer.U.grad.double(), G.flatten(0, 1).T @ (flat_x @ V), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        layer.V.grad.double(), flat_x.T @ (G.flatten(0, 1) @ U), rtol=1e-5, atol=1e-5
    )
    if joint:
        torch.testing.assert_close(
            layer.weight.grad.double(), G.flatten(0, 1).T @ xq.flatten(0, 1), rtol=1e-5, atol=1e-5
        )
    else:
        assert layer.weight.grad is None


def test_gpt2_matrices_lie_the_other_way_round(batch):
    model = small("gpt2", init="zeros")
    plain = models.tiny(512, hidden=64, layers=2, family="gpt2")
    for name in lrc.layers(model):
        conv = plain.get_submodule(name)
        with torch.no_grad():
            conv.weight.copy_(ternary.ternary(conv.weight, "least_squares"))
        conv.register_forward_pre_hook(lambda module, args: (ternary.int8(args[0]),))
    model.eval(), plain.eval()
    torch.testing.assert_close(model(batch["input_ids"]).logits, plain(batch["input_ids"]).logits)


@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("joint", [False, True])
def test_exactly_the_corrections_train(family, joint):
    model = small(family, joint=joint)
    names = lrc.layers(model)
    parts = ("U", "V", "weight") if joint else ("U", "V")
    assert set(wiring.trainable(model)) == {f"{name}.{part}" for name in names for part in parts}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    # tied, and neither was made ternary
    assert type(head) is nn.Linear and head.weight is embedding.weight
    assert not any(isinstance(m, nn.Linear) for n, m in model.named_modules() if m is not head)


def test_frozen_weights_are_rounded_once_and_inputs_once_per_tensor(batch, monkeypatch):
    counted = {"_ternary": 0, "_int8": 0}
    for name in counted:
        rounding = getattr(ternary, name)

        def count(*args, name=name, rounding=rounding):
            counted[name] += 1
            return rounding(*args)

        monkeypatch.setattr(ternary, name, count)
    model = small()
    assert counted == {"_ternary": 14, "_int8": 0}
    gradients(model, batch)
    assert counted == {"_ternary": 14, "_int8": 2 * 4}  # per block: qkv, o, gate and up, down
    joint = small(joint=True)
    counted["_ternary"] = 0
    gradients(joint, batch)
    assert counted["_ternary"] == 14


def test_sharing_the_rounded_input_changes_no_gradient(batch):
    shared, alone = small(), small()
    for layer in lrc.layers(alone).values():
        layer.once = ternary.Once()
    (a, of_shared), (b, of_alone) = gradients(shared, batch), gradients(alone, batch)
    assert a == b
    for name, g in of_shared.items():
        torch.testing.assert_close(g, of_alone[name], rtol=1e-5, atol=1e-8)


def test_the_original_is_kept_only_on_request():
    model = nn.Sequential(nn.Linear(16, 16))
    W = model[0].weight.detach().clone()
    lrc.attach(model, rank=2, keep_original=True)
    assert torch.equal(model[0].original, W) and "0.original" not in model.state_dict()
    assert not hasattr(small().model.layers[0].mlp.up_proj, "original")


def test_svd_is_the_best_of_its_rank():
    W = torch.randn(48, 64)
    R = (W - ternary.ternary(W, "least_squares")).double()
    values = torch.linalg.svdvals(R)
    for r in (1, 7, 30):
        U, V = lrc.truncated_svd(R.float(), r)
        error = (R - U.double() @ V.double().T).square().sum()
        # Eckart-Young
        torch.testing.assert_close(error, values[r:].square().sum(), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(U.T @ U, V.T @ V, rtol=1e-4, atol=1e-4)
        A, B = lrc.truncated_svd(R.float(), r, randomised=True)
        assert error <= (R - A.double() @ B.double().T).square().sum() <= 1.05 * error
    energy = lrc.residual_energy(W)
    torch.testing.assert_close(
        energy[6].double(), values[:7].square().sum() / values.square().sum()
    )


def test_the_randomised_start_leaves_the_generator_alone():
    before = torch.get_rng_state()
    first, second = (small(randomised=True) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(first.parameters(), second.parameters()):
        assert torch.equal(a, b)


@pytest.fixture(scope="module")
def stored():
    found = base_model.load()
    stream = text.encode(text.documents("prose", "validation"), found.tokenizer)
    rows = text.fixed_rows(stream, length=128, limit=24)
    return found.model.eval(), rows[:8], rows[8:]


def _output_errors(model, moments, init, rows):
    """Squared error of every layer's output on the inputs that the float model gives it."""
    corrected = copy.deepcopy(model)
    lrc.attach(corrected, init=init, moments=moments)
    errors, handles = {}, []
    for name, layer in lrc.layers(corrected).items():

        def compare(linear, args, out, name=name, layer=layer):
            errors[name] = float((layer(args[0]) - out).square().sum())

        handles.append(model.get_submodule(name).register_forward_hook(compare))
    with torch.no_grad():
        model(rows)
    for handle in handles:
        handle.remove()
    return errors


@pytest.mark.base
def test_the_start_from_the_inputs_is_better_on_rows_it_has_not_seen(stored):
    model, seen, unseen = stored
    moments = lrc.input_moments(model, [{"input_ids": seen}])
    assert not any(m._forward_pre_hooks for m in model.modules())
    weighted, plain, none = (
        _output_errors(model, moments, init, unseen)
        for init in ("svd_activation", "svd_residual", "zeros")
    )
    assert all(weighted[name] < plain[name] < none[name] for name in plain)


@pytest.mark.base
def test_moments_are_those_of_the_inputs(stored):
    model, rows, _ = stored
    name = "model.layers.1.self_attn.o_proj"  # its input is no hidden state
    caught = []
    handle = model.get_submodule(name).register_forward_hook(
        lambda m, args, out: caught.append(args[0].detach())
    )
    moments = lrc.input_moments(model, [{"input_ids": part} for part in rows.split(4)])
    handle.remove()
    x = torch.cat([c.flatten(0, 1) for c in caught]).double()
    torch.testing.assert_close(moments[name].double(), x.T @ x / len(x), rtol=1e-4, atol=1e-6)


@pytest.mark.base
def test_svd_starts_lower_than_kaiming_and_none(stored):
    model, _, rows = stored
    exact = runtime.pick("cpu", "fp32")

    def loss(init):
        corrected = copy.deepcopy(model)
        lrc.attach(corrected, init=init)
        return train.evaluate(corrected, rows, machine=exact)["loss"]

    assert loss("svd_residual") < loss("zeros") - 0.1
    # U = 0: the same function, but it can learn
    assert loss("kaiming") == pytest.approx(loss("zeros"), abs=1e-6)


@pytest.mark.parametrize(
    "init, dead", [("zeros", {"U", "V"}), ("kaiming", {"V"}), ("svd_residual", set())]
)
def test_which_factors_have_a_gradient_at_the_start(init, dead, batch):
    _, found = gradients(small(init=init), batch)
    zero = {name for name, g in found.items() if not g.any()}
    assert zero == {name for name in found if name.rpartition(".")[2] in dead}


@pytest.mark.slow
@pytest.mark.parametrize("bits, joint", [(0, False), (8, True)])
@pytest.mark.slow
def test_gradients_are_equal_eager_checkpointed_and_compiled(bits, joint, batch):
    model = small(bits=bits, joint=joint)
    loss, eager = gradients(model, batch)
    assert all(g.any() for g in eager.values())  # or equality would say nothing
    again, recomputed = gradients(compiling.checkpoint_blocks(copy.deepcopy(model)), batch)
    assert again == loss and all(torch.equal(g, recomputed[name]) for name, g in eager.items())
    torch._dynamo.reset()
    compiled = compiling.compile_blocks(copy.deepcopy(model), backend="aot_eager")
    close, traced = gradients(compiled, batch)
    torch._dynamo.reset()
    assert close == pytest.approx(loss, rel=1e-6)
    for name, g in eager.items():
        torch.testing.assert_close(g, traced[name], rtol=1e-4, atol=1e-6 * float(g.abs().max()))


def test_a_block_is_one_graph(batch):
    model = small()
    hidden = torch.randn(2, 32, 64)
    positions = model.model.rotary_emb(hidden, torch.arange(32)[None])
    found = graph_breaks.breaks(
        lambda h: model.model.layers[0](h, position_embeddings=positions), hidden
    )
    assert found["graphs"] == 1 and found["breaks"] == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"bits": 8}, {"bits": 4}, {"joint": True}, {"rank": 3}, {"scale": "rows", "rounds": 1}],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_moe"])
def test_what_is_saved_gives_the_same_logits(family, options, batch, tmp_path):
    model = small(family, **options).eval()
    size = lrc.save(model, tmp_path)
    back = lrc.load(tmp_path)
    assert torch.equal(model(batch["input_ids"]).logits, back(batch["input_ids"]).logits)
    assert back.get_output_embeddings().weight is back.get_input_embeddings().weight
    assert size == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_stock_transformers_refuses_the_folder_and_the_tokenizer_lies_in_it(tmp_path):
    """It would give a model with random projections."""
    model, tokenizer = small(), text.train_tokenizer(["a b c"] * 9, vocab_size=300)
    lrc.save(model, tmp_path, tokenizer=tokenizer)
    with pytest.raises(OSError, match="model.safetensors"):
        tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert models.load_tokenizer(str(tmp_path)).get_vocab() == tokenizer.get_vocab()
    (tmp_path / lrc.WEIGHTS).rename(tmp_path / "model.safetensors")  # an older save
    (tmp_path / files.MANIFEST).unlink()
    files.seal(tmp_path)
    assert torch.equal(
        lrc.load(tmp_path).get_input_embeddings().weight, model.get_input_embeddings().weight
    )


def test_a_damaged_save_is_refused(tmp_path):
    lrc.save(small("qwen3"), tmp_path)
    for file in sorted(tmp_path.iterdir()):
        whole = file.read_bytes()
        for hurt in flips(file, count=30):
            try:
                lrc.load(tmp_path)
                assert file.name == files.MANIFEST and json.loads(hurt) == json.loads(whole)
            except files.Unreadable:
                pass
    assert lrc.load(tmp_path)


def test_what_is_saved_in_bf16_comes_back_in_bf16(batch, tmp_path):
    config = models.tiny(512, hidden=64, layers=2).config
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lrc.attach(model)
    lrc.save(model.eval(), tmp_path)
    back = lrc.load(tmp_path)
    assert {p.dtype for p in back.parameters()} == {torch.bfloat16}
    assert torch.equal(model(batch["input_ids"]).logits, back(batch["input_ids"]).logits)


def test_a_ternary_weight_takes_two_bits_on_disk(tmp_path):
    model = small(rank=1)
    weights = sum(layer.weight.numel() for layer in lrc.layers(model).values())
    rest = sum(p.numel() * 4 for p in model.parameters()) - weights * 4
    lrc.save(model, tmp_path)
    size = (tmp_path / lrc.WEIGHTS).stat().st_size
    header = int.from_bytes((tmp_path / lrc.WEIGHTS).read_bytes()[:8], "little") + 8
    scales = 4 * len(lrc.layers(model))
    assert size - header == weights // 4 + rest + scales


def test_a_save_that_fails_leaves_the_earlier_one(batch, tmp_path, monkeypatch):
    model = small()
    lrc.save(model, tmp_path / "model")

    def full_disk(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken, pytest.raises(OSError):
        broken.setattr(lrc.layer, "save_file", full_disk)
        lrc.save(small(rank=2), tmp_path / "model")
    back = lrc.load(tmp_path / "model")
    assert torch.equal(model.eval()(batch["input_ids"]).logits, back(batch["input_ids"]).logits)


def test_a_folder_without_its_recipe_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="no lrc.json in it"):
        lrc.load(tmp_path)


def test_resume_is_bit_equal(tmp_path, stream, machine):
    def run(folder, *totals):
        for total in totals:
            runtime.seed_all(0)
            model = models.tiny(256, hidden=32, layers=2, heads=2)
            lrc.attach(model, rank=4)
            data = text.Batches(stream, rows=4, length=32)
            train.fit(
                model,
                data,
                train.adamw(model, lr=1e-2),
                total=total,
                checkpoints=train.Checkpoints(folder),
                machine=machine,
            )
        return model

    straight, resumed = run(tmp_path / "a", 8), run(tmp_path / "b", 3, 8)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters()))


def test_a_checkpoint_does_not_fit_another_rounding(tmp_path, stream, machine):
    first, second = (models.tiny(256, hidden=32, layers=2, heads=2, seed=seed) for seed in (0, 1))
    for model, total in ((first, 2), (second, 4)):
        lrc.attach(model, rank=4)
        data = text.Batches(stream, rows=4, length=32)
        if model is second:
            with pytest.raises(checkpoint.CheckpointError, match="frozen base"):
                train.fit(
                    model,
                    data,
                    train.adamw(model, lr=1e-2),
                    total=total,
                    checkpoints=train.Checkpoints(tmp_path),
                    machine=machine,
                )
        else:
            train.fit(
                model,
                data,
                train.adamw(model, lr=1e-2),
                total=total,
                checkpoints=train.Checkpoints(tmp_path),
                machine=machine,
            )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_estimate_is_exact_to_the_byte(checkpointing):
    """What is alive in a real step, counted storage by storage, is what was predicted on tensors
    without memory.
    """
    shape, attach = dict(rows=2, length=64), lambda model: lrc.attach(model, init="kaiming")
    config = models.tiny(512, hidden=64, layers=2).config
    predicted = memory.estimate(config, attach=attach, checkpointing=checkpointing, **shape)
    model = models.tiny(512, hidden=64, layers=2)
    attach(model)
    if checkpointing:
        compiling.checkpoint_blocks(model)
    trained = list(wiring.trainable(model).values())
    optimizer = memory.OPTIMIZERS["adamw"](trained)
    ids = torch.zeros(2, 64, dtype=torch.long)
    memory.training_step(model, optimizer, ids)
    state = [t for s in optimizer.state.values() for t in s.values()]
    with memory.Account([*model.parameters(), *model.buffers(), *state, ids]) as account:
        marks = memory.training_step(model, optimizer, ids, account=account)
    kept = sum(t.untyped_storage().nbytes() for t in [*model.parameters(), *model.buffers()])
    assert predicted["weights"] == kept
    assert predicted["optimizer"] == sum(t.untyped_storage().nbytes() for t in state)
    assert predicted["gradients"] == sum(p.numel() * 4 for p in trained)
    assert predicted["activations"] == marks["hidden"]
    assert predicted["peak"] - predicted["weights"] - predicted["optimizer"] == account.most


def test_the_command_line_estimates_it(capsys):
    assert cli.main(["estimate", "--lrc", "15", "--rows", "2", "--length", "32"]) == 0
    assert "peak" in capsys.readouterr().out
    for wrong, word in (
        (["--lrc", "150"], "percent = 150.0"),
        (["--lrc", "5", "--rank", "4"], "choose one"),
    ):
        assert cli.main(["estimate", *wrong]) == 2
        assert word in capsys.readouterr().err


def step_ratio(machine: runtime.Machine, rounds: int = 9) -> dict:
    """Seconds of a training step of frozen LRC over those of peft's LoRA of the same rank on the
    float base.
    """
    ours = models.tiny(4096)
    lrc.attach(ours, rank=38)
    theirs = peft.get_peft_model(
        models.tiny(4096),
        peft.LoraConfig(r=38, lora_alpha=38, target_modules=list(lrc.layers(ours))),
    )
    assert models.count(ours)["trainable"] == models.count(theirs)["trainable"]
    ids = torch.randint(4096, (8, 256))
    optimizers = {model: train.adamw(model, lr=1e-4) for model in (ours, theirs)}

    def seconds(model):
        started = time.perf_counter()
        with machine.autocast():
            loss = losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"] / (8 * 255)
        loss.backward()
        optimizers[model].step()
        optimizers[model].zero_grad()
        return time.perf_counter() - started

    for model in (ours, theirs) * 2:
        seconds(model)
    ratios = []
    for number in range(rounds):
        took = {model: seconds(model) for model in ((ours, theirs), (theirs, ours))[number % 2]}
        ratios.append(took[ours] / took[theirs])
    return {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "seconds": took[ours],
    }


@pytest.mark.slow
def test_a_step_costs_little_more_than_loras(machine):
    found = step_ratio(machine)
    print(f"frozen LRC over peft LoRA of the same rank, fp32, eager: {found}")
    assert found["median"] <= 1.25


@pytest.mark.base
def test_the_doctor_finds_nothing_in_a_healthy_run(stored):
    model = copy.deepcopy(stored[0]).train()
    lrc.attach(model)
    optimizer = train.adamw(model, lr=1e-3, weight_decay=0.0)
    ids = stored[1][:4]
    with doctor.watch(model, optimizer=optimizer, steps=6) as report:
        for _ in range(6):
            loss = losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"] / (4 * 127)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [f for f in report.findings if f.severity == "error"] == [], report
    assert report.root is None, report


@pytest.mark.parametrize(
    "options, words",
    [
        (
            dict(init="svd"),
            "init = 'svd': allowed are svd_residual, svd_activation, kaiming, zeros",
        ),
        (dict(init="svd_activation"), "needs moments"),
        (dict(percent=0), "percent = 0: must be above 0 and at most 100"),
        (dict(bits=3), "bits = 3"),
        (dict(rank=-1), "rank = -1"),
        (dict(scale="max"), "scale = 'max': allowed are mean, least_squares, rows"),
        (dict(rounds=-1), "rounds = -1"),
        (
            dict(rounds=1, init="kaiming"),
            "rounds = 1: allowed above 0 only where init starts with svd",
        ),
        (dict(rounds=1, joint=True), "rounds = 1"),
    ],
)
def test_bad_input_is_refused_by_name(options, words):
    model = models.tiny(64, hidden=32, layers=1, heads=2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=words):
        lrc.attach(model, **options)
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize("joint", [False, True])
def test_a_wrong_scale_is_refused_before_any_weight_is_read(joint):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="^scale = 'max': allowed are mean, least_squares, rows$"):
        lrc.attach(model, scale="max", joint=joint)
    assert type(model[0]) is nn.Linear
    lrc.attach(model, scale="rows", joint=joint)


def test_a_second_attach_is_refused():
    model = small()
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has LRC layers already"):
        lrc.attach(model)


def test_rounding_again_in_turns_leaves_less_of_the_output_error():
    plain, x = nn.Linear(96, 64, bias=False), torch.randn(4096, 96) * torch.arange(1, 97).rsqrt()
    moments, errors = {"0": x.T @ x / len(x)}, []
    for rounds in (0, 1, 2):
        model = nn.Sequential(copy.deepcopy(plain))
        lrc.attach(model, percent=25, init="svd_activation", moments=moments, rounds=rounds)
        away = model[0].weight + model[0].U @ model[0].V.T - plain.weight
        errors.append(float((x @ away.T).square().sum()))
        assert len(model[0].weight.unique()) == 3
    assert errors[2] < errors[1] < errors[0]


def test_padding_and_neighbours_in_a_row_do_not_count_as_inputs():
    model = models.tiny(512, hidden=64, layers=2)
    first, second = torch.randint(512, (1, 16)), torch.randint(512, (1, 12))
    padded = torch.zeros(2, 20, dtype=torch.long)
    padded[0, :16], padded[1, :12] = first, second
    mask = torch.arange(20) < torch.tensor([[16], [12]])
    packed = {
        "input_ids": torch.cat([first, second], 1),
        "position_ids": torch.cat([torch.arange(16), torch.arange(12)])[None],
    }
    alone = lrc.input_moments(model, [{"input_ids": first}, {"input_ids": second}])
    for batch in ({"input_ids": padded, "attention_mask": mask.long()}, packed):
        found = lrc.input_moments(model, [batch])
        for name, moment in alone.items():
            torch.testing.assert_close(found[name], moment, rtol=1e-4, atol=1e-6)


def test_a_gap_that_is_none_is_not_divided_by():
    assert lrc.recovered(2.0, rounded=3.0, full=1.0) == 0.5
    with pytest.raises(ValueError, match="no gap to recover"):
        lrc.recovered(2.0, rounded=1.0, full=1.0)
