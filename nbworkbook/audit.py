"""`nblib audit`: parameters, first steps and weights of a training, in the order in which one looks
for a fault.

    nblib audit parameters/12_moe_muon.gpu.yaml   before it runs: what in the file contradicts
                                                  itself
    nblib audit 12                                its newest run: parameters, first steps, newest
                                                  checkpoints
    nblib audit FOLDER                            weights alone: a checkpoint of ours or of anyone,
                                                  in safetensors, or a folder of checkpoints: the
                                                  newest and the one before

The write-up on MoE and Muon changed precision, rates and architecture at once and had no step at
which it looked. Its sequence is kept here, a question for each part: do the rates fit their
optimizer (audit_parameters.py), did the first hundred steps learn (audit_steps.py), what does the
checkpoint hold (audit_weights.py)? A part describes first and judges then. Every sentence that
judges says what to do.

Exit code 0: nothing looks wrong; 1: something does; 2: it could not be read.

Footgun: the parts are read from files. Whether a gradient reaches a weight, only a step can show
(`nblib doctor`).
"""

from collections.abc import Sequence
from pathlib import Path

from nblib import checkpoint, paths
from nbworkbook import (
    audit_parameters,
    audit_steps,
    audit_weights,
    jobs,
    manage,
    parameters,
    runs,
    track,
)
from nbworkbook.parameters import ParameterError

INSIDE = 6  # columns before a finding
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def main(target: str) -> int:
    """Print the audit of what is named so, and return the exit code.

    ParameterError where there is nothing to audit.
    """
    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        found = of_parameters(path)
    elif path.is_file() or (path.is_dir() and _is_checkpoint(path)):
        found = of_weights(path)
    elif path.is_dir() and checkpoint.folders(path):
        found = of_training(path)
    else:
        found = of_run(_find_run(target))
    print(f"\n{len(found)} findings" if found else "\nnothing looks wrong")
    return 1 if found else 0


def of_parameters(path: Path) -> list[str]:
    """Print and return what in a file of parameters contradicts itself."""
    findings = audit_parameters.audit(path)
    print(f"parameters  {paths.short(path)}")
    _print_findings(findings)
    return findings


def of_weights(place: Path, earlier: Path | None = None) -> list[str]:
    """Print a table of kinds of tensors, and print and return what is wrong with them."""
    try:
        findings = audit_weights.integrity(place) if place.is_dir() else []
        measured = list(audit_weights.measure(place, earlier))
    except ValueError as error:
        raise ParameterError(f"{error}.") from None

    tensors = []
    for each in measured:
        if isinstance(each, str):  # a file that cannot be read
            findings.append(each)
        else:
            tensors.append(each)
    findings += audit_weights.findings(tensors)

    beside = f", compared with {earlier.name}" if earlier else ""
    print(f"weights  {paths.short(place)}{beside}")
    for line in provenance(place):
        print(f"  {line}")
    if tensors:
        table = runs.columns(audit_weights.table(tensors))
        print("  " + table.replace("\n", "\n  "))
    _print_findings(findings)
    return findings


def provenance(place: Path) -> list[str]:
    """Return what meta.json of a checkpoint tells; nothing where there is none."""
    meta = checkpoint.read_meta(place)
    if not meta:
        return []
    writer = meta.get("written_by") or {}
    versions = meta.get("versions") or {}
    parameters = meta.get("parameters") or {}

    # what was reached, who wrote it, and with which values
    lines = [
        f"step {meta.get('step')}, loss {_rounded(meta.get('loss'))}, {meta.get('model')}, "
        f"{meta.get('saved_numbers', 0):,} saved numbers",
        f"written {meta.get('date')} by {writer.get('program')} on {writer.get('host')}, "
        f"processes: {writer.get('processes')}",
        ", ".join(f"{package} {version}" for package, version in versions.items()),
    ]
    if parameters:
        lines.append(", ".join(f"{name} = {value}" for name, value in parameters.items()))
    return lines


def _rounded(loss: object) -> str:
    return f"{loss:.4f}" if isinstance(loss, float) else str(loss)


def of_run(folder: Path) -> list[str]:
    """Print and return the findings of the three parts, in order.

    A training without steps or checkpoints has fewer parts. Checkpoints deeper in the run's folder
    are of trainings that it compares, some of them faulty on purpose.
    """
    findings = []

    # The parameters. A run of a lesson has some that belong to no notebook.
    file = folder / "parameters.yaml"
    values = {}
    if file.is_file():
        if folder.parent.name in jobs.names():
            findings += of_parameters(file)
        values = parameters.load_yaml(file, depth=2)

    # The first steps of each training.
    trainings = track.series(folder)
    for name, rows in trainings.items():
        print(f"steps  {name or 'the training'}, up to step {audit_steps.STEPS}")
        judged = audit_steps.judge(list(rows.values()), values)
        for fact in judged.facts:
            print(f"  {fact}")
        _print_findings(judged.findings)
        findings += judged.findings

    # The newest checkpoint of each training.
    steps = (folder / "checkpoints").rglob("step-*")
    homes = sorted({path.parent for path in steps if path.is_dir()})
    deeper = [home for home in homes if home.parent.name != "checkpoints"]
    for home in homes:
        if home not in deeper:
            findings += of_training(home)
    if deeper:
        print(
            f"{len(deeper)} trainings of comparisons are left out; audit one by its folder: "
            f"{paths.short(deeper[0])}"
        )

    if not file.is_file() and not trainings:
        raise ParameterError(f"{paths.short(folder)} has neither parameters nor metrics.")
    return findings


def of_training(home: Path) -> list[str]:
    """Print and return the findings of a training's newest checkpoint, compared with the one
    before.
    """
    newest_first = checkpoint.folders(home)
    if not newest_first:
        return []
    before = newest_first[1] if len(newest_first) > 1 else None
    return of_weights(newest_first[0], before)


def _find_run(target: str) -> Path:
    try:
        return manage.find(target)
    except ParameterError as error:
        exists = Path(target).exists()
        if "/" not in target and not exists:
            raise
        problem = (
            "no run, and no folder with .safetensors files" if exists else "there is no such file"
        )
        raise ParameterError(f"'{parameters.clip(target)}': {problem}.") from error


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is no run and holds weights in some format."""
    if (folder / "run.json").exists():
        return False
    return any(path.suffix in WEIGHTS for path in folder.iterdir())


def _print_findings(findings: Sequence[str]) -> None:
    for sentence in findings:
        print(f"{'':{INSIDE}}! {sentence}.", flush=True)
