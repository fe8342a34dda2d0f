"""The examples run as somebody runs them: in an empty folder, on their own text or the user's, and
print figures.
"""

import ast
import re
import subprocess
import sys

import pytest

from nblib import models, paths, text

FOLDER = paths.code() / "examples"
NAMES = (
    "ard_lora_4bit",
    "distill_from_cache",
    "lrc_and_export",
    "moe_with_muon",
    "train_own_model",
    "two_processes",
)
MAY_IMPORT = {"nblib", "torch", "transformers", "peft"} | set(sys.stdlib_module_names)


def run(folder, name: str, *arguments, launcher: tuple = ()) -> str:
    """Run an example in `folder` and return what it printed."""
    command = [sys.executable, *launcher, FOLDER / f"{name}.py", *arguments]
    done = subprocess.run(
        list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"\d+\.\d{3,}", printed)]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A text of one's own, and two models of different widths with one tokenizer."""
    folder = tmp_path_factory.mktemp("own")
    documents = text.documents("prose", "train")[:600]
    (folder / "notes.txt").write_text("\n\n".join(documents), encoding="utf-8")
    tokenizer = text.train_tokenizer(documents, vocab_size=400)
    for name, family, hidden in (("large", "llama", 64), ("small", "qwen3", 32)):
        shape = dict(hidden=hidden, layers=1, heads=2, length=128)
        models.tiny(len(tokenizer), family=family, **shape).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_an_example_imports_the_library_alone_and_is_short(name):
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported <= MAY_IMPORT
    assert len([line for line in source.splitlines() if line.strip()]) <= 60


def test_every_example_is_on_the_page_and_in_the_readme():
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == list(NAMES)
    page = (paths.code() / "docs/examples.md").read_text(encoding="utf-8")
    readme = (paths.code() / "nblib/README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"literalinclude}} ../examples/{name}.py" in page and f"examples/{name}.py" in readme


@pytest.mark.slow
def test_the_first_lines_of_the_readme_train(capsys):
    readme = (paths.code() / "nblib/README.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```", readme, re.M | re.S)[1]
    exec(compile(block, "nblib/README.md", "exec"), {})
    *steps, end = capsys.readouterr().out.splitlines()
    first, last = (float(line.split()[1]) for line in (steps[0], steps[-1]))
    assert len(steps) == 20 and last < first and "'loss'" in end


@pytest.mark.slow
@pytest.mark.kernel
def test_an_own_model_learns_and_goes_on_from_its_checkpoint(own, tmp_path):
    options = ("--text", own / "notes.txt", "--out", "mine")
    run(tmp_path, "train_own_model", *options, "--steps", 40)
    before, after = losses(run(tmp_path, "train_own_model", *options, "--steps", 60))
    assert after < before - 0.5
    assert (tmp_path / "mine" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.kernel
def test_lrc_of_an_own_llama_is_what_stock_tools_read(own, tmp_path):
    printed = run(
        tmp_path,
        "lrc_and_export",
        "--model",
        own / "large",
        "--text",
        own / "notes.txt",
        "--out",
        "out",
    )
    _, _, ours, stock = losses(printed)
    assert ours == pytest.approx(stock, abs=0.005)
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()
    assert re.search(r"^(no )?GGUF: ", printed, re.M)


@pytest.mark.slow
@pytest.mark.kernel
def test_the_small_model_of_lrc_loses_by_rounding_and_gets_it_back(tmp_path):
    whole, rounded, ours, stock = losses(run(tmp_path, "lrc_and_export"))
    assert whole < rounded - 0.1 and ours < (whole + rounded) / 2
    assert ours == pytest.approx(stock, abs=0.005)


@pytest.mark.slow
@pytest.mark.kernel
def test_ard_in_four_bits_learns_and_prunes(tmp_path):
    printed = run(tmp_path, "ard_lora_4bit")
    before, trained, pruned = losses(printed)
    assert trained < before - 0.1 and pruned < before
    left = re.findall(r"_proj (\d+)", printed)
    assert sum(map(int, left)) == 16 and len(left) == 4
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


@pytest.mark.slow
@pytest.mark.kernel
def test_a_student_of_another_width_is_distilled(own, tmp_path):
    both = ("--teacher", own / "large", "--student", own / "small", "--text", own / "notes.txt")
    printed = run(tmp_path, "distill_from_cache", *both)
    assert len(re.findall(r"\d\.\d{3}\b", printed)) == 3
    assert list((tmp_path / "student" / "cache").glob("*.safetensors"))
    assert models.load(str(tmp_path / "student")).config.hidden_size == 32


@pytest.mark.slow
@pytest.mark.kernel
def test_a_mixture_learns_and_no_expert_is_dead(tmp_path):
    printed = run(tmp_path, "moe_with_muon", "--steps", 40)
    before, after = losses(printed)
    assert after < before - 1 and printed.count(" 0 without a token") == 2


@pytest.mark.slow
@pytest.mark.kernel
def test_two_processes_end_with_the_loss_of_one(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    alone = run(tmp_path, "two_processes", "--steps", 8)
    both = run(tmp_path, "two_processes", "--steps", 8, launcher=launcher)
    assert both.startswith("2 processes")
    assert losses(both) == pytest.approx(losses(alone), abs=1e-4)
