"""Every rival trains its own factors alone, is asked as it should be, and its rows are stored one
by one.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import FP32

from experiments import answer_tasks, ard_rivals
from nblib import models, text, wiring
from nblib.methods.ard import uncertainty

OWN = {"LoRA": {"lora_mean", "lora_up"}, "BLoB": {"lora_mean", "lora_root", "lora_up"}}
OWN |= {"ARD": {"lora_mean", "lora_up", "lora_logvar", "lora_middle"}}
PLACE = ("continuation", "prose", "code")


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(text.documents("code", "validation")[:25], vocab_size=400)


@pytest.fixture(scope="module")
def bench(tokenizer):
    """A model that has learned nothing, and few questions."""
    stream = text.encode(text.documents("code", "validation")[:25], tokenizer)

    def made(seed: int, count: int = 16):
        return answer_tasks.continuation(stream, tokenizer, count=count, length=8, seed=seed)

    model = models.tiny(len(tokenizer), hidden=32, layers=2, heads=2)
    base = SimpleNamespace(model=model, tokenizer=tokenizer)
    rest = dict(validation=made(50), held_out=made(51), shifted=made(52))
    return ard_rivals.Bench(base, made, **rest, machine=FP32)


@pytest.mark.parametrize("kind", ard_rivals.SETTINGS)
def test_a_rival_trains_its_own_parameters_and_leaves_the_base_as_it_was(kind, bench):
    before = {name: p.detach().clone() for name, p in bench.base.model.named_parameters()}
    setting = ard_rivals.SETTINGS[kind][-1]
    fresh, _ = ard_rivals.adapted(kind, bench.base.model, setting, questions=16, steps=6)
    names = wiring.trainable(fresh)
    prefixes = ("pvera_lambda",) if kind == "PVeRA" else ("lora_", "monteclora")
    assert all(any(prefix in name for prefix in prefixes) for name in names)
    if kind in OWN:
        assert {name.rpartition(".")[2] for name in names} == OWN[kind]
    started = answer_tasks.predict(fresh, bench.held_out)
    plain = answer_tasks.predict(bench.base.model, bench.held_out)
    assert torch.allclose(started, plain, atol=1e-5)  # all begin as the base

    net = ard_rivals.trained(bench, kind, setting, seed=0, steps=6)
    kept = {
        name.replace(".base_layer.", ".").replace(".base.", "."): p
        for name, p in net.named_parameters()
    }
    kept = {name.removeprefix("base_model.model."): p for name, p in kept.items()}
    assert all(torch.equal(kept[name], p) for name, p in before.items())
    assert all(torch.equal(p, before[name]) for name, p in bench.base.model.named_parameters())
    assert not torch.equal(answer_tasks.predict(net, bench.held_out), plain)


@pytest.mark.parametrize("kind", ard_rivals.SAMPLING)
def test_draws_differ_and_the_mean_of_their_probabilities_is_the_prediction(kind, bench):
    setting = dict(ard_rivals.SETTINGS[kind][-1]) | ({"lr": 3e-2} if kind != "PVeRA" else {})
    net = ard_rivals.trained(bench, kind, setting, seed=0, steps=6)
    judge = ard_rivals.Judge(net, ard_rivals.SAMPLING[kind])
    point = answer_tasks.predict(net, bench.held_out)
    assert torch.equal(point, answer_tasks.predict(net, bench.held_out))
    draws = answer_tasks.predict(net, bench.held_out, samples=3, sampling=judge.sampling, seed=4)
    assert not torch.equal(draws[0], draws[1]) and torch.equal(
        point, answer_tasks.predict(net, bench.held_out)
    )
    if kind != "MonteCLoRA":  # peft draws its noise ahead
        mean = ard_rivals.probabilities(bench, judge, bench.held_out, seed=4, samples=3)
        assert torch.equal(mean, draws.softmax(-1).mean(0))


@pytest.mark.slow
def test_rows_of_a_lora_are_what_they_say(bench):
    """The ensemble is the mean of probabilities, and a temperature changes no answer."""
    setting = {"lr": 3e-2}
    found = {
        facts["rival"]: p
        for facts, p in ard_rivals.predicted(bench, "LoRA", setting, seed=0, steps=6)
    }
    assert len(found) == ard_rivals.expected("LoRA") / 2
    members = [
        ard_rivals.probabilities(
            bench,
            ard_rivals.Judge(ard_rivals.trained(bench, "LoRA", setting, seed=0, member=n, steps=6)),
            data,
            seed=0,
        )
        for data in (bench.held_out,)
        for n in range(ard_rivals.MEMBERS)
    ]
    assert not torch.allclose(members[0], members[1])
    assert torch.allclose(
        found["LoRA, ensemble"]["held out"], sum(members) / len(members), atol=1e-6
    )
    assert torch.equal(found["LoRA"]["held out"], members[0])
    for name in ("held out", "shifted"):
        assert torch.equal(
            found["LoRA"][name].argmax(1), found["LoRA, temperature"][name].argmax(1)
        )
        sums = found["LoRA, last-layer Laplace"][name].sum(1)
        assert torch.allclose(sums, torch.ones_like(sums))


@pytest.mark.slow
def test_a_record_that_was_stopped_goes_on_and_repeats_nothing(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(
        ard_rivals,
        "SETTINGS",
        {"LoRA": [{"lr": 1e-3}, {"lr": 1e-1}], "ARD": [dict(lr=1e-2, beta=1e-4)]},
    )
    options = dict(places=(PLACE,), seeds_=(0,), steps=2)
    straight = ard_rivals.measure(tmp_path / "straight.json", lambda _: bench, **options)
    assert len(straight["lines"]) == sum(map(ard_rivals.expected, ("base model", "LoRA", "ARD")))
    assert len(straight["tuned"]) == 3
    # three of them are for the settings
    path, judge, left = tmp_path / "cut.json", uncertainty.judge, [8]

    def failing(p, answer):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return judge(p, answer)

    monkeypatch.setattr(uncertainty, "judge", failing)
    with pytest.raises(KeyboardInterrupt):
        ard_rivals.measure(path, lambda _: bench, **options)
    assert len(json.loads(path.read_text())["lines"]) == 5  # in the middle of those of one LoRA
    monkeypatch.setattr(uncertainty, "judge", judge)
    again = ard_rivals.measure(path, lambda _: bench, **options)

    def facts(record):
        return sorted(
            json.dumps({k: v for k, v in r.items() if k != "seconds"}) for r in record["lines"]
        )

    assert facts(again) == facts(straight) and again["tuned"] == straight["tuned"]
    assert ard_rivals.chosen(again)["ARD"] == dict(lr=1e-2, beta=1e-4)
    # now the other rate is the better one: only what rests on it is measured again
    for line in again["tuned"]:
        line["nll"] *= -1
    path.write_text(json.dumps(again))
    other = ard_rivals.measure(path, lambda _: bench, **options)
    of = {
        name: [[r for r in x["lines"] if r["kind"] == name] for x in (again, other)]
        for name in ("LoRA", "ARD")
    }
    assert of["ARD"][0] == of["ARD"][1] and len(of["LoRA"][1]) == ard_rivals.expected("LoRA")
    assert {str(r["setting"]) for r in of["LoRA"][0]}.isdisjoint(
        str(r["setting"]) for r in of["LoRA"][1]
    )
    assert {row["rival"] for row in ard_rivals.table(again, PLACE[0], "shifted")} == {
        r["rival"] for r in again["lines"]
    }


def _record(**nll: list[float]) -> dict:
    """A record with these NLLs; everything else is the same for all."""
    same = {name: 0.5 for name in ard_rivals.MEASURES}
    lines = []
    for name, numbers in nll.items():
        for seed, value in enumerate(numbers):
            for on in ("held out", "shifted"):
                line = {
                    "task": "t",
                    "seed": seed,
                    "rival": name,
                    "on": on,
                    "trained": 1,
                    "passes": 1,
                    "risks": [0.1] * 20,
                }
                lines.append(line | same | {"nll": value})
    return {"lines": lines}


def test_the_sentence_says_who_wins_and_what_cannot_be_told_apart():
    record = _record(
        ARD=[0.50, 0.60, 0.70],
        clear=[0.40, 0.51, 0.60],
        close=[0.51, 0.59, 0.70],
        far=[0.9, 1.0, 1.1],
    )
    assert ard_rivals.winner(record, "t", "held out", "nll") == ("clear", [])
    verdict = ard_rivals.standing(record, "t", "held out", "nll", "ARD")
    assert verdict == {"better": ["far"], "worse": ["clear"], "undecided": ["close"]}
    words = ard_rivals.words(record)
    assert "nll clear;" in words and "better than that of far, worse than that of clear" in words
    assert "accuracy ARD (3 not distinguishable)" in words  # all are equal
    assert [row["rival"] for row in ard_rivals.table(record, "t", "held out")] == [
        "clear",
        "ARD",
        "close",
        "far",
    ]


def test_higher_is_better_where_it_is():
    record = _record(ARD=[0.5, 0.5, 0.5], other=[0.5, 0.5, 0.5])
    for line in record["lines"]:
        line["accuracy"] += 0.1 * (line["rival"] == "other") + 0.001 * line["seed"]
        line["ece"] += 0.1 * (line["rival"] == "other") + 0.001 * line["seed"]
    assert ard_rivals.winner(record, "t", "held out", "accuracy") == ("other", [])
    assert ard_rivals.winner(record, "t", "held out", "ece") == ("ARD", [])


def test_a_rival_that_lacks_a_seed_is_in_no_table():
    record = _record(ARD=[0.5, 0.6, 0.7], late=[0.4])
    assert set(ard_rivals.values(record, "t", "held out", "nll")) == {"ARD"}
    assert [row["rival"] for row in ard_rivals.table(record, "t", "held out")] == ["ARD"]
    numbers = ard_rivals.values(record, "t", "held out", "nll")["ARD"]
    assert ard_rivals.error(numbers) == pytest.approx(0.1 / 3**0.5)
