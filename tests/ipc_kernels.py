"""nbval's kernels on sockets in a folder of their own, as the runner's are: `-p ipc_kernels` beside `--nbval`.

nbval asks for free TCP ports and hands their numbers to a kernel, which binds them a second later. Two notebooks that
start together can be given the same number, and then one of them waits for a kernel that is not there.
"""

import os
import shutil
from typing import Any

import nbval.kernel
from jupyter_client.manager import KernelManager

from nblib.run.execute import socket_folder


class IpcKernelManager(KernelManager):
    """A manager whose kernel listens on files; they go when the kernel does."""

    def __init__(self, **options: Any):
        self.sockets, self.in_use = socket_folder()
        files = {"ip": str(self.sockets / "k"), "connection_file": str(self.sockets / "kernel.json")}
        super().__init__(transport="ipc", **files, **options)

    def shutdown_kernel(self, **how: Any) -> None:
        super().shutdown_kernel(**how)
        shutil.rmtree(self.sockets, ignore_errors=True)
        os.close(self.in_use)


nbval.kernel.KernelManager = IpcKernelManager
