"""What a kernel of the runner does differently, as an extension that IPython loads when the kernel
starts.

The lock on the run's folder came with the kernel's start (execute.py). The kernel holds it, so that
nobody else continues the run while it lives, and nothing that it forks or starts does. A scheduler
sends SIGTERM to every process of a job; it is for execute.py, which passes it on as the interrupt
that a cell can answer.

`pack` writes the kernel's messages: Jupyter lets a program choose it by name (`Session.packer`).
Half a character (a lone surrogate) then travels like all text, where Jupyter's own function would
lose the message.

Footgun: a handler of Python is not inherited by a program that is started, but it is by a fork. So
a fork gets the usual handler back.
"""

import json
import os
import signal
from typing import Any

from jupyter_client.jsonutil import json_clean, json_default
from jupyter_client.session import json_packer

from nbworkbook.run_record import RUN_LOCK


def load_ipython_extension(shell: Any) -> None:
    """Keep the lock in this process alone, and leave SIGTERM to the process above."""
    lock = int(os.environ.pop(RUN_LOCK))
    os.set_inheritable(lock, False)
    signal.signal(signal.SIGTERM, _leave_it_to_the_process_above)
    held = [lock]

    def forked() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if held:
            os.close(held.pop())

    os.register_at_fork(after_in_child=forked)


def _leave_it_to_the_process_above(*_: Any) -> None:
    pass


def pack(message: Any) -> bytes:
    """Return a message as JSON, a lone surrogate in it as its escape."""
    try:
        return json_packer(message)
    except UnicodeEncodeError:
        return json.dumps(json_clean(message), default=json_default).encode()
