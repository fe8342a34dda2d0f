"""`nblib audit`: parameters, first steps and weights of a training, in the order in which one looks for a fault.

    nblib audit parameters/12_moe_muon.gpu.yaml      before it runs: what in the file contradicts itself
    nblib audit 12                                   its newest run: parameters, first steps, newest checkpoints
    nblib audit FOLDER                               weights alone: a checkpoint of ours or of anyone, in safetensors,
                                                     or a folder of checkpoints: the newest and the one before

The write-up on MoE and Muon changed precision, rates and architecture at once and had no step at which it looked. Its
sequence is kept here and each part asks one question: do the rates fit their optimizer (audit_parameters.py), did the
first hundred steps learn (audit_steps.py), what does the checkpoint hold (audit_weights.py)? A part describes first and
judges then. Every sentence that judges says what to do.

Exit code 0: nothing looks wrong; 1: something does; 2: it could not be read.

Footgun: the parts are read from files. Whether a gradient reaches a weight, only a step can show (`nblib doctor`).
"""

from pathlib import Path

from lessons import audit_parameters, audit_steps, audit_weights, track
from nblib import checkpoint, paths
from nblib.run import jobs, manage, parameters, runs
from nblib.run.parameters import ParameterError

INSIDE = 6  # columns before a finding


def main(target: str) -> int:
    """Print the audit of what is named so. ParameterError where there is nothing to audit."""
    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        found = of_parameters(path)
    elif path.is_file() or (path.is_dir() and _is_checkpoint(path)):
        found = of_weights(path)
    elif path.is_dir() and checkpoint.folders(path):
        found = of_training(path)
    else:
        found = of_run(_run(target))
    print(f"\n{len(found)} findings" if found else "\nnothing looks wrong")
    return 1 if found else 0


def of_parameters(path: Path) -> list[str]:
    told = audit_parameters.audit(path)
    print(f"parameters  {paths.short(path)}")
    return _say(told)


def of_weights(place: Path, earlier: Path | None = None) -> list[str]:
    """A table of kinds of tensors, and what is wrong with them."""
    try:
        told = audit_weights.integrity(place) if place.is_dir() else []
        measured = list(audit_weights.measure(place, earlier))
    except ValueError as error:
        raise ParameterError(f"{error}.") from None
    beside = f", compared with {earlier.name}" if earlier else ""
    print(f"weights  {paths.short(place)}{beside}")
    tensors = [t for t in measured if not isinstance(t, str)]
    if tensors:
        print("  " + runs.columns(audit_weights.table(tensors)).replace("\n", "\n  "))
    return _say(told + [t for t in measured if isinstance(t, str)] + audit_weights.findings(tensors))


def of_run(folder: Path) -> list[str]:
    """The three parts in order; a training without steps or checkpoints has fewer. Checkpoints deeper in the run's
    folder are of trainings that it compares, some of them faulty on purpose."""
    file, found, values = folder / "parameters.yaml", [], {}
    if file.is_file():
        found += of_parameters(file) if folder.parent.name in jobs.names() else []  # of a lesson's own runs
        values = parameters.load_yaml(file, depth=2)
    trainings = track.series(folder)
    for name, rows in trainings.items():
        print(f"steps  {name or 'the training'}, up to step {audit_steps.STEPS}")
        facts, told = audit_steps.judge(list(rows.values()), values)
        print("".join(f"  {fact}\n" for fact in facts), end="")
        found += _say(told)
    homes = sorted({path.parent for path in (folder / "checkpoints").rglob("step-*") if path.is_dir()})
    for home in (home for home in homes if home.parent.name == "checkpoints"):
        found += of_training(home)
    if deeper := [home for home in homes if home.parent.name != "checkpoints"]:
        print(f"{len(deeper)} trainings of comparisons are left out; audit one by its folder: {paths.short(deeper[0])}")
    if not file.is_file() and not trainings:
        raise ParameterError(f"{paths.short(folder)} has neither parameters nor metrics.")
    return found


def of_training(home: Path) -> list[str]:
    """Its newest checkpoint, compared with the one before."""
    newest, *before = checkpoint.folders(home) or [None]
    return of_weights(newest, next(iter(before), None)) if newest else []


def _run(target: str) -> Path:
    try:
        return manage.find(target)
    except ParameterError as error:
        if "/" not in target and not Path(target).exists():
            raise
        what = "there is no such file" if not Path(target).exists() else "no run, and no folder with .safetensors files"
        raise ParameterError(f"'{parameters.clip(target)}': {what}.") from error


def _is_checkpoint(folder: Path) -> bool:
    return not (folder / "run.json").exists() and any(
        path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt") for path in folder.iterdir()
    )


def _say(sentences: list[str]) -> list[str]:
    print("".join(f"{'':{INSIDE}}! {sentence}.\n" for sentence in sentences), end="", flush=True)
    return sentences
