"""What the doctor says of the bench: faults named, twins and healthy programs left alone, and what
a watch costs.

    python -m bench                     the whole table
    python -m bench softmax gan_        programs whose names hold one of these
    python -m bench --json FILE         the same as data

Each program runs twice in a process of its own, plain and watched, forked from one that has
imported torch. A fault counts as named where the first error or warning is one of its `Names:`. For
a twin and a healthy program nothing is right to say. The numbers that a program leaves (weights,
the next draw) must be the same with and without the doctor.

Footgun: CPU seconds are those of this process alone; run it on a quiet machine before a figure is
quoted.
"""

import argparse
import contextlib
import hashlib
import io
import json
import linecache
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

import loopdoctor

from .programs import Program, programs

MODELS = ("transformers", "peft")  # imported once, before the processes are forked


def run(text: str, name: str, *, watched: bool) -> dict:
    """Run a program in this process; return what was said of it, its CPU seconds and a hash of what
    it left.
    """
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    linecache.checkcache()
    sys.argv = [str(path)]  # a program may read its arguments
    space = {"__name__": "__main__", "__file__": str(path)}
    code = compile(text, str(path), "exec")
    told: dict = {"said": [], "raised": ""}
    start = time.process_time()
    watch = loopdoctor.watch(say=False) if watched else contextlib.nullcontext()
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            watch as report,
        ):
            exec(code, space)
    except Exception:
        told["raised"] = traceback.format_exc(limit=-1)
    told["seconds"] = time.process_time() - start
    told["left"] = _left(space)
    if watched:
        told["said"] = [
            [f.check, f.severity, f.because] for f in report.findings if f.severity != "NOTE"
        ]
        told["where"] = [place for f in report.findings if not f.because for place in f.where][:1]
        told["faults"] = report.faults
    return told


def _left(space: dict) -> str:
    """Hash the numbers of the models that a program leaves, and the next random number."""
    digest = hashlib.sha256(torch.rand(1).numpy().tobytes())
    for value in space.values():
        tensors = value.state_dict().values() if isinstance(value, torch.nn.Module) else [value]
        for t in tensors:
            if isinstance(t, torch.Tensor) and t.layout == torch.strided:
                digest.update(t.detach().cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def apart(text: str, name: str, *, watched: bool) -> dict:
    """Do `run` in a forked process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            json.dump(run(text, name, watched=watched), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        written = pipe.read()
    os.waitpid(pid, 0)
    return (
        json.loads(written)
        if written
        else {"said": [], "raised": "the process ended", "seconds": 0.0, "left": ""}
    )


def examine(program: Program) -> dict:
    """What is said of a program, of its twin, and what the watch cost."""
    plain = apart(program.text, program.name, watched=False)
    watched = apart(program.text, program.name, watched=True)
    told = {
        "fault": program.fault,
        "names": program.names,
        "missed": program.missed,
        "said": watched["said"],
        "where": watched.get("where", []),
        "raised": watched["raised"],
        "faults": watched.get("faults", []),
        "same": plain["left"] == watched["left"],
        "extra": watched["seconds"] - plain["seconds"],
        "ratio": watched["seconds"] / plain["seconds"] if plain["seconds"] else 0.0,
    }
    if program.fault:
        twin = apart(program.twin, program.name, watched=True)
        told["twin"] = twin["said"]
        told["twin_raised"] = twin["raised"]
    told["verdict"] = verdict(told)
    return told


def verdict(told: dict) -> str:
    """Whether a fault was named first, in three, by its effect or not at all; or what a healthy
    program was told.
    """
    roots = [check for check, _, because in told["said"] if not because]
    if not told["fault"]:
        levels = [severity for _, severity, _ in told["said"]]
        return "error" if "ERROR" in levels else "warning" if levels else "silent"
    if roots[:1] and roots[0] in told["names"]:
        return "first"
    if any(check in told["names"] for check, *_ in told["said"][:3]):
        return "in three"
    return "by effect" if roots else "not seen"


def table(results: dict[str, dict]) -> str:
    """Write the figures, then each program that is not as it should be."""
    faults = {name: told for name, told in results.items() if told["fault"]}
    healthy = {name: told for name, told in results.items() if not told["fault"]}
    named = Counter(told["verdict"] for told in faults.values())
    blamed = Counter(told["verdict"] for told in healthy.values())
    twins = {name: told["twin"] for name, told in faults.items() if told["twin"]}
    alarms = Counter(check for told in healthy.values() for check, *_ in told["said"])
    lines = [
        f"faults           {len(faults):4}   "
        + ", ".join(
            f"{kind} {named[kind]}" for kind in ("first", "in three", "by effect", "not seen")
        ),
        f"twins            {len(faults):4}   silent {len(faults) - len(twins)}",
        f"healthy          {len(healthy):4}   silent {blamed['silent']}, with a warning "
        f"{blamed['warning']}, "
        f"with an error {blamed['error']}",
        f"same bits        {len(results):4}   {sum(told['same'] for told in results.values())}",
        "false alarms            "
        f"{', '.join(f'{check} {n}' for check, n in alarms.most_common()) or 'none'}",
    ]
    if results:
        extra = [told["extra"] for told in results.values()]
        ratios = [told["ratio"] for told in results.values()]
        lines.append(
            f"extra CPU seconds       median {statistics.median(extra):.2f}, most "
            f"{max(extra):.2f}; "
            f"ratio median {statistics.median(ratios):.2f}"
        )
    for name, told in results.items():
        wrong = (
            told["verdict"] not in ("first", "silent")
            or told.get("twin")
            or not told["same"]
            or told["faults"]
        )
        if wrong or told.get("twin_raised"):
            said = " ".join(check for check, *_ in told["said"]) or "nothing"
            twin = " ".join(check for check, *_ in told.get("twin", []))
            about = f"{name}: {told['verdict']}, said {said}"
            about += f", right {' '.join(told['names'])}" if told["fault"] else ""
            about += f", of the twin {twin}" if twin else ""
            about += "" if told["same"] else ", other bits"
            about += ", the watch itself failed" if told["faults"] else ""
            about += ", the twin raises" if told.get("twin_raised") else ""
            lines.append(about)
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="What the doctor says of the bench."
    )
    parser.add_argument(
        "parts", nargs="*", help="parts of the names of programs; all where none is given"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results as data")
    options = parser.parse_args()
    wanted = [
        p for p in programs() if not options.parts or any(part in p.name for part in options.parts)
    ]
    if not wanted:
        print(f"bench: no program's name holds {' or '.join(options.parts)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    for module in MODELS:
        with contextlib.suppress(ImportError):
            __import__(module)
    with loopdoctor.watch(say=False):  # imports what a watch needs, before the processes are forked
        pass
    results = {}
    for number, program in enumerate(wanted, 1):
        results[program.name] = examine(program)
        if sys.stderr.isatty():
            print(f"\r{number} of {len(wanted)}", end="", file=sys.stderr, flush=True)
    print(table(results))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
