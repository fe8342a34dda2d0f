"""A Slurm of one node that lives in a folder and ends with the test: munged, slurmctld and slurmd
without systemd.

Needs Debian's slurm-wlm and munge, and root, since slurmd starts jobs as others. `why_not()` says
what is missing.

Footgun: Slurm holds a job that it queues again back for two minutes. Where nobody answered in
MessageTimeout, by default 10 s, it may send the order to end the old processes once more, which
would end the new ones as well. So whoever lets the job start at once (`again`) waits for what may
be on its way, and nothing is sent again for 100 s.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
CONF = """ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmUser=root
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
KillWait=60
MessageTimeout=100
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory={memory} State=UNKNOWN
PartitionName=lab Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return what keeps a Slurm from being started here; empty when nothing does."""
    for name in PROGRAMS:
        if not _find(name):
            return f"Slurm is not installed here (no {name}): apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "slurmd is started by root alone, who this user is not"
    return ""


@contextlib.contextmanager
def running() -> Iterator[Path]:
    """Start a Slurm that takes jobs, yield its folder, and end it.

    SLURM_CONF names its configuration while the block lasts.
    """
    folder = Path(tempfile.mkdtemp(prefix="nblib-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    conf = _write_configuration(folder)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(conf)
    daemons = []
    try:
        for command in _commands(folder, conf):
            daemons.append(_start(command, folder))
            time.sleep(0.5)
        _wait(lambda: "idle" in _ask("sinfo", "-h", "-o", "%T"), 60, folder)
        yield folder

        _ask("scancel", "--user", "root")
        with contextlib.suppress(TimeoutError):
            _wait(lambda: not _ask("squeue", "-h"), 30, folder)
    finally:
        for daemon in reversed(daemons):
            _end(daemon)
        os.environ.pop("SLURM_CONF")
        if before is not None:
            os.environ["SLURM_CONF"] = before
        shutil.rmtree(folder, ignore_errors=True)


def _write_configuration(folder: Path) -> Path:
    """Write slurm.conf and the key of munge, and return the path of the former."""
    for name in ("spool", "state"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)

    # Nine tenths of the memory of this machine, in MiB.
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines)
    memory = kib // 1024 * 9 // 10
    host = _host()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, host=host, ports=_free_ports(2), memory=memory))
    return conf


def _commands(folder: Path, conf: Path) -> list[list[str]]:
    """Return the commands of munged, slurmctld and slurmd, in the order in which they start."""
    munged = [
        _find("munged"),
        "--foreground",
        "--force",
        f"--key-file={folder}/munge.key",
        f"--socket={folder}/munge.socket",
        f"--log-file={folder}/munge.log",
        f"--seed-file={folder}/munge.seed",
        f"--pid-file={folder}/munge.pid",
    ]
    slurmctld = [_find("slurmctld"), "-D", "-f", str(conf)]
    slurmd = [_find("slurmd"), "-D", "-f", str(conf), "-N", _host()]
    return [munged, slurmctld, slurmd]


def _start(command: list[str], folder: Path) -> subprocess.Popen:
    with (folder / f"{Path(command[0]).name}.out").open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_end_with_us,
        )


def _end(daemon: subprocess.Popen) -> None:
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(20)
    except subprocess.TimeoutExpired:
        daemon.kill()


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]


def again(name: str) -> None:
    """Let a job that waits to be started once more start now; on a slow machine it may have done so
    by itself.
    """
    time.sleep(5)
    subprocess.run(["scontrol", "update", f"jobid={name}", "starttime=now"])


def _end_with_us() -> None:
    """Also when the test is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _wait(condition, seconds: float, folder: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(
                path.read_text(errors="replace")[-1500:] for path in folder.glob("*.o*")
            )
            raise TimeoutError(f"this Slurm is not ready:\n{logs}")
        time.sleep(0.2)
