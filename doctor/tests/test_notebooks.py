"""Notebooks: a notebook as one script, and `%%doctor` above a cell of one."""

import asyncio
import json
import sys

import pytest

from loopdoctor import cells, notebook
from loopdoctor.script import command

MODEL = """import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 100))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.randint(1, 4, (5000,)).cumsum(0) % 100"""
TRAIN = """for step in range(6):
    at = torch.randint(len(text) - 17, (8,))
    ids = torch.stack([text[i : i + 17] for i in at])
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()"""
REPLACED = "model[3] = nn.Linear(32, 100)"


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Write a notebook, with one cell of text and one empty cell, which are not counted."""

    def write(*codes: str, name: str = "page.ipynb", **metadata) -> str:
        made = [{"cell_type": "markdown", "source": "# Mine"}, {"cell_type": "code", "source": []}]
        made += [{"cell_type": "code", "source": code.splitlines(keepends=True)} for code in codes]
        (tmp_path / name).write_text(
            json.dumps({"cells": made, "metadata": metadata, "nbformat": 4})
        )
        return name

    monkeypatch.chdir(tmp_path)
    return write


# ------------------------------------------------------------------------------------ as one script
JUPYTERS = '''%matplotlib inline
!pip install \\
    torch -q
prompt = """
%s and
!not a shell line
"""
rest = (7
% 4)
if rest == 3:
    !ls
    files = !ls
%time total = sum(range(5))
more = %time total + 1
%doctor --steps 3
prompt.title?
pip install loopdoctor
text = 'it\\'s' # "
where = %pwd
'''


def test_what_is_jupyters_is_left_out_and_the_rest_keeps_its_lines():
    code, left_out = notebook.as_python(JUPYTERS)
    names = {}
    exec(code, names)
    assert (
        names["prompt"] == "\n%s and\n!not a shell line\n"
        and names["rest"] == 3
        and names["files"] == []
    )
    assert (names["total"], names["more"], names["where"], names["text"]) == (10, 11, None, "it's")
    assert [line for line, _ in left_out] == [1, 2, 11, 12, 16, 17, 19]
    assert left_out[1] == (2, "!pip install torch -q")
    assert [n for n, line in enumerate(code.split("\n"), 1) if line.startswith("total")] == [13]


@pytest.mark.parametrize(
    "text, code",
    [
        ("%%time\n%%capture said\n\nx = 1\n", "\n\n\nx = 1\n\n"),
        ("\n%%bash\nls | wc\n", ""),
        ("%%writefile model.py\nx = 1\n", ""),
        ("%%doctor --steps 3\nx = 1", "\nx = 1\n"),
    ],
)
def test_magics_over_a_whole_cell(text, code):
    assert notebook.as_python(text)[0] == code


def test_cells_run_in_order_as_jupyter_would_run_them(page, capsys, tmp_path):
    (tmp_path / "sub").mkdir()
    name = page(
        "from __future__ import annotations\nimport asyncio, os, sys",
        "class Late:\n    of: NotThere\nassert sys.modules['__main__'].Late is Late and __name__ == '__main__'",
        "await asyncio.sleep(0)\nasync def give(): return 7\nseven = await give()",
        "get_ipython().run_line_magic('autoreload', '2')",
        "display(seven, display_id=True).update('eight')",
        "print(os.path.basename(os.getcwd()), sys.argv[1:], os.environ['MPLBACKEND'])",
        name="sub/page.ipynb",
    )
    main = sys.modules["__main__"]
    assert command([name, "--", "--lr", "3"]) == 0
    said = capsys.readouterr().out
    assert "7\neight\nsub ['--lr', '3'] agg\n" in said and "nothing was watched" in said
    assert "get_ipython().run_line_magic('autoreload', '2')" in said.partition("not run")[2]
    assert sys.modules["__main__"] is main


def test_one_cell_is_watched_and_the_later_ones_do_not_run(page, capsys):
    name = page(MODEL, TRAIN, REPLACED, TRAIN, "print('too far')", tagged="parameters")
    assert command([f"{name}:2"]) == 0
    assert "6 steps watched: nothing found" in capsys.readouterr().out
    assert command([f"{name}:4", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][0]["check"] == "S3" and report["rounds"] == 6
    assert command([f"{name}:3"]) == 0
    assert "nothing was watched" in capsys.readouterr().out


def test_a_notebook_that_raises_names_cell_and_line_and_is_reported(page, capsys):
    name = page(MODEL, TRAIN + "\n    if step == 3:\n        1 / 0")
    assert command([name]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines()[1:3] == [
        '  File "page.ipynb, cell 2", line 9, in <module>',
        "    1 / 0",
    ]
    assert "4 steps watched, then ZeroDivisionError" in out
    # The same above the cell that is watched.
    assert command([page(MODEL, "1 / 0", TRAIN) + ":3"]) == 1
    out, err = capsys.readouterr()
    assert (
        'File "page.ipynb, cell 2", line 1' in err
        and "0 steps watched, then ZeroDivisionError" in out
    )


@pytest.mark.parametrize(
    "target, said",
    [
        ("none.ipynb", "give the path of an existing FILE.ipynb"),
        ("page.ipynb:0", "has no cell 0; its code cells are 1 to 2"),
        ("page.ipynb:3", "has no cell 3; its code cells are 1 to 2"),
        ("page.ipynb:main", "give FILE.ipynb, or FILE.ipynb:7"),
        ("text.ipynb", "cannot be read as a notebook"),
        ("list.ipynb", "cannot be read as a notebook"),
        ("broken.ipynb", "broken.ipynb, cell 2, line 2 cannot be run as Python"),
        ("other.ipynb", "is a notebook in julia"),
    ],
)
def test_bad_input(page, capsys, tmp_path, target, said):
    page("x = 1", "y = 2")
    page("x = 1", "%%time\ny = (2", name="broken.ipynb")
    page("x = 1", name="other.ipynb", language_info={"name": "julia"})
    (tmp_path / "text.ipynb").write_text("no notebook")
    (tmp_path / "list.ipynb").write_text("[]")
    assert command([target]) == 2
    sentences = capsys.readouterr().err.strip()
    assert said in sentences and len(sentences.splitlines()) == 1


def test_places_as_a_person_reads_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cells.place(cells.name("page.ipynb", 7), 3) == "page.ipynb, cell 7, line 3"
    assert cells.place(str(tmp_path / "sub" / "train.py"), 12) == "sub/train.py, line 12"
    assert cells.place("/elsewhere/train.py", 12) == "/elsewhere/train.py, line 12"


# ------------------------------------------------------------------------------------- under a cell
@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """IPython in this process, with the extension."""
    interactive = pytest.importorskip("IPython.core.interactiveshell", reason="needs IPython")
    kind, folder = interactive.InteractiveShell, str(tmp_path_factory.mktemp("ipython"))
    main = sys.modules["__main__"]
    made = kind.instance(history_length=0, ipython_dir=folder)
    made.history_manager.enabled = False
    made.run_line_magic("load_ext", "loopdoctor")
    yield made
    made.run_line_magic("unload_ext", "loopdoctor")
    kind.clear_instance()
    sys.modules["__main__"] = main


@pytest.fixture
def run(shell):
    """Run a cell: its result, what it printed, and the reports shown."""
    from IPython.utils.capture import capture_output

    def cell(text: str):
        with capture_output() as seen:
            transformed = shell.transform_cell(text)
            if shell.should_run_async(text, transformed_cell=transformed):
                result = asyncio.run(shell.run_cell_async(text, transformed_cell=transformed))
                shell.events.trigger("post_run_cell", result)
            else:
                result = shell.run_cell(text)
        return result, seen.stdout + seen.stderr, [output.data for output in seen.outputs]

    cell(MODEL)
    return cell


def attached(shell) -> tuple:
    """What hangs on the model, on the optimizer and on torch."""
    import torch

    model, optimizer = shell.user_ns["model"], shell.user_ns["optimizer"]
    hooks = [
        len(d)
        for m in model.modules()
        for k, d in vars(m).items()
        if k.endswith("_hooks") and d is not None
    ]
    mode = torch._C._len_torch_function_stack()
    functions = (
        torch.autograd.backward,
        torch.nn.functional.cross_entropy,
        torch.nn.Module.zero_grad,
    )
    return hooks, sorted(vars(optimizer)), mode, functions


def test_the_report_comes_under_the_cell_which_runs_as_ever(shell, run):
    before = attached(shell)
    result, _, shown = run(f"%%doctor --steps 4\n{TRAIN}\nprint('mine')\nstep + 1")
    assert result.success and result.result == 6 and shell.user_ns["step"] == 5
    assert len(shown) == 1 and len(shown[0]["text/plain"].splitlines()) == 1
    assert "4 steps watched: nothing found" in shown[0]["text/plain"]
    run(REPLACED)
    result, _, shown = run(f"%%doctor\n{TRAIN}")
    assert "ERROR S3" in shown[0]["text/plain"] and "<details" in shown[0]["text/html"]
    run(MODEL)
    assert attached(shell) == before


def test_an_error_or_an_interrupt_ends_the_cell_as_ever(shell, run):
    before = attached(shell)
    for raised, told in (
        ("KeyboardInterrupt", "interrupted"),
        ("ZeroDivisionError", "ZeroDivisionError"),
    ):
        result, said, shown = run(f"%%doctor\n{TRAIN}\n    if step == 3:\n        raise {raised}")
        assert type(result.error_in_exec).__name__ == raised and raised in said
        assert result.error_in_exec.__traceback__ is not None
        assert f"4 steps watched, then {told}" in shown[-1]["text/plain"]
        assert attached(shell) == before
    place = cells.place(result.error_in_exec.__traceback__.tb_next.tb_frame.f_code.co_filename, 10)
    assert place.endswith(", line 10")


def test_await_other_magics_and_cells_in_cells(shell, run):
    result, _, shown = run(f"%%doctor\nimport asyncio\nawait asyncio.sleep(0)\n{TRAIN}")
    assert result.success and "6 steps watched" in shown[0]["text/plain"]
    for above in ("%%doctor\n%%time", "%%time\n%%doctor"):
        result, said, shown = run(f"{above}\n{TRAIN}")
        assert "Wall time" in said and "6 steps watched" in shown[0]["text/plain"]
    nested = "get_ipython().run_cell('')\nget_ipython().run_cell('x = 1')\n"
    result, _, shown = run(f"%%doctor\n{nested}{TRAIN}")
    assert len(shown) == 1 and "6 steps watched" in shown[0]["text/plain"]
    shell.user_ns["train"] = TRAIN
    result, _, shown = run("get_ipython().run_cell_magic('doctor', '--steps 2', train)")
    assert "2 steps watched" in shown[0]["text/plain"]


def test_options(shell, run):
    run(REPLACED)
    _, said, shown = run(f'%%doctor --ignore "S3=a test" --ignore S4=too --into mine\n{TRAIN}')
    assert "ERROR" not in shown[0]["text/plain"] and "because: a test" in shown[0]["text/plain"]
    assert shell.user_ns["mine"].ignored
    result, said, shown = run("%%doctor --help\nnot_run = 1")
    assert "--teacher NAME" in said and "not_run" not in shell.user_ns and not shown
    for wrong in (
        "--steps 0",
        "--ignore S3",
        "--ignore Q9=no",
        "--teacher nobody",
        "--at x",
        "more",
        "--steps '",
    ):
        result, said, shown = run(f"%%doctor {wrong}\nnot_run = 1")
        assert said.startswith("UsageError: %%doctor: ") and len(said.strip().splitlines()) == 1, (
            said
        )
        assert "not_run" not in shell.user_ns and not shown
    _, _, shown = run("%%doctor\nx = 1")
    assert (
        "nothing was watched" in shown[0]["text/plain"]
        and len(shown[0]["text/plain"].splitlines()) == 1
    )


def test_loading_twice_and_unloading(shell, run):
    transforms = list(shell.input_transformers_cleanup)
    for line in ("load_ext", "reload_ext"):
        shell.run_line_magic(line, "loopdoctor")
    assert len(shell.input_transformers_cleanup) == len(transforms)
    assert shell.input_transformer_manager.check_complete("%%doctor\n")[0] == "incomplete"
    shell.run_line_magic("unload_ext", "loopdoctor")
    assert "doctor" not in shell.magics_manager.magics["cell"]
    assert not run("%%doctor\nx = 1")[0].success
    shell.run_line_magic("load_ext", "loopdoctor")
    assert run("%%doctor\nx = 1")[0].success
