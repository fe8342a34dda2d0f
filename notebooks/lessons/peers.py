"""What other packages say of a training program: guardtower, torchtest2 and torch-audit, each asked in its own way.

    guardtower   one step that it makes itself, from a function that returns the loss
    torchtest2   a battery on one batch, overfitting it among others, from model, batch, loss and optimizer
    torch-audit  a few steps of a loop, through its patches of forward and optimizer.step

They are optional: `pip install -e ".[peers]"`. What they said of patients.py is kept in outputs/published, made by
`python -m lessons.peers FILE.json`.

Footgun: a package that drives a step of its own looks at that step. The loop around it, and what a second step would
show, it cannot know; that is no fault of its checks.
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
SILENT = ("INFO", "PASS", "SKIP", "NOTE", "follows")  # said for the record, not as something wrong


class Remark(NamedTuple):
    severity: str  # in the words of the one who made it
    check: str
    text: str


def by_doctor(p: Program) -> list[Remark]:
    """Root causes with the rest folded under them; the folded ones follow as such."""
    with doctor.watch(p.model, optimizer=p.optimizer, teacher=p.teacher, say=False) as report:
        programs.train(p, STEPS)
    return [Remark("follows" if f.because else f.severity, f"{f.check} {f.name}", f.diagnosis) for f in report.findings]


def by_guardtower(p: Program) -> list[Remark]:
    import guardtower

    report = guardtower.audit(p.model, lambda: p.loss(programs.batches(1)[0]), optimizer=p.optimizer)
    return [Remark(f.severity.label, f.check, f.message) for f in report.findings]


def by_torchtest2(p: Program) -> list[Remark]:
    import torchtest2

    ids = programs.batches(1)[0]
    report = torchtest2.check_model(
        p.model,
        ids,
        ids,
        optimizer=p.optimizer,
        forward_fn=lambda model, inputs, targets: {"loss": p.loss(inputs)},
        eval_forward_fn=lambda model, inputs: model(input_ids=inputs).logits,
        loss_fn=lambda out, targets: out["loss"],
    )
    return [Remark(str(r.status), r.name, r.message) for r in report]


def by_torch_audit(p: Program) -> list[Remark]:
    import torch_audit

    auditor = torch_audit.autopatch(p.model, optimizer=p.optimizer, every_n_steps=1)
    try:
        programs.train(p, STEPS)
    finally:
        auditor.unpatch()
    # one line for each rule and place, though every step repeats it
    found = {(f.severity.value, f.rule_id, f.module_path): f for f in auditor.finish().findings}
    return [Remark(f.severity.value, f.rule_id, f.message) for f in found.values()]


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
    """What one of them says of a program made for it alone; what it raises is what it says."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            return who(make())
        except Exception as error:
            return [Remark("RAISED", type(error).__name__, str(error))]


def consult() -> dict[str, dict[str, list[Remark]]]:
    """All programs before the doctor and every peer: remarks by program, by who made them."""
    everything = programs.ILL | programs.WELL
    return {
        name: {who: ask(make, f) for who, f in ({"doctor": by_doctor} | PEERS).items()}
        for name, make in everything.items()
    }


def rows(said: dict[str, dict[str, list[Remark]]]) -> list[dict[str, str]]:
    """For a table: what each found wrong, as check names with how often; remarks of the silent severities left out."""
    return [
        {"program": name, "is": "ill" if name in programs.ILL else "well"}
        | {who: _brief(remarks) for who, remarks in by.items()}
        for name, by in said.items()
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
