"""Other packages on the same training programs, each called in its own way.

    guardtower    one step that it makes itself, from a function that returns the loss
    torchtest2    a battery on one batch, overfitting it among others, from model, batch, loss and
                  optimizer
    torch-audit   a few steps of a loop, through its patches of forward and optimizer.step
    Lightning     its Trainer with overfit_batches=1 and detect_anomaly=True
    Hugging Face  its Trainer with debug="underflow_overflow"

The last two do not judge: they print figures and raise at what is not finite. So their figures are
in the record, and their table has what they warn of and what they raise.

    cd notebooks && ../.venv/bin/python -m experiments.peers

makes a virtual environment with the packages that are missing here, runs everybody on
`lessons.programs`, and stores what they said. It needs a package index. What cannot be installed is
in the record with the reason.

Footgun: a package that makes a step of its own examines that step. It cannot know the loop around
it, nor what a second step would show; its checks are not to blame for that.
"""

import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from experiments import checkpointing_versions
from experiments.record import Store, command, newest, read_published
from lessons import programs
from lessons.programs import Program
from nblib import doctor, files, runtime

RECORD = "doctor-and-peers"
STEPS = 10
OVERFLOWED = "a weight overflowed"
OVERFIT = 60  # steps on one batch
SILENT = ("INFO", "PASS", "SKIP", "NOTE", "follows")  # remarks for the record, not about a fault
# in warnings of its speed, its own code, and torch's
ASIDE = ("workers", "deprecated", "None of the inputs")


class Remark(NamedTuple):
    severity: str  # in the words of the package that made it
    check: str
    text: str


def by_doctor(program: Program) -> list[Remark]:
    """Root causes with the rest folded under them; the folded ones follow as such."""
    with doctor.watch(
        program.model, optimizer=program.optimizer, teacher=program.teacher, say=False
    ) as report:
        programs.train(program, STEPS)
    return [
        Remark("follows" if f.because else f.severity, f"{f.check} {f.name}", f.diagnosis)
        for f in report.findings
    ]


def by_guardtower(program: Program) -> list[Remark]:
    import guardtower

    report = guardtower.audit(
        program.model, lambda: program.loss(program.batches(1)[0]), optimizer=program.optimizer
    )
    return [Remark(f.severity.label, f.check, f.message) for f in report.findings]


def by_torchtest2(program: Program) -> list[Remark]:
    import torchtest2

    batch = program.batches(1)[0]
    tokens = isinstance(batch, torch.Tensor)
    inputs, targets = (batch, batch) if tokens else batch
    report = torchtest2.check_model(
        program.model,
        inputs,
        targets,
        optimizer=program.optimizer,
        forward_fn=lambda model, inputs, targets: {
            "loss": program.loss(inputs if tokens else (inputs, targets))
        },
        eval_forward_fn=lambda model, inputs: (
            model(input_ids=inputs).logits if tokens else model(inputs)
        ),
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


def by_lightning(program: Program) -> list[Remark]:
    import lightning

    class Wrapped(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = program.model, []

        def training_step(self, batch, index):
            loss = program.loss(batch)
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self):
            if program.schedule is None:
                return program.optimizer
            return [program.optimizer], [{"scheduler": program.schedule, "interval": "step"}]

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    quiet = dict(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    aids = dict(overfit_batches=1, detect_anomaly=True)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=OVERFIT, max_epochs=OVERFIT, **aids, **quiet
    )
    module = Wrapped()
    data = torch.utils.data.DataLoader(program.batches(STEPS), batch_size=None)
    said = _warned(lambda: trainer.fit(module, data))
    figures = (
        f"loss {module.losses[0]:.4g} to {module.losses[-1]:.4g} in {len(module.losses)} steps"
    )
    return [*said, Remark("INFO", "overfit_batches", figures)]


def by_hugging_face(program: Program) -> list[Remark]:
    import transformers as tf

    class Wrapped(tf.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return program.loss(inputs["batch"])

    with tempfile.TemporaryDirectory() as folder:
        quiet = dict(
            report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True, logging_steps=1
        )
        steps = dict(
            max_steps=STEPS,
            per_device_train_batch_size=1,
            remove_unused_columns=False,
            lr_scheduler_type="constant",
        )
        args = tf.TrainingArguments(output_dir=folder, debug="underflow_overflow", **steps, **quiet)
        trainer = Wrapped(
            model=program.model,
            args=args,
            train_dataset=program.batches(STEPS),
            data_collator=lambda rows: {"batch": rows[0]},
            optimizers=(program.optimizer, program.schedule),
        )
        trainer.remove_callback(tf.PrinterCallback)
        said = _warned(trainer.train)
    logs = [
        {k: float(v) for k, v in log.items() if k in ("loss", "grad_norm")}
        for log in trainer.state.log_history
    ]
    figures = [
        f"loss {log['loss']:.4g}, norm {log.get('grad_norm', math.nan):.4g}"
        for log in logs
        if "loss" in log
    ]
    return [*said, Remark("INFO", "log", "; ".join(figures))]


def _warned(work: Callable) -> list[Remark]:
    """Warnings of a Trainer; those that are not its own words about the program are not counted."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    texts = dict.fromkeys(str(w.message) for w in caught if w.category is not DeprecationWarning)
    return [
        Remark("INFO" if any(x in t for x in ASIDE) else "WARNING", _named(t), t) for t in texts
    ]


def _named(text: str) -> str:
    return " ".join(text.split()[:6])


PEERS: dict[str, Callable[[Program], list[Remark]]] = {
    "guardtower": by_guardtower,
    "torchtest2": by_torchtest2,
    "torch-audit": by_torch_audit,
    "lightning": by_lightning,
    "transformers": by_hugging_face,
}


def absent() -> list[str]:
    return [name for name in PEERS if importlib.util.find_spec(name.replace("-", "_")) is None]


def missing() -> str:
    """ "" when all peers are installed, else a sentence with the command that installs those that
    are not.
    """
    names = absent()
    return f"not installed here: {', '.join(names)}; pip install {' '.join(names)}" if names else ""


def everything() -> dict[str, Callable[[], Program]]:
    """Return the programs by name: ill and well, then each kind with its fault and without."""
    both = {"with its fault": False, "mended": True}
    kinds = {
        f"{kind}, {how}": partial(make, mended)
        for kind, make in programs.OF_KINDS.items()
        for how, mended in both.items()
    }
    return programs.ILL | {OVERFLOWED: programs.a_weight_overflowed} | programs.WELL | kinds


def ask(make: Callable[[], Program], who: Callable[[Program], list[Remark]]) -> list[Remark]:
    """Return the remarks of one package on a program made for it alone; an exception becomes a
    remark.
    """
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            return who(make())
        except Exception as error:
            return [Remark("RAISED", type(error).__name__, str(error))]


def consult(names: Iterable[str] | None = None) -> dict[str, dict[str, list[Remark]]]:
    """Return the remarks of the doctor and of every peer that is installed, by program and
    package.
    """
    makers = everything()
    askable = {"doctor": by_doctor} | {who: f for who, f in PEERS.items() if who not in absent()}
    chosen = makers if names is None else names
    return {name: {who: ask(makers[name], f) for who, f in askable.items()} for name in chosen}


def rows(remarks: dict[str, dict[str, list[Remark]]]) -> list[dict[str, str]]:
    """For a table: the faults each reports, as check names with how often; remarks of silent
    severities left out.
    """
    ill = {
        *programs.ILL,
        OVERFLOWED,
        *(name for name in remarks if name.endswith("with its fault")),
    }
    return [
        {"program": name, "is": "ill" if name in ill else "well"}
        | {who: _brief(of_one) for who, of_one in by_package.items()}
        for name, by_package in remarks.items()
    ]


def _brief(remarks: list[Remark]) -> str:
    counts = Counter(
        f"{r.severity} {r.check}" for r in map(Remark._make, remarks) if r.severity not in SILENT
    )
    return (
        ", ".join(f"{many} x {what}" if many > 1 else what for what, many in counts.items()) or "-"
    )


def published() -> tuple[str, dict[str, dict[str, list[Remark]]]]:
    """Return name and remarks of the newest record."""
    return newest(RECORD).name, read_published(RECORD)["said"]


def measure(path: Path, machine: runtime.Machine) -> dict:
    """Return the record, made in an environment that has what can be installed."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        python, refused = checkpointing_versions.environment(Path(folder), ()), {}
        for name in absent():
            pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", name]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                refused[name] = f"could not be installed: {done.stderr.strip().splitlines()[-1]}"

        found = os.pathsep.join(filter(None, sys.path))
        command = [python, "-m", "experiments.peers", "--report", path, json.dumps(refused)]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": found}, check=True)
    return files.read_json(path)


def report(path: Path, refused: dict[str, str]) -> None:
    """Store what everybody says, program after program, and none that the file holds already."""
    versions = {name: importlib.metadata.version(name) for name in PEERS if name not in absent()}
    store = Store(path, {"peers": versions | refused, "steps": STEPS}, lists=())
    said = store.content.setdefault("said", {})
    for name in everything():
        if name not in said:
            said |= consult([name])
            store.write()
            print(*rows({name: said[name]}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--report"]:
        report(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        command(RECORD, __doc__, measure)
