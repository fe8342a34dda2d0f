"""Each ingredient is what its formula says, leaves the start as it is where it should, and is gone
where it must be.
"""

import copy

import pytest
import torch
from conftest import FP32

from experiments import lrc_ingredients as ingredients
from experiments import lrc_spreads
from nblib import losses, models, train, wiring
from nblib.methods import lrc
from nbworkbook.setup import Setup


@pytest.fixture
def bench(stream) -> lrc_spreads.Bench:
    model = models.tiny(256, hidden=32, layers=2, heads=2)
    rows = stream[: 16 * 32].view(16, 32)
    opened = Setup(model, None, stream, rows[:8], rows[8:], FP32)
    lrc_spreads.fit(opened, model, seed=0, steps=40, loss=losses.causal_lm)
    return lrc_spreads.bench(opened)


def student_of(bench, **options):
    model = copy.deepcopy(bench.opened.model)
    lrc.attach(model, **options)
    return model


def test_the_norm_stands_before_what_has_none_and_trains(bench):
    student, moments = student_of(bench), lrc_spreads.moments(bench.opened, 0)
    before = set(wiring.trainable(student))
    names = ingredients.sub_norm(student, moments)
    assert {name.rpartition(".")[2] for name in names} == {"o_proj", "down_proj"} and len(
        names
    ) == 4
    assert set(wiring.trainable(student)) - before == {f"{name}.sub_norm.weight" for name in names}
    layer, seen = student.get_submodule(names[0]), {}
    layer.once = lambda x: seen.setdefault("x", x)
    x = 7 * torch.randn(3, layer.in_features)
    layer(x)
    size = moments[names[0]].diagonal().mean().sqrt()
    assert torch.allclose(seen["x"].square().mean(-1).sqrt(), size.expand(3), rtol=1e-4)
    assert torch.allclose(torch.cosine_similarity(seen["x"], x), torch.ones(3))


def test_rounding_fades_in_from_the_float_model_to_the_corrected_one(bench):
    student, ids = student_of(bench, keep_original=True), bench.opened.held_out[:2]
    plain = copy.deepcopy(student).eval()
    adamw = train.adamw(student, lr=0.0, weight_decay=0.0)
    warming, apart = ingredients.WarmUp(student, adamw, steps=3), []
    with torch.no_grad():
        exact, rounded = (m.eval()(ids).logits for m in (bench.opened.model, plain))
    assert torch.allclose(student.eval()(ids).logits, exact, atol=1e-4)
    for _ in range(3):
        apart.append(float((student(ids).logits - rounded).detach().norm()))
        losses.causal_lm(student, {"input_ids": ids, "labels": ids})["ce"].backward()
        adamw.step()
    assert apart == sorted(apart, reverse=True) and warming.now == 1
    assert torch.equal(student(ids).logits, rounded)


def test_relations_are_attention_of_each_projection_with_itself(bench):
    states = torch.randn(2, 5, 8)
    of_two = ingredients.relation(states, 2).exp()
    assert torch.allclose(of_two.sum(-1), torch.ones(2, 2, 5))
    assert not of_two.triu(1).any() and torch.equal(of_two[:, :, 0, 0], torch.ones(2, 2))
    last = (states[0, :, 4:] @ states[0, -1, 4:] / 2).softmax(-1)  # the second head, d = 4
    assert torch.allclose(of_two[0, 1, -1], last)


def test_the_relations_loss_is_zero_for_the_teacher_and_reaches_the_student(bench):
    teacher, student = models.as_teacher(copy.deepcopy(bench.opened.model)), student_of(bench)
    ids = bench.opened.held_out[:2]
    for ours, same in ((copy.deepcopy(bench.opened.model), True), (student, False)):

        def both(model, batch):
            with torch.no_grad():
                teacher(batch["input_ids"])
            return losses.causal_lm(model, batch)

        with_relations = ingredients.relations(both, ours, teacher, heads=1, weight=100.0)
        terms = with_relations(ours, {"input_ids": ids, "labels": ids})
        assert (float(terms["relations"].detach()) < 1e-4) is same
    terms["relations"].backward()
    last = [
        m for name, m in lrc.layers(student).items() if name.endswith("layers.1.self_attn.q_proj")
    ]
    assert last[0].U.grad.any() and last[0].V.grad.any()


def test_muon_holds_both_factors_of_every_layer(bench):
    student = student_of(bench)
    held = [p for group in ingredients.muon(student).param_groups for p in group["params"]]
    assert {id(p) for p in held} == {
        id(f) for m in lrc.layers(student).values() for f in (m.U, m.V)
    }


@pytest.mark.slow
@pytest.mark.parametrize("option", ingredients.OPTIONS)
def test_every_option_is_measured_and_a_seed_repeats(bench, option):
    cell = ingredients.Cell("narrow", 0, option, 6)
    line = ingredients.measured(bench, cell)
    assert line == ingredients.measured(bench, cell) and line["share"] == pytest.approx(
        bench.share(line["loss"])
    )
    if option != "plain":
        assert line["loss"] != ingredients.measured(bench, cell._replace(option="plain"))["loss"]


def test_the_table_judges_each_option_by_its_pairs_of_seeds():
    loss = {"plain": (4.0, 4.1, 4.2), "muon": (3.9, 4.0, 4.09), "warm_up": (4.1, 4.0, 4.2)}
    lines = [
        dict(option=option, seed=seed, loss=value, share=1 - value / 10)
        for option, values in loss.items()
        for seed, value in reversed(list(enumerate(values)))
    ]
    rows = {row["option"]: row["verdict"] for row in ingredients.table({"lines": lines})}
    assert rows["plain"] == "" and rows["muon"].startswith("muon helps")
    assert rows["warm_up"].startswith("warm_up: not distinguishable")
