"""nbval's kernels on sockets in a folder of their own, as the runner's are: `-p ipc_kernels` beside
`--nbval`.

nbval asks for free TCP ports and hands their numbers to a kernel, which binds them a second later.
Two notebooks that start together can be given the same number, and then one of them waits for a
kernel that is not there.
"""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import nbval.kernel
from jupyter_client.manager import KernelManager

from nbworkbook.execute import socket_folder


class IpcKernelManager(KernelManager):
    """A manager whose kernel listens on files; they go when the kernel does."""

    def __init__(self, **options: Any):
        self.sockets, self.in_use = socket_folder()
        files = {
            "ip": str(self.sockets / "k"),
            "connection_file": str(self.sockets / "kernel.json"),
        }
        super().__init__(transport="ipc", **files, **options)

    def start_kernel(self, **how: Any) -> None:
        """A kernel is a session of its own. Linux may share the processors out by session first, so
        that a process which was made to stand back (`nice`) has a kernel that does not, unless the
        session is told.
        """
        super().start_kernel(**how)
        with contextlib.suppress(OSError):  # there is no such file elsewhere
            Path(f"/proc/{self.provisioner.pid}/autogroup").write_text(str(os.nice(0)))

    def shutdown_kernel(self, **how: Any) -> None:
        super().shutdown_kernel(**how)
        shutil.rmtree(self.sockets, ignore_errors=True)
        os.close(self.in_use)


nbval.kernel.KernelManager = IpcKernelManager
