"""Compile: the graph break that brings a fault back, the lengths that recompile, and a missing
compiler.
"""

import pytest

from lessons import pitfalls
from lessons.pitfalls import compilation


@pytest.mark.slow
def test_a_graph_break_brings_the_masked_fault_back():
    facts = compilation.eager_and_compiled(reentrant=True, graph_break=True)
    assert facts["compiled"] == facts["eager"] and facts["compiled"].startswith("1 of")


@pytest.mark.slow
def test_lengths_recompile_once_and_a_frozen_parameter_once_more():
    rows = compilation.recompiles(
        {"a": 16, "b": 24, "c": 40, "freeze": lambda m: m.model.norm.requires_grad_(False)}
    )
    assert [row["graphs compiled"] for row in rows] == [1, 1, 0, 1]


def test_without_a_compiler_p23_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    compilation._warm_cache.cache_clear()
    with pytest.raises(
        pitfalls.Unavailable,
        match="needs a C\\+\\+ compiler, and there is no no-such-compiler here",
    ):
        pitfalls.pitfall("P23").broken()
