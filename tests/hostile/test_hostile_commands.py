"""Command lines and the files that they name: whatever is wrong is told in one sentence, and
nothing is started.
"""

import pytest
import small_notebooks
from attack import attack, done, plant, refused

from nbworkbook import parameters

pytestmark = pytest.mark.slow  # not one of them, all together


LONG = "x" * 5000
MORE = """title: str = "a"  # words
names: list[str] = ["a"]  # more words
corpus: str = "prose"  # text [a corpus]
token: str = ""  # access to the hub [secret]"""


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    folder = small_notebooks.steady_workbook(tmp_path, monkeypatch)
    small_notebooks.write("00_setup", "1")
    small_notebooks.write("10_lrc", "1", parameters=MORE)
    monkeypatch.chdir(folder)
    return folder


def _run(text: str, notebook: str = "00") -> list[str]:
    return ["run", notebook, "-p", text]


COMMANDS = [
    ([""], "there is no command ''"),
    (["\udcff"], "there is no command"),
    (["run", ""], "Unknown notebook ''"),
    (["run", " "], "Unknown notebook"),
    (["run", "."], "Unknown notebook"),
    (["run", "/"], "is not in"),
    (["run", "../00_setup"], "is not in"),
    (["run", "/etc/passwd"], "is not in"),
    (["run", "00_setup\n"], "Unknown notebook"),
    (["run", "\x1b[2J"], "Unknown notebook '\\x1b[2"),
    (["run", "\udcff"], "Unknown notebook '\\udcff'"),
    (["run", LONG], "Unknown notebook 'xxx"),
    (["run", "*"], "Unknown notebook '*'"),
    (["run", "00", "--profile", "../../etc/passwd"], "unknown profile"),
    (["run", "00", "--profile", ""], "unknown profile ''"),
    (["run", "00", "--profile", LONG], "unknown profile 'xxx"),
    (["run", "00", "--profile", "\udcff"], "unknown profile '\\udcff'"),
    (["run", "00", "--jobs", "-1"], "'-1' is not a whole number"),
    (["run", "00", "--jobs", "9" * 5000], "is not a whole number from 1 to 999,999,999"),
    (["run", "00", "--jobs", "1e3"], "'1e3' is not a whole number"),
    (["run", "00", "--jobs", "²"], "is not a whole number"),
    (["run", "00", "--timeout", "0"], "'0' is not a whole number"),
    (["run", "00", "--timeout", "9" * 18], "from 1 to 999,999,999"),
    (["run", "00", "--timeout", "nan"], "'nan' is not a whole number"),
    (["run", "00", "--no-such-option", LONG], "unrecognized arguments"),
    (["run", "00", "--al=1"], "ignored explicit argument"),
    (_run("="), "unknown parameter ''"),
    (_run(""), "expected name=value"),
    (_run("steps=" + "9" * 5000), "'steps' is '999"),
    (_run("steps=" + "9" * 4000), "must be of type int (of 64 bits)"),
    (_run("steps=0x10"), "must be of type int"),
    (_run("steps=\udcff"), "'\\udcff', but it must be of type int"),
    (_run("steps="), "'steps' is '', but it must be of type int"),
    (_run("steps=1\nlr=2"), "must be of type int"),
    (_run("lr=nan"), "a finite number"),
    (_run("lr=1e999"), "a finite number"),
    (_run("lr=" + "1" * 5000), "a finite number"),
    (_run("sizes=" + "[" * 20000), "must be of type list[int]"),
    (_run("sizes=" + "1," * 5000 + "x"), "must be of type list[int]"),
    (_run(f"{LONG}=1"), "unknown parameter 'xxx"),
    (_run("ste\x1bps=1"), "unknown parameter"),
    (_run("\udcff=1"), "unknown parameter '\\udcff'"),
    (_run("precision=\udcff"), "must be of type str (UTF-8)"),
    (_run("title=\udcff", "10"), "must be of type str (UTF-8)"),
    (_run('names=["\\ud800"]', "10"), "must be of type list[str]"),
    (_run("corpus=" + LONG, "10"), "'corpus' is 'xxx"),
    (_run("corpus=" + "y/" * 3000, "10"), "allowed is a corpus"),
    (_run("corpus=~nobody-at-all/x", "10"), "allowed is a corpus"),
    (_run("corpus=\x00", "10"), "allowed is a corpus"),
    (_run("corpus=/dev/null/x", "10"), "allowed is a corpus"),
    (_run("corpus=hf:", "10"), "allowed is a corpus"),
    (_run("token=hunter2", "10"), "must be given as @NAME"),
    (_run("token=@NO_SUCH_VARIABLE", "10"), "which is not set"),
    (["run", "00", "-f", LONG], "File name too long"),
    (["run", "00", "-f", ""], "it is no file"),
    (["run", "00", "-f", "\udcff.yaml"], "No such file"),
    (["run", "00", "-f", "/dev/zero"], "it is no file"),
    (["run", "00", "-f", "/dev/stdin/x"], "Cannot read the parameter file"),
    (["run", "00", "-f", "pipe"], "it is no file"),
    (["run", "00", "-f", "a-folder"], "it is no file"),
    (["run", "00", "-f", "circle"], "Too many levels of symbolic links"),
    (["run", "00", "-f", "nowhere"], "No such file"),
    (["run", "00", "-f", "endless"], "it is no file"),
    (["run", "00", "-f", "large.yaml"], "bytes are more than"),
    (["run", "--all", "-p", "steps=3"], "unknown parameter 'steps'"),
    (["sweep", "00"], "has no sweep file"),
    (["sweep", "00", "-f", "/dev/zero"], "it is no file"),
    (["sweep", "00", "-f", "pipe", "--list"], "it is no file"),
    (["sweep", "00", "--show", ","], "is not a list of names"),
    (["sweep", "99"], "Unknown notebook '99'"),
    (["sweep", "00", "10"], "unrecognized arguments: 10"),
    (["sweep", "--cancel", "\udcff"], "Unknown job '\\udcff'"),
    (["sweep", "--cancel", LONG], "Unknown job 'xxx"),
    (["sweep", "--cancel"], "expected at least one argument"),
    (["sweep", "00", "--trials", "9" * 5000], "is not a whole number from 1"),
    (["sweep", "00", "--trials", "1", "-f", "pipe"], "it is no file"),
    (["schema", "/etc/passwd"], "is not in"),
    (["schema", LONG], "Unknown notebook"),
    (["completion", LONG], "invalid choice: 'xxx"),
    (["report", "x", "--" + LONG], "unrecognized arguments: --xxx"),
    (["report", "\udcff", "10"], "Unknown run '\\udcff'"),
    (["report", LONG, LONG], "Unknown run 'xxx"),
    (["report", "/etc/passwd", "a-folder"], "Unknown run"),
    (["report", ".", "/"], "Unknown run"),
    (["report", "../..", "*"], "Unknown run"),
    (["report", "./pipe", "./circle"], "Unknown run"),
    (["export", "10", "--to", "excel"], "invalid choice: 'excel'"),
    (["export", "10"], "required: --to"),
    (["list", "--runs", "99"], "Unknown notebook '99'"),
    (["run", "x", "--dry-run"], "Unknown notebook 'x'"),
    (["list", "--job=1"], "ignored explicit argument"),
    (["doctor", "no-such-file.py"], "no-such-file.py"),
    (["doctor", "a-folder"], "a-folder"),
    (["doctor", "a.py", "--steps", "0"], "'0' is not a whole number"),
    (["estimate", "--rows", "1" + "0" * 18], "is not a whole number from 1"),
    (["estimate", "--rows", "9" * 5000], "is not a whole number from 1"),
    (["estimate", "--rows", "999999999", "--length", "999999999"], "tokens: must be at most"),
    (["estimate", "--length", "5000000"], "tokens: must be at most"),
    (["estimate", "--rank", "999999999", "--lrc", "5"], "--rank and --lrc: choose one"),
    (["estimate", "--lrc", "nan"], "must be above 0"),
    (["estimate", "--lrc", "-1"], "must be above 0"),
    (["estimate", "--lrc", "x"], "invalid float value"),
    (["estimate", "--model", ""], "model ''"),
    (["estimate", "--model", LONG], "model 'xxx"),
    (["estimate", "--model", "/dev/zero"], "model '/dev/zero'"),
    (["estimate", "--model", "\udcff"], "model"),
    (["estimate", "--model", "a-folder"], "no folder with a model's config"),
]


@pytest.mark.parametrize("arguments, words", COMMANDS, ids=lambda each: ascii(each)[:40])
def test_a_hostile_command_line(workbook, capsys, arguments, words):
    for name, what in {
        "pipe": "PIPE",
        "a-folder": "FOLDER",
        "circle": "LINK circle",
        "nowhere": "LINK gone",
    }.items():
        plant(workbook / name, what)
    plant(workbook / "endless", "LINK /dev/zero")
    plant(workbook / "large.yaml", b"steps: 3 # and so on\n" * 20_000)
    before = sorted(workbook.rglob("*"))
    refused(attack(capsys, *arguments), words)
    assert sorted(workbook.rglob("*")) == before, "something was written"


CONFIGS = [
    (b"", "no folder with a model's config"),
    (b"{", "no folder with a model's config"),
    (b"\xff\xfe", "no folder with a model's config"),
    (b"[" * 100_000, "model"),
    ([], "model"),
    ({}, "no folder with a model's config"),
    ({"model_type": "no-such-type"}, "no folder with a model's config"),
    ({"model_type": ["gpt2"]}, "model"),
    ({"model_type": "gpt2", "n_embd": -64}, "hidden_size"),
    ({"model_type": "gpt2", "n_embd": 10**12}, "hidden_size"),
    ({"model_type": "gpt2", "n_embd": "wide"}, "n_embd"),
    ({"model_type": "gpt2", "n_layer": 10**9}, "num_hidden_layers"),
    ({"model_type": "gpt2", "n_layer": 0}, "num_hidden_layers"),
    ({"model_type": "gpt2", "vocab_size": -1}, "vocab_size"),
    ({"model_type": "gpt2", "n_embd": 64, "n_head": 7}, "7"),
    ({"model_type": "gpt2", "n_embd": 64, "n_head": 0}, ""),
    ({"model_type": "llama", "intermediate_size": -5}, ""),
    ({"model_type": "gpt2", "activation_function": "no-such"}, "no-such"),
    ("PIPE", "model"),
    ("LINK /dev/zero", "model"),
]


@pytest.mark.parametrize("config, words", CONFIGS, ids=lambda each: ascii(each)[:40])
def test_a_hostile_config_of_a_model(workbook, capsys, config, words):
    plant(workbook / "model" / "config.json", config)
    refused(attack(capsys, "estimate", "--model", "./model", "--rows", "1", "--length", "8"), words)


YAML = [
    (b"- 1\n", "expected lines of"),
    (b"steps\n", "expected lines of"),
    (b"steps: 3\nsteps: 4\n", "given twice"),
    (b"steps: [\n", "line 2"),
    (b"steps: {a: 1}\n", "must be flat"),
    (b"? [a]\n: 1\n", "must be flat"),
    (b"steps: " + b"[" * 5000, "must be flat"),
    (b"steps: " + b"{a: " * 5000, "must be flat"),
    (b"- " * 5000, "must be flat"),
    (b"steps: " + b"9" * 5000, "more digits than Python reads"),
    (b"steps: -" + b"9" * 5000, "more digits than Python reads"),
    (b"9" * 900 + b": 1", "unknown parameter '999"),
    (b"steps: !!int foo\n", "no tag (!)"),
    (b"steps: !!int 3\n", "no tag (!)"),
    (b"lr: !!float foo\n", "no tag (!)"),
    (b"shuffle: !!bool maybe\n", "no tag (!)"),
    (b"lr: !!timestamp foo\n", "no tag (!)"),
    (b"lr: !!timestamp 2020-99-99\n", "no tag (!)"),
    (b"lr: !!binary x\n", "no tag (!)"),
    (b"lr: !!null x\n", "no tag (!)"),
    (b"sizes: !!set {1, 2}\n", "no tag (!)"),
    (b"sizes: !!omap [1]\n", "no tag (!)"),
    (b"!!map {steps: 3}\n", "no tag (!)"),
    (b"!!str steps: 3\n", "no tag (!)"),
    (b"steps: !x 3\n", "no tag (!)"),
    (b"steps: !\n", "no tag (!)"),
    (b"%TAG ! tag:x,2000:\n---\nsteps: !x 3\n", "no tag (!)"),
    (b"steps: !!python/object/apply:os.system ['true']\n", "no tag (!)"),
    (b"steps: &a 3\n", "anchor (&)"),
    (b"steps: *a\n", "alias (*)"),
    (b"a: &a [1]\nb: &b [*a, *a]\nsizes: [*b, *b]\n", "anchor (&)"),
    (b"&a steps: 3\n", "anchor (&)"),
    (b"<<: {steps: 3}\n", "must be flat"),
    (b"<<: 3\n", "unknown parameter '<<'"),
    (b'precision: "\\ud800"\n', "must be of type str (UTF-8)"),
    (b'precision: "\\x00"\n', "'\\x00', allowed: auto, fp32"),
    (b"steps: \x00\n", "not valid YAML"),
    (b"\x00", "not valid YAML"),
    (b"\xff\xfe", "not UTF-8"),
    ("steps: 3\n".encode("utf-16"), "not UTF-8"),
    ("steps: 3\n".encode("utf-16-be"), "not valid YAML"),
    (b"precision: \xe9\n", "not UTF-8"),
    (b"steps: 3\n\tlr: 1\n", "line 2"),
    (b"steps: 3\n---\nsteps: 4\n", "found another document"),
    (b"%YAML 99.0\n---\nsteps: 3\n", "line 1"),
    (b"steps: 'unclosed\n", "line 2"),
    (b"steps: |\n  3\n", "must be of type int"),
    (b"steps: 3_\n", "must be of type int"),
    (b"steps: 0x10\n", "must be of type int"),
    (b"steps: 1:30\n", "must be of type int"),
    (b"steps: .inf\n", "must be of type int"),
    (b"lr: .nan\n", "must be of type float"),
    (b"lr: 1e999\n", "a finite number"),
    (b"shuffle: yes\n", "true or false"),
    (b"steps: null\n", "must be of type int"),
    (b"steps:\n", "must be of type int"),
    (b"~: 3\n", "unknown parameter '~'"),
    (b"? 3\n", "unknown parameter '3'"),
    (b'"ste\\nps": 3\n', "unknown parameter"),
    (b"steps: 3 # " + b"x" * 300_000, "bytes are more than"),
    (b"x" * 200_000 + b": 1", "mapping values are not allowed here"),
    (b"{" * 100_000, ""),
    (b"\r" * 200_000 + b"steps: x", "must be of type int"),
]


@pytest.mark.parametrize("content, words", YAML, ids=lambda each: ascii(each)[:40])
@pytest.mark.parametrize("command", ["run 00 -f", "sweep 00 --list -f"])
def test_hostile_yaml(workbook, capsys, command, content, words):
    plant(workbook / "a.yaml", content)
    refused(attack(capsys, *command.split(), "a.yaml"), words)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfsteps: 3\n",
        b"steps: 3\r\n",
        b"steps: 3",
        b"--- \nsteps: 3\n...\n",
        b"# a comment\n\nsteps: 3 # another\n",
        b'"steps": 3\n',
        b"{steps: 3}\n",
        b"steps: +3\n",
    ],
)
def test_unusual_and_good_yaml(workbook, content):
    plant(workbook / "a.yaml", content)
    assert parameters.load_yaml(workbook / "a.yaml") == {"steps": 3}


NOTEBOOKS = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"3",
    b"\xff\xfe",
    b"\x00",
    b"[" * 100_000,
    b'{"cells": ' * 100_000,
    b'{"nbformat": ' + b"4" * 5000 + b"}",
    {},
    {"cells": []},
    {"cells": {}, "nbformat": 4},
    {"cells": None, "nbformat": 4},
    {"cells": "code", "nbformat": 4},
    {"cells": [None], "nbformat": 4},
    {"cells": ["1"], "nbformat": 4},
    {"cells": [{}], "nbformat": 4},
    {"cells": [{"source": "1"}], "nbformat": 4},
    {"cells": [{"cell_type": "code"}], "nbformat": 4},
    {"cells": [{"cell_type": "code", "source": None}], "nbformat": 4},
    {"cells": [{"cell_type": "code", "source": [1]}], "nbformat": 4},
    {"cells": [{"cell_type": "code", "source": 3}], "nbformat": 4},
    {"cells": [{"cell_type": None, "source": "1"}], "nbformat": 4},
    {"cells": [{"cell_type": ["code"], "source": "1"}], "nbformat": 4},
    {"cells": [{"cell_type": "poem", "source": "1"}], "nbformat": 4},
    {"cells": [{"cell_type": "code", "source": "1", "metadata": []}], "nbformat": 4},
    {"cells": [{"cell_type": "code", "source": "1", "metadata": None}], "nbformat": 4},
    {"cells": [{"cell_type": "code", "source": "1", "metadata": {"tags": None}}], "nbformat": 4},
    {
        "cells": [{"cell_type": "code", "source": "1", "metadata": {"tags": "parameters"}}],
        "nbformat": 4,
    },
    {"cells": [{"cell_type": "code", "source": "1", "outputs": None}], "nbformat": 4},
    {"cells": [{"cell_type": "code", "source": "1", "outputs": [None]}], "nbformat": 4},
    {
        "cells": [{"cell_type": "code", "source": "1", "outputs": [{"output_type": 3}]}],
        "nbformat": 4,
    },
    {"cells": [{"cell_type": "code", "source": "\ud800"}], "nbformat": 4},
    {"cells": [], "nbformat": 99},
    {"cells": [], "nbformat": "4"},
    {"worksheets": [{"cells": []}], "nbformat": 3},
    "PIPE",
    "FOLDER",
    "LINK /dev/zero",
    "LINK gone",
    "LINK 00_setup.ipynb",
]


@pytest.mark.parametrize("content", NOTEBOOKS, ids=lambda each: ascii(each)[:60])
def test_a_hostile_notebook(workbook, capsys, content):
    """It cannot be run; in the list it is a row, and the others are there."""
    plant(workbook / "notebooks" / "00_setup.ipynb", content)
    for command in ("run", "schema", "sweep"):
        refused(attack(capsys, command, "00"), "00_setup")
    done(ending := attack(capsys, "list"), "10_lrc  About 10_lrc")
    if content != {"cells": []} and not (isinstance(content, dict) and content.get("cells") == []):
        assert "00_setup  unreadable: " in ending.out


DECLARATIONS = [
    ("steps: int = " + "(" * 5000 + "1  # a", "a literal"),
    ("steps: int = " + "-" * 100_000 + "1  # a", "a literal"),
    ("steps: int = " + "9" * 5000 + "  # a", "a literal"),
    ("steps: int = 0x" + "f" * 5000 + "  # a", "a literal"),
    ("steps: int = 0x" + "f" * 50 + "  # a", "of type int (of 64 bits)"),
    ("steps: int = 1\x00  # a", "a literal"),
    ("steps: str = '\\ud800'  # a", "of type str (UTF-8)"),
    ("steps: int = 1  # a [1 .. " + "9" * 5000 + "x]", "is not a range"),
    ("steps: int = 1  # a [nan .. nan]", "allowed"),
    ("steps: int = 1  # a []", "allowed"),
    ("steps: " + "list[" * 2000 + "int  # a", "one '='"),
    ("steps: " + "list[" * 80 + "int" + "]" * 80 + " = 1  # a", "is not one of"),
    ("ſteps: int = 1  # a\nsteps: int = 1  # b", "declared twice"),
    ("lambda: int = 1  # a", "a literal"),
    ("steps.a: int = 1  # a", "name: type"),
    ("steps: int = True  # a", "of type int"),
    ("steps: float = 1e999  # a", "a finite number"),
    ('steps: str = f"{open}"  # a', "a literal"),
    ('token: str = "hunter2"  # a [secret]', "'token' is hidden"),
]


@pytest.mark.parametrize("line, words", DECLARATIONS, ids=lambda each: ascii(each)[:40])
def test_a_hostile_declaration(workbook, capsys, line, words):
    small_notebooks.write("00_setup", "1", parameters=line)
    refused(attack(capsys, "run", "00"), words)


SOURCES = [
    "\x00",
    "def f(:",
    "import nbworkbook.no_such_module",
    "%%no_such_magic",
    "(" * 5000,
    "-" * 100_000 + "1",
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda each: ascii(each)[:40])
def test_hostile_code_is_planned_or_refused(tmp_path, monkeypatch, capsys, source):
    """What a cell does is found out by running it; planning only reads it."""
    folder = small_notebooks.move_workbook(tmp_path, monkeypatch)
    small_notebooks.write("00_setup", source)
    plant(folder / "parameters" / "00_setup.sweep.yaml", b"steps: [1, 2]\n")
    ending = attack(capsys, "sweep", "00", "--list")
    assert ending.code == 0 or "cannot be planned" in ending.err
