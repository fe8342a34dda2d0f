"""Bad input of any kind: one sentence each, exit code 2, no traceback, nothing written and nothing lost."""

import errno
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import small_notebooks
from small_notebooks import nblib, write

from nblib import files
from nblib.run import runs

TEN = """rank: int = 2  # rank [1 .. 8]
corpus: str = "prose"  # text to adapt to [a corpus]
model: str = ""  # nothing for the base model [a model]"""


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    folder = small_notebooks.move_workbook(tmp_path, monkeypatch)
    write("00_setup", "1")
    write("10_lrc", "1", parameters=TEN)
    (folder / "parameters" / "00_setup.gpu.yaml").write_text("steps: 9\n")
    (folder / "broken.yaml").write_text("steps: [\n")
    (folder / "wrong.yaml").write_text("stepz: 3\nlr: 2\n")
    return folder


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("run 00 -p stepps=3", "did you mean 'steps'"),
        ("run 00 -p steps=3.5", "'steps' is '3.5', but it must be of type int"),
        ("run 00 -p steps=1000", "-p steps=1000: 'steps' is 1000, allowed: 1 .. 100"),
        ("run 00 -p steps", "expected name=value"),
        ("run 00 -f broken.yaml", "broken.yaml, line 2"),
        ("run 00 -f none.yaml", "Cannot read the parameter file none.yaml"),
        ("run 00 -f wrong.yaml", "unknown parameter 'stepz'; did you mean 'steps'?|'lr' is 2, allowed: 0 .. 1"),
        ("run 00_situp", "Unknown notebook '00_situp'; did you mean '00_setup'?"),
        ("run 99", "Unknown notebook '99'"),
        ("run /etc/00_setup.ipynb", "is not in"),
        ("run 00 10 --profile gpu", "10_lrc: unknown profile 'gpu'"),
        ("run --all --profile gqu", "unknown profile 'gqu'; did you mean 'gpu'?"),
        ("run 00 10 -p steps=3", "unknown parameter 'steps'"),
        (
            "run 10 -p corpus=poetry",
            "'corpus' is 'poetry', allowed is a corpus: it is neither prose, code, hf:<dataset>",
        ),
        (
            "run 10 -p corpus=hf:some/set?subset=a",
            "allowed is a corpus: it cannot be read: corpus 'hf:some/set?subset=a' has no option 'subset'",
        ),
        ("run 10 -p model=/no/such", "'model' is '/no/such', allowed is a model: it is neither a folder with a model"),
        ("run 10 -p model=nobody/nothing", "it is not in the local cache, and the hub is switched off"),
        ("run", "either names of notebooks or --all"),
        ("run 00 --all", "either names of notebooks or --all"),
        ("run 00 --jobs 0", "'0' is not a whole number from 1 to 999,999,999"),
        ("run 00 --jobz 2", "unrecognized arguments: --jobz 2"),
        ("rum", "invalid choice: 'rum'"),
        ("refresh 99", "Unknown notebook '99'"),
        ("estimate --model ./none", "model './none': no such folder"),
        ("estimate --model nobody/nothing", "model 'nobody/nothing': no folder with a model's config"),
        ("estimate --rows 0", "'0' is not a whole number from 1"),
        ("estimate --length 1", "length = 1: must be at least 2"),
        ("estimate --optimizer adam", "optimizer = 'adam': allowed are adamw, momentum, sgd"),
        ("estimate --precision int8", "precision = 'int8': allowed are fp32, bf16"),
    ],
)
def test_bad_input(workbook, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(workbook)
    before = small_notebooks.files(workbook)
    code, err = _main(arguments.split(), capsys)
    assert code == 2 and "Traceback" not in err
    expected = said.split("|")
    assert len(err.splitlines()) == len(expected)
    for line, part in zip(err.splitlines(), expected):
        assert line.startswith("nblib: ") and part in line
    assert small_notebooks.files(workbook) == before and not (workbook / "outputs").exists()


@pytest.mark.parametrize("outputs", ["a_file", "a_file/below", "/proc/nblib"])
@pytest.mark.parametrize("command", ["run 00", "report", "refresh"])
def test_no_place_to_write(workbook, monkeypatch, capsys, outputs, command):
    (workbook / "a_file").write_text("earlier results")
    monkeypatch.setenv("NBLIB_OUTPUTS", str(workbook / outputs))
    before = small_notebooks.files(workbook)
    code, err = _main(command.split(), capsys)
    assert code == 2 and err.startswith("nblib: Cannot ") and len(err.splitlines()) == 1 and outputs in err
    assert small_notebooks.files(workbook) == before


def test_list_and_an_empty_report(workbook, capsys):
    assert _main(["list"], capsys, out=True) == (
        0,
        "00_setup  About 00_setup & <more>\n    profiles: gpu;  last run: never run\n"
        "10_lrc  About 10_lrc & <more>\n    profiles: none;  last run: never run\n",
    )
    code, out = _main(["report"], capsys, out=True)
    assert code == 0 and "No runs yet" in (workbook / "outputs" / "index.html").read_text()
    assert out.strip() == str(workbook / "outputs" / "index.html")


@pytest.mark.parametrize(
    "command, package, said",
    [
        ("list --pitfalls", "lessons", "lessons is not installed; run `make env` (or: pip install -e .)"),
        ("doctor a.py", "train_doctor", "train_doctor is not installed; run `make env` (or: pip install ./doctor)"),
    ],
)
def test_a_missing_package_says_how_to_install_it(monkeypatch, capsys, command, package, said):
    _hide(monkeypatch, package)
    assert _main(command.split(), capsys) == (2, f"nblib: {said}\n")


def test_a_package_that_lacks_something_itself_is_not_called_missing(monkeypatch, capsys):
    _hide(monkeypatch, "lessons", lacks="a_library")
    code, err = _main(["list", "--pitfalls"], capsys)
    assert code == 70 and err.startswith("nblib: internal error (ModuleNotFoundError: No module named 'a_library')")


def _hide(monkeypatch, package: str, *, lacks: str | None = None) -> None:
    """As if the package were not installed, or as if what it lacks were not."""

    class Nowhere:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {lacks or package!r}", name=lacks or package)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Nowhere, *sys.meta_path])


@pytest.mark.kernel
def test_a_disk_that_is_full_after_the_runs(workbook, monkeypatch, capsys):
    """Then the code is not the one of bad input: the run is done and stays so."""
    flush = files.flush

    def full(path):
        if "index.html" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(path)

    monkeypatch.setattr(files, "flush", full)
    code, err = _main(["run", "00"], capsys)
    assert code == 74 and err.startswith("nblib: Cannot write ") and "No space left on device" in err
    (record,) = (workbook / "outputs").glob("00_setup/*/run.json")
    assert runs.is_done(record.parent)
    assert _main(["report"], capsys)[0] == 2


@pytest.mark.parametrize("command", ["list", "run 00 --profile gpu"])
def test_an_error_of_our_own_is_one_sentence_and_a_file(workbook, monkeypatch, capsys, command):
    def names():
        raise KeyError("nobody\nforesaw this")

    monkeypatch.setattr("nblib.run.jobs.names", names)
    code, err = _main(command.split(), capsys)
    file = Path(err.split()[-1])
    assert (
        code == 70
        and err == f"nblib: internal error (KeyError: 'nobody\\nforesaw this'); please report it with {file}\n"
    )
    assert "in names" in file.read_text() and file.parent == Path(tempfile.gettempdir())
    file.unlink()
    (workbook / "outputs").mkdir()
    code, err = _main(command.split(), capsys)
    assert code == 70 and Path(err.split()[-1]).parent == workbook / "outputs"


def test_help_is_light():
    code = "import sys, nblib.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "numpy", "importlib.metadata", "email", "tempfile", "nbformat", "huggingface_hub", "http"}
    assert "nblib.run.parameters" in loaded and not heavy & set(loaded)


@pytest.mark.kernel
def test_list_is_light_and_the_whole_command_works(workbook):
    code = "import sys, nblib.cli; nblib.cli.main(['list']); print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not [name for name in ("torch", "papermill", "nbformat", "nbclient") if f"'{name}'" in loaded]
    code, out, err = nblib("run", "--all", "--jobs", "2")
    assert (code, err) == (0, "") and out.rstrip().endswith(str(workbook / "outputs" / "index.html"))
    assert "00_setup  done" in out and "10_lrc    done" in out
    assert (workbook / "outputs" / "index.html").exists()


def _main(arguments, capsys, out=False):
    from nblib import cli

    try:
        code = cli.main(arguments)
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    return code, captured.out if out else captured.err
