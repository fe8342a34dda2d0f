"""A model of another family ends a notebook well: it runs, or one sentence says why not before
anything is trained.
"""

import families
import pytest
import run_notebook

pytestmark = [pytest.mark.slow]
NO_PRODUCT = (
    "the head must be one matrix product, but it makes logits from -99 to 99 into -29.9 to 29.9"
)
ENDS = [  # every notebook once, and each refusal; families.py has all pairs
    ("01_freeze_and_adapters", "gpt2", {}, ""),
    ("10_lrc", "gpt2", {}, ""),
    ("10_lrc", "gemma2", {}, NO_PRODUCT),
    ("11_ard_lora", "gpt2", families.GIVEN["11_ard_lora", "gpt2"], ""),
    ("11_ard_lora", "gpt2", {}, "the model has no 'q_proj'; allowed are c_attn, c_fc, c_proj"),
    ("13_distillation", "mixtral", {}, ""),
    ("13_distillation", "gemma2", {}, NO_PRODUCT),
    ("15_spiking_student", "gemma2", {}, NO_PRODUCT),
    ("15_spiking_student", "llama", {}, ""),
    ("20_compare", "mixtral", {}, ""),
    ("20_compare", "gemma2", {}, "methods: distillation cannot learn from a Gemma2ForCausalLM"),
    ("20_compare", "gemma2", families.GIVEN["20_compare", "gemma2"], ""),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize(
    "name, family, given, words", ENDS, ids=[f"{n}-{f}-{bool(g)}" for n, f, g, _ in ENDS]
)
def test_a_notebook_runs_or_says_why_not(name, family, given, words, checkpoints, forked):
    outcome = families.in_process(name, family, checkpoints, given, forked)
    assert outcome.kind == (families.REFUSED if words else families.RAN), outcome.words
    assert words in outcome.words


def test_every_notebook_that_takes_a_model_is_in_the_table():
    folder = run_notebook.ROOT / "notebooks"
    every = sorted(path.stem for path in folder.glob("[0-9]*.ipynb"))
    cells = {
        name: [source for tags, source in run_notebook.cells(name) if "parameters" in tags]
        for name in every
    }
    assert list(families.NOTEBOOKS) == [
        name for name in every if any("\nmodel: str" in f"\n{c}" for c in cells[name])
    ]
    assert {name for name, _, _, _ in ENDS} == set(families.NOTEBOOKS)


def test_a_sentence_that_comes_after_the_training_is_a_failure(checkpoints, monkeypatch):
    """And so is an error from inside of torch."""
    from nblib import train

    monkeypatch.setattr(train, "steps", train.steps)
    # which are changed in place, for a process of their own
    for table in ("SMALL", "SKIPPED", "INSTEAD"):
        monkeypatch.setattr(run_notebook, table, dict(getattr(run_notebook, table)))

    def late(name, **_):
        with pytest.raises(TypeError):
            train.steps()
        raise ValueError("too late")

    monkeypatch.setattr(run_notebook, "run", late)
    assert families.execute("10_lrc", checkpoints, {}).kind == families.FAILED
    monkeypatch.setattr(run_notebook, "run", lambda name, **_: [][0])
    assert families.execute("10_lrc", checkpoints, {}).kind == families.FAILED
