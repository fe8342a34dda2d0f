"""Recomputed and compiled blocks give the same gradients, and a compiled training the losses of a
plain one.
"""

import os
import shutil

import pytest
import torch

from nblib import compiling, losses, models, train


@pytest.mark.parametrize("family", models.FAMILIES)
def test_checkpointed_blocks_give_the_same_bits(family):
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.randint(64, (2, 16))
    found = {}
    for name, prepare in {
        "plain": lambda m: m,
        "checkpointed": compiling.checkpoint_blocks,
    }.items():
        model = prepare(models.tiny(64, family=family, hidden=32, layers=2, heads=2)).train()
        torch.manual_seed(0)
        with FlopCounterMode(display=False) as flops:
            losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"].backward()
        found[name] = flops.get_total_flops(), [p.grad for p in model.parameters()]
    assert found["checkpointed"][0] > found["plain"][0]  # it does recompute
    assert all(torch.equal(a, b) for a, b in zip(found["plain"][1], found["checkpointed"][1]))


@pytest.mark.slow
def test_compiled_blocks_keep_names_and_gradients():
    ids = torch.randint(64, (2, 16))
    plain, compiled = (models.tiny(64, hidden=32, layers=2, heads=2) for _ in range(2))
    compiling.compile_blocks(compiled, backend="aot_eager")
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    for model in (plain, compiled):
        losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"].backward()
    for a, b in zip(plain.parameters(), compiled.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_twelfth_model_of_a_process_is_compiled_too():
    """dynamo keeps eight versions of a function, and a teacher, its students and their evaluations
    share one.
    """
    torch._dynamo.reset()
    versions = []

    def backend(graph, inputs):
        versions.append(graph)
        return graph.forward

    for width in range(8, 20):
        model = models.tiny(64, hidden=2 * width, layers=1, heads=1)
        compiling.compile_blocks(model, backend=backend)(
            input_ids=torch.ones(2, 4, dtype=torch.long), use_cache=False
        )
        assert len(versions) == width - 7, "its blocks run as they are"
    torch._dynamo.reset()


# The methods of the notebooks that take `compiled`.
COMPILED = ("LRC", "ARD-LoRA", "MoE with Muon", "mixture of depths", "distillation, live")


def backends() -> list:
    no_compiler = not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++")))
    without = pytest.mark.skipif(
        no_compiler, reason="no C++ compiler is here (c++, g++, clang++), inductor needs one"
    )
    return ["aot_eager", pytest.param("inductor", marks=without)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("method", COMPILED)
def test_a_compiled_training_has_the_losses_and_the_names_of_a_plain_one(
    method, backend, tmp_path, machine
):
    from safetensors import safe_open

    from nbworkbook import method_steps

    if backend == "inductor" and method != "MoE with Muon":
        pytest.skip(
            "inductor is tried on one method, because it takes half a minute; aot_eager traces the same graphs"
        )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    size = method_steps.Size("cpu", vocabulary=256, hidden=32, layers=2, heads=2, rows=2, length=32)
    ends, names, calls = {}, {}, []
    for compiled in (False, True):
        torch.manual_seed(0)
        net, optimizers, loss, more = method_steps.METHODS[method](size)
        if compiled:
            compiling.compile_blocks(net, backend=backend)
            # a block that is not called as compiled code would prove nothing
            for block in compiling.blocks(net):
                block._compiled_call_impl = noted(calls, block._compiled_call_impl)
        ids = torch.randint(256, (12, 2, 32), generator=torch.Generator().manual_seed(1))
        rows = iter([{"input_ids": each, "labels": each} | more(each) for each in ids])
        folder = tmp_path / str(compiled)
        torch.manual_seed(0)
        options = dict(
            total=3, machine=machine, loss=loss, checkpoints=train.Checkpoints(folder, every=3)
        )
        ends[compiled] = [
            record["loss"] for record in train.steps(net, rows, optimizers, **options)
        ]
        files = sorted(folder.rglob("*.safetensors"))
        assert files
        names[compiled] = [sorted(safe_open(file, "pt").keys()) for file in files]
    assert (
        len(calls) >= 3 * size.layers and torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    )
    torch.testing.assert_close(ends[True], ends[False], rtol=1e-4, atol=0)
    assert names[True] == names[False] and not any(
        "_orig_mod" in name for each in names[True] for name in each
    )


def noted(calls: list, call):
    return lambda *args, **kwargs: calls.append(call) or call(*args, **kwargs)


def test_blocks_are_the_longest_list_of_layers_and_a_model_without_one_is_refused(tiny):
    assert compiling.blocks(tiny) == list(tiny.model.layers)
    with pytest.raises(ValueError, match="Linear has no list of layers"):
        compiling.blocks(torch.nn.Linear(2, 2))
