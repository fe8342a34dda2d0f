"""`loopdoctor FILE.py`: a script runs as Python would run it, its report comes after it, exit codes
tell apart.
"""

import json
import subprocess
import sys

import pytest

from loopdoctor.script import command

SCRIPT = """
import sys, torch, helper
from torch.nn.functional import cross_entropy

def train(frozen=False, fail=False, steps=4):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
    print("script speaks", helper.NAME, sys.argv[1:], __name__)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    for n in range(steps):
        if frozen:
            net.requires_grad_(False)
        x = torch.randint(0, 64, (4, 9))
        loss = cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        if fail and n == 2:
            raise RuntimeError("on purpose")
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    print("script ends")

def frozen():
    train(frozen=True)

def needing(what):
    pass

number = 3
if __name__ == "__main__":
    train("frozen" in sys.argv, "fail" in sys.argv, 4)
    if "leave" in sys.argv:
        sys.exit(3)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text('NAME = "helper"\n')
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    (tmp_path / "idle.py").write_text("print('no training here')\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    return path


def test_a_script_runs_as_python_runs_it(script, capsys):
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    assert command([str(script), "--steps", "2", "--", "--lr", "3"]) == 0
    said = capsys.readouterr().out
    assert "script speaks helper ['--lr', '3'] __main__" in said and "script ends" in said
    assert "doctor, 2 steps watched: " in said
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


@pytest.mark.slow
def test_json_on_stdout_is_nothing_but_json(script):
    line = [sys.executable, "-m", "loopdoctor", str(script), "--json", "--", "frozen"]
    done = subprocess.run(line, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert (
        done.returncode == 1
        and report["raised"].startswith("RuntimeError")
        and not report["healthy"]
    )
    assert [f["check"] for f in report["findings"]][:1] == ["S1"]
    assert (
        "script speaks" in done.stderr
        and "Traceback" in done.stderr
        and "loopdoctor/script.py" not in done.stderr
    )


def test_a_function_alone(script, capsys):
    assert command([f"{script}:frozen"]) == 1
    said = capsys.readouterr().out
    assert (
        "script speaks helper [] script" in said
        and "ERROR S1" in said
        and "then RuntimeError" in said
    )


def test_a_script_that_raises_is_diagnosed(script, capsys):
    assert command([str(script), "--", "fail"]) == 1
    out, err = capsys.readouterr()
    assert "2 steps watched, then RuntimeError" in out and "on purpose" in err


def test_its_own_exit_code_counts(script, capsys):
    assert command([str(script), "--json", "--", "leave"]) == 1
    assert json.loads(capsys.readouterr().out)["exit_code_of_script"] == 3


def test_stop(script, capsys):
    assert command([str(script), "--steps", "2", "--stop"]) == 0
    said = capsys.readouterr().out
    assert "2 steps watched: " in said and "script ends" not in said


def test_a_script_that_never_trains(script, capsys):
    assert command([str(script.parent / "idle.py")]) == 0
    assert "nothing was watched" in capsys.readouterr().out


@pytest.mark.parametrize(
    "target, said",
    [
        ("none.py", "give the path of an existing FILE.py"),
        ("script.txt", "give FILE.py or FILE.py:function"),
        ("script.py:a-b", "give FILE.py or FILE.py:function"),
        ("script.py:tain", "has no function 'tain'; it has: train, frozen, needing"),
        ("script.py:number", "is no function"),
        ("script.py:needing", "needs what"),
        ("broken.py", "cannot be run as Python"),
    ],
)
def test_bad_input(script, capsys, monkeypatch, target, said):
    monkeypatch.chdir(script.parent)
    assert command([target]) == 2
    sentences = capsys.readouterr().err.strip()
    assert said in sentences and len(sentences.splitlines()) == 1


def test_bad_steps(script, capsys):
    with pytest.raises(SystemExit) as left:
        command([str(script), "--steps", "0"])
    assert left.value.code == 2 and "above 0" in capsys.readouterr().err


def test_the_package_needs_torch_alone():
    line = "import sys, loopdoctor; print({'transformers', 'peft', 'bitsandbytes', 'accelerate'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_help_says_how_to_pass_arguments_and_what_the_codes_mean(capsys):
    with pytest.raises(SystemExit) as left:
        command(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert (
        left.value.code == 0 and "come last, after --" in said and "2: it could not be run" in said
    )
