"""Lines at the bottom of a terminal, rewritten in place; what is printed meanwhile goes above them.

Where the output is no terminal, or one that moves no cursor (TERM=dumb), only what is printed
arrives, without a control character. A line is cut at the width of the terminal, and of more lines
than its height allows the first ones stay.

Footgun: who prints to the same terminal without `print` of this class writes into the lines.
"""

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable
from typing import TextIO

EVERY = 1.0  # seconds between two drawings while nothing happens: the times in the lines go on
CLEAR_BELOW = "\x1b[J"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"  # a wide character at the edge makes no second line


class StatusLines:
    """`with StatusLines(texts) as lines`: `texts()` are the lines, `lines.print` is what stays."""

    def __init__(self, texts: Callable[[], list[str]], stream: TextIO | None = None) -> None:
        self.texts = texts
        self.stream = stream or sys.stdout
        self.is_live = _moves_cursor(self.stream)
        self.drawn = 0  # lines that stand on the terminal now
        self.told: set[str] = set()
        self.lock = threading.RLock()
        self.over = threading.Event()
        self.over.set()

    def __enter__(self) -> "StatusLines":
        self.over.clear()
        if self.is_live:
            threading.Thread(target=self._redraw, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.over.set()
            write(self.stream, self._erased())

    def _redraw(self) -> None:
        while not self.over.wait(EVERY):
            self.draw()

    def print(self, text: str, file: TextIO | None = None) -> None:
        """Print a line that stays, to the same stream or to another one of the same terminal."""
        with self.lock:
            if file is None:
                write(self.stream, f"{self._erased()}{text}\n{self._lines()}")
                return
            write(self.stream, self._erased())
            write(file, f"{text}\n")
            write(self.stream, self._lines())

    def print_once(self, text: str) -> None:
        """Print a line, unless it has been printed before."""
        if text not in self.told:
            self.told.add(text)
            self.print(text)

    def draw(self) -> None:
        """Draw the lines as they are now."""
        if self.is_live:
            with self.lock:
                write(self.stream, f"{self._erased()}{self._lines()}")

    def _erased(self) -> str:
        """Return what takes the lines away; the cursor is at the end of the last one."""
        if not self.drawn:
            return ""
        up = f"\x1b[{self.drawn - 1}A" if self.drawn > 1 else ""
        self.drawn = 0
        return f"\r{up}{CLEAR_BELOW}"

    def _lines(self) -> str:
        """Return what draws the lines."""
        if not self.is_live or self.over.is_set():
            return ""
        size = shutil.get_terminal_size()
        texts = [text for text in self.texts() if text][: max(1, size.lines - 1)]
        self.drawn = len(texts)
        cut = [
            "".join(c if c.isprintable() else " " for c in text)[: size.columns - 1]
            for text in texts
        ]
        return NO_WRAP + "\n".join(cut) + WRAP if cut else ""


def write(stream: TextIO, text: str) -> None:
    """Write text, whatever it holds, and whether or not anybody can still read it."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    # a closed pipe, a full disk: the work goes on; RuntimeError: a signal fell into another write
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def _moves_cursor(stream: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no file at all
        return stream.isatty() and os.environ.get("TERM", "") != "dumb"
    return False
