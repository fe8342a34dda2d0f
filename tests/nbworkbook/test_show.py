"""Progress says what the records hold; a training has controls of its own, and ends in a picture
however it ends.
"""

import asyncio
import json

import pytest
from conftest import FP32

from nblib import text, train
from nbworkbook import runs, show


def mime(thing) -> dict:
    bundle = thing._repr_mimebundle_()
    return bundle[0] if isinstance(bundle, tuple) else bundle


def test_progress_says_what_the_record_holds(capsys):
    progress = show.Progress("title")
    assert str(progress) == "title: not started"
    progress({"step": 1, "of": 3, "loss": 2.5})
    progress(
        {
            "step": 3,
            "of": 3,
            "loss": 2.0,
            "lr": 1e-3,
            "grad_norm": 0.5,
            "tokens_per_s": 1234.5,
            "eta_s": 3661,
            "memory_gib": 1.25,
        }
    )
    whole = "title: step 3 of 3, loss 2.0000, rate 1.0e-03, gradient norm 0.5, 1,234 tokens/s, 1:01:01 left, 1.2 GiB"
    assert str(progress) == whole and capsys.readouterr().out.splitlines()[-1] == whole
    record = {"step": 4, "of": 9, "loss": 2.0, "flop_per_s": 3.2e14, "mfu": 0.4154}
    progress(record)  # of a CPU: for the record alone
    assert str(progress).endswith("loss 2.0000")
    progress(record | {"memory_gib": 1.25, "card_gib": 9.0, "card_busy": 0.98, "card_watts": 611.7})
    assert str(progress).endswith(", 1.2 GiB, 320.0 TFLOP/s, MFU 42%, card 98% busy, 612 W")
    progress({"step": 3, "of": 9, "loss": float("nan")})  # nan has no place on the line
    assert str(progress).endswith("loss nan") and len(progress.losses) == 4


def test_what_stays_of_a_training_is_a_picture_that_an_untrusted_notebook_shows(capsys):
    progress = show.Progress("title")
    for step, loss in enumerate((2.0, 5.0, 3.0), start=1):
        progress({"step": step, "of": 4, "loss": loss})
    live = mime(progress)
    assert "<svg" in live["text/html"] and "<progress" in live["text/html"]
    progress({"step": 4, "of": 4, "loss": 1.0})
    stored = mime(progress)
    assert set(stored) == {"text/plain", "image/png"} and stored["text/plain"] == str(progress)
    # first and last
    assert progress.picture().figure.get_suptitle() == "title: loss 2.00 to 1.00, steps 1 to 4"
    progress({"step": 3, "of": 9, "loss": 2.0, "stopped": "Stop"})
    assert "image/png" in mime(progress) and str(progress).endswith("stopped by Stop")


def test_losses_of_two_kinds_are_drawn_over_their_first_values():
    training = show.Training("t", relative=True)
    for step, loss in ((1, 4.0), (2, 2.0), (3, 1.0)):
        training._take({"step": step, "of": 3, "loss": loss, "eval_loss": 10 * loss})
    drawn = training._curves()
    assert drawn["y"] == "loss / its first value"
    assert (
        drawn["series"]["each step"]
        == drawn["series"]["validation"]
        == [(1, 1.0), (2, 0.5), (3, 0.25)]
    )
    assert drawn["series"]["training"][0] == (1, 1.0)


def test_a_prediction_says_what_was_chosen_and_headless_what_it_is():
    guess = show.predict("How many of 42 get a gradient?", [0, 21, 42])
    assert str(guess.answer(0)) == "it is 0"
    guess.chosen = 21
    assert repr(guess.answer(0)) == "you said 21: it is 0"
    with pytest.raises(ValueError, match="choices = .*two or more"):
        show.predict("?", [1])


def test_source_is_what_the_file_says():
    shown = mime(show.source(show.cell))
    assert (
        shown["text/plain"].startswith("def cell(value) -> str:") and "<span" in shown["text/html"]
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run in its folder, the one of this process as after runs.begin."""
    run = runs.Run(tmp_path, {})
    monkeypatch.setattr(runs, "_HERE", [run])
    return run


def follow(
    training: show.Training, tiny, batches, *, total: int = 6, stop_at: int = 0, folder=None
) -> None:
    """Train, and press Stop in the middle of a step."""

    def loss(model, batch):
        training.stop |= len(training.records) + 1 == stop_at
        return train.losses.causal_lm(model, batch)

    look = dict(
        controls=training, records=training.records, evaluate=lambda: {"loss": 5.0}, eval_every=2
    )
    options = dict(
        machine=FP32, loss=loss, watch=train.Watch(**look), checkpoints=train.Checkpoints(folder)
    )
    asyncio.run(
        training.follow(
            train.steps(tiny, batches, train.adamw(tiny, lr=1e-3), total=total, **options)
        )
    )


def stops(run) -> dict:
    path = run.dir / "run.json"
    return json.loads(path.read_text()).get("stopped", {}) if path.exists() else {}


def test_a_training_ends_in_a_picture_with_its_name_its_validation_and_its_rival(
    run, tiny, batches, capsys
):
    rival = {
        "other": [{"step": 1, "loss": 9.0}, {"step": 2, "loss": 9.0, "eval_loss": 4.0}],
        "points": [(1, 3.0)],
    }
    training = show.Training("corrected", run, rival=rival | {"empty": []})
    follow(training, tiny, batches)
    axes = training.picture().figure.axes[0]
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert set(lines) == {"other", "points", "each step", "training", "validation"}
    assert lines["validation"] == [[2, 5.0], [4, 5.0], [6, 5.0]]
    assert (
        lines["each step"] == [[r["step"], r["loss"]] for r in training.records]
        and len(training.records) == 6
    )
    assert lines["other"] == [[2, 4.0]]  # validation, where there is some: the same rows for both
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss (nats per token)")
    assert training.picture().figure.get_suptitle().startswith("corrected: loss ")
    data = mime(training)
    assert set(data) == {"text/plain", "image/png"} and data["text/plain"].startswith(
        "corrected: step 6 of 6, loss "
    )
    assert training.label == "corrected" and not training.stopped and runs.notice() == ""
    assert "validation" in training._live() and "points" in training._live()


def test_a_stop_is_in_the_output_in_the_label_in_the_run_and_in_captions(
    run, tiny, batches, capsys
):
    training = show.Training("corrected", run)
    follow(training, tiny, batches, stop_at=4)
    assert training.stopped and training.label == "corrected, 4 of 6 steps" and training.closed
    assert training.named("A training") == "A training, 4 of 6 steps"
    words = "Stopped at step 4 of 6. The numbers below come from a half-trained model. Run this cell again to go on from"
    data = mime(training)
    assert data["text/plain"].startswith(f"{words} step 4.\ncorrected: step 4 of 6")
    assert (
        f">{words} step 4.</div><img src=" in data["text/html"]
        and "background-color" in data["text/html"]
    )
    assert (
        training.picture(training.label)
        .figure.get_suptitle()
        .startswith("corrected, 4 of 6 steps: loss")
    )
    assert stops(run) == {"corrected": {"step": 4, "of": 6, "by": "Stop"}}
    assert (
        show.Table([], caption="Losses").caption == "Losses (corrected was stopped at step 4 of 6)"
    )
    assert (
        str(show.predict("?", [1, 2]).answer(2)) == "it is 2 (corrected was stopped at step 4 of 6)"
    )


def test_a_stop_at_the_first_step_has_its_words_and_no_picture(run, tiny, batches, capsys):
    training = show.Training("corrected", run)
    follow(training, tiny, batches, stop_at=1)
    assert "Stopped at step 1 of 6." in mime(training)["text/html"] and "image/png" not in mime(
        training
    )


def test_a_stop_at_the_last_step_is_none(run, tiny, batches, capsys):
    training = show.Training("corrected", run)
    follow(training, tiny, batches, stop_at=6)
    assert not training.stopped and training.label == "corrected" and stops(run) == {}


def test_run_again_it_goes_on_and_is_a_whole_training(run, tiny, batches, stream, tmp_path, capsys):
    state, rows = {k: v.clone() for k, v in tiny.state_dict().items()}, dict(rows=4, length=32)
    losses, folder = {}, tmp_path / "checkpoints"
    for name, stop_at in (("straight", 0), ("stopped", 3), ("stopped", 0)):
        tiny.load_state_dict(state)
        training = show.Training("corrected", run)
        follow(training, tiny, text.Batches(stream, **rows), stop_at=stop_at, folder=folder / name)
        losses[name] = training.losses
    # the curve of all steps
    assert losses["stopped"] == losses["straight"] and len(losses["stopped"]) == 6
    assert [r["step"] for r in training.records] == [1, 2, 3, 4, 5, 6] and len(training.looks) == 3
    assert training.label == "corrected" and runs.notice() == "" and stops(run) == {}
    again = show.Training("corrected", run)  # and once more there is nothing left to do
    follow(again, tiny, text.Batches(stream, **rows), folder=folder / "stopped")
    assert (
        again.losses == training.losses
        and again.closed
        and "step 6 of 6" in mime(again)["text/plain"]
    )


def test_a_training_that_fails_is_closed_and_says_how_far_it_came(run, capsys):
    """And the loop lets go of what it holds: it is closed too."""
    left = []

    def failing():
        try:
            yield {"step": 1, "of": 9, "loss": 2.0}
            yield {"step": 2, "of": 9, "loss": 1.0}
            raise OSError("disk full")
        finally:
            left.append("loop")

    training = show.Training("corrected", run)
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(training.follow(failing()))
    assert training.closed and left == ["loop"] and training.label == "corrected, 2 of 9 steps"
    assert (
        "image/png" in mime(training)
        and "Stopped" not in mime(training)["text/plain"]
        and stops(run) == {}
    )


def test_a_training_that_was_used_is_refused_by_the_next(run, tiny, batches, capsys):
    training = show.Training("corrected", run)
    follow(training, tiny, batches, stop_at=2)
    sentence = r"show.Training\('corrected'\) has ended at step 2 of 6: make a new one for each training\.$"
    with pytest.raises(RuntimeError, match=sentence):
        train.fit(
            tiny,
            batches,
            train.adamw(tiny, lr=1e-3),
            total=6,
            watch=train.Watch(controls=training),
            machine=FP32,
        )
    with pytest.raises(RuntimeError, match=sentence):
        training({"step": 1, "of": 6, "loss": 2.0})


def test_the_loop_asks_it_for_the_rate(run, tiny, batches, capsys):
    training = show.Training("corrected")
    training.lr_scale = 0.1
    follow(training, tiny, batches, total=2)
    assert [r["lr"] for r in training.records] == pytest.approx([1e-4, 1e-4])


def test_headless_it_has_no_widget_and_shows_what_progress_shows(run, capsys, monkeypatch):
    monkeypatch.setattr(show.Training, "_widgets", lambda self: pytest.fail("a widget"))
    outputs = {}
    for kind in (show.Progress, show.Training):
        shown = kind("title")
        assert capsys.readouterr().out == ""
        for step in range(1, 100):
            shown({"step": step, "of": 99, "loss": 1.0})
        outputs[kind] = capsys.readouterr().out.splitlines()
    # first and last
    assert outputs[show.Training] == outputs[show.Progress] and len(outputs[show.Training]) == 2


def test_a_person_sees_one_output_that_is_made_when_the_training_begins(run, capsys, monkeypatch):
    shown, left = [], type("handle", (), {"update": lambda self, thing: shown.append(thing)})()
    monkeypatch.setattr(show.runtime, "interactive", lambda: True)
    monkeypatch.setattr(
        show, "displayed", lambda thing, handle=None: shown.append((thing, handle)) or left
    )
    training = show.Training("corrected", run)
    assert shown == []  # what fails before the first step leaves no button
    for step in (1, 2, 3):
        training({"step": step, "of": 3, "loss": 1.0})
        training.drawn = 0.0
    (widgets, before), (picture, handle) = shown
    page, (less, more, factor, button) = widgets.children[0], widgets.children[1].children
    # the picture takes the place of the widgets
    assert before is None and picture is training and handle is left
    assert (
        button.description == "Stop"
        and "corrected: step 2 of 3" in page.value
        and "<svg" in page.value
    )
    less.click(), less.click(), more.click()
    button.click()
    assert (training._lr_scale, training.stop, button.disabled) == (0.5, True, True)
    assert factor.value == "rate x 0.5"
    for _ in range(20):
        more.click()
    assert training._lr_scale == show.LARGEST
    for _ in range(20):
        less.click()
    assert training._lr_scale == show.SMALLEST


def test_no_title_and_no_rival_puts_html_into_the_page(run, capsys):
    evil = "<img src=x onerror=alert(1)>"
    training = show.Training(evil, run, rival={f"{evil}<script>": [(1, 1.0), (2, 2.0)]})
    for step, more in ((1, {}), (2, {}), (3, {"stopped": "<b>"})):
        assert evil not in training._live() and "<script>" not in training._live()
        training({"step": step, "of": 9, "loss": 1.0} | more)
    page = mime(training)["text/html"]
    assert evil not in page and "<script>" not in page and "<b>" not in page
    run.resumed(evil)
