"""Where the program called: the frame, and the call as it is written there.

A call may go through functions of torch in Python and through the wrappers of the watch. What the program wrote stands
in the first frame behind these, unless that is a library's.

Footgun: Python tells the place of a call since 3.11, in columns of bytes. A program whose text is not at hand (exec, a
zip) has frames and no text.
"""

import ast
import linecache
import sys
from types import FrameType

from train_doctor.waits import whose


def caller() -> FrameType | None:
    """The frame of the program that called a function of torch; None where a library did."""
    frame = sys._getframe(1)
    while frame is not None and whose(frame.f_code.co_filename) in ("torch", "doctor"):
        frame = frame.f_back
    return frame if frame is not None and whose(frame.f_code.co_filename) == "program" else None


def written(frame: FrameType) -> ast.Call | None:
    """The call that a frame is in, as it is written."""
    first, last, begins, ends = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if None in (first, last, begins, ends):
        return None
    lines = [linecache.getline(frame.f_code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:ends]
    lines[0] = lines[0][begins:]
    try:
        call = ast.parse(b"".join(lines).decode().strip(), mode="eval").body
    except (SyntaxError, UnicodeDecodeError):
        return None
    return call if isinstance(call, ast.Call) else None
