"""Blind sets whose programs give their models, their optimizers and one step: judge8 and later.

    python -m tests.step_programs judge10 FILE.json

The authors had not seen the checks, and chose bugs that people often make. Every program has a mended twin. The watch
is the default one, and a program's twenty steps end with it; the command makes all of them. Beside the programs of a
set lie

- `judge10_proofs.json`: the author's measure of both after more steps (lower is better), which proves the harm
- `judge10_first_sight.json`: what was said before any check was changed for them; it is not to be edited

Footgun: whether a finding states the author's cause is read by a person. A check's id alone does not tell.
"""

import json
import sys
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch

import train_doctor as doctor

from .judge4 import STEPS, told, undisturbed, write

SETS = {
    "judge8": ("judge8_a",),
    "judge9": ("judge9_a",),
    "judge10": ("judge10_a", "judge10_b"),
    "judge11": ("judge11_a", "judge11_b"),
    "judge12": ("judge12_a", "judge12_b"),
    "judge13": ("judge13_a", "judge13_b"),
    "judge14": ("judge14_a", "judge14_b"),
    "judge15": ("judge15_a", "judge15_b"),
    "judge16": ("judge16_a",),
    "judge17": ("judge17_a", "judge17_b"),
    "judge18": ("judge18_a",),
    "judge19": ("judge19_a",),
    "judge20": ("judge20_a", "judge20_b"),
    "judge21": ("judge21_a",),
    "judge22": ("judge22_a", "judge22_b"),
    "judge23": ("judge23_a", "judge23_b"),
    "judge24": ("judge24_a", "judge24_b"),
    "judge25": ("judge25_a", "judge25_b"),
    "judge26": ("judge26_a", "judge26_b"),
    "judge27": ("judge27_a", "judge27_b"),
    "judge28": ("judge28_a", "judge28_b"),
    "judge29": ("judge29_a", "judge29_b"),
    "judge30": ("judge30_a", "judge30_b"),
    "judge31": ("judge31_a", "judge31_b"),
    "judge32": ("judge32_l",),
    "judge33": ("judge33_l",),
    "judge34": ("judge34_l",),
    "judge35": ("judge35_a",),
    "judge36": ("judge36_a", "judge36_b"),
    "judge37": ("judge37_l",),
    "judge38": ("judge38_a", "judge38_b"),
    "judge39": ("judge39_l",),
    "judge40": ("judge40_a", "judge40_b"),
    "judge41": ("judge41_l",),
    "judge42": ("judge42_a", "judge42_b"),
    "judge43": ("judge43_l",),
    "judge44": ("judge44_l",),
    "judge45": ("judge45_l",),
    "judge46": ("judge46_a",),
    "judge47": ("judge47_l",),
    "judge48": ("judge48_a",),
    "judge49": ("judge49_l",),
    "judge50": ("judge50_a",),
    "judge51": ("judge51_l",),
    "judge52": ("judge52_l",),
    "judge53": ("judge53_l",),
    "judge54": ("judge54_l",),
    "judge55": ("judge55_a",),
    "judge56": ("judge56_a", "judge56_b"),
    "judge57": ("judge57_l",),
    "judge58": ("judge58_l",),
}
# the others are tested with the slow tests, for they are many
RECENT = {"judge55", "judge56", "judge57", "judge58"}
# wrong after the watched steps: told in the end
LATE = {"tabular_eval_mode_left_on", "eval_mode_after_validation", "epoch_linear", "llama_epochs"}
LATE |= {"field_grid_upsampling", "schedule_counts_one_epoch", "gpt2_periodic_validation", "cls_epochs"}
LATE |= {"classify_epochs", "linear_schedule"}
LONG = {"kd_teacher_in_train_mode"}  # programs that train a network of their own first
HERE = Path(__file__).parent


class Blind:
    """One set."""

    def __init__(self, name: str):
        parts = [import_module(f"{__package__}.{part}") for part in SETS[name]]
        self.faults = {name: (part, what) for part in parts for name, what in _cases(part)}
        self.recent = name in RECENT
        self.proofs, self.first_sight = (HERE / f"{name}_{kept}.json" for kept in ("proofs", "first_sight"))

    def what(self, name: str) -> str:
        return self.faults[name][1]

    def examine(self, name: str, mended: bool, whole: bool = False) -> doctor.Report:
        """The report of one program, after all of its steps or the watched ones. Several models are found by the doctor
        itself."""
        part, _ = self.faults[name]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as its author ran it
        try:
            with undisturbed():
                program = getattr(part, f"{name}_{'good' if mended else 'bad'}")()
                model = program["model"] if isinstance(program["model"], torch.nn.Module) else None
                with doctor.watch(model, optimizer=program["optimizer"], steps=STEPS, say=False) as report:
                    taken = signature(step := program["step"]).parameters.values()
                    numbered = any(parameter.default is parameter.empty for parameter in taken)
                    for i in range(program["steps"]):
                        step(i) if numbered else step()
                        if report.done and not (whole or name in LATE):  # nothing of a watch but one hook goes on
                            break
        finally:
            torch.set_num_threads(threads)
        return report

    def holds(self, named: dict, unseen: dict, harm: float) -> dict:
        """The record of the first sight, once it fits the programs, their proofs and what the test says today."""
        record, proofs = json.loads(self.first_sight.read_text()), json.loads(self.proofs.read_text())
        assert list(record["programs"]) == list(self.faults) and sorted(proofs) == sorted(self.faults)
        assert all(p["bad"] > harm * p["good"] for p in proofs.values())
        assert sorted([*named, *unseen]) == sorted(self.faults)
        reads = {name: p["read"] for name, p in record["programs"].items()}
        assert record["summary"]["named first"] == list(reads.values()).count("first")
        assert all(name in named for name, read in reads.items() if read == "first")
        return record


def _cases(part) -> list[tuple[str, str]]:
    """The programs of a file, each with the author's cause."""
    cases = part.CASES
    return list(cases.items()) if isinstance(cases, dict) else [(case["name"], case["what"]) for case in cases]


def judged(blind: Blind, named: dict, unseen: dict, true: dict | None = None) -> tuple:
    """The three tests of a set: the cause is named first, what is not seen is not named wrongly, twins are left alone.

    `true` are the checks that say something true of a twin. One that is named some day moves up to `named`.
    """

    def said(report: doctor.Report) -> set[str]:
        assert not report.faults, report.faults
        return {f.check for f in report.findings if f.severity != doctor.NOTE}

    def each(names):
        slow = [not blind.recent or name in LONG for name in names]
        return [pytest.param(name, marks=pytest.mark.slow) if late else name for name, late in zip(names, slow)]

    @pytest.mark.parametrize("name", each(named))
    def first(name):
        report = blind.examine(name, mended=False)
        said(report)
        assert report.root is not None and report.root.check == named[name], f"{blind.what(name)}\n{report}"

    @pytest.mark.parametrize("name", each(unseen))
    def nothing(name):
        report = blind.examine(name, mended=False)
        assert not said(report), f"\n{report}"

    @pytest.mark.parametrize("name", each(blind.faults))
    def twin(name):
        report = blind.examine(name, mended=True)
        assert said(report) <= (true or {}).get(name, set()), f"\n{report}"

    return first, nothing if unseen else None, twin


def main(name: str, path: str) -> None:
    blind, entries = Blind(name), {}
    for name in blind.faults:
        print(name, end=": ")
        examined = map(partial(blind.examine, name, whole=True), (False, True))
        entries[name] = told(blind.what(name), *examined)
    write(path, entries)


if __name__ == "__main__":
    main(*sys.argv[1:])
