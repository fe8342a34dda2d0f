"""Bad input of any kind: one sentence each, exit code 2, no traceback, nothing written and nothing
lost.
"""

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import small_notebooks
from small_notebooks import nblib, write

from nblib import files
from nbworkbook import cli, runs

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
        (
            "run 00 -f wrong.yaml",
            "unknown parameter 'stepz'; did you mean 'steps'?|'lr' is 2, allowed: 0 .. 1",
        ),
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
        (
            "run 10 -p model=/no/such",
            "'model' is '/no/such', allowed is a model: it is neither a folder with a model",
        ),
        (
            "run 10 -p model=nobody/nothing",
            "it is not in the local cache, and the hub is switched off",
        ),
        ("run", "either names of notebooks or --all"),
        ("run 00 --all", "either names of notebooks or --all"),
        ("run 00 --jobs 0", "'0' is not a whole number from 1 to 999,999,999"),
        ("run 00 --jobz 2", "unrecognized arguments: --jobz 2; did you mean --jobs?"),
        ("run 00 --no-such-option", "`nblib run --help` shows what there is"),
        ("--verzion", "did you mean --version?"),
        ("compare 00 10", "there is no command 'compare' any more; use: nblib report RUN RUN"),
        ("sweep", "the following arguments are required: NOTEBOOK"),
        ("sweep 00 --prune", "--prune and --seed are of a search; add --trials N."),
        ("sweep 00 --seed 2", "--prune and --seed are of a search; add --trials N."),
        ("sweep 00 --trials 2 --list", "--list and --show are of a grid; leave out --trials."),
        ("sweep 00 --trials 2 --show a", "--list and --show are of a grid; leave out --trials."),
        ("sweep 00 --trials 0", "'0' is not a whole number from 1"),
        ("sweep --cancel 10", "Unknown job '10'; known: none."),
        ("run --cancel 10", "Unknown job '10'; known: none."),
        ("schema 99", "Unknown notebook '99'"),
        ("completion fish", "invalid choice: 'fish'"),
        ("run 00 --dry-run -p stepps=3", "did you mean 'steps'"),
        ("run 00 --quiet --verbose", "not allowed with argument"),
        ("list --runs 99", "Unknown notebook '99'"),
        ("list --runs --jobs", "not allowed with argument"),
        ("report 00 10", "Unknown run '00'; there are no runs yet"),
        ("report --all", "--all is of a comparison; name two runs or more."),
        ("export 00 --to tensorboard", "Unknown run '00'; there are no runs yet"),
        ("estimate --model ./none", "model './none': no such folder"),
        (
            "estimate --model nobody/nothing",
            "model 'nobody/nothing': no folder with a model's config",
        ),
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
@pytest.mark.parametrize("command", ["run 00", "report"])
def test_no_place_to_write(workbook, monkeypatch, capsys, outputs, command):
    (workbook / "a_file").write_text("earlier results")
    monkeypatch.setenv("NBLIB_OUTPUTS", str(workbook / outputs))
    before = small_notebooks.files(workbook)
    code, err = _main(command.split(), capsys)
    assert (
        code == 2
        and err.startswith("nblib: Cannot ")
        and len(err.splitlines()) == 1
        and outputs in err
    )
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


def test_a_missing_doctor_says_how_to_install_it(monkeypatch, capsys):
    _hide(monkeypatch, "loopdoctor")
    sentence = "nblib: loopdoctor is not installed; run `make env` (or: pip install loopdoctor)\n"
    assert _main(["doctor", "a.py"], capsys) == (2, sentence)


def _hide(monkeypatch, package: str, *, lacks: str | None = None) -> None:
    """As if the package were not installed, or as if what it lacks were not."""

    class Nowhere:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(
                    f"No module named {lacks or package!r}", name=lacks or package
                )

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
    assert (
        code == 74 and err.startswith("nblib: Cannot write ") and "No space left on device" in err
    )
    (record,) = (workbook / "outputs").glob("00_setup/*/run.json")
    assert runs.is_done(record.parent)
    assert _main(["report"], capsys)[0] == 2


@pytest.mark.parametrize("command", ["list", "run 00 --profile gpu"])
def test_an_error_of_our_own_is_one_sentence_and_a_file(workbook, monkeypatch, capsys, command):
    def names():
        raise KeyError("nobody\nforesaw this")

    monkeypatch.setattr("nbworkbook.jobs.names", names)
    code, err = _main(command.split(), capsys)
    file = Path(err.split()[-1])
    assert (
        code == 70
        and err
        == f"nblib: internal error (KeyError: 'nobody\\nforesaw this'); please report it with {file}\n"
    )
    assert "in names" in file.read_text() and file.parent == Path(tempfile.gettempdir())
    file.unlink()
    (workbook / "outputs").mkdir()
    code, err = _main(command.split(), capsys)
    assert code == 70 and Path(err.split()[-1]).parent == workbook / "outputs"


def test_help_is_light():
    code = "import sys, nbworkbook.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {
        "torch",
        "numpy",
        "importlib.metadata",
        "email",
        "tempfile",
        "nbformat",
        "huggingface_hub",
        "http",
    }
    heavy |= {"shtab", "matplotlib", "psutil"}
    assert "nbworkbook.parameters" in loaded and not heavy & set(loaded)


@pytest.mark.kernel
def test_list_is_light_and_the_whole_command_works(workbook):
    code = "import sys, nbworkbook.cli; nbworkbook.cli.main(['list']); print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert not [
        name for name in ("torch", "papermill", "nbformat", "nbclient") if f"'{name}'" in loaded
    ]
    code, out, err = nblib("run", "--all", "--jobs", "2")
    assert (code, err) == (0, "") and out.rstrip().endswith(
        str(workbook / "outputs" / "index.html")
    )
    made = {
        path.parent.parent.name: path.parent for path in (workbook / "outputs").glob("*/*/run.json")
    }
    assert sorted(made) == ["00_setup", "10_lrc"] and all(map(runs.is_done, made.values()))
    assert (workbook / "outputs" / "index.html").exists()


@pytest.fixture
def two_runs(workbook, monkeypatch):
    """Two run folders of 00_setup, as records alone."""
    monkeypatch.chdir(workbook)
    places = [
        files.make_folder(workbook / "outputs" / "00_setup" / name)
        for name in ("20260101-1-aaa", "20260102-1-bbb")
    ]
    for number, place in enumerate(places):
        runs.note(place, {"status": "done", "seconds": 5.0})
        files.merge(place / "result.json", {"loss": number})
        files.write(place / "parameters.yaml", f"steps: {number}\n")
    return places


def test_a_report_of_two_runs_prints_what_differs_and_writes_the_page(workbook, two_runs, capsys):
    code, out = _main(["report", "00", "00~1"], capsys, out=True)
    assert (
        code == 0
        and "A  00_setup/20260102-1-bbb" in out
        and out.endswith(f"report: {workbook}/outputs/index.html\n")
    )
    assert ["loss", "1", "0", "-1"] in [
        line.split() for line in out.splitlines()
    ] and "steps" in out
    assert (workbook / "outputs" / "index.html").exists()
    sentence = "nblib: report compares 2 to 26 different runs, not 1.\n"
    assert _main(["report", "00", "00_setup"], capsys) == (2, sentence)
    assert _main(["report", "00"], capsys) == (2, sentence)
    assert _main(["report", "00", "00_stup"], capsys)[0] == 2


def test_the_list_of_runs(two_runs, capsys):
    code, out = _main(["list", "--runs", "00"], capsys, out=True)
    assert code == 0
    assert out.splitlines()[2].split() == "00_setup/20260101-1-aaa done 5.0 s loss 0".split()
    assert len(_main(["list", "--runs", "10"], capsys, out=True)[1].splitlines()) == 1
    shutil.rmtree(two_runs[0])
    assert len(_main(["list", "--runs"], capsys, out=True)[1].splitlines()) == 2


def test_the_list_of_jobs(workbook, capsys):
    code, out = _main(["list", "--jobs"], capsys, out=True)
    assert (code, out) == (0, "No jobs were given to an engine in the last day.\n")


@pytest.mark.parametrize("command", ["list", "run --all", "schema", "report"])
def test_where_there_are_no_notebooks_it_says_how_to_get_some(workbook, capsys, command):
    for path in (workbook / "notebooks").iterdir():
        path.unlink()
    code, err = _main(command.split(), capsys)
    assert code == 2 and "`nblib init DIR` makes a workbook" in err and len(err.splitlines()) == 1
    assert not (workbook / "outputs").exists()


@pytest.mark.parametrize("to", ["tensorboard", "trackio"])
def test_export_without_its_package_is_one_sentence(two_runs, monkeypatch, capsys, to):
    _hide(monkeypatch, to)
    said = f"nblib: {to} is not installed; pip install {to} (or: pip install -e '.[track]')\n"
    assert _main(["export", "00", "--to", to], capsys) == (2, said)


def test_a_dry_run_says_what_would_happen_and_writes_nothing(workbook, monkeypatch, capsys):
    monkeypatch.chdir(workbook)
    code, out = _main(["run", "--all", "--dry-run", "--profile", "gpu"], capsys, out=True)
    assert code == 0 and not (workbook / "outputs").exists()
    assert "00_setup runs\n    profile gpu, steps=9\n10_lrc runs\n    defaults\n" in out
    assert out.endswith("nothing was started; 0 of 2 notebooks, 0:00, time left unknown\n")


@pytest.mark.slow
@pytest.mark.kernel
def test_a_dry_run_of_runs_that_are_done_stopped_or_out_of_date(workbook, monkeypatch, capsys):
    monkeypatch.chdir(workbook)
    assert _main(["run", "--all"], capsys)[0] == 0
    setup, lrc = (next((workbook / "outputs" / name).iterdir()) for name in ("00_setup", "10_lrc"))
    runs.note(setup, {"seconds": 90.0})
    runs.note(lrc, {"status": "stopped"})
    before = small_notebooks.files(workbook)
    out = _main(["run", "--all", "--dry-run"], capsys, out=True)[1]
    assert f"00_setup is skipped, done in outputs/00_setup/{setup.name}\n" in out
    assert (
        f"10_lrc (stopped) continues in outputs/10_lrc/{lrc.name}\n" in out
        and "time left unknown" in out
    )
    runs.note(lrc, {"status": "done"})
    assert out != (out := _main(["run", "--all", "--dry-run", "--force"], capsys, out=True)[1])
    assert out.count("runs again: forced") == 2 and "about 1:3" in out
    write("00_setup", "2")
    before |= {
        k: v
        for k, v in small_notebooks.files(workbook).items()
        if k.endswith(("run.json", "00_setup.ipynb"))
    }
    out = _main(["run", "--all", "--dry-run", "--jobs", "1"], capsys, out=True)[1]
    assert "00_setup runs again: notebook 00_setup\n" in out and "about 1:30 left" in out
    assert small_notebooks.files(workbook) == before, "something was written"


PIPED = [
    "list",
    "list --runs",
    "run --all --dry-run",
    "report aaa bbb",
    "report",
    "sweep 00 --list",
    "completion bash",
]


@pytest.mark.kernel
@pytest.mark.parametrize("command", PIPED)
def test_a_pipe_that_nobody_reads_any_more_ends_quietly(workbook, two_runs, command):
    """`| head` that has left, and `| head -n 1` that leaves while we print."""
    (workbook / "parameters" / "00_setup.sweep.yaml").write_text("steps: [1, 2]\n")
    reader, pipe = os.pipe()
    os.close(reader)
    whole = [sys.executable, "-m", "nbworkbook.cli", *command.split()]
    ended = subprocess.run(whole, stdout=pipe, stderr=subprocess.PIPE)
    os.close(pipe)
    assert (ended.returncode, ended.stderr) == (141, b"")
    piped = f"{shlex.join(whole)} | head -n 1; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["/bin/bash", "-c", piped], capture_output=True, text=True)
    assert ended.stderr == "" and ended.stdout.splitlines()[-1] in ("0", "141")


def _main(arguments, capsys, out=False):
    from nbworkbook import cli

    try:
        code = cli.main(arguments)
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    return code, captured.out if out else captured.err


def test_nblib_alone_and_its_version(capsys):
    code, out = _main([], capsys, out=True)
    assert code == 0 and all(f"\n    {name} " in out for name in ("list", "run", "report"))
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out.startswith("nblib ")


TYPOS = [("lsit", "list"), ("rum", "run"), ("reprot", "report"), ("sweeep", "sweep")]


@pytest.mark.parametrize("typed, meant", TYPOS)
def test_a_misspelt_command_is_told_the_nearest(typed, meant, capsys):
    code, err = _main([typed], capsys)
    assert code == 2 and f"did you mean {meant!r}?" in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", [name for name in cli._commands_of(cli.command_line())])
def test_every_command_has_a_sentence_examples_that_parse_and_texts_for_its_options(name, capsys):
    if name == "doctor":
        pytest.skip("it has a parser of its own")
    parser = cli._commands_of(cli.command_line())[name]
    assert parser.description.endswith(".")
    assert all(action.help for action in parser._actions), "an option without a text"

    examples = parser.epilog.partition("examples:\n")[2].splitlines()
    assert examples
    for line in examples:
        words = shlex.split(re.sub(r"^eval \"\$\((.*)\)\"", r"\1", line.strip()), comments=True)
        words = words[: words.index(">")] if ">" in words else words
        assert words[0] == "nblib" and words[1] == name
        assert cli.command_line().parse_args(words[1:]).command


def test_a_shell_takes_the_completion_and_completes_by_it(capsys):
    code, script = _main(["completion", "bash"], capsys, out=True)
    assert code == 0
    asked = "COMP_WORDS=(nblib {}); COMP_CWORD={}; _shtab_nblib; echo ${{COMPREPLY[@]}}"
    for words, place, expected in (("re", 1, "report"), ("run --prof", 2, "--profile")):
        typed = f"{script}\n{asked.format(words, place)}"
        told = subprocess.run(["bash", "--norc", "-c", typed], capture_output=True, text=True)
        assert told.stdout.split() == [expected], told.stderr
    code, script = _main(["completion", "zsh"], capsys, out=True)
    assert code == 0 and script.startswith("#compdef nblib")


def test_completion_without_its_package_is_one_sentence(monkeypatch, capsys):
    _hide(monkeypatch, "shtab")
    said = "nblib: shtab is not installed; pip install shtab\n"
    assert _main(["completion", "bash"], capsys) == (2, said)
