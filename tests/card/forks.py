"""Imports torch with its card and the libraries once, and runs the programs of this folder, each in a fork of its own.

    python tests/card/forks.py     reads lines of JSON, [FILE, PROGRAM, ARGUMENT ...]

What the program says on stderr goes into FILE, the rest nowhere. Its process id is a line of the answer, the code that
it ended with the next one. Imports take longer than most of the programs; what a program does to torch dies with it.

Footgun: nothing may compute before a fork, because the threads of torch and of the tokenizers do not come along.
"""

import absent_card

absent_card.appear()

import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import runpy  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402

FAMILIES = ("qwen3", "qwen3_moe", "llama", "mixtral", "gpt2")  # transformers imports them when it meets their names
NEEDED = [f"transformers.models.{family}.modeling_{family}" for family in FAMILIES]
NEEDED += ["transformers.trainer", "peft", "IPython.core.formatters", "nblib.doctor", "nblib.hf", "nblib.run.show"]
NEEDED += ["lessons.trials", "lessons.exercises", "lessons.gpu_check", "lessons.method_steps"]


def run(file: str, program: str, *arguments: str) -> None:
    """In the fork: it ends here."""
    silent, error = os.open(os.devnull, os.O_WRONLY), os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(silent, 1), os.dup2(error, 2)
    sys.argv, code = [program, *arguments], 0
    try:
        runpy.run_path(str(absent_card.HERE / program), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def main() -> None:
    for name in NEEDED:
        importlib.import_module(name)
    for line in sys.stdin:
        if not (pid := os.fork()):
            run(*json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
