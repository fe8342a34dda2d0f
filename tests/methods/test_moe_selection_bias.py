"""The bias that balances: what it chooses and does not weigh, the step against the load, and that
nothing loses it.
"""

import copy

import pytest
import torch
import transformers as tf
from mixtures import FAMILIES, SIZES, mixture

from nblib import compiling, models, runtime, text, train
from nblib.methods import moe
from nblib.methods.moe import selection_bias
from nblib.methods.muon import groups

CPU = runtime.pick("cpu", "fp32")


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.fixture
def ids():
    return torch.randint(128, (4, 24), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_any_family(family, ids):
    """Zero changes nothing; a large one is chosen and weighs nothing; a step goes against the
    load.
    """
    model = mixture(family)
    with torch.no_grad():
        before = model.eval()(input_ids=ids).logits
    optimizer = sgd(model)
    routers = selection_bias.attach(model, optimizer, rate=0.01)
    assert list(moe.routers(model).values()) == routers and len(routers) == 2
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-5)
    first = routers[0]
    x = torch.randn(64, first.weight.shape[1])
    with torch.no_grad():
        _, weights, chosen = first(x)
        getattr(first, selection_bias.BIAS)[5] = 3.0
        _, _, now = first(x)
        assert (now == 5).any(dim=1).all() and not (chosen == 5).any(dim=1).all()
        getattr(first, selection_bias.BIAS).fill_(3.0)  # alike for all
        _, same, again = first(x)
        assert torch.equal(again.sort(dim=1).values, chosen.sort(dim=1).values)
        torch.testing.assert_close(same.sort(dim=1).values, weights.sort(dim=1).values)
    getattr(first, selection_bias.BIAS).zero_()
    model.train()
    with moe.routing(model) as seen:
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    for router, routed in zip(routers, seen):
        counts = torch.bincount(routed.chosen.flatten(), minlength=8).float()
        expected = 0.01 * (counts.mean() - counts).sign()
        torch.testing.assert_close(getattr(router, selection_bias.BIAS), expected)
        assert not router.load.any()


def test_what_others_see_is_what_was_chosen(ids):
    """`moe.routing` may have been there before."""
    model = mixture()
    with moe.routing(model):
        pass
    (first, _) = selection_bias.attach(model, sgd(model))
    getattr(first, selection_bias.BIAS)[5] = 3.0
    with moe.routing(model) as seen:
        model(input_ids=ids)
    assert (seen[0].chosen == 5).any(dim=1).all()


def test_evaluation_counts_nothing(ids):
    model = mixture()
    routers = selection_bias.attach(model, sgd(model))
    model.eval()(input_ids=ids)
    assert not any(router.load.any() for router in routers)


def trained(folder=None, total=6, stop=None, accumulate=1, checkpointing=False):
    model = mixture()
    optimizers = groups.optimizers(model, lr=0.01, adamw_lr=0.01)
    selection_bias.attach(model, optimizers[0], rate=0.01)
    if checkpointing:
        compiling.checkpoint_blocks(model)
    stream = torch.randint(128, (5000,), generator=torch.Generator().manual_seed(0))
    batches = text.Batches(stream, rows=4 // accumulate, length=32, seed=0)
    options = dict(
        loss=moe.loss(balance_weight=0.0),
        machine=CPU,
        accumulate=accumulate,
        checkpoints=train.Checkpoints(folder, every=1),
    )
    for record in train.steps(model, batches, optimizers, total=total, **options):
        if record["step"] == stop:
            break
    return model


def test_it_is_saved_and_a_run_that_goes_on_is_the_straight_run(tmp_path):
    straight = trained(tmp_path / "straight").state_dict()
    trained(tmp_path / "cut", stop=3)
    resumed = trained(tmp_path / "cut").state_dict()
    biases = [name for name in straight if name.endswith(selection_bias.BIAS)]
    assert len(biases) == 2 and all(straight[name].any() for name in biases)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    again = mixture()
    selection_bias.attach(again, sgd(again))
    again.load_state_dict(straight)
    assert not any("load" in name.split(".")[-1] for name in straight)


def test_micro_batches_and_recomputation_change_no_step_of_it():
    """The same rows in one piece, in two, and with blocks that run their routers once more in
    backward.
    """
    one, two, again = (
        trained(total=1, **o) for o in ({}, dict(accumulate=2), dict(checkpointing=True))
    )
    for name, value in one.state_dict().items():
        if name.endswith(selection_bias.BIAS):
            assert torch.equal(value, two.state_dict()[name]) and torch.equal(
                value, again.state_dict()[name]
            )


def test_it_is_copied_with_the_model(ids):
    model = mixture()
    (first, _) = selection_bias.attach(model, sgd(model))
    copied = copy.deepcopy(model)
    getattr(first, selection_bias.BIAS)[5] = 3.0
    with moe.routing(copied) as seen:
        copied(input_ids=ids)
    assert not (seen[0].chosen == 5).any(dim=1).all()


def test_refused():
    model = mixture()
    with pytest.raises(ValueError, match="rate = 2: must be above 0 and below 1"):
        selection_bias.attach(model, sgd(model), rate=2)
    selection_bias.attach(model, sgd(model))
    with pytest.raises(ValueError, match="has a selection bias already"):
        selection_bias.attach(model, sgd(model))
    with pytest.raises(ValueError, match="no router"):
        selection_bias.attach(models.tiny(64), None)
    other = tf.AutoModelForCausalLM.from_config(
        tf.AutoConfig.for_model("phimoe", **SIZES, num_local_experts=8)
    )
    with pytest.raises(ValueError, match="PhimoeTopKRouter: its weights are not its softmax"):
        selection_bias.attach(other, sgd(other))
