"""Validate notebooks by nbval: every cell runs again, and what the checked cells print is compared.

    python tests/validate.py                          those that differ from the last commit, or
                                                      from BASE=main
    python tests/validate.py 10 notebooks/01_...      those named
    python tests/validate.py --all --facts FOLDER
    all, with facts of pitfalls measured before (pitfall_cache.py)

The base model is made before, where one of them starts from it. Each notebook has a kernel of its
own with one thread. The method's notebooks come first: they take longest, and the short ones fill
up what is left.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nblib import paths
from nbworkbook import jobs, parameters

# seconds: for a cell that hangs; on a CPU without bf16 one may take ten minutes
CELL_TIMEOUT = 1800


def main() -> int:
    parser = argparse.ArgumentParser(prog="validate.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "notebooks", nargs="*", help="names or paths; without any, those that git sees changed"
    )
    parser.add_argument("--all", action="store_true", help="all notebooks")
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        choices=range(1, 17),
        metavar="N",
        help="notebooks at a time; 2",
    )
    parser.add_argument(
        "--facts", help="a folder with facts of pitfalls that this run of the suite wrote"
    )
    options, further = parser.parse_known_args()
    try:
        names = (
            jobs.names() if options.all else list(map(jobs.resolve, options.notebooks)) or changed()
        )
    except parameters.ParameterError as error:
        print(f"validate.py: {error}", file=sys.stderr)
        return 2
    if not names:
        print(
            f"No notebook differs from {since()}. Name some: make test-notebooks NOTEBOOKS='10 11', or make test-all"
        )
        return 0
    print(f"nbval: {' '.join(names)}", flush=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "NBLIB_BASE": str(paths.store())}
    os.environ["NBLIB_OUTPUTS"] = str(paths.root() / "outputs" / "nbval")
    if any(map(starts_from_the_base, names)):
        make_base()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "NBLIB_FACTS": os.path.abspath(options.facts) if options.facts else "",
    }
    files = [str(paths.notebooks() / f"{name}.ipynb") for name in sorted(names, reverse=True)]
    how = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "ipc_kernels",
        "-c",
        os.devnull,
        f"--rootdir={paths.root()}",
    ]
    how += [
        "--nbval-lax",
        "--nbval-current-env",
        f"--nbval-cell-timeout={CELL_TIMEOUT}",
        "--durations=10",
    ]
    how += [
        "-n",
        str(min(options.jobs, len(files))),
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
    ]
    return int(pytest.main([*how, *further, *files]))


def make_base() -> None:
    """Trains the stored base model if it is not there, with all threads, and shows it."""
    subprocess.run([sys.executable, "-m", "nbworkbook.base_model"], check=True)


def changed() -> list[str]:
    """Notebooks that git sees changed, or that it does not know yet."""
    listed = git("diff", "--name-only", "--diff-filter=d", "--relative", since(), "--", "*.ipynb")
    listed += git("ls-files", "--others", "--exclude-standard", "--", "*.ipynb")
    return sorted({Path(file).stem for file in listed if "/" not in file})


def since() -> str:
    return os.environ.get("BASE") or "HEAD"


def git(*arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", *arguments], cwd=paths.notebooks(), capture_output=True, text=True
    )
    if done.returncode:
        raise parameters.ParameterError(
            f"git {arguments[0]}: {done.stderr.strip().splitlines()[0]}"
        )
    return done.stdout.splitlines()


def starts_from_the_base(name: str) -> bool:
    code = "\n".join(
        cell["source"] for cell in parameters.cells(paths.notebooks() / f"{name}.ipynb")
    )
    return re.search(r"\b(base\.load|start\.open)\(", code) is not None


if __name__ == "__main__":
    sys.exit(main())
