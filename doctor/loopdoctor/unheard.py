"""What a forward tells the world, which a replay must not tell a second time.

    print(x.shape)  logger.info(...)  warnings.warn(...)        not heard while it is called once
                    more
    self.file.write(...)  writer.add_scalar(...)                not called once more at all
    numpy.savez(...)  path.write_text(...)                      ends a replay, before there is a
                      file

`print`, warnings and the loggers are silent for the thread that replays, and speak for all others.
What is written elsewhere can't be held back: a model whose forward names one of WRITES, itself or
through functions of the program that it names, is not replayed. Whatever else opens a file to write
it raises in that thread, and so ends the replay.

Footgun: names are compared, not objects. A program's own method named `write` (a memory's) is
followed instead, unless it names `write` again (a tee's). A library in C that opens a file by
itself is found by its name alone.
"""

import builtins
import contextlib
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator

WRITES = {
    "write",
    "writelines",
    "writerow",
    "writerows",
    "open",
    "dump",
    "save",
    "savetxt",
    "savefig",
    "to_csv",
}
WRITES |= {
    "imwrite",
    "write_png",
    "write_jpeg",
    "write_video",
    "to_parquet",
    "to_sql",
    "execute",
    "executemany",
}
WRITES |= {
    "add_scalar",
    "add_scalars",
    "add_histogram",
    "add_image",
    "add_images",
    "add_figure",
    "add_text",
}
WRITES |= {"log_metric", "log_metrics", "log_artifact", "wandb", "mlflow", "tqdm"}
WRITES |= {
    "put",
    "put_nowait",
    "get_nowait",
    "requests",
    "urlopen",
    "sendall",
    "subprocess",
    "system",
    "Popen",
}
CALLED = {"forward", "__call__", "<lambda>"}


def written(names: dict[str, set[str]], called: set[str]) -> set[str]:
    """Return what of WRITES the functions of these names, and those that they name, call. Given is
    what each of the program's functions names, by its own name.
    """
    known, called = set(), CALLED | called
    while called - known:
        known |= called
        called = set().union(*(names.get(name, ()) for name in known))
    return {name for name in known & WRITES if name in names.get(name, {name})}


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep this thread from printing, logging and warning, and from opening files to write."""
    owners = [(builtins, "print"), (logging.Logger, "handle"), (warnings, "showwarning")]
    before = [(owner, name, getattr(owner, name), _nothing) for owner, name in owners]
    before += [(owner, "open", owner.open, _reading(owner.open)) for owner in (builtins, io)]
    try:
        for owner, name, original, instead in before:
            setattr(owner, name, _but_for(threading.get_ident(), original, instead))
        yield
    finally:
        for owner, name, original, _ in before:
            setattr(owner, name, original)


def printed(*args, **kwargs) -> None:
    """In the place of a `print` that the program holds (log=print): this one is silent where print
    is.
    """
    builtins.print(*args, **kwargs)


def _but_for(thread: int, original: Callable, instead: Callable) -> Callable:
    def call(*args, **kwargs):
        return (instead if threading.get_ident() == thread else original)(*args, **kwargs)

    return call


def _nothing(*args, **kwargs) -> None:
    pass


def _reading(original: Callable) -> Callable:
    def call(file, mode="r", *args, **kwargs):
        if set(mode) & set("wax+"):
            raise RuntimeError(f"a replay would write {file} a second time")
        return original(file, mode, *args, **kwargs)

    return call
