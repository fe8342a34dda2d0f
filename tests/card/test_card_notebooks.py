"""Every notebook runs on a card that is not there; and one that hands a tensor of the card to
matplotlib does not.
"""

import absent_card
import card_runs
import pytest
import run_notebook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent_card.missing()), reason=absent_card.missing()),
]
# Why a notebook is not run here.
LEFT_OUT = {
    "20_compare": "its short runs train the methods that test_card_methods.py trains",
    "21_scale_out": "its ranks are processes with a card each, that talk over NCCL; with one card they stay on the CPU",
}
EVERY = sorted(path.stem for path in (absent_card.ROOT / "notebooks").glob("[0-9]*.ipynb"))
NOTEBOOKS = [name for name in EVERY if name not in LEFT_OUT]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_its_cells_run_on_a_card(name, tmp_path_factory):
    ended = card_runs.run(
        "run_notebook.py", name, "--store", str(card_runs.shared(tmp_path_factory) / "base")
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_no_notebook_is_left_out_without_a_reason():
    assert LEFT_OUT.keys() <= set(EVERY) and all(LEFT_OUT.values())
    assert set(NOTEBOOKS) == run_notebook.SMALL.keys()


def test_a_number_that_stays_on_the_card_is_refused_by_matplotlib(tmp_path):
    """What notebook 13 did once: it divided a number by a count that was on the card."""
    fault = (
        "/ kl.numel() for loss in hump",
        '/ losses.supervised(few["labels"]).to("cuda") for loss in hump',
    )
    ended = card_runs.run("run_notebook.py", "13_distillation", "--instead", *fault)
    assert ended.returncode == 1
    assert (
        "can't convert cuda:0 device type tensor to numpy" in ended.stderr
        and "in code cell 18" in ended.stderr
    )
