"""`nblib.doctor` is `loopdoctor` under another name, and `nblib doctor` its command."""

import pytest
import torch

import loopdoctor
from nblib import doctor, models, text, train
from nbworkbook import cli


def test_every_public_name_is_passed_on():
    assert all(getattr(doctor, name) is getattr(loopdoctor, name) for name in loopdoctor.__all__)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        doctor.nothing_of_the_kind  # noqa: B018


SCRIPT = """
import sys, torch
net = torch.nn.Linear(4, 1)
net.requires_grad_("frozen" not in sys.argv)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for n in range(4):
    loss = net(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_exit_codes_of_the_command(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert cli.main(["doctor", str(script), "--steps", "2"]) == 0
    assert "doctor, 2 steps watched: " in capsys.readouterr().out
    assert cli.main(["doctor", str(script), "--", "frozen"]) == 1
    assert "ERROR S1" in capsys.readouterr().out
    assert cli.main(["doctor", str(tmp_path / "none.py")]) == 2
    assert "give the path of an existing FILE.py" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        cli.main(["doctor", str(script), "--steps", "0"])
    assert left.value.code == 2
    assert "nblib: argument --steps: '0' is not a whole number above 0" in capsys.readouterr().err


# steps of 1 to 3
TOKENS = torch.randint(1, 4, (20_000,), generator=torch.Generator().manual_seed(0)).cumsum(0) % 96


def prompts_left_out(batch: dict) -> dict:
    labels = batch["labels"].clone()
    labels[:, :12] = -100
    return {**batch, "labels": labels}


def shifted_by_hand(batch: dict) -> dict:
    labels = torch.full_like(batch["labels"], -100)
    labels[:, :-1] = batch["input_ids"][:, 1:]
    return {**batch, "labels": labels}


@pytest.mark.parametrize(
    "change, named",
    [(dict, None), (prompts_left_out, None), (shifted_by_hand, "F17")],
    ids=["all tokens", "prompts left out", "shifted twice"],
)
def test_the_loss_of_the_loop_is_judged_though_it_makes_no_logits(change, named):
    torch.manual_seed(0)
    model = models.tiny(96, hidden=32, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batches = map(change, text.Batches(TOKENS, rows=8, length=32))
    with doctor.watch(model, optimizer=optimizer, steps=5, say=False) as report:
        train.fit(model, batches, optimizer, total=6)
    assert "not judged" not in report.headline()
    assert (report.root.check if report.root else None) == named
