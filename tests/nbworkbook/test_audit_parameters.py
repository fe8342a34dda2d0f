"""Every profile of the workbook is passed, each contradiction is named, and its repair is silent
again.
"""

import pytest

from nblib import paths
from nbworkbook import audit_parameters, jobs, parameters
from nbworkbook.parameters import ParameterError

BAD_ON_PURPOSE = ("12_moe_muon.sweep.yaml",)  # it tries each rate in each convention
PROFILES = sorted(p for p in paths.profiles().glob("*.yaml") if not p.name.endswith(".search.yaml"))


@pytest.fixture(scope="module")
def known():
    return {name: parameters.declared(paths.notebooks() / f"{name}.ipynb") for name in jobs.names()}


def lint(known, name, **given):
    return audit_parameters.lint(known[jobs.resolve(name)], given, source="here")


def test_all_that_ships_is_passed():
    assert len(PROFILES) > 25
    said = {
        path.name: audit_parameters.audit(path)
        for path in PROFILES
        if path.name not in BAD_ON_PURPOSE
    }
    assert {name: told for name, told in said.items() if told} == {}


def test_the_defaults_of_every_notebook_are_passed(known):
    assert {name: told for name in known if (told := lint(known, name))} == {}


def test_the_write_ups_settings_are_doubted_in_the_words_of_their_convention(known):
    """3e-4 beside 9e-5 for 102 steps; the same rates are AdamW's own with the other scaling."""
    before = dict(lr=3e-4, adamw_lr=9e-5, steps=102)
    rate, beside, reach = lint(known, "12", **before)
    assert rate.startswith("lr = 0.0003 with 'original' scaling") and beside.startswith(
        "adamw_lr = 9e-05 beside Muon"
    )
    assert "the rates of AdamW sum to 0.0046" in reach
    assert lint(known, "12", lr=3e-3, adamw_lr=3e-3, update="match_rms_adamw") == []
    assert len(lint(known, "12", lr=1e-3, adamw_lr=3e-3)) == 1


BAD = [  # notebook, what contradicts itself, words, the repair
    ("12", dict(lr=0.0), "lr = 0: what it belongs to does not train", dict(lr=0.02)),
    (
        "12",
        dict(lr=0.05, update="match_rms_adamw"),
        "a number for 'original' scaling",
        dict(lr=3e-3),
    ),
    ("12", dict(update="adamw", lr=0.02, race_steps=0), "Muon's kind of number", dict(lr=3e-3)),
    ("12", dict(adamw_lr=0.5), "adamw_lr = 0.5 moves every entry", dict(adamw_lr=0.02)),
    ("12", dict(lr=0.5), "of its own size in one step", dict(lr=0.02)),
    ("12", dict(top_k=9), "top_k = 9 of experts = 8", dict(top_k=3)),
    ("12", dict(top_k=8), "every token takes all experts", dict(top_k=2)),
    ("12", dict(balance_weight=0.0), "nothing keeps the load", dict(balance_weight=0.01)),
    ("12", dict(balance_weight=5.0), "an even load costs 5", dict(balance_weight=0.1)),
    ("12", dict(experts=512), "an expert gets 4 on average", dict(experts=64)),
    (
        "12",
        dict(hidden=130, width=128),
        "hidden = 130 does not divide by attention_heads = 4",
        dict(hidden=132),
    ),
    ("12", dict(update="adamw", lr=3e-3), "AdamW cannot race itself", dict(race_steps=0)),
    (
        "12",
        dict(device="cpu", precision="fp16"),
        "a CPU gains nothing by it",
        dict(precision="auto"),
    ),
    ("12", dict(device="cuda", precision="fp32"), "turns TF32 off", dict(precision="bf16")),
    ("12", dict(corpus="hf:a/b?name=c&tokens=0.01M"), "reads its corpus 7.4 times", dict(steps=20)),
    ("14", dict(lr=1e-3), "AdamW's kind of number", dict(lr=0.02)),
    ("11", dict(warmup=36), "the warm-up does not end", dict(warmup=3)),
    ("11", dict(device="cpu", four_bit=True), "is for cards", dict(four_bit=False)),
    ("13", dict(eval_every=50), "nothing is evaluated before the end", dict(eval_every=32)),
    ("13", dict(rows=1, length=64), "a step sees 64 tokens", dict(accumulate=4)),
    ("13", dict(divergence="reverse"), "divergence = reverse cannot measure", dict(tail="spread")),
    (
        "13",
        dict(learns="prior", divergence="soft_ce"),
        "the teacher's entropy would drive it",
        dict(divergence="forward"),
    ),
    ("13", dict(learns="prior", tail="spread"), "misleads a learned temperature", dict(k=0)),
    ("15", dict(lr=1e-4), "sum to 0.0024", dict(lr=4e-3)),
]


@pytest.mark.parametrize(
    "name, given, words, repair",
    BAD,
    ids=[f"{b[0]}-{'-'.join(b[1])}-{n}" for n, b in enumerate(BAD)],
)
def test_one_contradiction_is_one_finding_and_its_repair_is_silent(
    name, given, words, repair, known
):
    (said,) = lint(known, name, **given)
    assert words in said
    assert lint(known, name, **(given | repair)) == []


def test_a_sweep_says_in_how_many_combinations(known):
    (said,) = lint(known, "12", lr=[1e-3, 0.02], adamw_lr=[0.003, 0.02])
    assert said.endswith("(2 of 4 combinations)")


def test_what_cannot_be_judged_is_one_sentence(tmp_path):
    for name, text, words in [
        ("12_moe_muon.mine.yaml", "lrr: 1\n", "did you mean"),
        ("12_moe_muon.mine.yaml", "optimizer:\n  type: muon\n", "the mapping must be flat"),
        ("nobody.yaml", "lr: 1\n", "Unknown notebook"),
        ("10_lrc.search.yaml", "minimise: loss\nlr: 1e-4 .. 1e-2\n", "is a search file"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ParameterError, match=words):
            audit_parameters.audit(tmp_path / name)


def test_the_parameters_of_a_run_are_those_of_its_notebook(tmp_path):
    folder = tmp_path / "12_moe_muon" / "20260101-000000-abc"
    folder.mkdir(parents=True)
    (folder / "parameters.yaml").write_text("top_k: 8\n")
    assert len(audit_parameters.audit(folder / "parameters.yaml")) == 1


def test_a_model_that_is_not_here_can_still_be_judged(known):
    assert lint(known, "13", model="nobody/nothing", corpus="hf:no/such?tokens=25M") == []
