"""Runs side by side: they repeat to the bit, the suspects are dealt out right, and all the methods
resume together.
"""

import copy

import pytest
import torch

from experiments import muon_race
from nblib import doctor, text, train
from nblib.methods import moe
from nblib.methods.moe import depths, multi_token
from nblib.methods.muon import groups

SMALL = dict(rows=4, length=32, hidden=32, layers=2, heads=2, width=32)


@pytest.fixture
def data(stream):
    return muon_race.Data(stream, text.fixed_rows(stream, length=32, limit=16), 256)


def test_a_run_repeats_to_the_bit_and_its_seed_decides(data, machine):
    setting = muon_race.Setting(capacity=0.75)
    first, again, other = (
        muon_race.run(setting, data, steps=5, seed=seed, machine=machine, **SMALL)
        for seed in (0, 0, 1)
    )
    assert first.curve == again.curve and first.loss == again.loss != other.loss
    assert len(first.curve) == 5 and len(first.health) == 2


def test_the_suspects_alone_together_and_all_but_each(data, machine):
    which = muon_race.combinations()
    assert [len(w) for w in which] == [0, 1, 1, 1, 1, 3, 3, 3, 3, 4] and len(set(which)) == 10
    table = muon_race.trial(data, machine=machine, which=[which[2], which[-1]], steps=12, **SMALL)
    assert [row["faults"] for row in table][:2] == ["none", "small rates"]
    assert (
        table[0]["share of the gain"]
        == 1
        > table[1]["share of the gain"]
        > table[2]["share of the gain"] - 0.05
    )


def test_weights_in_bf16_hold_bf16_and_lose_what_is_small(data):
    lost = []
    for weights in ("fp32", "bf16"):
        setting = muon_race.Setting(weights=weights, lr=1e-5, adamw_lr=1e-5)
        model = muon_race.build(
            setting, 256, **{k: v for k, v in SMALL.items() if k not in ("rows", "length")}
        )
        norm, before = model.model.norm.weight, [p.detach().clone() for p in model.parameters()]
        for optimizer in muon_race.optimizers(setting, model):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert (weights == "bf16") == all(
            torch.equal(p, p.bfloat16().float()) for p in model.parameters()
        )
        assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before))
        lost.append(bool((norm == 1).all()))
    assert lost == [False, True]


@pytest.mark.slow
def test_a_race_is_fair_counted_and_names_a_winner_only_where_the_seeds_agree(data, machine):
    both = dict(accumulate=2, capacity=0.75, checkpointing=True)
    ours, theirs = muon_race.MUON._replace(**both), muon_race.ADAMW._replace(**both)
    race = muon_race.over_seeds(
        data, steps=3, share=1.0, ours=ours, theirs=theirs, machine=machine, **SMALL
    )
    assert len(race.gains) == len(set(race.gains)) == 3
    assert race.verdict == muon_race.verdict(race.gains) == muon_race.verdict(race.gains * 2)
    for a, b in zip(race.ours, race.theirs):
        assert (a.tokens, a.parameters) == (b.tokens, b.parameters) and a.tokens == 3 * 2 * 4 * 31
        # Muon multiplies; both at least go through the head
        assert a.flops > b.flops > 3 * 2 * 4 * 31 * 6 * 64 * 32
    for change in (dict(accumulate=4), dict(capacity=1.0), dict(checkpointing=False)):
        with pytest.raises(
            ValueError, match=f"{next(iter(change))} = .* against .*: both racers need the same"
        ):
            muon_race.over_seeds(
                data,
                steps=3,
                share=1.0,
                ours=ours._replace(**change),
                theirs=theirs,
                machine=machine,
            )
    assert muon_race.verdict([0.2]) == muon_race.verdict([0.3, 0.1, 0.5]) == "not distinguishable"
    assert (
        muon_race.verdict([0.2, 0.21, 0.22]) == "Muon"
        and muon_race.verdict([-0.2, -0.21, -0.22]) == "AdamW"
    )


def test_accumulating_counts_all_its_tokens_and_recomputing_changes_no_loss(data, machine):
    plain, again = (muon_race.MUON._replace(accumulate=2, checkpointing=on) for on in (False, True))
    first, second = (
        muon_race.run(s, data, steps=3, machine=machine, **SMALL) for s in (plain, again)
    )
    assert (
        first.loss == pytest.approx(second.loss, rel=1e-5)
        and first.tokens == second.tokens == 3 * 2 * 4 * 31
    )
    assert muon_race.steps_to([4.0, 3.0, 2.0, 1.0], 2.5, over=1) == 3
    assert (
        muon_race.steps_to([4.0, 3.0, 2.0, 1.0], 2.5, over=4) == 4
        and muon_race.steps_to([4.0], 2.5) is None
    )


@pytest.mark.parametrize("wrong", [dict(weights="fp8"), dict(optimizer="sgd")])
def test_settings_are_refused_by_name(wrong, data, machine):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        muon_race.run(muon_race.Setting(**wrong), data, steps=1, machine=machine, **SMALL)


def test_everything_on_resumes_to_the_bit(data, machine, tmp_path):
    start = muon_race.build(
        muon_race.SKIPPING, 256, **{k: v for k, v in SMALL.items() if k not in ("rows", "length")}
    )
    multi_token.attach(start)
    found = {}
    for name, totals in {"straight": (6,), "resumed": (3, 6)}.items():
        model = copy.deepcopy(start)
        for total in totals:
            with torch.no_grad():
                for p in model.parameters():
                    # what resumes comes from the checkpoint alone
                    p.add_(total - 3 if name == "resumed" else 0)
            records = train.fit(
                model,
                text.Batches(data.stream, rows=4, length=32),
                groups.optimizers(model, weight_decay=0.1),
                total=total,
                schedule=train.cosine(6, warmup=2),
                loss=moe.loss(language=depths.loss(multi_token.loss())),
                machine=machine,
                checkpoints=train.Checkpoints(tmp_path / name),
            )
        found[name] = (
            model,
            [
                {k: r[k] for k in ("loss", "ahead1", "balance", "depth", "grad_norm")}
                for r in records
            ],
        )
    assert found["straight"][1] == found["resumed"][1]
    for (name, p), q in zip(
        found["straight"][0].named_parameters(), found["resumed"][0].parameters()
    ):
        assert torch.equal(p, q), name


def test_the_doctor_finds_nothing(data, machine):
    model = muon_race.build(
        muon_race.SKIPPING, 256, **{k: v for k, v in SMALL.items() if k not in ("rows", "length")}
    )
    multi_token.attach(model)
    optimizers = groups.optimizers(model)
    with doctor.watch(model, optimizer=optimizers, say=False) as report:
        train.fit(
            model,
            text.Batches(data.stream, rows=4, length=32),
            optimizers,
            total=8,
            schedule=train.cosine(8, warmup=2),
            loss=moe.loss(language=depths.loss(multi_token.loss())),
            machine=machine,
        )
    assert not report.findings and not report.faults
    assert sum(verdict.state == "OK" for verdict in report.verdicts.values()) > 20  # it did look


@pytest.mark.parametrize("family", muon_race.FAMILIES)
def test_a_backbone_has_the_experts_asked_for_and_a_token_meets_k_of_them(family):
    shape = dict(family=family, hidden=32, layers=2, heads=2, width=48)
    one, two = (muon_race.backbone(64, experts=6, top_k=k, **shape) for k in (1, 2))
    assert all((r.num_experts, r.top_k) == (6, 2) for r in moe.routers(two).values())
    sizes = moe.sizes(two)
    # gate, up and down, in every layer that has a router
    expert = 3 * 32 * 48 * len(moe.routers(two))
    assert (
        sizes["of the experts"] == 6 * expert
        and sizes["active"] == sizes["parameters"] - 4 * expert
    )
    assert sizes["active"] - moe.sizes(one)["active"] == expert
    with pytest.raises(ValueError, match="top_k = 7"):
        muon_race.backbone(64, experts=6, top_k=7, **shape)
    with pytest.raises(ValueError, match="family = 'gpt2'"):
        muon_race.backbone(64, experts=6, top_k=2, **(shape | dict(family="gpt2")))
