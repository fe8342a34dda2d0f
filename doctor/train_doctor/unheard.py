"""What a forward tells the world, which a replay must not tell a second time.

    print(x.shape)  logger.info(...)  warnings.warn(...)        not heard while it is called once more
    self.file.write(...)  writer.add_scalar(...)  open(...)     not called once more at all

`print`, warnings and the loggers are silent for the thread that replays, and speak for all others. What is written
elsewhere can't be held back: a model whose forward names one of WRITES, itself or through functions of the program that
it names, is not replayed.

Footgun: names are compared, not objects. A program's own method named `write` (a memory's) is followed instead, and a
file that is written to by a function under another name is not found.
"""

import builtins
import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator

WRITES = {"write", "writelines", "writerow", "writerows", "open", "dump", "save", "savetxt", "savefig", "to_csv"}
WRITES |= {"add_scalar", "add_scalars", "add_histogram", "wandb", "mlflow", "tqdm", "system", "Popen"}
CALLED = {"forward", "__call__", "<lambda>"}


def written(names: dict[str, set[str]], called: set[str]) -> set[str]:
    """What of WRITES the functions of these names, and those that they name, call. Given is what each of the program's
    functions names, by its own name."""
    known, called = set(), CALLED | called
    while called - known:
        known |= called
        called = set().union(*(names.get(name, ()) for name in known))
    return known & WRITES - names.keys()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """This thread prints, logs and warns nothing."""
    owners = [(builtins, "print"), (logging.Logger, "handle"), (warnings, "showwarning")]
    before = [(owner, name, getattr(owner, name)) for owner, name in owners]
    try:
        for owner, name, original in before:
            setattr(owner, name, _but_for(threading.get_ident(), original))
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _but_for(thread: int, original: Callable) -> Callable:
    def call(*args, **kwargs):
        return None if threading.get_ident() == thread else original(*args, **kwargs)

    return call
