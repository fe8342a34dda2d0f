"""Other packages on the same training programs: guardtower, torchtest2 and torch-audit, each called in its own way.

    guardtower   one step that it makes itself, from a function that returns the loss
    torchtest2   a battery on one batch, overfitting it among others, from model, batch, loss and optimizer
    torch-audit  a few steps of a loop, through its patches of forward and optimizer.step

They are optional: `pip install -e ".[peers]"`. Their remarks on `lessons.programs` are stored in outputs/published,
made by `python -m lessons.peers FILE.json`.

Footgun: a package that makes a step of its own examines that step. It cannot know the loop around it, nor what a second
step would show; its checks are not to blame for that.
"""

import importlib.metadata
import importlib.util
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from lessons import programs
from lessons.programs import Program
from nblib import doctor, files, paths, runtime

STEPS = 10
SILENT = ("INFO", "PASS", "SKIP", "NOTE", "follows")  # remarks for the record, not about a fault


class Remark(NamedTuple):
    severity: str  # in the words of the package that made it
    check: str
    text: str


def by_doctor(program: Program) -> list[Remark]:
    """Root causes with the rest folded under them; the folded ones follow as such."""
    with doctor.watch(program.model, optimizer=program.optimizer, teacher=program.teacher, say=False) as report:
        programs.train(program, STEPS)
    return [Remark("follows" if f.because else f.severity, f"{f.check} {f.name}", f.diagnosis) for f in report.findings]


def by_guardtower(program: Program) -> list[Remark]:
    import guardtower

    report = guardtower.audit(program.model, lambda: program.loss(programs.batches(1)[0]), optimizer=program.optimizer)
    return [Remark(f.severity.label, f.check, f.message) for f in report.findings]


def by_torchtest2(program: Program) -> list[Remark]:
    import torchtest2

    ids = programs.batches(1)[0]
    report = torchtest2.check_model(
        program.model,
        ids,
        ids,
        optimizer=program.optimizer,
        forward_fn=lambda model, inputs, targets: {"loss": program.loss(inputs)},
        eval_forward_fn=lambda model, inputs: model(input_ids=inputs).logits,
        loss_fn=lambda out, targets: out["loss"],
    )
    return [Remark(str(r.status), r.name, r.message) for r in report]


def by_torch_audit(program: Program) -> list[Remark]:
    import torch_audit

    auditor = torch_audit.autopatch(program.model, optimizer=program.optimizer, every_n_steps=1)
    try:
        programs.train(program, STEPS)
    finally:
        auditor.unpatch()
    # one line for each rule and place, though every step repeats it
    findings = {(f.severity.value, f.rule_id, f.module_path): f for f in auditor.finish().findings}
    return [Remark(f.severity.value, f.rule_id, f.message) for f in findings.values()]


PEERS: dict[str, Callable[[Program], list[Remark]]] = {
    "guardtower": by_guardtower,
    "torchtest2": by_torchtest2,
    "torch-audit": by_torch_audit,
}


def missing() -> str:
    """ "" when all peers are installed, else a sentence with the command that installs those that are not."""
    absent = [name for name in PEERS if importlib.util.find_spec(name.replace("-", "_")) is None]
    return f"not installed here: {', '.join(absent)}; pip install {' '.join(absent)}" if absent else ""


def ask(make: Callable[[], Program], who: Callable[[Program], list[Remark]]) -> list[Remark]:
    """The remarks of one package on a program made for it alone; an exception becomes a remark."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            return who(make())
        except Exception as error:
            return [Remark("RAISED", type(error).__name__, str(error))]


def consult() -> dict[str, dict[str, list[Remark]]]:
    """Every program examined by the doctor and every peer: remarks by program and package."""
    everything = programs.ILL | programs.WELL
    return {
        name: {who: ask(make, f) for who, f in ({"doctor": by_doctor} | PEERS).items()}
        for name, make in everything.items()
    }


def rows(remarks: dict[str, dict[str, list[Remark]]]) -> list[dict[str, str]]:
    """For a table: the faults each reports, as check names with how often; remarks of silent severities left out."""
    return [
        {"program": name, "is": "ill" if name in programs.ILL else "well"}
        | {who: _brief(of_one) for who, of_one in by_package.items()}
        for name, by_package in remarks.items()
    ]


def _brief(remarks: list[Remark]) -> str:
    counts = Counter(f"{r.severity} {r.check}" for r in map(Remark._make, remarks) if r.severity not in SILENT)
    return ", ".join(f"{many} x {what}" if many > 1 else what for what, many in counts.items()) or "-"


def published() -> tuple[str, dict[str, dict[str, list[Remark]]]]:
    """Name and remarks of the newest record under outputs/published."""
    path = max(paths.root().glob("outputs/published/*-doctor-and-peers-*.json"))
    return path.name, json.loads(path.read_text())["said"]


def main(path: str) -> None:
    if missing():
        sys.exit(missing())
    versions = {name: importlib.metadata.version(name) for name in PEERS}
    record = {"environment": runtime.environment(), "peers": versions, "steps": STEPS, "said": consult()}
    files.write(Path(path), files.to_json(record, indent=1))
    for row in rows(record["said"]):
        print(row)


if __name__ == "__main__":
    main(*sys.argv[1:])
