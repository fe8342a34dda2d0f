"""gpu-check without a card: the sentence that helps, the exit code, and the checks themselves on a
CPU.
"""

import json
import os

import pytest
import torch

from nblib import compiling, paths, runtime
from nblib.methods import muon
from nbworkbook import cli, gpu_check
from nbworkbook.method_steps import METHODS, Size

CPU = runtime.Machine(torch.device("cpu"), "bf16", "no card is needed")
SIZE = Size("cpu", vocabulary=128, hidden=32, layers=2, heads=2, rows=2, length=16)


@pytest.fixture
def machine_with(tmp_path, monkeypatch):
    """A PATH with nothing on it but an nvidia-smi that prints this and ends with that, and torch
    built for a CUDA.
    """

    def make(
        prints: str | None,
        *,
        built: str | None = "13.0",
        code: int = 0,
        version: str = "2.13.0+cu130",
    ) -> str:
        if prints is not None:
            program = tmp_path / "nvidia-smi"
            program.write_text(f"#!/bin/sh\necho '{prints}'\nexit {code}\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        return gpu_check.problem()

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


def test_no_driver_at_all(machine_with):
    assert "no NVIDIA driver is installed" in machine_with(None)


@pytest.mark.parametrize(
    "prints, code", [("NVIDIA-SMI has failed", 9), ("NVIDIA-SMI has failed", 0), ("", 0)]
)
def test_a_driver_that_does_not_run(prints, code, machine_with):
    assert "the NVIDIA driver is not running" in machine_with(prints, code=code)


def test_a_torch_for_the_cpu(machine_with):
    sentence = machine_with("NVIDIA H100 80GB HBM3, 580.65.06", built=None, version="2.13.0+cpu")
    assert "nvidia-smi sees NVIDIA H100 80GB HBM3 with driver 580.65.06" in sentence
    assert "2.13.0+cpu is built for the CPU: pip install torch==2.13.0 --index-url" in sentence


@pytest.mark.parametrize(
    "number, built, needed", [("550.54.15", "13.0", 580), ("470.1", "12.6", 525)]
)
def test_a_driver_that_is_too_old(number, built, needed, machine_with):
    sentence = machine_with(f"NVIDIA A10, {number}", built=built)
    assert (
        f"driver {number}, but" in sentence
        and f"CUDA {built}, which needs driver {needed} or newer" in sentence
    )
    assert "update the driver, or pip install torch==2.13.0" in sentence


def test_a_driver_that_is_new_enough(machine_with, monkeypatch):
    assert "restart the machine" in machine_with("Tesla T4, 580.1")
    assert "restart the machine" in machine_with("Tesla T4, 535.1", built="12.6")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES = '' hides it" in machine_with("Tesla T4, 580.1")


def test_every_problem_is_one_sentence_and_exit_code_2(machine_with, capsys, monkeypatch):
    cases = [
        (None, {}),
        ("", {}),
        ("A, 580.1", {}),
        ("A, 550.1", {}),
        ("A, 580.1", {"built": None}),
    ]
    for prints, options in cases:
        machine_with(prints, **options)
        assert cli.main(["gpu-check"]) == 2
        out, problem = capsys.readouterr()
        assert out == "" and problem.startswith("nblib: ") and problem.count("\n") == 1


def test_a_card_that_torch_sees_is_no_problem(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_check.problem() == ""


@pytest.mark.slow
def test_all_checks_on_a_cpu_and_what_is_written(capsys, monkeypatch, tmp_path):
    few = {name: METHODS[name] for name in ("dense", "MoE with Muon")}  # tests/card has all
    monkeypatch.setattr(gpu_check, "METHODS", few)
    monkeypatch.setenv("NBLIB_OUTPUTS", str(tmp_path / "new"))
    assert gpu_check.main(CPU, SIZE, backend="aot_eager") == 0
    out = capsys.readouterr().out
    facts = json.loads((paths.outputs() / "gpu-check.json").read_text())
    assert set(facts["checks"]) == {*few, "muon, 100 matrices", "4 bit", "compile"}
    assert all(f"\n{name}" in out for name in facts["checks"]) and "FAILED" not in out
    assert facts["peak_tflop_per_s"] > 0 and facts["environment"]["packages"]["torch"]
    private = [os.path.expanduser("~"), str(tmp_path), os.uname().nodename]
    assert not [
        word
        for word in private
        if f"{word}/" in json.dumps(facts) or f'"{word}"' in json.dumps(facts)
    ]


def test_a_check_that_fails_says_where_and_the_code_is_1(capsys, monkeypatch, tmp_path):
    def broken(size):
        raise RuntimeError("called a synchronizing CUDA operation\nand a trace")

    monkeypatch.setenv("NBLIB_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(gpu_check, "METHODS", {"dense": broken})
    for name in ("orthogonal", "four_bit", "compiled"):
        monkeypatch.setattr(gpu_check, name, lambda *_, **__: {"difference": 0.0})
    assert gpu_check.main(CPU, SIZE) == 1
    row = json.loads((tmp_path / "gpu-check.json").read_text())["checks"]["dense"]
    assert row["error"].startswith(
        "RuntimeError: called a synchronizing CUDA operation [test_gpu_check.py:"
    )
    assert "dense                   FAILED  RuntimeError" in capsys.readouterr().out


def test_a_wrong_orthogonalisation_fails(monkeypatch):
    small = dict(matrices=3, shape=(16, 32))
    assert gpu_check.orthogonal(CPU, **small)["ok"]
    right = muon.orthogonalise
    monkeypatch.setattr(muon.muon, "orthogonalise", lambda G, **options: right(G, **options) * 1.1)
    assert not gpu_check.orthogonal(CPU, **small)["ok"]


@pytest.mark.slow
def test_wrong_gradients_of_a_compiled_block_fail(monkeypatch):
    right = compiling.compile_blocks

    def off(net, **options):
        for p in list(net.parameters())[:1]:
            p.register_hook(lambda grad: grad * 2)
        return right(net, **options)

    monkeypatch.setattr(compiling, "compile_blocks", off)
    assert not gpu_check.compiled(CPU, SIZE, backend="eager")["ok"]
