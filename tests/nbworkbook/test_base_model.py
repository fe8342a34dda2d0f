"""The base model: better than an n-gram, found again, made once by two at the same time."""

import contextlib
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import ngram
import pytest
import torch
from bit_flips import flips

from nblib import files, paths, runtime, text
from nbworkbook import base_model, input_hash


@pytest.fixture(scope="module")
def stored() -> base_model.Base:
    return base_model.load()


@pytest.mark.slow
@pytest.mark.base
def test_it_beats_a_byte_ngram(stored):
    """It needs fewer bits per byte than a Witten-Bell model of order 3."""
    facts = stored.facts
    train, held_out = text.documents("prose"), text.documents("prose", "held_out")
    orders = {n: ngram.bits_per_byte(train, held_out, n) for n in (3, 5)}
    print(
        f"base: {facts['held_out_bits_per_byte']:.3f} bits per byte in {facts['seconds']:.0f} s; n-grams {orders}"
    )
    assert facts["held_out_bits_per_byte"] < orders[3]
    assert orders[5] < orders[3] < 4  # the baseline itself is sane


def test_the_ngram_is_a_distribution():
    """Summed over every byte, the smoothed probabilities after a context are one."""
    probabilities = [
        2 ** -(ngram.bits_per_byte(["abracadabra"], ["abr" + chr(c)], 2) * 4) for c in range(128)
    ]
    prefix = 2 ** -(ngram.bits_per_byte(["abracadabra"], ["abr"], 2) * 3)
    unseen = 2 ** -(ngram.bits_per_byte(["abracadabra"], ["abr\x01"], 2) * 4)
    # the upper 128 bytes are unseen ones
    assert sum(probabilities) + 128 * unseen == pytest.approx(prefix)


@pytest.mark.base
def test_it_is_a_plain_transformers_folder(stored):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    again = AutoModelForCausalLM.from_pretrained(stored.folder)
    tokenizer = AutoTokenizer.from_pretrained(stored.folder)
    ids = torch.tensor([tokenizer("Return the number of")["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(ids).logits, stored.model.eval()(ids).logits)


def test_its_name_depends_on_all_that_made_it(monkeypatch):
    machine = runtime.pick("cpu", "fp32")
    names = {
        base_model.key("default", machine),
        base_model.key("full", machine),
        base_model.key("default", runtime.pick("cpu", "bf16")),
    }
    monkeypatch.setitem(
        base_model.RECIPES, "default", base_model.RECIPES["default"] | {"muon_lr": 0.03}
    )
    names.add(base_model.key("default", machine))
    monkeypatch.setattr(text, "documents", lambda source: ["other text"])
    names.add(base_model.key("default", machine))
    monkeypatch.setattr(
        input_hash, "version", {"torch": torch.__version__, "transformers": "6.0"}.get
    )
    names.add(base_model.key("default", machine))
    assert len(names) == 6


SMALL = dict(
    steps=2, rows=2, length=32, vocab=512, hidden=32, layers=1, muon_lr=0.02, adamw_lr=3e-3
)


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """A store of its own, with the corpus that was read already, and a recipe of two steps."""
    store, text_of_all = tmp_path / "base", paths.store() / "text"
    if text_of_all.exists():
        shutil.copytree(text_of_all, store / "text")
    monkeypatch.setenv("NBLIB_BASE", str(store))
    monkeypatch.setitem(base_model.RECIPES, "default", SMALL)
    return store


def _make(store: str, queue) -> None:
    os.environ["NBLIB_BASE"] = store
    torch.set_num_threads(1)
    base_model.RECIPES["default"] = SMALL
    started = time.time()
    base_model.load(machine=runtime.pick("cpu", "fp32"), on_step=lambda r: time.sleep(0.5))
    queue.put((started, time.time()))


@pytest.mark.slow
def test_two_that_start_together_make_it_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    both = [context.Process(target=_make, args=(str(tmp_path), queue)) for _ in range(2)]
    [p.start() for p in both]
    [p.join(120) for p in both]
    assert [p.exitcode for p in both] == [0, 0]
    made = [d for d in tmp_path.iterdir() if (d / "base.json").exists()]
    assert len(made) == 1 and not list(tmp_path.glob(".*partial"))
    assert json.loads((made[0] / "base.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_making_it_leaves_the_callers_generator_alone(small):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    base_model.load(machine=runtime.pick("cpu", "fp32"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
@pytest.mark.base
def test_a_damaged_one_is_set_aside_and_made_again(small, capsys):
    """Every file of the folder in turn, 100 flipped bits each; what a power cut and a foreign hand
    leave behind.
    """
    machine = runtime.pick("cpu", "fp32")
    first = base_model.load(machine=machine)
    weights = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
    for file in sorted(first.folder.iterdir()):
        whole = file.read_bytes()
        for hurt in flips(file):
            with contextlib.suppress(files.Unreadable):
                files.verify(first.folder)
                assert file.name == files.MANIFEST and json.loads(hurt) == json.loads(whole)
    damages = {
        "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
        "empty": lambda path: path.write_bytes(b""),
        "gone": lambda path: path.unlink(),
    }
    for (how, damage), name in zip(
        damages.items(), ("model.safetensors", "base.json", "manifest.json", "tokenizer.json")
    ):
        damage(first.folder / name)
        capsys.readouterr()
        again = base_model.load(machine=machine)
        assert "is damaged" in (said := capsys.readouterr().out) and "is set aside as" in said, how
        assert again.facts["content"] == first.facts["content"]
        assert all(
            torch.equal(weights[name], tensor) for name, tensor in again.model.state_dict().items()
        )
    assert len(list(small.glob("damaged-*"))) == len(damages)


@pytest.mark.slow
@pytest.mark.base
def test_a_run_notes_what_it_rests_on_and_what_the_dead_left_goes(small, tmp_path, monkeypatch):
    monkeypatch.setenv("NBLIB_RUN_DIR", str(tmp_path / "run"))
    (small / ".abc.999999999.partial").mkdir(parents=True)
    stored = base_model.load(machine=runtime.pick("cpu", "fp32"))
    note = files.read_json(tmp_path / "run" / "base.json")
    assert note == {"base": stored.folder.name, "content": stored.facts["content"]}
    assert not list(small.glob("*.partial"))


@pytest.mark.slow
@pytest.mark.base
def test_the_command_makes_it_tells_the_steps_and_ends_at_once_when_it_is_there(
    small, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["base", "default", "cpu", "fp32"])
    assert base_model.main() == 0 and "base model: step 2 of 2, loss " in capsys.readouterr().out
    assert base_model.main() == 0 and capsys.readouterr().out == ""
    assert base_model.load(machine=runtime.pick("cpu", "fp32")).facts["steps"] == 2


@pytest.mark.parametrize(
    "arguments, said", [(["big"], "invalid choice: 'big'"), (["full", "tpu"], "device")]
)
def test_the_command_refuses_in_a_sentence(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr("sys.argv", ["base", *arguments])
    with pytest.raises(SystemExit) as ended:
        base_model.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.base
def test_an_unknown_recipe_lists_the_known():
    with pytest.raises(ValueError, match="recipe = 'big': allowed are default, full"):
        base_model.load("big")
