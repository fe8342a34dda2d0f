"""Heads for later tokens against plain cross-entropies."""

import copy

import pytest
import torch
from torch.nn import functional as F

from nblib import compiling, losses, text, train
from nblib.methods.moe import multi_token
from nblib.methods.muon import groups


@pytest.fixture
def rows():
    return torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(3))


def batch_of(rows):
    return {"input_ids": rows, "labels": rows}


def test_heads_are_the_plain_cross_entropies(tiny, rows):
    multi_token.attach(tiny)
    labels = rows.clone()
    labels[0, 5:9] = losses.IGNORED
    terms = multi_token.loss()(tiny, {"input_ids": rows, "labels": labels})
    hidden = tiny.model(input_ids=rows).last_hidden_state.double()
    weights = [w / 2 for w in (1, 0.5, 0.3, 0.2)]
    for i, (w, head) in enumerate(zip(weights, [tiny.lm_head, *tiny.ahead.values()]), 1):
        logits = hidden[:, :-i] @ head.weight.double().T
        assert multi_token.normalised(4)[i - 1] == pytest.approx(w)
        expected = F.cross_entropy(logits.flatten(0, 1), labels[:, i:].flatten(), reduction="sum")
        assert float(terms[f"ahead{i}"]) == pytest.approx(w * float(expected), rel=1e-5)


def test_heads_train(tiny, stream, machine, rows):
    plain = tiny(input_ids=rows).logits
    layers = compiling.blocks(tiny)
    multi_token.attach(tiny)
    assert torch.equal(tiny(input_ids=rows).logits, plain) and compiling.blocks(tiny) == layers
    assigned = groups.assign(tiny)
    assert all(assigned[n].optimizer == "AdamW" for n in assigned if n.startswith("ahead"))
    batches = text.Batches(stream, rows=8, length=32)
    train.fit(
        tiny,
        batches,
        train.adamw(tiny, lr=1e-2),
        total=60,
        loss=multi_token.loss(),
        machine=machine,
    )
    held_out = text.fixed_rows(stream, length=32, limit=16)
    known = multi_token.evaluate(tiny, held_out)
    # noisy counting: the farther, the less is known
    assert known[0] < known[1] < known[2] < known[3]
    assert known[0] == pytest.approx(
        train.evaluate(tiny, held_out, machine=machine)["loss"], rel=1e-5
    )
    del tiny.ahead
    multi_token.attach(tiny, heads=2)  # and others can be attached


def test_a_stopped_evaluation_leaves_the_mode_as_it_was(tiny, rows, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    multi_token.attach(tiny)
    tiny.model.norm.eval()
    modes = [m.training for m in tiny.modules()]
    monkeypatch.setattr(multi_token, "ahead", stop)
    with pytest.raises(KeyboardInterrupt):
        multi_token.evaluate(tiny, rows)
    assert [m.training for m in tiny.modules()] == modes


def test_heads_accumulate_exactly(tiny, rows, machine):
    steps = {}
    multi_token.attach(tiny)
    for micro in (4, 1):
        model = copy.deepcopy(tiny)
        batches = iter([batch_of(part) for part in rows.split(micro)])
        (record,) = train.fit(
            model,
            batches,
            train.adamw(model, lr=1e-3),
            total=1,
            accumulate=4 // micro,
            loss=multi_token.loss(),
            machine=machine,
        )
        steps[micro] = {name: record[name] for name in ("ahead1", "ahead4", "grad_norm")}
    assert steps[4] == pytest.approx(steps[1], rel=1e-5)


def test_heads_refuse_by_name(tiny):
    with pytest.raises(ValueError, match="heads = 1"):
        multi_token.attach(tiny, heads=1)
    multi_token.attach(tiny, heads=2)
    with pytest.raises(ValueError, match="2 heads already"):
        multi_token.attach(tiny)
    with pytest.raises(ValueError, match="weights"):
        multi_token.normalised(2, (1.0,))
