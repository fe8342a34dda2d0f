"""Kill the kernel of a notebook at a checkpoint that is named beforehand.

`write` makes a copy of a notebook whose set-up cell calls `arm` at its end. From then on the
moments before and after each checkpoint are places: "before mixture 6", "after mixture 6". What is
reached is noted in the folder KILLS; whoever reaches the first place of the plan there takes it off
the list and dies of SIGKILL.

Cut out of the copy: the trials of pitfalls and the other demonstrations that the campaign of kills
leaves out (torture.SHORT), which have no state to lose, and what is printed about them.
"""

import json
import os
import re
import signal
from pathlib import Path

from nblib import checkpoint, paths

KILLS = "NBLIB_TEST_KILLS"
TRIAL = re.compile(r"^.*(?<!\.)\btrial[.(].*\n?", re.M)


def write(name: str, to: Path) -> None:
    import torture  # here, because a kernel can import this module and no other one beside it

    notebook = json.loads((paths.root() / "notebooks" / f"{name}.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    notebook["cells"] = [cell for cell in code if not torture.demonstrates(name, cell)]
    for cell in notebook["cells"]:
        source = TRIAL.sub("", "".join(cell["source"]))
        armed = (
            "\nimport kill_stages; kill_stages.arm(run)" if "run = runs.begin(" in source else ""
        )
        cell |= {"source": source + armed, "outputs": []}
    (to / f"{name}.ipynb").write_text(json.dumps(notebook))


def plan(places: list[str]) -> None:
    folder = Path(os.environ[KILLS])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(places))
    (folder / "reached.txt").write_text("")


def left() -> list[str]:
    return json.loads((Path(os.environ[KILLS]) / "plan.json").read_text())


def stages() -> dict[str, list[int]]:
    """The steps at which each stage wrote a checkpoint, in the order of the run."""
    found: dict[str, list[int]] = {}
    for place in (Path(os.environ[KILLS]) / "reached.txt").read_text().splitlines():
        when, stage, step = place.split(" ")
        if when == "after":
            found.setdefault(stage, []).append(int(step))
    return found


def arm(run) -> None:
    """In the kernel: from now on checkpoints are places."""
    real = checkpoint.save

    def save(folder, state, **options):
        place = (
            f"{Path(folder).relative_to(run.checkpoints)} {state['training']['progress']['step']}"
        )
        _reach(f"before {place}")
        written = real(folder, state, **options)
        _reach(f"after {place}")
        return written

    checkpoint.save = save


def _reach(place: str) -> None:
    with (Path(os.environ[KILLS]) / "reached.txt").open("a") as places:
        places.write(place + "\n")
    waiting = left()
    if waiting[:1] == [place]:
        (Path(os.environ[KILLS]) / "plan.json").write_text(json.dumps(waiting[1:]))
        os.kill(os.getpid(), signal.SIGKILL)
